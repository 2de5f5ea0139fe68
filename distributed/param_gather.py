"""Gathering of updated parameters.

If several ranks hold the same entries, each of these ranks updates a part of the entries, and sends the part to all
other ranks that hold the entries.

Legend: R is the number of ranks, n the number of rows of a parameter. If all ranks hold the parameter, rank r updates
c = ceil(n / R) rows from row r c on; the last ranks may have fewer rows, as in torch.chunk. If only some ranks hold a
shard, each of these ranks updates some of its rows or columns.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from eigengraft.errors import name_some

from .comm_plan import copy_all
from .comm_step import IN_FLIGHT
from .layouts import Layout, chunk_length
from .rank_group import RankGroup, Work


@dataclass(frozen=True)
class Rows:
    """A range of rows of one parameter. Each rank sends these rows of its own part of the parameter in one message.

    position: position of the parameter.
    start, stop: the range, which is the same on all ranks. Row 0 is the first row of the rank's part.
    """

    position: int
    start: int
    stop: int

    def numel(self, shape: tuple[int, ...]) -> int:
        """Return the number of entries of these rows in a tensor.

        shape: shape of the tensor, the part of a parameter that a rank updates. It may have fewer rows than `stop`;
            rows that it lacks do not count.
        """
        return max(min(self.stop, shape[0]) - self.start, 0) * math.prod(shape[1:])


def pack_rows(layouts: Mapping[int, Layout], dtypes: Mapping[int, torch.dtype], limit: int) -> Iterator[list[Rows]]:
    """Yield, for each round of messages, the rows of parameters that are sent in it.

    The tensors of a round have one dtype. Ranks that hold the same entries send, in sum, at most `limit` bytes in a
    round, or one row each if a row is larger.

    layouts: layout of each parameter, by position.
    dtypes: dtype of each parameter, by position.
    """
    message, size, last = list[Rows](), 0, None
    for position, layout in layouts.items():
        assert layout.parts is not None
        shapes = {box.shape for box in layout.parts.boxes}
        row = max(math.prod(shape[1:]) for shape in shapes) * dtypes[position].itemsize * layout.copies
        step, rows = max(1, limit // max(row, 1)), max(shape[0] for shape in shapes)
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
    """Sends the part of a parameter that a rank has updated to all ranks that hold the same entries.

    rank_group: the ranks.
    layouts: layout of each parameter that is updated in parts, by position.
    names: names of the parameters in errors, by position.
    limit: largest number of bytes that all ranks with the same entries send, in sum, in one round of messages.
    """

    def __init__(self, rank_group: RankGroup, layouts: Mapping[int, Layout], names: Sequence[str], limit: int) -> None:
        self.rank_group, self.layouts, self.names, self.limit = rank_group, layouts, names, limit

    def run(self, held: Mapping[int, Tensor]) -> None:
        """Copy the entries that other ranks have updated into this rank's shards, in place.

        All ranks call this method with the same positions.

        held: this rank's shard of each parameter, by position.
        """
        replicated = {position: x for position, x in held.items() if self.layouts[position].replicated}
        shards = {position: x for position, x in held.items() if position not in replicated}
        self._run(replicated, self._send, self._receive)
        self._run(shards, self._send_parts, self._receive_parts)

    def _run(
        self,
        held: Mapping[int, Tensor],
        send: Callable[[Mapping[int, Tensor], Sequence[Rows]], Work[Tensor]],
        receive: Callable[[Mapping[int, Tensor], Sequence[Rows], Tensor], None],
    ) -> None:
        under_way: deque[tuple[list[Rows], Work[Tensor]]] = deque()
        layouts = {position: self.layouts[position] for position in held}
        for chosen in pack_rows(layouts, {position: x.dtype for position, x in held.items()}, self.limit):
            if len(under_way) == IN_FLIGHT:
                first, work = under_way.popleft()
                receive(held, first, work.wait())
            under_way.append((chosen, send(held, chosen)))
        for chosen, work in under_way:
            receive(held, chosen, work.wait())

    def _describe(self, chosen: Sequence[Rows]) -> str:
        return f"updates of rows of {name_some([self.names[rows.position] for rows in chosen], 1)}"

    def _send_parts(self, held: Mapping[int, Tensor], chosen: Sequence[Rows]) -> Work[Tensor]:
        """Start to send the rows that this rank has updated to all other ranks that hold the same entries.

        Return the collective under way, whose result is a message with the rows that other ranks have updated.

        held: this rank's shard of each parameter, by position.
        chosen: rows of parameters that are sent in one round of messages.
        """
        ranks, me = range(self.rank_group.size), self.rank_group.rank
        own = {rank: [self._view(held, rows, me) for rows in chosen if self._share(rows, rank)] for rank in ranks}
        sources = [x for views in own.values() for x in views]
        first = held[chosen[0].position]
        message = torch.empty(sum(x.numel() for x in sources), dtype=first.dtype, device=first.device)
        copy_all(_split(message, sources), sources)
        sending = [sum(x.numel() for x in own[rank]) for rank in ranks]
        receiving = [sum(x.numel() for x in views) for views in self._targets(held, chosen)]
        return self.rank_group.all_to_all(message, sending, receiving, self._describe(chosen))

    def _receive_parts(self, held: Mapping[int, Tensor], chosen: Sequence[Rows], data: Tensor) -> None:
        """Copy the rows that other ranks have updated into this rank's shards.

        held, chosen: as in `_send_parts`.
        data: the received message `[n]`, the result of the collective that `_send_parts` has started.
        """
        targets = [x for views in self._targets(held, chosen) for x in views]
        copy_all(targets, _split(data, targets))

    def _targets(self, held: Mapping[int, Tensor], chosen: Sequence[Rows]) -> list[list[Tensor]]:
        """Return views of the rows in this rank's shards that other ranks have updated.

        The result has a list for each rank r, with a view of each set of rows in `chosen` that rank r has updated. The
        list is empty for this rank, and for ranks that do not hold the same entries.

        held, chosen: as in `_send_parts`.
        """
        ranks = range(self.rank_group.size)
        return [[self._view(held, rows, rank) for rows in chosen if self._share(rows, rank)] for rank in ranks]

    def _share(self, rows: Rows, rank: int) -> bool:
        """Return True if `rank` is another rank, and holds the same entries of the parameter of `rows` as this rank."""
        me = self.rank_group.rank
        return rank != me and rank in self.layouts[rows.position].holders[me]

    def _view(self, held: Mapping[int, Tensor], rows: Rows, rank: int) -> Tensor:
        """Return the rows of one parameter that `rank` updates, as a view of this rank's shard of the parameter.

        held: this rank's shard of each parameter, by position.
        rows: range of rows. Only these rows are returned. They are counted from the first row of the part of the
            parameter that `rank` updates.
        rank: a rank that holds the same entries of the parameter as this rank.
        """
        layout = self.layouts[rows.position]
        assert layout.parts is not None
        part = layout.parts.boxes[rank].within(layout.boxes[self.rank_group.rank])
        return held[rows.position][part][rows.start : rows.stop]

    def _send(self, parameters: Mapping[int, Tensor], chosen: Sequence[Rows]) -> Work[Tensor]:
        first, shapes = parameters[chosen[0].position], self._shapes(parameters, chosen)
        sizes = [math.prod(shape) for shape in shapes]
        message = torch.empty(sum(sizes), dtype=first.dtype, device=first.device)
        sources = [self._view(parameters, rows, self.rank_group.rank) for rows in chosen]
        columns = zip(torch.split(message, sizes), shapes, sources, strict=True)
        copy_all([own.view(shape)[: len(source)] for own, shape, source in columns], sources)
        return self.rank_group.all_gather(message, self._describe(chosen))

    def _receive(self, parameters: Mapping[int, Tensor], chosen: Sequence[Rows], data: Tensor) -> None:
        shapes = self._shapes(parameters, chosen)
        parts = torch.split(data, [math.prod(shape) for shape in shapes], 1)
        for rows, shape, own in zip(chosen, shapes, parts, strict=True):
            _copy_rows(parameters[rows.position], rows, own.view(len(data), *shape))

    def _shapes(self, parameters: Mapping[int, Tensor], chosen: Sequence[Rows]) -> list[tuple[int, ...]]:
        """Return the shape of each set of rows in a message of replicated parameters.

        The shapes are the same for all ranks. A rank that updates fewer rows sends its rows first; the rest of the set
        has no meaning.

        parameters: the replicated parameters, by position.
        chosen: the rows of the message.
        """
        return [(rows.stop - rows.start, *parameters[rows.position].shape[1:]) for rows in chosen]


def _split(message: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Split a message `[n]` into consecutive views. The views have the shapes of the tensors `like`."""
    pieces = torch.split(message, [x.numel() for x in like])
    return [piece.view(x.shape) for piece, x in zip(pieces, like, strict=True)]


def _copy_rows(parameter: Tensor, rows: Rows, data: Tensor) -> None:
    """Copy rows that the R ranks have updated into a replicated parameter.

    rows: range of rows, counted from the first row of each rank's part of the parameter.
    data: `[R, count, ...]`, for each rank the `count` rows of its part that are in this range.
    """
    each = chunk_length(len(parameter), len(data))
    full = len(parameter) // each
    torch.unflatten(parameter[: full * each], 0, (full, each))[:, rows.start : rows.stop].copy_(data[:full])
    rest = parameter[full * each :][rows.start : rows.stop]
    if len(rest):
        rest.copy_(data[full, : len(rest)])
