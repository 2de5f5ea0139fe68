"""Tasks with computed data: addition modulo a number, and sequences that are sorted, reversed or copied."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import ClassVar, Literal, Self, cast

import numpy as np
import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from .base import Batch, Dataset, Examples, Fingerprint, Task, generator
from .models import GPT, Block, HeadCount


class ModularAddition(Task):
    """(a, b, =) -> (a + b) mod p,  a and b in 0 .. p - 1;  loss in nats per pair

    Power et al. 2022, arXiv:2201.02177. A small transformer is trained on a fixed part of all pairs, and validated on
    all others. The validation pairs are learned later than the training pairs, or never ("grokking").
    """

    kind: Literal["modular_addition"] = "modular_addition"
    modulus: int = Field(default=97, ge=3, le=1024, description="p")
    train_fraction: float = Field(default=0.5, gt=0, lt=1, description="share of all pairs to train on")
    layers: int = Field(default=1, ge=1, le=16, description="transformer blocks")
    width: int = Field(default=64, ge=4, le=4096, description="size of the residual stream")
    heads: HeadCount = Field(default=4, ge=1, le=64, description="attention heads; a divisor of width")
    batch_size: int = Field(default=512, ge=2, description="pairs per step; at most the number of training pairs")
    reports_accuracy: ClassVar[bool] = True

    @model_validator(mode="after")
    def _is_possible(self) -> Self:
        if not self.batch_size <= self.shown < self.modulus**2:
            raise ValueError(
                f"train_fraction: the number of training pairs must be at least batch_size, {self.batch_size}, "
                f"and less than all {self.modulus**2} pairs, got {self.shown}; change train_fraction or batch_size"
            )
        return self

    @property
    def shown(self) -> int:
        """Number of pairs to train on."""
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


HELD_OUT = 2**63
"""Seed of the validation sequences. Seeds of runs are below 2**63, so that training never draws the same sequences."""


class SequenceToSequence(Task):
    """y = sort(x), reverse(x) or x,  for x of n symbols drawn uniformly;  loss in nats per symbol of y

    `operation` determines y. An encoder reads x. A decoder predicts each symbol of y from the encoder's outputs and
    the symbols of y before it (Sutskever, Vinyals & Le 2014, arXiv:1409.3215). Both are transformers (Vaswani et al.
    2017, arXiv:1706.03762). The accuracy is the share of the symbols of y that are predicted correctly. Every batch is
    new.
    """

    kind: Literal["sequence_to_sequence"] = "sequence_to_sequence"
    operation: Literal["sort", "reverse", "copy"] = Field(default="sort", description="operation that turns x into y")
    symbols: int = Field(default=32, ge=2, le=4096, description="number of different symbols")
    length: int = Field(default=12, ge=2, le=1024, description="n, symbols per sequence")
    layers: int = Field(default=1, ge=1, le=16, description="blocks of the encoder, and of the decoder")
    width: int = Field(default=64, ge=4, le=4096, description="size of the residual stream")
    heads: HeadCount = Field(default=4, ge=1, le=64, description="attention heads; a divisor of width")
    batch_size: int = Field(default=32, ge=2, description="sequences per step")
    eval_sequences: int = Field(default=256, ge=1, description="validation sequences")
    reports_accuracy: ClassVar[bool] = True

    def load(self) -> Dataset:
        return Sequences(self)

    def build(self) -> nn.Module:
        return EncoderDecoder(self.symbols, self.length, self.layers, self.width, self.heads)


class Sequences(Dataset):
    """Rows [B, 2 n]: x, a start symbol, and y without its last symbol; targets y [B, n]."""

    def __init__(self, task: SequenceToSequence) -> None:
        self.task = task
        self.validation = self._drawn(task.eval_sequences, HELD_OUT)
        content = b"".join(part.numpy().tobytes() for part in self.validation)
        source = f"random sequences to {task.operation}"
        self.fingerprint = Fingerprint.of(source, content)

    def batch(self, seed: int, step: int) -> Batch:
        return self._drawn(self.task.batch_size, seed, step)

    def evaluation(self) -> Iterator[Batch]:
        yield self.validation

    def _drawn(self, count: int, *key: int) -> Batch:
        x = generator(*key).integers(0, self.task.symbols, (count, self.task.length))
        y = {"sort": np.sort(x), "reverse": x[:, ::-1], "copy": x}[self.task.operation]
        start = np.full((count, 1), self.task.symbols)
        rows = np.concatenate([x, start, y[:, :-1]], axis=1)
        return Batch(torch.from_numpy(rows), torch.from_numpy(y.copy()))


class EncoderDecoder(nn.Module):
    """Encoder and decoder of n symbols each, [B, 2 n] -> logits [B, n, symbols], with learned positions.

    The first n columns are the input of the encoder. The last n columns are the input of the decoder: a start symbol,
    and each output symbol but the last.
    """

    def __init__(self, symbols: int, length: int, layers: int, width: int, heads: int) -> None:
        super().__init__()
        self.length = length
        self.embedding = nn.Embedding(symbols + 1, width)
        self.position = nn.Embedding(2 * length, width)
        self.encoder = nn.Sequential(*(Block(width, heads, causal=False) for _ in range(layers)))
        self.encoder_norm = nn.LayerNorm(width)
        self.decoder = nn.ModuleList(Block(width, heads, memory=True) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, symbols, bias=False)
        for parameter in self.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, symbols: Tensor) -> Tensor:
        embedded = self.embedding(symbols) + self.position(torch.arange(symbols.shape[1], device=symbols.device))
        memory = self.encoder_norm(self.encoder(embedded[:, : self.length]))
        x = embedded[:, self.length :]
        for block in self.decoder:
            x = block(x, memory)
        return cast(Tensor, self.head(self.norm(x)))
