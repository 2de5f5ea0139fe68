"""Measurements of the steps of several optimizers: time, number of operators and kernels, and bytes of memory.

The optimizers take turns, so that other load of the machine affects all of them.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import mean, median, quantiles
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..track.cost import Card

FREE = frozenset(
    {"detach", "lift_fresh", "is_pinned", "empty", "_local_scalar_dense", "_unsafe_view", "_reshape_alias"}
)
"""Operators that compute nothing, although their schema does not declare that they return a view."""


class Contender(NamedTuple):
    """An optimizer with its own copy of the parameters.

    build: seconds that the construction took.
    """

    optimizer: torch.optim.Optimizer
    parameters: Sequence[Parameter]
    build: float


CLOCKS: Mapping[str, Callable[[], float]] = {
    "wall": time.perf_counter,
    "cpu": time.process_time,
    "thread": time.thread_time,
}
"""Clocks in seconds, by name: the time of day, and the processor time of the process or of the calling thread."""


class StepTime(NamedTuple):
    """Milliseconds of one step.

    total: time from the call of `step` until the device has finished.
    host: time until `step` returns. On a device, a value near `total` means that the host is the slower
        part, or waits for the device.
    device: time between two CUDA events around the step; None on a CPU.
    """

    total: float
    host: float
    device: float | None


def take_turns(
    contenders: Sequence[Contender],
    gradients: Sequence[Sequence[Tensor]],
    *,
    warm: int,
    steps: int,
    clock: Callable[[], float] = time.perf_counter,
) -> list[list[StepTime]]:
    """Let each contender make one step in every round. Return the times of the measured steps of each contender.

    gradients: several sets of gradients of all parameters, which the rounds use in turn.
    warm: number of first rounds, which are not measured.
    steps: number of rounds that are measured.
    clock: function that returns the time in seconds.
    """
    times: list[list[StepTime]] = [[] for _ in contenders]
    torch.empty(_ACTIVATIONS, dtype=torch.uint8)  # one large tensor is allocated and freed, as in each step of training
    gc.collect()
    gc.disable()
    try:
        for turn in range(warm + steps):
            for own, contender in zip(times, contenders, strict=True):
                spent = one_step(contender, gradients[turn % len(gradients)], clock)
                if turn >= warm:
                    own.append(spent)
    finally:
        gc.enable()
    return times


_ACTIVATIONS = (32 << 20) - 8192
"""Size in bytes of the tensor that `take_turns` frees, so that glibc keeps freed memory.

Otherwise glibc may return pages after a step and request them again in the next one, which makes steps of a contender
up to a seventh longer. The size is just below the largest one from which glibc learns how much memory to keep
(M_MMAP_THRESHOLD in mallopt(3)).
"""


def one_step(contender: Contender, gradients: Sequence[Tensor], clock: Callable[[], float]) -> StepTime:
    """Make one step, and return its times. Gradients are copied first, because some optimizers write to them."""
    give(contender, gradients)
    synchronize(gradients)
    cuda: Any = torch.cuda
    events = [cuda.Event(enable_timing=True) for _ in range(2)] if _on_cuda(gradients) else []
    start = clock()
    stream = cuda.current_stream(gradients[0].device) if events else None
    if events:
        events[0].record(stream)
    contender.optimizer.step()
    if events:
        events[1].record(stream)
    host = clock() - start
    synchronize(gradients)
    total = clock() - start
    return StepTime(1e3 * total, 1e3 * host, events[0].elapsed_time(events[1]) if events else None)


def give(contender: Contender, gradients: Sequence[Tensor]) -> None:
    """Copy gradients into the gradients of a contender's parameters in place, so that their addresses do not change."""
    for parameter, gradient in zip(contender.parameters, gradients, strict=True):
        if parameter.grad is None:
            parameter.grad = gradient.to(parameter.dtype, copy=True)
        else:
            parameter.grad.copy_(gradient)


def synchronize(tensors: Sequence[Tensor]) -> None:
    """Wait until the CUDA device of the tensors has finished its work. Do nothing for tensors on a CPU."""
    if _on_cuda(tensors):
        torch.cuda.synchronize(tensors[0].device)


def _on_cuda(tensors: Sequence[Tensor]) -> bool:
    return bool(tensors) and tensors[0].is_cuda


def step_times(times: Sequence[float], interval: int) -> dict[str, float]:
    """Return statistics of the times of steps, by column of `StepBench`: steady, refresh, amortized, median, largest.

    They are computed from the times of one typical interval, whose step k takes the median time of step k over all
    measured intervals.

    times: milliseconds of all measured steps, in order.
    interval: number of steps from one refresh to the next.
    """
    places = [median(times[place::interval]) for place in range(min(interval, len(times)))]
    steady = quantiles(places, n=4)[0] if len(places) > 3 else min(places)
    refresh = sum(max(0.0, own - steady) for own in places)
    own = {"amortized": mean(places), "median": median(places), "largest": max(places)}
    return {"steady": steady, "refresh": refresh, **own}


