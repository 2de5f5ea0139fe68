"""Optimizers composed from interchangeable parts: declare a recipe, get a `torch.optim.Optimizer`.

The library, and torch with it, is imported when a public name is read for the first time. The help of the command line
reads no public name, and is therefore fast.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from eigengraft.optimizers import (
        Inspection,
        MaxLogits,
        Measurement,
        Optimizer,
        Recipe,
        Route,
        RoutedParameter,
        compose,
        gauss_newton_bartlett,
        hutchinson,
        load_recipe,
        release,
        shipped_recipes,
        watch_gradient_variance,
        watch_inputs,
        watch_logits,
        watch_output_gradients,
    )
    from eigengraft.preconditioners import Inner, Stage, Traits

    from .component import Component
    from .errors import ContractError, RecipeError
    from .signals import Request, Signal, register_signal
    from .slots import Slot, State
    from .step_context import StepContext

__version__ = "0.2.0"
__all__ = [
    "Component",
    "ContractError",
    "Inner",
    "Inspection",
    "MaxLogits",
    "Measurement",
    "Optimizer",
    "Recipe",
    "RecipeError",
    "Request",
    "Route",
    "RoutedParameter",
    "Signal",
    "Slot",
    "Stage",
    "State",
    "StepContext",
    "Traits",
    "compose",
    "gauss_newton_bartlett",
    "hutchinson",
    "load_recipe",
    "register_signal",
    "release",
    "shipped_recipes",
    "watch_gradient_variance",
    "watch_inputs",
    "watch_logits",
    "watch_output_gradients",
]
_HOMES = ("optimizers", "preconditioners", "component", "signals", "slots", "step_context")


def __getattr__(name: str) -> object:
    """Return the public object or the module called `name`. Store it in the package, so that Python calls this
    function once for each name.
    """
    if name in __all__:
        homes = [vars(import_module(f"eigengraft.{home}")) for home in _HOMES]
        found = next(home[name] for home in homes if name in home)
    elif not name.startswith("_") and find_spec(f"eigengraft.{name}") is not None:
        found = import_module(f"eigengraft.{name}")
    else:
        raise AttributeError(f"module 'eigengraft' has no attribute '{name}'{_recipe_hint(name.lower())}")
    globals()[name] = found
    return found


def _recipe_hint(name: str) -> str:
    if name.startswith("_") or name not in import_module("eigengraft.optimizers").shipped_recipes():
        return ""
    return f"; recipes are names: eigengraft.compose('{name}', model)"


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
