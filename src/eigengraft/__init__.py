"""Optimizers composed from interchangeable parts: declare a recipe, get a `torch.optim.Optimizer`."""

from .clock import Clock as Clock
from .component import Component as Component
from .component import RecipeError as RecipeError
from .optimizers import Assignment as Assignment
from .optimizers import Optimizer as Optimizer
from .optimizers import Recipe as Recipe
from .optimizers import Route as Route
from .optimizers import compose as compose
from .optimizers import load_recipe as load_recipe
from .optimizers import shipped_recipes as shipped_recipes
from .preconditioners import Preconditioner as Preconditioner
from .slots import Slot as Slot
from .slots import State as State

__version__ = "0.1.0"
