"""Numerical functions that are safe for all values, give a block the same bits in any stack, and do not wait for a
device.

They avoid overflow, underflow, division by zero, and results that depend on an address in memory. The module also
recognizes fake tensors and DTensors, copies numbers between host and device, and runs operations on many tensors in few
kernels.
"""

from __future__ import annotations

import math
import platform
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache, wraps
from operator import attrgetter
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

if TYPE_CHECKING:  # importing DTensor takes as long as importing all of this library
    from torch.distributed.tensor import DTensor
    from typing_extensions import TypeIs

_P = ParamSpec("_P")
_T = TypeVar("_T")
_FAKE = torch._C._TorchDispatchModeKey.FAKE


def fake_mode(x: object) -> FakeTensorMode | None:
    """Return the fake mode of a fake tensor, or of a DTensor of fake tensors. Return None for any other object."""
    if type(x) is nn.Parameter:
        return None
    own = getattr(x, "_local_tensor", x)
    return own.fake_mode if isinstance(own, FakeTensor) else None


def is_compiling() -> bool:
    """Return True while torch compiles a graph, but False in a thread that is inside `never_compiled`."""
    return torch.compiler.is_compiling() and not getattr(_thread, "never_compiled", False)


@contextmanager
def never_compiled() -> Iterator[None]:
    """Mark the calling thread as one whose work is never compiled, for the `with` statement.

    torch's flag for compilation is shared by all threads. Without the mark, code in this thread would change its
    branches whenever another thread compiles a model.
    """
    _thread.never_compiled = True
    try:
        yield
    finally:
        _thread.never_compiled = False


_thread = threading.local()


def has_values(x: Tensor) -> bool:
    """Return True if a tensor has numbers, which fake tensors do not have.

    Under `torch.compile` every tensor that is not a fake tensor counts as having numbers.
    """
    if isinstance(x, FakeTensor):
        return False
    return is_compiling() or active_fake_mode() is None


def active_fake_mode() -> FakeTensorMode | None:
    """Return the mode in which every new tensor is fake; None if new tensors have numbers."""
    found: FakeTensorMode | None = torch._C._get_dispatch_mode(_FAKE)
    return found


def any_dtensors(tensors: Iterable[object]) -> bool:
    """Return True if one of the tensors is a DTensor. The function does not import torch's DTensor module."""
    known = sys.modules.get("torch.distributed.tensor")
    return known is not None and any(issubclass(kind, known.DTensor) for kind in {*map(type, tensors)})


def is_dtensor(x: object) -> TypeIs[DTensor]:
    """Return True if x is a DTensor. The function does not import torch's DTensor module."""
    known = sys.modules.get("torch.distributed.tensor")
    return known is not None and isinstance(x, known.DTensor)


def local(x: Tensor) -> Tensor:
    """Return the local tensor of a DTensor on this rank, as a view. Return any other tensor itself."""
    return x.to_local() if is_dtensor(x) else x


def apart(x: Tensor) -> Tensor:
    """Return a tensor that shares the memory of x.

    If x is a view of a larger tensor, the storage of the result is only the part of x. pickle would store the larger
    tensor otherwise. The result has its own version counter. A tensor that is not contiguous, or has no memory (meta,
    fake), is returned as a view with its full storage.
    """
    if type(x) is not Tensor or x.device.type == "meta" or not x.is_contiguous():
        return x.data
    start, size = x.storage_offset() * x.element_size(), x.numel() * x.element_size()
    storage = x.untyped_storage()[start : start + size]
    return torch.empty(0, dtype=x.dtype, device=x.device).set_(storage, 0, x.shape, x.stride())


