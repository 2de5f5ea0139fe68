"""Pickles and copies of an optimizer: the recipe and the state, from which parameter sets are built again."""

from __future__ import annotations

from collections import defaultdict
from itertools import accumulate, pairwise
from typing import Any, TypeVar

import torch

from ..inspect.reporting import ComposedOptimizer
from ..isolation import isolation
from ..state.param_sets import ParamSets
from ..state.shown_state import own_state

_T = TypeVar("_T", bound=ComposedOptimizer)


def snapshot(optimizer: ComposedOptimizer) -> dict[str, Any]:
    """Return the contents of an optimizer's pickle by name, such as its param groups, state and recipe."""
    param_sets = optimizer.param_sets
    param_sets.resolve_deferred()
    return {
        "defaults": optimizer.defaults,
        "param_groups": optimizer.param_groups,
        "state": optimizer.state,
        "recipe": param_sets.recipe,
        "checked": param_sets.checked,
        "infos": [group.infos for group in param_sets.groups],
        "frozen": [[spec.frozen for spec in group.specs] for group in param_sets.groups],
        "others": param_sets.others,
        "batches": [*accumulate(len(batch.groups) for batch in param_sets.batches)],
        "skipped": param_sets.skipped(),
    }


def restored(cls: type[_T], saved: dict[str, Any]) -> _T:
    """Build an optimizer of class `cls` from the contents of a pickle, as `snapshot` returns them."""
    optimizer = cls.__new__(cls)
    state = defaultdict[Any, Any](dict, {key: own for key, own in saved["state"].items() if not torch.is_tensor(key)})
    param_sets = ParamSets(saved["recipe"], saved["checked"], saved["others"])
    torch_state = {"defaults": saved["defaults"], "param_groups": saved["param_groups"], "state": state}
    optimizer.__setstate__({**torch_state, "recipe": saved["recipe"], "param_sets": param_sets})
    with isolation(optimizer):
        _build(optimizer, saved, state)
    return optimizer


def _build(optimizer: ComposedOptimizer, saved: dict[str, Any], state: defaultdict[Any, Any]) -> None:
    """Build the parameter sets of an optimizer again.

    saved: result of `snapshot`, with the state.
    state: the new mapping `optimizer.state`. The state tensors of the new sets are entered into it.
    """
    param_sets, groups = optimizer.param_sets, optimizer.param_groups
    # Groups that were added together (a batch) are declared together again, in the same order. The owners of the blocks
    # of a batch depend on all earlier batches, and are therefore the same as before.
    for first, end in pairwise([0, *saved["batches"]]):
        for index in range(first, end):
            param_sets.declare(groups[index]["params"], saved["infos"][index], saved["frozen"][index])
        param_sets.assign(first)
    wanted = {id(p) for group in groups for p in group["params"] if own_state(saved["state"].get(p))}
    for batch in param_sets.batches:
        param_sets.install(batch, param_sets.build(batch, wanted), state, groups[0]["iterate"], saved["state"])
    param_sets.read_spikes(groups)
    param_sets.skip_counts.update(saved["skipped"])
