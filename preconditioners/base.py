"""The contract of a preconditioner: a stage of an update chain, with three verbs over explicit state."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, ClassVar, final

from pydantic import Field
from torch import Tensor

from eigengraft.chains import ChainOf
from eigengraft.errors import ContractError, located
from eigengraft.ramps import Schedulable
from eigengraft.slots import Slot, State
from eigengraft.step_context import Rotation, StepContext

from .cadence import Cadence
from .checked_mode import watched


class Stage(Schedulable, ABC, family="stage"):
    """A map from gradient to direction.

    All tensors carry the leading stack axis `[N, *block]`. `gradient` is the gradient of the blocks in the current
    frame, `direction` what the stages before made of it; neither may be written to. A stage writes state back by
    assignment and never reads a parameter, a rank or a global setting.

    A stage acts by `observe`, `refresh` and `apply`; everything else that it may override declares what it is. With
    `lagged() == False` a step observes, refreshes the rows that are due, and applies; otherwise it applies first.

    Laws: N = 1 and N = k give the same numbers; a zero gradient gives a finite direction; slots declared = slots used.
    """

    name: str | None = Field(
        default=None,
        pattern=r"^[A-Za-z_][A-Za-z0-9_]*$",
        description="what the stage is called in paths; default: its kind. Needed where a kind repeats in a chain",
    )
    requires: ClassVar[frozenset[str]] = frozenset()
    """Signals that the optimizer must provide on the context, by name; the names are registered."""
    accepts: ClassVar[frozenset[str]] = frozenset()
    """Signals that are on the context in those steps only for which they were provided."""
    requires_first: ClassVar[frozenset[str]] = frozenset()
    """Those of `accepts` that all parameters of an optimizer's first step must have, but no step after it."""
    elsewhere: ClassVar[Mapping[str, str]] = {
        "storage": "it goes to the top level of the recipe: `storage: {<path of the stage>: int8}`",
        **dict.fromkeys(("lr", "weight_decay"), "it goes to the top level of the recipe"),
    }

    def signals(self) -> frozenset[str]:
        """The signals that must be there: `requires`, or what follows from fields."""
        return self.requires

    def signals_at(self, step: int) -> frozenset[str]:
        """Those of `signals` that must be there at a step of a block; default: all of them at every step."""
        return self.signals()

    @property
    def label(self) -> str:
        """The stage's part of a path: `name`, else `kind`."""
        return self.name or str(getattr(self, "kind"))  # noqa: B009  every member has a kind, the family has none

    def slots(self, block: tuple[int, ...]) -> Mapping[str, Slot]:
        """The state this stage itself needs for one block of that shape."""
        return {}

    def chains(self) -> Mapping[str, Stages]:
        """The chains inside this stage, by the name of their field."""
        return {}

    def inner_block(self, part: str, block: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of a block as the chain called `part` inside this stage sees it."""
        return block

    def inner_slot(self, part: str, slot: Slot) -> Slot:
        """A slot of the chain called `part` as this stage wants it declared; the default changes nothing."""
        return slot

    def inner_gradient(self, part: str, state: State, gradient: Tensor, context: StepContext) -> Tensor:
        """What the chain called `part` inside this stage sees of a first gradient that only primes statistics; to be
        overridden by a stage that gives its chains another gradient than its own."""
        return gradient

    def cadence(self) -> Cadence | None:
        """The cadence of `refresh`; None: never."""
        return None

    @final
    def due(self, context: StepContext) -> Sequence[tuple[int, int, bool]]:
        """(start, stop, first) spans of the stack whose refresh is due now."""
        if id(self) not in context.due:
            cadence, earliest = self.cadence(), 0 if self.lagged() else 1
            context.due[id(self)] = () if cadence is None else tuple(cadence.due(context, earliest))
        return context.due[id(self)]

    def lagged(self) -> bool:
        """Whether statistics and refresh follow the use of the current gradient (as published SOAP) or precede it."""
        return False

    def spans_parameter(self) -> bool:
        """Whether `apply` takes sums over all blocks of a parameter, which then have one owner and step together."""
        return False

    def refresh_cost(self, block: tuple[int, ...]) -> float:
        """The cost of one refresh of a block, in any unit common to all stages; refreshes are spread by it."""
        return 0.0

    def work(self, block: tuple[int, ...]) -> float:
        """Floating-point operations of one step of one block, refreshes left out; blocks are divided over ranks by it.

        Counted from the slots: a square matrix of order d on an axis of that length takes a product with the block,
        2 d numel, a basis two (there and back), anything else a few operations for each of its numbers.
        """
        total, numel = 0.0, math.prod(block)
        for slot in self.slots(block).values():
            square = len(slot.shape) == 2 and slot.shape[0] in block and slot.role in ("statistic", "root", "basis")
            products = 2 if slot.role == "basis" else 1
            total += 2.0 * products * slot.shape[1] * numel if square else 4.0 * math.prod(slot.shape)
        return total

    def left_out(self, block: tuple[int, ...]) -> tuple[str, ...]:
        """What the stage leaves alone of a block of that shape, and why, for `show`; default: nothing."""
        return ()

    def entrywise(self) -> bool:
        """Whether each entry of the direction and of the state depends on that entry of the gradients alone, so that a
        part of a block may be updated wherever it is, as if it were a block."""
        return False

    def needs_matrices(self) -> bool:
        """Whether the stage reads blocks as matrices, first axis x the rest."""
        return False

    def changes_gradient(self) -> bool:
        """Whether the stage, where the gradient comes to it as it is, is meant to change that for all stages after it,
        as clipping and centring are. A recipe is refused in which one of these reads the gradient: see `transform`."""
        return False

    def reads_gradient(self) -> bool:
        """Whether what the stage returns depends on the length of the gradient and not of the direction alone; chains
        inside speak for themselves. Default: whether it observes, or refreshes, the gradient."""
        own = type(self)
        learns = own.observe is not Stage.observe or own.refresh is not Stage.refresh
        return learns and own.observed is Stage.observed

    def spectral_norm(self, m: int, n: int, before: float | None) -> float | None:
        """The largest spectral norm of a direction m x n, given that of the direction before; None: not bounded."""
        return None

    def sweeps(self, block: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        """The axes of a block in groups that are observed and refreshed one after another (Gauss-Seidel); default: all
        in one sweep. With several `context.axes` are those of the present one."""
        return (tuple(range(len(block))),)

    def rotation(self, state: State, gradient: Tensor) -> Rotation | None:
        """The gradient in a basis of the stage's own, for a stage that observes there; default: None.

        It is made once a step, handed to the verbs as `context.rotation`, and made again for rows that were refreshed.
        """
        return None

    def observed(self, gradient: Tensor, direction: Tensor) -> Tensor:
        """The tensor that `observe` and `refresh` see as the gradient; override to learn from the direction."""
        return gradient

    def observe(self, state: State, gradient: Tensor, context: StepContext) -> None:
        """Every step, cheap: update the statistics that `refresh` reads. Default: nothing."""

    def refresh(self, state: State, gradient: Tensor, context: StepContext) -> None:
        """Rare, expensive: recompute roots, bases or learned factors, on any contiguous slice of the stack.

        gradient `[n, *block]`: of the rows that are refreshed. Default: nothing.
        """

    def measures(self, state: State, context: StepContext) -> Mapping[str, Tensor]:
        """Numbers `[N]` on the present state for `Optimizer.inspect`, by "<measure>" or "<slot>/<measure>". Nothing is
        written back, the context has no signals. Roles and cadence tell others; one of the same name replaces them."""
        return {}

    @abstractmethod
    def apply(self, state: State, gradient: Tensor, direction: Tensor, context: StepContext) -> Tensor:
        """Every step: map the direction `[N, *block]`; update the moments that live in the current frame.
        `context.parameter_sum(x)` gives sums of `x` `[N]` over parameters, `run_chain(...)` the direction of a chain
        inside."""

    @final
    def run(self, state: State, gradient: Tensor, direction: Tensor, context: StepContext) -> Tensor:
        """One step of this stage, its verbs in the order of its timing."""
        try:
            return self._run(state, gradient, direction, context)
        except ContractError as error:
            if state.path in str(error):  # it names the stage, or one inside it
                raise
            raise ContractError(f"{state.path}: {error}") from None

    def _run(self, state: State, gradient: Tensor, direction: Tensor, context: StepContext) -> Tensor:
        observed = self.observed(gradient, direction)
        context = context.with_rotation(self.rotation(state, observed))
        if self.lagged():
            direction = watched(self, state).apply(state, gradient, direction, context)
            self._observe_and_refresh(state, observed, context)
            return direction
        self._observe_and_refresh(state, observed, context)
        return watched(self, state).apply(state, gradient, direction, context)

    @final
    def prime(self, state: State, gradient: Tensor, context: StepContext) -> None:
        """The first gradient of a lagged stage: it is observed and the first refresh is made, nothing moves."""
        if self.lagged():
            observed = self.observed(gradient, gradient)
            self._observe_and_refresh(state, observed, context.with_rotation(self.rotation(state, observed)))
        for part, stages in self.chains().items():
            if not any(stage.lagged() for _, stage in walk(stages)):
                continue
            inside = state.scope(part, self.inner_block(part, state.block))
            seen = self.inner_gradient(part, state, gradient, context)
            for stage in stages:
                stage.prime(inside.scope(stage.label), seen, context)

    @final
    def _observe_and_refresh(self, state: State, gradient: Tensor, context: StepContext) -> None:
        """Each sweep in turn: observe, then refresh the rows that are due."""
        spans, sweeps = self.due(context), self.sweeps(state.block)
        for k, axes in enumerate(sweeps):
            now = context.sweep(axes, sum(sweeps[:k], ())) if len(sweeps) > 1 else context
            watched(self, state).observe(state, gradient, now)
            for start, stop, first in spans:
                own = state if stop - start == len(gradient) else state.slice_rows(start, stop)
                self._refresh_rows(own, gradient[start:stop], now.slice_rows(start, stop, first))

    @final
    def _refresh_rows(self, state: State, gradient: Tensor, context: StepContext) -> None:
        """Refresh rows of the stack; what is known of their gradient in the old basis is brought to the new one."""
        watched(self, state).refresh(state, gradient, context)
        if context.rotation is not None:
            turned = self.rotation(state, context.rotation.x)
            assert turned is not None
            context.rotation.overwrite(turned)


Stages = Annotated[tuple[Stage, ...], ChainOf("stage", "stages of a chain")]
"""A chain: stages in order. In YAML a list, or a single stage."""


def run_chain(
    stages: tuple[Stage, ...], state: State, gradient: Tensor, direction: Tensor, context: StepContext
) -> Tensor:
    """Runs the stages in order, each on the direction that the one before returned."""
    for stage in stages:
        direction = stage.run(state.scope(stage.label), gradient, direction, context)
    return direction


def chain_norm(stages: tuple[Stage, ...], m: int, n: int, before: float | None = None) -> float | None:
    """The largest spectral norm of what a chain makes of a direction m x n; None: not bounded."""
    for stage in stages:
        before = stage.spectral_norm(m, n, before)
    return before


def walk(stages: tuple[Stage, ...], path: str = "") -> Iterator[tuple[str, Stage]]:
    """Every stage of a chain and of the chains inside it, with its dotted path."""
    for stage in stages:
        here = f"{path}.{stage.label}" if path else stage.label
        yield here, stage
        for part, inside in stage.chains().items():
            yield from walk(inside, f"{here}.{part}")


def chain_slots(stages: tuple[Stage, ...], block: tuple[int, ...], path: str = "") -> Iterator[tuple[str, str, Slot]]:
    """(stage path, slot name, slot) of all state that a chain needs for one block."""
    for stage in stages:
        here = f"{path}.{stage.label}" if path else stage.label
        try:
            slots = stage.slots(block)
        except ValueError as error:
            raise ValueError(located(here, str(error))) from None
        for name, slot in slots.items():
            yield here, name, slot
        for part, inside in stage.chains().items():
            for inner, name, slot in chain_slots(inside, stage.inner_block(part, block), f"{here}.{part}"):
                yield inner, name, stage.inner_slot(part, slot)
