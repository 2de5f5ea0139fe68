"""Averaging: sequences against definitions, the switch between training and evaluation, checkpoints in both modes.

Tolerances, unless a test says otherwise: 1e-11 of the distance traveled in float64, where a few dozen steps make some
hundred roundings of the iterates' size.
"""

import copy
import io
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict

import eigengraft
from eigengraft import ContractError, Optimizer, RecipeError, Slot, load_recipe
from eigengraft.optimizers.step.step import prepare
from eigengraft.optimizers.write.averaging import Averaging, IterateBatch
from eigengraft.optimizers.write.constraints import ParameterUpdate
from eigengraft.optimizers.write.contrib.averaging import LAWA
from eigengraft.optimizers.write.iterate_store import IterateStore
from eigengraft.optimizers.write.write import Hyper

from ...laws.table import TABLE
from ...recipes import COVER
from ...refusals import refused
from ...trajectories import normal
from ..step.test_kernels import Kernels

pytestmark = pytest.mark.slow  # whole sequences of iterates, recipe by recipe

LR, RATE, STEPS = 0.2, 0.3, 24
ROWS = TABLE["averaging"]
every_row = pytest.mark.parametrize("row", ROWS, ids=str)
every_kind = pytest.mark.parametrize(
    "averaging", [dict(row.make) for row in ROWS if row.faults], ids=lambda m: m["kind"]
)


def recipe(averaging: Any, update: Any = "identity", **more: Any) -> dict[str, Any]:
    return {"update": update, "routes": [], "averaging": averaging, **more}


def start() -> Tensor:
    return normal(4, 3, seed=1)


def slope(y: Tensor, t: int) -> Tensor:
    """A gradient that depends on where it is taken, of an ill-conditioned quadratic with noise."""
    scale = torch.tensor([1.0, 0.3, 2.0], dtype=torch.float64)
    return scale * (y - 1.0) + 0.3 * normal(4, 3, seed=100 + t)


def rate(t: int) -> float:
    """A learning rate that warms up and falls; t from 1."""
    return LR * min(1.0, t / 5) * (1 - t / 60)


def follow(declared: Any, steps: int = STEPS, decay: float = 0.0) -> Iterator[tuple[Tensor, Tensor]]:
    """(training, evaluated) iterate after each step."""
    weight = nn.Parameter(start())
    optimizer = Optimizer([("weight", weight)], declared, lr=LR, weight_decay=decay)
    for t in range(1, steps + 1):
        optimizer.param_groups[0]["lr"] = rate(t)
        weight.grad = slope(weight.detach(), t)
        optimizer.step()
        trained = weight.detach().clone()
        optimizer.eval()
        yield trained, weight.detach().clone()
        optimizer.train()


Share = Callable[[int], float]


def sequences(mu_y: float, share: Share, decay_at: str, decay: float, sign: bool) -> Iterator[tuple[Tensor, Tensor]]:
    """y and x of the three sequences, written out; share(t): weight of the new z in x."""
    x = z = start()
    for t in range(1, STEPS + 1):
        y = mu_y * x + (1 - mu_y) * z
        u = slope(y, t).sign() if sign else slope(y, t)
        z = z - rate(t) * u - rate(t) * decay * (y if decay_at == "y" else z)
        x = (1 - share(t)) * x + share(t) * z
        yield mu_y * x + (1 - mu_y) * z, x


def shampoo_form(mu_y: float, share: Share, decay: float) -> Iterator[tuple[Tensor, Tensor]]:
    """y and x as Distributed Shampoo moves them: decay shrinks z, and y does not see it."""
    y = z = start()
    for t in range(1, STEPS + 1):
        step, mu_x = -rate(t) * slope(y, t), 1 - share(t)
        z = z - rate(t) * decay * z
        gap = z - y
        z = z + step
        y = y + (1 - mu_x * mu_y) * step + (1 - mu_x) * gap
        yield y, y + (1 - 1 / mu_y) * (z - y)


def polynomial(p: float, r: float) -> Share:
    def weight(t: int) -> float:
        return rate(t) ** p * t**r

    return lambda t: weight(t) / sum(weight(i) for i in range(1, t + 1))


def agree(ours: Iterator[tuple[Tensor, Tensor]], theirs: Iterator[tuple[Tensor, Tensor]], tol: float = 1e-11) -> bool:
    pairs = list(zip(ours, theirs, strict=True))
    scale = max(float((b - start()).abs().max()) for _, two in pairs for b in two)
    return all(float((a - b).abs().max()) <= tol * scale for one, two in pairs for a, b in zip(one, two, strict=True))


@pytest.mark.parametrize("stage", ["identity", "sign"])
@pytest.mark.parametrize("decay", [0.0, RATE])
@pytest.mark.parametrize("decay_at", ["z", "y"])
class TestThreeSequences:
    @pytest.mark.parametrize(("p", "r"), [(2.0, 0.0), (0.0, 0.0), (1.0, 2.5)])
    def test_schedule_free(self, p: float, r: float, decay_at: str, decay: float, stage: str) -> None:
        for beta in (0.9, 0.25):
            free = {"kind": "schedule_free", "beta": beta, "lr_power": p, "step_power": r, "decay_at": decay_at}
            theirs = sequences(beta, polynomial(p, r), decay_at, decay, stage == "sign")
            assert agree(follow(recipe(free, stage), decay=decay), theirs)

    def test_primal_averaging(self, decay_at: str, decay: float, stage: str) -> None:
        for mu_x, mu_y in ((0.9, 0.7), (0.0, 0.4), (0.5, 1.0)):
            gpa = {"kind": "primal_averaging", "mu_x": mu_x, "mu_y": mu_y, "decay_at": decay_at}
            theirs = sequences(mu_y, lambda _, mu_x=mu_x: 1 - mu_x, decay_at, decay, stage == "sign")  # type: ignore[misc]
            assert agree(follow(recipe(gpa, stage), decay=decay), theirs)


