"""State as `optimizer.state` shows it, and changes of it by hosts.

The engine steps stacks of blocks. `optimizer.state` shows each parameter's part of them: tensors over the same memory,
each with a storage of its own size, so that one parameter's state is saved and copied alone. Hosts replace these
tensors (an offload to the CPU and back), write zeros into them (a reset), or take entries out. Such changes are found
before state is next stepped or read: values are copied into the stacks, and what cannot be state is refused by name.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from itertools import chain
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor

from eigengraft.distributed.layouts import is_dtensor
from eigengraft.errors import first_lines
from eigengraft.slots import AVERAGING, FORMAT, Slot, StateKey

from ..step.step import ParamSet
from ..write.averaging import Mode
from .manifest import manifest

_END = object()
_LARGEST = 64
"""Tensors whose address or version each step compares, 4 microseconds. Hosts that move or reset state in place do so
with all of it, or with the largest tensors."""
_version = attrgetter("_version")


def is_host_key(key: object) -> bool:
    """Whether an entry of a parameter's state is a host's own: all keys of optimizers but `step` have a slash."""
    return not isinstance(key, str) or (key != "step" and "/" not in key)


def own_state(entry: object) -> dict[str, Any]:
    """The optimizer's part of what `optimizer.state` or a state dict holds of a parameter; empty if there is none."""
    return {k: x for k, x in entry.items() if not is_host_key(k)} if isinstance(entry, Mapping) else {}


def host_state(entry: object) -> dict[Any, Any]:
    """The part of a parameter's state that a host keeps there under keys of its own."""
    return {k: x for k, x in entry.items() if is_host_key(k)} if isinstance(entry, Mapping) else {}


def apart(x: Tensor) -> Tensor:
    """A tensor over the same memory, in a storage as small as the tensor, so that it is pickled and copied alone.

    The result has its own version counter. Tensors without memory (meta, fake) are returned as views.
    """
    if type(x) is not Tensor or x.device.type == "meta" or not x.is_contiguous():
        return x.data
    start, size = x.storage_offset() * x.element_size(), x.numel() * x.element_size()
    storage = x.untyped_storage()[start : start + size]
    return torch.empty(0, dtype=x.dtype, device=x.device).set_(storage, 0, x.shape, x.stride())


def show(param_set: ParamSet, state: MutableMapping[Tensor, Any]) -> None:
    """Puts the state of a parameter set where torch looks for it, beside entries of hosts."""
    for parameter, own in zip(param_set.parameters, visible(param_set), strict=True):
        state[parameter] = {**{key: apart(x) for key, x in own.items()}, **host_state(state.get(parameter))}


def visible(param_set: ParamSet, mode: Mode | None = None) -> list[dict[str, Tensor]]:
    """The state of each parameter as `optimizer.state` shows it: this rank's views, empty tensors for other ranks'.

    The keys are the same on every rank; torch.distributed.checkpoint reads them there.
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
    """Copies values into the state of a parameter; ValueError for empty tensors that stand for another rank's."""
    for key, value in values.items():
        if is_host_key(key):
            state[key] = value
            continue
        if value.shape != state[key].shape:
            raise ValueError(
                f"state '{key}': {tuple(state[key].shape)} is required, got {tuple(value.shape)}; a pickle of an "
                "optimizer that is divided over ranks is one rank's part, use torch.distributed.checkpoint"
            )
        state[key].copy_(value)


class ShownState:
    """What `optimizer.state` held when it was last shown, so that a step sees at a glance whether it still does.

    tensors: by parameter, the tensors that were shown by key.
    missing: parameters without state.

    A look compares objects; addresses, which `x.data = y` changes; and versions, which writes in place raise, where
    zeros need an answer (`_answered`). A step compares addresses and versions of the largest tensors alone. For 200
    parameters of 3 tensors each that takes 45 microseconds within a step of 1.1 ms, of which most is memory traffic.
    """

    def __init__(
        self,
        state: Mapping[Any, Any],
        param_sets: Iterable[ParamSet],
        parameters: Iterable[Iterable[Tensor]],
    ) -> None:
        sets = list(param_sets)
        self.tensors = {p: own_state(state[p]) for one in sets for p in one.parameters}
        self.missing = [p for group in parameters for p in group if p not in self.tensors]
        self._last, self._entries = next(reversed([*state]), None), [*state.values()]
        self._values = [state[p].values() for p in self.tensors]
        self._objects = [*chain.from_iterable(self._values), _END]
        self._all = [x for own in self.tensors.values() for x in own.values() if type(x) is Tensor]
        self._large = sorted(self._all, key=lambda x: -x.nbytes)[:_LARGEST]
        self._addresses = {which: self._of(which) for which in (True, False)}
        watched = [self.tensors[p].get(key) for one in sets for p, key in _answered(one)]
        self.watched = [x for x in watched if type(x) is Tensor]
        self._versions = [*map(_version, self.watched)]
        self._large_watched = sorted(self.watched, key=lambda x: -x.nbytes)[:_LARGEST]
        self._large_versions = [*map(_version, self._large_watched)]

    def _of(self, thorough: bool) -> list[int]:
        return [*map(Tensor.data_ptr, self._all if thorough else self._large)]

    def is_held(self, state: Mapping[Any, Any], thorough: bool) -> bool:
        """Whether a state is what was shown; thorough: compare all addresses, which takes as long again."""
        return (
            len(state) == len(self._entries)
            and all(map(is_, state.values(), self._entries))
            and next(reversed(state), None) is self._last  # an entry under another key would be the last one
            and all(map(is_, chain(chain.from_iterable(self._values), (_END,)), self._objects))
            and self._of(thorough) == self._addresses[thorough]
            and [*map(_version, self._large_watched)] == self._large_versions
            and (not thorough or [*map(_version, self.watched)] == self._versions)
        )

    def moved(self) -> dict[int, int]:
        """The former addresses, by id, of tensors that have another now, and of watched ones that were written."""
        rows = zip(self._all, self._addresses[True], strict=True)
        moved = {id(x): address for x, address in rows if x.data_ptr() != address}
        rows = zip(self.watched, self._versions, strict=True)
        return moved | {id(x): moved.get(id(x), x.data_ptr()) for x, version in rows if x._version != version}


