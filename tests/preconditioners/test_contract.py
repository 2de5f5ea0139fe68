"""The contract of a stage: which verb runs when, on which rows and axes, and what its state refuses."""

from typing import ClassVar, Literal

import numpy as np
import pytest
import torch
from pydantic import Field
from torch import Tensor, nn

from eigengraft import Optimizer, Stage, State, StepContext
from eigengraft.errors import ContractError
from eigengraft.numerics import per_block
from eigengraft.preconditioners import Cadence, Every
from eigengraft.preconditioners.algebra.products import fold, unfold
from eigengraft.slots import Slot

from ..trajectories import normal
from .test_statistics import Stepper


class Diary(Stage):
    """Writes down its verbs; the slots are there to be used, or not to be declared."""

    kind: Literal["test_diary"] = "test_diary"
    timing: Literal["current", "lagged"] = Field("current", description="as in an eigenbasis")
    one_by_one: bool = Field(default=False, description="whether each axis has a sweep of its own")
    told: ClassVar[list[tuple[object, ...]]] = []

    def slots(self, block: tuple[int, ...]) -> dict[str, Slot]:
        return {"count": Slot((), role="count"), "misses": Slot((), role="failures", dtype=torch.int32)}

    def cadence(self) -> Cadence:
        return Every(steps=1, start=2, stagger="none")

    def lagged(self) -> bool:
        return self.timing == "lagged"

    def sweeps(self, block: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        return tuple((axis,) for axis in range(len(block))) if self.one_by_one else super().sweeps(block)

    def observed(self, gradient: Tensor, direction: Tensor) -> Tensor:
        return gradient + direction

    def observe(self, state: State, gradient: Tensor, context: StepContext) -> None:
        self.told.append(("observe", gradient[:, 0].tolist(), context.axes, context.observed_axes))

    def refresh(self, state: State, gradient: Tensor, context: StepContext) -> None:
        self.told.append(("refresh", gradient[:, 0].tolist(), context.axes, context.observed_axes))
        state["misses"] = state["misses"] + 1

    def apply(self, state: State, gradient: Tensor, direction: Tensor, context: StepContext) -> Tensor:
        self.told.append(("apply", gradient[:, 0].tolist(), context.axes, context.observed_axes))
        return direction


Stage.members.pop("test_diary")  # the laws are about every member of the family


@pytest.fixture(autouse=True)
def diary() -> None:
    Diary.told.clear()


def run(stage: Diary, steps: list[int], block: tuple[int, ...] = (1, 1)) -> list[tuple[object, ...]]:
    """One step of three blocks whose gradients are 1, 2, 3, on a direction of tens."""
    n = len(steps)
    tensors = {
        f"d/{name}": slot.allocate(n, torch.float64, torch.device("cpu")) for name, slot in stage.slots(block).items()
    }
    g = torch.arange(1.0, n + 1).double().reshape(n, *[1] * len(block))
    context = StepContext(np.array(steps), np.zeros(n), np.arange(n))
    stage.run(State(tensors, block, "d"), g, g * 10, context)
    return Diary.told


class Undeclared(Stage):
    """A stage that takes sums over parameters and does not say so."""

    kind: Literal["test_undeclared"] = "test_undeclared"

    def apply(self, state: State, gradient: Tensor, direction: Tensor, context: StepContext) -> Tensor:
        return direction * per_block(context.parameter_sum(direction.flatten(1).sum(1)), direction)


Stage.members.pop("test_undeclared")


def test_a_stage_that_takes_sums_says_so() -> None:
    weight = nn.Parameter(torch.zeros(7, 5))
    optimizer = Optimizer([weight], [Undeclared()], lr=1.0)
    weight.grad = torch.ones(7, 5)
    with pytest.raises(ContractError, match=r"^update\.test_undeclared: `sums=True`"):
        optimizer.step()
    assert not weight.any()


def test_a_stage_observes_all_rows_refreshes_those_that_are_due_and_then_acts() -> None:
    """`observe` and `refresh` see what `observed` makes, `refresh` only the rows of one span; `apply` sees both."""
    observed, refreshed, first, applied = run(Diary(), [1, 3, 2], block=(1,))
    assert observed == ("observe", [11.0, 22.0, 33.0], None, ())
    assert (refreshed, first) == (("refresh", [22.0], None, ()), ("refresh", [33.0], None, ()))
    assert applied == ("apply", [1.0, 2.0, 3.0], None, ())


def test_a_lagged_stage_acts_before_it_observes() -> None:
    assert [verb for verb, *_ in run(Diary(timing="lagged"), [3, 3, 3], block=(1,))] == ["apply", "observe", "refresh"]


def test_sweeps_observe_and_refresh_one_group_of_axes_after_another() -> None:
    told = [(verb, axes, observed) for verb, _, axes, observed in run(Diary(one_by_one=True), [3])]
    first, second = ((0,), ()), ((1,), (0,))
    swept = [(verb, *axes) for axes in (first, second) for verb in ("observe", "refresh")]
    assert told == [*swept, ("apply", None, ())]


@pytest.mark.parametrize("name", ["run", "prime", "due", "_observe_and_refresh"])
def test_what_runs_the_verbs_is_final(name: str, registry: None) -> None:
    fields = {"kind": "test_own", "__annotations__": {"kind": Literal["test_own"]}, "apply": Diary.apply}
    with pytest.raises(TypeError, match=f"Own: `{name}` of Stage is final, got an override"):
        type("Own", (Stage,), {**fields, name: lambda self: None})


def test_a_slot_that_is_not_declared_is_named_with_those_that_are() -> None:
    state = State({"update.bad/v": torch.zeros(1), "update.bad.inner/w": torch.zeros(1)}, (), "update.bad")
    message = r"^update\.bad: slot 'x' is not declared in slots\(\) \(declared: v\)$"
    with pytest.raises(ValueError, match=message):
        state["x"]
    with pytest.raises(ValueError, match=message):
        state["x"] = torch.ones(1)
    with pytest.raises(ValueError, match="declared: none"):
        state.scope("empty")["x"]


def test_failures_are_counted_in_slots_of_that_role_whatever_their_name() -> None:
    parameter = nn.Parameter(torch.zeros(3, 2))
    recipe = {"update": Diary(), "routes": [], "failure": {"roots": 2}}
    optimizer = Optimizer([("p", parameter)], recipe, lr=0.1)
    for _ in range(3):  # refreshes at steps 2 and 3
        parameter.grad = torch.ones(3, 2)
        optimizer.step()
    with pytest.raises(ArithmeticError, match="at most 2"):
        optimizer.step()


@pytest.mark.parametrize("timing", ["current", "lagged"])
def test_a_basis_that_statistics_live_in_is_read_once_a_step(timing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Codes of a basis are decoded once and the gradient rotated once, however many verbs need it."""
    stage = Stepper(
        {
            "kind": "eigenbasis",
            "inner": "rms",
            "timing": timing,
            "statistic_frame": "basis",
            "refresh": {"kind": "every", "steps": 4, "stagger": "none", "start": 1},
        },
        (4, 3),
    )
    stage.step(normal(4, 3, seed=0))
    read: list[str] = []
    load = State.__getitem__
    monkeypatch.setattr(State, "__getitem__", lambda state, name: read.append(name) or load(state, name))
    stage.step(normal(4, 3, seed=1))
    assert sorted(name for name in read if name.startswith("basis")) == ["basis.0", "basis.1"]


@pytest.mark.parametrize("block", [(4,), (4, 3), (2, 3, 4), (1, 5, 1)], ids=str)
def test_folding_takes_back_an_unfolding(block: tuple[int, ...]) -> None:
    x = normal(2, *block, seed=0)
    for axis in range(len(block)):
        assert torch.equal(fold(unfold(x, axis), axis, x.shape), x)
