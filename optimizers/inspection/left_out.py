"""What stages leave alone: axes of blocks that are too long for a factor."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from eigengraft.preconditioners import Stages


def left_out(stages: Stages, blocks: Iterable[tuple[int, ...]]) -> tuple[str, ...]:
    """What the stages of a chain leave alone of blocks, and why; each shape and each remark once."""
    shapes = dict.fromkeys(blocks)
    found = (f"{'x'.join(map(str, block))}: {text}" for block in shapes for text in _remarks(stages, block))
    return tuple(dict.fromkeys(found))


def _remarks(stages: Stages, block: tuple[int, ...]) -> Iterator[str]:
    """Remarks of the stages of a chain and of the chains inside them."""
    for stage in stages:
        yield from stage.left_out(block)
        for part, inside in stage.chains().items():
            yield from _remarks(inside, stage.inner_block(part, block))
