"""The base of structures: a matrix of a known kind is turned into other matrices, which an inner format stores.

Legend: N is the number of matrices in a stack; d is the number of rows of a matrix.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping

import torch
from pydantic import Field
from torch import Tensor

from eigengraft.component import stage_name
from eigengraft.numerics import cached_tensors, known_to_hold, per_block, where_blocks
from eigengraft.slots import Encoded, Slot, Uniform

from ..base import Quantizer
from ..formats.codebook_formats import Int4


def unit_size(a: Tensor) -> tuple[Tensor, Tensor]:
    """Return (A / s, s) with s `[N]` the largest |entry| of each matrix A. If A is 0, both results are 0."""
    size = a.abs().amax((-2, -1))
    return a / per_block(torch.where(size > 0, size, 1.0), a), size


def folded_shape(d: int) -> tuple[int, int]:
    """Return the shape of the rectangle to which `lower_places` folds the strictly lower triangle of a d x d matrix."""
    return d // 2, d - 1 + d % 2


@cached_tensors(maxsize=64)
def lower_places(d: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return (places, entries), int32, for the strictly lower triangle of a d x d matrix, folded to a rectangle.

    places: for each entry of the flat rectangle, its index in the flat matrix.
    entries: for each entry of the flat matrix, its index in the flat rectangle; arbitrary outside of the triangle.

    The triangle has rows of 1 to d - 1 entries. Row k = 0, 1, ... of the rectangle has the entries of the k-th longest
    row of the triangle (counted from 0), and then the entries of the row of the triangle that fills the rest of the
    width. If d is even, the longest row fills row 0 alone. For d = 5:

        row 4 of the matrix, 4 entries | row 1, 1 entry
        row 3 of the matrix, 3 entries | row 2, 2 entries

    A format that scales pieces of rows cuts each row of the rectangle into pieces. Two rows of the matrix should not
    share a scale, because rows of Cholesky factors differ in size. In a row of the rectangle, at most one piece has
    entries of two rows of the matrix.
    """
    height, width = folded_shape(d)
    k, c = (torch.arange(length, dtype=torch.int64, device=device) for length in (height, width))
    k = k[:, None]
    row = torch.where(c < d - 1 - k, d - 1 - k, k + d % 2)
    column = torch.where(c < d - 1 - k, c, c - (d - 1 - k))
    return _places(row.flatten(), column.flatten(), d)


