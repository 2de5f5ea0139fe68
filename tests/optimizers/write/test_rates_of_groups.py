"""Param groups that differ in learning rate and weight decay: the same numbers as apart, in the stacks of one group."""

import copy
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from eigengraft import Optimizer
from eigengraft.optimizers.step.execution import Chunks, Fused
from eigengraft.testing import accelerator

from ...trajectories import named, normal

SHAPES = ((6, 4), (6, 4), (5,), (5,))
"""Of one group. There are two of each, because a product of one matrix may be rounded otherwise than one of several."""
PER_GROUP = len(SHAPES)
L2 = {"kind": "l2", "rate": 0.1}
CHAIN = ["momentum", "rms"]


def parameters(groups: int, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    """Of all groups, one after the other."""
    return [nn.Parameter(normal(*shape, seed=i, dtype=dtype)) for i, shape in enumerate(SHAPES * groups)]


def declared(params: Sequence[Tensor], rates: Sequence[tuple[float, float]]) -> list[dict[str, Any]]:
    """Param groups with their (learning rate, weight decay)."""
    return [
        {"params": named(params[at : at + PER_GROUP], at), "lr": lr, "weight_decay": decay}
        for at, (lr, decay) in zip(range(0, len(params), PER_GROUP), rates, strict=True)
    ]


def apart(groups: Sequence[dict[str, Any]], recipe: Any) -> Optimizer:
    """The same optimizer with stacks for each group: a group that is added later gets its own."""
    optimizer = Optimizer(groups[:1], recipe)
    for group in groups[1:]:
        optimizer.add_param_group(group)
    return optimizer


def everything(optimizer: Optimizer) -> list[Tensor]:
    """Parameters and state, in a fixed order."""
    held = [p for group in optimizer.param_groups for p in group["params"]]
    return [x.detach().clone() for p in held for x in (p, *(optimizer.state[p][k] for k in sorted(optimizer.state[p])))]


def same(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> bool:
    return len(ours) == len(theirs) and all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def step(optimizer: Optimizer, t: int, without: Sequence[int] = ()) -> None:
    """One step along given gradients; parameters at the positions `without` have none."""
    held = [p for group in optimizer.param_groups for p in group["params"]]
    for i, p in enumerate(held):
        p.grad = None if i in without else normal(*p.shape, seed=1000 * t + i, dtype=p.dtype)
    optimizer.step()


RATES = [(0.02, 0.0), (0.01, 0.1), (0.01, 0.1), (0.005, 0.3)]
RECIPES: dict[str, Any] = {
    **{
        name: name
        for name in ("adamw", "soap_fitted", "muon", "shampoo", "lion", "schedule_free_adamw", "splus", "prodigy")
    },
    "l2": {"update": CHAIN, "weight_decay": L2},
    "cautious": {"base": "adamw", "weight_decay": "cautious"},
    "decay after": {"base": "adamw", "weight_decay": {"kind": "decoupled", "placed": "after"}},
    "corrected, averaged": {"base": "soap_fitted", "weight_decay": "corrected", "averaging": "ema"},
    "constrained": {"base": "muon", "constraints": "hyperball"},
}


BOTH = ("adamw", "soap_fitted", "muon", "shampoo", "lion", "schedule_free_adamw")
CASES = [*((recipe, torch.float32) for recipe in RECIPES), *((recipe, torch.float64) for recipe in BOTH)]


@pytest.mark.parametrize(("recipe", "dtype"), CASES, ids=str)
def test_groups_in_one_stack_take_the_steps_of_groups_apart(recipe: str, dtype: torch.dtype) -> None:
    """Bit for bit: with schedules, a group that changes alone, becomes equal to others and differs again, and steps
    without some gradients."""
    runs = [make(declared(parameters(4, dtype), RATES), RECIPES[recipe]) for make in (Optimizer, apart)]
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(one, [lambda t: 1.0, lambda t: 0.9**t, lambda t: 1 / (1 + t), lambda t: 1.0])
        for one in runs
    ]
    for t in range(6):
        for one, schedule in zip(runs, schedules, strict=True):
            if t in (2, 4):
                one.param_groups[0].update({"lr": 0.005, "weight_decay": 0.3} if t == 2 else {"lr": 0.0})
            step(one, t, without=[1, 2, 9] if t == 3 else [])
            schedule.step()
    stacks = [len(one.stack_states()) for one in runs]
    asks = recipe == "prodigy"  # its stage is told one learning rate
    assert stacks[1] == 4 * (stacks[0] // 4 if asks else stacks[0])
    assert same(everything(runs[0]), everything(runs[1]))


@pytest.mark.parametrize("decay", ["decoupled", "l2"])
@pytest.mark.parametrize("fused", [True, False])
def test_large_parameters_have_the_rates_of_their_groups(decay: str, fused: bool) -> None:
    """Of 2^15 entries and more, which a step takes where they lie: by a fused kernel, or chunk by chunk."""
    chain = CHAIN if fused else [{"kind": "momentum", "nesterov": True}, "rms"]
    runs = []
    for make in (Optimizer, apart):
        params = [nn.Parameter(normal(256, 128, seed=i, dtype=torch.float32)) for i in range(2 * PER_GROUP)]
        runs.append(make(declared(params, RATES[2:]), {"update": chain, "weight_decay": decay}))
        for t in range(2):
            step(runs[-1], t)
        hows = [how for param_set in runs[-1].param_sets for how in param_set.executions]
        assert all(isinstance(how, Fused if fused else Chunks) for how in hows)
    assert [len(one.stack_states()) for one in runs] == [1, 2]
    assert same(*map(everything, runs))


@pytest.mark.parametrize("recipe", ["adamw", "soap_fitted", "muon"])
def test_24_groups_make_as_many_stacks_as_one(recipe: str) -> None:
    many = declared(parameters(24), [(0.01 * 0.8**i, 0.1 * (i % 2)) for i in range(24)])
    found = [Optimizer(groups, recipe).stack_states() for groups in (many, named(parameters(24)))]
    assert len({len(states) for states in found}) == 1
    for one, other in zip(*found, strict=True):
        assert one.stack.grids == other.stack.grids


def test_a_rate_that_changes_builds_nothing() -> None:
    optimizer = Optimizer(declared(parameters(2), [(0.01, 0.1)] * 2), "adamw")
    before = [x.data_ptr() for state in optimizer.stack_states() for x in state.tensors.values()]
    for t, lr in enumerate((0.01, 0.02, 0.01)):
        optimizer.param_groups[1]["lr"] = lr
        step(optimizer, t)
    assert [x.data_ptr() for state in optimizer.stack_states() for x in state.tensors.values()] == before


def test_a_group_with_rate_and_gradients_0_is_left_as_it_is() -> None:
    """The others go on, as they do without it."""
    ours, alone = (Optimizer(declared(parameters(2), [(0.01, 0.1)] * 2), "adamw") for _ in range(2))
    for t in range(4):
        for i, p in enumerate(p for group in ours.param_groups for p in group["params"]):
            p.grad = normal(*p.shape, seed=100 * t + i).float() * (i < PER_GROUP or t % 2)
        ours.param_groups[1]["lr"] = 0.01 * (t % 2)
        ours.step()
        for i, p in enumerate(p for group in alone.param_groups for p in group["params"]):
            p.grad = normal(*p.shape, seed=100 * t + i).float() if i < PER_GROUP or t % 2 else None
        alone.step()
    assert same(everything(ours), everything(alone))
    assert [int(ours.state[group["params"][0]]["step"]) for group in ours.param_groups] == [4, 2]


def resumed(optimizer: Optimizer) -> Optimizer:
    given = [p for group in optimizer.param_groups for p in group["params"]]
    held = [nn.Parameter(p.detach().clone(), requires_grad=p.requires_grad) for p in given]
    groups = declared(held, [(0.5, 0.5)] * len(optimizer.param_groups))
    other = (
        apart(groups, optimizer.recipe)
        if len(optimizer.param_sets.batches) > 1
        else Optimizer(groups, optimizer.recipe)
    )
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    return other


@pytest.mark.parametrize("make", [Optimizer, apart])
@pytest.mark.parametrize(
    "copied", [resumed, copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))], ids=["state", "deepcopy", "pickle"]
)
def test_copies_go_on_when_a_group_is_thawed_later(copied: Callable[[Optimizer], Optimizer], make: Any) -> None:
    params = parameters(3)
    for p in params[PER_GROUP : 2 * PER_GROUP]:
        p.requires_grad_(False)
    optimizer = make(declared(params, RATES[:3]), "soap_fitted")
    frozen = range(PER_GROUP, 2 * PER_GROUP)
    for t in range(3):
        step(optimizer, t, without=frozen)
    assert not any(params[at] in optimizer.state for at in frozen)
    twin = copied(optimizer)
    for t in range(3, 14):
        for one in (optimizer, twin):
            step(one, t, without=frozen if t < 5 else [])
    assert int(optimizer.state[params[PER_GROUP]]["step"]) == 9
    assert same(everything(optimizer), everything(twin))


