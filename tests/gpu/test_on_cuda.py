"""Steps on a real accelerator, which `make gpu` runs: steady ones wait for nothing, and all are those of a CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import eigengraft
from eigengraft.optimizers.stacks import delayed

from .budgets import STEPS, declared, gpt2, table
from .models import frequent

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
        named = [(parameter, nn.Parameter(torch.randn(shape, device="cuda"))) for parameter, shape in gpt2(2, 128)]
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


@pytest.mark.parametrize("name", ["soap", "soap_fitted", "soap_kl", "shampoo", "shampoo_kl", "caspr", "track3"])
def test_squares_make_the_steps_of_a_cpu(name: str) -> None:
    """Gradients of square matrices have statistics without a null space, which has no basis of its own."""
    generator, found = torch.Generator().manual_seed(0), []
    start = [torch.randn(16, 16, generator=generator, dtype=torch.float64) for _ in range(3)]
    given = [[torch.randn(16, 16, generator=generator, dtype=torch.float64) for _ in start] for _ in range(8)]
    declared = frequent(eigengraft.load_recipe(name).model_dump(mode="json"), 3)
    for place in ("cpu", "cuda"):
        named = [(f"h.{i}.weight", nn.Parameter(x.to(place, copy=True))) for i, x in enumerate(start)]
        optimizer = eigengraft.Optimizer(named, declared, lr=1e-2)
        for gradients in given:
            for (_, parameter), gradient in zip(named, gradients, strict=True):
                parameter.grad = gradient.to(place)
            optimizer.step()
        found.append([parameter.detach().cpu() for _, parameter in named])
    assert max(float((a - b).abs().max()) for a, b in zip(*found, strict=True)) <= 1e-6


def trained(declared: Any, steps: int = 12, width: int = 64, **options: Any) -> tuple[list[torch.Tensor], Any]:
    """Parameters of two layers of GPT-2 after some steps, and their optimizer. Gradients keep their addresses."""
    generator = torch.Generator().manual_seed(0)
    shapes = gpt2(2, width)
    named = [(name, nn.Parameter((0.1 * torch.randn(shape, generator=generator)).to("cuda"))) for name, shape in shapes]
    optimizer = eigengraft.Optimizer(named, declared, lr=1e-3, **options)
    for _, parameter in named:
        parameter.grad = torch.zeros_like(parameter)
    for _ in range(steps):
        for _, parameter in named:
            assert parameter.grad is not None
            parameter.grad.copy_(torch.randn(parameter.shape, generator=generator))
        optimizer.step()
    state = [x.cpu() for own in optimizer.state_dict()["state"].values() for x in own.values()]
    return [*(parameter.detach().cpu() for _, parameter in named), *state], optimizer


@pytest.mark.parametrize("stagger", ["cost", "none"])
@pytest.mark.parametrize(
    ("name", "stage"), [("soap", "eigenbasis"), ("soap_kl", "eigenbasis"), ("shampoo", "graft.direction.shampoo")]
)
def test_a_side_stream_gives_the_bits_of_results_at_once(
    name: str, stage: str, stagger: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    refresh = {"kind": "every", "steps": 4, "delay": 2, "stagger": stagger}
    declared = {"base": name, "set": {f"update.{stage}.refresh": refresh}}
    aside, _ = trained(declared)
    monkeypatch.delitem(delayed.SIDE_STREAMS, "cuda")
    at_once, _ = trained(declared)
    assert all(torch.equal(a, b) for a, b in zip(aside, at_once, strict=True))


@pytest.mark.parametrize("name", ["adamw", "muon", "soap_fitted", "shampoo"])
def test_replayed_graphs_have_the_bits_of_steps(name: str) -> None:
    """The optimizer compares each graph with a step itself; the name of a graph that it drops is no failure there."""
    _, optimizer = trained(name, overrides={"graph": True})
    assert any(piece.replay is not None for own in optimizer.param_sets for piece in own.graphs.pieces), optimizer


@pytest.mark.parametrize("recipe", ["adamw", "lion"])
def test_compiled_entries_have_the_same_bits_in_a_graph(recipe: str) -> None:
    declared = {"base": recipe, "compile": True, "failure": {"detect": "device"}}
    (plain, _), (captured, optimizer) = (trained(declared, overrides={"graph": graph}) for graph in (False, True))
    assert all(piece.replay is not None for own in optimizer.param_sets for piece in own.graphs.pieces), optimizer
    assert all(torch.equal(a, b) for a, b in zip(plain, captured, strict=True))


@pytest.mark.parametrize("name", ["adamw", "muon", "soap_fitted", "shampoo"])
def test_compiled_steps_are_those_of_the_formula(name: str) -> None:
    """Up to the order of sums, and products in bfloat16."""
    plain, _ = trained(name)
    paths = [f"{path}.compile".removeprefix(".") for path in eigengraft.load_recipe(name).rules()]
    compiled, optimizer = trained({"base": name, "set": dict.fromkeys(paths, True)})
    assert all(torch.allclose(a, b, rtol=0.05, atol=1e-3) for a, b in zip(plain, compiled, strict=True)), optimizer


@pytest.mark.parametrize("recipe", ["adamw", "soap", "muon"])
def test_released_gradients_make_the_ordinary_steps(recipe: str) -> None:
    found = []
    for released in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 8)).to("cuda")
        optimizer = eigengraft.compose(recipe, model, lr=1e-3)
        if released:
            eigengraft.release(model, optimizer)
        for step in range(8):
            model(torch.full((16, 32), 0.1 * step, device="cuda")).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append([parameter.detach().cpu() for parameter in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("recipe", ["adamw", "soap_fitted"])
def test_a_scaler_of_torch_skips_steps_that_overflow(recipe: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 8)).to("cuda")
    optimizer = eigengraft.compose(recipe, model, lr=1e-3)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**40)
    x, losses = torch.randn(64, 32, device="cuda"), []
    for _ in range(60):
        with torch.autocast("cuda", torch.float16):
            loss = model(x).float().square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(float(loss))
    taken = {int(own["step"]) for own in optimizer.state.values()}
    assert scaler.get_scale() < 2.0**40 and len(taken) == 1 and 0 < taken.pop() < 60
    assert losses[-1] < losses[0]
