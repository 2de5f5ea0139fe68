"""How a parameter takes its update: weight decay, constraints, averaging, the write. Imports the ground floor only."""

from .averaging import Averaging as Averaging
from .averaging import IterateBatch as IterateBatch
from .closures import LineSearch as LineSearch
from .closures import SharpnessAware as SharpnessAware
from .constraints import Constraint as Constraint
from .constraints import Constraints as Constraints
from .constraints import Hyperball as Hyperball
from .constraints import LateDecay as LateDecay
from .constraints import QKClip as QKClip
from .constraints import RadialBrake as RadialBrake
from .constraints import RadiusPin as RadiusPin
from .constraints import RowFloor as RowFloor
from .ema_nesterov import EMANesterov as EMANesterov
from .iterate_store import IterateStore as IterateStore
from .means import EMA as EMA
from .means import LAWA as LAWA
from .parameter_update import BoundConstraint as BoundConstraint
from .parameter_update import ParameterUpdate as ParameterUpdate
from .primal_averaging import PrimalAveraging as PrimalAveraging
from .primal_averaging import ScheduleFree as ScheduleFree
