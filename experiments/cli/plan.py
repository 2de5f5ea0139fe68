"""The command `eigengraft plan`: what each rank owns, holds, computes and sends; no process is started."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from eigengraft.component import RecipeError
from eigengraft.optimizers.recipe.loading import load_recipe
from eigengraft.optimizers.recipe.yaml_files import parse_yaml

if TYPE_CHECKING:
    from eigengraft.optimizers.planning.plan import Plan
    from eigengraft.optimizers.recipe.recipe import Recipe

Parallel = Literal["ddp", "fsdp2", "hsdp"]
FEW = 16
"""Up to so many ranks each has a row."""
WIDE = 200
"""Columns of a table in a file, or in Markdown."""
NODE = 8
"""Ranks that cut a parameter under hsdp, if no mesh says another number."""


def plan(  # noqa: PLR0913  its arguments are the command's options
    model: Annotated[str, typer.Argument(help="a task, llama-8b, llama-70b, or a .txt, .json or .yaml of shapes")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="dotted.path=value on the recipe: blocking.size=512")
    ] = None,
    recipe: Annotated[str, typer.Option(help="a shipped recipe's name or a recipe file")] = "soap",
    world: Annotated[int | None, typer.Option(min=1, help="ranks; default those of the mesh, or 8")] = None,
    mesh: Annotated[str | None, typer.Option(help="ranks along each axis of the device mesh, such as 2x4")] = None,
    parallel: Annotated[Parallel | None, typer.Option(help="default: fsdp2, hsdp on a mesh of two axes")] = None,
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16", "float64"], typer.Option(help="of parameters and gradients")
    ] = "float32",
    worlds: Annotated[str | None, typer.Option(help="numbers of ranks, such as 8,64,512: a row for each")] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="time a step of one block of each shape here, and plan with that")
    ] = False,
) -> None:
    """Print what each rank of a divided optimizer owns, holds, computes and sends, and how far from even that is."""
    import torch

    from eigengraft.optimizers.planning.plan import plan as planned

    from .model_shapes import parameters_of

    parameters, loaded = list(parameters_of(model)), load_recipe(recipe, overrides or (), parse_yaml)
    if measure:
        loaded = _timed(loaded, parameters)
    axes = _numbers("--mesh", mesh, "x") if mesh else ()
    way: Parallel = parallel or ("hsdp" if len(axes) == 2 else "fsdp2")
    meshes = _meshes(way, axes, world, worlds)
    plans = [planned(loaded, parameters, own, way, getattr(torch, dtype)) for own in meshes]
    what = f"{model}, {len(parameters)} parameters in {dtype}, {way}, {loaded.name or 'recipe'}"
    unit = "ms" if loaded.distribution.work else "FLOP"
    if worlds:
        typer.echo(f"{what}\n")
        Console(width=WIDE).print(growth(plans, unit))
        return
    console = Console()
    table = by_rank(plans[0], f"{what}, mesh {'x'.join(map(str, meshes[0]))}", unit)
    (console if console.is_terminal else Console(width=WIDE)).print(table)
    for line in remarks(plans[0], unit):
        typer.echo(line)


def _timed(recipe: Recipe, parameters: Sequence[Any]) -> Recipe:
    """The recipe with measured work, which is printed as the lines of YAML that say so."""
    import json

    from eigengraft.distributed.distribution import Distribution
    from eigengraft.optimizers.planning.measure import measured_work
    from eigengraft.optimizers.planning.plan import known

    work = {shape: round(spent, 4) for shape, spent in measured_work(recipe, known(parameters)).items()}
    typer.echo(f"distribution:\n  work: {json.dumps(work)}  # milliseconds a step of one block\n")
    return recipe.replace(distribution=Distribution(**{**recipe.distribution.model_dump(), "work": work}))


def _meshes(way: Parallel, axes: tuple[int, ...], world: int | None, worlds: str | None) -> list[tuple[int, ...]]:
    """One for each plan that is asked for."""
    if worlds:
        return [_mesh(way, axes[-1:], ranks) for ranks in _numbers("--worlds", worlds, ",")]
    mesh = axes or _mesh(way, (), world or 8)
    if world is not None and world != np.prod(mesh):
        raise RecipeError(f"--world: the {np.prod(mesh)} ranks of the mesh are required, got {world}")
    return [mesh]


def _numbers(option: str, text: str, between: str) -> tuple[int, ...]:
    words = text.split(between)
    if not all(word.strip().isdecimal() and int(word) > 0 for word in words):
        raise RecipeError(f"{option}: numbers such as {between.join(('2', '4'))} are required, got '{text}'")
    return tuple(map(int, words))


def _mesh(way: Parallel, shards: tuple[int, ...], ranks: int) -> tuple[int, ...]:
    if way != "hsdp":
        return (ranks,)
    inside = shards[0] if shards else NODE
    if ranks % inside:
        raise RecipeError(f"hsdp: a multiple of the {inside} ranks that cut a parameter is required, got {ranks}")
    return ranks // inside, inside


def columns(unit: str) -> list[tuple[str, Callable[[Plan], Any], str]]:
    """(title, values `[R]`, unit) of what is told of every rank."""
    return [
        ("blocks", lambda plan: plan.blocks, ""),
        ("state", lambda plan: plan.state, "B"),
        ("work a step", lambda plan: plan.work, unit),
        ("work / mean", lambda plan: plan.work / (plan.work.mean() or 1.0), "x"),
        ("gradients sent", lambda plan: plan.traffic["gradients"].sent, "B"),
        ("received", lambda plan: plan.traffic["gradients"].received, "B"),
        ("updates sent", lambda plan: plan.traffic["updates"].sent, "B"),
        ("received", lambda plan: plan.traffic["updates"].received, "B"),
        ("messages", lambda plan: sum(traffic.messages for traffic in plan.traffic.values()), ""),
        ("buffers", lambda plan: sum(traffic.buffers for traffic in plan.traffic.values()), "B"),
    ]


def by_rank(plan: Plan, title: str, unit: str) -> Table:
    """A row for each rank, or for the least, the median and the largest of each column if there are many."""
    told = [(name, np.asarray(values(plan)), of) for name, values, of in columns(unit)]
    ranks = len(plan.work)
    table = _table(title, ["rank", *(name for name, _, _ in told)])
    if ranks <= FEW:
        for rank in range(ranks):
            _row(table, str(rank), ((values[rank], of) for _, values, of in told))
    else:
        for name, choose in (("least", np.min), ("median", np.median), ("largest", np.max)):
            _row(table, name, ((choose(values), of) for _, values, of in told))
    _row(table, "all", ((values.sum(), of) if of != "x" else (None, of) for _, values, of in told))
    return table


def growth(plans: Sequence[Plan], unit: str) -> Table:
    """A row for each number of ranks: of the rank that has most, in Markdown."""
    titles = ["ranks", "state", "of mean", f"{unit} a step", "of mean", "at best", "gradients sent", "received"]
    table = _table("", [*titles, "updates sent", "received", "messages", "buffers"], box.MARKDOWN)
    for plan in plans:
        told = [(np.asarray(values(plan)).max(), of) for _, values, of in columns(unit)]
        ratios = [(plan.state_imbalance, "x"), (plan.imbalance, "x"), (plan.least_imbalance, "x")]
        _row(table, str(len(plan.work)), [told[1], ratios[0], told[2], *ratios[1:], *told[4:]])
    return table


def remarks(plan: Plan, unit: str) -> list[str]:
    """What the table does not say."""
    home = [name for name, share in plan.placements.items() if share.owners is None]
    agreement = plan.traffic["agreement"]
    lines = [
        f"imbalance (largest / mean) of work {plan.imbalance:.3f}, at best {plan.least_imbalance:.3f}: no division of "
        f"these blocks has a rank with less than {amount(plan.bound, unit)}; of state {plan.state_imbalance:.3f}",
        "messages: to other ranks, summed over the collectives of a step; buffers: what these read and write",
    ]
    if home:
        lines.append(
            f"{len(home)} of {len(plan.placements)} parameters are updated where their parts lie and send nothing"
        )
    if len(plan.work) > 1:
        lines.append(f"agreement on gradients: {amount(int(agreement.sent[0]), 'B')} a rank, in an all-reduce (ring)")
    return lines


def amount(value: float | None, unit: str) -> str:
    """Three digits and a prefix in powers of 1000: 1.62 GB; bare counts as they are."""
    if value is None:
        return ""
    if unit in ("", "x"):
        return f"{value:,.0f}" if unit == "" else f"{value:.3f}"
    prefixes = ("", "k", "M", "G", "T", "P", "E")
    power = 0
    while abs(value) >= 999.5 and unit != "ms" and power < len(prefixes) - 1:
        value, power = value / 1000, power + 1
    return f"{value:.3g} {prefixes[power]}{unit}"


def _table(title: str, names: Iterable[str], frame: box.Box = box.SIMPLE_HEAD) -> Table:
    table = Table(box=frame, title=title or None, title_justify="left", title_style="bold")
    for name in names:
        table.add_column(name, justify="right")
    return table


def _row(table: Table, name: str, cells: Iterable[tuple[Any, str]]) -> None:
    table.add_row(Text(name), *(Text(amount(None if value is None else float(value), of)) for value, of in cells))
