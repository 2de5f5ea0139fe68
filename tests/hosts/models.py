"""A small model and its data, and comparison of what was trained."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn


class Net(nn.Module):
    """A table of eight tokens, a hidden layer, a norm and a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.hidden, self.norm, self.head = (
            nn.Embedding(8, 6),
            nn.Linear(6, 6),
            nn.LayerNorm(6),
            nn.Linear(6, 8),
        )

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.head(self.norm(self.table(tokens) + self.hidden(self.table(tokens)).relu()))
        return out


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Tokens and those that follow them."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(8, (8,), generator=generator)
    return tokens, (tokens * 3 + 1) % 8


def loss_of(model: nn.Module, step: int) -> Tensor:
    tokens, following = batch(step)
    return nn.functional.cross_entropy(model(tokens), following)


def same(one: Iterable[Tensor], other: Iterable[Tensor]) -> bool:
    """Whether tensors are equal bit for bit."""
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def values(model: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]
