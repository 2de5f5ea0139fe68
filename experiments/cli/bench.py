"""The command `eigengraft bench`: components measured alone."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from eigengraft.errors import RecipeError, counted, did_you_mean

from ..studies.progress import Meter
from .arguments import Imports, override_argument
from .console import print_table

if TYPE_CHECKING:
    from ..benches import Bench, Row


def bench_command(  # noqa: PLR0913  its arguments are the command's options
    what: Annotated[
        str,
        typer.Argument(
            help="bench: roots, bases, statistics, polar, quantizers, budget, storage, step, or a YAML file"
        ),
    ],
    overrides: Annotated[
        list[str] | None,
        override_argument("field=value of the bench: sizes=[32,64] dtypes=float64 ridge=1e-5"),
    ] = None,
    candidates: Annotated[
        list[str] | None,
        typer.Option(
            "--candidate",
            help="candidate to measure in addition to those of the bench: a kind, or YAML such as '{kind: eigh}'; "
            "repeatable",
        ),
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(
            "--only", help="candidate to measure in place of those of the bench, in the form of --candidate; repeatable"
        ),
    ] = None,
    checkpoint: Annotated[
        str | None,
        typer.Option("--from", help="run, checkpoint of a run, or saved optimizer state, whose factors are measured"),
    ] = None,
    record: Annotated[
        str | None, typer.Option(help="run directory or experiment file whose gradients are recorded and measured")
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda or cuda:N")] = None,
    out: Annotated[Path | None, typer.Option(help="directory of rows and figure; default runs/bench-WHAT")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="smaller sizes and fewer problems: a few seconds")] = False,
    imports: Imports = None,
) -> None:
    """Measure the error and the time of components alone, recommend one for this machine, write rows and a figure."""
    options = {"checkpoint": checkpoint, "record": record, "device": device}
    given = {name: value for name, value in options.items() if value is not None}
    chosen = _chosen(what, overrides or [], given, only or [], candidates or [], quick)
    name = chosen.declaration()["kind"] if Path(what).suffix else what
    _measure(chosen, out or Path("runs") / f"bench-{name}")


def _chosen(
    what: str, overrides: list[str], options: dict[str, str], only: list[str], more: list[str], quick: bool
) -> Bench:
    """Return the bench that the command line declares.

    what: first argument of the command: the name of a bench, or a YAML file.
    options: values of the fields that have an option of their own, such as `--device`.
    only: declarations of candidates that replace the candidates of the bench.
    more: declarations of candidates that are measured in addition.
    quick: True for the smaller sizes and fewer problems of `--quick`.
    """
    from eigengraft.optimizers.recipe.loading import parse_yaml
    from eigengraft.optimizers.recipe.overrides import apply_overrides

    from ..benches import Bench, load_bench, read_bench

    given = read_bench(what)
    kind = str(given.pop("kind"))
    member = Bench.members.get(kind)
    if member is None or not issubclass(member, Bench):
        hint = did_you_mean(kind, Bench.members, 0.5)
        raise RecipeError(f"bench: '{kind}' is not a bench{hint} (the benches are {', '.join(Bench.members)})")
    for name, option in (("checkpoint", "--from"), ("record", "--record")):
        if name in options and name not in member.model_fields:
            having = ", ".join(kind for kind, other in Bench.members.items() if name in other.model_fields)
            raise RecipeError(
                f"{option} cannot be combined with bench {what}, which reads no matrices from files; use {having}"
            )
    given |= options
    if only:
        given[member.candidate_field] = [parse_yaml(text, f"--only '{text}'") for text in only]
    beside = [parse_yaml(text, f"--candidate '{text}'") for text in more]
    return load_bench(kind, apply_overrides(given, overrides, parse_yaml), quick, beside)


def _measure(chosen: Bench, directory: Path) -> None:
    from ..benches import write_rows
    from ..benches.figure import draw_panels
    from ..benches.view import lay_out
    from ..files import make_directory, write_text
    from ..reports.figures import save_figure

    if directory.exists() and not directory.is_dir():
        raise RecipeError(f"--out: '{directory}' is a file; give a directory")
    device = chosen.target_device()  # before anything is written
    make_directory(directory)
    rows: list[Row] = []
    with Meter() as meter:
        number = chosen.cells()
        bar = meter.add("measuring", number)
        for done, cell in enumerate(chosen.cell_by_cell(), start=1):
            rows += cell
            meter.update(bar, done, f"{done} of {number} cells")
            write_rows(rows, directory / "rows.jsonl")  # a bench that is stopped keeps the rows that it has measured
    _require_measurement(rows)
    save_figure(draw_panels(chosen.panels(), rows), directory / "figure.svg")
    where = _environment(device)
    columns = {name: {"meaning": column.meaning, "unit": column.unit} for name, column in chosen.columns.items()}
    record = {"bench": chosen.declaration(), "columns": columns, "environment": where}
    write_text(directory / "bench.json", json.dumps(record, indent=2) + "\n")
    table = chosen.table()
    typer.secho(table.title, bold=True)
    heads, lines = lay_out(table, rows)
    print_table(heads, lines, numbers=len(heads) - 1)
    name = where["device"] if device.type == "cuda" else where["cpu"]
    place = f"{chosen.device} ({name}, {chosen.threads} thread{'s' if chosen.threads > 1 else ''})"
    typer.echo(f"on {place}:")
    for line in chosen.advice(rows):
        typer.echo(f"  {line}")
    typer.echo(f"{counted(len(rows), 'row')}: {directory / 'rows.jsonl'}; figure: {directory / 'figure.svg'}")


def _require_measurement(rows: Sequence[Row]) -> None:
    """Raise RecipeError if no row has a measurement. The error has the reasons of up to three candidates."""
    if not all(row["problem"] for row in rows):
        return
    reasons = list(dict.fromkeys(f"{row['candidate']}: {row['problem']}" for row in rows))
    why = "; ".join(reasons[:3]) or "there are no matrices of these sizes"
    raise RecipeError(f"bench: there is nothing to measure ({why}); give another candidate or another problem")


def _environment(device: Any) -> dict[str, Any]:
    from ..benches.matrices import FILE
    from ..tasks import Fingerprint
    from ..training.environment import describe_environment

    content = FILE.read_bytes()
    data = Fingerprint("synthetic matrices and recorded factors", len(content), hashlib.sha256(content).hexdigest())
    return describe_environment(data, device)
