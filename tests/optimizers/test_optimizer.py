"""The contract of a torch optimizer: schedulers, closures, scaler, groups, copies, hooks, dtypes, layouts, shapes."""

import copy
import functools
import math
import pickle
import re
import warnings
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler

import eigengraft
from eigengraft import Optimizer, load_recipe
from eigengraft.optimizers import isolation
from eigengraft.optimizers.write.write import WeightDecay

from ..recipes import BROAD, COVER, EVERY_BROAD, TOGETHER, few_quick, with_options
from ..refusals import refused, warned
from ..trajectories import named

SHAPES = ((), (0,), (0, 3), (1,), (5,), (4, 3), (3, 4), (1, 6), (2, 3, 17), (3, 2, 1, 2), (2, 1, 2, 2, 2))
FAST_SOAP = load_recipe("soap_fitted", ["update.eigenbasis.refresh.steps=3"])
AT_ONCE = load_recipe(FAST_SOAP, ["update.eigenbasis.refresh.stagger=none"])
"""Refreshes are spread over all parameters of an optimizer; without that, parameters know nothing of each other."""


def parameters(shapes: Sequence[tuple[int, ...]], dtype: torch.dtype = torch.float64, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(s, generator=generator, dtype=torch.float64).to(dtype)) for s in shapes]


def gradients(like: Sequence[Tensor], steps: int, seed: int = 1) -> list[list[Tensor]]:
    """Correlated over time, so that moments matter; bfloat16 values, so that every dtype sees the same numbers."""
    generator = torch.Generator().manual_seed(seed)
    drift = [torch.randn(p.shape, generator=generator) for p in like]
    noise = [[torch.randn(p.shape, generator=generator) for p in like] for _ in range(steps)]
    return [[(d + n).bfloat16().to(p.dtype) for d, n, p in zip(drift, row, like, strict=True)] for row in noise]


def drive(optimizer: torch.optim.Optimizer, params: Sequence[Tensor], rows: Sequence[Sequence[Tensor | None]]) -> None:
    """Steps with gradients that are laid out like their parameters, as autograd makes them."""
    for row in rows:
        for p, g in zip(params, row, strict=True):
            p.grad = None if g is None else torch.empty_strided(p.shape, p.stride(), dtype=p.dtype).copy_(g)
        optimizer.step()


def equal(one: Sequence[Tensor], two: Sequence[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def close(one: Sequence[Tensor], two: Sequence[Tensor], rtol: float = 1e-9) -> None:
    for a, b in zip(one, two, strict=True):
        torch.testing.assert_close(a, b, rtol=rtol, atol=rtol)


SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda t: min(1, (t + 1) / 4)),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=9, eta_min=1e-4),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.03, total_steps=12, cycle_momentum=False),
    "sequential": lambda o: lr_scheduler.SequentialLR(
        o,
        [lr_scheduler.LinearLR(o, start_factor=0.25, total_iters=4), lr_scheduler.CosineAnnealingLR(o, T_max=8)],
        milestones=[4],
    ),
    "exponential": lambda o: lr_scheduler.ExponentialLR(o, 0.7),
}


