"""Plans of sharded optimizers: the blocks, bytes, work and messages of each rank, computed without processes.

Blocks and owners are computed by the functions that the optimizer itself uses. Only shapes of parameters are needed.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from eigengraft.distributed.balance import Balance, Loads
from eigengraft.distributed.comm_plan import BlockGroup
from eigengraft.distributed.layouts import Layout
from eigengraft.errors import counted
from eigengraft.numerics import compute_dtype
from eigengraft.signals import asking
from eigengraft.slots import Slot

from ..recipe.expect import require_expected
from ..recipe.loading import RecipeSource, load_recipe
from ..recipe.recipe import Recipe, block_bytes
from ..recipe.routing import ParamInfo, describe_named
from ..stacks.assignment import Advice, advise, assign_owners, common_interval
from ..stacks.placement import ParamPlacement, ParamSpec, place, refresh_phases
from ..stacks.stack import divide
from .traffic import Traffic, count_owned, step_traffic

DataParallelKind = Literal["ddp", "fsdp2", "hsdp"]
Floats = NDArray[np.float64]
EFFICIENT = 0.9
"""Efficiency of a plan (`Balance.efficiency`, at most 1) below which it advises more refreshes in one step
(`Plan.advice`)."""
STEP_COUNT = 8
"""Bytes of the step count that every rank stores for each parameter."""

if TYPE_CHECKING:
    from torch.distributed.tensor.placement_types import Placement


@dataclass(frozen=True)
class Plan:
    """The blocks, state, work and messages of each of R ranks.

    placements: layout and owners of each parameter, by name. If the recipe sets `group_size`, each group of ranks
        computes the updates of all parameters, and a placement has only the ranks of one group.
    blocks: `[R]`, number of blocks that each rank owns.
    state: `[R]`, bytes of state.
    offloaded: `[R]`, bytes of state in host memory between steps, by location: "cpu" or "disk". Each step copies them
        to the device and back.
    work: `[R]`, operations per step, or milliseconds if the recipe has measured times.
    traffic: messages of a step by purpose, as `step_traffic` returns them.
    interval: number of steps after which the pattern of refreshes repeats.
    balance: how evenly the work of each step of an interval is divided over ranks. `balance.efficiency` is 1 if no
        choice of owners can be faster.
    advice: recommendation to let more refreshes be due in the same step, so that ranks wait less for each other; None
        if they would wait hardly less.
    """

    placements: Mapping[str, ParamPlacement]
    blocks: NDArray[np.int64]
    state: NDArray[np.int64]
    offloaded: Mapping[str, NDArray[np.int64]]
    work: Floats
    traffic: Mapping[str, Traffic]
    interval: int
    balance: Balance
    advice: Advice | None

    @property
    def bound(self) -> float:
        """Return a lower bound of the busiest rank's work per step, in the unit of `work`, for any choice of owners."""
        return self.balance.least / self.interval

    @property
    def imbalance(self) -> float:
        """Return the largest work of a rank divided by the mean work of all ranks."""
        return float(self.work.max() / self.work.mean()) if self.work.any() else 1.0

    @property
    def least_imbalance(self) -> float:
        """Return `bound` / mean work, the lower bound of `imbalance` for any choice of owners."""
        return self.bound / float(self.work.mean()) if self.work.any() else 1.0

    @property
    def state_imbalance(self) -> float:
        """Return the largest number of bytes of state of a rank divided by the mean number."""
        return float(self.state.max() / self.state.mean()) if self.state.any() else 1.0


