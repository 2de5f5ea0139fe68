"""Operations on many tensors in few kernels, for sets of parameters whose tensors are small."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter

import torch
from torch import Tensor

from .guards import compute_dtype

_SMALL = 4096
"""Entries of a tensor that is copied in less time than a kernel of its own takes."""


def scale_tensors_(tensors: Sequence[Tensor], factor: float) -> None:
    """Multiplies all tensors by `factor`, in place, as `_foreach_mul_` does.

    On a CPU that makes a tensor of the factor for each of its tensors, which takes twice as long as the product of a
    small one; here it is made once where that rounds it alike.
    """
    first = tensors[0]
    if first.is_cpu and first.dtype in (torch.float32, torch.float64) and len({x.dtype for x in tensors}) == 1:
        torch._foreach_mul_(list(tensors), torch.scalar_tensor(factor, dtype=first.dtype))
    else:
        torch._foreach_mul_(list(tensors), factor)


def norms_by_dtype(tensors: Sequence[Tensor]) -> Iterator[tuple[list[int], Tensor]]:
    """(places, Frobenius norms `[n]`) of the tensors that are computed in one dtype, for each; a few kernels."""
    dtypes = [compute_dtype(x.dtype) for x in tensors]
    for dtype in dict.fromkeys(dtypes):
        places = [place for place, own in enumerate(dtypes) if own == dtype]
        yield places, torch.stack(torch._foreach_norm([tensors[place] for place in places], 2, dtype=dtype))


def squares_are_finite(tensors: Sequence[Tensor], most: Callable[[int, torch.dtype, torch.device], int]) -> bool:
    """Whether the sum of squares of each tensor is known to be finite in the dtype that it is computed in.

    False where asking would wait for a device, and where small tensors, which are looked at together, overflow
    together. most: (entries, dtype, device) of a tensor -> how many such tensors may be copied at once.
    """
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
