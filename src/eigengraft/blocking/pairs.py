"""Pairs of parameters whose product is one matrix, such as the factors of LoRA: how they are found, and as stacks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

NAMES = (
    ("lora_A", "lora_B"),
    ("lora_a", "lora_b"),
    ("lora_down", "lora_up"),
    ("lora_embedding_A", "lora_embedding_B"),
)
"""Parts of dotted names that tell a pair: of the factor `[r, n]`, and of the factor `[m, r]`."""


@dataclass(frozen=True)
class Factor:
    """One factor of a product B A, with A `[r, n]` of inputs and B `[m, r]` of outputs.

    side: which of the two it is.
    partner: qualified name of the other.
    """

    side: Literal["inputs", "outputs"]
    partner: str

    def tall(self, partner: Tensor) -> Tensor:
        """The partner with the axis that both share last: `[m, r]` of B, `[n, r]` of A; a view."""
        return partner if self.side == "inputs" else partner.mT


def named_factor(name: str | None) -> Factor | None:
    """What a qualified name tells of a factor; None: nothing."""
    parts = [] if name is None else name.split(".")
    for inputs, outputs in NAMES:
        if inputs in parts:
            return Factor("inputs", ".".join(outputs if part == inputs else part for part in parts))
        if outputs in parts:
            return Factor("outputs", ".".join(inputs if part == outputs else part for part in parts))
    return None


def stacked_rows(matrices: Mapping[int, Tensor], positions: Sequence[int], dtype: torch.dtype) -> Tensor:
    """`[N, p, r]` of the matrices `[p_i, r]` at N positions; zeros fill up those that are shorter than the longest."""
    tensors = [matrices[position] for position in positions]
    longest = max(len(tensor) for tensor in tensors)
    out = torch.zeros((len(tensors), longest, tensors[0].shape[-1]), dtype=dtype, device=tensors[0].device)
    for row, tensor in zip(out, tensors, strict=True):
        row[: len(tensor)] = tensor
    return out