def looked_ahead(
    ahead: float, beta: float, start_at: int, stop: int, follow_lr: bool
) -> Iterator[tuple[Tensor, Tensor]]:
    """(y, W) of the record stack of track 3: moved before the forward, stepped from there, never moved back."""
    w, drift, shift = start(), torch.zeros_like(start()), 0.0
    for t in range(1, STEPS + 1):
        y = w + shift * drift
        moved = y - rate(t) * (slope(y, t) + RATE * y)
        drift = beta * drift + (1 - beta) * (moved - w)
        w = moved
        shift = (ahead * (rate(t) / LR if follow_lr else 1.0)) if start_at <= t < stop else 0.0
        yield w + shift * drift, w


@pytest.mark.parametrize("follow_lr", [False, True])
def test_a_look_ahead_along_the_mean_of_steps(follow_lr: bool) -> None:
    averaging = {"kind": "ema_nesterov", "beta": 0.8, "ahead": 0.5, "start": 4, "stop": 15, "follow_lr": follow_lr}
    ours = list(follow(recipe(averaging), decay=RATE))
    assert agree(iter(ours), looked_ahead(0.5, 0.8, 4, 15, follow_lr))
    assert [torch.equal(y, w) for y, w in ours] == [not 4 <= t < 15 for t in range(1, STEPS + 1)]


def test_a_tail_average_beside_the_parameter() -> None:
    """From the first averaged iterate E <- E + (W - E) / 5;  evaluated: 0.4 W + 0.6 E."""
    tail = {"kind": "ema", "decay": 0.8, "start": 10, "bias_correction": False, "weight": 0.6}
    mean = torch.zeros_like(start())
    for t, (w, evaluated) in enumerate(follow(recipe(tail)), start=1):
        mean = w if t <= 10 else mean + (w - mean) / 5
        assert torch.allclose(evaluated, w if t < 10 else 0.4 * w + 0.6 * mean, rtol=0, atol=1e-13)


def test_the_form_of_distributed_shampoo() -> None:
    """Its decay moves z only; without decay it is the three sequences."""
    gpa = {"kind": "primal_averaging", "mu_x": 0.9, "mu_y": 0.8, "decay_at": "z_apart"}
    free = {"kind": "schedule_free", "beta": 0.8, "decay_at": "z_apart"}
    for averaging, share in ((gpa, lambda _: 0.1), (free, polynomial(2.0, 0.0))):
        ours = recipe(averaging)
        assert agree(follow(ours, decay=RATE), shampoo_form(0.8, share, RATE))
        assert not agree(follow(ours, decay=RATE), sequences(0.8, share, "z", RATE, False), 1e-3)
        assert agree(follow(ours), sequences(0.8, share, "z", 0.0, False))


@pytest.mark.parametrize("decay_at", ["z", "y"])
def test_decay_goes_through_the_stages_after_it(decay_at: str) -> None:
    """Momentum after decay:  m <- 0.9 m + u + alpha z (or y);  z <- z - lr m."""

    def theirs() -> Iterator[tuple[Tensor, Tensor]]:
        x = z = start()
        m = torch.zeros_like(z)
        for t in range(1, STEPS + 1):
            y = 0.7 * x + 0.3 * z
            m = 0.9 * m + slope(y, t) + RATE * (z if decay_at == "z" else y)
            z = z - 0.1 * rate(t) * m
            x = 0.8 * x + 0.2 * z
            yield 0.7 * x + 0.3 * z, x

    gpa = {"kind": "primal_averaging", "mu_x": 0.8, "mu_y": 0.7, "decay_at": decay_at}
    after = [{"kind": "heavy_ball", "beta": 0.9}, {"kind": "scale", "factor": 0.1}]
    assert agree(follow(recipe(gpa, after_decay=after), decay=RATE), theirs())


# identities


def base_path(declared: Any, decay: float = 0.0) -> list[Tensor]:
    return [trained for trained, _ in follow({**declared, "averaging": None}, decay=decay)]


DECAYS = ("decoupled", "l2", "corrected", "independent", "cautious", "after")
SOME = ("adamw", "reference/soap", "reference/distributed_shampoo")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "decay"), [*((name, "decoupled") for name in COVER), *((n, d) for n in SOME for d in DECAYS[1:])]
)
def test_without_memory_primal_averaging_is_the_base_method(name: str, decay: str) -> None:
    """mu_x = 0 makes x = y = z: whatever the recipe, its blocks, its decay and its stages after decay."""
    rule = {"kind": "decoupled", "placed": "after"} if decay == "after" else {"kind": decay}
    declared = load_recipe(name).model_dump(mode="json")
    declared |= {"weight_decay": {**rule, "rate": 0.1}, "averaging": None, "blocking": {"size": 2}}
    gpa = {"kind": "primal_averaging", "mu_x": 0.0, "mu_y": 0.6}
    paths = []
    for averaging in (None, gpa):
        weight = nn.Parameter(normal(4, 6, seed=1))
        optimizer = Optimizer([("weight", weight)], {**declared, "averaging": averaging}, lr=0.01)
        for t in range(6):
            weight.grad = normal(4, 6, seed=50 + t)
            optimizer.step()
        optimizer.eval()
        paths.append(weight.detach())
    # roots of nearly singular statistics magnify roundings; the iterates themselves agree to 1e-15
    torch.testing.assert_close(*paths, rtol=1e-9, atol=1e-9)


