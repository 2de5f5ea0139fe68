"""Recipes of the records of modded-nanogpt in 2026 against their definitions, in float64.

As in `test_methods.py`: a definition computes the updates from the gradients, and here from the parameter, without the
library. The records publish steps; recipes have fractions of a run, here of 12 steps.
"""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from eigengraft import load_recipe
from eigengraft.preconditioners import k_maxwell

from ..refusals import refused
from ..trajectories import distance, follow, normal, random_gradients, recipe
from .test_methods import LR, Mean, moved, newton_schulz
from .test_more_methods import EXACT, SHAPES, STEPS, matched, steps_of

pytestmark = pytest.mark.slow

Updates = Callable[[Sequence[Tensor]], list[Tensor]]
TOTAL = f"total_steps={STEPS}"


def kernel(betas: Sequence[float], weights: Callable[[int], Sequence[float]], begin: float) -> Updates:
    """Nesterov on sum_k w_k M_k, then Muon's polar factor.  Until `begin` one momentum M of decay 0.95; at the first
    step after it all M_k begin as M."""

    def update(given: Sequence[Tensor]) -> list[Tensor]:
        one, several, found = torch.zeros_like(given[0]), None, []
        for t, g in enumerate(given, start=1):
            if t < begin * STEPS:
                one = 0.95 * one + 0.05 * g
                mixed = one
            else:
                several = several or [one] * len(betas)
                several = [b * m + (1 - b) * g for b, m in zip(betas, several, strict=True)]
                mixed = sum((w * m for w, m in zip(weights(t), several, strict=True)), torch.zeros_like(g))
            found.append(matched(newton_schulz(0.95 * mixed + 0.05 * g)))
        return found

    return update


def annealed(first: Sequence[float], last: Sequence[float], begin: float) -> Callable[[int], list[float]]:
    """Weights that go linearly from `first` at `begin` to `last` at the end of the run."""

    def weights(t: int) -> list[float]:
        x = min(1.0, (t / STEPS - begin) / (1 - begin))
        return [(1 - x) * a + x * b for a, b in zip(first, last, strict=True)]

    return weights


def ages(*tau: float) -> list[float]:
    return [x / (x + 1) for x in tau]


# Published digits of #357: eight ages log-spaced in [3, 64], mean ages 58 and 26.
OLD = (0.005094, 0.010188, 0.015282, 0.020376, 0.025470, 0.030564, 0.035658, 0.857369)
YOUNG = (0.032262, 0.064524, 0.096786, 0.129047, 0.161309, 0.193571, 0.225833, 0.096669)
EIGHT = ages(*(3 * (64 / 3) ** (k / 7) for k in range(8)))

KERNELS: dict[str, Updates] = {
    "bimaxwell_muon": kernel([0.85, 0.98], lambda t: [0.4385, 0.5615], 0.3077),
    "kmaxwell_muon": kernel(EIGHT, annealed(OLD, YOUNG, 0.3077), 0.3077),
}


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_of_momentum_is_the_records(name: str, shape: tuple[int, int]) -> None:
    """1e-5: the records publish six decimals of weights."""
    init, gradients = [normal(*shape, seed=5)], random_gradients([shape], STEPS)
    ours = follow(recipe(name, EXACT, TOTAL, lr=LR), init, gradients)
    assert distance(ours, [moved(init[0], KERNELS[name]([g for (g,) in gradients]), 0.01)], init) <= 1e-5


@pytest.mark.parametrize(
    ("name", "declared", "begin"),
    [("kmaxwell_muon", (8, 58, 26), 0.3077), ("kmaxwell_muon_h", (6, 50, 22), 0.24)],
)
def test_shipped_means_are_those_of_k_maxwell(name: str, declared: tuple[int, int, int], begin: float) -> None:
    """5e-6: recipes have six digits."""
    stage = load_recipe(name).update[0].model_dump(by_alias=True)
    for shipped, computed in zip(stage["means"], k_maxwell(*declared, begin=begin), strict=True):
        for field in ("beta", "weight"):
            for one, other in zip(shipped[field], computed[field], strict=True):
                assert one == pytest.approx({**other, "shape": "linear"}, abs=5e-6)


@pytest.mark.parametrize("age", [25.0, 40.0, 63.0])
def test_a_mixture_has_the_mean_age_that_was_asked_for(age: float) -> None:
    means = k_maxwell(5, 60.0, age, ages=(2.0, 64.0))
    decays = [mean["beta"][-1]["to"] for mean in means]
    weights = [mean["weight"][-1]["to"] for mean in means]
    assert sum(weights) == pytest.approx(1, abs=1e-12)
    assert sum(w * b / (1 - b) for w, b in zip(weights, decays, strict=True)) == pytest.approx(age, rel=1e-12)


def test_ages_that_no_weights_have_are_refused() -> None:
    with refused(ValueError, 10, 64):
        k_maxwell(6, 50.0, 10.0)
    with refused(ValueError, 1):
        k_maxwell(1, 50.0, 30.0)
    with refused(ValueError, "(64, 3)"):
        k_maxwell(6, 50.0, 30.0, ages=(64, 3))


