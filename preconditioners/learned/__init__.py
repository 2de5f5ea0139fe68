"""Factors that are learned directly, without a statistic and its root: Jorge, PSGD, SIRF."""

from .base import LearnedFactors as LearnedFactors
from .jorge import Jorge as Jorge
from .psgd import PSGD as PSGD
from .sirf import SIRF as SIRF
