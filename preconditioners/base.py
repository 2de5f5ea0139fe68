"""The contract of a stage: the base class with eight hooks, the facts that a stage declares, and functions that run a
chain.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from traceback import walk_tb
from typing import Annotated, ClassVar, Literal, NamedTuple, Self, TypeVar, final

from pydantic import Field, model_validator
from torch import Tensor

from eigengraft.component import ChainOf, PathName, located, short
from eigengraft.errors import ContractError
from eigengraft.numerics import full_products
from eigengraft.schedules import Schedulable
from eigengraft.signals import Request
from eigengraft.slots import Slot, State, dotted
from eigengraft.step_context import StepContext

from .cadence import Cadence
from .checked_mode import CheckedHooks, Hooks, call_text, wrong_direction


class FirstMoment(NamedTuple):
    """Adam's first moment of directions d:  m <- b m + (1 - b) d;  the stage returns m / (1 - b^t) in step t.

    slot: name of the slot of m, which has the shape of the block and starts as 0.
    beta: decay b.
    """

    slot: str
    beta: float


class SecondMoment(NamedTuple):
    """Adam's second moment:  v <- b v + (1 - b) g^2;  the stage returns d / (sqrt(v / (1 - b^t)) + eps) in step t.

    g is the gradient, d the direction.

    slot: name of the slot of v, which has the shape of the block and starts as 0.
    beta: decay b.
    eps: number added to the root, in units of the gradient.
    """

    slot: str
    beta: float
    eps: float


@dataclass(frozen=True)
class Traits:
    """Facts that a stage declares about itself, for blocks of one shape. The engine uses them to run and to distribute
    it.

    The defaults are correct for any stage, but may make its steps slower. The engine calls `traits(block)` once for
    each shape and caches the result. The first six fields must not depend on the shape, because the engine reads them
    from `traits(())`, the traits for the empty shape.

    signals: signals that the stage requests in addition to the gradient.
    lagged: True if the stage applies its state to a gradient before it learns from that gradient. A step then runs
        apply, observe, refresh. The first gradient of a parameter only primes the chain: statistics accumulate the
        gradient, and the parameter is not changed.
    entrywise: True if each entry of the direction and of the state depends only on the same entry of the gradients.
        Parts of a block may then be updated on different ranks.
    matrices: True if the stage reads blocks as matrices, first axis x the rest.
    sums: True if `apply` calls `context.parameter_sum`. All blocks of a parameter are then updated by one rank, in the
        same step.
    learns: the tensor that `observe` and `refresh` receive as their `gradient`: the gradient, or the incoming
        direction.
    refresh_cost: cost of one refresh of the block, in a unit that all stages share: d^3 for a matrix of order d, and d
        for a diagonal. Refreshes are spread over steps so that every step has about the same cost.
    work: floating-point operations of one step without refreshes. None: the number is computed from the slots.
    left_out: texts that `show` prints. Each names a part of the block that the stage does not change, and the reason.
    spectral_norm: upper bound of the spectral norm of the outgoing direction, for any incoming direction. None: no such
        bound is known.
    spectral_gain: upper bound of the ratio of the spectral norms of the outgoing and the incoming direction. None: no
        bound is known.
    scale_free: True if the outgoing direction is the same for c d as for the incoming direction d, for every c > 0.
    clip: largest Frobenius norm of a block that a clipping stage leaves unchanged. A clipping stage multiplies a
        direction by a number of at most 1, and does nothing else. None: the stage does not clip.
    moment: the moment of Adam that `apply` computes exactly while no field of the stage is scheduled. The engine runs a
        chain of a first and a second moment with torch's fused kernels. None: `apply` computes something else.
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
    scale_free: bool = False
    clip: float | None = None
    moment: FirstMoment | SecondMoment | None = None


_T = TypeVar("_T")


@dataclass(frozen=True)
class Inner:
    """A chain inside a stage.

    chain: stages of the chain, in order.
    block: shape of a block inside the chain.
    sensitive: True if an error in the chain's second moments changes the size of every update, as in the `magnitude` of
        a `graft`. The second moments of a sensitive chain are not quantized by the entry for the role `second_moment`
        in a recipe's `storage`.
    """

    chain: Stages
    block: tuple[int, ...]
    sensitive: bool = False


