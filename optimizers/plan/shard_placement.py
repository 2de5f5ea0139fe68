"""Axes along which `fully_shard` may cut parameters so that ranks hold whole blocks, which then need not travel."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING

from torch import Tensor, nn

from eigengraft.distributed.layouts import Layout, holding

from ..recipe.loading import RecipeSource, load_recipe
from ..recipe.routing import describe_model
from ..stacks.placement import place

if TYPE_CHECKING:
    from torch.distributed.tensor import Shard


def whole_block_shards(recipe: RecipeSource, model: nn.Module, ranks: int) -> Callable[[Tensor], Shard]:
    """What `fully_shard(..., shard_placement_fn=...)` takes: for each parameter the axis that cuts fewest blocks.

    Owners of blocks are ranks that hold them, if they can be, so that less travels in a step; results are the same.
    Ties go to the first axis, which torch cuts by default; it cuts others only into equal parts, and copies once more
    for these when it gathers parameters and reduces gradients.

    recipe: declares the blocks of each parameter.
    model: the model before it is sharded, with its own parameters.
    ranks: number of ranks that a parameter is cut over.
    """
    from torch.distributed.tensor import Shard

    declared, infos = load_recipe(recipe), describe_model(model)

    @lru_cache
    def best(path: str, shape: tuple[int, ...]) -> int:
        rule = declared.updates()[path]
        blocks = [grid.block(row) for grid in rule.blocking.grids(shape) for row in range(len(grid.keys))]
        held = {}
        for axis, length in enumerate(shape):
            layout = Layout.from_placements(shape, (ranks,), (Shard(axis),))
            if axis == 0 and place(declared, path, layout).owners is None:
                return 0
            if axis == 0 or length % ranks == 0:
                held[axis] = sum(int(holding(layout, block).max()) for block in blocks)
        return max(held, key=lambda axis: (held[axis], -axis))

    def placement(parameter: Tensor) -> Shard:
        if id(parameter) not in infos:
            raise ValueError(
                "whole_block_shards: a parameter of the model before it is sharded is required, got another one of "
                f"shape {tuple(parameter.shape)}"
            )
        info = infos[id(parameter)]
        return Shard(best(declared.route(info)[0], tuple(info.shape)))

    return placement
