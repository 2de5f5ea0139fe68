"""`optimizer.state` as users and training frameworks see it, and the detection of changes that they make to it.

A step updates stacks, which hold blocks of many parameters. `optimizer.state` shows the state of each parameter in
tensors that share the memory of the stacks. Each of these tensors has a storage of its own size, so that the state of
one parameter can be saved and copied alone. A framework (a host, in names of this file) may replace these tensors (an
offload to the CPU and back), zero them (a reset) or remove entries. The next step or report detects the changes and
copies changed values into the stacks. A value that cannot be state raises an error with its name.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from itertools import chain
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor

from eigengraft.errors import first_lines
from eigengraft.numerics import apart, is_dtensor
from eigengraft.slots import AVERAGING, FORMAT, Slot, StateKey

from ..step.step import ParamSet
from ..write.averaging import Mode
from .manifest import manifest

_END = object()
_LARGEST = 64
"""Number of state tensors, the largest ones, whose address and version each step checks for changes by other code. They
suffice, because a framework that moves or resets state changes all tensors, or at least the largest. The check takes 4
microseconds."""
_version = attrgetter("_version")


def is_host_key(key: object) -> bool:
    """Return True if a key of a parameter's state was added by a framework or user, and is no key of the optimizer.

    The optimizer's own keys are `step` and all strings with a "/".
    """
    return not isinstance(key, str) or (key != "step" and "/" not in key)


def own_state(entry: object) -> dict[str, Any]:
    """Return the optimizer's own entries of a parameter's state; {} if there are none."""
    return {k: x for k, x in entry.items() if not is_host_key(k)} if isinstance(entry, Mapping) else {}


def host_state(entry: object) -> dict[Any, Any]:
    """Return the entries of a parameter's state that a framework or user has added under other keys."""
    return {k: x for k, x in entry.items() if is_host_key(k)} if isinstance(entry, Mapping) else {}


def show(param_set: ParamSet, state: MutableMapping[Tensor, Any]) -> None:
    """Write the state of a parameter set into `optimizer.state`. Entries that other code has added there are kept."""
    for parameter, own in zip(param_set.parameters, visible(param_set), strict=True):
        state[parameter] = {**{key: apart(x) for key, x in own.items()}, **host_state(state.get(parameter))}


def visible(param_set: ParamSet, mode: Mode | None = None) -> list[dict[str, Tensor]]:
    """Return the entries of `optimizer.state`: views of this rank's state, and empty tensors for other ranks' state.

    All ranks have the same keys, because torch.distributed.checkpoint requires it.

    mode: the iterate that the parameters are assumed to hold, because keys depend on it. None: the iterate that they
        hold now.
    """
    views = param_set.views(mode)
    if param_set.rank_group is None:
        return views
    entries = manifest(param_set, mode)
    return [
        {
            key: view[key] if key in view else torch.empty(0, dtype=entry.dtype, device="cpu")
            for key, entry in own.items()
        }
        for view, own in zip(views, entries, strict=True)
    ]


def fill(state: MutableMapping[str, Any], values: Mapping[str, Any]) -> None:
    """Copy values into the state of a parameter.

    state, values: state by key. A value under a key of a framework (`is_host_key`) is not copied: it replaces the old
        entry.

    Raises:
        ValueError: a value has a wrong shape, such as the empty tensor that stands for the state of another rank.
    """
    for key, value in values.items():
        if is_host_key(key):
            state[key] = value
            continue
        if value.shape != state[key].shape:
            raise ValueError(
                f"state '{key}': shape {tuple(state[key].shape)} is required, got {tuple(value.shape)}; a pickle of a "
                "sharded optimizer has only one rank's shard, so save it with torch.distributed.checkpoint instead"
            )
        state[key].copy_(value)


