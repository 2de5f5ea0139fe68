"""Signals with a number for each of some outputs of a parameter, as constraints take them."""

from __future__ import annotations

from torch import Tensor

from eigengraft.distributed.layouts import local

from ..param_set import ParamSet


def for_outputs(value: Tensor, param_set: ParamSet, at: int, name: str) -> Tensor:
    """The numbers `[parts]` of equal parts of the outputs, so that they multiply what this rank holds of a parameter.

    Raises ValueError if there are not that many outputs for each.
    """
    spec = param_set.specs[at]
    axis = spec.matrices.matrix_axes(spec.shape)[0]
    length, parts = spec.shape[axis], len(value)
    if not parts or length % parts:
        raise ValueError(
            f"provide: '{name}' of {spec.name}: a number for each of equally many outputs is required, of which there "
            f"are {length}, got {parts} numbers"
        )
    rows = value.repeat_interleave(length // parts)
    if spec.placement is not None and param_set.rank_group is not None:
        box = spec.placement.layout.boxes[param_set.rank_group.rank]
        rows = rows[box.start[axis] : box.stop[axis]]
    shape = [-1 if own == axis else 1 for own in range(local(param_set.parameters[at]).ndim)]
    return rows.reshape(shape)
