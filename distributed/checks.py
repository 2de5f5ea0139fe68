"""Checks between ranks, by one all-reduce: named numbers must be equal on all ranks, and named sums are computed.

A field is a few numbers under a name. All fields of a step are packed into one tensor, summed over ranks, and unpacked
by name. Checks read the sums. If ranks do not agree, all ranks raise the same error, which names the number, the ranks
and their values. If the sums are on a device, the host checks them in the next call, so that it never waits for the
device.

Legend: R is the number of ranks; x is a number, or one of the four 16-bit integers that form its bits in float64. All
    ranks have the same x if and only if R sum(x^2) = sum(x)^2, with sums over ranks. For 16-bit integers, float64
    computes both sides exactly up to 2^19 ranks.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from eigengraft.errors import name_some
from eigengraft.numerics import HostCopy

from .rank_group import DistributedError, RankGroup

Name = TypeVar("Name", bound=Hashable)
Field = Sequence[float] | Tensor
"""The numbers of one field: a sequence of numbers on the host, or a float64 tensor `[n]` on the device of the
collective."""
SumCheck = Callable[[RankGroup, Mapping[str, Tensor], str], None]
"""Function that checks sums of fields over ranks. Its arguments are the ranks, the sums on the host by name of the
field, and the end of its error message. It raises an error on all ranks if the sums show that ranks do not agree."""

BITS = 8
"""Number of values in the field for a number whose bits must be equal on all ranks: four integers of 16 bits, and their
four squares."""
RANKS = "ranks"
"""Name of the field that counts the ranks."""
NOTHING, LATER = "nothing was changed", "found one step later"
"""Ends of the messages of errors: NOTHING if the sums are read in the call that computes them, LATER if they are on a
device and are read in the next call."""
CHUNK, GPU_CHUNK = 1 << 17, 1 << 24
"""Number of entries of a tensor that `checksum` sums at a time, on a CPU and on a GPU. The number for a CPU fits into
the CPU's cache, and the number for a GPU needs little memory."""


def pack_fields(fields: Mapping[str, Field], device: torch.device) -> Tensor:
    """Join fields into one float64 tensor `[n]` on a device, in the order of the mapping.

    The numbers of all fields that are on the host are uploaded by one copy.
    """
    known = {name: values for name, values in fields.items() if not isinstance(values, Tensor)}
    numbers = torch.tensor([x for values in known.values() for x in values], dtype=torch.float64, device=device)
    uploaded = dict(zip(known, torch.split(numbers, [len(values) for values in known.values()]), strict=True))
    return torch.cat([x if isinstance(x, Tensor) else uploaded[name] for name, x in fields.items()])


def unpack_fields(packed: Tensor, lengths: Mapping[str, int]) -> dict[str, Tensor]:
    """Split a tensor `[..., n]` of packed fields. Return a view `[..., length]` for each field, by name.

    lengths: length of each field by name, in the order in which `pack_fields` has joined the fields.
    """
    return dict(zip(lengths, torch.split(packed, list(lengths.values()), -1), strict=True))


def gather_fields(
    ranks: RankGroup | None, fields: Mapping[str, Field], device: torch.device, what: str
) -> dict[str, Tensor]:
    """Gather fields from all R ranks. Return for each field of length n the numbers of all ranks, `[R, n]`, by name.

    All ranks call this function, with fields of the same names and lengths.

    ranks: the ranks; None: this process is alone, and nothing is sent.
    fields: the numbers of this rank, by name.
    device: device of the collective. If `ranks` is None, numbers of the host stay on the host.
    what: name of the collective in errors.
    """
    if ranks is None:
        cpu = torch.device("cpu")
        return {
            name: x[None] if isinstance(x, Tensor) else pack_fields({name: x}, cpu)[None] for name, x in fields.items()
        }
    ranks.synchronize(what, device=device)
    packed = ranks.all_gather(pack_fields(fields, device), what).wait()
    return unpack_fields(packed, {name: len(values) for name, values in fields.items()})