def rmnp(given: Sequence[Tensor]) -> list[Tensor]:
    """Rows of the running mean, divided by their norms, with an RMS of 0.2."""
    mean, found = Mean(0.95, *given[0].shape), []
    for g in given:
        mean(g)
        found.append(0.2 * given[0].shape[1] ** 0.5 * mean.raw / mean.raw.norm(dim=1, keepdim=True))
    return found


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rmnp_divides_rows_by_their_norms(shape: tuple[int, int]) -> None:
    """1e-9 for the reasons given in `test_methods.py`."""
    init, gradients = [normal(*shape, seed=5)], random_gradients([shape], STEPS)
    ours = follow(recipe("rmnp", lr=LR), init, gradients)
    assert distance(ours, [moved(init[0], rmnp([g for (g,) in gradients]), 0.01)], init) <= 1e-9


MAPS = (
    (3.923798038567, -6.095026865488, 3.905234618423),
    (3.278126713798, -3.328923386476, 0.989127286973),
    (3.505298394150, -5.137358782410, 1.968325560615),
    (2.815058591845, -3.685181239622, 1.417196497642),
    (2.245503932403, -2.443826979899, 0.963091710461),
    (2.256537145403, -2.166840097229, 0.929501253245),
)


def rail(step: float) -> float:
    """Decay of the fast rail by the step of a run of 1400: up in 240 steps, down in the last 50."""
    if step < 240:
        return 0.85 + 0.08 * step / 240
    return 0.93 - 0.08 * max(0.0, step - 1350) / 50


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_anvil_is_the_records_rule(shape: tuple[int, int]) -> None:
    """Rails F and S; Nesterov on w F + (1 - w) S with the scheduled decay; six maps of X / (1.05 ||X||); lanes along
    the axis with more of them divided by the root of their running energy, at the norm before; W <- W - lr (2.25 lr
    [S W > 0] W + U sqrt(max(1, m / n))).

    1e-3: the recipe has its steps as fractions of the run, with four digits, and twelve steps for 1400, which the
    definition reads from the same fractions.
    """
    init, gradients = normal(*shape, seed=5), random_gradients([shape], STEPS)
    w, fast, slow, path = init, torch.zeros(shape, dtype=torch.float64), torch.zeros(shape, dtype=torch.float64), []
    m, n = shape
    axis = 1 if m >= n else 0
    energy = torch.zeros_like(w.square().mean(axis, keepdim=True))
    for t, (g,) in enumerate(gradients, start=1):
        step = t / STEPS * 1400
        engaged = step >= 514
        b = 0.85 if engaged else rail(step)
        fast, slow = b * fast + (1 - b) * g, 0.98 * slow + 0.02 * g
        mixed = 0.4385 * fast + 0.5615 * slow if engaged else fast
        x = rail(step) * mixed + (1 - rail(step)) * g
        x = x if m <= n else x.T
        u = steps_of(x / (1.05 * x.norm()), MAPS)
        u = u if m <= n else u.T
        energy = 0.9 * energy + 0.1 * u.square().mean(axis, keepdim=True)
        scaled = u / energy.sqrt()
        scaled = scaled * (u.norm() / scaled.norm())
        w = w - LR * (2.25 * LR * (slow * w > 0) * w + scaled * max(1.0, m / n) ** 0.5)
        path.append(w)
    ours = follow(recipe("anvil", TOTAL, lr=LR), [init], gradients)
    assert distance(ours, [torch.stack(path)], [init]) <= 1e-3


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_muown_turns_rows_by_muon_and_scales_them_by_adam(shape: tuple[int, int]) -> None:
    """W = g v / ||v||, with g, v kept beside W and gradients of g and v by the chain rule. 1e-9 as above."""
    init, gradients = normal(*shape, seed=5), random_gradients([shape], STEPS)
    g, v, path = init.norm(dim=1, keepdim=True), init.clone(), []
    m, first, second = torch.zeros_like(v), Mean(0.9, *g.shape), Mean(0.95, *g.shape)
    for (gradient,) in gradients:
        n = v.norm(dim=1, keepdim=True)
        slope = (gradient * v / n).sum(1, keepdim=True)
        across = g / n * (gradient - slope * v / n)
        m = 0.95 * m + 0.05 * across
        v = v - LR * matched(newton_schulz(0.95 * m + 0.05 * across))
        g = g - LR * first(slope) / (second(slope.square()).sqrt() + 1e-8)
        path.append(g * v / v.norm(dim=1, keepdim=True))
    ours = follow(recipe("muown", "update.row_gains.inner.spectral.solver.precision=input", lr=LR), [init], gradients)
    assert distance(ours, [torch.stack(path)], [init]) <= 1e-9


def test_rows_that_are_zero_take_the_direction_itself() -> None:
    init, gradients = normal(4, 6, seed=5), random_gradients([(4, 6)], 3)
    init[1] = 0
    stage = {"kind": "row_gains", "inner": ["sign"], "gain": ["sign"]}
    (path,) = follow(recipe({"update": [stage]}, lr=0.1), [init], gradients)
    torch.testing.assert_close(path[0][1], -0.1 * gradients[0][0][1].sign(), rtol=0, atol=0)
    assert path.isfinite().all() and not torch.equal(path[1][1], path[0][1])