@pytest.mark.parametrize("tensor", [False, True], ids=["float", "tensor"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedulers_drive_it_like_a_torch_optimizer(schedule: str, tensor: bool) -> None:
    ours, theirs = parameters(SHAPES), parameters(SHAPES)
    lr = torch.tensor(0.02, dtype=torch.float64) if tensor else 0.02
    one = Optimizer(ours, "adamw", lr=lr, weight_decay=0.1)
    two = torch.optim.AdamW(theirs, lr=0.02, weight_decay=0.1)
    schedules = SCHEDULES[schedule](one), SCHEDULES[schedule](two)
    for row in gradients(ours, 10):
        drive(one, ours, [row])
        drive(two, theirs, [row])
        for s in schedules:
            s.step()
    assert isinstance(one.param_groups[0]["lr"], Tensor) == tensor
    close(ours, theirs, 1e-10)


@pytest.mark.parametrize("recipe", ["soap_fitted", "muon", "adafactor", "shampoo"])
def test_float_and_tensor_lr_give_the_same_trajectory(recipe: str) -> None:
    runs = []
    for lr in (0.0078125, torch.tensor(0.0078125), torch.tensor([0.0078125])):
        params = parameters(SHAPES, torch.float32)
        optimizer = Optimizer(named(params), recipe, lr=lr)
        schedule = lr_scheduler.LambdaLR(optimizer, lambda t: 0.5**t)
        for row in gradients(params, 6):
            drive(optimizer, params, [row])
            schedule.step()
        runs.append(params)
    assert equal(runs[0], runs[1]) and equal(runs[0], runs[2])


def test_one_cycle_with_momentum_names_the_field_that_takes_a_schedule() -> None:
    optimizer = Optimizer(parameters([(2, 2)]))
    for one in (optimizer, copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        with refused(ValueError, "cycle_momentum=False", "update.momentum.beta"):
            lr_scheduler.OneCycleLR(one, max_lr=0.1, total_steps=3)
    with refused(ValueError, "cycle_momentum=False", "update.momentum.beta"):
        lr_scheduler.CyclicLR(optimizer, 0.1, 0.2)
    (schedule,) = re.findall(r"overrides=(.*)", cycle_error())
    Optimizer(parameters([(2, 2)]), overrides=eval(schedule))
    assert "momentum" not in optimizer.defaults


def cycle_error() -> str:
    with refused(ValueError, "overrides=") as caught:
        lr_scheduler.OneCycleLR(Optimizer(parameters([(2, 2)])), max_lr=0.1, total_steps=3)
    return str(caught.value)


@pytest.mark.parametrize(
    ("recipe", "option", "value", "overrides"),
    [
        ("adamw", "betas", (0.8, 0.9), {"update.momentum.beta": 0.8, "update.rms.beta": 0.9}),
        (
            "soap",
            "betas",
            (0.8, 0.9),
            {
                f"update.eigenbasis.{k}.beta": b
                for k, b in (("inner.momentum", 0.8), ("inner.rms", 0.9), ("statistic", 0.9))
            },
        ),
        ("muon", "momentum", 0.8, {"update.momentum.beta": 0.8}),
        ("sgd", "momentum", 0.8, {"update.heavy_ball.beta": 0.8}),
        ("adamw", "eps", 1e-6, {"update.rms.eps": 1e-6}),
        ("muon", "nesterov", False, {"update.momentum.nesterov": False}),
    ],
)
def test_an_option_of_torch_names_the_overrides_that_are_meant(
    recipe: str, option: str, value: object, overrides: dict[str, object]
) -> None:
    pair = [("w", parameters([(2, 2)])[0])]
    with refused(TypeError, option, f"overrides={overrides}"):
        Optimizer(pair, recipe, **{option: value})  # type: ignore[arg-type]
    with refused(TypeError, option, f"overrides={overrides}"):
        eigengraft.compose(recipe, pair, **{option: value})  # type: ignore[arg-type]
    Optimizer(pair, recipe, overrides=overrides)


def test_a_closure_is_called_once_with_gradients_enabled() -> None:
    weight = parameters([(3, 2)])[0]
    optimizer = Optimizer([weight], "sgd", lr=0.5)
    calls: list[bool] = []

    def closure() -> Tensor:
        calls.append(torch.is_grad_enabled())
        optimizer.zero_grad()
        loss = weight.square().sum() / 2
        loss.backward()
        return loss

    before = weight.detach().clone()
    with torch.no_grad():
        loss = optimizer.step(closure)
    assert (
        calls == [True] and loss is not None and float(loss.detach()) == pytest.approx(float(before.square().sum() / 2))
    )
    close([weight], [before / 2])
    assert optimizer.step() is None


@pytest.mark.parametrize("recipe", ["adamw", "soap_fitted", "reference/soap"])
def test_a_gradient_scaler_skips_an_infinite_step(recipe: str) -> None:
    def net() -> tuple[nn.Linear, Optimizer]:
        torch.manual_seed(3)
        layer = nn.Linear(4, 3)
        return layer, eigengraft.compose(recipe, layer)

    xs = torch.randn(8, 5, 4, generator=torch.Generator().manual_seed(0))
    (plain, one), (scaled, two) = net(), net()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=100)
    for step, x in enumerate(xs):
        two.zero_grad()
        scaler.scale(scaled(x).square().mean() * (math.inf if step == 2 else 1.0)).backward()
        if step == 4:
            scaler.unscale_(two)
        scaler.step(two)
        scaler.update()
        if step != 2:
            one.zero_grad()
            plain(x).square().mean().backward()
            one.step()
    assert scaler.get_scale() == 512.0 and not two.skipped
    assert equal(list(plain.parameters()), list(scaled.parameters()))


def test_a_gradient_scaler_refuses_closures_and_gradients_in_float16() -> None:
    weight = nn.Parameter(torch.ones(3))
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for recipe in ({"base": "adamw", "sam": {}}, {"base": "adamw", "line_search": {}}, "adamw"):
        optimizer = Optimizer([("w", weight)], recipe)
        scaler.scale(weight.sum()).backward()
        with refused(RuntimeError, "GradScaler"):
            scaler.step(optimizer, lambda: weight.sum())
        assert torch.equal(weight.detach(), torch.ones(3)) and float(optimizer.state[weight]["step"]) == 0
        del optimizer.grad_scale, optimizer.found_inf
    half = nn.Parameter(torch.ones(3, dtype=torch.float16))
    optimizer = Optimizer([("half", half)], "adamw")
    scaler.scale(half.sum()).backward()
    with refused(ValueError, "half", "float16"):
        scaler.step(optimizer)


def test_a_step_divides_gradients_as_the_scaler_does() -> None:
    """By a scale that is no power of two, of which the reciprocal is rounded."""
    given = torch.randn(100, generator=torch.Generator().manual_seed(0))
    weights, grads = [nn.Parameter(torch.zeros(100)) for _ in range(2)], []
    for number, weight in enumerate(weights):
        optimizer, scaler = Optimizer([("w", weight)], "sgd"), torch.amp.GradScaler("cpu", init_scale=1000.0)
        scaler.scale((weight * given).sum()).backward()
        if number:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        assert weight.grad is not None
        grads.append(weight.grad)
        assert not hasattr(optimizer, "grad_scale") and not hasattr(optimizer, "found_inf")
    assert equal(weights[:1], weights[1:]) and equal(grads[:1], grads[1:])


def test_groups_have_their_own_lr_and_weight_decay() -> None:
    shapes = [(4, 3), (5,), (3, 2, 2)]
    ours, alone = parameters(shapes), parameters(shapes)
    settings: list[dict[str, Any]] = [{"lr": 0.01, "weight_decay": 0.2}, {"lr": 0.1}, {"weight_decay": 0.0}]
    groups = [{"params": named([p], i), **s} for i, (p, s) in enumerate(zip(ours, settings, strict=True))]
    separate = [Optimizer(named([p]), AT_ONCE, **s) for p, s in zip(alone, settings, strict=True)]
    one = Optimizer(groups, AT_ONCE)
    for row in gradients(ours, 8):
        drive(one, ours, [row])
        for optimizer, p, g in zip(separate, alone, row, strict=True):
            drive(optimizer, [p], [[g]])
    assert equal(ours, alone)


@pytest.mark.parametrize("empty", [0, 1])
@pytest.mark.parametrize("names", [True, False])
def test_a_group_may_be_empty(empty: int, names: bool) -> None:
    """A trainer puts vectors into a group without decay, and a model may have none."""

    def run(groups: bool) -> list[torch.Tensor]:
        params = parameters([(4, 3), (5,)])
        given = [{"params": named(params) if names else params}, {"params": [], "weight_decay": 0.0}]
        optimizer = Optimizer(given[:: -1 if empty == 0 else 1] if groups else given[:1], "adamw")
        drive(optimizer, params, gradients(params, 2))
        optimizer.load_state_dict(optimizer.state_dict())
        drive(copy.deepcopy(optimizer) if not groups else optimizer, params, [])
        return params

    assert equal(run(True), run(False))


def test_the_order_of_groups_does_not_matter() -> None:
    shapes = [(4, 3), (3, 2)]
    runs = []
    for order in ((0, 1), (1, 0)):
        params = parameters(shapes)
        drive(
            Optimizer([{"params": [(f"p{i}", params[i])], "lr": 0.01 * (i + 1)} for i in order], FAST_SOAP),
            params,
            gradients(params, 8),
        )
        runs.append(params)
    assert equal(*runs)


@pytest.mark.parametrize("late", [0, 4])
def test_a_group_may_come_later(late: int) -> None:
    ours, alone = parameters([(4, 3), (3, 4)]), parameters([(4, 3), (3, 4)])
    rows = gradients(ours, 9)
    one = Optimizer(named(ours[:1]), AT_ONCE)
    drive(one, ours[:1], [row[:1] for row in rows[:late]])
    one.add_param_group({"params": named(ours[1:], 1), "lr": 0.05, "weight_decay": 0.5})
    drive(one, ours, rows[late:])
    drive(Optimizer(named(alone[:1]), AT_ONCE), alone[:1], [row[:1] for row in rows])
    drive(Optimizer(named(alone[1:]), AT_ONCE, lr=0.05, weight_decay=0.5), alone[1:], [row[1:] for row in rows[late:]])
    assert equal(ours, alone)


@pytest.mark.parametrize(
    "wrong",
    [
        {"lr": -1.0},
        {"lr": float("nan")},
        {"weight_decay": -0.1},
        {"lr": "0.1"},
        {"lr": None},
        {"lr": True},
        {"lr": torch.ones(2)},
        {"weight_decay": torch.ones(2)},
        {"betas": (0.9, 0.99)},
        {"recipe": "soap_fitted"},
    ],
    ids=lambda wrong: "-".join(f"{k}={v}" for k, v in wrong.items()),
)
def test_a_refused_group_leaves_no_trace(wrong: dict[str, Any]) -> None:
    params, alone = parameters([(2, 2), (2, 2)]), parameters([(2, 2), (2, 2)])
    optimizer = Optimizer(params[:1], "adamw")
    with refused(ValueError, next(iter(wrong))):
        optimizer.add_param_group({"params": [params[1]], **wrong})
    rows = gradients(params, 2)
    assert len(optimizer.param_groups) == 1 and len(optimizer.routing_table()) == 1
    drive(optimizer, params, rows)
    drive(Optimizer(alone[:1], "adamw"), alone, rows)
    assert equal(params, alone)
    with refused(ValueError, next(iter(wrong))):
        Optimizer([{"params": [params[1]], **wrong}], "adamw")


def test_what_trainers_put_into_groups() -> None:
    ours, theirs = parameters([(4, 3), (3,)]), parameters([(4, 3), (3,)])

    def groups(params: list[Tensor]) -> list[dict[str, Any]]:
        return [{"params": [params[0]], "weight_decay": 0.1}, {"params": [params[1]], "weight_decay": 0.0}]

    one, two = Optimizer(groups(ours), "adamw", lr=0.01), torch.optim.AdamW(groups(theirs), lr=0.01)
    drive(one, ours, gradients(ours, 5))
    drive(two, theirs, gradients(theirs, 5))
    close(ours, theirs)
    assert len(Optimizer([{"params": ours, "fused": True, "foreach": False}]).param_groups) == 1


def test_copies_continue_bit_exactly_and_on_their_own() -> None:
    net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))
    optimizer = eigengraft.compose(FAST_SOAP, net)
    rows = gradients(list(net.parameters()), 12)
    drive(optimizer, list(net.parameters()), rows[:5])
    pair = (net, optimizer)
    copies = [copy.deepcopy(pair), pickle.loads(pickle.dumps(pair))]
    before = copy.deepcopy([list(other.parameters()) for other, _ in copies])
    drive(optimizer, list(net.parameters()), rows[5:])
    assert all(equal(list(other.parameters()), old) for (other, _), old in zip(copies, before, strict=True))
    for other, other_optimizer in copies:
        assert (
            other_optimizer.recipe == optimizer.recipe
            and other_optimizer.param_groups[0]["params"][0] is other[0].weight
        )
        drive(other_optimizer, list(other.parameters()), rows[5:])
        assert equal(list(other.parameters()), list(net.parameters()))
        names = [(row.name, row.route, row.reason, row.state_bytes) for row in other_optimizer.routing_table()]
        assert names == [(row.name, row.route, row.reason, row.state_bytes) for row in optimizer.routing_table()]


