"""What is told of updates that are not compiled or not in chunks, and of products in bfloat16 on other machines."""

from typing import Any

import pytest
import torch
from torch import nn

from eigengraft import Optimizer
from eigengraft.optimizers.step import traced


def told(recipe: Any, *held: torch.Tensor) -> list[tuple[str, ...]]:
    optimizer = Optimizer([(f"p{i}", nn.Parameter(tensor)) for i, tensor in enumerate(held)], recipe)
    return [row.fallbacks for row in optimizer.routing_table()]


def test_the_reason_is_given_for_parameters_that_are_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traced, "generate", lambda graph, symbolic: lambda tensors: None)
    monkeypatch.setattr(traced, "_PROGRAMS", {})
    nesterov = {"base": "adamw", "set": {"update.momentum.nesterov": True}, "compile": True}
    assert told(nesterov, torch.zeros(4, 3), torch.zeros(()), torch.zeros(4, 3).mT) == [
        (),
        ("not compiled: a single number would need a kernel of its own",),
        ("not compiled: it is not contiguous",),
    ]
    assert told({**nesterov, "blocking": {"size": 2}}, torch.zeros(4, 4)) == [()]


def test_compile_of_a_recipe_is_not_for_parameters_of_routes() -> None:
    route = {"name": "all", "match": {"name": "p"}, "update": ["sign"]}
    recipe = {"update": ["identity"], "compile": True, "routes": [route]}
    ((why,),) = told(recipe, torch.zeros(4, 3))
    assert why.startswith("not compiled: ") and "routes.all.compile" in why
    fused = {**route, "update": ["momentum", "rms"]}
    assert told({**recipe, "routes": [fused]}, torch.zeros(4, 3)) == [()]
    assert told({**recipe, "compile": False}, torch.zeros(4, 3)) == [()]


def test_the_reason_is_given_if_adams_chain_is_not_fused() -> None:
    apart = "not fused: a single number has an owner where several ranks hold it"
    assert told("adamw", torch.zeros(4, 3), torch.zeros(()), torch.zeros(4, 3).mT) == [(), (apart,), ()]
    ramp = {"from": 0.9, "to": 0.99, "steps": 5}
    for changes, why in (
        ({"weight_decay": "cautious"}, "its weight decay is cautious"),
        ({"set": {"update.momentum.beta": ramp}}, "numbers of its stages are scheduled"),
        (
            {"storage": {"second_moment": {"kind": "int8", "min_elements": 1}}},
            "its state is coded, or more than two moments",
        ),
        ({"averaging": "ema"}, "an averaging is in the recipe"),
        ({"blocking": {"size": 2}}, "its blocks are parts of parameters"),
        ({"set": {"update.rms.eps": ramp}}, "numbers of its stages are scheduled"),
    ):
        assert told({"base": "adamw", **changes}, torch.zeros(4, 3)) == [(f"not fused: {why}",)]
    assert told({"base": "adamw", "failure": {"detect": "device"}}, torch.zeros(4, 3)) == [()]
    for other in ({"update.momentum.nesterov": True}, {"update.rms.bias_correction": False}, {"update.rms.per": "row"}):
        assert told({"base": "adamw", "set": other}, torch.zeros(4, 3)) == [()]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({}, ()),
        ({"averaging": "ema"}, ("not in chunks: an averaging is in the recipe",)),
        ({"constraints": "rounding"}, ("not in chunks: it has constraints",)),
        ({"storage": {"first_moment": "int8"}}, ("not in chunks: its state is coded",)),
        ({"blocking": {"size": 256}}, ("not in chunks: its blocks are parts of parameters",)),
    ],
    ids=str,
)
def test_the_reason_is_given_for_large_parameters_that_are_not_in_chunks(changes: Any, why: tuple[str, ...]) -> None:
    assert told({"base": "lion", **changes}, torch.zeros(512, 512), torch.zeros(8, 8)) == [why, ()]


def test_a_block_of_odd_size_is_in_chunks_only_if_it_is_alone() -> None:
    reason = "not in chunks: the size of its blocks is no multiple of 64, and it has several"
    assert told("lion", torch.zeros(183, 183)) == [()]
    assert told("lion", torch.zeros(183, 183), torch.zeros(183, 183)) == [(reason,), (reason,)]


def test_no_reason_is_given_for_updates_that_never_run_in_chunks() -> None:
    assert told("soap_fitted", torch.zeros(320, 320)) == [()]


def test_slow_products_in_bfloat16_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def lines(recipe: Any) -> list[str]:
        return Optimizer([("w", nn.Parameter(torch.zeros(4, 4)))], recipe).slow_products()

    recipe = {"base": "soap_fitted", "set": {"update.eigenbasis.precision": "bfloat16"}}
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    (line,) = lines(recipe)
    assert line.startswith("update.eigenbasis.precision: bfloat16 ") and " cpu " in line
    assert lines("soap_fitted") == []
    (line,) = lines("muon")
    assert line.startswith("update.spectral.solver.precision: ")
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    assert lines(recipe) == []
