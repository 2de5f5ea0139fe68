"""Tasks to train: the family `task`, its members and their models; models as shapes alone."""

from .base import Batch as Batch
from .base import Dataset as Dataset
from .base import Fingerprint as Fingerprint
from .base import Metrics as Metrics
from .base import Task as Task
from .byte_lm import ByteLM as ByteLM
from .digits import Digits as Digits
