"""Compare recipes with torch's optimizers on the inputs of torch's own optimizer tests.

    python tests/gpu/torch_inputs.py [--simulated]

`torch.testing._internal.common_optimizers` lists, for each optimizer, the options that torch's tests call it with. Both
sides make the same steps on a CUDA device, or on the simulated accelerator. One line of JSON for each input goes to
standard output: the largest difference of parameters as a share of the way that they went, or the reason why no recipe
does the same. That module of torch forbids changes of backend flags in its process, so this file is a script.
"""

from __future__ import annotations

import argparse
import json
import sys
import unittest
from collections.abc import Mapping
from contextlib import nullcontext
from types import ModuleType
from typing import Any

import torch
from torch.nn import Parameter

import eigengraft
from eigengraft.testing import accelerator

STEPS = 8
SHAPES = ((10, 5), (6, 12), (7,), (3, 2, 4))
RMSPROP = {"kind": "rms", "beta": 0.99, "bias_correction": False}
TOLERANCES = {"Muon": 0.05}
"""Largest difference as a share of the way that parameters went, where it is not 1e-5. torch's Muon rounds to bfloat16
in products, where the order of operations matters."""
NO_RECIPE = {
    "maximize": "`maximize` is refused: minimize the negative of the loss",
    "amsgrad": "no stage keeps the largest second moment",
    "centered": "torch's test sets `centered`, and no stage subtracts the square of the mean gradient",
    "beta2_decay": "the decay of Adafactor's statistics is a constant of the recipe's schedule",
    "d": "the clipping threshold is a field of another stage",
    "lr_decay": "use one of torch's schedulers",
    "initial_accumulator_value": "second moments begin at 0",
}
"""Options of torch that no recipe has, and why."""


def sgd(options: Mapping[str, Any]) -> Any:
    heavy_ball = {"beta": options.get("momentum", 0.0), "dampening": options.get("dampening", 0.0)}
    heavy_ball |= {"nesterov": options.get("nesterov", False), "undamped_start": "dampening" in options}
    update = {"kind": "heavy_ball", **heavy_ball} if heavy_ball["beta"] else "identity"
    return {"base": "sgd", "update": [update]}


def muon(options: Mapping[str, Any]) -> Any:
    solver = "update.spectral.solver"
    changes = {
        "momentum": "update.momentum.beta",
        "ns_steps": f"{solver}.steps",
        "ns_coefficients": f"{solver}.coefficients",
    }
    return {"base": "reference/muon", "set": {changes[key]: options[key] for key in changes if key in options}}


RECIPES: dict[str, Any] = {
    "SGD": sgd,
    "Adam": lambda options: "adam",
    "AdamW": lambda options: "adamw",
    "Adagrad": lambda options: {
        "update": [{"kind": "rms", "beta": 1.0, "eps": options.get("eps", 1e-10)}],
        "weight_decay": "l2",
    },
    "RMSprop": lambda options: {"update": [RMSPROP], "weight_decay": "l2"},
    "Muon": muon,
}
"""By the name of torch's class, a function of its options that returns the recipe."""


def difference(kind: str, made: Any, options: Mapping[str, Any], place: torch.device) -> float:
    """Return the largest difference of parameters after some steps, as a share of the way that they went."""
    generator = torch.Generator().manual_seed(0)
    shapes = [shape for shape in SHAPES if len(shape) == 2 or kind != "Muon"]
    start = [torch.randn(shape, generator=generator, dtype=torch.float64) / 4 for shape in shapes]
    theirs, ours = ([Parameter(x.clone().to(place)) for x in start] for _ in range(2))
    reference = made(theirs, **options)
    rates = {name: reference.param_groups[0][name] for name in ("lr", "weight_decay")}
    named = [(f"layers.{i}.weight", x) for i, x in enumerate(ours)]
    optimizer = eigengraft.Optimizer(named, {**_declared(RECIPES[kind](options)), "routes": []}, **rates)
    for _ in range(STEPS):
        for one, other in zip(theirs, ours, strict=True):
            one.grad = torch.randn(one.shape, generator=generator, dtype=torch.float64).to(place)
            other.grad = one.grad.clone()
        reference.step()
        optimizer.step()
    hosts = [[x.detach().cpu() for x in own] for own in (start, theirs, ours)]
    way = max(float((b - a).abs().max()) for a, b in zip(*hosts[:2], strict=True))
    return max(float((c - b).abs().max()) for b, c in zip(*hosts[1:], strict=True)) / way


def _declared(recipe: Any) -> dict[str, Any]:
    return {"base": recipe} if isinstance(recipe, str) else dict(recipe)


def inputs() -> list[tuple[str, Any, dict[str, Any], str]]:
    """Return (name of the class, class, options, description) of all inputs of torch's tests."""
    if "expecttest" not in sys.modules:
        try:
            import expecttest  # noqa: F401
        except ImportError:  # torch's file takes a base class from it, which nothing here uses
            stand_in: Any = ModuleType("expecttest")
            stand_in.TestCase = unittest.TestCase
            sys.modules["expecttest"] = stand_in
    from torch.testing._internal.common_optimizers import optim_db

    infos = [info for info in optim_db if info.optim_cls.__name__ in RECIPES]
    found = [(info.optim_cls, own) for info in infos for own in info.optim_inputs_func(device="cpu")]
    return [(cls.__name__, cls, dict(own.kwargs), own.desc) for cls, own in found]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--simulated", action="store_true", help="use the simulated accelerator")
    simulated, wrong = parser.parse_args().simulated, 0
    given = inputs()  # torch asks for properties of the device, which a simulated one does not have
    with accelerator("cuda") if simulated else nullcontext():
        for kind, made, options, about in given:
            row: dict[str, Any] = {"candidate": f"{kind}, {about}"}
            if reasons := [NO_RECIPE[key] for key in options if key in NO_RECIPE]:
                row |= {"left": reasons[0]}
            else:
                apart = difference(kind, made, options, torch.device("cuda:0"))
                row |= {"difference": apart, "equal": apart <= TOLERANCES.get(kind, 1e-5)}
                wrong += not row["equal"]
            sys.stdout.write(json.dumps(row) + "\n")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
