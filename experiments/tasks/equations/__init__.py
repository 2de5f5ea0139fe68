"""Physics-informed networks: the task `differential_equation`, the family `equation` and its members; no data."""

from .allen_cahn import AllenCahn as AllenCahn
from .burgers import Burgers as Burgers
from .equation import Equation as Equation
from .korteweg_de_vries import KortewegDeVries as KortewegDeVries
from .poisson import Poisson as Poisson
from .task import DifferentialEquation as DifferentialEquation
from .wave import Wave as Wave
