"""Models as people lay them out over ranks, with torch's own wrappers: data, tensor, pipeline and expert parallel."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache

import torch
import torch._dynamo
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

torch._dynamo.list_backends()  # `torch.compile` imports them all: once here, not in each of the ranks

WRAPPERS = re.compile(r"(^|(?<=\.))(module|_orig_mod|_checkpoint_wrapped_module)\.")


class Experts(nn.Module):
    """Weights of several experts in one parameter, an odd number of them."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 53, 37) / 6)


class Layer(nn.Module):
    """Matrices of odd sides; some of them only if it is a full one."""

    def __init__(self, full: bool) -> None:
        super().__init__()
        self.up = nn.Linear(37, 53, bias=False)
        if full:
            self.wide = nn.Linear(147, 64)
            self.square = nn.Linear(90, 90, bias=False)
        self.norm = nn.LayerNorm(90, bias=False)

    def parameter_views(self) -> dict[str, dict[str, object]]:
        """Interleaved groups of heads, groups without heads, and sections of the inputs of a transposed matrix."""
        views: dict[str, dict[str, object]] = {
            "wide.weight": {"groups": 4, "sections": [8, 4, 4], "heads": [4, 4, 0]},
            "square.weight": {"groups": 5, "sections": [11, 7]},
            "up.weight": {"outputs": "last", "side": "inputs", "sections": [20, 33]},
        }
        return {name: view for name, view in views.items() if hasattr(self, name.partition(".")[0])}


class Stack(nn.Module):
    """Two layers, experts, an embedding, and a head that only its name tells from other matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(41, 20)
        self.layers = nn.ModuleDict({"0": Layer(full=True), "1": Layer(full=False)})
        self.experts = Experts()
        self.output = nn.Linear(20, 43, bias=False)


class Few(nn.Module):
    """A layer of few entries, for tests of what is written of them."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(5, 7)
        self.wide = nn.Linear(6, 4, bias=False)
        self.norm = nn.LayerNorm(3, bias=False)

    def parameter_views(self) -> dict[str, dict[str, object]]:
        """Sections, and heads of a transposed matrix."""
        views: dict[str, dict[str, object]] = {"wide.weight": {"outputs": "last", "heads": 2}}
        return {**views, "up.weight": {"sections": [3, 4]}} if hasattr(self, "up") else views


