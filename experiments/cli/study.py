"""The commands about studies: `eigengraft ablate`, `report` and `demo`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape

from eigengraft.errors import RecipeError

from ..files import short_name
from .arguments import Workers, override_argument
from .console import print_table

if TYPE_CHECKING:
    from ..studies.running import PreparedStudy, StudyEvent
    from ..studies.study import Study


def ablate_command(  # noqa: PLR0913  its arguments are the command's options
    study: Annotated[str, typer.Argument(help="a study file (YAML), or the name of a shipped study")],
    overrides: Annotated[
        list[str] | None, override_argument("dotted.path=value on the study: base.steps=50 seeds=[0,1,2]")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="directory of the study; default runs/NAME")] = None,
    workers: Workers = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="list runs, differences, expected time and memory; run nothing")
    ] = False,
    storage: Annotated[
        str | None,
        typer.Option(metavar="URL", help="database where workers without a common directory meet: sqlite:///study.db"),
    ] = None,
    submit: Annotated[
        str | None, typer.Option(metavar="CLUSTER", help="submit workers as jobs through submitit: slurm, or local")
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, help="jobs that --submit makes, of --workers processes each")] = 1,
    option: Annotated[
        list[str] | None, typer.Option(help="name=value of a job, as slurm_partition=gpu or timeout_min=60; repeatable")
    ] = None,
) -> None:
    """Run every cell of a study with every seed; the same command again continues a stopped study.

    Given several times at once, on any machines that see the directory or the database, it shares the runs among them.
    """
    if storage is not None and (dry_run or submit is not None):
        other = "--dry-run, which runs nothing" if dry_run else "--submit, whose jobs see one directory"
        raise RecipeError(f"--storage: a study that is run here is required, got it with {other}")
    if dry_run:
        _print_preview(study, overrides or [], out)
        return
    if submit is None and (option or jobs > 1):
        raise RecipeError(f"{'--option' if option else '--jobs'}: --submit is required beside it, got none")
    if submit is not None:
        from ..studies.study import load_study

        _submit(load_study(study, overrides or []), out, submit, jobs, workers or 1, option or [])
        return
    directory = run_to_end(study, overrides or [], out, workers, storage)
    typer.echo(f"{directory}: all runs complete. For the report: eigengraft report {directory}")


def report_command(
    directory: Annotated[Path, typer.Argument(help="the directory of a study, finished or not, or of runs")],
    figures: Annotated[Path | None, typer.Option(help="also write the figures there, as SVG and PNG")] = None,
    parquet: Annotated[
        bool, typer.Option("--parquet", help="also write runs.parquet and metrics.parquet, all numbers of all runs")
    ] = False,
    baseline: Annotated[
        str | None, typer.Option(metavar="LABEL", help="label to compare with; default the study's, none for several")
    ] = None,
) -> None:
    """Write DIRECTORY/report.html: one self-contained page with curves, tables and differences of recipes.

    Beside it: runs.csv, tables.md and tables.tex. A directory of several studies has a panel for each task, its data
    and the length of runs.
    """
    from ..reports.records import read_records
    from ..reports.report import write_figures, write_report
    from ..reports.tables import write_parquet

    records = read_records(directory, baseline)
    for notice in records.notices:
        typer.echo(f"{notice}.", err=True)
    tables = write_parquet(records, directory) if parquet else []
    typer.echo(write_report(directory, baseline))
    for path in [*tables, *(write_figures(directory, figures, baseline) if figures else [])]:
        typer.echo(path)


def demo_command(
    out: Annotated[Path, typer.Option(help="directory of the study")] = Path("runs/demo"),
    workers: Workers = None,
) -> None:
    """Compare AdamW, Shampoo, SOAP and Muon, each at its tuned learning rate, on three small tasks; write a report."""
    from ..reports.report import write_report

    directory = run_to_end("demo", [], out, workers)
    typer.echo(f"report: {write_report(directory).resolve()}")


def _print_preview(source: str, overrides: list[str], out: Path | None) -> None:
    """Print what a study would run."""
    from ..studies.preview import preview_study
    from ..studies.study import load_study
    from .preview_tables import cells_table, differences_table, sentence

    study = load_study(source, overrides)
    preview = preview_study(study, out or Path("runs") / short_name(study.name))
    for table in (cells_table(preview), *differences_table(preview)):
        print_table(table)
    typer.echo(sentence(preview))


def _submit(study: Study, out: Path | None, cluster: str, jobs: int, workers: int, options: list[str]) -> None:
    """Submit workers of a study and say how to follow them."""
    from ..studies.workers.submission import submit_study

    directory = out or Path("runs") / short_name(study.name)
    submitted = submit_study(study, directory, cluster, jobs, workers, options)
    names = ", ".join(job.job_id for job in submitted)
    typer.echo(f"jobs {names}; logs in {directory / 'jobs'}; for a report at any time: eigengraft report {directory}")


def run_to_end(
    source: str | Study, overrides: list[str], out: Path | None, workers: int | None, storage: str | None = None
) -> Path:
    """Do the remaining runs of a study, those that tune first; name the runs that failed and exit with code 1."""
    from ..reports.records import read_tuned
    from ..studies.running import complete_study
    from ..studies.study import load_study
    from .progress import StudyProgress

    study = load_study(source, overrides)
    directory = out or Path("runs") / short_name(study.name)
    console = Console(stderr=True)
    runs = 0

    @contextmanager
    def watch(prepared: PreparedStudy) -> Iterator[Callable[[StudyEvent], None]]:
        nonlocal runs
        runs += len(prepared.runs)
        if prepared.phase == "tuning" and study.tune is not None:
            console.print(f"tuning {', '.join(study.tune.fields)}: {len(prepared.left)} runs", highlight=False)
        if prepared.phase == "timing":
            console.print(f"timing every cell: {len(prepared.left)} runs", highlight=False)
        with StudyProgress(console, len(prepared.runs), len(prepared.left)) as progress:
            yield progress.on_event

    failed = complete_study(study, directory, workers, watch, storage)
    for one in read_tuned(directory):
        for notice in one.notices:
            console.print(f"{escape(one.cell)}: {notice}", highlight=False, soft_wrap=True)
    if failed:
        for run, reason in failed.items():
            last = reason.strip().splitlines()[-1]
            console.print(f"[red]failed[/red] {escape(run)}: {escape(last)}", highlight=False, soft_wrap=True)
        where = escape(str(directory))
        console.print(f"{len(failed)} of {runs} runs failed; details in {where}/*/*.error.txt")
        raise typer.Exit(1)
    return directory
