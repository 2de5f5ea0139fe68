"""Recipes of the records of modded-nanogpt in 2026 against their definitions, in float64.

As in `test_methods.py`: a definition computes the updates from the gradients, and here from the parameter, without the
library. The records publish steps; recipes have fractions of a run, here of 12 steps.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from eigengraft import Optimizer, load_recipe, watch_gradient_variance
from eigengraft.preconditioners import KernelStatistics, entropy_kernel, k_maxwell, maximum_entropy

from ..refusals import refused
from ..trajectories import distance, follow, normal, random_gradients, recipe
from .test_methods import LR, Mean, moved, newton_schulz
from .test_more_methods import EXACT, SHAPES, STEPS, matched, on_sphere, steps_of

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

# #359: six ages, mean ages 50 and 22; w_k = c k, and the last mean has the rest.
SIX_AGES = [3 * (64 / 3) ** (k / 5) for k in range(6)]


def weights_of_age(mean_age: float) -> list[float]:
    c = (64 - mean_age) / sum(k * (64 - age) for k, age in enumerate(SIX_AGES, start=1))
    return [c, 2 * c, 3 * c, 4 * c, 5 * c, 1 - 15 * c]


KERNELS: dict[str, Updates] = {
    "bimaxwell_muon": kernel([0.85, 0.98], lambda t: [0.4385, 0.5615], 0.3077),
    "kmaxwell_muon": kernel(EIGHT, annealed(OLD, YOUNG, 0.3077), 0.3077),
    "kmaxwell_muon_h": kernel(ages(*SIX_AGES), annealed(weights_of_age(50), weights_of_age(22), 0.24), 0.24),
}


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_of_momentum_is_the_records(name: str, shape: tuple[int, int]) -> None:
    """1e-5: the records and recipes have six digits of weights. `kmaxwell_muon_h` steps on spheres."""
    init, gradients = [normal(*shape, seed=5)], random_gradients([shape], STEPS)
    updates = KERNELS[name]([g for (g,) in gradients])
    expected = on_sphere(init[0], updates) if name == "kmaxwell_muon_h" else moved(init[0], updates, 0.01)
    assert distance(follow(recipe(name, EXACT, TOTAL, lr=LR), init, gradients), [expected], init) <= 1e-5


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


OLDEST = KernelStatistics(90.0, 3.7153849427, 0.07235, 0.02235)
NEWEST = KernelStatistics(24.05, 2.3786333904, 0.137, 0.087)


@pytest.mark.parametrize("statistics", [OLDEST, NEWEST], ids=["start", "end"])
def test_a_kernel_of_maximum_entropy_has_its_statistics_and_no_neighbor_more_entropy(
    statistics: KernelStatistics,
) -> None:
    """1e-9: statistics are sums of 256 numbers. A move that keeps all statistics lowers the entropy, to first order not
    at all: the gradient of the entropy is a sum of the features."""
    kernel, ages = entropy_kernel(statistics), np.arange(256.0)
    features = np.vstack([np.ones(256), (-1.0) ** ages, ages, np.log1p(ages)])
    found = features @ kernel
    np.testing.assert_allclose(found, [1, 0, statistics.mean_age, statistics.mean_log_age], rtol=0, atol=1e-9)
    assert kernel.min() > 0 and kernel[:2].tolist() == [statistics.newest, statistics.second]
    slope, tail = -np.log(kernel[2:]) - 1, features[:, 2:]
    left = slope - tail.T @ np.linalg.lstsq(tail.T, slope, rcond=None)[0]
    assert np.abs(left).max() < 1e-9


def test_means_follow_a_kernel_of_maximum_entropy() -> None:
    """The sums of distances are those that the docstring has, and the sum and the mean age are the kernel's."""
    means = maximum_entropy(8, OLDEST, NEWEST)
    betas = np.array([mean["beta"][-1]["to"] for mean in means])
    for statistics, end, far in ((OLDEST, "from", 0.24), (NEWEST, "to", 0.10)):
        weights = np.array([mean["weight"][-1][end] for mean in means])
        assert weights.sum() == pytest.approx(1, abs=1e-9)
        assert weights @ (betas / (1 - betas)) == pytest.approx(statistics.mean_age, rel=1e-9)
        made = (weights * (1 - betas) * betas ** np.arange(4000)[:, None]).sum(1)
        made[:256] -= entropy_kernel(statistics)
        assert np.abs(made).sum() == pytest.approx(far, abs=0.01)
    stage = load_recipe({"update": [{"kind": "momentum_mixture", "means": means}], "total_steps": 100}).update[0]
    assert len(stage.slots((3,))) == 8


