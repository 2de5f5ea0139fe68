"""What the engine must know of a stage beside what its hooks do.

The contract of a stage: eight hooks over explicit state, and what runs them.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal, TypeVar, final

from pydantic import Field
from torch import Tensor

from eigengraft.chains import ChainOf, Request
from eigengraft.errors import ContractError, located
from eigengraft.ramps import Schedulable
from eigengraft.slots import Slot, State
from eigengraft.step_context import StepContext

from .cadence import Cadence
from .checked_mode import CheckedHooks, Hooks


@dataclass(frozen=True)
class Traits:
    """The facts about a stage on a block of one shape; every default is safe. The engine asks once and keeps them.

    Of the first six the engine also asks with the empty block `()`: they may not depend on the shape.

    signals: what the stage asks for beside the gradient.
    lagged: whether the present gradient is used before it is learned. A step then applies, observes, refreshes, and the
        first gradient of a parameter only primes the chain: statistics are made of it and nothing moves.
    entrywise: whether each entry of direction and state depends on that entry of the gradients alone, so that any part
        of a block may be updated wherever it is.
    matrices: whether blocks are read as matrices, first axis x the rest.
    sums: whether `apply` takes `context.parameter_sum`: all blocks of a parameter then have one owner, and step
        together.
    learns: whether `observe` and `refresh` see the gradient or the direction that comes in.
    refresh_cost: cost of one refresh of the block, in any unit common to all stages; refreshes are spread by it.
    work: floating-point operations of one step without refreshes; None: they are counted from the slots.
    left_out: what the stage leaves alone of the block, and why, as `show` prints it.
    spectral_norm: the largest spectral norm that a direction of the stage may have; None: it has no bound of its own.
    spectral_gain: the largest factor from the spectral norm of the direction that comes in to that which goes out;
        None: no such factor is known.
    """

    signals: tuple[Request, ...] = ()
    lagged: bool = False
    entrywise: bool = False
    matrices: bool = False
    sums: bool = False
    learns: Literal["gradient", "direction"] = "gradient"
    refresh_cost: float = 0.0
    work: float | None = None
    left_out: tuple[str, ...] = ()
    spectral_norm: float | None = None
    spectral_gain: float | None = None


_T = TypeVar("_T")


HOOKS = ("slots", "inner", "cadence", "observe", "refresh", "apply", "traits", "measures")
"""All that a stage may override."""


@dataclass(frozen=True)
class Inner:
    """A chain inside a stage.

    chain: its stages.
    block: the shape of a block as they see it.
    sensitive: whether its second moments set the size of every update, so that no storage takes them by their role.
    """

    chain: Stages
    block: tuple[int, ...]
    sensitive: bool = False


class Stage(Schedulable, ABC, family="stage"):
    """One link of an update chain: it maps a direction, and keeps the state that it declares.

    A stage is a subclass of `Stage` with a field `kind: Literal["mine"] = "mine"` and hyper-parameters as frozen
    pydantic fields. Defining it registers it, and it cannot be subclassed itself. It overrides some of eight hooks,
    of which `apply` alone is required. `block` is the shape of one block. All tensors have the stack axis first:
    `[N, *block]` are N blocks of one shape. Names below are in `eigengraft`; `Stages`, `Cadence`, `Every`,
    `run_chain` and `map_wires` are in `eigengraft.preconditioners`.

    slots(block) -> {name: Slot}                at construction  the state of a block
    inner(block) -> {name: Inner}               at construction  Inner(chain, block that it sees): the chains inside
    traits(block) -> Traits                     at construction  what the engine must know; also asked with the block ()
    cadence() -> Cadence | None                 every step       when refresh is due, as Every(steps=10); None: never
    observe(state, gradient, context)           every step       cheap: update the statistics that refresh reads
    refresh(state, gradient, context)           when due         expensive, on any contiguous slice [n, *block]
    apply(state, gradient, direction, context)  every step       return the new direction [N, *block]; update moments
    measures(state, context) -> {name: [N]}     in inspect()     numbers on the present state; nothing is written

    A step runs observe, refresh, apply. `direction` is what the stage before returned: transform that. The
    parameter moves by -lr times the last direction. With `Traits(lagged=True)` a step runs apply, observe, refresh,
    and the first gradient of a parameter only primes: lagged stages observe and refresh, nothing else is written
    and nothing moves. `Every(steps=10)` is due at a block's first step, and then at every tenth
    step; which of the ten it is differs between blocks.

    State. `Slot(shape, fill, role, frame)` declares a tensor `[N, *shape]`. fill is a number, or "identity" for a
    matrix. role says what the slot is for, so that storage can be chosen by it: "statistic", "root", "basis",
    "first_moment", "second_moment" (the default), "iterate" or "count". frame says how a slot of the block's shape
    follows the basis of an eigenbasis around the stage: "vector" turns as a gradient does (momentum), "square" as
    squares do (rms), and "none" (the default) stays. `v = state["v"]` loads it. It may be changed in place, and
    must be assigned back after the last change: `state["v"] = v`. Every declared slot is used. `state.block` is the
    block.

    Context. `context.step` `[N]` is the number of each block's update: 1 at the first, 0 while priming.
    `context.holds(lambda steps: steps > 9)` asks about it on the host: True for all blocks, False for none, else a
    NumPy array `[N]`. `context.correction(b, like)` is 1 - b^step, shaped to divide `like`; `context.per_block(f,
    like)` is f(step), shaped to multiply it; `context.first` is set in a block's first refresh. For other numbers x
    `[N]` of blocks, `numerics.per_block(x, like)` shapes x to multiply `like`.

    One wire. Gradient and direction are one tensor until a stage with slots, its own or those of a chain inside,
    has run: until then the result of a stage is the gradient of all stages after it too. `[clip_norm, momentum,
    rms]` clips the gradient. After `momentum` the direction is on a wire of its own, and the gradient stays as it
    is.

    Chains inside. Declare a field `chain: Stages = Field(alias="inner")`, because no field may have the name of a
    hook, and `inner(block)` as `{"inner": Inner(self.chain, small)}`, where `small` is the block that the chain
    sees. Then `run_chain(self.chain, state.scope("inner", small), gradient, direction, context)` runs all hooks of
    its stages on tensors `[N, *small]`, and returns its direction. `g, d = map_wires(f, gradient, direction)`
    applies f to both, once if they are one wire, and keeps them one. Where a kind repeats in a chain, its stages
    need a `name`.

    Signals. `Traits(signals=(Request("lr"), Request("loss", "if_given")))` asks for what else the stage needs, and
    when: "always" (the default), in steps with a "refresh", in the "first" step, or "if_given".
    `context.signal("lr")` is a number, as are "loss", "step_fraction" and "gradient_norm"; "parameter_rms" is
    `[N]`; "parameter" and "hessian_diagonal" are `[N, *block]`. `context.tensor(name, like)` is the signal as a
    tensor like another one, and `"loss" in context.signals` says whether it was given. `register_signal` adds
    others.

    Sums. With `Traits(sums=True)` `context.parameter_sum(x)` gives for each block the sum of x `[N]` over all
    blocks of its parameter, in `apply` alone and equally often in every step.

    Forbidden: to write to `gradient` or `direction`; to let a block depend on another (no sum over axis 0); to
    remember anything outside of slots; to read a parameter, a rank or a global setting except by a signal; to read
    a tensor's value on the host (`float(x)`, `if x.any()`) or upload one, for which a device would wait, outside of
    refresh; to raise for a gradient with nan, whose result is dropped. From fresh state a zero gradient gives a
    zero direction. A finite gradient of any size gives a finite direction: squares of 1e30 overflow,
    `numerics.block_norm(x)` `[N]` does not, and `numerics.safe_ratio(a, b)`, for b >= 0, is a / b, or 0 where b is
    too small to divide by. `eigengraft.testing.check_stage(Mine())` tries all of this.
    """

    name: str | None = Field(
        default=None,
        pattern=r"^[A-Za-z_][A-Za-z0-9_]*$",
        description="what the stage is called in paths; default: its kind. Needed where a kind repeats in a chain",
    )
    elsewhere: ClassVar[Mapping[str, str]] = {
        "storage": "it goes to the top level of the recipe: `storage: {<path of the stage>: int8}`",
        **dict.fromkeys(("lr", "weight_decay"), "it goes to the top level of the recipe"),
    }

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        super().__pydantic_init_subclass__(**kwargs)
        if hidden := sorted({*HOOKS} & cls.model_fields.keys()):
            name = hidden[0]
            raise TypeError(
                f"{cls.__name__}: the field `{name}` hides the hook of that name; give the field another name and "
                f"`Field(alias='{name}')`, by which recipes know it"
            )

    def slots(self, block: tuple[int, ...]) -> Mapping[str, Slot]:
        """Declare the state that the stage keeps for one block of that shape, by name."""
        return {}

    def inner(self, block: tuple[int, ...]) -> Mapping[str, Inner]:
        """Declare the chains inside the stage, by the name of their scope in the state."""
        return {}

    def cadence(self) -> Cadence | None:
        """Say when `refresh` is due; None: never."""
        return None

    def traits(self, block: tuple[int, ...]) -> Traits:
        """Say what the engine must know; every default of `Traits` is safe."""
        return Traits()

    def observe(self, state: State, gradient: Tensor, context: StepContext) -> None:
        """Every step, cheap: update the statistics that `refresh` reads."""

    def refresh(self, state: State, gradient: Tensor, context: StepContext) -> None:
        """Rare, expensive: recompute roots, bases or learned factors, on any contiguous slice `[n, *block]`."""

    @abstractmethod
    def apply(self, state: State, gradient: Tensor, direction: Tensor, context: StepContext) -> Tensor:
        """Every step: map the direction `[N, *block]`, and update the moments that live in the current frame."""

    def measures(self, state: State, context: StepContext) -> Mapping[str, Tensor]:
        """Numbers `[N]` on the present state for `Optimizer.inspect`, by "<measure>" or "<slot>/<measure>". Nothing is
        written back, the context has no signals. Roles and cadence tell others; one of the same name replaces them."""
        return {}

    @final
    @property
    def label(self) -> str:
        """The stage's part of a path: `name`, else `kind`."""
        return self.name or str(getattr(self, "kind"))  # noqa: B009  every member has a kind, the family has none

    @final
    def cached_traits(self, block: tuple[int, ...] = ()) -> Traits:
        """The traits for a block, asked once and kept; without a block those that depend on none."""
        if block not in self._traits:
            self._traits[block] = self.traits(block)
        return self._traits[block]

    @final
    def work(self, block: tuple[int, ...]) -> float:
        """Floating-point operations of one step of one block, refreshes left out; blocks are divided over ranks by it.

        Counted from the slots, unless the traits say it: a square matrix of order d on an axis of that length takes a
        product with the block, 2 d numel, a basis two (there and back), anything else a few operations for each of its
        numbers.
        """
        if (known := self.cached_traits(block).work) is not None:
            return known
        total, numel = 0.0, math.prod(block)
        for slot in self.slots(block).values():
            square = len(slot.shape) == 2 and slot.shape[0] in block and slot.role in ("statistic", "root", "basis")
            products = 2 if slot.role == "basis" else 1
            total += 2.0 * products * slot.shape[1] * numel if square else 4.0 * math.prod(slot.shape)
        return total

    @final
    def keeps_state(self, block: tuple[int, ...]) -> bool:
        """Whether the stage, or one inside it, has a slot for such a block."""
        try:
            return self._keeps[block]
        except (KeyError, TypeError) as missing:
            found = any(True for _ in chain_slots((self,), block))
            if isinstance(missing, KeyError):  # else the block is traced: its sizes are symbols, which have no hash
                self._keeps[block] = found
            return found

    @cached_property
    def _traits(self) -> dict[tuple[int, ...], Traits]:
        """Answers of `traits`, by block."""
        return {}

    @cached_property
    def _keeps(self) -> dict[tuple[int, ...], bool]:
        """Answers of `keeps_state`, by block."""
        return {}

    @final
    @property
    def requests(self) -> tuple[Request, ...]:
        """The signals that the stage asks for."""
        return self.cached_traits().signals

    @final
    def signals_at(self, step: int) -> frozenset[str]:
        """The signals that must be there at a step of a block, by name."""
        cadence, earliest = self.cadence(), 0 if self.cached_traits().lagged else 1
        refreshes = cadence is not None and cadence.possible(step, earliest)
        return frozenset(own.name for own in self.requests if own.needed_at(step, refreshes))

    @final
    def due(self, context: StepContext) -> Sequence[tuple[int, int, bool]]:
        """(start, stop, first) spans of the stack whose refresh is due now."""
        if id(self) not in context.due:
            cadence, earliest = self.cadence(), 0 if self.cached_traits().lagged else 1
            context.due[id(self)] = () if cadence is None else tuple(cadence.due(context, earliest))
        return context.due[id(self)]

    @final
    def _hooks(self, state: State) -> Hooks:
        """The hooks of the stage: its own, or in checked mode those that watch it."""
        return self if state.storage.watch is None else CheckedHooks(self, state.storage.watch)

    @final
    def run(self, state: State, gradient: Tensor, direction: Tensor, context: StepContext) -> Tensor:
        """One step: observe, refresh the rows that are due, apply; a lagged stage applies first."""
        lagged = self.cached_traits().lagged
        try:
            if not lagged:
                self._observe_and_refresh(state, gradient, direction, context)
            result = self._hooks(state).apply(state, gradient, direction, context)
            if lagged:
                self._observe_and_refresh(state, gradient, direction, context)
            return result
        except ContractError as error:
            if state.path in str(error):  # it names the stage, or one inside it
                raise
            raise ContractError(f"{state.path}: {error}") from None

    @final
    def prime(self, state: State, gradient: Tensor, direction: Tensor, context: StepContext) -> None:
        """Show a first gradient to what is lagged: statistics are made of it, nothing else is written or moves.

        Lagged stages inside get it from `apply`, of which the state and the result are dropped.
        """
        if self.cached_traits().lagged:
            self._observe_and_refresh(state, gradient, direction, context)
        inside = (stage for part in self.inner(state.block).values() for _, stage in walk(part.chain))
        if any(stage.cached_traits().lagged for stage in inside):
            own = state.unwritten()
            self._hooks(own).apply(own, gradient, direction, context)

    @final
    def _observe_and_refresh(self, state: State, gradient: Tensor, direction: Tensor, context: StepContext) -> None:
        """Observe, then refresh the rows that are due."""
        x = gradient if self.cached_traits().learns == "gradient" else direction
        self._hooks(state).observe(state, x, context)
        for start, stop, first in self.due(context):
            rows = state if stop - start == len(x) else state.slice_rows(start, stop)
            self._hooks(rows).refresh(rows, x[start:stop], context.slice_rows(start, stop, first))


