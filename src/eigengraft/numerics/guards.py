"""Every guard against overflow, underflow, division by zero and bits that depend on a place, in one file.

Legend: N blocks of a stack; `like` is a tensor `[N, *block]` whose rank and dtype a result must fit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .fake_tensors import has_values


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that parameters of `dtype` are updated in: float64 stays, everything else is float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def may_branch_on_values(x: Tensor) -> bool:
    """Whether asking for values of x costs nothing and is allowed.

    A device is waited for, a traced graph breaks, and a fake tensor has no values.
    """
    return x.is_cpu and may_wait_for_values(x)


def may_wait_for_values(x: Tensor) -> bool:
    """Return whether values of x may be read where a wait for the device is worth it, as between costly iterations."""
    return has_values(x) and not torch.compiler.is_compiling()


def per_block(values: Tensor, like: Tensor) -> Tensor:
    """`values` `[N]` (or 0-d) shaped to broadcast against `like` `[N, *block]`."""
    return values if values.ndim == 0 else values.reshape(-1, *[1] * (like.ndim - 1))


def finite_blocks(x: Tensor) -> Tensor:
    """`[N]`, whether all entries of a block are finite.

    On a CPU the sum says so at once: a finite one has no term with inf or nan. Others are looked at entry by entry.
    """
    if may_branch_on_values(x) and math.isfinite(float(x.sum())):
        return torch.ones(x.shape[0], dtype=torch.bool, device=x.device)
    return x.isfinite().flatten(1).all(1)


def known_to_hold(ok: Tensor) -> bool:
    """Whether all of ok `[N]` are True; False where asking would wait for a device."""
    return may_branch_on_values(ok) and bool(ok.all())


def where_blocks(ok: Tensor, x: Tensor, other: Tensor | float) -> Tensor:
    """x where ok `[N]`, `other` elsewhere; on a CPU x itself where all blocks are ok."""
    if known_to_hold(ok):
        return x
    return torch.where(per_block(ok, x), x, other)


def tiny(dtype: torch.dtype) -> float:
    """The floor below which a scale counts as 0: its reciprocal is finite in `dtype`, with room to spare."""
    return torch.finfo(dtype).tiny * 16


def block_norm(x: Tensor) -> Tensor:
    """Frobenius norm of each block, `[N, *block] -> [N]`, without overflow or underflow of the squares."""
    # contiguous: entries with a stride are added up in another order, and ranks have the same block with others
    flat = x.reshape(x.shape[0], math.prod(x.shape[1:])).contiguous()
    if flat.shape[1] == 0:
        return flat.new_zeros(flat.shape[0])
    norm: Tensor = torch.linalg.vector_norm(flat, dim=1)
    unsafe = ~((norm > torch.finfo(x.dtype).tiny ** 0.5) & norm.isfinite())
    if may_branch_on_values(x) and not bool(unsafe.any()):
        return norm
    peak = torch.linalg.vector_norm(flat, ord=float("inf"), dim=1)
    scaled = torch.linalg.vector_norm(flat / peak.clamp_min(tiny(x.dtype))[:, None], dim=1) * peak
    return torch.where(unsafe, scaled, norm)


def signs(x: Tensor) -> Tensor:
    """-1 where x < 0 and 1 elsewhere, in the dtype of x."""
    return torch.where(x < 0, -1.0, x.new_ones(()))


def safe_ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """numerator / denominator for values >= 0, and 0 where the denominator is too small to divide by."""
    floor = tiny(denominator.dtype)
    return torch.where(denominator > floor, numerator / denominator.clamp_min(floor), torch.zeros_like(denominator))


def to_power(x: Tensor, exponent: float) -> Tensor:
    """x^e entry by entry, for spectra and other small tensors: rounded once, from float64.

    torch's pow rounds the last entries of a tensor differently on a CPU, those that fill no vector register, so that a
    block's result would depend on the blocks beside it: in float32, which is rounded here, and in float64, where ones
    are added that fill the last register.
    """
    if exponent == 1:
        return x
    wide = x.double()
    if x.dtype != torch.float64 or x.device.type != "cpu":
        return wide.pow(exponent).to(x.dtype)
    filled = torch.nn.functional.pad(wide.flatten(), (0, -wide.numel() % _REGISTER), value=1.0)
    return filled.pow(exponent)[: wide.numel()].view(x.shape)


_REGISTER = 16
"""float64 numbers that a CPU's kernel takes at a time, at most: two registers of AVX-512."""