def test_hooks_fire() -> None:
    params = parameters([(2, 2)])
    optimizer = Optimizer(params)
    seen: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before step"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after step"))
    optimizer.register_state_dict_pre_hook(lambda *_: seen.append("before save"))
    optimizer.register_state_dict_post_hook(lambda *_: seen.append("after save"))
    optimizer.register_load_state_dict_pre_hook(lambda *_: seen.append("before load"))
    optimizer.register_load_state_dict_post_hook(lambda *_: seen.append("after load"))
    drive(optimizer, params, gradients(params, 1))
    optimizer.load_state_dict(optimizer.state_dict())
    assert seen == [f"{when} {what}" for what in ("step", "save", "load") for when in ("before", "after")]


DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


@pytest.mark.parametrize(("recipe", "dtype"), with_options(*DTYPES), ids=str)
def test_each_step_is_computed_in_float32_or_float64_and_rounded_once(recipe: str, dtype: torch.dtype) -> None:
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    narrow = parameters([(4, 3), (3,)], dtype)
    twins = [nn.Parameter(p.detach().to(wide)) for p in narrow]
    one, two = Optimizer(named(narrow), recipe), Optimizer(named(twins), recipe)
    states = [t for p in narrow for t in one.state[p].values() if t.is_floating_point() and t.ndim]
    assert states and {t.dtype for t in states} == {wide}
    for row in gradients(narrow, 4):
        with torch.no_grad():
            for p, twin in zip(narrow, twins, strict=True):
                twin.copy_(p)
        drive(one, narrow, [row])
        drive(two, twins, [[g.to(wide) for g in row]])
        for p, twin in zip(narrow, twins, strict=True):
            # at most one unit in the last place: the sum W - lr a W - lr U may be formed in another order
            unit = torch.finfo(dtype).eps
            torch.testing.assert_close(p.to(wide), twin.to(dtype).to(wide), rtol=unit, atol=unit * 1e-2)


