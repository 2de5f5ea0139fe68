"""How a parameter becomes blocks: which of its entries form a matrix (views), then merging and splitting."""

from .block_grid import BlockGrid as BlockGrid
from .layers import is_convolution as is_convolution
from .layers import is_transposed as is_transposed
from .layers import parametrized_layer as parametrized_layer
from .matrices import Matrices as Matrices
from .matrices import ModuleFacts as ModuleFacts
from .matrices import View as View
from .matrices import ViewChoice as ViewChoice
from .module_views import module_facts as module_facts
from .pairs import Factor as Factor
from .pairs import named_factor as named_factor
from .pairs import stacked_rows as stacked_rows
from .rule import Blocking as Blocking
from .side_blocks import MatrixSide as MatrixSide
from .side_blocks import SideMatrix as SideMatrix
from .views import Batches as Batches
from .views import Modules as Modules
from .views import Pairs as Pairs
from .views import Whole as Whole