def test_statistics_that_no_kernel_has_are_refused() -> None:
    with refused(ValueError, 256, "mean_log_age 1"):
        entropy_kernel(KernelStatistics(90.0, 1.0, 0.1, 0.1))
    with refused(ValueError, 1, "(1.0, 200.0)"):
        maximum_entropy(1, OLDEST, NEWEST)


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
    [S W > 0] W + U sqrt(max(1, m / n))), where the record's code has the last factor in the decay, too.

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


def test_gains_end_at_0() -> None:
    """A step of 0.1 along each row changes its gain by 0.1, but a gain of 0.05 by 0.05."""
    init = normal(4, 6, seed=5)
    init[1] *= 0.05 / init[1].norm()
    stage = {"kind": "row_gains", "inner": ["sign"], "gain": ["sign"]}
    (path,) = follow(recipe({"update": [stage]}, lr=0.1), [init], [(init,)])
    wanted = (init.norm(dim=1) - 0.1).clamp_min(0.0)
    torch.testing.assert_close(path[0].norm(dim=1), wanted, rtol=1e-12, atol=1e-12)


def noise_metric(given: Tensor, heat: Tensor, axis: int) -> Tensor:
    """The factors A^(-1/2) or B^(-1/2): root of the mean variance of a column or row over their mean, in [1/2, 2]."""
    mean = heat.mean()
    return given * (heat / mean).sqrt().clamp(0.5, 2).rsqrt().unsqueeze(axis)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_isomuon_damps_rows_and_columns_by_their_noise(shape: tuple[int, int]) -> None:
    """Four micro-batches a step, the last two steps without: these keep the metric. 1e-9 as above."""
    count, measured = 4, STEPS - 2
    rows = torch.linspace(0.1, 3, shape[0], dtype=torch.float64).unsqueeze(1)
    parts = [[rows * g / count for (g,) in random_gradients([shape], count, seed=77 * t)] for t in range(STEPS)]
    weight = torch.nn.Parameter(normal(*shape, seed=5))
    optimizer = Optimizer(
        [("p0", weight)], load_recipe("isomuon", ["update.noise_metric.inner.spectral.solver.precision=input"]), lr=LR
    )
    watch_gradient_variance(optimizer)
    w, path, ours = weight.detach().clone(), [], []
    m, row, column = torch.zeros_like(w), torch.zeros(shape[0]).double(), torch.zeros(shape[1]).double()
    for t, some in enumerate(parts):
        several = some if t < measured else [sum(some, torch.zeros_like(w))]
        for part in several:
            (weight * part).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        ours.append(weight.detach().clone())
        g = torch.stack(several).sum(0)
        if len(several) > 1:
            variance = (count * torch.stack(several)).var(0, correction=0)
            row, column = 0.95 * row + 0.05 * variance.mean(1), 0.95 * column + 0.05 * variance.mean(0)
        m = 0.95 * m + 0.05 * g
        p = newton_schulz(noise_metric(noise_metric(0.95 * m + 0.05 * g, row, 1), column, 0))
        d = noise_metric(noise_metric(p, row, 1), column, 0)
        w = w - LR * (0.01 * w + matched(d * p.norm() / d.norm()))
        path.append(w)
    assert distance([torch.stack(ours)], [torch.stack(path)], [path[0]]) <= 1e-9


