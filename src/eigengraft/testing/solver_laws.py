"""The laws of root, basis and polar solvers and of bounds of eigenvalues, in float64 unless a law says otherwise."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from eigengraft.preconditioners import Basis, BasisSolver, EigenvalueBound, PolarSolver, Root, RootSolver

from .causes import WATCHED_BLOCKS, stack_cause, write_cause
from .laws import Case, Law, broken, in_parentheses, require, require_close, the_declaration_survives
from .samples import definite, rotation, standard_normal

ROUNDING = 1e-10
"""Relative tolerance in float64 for results that may differ by some thousand rounding errors."""
EQUAL = 1e-5
"""Relative tolerance in float64 for results of solvers that are equal in exact arithmetic. Results differ because
iterations stop at an error of 1e-6, and because a ridge is in units of an estimate of the largest eigenvalue.
"""
EXPONENTS = (Fraction(1, 4), Fraction(1, 2), Fraction(1))
"""Exponents e of A^-e to try."""
AnySolver = RootSolver | BasisSolver | PolarSolver


_S = TypeVar("_S", bound=AnySolver)


@dataclass(frozen=True)
class SolverCase(Case[_S]):
    """A solver and the properties that it declares.

    degree: for root solvers, the number k for which (c A)^-e = c^(k e) A^-e. For exact roots k is -1. With an absolute
        ridge the law holds for no k. None: the law does not apply.
    rotates: True if the law of rotations holds for orthogonal U and V. It is (U A U^T)^-e = U A^-e U^T for root
        solvers, and P(U X V^T) = U P(X) V^T for polar solvers. None: True for polar solvers, False for root solvers.
    tolerance: for root solvers, relative tolerance of the laws of `degree` and `rotates`. It must be larger for an
        iteration that stops at a tolerance, because rounding errors may change its number of steps.
    converges: for basis solvers, True if repeated refreshes with one matrix converge to its eigenvectors.
    cosine: for polar solvers, the smallest accepted cosine between the result and the exact polar factor.
    """

    degree: float | None = None
    rotates: bool | None = None
    tolerance: float = ROUNDING
    converges: bool = True
    cosine: float = 0.9


def usual_exponent(solver: RootSolver) -> Fraction:
    """Return the first exponent of `EXPONENTS` that a root solver accepts."""
    return next((exponent for exponent in EXPONENTS if solver.check(exponent) is None), EXPONENTS[0])


def solve(solver: AnySolver, a: Tensor) -> Tensor:
    """Return the result of a solver for a stack of matrices. Raise a LawError if the solver marks a matrix as failed.

    A basis solver is called twice: for a, from the identity, and then for another matrix, from the first result. The
    second result is returned.

    a: positive definite matrices `[N, d, d]`, or matrices `[N, m, n]` for a polar solver.
    """
    value, ok = result_and_ok(solver, a)
    fine = ok.shape == a.shape[:1] and ok.dtype == torch.bool and bool(ok.all())
    require(fine, "`ok` for definite matrices", "one bool for each matrix, all of them True", ok)
    return value


def result_and_ok(solver: AnySolver, a: Tensor) -> tuple[Tensor, Tensor]:
    """Return the result as `solve` does, and bool `[N]`, False for each matrix that the solver has marked as failed.

    A polar solver marks no matrix.
    """
    if isinstance(solver, PolarSolver):
        return solver.polar(a), torch.ones(len(a), dtype=torch.bool)
    if isinstance(solver, RootSolver):
        return solver.root(a, usual_exponent(solver))[:2]
    q, _, first = solver.basis(a, cold(solver, a), True)
    value, _, ok = solver.basis(a + a.flip(-2, -1), q, False)
    return value, first & ok


def cold(solver: BasisSolver, a: Tensor) -> Tensor:
    """Return the bases `[N, d, k]` that a solver starts from at the first refresh: the first k columns of the identity.

    a: the matrices `[N, d, d]` that are solved.
    """
    d = a.shape[-1]
    return torch.eye(d, solver.columns(d), dtype=a.dtype).expand(len(a), -1, -1)


def a_stack_is_solved_as_its_matrices(case: SolverCase[AnySolver]) -> None:
    """A matrix in a stack has the same result as the matrix alone, also if the others are up to 1e16 times as large."""

    def cause() -> str:
        many = definite(WATCHED_BLOCKS)
        return stack_cause(case.component, lambda: solve(case.component, many))

    for name, a in (("", definite()), (UNLIKE, unlike(definite()))):
        stacked, marked = result_and_ok(case.component, a)
        for i in range(len(a)):
            alone, ok = result_and_ok(case.component, a[i : i + 1])
            what = f"matrix {i}, alone and in a stack of {len(a)}{name}"
            if ok.tolist() != marked[i : i + 1].tolist():
                raise broken(f"`ok` for {what}", "the same", "another", cause())
            ours, theirs = (x.nan_to_num() if name else x for x in (stacked[i : i + 1], alone))  # of a singular matrix
            require_close(ours, theirs, ROUNDING, f"the result of {what}", cause)


UNLIKE = " matrices whose norms differ by factors of up to 1e16"
"""Text for errors about the matrices that `unlike` returns. It follows their number."""


def unlike(a: Tensor) -> Tensor:
    """Return matrices of very different norms, `[4, d, d]`: A, 1e-8 A, a matrix with one nonzero entry, and 1e8 A."""
    entry = torch.zeros_like(a[2])
    entry[0, 0] = a[2, 0, 0]
    return torch.stack([a[0], 1e-8 * a[1], entry, 1e8 * a[3]])


def results_have_their_type_and_shape(case: SolverCase[AnySolver]) -> None:
    """A root solver returns a `Root`, a basis solver a `Basis`, and a polar solver a tensor, for a stack `[N, ...]`."""
    solver, a = case.component, definite()
    if isinstance(solver, PolarSolver):
        for shape in ((6, 4), (4, 6)):
            found: object = solver.polar(standard_normal(3, *shape, seed=1))
            wanted = [3, *shape]
            got = str(list(found.shape)) if isinstance(found, Tensor) else type(found).__name__
            fine = isinstance(found, Tensor) and list(found.shape) == wanted
            require(fine, f"polar() of matrices {shape}", f"a tensor of shape {wanted}", got)
        return
    named: tuple[str, type, object, str]
    if isinstance(solver, RootSolver):
        named = "root()", Root, solver.root(a, usual_exponent(solver)), "Root(value)"
    else:
        named = "basis()", Basis, solver.basis(a, cold(solver, a).contiguous(), True), "Basis(q)"
    name, kind, result, hint = named
    if not isinstance(result, kind):
        raise broken(name, f"a {kind.__name__}", type(result).__name__, in_parentheses(f"return {hint}"))
    assert isinstance(result, (Root, Basis))
    value, ok, columns = result[0], result.ok, solver.columns(6) if isinstance(solver, BasisSolver) else 6
    fine = value.shape == (4, 6, columns)
    require(fine, f"{name}, shape of {hint}", f"[N, 6, {columns}] with N = 4", list(value.shape))
    fine = ok.shape == (4,) and ok.dtype == torch.bool
    require(fine, f"{name}, ok", "shape [4] in torch.bool", f"{list(ok.shape)} in {ok.dtype}")


def arguments_are_not_written_to(case: SolverCase[AnySolver]) -> None:
    """The matrix, and the basis that a basis solver starts from, hold the same bits after the call as before it."""
    a = definite()
    given = {"the matrix": a}
    run: Callable[[], object] = partial(solve, case.component, a)
    if isinstance(case.component, BasisSolver):
        given["q"] = cold(case.component, a).contiguous()
        run = partial(case.component.basis, a, given["q"], False)
    before = {name: tensor.clone() for name, tensor in given.items()}
    run()
    for name, tensor in given.items():
        if not torch.equal(tensor, before[name]):
            cause = write_cause(case.component, given, run)
            raise broken(f"{name} after the solver", "no change", "other numbers", cause)


def results_keep_dtype_and_device(case: SolverCase[AnySolver]) -> None:
    """In float32 and float64 the result has the dtype, device and shape of the matrices, except that bases may have
    fewer columns.
    """
    for dtype in (torch.float32, torch.float64):
        a = definite(dtype=dtype)
        out = solve(case.component, a)
        columns = case.component.columns(6) if isinstance(case.component, BasisSolver) else 6
        want, got = (dtype, a.device, (4, 6, columns)), (out.dtype, out.device, tuple(out.shape))
        require(got == want, "(dtype, device, shape) of the result", f"{want}", got)


def strided_and_expanded_stacks_are_accepted(case: SolverCase[AnySolver]) -> None:
    """The same numbers give the same result, for any strides."""
    a = definite()
    strided, expanded = torch.stack([a, -a], dim=-1)[..., 0], a[:1].expand(3, -1, -1)
    what = "results of a strided stack and of a dense one"
    require_close(solve(case.component, strided), solve(case.component, a), ROUNDING, what)
    alone = solve(case.component, a[:1])
    what = "results of an expanded stack and of its only matrix"
    require_close(solve(case.component, expanded)[1:2], alone, ROUNDING, what)


def bad_matrices_are_marked_and_leave_the_others_alone(case: SolverCase[AnySolver]) -> None:
    """A matrix with nan is marked in `ok`. Nothing is raised, and other matrices keep their results."""
    a = definite(3)
    spoiled = a.clone()
    spoiled[1] = torch.nan

    def once(matrices: Tensor) -> tuple[Tensor, Tensor]:
        if isinstance(case.component, RootSolver):
            return case.component.root(matrices, usual_exponent(case.component))[:2]
        assert isinstance(case.component, BasisSolver)
        q, _, ok = case.component.basis(matrices, cold(case.component, matrices), True)
        return q, ok

    theirs, _ = once(a)
    try:
        ours, marked = once(spoiled)
    except Exception as error:
        remedy = (
            "replace such matrices before the decomposition: torch.where(finite_blocks(a)[:, None, None], a, "
            "identity_like(a)), with functions of eigengraft.numerics"
        )
        got = f"{type(error).__name__}: {error}"
        raise broken("a matrix with nan", "False in `ok`, and no exception", got, in_parentheses(remedy)) from error
    ok = marked.tolist()
    require(ok == [True, False, True], "`ok` for a stack with nan in matrix 1", "[True, False, True]", ok)
    what = "the results of matrices 0 and 2, with and without nan in matrix 1"
    require_close(ours[[0, 2]], theirs[[0, 2]], ROUNDING, what)


def _equals(case: SolverCase[AnySolver]) -> list[RootSolver | BasisSolver]:
    """Return the solvers that claim, by their method `equal_to`, to have the same results as the checked solver."""
    if isinstance(case.component, PolarSolver):
        return []
    members = [member for member in case.component.members.values() if issubclass(member, (RootSolver, BasisSolver))]
    found = (member.equal_to(case.component, torch.float64) for member in members)
    return [solver for solver in found if solver is not None]


def equal_solvers_compute_the_same(case: SolverCase[AnySolver]) -> None:
    """Solvers that are equal by `equal_to` have the same results, up to rounding errors and the tolerance at which
    iterations stop.
    """
    a = definite()
    for solver in _equals(case):
        name = getattr(solver, "kind", type(solver).__name__)
        what = f"results of {name}, whose `equal_to` returns a solver, and of this solver"
        require_close(solve(solver, a), solve(case.component, a), EQUAL, what)


SOLVER_LAWS: tuple[Law[SolverCase[Any]], ...] = (
    Law(the_declaration_survives),
    Law(results_have_their_type_and_shape, decisive=True),
    Law(arguments_are_not_written_to, decisive=True),
    Law(a_stack_is_solved_as_its_matrices),
    Law(results_keep_dtype_and_device),
    Law(strided_and_expanded_stacks_are_accepted),
    Law(
        bad_matrices_are_marked_and_leave_the_others_alone,
        lambda case: "polar factors have no `ok`" if isinstance(case.component, PolarSolver) else None,
    ),
    Law(equal_solvers_compute_the_same, lambda case: None if _equals(case) else "no solver calls itself equal to it"),
)


# Laws of basis solvers.


def bases_are_orthonormal_and_independent_of_scale(case: SolverCase[BasisSolver]) -> None:
    """Q^T Q = I for each basis Q, and the basis of c A equals the basis of A for numbers c > 0."""
    a = definite()
    q = solve(case.component, a)
    eye = torch.eye(q.shape[-1], dtype=torch.float64).expand(4, -1, -1)
    require_close(q.mT @ q, eye, 1e-13, "Q^T Q and I")
    require_close(solve(case.component, a * 2.0**40), q, 1e-9, "the bases of 2^40 A and of A")


def bases_converge_to_the_eigenvectors(case: SolverCase[BasisSolver]) -> None:
    """After 200 refreshes with one matrix A, Q^T A Q is diagonal and has the leading eigenvalues of A.

    Adjacent eigenvalues have the ratio 1.5, so that each step divides the entries off the diagonal by about 1.5.
    """
    values, solver = 1.5 ** torch.arange(6.0, dtype=torch.float64), case.component
    a = (rotation(6, 1) @ torch.diag_embed(values) @ rotation(6, 1).T)[None]
    q = cold(solver, a)
    for refresh in range(200):
        q, _, ok = solver.basis(a, q, refresh == 0)
        require(ok.all(), f"`ok` at refresh {refresh}", "True", ok.tolist())
    b = q.mT @ a @ q
    diagonal = b.diagonal(dim1=1, dim2=2)
    error = float((b - torch.diag_embed(diagonal)).abs().max()) / float(b.abs().max())
    what = "entries of Q^T A Q off the diagonal after 200 refreshes, relative to the largest entry"
    require(error <= 1e-9, what, "at most 1e-9", f"{error:.2g}")
    what = "the diagonal of Q^T A Q and the leading eigenvalues of A"
    require_close(diagonal.sort().values, values[None, 6 - q.shape[-1] :], 1e-10, what)


BASIS_LAWS: tuple[Law[SolverCase[Any]], ...] = (
    Law(bases_are_orthonormal_and_independent_of_scale),
    Law(bases_converge_to_the_eigenvectors, lambda case: None if case.converges else "converges=False"),
)


_ABSOLUTE_RIDGE = (
    " (if the ridge is absolute, leave out `degree` of check_solver, or multiply the ridge by the size of A)"
)


def roots_turn_and_scale_with_the_matrix(case: SolverCase[RootSolver]) -> None:
    """(U A U^T)^-e = U A^-e U^T for orthogonal U, (c A)^-e = c^(k e) A^-e for c = 1e6, and roots are symmetric.

    k is the declared `degree`. The first equation is checked only with `rotates`, and the second only with a degree.
    """
    a, u, solver = definite(), rotation(6, 1), case.component
    root = solve(solver, a)
    require_close(root, root.mT, 1e-14, "the root and its transpose")
    if case.rotates:
        what = "the root of U A U^T and U R U^T for the root R of A"
        require_close(solve(solver, u @ a @ u.T), u @ root @ u.T, case.tolerance, what)
    if case.degree is not None:
        power = -case.degree * float(usual_exponent(solver))
        scaled = solve(solver, a * 1e6) * 1e6**power
        what = f"the root of 1e6 A, times 1e6^{power:g}, and the root of A"
        require_close(scaled, root, case.tolerance, what, lambda: _ABSOLUTE_RIDGE)


_REGULARIZED = " (does `regularized` add the ridge that root() adds, and does root() return the power -e?)"
_STEEP_REGULARIZED = (
    ", for a matrix with a condition number of up to 1e5",
    " (does `regularized` add the ridge that root() adds? If an iteration has not converged, set `ok` to False)",
)
"""The matrix and the remedy, as parts of a message."""


def a_root_undoes_its_matrix(case: SolverCase[RootSolver]) -> None:
    """A^-e f(A)^e = I, where A^-e is the solver's root, and f is the method `regularized`, which is applied to the
    eigenvalues of A. f adds the solver's ridge, and treats small eigenvalues as the solver does.

    If f returns 0 for an eigenvalue, the solver leaves it out, and I has 0 in its place. The tolerance is usually 1e-2,
    which allows for the residual of the solver. If f changes an eigenvalue by a larger fraction than 1e-2, the
    tolerance is this fraction, but at most 1/2. This allows for a ridge in root() that is proportional to a bound of
    the largest eigenvalue. The law also checks that a solver refuses exponents that it does not support, with a
    message.

    Two more matrices, whose least eigenvalues are 1e-4 and 1e-5 of the largest, find a small ridge that f does not add.
    One of these two is left out if the solver marks it as failed, or if f changes an eigenvalue by more than 1/2 of it.
    """
    solver = case.component
    for exponent in (Fraction(1, 4), Fraction(1, 2), Fraction(2, 3), Fraction(1)):
        problem = solver.check(exponent)
        if problem is not None:
            fine = f"{getattr(solver, 'kind', '?')} takes exponents" in problem and problem.endswith(f"got {exponent}")
            require(fine, "check()", f"'<kind> takes exponents ..., got {exponent}'", f"'{problem}'")
            continue
        ok, fractions, errors = _undone(solver, definite(), exponent)
        require(ok.all(), f"`ok` for definite matrices to the power -{exponent}", "True for all", ok.tolist())
        _require_undone(exponent, fractions.amax(0, keepdim=True).clamp_max(0.5), errors, "", _REGULARIZED)
        ok, fractions, errors = _undone(solver, _steep(), exponent)
        compared = ok & (fractions <= 0.5)
        _require_undone(exponent, fractions[compared], errors[compared], *_STEEP_REGULARIZED)


def _steep() -> Tensor:
    """Return positive definite matrices `[2, 6, 6]` with condition numbers 1e4 and 1e5."""
    values, q = torch.linalg.eigh(definite(2))
    spread = torch.stack([torch.logspace(-digits, 0, 6, dtype=q.dtype) for digits in (4, 5)]).to(q)
    return _of_spectrum(q, values[:, -1:] * spread)


def _of_spectrum(q: Tensor, values: Tensor) -> Tensor:
    """Return the matrices Q diag(values) Q^T `[N, d, d]`, for eigenvectors Q `[N, d, d]` or `[d, d]`, and `[N, d]`."""
    found: Tensor = (q * values.unsqueeze(1)) @ q.mT
    return found


def _undone(solver: RootSolver, a: Tensor, exponent: Fraction) -> tuple[Tensor, Tensor, Tensor]:
    """Return three tensors `[N]`: `ok` of the roots of a, the largest fraction by which `regularized` changes an
    eigenvalue, and the largest entry of A^-e f(A)^e - I, with `regularized` as f.
    """
    values, q = torch.linalg.eigh(a)
    treated = _treated(solver, values)
    kept = (treated > 0).to(a.dtype)
    power = _of_spectrum(q, treated.pow(float(exponent)))
    root, ok = solver.root(a, exponent)[:2]
    errors = (root @ power - _of_spectrum(q, kept)).abs().amax((1, 2))
    return ok, (kept * (treated / values - 1)).abs().amax(1), errors


def _require_undone(exponent: Fraction, fractions: Tensor, errors: Tensor, where: str, remedy: str) -> None:
    """Raise a LawError if a root does not undo its matrix: if an error exceeds its tolerance.

    exponent: exponent of the roots, for the message.
    fractions: the largest fraction by which `regularized` changes an eigenvalue, for each matrix, or one for all. The
        tolerance of an error is this fraction, or 1e-2 if the fraction is smaller.
    errors: for each matrix, the largest entry of A^-e f(A)^e - I, with f as in `a_root_undoes_its_matrix`.
    where: text that names the matrices in the message, or "".
    remedy: the end of the message.
    """
    bounds = fractions.clamp_min(1e-2).expand_as(errors)
    if not (errors <= bounds).all():
        place = int((errors - bounds).argmax())
        what = f"the largest entry of A^-e f(A)^e - I for e = {exponent}, with `regularized` as f{where}"
        raise broken(what, f"at most {float(bounds[place]):.2g}", f"{float(errors[place]):.2g}", remedy)


def _treated(solver: RootSolver, values: Tensor) -> Tensor:
    """Return `regularized(values)`. Raise a LawError unless it has one number of at least 0 for each eigenvalue, and
    keeps their order.
    """
    found, what = solver.regularized(values), "regularized() of positive eigenvalues"
    require(found.shape == values.shape, "regularized(), shape", f"{list(values.shape)}", list(found.shape))
    fine = bool(found.isfinite().all()) and bool((found >= 0).all())
    require(fine, what, "finite numbers of at least 0", found.tolist())
    ordered = found.gather(1, values.argsort(1)).diff(dim=1)
    fine = bool((ordered >= -ROUNDING * found.amax(1, keepdim=True)).all()) and bool((found.amax(1) > 0).all())
    require(fine, what, "numbers in the same order, not all of them 0", found.tolist())
    return found


def roots_come_with_a_report(case: SolverCase[RootSolver]) -> None:
    """A `Root` has the fields `iterations`, `residual` and `definite` for each matrix.

    For positive definite matrices, residuals are below 1. `definite` is True for a matrix unless `regularized` returns
    0 for one of its eigenvalues.
    """
    for dtype in (torch.float32, torch.float64):
        root = case.component.root(definite(dtype=dtype), usual_exponent(case.component))
        for name, want in (("iterations", torch.int32), ("residual", dtype), ("definite", torch.bool)):
            x = getattr(root, name)
            got = f"{x.dtype} of shape {list(x.shape)}"
            require((x.shape, x.dtype) == ((4,), want), name, f"{want} of shape [4]", got)
        worst = float(root.residual.max())
        require(worst < 1, "residual", "below 1", f"{worst:.2g}")
        wanted = (_treated(case.component, torch.linalg.eigvalsh(definite())) > 0).all(1).tolist()
        expected = f"{wanted}, True where `regularized` returns no 0"
        require(root.definite.tolist() == wanted, "definite", expected, root.definite.tolist())


def roots_of_diagonals_are_elementwise(case: SolverCase[RootSolver]) -> None:
    """Roots of diagonals a are f(a)^-e, where f is the method `regularized`. They are 0 where f(a) is 0. The
    tolerance is 1e-10. Only a diagonal that is not finite is marked as failed.
    """
    a, solver = torch.tensor([[4.0, 1.0, 0.25], [1e6, 1e6, 1e5]], dtype=torch.float64), case.component
    exponent = usual_exponent(solver)
    root = solver.diagonal_root(a, exponent)
    treated = _treated(solver, a)
    fine = bool(root.ok.all()) and torch.equal(root.definite, (treated > 0).all(1))
    what = "ok roots with int32 iterations, definite where `regularized` returns no 0"
    require(fine and root.iterations.dtype == torch.int32, "diagonal_root()", what, root)
    error = float((root.value * treated ** float(exponent) - (treated > 0).to(a.dtype)).abs().max())
    what = f"the relative error of f(a)^-{exponent}, with `regularized` as f"
    require(error <= ROUNDING, what, f"at most {ROUNDING:g}", f"{error:.2g}")
    spoiled = solver.diagonal_root(torch.cat([a, torch.full((1, 3), torch.nan, dtype=torch.float64)]), exponent)
    same = spoiled.ok.tolist() == [True, True, False] and torch.equal(spoiled.value[:2], root.value)
    require(same, "`ok` for a stack with nan in matrix 2", "[True, True, False]", spoiled.ok.tolist())
    unlike_rows = torch.cat([a, 1e-8 * a[:1], a.new_tensor([[1.0, 0.0, 0.0]])])
    together = solver.diagonal_root(unlike_rows, exponent).value.nan_to_num()
    cause = partial(stack_cause, solver, partial(solver.diagonal_root, a[:1].repeat(WATCHED_BLOCKS, 1), exponent))
    for i in range(len(unlike_rows)):
        alone = solver.diagonal_root(unlike_rows[i : i + 1], exponent).value.nan_to_num()
        stack = f"a stack of {len(unlike_rows)} in which one diagonal is 1e-8 times another"
        what = f"the root of diagonal {i}, alone and in {stack}"
        require_close(together[i : i + 1], alone, ROUNDING, what, cause)


def roots_of_singular_matrices_are_finite_or_marked(case: SolverCase[RootSolver]) -> None:
    """The root of a singular matrix is finite, or the matrix is marked as failed in `ok`.

    The matrices are 0, of rank 3 and 6 x 6, diagonal of rank 2, and with a small negative eigenvalue, as rounding gives
    it. Statistics are such matrices in the first steps of a run.
    """
    _, q = torch.linalg.eigh(definite(1)[0])
    values = torch.tensor([[0.0] * 6, [1.0, 1.0, 1.0, 0.0, 0.0, 0.0], [1.0, 0.5, 0.2, 0.1, 1e-3, -1e-6]]).to(q)
    diagonal = torch.diag(values.new_tensor([1.0, 1.0, 0.0, 0.0, 0.0, 0.0]))
    a = torch.cat([_of_spectrum(q, values), diagonal[None]])
    found, ok = case.component.root(a, usual_exponent(case.component))[:2]
    right = found.isfinite().flatten(1).all(1) | ~ok
    what = "roots of a zero matrix, one of rank 3, one with an eigenvalue of -1e-6, and a diagonal of rank 2"
    remedy = "add a ridge to the eigenvalues before the power, and raise negative ones to 0; or set `ok` to False"
    require(
        right.all(), what, "finite, or False in `ok`", f"finite or marked: {right.tolist()}", in_parentheses(remedy)
    )


ROOT_LAWS: tuple[Law[SolverCase[Any]], ...] = (
    Law(roots_of_singular_matrices_are_finite_or_marked),
    Law(roots_turn_and_scale_with_the_matrix),
    Law(a_root_undoes_its_matrix),
    Law(roots_come_with_a_report),
    Law(roots_of_diagonals_are_elementwise),
)


def polar_factors_follow_sign_and_rotation_but_not_scale(case: SolverCase[AnySolver]) -> None:
    """P(-X) = -P(X), P(X^T) = P(X)^T, P(c X) = P(X), P(U X V^T) = U P(X) V^T, and P(X) is close to the polar factor of
    X.

    P(X) is the result of the solver, c > 0 a number, and U and V are orthogonal.

    With rotates=False, rotated matrices are not compared, and neither are square matrices with their transposes.
    """
    for shape in ((6, 4), (4, 6), (5, 5), (1, 7), (7, 1)):
        x, u, v = standard_normal(3, *shape, seed=sum(shape)), rotation(shape[0], 1), rotation(shape[1], 2)
        polar, where = solve(case.component, x), f"for matrices {shape}"
        if case.rotates is not False:
            what = f"P(U X V^T) and U P(X) V^T {where}"
            require_close(solve(case.component, u @ x @ v.T), u @ polar @ v.T, ROUNDING, what)
        if case.rotates is not False or x.shape[1] != x.shape[2]:
            require_close(solve(case.component, x.mT), polar.mT, ROUNDING, f"P(X^T) and P(X)^T {where}")
        require_close(solve(case.component, -x), -polar, ROUNDING, f"P(-X) and -P(X) {where}")
        require_close(solve(case.component, x * 2.0**30), polar, ROUNDING, f"P(2^30 X) and P(X) {where}")
        left, _, right = torch.linalg.svd(x, full_matrices=False)
        cosine = float((left @ right * polar).sum() / (left @ right).norm() / polar.norm())
        require(cosine >= case.cosine, f"the cosine with U V^T {where}", f"at least {case.cosine}", f"{cosine:.3g}")


def polar_factors_of_difficult_matrices_are_finite(case: SolverCase[AnySolver]) -> None:
    """Polar factors of zero, tiny, huge, denormal and rank-one matrices in float32 are finite. Zero gives zero."""
    x = standard_normal(1, 5, 4, seed=1).float()
    difficult = {"zero": x * 0, "tiny": x * 1e-30, "huge": x * 1e30, "denormal": x * 1e-42}
    for name, given in {**difficult, "rank one": x[..., :1] * x[:, :1]}.items():
        polar = solve(case.component, given)
        require(polar.isfinite().all(), f"the result for a {name} matrix", "finite numbers", "nan or inf")
        norm = float(torch.linalg.matrix_norm(polar, ord=2).max())
        require(norm <= 1.5, f"the spectral norm of the result for a {name} matrix", "at most 1.5", f"{norm:.3g}")
    require(not solve(case.component, x * 0).any(), "the result for a zero matrix", "0", "other numbers")


POLAR_LAWS: tuple[Law[SolverCase[Any]], ...] = (
    Law(polar_factors_follow_sign_and_rotation_but_not_scale),
    Law(polar_factors_of_difficult_matrices_are_finite),
)


# Bounds of eigenvalues.


@dataclass(frozen=True)
class BoundCase(Case[EigenvalueBound]):
    """A bound of the largest eigenvalue, or an estimate of it.

    estimate: True for an estimate, which may be below the eigenvalue.
    """

    estimate: bool = False


def each_matrix_has_one_bound_and_is_not_written_to(case: BoundCase) -> None:
    """`of_scaled` returns `[N]` in the dtype of the matrices, and does not write to them."""
    for dtype in (torch.float32, torch.float64):
        a = _scaled(definite(dtype=dtype))
        before = a.clone()
        found: object = case.component.of_scaled(a)
        got = f"{found.dtype} of shape {list(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
        fine = isinstance(found, Tensor) and (found.dtype, tuple(found.shape)) == (dtype, (4,))
        require(fine, "of_scaled() of 4 matrices", f"{dtype} of shape [4]", got)
        if not torch.equal(a, before):
            cause = write_cause(case.component, {"the matrix": a}, partial(case.component.of_scaled, a))
            raise broken("the matrix after of_scaled()", "no change", "other numbers", cause)


def bounds_of_a_stack_are_those_of_its_matrices(case: BoundCase) -> None:
    """The bound of a matrix's largest eigenvalue is the same alone and in a stack of matrices."""
    cause = partial(stack_cause, case.component, partial(case.component.upper, definite(WATCHED_BLOCKS)))
    for name, a in (("", definite()), (UNLIKE, unlike(definite()))):
        together = case.component.upper(a)
        for i in range(len(a)):
            what = f"the bounds of matrix {i}, computed alone and in a stack of {len(a)}{name}"
            require_close(case.component.upper(a[i : i + 1]), together[i : i + 1], 1e-6, what, cause)


