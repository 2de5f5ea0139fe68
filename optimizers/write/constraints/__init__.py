"""Constraints: what keeps parameters where they should be, before and after every write. Each is one file."""

from .base import Constraint as Constraint
from .base import ConstraintContext as ConstraintContext
from .base import Constraints as Constraints
from .base import Slots as Slots
from .hyperball import Hyperball as Hyperball
from .late_decay import LateDecay as LateDecay
from .qk_clip import QKClip as QKClip
from .radial_brake import RadialBrake as RadialBrake
from .radius_pin import RadiusPin as RadiusPin
from .rounding_rule import Rounding as Rounding
from .row_floor import RowFloor as RowFloor
