"""The command `eigengraft costs`: what recipes hold and compute on models whose matrices are not the usual ones."""

from __future__ import annotations

import typer


def costs_command() -> None:
    """Print, as a Markdown table, what a trained parameter of odd models costs: bytes of state, operations a step."""
    from ..tasks.odd_models import cost_table

    head, *rows = cost_table()
    for cells in (head, ("---", *("--:" for _ in head[1:])), *rows):
        typer.echo(f"| {' | '.join(cells)} |")
