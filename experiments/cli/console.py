"""Output of the command line: results, tables, YAML and the box around an error."""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from io import TextIOWrapper
from typing import TYPE_CHECKING, Any, Literal

from rich.box import MARKDOWN, SIMPLE_HEAD
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
    """Return two lines that describe the result of a run. A third line is added if the run did not diverge, but its
    training loss ended far above its first value (`Result.diagnosis`).
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

    return write_yaml(data, (sys.stdout.encoding or "utf-8").lower().startswith("utf"))


def print_routing(optimizer: eigengraft.Optimizer) -> None:
    """Print a table with a row for each parameter, as comments of YAML.

    A row says which route of the recipe (rule for some parameters) applies and why, into which blocks the parameter is
    split, and how many bytes its state has.
    """
    rows = []
    for row in optimizer.routing_table():
        blocks = ", ".join(f"{count} x {_shape(shape)}" for shape, count in Counter(row.blocks).items())
        scaled = f"lr x {', '.join(f'{factor:.3g}' for factor in row.width_factors)}" if row.width_factors else ""
        because = "; ".join(filter(None, (row.reason, row.view, scaled, *row.left_out, *row.fallbacks)))
        rows.append((row.name, _shape(row.shape), row.route or "recipe", because, blocks, f"{row.state_bytes:,}"))
    heads = ("parameter", "shape", "route", "because", "blocks", "state bytes")
    footer = (counted(len(rows), "parameter"), "", "", "", "", f"{optimizer.state_bytes():,}")
    print_table(heads, rows, footer=footer, numbers=1, form="comment")


def print_storage(optimizer: eigengraft.Optimizer) -> None:
    """Print a table with a row for each slot, as comments of YAML.

    A row has the bytes of the slot in the dtype in which it is computed, the bytes in its storage format (stored
    bytes), and the stored bytes divided by the number of entries of all parameters. If slots are offloaded, a column
    says where each slot is stored between steps.
    """
    parameters = sum(math.prod(row.shape) for row in optimizer.routing_table())
    slots = [row for row in optimizer.slot_sizes() if row.role not in ("count", "failures")]
    offloaded = optimizer.offloaded_bytes()

    def sizes(declared: int, stored: int) -> tuple[str, ...]:
        return f"{declared:,}", f"{stored:,}", f"{stored / parameters:.2f}"

    within = [", ".join(f"{place} {size:,}" for place, size in offloaded.items())] if offloaded else []
    rows = []
    for row in slots:
        location = [row.location or "device"] if offloaded else []
        texts = (row.key, row.role, row.storage or "plain", *location)
        rows.append((*texts, *sizes(row.declared, row.stored)))
    heads = ("slot", "role", "storage", *["in" for _ in within])
    footer = ("all", "", "", *within, *sizes(sum(row.declared for row in slots), sum(row.stored for row in slots)))
    of_numbers = ("declared bytes", "stored bytes", "bytes per parameter")
    print_table((*heads, *of_numbers), rows, footer=footer, numbers=len(of_numbers), form="comment")


WIDE, PAGE = 160, 120
"""Least width of a table, in characters, if it is printed to a file or a pipe. A table with the option `expand` has the
least width PAGE, and any other table has WIDE."""
_TEXT = 42
"""A limit on the width of columns of texts in a table with the option `expand`, in characters. The last column of texts
is at least this wide, and columns between it and the first column are at most this wide."""
_DIGITS = 7
"""Least width of a column of numbers in characters. Columns of several tables are then at the same place."""


def print_table(
    heads: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    footer: Sequence[str] = (),
    numbers: int = 0,
    expand: bool = False,
    form: Literal["text", "comment", "markdown"] = "text",
) -> None:
    """Print a table of texts on standard output. Texts that are too long are continued on further lines.

    footer: texts below the columns; empty: no footer.
    numbers: number of columns at the end that have numbers, which are aligned to the right.
    expand: if True, the table fills the width of the terminal, or at least `PAGE` characters in a file or a pipe.
    form: "text": a plain table. "comment": the same, but in a file or a pipe each line is a comment of YAML, and texts
        of the first column, such as paths of fields, are not continued on further lines. "markdown": a table in
        Markdown.
    """
    markdown = form == "markdown"
    frame: dict[str, Any] = {"box": MARKDOWN if markdown else SIMPLE_HEAD, "show_edge": markdown, "pad_edge": markdown}
    table = Table(**frame, padding=(0, 1, 0, int(markdown)), show_footer=bool(footer), expand=expand)
    for place, head in enumerate(heads):
        own: dict[str, Any] = {"justify": "right", "min_width": _DIGITS} if place >= len(heads) - numbers else {}
        last = len(heads) - numbers - 1
        if expand and place == last:
            own |= {"ratio": 1, "min_width": _TEXT}  # the last column of texts gets all free width
        elif expand and 0 < place < last:
            own["max_width"] = _TEXT
        own["no_wrap"] = form == "comment" and place == 0
        table.add_column(Text(head), Text(footer[place]) if footer else "", overflow="fold", **own)
    for row in rows:
        table.add_row(*map(Text, row))
    console, in_terminal = Console(), sys.stdout.isatty()
    if markdown or not in_terminal:
        console = Console(width=max(console.width, PAGE if expand else WIDE))
    if in_terminal:
        console.print(*[""] * (form == "comment"), table, sep="\n")
        return
    with console.capture() as captured:  # boxes are of characters that the standard output can encode
        console.print(table)
    before = "# " if form == "comment" else ""
    sys.stdout.writelines(f"{before}{line}".rstrip() + "\n" for line in captured.get().splitlines() if line.strip())


def _shape(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "scalar"
