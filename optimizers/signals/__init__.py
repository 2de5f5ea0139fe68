"""Signals (values that stages request beside gradients): who provides them, and how they reach steps and ranks."""

from .partners import with_partners as with_partners
from .signals import OWN as OWN
from .signals import Given as Given
from .signals import Signals as Signals
from .signals import SignalSource as SignalSource
