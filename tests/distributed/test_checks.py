"""Values that ranks compare: bits of tensors at construction, numbers and norms in every step."""

import math
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from eigengraft.distributed import checks
from eigengraft.distributed.checks import CheckedSums, Field, SameNumbers, checksum
from eigengraft.distributed.gradients import UsedGradients
from eigengraft.distributed.layouts import Layout
from eigengraft.distributed.rank_group import DistributedError, RankGroup
from eigengraft.optimizers.recipe.loading import load_recipe
from eigengraft.optimizers.stacks.placement import ParamSpec, place
from eigengraft.optimizers.stacks.rank_checks import (
    AVERAGE_FIRST,
    NUMBERS,
    SQUARES,
    STEP_ALIKE,
    STEPS,
    RankChecks,
    RankSurvey,
    agreed_numbers,
)
from eigengraft.optimizers.write.write import Hyper

from ..refusals import refused

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64, torch.float8_e4m3fn)
CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_checksum_sees_any_bit_and_any_exchange_of_entries(dtype: torch.dtype) -> None:
    x = torch.arange(35.0).view(5, 7).to(dtype)
    found = checksum(x)
    assert found.dtype == torch.int64 and torch.equal(found, checksum(x.clone()))
    for entry in (0, 17, 34):
        bits = x.clone().view(-1).view(torch.uint8)
        bits[entry * x.element_size()] ^= 1
        assert bool((checksum(bits.view(dtype)) != found).all())
    swapped = x.flatten()[[1, 0, *range(2, 35)]]
    assert (checksum(swapped) == found).tolist() == [True, False]


def test_a_checksum_follows_the_order_of_entries_not_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(6, 4)
    whole = checksum(x)
    assert torch.equal(checksum(x.t().contiguous().t()), whole)
    monkeypatch.setattr(checks, "CHUNK", 5)
    assert torch.equal(checksum(x), whole)
    bits = x.flatten().view(torch.int32).tolist()
    assert whole.tolist() == [sum(bits), sum(place * bit for place, bit in enumerate(bits, 1))]


def test_a_checksum_wraps_where_the_sums_are_too_large() -> None:
    bits = [2**63 - 1, 2**62, -5]
    x = torch.tensor(bits).view(torch.float64)
    sums = [sum(bits), sum(place * bit for place, bit in enumerate(bits, 1))]
    assert checksum(x).tolist() == [(s + 2**63) % 2**64 - 2**63 for s in sums]


class Ranks:
    """Ranks of one process: rank r gives `given[r]`, and rank 0 is the one that asks."""

    def __init__(self, others: Sequence[Tensor], objects: Sequence[Any] = ()) -> None:
        self.others, self.objects, self.calls, self.size = others, objects, list[str](), 1 + len(others)

    def synchronize(self, what: str, remedy: str = "", device: torch.device = CPU) -> None:
        self.calls.append("synchronize")

    def all_reduce(self, values: Tensor, what: str) -> Tensor:
        self.calls.append("all_reduce")
        for other in self.others:
            values += other
        return values

    def all_gather_object(self, mine: Any, what: str) -> list[Any]:
        self.calls.append("all_gather_object")
        return [mine, *self.objects]


def packed(given: Mapping[str, Field]) -> Tensor:
    """The tensor that a rank with these fields adds."""
    return checks.pack_fields({checks.RANKS: [1.0], **given}, CPU)


def reduced(
    mine: SameNumbers, others: Sequence[SameNumbers], objects: Sequence[Any] = (), **absent: Sequence[float]
) -> dict[str, Tensor]:
    """The sums of rank 0; absent: fields that rank 0 gives, where others give zeros."""
    zeros = {name: [0.0] * len(own) for name, own in absent.items()}
    ranks = Ranks([packed({**other.fields(), **zeros}) for other in others], objects)
    return CheckedSums(cast(RankGroup, ranks)).reduce({**mine.fields(), **absent}, [mine.check], CPU, "a test")


def step(**changes: float) -> SameNumbers:
    values = [0.1 + 0.2, math.pi, 1e-300, 2.0**40 + 1, 0.0]
    return SameNumbers("a step", dict(zip(NUMBERS, values, strict=True)) | changes, STEP_ALIKE)


@pytest.mark.parametrize("ranks", [1, 2, 3, 1000, 4096, 2**19])
@pytest.mark.parametrize("name", NUMBERS)
def test_the_last_bit_of_a_number_on_one_rank_is_seen_whatever_the_number_of_ranks(name: str, ranks: int) -> None:
    """Sums as an all-reduce of float64 forms them; -1 has the largest parts of 16 bits."""
    for value in (1e-300, -1.0, -math.nextafter(0.0, 1.0), math.nextafter(math.inf, 0.0)):
        one, other = (torch.tensor(step(**{name: x}).fields()[name]) for x in (value, math.nextafter(value, 0.5)))
        same, odd, total = one.double(), other.double(), torch.tensor(float(ranks))
        assert len(same) == checks.BITS and not checks.deviates(same * ranks, total).any()
        assert bool(checks.deviates(same * (ranks - 1) + odd, total).any()) is (ranks > 1)


