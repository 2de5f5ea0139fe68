"""The laws of the parts that stages are made of: solvers, statistics, cadences, decays. Rows in `laws/table.py`."""

from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from eigengraft import Optimizer, State, StepContext
from eigengraft.component import checked, families
from eigengraft.preconditioners.statistics import Power, has_data, mean_eigenvalue

from ..trajectories import normal, rotation
from .rows import Row
from .table import TABLE

TOLERANCE = 1e-10
"""Relative, float64: some thousand roundings."""


def each(family: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("row", TABLE[family], ids=str)


def make(family: str, row: Row) -> Any:
    return checked(families()[family], dict(row.make))


def close(ours: Tensor, theirs: Tensor, tolerance: float = TOLERANCE) -> bool:
    return float((ours - theirs).abs().max()) <= tolerance * float(theirs.abs().max())


def definite(n: int = 4, d: int = 6, dtype: torch.dtype = torch.float64) -> Tensor:
    """Positive definite matrices `[n, d, d]` of condition up to 1e3."""
    x = normal(n, d, 2 * d, seed=n + d)
    return (x @ x.mT / d).to(dtype)


EXPONENT = Fraction(1, 4)
PARTS = [(f, row) for f in ("root_solver", "basis_solver", "polar_solver") for row in TABLE[f]]
every_solver = pytest.mark.parametrize(("family", "row"), PARTS, ids=[f"{f} {row}" for f, row in PARTS])


def solve(family: str, row: Row, a: Tensor) -> Tensor:
    """What the solver makes of a stack, from a cold start; a basis follows its matrix once."""
    solver = make(family, row)
    if family == "root_solver":
        value, ok = solver.root(a, EXPONENT)[:2]
    elif family == "basis_solver":
        q, _, ok = solver.basis(a, cold(solver, a), True)
        assert ok.all()
        value, _, ok = solver.basis(a + a.flip(-2, -1), q, False)
    else:
        return solver.polar(a)
    assert ok.all() and ok.shape == a.shape[:1] and ok.dtype == torch.bool
    return value


def cold(solver: Any, a: Tensor) -> Tensor:
    """The basis before the first refresh."""
    d = a.shape[-1]
    return torch.eye(d, solver.columns(d), dtype=a.dtype).expand(len(a), -1, -1)


@every_solver
def test_a_stack_is_solved_as_its_matrices(family: str, row: Row) -> None:
    a = definite()
    together = solve(family, row, a)
    for i in range(len(a)):
        assert close(together[i : i + 1], solve(family, row, a[i : i + 1]))


@every_solver
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_solvers_keep_dtype_and_device_and_write_to_nothing(family: str, row: Row, dtype: torch.dtype) -> None:
    a = definite(dtype=dtype)
    before = a.clone()
    out = solve(family, row, a)
    columns = make(family, row).columns(6) if family == "basis_solver" else 6
    assert out.dtype == dtype and out.device == a.device and out.shape == (4, 6, columns)
    assert torch.equal(a, before)


@every_solver
def test_solvers_take_strided_and_expanded_stacks(family: str, row: Row) -> None:
    a = definite()
    strided = torch.stack([a, -a], dim=-1)[..., 0]
    assert close(solve(family, row, strided), solve(family, row, a))
    assert close(solve(family, row, a[:1].expand(3, -1, -1))[1:2], solve(family, row, a[:1]))


STOPPING = ("coupled_newton", "higher_order", "newton_db")


@each("root_solver")
def test_roots_turn_and_scale_with_the_matrix(row: Row) -> None:
    """(U A U^T)^-e = U A^-e U^T and (c A)^-e = c^-e A^-e. 1e-5 for solvers that stop at a tolerance, 1e-6 at most: the
    rounding of c A may give them one step more."""
    a, u = definite(), rotation(6, 1)
    tolerance = 1e-5 if row.kind in STOPPING else TOLERANCE
    root = solve("root_solver", row, a)
    assert close(root, root.mT, 1e-14)
    if row.rotates:
        assert close(solve("root_solver", row, u @ a @ u.T), u @ root @ u.T, tolerance)
    if row.degree is not None:
        assert close(solve("root_solver", row, a * 1e6) * 1e6 ** float(EXPONENT), root, tolerance)


@each("root_solver")
@pytest.mark.parametrize("exponent", [Fraction(1, 4), Fraction(1, 2), Fraction(2, 3), Fraction(1)])
def test_a_root_undoes_its_matrix(row: Row, exponent: Fraction) -> None:
    """A^-e A^e = I, up to the ridge: its unit, the size, is up to 60 times the smallest eigenvalue. 1e-2: a residual of
    the solver, which is below its `max_error`. An exponent that a solver cannot take is refused in words."""
    a, solver = definite(), make("root_solver", row)
    problem = solver.check(exponent)
    if problem is not None:
        assert f"{row.kind} takes exponents" in problem and problem.endswith(f"got {exponent}")
        return
    values, q = torch.linalg.eigh(a)
    power = (q * values.pow(float(exponent)).unsqueeze(1)) @ q.mT
    root, ok = solver.root(a, exponent)[:2]
    assert ok.all() and float((root @ power - torch.eye(6)).abs().max()) <= max(1e-2, 60 * solver.eps)


@each("root_solver")
def test_roots_come_with_a_report(row: Row) -> None:
    """One number a matrix, on its device: a definite matrix has a definite root whose residual is small."""
    for dtype in (torch.float32, torch.float64):
        root = make("root_solver", row).root(definite(dtype=dtype), EXPONENT)
        assert root.iterations.shape == root.residual.shape == root.definite.shape == (4,)
        assert (root.iterations.dtype, root.residual.dtype, root.definite.dtype) == (torch.int32, dtype, torch.bool)
        assert root.definite.all() and bool((root.residual < getattr(make("root_solver", row), "max_error", 1)).all())
        assert bool((root.iterations > 0).all()) == (row.kind != "eigh")


@each("root_solver")
def test_roots_of_diagonals(row: Row) -> None:
    """Elementwise (a + r)^-e, r as for a matrix: 60 times a relative eps, as above. A bad row is rejected alone."""
    a, solver = torch.tensor([[4.0, 1.0, 0.25], [1e6, 1e6, 1e5]], dtype=torch.float64), make("root_solver", row)
    root = solver.diagonal_root(a, EXPONENT)
    assert root.ok.all() and root.definite.all() and root.iterations.dtype == torch.int32
    assert float((root.value * a**0.25 - 1).abs().max()) <= max(1e-10, 60 * solver.eps)
    spoiled = solver.diagonal_root(torch.cat([a, torch.full((1, 3), torch.nan, dtype=torch.float64)]), EXPONENT)
    assert spoiled.ok.tolist() == [True, True, False] and torch.equal(spoiled.value[:2], root.value)


@each("basis_solver")
def test_bases_are_orthonormal_and_know_no_scale(row: Row) -> None:
    a = definite()
    q = solve("basis_solver", row, a)
    assert close(q.mT @ q, torch.eye(q.shape[-1], dtype=torch.float64).expand(4, -1, -1), 1e-13)
    assert close(solve("basis_solver", row, a * 2.0**40), q, 1e-9)


# ascending order and single steps: does not settle, as its docstring says and `test_bases.py` measures
SETTLING = [row for row in TABLE["basis_solver"] if str(row) != "qr_iteration"]


@pytest.mark.parametrize("row", SETTLING, ids=str)
def test_bases_converge_to_the_eigenvectors(row: Row) -> None:
    """By repeated refreshes of one matrix Q^T A Q becomes diag(leading eigenvalues): a step shrinks what is off it by a
    gap of 1.5."""
    values = 1.5 ** torch.arange(6.0, dtype=torch.float64)
    a = (rotation(6, 1) @ torch.diag_embed(values) @ rotation(6, 1).T)[None]
    solver = make("basis_solver", row)
    q = cold(solver, a)
    for refresh in range(200):
        q, _, ok = solver.basis(a, q, refresh == 0)
        assert ok.all()
    b = q.mT @ a @ q
    diagonal = b.diagonal(dim1=1, dim2=2)
    assert float((b - torch.diag_embed(diagonal)).abs().max()) <= 1e-9 * float(b.abs().max())
    assert close(diagonal.sort().values, values[None, 6 - q.shape[-1] :])


@each("polar_solver")
@pytest.mark.parametrize("shape", [(6, 4), (4, 6), (5, 5), (1, 7), (7, 1)])
def test_polar_factors(row: Row, shape: tuple[int, int]) -> None:
    """Odd in the matrix, the same for its transpose, blind to its size, turning with it, and near U V^T."""
    x = normal(3, *shape, seed=sum(shape))
    polar = solve("polar_solver", row, x)
    assert close(solve("polar_solver", row, x.mT), polar.mT)
    assert close(solve("polar_solver", row, -x), -polar)
    assert close(solve("polar_solver", row, x * 2.0**30), polar)
    u, v = rotation(shape[0], 1), rotation(shape[1], 2)
    assert close(solve("polar_solver", row, u @ x @ v.T), u @ polar @ v.T)
    left, _, right = torch.linalg.svd(x, full_matrices=False)
    cosine = (left @ right * polar).sum() / (left @ right).norm() / polar.norm()
    assert float(cosine) >= (1 - 1e-12 if row.kind == "svd" else 0.9)


@each("polar_solver")
def test_polar_factors_of_difficult_matrices_are_finite(row: Row) -> None:
    x = normal(1, 5, 4, seed=1).float()
    rank_one = x[..., :1] * x[:, :1]
    for given in (torch.zeros_like(x), x * 1e-30, x * 1e30, rank_one, x * 1e-42):
        polar = solve("polar_solver", row, given)
        assert polar.isfinite().all() and float(torch.linalg.matrix_norm(polar, ord=2).max()) <= 1.5
    assert not solve("polar_solver", row, torch.zeros_like(x)).any()


def gathered(row: Row, given: Tensor) -> tuple[Any, State, StepContext]:
    """A statistic that has seen gradients `[T, N, *block]`, with powers of its factors by the definition."""
    statistic, block = make("statistic", row), tuple(given.shape[2:])
    axes = statistic.axes.of(block)
    slots = statistic.slots(block, axes)
    tensors = {f"s/{n}": s.allocate(given.shape[1], given.dtype, given.device) for n, s in slots.items()}
    state = State(tensors, block, "s")
    for t, gradient in enumerate(given, start=1):
        n = len(gradient)
        context = StepContext(np.full(n, t), np.zeros(n), np.arange(n))
        statistic.observe(state, gradient, context, axes, partial(exact_power, statistic, state, context))
    return statistic, state, context


def exact_power(statistic: Any, state: State, context: StepContext, axis: int, exponent: Fraction) -> Power:
    """The power of what has been accumulated, eigenvalues at least 1e-3 of their mean."""
    a = statistic.estimate(state, axis, context, behind=1)
    unit, known = mean_eigenvalue(a), has_data(a)
    diagonal = a if a.ndim == 3 else torch.diag_embed(a)
    values, q = torch.linalg.eigh(diagonal / unit[:, None, None])
    values = values.clamp_min(1e-3)
    half = values.pow(float(exponent) / 2).unsqueeze(-1) * q.mT
    if a.ndim == 2:
        half = (q @ half).diagonal(dim1=1, dim2=2)
    return Power(half, half, unit, values.pow(float(exponent) + 1).sum(-1), known)


@each("statistic")
@pytest.mark.parametrize("block", [(6, 3), (5,), (3, 2, 4)], ids=str)
def test_statistics_are_symmetric_semidefinite_and_scale(row: Row, block: tuple[int, ...]) -> None:
    """By the degree in the row, for each order of block. 1e-5: some tens of roundings in float32, in powers."""
    given = normal(5, 2, *block, seed=4).float()
    before = given.clone()
    statistic, state, context = gathered(row, given)
    assert torch.equal(given, before)
    _, scaled, _ = gathered(row, given * 2.0**8)
    degree = row.degree(len(block)) if callable(row.degree) else row.degree
    assert statistic.slots(block, statistic.axes.of(block)).keys() == {f"factor.{a}" for a in statistic.axes.of(block)}
    for axis in statistic.axes.of(block):
        a = statistic.estimate(state, axis, context)
        matrix = a if a.ndim == 3 else torch.diag_embed(a)
        assert close(matrix, matrix.mT, 1e-5)
        assert float(torch.linalg.eigvalsh(matrix).min()) >= -1e-5 * float(a.abs().max())
        assert close(statistic.estimate(scaled, axis, context), a * 2.0 ** (8 * degree), 1e-5)


@each("statistic")
def test_statistics_of_a_stack_are_those_of_its_blocks(row: Row) -> None:
    given = normal(5, 3, 6, 3, seed=4)
    statistic, state, context = gathered(row, given)
    for n in range(3):
        _, alone, first = gathered(row, given[:, n : n + 1])
        for axis in statistic.axes.of((6, 3)):
            together = statistic.estimate(state, axis, context)[n : n + 1]
            assert close(together, statistic.estimate(alone, axis, first), 1e-12)


@each("cadence")
@pytest.mark.parametrize("blocks", [1, 7])
@pytest.mark.parametrize("earliest", [0, 1])
def test_every_block_is_refreshed_first_once_and_then_at_its_interval(row: Row, blocks: int, earliest: int) -> None:
    cadence, start = make("cadence", row), row.make.get("start") or earliest
    phases, seeds = np.arange(blocks) / blocks, np.arange(blocks) - 2**62
    seen: dict[int, list[int]] = {block: [] for block in range(blocks)}
    for t in range(41):
        context = StepContext(np.full(blocks, t), phases, np.arange(blocks), seeds=seeds)
        spans = list(cadence.due(context, earliest))
        covered = [block for first, last, _ in spans for block in range(first, last)]
        assert covered == sorted(set(covered))
        for first, last, opening in spans:
            assert 0 <= first < last <= blocks
            for block in range(first, last):
                assert opening == (not seen[block])
                seen[block].append(t)
    for times in seen.values():
        assert times[0] == start and len(times) > 1
        if row.kind == "every":
            steps = row.make["steps"]
            assert all(gap == steps for gap in np.diff(times[1:])) and times[1] - times[0] <= steps


def test_refreshes_are_spread_over_the_interval() -> None:
    """With `stagger: cost` every step of an interval refreshes an equal part; with `none` one step refreshes all."""
    phases = np.arange(20) / 20
    for stagger, expected in (("cost", [4, 4, 4, 4, 4]), ("none", [20, 0, 0, 0, 0])):
        cadence = make("cadence", Row({"kind": "every", "steps": 5, "stagger": stagger}))
        spans = [list(cadence.due(StepContext(np.full(20, t), phases, np.arange(20)), 1)) for t in range(10, 15)]
        assert [sum(last - first for first, last, _ in found) for found in spans] == expected
        assert all(len(found) <= 1 for found in spans)


def due(cadence: Any, t: int, seeds: np.ndarray) -> np.ndarray:
    """Which blocks with these seeds, none for no seeds on the context, are due at step t."""
    blocks = len(seeds) or 5
    codes = np.zeros(blocks, dtype=bool)
    for first, last, _ in cadence.due(
        StepContext(np.full(blocks, t), np.zeros(blocks), np.arange(blocks), seeds=seeds), 1
    ):
        codes[first:last] = True
    return codes


@pytest.mark.parametrize("probability", [0.05, 0.5, 1.0])
@pytest.mark.parametrize("shared", [False, True])
def test_blocks_are_due_with_their_probability(probability: float, shared: bool) -> None:
    """40 blocks, 400 steps. 5 standard deviations of a mean of independent draws, of which there are 400 if shared;
    within 5 of 0 correlations between neighbouring steps, blocks and seeds."""
    make_it = {"kind": "probability", "probability": probability, "shared": shared}
    seeds = np.random.default_rng(1).integers(-(2**63), 2**63, 40)
    one, two = (
        np.array([due(make("cadence", Row({**make_it, "seed": seed})), t, seeds) for t in range(2, 402)], dtype=float)
        for seed in (0, 1)
    )
    draws, spread = 400 if shared else 16_000, (probability * (1 - probability)) ** 0.5
    assert abs(one.mean() - probability) <= 5 * spread / draws**0.5
    assert not shared or (one == one[:, :1]).all()
    for a, b in ((one[1:], one[:-1]), (one, two), *(() if shared else ((one[:, 1:], one[:, :-1]),))):
        covariance = ((a - probability) * (b - probability)).mean()
        assert abs(covariance) <= 5 * spread**2 / (draws - 400 if not shared else draws - 1) ** 0.5


def test_draws_belong_to_the_block_not_to_its_place() -> None:
    """Any part of a stack, in any order, at any steps of its blocks, is due as it is in the whole."""
    cadence = make("cadence", Row({"kind": "probability", "probability": 0.4}))
    seeds = np.random.default_rng(2).integers(-(2**63), 2**63, 12)
    some = np.array([7, 3, 11, 0])
    for t in range(2, 40):
        assert (due(cadence, t, seeds)[some] == due(cadence, t, seeds[some])).all()
        assert len({*due(cadence, t, np.zeros(0, dtype=np.int64))}) == 1
    steps = np.arange(2, 40)
    context = StepContext(steps, steps / 40, steps, seeds=np.full(38, seeds[3]))
    found = {block for first, last, _ in cadence.due(context, 1) for block in range(first, last)}
    assert found == {place for place, t in enumerate(steps) if due(cadence, int(t), seeds)[3]}


LRS = [0.1, 0.2, 0.05, 0.0, 0.1]


@each("weight_decay")
@pytest.mark.parametrize("stage", ["identity", "sign"])
def test_weight_decays_are_their_formulas(row: Row, stage: str) -> None:
    """Against the definition, over a schedule that rises above its peak (the initial lr), and to zero."""
    w, rate, peak = normal(4, 3, seed=1), row.make["rate"], LRS[0]
    parameter = torch.nn.Parameter(w.clone())
    optimizer = Optimizer([parameter], {"update": [stage], "routes": [], "weight_decay": dict(row.make)}, lr=peak)
    for t, lr in enumerate(LRS):
        optimizer.param_groups[0]["lr"] = lr
        g = normal(4, 3, seed=10 + t)
        parameter.grad = g.clone()
        optimizer.step()
        assert torch.equal(parameter.grad, g)
        if row.kind == "l2":
            g = g + rate * w
        u = g.sign() if stage == "sign" else g
        alpha = {"l2": 0.0, "corrected": rate * lr / peak, "independent": rate / peak}.get(row.kind, rate)
        decayed = w - lr * alpha * w
        if row.kind == "cautious":
            decayed = torch.where(u * w > 0, decayed, w)
        w = (w - lr * u) * (1 - lr * alpha) if row.make.get("placed") == "after" else decayed - lr * u
        assert close(parameter.detach(), w, 1e-14)


@each("weight_decay")
def test_a_rate_of_zero_is_no_decay(row: Row) -> None:
    paths = []
    for rate in (0.0, None):
        parameter = torch.nn.Parameter(normal(4, 3, seed=1))
        decay = {**row.make, "rate": rate} if rate is not None else {"kind": "decoupled"}
        optimizer = Optimizer([parameter], {"update": ["momentum"], "routes": [], "weight_decay": decay}, lr=0.1)
        for t in range(4):
            parameter.grad = normal(4, 3, seed=10 + t)
            optimizer.step()
        paths.append(parameter.detach())
    assert torch.equal(*paths)
