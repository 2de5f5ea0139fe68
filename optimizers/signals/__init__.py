"""Signals of an optimizer: sources, gathering over ranks, and delivery to the step. Parameter sets import from here."""

from .partners import Steps as Steps
from .partners import with_partners as with_partners
from .signals import OWN as OWN
from .signals import Given as Given
from .signals import Signals as Signals
from .signals import SignalSource as SignalSource
