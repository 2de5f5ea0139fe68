"""Structures: what is kept of symmetric, orthogonal and semi-definite matrices, against dense float64 definitions."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from eigengraft import Optimizer
from eigengraft.numerics import rectified, safe_factor
from eigengraft.quantization import (
    BFloat16,
    Cholesky,
    Eigen,
    ExactDiagonal,
    Float32,
    Int4,
    Int8,
    Orthogonal,
    Quantizer,
    Symmetric,
)
from eigengraft.slots import Slot

from ..refusals import refused
from ..trajectories import normal, rotation

INT4 = Int4(min_elements=1)
BF16 = BFloat16()
STRUCTURES = {
    "symmetric": Symmetric(inner=INT4),
    "exact_diagonal": ExactDiagonal(inner=INT4),
    "triangular": ExactDiagonal(inner=Symmetric(inner=INT4)),
    "orthogonal": Orthogonal(inner=INT4),
    "cholesky": Cholesky(inner=INT4),
    "error_feedback": Cholesky(inner=INT4, error_feedback=0.0),
    "eigen": Eigen(inner=INT4),
}
each_structure = pytest.mark.parametrize("name", STRUCTURES)


def slot(name: str, d: int, columns: int | None = None) -> Slot:
    return Slot((d, columns or d), role="basis" if name == "orthogonal" else "statistic")


def again(quantizer: Quantizer, x: Tensor, role: Any = "statistic") -> Tensor:
    """x `[d, r]` as it comes back."""
    return quantizer.decode(quantizer.encode(x[None]), Slot(tuple(x.shape), role=role), x.dtype)[0]


def definite(n: int, d: int, seed: int = 0) -> Tensor:
    """Positive definite matrices `[n, d, d]` of condition about 30."""
    x = normal(n, d, 2 * d, seed=seed)
    return x @ x.mT / d


def example(name: str, n: int = 4, d: int = 9) -> Tensor:
    return torch.linalg.qr(normal(n, d, d, seed=3)).Q if name == "orthogonal" else definite(n, d)


# The synthetic matrix of 4-bit Shampoo (Wang et al. 2024), small: eigenvalues 1000 and 1, eigenvectors of the Haar law.

N = 192
LARGE = 128


def synthetic() -> tuple[Tensor, Tensor, Tensor]:
    """(A, eigenvectors, eigenvalues), float64."""
    u = torch.linalg.qr(torch.randn(N, N, generator=torch.Generator().manual_seed(0), dtype=torch.float64)).Q
    values = torch.where(torch.arange(N) < LARGE, 1000.0, 1.0).double()
    return (u * values) @ u.T, u, values


def newton(a: Tensor) -> Tensor:
    """A^(-1/4) by ten coupled Newton steps, stopped where the error grows: how the paper computes it."""
    eye = torch.eye(len(a), dtype=a.dtype)
    a = a + 1e-6 * torch.linalg.eigvalsh((a + a.T) / 2)[-1] * eye
    z = 5 / (2 * torch.linalg.matrix_norm(a))
    root, m = z**0.25 * eye, z * a
    error = (m - eye).abs().max()
    for _ in range(10):
        t = 1.25 * eye - 0.25 * m
        m = torch.linalg.matrix_power(t, 4) @ m
        if (m - eye).abs().max() > 1.2 * error:
            break
        error, root = (m - eye).abs().max(), root @ t
    return root


def dense(a: Tensor, exponent: float = -0.25) -> Tensor:
    values, q = torch.linalg.eigh((a + a.T) / 2)
    return (q * values.pow(exponent)) @ q.T


def errors(f: Callable[[Tensor], Tensor], a: Tensor, b: Tensor) -> tuple[float, float]:
    """(|f(A) - f(B)| / |f(A)|, angle between them in degrees)."""
    x, y = f(a), f(b)
    cosine = (x * y).sum() / (x.norm() * y.norm())
    return float((x - y).norm() / x.norm()), float(torch.rad2deg(torch.acos(cosine.clamp(max=1))))


PINS = [
    ("linear_square", 0, (0.0985, 5.639), (0.1020, 5.825)),
    ("linear_square", 1, (0.0700, 3.996), (0.0713, 4.068)),
    ("linear_square", 4, (0.0693, None), (0.0705, None)),
    ("dynamic", 0, (0.1288, 7.365), (0.1337, 7.609)),
    ("dynamic", 1, (0.0910, 5.181), (0.0927, 5.276)),
    ("dynamic", 4, (0.0893, None), (0.0908, None)),
]


@pytest.mark.parametrize(("codebook", "rectify", "by_newton", "exactly"), PINS)
def test_coded_eigenvectors_have_the_published_error(codebook: Any, rectify: int, by_newton: Any, exactly: Any) -> None:
    """1 %: the eigenvectors are LAPACK's, and the construction meets the paper's tables at order 1200 within 0.5 %."""
    a, u, values = synthetic()
    v = again(Orthogonal(inner=Int4(codebook=codebook), rectify=rectify), u, "basis")
    for f, expected in ((newton, by_newton), (dense, exactly)):
        got = errors(f, a, (v * values) @ v.T)
        assert all(
            want is None or have == pytest.approx(want, rel=0.01) for have, want in zip(got, expected, strict=True)
        )


@pytest.mark.parametrize(("codebook", "error"), [("linear_square", 0.5888), ("dynamic", 0.5924)])
def test_a_coded_matrix_has_the_published_error(codebook: Any, error: float) -> None:
    """The paper leaves the coded matrix unsymmetric. The mean of both triangles is nearer to it, and so is its root."""
    a, _, _ = synthetic()
    raw, mean = (again(ExactDiagonal(inner=Int4(codebook=codebook), symmetrize=s), a) for s in (False, True))
    assert errors(newton, a, raw)[0] == pytest.approx(error, rel=0.01)
    assert (mean - a).norm() < 0.75 * (raw - a).norm()  # sqrt(1/2) if the errors of the two are independent
    assert errors(newton, a, mean)[0] < error


@pytest.mark.parametrize(
    ("codebook", "by_newton", "exactly"), [("linear_square", 0.1145, 0.174), ("dynamic", 0.1502, 0.2314)]
)
def test_a_coded_cholesky_factor_has_nearly_the_error_of_whole_rows(
    codebook: Any, by_newton: float, exactly: float
) -> None:
    """The numbers are of a factor coded by rows. Folded, one block of three in a row is shared by two rows: 6 %."""
    a, _, _ = synthetic()
    b = again(Cholesky(inner=Int4(codebook=codebook)), a)
    assert errors(newton, a, b)[0] == pytest.approx(by_newton, rel=0.06)
    assert errors(dense, a, b)[0] == pytest.approx(exactly, rel=0.06)


def test_what_the_paper_says_of_two_eigenvalues() -> None:
    """Its lemma 3: the small one of two, times k, makes the error sqrt(l) |k^s - 1| / sqrt(c^2s + l), l their ratio in
    number. With l = c^s k^(s) / ... of lemma 2 the error is |k^s - 1| / sqrt(k^s + 1); 1e-9: of float64 roots."""
    c, k, s, large, small = 1000.0, 20.0, -0.25, 5, 3
    a, b = (torch.diag(torch.tensor([c] * large + [x] * small, dtype=torch.float64)) for x in (1.0, k))
    ratio = small / large
    expected = ratio**0.5 * abs(k**s - 1) / (c ** (2 * s) + ratio) ** 0.5
    assert errors(dense, a, b)[0] == pytest.approx(expected, rel=1e-9)
    assert abs(k**s - 1) / (k**s + 1) ** 0.5 == pytest.approx(0.43434, rel=1e-4)


@given(seed=st.integers(0, 99), d=st.integers(2, 24), exponent=st.sampled_from([-0.5, -0.25, 0.5, 1.0]))
def test_orthonormal_errors_bound_the_error_of_every_power(seed: int, d: int, exponent: float) -> None:
    """Lemma 1: columns moved by at most a, by angles whose cosine is at least 1 - b: error <= 2 a, cosine >= (1 - b)^2.
    1e-6: sixteen Bjorck steps leave V orthonormal to rounding."""
    u, values = rotation(d, seed), 10 ** (6 * torch.rand(d, generator=torch.Generator().manual_seed(seed)).double() - 3)
    v = again(Orthogonal(inner=INT4, rectify=16), u, "basis")
    x, y = ((q * values**exponent) @ q.T for q in (u, v))
    moved, turned = (u - v).norm(dim=0).max(), (1 - (u * v).sum(0)).max()
    assert float((x - y).norm() / x.norm()) <= 2 * float(moved) + 1e-6
    assert float((x * y).sum() / (x.norm() * y.norm())) >= (1 - float(turned)) ** 2 - 1e-6


# Rectification.


def test_bjorck_steps_converge_as_computed() -> None:
    """|I - V^T V| / sqrt(d) of 4-bit Haar matrices, computed at order 1200; 5 %: smaller here, so that it varies more.
    Each step squares the error, 3/4 of it times a moment of the spectrum."""
    u = synthetic()[1]
    coded = again(Orthogonal(inner=Int4(), rectify=0), u, "basis")
    for t, expected in enumerate([0.152, 0.0243, 8.4e-4, 1.4e-6]):
        v = rectified(coded[None], t)[0]
        assert float((v.T @ v - torch.eye(N)).norm() / N**0.5) == pytest.approx(expected, rel=0.05 * (t + 1))
    moved = [float((rectified(coded[None], t)[0] - u).norm() / N**0.5) for t in (0, 1, 4)]
    assert moved == pytest.approx([0.1078, 0.0770, 0.0764], rel=0.01)


def test_a_step_is_its_definition_and_the_guard_stays_away_from_coded_bases() -> None:
    """1e-14: the guard multiplies by 1."""
    for codebook in ("linear_square", "dynamic", "nf4"):
        v = again(Orthogonal(inner=Int4(codebook=codebook), rectify=0), synthetic()[1], "basis")
        expected = 1.5 * v - 0.5 * v @ v.T @ v
        assert float((rectified(v[None] / v.abs().max().clamp_min(1), 1)[0] - expected).abs().max()) < 1e-14


@pytest.mark.parametrize("largest", [1.0, 3**0.5, 1.9, 5.0**0.5, 40.0, 1e30])
@pytest.mark.parametrize("columns", [12, 5])
def test_singular_values_beyond_the_root_of_three_converge_too(largest: float, columns: int) -> None:
    """To the polar factor; without the guard 1.9 goes to -1, and 40 to infinity. Values that are 1e-30 of the largest
    never get near 1 in 16 steps, so that there only the size is checked."""
    left, right = rotation(12, 1)[:, :columns], rotation(columns, 2)
    values = torch.ones(columns, dtype=torch.float64).index_fill(0, torch.tensor([1]), largest)
    v = ((left * values) @ right.T)[None]
    assert float(torch.linalg.matrix_norm(rectified(v, 1), ord=2)) <= 1 + 1e-12
    if largest < 1e3:
        assert float((rectified(v, 24)[0] - left @ right.T).abs().max()) < 1e-10


@pytest.mark.parametrize("largest", [1.0, 1.9, 40.0, 1e30])
@pytest.mark.parametrize("inner", [Int4(block_size=4, min_elements=1), Int8(min_elements=1)], ids=["int4", "int8"])
def test_what_is_stored_converges(largest: float, inner: Quantizer) -> None:
    """Who reads does not look any more: a V too large for the steps is stored smaller; 1e-3: float32 in 16 steps."""
    values = torch.ones(12, dtype=torch.float64).index_fill(0, torch.tensor([1]), largest)
    v = ((rotation(12, 1) * values) @ rotation(12, 2).T).float()[None]
    slot = Slot((12, 12), role="basis")
    once, often = Orthogonal(inner=inner, rectify=1), Orthogonal(inner=inner, rectify=16)
    for quantizer in (once, often):
        back = quantizer.decode(quantizer.encode(v), slot, torch.float32)
        assert float(torch.linalg.matrix_norm(back, ord=2)) <= 1 + 1e-5  # rounding
    if largest < 1e3:  # smaller ones are lost beside a value of 1e30
        assert float((back.mT @ back - torch.eye(12)).abs().max()) < 1e-3
    both = torch.cat((v, rotation(12, 3).float()[None]))
    apart = once.decode(once.encode(both[1:]), slot, torch.float32)
    assert torch.equal(once.decode(once.encode(both), slot, torch.float32)[1:], apart)


def test_the_guard_costs_little_and_takes_every_size() -> None:
    """1.9 among ones: the bound is 3.6 for 3.61, the ones become sqrt(2 / 3.6) = .74 and after the step .91."""
    left, right = rotation(12, 1), rotation(12, 2)
    values = torch.ones(12, dtype=torch.float64).index_fill(0, torch.tensor([1]), 1.9)
    stepped = torch.linalg.svdvals(rectified(((left * values) @ right.T)[None], 1)[0])
    assert float(stepped[-2]) == pytest.approx(0.912, abs=0.01)
    huge = rectified((1e30 * left @ right.T).float()[None], 1)  # of which float32 cannot hold the square
    assert 0.1 < float(torch.linalg.matrix_norm(huge, ord=2)) <= 1 + 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("square", [1.3, 0.6, 1.0])
def test_long_bases_that_are_safe_are_not_scaled(square: float) -> None:
    """E = (s - 1) I of order 1024, s the square of all singular values: |E^2|_F^(1/2) is 5.7 |s - 1|."""
    v = torch.ones(1, 1)
    for _ in range(10):
        v = torch.kron(v, torch.tensor([[1.0, 1.0], [1.0, -1.0]]))
    stack = torch.stack((v, v * 1.5)) * (square / 1024) ** 0.5  # the second is too large, or not
    assert safe_factor(stack)[0] == 1
    assert float(safe_factor(stack)[1]) == (
        1.0 if 2.25 * square < 1.9 else pytest.approx((2 / (1 + (2.25 * square - 1) * 1024**0.125)) ** 0.5, rel=1e-5)
    )


@pytest.mark.parametrize("shape", [(40, 40), (40, 7), (1, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_bases_come_back_orthonormal(shape: tuple[int, int], dtype: torch.dtype) -> None:
    """Four steps: 1e-6 is the rounding of float32."""
    q = torch.linalg.qr(normal(*shape, seed=5)).Q.to(dtype)
    v = again(Orthogonal(inner=INT4, rectify=4), q, "basis")
    assert v.shape == shape and v.dtype == dtype
    assert float((v.mT @ v - torch.eye(shape[1])).abs().max()) < 2e-6
    assert float((v - q).norm(dim=0).max()) < 0.12  # of a block of 40 numbers in 4 bits


# Laws of all structures.


@each_structure
def test_zero_is_zero_and_nothing_given_is_written_to(name: str) -> None:
    quantizer, zero = STRUCTURES[name], torch.zeros(4, 9, 9, dtype=torch.float64)
    assert not quantizer.decode(quantizer.encode(zero), slot(name, 9), torch.float64).any()
    x = example(name)
    parts = quantizer.encode(x)
    copies = {key: part.clone() for key, part in parts.items()}
    quantizer.decode(parts, slot(name, 9), torch.float64)
    quantizer.encode(x, parts)
    assert torch.equal(x, example(name)) and all(torch.equal(parts[key], copies[key]) for key in copies)
    after = quantizer.encode(zero, parts)
    assert not quantizer.decode(after, slot(name, 9), torch.float64).any() and set(after) == set(parts)


@each_structure
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_names_and_dtypes_of_parts_do_not_depend_on_what_was_before(name: str, dtype: torch.dtype) -> None:
    quantizer, x = STRUCTURES[name], example(name).to(dtype)
    one = quantizer.encode(x)
    two = quantizer.encode(x, one)
    assert [(k, v.dtype, v.shape) for k, v in one.items()] == [(k, v.dtype, v.shape) for k, v in two.items()]
    assert all("/" not in key and len(part) == 4 for key, part in one.items())
    assert quantizer.decode(two, slot(name, 9), dtype).dtype == dtype


@each_structure
def test_matrices_are_coded_one_by_one(name: str) -> None:
    """1e-12: products of a stack may be summed in another order."""
    quantizer, x = STRUCTURES[name], example(name)
    first = quantizer.encode(x)
    parts = quantizer.encode(x.flip(-1, -2), first)
    whole = quantizer.decode(parts, slot(name, 9), torch.float64)
    for rows in ([2], [3, 1]):
        alone = quantizer.encode(x[rows].flip(-1, -2), {key: part[rows] for key, part in first.items()})
        back = quantizer.decode(alone, slot(name, 9), torch.float64)
        assert torch.allclose(back, whole[rows], rtol=1e-12, atol=1e-12)


@each_structure
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_matrix_that_is_not_finite_leaves_the_others_exact(name: str, value: float) -> None:
    quantizer, x = STRUCTURES[name], example(name)
    bad = x.clone()
    bad[1, 2, 3] = bad[1, 3, 2] = value
    before = quantizer.encode(x)
    for old in (None, before):
        good, spoiled = (quantizer.decode(quantizer.encode(y, old), slot(name, 9), torch.float64) for y in (x, bad))
        assert torch.equal(good[[0, 2, 3]], spoiled[[0, 2, 3]])
        if name in ("eigen", "cholesky", "error_feedback"):  # what is factorized keeps what was there
            kept = torch.zeros(9, 9) if old is None else quantizer.decode(old, slot(name, 9), torch.float64)[1]
            assert torch.equal(spoiled[1], kept.double())
        else:
            assert not spoiled[1].isfinite().all()


@each_structure
@pytest.mark.parametrize("d", [1, 2, 3, 8, 65])
def test_every_order_comes_back(name: str, d: int) -> None:
    """Orders odd and even; half of the matrix' norm: of a basis that starts far off, `eigen` keeps most of it."""
    if "cholesky" in type(STRUCTURES[name]).__name__.lower() and d == 1:
        assert STRUCTURES[name].unsupported(slot(name, 1)) is not None
        return
    x = example(name, 2, d)
    back = STRUCTURES[name].decode(STRUCTURES[name].encode(x), slot(name, d), torch.float64)
    assert back.shape == x.shape and float((back - x).norm()) <= 0.6 * float(x.norm())


