"""Inverse roots and eigenbases of stacks `[N, d, d]` of symmetric matrices."""

from .base import Basis as Basis
from .base import BasisSolver as BasisSolver
from .base import Root as Root
from .base import RootSolver as RootSolver
from .bases.adaptive_qr import AdaptiveQR as AdaptiveQR
from .bases.cholesky_qr import CholeskyQR as CholeskyQR
from .bases.eigh_basis import EighBasis as EighBasis
from .bases.power_qr import PowerQR as PowerQR
from .bases.qr_iteration import QRIteration as QRIteration
from .bases.subspace import Subspace as Subspace
from .by_device import ByDevice as ByDevice
from .by_device import Timing as Timing
from .by_device import timings as timings
from .inverse.bounds import EigenvalueBound as EigenvalueBound
from .inverse.bounds import FrobeniusBound as FrobeniusBound
from .inverse.bounds import GuaranteedBound as GuaranteedBound
from .inverse.bounds import InfinityBound as InfinityBound
from .inverse.bounds import PowerIteration as PowerIteration
from .inverse.bounds import TraceBound as TraceBound
from .inverse.cans import CANS as CANS
from .inverse.chebyshev import Chebyshev as Chebyshev
from .inverse.cholesky import CholeskyInverse as CholeskyInverse
from .inverse.coupled_newton import CoupledNewton as CoupledNewton
from .inverse.eigh import Eigh as Eigh
from .inverse.higher_order import HigherOrder as HigherOrder
from .inverse.newton_db import NewtonDB as NewtonDB
