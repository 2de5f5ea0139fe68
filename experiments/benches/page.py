"""The page of a bench: advice, figure, table, columns, declaration and machine in one HTML file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from ..reports import figures
from .bench import Bench
from .figure import draw_panels
from .view import Row, lay_out

STYLE = Path(figures.__file__).parent
"""Folder of the style sheet of reports."""


def render_page(bench: Bench, rows: Sequence[Row], environment: Mapping[str, Any], place: str, declaration: str) -> str:
    """Return the page as text. All names and messages are escaped.

    environment: machine and versions, by name.
    place: device and threads in one line.
    declaration: the bench as YAML.
    """
    templates = Environment(
        loader=FileSystemLoader([Path(__file__).parent, STYLE]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    table = bench.table()
    headings, lines = lay_out(table, rows)
    return templates.get_template("bench.html.jinja").render(
        kind=bench.declaration()["kind"],
        title=table.title,
        place=place,
        advice=bench.advice(rows),
        figure=Markup(figures.inline_svg(draw_panels(bench.panels(), rows), "bench")),
        headings=headings,
        lines=lines,
        columns=bench.columns,
        declaration=declaration,
        environment=environment,
        palette=list(zip(figures.LIGHT, figures.DARK, strict=True)),
    )
