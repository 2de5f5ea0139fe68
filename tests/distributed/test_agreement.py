"""What ranks compare: bits of values at construction."""

import pytest
import torch

from eigengraft.optimizers.sharding import agreement
from eigengraft.optimizers.sharding.agreement import sum_bits

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64, torch.float8_e4m3fn)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_checksum_sees_any_bit_and_any_exchange_of_entries(dtype: torch.dtype) -> None:
    x = torch.arange(35.0).view(5, 7).to(dtype)
    found = sum_bits(x)
    assert found.dtype == torch.int64 and torch.equal(found, sum_bits(x.clone()))
    for entry in (0, 17, 34):
        bits = x.clone().view(-1).view(torch.uint8)
        bits[entry * x.element_size()] ^= 1
        assert bool((sum_bits(bits.view(dtype)) != found).all())
    swapped = x.flatten()[[1, 0, *range(2, 35)]]
    assert (sum_bits(swapped) == found).tolist() == [True, False]


def test_a_checksum_follows_the_order_of_entries_not_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(6, 4)
    whole = sum_bits(x)
    assert torch.equal(sum_bits(x.t().contiguous().t()), whole)
    monkeypatch.setattr(agreement, "CHUNK", 5)
    assert torch.equal(sum_bits(x), whole)
    bits = x.flatten().view(torch.int32).tolist()
    assert whole.tolist() == [sum(bits), sum(place * bit for place, bit in enumerate(bits, 1))]


def test_a_checksum_wraps_where_the_sums_are_too_large() -> None:
    bits = [2**63 - 1, 2**62, -5]
    x = torch.tensor(bits).view(torch.float64)
    sums = [sum(bits), sum(place * bit for place, bit in enumerate(bits, 1))]
    assert sum_bits(x).tolist() == [(s + 2**63) % 2**64 - 2**63 for s in sums]