Stages = Annotated[tuple[Stage, ...], ChainOf("stage", "stages of a chain")]
"""A chain: stages in order. In YAML a list, or a single stage."""


def run_chain(
    stages: tuple[Stage, ...], state: State, gradient: Tensor, direction: Tensor, context: StepContext
) -> Tensor:
    """Run the stages in order, each on the direction that the one before returned, and return the last direction.

    While the direction is the gradient, the result of a stage that keeps no state is both for the stages after it. In
    a first gradient that only primes (`context.priming`) all other stages are primed and return nothing.
    """
    for stage in stages:
        own = state.scope(stage.label)
        one_wire = direction is gradient and not stage.keeps_state(own.block)
        if context.priming and not one_wire:
            stage.prime(own, gradient, direction, context)
        else:
            direction = stage.run(own, gradient, direction, context)
        if one_wire:
            gradient = direction
        elif direction is gradient:  # two wires from here on, with the same numbers
            direction = gradient.view_as(gradient)
    return direction


def map_wires(f: Callable[[Tensor], _T], gradient: Tensor, direction: Tensor) -> tuple[_T, _T]:
    """(f(gradient), f(direction)) for a chain inside: computed once, and one object, where the two are one wire."""
    mapped = f(gradient)
    return mapped, mapped if direction is gradient else f(direction)


