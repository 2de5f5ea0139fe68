"""An optimizer together with its model: `compose`, and signals that need a forward or a backward. Users import from
here.
"""

from .composer import compose as compose
from .composer import grouped as grouped
from .composer import submodel as submodel
from .curvature import gauss_newton_bartlett as gauss_newton_bartlett
from .curvature import hutchinson as hutchinson
from .gradient_variance import watch_gradient_variance as watch_gradient_variance
from .layer_grams import LayerGrams as LayerGrams
from .layer_grams import watch_inputs as watch_inputs
from .layer_grams import watch_output_gradients as watch_output_gradients
from .logits import MaxLogits as MaxLogits
from .logits import watch_logits as watch_logits
from .release import Release as Release
from .release import release as release
