"""Signals: the values that stages receive besides the gradient, who provides them, and which are refused."""

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any, ClassVar, Literal

import pytest
import torch
from torch import Tensor, nn

from eigengraft import (
    Optimizer,
    RecipeError,
    Request,
    Signal,
    Slot,
    Stage,
    State,
    StepContext,
    Traits,
    register_signal,
    signals,
)
from eigengraft.testing import accelerator

from ..refusals import refused
from ..trajectories import normal

SHARPNESS = register_signal(Signal("sharpness_for_test", "parameter", "the largest eigenvalue of a Hessian", "max"))


class Listener(Stage):
    """Writes down its signals; moves nothing."""

    kind: Literal["listener_for_test"] = "listener_for_test"
    hears: tuple[str, ...] = ()
    received: ClassVar[list[dict[str, Any]]] = []

    def traits(self, block: tuple[int, ...]) -> Traits:
        return Traits(signals=(Request("loss", "if_given"), *map(Request, self.hears)))

    def apply(self, state: State, gradient: Tensor, direction: Tensor, context: StepContext) -> Tensor:
        heard = {name: torch.as_tensor(value).clone() for name, value in context.signals.items()}
        self.received.append({"blocks": (context.matrix_ids >> 32).tolist(), **heard})  # positions, without views
        return torch.zeros_like(direction)


class Counter(Stage):
    """d times the sum over all blocks of how many entries each had above 0, one step before."""

    kind: Literal["counter_for_test"] = "counter_for_test"

    def slots(self, block: tuple[int, ...]) -> Mapping[str, Slot]:
        return {"above": Slot((), role="count", total=True)}

    def apply(self, state: State, gradient: Tensor, direction: Tensor, context: StepContext) -> Tensor:
        state["above"] = (gradient > 0).flatten(1).sum(1).to(gradient.dtype)
        return direction * context.total(state, "above")


class Follower(Stage):
    """The signal named `follows`, and no gradient."""

    kind: Literal["follower_for_test"] = "follower_for_test"
    follows: str

    def traits(self, block: tuple[int, ...]) -> Traits:
        return Traits(signals=(Request(self.follows),))

    def apply(self, state: State, gradient: Tensor, direction: Tensor, context: StepContext) -> Tensor:
        return torch.as_tensor(context.signal(self.follows))


for kind in ("listener_for_test", "counter_for_test", "follower_for_test"):
    LISTENERS = Stage.members.pop(kind), kind  # the laws are about every member of the family


@pytest.fixture(autouse=True)
def received() -> list[dict[str, Any]]:
    Listener.received.clear()
    return Listener.received


def parameters() -> list[nn.Parameter]:
    made = [nn.Parameter(normal(*shape, seed=len(shape) + shape[0])) for shape in ((4, 3), (6,), (4, 3))]
    for index, parameter in enumerate(made):
        parameter.grad = normal(*parameter.shape, seed=index) * 10.0**index
    return made


def optimizer_of(made: list[nn.Parameter], *hears: str, **recipe: Any) -> Optimizer:
    return Optimizer(made, {"update": [Listener(hears=hears)], "routes": [], **recipe}, lr=0.25)


def test_the_gradient_norm_is_that_of_all_parameters(received: list[dict[str, Any]]) -> None:
    made = parameters()
    optimizer_of(made, "gradient_norm").step()
    expected = torch.cat([p.grad.flatten() for p in made if p.grad is not None]).norm()
    assert len(received) == 2 and all(torch.allclose(one["gradient_norm"], expected) for one in received)


def test_gradients_that_are_not_used_are_not_in_their_norm(received: list[dict[str, Any]]) -> None:
    made = parameters()
    assert made[0].grad is not None and made[1].grad is not None
    made[0].grad[0, 0], made[2].grad = torch.nan, None
    optimizer_of(made, "gradient_norm").step()
    assert torch.allclose(received[0]["gradient_norm"], made[1].grad.norm())


def test_adam_clipped_by_the_norm_of_the_model_is_that_of_torch() -> None:
    ours, theirs = parameters(), parameters()
    before = {"kind": "clip_norm", "max_norm": 2.0, "per": "model"}
    adam = {"kind": "transform", "before": before, "inner": ["momentum", "rms"]}
    optimizer = Optimizer(ours, {"update": [adam], "routes": []}, lr=0.1)
    reference = torch.optim.Adam(theirs, lr=0.1)
    for t in range(4):
        for index, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
            mine.grad = normal(*mine.shape, seed=10 * t + index) * 4.0**t
            other.grad = mine.grad.clone()
        nn.utils.clip_grad_norm_(theirs, 2.0)
        optimizer.step()
        reference.step()
    for mine, other in zip(ours, theirs, strict=True):
        assert torch.allclose(mine, other, rtol=0, atol=1e-6)  # torch adds 1e-6 to the norm