def transposed(a: Tensor) -> Tensor:
    """A^T of each matrix of a stack `[N, m, n]`, as a dense tensor."""
    out = a.new_empty(a.shape[0], a.shape[2], a.shape[1])
    return copy_blocks(out, a.mT)


def copy_blocks(target: Tensor, source: Tensor) -> Tensor:
    """target.copy_(source) of stacks `[N, *block]`.

    On a CPU large transposed matrices are copied one by one: torch copies a matrix in tiles, a batch of them along long
    strides.
    """
    turned = source.ndim == 3 and min(source.shape[1:]) >= _TILED and source.mT.is_contiguous()
    if not (turned and target.is_contiguous() and may_branch_on_values(source)):
        return target.copy_(source)
    for own, given in zip(target.unbind(0), source.unbind(0), strict=True):
        own.copy_(given)
    return target


_TILED = 256
"""Sides from which on copies one by one are faster (measured; below they take longer)."""


def symmetrized(a: Tensor) -> Tensor:
    """(A + A^T) / 2 for a stack `[N, d, d]`."""
    half = a * 0.5  # before the sum, which could overflow
    return transposed(half).add_(half)


def identity_like(a: Tensor) -> Tensor:
    """The identity, expanded to the stack `[N, d, d]` (a view: do not write into it)."""
    return torch.eye(a.shape[-1], dtype=a.dtype, device=a.device).expand_as(a)


def products(a: Tensor, b: Tensor) -> Tensor:
    """A B of each pair of a stack, `[N, m, k]` and `[N, k, n]`, where m or n may be 1.

    On a CPU a stack of one pair with one row or column takes another kernel, which rounds otherwise: it is computed
    twice, so that no result depends on the number of pairs. Iterations for inverse roots amplify such a difference by
    the condition number of the matrix.
    """
    if len(a) == 1 and 1 in (a.shape[1], b.shape[2]) and a.device.type == "cpu":
        return torch.bmm(a.expand(2, -1, -1), b.expand(2, -1, -1))[:1]
    return torch.bmm(a, b)


def in_registers(function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """function(*tensors), entry by entry, of tensors of one shape.

    On a CPU torch rounds the last entries, which fill no vector registers, otherwise: they are computed once more in
    full registers, so that no entry depends on its place in a tensor.
    """
    found = function(*tensors)
    if not (may_branch_on_values(found) and found.is_contiguous()):
        return found
    if rest := found.numel() % _REGISTERS:
        missing = (0, _REGISTERS - rest)
        ends = [torch.nn.functional.pad(x.reshape(-1)[-rest:], missing, value=1.0) for x in tensors]
        found.view(-1)[-rest:] = function(*ends)[:rest]
    return found


_REGISTERS = 32
"""Numbers that a CPU's kernel takes at a time, at most: two registers of AVX-512 in float32."""
_LINE = 64
"""Bytes of a cache line: for a matrix that starts inside one LAPACK takes other instructions and rounds differently."""


def apply_aligned(function: Callable[..., Any], *stacks: Tensor) -> Any:
    """function(*stacks), for decompositions whose last bits depend on where in memory a matrix of a stack begins.

    Each of `stacks` is `[N, *matrix]`, and so are the results. On a CPU, where matrices do not fill whole cache lines,
    the function is called on a copy of each matrix by itself, so that no result depends on its place in the stack.
    LAPACK takes one matrix at a time anyway. Results have the strides that they would have otherwise.

    Products are not called through here, and some depend on the place in the last bits too (measured, MKL on AVX-512):
    with a few columns on an odd number of rows; in float64 where a matrix has an odd number of entries; in float32 with
    sides from 8 to 11. `products` is for those with one column.
    """
    sizes = {math.prod(stack.shape[1:]) * stack.element_size() % _LINE for stack in stacks}
    if stacks[0].device.type != "cpu" or sizes == {0} or len(stacks[0]) == 0:
        return function(*stacks)
    found = [function(*(stack[row : row + 1].clone() for stack in stacks)) for row in range(len(stacks[0]))]
    if len(found) == 1 or isinstance(found[0], Tensor):
        return _joined(found)
    return tuple(_joined(parts) for parts in zip(*found, strict=True))


def _joined(parts: Sequence[Any]) -> Any:
    """Stacks of one matrix each as one stack; the columns of its matrices stay contiguous if they were."""
    if len(parts) == 1:
        return parts[0]
    if parts[0].ndim == 3 and not parts[0].is_contiguous():
        return torch.cat([part.mT for part in parts]).mT
    return torch.cat(tuple(parts))
