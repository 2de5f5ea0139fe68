"""Inverse roots and eigenbases of stacks `[N, d, d]` of symmetric matrices."""

from .base import Basis as Basis
from .base import BasisSolver as BasisSolver
from .base import Root as Root
from .base import RootSolver as RootSolver
from .coupled_newton import CoupledNewton as CoupledNewton
from .eigh import Eigh as Eigh
from .eigh import EighBasis as EighBasis
from .power_qr import PowerQR as PowerQR
