"""Magnitudes: grafting takes the direction of one chain and exactly the norm of another, and fixed rules of `scale`.

Parameters start at zero with a learning rate of 1 and no decay, so that differences of iterates are the directions.
"""

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from ..trajectories import follow, random_gradients, recipe

pytestmark = pytest.mark.slow

SHAPE, BLOCK, STEPS = (8, 4), 4, 8
NOW = {"kind": "every", "steps": 1, "stagger": "none"}


def steps_of(update: object, gradients: Sequence[Sequence[Tensor]], size: int | None = None) -> list[Tensor]:
    """U_t of a chain, parameters cut into blocks of at most `size` along each axis."""
    shape = gradients[0][0].shape
    declared = {"update": update, "routes": [], "blocking": {"size": size, "merge": None}}
    start = torch.zeros(shape, dtype=gradients[0][0].dtype)
    (path,) = follow(recipe(declared, lr=1.0, weight_decay=0.0), [start], gradients)
    return [before - after for before, after in pairwise([start, *path])]


Definition = Callable[[Sequence[Tensor]], Tensor]
"""G_1, ..., G_t -> the magnitude at step t."""


def weighted(xs: Sequence[Tensor], beta: float) -> Tensor:
    """The running mean of decay beta, from zero."""
    return sum(((1 - beta) * beta ** (len(xs) - 1 - i) * x for i, x in enumerate(xs)), torch.zeros_like(xs[0]))


def adagrad(g: Sequence[Tensor]) -> Tensor:
    return g[-1] / (torch.stack([x.square() for x in g]).sum(0).sqrt() + 1e-10)


def rmsprop(g: Sequence[Tensor]) -> Tensor:
    return g[-1] / (weighted([x.square() for x in g], 0.9).sqrt() + 1e-8)


def rmsprop_normalized(g: Sequence[Tensor]) -> Tensor:
    """RMSprop of the gradients divided by their norms."""
    return rmsprop([x / x.norm() for x in g])


def adam(g: Sequence[Tensor]) -> Tensor:
    t = len(g)
    v = weighted([x.square() for x in g], 0.99) / (1 - 0.99**t)
    return weighted(g, 0.9) / (1 - 0.9**t) / (v.sqrt() + 1e-8)


def adafactor(g: Sequence[Tensor]) -> Tensor:
    """Means over rows and columns of G^2 with the decay 1 - t^-0.8;  G / sqrt(r c^T / mean(r))."""
    v = torch.zeros_like(g[0])
    for t, x in enumerate(g, start=1):
        v = v + (x.square() - v) * t**-0.8
    return g[-1] / (torch.outer(v.mean(1), v.mean(0)) / v.mean()).sqrt()


RMS = {"kind": "rms", "beta": 0.9, "bias_correction": False}
MAGNITUDES: dict[str, tuple[object, Definition]] = {
    "sgd": ("identity", lambda g: g[-1]),
    "adagrad": ({"kind": "rms", "beta": 1.0, "eps": 1e-10}, adagrad),
    "rmsprop": (RMS, rmsprop),
    "rmsprop, normalized": (
        [{"kind": "normalize", "rule": "unit_norm"}, {**RMS, "source": "direction"}],
        rmsprop_normalized,
    ),
    "adam": ([{"kind": "momentum", "beta": 0.9}, {"kind": "rms", "beta": 0.99}], adam),
    "adafactor": ("adafactor", adafactor),
    "sqrt of n": ("sign", lambda g: g[-1].sign()),
}
SHAMPOO = {"kind": "shampoo", "solver": {"kind": "eigh", "eps": 1e-6}, "refresh": NOW}
DIRECTIONS: dict[str, Any] = {
    "shampoo": SHAMPOO,
    "eigenbasis": {"kind": "eigenbasis", "solver": "eigh", "inner": {"kind": "rms", "beta": 0.9}, "refresh": NOW},
    "spectral": "spectral",
    "sign": "sign",
}


def blocks(x: Tensor) -> tuple[Tensor, ...]:
    return x.split(BLOCK)