def test_numbers_are_named_with_the_ranks_that_have_them() -> None:
    mine, other = step(lr=1.0), step(lr=0.2, weight_decay=1.0)
    where = ("1 on rank 0", "0.2 on ranks 1, 2", "1e-300 on rank 0", "1 on ranks 1, 2")
    with refused(DistributedError, "a step", "lr", "weight_decay", *where, STEP_ALIKE):
        reduced(mine, [other] * 2, [[0.2, 1.0]] * 2)


def test_large_numbers_that_differ_in_a_digit_are_told_apart() -> None:
    mine, other = (SameNumbers("a step", {STEPS: x}, STEP_ALIKE) for x in (12345678.0, 12345679.0))
    with refused(DistributedError, 12345678, 0, 12345679, 1):
        reduced(mine, [other], [[12345679.0]])


def test_minus_zero_is_zero() -> None:
    zero, minus = (SameNumbers("a step", {"lr": value}, STEP_ALIKE) for value in (0.0, -0.0))
    assert reduced(zero, [minus])[checks.RANKS].tolist() == [2.0]


def test_numbers_of_several_groups_are_told_apart() -> None:
    def given(lr: float) -> SameNumbers:
        return SameNumbers("a", agreed_numbers({0: Hyper(0.1, 0.1, 0.0), 3: Hyper(lr, 0.1, 0.0)}, 5, 0), STEP_ALIKE)

    with refused(DistributedError, 3, 0.1, 0, 0.2, 1):
        reduced(given(0.1), [given(0.2)], [[0.2]])
    assert tuple(agreed_numbers({3: Hyper(0.1, 0.1, 0.0)}, 5, 0)) == NUMBERS


