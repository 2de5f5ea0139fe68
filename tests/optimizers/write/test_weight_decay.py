"""Weight decay kinds against their formulas, under a schedule, beside routes and group rates."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import eigengraft
from eigengraft import Optimizer
from eigengraft.optimizers.write.write import WeightDecay

from ...refusals import refused, warned

PEAK, RATE = 0.5, 0.2


def start() -> Tensor:
    return torch.tensor([[1.0, -2.0], [3.0, -0.5]], dtype=torch.float64)


GRADIENTS = torch.randn(6, 2, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def run(recipe: Any, lrs: list[float], **group: Any) -> Tensor:
    """The parameter after one step for each learning rate; lrs[0] is the first, PEAK the initial one."""
    weight = nn.Parameter(start())
    optimizer = Optimizer([{"params": [weight], **group}], recipe, lr=PEAK)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: lrs[min(t, len(lrs) - 1)] / PEAK)
    for g, _ in zip(GRADIENTS, lrs, strict=False):
        weight.grad = g.clone()
        optimizer.step()
        schedule.step()
    return weight.detach()


def expected(kind: str, lrs: list[float], rate: float = RATE, after: bool = False) -> Tensor:
    """The formulas, with U = g."""
    w = start()
    for g, lr in zip(GRADIENTS, lrs, strict=False):
        alpha: Tensor | float = {
            "decoupled": rate,
            "l2": rate,
            "corrected": rate * lr / PEAK,
            "independent": rate / PEAK,
            "cautious": rate * (g * w > 0).double(),
        }[kind]
        if after:
            w = w - lr * g
            w = w - lr * alpha * w
        else:
            w = w - lr * g - lr * alpha * w
    return w


def plain(decay: dict[str, Any]) -> dict[str, Any]:
    return {"update": "identity", "weight_decay": {"rate": RATE, **decay}, "routes": []}


LRS = [0.125, 0.25, 0.5, 0.375, 0.25, 0.0625]


def test_every_kind_has_a_formula_here() -> None:
    assert set(WeightDecay.members) == {"decoupled", "l2", "corrected", "independent", "cautious"}


@pytest.mark.parametrize("kind", sorted(WeightDecay.members))
def test_the_formula_under_a_schedule(kind: str) -> None:
    torch.testing.assert_close(run(plain({"kind": kind}), LRS), expected(kind, LRS), rtol=1e-13, atol=1e-13)


def test_decay_after_the_update() -> None:
    recipe = plain({"kind": "decoupled", "placed": "after"})
    torch.testing.assert_close(run(recipe, LRS), expected("decoupled", LRS, after=True), rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("lr_as_tensor", [False, True])
def test_adams_chain_is_fused_and_decays_after_the_update(lr_as_tensor: bool) -> None:
    shapes = [(300, 70), (8, 5), (7,)]
    make = torch.Generator().manual_seed(1)
    ours, theirs = ([nn.Parameter(torch.ones(shape)) for shape in shapes] for _ in range(2))
    after = {"kind": "decoupled", "rate": RATE, "placed": "after"}
    optimizer = Optimizer(ours, {"base": "adamw", "weight_decay": after}, lr=torch.tensor(0.1) if lr_as_tensor else 0.1)
    assert [row.fallbacks for row in optimizer.routing_table()] == [(), (), ()]
    adam = torch.optim.AdamW(theirs, lr=0.1, weight_decay=0.0)
    for _ in range(4):
        for own, other in zip(ours, theirs, strict=True):
            own.grad = torch.randn(own.shape, generator=make)
            other.grad = own.grad.clone()
        optimizer.step()
        adam.step()
        with torch.no_grad():
            torch._foreach_mul_([*theirs], 1 - 0.1 * RATE)
    for own, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", sorted(WeightDecay.members))
def test_a_group_has_its_own_rate(kind: str) -> None:
    got = run(plain({"kind": kind}), LRS, weight_decay=0.7)
    torch.testing.assert_close(got, expected(kind, LRS, rate=0.7), rtol=1e-13, atol=1e-13)
    assert torch.equal(
        run(plain({"kind": kind}), LRS, weight_decay=0.0), run(plain({"kind": "decoupled", "rate": 0.0}), LRS)
    )


@pytest.mark.parametrize("kind", sorted(WeightDecay.members))
def test_one_rate_more_or_less_is_a_rate(kind: str) -> None:
    """A rate given to the optimizer replaces the recipe's."""
    weight = nn.Parameter(start())
    optimizer = Optimizer([weight], plain({"kind": kind, "rate": 0.9}), lr=PEAK, weight_decay=RATE)
    weight.grad = GRADIENTS[0].clone()
    optimizer.step()
    torch.testing.assert_close(weight.detach(), expected(kind, [PEAK]), rtol=1e-13, atol=1e-13)


