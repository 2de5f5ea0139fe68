"""Spikes: steps far above those before, against a definition, on a CPU and a device, and across a checkpoint."""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from eigengraft import Optimizer, RecipeError, compose
from eigengraft.optimizers import submodel
from eigengraft.optimizers.step.spikes import SpikeCheck
from eigengraft.optimizers.write.failure import Spike
from eigengraft.testing import accelerator

from ..gpu.models import Run, largest_difference
from ..gpu.models import gradients as device_gradients
from ..refusals import refused

WINDOW, SIGMAS, LEAST = 6, 3.0, 4
SPIKE = {"window": WINDOW, "sigmas": SIGMAS, "least": LEAST}
SHAPES = ((4, 3), (4, 3), (5,))
LARGE = {5: 30.0, 9: 12.0, 10: 40.0}
"""Factors of the gradients of some steps."""


def defined(values: Sequence[float], window: int = WINDOW, sigmas: float = SIGMAS) -> list[tuple[bool, float]]:
    """(is a spike, bound / value) of each value, as the docstring of `Spike` defines it."""
    held: list[float] = []
    found = []
    for value in values:
        mean, deviation = (np.mean(held), np.std(held, ddof=1)) if len(held) >= LEAST else (math.inf, 0.0)
        bound = mean + sigmas * deviation
        spike = value > bound
        found.append((bool(spike), float(bound / value) if spike else 1.0))
        held = [*held, mean + min(sigmas, 2.5) * deviation if spike else value][-window:]
    return found


def weights() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64)) for shape in SHAPES]


def gradients(steps: int) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(1)
    rows = [[torch.randn(shape, generator=generator, dtype=torch.float64) for shape in SHAPES] for _ in range(steps)]
    return [[g * LARGE.get(step, 1.0) for g in row] for step, row in enumerate(rows)]


def norm(row: Sequence[Tensor]) -> float:
    return float(torch.cat([g.flatten() for g in row]).norm())


def optimizer_of(params: list[nn.Parameter], recipe: str, spike: dict[str, Any] | None, **more: Any) -> Optimizer:
    declared: dict[str, Any] = {"base": recipe, **more} | ({} if spike is None else {"failure": {"spike": spike}})
    return Optimizer([(f"w{i}", p) for i, p in enumerate(params)], declared, lr=0.1, weight_decay=0.1)


def drive(optimizer: Optimizer, params: list[nn.Parameter], rows: Sequence[Sequence[Tensor]]) -> None:
    for row in rows:
        for p, g in zip(params, row, strict=True):
            p.grad = g.clone()
        if "loss" in optimizer.param_sets.signals.asking:
            optimizer.provide("loss", norm(row))
        optimizer.step()


def states(optimizer: Optimizer) -> list[Tensor]:
    optimizer.state_dict()
    return [x for own in optimizer.state.values() for x in own.values()]


def equal(one: Sequence[Tensor], two: Sequence[Tensor]) -> bool:
    return all(map(torch.equal, one, two)) and len(one) == len(two)


@pytest.mark.parametrize("measure", ["gradient_norm", "loss"])
@pytest.mark.parametrize("then", ["skip", "scale", "clip"])
def test_steps_are_those_of_the_definition(then: str, measure: str) -> None:
    """SGD with weight decay, whose step the definition multiplies or leaves out."""
    rows, params = gradients(14), weights()
    expected = [p.detach().clone() for p in params]
    optimizer = optimizer_of(
        params, "sgd", SPIKE | {"then": then, "measure": measure}, weight_decay={"kind": "decoupled"}
    )
    momentum = [torch.zeros_like(x) for x in expected]
    decisions = defined([norm(row) for row in rows])
    assert [step for step, (spike, _) in enumerate(decisions) if spike] == [*LARGE]
    for row, (spike, factor) in zip(rows, decisions, strict=True):
        drive(optimizer, params, [row])
        if spike and then == "skip":
            continue
        for x, m, g in zip(expected, momentum, row, strict=True):
            m.mul_(0.9).add_(g, alpha=factor if then == "clip" else 1.0)
            x.sub_((m + 0.1 * x) * (0.1 * (factor if then == "scale" else 1.0)))
        assert all(torch.allclose(x, p, rtol=1e-12, atol=1e-12) for x, p in zip(expected, params, strict=True))
    counts = optimizer.spikes
    assert counts is not None and (counts.spikes, counts.entered) == (len(LARGE), len(rows))
    assert f"{len(LARGE)} by {measure}" in repr(optimizer)
    assert optimizer.inspect().select(measure="spikes").values() == [len(LARGE)]


