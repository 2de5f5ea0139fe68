"""Ways to train one model on several processes: the family `parallel` and its members."""

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

from eigengraft.component import Component
from eigengraft.errors import RecipeError

from .ranks import Ranks


class Parallelism(Component, family="parallel"):
    """A placement of parameters; each rank computes the gradient of its rows of the batch, a step uses the mean."""

    @abstractmethod
    def wrap(self, model: nn.Module, ranks: Ranks) -> nn.Module:
        """The module to call in training; parameters of `model` keep their names, and `model` is evaluated."""


class SingleProcess(Parallelism):
    """One process."""

    kind: Literal["none"] = "none"

    def wrap(self, model: nn.Module, ranks: Ranks) -> nn.Module:
        return model


class MultiProcess(Parallelism):
    """Several processes, started by torchrun."""

    timeout: float = Field(default=600, gt=0, description="seconds to wait for a rank before the run fails")


class DDP(MultiProcess):
    """Every rank holds all parameters (torch's DistributedDataParallel)."""

    kind: Literal["ddp"] = "ddp"

    def wrap(self, model: nn.Module, ranks: Ranks) -> nn.Module:
        devices = [ranks.device] if ranks.device.type == "cuda" else None
        return DistributedDataParallel(model, device_ids=devices, gradient_as_bucket_view=True)


class FSDP2(MultiProcess):
    """Every rank holds a shard of each parameter (torch's `fully_shard`)."""

    kind: Literal["fsdp2"] = "fsdp2"

    def wrap(self, model: nn.Module, ranks: Ranks) -> nn.Module:
        return _sharded(model, init_device_mesh(ranks.device.type, (ranks.size,)))


class HSDP(MultiProcess):
    """Every group of ranks holds all parameters, each rank a shard of each (`fully_shard` on a mesh of two axes)."""

    kind: Literal["hsdp"] = "hsdp"
    replicas: int | None = Field(default=None, ge=1, description="number of groups; none: one per machine")

    def wrap(self, model: nn.Module, ranks: Ranks) -> nn.Module:
        groups = self.replicas or -(-ranks.size // ranks.local_size)
        if ranks.size % groups:
            raise RecipeError(f"parallel.replicas: a divisor of the {ranks.size} ranks is required, got {groups}")
        return _sharded(model, _grid(ranks, groups, self.timeout))


def reshard_model(model: nn.Module) -> None:
    """Make a sharded model gather its parameters again for the next forward pass.

    After a forward pass without a backward pass `fully_shard` keeps the gathered parameters of the outermost module,
    and would train with them although the sharded parameters have changed since.
    """
    reshard = getattr(model, "reshard", None)
    if callable(reshard):
        reshard()


def _sharded(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Shard the model in place: each layer of a list of layers by itself, then the rest."""
    from torch.distributed.fsdp import fully_shard  # half a second that only these runs spend

    for layer in _layers(model):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def _grid(ranks: Ranks, groups: int, timeout: float) -> DeviceMesh:
    """A mesh of groups of n ranks: rank r is number r % n of group r // n. torch's own mesh ignores the time-out."""
    grid = torch.arange(ranks.size).reshape(groups, -1)
    span = timedelta(seconds=timeout)
    both = [rows.tolist() for rows in (grid.T, grid)]
    axes = [dist.new_subgroups_by_enumeration(rows, timeout=span)[0] for rows in both]  # type: ignore[no-untyped-call]
    return DeviceMesh.from_group(axes, ranks.device.type, mesh=grid, mesh_dim_names=("replicate", "shard"))


def _layers(model: nn.Module) -> Iterator[nn.Module]:
    """The modules with parameters in the outermost lists of modules of `model`."""
    for child in model.children():
        if not isinstance(child, (nn.Sequential, nn.ModuleList)):
            yield from _layers(child)
            continue
        for layer in child:
            if any(True for _ in layer.parameters()):
                yield layer
