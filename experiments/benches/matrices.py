"""The matrices of benches: of a known spectrum, recorded from training, or from a run or a checkpoint of a user."""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from itertools import count, islice
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import numpy as np
import torch
from pydantic import Field, field_validator, model_validator
from pydantic_core.core_schema import ValidationInfo
from torch import Tensor

import eigengraft
from eigengraft.component import Component, validated
from eigengraft.errors import RecipeError
from eigengraft.optimizers import load_recipe
from eigengraft.preconditioners import chain_slots
from eigengraft.slots import StateKey, dotted

from ..reports.records import group_by
from ..training.experiment import load_experiment
from ..training.rundir import CHECKPOINT, RunDirectory
from ..training.train import isolated_run
from .bench import Bench, Declaration, Listed, PositiveInts, label
from .view import Panel, Recommendation, Row, measured_rows, xy

FILE = Path(__file__).with_name("recorded.npz")
"""File of the recorded factors. `record_factors.py` writes it."""


@cache
def recorded_factors() -> Tensor:
    """Return factors of Shampoo `[N, 64, 64]` in float32, which `record_factors.py` recorded during a training.

    They are sorted by step, layer and axis. The result is cached: do not write into it.
    """
    with np.load(FILE) as file:
        triangles = torch.from_numpy(np.stack([file[name] for name in sorted(file.files) if name != "made"]))
    d = int((2 * triangles.shape[1]) ** 0.5)
    upper = triangles.new_zeros(len(triangles), d, d)
    rows, columns = torch.triu_indices(d, d)
    upper[:, rows, columns] = triangles
    return upper + upper.triu(1).mT


def with_unit_norm(a: Tensor) -> Tensor:
    """Return symmetric matrices `[N, d, d]` in float64, each divided by its largest eigenvalue."""
    a = a.double()
    size: Tensor = torch.linalg.matrix_norm(a, ord=2)
    return a / size.clamp_min(torch.finfo(torch.float64).tiny)[:, None, None]


class Spectrum(Component, ABC, family="spectrum"):
    """A kind of test matrices, made as stacks `[N, d, d]` in float64 whose largest eigenvalue is 1.

    Equal arguments of `stack` give equal stacks.
    """

    singular: ClassVar[bool] = False
    """True if some matrices have no inverse."""

    @abstractmethod
    def stack(self, count: int, d: int, seed: int) -> Tensor | None:
        """Return at most `count` matrices of order d, as a stack `[N, d, d]`. Return None if there are none of order d.

        seed: seed of the random numbers. Recorded matrices are not random: the stack begins at matrix `seed`, modulo
            the number of recorded matrices.
        """


class Synthetic(Spectrum):
    """Q diag(lambda) Q^T with Q uniform over the orthogonal matrices."""

    @abstractmethod
    def eigenvalues(self, d: int) -> Tensor:
        """Return the eigenvalues lambda `[d]`. The largest one is 1."""

    def stack(self, count: int, d: int, seed: int) -> Tensor | None:
        q = orthogonal(count, d, seed)
        return (q * self.eigenvalues(d).unsqueeze(0).unsqueeze(0)) @ q.mT


class Geometric(Synthetic):
    """lambda_i = condition^(-i / (d - 1)),  i = 0 .. d - 1"""

    kind: Literal["geometric"] = "geometric"
    condition: float = Field(1e4, ge=1, description="largest over smallest eigenvalue")

    def eigenvalues(self, d: int) -> Tensor:
        return torch.pow(self.condition, -torch.linspace(0, 1, d, dtype=torch.float64))


class PowerLaw(Synthetic):
    """lambda_i = i^(-power),  i = 1 .. d: similar to the spectra of factors of trained layers"""

    kind: Literal["power_law"] = "power_law"
    power: float = Field(2.0, ge=0, description="exponent of the decay of the eigenvalues")

    def eigenvalues(self, d: int) -> Tensor:
        return torch.arange(1, d + 1, dtype=torch.float64) ** -self.power


class Clustered(Synthetic):
    """Two clusters: a share of the eigenvalues at 1, the rest at 1 / ratio.

    If the share is small, only one eigenvalue is large, as for a signal of rank one above a floor. If the share is
    near 1, only one eigenvalue is small. The defaults are those of the test matrix of 4-bit Shampoo (Wang et al. 2024,
    arXiv:2405.18144): of its 1200 eigenvalues, 800 are 1000 and 400 are 1.
    """

    kind: Literal["clustered"] = "clustered"
    ratio: float = Field(1000.0, ge=1, description="upper over lower value")
    share: float = Field(2 / 3, gt=0, lt=1, description="share of the eigenvalues in the upper cluster")

    def eigenvalues(self, d: int) -> Tensor:
        upper = max(1, min(round(self.share * d), d - 1))  # at least one eigenvalue in each cluster
        values = torch.full((d,), 1 / self.ratio, dtype=torch.float64)
        values[:upper] = 1
        return values


