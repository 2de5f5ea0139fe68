"""Products along axes of blocks against their definition, whatever order and form they are taken in."""

from collections.abc import Collection

import pytest
import torch
from torch import Tensor

from eigengraft.preconditioners.algebra.basis_change import (
    kronecker,
    mode_product,
    mode_products,
    rotate,
    short_runs,
)

from ..trajectories import normal

BLOCKS = [(5, 4), (6, 5, 3, 3), (4, 3, 7, 7), (3, 70, 2), (2, 3, 4), (8, 4, 20), (5, 1, 3), (3, 2, 2, 2, 9)]


def defined(x: Tensor, matrices: dict[int, Tensor]) -> Tensor:
    """Axis after axis by tensordot, blocks apart."""
    found = []
    for row, block in enumerate(x):
        for axis, matrix in matrices.items():
            own = matrix[row].diag() if matrix.ndim == 2 else matrix[row]
            block = torch.tensordot(own, block, dims=([1], [axis])).movedim(0, axis)
        found.append(block)
    return torch.stack(found)


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("blocks", [1, 3])
def test_rotations_are_products_along_each_axis(block: tuple[int, ...], blocks: int) -> None:
    """All axes, and all but one in turn, of which one has a diagonal and one fewer rows than columns."""
    x = normal(blocks, *block, seed=1)
    full = {axis: normal(blocks, d, d, seed=2 + axis) for axis, d in enumerate(block)}
    full[1] = full[1][:, : max(1, block[1] - 1)]
    for left_out in (None, *range(len(block))):
        matrices = {axis: matrix for axis, matrix in full.items() if axis != left_out}
        if left_out == 0:
            matrices[len(block) - 1] = normal(blocks, block[-1], seed=9)
        expected = defined(x, matrices)
        for found in (rotate(x, matrices), mode_products(x, matrices)):
            assert found.shape == expected.shape and found.is_contiguous()
            assert torch.allclose(found, expected, rtol=0, atol=1e-12 * float(expected.abs().max()))  # sums of float64
        for axis, matrix in matrices.items():
            assert torch.allclose(mode_product(x, matrix, axis), defined(x, {axis: matrix}), rtol=0, atol=1e-11)


def test_roots_whose_product_overflows_leave_zeros_zeros() -> None:
    """Roots of damping alone, as those of parameters without gradients, on short axes beside each other."""
    roots = {axis: torch.eye(d).expand(1, d, d) * 1e20 for axis, d in enumerate((3, 2, 4))}
    assert torch.equal(mode_products(torch.zeros(1, 3, 2, 4), roots), torch.zeros(1, 3, 2, 4))


def test_short_axes_beside_each_other_are_joined() -> None:
    def runs(block: tuple[int, ...], axes: Collection[int] | None = None) -> list[list[int]]:
        return short_runs(block, range(len(block)) if axes is None else axes)

    assert runs((256, 256, 3, 3)) == [[0], [1], [2, 3]]
    assert runs((64, 3, 7, 7)) == [[0], [1], [2, 3]]
    assert runs((8, 8, 2)) == [[0], [1, 2]] and runs((16, 16, 16)) == [[0], [1], [2]]
    assert runs((256, 3, 3), axes=(0, 2)) == [[0], [1], [2]] and runs((3, 3, 256)) == [[0, 1], [2]]


def test_kronecker_products_are_those_of_torch() -> None:
    factors = [normal(2, m, n, seed=m) for m, n in ((3, 2), (4, 4), (2, 5))]
    assert torch.allclose(kronecker(factors)[1], torch.kron(torch.kron(*(f[1] for f in factors[:2])), factors[2][1]))
