"""Checked mode: checks of a stage's contract before and after each of its hooks, while an optimizer runs.

A violation is raised as a `ContractError` with the path of the stage, its hook and the step. Violations are a wrong
shape, dtype or device, a write to an input, a change of state that was not written back, and a number that is not
finite although all inputs were finite. No tensor is copied to detect writes: torch counts the writes to a tensor
(`Tensor._version`), and the counts before and after a hook are compared.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from eigengraft.errors import ContractError
from eigengraft.numerics import has_values
from eigengraft.slots import Slot, State, StateKey, Watch
from eigengraft.step_context import StepContext


class Hooks(Protocol):
    """The hooks of a stage that run in every step or refresh: `observe`, `refresh` and `apply`."""

    def observe(self, state: State, gradient: Tensor, context: StepContext) -> None: ...

    def refresh(self, state: State, gradient: Tensor, context: StepContext) -> None: ...

    def apply(self, state: State, gradient: Tensor, direction: Tensor, context: StepContext) -> Tensor: ...


@dataclass
class Call:
    """A hook call that is running.

    what: "<path>: <hook>() at step <t>", for error messages.
    fine: bool `[N]`, True for blocks whose inputs are finite and whose state this step may change. The results of these
        blocks must be finite.
    loads: the tensors that the hook has loaded, by key of the slot. Each is stored with the number of writes to it
        (`Tensor._version`) when it was loaded.
    """

    what: str
    fine: Tensor
    loads: dict[str, list[tuple[Tensor, int]]] = field(default_factory=dict)


class Checks(Watch):
    """The checks of all stages of one stack. The methods are called when a hook runs, loads a slot or writes a slot.

    declared: the slots that the stages declare, by "<stage path>/<slot>".
    written: keys of the slots that have been written back so far.
    """

    def __init__(self, declared: Mapping[str, Slot]) -> None:
        self.declared, self.written = declared, set[str]()
        self._calls: list[Call] = []

    def loaded(self, key: str, value: Tensor) -> None:
        """Record that the running hook loaded a slot, and how often the tensor has been written to so far.

        key: key of the slot in the state.
        value: the loaded tensor.
        """
        if self._calls:
            self._calls[-1].loads.setdefault(key, []).append((value, value._version))

    def storing(self, key: str, value: object, rows: int, dtype: torch.dtype) -> None:
        """Raise ContractError if a value cannot be stored in a slot: it must be finite, and have the slot's shape and
        dtype.

        key: key of the slot in the state.
        rows: number of blocks in the slot, N.
        dtype: the required dtype.
        """
        path, name = StateKey.parse(key)[1:3]
        required = f"{path}: slot '{name}' needs a {dtype} tensor of shape {_stack(self.declared[key].shape)}"
        if not isinstance(value, Tensor):
            raise ContractError(f"{required}, got {type(value).__name__}")
        if tuple(value.shape) != (rows, *self.declared[key].shape):
            raise ContractError(f"{required} with N = {rows}, got {list(value.shape)}")
        if value.dtype != dtype:
            raise ContractError(f"{required}, got {value.dtype}")
        if self._calls:
            self._require_finite(f"wrote slot '{name}'", value)

    def stored(self, state: State, name: str, value: Tensor) -> None:
        """Record that a hook of a stage assigned a value to a slot (wrote it back).

        If the value is the tensor that the hook had loaded from the slot, later writes to it in place are still
        checked, because they change the state. Any other value was copied into the state. Later writes to it do not
        change the state, and are not checked.

        state: state of the stage.
        name: name of the slot.
        """
        key = StateKey.join(state.path, name)
        self.written.add(key)
        loads = [load for call in self._calls for load in call.loads.pop(key, ())]
        if any(tensor is value for tensor, _ in loads):
            self.loaded(key, value)

    @contextmanager
    def call(self, what: str, inputs: Mapping[str, Tensor], state: State) -> Iterator[None]:
        """Return a context manager that checks the hook call that runs inside it.

        At the end, ContractError is raised if the hook wrote to an input, or changed state without writing it back.

        what: text about the call for messages, as `call_text` returns it.
        inputs: the tensors that the hook receives and must not write to, by name. One of them is "gradient".
        state: state that the hook receives.
        """
        versions = {name: tensor._version for name, tensor in inputs.items()}
        call = Call(what, _fine(inputs, state.mask))
        self._calls.append(call)
        try:
            yield
            _require_untouched(inputs, versions, call.what)
            _require_written_back(call)
        except ContractError as error:
            if str(error).startswith(what.partition(":")[0]):  # the message names this stage, or a stage inside it
                raise
            raise ContractError(f"{what}: {error}") from None
        except Exception as error:
            read = [f"{key} {list(loads[-1][0].shape)}" for key, loads in call.loads.items()]
            slots = f", and the slots {', '.join(read)}" if read else ""
            error.add_note(f"in {what}, on a stack of shape {list(inputs['gradient'].shape)}{slots}")
            if "must match the size" in str(error):
                error.add_note(
                    "does a tensor `[N]`, such as `context.step`, multiply or divide a stack `like` of N blocks? "
                    "Give it axes of length 1, by `context.per_block(f, like)`, `context.correction(b, like)` or "
                    "`numerics.per_block(x, like)`"
                )
            raise
        finally:
            self._calls.pop()

    def returned(self, value: object, direction: Tensor) -> None:
        """Raise ContractError if `value`, the result of `apply`, is not finite or differs from the direction in shape,
        dtype or device.
        """
        what = self._calls[-1].what
        if not isinstance(value, Tensor) or value.shape != direction.shape:
            raise wrong_direction(what, value, direction)
        if value.dtype != direction.dtype or value.device != direction.device:
            raise ContractError(
                f"{what} must return a direction in {direction.dtype} on {direction.device}, got {value.dtype} on "
                f"{value.device}"
            )
        self._require_finite("returned a direction", value)

    def _require_finite(self, did: str, value: Tensor) -> None:
        """Raise ContractError if a value is not finite in a block whose inputs are finite.

        did: text for the message that says how the hook produced the value, such as "returned a direction".
        """
        call = self._calls[-1]
        if not value.is_floating_point() or len(value) != len(call.fine) or not has_values(value):
            return
        bad = ~value.isfinite() & call.fine.reshape(-1, *[1] * (value.ndim - 1))
        if bool(bad.any()):
            block = int(bad.reshape(len(bad), -1).any(1).nonzero()[0])
            first = float(value[bad][0])
            raise ContractError(
                f"{call.what} {did} that is not finite, although its inputs are: "
                f"{first} in block {block} of {len(bad)} ({int(bad.sum())} of {bad.numel()} numbers)"
            )


class CheckedHooks:
    """The hooks of a stage, each run inside the context manager `watch.call`, which checks it."""

    def __init__(self, stage: Hooks, watch: Watch) -> None:
        self.stage, self.watch = stage, watch

    def observe(self, state: State, gradient: Tensor, context: StepContext) -> None:
        with self.watch.call(call_text("observe", state, context), {"gradient": gradient}, state):
            self.stage.observe(state, gradient, context)

    def refresh(self, state: State, gradient: Tensor, context: StepContext) -> None:
        with self.watch.call(call_text("refresh", state, context), {"gradient": gradient}, state):
            self.stage.refresh(state, gradient, context)

    def apply(self, state: State, gradient: Tensor, direction: Tensor, context: StepContext) -> Tensor:
        inputs = {"gradient": gradient, "direction": direction}
        with self.watch.call(call_text("apply", state, context), inputs, state):
            result = self.stage.apply(state, gradient, direction, context)
            self.watch.returned(result, direction)
        return result


def wrong_direction(what: str, value: object, direction: Tensor) -> ContractError:
    """Return the error about `value`, a result of `apply` that is no tensor of the shape of the direction.

    Any other shape would be broadcast by later operations, without an error.

    what: path of the stage, or a text that begins with it, for the message.
    """
    shape = _stack(tuple(direction.shape[1:]))
    if not isinstance(value, Tensor):
        got = "nothing; is a `return` missing?" if value is None else type(value).__name__
        return ContractError(f"{what} must return a direction of shape {shape}, got {got}")
    given = list(value.shape)
    return ContractError(f"{what} must return a direction of shape {shape} with N = {len(direction)}, got {given}")


def _require_untouched(inputs: Mapping[str, Tensor], versions: Mapping[str, int], what: str) -> None:
    """Raise ContractError if a hook wrote to one of its inputs.

    versions: number of writes to each input (`Tensor._version`) before the hook ran, by name of the input.
    what: text about the call for the message, as `call_text` returns it.
    """
    for name, tensor in inputs.items():
        if tensor._version != versions[name]:
            raise ContractError(
                f"{what} wrote to its input `{name}`, whose memory may be the user's `p.grad`; use `{name} * 2`, not "
                f"`{name}.mul_(2)`, or clone `{name}` first"
            )


def _require_written_back(call: Call) -> None:
    """Raise ContractError if a loaded slot was changed in place and not written back."""
    for key, loads in call.loads.items():
        if any(tensor._version != version for tensor, version in loads):
            name = StateKey.parse(key).slot
            raise ContractError(
                f"{call.what} changed slot '{name}' in place and did not write it back; other storage, bf16 for "
                f'example, would lose the change; assign `state["{name}"] = ...` after the last change'
            )


def _fine(inputs: Mapping[str, Tensor], mask: Tensor | None) -> Tensor:
    """Return bool `[N]`, True for blocks whose inputs are all finite and that the mask selects.

    mask: bool `[N]`; None selects all blocks.
    """
    parts = [x.reshape(len(x), math.prod(x.shape[1:])).isfinite().all(1) for x in inputs.values()]
    return torch.stack(parts if mask is None else [*parts, mask]).all(0)


def call_text(hook: str, state: State, context: StepContext) -> str:
    """Return "<path>: <hook>() at step <t>", or "... at step <t> to <u>" if the blocks are at different steps."""
    steps = sorted({int(step) for step in context.steps}) or [0]
    return f"{state.path}: {hook}() at step {steps[0]}" + (f" to {steps[-1]}" if steps[-1] > steps[0] else "")


def _stack(shape: tuple[int, ...]) -> str:
    """Return the shape of a stacked slot as text, such as "[N, 3, 4]"."""
    return f"[{', '.join(['N', *map(str, shape)])}]"