@pytest.mark.parametrize("recipe", ["adamw", "soap_fitted", "muon"])
def test_dtypes_mix_in_one_group(recipe: str) -> None:
    dtypes = (torch.float32, torch.bfloat16, torch.float64, torch.float16)
    ours = [parameters([(4, 3)], dtype)[0] for dtype in dtypes]
    alone = [p.detach().clone().requires_grad_() for p in ours]
    stagger = load_recipe(recipe, ["update.eigenbasis.refresh.stagger=none"] if recipe == "soap_fitted" else [])
    rows = gradients(ours, 5)
    drive(Optimizer(named(ours), stagger), ours, rows)
    for index, p in enumerate(alone):
        drive(Optimizer(named([p], index), stagger), [p], [[row[index]] for row in rows])
        unit = torch.finfo(p.dtype).eps
        torch.testing.assert_close(ours[index], p, rtol=10 * unit, atol=10 * unit)


def channels_last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last)


LAYOUTS: dict[str, tuple[tuple[int, ...], Callable[[Tensor], Tensor]]] = {
    "channels last": ((3, 2, 2, 3), channels_last),
    "transposed": ((4, 3), lambda x: x.t().contiguous().t()),
    "permuted": ((2, 3, 17), lambda x: x.permute(2, 0, 1).contiguous().permute(1, 2, 0)),
    "sliced": ((4, 3), lambda x: torch.cat([x, x + 7], 1)[:, :3]),
    "strided": ((5,), lambda x: x.repeat_interleave(2)[::2]),
}


