"""Agreement at construction: ranks that share parameters were given the same recipe, param group and values."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from itertools import cycle

import torch
from torch import Tensor

from eigengraft.blocking.boxes import Box
from eigengraft.distributed.layouts import Layout, is_dtensor, local
from eigengraft.distributed.rank_group import RankGroup
from eigengraft.numerics import fake_mode

from .placement import ParamSpec

Checksum = tuple[int, int]
"""The sum of the bits of all entries, and the sum weighted by position, both modulo 2^64."""

CHUNK, GPU_CHUNK = 1 << 17, 1 << 24
"""Entries that are summed at once: on a CPU as many as its cache holds, on a GPU what takes little memory."""

BROADCAST = ", or wrap the model in DistributedDataParallel, which broadcasts"
NO_COPIES = (
    "plain tensors that are no copies of each other (expert or pipeline parallel) need `distribution.mode: local`, or "
    "to be DTensors on a mesh of the ranks that share them"
)


def require_agreement(
    subject: str,
    rank_group: RankGroup,
    texts: Mapping[str, str],
    specs: Sequence[ParamSpec],
    parameters: Sequence[Tensor],
) -> None:
    """Raises ValueError on every rank if ranks do not agree.

    subject: what ranks agree on; another one is a param group that some ranks do not have.
    texts: by title, what must be the same on all ranks.
    specs: what the parameters are that the ranks share.
    parameters: ranks that hold the same entries of them must hold the same values.
    """
    checksums = checksum_copies(specs, parameters, rank_group.rank)
    digests = {title: _digest(text) for title, text in texts.items()}
    mine = subject, digests, _digest_copies(specs, checksums, rank_group.rank)
    found = rank_group.everyone.all_gather_object(mine, "agreement on param groups")
    if len({other for other, _, _ in found}) > 1:
        raise ValueError(
            "param groups: all ranks must have equally many, got "
            f"{', '.join(f'{other} on rank {rank}' for rank, (other, _, _) in enumerate(found[:8]))}"
        )
    for title in texts:
        others = [rank for rank, (_, other, _) in enumerate(found) if other[title] != found[0][1][title]]
        if others:
            raise ValueError(
                f"{subject}: all ranks must have the same {title}, got others than rank 0's on {name_ranks(others)}"
                f"{_remedy('', parameters) if title == 'parameters' else ''}"
            )
    agreed: dict[str, str] = {}
    pairs = [pair for _, _, copies in found for pair in copies.items()]
    if any(agreed.setdefault(holders, digest) != digest for holders, digest in pairs):
        every = rank_group.everyone.all_gather_object(checksums, f"values of {subject}")
        names, others = _other_values(specs, every)
        more = f" and {len(names) - 5} more" if len(names) > 5 else ""
        raise ValueError(
            f"{subject}: ranks that hold the same entries of a parameter must hold the same values, got others than "
            f"the lowest of them on {name_ranks(others)} for {', '.join(names[:5])}{more}; set the same seed or load "
            f"the same weights on all ranks before composing{_remedy(BROADCAST, parameters)}"
        )


def checksum_copies(specs: Sequence[ParamSpec], parameters: Sequence[Tensor], rank: int) -> list[Checksum | None]:
    """A checksum of what this rank holds of each parameter; None if no other rank holds it or if it has no values."""
    found: dict[int, Tensor] = {}
    for position, (spec, parameter) in enumerate(zip(specs, parameters, strict=True)):
        layout = _layout(spec)
        if layout.copies > 1 and layout.boxes[rank].numel and not parameter.is_meta and fake_mode(parameter) is None:
            found[position] = sum_bits(local(parameter))
    rows = dict(zip(found, torch.stack([sums.cpu() for sums in found.values()]).tolist() if found else [], strict=True))
    return [(rows[position][0], rows[position][1]) if position in rows else None for position in range(len(specs))]


def sum_bits(x: Tensor) -> Tensor:
    """`[2]` int64 on the device of `x`: the checksum of a tensor, exact whatever its dtype."""
    widths = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
    bits = x.detach().contiguous().view(-1).view(widths.get(x.element_size(), torch.int64))
    sums = torch.zeros(2, dtype=torch.int64, device=x.device)
    size = CHUNK if x.device.type == "cpu" else GPU_CHUNK
    weights = torch.arange(1, min(size, bits.numel()) + 1, dtype=torch.int64, device=x.device)
    for start in range(0, bits.numel(), size):
        some = bits[start : start + size].long()
        total = some.sum()
        sums += torch.stack([total, (some * weights[: some.numel()]).sum() + start * total])
    return sums


def _digest_copies(specs: Sequence[ParamSpec], checksums: Sequence[Checksum | None], rank: int) -> dict[str, str]:
    """One digest of the checksums of all parameters that the same ranks hold the same entries of, by these ranks."""
    holders: dict[int, str] = {}
    texts: dict[str, list[str]] = {}
    for spec, checksum in zip(specs, checksums, strict=True):
        layout = _layout(spec)
        if checksum is not None:
            if id(layout) not in holders:
                holders[id(layout)] = _digest(repr(layout.holders[rank]))
            texts.setdefault(holders[id(layout)], []).append(repr(checksum))
    return {ranks: _digest(" ".join(own)) for ranks, own in texts.items()}


def _other_values(
    specs: Sequence[ParamSpec], found: Sequence[Sequence[Checksum | None]]
) -> tuple[list[str], list[int]]:
    """(names, ranks) of parameters whose values are others than those of the lowest rank that holds the same entries.

    found: checksums of every rank; groups of ranks that compute all updates each have the same layout.
    """
    names, others = list[str](), set[int]()
    for position, spec in enumerate(specs):
        first: dict[Box, Checksum | None] = {}
        pairs = [(box, own[position]) for box, own in zip(cycle(_layout(spec).boxes), found, strict=False)]
        own_ranks = {rank for rank, (box, value) in enumerate(pairs) if first.setdefault(box, value) != value}
        others |= own_ranks
        names += [spec.name] if own_ranks else []
    return names, sorted(others)


def name_ranks(ranks: Sequence[int]) -> str:
    """Some ranks, as errors name them."""
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return f"{'ranks' if len(ranks) > 1 else 'rank'} {', '.join(map(str, ranks[:8]))}{more}"


def _remedy(text: str, parameters: Sequence[Tensor]) -> str:
    """What may be done about plain tensors, if any of the parameters is one."""
    return "" if all(is_dtensor(p) for p in parameters) else f"{text}; {NO_COPIES}"


def _layout(spec: ParamSpec) -> Layout:
    assert spec.placement is not None
    return spec.placement.layout


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
