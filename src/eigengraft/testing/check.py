"""The functions that check one component against the laws of its family."""

from __future__ import annotations

from typing import TYPE_CHECKING

from eigengraft.preconditioners import BasisSolver, Cadence, PolarSolver, RootSolver, Stage
from eigengraft.quantization import Quantizer

from .cadence_laws import CADENCE_LAWS, SPANS, CadenceCase
from .laws import LawReport, check
from .quantizer_laws import QUANTIZER_LAWS, QuantizerCase
from .solver_laws import BASIS_LAWS, POLAR_LAWS, ROOT_LAWS, ROUNDING, SOLVER_LAWS, SolverCase
from .stage_case import BLOCKS, Degree, StageCase
from .stage_laws import CONTRACT, STAGE_LAWS

if TYPE_CHECKING:
    from eigengraft.experiments.tasks import Task


def check_stage(
    stage: Stage,
    blocks: tuple[tuple[int, ...], ...] = BLOCKS,
    *,
    degree: Degree | None = None,
    rotates: bool = False,
    singular: bool = False,
) -> LawReport:
    """Check a stage against the contract and the laws of stages.

    Args:
        stage: the stage.
        blocks: shapes of the blocks to try, without the stack axis.
        degree: the number d for which scaling all gradients by c scales the direction by c^d (Adam: 0, momentum: 1), or
            a function that returns d for the number of axes of a block. None: this law is not checked.
        rotates: True to check that gradients U G V^T give directions U D V^T.
        singular: True if the stage computes bases or roots of singular matrices. Laws that compare two computations are
            then not checked.

    Returns:
        A report of the laws that hold and of the laws that do not apply.

    Raises:
        LawError: laws are broken. The message names all broken laws, or the first broken rule of the contract.
        TypeError: `stage` is not an instance of Stage.
    """
    _require_instance(stage, Stage, "check_stage")
    return check(StageCase(stage, blocks, degree, rotates, singular), [CONTRACT], STAGE_LAWS)


def check_solver(
    solver: RootSolver | BasisSolver | PolarSolver,
    *,
    degree: float | None = None,
    rotates: bool | None = None,
    tolerance: float = ROUNDING,
    converges: bool = True,
) -> LawReport:
    """Check a root, basis or polar solver against the laws of its family.

    Args:
        solver: the solver.
        degree: for a root solver, -1 if (c A)^-e = c^-e A^-e, which an absolute ridge breaks. None: the law is not
            checked.
        rotates: for a root solver, True to check that (U A U^T)^-e = U A^-e U^T. For a polar solver, False to skip the
            law P(U X V^T) = U P(X) V^T. None: the law is checked for polar solvers alone.
        tolerance: relative tolerance of the two laws of a root solver; 1e-5 for solvers that stop at a tolerance.
        converges: for a basis solver, False if repeated refreshes of one matrix do not converge to its eigenvectors.

    Returns:
        A report of the laws that hold and of the laws that do not apply.

    Raises:
        LawError: laws are broken. The message names all broken laws.
        TypeError: `solver` is not an instance of a solver.
    """
    _require_instance(solver, (RootSolver, BasisSolver, PolarSolver), "check_solver")
    bases_or_polar = BASIS_LAWS if isinstance(solver, BasisSolver) else POLAR_LAWS
    own = ROOT_LAWS if isinstance(solver, RootSolver) else bases_or_polar
    return check(SolverCase(solver, degree, rotates, tolerance, converges), [], (*SOLVER_LAWS, *own))


def check_quantizer(quantizer: Quantizer, size: int = 9) -> LawReport:
    """Check a quantizer against the laws of quantizers.

    Args:
        quantizer: the quantizer.
        size: order d of the matrices `[d, d]` that are stored; choose a larger d for a quantizer that refuses small
            slots.

    Returns:
        A report of the laws that hold and of the laws that do not apply.

    Raises:
        LawError: laws are broken. The message names all broken laws.
        TypeError: `quantizer` is not an instance of Quantizer.
    """
    _require_instance(quantizer, Quantizer, "check_quantizer")
    return check(QuantizerCase(quantizer, size), [], QUANTIZER_LAWS)


def check_cadence(cadence: Cadence, steps: int = 0) -> LawReport:
    """Check a cadence against the laws of cadences.

    Args:
        cadence: the cadence.
        steps: number of updates of the blocks to try; 0 for twelve intervals of the cadence.

    Returns:
        A report of the laws that hold and of the laws that do not apply.

    Raises:
        LawError: laws are broken. The message names all broken laws, or says that spans of blocks are not valid.
        TypeError: `cadence` is not an instance of Cadence.
    """
    _require_instance(cadence, Cadence, "check_cadence")
    return check(CadenceCase(cadence, steps), [SPANS], CADENCE_LAWS)


def check_task(task: Task) -> LawReport:
    """Check a task against the laws of tasks. The function needs `eigengraft[experiments]`.

    Args:
        task: the task. The data of the task are read and the model is built several times, so both should be small.

    Returns:
        A report of the laws that hold and of the laws that do not apply.

    Raises:
        LawError: laws are broken. The message names all broken laws.
        TypeError: `task` is not an instance of Task.
    """
    from eigengraft.experiments.tasks import Task

    from .task_laws import TASK_LAWS, TaskCase

    _require_instance(task, Task, "check_task")
    return check(TaskCase(task), [], TASK_LAWS)


def _require_instance(value: object, kinds: type | tuple[type, ...], who: str) -> None:
    if not isinstance(value, kinds):
        names = " or ".join(kind.__name__ for kind in (kinds if isinstance(kinds, tuple) else (kinds,)))
        got = f"the class {value.__name__}; pass an instance" if isinstance(value, type) else repr(value)
        raise TypeError(f"{who}: an instance of {names} is required, got {got}")
