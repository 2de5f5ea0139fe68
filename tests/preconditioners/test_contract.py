"""The contract of a stage: which hook runs when and on which rows, and what its state refuses."""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import numpy as np
import pytest
import torch
from pydantic import Field
from torch import Tensor, nn

from eigengraft import Optimizer, Stage, State, StepContext, Traits, compose, load_recipe
from eigengraft.errors import ContractError
from eigengraft.numerics import per_block
from eigengraft.preconditioners import Cadence, Every
from eigengraft.preconditioners.algebra.products import fold, unfold
from eigengraft.preconditioners.base import Inner, chain_slots
from eigengraft.slots import Slot

from ..refusals import lacking, refused
from ..trajectories import normal
from .test_statistics import Stepper


class Diary(Stage):
    """Writes down its hooks; the slots are there to be used, or not to be declared."""

    kind: Literal["test_diary"] = "test_diary"
    timing: Literal["current", "lagged"] = Field("current", description="as in an eigenbasis")
    learns: Literal["gradient", "direction"] = Field("gradient", description="what is observed and refreshed")
    told: ClassVar[list[tuple[object, ...]]] = []

    def slots(self, block: tuple[int, ...]) -> dict[str, Slot]:
        return {"count": Slot((), role="count"), "misses": Slot((), role="failures", dtype=torch.int32)}

    def cadence(self) -> Cadence:
        return Every(steps=1, start=2, stagger="none")

    def traits(self, block: tuple[int, ...]) -> Traits:
        return Traits(lagged=self.timing == "lagged", learns=self.learns)

    def observe(self, state: State, gradient: Tensor, context: StepContext) -> None:
        self.told.append(("observe", gradient[:, 0].tolist()))

    def refresh(self, state: State, gradient: Tensor, context: StepContext) -> None:
        self.told.append(("refresh", gradient[:, 0].tolist()))
        state["misses"] = state["misses"] + 1

    def apply(self, state: State, gradient: Tensor, direction: Tensor, context: StepContext) -> Tensor:
        self.told.append(("apply", gradient[:, 0].tolist()))
        return direction


Stage.members.pop("test_diary")  # the laws are about every member of the family


@pytest.fixture(autouse=True)
def diary() -> None:
    Diary.told.clear()


def run(stage: Diary, steps: list[int], block: tuple[int, ...] = (1,)) -> list[tuple[object, ...]]:
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
    with refused(ContractError, "update.test_undeclared", "sums=True"):
        optimizer.step()
    assert not weight.any()


@pytest.mark.parametrize(("learns", "scale"), [("gradient", 1.0), ("direction", 10.0)])
def test_a_stage_observes_all_rows_refreshes_those_that_are_due_and_then_acts(learns: Any, scale: float) -> None:
    """`observe` sees all rows of what it learns, `refresh` those of one span; rows 2 and 1 are due at steps 3 and 2."""
    observed, refreshed, first, applied = run(Diary(learns=learns), [1, 3, 2])
    assert observed == ("observe", [scale, 2 * scale, 3 * scale])
    assert (refreshed, first) == (("refresh", [2 * scale]), ("refresh", [3 * scale]))
    assert applied == ("apply", [1.0, 2.0, 3.0])


def test_a_lagged_stage_acts_before_it_observes() -> None:
    assert [hook for hook, _ in run(Diary(timing="lagged"), [3, 3, 3])] == ["apply", "observe", "refresh"]


