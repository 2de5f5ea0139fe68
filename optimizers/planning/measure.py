"""What a step of one block takes on this machine, for `distribution.work`: a cost model that is measured."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable

import torch

from eigengraft.distributed.distribution import Distribution

from ..optimizer import Optimizer
from ..recipe.loading import Source, load_recipe
from ..recipe.recipe import Recipe
from ..recipe.routing import ParamInfo

WARM_UP = 3
"""Steps that are not counted: the first ones allocate, and refresh."""
LARGEST = 1 << 24
"""Numbers in a block that is measured."""


def measured_work(recipe: Source, facts: Iterable[ParamInfo], device: str = "cpu") -> dict[str, float]:
    """Milliseconds of a step of one block by its shape, as '1024x256': the mean over a whole refresh interval,
    the least of three.

    facts: of the parameters of a model. Where two updates cut blocks of one shape, the slower one counts; blocks of
    more than 2^24 numbers are left out. The same table must be given to every rank, because owners follow from it.
    """
    recipe = load_recipe(recipe)
    shapes: dict[tuple[str, tuple[int, ...]], None] = {}
    for fact in facts:
        path, _ = recipe.route(fact)
        for grid in recipe.updates()[path].blocking.grids(fact.shape):
            if math.prod(grid.tile) <= LARGEST:
                shapes[path, grid.tile] = None
    found: dict[str, float] = {}
    for path, block in shapes:
        name = "x".join(map(str, block))
        found[name] = max(found.get(name, 0.0), _milliseconds(_alone(recipe, path), block, device))
    return found


def _alone(recipe: Recipe, path: str) -> Recipe:
    """The update of a path as a recipe of its own, for one process."""
    rule = recipe.updates()[path]
    prefix = f"{path}." if path else ""
    roles = {key: how for key, how in recipe.storage.items() if "." not in key and "/" not in key}
    own = {key.removeprefix(prefix): how for key, how in recipe.storage.items() if key.startswith(f"{prefix}update")}
    return recipe.replace(
        update=rule.update,
        after_decay=rule.after_decay,
        constraints=(),
        blocking=rule.blocking,
        routes=(),
        averaging=None,
        storage={**roles, **own},
        distribution=Distribution(mode="local"),
    )


def _milliseconds(recipe: Recipe, block: tuple[int, ...], device: str) -> float:
    parameter = torch.nn.Parameter(torch.zeros(block, device=device))
    optimizer = Optimizer([parameter], recipe)
    parameter.grad = torch.randn(block, device=device)
    cadences = [stage.cadence() for _, stage in recipe.stages()]
    interval = max((math.ceil(cadence.interval) for cadence in cadences if cadence is not None), default=1)
    steps = interval * max(1, 10 // interval)
    for _ in range(WARM_UP):
        optimizer.step()
    return min(_timed(optimizer, steps, parameter.device) for _ in range(3))


def _timed(optimizer: Optimizer, steps: int, device: torch.device) -> float:
    """Milliseconds a step, over some steps."""
    _wait(device)
    start = time.perf_counter()
    for _ in range(steps):
        optimizer.step()
    _wait(device)
    return 1e3 * (time.perf_counter() - start) / steps


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
