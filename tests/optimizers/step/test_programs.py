"""Traced programs of shipped recipes: each step against the same step as it is, from the same state."""

import json
import logging
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

from eigengraft import Optimizer, Slot, Stage, State, StepContext, compose, load_recipe
from eigengraft.numerics import per_block
from eigengraft.optimizers.step import execution, traced
from eigengraft.optimizers.step.execution import Compiled
from eigengraft.optimizers.step.inputs import GraphNumbers
from eigengraft.optimizers.step.stack_step import StackStep

from ...processes import run
from ...recipes import BROAD
from ...refusals import refused
from ...trajectories import normal

SHAPES = ((24, 16), (24, 16), (16, 40), (16,), (16,))
STEPS = 12
"""More than the interval of most refreshes, so that programs run before and after one."""


def compiled(recipe: str) -> Any:
    routes = [f"routes.{route.name}.compile" for route in load_recipe(recipe).routes]
    return load_recipe(recipe, dict.fromkeys(["compile", *routes], True))


PROGRAMS: dict[Any, traced.Program] = {}
"""Programs of the tests below by their source. Tracing takes most of the time of a test, and equal sources have equal
programs."""


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Updates in which a traced program has run on a stack, each beside the same step as it is."""
    seen = list[int]()

    def both(how: Compiled, step: StackStep, numbers: GraphNumbers | None) -> Tensor:
        program, own = how.program, step.blocks.stack_state
        assert program is not None
        if (inputs := execution._block_inputs(program, step, numbers)) is None:
            return step.by_stages()
        before = {name: x.clone() for name, x in own.tensors.items()}
        (found,) = program.compiled(inputs)
        after = {name: x.clone() for name, x in own.tensors.items()}
        for name, x in before.items():
            own.tensors[name].copy_(x)
        wanted = step.by_stages()
        # the same operations in float64, some of them in another order: a few hundred roundings of the largest entry
        found, near = (x.nan_to_num() for x in (found, wanted))  # directions of nan are not written
        torch.testing.assert_close(found, near, rtol=1e-9, atol=1e-12 * float(near.abs().max()))
        for name, x in own.tensors.items():
            largest = max(float(x.double().abs().max()), 0.01)  # less is what rounding leaves of a difference
            torch.testing.assert_close(after[name].double(), x.double(), rtol=1e-9, atol=1e-12 * largest)
        seen.append(int(step.context.steps[0]))
        return wanted

    monkeypatch.setattr(Compiled, "direction", both)
    monkeypatch.setattr(traced, "generate", lambda graph, symbolic: lambda tensors: graph(*tensors))
    monkeypatch.setattr(traced, "_PROGRAMS", PROGRAMS)
    return seen


QUICK = ("adam", "apollo", "muoneq", "psgd_kron", "shampoo_4bit", "soap_schedule_free")
REFRESHED = {
    *("aro", "caspr", "cosmos", "foam", "jorge", "okls", "psgd_kron", "shampoo_kl", "sinksoap", "sirf", "soap_h"),
    *("soap_kl_h", "soap_muon", "track3"),
    *("reference/distributed_shampoo", "reference/eigenvalue_corrected_shampoo"),
}
"""Recipes without compiled programs for their own update: each step of these has a refresh, which decides on values."""


@pytest.mark.parametrize(
    "recipe", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in BROAD]
)
def test_a_traced_step_has_the_result_of_the_stages(recipe: str, steps: list[int]) -> None:
    parameters = [nn.Parameter(normal(*shape, seed=i)) for i, shape in enumerate(SHAPES)]
    named = [(f"layers.{i}.weight", parameter) for i, parameter in enumerate(parameters)]
    optimizer = Optimizer(named, compiled(recipe), lr=1e-3)
    for step in range(STEPS):
        for i, parameter in enumerate(parameters):
            parameter.grad = normal(*parameter.shape, seed=100 * step + i + 50)
        optimizer.step(lambda: torch.tensor(1.0)) if optimizer.recipe.line_search else optimizer.step()
    hows = [how for param_set in optimizer.param_sets for how in param_set.executions]
    programs = [how for how in hows if isinstance(how, Compiled)]
    assert not programs or len({*steps}) > 2
    reasons = {how.why_not["compiled"].partition(",")[0] for how in hows if "compiled" in how.why_not}
    assert reasons == ({"each of its steps has a refresh"} if recipe in REFRESHED else set())


class StepSizeOfMatrices(Stage):
    """Multiply directions of matrices, and their decay, by a step size of 1/2. Vectors have no step size."""

    kind: Literal["step_size_of_matrices"] = "step_size_of_matrices"

    def slots(self, block: tuple[int, ...]) -> dict[str, Slot]:
        return {"d": Slot((), fill=0.5, role="iterate", step_size=True)} if len(block) == 2 else {}

    def apply(self, state: State, gradient: Tensor, direction: Tensor, context: StepContext) -> Tensor:
        return direction * per_block(state["d"], direction) if direction.ndim == 3 else direction


def test_decay_of_blocks_without_the_step_size_of_others(steps: list[int]) -> None:
    lr, rate = 0.25, 0.5
    decay = {"kind": "decoupled", "rate": rate}
    recipe = {"update": [StepSizeOfMatrices()], "lr": lr, "weight_decay": decay, "compile": True, "routes": []}
    parameters = [nn.Parameter(normal(4, 3, seed=1)), nn.Parameter(normal(4, seed=2))]
    before, optimizer = [x.detach().clone() for x in parameters], Optimizer(parameters, recipe)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    for w, parameter, size in zip(before, parameters, (0.5, 1.0), strict=True):
        # float32: a few roundings of numbers of size 1
        torch.testing.assert_close(parameter.detach(), w - lr * size * (1 + rate * w), rtol=1e-6, atol=1e-6)
    assert len(steps) == 2


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "interval"), [("newton_muon", 3), ("newton_muon", 1), ("singd", 3)])
def test_matrices_of_layers(recipe: str, interval: int, steps: list[int]) -> None:
    """A matrix that a stage has in each step is an input; steps with a matrix at an interval run without a program."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 4)).double()
    place = {"newton_muon": "update.inputs", "singd": "update.sirf"}[recipe]
    changes: dict[str, Any] = {f"{place}.refresh.steps": 3}
    if recipe == "newton_muon":
        changes[f"{place}.statistic.interval"] = interval
    optimizer = compose(compiled(recipe), model, lr=1e-3, overrides=changes)
    for step in range(7):
        optimizer.zero_grad()
        model(normal(16, 6, seed=step)).square().mean().backward()
        optimizer.step()
    assert len({*steps}) >= 4


