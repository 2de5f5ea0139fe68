"""The base of structures: a matrix of a known kind is turned into others, which an inner format stores."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping

import torch
from pydantic import Field
from torch import Tensor

from eigengraft.numerics import may_branch_on_values, per_block
from eigengraft.slots import Encoded, Slot, Uniform

from ..base import Quantizer
from ..formats.codebook_formats import Int4


class Structure(Quantizer, ABC):
    """A quantizer of matrices around another. Tensors beside those of the inner format have the dtype of the matrix."""

    inner: Quantizer = Field(
        default=Int4(), description="how entries are stored that the structure does not keep exactly"
    )

    def unsupported(self, slot: Slot) -> str | None:
        return self.shape_error(slot) or self.inner.unsupported(slot)

    @abstractmethod
    def shape_error(self, slot: Slot) -> str | None:
        """Why the slot has not the shape or role of the matrices that this structure stores, or None."""

    def codebook_id(self) -> str:
        return self.inner.codebook_id()


def square_shape_error(slot: Slot, roles: tuple[str, ...], what: str, least: int = 1) -> str | None:
    """Why a slot is not a square matrix of one of the roles, or None."""
    square = len(slot.shape) == 2 and slot.shape[0] == slot.shape[1] >= least
    if square and slot.role in roles:
        return None
    wanted = f"{what} (role {' or '.join(roles)}{f', {least} rows or more' if least > 1 else ''}) are required"
    return f"{wanted}, got a {slot.role} of shape {slot.shape}"


def with_prefix(prefix: str, encoded: Encoded) -> dict[str, Tensor]:
    """Tensors of an inner format under "<prefix>.<name>"."""
    return {f"{prefix}.{name}": tensor for name, tensor in encoded.items()}


def without_prefix(prefix: str, encoded: Encoded) -> dict[str, Tensor]:
    """The tensors "<prefix>.<name>" under the names that the inner format gives them."""
    start = f"{prefix}."
    return {name.removeprefix(start): tensor for name, tensor in encoded.items() if name.startswith(start)}


def encode_under(
    encode: Callable[..., Encoded], prefix: str, x: Tensor, before: Encoded | None, uniform: Uniform | None
) -> Mapping[str, Tensor]:
    """x encoded by an inner format, under a prefix, which also keeps the random numbers of two such tensors apart."""

    def draw(like: Tensor, purpose: str) -> Tensor:
        assert uniform is not None
        return uniform(like, f"{prefix}.{purpose}")

    old = None if before is None else without_prefix(prefix, before)
    return with_prefix(prefix, encode(x, old, None if uniform is None else draw))


def replaced_where(ok: Tensor, encoded: Encoded, before: Encoded | None) -> Encoded:
    """The new tensors in rows where ok `[N]`, those before in the others; the new ones if there are none before."""
    if before is None or (may_branch_on_values(ok) and bool(ok.all())):
        return encoded
    return {name: torch.where(per_block(ok, tensor), tensor, before[name]) for name, tensor in encoded.items()}