@pytest.mark.parametrize("magnitude", MAGNITUDES)
def test_magnitudes_are_their_formulas(magnitude: str) -> None:
    """Of each block by itself. 1e-12: some tens of roundings, over the differences of iterates of size 10."""
    declared, defined = MAGNITUDES[magnitude]
    gradients = random_gradients([SHAPE], STEPS)
    for t, u in enumerate(steps_of(declared, gradients, BLOCK), start=1):
        parts = [[blocks(g)[k] for (g,) in gradients[:t]] for k in range(2)]
        assert float((u - torch.cat([defined(part) for part in parts])).abs().max()) <= 1e-12


@pytest.mark.parametrize("per", ["block", "parameter"])
@pytest.mark.parametrize("magnitude", MAGNITUDES)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_graft_has_the_direction_of_one_and_the_norm_of_the_other(direction: str, magnitude: str, per: str) -> None:
    """D ||M|| / ||D||, norms of each block or of the parameter. 1e-11: differences of iterates, divided by ||D||."""
    gradients = random_gradients([SHAPE], STEPS)
    declared, defined = MAGNITUDES[magnitude]
    stage = {"kind": "graft", "direction": DIRECTIONS[direction], "magnitude": declared, "per": per}
    found, alone = (steps_of(update, gradients, BLOCK) for update in (stage, DIRECTIONS[direction]))
    for t, (u, d) in enumerate(zip(found, alone, strict=True), start=1):
        m = torch.cat([defined([blocks(g)[k] for (g,) in gradients[:t]]) for k in range(2)])
        pairs = [(d, m)] if per == "parameter" else zip(blocks(d), blocks(m), strict=True)
        expected = torch.cat([x * (y.norm() / x.norm()) for x, y in pairs])
        assert float((u - expected).abs().max()) <= 1e-11 * float(expected.abs().max())
        whole = [(u, m)] if per == "parameter" else zip(blocks(u), blocks(m), strict=True)
        assert all(math.isclose(x.norm(), y.norm(), rel_tol=1e-11) for x, y in whole)


def test_norms_over_blocks_and_over_the_parameter_differ() -> None:
    """The choice of `per` is one: blocks whose gradients differ a hundredfold have norms of their own or in common."""
    gradients = [[torch.cat([g[:BLOCK], 0.01 * g[BLOCK:]])] for (g,) in random_gradients([SHAPE], STEPS)]
    ratios = {}
    for per in ("block", "parameter"):
        stage = {"kind": "graft", "direction": "spectral", "magnitude": "identity", "per": per}
        upper, lower = blocks(steps_of(stage, gradients, BLOCK)[-1])
        ratios[per] = float(lower.norm() / upper.norm())
    assert ratios["block"] < 0.05 and 0.5 < ratios["parameter"] < 2


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_without_grafting_and_grafted_from_itself_are_the_same(direction: str) -> None:
    """D ||D|| / ||D||. 1e-12: one rounding, over the differences of iterates of size 10."""
    gradients = random_gradients([SHAPE], STEPS)
    stage = {"kind": "graft", "direction": DIRECTIONS[direction], "magnitude": DIRECTIONS[direction]}
    for u, d in zip(steps_of(stage, gradients), steps_of(DIRECTIONS[direction], gradients), strict=True):
        assert float((u - d).abs().max()) <= 1e-12 * max(1.0, float(d.abs().max()))


@pytest.mark.parametrize("magnitude", MAGNITUDES)
def test_before_its_start_a_graft_is_its_magnitude(magnitude: str) -> None:
    """And from the start on the direction is of statistics that it has gathered before. 1e-12 as above."""
    gradients = random_gradients([SHAPE], STEPS)
    declared, defined = MAGNITUDES[magnitude]
    late, early = (
        steps_of({"kind": "graft", "direction": SHAMPOO, "magnitude": declared, "start": s}, gradients) for s in (5, 1)
    )
    for t in range(1, STEPS + 1):
        expected = defined([g for (g,) in gradients[:t]]) if t < 5 else early[t - 1]
        assert float((late[t - 1] - expected).abs().max()) <= 1e-12 * max(1.0, float(expected.abs().max()))