def test_l2_is_seen_by_every_stage_and_decoupled_by_none() -> None:
    w, g = start(), GRADIENTS[0]
    for kind, u in (("l2", (g + RATE * w).sign()), ("decoupled", g.sign() + RATE * w)):
        weight = nn.Parameter(start())
        optimizer = Optimizer([weight], plain({"kind": kind}) | {"update": "sign"}, lr=PEAK)
        weight.grad = g.clone()
        optimizer.step()
        torch.testing.assert_close(weight.detach(), w - PEAK * u, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("kind", ["decoupled", "corrected", "cautious"])
def test_stages_after_decay_see_it_in_the_direction(kind: str) -> None:
    weight = nn.Parameter(start())
    recipe = plain({"kind": kind}) | {"after_decay": "sign"}
    optimizer = Optimizer([weight], recipe, lr=PEAK)
    weight.grad = GRADIENTS[0].clone()
    optimizer.step()
    alpha = RATE * (GRADIENTS[0] * start() > 0).double() if kind == "cautious" else RATE
    torch.testing.assert_close(weight.detach(), start() - PEAK * (GRADIENTS[0] + alpha * start()).sign())


@pytest.mark.parametrize("own", [None, {"kind": "decoupled", "rate": 0.05}, {"kind": "l2", "rate": 0.3}])
@pytest.mark.parametrize("ratio", [1.0, 0.25, 0.0])
def test_a_route_has_its_own_lr_and_decay(own: dict[str, Any] | None, ratio: float) -> None:
    route = {
        "name": "r",
        "update": "identity",
        "lr_multiplier": ratio,
        "match": {"name": "routed"},
        "weight_decay": own,
    }
    routed, other = nn.Parameter(start()), nn.Parameter(start())
    recipe = plain({"kind": "decoupled"}) | {"routes": [route]}
    optimizer = Optimizer([("routed", routed), ("other", other)], recipe, lr=PEAK)
    for g, lr in zip(GRADIENTS, LRS, strict=True):
        optimizer.param_groups[0]["lr"] = lr
        routed.grad, other.grad = g.clone(), g.clone()
        optimizer.step()
    rate = own["rate"] if own else RATE
    want = expected("decoupled", [lr * ratio for lr in LRS], rate)
    torch.testing.assert_close(routed.detach(), want, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(other.detach(), expected("decoupled", LRS), rtol=1e-13, atol=1e-13)


def test_independent_decay_is_independent_of_the_lr_of_its_route() -> None:
    """W shrinks by rate times the schedule, whatever the learning rate."""
    for ratio in (1.0, 0.25):
        weight = nn.Parameter(start())
        route = {"name": "r", "update": "identity", "lr_multiplier": ratio}
        recipe = plain({"kind": "independent"}) | {"routes": [route]}
        optimizer = Optimizer([weight], recipe, lr=PEAK)
        optimizer.param_groups[0]["lr"] = PEAK / 2
        weight.grad = torch.zeros(2, 2, dtype=torch.float64)
        optimizer.step()
        torch.testing.assert_close(weight.detach(), start() * (1 - RATE / 2))


def test_corrected_decay_of_a_route_follows_its_schedule() -> None:
    weight = nn.Parameter(start())
    route = {"name": "r", "update": "identity", "lr_multiplier": 0.25}
    optimizer = Optimizer([weight], plain({"kind": "corrected"}) | {"routes": [route]}, lr=PEAK)
    optimizer.param_groups[0]["lr"] = PEAK / 2
    weight.grad = torch.zeros(2, 2, dtype=torch.float64)
    optimizer.step()
    torch.testing.assert_close(weight.detach(), start() * (1 - 0.25 * PEAK / 2 * RATE / 2))


@pytest.mark.parametrize("kind", sorted(WeightDecay.members))
def test_decay_of_bfloat16_parameters_is_computed_in_float32(kind: str) -> None:
    weight = nn.Parameter(start().bfloat16())
    optimizer = Optimizer([weight], plain({"kind": kind}), lr=PEAK)
    weight.grad = GRADIENTS[0].bfloat16()
    optimizer.step()
    g, w = GRADIENTS[0].bfloat16().double(), start()
    alpha = RATE * (g * w > 0).double() if kind == "cautious" else {"independent": RATE / PEAK}.get(kind, RATE)
    assert torch.equal(weight.detach(), (w - PEAK * g - PEAK * alpha * w).bfloat16())


RELATIVE = [kind for kind, rule in sorted(WeightDecay.members.items()) if rule.relative]
Schedule = torch.optim.lr_scheduler


def warmed_up(optimizer: Optimizer) -> Any:
    """A warm-up, then a cosine, as SequentialLR joins them."""
    parts = [Schedule.LinearLR(optimizer, 0.01, total_iters=3), Schedule.CosineAnnealingLR(optimizer, 9)]
    return Schedule.SequentialLR(optimizer, parts, [3])


SCHEDULES: dict[str, tuple[float, Any]] = {
    "one cycle": (1e-3, lambda o: Schedule.OneCycleLR(o, max_lr=PEAK, total_steps=13, cycle_momentum=False)),
    "one cycle, lr 0": (0.0, lambda o: Schedule.OneCycleLR(o, max_lr=PEAK, total_steps=13, cycle_momentum=False)),
    "linear": (PEAK, lambda o: Schedule.LinearLR(o, 1e-3, total_iters=9)),
    "lambda": (PEAK, lambda o: Schedule.LambdaLR(o, lambda t: min(1.0, t / 5))),
    "sequential": (PEAK, warmed_up),
    "plateau": (PEAK, lambda o: Schedule.ReduceLROnPlateau(o, patience=1)),
    "constant, lr 0": (0.0, lambda o: o.param_groups[0].update(lr=PEAK)),
}


def scheduled(kind: str, name: str, steps: int = 12, stop: int | None = None) -> tuple[Tensor, Tensor]:
    """(the parameter, what its formula says) after so many steps; stop: steps before a resumed run continues."""
    lr, make = SCHEDULES[name]
    weight, w = nn.Parameter(start()), start()
    optimizer = Optimizer([("w", weight)], plain({"kind": kind}), lr=lr)
    schedule = make(optimizer)
    for t in range(steps):
        if t == stop:
            saved, optimizer = optimizer.state_dict(), Optimizer([("w", weight)], plain({"kind": kind}), lr=lr)
            optimizer.load_state_dict(saved)
            if schedule is not None:
                schedule.optimizer = optimizer
        now, g = float(optimizer.param_groups[0]["lr"]), GRADIENTS[t % len(GRADIENTS)]
        weight.grad = g.clone()
        optimizer.step()
        w = w - now * g - now * RATE * (now if kind == "corrected" else 1.0) / PEAK * w
        if isinstance(schedule, Schedule.ReduceLROnPlateau):
            schedule.step(1.0)
        elif schedule is not None:
            schedule.step()
    return weight.detach(), w


@pytest.mark.filterwarnings("error::UserWarning")
@pytest.mark.parametrize("stop", [None, 4, 9])
@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("kind", RELATIVE)
def test_the_peak_is_that_of_the_schedule(kind: str, name: str, stop: int | None) -> None:
    """The largest learning rate of the run, though schedulers put another one into the group at once."""
    torch.testing.assert_close(*scheduled(kind, name, stop=stop), atol=1e-12, rtol=0)


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("kind", RELATIVE)
def test_an_lr_above_the_peak_is_the_peak(kind: str, given: bool) -> None:
    """A rise that nobody announced is warned of once, and W never decays by more than its rate; `peak_lr` announces."""
    weight, w, known = nn.Parameter(start()), start(), PEAK if given else 0.1
    group = {"params": [weight], "lr": 0.1, **({"peak_lr": PEAK} if given else {})}
    optimizer = Optimizer([group], plain({"kind": kind}))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for lr in (0.1, 0.2, 0.4, 0.5, 0.25):
            optimizer.param_groups[0]["lr"] = lr
            weight.grad = torch.zeros_like(weight)
            optimizer.step()
            known = max(known, lr)
            w = w * (1 - lr * RATE * (lr if kind == "corrected" else 1.0) / known)
    torch.testing.assert_close(weight.detach(), w, atol=1e-12, rtol=0)
    assert len(caught) == (0 if given else 1)
    assert all("weight_decay" in str(one.message) and "'peak_lr'" in str(one.message) for one in caught)
    assert optimizer.param_groups[0]["peak_lr"] == PEAK


@pytest.mark.parametrize("kind", RELATIVE)
def test_a_lower_max_lr_does_not_replace_the_peak(kind: str) -> None:
    weight = nn.Parameter(start())
    optimizer = Optimizer([{"params": [weight], "lr": 0.1, "peak_lr": PEAK}], plain({"kind": kind}))
    optimizer.param_groups[0]["max_lr"] = 0.2  # as OneCycleLR does
    weight.grad = torch.zeros_like(weight)
    optimizer.step()
    w = start() * (1 - 0.1 * RATE * (0.1 if kind == "corrected" else 1.0) / PEAK)
    torch.testing.assert_close(weight.detach(), w, atol=1e-12, rtol=0)
    assert optimizer.param_groups[0]["peak_lr"] == PEAK


@pytest.mark.parametrize("kind", [*RELATIVE, "decoupled"])
def test_a_max_lr_in_a_group_is_the_peak_or_a_warning_says_that_it_has_no_effect(kind: str) -> None:
    group, recipe = {"params": [nn.Parameter(start())], "lr": 0.1, "max_lr": PEAK}, plain({"kind": kind})
    if kind == "decoupled":
        with warned(UserWarning, "param group", "'max_lr'"):
            Optimizer([group], recipe)
        return
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Optimizer([group], recipe).param_groups[0]["peak_lr"] == PEAK


def test_only_what_depends_on_a_peak_warns_of_it() -> None:
    weight = nn.Parameter(start())
    optimizer = Optimizer([weight], plain({"kind": "decoupled"}), lr=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.param_groups[0]["lr"] = 0.2
        weight.grad = torch.zeros_like(weight)
        optimizer.step()


@pytest.mark.parametrize("peak", [-1.0, float("nan"), float("inf"), "0.1", None])
def test_a_peak_is_a_number(peak: Any) -> None:
    with refused(ValueError, "peak_lr"):
        Optimizer([{"params": [nn.Parameter(start())], "peak_lr": peak}], plain({"kind": "corrected"}))


@pytest.mark.parametrize("lr", [0.0, 0.1, 0.5, 2.0])
@pytest.mark.parametrize("kind", RELATIVE)
def test_a_learning_rate_that_the_host_does_not_read(kind: str, lr: float) -> None:
    """lr alpha / RATE of a tensor: at most that of the peak, and 0 at 0, whatever peak is known."""
    for peak in (1.0, 0.0):
        rate, own = torch.tensor(lr, dtype=torch.float64), max(lr, peak) or 1.0
        alpha = WeightDecay.members[kind]().alpha(RATE, rate, peak)  # type: ignore[attr-defined]
        ratio = lr / own
        assert float(rate * alpha) == pytest.approx(RATE * ratio * (lr if kind == "corrected" else 1.0), abs=1e-15)


def test_lr_zero_moves_nothing_whatever_decays() -> None:
    for kind in sorted(WeightDecay.members):
        weight = nn.Parameter(start())
        optimizer = eigengraft.compose(plain({"kind": kind}), [("w", weight)], lr=PEAK)
        optimizer.param_groups[0]["lr"] = 0.0
        weight.grad = GRADIENTS[0].clone()
        optimizer.step()
        assert torch.equal(weight, start())


def test_a_step_that_is_refused_keeps_the_peak() -> None:
    weight = nn.Parameter(start())
    recipe = plain({"kind": "corrected"}) | {"failure": {"nonfinite": "raise"}}
    optimizer = Optimizer([weight], recipe, lr=0.1)
    optimizer.param_groups[0]["lr"] = 0.2
    weight.grad = torch.full_like(weight, float("nan"))
    with pytest.raises(FloatingPointError):
        optimizer.step()
    assert optimizer.param_groups[0]["peak_lr"] == 0.1