def bounds_scale_with_the_matrix(case: BoundCase) -> None:
    """The method `upper`, a bound of the largest eigenvalue, has upper(c A) = c upper(A) for c from 1e-30 to 1e30, in
    float32. The bound of a zero matrix is 0, and an empty stack of matrices gives an empty result.
    """
    a = definite(dtype=torch.float32)
    upper = case.component.upper(a)
    for scale in (1e-30, 1e30):
        what = f"upper({scale:g} A) / {scale:g} and upper(A)"
        require_close(case.component.upper(a * scale) / scale, upper, 1e-5, what)
    zero = case.component.upper(torch.zeros_like(a)).tolist()
    require(not any(zero), "bounds of zero matrices", "0", zero)
    none = list(case.component.upper(a[:0]).shape)
    require(none == [0], "the shape of the bounds of an empty stack", "[0]", none)


def bounds_are_not_below_the_eigenvalue(case: BoundCase) -> None:
    """The bound of a d x d matrix is at least its largest eigenvalue, up to a relative error of 2 d machine epsilon,
    and at most d times that eigenvalue.
    """
    for name, a in (("random", definite()), ("rank one", definite()[..., :1] @ definite()[..., :1].mT)):
        largest, upper, d = torch.linalg.eigvalsh(a)[:, -1], case.component.upper(a), a.shape[-1]
        ratios = (upper / largest).tolist()
        low = min(ratios) >= 1 - 2 * d * torch.finfo(torch.float64).eps
        what = f"the bound of a {name} matrix, divided by its largest eigenvalue"
        require(low, what, "at least 1", f"{min(ratios):.6g}")
        require(max(ratios) <= d * (1 + 1e-6), what, f"at most {d}", f"{max(ratios):.3g}")


def _scaled(a: Tensor) -> Tensor:
    return a / a.abs().amax((-2, -1), keepdim=True)


BOUND_LAWS: tuple[Law[BoundCase], ...] = (
    Law(the_declaration_survives),
    Law(each_matrix_has_one_bound_and_is_not_written_to, decisive=True),
    Law(bounds_of_a_stack_are_those_of_its_matrices),
    Law(bounds_scale_with_the_matrix),
    Law(bounds_are_not_below_the_eigenvalue, lambda case: "estimate=True" if case.estimate else None),
)