def chain_bounds(stages: tuple[Stage, ...], block: tuple[int, ...]) -> tuple[float | None, float | None]:
    """(bound of the spectral norm of a chain's direction, largest factor to it from that of the direction that comes
    in), as in `Traits`."""
    norm: float | None = None
    gain: float | None = 1.0
    for stage in stages:
        own = stage.cached_traits(block)
        if own.spectral_norm is not None:
            norm, gain = own.spectral_norm, None
        elif (factor := own.spectral_gain) is not None:
            norm, gain = (bound if bound is None else bound * factor for bound in (norm, gain))
        else:
            norm = gain = None
    return norm, gain


def walk_blocks(
    stages: tuple[Stage, ...], block: tuple[int, ...], path: str = ""
) -> Iterator[tuple[str, Stage, tuple[int, ...]]]:
    """Every stage of a chain and of the chains inside it, with its dotted path and the block that it sees."""
    for stage in stages:
        here = f"{path}.{stage.label}" if path else stage.label
        yield here, stage, block
        for name, part in stage.inner(block).items():
            yield from walk_blocks(part.chain, part.block, f"{here}.{name}")


def walk(stages: tuple[Stage, ...], path: str = "") -> Iterator[tuple[str, Stage]]:
    """Every stage of a chain and of the chains inside it, with its dotted path."""
    yield from ((here, stage) for here, stage, _ in walk_blocks(stages, (), path))


def chain_slots(stages: tuple[Stage, ...], block: tuple[int, ...], path: str = "") -> Iterator[tuple[str, str, Slot]]:
    """(stage path, slot name, slot) of all state that a chain needs for one block."""
    for stage in stages:
        here = f"{path}.{stage.label}" if path else stage.label
        try:
            slots = stage.slots(block)
        except ValueError as error:
            raise ValueError(located(here, str(error))) from None
        for name, slot in slots.items():
            if slot.fill == "identity" and len(slot.shape) != 2:
                fault = f"slot '{name}' of shape {slot.shape} is no matrix, which fill 'identity' needs"
                raise ValueError(located(here, f"{fault}; give it a number"))
            yield here, name, slot
        for part, inner in stage.inner(block).items():
            for where, name, slot in chain_slots(inner.chain, inner.block, f"{here}.{part}"):
                sensitive = inner.sensitive and slot.role == "second_moment"
                yield where, name, replace(slot, sensitive=True) if sensitive else slot