def test_averaging_in_full_is_heavy_ball_momentum() -> None:
    """mu_y = 1 over gradient descent: momentum mu_x, learning rate lr (1 - mu_x)  (arXiv:2512.17131)."""
    ours, theirs = nn.Parameter(start()), nn.Parameter(start())
    optimizer = Optimizer([ours], recipe({"kind": "primal_averaging", "mu_x": 0.9, "mu_y": 1.0}), lr=LR)
    sgd = torch.optim.SGD([theirs], lr=LR * (1 - 0.9), momentum=0.9)
    for t in range(STEPS):
        ours.grad, theirs.grad = slope(ours.detach(), t), slope(theirs.detach(), t)
        optimizer.step()
        sgd.step()
        torch.testing.assert_close(ours.detach(), theirs.detach(), rtol=1e-12, atol=1e-12)


def test_schedule_free_with_beta_one_trains_what_it_evaluates() -> None:
    for trained, evaluated in follow(recipe({"kind": "schedule_free", "beta": 1.0})):
        assert torch.equal(trained, evaluated)


@pytest.mark.parametrize(
    "averaging",
    [
        {"kind": "ema", "decay": 0.0},
        {"kind": "lawa", "window": 1},
        {"kind": "primal_averaging", "mu_x": 0.0, "mu_y": 1.0},
    ],
    ids=str,
)
def test_averages_of_one_iterate_are_that_iterate(averaging: Any) -> None:
    for trained, evaluated in follow(recipe(averaging)):
        assert torch.equal(trained, evaluated)


@pytest.mark.parametrize(("every", "first"), [(1, None), (3, None), (2, 5)])
def test_means_are_their_definitions(every: int, first: int | None) -> None:
    path = base_path(recipe(None))
    expected: dict[str, list[Tensor]] = {"corrected": [], "plain": [], "window": []}
    for t in range(1, STEPS + 1):
        seen = [path[i - 1] for i in range(first or every, t + 1, every)] or [path[t - 1]]
        weights = [0.7**k for k in range(len(seen))]
        newest_first = zip(weights, reversed(seen), strict=True)
        expected["corrected"].append(sum((w * x for w, x in newest_first), torch.zeros(4, 3)) / sum(weights))
        mean = seen[0]
        for x in seen[1:]:
            mean = 0.7 * mean + 0.3 * x
        expected["plain"].append(mean)
        expected["window"].append(torch.stack(seen[-4:]).mean(0))
    for name, fields in (
        ("corrected", {"kind": "ema", "decay": 0.7}),
        ("plain", {"kind": "ema", "decay": 0.7, "bias_correction": False}),
        ("window", {"kind": "lawa", "window": 4}),
    ):
        found = [evaluated for _, evaluated in follow(recipe({**fields, "every": every, "start": first}))]
        torch.testing.assert_close(torch.stack(found), torch.stack(expected[name]), rtol=1e-13, atol=1e-13)


def test_a_queue_has_the_mean_of_each_of_its_parts() -> None:
    """Shards of a parameter have the bits of the whole one, however `mean` would add up numbers of their shape."""
    queue, averaging = normal(7, 13, 10, seed=3, dtype=torch.float32), LAWA(window=7)

    def mean(rows: slice) -> Tensor:
        part = queue[:, rows].clone()
        return averaging.evaluated(IterateBatch([part[0]], {"queue": [part]}, np.array([7])))[0]

    expected = mean(slice(None))
    for rows in (slice(0, 1), slice(1, 4), slice(4, 13), slice(5, 5)):
        assert torch.equal(mean(rows), expected[rows])


def test_iterates_are_numbers_or_have_the_axes_of_their_parameter_last() -> None:
    """Also where the wrong shape is by chance that of the parameter: a checkpoint of shards would not know it."""

    class Slotted(Averaging):
        """Keeps one slot of any shape."""

        kind: Literal["slotted_for_test"] = "slotted_for_test"
        rule: Literal["number", "queue", "fixed", "rows", "after"]

        def slots(self, shape: tuple[int, ...], low_precision: bool) -> Mapping[str, Slot]:
            shapes = {"number": (), "queue": (4, 3, *shape), "fixed": (4, 3), "rows": shape[:1], "after": (*shape, 3)}
            return {"own": Slot(shapes[self.rule])}

        def step(self, batch: IterateBatch, write: ParameterUpdate) -> None:
            write(batch.parameters)

        def evaluated(self, batch: IterateBatch) -> Sequence[Tensor]:
            return batch.parameters

    try:
        for rule in ("number", "queue"):
            Optimizer([nn.Parameter(start())], recipe(Slotted(rule=rule)))
        for rule in ("fixed", "rows", "after"):
            with refused(ContractError, "averaging", "own", "(4, 3)"):
                Optimizer([nn.Parameter(start())], recipe(Slotted(rule=rule)))
    finally:
        del Averaging.members["slotted_for_test"]


