"""Tuning of every cell of a study before cells are compared: kinds of search, what they found, and their next runs."""

from .descent import CoordinateDescent as CoordinateDescent
from .sampled import TPE as TPE
from .sampled import Random as Random
