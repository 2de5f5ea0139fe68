"""Conversion of a state dict of torch's Adam or AdamW, so that an optimizer of this library can continue the run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eigengraft.errors import name_some, warn_user
from eigengraft.slots import StateKey

from .isolation import isolation
from .optimizer import Optimizer
from .other_options import meant_overrides
from .step.fused import declared_moments, moment_slots


def convert_adamw(state_dict: Mapping[str, Any], optimizer: Optimizer) -> dict[str, Any]:
    """Convert a state dict of torch.optim.AdamW or torch.optim.Adam to one of an optimizer.

    Parameters whose update is Adam's take over both moments and the number of steps. All other parameters, such as the
    matrices of `soap_fitted`, start with new state, and a UserWarning names them. Learning rates and weight decays are
    the optimizer's own.

    Args:
        state_dict: state dict of torch's optimizer. The function does not change it.
        optimizer: an optimizer of the same parameters in the same param groups. The function does not change it.

    Returns:
        A state dict for `optimizer.load_state_dict`.

    Raises:
        TypeError: an argument is not of the type that is named above.
        ValueError: the param groups differ, betas or eps differ, the moments are of AMSGrad or of another optimizer, or
            the optimizer stores its moments in another form.
    """
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"optimizer: an eigengraft optimizer is required, got {type(optimizer).__name__}; the order is "
            "convert_adamw(state_dict, optimizer)"
        )
    given: object = state_dict
    if not isinstance(given, Mapping) or not {"state", "param_groups"} <= given.keys():
        raise TypeError(
            "state_dict: must have the keys 'state' and 'param_groups', as the state dict of a torch optimizer, got "
            f"{_described(given)}; pass torch_optimizer.state_dict()"
        )
    with isolation(optimizer):
        return _converted(state_dict, optimizer)


def _described(given: object) -> str:
    """Return a text about an argument that is no state dict of an optimizer: its keys, or its type."""
    if not isinstance(given, Mapping):
        return type(given).__name__
    return f"the keys {name_some([repr(key) for key in given], 3)}" if given else "an empty mapping"


def _converted(state_dict: Mapping[str, Any], optimizer: Optimizer) -> dict[str, Any]:
    found, groups, fresh = optimizer.state_dict(), state_dict["param_groups"], list[str]()
    differing, meant = list[str](), dict[str, Any]()
    sizes = [[len(group["params"]) for group in own] for own in (found["param_groups"], groups)]
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"state_dict: the param groups of torch's optimizer have {sizes[1]} parameters, and those of this "
            f"optimizer {sizes[0]}; give both the same groups"
        )
    for own, theirs, made in zip(found["param_groups"], groups, optimizer.param_sets.groups, strict=True):
        for index, other, info, name in zip(own["params"], theirs["params"], made.infos, made.names, strict=True):
            moments = state_dict["state"].get(other)
            if not moments:  # the parameter has had no gradient
                continue
            if "exp_avg" not in moments or "exp_avg_sq" not in moments or "max_exp_avg_sq" in moments:
                raise ValueError(
                    f"{name}: its state must be exp_avg, exp_avg_sq and step, as torch's AdamW has without amsgrad, "
                    f"got {', '.join(moments)}; begin with new state"
                )
            path = optimizer.recipe.route(info)[0]
            rule = optimizer.recipe.rules()[path]
            blocks = rule.blocking.grids(info.shape, optimizer.recipe.view_of(info).matrices)
            shapes = [grid.shape for grid in blocks for _ in grid.keys]
            chain = declared_moments(rule, shapes[0]) if len(shapes) == 1 else None
            if chain is None:
                fresh.append(name)
                continue
            own_numbers = (chain[0].beta, chain[1].beta, chain[1].eps)
            numbers = zip(("beta1", "beta2", "eps"), own_numbers, (*theirs["betas"], theirs["eps"]), strict=True)
            for option, number, other_number in numbers:
                if number != other_number:
                    differing.append(
                        f"{name}: {option} is {number} in the recipe and {other_number} in torch's optimizer"
                    )
                    meant |= meant_overrides(option, other_number, rule, path)
            if differing:
                continue
            state = found["state"][index]
            for key, value in zip(moment_slots(rule, path, *chain), ("exp_avg", "exp_avg_sq"), strict=True):
                if (slot := StateKey.join(0, key)) not in state:
                    raise ValueError(
                        f"{name}: the recipe's `storage` encodes its slot {key}, and torch's moments can be copied "
                        "only into plain tensors; convert to an optimizer of the recipe without `storage`, and then "
                        "pass its state dict to `convert_storage`"
                    )
                if state[slot].numel() != moments[value].numel():
                    raise ValueError(
                        f"{name}: {value} has the shape {tuple(moments[value].shape)}, and the parameter has "
                        f"{info.shape}; give both optimizers the parameters in the same order"
                    )
                state[slot] = moments[value].detach().to(state[slot]).reshape(state[slot].shape).clone()
            state["step"] = moments["step"].detach().to(state["step"]).clone()
    if differing:
        raise ValueError(f"{differing[0]}; give the recipe the numbers of torch's optimizer: overrides={meant}")
    if fresh:
        warn_user(
            f"state of {name_some(fresh, 8)} is not converted and starts from its initial values, because the update "
            "is not Adam's"
        )
    return found
