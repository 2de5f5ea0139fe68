"""The command `eigengraft bench`: components measured alone, and claims that can fail."""

from __future__ import annotations

import difflib
import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.progress import track
from rich.table import Table
from rich.text import Text

from eigengraft.errors import RecipeError

from .arguments import Imports, override_argument

if TYPE_CHECKING:
    from ..benches import Bench, Finding

KINDS = "roots, bases, statistics, grafting, polar, quantizers, storage, ranks or step"


def bench_command(  # noqa: PLR0913  its arguments are the command's options
    what: Annotated[str, typer.Argument(help=f"{KINDS}; claims; spike; or a YAML file with a bench")],
    overrides: Annotated[
        list[str] | None,
        override_argument("field=value of the bench: sizes=[32,64] dtypes=float64 ridge=1e-5; for claims: their names"),
    ] = None,
    candidates: Annotated[
        list[str] | None,
        typer.Option("--candidate", help="what to measure: a kind or YAML like '{kind: eigh, eps: 1e-6}'; repeatable"),
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda or cuda:N")] = None,
    out: Annotated[Path | None, typer.Option(help="directory for rows and figure; default runs/bench-WHAT")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="smaller sizes and fewer problems: a few seconds")] = False,
    check: Annotated[bool, typer.Option("--check", help="also check the claims about these components")] = False,
    imports: Imports = None,
) -> None:
    """Measure components alone, error against time, and recommend one for this machine; write rows and a figure.

    claims: check published and measured claims instead; the exit code is 1 if one does not hold.

    spike: train with one gradient 1e4 times too large and compare the updates after it; only --out and --quick apply.
    """
    from ..training.imports import import_component

    for source in imports or ():
        import_component(source)
    if what == "claims":
        raise typer.Exit(0 if _check_claims(None, quick, overrides or ()) else 1)
    if what == "spike":
        if overrides or candidates or device or check:
            raise RecipeError("spike: only the options --out and --quick are taken")
        _spike(out or Path("runs") / "bench-spike", quick)
        return
    chosen = _chosen(what, overrides or [], candidates or [], device, quick)
    kind = chosen.declaration()["kind"]
    if check:
        _require_claims(kind)  # before the measurement, which takes long
    _measure(chosen, out or Path("runs") / f"bench-{kind}")
    if check and not _check_claims(kind, quick, ()):
        raise typer.Exit(1)


def _chosen(what: str, overrides: list[str], candidates: list[str], device: str | None, quick: bool) -> Bench:
    """The bench that the command line asks for."""
    from eigengraft.optimizers.recipe.loading import parse_yaml, read_yaml
    from eigengraft.optimizers.recipe.overrides import apply_overrides

    from ..benches import Bench, load_bench

    given: dict[str, Any] = {}
    if Path(what).suffix in (".yaml", ".yml"):
        data = read_yaml(what)
        if not isinstance(data, Mapping) or "kind" not in data:
            raise RecipeError(f"{what}: a mapping with 'kind', one of {KINDS}, is required")
        given = dict(data)
    kind = str(given.pop("kind", what))
    member = Bench.members.get(kind)
    if member is None or not issubclass(member, Bench):
        known = [*Bench.members, "spike", "claims"]
        near = difflib.get_close_matches(kind, known, n=1, cutoff=0.5)
        hint = f"; did you mean '{near[0]}'?" if near else ""
        raise RecipeError(f"bench: one of {', '.join(known)} is required, got '{kind}'{hint}")
    if candidates:
        given[member.candidate_field] = [parse_yaml(text, f"--candidate '{text}'") for text in candidates]
    if device is not None:
        given["device"] = device
    return load_bench(kind, apply_overrides(given, overrides, parse_yaml), quick)