def test_a_gradient_that_only_primes_is_no_iterate() -> None:
    """As the first one of published SOAP: the averages begin with the first update."""
    primed = load_recipe("reference/soap").model_dump(mode="json")
    _, *path = base_path(primed)
    for fields, weights in (
        ({"kind": "ema", "decay": 0.7}, [0.7**k for k in range(STEPS)]),
        ({"kind": "lawa", "window": 4}, [1.0] * 4),
    ):
        _, *found = [evaluated for _, evaluated in follow({**primed, "averaging": fields})]
        for t, evaluated in enumerate(found, start=1):
            used = list(zip(weights, reversed(path[:t]), strict=False))
            expected = sum((w * x for w, x in used), torch.zeros(4, 3)) / sum(w for w, _ in used)
            torch.testing.assert_close(evaluated, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", ["ema", "lawa"])
@pytest.mark.parametrize("name", ["adamw", "soap_fitted", "reference/soap"])
def test_means_never_feed_back(kind: str, name: str) -> None:
    declared = load_recipe(name).model_dump(mode="json")
    averaged = [trained for trained, _ in follow({**declared, "averaging": kind}, decay=RATE)]
    path = base_path(declared, RATE)
    if name == "adamw":  # without averaging a fused kernel, which rounds in another order
        torch.testing.assert_close(averaged, path, rtol=1e-12, atol=1e-12)
    else:
        assert all(torch.equal(a, b) for a, b in zip(averaged, path, strict=True))


# the switch


SHAPES = ((6, 4), (4, 4), (5,), (), (0,), (3, 2, 2))


def parameters(dtype: torch.dtype = torch.float32, shapes: Sequence[tuple[int, ...]] = SHAPES) -> list[Tensor]:
    return [nn.Parameter(normal(*shape, seed=i, dtype=dtype)) for i, shape in enumerate(shapes)]


def drive(optimizer: Optimizer, params: Sequence[Tensor], steps: range) -> None:
    for step in steps:
        for i, p in enumerate(params):
            p.grad = normal(*p.shape, seed=1000 * step + i, dtype=p.dtype)
        optimizer.step()
        optimizer.zero_grad()


def values(params: Sequence[Tensor]) -> list[Tensor]:
    return [p.detach().clone() for p in params]


def everything(optimizer: Optimizer) -> list[Tensor]:
    """Parameters and state, in order."""
    optimizer.state_dict()  # settles what a device still has to say
    params = [p for group in optimizer.param_groups for p in group["params"]]
    return [t.detach().clone() for p in params for t in (p, *(v for _, v in sorted(optimizer.state[p].items())))]


def equal(one: Sequence[Tensor], two: Sequence[Tensor]) -> bool:
    return len(one) == len(two) and all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@every_row
def test_evaluation_and_back_is_bit_exact_and_idempotent(row: Any, dtype: torch.dtype) -> None:
    params, twins = parameters(dtype), parameters(dtype)
    optimizer, twin = (
        Optimizer(params, recipe(row.make, "rms"), lr=0.1),
        Optimizer(twins, recipe(row.make, "rms"), lr=0.1),
    )
    for t in range(6):
        drive(optimizer, params, range(t, t + 1))
        drive(twin, twins, range(t, t + 1))
        before = everything(optimizer)
        optimizer.train()
        optimizer.eval()
        seen = values(params)
        optimizer.eval()
        assert equal(values(params), seen)
        optimizer.train()
        optimizer.train()
        assert equal(everything(optimizer), before)
    assert equal(everything(twin), before) and not equal(seen, values(params))


def test_a_step_from_evaluated_parameters_is_refused() -> None:
    params = parameters()
    optimizer = Optimizer(params, recipe("ema"))
    drive(optimizer, params, range(2))
    optimizer.eval()
    before, called = everything(optimizer), []
    with refused(RuntimeError, "optimizer.train"):
        optimizer.step(lambda: called.append(1))
    assert not called and equal(everything(optimizer), before)
    optimizer.train()
    drive(optimizer, params, range(2, 3))


def test_without_averaging_the_switch_does_nothing() -> None:
    params = parameters()
    optimizer = Optimizer(params, "adamw")
    drive(optimizer, params, range(2))
    before = everything(optimizer)
    optimizer.eval()
    assert equal(everything(optimizer), before) and optimizer.iterate == "train"
    drive(optimizer, params, range(2, 3))
    assert "averaging" not in repr(optimizer)


def test_reports_name_the_averaging_and_the_mode() -> None:
    optimizer = Optimizer(parameters(), recipe("lawa"))
    assert "averaging: lawa, the parameters hold the iterate to train" in repr(optimizer)
    optimizer.eval()
    assert "averaging: lawa, the parameters hold the iterate to eval" in repr(optimizer)
    assert [group["iterate"] for group in optimizer.state_dict()["param_groups"]] == ["eval"]


@every_row
def test_parameters_without_an_update_stay(row: Any) -> None:
    params = parameters()
    optimizer = Optimizer(params, recipe(row.make), lr=0.1)
    for p in params:
        p.data.mul_(2.0)  # weights that were loaded after construction
    before = everything(optimizer)
    optimizer.eval()
    assert equal(values(params), [2.0 * p.detach() for p in parameters()])
    optimizer.train()
    drive(optimizer, params[1:], range(5))
    optimizer.eval()
    assert torch.equal(params[0].detach(), before[0])
    optimizer.train()
    assert equal(
        everything(optimizer)[: 1 + len(optimizer.state[params[0]])], before[: 1 + len(optimizer.state[params[0]])]
    )


@every_kind
def test_weights_loaded_after_construction_count(averaging: Any) -> None:
    """Iterates begin where the first update finds the parameter, also where a first gradient only primes."""
    for name in ("adamw", "reference/soap"):
        declared = {**load_recipe(name).model_dump(mode="json"), "averaging": averaging}
        late, early = nn.Parameter(torch.zeros(4, 3)), nn.Parameter(start().float())
        one = Optimizer([late], declared)
        late.data.copy_(early.data)
        two = Optimizer([early], declared)
        drive(one, [late], range(5))
        drive(two, [early], range(5))
        assert equal(everything(one), everything(two))


def test_groups_frozen_parameters_and_new_groups() -> None:
    params = parameters()
    params[1].requires_grad_(False)
    declared = recipe({"kind": "primal_averaging", "mu_x": 0.9}, "rms")
    optimizer = Optimizer([{"params": params[:3], "lr": 0.1}, {"params": params[3:], "lr": 0.01}], declared)
    drive(optimizer, [p for p in params if p.requires_grad], range(3))
    trained = values(params)
    optimizer.eval()
    assert params[1] not in optimizer.state and torch.equal(params[1], trained[1])
    later = nn.Parameter(torch.ones(3))
    optimizer.add_param_group({"params": [later]})
    assert [group["iterate"] for group in optimizer.param_groups] == ["eval"] * 3
    saved = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(saved)
    optimizer.train()
    assert equal(values(params), trained) and torch.equal(later, torch.ones(3))
    params[1].requires_grad_(True)
    drive(optimizer, [*params, later], range(3, 6))  # thaws
    thawed, frozen = optimizer.state[params[1]], optimizer.state[params[0]]
    assert int(thawed["step"]) == 3 and int(frozen["step"]) == 6 and thawed.keys() == frozen.keys()


def test_a_group_that_says_eval_is_still_trained() -> None:
    weight = nn.Parameter(torch.ones(2))
    group = {**Optimizer([nn.Parameter(torch.ones(2))], recipe("ema")).param_groups[0], "params": [weight]}
    optimizer = Optimizer([{**group, "iterate": "eval"}], recipe("ema"))
    assert optimizer.iterate == "train"


@every_row
def test_state_bytes_count_the_iterates(row: Any) -> None:
    size = lambda fields: Optimizer(parameters(torch.bfloat16, [(6, 4)]), recipe(fields)).state_bytes()  # noqa: E731
    full, scalars = {
        "ema": (4 if "inner" in row.make else 1, 0),  # three of the look-ahead below
        "lawa": (row.make.get("window"), 0),
        "schedule_free": (2, 8),
        "ema_nesterov": (3, 0),
        "anchored": (4 if "inner" in row.make.get("inner", ()) else 2, 0),
    }.get(row.kind, (2, 0))
    assert size(row.make) - size(None) == full * 24 * 4 + scalars
    if row.kind in ("schedule_free", "primal_averaging"):  # a float32 parameter is its own y
        optimizer = Optimizer(parameters(torch.float32, [(6, 4)]), recipe(row.make))
        assert optimizer.state_bytes() - size(None) == 24 * 4 + scalars
        assert optimizer.routing_table()[0].state_bytes == optimizer.state_bytes()


# precision, masks, devices


@every_row
def test_iterates_of_bfloat16_parameters_are_float32(row: Any) -> None:
    """Gradients given, the iterates are those of a float32 twin, bit for bit, and the parameter is theirs, rounded."""
    coarse, fine = nn.Parameter(start().bfloat16()), nn.Parameter(start().bfloat16().float())
    declared = recipe(row.make, ["momentum", "rms"])
    one, two = Optimizer([coarse], declared, lr=1e-4), Optimizer([fine], declared, lr=1e-4)
    for t in range(12):  # updates are below the resolution of bfloat16
        if row.kind in ("ema", "lawa"):
            fine.data.copy_(coarse.data)
        coarse.grad = normal(4, 3, seed=t).bfloat16()
        fine.grad = coarse.grad.float()
        one.step()
        two.step()
    if row.kind in ("ema", "lawa"):
        fine.data.copy_(coarse.data)
        pairs = [(value, one.state[coarse][key]) for key, value in two.state[fine].items() if "averaging" in key]
        # means of a parameter that was rounded once more on the way
        assert all(torch.allclose(a, b, rtol=2**-8, atol=2**-8) and b.dtype == torch.float32 for a, b in pairs)
    else:
        if "averaging/z" in two.state[fine]:
            assert torch.equal(one.state[coarse]["averaging/z"], two.state[fine]["averaging/z"])
        assert torch.equal(one.state[coarse]["averaging/y"], fine.detach())
        assert torch.equal(coarse.detach(), fine.detach().bfloat16())
    one.eval()
    two.eval()
    if row.kind not in ("ema", "lawa"):
        assert torch.equal(coarse.detach(), fine.detach().bfloat16())


@pytest.mark.parametrize(("name", "placed"), [("adamw", "before"), ("reference/soap", "after")])
@every_row
def test_a_bad_gradient_is_as_if_there_were_none(row: Any, name: str, placed: str) -> None:
    """Looked at on the host or on the device; bad at the very first gradient too."""
    declared = load_recipe(name).model_dump(mode="json") | {"averaging": dict(row.make)}
    declared["weight_decay"] = {"kind": "decoupled", "rate": 0.1, "placed": placed}
    found = []
    for detect, missing in (("host", True), ("host", False), ("device", False)):
        params = parameters(torch.float64, [(4, 3), (4, 3), (5,)])
        optimizer = Optimizer(params, {**declared, "failure": {"detect": detect}}, lr=0.01)
        for t in range(8):
            for i, p in enumerate(params):
                p.grad = normal(*p.shape, seed=100 * t + i)
            if t in (0, 3, 7):  # the last one is not known yet when the evaluation asks
                params[1].grad = None if missing else torch.full_like(params[1], torch.nan)
            optimizer.step()
        optimizer.eval()
        found.append(everything(optimizer))
        assert all(bool(tensor.isfinite().all()) for tensor in found[-1])
    for other in found[1:]:
        for a, b in zip(found[0], other, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("detect", ["host", "device"])
@every_row
def test_a_learning_rate_on_the_device_is_never_read(row: Any, detect: str) -> None:
    """As a tensor it gives the numbers of the float; on a device it stays a tensor until the end."""
    found = []
    for lr in (0.05, torch.tensor(0.05, dtype=torch.float64)):
        params = parameters(torch.float64, [(4, 3), (4, 3), (5,)])
        declared = recipe(row.make, "rms", failure={"detect": detect}, constraints="hyperball")
        (param_set,) = Optimizer(params, declared).param_sets
        for t in range(5):
            for i, p in enumerate(params):
                p.grad = normal(*p.shape, seed=100 * t + i) if (t + i) % 4 else None
            ((_, now),) = prepare([param_set], [Hyper(lr, 0.05, 0.1)])
            assert now is not None
            with torch.no_grad():
                param_set.step(now)
            param_set.resolve_deferred()
        found.append(
            [t.detach().clone() for p, s in zip(params, param_set.views(), strict=True) for t in (p, *s.values())]
        )
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@every_kind
def test_dtypes_mix_in_one_group(averaging: Any) -> None:
    dtypes = (torch.float32, torch.bfloat16, torch.float64, torch.float16)
    together = [nn.Parameter(normal(4, 3, seed=1, dtype=dtype)) for dtype in dtypes]
    alone = [nn.Parameter(p.detach().clone()) for p in together]
    declared = recipe(averaging, "rms", constraints="hyperball")
    optimizer, others = Optimizer(together, declared, lr=0.1), [Optimizer([p], declared, lr=0.1) for p in alone]
    for t in range(4):
        for p in (*together, *alone):
            p.grad = normal(4, 3, seed=t, dtype=p.dtype)
        for each in (optimizer, *others):
            each.step()
    assert equal(everything(optimizer), [tensor for other in others for tensor in everything(other)])


@every_row
def test_a_zero_update_moves_no_iterate(row: Any) -> None:
    params = parameters()
    optimizer = Optimizer(params, recipe(row.make), lr=0.1)
    for _ in range(4):
        for p in params:
            p.grad = torch.zeros_like(p)
        optimizer.step()
    if row.kind == "anchored":  # whose parameter is beyond a mean, which rounds
        assert all(torch.allclose(p, q, rtol=1e-6, atol=0) for p, q in zip(params, parameters(), strict=True))
    else:
        assert equal(values(params), values(parameters()))
    optimizer.eval()
    # EMA: mean / (1 - decay^k) rounds; LAWA: so does a mean of equal numbers
    assert all(torch.allclose(p, q, rtol=1e-6, atol=0) for p, q in zip(params, parameters(), strict=True))


@every_row
def test_kernels_do_not_grow_with_the_number_of_parameters(row: Any) -> None:
    """Where gradients are looked at on the host; a mask on the device takes a few kernels for each parameter."""
    counts = []
    for size in (4, 64):
        params = parameters(torch.float32, [(4, 3)] * size)
        optimizer = Optimizer(params, recipe(row.make, "rms", weight_decay={"rate": 0.1, "kind": "decoupled"}))
        drive(optimizer, params, range(5))
        for p in params:
            p.grad = torch.ones_like(p)
        with Kernels() as mode:
            optimizer.step()
        counts.append(mode.counts)
    assert counts[1].total() == counts[0].total(), counts[1] - counts[0]


def test_weights_of_zero_leave_the_average_where_it_is() -> None:
    weight = nn.Parameter(start())
    optimizer = Optimizer([weight], recipe("schedule_free"), lr=0.1)
    for lr in (0.0, 0.0, 0.1):
        optimizer.param_groups[0]["lr"] = lr
        weight.grad = normal(4, 3, seed=3)
        optimizer.step()
        if lr == 0:
            assert torch.equal(weight, start())
    torch.testing.assert_close(weight.detach(), start() - 0.1 * normal(4, 3, seed=3))  # c = 1: x = y = z


# checkpoints


def through_a_file(data: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(data, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def resumed_like(optimizer: Optimizer, params: Sequence[Tensor], declared: Any) -> tuple[Optimizer, list[Tensor]]:
    """What a new process makes of the saved weights and state."""
    weights, state = through_a_file([values(params), optimizer.state_dict()])
    again = [nn.Parameter(w) for w in weights]
    other = Optimizer(again, declared, lr=0.7)
    other.load_state_dict(state)
    return other, again


@pytest.mark.parametrize(("mode", "dtype"), [("train", torch.float32), ("eval", torch.bfloat16)], ids=str)
@every_row
def test_resume_from_either_mode_is_exact(row: Any, dtype: torch.dtype, mode: str) -> None:
    declared = recipe(row.make, ["momentum", "rms"], weight_decay={"kind": "decoupled", "rate": 0.1})
    params = parameters(dtype)
    optimizer = Optimizer(params, declared, lr=0.1)
    drive(optimizer, params, range(5))
    getattr(optimizer, mode)()
    assert ("averaging/train" in optimizer.state[params[0]]) == (mode == "eval")
    resumed, again = resumed_like(optimizer, params, declared)
    copied_params, copied = copy.deepcopy((params, optimizer))
    pickled_params, pickled = pickle.loads(pickle.dumps((params, optimizer)))
    runs = [(optimizer, params), (resumed, again), (copied, copied_params), (pickled, pickled_params)]
    for other, _ in runs:
        assert other.iterate == mode and equal(everything(other), everything(optimizer))
    for other, held in runs:
        other.train()
        drive(other, held, range(5, 10))
        other.eval()
    for other, _ in runs[1:]:
        assert equal(everything(other), everything(optimizer))


@pytest.mark.parametrize("saved", ["train", "eval"])
@pytest.mark.parametrize("here", ["train", "eval"])
def test_loading_sets_the_mode(here: str, saved: str) -> None:
    declared = recipe({"kind": "primal_averaging", "mu_x": 0.8}, "rms")
    params, others = parameters(), parameters()
    one, two = Optimizer(params, declared, lr=0.1), Optimizer(others, declared, lr=0.1)
    drive(one, params, range(3))
    drive(two, others, range(7))
    getattr(one, saved)()
    getattr(two, here)()
    two.load_state_dict(through_a_file(one.state_dict()))
    for p, q in zip(others, params, strict=True):
        p.data.copy_(q.data)
    assert two.iterate == saved and equal(everything(two), everything(one))
    for optimizer, held in ((one, params), (two, others)):
        optimizer.train()
        drive(optimizer, held, range(3, 6))
    assert equal(everything(two), everything(one))


def edited(change: Callable[[dict[str, Any]], Any], mode: str) -> dict[str, Any]:
    params = parameters()
    optimizer = Optimizer([{"params": params[:2]}, {"params": params[2:]}], recipe("ema"))
    drive(optimizer, params, range(2))
    getattr(optimizer, mode)()
    saved = copy.deepcopy(optimizer.state_dict())
    change(saved)
    return saved


WRONG: dict[str, tuple[Callable[[dict[str, Any]], Any], str, tuple[object, ...]]] = {
    "word": (lambda s: s["param_groups"][0].update(iterate="test"), "train", (0, "iterate", "test")),
    "disagreement": (lambda s: s["param_groups"][1].update(iterate="train"), "eval", (1,)),
    "no training iterate": (lambda s: s["state"][0].pop("averaging/train"), "eval", ("averaging/train",)),
    "one too many": (
        lambda s: [g.update(iterate="train") for g in s["param_groups"]],
        "eval",
        ("averaging/train",),
    ),
    "no mean": (lambda s: s["state"][0].pop("averaging/mean"), "train", ("averaging/mean",)),
}


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_state_dict_is_refused_and_changes_nothing(case: str, mode: str) -> None:
    change, saved_in, says = WRONG[case]
    params = parameters()
    optimizer = Optimizer([{"params": params[:2]}, {"params": params[2:]}], recipe("ema"))
    drive(optimizer, params, range(3))
    getattr(optimizer, mode)()
    before = everything(optimizer)
    with refused(ValueError, *says):
        optimizer.load_state_dict(edited(change, saved_in))
    assert equal(everything(optimizer), before) and optimizer.iterate == mode


def test_another_averaging_is_named() -> None:
    one = Optimizer(parameters(), recipe({"kind": "ema", "decay": 0.9}))
    for other, says in (
        (None, ("averaging.kind",)),
        ({"kind": "ema", "decay": 0.8}, ("averaging.decay", 0.9, 0.8)),
    ):
        with refused(ValueError, *says):
            Optimizer(parameters(), recipe(other)).load_state_dict(one.state_dict())


def test_checkpoints_from_before_there_was_a_mode_load() -> None:
    params, others = parameters(), parameters()
    one, two = Optimizer(params, "adamw"), Optimizer(others, "adamw")
    drive(one, params, range(2))
    saved = copy.deepcopy(one.state_dict())
    del saved["param_groups"][0]["iterate"]
    two.load_state_dict(saved)
    assert two.iterate == "train"
    saved["param_groups"][0]["iterate"] = "eval"
    with refused(ValueError, "train", "averaging"):
        two.load_state_dict(saved)


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("flat", [False, True])
@every_kind
def test_the_state_dict_api_round_trips(averaging: Any, flat: bool, mode: str) -> None:
    """torch.distributed.checkpoint, in one process; it fills the keys it finds, so the target is in the saved mode."""
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    runs = []
    for seed in (1, 2):
        net = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6))
        optimizer = eigengraft.compose(recipe(averaging, "rms"), net, lr=0.1)
        drive(optimizer, list(net.parameters()), range(seed, seed + 4))
        getattr(optimizer, mode)()
        runs.append((net, optimizer))
    (net, optimizer), (other, resumed) = runs
    saved = copy.deepcopy(get_optimizer_state_dict(net, optimizer, options=options))
    other.load_state_dict(net.state_dict())
    set_optimizer_state_dict(other, resumed, saved, options=options)
    assert resumed.iterate == mode
    for held, one in runs:
        one.train()
        drive(one, list(held.parameters()), range(5, 8))
    assert equal(everything(optimizer), everything(resumed))


def test_wrong_declarations_name_the_field() -> None:
    for averaging, says in (
        ("swa", ("averaging", "swa")),
        ({"kind": "ema", "deacy": 0.9}, ("averaging.deacy", "decay")),
        ({"kind": "primal_averaging", "mu_y": 0.0}, ("averaging.mu_y", 0)),
        (3, ("averaging",)),
    ):
        with refused(RecipeError, *says):
            load_recipe(recipe(averaging))
    assert load_recipe("gpa_adamw", ["averaging.mu_x=0.5"]).averaging.mu_x == 0.5  # type: ignore[union-attr]


# composition


@pytest.mark.slow
@every_kind
@pytest.mark.parametrize("name", COVER)
def test_every_recipe_takes_every_averaging(name: str, averaging: dict[str, Any]) -> None:
    """Four steps, evaluation and back, and a resume from evaluation that goes on as the run that never stopped."""
    declared = {**load_recipe(name).model_dump(mode="json"), "averaging": averaging}
    net = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 3))
    optimizer = eigengraft.compose(declared, net)
    params = list(net.parameters())
    before = values(params)
    drive(optimizer, params, range(4))  # no window of a mean is longer
    trained = values(params)
    assert not any(torch.equal(a, b) for a, b in zip(trained, before, strict=True))
    optimizer.eval()
    assert all(bool(p.isfinite().all()) for p in params) and not equal(values(params), trained)
    twin = copy.deepcopy(net)
    resumed = eigengraft.compose(declared, twin)
    resumed.load_state_dict(through_a_file(optimizer.state_dict()))
    optimizer.train()
    assert equal(values(params), trained)
    resumed.train()
    drive(optimizer, params, range(4, 6))
    drive(resumed, list(twin.parameters()), range(4, 6))
    assert equal(everything(optimizer), everything(resumed))