def test_an_unusable_gradient_is_counted_in_a_copy_too() -> None:
    optimizer = Optimizer(declared(parameters(2), RATES[:2]), "adamw")
    step(optimizer, 0)
    optimizer.param_groups[1]["params"][0].grad.fill_(float("nan"))
    optimizer.step()
    assert copy.deepcopy(optimizer).skipped == optimizer.skipped == {f"p{PER_GROUP}": 1}


def test_parameters_in_parts_have_the_rates_of_their_routes() -> None:
    """Updates of parameters that are cut into blocks are written together, whatever route each comes from."""
    chain = ["momentum", {"kind": "spectral", "solver": "svd"}]
    cut = {"update": chain, "blocking": {"size": 4}}
    recipe = {**cut, "routes": [{**cut, "name": "slow", "match": {"name": ["^slow"]}, "lr_multiplier": 0.5}]}
    fast, slow, alone = ([nn.Parameter(normal(8, 8, seed=i)) for i in (0, 1)] for _ in range(3))
    together = Optimizer([("fast", fast[0]), ("slow", slow[1])], recipe, lr=0.02)
    one_by_one = [Optimizer([p], {**recipe, "routes": []}, lr=lr) for p, lr in zip(alone, (0.02, 0.01), strict=True)]
    for t in range(5):
        for i, p in enumerate((fast[0], slow[1])):
            p.grad = normal(8, 8, seed=10 * t + i)
            alone[i].grad = p.grad.clone()
        for optimizer in (together, *one_by_one):
            optimizer.step()
    assert torch.equal(fast[0], alone[0]) and torch.equal(slow[1], alone[1])