class RankDeficient(Synthetic):
    """A share of the eigenvalues falls geometrically from 1 to 1 / condition, the rest is 0, as after few gradients."""

    kind: Literal["rank_deficient"] = "rank_deficient"
    singular: ClassVar[bool] = True
    share: float = Field(0.25, gt=0, le=1, description="rank over size")
    condition: float = Field(1e2, ge=1, description="largest over smallest nonzero eigenvalue")

    def eigenvalues(self, d: int) -> Tensor:
        rank = max(1, round(self.share * d))
        nonzero = self.condition ** -torch.linspace(0, 1, rank, dtype=torch.float64)
        return torch.cat([nonzero, torch.zeros(d - rank, dtype=torch.float64)])


class Recorded(Spectrum):
    """Factors of layers in training, recorded by `record_factors.py`. For sizes below 64 the leading d x d entries are
    used.
    """

    kind: Literal["recorded"] = "recorded"
    singular: ClassVar[bool] = True

    def stack(self, count: int, d: int, seed: int) -> Tensor | None:
        factors = recorded_factors()
        if d > factors.shape[-1]:
            return None
        start = seed % len(factors)
        return with_unit_norm(torch.roll(factors, -start, 0)[:count, :d, :d])


def orthogonal(count: int, d: int, seed: int) -> Tensor:
    """Return orthogonal matrices `[count, d, d]` in float64, drawn uniformly."""
    normal = np.random.default_rng((seed, d)).standard_normal((count, d, d))
    q, r = torch.linalg.qr(torch.from_numpy(normal))
    signed: Tensor = q * r.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)
    return signed


SPECTRA: tuple[Declaration, ...] = (
    *({"kind": "geometric", "condition": condition} for condition in (1e1, 1e2, 1e3, 1e4, 1e5, 1e6)),
    {"kind": "clustered", "ratio": 1e4, "share": 0.01},
    {"kind": "clustered", "ratio": 1e4, "share": 0.99},
    {"kind": "power_law"},
    {"kind": "clustered"},
    {"kind": "rank_deficient"},
    {"kind": "recorded"},
)


def default_spectra() -> tuple[Spectrum, ...]:
    """Return the spectra that benches have by default."""
    return tuple(validated(Spectrum, dict(item)) for item in SPECTRA)  # type: ignore[type-abstract]


GRADIENT_LAYERS = tuple(f"blocks.{i}.attention.{name}.weight" for i in (0, 1) for name in ("query", "value", "mix"))
"""Parameters of the language model whose gradients `layer_gradients` returns."""
LONGEST = 1024
"""Largest length d of an axis that has a factor, as in the shipped recipes. A factor costs O(d^3)."""


def gradients_of(source: Any, steps: int) -> Iterator[dict[str, Tensor]]:
    """Train an experiment. Yield the gradients of each batch as matrices by name, for parameters with two or more axes.

    All axes of a gradient after the first are merged into one. The optimizer makes a step after each of the first
    `steps` batches. The gradients of all later batches, which have no end, are computed at the same weights. Until the
    generator is closed, the random state and the number of threads are those of the experiment. Then they are those of
    the caller again.

    source: a mapping, an experiment file, or the directory of a run.
    """
    experiment = load_experiment(source)
    with isolated_run(experiment):
        dataset, model = experiment.task.new_data(), experiment.task.new_model(experiment.seed)
        optimizer = eigengraft.compose(experiment.run_recipe, model, lr=experiment.lr)
        for number in count():
            batch = dataset.batch(experiment.seed, number)
            optimizer.zero_grad()
            experiment.task.loss(model(batch.inputs), batch.targets).backward()  # type: ignore[no-untyped-call]
            named = ((name, p.grad) for name, p in model.named_parameters() if p.ndim > 1)
            yield {name: g.detach().flatten(1) for name, g in named if g is not None}
            if number < steps:
                optimizer.step()