def held_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of all tensors in an optimizer's state, without parameters. A shared storage counts once."""
    known = {p.untyped_storage().data_ptr() for group in optimizer.param_groups for p in group["params"]}
    found: dict[int, int] = {}
    for tensor in _tensors(dict(optimizer.state)):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())


def _tensors(value: Any) -> Iterator[Tensor]:
    for leaf in tree_leaves(value):
        if isinstance(leaf, Tensor):
            names = leaf.__tensor_flatten__()[0] if hasattr(leaf, "__tensor_flatten__") else ()
            yield from [getattr(leaf, name) for name in names] or [leaf]


class Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode that counts operators. Views, and operators that compute nothing (FREE), do not count.

    A foreach operator counts once.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view and func._schema.name.removeprefix("aten::") not in FREE:
            self.count += 1
        return func(*args, **(kwargs or {}))


def operators(contender: Contender, gradients: Sequence[Tensor]) -> int | None:
    """Return the number of operators of one step, or None if the optimizer cannot run in the counting mode."""
    give(contender, gradients)
    counted = Operators()
    try:
        with counted:
            contender.optimizer.step()
    except (RuntimeError, NotImplementedError, TypeError):
        return None
    return counted.count


class KernelTotals(NamedTuple):
    """Number of kernels that a CUDA device ran, and the sum of their milliseconds, without the gaps between kernels."""

    kernels: int
    milliseconds: float


def kernels(contender: Contender, gradients: Sequence[Tensor]) -> KernelTotals | None:
    """Make one step, and return the number and time of its kernels, measured by torch's profiler.

    Copies and fills of memory do not count as kernels. Return None on a CPU.
    """
    give(contender, gradients)
    if not _on_cuda(gradients):
        return None
    synchronize(gradients)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        contender.optimizer.step()
        synchronize(gradients)
    found = [
        event
        for event in profile.events() or ()
        if event.device_type == torch.profiler.DeviceType.CUDA
        and not event.is_user_annotation
        and not event.name.startswith(("Memcpy", "Memset"))
    ]
    return KernelTotals(len(found), 1e-3 * sum(event.time_range.elapsed_us() for event in found))


def peak_bytes(contender: Contender, gradients: Sequence[Tensor]) -> int | None:
    """Return the peak of the bytes that one step has allocated. Return None if the profiler recorded no allocation."""
    give(contender, gradients)
    if _on_cuda(gradients):
        device = gradients[0].device
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before: int = torch.cuda.memory_allocated(device)
        contender.optimizer.step()
        most: int = torch.cuda.max_memory_allocated(device)
        return most - before
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        contender.optimizer.step()
    found: Any = getattr(profile.profiler, "kineto_results", None)
    events = sorted((own for own in found.events() if own.name() == "[memory]"), key=lambda own: own.start_ns())
    now, highest = 0, 0
    for event in events:
        now += int(event.nbytes())
        highest = max(highest, now)
    return highest if events else None


RATE_REPEATS = 8
"""Number of measurements of a rate. The fastest measurement counts."""


def measured_card(device: torch.device, dtype: torch.dtype, clock: Callable[[], float] = time.perf_counter) -> Card:
    """Measure the best rates of this machine with the present number of threads.

    Operations per second are those of a product of two matrices of order 512 on a CPU and 4096 on a device, in `dtype`.
    Bytes per second are those of a copy of a tensor larger than every cache.

    clock: function that returns seconds.
    """
    order = 4096 if device.type == "cuda" else 512
    a, b = (torch.randn(order, order, device=device).to(dtype) for _ in range(2))
    source = torch.zeros(1 << 25, device=device)
    target = torch.zeros_like(source)
    product = 2 * order**3 / _seconds(lambda: torch.mm(a, b), a, clock)
    return Card("this machine", product, product, 2 * source.nbytes / _seconds(lambda: target.copy_(source), a, clock))


def _seconds(run: Callable[[], object], on: Tensor, clock: Callable[[], float]) -> float:
    """Return the seconds of one run of a function, the minimum of RATE_REPEATS measurements.

    On a device several runs are launched before the host waits, so that launches and the wait take no extra time.

    run: function to measure.
    on: tensor on the device on which the function runs.
    clock: function that returns the time in seconds.
    """
    runs, times = 16 if on.is_cuda else 1, []
    for _ in range(RATE_REPEATS):
        start = clock()
        for _ in range(runs):
            run()
        synchronize([on])
        times.append((clock() - start) / runs)
    return min(times)
