"""Runs of torch's AdamW that this library continues."""

from __future__ import annotations

import ast
import copy
from typing import Any

import pytest
import torch
from torch import nn

from eigengraft import compose
from eigengraft.optimizers import convert_adamw

from ..refusals import refused, warned


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(7, 8), nn.Linear(8, 6), nn.LayerNorm(6), nn.Linear(6, 7)).double()


def drive(optimizer: torch.optim.Optimizer, model: nn.Module, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        optimizer.zero_grad()
        nn.functional.cross_entropy(
            model(torch.randint(7, (16,), generator=generator)), torch.randint(7, (16,), generator=generator)
        ).backward()
        optimizer.step()


def run_of_torch(steps: int = 5, **options: Any) -> tuple[nn.Sequential, torch.optim.AdamW]:
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1, fused=True, **options)
    drive(optimizer, model, range(steps))
    return model, optimizer


@pytest.mark.parametrize("beta", [0.999, 0.95])
def test_a_run_of_torchs_adamw_continues(beta: float) -> None:
    """In float64, up to the rounding by which the two optimizers differ from the first step on."""
    model, theirs = run_of_torch(betas=(0.9, beta))
    ours = copy.deepcopy(model)
    optimizer = compose("adamw", ours, lr=0.01, weight_decay=0.1, overrides={"update.rms.beta": beta})
    before = copy.deepcopy(theirs.state_dict())
    optimizer.load_state_dict(convert_adamw(before, optimizer))
    for own, kept in zip(before["state"].values(), theirs.state_dict()["state"].values(), strict=True):
        assert all(torch.equal(own[key], kept[key]) for key in own)
    drive(theirs, model, range(5, 12))
    drive(optimizer, ours, range(5, 12))
    for own, other in zip(ours.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(own, other, rtol=1e-12, atol=1e-14)


def test_parameters_that_are_not_adams_start_anew_and_are_named() -> None:
    model, theirs = run_of_torch(betas=(0.9, 0.95))
    optimizer = compose("muon", model, lr=0.01, overrides={"routes.adam.update.momentum.beta": 0.9})
    with warned(UserWarning, "1.weight"):
        found = convert_adamw(theirs.state_dict(), optimizer)
    optimizer.load_state_dict(found)
    by_name = {name: optimizer.state[parameter] for name, parameter in model.named_parameters()}
    assert int(by_name["1.weight"]["step"]) == 0 and int(by_name["0.weight"]["step"]) == 5
    moments = {name: theirs.state[parameter]["exp_avg_sq"] for name, parameter in model.named_parameters()}
    for name, own in by_name.items():
        kept = [value for key, value in own.items() if key.endswith("rms/v")]
        assert len(kept) == (name != "1.weight")
        assert all(torch.equal(value.reshape(moments[name].shape), moments[name]) for value in kept)


def test_the_error_about_other_numbers_has_the_overrides_that_help() -> None:
    model, theirs = run_of_torch(eps=1e-7)
    with refused(ValueError, "0.weight", 0.95, 0.999, "overrides={") as caught:
        convert_adamw(theirs.state_dict(), compose("soap_fitted", model))
    overrides = ast.literal_eval(str(caught.value).partition("overrides=")[2])
    assert overrides == {"routes.adam.update.rms.beta": 0.999, "routes.adam.update.rms.eps": 1e-7}
    with warned(UserWarning, "1.weight"):
        convert_adamw(theirs.state_dict(), compose("soap_fitted", model, overrides=overrides))


def test_state_that_means_something_else_is_refused() -> None:
    model, theirs = run_of_torch(betas=(0.8, 0.999))
    optimizer = compose("adamw", model, lr=0.01, overrides={"update.rms.beta": 0.999})
    with refused(ValueError, "0.weight", "0.8", "0.9"):
        convert_adamw(theirs.state_dict(), optimizer)
    model, theirs = run_of_torch(amsgrad=True)
    with refused(ValueError, "0.weight", "max_exp_avg_sq"):
        convert_adamw(theirs.state_dict(), compose("adamw", model, overrides={"update.rms.beta": 0.999}))
    model, theirs = run_of_torch()
    halves = [list(model.parameters())[:2], list(model.parameters())[2:]]
    groups = torch.optim.AdamW([{"params": own} for own in halves])
    with refused(ValueError, "[2, 5]", "[7]"):
        convert_adamw(groups.state_dict(), compose("adamw", model))
    large = nn.Linear(128, 64)
    theirs = torch.optim.AdamW(large.parameters())
    large(torch.ones(1, 128)).sum().backward()
    theirs.step()
    stored = compose("adamw_8bit", large, overrides={"update.rms.beta": 0.999})
    with refused(ValueError, "weight", "convert_storage"):
        convert_adamw(theirs.state_dict(), stored)


def test_other_arguments_are_refused() -> None:
    model, theirs = run_of_torch()
    ours: Any = compose("adamw", model)
    with refused(TypeError, "optimizer", "dict", "convert_adamw(state_dict, optimizer)"):
        convert_adamw(ours, theirs.state_dict())  # type: ignore[arg-type]
    for wrong in (theirs, theirs.state_dict()["state"]):
        with refused(TypeError, "state_dict", type(wrong).__name__):
            convert_adamw(wrong, ours)  # type: ignore[arg-type]