class CheckedSums:
    """Sums named numbers over all ranks, and checks the sums by functions of the caller, in one all-reduce per call."""

    def __init__(self, ranks: RankGroup) -> None:
        self.ranks = ranks
        self._pending: tuple[Sequence[SumCheck], Mapping[str, int], HostCopy] | None = None

    def reduce(
        self, fields: Mapping[str, Field], checks: Sequence[SumCheck], device: torch.device, what: str
    ) -> dict[str, Tensor]:
        """Return the sum of each field over ranks, by name. The sums include `RANKS`, the number of ranks. All ranks
        call this method.

        If a check fails, all ranks raise the error of the first check that fails. On a CPU, the checks run in this
        call. For sums on a device, they run at the beginning of the next call, so that the host does not wait for the
        device.

        fields: the numbers of this rank, by name.
        checks: functions that raise an error if the sums show that ranks do not agree.
        device: device of the sums.
        what: name of the collective in errors.
        """
        self._check(LATER)
        self.ranks.synchronize(what, device=device)
        fields = {RANKS: [1.0], **fields}
        lengths = {name: len(values) for name, values in fields.items()}
        packed = self.ranks.all_reduce(pack_fields(fields, device), what)
        self._pending = checks, lengths, HostCopy(packed)
        if self.reads_at_once(device):
            self._check(NOTHING)
        return unpack_fields(packed, lengths)

    def reads_at_once(self, device: torch.device) -> bool:
        """Return True if the checks of sums on this device run in the call of `reduce` that computes the sums.

        This is so on a CPU. On any other device they run in the next call, because the host would have to wait.
        """
        return device.type == "cpu"

    def _check(self, outcome: str) -> None:
        if self._pending is not None:
            (checks, lengths, copy), self._pending = self._pending, None
            sums = unpack_fields(copy.wait(), lengths)
            for check in checks:
                check(self.ranks, sums, outcome)


@dataclass(frozen=True)
class SameNumbers:
    """Numbers that must be equal on all ranks, and the texts of the error that is raised if they are not.

    subject: beginning of the error message.
    numbers: the numbers of this rank, by name. Each value is one number or, with a tolerance, a tensor `[n]`, for
        example the norms of n gradients. The host reads a tensor on a device only if ranks differ.
    remedy: end of the error message.
    entries: names of the n entries of each tensor in `numbers`. (): `numbers` has one number for each name.
    tolerance: allowed standard deviation over ranks, in units of the mean; 0: all bits must be equal.
    absent: name of a field `[n]` that says which entries a rank lacks, such as norms of missing gradients. The field is
        1 for an entry that this rank lacks, and 0 for all others. The caller sums it over ranks together with `fields`.
        An entry that a rank lacks is 0 in the rank's `numbers`, and is compared only between the ranks that have it.
        "": all ranks have all numbers.
    """

    subject: str
    numbers: Mapping[str, float | Tensor]
    remedy: str
    entries: Sequence[str] = ()
    tolerance: float = 0.0
    absent: str = ""

    def fields(self) -> dict[str, Field]:
        """Return the fields that the caller must sum over ranks before `check`, by name of the number.

        A field `[2 n]` has n values, then their n squares. The sums of a value and of its square show if all ranks have
        the same value. With a tolerance, the values are the n entries of a tensor. Without one, they are the bits of a
        number, as four 16-bit integers, whose sums are exact.
        """
        return {
            name: torch.cat([x, x.square()]) if isinstance(x, Tensor) and self.tolerance else split_bits(x)
            for name, x in self.numbers.items()
        }

    def check(self, ranks: RankGroup, sums: Mapping[str, Tensor], outcome: str) -> None:
        """Raise DistributedError, on all ranks, if a number differs between ranks. All ranks call this method.

        A number x counts as equal if R sum(x^2) - sum(x)^2 <= (tolerance sum(x))^2. The sums are over the R ranks that
        have the number.

        sums: sums over ranks, by name: the sum of each field that `fields` returns, the number of ranks under the name
            `RANKS`, and the sum of the field that `absent` names.
        outcome: text for the error message about the consequence for the step, such as "nothing was changed".
        """
        count = sums[RANKS] - sums[self.absent] if self.absent else sums[RANKS]
        found = deviates(torch.stack([sums[name] for name in self.numbers]), count, self.tolerance)
        names, apart = [*self.numbers], found.view(len(self.numbers), max(len(self.entries), 1), -1).any(-1)
        places = apart.nonzero().tolist()
        if not places:
            return
        mine = [self._value(names[number], entry) for number, entry in places[:3]]
        given = zip(*ranks.all_gather_object(mine, f"values of {self.subject}"), strict=True)
        labels = [f"{names[number]}{f' of {self.entries[at]}' if self.entries else ''}" for number, at in places[:3]]
        pairs = zip(labels, given, strict=True)
        said = ", ".join(f"the same {label} (got {by_value(dict(enumerate(own)))})" for label, own in pairs)
        more = f", and {len(places) - 3} more" if len(places) > 3 else ""
        raise DistributedError(f"{self.subject}: all ranks must have {said}{more}; {outcome}; {self.remedy}")

    def _value(self, name: str, entry: int) -> float:
        value = self.numbers[name]
        value = float(value.flatten()[entry]) if isinstance(value, Tensor) else value
        return float(f"{value:.6g}") if self.tolerance else value


