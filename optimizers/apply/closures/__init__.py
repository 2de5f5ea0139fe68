"""What calls the closure of a step again: gradients of a neighbourhood, step sizes that a loss decides on."""

from .line_search import LineSearch as LineSearch
from .line_search import Search as Search
from .sharpness import SharpnessAware as SharpnessAware
from .sharpness import loss_of as loss_of
