"""The write of an update into a parameter: weight decay, constraints, averaging, and steps that call closures again."""

from .averaging import EMA as EMA
from .averaging import LAWA as LAWA
from .averaging import Averaging as Averaging
from .averaging import IterateBatch as IterateBatch
from .averaging import PrimalAveraging as PrimalAveraging
from .averaging import ScheduleFree as ScheduleFree
from .averaging import blend as blend
from .closures import LineSearch as LineSearch
from .closures import SharpnessAware as SharpnessAware
from .constraints import Constraint as Constraint
from .constraints import ConstraintContext as ConstraintContext
from .constraints import Constraints as Constraints
from .constraints import Hyperball as Hyperball
from .constraints import ParameterUpdate as ParameterUpdate
from .constraints import Polar as Polar
from .constraints import QKClip as QKClip
from .constraints import Slots as Slots
from .constraints import Tensors as Tensors
from .contrib.averaging import Anchored as Anchored
from .contrib.averaging import EMANesterov as EMANesterov
from .contrib.constraints import LateDecay as LateDecay
from .contrib.constraints import RadialBrake as RadialBrake
from .contrib.constraints import RadiusPin as RadiusPin
from .contrib.constraints import RowFloor as RowFloor
from .iterate_store import IterateStore as IterateStore
from .rounding import Rounding as Rounding
