"""The declaration of one training run: a task, a recipe, a schedule and a length."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field, field_validator, model_validator
from pydantic_core.core_schema import ValidationInfo

import eigengraft
from eigengraft.component import Component, validated
from eigengraft.errors import RecipeError
from eigengraft.optimizers.recipe.loading import parse_yaml, raw_recipe
from eigengraft.optimizers.recipe.overrides import override_pairs
from eigengraft.signals import follows_run

from ..tasks import Task
from ..tasks.gradient import Autocast, GradientPass
from .callbacks import Callback
from .imports import import_component, names_a_file
from .parallel.modes import Parallelism, SingleProcess
from .schedule import Constant, LearningRateSchedule

_REPLACED = {"lr": "lr", "weight_decay.rate": "weight_decay"}
"""Fields of a recipe, and those of an experiment that replace them."""


def _or_recipe_name(schema: dict[str, Any]) -> None:
    """Let a recipe in a file also be a name, or a list of stages."""
    mapping = {"$ref": schema.pop("$ref")} if "$ref" in schema else {}
    schema["anyOf"] = [mapping, {"type": "string"}, {"type": "array"}]


class Experiment(Component):
    """One training run: theta <- step(recipe, lr * schedule(k), gradient of the task's batch k), k = 0 .. steps - 1.

    `recipe` takes a shipped recipe's name, a file, a mapping or a `Recipe`; `overrides` are applied to it once and are
    not stored: the recipe of an `Experiment` is always the resolved one.
    """

    elsewhere: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(
            set(eigengraft.Recipe.model_fields) | {"base", "set"},
            "it goes into the recipe: `recipe: {base: soap, ...}`",
        ),
        **dict.fromkeys(
            ("batch_size", "model", "width", "layers", "path"), "it goes into the task: `task: {kind: ...}`"
        ),
        **dict.fromkeys(("warmup", "warmup_steps", "final"), "it goes into the schedule: `schedule: {kind: ...}`"),
        **dict.fromkeys(("epochs", "max_steps"), "`steps` is the length of a run, in steps of the optimizer"),
        **dict.fromkeys(("seeds", "axes", "baseline"), "it belongs to a study, which `eigengraft ablate` runs"),
        ".": "dotted paths go into the list `overrides`, as 'path=value'",
    }
    imports: tuple[str, ...] = Field(default=(), strict=False, description="files or modules that define components")
    name: str = Field(default="run", pattern=r"^\w[\w.+=-]*$", description="names the run's directory")
    task: Task = Field(description="what is trained")
    recipe: eigengraft.Recipe = Field(description="the optimizer", json_schema_extra=_or_recipe_name)
    overrides: tuple[str, ...] = Field(default=(), strict=False, exclude=True, description="dotted.path=value")
    lr: float | None = Field(default=None, ge=0, description="peak learning rate; none: the recipe's")
    weight_decay: float | None = Field(default=None, ge=0, description="weight decay; none: the recipe's")
    schedule: LearningRateSchedule = Field(default=Constant(), description="schedule of the learning rate")
    steps: int = Field(default=400, ge=1, description="optimizer steps")
    seed: int = Field(default=0, ge=0, lt=2**63, description="seed of the initial weights and of the order of the data")
    grad_clip: float | None = Field(default=None, gt=0, description="largest norm of the gradient; none: no limit")
    accumulate: int | None = Field(
        default=None, ge=2, description="parts of every batch, whose gradients add up; none: it is taken at once"
    )
    precision: Autocast | None = Field(
        default=None, description="of matrix products in training (autocast); none: that of the parameters, float32"
    )
    callbacks: tuple[Callback, ...] = Field(
        default=(), strict=False, description="what is called after rows of metrics and at the end, as {kind: patience}"
    )
    eval_every: int = Field(default=50, ge=1, description="steps between evaluations; the last step has one")
    log_every: int = Field(default=10, ge=1, description="steps between rows of metrics")
    diagnostics: str | None = Field(
        default=None,
        pattern=r"^every [1-9][0-9]*$",
        description="'every N': each N steps what `inspect` tells goes to diagnostics.jsonl; none: nothing is measured",
    )
    checkpoint_every: int = Field(default=100, ge=1, description="steps between checkpoints")
    threads: int = Field(default=1, ge=1, description="CPU threads of torch; another number may change the last bits")
    device: str = Field(default="cpu", pattern=r"^(cpu|cuda(:\d+)?)$", description="cpu, cuda or cuda:N")
    silence: tuple[str, ...] = Field(
        default=(), strict=False, description="ids of warnings about the recipe that are not given, as storage-unused"
    )
    parallel: Parallelism = Field(
        default=SingleProcess(), description="how processes share the work; losses stay the same"
    )

    @model_validator(mode="before")
    @classmethod
    def _resolve(cls, data: Any) -> Any:
        return resolved(data) if isinstance(data, Mapping) else data

    @field_validator("steps")
    @classmethod
    def _longer_than_warmup(cls, steps: int, info: ValidationInfo) -> int:
        schedule = info.data.get("schedule")
        if schedule is not None and steps <= schedule.warmup_steps:
            raise ValueError(f"more than the schedule's {schedule.warmup_steps} warmup_steps are required")
        return steps

    @property
    def diagnostics_every(self) -> int | None:
        """Steps between rows of diagnostics; None: there are none."""
        return None if self.diagnostics is None else int(self.diagnostics.split()[1])

    @property
    def gradient_pass(self) -> GradientPass:
        """How the gradient of a batch is computed."""
        return GradientPass(self.task, self.accumulate or 1, self.precision)

    @property
    def run_recipe(self) -> eigengraft.Recipe:
        """The recipe, told the length of the run if something in it follows the run's fraction."""
        if self.recipe.total_steps is not None or not follows_run(self.recipe.updates()):
            return self.recipe
        return self.recipe.replace(total_steps=self.steps)


def resolved(data: Mapping[str, Any]) -> dict[str, Any]:
    """`data` with its imports done and its recipe loaded, overrides applied."""
    data = dict(data)
    imports = data.get("imports")
    if isinstance(imports, (list, tuple)):
        # absolute, so that the record of a run can be used from any directory
        data["imports"] = [str(Path(name).absolute()) if names_a_file(name) else name for name in map(str, imports)]
        for source in data["imports"]:
            import_component(source)
    overrides = data.pop("overrides", None) or ()
    recipe = data.get("recipe")
    if isinstance(recipe, Mapping):
        recipe = validated(eigengraft.Recipe, raw_recipe(recipe), "recipe")
    for path, value in override_pairs(overrides, parse_yaml):
        field = _REPLACED.get(path)
        if field is not None and data.get(field) is not None:
            raise RecipeError(
                f"recipe.{path}: {value} has no effect, the experiment has its own {field}, {data[field]}"
            )
    if recipe is not None:
        data["recipe"] = eigengraft.load_recipe(recipe, overrides, parse_yaml)
    return data
