"""What stages leave alone: axes of blocks that are too long for a factor."""

from __future__ import annotations

from collections.abc import Iterable

from eigengraft.preconditioners import Stages
from eigengraft.preconditioners.base import walk_blocks


def left_out(stages: Stages, blocks: Iterable[tuple[int, ...]]) -> tuple[str, ...]:
    """What the stages of a chain leave alone of blocks, and why; each shape and each remark once."""
    shapes = dict.fromkeys(blocks)
    seen = ((block, stage.cached_traits(own)) for block in shapes for _, stage, own in walk_blocks(stages, block))
    found = (f"{'x'.join(map(str, block))}: {text}" for block, traits in seen for text in traits.left_out)
    return tuple(dict.fromkeys(found))
