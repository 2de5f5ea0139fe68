"""The declaration of one training run, and experiments from files, mappings and overrides.

An override is `dotted.path=value`. A path is looked up in the experiment first (`steps=100`, `task.width=48`,
`recipe.update.rms.beta=0.99`). A path that starts with a field of the recipe belongs to the recipe
(`update.rms.beta=0.99`, `weight_decay.kind=l2`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator
from pydantic_core.core_schema import ValidationInfo

import eigengraft
from eigengraft.component import Component, TextForm, validated
from eigengraft.errors import RecipeError, did_you_mean, name_some, near_path
from eigengraft.optimizers.recipe.loading import YAML_SUFFIXES, parse_yaml, raw_recipe, read_yaml
from eigengraft.optimizers.recipe.overrides import apply_overrides, override_pairs

from ..tasks import Task
from ..tasks.base import Autocast, GradientPass
from .callbacks import Callback
from .imports import import_component, names_a_file, resolve_paths
from .parallel import DeviceName, Parallelism, SingleProcess
from .schedule import Constant, LearningRateSchedule

_REPLACED = {"lr": "lr", "weight_decay.rate": "weight_decay"}
"""Field of a recipe -> the field of an experiment that replaces it."""


def _or_recipe_name(schema: dict[str, Any]) -> None:
    """Let the JSON schema of the field `recipe` accept a name or a list of stages too, as experiment files may contain
    them.
    """
    mapping = {"$ref": schema.pop("$ref")} if "$ref" in schema else {}
    schema["anyOf"] = [mapping, {"type": "string"}, {"type": "array"}]


FolderName = Annotated[
    str, TextForm(r"^\w[\w.+=-]*$", "a name of letters, digits and _ . + = - that begins with a letter, digit or _")
]
"""Name of a run or study, which is also the name of its directory."""


def _field_of(part: str, field: str) -> str:
    """Return advice about a field that belongs to a part of an experiment, such as its task."""
    return f"it is a field of the {part}, `{part}.{field}`: `{part}: {{kind: ..., {field}: ...}}`"


class Experiment(Component):
    """One training run: theta <- step(recipe, lr * schedule(k), gradient of the task's batch k), k = 0 .. steps - 1.

    `recipe` accepts the name of a shipped recipe, a file, a mapping or a `Recipe`. `overrides` are applied to the
    recipe once and are not stored: the recipe of an `Experiment` is always the resolved one.
    """

    elsewhere: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(
            set(eigengraft.Recipe.model_fields) | {"base", "set"},
            "it goes into the recipe: `recipe: {base: soap, ...}`",
        ),
        **{name: _field_of("task", name) for name in ("batch_size", "model", "width", "layers", "path")},
        **dict.fromkeys(("warmup", "warmup_steps"), _field_of("schedule", "warmup_steps")),
        "final": _field_of("schedule", "final"),
        **dict.fromkeys(
            ("beta", "betas", "eps", "momentum"), "it is a field of a stage: `update.rms.beta=0.99`, for example"
        ),
        **dict.fromkeys(("epochs", "max_steps"), "`steps` is the length of a run, in steps of the optimizer"),
        **dict.fromkeys(
            ("seeds", "axes", "baseline", "equal", "exclude", "metric", "settings", "target", "tune"),
            "it belongs to a study, beside `base`; `eigengraft ablate` runs studies",
        ),
        ".": "dotted paths go into the list `overrides`, as 'path=value'",
    }
    imports: tuple[str, ...] = Field(
        default=(),
        strict=False,
        description="files or modules that define components, imported before the experiment is read",
    )
    name: FolderName = Field(default="run", description="names the run's directory")
    task: Task = Field(examples=["digits"], description="task to train")
    recipe: eigengraft.Recipe = Field(examples=["soap"], description="the optimizer", json_schema_extra=_or_recipe_name)
    overrides: tuple[str, ...] = Field(
        default=(), strict=False, exclude=True, description="changes of the recipe, as dotted.path=value"
    )
    lr: float | None = Field(default=None, ge=0, description="peak learning rate; none: the recipe's")
    weight_decay: float | None = Field(default=None, ge=0, description="weight decay; none: the recipe's")
    schedule: LearningRateSchedule = Field(default=Constant(), description="schedule of the learning rate")
    steps: int = Field(default=400, ge=1, description="optimizer steps")
    seed: int = Field(default=0, ge=0, lt=2**63, description="seed of the initial weights and of the order of the data")
    grad_clip: float | None = Field(
        default=None,
        gt=0,
        description="largest norm of the gradient of all parameters; a longer gradient is scaled down to it; none: no "
        "limit",
    )
    accumulate: int | None = Field(
        default=None,
        ge=2,
        description="number of parts into which every batch is split; the gradient is the mean over the targets of all "
        "parts; none: one part",
    )
    precision: Autocast | None = Field(
        default=None,
        description="dtype of matrix products in training (autocast); none: dtype of the parameters, float32",
    )
    callbacks: tuple[Callback, ...] = Field(
        default=(), strict=False, description="callbacks after rows of metrics and at the end, such as {kind: patience}"
    )
    eval_every: int = Field(default=50, ge=1, description="steps between evaluations; the last step has one")
    log_every: int = Field(default=10, ge=1, description="steps between rows of metrics")
    diagnostics: Annotated[str, TextForm(r"^every [1-9][0-9]*$", "'every N', such as 'every 10',")] | None = Field(
        default=None,
        description="'every N': the table of `inspect` is written to diagnostics.jsonl every N steps; none: no tables",
    )
    checkpoint_every: int = Field(default=100, ge=1, description="steps between checkpoints")
    keep_checkpoint: bool = Field(
        default=True, description="true: a complete run keeps its last checkpoint; false: it keeps none"
    )
    threads: int = Field(default=1, ge=1, description="CPU threads of torch; another number may change the last bits")
    device: DeviceName = Field(default="cpu", description="cpu, cuda or cuda:N")
    silence: tuple[str, ...] = Field(
        default=(),
        strict=False,
        description="ids of warnings about the recipe to silence, such as storage-unused",
    )
    parallel: Parallelism = Field(
        default=SingleProcess(), description="division of the work among processes; losses do not depend on it"
    )

    @model_validator(mode="before")
    @classmethod
    def _resolve(cls, data: Any) -> Any:
        return _with_recipe(with_imports(data)) if isinstance(data, Mapping) else data

    @field_validator("precision", mode="before")
    @classmethod
    def _has_the_range_of_gradients(cls, precision: Any) -> Any:
        if precision in ("fp16", "float16", "half"):
            raise ValueError(
                "float16 is not supported, because small gradients become 0 in float16 if the loss is not scaled; use "
                "bfloat16"
            )
        return precision

    @field_validator("steps")
    @classmethod
    def _longer_than_warmup(cls, steps: int, info: ValidationInfo) -> int:
        schedule = info.data.get("schedule")
        if schedule is not None and steps <= schedule.warmup_steps:
            raise ValueError(f"must be more than the {schedule.warmup_steps} warmup_steps of the schedule")
        return steps

    @property
    def diagnostics_every(self) -> int | None:
        """Steps between rows of diagnostics; None: no diagnostics are written."""
        return None if self.diagnostics is None else int(self.diagnostics.split()[1])

    @property
    def gradient_pass(self) -> GradientPass:
        """The object that computes the gradient of a batch, with the experiment's `accumulate` and `precision`."""
        return GradientPass(self.task, self.accumulate or 1, self.precision)

    @property
    def run_recipe(self) -> eigengraft.Recipe:
        """The recipe, with `total_steps` set if a schedule of the recipe depends on the length of the run."""
        return self.recipe.for_run(self.steps)


def _with_recipe(data: dict[str, Any]) -> dict[str, Any]:
    """Load the recipe in `data` with the overrides in `data`, and return `data` with the loaded recipe."""
    overrides = data.pop("overrides", None) or ()
    recipe = data.get("recipe")
    if isinstance(recipe, Mapping):
        recipe = validated(eigengraft.Recipe, raw_recipe(recipe), "recipe")
    for path, value in override_pairs(overrides, parse_yaml):
        field = _REPLACED.get(path)
        if field is not None and data.get(field) is not None:
            raise RecipeError(
                f"recipe.{path}: {value} has no effect, because the experiment has its own {field}, {data[field]}; "
                "remove one of the two"
            )
    if recipe is not None:
        data["recipe"] = eigengraft.load_recipe(recipe, overrides, parse_yaml)
    return data


def with_imports(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of `data` after its imports were executed, so that the kinds that they define are known.

    Files in `imports` become absolute, so that the recorded configuration of a run can be used from any directory.
    """
    data = dict(data)
    imports = data.get("imports")
    if isinstance(imports, (list, tuple)):
        data["imports"] = [str(Path(name).absolute()) if names_a_file(name) else name for name in map(str, imports)]
        for source in data["imports"]:
            import_component(source)
    return data


def load_experiment(
    source: str | Path | Mapping[str, Any] | Experiment,
    overrides: Iterable[str] | None = None,
    imports: Iterable[str] | None = None,
) -> Experiment:
    """Return an experiment from a YAML file, a mapping or an `Experiment`, with overrides applied.

    Args:
        source: path of a YAML file or of a run's directory, a mapping of fields, or an experiment. Paths in a file
            (`recipe`, `imports`, `task.path`) are relative to the file.
        overrides: changes as `dotted.path=value`. Paths of files in them are relative to the working directory. None:
            no changes.
        imports: further files or modules that define components. None: only those of the experiment.

    Returns:
        The validated experiment.

    Raises:
        RecipeError: the experiment is invalid. The message has one line for each fault.
    """
    given = list(overrides or ())
    own, recipes = split_overrides(given)
    if isinstance(source, (str, Path)):
        path, recorded = Path(source), Path(source) / "config.json"
        data = read_experiment(recorded if recorded.is_file() else path)
        data.setdefault("name", re.sub(r"[^\w.+=-]+", "-", path.stem))
    else:
        raw = source.model_dump(mode="json") if isinstance(source, Experiment) else source
        data = {key: _plain(value) for key, value in raw.items()}
    data.setdefault("schedule", "constant")  # so that an override such as schedule.warmup_steps=10 finds the component
    data.setdefault("parallel", "none")
    data["imports"] = [*_listed(data, "imports"), *(imports or ())]
    data["overrides"] = [*_listed(data, "overrides"), *recipes]
    imported = [override for override in own if _path(override) == "imports"]
    others = [override for override in own if override not in imported]
    try:
        # Files in `imports` are imported first, because other overrides may set fields of components that they define.
        data = with_imports(apply_overrides(data, imported, parse_yaml))
        return validated(Experiment, _with_recipe(apply_overrides(data, others, parse_yaml)))
    except RecipeError as error:
        if isinstance(source, (str, Path)):
            several = [text for text in own if re.search(r"=[^\[{'\"]*,", text)]
            axes = [re.sub("^seed=", "seeds=", text) for text in several]
            ablation = f"eigengraft ablate {source} {' '.join(axes)}"
            hint = f"\nan experiment takes one value; compare several with: {ablation}"
            where = with_overrides(source, given)
            raise RecipeError(f"{where} does not describe an experiment:\n{error}{hint if several else ''}") from error
        raise


def with_overrides(source: str | Path, overrides: Sequence[str]) -> str:
    """Return "<source> with <overrides>", with up to three overrides, or only `source` if there are none.

    Errors contain this text if their fault may be in the file `source` or in an override.
    """
    return f"{source} with {name_some(overrides, 3)}" if overrides else str(source)


def read_experiment(path: Path) -> dict[str, Any]:
    """Return the mapping in an experiment file. Paths of files in it are resolved against the folder of the file.

    Raises RecipeError if there is no such file, or if it is a study or contains no mapping.
    """
    if path.is_dir():
        raise RecipeError(
            f"experiment: the directory '{path}' has no run, because it has no config.json; give an experiment file or "
            "the directory of a run"
        )
    if not path.is_file():
        hint = near_path(path, YAML_SUFFIXES) or "; give an existing file"
        raise RecipeError(f"experiment: there is no file '{path}'{hint}")
    data = read_yaml(path)
    if isinstance(data, Mapping) and "axes" in data:
        raise RecipeError(f"{path}: the file is a study, not an experiment; run it with `eigengraft ablate {path}`")
    if not isinstance(data, Mapping):
        kind = "an empty file" if data is None else f"a {type(data).__name__}"
        raise RecipeError(f"{path}: must contain a mapping with at least 'task' and 'recipe', got {kind}")
    data = dict(data)
    data["imports"] = list(map(str, _listed(data, "imports")))
    found: dict[str, Any] = resolve_paths(data, path.parent)
    return found


def _plain(value: Any) -> Any:
    """Return a component as plain data, which overrides can change; return other values unchanged."""
    return value.model_dump(mode="json") if isinstance(value, Component) else value


def _listed(data: Mapping[str, Any], field: str) -> list[Any]:
    """Return a field of the data as a list. A single text becomes a list of one text.

    Overrides may be a mapping from paths to values. It becomes a list of texts `path=value`.
    """
    value = data.get(field) or []
    if field == "overrides" and isinstance(value, Mapping):
        return [f"{path}={json.dumps(_plain(item))}" for path, item in value.items()]
    if not isinstance(value, (str, list, tuple)):
        raise RecipeError(f"{field}: must be a list of texts, got {value!r}")
    return [value] if isinstance(value, str) else list(value)


def split_overrides(overrides: Iterable[str]) -> tuple[list[str], list[str]]:
    """Return two lists: overrides of the experiment, and overrides of its recipe without the prefix `recipe.`."""
    own: list[str] = []
    recipes: list[str] = []
    for override in overrides:
        if owner_of(_path(override)) == "experiment":
            own.append(override)
        else:
            removes = "~" if override.startswith("~") else ""
            recipes.append(removes + override.removeprefix("~").removeprefix("recipe."))
    return own, recipes


def owner_of(path: str) -> Literal["experiment", "recipe"]:
    """Return whether a dotted path, with or without a `~` before it, begins with a field of experiments or of their
    recipe. Raises RecipeError if neither has the field.
    """
    fields, of_recipe = Experiment.model_fields, eigengraft.Recipe.model_fields
    first, dot, _ = path.removeprefix("~").partition(".")
    # A field that an experiment shares with its recipe, such as `weight_decay`, is a number in the experiment. A path
    # into such a field, such as `weight_decay.kind`, therefore belongs to the recipe.
    if first in fields and not (dot and first in {"recipe", *of_recipe}):
        return "experiment"
    if first == "recipe" or first in of_recipe:
        return "recipe"
    if not dot and first in Experiment.elsewhere:
        raise RecipeError(f"{first}: unknown field of an experiment; {Experiment.elsewhere[first]}")
    known = list(dict.fromkeys([*fields, *of_recipe]))
    hint = did_you_mean(first, known, 0.5)
    every = f" (the experiment and its recipe have {', '.join(known)})"
    raise RecipeError(f"{first}: unknown field{hint or every}")


def _path(override: str) -> str:
    """Return the path of an override. Raises RecipeError if the override is malformed."""
    return override_pairs([override], parse_yaml)[0][0]
