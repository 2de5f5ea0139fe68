"""What hosts need before any of them is imported."""

from . import operators as operators
