"""The reasons why steps of a stack do not run by torch's fused kernels, in the memory of the parameters, by a compiled
program, or in a device graph. `show` prints them.

The reasons are known before the first step. Further decisions are taken step by step, where the step is known:
`Execution.try_in_place` returns False, `Compiled.direction` runs the stages, `CapturedStacks.unfit` returns a reason,
and `ParamSet.launch_early` returns False. docs/architecture.md has a table of both kinds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from eigengraft.numerics import active_fake_mode, fake_mode
from eigengraft.preconditioners import FirstMoment, SecondMoment
from eigengraft.schedules import schedules
from eigengraft.slots import dotted

from ..recipe.recipe import Recipe
from ..stacks.stack import StackState
from .capturers import CAPTURERS
from .exchange import PROVIDERS
from .fused import moment_slots
from .gradients import leaves_masks

_DEVICES = ("cpu", "cuda")
"""Device types whose fused kernels are known to compute the formula of Adam's chain."""
_CAPTURED_SIGNALS = frozenset({*PROVIDERS, "parameter"})
"""Names of the signals that stages of a captured step may request. Their values have the same address in every step, or
are among the numbers that a graph reads."""


def not_fused(
    stack_state: StackState, moments: tuple[FirstMoment, SecondMoment], recipe: Recipe, of_numbers: bool
) -> Iterator[str]:
    """Yield the reasons why no fused kernel can compute Adam's chain of a stack.

    The caller also checks that the parameters of the stack may be updated in place (`not_in_place`).

    moments: the first and the second moment that the stages of the chain declare.
    of_numbers: True if a parameter of the stack is 0-d. Ranks cannot divide its update, so one rank computes and sends
        it.
    """
    rule, failure, device = stack_state.rule, recipe.failure, stack_state.stack.device
    names = moment_slots(rule, stack_state.path, *moments)
    reasons = {
        f"torch's fused kernels are not tried on the device '{device.type}'": device.type not in _DEVICES,
        "a single number has an owner where several ranks hold it": of_numbers,
        "its weight decay is cautious": (rule.weight_decay or recipe.weight_decay).cautious,
        "numbers of its stages are scheduled": any(True for stage in rule.update for _ in schedules(stage)),
        "its state is coded, or more than two moments": stack_state.tensors.keys() != {*names},
        "compiled programs apply the mask of usable gradients in one pass": rule.compile
        and leaves_masks(failure, device),
        "fake tensors have no numbers to compute with": active_fake_mode() is not None
        or any(fake_mode(x) is not None for x in stack_state.tensors.values()),
    }
    return (reason for reason, holds in reasons.items() if holds)


def not_in_place(stack_state: StackState, recipe: Recipe) -> Iterator[str]:
    """Yield the reasons why the blocks of a stack cannot be updated within the memory of their parameters."""
    shape, asked = stack_state.stack.block, [*sorted(stack_state.signals), *stack_state.totals]
    reasons = {
        "a stage mixes entries": not stack_state.rule.entrywise(),
        "a stage is lagged": stack_state.rule.lagging(),
        "a stage follows the weight decay, or multiplies it": stack_state.adds_decay,
        "it has constraints": bool(stack_state.rule.constraints),
        "an averaging is in the recipe": recipe.averaging is not None,
        "its updates are sent between ranks": stack_state.block_group is not None,
        "its state is coded": bool(stack_state.encoded),
        f"stages request signals ({', '.join(asked)})": bool(asked),
        "a slot has another shape than its block": any(slot.shape != shape for _, slot in stack_state.slots()),
        "its blocks are parts of parameters": not stack_state.stack.of_parameters,
    }
    return (reason for reason, holds in reasons.items() if holds)


def not_compiled(stack_state: StackState, in_place: bool, shared: bool) -> str | None:
    """Return the reason why the program that updates a stack (blocks with one shape) is not compiled; None if it is.

    in_place: True if the program updates parameters in place.
    shared: True if stages sum over a parameter that also has blocks in other stacks.
    """
    reasons = {
        "fake tensors have no values": active_fake_mode() is not None,
        "a single number would need a kernel of its own": in_place and math.prod(stack_state.stack.block) < 2,
        "each of its steps has a refresh, and compiled programs have none": any(
            cadence.interval <= 1 for cadence in stack_state.rule.cadences().values()
        ),
        "stages sum over parameters that have blocks in several stacks": shared,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def not_captured(stack_states: Sequence[StackState], recipe: Recipe) -> str | None:
    """Return the reason why no step of the stacks can be captured in a device graph; None if no reason is known.

    Reasons that depend on the traced programs of the stacks are not checked.
    """
    device = stack_states[0].stack.device.type
    if device not in CAPTURERS:
        return f"devices of type {device} have no graphs"
    if any(stack_state.block_group is not None for stack_state in stack_states):
        return "blocks are sent between ranks"
    constrained = [dotted(path, "constraints") for path, rule in recipe.rules().items() if rule.constraints]
    if fields := [*["averaging"] * (recipe.averaging is not None), *constrained]:
        return (
            f"{', '.join(fields)} may use numbers that Python computes in each step, and a graph would repeat the "
            f"numbers of one step; remove {', '.join(fields)}, or set `graph: false`"
        )
    given = {name for state in stack_states for name in (*state.signals, *state.totals)} - _CAPTURED_SIGNALS
    if given:
        return f"stages request signals whose memory has another address in each step ({', '.join(sorted(given))})"
    return None
