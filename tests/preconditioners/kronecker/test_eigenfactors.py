"""Shampoo from eigenvectors and eigenvalues alone, against its formula and against Shampoo, in float64."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from eigengraft import Optimizer, load_recipe
from eigengraft.experiments import Tick, load_experiment, train
from eigengraft.testing.samples import gradients
from eigengraft.testing.stage_case import StageBench

from ...laws import bench as benches
from ...trajectories import distance, follow, normal, random_gradients, recipe, rotation

INT4 = {"kind": "int4", "codebook": "linear_square", "block_size": 64}
STORED_ROOTS = {
    "statistic": {"kind": "eigen", "rectify": 1, "inner": INT4},
    "root": {"kind": "exact_diagonal", "inner": INT4},
}
"""4-bit Shampoo as published: eigenvectors of the statistics, and the roots beside them."""


def bench(block: tuple[int, ...], blocks: int = 1, dtype: torch.dtype = torch.float64, **fields: Any) -> StageBench:
    return benches.bench({"kind": "eigenfactors", **fields}, block, blocks, dtype)


def every(steps: int, **fields: Any) -> dict[str, Any]:
    """Updates 1, 1 + steps, 1 + 2 steps, ..., as `interval` of a statistic counts them."""
    return {"kind": "every", "steps": steps, "offset": 1, "stagger": "none", **fields}


def shampoo(steps: int, eps: float = 1e-6, **fields: Any) -> dict[str, Any]:
    statistic = {"kind": "gram", "beta": 0.95, "bias_correction": False, "initial": 0.1, "interval": steps}
    solver = {"kind": "eigh", "eps": eps, "relative": True}
    return {"kind": "shampoo", "statistic": statistic, "solver": solver, "refresh": every(steps), **fields}


def alone(stage: dict[str, Any], **storage: Any) -> dict[str, Any]:
    return {"update": [stage], "routes": [], "storage": storage}


class Axis:
    """V and l of one axis of one block, by the formula; `short`: V is the identity and only diagonals are learned."""

    def __init__(self, d: int, initial: float, short: bool = False) -> None:
        self.v, self.l = torch.eye(d).double(), torch.full((d,), initial, dtype=torch.float64)
        self.short = short

    def learn(self, m: Tensor, beta: float) -> None:
        a = beta * self.v @ torch.diag(self.l) @ self.v.T + (1 - beta) * (torch.diag(m.diag()) if self.short else m)
        if not self.short:
            largest_first = torch.argsort((self.v.T @ a @ self.v).diag(), descending=True, stable=True)
            self.v = torch.linalg.qr(a @ self.v[:, largest_first]).Q
        self.l = (self.v.T @ a @ self.v).diag()

    def root(self, e: float, eps: float) -> Tensor:
        return self.v @ torch.diag((self.l + eps * self.l.max()) ** -e) @ self.v.T


def by_formula(given: Tensor, steps: int, e: dict[int, float], bound: int = 99, eps: float = 1e-6) -> Tensor:
    """Directions `[T, *block]` of one block, decay 0.95; e: exponent of each axis."""
    axes = {i: Axis(d, 0.1, short=d > bound) for i, d in enumerate(given.shape[1:]) if e[i]}
    found = []
    for t, g in enumerate(given, start=1):
        direction = g
        for i, axis in axes.items():
            if (t - 1) % steps == 0:
                y = g.movedim(i, 0).reshape(g.shape[i], -1)
                axis.learn(y @ y.T, 0.95)
            direction = torch.tensordot(axis.root(e[i], eps), direction, dims=([1], [i])).movedim(0, i)
        found.append(direction)
    return torch.stack(found)


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize(
    ("block", "fields", "exponents"),
    [
        ((12, 7), {}, {0: 1 / 4, 1: 1 / 4}),
        ((5, 12), {"exponent": "1/2", "eps": 1e-2}, {0: 1 / 2, 1: 1 / 2}),
        ((6, 8), {"exponent": {2: [0, "1/2"]}}, {0: 0.0, 1: 1 / 2}),
        ((3, 4, 5), {}, {0: 1 / 6, 1: 1 / 6, 2: 1 / 6}),
        ((9,), {}, {0: 1 / 2}),
        ((4, 9), {"axes": {"max_size": 6, "oversize": "diagonal"}}, {0: 1 / 4, 1: 1 / 4}),
        ((4, 9), {"axes": {"max_size": 6}}, {0: 1 / 2, 1: 0.0}),
    ],
    ids=str,
)
def test_directions_follow_the_formula(
    block: tuple[int, ...], fields: dict[str, Any], exponents: dict[int, float], steps: int
) -> None:
    """1e-10: factors that start as 0.1 I have a condition below 1e4, which costs 4 digits of 16."""
    given = gradients(block)
    ours = bench(block, 3, initial=0.1, refresh=every(steps), **fields).run(given)
    for i in range(3):
        longest = fields.get("axes", {}).get("max_size", 99)
        theirs = by_formula(given[:, i], steps, exponents, longest, fields.get("eps", 1e-6))
        assert float((ours[:, i] - theirs).abs().max()) < 1e-10 * float(theirs.abs().max())


@pytest.mark.parametrize("exponent", [None, "1/2", {2: ["1/2", 0], 3: 0}])
@pytest.mark.parametrize("steps", [1, 3])
def test_with_an_exact_basis_it_is_shampoo(steps: int, exponent: Any) -> None:
    """All of A is then diagonal in P. 1e-10: the condition of the factors is below 1e4, as above."""
    shapes = [(6, 9), (3, 4, 5)]
    init, given = [normal(*shape, seed=7) for shape in shapes], random_gradients(shapes, 12)
    stage = {"kind": "eigenfactors", "initial": 0.1, "solver": "eigh", "refresh": every(steps), "exponent": exponent}
    ours = follow(recipe(alone(stage), lr=0.1), init, given)
    theirs = follow(recipe(alone(shampoo(steps, exponent=exponent)), lr=0.1), init, given)
    assert distance(ours, theirs, init) < 1e-10


def test_eigenfactors_are_shampoo_whose_statistics_are_stored_as_eigenvectors() -> None:
    """Where columns never need sorting, which `power_qr` does and `eigen` does not: rows and columns fall by 0.3.

    Both keep V in float32, of either sign, and rectify it to float64: two steps square an error of 1e-7 twice. 1e-10:
    the condition of the factors is about 1e4, as above.
    """
    sizes = 0.3 ** torch.arange(4).double()
    init = [normal(4, 4, seed=7)]
    given = [[sizes[:, None] * g * sizes] for (g,) in random_gradients([(4, 4)], 12)]
    start = {"initial": 1e-3, "beta": 0.95}
    exact = {"rectify": 2, "inner": "float32"}
    ours = alone({"kind": "eigenfactors", **start, "refresh": every(2)}, basis={"kind": "orthogonal", **exact})
    stage = shampoo(2)
    stage["statistic"] |= start
    theirs = alone(stage, statistic={"kind": "eigen", **exact})
    paths = [follow(recipe(made, lr=0.1), init, given) for made in (ours, theirs, alone(stage))]
    assert distance(paths[0], paths[1], init) < 1e-10
    assert distance(paths[0], paths[2], init) > 1e-3  # one power step is not an eigendecomposition


def test_the_basis_converges_to_the_eigenvectors() -> None:
    """Of one gradient U S V^T, forever, A tends to U S^2 U^T: of exponent 1/4 the direction is U V^T.

    With A = b V Diag(l) V^T + (1 - b) M a small angle between columns i < j of V and of U falls by the factor
    1 - (1 - b)(1 - l_j / l_i) in one power step: 0.625 where singular values halve, 6e-13 in 60 steps. 1e-10 allows for
    the constant before it; the rate is that of the limit, from which 0.5^t of the start is still missing.
    """
    u, v = rotation(6, 1), rotation(6, 2)
    gradient = (u * 0.5 ** torch.arange(6).double()) @ v.T
    stack = bench((6, 6), beta=0.5, eps=0.0, refresh=every(1))
    errors = [float((stack.step(gradient[None])[0] - u @ v.T).abs().max()) for _ in range(60)]
    assert errors[0] > 0.1 and errors[-1] < 1e-10
    assert (errors[45] / errors[30]) ** (1 / 15) == pytest.approx(0.625, rel=0.01)


def test_an_axis_that_has_seen_nothing_is_left_alone() -> None:
    given = gradients((4, 3))
    stack = bench((4, 3), 3, initial=0.0, refresh=every(1, start=5))
    out = stack.run(given[:5])
    assert torch.equal(out[:4], given[:4]) and not torch.equal(out[4], given[4])


def test_a_block_without_factors_passes_through() -> None:
    given = gradients((4,))
    stack = bench((4,), 3, exponent={1: 0})
    assert torch.equal(stack.run(given), given) and not stack.tensors


def test_a_zero_gradient_and_one_that_overflows_leave_the_factors() -> None:
    """1e30 squared is beyond float32: not a number that an eigenvalue could be. A failure is counted until the next."""
    given = gradients((4, 3), 2, torch.float32)
    stack = bench((4, 3), 2, torch.float32, refresh=every(1))
    stack.run(given[:3])
    before = {key: tensor.clone() for key, tensor in stack.tensors.items()}
    stack.step(torch.stack([torch.zeros(4, 3), torch.full((4, 3), 1e30)]))
    for axis in range(2):
        counts = stack.tensors.pop(f"eigenfactors/failures.{axis}")
        assert counts.tolist() == [0, 1]
        before.pop(f"eigenfactors/failures.{axis}")
        stack.tensors[f"eigenfactors/failures.{axis}"] = counts
    assert all(torch.equal(stack.tensors[key], tensor) for key, tensor in before.items())
    assert stack.step(given[4]).isfinite().all()
    assert all(not stack.tensors[f"eigenfactors/failures.{axis}"].any() for axis in range(2))


def matrix_bytes(stage: dict[str, Any], side: int, storage: dict[str, Any]) -> int:
    """Bytes that the stage keeps for a matrix, without its counts of failures and format numbers."""
    parameter = torch.nn.Parameter(torch.zeros(side, side))
    state = Optimizer([parameter], alone(stage, **storage)).state[parameter]
    kept = [x for key, x in state.items() if key.startswith("0/") and x.ndim]
    return sum(x.numel() * x.element_size() for x in kept)


@pytest.mark.slow
def test_memory_is_half_of_that_with_roots() -> None:
    """For 1024 x 1024, bytes per parameter: 1.133 against 2.266, which are 16 without storage."""
    d = 1024
    coded = d * d // 2 + 4 * d * (d // 64)  # two codes a byte, a float32 scale for 64 of them
    shipped = load_recipe("shampoo_4bit_eigen_only").model_dump(mode="json")
    direction, basis = shipped["update"][0]["before"][0]["direction"][0], {"basis": shipped["storage"]["basis"]}
    assert direction["kind"] == "eigenfactors"
    ours, theirs = matrix_bytes(direction, d, basis), matrix_bytes(shampoo(10), d, STORED_ROOTS)
    assert ours == 2 * (coded + 4 * d)  # and the eigenvalues, in float32
    assert theirs == 4 * (coded + 4 * d) == 2 * ours  # and the diagonal of a root
    assert ours / d**2 == pytest.approx(1.133, abs=5e-4) and theirs / d**2 == pytest.approx(2.266, abs=5e-4)
    assert matrix_bytes(shampoo(10), d, {}) == 16 * d**2


def likeness(source: dict[str, Any], given: list[list[Tensor]], exact: list[Tensor]) -> float:
    """Mean cosine of the moves with those of another path, from the 21st on."""
    init = [torch.zeros_like(given[0][0])]
    paths = [follow(recipe(source, lr=1.0), init, given)[0], exact[0]]
    ours, theirs = (path.diff(dim=0).flatten(1)[20:] for path in paths)
    return float(torch.cosine_similarity(ours, theirs).mean())


@pytest.mark.slow
def test_eigenfactors_in_4_bits_are_as_close_to_shampoo_as_stored_roots() -> None:
    """Gradients whose covariances have eigenvalues 1 to 1/64: cosines of 0.979 and 0.978, and of 0.945 unrectified."""
    sizes = torch.arange(1, 65) ** -0.5
    u, v = rotation(64, 1).float(), rotation(64, 2).float()
    noise = random_gradients([(64, 64)], 100, dtype=torch.float32)
    given = [[(u * sizes) @ z @ (sizes[:, None] * v.T)] for (z,) in noise]
    exact = follow(recipe(alone(shampoo(4)), lr=1.0), [torch.zeros(64, 64)], given)
    stage = {"kind": "eigenfactors", "initial": 0.1, "refresh": every(4)}
    found = {
        steps: likeness(alone(stage, basis={"kind": "orthogonal", "rectify": steps, "inner": INT4}), given, exact)
        for steps in (0, 1)
    }
    roots = likeness(alone(shampoo(4), **STORED_ROOTS), given, exact)
    assert roots > 0.95
    assert found[1] > roots - 0.005  # four times what they are apart
    assert found[1] > found[0] + 0.01


def test_the_recipe_trains(tmp_path: Path) -> None:
    """30 steps on handwritten digits, from the loss of chance to less than half of it (measured: 0.27)."""
    ticks: list[Tick] = []
    task = {"kind": "digits", "width": 64, "batch_size": 64}
    experiment = {
        "task": task,
        "recipe": "shampoo_4bit_eigen_only",
        "lr": 0.01,
        "steps": 30,
        "log_every": 1,
        "eval_every": 30,
    }
    train(load_experiment(experiment), tmp_path, ticks.append)
    losses = [tick.loss for tick in ticks]
    assert len(losses) == 30 and all(math.isfinite(loss) for loss in losses)
    assert losses[-1] < losses[0] / 2
