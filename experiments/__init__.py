"""Experiments: tasks on real data, training runs, studies, reports and the command line."""

from .experiment import Experiment as Experiment
from .loading import load_experiment as load_experiment
from .outcome import Result as Result
from .outcome import Tick as Tick
from .train import train as train
