"""A bench of the steps of recipes and of optimizers of other libraries.

The optimizers take turns, so that other load of the machine affects all of them. The measured time of a step is
compared with a computed one: the time that its counted operations and bytes need at the measured rates of this machine.
"""

from __future__ import annotations

import importlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from statistics import median
from typing import Annotated, Any, ClassVar, Literal, Self

import torch
from pydantic import BeforeValidator, Field, field_validator, model_validator
from torch import Tensor
from torch.nn import Parameter

from eigengraft.component import Component
from eigengraft.errors import RecipeError, did_you_mean
from eigengraft.optimizers import Optimizer
from eigengraft.optimizers.plan.plan import plan

from ..reports.records import group_by
from ..track.cost import Card
from ..training.imports import import_component
from .bench import Bench, Column, Listed, PositiveInts, Problem, first_line, listed
from .step_times import (
    CLOCKS,
    Contender,
    held_bytes,
    kernels,
    measured_card,
    operators,
    peak_bytes,
    step_times,
    take_turns,
)
from .view import Panel, Recommendation, Row, Table, cell, finite, milli, reduction, xy

Shapes = list[tuple[int, ...]]
TURNS = 8
"""Number of gradients that are used in turn. With a single gradient, statistics would have low rank."""


def gpt(layers: int = 4, width: int = 256, vocabulary: int = 4096) -> Shapes:
    """Return the shapes of a GPT: an embedding, two vectors of the last norm, and the parameters of each layer.

    A layer has the matrices qkv and output, two matrices of an MLP, and four vectors of norms.
    """
    w = width
    layer: Shapes = [(3 * w, w), (w, w), (4 * w, w), (w, 4 * w), (w,), (w,), (w,), (w,)]
    return [(vocabulary, w), *layers * layer, *2 * [(w,)]]


def convolutions() -> Shapes:
    """Return the shapes of a small ResNet: kernels, the norms after them, and the head."""
    kernels: Shapes = [(64, 3, 7, 7), *2 * [(64, 64, 3, 3)], (128, 64, 3, 3), (128, 128, 3, 3), (256, 128, 3, 3)]
    kernels += [(256, 256, 3, 3), (512, 256, 1, 1)]
    return [*kernels, *(norm for kernel in kernels for norm in 2 * [(kernel[0],)]), (10, 512), (10,)]


def matrices() -> Shapes:
    """Return the shapes of sixteen matrices of sides 256 and 512."""
    return [*8 * [(256, 256)], *4 * [(512, 256)], *4 * [(256, 512)]]


def squares(blocks: int = 256, size: int = 32) -> Shapes:
    """Return the shapes of `blocks` square matrices of order `size`."""
    return [(size, size) for _ in range(blocks)]


def embedding(rows: int = 50_000, width: int = 64) -> Shapes:
    """Return the shape of one long embedding."""
    return [(rows, width)]


def gpt2(layers: int = 12, width: int = 768, vocabulary: int = 50_257) -> Shapes:
    """Return the shapes of GPT-2 small with an untied head: 163 million numbers."""
    return [*gpt(layers, width, vocabulary), (1024, width), (vocabulary, width)]


SETS: Mapping[str, Callable[..., Shapes]] = {
    own.__name__: own for own in (gpt, convolutions, matrices, squares, embedding, gpt2)
}


def shape_set(name: str) -> Shapes:
    """Return the shapes that a name declares.

    name: a set of shapes, such as "gpt", or "gpt:layers=8" with a value for one dimension.

    Raises RecipeError if the set or the dimension is unknown, or the value is no whole number above 0.
    """
    kind, _, given = name.partition(":")
    dimension, _, number = given.partition("=")
    if kind not in SETS:
        hint = did_you_mean(kind, SETS)
        raise RecipeError(f"sets: '{kind}' is not a set of shapes{hint} (the sets are {', '.join(SETS)})")
    if not given:
        return SETS[kind]()
    known = SETS[kind].__annotations__.keys() - {"return"}
    options = ", ".join(f"{kind}:{own}=NUMBER" for own in sorted(known)) or f"{kind} alone"
    if dimension not in known:
        raise RecipeError(f"sets: '{name}': {kind} has no dimension '{dimension}'; write {options}")
    if not number.isdecimal() or int(number) == 0:
        raise RecipeError(f"sets: '{name}': {dimension} must be a whole number above 0; write {options}")
    return SETS[kind](**{dimension: int(number)})


