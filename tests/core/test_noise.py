"""Noise that belongs to a block: the numbers are random, and nothing but (seed, step, stream, place) decides them.

Statistical tolerances are five standard errors of what is estimated: a fair generator fails one in two million times,
and what is drawn is always the same.
"""

import math

import pytest
import torch
from torch import Tensor

from eigengraft import noise

WORD = (1 << 64) - 1


def splitmix(state: int, count: int) -> list[int]:
    """SplitMix64 in exact arithmetic (Steele, Lea & Flood 2014, figure 16, with the usual constants)."""
    out = []
    for _ in range(count):
        state = (state + 0x9E3779B97F4A7C15) & WORD
        z = state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & WORD
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & WORD
        out.append(z ^ (z >> 31))
    return out


def keys(n: int, step: int = 3) -> tuple[Tensor, Tensor]:
    """Seeds 0 ... n - 1, the hardest for a hash, and their steps."""
    return torch.arange(n), torch.full((n,), step)


def unsigned(words: Tensor) -> list[int]:
    return [word & WORD for word in words.flatten().tolist()]


def test_words_are_splitmix64_of_the_key() -> None:
    zero = torch.zeros(1, dtype=torch.int64)
    ours = unsigned(noise.words(zero, zero, 5))  # the finalizer maps 0 to 0, so that the key is 0
    assert ours == splitmix(0, 5)
    assert ours[:2] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4]  # the published first outputs for seed 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("draw", [noise.normal, noise.uniform])
def test_a_stack_is_its_rows_in_any_order(draw: object, dtype: torch.dtype) -> None:
    assert callable(draw)
    seeds = torch.tensor([5, -(2**63), 2**63 - 1, 0, 77])
    steps = torch.tensor([1, 2, 3, 10**9, 0])
    for shape in ((1,), (7,), (3, 5), (2, 3, 4), ()):
        together = draw(seeds, steps, shape, dtype)
        assert together.shape == (5, *shape) and together.dtype == dtype
        for i in range(5):
            assert torch.equal(draw(seeds[i : i + 1], steps[i : i + 1], shape, dtype)[0], together[i])
        order = torch.tensor([3, 1, 4, 0, 2])
        assert torch.equal(draw(seeds[order], steps[order], shape, dtype), together[order])


def test_the_global_generator_is_neither_read_nor_moved() -> None:
    draws = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        draws.append(noise.normal(*keys(4), (6,), torch.float64))
        assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(*draws)


def test_numbers_of_a_longer_block_continue_those_of_a_shorter_one() -> None:
    short, long = noise.uniform(*keys(3), (8,), torch.float64), noise.uniform(*keys(3), (5, 4), torch.float64)
    assert torch.equal(long.flatten(1)[:, :8], short)


def test_every_bit_is_a_fair_coin() -> None:
    words = noise.words(*keys(200), 500)
    n = words.numel()
    for bit in range(64):
        share = ((words >> bit) & 1).double().mean().item()
        assert abs(share - 0.5) <= 5 * 0.5 / math.sqrt(n), bit


@pytest.mark.parametrize("place", ["seed", "step", "stream"])
def test_one_bit_of_the_key_flips_half_of_the_words(place: str) -> None:
    """Over 64 flipped bits x 50 words x 64 bits of a word: half, five standard errors; no bit of a key is weak."""
    shares = []
    for bit in range(63):
        key = {"seed": 123, "step": 45, "stream": 6}
        drawn = []
        for flip in (0, 1 << bit):
            now = {**key, place: key[place] ^ flip}
            seed, step = torch.tensor([now["seed"]]), torch.tensor([now["step"]])
            drawn.append(unsigned(noise.words(seed, step, 50, now["stream"])))
        flipped = sum((a ^ b).bit_count() for a, b in zip(*drawn, strict=True))
        shares.append(flipped / (50 * 64))
    assert all(abs(share - 0.5) <= 5 * 0.5 / math.sqrt(50 * 64) for share in shares)


def test_uniform_numbers_fill_their_interval() -> None:
    x = noise.uniform(*keys(100), (1000,), torch.float64).flatten()
    n = x.numel()
    assert float(x.min()) >= 0 and float(x.max()) < 1
    assert abs(float(x.mean()) - 0.5) <= 5 / math.sqrt(12 * n)
    counts = torch.histc(x, bins=64, min=0, max=1)
    chi2 = float(((counts - n / 64) ** 2 / (n / 64)).sum())
    assert abs(chi2 - 63) <= 5 * math.sqrt(2 * 63)


@pytest.mark.parametrize(
    ("dtype", "digits"), [(torch.float64, 53), (torch.float32, 24), (torch.bfloat16, 8), (torch.float16, 11)]
)
def test_uniform_numbers_are_exact_and_below_one_in_every_dtype(dtype: torch.dtype, digits: int) -> None:
    x = noise.uniform(*keys(50), (2000,), dtype)
    assert x.dtype == dtype and float(x.max()) < 1 and float(x.min()) >= 0
    scaled = x.double() * 2.0**digits
    assert torch.equal(scaled, scaled.round())
    assert (scaled.long() & 1).any() and float(x.double().mean()) == pytest.approx(0.5, abs=0.01)


def test_normal_numbers_have_the_moments_and_the_distribution() -> None:
    x = noise.normal(*keys(200), (2000,), torch.float64).flatten()
    n = x.numel()
    # E x^k and the variance of x^k for k = 1 ... 4: 0, 1, 0, 3 and 1, 2, 15, 96
    for power, (mean, variance) in enumerate([(0, 1), (1, 2), (0, 15), (3, 96)], start=1):
        assert abs(float(x.pow(power).mean()) - mean) <= 5 * math.sqrt(variance / n)
    for point in (-3.0, -1.5, -0.5, 0.0, 1.0, 2.0, 3.5):
        share = 0.5 * (1 + math.erf(point / math.sqrt(2)))
        assert abs(float((x <= point).double().mean()) - share) <= 5 * math.sqrt(share * (1 - share) / n)
    assert x.isfinite().all() and float(x.abs().max()) <= math.sqrt(64 * math.log(2))


def test_seeds_steps_streams_and_places_are_independent() -> None:
    """Correlations, of numbers and of their squares, between neighbors of each kind."""
    base = noise.normal(*keys(200), (500,), torch.float64)
    others = {
        "seed": noise.normal(torch.arange(1, 201), torch.full((200,), 3), (500,), torch.float64),
        "step": noise.normal(*keys(200, step=4), (500,), torch.float64),
        "stream": noise.normal(*keys(200), (500,), torch.float64, stream=1),
        "place": base.roll(1, dims=1),
    }
    for name, other in others.items():
        n = base.numel()
        assert abs(float((base * other).mean())) <= 5 / math.sqrt(n), name
        assert abs(float(((base**2 - 1) * (other**2 - 1)).mean())) <= 5 * 2 / math.sqrt(n), name


def test_no_two_of_many_keys_agree() -> None:
    """64-bit words of 90000 keys: two agree with probability 2e-10."""
    seeds = torch.arange(100).repeat(300)
    steps = torch.arange(300).repeat_interleave(100)
    first = torch.cat([noise.words(seeds, steps, 1, stream) for stream in range(3)])
    assert first.unique().numel() == first.numel()