class Small(nn.Module):
    """Two small layers; of the second a matrix is frozen and another one is not there, since all state is written to
    files many times."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({name: Few() for name in ("0", "1")})
        del self.layers["1"].up
        self.layers["1"].wide.requires_grad_(False)  # type: ignore[operator,union-attr]


def small() -> Small:
    """The same on every rank."""
    torch.manual_seed(0)
    return Small()


def stack() -> Stack:
    """The same on every rank."""
    torch.manual_seed(0)
    return Stack()


def plain_name(name: str) -> str:
    """The name of a parameter in the model as it was before it was wrapped."""
    return WRAPPERS.sub("", name)


# layouts


def ddp(module: Stack | Small) -> nn.Module:
    """Replicas in DistributedDataParallel: "module." before every name."""
    return DistributedDataParallel(module)


def compiled(module: Stack | Small) -> nn.Module:
    """Wrapped in three ways; nothing is compiled, because nothing runs forward."""
    if dist.get_world_size() > 2:
        fully_shard(module, mesh=flat())
        module.layers["0"] = torch.compile(module.layers["0"], backend="eager")
        return module
    module.layers["1"] = checkpoint_wrapper(module.layers["1"])
    whole: nn.Module = torch.compile(DistributedDataParallel(module), backend="eager")
    return whole


def fsdp2(module: Stack | Small) -> nn.Module:
    """Every parameter divided over all ranks."""
    fully_shard(module, mesh=flat())
    return module


def hsdp(module: Stack | Small) -> nn.Module:
    """Two replicas, each divided over half of the ranks."""
    fully_shard(module, mesh=grid("copy", "shard"))
    return module


def tp(module: Stack | Small) -> nn.Module:
    """Layers divided over all ranks by rows or columns, the rest plain replicas."""
    for layer in module.layers.values():
        parallelize_module(layer, flat(), {name: style for name, style in plan().items() if hasattr(layer, name)})
    return module


def tp_fsdp(module: Stack) -> nn.Module:
    """One layer tensor-parallel within pairs of ranks, all else by fully_shard on a mesh of all ranks."""
    parallelize_module(module.layers["0"], grid("data", "tensor")["tensor"], plan())
    for part in (module.emb, module.layers["1"], module.experts, module.output):
        fully_shard(part, mesh=flat())
    return module


def pp_fsdp(module: Stack) -> nn.Module:
    """Half of the ranks have the first layer, the others the second: each stage by fully_shard on its own ranks."""
    mesh = grid("stage", "shard")
    stage = pruned(module, mesh.get_local_rank("stage"))
    fully_shard(stage, mesh=mesh["shard"])
    return stage


def ep(module: Stack) -> nn.Module:
    """Experts divided over pairs of ranks, all else by fully_shard on a mesh of all ranks, or plain on two."""
    mesh = grid("data", "expert")["expert"]
    module.experts.weight = nn.Parameter(distribute_tensor(module.experts.weight.detach(), mesh, [Shard(0)]))
    if dist.get_world_size() > 2:
        for part in (module.emb, *module.layers.values(), module.output):
            fully_shard(part, mesh=flat())
    return module


def replicate(module: Stack) -> nn.Module:
    """DTensors that every rank has whole, whose gradients are sums over the ranks that nobody has taken yet."""
    return distribute_module(module, flat() if dist.get_world_size() == 2 else grid("outer", "inner"))


LAYOUTS: dict[str, Callable[[Stack], nn.Module]] = {
    layout.__name__: layout for layout in (ddp, fsdp2, hsdp, tp, tp_fsdp, pp_fsdp, ep, replicate, compiled)
}


@cache
def flat() -> DeviceMesh:
    """All ranks in a row; process groups are made once."""
    return init_device_mesh("cpu", (dist.get_world_size(),))


@cache
def grid(rows: str, columns: str) -> DeviceMesh:
    """Two rows of ranks, or two columns of those that divide something over pairs."""
    ranks = dist.get_world_size()
    shape = (ranks // 2, 2) if rows == "data" else (2, ranks // 2)
    return init_device_mesh("cpu", shape, mesh_dim_names=(rows, columns))


def plan() -> dict[str, ColwiseParallel | RowwiseParallel | SequenceParallel]:
    """Tensor parallelism of a layer."""
    return {"up": ColwiseParallel(), "wide": RowwiseParallel(), "square": ColwiseParallel(), "norm": SequenceParallel()}


def pruned(module: Stack, stage: int) -> Stack:
    """One of the two stages of a pipeline: what is not in it is gone, and what is keeps its name."""
    del module.layers[str(1 - stage)]
    for name in (("output",), ("emb", "experts"))[stage]:
        delattr(module, name)
    return module


# gradients


@cache
def gradient(name: str, shape: torch.Size, step: int) -> Tensor:
    """The gradient of a parameter: multiples of 2^-8 below 2^8, so that sums of parts are exact in any order."""
    generator = torch.Generator().manual_seed(sum(name.encode()) * 1000 + step)
    return (torch.randn(shape, generator=generator) * 2**8).round_().clamp_(-(2**15), 2**15) / 2**8


def lay_gradient(x: Tensor, like: Tensor, name: str, seed: int) -> Tensor:
    """A gradient that every rank knows, laid out as backward would leave it for the parameter `like`.

    For DTensors that every rank has whole, each rank gets a part of the sum.
    """
    if not isinstance(like, DTensor):
        return x.clone()
    mesh = like.device_mesh
    if not all(placement.is_replicate() for placement in like.placements):
        return distribute_tensor(x, mesh, like.placements, src_data_rank=None)
    ranks, rank = mesh.size(), mesh.mesh.flatten().tolist().index(dist.get_rank())
    parts = [gradient(f"{name} part {part}", x.shape, seed) for part in range(1, ranks)]
    mine = x - sum(parts) if rank == 0 else parts[rank - 1]
    return DTensor.from_local(mine, mesh, [Partial()] * mesh.ndim, run_check=False)
