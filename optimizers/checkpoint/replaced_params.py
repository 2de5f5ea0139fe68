"""Parameters in place of others: put into param groups by a host, as accelerate does when it shards a model, or put
into the model without the optimizer's knowledge."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Mapping, Sequence
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from ..engine.param_sets import ParamSets, inherit_counts
from ..param_groups import WHOLE_SHARDS, check_values, flat_piece


def adopt_parameters(optimizer: Any) -> None:
    """Gives fresh state to parameters that have taken the place of others since the optimizer was made.

    Names, routes and groups stay. Raises ValueError, and nothing changes, if the optimizer has made a step or holds the
    state of one, or if shapes differ or there are more or fewer parameters; RuntimeError if its state was emptied.
    """
    groups, param_sets = optimizer.param_groups, optimizer.param_sets
    if len(groups) == len(param_sets.parameters) and all(
        len(group["params"]) == len(own) and all(map(is_, group["params"], own))
        for group, own in zip(groups, param_sets.parameters, strict=True)
    ):
        _require_state(optimizer.state, param_sets)
        return
    _require_alike(groups, param_sets)
    fresh = ParamSets(param_sets.recipe, param_sets.checked, param_sets.others)
    state = defaultdict[Any, Any](dict, {key: own for key, own in optimizer.state.items() if not torch.is_tensor(key)})
    for index, group in enumerate(groups):
        fresh.declare(group["params"], param_sets.infos[index])
    fresh.complete(0, groups, state)
    fresh.signals.provided.sources = param_sets.signals.provided.sources
    inherit_counts(fresh, param_sets)
    optimizer.state, optimizer.param_sets = state, fresh


def _require_alike(groups: Sequence[Mapping[str, Any]], param_sets: ParamSets) -> None:
    if len(groups) != len(param_sets.parameters):
        made = len(param_sets.parameters)
        raise ValueError(f"param_groups: {made} groups are required, got {len(groups)}; call optimizer.add_param_group")
    stepped = any(bool(param_set.step_counts.any()) for param_set in param_sets)
    for index, (group, own, infos) in enumerate(zip(groups, param_sets.parameters, param_sets.infos, strict=True)):
        found, names = group["params"], param_sets.labels(index)
        matrices = [name for name, info in zip(names, infos, strict=True) if len(info.shape) > 1]
        _require_no_pieces(found, dict(zip(names, own, strict=True)), matrices)
        if len(found) != len(own):
            hint = (
                "add parameters with optimizer.add_param_group" if len(found) > len(own) else "freeze, not remove, them"
            )
            raise ValueError(f"param group {index}: {len(own)} parameters are required, got {len(found)}; {hint}")
        replaced = [name for name, new, old in zip(names, found, own, strict=True) if new is not old]
        if replaced and {*map(id, found)} == {*map(id, own)}:
            raise ValueError(
                f"param group {index}: its parameters must stay in order, got others from {replaced[0]} on"
            )
        if replaced and stepped:
            raise ValueError(
                f"param group {index}: after a step the parameter {replaced[0]} must stay, got another in its place; "
                "wrap or shard the model before the first step and before load_state_dict, or compose an "
                "optimizer of the new parameters and load the state dict into that"
            )
        for name, new, info in zip(names, found, infos, strict=True):
            if tuple(new.shape) != info.shape:
                raise ValueError(f"{name}: a parameter of shape {info.shape} is required, got {tuple(new.shape)}")
        check_values(group)


def _require_state(state: Mapping[Any, Any], param_sets: ParamSets) -> None:
    """Raises RuntimeError if the state that torch is shown was emptied, which would change no step."""
    for param_set in param_sets:
        if param_set.parameters and param_set.parameters[0] not in state:
            raise RuntimeError(
                f"state: what the optimizer has made is required, got none of {param_set.specs[0].name}; steps read "
                "their own, which stays: compose another optimizer to start afresh"
            )


def require_unchanged(param_sets: ParamSets) -> None:
    """Raises ValueError for a parameter whose shape or dtype, by which its state was made, is another by now."""
    for param_set in param_sets:
        for parameter, spec in zip(param_set.parameters, param_set.specs, strict=True):
            if parameter.dtype is not spec.dtype or parameter.shape != spec.shape:
                made, got = (f"{tuple(x.shape)} in {x.dtype}" for x in (spec, parameter))
                raise ValueError(
                    f"{spec.name}: the shape and dtype that the optimizer was made for are required, {made}, got "
                    f"{got}; resize or cast a model (`model.half()`) first, then compose its optimizer"
                )


def _require_no_pieces(found: Sequence[Tensor], own: Mapping[str, Tensor], matrices: Sequence[str]) -> None:
    """Raises ValueError for flat pieces in place of parameters: marked ones, and one vector alone in place of matrices.

    The second is what DeepSpeed's stages 1 and 2, and its optimizer for bfloat16, leave in a group, without a mark.

    found: what the group holds.
    own: what the optimizer was made for, by name.
    matrices: names of those with two axes or more.
    """
    for name, old in own.items():
        if piece := flat_piece(old):
            raise ValueError(f"{name}: a parameter of its own shape is required, got {piece}")
    if not own or all(any(new is old for old in own.values()) for new in found):
        return
    piece = next(filter(None, map(flat_piece, found)), "")
    if not piece and matrices and len(found) == 1 and found[0].ndim == 1:
        piece = f"a vector of {found[0].numel()} in their place, as DeepSpeed (ZeRO) cuts them; {WHOLE_SHARDS}"
    if piece:
        first = matrices[0] if matrices else next(iter(own))
        others = f" and {len(own) - 1} more" if len(own) > 1 else ""
        raise ValueError(f"{first}{others}: parameters of their own shape are required, got {piece}")


class ModelLink:
    """The names that parameters had in a model when its optimizer was made; neither is kept alive.

    A parameter that should have a gradient and has none is looked up by its name, all others cost nothing. `check` is a
    hook of torch optimizers, called before each step.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self._names = WeakTensorKeyDictionary({parameter: name for name, parameter in model.named_parameters()})

    def check(self, optimizer: torch.optim.Optimizer, args: Any = (), kwargs: Any = None) -> None:
        """Raises RuntimeError if the model has another parameter under a name, and the gradient with it."""
        model = self._model()
        if model is None:
            return
        for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
            if parameter.grad is None and parameter.requires_grad and parameter in self._names:
                self._require_held(model, self._names[parameter], parameter)

    def _require_held(self, model: nn.Module, name: str, parameter: Tensor) -> None:
        try:
            held = model.get_parameter(name)
        except AttributeError:  # it was removed, and no other is trained in its place
            return
        if held is not parameter and held.grad is not None:
            raise RuntimeError(
                f"{name}: the parameter that the optimizer was made for is required in the model, got another, which "
                "has the gradient; replace parameters (sharding, resizing) before the optimizer is made"
            )