def cached_tensors(maxsize: int) -> Callable[[Callable[_P, _T]], Callable[_P, _T]]:
    """Return a decorator that caches results, like `functools.lru_cache`, for functions that make tensors.

    Results that are fake tensors, or tensors of a traced graph, are not cached.

    maxsize: largest number of cached results.
    """

    def decorate(function: Callable[_P, _T]) -> Callable[_P, _T]:
        kept = lru_cache(maxsize)(function)

        @wraps(function)
        def call(*args: _P.args, **kwargs: _P.kwargs) -> _T:
            if is_compiling() or active_fake_mode() is not None:
                return function(*args, **kwargs)
            return kept(*args, **kwargs)  # type: ignore[arg-type]

        return call

    return decorate


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which parameters of `dtype` are updated: float64 for float64, float32 for any other dtype."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def may_branch_on_values(x: Tensor) -> bool:
    """Return True if the host may read values of x at no cost.

    The result is False for a tensor on a device, because the host would wait, and False while a graph is traced or for
    fake tensors, because there are no values.
    """
    return x.is_cpu and may_wait_for_values(x)


def may_wait_for_values(x: Tensor) -> bool:
    """Return True if the host can read values of x, although it may have to wait for the device.

    Iterations that are expensive use this function to decide if they check for convergence.
    """
    return not isinstance(x, FakeTensor) and not is_compiling() and active_fake_mode() is None


def per_block(values: Tensor, like: Tensor) -> Tensor:
    """Return `values` `[N]` (or 0-d) in the shape that broadcasts against `like` `[N, *block]`."""
    return values if values.ndim == 0 else values.reshape(-1, *[1] * (like.ndim - 1))


def finite_blocks(x: Tensor) -> Tensor:
    """Return bool `[N]`, True for blocks whose entries are all finite.

    On a CPU every entry is checked only if the sum of all entries is not finite. On a device, one kernel reads x and
    finds the largest absolute entry of each block, which is finite if all entries are. `isfinite` would take four
    kernels that read and write as many entries.
    """
    if may_branch_on_values(x) and math.isfinite(float(x.sum())):
        return torch.ones(x.shape[0], dtype=torch.bool, device=x.device)
    if x.is_cpu or not x.numel():
        return x.isfinite().flatten(1).all(1)
    largest: Tensor = torch.linalg.vector_norm(x.flatten(1), ord=math.inf, dim=1)
    return largest < math.inf  # False for nan


def known_to_hold(ok: Tensor) -> bool:
    """Return True if all entries of ok `[N]` are True and the host can read them without waiting for a device."""
    return may_branch_on_values(ok) and bool(ok.all())


def where_blocks(ok: Tensor, x: Tensor, other: Tensor | float) -> Tensor:
    """Return x `[N, *block]` in blocks where ok is True, and `other` elsewhere.

    On a CPU, x itself is returned if all entries of `ok` are True.

    ok: bool `[N]`.
    other: a number, or a tensor that broadcasts against x.
    """
    if known_to_hold(ok):
        return x
    return torch.where(per_block(ok, x), x, other)


def tiny(dtype: torch.dtype) -> float:
    """Return the number up to which a scale counts as 0: 16 times the smallest normal number of `dtype`.

    Reciprocals of larger scales are finite.
    """
    return torch.finfo(dtype).tiny * 16


def block_norm(x: Tensor) -> Tensor:
    """Return the Frobenius norm of each block, `[N, *block] -> [N]`, without overflow or underflow of the squares.

    A block is scaled if its largest entry is outside the range in which squares are safe.
    """
    # blocks are made contiguous, because strides differ between ranks, and torch's order of addition depends on them
    flat = x.reshape(x.shape[0], math.prod(x.shape[1:])).contiguous()
    if flat.numel() == 0:
        return flat.new_zeros(flat.shape[0])
    limits, root = torch.finfo(x.dtype), flat.shape[1] ** 0.5
    low, high = limits.tiny**0.5 * _SMALLER, limits.max**0.5 / (2 * root)
    if may_branch_on_values(x):
        norm: Tensor = torch.linalg.vector_norm(flat, dim=1)
        smallest, largest = map(float, norm.aminmax())  # nan if a norm is nan
        if 2 * low * root < smallest and largest < high:
            return norm
    peak = torch.linalg.vector_norm(flat, ord=float("inf"), dim=1).clamp_min_(tiny(x.dtype))
    # the scale is 1 in the range of safe squares, so that scaling does not change the bits of these norms
    scale = peak / peak.clamp(low, high)
    found: Tensor = torch.linalg.vector_norm(flat / scale[:, None], dim=1).mul_(scale)
    return found


