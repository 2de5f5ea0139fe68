"""What calls the closure of a step again: gradients of a neighbourhood, step sizes that a loss decides on."""

from .line_search import LineSearch as LineSearch
from .line_search import Search as Search
from .passes import Buffers as Buffers
from .passes import Passes as Passes
from .passes import require_closure as require_closure
from .sharpness import SharpnessAware as SharpnessAware