@pytest.mark.parametrize("recipe", ["adamw", "muon", "soap", "schedule_free_adamw", "prodigy"])
def test_a_skipped_step_is_no_step(recipe: str) -> None:
    """Bit for bit, the run without these gradients: parameters, state and counts of steps."""
    rows, one, two = gradients(14), weights(), weights()
    skipping, without = optimizer_of(one, recipe, SPIKE), optimizer_of(two, recipe, None)
    drive(skipping, one, rows)
    drive(without, two, [row for step, row in enumerate(rows) if step not in LARGE])
    assert equal(one, two) and equal(states(skipping), states(without))


@pytest.mark.parametrize("measure", ["gradient_norm", "loss"])
@pytest.mark.parametrize("then", ["skip", "scale", "clip"])
@pytest.mark.parametrize("recipe", ["adamw", "soap"])
def test_a_run_without_spikes_keeps_its_bits(recipe: str, then: str, measure: str) -> None:
    rows, one, two = [row for step, row in enumerate(gradients(9)) if step not in LARGE], weights(), weights()
    drive(optimizer_of(one, recipe, {"then": then, "measure": measure, "window": 4, "sigmas": 50.0}), one, rows)
    drive(optimizer_of(two, recipe, None), two, rows)
    assert equal(one, two)


def test_a_lasting_change_of_the_level_passes() -> None:
    window = SpikeCheck(Spike(window=64))
    generator = torch.Generator().manual_seed(0)
    noise = 1 + 0.1 * torch.rand(300, generator=generator, dtype=torch.float64)
    found = [bool(window.observe(x * (10 if at >= 100 else 1))[0]) for at, x in enumerate(noise)]
    assert not any(found[:100]) and found[100] and not any(found[228:])


def test_repeated_spikes_do_not_hide_each_other() -> None:
    window = SpikeCheck(Spike(window=64))
    generator = torch.Generator().manual_seed(0)
    noise = 1 + 0.1 * torch.rand(400, generator=generator, dtype=torch.float64)
    found = [at for at, x in enumerate(noise) if bool(window.observe(x * (5 if at >= 100 and at % 12 == 0 else 1))[0])]
    assert found == [at for at in range(400) if at >= 100 and at % 12 == 0]


def test_equal_values_are_no_spikes_and_values_that_are_not_finite_do_not_enter() -> None:
    window = SpikeCheck(Spike(window=8, sigmas=1.0))
    third = torch.tensor(1 / 3, dtype=torch.float64)
    assert not any(bool(window.observe(third)[0]) for _ in range(20))
    spike, factor = window.observe(third * math.inf)
    assert bool(spike) and float(factor) == 0
    before = window.counts()
    assert not bool(window.observe(third * math.nan)[0]) and window.counts() == before
    assert before.deviation == 0 and before.mean == before.bound == float(third)


@pytest.mark.parametrize("measure", ["gradient_norm", "loss"])
@pytest.mark.parametrize("then", ["skip", "clip"])
def test_a_run_continues_from_a_checkpoint(then: str, measure: str) -> None:
    rows, one, two = gradients(14), weights(), weights()
    spike = SPIKE | {"then": then, "measure": measure}
    whole, first = optimizer_of(one, "adamw", spike), optimizer_of(two, "adamw", spike)
    drive(whole, one, rows)
    drive(first, two, rows[:8])
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    second = optimizer_of(two, "adamw", spike)
    second.load_state_dict(torch.load(file, weights_only=True))
    assert second.spikes == first.spikes == copy.deepcopy(first).spikes
    drive(second, two, rows[8:])
    assert equal(one, two) and second.spikes == whole.spikes