class Stage(Schedulable, ABC, family="stage"):
    """One link of an update chain: it maps a direction, and keeps the state that it declares.

    A stage is a subclass of `Stage` with a field `kind: Literal["mine"] = "mine"` and hyper-parameters as frozen
    pydantic fields. Defining the subclass registers it; a subclass of the subclass is refused. The subclass overrides
    some of eight hooks; only `apply` is required. `block` is the shape of one block. All tensors have the stack axis
    first: `[N, *block]` are N blocks of one shape. Names below are in `eigengraft`; `Stages`, `Cadence`, `Every`,
    `run_chain` and `map_wires` are in `eigengraft.preconditioners`.

    slots(block) -> {name: Slot}                at construction  the state of a block
    inner(block) -> {name: Inner}               at construction  Inner(chain, block that it sees): the chains inside
    traits(block) -> Traits                     at construction  facts for the engine; also called for the block ()
    cadence() -> Cadence | None                 every step       when refresh is due, as Every(steps=10); None: never
    observe(state, gradient, context)           every step       cheap: update the statistics that refresh reads
    refresh(state, gradient, context)           when due         expensive, on any contiguous slice [n, *block]
    apply(state, gradient, direction, context)  every step       return the new direction [N, *block]; update moments
    measures(state, context) -> {name: [N]}     in inspect()     numbers on the present state; nothing is written

    A step runs observe, refresh, apply. `direction` is the result of the stage before: transform it. The optimizer adds
    -lr times the last direction to the parameter. With `Traits(lagged=True)` a step runs apply, observe, refresh. The
    first gradient of a parameter then only primes the chain: lagged stages observe and refresh, nothing else is
    written, and the parameter stays. `Every(steps=10)` is due at a block's first step, and then at every tenth step;
    blocks have different offsets. Stages whose refreshes may take effect later have the base class `DelayedRefresh`.

    State. `Slot(shape, fill, role, frame)` declares a tensor `[N, *shape]`. fill is the initial value: a number, or
    "identity" for a matrix. role is the slot's purpose, by which recipes choose storage: "statistic", "root", "basis",
    "first_moment", "second_moment" (the default), "iterate", "count", "failures" or "pending". frame says how a slot
    changes when an eigenbasis around the stage changes its basis: "vector" rotates as a gradient does (momentum),
    "square" changes as squares do (rms), and so do "row" and "column", of slots without the block's last or last but
    one axis, and "none" (the default) stays. `v = state["v"]` loads the slot. v may be changed in place. Assign it back
    after the last change: `state["v"] = v`. Every declared slot must be used. `state.block` is the shape of the block.
    A checkpoint is refused if a field that the method `state_meaning` returns, as {name: value}, has changed.

    Context. `context.step` `[N]` is the number of each block's update: 1 at the first, 0 while priming.
    `context.holds(lambda steps: steps > 9)` tests a condition on these numbers on the host. The result is True if all
    blocks fulfill the condition, False if none does, else a NumPy array `[N]`. `context.correction(b, like)` is 1 -
    b^step, shaped to divide `like`. `context.per_block(f, like)` is f(step), shaped to multiply `like`. `context.first`
    is True in a block's first refresh. If x `[N]` has one number for each block, `numerics.per_block(x, like)` shapes x
    to multiply `like`.

    Gradient and direction. The first stage of a recipe receives one tensor as both, the gradient. Until a stage with
    slots has run (slots of chains inside a stage count, too), the following stages receive each result as both
    `gradient` and `direction`. In `[clip_norm, momentum, rms]` `momentum` and `rms` thus receive the clipped gradient.
    The result of the first stage with slots, here `momentum`, replaces only the direction. From then on gradient and
    direction are two tensors, and all following stages receive the same gradient.

    Chains inside. Declare a field `chain: Stages = Field(alias="inner")`. The alias is needed because no field may have
    the name of a hook. Let `inner(block)` return `{"inner": Inner(self.chain, small)}`, where `small` is the block that
    the chain sees. Then `run_chain(self.chain, state.scope("inner", small), gradient, direction, context)` runs all
    hooks of its stages on tensors `[N, *small]`, and returns its direction. `g, d = map_wires(f, gradient, direction)`
    applies f to both. If gradient and direction are one tensor, f runs once, and g and d are one tensor, too. If a kind
    repeats in a chain, its stages need a `name`.

    Signals. `Traits(signals=(Request("lr"), Request("loss", "if_given")))` requests further inputs and says when the
    stage needs each: "always" (the default), in steps with a "refresh", in the "first" step, or "if_given".
    `context.signal("lr")` is a number, as are "loss", "step_fraction" and "gradient_norm"; "parameter_rms" is `[N]`;
    "parameter" and "hessian_diagonal" are `[N, *block]`. `context.tensor(name, like)` is the signal as a tensor with
    the dtype and device of `like`, and `"loss" in context.signals` is True if it was given. `register_signal` adds
    signals.

    Sums. With `Traits(sums=True)` `context.parameter_sum(x)` returns for each block the sum of x `[N]` over all blocks
    of its parameter. Call it only in `apply`, and equally often in every step.

    Forbidden: to write to `gradient` or `direction`; to let a block depend on another (no sum over axis 0); to remember
    anything outside of slots; to read a parameter, a rank or a global setting except by a signal; to read a tensor's
    value on the host (`float(x)`, `if x.any()`) or to upload a value outside of refresh, because a device would wait;
    to raise for a gradient with nan, whose result is dropped. From fresh state a zero gradient gives a zero direction.
    A finite gradient of any size gives a finite direction. Squares of 1e30 overflow, but `numerics.block_norm(x)` `[N]`
    does not; `numerics.safe_ratio(a, b)`, for b >= 0, is a / b, or 0 where b is too small to divide by.
    `eigengraft.testing.check_stage(Mine())` tests all of this.
    """

    name: PathName | None = Field(
        default=None,
        description="name of the stage in paths; default: its kind. Required if the kind repeats in a chain",
    )
    elsewhere: ClassVar[Mapping[str, str]] = {
        "storage": "it goes to the top level of the recipe: `storage: {<path of the stage>: int8}`",
        **dict.fromkeys(("lr", "weight_decay"), "it goes to the top level of the recipe"),
    }

    @model_validator(mode="after")
    def _delay_is_possible(self) -> Self:
        with named_stage(self, self.label):
            cadence = self.cadence()
        if cadence is not None and cadence.postponed and not isinstance(self, DelayedRefresh):
            names = (field.alias or name for name, field in type(self).model_fields.items())
            values = (getattr(self, name) for name in type(self).model_fields)
            where = next((f"{name}: " for name, value in zip(names, values, strict=True) if value is cadence), "")
            raise ValueError(
                f"{where}`delay: {cadence.postponed}` cannot be combined with {getattr(self, 'kind', self.label)}, "
                "which cannot compute a refresh beside training; remove delay"
            )
        return self

    def slots(self, block: tuple[int, ...]) -> Mapping[str, Slot]:
        """Return the slots of one block of this shape, by name: the tensors that the stage keeps as its state.

        Raises ValueError if the stage refuses blocks of this shape.
        """
        return {}

    def inner(self, block: tuple[int, ...]) -> Mapping[str, Inner]:
        """Return the chains inside the stage, by name. The name is also the first part of the keys of their state."""
        return {}

    def cadence(self) -> Cadence | None:
        """Return the cadence that says when `refresh` is due. None: `refresh` is never called."""
        return None

    def traits(self, block: tuple[int, ...]) -> Traits:
        """Return properties of the stage for blocks of this shape, such as signals, sums and costs (see `Traits`)."""
        return Traits()

    def observe(self, state: State, gradient: Tensor, context: StepContext) -> None:
        """Update the statistics that `refresh` reads. This hook is called in every step, so it has to be cheap."""

    def refresh(self, state: State, gradient: Tensor, context: StepContext) -> None:
        """Recompute roots, bases or learned factors from the statistics.

        `state` and `gradient` have a contiguous slice `[n, *block]` of the stack. This hook is called only when it is
        due, so it may be expensive.
        """

    @abstractmethod
    def apply(self, state: State, gradient: Tensor, direction: Tensor, context: StepContext) -> Tensor:
        """Return the new direction `[N, *block]`, and update moments in the present basis. This hook is called in every
        step.
        """

    def measures(self, state: State, context: StepContext) -> Mapping[str, Tensor]:
        """Return measures of the present state, which `Optimizer.inspect` reports. They are tensors `[N]`, by
        "<measure>" or "<slot>/<measure>".

        Changes of the state are not stored, and the context has no signals. `inspect` adds measures that follow from
        the roles of slots and from the cadence. A measure that is returned here replaces an added measure of the same
        name.
        """
        return {}

    @property
    @final
    def label(self) -> str:
        """Name of the stage in paths: its `name`, or its kind if it has no name."""
        return self.name or str(getattr(self, "kind"))  # noqa: B009  every member has a kind, the family has none

    @final
    def cached_traits(self, block: tuple[int, ...] = ()) -> Traits:
        """Return `traits(block)`, the properties of the stage for blocks of one shape. The result is cached.

        block: shape of the block; the default () for traits that do not depend on the shape.

        Raises TypeError if the hook `traits` returns no `Traits`.
        """
        if block not in self._traits:
            with named_stage(self, self.label):
                found: object = self.traits(block)
                if not isinstance(found, Traits):
                    raise TypeError(f"traits() must return Traits(...), got {short(found)}")
            self._traits[block] = found
        return self._traits[block]

    @final
    def work(self, block: tuple[int, ...]) -> float:
        """Return the number of floating-point operations of one step of one block, without refreshes. Blocks are
        assigned to ranks so that each rank has about the same number.

        The number is `Traits.work` if the stage declares it. Otherwise it is computed from the slots: a matrix for an
        axis counts as one product with the block, a basis as two products, and every other slot as four operations for
        each of its numbers.
        """
        if (known := self.cached_traits(block).work) is not None:
            return known
        total, numel = 0.0, math.prod(block)
        for slot in self.slots(block).values():
            if slot.role == "pending":
                continue
            square = len(slot.shape) == 2 and slot.shape[0] in block and slot.role in ("statistic", "root", "basis")
            products = 2 if slot.role == "basis" else 1
            total += 2.0 * products * slot.shape[1] * numel if square else 4.0 * math.prod(slot.shape)
        return total

    @final
    def keeps_state(self, block: tuple[int, ...]) -> bool:
        """Return True if the stage, or a stage inside it, has a slot for blocks of this shape."""
        try:
            return self._keeps[block]
        except (KeyError, TypeError) as missing:
            found = any(True for _ in chain_slots((self,), block))
            if isinstance(missing, KeyError):  # not cached for a traced block, whose sizes are symbols without a hash
                self._keeps[block] = found
            return found

    @cached_property
    def _traits(self) -> dict[tuple[int, ...], Traits]:
        """The traits that `cached_traits` has returned before, by shape of the block."""
        return {}

    @cached_property
    def _keeps(self) -> dict[tuple[int, ...], bool]:
        """The answers that `keeps_state` has returned before, by shape of the block."""
        return {}

    @property
    @final
    def requests(self) -> tuple[Request, ...]:
        """Signals that the stage requests."""
        return self.cached_traits().signals

    @property
    def _earliest(self) -> int:
        """First step at which the stage can refresh, as `Cadence.first_due` expects it: 1, or 0 for a lagged stage.

        A lagged stage applies its state to a gradient before it learns from that gradient. In step 0 it learns from the
        first gradient, and the parameter is not changed.
        """
        return 0 if self.cached_traits().lagged else 1

    @final
    def signals_at(self, step: int) -> frozenset[str]:
        """Return the names of the signals (inputs beside the gradient) that the stage needs in a step of a block."""
        cadence = self.cadence()
        refreshes = cadence is not None and cadence.possible(step, self._earliest)
        return frozenset(own.name for own in self.requests if own.needed_at(step, refreshes))

    @final
    def asked(self, context: StepContext) -> Sequence[tuple[int, int, bool]]:
        """Return the blocks whose refresh begins in this step, as spans (start, stop, first).

        A span is the blocks with the numbers start to stop - 1 among the N blocks of `context`. `first` is True at the
        first refresh of these blocks. With a delay, every later refresh takes effect some steps after it begins.
        """
        if id(self) not in context.asked:
            context.asked[id(self)] = self._spans(self.cadence(), context)
        return context.asked[id(self)]

    @final
    def due(self, context: StepContext) -> Sequence[tuple[int, int, bool]]:
        """Return the blocks for which a refresh takes effect in this step, as spans (start, stop, first).

        A span is the blocks with the numbers start to stop - 1 among the N blocks of `context`. `first` is True at the
        first refresh of these blocks, which is never delayed. With a delay of k, every later refresh takes effect k
        updates after it began. Without a delay, the result is that of `asked`.
        """
        if id(self) not in context.due:
            cadence = self.cadence()
            found = () if cadence is None else self.asked(context)
            if cadence is not None and cadence.postponed:
                before = self._spans(cadence, replace(context, steps=context.steps - cadence.postponed))
                found = [*(span for span in before if not span[2]), *(span for span in found if span[2])]
            context.due[id(self)] = found
        return context.due[id(self)]

    @final
    def _spans(self, cadence: Cadence | None, context: StepContext) -> Sequence[tuple[int, int, bool]]:
        return () if cadence is None else tuple(cadence.due(context, self._earliest))

    @final
    def refreshes(self, context: StepContext) -> bool:
        """Return True if a refresh of any block begins or takes effect in this step."""
        return bool(self.due(context) or self.asked(context))

    @final
    def _hooks(self, state: State) -> Hooks:
        """Return the stage, or in checked mode (`checked=True`) an object with the same hooks that checks each call."""
        return self if state.storage.watch is None else CheckedHooks(self, state.storage.watch)

    @final
    def run(self, state: State, gradient: Tensor, direction: Tensor, context: StepContext) -> Tensor:
        """Run one step and return the new direction.

        The order is `observe`, `refresh` of the blocks that are due, `apply`. In a lagged stage, `apply` is first.

        Raises ContractError if a hook violates the contract, such as by a direction of another shape.
        """
        lagged = self.cached_traits().lagged
        try:
            if not lagged:
                self._observe_and_refresh(state, gradient, direction, context)
            result: object = self._hooks(state).apply(state, gradient, direction, context)
            if not isinstance(result, Tensor) or result.shape != direction.shape:
                raise wrong_direction(f"{state.path}: apply()", result, direction)
            if lagged:
                self._observe_and_refresh(state, gradient, direction, context)
            return result
        except ContractError as error:
            if state.path in str(error):  # the message already names this stage, or a stage inside it
                raise
            raise ContractError(f"{state.path}: {error}") from None
        except Exception as error:
            name_stage(error, self, state.path)
            raise

    @final
    def prime(self, state: State, gradient: Tensor, direction: Tensor, context: StepContext) -> None:
        """Initialize the statistics and factors of lagged stages from a parameter's first gradient. Nothing else
        changes.

        A lagged stage (`Traits.lagged`) applies its state to a gradient before it learns from that gradient. Therefore
        it cannot map the first gradient, but only learn from it.

        This stage learns if it is lagged, and so does every lagged stage inside it. To pass the gradient on to the
        stages inside, `apply` of this stage is called. Its direction and the state that it writes are dropped.
        """
        try:
            if self.cached_traits().lagged:
                self._observe_and_refresh(state, gradient, direction, context)
            if any(first_lagged(inner.chain) for inner in self.inner(state.block).values()):
                own = state.unwritten()
                self._hooks(own).apply(own, gradient, direction, context)
        except Exception as error:
            name_stage(error, self, state.path)
            raise

    @final
    def _observe_and_refresh(self, state: State, gradient: Tensor, direction: Tensor, context: StepContext) -> None:
        x = gradient if self.cached_traits().learns == "gradient" else direction
        self._hooks(state).observe(state, x, context)
        for start, stop, first in self.due(context):
            rows = state if stop - start == len(x) else state.slice_rows(start, stop)
            self._refresh_rows(rows, x[start:stop], context.slice_rows(start, stop, first))
        self._begin_refreshes(state, context)

    def _refresh_rows(self, rows: State, x: Tensor, context: StepContext) -> None:
        """Run `refresh` on blocks whose refresh takes effect in this step.

        In a `DelayedRefresh`, `adopt` is run instead if the refresh began in an earlier step.

        rows: state of these blocks, a contiguous slice of the stack.
        x: the gradient or direction of these blocks, `[n, *block]`.
        """
        with full_products(x.device):
            self._hooks(rows).refresh(rows, x, context)

    def _begin_refreshes(self, state: State, context: StepContext) -> None:
        """Begin the refreshes that are due in this step and take effect in a later one. Only a `DelayedRefresh` has
        such refreshes.
        """


