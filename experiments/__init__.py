"""Experiments: tasks, training runs, studies, benches, reports and the command line, above the whole library."""

from .training.experiment import Experiment as Experiment
from .training.loading import load_experiment as load_experiment
from .training.outcome import Result as Result
from .training.outcome import Tick as Tick
from .training.train import train as train
