"""The commands `eigengraft reproduce` and `eigengraft track`: studies of papers, and a benchmark of recipes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from eigengraft.errors import RecipeError

from ..files import make_directory, write_text
from .arguments import Imports, Workers
from .study import run_to_end

if TYPE_CHECKING:
    from ..reproduction.claims import PaperClaims


def reproduce_command(
    folder: Annotated[Path, typer.Argument(help="a folder with claims.yaml, such as papers/soap_2024")],
    check: Annotated[
        bool, typer.Option("--check", help="run and write nothing: check claims and pages against the folder's results")
    ] = False,
    write: Annotated[
        bool, typer.Option("--write", help="run nothing: write the pages of the folder again, from its results")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="directory of the runs; default runs/NAME of the folder")] = None,
    workers: Workers = None,
) -> None:
    """Run the studies of a paper, store the results in its folder, renew its pages and print which claims hold.

    The same command again continues a stopped one. The exit code is 1 if a claim fails that the folder expects to hold,
    or if --check finds a page that differs from the results.
    """
    from ..reproduction.claims import load_claims
    from ..reproduction.pages import paper_pages

    _require_effect(check, write, out, workers)
    claims = load_claims(folder)
    if not check and not write:
        _run_studies(folder, claims, out or Path("runs") / folder.resolve().name, workers)
    stale = _outdated(paper_pages(folder), renew=not check)
    wrong = _print_verdicts(folder, claims)
    for page in stale:
        typer.echo(f"{page}: differs from the results; write it with --write")
    if wrong or stale:
        typer.echo(f"expected to hold, but do not: {', '.join(wrong)}" if wrong else "pages differ from the results")
        raise typer.Exit(1)


def _require_effect(check: bool, write: bool, out: Path | None, workers: int | None) -> None:
    """Raise RecipeError for options that exclude each other, and for options about runs if the command runs nothing."""
    if check and write:
        raise RecipeError("--check cannot be combined with --write; give one")
    for name, value in {"--out": out, "--workers": workers}.items():
        if value is not None and (check or write):
            raise RecipeError(
                f"{name} cannot be combined with {'--check' if check else '--write'}, which runs nothing; remove one "
                "of the two"
            )


def _run_studies(folder: Path, claims: PaperClaims, out: Path, workers: int | None) -> None:
    """Run every study of a folder to its end under `out`, and write its results into the folder as soon as it ends."""
    from ..reproduction.claims import collect_results, keep_results
    from ..studies.study import load_study

    for name in claims.studies:
        run_to_end(load_study(folder / f"{name}.yaml"), out / name, workers)
        keep_results(collect_results(out / name), folder / "results" / f"{name}.json")


def _outdated(pages: Mapping[Path, str], renew: bool) -> list[str]:
    """Return the paths of files that are missing or differ from their generated text.

    pages: path of a file -> its generated text.
    renew: if True, all files are written and the result is [].
    """
    stale = []
    for path, text in pages.items():
        if renew:
            make_directory(path.parent)
            write_text(path, text)
        elif not path.is_file() or path.read_text("utf-8") != text:
            stale.append(str(path))
    return stale


def _print_verdicts(folder: Path, claims: PaperClaims) -> list[str]:
    """Print the verdict of every claim. Return the names of claims that are expected to hold (`expected: holds`), but
    do not hold.
    """
    from ..reproduction.claims import judge
    from ..reproduction.pages import read_studies

    found = judge(claims.claims, read_studies(folder, claims))
    for name, finding in found.items():
        typer.echo(f"{name}: {finding.verdict}. {claims.claims[name].says} ({claims.claims[name].source})")
    typer.echo(f"{sum(one.verdict == 'holds' for one in found.values())} of {len(found)} claims hold")
    return [name for name, claim in claims.claims.items() if claim.expected == "holds" != found[name].verdict]


track_app = typer.Typer(
    no_args_is_help=True, help="A benchmark of recipes with fixed tasks and rules: steps to a target loss of each task."
)

Folder = Annotated[Path, typer.Option(help="folder of the track, with entries.yaml, results.csv and README.md")]


@track_app.command("run")
def track_run_command(
    entry: Annotated[str, typer.Argument(help="an entry in entries.yaml, a recipe file, or a shipped recipe's name")],
    folder: Folder = Path("runs/track"),
    out: Annotated[Path | None, typer.Option(help="directory of the runs; default runs/track/runs/NAME")] = None,
    accumulate: Annotated[
        int | None,
        typer.Option(min=2, help="number of parts into which every batch is split; default: that of the entry, or 1"),
    ] = None,
    workers: Workers = None,
    imports: Imports = None,
) -> None:
    """Search the learning rate of a recipe on every task, run it with every seed, and store its results in the folder.

    The same command again continues a stopped one.
    """
    from ..track.track import RESULTS_FILE, entry_study, find_entry, keep_entry, load_track

    track, found = load_track(), find_entry(entry, folder, accumulate)
    directory = out or Path("runs/track/runs") / found.name
    run_to_end(entry_study(track, found, imports or ()), directory, workers)
    for task in keep_entry(track, found, directory, folder):
        remedy = "compare only with entries that were made with the same data"
        typer.echo(f"{task}: the data differ from those of version {track.version}; {remedy}")
    typer.echo(f"{folder / RESULTS_FILE}; for the tables: eigengraft track report --folder {folder}")


@track_app.command("report")
def track_report_command(
    folder: Folder = Path("runs/track"),
    check: Annotated[
        bool, typer.Option("--check", help="write nothing: say whether README.md agrees with the folder's results")
    ] = False,
) -> None:
    """Print how many steps each recipe of a track takes to the target loss of each task. Write README.md and
    profile.svg of the folder.
    """
    from ..reports.figures import save_figure
    from ..track.report import draw_profiles, standing, steps_table, track_page
    from ..track.track import load_track

    now = standing(load_track(), folder)
    typer.echo(steps_table(now))
    stale = _outdated(track_page(now, folder), renew=not check)
    for page in stale:
        typer.echo(f"{page}: differs from the results; write it with `eigengraft track report --folder {folder}`")
    if stale:
        raise typer.Exit(1)
    if not check:
        save_figure(draw_profiles(now), folder / "profile.svg")