@pytest.mark.parametrize("recipe", few_quick(COVER))
def test_memory_layout_does_not_matter(recipe: str) -> None:
    """Two parameters of each layout, all in one optimizer."""
    lays = [lay for _, lay in LAYOUTS.values() for _ in range(2)]
    plain = parameters([shape for shape, _ in LAYOUTS.values() for _ in range(2)])
    odd = [nn.Parameter(lay(p.detach().clone())) for lay, p in zip(lays, plain, strict=True)]
    strides = [p.stride() for p in odd]
    assert not any(p.is_contiguous() for p in odd)
    bases = [(p._base if p._base is not None else p).untyped_storage().nbytes() for p in odd]
    rows = gradients(plain, 4)
    small = load_recipe(load_recipe(recipe), ["blocking.size=2"]) if recipe == "soap_fitted" else recipe
    one, two = Optimizer(named(plain), small), Optimizer(named(odd), small)
    drive(one, plain, rows)
    drive(two, odd, rows[:2])
    for row in rows[2:]:  # gradients that are laid out unlike their parameter
        for p, g in zip(odd, row, strict=True):
            p.grad = g.clone()
        two.step()
    close(plain, odd)
    assert [p.stride() for p in odd] == strides
    assert [(p._base if p._base is not None else p).untyped_storage().nbytes() for p in odd] == bases


def test_what_lies_between_a_sliced_parameter_is_untouched() -> None:
    whole = torch.randn(4, 6, dtype=torch.float64)
    sliced = nn.Parameter(whole[:, ::2])
    before = whole[:, 1::2].clone()
    drive(Optimizer(named([sliced]), FAST_SOAP, weight_decay=0.5), [sliced], gradients([sliced], 3))
    assert sliced.data_ptr() == whole.data_ptr() and torch.equal(whole[:, 1::2], before)