@pytest.mark.parametrize(
    ("case", "updates"),
    {
        "all blocks": [1, 2, 3, 4],
        "a block without a gradient": [1, 2],  # then it is one update behind
        "a gradient with nan": [1, 2, 3],  # whose blocks a mask leaves, and which is one update behind then
        "a gradient with nan, no mask": [1, 2],
        "two rates": [],
        "checked": [],
    }.items(),
)
def test_programs_are_of_all_blocks_at_one_update_and_one_rate(case: str, updates: list[int], steps: list[int]) -> None:
    """And where nothing watches the stages: other steps of the same stack run as they are."""
    held = [nn.Parameter(normal(8, 6, seed=i)) for i in range(3)]
    rates = [0.1, 0.1, 0.3 if case == "two rates" else 0.1]
    groups = [{"params": [(f"p{i}", p)], "weight_decay": rates[i]} for i, p in enumerate(held)]
    failure = {"detect": "host" if case == "a gradient with nan, no mask" else "device"}
    update = {"update": ["momentum", "spectral"], "after_decay": ["clip_norm"], "failure": failure}
    optimizer = Optimizer(groups, {**update, "compile": True}, lr=0.1, checked=case == "checked")
    for step in range(4):
        for i, parameter in enumerate(held):
            parameter.grad = normal(8, 6, seed=10 * step + i)
        if step == 2 and case == "a block without a gradient":
            held[1].grad = None
        if step == 2 and case.startswith("a gradient with nan"):
            held[1].grad = torch.full_like(held[1], torch.nan)
        optimizer.step()
    assert steps == updates


def test_a_statistic_with_an_interval_leaves_most_steps_to_the_program(steps: list[int]) -> None:
    """The program is of steps late in the run in which the statistic is not observed."""
    parameter = nn.Parameter(normal(8, 6, seed=0))
    statistic, refresh = {"kind": "gram", "interval": 3}, {"kind": "every", "steps": 20}
    update = [{"kind": "shampoo", "statistic": statistic, "refresh": refresh}]
    optimizer = Optimizer([("p", parameter)], {"update": update, "compile": True})
    for step in range(8):
        parameter.grad = normal(8, 6, seed=step)
        optimizer.step()
    assert steps == [2, 3, 5, 6, 8]  # observed at updates 1, 4 and 7


MOVING: Any = {"from": 0.5, "to": 0.9, "steps": 5}