def test_a_row_without_noise_has_the_metric_1() -> None:
    """The rows have the variances 0, 1 and 2, and all columns have equal variances."""
    weight, rows = torch.nn.Parameter(torch.zeros(3, 4, dtype=torch.float64)), torch.arange(3.0, dtype=torch.float64)
    stage = {"kind": "noise_metric", "beta": 0.0, "inner": ["sign"]}
    optimizer = Optimizer([("p0", weight)], {"update": [stage], "routes": []}, lr=1.0, weight_decay=0.0)
    weight.grad = torch.ones_like(weight)
    optimizer.provide("gradient_variance", {weight: rows.unsqueeze(1).expand(3, 4).clone()})
    optimizer.step()
    damped = torch.tensor([1.0, 1.0, 2.0**0.5], dtype=torch.float64).rsqrt()
    expected = damped * (3 / damped.square().sum()).sqrt()
    torch.testing.assert_close(-weight.detach(), expected.unsqueeze(1).expand(3, 4), rtol=1e-12, atol=0)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_spel_descends_on_orthonormal_weights(shape: tuple[int, int]) -> None:
    """W <- polar(W - lr polar(M)), both polar factors exact. 1e-9 as above."""
    init, gradients = normal(*shape, seed=5), random_gradients([shape], STEPS)
    w, m, path = init, torch.zeros_like(init), []

    def polar(x: Tensor) -> Tensor:
        u, _, vh = torch.linalg.svd(x, full_matrices=False)
        return u @ vh

    for (g,) in gradients:
        m = 0.95 * m + 0.05 * g
        w = polar(w - 0.1 * polar(m))
        path.append(w)
    exact: dict[str, Any] = {
        "update.spectral.solver": {"kind": "svd"},
        "constraints": {"kind": "polar", "solver": "svd"},
    }
    ours = follow(recipe({"base": "spel", "set": exact}, lr=0.1), [init], gradients)
    assert distance(ours, [torch.stack(path)], [init]) <= 1e-9
    short = path[-1] if shape[0] <= shape[1] else path[-1].T
    torch.testing.assert_close(short @ short.T, torch.eye(len(short)).double(), rtol=0, atol=1e-12)


def test_spel_leaves_the_length_of_vectors_and_stays_near_orthonormal_by_newton_schulz() -> None:
    """Five steps of Jordan's coefficients leave singular values in [0.68, 1.13] (Jordan et al. 2024)."""
    weight, bias = (torch.nn.Parameter(normal(*shape, seed=1)) for shape in ((8, 5), (5,)))
    optimizer = Optimizer([("p0", weight), ("p1", bias)], {"base": "spel", "routes": []}, lr=0.0)
    before = bias.detach().clone()
    for t in range(3):
        weight.grad, bias.grad = normal(8, 5, seed=t), normal(5, seed=t)
        optimizer.step()
    values = torch.linalg.svdvals(weight.detach())
    assert float(values.min()) > 0.6 and float(values.max()) < 1.2
    torch.testing.assert_close(bias.detach(), before, rtol=0, atol=0)


@pytest.mark.parametrize("inner", [None, {"kind": "ema_nesterov", "ahead": 0.5, "start": 2, "stop": 7}])
def test_an_anchored_gradient_is_that_of_a_point_beyond_the_mean(inner: dict[str, Any] | None) -> None:
    """y = W + a (W - E), a from 0 at the third update to 0.45 at the eighth; E <- E + (W - E) / 4 from the second on;
    evaluated 0.4 W + 0.6 E. With a look-ahead, its drift is added to y. 1e-12, rounding."""
    weight, gradients = torch.nn.Parameter(normal(5, 4, seed=5)), random_gradients([(5, 4)], 12)
    tail = {"kind": "ema", "decay": 0.75, "start": 2, "bias_correction": False, "weight": 0.6, "inner": inner}
    averaging = {"kind": "anchored", "ahead": 0.45, "start": 3, "full": 8, "inner": tail}
    plain = {"update": [{"kind": "heavy_ball", "beta": 0.0}], "weight_decay": {"kind": "decoupled", "rate": 0.0}}
    optimizer = Optimizer([weight], {**plain, "averaging": averaging}, lr=LR)
    w, e = weight.detach().clone(), torch.zeros(5, 4).double()
    drift, seen = torch.zeros_like(w), w.clone()
    ahead = torch.zeros_like(w)
    for t, (g,) in enumerate(gradients, start=1):
        torch.testing.assert_close(weight.detach(), seen, rtol=0, atol=1e-12)
        weight.grad = g.clone()
        optimizer.step()
        moved_to = w + ahead - LR * g
        drift, w = 0.99 * drift + 0.01 * (moved_to - w), moved_to
        e = w.clone() if t == 2 else e + (w - e) / 4 if t > 2 else e
        ahead = 0.5 * drift if inner is not None and 2 <= t < 7 else torch.zeros_like(w)
        seen = w + ahead + 0.45 * min(1.0, max(0.0, (t - 3) / 5)) * (w - e)
    held = weight.detach().clone()
    optimizer.eval()
    torch.testing.assert_close(weight.detach(), 0.4 * w + 0.6 * e, rtol=0, atol=1e-12)
    optimizer.train()
    assert torch.equal(weight.detach(), held)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_decay_that_stages_follow_is_taken_at_the_anchored_gradient(dtype: torch.dtype) -> None:
    """W' = W - lr (G + rate y), where y is the parameter before it is rounded; 1e-12 and 1e-6 are rounding."""
    weight, gradients = torch.nn.Parameter(normal(5, 4, seed=5).to(dtype)), random_gradients([(5, 4)], 9)
    averaging = {"kind": "anchored", "start": 2, "full": 4, "inner": {"kind": "ema", "bias_correction": False}}
    update = {"update": [{"kind": "heavy_ball", "beta": 0.0}], "after_decay": [{"kind": "scale", "factor": 1.0}]}
    decay = {"weight_decay": {"kind": "decoupled", "rate": 0.1}}
    optimizer = Optimizer([weight], {**update, **decay, "averaging": averaging}, lr=LR)
    w = weight.detach().clone().double()
    y, mean = w, w
    for t, (g,) in enumerate(gradients, start=1):
        weight.grad = g.to(dtype)
        optimizer.step()
        w = w - LR * (weight.grad.double() + 0.1 * y)
        mean = w if t == 1 else mean + 0.001 * (w - mean)
        y = w + 0.45 * min(1.0, max(0.0, (t - 2) / 2)) * (w - mean)
        held = weight.detach() if dtype == torch.float64 else optimizer.state[weight]["averaging/y"]
        torch.testing.assert_close(held.double(), y, rtol=0, atol=1e-12 if dtype == torch.float64 else 1e-6)


