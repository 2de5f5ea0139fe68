"""The floor of a step: the least arithmetic and traffic of its recipe, at this machine's best rates.

Legend: n entries of a block; d length of an axis with a factor; a matrix m x n of a polar factor has m <= n.
Products of a matrix with its transpose count half, because the result is symmetric.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import NamedTuple, Self

import torch

from eigengraft.optimizers import Optimizer
from eigengraft.preconditioners import Stage, chain_slots
from eigengraft.preconditioners.base import walk_blocks
from eigengraft.preconditioners.kronecker.base import Factored
from eigengraft.preconditioners.kronecker.eigenbasis import Eigenbasis
from eigengraft.preconditioners.polar.spectral import Spectral
from eigengraft.preconditioners.roots.decompositions import EighBasis
from eigengraft.preconditioners.roots.power_qr import PowerQR
from eigengraft.slots import Slot

EIGH, QR = 9.0, 2 + 8 / 3
"""Operations in units of d^3: of an eigendecomposition with vectors, and of one step of orthogonal iteration, which
computes A Q and the factor Q of its QR decomposition.
"""
RATE_REPEATS = 8
"""Number of measurements of a rate. The fastest measurement counts."""
_READ_ONLY = ("root", "basis")
"""Roles of slots that steps between refreshes read and do not write."""


class StepWork(NamedTuple):
    """The least work of a step.

    flops: operations of products in every step.
    refresh: operations of refreshes, divided by the steps of their interval.
    traffic: bytes of gradients, parameters and state that are read and written.
    """

    flops: float = 0.0
    refresh: float = 0.0
    traffic: float = 0.0


class MachineRates(NamedTuple):
    """The best rates of this machine.

    flops: operations per second of a product of two matrices, of order 512 on a CPU and 4096 on a device.
    traffic: bytes per second that are read and written when a tensor larger than every cache is copied.
    """

    flops: float
    traffic: float

    @classmethod
    def measured(
        cls, device: torch.device, dtype: torch.dtype = torch.float32, clock: Callable[[], float] = time.perf_counter
    ) -> Self:
        """Measure the rates with the present number of threads. `clock` returns seconds."""
        order = 4096 if device.type == "cuda" else 512
        a, b = (torch.randn(order, order, device=device).to(dtype) for _ in range(2))
        source = torch.zeros(1 << 25, device=device)
        target = torch.zeros_like(source)
        product = _seconds(lambda: torch.mm(a, b), device, clock)
        copied = _seconds(lambda: target.copy_(source), device, clock)
        return cls(2 * order**3 / product, 2 * source.nbytes / copied)

    def milliseconds(self, work: StepWork) -> float:
        """Return the least time of a step: the longer one of the times for operations and for traffic."""
        return 1e3 * max((work.flops + work.refresh) / self.flops, work.traffic / self.traffic)


def _seconds(run: Callable[[], object], device: torch.device, clock: Callable[[], float]) -> float:
    """Return the seconds of one run, the minimum of RATE_REPEATS measurements.

    On a device several runs are launched before the host waits, so that launches and the wait take no extra time.
    """
    runs = 16 if device.type == "cuda" else 1
    least = math.inf
    for _ in range(RATE_REPEATS):
        start = clock()
        for _ in range(runs):
            run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        least = min(least, (clock() - start) / runs)
    return least


def step_work(optimizer: Optimizer) -> StepWork:
    """Return the work of one step of all parameters of an optimizer on this process."""
    flops = refresh = traffic = 0.0
    for param_set in optimizer.param_sets:
        traffic += 3.0 * sum(parameter.nbytes for parameter in param_set.parameters)
        for state in param_set.stack_states:
            blocks = len(state.stack.param_ids)
            for key, slot in state.slots():
                passes = 1.0 if slot.role in _READ_ONLY else 2.0
                traffic += passes * sum(tensor.nbytes for tensor in state.stored(key))
            for _, stage, block in walk_blocks(state.rule.update, state.stack.block):
                work = stage_work(stage, block)
                flops, refresh = flops + blocks * work.flops, refresh + blocks * work.refresh
    return StepWork(flops, refresh, traffic)


def stage_work(stage: Stage, block: tuple[int, ...]) -> StepWork:
    """Return the operations of one stage for one block, without inner stages and without traffic."""
    if isinstance(stage, Spectral):
        return StepWork(flops=_polar(stage, block))
    if not isinstance(stage, Factored):
        return StepWork()
    n, axes = math.prod(block), [a for a in stage.factor_axes(block) if stage.statistic.axes.full(block, a)]
    statistics = sum(float(block[axis]) * n for axis in axes) / stage.statistic.interval
    # The contribution to each axis is computed from the gradient whitened along all other axes.
    if stage.statistic.needs_power is not None:
        statistics += sum(2.0 * block[other] * n for axis in axes for other in axes if other != axis)
    there_and_back = 2 if isinstance(stage, Eigenbasis) else 1
    products = sum(2.0 * there_and_back * block[axis] * n for axis in axes)
    return StepWork(statistics + products, sum(_refresh(stage, block, axis) for axis in axes) / stage.every.interval)


def _refresh(stage: Factored, block: tuple[int, ...], axis: int) -> float:
    """Return the operations of one refresh of one axis.

    These are the decomposition, and the change of basis of the slots of the inner chain.
    """
    d = float(block[axis])
    if not isinstance(stage, Eigenbasis):
        return (EIGH + 1) * d**3
    solver = (EIGH if isinstance(stage.solver, EighBasis) else QR) * d**3
    slots = _turned_slots(stage, block)
    turned = sum(2.0 * d * math.prod(slot.shape) for slot in slots)
    fitted = stage.transport == "marginals" and stage.statistic_frame == "fixed"
    # The wanted sums are the eigenvalues diag(Q^T A Q), which a power step computes anyway.
    sums = 2 * d**3 if fitted and not isinstance(stage.solver, PowerQR) else 0.0
    return solver + sums + (2 * d**3 + turned if slots else 0.0)


def _turned_slots(stage: Eigenbasis, block: tuple[int, ...]) -> list[Slot]:
    """Return the slots of the inner chain that a refresh multiplies by matrices to transform them to the new basis."""
    frames = {"none": (), "permute": ("vector",)}.get(stage.transport, ("vector", "square"))
    slots = (slot for inner in stage.inner(block).values() for *_, slot in chain_slots(inner.chain, inner.block))
    return [slot for slot in slots if slot.frame in frames and slot.shape]


def _polar(stage: Spectral, block: tuple[int, ...]) -> float:
    """Return the operations of Newton-Schulz: in each step X X^T, its square, and their sum times X."""
    m, n = sorted((block[0], math.prod(block[1:])))
    return float(getattr(stage.solver, "steps", 1)) * (m * m * n + m**3 + 2.0 * m * m * n)