class DelayedRefresh(Stage):
    """A stage whose refreshes may take effect k updates after they are due, with `Every(steps=10, delay=k)`.

    solve(state, context) -> {name: Tensor}     when due         compute the results, without writing state
    adopt(state, context)                       k updates later  write the results to the state

    If `cadence().postponed` is not 0, the stage also declares a slot of role "pending" for each result. `solve` returns
    a tensor for each pending slot. `adopt` writes the other slots, from the pending slots and from the state at that
    time, and resets the pending slots to their initial values.

    If the pending slots of a block still have their initial values, for example after a checkpoint with another cadence
    was loaded, then there is no result, and `adopt` must leave the block as it is. `refresh` computes the first refresh
    of each block and all refreshes without a delay.
    """

    @abstractmethod
    def solve(self, state: State, context: StepContext) -> Mapping[str, Tensor]:
        """Compute a delayed refresh of a contiguous slice of the stack. Return its results by name of the pending slot.

        The method may run in another thread. It reads a copy of the stage's slots, and must not write state.

        context: step numbers and bias corrections of the update at which the refresh is due. Signals are not available
            in it.
        """

    @abstractmethod
    def adopt(self, state: State, context: StepContext) -> None:
        """Let a delayed refresh of a contiguous slice of the stack take effect.

        The method computes roots, bases and transported moments from the pending slots, writes them to their slots, and
        resets the pending slots.
        """

    @property
    def _delays(self) -> bool:
        cadence = self.cadence()
        return cadence is not None and cadence.postponed > 0

    @final
    def _refresh_rows(self, rows: State, x: Tensor, context: StepContext) -> None:
        if context.first or not self._delays:
            super()._refresh_rows(rows, x, context)
            return
        if rows.storage.delayed is not None:
            rows.storage.delayed.finish(rows.path, context.seeds)
        if rows.storage.watch is None:
            self.adopt(rows, context)
            return
        with rows.storage.watch.call(call_text("adopt", rows, context), {"gradient": x}, rows):
            self.adopt(rows, context)

    @final
    def _begin_refreshes(self, state: State, context: StepContext) -> None:
        for start, stop, first in self.asked(context) if self._delays else ():
            if not first:
                self._begin(state.slice_rows(start, stop), context.slice_rows(start, stop, first))

    @final
    def _begin(self, rows: State, context: StepContext) -> None:
        """Begin a delayed refresh of some blocks, from a copy of their present state.

        If the optimizer does not compute refreshes in another thread, the results are computed at once and stored in
        the pending slots.

        rows: state of these blocks, a contiguous slice of the stack.
        """
        pending = {name: slot.role == "pending" for name, slot in self.slots(rows.block).items()}
        kept = rows.snapshot(name for name, is_result in pending.items() if not is_result)
        solve = partial(
            self._solve_checked, kept, replace(context, signals={}), [name for name in pending if pending[name]]
        )
        if rows.storage.delayed is None:
            store_results(rows, solve())
        else:
            rows.storage.delayed.begin(rows, context.seeds, call_text("solve", rows, context), solve)

    @final
    def _solve_checked(self, kept: State, context: StepContext, names: Sequence[str]) -> Mapping[str, Tensor]:
        """Call `solve` and return its results, which are stored until the refresh takes effect.

        Raise ContractError unless there is one result for each slot of role "pending".

        kept: copy of the state at the beginning of the refresh.
        names: names of the slots of role "pending".
        """
        found = self.solve(kept, context)
        if sorted(found) != sorted(names):
            raise ContractError(
                f"the result of solve() must be a mapping with the keys {', '.join(sorted(names))}, the slots of role "
                f"'pending', got the keys {', '.join(sorted(found)) or 'none'}"
            )
        return found