def test_output_k_fac_mixes_the_gradient_of_the_head_with_one_in_the_metric_of_its_inputs() -> None:
    """Adam of M |G| / |M|,  M = (1 - s) G + s G P |G| / |G P|,  P = (C + r tr(C) / n I)^(-1/2),  as in #341.

    C = 8/9 C_fast + 1/9 C_slow, means of X^T X / N of decay 0.8 and 0.98. P is new at updates 3, 5, ...; s is 0 before
    update 3, and goes from 0.25 to 0.75 in four updates, while r goes from 0.15 to 0.05. 1e-12 is rounding."""
    weight, lr = torch.nn.Parameter(normal(7, 5, seed=5)), LR * 0.0833
    transform = "routes.head.update.transform.before.graft.direction.sum.paths"
    shampoo = f"{transform}.kfac.stages.graft.direction.shampoo"
    changes = {
        f"{transform}.raw.weight": early(1.0, 1.0, 0.75, 0.25),
        f"{transform}.kfac.weight": early(0.0, 0.0, 0.25, 0.75),
        f"{shampoo}.solver.ratio": early(0.15, 0.15, 0.15, 0.05),
        f"{shampoo}.refresh": {"kind": "every", "steps": 2, "start": 3, "offset": 1, "stagger": "none"},
    }
    optimizer = Optimizer([("lm_head.weight", weight)], {"base": "track3_kfac", "set": changes}, lr=LR)
    w, p = weight.detach().clone(), torch.eye(5).double()
    m, v = torch.zeros(7, 5).double(), torch.zeros(7, 5).double()
    fast, slow = torch.zeros(5, 5).double(), torch.zeros(5, 5).double()
    for t, (g,) in enumerate(random_gradients([(7, 5)], 12), start=1):
        x = normal(9, 5, seed=200 + t)
        optimizer.provide("activation_gram", {weight: x.T @ x / 9})
        weight.grad = g.clone()
        optimizer.step()
        fast, slow = 0.8 * fast + 0.2 * x.T @ x / 9, 0.98 * slow + 0.02 * x.T @ x / 9
        ramp = min(1.0, (t - 3) / 4)
        if t in (3, 5, 7, 9, 11):
            c = 8 / 9 * fast / (1 - 0.8**t) + 1 / 9 * slow / (1 - 0.98**t)
            values, q = torch.linalg.eigh(c)
            p = q @ torch.diag((values + (0.15 - 0.1 * ramp) * values.mean()) ** -0.5) @ q.T
        strength = 0.25 + 0.5 * ramp if t >= 3 else 0.0
        mixed = (1 - strength) * g + strength * g @ p * g.norm() / (g @ p).norm()
        mixed = mixed * g.norm() / mixed.norm()
        m, v = 0.8 * m + 0.2 * mixed, 0.99 * v + 0.01 * mixed.square()
        w = w - lr * m / (1 - 0.8**t) / ((v / (1 - 0.99**t)).sqrt() + 1e-10)
        torch.testing.assert_close(weight.detach(), w, rtol=0, atol=1e-12)


def early(*numbers: float) -> list[dict[str, float]]:
    """A schedule of track 3 that begins at the third update and ends four updates later."""
    before, at, start, end = numbers
    return [{"from": before, "to": at, "steps": 3}, {"from": start, "to": end, "steps": 4}]