@lru_cache(maxsize=4)
def layer_gradients(width: int, samples: int, seed: int = 0, steps: int = 100) -> Tensor:
    """Return gradients `[samples, layers, width, width]` in float64 of the layers GRADIENT_LAYERS.

    All gradients are computed at the same weights, after `steps` steps of AdamW. Each sample is the gradient of a new
    batch. The gradients of each layer are divided by a number, so that their mean squared norm is 1. The result is
    cached: do not write into it.

    width: width of the language model whose layers these are.
    samples: number of gradients of each layer.
    """
    task = {"kind": "byte_lm", "width": width, "heads": 2, "context": 32, "batch_size": 8, "max_bytes": 2**20}
    source = {"task": task, "recipe": "adamw", "lr": 5e-3, "seed": seed}
    found = _samples(source, steps, samples, width)
    return torch.stack([found[name] for name in GRADIENT_LAYERS], dim=1)


@lru_cache(maxsize=2)
def run_gradients(source: str, width: int, samples: int, steps: int) -> dict[str, Tensor]:
    """Return gradients `[samples, width, width]` of each layer of an experiment or run, scaled as in `layer_gradients`.

    A layer with a side below `width` is left out. The gradients of all other layers are cut to their leading `width` x
    `width` entries. For an embedding these entries can all be 0, because the first rows of an embedding belong to bytes
    that a text may not have.

    source: path of an experiment file, or of the directory of a run.
    samples: number of gradients. Each is that of a new batch, at the same weights.
    steps: number of training steps before the first of these gradients.
    """
    found = _samples(source, steps, samples, width)
    if not found:
        raise RecipeError(f"record: no matrix of '{source}' has two sides of {width} or more; give a smaller width")
    return found


def _samples(source: Any, steps: int, samples: int, width: int) -> dict[str, Tensor]:
    taken = [
        {name: g[:width, :width].double() for name, g in gradients.items() if min(g.shape) >= width}
        for gradients in islice(gradients_of(source, steps), steps, steps + samples)
    ]
    layers = {name: torch.stack([gradients[name] for gradients in taken]) for name in taken[0]}
    return {name: g / g.square().sum((1, 2)).mean().sqrt().clamp_min(1e-300) for name, g in layers.items()}


@lru_cache(maxsize=2)
def trained_factors(source: str, at: tuple[int, ...], beta: float) -> dict[str, list[Tensor]]:
    """Train an experiment or run for `max(at)` steps. Return the Gram factors of its gradients.

    A <- beta A + (1 - beta) G G^T for axis 0 of a gradient G, and with G^T G for axis 1, bias corrected. The result is
    a mapping from "<parameter> factor.<axis>" to a list of matrices `[1, d, d]` in float64: the values of the factor A
    after the numbers of steps in `at`. An axis longer than LONGEST has no factor.

    source: path of an experiment file, or of the directory of a run.
    """
    means: dict[str, Tensor] = {}
    found: dict[str, dict[int, Tensor]] = {}
    for step, gradients in enumerate(islice(gradients_of(source, max(at)), max(at)), start=1):
        for name, g in gradients.items():
            for axis, x in enumerate((g.double(), g.double().mT)):
                if len(x) <= LONGEST:
                    key = f"{name} factor.{axis}"
                    means[key] = beta * means.get(key, torch.zeros(())) + (1 - beta) * (x @ x.mT)
        if step in at:
            for key, a in means.items():
                found.setdefault(key, {})[step] = a[None] / (1 - beta**step)
    return {key: [own[step] for step in at] for key, own in found.items()}


