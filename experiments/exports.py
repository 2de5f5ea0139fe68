"""Studies and recipes in the formats of other programs: sweeps of Weights & Biases, AlgoPerf and benchopt."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from eigengraft.errors import RecipeError
from eigengraft.optimizers import load_recipe
from eigengraft.optimizers.recipe.loading import parse_yaml, write_yaml
from eigengraft.optimizers.recipe.overrides import flatten, refuse_empty

from .files import make_directory, write_text
from .studies.plan import plan_runs
from .studies.study import Changes, Study, changed_paths, load_study, split_axes
from .studies.tuning import TPE, Range, Sampled
from .training.callbacks import WandB
from .training.experiment import load_experiment

_RUN = 'file=$0; exec eigengraft train "$file" "$@" --out "runs/sweep-$WANDB_SWEEP_ID/$WANDB_RUN_ID"'
"""Shell command with which an agent of W&B starts a run. Its arguments are overrides; each run has its own directory.
"""
_INTERVAL = re.compile(r"interval\((.+),(.+)\)")


def export_sweep(
    source: str | Path | Mapping[str, Any] | Study, folder: Path, overrides: Iterable[str] | None = None
) -> Path:
    """Write a study as a sweep of Weights & Biases: sweep.yaml, and experiment.yaml with the base of the study.

    Without `tune`, the sweep is a grid of axes and seeds. With a `tune` of the kind `random` or `tpe`, the sweep is one
    search over the axes and the search space together, with the seeds of `tune`.

    Args:
        source: a study, or the file or mapping of one.
        folder: folder of the files, which is created if it does not exist.
        overrides: changes of the study as `dotted.path=value`; several values are an axis. None: no changes.

    Returns:
        The path of sweep.yaml.

    Raises:
        RecipeError: the study is invalid, or has a field that a sweep cannot express.
    """
    study = load_study(source, overrides)
    for name, given in {"exclude": study.exclude, "settings": study.settings}.items():
        if given:
            raise RecipeError(
                f"{name}: a sweep of W&B always runs all combinations of values; remove {name}, or make two studies"
            )
    if study.equal == "seconds":
        raise RecipeError(
            "equal: with `seconds`, the number of steps follows from runs that are timed first, and a sweep of W&B "
            "times no runs; use `equal: steps`"
        )
    parameters: dict[str, Any] = {}
    for axis, choices in study.axes.items():
        path, values = _axis_values(axis, choices, study)
        parameters[path] = {"values": values}
    search = study.tune
    if search is not None and not isinstance(search, Sampled):
        kind = getattr(search, "kind", "?")
        raise RecipeError(f"tune: W&B has no search of the kind {kind}; use random or tpe, which draw from a space")
    sweep: dict[str, Any] = {"name": study.name, "description": study.description, "method": "grid"}
    seeds = study.seeds
    if search is not None:
        parameters |= {path: _distribution(values) for path, values in search.space.items()}
        sweep |= {"method": "bayes" if isinstance(search, TPE) else "random", "run_cap": search.trials}
        seeds = search.seeds
        if search.halving is not None:
            first = max(1, search.halving.least // study.base.get("eval_every", 50))
            sweep["early_terminate"] = {"type": "hyperband", "min_iter": first, "eta": search.halving.rate}
    parameters["seed"] = {"values": list(seeds)}
    goal = "minimize" if study.measured.sign > 0 else "maximize"
    sweep |= {"metric": {"name": study.metric, "goal": goal}, "parameters": parameters}
    experiment = folder / "experiment.yaml"
    sweep["program"] = "eigengraft"
    sweep["command"] = ["/bin/sh", "-c", _RUN, str(experiment.absolute()), "${args_no_hyphens}"]
    plan_runs(study)  # raises for a combination that is no experiment
    declared = load_experiment(study.base)
    online = [one.replace(mode="online") if isinstance(one, WandB) else one for one in declared.callbacks]
    if not any(isinstance(one, WandB) for one in online):
        online.append(WandB(mode="online"))
    base = declared.replace(callbacks=tuple(online)).declaration(short=True)
    make_directory(folder)
    write_text(experiment, write_yaml({**base, "name": study.name}))
    write_text(folder / "sweep.yaml", _for_wandb({key: value for key, value in sweep.items() if value != ""}))
    return folder / "sweep.yaml"


def _axis_values(axis: str, choices: Mapping[str, Changes], study: Study) -> tuple[str, list[Any]]:
    """Return the path of the field that an axis sets, and the value of this field for each label. A label that does
    not set the field has the value of the base, or the default of the field.

    Raises RecipeError if the axis sets several paths.
    """
    paths = sorted(changed_paths(choices))
    if len(paths) != 1:
        raise RecipeError(
            f"axes.{axis}: an axis must set exactly one path in a sweep of W&B, got {', '.join(paths) or 'none'}; "
            "put the values of each label into a recipe file, and use an axis `recipe`"
        )
    path, base = paths[0], study.base
    missing = [label for label, changes in choices.items() if path not in changes]
    if missing and path not in base:
        flat = dict(flatten(load_experiment(base).model_dump(mode="json")))
        found = [flat[one] for one in (path, f"recipe.{path}") if one in flat]
        if not found:
            raise RecipeError(
                f"axes.{axis}.{missing[0]}: in a sweep of W&B every label needs a value of {path}, which is set "
                "neither in this label nor in `base`; give a value"
            )
        base = {path: found[0]}
    return path, [_argument(changes.get(path, base.get(path))) for changes in choices.values()]


def _argument(value: Any) -> Any:
    """Convert a value for a sweep: return numbers and texts unchanged, and all other values as JSON."""
    return value if isinstance(value, (int, float, str)) and not isinstance(value, bool) else json.dumps(value)


def _distribution(values: Any) -> dict[str, Any]:
    """Return what the file of a W&B sweep says about one searched field.

    Raises RecipeError for a logarithmic range of whole numbers, which W&B lacks.

    values: a `Range`, or a list of values.
    """
    if not isinstance(values, Range):
        return {"values": list(map(_argument, values))}
    if values.integer and values.log:
        raise RecipeError(
            f"tune.space: W&B draws no whole numbers from a logarithmic range, got {values.low:g} to {values.high:g}; "
            "give a list of values"
        )
    if values.integer:
        return {"distribution": "int_uniform", "min": int(values.low), "max": int(values.high)}
    kind = "log_uniform_values" if values.log else "uniform"
    return {"distribution": kind, "min": values.low, "max": values.high}


def _for_wandb(data: Any) -> str:
    """Return plain data as YAML 1.1, which W&B reads. In YAML 1.1 the float 1e-05 must be written 1.0e-05."""
    return re.sub(r"(?<![\w.])(\d+)(e[+-]\d+)\b", r"\1.0\2", write_yaml(data))


def export_algoperf(
    recipe: str | Path | Mapping[str, Any], folder: Path, overrides: Iterable[str] | None = None
) -> Path:
    """Write a recipe as a submission to AlgoPerf: submission.py, recipe.json and tuning_search_space.json.

    Args:
        recipe: the recipe, as `load_recipe` accepts it.
        folder: folder of the files, which is created if it does not exist.
        overrides: changes of the recipe, or hyperparameters to tune. `path=a,b` lists the values of a hyperparameter;
            `path=interval(a,b)` is its range, logarithmic if `a` is positive. The hyperparameters `lr`,
            `weight_decay`, `warmup_factor`, `grad_clip`, `dropout_rate` and `label_smoothing` belong to the training
            loop. If `lr` is not given, its range is 0.1 to 10 times the learning rate of the recipe. None: no changes.

    Returns:
        The path of submission.py.

    Raises:
        RecipeError: the recipe or a hyperparameter is invalid.
    """
    loop = ("lr", "weight_decay", "warmup_factor", "grad_clip", "dropout_rate", "label_smoothing")
    space: dict[str, Any] = {}
    rest = []
    for override in overrides or ():
        refuse_empty(override)
        path, _, text = override.partition("=")
        interval = _INTERVAL.fullmatch(text)
        if interval is not None:
            space[path] = _range(path, *interval.groups())
        elif path in loop:
            space[path] = {"feasible_points": parse_yaml(f"[{text}]", f"override '{override}'")}
        else:
            rest.append(override)
    axes, own = split_axes(rest)
    space |= {path: {"feasible_points": values} for path, values in axes.items()}
    loaded = load_recipe(recipe, own, parse_yaml)
    for path, values in space.items():
        if path not in loop:
            for value in values.get("feasible_points", [values.get("min"), values.get("max")]):
                load_recipe(loaded, {path: value})
    defaults = {
        "lr": _range("lr", loaded.lr / 10, loaded.lr * 10),
        "weight_decay": {"feasible_points": [loaded.weight_decay.rate]},
        "warmup_factor": {"feasible_points": [0.05]},
    }
    named = {_hyperparameter(path): values for path, values in {**defaults, **space}.items()}
    make_directory(folder)
    write_text(folder / "recipe.json", json.dumps(loaded.declaration(), indent=2) + "\n")
    write_text(folder / "tuning_search_space.json", json.dumps(named, indent=2) + "\n")
    return _copied("algoperf", folder / "submission.py")


def _range(path: str, low: str | float, high: str | float) -> dict[str, Any]:
    """Return the entry of a search space of AlgoPerf for a hyperparameter with a range.

    path: path of the hyperparameter, which errors name.
    low, high: ends of the range. The scale is logarithmic if `low` is positive.
    """
    try:
        ends = float(low), float(high)
    except ValueError:
        raise RecipeError(f"{path}: the form is interval(low,high) with two numbers, got {low} and {high}") from None
    if not ends[0] < ends[1]:
        raise RecipeError(f"{path}: the high end must be above the low end, got interval({low},{high})")
    return {"min": ends[0], "max": ends[1], "scaling": "log" if ends[0] > 0 else "linear"}


def _hyperparameter(path: str) -> str:
    """Return the path of a hyperparameter as a name for AlgoPerf, which must be a valid identifier of Python."""
    name = "learning_rate" if path == "lr" else path.replace(".", "__")
    if not name.isidentifier():
        raise RecipeError(f"{path}: a hyperparameter of AlgoPerf must be a name in Python, got '{name}'")
    return name


def export_benchopt(folder: Path) -> Path:
    """Copy the solver for benchopt into a folder, such as `solvers` of a benchmark. Return the path of the copy."""
    make_directory(folder)
    return _copied("benchopt", folder / "eigengraft.py")


def _copied(host: str, target: Path) -> Path:
    write_text(target, (files("eigengraft.hosts") / f"{host}.py").read_text(encoding="utf-8"))
    return target