def test_the_fraction_of_the_run_goes_to_one(received: list[dict[str, Any]]) -> None:
    optimizer = optimizer_of(parameters()[:1], "step_fraction", total_steps=4)
    for _ in range(4):
        optimizer.step()
    assert [float(one["step_fraction"]) for one in received] == [0.25, 0.5, 0.75, 1.0]


def test_parameters_are_told_in_blocks_as_they_were_before_the_step(received: list[dict[str, Any]]) -> None:
    made = parameters()[:1]
    optimizer_of(made, "parameter", blocking={"size": 2, "merge": 1}).step()
    found = {tuple(one["parameter"].shape[1:]): one["parameter"] for one in received}
    assert torch.equal(found[2, 2], torch.stack([made[0][:2, :2], made[0][2:, :2]]))


def test_the_loss_comes_from_the_closure_or_is_provided(received: list[dict[str, Any]]) -> None:
    optimizer = optimizer_of(parameters()[:1])
    optimizer.step(lambda: torch.tensor(3.0))
    optimizer.step()  # the stage accepts it: it may be missing
    assert optimizer.provide("loss", 1.0) and optimizer.provide("loss", torch.tensor(2.0))
    optimizer.step()
    optimizer.step()
    assert [float(one["loss"]) if "loss" in one else None for one in received] == [3.0, None, 1.5, None]


def test_numbers_and_tensors_for_each_parameter(received: list[dict[str, Any]]) -> None:
    """The largest of several numbers, as the signal declares; the mean of several tensors."""
    made = parameters()
    optimizer = optimizer_of(made, SHARPNESS.name, "hessian_diagonal")
    optimizer.provide(SHARPNESS.name, {p: float(i) for i, p in enumerate(made)})
    optimizer.provide(SHARPNESS.name, {made[0]: torch.tensor(7.0)})
    optimizer.provide("hessian_diagonal", {p: p.detach() for p in made})
    optimizer.provide("hessian_diagonal", {p: 3 * p.detach() for p in made})
    optimizer.step()
    sharpness = {
        p: float(value) for one in received for p, value in zip(one["blocks"], one[SHARPNESS.name], strict=True)
    }
    assert sharpness == {0: 7.0, 1: 1.0, 2: 2.0}
    matrices = next(one["hessian_diagonal"] for one in received if len(one["blocks"]) == 2)
    assert torch.allclose(matrices, 2 * torch.stack([made[0], made[2]]))


def test_totals_of_slots_are_over_all_blocks_and_groups() -> None:
    made = parameters()
    recipe = {"update": [Counter()], "routes": [], "blocking": {"size": 2, "merge": 1}}
    optimizer = Optimizer([{"params": made[:2]}, {"params": made[2:]}], recipe, lr=1.0)
    start = [p.detach().clone() for p in made]
    optimizer.step()
    assert all(torch.equal(p, before) for p, before in zip(made, start, strict=True))
    above = sum(int((p.grad > 0).sum()) for p in made if p.grad is not None)
    resumed = Optimizer([{"params": made[:2]}, {"params": made[2:]}], recipe, lr=1.0)
    resumed.load_state_dict(optimizer.state_dict())
    resumed.step()
    for p, before in zip(made, start, strict=True):
        assert p.grad is not None and torch.equal(p, before - above * p.grad)


@pytest.mark.parametrize("why", ["scaler", "scaler on a device", "skip", "raise", "raise late", "spike"])
def test_values_of_a_stopped_step_are_dropped(why: str, received: list[dict[str, Any]]) -> None:
    """However a step is stopped, its values are not joined with those of the next step."""
    late, calls, nan = why == "raise late", list[str](), torch.tensor(torch.nan)
    failure: dict[str, Any] = {
        "nonfinite": "raise" if "raise" in why else "skip",
        "detect": "device" if late else "host",
    }
    failure |= {"spike": {"window": 2, "measure": "gradient_norm"}} if why == "spike" else {}
    with accelerator("cuda") as run:
        weight = nn.Parameter(normal(4, 3, seed=0).to(run.device if why == "scaler on a device" else "cpu"))
        optimizer = optimizer_of([weight], "hessian_diagonal", failure=failure)
        optimizer.provide("loss", lambda: calls.append("loss"))

        def step(value: float, gradient: Tensor) -> None:
            optimizer.provide("hessian_diagonal", {weight: torch.full_like(weight, value)})
            weight.grad = torch.ones_like(weight) * gradient
            optimizer.step()

        for _ in range(3):
            step(1.0, torch.tensor(1.0))
        if "scaler" in why:
            vars(optimizer)["found_inf"] = torch.ones((), device=weight.device)
        if late:
            step(100.0, nan)
        stops = pytest.raises(FloatingPointError) if "raise" in why else nullcontext()
        with stops:
            step(100.0, torch.tensor(1e9) if why == "spike" else torch.tensor(1.0) if late or "scaler" in why else nan)
        if "scaler" in why:
            del vars(optimizer)["found_inf"]
        step(3.0, torch.tensor(1.0))
        assert float(received[-1]["hessian_diagonal"].max()) == 3.0
    assert len(calls) == 5 or "raise" in why  # a source is called in every step, so that no value waits in it


