"""Gathering of replicated parameters of which each rank has updated its rows.

Legend: R ranks; a parameter has n rows, of which rank r updates c = ceil(n / R) rows from row r c on, the last ranks
fewer, as torch.chunk cuts.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .comm_step import IN_FLIGHT
from .layouts import chunk_length
from .rank_group import RankGroup
from .transfers import copy_all
from .work import Work


@dataclass(frozen=True)
class Rows:
    """Rows of a parameter that travel in one message of every rank.

    position: position of the parameter.
    start, stop: the rows, counted from the first row that the rank updates.
    """

    position: int
    start: int
    stop: int


def pack_rows(
    shapes: Mapping[int, tuple[int, ...]], dtypes: Mapping[int, torch.dtype], ranks: int, limit: int
) -> Iterator[list[Rows]]:
    """Rows of parameters, by position, in lists of one dtype with at most `limit` bytes of all ranks, or one row."""
    message, size, last = list[Rows](), 0, None
    for position, shape in shapes.items():
        row = math.prod(shape[1:]) * dtypes[position].itemsize * ranks
        step, rows = max(1, limit // max(row, 1)), chunk_length(shape[0], ranks)
        for start in range(0, rows, step):
            own = Rows(position, start, min(start + step, rows))
            nbytes = (own.stop - own.start) * row
            if message and (dtypes[position] != last or size + nbytes > limit):
                yield message
                message, size = [], 0
            message.append(own)
            size, last = size + nbytes, dtypes[position]
    if message:
        yield message


class ParamGather:
    """Sends the rows that each rank has updated to all ranks.

    rank_group: the ranks.
    names: what errors call the parameters, by position.
    limit: bytes of all ranks in one round of messages.
    """

    def __init__(self, rank_group: RankGroup, names: Sequence[str], limit: int) -> None:
        self.rank_group, self.names, self.limit = rank_group, names, limit

    def run(self, parameters: Mapping[int, Tensor]) -> None:
        """Fills in the rows that other ranks have updated, in place; all ranks call it with the same positions."""
        shapes = {position: tuple(parameter.shape) for position, parameter in parameters.items()}
        dtypes = {position: parameter.dtype for position, parameter in parameters.items()}
        under_way: deque[tuple[list[Rows], Work[Tensor]]] = deque()
        for chosen in pack_rows(shapes, dtypes, self.rank_group.size, self.limit):
            if len(under_way) == IN_FLIGHT:
                self._receive(parameters, *under_way.popleft())
            under_way.append((chosen, self._send(parameters, chosen)))
        while under_way:
            self._receive(parameters, *under_way.popleft())

    def _send(self, parameters: Mapping[int, Tensor], chosen: Sequence[Rows]) -> Work[Tensor]:
        ranks, me = self.rank_group.size, self.rank_group.rank
        first = parameters[chosen[0].position]
        sizes = [(rows.stop - rows.start) * math.prod(parameters[rows.position].shape[1:]) for rows in chosen]
        message = torch.empty(sum(sizes), dtype=first.dtype, device=first.device)
        targets, sources = [], []
        for rows, stretch in zip(chosen, torch.split(message, sizes), strict=True):
            parameter = parameters[rows.position]
            begin = me * chunk_length(len(parameter), ranks)
            source = parameter[begin + rows.start : begin + rows.stop]
            targets.append(stretch.view(rows.stop - rows.start, *parameter.shape[1:])[: len(source)])
            sources.append(source)
        copy_all(targets, sources)
        more = f" and {len(chosen) - 1} more" if len(chosen) > 1 else ""
        what = f"updates of rows of {self.names[chosen[0].position]}{more}"
        return self.rank_group.all_gather(message, what)

    def _receive(self, parameters: Mapping[int, Tensor], chosen: Sequence[Rows], work: Work[Tensor]) -> None:
        data, at = work.wait(), 0
        for rows in chosen:
            parameter = parameters[rows.position]
            count, tail = rows.stop - rows.start, tuple(parameter.shape[1:])
            end = at + count * math.prod(tail)
            _copy_rows(parameter, rows, data[:, at:end].view(self.rank_group.size, count, *tail))
            at = end


def _copy_rows(parameter: Tensor, rows: Rows, data: Tensor) -> None:
    """Copies rows of all ranks `[R, count, ...]` into a parameter."""
    each = chunk_length(len(parameter), len(data))
    full = len(parameter) // each
    torch.unflatten(parameter[: full * each], 0, (full, each))[:, rows.start : rows.stop].copy_(data[:full])
    rest = parameter[full * each :][rows.start : rows.stop]
    if len(rest):
        rest.copy_(data[full, : len(rest)])
