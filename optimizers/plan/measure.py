"""Measured cost model: the time of one step of a block on this machine, for `distribution.work`."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable

import torch

from eigengraft.blocking import Whole
from eigengraft.distributed.distribution import Distribution

from ..optimizer import Optimizer
from ..recipe.loading import RecipeSource, load_recipe
from ..recipe.recipe import Recipe
from ..recipe.routing import ParamInfo

WARM_UP = 3
"""Steps that are not timed: the first steps allocate, and refresh."""
LARGEST = 1 << 24
"""Entries of the largest block that is measured."""


def measured_work(recipe: RecipeSource, infos: Iterable[ParamInfo], device: str = "cpu") -> dict[str, float]:
    """Milliseconds per step of a block by its shape, as '1024x256': least of three means over full refresh intervals.

    infos: what is known of the parameters of a model. Where two updates cut blocks of one shape, the slower one counts;
    blocks of more than 2^24 entries are left out. Every rank must be given the same table, because owners follow from
    it.
    """
    recipe = load_recipe(recipe)
    shapes: dict[tuple[str, tuple[int, ...]], None] = {}
    for info in infos:
        path, _ = recipe.route(info)
        for grid in recipe.updates()[path].blocking.grids(info.shape, recipe.view_of(info).matrices):
            if math.prod(grid.shape) <= LARGEST:
                shapes[path, grid.shape] = None
    found: dict[str, float] = {}
    for path, block in shapes:
        name = "x".join(map(str, block))
        found[name] = max(found.get(name, 0.0), _milliseconds(_alone(recipe, path), block, device))
    return found


def _alone(recipe: Recipe, path: str) -> Recipe:
    """The update at a path as a recipe of its own, for one process."""
    rule = recipe.updates()[path]
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
    cadences = [stage.cadence() for _, stage in recipe.stages()]
    interval = max((math.ceil(cadence.interval) for cadence in cadences if cadence is not None), default=1)
    steps = interval * max(1, 10 // interval)
    for _ in range(WARM_UP):
        optimizer.step()
    return min(_timed(optimizer, steps, parameter.device) for _ in range(3))


def _timed(optimizer: Optimizer, steps: int, device: torch.device) -> float:
    """Milliseconds per step, over `steps` steps."""
    _wait(device)
    start = time.perf_counter()
    for _ in range(steps):
        optimizer.step()
    _wait(device)
    return 1e3 * (time.perf_counter() - start) / steps


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
