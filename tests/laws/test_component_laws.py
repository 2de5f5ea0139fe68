"""The laws of the parts that stages are made of: solvers, statistics, cadences, decays. Rows in `laws/table.py`."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from eigengraft import Optimizer, StepContext
from eigengraft.component import families, validated
from eigengraft.testing.laws import Case, check
from eigengraft.testing.quantizer_laws import QUANTIZER_LAWS, QuantizerCase
from eigengraft.testing.rule_laws import VIEW_LAWS, WEIGHT_DECAY_LAWS, ViewCase
from eigengraft.testing.samples import definite
from eigengraft.testing.solver_laws import (
    BASIS_LAWS,
    BOUND_LAWS,
    POLAR_LAWS,
    ROOT_LAWS,
    SOLVER_LAWS,
    BoundCase,
    usual_exponent,
)
from eigengraft.testing.statistic_laws import STATISTIC_LAWS, StatisticCase
from eigengraft.testing.write_laws import AVERAGING_LAWS, CONSTRAINT_LAWS, ConstraintCase

from ..trajectories import normal
from .quantizers import QUANTIZERS, WITH_NOISE_INSIDE, small
from .rows import Row
from .table import TABLE


def each(family: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("row", TABLE[family], ids=str)


def make(family: str, row: Row) -> Any:
    return validated(families()[family], dict(row.make))


def close(ours: Tensor, theirs: Tensor, tolerance: float = 1e-10) -> bool:
    return float((ours - theirs).abs().max()) <= tolerance * float(theirs.abs().max())


FAMILIES = {
    "root_solver": (*SOLVER_LAWS, *ROOT_LAWS),
    "basis_solver": (*SOLVER_LAWS, *BASIS_LAWS),
    "polar_solver": (*SOLVER_LAWS, *POLAR_LAWS),
}
LONG = ("qr_iteration to the end",)
"""Rows whose laws take most of a second."""
SOLVERS = [
    pytest.param(family, row, id=f"{family} {row}", marks=pytest.mark.slow if str(row) in LONG else ())
    for family in FAMILIES
    for row in TABLE[family]
]


@pytest.mark.parametrize(("family", "row"), SOLVERS)
def test_a_solver_keeps_the_laws(family: str, row: Row) -> None:
    check(row.solver(family), FAMILIES[family])


@each("root_solver")
def test_only_decompositions_take_no_iterations(row: Row) -> None:
    solver = make("root_solver", row)
    root = solver.root(definite(), usual_exponent(solver))
    assert bool((root.iterations > 0).all()) == (row.kind not in ("eigh", "cholesky"))


@pytest.mark.parametrize("row", [*QUANTIZERS, *WITH_NOISE_INSIDE], ids=str)
def test_a_quantizer_keeps_the_laws(row: Row) -> None:
    check(QuantizerCase(small(row.make)), QUANTIZER_LAWS)


def statistic(row: Row) -> StatisticCase:
    """The case of a row about a statistic."""
    return StatisticCase(make("statistic", row), degree=row.degree)


ESTIMATES = ("power_iteration",)
"""Bounds that are estimates."""
CASES: tuple[tuple[str, Any, Callable[[Row], Any]], ...] = (
    ("statistic", STATISTIC_LAWS, statistic),
    ("eigenvalue_bound", BOUND_LAWS, lambda row: BoundCase(make("eigenvalue_bound", row), row.kind in ESTIMATES)),
    ("averaging", AVERAGING_LAWS, lambda row: Case(make("averaging", row))),
    ("constraint", CONSTRAINT_LAWS, lambda row: ConstraintCase(make("constraint", row))),
    ("view", VIEW_LAWS, lambda row: ViewCase(make("view", row))),
    ("weight_decay", WEIGHT_DECAY_LAWS, lambda row: Case(make("weight_decay", row))),
)
"""Families, with their laws and the case of a row."""


@pytest.mark.parametrize(
    ("case", "laws"),
    [pytest.param(case(row), laws, id=f"{family} {row}") for family, laws, case in CASES for row in TABLE[family]],
)
def test_a_component_of_another_family_keeps_the_laws(case: Any, laws: Any) -> None:
    check(case, laws)


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
    within 5 of 0 correlations between neighboring steps, blocks and seeds."""
    make_it = {"kind": "probability", "probability": probability, "shared": shared}
    seeds = np.random.default_rng(1).integers(-(2**63), 2**63, 40)
    cadences = (make("cadence", Row({**make_it, "seed": seed})) for seed in (0, 1))
    one, two = (np.array([due(cadence, t, seeds) for t in range(2, 402)], dtype=float) for cadence in cadences)
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
    """Against the definition, over a schedule that rises above the first lr, which becomes the peak, and to zero."""
    w, rate, peak = normal(4, 3, seed=1), row.make["rate"], LRS[0]
    parameter = torch.nn.Parameter(w.clone())
    optimizer = Optimizer([parameter], {"update": [stage], "routes": [], "weight_decay": dict(row.make)}, lr=peak)
    for t, lr in enumerate(LRS):
        optimizer.param_groups[0]["lr"] = lr
        g = normal(4, 3, seed=10 + t)
        parameter.grad = g.clone()
        optimizer.step()
        assert torch.equal(parameter.grad, g)
        peak = max(peak, lr)
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
