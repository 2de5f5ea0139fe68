"""Checkpoints of distributed optimizers: `save` after half of a trajectory, `load` and go on, on any ranks."""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor

import eigengraft
from eigengraft import Optimizer, load_recipe
from eigengraft.distributed.rank_group import RankGroup
from eigengraft.numerics import local

from .models import divided, lay_out
from .trajectories import STEPS, build, give, values

HALF = STEPS // 2


def start(place: str, recipe: str, overrides: list[str]) -> tuple[nn.Module, Optimizer]:
    module = lay_out(build(), place)
    return module, eigengraft.compose(load_recipe(recipe, overrides), module)


def go_on(module: nn.Module, optimizer: Optimizer, first: int, end: int) -> None:
    for step in range(first, end):
        give(module, step, gaps=False)
        optimizer.step()


def state_of(module: nn.Module, optimizer: Optimizer, kind: str) -> tuple[dict[str, Any], StateDictOptions]:
    options = StateDictOptions(flatten_optimizer_state_dict=kind == "flat", full_state_dict=kind == "full")
    return {
        "model": get_model_state_dict(module, options=options),
        "optimizer": get_optimizer_state_dict(module, optimizer, options=options),
    }, options


def save(job: dict[str, Any]) -> dict[str, Any]:
    """job: {case: {folder, kinds, place, recipe, overrides}}. Files of these kinds; whether reading moved a parameter,
    and the number of full tensors and of the messages in which they were gathered."""
    found, group = {}, dist.new_group(backend="gloo")  # asynchronous saves must not share a group with training
    for name, case in job.items():
        folder, kinds = Path(case.pop("folder")), case.pop("kinds")
        module, optimizer = start(**case)
        go_on(module, optimizer, 0, HALF)
        before = values(module)
        if "tree" in kinds:
            dcp.save(state_of(module, optimizer, "tree")[0], checkpoint_id=folder / "tree")
        with counted() as messages:
            whole = {"optimizer": optimizer.full_state_dict(), "parameters": before}
        full = state_of(module, optimizer, "full")[0] if "full" in kinds else None
        if dist.get_rank() == 0:
            torch.save(whole, folder / "whole.pt")
            torch.save(full, folder / "full.pt")
        try:
            torch.save(optimizer.state_dict(), folder / f"refused-{dist.get_rank()}.pt")
            refused = ""
        except RuntimeError as error:
            refused = str(error)
        after = values(module)
        saved = None
        if "flat" in kinds:
            state = state_of(module, optimizer, "flat")[0]
            saved = dcp.async_save(state, checkpoint_id=folder / "flat", process_group=group)
        said = consolidate(optimizer, whole["optimizer"])
        go_on(module, optimizer, HALF, STEPS)
        if saved is not None:
            saved.result()
        found[name] = {
            "consolidated": said,
            "refused": refused,
            "moved": [n for n in before if not torch.equal(before[n], after[n])],
            "tensors": sum(len(own) for own in whole["optimizer"]["state"].values()),
            "messages": len(messages),
        }
    return found


