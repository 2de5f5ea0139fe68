"""Sums over the blocks of each parameter, for `context.parameter_sum`. The blocks may be in several stacks.

A stack is a tensor of blocks with one shape, which are computed together. If all blocks of a parameter are in one
stack, the sum is an `index_add`. Otherwise the computations of the stacks run concurrently, each in a greenlet of this
thread. A computation that needs a sum waits. When all computations wait, the sums are computed, and the computations
continue. Threads would need locks, and with generators every function between the step and the sum would have to be a
generator.

A context manager must not be open across a sum, because the computations of other stacks run before the sum returns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import copy_context
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..errors import ContractError
from ..numerics import cached_tensors, kept_on_device

_T = TypeVar("_T")
ParameterSum = Callable[[Tensor], Tensor]
"""Function that receives one number for each block of a stack, `[N]`. For each block it returns the sum of the numbers
of all blocks of the same parameter, `[N]`."""


def run_stacks(runs: Sequence[Callable[[ParameterSum], _T]], matrix_ids: Sequence[NDArray[np.int64]]) -> list[_T]:
    """Run the computations of several stacks, and return their results. A stack is a tensor of blocks with one shape.

    Each computation may request sums over all blocks of a parameter, which may be in several of the stacks. Numbers are
    added in the order of the stacks, and within a stack in the order of its blocks. An exception in one computation
    ends all of them. Raises ContractError unless all stacks request the same number of sums.

    runs: the computation of each stack. It receives the function by which it requests sums, `ParameterSum`.
    matrix_ids: for each stack, the number of each block's parameter, `[N]`, as in `StepContext`.
    """
    if len(runs) == 1:
        return [runs[0](lambda values: _sums([values], matrix_ids)[0])]
    from greenlet import getcurrent, greenlet  # imported here, because few recipes sum over blocks of different shapes

    caller = getcurrent()
    workers = [greenlet(run, parent=caller) for run in runs]
    for worker in workers:
        worker.gr_context = copy_context()
    try:
        found = [worker.switch(caller.switch) for worker in workers]  # first numbers to sum, or results
        while waiting := [worker for worker in workers if not worker.dead]:
            if len(waiting) < len(workers):
                raise ContractError(
                    "sums over parameters: all stacks of the same parameters must compute the same number of sums, but "
                    f"{len(workers) - len(waiting)} of {len(workers)} stacks ended while others wait for a sum; call "
                    "`context.parameter_sum` equally often for blocks of every shape"
                )
            found = [worker.switch(sums) for worker, sums in zip(workers, _sums(found, matrix_ids), strict=True)]
        return found
    finally:  # after an exception in one stack's computation, those of the other stacks still wait and must be ended
        for worker in workers:
            if worker:
                worker.throw()


def _sums(values: Sequence[Tensor], matrix_ids: Sequence[NDArray[np.int64]]) -> Sequence[Tensor]:
    """Add up the numbers of all blocks of each parameter. The blocks are in stacks, tensors of blocks with one shape.

    Return one tensor `[N]` for each stack of N blocks, with the sum over all blocks of each block's parameter.

    values: for each stack, one number for each of its blocks, `[N]`.
    matrix_ids: for each stack, the number of each block's parameter, `[N]`.
    """
    added = values[0] if len(values) == 1 else torch.cat(list(values))
    ids = matrix_ids[0] if len(matrix_ids) == 1 else np.concatenate(matrix_ids)
    matrices, index = matrix_index(ids, added.device)
    return torch.split(sums_over(index, matrices, added), [len(numbers) for numbers in values])


def sums_over(index: Tensor, matrices: int, values: Tensor) -> Tensor:
    """Return for each block the sum of `values` `[N]` over all blocks of the same parameter.

    Each matrix of a view of a parameter counts as a parameter here.

    index: `[N]`, number of each block's parameter, from 0 to matrices - 1.
    matrices: number of parameters. If there are as many as blocks, each block is a whole parameter, and its sum is its
        own value.
    """
    if matrices == len(values):
        return values.clone()
    return values.new_zeros(matrices).index_add_(0, index, values)[index]


def matrix_index(matrix_ids: NDArray[np.int64], device: torch.device) -> tuple[int, Tensor]:
    """Return the number M of distinct parameters, and numbers from 0 to M - 1 for each block's parameter, `[N]` on a
    device.

    Each matrix of a view of a parameter counts as a parameter. Calls with equal `matrix_ids` return the same cached
    tensor.

    matrix_ids: `[N]`, any number that identifies each block's parameter, or its matrix.
    """
    return _index(matrix_ids.tobytes(), device)


@cached_tensors(maxsize=256)
def _index(matrix_ids: bytes, device: torch.device) -> tuple[int, Tensor]:
    found, index = np.unique(np.frombuffer(matrix_ids, dtype=np.int64), return_inverse=True)
    return len(found), kept_on_device(index.astype(np.int64), device)