@each_structure
@pytest.mark.parametrize("scale", [2.0**-80, 2.0**60])
def test_statistics_of_any_size_are_stored_alike(name: str, scale: float) -> None:
    """Powers of two are exact in every step but the root of a size; 1e-5: of float32."""
    if name == "orthogonal":
        return
    quantizer, x = STRUCTURES[name], example(name).float()
    one, other = (quantizer.decode(quantizer.encode(y), slot(name, 9), torch.float32) for y in (x, x * scale))
    assert torch.allclose(other / scale, one, rtol=1e-5, atol=1e-6)


@each_structure
def test_random_numbers_reach_the_inner_format(name: str) -> None:
    """Each part of a structure draws its own."""
    quantizer, purposes = STRUCTURES[name], []

    def uniform(like: Tensor, purpose: str) -> Tensor:
        purposes.append(purpose)
        return torch.rand_like(like)

    inner = Int8(rounding="stochastic", min_elements=1)
    if isinstance(quantizer, ExactDiagonal) and name == "triangular":
        made: Quantizer = quantizer.replace(inner=Symmetric(inner=inner))
    else:
        made = quantizer.replace(inner=inner)
    made.encode(example(name), None, uniform)
    assert len(purposes) == len(set(purposes)) == (2 if name == "error_feedback" else 1)


