"""The full state of an optimizer that is divided over ranks, gathered on all of them or on one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor

from eigengraft.distributed.rank_group import DistributedError, RankGroup

from ..state.composed import ComposedOptimizer
from ..state.shown_state import host_state
from .sharded_state import ShardedStateDict, full_tensor, gathered, shard_hook, sharded_state

GATHER_FIRST = (
    "where a host asks one rank alone for the state dict, all ranks must gather it there before: with Hugging Face's "
    "Trainer add `callbacks=[eigengraft.optimizers.ConsolidateOnSave()]` to its arguments, with accelerate "
    "`accelerator.register_save_state_pre_hook(lambda *_: optimizer.consolidate_state_dict())`, elsewhere call "
    "`optimizer.consolidate_state_dict()` on every rank"
)


@dataclass(frozen=True)
class ConsolidatedState:
    """The full state on one rank, until it changes.

    rank: which rank has it.
    state: by index of the parameter; None on other ranks.
    """

    rank: int
    state: dict[int, dict[str, Tensor]] | None

    def shown(self, state_dict: Mapping[str, Any]) -> dict[str, Any]:
        """A state dict with the state; on other ranks one without, which cannot be pickled."""
        if self.state is None:
            return ShardedStateDict({**state_dict, "state": {}})
        return {**state_dict, "state": self.state}


@contextmanager
def divided_state(optimizer: ComposedOptimizer) -> Iterator[None]:
    """Makes torch's `state_dict` show state that is divided over ranks, and names without wrappers."""
    handle = optimizer.register_state_dict_post_hook(_state_hook, prepend=True)
    try:
        yield
    finally:
        handle.remove()


def full_state(optimizer: ComposedOptimizer) -> dict[str, Any]:
    """The state dict of an optimizer with plain tensors on the CPU; all ranks call it."""
    optimizer.param_sets.consolidated = None
    state_dict = optimizer.state_dict()
    with _all_ranks("full_state_dict"):
        found: dict[str, Any] = gathered(state_dict)
    return found


def consolidate(optimizer: ComposedOptimizer, to: int) -> None:
    """Gathers the state on rank `to` of the default process group, which keeps it on the CPU; all ranks call it."""
    param_sets = optimizer.param_sets
    rank_groups = _rank_groups(optimizer)
    for rank_group in rank_groups:
        if to not in dist.get_process_group_ranks(rank_group.all_ranks.group):
            raise ValueError(f"consolidate_state_dict: a rank that shares all parameters is required, got {to}")
    if not rank_groups:
        return
    here = dist.get_rank() == to
    found: dict[Tensor, dict[str, Tensor]] = {}
    with _all_ranks("consolidate_state_dict"):
        _synchronize(rank_groups, "consolidate_state_dict")
        for param_set in param_sets:
            states = param_set.views() if param_set.rank_group is None else sharded_state(param_set)
            for parameter, own in zip(param_set.parameters, states, strict=True):
                kept = found.setdefault(parameter, {})
                for key in sorted(own):  # one tensor after the other, in the same order on all ranks
                    value = full_tensor(own[key])
                    kept.update({key: value.detach().to("cpu", copy=True)} if here else {})
                kept.update(host_state(optimizer.state[parameter]) if here else {})
    ordered = [parameter for parameters in param_sets.parameters for parameter in parameters]
    state = {index: found[parameter] for index, parameter in enumerate(ordered) if parameter in found}
    param_sets.consolidated = ConsolidatedState(to, state if here else None)


def _state_hook(optimizer: ComposedOptimizer, state_dict: dict[str, Any]) -> dict[str, Any] | None:
    """State dict hook: names without wrappers, and state as this rank has it to show."""
    for saved, infos in zip(state_dict["param_groups"], optimizer.param_sets.infos, strict=True):
        if "param_names" in saved:
            # Names of a loaded checkpoint stay where there are none.
            given = zip(infos, saved["param_names"], strict=True)
            saved["param_names"] = [info.name or name for info, name in given]
    consolidated = optimizer.param_sets.consolidated
    if isinstance(consolidated, ConsolidatedState):
        return consolidated.shown(state_dict)
    with _all_ranks("state_dict"):
        _synchronize(_rank_groups(optimizer), "state_dict")
        return shard_hook(optimizer, state_dict)


def _rank_groups(optimizer: ComposedOptimizer) -> list[RankGroup]:
    """The ranks that share parameters, each group of ranks once."""
    found = (param_set.rank_group for param_set in optimizer.param_sets)
    return list(dict.fromkeys(rank_group for rank_group in found if rank_group is not None))


def _synchronize(rank_groups: list[RankGroup], what: str) -> None:
    """Wait for all ranks before anything is gathered, so that a rank that never comes does no harm."""
    for rank_group in rank_groups:
        rank_group.all_ranks.synchronize(what, GATHER_FIRST)


@contextmanager
def _all_ranks(what: str) -> Iterator[None]:
    """Says of a collective that fails that all ranks must call `what`."""
    try:
        yield
    except DistributedError as error:
        remedy = "" if GATHER_FIRST in str(error) else f"; {GATHER_FIRST}"
        raise DistributedError(f"{what}: all ranks must call it{remedy}. Here: {error}") from error
