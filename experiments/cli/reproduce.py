"""The command `eigengraft reproduce`: the studies of a paper's folder, and whether its claims hold."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .study import Workers, run_to_end


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
    from ..reproduction.pages import paper_pages, read_studies
    from ..reproduction.results import collect_results, keep_results
    from ..reproduction.verdicts import disproved, judge

    claims = load_claims(folder)
    for name in () if check or write else claims.studies:
        directory = (out or Path("runs") / folder.resolve().name) / name
        run_to_end(str(folder / f"{name}.yaml"), [], directory, workers)
        keep_results(collect_results(directory), folder / "results" / f"{name}.json")
    pages = paper_pages(folder)
    for path, text in {} if check else pages.items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    found = judge(claims.claims, read_studies(folder, claims))
    for name, finding in found.items():
        typer.echo(f"{name}: {finding.verdict}. {claims.claims[name].says} ({claims.claims[name].source})")
    stale = [str(path) for path, text in pages.items() if not path.is_file() or path.read_text("utf-8") != text]
    for page in stale:
        typer.echo(f"{page}: not what its results say; write it with --write")
    wrong = list(disproved(claims.claims, found))
    typer.echo(f"{sum(one.verdict == 'holds' for one in found.values())} of {len(found)} claims hold")
    if wrong or stale:
        typer.echo(f"said to hold, and do not: {', '.join(wrong)}" if wrong else "pages are not what results say")
        raise typer.Exit(1)