@pytest.mark.parametrize(("recipe", "dtype"), with_options(torch.float32, torch.bfloat16), ids=str)
def test_every_shape_moves_and_stays_finite(recipe: str, dtype: torch.dtype) -> None:
    params = parameters(SHAPES, dtype)
    before = copy.deepcopy(params)
    larger = ["update.prodigy.start=0.01"] * (recipe == "prodigy")
    loaded = load_recipe(recipe, larger)
    optimizer = Optimizer(named(params), loaded, lr=max(0.05, 20 * loaded.lr))  # steps that bfloat16 sees
    drive(optimizer, params, gradients(params, 6))
    assert all(bool(p.isfinite().all()) and p.dtype == dtype for p in params)
    assert all(not torch.equal(p, old) for p, old in zip(params, before, strict=True) if p.numel())
    assert optimizer.routing_table()[1].blocks == () and optimizer.state_bytes() > 0


OTHER_DECAYS = [("soap_fitted", decay) for decay in sorted(WeightDecay.members) if decay != "decoupled"]


@pytest.mark.parametrize(("recipe", "decay"), [*((name, "decoupled") for name in BROAD), *OTHER_DECAYS])
def test_gradients_are_never_written(recipe: str, decay: str) -> None:
    changed = load_recipe(recipe, [f"weight_decay.kind={decay}", "weight_decay.rate=0.1"])
    for shapes in ([(4, 3)], [(4, 3), (4, 3), (3,), ()]):
        params = parameters(shapes, torch.float32)
        optimizer = Optimizer(named(params), changed)
        for row in gradients(params, 3):
            drive(optimizer, params, [row])
            grads = [p.grad for p in params]
            assert equal([g for g in grads if g is not None], row)


@pytest.mark.parametrize("recipe", [param for param in EVERY_BROAD if param.values[0] not in TOGETHER])
def test_a_parameter_without_gradient_is_not_part_of_the_step(recipe: str) -> None:
    shapes = [(4, 3), (4, 3), (3,), (3,)]
    ours, dense = parameters(shapes), parameters(shapes)
    decayed = load_recipe(recipe, ["weight_decay.rate=0.1"])
    one, two = Optimizer(named(ours), decayed), Optimizer(named(dense), decayed)
    rows, present = gradients(ours, 9), [True, False, True, False, False, True, True, False, True]
    for row, there in zip(rows, present, strict=True):
        before = copy.deepcopy([ours[1], ours[3], *one.state[ours[1]].values(), *one.state[ours[3]].values()])
        drive(one, ours, [[row[0], row[1] if there else None, row[2], row[3] if there else None]])
        if not there:
            assert equal([ours[1], ours[3], *one.state[ours[1]].values(), *one.state[ours[3]].values()], before)
    seen = [row for row, there in zip(rows, present, strict=True) if there]
    for step, row in enumerate(rows):
        later = seen[step] if step < len(seen) else [None] * 4
        drive(two, dense, [[row[0], later[1], row[2], later[3]]])
    close(ours, dense)
    assert [int(one.state[p]["step"]) for p in ours] == [9, 5, 9, 5]


@pytest.mark.parametrize("recipe", ["adamw", "soap_fitted", "reference/soap"])
def test_a_parameter_may_be_frozen_and_thawed(recipe: str) -> None:
    params, alone = parameters([(4, 3), (3, 2)]), parameters([(4, 3), (3, 2)])
    rows = gradients(params, 9)
    params[1].requires_grad_(False)
    optimizer = Optimizer(named(params), recipe, weight_decay=0.1)
    assert optimizer.routing_table()[1].state_bytes == 0 and "frozen" in optimizer.routing_table()[1].reason
    drive(optimizer, params, [[row[0], None] for row in rows[:3]])
    assert torch.equal(params[1], alone[1])
    params[1].requires_grad_(True)
    drive(optimizer, params, rows[3:6])
    thawed = copy.deepcopy(params[1])
    params[1].requires_grad_(False)
    drive(optimizer, params, [[row[0], None] for row in rows[6:]])
    assert torch.equal(params[1], thawed) and int(optimizer.state[params[1]]["step"]) == 3
    drive(Optimizer(named(alone[1:], 1), recipe, weight_decay=0.1), alone[1:], [row[1:] for row in rows[3:6]])
    close(params[1:], alone[1:])


