"""Experiments: tasks, training runs, studies, benches, reports and the command line, above the whole library.

The names below are imported when one of them is asked for, as those of `eigengraft` are.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .training.experiment import Experiment
    from .training.loading import load_experiment
    from .training.outcome import Result, Tick
    from .training.train import train

__all__ = ["Experiment", "Result", "Tick", "load_experiment", "train"]


def __getattr__(name: str) -> object:
    """A public name, or a module of the experiments; each is asked for here once."""
    if name in __all__:
        homes = [vars(import_module(f"{__name__}.training.{home}")) for home in ("train", "loading")]
        found = next(home[name] for home in homes if name in home)
    elif not name.startswith("_") and find_spec(f"{__name__}.{name}") is not None:
        found = import_module(f"{__name__}.{name}")
    else:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return [*__all__]