@pytest.mark.parametrize("timing", ["current", "lagged"])
@pytest.mark.parametrize("frame", ["fixed", "basis"])
def test_gauss_seidel_observes_and_refreshes_one_axis_after_another(timing: str, frame: str) -> None:
    """The second axis is whitened by the factor of the first as it is after its refresh in the same step."""
    statistic = {"kind": "bregman", "order": "gauss_seidel", "first": "rms"}
    refresh = {"kind": "every", "steps": 1, "start": 1, "stagger": "none"}
    both, jacobi = (
        Stepper(
            {
                "kind": "eigenbasis",
                "inner": "rms",
                "timing": timing,
                "statistic_frame": frame,
                "statistic": {**statistic, "order": order},
                "refresh": refresh,
            },
            (4, 3),
        )
        for order in ("gauss_seidel", "jacobi")
    )
    reads: list[tuple[str, int]] = []
    renew = type(both.stage).refresh_axes
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(both.stage), "refresh_axes", lambda *a: (reads.append(("refresh", *a[2])), renew(*a))[1])
        for t in range(3):
            both.step(normal(4, 3, seed=t))
    assert reads == [("refresh", 0), ("refresh", 1)] * 3
    for t in range(3):
        jacobi.step(normal(4, 3, seed=t))
    names = [f"eigenbasis/factor.{axis}" for axis in (0, 1)]
    same = [torch.equal(both.tensors[name], jacobi.tensors[name]) for name in names]
    assert not same[1]


@pytest.mark.parametrize("name", ["run", "prime", "due", "cached_traits", "keeps_state", "_observe_and_refresh"])
def test_what_runs_the_hooks_is_final(name: str, registry: None) -> None:
    fields = {"kind": "test_own", "__annotations__": {"kind": Literal["test_own"]}, "apply": Diary.apply}
    with refused(TypeError, "Own", name):
        type("Own", (Stage,), {**fields, name: lambda self: None})


def test_traits_are_asked_once_for_a_block_and_kept() -> None:
    asked: list[tuple[int, ...]] = []

    class Asked(Stage):
        kind: Literal["test_asked"] = "test_asked"

        def traits(self, block: tuple[int, ...]) -> Traits:
            asked.append(block)
            return Traits()

        def apply(self, state: State, gradient: Tensor, direction: Tensor, context: StepContext) -> Tensor:
            return direction

    Stage.members.pop("test_asked")
    stage, weight = Asked(), nn.Parameter(torch.zeros(4, 3))
    optimizer = Optimizer([weight], [stage], lr=1.0)
    for _ in range(3):
        weight.grad = torch.ones(4, 3)
        optimizer.step()
    assert len(asked) == len(set(asked)) and () in asked
    assert stage == Asked() and stage.replace() == stage  # what is kept is no part of the declaration


def test_a_slot_that_is_not_declared_is_named_with_those_that_are() -> None:
    state = State({"update.bad/v": torch.zeros(1), "update.bad.inner/w": torch.zeros(1)}, (), "update.bad")
    says = ("update.bad", "x", "slots()")
    with refused(ValueError, *says):
        state["x"]
    with refused(ValueError, *says):
        state["x"] = torch.ones(1)
    with refused(ValueError, "declared"):
        state.scope("empty")["x"]


def test_failures_are_counted_in_slots_of_that_role_whatever_their_name() -> None:
    parameter = nn.Parameter(torch.zeros(3, 2))
    recipe = {"update": Diary(), "routes": [], "failure": {"roots": 2}}
    optimizer = Optimizer([("p", parameter)], recipe, lr=0.1)
    for _ in range(3):  # refreshes at steps 2 and 3
        parameter.grad = torch.ones(3, 2)
        optimizer.step()
    with refused(ArithmeticError, 2):
        optimizer.step()


