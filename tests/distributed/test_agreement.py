"""What ranks compare: bits of values at construction, numbers in every step."""

import math

import pytest
import torch
from torch import nn

from eigengraft.optimizers.apply.write import Hyper
from eigengraft.optimizers.sharding import agreement, fingerprint
from eigengraft.optimizers.sharding.agreement import sum_bits
from eigengraft.optimizers.sharding.fingerprint import LENGTH, NUMBERS, UsedGradients, differing, fill_from_device

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


def numbers(**changes: float) -> dict[str, float]:
    values = [0.1 + 0.2, math.pi, 1e-300, 2.0**40 + 1, 0.0]
    return dict(zip(NUMBERS, values, strict=True)) | changes


@pytest.mark.parametrize("ranks", [1, 2, 3, 1000, 4096])
@pytest.mark.parametrize("name", NUMBERS)
def test_the_last_bit_of_a_number_on_one_rank_is_seen_whatever_the_number_of_ranks(name: str, ranks: int) -> None:
    """Sums as an all-reduce of float64 forms them; -1 has the largest parts of 16 bits."""
    for value in (numbers()[name], -1.0, -math.nextafter(0.0, 1.0), math.nextafter(math.inf, 0.0)):
        same = torch.tensor(fingerprint.fingerprint(numbers(**{name: value})), dtype=torch.float64)
        odd = torch.tensor(fingerprint.fingerprint(numbers(**{name: math.nextafter(value, 0.5)})), dtype=torch.float64)
        assert len(same) == LENGTH and differing((same * ranks).tolist()) == []
        total = (torch.stack([same] * (ranks - 1)).sum(0) if ranks > 1 else 0) + odd
        assert differing(total.tolist()) == ([name] if ranks > 1 else [])


def test_many_numbers_at_once_are_told_apart() -> None:
    changed = numbers(lr=0.2, weight_decay=1.0)
    sums = [sum(own) for own in zip(*map(fingerprint.fingerprint, (numbers(), changed, numbers())), strict=True)]
    assert differing(sums) == ["lr", "weight_decay"]
    said = fingerprint.tell_apart(["lr"], [numbers(lr=1.0), changed, changed])
    assert said == "the same lr, got 1 on rank 0, 0.2 on ranks 1, 2"
    assert fingerprint.fingerprint(numbers(lr=-0.0)) == fingerprint.fingerprint(numbers(lr=0.0))


def test_numbers_of_several_groups_are_told_apart() -> None:
    def told(lr: float) -> dict[str, float | torch.Tensor]:
        return dict(fingerprint.step_numbers({0: Hyper(0.1, 0.1, 0.0), 3: Hyper(lr, 0.1, 0.0)}, 5, 0))

    sums = [a + b for a, b in zip(fingerprint.fingerprint(told(0.1)), fingerprint.fingerprint(told(0.2)), strict=True)]
    assert differing(sums, list(told(0.1))) == ["lr of param group 3"]
    assert tuple(fingerprint.step_numbers({3: Hyper(0.1, 0.1, 0.0)}, 5, 0)) == NUMBERS


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_tensor_on_a_device_has_the_fingerprint_of_its_value(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    lr = torch.tensor([0.3], dtype=dtype)
    known = fingerprint.fingerprint(numbers(lr=float(lr)))
    monkeypatch.setattr(fingerprint, "_on_host", lambda x: not isinstance(x, torch.Tensor))
    found = torch.tensor(fingerprint.fingerprint({**numbers(), "lr": lr}), dtype=torch.float64)
    assert found.tolist() != known
    fill_from_device(found, {**numbers(), "lr": lr})
    assert found.tolist() == known


def test_used_gradients_are_known_until_one_is_written() -> None:
    model = nn.Linear(3, 2)
    used = UsedGradients(list(model.parameters()))

    def backward(steps: int) -> None:
        model(torch.ones(1, 3)).sum().backward()
        assert used.times() == 0
        for step in range(steps):
            assert used.times() == step
            used.use()

    assert used.times() == 0
    backward(3)
    backward(2)  # into the same tensors
    model.zero_grad(set_to_none=False)
    assert used.times() == 0
    used.use()
    model.zero_grad()
    assert used.times() == 0
    backward(1)