@each_structure
def test_what_a_code_means_is_what_its_inner_format_says(name: str) -> None:
    assert STRUCTURES[name].codebook_id() == INT4.codebook_id() != ""
    assert STRUCTURES[name].format() != INT4.format()


@pytest.mark.parametrize(
    ("quantizer", "slot", "says"),
    [
        (ExactDiagonal(), Slot((64, 32), role="statistic"), ("square", "statistic")),
        (ExactDiagonal(), Slot((64, 64), role="basis"), ("statistic", "root", "basis")),
        (ExactDiagonal(), Slot((63, 63), role="root"), (4096,)),
        (Orthogonal(), Slot((64, 64), role="root"), ("orthonormal", "root")),
        (Orthogonal(), Slot((64, 65), role="basis"), ("orthonormal",)),
        (Orthogonal(), Slot((64,), role="basis"), ("orthonormal",)),
        (Orthogonal(), Slot((64, 63), role="basis"), (4096,)),
        (Cholesky(inner=INT4), Slot((1, 1), role="statistic"), (2,)),
        (Cholesky(), Slot((64, 64), role="second_moment"), ("second_moment",)),
        (Eigen(), Slot((64, 64), role="root"), ("root",)),
        (Symmetric(inner=Int4()), Slot((8, 8), role="root"), (4096,)),
    ],
)
def test_slots_that_do_not_fit_are_refused(quantizer: Quantizer, slot: Slot, says: tuple[object, ...]) -> None:
    problem = quantizer.unsupported(slot)
    assert problem is not None
    with refused(ValueError, *says):
        raise ValueError(problem)