def _measure(chosen: Bench, directory: Path) -> None:
    from ..benches import write_rows
    from ..benches.common.figure import write_figure
    from ..files import make_directory, write_text

    _require_directory(directory)
    device = chosen.target_device()  # before anything is written
    make_directory(directory)
    cells = track(
        chosen.cell_by_cell(), "measuring", total=chosen.cells(), console=Console(stderr=True), transient=True
    )
    rows: list[Any] = []
    for cell in cells:
        rows += cell
        write_rows(rows, directory / "rows.jsonl")  # a bench that is stopped leaves what it has measured
    if not rows:
        raise RecipeError("bench: a candidate that takes one of these problems is required; nothing to measure")
    write_figure(chosen.panels(rows), directory / "figure.svg")
    where = _environment(device)
    record = {"bench": chosen.declaration(), "environment": where}
    write_text(directory / "bench.json", json.dumps(record, indent=2) + "\n")
    summary = chosen.summary(rows)
    _print(_table(summary.title, summary.columns, summary.lines))
    name = where["device"] if device.type == "cuda" else where["cpu"]
    typer.echo(f"on {chosen.device} ({name}, {chosen.threads} thread{'s' if chosen.threads > 1 else ''}):")
    for line in chosen.advice(rows):
        typer.echo(f"  {line}")
    typer.echo(f"{len(rows)} rows: {directory / 'rows.jsonl'}; figure: {directory / 'figure.svg'}")


def _require_directory(path: Path) -> None:
    if path.exists() and not path.is_dir():
        raise RecipeError(f"--out: a directory is required, got the file '{path}'")


def _spike(directory: Path, quick: bool) -> None:
    """Train, print the ratios, write rows and figure."""
    from ..benches.spike import run as spike

    _require_directory(directory)
    cells = track(spike.spike_grid(quick), "training", console=Console(stderr=True), transient=True)
    rows = [spike.spike_run(**cell) for cell in cells]
    spike.write_results(rows, directory)
    columns = ("learning rate", "transport", "largest update after / before", "/ median before")
    _print(_table("One gradient 1e4 times too large", columns, spike.ratio_lines(rows)))
    typer.echo(f"{len(rows)} rows: {directory / 'spike.jsonl'}; figure: {directory / 'spike.svg'}")


def _environment(device: Any) -> dict[str, Any]:
    from ..benches.problems.recorded import FILE
    from ..tasks import Fingerprint
    from ..training.environment import describe_environment

    content = FILE.read_bytes()
    data = Fingerprint("synthetic matrices and recorded factors", len(content), hashlib.sha256(content).hexdigest())
    return describe_environment(data, device)


def _require_claims(kind: str) -> None:
    from ..benches.claims.registry import known_claims

    if not known_claims(kind):
        benches = ", ".join(sorted({claim.bench for claim in known_claims().values()}))
        raise RecipeError(f"--check: a bench with claims ({benches}) is required, got '{kind}'")


def _check_claims(kind: str | None, quick: bool, names: Iterable[str]) -> bool:
    """Verify claims and print what was measured and what was expected; return whether all hold."""
    from ..benches import find_claims

    findings = list(find_claims(kind, quick, list(names)))
    for finding in findings:
        _print_finding(finding)
    wrong = [finding.name for finding in findings if not finding.passed]
    typer.echo(
        f"{len(findings) - len(wrong)} of {len(findings)} claims hold" + (f"; not: {', '.join(wrong)}" * bool(wrong))
    )
    return not wrong


def _print_finding(finding: Finding) -> None:
    typer.echo(f"{finding.name}: {'holds' if finding.passed else 'DOES NOT HOLD'}")
    typer.echo(f"  {finding.statement}\n  Source: {finding.source}")
    lines = [(r.name, f"{r.value:.4g}", r.expected, "" if r.passed else "NOT AS EXPECTED") for r in finding.results]
    _print(_table("", ("", "measured", "expected", ""), lines))


def _table(title: str, columns: Iterable[str], lines: Iterable[tuple[str, ...]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, title=title or None, title_justify="left", title_style="bold")
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right", overflow="fold")
    for line in lines:
        table.add_row(*map(Text, line))
    return table


def _print(table: Table) -> None:
    console = Console()
    if not console.is_terminal:  # a file has no width: one line for each row
        console = Console(width=max(console.width, 200))
    console.print(table)
