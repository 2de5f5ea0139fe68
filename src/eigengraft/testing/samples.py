"""Tensors for laws, drawn in float64 on the host, so that the numbers are the same for every dtype and device."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from eigengraft.signals import SIDES, Signal

TRAJECTORY_STEPS = 12
"""Number of steps in the training runs of laws: enough for a refresh by every cadence."""


def standard_normal(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Return a tensor of standard normal numbers."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")
    return x.to(torch.get_default_device(), dtype)


def rotation(d: int, seed: int) -> Tensor:
    """Return a random orthogonal matrix `[d, d]`, float64."""
    q: Tensor = torch.linalg.qr(standard_normal(d, d, seed=seed)).Q
    return q


def definite(n: int = 4, d: int = 6, dtype: torch.dtype = torch.float64) -> Tensor:
    """Return positive definite matrices `[n, d, d]` with condition numbers up to 1e3."""
    x = standard_normal(n, d, 2 * d, seed=n + d)
    return (x @ x.mT / d).to(dtype)


def gradients(block: tuple[int, ...], blocks: int = 3, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    """Return standard normal gradients `[TRAJECTORY_STEPS, blocks, *block]`."""
    return standard_normal(TRAJECTORY_STEPS, blocks, *block, seed=seed + sum(block), dtype=dtype)


def difficult(block: tuple[int, ...]) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, gradients) for gradients that cause numerical problems, such as huge or rank-deficient ones, in
    float32.
    """
    base = gradients(block, dtype=torch.float32)
    yield "zero", torch.zeros_like(base)
    yield "huge", base * 1e12
    yield "tiny", base * 1e-30
    yield "denormal", base * 1e-42
    yield "mixed", base * torch.tensor([1e12, 1e-30, 1.0]).reshape(1, 3, *[1] * len(block))
    yield "one entry", torch.zeros_like(base).index_fill_(-1, torch.tensor([0]), 1.0)
    flat = base.reshape(*base.shape[:2], -1)
    yield "constant", (flat[..., :1] * flat[:1, :1]).reshape(base.shape)
    yield "suddenly zero", torch.cat([base[:3], torch.zeros_like(base[3:])])
    yield "suddenly huge", torch.cat([base[:3], base[3:] * 1e12])
    if len(block) == 2:
        yield "rank one", base[..., :1] * base[..., :1, :]
        yield "one and the same", base[:1].expand_as(base)


def signals_of(
    signals: Iterable[Signal], block: tuple[int, ...], seeds: NDArray[np.int64], dtype: torch.dtype
) -> dict[str, Tensor | float]:
    """Return values of signals for N blocks, by name. The value of a block follows from its seed alone.

    signals: the signals.
    block: shape of a block.
    seeds: `[N]`, a whole number for each block.
    dtype: dtype of the values.
    """
    signals, found = list(signals), dict[str, Tensor | float]()
    if not signals:
        return found
    size = torch.from_numpy(0.5 + seeds % 11 / 10).to(torch.get_default_device(), dtype)
    for signal in signals:
        if signal.extent == "entry":
            ones = torch.linspace(0.5, 1, max(1, math.prod(block)), dtype=dtype).reshape(block)
            found[signal.name] = size.reshape(-1, *[1] * len(block)) * ones
        elif signal.extent in SIDES:
            own = block[-1 if SIDES[signal.extent] == "inputs" else 0] if len(block) > 1 else 1
            shape = torch.eye(own, dtype=dtype) + torch.full((own, own), 0.5, dtype=dtype)
            found[signal.name] = size[:, None, None] * shape.to(size)
        elif signal.extent == "partner":
            rows = torch.linspace(-1, 1, 7 * block[-1], dtype=dtype).reshape(7, -1).sin()
            found[signal.name] = size[:, None, None] * (rows + torch.eye(*rows.shape, dtype=dtype)).to(size)
        elif signal.extent != "outputs":  # only constraints can request signals with a value for each output of a layer
            found[signal.name] = (0.1 if signal.name == "lr" else 0.5) if signal.extent == "step" else size
    return found
