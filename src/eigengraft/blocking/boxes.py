"""Boxes of entries, and runs of entries along merged axes as boxes in the axes that were merged."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Box:
    """Entries of a tensor with start <= index < stop on every axis."""

    start: tuple[int, ...]
    stop: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Length of the box along each axis, none below 0."""
        return tuple(max(b - a, 0) for a, b in zip(self.start, self.stop, strict=True))

    @property
    def numel(self) -> int:
        """Number of entries."""
        return math.prod(self.shape)

    def common(self, other: Box) -> Box | None:
        """The intersection of two boxes; None if it is empty."""
        box = Box(tuple(map(max, self.start, other.start)), tuple(map(min, self.stop, other.stop)))
        return box if box.numel else None

    def within(self, outer: Box) -> tuple[slice, ...]:
        """Index of this box in a tensor that holds the box `outer`."""
        corners = zip(self.start, self.stop, outer.start, strict=True)
        return tuple(slice(a - origin, b - origin) for a, b, origin in corners)


def grouping(shape: tuple[int, ...], merged: tuple[int, ...]) -> tuple[int, ...]:
    """Number of axes of a shape that each merged axis is made of; an axis of length 1 belongs to a neighbour."""
    groups, first = [], 0
    for place, length in enumerate(merged):
        last, product = first, 1
        final = place == len(merged) - 1
        while last < len(shape) and (product < length or shape[last] == 1 or final):
            product *= shape[last]
            last += 1
        groups.append(last - first)
        first = last
    return tuple(groups)


def boxes_of_run(
    start: int, stop: int, lengths: tuple[int, ...]
) -> Iterator[tuple[int, tuple[int, ...], tuple[int, ...]]]:
    """Boxes of the entries start <= i < stop of flattened axes, as (first i, box start, box stop), in order.

    There are at most 2k - 1 of them for k axes.
    """
    if not lengths:
        yield 0, (), ()
        return
    if len(lengths) == 1:
        yield start, (start,), (stop,)
        return
    inner = math.prod(lengths[1:])
    at = start
    while at < stop:
        row, column = divmod(at, inner)
        if column == 0 and stop - at >= inner:
            rows = (stop - at) // inner
            yield at, (row, *(0 for _ in lengths[1:])), (row + rows, *lengths[1:])
            at += rows * inner
            continue
        end = min(stop, (row + 1) * inner)
        for first, low, high in boxes_of_run(column, column + end - at, lengths[1:]):
            yield row * inner + first, (row, *low), (row + 1, *high)
        at = end