def test_a_tensor_keeps_the_value_that_it_had_in_the_step() -> None:
    lr = torch.tensor(0.3)
    found = agreed_numbers({0: Hyper(lr, 0.3, 0.0)}, 0, 0)
    lr.fill_(0.1)
    assert found["lr"] == float(torch.tensor(0.3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_tensor_on_a_device_has_the_bits_of_its_value(dtype: torch.dtype) -> None:
    class OnDevice(Tensor):
        device = torch.device("cuda")  # type: ignore[assignment]

    for value in (0.3, -1.0, -0.0, 1e-30):
        lr = torch.tensor([value], dtype=dtype)
        found = checks.split_bits(lr.as_subclass(OnDevice))
        assert isinstance(found, Tensor) and found.tolist() == checks.split_bits(float(lr))


def norms(*values: float) -> SameNumbers:
    tensor = torch.tensor(values).double()
    return SameNumbers("gradients", {"gradient norm": tensor}, AVERAGE_FIRST, ["a", "b", "c", "d"], 1e-4, "absent")


def test_numbers_may_differ_by_rounding_or_be_absent_or_not_finite() -> None:
    mine = norms(1.012345678, 0.0, math.nan, 4.0)
    reduced(mine, [norms(1.01235, 2.0, 3.0, 4.0)], absent=[0.0, 1.0, 0.0, 0.0])
    where = ("1.01235 on rank 0", "1 on rank 1", "0 on rank 0", "2 on rank 1", "4 on rank 0", "5 on rank 1")
    with refused(DistributedError, "gradients", *(f"gradient norm of {name}" for name in "abd"), *where) as caught:
        reduced(mine, [norms(1.0, 2.0, 3.0, 5.0)], [[1.0, 2.0, 5.0]], absent=[0.0] * 4)
    assert "norm of c" not in str(caught.value)
    with refused(DistributedError, 1):
        reduced(norms(1, 2, 3, 4), [norms(2, 3, 4, 5)], [[2.0, 3.0, 4.0]], absent=[0.0] * 4)


@pytest.mark.parametrize("late", [False, True])
def test_a_call_is_one_reduction_and_raises_at_once_or_in_the_next(late: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first check of the list that fails is the one that raises; calls after an error are as if without it."""

    def check(ranks: RankGroup, sums: Mapping[str, Tensor], outcome: str) -> None:
        if bool(sums["failed"].any()):
            raise ArithmeticError(outcome)

    def call() -> object:
        return sums.reduce({"failed": [0.0], **same.fields()}, [check, same.check], CPU, "a test")

    same, other = step(), step(lr=1.0)
    ranks = Ranks([packed({"failed": [1.0], **other.fields()})])
    sums = CheckedSums(cast(RankGroup, ranks))
    monkeypatch.setattr(CheckedSums, "reads_at_once", lambda *_: not late)
    if late:
        call()
    before = len(ranks.calls)
    with pytest.raises(ArithmeticError) as caught:
        call()
    assert str(caught.value) == ("found one step later" if late else "nothing was changed")
    assert ranks.calls[before:] == ([] if late else ["synchronize", "all_reduce"])
    ranks.others = [packed({"failed": [0.0], **same.fields()})]
    for _ in range(3):
        assert call()


class Alike(Ranks):
    """Two ranks that give the same."""

    def all_reduce(self, values: Tensor, what: str) -> Tensor:
        return values * 2


def two_ranks(layout: Layout) -> RankChecks:
    """The checks of two ranks that share a parameter of shape (2, 2) in that layout."""
    recipe, ranks = load_recipe("shampoo"), Alike([torch.zeros(0)])
    spec = ParamSpec("w", "", (2, 2), torch.float32, CPU, place(recipe, "", layout))
    group = SimpleNamespace(all_ranks=ranks, rank=0, size=2)
    return RankChecks(cast(RankGroup, group), [spec], recipe.failure, [False])


def survey(own: RankChecks, gradient: Tensor) -> RankSurvey:
    return own.survey([gradient], np.array([True]), agreed_numbers({}, 1, 0), False, {})


def test_failed_roots_are_an_error_once() -> None:
    """A run that catches it goes on: the roots may be found again after it."""
    own = two_ranks(Layout.replicate((2, 2), 2))
    survey(own, torch.ones(2, 2))
    own.failed.add(0)
    with refused(ArithmeticError, "w"):
        survey(own, torch.ones(2, 2))
    survey(own, torch.ones(2, 2))


def test_squares_are_of_the_gradient_however_many_ranks_hold_it() -> None:
    half = torch.tensor([[3.0, 4.0]])
    assert survey(two_ranks(Layout.replicate((2, 2), 2)), half.expand(2, 2)).squares.tolist() == pytest.approx([50.0])
    assert survey(two_ranks(Layout.by_rows((2, 2), 2)), half).squares.tolist() == pytest.approx([50.0])


@pytest.mark.parametrize(("fraction", "usable"), [(0.4, True), (0.6, False)])
def test_a_divided_gradient_is_too_large_where_the_undivided_one_is(fraction: float, usable: bool) -> None:
    """The squares of each half, two entries, are this fraction of the largest number of float32."""
    entry = (torch.finfo(torch.float32).max * fraction / 2) ** 0.5
    found = survey(two_ranks(Layout.by_rows((2, 2), 2)), torch.full((1, 2), entry))
    assert found.usable([0], True).tolist() == [usable]


def test_values_that_ranks_do_not_share_are_found_by_name_and_rank() -> None:
    others: list[dict[str, str]] = [
        {"recipe": "one", "copies": "a"},
        {"recipe": "two"},
        {"recipe": "one", "copies": "a"},
    ]
    ranks = cast(RankGroup, Ranks([torch.zeros(0)] * 3, others))
    found = checks.gather_differences(ranks, {"recipe": "one", "alone": "b"}, "a test")
    assert found == {"recipe": {0: "one", 1: "one", 2: "two", 3: "one"}}
    assert checks.by_value(found["recipe"]) == "one on ranks 0, 1, 3, two on rank 2"


def test_fields_of_one_process_stay_where_they_are() -> None:
    found = checks.gather_fields(None, {"level": [2.0], "loss": torch.tensor([0.5]).double()}, torch.device("meta"), "")
    assert {name: x.tolist() for name, x in found.items()} == {"level": [[2.0]], "loss": [[0.5]]}


def test_fields_are_packed_in_their_order_wherever_they_are() -> None:
    fields: dict[str, Field] = {
        "a": [1.0, 2.0],
        "b": torch.tensor([3.0]).double(),
        "c": (4.0,),
        "d": torch.zeros(0).double(),
    }
    found = checks.pack_fields(fields, CPU)
    assert found.tolist() == [1, 2, 3, 4] and found.dtype == torch.float64
    again = checks.unpack_fields(found[None], {name: len(values) for name, values in fields.items()})
    assert {name: x.tolist() for name, x in again.items()} == {"a": [[1, 2]], "b": [[3]], "c": [[4]], "d": [[]]}
    assert checks.pack_fields({"b": fields["b"]}, CPU).tolist() == [3]


def test_used_gradients_are_known_until_one_is_written() -> None:
    model = nn.Linear(3, 2)
    used = UsedGradients(list(model.parameters()))

    def backward(steps: int) -> None:
        model(torch.ones(1, 3)).sum().backward()
        assert used.count() == 0
        for step in range(steps):
            assert used.count() == step
            used.record_step()

    assert used.count() == 0
    backward(3)
    backward(2)  # into the same tensors
    model.zero_grad(set_to_none=False)
    assert used.count() == 0
    used.record_step()
    assert used.count() == 1
    model.zero_grad()
    assert used.count() == 0
    backward(1)


@pytest.mark.parametrize("factor", [0.5, torch.tensor(0.5, dtype=torch.float64)], ids=["number", "tensor"])
def test_squares_follow_gradients_that_are_scaled(factor: float | Tensor) -> None:
    squares = torch.tensor([4.0, 0.0, 1.0], dtype=torch.float64)
    own = RankSurvey(["a", "b", "c"], np.ones(3, dtype=np.bool_), {SQUARES: squares}, torch.full((3,), math.inf), 2)
    assert own.scaled(factor).squares.tolist() == [1.0, 0.0, 0.25] and own.squares is squares