@cached_tensors(maxsize=64)
def upper_places(d: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return (places, entries), int32, for the upper triangle of a d x d matrix, read row by row.

    places: for each entry of the triangle, its index in the flat matrix.
    entries: for each entry of the flat matrix, its index in the triangle. An entry below the diagonal has the index of
        its mirror image.
    """
    row, column = torch.triu_indices(d, d, dtype=torch.int64, device=device)
    return _places(row, column, d)


def _places(row: Tensor, column: Tensor, d: int) -> tuple[Tensor, Tensor]:
    entry = torch.zeros(d, d, dtype=torch.int32, device=row.device)
    entry[row, column] = entry[column, row] = torch.arange(len(row), dtype=torch.int32, device=row.device)
    return (row * d + column).int(), entry.flatten()


def at_places(x: Tensor, places: Tensor) -> Tensor:
    """Return the columns of x `[N, k]` with the indices `places` `[p]`, as `[N, p]`.

    If N = 1, the row is indexed as a vector, which is faster.
    """
    return x.reshape(-1).index_select(0, places)[None] if len(x) == 1 else x.index_select(1, places)


def strictly_lower(x: Tensor) -> Tensor:
    """Return the d (d - 1) / 2 entries below the diagonal of each matrix of x `[N, d, d]`, reshaped to rectangles
    `[N, d // 2, d - 1 + d % 2]`. `lower_places` defines their order.
    """
    d = x.shape[-1]
    return at_places(x.flatten(1), lower_places(d, x.device)[0]).reshape(-1, *folded_shape(d))


def lower_triangular(diagonal: Tensor, below: Tensor) -> Tensor:
    """Return lower triangular matrices `[N, d, d]`.

    diagonal: diagonals `[N, d]`.
    below: strictly lower triangles, folded as `strictly_lower` returns them.
    """
    n, d = diagonal.shape
    full = at_places(below.flatten(1), lower_places(d, below.device)[1]).reshape(n, d, d).tril_(-1)
    full.diagonal(dim1=-2, dim2=-1).copy_(diagonal)
    return full


class Structure(Quantizer, ABC):
    """A quantizer for matrices of one kind, with an inner quantizer for entries that need not be stored exactly.

    Tensors that the structure stores itself, such as an exact diagonal, have the dtype of the matrix.
    """

    inner: Quantizer = Field(
        default=Int4(), description="storage of the entries that the structure does not keep exactly"
    )

    def unsupported(self, slot: Slot) -> str | None:
        return self.shape_error(slot) or self.inner.unsupported(slot)

    @abstractmethod
    def shape_error(self, slot: Slot) -> str | None:
        """Return the reason why this structure cannot store slots of this shape or role, or None if it can."""

    def codebook_id(self) -> str:
        return self.inner.codebook_id()


def square_shape_error(quantizer: Quantizer, slot: Slot, what: str, least: int = 1) -> str | None:
    """Return the reason why a quantizer of square matrices cannot store a slot, or None if it can.

    The slot must be a square matrix with one of the quantizer's roles (purposes of slots), such as "statistic".

    what: name of the required matrices in the returned reason, such as "symmetric matrices".
    least: smallest number of rows that is allowed.
    """
    problem = role_error(quantizer, slot, what)
    if problem is None and not (len(slot.shape) == 2 and slot.shape[0] == slot.shape[1] >= least):
        rows = f" of {least} rows or more" if least > 1 else ""
        problem = f"square matrices{rows} are required, got a {slot.role} of shape {slot.shape}"
    return problem


def role_error(quantizer: Quantizer, slot: Slot, what: str) -> str | None:
    """Return the reason why a slot has none of the roles that a quantizer stores, or None if it has one of them.

    what: name of the matrices of these roles in the returned reason, such as "symmetric matrices".
    """
    if slot.role in quantizer.roles:
        return None
    roles = " or ".join(quantizer.roles)
    return f"{stage_name(quantizer)} stores only slots of the role {roles} ({what}), got a slot of the role {slot.role}"


def without_prefix(prefix: str, encoded: Encoded) -> dict[str, Tensor]:
    """Return the tensors of `encoded` whose names are "<prefix>.<name>", by <name>.

    This is the inverse of the renaming in `encode_under`.
    """
    start = f"{prefix}."
    return {name.removeprefix(start): tensor for name, tensor in encoded.items() if name.startswith(start)}


def encode_under(
    encode: Callable[..., Encoded], prefix: str, x: Tensor, before: Encoded | None, uniform: Uniform | None
) -> Mapping[str, Tensor]:
    """Return x encoded by an inner quantizer, with "<prefix>." in front of the names of its tensors.

    A structure that encodes two tensors gives each a prefix of its own. The random numbers by which the two tensors are
    rounded are then independent.

    encode: `encode` or `encode_hollow` of the inner quantizer.
    before: the tensors that the structure stored last, with their prefixes, or None.
    uniform: function that draws random numbers, as in `Quantizer.encode`.
    """

    def draw(like: Tensor, purpose: str) -> Tensor:
        assert uniform is not None
        return uniform(like, f"{prefix}.{purpose}")

    old = None if before is None else without_prefix(prefix, before)
    found = encode(x, old, None if uniform is None else draw)
    return {f"{prefix}.{name}": tensor for name, tensor in found.items()}


def replaced_where(ok: Tensor, encoded: Encoded, before: Encoded | None) -> Encoded:
    """Return the tensors of `encoded` for the matrices where ok `[N]` is True, and those of `before` for all other
    matrices.

    If `before` is None, return `encoded`.
    """
    if before is None or known_to_hold(ok):
        return encoded
    return {name: where_blocks(ok, tensor, before[name]) for name, tensor in encoded.items()}