@pytest.mark.slow
@pytest.mark.parametrize(
    "stage",
    [
        {"kind": "momentum", "beta": MOVING, "nesterov": True},
        {"kind": "momentum", "beta3": MOVING, "bias_correction": False},
        {"kind": "rms", "beta": MOVING, "eps": MOVING},
        {"kind": "rms", "beta": MOVING, "per": "row"},
        {"kind": "heavy_ball", "beta": MOVING, "dampening": MOVING, "nesterov": True},
        {"kind": "trust", "floor": {"from": 0.9, "to": 0.2, "steps": 4}, "inner": ["rms"]},
        {"kind": "sum", "paths": [{"name": name, "weight": MOVING, "stages": "momentum"} for name in "ab"]},
    ],
    ids=lambda stage: stage["kind"],
)
@pytest.mark.parametrize("detect", ["host", "device"])
def test_scheduled_fields_are_inputs_of_a_program(
    stage: Any, detect: str, steps: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program made once has the numbers of every step, in `steps` within roundings of float64."""
    monkeypatch.setattr(traced, "_PROGRAMS", {})
    parameter = nn.Parameter(normal(8, 6, seed=0))
    update = [stage, "spectral"]  # which makes it a program of blocks
    optimizer = Optimizer([("p", parameter)], {"update": update, "compile": True, "failure": {"detect": detect}})
    for step in range(8):
        parameter.grad = normal(8, 6, seed=step)
        optimizer.step()
    assert steps[-6:] == [3, 4, 5, 6, 7, 8]
    assert len(traced._PROGRAMS) == 1


class OnTheHost(Stage):
    """Multiply by x, which it reads on the host, or compares with 0.7."""

    kind: Literal["test_on_the_host"] = "test_on_the_host"
    x: float = 0.5
    compares: bool = False

    def apply(self, state: State, gradient: Tensor, direction: Tensor, context: StepContext) -> Tensor:
        return direction * (self.x > 0.7 if self.compares else math.sqrt(self.x))


Stage.members.pop("test_on_the_host")  # the laws are about every member of the family


def test_a_scheduled_field_in_a_function_of_the_step_is_refused(steps: list[int]) -> None:
    stage = {"kind": "momentum", "beta3": MOVING}
    with refused(ValueError, "compile", "context.per_block"):
        Optimizer([("p", nn.Parameter(normal(8, 6, seed=0)))], {"update": [stage, "spectral"], "compile": True})


@pytest.mark.parametrize("compares", [False, True])
def test_a_scheduled_field_that_is_read_on_the_host_is_refused(compares: bool, steps: list[int]) -> None:
    stage = OnTheHost.model_validate({"x": MOVING, "compares": compares})
    with refused(ValueError, "compile", "host"):
        Optimizer([("p", nn.Parameter(normal(8, 6, seed=0)))], {"update": [stage], "compile": True})
    Optimizer([("p", nn.Parameter(normal(8, 6, seed=0)))], {"update": [stage.replace(x=0.6)], "compile": True})


CLIP = {"kind": "clip_norm", "max_norm": 0.1, "per": "parameter"}
CLIPPED: Any = {"update": ["momentum", CLIP], "blocking": {"size": 8}}


def coded(codebook: str) -> Any:
    storage = {"update.momentum/m": {"kind": "int4", "codebook": codebook, "min_elements": 1}}
    return {"update": ["momentum", "spectral"], "storage": storage}


@pytest.mark.slow
@pytest.mark.parametrize(
    "kinds",
    [
        [(CLIPPED, [(16, 8)]), (CLIPPED, [(8, 8), (8, 8)])],
        [(coded("nf4"), [(8, 8)]), (coded("symmetric_integer"), [(8, 8)])],
    ],
    ids=["blocks of one parameter or of two", "another format of the same shape"],
)
def test_stacks_that_differ_in_one_thing_have_programs_of_their_own(kinds: list[Any], steps: list[int]) -> None:
    for recipe, shapes in kinds:
        parameters = [nn.Parameter(normal(*shape, seed=i)) for i, shape in enumerate(shapes)]
        optimizer = Optimizer([(f"p{i}", p) for i, p in enumerate(parameters)], {**recipe, "compile": True})
        for step in range(3):
            for i, parameter in enumerate(parameters):
                parameter.grad = normal(*parameter.shape, seed=10 * step + i)
            optimizer.step()
    assert steps == [1, 2, 3] * 2


COMPILE = """
import json
import sys
import torch
from torch._dynamo.utils import counters
from eigengraft import Optimizer

shapes = ((8, 6), (8, 6))
for recipe in json.loads(sys.argv[1]):
    counters.clear()
    named = [(f"layers.{i}.weight", torch.nn.Parameter(torch.zeros(shape))) for i, shape in enumerate(shapes)]
    Optimizer(named, {**recipe, "compile": True})
    print({key: number for key, number in sorted(counters["inductor"].items()) if key.startswith("fxgraph_cache")})
"""


@pytest.mark.slow  # two processes with a compiler
def test_a_second_process_loads_programs_from_the_disk(tmp_path: Path) -> None:
    """One of entries, whose length is a symbol, and one of blocks."""
    recipes = json.dumps([{"base": "sgd", "routes": []}, {**CLIPPED, "blocking": {}}])
    # without vectors, because compiling a program to see whether it may have them takes as long as all the rest
    options = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "TORCHINDUCTOR_VEC_ISA_OK": "0"}
    found = [run("-c", COMPILE, recipes, folder=tmp_path, **options) for _ in range(2)]
    assert [done.returncode for done in found] == [0, 0], found[0].stderr + found[1].stderr
    assert [done.stdout.splitlines() for done in found] == [
        [f"{{'fxgraph_cache_{kind}': 1}}"] * 2 for kind in ("miss", "hit")
    ]


class Lines(logging.Handler):
    def __init__(self, lines: list[str]) -> None:
        super().__init__()
        self.lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@pytest.fixture
def logged() -> Iterator[list[str]]:
    """Lines that the library writes to its log."""
    lines, log = list[str](), logging.getLogger("eigengraft")
    handler, level = Lines(lines), log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    yield lines
    log.removeHandler(handler)
    log.setLevel(level)


@pytest.mark.slow
def test_a_long_compilation_is_one_line_of_the_log(
    steps: list[int], monkeypatch: pytest.MonkeyPatch, logged: list[str]
) -> None:
    def slow(graph: Any, symbolic: bool) -> Any:
        time.sleep(0.2)
        return lambda tensors: graph(*tensors)

    monkeypatch.setattr(traced, "generate", slow)
    monkeypatch.setattr(traced, "_PROGRAMS", {})
    monkeypatch.setattr(traced, "_PROGRESS_AFTER", 0.05)
    for _ in range(2):
        named = [(f"p{i}", nn.Parameter(normal(*shape, seed=i))) for i, shape in enumerate([(8, 6), (5, 7)])]
        Optimizer(named, {"base": "muon", "routes": [], "compile": True})
    assert len(logged) == 2 and "[8, 6]" in logged[0] and "[5, 7]" in logged[1], logged


@pytest.mark.slow
def test_compilations_that_take_long_together_warn_once(
    steps: list[int], monkeypatch: pytest.MonkeyPatch, logged: list[str]
) -> None:
    compiled = list[int]()

    def slow(graph: Any, symbolic: bool) -> Any:
        until = time.monotonic() + (20 if compiled else 0)  # the second program waits for the line of the log
        while time.monotonic() < until and not logged:
            time.sleep(0.01)
        compiled.append(len(logged))
        return lambda tensors: graph(*tensors)

    monkeypatch.setattr(traced, "generate", slow)
    monkeypatch.setattr(traced, "_PROGRAMS", {})
    monkeypatch.setattr(traced, "_WARNING_AFTER", 1.0)  # the first program takes milliseconds
    named = [(f"p{i}", nn.Parameter(normal(*shape, seed=i))) for i, shape in enumerate([(8, 6), (5, 7), (4, 9)])]
    logging.getLogger("eigengraft").setLevel(logging.WARNING)  # `logged` sets it back
    Optimizer(named, {"base": "muon", "routes": [], "compile": True})
    assert compiled == [0, 1, 1] and len(logged) == 1
    assert "program 2 of 3" in logged[0] and "[5, 7]" in logged[0]


def test_a_short_compilation_is_not_logged(
    steps: list[int], monkeypatch: pytest.MonkeyPatch, logged: list[str]
) -> None:
    monkeypatch.setattr(traced, "_PROGRAMS", {})
    monkeypatch.setattr(traced, "_PROGRESS_AFTER", 3600)  # on a busy machine the import of the compiler takes seconds
    Optimizer([("p", nn.Parameter(normal(8, 6, seed=0)))], {"base": "muon", "routes": [], "compile": True})
    assert not logged


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["sgd", "muon"])
def test_rates_that_move_for_100_steps_compile_nothing_again(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = list[bool]()

    def generate(graph: Any, symbolic: bool) -> Any:
        made.append(symbolic)
        return lambda tensors: graph(*tensors)

    monkeypatch.setattr(traced, "generate", generate)
    monkeypatch.setattr(traced, "_PROGRAMS", {})
    parameters = [nn.Parameter(normal(8, 6, seed=i)) for i in range(2)]
    changes: Any = {"base": recipe, "routes": [], "compile": True, "weight_decay": "decoupled"}
    optimizer = Optimizer([(f"p{i}", p) for i, p in enumerate(parameters)], changes)
    before = [len(how.compiled) for param_set in optimizer.param_sets for how in param_set.executions]
    for step in range(100):
        optimizer.param_groups[0].update(lr=0.1 / (1 + step), weight_decay=0.1 + step)
        for i, parameter in enumerate(parameters):
            parameter.grad = normal(8, 6, seed=10 * step + i)
        optimizer.step()
    assert before == [1] and len(made) == 1
