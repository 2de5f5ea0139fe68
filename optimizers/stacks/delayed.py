"""Delayed refreshes: a worker thread computes their results beside training.

A refresh that is due at step t reads a copy of the state at that step. It takes effect at step t + k, with the delay k
of the cadence (`Every.delay`). Between these two steps, a job for the refresh is in the queue of one thread of the
process. LAPACK and products of matrices release the interpreter's lock, so that training continues on other cores. On a
CUDA device the thread launches its kernels on a side stream.

Training does not depend on the time at which a job ends, because its inputs are copies and `finish` waits for its end.
`finish` stores the results in pending slots of the state. The optimizer calls `finish` at t + k, and before state is
saved, copied, loaded or moved. On devices without a side stream, and for fake tensors, the results are computed when
the refresh is due.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from eigengraft.errors import ContractError
from eigengraft.numerics import active_fake_mode, full_products, never_compiled, products_are_rounded
from eigengraft.preconditioners.base import store_results
from eigengraft.slots import DelayedRefreshes, State

from .streams import Streams

Results = Mapping[str, Tensor]
"""Results of a refresh, by name of the pending slot that stores each result until it takes effect."""


SIDE_STREAMS: dict[str, Callable[[torch.device], Streams]] = {"cuda": Streams}
"""For each type of device that has side streams: function that returns the streams of a device. Other types, such as a
CPU, have none."""


@cache
def _worker() -> ThreadPoolExecutor:
    """Return the thread of this process that computes delayed refreshes, one after another."""
    return ThreadPoolExecutor(1, thread_name_prefix="eigengraft-refresh")


os.register_at_fork(after_in_child=_worker.cache_clear)  # a forked process has none of its parent's threads


@dataclass(frozen=True, eq=False)
class _Job:
    """A refresh that has begun, and whose results are not stored yet.

    state: state of the refreshed blocks. Its slots of role "pending" store the results until they take effect.
    seeds: `[n]`, seeds of the blocks.
    what: text for errors, "<stage path>: solve() at step <t>".
    solve: function that returns the results. The job references it until the results are stored, so that a device does
        not reuse the memory of the copies that the function reads.
    side: side stream of the device, on which the results are computed. On a CPU this object does nothing.
    future: the results, and a mark (such as a CUDA event) on the side stream after their computation.
    process: id of the process whose thread runs the job.
    """

    state: State
    seeds: NDArray[np.int64]
    what: str
    solve: Callable[[], Results]
    side: Streams
    future: Future[tuple[Results, Any]]
    process: int

    def finish(self) -> None:
        """Wait for the results, and store them in the state, in slots of role "pending".

        Raises ContractError or RuntimeError with the path of the stage if the computation raised an error.
        """
        try:
            found, ended = self.future.result() if self.process == os.getpid() else (self.solve(), None)
        except ContractError as error:
            raise ContractError(f"{self.what}: {error}") from None
        except Exception as error:
            raise RuntimeError(f"{self.what}, a delayed refresh, raised {type(error).__name__}: {error}") from error
        if ended is not None:
            self.side.wait(ended)
            self.side.keep(found.values())
        store_results(self.state, found)


class StackRefreshes(DelayedRefreshes):
    """The delayed refreshes of one stack: computations of new roots or bases, in a worker thread beside training.

    The object keeps each refresh that has begun until the results of the refresh are stored in the state.

    device: device of the stack.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self._jobs = device, list[_Job]()
        self._side: Streams | None = None

    @property
    def place(self) -> str:
        """Text for messages that says where a delayed refresh is computed on this device."""
        kind = self.device.type
        if kind == "cpu":
            return "a worker thread computes it"
        if kind in SIDE_STREAMS:
            return f"a worker thread computes it on a side stream of {kind}"
        return f"it is computed at once, as {kind} has no side stream"

    def begin(self, state: State, seeds: NDArray[np.int64], what: str, solve: Callable[[], Results]) -> None:
        kind = self.device.type
        if active_fake_mode() is not None or (kind != "cpu" and kind not in SIDE_STREAMS):
            with full_products(self.device):
                store_results(state, solve())
            return
        if self._side is None:
            self._side = SIDE_STREAMS.get(kind, Streams)(self.device)
        # `full_products` changes a setting of torch that applies to all threads. In the worker thread it would also
        # change the products of training, so the refresh is computed here, where training waits for it.
        if products_are_rounded(self.device):
            with full_products(self.device):
                future: Future[tuple[Results, Any]] = Future()
                future.set_result(_computed(solve, self._side, self._side.mark()))
        else:
            future = _worker().submit(_computed, solve, self._side, self._side.mark())
        self._jobs.append(_Job(state, seeds, what, solve, self._side, future, os.getpid()))

    def finish(self, path: str, seeds: NDArray[np.int64]) -> None:
        self._finish([job for job in self._jobs if job.state.path == path and np.isin(job.seeds, seeds).any()])

    def finish_all(self) -> None:
        """Wait for all refreshes that have begun, and store their results in the state."""
        self._finish(list(self._jobs))

    def _finish(self, jobs: list[_Job]) -> None:
        for job in jobs:
            try:
                job.finish()
            except Exception:
                self._jobs.remove(job)
                raise
            self._jobs.remove(job)


def _computed(solve: Callable[[], Results], side: Streams, begun: Any) -> tuple[Results, Any]:
    """Compute the results of a refresh on the side stream; runs in the worker thread.

    Return the results, and a mark (`Streams.mark`) on the side stream after their computation.

    begun: mark on the stream on which steps run. The computation begins only when all work before this mark is done.
    """
    with torch.no_grad(), never_compiled(), side.aside():
        side.wait(begun)
        return solve(), side.mark()