@pytest.mark.parametrize("timing", ["current", "lagged"])
def test_a_basis_that_statistics_live_in_is_read_once_a_step(timing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Codes of a basis are decoded once and the gradient rotated once, however many hooks need it."""
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
    stored = State._stored
    monkeypatch.setattr(State, "_stored", lambda state, name: read.append(name) or stored(state, name))
    stage.step(normal(4, 3, seed=1))
    assert sorted(name for name in read if name.startswith("basis")) == ["basis.0", "basis.1"]


@pytest.mark.parametrize("block", [(4,), (4, 3), (2, 3, 4), (1, 5, 1)], ids=str)
def test_folding_takes_back_an_unfolding(block: tuple[int, ...]) -> None:
    x = normal(2, *block, seed=0)
    for axis in range(len(block)):
        assert torch.equal(fold(unfold(x, axis), axis, x.shape), x)


def test_only_second_moments_of_a_sensitive_chain_are_sensitive() -> None:
    """Second moments of a graft's magnitude set the size of every update, so storage by role leaves out these alone."""
    chain = ["momentum", "rms"]
    update = load_recipe({"update": [{"kind": "graft", "direction": chain, "magnitude": chain}]}).update
    found = {path: slot.sensitive for path, _, slot in chain_slots(update, (4, 3))}
    assert found == {
        f"graft.{inner}.{stage}": (inner, stage) == ("magnitude", "rms")
        for inner in ("direction", "magnitude")
        for stage in chain
    }


class Crooked(Stage):
    """Returns or stores something of a wrong shape, which later operations would broadcast, or raises an error."""

    kind: Literal["test_crooked"] = "test_crooked"
    fault: str = Field(description="hook and fault")

    def _raise(self, hook: str) -> None:
        if self.fault == hook:
            raise KeyError("beta")

    def slots(self, block: tuple[int, ...]) -> dict[str, Slot]:
        self._raise("slots")
        return {"m": Slot(block, role="first_moment")}

    def inner(self, block: tuple[int, ...]) -> Mapping[str, Inner]:
        self._raise("inner")
        return {}

    def traits(self, block: tuple[int, ...]) -> Traits:
        self._raise("traits")
        return Traits()

    def cadence(self) -> Cadence | None:
        self._raise("cadence")
        return None

    def observe(self, state: State, gradient: Tensor, context: StepContext) -> None:
        self._raise("observe")

    def measures(self, state: State, context: StepContext) -> Mapping[str, Tensor]:
        self._raise("measures")
        return {}

    def apply(self, state: State, gradient: Tensor, direction: Tensor, context: StepContext) -> Tensor:
        self._raise("apply")
        if self.fault == "slot":
            state["m"] = direction[..., :1]
        wrong: dict[str, Any] = {"column": direction[..., :1], "sum": direction.sum(), "axis": direction[:, None]}
        wrong |= {"nothing": None, "array": direction.numpy()}
        return wrong.get(self.fault, direction)


Stage.members.pop("test_crooked")  # other tests are about every member of the family


def one_step(fault: str, *after: str, **recipe: Any) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    optimizer = compose({"update": [Crooked(fault=fault), *after], **recipe}, model, lr=0.1)
    model(torch.ones(2, 3)).square().mean().backward()
    optimizer.step()
    optimizer.inspect()


@pytest.mark.parametrize("after", [(), ("rms",)])
@pytest.mark.parametrize(
    ("fault", "got"),
    [("column", "[1, 4, 1]"), ("sum", "[]"), ("axis", "[1, 1, 4, 3]"), ("nothing", "return"), ("array", "ndarray")],
)
def test_a_direction_of_a_wrong_shape_is_refused_in_every_step(
    fault: str, got: str, after: tuple[str, ...], registry: None
) -> None:
    Stage.members["test_crooked"] = Crooked
    with refused(ContractError, "update.test_crooked: apply()", "[N, 4, 3]", got):
        one_step(fault, *after)


@pytest.mark.parametrize("storage", [{}, {"first_moment": {"kind": "int8", "min_elements": 1}}])
def test_a_slot_of_a_wrong_shape_is_refused_in_every_step(storage: dict[str, Any], registry: None) -> None:
    Stage.members["test_crooked"] = Crooked
    with refused(ContractError, "update.test_crooked", "slot 'm'", "[N, 4, 3]", "[1, 4, 1]"):
        one_step("slot", storage=storage)


@pytest.mark.parametrize("hook", ["slots", "inner", "traits", "cadence", "observe", "measures", "apply"])
def test_an_error_of_any_hook_has_a_note_with_the_stage(hook: str, registry: None) -> None:
    Stage.members["test_crooked"] = Crooked
    with pytest.raises(KeyError) as caught:
        one_step(hook)
    (note,) = caught.value.__notes__
    assert lacking(note, "test_crooked", "Crooked", f"{__file__}:{Crooked._raise.__code__.co_firstlineno + 2}") == []
