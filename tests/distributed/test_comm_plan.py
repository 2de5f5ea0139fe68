"""The exchange of gradients and updates between ranks, all of them in one process."""

import itertools
import math
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.tensor import Replicate

from eigengraft.blocking import Blocking
from eigengraft.blocking.stacks import Assembly
from eigengraft.distributed.comm_plan import Arrived, BlockGroup, CommPlan, PlacedBlock, assemble, reading
from eigengraft.distributed.comm_step import CommStep
from eigengraft.distributed.layouts import Layout

from ..trajectories import normal
from .test_layouts import all_placements, blockings, meshes, shapes, slices

pytestmark = pytest.mark.slow


class Mail:
    """Messages between threads that stand for ranks, by (rank, number): a list with one tensor for each rank."""

    def __init__(self) -> None:
        self.sent: dict[tuple[int, int], list[Tensor]] = {}
        self.changed = threading.Condition()

    def post(self, rank: int, number: int, parts: list[Tensor]) -> None:
        with self.changed:
            self.sent[rank, number] = parts
            self.changed.notify_all()

    def arrived(self, number: int, ranks: int) -> bool:
        return all((rank, number) in self.sent for rank in range(ranks))


class Wire:
    """Stands for the ranks of a group on one of its ranks: its n-th message meets the n-th of the others."""

    def __init__(self, rank: int, size: int, mail: Mail) -> None:
        self.rank, self.size, self.mail, self.number = rank, size, mail, 0

    def all_to_all(self, sent: Tensor, sending: Sequence[int], receiving: Sequence[int], what: str) -> "Letter":
        return self._post(list(torch.split(sent, list(sending))), list(receiving), gathered=False)

    def all_gather_uneven(self, mine: Tensor, lengths: Sequence[int], what: str) -> "Letter":
        return self._post([mine] * self.size, list(lengths), gathered=True)

    def _post(self, parts: list[Tensor], lengths: list[int], gathered: bool) -> "Letter":
        self.mail.post(self.rank, self.number, parts)
        self.number += 1
        return Letter(self, self.number - 1, lengths, gathered)


@dataclass
class Letter:
    """One message under way."""

    wire: Wire
    number: int
    lengths: list[int]
    gathered: bool

    def done(self) -> bool:
        return self.wire.mail.arrived(self.number, self.wire.size)

    def wait(self) -> Any:
        wire, mail = self.wire, self.wire.mail
        with mail.changed:
            assert mail.changed.wait_for(self.done, timeout=20)
        found = [mail.sent[rank, self.number][wire.rank] for rank in range(wire.size)]
        assert [len(part) for part in found] == self.lengths
        return found if self.gathered else torch.cat(found)


def block_groups_of(
    shapes: Sequence[tuple[int, ...]], blocking: Blocking, owners: Iterator[int], ranks: int
) -> list[BlockGroup]:
    """The blocks of parameters by their shape, each with the next owner."""
    found: dict[tuple[int, ...], list[PlacedBlock]] = {}
    for position, shape in enumerate(shapes):
        for grid in blocking.grids(shape):
            placed = found.setdefault(grid.shape, [])
            for index in range(len(grid.keys)):
                owner = next(owners) % ranks
                row = sum(block.owner == owner for block in placed)
                placed.append(PlacedBlock(position, grid.block(index), owner, row))
    dtypes, cpu = (torch.float64,) * 3, torch.device("cpu")
    return [BlockGroup("", shape, *dtypes, cpu, tuple(placed)) for shape, placed in found.items()]


@settings(max_examples=300)
@given(data=st.data(), mesh=meshes, blocking=blockings, limit=st.sampled_from([1, 100, 1000, 1 << 20]))
def test_gradients_reach_owners_and_updates_return(
    data: st.DataObject, mesh: tuple[int, ...], blocking: Blocking, limit: int
) -> None:
    """The whole exchange of a few parameters, each laid out in its own way, on all ranks in one process."""
    ranks, chosen = math.prod(mesh), data.draw(st.lists(shapes, min_size=1, max_size=3))
    counts = [sum(len(grid.keys) for grid in blocking.grids(shape)) for shape in chosen]
    assume(sum(counts) <= 30)
    whole = data.draw(st.booleans())
    ways = [[(Replicate(),) * len(mesh)] if whole else all_placements(len(shape), mesh) for shape in chosen]
    layouts = [
        Layout.from_placements(shape, mesh, data.draw(st.sampled_from(way)))
        for shape, way in zip(chosen, ways, strict=True)
    ]
    owners = itertools.cycle(data.draw(st.lists(st.integers(0, 11), min_size=1, max_size=7)))
    block_groups = block_groups_of(chosen, blocking, owners, ranks)
    tensors = [normal(*shape, seed=position) for position, shape in enumerate(chosen)]
    mail, names = Mail(), [f"p{position}" for position in range(len(chosen))]

    def run(rank: int) -> bool:
        wire = Wire(rank, ranks, mail)
        plan = CommPlan(wire, layouts, block_groups, names, limit)  # type: ignore[arg-type]
        local = [x[slices(layout.boxes[rank])] for x, layout in zip(tensors, layouts, strict=True)]
        assembly, updates = Assembly(), dict[int, Tensor]()

        def receive(arrived: Arrived) -> None:
            updates.update(assemble(assembly, arrived, local))

        comm_step = CommStep(plan, {"gradients": reading(local)}, receive)
        for index, block_group in enumerate(block_groups):
            own = block_group.owned(rank)
            if not own:
                continue
            stack = torch.stack(
                [b.grid.in_parameter(tensors[b.position].reshape(b.grid.merged))[0].reshape(b.grid.shape) for b in own]
            )
            comm_step.advance(index)
            if "gradients" in comm_step.sources:
                assert torch.equal(comm_step.gather(index, "gradients"), stack)
            comm_step.deliver(index, None, 2 * stack + 1)
        comm_step.close()
        for position, part in enumerate(local):
            if part.numel():
                assert torch.equal(updates[position], 2 * part + 1)

        return plan.replicated

    with ThreadPoolExecutor(ranks) as threads:
        replicated = any(threads.map(run, range(ranks)))
    if not replicated:  # one rank sends each entry to one owner, which sends its update to all ranks that hold it
        held = sum(box.numel for layout in layouts for box in layout.boxes)
        sent = sum(len(part) for parts in mail.sent.values() for part in parts)
        assert sent == sum(x.numel() for x in tensors) + held
