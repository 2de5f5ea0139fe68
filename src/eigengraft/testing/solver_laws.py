"""The laws of all solvers and those of bases, in float64 unless a law says otherwise."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor

from eigengraft.component import Component
from eigengraft.preconditioners import BasisSolver, PolarSolver, RootSolver

from .laws import Law, require, require_close, the_declaration_survives
from .samples import definite, rotation

ROUNDING = 1e-10
"""Relative, float64: some thousand roundings."""
EQUAL = 1e-5
"""Relative, float64: iterations stop at 1e-6, and their ridge is in units of an estimate of the largest eigenvalue."""
EXPONENTS = (Fraction(1, 4), Fraction(1, 2), Fraction(1))
Solver = RootSolver | BasisSolver | PolarSolver


@dataclass(frozen=True)
class SolverCase:
    """solver: to be checked.

    degree: for roots, -1 if (c A)^-e = c^-e A^-e, which an absolute ridge breaks; None: no such law.
    rotates: for roots, whether (U A U^T)^-e = U A^-e U^T; for polar factors, whether P(U X V^T) = U P(X) V^T. None: no
    for roots, yes for polar factors.
    tolerance: for roots, of these two laws; solvers that stop at a tolerance take a step more for other roundings.
    settles: for bases, whether repeated refreshes of one matrix converge to its eigenvectors.
    cosine: for polar factors, the least cosine between the result and U V^T.
    """

    solver: Solver
    degree: float | None = None
    rotates: bool | None = None
    tolerance: float = ROUNDING
    settles: bool = True
    cosine: float = 0.9

    @property
    def component(self) -> Component:
        return self.solver

    @property
    def who(self) -> str:
        return f"{self.solver.family_name}.{getattr(self.solver, 'kind', '?')}"


def usual_exponent(solver: RootSolver) -> Fraction:
    """The first of `EXPONENTS` that a solver takes."""
    return next((exponent for exponent in EXPONENTS if solver.check(exponent) is None), EXPONENTS[0])


def solve(solver: Solver, a: Tensor) -> Tensor:
    """What a solver makes of a stack, from a cold start; a basis follows its matrix once."""
    if isinstance(solver, PolarSolver):
        return solver.polar(a)
    if isinstance(solver, RootSolver):
        value, ok = solver.root(a, usual_exponent(solver))[:2]
    else:
        q, _, ok = solver.basis(a, cold(solver, a), True)
        require(ok.all(), f"a basis of definite matrices is required, got ok = {ok.tolist()}")
        value, _, ok = solver.basis(a + a.flip(-2, -1), q, False)
    fine = ok.shape == a.shape[:1] and ok.dtype == torch.bool and bool(ok.all())
    require(fine, f"ok, one bool a matrix and all of them True for definite matrices, is required, got {ok}")
    return value


def cold(solver: BasisSolver, a: Tensor) -> Tensor:
    """The basis before the first refresh."""
    d = a.shape[-1]
    return torch.eye(d, solver.columns(d), dtype=a.dtype).expand(len(a), -1, -1)


def a_stack_is_solved_as_its_matrices(case: SolverCase) -> None:
    """A matrix in a stack gets the result that it gets alone."""
    a = definite()
    stacked = solve(case.solver, a)
    for i in range(len(a)):
        require_close(stacked[i : i + 1], solve(case.solver, a[i : i + 1]), ROUNDING, f"matrix {i} of 4 as alone,")


def dtype_and_device_are_kept_and_nothing_is_written_to(case: SolverCase) -> None:
    """In float32 and float64."""
    for dtype in (torch.float32, torch.float64):
        a = definite(dtype=dtype)
        before = a.clone()
        out = solve(case.solver, a)
        columns = case.solver.columns(6) if isinstance(case.solver, BasisSolver) else 6
        want, got = (dtype, a.device, (4, 6, columns)), (out.dtype, out.device, tuple(out.shape))
        require(got == want, f"a result of (dtype, device, shape) {want} is required, got {got}")
        require(torch.equal(a, before), "an untouched matrix is required, got a changed one")


def strided_and_expanded_stacks_are_taken(case: SolverCase) -> None:
    """Whatever the strides, the same numbers give the same result."""
    a = definite()
    strided, expanded = torch.stack([a, -a], dim=-1)[..., 0], a[:1].expand(3, -1, -1)
    require_close(solve(case.solver, strided), solve(case.solver, a), ROUNDING, "a strided stack as a dense one")
    alone = solve(case.solver, a[:1])
    require_close(solve(case.solver, expanded)[1:2], alone, ROUNDING, "an expanded stack as its only matrix")


def bad_matrices_are_marked_and_leave_the_others_alone(case: SolverCase) -> None:
    """A matrix with nan in it is marked in `ok`, nothing is raised, and the other matrices keep their results."""
    a = definite(3)
    spoiled = a.clone()
    spoiled[1] = torch.nan
    if isinstance(case.solver, RootSolver):
        ours, marked = case.solver.root(spoiled, usual_exponent(case.solver))[:2]
        theirs = case.solver.root(a, usual_exponent(case.solver)).value
    else:
        assert isinstance(case.solver, BasisSolver)
        ours, _, marked = case.solver.basis(spoiled, cold(case.solver, a), True)
        theirs = case.solver.basis(a, cold(case.solver, a), True).q
    ok = marked.tolist()
    require(ok == [True, False, True], f"ok = [True, False, True] for a nan in matrix 1 is required, got {ok}")
    require_close(ours[[0, 2]], theirs[[0, 2]], ROUNDING, "results beside a bad matrix as without it,")


def _equals(case: SolverCase) -> list[RootSolver | BasisSolver]:
    """Solvers of other classes, or with other settings, that call themselves equal to the one that is checked."""
    if isinstance(case.solver, PolarSolver):
        return []
    members = [member for member in case.solver.members.values() if issubclass(member, (RootSolver, BasisSolver))]
    found = (member.equal_to(case.solver, torch.float64) for member in members)  # type: ignore[arg-type]
    return [solver for solver in found if solver is not None]


def equal_solvers_compute_the_same(case: SolverCase) -> None:
    """A solver that calls itself equal to this one has its results, but for rounding and for where it stops."""
    a = definite()
    for solver in _equals(case):
        name = getattr(solver, "kind", type(solver).__name__)
        require_close(solve(solver, a), solve(case.solver, a), EQUAL, f"{name}, which calls itself equal, gives that")


def _has_equals(case: SolverCase) -> str | None:
    return None if _equals(case) else "no solver calls itself equal to it"


def _matrices(case: SolverCase) -> str | None:
    return "polar factors have no `ok`" if isinstance(case.solver, PolarSolver) else None


SOLVER_LAWS: tuple[Law[SolverCase], ...] = (
    Law(the_declaration_survives),
    Law(a_stack_is_solved_as_its_matrices),
    Law(dtype_and_device_are_kept_and_nothing_is_written_to),
    Law(strided_and_expanded_stacks_are_taken),
    Law(bad_matrices_are_marked_and_leave_the_others_alone, _matrices),
    Law(equal_solvers_compute_the_same, _has_equals),
)


# Bases.


def _basis(case: SolverCase) -> BasisSolver:
    assert isinstance(case.solver, BasisSolver)
    return case.solver


def bases_are_orthonormal_and_know_no_scale(case: SolverCase) -> None:
    """Q^T Q = I, and c A has the basis of A."""
    a = definite()
    q = solve(case.solver, a)
    eye = torch.eye(q.shape[-1], dtype=torch.float64).expand(4, -1, -1)
    require_close(q.mT @ q, eye, 1e-13, "Q^T Q = I")
    require_close(solve(case.solver, a * 2.0**40), q, 1e-9, "the basis of 2^40 A as that of A")


def bases_converge_to_the_eigenvectors(case: SolverCase) -> None:
    """By 200 refreshes of one matrix Q^T A Q becomes diag(leading eigenvalues): a step shrinks what is off it by a gap
    of 1.5."""
    values, solver = 1.5 ** torch.arange(6.0, dtype=torch.float64), _basis(case)
    a = (rotation(6, 1) @ torch.diag_embed(values) @ rotation(6, 1).T)[None]
    q = cold(solver, a)
    for refresh in range(200):
        q, _, ok = solver.basis(a, q, refresh == 0)
        require(ok.all(), f"a basis at every refresh is required, got ok = {ok.tolist()} at refresh {refresh}")
    b = q.mT @ a @ q
    diagonal = b.diagonal(dim1=1, dim2=2)
    error = float((b - torch.diag_embed(diagonal)).abs().max()) / float(b.abs().max())
    require(error <= 1e-9, f"a diagonal Q^T A Q up to 1e-9 is required, got {error:.2g} beside the diagonal")
    require_close(diagonal.sort().values, values[None, 6 - q.shape[-1] :], 1e-10, "the leading eigenvalues in Q^T A Q")


def _settles(case: SolverCase) -> str | None:
    return None if case.settles else "settles=False"


BASIS_LAWS: tuple[Law[SolverCase], ...] = (
    Law(bases_are_orthonormal_and_know_no_scale),
    Law(bases_converge_to_the_eigenvectors, _settles),
)
