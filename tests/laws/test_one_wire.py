"""Gradient and direction are one wire until the first stage that keeps state: what each kind of chain means."""

from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

from eigengraft import Optimizer, Slot, Stage, State, StepContext

from ..trajectories import normal

CLIP, MOMENTUM, RMS = {"kind": "clip_norm", "max_norm": 0.5}, {"kind": "momentum", "beta": 0.9}, {"kind": "rms"}
ADAM = [MOMENTUM, RMS]
EVERY = {"kind": "every", "steps": 2, "stagger": "none"}
SOAP = {"kind": "eigenbasis", "timing": "lagged", "inner": ADAM, "refresh": EVERY}
BASIS = {"kind": "eigenbasis", "inner": ADAM, "refresh": {**EVERY, "start": 1}}
TWICE = {"kind": "scale", "factor": 2.0}
GIVEN = torch.stack([normal(4, 3, seed=t) * 10.0 ** (t % 3 - 1) for t in range(6)])
"""Gradients `[6, 4, 3]`, of which some are long and some are short."""


class Counting(Stage):
    """d, while the steps are counted: a stage that keeps state and returns what it was given."""

    kind: Literal["counting_for_test"] = "counting_for_test"

    def slots(self, block: tuple[int, ...]) -> dict[str, Slot]:
        return {"count": Slot((), role="count")}

    def apply(self, state: State, gradient: Tensor, direction: Tensor, context: StepContext) -> Tensor:
        state["count"] = state["count"] + 1
        return direction


Stage.members.pop("counting_for_test")  # the laws are about every member of the family


def trained(update: Any, given: Tensor = GIVEN, after_decay: Any = (), rate: float = 0.0) -> Tensor:
    """The parameter after each step."""
    parameter, steps = nn.Parameter(torch.zeros(4, 3, dtype=torch.float64)), []
    optimizer = Optimizer(
        [parameter],
        {"update": update, "after_decay": after_decay, "routes": []},
        lr=0.1,
        weight_decay=rate,
        checked=True,
    )
    for gradient in given:
        parameter.grad = gradient.clone()
        optimizer.step()
        steps.append(parameter.detach().clone())
    return torch.stack(steps)


def clipped(x: Tensor) -> Tensor:
    """Each of `[steps, 4, 3]` with a norm of at most 0.5."""
    return x * (0.5 / x.flatten(1).norm(dim=1).clamp_min(0.5))[:, None, None]


def centered(x: Tensor) -> Tensor:
    return x - x.mean(-1, keepdim=True)


def mean(x: Tensor, beta: float) -> Tensor:
    """The running means of `[steps, ...]`, corrected for bias."""
    means, total = [], torch.zeros_like(x[0])
    for t, own in enumerate(x, start=1):
        total = beta * total + (1 - beta) * own
        means.append(total / (1 - beta**t))
    return torch.stack(means)


def divided(direction: Tensor, squared: Tensor) -> Tensor:
    """The parameter after steps along directions over the roots of the second moments of other tensors."""
    return -0.1 * (direction / (mean(squared.square(), 0.999).sqrt() + 1e-8)).cumsum(0)


ONE_WIRE: dict[str, tuple[Any, Any, Callable[[Tensor], Tensor]]] = {
    "stateless before Adam": ([CLIP, *ADAM], ADAM, clipped),
    "two stateless stages": (["center", CLIP, *ADAM], ADAM, lambda g: clipped(centered(g))),
    "before a basis": ([CLIP, BASIS], [BASIS], clipped),
    "before a basis that lags, priming included": ([CLIP, SOAP], [SOAP], clipped),
    "before learned factors": (["center", "psgd"], ["psgd"], centered),
    "before both chains of a graft": (
        [CLIP, {"kind": "graft", "direction": "sign", "magnitude": RMS}],
        [{"kind": "graft", "direction": "sign", "magnitude": RMS}],
        clipped,
    ),
    "before both chains of a split": (
        [CLIP, {"kind": "split", "rank": 2, "inside": RMS, "outside": ADAM}],
        [{"kind": "split", "rank": 2, "inside": RMS, "outside": ADAM}],
        clipped,
    ),
    "before all paths of a sum": (
        [CLIP, {"kind": "sum", "paths": [{"name": "a", "stages": ADAM}, {"name": "b", "stages": RMS}]}],
        [{"kind": "sum", "paths": [{"name": "a", "stages": ADAM}, {"name": "b", "stages": RMS}]}],
        clipped,
    ),
    "a chain without state is a stage without state": ([{"kind": "chain", "stages": [CLIP]}, *ADAM], ADAM, clipped),
    "a graft without state too": (
        [{"kind": "graft", "direction": "center", "magnitude": "identity"}, RMS],
        [RMS],
        lambda g: centered(g) * (g.flatten(1).norm(dim=1) / centered(g).flatten(1).norm(dim=1))[:, None, None],
    ),
    "inside a chain": ([{"kind": "chain", "stages": [CLIP, *ADAM]}], ADAM, clipped),
    "inside a transform": (
        [{"kind": "transform", "before": CLIP, "inner": ["center", *ADAM]}],
        ADAM,
        lambda g: centered(clipped(g)),
    ),
    "a transform of stages without state is these stages": (
        [{"kind": "transform", "before": CLIP, "inner": ADAM}],
        [CLIP, *ADAM],
        lambda g: g,
    ),
}


@pytest.mark.parametrize("name", ONE_WIRE)
def test_a_stage_without_state_changes_the_gradient_of_all_after_it(name: str) -> None:
    """A chain is another one on gradients that were mapped before."""
    update, other, mapped = ONE_WIRE[name]
    torch.testing.assert_close(trained(update), trained(other, mapped(GIVEN)), rtol=0, atol=1e-12)


