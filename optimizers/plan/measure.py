"""Measured cost model: the time of one step of a block on this machine, for `distribution.work`."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch.utils.benchmark import Timer

from eigengraft.blocking import Whole
from eigengraft.distributed.distribution import Distribution

from ..optimizer import Optimizer
from ..recipe.loading import RecipeSource, load_recipe
from ..recipe.recipe import Recipe
from ..recipe.routing import ParamInfo

WARM_UP = 3
"""Number of first steps that are not timed, because these steps allocate memory and compute the first refresh."""
LARGEST = 1 << 24
"""Size of the largest block that is measured, in entries. Measuring a larger block would take minutes."""


def measured_work(recipe: RecipeSource, infos: Iterable[ParamInfo], device: str = "cpu") -> dict[str, float]:
    """Measure the milliseconds per step of each block shape, as a table for `distribution.work` of a recipe.

    Keys are shapes, such as '1024x256'. Each shape is measured three times over whole refresh intervals, and the
    smallest mean counts. If two update rules of the recipe have blocks of the same shape, the slower rule counts.
    Blocks of more than 2^24 entries are left out. All ranks must use the same table, because the owners of blocks
    follow from it.

    Args:
        recipe: name of a shipped recipe, path of a YAML file, mapping, list of stages, or `Recipe`.
        infos: descriptions of the parameters, as `describe_model` returns them.
        device: device on which to measure.
    """
    recipe = load_recipe(recipe)
    shapes: dict[tuple[str, tuple[int, ...]], None] = {}
    for info in infos:
        path, _ = recipe.route(info)
        for grid in recipe.rules()[path].blocking.grids(info.shape, recipe.view_of(info).matrices):
            if math.prod(grid.shape) <= LARGEST:
                shapes[path, grid.shape] = None
    found: dict[str, float] = {}
    for path, block in shapes:
        name = "x".join(map(str, block))
        found[name] = max(found.get(name, 0.0), _milliseconds(_alone(recipe, path), block, device))
    return found


def _alone(recipe: Recipe, path: str) -> Recipe:
    """Return a recipe that applies one update rule of `recipe` to every parameter, in one process.

    Constraints and averaging are left out, because they work on whole parameters and not on blocks.

    path: path of the update rule in the recipe.
    """
    rule = recipe.rules()[path]
    prefix = f"{path}." if path else ""
    roles = {key: how for key, how in recipe.storage.items() if "." not in key and "/" not in key}
    own = {key.removeprefix(prefix): how for key, how in recipe.storage.items() if key.startswith(f"{prefix}update")}
    return recipe.replace(
        update=rule.update,
        after_decay=rule.after_decay,
        constraints=(),
        blocking=rule.blocking,
        view=Whole(),
        routes=(),
        averaging=None,
        storage={**roles, **own},
        distribution=Distribution(mode="local"),
    )


def _milliseconds(recipe: Recipe, block: tuple[int, ...], device: str) -> float:
    parameter = torch.nn.Parameter(torch.zeros(block, dtype=torch.float32, device=device))
    optimizer = Optimizer([("weight", parameter)], recipe)
    parameter.grad = torch.randn(block, dtype=torch.float32, device=device)
    interval = max((math.ceil(cadence.interval) for cadence in recipe.cadences().values()), default=1)
    steps = interval * max(1, 10 // interval)
    for _ in range(WARM_UP):
        optimizer.step()
    timer = Timer("step()", globals={"step": optimizer.step}, num_threads=torch.get_num_threads())
    return 1e3 * min(timer.timeit(steps).mean for _ in range(3))
