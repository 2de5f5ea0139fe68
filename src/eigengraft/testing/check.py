"""The functions that check one component against the laws of its family."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from eigengraft.blocking.views import View
from eigengraft.optimizers.write.averaging import Averaging
from eigengraft.optimizers.write.constraints import Constraint
from eigengraft.optimizers.write.write import WeightDecay
from eigengraft.preconditioners import (
    BasisSolver,
    Cadence,
    EigenvalueBound,
    PolarSolver,
    RootSolver,
    Stage,
    Statistic,
)
from eigengraft.quantization import Quantizer

from .cadence_laws import CADENCE_LAWS, CadenceCase
from .laws import AnyCase, Case, Law, LawReport, check
from .quantizer_laws import QUANTIZER_LAWS, QuantizerCase, storage_note
from .rule_laws import (
    RUN,
    SCHEDULE_LAWS,
    VIEW_LAWS,
    VIEW_SHAPES,
    WEIGHT_DECAY_LAWS,
    ScheduleCase,
    ViewCase,
)
from .solver_laws import (
    BASIS_LAWS,
    BOUND_LAWS,
    POLAR_LAWS,
    ROOT_LAWS,
    ROUNDING,
    SOLVER_LAWS,
    BoundCase,
    SolverCase,
)
from .stage_case import BLOCKS, Degree, StageCase
from .stage_laws import STAGE_LAWS, device_notes
from .statistic_laws import STATISTIC_BLOCKS, STATISTIC_LAWS, StatisticCase
from .write_laws import AVERAGING_LAWS, CONSTRAINT_LAWS, ConstraintCase

if TYPE_CHECKING:
    from eigengraft.experiments.tasks import Task
    from eigengraft.experiments.training.schedule import LearningRateSchedule


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
        rotates: True to check that gradients U G V^T, with orthogonal U and V, give the directions U D V^T, where D are
            the directions of G.
        singular: True if the stage computes bases or roots of singular matrices. Laws that compare two computations are
            then not checked.

    Returns:
        A report of the laws that hold and of the laws that do not apply. A note has the kernels, the memory traffic and
        the largest allocation of a step without a refresh on a simulated accelerator, for blocks of the first shape.

    Raises:
        LawError: laws are broken. The message names all broken laws, or the first broken rule of the contract.
        TypeError: `stage` is not an instance of Stage.
    """
    case = StageCase(stage, blocks, degree, rotates, singular)
    return replace(_check("check_stage", Stage, case, STAGE_LAWS), notes=device_notes(case))


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
        degree: for a root solver, the number k for which (c A)^-e = c^(k e) A^-e is checked. For exact roots k is -1.
            With an absolute ridge the law holds for no k. None: the law is not checked.
        rotates: True to check the law of rotations, for orthogonal U and V. It is (U A U^T)^-e = U A^-e U^T for a root
            solver, and P(U X V^T) = U P(X) V^T for a polar solver. None: True for polar solvers, False for root
            solvers.
        tolerance: for a root solver, relative tolerance of the laws of `degree` and `rotates`; use 1e-5 for solvers
            that stop at a tolerance.
        converges: for a basis solver, False if repeated refreshes with one matrix do not converge to its eigenvectors.

    Returns:
        A report of the laws that hold and of the laws that do not apply.

    Raises:
        LawError: laws are broken. The message names all broken laws.
        TypeError: `solver` is not an instance of a solver.
    """
    kinds: dict[type, tuple[Law[SolverCase[Any]], ...]]
    kinds = {RootSolver: ROOT_LAWS, BasisSolver: BASIS_LAWS, PolarSolver: POLAR_LAWS}
    own = (law for kind, laws in kinds.items() if isinstance(solver, kind) for law in laws)
    case = SolverCase[Any](solver, degree, rotates, tolerance, converges)
    return _check("check_solver", tuple(kinds), case, (*SOLVER_LAWS, *own))


def check_eigenvalue_bound(bound: EigenvalueBound, *, estimate: bool = False) -> LawReport:
    """Check a bound of the largest eigenvalue against the laws of bounds.

    Args:
        bound: the bound.
        estimate: True for an estimate, which may be below the eigenvalue.

    Returns:
        A report of the laws that hold and of those that do not apply.

    Raises:
        LawError: laws are broken. The message names all of them.
        TypeError: `bound` is not an instance of EigenvalueBound.
    """
    return _check("check_eigenvalue_bound", EigenvalueBound, BoundCase(bound, estimate), BOUND_LAWS)


def check_quantizer(quantizer: Quantizer, size: int = 9) -> LawReport:
    """Check a quantizer against the laws of quantizers.

    Args:
        quantizer: the quantizer.
        size: order d of the matrices `[d, d]` that are stored; choose a larger d for a quantizer that refuses small
            slots.

    Returns:
        A report of the laws that hold and of the laws that do not apply. Its note has the bytes and the relative error
        of a stored matrix.

    Raises:
        LawError: laws are broken. The message names all broken laws.
        TypeError: `quantizer` is not an instance of Quantizer.
    """
    case = QuantizerCase(quantizer, size)
    return replace(_check("check_quantizer", Quantizer, case, QUANTIZER_LAWS), notes=(storage_note(case),))


def check_cadence(cadence: Cadence, steps: int = 0) -> LawReport:
    """Check a cadence against the laws of cadences.

    Args:
        cadence: the cadence.
        steps: number of updates of the blocks to try. 0: the first refresh, and then twelve intervals of the cadence,
            but at least 24 updates.

    Returns:
        A report of the laws that hold and of the laws that do not apply.

    Raises:
        LawError: laws are broken. The message names all of them, or says that `due_again` does not return bools.
        TypeError: `cadence` is not an instance of Cadence.
    """
    return _check("check_cadence", Cadence, CadenceCase(cadence, steps), CADENCE_LAWS)


def check_statistic(
    statistic: Statistic,
    blocks: tuple[tuple[int, ...], ...] = STATISTIC_BLOCKS,
    *,
    degree: Degree | None = None,
) -> LawReport:
    """Check a statistic against the laws of statistics.

    Args:
        statistic: the statistic.
        blocks: shapes of the blocks to try, without the stack axis.
        degree: d if scaling all gradients by c scales the factors by c^d (Gram matrices: 2); a number, or a function of
            the number of axes. None: the law is not checked.

    Returns:
        A report of the laws that hold and of those that do not apply.

    Raises:
        LawError: laws are broken. The message names all of them, or the first wrong contribution.
        TypeError: `statistic` is not an instance of Statistic.
    """
    return _check("check_statistic", Statistic, StatisticCase(statistic, blocks, degree), STATISTIC_LAWS)


def check_averaging(averaging: Averaging) -> LawReport:
    """Check an averaging of iterates against the laws of averagings.

    Args:
        averaging: the averaging.

    Returns:
        A report of the laws that hold and of those that do not apply.

    Raises:
        LawError: laws are broken. The message names all of them, or the first broken rule of the contract.
        TypeError: `averaging` is not an instance of Averaging.
    """
    return _check("check_averaging", Averaging, Case(averaging), AVERAGING_LAWS)


def check_constraint(constraint: Constraint) -> LawReport:
    """Check a constraint against the laws of constraints, also on shards if it is `shardable`.

    Args:
        constraint: the constraint.

    Returns:
        A report of the laws that hold and of those that do not apply.

    Raises:
        LawError: laws are broken. The message names all of them, or the first broken rule of the contract.
        TypeError: `constraint` is not an instance of Constraint.
    """
    return _check("check_constraint", Constraint, ConstraintCase(constraint), CONSTRAINT_LAWS)


def check_weight_decay(decay: WeightDecay) -> LawReport:
    """Check a rule of weight decay against the laws of weight decay.

    Args:
        decay: the rule.

    Returns:
        A report of the laws that hold and of those that do not apply.

    Raises:
        LawError: laws are broken. The message names all of them.
        TypeError: `decay` is not an instance of WeightDecay.
    """
    return _check("check_weight_decay", WeightDecay, Case(decay), WEIGHT_DECAY_LAWS)


def check_view(view: View, shapes: tuple[tuple[int, ...], ...] = VIEW_SHAPES) -> LawReport:
    """Check a view against the laws of views.

    Args:
        view: the view.
        shapes: shapes of the parameters to try. The view must accept at least one of them.

    Returns:
        A report of the laws that hold and of those that do not apply.

    Raises:
        LawError: laws are broken. The message names all of them.
        TypeError: `view` is not an instance of View.
    """
    return _check("check_view", View, ViewCase(view, shapes), VIEW_LAWS)


def check_schedule(schedule: LearningRateSchedule, steps: int = RUN) -> LawReport:
    """Check a schedule of the learning rate against the laws of schedules. Needs the package's extra `experiments`.

    Args:
        schedule: the schedule.
        steps: number of steps of the run.

    Returns:
        A report of the laws that hold and of those that do not apply.

    Raises:
        LawError: laws are broken. The message names all of them, or the first factor that is not a number in [0, 1].
        TypeError: `schedule` is not an instance of LearningRateSchedule.
    """
    from eigengraft.experiments.training.schedule import LearningRateSchedule

    return _check("check_schedule", LearningRateSchedule, ScheduleCase(schedule, steps), SCHEDULE_LAWS)


def check_task(task: Task) -> LawReport:
    """Check a task against the laws of tasks. Needs the package's extra `experiments`.

    Args:
        task: the task. The data of the task are read and the model is built several times, so both should be small.

    Returns:
        A report of the laws that hold and of the laws that do not apply. It has a note if inputs are not normalized.

    Raises:
        LawError: laws are broken. The message names all broken laws.
        TypeError: `task` is not an instance of Task.
    """
    from eigengraft.experiments.tasks import Task

    from .task_laws import TASK_LAWS, input_notes

    report = _check("check_task", Task, Case(task), TASK_LAWS)
    return replace(report, notes=tuple(input_notes(task)))


def _check(who: str, kinds: type | tuple[type, ...], case: AnyCase, laws: Iterable[Law[AnyCase]]) -> LawReport:
    value = case.component
    if not isinstance(value, kinds):
        names = " or ".join(kind.__name__ for kind in (kinds if isinstance(kinds, tuple) else (kinds,)))
        got, remedy = repr(value), "use {}"
        if isinstance(value, type):
            got, remedy = f"the class {value.__name__}", "pass an instance to {}"
        own = str(getattr(value, "family_name", None))
        other = f"check_{'solver' if own.endswith('_solver') else own}"
        known = other in globals()
        advice = f"; {remedy.format(other if known else who)}" if known or isinstance(value, type) else ""
        raise TypeError(f"{who}: an instance of {names} is required, got {got}{advice}")
    return check(case, laws)