def test_no_group_at_lr_0_steps_by_gradients_of_zeros() -> None:
    params = parameters(3)
    optimizer = Optimizer(declared(params, [(0.0, 0.1), (0.0, 0.2), (0.1, 0.1)]), CHAIN)
    for parameter in params:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    assert [int(optimizer.state[p]["step"]) for p in params] == [0] * 2 * PER_GROUP + [1] * PER_GROUP


@pytest.mark.parametrize("recipe", ["adamw", {"update": ["momentum"], "routes": []}], ids=["fused", "stages"])
def test_a_rate_on_a_device_is_that_of_parameters_on_all_devices(recipe: Any) -> None:
    found = []
    for places in (("cpu", "cpu"), ("cuda", "cpu")):
        with accelerator("cuda") as run:
            params = [nn.Parameter(normal(3, 2, seed=0).to(run.device if at == "cuda" else at)) for at in places]
            lr = torch.tensor(0.1, dtype=torch.float64).to(params[0].device)
            optimizer = Optimizer([(f"w{i}", p) for i, p in enumerate(params)], recipe, lr=lr, weight_decay=0.1)
            for _ in range(2):
                for p in params:
                    p.grad = torch.ones_like(p)
                optimizer.step()
            found.append([p.detach().cpu().clone() for p in params])
    torch.testing.assert_close(*found, rtol=1e-6, atol=1e-6)
