"""Shampoo with damping and decompositions from data, beside its definition in float64."""

import pytest
import torch
from torch import Tensor

from eigengraft.preconditioners import AdaptiveShampoo
from eigengraft.testing.stage_bench import StageBench

from ..trajectories import normal

BETA, EPS, CEILING = 0.9, 1e-3, 0.05


def symmetric_power(a: Tensor, exponent: float) -> Tensor:
    values, vectors = torch.linalg.eigh(a)
    return (vectors * values.clamp_min(0).pow(exponent)) @ vectors.mT


def follow(gradients: Tensor, threshold: float) -> tuple[Tensor, list[list[float]], int]:
    """Directions by the paper's formulas on dense matrices, the damping of each side, and how often S <- A."""
    m, n = gradients.shape[1:]
    a = [torch.zeros(m, m).double(), torch.zeros(n, n).double()]
    stale, damping = [torch.eye(m).double(), torch.eye(n).double()], [EPS, EPS]
    found, dampings, decompositions = [], [], 0
    for t, g in enumerate(gradients, start=1):
        for side, gram in enumerate((g @ g.mT, g.mT @ g)):
            a[side] = BETA * a[side] + (1 - BETA) * gram
            now, eye = a[side] / (1 - BETA**t), torch.eye(len(gram)).double()
            last = stale[side] + damping[side] * eye
            half, root = symmetric_power(last, -0.5), symmetric_power(last, -0.25)
            share = torch.linalg.matrix_norm(root, 2) / torch.linalg.matrix_norm(root)
            h = 0.25 * share * torch.linalg.matrix_norm(half @ (now - stale[side]) @ half)
            wanted = max(EPS, float(damping[side] * h / threshold))
            if t == 1 or wanted > CEILING:
                stale[side], wanted, decompositions = now, EPS, decompositions + 1
            damping[side] = wanted
        damped = [s + r * torch.eye(len(s)).double() for s, r in zip(stale, damping, strict=True)]
        left, right = (symmetric_power(x, -0.25) for x in damped)
        found.append(left @ g @ right)
        dampings.append(list(damping))
    return torch.stack(found), dampings, decompositions


@pytest.mark.parametrize("threshold", [0.02, 0.1, 100.0])
def test_damping_and_decompositions_are_those_of_the_formulas(threshold: float) -> None:
    gradients = normal(20, 5, 4, seed=1) * torch.linspace(1, 2, 4).double()
    stage = AdaptiveShampoo.model_validate(
        {"statistic": {"kind": "gram", "beta": BETA}, "eps": EPS, "ceiling": CEILING, "threshold": threshold}
    )
    wanted, dampings, decompositions = follow(gradients, threshold)
    bench, found = StageBench(stage, (5, 4), 1), []
    for gradient, expected in zip(gradients, dampings, strict=True):
        found.append(bench.step(gradient[None])[0].clone())
        ours = [float(bench.tensors[f"update.adaptive_shampoo/damping.{side}"]) for side in (0, 1)]
        assert ours == pytest.approx(expected, rel=1e-9)
    torch.testing.assert_close(torch.stack(found), wanted, rtol=1e-9, atol=1e-11)
    assert 2 < decompositions < 40 if threshold < 1 else decompositions == 2


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
