"""Output of the command line: results, tables, YAML and the box around an error."""

from __future__ import annotations

import math
import sys
from collections import Counter
from io import StringIO, TextIOWrapper
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from eigengraft.errors import counted

from ..reports.number_format import format_loss

if TYPE_CHECKING:
    import eigengraft

    from ..training.outcome import Result


def replace_unencodable() -> None:
    """Make the standard streams write "?" for a character that they cannot encode, instead of raising an error.

    Streams without UTF-8 are common: containers and cron jobs without a locale, and pipes on Windows (cp1252).
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="replace")


def print_error(title: str, message: str) -> None:
    """Print a box on standard error. The message is printed literally, brackets included."""
    Console(stderr=True).print(Panel(Text(message), title=title, title_align="left", border_style="red", expand=False))


def describe_result(result: Result) -> str:
    """Return two lines that describe the result of a run. A third line is added if the run got worse after its best
    evaluation.
    """
    if result.diverged or result.val_loss is None:
        head = f"diverged at step {result.steps}: {result.diagnosis or 'the loss or all gradients are not finite'}"
    else:
        accuracy = f", validation accuracy {result.val_accuracy:.4f}" if result.val_accuracy is not None else ""
        accuracy += "".join(f", {name} {value:.4g}" for name, value in result.metrics.items() if value is not None)
        head = f"validation loss {format_loss(result.val_loss, 4)}{accuracy} after {counted(result.steps, 'step')}"
        head += f"\nworse than at the start: {result.diagnosis}" if result.diagnosis else ""
    return (
        f"{head}\n{result.seconds:.1f} s, {result.step_ms:.2f} ms per step, {result.optimizer_ms:.2f} in the optimizer"
        f", {result.state_bytes_per_parameter:.1f} state bytes per parameter, {counted(result.parameters, 'parameter')}"
    )


def to_yaml(data: Any) -> str:
    """Return `data` as YAML. If the standard output is not in UTF-8, characters beyond ASCII are escaped."""
    from eigengraft.optimizers.recipe.loading import write_yaml

    return write_yaml(data, _encoding().startswith("utf"))


def routing_table_of(optimizer: eigengraft.Optimizer) -> Table:
    """Return a table with a row for each parameter: route and reason, view, blocks and bytes of state."""
    rows = optimizer.routing_table()
    table = Table(box=box.SIMPLE_HEAD, show_footer=True)
    table.add_column("parameter", footer=counted(len(rows), "parameter"), overflow="fold")
    table.add_column("shape")
    table.add_column("route")
    table.add_column("because", overflow="fold")
    table.add_column("blocks", overflow="fold")
    table.add_column("state bytes", footer=f"{optimizer.state_bytes():,}", justify="right")
    for row in rows:
        blocks = ", ".join(f"{count} x {_shape(shape)}" for shape, count in Counter(row.blocks).items())
        scaled = f"lr x {', '.join(f'{factor:.3g}' for factor in row.width_factors)}" if row.width_factors else ""
        because = "; ".join(filter(None, (row.reason, row.view, scaled, *row.left_out, *row.fallbacks)))
        cells = (row.name, _shape(row.shape), row.route or "recipe", because, blocks, f"{row.state_bytes:,}")
        table.add_row(*map(Text, cells))
    return table


def storage_table(optimizer: eigengraft.Optimizer) -> Table:
    """Return a table with a row for each slot: bytes as declared and as stored, in total and for each parameter.

    If slots are offloaded, a column says where each slot is stored between steps.
    """
    parameters = sum(math.prod(row.shape) for row in optimizer.routing_table())
    rows = [row for row in optimizer.slot_sizes() if row.role not in ("count", "failures")]
    declared, stored = sum(row.declared for row in rows), sum(row.stored for row in rows)
    table = Table(box=box.SIMPLE_HEAD, show_footer=True)
    table.add_column("slot", footer="all", overflow="fold")
    table.add_column("role")
    table.add_column("storage")
    if offloaded := optimizer.offloaded_bytes():
        table.add_column("in", footer=", ".join(f"{place} {size:,}" for place, size in offloaded.items()))
    table.add_column("declared bytes", footer=f"{declared:,}", justify="right")
    table.add_column("stored bytes", footer=f"{stored:,}", justify="right")
    table.add_column("bytes per parameter", footer=f"{stored / parameters:.2f}", justify="right")
    for row in rows:
        each = f"{row.stored / parameters:.2f}"
        places = (row.location or "device",) if offloaded else ()
        cells = (row.key, row.role, row.storage or "plain", *places, f"{row.declared:,}", f"{row.stored:,}", each)
        table.add_row(*map(Text, cells))
    return table


def print_table(table: Table) -> None:
    """Print the table on standard output. In a file or a pipe, each line is a YAML comment, so that the whole output
    is a recipe.
    """
    if sys.stdout.isatty():
        Console().print(table)
        return
    stream = _Captured()
    Console(file=stream, width=160).print(table)
    sys.stdout.writelines(f"# {line}".rstrip() + "\n" for line in stream.getvalue().splitlines() if line.strip())


def _encoding() -> str:
    """Return the encoding of the standard output."""
    return (sys.stdout.encoding or "utf-8").lower()


class _Captured(StringIO):
    """A stream that collects text for the standard output and has the same encoding.

    rich draws boxes with ASCII characters if the encoding of a stream is not UTF-8.
    """

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return _encoding()


def _shape(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "scalar"
