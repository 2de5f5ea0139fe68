"""Statistics: the second moments of the gradient that Kronecker factors accumulate, one for each axis of a block."""

from .base import Statistic as Statistic
from .bregman import Bregman as Bregman
from .gram import Gram as Gram
from .input_gram import InputGram as InputGram
from .terms import Contribution as Contribution
from .terms import Power as Power
from .terms import Powers as Powers
from .terms import has_data as has_data
from .terms import mean_eigenvalue as mean_eigenvalue
