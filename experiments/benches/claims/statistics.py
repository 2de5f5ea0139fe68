"""Claims about statistics and the stages that use them."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

import numpy as np
import torch
from torch import Tensor

from eigengraft.preconditioners import RMS, Adafactor, Eigenbasis, Eigh, EighBasis, Every, Gram, Shampoo, Stage

from ..common.stage_runner import StageRunner
from ..problems import dense_kronecker as kronecker
from ..problems.gradients import GRADIENT_LAYERS, layer_gradients
from ..problems.spectra import orthogonal
from . import published_iterations as published
from .registry import Measured, claim


@claim("statistics")
def shampoo_is_adafactor_in_the_eigenbasis(quick: bool) -> Iterator[Measured]:
    """tr(L)^(1/2) L^(-1/2) G R^(-1/2), Shampoo with exponent 1/2, is Adafactor in the eigenbasis of L and R, exactly;
    with Adam's second moment instead, which is SOAP, it is not.

    Source: Vyas et al. 2024, arXiv:2409.11321, claim 1.
    """
    random = np.random.default_rng(0)
    scale = torch.from_numpy(random.standard_normal((12, 20)) ** 2 + 0.1)
    gradients = torch.from_numpy(random.standard_normal((60, 1, 12, 20))) * scale
    statistic, now = Gram(beta=0.9), Every(steps=1)
    shampoo = Shampoo(statistic=statistic, exponent=Fraction(1, 2), solver=Eigh(eps=0.0), every=now)
    directions = {"shampoo": _last((shampoo,), gradients)}
    for name, inner in (("adafactor", Adafactor(beta=0.9)), ("adam", RMS(beta=0.9, eps=1e-30))):
        stage = Eigenbasis(statistic=statistic, chain=(inner,), solver=EighBasis(), every=now)
        directions[name] = _last((stage,), gradients)
    weights = 0.9 ** torch.arange(59, -1, -1, dtype=torch.float64)
    left, right = kronecker.gram_factors(gradients[:, 0] * (weights * 60 / weights.sum()).sqrt()[:, None, None])
    exact = left.trace().sqrt() * kronecker.power(left, -0.5) @ gradients[-1, 0] @ kronecker.power(right, -0.5)
    traced = directions["shampoo"] * left.trace().sqrt()
    yield Measured("formula and shampoo: relative difference", _relative(traced, exact), high=1e-9)
    yield Measured(
        "formula and eigenbasis > adafactor: relative difference", _relative(directions["adafactor"], exact), high=1e-9
    )
    yield Measured(
        "formula and eigenbasis > adam (SOAP): relative difference", _relative(directions["adam"], exact), 0.01, 1.0
    )


@claim("statistics")
def order_of_kronecker_approximations(quick: bool) -> Iterator[Measured]:
    """Cosines with C = E[vec G vec G^T] are ordered: the best Kronecker product > L x R > L^(1/2) x R^(1/2) > either
    side alone > the diagonal, and L x R has at least 0.95 of the best.

    Source: Morwani et al. 2024, arXiv:2406.17748; here on gradients of a small language model.
    """
    width, samples = (12, 300) if quick else (24, 1500)
    seen = layer_gradients(width, samples + samples // 2)[:samples]
    least = {"best - L x R": 9.0, "L x R - root": 9.0, "root - one side": 9.0, "one side - diagonal": 9.0, "ratio": 9.0}
    for layer in range(len(GRADIENT_LAYERS)):
        c = kronecker.second_moment(seen[:, layer])
        (left, right), one = kronecker.gram_factors(seen[:, layer]), torch.eye(width, dtype=torch.float64)
        best, product = kronecker.best_cosine(c, width, width), kronecker.cosine_product(c, left, right)
        root = kronecker.cosine_product(c, kronecker.power(left, 0.5), kronecker.power(right, 0.5))
        sides = [kronecker.cosine_product(c, left, one), kronecker.cosine_product(c, one, right)]
        diagonal = kronecker.cosine(c, c.diagonal().diag())
        steps = (best - product, product - root, root - max(sides), min(sides) - diagonal, product / best)
        least = {name: min(value, step) for (name, value), step in zip(least.items(), steps, strict=True)}
    bounds = (0.0, 0.01, 0.01, 0.005, 0.95)
    for (name, value), low in zip(least.items(), bounds, strict=True):
        yield Measured(f"least over layers: {name}", value, low=low)


@claim("statistics")
def order_of_gain_errors(quick: bool) -> Iterator[Measured]:
    """Gain errors on held-out gradients are ordered: Frobenius > von Neumann > square root > Kullback-Leibler,
    with many and with 40 gradients; their order by angle is the reverse.

    Source: Liu et al. 2026; here on gradients of a small language model, the mean of log10 over its layers.
    """
    width, samples = (12, 300) if quick else (24, 1500)
    gradients = layer_gradients(width, samples + samples // 2)
    unseen = gradients[samples:]
    for count in (samples, 40):
        errors, cosines = [], []
        for q in (2.0, 1.0, 0.5, 0.0):
            found = []
            for layer in range(len(GRADIENT_LAYERS)):
                factors = kronecker.fixed_point(gradients[:count, layer], q)
                c = kronecker.second_moment(unseen[:, layer])
                found.append((kronecker.gain_error(unseen[:, layer], *factors), kronecker.cosine_product(c, *factors)))
            errors.append(sum(error for error, _ in found) / len(found))
            cosines.append(sum(cosine for _, cosine in found) / len(found))
        names = ("Frobenius", "von Neumann", "square root", "Kullback-Leibler")
        for k in range(3):
            ratio = errors[k] / errors[k + 1]
            yield Measured(f"{count} gradients: gain error {names[k]} / {names[k + 1]}", ratio, low=1.05)
        if count == samples:
            yield Measured(f"{count} gradients: gain error of Kullback-Leibler", errors[3], high=0.1)
            yield Measured(f"{count} gradients: cosine Frobenius - Kullback-Leibler", cosines[0] - cosines[3], low=0.01)


@claim("statistics")
def jorge_drifts_when_the_basis_turns(quick: bool) -> Iterator[Measured]:
    """Jorge updates L^(-1/4) by a series that assumes L and G G^T commute: after 300 steps it is a few percent off in a
    fixed basis, and far off, and not symmetric, where the basis turns by 0.05 a step.

    Source: Singh et al. 2023, arXiv:2310.12298; the objection is a reviewer's; measured against L with Jorge's weights.
    """
    fixed, asymmetric_fixed = _jorge(0.0)
    turning, asymmetric = _jorge(0.05)
    yield Measured("fixed basis: relative error", fixed, high=0.1)
    yield Measured("fixed basis: asymmetry", asymmetric_fixed, high=0.1)
    yield Measured("turning basis: relative error", turning, 0.2, 2.0)
    yield Measured("turning basis: asymmetry", asymmetric, 0.1, 2.0)
    if "jorge" in Stage.members:
        yield Measured("ours and the formula after 10 steps: relative difference", _our_jorge(), high=1e-9)


def _turning(angle: float, steps: int, d: int = 24) -> Iterator[Tensor]:
    """G G^T of a gradient at each step: eigenvalues around a fixed spectrum, eigenvectors turning by `angle`."""
    random = np.random.default_rng(0)
    skew = torch.from_numpy(random.standard_normal((d, d)))
    skew = skew - skew.T
    turn = torch.linalg.matrix_exp(angle * skew / torch.linalg.matrix_norm(skew, ord=2))
    u, spectrum = orthogonal(1, d, 0)[0], torch.logspace(0, -2, d, dtype=torch.float64)
    for _ in range(steps):
        yield (u * spectrum * torch.from_numpy(random.chisquare(d, size=d) / d)) @ u.T
        u = u @ turn


def _jorge(angle: float) -> tuple[float, float]:
    """Relative error of Jorge's root after 300 steps, and ||R - R^T|| / ||R + R^T||."""
    mean = torch.eye(24, dtype=torch.float64)
    root = mean
    for gram in _turning(angle, 300):
        size = torch.linalg.matrix_norm(torch.linalg.matrix_power(root, 4) @ gram)
        mean = (size * mean + gram) / (1 + size)
        root = published.jorge(root, gram)
    asymmetry = float((root - root.T).norm() / (root + root.T).norm())
    return _relative(root, kronecker.power(mean, -0.25)), asymmetry


def _our_jorge() -> float:
    stage = Stage.model_validate({"kind": "jorge", "initial": 1.0, "eps": 0.0})
    root, grams = torch.eye(24, dtype=torch.float64), list(_turning(0.05, 10))
    runner = StageRunner((stage,), (24, 24), 1, grams[0])
    for gram in grams:
        runner.step(kronecker.power(gram, 0.5)[None])
        root = published.jorge(root, gram)
    return _relative(runner.state.scope(stage.label)["root.0"][0], root)


def _last(stages: tuple[Stage, ...], gradients: Tensor) -> Tensor:
    """The direction at the last of the gradients `[T, 1, m, n]`."""
    runner = StageRunner(stages, tuple(gradients.shape[2:]), 1, gradients)
    for gradient in gradients:
        direction = runner.step(gradient)
    return direction[0]


def _relative(x: Tensor, reference: Tensor) -> float:
    return float((x - reference).norm() / reference.norm())
