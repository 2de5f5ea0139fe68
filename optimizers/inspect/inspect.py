"""The inspection of an optimizer: rows of its state and of its last watched step, gathered from all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, Protocol

import torch
from torch.utils.hooks import RemovableHandle

from eigengraft.numerics import fake_mode

from ..isolation import kept_from_compiler
from ..stacks.stack import StackState
from ..state.param_sets import ParamSets
from ..step.step import ParamSet
from .state_rows import measured
from .step_watch import Sample, StepWatch
from .table import Inspection, Measurement


class Watched(Protocol):
    """An optimizer whose steps can be watched.

    watched_rows: measurements of the last watched step.
    """

    param_sets: ParamSets
    param_groups: list[dict[str, Any]]
    watched_rows: tuple[Measurement, ...]

    def register_step_post_hook(self, hook: Callable[..., None]) -> RemovableHandle: ...


def watch_next_step(optimizer: Watched) -> None:
    """Measures the next step of an optimizer by a hook that is gone after it; `watched_rows` has then what it found."""
    _require_numbers(optimizer.param_sets, "watch_next_step")
    watched = [
        (param_set, stack_state, StepWatch(stack_state.checks))
        for param_set in optimizer.param_sets
        for stack_state in param_set.stack_states
    ]
    for _, stack_state, watch in watched:
        stack_state.step_watch = watch

    @kept_from_compiler
    def finish(*_: Any) -> None:
        handle.remove()
        rows: list[Measurement] = []
        for param_set, stack_state, watch in watched:
            if stack_state.step_watch is watch:  # no other call of this function came in between
                stack_state.step_watch = None
                rows += _of_step(param_set, stack_state, watch.samples.values())
        optimizer.watched_rows = tuple(rows)

    handle = optimizer.register_step_post_hook(finish)


def inspect(param_sets: ParamSets, watched: Sequence[Measurement]) -> Inspection:
    """Return the table of all parameters; ranks that share parameters call it together, and each gets all their rows.

    watched: rows of the step that was watched last.
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
    names = (name for param_set in param_sets for name in param_set.names)
    places = {name: place for place, name in enumerate(names)}
    rows.sort(key=lambda row: (places[row.parameter], -1 if row.block is None else row.block, row.stage))
    return Inspection.joined(rows)


def _require_numbers(param_sets: Iterable[ParamSet], who: str) -> None:
    """Raise ValueError for fake tensors. They have no values to measure."""
    for param_set in param_sets:
        if fake_mode(param_set.parameters[0]) is not None:
            raise ValueError(f"{who}: parameters with numbers are required, got a fake tensor, {param_set.names[0]}")


def _of_step(param_set: ParamSet, stack_state: StackState, samples: Iterable[Sample]) -> Iterator[Measurement]:
    """The rows of what a step was seen to do with the blocks of a stack; of a block that was seen twice, the later."""
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
    """The rows of the state of all parameters that have been updated."""
    for stack_state in param_set.stack_states:
        blocks = stack_state.select(param_set.update_counts > 0)
        if blocks is None:
            continue
        names = [param_set.names[position] for position in blocks.stack.param_ids.tolist()]
        context = stack_state.context(blocks, param_set.step_counts, {})
        for stage, slot, measure, values in measured(blocks, context):
            for name, key, value in zip(names, blocks.stack.keys, values, strict=True):
                yield Measurement(name, key, stage, slot, measure, (value, 1.0, 1.0))
