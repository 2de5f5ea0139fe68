"""Loading of state dicts: strict, bit-exact, equal on all ranks, and without torch's casts of state."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import chain
from os import PathLike
from typing import Any, Self

import torch
from torch import Tensor
from torch.optim import Optimizer

from eigengraft.distributed.checks import gather_differences
from eigengraft.errors import first_lines, name_some, warn_user
from eigengraft.slots import FORMAT, StateKey

from ..inspect.reporting import ComposedOptimizer
from ..state.manifest import manifest
from ..state.param_sets import GroupBatch, StateValues
from ..state.shown_state import host_state, is_host_key, own_state
from ..step.step import ParamSet
from ..write.averaging import Mode
from .compare import RecipeChange, compare_groups, saved_mode
from .sharded_state import full_tensor, local_state


@dataclass(frozen=True)
class LoadPlan:
    """A state dict that has been checked against an optimizer and is not loaded yet.

    mode: "train" or "eval", the iterate that the saved parameters hold.
    batches: a pair for each batch (param groups that were added together): the parameter sets that the batch has after
        the load, and the saved state of its parameters.
    state: the optimizer's `state` mapping, which stays the same object.
    extra: entries that a user has added to the saved state, and that belong to no parameter.
    rest: the state dict without its state, for torch to load.
    """

    mode: Mode
    batches: list[tuple[Sequence[ParamSet], StateValues]]
    state: defaultdict[Tensor, Any]
    extra: dict[Any, Any]
    rest: dict[str, Any]

    @classmethod
    def check(cls, optimizer: ComposedOptimizer, state_dict: Any) -> Self:
        """Check a state dict and return the plan to load it. Nothing changes.

        Raises:
            ValueError: the state dict does not fit on this rank or on another one. All ranks raise.
        """
        _require_state_dict(state_dict)
        saved = state_dict["param_groups"]
        keys, change = compare_groups(optimizer.param_groups, [own.infos for own in optimizer.param_sets.groups], saved)
        mode = saved_mode(saved, optimizer.recipe.averaging is not None)
        known = {index for group in saved for index in group["params"]}
        others = {index: own for index, own in state_dict["state"].items() if index not in known}
        extra = {index: own for index, own in others.items() if not isinstance(own, Mapping)}
        faults = [f"state for an unknown parameter {index!r}" for index in others if index not in extra]
        batches, ordered = [], chain.from_iterable(keys)
        for batch in optimizer.param_sets.batches:
            values = {p: _as_saved(p, state_dict["state"].get(next(ordered), {})) for p in batch.parameters}
            batches.append((_fitting(optimizer, batch, values), values))
            faults += [fault for param_set in batches[-1][0] for fault in _set_faults(param_set, values, mode)]
        param_sets = [*optimizer.param_sets, *(one for own, _ in batches for one in own)]
        states = chain.from_iterable(values.values() for _, values in batches)
        _refuse(faults, param_sets, change, tuple(place for place, got in enumerate(states) if _is_absent(got)))
        for warning in filter(None, (change.warning(), _fresh_warning(batches))):
            warn_user(warning)
        local = [(param_sets, _local_values(param_sets, values, mode)) for param_sets, values in batches]
        rest = [_loaded_group(*pair) for pair in zip(optimizer.param_groups, saved, strict=True)]
        return cls(mode, local, optimizer.state, extra, {**state_dict, "state": {}, "param_groups": rest})

    def install(self, optimizer: ComposedOptimizer) -> None:
        """Copy the values into the optimizer, after torch has replaced its param groups by the saved groups."""
        optimizer.state = self.state
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                optimizer.state.pop(parameter, None)
        optimizer.state.update(self.extra)
        for group in optimizer.param_groups:
            group.setdefault("iterate", "train")
            group["recipe"] = optimizer.recipe.to_json()
        optimizer.param_sets.read_spikes(optimizer.param_groups)
        for batch, (param_sets, values) in zip(optimizer.param_sets.batches, self.batches, strict=True):
            optimizer.param_sets.install(batch, param_sets, self.state, self.mode, values)


@contextmanager
def strict_loading(optimizer: ComposedOptimizer, state_dict: Any) -> Iterator[None]:
    """Within this context, torch's `load_state_dict` checks the state dict first and then installs its values.

    The check is the last hook before the load, and the installation the first hook after it. Hooks of the user
    therefore work as in torch: pre-hooks may change the state dict, and post-hooks see the loaded state.
    """
    _require_state_dict(state_dict)
    with ExitStack() as hooks:

        def check(_: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
            plan = LoadPlan.check(optimizer, state_dict)
            hook = optimizer.register_load_state_dict_post_hook(lambda _: plan.install(optimizer), prepend=True)
            hooks.callback(hook.remove)
            return plan.rest

        hooks.callback(optimizer.register_load_state_dict_pre_hook(check).remove)
        yield


def _require_state_dict(given: Any) -> None:
    if not isinstance(given, Mapping) or not {"state", "param_groups"} <= given.keys():
        hint = "; torch.load reads it from a file" if isinstance(given, str | PathLike) else ""
        if isinstance(given, Mapping):
            hint = f" with {name_some([repr(key) for key in given], 5) or 'no keys'}"
            inside = [key for key, value in given.items() if isinstance(value, Mapping) and "param_groups" in value]
            hint += f"; give its entry {inside[0]!r}" if inside else ""
        raise ValueError(
            f"state_dict: it must be a mapping with 'state' and 'param_groups', got {type(given).__name__}{hint}"
        )


def _loaded_group(group: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of a saved group for torch to load: without names if the optimizer has names of its own.

    The entry `peak_lr`, which older versions did not save, is added.
    """
    filled = {"peak_lr": group["peak_lr"], **saved}
    if "param_names" in group:
        filled.pop("param_names", None)
    return filled


