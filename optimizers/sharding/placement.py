"""Placement of parameters: what each rank holds of a parameter, and which rank owns each of its blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from eigengraft.distributed.layouts import Layout
from eigengraft.distributed.ownership import Loads, assign
from eigengraft.numerics import compute_dtype
from eigengraft.quantization import choose

from ..recipe.recipe import Recipe
from ..recipe.slot_keys import slot_keys
from .cost_model import block_cost
from .phases import ParamKey, natural_order


@dataclass(frozen=True)
class ParamPlacement:
    """Where one parameter lies and which ranks update it.

    layout: what each rank holds of the parameter.
    owners: rank that owns each block, by block key; None: every rank updates entries in place, and no block travels.
    rows: rows that each rank updates in place of a parameter that all ranks hold, who are then sent all rows; None: a
        rank updates in place what it holds.
    """

    layout: Layout
    owners: dict[int, int] | None
    rows: Layout | None = None

    @property
    def updated(self) -> Layout:
        """What each rank updates in place, which is where the state of such an update lies."""
        return self.layout if self.rows is None else self.rows


@dataclass(frozen=True)
class ParamSpec:
    """What decides how a parameter is cut into blocks and where these are computed; values play no role.

    name: what errors and counts call the parameter; random numbers are seeded by it.
    path: path of the parameter's update in the recipe.
    shape: shape of the full parameter, on however many ranks it lies.
    dtype: dtype of the parameter.
    device: device of the parameter.
    placement: where it lies among ranks; None: this process updates all of it, whatever other ranks do.
    """

    name: str
    path: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    placement: ParamPlacement | None = None

    @property
    def key(self) -> ParamKey:
        """What the phases of its blocks follow from."""
        return ParamKey(self.name, self.path, self.shape)


def place(recipe: Recipe, path: str, layout: Layout) -> ParamPlacement:
    """The placement of a parameter of that layout before its blocks have owners.

    Raises ValueError where the update needs more of the parameter in one place than the layout gives.
    """
    if recipe.updates()[path].constraints and not layout.replicated:
        raise ValueError(f"{path or 'recipe'}.constraints: whole parameters are required, got a sharded one")
    if not _updates_in_place(recipe, path, layout.shape):
        return ParamPlacement(layout, {})
    ranks = len(layout.boxes)
    if layout.copies == 1 < ranks:
        return ParamPlacement(layout, None)
    if layout.replicated and _rows_fit(recipe, path, layout.shape, ranks):
        return ParamPlacement(layout, None, Layout.by_rows(layout.shape, ranks))
    return ParamPlacement(layout, {})


def _updates_in_place(recipe: Recipe, path: str, shape: tuple[int, ...]) -> bool:
    """Whether a rank can update any entries alone: the update mixes no entries, and has one slot entry for each, so
    that the state is divided as evenly as the parameter."""
    rule = recipe.updates()[path]
    if any(grid.merged != shape or not grid.is_parameter for grid in rule.blocking.grids(shape)):
        return False
    slots = [
        choose(recipe.storage, key.rpartition("/")[0], key.rpartition("/")[2], slot) is None and slot.shape == shape
        for key, slot in slot_keys(rule, path, shape).items()
    ]
    return all(slots) and all(stage.entrywise() and not stage.requires for _, stage in rule.stages())


def _rows_fit(recipe: Recipe, path: str, shape: tuple[int, ...], ranks: int) -> bool:
    """Whether a replicated parameter can be cut by rows: no rank may need the others' rows of it between steps."""
    local = recipe.averaging is None and not recipe.updates()[path].constraints
    return local and 1 < ranks <= (shape[0] if shape else 0) and 0 not in shape


def assign_owners(specs: Sequence[ParamSpec], recipe: Recipe, loads: Loads) -> None:
    """Fills in the owners of all blocks of parameters that the same ranks share; loads: what ranks carry, updated.

    The order of the parameters plays no role.
    Parameters that are updated in place are counted before any block is assigned. Blocks of a parameter that a stage
    takes norms over go to one owner.
    """
    items: list[tuple[dict[int, int], list[int], float, float]] = []
    for spec in sorted(specs, key=lambda spec: natural_order(spec.name)):
        assert spec.placement is not None
        owners, layout = spec.placement.owners, spec.placement.updated
        rule, dtype = recipe.updates()[spec.path], compute_dtype(spec.dtype)
        if owners is None:
            cost = block_cost(rule, spec.path, layout.shape, dtype, recipe.storage)
            work = recipe.distribution.measured(layout.shape, cost.work)
            loads.carry(layout.fractions, work, float(cost.state))
            continue
        together = any(stage.spans_parameter() for _, stage in rule.stages())
        for grid in rule.blocking.grids(spec.shape):
            cost = block_cost(rule, spec.path, grid.tile, dtype, recipe.storage)
            work = recipe.distribution.measured(grid.tile, cost.work)
            groups = [list(grid.keys)] if together else [[key] for key in grid.keys]
            items += [(owners, keys, work * len(keys), float(cost.state * len(keys))) for keys in groups]
    ranks = assign([work for _, _, work, _ in items], [state for _, _, _, state in items], loads)
    for (owners, keys, _, _), rank in zip(items, ranks, strict=True):
        owners.update(dict.fromkeys(keys, rank))
