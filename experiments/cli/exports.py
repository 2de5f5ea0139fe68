"""The commands `eigengraft export`: studies and recipes as files of other programs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .arguments import override_argument

export_app = typer.Typer(no_args_is_help=True, help="Write a study or a recipe as files of another program.")


@export_app.command("sweep")
def sweep_command(
    study: Annotated[
        str, typer.Argument(help="a study file (YAML), the name of a shipped study, or an experiment file with an axis")
    ],
    overrides: Annotated[
        list[str] | None, override_argument("dotted.path=value on the study; lr=0.01,0.1 adds an axis")
    ] = None,
    out: Annotated[Path, typer.Option(help="folder for sweep.yaml and experiment.yaml")] = Path("sweep"),
) -> None:
    """Write a study as a sweep of Weights & Biases: a grid of its axes and seeds, or a search if it has `tune`."""
    from ..exports import export_sweep

    path = export_sweep(study, out, overrides or ())
    typer.echo(f"{path}; to start it: wandb sweep {path}, and then wandb agent on each machine")


@export_app.command("algoperf")
def algoperf_command(
    recipe: Annotated[str, typer.Argument(help="a shipped recipe's name, or a recipe file")],
    overrides: Annotated[
        list[str] | None,
        override_argument(
            "dotted.path=value on the recipe; several values (lr=0.001,0.01) or a range (lr=interval(1e-4,1e-2)) make "
            "a hyperparameter"
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="folder for the submission")] = Path("submission"),
) -> None:
    """Write a submission to AlgoPerf for PyTorch, with its search space."""
    from ..exports import export_algoperf

    path = export_algoperf(recipe, out, overrides or ())
    typer.echo(
        f"{path}; in AlgoPerf: python submission_runner.py --framework=pytorch --submission_path={path} "
        f"--tuning_search_space={path.with_name('tuning_search_space.json')}"
    )


@export_app.command("benchopt")
def benchopt_command(
    out: Annotated[Path, typer.Option(help="folder for the solver, such as `solvers` in a benchmark")] = Path(
        "solvers"
    ),
) -> None:
    """Write a solver of benchopt for benchmarks that train a torch model, such as benchmark_nanogpt."""
    from ..exports import export_benchopt

    path = export_benchopt(out)
    typer.echo(f"{path}; in the benchmark: benchopt run . -s 'eigengraft[recipe=soap,learning_rate=0.003]'")