def test_a_window_of_another_length_or_measure_is_adopted_or_begins_again() -> None:
    long, short = SpikeCheck(Spike(window=6)), SpikeCheck(Spike(window=4))
    for x in range(1, 9):
        long.observe(torch.tensor(float(x % 2), dtype=torch.float64) + x / 100)
    short.read(long.to_text())
    assert sorted(short.values.tolist()) == pytest.approx([0.06, 0.08, 1.05, 1.07]) and int(short.entered) == 4
    other = SpikeCheck(Spike(window=6, measure="loss"))
    other.read(long.to_text())
    assert int(other.entered) == 0


@pytest.mark.parametrize("detect", ["host", "device"])
@pytest.mark.parametrize("then", ["skip", "scale", "clip"])
@pytest.mark.parametrize(
    "recipe", ["adamw", *(pytest.param(r, marks=pytest.mark.slow) for r in ("muon", "schedule_free_adamw"))]
)
def test_a_device_makes_the_same_steps_without_a_wait(recipe: str, then: str, detect: str) -> None:
    """The look at gradients on the host waits once, with a spike rule as without."""
    rows = [[g * {4: 30.0, 6: 50.0}.get(step, 1.0) for g in row] for step, row in enumerate(device_gradients(8))]
    failure = {"detect": detect, "spike": {"then": then, "window": 4, "sigmas": 3.0}}
    with accelerator("cuda") as run:
        one, two = Run(recipe, failure=failure), Run(recipe, run.device, failure=failure)
        plain, waits = Run(recipe, run.device, failure={"detect": detect}), []
        for step, row in enumerate(rows):
            one.step([g.clone() for g in row])
            for own in (plain, two):
                own.give(row)
                with accelerator("cuda") as counts:
                    own.optimizer.step()
                if step >= 3:
                    waits.append((counts.waits, counts.uploads))
        assert waits[1::2] == waits[::2], waits
        assert one.optimizer.spikes is not None and two.optimizer.spikes is not None
        assert one.optimizer.spikes.spikes == two.optimizer.spikes.spikes == 2
        assert largest_difference(one, two) <= 1e-6
        for own in (one, two):
            assert [int(x["step"]) for x in own.optimizer.state.values()] == [8 - 2 * (then == "skip")] * len(
                one.optimizer.state
            )


@pytest.mark.parametrize("first", ["cuda", "cpu"])
@pytest.mark.parametrize("then", ["skip", "scale", "clip"])
def test_parameters_on_two_devices_are_judged_together(then: str, first: str) -> None:
    other, found = {"cuda": "cpu", "cpu": "cuda"}[first], list[list[Tensor]]()
    for places in (["cpu", "cpu", "cpu"], [first, other, other]):
        with accelerator("cuda") as run:
            params = [
                nn.Parameter(p.detach().to(run.device if at == "cuda" else at))
                for p, at in zip(weights(), places, strict=True)
            ]
            optimizer = optimizer_of(params, "adamw", {**SPIKE, "then": then})
            for row in gradients(12):
                for p, g in zip(params, row, strict=True):
                    p.grad = g.clone().to(p.device)
                optimizer.step()
            assert optimizer.param_sets.spikes is not None and optimizer.param_sets.spikes.counts().spikes == 3
            optimizer.state_dict()  # reads the checks that a device has deferred
            found.append([x.detach().cpu().clone() for p in params for x in (p, optimizer.state[p]["step"])])
    for one, two in zip(*found, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-6, atol=1e-6)  # a factor on a device is rounded to float32


def test_steps_without_usable_gradients_have_no_value() -> None:
    params = weights()
    optimizer = optimizer_of(params, "adamw", SPIKE)
    rows = gradients(3)
    drive(optimizer, params, [rows[0], [g * math.nan for g in rows[1]], rows[2]])
    with accelerator("cuda") as run:
        moved = Run("adamw", run.device, failure={"detect": "device", "spike": SPIKE})
        moved.step(*device_gradients(1))
        moved.step([g * math.nan for g in device_gradients(1)[0]])
        assert moved.optimizer.spikes is not None and moved.optimizer.spikes.entered == 1
    assert optimizer.spikes is not None and optimizer.spikes.entered == 2


