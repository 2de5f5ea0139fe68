"""A plan: what each rank of a divided optimizer owns, holds, computes and sends. No process is started, no tensor made.

The assignment is that of the optimizer, by the same functions; only the parameters have shapes and no values.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Literal, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from eigengraft.distributed.comm_plan import BlockGroup, packed
from eigengraft.distributed.layouts import Layout
from eigengraft.distributed.ownership import Loads
from eigengraft.distributed.rank_group import RankGroup

from ..engine.build import divided, limit
from ..recipe.loading import Source, load_recipe
from ..recipe.recipe import Recipe
from ..recipe.routing import ParamInfo, describe_parameter
from ..sharding.assignment import Assignment, ParamPlacement, assign_owners, entrywise
from .loads import least_work, owned, state_bytes
from .traffic import Traffic, all_reduced, wire

Parallel = Literal["ddp", "fsdp2", "hsdp"]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Plan:
    """Of R ranks; arrays `[R]`. placements: who owns what of each parameter, by name.

    blocks: owned. state: bytes. work: operations of a step (milliseconds if the recipe has measured ones). bound: the
    largest work that no assignment can avoid. traffic: of a step, by what travels: "gradients" to owners, "updates"
    back, and the "agreement" of all on which gradients are usable.
    """

    placements: Mapping[str, ParamPlacement]
    blocks: NDArray[np.int64]
    state: NDArray[np.int64]
    work: Floats
    traffic: Mapping[str, Traffic]
    bound: float

    @property
    def imbalance(self) -> float:
        """Largest work / mean work."""
        return float(self.work.max() / self.work.mean()) if self.work.any() else 1.0

    @property
    def least_imbalance(self) -> float:
        """That of a assignment whose largest work is the bound."""
        return self.bound / float(self.work.mean()) if self.work.any() else 1.0

    @property
    def state_imbalance(self) -> float:
        """Largest state / mean state."""
        return float(self.state.max() / self.state.mean()) if self.state.any() else 1.0


def plan(
    recipe: Source,
    parameters: Iterable[tuple[str, Sequence[int]] | ParamInfo],
    mesh: tuple[int, ...],
    parallel: Parallel | Sequence[Placement] = "fsdp2",
    dtype: torch.dtype = torch.float32,
) -> Plan:
    """How a recipe is divided over the ranks of a device mesh.

    parameters: names and shapes, or facts (what `describe_model` has found). parallel: how parameters lie on the mesh:
    "ddp", everybody has all; "fsdp2", cut along the first axis; "hsdp", that over the second axis of the mesh, copied
    over the first; or a placement for each axis of the mesh. dtype: of parameters and gradients.
    """
    recipe = load_recipe(recipe)
    facts = known(parameters, dtype)
    if not facts:
        raise ValueError("plan: at least one parameter is required, got none")
    tensors = [torch.empty(fact.shape, dtype=dtype, device="meta") for fact in facts]
    names = [fact.name or f"parameter {position}" for position, fact in enumerate(facts)]
    if len(set(names)) < len(names):
        raise ValueError(
            f"plan: a name of its own for each parameter is required, got '{max(names, key=names.count)}' twice"
        )
    paths = [recipe.route(fact)[0] for fact in facts]
    layouts = _layouts(recipe, names, tensors, mesh, parallel)
    assignment, loads = _divide(recipe, names, tensors, paths, layouts)
    ranks, work = loads.ranks, np.array(loads.work)
    block_groups = [block_group for block_group, _ in divided(tensors, paths, recipe, assignment)]
    return Plan(
        {name: assignment.placements[id(tensor)] for name, tensor in zip(names, tensors, strict=True)},
        sum((owned(block_group, ranks) for block_group in block_groups), np.zeros(ranks, dtype=np.int64)),
        state_bytes(recipe, tensors, paths, assignment, block_groups),
        work,
        _traffic(recipe, paths, block_groups, layouts),
        least_work(recipe, block_groups, work),
    )


def known(
    parameters: Iterable[tuple[str, Sequence[int]] | ParamInfo], dtype: torch.dtype = torch.float32
) -> list[ParamInfo]:
    """The facts of parameters of which nothing else than names and shapes may be known."""
    return [given if isinstance(given, ParamInfo) else _facts(*given, dtype) for given in parameters]


def _divide(
    recipe: Recipe, names: Sequence[str], tensors: Sequence[Tensor], paths: Sequence[str], layouts: Sequence[Layout]
) -> tuple[Assignment, Loads]:
    """Who owns what, and what that lays on each rank."""
    loads = Loads(len(layouts[0].boxes))
    assignment = Assignment(cast(RankGroup, SimpleNamespace(size=loads.ranks)))  # nothing else is asked of them
    for name, tensor, path, layout in zip(names, tensors, paths, layouts, strict=True):
        assignment.placements[id(tensor)] = _placement(recipe, name, tensor, path, layout)
    assign_owners(assignment, tensors, paths, recipe, loads)
    return assignment, loads


def _traffic(
    recipe: Recipe, paths: Sequence[str], block_groups: Sequence[BlockGroup], layouts: Sequence[Layout]
) -> dict[str, Traffic]:
    """As in `Plan`. What decays is sent like the gradients if a stage acts on it; norms of parameters are summed."""
    used, ranks = [recipe.updates()[path] for path in dict.fromkeys(paths)], len(layouts[0].boxes)
    whole = all(layouts[member.position].replicated for block_group in block_groups for member in block_group.members)
    norms = not whole and any("parameter_rms" in stage.requires for rule in used for _, stage in rule.stages())
    vectors = [3 * len(paths), *[len(paths)] * norms]
    buckets = packed(block_groups, limit(recipe, ranks)) if ranks > 1 else []
    there, back = wire(block_groups, buckets, layouts, 1 + any(rule.after_decay for rule in used))
    return {"gradients": there, "updates": back, "agreement": all_reduced(vectors, ranks)}


def _facts(name: str, shape: Sequence[int], dtype: torch.dtype) -> ParamInfo:
    if any(length < 0 for length in shape):
        raise ValueError(f"{name}: a shape without negative lengths is required, got {tuple(shape)}")
    return describe_parameter(name, torch.empty(tuple(shape), dtype=dtype, device="meta"))


def _layouts(
    recipe: Recipe,
    names: Sequence[str],
    tensors: Sequence[Tensor],
    mesh: tuple[int, ...],
    parallel: Parallel | Sequence[Placement],
) -> list[Layout]:
    """What each rank holds of each parameter; found once for each shape."""
    placements = _placements(mesh, parallel)
    mode = recipe.distribution.mode
    if mode == "local" or mode == ("replicated" if placements else "sharded"):
        raise ValueError(f"distribution.mode: '{mode}' does not divide such parameters, got parallel {parallel}")
    found: dict[tuple[int, ...], Layout] = {}
    for name, tensor in zip(names, tensors, strict=True):
        shape = tuple(tensor.shape)
        if shape in found:
            continue
        if not placements:
            found[shape] = Layout.whole(shape, int(np.prod(mesh)))
            continue
        if any(getattr(placement, "dim", -1) >= len(shape) for placement in placements):
            raise ValueError(f"{name}: an axis to cut is required by {placements}, got shape {shape}")
        found[shape] = Layout.of(shape, mesh, placements)
    return [found[tuple(tensor.shape)] for tensor in tensors]


def _placements(mesh: tuple[int, ...], parallel: Parallel | Sequence[Placement]) -> Sequence[Placement]:
    """One for each axis of the mesh; none for plain tensors."""
    known: Mapping[Any, Sequence[Placement]] = {"ddp": (), "fsdp2": (Shard(0),), "hsdp": (Replicate(), Shard(0))}
    placements = known[parallel] if isinstance(parallel, str) else parallel
    if not mesh or min(mesh) < 1:
        raise ValueError(f"mesh: at least one axis, each of at least one rank, is required, got {mesh}")
    if parallel != "ddp" and len(placements) != len(mesh):
        raise ValueError(f"mesh: {len(placements)} axes are required by {parallel}, got {mesh}")
    return placements


def _placement(recipe: Recipe, name: str, tensor: Tensor, path: str, layout: Layout) -> ParamPlacement:
    rule = recipe.updates()[path]
    if rule.constraints and not layout.replicated:
        raise ValueError(f"{name}: {path or 'recipe'}.constraints: whole parameters are required, got a sharded one")
    return ParamPlacement(layout, None if entrywise(rule, path, tensor, layout, recipe) else {})
