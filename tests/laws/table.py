"""The table of the law suite: every member of every family has a row here, and so enrols in the laws of its family."""

from .averaging import AVERAGINGS, CONSTRAINTS
from .basis_solvers import BASIS_SOLVERS
from .components import CADENCES, POLAR_SOLVERS, STATISTICS, VIEWS, WEIGHT_DECAYS
from .compositions import COMPOSITIONS
from .learned import DIRECT
from .quantizers import QUANTIZERS
from .root_solvers import EIGENVALUE_BOUNDS, ROOT_SOLVERS
from .stages import STAGES

TABLE = {
    "stage": (*STAGES, *COMPOSITIONS, *DIRECT),
    "root_solver": ROOT_SOLVERS,
    "eigenvalue_bound": EIGENVALUE_BOUNDS,
    "basis_solver": BASIS_SOLVERS,
    "polar_solver": POLAR_SOLVERS,
    "statistic": STATISTICS,
    "cadence": CADENCES,
    "weight_decay": WEIGHT_DECAYS,
    "quantizer": QUANTIZERS,
    "averaging": AVERAGINGS,
    "constraint": CONSTRAINTS,
    "view": VIEWS,
}
"""Rows by family."""