_SMALLER = 4096
"""An entry of a block does not change the norm of the block in float32 if it is more than this many times smaller than
the largest entry. The squares of all other entries must not underflow."""


def signs(x: Tensor) -> Tensor:
    """Return -1 where x < 0 and 1 elsewhere, in the dtype of x."""
    return torch.where(x < 0, -1.0, x.new_ones(()))


def safe_ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """Return numerator / denominator for finite values >= 0, and 0 where the denominator is at most `tiny`."""
    return numerator / torch.nn.functional.threshold(denominator, tiny(denominator.dtype), math.inf)


def to_power(x: Tensor, exponent: float) -> Tensor:
    """Return x^exponent for each entry, computed in float64 and rounded once; for spectra and other small tensors.

    On a CPU torch's pow rounds the last entries of a tensor differently if they do not fill a vector register, so that
    the result of a block would depend on the other blocks of its stack. For float32 the rounding from float64 removes
    the difference. For float64, ones are appended so that the last register is full.
    """
    if exponent == 1:
        return x
    wide = x.double()
    if x.dtype != torch.float64 or x.device.type != "cpu":
        return wide.pow(exponent).to(x.dtype)
    filled = torch.nn.functional.pad(wide.flatten(), (0, -wide.numel() % _REGISTER), value=1.0)
    return filled.pow(exponent)[: wide.numel()].view(x.shape)


_REGISTER = 16
"""Number of float64 entries that a CPU kernel processes at once, at most: two registers of AVX-512."""


def transposed(a: Tensor) -> Tensor:
    """Return A^T of each matrix of a stack `[N, m, n]`, as a contiguous tensor."""
    out = a.new_empty(a.shape[0], a.shape[2], a.shape[1])
    return copy_blocks(out, a.mT)


def copy_blocks(target: Tensor, source: Tensor) -> Tensor:
    """Copy a stack `[N, *block]` into another, and return the target.

    On a CPU, large matrices that are stored transposed are copied one by one. torch copies a single such matrix in
    tiles, but a batch of them along long strides, which is slower.
    """
    turned = source.ndim == 3 and min(source.shape[1:]) >= _TILED and source.mT.is_contiguous()
    if not (turned and target.is_contiguous() and may_branch_on_values(source)):
        return target.copy_(source)
    for own, given in zip(target.unbind(0), source.unbind(0), strict=True):
        own.copy_(given)
    return target


_TILED = 256
"""Matrices with sides of at least this many entries are copied one by one. A batched copy is faster for smaller ones
(measured)."""


def symmetrized(a: Tensor) -> Tensor:
    """Return (A + A^T) / 2 for a stack `[N, d, d]`."""
    half = a * 0.5  # halved before the sum, because A + A^T could overflow
    return transposed(half).add_(half)


def identity_like(a: Tensor) -> Tensor:
    """Return the identity for each matrix of a stack `[N, d, d]`, as one expanded view that must not be written to."""
    return torch.eye(a.shape[-1], dtype=a.dtype, device=a.device).expand_as(a)


def products(a: Tensor, b: Tensor) -> Tensor:
    """Return the products A B of stacks `[N, m, k]` and `[N, k, n]`, where m or n may be 1.

    If the result has one row or one column, torch on a CPU uses another kernel for N = 1 than for N > 1, and the last
    bits differ. So a single product of this kind is computed in a stack of two. Iterations for inverse roots would
    amplify the difference by the condition number of the matrix.
    """
    if a.shape[0] == 1 and 1 in (a.shape[1], b.shape[2]) and a.is_cpu:
        return torch.bmm(a.expand(2, -1, -1), b.expand(2, -1, -1))[:1]
    return torch.bmm(a, b)


