"""The commands `eigengraft ablate`, `report`, `doctor` and `demo`, with tables and progress bars of runs."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console
from rich.markup import escape

from eigengraft.errors import RecipeError, counted

from ..files import files_named, short_name
from ..reports.number_format import format_loss
from ..studies.progress import Meter, study_progress
from .arguments import Imports, Workers, override_argument
from .console import print_table

if TYPE_CHECKING:
    from rich.progress import TaskID

    from ..doctor import Diagnosis
    from ..studies.preview import StudyPreview
    from ..studies.running import PreparedStudy, StudyEvent
    from ..studies.study import Study
    from ..training.outcome import Tick


def ablate_command(  # noqa: PLR0913  its arguments are the command's options
    study: Annotated[
        str, typer.Argument(help="a study file (YAML), the name of a shipped study, or an experiment file with an axis")
    ],
    overrides: Annotated[
        list[str] | None,
        override_argument("dotted.path=value on the study: base.steps=50 seeds=[0,1,2]; lr=0.01,0.1 adds an axis"),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="directory of the study; default runs/NAME")] = None,
    workers: Workers = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="list runs, differences, expected time and memory; run nothing")
    ] = False,
    storage: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="database through which workers without a common directory exchange runs: sqlite:///study.db",
        ),
    ] = None,
    submit: Annotated[
        str | None, typer.Option(metavar="CLUSTER", help="submit workers as jobs through submitit: slurm, or local")
    ] = None,
    jobs: Annotated[
        int, typer.Option(min=1, help="number of jobs that --submit makes; each has --workers processes, or 1")
    ] = 1,
    option: Annotated[
        list[str] | None,
        typer.Option(help="name=value for submitit's jobs, such as slurm_partition=gpu or timeout_min=60; repeatable"),
    ] = None,
) -> None:
    """Run every cell of a study with every seed; the same command again continues a stopped study.

    Several of these commands at the same time, on all machines that share the directory or the database, divide the
    runs among them.
    """
    for name, value in (("--storage", storage), ("--submit", submit), ("--workers", workers)):
        if dry_run and value is not None:
            raise RecipeError(f"{name} cannot be combined with --dry-run, which runs nothing; remove one of the two")
    if storage is not None and submit is not None:
        raise RecipeError(
            "--storage cannot be combined with --submit, whose jobs share a directory; remove one of the two"
        )
    if submit is None and (option or jobs > 1):
        raise RecipeError(
            f"{'--option' if option else '--jobs'}: has no effect without --submit; add --submit, or remove the option"
        )
    from ..studies.study import load_study

    loaded = load_study(study, overrides)
    directory = out or Path("runs") / short_name(loaded.name)
    if dry_run:
        _print_preview(loaded, directory)
        return
    if submit is not None:
        _submit(loaded, directory, submit, jobs, workers or 1, option or [])
        return
    run_to_end(loaded, directory, workers, storage)
    typer.echo(f"{directory}: all runs complete. For the report: eigengraft report {directory}")
    from ..doctor import diagnose_study

    diagnoses = diagnose_study(directory)
    if sick := [one for one in diagnoses if one]:
        kinds = ", ".join(dict.fromkeys(finding.kind for one in sick for finding in one.findings))
        unchecked = any(one.notes for one in diagnoses)
        runs = f"{'at least ' if unchecked else ''}{len(sick)} of {counted(len(diagnoses), 'run')}"
        checks = ", and checks the data of all" if unchecked else ""
        typer.echo(f"something went wrong in {runs}: {kinds}; `eigengraft doctor {directory}` lists them{checks}")


def report_command(  # noqa: PLR0913  its arguments are the command's options
    directory: Annotated[Path, typer.Argument(help="the directory of a study, finished or not, or of runs")],
    figures: Annotated[Path | None, typer.Option(help="folder for copies of the figures, as SVG and PNG")] = None,
    pdf: Annotated[bool, typer.Option("--pdf", help="write the figures of --figures as PDF too")] = False,
    width: Annotated[float, typer.Option(min=1, max=20, help="width of the figures in inches")] = 4.8,
    x: Annotated[
        list[str] | None, typer.Option("--x", metavar="steps|seconds|tokens|flops", help="horizontal axis; repeatable")
    ] = None,
    log: Annotated[
        Literal["auto", "none", "x", "y", "xy"], typer.Option(help="logarithmic axes of the curves over a run")
    ] = "auto",
    only: Annotated[
        list[str] | None,
        typer.Option(
            metavar="LABEL", help="report only runs of LABEL, AXIS=LABEL or a pattern such as soap*; repeatable"
        ),
    ] = None,
    labels: Annotated[
        list[str] | None, typer.Option(metavar="LABEL=TEXT", help="text that replaces a label; repeatable")
    ] = None,
    parquet: Annotated[
        bool, typer.Option("--parquet", help="also write runs.parquet and metrics.parquet, all numbers of all runs")
    ] = False,
    baseline: Annotated[
        str | None,
        typer.Option(
            metavar="LABEL",
            help="label to compare with, of any axis; default: the study's baseline; for several studies: no baseline",
        ),
    ] = None,
) -> None:
    """Write DIRECTORY/report.html: one self-contained page with curves, tables and differences of recipes.

    Also writes runs.csv, tables.md and tables.tex there. With --only, all these files are written to
    DIRECTORY/only-LABELS, so that the files about all runs are not replaced. The report of several studies has a
    section for each combination of task, data and length of runs.
    """
    from ..reports.report import Report
    from ..reports.tables import write_parquet

    if pdf and figures is None:
        raise RecipeError("--pdf: has no effect without --figures FOLDER; add it, or remove --pdf")
    texts = dict(_split_label(text) for text in labels or ())
    report = Report(directory, baseline, only or (), texts, tuple(x or Report.x), width, log)  # type: ignore[arg-type]
    for notice in report.records.notices:
        typer.echo(f"{notice}.", err=True)
    tables = write_parquet(report.records, report.folder) if parquet else []
    typer.echo(report.write())
    formats = ("svg", "png", *(["pdf"] if pdf else []))
    for path in [*tables, *(report.save_figures(figures, formats) if figures else [])]:
        typer.echo(path)
    if figures and report.footnote:
        typer.echo(report.footnote, err=True)


def doctor_command(
    run: Annotated[
        Path, typer.Argument(help="the directory of a run, finished, stopped or still training, or of a study")
    ],
    as_json: Annotated[bool, typer.Option("--json", help="print findings and notes as JSON")] = False,
    imports: Imports = None,
) -> None:
    """Say what went wrong in a run: the first wrong value, its step and layer, the usual cause, and what to do.

    For a study, list the runs in which something was found. Exit code 0: nothing was found. 1: something was found.
    2: the directory has no run.
    """
    from ..doctor import diagnose, diagnose_all

    if (run / "config.json").is_file() or not any(files_named("config.json", run)):
        diagnoses = [diagnose(run)]
        typer.echo(json.dumps(diagnoses[0].records(), indent=2) if as_json else diagnoses[0])
    else:
        diagnoses = diagnose_all(run)
        records = [diagnosis.records() for diagnosis in diagnoses]
        if as_json:
            typer.echo(json.dumps(records, indent=2))
        else:
            _print_summary(run, diagnoses)
    if any(diagnoses):
        raise typer.Exit(1)


def _print_summary(directory: Path, diagnoses: Sequence[Diagnosis]) -> None:
    """Print a line about all runs, or trials of a search, and a table of those in which something was found."""
    from ..reports.records import TUNING

    sick = [one for one in diagnoses if one]
    unfinished = sum(bool(one.unfinished) for one in diagnoses)
    searched = all(TUNING in one.directory.relative_to(directory).parts for one in diagnoses)
    head = (
        f"{directory}: {'no run has started, but trials of the search have; ' if searched else ''}something was found"
    )
    head += f" in {len(sick)} of {counted(len(diagnoses), 'trial' if searched else 'run')}"
    typer.echo(f"{head}; {unfinished} of them unfinished" if unfinished else head)
    if partly := [one for one in diagnoses if one.notes]:
        typer.echo(f"not checked in {counted(len(partly), 'run')}: {partly[0].notes[0]}")
    if not sick:
        return
    rows = []
    for one in sick:
        first, others = one.findings[0], len(one.findings) - 1
        kind = f"{first.kind}{f' and {others} more' if others else ''}"
        name = one.directory.relative_to(directory).as_posix()
        rows.append((name, kind, "" if first.step is None else str(first.step), first.layer))
    typer.echo()
    print_table(("run", "finding", "step", "layer"), rows)
    typer.echo(f"\n`eigengraft doctor {sick[0].directory}` says what was seen in the first, and what to do")


def _split_label(text: str) -> tuple[str, str]:
    """Return the label and the text of an option `LABEL=TEXT`. The label may contain `=`, the text may not."""
    label, equals, shown = text.rpartition("=")
    if not equals or not label or not shown:
        raise RecipeError(f"--labels '{text}': the form is LABEL=TEXT")
    return label, shown


def import_command(  # noqa: PLR0913  its arguments are the command's options
    file: Annotated[Path, typer.Argument(help="a CSV or JSONL file with a row for each logged step")],
    out: Annotated[
        Path, typer.Option(help="directory of the run; runs in NAME/seed-0, NAME/seed-1 are seeds of one method")
    ],
    task: Annotated[str, typer.Option(help="name of the task and its data; only runs with the same name are compared")],
    columns: Annotated[
        list[str] | None,
        typer.Argument(
            help="column of the run=its name in the file: loss=train/loss val_loss=eval/loss step=global_step"
        ),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="seed of the run; default: K of an --out NAME/seed-K, else 0")
    ] = None,
    lr: Annotated[float | None, typer.Option(help="peak of the learning rate")] = None,
    recipe: Annotated[str | None, typer.Option(help="name of the optimizer")] = None,
) -> None:
    """Make a run directory from the log of another training loop, for reports. Rows of one step are joined."""
    from ..run_log import import_run

    pairs = [text.partition("=") for text in columns or ()]
    for here, equals, there in pairs:
        if not here or not equals or not there:
            raise RecipeError(f"'{here}{equals}{there}': the form is column=NAME, as in loss=train/loss")
    names = {here: there for here, _, there in pairs}
    place = import_run(file, out, task, names, seed=seed, lr=lr, recipe=recipe)
    typer.echo(f"{place}; for a report: eigengraft report {place.parent}")


def demo_command(
    overrides: Annotated[
        list[str] | None, typer.Argument(help="field=value of the study: seeds=[0] does a third of its runs")
    ] = None,
    out: Annotated[Path, typer.Option(help="directory of the study")] = Path("runs/demo"),
    workers: Workers = None,
) -> None:
    """Compare AdamW, Shampoo, soap_fitted and Muon at their tuned learning rates, on three small tasks; write a report.

    The quickest task is run with the first seed first, then all tasks with the first seed, then all other seeds. After
    each of the first two parts, a report is written, and the time of all other runs is estimated from the finished runs
    and printed. With `seeds=[0]` the command ends after the first seed.
    """
    from ..reports.report import Report
    from ..studies.preview import preview_study
    from ..studies.study import load_study

    study = load_study("demo", overrides)
    preview = preview_study(study, out)
    for part in _parts(study, out):
        typer.echo(f"{sentence(preview)}.")
        try:
            run_to_end(part, out, workers)
        finally:  # a report is written even if the demo is interrupted
            preview = preview_study(study, out)
            if complete := sum(cell.complete for cell in preview.cells):
                typer.echo(f"report of {counted(complete, 'run')}: {Report(out).write().resolve()}")


def _parts(study: Study, directory: Path) -> list[Study]:
    """Return studies of growing size, to be run one after the other in place of a study with an axis `task`.

    They are (1) the quickest task with the first seed, (2) all tasks with the first seed and (3) the whole study. Study
    (1) or (2) is left out if `directory` already has all of its runs.
    """
    from ..studies.preview import preview_study

    first, times = study.replace(seeds=study.seeds[:1]), dict[str, float]()
    for cell in preview_study(first, directory).cells:
        task = cell.labels.get("task", "")
        times[task] = times.get(task, 0.0) + cell.seconds
    others = sorted(times, key=times.__getitem__)[1:]
    quick = first.replace(exclude=(*study.exclude, {"task": tuple(others)})) if others else study
    left = [part for part in (quick, first) if part != study and preview_study(part, directory).runs]
    return [*left, study]


def _print_preview(study: Study, directory: Path) -> None:
    """Print the runs that a study would do."""
    from ..studies.preview import preview_study

    preview = preview_study(study, directory)
    _print_cells(preview)
    _print_differences(preview)
    for text in (*preview.comparisons, sentence(preview)):
        typer.echo(text)


def _submit(study: Study, directory: Path, cluster: str, jobs: int, workers: int, options: list[str]) -> None:
    """Submit workers of a study as jobs, and print how to follow them."""
    from ..studies.running import submit_study

    submitted = submit_study(study, directory, cluster, jobs, workers, options)
    names = ", ".join(job.job_id for job in submitted)
    typer.echo(f"jobs {names}; logs in {directory / 'jobs'}; for a report at any time: eigengraft report {directory}")


def run_to_end(study: Study, directory: Path, workers: int | None, storage: str | None = None) -> None:
    """Do the remaining runs of a study and its searches. If runs failed, print them and exit with code 1.

    workers: number of worker processes. None: one for each core.
    storage: URL of the database through which workers exchange runs. None: they exchange runs through the directory.
    """
    from ..reports.records import failure_lines, read_records, read_tuned
    from ..studies.running import available_cores, complete_study

    console = Console(stderr=True)
    runs = 0

    def watch(prepared: PreparedStudy) -> AbstractContextManager[Callable[[StudyEvent], None]]:
        nonlocal runs
        runs += len(prepared.runs)
        return study_progress(prepared, study, console, workers or available_cores())

    failed = complete_study(study, directory, workers, watch, storage)
    for one in read_tuned(directory):
        for notice in one.notices:
            console.print(f"{escape(one.cell)}: {notice}", highlight=False, soft_wrap=True)
    if not failed and (untuned := read_records(directory).untuned):
        console.print(f"{escape(untuned)}.", highlight=False, soft_wrap=True)
    if failed:
        for line in failure_lines(failed):
            console.print(f"[red]failed[/red] {escape(line)}", highlight=False, soft_wrap=True)
        where = escape(str(directory))
        console.print(f"{len(failed)} of {runs} runs failed; details in {where}/*/*.error.txt")
        raise typer.Exit(1)


@contextmanager
def training_progress(name: str) -> Iterator[Callable[[Tick], None]]:
    """Show the progress of a run with loss, step time and time left (see `Meter`). Yield the function that `train`
    calls after every step.

    name: name of the run, which is printed before its bar.
    """
    validation = ""
    bars: list[TaskID] = []

    def on_tick(tick: Tick) -> None:
        nonlocal validation
        validation = f"  val {format_loss(tick.val_loss, 4)}" if tick.val_loss is not None else validation
        if not bars:  # only at the first tick, so that an invalid experiment shows no bar
            if tick.step > 1:
                meter.console.print(f"{name}: continues from step {tick.step - 1}", markup=False, highlight=False)
            bars.append(meter.add(name, tick.steps))
        text = f"step {tick.step}/{tick.steps}  loss {format_loss(tick.loss, 4)}{validation}  {tick.step_ms:.1f} ms"
        meter.update(bars[0], tick.step, text)

    with Meter() as meter:
        yield on_tick


def _print_cells(preview: StudyPreview) -> None:
    """Print a row for each cell: labels, runs, their expected time, and bytes of state."""
    axes = preview.cells[0].labels
    numbers = ("runs", "complete", "timed", "tuning, at most", "seconds a run, about", "state bytes", "parameters")
    rows = []
    for cell in preview.cells:
        counts = (cell.runs, cell.complete, cell.timing, cell.tuning)
        found = (*counts, round(cell.seconds), cell.state_bytes, cell.parameters)
        rows.append((*cell.labels.values(), *(f"{number:,}" for number in found)))
    print_table((*axes, *numbers), rows, numbers=len(numbers), form="comment")


def _print_differences(preview: StudyPreview) -> None:
    """Print a table for each compared axis. A row has the values of one field that differs between labels of the axis,
    with a column for each label.
    """
    from ..reports.recipe_diff import diff_recipes

    for panels in preview.configs.values():
        table = diff_recipes(panels)
        if table.rows:
            rows = [[cell.text for cell in row] for row in table.rows]
            print_table(table.heads, rows, form="comment")


def _duration(seconds: float) -> str:
    """Return a time as text: in seconds below 100 s, in minutes below 100 minutes, and in hours and minutes above."""
    if seconds < 100:
        return counted(math.ceil(seconds), "second")
    if round(seconds / 60) < 100:
        return counted(round(seconds / 60), "minute")
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours}:{minutes:02d} hours"


def sentence(preview: StudyPreview) -> str:
    """Return one sentence about the runs that are not done yet."""
    at_most = "at most " if any(cell.tuning for cell in preview.cells) else ""
    runs = f"{preview.name}: {at_most}{counted(preview.runs, 'run')} in {counted(len(preview.cells), 'cell')}"
    timed = "; steps of other cells than the baseline's follow from the timed runs"
    source = f"by the time of {counted(preview.measured, 'finished run')}"
    if not preview.measured:
        source = f"guessed from operations for an idle core of a common desktop{_load()}"
    return (
        f"{runs}, about {_duration(preview.seconds)} on one core besides the start of processes, {source}"
        f"{timed if any(cell.timing for cell in preview.cells) else ''}"
    )


def _load() -> str:
    """Return a clause that says how many processes share each core. Return "" if these are fewer than 1.5, or if the
    operating system does not report them.
    """
    from ..studies.running import available_cores

    share = os.getloadavg()[0] / available_cores() if hasattr(os, "getloadavg") else 0.0
    return f", of which this machine has none: {share:.0f} processes share each core" if share >= 1.5 else ""