def store_results(rows: State, found: Mapping[str, Tensor]) -> None:
    """Store the results of a delayed refresh in the pending slots.

    rows: state of the refreshed blocks, a contiguous slice of the stack.
    found: the results, by name of the pending slot.
    """
    for name, value in found.items():
        rows[name] = value


def name_stage(error: Exception, stage: Stage, path: str) -> None:
    """Add a note to an error that a hook raised. The note names the stage's class, its path, and a file and line.

    The line is the last one that was reached in the user's code, that is, outside of this library and of torch. If no
    such line was reached, it is the last line of all. If the hook used a shape as a tensor, a second note says that
    `block` is a shape. No note is added if the message already has the path, or if a stage inside this one has added a
    note.
    """
    begin = "raised in the stage "
    if path in str(error) or any(note.startswith(begin) for note in getattr(error, "__notes__", ())):
        return
    reached = list(walk_tb(error.__traceback__))
    others = [(f, line) for f, line in reached if f.f_globals["__name__"].partition(".")[0] not in _PACKAGES] or reached
    frame, line = others[-1]
    error.add_note(f"{begin}{path}, {type(stage).__name__} ({frame.f_code.co_filename}:{line})")
    if isinstance(error, AttributeError) and isinstance(error.obj, tuple) and error.name in dir(Tensor):
        error.add_note(f"`block` is the shape of one block, a tuple, and has no `.{error.name}`; write `Slot(block)`")


