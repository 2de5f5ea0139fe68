"""`Optimizer.inspect()`, a table of measurements on all ranks: of the present state, and of the last watched step.

`watch_next_step` makes the next step a watched one.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from eigengraft.errors import ContractError
from eigengraft.numerics import fake_mode
from eigengraft.preconditioners.algebra.spectra import condition, off_diagonal_share, orthogonality, turning_angle
from eigengraft.preconditioners.base import named_stage, walk_blocks
from eigengraft.slots import Slot, State, Watch
from eigengraft.step_context import StepContext

from ..isolation import kept_from_compiler
from ..stacks.stack import ActiveBlocks, StackState
from ..state.param_sets import ParamSets
from ..step.step import ParamSet
from .norms import NormWatch
from .table import Inspection, Measurement


def watch_next_step(
    optimizer: torch.optim.Optimizer, param_sets: ParamSets, store: Callable[[list[Measurement]], None]
) -> None:
    """Measure the next step of an optimizer, and call `store` with the measurements."""
    _require_numbers(param_sets, "watch_next_step")
    watched = [
        (param_set, stack_state, StepWatch(stack_state.checks))
        for param_set in param_sets
        for stack_state in param_set.stack_states
    ]
    for _, stack_state, watch in watched:
        stack_state.step_watch = watch
    norms: list[tuple[ParamSet, NormWatch]] = []

    @kept_from_compiler
    def begin(*_: Any) -> None:
        before.remove()
        norms.extend((param_set, NormWatch(param_set.parameters)) for param_set in param_sets)

    @kept_from_compiler
    def finish(*_: Any) -> None:
        after.remove()
        rows = [row for param_set, watch in norms for row in _of_norms(param_set, watch)]
        for param_set, stack_state, watch in watched:
            if stack_state.step_watch is watch:  # a later call of `watch_next_step` replaces the watch
                stack_state.step_watch = None
                rows += _of_step(param_set, stack_state, watch.samples.values())
        store(rows)

    before = optimizer.register_step_pre_hook(begin)
    after = optimizer.register_step_post_hook(finish)


def inspect(param_sets: ParamSets, watched: Sequence[Measurement]) -> Inspection:
    """Return the measurements of all parameters. Ranks that share parameters call this together, with equal results.

    watched: measurements of the last step for which `watch_next_step` was called.
    """
    skipped, rows = param_sets.skipped(), list[Measurement]()
    _require_numbers(param_sets, "inspect")
    for param_set in param_sets:
        own = [row for row in watched if row.parameter in param_set.names]
        own += _of_state(param_set)
        own += [
            Measurement(name, None, "", "", "skipped", (float(skipped[name]), 1.0, 1.0)) for name in param_set.names
        ]
        group = param_set.rank_group
        rows += own if group is None else chain.from_iterable(group.all_gather_object(own, "inspect"))
    if param_sets.spikes is not None:
        counts = param_sets.spikes.counts()._asdict()
        rows += [Measurement("", None, "", "", _SPIKES[name], (float(x), 1.0, 1.0)) for name, x in counts.items()]
    names = (name for param_set in param_sets for name in param_set.names)
    places = {name: place for place, name in enumerate(("", *names))}
    rows.sort(key=lambda row: (places[row.parameter], -1 if row.block is None else row.block, row.stage))
    return Inspection.joined(rows)


_SPIKES = {
    "spikes": "spikes",
    "entered": "spike_values",
    "mean": "spike_mean",
    "deviation": "spike_deviation",
    "bound": "spike_bound",
}
"""Names of the measures of the spike check in the table, by field of `SpikeCounts`. Rows with these measures belong to
no parameter."""


def _require_numbers(param_sets: Iterable[ParamSet], who: str) -> None:
    """Raise ValueError if parameters are fake tensors, which have no values to measure.

    who: name of the function that was called, for the error.
    """
    for param_set in param_sets:
        if fake_mode(param_set.parameters[0]) is not None:
            raise ValueError(f"{who}: {param_set.names[0]} is a fake tensor, which has no values to measure")


def _of_norms(param_set: ParamSet, watch: NormWatch) -> Iterator[Measurement]:
    """Yield the norms of each parameter in the measured step: of the weight, the gradient (if any) and the update."""
    ranks = 1 if param_set.rank_group is None else param_set.rank_group.size
    squares = watch.squares(ranks).T.tolist()
    for name, (weight, gradient, update), given in zip(param_set.names, squares, watch.with_gradient, strict=True):
        measures = {"weight_norm": (weight, weight, 1 / ranks)}
        if given:
            measures["gradient_norm"] = (gradient, gradient, 1 / ranks)
        measures["update_ratio"] = (update, update, weight)
        for measure, sums in measures.items():
            yield Measurement(name, None, "", "", measure, sums)


def _of_step(param_set: ParamSet, stack_state: StackState, samples: Iterable[Sample]) -> Iterator[Measurement]:
    """Yield the measurements of the step after `watch_next_step`, for the blocks of a stack.

    If a measure of a block was recorded several times in the step, only the last value is used.

    samples: sums that were recorded in the step, in the order of recording.
    """
    blocks, found = list(stack_state.rows()), dict[tuple[object, ...], Measurement]()
    for stage, slot, measure, rows, mask, sums in samples:
        if isinstance(rows, torch.Tensor):
            chosen = [blocks[row] for row in rows.tolist()]
        else:
            chosen = blocks if rows is None else blocks[rows]
        written = [True] * len(chosen) if mask is None else mask.tolist()
        for (_, position, key), usable, (a, b, c) in zip(chosen, written, sums.tolist(), strict=True):
            if usable:
                row = Measurement(param_set.names[position], key, stage, slot, measure, (a, b, c))
                found[row.key] = row
    yield from found.values()


def _of_state(param_set: ParamSet) -> Iterator[Measurement]:
    """Yield the measurements of the state of all parameters that have been updated at least once."""
    groups = [[stack_state] for stack_state in param_set.stack_states]
    if param_set.offloaded is not None:
        param_set.offloaded.schedule(groups)
    for group in groups:
        with nullcontext() if param_set.offloaded is None else param_set.offloaded.held(group):
            yield from [row for stack_state in group for row in _of_stack(param_set, stack_state)]


def _of_stack(param_set: ParamSet, stack_state: StackState) -> Iterator[Measurement]:
    """Yield the measurements of the state of a stack, for its parameters that have been updated at least once."""
    blocks = stack_state.select(param_set.update_counts > 0)
    if blocks is None:
        return
    names = [param_set.names[position] for position in blocks.stack.param_ids.tolist()]
    context = stack_state.context(blocks, param_set.step_counts, {})
    for stage, slot, measure, values in measured(blocks, context):
        for name, key, value in zip(names, blocks.stack.keys, values, strict=True):
            yield Measurement(name, key, stage, slot, measure, (value, 1.0, 1.0))


class Sample(NamedTuple):
    """Sums from which one measure is computed, for some rows (blocks) of a stack.

    stage: dotted path of the stage.
    slot: name of the slot; "" for a measure of the direction.
    measure: name of the measure.
    rows: rows of the stack, as a slice or a tensor of indices; None means all rows.
    mask: `[n]`, True for rows that the step updates; None means all rows.
    sums: `[n, 3]` float64, the numbers a, b, c for each row. The measure is a / sqrt(b c).
    """

    stage: str
    slot: str
    measure: str
    rows: slice | Tensor | None
    mask: Tensor | None
    sums: Tensor


class StepWatch(Watch):
    """Measures directions and storage errors of the stages of one stack during one step, and changes nothing.

    update_rms: root mean square of a direction. For a chain it is the direction of the last stage.
    cosine: cosine of the angle between the direction and the gradient that the stage received.
    storage_error: ||stored - written||_F / ||written||_F at the last write of a quantized slot, where `written` is the
        stage's tensor and `stored` is its value after quantization.
    """

    def __init__(self, inner: Watch | None) -> None:
        """Prepare to measure the stages of one stack during one step.

        inner: another observer, such as that of `checked=True`, which receives the same calls; None if there is none.
        """
        self.inner = inner
        self.samples: dict[tuple[str, str, str, tuple[int, ...] | None], Sample] = {}
        self._calls: list[tuple[State, Mapping[str, Tensor]]] = []
        self._given: tuple[weakref.ref[Tensor], Tensor] | None = None

    def loaded(self, key: str, value: Tensor) -> None:
        if self.inner is not None:
            self.inner.loaded(key, value)

    def storing(self, key: str, value: object, rows: int, dtype: torch.dtype) -> None:
        if self.inner is not None:
            self.inner.storing(key, value, rows, dtype)

    def stored(self, state: State, name: str, value: Tensor) -> None:
        if self.inner is not None:
            self.inner.stored(state, name, value)
        kept = state.decoded(name)
        if kept is not None:
            error, written = _wide(kept - value), _wide(value)
            square = _dot(error, error)
            self._add(state, state.path, (name, "storage_error"), (square, square, _dot(written, written)))

    @contextmanager
    def call(self, what: str, inputs: Mapping[str, Tensor], state: State) -> Iterator[None]:
        self._calls.append((state, inputs))
        try:
            with nullcontext() if self.inner is None else self.inner.call(what, inputs, state):
                yield
        finally:
            self._calls.pop()

    def returned(self, value: object, direction: Tensor) -> None:
        if self.inner is not None:
            self.inner.returned(value, direction)
        if not isinstance(value, Tensor):
            return
        state, inputs = self._calls[-1]
        update, gradient = _wide(value), _wide(inputs["gradient"])
        square, product = _dot(update, update), _dot(update, gradient)
        squares = self._squares(inputs["gradient"], gradient)
        paths = (state.path, *([] if len(self._calls) > 1 else [state.path.rpartition(".")[0]]))
        # A stage inside another stage stores its measures under its own path alone. Each stage of the outermost chain
        # also stores its measures under the path of the chain, in place of those of the stage before it. At the end of
        # the step the path of the chain therefore has the measures of the last stage.
        for path in paths:
            self._add(state, path, ("", "update_rms"), (square, square, torch.full_like(square, update.shape[1])))
            self._add(state, path, ("", "cosine"), (product, square, squares))

    def _squares(self, gradient: Tensor, wide: Tensor) -> Tensor:
        """Return the sums of squares `[N]` of a gradient. The last result is cached for stages with the same gradient.

        wide: the gradient in float64.
        """
        if self._given is None or self._given[0]() is not gradient:
            self._given = weakref.ref(gradient), _dot(wide, wide)
        return self._given[1]

    def _add(self, state: State, path: str, what: tuple[str, str], sums: tuple[Tensor, Tensor, Tensor]) -> None:
        """Store a `Sample`: the sums from which a measure of n blocks of the stack is computed.

        An earlier `Sample` of the same measure and blocks is dropped.

        state: state of a stage for the n blocks. `state.rows` says which blocks of the stack these are.
        path: path under which the measure is reported, that of a stage or of a chain.
        what: pair (name of the measured slot, name of the measure). For a measure of the direction, such as "cosine",
            the name of the slot is "".
        sums: the numbers a, b, c of the measure a / sqrt(b c), `[n]` each.
        """
        (slot, measure), rows = what, state.rows
        place = tuple(rows.tolist()) if isinstance(rows, Tensor) else rows and (rows.start, rows.stop)
        sample = Sample(path, slot, measure, rows, state.mask, torch.stack(sums, -1))
        self.samples.pop((path, slot, measure, place), None)
        self.samples[path, slot, measure, place] = sample


def _wide(x: Tensor) -> Tensor:
    """Return the entries of each block in float64: `[N, *block] -> [N, n]`."""
    return x.flatten(1).double() if x.ndim > 1 else x[:, None].double()


def _dot(x: Tensor, y: Tensor) -> Tensor:
    """Return the sum of products of entries, `[N, n] -> [N]`, without allocating the products."""
    return torch.bmm(x.unsqueeze(1), y.unsqueeze(2)).flatten()


Found = dict[tuple[str, str], Tensor]
"""Values of shape `[n]`, one for each block, by (slot, measure)."""
LONGEST_WAIT = 32
"""How far back the last refresh of a random cadence is searched, in mean intervals between refreshes. With probability
e^-32 the last refresh is older and is not found."""


def measured(blocks: ActiveBlocks, context: StepContext) -> Iterator[tuple[str, str, str, list[float]]]:
    """Yield (stage path, slot, measure, values) for the state of some blocks, with one value for each block."""
    stack_state = blocks.stack_state
    nothing_written = torch.zeros(len(blocks.stack.param_ids), dtype=torch.bool, device=context.device)
    slots: dict[str, dict[str, Slot]] = {}
    for key, slot in stack_state.slots():
        slots.setdefault(key.stage, {})[key.slot] = slot
    update = stack_state.state("update", blocks.rows, nothing_written, context)
    after_decay = stack_state.state("after_decay", blocks.rows, nothing_written, context)
    for stages, state in ((stack_state.rule.update, update), (stack_state.rule.after_decay, after_decay)):
        for part, stage, block in walk_blocks(stages, state.block):
            own = state.scope(part, block)
            found = {
                **of_slots(slots.get(own.path, {}), own),
                **_staleness(stage, context),
                **_own(stage, own, context),
            }
            for (slot_name, measure), values in found.items():
                yield own.path, slot_name, measure, values.tolist()


def of_slots(slots: Mapping[str, Slot], state: State) -> Found:
    """Return the measures of slots, chosen by the roles of the slots.

    condition: condition number of a statistic.
    root_condition: condition number of a root or a learned factor.
    orthogonality: distance of a basis from an orthogonal matrix.
    off_diagonal: share of off-diagonal entries in Q^T A Q, for a basis Q and the statistic A of the same axis.
    angle: mean angle in degrees between a column q of Q and A q. Like `off_diagonal`, it is 0 if Q diagonalizes A.
    failures: consecutive failures of a root or basis solver.
    """
    found: Found = {}
    for name, slot in slots.items():
        symmetric = slot.role == "statistic"
        if slot.role in ("statistic", "root") and (_is_factor(slot) or len(slot.shape) == 1):
            found[name, "condition" if symmetric else "root_condition"] = condition(state[name], symmetric)
        elif slot.role == "basis" and len(slot.shape) == 2:
            q = state[name]
            found[name, "orthogonality"] = orthogonality(q)
            for a in (state[other] for other, one in slots.items() if _pairs(slot, one)):
                found[name, "off_diagonal"] = off_diagonal_share(q.double().mT @ a.double() @ q.double())
                found[name, "angle"] = turning_angle(a, q)
        elif slot.role == "failures":
            found[name, "failures"] = state[name].double()
    return found


def _is_factor(slot: Slot) -> bool:
    """Return True if a slot is a matrix such as a Gram matrix, and not one number for each entry of a square block."""
    return len(slot.shape) == 2 and slot.shape[0] == slot.shape[1] and slot.frame == "none"


def _pairs(basis: Slot, other: Slot) -> bool:
    """Return True if the slot `other` is the statistic from which the slot `basis` is computed."""
    same = basis.axes is not None and basis.axes == other.axes
    return same and other.role == "statistic" and _is_factor(other) and other.shape[0] == basis.shape[0]


def _staleness(stage: Any, context: StepContext) -> Found:
    """Return the measure `staleness` of each block: the number of updates since its last refresh.

    The last refresh is the one whose result is in use. If its result was delayed, the number counts from the update in
    which the refresh started. A block that was never refreshed has the number of all its updates.
    """
    cadence = stage.cadence()
    if cadence is None:
        return {}
    age = np.asarray(context.steps, dtype=np.float64).copy()
    unknown = np.ones(len(age), dtype=np.bool_)
    longest = cadence.period or LONGEST_WAIT * math.ceil(cadence.interval)
    for back in range(min(longest, int(context.steps.max())) + 1):
        for start, stop, first in stage.due(replace(context, steps=context.steps - back)):
            now = unknown[start:stop].copy()
            age[start:stop][now] = back + (0 if first else cadence.postponed)
            unknown[start:stop] = False
        if not unknown.any():
            break
    return {("", "staleness"): torch.from_numpy(age)}


def _own(stage: Any, state: State, context: StepContext) -> Found:
    """Return the measures that the stage itself defines."""
    found: Found = {}
    with named_stage(stage, state.path):
        measured = stage.measures(state, context)
    for name, values in measured.items():
        if not isinstance(values, Tensor) or values.shape != (len(context.steps),):
            got = list(values.shape) if isinstance(values, Tensor) else type(values).__name__
            raise ContractError(f"{state.path}: measures() '{name}' must be a tensor of shape [N], got {got}")
        slot, _, measure = name.rpartition("/")
        found[slot, measure] = values
    return found