@contextmanager
def counted() -> Iterator[list[str]]:
    """Return a list that grows by one name for each message about full tensors that is sent in this context."""
    messages: list[str] = []

    def noted(name: str, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            messages.append(name)
            return function(*args, **kwargs)

        return call

    with (
        patch.object(DTensor, "full_tensor", noted("one tensor", DTensor.full_tensor)),
        patch.object(RankGroup, "all_gather_uneven", noted("many tensors", RankGroup.all_gather_uneven)),
    ):
        yield messages


def consolidate(optimizer: Optimizer, expected: dict[str, Any]) -> str:
    """Consolidates on the last rank, which alone has the state then; what the others are told if they save it."""
    last = dist.get_world_size() - 1
    optimizer.consolidate_state_dict(to=last)
    if dist.get_rank() < last:
        part = optimizer.state_dict()
        try:
            torch.save(part, io.BytesIO())
        except RuntimeError as error:
            return f"{len(part['state'])}: {error}"
        return "saved"
    found = optimizer.state_dict()
    torch.save(found, io.BytesIO())
    keys = [{key: sorted(state) for key, state in some["state"].items()} for some in (found, expected)]
    same = keys[0] == keys[1] and all(
        torch.equal(value, expected["state"][index][key]) and value.device.type == "cpu"
        for index, state in found["state"].items()
        for key, value in state.items()
    )
    return f"whole: {same and found['param_groups'] == expected['param_groups']}"


def load(job: dict[str, Any]) -> dict[str, Any]:
    """job: {name: {folder, kind, place, recipe, overrides}}: the parameters at the end, trained and evaluated."""
    found = {}
    for name, case in job.items():
        folder, kind = Path(case.pop("folder")), case.pop("kind")
        module, optimizer = start(**case)
        if kind == "whole":
            restore(module, optimizer, torch.load(folder / "whole.pt", weights_only=True))
        else:
            state, options = state_of(module, optimizer, kind)
            if kind == "full":
                state = torch.load(folder / "full.pt", weights_only=True)
            else:
                dcp.load(state, checkpoint_id=folder / kind)
            set_model_state_dict(module, state["model"], options=options)
            set_optimizer_state_dict(module, optimizer, state["optimizer"], options=options)
        go_on(module, optimizer, HALF, STEPS)
        found[name] = {"parameters": values(module)}
        optimizer.eval()
        found[name]["final"] = values(module)
    return found


def restore(module: nn.Module, optimizer: Optimizer, saved: dict[str, Any]) -> None:
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(divided(saved["parameters"][name], parameter))
    optimizer.load_state_dict(saved["optimizer"])


def spoil(job: dict[str, Any]) -> dict[str, str]:
    """job: {place, recipe, overrides, folder}: what loading says if keys are missing or foreign, everywhere or on one
    rank; afterwards the optimizer still works."""
    folder, said = Path(job.pop("folder")), {}
    module, optimizer = start(**job)
    for name, ranks in (("missing", (0, 1)), ("foreign", (0, 1)), ("missing on one", (1,))):
        saved = torch.load(folder / "whole.pt", weights_only=True)["optimizer"]
        if dist.get_rank() in ranks:
            state = saved["state"][0]
            key = next(key for key in state if key != "step")
            value = state.pop(key)
            if name == "foreign":
                state[key] = value
                state["0/nobody/knows"] = value
        try:
            optimizer.load_state_dict(saved)
            said[name] = "loaded"
        except ValueError as error:
            said[name] = str(error)
    saved = torch.load(folder / "whole.pt", weights_only=True)["optimizer"]
    if dist.get_rank() == 1:
        del saved["state"][0]
    try:
        optimizer.load_state_dict(saved)
    except ValueError as error:
        said["absent on one"] = str(error)
    go_on(module, optimizer, 0, 2)
    return said


def host(job: dict[str, Any]) -> dict[str, str]:
    """job: {case: {place, recipe, overrides}}. What a host does with state, on all ranks; the first that fails."""
    return {name: _host(case) for name, case in job.items()}


def _host(case: dict[str, Any]) -> str:
    (module, optimizer), (other, plain) = start(**case), start(**case)
    for step in range(HALF):
        go_on(module, optimizer, step, step + 1)
        go_on(other, plain, step, step + 1)
        for own in optimizer.state.values():
            for key, value in list(own.items()):
                own[key] = value.clone()
    if not _alike((module, optimizer), (other, plain)):
        return "moved away and back"
    first = next(iter(optimizer.state))
    optimizer.state[first]["mine"] = torch.ones(2)
    kept = [own["mine"] for own in optimizer.full_state_dict()["state"].values() if "mine" in own]
    if len(kept) != 1 or not bool(kept[0].all()):
        return "entries of hosts"
    del optimizer.state[first]["mine"]
    for own in optimizer.state.values():
        for key, value in list(own.items()):
            own[key] = torch.zeros_like(value)
    fresh = eigengraft.compose(load_recipe(case["recipe"], case["overrides"]), other)
    go_on(module, optimizer, HALF, STEPS)
    go_on(other, fresh, HALF, STEPS)
    if not _alike((module, optimizer), (other, fresh)):
        return "reset"
    saved = plain.state_dict()
    lacking = saved["state"].pop(0, None)
    with warnings.catch_warnings(record=True) as words:
        warnings.simplefilter("always")
        fresh.load_state_dict(dict(saved))
    steps = [int(own["step"]) for own in fresh.full_state_dict()["state"].values()]
    if lacking is None or steps[0] or set(steps[1:]) != {HALF} or "no state of" not in str(words[-1].message):
        return f"saved without one: {steps}"
    optimizer.state.clear()
    again = eigengraft.compose(load_recipe(case["recipe"], case["overrides"]), other)
    go_on(module, optimizer, 0, HALF)
    go_on(other, again, 0, HALF)
    if not _alike((module, optimizer), (other, again)):
        return "emptied"
    optimizer.state[next(iter(optimizer.state))]["step"] = torch.zeros(3)
    try:
        optimizer.step()
    except ValueError as error:
        return "" if "'step'" in str(error) else str(error)
    return "not refused"


def _alike(one: tuple[nn.Module, Optimizer], two: tuple[nn.Module, Optimizer]) -> bool:
    """Return True if parameters and checkpoints have the same bits on all ranks. Each rank compares its own part."""
    states = [optimizer.state_dict()["state"] for _, optimizer in (one, two)]
    tensors = [
        [*module.parameters(), *(state[i][key] for i in sorted(state) for key in sorted(state[i]))]
        for (module, _), state in zip((one, two), states, strict=True)
    ]
    own = [[local(x.detach()) for x in some] for some in tensors]
    same = torch.tensor(int(len(own[0]) == len(own[1]) and all(map(torch.equal, *own))))
    dist.all_reduce(same, dist.ReduceOp.MIN)
    return bool(same)
