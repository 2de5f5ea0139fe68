"""Statistics by their definitions, written out in float64: what is accumulated, and what the other axes do to it."""

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from eigengraft import Optimizer, RecipeError, State, StepContext, load_recipe
from eigengraft.component import validated
from eigengraft.preconditioners import Eigenbasis, Shampoo, Stage, chain_slots
from eigengraft.preconditioners.algebra.products import mode_product
from eigengraft.preconditioners.statistics import bregman

from ..refusals import refused
from ..trajectories import normal, rotation

EVERY = {"kind": "every", "steps": 1, "stagger": "none"}
BETA = 0.9


class Stepper:
    """One block of one stage, stepped by hand."""

    def __init__(self, declared: dict[str, Any], block: tuple[int, ...]) -> None:
        self.stage: Any = validated(Stage, declared)  # type: ignore[type-abstract]
        cpu = torch.device("cpu")
        slots = chain_slots((self.stage,), block)
        self.tensors = {f"{p}/{n}": s.allocate(1, torch.float64, cpu) for p, n, s in slots}
        self.state, self.t = State(self.tensors, block, self.stage.label), 0

    def step(self, gradient: Tensor, direction: Tensor | None = None) -> Tensor:
        self.t += 1
        g = gradient[None]
        out = self.stage.run(self.state, g, g if direction is None else direction[None], self.context())
        assert isinstance(out, Tensor)
        return out[0]

    def context(self) -> StepContext:
        return StepContext(np.array([self.t]), np.zeros(1), np.zeros(1, dtype=np.int64))

    def estimate(self, axis: int) -> Tensor:
        found: Tensor = self.stage.estimate(self.state, axis, self.context())
        return found[0]


def unfolded(x: Tensor, axis: int) -> Tensor:
    return x.movedim(axis, 0).reshape(x.shape[axis], -1)


def power(a: Tensor, p: float) -> Tensor:
    values, q = torch.linalg.eigh(a)
    return (q * values.pow(p)) @ q.T


def times(x: Tensor, matrix: Tensor, axis: int) -> Tensor:
    return torch.tensordot(matrix, x, dims=([1], [axis])).movedim(0, axis)


def close(ours: Tensor, theirs: Tensor, tolerance: float = 1e-10) -> bool:
    return float((ours - theirs).abs().max()) <= tolerance * float(theirs.abs().max())


FORMS: list[dict[str, Any]] = [
    {"beta": BETA},
    {"beta": BETA, "damped": False},
    {"beta": BETA, "bias_correction": False, "initial": 0.3},
    {"beta": 1.0, "initial": 0.3},
    {"beta": BETA, "interval": 3},
    {"beta": BETA, "interval": 3, "start": 2},
    {"beta": 1.0, "start": 4},
    {"beta": BETA, "normalize": "dimension"},
    {"beta": BETA, "trace_scaling": 0.5},
    {"beta": BETA, "axes": {"entries": "diagonal"}},
    {"beta": BETA, "axes": {"max_size": 3, "oversize": "diagonal"}, "initial": 0.3},
]


@pytest.mark.parametrize("block", [(4, 3), (5,), (3, 2, 4)], ids=str)
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_gram_is_a_weighted_sum_of_gram_matrices(form: dict[str, Any], block: tuple[int, ...]) -> None:
    """After 7 gradients, sum by sum. 1e-13: some tens of roundings."""
    stage = Stepper(
        {"kind": "shampoo", "statistic": {"kind": "gram", **form}, "refresh": {**EVERY, "start": 99}}, block
    )
    given = [normal(*block, seed=t) for t in range(1, 8)]
    for gradient in given:
        stage.step(gradient)
    beta, times_seen = form["beta"], range(form.get("start", 1), 8, form.get("interval", 1))
    weight = 1 - beta if beta < 1 and form.get("damped", True) else 1.0
    last = len(times_seen)
    for axis, d in enumerate(block):
        a = form.get("initial", 0.0) * beta**last * torch.eye(d, dtype=torch.float64)
        for k, t in enumerate(times_seen, start=1):
            x = unfolded(given[t - 1], axis)
            scale = 1 / x.shape[1] if form.get("normalize") == "dimension" else 1.0
            a = a + weight * beta ** (last - k) * scale * (x @ x.T)
        if beta < 1 and form.get("bias_correction", True) and form.get("damped", True):
            a = a / (1 - beta**last)
        if form.get("trace_scaling"):
            a = a * a.trace() ** -form["trace_scaling"]
        axes = form.get("axes", {})
        diagonal = axes.get("entries") == "diagonal" or d > axes.get("max_size", d)
        assert close(stage.estimate(axis), a.diagonal() if diagonal else a, 1e-13)


