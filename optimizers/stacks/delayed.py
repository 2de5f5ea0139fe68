"""Delayed refreshes: a worker thread computes their results beside training.

A refresh that is due at step t reads a copy of the state of t, and takes effect at t + k (`Every.delay`). Between both,
its job is in the queue of one thread of the process. LAPACK and products of matrices release the interpreter's lock, so
that training continues on other cores. On a CUDA device the thread also launches its kernels on a side stream.

No result depends on the time at which a job ends: its inputs are copies, and `finish` waits for it and stores its
results in pending slots, which are state like any other. Jobs are finished at t + k, and before state is saved, copied,
loaded or moved. Devices without a side stream, and fake tensors, compute results when they are asked for.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from eigengraft.errors import ContractError
from eigengraft.numerics import active_fake_mode, never_compiled
from eigengraft.preconditioners.base import store_results
from eigengraft.slots import DelayedRefreshes, State

Results = Mapping[str, Tensor]
"""Results of a refresh, by name of the pending slot."""


class SideStream(Protocol):
    """A queue of a device beside the one that steps use."""

    def mark(self) -> Any:
        """Return a mark of the work that the calling thread has launched so far on its present stream."""

    def entered(self, begun: Any) -> AbstractContextManager[None]:
        """Return a context in which a thread launches work on the side stream, after the work before the mark."""

    def join(self, ended: Any, tensors: Iterable[Tensor]) -> None:
        """Let the present stream wait for a mark of the side stream, and then use tensors that were made there."""


class CudaSideStream:
    """A side stream of a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.stream = device, torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def mark(self) -> Any:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        return event

    @contextmanager
    def entered(self, begun: Any) -> Any:
        with torch.cuda.device(self.device), torch.cuda.stream(self.stream):
            self.stream.wait_event(begun)
            yield

    def join(self, ended: Any, tensors: Iterable[Tensor]) -> None:
        present = torch.cuda.current_stream(self.device)
        present.wait_event(ended)
        for x in tensors:
            x.record_stream(present)


SIDE_STREAMS: dict[str, Callable[[torch.device], SideStream]] = {"cuda": CudaSideStream}
"""By device type, the constructor of a side stream; its argument is the device."""


@cache
def _worker() -> ThreadPoolExecutor:
    """Return the thread of this process that computes delayed refreshes, one after another."""
    return ThreadPoolExecutor(1, thread_name_prefix="eigengraft-refresh")


os.register_at_fork(after_in_child=_worker.cache_clear)  # a forked process has none of its parent's threads


@dataclass(frozen=True, eq=False)
class _Job:
    """A refresh under way.

    state: state of the rows, in whose pending slots the results are stored.
    seeds: `[n]`, seeds of the blocks.
    what: text for errors, "<stage path>: solve() at step <t>".
    solve: function that returns the results. The job holds it, and with it the copies that it reads, until the results
        are stored, so that a device does not reuse their memory before.
    side: side stream on which the results are computed. None: there is none.
    future: pair of the results and the mark of their end on the side stream.
    process: number of the process whose thread runs the job.
    """

    state: State
    seeds: NDArray[np.int64]
    what: str
    solve: Callable[[], Results]
    side: SideStream | None
    future: Future[tuple[Results, Any]]
    process: int

    def finish(self) -> None:
        """Wait for the results, and store them in the pending slots.

        Raises ContractError or RuntimeError with the path of the stage if the computation raised an error.
        """
        try:
            found, ended = self.future.result() if self.process == os.getpid() else (self.solve(), None)
        except ContractError as error:
            raise ContractError(f"{self.what}: {error}") from None
        except Exception as error:
            raise RuntimeError(f"{self.what}, a delayed refresh, raised {type(error).__name__}: {error}") from error
        if self.side is not None and ended is not None:
            self.side.join(ended, found.values())
        store_results(self.state, found)


class StackRefreshes(DelayedRefreshes):
    """The delayed refreshes of one stack that are under way.

    device: device of the stack.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self._jobs = device, list[_Job]()
        self._side: SideStream | None = None

    @property
    def place(self) -> str:
        """Text that says where results are computed."""
        kind = self.device.type
        if kind == "cpu":
            return "a worker thread computes it"
        if kind in SIDE_STREAMS:
            return f"a worker thread computes it on a side stream of {kind}"
        return f"it is computed at once, as {kind} has no side stream"

    def begin(self, state: State, seeds: NDArray[np.int64], what: str, solve: Callable[[], Results]) -> None:
        on_device = self.device.type != "cpu"
        if active_fake_mode() is not None or (on_device and self.device.type not in SIDE_STREAMS):
            store_results(state, solve())
            return
        if on_device and self._side is None:
            self._side = SIDE_STREAMS[self.device.type](self.device)
        side = self._side
        future = _worker().submit(_computed, solve, side, None if side is None else side.mark())
        self._jobs.append(_Job(state, seeds, what, solve, side, future, os.getpid()))

    def finish(self, path: str, seeds: NDArray[np.int64]) -> None:
        self._finish([job for job in self._jobs if job.state.path == path and np.isin(job.seeds, seeds).any()])

    def finish_all(self) -> None:
        """Store the results of all refreshes that are under way."""
        self._finish(list(self._jobs))

    def _finish(self, jobs: list[_Job]) -> None:
        for job in jobs:
            try:
                job.finish()
            except Exception:
                self._jobs.remove(job)
                raise
            self._jobs.remove(job)


def _computed(solve: Callable[[], Results], side: SideStream | None, begun: Any) -> tuple[Results, Any]:
    """Compute results in the worker thread. Return them with a mark of their end on the side stream."""
    with torch.no_grad(), never_compiled(), nullcontext() if side is None else side.entered(begun):
        found = solve()
        return found, None if side is None else side.mark()