def test_slots_that_fit_are_not() -> None:
    for quantizer in (ExactDiagonal(), Cholesky(), Eigen(), Symmetric(inner=Int4())):
        assert quantizer.unsupported(Slot((64, 64), role="statistic")) is None
    assert Orthogonal().unsupported(Slot((128, 32), role="basis")) is None
    assert Symmetric().unsupported(Slot((8, 8), role="root")) is None


# Each structure on its own.


def test_the_diagonal_is_exact_and_symmetry_is_kept() -> None:
    a = definite(3, 17)
    for inner in (INT4, Symmetric(inner=INT4)):
        b = ExactDiagonal(inner=inner)
        back = b.decode(b.encode(a), Slot((17, 17), role="root"), torch.float64)
        assert torch.equal(back.diagonal(dim1=1, dim2=2), a.diagonal(dim1=1, dim2=2)) and torch.equal(back, back.mT)
    raw = ExactDiagonal(inner=INT4, symmetrize=False)
    back = raw.decode(raw.encode(a), Slot((17, 17), role="root"), torch.float64)
    rest = a - torch.diag_embed(a.diagonal(dim1=1, dim2=2))
    expected = INT4.decode(INT4.encode(rest), Slot((17, 17)), torch.float64)
    assert torch.equal(back - torch.diag_embed(back.diagonal(dim1=1, dim2=2)), expected)


