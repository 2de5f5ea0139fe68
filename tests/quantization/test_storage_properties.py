"""Properties that stored numbers have whatever they are, over generated inputs.

Legend: s the largest |x| of a block of B numbers; R the values of a codebook, ascending in [-1, 1].
"""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from eigengraft.numerics import rectified
from eigengraft.quantization import Cholesky, Eigen, Float32, Int4, Orthogonal, Quantizer
from eigengraft.quantization.formats.base import Blockwise, Format
from eigengraft.slots import Slot

from ..laws.quantizers import QUANTIZERS, small
from ..laws.rows import Row
from ..trajectories import normal, rotation

pytestmark = pytest.mark.slow

B = 8
FLOAT32 = torch.float32
FORMATS = [row for row in QUANTIZERS if isinstance(small(row.make), Format)]
BY_ROW = [  # each block for itself: neither scales of scales nor buckets across rows
    row for row in FORMATS if row.make.get("scale") != "double" and row.make.get("buckets") != "column"
]
BLOCKWISE = [row for row in BY_ROW if isinstance(small(row.make), Blockwise)]
each_format = pytest.mark.parametrize("row", FORMATS, ids=str)
each_by_row = pytest.mark.parametrize("row", BY_ROW, ids=str)
each_blockwise = pytest.mark.parametrize("row", BLOCKWISE, ids=str)
few = settings(max_examples=15)
seeds, lengths, powers = st.integers(0, 9999), st.integers(1, 40), st.integers(-60, 60)


def levels(row: Row) -> np.ndarray[Any, Any] | None:
    """The codebook of a row, if it has one."""
    found = getattr(small(row.make), "levels", None)
    return None if found is None else np.array(found)


def sample(row: Row, *shape: int, seed: int) -> Tensor:
    """Normal numbers, of blocks whose sizes differ; none below 0 where a format has no such values."""
    x = normal(*shape, seed=seed).float() * normal(*shape[:-1], 1, seed=seed + 1).exp().float()
    unsigned = row.kind == "uint8" or str(row.make.get("codebook")) in ("unsigned", "dynamic_unsigned")
    return x.abs() if unsigned else x


def back(quantizer: Quantizer, x: Tensor, **more: Any) -> Tensor:
    y: Tensor = quantizer.decode(quantizer.encode(x, **more), Slot(tuple(x.shape[1:])), x.dtype)
    return y


def scales_of(x: Tensor) -> Tensor:
    """s at the place of each number."""
    pieces = [piece.abs().amax(-1, keepdim=True).expand_as(piece) for piece in x.split(B, -1)]
    return torch.cat(pieces, -1)


# Formats.


@each_blockwise
@few
@given(seed=seeds, n=lengths)
def test_what_was_stored_once_is_stored_alike(row: Row, seed: int, n: int) -> None:
    """The same codes and scales; without -1 in the codebook only if the largest number of a block is positive."""
    quantizer, x = small(row.make), sample(row, 6, n, seed=seed)
    codebook = levels(row)
    if codebook is not None and codebook[0] > -1:
        x[..., ::B] = scales_of(x)[..., ::B]
    once = quantizer.encode(x)
    twice = quantizer.encode(quantizer.decode(once, Slot((n,)), FLOAT32))
    assert all(torch.equal(part, twice[name]) for name, part in once.items())


def positions(row: Row, codes: Tensor, n: int) -> Tensor:
    """Codes as integers that increase with what they stand for."""
    if row.kind in ("int4", "int3"):
        return torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2)[..., :n].int()
    if row.kind == "fp8":  # sign and magnitude
        return torch.where(codes >= 128, 128 - codes.int(), codes.int())
    return codes.int()


@each_blockwise
@few
@given(seed=seeds, n=lengths, c=st.floats(1e-6, 1e6), power=powers)
def test_a_scaled_matrix_has_the_codes_of_the_matrix(row: Row, seed: int, n: int, c: float, power: int) -> None:
    """Exactly for powers of two; for any other factor, which rounds, up to the next code."""
    quantizer, x = small(row.make), sample(row, 2, 3, n, seed=seed)
    codes, doubled, scaled = (
        positions(row, quantizer.encode(y)["codes"], n) for y in (x, x * 2.0**power, x * float(np.float32(c)))
    )
    assert torch.equal(doubled, codes)
    assert int((scaled - codes).abs().max()) <= 1


