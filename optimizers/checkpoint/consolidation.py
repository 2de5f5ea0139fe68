"""The full state of an optimizer whose state is sharded over ranks, gathered on all ranks or on one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor

from eigengraft.distributed.rank_group import DistributedError, RankGroup

from ..inspect.reporting import ComposedOptimizer
from ..state.shown_state import host_state
from .sharded_state import ShardedStateDict, full_tensors, gathered, shard_hook, sharded_state

GATHER_FIRST = (
    "if a training framework saves on one rank alone, all ranks must gather the state first: with Hugging Face's "
    "Trainer add `callbacks=[eigengraft.optimizers.ConsolidateOnSave()]` to its arguments, with accelerate "
    "`accelerator.register_save_state_pre_hook(lambda *_: optimizer.consolidate_state_dict())`, elsewhere call "
    "`optimizer.consolidate_state_dict()` on every rank"
)
"""Remedy in the error about a collective that a rank has not called."""


@contextmanager
def divided_state(optimizer: ComposedOptimizer) -> Iterator[None]:
    """Within this context, torch's `state_dict` of the optimizer has DTensors for sharded state.

    Names of parameters are those without the prefixes of wrappers such as DDP.
    """
    handle = optimizer.register_state_dict_post_hook(lambda _, found: _state_hook(optimizer, found), prepend=True)
    try:
        yield
    finally:
        handle.remove()


def full_state(optimizer: ComposedOptimizer) -> dict[str, Any]:
    """Return the state dict of an optimizer with plain tensors on the CPU. All ranks must call it."""
    optimizer.param_sets.consolidated = None
    state_dict = optimizer.state_dict()
    with _all_ranks("full_state_dict"):
        found: dict[str, Any] = gathered(state_dict)
    return found


def consolidate(optimizer: ComposedOptimizer, to: int) -> None:
    """Gather the state on rank `to` of the default process group, on the CPU. All ranks must call it.

    The next `state_dict()` of that rank returns the gathered state.

    Raises:
        ValueError: rank `to` does not share all parameters.
        DistributedError: a rank does not call it.
    """
    rank_groups = _rank_groups(optimizer)
    if any(to not in rank_group.all_ranks.members for rank_group in rank_groups):
        raise ValueError(
            f"consolidate_state_dict: rank {to} does not share all parameters; choose a rank that shares all of them"
        )
    if not rank_groups:
        return
    here, found = dist.get_rank() == to, dict[Tensor, dict[Any, Tensor]]()
    with _all_ranks("consolidate_state_dict"):
        _synchronize(rank_groups, "consolidate_state_dict")
        for param_set in optimizer.param_sets:
            states = param_set.views() if param_set.rank_group is None else sharded_state(param_set)
            pairs = list(zip(param_set.parameters, states, strict=True))
            found.update({parameter: host_state(optimizer.state[parameter]) for parameter, _ in pairs})
            keys = [(parameter, key) for parameter, own in pairs for key in sorted(own)]  # the same order on all ranks
            full = full_tensors([own[key] for _, own in pairs for key in sorted(own)])
            for (parameter, key), value in zip(keys, full, strict=True):
                found[parameter].update({key: value.detach().to("cpu", copy=True)} if here else {})
    ordered = enumerate(optimizer.param_sets.parameters)
    state = {index: found[parameter] for index, parameter in ordered if parameter in found}
    optimizer.param_sets.consolidated = {"state": state} if here else ShardedStateDict(state={})


def _state_hook(optimizer: ComposedOptimizer, state_dict: dict[str, Any]) -> dict[str, Any] | None:
    """Write sharded or consolidated state, and names of parameters without prefixes of wrappers, into a state dict.

    torch calls this hook after it has made the state dict. If the hook returns a state dict, torch uses it in place of
    its own; None: torch's own state dict is used.
    """
    for saved, group in zip(state_dict["param_groups"], optimizer.param_sets.groups, strict=True):
        if "param_names" in saved:
            # A parameter without a name keeps the name that a loaded checkpoint has for it.
            given = zip(group.infos, saved["param_names"], strict=True)
            saved["param_names"] = [info.name or name for info, name in given]
    if (consolidated := optimizer.param_sets.consolidated) is not None:
        return type(consolidated)({**state_dict, **consolidated})
    with _all_ranks("state_dict"):
        _synchronize(_rank_groups(optimizer), "state_dict")
        return shard_hook(optimizer, state_dict)


def _rank_groups(optimizer: ComposedOptimizer) -> list[RankGroup]:
    """Return the groups of ranks that share parameters of the optimizer, each group once."""
    found = (param_set.rank_group for param_set in optimizer.param_sets)
    return list(dict.fromkeys(rank_group for rank_group in found if rank_group is not None))


def _synchronize(rank_groups: list[RankGroup], what: str) -> None:
    """Wait until all ranks have called a method, before it gathers state. If a rank does not call it, raise an error.

    rank_groups: groups of ranks to wait for.
    what: name of the method, for the error.
    """
    for rank_group in rank_groups:
        rank_group.all_ranks.synchronize(what, GATHER_FIRST)


@contextmanager
def _all_ranks(what: str) -> Iterator[None]:
    """If a collective fails in this context, raise an error that says that all ranks must call the method `what`."""
    try:
        yield
    except DistributedError as error:
        remedy = "" if GATHER_FIRST in str(error) else f"; {GATHER_FIRST}"
        raise DistributedError(f"{what}: all ranks must call {what}{remedy}. This rank's error: {error}") from error


class ConsolidateOnSave:
    """A callback for Hugging Face's Trainer that gathers the state before Trainer saves.

    Use it as `Trainer(callbacks=[ConsolidateOnSave()])`. Under DDP, Trainer calls `state_dict` on one rank alone, so
    the callback calls `consolidate_state_dict` on all ranks first.
    """

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Gather the state after a step if Trainer saves then."""
        _consolidate(args, control.should_save, others)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Gather the state after an epoch if Trainer saves then."""
        _consolidate(args, control.should_save, others)

    def on_evaluate(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Gather the state after an evaluation if Trainer saves best models.

        Trainer decides only after this event whether the model is the best, so every evaluation gathers the state.
        """
        _consolidate(args, getattr(args, "save_strategy", None) == "best", others)

    def __getattr__(self, name: str) -> Callable[..., None]:
        if not name.startswith("on_"):
            raise AttributeError(name)
        return lambda *_, **__: None


def _consolidate(args: Any, saves: bool, others: dict[str, Any]) -> None:
    """Gather the state of an event's optimizer on rank 0. Wrappers of the optimizer (accelerate) are removed first.

    saves: True if Trainer saves after this event; otherwise nothing is gathered.
    others: keyword arguments of the event, among them the optimizer as "optimizer".
    """
    optimizer = others.get("optimizer")
    while optimizer is not None and not hasattr(optimizer, "consolidate_state_dict"):
        optimizer = getattr(optimizer, "optimizer", None)
    if saves and optimizer is not None and not getattr(args, "save_only_model", False):
        optimizer.consolidate_state_dict(to=0)