def test_no_product_is_computed_with_roots_that_are_identities() -> None:
    """A matrix of 8 x 8 has two products with its roots, each of 2 * 8^3 operations. Products that are added to the
    statistics in place are not counted."""
    stage = Stepper({"kind": "shampoo", "statistic": "gram", "refresh": {**EVERY, "steps": 9, "start": 3}}, (8, 8))
    counted = []
    for step in range(1, 5):
        with FlopCounterMode(display=False) as counter:
            stage.step(normal(8, 8, seed=step))
        counted.append(counter.get_total_flops())
    assert [counted[0], counted[1], counted[3]] == [0, 0, 2 * 2 * 8**3]


@pytest.mark.parametrize(("interval", "start"), [(1, 1), (3, 1), (1, 2), (3, 2)])
def test_means_of_a_lagged_stage_count_the_first_gradient(interval: int, start: int) -> None:
    """The gradient is constant, so all its Gram matrices and their mean are equal. 1e-13: some tens of roundings.

    With start 2, the first gradient, which only initializes a lagged stage, is not observed.
    """
    statistic = {"kind": "gram", "beta": 0.5, "interval": interval, "slow": {"beta": 0.99, "weight": 0.5}}
    refresh = {**EVERY, "start": 1 + start} if start > 1 else EVERY
    basis = {"kind": "eigenbasis", "timing": "lagged", "statistic": {**statistic, "start": start}, "refresh": refresh}
    stage = Stepper({**basis, "inner": ["rms"], "transport": "exact"}, (4, 3))
    gradient = normal(4, 3, seed=1)
    stage.stage.prime(stage.state, gradient[None], gradient[None], stage.context())
    for step in range(1, 8):
        stage.step(gradient)
        assert step < start or close(stage.estimate(0), gradient @ gradient.T, 1e-13)


@pytest.mark.parametrize("source", ["direction", "orthogonalized"])
def test_a_statistic_may_be_of_the_direction(source: str) -> None:
    """Of the direction, or of its polar factor, whose Gram matrices have eigenvalues in Newton-Schulz's band."""
    declared = {"kind": "shampoo", "statistic": {"kind": "gram", "beta": 0.0, "source": source}, "refresh": EVERY}
    stage, g, d = Stepper(declared, (4, 6)), normal(4, 6, seed=1), normal(4, 6, seed=2)
    stage.step(g, d)
    if source == "direction":
        assert close(stage.estimate(0), d @ d.T, 1e-14)
    else:
        values = torch.linalg.eigvalsh(stage.estimate(0))
        assert float(values.min()) >= 0.6**2 and float(values.max()) <= 1.2**2
        assert close(stage.estimate(0) @ d @ d.T, d @ d.T @ stage.estimate(0), 1e-10)


