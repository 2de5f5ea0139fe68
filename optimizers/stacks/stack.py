"""Stacks of equal blocks: their state, their active blocks in a step, and the assignment of blocks to stacks.

N equal blocks of many parameters form a stack `[N, *block]`. Equal blocks of all ranks form a block group. All ranks
compute and send block groups in the same order. The blocks of a group that one rank owns form one stack on that rank.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import InitVar, dataclass, field, replace
from functools import cached_property
from itertools import compress
from typing import Literal, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from eigengraft.blocking.blocks import BlockGrid
from eigengraft.blocking.stacks import Stack, blocks_that_fit, max_blocks, split_by_size, split_ranges
from eigengraft.distributed.comm_plan import BlockGroup, PlacedBlock
from eigengraft.distributed.rank_group import RankGroup
from eigengraft.numerics import HostCopy, compute_dtype, has_values, kept_on_device, upload
from eigengraft.preconditioners.checked_mode import Checks
from eigengraft.quantization import Quantizer
from eigengraft.quantization.base import Location
from eigengraft.quantization.offload import HostBuffer
from eigengraft.signals import requested
from eigengraft.slots import FORMAT, Encoded, EncodedSlot, Slot, State, StateKey, Storage, Watch, dotted
from eigengraft.step_context import StepContext

from ..recipe.recipe import Recipe, Route, StoredSlot, require_slots, slot_keys, stored_slots
from .delayed import StackRefreshes
from .placement import ParamSpec, Phases

FreshCodes = dict[tuple[str, Slot, torch.dtype, torch.device], Encoded]
"""Cache of the codes `[1, ...]` of initial values of slots. The key, (JSON of the quantizer, slot, dtype, device),
determines the codes."""


@dataclass
class StackState:
    """A stack of N blocks under one update of a recipe, with the state of its stages.

    recipe: recipe of the optimizer.
    path: path of the update in the recipe, "" or "routes.<name>".
    rule: the update at this path. Scheduled numbers of stages are replaced by their values in the present step.
    stack: the blocks.
    phases: `[N]` in [0, 1), fraction of a refresh interval at which each block is due.
    seeds: `[N]`, seed of the random numbers of each block.
    run_step: step of the run at which the scheduled numbers of the update are evaluated; the first step is 1.
    number: index of the stack in its parameter set.
    block_group: index of the block group to which the blocks belong. None: no block of the stack is sent between ranks.
    width_factors: `[N]`, factor of the direction of each block. None: there are no factors.
    host_factors: the same factors as floats. None: there are no factors.
    tensors: state tensors `[N, ...]`, by "<stage path>/<slot>". Offloaded tensors are in host memory, except while a
        step has brought them to the device.
    host_buffers: memory of the offloaded tensors, by location. Empty: every tensor is on the device of the stack.
    encoded: slots that a quantizer stores, by "<stage path>/<slot>". In `tensors`, their codes have the keys
        "<stage path>/<slot>/<code>".
    checks: checks of the contract of every stage. None: the optimizer is not in checked mode.
    step_watch: measurement of the present step, which also runs the checks. None: the step is not measured.
    refreshes: delayed refreshes that have begun and are not finished. None: no stage has a delay.
    fresh: cache of the codes of initial values (`FreshCodes`), which several stacks share. The constructor reads it,
        and adds the codes that it lacks.
    """

    recipe: Recipe
    path: str
    stack: Stack
    phases: NDArray[np.float64]
    seeds: NDArray[np.int64]
    fresh: InitVar[FreshCodes]
    block_group: int | None = None
    run_step: int = 1
    number: int = 0
    width_factors: Tensor | None = None
    host_factors: tuple[float, ...] | None = None
    rule: Recipe | Route = field(init=False)
    tensors: dict[str, Tensor] = field(default_factory=dict, init=False)
    encoded: dict[str, EncodedSlot] = field(default_factory=dict, init=False)
    host_buffers: list[HostBuffer] = field(default_factory=list, init=False, repr=False)
    checks: Checks | None = field(default=None, init=False)
    step_watch: Watch | None = field(default=None, init=False)
    refreshes: StackRefreshes | None = field(default=None, init=False, repr=False)
    _failing: HostCopy | None = field(default=None, init=False, repr=False)
    _parameter_rows: dict[str, list[Tensor]] = field(default_factory=dict, init=False, repr=False)
    _selected: tuple[NDArray[np.bool_], ActiveBlocks] | None = field(default=None, init=False, repr=False)

    def __post_init__(self, fresh: FreshCodes) -> None:
        self.rule, offloaded = self.recipe.rules()[self.path], dict[Location, dict[str, Tensor]]()
        for key, stored in self.stored_slots().items():
            self._allocate(key, stored, fresh, offloaded)
        for location, rows in offloaded.items():
            self._offload(location, rows)
        if any(cadence.postponed for cadence in self.rule.cadences().values()):
            self.refreshes = StackRefreshes(self.stack.device)

    def slots(self) -> Iterator[tuple[StateKey, Slot]]:
        """Yield (key, slot) of all slots of the stages. The `block` of a key is None: all blocks have these slots."""
        yield from slot_keys(self.rule, self.path, self.stack.block).items()

    def stored(self, key: StateKey) -> list[Tensor]:
        """Return the tensors that store a slot: one tensor, or its codes and the hash of their storage format."""
        return [self.tensors[name] for name in self.names(key)]

    def stored_slots(self) -> dict[StateKey, StoredSlot]:
        """Return how each slot of the stages is stored. The `block` of a key is None: all blocks store it alike."""
        return stored_slots(self.recipe, self.path, self.stack.block, self.stack.dtype)

    def _allocate(
        self, key: StateKey, stored: StoredSlot, fresh: FreshCodes, offloaded: dict[Location, dict[str, Tensor]]
    ) -> None:
        """Allocate the tensors of a slot for all blocks of the stack, with its initial values.

        A slot that is stored on the host or on disk is only added to `offloaded`. The method `_offload` then allocates
        all slots of one location together.

        fresh: cache of the codes of initial values.
        offloaded: by location and name of the tensor, the initial value for one block, `[1, ...]`.
        """
        blocks, dtype, device = len(self.stack.param_ids), self.stack.dtype, self.stack.device
        slot, codec, location = stored.slot, stored.codec, stored.place(device)
        if codec is None and location is None:
            self.tensors[str(key)] = slot.allocate(blocks, dtype, device)
            return
        if codec is None:
            rows = {str(key): slot.initial(dtype)}
        else:
            same = (codec.model_dump_json(), slot, dtype, device)
            # encode once: encoding may need a decomposition, and all blocks have the same initial values
            if same not in fresh:
                fresh[same] = codec.encode(slot.allocate(1, dtype, device))
            codes = {**fresh[same], FORMAT: torch.full((1,), codec.format(), dtype=torch.int64, device=device)}
            self.encoded[str(key)] = EncodedSlot(slot, codec, tuple(fresh[same]), stored.dtype)
            rows = {str(key._replace(part=part)): code for part, code in codes.items()}
        if location is None:
            rows = {name: row.repeat(blocks, *[1] * (row.ndim - 1)) for name, row in rows.items()}
        else:
            offloaded.setdefault(location, {}).update(rows)
        self.tensors.update(rows)

    def _offload(self, location: Location, rows: Mapping[str, Tensor]) -> None:
        """Store tensors of all blocks of the stack in a buffer of host memory.

        rows: the initial values `[1, ...]` of one block, which are equal for all blocks, by name of the tensor.
        """
        blocks = len(self.stack.param_ids)
        buffer = HostBuffer(location, {name: row.expand(blocks, *row.shape[1:]) for name, row in rows.items()})
        for name, tensor in buffer.views(buffer.memory).items():
            if rows[name].any():  # the buffer has zeros already
                tensor.copy_(rows[name].expand_as(tensor))
            self.tensors[name] = tensor
        buffer.release()
        self.host_buffers.append(buffer)

    def names(self, key: StateKey) -> list[str]:
        """Return the names of the tensors that store a slot.

        An unquantized slot has one tensor. A quantized slot has one tensor for each of its codes, and a last tensor
        with the hash of its storage format.
        """
        how = self.encoded.get(str(key))
        return [str(key)] if how is None else [str(key._replace(part=part)) for part in (*how.names, FORMAT)]

    def format_of(self, name: str) -> int:
        """Return the hash that identifies the storage format of a quantized slot (`Quantizer.format`).

        name: "<stage path>/<slot>".
        """
        return cast(Quantizer, self.encoded[name].codec).format()

    def restart(self, row: int, changed: Container[str]) -> None:
        """Reset each slot of a block to its initial value if all entries of the slot are zero.

        Code outside of the optimizer resets state by writing zeros, but zero is not the initial value of every slot.

        row: row of the block.
        changed: names of tensors that were written outside of a step. Only slots of these tensors are reset.
        """
        for key, slot in self.slots():
            names, how = self.names(key), self.encoded.get(str(key))
            if not any(name in changed for name in names) or (how is None and slot.fill == 0):
                continue
            stored = [self.tensors[name][row : row + 1] for name in names]
            if how is None:
                if not stored[0].any():
                    stored[0].copy_(slot.allocate(1, stored[0].dtype, stored[0].device))
                continue
            stored.pop().fill_(self.format_of(str(key)))
            parts = dict(zip(how.names, stored, strict=True))
            # if all stored tensors in floating point, such as scales, are 0, the slot is 0 and need not be decoded
            floats = [part for part in stored if part.is_floating_point()]
            if any(part.float().any() for part in floats or stored) and how.codec.decode(parts, slot, how.dtype).any():
                continue
            fresh = how.codec.encode(slot.allocate(1, self.stack.dtype, self.stack.device))
            for part, value in fresh.items():
                parts[part].copy_(value)

    @cached_property
    def signals(self) -> frozenset[str]:
        """Names of the signals (inputs beside the gradient) that the stages of this stack request."""
        return frozenset(name for _, stage in self.rule.stages() for name in requested(stage))

    @cached_property
    def totals(self) -> tuple[str, ...]:
        """Names of the slots that stages read as sums over all blocks of all parameters."""
        return tuple(key.name for key, slot in self.slots() if slot.total)

    @property
    def watched(self) -> bool:
        """True if this step is measured for `inspect`, or each use of state is checked (`checked=True`)."""
        return self.checks is not None or self.step_watch is not None

    @cached_property
    def failure_counts(self) -> tuple[str, ...]:
        """Names of the slots in which stages count failures of roots and bases."""
        return tuple(str(key) for key, slot in self.slots() if slot.role == "failures")

    @cached_property
    def step_sizes(self) -> tuple[StateKey, ...]:
        """Keys of the slots that store a step size of each block (as Prodigy does), which also multiplies the decay."""
        update = f"{self.chain_path('update')}."
        return tuple(key for key, slot in self.slots() if slot.step_size and str(key.stage).startswith(update))

    @cached_property
    def adds_decay(self) -> bool:
        """True if weight decay is added to directions before they are written into the parameters. A rule does this for
        all of its stacks, also for those whose blocks have no step size.
        """
        return self.rule.adds_decay()

    @cached_property
    def lagging(self) -> bool:
        """True if the first gradient of a block only initializes its statistics."""
        return self.rule.lagging()

    @cached_property
    def spans(self) -> bool:
        """True if a stage needs sums over all blocks of a parameter."""
        return self.rule.spans()

    @cached_property
    def slots_of_blocks(self) -> list[dict[str, Tensor]]:
        """State of each block for compiled kernels, in the order of the rows of the stack.

        An item of the list is the state of one block: {name of a state tensor: the block's part of this tensor}. The
        part is a view `[1, numel, 1, ...]`.
        """
        shape = (1, math.prod(self.stack.block), *[1] * (len(self.stack.block) - 1))
        slots = {name: tensor.view(-1, *shape).unbind() for name, tensor in self.tensors.items()}
        return [{name: rows[row] for name, rows in slots.items()} for row in range(len(self.stack.param_ids))]

    def replace_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Replace some of the tensors that store the state of the stack.

        tensors: the new tensors, by name.
        """
        self.tensors.update(tensors)
        # two caches of views of the replaced tensors
        self.__dict__.pop("slots_of_blocks", None)
        self._parameter_rows.clear()

    def parameter_rows(self, name: str) -> list[Tensor]:
        """Return a view of a state tensor `[N, *block]` for each block, in the shape of the block's parameter.

        Every block of the stack must be a whole parameter. The views are cached.

        name: name of the state tensor, which has a number for each entry of the parameter.
        """
        if name not in self._parameter_rows:
            rows = zip(self.tensors[name].unbind(), self.stack.grids, strict=True)
            self._parameter_rows[name] = [row.view(grid.shape) for row, (_, grid) in rows]
        return self._parameter_rows[name]

    @cached_property
    def all_blocks(self) -> ActiveBlocks:
        """All blocks of the stack, for a step in which all of their parameters have a gradient."""
        return ActiveBlocks(self, self.stack, None)

    def select(self, active: NDArray[np.bool_] | None) -> ActiveBlocks | None:
        """Return the blocks of active parameters, or None if there are none.

        The last selection is cached, so that equal selections upload their indices only once.

        active: `[P]`, True for parameters that take part in the step. None: all of them do.
        """
        if active is None or (own := active[self.stack.param_ids]).all():
            return self.all_blocks
        if not own.any():
            return None
        if self._selected is None or not np.array_equal(self._selected[0], own):
            self._selected = own, ActiveBlocks(self, self.stack.select(active), np.flatnonzero(own))
        return self._selected[1]

    def context(
        self, blocks: ActiveBlocks, counts: NDArray[np.int64], signals: Mapping[str, Tensor | float]
    ) -> StepContext:
        """Return the object from which stages read step counts, bias corrections and signals of the active blocks.

        counts: `[P]`, number of gradients of each parameter, including the present one.
        signals: inputs beside the gradient that the stages request, for these blocks, by name.
        """
        phases, seeds, steps = self.phases, self.seeds, counts[blocks.stack.param_ids]
        if blocks.places is not None:
            phases, seeds = phases[blocks.places], seeds[blocks.places]
        if self.lagging:
            steps -= 1
        return StepContext(steps, phases, blocks.stack.matrix_ids, self.stack.device, seeds, signals)

    def note_failures(self, tolerated: int) -> None:
        """Begin to copy to the host which blocks have a root or basis that failed too often. `failing` reads the copy.

        The stack must have slots that count failures.

        tolerated: number of successive failures that are tolerated.
        """
        found = torch.stack([self.tensors[key] > tolerated for key in self.failure_counts]).any(0)
        self._failing = HostCopy(found) if has_values(found) else None

    def failing(self, wait: bool) -> list[int]:
        """Return the positions of parameters with a root or basis that failed too often.

        A result of `note_failures` is returned only once.

        wait: True to wait for a device. If False, results on a device are left to a later call.
        """
        if self._failing is None or not (wait or self.stack.device.type == "cpu"):
            return []
        found, self._failing = self._failing.wait(), None
        return list(compress(self.stack.positions, found.tolist()))

    def check(self) -> None:
        """Check the contract of every stage at every step from now on."""
        self.checks = Checks({str(key): slot for key, slot in self.slots()})

    def state(
        self, chain: Literal["update", "after_decay"], rows: Tensor | None, mask: Tensor | None, context: StepContext
    ) -> State:
        """Return the state that a chain reads and writes in one call.

        chain: field of the update that holds the chain.
        rows: `[n]` on the device, rows of the n blocks that the chain computes. None: all rows.
        mask: `[n]`, False for rows whose state must not change. None: the state of all rows may change.
        context: context of the n blocks.
        """
        counters = (lambda: (context.seed, context.step)) if self.encoded else None
        storage = Storage(self.encoded, counters, self.step_watch or self.checks, self.refreshes)
        return State(self.tensors, self.stack.block, self.chain_path(chain), rows, mask, storage)

    def chain_path(self, chain: Literal["update", "after_decay"]) -> str:
        """Return the dotted path that a chain of this stack's update has in the recipe, such as "routes.adam.update".

        chain: "update" for the first chain, "after_decay" for the stages that receive directions with weight decay.
        """
        return dotted(self.path, chain)

    def rows(self) -> Iterator[tuple[int, int, int]]:
        """Yield (row of the block in the stack, position of its parameter in the parameter set, key of the block in the
        parameter) for every block.
        """
        for row, (position, key) in enumerate(zip(self.stack.param_ids.tolist(), self.stack.keys, strict=True)):
            yield row, position, key


@dataclass(frozen=True, eq=False)
class ActiveBlocks:
    """The n blocks of a stack that take part in a step.

    stack_state: the whole stack with its state.
    stack: the active blocks as a stack of their own.
    places: `[n]` on the host, rows of the active blocks in `stack_state`. None: all rows are active.
    """

    stack_state: StackState
    stack: Stack
    places: NDArray[np.int64] | None

    @cached_property
    def rows(self) -> Tensor | None:
        """Indices of the n blocks of the stack that take part in a step, `[n]` on the device. None: all take part."""
        return None if self.places is None else kept_on_device(self.places, self.stack.device)

    @cached_property
    def param_index(self) -> Tensor:
        """Position of the parameter of each block, `[n]` on the device of the stack."""
        return kept_on_device(self.stack.param_ids, self.stack.device)

    @property
    def row_numbers(self) -> Sequence[int]:
        """Indices in the whole stack of the n blocks of this step, on the host."""
        return range(len(self.stack.param_ids)) if self.places is None else self.places.tolist()


def active_blocks(
    states: Sequence[StackState], active: NDArray[np.bool_] | None, first: NDArray[np.bool_] | None
) -> list[tuple[list[ActiveBlocks], bool]]:
    """Return the active blocks of stacks, divided by whether the gradients only initialize their statistics (priming).

    The result has pairs (active blocks of each stack, True for priming). Stacks without such blocks are left out.

    states: stacks of one update.
    active: `[P]`, True for parameters that take part in the step. None: all of them do.
    first: `[P]`, True for active parameters with their first gradient. None: no parameter has its first gradient.
    """
    selections: list[tuple[NDArray[np.bool_] | None, bool]] = [(active, False)]
    if first is not None and states[0].lagging and first.any():
        selections = [(first, True), (~first if active is None else active & ~first, False)]
    pairs = [([own for state in states if (own := state.select(chosen))], priming) for chosen, priming in selections]
    return [(found, priming) for found, priming in pairs if found]


class BlockKind(NamedTuple):
    """The properties that equal blocks share.

    path: path of the update of the blocks in the recipe.
    shape: shape of a block.
    dtype: dtype in which the update is computed.
    device: device of the blocks.
    of_numbers: True if the parameters of the blocks are 0-d, so that ranks cannot divide them.
    """

    path: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    of_numbers: bool = False


@dataclass(frozen=True)
class EqualBlocks:
    """N blocks of one kind. Blocks that are due for a refresh together are neighbors.

    kind: properties that all of these blocks share, such as their shape.
    grids: pairs (position of a parameter, `BlockGrid` of its blocks of this kind), in the order of the blocks.
    phases: `[N]` in [0, 1), fraction of a refresh interval at which each block is due.
    """

    kind: BlockKind
    grids: Sequence[tuple[int, BlockGrid]]
    phases: NDArray[np.float64]

    @property
    def positions(self) -> set[int]:
        """Positions, in the parameter set, of the parameters to which the blocks belong."""
        return {position for position, _ in self.grids}

    def single(self) -> list[tuple[int, BlockGrid]]:
        """Return, for each of the N blocks in order, the pair (position of the block's parameter, `BlockGrid`).

        The `BlockGrid` contains this block alone.
        """
        return [(position, grid.block(index)) for position, grid in self.grids for index in range(len(grid.keys))]

    def split(self, most: int, recipe: Recipe) -> Iterator[EqualBlocks]:
        """Yield the blocks in lists of at most `most` blocks.

        If a stage needs sums over parameters, all blocks of a parameter are in one list, which may then be longer.
        """
        together = recipe.rules()[self.kind.path].spans()
        ranges = split_ranges([position for position, grid in self.grids for _ in grid.keys], most, together)
        if len(ranges) == 1:
            yield self
            return
        blocks = self.single()
        for start, stop in ranges:
            yield EqualBlocks(self.kind, blocks[start:stop], self.phases[start:stop])


def cut_blocks(
    specs: Sequence[ParamSpec], recipe: Recipe, positions: Iterable[int]
) -> Iterator[tuple[BlockKind, int, BlockGrid]]:
    """Cut parameters into blocks. Yield (kind of the blocks, position of the parameter, grid of equal blocks).

    A parameter has several grids if its blocks differ in shape. Parameters whose blocks have no owners
    (`ParamSpec.without_owners`) are left out; `blocks_without_owners` yields the blocks of these parameters.

    specs: the specification of each parameter. A position is an index in this list.
    positions: positions of the parameters to cut.
    """
    for position in positions:
        spec = specs[position]
        if spec.without_owners:
            continue
        for grid in recipe.rules()[spec.path].blocking.grids(spec.shape, spec.matrices):
            numbers = not spec.shape
            yield BlockKind(spec.path, grid.shape, compute_dtype(spec.dtype), spec.device, numbers), position, grid


def blocks_without_owners(specs: Sequence[ParamSpec], rank: int) -> Iterator[tuple[BlockKind, int, BlockGrid]]:
    """Yield (kind of the block, position of the parameter, grid of one block) for parameters whose blocks have no
    owners (`ParamSpec.without_owners`).

    The block consists of all entries of the parameter that this rank updates. A parameter without such entries is left
    out.

    specs: the specification of each parameter. A position is an index in this list.
    """
    for position, spec in enumerate(specs):
        if spec.without_owners:
            box = spec.placed.updated.boxes[rank]
            if box.numel:
                kind = BlockKind(spec.path, box.shape, compute_dtype(spec.dtype), spec.device)
                yield kind, position, BlockGrid.single(box.shape)


def equal_blocks(
    cut: Iterable[tuple[BlockKind, int, BlockGrid]], specs: Sequence[ParamSpec], phases: Phases
) -> list[EqualBlocks]:
    """Return lists of blocks of equal shape, update, dtype and device, in the order in which they are refreshed.

    The lists are in the order of their first blocks.

    cut: (kind of the block, position of its parameter, grid of blocks), as `cut_blocks` yields them.
    """
    found: dict[BlockKind, list[tuple[int, BlockGrid]]] = {}
    for kind, position, grid in cut:
        found.setdefault(kind, []).append((position, grid))

    lists = []
    for kind, grids in found.items():
        due = [(phases[specs[position].key][list(grid.keys)], (position, grid)) for position, grid in grids]
        due.sort(key=lambda item: float(item[0][0]))
        own, ordered = zip(*due, strict=True)
        lists.append(EqualBlocks(kind, ordered, np.concatenate(own)))
    return lists


def connected(sets: Sequence[Set[int]]) -> list[list[int]]:
    """Return the connected components of sets, where sets with a common member are connected.

    A component is a list of indices of sets. Components are in the order of their first index.
    """
    found: list[tuple[set[int], list[int]]] = []
    for index, members in enumerate(sets):
        joined = [own for own in found if own[0] & members]
        merged = set(members).union(*(own for own, _ in joined))
        numbers = sorted([index, *(number for _, numbers in joined for number in numbers)])
        found = [*(own for own in found if not own[0] & members), (merged, numbers)]
    return sorted(numbers for _, numbers in found)


def stack_length(kind: BlockKind, recipe: Recipe) -> int:
    """Return how many blocks of one shape and update may be joined to one tensor (a stack)."""
    slots = slot_keys(recipe.rules()[kind.path], kind.path, kind.shape).values()
    return max_blocks(max([math.prod(kind.shape), *(math.prod(slot.shape) for slot in slots)]), kind.dtype, kind.device)


def divide(
    specs: Sequence[ParamSpec], recipe: Recipe, phases: Phases, ranks: int
) -> Iterator[tuple[BlockGroup, NDArray[np.float64]]]:
    """Divide the blocks that several ranks share into groups of N equal blocks, each group with its owners.

    Yield pairs (group, phases `[N]` of its blocks). A phase is the fraction of a refresh interval at which a block is
    refreshed.

    A group has at most as many blocks as fit into one round of messages (`round_bytes`), and into one stack for each
    rank. A group has more blocks only if stages need sums over a parameter: equal blocks of this parameter then stay in
    one group. Groups with blocks of the same such parameter are consecutive, and all but the first are marked as joined
    (`BlockGroup.joined`). Groups of neighboring parameters are close together, so that all updates of a parameter
    arrive within a few rounds.

    ranks: number of ranks that share the parameters.
    """
    limit = round_bytes(specs, recipe, ranks)
    sizes = (math.prod(spec.shape) * compute_dtype(spec.dtype).itemsize for spec in specs)
    runs = list(split_by_size(enumerate(sizes), limit))  # lists of neighboring positions with at most `limit` bytes
    if recipe.distribution.overlap_backward:  # backward computes the gradients of the last parameters first
        runs.reverse()
    for positions in runs:
        lists = list[EqualBlocks]()
        for blocks in equal_blocks(cut_blocks(specs, recipe, positions), specs, phases):
            fit = blocks_that_fit(limit, math.prod(blocks.kind.shape), blocks.kind.dtype)
            lists += blocks.split(min(fit, ranks * stack_length(blocks.kind, recipe)), recipe)
        spans = {path: update.spans() for path, update in recipe.rules().items()}
        for numbers in connected([some.positions if spans[some.kind.path] else set() for some in lists]):
            positions_together = set[int]().union(*(lists[number].positions for number in numbers))
            dtypes = {specs[position].dtype for position in positions_together}
            for number in numbers:
                group = _place(lists[number], specs, recipe, ranks, dtypes)
                yield replace(group, joined=number != numbers[0]), lists[number].phases


def round_bytes(specs: Sequence[ParamSpec], recipe: Recipe, ranks: int) -> int:
    """Return the number of bytes of updates that all ranks together send in one round of messages.

    Each rank then receives about `Distribution.message` bytes in a round, because a rank receives only the updates of
    the entries that it holds.
    """
    copies = [spec.placement.layout.copies for spec in specs if spec.placement is not None and not spec.without_owners]
    return recipe.distribution.message * ranks // max(copies, default=1)


def sends_parameters(specs: Sequence[ParamSpec], recipe: Recipe) -> bool:
    """Return True if owners send their blocks of the updated parameters, False if they send updates."""
    placements = [spec.placement for spec in specs if not spec.without_owners]
    replicated = all(placement is None or placement.layout.replicated for placement in placements)
    return recipe.distribution.gather == "parameters" and replicated


def _place(
    blocks: EqualBlocks, specs: Sequence[ParamSpec], recipe: Recipe, ranks: int, dtypes: Set[torch.dtype]
) -> BlockGroup:
    """Return the block group of equal blocks, with the owner of each block and its row in the owner's stack.

    With `distribution.dtype: bf16` every message is in bfloat16. Otherwise updates are sent in the dtype of the
    computation, and so are gradients if the recipe adds weight decay to gradients. All other gradients, and updated
    parameters if owners send them, have the dtype of the parameters if `dtypes` has a single one, else that of the
    computation.

    ranks: number of ranks that share the parameters.
    dtypes: dtypes of the parameters to which these blocks belong, and of parameters whose blocks are computed together
        with them.
    """
    path, shape, dtype, device, _ = blocks.kind
    rows = [0] * ranks
    placed = []
    for position, grid in blocks.single():
        owners = specs[position].placed.owners
        assert owners is not None
        owner = owners[grid.keys[0]]
        placed.append(PlacedBlock(position, grid, owner, rows[owner]))
        rows[owner] += 1
    own = next(iter(dtypes)) if len(dtypes) == 1 else dtype
    gradient = dtype if recipe.decays_in_gradient() else own
    sent = (gradient, own if sends_parameters(specs, recipe) else dtype)
    if recipe.distribution.dtype == "bf16":
        sent = (torch.bfloat16, torch.bfloat16)
    return BlockGroup(path, shape, dtype, *sent, device, tuple(placed))


def build(
    specs: Sequence[ParamSpec], recipe: Recipe, phases: Phases, rank_group: RankGroup | None = None
) -> tuple[list[StackState], list[BlockGroup]]:
    """Return the stacks that this rank computes, and the block groups that ranks exchange.

    rank_group: ranks that share the parameters. None: this process computes all stacks, and there are no block groups.
    """
    if rank_group is None:
        found = equal_blocks(cut_blocks(specs, recipe, range(len(specs))), specs, phases)
        require_slots(recipe, [(blocks.kind.path, blocks.kind.shape) for blocks in found])
        return _stack_states(found, specs, recipe), []
    rank, stack_states, block_groups, fresh = rank_group.rank, list[StackState](), list[BlockGroup](), FreshCodes()
    for group, due in divide(specs, recipe, phases, rank_group.size):
        owned = np.array([block.owner == rank for block in group.blocks])
        if owned.any():
            kind = BlockKind(group.path, group.shape, group.dtype, group.device)
            grids = [(block.position, block.grid) for block in group.owned(rank)]
            number = len(block_groups)
            stack_states.append(_stack_state(EqualBlocks(kind, grids, due[owned]), specs, recipe, fresh, number))
        block_groups.append(group)
    require_slots(recipe, [(group.path, group.shape) for group in block_groups])
    without_owners = equal_blocks(blocks_without_owners(specs, rank), specs, phases)
    return [*stack_states, *_stack_states(without_owners, specs, recipe, recipe.distribution.message)], block_groups


def _stack_states(
    lists: Iterable[EqualBlocks], specs: Sequence[ParamSpec], recipe: Recipe, limit: int | None = None
) -> list[StackState]:
    """Join equal blocks to stacks, and allocate the state of their updates. The blocks are not sent between ranks.

    lists: lists of equal blocks. A list with too many blocks for one stack becomes several stacks.
    specs: the specification of each parameter, by position.
    limit: largest size in bytes of a stack with several blocks. None: no such limit.
    """
    found, fresh = [], FreshCodes()
    for blocks in lists:
        most = stack_length(blocks.kind, recipe) if len(blocks.phases) > 1 else 1
        if limit is not None:
            most = min(most, blocks_that_fit(limit, math.prod(blocks.kind.shape), blocks.kind.dtype))
        found += [_stack_state(some, specs, recipe, fresh) for some in blocks.split(most, recipe)]
    return found


def _stack_state(
    blocks: EqualBlocks, specs: Sequence[ParamSpec], recipe: Recipe, fresh: FreshCodes, block_group: int | None = None
) -> StackState:
    """Join equal blocks to one stack, and allocate the state of their update.

    fresh, block_group: fields of `StackState`.
    """
    path, shape, dtype, device, _ = blocks.kind
    stack = Stack(shape, dtype, device, tuple(blocks.grids))
    owners = zip(stack.param_ids.tolist(), stack.keys, strict=True)
    seeds = np.array([_seed(specs[position].name, key) for position, key in owners], dtype=np.int64)
    state = StackState(recipe, path, stack, blocks.phases, seeds, fresh, block_group)
    if recipe.width_scaling is not None:
        factors = [specs[position].width_factors[own] for position, grid in stack.grids for own in grid.matrices]
        rounded = torch.tensor(factors, dtype=dtype, device="cpu")
        state.width_factors, state.host_factors = upload(rounded, device), tuple(rounded.tolist())
    return state


def _seed(name: str, key: int) -> int:
    """Return the seed of a block's random numbers, a hash of the parameter's name and the block's key."""
    digest = hashlib.blake2b(f"{name}/{key}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)
