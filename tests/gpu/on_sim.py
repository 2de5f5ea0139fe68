"""Whole training on the simulated accelerator that has backward: each function runs in a process of its own.

    python tests/gpu/on_sim.py NAME

Registering the device must come before the first backward of a process, and lasts as long as the process.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import eigengraft
from eigengraft.testing import accelerator

FUNCTIONS: dict[str, Callable[[torch.device], None]] = {}


def function(own: Callable[[torch.device], None]) -> Callable[[torch.device], None]:
    FUNCTIONS[own.__name__] = own
    return own


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 4))


Step = Callable[[nn.Module, Any, Tensor, Tensor], None]


def ordinary(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()


def trained(recipe: Any, place: torch.device | str, step: Step = ordinary, steps: int = 6) -> list[Tensor]:
    """The parameters after some steps; composed on the CPU, moved, and copied halfway."""
    model = network()
    optimizer = eigengraft.compose(recipe, model, lr=1e-2)
    model.to(place)
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        x, y = torch.randn(16, 6, generator=generator), torch.randint(4, (16,), generator=generator)
        step(model, optimizer, x.to(place), y.to(place))
    return [parameter.detach().cpu() for parameter in model.parameters()]


FUSED = 1e-6
"""Tolerance of recipes with Adam's chain: a CPU's fused kernel rounds the ends of tensors differently, and the ends are
updated in a buffer on a CPU alone."""


def require_same(recipe: Any, place: torch.device, step: Step = ordinary, tolerance: float = FUSED) -> None:
    ours, theirs = trained(recipe, "cpu", step), trained(recipe, place, step)
    difference = max(float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True))
    assert difference <= tolerance, f"{recipe}: {difference:g}"
    assert not any(torch.equal(a, b) for a, b in zip(ours, network().parameters(), strict=True))


@function
def training(place: torch.device) -> None:
    for recipe in ("adamw", "muon", "shampoo"):
        require_same(recipe, place)
    require_same("soap_fitted", place, tolerance=1e-5)  # diag(Q^T A Q) comes from R on a CPU, from products on a device


@function
def closures(place: torch.device) -> None:
    def step(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            return loss

        optimizer.step(closure)

    require_same("adamw", place, step)


@function
def autocast(place: torch.device) -> None:
    def step(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
        optimizer.zero_grad()
        with torch.autocast(x.device.type, dtype=torch.bfloat16):
            out = model(x)
        assert out.dtype == torch.bfloat16
        nn.functional.cross_entropy(out.float(), y).backward()
        optimizer.step()

    require_same("adamw", place, step)


@function
def grad_scaler(place: torch.device) -> None:
    scalers: dict[str, torch.amp.GradScaler] = {}

    def step(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
        kind = x.device.type
        scaler = scalers.setdefault(kind, torch.amp.GradScaler(kind, init_scale=8.0, growth_interval=2))
        optimizer.zero_grad()
        scaler.scale(nn.functional.cross_entropy(model(x), y)).backward()
        first = next(model.parameters())
        if int(optimizer.state[first]["step"]) == 3 and scaler.get_scale() == 16.0:  # once: then the scale is halved
            first.grad.fill_(torch.inf)
        if optimizer.recipe.name == "muon":
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()

    for recipe in ("adamw", "muon"):
        scalers.clear()
        require_same(recipe, place, step)
        scales = {kind: scaler.get_scale() for kind, scaler in scalers.items()}
        assert {*scales.values()} == {16.0}, (recipe, scales)


@function
def signals_of_hooks(place: torch.device) -> None:
    """Input and output matrices of linear layers, collected by hooks in forward and backward."""
    for recipe in ("newton_muon", "singd"):
        require_same(recipe, place, tolerance=1e-6)


@function
def signals_of_curvature(place: torch.device) -> None:
    def step(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
        eigengraft.hutchinson(optimizer, lambda: nn.functional.cross_entropy(model(x), y))
        ordinary(model, optimizer, x, y)

    require_same("sophia", place, step)


@function
def copies(place: torch.device) -> None:
    model = network().to(place)
    optimizer = eigengraft.compose("soap_fitted", model, lr=1e-2)
    x, y = torch.randn(4, 6).to(place), torch.tensor([0, 1, 2, 3]).to(place)
    ordinary(model, optimizer, x, y)
    again, other = copy.deepcopy((model, optimizer))
    for own in ((model, optimizer), (again, other)):
        ordinary(*own, x, y)
    assert all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(model.parameters(), again.parameters(), strict=True))


@function
def offloaded_state(place: torch.device) -> None:
    """A device whose module has no streams: the host waits for every copy."""
    roles = ("statistic", "basis", "first_moment", "second_moment")
    for to in ("cpu", "disk"):
        storage = {role: {"kind": "offload", "to": to, "min_elements": 1} for role in roles}
        ours = trained({"base": "soap_fitted", "storage": storage}, place)
        theirs = trained("soap_fitted", place)
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


if __name__ == "__main__":
    assert Path(eigengraft.__file__).is_file()
    with accelerator("sim") as run:
        FUNCTIONS[sys.argv[1]](run.device)
