"""Thirty steps of recipes beside optimizers of public packages: `python tests/peers/compare.py` prints the distances.

Needs pytorch-optimizer, heavyball, schedulefree and prodigyopt, none of which the project depends on. Both sides start
from the same parameters and take the gradients of the same noisy quadratic loss at their own parameters, in float64
where the package allows it.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eigengraft import Optimizer, load_recipe

STEPS = 30
RESULTS = Path(__file__).with_name("results.json")
SHAPES: Mapping[str, tuple[int, ...]] = {"up.weight": (8, 6), "down.weight": (6, 9), "bias": (7,)}
MATRICES = {"up.weight": (8, 6), "down.weight": (6, 9)}
EXPERTS = {"experts": (3, 6, 20)}


@dataclass(frozen=True)
class Comparison:
    """A recipe beside one public optimizer.

    recipe, overrides: ours. package, name, options: theirs.
    shapes: of the parameters. lr: of both sides.
    evaluated: whether both show what they evaluate at the end.
    """

    recipe: Any
    package: str
    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    overrides: Sequence[str] = ()
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=lambda: SHAPES)
    lr: float = 0.01
    dtype: torch.dtype = torch.float64
    evaluated: bool = False


NO_DECAY = "weight_decay.rate=0"
PLAIN = {"multi_tensor": False, "compile_step": False, "gradient_clipping": None, "update_clipping": None}
WITHOUT_FIRST = [NO_DECAY, "routes=[]"]
LONG = ["total_steps=30", NO_DECAY]
POLAR = {"kind": "newton_schulz", "steps": 5, "coefficients": "jordan", "precision": "bfloat16"}
ASPECT = [
    {"kind": "momentum", "beta": 0.95, "nesterov": True, "bias_correction": False},
    {"kind": "spectral", "solver": POLAR},
    {"kind": "scale", "rule": "aspect"},
]
MUON = {"update": ASPECT, "weight_decay": {"kind": "decoupled", "rate": 0.0}}
COMPARISONS: dict[str, Comparison] = {
    "lion, pytorch-optimizer": Comparison("lion", "pytorch_optimizer", "Lion", {}, [NO_DECAY]),
    "adopt, pytorch-optimizer": Comparison("adopt", "pytorch_optimizer", "ADOPT"),
    "adopt with the clip of one step before, pytorch-optimizer": Comparison(
        "adopt", "pytorch_optimizer", "ADOPT", {"clip_lambda": lambda step: (step - 1) ** 0.25}
    ),
    "adopt, heavyball": Comparison(
        "adopt",
        "heavyball",
        "ADOPT",
        {**PLAIN, "betas": (0.9, 0.9999), "eps": 1e-6, "beta2_scale": None},
        dtype=torch.float32,
    ),
    "mars, pytorch-optimizer": Comparison(
        "mars",
        "pytorch_optimizer",
        "MARS",
        {"lr_1d": 0.01, "weight_decay_1d": 0.0},
        [NO_DECAY],
    ),
    "ademamix, pytorch-optimizer": Comparison("ademamix", "pytorch_optimizer", "AdEMAMix", {"t_alpha_beta3": 30}, LONG),
    "ademamix, heavyball": Comparison(
        "ademamix",
        "heavyball",
        "AdEMAMix",
        {**PLAIN, "alpha": 5.0, "beta3_warmup": 30, "alpha_warmup": 30},
        LONG,
        dtype=torch.float32,
    ),
    "prodigy, prodigyopt": Comparison("prodigy", "prodigyopt", "Prodigy", {"eps": 1e-8}, lr=1.0),
    "prodigy without eps, prodigyopt": Comparison(
        "prodigy", "prodigyopt", "Prodigy", {"eps": 1e-200}, ["update.prodigy.inner.rms.eps=1e-300"], lr=1.0
    ),
    "prodigy, pytorch-optimizer": Comparison("prodigy", "pytorch_optimizer", "Prodigy", {}, lr=1.0),
    "schedule_free_adamw, schedulefree": Comparison(
        "schedule_free_adamw", "schedulefree", "AdamWScheduleFree", {"foreach": False}, [NO_DECAY], evaluated=True
    ),
    "schedule_free_adamw, pytorch-optimizer": Comparison(
        "schedule_free_adamw", "pytorch_optimizer", "ScheduleFreeAdamW", {}, [NO_DECAY], evaluated=True
    ),
    "muon, torch": Comparison(
        "muon", "torch.optim", "Muon", {"weight_decay": 0.0, "adjust_lr_fn": "match_rms_adamw"}, WITHOUT_FIRST, MATRICES
    ),
    "muon, pytorch-optimizer": Comparison(MUON, "pytorch_optimizer", "Muon", {}, (), MATRICES),
    "muon on experts, pytorch-optimizer": Comparison(MUON, "pytorch_optimizer", "Muon", {}, (), EXPERTS),
    "muon on experts as one matrix, pytorch-optimizer": Comparison(
        {**MUON, "view": "whole", "blocking": {"merge": 4096, "min_axes": 2}},
        "pytorch_optimizer",
        "Muon",
        {},
        (),
        EXPERTS,
    ),
}


def start(shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype) -> dict[str, torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    drawn = {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}
    return {name: torch.nn.Parameter(value.to(dtype)) for name, value in drawn.items()}


def give(parameters: Mapping[str, torch.nn.Parameter], step: int) -> None:
    """Gradients of sum(h (w - t)^2) / 2 with curvatures h from 0.1 to 1 and targets t that change from step to step."""
    generator = torch.Generator().manual_seed(1 + step)
    for parameter in parameters.values():
        target = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        h = torch.linspace(0.1, 1, parameter.numel(), dtype=torch.float64).reshape(parameter.shape)
        parameter.grad = (h * (parameter.detach().double() - target)).to(parameter.dtype)


def follow(optimizer: Any, parameters: Mapping[str, torch.nn.Parameter], evaluated: bool) -> Tensor:
    """All parameters after every step, `[STEPS, numbers]`; the last ones as they are evaluated, if asked for."""
    path = []
    if evaluated:
        optimizer.train()
    for step in range(STEPS):
        give(parameters, step)
        optimizer.step()
        path.append(torch.cat([p.detach().flatten().double() for p in parameters.values()]))
    if evaluated:
        optimizer.eval()
        path[-1] = torch.cat([p.detach().flatten().double() for p in parameters.values()])
    return torch.stack(path)


def distance(one: Comparison) -> float:
    """The largest difference of a number after any step, over the largest distance that a number has moved."""
    ours, theirs = start(one.shapes, one.dtype), start(one.shapes, one.dtype)
    made: Callable[..., Any] = getattr(importlib.import_module(one.package), one.name)
    recipe = load_recipe(one.recipe, list(one.overrides))
    mine = follow(Optimizer(list(ours.items()), recipe, lr=one.lr), ours, one.evaluated)
    given: list[Any] = list(theirs.values())
    grouped = (
        [{"params": given, "use_muon": True}] if one.package == "pytorch_optimizer" and one.name == "Muon" else given
    )
    peer = made(grouped, lr=one.lr, **one.options)
    other = follow(peer, theirs, one.evaluated)
    moved = other - torch.cat([p.detach().flatten().double() for p in start(one.shapes, one.dtype).values()])
    return float((mine - other).abs().max() / moved.abs().max())


def main() -> None:
    """Prints and writes the distances."""
    found = {}
    for name, one in COMPARISONS.items():
        found[name] = float(f"{distance(one):.2g}")
        sys.stdout.write(f"{name:60} {found[name]:.2g}\n")
    RESULTS.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
