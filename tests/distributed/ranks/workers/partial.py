"""Gradients that are not laid out as their parameters: partial sums of training, and those that are given."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, SequenceParallel, parallelize_module
from torch.distributed.tensor.placement_types import Placement

import eigengraft
from eigengraft import Optimizer

from .models import whole

STEPS = 5
# fitted second moments enlarge rounding in directions that have had few gradients
EXACT = {"update.eigenbasis.refresh.steps": 2, "update.eigenbasis.transport": "exact", "blocking.size": 6}
OVERRIDES: dict[str, dict[str, Any]] = {"adamw": {}, "soap_fitted": EXACT}
PLACES = ("replicated", "sequence_parallel")


def run(_: Any) -> dict[str, Any]:
    """trained: by place and recipe, distances to one process and to torch's AdamW. given: what `give` returns; refused:
    what is said of gradients that cannot be laid out."""
    mesh = init_device_mesh("cpu", (2,))
    trained = {f"{place} {recipe}": distances(place, recipe, mesh) for place in PLACES for recipe in OVERRIDES}
    return {"trained": trained, "given": give(mesh), "refused": list(refuse(mesh))}


def network() -> nn.Module:
    """The same on every rank, in float64."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 12), nn.LayerNorm(12), nn.Linear(12, 6, bias=False)).double()


def distances(place: str, recipe: str, mesh: DeviceMesh) -> dict[str, float]:
    """How far parameters end from where others do, of the largest entry of each."""
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    one, other, module = network(), network(), network()
    if place == "replicated":
        module, own = distribute_module(module, mesh), distribute_tensor(x, mesh, [Shard(0)])
    else:  # the norm takes another part of the batch on each rank
        sequence = [ColwiseParallel(output_layouts=Shard(0)), SequenceParallel(sequence_dim=0)]
        last = ColwiseParallel(input_layouts=Shard(0), output_layouts=Replicate())
        plan = dict(zip("012", [*sequence, last], strict=True))
        module, own = parallelize_module(module, mesh, plan), x
    alone = {**OVERRIDES[recipe], "distribution.mode": "local"}
    found = train(module, compose(recipe, module, OVERRIDES[recipe]), own)
    ends = {"one": train(one, compose(recipe, one, alone), x)}
    ends["torch"] = train(other, torch.optim.AdamW(other.parameters(), lr=0.01), x)
    pairs = {name: list(zip(found, end, strict=True)) for name, end in ends.items()}
    return {name: max(float((a - b).abs().max() / b.abs().max()) for a, b in own) for name, own in pairs.items()}


def compose(recipe: str, module: nn.Module, overrides: dict[str, Any]) -> Optimizer:
    """All parameters by the recipe's own update, as torch's AdamW takes them."""
    return eigengraft.compose(recipe, module.named_parameters(), lr=0.01, weight_decay=0.01, overrides=overrides)


def train(module: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> list[Tensor]:
    """Whole parameters after a few steps."""
    for _ in range(STEPS):
        optimizer.zero_grad()
        module(x).square().mean().backward()
        optimizer.step()
    return [whole(parameter) for parameter in module.parameters()]


def give(mesh: DeviceMesh) -> dict[str, tuple[bool, bool]]:
    """(whether a step is bit for bit that of a gradient laid out as the parameter, whether the gradient is left as it
    was), by placements of parameter and gradient."""
    value = torch.randn(7, 6, generator=torch.Generator().manual_seed(2))
    mine = value if dist.get_rank() == 0 else torch.zeros_like(value)
    gradients: dict[str, Callable[[], DTensor]] = {
        "Partial(sum)": lambda: DTensor.from_local(mine.clone(), mesh, [Partial()]),
        "Partial(avg)": lambda: DTensor.from_local(value.clone(), mesh, [Partial("avg")]),
        "Replicate": lambda: distribute_tensor(value, mesh, [Replicate()]),
        "Shard(0)": lambda: distribute_tensor(value, mesh, [Shard(0)]),
        "Shard(1)": lambda: distribute_tensor(value, mesh, [Shard(1)]),
    }
    found = {}
    for lies, placement in {"Replicate": Replicate(), "Shard(0)": Shard(0)}.items():
        wanted = stepped(mesh, placement, distribute_tensor(value, mesh, [placement]))
        for name, gradient in gradients.items():
            given = gradient()
            before = given.placements, given.to_local().clone()
            same = torch.equal(stepped(mesh, placement, given), wanted)
            kept = given.placements == before[0] and torch.equal(given.to_local(), before[1])
            found[f"{lies} from {name}"] = same, kept
    return found


def stepped(mesh: DeviceMesh, placement: Placement, gradient: DTensor) -> Tensor:
    """A whole parameter after one step."""
    parameter = nn.Parameter(distribute_tensor(torch.ones(7, 6), mesh, [placement]))
    optimizer = Optimizer([("w", parameter)], "soap_fitted")
    parameter.grad = gradient
    optimizer.step()
    assert parameter.grad is gradient
    return whole(parameter)


def refuse(mesh: DeviceMesh) -> Iterator[str]:
    """What is said of a plain gradient of a DTensor, of one on another mesh, and of a DTensor of a plain parameter."""
    value, other = torch.ones(4, 6), init_device_mesh("cpu", (1, 2))
    sharded = distribute_tensor(value, mesh, [Shard(0)])
    pairs = [(sharded, value), (sharded, distribute_tensor(value, other, [Replicate(), Shard(0)])), (value, sharded)]
    for start, gradient in pairs:
        parameter = nn.Parameter(start.clone())
        optimizer = Optimizer([("w", parameter)], "adamw")
        parameter.grad = gradient
        try:
            optimizer.step()
        except ValueError as error:
            yield str(error)
        assert torch.equal(whole(parameter), value)
