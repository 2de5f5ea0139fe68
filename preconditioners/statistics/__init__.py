"""Statistics: for each axis of a block, a mean of second moments of the gradient, from which a stage computes a root
or basis.
"""

from .bregman import Bregman as Bregman
from .statistic import Contribution as Contribution
from .statistic import Gram as Gram
from .statistic import InputGram as InputGram
from .statistic import Power as Power
from .statistic import Powers as Powers
from .statistic import Statistic as Statistic
from .statistic import has_data as has_data
from .statistic import mean_eigenvalue as mean_eigenvalue