@pytest.mark.parametrize("d", [1, 2, 3, 8, 33])
def test_a_folded_triangle_is_the_triangle(d: int) -> None:
    """An inner format that rounds nothing gives everything back, from exactly half of the entries."""
    x = normal(2, d, d, seed=d).float()
    a = x + x.mT
    packed = Symmetric(inner=Float32())
    parts = packed.encode(a)
    assert sum(part[0].numel() for part in parts.values()) == d * (d + 1) // 2
    assert torch.equal(packed.decode(parts, Slot((d, d)), torch.float32), a)


@pytest.mark.parametrize("codebook", ["linear_square", "dynamic"])
def test_factorized_matrices_stay_semi_definite_and_coded_ones_do_not(codebook: Any) -> None:
    """1e-12 of the largest eigenvalue: rounding of the products in float64."""
    inner, a = Int4(codebook=codebook, min_elements=1), definite(1, 48, seed=2)[0]
    a = torch.linalg.matrix_power(a, 4)  # condition near 1e6
    for quantizer in (Cholesky(inner=inner), Cholesky(inner=inner, error_feedback=0.5), Eigen(inner=inner)):
        values = torch.linalg.eigvalsh(again(quantizer, a))
        assert float(values[0]) >= -1e-12 * float(values[-1])
    assert float(torch.linalg.eigvalsh(again(ExactDiagonal(inner=inner), a))[0]) < -1e-3 * float(a.norm())


