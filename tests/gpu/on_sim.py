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
from eigengraft import MaxLogits
from eigengraft.testing import accelerator

FUNCTIONS: dict[str, Callable[[torch.device], None]] = {}


def function(own: Callable[[torch.device], None]) -> Callable[[torch.device], None]:
    FUNCTIONS[own.__name__] = own
    return own


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 4))


class Heads(nn.Module):
    """Causal attention of two heads, whose largest logits are recorded, and a head, whose inputs are; in float64."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.v = (nn.Linear(6, 8, bias=False) for _ in range(3))
        self.lm_head, self.max_logits = nn.Linear(8, 4, bias=False), MaxLogits("q.weight", "k.weight", causal=True)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (own(x.double()).unflatten(-1, (2, 4)).transpose(0, 1)[None] for own in (self.q, self.k, self.v))
        self.max_logits(q, k)
        later = torch.ones(len(x), len(x), dtype=torch.bool, device=x.device).triu(1)
        mixed = (q @ k.mT / 2).masked_fill(later, -torch.inf).softmax(-1) @ v
        result: Tensor = self.lm_head(mixed[0].transpose(0, 1).flatten(1))
        return result


Step = Callable[[nn.Module, Any, Tensor, Tensor], None]


def ordinary(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()


def trained(
    recipe: Any,
    place: torch.device | str,
    step: Step = ordinary,
    steps: int = 6,
    make: Callable[[], nn.Module] = network,
    moved: bool = True,
) -> list[Tensor]:
    """The parameters after some steps. moved: whether the model is composed on the CPU and then moved."""
    model = make() if moved else make().to(place)
    optimizer = eigengraft.compose(recipe, model, lr=1e-2)
    if moved:
        model.to(place)
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        x, y = torch.randn(16, 6, generator=generator), torch.randint(4, (16,), generator=generator)
        step(model, optimizer, x.to(place), y.to(place))
    return [parameter.detach().cpu() for parameter in model.parameters()]


FUSED = 1e-6
"""Tolerance of recipes with Adam's chain: a CPU's fused kernel rounds the ends of tensors differently, and the ends are
updated in a buffer on a CPU alone."""


def require_same(
    recipe: Any,
    place: torch.device,
    step: Step = ordinary,
    tolerance: float = FUSED,
    make: Callable[[], nn.Module] = network,
    moved: bool = True,
) -> None:
    ours, theirs = (trained(recipe, where, step, make=make, moved=moved) for where in ("cpu", place))
    difference = largest(ours, theirs)
    assert difference <= tolerance, f"{recipe}: {difference:g}"
    assert not any(torch.equal(a, b) for a, b in zip(ours, make().parameters(), strict=True))


def largest(ours: list[Tensor], theirs: list[Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True))


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
def signals_of_heads(place: torch.device) -> None:
    """Logits of attention that are above the bound of the recipe, and inputs of the head, for K-FAC from step 3 on."""
    clip = {"base": "muonclip", "set": {"constraints.qk_clip.bound": 0.5}}
    kfac = "routes.head.update.transform.before.graft.direction.sum.paths"
    rise = [{"from": 0.0, "to": 0.0, "steps": 2}, {"from": 0.5, "to": 0.5, "steps": 1}]
    refresh = {"kind": "every", "steps": 2, "start": 3, "stagger": "none"}
    changes = {f"{kfac}.kfac.weight": rise, f"{kfac}.kfac.stages.graft.direction.shampoo.refresh": refresh}
    for changed, recipe in ((clip, "muonclip"), ({"base": "track3_kfac", "set": changes}, "track3_kfac")):
        require_same(changed, place, tolerance=1e-12, make=Heads)  # rounding of float64, of an orthonormalization
        found = (trained(own, place, make=Heads) for own in (changed, recipe))
        assert largest(*found) > 1e-5, recipe  # which has a higher bound and no K-FAC yet


@function
def signals_of_micro_batches(place: torch.device) -> None:
    """The variance of gradients, which hooks of parameters take from two backward passes.

    A model moves to the simulated device by new tensors, which have no hooks, and is therefore composed there.
    """

    def step(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
        optimizer.zero_grad()
        for half in (slice(0, 8), slice(8, 16)):
            (nn.functional.cross_entropy(model(x[half]), y[half]) / 2).backward()
        optimizer.step()

    require_same("isomuon", place, step, moved=False)


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