def test_gradients_that_are_not_used_are_no_part_of_the_norm() -> None:
    """One parameter has a gradient with nan, or none; of all usable gradients the norm enters, if there are any."""
    rows = device_gradients(1)
    with accelerator("cuda") as run:
        for own in (Run("adamw", failure={"spike": SPIKE}), Run("adamw", run.device, failure={"spike": SPIKE})):
            own.step([rows[0][0] * math.nan, *rows[0][1:]])
            counts = own.optimizer.spikes
            assert counts is not None and counts.entered == 1
            assert counts.mean == pytest.approx(norm(rows[0][1:]), rel=1e-6)
        moved = Run("adamw", run.device, failure={"detect": "device", "spike": SPIKE})
        moved.give([g * math.nan for g in rows[0]])
        next(iter(moved.model.parameters())).grad = None
        moved.optimizer.step()
        assert moved.optimizer.spikes is not None and moved.optimizer.spikes.entered == 0


def test_a_step_that_is_no_spike_skips_gradients_that_are_not_finite() -> None:
    """Both masks of a device: that of the gradients, and that of the rule."""
    rows = device_gradients(2)
    with accelerator("cuda") as run:
        own = Run("adamw", run.device, failure={"detect": "device", "spike": SPIKE})
        before = own.values()[0]
        own.step(*([row[0] * math.nan, *row[1:]] for row in rows))
        assert torch.equal(own.values()[0], before) and own.values()[1].isfinite().all()
        assert list(own.optimizer.skipped.values()) == [2]


def test_factors_of_losses_below_0_are_between_0_and_1() -> None:
    window = SpikeCheck(Spike(window=4, measure="loss"))
    for value in (-10.0, -10.0, -10.0):
        window.observe(torch.tensor(value, dtype=torch.float64))
    for value, factor in ((-5.0, 1.0), (2.0, 0.0)):
        spike, found = copy.deepcopy(window).observe(torch.tensor(value, dtype=torch.float64))
        assert bool(spike) and float(found) == factor


def test_the_loss_of_a_closure_or_of_a_source_is_compared() -> None:
    params = weights()
    optimizer = optimizer_of(params, "adamw", SPIKE | {"measure": "loss"})
    for number, row in enumerate(gradients(5)):
        for p, g in zip(params, row, strict=True):
            p.grad = g
        optimizer.step(lambda number=number: torch.tensor(1.0 + number % 2))
    losses = iter([9.0])
    optimizer.provide("loss", lambda: next(losses))
    optimizer.step()
    assert optimizer.spikes is not None and optimizer.spikes.spikes == 1


@pytest.mark.parametrize(
    ("changes", "data"),
    [
        ({"failure": {"spike": {"window": 4, "least": 5}}}, ("least", 5, 4)),
        ({"failure": {"spike": {"sigmas": 0.0}}}, ("failure.spike.sigmas",)),
        ({"failure": {"spike": {"then": "stop"}}}, ("failure.spike.then", "stop")),
        ({"failure": {"spike": {"then": "scale"}}, "graph": True}, ("failure.spike", "scale", "graph")),
        ({"failure": {"spike": {}}, "line_search": {}}, ("failure.spike", "line_search")),
        (
            {"failure": {"spike": {"then": "clip"}}, "distribution": {"overlap_backward": True}},
            ("failure.spike", "clip", "distribution.overlap_backward"),
        ),
    ],
)
def test_declarations_that_cannot_work_are_refused(changes: dict[str, Any], data: tuple[Any, ...]) -> None:
    with refused(RecipeError, *data):
        optimizer_of(weights(), "adamw", None, **changes)


def test_a_step_without_a_loss_is_refused_before_anything_changes() -> None:
    params = weights()
    before = [p.detach().clone() for p in params]
    optimizer = optimizer_of(params, "adamw", SPIKE | {"measure": "loss"})
    for p, g in zip(params, gradients(1)[0], strict=True):
        p.grad = g
    with refused(ValueError, "failure.spike", "'loss'", "failure.spike.measure=gradient_norm"):
        optimizer.step()
    assert equal(before, params) and not any(bool(x["step"]) for x in optimizer.state.values())


def test_a_norm_of_a_part_of_a_model_is_refused() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    with refused(ValueError, "failure.spike", "failure.spike.measure=loss"):
        compose({"base": "adamw", "failure": {"spike": {}}}, submodel(nn.Sequential(model[0]), model))
