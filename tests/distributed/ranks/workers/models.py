"""The models of the tests of distribution, and how their parameters are laid out over ranks."""

from __future__ import annotations

import itertools
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
from eigengraft.optimizers.plan.shard_placement import whole_block_shards

TOKENS, LENGTH = 37, 9


class Model(nn.Module):
    """A transformer block of odd sizes, with a convolution, a 1-d parameter, a tied head and frozen parameters."""

    def __init__(self, width: int = 10, hidden: int = 16) -> None:
        super().__init__()
        self.emb = nn.Embedding(TOKENS, width)
        self.conv = nn.Conv1d(width // 2, width, 3, padding=1)
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
        x = x + self.conv(x.transpose(1, 2)[:, x.shape[-1] // 2 :]).transpose(1, 2)
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, dim=-1))
        x = x + self.out(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        x = x + self.down(torch.relu(self.up(x))) * self.scale
        logits: Tensor = self.head(self.frozen(x))
        return logits


def model(width: int = 10, hidden: int = 16, dtype: torch.dtype = torch.float32) -> Model:
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
        recipe = load_recipe("soap_fitted", ["blocking.size=8", "blocking.merge=8"])
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
    cut = [x for x in found if isinstance(x, DTensor)]
    flat: list[Tensor] = [torch.empty(0)] * dist.get_world_size() if cut else []
    if cut:  # in one message of one tensor: to pickle many takes longer than a step
        dist.all_gather_object(flat, torch.cat([x.to_local().flatten() for x in cut]))
    held = [_boxes(x) if _strided(x) else _held(x) for x in cut]
    sizes = [[_shape(box, x).numel() for box, x in zip(own, cut, strict=True)] for own in zip(*held, strict=True)]
    parts = [everything.split(own) for everything, own in zip(flat, sizes, strict=True)]
    joined = map(_joined, cut, held, zip(*parts, strict=True))
    return [next(joined) if isinstance(x, DTensor) else x.clone() for x in found]


def _joined(x: DTensor, boxes: Sequence[tuple[slice, ...]], parts: Sequence[Tensor]) -> Tensor:
    full = torch.full(x.shape, torch.nan, dtype=x.dtype)
    for part, box in zip(parts, boxes, strict=True):
        full[box] = part.view(_shape(box, x))
    assert not full.isnan().any() or any(bool(part.isnan().any()) for part in parts)
    return full


def _shape(box: tuple[slice, ...], x: Tensor) -> torch.Size:
    """Of the part of a tensor in a box, which may leave out the last axes."""
    return torch.Size([*(span.stop - span.start for span in box), *x.shape[len(box) :]])


def divided(x: Tensor, like: Tensor) -> Tensor:
    """A tensor that every rank has, laid out as another one; nobody is asked."""
    if not isinstance(like, DTensor):
        return x.clone()
    local = x[(_boxes(like) if _strided(like) else _held(like))[dist.get_rank()]].clone()
    return DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=x.shape, stride=x.stride()
    )


def _strided(x: DTensor) -> bool:
    """Whether torch may not know which rank has what: it does not, where strided shards are uneven."""
    return any(isinstance(placement, _StridedShard) for placement in x.placements)


def _held(x: DTensor) -> list[tuple[slice, ...]]:
    """What every rank has, by torch.chunk along each axis of the mesh in turn."""
    return _chunks(x.shape, tuple(x.placements), tuple(x.device_mesh.shape))


@cache
def _chunks(shape: torch.Size, placements: tuple[Placement, ...], mesh: tuple[int, ...]) -> list[tuple[slice, ...]]:
    found = []
    for coordinate in itertools.product(*map(range, mesh)):
        spans = [torch.arange(length) for length in shape]
        for placement, count, own in zip(placements, mesh, coordinate, strict=True):
            if isinstance(placement, Shard):
                span = spans[placement.dim]
                spans[placement.dim] = dict(enumerate(span.chunk(count))).get(own, span[:0])
        found.append(tuple(slice(int(s[0]), int(s[-1]) + 1) if len(s) else slice(0, 0) for s in spans))
    return found


def _boxes(x: DTensor) -> list[tuple[slice, ...]]:
    """What `fully_shard` leaves on every rank of a mesh [data, rows]: rows are divided first."""
    data, rows = x.device_mesh.shape
    return _rows(len(x), data, rows)


@cache
def _rows(length: int, data: int, rows: int) -> list[tuple[slice, ...]]:
    found: list[tuple[slice, ...]] = []
    for rank in range(data * rows):
        ids = torch.arange(length)
        for ranks, own in ((rows, rank % rows), (data, rank // rows)):
            ids = dict(enumerate(ids.chunk(ranks))).get(own, ids[:0])
        found.append((slice(int(ids[0]), int(ids[-1]) + 1) if len(ids) else slice(0, 0),))
    return found
