"""Sequences of random symbols that an encoder and a decoder sort, reverse or copy; every batch is new."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import ClassVar, Literal, Self

import numpy as np
import torch
from pydantic import Field, model_validator
from torch import nn

from ..base import Batch, Dataset, Fingerprint, Task, generator
from .encoder_decoder import EncoderDecoder

HELD_OUT = 2**63
"""First number of the key of the validation sequences; seeds of runs are smaller."""


class SequenceToSequence(Task):
    """y = sort(x), x reversed, or x,  x of n symbols drawn evenly;  loss in nats per symbol of y

    An encoder reads x, a decoder is given the symbols of y before the one it predicts (Sutskever, Vinyals & Le 2014,
    arXiv:1409.3215; as transformers, Vaswani et al. 2017, arXiv:1706.03762). Accuracy counts symbols.
    """

    kind: Literal["sequence_to_sequence"] = "sequence_to_sequence"
    operation: Literal["sort", "reverse", "copy"] = Field(default="sort", description="what makes y of x")
    symbols: int = Field(default=32, ge=2, le=4096, description="number of different symbols")
    length: int = Field(default=12, ge=2, le=1024, description="n, symbols per sequence")
    layers: int = Field(default=1, ge=1, le=16, description="blocks of the encoder, and of the decoder")
    width: int = Field(default=64, ge=4, le=4096, description="size of the residual stream")
    heads: int = Field(default=4, ge=1, le=64, description="attention heads; a divisor of width")
    batch_size: int = Field(default=32, ge=2, description="sequences per step")
    eval_sequences: int = Field(default=256, ge=1, description="validation sequences")
    reports_accuracy: ClassVar[bool] = True

    @model_validator(mode="after")
    def _heads_suit_the_width(self) -> Self:
        if self.width % self.heads:
            raise ValueError(f"heads: a divisor of width {self.width} is required, got {self.heads}")
        return self

    def load(self) -> Dataset:
        return Sequences(self)

    def build(self) -> nn.Module:
        return EncoderDecoder(self.symbols, self.length, self.layers, self.width, self.heads)


class Sequences(Dataset):
    """Rows [B, 2 n]: x, a start symbol and all symbols of y but the last; targets y [B, n]."""

    def __init__(self, task: SequenceToSequence) -> None:
        self.task = task
        self.validation = self._drawn(task.eval_sequences, HELD_OUT)
        content = b"".join(part.numpy().tobytes() for part in self.validation)
        source = f"random sequences to {task.operation}"
        self.fingerprint = Fingerprint(source, len(content), hashlib.sha256(content).hexdigest())

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
