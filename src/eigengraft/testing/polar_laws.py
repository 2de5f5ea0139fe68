"""The laws of polar solvers, in float64 unless a law says otherwise."""

from __future__ import annotations

import torch

from .laws import Law, LawError, require, require_close
from .samples import rotation, standard_normal
from .solver_laws import ROUNDING, SolverCase, solve


def polar_factors_are_odd_blind_to_scale_and_turn_with_the_matrix(case: SolverCase) -> None:
    """P(-X) = -P(X), P(X^T) = P(X)^T, P(c X) = P(X), P(U X V^T) = U P(X) V^T, and P is near U V^T.

    With rotates=False neither rotated matrices are compared nor square ones with their transposes.
    """
    for shape in ((6, 4), (4, 6), (5, 5), (1, 7), (7, 1)):
        x, u, v = standard_normal(3, *shape, seed=sum(shape)), rotation(shape[0], 1), rotation(shape[1], 2)
        polar, where = solve(case.solver, x), f"for matrices {shape}"
        if case.rotates is not False:
            require_close(
                solve(case.solver, u @ x @ v.T), u @ polar @ v.T, ROUNDING, f"P(U X V^T) = U P(X) V^T {where}"
            )
        if case.rotates is not False or x.shape[1] != x.shape[2]:
            require_close(solve(case.solver, x.mT), polar.mT, ROUNDING, f"P(X^T) = P(X)^T {where}")
        require_close(solve(case.solver, -x), -polar, ROUNDING, f"P(-X) = -P(X) {where}")
        require_close(solve(case.solver, x * 2.0**30), polar, ROUNDING, f"P(2^30 X) = P(X) {where}")
        left, _, right = torch.linalg.svd(x, full_matrices=False)
        cosine = float((left @ right * polar).sum() / (left @ right).norm() / polar.norm())
        require(cosine >= case.cosine, f"a cosine with U V^T of {case.cosine} {where} is required, got {cosine:.3g}")


def polar_factors_of_difficult_matrices_are_finite(case: SolverCase) -> None:
    """Zero, tiny, huge, denormal and of rank one, float32; zero stays zero."""
    x = standard_normal(1, 5, 4, seed=1).float()
    difficult = {"zero": x * 0, "tiny": x * 1e-30, "huge": x * 1e30, "denormal": x * 1e-42}
    for name, given in {**difficult, "rank one": x[..., :1] * x[:, :1]}.items():
        polar = solve(case.solver, given)
        require(polar.isfinite().all(), f"finite numbers for a matrix that is {name} are required, got nan or inf")
        norm = float(torch.linalg.matrix_norm(polar, ord=2).max())
        require(norm <= 1.5, f"a spectral norm of at most 1.5 for a matrix that is {name} is required, got {norm:.3g}")
    if solve(case.solver, x * 0).any():
        raise LawError("zero for a zero matrix is required, got something else")


POLAR_LAWS: tuple[Law[SolverCase], ...] = (
    Law(polar_factors_are_odd_blind_to_scale_and_turn_with_the_matrix),
    Law(polar_factors_of_difficult_matrices_are_finite),
)
