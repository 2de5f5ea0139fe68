"""The state of a stack: its tensors, and the blocks of it that take part in a step."""

from __future__ import annotations

import math
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import InitVar, dataclass, field
from functools import cached_property
from typing import Literal, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from eigengraft.blocking.stacks import Stack
from eigengraft.distributed.rank_group import HostCopy
from eigengraft.numerics import kept_on_device
from eigengraft.preconditioners.checked_mode import Checks
from eigengraft.quantization import Quantizer, choose
from eigengraft.signals import requested
from eigengraft.slots import FORMAT, Encoded, EncodedSlot, Slot, State, StateKey, Storage, Watch
from eigengraft.step_context import StepContext

from ..recipe.recipe import Recipe, Route, slot_keys

FreshCodes = dict[tuple[str, Slot, torch.dtype, torch.device], Encoded]
"""Codes `[1, ...]` of fresh slots, by what they follow from: the quantizer, the slot, dtype and device."""


@dataclass
class StackState:
    """A stack of N blocks under one update of a recipe, with the state of its stages.

    path: path of the update in the recipe, "" or "routes.<name>".
    rule: the update at that path.
    stack: the blocks.
    storage: how slots are stored, by role or by path.
    phases: `[N]` in [0, 1), where in a refresh interval each block is due.
    seeds: `[N]`, what the random numbers of each block are made of.
    number: which of the stacks of its parameter set it is.
    block_group: number of the block group whose owned blocks these are; None: no block of the stack travels.
    lr_factors: `[N]`, what the direction of each block is multiplied by; None: nothing.
    tensors: state by "<stage path>/<slot>", `[N, ...]`.
    encoded: slots that are stored by a quantizer; their tensors are "<stage path>/<slot>/<code>".
    checks: what checks the contract of every stage in checked mode; None: nothing does.
    step_watch: what measures the present step, in front of the checks; None: nothing does.
    fresh: codes of one block of fresh slots that other stacks have encoded, to be used again, and to be added to.
    """

    path: str
    rule: Recipe | Route
    stack: Stack
    storage: Mapping[str, Quantizer]
    phases: NDArray[np.float64]
    seeds: NDArray[np.int64]
    block_group: int | None = None
    number: int = 0
    lr_factors: Tensor | None = None
    tensors: dict[str, Tensor] = field(default_factory=dict, init=False)
    encoded: dict[str, EncodedSlot] = field(default_factory=dict, init=False)
    checks: Checks | None = field(default=None, init=False)
    step_watch: Watch | None = field(default=None, init=False)
    _failing: HostCopy | None = field(default=None, init=False, repr=False)
    _selected: tuple[NDArray[np.bool_], ActiveBlocks] | None = field(default=None, init=False, repr=False)
    fresh: InitVar[FreshCodes | None] = None

    def __post_init__(self, fresh: FreshCodes | None) -> None:
        known = {} if fresh is None else fresh
        for key, slot in self.slots():
            self._allocate(key, slot, known)

    def slots(self) -> Iterator[tuple[StateKey, Slot]]:
        """(key, slot) of all state that the stages declare; the keys name no block."""
        yield from slot_keys(self.rule, self.path, self.stack.block).items()

    def stored(self, key: StateKey) -> list[Tensor]:
        """The tensors that a slot is stored in: one, or its codes."""
        return [tensor for own, tensor in self.tensors.items() if StateKey.parse(own).name == key.name]

    def _allocate(self, key: StateKey, slot: Slot, fresh: FreshCodes) -> None:
        blocks, dtype, device = len(self.stack.param_ids), self.stack.dtype, self.stack.device
        quantizer = choose(self.storage, key, slot)
        if quantizer is None:
            self.tensors[str(key)] = slot.allocate(blocks, dtype, device)
            return
        same = (quantizer.model_dump_json(), slot, dtype, device)
        if same not in fresh:  # a fresh slot is the same for every block, and to encode it may take a decomposition
            fresh[same] = quantizer.encode(slot.allocate(1, dtype, device))
        codes = {part: code.repeat(blocks, *[1] * (code.ndim - 1)) for part, code in fresh[same].items()}
        self.encoded[str(key)] = EncodedSlot(slot, quantizer, tuple(codes), slot.dtype or dtype)
        coded = {
            **codes,
            FORMAT: torch.full((blocks,), quantizer.format(), dtype=torch.int64, device=self.stack.device),
        }
        self.tensors.update({str(key._replace(part=part)): stored for part, stored in coded.items()})

    def names(self, key: StateKey) -> list[str]:
        """The names of the tensors that a slot is stored in, `FORMAT` included."""
        how = self.encoded.get(str(key))
        return [str(key)] if how is None else [str(key._replace(part=part)) for part in (*how.names, FORMAT)]

    def format_of(self, name: str) -> int:
        """The format of a coded slot, by "<stage path>/<slot>"."""
        return cast(Quantizer, self.encoded[name].codec).format()

    def restart(self, row: int, changed: Container[str]) -> None:
        """Gives slots of one block that hold zeros the values that they begin with, where these are others.

        changed: names of the tensors that something else than a step has written; other slots stay.
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
            floats = [part for part in stored if part.is_floating_point()]  # scales of zero make any codes zero
            if any(part.float().any() for part in floats or stored) and how.codec.decode(parts, slot, how.dtype).any():
                continue
            fresh = how.codec.encode(slot.allocate(1, self.stack.dtype, self.stack.device))
            for part, value in fresh.items():
                parts[part].copy_(value)

    @cached_property
    def signals(self) -> frozenset[str]:
        """What the stages of this stack ask for."""
        return frozenset(name for _, stage in self.rule.stages() for name in requested(stage))

    @cached_property
    def totals(self) -> tuple[str, ...]:
        """The slots whose sums over all blocks of all parameters the stages read."""
        return tuple(key.name for key, slot in self.slots() if slot.total)

    @property
    def watched(self) -> bool:
        """Whether something follows how stages use their state: checked mode, or the measures of a step."""
        return self.checks is not None or self.step_watch is not None

    @cached_property
    def failure_counts(self) -> tuple[str, ...]:
        """The slots in which stages count failures of their roots and bases."""
        return tuple(str(key) for key, slot in self.slots() if slot.role == "failures")

    @cached_property
    def step_sizes(self) -> tuple[StateKey, ...]:
        """The slots of the update by which weight decay is multiplied."""
        update = f"{self.path}.update." if self.path else "update."
        return tuple(key for key, slot in self.slots() if slot.step_size and str(key.stage).startswith(update))

    @property
    def adds_decay(self) -> bool:
        """Whether directions have their weight decay before they are written."""
        return bool(self.rule.after_decay or self.step_sizes)

    @cached_property
    def lagging(self) -> bool:
        """Whether a block's first gradient only primes its statistics."""
        return self.rule.lagging()

    @cached_property
    def spans(self) -> bool:
        """Whether a stage takes sums over all blocks of a parameter."""
        return self.rule.spans()

    @cached_property
    def entries(self) -> list[list[Tensor]]:
        """The state of each row, slot by slot, as compiled kernels take it: views `[1, numel, 1, ...]`."""
        shape = (1, math.prod(self.stack.block), *[1] * (len(self.stack.block) - 1))
        slots = [tensor.view(-1, *shape).unbind() for tensor in self.tensors.values()]
        return [[slot[row] for slot in slots] for row in range(len(self.stack.param_ids))]

    @cached_property
    def all_blocks(self) -> ActiveBlocks:
        """All blocks of the stack."""
        return ActiveBlocks(self, self.stack, None)

    def select(self, active: NDArray[np.bool_]) -> ActiveBlocks | None:
        """Return the blocks of active parameters, None if there are none.

        active: `[P]`, by position of the parameter. The last selection is kept, so that its indices are uploaded once.
        """
        own = active[self.stack.param_ids]
        if own.all():
            return self.all_blocks
        if not own.any():
            return None
        if self._selected is None or not np.array_equal(self._selected[0], own):
            self._selected = own, ActiveBlocks(self, self.stack.select(active), np.flatnonzero(own))
        return self._selected[1]

    def context(
        self, blocks: ActiveBlocks, counts: NDArray[np.int64], signals: Mapping[str, Tensor | float]
    ) -> StepContext:
        """Return the context of active blocks; counts: gradients that each parameter has had, this one included."""
        cut: slice | NDArray[np.int64] = slice(None) if blocks.places is None else blocks.places
        steps = counts[blocks.stack.param_ids] - int(self.lagging)
        return StepContext(
            steps, self.phases[cut], blocks.stack.matrix_ids, self.stack.device, self.seeds[cut], signals
        )

    def note_failures(self, tolerated: int) -> None:
        """Ask which blocks have a root or basis that failed more often in a row than tolerated."""
        if self.failure_counts:
            found = torch.stack([self.tensors[key] > tolerated for key in self.failure_counts]).any(0)
            self._failing = HostCopy(found)

    def failing(self, wait: bool) -> NDArray[np.int64]:
        """Return, once, positions of the parameters of blocks that `note_failures` found.

        wait: whether to wait for a device; if not, a device is asked at the next call.
        """
        if self._failing is None or not (wait or self.stack.device.type == "cpu"):
            return np.zeros(0, dtype=np.int64)
        found, self._failing = self._failing.wait(), None
        positions: NDArray[np.int64] = self.stack.param_ids[found.numpy()]
        return positions

    def check(self) -> None:
        """Checks the contract of every stage from now on, at every step."""
        self.checks = Checks({str(key): slot for key, slot in self.slots()})

    def state(
        self, chain: Literal["update", "after_decay"], rows: Tensor | None, mask: Tensor | None, context: StepContext
    ) -> State:
        """The state that a chain reads and writes in one call, for the selected rows (None: all)."""
        counters = (lambda: (context.seed, context.step)) if self.encoded else None
        path = f"{self.path}.{chain}" if self.path else chain
        storage = Storage(self.encoded, counters, self.step_watch or self.checks)
        return State(self.tensors, self.stack.block, path, rows, mask, storage)

    def rows(self) -> Iterator[tuple[int, int, int]]:
        """(row, parameter position, block key) of every block."""
        for row, (position, key) in enumerate(zip(self.stack.param_ids.tolist(), self.stack.keys, strict=True)):
            yield row, position, key


@dataclass(frozen=True, eq=False)
class ActiveBlocks:
    """The n blocks of a stack that take part in a step.

    stack_state: the stack with its state.
    stack: the active blocks as a stack of their own.
    places: `[n]` on the host, rows of the active blocks in `stack_state`; None: all of them.
    """

    stack_state: StackState
    stack: Stack
    places: NDArray[np.int64] | None

    @cached_property
    def rows(self) -> Tensor | None:
        """`places` on the device of the stack."""
        return None if self.places is None else kept_on_device(self.places, self.stack.device)

    @cached_property
    def param_index(self) -> Tensor:
        """`[n]` on the device of the stack, position of the parameter that each block belongs to."""
        return kept_on_device(self.stack.param_ids, self.stack.device)

    @property
    def row_numbers(self) -> Sequence[int]:
        """Rows of the active blocks in `stack_state`, on the host."""
        return range(len(self.stack.param_ids)) if self.places is None else self.places.tolist()
