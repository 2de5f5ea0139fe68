"""Parameters that a framework replaced, cast or moved after the optimizer was made."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from eigengraft.errors import counted

from ..inspect.reporting import ComposedOptimizer
from ..param_groups import WHOLE_SHARDS, check_values, flat_piece
from ..stacks.placement import ParamSpec
from ..state.param_sets import ParamSets


def adopt_parameters(optimizer: ComposedOptimizer) -> bool:
    """Adopt parameters that were replaced, cast or moved since the optimizer was made.

    Before the first step, parameters may be replaced (accelerate, sharding) or cast. The new parameters keep the names,
    routes and groups of the old ones, and new state is made for them. Parameters may move to another device at any time
    (`model.to("cuda")`). If this happens after a step, the result is True, and the caller must copy the state to the
    new device. Otherwise the result is False.

    Raises:
        ValueError: the number or the shape of parameters changed, parameters were replaced or cast after a step or a
            load, or are on the meta device now. The optimizer does not change.
    """
    groups, param_sets = optimizer.param_groups, optimizer.param_sets
    if not param_sets.same_parameters(groups):
        _require_alike(groups, param_sets)
        _rebuild(optimizer)
        return False
    changed = param_sets.changed()
    if not changed:
        return False
    stepped = _stepped(param_sets)
    for parameter, spec in changed:
        _require_usable(parameter, spec, stepped)
    if not stepped:
        _rebuild(optimizer)
    return stepped


def _rebuild(optimizer: ComposedOptimizer) -> None:
    """Replace the state of all parameters by new state. Descriptions and groups of the parameters stay."""
    groups, param_sets = optimizer.param_groups, optimizer.param_sets
    param_sets.resolve_deferred()
    fresh = ParamSets(param_sets.recipe, param_sets.checked, param_sets.others)
    state = defaultdict[Any, Any](dict, {key: own for key, own in optimizer.state.items() if not torch.is_tensor(key)})
    for group, made in zip(groups, param_sets.groups, strict=True):
        fresh.declare(group["params"], made.infos)
    fresh.complete(0, groups, state)
    fresh.signals.provided = param_sets.signals.provided
    fresh.skip_counts.update(param_sets.skip_counts)
    for old in param_sets:
        old.exchange.close()
    optimizer.state, optimizer.param_sets = state, fresh


def _stepped(param_sets: ParamSets) -> bool:
    """Return True if any parameter was updated, by this optimizer or in the run whose state was loaded."""
    return any(bool(param_set.step_counts.any()) for param_set in param_sets)


def _require_alike(groups: Sequence[Mapping[str, Any]], param_sets: ParamSets) -> None:
    if len(groups) != len(param_sets.groups):
        raise ValueError(
            f"param_groups: the optimizer was made with {len(param_sets.groups)} groups and now has {len(groups)}; add "
            "a group with optimizer.add_param_group"
        )
    stepped = _stepped(param_sets)
    for index, (group, made) in enumerate(zip(groups, param_sets.groups, strict=True)):
        found, own, names = group["params"], made.parameters, made.names
        matrices = [name for name, info in zip(names, made.infos, strict=True) if len(info.shape) > 1]
        _require_no_pieces(found, dict(zip(names, own, strict=True)), matrices)
        if len(found) != len(own):
            hint = (
                "add parameters with optimizer.add_param_group"
                if len(found) > len(own)
                else "to stop training parameters, freeze them instead of removing them"
            )
            raise ValueError(
                f"param group {index}: it was made with {counted(len(own), 'parameter')} and now has "
                f"{len(found)}; {hint}"
            )
        replaced = [name for name, new, old in zip(names, found, own, strict=True) if new is not old]
        if replaced and {*map(id, found)} == {*map(id, own)}:
            raise ValueError(
                f"param group {index}: the order of its parameters changed, first at {replaced[0]}; restore the order"
            )
        if replaced and stepped:
            raise ValueError(
                f"param group {index}: the parameter {replaced[0]} was replaced after a step; wrap or shard the model "
                "before the first step and before load_state_dict, or compose an optimizer of the new parameters and "
                "load the state dict into it"
            )
        for name, new, info in zip(names, found, made.infos, strict=True):
            if tuple(new.shape) != info.shape:
                raise ValueError(
                    f"{name}: the optimizer was composed with a parameter of shape {info.shape}, and its param group "
                    f"now has one of shape {tuple(new.shape)} in that place; put a parameter of the same shape there, "
                    "or compose an optimizer of the present parameters"
                )
        check_values(group)


def _require_usable(parameter: Tensor, spec: ParamSpec, stepped: bool) -> None:
    """Raise ValueError if a parameter has another shape, was cast after a step, or is on the meta device.

    spec: the parameter's description when the optimizer was made.
    stepped: True if any parameter of the optimizer was updated.
    """
    made, got = (f"shape {tuple(x.shape)} in {x.dtype}" for x in (spec, parameter))
    if parameter.shape != spec.shape or (stepped and parameter.dtype is not spec.dtype):
        raise ValueError(
            f"{spec.name}: the optimizer was made for a parameter of {made}, got {got}; resize a model before its "
            "optimizer is made, and cast it (`model.half()`) before the first step"
        )
    if parameter.is_meta:
        raise ValueError(
            f"{spec.name}: the parameter moved to the meta device, which holds no values; move it back, or call "
            "model.to_empty(device=...) and initialize the model, before you use the optimizer again"
        )


def _require_no_pieces(found: Sequence[Tensor], own: Mapping[str, Tensor], matrices: Sequence[str]) -> None:
    """Raise ValueError if a wrapper has put flat pieces of parameters into a group in place of the parameters.

    Some wrappers mark their pieces (`flat_piece`). DeepSpeed's stages 1 and 2, and its optimizer for bfloat16, put one
    unmarked vector in place of all matrices.

    found: tensors in the group now.
    own: parameters of the group when the optimizer was made, by name.
    matrices: names of the parameters in `own` with two axes or more.
    """
    for name, old in own.items():
        if piece := flat_piece(old):
            raise ValueError(f"{name}: the parameter must not be flattened, got {piece}")
    if not own or all(any(new is old for old in own.values()) for new in found):
        return
    piece = next(filter(None, map(flat_piece, found)), "")
    if not piece and matrices and len(found) == 1 and found[0].ndim == 1:
        piece = f"a vector of {found[0].numel()} entries in their place, as DeepSpeed (ZeRO) makes it; {WHOLE_SHARDS}"
    if piece:
        first = matrices[0] if matrices else next(iter(own))
        others = f" and {len(own) - 1} more" if len(own) > 1 else ""
        raise ValueError(f"{first}{others}: parameters must not be flattened, got {piece}")