def plan(
    recipe: RecipeSource,
    parameters: Iterable[tuple[str, Sequence[int]] | ParamInfo],
    mesh: tuple[int, ...],
    parallel: DataParallelKind | Sequence[Placement] = "fsdp2",
    dtype: torch.dtype | Sequence[torch.dtype] = torch.float32,
) -> Plan:
    """Compute how the state, work and messages of a recipe are divided over the ranks of a device mesh.

    Args:
        recipe: name of a shipped recipe, path of a YAML file, mapping, list of stages, or `Recipe`.
        parameters: pairs of name and shape, or descriptions as `describe_model` returns them.
        mesh: shape of the device mesh.
        parallel: placement of parameters on the mesh. "ddp": replicated; "fsdp2": sharded along the first axis;
            "hsdp": sharded over the second axis of the mesh and replicated over the first; or a DTensor placement for
            each axis of the mesh.
        dtype: dtype of parameters and gradients, or one dtype for each parameter.

    Returns:
        The plan, with arrays indexed by rank.

    Raises:
        ValueError: there are no parameters, two parameters have the same name, or the mesh does not fit `parallel` or
            the recipe.
        RecipeError: the parameters do not satisfy a bound in the recipe's `expect`.
    """
    recipe = load_recipe(recipe)
    infos = known(parameters)
    if not infos:
        raise ValueError("plan: there are no parameters; pass pairs of name and shape, or describe_model(model)")
    require_expected(recipe.reached(infos))
    names = [info.name or f"parameter {position}" for position, info in enumerate(infos)]
    if names.count(twice := max(names, key=names.count)) > 1:
        raise ValueError(f"plan: two parameters have the name '{twice}'; give each parameter its own name")
    layouts = _layouts(recipe, names, [info.shape for info in infos], mesh, parallel)
    dtypes = [dtype] * len(infos) if isinstance(dtype, torch.dtype) else dtype
    specs = [_spec(recipe, *row) for row in zip(names, infos, layouts, dtypes, strict=True)]
    phases = refresh_phases(recipe, (spec.key for spec in specs))
    loads = Loads(len(layouts[0].boxes), common_interval(recipe))
    balance, ranks = assign_owners(specs, recipe, phases, loads), loads.ranks
    groups = math.prod(mesh) // ranks
    block_groups = [block_group for block_group, _ in divide(specs, recipe, phases, ranks)]
    stored = {location: np.tile(own, groups) for location, own in _stored(recipe, specs, block_groups, ranks).items()}
    return Plan(
        {spec.name: spec.placed for spec in specs},
        np.tile(sum((count_owned(one, ranks) for one in block_groups), np.zeros(ranks, dtype=np.int64)), groups),
        np.sum([*stored.values()], axis=0),
        {location: own for location, own in stored.items() if location},
        np.tile(loads.work, groups),
        step_traffic(recipe, specs, block_groups, layouts, not _placements(mesh, parallel), groups),
        loads.interval,
        balance,
        advise(specs, recipe, phases, ranks, balance) if balance.efficiency < EFFICIENT else None,
    )


def known(parameters: Iterable[tuple[str, Sequence[int]] | ParamInfo]) -> list[ParamInfo]:
    """Return a description of each parameter. Parameters given by name and shape receive canonical names."""
    rows = list(parameters)
    named = [(given[0], _empty(*given)) for given in rows if not isinstance(given, ParamInfo)]
    infos = iter(describe_named(named).values())
    return [given if isinstance(given, ParamInfo) else next(infos) for given in rows]


def _spec(recipe: Recipe, name: str, info: ParamInfo, layout: Layout, dtype: torch.dtype) -> ParamSpec:
    path = recipe.route(info)[0]
    try:
        matrices = recipe.view_of(info).matrices
        placement = place(recipe, path, layout, matrices)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    return ParamSpec(name, path, tuple(info.shape), dtype, torch.device("meta"), placement, matrices)


def _empty(name: str, shape: Sequence[int]) -> torch.Tensor:
    if any(length < 0 for length in shape):
        raise ValueError(f"{name}: lengths of a shape cannot be negative, got {tuple(shape)}")
    return torch.empty(tuple(shape), dtype=torch.float32, device="meta")


def _layouts(
    recipe: Recipe,
    names: Sequence[str],
    shapes: Sequence[tuple[int, ...]],
    mesh: tuple[int, ...],
    parallel: DataParallelKind | Sequence[Placement],
) -> list[Layout]:
    """Return the layout of each parameter. Parameters with equal shapes have the same layout object.

    Raise ValueError if the placement of parameters does not fit the recipe's `distribution`, or a shape.

    mesh, parallel: shape of the device mesh and placement of parameters on it, as `plan` accepts them.
    """
    placements = _placements(mesh, parallel)
    mode = recipe.distribution.mode
    if mode == "local" or mode == ("replicated" if placements else "sharded"):
        kind, other = ("DTensors", "sharded") if placements else ("plain tensors", "replicated")
        reason = f"'{mode}' refuses {kind}, and with parallel {parallel} the parameters are {kind}"
        if mode == "local":
            reason = "with 'local' each rank updates its parameters alone, and there is no division of work to plan"
        raise ValueError(
            f"distribution.mode: '{mode}' cannot be combined with parallel {parallel}: {reason}; set 'auto' or "
            f"'{other}', which divide the updates over the ranks"
        )
    found, ranks, size = dict[tuple[int, ...], Layout](), math.prod(mesh), recipe.distribution.group_size
    if size is not None and (placements or ranks % size):
        got = f"parallel {parallel}" if placements else counted(ranks, "rank")
        raise ValueError(
            f"distribution.group_size: {size} needs parallel ddp and a multiple of {size} ranks, got {got}"
        )
    for name, shape in zip(names, shapes, strict=True):
        if shape in found:
            continue
        if not placements:
            found[shape] = Layout.replicate(shape, size or ranks)
            continue
        if any(getattr(placement, "dim", -1) >= len(shape) for placement in placements):
            raise ValueError(f"{name}: the placements {placements} shard an axis that shape {shape} does not have")
        found[shape] = Layout.from_placements(shape, mesh, placements)
    return [found[shape] for shape in shapes]


