"""Shampoo with damping and decompositions from data, beside its definition in float64."""

import sys

import pytest
import torch
from torch import Tensor

from eigengraft.preconditioners import AdaptiveShampoo
from eigengraft.testing.stage_case import StageBench

from ...trajectories import distance, follow, normal, recipe

BETA, EPS, CEILING = 0.9, 1e-3, 0.05


def symmetric_power(a: Tensor, exponent: float) -> Tensor:
    values, vectors = torch.linalg.eigh(a)
    return (vectors * values.clamp_min(0).pow(exponent)) @ vectors.mT


class Foam:
    """The paper's formulas on dense matrices: statistics, damping of each side, and how often S <- A."""

    def __init__(self, m: int, n: int, beta: float, eps: float, ceiling: float, threshold: float) -> None:
        self.beta, self.eps, self.ceiling, self.threshold = beta, eps, ceiling, threshold
        self.a = [torch.zeros(m, m).double(), torch.zeros(n, n).double()]
        self.stale, self.damping = [torch.eye(m).double(), torch.eye(n).double()], [eps, eps]
        self.steps, self.decompositions = 0, 0

    def direction(self, g: Tensor, d: Tensor) -> Tensor:
        """What becomes of d, with the statistics of g."""
        self.steps += 1
        for side, gram in enumerate((g @ g.mT, g.mT @ g)):
            self.a[side] = self.beta * self.a[side] + (1 - self.beta) * gram
            self._refresh(side, self.a[side] / (1 - self.beta**self.steps))
        left, right = (symmetric_power(self._damped(side), -0.25) for side in (0, 1))
        return left @ d @ right

    def _damped(self, side: int) -> Tensor:
        return self.stale[side] + self.damping[side] * torch.eye(len(self.stale[side])).double()

    def _refresh(self, side: int, now: Tensor) -> None:
        half, root = symmetric_power(self._damped(side), -0.5), symmetric_power(self._damped(side), -0.25)
        share = torch.linalg.matrix_norm(root, 2) / torch.linalg.matrix_norm(root)
        h = 0.25 * share * torch.linalg.matrix_norm(half @ (now - self.stale[side]) @ half)
        wanted = max(self.eps, float(self.damping[side] * h / self.threshold))
        if self.steps == 1 or wanted > self.ceiling:
            self.stale[side], wanted, self.decompositions = now, self.eps, self.decompositions + 1
        self.damping[side] = wanted


@pytest.mark.parametrize("threshold", [0.02, 0.1, 100.0])
def test_damping_and_decompositions_are_those_of_the_formulas(threshold: float) -> None:
    gradients = normal(20, 5, 4, seed=1) * torch.linspace(1, 2, 4).double()
    stage = AdaptiveShampoo.model_validate(
        {"statistic": {"kind": "gram", "beta": BETA}, "eps": EPS, "ceiling": CEILING, "threshold": threshold}
    )
    foam, bench = Foam(5, 4, BETA, EPS, CEILING, threshold), StageBench(stage, (5, 4), 1)
    for gradient in gradients:
        found = bench.step(gradient[None])[0].clone()
        torch.testing.assert_close(found, foam.direction(gradient, gradient), rtol=1e-9, atol=1e-11)
        ours = [float(bench.tensors[f"update.adaptive_shampoo/damping.{side}"]) for side in (0, 1)]
        assert ours == pytest.approx(foam.damping, rel=1e-9)
    assert 2 < foam.decompositions < 40 if threshold < 1 else foam.decompositions == 2


@pytest.mark.parametrize("shape", [(6, 6), (5, 8)])
def test_the_recipe_is_its_definition(shape: tuple[int, int]) -> None:
    """30 steps of W <- (1 - lr decay) W - lr U, U as the roots make it, as long as Adam's update.
    Gradients change by a thousandth, and every eight steps altogether, so that roots are kept for a while."""
    base, drift = normal(4, *shape, seed=3), normal(30, *shape, seed=4)
    gradients = torch.stack([base[t // 8] + 1e-3 * drift[t] for t in range(30)])
    start, lr, decay = normal(*shape, seed=5), 0.003, 0.01
    foam, wanted = Foam(*shape, 0.95, 1e-10, 1e-6, 0.1), [start]
    m, v = torch.zeros(shape).double(), torch.zeros(shape).double()
    for t, g in enumerate(gradients, start=1):
        m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g.square()
        mean = m / (1 - 0.9**t)
        made, adam = foam.direction(g, mean), mean / ((v / (1 - 0.95**t)).sqrt() + 1e-8)
        wanted.append((1 - lr * decay) * wanted[-1] - lr * made * adam.norm() / made.norm())
    [ours] = follow(recipe("foam"), [start], [[g] for g in gradients])
    assert distance([ours], [torch.stack(wanted[1:])], [start]) < 1e-8  # roots of singular matrices, to their eps
    assert 4 < foam.decompositions < 50


def test_a_gradient_that_stays_is_decomposed_once() -> None:
    gradient, stage = normal(3, 6, 5, seed=2), AdaptiveShampoo(eps=1e-6, ceiling=1e-5)
    bench = StageBench(stage, (6, 5), 3)
    bench.step(gradient)
    first = bench.tensors["update.adaptive_shampoo/basis.0"].clone()
    for _ in range(5):
        bench.step(gradient)
    assert torch.equal(bench.tensors["update.adaptive_shampoo/basis.0"], first)  # A is S, to rounding
    bench.step(normal(3, 6, 5, seed=3) * torch.tensor([0.0, 0.0, 100.0]).double()[:, None, None])
    changed = (bench.tensors["update.adaptive_shampoo/basis.0"] != first).flatten(1).any(1)
    assert changed.tolist() == [False, False, True]


def test_a_decomposition_that_succeeds_ends_a_row_of_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    bench, found = StageBench(AdaptiveShampoo(eps=1e-6, ceiling=1e-5), (6, 5), 3), []

    def failing(a: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return (*torch.linalg.eigh(a), torch.zeros(len(a), dtype=torch.bool))

    for step, fails in enumerate([False, True, True, False]):
        with monkeypatch.context() as patch:
            if fails:
                patch.setattr(sys.modules[AdaptiveShampoo.__module__], "eigh", failing)
            bench.step(normal(3, 6, 5, seed=step))
        found.append(bench.tensors["update.adaptive_shampoo/failures.0"].tolist())
    assert found == [[0] * 3, [1] * 3, [2] * 3, [0] * 3]