@pytest.mark.parametrize("row", [row for row in FORMATS if levels(row) is None and row.kind != "uint8"], ids=str)
@few
@given(seed=seeds, n=lengths)
def test_formats_without_a_book_are_odd(row: Row, seed: int, n: int) -> None:
    quantizer, x = small(row.make), sample(row, 2, 3, n, seed=seed)
    assert torch.equal(back(quantizer, -x), -back(quantizer, x))


def nearest(codebook: np.ndarray[Any, Any], y: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return codebook[np.abs(y[:, None] - codebook).argmin(1)]


@pytest.mark.parametrize("row", [r for r in BLOCKWISE if (found := levels(r)) is not None and found[0] < 0], ids=str)
@few
@given(seed=seeds, n=lengths)
def test_books_are_odd_up_to_their_asymmetry(row: Row, seed: int, n: int) -> None:
    """|D(x) + D(-x)| <= a s, with a the most that nearest values of y and -y differ, by brute force over y; 1e-3 for
    what the grid of y misses. The asymmetry is below .04 for the linear square of 4 bits: only the values next to 0
    differ; of the integers there is none."""
    codebook = levels(row)
    assert codebook is not None
    grid = (np.arange(4000) + 1 / np.e) / 4000  # none in the middle of two values
    asymmetry = float(np.abs(nearest(codebook, grid) + nearest(codebook, -grid)).max())
    if row.make == {"kind": "int4"}:
        assert 0.03 < asymmetry < 0.04
    assert (asymmetry == 0) == (row.make.get("codebook") == "symmetric_integer")
    quantizer, x = small(row.make), sample(row, 6, n, seed=seed)
    assert ((back(quantizer, x) + back(quantizer, -x)).abs() <= (asymmetry + 1e-3) * scales_of(x)).all()


@each_blockwise
@few
@given(seed=seeds, n=lengths, power=powers)
def test_blocks_of_equal_numbers_are_exact(row: Row, seed: int, n: int, power: int) -> None:
    """Positive ones in every format; negative ones where -1 is a value."""
    quantizer, codebook = small(row.make), levels(row)
    sizes = normal(6, -(-n // B), seed=seed).float().abs() * 2.0**power
    x = sizes.repeat_interleave(B, -1)[..., :n]
    assert torch.equal(back(quantizer, x), x)
    if row.kind != "uint8" and (codebook is None or codebook[0] == -1):
        assert torch.equal(back(quantizer, -x), -x)


@each_by_row
@few
@given(seed=seeds, blocks=st.integers(1, 5))
def test_blocks_do_not_know_of_each_other(row: Row, seed: int, blocks: int) -> None:
    """In another order they are stored in that order, and a slice of the rows is stored as that slice."""
    quantizer, x = small(row.make), sample(row, 2, 6, blocks * B, seed=seed)
    order = torch.randperm(blocks, generator=torch.Generator().manual_seed(seed))
    y = back(quantizer, x)
    moved = back(quantizer, x.unflatten(-1, (blocks, B))[:, :, order].flatten(-2))
    assert torch.equal(moved, y.unflatten(-1, (blocks, B))[:, :, order].flatten(-2))
    parts = quantizer.encode(x)
    some = {name: part[:, 1:4] for name, part in parts.items()}
    assert torch.equal(quantizer.decode(some, Slot((3, blocks * B)), FLOAT32), y[:, 1:4])
    strided = torch.stack((x, -x), -1)[..., 0]
    assert all(torch.equal(part, parts[name]) for name, part in quantizer.encode(strided).items())


@each_by_row
@few
@given(seed=seeds, rows=st.integers(2, 12))
def test_rows_that_lie_elsewhere_have_the_codes_of_the_whole(row: Row, seed: int, rows: int) -> None:
    """Split along the first axis, as a sharded parameter is: the same bits, provided that whether a slot is stored is
    asked of the whole slot, since a part may be below the limit."""
    quantizer, x = small(row.make), sample(row, 1, rows, 20, seed=seed)
    cut = seed % (rows - 1) + 1
    whole, parts = quantizer.encode(x), [quantizer.encode(y) for y in (x[:, :cut], x[:, cut:])]
    assert all(torch.equal(torch.cat([part[name] for part in parts], 1), whole[name]) for name in whole)
    limited = quantizer.replace(min_elements=rows * 20)
    role: Any = "second_moment"
    assert limited.unsupported(Slot((rows, 20), role=role)) is None
    assert limited.unsupported(Slot((cut, 20), role=role)) is not None


@each_format
@few
@given(seed=seeds, n=st.integers(1, B))
def test_the_order_of_numbers_in_a_block_is_kept(row: Row, seed: int, n: int) -> None:
    """Ties included. Of columns that share a bucket each is in order."""
    column = row.make.get("buckets") == "column"
    x = sample(row, *((2, 3, n) if column else (6, n)), seed=seed)
    x[..., n // 2 :] = x[..., n // 2 : n // 2 + 1]
    if column:
        assert (back(small(row.make), x.sort(1).values).diff(dim=1) >= 0).all()
    else:
        assert (back(small(row.make), x.sort(-1).values).diff(dim=-1) >= 0).all()


LADDER: list[Any] = [
    small({"kind": "int3", "codebook": "linear_square"}),
    small({"kind": "int4", "codebook": "linear_square"}),
    small({"kind": "codebook8", "codebook": "linear_square"}),
]


@few
@given(seed=seeds, n=lengths, level=st.integers(0, 2))
def test_more_bits_and_smaller_blocks_bound_the_error_closer(seed: int, n: int, level: int) -> None:
    """The bound is s times half the widest gap of the codebook, s as it is stored; it holds for every number, no number
    has a larger one in blocks of half the size, and with more bits it is lower. 1e-6: float32."""
    quantizer = LADDER[level]
    x = normal(6, n, seed=seed).float()
    gaps = [float(np.diff(rung.levels).max() / 2) for rung in LADDER]
    assert gaps == sorted(gaps, reverse=True) and gaps[1] == pytest.approx(0.1244, abs=1e-4)
    bounds = []
    for size in (B, B // 2):
        sized = quantizer.replace(block_size=size)
        s = sized.encode(x)["scales"].repeat_interleave(size, -1)[..., :n]
        bounds.append(s * gaps[level])
        assert ((back(sized, x) - x).abs() <= bounds[-1] + 1e-6 * s).all()
    assert (bounds[1] <= bounds[0]).all()


@pytest.mark.parametrize(
    "fields",
    [{"kind": "uint8"}, {"kind": "uint8", "compand": "sqrt"}, {"kind": "int4", "codebook": "unsigned"}],
    ids=str,
)
@given(seed=seeds, n=lengths, spread=st.floats(0, 20))
def test_second_moments_never_vanish(fields: Any, seed: int, n: int, spread: float) -> None:
    """Whatever else is in the block, over 40 powers of ten: what divides an update is not rounded to 0. The codebook
    without zero keeps even zeros off zero, wherever something else is in their block."""
    x = 10 ** (normal(2, 3, n, seed=seed) * spread / 2).clamp(-15, 20).float()
    assert (back(small(fields), x) > 0).all()
    x[..., 1::2] = 0.0
    positive = back(small(fields), x) > 0
    assert bool(positive.all()) == (fields["kind"] == "int4" or n == 1) and bool(positive[..., ::2].all())


@pytest.mark.parametrize("kind", ["int8", "int16"])
@given(seed=seeds, n=lengths, u=st.sampled_from([0.0, 0.25, 0.5, 1 - 2**-9]))
def test_stochastic_rounding_goes_to_a_neighbor(kind: str, seed: int, n: int, u: float) -> None:
    """floor or ceil of z = x (Q / s), down for u = 0, which leaves whole codes as they are. Up to 1 - 2^-9 the sum of a
    code of 15 bits and u is exact in float32."""
    quantizer, x = small({"kind": kind, "rounding": "stochastic"}), normal(6, n, seed=seed).float()
    top = torch.iinfo(getattr(torch, kind)).max
    codes = quantizer.encode(x, None, lambda like, _: torch.full_like(like, u))["codes"].view(getattr(torch, kind))
    z = x * (top / scales_of(x))
    assert ((codes == z.floor()) | (codes == z.ceil())).all()
    assert u > 0 or bool((codes == z.floor()).all())
    whole = torch.randint(-top, top + 1, (3, n), generator=torch.Generator().manual_seed(seed))
    whole[..., ::B] = top
    exact = quantizer.encode(whole.float(), None, lambda like, _: torch.full_like(like, u))["codes"]
    assert torch.equal(exact.view(getattr(torch, kind)).int(), whole.int())


# Matrices.


@pytest.mark.parametrize("kind", ["int8", "int16"])
@given(seed=seeds, d=st.integers(1, 20), power=powers)
def test_exact_diagonals_with_buckets_are_those_of_jax(kind: str, seed: int, d: int, power: int) -> None:
    """scalable_shampoo's `QuantizedValue` with `extract_diagonal`, in numpy's float32 arithmetic: the same bits. Of a
    symmetric matrix |A_ij - A_ji| is at most (b_i + b_j) / 2; 1e-6: float32."""
    inner = {"kind": kind, "buckets": "column"}
    quantizer = small({"kind": "exact_diagonal", "inner": inner, "symmetrize": False})
    x = normal(2, d, d, seed=seed).float() * 2.0**power
    x = x + x.mT
    parts = quantizer.encode(x)
    decoded = quantizer.decode(parts, Slot((d, d), role="statistic"), FLOAT32)
    top = {"int8": np.float32(127), "int16": np.float32(32767)}[kind]
    for index, matrix in enumerate(x.numpy()):
        diagonal = np.diag(matrix)
        rest = matrix - np.diag(diagonal)
        bucket = np.max(np.abs(rest), axis=0) / top
        codes = np.rint(rest / np.where(bucket > 0, bucket, np.ones_like(bucket))[None, :]).astype(kind)
        expected = codes.astype(np.float32) * bucket[None, :] + np.diag(diagonal)
        assert np.array_equal(decoded[index].numpy(), expected)
        assert np.array_equal(parts["diagonal"][index].numpy(), diagonal)
        bound = (bucket[:, None] + bucket[None, :]) / 2
        assert (np.abs(expected - expected.T) <= bound + 1e-6 * np.abs(matrix).max()).all()


FACTORIZED = [row for row in QUANTIZERS if row.kind in ("cholesky", "eigen")]


@pytest.mark.parametrize("row", FACTORIZED, ids=str)
@pytest.mark.parametrize("codebook", ["linear_square", "dynamic"])
@few
@given(seed=seeds, d=st.integers(2, 20), decades=st.floats(0, 8))
def test_factorized_matrices_are_semidefinite(row: Row, codebook: str, seed: int, d: int, decades: float) -> None:
    """Whatever the condition and the codes, also after a second writing. 1e-12 of the largest: products in float64."""
    quantizer = small({**row.make, "inner": {"kind": "int4", "codebook": codebook}})
    parts = None
    for turn in (0, 1):
        q = rotation(d, seed + turn)
        a = ((q * 10 ** torch.linspace(-decades, 0, d, dtype=torch.float64)) @ q.mT)[None]
        parts = quantizer.encode((a + a.mT) / 2, parts)
        stored = quantizer.decode(parts, Slot((d, d), role="statistic"), torch.float64)[0]
        values = torch.linalg.eigvalsh(stored)
        assert torch.equal(stored, stored.mT) and float(values[0]) >= -1e-12 * float(values[-1])


def with_values(values: Tensor, seed: int) -> Tensor:
    """A matrix of these singular values."""
    d = len(values)
    return (rotation(d, seed) * values) @ rotation(d, seed + 1).mT


@given(seed=seeds, d=st.integers(1, 12), top=st.floats(0.1, 1.72))
def test_a_bjorck_step_contracts(seed: int, d: int, top: float) -> None:
    """From singular values in (0, sqrt 3): V^T V comes nearer to I, no singular value stays above 1."""
    values = torch.rand(d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).mul(top - 0.05).add(0.05)
    v = with_values(values, seed)[None]
    eye = torch.eye(d, dtype=torch.float64)
    far = [float(torch.linalg.matrix_norm(u.mT @ u - eye)) for u in (v, rectified(v, 1))]
    assert far[1] < far[0] or far[0] < 1e-12
    assert float(torch.linalg.matrix_norm(rectified(v, 1), ord=2)) <= 1 + 1e-12


@given(seed=seeds, d=st.integers(1, 12), steps=st.integers(1, 4))
def test_bjorck_steps_turn_with_the_matrix(seed: int, d: int, steps: int) -> None:
    """R(P V Q) = P R(V) Q for orthogonal P, Q. 1e-12: some products. Singular values up to 1, so that no entry is above
    1, which the guard would see in one frame and not in another."""
    values = torch.rand(d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).mul(0.95).add(0.05)
    v, p, q = with_values(values, seed), rotation(d, seed + 2), rotation(d, seed + 3)
    turned = rectified((p @ v @ q)[None], steps)[0]
    assert torch.allclose(turned, p @ rectified(v[None], steps)[0] @ q, rtol=0, atol=1e-12)


@few
@given(seed=seeds, d=st.integers(2, 20))
def test_a_factor_does_not_depend_on_the_error_beside_it(seed: int, d: int) -> None:
    quantizer = Cholesky(inner=Int4(min_elements=1, block_size=B), error_feedback=0.5)
    x = normal(2, d, 2 * d, seed=seed)
    parts = quantizer.encode(x @ x.mT)
    slot = Slot((d, d), role="statistic")
    garbage = {name: part.flip(0) if name.startswith("error.") else part for name, part in parts.items()}
    assert d < 3 or any(not torch.equal(garbage[name], part) for name, part in parts.items())
    one, two = (quantizer.decode(kept, slot, torch.float64) for kept in (parts, garbage))
    assert torch.equal(one, two)


def summed(feedback: float | None, given: list[Tensor]) -> tuple[float, float]:
    """(what is missing of the sum of the factors after all that is carried is counted, the largest entry of a factor);
    of the part below the diagonal, which is what is coded."""
    d, missing, largest = given[0].shape[-1], 0.0, 0.0
    slot, parts = Slot((d, d), role="statistic"), None
    quantizer = small({"kind": "cholesky", "inner": "bf16", "error_feedback": feedback})
    for a in given:
        parts = quantizer.encode(a, parts)
        c = torch.linalg.cholesky(a + 1e-6 * a.abs().max() * torch.eye(d))[0]
        stored = torch.linalg.cholesky(quantizer.decode(parts, slot, torch.float64))[0]
        missing = missing + (c - stored).tril(-1)
        largest = max(largest, float(c.abs().max()))
    assert parts is not None
    if feedback is not None:
        last = {"diagonal": torch.ones(1, d), "lower.values": parts["error.values"].float()}
        gram = Cholesky(inner=Float32()).decode(last, slot, torch.float64)
        missing = missing - torch.linalg.cholesky(gram)[0].tril(-1)
    return float(torch.as_tensor(missing).abs().max()), largest


@few
@given(seed=seeds, d=st.integers(4, 12), updates=st.integers(2, 10))
def test_errors_that_are_carried_on_cancel(seed: int, d: int, updates: int) -> None:
    """With all of the last error carried the factors that come back sum to those that went in, less the last error: to
    2^-17 for each update, the error of an error in bfloat16 (2^-9 of 2^-9, with room 2). Without it they do not."""
    samples = [normal(1, d, 2 * d, seed=seed + step) for step in range(updates)]
    given = [x @ x.mT for x in samples]
    missing, largest = summed(0.0, given)
    assert missing <= updates * 2.0**-17 * largest < summed(None, given)[0]


def test_rectified_bases_and_eigenvectors_agree_on_what_is_stored() -> None:
    """`eigen` keeps its vectors as `orthogonal` keeps a basis, so that one reads what the other wrote."""
    inner = Int4(min_elements=1, block_size=B)
    x = normal(2, 9, 18, seed=1)
    parts = Eigen(inner=inner, rectify=3).encode(x @ x.mT)
    v = Orthogonal(inner=inner, rectify=3).decode(parts, Slot((9, 9), role="basis"), torch.float64)
    a = Eigen(inner=inner, rectify=3).decode(parts, Slot((9, 9), role="statistic"), torch.float64)
    assert torch.allclose(v * parts["values"][:, None] @ v.mT, a, rtol=0, atol=1e-12)
