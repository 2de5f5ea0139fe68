"""Sweeps: the final metric as a curve over labels that are numbers, such as learning rates or intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence

from .comparison import ComparisonPanel
from .figures import Curve
from .records import Records


def sweeps(records: Records, panels: Sequence[ComparisonPanel]) -> dict[str, list[Curve]]:
    """Curves by title: one curve per panel; panels that differ only in the last label share a figure.

    Empty unless all labels are numbers. Diverged runs leave a gap; rows without a finished run are left out.
    """
    numbers = {row.label: _number(row.label) for panel in panels for row in panel.rows}
    if len(numbers) < 3 or not all(map(math.isfinite, numbers.values())):
        return {}
    styles: dict[str, int] = {}
    found: dict[str, list[Curve]] = {}
    for panel in panels:
        *outer, last = panel.labels or (records.name,)
        ended = sorted(((numbers[r.label], r) for r in panel.rows if r.finals), key=lambda pair: pair[0])
        values = [[v if math.isfinite(v) else math.nan for v in row.finals.values()] for _, row in ended]
        curve = Curve(
            label=last,
            style=styles.setdefault(last, len(styles)),
            x=[number for number, _ in ended],
            mean=[math.fsum(some) / len(some) for some in values],
            low=[min(some) for some in values],
            high=[max(some) for some in values],
        )
        if ended:
            found.setdefault(", ".join(outer) or records.name, []).append(curve)
    return found


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan
