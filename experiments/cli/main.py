"""The commands of `eigengraft`: train, show, list, diff, schema, ablate, report, import-run, doctor, reproduce, track,
export, demo, bench, plan.

A command reads its inputs, calls the library and prints the results. After a wrong input, the command prints one box
on standard error and ends with exit code 2. After an interrupt, it ends with exit code 130. Modules that import torch
are imported inside commands, so that help is printed at once.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from pydantic import ValidationError
from typer.core import TyperGroup

import eigengraft
from eigengraft.component import is_unknown_kind
from eigengraft.errors import ArgumentError, RecipeError, hide_installed_lines, near_names, with_notes

from ..files import short_name
from . import bench, catalog, exports, papers, plan, study
from .arguments import Imports, override_argument
from .console import (
    describe_result,
    print_error,
    print_routing,
    print_storage,
    replace_unencodable,
    to_yaml,
)


class Commands(TyperGroup):
    """A group of commands. An error that a user can repair is printed as one message, without a traceback."""

    def invoke(self, ctx: Any) -> Any:
        given = [*getattr(ctx, "_protected_args", ()), *ctx.args]  # the command and its arguments
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as interrupt:
            where = f" the run in {interrupt}" if str(interrupt) else ""
            print_error("interrupted", f"Give the same command again to continue{where}.")
            raise typer.Exit(130) from None
        except BrokenPipeError:  # the reader has closed the pipe, which is not an error
            raise
        except Exception as error:
            self._describe_option(ctx, error, given)
            if isinstance(error, ModuleNotFoundError) and error.name in _OPTIONAL and not ctx.params.get("debug"):
                command = ctx.invoked_subcommand
                print_error("error", f"{command}: {error.name} is not installed; run `pip install {error.name}`")
                raise typer.Exit(2) from None
            if ctx.params.get("debug") or not _is_for_users(error):
                raise
            hint = [catalog.OF_FILES] if is_unknown_kind(error) and self._has_option(ctx, "imports") else []
            text = error.for_commands if isinstance(error, ArgumentError) else with_notes(error)
            print_error("error", "\n".join([text, *hint]))
            raise typer.Exit(2) from None

    def _describe_option(self, ctx: Any, error: Any, given: Sequence[str]) -> None:
        """Rewrite the message of an error about an option, and leave all other errors as they are.

        If a value is wrong, the message has the value. If an option lacks its value, the message says what the value
        means. If the command has no such option, the message suggests a setting, names the commands that have the
        option, or shows how to write a setting. An error about a missing value or option is recognized by its attribute
        `option_name`, because typer does not export its class.

        given: the command and its arguments.
        """
        if isinstance(cause := error.__cause__, ValidationError) and hasattr(error, "param"):
            error.message = error.message.replace("Value error, ", "")
            value = str(cause.errors()[0]["input"])
            error.message += f", got {value}" if value not in error.message else ""
        name, command = getattr(error, "option_name", None), self.commands.get(ctx.invoked_subcommand)
        if name is None:
            return
        option: Any = next((one for one in command.params if name in one.opts), None) if command is not None else None
        if option is not None and getattr(option, "help", None):
            word = option.metavar or str(option.type.name).upper()
            error.message = f"{name}: its value {word} is missing. Meaning of {name} {word}: {option.help}"
        elif option is None and command is not None and (setting := _meant_setting(command, name, given)):
            error.message = f"there is no option {name}; settings have no dashes, did you mean {setting}?"
            error.possibilities = None
        elif option is None:
            others = [key for key, own in self.commands.items() if any(name in one.opts for one in own.params)]
            known = f"{name} is an option of {', '.join(others)}, not of {ctx.invoked_subcommand}"
            example = "lr" if others else str(name).lstrip("-").replace("-", "_")
            settings = f"; settings have no dashes, as in {example}=VALUE" if self._has_option(ctx, "overrides") else ""
            error.message = f"{known if others else f'there is no option {name}'}{settings}"

    def _has_option(self, ctx: Any, name: str) -> bool:
        """Return True if the command that runs has an argument or option of this name."""
        command = self.commands.get(ctx.invoked_subcommand)
        return command is not None and any(one.name == name for one in command.params)


def _meant_setting(command: Any, name: str, given: Sequence[str]) -> str:
    """Return the override that an unknown option probably means, such as seed=3 for --sed 3.

    Return "" if the option has no value, if the command has no overrides, or if no setting is near to the name or an
    option of the command is nearer. The names of settings are read only for an option with a value, because reading
    them imports torch.

    name: the unknown option.
    given: the command and its arguments.
    """
    written = [*given, *((text.partition("=")[2]) for text in given if text.startswith(f"{name}="))]
    place = written.index(name) + 1 if name in written else len(given)
    value = next(iter(written[place:]), "")
    if not value or re.match(r"-(?![.\d])", value) or all(one.name != "overrides" for one in command.params):
        return ""
    first, dot, rest = name.lstrip("-").replace("-", "_").partition(".")
    fields = _settings_of(given[0])
    options = [text.lstrip("-") for one in command.params for text in one.opts if text.startswith("--")]
    meant = first if first in fields else next(iter(near_names(first, [*options, *fields])), "")
    return f"{meant}{dot}{rest}={value}" if meant in fields else ""


def _settings_of(command: str) -> list[str]:
    """Return the names of the fields that the overrides of a command can change."""
    if command in ("show", "plan"):
        return [*eigengraft.Recipe.model_fields]
    from ..studies.study import Study
    from ..training.experiment import Experiment

    fields = {"train": [*Experiment.model_fields], "demo": [*Study.model_fields]}
    fields["ablate"] = fields["demo"] + fields["train"]
    return fields.get(command, [])


_OPTIONAL = ("matplotlib", "jinja2", "pandas", "scipy")
"""Packages that some commands import. If one is missing, the command ends with the line that installs it."""


def _is_for_users(error: Exception) -> bool:
    """Return True if the message of an error tells a user enough, so that no traceback is printed.

    A DistributedError or TaskError is recognized as a RuntimeError whose class is in this library. Importing these
    classes would import torch.
    """
    ranks = type(error).__module__.startswith("eigengraft.") and isinstance(error, RuntimeError)
    return ranks or isinstance(error, (ValueError, OSError, ArithmeticError))


app = typer.Typer(cls=Commands, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)

OverrideArguments = Annotated[
    list[str] | None,
    override_argument(
        "dotted.path=value, as steps=100 task.width=48 update.eigenbasis.refresh.steps=1; ~dotted.path removes"
    ),
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
    """Optimizers assembled from interchangeable components: train with them, compare them, inspect them."""


@app.command("train")
def train_command(
    experiment: Annotated[Path, typer.Argument(help="an experiment file (YAML), or the directory of a run")],
    overrides: OverrideArguments = None,
    out: Annotated[
        Path | None, typer.Option(help="directory of the run; default runs/NAME, or the given directory of a run")
    ] = None,
    imports: Imports = None,
    checked: Annotated[
        bool, typer.Option("--checked", help="check at every step that each stage keeps its contract; slower")
    ] = False,
    extend: Annotated[
        int | None,
        typer.Option(
            metavar="STEPS",
            help="continue the run in the directory, also a finished one, to STEPS steps; refused if the learning "
            "rates up to its first checkpoint depend on the number of steps",
        ),
    ] = None,
) -> None:
    """Do one training run; the same command again continues a stopped run."""
    from ..doctor import diagnose, is_quick
    from ..reports.records import Run
    from ..training.experiment import load_experiment
    from ..training.parallel import is_first_process
    from ..training.train import train
    from .study import training_progress

    given = list(overrides or ())
    if extend is not None:
        if any(override.partition("=")[0].strip() == "steps" for override in given):
            raise RecipeError(f"--extend {extend}: cannot be combined with an override of steps; remove the override")
        given.append(f"steps={extend}")
    loaded = load_experiment(experiment, given, imports or ())
    directory = out or (experiment if experiment.is_dir() else Path("runs") / short_name(loaded.name))
    try:
        with training_progress(loaded.name) as progress:
            result = train(loaded, directory, progress, checked, extend is not None)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(directory) from None
    if is_first_process():
        typer.echo(f"{describe_result(result)}\n{directory}")
        if found := diagnose(directory, is_quick(Run({}, 0, directory))):
            kinds = ", ".join(dict.fromkeys(one.kind for one in found.findings))
            checks = ", and checks the data" if found.notes else ""
            typer.echo(f"something went wrong: {kinds}; `eigengraft doctor {directory}` says what to do{checks}")
    if result.diverged or result.diagnosis:
        raise typer.Exit(1)


@app.command("show")
def show_command(
    source: Annotated[
        str,
        typer.Argument(
            help="a shipped recipe's name, a recipe file, an experiment file, KIND, FAMILY.KIND, FAMILY or SIGNAL"
        ),
    ],
    overrides: OverrideArguments = None,
    task: Annotated[
        str | None, typer.Option(help="task whose model a recipe is applied to", show_default="byte_lm")
    ] = None,
    short: Annotated[bool, typer.Option("--short", help="leave out fields that have their defaults")] = False,
    imports: Imports = None,
) -> None:
    """Print the resolved recipe or experiment, the route of every parameter, and the bytes of every slot.

    For a recipe, its purpose, the formulas of its stages, and its time and memory for GPT-2 small, counted and not
    measured, are printed first.

    For the kind of a component, print its formula and its fields. If a recipe and a kind have the same name, the recipe
    is printed; FAMILY.KIND, such as `stage.shampoo`, always names the component. For a family, print the methods that a
    member of your own defines. For a signal, print its description.
    """
    from eigengraft.optimizers.recipe.loading import read_yaml, shipped_recipes

    from ..training.experiment import load_experiment

    if other := next((override for override in overrides or () if override in shipped_recipes()), None):
        raise ValueError(
            f"show {source}: `show` prints one recipe, but '{other}' is a recipe too; `eigengraft diff {source} "
            f"{other}` prints the fields in which the two differ"
        )
    path = Path(source)
    if not path.is_file() and source not in shipped_recipes():
        kinds, is_family = catalog.find_kinds(source), catalog.names_family(source)
        if kinds or is_family or catalog.names_signal(source):
            if overrides or task is not None or short:
                raise ValueError(
                    f"show {source}: overrides, --task and --short have no effect on a component, family or signal; "
                    "give a recipe"
                )
            for family, member in kinds:
                catalog.print_kind(family, member)
            if not kinds:
                (catalog.print_family if is_family else catalog.print_signal)(source)
            return
        if path.suffix not in (".yaml", ".yml") and not source.lstrip().startswith("{"):
            raise catalog.unknown(source)
    is_experiment = path.is_file() and "task" in (read_yaml(path) or ())
    if is_experiment:
        if task is not None:
            raise ValueError(
                f"--task: cannot be combined with the experiment {source}, which has a task; remove --task"
            )
        experiment = load_experiment(path, overrides or (), imports or ())
        typer.echo(to_yaml(experiment.declaration(short)))
    else:
        on_run = [override for override in overrides or () if override.split("=")[0].split(".")[0] in ("task", "steps")]
        on_recipe = [override.removeprefix("recipe.") for override in overrides or () if override not in on_run]
        data = {"task": task or "byte_lm", "recipe": source, "overrides": on_recipe}
        experiment = load_experiment(data, on_run, imports or ())
        catalog.print_chain(experiment.recipe)
        typer.echo(f"# {_cost_line(experiment.run_recipe)}")
        if not overrides and (measured := catalog.measured_cost(source)):
            typer.echo(f"# {measured}")
        typer.echo(to_yaml(experiment.recipe.declaration(short)))
    model = experiment.task.new_model(experiment.seed)
    recipe, rates = experiment.run_recipe, (experiment.lr, experiment.weight_decay)
    optimizer = eigengraft.compose(recipe, model, *rates, steps=experiment.steps, silence=experiment.silence)
    kind, size = experiment.task.declaration()["kind"], sum(parameter.numel() for parameter in model.parameters())
    other = "" if is_experiment else "; --task chooses another, with other bytes per parameter"
    typer.echo(f"# The tables are for the model of the task {kind} with {size:,} parameters{other}.")
    print_routing(optimizer)
    print_storage(optimizer)
    for place, size in optimizer.offloaded_bytes().items():
        typer.echo(f"# offloaded to {place}: {size:,} bytes, which each step brings in and takes back")
    for line in optimizer.reached():
        typer.echo(f"# expected: {line}")
    for remark in (*optimizer.slow_products(), *optimizer.solver_choices("cuda"), *optimizer.delays()):
        typer.echo(f"# {remark}")


def _cost_line(recipe: eigengraft.Recipe) -> str:
    """Return a line with the time of a step of GPT-2 small and the memory of the state under a recipe.

    Both are counted from operations and shapes, not measured. If this is not possible, the line has the reason.
    """
    from ..track.cost import COUNTED_MODELS, H100, TOKENS, state_bytes, step_ms

    model, title = next(iter(COUNTED_MODELS.items()))
    declared = recipe.declaration()
    try:
        ratio = step_ms(declared, model) / step_ms("adamw", model)
        bytes_each = state_bytes(declared, model)
    except ValueError as error:
        return f"{title}: the cost cannot be counted: {error}"
    return (
        f"{title}, {TOKENS:,} tokens a step on one {H100.name}, counted and not measured: a step takes at least "
        f"{ratio:.2f} times as long as with adamw; {bytes_each:.1f} bytes of state per parameter"
    )


@app.command("schema")
def schema_command(
    of: Annotated[
        Literal["recipe", "experiment", "study", "claims"],
        typer.Argument(help="kind of file that the schema describes"),
    ] = "recipe",
    imports: Imports = None,
) -> None:
    """Print a JSON schema for editors with all registered components, including those of imported files."""
    from eigengraft.component import Component
    from eigengraft.optimizers.recipe.schema import json_schema

    from ..reproduction.claims import PaperClaims
    from ..studies.study import Study
    from ..training.experiment import Experiment

    kinds: dict[str, type[Component]] = {"recipe": eigengraft.Recipe, "experiment": Experiment}
    kinds |= {"study": Study, "claims": PaperClaims}
    typer.echo(json.dumps(json_schema(kinds[of]), indent=2))


app.command("list")(catalog.list_command)
app.command("diff")(catalog.diff_command)
app.command("ablate")(study.ablate_command)
app.command("report")(study.report_command)
app.command("doctor")(study.doctor_command)
app.command("import-run")(study.import_command)
app.command("reproduce")(papers.reproduce_command)
app.add_typer(papers.track_app, name="track")
app.add_typer(exports.export_app, name="export")
app.command("demo")(study.demo_command)
app.command("bench")(bench.bench_command)
app.command("plan")(plan.plan_command)


def main() -> None:
    """Run the command `eigengraft`."""
    replace_unencodable()
    hide_installed_lines()
    log = logging.getLogger("eigengraft")
    log.addHandler(logging.StreamHandler())
    log.setLevel(logging.INFO)
    app(prog_name="eigengraft")


if __name__ == "__main__":
    main()
