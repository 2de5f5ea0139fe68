"""Captured steps on a CPU: the protocol, with a stand-in for graphs (`tests/gpu/recording.py`)."""

import os
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any, ClassVar, Literal

import pytest
import torch
from torch import Tensor, nn

from eigengraft import Optimizer, Stage, State, StepContext
from eigengraft.optimizers.step import capture, capturers, execution, gradients, traced
from eigengraft.optimizers.step.capture import PATIENCE
from eigengraft.testing import accelerator

from ...gpu.recording import Operations, Recording, as_operation
from ...refusals import warned
from ...trajectories import normal

SHAPES = ((8, 6), (8, 6), (12, 5), (6,), (6,))


@pytest.fixture
def recording(monkeypatch: pytest.MonkeyPatch) -> Recording:
    found = Recording()
    monkeypatch.setitem(capturers.CAPTURERS, "cpu", found)
    return found


class Steps:
    """An optimizer and its parameters, whose gradients keep their addresses."""

    def __init__(
        self, recipe: Any, dtype: torch.dtype = torch.float64, groups: int = 1, wide: int | None = None, **options: Any
    ) -> None:
        """wide: a parameter in float64."""
        self.held = [nn.Parameter(normal(*shape, seed=i).to(dtype)) for i, shape in enumerate(SHAPES)]
        if wide is not None:
            self.held[wide] = nn.Parameter(self.held[wide].detach().double())
        named = [(f"layers.{i}.weight", p) for i, p in enumerate(self.held)]
        split = [{"params": named[at::groups], "weight_decay": 0.1 * at} for at in range(groups)]
        self.optimizer = Optimizer(named if groups == 1 else split, recipe, lr=0.01, **options)
        for parameter in self.held:
            parameter.grad = torch.zeros_like(parameter)
        self.number = 0
        self.broken: int | None = None
        """The parameter whose gradients are nan."""

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            for i, parameter in enumerate(self.held):
                if parameter.grad is not None:
                    nan = torch.nan if self.broken == i else 0.0
                    parameter.grad.copy_(normal(*parameter.shape, seed=100 * self.number + i) + nan)
            for at, group in enumerate(self.optimizer.param_groups):
                group["lr"] = 0.01 * (1 + at) / (1 + self.number)
            self.optimizer.step()
            self.number += 1

    @property
    def graphs(self) -> capture.Graphs:
        (param_set,) = self.optimizer.param_sets
        assert param_set.graphs is not None
        return param_set.graphs

    def values(self) -> list[Tensor]:
        state = [x for own in self.optimizer.stack_states() for x in own.tensors.values()]
        return [*(p.detach() for p in self.held), *state]