class ShownState:
    """A record of `optimizer.state` as the optimizer has written it. A step compares the state with it, because users
    may write into `optimizer.state`.

    Three things are compared: the tensor objects, the addresses of their memory (`x.data = y` changes only these), and
    the version counters (writes in place increase them). Versions are compared only for tensors whose reset to zero
    must be detected (`_checked_for_resets`). A step compares all tensor objects, but addresses and versions of only a
    few tensors, the largest ones. For 200 parameters with 3 tensors each, this takes 45 microseconds of a step of
    1.1 ms. Other methods, such as a save, compare the addresses and versions of all tensors (`thorough`).

    tensors: for each parameter, its state tensors by key.
    missing: parameters without state.
    """

    def __init__(
        self,
        state: Mapping[Any, Any],
        param_sets: Iterable[ParamSet],
        parameters: Iterable[Tensor],
    ) -> None:
        sets = list(param_sets)
        self.tensors = {p: own_state(state[p]) for one in sets for p in one.parameters}
        self.missing = [p for p in parameters if p not in self.tensors]
        self._last, self._entries = next(reversed([*state]), None), [*state.values()]
        self._values = [state[p].values() for p in self.tensors]
        self._objects = [*chain.from_iterable(self._values), _END]
        self._all = [x for own in self.tensors.values() for x in own.values() if type(x) is Tensor]
        self._large = sorted(self._all, key=lambda x: -x.nbytes)[:_LARGEST]
        self._addresses = {which: self._of(which) for which in (True, False)}
        watched = [self.tensors[p].get(key) for one in sets for p, key in _checked_for_resets(one)]
        self.watched = [x for x in watched if type(x) is Tensor]
        self._versions = [*map(_version, self.watched)]
        self._large_watched = sorted(self.watched, key=lambda x: -x.nbytes)[:_LARGEST]
        self._large_versions = [*map(_version, self._large_watched)]

    def _of(self, thorough: bool) -> list[int]:
        return [*map(Tensor.data_ptr, self._all if thorough else self._large)]

    def is_held(self, state: Mapping[Any, Any], thorough: bool) -> bool:
        """Return True if `state`, which is `optimizer.state`, has not changed since this record was made.

        thorough: True to compare the addresses and versions of all tensors, which doubles the time; False to compare
            only those of the largest tensors.
        """
        return (
            len(state) == len(self._entries)
            and all(map(is_, state.values(), self._entries))
            and next(reversed(state), None) is self._last  # an entry under a new key becomes the last entry
            and all(map(is_, chain(chain.from_iterable(self._values), (_END,)), self._objects))
            and self._of(thorough) == self._addresses[thorough]
            and [*map(_version, self._large_watched)] == self._large_versions
            and (not thorough or [*map(_version, self.watched)] == self._versions)
        )

    def moved(self) -> dict[int, int]:
        """Return {id: address} for each state tensor that was changed since this record was made.

        The address is that of the tensor's memory when the record was made. A tensor was changed if its memory is at
        another address now, or if it was written in place. Writes in place are detected only for tensors whose reset to
        zero must be detected (`_checked_for_resets`).
        """
        rows = zip(self._all, self._addresses[True], strict=True)
        moved = {id(x): address for x, address in rows if x.data_ptr() != address}
        rows = zip(self.watched, self._versions, strict=True)
        return moved | {id(x): moved.get(id(x), x.data_ptr()) for x, version in rows if x._version != version}


def _checked_for_resets(param_set: ParamSet) -> Iterator[tuple[Tensor, str]]:
    """Yield (parameter, key) of each state tensor for which a reset to zero must be detected.

    The key is the tensor's name in the parameter's state. For these tensors zero is not a valid initial value: their
    initial values are not zero, they hold codes of quantizers, or they hold iterates of parameters.
    """
    for stack_state in param_set.stack_states:
        begun = [key for key, slot in stack_state.slots() if slot.fill != 0 or _holds_weights(slot)]
        names = [name for key in begun for name in stack_state.names(key)]
        names += [name for key in stack_state.encoded for name in stack_state.names(StateKey.parse(key))]
        for _, position, block in stack_state.rows():
            for name in dict.fromkeys(names):
                yield param_set.parameters[position], StateKey.join(block, name)
    for position, parameter in enumerate(param_set.parameters):
        yield from ((parameter, key) for key in param_set.iterates.view(position))


