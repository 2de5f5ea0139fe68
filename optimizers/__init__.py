"""Recipes, and the optimizers that are made from them."""

from .checkpoint.consolidation import ConsolidateOnSave as ConsolidateOnSave
from .convert_adamw import convert_adamw as convert_adamw
from .convert_storage import convert_storage as convert_storage
from .inspect.reporting import RoutedParameter as RoutedParameter
from .inspect.table import Inspection as Inspection
from .inspect.table import Measurement as Measurement
from .models.composer import compose as compose
from .models.composer import grouped as grouped
from .models.composer import submodel as submodel
from .models.curvature import gauss_newton_bartlett as gauss_newton_bartlett
from .models.curvature import hutchinson as hutchinson
from .models.gradient_sums import watch_gradient_variance as watch_gradient_variance
from .models.layer_grams import LayerGrams as LayerGrams
from .models.layer_grams import watch_inputs as watch_inputs
from .models.layer_grams import watch_output_gradients as watch_output_gradients
from .models.logits import MaxLogits as MaxLogits
from .models.logits import watch_logits as watch_logits
from .models.release import release as release
from .optimizer import Optimizer as Optimizer
from .recipe.loading import load_recipe as load_recipe
from .recipe.loading import shipped_recipes as shipped_recipes
from .recipe.recipe import Recipe as Recipe
from .recipe.recipe import Route as Route
from .write.write import WeightDecay as WeightDecay