def bregman_by_definition(given: list[Tensor], q: float, order: str, normalize: str) -> list[Tensor]:
    """The factors after the last gradient, corrected, by the formulas of the docstring alone."""
    block = given[0].shape
    k = len(block)
    start = float(given[0].square().mean()) ** (1 / k)
    raw = [torch.zeros(d, d, dtype=torch.float64) for d in block]
    counts = [0] * k

    def corrected(axis: int) -> Tensor:
        return raw[axis] / (1 - BETA ** counts[axis])

    def contribution(x: Tensor, axis: int) -> Tensor:
        left, scale = x, 1.0
        for other in range(k):
            if other == axis:
                continue
            a = corrected(other) if counts[other] else start * torch.eye(block[other], dtype=torch.float64)
            left = times(left, power(a, q - 1), other)
            values = torch.linalg.eigvalsh(a)
            scale /= {"trace": float(values.pow(q).sum()), "dimension": block[other]}[normalize]
        return scale * unfolded(left, axis) @ unfolded(x, axis).T

    for x in given:
        if order == "jacobi":
            new = [contribution(x, axis) for axis in range(k)]
        for axis in range(k):
            o = new[axis] if order == "jacobi" else contribution(x, axis)
            raw[axis] = BETA * raw[axis] + (1 - BETA) * o
            counts[axis] += 1
    return [corrected(axis) for axis in range(k)]


QS = ["0", "1/2", "1", "2"]


OWNERS = [(owner, block) for owner in ("roots", "basis") for block in ((4, 4), (2, 3, 4))]
OWNERS += [("basis", (2, 3, 2, 2)), ("diagonals", (4, 4))]


@pytest.mark.parametrize(("owner", "block"), OWNERS, ids=str)
@pytest.mark.parametrize("normalize", ["trace", "dimension"])
@pytest.mark.parametrize("order", ["jacobi", "gauss_seidel"])
@pytest.mark.parametrize("q", QS)
def test_bregman_factors_are_their_definition(
    q: str, owner: str, order: str, normalize: str, block: tuple[int, ...]
) -> None:
    """Six steps, whatever knows the other factors: inverse roots, a basis, or diagonals (of diagonal blocks).

    1e-9: the factors have conditions up to 1e5 in the first steps, and are read as powers of each other.
    """
    statistic = {
        "kind": "bregman",
        "q": q,
        "beta": BETA,
        "order": order,
        "normalize": normalize,
    }
    declared: dict[str, Any] = {"kind": "shampoo", "exponent": "1/2", "solver": {"kind": "eigh", "eps": 0.0}}
    if owner == "basis":
        declared = {"kind": "eigenbasis", "inner": "identity", "solver": "eigh", "floor": 0.0}
    entries = "diagonal" if owner == "diagonals" else "full"
    stage = Stepper({**declared, "refresh": EVERY, "statistic": {**statistic, "axes": {"entries": entries}}}, block)
    given = [normal(*block, seed=t) / 2 for t in range(6)]  # with q = 2 factors of order 4 grow as their third powers
    if owner == "diagonals":  # of diagonal gradients every Gram matrix is diagonal
        given = [x * torch.eye(*block, dtype=torch.float64) for x in given]
    for gradient in given:
        stage.step(gradient)
    expected = bregman_by_definition(given, float(Fraction(q)), order, normalize)
    for axis, a in enumerate(expected):
        ours = stage.estimate(axis)
        assert close(ours, a.diagonal() if owner == "diagonals" else a, 1e-9)


