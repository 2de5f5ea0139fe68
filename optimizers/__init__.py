"""Recipes, and the optimizers they become."""

from .apply.weight_decay import WeightDecay as WeightDecay
from .checkpoint.trainer_callback import ConsolidateOnSave as ConsolidateOnSave
from .composer import compose as compose
from .composer import submodel as submodel
from .convert_storage import convert_storage as convert_storage
from .inspection.reporting import RoutedParameter as RoutedParameter
from .inspection.table import Inspection as Inspection
from .inspection.table import Measurement as Measurement
from .optimizer import Optimizer as Optimizer
from .recipe.loading import load_recipe as load_recipe
from .recipe.loading import shipped_recipes as shipped_recipes
from .recipe.recipe import Recipe as Recipe
from .recipe.recipe import Route as Route
