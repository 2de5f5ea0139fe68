"""The command line: `eigengraft train | show | schema | ablate | report | demo | bench | plan`.

Nothing here decides anything: commands load, call the library and print. A wrong input ends with one box on standard
error and exit code 2, an interrupt with exit code 130.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperGroup

import eigengraft
from eigengraft.component import Component
from eigengraft.distributed.rank_group import DistributedError
from eigengraft.optimizers.recipe.schema import json_schema
from eigengraft.optimizers.recipe.yaml_files import read_yaml

from ..training.experiment import Experiment
from ..training.imports import import_component
from ..training.loading import load_experiment
from ..training.parallel.ranks import is_first
from ..training.train import train
from . import bench as cli_bench
from . import plan as cli_plan
from . import study as cli_study
from .console import assignment_table, refuse, storage_table, summary, to_yaml, training_bar, write_table


class Commands(TyperGroup):
    """Turns what users can repair into one message without a traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as interrupt:
            where = f" what is in {interrupt}" if str(interrupt) else ""
            refuse("interrupted", f"Give the same command again to continue{where}.")
            raise typer.Exit(130) from None
        except BrokenPipeError:  # the reader of a pipe has left: not a fault, and nobody to tell
            raise
        except (ValueError, OSError, ArithmeticError, DistributedError) as error:
            if ctx.params.get("debug"):
                raise
            refuse("error", str(error))
            raise typer.Exit(2) from None


app = typer.Typer(cls=Commands, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)

Overrides = Annotated[
    list[str] | None,
    typer.Argument(help="dotted.path=value, for instance steps=100 task.width=48 update.eigenbasis.refresh.steps=1"),
]
Imports = Annotated[
    list[str] | None,
    typer.Option("--import", metavar="FILE.py", help="a file or module that defines components; repeatable"),
]


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"eigengraft {eigengraft.__version__}")
        raise typer.Exit


@app.callback()
def options(
    debug: Annotated[
        bool, typer.Option("--debug", envvar="EIGENGRAFT_DEBUG", help="show the traceback of an error")
    ] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="print the version")
    ] = False,
) -> None:
    """Optimizers assembled from interchangeable parts: train with them, compare them, look inside them."""


@app.command("train")
def train_command(
    experiment: Annotated[Path, typer.Argument(help="an experiment file (YAML)")],
    overrides: Overrides = None,
    out: Annotated[Path | None, typer.Option(help="the run's directory; default runs/NAME")] = None,
    imports: Imports = None,
) -> None:
    """Train once; the same command again continues a run that was stopped."""
    loaded = load_experiment(experiment, overrides or (), imports or ())
    directory = out or Path("runs") / loaded.name
    try:
        with training_bar(loaded.name) as progress:
            result = train(loaded, directory, progress)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(directory) from None
    if is_first():
        typer.echo(f"{summary(result)}\n{directory}")


@app.command("show")
def show_command(
    source: Annotated[str, typer.Argument(help="a shipped recipe's name, a recipe file or an experiment file")],
    overrides: Overrides = None,
    task: Annotated[str, typer.Option(help="the task whose model a recipe is shown on")] = "byte_lm",
    imports: Imports = None,
) -> None:
    """Print the resolved recipe or experiment, which parameter goes where and why, and what each slot takes."""
    path = Path(source)
    if path.is_file() and "task" in (read_yaml(path) or ()):
        experiment = load_experiment(path, overrides or (), imports or ())
        typer.echo(to_yaml(experiment.declaration()))
    else:
        experiment = load_experiment({"task": task, "recipe": source}, overrides or (), imports or ())
        typer.echo(to_yaml(experiment.recipe.declaration()))
    model = experiment.task.new_model(experiment.seed)
    optimizer = eigengraft.compose(experiment.recipe, model, lr=experiment.lr)
    write_table(assignment_table(optimizer))
    write_table(storage_table(optimizer))


@app.command("schema")
def schema_command(
    of: Annotated[Literal["recipe", "experiment", "study"], typer.Argument()] = "recipe",
    imports: Imports = None,
) -> None:
    """Print a JSON schema for editors, with all components that are known, your own imports included."""
    from ..studies.study import Study

    for source in imports or ():
        import_component(source)
    kinds: dict[str, type[Component]] = {"recipe": eigengraft.Recipe, "experiment": Experiment, "study": Study}
    typer.echo(json.dumps(json_schema(kinds[of]), indent=2))


app.command("ablate")(cli_study.ablate)
app.command("report")(cli_study.report)
app.command("demo")(cli_study.demo)
app.command("bench")(cli_bench.bench_command)
app.command("plan")(cli_plan.plan)


def main() -> None:
    """The entry point of the `eigengraft` command."""
    app(prog_name="eigengraft")


if __name__ == "__main__":
    main()