def _as_saved(parameter: Tensor, state: Any) -> Any:
    """Return the saved state of a parameter in the form in which the optimizer stores it.

    If the step count is a plain number, convert it to a tensor. Copy tensors that a framework has added to the state to
    the parameter's device. Return `state` unchanged if it is no mapping, which a later check refuses.
    """
    if not isinstance(state, Mapping):
        return state
    step = state.get("step")
    plain = isinstance(step, int) and not isinstance(step, bool)
    others = {key: x.to(parameter.device) for key, x in host_state(state).items() if isinstance(x, Tensor)}
    return {**state, **others, **({"step": torch.tensor(step, dtype=torch.int64, device="cpu")} if plain else {})}


def _fitting(optimizer: ComposedOptimizer, batch: GroupBatch, values: Mapping[Tensor, Any]) -> Sequence[ParamSet]:
    """Return the parameter sets that a batch of param groups needs to load a saved state.

    These are the present sets if their parameters are exactly the parameters with saved state. Otherwise parameters
    were frozen or thawed since the save. Then build new sets from the parameters that have saved state or are trainable
    now.

    batch: param groups that were added together.
    values: saved state of each parameter of the batch.
    """
    saved = {id(p) for p in values if not _is_absent(values[p])}
    if saved == {id(p) for one in batch.sets for p in one.parameters}:
        return batch.sets
    return optimizer.param_sets.build(batch, saved | {id(p) for p in values if p.requires_grad})


def _local_values(param_sets: Sequence[ParamSet], values: StateValues, mode: Mode) -> StateValues:
    """Return the saved state of each parameter as the tensors that this rank stores: shards if the state is sharded.

    Raises ValueError if quantized slots were saved in another format than the optimizer's.

    param_sets: parameter sets of the optimizer.
    values: saved state by parameter and key.
    mode: the iterate that the saved parameters hold.
    """
    local = dict(values)
    for param_set in param_sets:
        if param_set.rank_group is None:
            local.update({p: {k: full_tensor(value) for k, value in values[p].items()} for p in param_set.parameters})
            continue
        local.update(local_state(param_set, values, mode))
        faults = []
        for name, parameter, own in zip(param_set.names, param_set.parameters, param_set.views(mode), strict=True):
            faults += [f"{name}: {fault}" for fault in _faults(own, got)] if own_state(got := local[parameter]) else []
        _refuse(faults, [param_set])
    return local