def require_close(one: Steps, other: Steps) -> None:
    # numbers of a graph are products where a step as it is divides by exact ones of the host
    for a, b in zip(one.values(), other.values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


RECIPES: dict[str, Any] = {
    "adamw": "adamw",
    "muon": "muon",
    "soap": {"base": "soap", "set": {"update.eigenbasis.refresh": {"kind": "every", "steps": 4}}},
    "shampoo": {"base": "shampoo", "set": {"update.graft.direction.shampoo.refresh": {"kind": "every", "steps": 4}}},
    "ademamix": "ademamix",
    "decay in the gradient": {"base": "sgd", "weight_decay": "l2"},
    "decay after stages": {"update": ["momentum", "spectral"], "after_decay": ["clip_norm"]},
    "codes": {
        "base": "adamw",
        "storage": {"first_moment": {"kind": "int8", "min_elements": 1, "rounding": "stochastic"}},
    },
    "masks": {"base": "adamw", "failure": {"detect": "device"}},
    "blocks": {"base": "adamw", "blocking": {"size": 4}},
    "spikes": {"base": "muon", "failure": {"spike": {"window": 4, "sigmas": 1.0}}},
}


@pytest.mark.parametrize("name", RECIPES)
def test_replayed_steps_have_the_results_of_steps_without_a_graph(name: str, recording: Recording) -> None:
    recipe = RECIPES[name]
    changes = {"base": recipe} if isinstance(recipe, str) else recipe
    plain, captured = Steps(changes), Steps(changes, overrides={"graph": True})
    plain.step(14)
    captured.step(14)
    require_close(plain, captured)
    assert sum(graph.replays for graph in recording.graphs) >= 3
    assert f"graph: {len(captured.optimizer.stack_states())} of" in str(captured.optimizer)


def test_fused_stacks_whose_step_counts_become_different_get_another_graph(recording: Recording) -> None:
    """One call of the kernel has one step count, which the graph of the steps before would use for all stacks."""
    plain, captured = (Steps({"base": "adamw", "graph": graph}) for graph in (False, True))
    for run in (plain, captured):
        run.step(8)
        kept, run.held[2].grad = run.held[2].grad, None
        run.step()
        run.held[2].grad = kept
        run.step(4)
    assert [graph.replays for graph in recording.graphs] == [3, 2]
    assert captured.graphs.left["which stacks have the same step count changed"] == 1
    require_close(plain, captured)


def test_a_stack_with_several_rates_and_stages_after_its_decay_is_not_captured(recording: Recording) -> None:
    """A program has one decay factor for all blocks."""
    changes = RECIPES["decay after stages"]
    plain, captured = (Steps({**changes, "graph": graph}, groups=2) for graph in (False, True))
    for run in (plain, captured):
        run.step(6)
    assert (
        not recording.graphs and captured.graphs.left["parameters of a stack are in groups with different rates"] == 3
    )
    require_close(plain, captured)


@pytest.mark.slow
@pytest.mark.parametrize("compiled", ["adamw", "muon"])
def test_compiled_programs_are_captured(compiled: str, recording: Recording, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traced, "generate", lambda graph, symbolic: lambda tensors: graph(*tensors))
    monkeypatch.setattr(traced, "_PROGRAMS", {})
    changes = {"base": compiled, "routes": [], "compile": True}
    plain, captured = Steps({**changes, "compile": False}), Steps({**changes, "graph": True})
    plain.step(10)
    captured.step(10)
    require_close(plain, captured)
    assert [graph.replays for graph in recording.graphs] == [5]


MASKED = {"base": "adamw", "failure": {"detect": "device"}}
"""If it is compiled, no fused kernel computes it, because a compiled program applies the mask in the same pass."""
COMPILED: dict[str, Any] = {
    "masks": MASKED,
    "l2": {**MASKED, "weight_decay": "l2"},
    "decay after": {**MASKED, "weight_decay": {"kind": "decoupled", "placed": "after"}},
    "cautious": {"base": "lion", "weight_decay": "cautious"},
    "factors": {**MASKED, "width_scaling": {}},
    "schedule": {
        **MASKED,
        "update": [
            {"kind": "momentum", "beta": {"from": 0.5, "to": 0.9, "steps": 20}, "bias_correction": False},
            "sign",
        ],
    },
}


PROGRAMS = defaultdict[str, dict[Any, traced.Program]](dict)
"""Programs of the tests below by how they run and by their source. Tracing takes most of the time of a test."""
CALLS: list[int] = []


@pytest.fixture(params=["traced", "compiled"])
def calls(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of entries of each call of a program, which runs as it was traced, or compiled by Inductor."""
    if request.param == "compiled" and "EIGENGRAFT_COMPILE" not in os.environ:
        pytest.skip("compiles for half a minute: set EIGENGRAFT_COMPILE")
    known = traced.generate
    CALLS.clear()

    def generate(graph: Any, symbolic: bool) -> Any:
        program = known(graph, symbolic) if request.param == "compiled" else lambda tensors: graph(*tensors)

        def run(tensors: list[Tensor]) -> Any:
            CALLS.append(tensors[0].numel())
            return program(tensors)

        return as_operation(run)

    monkeypatch.setattr(traced, "generate", generate)
    monkeypatch.setattr(traced, "_PROGRAMS", PROGRAMS[request.param])
    return CALLS


@pytest.mark.slow
@pytest.mark.parametrize("small", [0, 1 << 14], ids=["each parameter", "joined"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", COMPILED)
def test_a_captured_step_updates_entries_in_place_with_the_bits_of_a_compiled_step(
    name: str, dtype: torch.dtype, small: int, recording: Recording, calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With two rates that change, then with a gradient of nan, and without a gradient."""
    monkeypatch.setattr(execution, "JOINED_IN_KERNEL", small)
    plain, captured = (Steps({**COMPILED[name], "compile": True, "graph": graph}, dtype, 2) for graph in (False, True))
    (param_set,) = captured.optimizer.param_sets
    assert all(isinstance(how, execution.Entries) for how in param_set.executions)
    places = [x.data_ptr() for x in captured.values()]
    calls.clear()  # of the samples that programs are tried with
    plain.step(10)
    launched = Counter(calls)
    calls.clear()
    captured.step(10)
    assert [graph.replays for graph in recording.graphs] == [5], captured.optimizer
    # a capture runs its step four times: once before it, once in it, once as it is and once as a replay
    assert Counter(calls) == {entries: 13 * count // 10 for entries, count in launched.items()}
    assert all(torch.equal(a, b) for a, b in zip(plain.values(), captured.values(), strict=True))
    for run in (plain, captured):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            run.broken = 3
            run.step()
            run.broken, run.held[0].grad = None, None
            run.step(2)
    assert all(torch.equal(a, b) for a, b in zip(plain.values(), captured.values(), strict=True))
    assert places == [x.data_ptr() for x in captured.values()]


@pytest.mark.slow
@pytest.mark.parametrize("calls", ["traced"], indirect=True)
def test_parameters_that_are_not_contiguous_are_captured_as_stacks(recording: Recording, calls: list[int]) -> None:
    plain, captured = (Steps({**MASKED, "compile": True, "graph": graph}) for graph in (False, True))
    for run in (plain, captured):
        run.held[0].data = run.held[0].data.T.contiguous().T
        run.step(10)
    assert [graph.replays for graph in recording.graphs] == [5]
    require_close(plain, captured)


@pytest.mark.slow
@pytest.mark.parametrize("calls", ["traced"], indirect=True)
def test_stacks_of_several_dtypes_are_captured_together(recording: Recording, calls: list[int]) -> None:
    runs = [Steps({**MASKED, "compile": True, "graph": graph}, torch.float32, wide=2) for graph in (False, True)]
    for run in runs:
        run.step(10)
    plain, captured = runs
    assert [graph.replays for graph in recording.graphs] == [5]
    assert all(torch.equal(a, b) for a, b in zip(plain.values(), captured.values(), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("calls", ["traced"], indirect=True)
def test_a_captured_step_of_entries_launches_only_its_programs(
    calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside them it makes only views, and no copy of gradients, state or parameters. One copy uploads its numbers."""
    monkeypatch.setattr(execution, "JOINED_IN_KERNEL", 0)
    views = {"aten::unbind", "aten::view", "aten::detach", "aten::index", "aten::select", "aten::slice", "aten::alias"}
    found, values = Recording(), list[list[Tensor]]()
    for graph in (False, True):
        with accelerator("cuda") as run:
            monkeypatch.setitem(capturers.CAPTURERS, "cuda", found)
            held = [nn.Parameter(normal(8, 6, seed=i).float().to(run.device)) for i in range(4)]
            recipe = {**MASKED, "compile": True, "graph": graph}
            optimizer = Optimizer([(f"p{i}", p) for i, p in enumerate(held)], recipe)
            for parameter in held:
                parameter.grad = torch.zeros_like(parameter)
            for number in range(10):
                for i, parameter in enumerate(held):
                    nan = torch.nan if (number, i) == (9, 2) else 0.0
                    parameter.grad.copy_((normal(8, 6, seed=10 * number + i) + nan).float().to(run.device))
                with accelerator("cuda") as counts:
                    optimizer.step()
            assert counts.waits == 0 and counts.uploads <= 1, counts.by_line("waits", "uploads")
            state = [x for own in optimizer.stack_states() for x in own.tensors.values()]
            values.append([x.detach().cpu() for x in (*held, *state)])
    assert all(torch.equal(a, b) for a, b in zip(*values, strict=True))
    (graph,) = found.graphs
    names = [func._schema.name if hasattr(func, "_schema") else "program" for func, *_ in graph.rows]
    assert graph.replays == 5 and names.count("program") == 4
    assert [name for name in names if name not in {*views, "program"}] == ["aten::_to_copy"]  # of the numbers


def test_the_argument_capturable_sets_graph(recording: Recording) -> None:
    run = Steps("adamw", capturable=True)
    run.step(6)
    assert run.optimizer.recipe.graph and [graph.replays for graph in recording.graphs] == [1]
    (piece,) = run.graphs.pieces
    assert piece._record is not None and piece._record.kept  # but no gradients, so that `zero_grad()` frees them
    kept = {x.data_ptr() for x in piece._record.kept.values()}
    assert not kept & {p.grad.data_ptr() for p in run.held if p.grad is not None}


def test_a_device_without_graphs_gives_a_warning() -> None:
    with warned(UserWarning, "graph", "cpu"):
        Steps("adamw", capturable=True).step()


def fresh_gradients(run: Steps) -> None:
    for parameter in run.held:
        parameter.grad = torch.zeros_like(parameter)  # made while the last gradient still has its address


def no_gradient(run: Steps) -> None:
    run.held[0].grad = None


def alternating_decay(run: Steps) -> None:
    run.optimizer.param_groups[0]["weight_decay"] = 0.1 * (1 + run.number % 3)


def late_parameter(run: Steps) -> None:
    """One block is a step behind the others."""
    if run.number < 2:
        run.held[-1].grad = torch.zeros_like(run.held[-1]) if run.number else None


NEVER: dict[str, tuple[Any, Callable[[Steps], None] | None, str]] = {
    "new addresses": ("adamw", fresh_gradients, "zero_grad"),
    "relative decay": ({"base": "adamw", "weight_decay": {"kind": "corrected", "rate": 0.1}}, None, "weight decay"),
    "decay that alternates": ("adamw", alternating_decay, "weight decay"),
    "no gradient": ("adamw", no_gradient, "no gradient"),
    "blocks at different updates": ("muon", late_parameter, "different updates"),
    "a refresh of some stack": (
        {
            "base": "soap",
            "blocking": {"size": 2, "merge": 1},
            "set": {"update.eigenbasis.refresh": {"kind": "every", "steps": 4}},
        },
        None,
        "refresh",
    ),
}
"""Recipe, what is done before each step, and a word of the reason."""


@pytest.mark.parametrize("case", NEVER)
def test_a_graph_that_is_never_replayed_gives_a_warning(case: str, recording: Recording) -> None:
    recipe, before, word = NEVER[case]
    run = Steps({"base": recipe} if isinstance(recipe, str) else recipe, overrides={"graph": True})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(PATIENCE + 10):
            if before is not None:
                before(run)
            run.step()
    found = [str(own.message) for own in caught if str(own.message).startswith("graph: ")]
    assert len(found) == 1 and word in found[0], found
    assert "refresh" in word or not recording.graphs  # stacks without refreshes have a graph of their own
    assert run.graphs.left.total() >= PATIENCE


def moved_gradient(run: Steps) -> None:
    run.held[0].grad = torch.zeros_like(run.held[0])


def turned_gradient(run: Steps) -> None:
    """Give a gradient other strides at its address."""
    gradient = run.held[0].grad
    assert gradient is not None
    run.held[0].grad = gradient.view(*reversed(gradient.shape)).T
    assert run.held[0].grad.data_ptr() == gradient.data_ptr()


def moved_parameter(run: Steps) -> None:
    run.held[0].data = run.held[0].data.clone()


def moved_state(run: Steps) -> None:
    (own, *_) = run.optimizer.stack_states()
    own.tensors.update({key: x.clone() for key, x in own.tensors.items()})


def missing_gradient(run: Steps) -> None:
    run.held[0].grad = None


def other_decay(run: Steps) -> None:
    run.optimizer.param_groups[0]["weight_decay"] = 0.0


def moving_decay(run: Steps) -> None:
    run.optimizer.param_groups[0]["weight_decay"] = 0.2


def watched(run: Steps) -> None:
    run.optimizer.watch_next_step()


EVENTS = {
    moved_gradient: 1,
    turned_gradient: 1,
    moved_parameter: 1,
    moved_state: 1,
    missing_gradient: 0,
    other_decay: 1,
    watched: 0,
}
"""How many graphs are captured after each event."""


@pytest.mark.parametrize(
    ("recipe", "event", "again"),
    [
        (recipe, event, again)
        for recipe in ("adamw", "ademamix")
        for event, again in EVENTS.items()
        if recipe != "adamw" or event is not moved_state  # fused kernels hold the tensors that a stack was made with
    ],
)
def test_a_step_with_another_key_drops_the_graph_and_names_the_reason(
    recipe: str, event: Callable[[Steps], None], again: int, recording: Recording
) -> None:
    """It has the numbers of a step as it is. What stays so is captured anew two steps later."""
    plain, captured = Steps(recipe), Steps({"base": recipe, "graph": True})
    for run in (plain, captured):
        run.step(7)
    replays = [graph.replays for graph in recording.graphs]
    assert replays == [2]
    event(captured)
    event(plain)
    plain.step()
    before = captured.graphs.left.total()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        captured.step()
    assert captured.graphs.left.total() == before + 1
    assert [graph.replays for graph in recording.graphs] == replays
    for run in (plain, captured):
        run.step(3)
    require_close(plain, captured)
    assert len(recording.graphs) == 1 + again
    assert "graph: " in str(captured.optimizer)


def test_a_weight_decay_that_changes_drops_only_graphs_of_fused_kernels(recording: Recording) -> None:
    """A fused kernel takes it as a constant; for other stacks it is an input."""
    counts = []
    for recipe in ("adamw", "ademamix"):
        plain, captured = Steps(recipe), Steps({"base": recipe, "graph": True})
        recording.graphs.clear()
        for run in (plain, captured):
            run.step(6)
            moving_decay(run)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                run.step(4)
        assert [str(own.message) for own in caught if "weight decay" in str(own.message)] or recipe != "adamw"
        require_close(plain, captured)
        counts.append([graph.replays for graph in recording.graphs])
    assert counts == [[1, 2], [5]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(
    "change", [{}, {"weight_decay": "l2"}, {"failure": {"detect": "device"}}], ids=["adamw", "l2", "masks"]
)
@pytest.mark.filterwarnings("ignore:.*its gradient has inf or nan")
def test_a_fused_kernel_is_captured_with_its_bits(
    change: Any, dtype: torch.dtype, recording: Recording, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With masks, which every step has as on a device, the last step has a gradient of nan."""
    monkeypatch.setattr(gradients, "squares_are_finite", lambda tensors: False)
    plain, captured = (Steps({"base": "adamw", **change, "graph": graph}, dtype) for graph in (False, True))
    for run in (plain, captured):
        run.step(11)
        run.broken = 3 if "failure" in change else None
        run.step()
    (graph,) = recording.graphs
    names = {func._schema.name for func, *_ in graph.rows}
    assert names & {"aten::_fused_adamw_", "aten::_fused_adam_"} and graph.replays == 7
    assert all(bool(x.isfinite().all()) for x in captured.values())
    assert all(torch.equal(a, b) for a, b in zip(plain.values(), captured.values(), strict=True))


def test_a_capture_holds_one_copy_of_state_and_parameters(
    recording: Recording, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies = list[int]()
    monkeypatch.setattr(capture, "_copied", lambda tensors: copies.append(1) or [x.detach().clone() for x in tensors])
    Steps({"base": "adamw", "graph": True}).step(8)
    assert len(recording.graphs) == len(copies) == 1


class Freezing(Stage):
    """Multiply by the number of calls so far, which a graph would keep."""

    kind: Literal["test_freezing"] = "test_freezing"
    calls: ClassVar[list[int]] = []

    def apply(self, state: State, gradient: Tensor, direction: Tensor, context: StepContext) -> Tensor:
        self.calls.append(1)
        return direction * len(self.calls)


Stage.members.pop("test_freezing")  # the laws are about every member of the family


def test_a_number_that_would_be_a_constant_of_the_graph_is_found(recording: Recording) -> None:
    run = Steps({"update": [Freezing()], "graph": True})
    with warned(UserWarning, "aten.mul.Tensor"):
        run.step(8)
    assert not recording.graphs and "aten.mul" in str(run.optimizer)


def test_a_graph_with_other_bits_is_not_used(recording: Recording, monkeypatch: pytest.MonkeyPatch) -> None:
    replay, plain, captured = Operations.replay, Steps("adamw"), Steps({"base": "adamw", "graph": True})

    def wrong(graph: Operations) -> None:
        replay(graph)
        captured.held[-1].detach()[0] *= 1 + 1e-15

    monkeypatch.setattr(Operations, "replay", wrong)
    plain.step(8)
    with warned(UserWarning, "graph"):
        captured.step(8)
    require_close(plain, captured)
    assert [graph.replays for graph in recording.graphs] == [1]


def test_a_step_that_the_device_cannot_capture_runs_without_a_graph(
    recording: Recording, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(body: Callable[[], None]) -> None:
        body()
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(recording, "capture", refuse)
    plain, captured = Steps("adamw"), Steps({"base": "adamw", "graph": True})
    plain.step(8)
    with warned(UserWarning, "operation not permitted when stream is capturing"):
        captured.step(8)
    require_close(plain, captured)


@pytest.mark.parametrize(
    ("recipe", "part"),
    [
        ({"base": "adamw", "averaging": "ema"}, "averaging"),
        ({"base": "adamw", "constraints": "rounding"}, "constraints"),
    ],
)
def test_recipes_with_numbers_that_python_computes_are_not_captured(
    recipe: Any, part: str, recording: Recording
) -> None:
    run = Steps({**recipe, "graph": True})
    with warned(UserWarning, part):
        run.step(5)
    assert not recording.graphs


def test_a_step_with_a_graph_is_captured_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its numbers are uploaded by one copy, and the only wait is that of the finite check."""
    with accelerator("cuda") as run:
        found = Recording()
        monkeypatch.setitem(capturers.CAPTURERS, "cuda", found)
        held = [nn.Parameter(normal(8, 6, seed=i).float().to(run.device)) for i in range(4)]
        optimizer = Optimizer([(f"p{i}", p) for i, p in enumerate(held)], {"base": "adamw", "graph": True})
        for parameter in held:
            parameter.grad = torch.zeros_like(parameter)
        for number in range(9):
            for i, parameter in enumerate(held):
                parameter.grad.copy_(normal(8, 6, seed=10 * number + i).float().to(run.device))
            with accelerator("cuda") as counts:
                optimizer.step()
        assert [graph.replays for graph in found.graphs] == [4], optimizer
        assert counts.waits <= 1 and counts.uploads <= 1, counts.by_line("waits", "uploads")
