"""Published iterations without any guard, which checks compare with: matrices `[d, d]`, one at a time."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def eye_like(a: Tensor) -> Tensor:
    """The identity of the size and dtype of A."""
    return torch.eye(a.shape[-1], dtype=a.dtype)


def newton_schulz(x: Tensor, steps: Sequence[Sequence[float]]) -> Tensor:
    """X <- a X + b (X X^T) X + c (X X^T)^2 X over the triples, X not scaled."""
    for a, b, c in steps:
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


def gram_newton_schulz(x: Tensor, steps: Sequence[Sequence[float]], restart: int) -> Tensor:
    """Newton-Schulz on R = X X^T alone:  Z = b R + c R^2,  Q <- Q Z + a Q,  R <- (Z + a I) R (Z + a I)

    X <- Q X at the end, and after step `restart`, where R is formed anew.
    """
    gram, q, eye = x @ x.T, eye_like(x @ x.T), eye_like(x @ x.T)
    for k, (a, b, c) in enumerate(steps):
        if k == restart:
            x = q @ x
            gram, q = x @ x.T, eye
        z = b * gram + c * gram @ gram
        q = q @ z + a * q
        gram = (z + a * eye) @ gram @ (z + a * eye)
    return q @ x


def coupled_newton(a: Tensor, p: int, steps: int) -> list[tuple[Tensor, float]]:
    """X and max |M - I| after every step of  T = ((p + 1) I - M) / p,  X <- X T,  M <- T^p M,  scaled by ||A||_F."""
    eye = eye_like(a)
    z = (1 + p) / (2 * torch.linalg.matrix_norm(a))
    x, m, course = z ** (1 / p) * eye, z * a, []
    for _ in range(steps):
        t = ((p + 1) * eye - m) / p
        x, m = x @ t, torch.linalg.matrix_power(t, p) @ m
        course.append((x, float((m - eye).abs().max())))
    return course


def denman_beavers(a: Tensor, size: float, steps: int) -> Tensor:
    """A^(-1/2) by  E = (3 I - Z Y) / 2,  Y <- Y E,  Z <- E Z  from  Y = A / size,  Z = I."""
    eye = eye_like(a)
    y, z = a / size, eye
    for _ in range(steps):
        e = (3 * eye - z @ y) / 2
        y, z = y @ e, e @ z
    return z / math.sqrt(size)


def cans(a: Tensor, size: float, schedule: Sequence[tuple[float, float]]) -> Tensor:
    """A^(-1/2) by  E = a I + b Z Y,  Y <- Y E,  Z <- E Z  over the pairs, from  Y = A / size,  Z = I."""
    eye = eye_like(a)
    y, z = a / size, eye
    for one, other in schedule:
        e = one * eye + other * (z @ y)
        y, z = y @ e, e @ z
    return z / math.sqrt(size)


def chebyshev(values: Tensor, exponent: float, low: float, high: float, degree: int) -> Tensor:
    """The Chebyshev series of x^(-exponent) on [low, high], cut after `degree`, at eigenvalues `values`."""
    nodes = (np.arange(10_000) + 0.5) * np.pi / 10_000
    f = ((high + low) / 2 + (high - low) / 2 * np.cos(nodes)) ** -exponent
    coefficients = [2 / 10_000 * float((f * np.cos(k * nodes)).sum()) for k in range(degree + 1)]
    coefficients[0] /= 2
    x = (2 * values.numpy() - high - low) / (high - low)
    return torch.from_numpy(np.polynomial.chebyshev.chebval(x, coefficients))


def jorge(root: Tensor, gram: Tensor) -> Tensor:
    """One step of Jorge (Singh et al. 2023) for A^(-1/4): the binomial series to second order, beta adaptive."""
    x = torch.linalg.matrix_power(root, 4) @ gram
    size = torch.linalg.matrix_norm(x)
    series = eye_like(root) - x / (4 * size) + 5 * x @ x / (32 * size**2)
    new: Tensor = ((size + 1) / size).pow(0.25) * root @ series
    return new
