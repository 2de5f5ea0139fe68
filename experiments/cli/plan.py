"""The command `eigengraft plan`: what each rank owns, holds, computes and sends; no process is started."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console

from eigengraft.errors import RecipeError

from .arguments import override_argument

if TYPE_CHECKING:
    from eigengraft.optimizers.recipe.recipe import Recipe

DataParallel = Literal["ddp", "fsdp2", "hsdp"]
WIDE = 200
"""Width of a table in a file or in Markdown, in characters."""
NODE = 8
"""Ranks that shard a parameter under hsdp, unless the mesh says otherwise."""


def plan_command(  # noqa: PLR0913  its arguments are the command's options
    model: Annotated[str, typer.Argument(help="a task, llama-8b, llama-70b, gpt2, or a .txt, .json, .yaml of shapes")],
    overrides: Annotated[
        list[str] | None, override_argument("dotted.path=value on the recipe: blocking.size=512")
    ] = None,
    recipe: Annotated[str, typer.Option(help="a shipped recipe's name or a recipe file")] = "soap_fitted",
    world: Annotated[int | None, typer.Option(min=1, help="number of ranks; default that of the mesh, or 8")] = None,
    mesh: Annotated[str | None, typer.Option(help="ranks along each axis of the device mesh, such as 2x4")] = None,
    parallel: Annotated[DataParallel | None, typer.Option(help="default fsdp2, or hsdp on a mesh of two axes")] = None,
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16", "float64"], typer.Option(help="dtype of parameters and gradients")
    ] = "float32",
    worlds: Annotated[str | None, typer.Option(help="numbers of ranks, such as 8,64,512: a row per number")] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="time one block of each shape on this machine, and plan with these times")
    ] = False,
) -> None:
    """Print what each rank of a sharded optimizer owns, holds, computes and sends, and how even the load is."""
    import torch

    from eigengraft.optimizers.plan.plan import plan
    from eigengraft.optimizers.recipe.loading import load_recipe, parse_yaml

    from ..tasks.model_shapes import parameters_of
    from .plan_tables import growth, ranks_table, remarks

    parameters, loaded = list(parameters_of(model)), load_recipe(recipe, overrides or (), parse_yaml)
    if measure:
        loaded = _timed(loaded, parameters)
    axes = _numbers("--mesh", mesh, "x") if mesh else ()
    way: DataParallel = parallel or ("hsdp" if len(axes) == 2 else "fsdp2")
    meshes = _meshes(way, axes, world, worlds)
    plans = [plan(loaded, parameters, own, way, getattr(torch, dtype)) for own in meshes]
    what = f"{model}, {len(parameters)} parameters in {dtype}, {way}, {loaded.name or 'recipe'}"
    unit = "ms" if loaded.distribution.work else "FLOP"
    if worlds:
        typer.echo(f"{what}\n")
        Console(width=WIDE).print(growth(plans, unit))
        return
    console = Console()
    table = ranks_table(plans[0], f"{what}, mesh {'x'.join(map(str, meshes[0]))}", unit)
    (console if console.is_terminal else Console(width=WIDE)).print(table)
    for line in remarks(plans[0], unit):
        typer.echo(line)


def _timed(recipe: Recipe, parameters: Sequence[Any]) -> Recipe:
    """The recipe with measured work; prints the lines of YAML that declare it."""
    import json

    from eigengraft.distributed.distribution import Distribution
    from eigengraft.optimizers.plan.measure import measured_work
    from eigengraft.optimizers.plan.plan import known

    work = {shape: round(spent, 4) for shape, spent in measured_work(recipe, known(parameters)).items()}
    typer.echo(f"distribution:\n  work: {json.dumps(work)}  # milliseconds per step and block\n")
    return recipe.replace(distribution=Distribution(**{**recipe.distribution.model_dump(), "work": work}))


def _meshes(way: DataParallel, axes: tuple[int, ...], world: int | None, worlds: str | None) -> list[tuple[int, ...]]:
    """The mesh of every plan to make."""
    if worlds and world is not None:
        raise RecipeError(f"--world: one of --world and --worlds is required, got {world} and '{worlds}'")
    if worlds:
        return [_mesh(way, axes[-1:], ranks) for ranks in _numbers("--worlds", worlds, ",")]
    mesh = axes or _mesh(way, (), world or 8)
    if world is not None and world != math.prod(mesh):
        raise RecipeError(f"--world: the {math.prod(mesh)} ranks of the mesh are required, got {world}")
    return [mesh]


def _numbers(option: str, text: str, between: str) -> tuple[int, ...]:
    words = text.split(between)
    if not all(word.strip().isdecimal() and int(word) > 0 for word in words):
        raise RecipeError(f"{option}: numbers such as {between.join(('2', '4'))} are required, got '{text}'")
    return tuple(map(int, words))


def _mesh(way: DataParallel, shards: tuple[int, ...], ranks: int) -> tuple[int, ...]:
    if way != "hsdp":
        return (ranks,)
    shard_ranks = shards[0] if shards else NODE
    if ranks % shard_ranks:
        raise RecipeError(
            f"hsdp: a multiple of {shard_ranks}, the ranks that shard a parameter, is required, got {ranks}"
        )
    return ranks // shard_ranks, shard_ranks
