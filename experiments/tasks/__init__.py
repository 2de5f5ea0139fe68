"""Tasks: each has data, a model and a loss. `model_shapes` has models without data: names and shapes of parameters."""

from .algorithmic import ModularAddition as ModularAddition
from .algorithmic import SequenceToSequence as SequenceToSequence
from .base import Batch as Batch
from .base import Dataset as Dataset
from .base import Examples as Examples
from .base import Fingerprint as Fingerprint
from .base import LabelError as LabelError
from .base import Metrics as Metrics
from .base import Task as Task
from .base import TaskError as TaskError
from .base import data_fault as data_fault
from .base import generator as generator
from .base import label_fault as label_fault
from .base import validation_fault as validation_fault
from .byte_lm import ByteLM as ByteLM
from .equations import DifferentialEquation as DifferentialEquation
from .images import MNIST1D as MNIST1D
from .images import MNIST5K as MNIST5K
from .images import Digits as Digits
from .images import FashionMNIST as FashionMNIST
