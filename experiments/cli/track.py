"""The commands `eigengraft track run` and `eigengraft track report`: a fixed benchmark whose entries are recipes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..files import write_text
from .arguments import Imports, Workers
from .study import run_to_end

track_app = typer.Typer(
    no_args_is_help=True, help="A benchmark with fixed tasks and rules: steps to a loss, entries are recipes."
)

Folder = Annotated[Path, typer.Option(help="folder of the track, which keeps the runs of entries in results/")]


@track_app.command("run")
def track_run_command(
    recipe: Annotated[str, typer.Argument(help="a recipe file, which names the entry, or a shipped recipe's name")],
    folder: Folder = Path("runs/track"),
    out: Annotated[Path | None, typer.Option(help="directory of the runs; default runs/track/runs/NAME")] = None,
    workers: Workers = None,
    imports: Imports = None,
) -> None:
    """Search the learning rate of an entry on every task, run it with every seed, and keep its results in the folder.

    The same command again continues a stopped one.
    """
    from ..track.entries import keep_entry
    from ..track.track import entry_name, entry_study, load_track

    track, name = load_track(), entry_name(recipe)
    directory = run_to_end(
        entry_study(track, recipe, imports or ()), [], out or Path("runs/track/runs") / name, workers
    )
    path = folder / "results" / f"{name}.json"
    for task in keep_entry(track, directory, path):
        required = "compare only with entries that were made with the same data"
        typer.echo(f"{task}: other data than those of version {track.version}; {required}")
    typer.echo(f"{path}; for the table: eigengraft track report --folder {folder}")


@track_app.command("report")
def track_report_command(
    folder: Folder = Path("runs/track"),
    check: Annotated[
        bool, typer.Option("--check", help="write nothing: say whether the table is that of its results")
    ] = False,
) -> None:
    """Print the table of all entries in a folder, and write it as table.md, beside the figure profile.svg."""
    from ..track.entries import read_entries
    from ..track.report import track_table, write_profiles
    from ..track.scores import scores
    from ..track.track import load_track

    track = load_track()
    entries = read_entries(track, folder / "results")
    found = scores(track, entries)
    table = track_table(track, entries, found)
    typer.echo(table)
    path = folder / "table.md"
    if check:
        if not path.is_file() or path.read_text(encoding="utf-8") != table:
            typer.echo(f"{path}: not what its results say; write it with `eigengraft track report`")
            raise typer.Exit(1)
        return
    write_text(path, table)
    write_profiles(found, folder / "profile.svg")
