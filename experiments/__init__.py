"""Experiments: tasks, training runs, studies, benches, reports and the command line.

The public names below are imported when they are first used, so that importing this package does not import torch.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .doctor import Diagnosis as Diagnosis
    from .doctor import Finding as Finding
    from .doctor import diagnose as diagnose
    from .doctor import diagnose_all as diagnose_all
    from .reports.report import Report as Report
    from .reports.tables import load_metrics as load_metrics
    from .reports.tables import load_runs as load_runs
    from .run_log import RunLog as RunLog
    from .run_log import import_run as import_run
    from .studies.running import complete_study as complete_study
    from .studies.study import Study as Study
    from .studies.study import load_study as load_study
    from .training.experiment import Experiment as Experiment
    from .training.experiment import load_experiment as load_experiment
    from .training.outcome import Result as Result
    from .training.outcome import Tick as Tick
    from .training.train import train as train

_HOMES = {
    "doctor": ("Diagnosis", "Finding", "diagnose", "diagnose_all"),
    "reports.report": ("Report",),
    "reports.tables": ("load_metrics", "load_runs"),
    "run_log": ("RunLog", "import_run"),
    "studies.running": ("complete_study",),
    "studies.study": ("Study", "load_study"),
    "training.experiment": ("Experiment", "load_experiment"),
    "training.outcome": ("Result", "Tick"),
    "training.train": ("train",),
}
"""Mapping from a module of this package to the public names that the module defines."""
__all__ = sorted(name for names in _HOMES.values() for name in names)


def __getattr__(name: str) -> object:
    """Import, store and return a public name or a module of this package. Python calls this only for names that are not
    stored yet.
    """
    home = next((home for home, names in _HOMES.items() if name in names), None)
    if home is not None:
        found = getattr(import_module(f"{__name__}.{home}"), name)
    elif not name.startswith("_") and find_spec(f"{__name__}.{name}") is not None:
        found = import_module(f"{__name__}.{name}")
    else:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return [*__all__]
