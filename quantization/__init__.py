"""How slots are stored. A quantizer encodes a slot when a stage writes it, and decodes it when a stage reads it.

Stages do not know how their slots are stored.
"""

from .base import Quantizer as Quantizer
from .base import choose as choose
from .base import choose_codec as choose_codec
from .contrib.formats import FP8 as FP8
from .contrib.formats import Int3 as Int3
from .contrib.formats import UInt8 as UInt8
from .formats.codebook_formats import Codebook8 as Codebook8
from .formats.codebook_formats import Int4 as Int4
from .formats.floats import BFloat16 as BFloat16
from .formats.floats import Float32 as Float32
from .formats.floats import SplitFloat as SplitFloat
from .formats.integers import Int8 as Int8
from .formats.integers import Int16 as Int16
from .offload import Offload as Offload
from .structures.cholesky import Cholesky as Cholesky
from .structures.eigen import Eigen as Eigen
from .structures.exact_diagonal import ExactDiagonal as ExactDiagonal
from .structures.orthogonal import Orthogonal as Orthogonal
from .structures.symmetric import Symmetric as Symmetric
