"""What the structures share: a matrix of a known kind is turned into others, which an inner format stores."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping

import torch
from pydantic import Field
from torch import Tensor

from eigengraft.numerics import may_branch_on_values, per_block
from eigengraft.slots import Parts, Slot, Uniform

from ..base import Quantizer
from ..formats.codebook_formats import Int4


class Structure(Quantizer, ABC):
    """A quantizer of matrices around another. What is kept beside the inner parts has the dtype of the matrix."""

    inner: Quantizer = Field(
        default=Int4(), description="how entries are stored that the structure does not keep exactly"
    )

    def refuses(self, slot: Slot) -> str | None:
        return self.misfit(slot) or self.inner.refuses(slot)

    @abstractmethod
    def misfit(self, slot: Slot) -> str | None:
        """Why the slot is not a matrix of the kind that is stored so, or None."""

    def meaning(self) -> str:
        return self.inner.meaning()


def square_misfit(slot: Slot, roles: tuple[str, ...], what: str, least: int = 1) -> str | None:
    """Why a slot is not a square matrix of one of the roles, or None."""
    square = len(slot.shape) == 2 and slot.shape[0] == slot.shape[1] >= least
    if square and slot.role in roles:
        return None
    wanted = f"{what} (role {' or '.join(roles)}{f', {least} rows or more' if least > 1 else ''}) are required"
    return f"{wanted}, got a {slot.role} of shape {slot.shape}"


def prefixed(prefix: str, parts: Parts) -> dict[str, Tensor]:
    """Inner parts under the names they have outside."""
    return {f"{prefix}.{name}": part for name, part in parts.items()}


def inside(prefix: str, parts: Parts) -> dict[str, Tensor]:
    """The stored tensors whose names have that prefix, named as the inner format calls them."""
    start = f"{prefix}."
    return {name.removeprefix(start): part for name, part in parts.items() if name.startswith(start)}


def stored(
    encode: Callable[..., Parts], prefix: str, x: Tensor, before: Parts | None, uniform: Uniform | None
) -> Mapping[str, Tensor]:
    """x through an inner format, its parts under a prefix, which also keeps the random numbers of two such apart."""

    def draw(like: Tensor, purpose: str) -> Tensor:
        assert uniform is not None
        return uniform(like, f"{prefix}.{purpose}")

    old = None if before is None else inside(prefix, before)
    return prefixed(prefix, encode(x, old, None if uniform is None else draw))


def kept_where(ok: Tensor, parts: Parts, before: Parts | None) -> Parts:
    """The new parts where ok `[N]`, those before elsewhere; the new ones if there are none before."""
    if before is None or (may_branch_on_values(ok) and bool(ok.all())):
        return parts
    return {name: torch.where(per_block(ok, part), part, before[name]) for name, part in parts.items()}
