"""Optimizers composed from interchangeable parts: declare a recipe, get a `torch.optim.Optimizer`."""

from eigengraft.optimizers import Inspection as Inspection
from eigengraft.optimizers import MaxLogits as MaxLogits
from eigengraft.optimizers import Measurement as Measurement
from eigengraft.optimizers import Optimizer as Optimizer
from eigengraft.optimizers import Recipe as Recipe
from eigengraft.optimizers import Route as Route
from eigengraft.optimizers import RoutedParameter as RoutedParameter
from eigengraft.optimizers import compose as compose
from eigengraft.optimizers import gauss_newton_bartlett as gauss_newton_bartlett
from eigengraft.optimizers import hutchinson as hutchinson
from eigengraft.optimizers import load_recipe as load_recipe
from eigengraft.optimizers import shipped_recipes as shipped_recipes
from eigengraft.optimizers import watch_inputs as watch_inputs
from eigengraft.optimizers import watch_logits as watch_logits
from eigengraft.optimizers import watch_output_gradients as watch_output_gradients
from eigengraft.preconditioners import Stage as Stage

from .chains import Signal as Signal
from .chains import register_signal as register_signal
from .component import Component as Component
from .component import ContractError as ContractError
from .component import RecipeError as RecipeError
from .slots import Slot as Slot
from .slots import State as State
from .step_context import StepContext as StepContext

__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    known = (
        f"; recipes are names: eigengraft.compose('{name.lower()}', model)" if name.lower() in shipped_recipes() else ""
    )
    raise AttributeError(f"module 'eigengraft' has no attribute '{name}'{known}")
