"""MuonClip where attention is divided over ranks: the heads that are clipped, by case."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, parallelize_module

import eigengraft

from .models import whole

WIDTH, HEADS, HEAD = 16, 4, 3
CLIP: dict[str, Any] = {"update": "sign", "routes": [], "constraints": {"kind": "qk_clip", "bound": 1.0}}


class Attention(nn.Module):
    """Four heads of queries, and fewer of keys that they share, in three layers or in one.

    ranks: on how many ranks the rows of the one layer will be divided: each has its queries, keys and values.
    """

    def __init__(self, keys: int, ranks: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(7)
        weights = [torch.randn(n * HEAD, WIDTH, generator=generator) for n in (HEADS, keys, keys)]
        weights[0][HEAD : 2 * HEAD] *= 5
        weights[0][3 * HEAD :] *= 3
        self.keys, self.fused = keys, ranks > 0
        self.seen: Callable[[Tensor], Tensor] | None = None
        if self.fused:
            parts = zip(*(weight.chunk(ranks) for weight in weights), strict=True)
            self.qkv = nn.Linear(WIDTH, (HEADS + 2 * keys) * HEAD, bias=False)
            self.qkv.weight.data = torch.cat([row for own in parts for row in own])
            self.max_logits = eigengraft.MaxLogits(fused="qkv.weight", causal=True)
        else:
            self.wq, self.wk, self.wv = (nn.Linear(WIDTH, len(weight), bias=False) for weight in weights)
            for layer, weight in zip((self.wq, self.wk, self.wv), weights, strict=True):
                layer.weight.data = weight
            self.max_logits = eigengraft.MaxLogits("wq.weight", "wk.weight", causal=True)

    def forward(self, x: Tensor) -> Tensor:
        if self.fused:
            heads = self.qkv(x).unflatten(-1, (-1, HEAD)).transpose(1, 2)
            own, total = heads.shape[1], HEADS + 2 * self.keys
            q, k, v = heads.split([n * own // total for n in (HEADS, self.keys, self.keys)], 1)
        else:
            q, k, v = (layer(x).unflatten(-1, (-1, HEAD)).transpose(1, 2) for layer in (self.wq, self.wk, self.wv))
        if k.shape[1] == self.keys and q.shape[1] < HEADS:  # every rank has all keys
            first = dist.get_rank() * q.shape[1] * self.keys // HEADS
            k, v = (y[:, first : first + max(q.shape[1] * self.keys // HEADS, 1)] for y in (k, v))
        shown = (q, k) if self.seen is None else (self.seen(q), self.seen(k))
        self.max_logits(*shown)
        q, k, v = (y.to_local() if hasattr(y, "to_local") else y for y in (q, k, v))
        k, v = (y.repeat_interleave(q.shape[1] // y.shape[1], 1) for y in (k, v))
        result: Tensor = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        for y in shown if self.seen is not None else ():
            result = result + 0.0 * y.to_local().sum()  # logits count where a gradient is taken through them
        return result


def run(job: dict[str, dict[str, Any]]) -> dict[str, list[list[float]] | str]:
    """job: {case: what `factors` takes}. What it finds, or the error that it ends with."""
    found: dict[str, list[list[float]] | str] = {}
    for name, case in job.items():
        try:
            found[name] = factors(**case)
        except ValueError as error:
            found[name] = str(error)
    return found


def factors(keys: int, place: str = "whole", fused: int = 0) -> list[list[float]]:
    """By what each head of queries and each of keys was multiplied in a step at lr 0.

    keys: heads of keys. fused: ranks that have rows of one layer; 0: there are three layers. place: see `_lay_out`.
    """
    module = nn.ModuleDict({"attention": Attention(keys, fused)})
    before = [parameter.detach().clone() for parameter in module.parameters()]
    x = torch.randn(4, 6, WIDTH, generator=torch.Generator().manual_seed(1))
    if dist.is_initialized():
        x = _lay_out(module, place, x, fused)
    optimizer = eigengraft.compose(CLIP, module, lr=0.0, weight_decay=0.0)
    attention = module["attention"]
    for half in x.chunk(2) if place == "whole" else [x]:
        attention(half).square().sum().backward()
    for parameter in module.parameters() if place == "some" else []:
        if type(parameter.grad) is Tensor:  # of the heads of this rank
            dist.all_reduce(parameter.grad)
    optimizer.step()
    after = [whole(parameter) for parameter in module.parameters()]
    ratios = [
        (w.view(-1, HEAD * WIDTH).norm(dim=1) / old.view(-1, HEAD * WIDTH).norm(dim=1))
        for w, old in zip(after, before, strict=True)
    ]
    if fused:
        parts = [own.tensor_split([HEADS // fused, (HEADS + keys) // fused]) for own in ratios[0].chunk(fused)]
        ratios = [torch.cat(part) for part in zip(*parts, strict=True)]
    return [ratio.tolist() for ratio in ratios]


def _lay_out(module: nn.ModuleDict, place: str, x: Tensor, fused: int) -> Tensor:
    """Divides attention over ranks as people do; the part of the batch that this rank sees.

    tp: heads over all ranks; some: of queries alone, every rank has all keys; gathered: layers whose outputs are
    gathered; dtensor: layers that return DTensors; sequence: from shards of the sequence; data, linear: two ranks for
    heads and two that see half of the batch each, by `fully_shard` of the whole or of every layer. Others that cannot
    be known: positions: shards of the sequence as DTensors; cut: heads as DTensors of a layer that every rank has.
    """
    ranks, style = dist.get_world_size(), ColwiseParallel()
    mesh = (
        init_device_mesh("cpu", (ranks,))
        if place not in ("data", "linear")
        else init_device_mesh("cpu", (ranks // 2, 2), mesh_dim_names=("data", "heads"))
    )
    if place == "gathered":
        style = ColwiseParallel(output_layouts=Replicate())
    elif place in ("positions", "cut"):
        axis = {"positions": 2, "cut": 1}[place]
        module["attention"].seen = lambda y: DTensor.from_local(
            y.chunk(ranks, axis)[dist.get_rank()], mesh, [Shard(axis)]
        )
        return x
    elif place == "dtensor":
        style = ColwiseParallel(use_local_output=False)
    layers = ["qkv"] if fused else ["wq"] if place == "some" else ["wq", "wk", "wv"]
    heads = mesh["heads"] if mesh.ndim == 2 else mesh
    parallelize_module(module["attention"], heads, dict.fromkeys(layers, style))
    if place == "sequence":
        parallelize_module(
            module["attention"], heads, PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
        )
        return x.chunk(ranks, 1)[dist.get_rank()]
    if mesh.ndim == 2:
        for layer in layers if place == "linear" else []:
            fully_shard(getattr(module["attention"], layer), mesh=mesh["data"])
        fully_shard(module["attention"], mesh=mesh["data"])
        return x.chunk(ranks // 2)[mesh.get_local_rank("data")]
    return x
