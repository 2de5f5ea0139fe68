"""Which iterates are kept and evaluated, and the constraints they keep."""

from .averaging import Averaging as Averaging
from .averaging import Track as Track
from .constraints import Constraint as Constraint
from .constraints import Constraints as Constraints
from .constraints import Hyperball as Hyperball
from .iterate_store import Iterates as Iterates
from .means import EMA as EMA
from .means import LAWA as LAWA
from .parameter_update import Bound as Bound
from .parameter_update import Move as Move
from .primal_averaging import PrimalAveraging as PrimalAveraging
from .primal_averaging import ScheduleFree as ScheduleFree
