"""The models of the tests of distribution, and how their parameters are laid out over ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from eigengraft import load_recipe
from eigengraft.optimizers.planning.shard_placement import whole_block_shards

TOKENS, LENGTH = 37, 9


class Model(nn.Module):
    """A transformer block of odd sizes, with a convolution, a 1-d parameter, a tied head and frozen parameters."""

    def __init__(self, width: int = 10, hidden: int = 13) -> None:
        super().__init__()
        self.emb = nn.Embedding(TOKENS, width)
        self.conv = nn.Conv1d(width, width, 3, padding=1)
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)
        self.scale = nn.Parameter(torch.ones(width))
        self.frozen = nn.Linear(width, width)
        self.head = nn.Linear(width, TOKENS, bias=False)
        self.head.weight = self.emb.weight
        self.frozen.requires_grad_(False)

    def parameter_pairs(self) -> list[tuple[str, str]]:
        return [("down.weight", "up.weight")]

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.emb(tokens)
        x = x + self.conv(x.transpose(1, 2)).transpose(1, 2)
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, dim=-1))
        x = x + self.out(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        x = x + self.down(torch.relu(self.up(x))) * self.scale
        logits: Tensor = self.head(self.frozen(x))
        return logits


def model(width: int = 10, hidden: int = 13, dtype: torch.dtype = torch.float32) -> Model:
    """The same on every rank."""
    torch.manual_seed(0)
    return Model(width, hidden).to(dtype)


def lay_out(module: nn.Module, place: str) -> nn.Module:
    """plain: as it is. fsdp, hsdp: fully_shard on a mesh of all ranks, or of 2 x the rest.

    mixed: DTensors on a mesh of 2 x the rest, with another pair of placements for each parameter in turn.
    strided: rows divided by 2 ranks as for tensor parallelism, what is left by fully_shard over the rest.
    whole: fully_shard along the axes that leave blocks of 8 x 8 whole.
    """
    if place == "plain":
        return module
    mesh = _mesh(place)
    if place in ("fsdp", "hsdp"):
        fully_shard(module, mesh=mesh)
    elif place == "whole":
        recipe = load_recipe("soap", ["blocking.size=8", "blocking.merge=8"])
        fully_shard(module, mesh=mesh, shard_placement_fn=whole_block_shards(recipe, module, dist.get_world_size()))
    elif place == "mixed":
        turns = [(Shard(0), Shard(1)), (Shard(1), Replicate()), (Replicate(), Shard(0)), (Shard(0), Shard(0))]
        _distribute(module, mesh, turns)
    else:
        _distribute(module, mesh["rows"], [(Shard(0),)])
        fully_shard(module, mesh=mesh["data"])
    return module


@cache
def _mesh(place: str) -> DeviceMesh:
    """The mesh of a place; process groups are made once."""
    ranks = dist.get_world_size()
    meshes: dict[str, tuple[tuple[int, ...], tuple[str, ...]]] = {
        "fsdp": ((ranks,), ("shard",)),
        "whole": ((ranks,), ("shard",)),
        "hsdp": ((2, ranks // 2), ("copy", "shard")),
        "mixed": ((2, ranks // 2), ("outer", "inner")),
        "strided": ((ranks // 2, 2), ("data", "rows")),
    }
    if place not in meshes:
        raise ValueError(f"place: plain, {', '.join(meshes)} are known, got {place}")
    shape, names = meshes[place]
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def _distribute(module: nn.Module, mesh: DeviceMesh, turns: Sequence[Sequence[Placement]]) -> None:
    """Makes the parameters DTensors, with the placements of each turn; tied ones stay tied."""
    homes: dict[int, list[tuple[nn.Module, str]]] = {}
    for owner in module.modules():
        for leaf, parameter in owner.named_parameters(recurse=False):
            homes.setdefault(id(parameter), []).append((owner, leaf))
    for turn, parameter in enumerate(list(module.parameters())):
        wanted = turns[turn % len(turns)]
        fits = [p if getattr(p, "dim", 0) < parameter.ndim else Replicate() for p in wanted]
        laid = nn.Parameter(distribute_tensor(parameter.detach(), mesh, fits), parameter.requires_grad)
        for owner, leaf in homes[id(parameter)]:
            setattr(owner, leaf, laid)


def whole(x: Tensor) -> Tensor:
    """A copy of a tensor, gathered if it is divided."""
    return wholes([x])[0]


def wholes(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Copies of tensors, gathered where they are divided: by the parts as they are, not by what DTensor makes of
    them."""
    found = [x.detach() for x in tensors]
    divided = {place: x for place, x in enumerate(found) if isinstance(x, DTensor)}
    parts: list[dict[int, Tensor]] = [{}] * dist.get_world_size() if divided else []
    if divided:  # in one message
        dist.all_gather_object(parts, {place: x.to_local() for place, x in divided.items()})
    return [
        _joined(divided[place], [own[place] for own in parts]) if place in divided else x.clone()
        for place, x in enumerate(found)
    ]


def _joined(x: DTensor, parts: Sequence[Tensor]) -> Tensor:
    full = parts[0].new_full(x.shape, torch.nan)
    for part, box in zip(parts, _boxes(x) if _strided(x) else _held(x), strict=True):
        full[box] = part
    assert not full.isnan().any() or any(bool(part.isnan().any()) for part in parts)
    return full


def divided(x: Tensor, like: Tensor) -> Tensor:
    """A tensor that every rank has, laid out as another one; nobody is asked."""
    if not isinstance(like, DTensor):
        return x.clone()
    if not _strided(like):
        return distribute_tensor(x, like.device_mesh, like.placements, src_data_rank=None)
    local = x[_boxes(like)[dist.get_rank()]].clone()
    return DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=x.shape, stride=x.stride()
    )


def _strided(x: DTensor) -> bool:
    """Whether torch may not know which rank has what: it does not, where strided shards are uneven."""
    return any(isinstance(placement, _StridedShard) for placement in x.placements)


def _held(x: DTensor) -> list[tuple[slice, ...]]:
    """What every rank has, by torch.chunk along each axis of the mesh in turn."""
    ranks = torch.arange(x.device_mesh.size()).reshape(tuple(x.device_mesh.shape))
    found = []
    for rank in range(ranks.numel()):
        coordinate = torch.nonzero(ranks == rank)[0].tolist()
        spans = [torch.arange(length) for length in x.shape]
        for placement, count, own in zip(x.placements, x.device_mesh.shape, coordinate, strict=True):
            if isinstance(placement, Shard):
                span = spans[placement.dim]
                spans[placement.dim] = dict(enumerate(span.chunk(count))).get(own, span[:0])
        found.append(tuple(slice(int(s[0]), int(s[-1]) + 1) if len(s) else slice(0, 0) for s in spans))
    return found


def _boxes(x: DTensor) -> list[tuple[slice, ...]]:
    """What `fully_shard` leaves on every rank of a mesh [data, rows]: rows are divided first."""
    data, rows = x.device_mesh.shape
    found: list[tuple[slice, ...]] = []
    for rank in range(data * rows):
        ids = torch.arange(len(x))
        for ranks, own in ((rows, rank % rows), (data, rank // rows)):
            ids = dict(enumerate(ids.chunk(ranks))).get(own, ids[:0])
        found.append((slice(int(ids[0]), int(ids[-1]) + 1) if len(ids) else slice(0, 0),))
    return found