@pytest.mark.slow
def test_a_run_evaluates_the_average_and_saves_the_training_iterate(tmp_path: Path) -> None:
    from eigengraft.experiments import load_experiment, train
    from eigengraft.experiments.training.rundir import RunDirectory
    from eigengraft.experiments.training.train import Trainer

    declared = {
        "task": {"kind": "digits", "width": 16, "batch_size": 32},
        "recipe": {"update": ["momentum", "rms"], "averaging": {"kind": "ema", "decay": 0.9}},
        "lr": 0.01,
        "steps": 10,
        "log_every": 5,
        "eval_every": 5,
        "checkpoint_every": 4,
    }
    experiment = load_experiment(declared)
    result = train(experiment, tmp_path / "run")
    trainer = Trainer(experiment, RunDirectory(tmp_path / "run"))
    size = trainer.optimizer.state_bytes()
    saved = torch.load(tmp_path / "run" / "checkpoint-10" / "run.pt", weights_only=True)
    assert {group["iterate"] for group in saved["optimizer"]["param_groups"]} == {"train"}
    trainer.model.load_state_dict(saved["model"])
    trainer.optimizer.load_state_dict(saved["optimizer"])
    task, device = experiment.task, torch.device("cpu")
    plain = task.evaluate(trainer.model, trainer.dataset, device)
    trainer.optimizer.eval()
    averaged = task.evaluate(trainer.model, trainer.dataset, device)
    assert (result.val_loss, result.state_bytes) == (averaged.val_loss, size) and plain.val_loss != averaged.val_loss

    def stop(tick: Any) -> None:
        if tick.step == 7:
            raise KeyboardInterrupt

    # interrupted after an evaluation it goes on as the whole run, and its model is left with the average
    (tmp_path / "other").mkdir()
    with pytest.raises(KeyboardInterrupt):
        Trainer(experiment, RunDirectory(tmp_path / "other")).run(stop)
    again = Trainer(experiment, RunDirectory(tmp_path / "other"))
    assert again.run(None).val_loss == result.val_loss
    for p, q in zip(again.model.parameters(), trainer.model.parameters(), strict=True):
        assert torch.equal(p, q)


def test_a_step_collects_the_decaying_iterates_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many stacks it has, so that the host's work is not quadratic in the number of parameters."""
    calls, known = list[int](), IterateStore.decaying
    monkeypatch.setattr(IterateStore, "decaying", lambda self: calls.append(1) or known(self))
    held = [nn.Parameter(normal(4 + i, 4, seed=i)) for i in range(5)]
    recipe = {"update": ["momentum"], "after_decay": ["clip_norm"], "averaging": "schedule_free", "routes": []}
    optimizer = Optimizer([(f"w{i}", p) for i, p in enumerate(held)], recipe, weight_decay=0.1)
    for _ in range(2):
        for p in held:
            p.grad = torch.ones_like(p)
        optimizer.step()
    assert len(optimizer.stack_states()) == 5 and len(calls) == 2
