"""All figures that a panel has beside its curves, with what they are called."""

from __future__ import annotations

from collections.abc import Iterator

from matplotlib.figure import Figure

from ..comparison import ComparisonPanel
from .differences import difference_dots
from .internals import internals


def beside_curves(panel: ComparisonPanel) -> Iterator[tuple[str, str, Figure]]:
    """Short name, caption and figure of what a panel has beside its curves."""
    apart = difference_dots(panel)
    if apart is not None:
        yield "differences", "Differences from the baseline over paired seeds, with 95 % intervals", apart
    inside = internals(panel)
    if inside is not None:
        caption = "Inside the optimizer: medians over parameters, stages and seeds, bands from quartile to quartile"
        yield "internals", caption, inside
