"""Tasks whose data are computed: arithmetic modulo a number, and sequences that are sorted, reversed or copied."""

from .modular_addition import ModularAddition as ModularAddition
from .sequences import SequenceToSequence as SequenceToSequence
