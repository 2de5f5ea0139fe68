"""Gradient release: the bits of ordinary steps, gradients freed in backward, and what cannot be released."""

from __future__ import annotations

import copy
import gc
import io
import math
import pickle
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import eigengraft
from eigengraft import Optimizer
from eigengraft.optimizers.step.gradients import STALLED
from eigengraft.testing import accelerator

from ...recipes import COVER, few_quick
from ...refusals import refused, warned
from ...trajectories import normal

STEPS = 6
NEEDS_ALL = {"prodigy", "sophia", "singd", "muonclip", "lora_rite", "lora_muon", "newton_muon"}


class Net(nn.Module):
    """Layers of two shapes, a norm, a tied embedding, and a layer that some batches do not use."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.head = nn.Embedding(11, 8), nn.Linear(8, 11, bias=False)
        self.head.weight = self.emb.weight
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 8)) for _ in range(3)])
        self.norm, self.rare, self.scale = nn.LayerNorm(8), nn.Linear(8, 8), nn.Parameter(torch.ones(8))

    def forward(self, tokens: Tensor, rare: bool = False) -> Tensor:
        x = self.emb(tokens)
        for layer in self.layers:
            x = x + layer(self.norm(x))
        x = self.rare(x) if rare else x
        logits: Tensor = self.head(x * self.scale)
        return logits


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def loss(model: nn.Module, step: int, micro: int = 0, **options: Any) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + micro)
    tokens = torch.randint(0, 11, (4, 5), generator=generator).to(next(model.parameters()).device)
    return nn.functional.cross_entropy(model(tokens, **options).flatten(0, 1), tokens.flatten())


def train(
    model: nn.Module, optimizer: Optimizer, release: Any, steps: Sequence[int] = range(STEPS), micros: int = 1
) -> int:
    """Steps of some micro-batches each, with a schedule of the rate. Return how many parameters were released."""
    stepped = 0
    for step in steps:
        for group in optimizer.param_groups:
            group["lr"] = 0.02 / (1 + step)
        for micro in range(micros):
            last = micro == micros - 1
            with nullcontext() if release is None or last else release.accumulate():
                loss(model, step, micro, rare=step % 3 == 1).backward()
        stepped += 0 if release is None else len(release.stepped)
        optimizer.step()
        optimizer.zero_grad()
    return stepped


def compose(model: nn.Module, recipe: Any) -> Optimizer:
    return eigengraft.compose(recipe, model, lr=0.02, weight_decay=0.1, steps=STEPS)


def values(model: nn.Module, optimizer: Optimizer) -> list[Tensor]:
    optimizer.state_dict()
    states = [x for p in model.parameters() for x in optimizer.state[p].values()]
    return [x.detach().cpu().clone() for x in (*model.parameters(), *states)]


def equal(one: Sequence[Tensor], two: Sequence[Tensor]) -> bool:
    return len(one) == len(two) and all(map(torch.equal, one, two))


@pytest.mark.parametrize(
    ("recipe", "micros"),
    [
        pytest.param(*each.values, 1 + place % 2, marks=each.marks)
        for place, each in enumerate(few_quick(name for name in COVER if name not in NEEDS_ALL))
    ],
)
def test_released_steps_have_the_bits_of_ordinary_ones(recipe: str, micros: int) -> None:
    """Steps accumulate one batch or two. In some steps a layer has no gradient, so that the rest of its stack waits."""
    one, two = net(), net()
    plain, optimizer = compose(one, recipe), compose(two, recipe)
    release = eigengraft.release(two, optimizer)
    train(one, plain, None, micros=micros)
    assert train(two, optimizer, release, micros=micros)
    assert equal(values(one, plain), values(two, optimizer))


@pytest.mark.parametrize(
    "changes",
    [
        {
            "total_steps": STEPS,
            "update": [{"kind": "momentum", "beta": {"from": 0.5, "to": 0.9, "steps": 4}}, {"kind": "rms"}],
        },
        {"base": "soap", "compile": False, "failure": {"detect": "device"}},
        {"base": "adamw", "storage": {"first_moment": {"kind": "int8", "min_elements": 1}}},
        {"base": "adamw", "storage": {"second_moment": {"kind": "offload", "to": "disk", "min_elements": 1}}},
        {"base": "adamw", "averaging": {"kind": "ema", "decay": 0.9}},
        {"base": "adamw", "update": [{"kind": "clip_norm", "per": "parameter"}, {"kind": "momentum"}, {"kind": "rms"}]},
        {
            "base": "adamw",
            "update": [
                {
                    "kind": "transform",
                    "before": {"kind": "clip_running_norm", "start": 2},
                    "inner": [{"kind": "momentum"}, {"kind": "rms"}],
                }
            ],
        },
    ],
    ids=["schedule", "masks", "int8", "offload", "ema", "norms of parameters", "running norms"],
)
def test_options_keep_their_bits(changes: dict[str, Any]) -> None:
    one, two = net(), net()
    plain, optimizer = compose(one, changes), compose(two, changes)
    train(one, plain, None)
    assert train(two, optimizer, eigengraft.release(two, optimizer))
    assert equal(values(one, plain), values(two, optimizer))


def test_gradients_are_freed_in_backward_and_the_rest_steps_later() -> None:
    model = net()
    optimizer = compose(model, "adamw")
    release = eigengraft.release(model, optimizer, parts=1000)
    kept = []
    model.emb.weight.register_hook(lambda _: kept.append(sum(p.grad is not None for p in model.parameters())))
    loss(model, 0).backward()
    assert kept == [0] and release.begun
    assert all(p.grad is None for name, p in model.named_parameters())
    assert "rare.weight" not in release.stepped and len(release.stepped) == len(list(model.parameters())) - 2
    optimizer.step()
    assert not release.begun and not release.stepped


def test_a_checkpoint_in_between_continues() -> None:
    one, two = net(), net()
    plain, first = compose(one, "soap"), compose(two, "soap")
    train(one, plain, None)
    train(two, first, eigengraft.release(two, first), range(3))
    file = io.BytesIO()
    torch.save([two.state_dict(), first.state_dict()], file)
    file.seek(0)
    three = net()
    second = compose(three, "soap")
    release = eigengraft.release(three, second)
    weights, state = torch.load(file, weights_only=True)
    three.load_state_dict(weights)
    second.load_state_dict(state)
    train(three, second, release, range(3, STEPS))
    assert equal(values(one, plain), values(three, second))


@pytest.mark.parametrize("parts", [2, 1000])
def test_half_a_step_is_not_saved_copied_or_loaded(parts: int) -> None:
    one, two = net(), net()
    plain, optimizer = compose(one, "adamw"), compose(two, "adamw")
    release, saved = eigengraft.release(two, optimizer, parts=parts), optimizer.state_dict()
    for step in range(3):
        loss(one, step).backward()
        loss(two, step).backward()
        assert release.stepped
        for name, act in {
            "state_dict": optimizer.state_dict,
            "full_state_dict": optimizer.full_state_dict,
            "consolidate_state_dict": optimizer.consolidate_state_dict,
            "load_state_dict": lambda: optimizer.load_state_dict(saved),
            "copy": lambda: copy.deepcopy(optimizer),
        }.items():
            with refused(RuntimeError, name, release.stepped[0], "step()"):
                act()
        with pytest.raises(RuntimeError):
            pickle.dumps(optimizer)
        plain.step()
        plain.zero_grad()
        optimizer.step()
        optimizer.zero_grad()
    assert equal(values(one, plain), values(two, optimizer))


def test_gradients_that_wait_for_the_step_leave_the_state_whole() -> None:
    model = net()
    optimizer = compose(model, "adamw")
    release = eigengraft.release(model, optimizer, parts=1)
    loss(model, 0).backward()
    assert release.begun
    assert {int(own["step"]) for own in optimizer.state_dict()["state"].values()} == {0}


def test_a_copy_is_not_released_and_removed_releases_step_as_ever() -> None:
    one, two = net(), net()
    plain, optimizer = compose(one, "adamw"), compose(two, "adamw")
    release = eigengraft.release(two, optimizer)
    assert copy.deepcopy(optimizer).released is None
    train(one, plain, None)
    assert train(two, optimizer, release, range(3))
    release.remove()
    assert optimizer.released is None and not train(two, optimizer, release, range(3, STEPS))
    assert equal(values(one, plain), values(two, optimizer))


def test_layers_that_are_thawed_or_added_later_step_with_the_rest() -> None:
    runs = []
    for released in (False, True):
        model = net()
        added = nn.Parameter(torch.ones(8))
        model.layers[0].requires_grad_(False)
        optimizer = compose(model, "adamw")
        release = eigengraft.release(model, optimizer) if released else None
        train(model, optimizer, release, range(2))
        model.layers[0].requires_grad_(True)
        optimizer.add_param_group({"params": [("added", added)]})
        added.grad = torch.ones(8)
        train(model, optimizer, release, range(2, 4))
        runs.append([*values(model, optimizer), added.detach().clone()])
    assert equal(*runs)


@pytest.mark.parametrize("late", ["thawed", "added"])
def test_layers_that_come_late_step_with_scheduled_numbers(late: str) -> None:
    """Their parameter sets are made between the backward and the rest of the step."""
    found = []
    beta = {"from": 0.0, "to": 0.9, "steps": 4}
    recipe = {"update": [{"kind": "momentum", "beta": beta}, {"kind": "rms"}], "routes": [], "total_steps": 100}
    for released in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(6, 6, bias=False) for _ in range(3))).double()
        first = model.get_parameter("0.weight")
        given = model[1:].parameters() if late == "added" else model.parameters()
        first.requires_grad_(late == "added")
        optimizer, betas = Optimizer(given, recipe, lr=0.1), list[set[float]]()
        release = eigengraft.release(model, optimizer, parts=4) if released else None
        for step in range(6):
            if step == 4:
                first.requires_grad_(True)
                if release is not None and late == "thawed":  # so that backward calls the layer's hook
                    release.remove()
                    release = eigengraft.release(model, optimizer, parts=4)
            model(normal(5, 6, seed=step)).square().mean().backward()
            if step == 4 and late == "added":
                optimizer.add_param_group({"params": [first]})
            optimizer.step()
            optimizer.zero_grad()
            first.grad = None
            betas.append({own.rule.update[0].beta for own in optimizer.stack_states()})  # type: ignore[attr-defined]
        assert betas[4:] == [{0.9}, {0.9}]
        found.append([p.detach() for p in model.parameters()])
    assert all(torch.allclose(*pair, rtol=0, atol=1e-6) for pair in zip(*found, strict=True))


def test_a_closure_may_make_the_gradients() -> None:
    one, two = net(), net()
    plain, optimizer = compose(one, "muon"), compose(two, "muon")
    eigengraft.release(two, optimizer)
    for step in range(3):
        for model, own in ((one, plain), (two, optimizer)):

            def closure(model: nn.Module = model, own: Optimizer = own, step: int = step) -> Tensor:
                own.zero_grad()
                found = loss(model, step)
                found.backward()
                return found

            assert float(own.step(closure)) > 0
    assert equal(values(one, plain), values(two, optimizer))


def test_gradients_that_are_not_finite_are_skipped_and_a_lost_run_warns_once() -> None:
    one, two = net(), net()
    plain, optimizer = compose(one, "adamw"), compose(two, "adamw")
    eigengraft.release(two, optimizer, parts=1000)
    for step in range(STALLED + 1):
        for model, own in ((one, plain), (two, optimizer)):
            lost = {1: ("optimizer.skipped",), STALLED: (STALLED, "no parameter")}.get(step)
            context = nullcontext() if lost is None else warned(UserWarning, *lost, "failure.nonfinite=raise")
            with context:
                (loss(model, step) * (math.nan if step else 1.0)).backward()
                own.step()
            own.zero_grad()
    assert plain.skipped == optimizer.skipped and sum(plain.skipped.values()) == STALLED * (
        len(list(one.parameters())) - 2
    )
    assert equal(values(one, plain), values(two, optimizer))


def test_a_device_counts_the_parts_of_a_step_as_one_step_without_usable_gradients() -> None:
    model = net()
    optimizer = compose(model, {"base": "adamw", "failure": {"detect": "device"}})
    eigengraft.release(model, optimizer, parts=1000)
    found = []
    for step in range(STALLED):
        with warnings.catch_warnings(action="ignore"):
            (loss(model, step) * math.nan).backward()
            optimizer.step()
            optimizer.state_dict()  # settles what a device still has to say
        optimizer.zero_grad()
        found.append(any(one.finite_check.lost() for one in optimizer.param_sets))
    assert found == [False] * (STALLED - 1) + [True]


def backward(model: nn.Module, step: int, release: Any) -> None:
    """Write gradients from the last parameter to the first and call hooks, as backward does."""
    generator = torch.Generator().manual_seed(step)
    for parameter in reversed(list(model.parameters())):
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.device)
        if release is not None:
            release.note(parameter)


@pytest.mark.slow
@pytest.mark.parametrize("detect", ["host", "device"])
@pytest.mark.parametrize("recipe", ["adamw", "soap", "muon"])
def test_a_device_waits_no_more_than_in_ordinary_steps(recipe: str, detect: str) -> None:
    """With the look at gradients on the host, once for each part that is released."""
    declared = {"base": recipe, "failure": {"detect": detect}}
    with accelerator("cuda") as run:
        models = [net().to(run.device), net().to(run.device)]
        plain, optimizer = (compose(model, declared) for model in models)
        release, found = eigengraft.release(models[1], optimizer), list[int]()
        for step in range(STEPS):
            for model, own, hooks in zip(models, (plain, optimizer), (None, release), strict=True):
                with accelerator("cuda") as counts:
                    backward(model, step, hooks)
                    assert hooks is None or hooks.stepped
                    own.step()
                own.zero_grad()
                found.append(counts.waits)
        assert equal(values(models[0], plain), values(models[1], optimizer))
        if detect == "device" and recipe != "soap":  # whose refreshes decompose on the host
            assert found[-1] == found[-2], found


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "share"), [("adamw", 0.75), ("muon", -0.01)])
def test_the_peak_of_memory_is_lower_by_the_gradients_that_never_exist_together(recipe: str, share: float) -> None:
    """Under Adam each of 12 equal layers steps by itself. Under Muon all step in one stack, which saves nothing."""
    peaks, size = [], 12 * 4 * 65 * 64
    for released in (False, True):
        with accelerator("cuda") as run:
            torch.manual_seed(0)
            model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(12))).to(run.device)
            optimizer = compose(model, {"base": recipe, "routes": []})
            release = eigengraft.release(model, optimizer) if released else None
            for step in range(4):
                gc.collect()
                with accelerator("cuda") as counts:
                    backward(model, step, release)
                    optimizer.step()
                    optimizer.zero_grad()
            peaks.append(counts.peak)
    assert peaks[1] <= peaks[0] - share * size, (peaks, size)


def test_parts_are_shares_of_all_gradients() -> None:
    """One of two equal layers has half of the gradients. With `parts=1` nothing steps before `step`."""
    found = {}
    for parts in (1, 2, 3):
        model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
        optimizer = compose(model, {"base": "adamw", "routes": []})
        release = eigengraft.release(model, optimizer, parts=parts)
        early = list[str]()
        model[0].weight.register_hook(lambda _, to=early, own=release: to.extend(own.stepped))
        model(torch.ones(2, 4)).sum().backward()
        found[parts] = early, [*release.stepped]
    both = ["1.weight", "0.weight"]
    assert found == {1: ([], []), 2: (both[:1], both), 3: (both[:1], both)}


def test_a_stack_does_not_wait_for_frozen_parameters() -> None:
    model = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(3)))
    optimizer = compose(model, {"base": "muon", "routes": []})
    release = eigengraft.release(model, optimizer, parts=1000)
    model[1].requires_grad_(False)
    model(torch.ones(2, 4)).sum().backward()
    assert all(parameter.grad is None for parameter in model.parameters())
    assert sorted(release.stepped) == ["0.weight", "2.weight"]


def test_a_step_whose_release_was_removed_after_backward_is_one_step() -> None:
    """Parameters that step later have the scheduled numbers of those that stepped before."""
    beta = {"from": 0.5, "to": 0.9, "steps": 4}
    recipe = {"total_steps": STEPS, "update": [{"kind": "momentum", "beta": beta}, {"kind": "rms"}]}
    one, two = net(), net()
    plain, optimizer = compose(one, recipe), compose(two, recipe)
    release = eigengraft.release(two, optimizer, parts=2)
    for step in range(3):
        for model in (one, two):
            loss(model, step).backward()
        if step == 1:
            assert 0 < len(release.stepped) < sum(p.grad is not None for p in one.parameters())
            release.remove()
        for own in (plain, optimizer):
            own.step()
            own.zero_grad()
    assert optimizer.released is None and equal(values(one, plain), values(two, optimizer))


def test_a_second_gradient_in_a_step_is_refused() -> None:
    model = net()
    optimizer = compose(model, "adamw")
    eigengraft.release(model, optimizer, parts=1000)
    loss(model, 0).backward()
    with refused(RuntimeError, "release", "accumulate()", "step()"):
        loss(model, 1).backward()


@pytest.mark.parametrize("key", ["lr", "weight_decay"])
def test_a_rate_that_changes_after_parameters_stepped_is_refused(key: str) -> None:
    model = net()
    optimizer = compose(model, "adamw")
    eigengraft.release(model, optimizer)
    loss(model, 0).backward()
    optimizer.param_groups[0][key] = 0.5
    with refused(RuntimeError, "release", "param group 0", "lr"):
        optimizer.step()


def test_a_gradient_scaler_is_refused() -> None:
    model = net()
    optimizer = compose(model, "adamw")
    eigengraft.release(model, optimizer)
    loss(model, 0).backward()
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(8.0), torch.tensor(0.0)  # type: ignore[attr-defined]
    with refused(RuntimeError, "release", "GradScaler"):
        optimizer.step()


def test_what_a_watched_step_would_miss_is_refused() -> None:
    model = net()
    optimizer = compose(model, "adamw")
    release = eigengraft.release(model, optimizer)
    with refused(ValueError, "watch_next_step", "release"):
        optimizer.watch_next_step()
    release.remove()
    optimizer.watch_next_step()


CLIP = {"base": "adamw", "update": [{"kind": "clip_norm", "per": "model"}, {"kind": "momentum"}, {"kind": "rms"}]}


@pytest.mark.parametrize(
    ("recipe", "data"),
    [
        (CLIP, ("update.clip_norm", "gradient_norm")),
        ("prodigy", ("update.prodigy", "all parameters")),
        ("sophia", ("update.diagonal_newton", "hessian_diagonal")),
        ({"base": "adamw", "sam": {}}, ("sam",)),
        ({"base": "adamw", "line_search": {}}, ("line_search",)),
        ({"base": "adamw", "failure": {"spike": {}}}, ("failure.spike",)),
        ({"base": "adamw", "failure": {"nonfinite": "raise"}}, ("failure.nonfinite=raise",)),
        ({"base": "adamw", "graph": True}, ("graph",)),
    ],
)
def test_what_needs_all_gradients_is_refused_by_name(recipe: Any, data: tuple[Any, ...]) -> None:
    model = net()
    optimizer = compose(model, recipe)
    with refused(ValueError, "release", *data):
        eigengraft.release(model, optimizer)
    assert optimizer.released is None


def test_arguments_that_cannot_be_meant_are_refused() -> None:
    model = net()
    optimizer = compose(model, "adamw")
    with refused(TypeError, "release", "eigengraft.Optimizer"):
        eigengraft.release(optimizer, model)  # type: ignore[arg-type]
    with refused(ValueError, "release", "parts", 0):
        eigengraft.release(model, optimizer, parts=0)
    with refused(ValueError, "release", "no trained parameter"):
        eigengraft.release(nn.Linear(3, 3), optimizer)
    eigengraft.release(model, optimizer)
    with refused(ValueError, "release", "remove()"):
        eigengraft.release(model, optimizer)