TWO_WIRES: dict[str, tuple[Any, Tensor]] = {
    "a stateful stage first": ([MOMENTUM, CLIP, RMS], divided(clipped(mean(GIVEN, 0.9)), GIVEN)),
    "stateless, stateful, stateless": (
        [CLIP, MOMENTUM, "center", RMS],
        divided(centered(mean(clipped(GIVEN), 0.9)), clipped(GIVEN)),
    ),
    "a stateful stage that returns what it was given": ([Counting(), CLIP, RMS], divided(clipped(GIVEN), GIVEN)),
    "a chain with state leaves the gradient as it was": (
        [{"kind": "chain", "stages": [CLIP, MOMENTUM]}, RMS],
        divided(mean(clipped(GIVEN), 0.9), GIVEN),
    ),
    "inside a chain after a stateful stage": (
        [MOMENTUM, {"kind": "chain", "stages": [CLIP, RMS]}],
        divided(clipped(mean(GIVEN, 0.9)), GIVEN),
    ),
    "a transform after a stateful stage changes the gradient alone": (
        [MOMENTUM, {"kind": "transform", "before": CLIP, "inner": RMS}],
        divided(mean(GIVEN, 0.9), clipped(GIVEN)),
    ),
    "each path of a sum has wires of its own": (
        [{"kind": "sum", "paths": [{"name": "a", "stages": [CLIP, RMS]}, {"name": "b", "stages": RMS}]}],
        divided(clipped(GIVEN), clipped(GIVEN)) + divided(GIVEN, GIVEN),
    ),
}


@pytest.mark.parametrize("name", TWO_WIRES)
def test_after_a_stage_with_state_the_gradient_stays_as_it_is(name: str) -> None:
    update, expected = TWO_WIRES[name]
    torch.testing.assert_close(trained(update), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "around",
    [
        lambda inner: {"kind": "chain", "stages": inner},
        lambda inner: {"kind": "split", "rank": 2, "inside": inner, "outside": inner},
        lambda inner: {"kind": "eigenbasis", "inner": inner, "refresh": EVERY},
        lambda inner: {"kind": "prodigy", "inner": inner, "growth": 1.01},
    ],
    ids=["chain", "split", "eigenbasis", "prodigy"],
)
@pytest.mark.parametrize("before", [[], [MOMENTUM]], ids=["one wire", "two wires"])
def test_stages_that_hold_chains_hand_on_whether_there_are_two_wires(around: Any, before: Any) -> None:
    """Doubling inside before `rms` is no change where both are doubled, and doubles the steps where d alone is."""
    rms = {**RMS, "eps": 1e-200}
    doubled, plain = trained([*before, around([TWICE, rms])]), trained([*before, around([rms])])
    factor = 2.0 if before else 1.0
    torch.testing.assert_close(doubled, factor * plain, rtol=1e-5, atol=1e-12)


@pytest.mark.parametrize("lagged", [SOAP, {"kind": "lagged_rms"}], ids=["soap_fitted", "lagged_rms"])
def test_priming_goes_through_stages_that_hold_a_lagged_one(lagged: Any) -> None:
    """What a lagged stage learns of its first gradient is what it would have been given."""
    transformed = [{"kind": "transform", "before": CLIP, "inner": [lagged]}]
    for update in (transformed, [{"kind": "chain", "stages": [CLIP, lagged]}]):
        torch.testing.assert_close(trained(update), trained([lagged], clipped(GIVEN)), rtol=0, atol=1e-9)
    assert torch.equal(
        trained([{"kind": "graft", "direction": lagged, "magnitude": "identity"}])[0], torch.zeros_like(GIVEN[0])
    )


@pytest.mark.parametrize("lagged", [SOAP, {"kind": "lagged_rms"}], ids=["soap_fitted", "lagged_rms"])
def test_priming_goes_through_the_chain_after_decay(lagged: Any) -> None:
    assert torch.equal(trained(["identity"], after_decay=[lagged]), trained([lagged]))


def test_the_chain_after_decay_has_two_wires_at_every_rate() -> None:
    """A rate of 1e-200 changes no number, and adds a term to the direction."""
    without, with_decay = (trained(["identity"], after_decay=[CLIP, RMS], rate=rate) for rate in (0.0, 1e-200))
    assert torch.equal(without, with_decay)
    assert not torch.equal(without, trained([CLIP, RMS]))


def test_priming_leaves_the_state_of_stages_that_do_not_lag() -> None:
    parameter = nn.Parameter(torch.ones(4, 3, dtype=torch.float64))
    update = [MOMENTUM, {"kind": "prodigy", "inner": [{"kind": "lagged_rms"}, {**MOMENTUM, "name": "after"}]}]
    optimizer = Optimizer([parameter], {"update": update, "routes": []}, lr=0.1, checked=True)
    before = {key: x.clone() for key, x in optimizer.state[parameter].items() if isinstance(x, Tensor)}
    parameter.grad = GIVEN[0].clone()
    optimizer.step()
    after = optimizer.state[parameter]
    changed = {key for key, x in before.items() if not torch.equal(x, after[key])}
    assert {key for key in changed if "/" in key} == {"0/update.prodigy.inner.lagged_rms/v"}
    square = (GIVEN[0] * 1e-6).square()  # the gradient in units of D, as it is at first
    torch.testing.assert_close(after["0/update.prodigy.inner.lagged_rms/v"], square, rtol=1e-12, atol=0)
