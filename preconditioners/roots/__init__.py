"""Solvers of inverse roots and eigenbases for stacks `[N, d, d]` of symmetric matrices."""

from .base import Basis as Basis
from .base import BasisSolver as BasisSolver
from .base import Root as Root
from .base import RootSolver as RootSolver
from .bounds import EigenvalueBound as EigenvalueBound
from .bounds import FrobeniusBound as FrobeniusBound
from .bounds import GuaranteedBound as GuaranteedBound
from .bounds import PowerIteration as PowerIteration
from .by_device import ByDevice as ByDevice
from .by_device import Timing as Timing
from .by_device import timings as timings
from .cans import CANS as CANS
from .cholesky_qr import CholeskyQR as CholeskyQR
from .coupled_minimax import CoupledMinimax as CoupledMinimax
from .coupled_newton import CoupledNewton as CoupledNewton
from .decompositions import CholeskyInverse as CholeskyInverse
from .decompositions import Eigh as Eigh
from .decompositions import EighBasis as EighBasis
from .power_qr import AdaptiveQR as AdaptiveQR
from .power_qr import PowerQR as PowerQR
