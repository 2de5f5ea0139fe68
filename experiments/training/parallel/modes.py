"""How a model is trained by several processes: the family `parallel` and its members."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist
from pydantic import Field
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from eigengraft.component import Component, RecipeError

from .ranks import Ranks


class Parallel(Component, family="parallel"):
    """Who holds the parameters. Each rank computes the gradient of its rows of the batch; a step uses their mean."""

    @abstractmethod
    def spread(self, model: nn.Module, ranks: Ranks) -> nn.Module:
        """The module to call in training. `model`, whose parameters keep their names, is the one to evaluate."""


class Alone(Parallel):
    """One process."""

    kind: Literal["none"] = "none"

    def spread(self, model: nn.Module, ranks: Ranks) -> nn.Module:
        return model


class Together(Parallel):
    """The processes that torchrun has started."""

    timeout: float = Field(default=600, gt=0, description="seconds after which a rank that does not answer is given up")


class DDP(Together):
    """Every rank holds all parameters (torch's DistributedDataParallel)."""

    kind: Literal["ddp"] = "ddp"

    def spread(self, model: nn.Module, ranks: Ranks) -> nn.Module:
        devices = [ranks.device] if ranks.device.type == "cuda" else None
        return DistributedDataParallel(model, device_ids=devices, gradient_as_bucket_view=True)


class FSDP2(Together):
    """Every rank holds a part of each parameter (torch's `fully_shard`)."""

    kind: Literal["fsdp2"] = "fsdp2"

    def spread(self, model: nn.Module, ranks: Ranks) -> nn.Module:
        return _sharded(model, init_device_mesh(ranks.device.type, (ranks.size,)))


class HSDP(Together):
    """The ranks form groups; each group holds all parameters, each rank of it a part (`fully_shard` on two axes)."""

    kind: Literal["hsdp"] = "hsdp"
    replicas: int | None = Field(default=None, ge=1, description="number of groups; none: one for each machine")

    def spread(self, model: nn.Module, ranks: Ranks) -> nn.Module:
        groups = self.replicas or -(-ranks.size // ranks.here)
        if ranks.size % groups:
            raise RecipeError(f"parallel.replicas: a divisor of the {ranks.size} ranks is required, got {groups}")
        return _sharded(model, _grid(ranks, groups, self.timeout))


def drop_gathered(model: nn.Module) -> None:
    """Make a sharded model gather its parameters anew for the next forward pass.

    After one without a backward pass `fully_shard` keeps what the outermost module has gathered, and would train with
    it although the parameters have been given other values since.
    """
    reshard = getattr(model, "reshard", None)
    if callable(reshard):
        reshard()


def _sharded(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Sharded in place: each layer of a stack of layers on its own, then the rest."""
    from torch.distributed.fsdp import fully_shard  # half a second that only these runs spend

    for layer in _layers(model):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def _grid(ranks: Ranks, groups: int, timeout: float) -> DeviceMesh:
    """Rank r is number r % n of group r // n, n to a group. Made by hand, because torch's has a time-out of its own."""
    grid = torch.arange(ranks.size).view(groups, -1)
    span = timedelta(seconds=timeout)
    both = [rows.tolist() for rows in (grid.T, grid)]
    axes = [dist.new_subgroups_by_enumeration(rows, timeout=span)[0] for rows in both]  # type: ignore[no-untyped-call]
    return DeviceMesh.from_group(axes, ranks.device.type, mesh=grid, mesh_dim_names=("replicate", "shard"))


def _layers(model: nn.Module) -> Iterator[nn.Module]:
    """The members of the outermost lists of modules inside `model` that have parameters."""
    for child in model.children():
        if not isinstance(child, (nn.Sequential, nn.ModuleList)):
            yield from _layers(child)
            continue
        for layer in child:
            if any(True for _ in layer.parameters()):
                yield layer