@pytest.mark.parametrize(("block", "products"), [((4, 3), 2), ((2, 3, 4), 5), ((2, 3, 4, 2), 8)], ids=str)
def test_axes_share_what_whitens_their_gradients(
    block: tuple[int, ...], products: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of k axes each is whitened along k - 1 others: k (k - 1) products apart. Both sides of a KL factor are one."""
    stage = Stepper({"kind": "eigenbasis", "inner": "identity", "refresh": EVERY, "statistic": "bregman"}, block)
    stage.step(normal(*block, seed=0))
    counted = 0

    def product(x: Tensor, matrix: Tensor, axis: int) -> Tensor:
        nonlocal counted
        counted += 1
        return mode_product(x, matrix, axis)

    monkeypatch.setattr(bregman, "mode_product", product)
    stage.step(normal(*block, seed=1))
    assert counted == products


@pytest.mark.slow
@pytest.mark.parametrize("q", QS)
def test_every_divergence_finds_a_kronecker_covariance(q: str) -> None:
    """For g ~ N(0, L x R) each member of the family has L x R as its fixed point, up to one scale between the two.

    0.25: the mean over about 1 / (1 - 0.998) = 500 samples of 4 x 5 entries, and a bias of first order in 1 - beta.
    """
    left, right = (power(normal(d, 3 * d, seed=d) @ normal(d, 3 * d, seed=d).T / d, 1.0) for d in (4, 5))
    statistic = {"kind": "bregman", "q": q, "beta": 0.998}
    solver = {"kind": "eigh", "eps": 1e-12}
    stage = Stepper(
        {
            "kind": "shampoo",
            "exponent": "1/2",
            "solver": solver,
            "statistic": statistic,
            "refresh": {**EVERY, "steps": 4, "start": 20},  # earlier factors are singular, and whitening by them huge
        },
        (4, 5),
    )
    a, b = power(left, 0.5), power(right, 0.5)
    for t in range(1200):
        stage.step(a @ normal(4, 5, seed=t) @ b)
    found = torch.kron(stage.estimate(0), stage.estimate(1))
    assert close(found, torch.kron(left, right), 0.25)


def test_homogeneity_of_every_order() -> None:
    """All factors of a block have one unit, RMS^(2/k): scaling the gradients by c scales each factor by c^(2/k)."""
    for block in ((3, 4), (2, 3, 4)):
        declared = {
            "kind": "shampoo",
            "exponent": "1/2",
            "statistic": {"kind": "bregman", "beta": BETA},
            "solver": {"kind": "eigh", "eps": 1e-4, "relative": True},
            "refresh": EVERY,
        }
        plain, scaled = Stepper(declared, block), Stepper(declared, block)
        for t in range(5):
            plain.step(normal(*block, seed=t))
            scaled.step(normal(*block, seed=t) * 1e3)
        for axis in range(len(block)):
            factor = 1e3 ** (2 / len(block))
            assert close(scaled.estimate(axis), plain.estimate(axis) * factor, 1e-7)


@pytest.mark.parametrize(
    ("q", "exponent"), [("1/3", "1/2"), ("3/2", "1/2"), ("0", "2/3")], ids=lambda value: value.replace("/", "_")
)
def test_powers_that_no_root_gives_are_refused(q: str, exponent: str) -> None:
    with refused(RecipeError, "q"):
        load_recipe(
            [{"kind": "shampoo", "exponent": exponent, "statistic": {"kind": "bregman", "q": q}}],
        )


def test_exponents_by_order_and_axis() -> None:
    """2-d blocks: A_0^(-1/2) on the left, nothing on the right, no factor for it; 1-d blocks: the default, 1/2."""
    declared = {"kind": "shampoo", "exponent": {2: ["1/2", 0]}, "refresh": EVERY, "statistic": {"kind": "gram"}}
    stage, given = Stepper(declared, (3, 5)), [normal(3, 5, seed=t) for t in range(4)]
    for gradient in given:
        out = stage.step(gradient)
    assert set(stage.tensors) == {"shampoo/factor.0", "shampoo/root.0", "shampoo/failures.0"}
    assert close(out, power(stage.estimate(0), -0.5) @ given[-1], 1e-9)
    vector = Stepper({**declared, "solver": {"kind": "eigh", "eps": 1e-3}}, (3,))
    g = normal(3, seed=1)
    assert close(vector.step(g), power(torch.outer(g, g) + 1e-3 * torch.eye(3, dtype=torch.float64), -0.5) @ g, 1e-9)


def test_exponents_survive_json() -> None:
    recipe = load_recipe([{"kind": "shampoo", "exponent": {2: ["1/2", 0], 1: 0.25}, "statistic": {"kind": "gram"}}])
    again = load_recipe(recipe.to_json())
    assert again == recipe and isinstance(again.update[0], Shampoo)
    assert again.update[0].exponent == {2: (Fraction(1, 2), Fraction(0)), 1: (Fraction(1, 4),)}


@pytest.mark.parametrize(
    ("exponent", "says"),
    [
        ({2: ["1/2"]}, (2,)),
        ({"two": 0.5}, ("exponent",)),
        ({2: [0.5, -1]}, (0,)),
        ([0.5, 0.5], (0,)),
    ],
)
def test_wrong_exponents(exponent: Any, says: tuple[object, ...]) -> None:
    with refused(RecipeError, *says):
        load_recipe([{"kind": "shampoo", "exponent": exponent}])


def test_chosen_axes() -> None:
    statistic = {"kind": "gram", "axes": {"side": {2: [1], 3: [0, 2]}}}
    for block, axes in (((3, 4), {1}), ((2, 3, 4), {0, 2}), ((5,), {0})):
        stage = Stepper({"kind": "shampoo", "statistic": statistic}, block)
        assert {int(key.rpartition(".")[2]) for key in stage.tensors if "factor" in key} == axes


def test_a_basis_needs_full_factors() -> None:
    with refused(RecipeError, "update.eigenbasis.statistic", "axes", "diagonal"):
        load_recipe(
            [{"kind": "eigenbasis", "inner": "rms", "statistic": {"kind": "gram", "axes": {"entries": "diagonal"}}}]
        )
    with refused(RecipeError, "update.eigenbasis.statistic", "bregman"):
        load_recipe([{"kind": "eigenbasis", "inner": "rms", "statistic": "bregman", "solver": "subspace"}])


def test_diagonal_factors_follow_a_basis() -> None:
    """Diagonal factors inside a basis are transported by the squared rotation, like any second moment."""
    inner = {
        "kind": "shampoo",
        "statistic": {"kind": "gram", "axes": {"entries": "diagonal"}, "beta": BETA},
        "refresh": EVERY,
    }
    stage = Stepper({"kind": "eigenbasis", "inner": inner, "solver": "eigh", "refresh": {**EVERY, "start": 3}}, (4, 5))
    assert isinstance(stage.stage, Eigenbasis)
    for t in range(2):
        stage.step(normal(4, 5, seed=t))
    before = {axis: stage.tensors[f"eigenbasis.inner.shampoo/factor.{axis}"].clone() for axis in (0, 1)}
    stage.t += 1
    gradient = normal(1, 4, 5, seed=9)
    stage.stage.observe(stage.state, gradient, stage.context())
    stage.stage.refresh(stage.state, gradient, stage.context().slice_rows(0, 1, first=True))
    for axis in (0, 1):
        turn = stage.tensors[f"eigenbasis/basis.{axis}"][0]  # from the identity
        moved = stage.tensors[f"eigenbasis.inner.shampoo/factor.{axis}"][0]
        assert close(moved, turn.square().T @ before[axis][0], 1e-12)


def test_large_axes_keep_diagonals_only() -> None:
    """Memory: a 4000 x 8 block with `max_size: 64` holds 8 x 8 and 4000 numbers, not 4000 x 4000."""
    statistic = {"kind": "gram", "axes": {"max_size": 64, "oversize": "diagonal"}}
    parameter = torch.nn.Parameter(torch.zeros(4000, 8))
    optimizer = Optimizer([parameter], {"update": [{"kind": "shampoo", "statistic": statistic}], "routes": []})
    numbers = 2 * (4000 + 8 * 8)
    assert optimizer.state_bytes() == 4 * numbers + 2 * 4 + 8  # two counts of failures, the step


def test_a_rotation_of_the_gradients_rotates_kl_factors() -> None:
    u, v = rotation(4, 1), rotation(5, 2)
    declared = {
        "kind": "shampoo",
        "exponent": "1/2",
        "statistic": {"kind": "bregman", "beta": BETA},
        "solver": {"kind": "eigh", "eps": 1e-3},
        "refresh": EVERY,
    }
    straight, turned = Stepper(declared, (4, 5)), Stepper(declared, (4, 5))
    for t in range(6):
        x = normal(4, 5, seed=t)
        straight.step(x)
        turned.step(u @ x @ v.T)
    assert close(turned.estimate(0), u @ straight.estimate(0) @ u.T, 1e-10)
    assert close(turned.estimate(1), v @ straight.estimate(1) @ v.T, 1e-10)
