"""Addition modulo a number: all pairs are known, some of them are shown, and the others are learned late."""

from __future__ import annotations

import hashlib
from typing import ClassVar, Literal, Self, cast

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from ..base import Batch, Dataset, Examples, Fingerprint, Task, generator
from ..models import GPT


class ModularAddition(Task):
    """(a, b, =) -> (a + b) mod p,  a and b in 0 .. p - 1;  loss in nats per pair

    Power et al. 2022, arXiv:2201.02177: a part of the table, chosen once and for all, trains a small
    transformer, the rest validates. The rest is learned later than the part that trains, or never ("grokking").
    """

    kind: Literal["modular_addition"] = "modular_addition"
    modulus: int = Field(default=97, ge=3, le=1024, description="p")
    train_fraction: float = Field(default=0.5, gt=0, lt=1, description="part of all pairs that trains")
    layers: int = Field(default=1, ge=1, le=16, description="transformer blocks")
    width: int = Field(default=64, ge=4, le=4096, description="size of the residual stream")
    heads: int = Field(default=4, ge=1, le=64, description="attention heads; a divisor of width")
    batch_size: int = Field(default=512, ge=2, description="pairs per step; at most as many as train")
    reports_accuracy: ClassVar[bool] = True

    @model_validator(mode="after")
    def _is_possible(self) -> Self:
        if self.width % self.heads:
            raise ValueError(f"heads: a divisor of width {self.width} is required, got {self.heads}")
        if not self.batch_size <= self.shown < self.modulus**2:
            raise ValueError(
                "batch_size: at most the pairs that train, which are not all, are required, "
                f"got {self.batch_size} with {self.shown} of {self.modulus**2} pairs to train on"
            )
        return self

    @property
    def shown(self) -> int:
        """Number of pairs that train."""
        return round(self.train_fraction * self.modulus**2)

    def load(self) -> Dataset:
        p = self.modulus
        order = torch.from_numpy(generator(0).permutation(p * p))
        pairs = torch.stack([order // p, order % p, torch.full_like(order, p)], dim=1)
        sums = (pairs[:, 0] + pairs[:, 1]) % p
        digest = hashlib.sha256(pairs.numpy().tobytes() + str(self.shown).encode()).hexdigest()
        return Examples(
            Batch(pairs[: self.shown], sums[: self.shown]),
            Batch(pairs[self.shown :], sums[self.shown :]),
            self.batch_size,
            Fingerprint(f"all pairs modulo {p}", pairs.nelement(), digest),
        )

    def build(self) -> nn.Module:
        return LastPosition(GPT(self.modulus + 1, 3, self.layers, self.width, self.heads))


class LastPosition(nn.Module):
    """The logits [B, symbols] of a GPT at the last position."""

    def __init__(self, gpt: GPT) -> None:
        super().__init__()
        self.gpt = gpt

    def forward(self, symbols: Tensor) -> Tensor:
        return cast(Tensor, self.gpt(symbols)[:, -1])