def _placements(mesh: tuple[int, ...], parallel: DataParallelKind | Sequence[Placement]) -> Sequence[Placement]:
    """Return a placement for each axis of the mesh, or () for "ddp", where parameters are plain tensors.

    Raise ValueError if the mesh does not fit `parallel`.
    """
    from torch.distributed.tensor import Replicate, Shard

    known: Mapping[Any, Sequence[Placement]] = {"ddp": (), "fsdp2": (Shard(0),), "hsdp": (Replicate(), Shard(0))}
    placements = known[parallel] if isinstance(parallel, str) else parallel
    if not mesh or min(mesh) < 1:
        raise ValueError(f"mesh: must have at least one axis, and each axis at least one rank, got {mesh}")
    if parallel != "ddp" and len(placements) != len(mesh):
        raise ValueError(f"mesh: {parallel} needs a mesh with {counted(len(placements), 'axis', 'axes')}, got {mesh}")
    return placements


def _stored(
    recipe: Recipe, specs: Sequence[ParamSpec], block_groups: Sequence[BlockGroup], ranks: int
) -> dict[str, NDArray[np.int64]]:
    """Return the bytes of state that each rank stores, `[R]`, by location between steps: "", "cpu" or "disk".

    "" is the device of the parameters.
    """
    found = {"": np.full(ranks, STEP_COUNT * len(specs), dtype=np.int64)}
    zeros = np.zeros(ranks, dtype=np.int64)
    for group in block_groups:
        for location, size in block_bytes(recipe, group.path, group.shape, group.dtype).items():
            found[location] = found.get(location, zeros) + size * count_owned(group, ranks)
    # parameters with equal shapes, dtypes and updates have equal placements
    alike = Counter((spec.path, spec.shape, spec.dtype) for spec in specs)
    for spec in {(spec.path, spec.shape, spec.dtype): spec for spec in specs}.values():
        for location, own in _local_bytes(recipe, spec).items():
            found[location] = found.get(location, zeros) + alike[spec.path, spec.shape, spec.dtype] * own
    return found


def _local_bytes(recipe: Recipe, spec: ParamSpec) -> dict[str, NDArray[np.int64]]:
    """Return the bytes of state that each rank stores for its shard of a parameter, `[R]`, by location.

    This state has the iterates of an averaging, the slots of constraints, and the copy of the parameter for the signal
    "partner_before". If the parameter's blocks have no owners, because each rank updates its own shard, the state also
    has the slots of stages. All other state is stored by the owners of blocks.
    """
    rule, computed, placement = recipe.rules()[spec.path], compute_dtype(spec.dtype), spec.placed

    def size(shape: tuple[int, ...]) -> Counter[str]:
        kept = [constraint for constraint in rule.constraints if constraint.keeps(spec.dtype)]
        slots = [slot for constraint in kept for slot in constraint.slots(shape).values()]
        if recipe.averaging is not None:
            slots += recipe.averaging.slots(shape, computed != spec.dtype).values()
        if "partner_before" in asking(rule.stages()):
            slots.append(Slot(shape))
        total = Counter({"": sum(math.prod(slot.shape) * (slot.dtype or computed).itemsize for slot in slots)})
        if placement.owners is None and 0 not in shape:
            total += block_bytes(recipe, spec.path, shape, computed)
        return total

    shapes = [box.shape for box in placement.updated.boxes]
    sizes = {shape: size(shape) for shape in set(shapes)}
    locations = set[str]().union(*sizes.values())
    return {to: np.array([sizes[shape][to] for shape in shapes], dtype=np.int64) for to in locations}