def in_registers(function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """Return function(*tensors) for an entry-wise function, so that no entry of the result depends on its index.

    On a CPU torch rounds the last entries differently if they do not fill a vector register. These entries are computed
    a second time, in a full register.

    tensors: tensors of one shape.
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
"""Number of float32 entries that a CPU kernel processes at once, at most: two registers of AVX-512."""
_LINE = 64
"""Bytes of a cache line. LAPACK uses other instructions, which round differently, for a matrix that does not begin at
the start of a line."""


def fills_lines(stack: Tensor) -> bool:
    """Return True if each matrix of a stack `[N, *matrix]` fills whole cache lines, so that all matrices are aligned
    alike.
    """
    return math.prod(stack.shape[1:]) * stack.element_size() % _LINE == 0


def apply_aligned(function: Callable[..., Any], *stacks: Tensor) -> Any:
    """Return function(*stacks) for a decomposition, so that the result of a matrix does not depend on its index in the
    stack.

    On a CPU the last bits depend on the address of a matrix. So if matrices do not fill cache lines, the function is
    called on a copy of each matrix alone. This costs little, because LAPACK computes one matrix at a time anyway.

    Some products depend on the address too, but are not computed through this function: products with few columns and
    an odd number of rows, products of float64 matrices with an odd number of entries, and products of float32 matrices
    with sides from 8 to 11 (measured with MKL on AVX-512).

    stacks: tensors `[N, *matrix]`. The results have this form, too, with the strides that a single call would give.
    """
    if stacks[0].device.type != "cpu" or all(map(fills_lines, stacks)) or len(stacks[0]) == 0:
        return function(*stacks)
    found = [function(*(stack[row : row + 1].clone() for stack in stacks)) for row in range(len(stacks[0]))]
    if len(found) == 1 or isinstance(found[0], Tensor):
        return _joined(found)
    return tuple(_joined(parts) for parts in zip(*found, strict=True))


def _joined(parts: Sequence[Any]) -> Any:
    """Return results of single matrices as one stack, with the strides that a result for the full stack would have."""
    if len(parts) == 1:
        return parts[0]
    if parts[0].ndim == 3 and not parts[0].is_contiguous():
        return torch.cat([part.mT for part in parts]).mT
    return torch.cat(tuple(parts))


def has_fast_bfloat16(device: torch.device) -> bool | None:
    """Return True if a device has instructions for products of bfloat16 matrices, and None if this is unknown."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    return _cpu_has_bfloat16() if device.type == "cpu" else None


_IS_ARM = platform.machine().lower() in ("aarch64", "arm64")
"""True on a processor of ARM, for which torch has a separate test for bfloat16 instructions."""


def _cpu_has_bfloat16() -> bool:
    if _IS_ARM:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return bool(torch.cpu._is_avx512_bf16_supported())


def multiplied_in_float32(x: Tensor) -> bool:
    """Return True if x is in bfloat16 and products of x are faster if computed in float32 and rounded.

    A CPU without instructions for bfloat16 takes 50 times as long for products in bfloat16. The results of both ways
    differ only in the order in which terms are added.
    """
    return x.dtype is torch.bfloat16 and x.is_cpu and not _cpu_has_bfloat16()


def products_are_rounded(device: torch.device) -> bool:
    """Return True if a device rounds the factors of float32 products to fewer bits, such as TF32."""
    return device.type == "cuda" and torch.backends.cuda.matmul.fp32_precision not in ("ieee", "none")


@contextmanager
def full_products(device: torch.device) -> Iterator[None]:
    """Compute products of float32 in full precision in the `with` statement, whatever the setting of torch is.

    The setting is that of `torch.set_float32_matmul_precision`. Roots and bases need full precision: with factors in
    TF32, which have 11 bits, their iterations do not converge. The setting is shared by all threads, so no other thread
    may compute products at the same time.
    """
    if not products_are_rounded(device):
        yield
        return
    matmul = torch.backends.cuda.matmul
    before, matmul.fp32_precision = matmul.fp32_precision, "ieee"
    try:
        yield
    finally:
        matmul.fp32_precision = before


def upload(values: Tensor, device: torch.device) -> Tensor:
    """Return a copy of a host tensor on a device, without waiting for the copy. For a CPU, return the tensor itself."""
    if device.type == "cuda" and values.is_cpu and has_values(values):
        return values.pin_memory().to(device, non_blocking=True)
    return values.to(device)


def kept_on_device(values: NDArray[np.int64], device: torch.device) -> Tensor:
    """Return int64 numbers as a tensor on a device.

    Calls with equal numbers return the same cached tensor, which must not be written to.
    """
    if device.type == "cpu":
        return torch.from_numpy(values)
    return _kept(values.tobytes(), device)


@cached_tensors(maxsize=4096)
def _kept(values: bytes, device: torch.device) -> Tensor:
    return upload(torch.from_numpy(np.frombuffer(values, dtype=np.int64).copy()), device)


def number_like(value: Tensor | float, like: Tensor) -> Tensor:
    """Return a number or a tensor as a tensor with the dtype and the device of `like`.

    A number of the host is written by a kernel, because a copy would make the host wait.
    """
    copied = isinstance(value, Tensor) and (value.ndim or not value.is_cpu or like.is_cpu or not has_values(value))
    if isinstance(value, Tensor) and copied:
        return value.to(device=like.device, dtype=like.dtype)
    return torch.full((), float(value), dtype=like.dtype, device=like.device)


class HostCopy:
    """A copy of a tensor to the host that may still be in progress.

    For a tensor of a CUDA device, the host waits only in `wait`.
    """

    def __init__(self, x: Tensor) -> None:
        self._copy, self._event = x.to("cpu", non_blocking=x.device.type == "cuda"), None
        if x.device.type == "cuda" and has_values(x):
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record(torch.cuda.current_stream(x.device))  # x need not be on the current device

    def wait(self) -> Tensor:
        """Return the copy after it is complete."""
        if self._event is not None:
            self._event.synchronize()
        return self._copy


def on_host(function: Callable[..., tuple[Tensor, ...]], x: Tensor) -> tuple[Tensor, ...]:
    """Call `function` with a copy of x on the host, and return copies of its results on the device of x.

    The host waits once, for the copy of x. A tensor on the CPU is not copied.
    """
    if x.is_cpu or not has_values(x):
        return function(x)
    return tuple(upload(found, x.device) for found in function(HostCopy(x).wait()))


JOINED = 1 << 12
"""Largest number of entries of a small tensor. A CPU is faster if it copies several small tensors into one, because it
then calls fewer kernels. For larger tensors the copies take longer than the calls that they save (measured)."""
JOINED_IN_KERNEL = 1 << 14
"""Number of entries below which blocks are copied into one tensor on a CPU, if one call of a fused or compiled kernel
then updates all of them. One more tensor or call of such a kernel costs about as much as a copy of 2^14 entries."""
DOT = 1 << 16
"""Number of entries from which a sum of squares is computed by a dot product of BLAS on a CPU, which uses all threads.
Norms by `torch._foreach_norm` use one thread, but few calls."""
CHUNK_ENTRIES = 1 << 18
"""Number of entries of a parameter that a CPU updates or copies at a time. 2^18 was fastest: smaller chunks need more
calls, and larger chunks do not fit into the cache."""
VECTOR = 64
"""A common multiple of the numbers of entries of all vector registers of CPUs. A kernel rounds all entries of a tensor
alike if their number is a multiple of VECTOR, and may round the last entries of any other tensor differently."""


def scale_tensors_(tensors: Sequence[Tensor], factor: float | Tensor) -> None:
    """Multiply all tensors by one number, in place, as `torch._foreach_mul_` does.

    On a CPU `_foreach_mul_` converts a Python number to a tensor once for each tensor in the list, which takes longer
    than the product of a small tensor. This function converts the number once, for dtypes in which the result is the
    same.
    """
    first = tensors[0]
    narrow = first.is_cpu and first.dtype in (torch.float32, torch.float64)
    if isinstance(factor, float) and narrow and len({x.dtype for x in tensors}) == 1:
        factor = torch.scalar_tensor(factor, dtype=first.dtype, device=first.device)
    torch._foreach_mul_(list(tensors), factor)


def subtract_scaled_(tensors: Sequence[Tensor], others: Sequence[Tensor], factor: float | Tensor) -> None:
    """Subtract multiples of other tensors in place:  x <- x - factor y  for x in `tensors` and y in `others`.

    others: tensors with the dtypes of `tensors`.
    """
    if isinstance(factor, Tensor):
        torch._foreach_sub_(list(tensors), torch._foreach_mul(list(others), factor))
    else:
        torch._foreach_add_(list(tensors), list(others), alpha=-factor)


def copies(tensors: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Return copies of tensors in one dtype, made in few kernels."""
    if all(x.dtype is dtype for x in tensors):
        return list(torch._foreach_mul(list(tensors), 1.0))  # faster: a single call makes all copies
    made = [torch.empty_like(x, dtype=dtype) for x in tensors]
    torch._foreach_copy_(made, list(tensors))
    return made


class StackRows(list[Tensor]):
    """The rows of a tensor `stack`, `[n, *shape]`, as a list. `equal_stacks` uses the `stack` of such a list without a
    copy.
    """

    def __init__(self, stack: Tensor) -> None:
        super().__init__(stack.unbind(0))
        self.stack = stack


def equal_stacks(*columns: Sequence[Tensor] | Tensor) -> Iterator[tuple[list[int], list[Tensor]]]:
    """Group the rows of a table of tensors so that rows with equal shapes and dtypes are together. Yield each group as
    stacks.

    A row of the table has one entry of each column. Each item is (indices of the rows of the group, a list with one
    stack for each column). On a CPU, each row of large tensors is a group of its own, and is not copied.

    columns: a column is a list of n tensors, or one tensor `[n]` with a number for each row. In a group of m rows,
        tensors become a stack `[m, *shape]`, and numbers become a tensor `[m, 1, ...]` that broadcasts against the
        stack of the first column.
    """
    lists = [column for column in columns if not isinstance(column, Tensor)]
    kinds: dict[object, list[int]] = {}
    for index, row in enumerate(zip(*lists, strict=True)):
        alone = row[0].is_cpu and row[0].numel() > JOINED
        kinds.setdefault((index if alone else -1, *((x.shape, x.dtype) for x in row)), []).append(index)
    for indices in kinds.values():
        stacks = [_stacked(column, indices) for column in lists]
        made = iter(stacks)
        yield (
            indices,
            [per_block(_chosen(x, indices), stacks[0]) if isinstance(x, Tensor) else next(made) for x in columns],
        )


def over_stacks(function: Callable[..., Tensor], *columns: Sequence[Tensor] | Tensor) -> list[Tensor]:
    """Return function(*row) for each of the n rows of a table of tensors, in few kernels.

    Rows with equal shapes are stacked, and the function is called once for each stack.

    function: function of tensors `[m, ...]` that computes each row independently.
    columns: as in `equal_stacks`.
    """
    found = [(indices, function(*stacks)) for indices, stacks in equal_stacks(*columns)]
    if len(found) == 1:
        return StackRows(found[0][1])
    rows = {index: row for indices, stack in found for index, row in zip(indices, stack.unbind(0), strict=True)}
    return [rows[index] for index in range(len(rows))]


def stacked_copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return copies of tensors. If all shapes and dtypes are equal, the copies are the rows of one stack."""
    alike = len({(x.shape, x.dtype) for x in tensors}) == 1
    return StackRows(torch.stack(list(tensors))) if alike else copies(tensors, tensors[0].dtype)


def _chosen(numbers: Tensor, indices: list[int]) -> Tensor:
    """Return the entries of a tensor `[n]` at the given indices, which must be in ascending order."""
    if len(indices) == len(numbers):
        return numbers
    if len(indices) == 1:
        return numbers[indices[0] : indices[0] + 1]
    return numbers.index_select(0, kept_on_device(np.array(indices, dtype=np.int64), numbers.device))


def in_dtypes_of(tensors: Sequence[Tensor], others: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return each tensor in the dtype of the tensor in `others` with the same index. Only tensors that change are
    copied.
    """
    kept = [x.dtype is other.dtype for x, other in zip(tensors, others, strict=True)]
    if all(kept):
        return tensors
    pairs = zip(tensors, others, kept, strict=True)
    found = [x if same else torch.empty_like(x, dtype=other.dtype) for x, other, same in pairs]
    targets, sources = ([x for x, same in zip(column, kept, strict=True) if not same] for column in (found, tensors))
    torch._foreach_copy_(targets, sources)
    return found


def norms_by_dtype(
    tensors: Sequence[Tensor], dtypes: Sequence[torch.dtype] | None = None, order: float = 2
) -> Iterator[tuple[list[int], Tensor]]:
    """Yield the norms of tensors in groups, as (indices of the tensors of the group, their norms `[n]`).

    A group has all tensors whose norms are computed in one dtype. It takes few kernels, however many tensors it has.

    dtypes: dtype in which each norm is computed. None: float64 for float64 tensors, float32 for all others.
    order: 2 for Frobenius norms, inf for the largest absolute value of an entry.
    """
    if dtypes is None:
        stored = [x.dtype for x in tensors]
        wide = {dtype: compute_dtype(dtype) for dtype in set(stored)}
        dtypes = [wide[dtype] for dtype in stored]
    for dtype in dict.fromkeys(dtypes):
        places = [place for place, own in enumerate(dtypes) if own is dtype]
        yield places, torch.stack(torch._foreach_norm([tensors[place] for place in places], order, dtype=dtype))


def squares_of(tensors: Sequence[Tensor]) -> Tensor:
    """Return the sum of squares of each tensor, `[n]` in float64, in which no square of float32 overflows."""
    return torch.stack(torch._foreach_norm(list(tensors), 2, dtype=torch.float64)).square()


def squares_are_finite(tensors: Sequence[Tensor]) -> bool:
    """Return True if the host knows, without waiting for a device, that the sum of squares of each tensor is finite.

    The sum must be finite in float64 for float64 tensors, in float32 for all others. The result is False, too, if all
    sums are finite, but large: one exceeds a quarter of the largest number of the dtype, or the sum of the norms of
    several tensors exceeds half of its square root. Fake tensors on a CPU count as finite.
    """
    if tensors and tensors[0].is_cpu and not has_values(tensors[0]):
        return True
    if is_compiling() or not all(map(attrgetter("is_cpu"), tensors)):
        return False
    rest = []
    for x in tensors:
        if x.numel() < DOT or x.dtype not in (torch.float32, torch.float64) or not x.is_contiguous():
            rest.append(x)
            continue
        entries = x.detach().view(-1)
        if not float(torch.dot(entries, entries)) < torch.finfo(x.dtype).max / 4:  # 1/4, to allow for rounding
            return False
    for _, norms in norms_by_dtype(rest):
        bound = torch.finfo(norms.dtype).max ** 0.5 / 2  # half of the exact bound, to allow for rounding
        if not sum(norms.tolist()) < bound:  # the sum is nan or inf if a norm is
            return False
    return True


def differs_from_rounded(values: Sequence[Tensor], rounded: Sequence[Tensor]) -> list[int]:
    """Return the indices at which a tensor of `values` does not round to the tensor of `rounded`.

    On a device all indices are returned, because the host would have to wait. Small tensors of one shape are compared
    together: if one of them differs, the indices of all are returned.

    values: tensors in a wide dtype.
    rounded: tensors with the same shapes in a 16-bit dtype.
    """
    if not all(map(may_branch_on_values, rounded)):
        return list(range(len(rounded)))
    equal: dict[tuple[torch.dtype, torch.Size], list[int]] = {}
    for index, x in enumerate(rounded):
        equal.setdefault((x.dtype, x.shape), []).append(index)
    found = []
    for (dtype, shape), own in equal.items():
        for some in [own] if shape.numel() <= JOINED and len(own) > 1 else [[index] for index in own]:
            wide, held = ((_stacked(tensors, some)) for tensors in (values, rounded))
            if not _same_bits(wide.to(dtype), held):
                found += some
    return found


def stack_of(tensors: Sequence[Tensor]) -> Tensor:
    """Return tensors of one shape as one stack. The result is a view if they are a `StackRows` or a single tensor."""
    return _stacked(tensors, range(len(tensors)))


def _stacked(tensors: Sequence[Tensor], places: Sequence[int]) -> Tensor:
    """Return the tensors at the indices `places` as one stack `[n, *shape]`, if possible without a copy."""
    if isinstance(tensors, StackRows) and len(places) == len(tensors):
        return tensors.stack
    return tensors[places[0]].unsqueeze(0) if len(places) == 1 else torch.stack([tensors[place] for place in places])


def _same_bits(x: Tensor, y: Tensor) -> bool:
    """Return True if two tensors of 16-bit numbers are equal. Large ones are compared as 64-bit numbers, which is
    faster.
    """
    if x.numel() > JOINED and x.is_contiguous() and y.is_contiguous() and x.numel() % 4 == y.storage_offset() % 4 == 0:
        x, y = x.view(-1).view(torch.int64), y.view(-1).view(torch.int64)
    return torch.equal(x, y)


_SAFE = 2.9
"""Bound on the squared spectral norm up to which `rectified` does not scale a matrix down. The iteration converges for
bounds below 3; the margin allows for rounding errors."""


def rectified(v: Tensor, steps: int, safe: bool = False) -> Tensor:
    """Return V after `steps` steps of V <- 3/2 V - 1/2 V V^T V, which converge to the orthonormal V (V^T V)^(-1/2)
    (Bjorck & Bowie 1971, order 2).

    Singular values in (0, sqrt 3) converge to 1; after one step no singular value is above 1. V is scaled down first,
    unless the bound |V|_2^2 <= 1 + |E^4|_F^(1/4) with E = V^T V - I shows that singular values are below sqrt 3.

    v: V `[N, d, r]`, r <= d.
    safe: True if the caller knows that singular values are below sqrt 3, so that the bound is not needed.
    """
    if steps == 0:
        return v
    v, gram = (v, torch.bmm(v.mT, v)) if safe else _made_safe(v)[:2]
    for step in range(steps):
        if step:
            gram = torch.bmm(v.mT, v)
        v = torch.baddbmm(v, v, gram, beta=1.5, alpha=-0.5)
    return v


def safe_factor(v: Tensor) -> Tensor:
    """Return a number c <= 1 for each matrix V, `[N]`, so that the singular values of c V are below sqrt 3.

    c is 1 if the bound of `rectified` shows that V needs no scaling.

    v: the matrices V `[N, d, r]`.
    """
    return _made_safe(v)[2]


def _made_safe(v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return (c V, c^2 V^T V, c) for matrices V `[N, d, r]`. With c `[N]` <= 1 the singular values of c V are below
    sqrt 3.

    c is computed from an upper bound of |V|_2^2, and is 1 if the bound is small. With E = V^T V - I, there are three
    bounds: 1 + |E|_F, 1 + |E^2|_F^(1/2) and 1 + |E^4|_F^(1/4). Each is sharper than the one before and takes one more
    product. A CPU stops at the first bound that is small enough. The third is needed: for a V whose columns were
    rounded to 3 bits and r = 1024, the second bound is 3, where |V|_2^2 itself is 1.7.
    """
    peak = v.abs().amax((-2, -1)).clamp_min(1.0)  # no entry of an orthonormal matrix is larger
    v = v / per_block(peak, v)
    gram = torch.bmm(v.mT, v)
    off = gram.clone()
    off.diagonal(dim1=-2, dim2=-1).sub_(1.0)
    size = torch.linalg.matrix_norm(off)
    bound, branches = 1 + size, may_branch_on_values(v)
    if branches and bool((bound < _SAFE).all()):
        return v, gram, 1 / peak
    power = off / per_block(size.clamp_min(tiny(v.dtype)), off)  # E / |E|_F, because powers of E could overflow
    for order in (2, 4):
        power = torch.bmm(power, power)
        bound = 1 + size * torch.linalg.matrix_norm(power) ** (1 / order)
        if branches and bool((bound < _SAFE).all()):
            return v, gram, 1 / peak
    # the bound is scaled down to 2, not to 1, because it is not sharp, and singular values near 1 should stay near 1
    scale = torch.where(bound < _SAFE, torch.ones_like(bound), 2 / bound)
    return v * per_block(scale.sqrt(), v), gram * per_block(scale, gram), scale.sqrt() / peak