RULES: dict[str, Callable[[int, int], float]] = {
    "constant": lambda m, n: 1.0,
    "match_rms": lambda m, n: 0.2 * math.sqrt(max(m, n)),
    "aspect": lambda m, n: math.sqrt(max(1.0, m / n)),
    "spectral": lambda m, n: math.sqrt(m / n),
    "inverse_mean": lambda m, n: 2 / (m + n),
    "dimensions": lambda m, n: math.sqrt(m / n) / (math.sqrt(m) + math.sqrt(n)),
    "fan_in": lambda m, n: 1 / n,
}
VIEWS = {(6, 4): (6, 4), (4, 6): (4, 6), (5,): (5, 1), (3, 2, 4): (3, 8)}
"""A block, and the matrix that it is seen as."""


@pytest.mark.parametrize("shape", VIEWS, ids=str)
@pytest.mark.parametrize("rule", RULES)
def test_rules_of_the_shape(rule: str, shape: tuple[int, ...]) -> None:
    """rule(m, n) G; a factor replaces the 0.2 of match_rms and multiplies the others. 1e-15: two roundings."""
    gradients, (m, n) = random_gradients([shape], 1), VIEWS[shape]
    expected = RULES[rule](m, n) * gradients[0][0]
    (u,) = steps_of({"kind": "scale", "rule": rule}, gradients)
    assert torch.allclose(u, expected, rtol=1e-15, atol=0)
    (tripled,) = steps_of({"kind": "scale", "rule": rule, "factor": 3.0}, gradients)
    assert torch.allclose(tripled, expected * (15.0 if rule == "match_rms" else 3.0), rtol=1e-15, atol=0)


@pytest.mark.parametrize("shape", VIEWS, ids=str)
@pytest.mark.parametrize("factor", [1.0, 0.2])
def test_rules_of_the_norm(factor: float, shape: tuple[int, ...]) -> None:
    """Of sign(M), M = G a momentum, whose norm is the root of the number of entries. 1e-14: a norm and a product."""
    (g,), *_ = gradients = random_gradients([shape], 1)
    size = math.sqrt(g.numel())
    norms = {"unit_rms": size, "unit_norm": 1.0, "unit_rows": math.sqrt(len(g)), "norm_preserving": float(g.norm())}
    for rule, norm in norms.items():
        chain = [{"kind": "heavy_ball", "beta": 0.0}, "sign", {"kind": "normalize", "rule": rule, "factor": factor}]
        (u,) = steps_of(chain, gradients)
        assert torch.allclose(u, g.sign() * (factor * norm / size), rtol=1e-14, atol=0)


def test_match_rms_gives_orthogonal_matrices_the_rms_of_adam() -> None:
    """sqrt(max(m, n)) times a semi-orthogonal matrix has an RMS of 1: 0.2 of it is Adam's (Liu et al. 2025)."""
    for shape in ((6, 4), (4, 6), (5, 5)):
        chain = [{"kind": "spectral", "solver": "svd"}, {"kind": "scale", "rule": "match_rms"}]
        (u,) = steps_of(chain, random_gradients([shape], 1))
        assert math.isclose(u.square().mean().sqrt(), 0.2, rel_tol=1e-13)


def test_aspect_and_spectral_give_a_spectral_norm() -> None:
    """sqrt(m / n) times a semi-orthogonal matrix maps RMS 1 to RMS at most 1; `aspect` does where m >= n."""
    for shape in ((6, 4), (4, 6), (5, 5)):
        m, n = shape
        for rule, norm in (("spectral", math.sqrt(m / n)), ("aspect", math.sqrt(max(1, m / n)))):
            chain = [{"kind": "spectral", "solver": "svd"}, {"kind": "scale", "rule": rule}]
            (u,) = steps_of(chain, random_gradients([shape], 1))
            assert math.isclose(torch.linalg.matrix_norm(u, 2), norm, rel_tol=1e-13)
