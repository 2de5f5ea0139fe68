"""What the state of a stack says of each stage: measures that follow from roles of slots, cadences, and the stages."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from eigengraft.errors import ContractError
from eigengraft.preconditioners import Stages
from eigengraft.preconditioners.algebra.spectra import condition, off_diagonal_share, orthogonality, turning_angle
from eigengraft.preconditioners.base import walk_blocks
from eigengraft.slots import Slot, State
from eigengraft.step_context import StepContext

from ..stacks.stack import ActiveBlocks

Found = dict[tuple[str, str], Tensor]
"""Values `[n]` by (slot, measure)."""
LONGEST_WAIT = 32
"""Mean intervals back to which a refresh of a random cadence is looked for: e^-32 of them are older."""


def measured(blocks: ActiveBlocks, context: StepContext) -> Iterator[tuple[str, str, str, list[float]]]:
    """(stage path, slot, measure, value of each block) of the state of some blocks."""
    stack_state = blocks.stack_state
    nothing_written = torch.zeros(len(blocks.stack.param_ids), dtype=torch.bool, device=context.device)
    slots: dict[str, dict[str, Slot]] = {}
    for key, slot in stack_state.slots():
        slots.setdefault(key.stage, {})[key.slot] = slot
    update = stack_state.state("update", blocks.rows, nothing_written, context)
    after_decay = stack_state.state("after_decay", blocks.rows, nothing_written, context)
    for stages, state in ((stack_state.rule.update, update), (stack_state.rule.after_decay, after_decay)):
        for stage, own in _walk(stages, state):
            found = {
                **of_slots(slots.get(own.path, {}), own),
                **_staleness(stage, context),
                **_own(stage, own, context),
            }
            for (slot_name, measure), values in found.items():
                yield own.path, slot_name, measure, values.tolist()


def of_slots(slots: Mapping[str, Slot], state: State) -> Found:
    """The measures that follow from roles.

    condition: of statistics. root_condition: of roots and learned factors. orthogonality: of bases. off_diagonal,
    angle: of a basis beside a statistic of the same axis. failures: in a row, of roots and bases.
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
    """Whether a slot is a square matrix, not a number for each entry of a square block."""
    return len(slot.shape) == 2 and slot.shape[0] == slot.shape[1] and slot.frame == "none"


def _pairs(basis: Slot, other: Slot) -> bool:
    """Whether a slot is the statistic that a basis is made of."""
    same = basis.axes is not None and basis.axes == other.axes
    return same and other.role == "statistic" and _is_factor(other) and other.shape[0] == basis.shape[0]


def _staleness(stage: Any, context: StepContext) -> Found:
    """Updates since the last refresh of each block, as its cadence says; all of them if there was none."""
    cadence = stage.cadence()
    if cadence is None:
        return {}
    age = np.asarray(context.steps, dtype=np.float64).copy()
    unknown = np.ones(len(age), dtype=np.bool_)
    longest = cadence.period or LONGEST_WAIT * math.ceil(cadence.interval)
    for back in range(min(longest, int(context.steps.max())) + 1):
        for start, stop, _ in stage.due(replace(context, steps=context.steps - back)):
            now = unknown[start:stop].copy()
            age[start:stop][now] = back
            unknown[start:stop] = False
        if not unknown.any():
            break
    return {("", "staleness"): torch.from_numpy(age)}


def _own(stage: Any, state: State, context: StepContext) -> Found:
    """The measures of the stage itself."""
    found: Found = {}
    for name, values in stage.measures(state, context).items():
        if not isinstance(values, Tensor) or values.shape != (len(context.steps),):
            got = list(values.shape) if isinstance(values, Tensor) else type(values).__name__
            raise ContractError(f"{state.path}: measures() '{name}': a tensor of shape [N] is required, got {got}")
        slot, _, measure = name.rpartition("/")
        found[slot, measure] = values
    return found


def _walk(stages: Stages, state: State) -> Iterator[tuple[Any, State]]:
    """Every stage of a chain and of the chains inside it, with its state."""
    for path, stage, block in walk_blocks(stages, state.block):
        yield stage, state.scope(path, block)