@contextmanager
def named_stage(stage: Stage, path: str) -> Iterator[None]:
    """Add a note with path, class and line of a stage to an error that is raised in the `with` statement.

    The engine calls hooks of a stage in such a statement when it calls them outside of a step.
    """
    try:
        yield
    except Exception as error:
        name_stage(error, stage, path)
        raise


_PACKAGES = ("eigengraft", "torch")
"""Packages that are not the user's code. `name_stage` prefers lines outside of them."""


Stages = Annotated[tuple[Stage, ...], ChainOf("stage", "stages of a chain"), Field(examples=[["momentum", "rms"]])]
"""A chain: stages in order. In YAML it is a list, or a single stage."""


def run_chain(
    stages: tuple[Stage, ...], state: State, gradient: Tensor, direction: Tensor, context: StepContext
) -> Tensor:
    """Run the stages of a chain in order.

    Each stage maps the direction that the stage before it returned. Until a stage with state has run, gradient and
    direction are the same tensor, and the result of each stage replaces both of them for the following stages.

    Args:
        stages: the chain.
        state: state of the chain; `state.block` is the shape of a block inside the chain.
        gradient: `[N, *block]`, which the chain does not change.
        direction: `[N, *block]`, the incoming direction: the object `gradient` itself if no stage with state has run
            yet.
        context: step numbers, bias corrections and signals. If `context.priming` is True, stages from the first one
            with state on do not run: `Stage.prime` initializes the statistics of lagged stages, and the direction is
            not mapped.

    Returns:
        The last direction `[N, *block]`.
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
        elif direction is gradient:  # a view makes the direction a tensor of its own, still with equal values
            direction = gradient.view_as(gradient)
    return direction


def map_wires(f: Callable[[Tensor], _T], gradient: Tensor, direction: Tensor) -> tuple[_T, _T]:
    """Return (f(gradient), f(direction)), for a stage that maps its inputs before a chain inside it receives them.

    Args:
        f: a function of a tensor.
        gradient: the gradient.
        direction: the direction, which may be the same object as `gradient`.

    Returns:
        The two results. If gradient and direction are one object, f is computed once, and the results are one object,
            too.
    """
    mapped = f(gradient)
    return mapped, mapped if direction is gradient else f(direction)


def chain_bounds(stages: tuple[Stage, ...], block: tuple[int, ...]) -> tuple[float | None, float | None]:
    """Return (norm, gain) of a chain, computed from the traits `spectral_norm` and `spectral_gain` of its stages.

    norm: upper bound of the spectral norm of the last direction. None: no bound is known.
    gain: upper bound of the ratio of the spectral norms of the last and the incoming direction. None: no bound is
        known.
    """
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
    """Yield (dotted path, stage, shape of its blocks) for every stage of a chain and of the chains inside stages.

    block: shape of the blocks that the chain receives.
    path: dotted path that precedes the path of each stage.
    """
    for stage in stages:
        here = dotted(path, stage.label)
        yield here, stage, block
        with named_stage(stage, here):
            chains = stage.inner(block)
        for name, inner in chains.items():
            yield from walk_blocks(inner.chain, inner.block, f"{here}.{name}")


def walk(stages: tuple[Stage, ...], path: str = "") -> Iterator[tuple[str, Stage]]:
    """Iterate over every stage of a chain and of the chains inside its stages.

    Args:
        stages: the chain.
        path: dotted path that precedes the path of each stage.

    Returns:
        An iterator of (dotted path, stage).
    """
    yield from ((here, stage) for here, stage, _ in walk_blocks(stages, (), path))


def first_lagged(stages: tuple[Stage, ...], path: str = "") -> str | None:
    """Return the dotted path of the first lagged stage in a chain or inside its stages. Return None if there is no
    lagged stage.

    A lagged stage (`Traits.lagged`) applies its state to a gradient before it learns from that gradient.

    path: dotted path that precedes the path of each stage.
    """
    return next((here for here, stage in walk(stages, path) if stage.cached_traits().lagged), None)


def chain_slots(stages: tuple[Stage, ...], block: tuple[int, ...], path: str = "") -> Iterator[tuple[str, str, Slot]]:
    """Iterate over the slots of all stages of a chain, and of the chains inside its stages, for one block.

    Args:
        stages: the chain.
        block: shape of a block.
        path: dotted path that precedes the path of each stage.

    Returns:
        An iterator of (stage path, slot name, slot).

    Raises:
        ValueError: a stage does not accept the block, or a slot cannot be filled with its initial value. The message
            has the path of the stage.
    """
    for stage in stages:
        here = dotted(path, stage.label)
        try:
            with named_stage(stage, here):
                slots = stage.slots(block)
        except ValueError as error:
            raise ValueError(located(here, str(error))) from None
        if not isinstance(slots, Mapping):
            raise ValueError(located(here, f"slots() must return a mapping {{name: Slot}}, got {short(slots)}"))
        for name, slot in slots.items():
            if not isinstance(slot, Slot):
                fault = f"slots() must return a Slot for each name, such as Slot(block), got {short(slot)}"
                raise ValueError(located(here, f"{fault} for '{name}'"))
            if slot.fill == "identity" and len(slot.shape) != 2:
                fault = f"slot '{name}' has fill 'identity', which needs a matrix, but its shape is {slot.shape}"
                raise ValueError(located(here, f"{fault}; give the slot a number as `fill`"))
            yield here, name, slot
        for scope, inner in stage.inner(block).items():
            for where, name, slot in chain_slots(inner.chain, inner.block, f"{here}.{scope}"):
                sensitive = inner.sensitive and slot.role == "second_moment"
                yield where, name, replace(slot, sensitive=True) if sensitive else slot
