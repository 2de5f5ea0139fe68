"""timm: recipes as entries of its registry of optimizers, with the names of a model."""

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
    """Makes a recipe an optimizer of timm for a model, and returns its name there.

    `timm.optim.create_optimizer_v2(model, register("soap", model), lr=3e-3, layer_decay=0.75)`. timm's groups by layer
    and by decay stay; their `lr_scale` is what timm's schedulers read.

    name: what timm is to call it; default "eigengraft." and the recipe's name with "-" for "_", which timm cuts off.
        A name that was registered before is replaced.
    overrides: changes of the recipe, as `compose` takes them.
    """
    if name is None and not isinstance(recipe, str):
        raise ValueError(f"register: a name is required for a recipe without one, got {type(recipe).__name__}")
    chosen = (name or f"eigengraft.{recipe}").lower().replace("_", "-").replace("/", ".")
    owner = weakref.ref(model)

    def optimizer(
        params: Iterable[Any], lr: float | None = None, weight_decay: float = 0.0, **options: Any
    ) -> Optimizer:
        model = owner()
        if model is None:
            raise RuntimeError(f"{chosen}: the model that it was registered for is required, which is gone")
        groups = [entry if isinstance(entry, dict) else {"params": [entry]} for entry in params]
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "param group: '(lr_scale|use_fallback)' stays", UserWarning)
            return compose(recipe, grouped(model, groups), lr, weight_decay, overrides=overrides)

    about = f"eigengraft's recipe {recipe if isinstance(recipe, str) else chosen}"
    default_registry.register(OptimInfo(name=chosen, opt_class=optimizer, description=about, has_eps=False))
    return chosen
