"""Signals of an optimizer, from those who provide them to the step that takes them. Parameter sets come in here."""

from .partners import Steps as Steps
from .partners import with_partners as with_partners
from .signals import OWN as OWN
from .signals import Given as Given
from .signals import Signals as Signals
from .signals import SignalSource as SignalSource