def saved_factors(path: str) -> dict[str, Tensor]:
    """Return the factors in a saved optimizer state, by parameter and slot, as stacks `[blocks, d, d]`.

    path: the directory of a run of a single process, whose last checkpoint is read; one checkpoint of the run, such as
        `RUN/checkpoint-60`; or a file that `torch.save` made of `optimizer.state_dict()` or of a mapping with such a
        state under "optimizer".

    Factors are slots of the role `statistic` that are square matrices. Their scale is that of the state, without bias
    correction.

    Raises RecipeError if the path has no such state, or the state has no such factor.
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
        reason = "save the state of a recipe with such factors, as shampoo or soap"
        if coded:
            reason = "all are quantized; save a run without `storage`"
        raise RecipeError(f"checkpoint: '{path}' has no factor that is a matrix ({reason})")
    sizes = Counter(text for text, _ in found)
    return {text if sizes[text] == 1 else f"{text} {d}": torch.stack(own) for (text, d), own in found.items()}


def _optimizer_state(path: str) -> Mapping[str, Any]:
    saved = RunDirectory(path).checkpoints()
    file = saved[max(saved)] if saved else Path(path)
    if file.is_dir():
        file /= CHECKPOINT
    if not file.is_file():
        raise RecipeError(
            f"checkpoint: '{file}' is not a file; give the directory of a run or of a checkpoint, or a file of a saved "
            "optimizer"
        )
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
            where = dotted(path, "update")
            for stage, slot, declared_slot in chain_slots(rule.update, (2,) * axes, where):
                if declared_slot.role == "statistic":
                    found.add(f"{stage}/{slot}")
    return found


def relative_error(x: Tensor, reference: Tensor) -> Tensor:
    """Return ||X - Y||_F / ||Y||_F `[N]` of stacks X (`x`) and Y (`reference`) `[N, m, n]`, in float64."""
    x = x.double()
    error: Tensor = torch.linalg.matrix_norm(x - reference) / torch.linalg.matrix_norm(reference)
    return error


def angle(x: Tensor, reference: Tensor) -> Tensor:
    """Return the angles `[N]` in degrees between the matrices of two stacks `[N, m, n]`, taken as vectors x and y.

    An angle is computed as 2 asin(||x/||x|| - y/||y|||| / 2), which is exact for tiny angles too.
    """
    x = x.double()
    x = x / torch.linalg.matrix_norm(x, keepdim=True)
    reference = reference / torch.linalg.matrix_norm(reference, keepdim=True)
    found: Tensor = 2 * (torch.linalg.matrix_norm(x - reference) / 2).clamp_max(1).asin() * (180 / math.pi)
    return found


def matrix_power(a: Tensor, exponent: float, floor: float | None = None) -> Tensor:
    """Return A^p, with p the exponent, in float64 for positive definite A `[..., d, d]`.

    floor: lower bound of the eigenvalues, as a share of the largest one. Smaller eigenvalues are raised to it first.
        None: there is no bound.
    """
    values, q = torch.linalg.eigh(a.double())
    if floor is not None:
        values = values.maximum(floor * values[..., -1:])
    power: Tensor = (q * values.unsqueeze(-2).pow(exponent)) @ q.mT
    return power


def worst_of(values: Tensor) -> float:
    """Return the largest of `values`; NaN if `values` is empty or has a NaN."""
    return float(values.max()) if values.numel() else math.nan


OWN_BETA = 0.95
"""Decay per step of the factors of a recorded run, as in the shipped recipes."""


@dataclass(frozen=True)
class MatrixSource:
    """Matrices of one size: those of a spectrum, or the factor of a layer.

    name: label of the spectrum, or names of the parameter and its factor.
    size: order d.
    stack: function that returns the matrices `[N, d, d]` in float64. It returns None if the spectrum has no matrices of
        order d.
    spectrum: the spectrum; None for the user's own matrices.
    """

    name: str
    size: int
    stack: Callable[[], Tensor | None]
    spectrum: Spectrum | None = None


class OwnMatrices(Bench, ABC):
    """A bench that also accepts the gradients of a user's own run."""

    record: str | None = Field(
        None,
        description="run directory or experiment file whose gradients are measured, with one row for each layer; "
        "none: the bench makes the data itself",
    )

    layer_field: ClassVar[str] = "layer"
    """Name of the field in which a row has the name of its layer."""
    made_fields: ClassVar[tuple[str, ...]] = ()
    """Fields of the matrices that the bench makes itself. They have no effect on the user's own matrices."""
    run_fields: ClassVar[tuple[str, ...]] = ()
    """Fields of the run that `record` names. They have no effect without it."""

    @model_validator(mode="after")
    def _no_idle_field(self) -> Self:
        for name, reason in self.idle_fields().items():
            if getattr(self, name) != type(self).model_fields[name].get_default(call_default_factory=True):
                raise ValueError(f"{name}: has no effect, because {reason}; remove it")
        return self

    @property
    def own(self) -> bool:
        """Return True if the matrices are the user's own."""
        return self.record is not None

    def idle_fields(self) -> dict[str, str]:
        """Return the names of fields that have no effect with the values of the other fields, each with the reason."""
        made = self.made_fields if self.own else ()
        found = dict.fromkeys(made, "the matrices are those of `checkpoint` or `record`")
        return found if self.record else found | dict.fromkeys(self.run_fields, "`record` names no run")

    def recommended(self, where: Callable[[Row], str], **fields: Any) -> list[Recommendation]:
        """Return a list of one rule, by which the bench recommends its best candidate for each problem.

        If the matrices are the user's own, the rule recommends a candidate for each problem and layer. The name of the
        layer then precedes that of the problem.

        where: function from a row of the results to the name of its problem without the layer, such as a size and a
            dtype.
        fields: all other fields of the rule (`Recommendation`).
        """
        named = (lambda row: f"{row[self.layer_field]}: {where(row)}") if self.own else where
        return [Recommendation(named, **fields)]

    def notes(self, rows: Sequence[Row]) -> list[str]:
        """Return a line about the worst layer, on which the least error of all candidates is larger than on every other
        layer.

        Return [] if the matrices are not the user's own.
        """
        first = next(iter(self.recommendations()), None)
        if not self.own or first is None or first.error is None:
            return []
        layers: list[tuple[float, str]] = []
        kept = [row for row in measured_rows(rows) if first.keep(row)]
        for layer, own in group_by(kept, lambda row: str(row[self.layer_field])).items():
            layers.append((min(map(first.error, group_by(own, lambda row: row["candidate"]).values())), layer))
        value, name = max(layers, default=(0.0, ""))
        return [f"worst layer: {name}, {first.error_name} {value:.2g} by its most accurate candidate"] if name else []