@pytest.mark.parametrize("frozen", [False, True])
def test_a_parameter_whose_state_was_taken_out_begins_afresh(frozen: bool) -> None:
    """Also if it has no gradient in the next step; the others go on."""
    params, alone = parameters([(4, 3), (3, 2)]), parameters([(4, 3), (3, 2)])
    rows = gradients(params, 6)
    optimizer, whole = (Optimizer(named(own), "adamw", weight_decay=0.1) for own in (params, alone))
    drive(optimizer, params, rows[:2])
    del optimizer.state[params[1]]
    drive(optimizer, params, [[rows[2][0], None if frozen else rows[2][1]], *rows[3:]])
    assert int(optimizer.state[params[1]]["step"]) == (3 if frozen else 4)
    drive(whole, alone, rows)
    close(params[:1], alone[:1])
    assert int(optimizer.state[params[0]]["step"]) == 6


@pytest.mark.parametrize("recipe", ["adamw", "prodigy"])
def test_what_was_skipped_stays_counted_when_a_parameter_is_thawed(recipe: str) -> None:
    """Each group of `prodigy`, which asks for the learning rate, has a parameter set of its own."""
    params = [nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(2), requires_grad=False)]
    optimizer = Optimizer([{"params": [("a", params[0])]}, {"params": [("b", params[1])]}], recipe)
    drive(optimizer, params, [[torch.full((3,), torch.nan), None]])
    params[1].requires_grad_(True)
    drive(
        optimizer, params, [[torch.full((3,), torch.nan), torch.ones(2)], [torch.ones(3), torch.full((2,), torch.inf)]]
    )
    assert optimizer.skipped == {"a": 2, "b": 1}


def test_a_norm_per_parameter_is_over_all_its_blocks() -> None:
    graft = {"kind": "graft", "direction": "sign", "magnitude": "identity", "per": "parameter"}
    recipe = {"update": graft, "blocking": {"size": 4}, "routes": []}
    weight = nn.Parameter(torch.zeros(8, 4, dtype=torch.float64))  # two blocks of 4 x 4
    optimizer = Optimizer([weight], recipe, lr=1.0)
    g = torch.arange(1.0, 33.0, dtype=torch.float64).reshape(8, 4)
    drive(optimizer, [weight], [[g]])
    close([weight.detach()], [-g.sign() * g.norm() / g.sign().norm()])


def test_stages_within_stages_take_sums_over_blocks_of_every_shape() -> None:
    """Gradients clipped by parameter, m grafted to their signs, what agrees scaled by the part of the parameter that
    does; blocks of four shapes, views of two matrices, and steps that some parameters miss."""
    after = {"kind": "cautious", "per": "parameter"}
    graft = {"kind": "graft", "direction": "sign", "magnitude": "momentum", "per": "parameter"}
    clip = {"kind": "clip_norm", "max_norm": 3.0, "per": "parameter"}
    update = [{"kind": "transform", "before": clip, "inner": [graft, after]}]
    recipe = {"update": update, "blocking": {"size": 4}, "routes": []}
    weights = [nn.Parameter(torch.zeros(*shape, dtype=torch.float64)) for shape in ((7, 5), (3, 4), (2, 5, 18))]
    optimizer = Optimizer(named(weights), recipe, lr=1.0)
    given = gradients(weights, 4)
    given[1][0] = given[2][2] = None  # type: ignore[call-overload]
    drive(optimizer, weights, given)
    for weight, own in zip(weights, zip(*given, strict=True), strict=True):
        matrices = [
            [g[k] if g.ndim == 3 else g for g in own if g is not None] for k in range(2 if weight.ndim == 3 else 1)
        ]
        expected = [-sum(clipped_and_grafted(matrix)) for matrix in matrices]
        close([weight.detach()], [torch.stack(expected) if weight.ndim == 3 else expected[0]])


def clipped_and_grafted(matrix: Sequence[Tensor]) -> list[Tensor]:
    """The directions of the test above, of the gradients of one matrix."""
    m, found = torch.zeros_like(matrix[0]), []
    for t, raw in enumerate(matrix, start=1):
        g = raw / max(1.0, float(raw.norm()) / 3)
        m = 0.9 * m + 0.1 * g
        d = g.sign() * (m / (1 - 0.9**t)).norm() / g.sign().norm()
        agrees = (d * g > 0).double()
        found.append(d * agrees / agrees.mean())
    return found


