"""The command `eigengraft reproduce`: the studies of a paper's folder, and whether its claims hold."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from eigengraft.errors import RecipeError

from ..files import make_directory, write_text
from .arguments import Workers
from .study import run_to_end

if TYPE_CHECKING:
    from ..reproduction.claims import PaperClaims


def reproduce_command(
    folder: Annotated[Path, typer.Argument(help="a folder with claims.yaml, as papers/soap_2024")],
    check: Annotated[
        bool, typer.Option("--check", help="run and write nothing: judge the results of the folder")
    ] = False,
    write: Annotated[bool, typer.Option("--write", help="run nothing: write its pages anew from its results")] = False,
    out: Annotated[Path | None, typer.Option(help="directory of the runs; default runs/NAME of the folder")] = None,
    workers: Workers = None,
) -> None:
    """Run the studies of a paper, keep their results in the folder, renew its pages and say which claims hold.

    The same command again continues a stopped one. The exit code is 1 if a claim that the folder says to hold does not.
    """
    from ..reproduction.claims import load_claims

    _require_effect(check, write, out, workers)
    claims = load_claims(folder)
    if not check and not write:
        _run_studies(folder, claims, out or Path("runs") / folder.resolve().name, workers)
    stale = _outdated_pages(folder, renew=not check)
    wrong = _print_verdicts(folder, claims)
    for page in stale:
        typer.echo(f"{page}: not what its results say; write it with --write")
    if wrong or stale:
        typer.echo(f"said to hold, and do not: {', '.join(wrong)}" if wrong else "pages are not what results say")
        raise typer.Exit(1)


def _require_effect(check: bool, write: bool, out: Path | None, workers: int | None) -> None:
    """RecipeError for options that say what a run does, where nothing is run, and for two that exclude each other."""
    if check and write:
        raise RecipeError("--check: a folder in which nothing is written is required, got it with --write")
    for name, value in {"--out": out, "--workers": workers}.items():
        if value is not None and (check or write):
            raise RecipeError(f"{name}: studies to run are required, got it with {'--check' if check else '--write'}")


def _run_studies(folder: Path, claims: PaperClaims, out: Path, workers: int | None) -> None:
    """Run every study of a folder to its end under `out`, and keep its results in the folder as soon as it ends."""
    from ..reproduction.results import collect_results, keep_results

    for name in claims.studies:
        run_to_end(str(folder / f"{name}.yaml"), [], out / name, workers)
        keep_results(collect_results(out / name), folder / "results" / f"{name}.json")


def _outdated_pages(folder: Path, renew: bool) -> list[str]:
    """The generated pages of a folder that are not what its results say; with `renew` all are written, none is left."""
    from ..reproduction.pages import paper_pages

    stale = []
    for path, text in paper_pages(folder).items():
        if renew:
            make_directory(path.parent)
            write_text(path, text)
        elif not path.is_file() or path.read_text("utf-8") != text:
            stale.append(str(path))
    return stale


def _print_verdicts(folder: Path, claims: PaperClaims) -> list[str]:
    """Print the verdict of every claim and how many hold; the names of those that the folder wrongly says to hold."""
    from ..reproduction.pages import read_studies
    from ..reproduction.verdicts import disproved, judge

    found = judge(claims.claims, read_studies(folder, claims))
    for name, finding in found.items():
        typer.echo(f"{name}: {finding.verdict}. {claims.claims[name].says} ({claims.claims[name].source})")
    typer.echo(f"{sum(one.verdict == 'holds' for one in found.values())} of {len(found)} claims hold")
    return list(disproved(claims.claims, found))
