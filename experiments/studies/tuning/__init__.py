"""Searches that tune every cell of a study before cells are compared: kinds of search and the runs that they need."""

from .descent import CoordinateDescent as CoordinateDescent
from .sampled import TPE as TPE
from .sampled import Random as Random
