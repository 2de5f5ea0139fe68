"""What the command line prints: progress, results, tables and the box around a refusal."""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import StringIO
from typing import Any

from rich import box
from rich.console import Console
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text
from ruamel.yaml import YAML

import eigengraft

from ..training.outcome import Result, Tick


def refuse(title: str, message: str) -> None:
    """A box on standard error; the message is shown as it is, brackets included."""
    Console(stderr=True).print(Panel(Text(message), title=title, title_align="left", border_style="red", expand=False))


@contextmanager
def training_bar(name: str) -> Iterator[Callable[[Tick], None]]:
    """A progress bar on standard error with loss, step time and time left, as the callback of `train`."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[figures]}"),
        TimeRemainingColumn(),
    )
    bar = Progress(*columns, console=Console(stderr=True))
    task = bar.add_task(name, total=None, figures="")
    validation = ""

    def heard(tick: Tick) -> None:
        nonlocal validation
        validation = f"  val {tick.val_loss:.4f}" if tick.val_loss is not None else validation
        figures = f"loss {tick.loss:.4f}{validation}  {tick.step_ms:.1f} ms"
        bar.update(task, completed=tick.step, total=tick.steps, figures=figures)
        bar.start()  # not before there is something to show: a refused experiment has no bar

    try:
        yield heard
    finally:
        bar.stop()


def summary(result: Result) -> str:
    """The result of a run in two lines."""
    if result.diverged or result.val_loss is None:
        head = f"diverged at step {result.steps}: the loss is not finite; a smaller lr may help"
    else:
        accuracy = f", validation accuracy {result.val_accuracy:.4f}" if result.val_accuracy is not None else ""
        head = f"validation loss {result.val_loss:.4f}{accuracy} after {result.steps} steps"
    return (
        f"{head}\n{result.seconds:.1f} s; {result.step_ms:.2f} ms a step, {result.optimizer_ms:.2f} in the optimizer; "
        f"{result.state_bytes_per_parameter:.1f} state bytes for each of {result.parameters} parameters"
    )


def to_yaml(data: Any) -> str:
    """`data` as YAML that reads back equal."""
    stream = StringIO()
    yaml = YAML(typ="safe")
    yaml.default_flow_style = False
    yaml.sort_base_mapping_type_on_output = False  # type: ignore[assignment]
    yaml.width = 120
    yaml.dump(data, stream)
    return stream.getvalue()


def assignment_table(optimizer: eigengraft.Optimizer) -> Table:
    """Which parameter went where and why, its blocks and its state."""
    rows = optimizer.routing_table()
    table = Table(box=box.SIMPLE_HEAD, show_footer=True)
    table.add_column("parameter", footer=f"{len(rows)} parameters", overflow="fold")
    table.add_column("shape")
    table.add_column("route")
    table.add_column("because", overflow="fold")
    table.add_column("blocks", overflow="fold")
    table.add_column("state bytes", footer=f"{optimizer.state_bytes():,}", justify="right")
    for row in rows:
        blocks = ", ".join(f"{count} x {_shape(shape)}" for shape, count in Counter(row.blocks).items())
        cells = (row.name, _shape(row.shape), row.route or "recipe", row.reason, blocks, f"{row.state_bytes:,}")
        table.add_row(*map(Text, cells))
    return table


def storage_table(optimizer: eigengraft.Optimizer) -> Table:
    """What each slot takes, declared and stored, in bytes and for each parameter."""
    parameters = sum(math.prod(row.shape) for row in optimizer.routing_table())
    rows = [row for row in optimizer.slot_sizes() if row.role not in ("count", "failures")]
    declared, stored = sum(row.declared for row in rows), sum(row.stored for row in rows)
    table = Table(box=box.SIMPLE_HEAD, show_footer=True)
    table.add_column("slot", footer="all", overflow="fold")
    table.add_column("role")
    table.add_column("storage")
    table.add_column("declared bytes", footer=f"{declared:,}", justify="right")
    table.add_column("stored bytes", footer=f"{stored:,}", justify="right")
    table.add_column("a parameter", footer=f"{stored / parameters:.2f}", justify="right")
    for row in rows:
        each = f"{row.stored / parameters:.2f}"
        cells = (row.key, row.role, row.storage or "plain", f"{row.declared:,}", f"{row.stored:,}", each)
        table.add_row(*map(Text, cells))
    return table


def write_table(table: Table) -> None:
    """The table on standard output; as YAML comments when that is a file, so that the file can be used as it is."""
    if sys.stdout.isatty():
        Console().print(table)
        return
    stream = StringIO()
    Console(file=stream, width=160).print(table)
    sys.stdout.writelines(f"# {line}".rstrip() + "\n" for line in stream.getvalue().splitlines() if line.strip())


def _shape(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "scalar"
