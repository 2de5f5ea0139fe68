"""Operations on many tensors in few kernels, for sets of parameters whose tensors are small."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter

import torch
from torch import Tensor

from .fake_tensors import has_values
from .guards import compute_dtype, may_branch_on_values

_SMALL = 4096
"""Entries of a tensor that is copied in less time than a kernel of its own takes."""


def scale_tensors_(tensors: Sequence[Tensor], factor: float | Tensor) -> None:
    """Multiply all tensors by one number, in place, as `_foreach_mul_` does.

    On a CPU that makes a tensor of a Python number for each of its tensors, which takes twice as long as the product of
    a small one. Here it is made once where that rounds it alike.
    """
    first = tensors[0]
    narrow = first.is_cpu and first.dtype in (torch.float32, torch.float64)
    if isinstance(factor, float) and narrow and len({x.dtype for x in tensors}) == 1:
        factor = torch.scalar_tensor(factor, dtype=first.dtype, device=first.device)
    torch._foreach_mul_(list(tensors), factor)


def subtract_scaled_(tensors: Sequence[Tensor], others: Sequence[Tensor], factor: float | Tensor) -> None:
    """Subtract other tensors of the same dtype, times one number, in place:  x <- x - factor y."""
    if isinstance(factor, Tensor):
        torch._foreach_sub_(list(tensors), torch._foreach_mul(list(others), factor))
    else:
        torch._foreach_add_(list(tensors), list(others), alpha=-factor)


def copies(tensors: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Return copies of tensors in one dtype, made in few kernels."""
    made = [torch.empty_like(x, dtype=dtype) for x in tensors]
    torch._foreach_copy_(made, list(tensors))
    return made


def norms_by_dtype(
    tensors: Sequence[Tensor], dtypes: Sequence[torch.dtype] | None = None, order: float = 2
) -> Iterator[tuple[list[int], Tensor]]:
    """(places, norms `[n]`) of the tensors that are computed in one dtype, for each; a few kernels.

    dtypes: of each norm; None: the dtype that the tensor is computed in. order: 2 for Frobenius norms, inf for peaks.
    """
    dtypes = [compute_dtype(x.dtype) for x in tensors] if dtypes is None else dtypes
    for dtype in dict.fromkeys(dtypes):
        places = [place for place, own in enumerate(dtypes) if own == dtype]
        yield places, torch.stack(torch._foreach_norm([tensors[place] for place in places], order, dtype=dtype))


def squares_are_finite(tensors: Sequence[Tensor], most: Callable[[int, torch.dtype, torch.device], int]) -> bool:
    """Whether the sum of squares of each tensor is known to be finite in the dtype that it is computed in.

    False where asking would wait for a device, and where small tensors, which are looked at together, overflow
    together. Fake tensors on a CPU, which have no numbers, count as finite. most: (entries, dtype, device) of a tensor
    -> how many such tensors may be copied at once.
    """
    if tensors and tensors[0].is_cpu and not has_values(tensors[0]):
        return True
    if torch.compiler.is_compiling() or not all(map(attrgetter("is_cpu"), tensors)):
        return False
    equal: dict[tuple[torch.dtype, torch.Size], list[Tensor]] = {}
    for x in tensors:
        equal.setdefault((x.dtype, x.shape), []).append(x)
    for norms in (_joint_norms(own, most) for own in equal.values()):
        bound = torch.finfo(norms.dtype).max ** 0.5 / 2  # half of what would do: whatever the rounding
        if not all(norm < bound for norm in norms.tolist()):
            return False
    return True


def _joint_norms(equal: list[Tensor], most: Callable[[int, torch.dtype, torch.device], int]) -> Tensor:
    """Norms of tensors of one shape and dtype, of small ones together."""
    x = equal[0]
    dtype, at_once = compute_dtype(x.dtype), most(x.numel(), x.dtype, x.device) if x.numel() <= _SMALL else 1
    if at_once == 1 or len(equal) == 1:
        return torch.stack(torch._foreach_norm(equal, 2, dtype=dtype))
    together = (torch.stack(equal[start : start + at_once]) for start in range(0, len(equal), at_once))
    return torch.stack([torch.linalg.vector_norm(own, dtype=dtype) for own in together])


def differs_from_rounded(values: Sequence[Tensor], rounded: Sequence[Tensor]) -> list[int]:
    """Indices of the values that do not round to their partner; all of them where asking would wait for a device.

    values, rounded: n tensors of the same shapes, the second in fewer bits. Small tensors of one shape are compared
    together, and all of them are returned if one differs.
    """
    if not all(map(may_branch_on_values, rounded)):
        return list(range(len(rounded)))
    equal: dict[tuple[torch.dtype, torch.Size], list[int]] = {}
    for index, x in enumerate(rounded):
        equal.setdefault((x.dtype, x.shape), []).append(index)
    found = []
    for (dtype, shape), own in equal.items():
        for some in [own] if shape.numel() <= _SMALL and len(own) > 1 else [[index] for index in own]:
            wide, held = ((_joined(tensors, some)) for tensors in (values, rounded))
            if not _same_bits(wide.to(dtype), held):
                found += some
    return found


def _joined(tensors: Sequence[Tensor], places: Sequence[int]) -> Tensor:
    return tensors[places[0]] if len(places) == 1 else torch.stack([tensors[place] for place in places])


def _same_bits(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors in 16 bits are equal. Large ones are read as 64-bit numbers, in a sixth of the time."""
    if x.numel() > _SMALL and x.is_contiguous() and y.is_contiguous() and x.numel() % 4 == y.storage_offset() % 4 == 0:
        x, y = x.view(-1).view(torch.int64), y.view(-1).view(torch.int64)
    return torch.equal(x, y)