def initial_values(shapes: Sequence[tuple[int, ...]], seed: int) -> list[Tensor]:
    """Return initial parameters of these shapes, drawn from N(0, 0.02^2)."""
    generator = torch.Generator().manual_seed(seed)
    return [0.02 * torch.randn(shape, generator=generator) for shape in shapes]


def turns_of_gradients(shapes: Sequence[tuple[int, ...]], seed: int) -> list[list[Tensor]]:
    """Return TURNS sets of random gradients of all parameters, which steps use in turn.

    Entries are drawn from N(0, 1e-4). Row i and column i are then scaled by i^(-1/2).
    """
    generator = torch.Generator().manual_seed(seed + 1)
    return [[_scaled(torch.randn(shape, generator=generator)) for shape in shapes] for _ in range(TURNS)]


def _scaled(x: Tensor) -> Tensor:
    for axis, d in enumerate(x.shape[:2]):
        x = x * torch.arange(1, d + 1).rsqrt().reshape(-1, *[1] * (x.ndim - 1 - axis))
    return 1e-2 * x


INTERVAL = "{interval}"
"""Placeholder for the interval between refreshes, in overrides and options."""


class StepCase(Component):
    """A candidate of the bench: a recipe with overrides, or a peer with options.

    A peer is an optimizer class of another library, written "module:Class" or "file.py:Class". The bench measures
    candidates with several intervals between refreshes. "{interval}" in an override, or as the value of an option,
    stands for the number of steps of the interval.

    `maths` is the name of the algorithm. Candidates with the same algorithm take turns. The times of recipes are
    compared with those of the peers with the same algorithm, and of recipes whose field `compared` is true.
    """

    recipe: str | None = Field(
        default=None,
        examples=["soap"],
        description="shipped name or YAML file of a recipe; a candidate has either a recipe or a peer",
    )
    overrides: tuple[str, ...] = Field(
        default=(), strict=False, description="changes of the recipe, applied in order, as dotted.path=value"
    )
    peer: str | None = Field(
        default=None,
        description="class of another library, as module:Class or file.py:Class; none: the candidate is a recipe",
    )
    options: dict[str, Any] = Field(
        default={}, description="keyword arguments of the peer's class, beside the parameters"
    )
    switches: dict[str, Any] = Field(
        default={},
        description="attributes of modules that are set before the peer's class is called: module:name -> value",
    )
    maths: str = Field(default="", description="name of the algorithm; default: the recipe, or the class")
    name: str | None = Field(default=None, description="name in tables; default: the recipe, or the class")
    compared: bool = Field(default=False, description="true: recipes with the same `maths` are compared with this one")

    @model_validator(mode="after")
    def _one_of_two(self) -> Self:
        if (self.recipe is None) == (self.peer is None):
            raise ValueError("exactly one of recipe and peer is required; give one of the two")
        if self.recipe is not None and (self.options or self.switches):
            raise ValueError("options and switches cannot be combined with recipe; give overrides, or a peer")
        if self.peer is not None and ":" not in self.peer:
            raise ValueError(f"peer: must have the form module:Class, as torch.optim:AdamW, got '{self.peer}'")
        if self.peer is not None and self.overrides:
            raise ValueError(
                f"overrides: cannot be combined with the peer '{self.peer}', because they change recipes; give "
                "`options`, the arguments of the class"
            )
        return self

    def label(self) -> str:
        """Return the name of the candidate in tables."""
        return self.name or self.recipe or str(self.peer)

    def kind_of_maths(self) -> str:
        """Return the name of the algorithm. Only candidates with the same algorithm are compared."""
        return self.maths or self.label()

    @property
    def refreshes(self) -> bool:
        """Return True if the candidate depends on the interval between refreshes."""
        return any(INTERVAL in text for text in self.overrides) or INTERVAL in self.options.values()

    @property
    def is_reference(self) -> bool:
        """True if recipes with the same algorithm are compared with this candidate. The column `over_best_other` of a
        recipe has its time divided by that of the fastest such candidate.
        """
        return self.compared or self.recipe is None

    def build(self, parameters: Sequence[Parameter], interval: int) -> torch.optim.Optimizer:
        """Return the optimizer of this candidate. Raise ImportError if its class is in a library that is not installed.

        interval: number of steps between refreshes, which replaces "{interval}".
        """
        if self.recipe is not None:
            changes = [text.replace(INTERVAL, str(interval)) for text in self.overrides]
            return Optimizer(list(parameters), self.recipe, lr=1e-3, overrides=changes)
        options = {key: interval if value == INTERVAL else value for key, value in self.options.items()}
        for where, value in self.switches.items():
            module, _, attribute = where.partition(":")
            setattr(importlib.import_module(module), attribute, value)
        made: torch.optim.Optimizer = self._peer_class()(list(parameters), **options)
        lacking = [name for name in ("param_groups", "state", "step") if not hasattr(made, name)]
        if lacking:
            raise TypeError(f"peer: an optimizer has `{lacking[0]}`, which '{self.peer}' lacks; name its class")
        return made

    def _peer_class(self) -> Any:
        where, _, name = str(self.peer).rpartition(":")
        module = import_component(where) if where.endswith(".py") else importlib.import_module(where)
        if not hasattr(module, name):
            raise RecipeError(f"peer: '{where}' has no class '{name}'; give a class that '{where}' defines")
        return getattr(module, name)