def _holds_weights(slot: Slot) -> bool:
    """Return True if a state tensor that a stage declares as `slot` stores weights of an earlier step."""
    return slot.role == "iterate" and bool(slot.shape)


@dataclass
class HostChanges:
    """Changes that a framework or user made to `optimizer.state` of one parameter set, checked but not yet applied.

    values: values to copy, a mapping by key for each parameter.
    changed: keys with changed values, a set for each parameter.
    faults: error messages for values that cannot be state.
    replaced: True if a tensor of `optimizer.state` was replaced by another tensor.
    """

    param_set: ParamSet
    values: list[dict[str, Tensor]] = field(default_factory=list)
    changed: list[set[str]] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    replaced: bool = False

    @torch.no_grad()
    def copy(self) -> None:
        """Copy values that other code has changed in `optimizer.state` into the state that steps use."""
        for own, values in zip(self.param_set.views(), self.values, strict=True):
            fill(own, {key: value for key, value in values.items() if key in own})

    @torch.no_grad()
    def restart(self) -> None:
        """Write the initial values into slots that other code has set to zero in order to reset them."""
        for stack_state in self.param_set.stack_states:
            for row, position, block in stack_state.rows():
                if keys := self.changed[position]:
                    stack_state.restart(
                        row, {StateKey.within_block(key) for key in keys if key.startswith(f"{block}/")}
                    )
        for position, keys in enumerate(self.changed):
            parsed = map(StateKey.parse, keys)
            self.param_set.iterates.restart(position, {key.stage for key in parsed if key.block is None})
        self.param_set.note_counts()


def host_changes(
    param_set: ParamSet, state: Mapping[Tensor, Any], shown: ShownState, mode: Mode, rebuilt: bool
) -> HostChanges:
    """Find the changes that a framework or user made to the state of a parameter set. Nothing is modified.

    state: `optimizer.state` with these changes.
    shown: record of `optimizer.state` as the optimizer has written it.
    mode: the iterate, for training or for evaluation, that the parameters hold.
    rebuilt: True if the parameter set was made anew, so that its state does not hold the earlier values.
    """
    moved, reset, found = shown.moved(), param_set.counts_set_back(), HostChanges(param_set)
    rows = zip(param_set.names, param_set.parameters, visible(param_set, mode), strict=True)
    for position, (name, parameter, wanted) in enumerate(rows):
        known, given = shown.tensors.get(parameter, {}), own_state(state[parameter])
        faults = [f"'{key}' is missing" for key in wanted if key not in given]
        faults += [f"'{key}' is not a slot of the recipe" for key in given if key not in wanted]
        values, changed = dict[str, Tensor](), {*given} if reset[position] else set[str]()
        for key in [key for key in given if key in wanted]:
            value, target, same = given[key], wanted[key], given[key] is known.get(key)
            if same and not rebuilt and id(value) not in moved and not reset[position]:
                continue
            if fault := _fault(param_set, key, value, target):
                faults.append(f"'{key}' {fault}")
                continue
            in_place = same and id(value) in moved and value.data_ptr() == moved[id(value)]
            found.replaced |= not same or (id(value) in moved and not in_place)
            if in_place:
                changed.add(key)
            if rebuilt or not in_place:
                values[key] = plain = _plain(key, value).detach().to(target.device, target.dtype)
                before = known[key].to(target.device) if rebuilt and key in known else target
                if (rebuilt and key not in known) or not torch.equal(plain, before):
                    changed.add(key)
        if not faults:
            faults = _zero_iterates(param_set, position, {**wanted, **values}, changed)
        found.values.append(values)
        found.changed.append(changed)
        found.faults.extend(f"{name}: {fault}" for fault in sorted(faults))
    return found


