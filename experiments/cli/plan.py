"""The command `eigengraft plan`: the blocks, state, work and messages of each rank. No process is started."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from eigengraft.errors import RecipeError, counted

from .arguments import override_argument
from .console import print_table

if TYPE_CHECKING:
    from eigengraft.optimizers.plan.plan import Plan
    from eigengraft.optimizers.plan.traffic import Traffic
    from eigengraft.optimizers.recipe.recipe import Recipe

DataParallel = Literal["ddp", "fsdp2", "hsdp"]
NODE = 8
"""Largest number of ranks that shard a parameter under hsdp, unless `--mesh` gives this number."""


def plan_command(  # noqa: PLR0913  its arguments are the command's options
    model: Annotated[
        str,
        typer.Argument(help="model: a task, gpt2, llama-1b, llama-8b, llama-70b, or a .json or .yaml file of shapes"),
    ],
    overrides: Annotated[
        list[str] | None, override_argument("dotted.path=value on the recipe: blocking.size=512")
    ] = None,
    recipe: Annotated[str, typer.Option(help="a shipped recipe's name or a recipe file")] = "soap_fitted",
    ranks: Annotated[
        str | None,
        typer.Option(
            "--ranks",
            "--world",
            help="number of ranks (world size); several, such as 8,64, print a row for each; default that of --mesh, "
            "or 1",
        ),
    ] = None,
    mesh: Annotated[str | None, typer.Option(help="ranks along each axis of the device mesh, such as 2x4")] = None,
    parallel: Annotated[
        DataParallel | None,
        typer.Option(help="how parameters are placed on ranks; default fsdp2, or hsdp if --mesh has two axes"),
    ] = None,
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16", "float64"], typer.Option(help="dtype of parameters and gradients")
    ] = "float32",
    measure: Annotated[
        bool, typer.Option("--measure", help="time one block of each shape on this machine, and plan with these times")
    ] = False,
) -> None:
    """Print what each rank of an optimizer owns, holds, computes and sends, and how even the load is."""
    import torch

    from eigengraft.optimizers.plan.plan import plan
    from eigengraft.optimizers.recipe.loading import load_recipe, parse_yaml

    from ..tasks.model_shapes import parameters_of

    parameters, loaded = list(parameters_of(model)), load_recipe(recipe, overrides or (), parse_yaml)
    if measure:
        loaded = _timed(loaded, parameters)
    axes = _numbers("--mesh", mesh, "x") if mesh else ()
    way: DataParallel = parallel or ("hsdp" if len(axes) == 2 else "fsdp2")
    meshes = _meshes(way, axes, ranks)
    plans = [plan(loaded, parameters, own, way, getattr(torch, dtype)) for own in meshes]
    what = f"{model}, {counted(len(parameters), 'parameter')} in {dtype}, {loaded.name or 'recipe'}"
    unit = "ms" if loaded.distribution.work else "FLOP"
    if len(meshes) > 1:
        typer.echo(f"{what}, {way}\n")
        print_growth(plans, unit)
        return
    shared = f", {way}, mesh {'x'.join(map(str, meshes[0]))}" if len(plans[0].work) > 1 else ", one rank"
    print_ranks(plans[0], what + shared, unit)
    for line in remarks(plans[0], unit):
        typer.echo(line)


def _timed(recipe: Recipe, parameters: Sequence[Any]) -> Recipe:
    """Measure the time of a step for one block of each shape on this machine, and print the times as YAML.

    Return the recipe with these times in `distribution.work`.

    parameters: names and shapes of the parameters, or their descriptions (`ParamInfo`).
    """
    import json

    from eigengraft.distributed.distribution import Distribution
    from eigengraft.optimizers.plan.measure import measured_work
    from eigengraft.optimizers.plan.plan import known

    work = {shape: round(spent, 4) for shape, spent in measured_work(recipe, known(parameters)).items()}
    typer.echo(f"distribution:\n  work: {json.dumps(work)}  # milliseconds per step and block\n")
    return recipe.replace(distribution=Distribution(**{**recipe.distribution.model_dump(), "work": work}))


def _meshes(way: DataParallel, axes: tuple[int, ...], ranks: str | None) -> list[tuple[int, ...]]:
    """Return the shapes of the meshes for which plans are made, one for each number of ranks.

    way: placement of parameters on ranks.
    axes: ranks along each axis of --mesh; () if it was not given.
    ranks: text of --ranks; None if it was not given.
    """
    if ranks is None:
        return [axes or _mesh(way, (), 1)]
    numbers = _numbers("--ranks", ranks, ",")
    if len(numbers) > 1:
        return [_mesh(way, axes[-1:], number) for number in numbers]
    if axes and numbers[0] != math.prod(axes):
        raise RecipeError(
            f"--ranks: {numbers[0]} differs from the {math.prod(axes)} ranks of --mesh; remove one of the two options"
        )
    return [axes or _mesh(way, (), numbers[0])]


def _numbers(option: str, text: str, between: str) -> tuple[int, ...]:
    words = text.split(between)
    if not all(word.strip().isdecimal() and int(word) > 0 for word in words):
        raise RecipeError(f"{option}: must be numbers such as {between.join(('2', '4'))}, got '{text}'")
    return tuple(map(int, words))


def _mesh(way: DataParallel, shards: tuple[int, ...], ranks: int) -> tuple[int, ...]:
    if way != "hsdp":
        return (ranks,)
    shard_ranks = shards[0] if shards else min(NODE, ranks)
    if ranks % shard_ranks:
        raise RecipeError(
            f"hsdp: {ranks} ranks are not a multiple of the {shard_ranks} ranks that shard a parameter; give --mesh"
        )
    return ranks // shard_ranks, shard_ranks


MAX_ROWS = 16
"""Largest number of ranks for which the table has one row for each rank."""


def columns(unit: str) -> list[tuple[str, Callable[[Plan], Any], str]]:
    """Return (title, function, unit) for every column of a table about the R ranks of a plan.

    The function receives the plan and returns the values of all ranks, `[R]`. The third entry is the unit of these
    values: "B", "x" for a ratio, "" for a count, or the unit of work.

    unit: unit of the work of a step, "FLOP" or "ms".
    """
    return [
        ("blocks", lambda plan: plan.blocks, ""),
        ("state", lambda plan: plan.state, "B"),
        ("work per step", lambda plan: plan.work, unit),
        ("work / mean", lambda plan: plan.work / (plan.work.mean() or 1.0), "x"),
        ("gradients sent", lambda plan: plan.traffic["gradients"].sent, "B"),
        ("received", lambda plan: plan.traffic["gradients"].received, "B"),
        ("updates sent", lambda plan: plan.traffic["updates"].sent, "B"),
        ("received", lambda plan: plan.traffic["updates"].received, "B"),
        ("messages", lambda plan: sum(traffic.messages for traffic in _everywhere(plan)), ""),
        ("buffers", lambda plan: sum(traffic.buffers for traffic in _everywhere(plan)), "B"),
    ]


def _everywhere(plan: Plan) -> list[Traffic]:
    """Return the messages of a step, one `Traffic` for each kind of message. The kind "synchronization" is left out,
    because it depends on the backend.
    """
    return [traffic for kind, traffic in plan.traffic.items() if kind != "synchronization"]


def print_ranks(plan: Plan, title: str, unit: str) -> None:
    """Print a table with a row for each rank and a row of sums.

    With more than MAX_ROWS ranks, the rows of single ranks are replaced by rows with the least, the median and the
    largest value of each column.
    """
    import numpy as np

    found = [(name, np.asarray(values(plan)), of) for name, values, of in columns(unit)]
    ranks = len(plan.work)
    chosen: dict[str, Callable[[Any], Any]] = {"least": np.min, "median": np.median, "largest": np.max}
    if ranks <= MAX_ROWS:
        chosen = {str(rank): itemgetter(rank) for rank in range(ranks)}
    rows = [(name, *(amount(choose(values), of) for _, values, of in found)) for name, choose in chosen.items()]
    rows.append(("all", *("" if of == "x" else amount(values.sum(), of) for _, values, of in found)))
    typer.secho(title, bold=True)
    heads = ["rank", *(name for name, _, _ in found)]
    print_table(heads, rows, numbers=len(heads))


def print_growth(plans: Sequence[Plan], unit: str) -> None:
    """Print a Markdown table with a row for each number of ranks.

    A column has the largest value of all ranks. The column of the efficiency has the share of a refresh interval that
    ranks do not spend waiting.
    """
    import numpy as np

    heads = ["ranks", "state", "/ mean", f"{unit} per step", "/ mean", "at best", "efficiency"]
    heads += ["gradients sent", "received", "updates sent", "received", "messages", "buffers"]
    rows = []
    for plan in plans:
        largest = [amount(np.asarray(values(plan)).max(), of) for _, values, of in columns(unit)]
        imbalances = plan.state_imbalance, plan.imbalance, plan.least_imbalance, plan.balance.efficiency
        ratios = [amount(ratio, "x") for ratio in imbalances]
        rows.append((str(len(plan.work)), largest[1], ratios[0], largest[2], *ratios[1:], *largest[4:]))
    print_table(heads, rows, numbers=len(heads), form="markdown")


def remarks(plan: Plan, unit: str) -> list[str]:
    """Return lines with numbers of a plan that are not in the table of its ranks, such as the imbalance of work over
    ranks and the bytes of offloaded state. With one rank, there are only lines on offloaded state.

    unit: unit of the work of a step, "FLOP" or "ms".
    """
    home = [name for name, share in plan.placements.items() if share.owners is None]
    agreement = plan.traffic["agreement"]
    several = len(plan.work) > 1
    lines = several * [
        f"imbalance (largest / mean) of work {plan.imbalance:.3f}, at best {plan.least_imbalance:.3f}: the "
        f"busiest rank has at least {amount(plan.bound, unit)}, however blocks are assigned; "
        f"of state {plan.state_imbalance:.3f}",
        f"critical path of {plan.interval} steps, each as long as its busiest rank works: "
        f"{amount(plan.balance.critical_path, unit)}, at best {amount(plan.balance.least, unit)}: efficiency "
        f"{plan.balance.efficiency:.3f}",
        "messages: to other ranks, summed over the collectives of a step; buffers: bytes that these read and write",
    ]
    if plan.advice is not None and several:
        better = " ".join(f"{name}={plan.advice.min_wave_work}" for name in plan.advice.fields)
        lines.append(
            f"ranks wait for the one that refreshes: {better} gives an efficiency of "
            f"{plan.advice.balance.efficiency:.3f}, in another trajectory (that of one process with the same value)"
        )
    lines += [
        f"offloaded to {place}: at most {amount(int(own.max()), 'B')} of a rank's state, which each step brings in and "
        "takes back"
        for place, own in plan.offloaded.items()
    ]
    if home and several:
        lines.append(
            f"{len(home)} of {len(plan.placements)} parameters are updated by the ranks that hold them and send nothing"
        )
    if several:
        before = amount(int(plan.traffic["synchronization"].sent[0]), "B")
        lines.append(
            f"agreement on gradients: {amount(int(agreement.sent[0]), 'B')} per rank, in an all-reduce (ring); before "
            f"it, with gloo, {before} in an all-to-all"
        )
    return lines


def amount(value: float, unit: str) -> str:
    """Return a number as text, with three digits and a prefix in powers of 1000, such as 1.62 GB. Counts are written in
    full.

    unit: unit of the number; "x" for a ratio, "" for a count.
    """
    value = float(value)
    if unit in ("", "x"):
        return f"{value:,.0f}" if unit == "" else f"{value:.3f}"
    prefixes = ("", "k", "M", "G", "T", "P", "E")
    power = 0
    while abs(value) >= 999.5 and unit != "ms" and power < len(prefixes) - 1:
        value, power = value / 1000, power + 1
    return f"{value:.3g} {prefixes[power]}{unit}"
