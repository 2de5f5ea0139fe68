"""The exchange of gradients and updates between ranks, all of them in one process."""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.tensor import Replicate

from eigengraft.blocking import Blocking
from eigengraft.distributed.comm_plan import BlockGroup, CommPlan, PlacedBlock
from eigengraft.distributed.comm_step import CommStep
from eigengraft.distributed.layouts import Layout

from ..trajectories import normal
from .test_regions import all_placements, blockings, meshes, shapes, slices

pytestmark = pytest.mark.slow


class Wire:
    """Stands for the ranks of one of R ranks in one process: its n-th message meets the n-th of the others."""

    def __init__(self, rank: int, size: int, mail: dict[tuple[int, int], list[Tensor]]) -> None:
        self.rank, self.size, self.mail, self.number = rank, size, mail, 0

    def all_to_all(self, sent: Tensor, sending: Sequence[int], receiving: Sequence[int], what: str) -> "Letter":
        return self._post(list(sent.split(list(sending))), list(receiving))

    def all_gather(self, mine: Tensor, what: str) -> "Letter":
        return self._post([mine] * self.size, None)

    def _post(self, parts: list[Tensor], receiving: list[int] | None) -> "Letter":
        self.mail[self.rank, self.number] = parts
        self.number += 1
        return Letter(self, self.number - 1, receiving)


@dataclass
class Letter:
    """One message under way."""

    wire: Wire
    number: int
    receiving: list[int] | None

    def wait(self) -> Tensor:
        wire = self.wire
        found = [wire.mail[rank, self.number][wire.rank] for rank in range(wire.size)]
        if self.receiving is None:
            return torch.stack(found)
        assert [len(part) for part in found] == self.receiving
        return torch.cat(found)


def block_groups_of(
    shapes: Sequence[tuple[int, ...]], blocking: Blocking, owners: Iterator[int], ranks: int
) -> list[BlockGroup]:
    """The blocks of parameters by their shape, each with the next owner."""
    found: dict[tuple[int, ...], list[PlacedBlock]] = {}
    for position, shape in enumerate(shapes):
        for grid in blocking.grids(shape):
            placed = found.setdefault(grid.tile, [])
            for index in range(len(grid.keys)):
                owner = next(owners) % ranks
                row = sum(block.owner == owner for block in placed)
                placed.append(PlacedBlock(position, grid.block(index), owner, row))
    dtypes, cpu = (torch.float64,) * 3, torch.device("cpu")
    return [BlockGroup("", shape, *dtypes, cpu, tuple(placed)) for shape, placed in found.items()]


@settings(max_examples=500)
@given(data=st.data(), mesh=meshes, blocking=blockings, limit=st.sampled_from([1, 100, 1000, 1 << 20]))
def test_gradients_reach_owners_and_updates_return(
    data: st.DataObject, mesh: tuple[int, ...], blocking: Blocking, limit: int
) -> None:
    """The whole exchange of a few parameters, each laid out in its own way, on all ranks in one process."""
    ranks, chosen = math.prod(mesh), data.draw(st.lists(shapes, min_size=1, max_size=3))
    counts = [sum(len(grid.keys) for grid in blocking.grids(shape)) for shape in chosen]
    assume(sum(counts) <= 30)
    whole = data.draw(st.booleans())
    ways = [[(Replicate(),) * len(mesh)] if whole else list(all_placements(len(shape), mesh)) for shape in chosen]
    layouts = [
        Layout.from_placements(shape, mesh, data.draw(st.sampled_from(way)))
        for shape, way in zip(chosen, ways, strict=True)
    ]
    owners = itertools.cycle(data.draw(st.lists(st.integers(0, 11), min_size=1, max_size=7)))
    block_groups = block_groups_of(chosen, blocking, owners, ranks)
    tensors = [normal(*shape, seed=position) for position, shape in enumerate(chosen)]
    mail: dict[tuple[int, int], list[Tensor]] = {}
    names = [f"p{position}" for position in range(len(chosen))]
    plans = [CommPlan(Wire(rank, ranks, mail), layouts, block_groups, names, limit) for rank in range(ranks)]  # type: ignore[arg-type]
    steps = [CommStep(comm_plan) for comm_plan in plans]
    for rank, comm_step in enumerate(steps):
        comm_step.send([x[slices(layout.boxes[rank])] for x, layout in zip(tensors, layouts, strict=True)], "gradients")
    if not plans[0].replicated:  # each entry is sent to one owner by one rank
        assert sum(len(part) for parts in mail.values() for part in parts) == sum(x.numel() for x in tensors)
    for rank, comm_step in enumerate(steps):
        for index, block_group in enumerate(block_groups):
            own = block_group.owned(rank)
            if own and not plans[rank].replicated:
                want = [b.grid.cut(tensors[b.position].reshape(b.grid.merged)).reshape(b.grid.tile) for b in own]
                assert torch.equal(comm_step.gather(index, "gradients"), torch.stack(want))
            if own:
                stack = [b.grid.cut(tensors[b.position].reshape(b.grid.merged)).reshape(b.grid.tile) for b in own]
                comm_step.deliver(index, None, 2 * torch.stack(stack) + 1)
        comm_step.send_updates(len(block_groups))
    for rank, comm_step in enumerate(steps):
        updates = comm_step.close()
        for position, (x, layout) in enumerate(zip(tensors, layouts, strict=True)):
            part = x[slices(layout.boxes[rank])]
            if part.numel():
                assert torch.equal(updates[position].reshape(part.shape), 2 * part + 1)