_AXES = '.statistic.axes={"max_size": 1024, "vectors": false}'


def _recipe(recipe: str, stage: str, maths: str, *changes: str) -> StepCase:
    """Return a recipe as a candidate, for a comparison with other libraries' optimizers of the algorithm `maths`.

    The settings of the recipe are made equal to those of the other libraries: parameters are not split or merged, long
    axes and vectors have no factor, and refreshes are spread over all steps of an interval.

    stage: path of the stage that has the statistic, such as "update.eigenbasis".
    changes: further overrides of the recipe.
    """
    refresh = (f"{stage}.refresh.steps={INTERVAL}", f"{stage}.refresh.min_wave_work=1")
    same = ("routes=[]", "blocking={}", f"{stage}{_AXES}", *refresh, *changes)
    return StepCase(recipe=recipe, overrides=same, maths=maths, name=maths if changes else recipe)


_EIGENBASIS, _SHAMPOO = "update.eigenbasis", "update.graft.direction.shampoo"


def _heavyball(name: str, maths: str) -> StepCase:
    """Return the candidate for an optimizer class of HeavyBall, without compilation.

    name: name of the class.
    maths: name of its algorithm.
    """
    options = {"lr": 1e-3, "precondition_frequency": INTERVAL, "max_precond_dim": 1024, "merge_dims": False}
    return StepCase(
        peer=f"heavyball:{name}",
        options={**options, "use_precond_schedule": False},
        switches={"heavyball.utils:compile_mode": None},
        maths=maths,
        name=f"HeavyBall {name}",
    )