class MatrixBench(OwnMatrices, ABC):
    """A bench of components that accept symmetric positive semi-definite matrices."""

    layer_field: ClassVar[str] = "spectrum"
    made_fields: ClassVar[tuple[str, ...]] = ("spectra", "sizes", "count")
    run_fields: ClassVar[tuple[str, ...]] = ("steps",)

    spectra: Listed[Spectrum] = Field(default_factory=default_spectra, description="spectra of the measured matrices")
    sizes: PositiveInts = Field((16, 64, 128), description="d of the matrices d x d")
    count: int = Field(4, ge=1, description="matrices in a stack")
    checkpoint: str | None = Field(
        None,
        description="run, checkpoint of a run, or saved optimizer state, whose factors are measured, with one row for "
        "each layer; none: no such factors",
    )
    steps: int = Field(
        100,
        ge=1,
        description="training steps of the run `record`; its factors are computed from the gradients of these steps",
    )

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if self.checkpoint is not None and self.record is not None:
            raise ValueError("checkpoint cannot be combined with record; give one source of matrices")
        return self

    @property
    def own(self) -> bool:
        return self.checkpoint is not None or self.record is not None

    def sources(self) -> list[MatrixSource]:
        """Return the sources of test matrices: each spectrum in each size or, if `checkpoint` or `record` is given, the
        statistics of each of the user's own layers.
        """
        if not self.own:
            return [
                MatrixSource(label(spectrum), d, partial(spectrum.stack, self.count, d, self.seed), spectrum)
                for d in self.sizes
                for spectrum in self.spectra
            ]
        found: Mapping[str, Tensor] = (
            saved_factors(self.checkpoint)
            if self.checkpoint is not None
            else {k: v[0] for k, v in trained_factors(str(self.record), (self.steps,), OWN_BETA).items()}
        )
        return [MatrixSource(name, a.shape[-1], partial(with_unit_norm, a)) for name, a in found.items()]

    def sweep(self, error: str, y: str, same: tuple[str, ...], band: float) -> Panel:
        """Return the panel that draws an error of each candidate against the condition number of the matrices.

        If the matrices are the user's own, all of them are drawn. Otherwise only matrices of the largest size with a
        `Geometric` spectrum are drawn, because these spectra differ in nothing but their condition number.

        error: column of the rows that has the error.
        y: label of the vertical axis.
        same: columns such as "dtype". Only rows that have the value of the first row in each of them are drawn.
        band: error that is drawn as a horizontal line, to compare with.
        """
        swept = {label(spectrum) for spectrum in self.spectra if isinstance(spectrum, Geometric)}
        keep = bool if self.own else (lambda row: row["spectrum"] in swept)
        lines = {"{}": xy("condition", error)}
        return Panel("condition number", y, lines, keep, same, () if self.own else ("size",), band)


class DampedBench(MatrixBench, ABC):
    """A bench of inverse roots (A + r I)^-e,  r = ridge lambda_max."""

    ridge: float = Field(1e-6, ge=0, description="ridge that is added to all eigenvalues, in units of the largest one")

    @field_validator("ridge")
    @classmethod
    def _inverses_exist(cls, ridge: float, info: ValidationInfo) -> float:
        """Return the ridge. Raise ValueError if it is 0 and a spectrum of the bench has matrices without an inverse."""
        own = info.data.get("checkpoint") is not None or info.data.get("record") is not None
        without = [label(spectrum) for spectrum in info.data.get("spectra", ()) if spectrum.singular and not own]
        if ridge == 0 and without:
            raise ValueError(
                f"must be above 0, because matrices of the spectrum '{without[0]}' have no inverse without a ridge"
            )
        return ridge

    def damped(self, a: Tensor) -> Tensor:
        """Return A + r I, with r the field `ridge`, for matrices A whose largest eigenvalue is 1."""
        return a + self.ridge * torch.eye(a.shape[-1], dtype=a.dtype)