def _answered(param_set: ParamSet) -> Iterator[tuple[Tensor, str]]:
    """(parameter, key) of state in which zeros are no value: slots that begin with others, codes, and iterates."""
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
    """Whether a slot of a stage holds the weights of some step."""
    return slot.role == "iterate" and bool(slot.shape)


@dataclass
class HostChanges:
    """Changes of the state of one parameter set by a host, checked and not taken over yet.

    values: for each position, values by key to copy.
    changed: for each position, the keys whose values are others than before.
    faults: what cannot be state, by name.
    replaced: whether some tensor that was shown is another now.
    """

    param_set: ParamSet
    values: list[dict[str, Tensor]] = field(default_factory=list)
    changed: list[set[str]] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    replaced: bool = False

    @torch.no_grad()
    def copy(self) -> None:
        """Copies the values into the stacks."""
        for own, values in zip(self.param_set.views(), self.values, strict=True):
            fill(own, {key: value for key, value in values.items() if key in own})

    @torch.no_grad()
    def restart(self) -> None:
        """Gives slots that were made zero the values that they begin with, where these are others."""
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
    """What a host has made of the state of a parameter set; nothing is changed.

    rebuilt: the set is fresh, and holds none of the values that were shown.
    """
    moved, reset, found = shown.moved(), param_set.counts_set_back(), HostChanges(param_set)
    rows = zip(param_set.names, param_set.parameters, visible(param_set, mode), strict=True)
    for position, (name, parameter, wanted) in enumerate(rows):
        known, given = shown.tensors.get(parameter, {}), own_state(state[parameter])
        faults = [f"'{key}' is missing" for key in wanted if key not in given]
        faults += [f"'{key}' is no slot of the recipe" for key in given if key not in wanted]
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
    """A value as a tensor: hosts write numbers of steps as numbers."""
    number = key == "step" and isinstance(value, (int, float)) and not isinstance(value, bool)
    dtype = torch.int64 if isinstance(value, int) else torch.float64
    return torch.tensor(value, dtype=dtype, device="cpu") if number else value


def _fault(param_set: ParamSet, key: str, value: Any, target: Tensor) -> str | None:
    """Why a value cannot be the state under a key; None: it can."""
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
            return f"is the format of the codes beside it and must be {formats[0]}, got {int(value)}"
    return None


def _zero_iterates(param_set: ParamSet, position: int, state: Mapping[str, Tensor], changed: set[str]) -> list[str]:
    """The faults that state which holds weights was made zero after steps: the weights would be lost with it."""
    steps, weights = int(state["step"]), param_set.local[position]
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
                f"'{keys[0]}' holds weights, which are not zero, and got zeros after {steps} steps; set 'step' to zero "
                "too, or `del optimizer.state[parameter]`, to begin afresh at the parameter"
            ]
    return []


def _is_exact(value: Tensor, dtype: torch.dtype) -> bool:
    """Whether a cast to a dtype loses nothing."""
    if value.dtype is dtype:
        return True
    if value.is_complex() != dtype.is_complex:
        return False
    back = value.to(dtype).to(value.dtype)
    return bool(((back == value) | (value != value)).all())


def refuse(changes: Iterable[HostChanges]) -> None:
    """Raises ValueError that names what cannot be state, if there is any."""
    faults = [fault for one in changes for fault in one.faults]
    if faults:
        fault = (
            "optimizer.state: values of the keys, shapes and dtypes that the optimizer has made are required, none was "
            "taken over; load_state_dict replaces all of them, `del optimizer.state[parameter]` begins afresh:"
        )
        raise ValueError("\n".join([fault, *first_lines(faults)]))