STEP_CASES = (
    _recipe("soap_fitted", _EIGENBASIS, "soap"),
    StepCase(
        peer="pytorch_optimizer:SOAP",
        options={"lr": 1e-3, "precondition_frequency": INTERVAL, "max_precondition_dim": 1024},
        maths="soap",
        name="pytorch-optimizer SOAP",
    ),
    _heavyball("SOAP", "soap"),
    _recipe("soap_fitted", _EIGENBASIS, "soap, permuted", f"{_EIGENBASIS}.transport=permute"),
    _recipe("soap_kl", _EIGENBASIS, "kl_soap"),
    _heavyball("KLSOAP", "kl_soap"),
    _recipe("shampoo", _SHAMPOO, "shampoo"),
    StepCase(recipe="muon", overrides=("routes=[]",), maths="muon"),
    StepCase(peer="torch.optim:Muon", options={"lr": 1e-3}, maths="muon", name="torch Muon"),
    StepCase(recipe="adamw", maths="adamw"),
    StepCase(peer="torch.optim:AdamW", options={"fused": True}, maths="adamw", name="torch AdamW, fused"),
    StepCase(peer="torch.optim:AdamW", options={"foreach": True}, maths="adamw", name="torch AdamW, foreach"),
    StepCase(recipe="sgd", maths="sgd"),
    StepCase(
        peer="torch.optim:SGD",
        options={"lr": 1e-3, "momentum": 0.9, "fused": True},
        maths="sgd",
        name="torch SGD, fused",
    ),
    StepCase(recipe="lion", maths="lion"),
    StepCase(recipe="adamw_8bit", maths="adamw_8bit"),
    StepCase(peer="torchao.optim:AdamW8bit", maths="adamw_8bit", name="torchao AdamW8bit"),
)
"""Default candidates. If the library of an optimizer is not installed, its row says so."""
QUICK = len(STEP_CASES) - 2
"""Number of candidates of the quick run. The last two are left out, because torchao compiles its steps for minutes."""


def parse_candidates(value: Any) -> Any:
    """Read "module:Class" as an optimizer of another library (a peer), and any other name as a recipe."""
    return tuple(
        {"peer" if ":" in item else "recipe": item} if isinstance(item, str) else item for item in listed(value)
    )


