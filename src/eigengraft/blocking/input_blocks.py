"""Matrices over the inputs of a parameter, and the part of them that belongs to a block.

Legend: a parameter has matrices of n inputs each, B of them along its batch axes; a block has c inputs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .matrices import Matrices


@dataclass(frozen=True)
class InputMatrix:
    """A matrix over the inputs of one parameter.

    value: `[n, n]`, or `[*batch, n, n]`.
    index: for each entry of the parameter, in its shape, the row of `[B n, n]` that its input has; a view.
    """

    value: Tensor
    index: Tensor

    @classmethod
    def of(cls, value: Tensor, shape: tuple[int, ...], matrices: Matrices) -> InputMatrix:
        """The matrix of a parameter of that shape. Raises ValueError if it has another number of inputs."""
        wanted = matrix_shape(shape, matrices)
        if tuple(value.shape) != wanted:
            raise ValueError(f"a tensor of shape {wanted} is required for {shape}, got {tuple(value.shape)}")
        return cls(value, input_index(shape, matrices, value.device))

    def blocks(self, columns: Tensor) -> Tensor:
        """The rows and columns of k blocks, `[k, c, c]`; columns `[k, c]`: entries of `index`."""
        n = self.value.shape[-1]
        return self.value.reshape(-1, n)[columns[:, :, None], (columns % n)[:, None, :]]


def matrix_shape(shape: tuple[int, ...], matrices: Matrices) -> tuple[int, ...]:
    """The shape `[*batch, n, n]` of a matrix over the inputs of a parameter of that shape."""
    n = math.prod(shape[axis] for axis in matrices.matrix_axes(shape)[1:])
    return (*shape[: matrices.batch], n, n)


def input_index(shape: tuple[int, ...], matrices: Matrices, device: torch.device) -> Tensor:
    """For each entry of a parameter, in its shape, the number of its input, counted over its batch axes; a view."""
    counted = sorted([*range(matrices.batch), *matrices.matrix_axes(shape)[1:]])
    lengths = [shape[axis] if axis in counted else 1 for axis in range(len(shape))]
    return torch.arange(math.prod(lengths), device=device).reshape(lengths).expand(shape)


def input_columns(index: Tensor) -> Tensor:
    """`[N, c]`, the inputs of blocks, from their `index` `[N, r, *c]`; ValueError if rows of a block differ in them."""
    flat = index.flatten(2) if index.ndim > 2 else index.unsqueeze(-1)
    if bool((flat != flat[:, :1]).any()):
        raise ValueError(
            f"blocks whose first axis is of outputs alone are required, got blocks of shape {tuple(index.shape[1:])}; "
            "set `blocking: {merge: ..., keep_axes: 2}`"
        )
    return flat[:, 0].long()