@pytest.mark.parametrize("rule", ["sam", "line_search"])
def test_values_of_trial_passes_are_dropped(rule: str, received: list[dict[str, Any]]) -> None:
    """A step uses the values of one call of its closure, and leaves none for the next step."""
    weight, calls = nn.Parameter(normal(4, 3, seed=0)), list[float]()
    optimizer = optimizer_of(
        [weight], "hessian_diagonal", weight_decay={"kind": "decoupled", "rate": 0.1}, **{rule: {}}
    )

    def closure() -> Tensor:
        calls.append(float(len(calls)))
        optimizer.provide("hessian_diagonal", {weight: torch.full_like(weight, calls[-1])})
        loss = weight.square().sum()
        weight.grad = 2 * weight.detach()
        return loss.detach()

    for _ in range(2):
        begun = len(calls)
        optimizer.step(closure)
        assert float(received[-1]["hessian_diagonal"].max()) == begun + (rule == "sam") and len(calls) == begun + 2


def test_nobody_asks_nothing_is_kept(received: list[dict[str, Any]]) -> None:
    optimizer = optimizer_of(parameters()[:1])
    assert not optimizer.provide("hessian_diagonal", {})
    optimizer.step()
    assert [sorted(one) for one in received] == [["blocks"]]


def test_signals_that_cannot_be_are_refused() -> None:
    made = parameters()
    with refused(RecipeError, "update.listener_for_test", "los", "loss"):
        optimizer_of(made, "los")
    with refused(ValueError, "update.listener_for_test", "total_steps"):
        optimizer_of(made, "step_fraction")
    with refused(RecipeError, "listener_for_test", "parameter"):
        Optimizer(made, [{"kind": "eigenbasis", "inner": [Listener(hears=("parameter",))]}])
    optimizer = optimizer_of(made, "hessian_diagonal", SHARPNESS.name)
    with refused(ValueError, "provide", "gradient_norm"):
        optimizer.provide("gradient_norm", 1.0)
    with refused(ValueError, "provide", "hessian_diagonal", "float"):
        optimizer.provide("hessian_diagonal", 1.0)
    with refused(ValueError, "provide", "loss", "dict"):
        optimizer.provide("loss", {})
    with refused(ValueError, "provide"):
        optimizer.provide(SHARPNESS.name, {torch.zeros(3): 1.0})
    with refused(ValueError, "hessian_diagonal", "(4, 3)", "(3,)"):
        optimizer.provide("hessian_diagonal", {made[0]: torch.zeros(3)})
    with refused(ValueError, "update.listener_for_test", "hessian_diagonal"):
        optimizer.step()
    assert all(int(state["step"]) == 0 for state in optimizer.state.values())
    with refused(ValueError, "loss", "that"):
        register_signal(Signal("loss", "step", "another loss"))
    with refused(ValueError, "extent", "number", "step", "parameter", "entry"):
        Signal("mine", "number", "a number")  # type: ignore[arg-type]
    with refused(ValueError, "reduce", "min", "mean", "max"):
        Signal("mine", "step", "a number", "min")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["gradients", "parameters", "decaying"])
def test_a_signal_with_the_name_of_something_else_is_that_signal(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(signals._SIGNALS, name, Signal(name, "entry", "a number of each entry"))
    weight = nn.Parameter(torch.ones(2, 3))
    update = {"update": [Follower(follows=name)], "after_decay": [{"kind": "scale", "factor": 1.0}], "routes": []}
    optimizer = Optimizer([("weight", weight)], update, lr=0.5, weight_decay=0.5)
    weight.grad = torch.ones(2, 3)
    optimizer.provide(name, {weight: torch.full((2, 3), 7.0)})
    optimizer.step()
    assert torch.equal(weight.detach(), torch.full((2, 3), 1 - 0.5 * (7 + 0.5 * 1)))  # W - lr (S + alpha W)
