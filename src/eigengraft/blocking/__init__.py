"""The blocks of a parameter. A view says which entries of the parameter form a matrix. Then small axes of matrices are
merged, and long ones split.
"""

from .blocks import BlockGrid as BlockGrid
from .blocks import Blocking as Blocking
from .stacks import MatrixSide as MatrixSide
from .stacks import SideMatrix as SideMatrix
from .views import Batches as Batches
from .views import Factor as Factor
from .views import Matrices as Matrices
from .views import ModuleFacts as ModuleFacts
from .views import Modules as Modules
from .views import Pairs as Pairs
from .views import View as View
from .views import ViewChoice as ViewChoice
from .views import Whole as Whole
from .views import is_convolution as is_convolution
from .views import is_transposed as is_transposed
from .views import module_facts as module_facts
from .views import named_factor as named_factor
from .views import parametrized_layer as parametrized_layer
from .views import stacked_rows as stacked_rows
