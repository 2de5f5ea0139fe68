"""Gradients and factors of training runs: of a small language model, and of a run or a checkpoint of the user's own."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import eigengraft
from eigengraft.errors import RecipeError
from eigengraft.optimizers import load_recipe
from eigengraft.preconditioners import chain_slots
from eigengraft.slots import StateKey

from ..files import read_object
from ..training.experiment import load_experiment
from ..training.train import isolated_run

GRADIENT_LAYERS = tuple(f"blocks.{i}.attention.{name}.weight" for i in (0, 1) for name in ("query", "value", "mix"))
"""Parameters of the language model whose gradients `layer_gradients` returns."""
LONGEST = 1024
"""Largest length d of an axis that has a factor, as in the shipped recipes. A factor costs O(d^3)."""


class GradientRun:
    """A training run of an experiment, one batch at a time."""

    def __init__(self, source: Any) -> None:
        """Read the experiment of the run. source: a mapping, an experiment file, or the directory of a run."""
        if isinstance(source, str) and Path(source).is_dir():
            config = read_object(Path(source) / "config.json")
            if not config:
                raise RecipeError(f"record: '{source}' has no config.json; give a run directory or an experiment file")
            source = config
        self.experiment = load_experiment(source)
        self.batches = 0

    @contextmanager
    def started(self) -> Iterator[None]:
        """Make data, model and optimizer for a `with` block.

        In the block, random state and number of threads are those of the experiment. They are restored at its end.
        """
        with isolated_run(self.experiment):
            task, lr = self.experiment.task, self.experiment.lr
            self.dataset, self.model = task.new_data(), task.new_model(self.experiment.seed)
            self.optimizer = eigengraft.compose(self.experiment.run_recipe, self.model, lr=lr)
            yield

    def gradients(self) -> dict[str, Tensor]:
        """Return the gradients of the next batch as matrices by name, for parameters with two or more axes."""
        batch = self.dataset.batch(self.experiment.seed, self.batches)
        self.batches += 1
        self.optimizer.zero_grad()
        self.experiment.task.loss(self.model(batch.inputs), batch.targets).backward()  # type: ignore[no-untyped-call]
        named = ((name, p.grad) for name, p in self.model.named_parameters() if p.ndim > 1)
        return {name: g.detach().flatten(1) for name, g in named if g is not None}

    def train(self, steps: int) -> None:
        """Take optimizer steps, each with the next batch."""
        for _ in range(steps):
            self.gradients()
            self.optimizer.step()


@lru_cache(maxsize=4)
def layer_gradients(width: int, samples: int, seed: int = 0, steps: int = 100) -> Tensor:
    """Return gradients `[samples, layers, width, width]` in float64 of the layers GRADIENT_LAYERS.

    All gradients are computed at the same weights, after `steps` steps of AdamW; each sample is the gradient of a new
    batch. Every layer is scaled so that the mean squared norm of its gradients is 1. The result is cached: do not write
    into it.
    """
    task = {"kind": "byte_lm", "width": width, "heads": 2, "context": 32, "batch_size": 8, "max_bytes": 2**20}
    source = {"task": task, "recipe": "adamw", "lr": 5e-3, "seed": seed}
    found = _samples(GradientRun(source), steps, samples, width)
    return torch.stack([found[name] for name in GRADIENT_LAYERS], dim=1)


@lru_cache(maxsize=2)
def run_gradients(source: str, width: int, samples: int, steps: int) -> dict[str, Tensor]:
    """Return gradients `[samples, width, width]` of each layer of an experiment or run, scaled as in `layer_gradients`.

    A layer with a side below `width` is left out. The gradients of all other layers are cut to their leading `width` x
    `width` entries. For an embedding these can all be 0, because its first rows belong to bytes that a text may not
    have.
    """
    found = _samples(GradientRun(source), steps, samples, width)
    if not found:
        raise RecipeError(f"record: no matrix of '{source}' has two sides of {width} or more; give a smaller width")
    return found


def _samples(run: GradientRun, steps: int, samples: int, width: int) -> dict[str, Tensor]:
    with run.started():
        run.train(steps)
        taken = [
            {name: g[:width, :width].double() for name, g in run.gradients().items() if min(g.shape) >= width}
            for _ in range(samples)
        ]
    layers = {name: torch.stack([gradients[name] for gradients in taken]) for name in taken[0]}
    return {name: g / g.square().sum((1, 2)).mean().sqrt().clamp_min(1e-300) for name, g in layers.items()}


@lru_cache(maxsize=2)
def trained_factors(source: str, at: tuple[int, ...], beta: float) -> dict[str, list[Tensor]]:
    """Train an experiment or run for `max(at)` steps. Return the Gram factors of its gradients by parameter and axis.

    A <- beta A + (1 - beta) G G^T for axis 0 and G^T G for axis 1, bias corrected. Each item is a list with the matrix
    `[1, d, d]`, in float64, after each number of steps in `at`. An axis longer than LONGEST has no factor.
    """
    run = GradientRun(source)
    means: dict[str, Tensor] = {}
    found: dict[str, dict[int, Tensor]] = {}
    with run.started():
        for step in range(1, max(at) + 1):
            for name, g in run.gradients().items():
                for axis, x in enumerate((g.double(), g.double().mT)):
                    if len(x) <= LONGEST:
                        key = f"{name} factor.{axis}"
                        means[key] = beta * means.get(key, torch.zeros(())) + (1 - beta) * (x @ x.mT)
            run.optimizer.step()
            if step in at:
                for key, a in means.items():
                    found.setdefault(key, {})[step] = a[None] / (1 - beta**step)
    return {key: [own[step] for step in at] for key, own in found.items()}


def saved_factors(path: str) -> dict[str, Tensor]:
    """Return the factors in a saved optimizer state, by parameter and slot, as stacks `[blocks, d, d]`.

    path: a run directory, its checkpoint.pt, or a file that `torch.save` made of `optimizer.state_dict()` or of a
        mapping with such a state under "optimizer".

    Factors are slots of the role `statistic` that are square matrices. Their scale is that of the state, without bias
    correction.
    """
    state = _optimizer_state(path)
    found: dict[tuple[str, int], list[Tensor]] = {}
    coded = False
    for group in state["param_groups"]:
        roles = _statistics(group)
        names = group.get("param_names") or [str(index) for index in group["params"]]
        for name, index in zip(names, group["params"], strict=True):
            for text, value in state["state"].get(index, {}).items():
                key = StateKey.parse(text)
                if key.name not in roles or not isinstance(value, Tensor):
                    continue
                if key.part:
                    coded = True
                elif value.ndim == 2 and value.shape[0] == value.shape[1]:
                    found.setdefault((f"{name} {key.slot}", len(value)), []).append(value)
    if not found:
        reason = "all are stored in codes; save a run without `storage`" if coded else "save one of shampoo or soap"
        raise RecipeError(f"checkpoint: '{path}' has no factor that is a matrix ({reason})")
    sizes = Counter(text for text, _ in found)
    return {text if sizes[text] == 1 else f"{text} {d}": torch.stack(own) for (text, d), own in found.items()}


def _optimizer_state(path: str) -> Mapping[str, Any]:
    file = Path(path) / "checkpoint.pt" if Path(path).is_dir() else Path(path)
    if not file.is_file():
        raise RecipeError(f"checkpoint: '{file}' is not a file; give a run directory or a file of a saved optimizer")
    try:
        content = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises any type for a file that it cannot read
        raise RecipeError(
            f"checkpoint: '{file}' cannot be read by torch.load ({type(error).__name__}); give a file of torch.save"
        ) from error
    state = content.get("optimizer", content) if isinstance(content, Mapping) else None
    groups = state.get("param_groups") if isinstance(state, Mapping) else None
    if not isinstance(state, Mapping) or not groups or not all("recipe" in group for group in groups):
        raise RecipeError(
            f"checkpoint: '{file}' holds no state of an eigengraft optimizer; save `optimizer.state_dict()`, alone or "
            'under "optimizer"'
        )
    return state


def _statistics(group: Mapping[str, Any]) -> set[str]:
    """Return the names "<stage path>/<slot>" of all slots of a saved recipe that hold statistics.

    The slots of a stage depend on the number of axes of a block, which is not saved. The result therefore has the slots
    of blocks with one, two, three and four axes.

    group: a param group of the saved state, which contains the recipe.
    """
    declared = json.loads(group["recipe"])
    declared.pop("schema", None)
    found = set()
    for path, rule in load_recipe(declared).rules().items():
        for axes in range(1, 5):
            where = f"{path}.update" if path else "update"
            for stage, slot, declared_slot in chain_slots(rule.update, (2,) * axes, where):
                if declared_slot.role == "statistic":
                    found.add(f"{stage}/{slot}")
    return found
