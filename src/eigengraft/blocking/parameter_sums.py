"""Sums over parameters: what `context.parameter_sum` of a stage gives, also where a parameter has blocks in stacks.

The chain of a stack is a plain function. Where all blocks of its parameters lie in the stack, a sum is an `index_add`
there and then. Stacks that share parameters run side by side instead, each in a greenlet of this thread: a sum switches
to the caller, which adds the numbers of all stacks as soon as each has arrived at its sum, and switches back. Threads
would do the same with locks; generators would make one of every function between the sum and the step.

Between two sums no other stack runs, so that a context manager must not be open across one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import copy_context
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..errors import ContractError
from ..numerics import cached_tensors, kept_on_device

if TYPE_CHECKING:
    from greenlet import greenlet

_T = TypeVar("_T")
ParameterSum = Callable[[Tensor], Tensor]
"""Numbers `[N]` of a stack's blocks -> for each block the sum over all blocks of its parameter, `[N]`."""


def run_stacks(runs: Sequence[Callable[[ParameterSum], _T]], param_ids: Sequence[NDArray[np.int64]]) -> list[_T]:
    """Run a computation on each of the stacks that share parameters, and return the results.

    runs: the computation of each stack, which takes its sums from the function that it is given.
    param_ids: of each stack `[N]`, which parameter a block belongs to. Numbers are added in the order of stacks, rows.

    Raises ContractError unless all stacks take equally many sums. An exception of one run ends the others.
    """
    if len(runs) == 1:
        return [runs[0](lambda values: _sums([values], param_ids)[0])]
    from greenlet import getcurrent, greenlet  # of a step in which stacks share sums, and of no other

    caller = getcurrent()
    workers = [greenlet(run, parent=caller) for run in runs]
    for worker in workers:
        worker.gr_context = copy_context()
    try:
        found = [worker.switch(caller.switch) for worker in workers]  # the first sums, or results
        while waiting := [worker for worker in workers if not worker.dead]:
            if len(waiting) < len(workers):
                raise ContractError(
                    "sums over parameters: equally many are required of all stacks that share parameters, got "
                    f"{len(workers) - len(waiting)} of {len(workers)} stacks that end before the others"
                )
            found = [worker.switch(own) for worker, own in zip(workers, _sums(found, param_ids), strict=True)]
        return found
    finally:
        _end(workers)


def _end(workers: Sequence[greenlet]) -> None:
    """End the runs that an exception has left at a sum."""
    for worker in workers:
        if worker and not worker.dead:
            worker.throw()


def _sums(values: Sequence[Tensor], param_ids: Sequence[NDArray[np.int64]]) -> Sequence[Tensor]:
    """The sums over the blocks of the same parameter; every block gets its parameter's sum."""
    added = values[0] if len(values) == 1 else torch.cat(list(values))
    ids = param_ids[0] if len(param_ids) == 1 else np.concatenate(param_ids)
    parameters, index = parameter_index(ids, added.device)
    return torch.split(sums_over(index, parameters, added), [len(own) for own in values])


def sums_over(index: Tensor, parameters: int, values: Tensor) -> Tensor:
    """Return for each block the sum of `values` `[N]` over the blocks of its parameter.

    index: `[N]`, the place of each block's parameter among so many `parameters`.
    """
    return values.new_zeros(parameters).index_add_(0, index, values)[index]


def parameter_index(param_ids: NDArray[np.int64], device: torch.device) -> tuple[int, Tensor]:
    """Return the number of parameters, and the place of each block's parameter among them, `[N]` on a device.

    param_ids: `[N]`, which parameter a block belongs to. The tensor is made once for equal numbers.
    """
    return _index(param_ids.tobytes(), device)


@cached_tensors(maxsize=256)
def _index(param_ids: bytes, device: torch.device) -> tuple[int, Tensor]:
    found, index = np.unique(np.frombuffer(param_ids, dtype=np.int64), return_inverse=True)
    return len(found), kept_on_device(index.astype(np.int64), device)