def _plain(key: str, value: Any) -> Any:
    """Return a value of a parameter's state. A step count that a framework wrote as a plain number becomes a tensor."""
    number = key == "step" and isinstance(value, (int, float)) and not isinstance(value, bool)
    dtype = torch.int64 if isinstance(value, int) else torch.float64
    return torch.tensor(value, dtype=dtype, device="cpu") if number else value


def _fault(param_set: ParamSet, key: str, value: Any, target: Tensor) -> str | None:
    """Return the reason why a value cannot replace an entry of a parameter's state, or None if it can.

    key: name of the entry.
    target: tensor of the optimizer that the value replaces.
    """
    value = _plain(key, value)
    if not isinstance(value, Tensor) or is_dtensor(value):
        return f"of {target.dtype} {tuple(target.shape)} is required, got {type(value).__name__}"
    if value.shape != target.shape or not _is_exact(value, target.dtype):
        return f"of {target.dtype} {tuple(target.shape)} is required, got {value.dtype} {tuple(value.shape)}"
    if key == "step" and int(value) < 0:
        return f"must be a number of steps >= 0, got {int(value)}"
    if StateKey.parse(key).part == FORMAT and value.numel():
        name = StateKey.parse(key).name
        formats = [one.format_of(name) for one in param_set.stack_states if name in one.encoded]
        if int(value) not in (0, *formats):
            return (
                f"identifies the format of the quantized numbers in the same slot, and must stay {formats[0]}, got "
                f"{int(value)}"
            )
    return None


def _zero_iterates(param_set: ParamSet, position: int, state: Mapping[str, Tensor], changed: set[str]) -> list[str]:
    """Return a list with an error message if other code has zeroed state that stores weights; [] if not.

    Such state has averaged iterates or weights of an earlier step, which would be lost. There is no error before the
    first step, or if the parameter itself is zero.

    position: position of the parameter in `param_set`.
    state: state of the parameter by key, with the values that other code has written.
    changed: keys whose values other code has changed.
    """
    steps, weights = int(state["step"]), param_set.own_entries[position]
    if not steps or not changed:
        return []
    slots = (pair for one in param_set.stack_states for pair in one.slots())
    names = {str(key) for key, slot in slots if _holds_weights(slot)}
    alone = [[key] for key in state if StateKey.within_block(key) in names]
    averaged = [key for key in state if StateKey.parse(key).stage == AVERAGING and state[key].ndim]
    for keys in (averaged, *alone):
        zero = changed.intersection(keys) and not any(bool(state[key].any()) for key in keys)
        if zero and bool(weights.any()):
            return [
                f"'{keys[0]}' stores weights, and was set to zero after {steps} steps; to start again from the "
                "parameter, set 'step' to zero too, or `del optimizer.state[parameter]`"
            ]
    return []


def _is_exact(value: Tensor, dtype: torch.dtype) -> bool:
    """Return True if a cast of the tensor to a dtype changes no value."""
    if value.dtype is dtype:
        return True
    if value.is_complex() != dtype.is_complex:
        return False
    back = value.to(dtype).to(value.dtype)
    return bool(((back == value) | (value != value)).all())


def refuse(changes: Iterable[HostChanges]) -> None:
    """Raise ValueError with the names of all values that cannot be state, if there are any."""
    faults = [fault for one in changes for fault in one.faults]
    if faults:
        fault = (
            "optimizer.state: values must have the keys, shapes and dtypes that the optimizer has made; no change was "
            "applied, because of these faults:"
        )
        remedy = "To replace all state, call load_state_dict. To reset a parameter, `del optimizer.state[parameter]`."
        raise ValueError("\n".join([fault, *first_lines(faults), remedy]))
