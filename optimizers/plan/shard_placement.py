"""Shard placements for `fully_shard` under which ranks hold whole blocks, so that a step communicates less."""

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
    """Return a `shard_placement_fn` for `fully_shard` that shards each parameter along the axis that cuts the fewest
    blocks.

    A block that is entirely on one rank is owned by that rank, so that a step communicates less. The training is the
    same as with other placements. If several axes are equally good, the one with the lowest index is chosen. Axes other
    than axis 0 are considered only if their length is a multiple of `ranks`, because torch shards them only into equal
    parts. For such an axis torch makes one more copy when it gathers parameters and reduces gradients.

    Args:
        recipe: name of a shipped recipe, path of a YAML file, mapping or `Recipe`, which declares the blocks of each
            parameter.
        model: the model before it is sharded.
        ranks: number of ranks over which a parameter is sharded.

    Raises:
        ValueError: the returned function was called with a tensor that was no parameter of `model`.
    """
    from torch.distributed.tensor import Shard

    declared, infos = load_recipe(recipe), describe_model(model)

    @lru_cache
    def best(path: str, shape: tuple[int, ...]) -> int:
        rule = declared.rules()[path]
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
                f"whole_block_shards: a tensor of shape {tuple(parameter.shape)} is not a parameter of the model; call "
                "whole_block_shards with the model before it is sharded"
            )
        info = infos[id(parameter)]
        return Shard(best(declared.route(info)[0], tuple(info.shape)))

    return placement
