"""A stage under test: a bench that runs the stage without an optimizer, and a case with the stage's properties."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from eigengraft.blocking.parameter_sums import ParameterSum, run_stacks
from eigengraft.errors import ContractError
from eigengraft.preconditioners import Stage, chain_slots, walk
from eigengraft.preconditioners.checked_mode import Checks
from eigengraft.quantization import Quantizer
from eigengraft.signals import known_signals, requested
from eigengraft.slots import EncodedSlot, State, StateKey, Storage
from eigengraft.step_context import StepContext

from .laws import Case, LawError, broken, in_parentheses, require
from .samples import TRAJECTORY_STEPS, gradients, signals_of


class Recorder(dict[str, Tensor]):
    """Mapping of state tensors that records in `used` which tensors were read."""

    def __init__(self) -> None:
        super().__init__()
        self.used: set[str] = set()

    def __getitem__(self, key: str) -> Tensor:
        self.used.add(key)
        return super().__getitem__(key)


class StageBench:
    """A stage with the state of N blocks of one shape. Tests run it without an optimizer.

    counts: `[N]`, number of gradients that each block has received.
    lagging: True if the stage, or a stage inside it, applies its state to a gradient before it learns from the gradient
        (`Traits.lagged`). The first gradient of a block then only initializes the state.
    spans: True if the stage, or a stage inside it, needs sums over all blocks of a parameter. On the bench each block
        is a parameter of its own.
    """

    def __init__(
        self,
        stage: Stage,
        block: tuple[int, ...],
        blocks: int,
        dtype: torch.dtype = torch.float64,
        quantizer: Quantizer | None = None,
        path: str = "update",
    ) -> None:
        """Allocate the state.

        block: shape of a block.
        blocks: number N of blocks.
        quantizer: storage of every slot that the quantizer can store; None: no slot is quantized.
        path: path of the stage's chain in state keys and error messages.
        """
        self.stage: Any = stage
        self.block, self.blocks, self.dtype, self.quantizer, self.path = block, blocks, dtype, quantizer, path
        slots = chain_slots((stage,), block, path)
        self.declared = {StateKey.join(where, name): slot for where, name, slot in slots}
        self.tensors, self.encoded = Recorder(), dict[str, EncodedSlot]()
        self.watch: Checks | None = None
        for key, slot in self.declared.items():
            value = slot.allocate(blocks, dtype, torch.get_default_device())
            if quantizer is None or quantizer.unsupported(slot) is not None:
                self.tensors[key] = value
                continue
            parts = quantizer.encode(value)
            self.encoded[key] = EncodedSlot(slot, quantizer, tuple(parts), value.dtype)
            self.tensors.update({StateKey.join(key, part): stored for part, stored in parts.items()})
        self.counts = np.zeros(blocks, dtype=np.int64)
        self.phases = np.arange(blocks) / blocks
        self.seeds = np.arange(blocks) * 7919 - 11
        every = [inner for _, inner in walk((stage,))]
        self.lagging, self.spans = (
            any(getattr(inner.cached_traits(), name) for inner in every) for name in ("lagged", "sums")
        )
        asked = frozenset[str]().union(*map(requested, every))
        self.requested = {name: signal for name, signal in known_signals().items() if name in asked}

    def checked(self) -> StageBench:
        """Switch checked mode on, and return this bench."""
        self.watch = Checks(self.declared)
        return self

    def step(
        self, gradient: Tensor, direction: Tensor | None = None, rows: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensor:
        """Run one step for n of the N blocks, and return their directions `[n, *block]`.

        The first step of a lagged stage only initializes its state, and its directions are 0.

        gradient: the gradients of these blocks, `[n, *block]`.
        direction: the incoming directions; None for the gradients.
        rows: indices of the n blocks; None for all blocks.
        mask: bool `[n]`, True for blocks whose state is written; None for all n blocks.
        """
        return self.start(gradient, direction, rows, mask)[0]()

    def start(
        self, gradient: Tensor, direction: Tensor | None = None, rows: Tensor | None = None, mask: Tensor | None = None
    ) -> tuple[Callable[[], Tensor], StepContext]:
        """Prepare one step. Return a function without arguments that runs it, and the context of the step.

        The arguments are those of `step`.
        """
        chosen = np.arange(self.blocks) if rows is None else rows.cpu().numpy()
        self.counts[chosen] += 1
        storage = Storage(self.encoded, watch=self.watch)
        state = State(self.tensors, self.block, self.path, rows, mask, storage).scope(self.stage.label)
        context = self.context(chosen)
        if self.lagging and (context.steps == 0).any():
            assert (context.steps == 0).all()
            return partial(self._prime, state, gradient, context), context
        return partial(self._run, state, gradient, gradient if direction is None else direction, context), context

    def _prime(self, state: State, gradient: Tensor, context: StepContext) -> Tensor:
        self.stage.prime(state, gradient, gradient, context)
        return torch.zeros_like(gradient)

    def _run(self, state: State, gradient: Tensor, direction: Tensor, context: StepContext) -> Tensor:
        def run(sums: ParameterSum | None = None) -> Tensor:
            own = context if sums is None else context.with_sums(sums)
            found = self.stage.run(state, gradient, direction, own)
            assert isinstance(found, Tensor)
            return found

        return run_stacks([run], [context.matrix_ids])[0] if self.spans else run()

    def measures(self, rows: slice) -> dict[str, Tensor]:
        """Return the measures that the stage reports for some blocks: by name, one number for each block, `[n]`.

        rows: the indices of the n blocks, as a slice.
        """
        chosen = np.arange(self.blocks)[rows]
        nothing_written = torch.zeros(len(chosen), dtype=torch.bool)
        state = State(self.tensors, self.block, self.path, rows, nothing_written, Storage(self.encoded))
        context = replace(self.context(chosen), signals={})
        return dict(self.stage.measures(state.scope(self.stage.label), context))

    def context(self, chosen: Any) -> StepContext:
        """Return the context of the chosen blocks, with their own steps and every signal that the stage requests.

        The signal of a block does not depend on which other blocks are chosen. For slots with `total=True`,
        `context.total` returns 1 instead of the sum over all blocks of all parameters.

        chosen: indices of the blocks, as a NumPy array.
        """
        steps, seeds, device = self.counts[chosen] - int(self.lagging), self.seeds[chosen], torch.get_default_device()
        signals = signals_of(self.requested.values(), self.block, seeds, self.dtype)
        signals |= {key: 1.0 for key, slot in self.declared.items() if slot.total}
        return StepContext(steps, self.phases[chosen], chosen, device, seeds, signals)

    def run(self, gradients: Tensor) -> Tensor:
        """Run one step for each of the gradients `[T, N, *block]`. Return the directions, in the same shape."""
        # directions are cloned, because a direction may be a tensor of the state
        return torch.stack([self.step(gradient).clone() for gradient in gradients])

    def copy(self) -> StageBench:
        """Return a bench with a copy of the state, at the same step."""
        copied = self.renewed(range(self.blocks))
        for key, tensor in self.tensors.items():
            copied.tensors[key] = tensor.clone()
        copied.counts = self.counts.copy()
        return copied

    def renewed(self, rows: Sequence[int]) -> StageBench:
        """Return a bench with new state for some blocks of this bench, which keep their phases and seeds.

        rows: indices of these blocks in this bench. An index may occur several times.
        """
        bench = StageBench(self.stage, self.block, len(rows), self.dtype, self.quantizer, self.path)
        bench.phases, bench.seeds = self.phases[[*rows]], self.seeds[[*rows]]
        return bench

    def require_written(self) -> None:
        """Raise a LawError if a slot was never assigned since checked mode was switched on."""
        assert self.watch is not None
        for key in sorted(self.declared.keys() - self.watch.written):
            name = StateKey.parse(key).slot
            cause = f'write `state["{name}"] = ...`; for a slot that refresh() writes: does cadence() return a cadence?'
            where = f"slot {key} in {self.counts.max()} steps"
            raise broken(where, "an assignment", "its initial value", in_parentheses(cause))

    def require_used(self) -> None:
        """Raise a LawError if a declared slot was neither read nor written."""
        idle = ", ".join(sorted(self.declared.keys() - self.tensors.used))
        require(not idle, "slots()", "slots that are read or written", f"slots that are neither: {idle}")


BLOCKS = ((6, 5), (7,), (3, 2, 4), (1, 1))
"""Shapes of the blocks to try: matrices, vectors, tensors and single numbers."""
Degree = float | Callable[[int], float]


@dataclass(frozen=True)
class StageCase(Case[Stage]):
    """A stage and its properties.

    blocks: shapes of the blocks to try.
    degree: the number d for which scaling all gradients by c scales the direction by c^d, or a function that returns d
        for the number of axes of a block. None: this law does not apply.
    rotates: True if gradients U G V^T, with orthogonal U and V, give the directions U D V^T, where D are the directions
        of G.
    singular: True if the stage computes bases or roots of singular statistics. Laws that compare two computations then
        do not apply, because numbers in the null space of such a statistic are rounding errors.
    steps: length of a trajectory.
    """

    blocks: tuple[tuple[int, ...], ...] = BLOCKS
    degree: Degree | None = None
    rotates: bool = False
    singular: bool = False
    steps: int = TRAJECTORY_STEPS

    @property
    def who(self) -> str:
        return f"update.{self.component.label}"

    def bench(self, block: tuple[int, ...], blocks: int = 3, dtype: torch.dtype = torch.float64) -> StageBench:
        """Return the stage with fresh state for `blocks` blocks, which laws run without an optimizer."""
        return StageBench(self.component, block, blocks, dtype)

    def gradients(self, block: tuple[int, ...], blocks: int = 3, dtype: torch.dtype = torch.float64) -> Tensor:
        """Return standard normal gradients `[steps, blocks, *block]`."""
        return gradients(block, blocks, dtype)[: self.steps]

    @cached_property
    def _trajectories(self) -> dict[tuple[tuple[int, ...], torch.dtype], tuple[Tensor, StageBench, StageBench]]:
        return {}

    def trajectory(self, block: tuple[int, ...], dtype: torch.dtype = torch.float64) -> tuple[Tensor, StageBench]:
        """Run the stage on `gradients`, for three blocks from fresh state. Return (directions, stage with its state
        after the last step).

        All laws share one run for each shape and dtype, so they must not run further steps on the result.
        """
        out, _, bench = self._trajectory(block, dtype)
        return out, bench

    def halfway(self, block: tuple[int, ...]) -> StageBench:
        """Return the stage with its state after half of the steps of `trajectory`. The state is a copy, so that laws
        may run further steps.
        """
        return self._trajectory(block, torch.float64)[1].copy()

    def _trajectory(self, block: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, StageBench, StageBench]:
        """Run the stage as `trajectory` does. Return (directions, stage with a copy of its state after half of the
        steps, stage with its state after all steps).
        """
        if (block, dtype) not in self._trajectories:
            bench, given = self.bench(block, dtype=dtype), self.gradients(block, dtype=dtype)
            first = bench.run(given[: self.steps // 2])
            half = bench.copy()
            out = torch.cat([first, bench.run(given[self.steps // 2 :])])
            self._trajectories[block, dtype] = out, half, bench
        return self._trajectories[block, dtype]

    def degree_on(self, block: tuple[int, ...]) -> float:
        """Return the number d for blocks of shape `block`: if all gradients are scaled by c, directions are scaled by
        c^d.
        """
        assert self.degree is not None
        return self.degree(len(block)) if callable(self.degree) else self.degree


@contextmanager
def on(block: tuple[int, ...], what: str = "") -> Iterator[None]:
    """Return a context manager that adds the shape of the blocks to errors that are raised in its `with` statement.

    block: the shape.
    what: more text to add, such as the dtype.
    """
    where = f"on blocks of shape {block}" + (f", {what}" if what else "")
    try:
        yield
    except (LawError, ContractError) as error:
        raise type(error)(f"{error} ({where})") from error.__cause__
    except Exception as error:
        error.add_note(where)
        raise