def split_bits(x: float | Tensor) -> Field:
    """Return eight numbers: the bits of x in float64 as four integers of 16 bits, then the squares of these integers.

    If x is a tensor on a device, the result is a tensor `[8]` on that device; otherwise it is a list. -0 counts as 0.
    """
    if isinstance(x, Tensor) and x.device.type != "cpu":
        found = ((x.detach().to(torch.float64).reshape(1) + 0.0).view(torch.int16).to(torch.int32) & 0xFFFF).double()
        return torch.cat([found, found.square()])
    parts = struct.unpack("<4H", struct.pack("<d", float(x) + 0.0))  # 0 for -0
    return [*parts, *(part * part for part in parts)]


def deviates(sums: Tensor, ranks: Tensor, tolerance: float = 0.0) -> Tensor:
    """Return bool `[..., n]`, True for each number that differs between ranks.

    The result is False for a number that is infinite or nan on any rank: it counts as equal.

    sums: `[..., 2 n]`, sums over ranks: of n numbers, then of their n squares.
    ranks: number of ranks that have each number, in a shape that broadcasts against the result.
    tolerance: allowed standard deviation over ranks, in units of the mean.
    """
    total, squares = sums.chunk(2, -1)
    return ranks * squares - total.square() > (tolerance * total).square()


def gather_differences(ranks: RankGroup, values: Mapping[Name, Hashable], what: str) -> dict[Name, dict[int, Hashable]]:
    """Gather named values from all ranks, and return those that differ between ranks: {name: {rank: value}}.

    All ranks call this function. A rank may lack a name. Then only the values of the ranks that have the name are
    compared.

    values: the values of this rank, by name.
    what: name of the collective in errors.
    """
    found: dict[Name, dict[int, Hashable]] = {}
    for rank, own in enumerate(ranks.all_gather_object(values, what)):
        for name, value in own.items():
            found.setdefault(name, {})[rank] = value
    return {name: own for name, own in found.items() if len(set(own.values())) > 1}


def by_value(values: Mapping[int, Hashable]) -> str:
    """Return a text that lists each value with the ranks that have it, such as "a on ranks 0, 2, b on rank 1".

    At most four values are listed.

    values: the value of each rank, by rank.
    """
    holders: dict[str, list[int]] = {}
    for rank, value in values.items():
        text = str(value).removesuffix(".0") if isinstance(value, float) else str(value)
        holders.setdefault(text, []).append(rank)
    said = [f"{text} on {name_ranks(own)}" for text, own in list(holders.items())[:4]]
    return ", ".join(said) + (f" and {len(holders) - 4} values more" if len(holders) > 4 else "")


def name_ranks(ranks: Sequence[int]) -> str:
    """Return the numbers of ranks as text for an error message, such as "rank 3" or "ranks 0, 3". At most eight are
    listed.
    """
    return f"{'ranks' if len(ranks) > 1 else 'rank'} {name_some([*map(str, ranks)], 8)}"


def as_integers(x: Tensor) -> Tensor:
    """Return the bits of the n entries of a tensor as integers `[n]`.

    Compared as integers, two nans can be equal, and 0 differs from -0.
    """
    widths = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
    return x.contiguous().view(-1).view(widths.get(x.element_size(), torch.int64))


def checksum(x: Tensor) -> Tensor:
    """Return two sums over the entries of x, as an int64 tensor `[2]` on the device of x.

    The first is the sum of all entries, whose bits are read as integers. The second is the sum of the same integers,
    each multiplied by its position. Both are exact modulo 2^64 for every dtype.
    """
    entries = as_integers(x.detach())
    sums = torch.zeros(2, dtype=torch.int64, device=x.device)
    size = CHUNK if x.device.type == "cpu" else GPU_CHUNK
    weights = torch.arange(1, min(size, entries.numel()) + 1, dtype=torch.int64, device=x.device)
    for start in range(0, entries.numel(), size):
        chunk = entries[start : start + size].long()
        total = chunk.sum()
        sums += torch.stack([total, (chunk * weights[: chunk.numel()]).sum() + start * total])
    return sums