class StepBench(Bench):
    """Measure the time of a step of every optimizer on every set of parameters, with every interval of refreshes.

    Candidates with the same algorithm take turns: in a round each of them makes one step, A B C A B C ... The first
    `warm` rounds are not timed. In the rounds after these, `periods` intervals between refreshes are timed, but at
    least 10 steps. Operators and bytes are counted in further steps, which are not timed. The reported times are those
    of a typical interval, whose step k takes the median time of step k over all timed intervals. The field `seconds`
    has no effect.
    """

    kind: Literal["step"] = "step"
    candidates: Annotated[tuple[StepCase, ...], BeforeValidator(parse_candidates)] = Field(
        STEP_CASES, description="recipes and peers, or their names"
    )
    sets: Listed[str] = Field(
        default=("gpt", "convolutions", "matrices", "squares", "embedding"),
        description="sets of parameters: gpt, convolutions, matrices, squares, embedding, gpt2, or one of them with a "
        "dimension, as gpt:layers=8",
    )
    intervals: PositiveInts = Field((1, 10), description="steps between refreshes")
    dtype: Literal["float32", "bfloat16"] = Field("float32", description="dtype of parameters and gradients")
    clock: Literal["wall", "cpu", "thread"] = Field(
        default="wall",
        description="wall: time of day; cpu: processor time of the process; thread: processor time of the thread that "
        "calls `step`, without delayed refreshes. Processor time does not contain the time of other processes",
    )
    warm: int = Field(
        4,
        ge=1,
        description="number of first rounds, which are not timed, because state, roots and bases are made in them",
    )
    periods: int = Field(
        3, ge=1, description="number of timed intervals between refreshes; at least 10 steps are timed"
    )
    candidate_field: ClassVar[str] = "candidates"
    columns: ClassVar[Mapping[str, Column]] = {
        "numbers": Column("entries of all parameters"),
        "steady": Column("time of a step without refreshes, the lower quartile over the steps of an interval", "ms"),
        "refresh": Column("time that refreshes add in one interval", "ms"),
        "amortized": Column("time of a step, refreshes included", "ms"),
        "median": Column("median step of an interval", "ms"),
        "largest": Column("longest step of an interval", "ms"),
        "state": Column("bytes of state for each entry of parameters", "bytes"),
        "peak": Column("most bytes a step allocates beyond the state, for each entry; null: not measured", "bytes"),
        "host": Column("median time until `step` returns; on a device the rest of the step runs after that", "ms"),
        "operators": Column("operators of a step without refresh, views left out, a foreach once; null: not counted"),
        "kernels": Column("kernels that a CUDA device runs in a step without refresh; null on a CPU"),
        "build": Column("time of the construction", "s"),
        "counted": Column("time of a step by its counted operations and bytes; null: unknown", "ms"),
        "times_counted": Column("amortized over counted; null: unknown"),
        "over_best_other": Column("amortized over that of the fastest compared candidate; null for these"),
        "steps_ms": Column("time of every measured step", "ms"),
    }
    quick_fields: ClassVar[Mapping[str, Any]] = {
        "candidates": STEP_CASES[:QUICK],
        "sets": ("gpt", "convolutions", "matrices", "squares"),
        "intervals": (10,),
        "periods": 2,
    }

    @model_validator(mode="after")
    def _clock_fits(self) -> Self:
        if self.clock != "wall" and (self.threads > 1 or self.device != "cpu"):
            raise ValueError(
                f"clock: '{self.clock}' cannot be combined with several threads or a device, because it is "
                "processor time, summed over threads and without the device; use one thread on a CPU, or clock=wall"
            )
        return self

    @field_validator("sets")
    @classmethod
    def _known(cls, sets: tuple[str, ...]) -> tuple[str, ...]:
        for name in sets:
            shape_set(name)
        return sets

    def problems(self) -> Sequence[Problem]:
        @cache  # the rates of products and copies are measured once for all problems, with the threads of the bench
        def card() -> Card:
            return measured_card(self.target_device(), getattr(torch, self.dtype), CLOCKS[self.clock])

        found = []
        for name in self.sets:
            for maths, cases in group_by(self.candidates, lambda case: case.kind_of_maths()).items():
                for interval in self.intervals if any(case.refreshes for case in cases) else (1,):
                    shapes = shape_set(name)
                    fields = {
                        "set": name, "maths": maths, "interval": interval, "dtype": self.dtype,
                        "threads": self.threads, "numbers": sum(map(math.prod, shapes)),
                    }  # fmt: skip
                    found.append(Problem(fields, partial(lambda *given: (*given, card()), shapes, cases)))
        return found

    def label(self, candidate: StepCase) -> str:
        return candidate.label()

    def cells_of(self, problem: Problem) -> Iterator[list[Row]]:
        """Yield one list with a row for each candidate of a problem.

        A problem is a set of parameters and a number of steps between refreshes, for candidates with the same
        algorithm. The candidates take turns, so that other load of the machine affects all of them: in a round each of
        them makes one step.
        """
        shapes, cases, card = problem.make()
        interval = problem.fields["interval"]
        dtype, device = getattr(torch, self.dtype), self.target_device()
        gradients = [[g.to(device, dtype) for g in turn] for turn in turns_of_gradients(shapes, self.seed)]
        rows: dict[str, Row] = {}
        ready: list[tuple[StepCase, Contender]] = []
        for case in cases:
            rows[case.label()] = self.row(case, problem.fields)
            try:
                contender = self._contender(case, shapes, interval)
                take_turns([contender], gradients, warm=0, steps=2)
                ready.append((case, contender))
            except Exception as error:  # the class of another library may raise any error
                rows[case.label()]["problem"] = first_line(error)
        rounds = {"warm": self.warm, "steps": max(10, self.periods * interval)}
        times = take_turns([one for _, one in ready], gradients, **rounds, clock=CLOCKS[self.clock])
        for (case, contender), own in zip(ready, times, strict=True):
            optimizer, peak = contender.optimizer, peak_bytes(contender, gradients[0])
            totals, launched = [step.total for step in own], kernels(contender, gradients[0])
            spent = step_times(totals, interval)
            counted = counted_ms(optimizer, card) if isinstance(optimizer, Optimizer) else None
            rows[case.label()] |= {
                **spent,
                "state": held_bytes(optimizer) / problem.fields["numbers"],
                "peak": None if peak is None else peak / problem.fields["numbers"],
                "host": median(step.host for step in own),
                "operators": operators(contender, gradients[0]),
                "kernels": None if launched is None else launched.kernels,
                "build": contender.build,
                "counted": counted,
                "times_counted": spent["amortized"] / counted if counted else None,
                "steps_ms": totals,
            }
        others = [rows[case.label()]["amortized"] for case, _ in ready if case.is_reference]
        for case, _ in ready:
            own_time = rows[case.label()]["amortized"]
            rows[case.label()]["over_best_other"] = own_time / min(others) if others and not case.is_reference else None
        yield list(rows.values())

    def _contender(self, case: StepCase, shapes: Shapes, interval: int) -> Contender:
        dtype, device = getattr(torch, self.dtype), self.target_device()
        parameters = [Parameter(x.to(device, dtype)) for x in initial_values(shapes, self.seed)]
        start = time.perf_counter()
        optimizer = case.build(parameters, interval)
        return Contender(optimizer, parameters, time.perf_counter() - start)

    def table(self) -> Table:
        return Table(
            "steps of all candidates in turn, amortized over an interval",
            {"set": "set", "interval": "interval", "candidate": "candidate"},
            {
                "ms a step": cell("amortized", "first", milli),
                "host": cell("host", "first", milli),
                "steady": cell("steady", "first", milli),
                "refreshes": cell("refresh", "first", milli),
                "largest / median": lambda rows: f"{rows[0]['largest'] / rows[0]['median']:.2f}",
                "state B/p": cell("state", "first", finite("{:.1f}")),
                "peak B/p": cell("peak", "first", finite("{:.1f}")),
                "operators": cell("operators"),
                "kernels": cell("kernels"),
                "build s": cell("build", "first", finite("{:.2f}")),
                "times counted": cell("times_counted", "first", finite("{:.2f}")),
                "/ best other": cell("over_best_other", "first", finite("{:.2f}")),
            },
        )

    def panels(self) -> tuple[Panel, Panel]:
        lines = {"{}": xy("numbers", "amortized"), "{}, counted": xy("numbers", "counted")}
        return (
            Panel("numbers in parameters", "milliseconds a step", lines),
            Panel("bytes of state a parameter", "largest step over the median",
                  {"{}": lambda rows: [(row["state"], row["largest"] / row["median"]) for row in rows]},
                  band=(1.0, 1.3)),
        )  # fmt: skip

    def recommendations(self) -> Sequence[Recommendation]:
        return [
            Recommendation(
                lambda row: f"{row['set']}, {row['maths']}, interval {row['interval']}", cost=reduction("amortized")
            )
        ]


def counted_ms(optimizer: Optimizer, card: Card) -> float:
    """Return an estimate of the milliseconds of an optimizer's step, computed from its operations and bytes.

    `eigengraft plan` counts the operations and the bytes of state.

    card: rates of the machine that runs the step.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    shapes = [(str(place), tuple(parameter.shape)) for place, parameter in enumerate(parameters)]
    found = plan(optimizer.recipe, shapes, (1,), "ddp", parameters[0].dtype)
    traffic = 3.0 * sum(parameter.nbytes for parameter in parameters) + 2.0 * float(found.state[0])
    return card.milliseconds(float(found.work[0]), 0.0, traffic)
