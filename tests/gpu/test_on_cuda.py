"""Steps on a real accelerator, which `make gpu` runs: steady ones wait for nothing, and all are those of a CPU."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import eigengraft

from .budgets import STEPS, declared, gpt2, table
from .models import Run, gradients, largest_difference

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", sorted(table()))
def test_a_steady_step_waits_for_nothing(name: str) -> None:
    """torch raises at the first wait. Gradients are checked on the device: on the host the check itself waits."""
    declaration = declared(name)
    declaration["failure"]["detect"] = "device"
    named = [(parameter, nn.Parameter(torch.randn(shape, device="cuda"))) for parameter, shape in gpt2(4)]
    optimizer = eigengraft.Optimizer(named, declaration, lr=1e-3, weight_decay=0.1)
    for step in range(STEPS):
        for _, parameter in named:
            parameter.grad = torch.randn(parameter.shape, device="cuda")
        torch.cuda.set_sync_debug_mode("error" if step == STEPS - 1 else "default")
        try:
            optimizer.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("to", ["cpu", "disk"])
@pytest.mark.parametrize("name", ["adamw", "soap_fitted", "shampoo"])
def test_offloaded_state_has_the_bits_of_state_on_the_device(name: str, to: str) -> None:
    """Blocks are large enough that copies and programs overlap."""
    found = []
    for storage in ({}, {role: {"kind": "offload", "to": to} for role in declared_roles(name)}):
        torch.manual_seed(0)
        named = [(parameter, nn.Parameter(torch.randn(shape, device="cuda"))) for parameter, shape in gpt2(2)]
        changes = {"storage": storage, "failure": {"detect": "device"}}
        optimizer = eigengraft.Optimizer(named, name, lr=1e-3, overrides=changes)
        for _ in range(5):
            for _, parameter in named:
                parameter.grad = torch.randn(parameter.shape, device="cuda")
            optimizer.step()
        state = [x.cpu() for own in optimizer.state_dict()["state"].values() for x in own.values()]
        found.append([*state, *(parameter.detach().cpu() for _, parameter in named)])
        assert bool(optimizer.offloaded_bytes()) == bool(storage)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def declared_roles(name: str) -> set[str]:
    return {role for rule in eigengraft.load_recipe(name).rules().values() for role in rule.storable_roles()}


@pytest.mark.parametrize("name", ["adamw", "muon", "soap_fitted", "shampoo"])
def test_steps_are_those_of_a_cpu(name: str) -> None:
    """Up to the rounding of other kernels; muon multiplies in bfloat16."""
    given = gradients(6)
    runs = [Run(name, torch.device(place)) for place in ("cpu", "cuda")]
    for run in runs:
        run.step(*given)
    start = [parameter.detach() for parameter in Run(name).model.parameters()]
    moved = max(float((a - b).abs().max()) for a, b in zip(runs[0].values(), start, strict=True))
    assert largest_difference(*runs) <= 0.05 * moved
