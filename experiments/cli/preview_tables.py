"""Tables of what a study would run."""

from __future__ import annotations

from collections.abc import Iterator

from rich import box
from rich.table import Table
from rich.text import Text

from ..reports.recipe_diff import diff_recipes
from ..studies.preview import StudyPreview


def cells_table(preview: StudyPreview) -> Table:
    """A row per cell: its labels, its runs, their expected time and the bytes of state."""
    table = Table(box=box.SIMPLE_HEAD)
    for axis in preview.cells[0].labels:
        table.add_column(axis, overflow="fold")
    for name in ("runs", "complete", "timed", "tuning, at most", "seconds a run", "state bytes", "parameters"):
        table.add_column(name, justify="right")
    for cell in preview.cells:
        counts = (cell.runs, cell.complete, cell.timing, cell.tuning)
        numbers = (*counts, round(cell.seconds), cell.state_bytes, cell.parameters)
        table.add_row(*map(Text, cell.labels.values()), *(f"{number:,}" for number in numbers))
    return table


def differences_table(preview: StudyPreview) -> Iterator[Table]:
    """A row per field in which the labels that are compared differ; no table where they do not."""
    labels = list(dict.fromkeys(label for panel in preview.configs.values() for label in panel))
    rows = diff_recipes(preview.configs)
    if rows:
        table = Table(box=box.SIMPLE_HEAD)
        table.add_column("field", overflow="fold", min_width=30)
        for label in labels:
            table.add_column(label, overflow="fold")
        for row in rows:
            table.add_row(*map(Text, (row.path, *row.values)))
        yield table


def sentence(preview: StudyPreview) -> str:
    """What is to be done, in one sentence."""
    at_most = "at most " if any(cell.tuning for cell in preview.cells) else ""
    hours, minutes = divmod(round(preview.seconds / 60), 60)
    runs = f"{preview.name}: {at_most}{preview.runs} runs in {len(preview.cells)} cells"
    timed = "; steps of other cells than the baseline's follow from the timed runs"
    return (
        f"{runs}, about {hours}:{minutes:02d} hours on one core; such a guess may be off by a factor of a few"
        f"{timed if any(cell.timing for cell in preview.cells) else ''}"
    )