def test_eigenvalues_below_zero_become_zero() -> None:
    a = definite(2, 9) - 2 * torch.eye(9)
    assert bool((torch.linalg.eigvalsh(a)[:, 0] < -0.5).all())
    values = Eigen(inner=INT4).encode(a)["values"]
    assert bool((values >= 0).all()) and bool((values == 0).any(1).all())


@pytest.mark.parametrize("feedback", [None, 0.0, 0.75])
def test_a_cholesky_factor_and_its_error_follow_their_definition(feedback: float | None) -> None:
    """Coded number by number, so that the order in which they are stored does not matter. 1e-12: Cholesky's rounding,
    which could move a code only where a number lies that near to the middle of two."""
    quantizer, parts = Cholesky(inner=BF16, error_feedback=feedback), None
    error = torch.zeros(7, 7, dtype=torch.float64)
    for seed in range(4):
        a = definite(1, 7, seed)
        parts = quantizer.encode(a, parts)
        c = torch.linalg.cholesky(a[0] + 1e-6 * a[0].abs().max() * torch.eye(7))
        wanted = c.tril(-1) + error
        made = wanted.bfloat16().double()
        if feedback is not None:
            error = (feedback * error + (1 - feedback) * (wanted - made)).bfloat16().double()
        d = made + torch.diag(c.diagonal())
        back = quantizer.decode(parts, Slot((7, 7), role="statistic"), torch.float64)[0]
        assert torch.allclose(back, d @ d.T, rtol=0, atol=1e-12)


def test_an_error_that_is_carried_does_not_touch_the_factor_beside_it() -> None:
    """They share no block: what is stored of C first is the same with and without."""
    a, here = definite(2, 40), Slot((40, 40), role="statistic")
    one, two = (Cholesky(inner=INT4, error_feedback=b) for b in (None, 0.0))
    back = [q.decode(q.encode(a), here, torch.float64) for q in (one, two)]
    assert torch.equal(*back)


def averaged(quantizer: Quantizer, beta: float = 0.95, d: int = 64, updates: int = 120) -> float:
    """Relative error of a running mean of Gram matrices that is stored after every update."""
    exact, parts, here = torch.zeros(1, d, d, dtype=torch.float64), None, Slot((d, d), role="statistic")
    parts = quantizer.encode(exact)
    shape = 10 ** torch.linspace(0, 1.9, d, dtype=torch.float64)[:, None]  # condition 6e3 of the covariance
    turn = rotation(d, 1)
    for step in range(updates):
        g = turn @ (shape * normal(1, d, d, seed=step))
        exact = beta * exact + (1 - beta) * g @ g.mT
        a = beta * quantizer.decode(parts, here, torch.float64) + (1 - beta) * g @ g.mT
        parts = quantizer.encode(a, parts)
    return float((quantizer.decode(parts, here, torch.float64) - exact).norm() / exact.norm())


@pytest.mark.slow
def test_error_feedback_undoes_what_accumulates_in_a_running_mean() -> None:
    """Half, with room: without it a third of the mean or more is lost, with it about a tenth."""
    without, half, full = (averaged(Cholesky(inner=INT4, eps=1e-4, error_feedback=b)) for b in (None, 0.5, 0.0))
    assert full < 0.5 * without and half < 0.5 * without


def test_a_matrix_without_a_factor_gets_a_larger_ridge_or_keeps_what_was_there() -> None:
    here, quantizer = Slot((6, 6), role="statistic"), Cholesky(inner=INT4)
    good = definite(3, 6)
    before = quantizer.encode(good)
    a = good.clone()
    a[1] -= 1e-5 * a[1].abs().max() * torch.eye(6) + torch.linalg.eigvalsh(a[1])[0] * torch.eye(6)  # slightly negative
    a[2] -= 2 * torch.linalg.eigvalsh(a[2])[-1] * torch.eye(6)  # negative
    after = quantizer.encode(a, before)
    back, old = (quantizer.decode(parts, here, torch.float64) for parts in (after, before))
    assert torch.equal(back[2], old[2]) and not torch.equal(back[1], old[1])
    assert float((back[1] - a[1]).norm()) < 0.2 * float(a[1].norm())
    assert not quantizer.decode(quantizer.encode(a), here, torch.float64)[2].any()


def test_gram_matrices_of_few_gradients_have_factors_in_float32() -> None:
    """Rank 3 of 96: rounding alone makes the least eigenvalues negative."""
    g = normal(4, 96, 3, seed=1).float()
    a = g @ g.mT
    back = Cholesky(inner=Float32()).decode(
        Cholesky(inner=Float32()).encode(a), Slot((96, 96), role="statistic"), torch.float32
    )
    assert float((back - a).norm()) < 5e-3 * float(a.norm())


@pytest.mark.parametrize("steps", [1, 3])
def test_eigenvectors_follow_by_power_steps(steps: int) -> None:
    """V Diag(l) V^T is compared, the same for any signs of columns; up to them QR is unique. 1e-9: rounding, which
    could move a bfloat16 only near the middle of two."""
    quantizer, parts = Eigen(inner=BF16, rectify=2, steps=steps), None
    v = torch.eye(8, dtype=torch.float64)
    for seed in range(3):
        a = definite(1, 8, seed)[0]
        parts = quantizer.encode(a[None], parts)
        p = v
        for _ in range(steps):
            p = torch.linalg.qr(a @ p).Q
        values = (p.T @ a @ p).diagonal()
        v = p.bfloat16().double()
        for _ in range(2):
            v = 1.5 * v - 0.5 * v @ v.T @ v
        back = quantizer.decode(parts, Slot((8, 8), role="statistic"), torch.float64)[0]
        assert torch.allclose(back, (v * values) @ v.T, rtol=0, atol=1e-9)
        assert float(parts["values"].sum()) == pytest.approx(float(a.trace()), rel=1e-12)


def test_a_statistic_that_stays_is_found() -> None:
    """Power steps converge by the ratio of neighboring eigenvalues, 1/2 here; float32 eigenvectors, rectified."""
    u = rotation(8, 4)
    a = ((u * 2.0 ** torch.arange(8)) @ u.T)[None]
    quantizer, parts = Eigen(inner=Float32()), None
    for _ in range(40):
        parts = quantizer.encode(a, parts)
    back = quantizer.decode(parts, Slot((8, 8), role="statistic"), torch.float64)
    assert float((back - a).norm()) < 1e-5 * float(a.norm())


def test_a_zero_statistic_keeps_its_basis() -> None:
    a, quantizer = definite(1, 12), Eigen(inner=INT4, rectify=8)
    parts = quantizer.encode(a)
    parts = quantizer.encode(torch.zeros_like(a), quantizer.encode(a, parts))
    assert not parts["values"].any()
    turned = Orthogonal(inner=INT4, rectify=8)
    v = turned.decode(parts, Slot((12, 12), role="basis"), torch.float64)[0]
    off = (v.T @ a[0] @ v).fill_diagonal_(0.0)
    assert float(off.norm()) < 0.9 * float((a[0] - torch.diag(a[0].diagonal())).norm())


# Bytes.

ROW, D = 1024 // 2 + 1024 // 64 * 4, 1024


def stored_bytes(quantizer: Quantizer) -> int:
    """Of one matrix of order 1024, counted."""
    parts = quantizer.encode(torch.zeros(1, D, D))
    return sum(part.numel() * part.element_size() for part in parts.values())


def test_bytes_of_each_structure() -> None:
    """Folded rows of 1023 numbers take the bytes of 1024. A triangle with its diagonal is one row of D (D + 1) / 2."""
    vector = 4 * D
    assert stored_bytes(ExactDiagonal()) == stored_bytes(Eigen()) == vector + D * ROW
    assert stored_bytes(Orthogonal()) == D * ROW
    assert stored_bytes(Cholesky()) == vector + D // 2 * ROW
    assert stored_bytes(Cholesky(error_feedback=0.0)) == vector + D * ROW
    assert stored_bytes(ExactDiagonal(inner=Symmetric(inner=Int4()))) == vector + D * (D + 1) // 2 * (32 + 4) // 64