def test_tied_weights_are_one_parameter() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wte = nn.Embedding(7, 4)
            self.lm_head = nn.Linear(4, 7, bias=False)
            self.lm_head.weight = self.wte.weight

    net = Tied()
    optimizer = eigengraft.compose("soap_fitted", net)
    assert [(row.name, row.route) for row in optimizer.routing_table()] == [("wte.weight", "routes.adam")]
    before = net.wte.weight.detach().clone()
    net.lm_head(net.wte(torch.tensor([1, 2]))).square().sum().backward()
    optimizer.step()
    assert net.lm_head.weight is net.wte.weight and not torch.equal(before, net.wte.weight)


def test_zero_grad() -> None:
    params = parameters([(2, 2)])
    optimizer = Optimizer(params)
    drive(optimizer, params, gradients(params, 1))
    optimizer.zero_grad(set_to_none=False)
    assert params[0].grad is not None and not params[0].grad.any()
    optimizer.zero_grad()
    assert params[0].grad is None


def test_what_wraps_a_method_of_torch_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """As tools do that patch the class, also where torch.compile is not imported."""
    inherited, calls = torch.optim.Optimizer.zero_grad, []

    @functools.wraps(inherited)
    def watched(self: torch.optim.Optimizer, set_to_none: bool = True) -> None:
        calls.append(set_to_none)
        inherited(self, set_to_none)

    monkeypatch.setattr(torch.optim.Optimizer, "zero_grad", watched)
    monkeypatch.setattr(isolation, "sys", SimpleNamespace(modules={}))
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    optimizer = Optimizer([parameter])
    optimizer.zero_grad(set_to_none=False)
    assert calls == [False] and parameter.grad.tolist() == [0.0, 0.0]
    monkeypatch.setattr(torch.optim.Optimizer, "zero_grad", inherited)
    optimizer.zero_grad()
    assert calls == [False] and parameter.grad is None


@pytest.mark.parametrize("recipe", EVERY_BROAD)
def test_state_bytes_are_those_of_the_tensors(recipe: str) -> None:
    net = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Linear(5, 70))
    optimizer = eigengraft.compose(recipe, net)
    tensors = [t for state in optimizer.state.values() for t in state.values()]
    rows = optimizer.routing_table()
    assert optimizer.state_bytes() == sum(row.state_bytes for row in rows) == sum(t.nbytes for t in tensors)
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    assert sum(storages.values()) == optimizer.state_bytes()
    assert [row.name for row in rows] == [name for name, _ in net.named_parameters()]
    for row, p in zip(rows, net.parameters(), strict=True):
        assert row.shape == tuple(p.shape) and sum(math.prod(block) for block in row.blocks) == p.numel()


def test_names_reach_the_groups_and_unnamed_parameters_stay_apart() -> None:
    known = Optimizer([("a", p) for p in parameters([(2, 2)])] + [("b", p) for p in parameters([(2,)])])
    assert known.param_groups[0]["param_names"] == ["a", "b"] and [r.name for r in known.routing_table()] == ["a", "b"]
    params = parameters([(2, 2), (2, 2), (2,), (2,)])
    unnamed = Optimizer([{"params": params[:2]}, {"params": params[2:]}])
    assert len({row.name for row in unnamed.routing_table()}) == 4


def test_repr_of_an_optimizer_shows_recipe_routes_and_state() -> None:
    text = repr(Optimizer(named(parameters([(2, 2)])), "soap_fitted"))
    assert re.search(r"lr\W+0\.003", text) and re.search(r"weight_decay\W+0\.01", text) and "soap_fitted" in text
    assert max(map(len, text.splitlines())) <= 120


def test_a_step_without_any_gradient_warns_once():
    model = nn.Linear(3, 2)
    optimizer = eigengraft.compose("adamw", model)
    with warned(UserWarning, "step", "backward()", "zero_grad()"):
        optimizer.step()
    model.weight.grad = torch.zeros_like(model.weight)  # one gradient is enough
    with warnings.catch_warnings(action="error"):
        optimizer.step()
        optimizer.zero_grad()
        optimizer.step()
        other = eigengraft.compose("adamw", model)
        other.step(lambda: model(torch.ones(3)).sum().backward())
