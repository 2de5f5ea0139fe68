"""Numbers of waits and kernels that an operation causes on a CUDA device, from its name and its tensors' shapes and
strides.

The simulated accelerator counts by these rules, which were read in torch's sources (version 2.13). Numbers of kernels
are lower bounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

DECOMPOSITIONS = {"_linalg_check_errors", "_linalg_eigh", "linalg_eig", "_linalg_svd", "linalg_lstsq"}
"""Operations of torch that wait for the error code (`info`) of the decomposition."""
WAITING = DECOMPOSITIONS | {
    "_local_scalar_dense", "equal", "nonzero", "masked_select", "_unique2", "unique_consecutive", "unique_dim",
    "bincount", "repeat_interleave", "multinomial",
}  # fmt: skip
"""Operations that make the host wait: for an error code, for a value, or for the size of the result."""
ONE_DEVICE = {
    "cat", "stack", "gather", "scatter", "scatter_", "index_select", "index_copy_", "bmm", "mm", "_foreach_norm",
}  # fmt: skip
"""Operations that refuse to mix a 0-d tensor of the host with tensors of the device. Entry-wise operations accept it.
"""
INDEXING = {"index", "index_put", "index_put_", "_unsafe_index", "_index_put_impl_"}
"""Operations that upload indices given on the host. If the index is a mask, the host waits for the number of selected
entries."""
_NO_KERNEL = {
    "empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "detach", "alias", "lift_fresh",
    "lift", "_unsafe_view", "_local_scalar_dense", "set_", "is_pinned", "record_stream",
}  # fmt: skip
_SEVERAL = {"sort": 4, "topk": 3, "eye": 2, "linalg_inv_ex": 4}
LOOPED = {"_linalg_eigh": 10, "linalg_eig": 10, "_linalg_svd": 10, "linalg_qr": 4, "geqrf": 1}
LOOPED |= {"linalg_householder_product": 1, "linalg_lstsq": 4}
"""Number of kernels for one matrix, for decompositions that cuSOLVER computes for one matrix after another."""


def launched_kernels(func: Any, args: Sequence[Any]) -> int:
    """Return the number of kernels that an operation launches for its positional arguments."""
    fixed = _kernels_for_any_arguments(func)
    if fixed is not None:
        return fixed
    name = name_of(func)
    if name not in LOOPED:
        lists = ([own for own in x if isinstance(own, Tensor)] for x in args if isinstance(x, (list, tuple)))
        return _multi_tensor_kernels(name, [own for own in lists if own])
    matrices = args[0].shape[:-2].numel() if args[0].ndim > 2 else 1
    return LOOPED[name] * matrices


@cache
def name_of(func: Any) -> str:
    """Return the name of an operation without the name of its overload."""
    return str(func.overloadpacket.__name__)


@cache
def _kernels_for_any_arguments(func: Any) -> int | None:
    """Return the number of kernels of an operation; None if it depends on the arguments."""
    name = name_of(func)
    if name in _NO_KERNEL or func.is_view:
        return 0
    if name in LOOPED or name.startswith(("_foreach_", "_fused_", "_amp_foreach_")):
        return None
    return _SEVERAL.get(name, 1)


def _multi_tensor_kernels(name: str, lists: Sequence[Sequence[Tensor]]) -> int:
    """Return the number of kernels of an operation on lists of tensors.

    The fast path (MultiTensorApply.cuh) processes many tensors in one kernel. The slow path launches a kernel for each
    tensor.

    name: name of the operation.
    lists: the lists among its arguments.
    """
    if not lists:
        return 0
    dtypes = [{x.dtype for x in tensors} for tensors in lists]
    mixed = any(len(own) > 1 for own in dtypes) or (name != "_foreach_copy_" and len(set().union(*dtypes)) > 1)
    first = lists[0]
    pairs = (pair for own in lists[1:] for pair in zip(first, own, strict=True))
    alike = all(x.shape == y.shape and x.stride() == y.stride() for x, y in pairs)
    if not name.startswith("_fused_") and (mixed or not alike or not all(map(_is_dense, first))):
        return len(first)
    tensors_of_a_kernel = (110, 64, 48, 36)[min(len(lists), 4) - 1]
    chunks = sum([-(-x.numel() // 65536) for x in first])
    launches = max(-(-len(first) // tensors_of_a_kernel), -(-chunks // 320))
    return launches * 2 if name == "_foreach_norm" else launches


def _is_dense(x: Tensor) -> bool:
    """Return True if the entries of x fill its memory without gaps, in any order of axes."""
    if x.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted((stride, size) for stride, size in zip(x.stride(), x.shape, strict=True) if size != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def traffic(given: Sequence[Tensor], made: Sequence[Tensor]) -> int:
    """Return the bytes of the tensors that an operation reads and makes.

    A tensor that is written in place, or as `out`, counts once.

    given: arguments of the operation.
    made: results of the operation.
    """
    sizes = {id(x): x.nbytes for x in made}
    return sum(sizes.values()) + sum([x.nbytes for x in given if id(x) not in sizes])


def is_mask(indices: Tensor) -> bool:
    """Return True if an index is a mask, which selects entries by True and False."""
    return indices.dtype in (torch.bool, torch.uint8)
