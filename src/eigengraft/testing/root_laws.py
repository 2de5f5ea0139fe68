"""The laws of root solvers, in float64 unless a law says otherwise."""

from __future__ import annotations

from fractions import Fraction

import torch

from eigengraft.preconditioners import RootSolver

from .laws import Law, require, require_close
from .samples import definite, rotation
from .solver_laws import SolverCase, solve, usual_exponent


def _root(case: SolverCase) -> RootSolver:
    assert isinstance(case.solver, RootSolver)
    return case.solver


def roots_turn_and_scale_with_the_matrix(case: SolverCase) -> None:
    """(U A U^T)^-e = U A^-e U^T and (c A)^-e = c^-e A^-e, and roots are symmetric."""
    a, u, solver = definite(), rotation(6, 1), _root(case)
    root = solve(solver, a)
    require_close(root, root.mT, 1e-14, "a symmetric root")
    if case.rotates:
        require_close(solve(solver, u @ a @ u.T), u @ root @ u.T, case.tolerance, "a root that turns with its matrix")
    if case.degree is not None:
        scaled = solve(solver, a * 1e6) * 1e6 ** (-case.degree * float(usual_exponent(solver)))
        require_close(scaled, root, case.tolerance, "a root that scales with its matrix")


def a_root_undoes_its_matrix(case: SolverCase) -> None:
    """A^-e A^e = I, up to the ridge: its unit, the size, is up to 60 times the smallest eigenvalue. 1e-2: a residual of
    the solver, which is below its `max_error`. An exponent that a solver cannot take is refused in words."""
    a, solver = definite(), _root(case)
    values, q = torch.linalg.eigh(a)
    for exponent in (Fraction(1, 4), Fraction(1, 2), Fraction(2, 3), Fraction(1)):
        problem = solver.check(exponent)
        if problem is not None:
            fine = f"{getattr(solver, 'kind', '?')} takes exponents" in problem and problem.endswith(f"got {exponent}")
            require(fine, f"check(): '<kind> takes exponents ..., got {exponent}' is required, got '{problem}'")
            continue
        power = (q * values.pow(float(exponent)).unsqueeze(1)) @ q.mT
        root, ok = solver.root(a, exponent)[:2]
        error, bound = float((root @ power - torch.eye(6)).abs().max()), max(1e-2, 60 * getattr(solver, "eps", 0.0))
        require(ok.all(), f"roots of definite matrices to the power -{exponent} are required, got ok = {ok.tolist()}")
        require(error <= bound, f"A^-e A^e = I up to {bound:g} for e = {exponent} is required, got {error:.2g}")


def roots_come_with_a_report(case: SolverCase) -> None:
    """One number a matrix, on its device: a definite matrix has a definite root whose residual is small."""
    for dtype in (torch.float32, torch.float64):
        root = _root(case).root(definite(dtype=dtype), usual_exponent(_root(case)))
        for name, want in (("iterations", torch.int32), ("residual", dtype), ("definite", torch.bool)):
            x = getattr(root, name)
            got = f"{x.dtype} of shape {list(x.shape)}"
            require((x.shape, x.dtype) == ((4,), want), f"{name}: {want} of shape [4] is required, got {got}")
        limit, worst = getattr(case.solver, "max_error", 1), float(root.residual.max())
        require(worst < limit, f"a residual below {limit} is required, got {worst:.2g}")
        require(root.definite.all(), f"definite roots are required, got definite = {root.definite.tolist()}")


def roots_of_diagonals_are_elementwise(case: SolverCase) -> None:
    """(a + r)^-e, r as for a matrix: 60 times a relative eps, as above. A bad row is rejected alone."""
    a, solver = torch.tensor([[4.0, 1.0, 0.25], [1e6, 1e6, 1e5]], dtype=torch.float64), _root(case)
    exponent = usual_exponent(solver)
    root = solver.diagonal_root(a, exponent)
    fine = bool(root.ok.all()) and bool(root.definite.all()) and root.iterations.dtype == torch.int32
    require(fine, f"ok and definite roots with int32 iterations are required, got {root}")
    error, bound = (
        float((root.value * a ** float(exponent) - 1).abs().max()),
        max(1e-10, 60 * getattr(solver, "eps", 0.0)),
    )
    require(error <= bound, f"a^-{exponent} up to {bound:g} is required, got a relative error of {error:.2g}")
    spoiled = solver.diagonal_root(torch.cat([a, torch.full((1, 3), torch.nan, dtype=torch.float64)]), exponent)
    same = spoiled.ok.tolist() == [True, True, False] and torch.equal(spoiled.value[:2], root.value)
    require(same, f"a row of nan rejected alone is required, got ok = {spoiled.ok.tolist()}")


ROOT_LAWS: tuple[Law[SolverCase], ...] = (
    Law(roots_turn_and_scale_with_the_matrix),
    Law(a_root_undoes_its_matrix),
    Law(roots_come_with_a_report),
    Law(roots_of_diagonals_are_elementwise),
)