def _refuse(
    faults: list[str], param_sets: list[ParamSet], change: RecipeChange | None = None, absent: tuple[int, ...] = ()
) -> None:
    """Raise ValueError if this rank or another one has found faults in a state dict. All ranks must call it.

    faults: error messages of this rank.
    param_sets: parameter sets. The ranks that share their parameters compare faults.
    change: differences of the recipes. If there are faults, the error also names these differences. None: the recipes
        were compared before.
    absent: indices of the parameters without saved state. Different indices on different ranks are a fault.
    """
    header = "state_dict does not fit, and nothing was loaded:"
    message = "\n".join([header, *first_lines(faults)]) if faults else None
    if faults and change is not None and change.settings:
        message = change.refusal(first_lines(faults))
    rank_groups = [param_set.rank_group.all_ranks for param_set in param_sets if param_set.rank_group is not None]
    for ranks in dict.fromkeys(rank_groups):
        found = gather_differences(ranks, {"fault": message, "absent": absent}, "agreement on a state dict")
        if "fault" in found:
            texts = [f"rank {rank}: {text}" for rank, text in found["fault"].items() if text is not None]
            raise ValueError("\n".join(texts))
        if "absent" in found and message is None:
            fault = "another rank received the state of other parameters; load the same file on all ranks"
            message = "\n".join([header, fault])
    if message is not None:
        raise ValueError(message)


def _fresh_warning(batches: Sequence[tuple[Sequence[ParamSet], Mapping[Tensor, Any]]]) -> str:
    """Return the warning about parameters without saved state, such as frozen ones, or "" if there are none.

    batches: pairs (parameter sets, saved state by parameter).
    """
    fresh = [
        name
        for param_sets, values in batches
        for one in param_sets
        for name, parameter in zip(one.names, one.parameters, strict=True)
        if _is_absent(values[parameter])
    ]
    text = f"state_dict: it has no state of {name_some(fresh, 8)}; their state starts from its initial values"
    return text if fresh else ""


def _set_faults(param_set: ParamSet, values: Mapping[Tensor, Any], mode: Mode) -> list[str]:
    wanted: Sequence[Mapping[str, Any]] = param_set.views(mode)
    if param_set.rank_group is not None:
        wanted = manifest(param_set, mode)
    rows = zip(param_set.names, param_set.parameters, wanted, strict=True)
    saved = [(name, own, got) for name, parameter, own in rows if not _is_absent(got := values[parameter])]
    return [f"{name}: {fault}" for name, own, got in saved for fault in _faults(own, got)]


def _is_absent(got: Any) -> bool:
    """Return True if the saved state of a parameter is empty, for example because the parameter was frozen."""
    return isinstance(got, Mapping) and not own_state(got)


def _faults(own: Mapping[str, Any], got: Any) -> list[str]:
    """Return a line for each difference in keys, shapes, dtypes and formats between saved state and own state.

    own: the optimizer's state of a parameter, or descriptions of its tensors, by key.
    got: the saved state of the parameter.
    """
    if not isinstance(got, Mapping):
        return [f"state must be a mapping of slots, got {type(got).__name__}"]
    faults = [f"missing '{key}'" for key in own if key not in got]
    faults += [f"unexpected '{key}'" for key in got if key not in own and not is_host_key(key)]
    for text in own.keys() & got.keys():
        mine, other, key = own[text], got[text], StateKey.parse(text)
        if not isinstance(other, Tensor) or other.shape != mine.shape or other.dtype != mine.dtype:
            kind = f"{other.dtype} {tuple(other.shape)}" if isinstance(other, Tensor) else type(other).__name__
            faults.append(f"'{text}' must be {mine.dtype} {tuple(mine.shape)}, got {kind}")
        elif key.part == FORMAT and isinstance(mine, Tensor) and not torch.equal(mine.cpu(), other.cpu()):
            faults.append(f"'{key._replace(part='')}' is stored in another format or with another codebook")
    return sorted(faults)
