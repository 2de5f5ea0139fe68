"""timm: recipes as optimizers in timm's registry. A recipe is registered for one model, because it needs the names of
the model's parameters.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable
from typing import Any

from timm.optim import OptimInfo
from timm.optim._optim_factory import default_registry
from torch import nn

from eigengraft import Optimizer, compose
from eigengraft.optimizers import grouped


def register(recipe: Any, model: nn.Module, name: str | None = None, *, overrides: Any = ()) -> str:
    """Register a recipe as an optimizer of timm for a model.

    `timm.optim.create_optimizer_v2(model, register("soap", model), lr=3e-3, layer_decay=0.75)`. timm's groups by layer
    and by decay are kept, and timm's schedulers read their `lr_scale`.

    Args:
        recipe: the recipe, as `compose` accepts it.
        model: the model whose parameters the optimizer receives.
        name: name in timm. An earlier registration of the name is replaced. None: "eigengraft." and the recipe's name,
            with "-" for "_", because timm cuts names off at "_".
        overrides: changes of the recipe, as `compose` accepts them.

    Returns:
        The name in timm.

    Raises:
        ValueError: `name` is None, and the recipe is not given by its name.
    """
    if name is None and not isinstance(recipe, str):
        raise ValueError(f"register: a recipe that is not given by its name needs `name`, got {type(recipe).__name__}")
    chosen = (name or f"eigengraft.{recipe}").lower().replace("_", "-").replace("/", ".")
    owner = weakref.ref(model)

    def optimizer(
        params: Iterable[Any], lr: float | None = None, weight_decay: float = 0.0, **options: Any
    ) -> Optimizer:
        model = owner()
        if model is None:
            raise RuntimeError(
                f"{chosen}: the model of this optimizer no longer exists; register the optimizer for a new model"
            )
        groups = [entry if isinstance(entry, dict) else {"params": [entry]} for entry in params]
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "param group: '(lr_scale|use_fallback)' stays", UserWarning)
            return compose(recipe, grouped(model, groups), lr, weight_decay, overrides=overrides)

    about = f"eigengraft's recipe {recipe if isinstance(recipe, str) else chosen}"
    default_registry.register(OptimInfo(name=chosen, opt_class=optimizer, description=about, has_eps=False))
    return chosen