@pytest.mark.parametrize(
    ("statistic", "root", "published", "tolerance"),
    [
        (Eigen(), ExactDiagonal(), 2.266, 1e-3),
        (Cholesky(error_feedback=0.0), ExactDiagonal(), 2.266, 1e-3),
        (Cholesky(), ExactDiagonal(), 1.703, 1e-3),
        (
            Cholesky(),
            ExactDiagonal(inner=Symmetric(inner=Int4())),
            1.140,
            2e-3,
        ),  # the diagonal of a triangle is coded too, as 0
        (*[ExactDiagonal(inner=Int8())] * 2, 4.078, 1e-3),
        (*[ExactDiagonal(inner=Int4(block_size=128))] * 2, 2.141, 1e-3),
    ],
)
def test_bytes_per_parameter_of_shampoo(
    statistic: Quantizer, root: Quantizer, published: float, tolerance: float
) -> None:
    """A parameter of 1024 x 1024 has two of each."""
    assert 2 * (stored_bytes(statistic) + stored_bytes(root)) / D**2 == pytest.approx(published, abs=tolerance)


# In an optimizer.

FOUR = {"kind": "int4", "codebook": "linear_square", "block_size": 8, "min_elements": 1}
DIAGONAL = {"kind": "exact_diagonal", "inner": FOUR}
SIXTEEN = {"kind": "exact_diagonal", "inner": {"kind": "int16", "min_elements": 1}}
STORAGES: dict[str, dict[str, Any]] = {
    "eigen": {"statistic": {"kind": "eigen", "inner": FOUR}, "root": DIAGONAL},
    "cholesky": {"statistic": {"kind": "cholesky", "inner": FOUR, "error_feedback": 0.0}, "root": DIAGONAL},
    "exact_diagonal": {"statistic": SIXTEEN, "root": {**DIAGONAL, "inner": {"kind": "symmetric", "inner": FOUR}}},
    "orthogonal": {"statistic": SIXTEEN, "basis": {"kind": "orthogonal", "inner": FOUR, "rectify": 2}},
}
EVERY = {"kind": "every", "steps": 3, "start": 2, "stagger": "none"}
SHAMPOO = {"kind": "shampoo", "solver": {"kind": "eigh", "eps": 1e-4}, "refresh": EVERY}
SOAP = {"kind": "eigenbasis", "inner": [{"kind": "momentum"}, {"kind": "rms"}], "refresh": EVERY}


def declared(name: str) -> dict[str, Any]:
    update = [SOAP] if name == "orthogonal" else [{"kind": "graft", "direction": SHAMPOO, "magnitude": {"kind": "rms"}}]
    return {"update": update, "routes": [], "storage": STORAGES[name]}


def trained(recipe: Any, steps: int = 120) -> tuple[float, Optimizer, torch.nn.Parameter]:
    """Loss, as a fraction of the first, of a linear regression whose inputs differ in size by 100."""
    x, wanted = normal(64, 16, seed=1).float() * 10 ** torch.linspace(-1, 1, 16), normal(16, 12, seed=2).float()
    parameter = torch.nn.Parameter(torch.zeros(16, 12))
    optimizer = Optimizer([parameter], recipe, lr=0.05)
    losses = []
    for _ in range(steps):
        loss = (x @ (parameter - wanted)).square().mean()
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses[-1] / losses[0], optimizer, parameter


@pytest.mark.slow
@pytest.mark.parametrize("name", STORAGES)
def test_coded_factors_train(name: str) -> None:
    """A hundredth of the loss, which without storage is below a thousandth for all of them."""
    plain, coded = (trained(recipe)[0] for recipe in ({**declared(name), "storage": {}}, declared(name)))
    assert plain < 1e-3 and coded < 0.01


@pytest.mark.slow
def test_the_basis_of_soap_stays_orthonormal() -> None:
    """Two steps after 4 bits in blocks of 8: |I - V^T V| is about 1e-3 a column."""
    _, optimizer, parameter = trained(declared("orthogonal"))
    state = optimizer.state[parameter]
    for axis, d in enumerate((16, 12)):
        start = f"0/update.eigenbasis/basis.{axis}/"
        parts = {key.removeprefix(start): value[None] for key, value in state.items() if key.startswith(start)}
        quantizer = Orthogonal(inner=Int4(block_size=8, min_elements=1), rectify=2)
        v = quantizer.decode(parts, Slot((d, d), role="basis"), torch.float32)[0]
        assert float((v.T @ v - torch.eye(d)).norm() / d**0.5) < 5e-3


@pytest.mark.slow
def test_a_slot_keeps_its_shape_inside() -> None:
    """The inner format is asked about the matrix that is stored, which size limits are about."""
    limited = Int4(min_elements=100)
    assert Symmetric(inner=limited).unsupported(Slot((10, 10), role="root")) is None
    assert Orthogonal(inner=limited).unsupported(replace(slot("orthogonal", 20, 5))) is None
    assert Orthogonal(inner=limited).unsupported(slot("orthogonal", 20, 4)) is not None
