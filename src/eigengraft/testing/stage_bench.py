"""A stage and its state for a stack of blocks, without an optimizer: what the laws of stages are tried on."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from eigengraft.blocking.parameter_sums import ParameterSum, run_stacks
from eigengraft.chains import SIDES, known_signals, requested
from eigengraft.preconditioners import Stage, chain_slots, walk
from eigengraft.preconditioners.checked_mode import Checks
from eigengraft.quantization import Quantizer
from eigengraft.slots import EncodedSlot, State, Storage
from eigengraft.state_key import StateKey
from eigengraft.step_context import StepContext

from .laws import require


class Recorder(dict[str, Tensor]):
    """State tensors that remember which of them were asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.used: set[str] = set()

    def __getitem__(self, key: str) -> Tensor:
        self.used.add(key)
        return super().__getitem__(key)


class StageBench:
    """N blocks of one shape with a stage's state. counts: gradients that each block has seen."""

    def __init__(
        self,
        stage: Stage,
        block: tuple[int, ...],
        blocks: int,
        dtype: torch.dtype = torch.float64,
        quantizer: Quantizer | None = None,
        path: str = "update",
    ) -> None:
        """quantizer: stores every slot that it takes; default: none is coded. path: of the chain, in keys, errors."""
        self.stage: Any = stage
        self.block, self.blocks, self.dtype, self.quantizer, self.path = block, blocks, dtype, quantizer, path
        slots = chain_slots((stage,), block, path)
        self.declared = {StateKey.join(where, name): slot for where, name, slot in slots}
        self.tensors, self.encoded = Recorder(), dict[str, EncodedSlot]()
        self.watch: Checks | None = None
        for key in self.declared:
            self._allocate(key)
        self.counts = np.zeros(blocks, dtype=np.int64)
        self.phases = np.arange(blocks) / blocks
        self.seeds = np.arange(blocks) * 7919 - 11
        self.lagging = any(inner.cached_traits().lagged for _, inner in walk((stage,)))
        asked = frozenset[str]().union(*(requested(inner) for _, inner in walk((stage,))))
        self.heard = {name: signal for name, signal in known_signals().items() if name in asked}

    def _allocate(self, key: str) -> None:
        slot = self.declared[key]
        value = slot.allocate(self.blocks, self.dtype, torch.get_default_device())
        if self.quantizer is None or self.quantizer.unsupported(slot) is not None:
            self.tensors[key] = value
            return
        parts = self.quantizer.encode(value)
        self.encoded[key] = EncodedSlot(slot, self.quantizer, tuple(parts), value.dtype)
        self.tensors.update({StateKey.join(key, part): stored for part, stored in parts.items()})

    def checked(self) -> StageBench:
        """This bench, in checked mode from now on."""
        self.watch = Checks(self.declared)
        return self

    def step(
        self, gradient: Tensor, direction: Tensor | None = None, rows: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensor:
        """One step of the selected rows; the first of a lagged stage only primes and returns zero."""
        return self.start(gradient, direction, rows, mask)[0]()

    def start(
        self, gradient: Tensor, direction: Tensor | None = None, rows: Tensor | None = None, mask: Tensor | None = None
    ) -> tuple[Callable[[], Tensor], StepContext]:
        """Prepare a step. Return the function that takes it, and its context."""
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

        sums = any(inner.cached_traits().sums for _, inner in walk((self.stage,)))
        return run_stacks([run], [context.param_ids])[0] if sums else run()

    def measures(self, rows: slice) -> dict[str, Tensor]:
        """What the stage tells of its state in some rows, as inspection asks for it."""
        chosen = np.arange(self.blocks)[rows]
        nothing_written = torch.zeros(len(chosen), dtype=torch.bool)
        state = State(self.tensors, self.block, self.path, rows, nothing_written, Storage(self.encoded))
        context = replace(self.context(chosen), signals={})
        return dict(self.stage.measures(state.scope(self.stage.label), context))

    def context(self, chosen: Any) -> StepContext:
        """The context of the chosen blocks: their own steps, and every signal that the stage declares."""
        steps = self.counts[chosen] - int(self.lagging)
        device, signals = torch.get_default_device(), self._signals(chosen)
        return StepContext(steps, self.phases[chosen], chosen, device, self.seeds[chosen], signals)

    def _signals(self, chosen: Any) -> dict[str, Tensor | float]:
        """Every signal that the stage declares, the same for a block alone as in a stack; totals are 1, whatever slots
        hold."""
        seeds, found = self.seeds[chosen], dict[str, Tensor | float]({"lr": 0.1} if "lr" in self.heard else {})
        size = torch.from_numpy(0.5 + seeds % 11 / 10).to(torch.get_default_device(), self.dtype)
        for name, signal in self.heard.items():
            if signal.extent == "entry":
                ones = torch.linspace(0.5, 1, max(1, math.prod(self.block)), dtype=self.dtype).reshape(self.block)
                found[name] = size.reshape(-1, *[1] * len(self.block)) * ones
            elif signal.extent in SIDES:
                own = self.block[-1 if SIDES[signal.extent] == "inputs" else 0] if len(self.block) > 1 else 1
                shape = torch.eye(own, dtype=self.dtype) + torch.full((own, own), 0.5, dtype=self.dtype)
                found[name] = size[:, None, None] * shape.to(size)
            elif signal.extent == "partner":
                rows = torch.linspace(-1, 1, 7 * self.block[-1], dtype=self.dtype).reshape(7, -1).sin()
                found[name] = size[:, None, None] * (rows + torch.eye(*rows.shape, dtype=self.dtype)).to(size)
            elif signal.extent != "outputs":  # which constraints alone see
                found.setdefault(name, 0.5 if signal.extent == "step" else size)
        return {**found, **{key: 1.0 for key, slot in self.declared.items() if slot.total}}

    def run(self, gradients: Tensor) -> Tensor:
        """gradients `[T, N, *block]` -> the directions, of the same shape."""
        return torch.stack([self.step(gradient).clone() for gradient in gradients])  # it may be the state itself

    def copy(self) -> StageBench:
        """A bench with a copy of the state, at the same step."""
        twin = StageBench(self.stage, self.block, self.blocks, self.dtype, self.quantizer, self.path)
        for key, tensor in self.tensors.items():
            twin.tensors[key] = tensor.clone()
        twin.counts = self.counts.copy()
        return twin

    def repeated(self, times: int) -> StageBench:
        """A fresh bench with the blocks of this one several times over: what differs between the copies is what they
        are given."""
        many = StageBench(self.stage, self.block, self.blocks * times, self.dtype, self.quantizer, self.path)
        many.phases, many.seeds = np.tile(self.phases, times), np.tile(self.seeds, times)
        return many

    def only(self, block: int) -> StageBench:
        """A bench for one block of this one, fresh."""
        alone = StageBench(self.stage, self.block, 1, self.dtype, self.quantizer, self.path)
        alone.phases, alone.seeds = self.phases[block : block + 1], self.seeds[block : block + 1]
        return alone

    def require_written(self) -> None:
        """Raises a LawError for slots that nothing was assigned to since checked mode began."""
        assert self.watch is not None
        for key in sorted(self.declared.keys() - self.watch.written):
            name = StateKey.parse(key).slot
            require(
                False,
                f'`state["{name}"] = ...` is required for {key}, got a slot that keeps its initial value in '
                f"{self.counts.max()} steps (for one that refresh() writes: does cadence() return a cadence?)",
            )

    def require_used(self) -> None:
        """Raises a LawError for slots that were declared and never read nor written."""
        idle = ", ".join(sorted(self.declared.keys() - self.tensors.used))
        require(not idle, f"every slot of slots() read or written is required, got some that are not used: {idle}")
