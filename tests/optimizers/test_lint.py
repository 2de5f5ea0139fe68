"""Warnings of `compose`: what has no effect or goes wrong is named with a remedy, and an id silences it."""

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from eigengraft import compose
from eigengraft.optimizers.models import lint
from eigengraft.optimizers.models.lint import Composition, known_checks, recipe_check

from ..refusals import refused


def model(width: int = 64) -> nn.Module:
    """A matrix of width^2 numbers and a head."""
    return nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 10))


def warned(recipe: Any, own: nn.Module, **options: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        compose(recipe, own, **options)
    return [str(one.message) for one in found if one.category is UserWarning]


def int8(least: int = 4096) -> dict[str, Any]:
    return {"kind": "int8", "min_elements": least}


def test_a_storage_that_stores_nothing_is_named_with_the_largest_slot() -> None:
    storage = {"storage": {"statistic": int8(), "first_moment": int8(1)}}
    (message,) = warned("soap_fitted", model(32), overrides=storage)
    assert message.startswith("storage: nothing of this model is stored by statistic; update.eigenbasis/factor.")
    assert "at least 4096 elements" in message and "(32, 32)" in message and message.endswith("[storage-unused]")
    assert warned("soap_fitted", model(64), overrides=storage) == []
    assert warned("soap_fitted", model(32), overrides={"storage": {"statistic": int8(1)}}) == []


def test_entries_by_stage_and_by_slot_are_judged_by_the_slots_that_they_decide_on() -> None:
    """The entry of the slot decides on it, so that the role has no slot left and is not asked for."""
    named = {"update.eigenbasis.inner.momentum/m": int8(1)}
    assert (
        warned("soap_fitted", model(32), overrides={"storage": {**named, "first_moment": int8(1)}, "routes": []}) == []
    )
    stage = {"storage": {"update.eigenbasis.inner.momentum": int8()}}
    (message,) = warned("soap_fitted", model(32), overrides=stage)
    assert "stored by update.eigenbasis.inner.momentum;" in message


@pytest.mark.parametrize(
    ("format", "warns"),
    [
        ({"kind": "int8"}, True),
        ({"kind": "uint8"}, False),
        ({"kind": "uint8", "compand": "sqrt"}, False),
        ({"kind": "int16"}, False),
        ({"kind": "bf16"}, False),
        ({"kind": "codebook8", "codebook": "dynamic_unsigned"}, False),
    ],
)
def test_second_moments_that_are_rounded_to_zero_are_named(format: dict[str, Any], warns: bool) -> None:
    found = warned("adamw", model(64), overrides={"storage": {"second_moment": format}})
    assert [message.rpartition(" ")[2] for message in found] == ["[storage-rounds-to-zero]"] * warns
    if warns:
        assert "update.rms/v" in found[0] and "dynamic_unsigned" in found[0]


def test_the_remedies_train_where_linear_codes_do_not() -> None:
    """Gradients of two sizes, the small ones 0 in the last step: with v = 0 a weight moves by its momentum over eps."""
    sizes = {}
    for kind in ("int8", "uint8"):
        weight = nn.Parameter(torch.zeros(64, 64))
        recipe = {"base": "adam", "routes": [], "storage": {"second_moment": {"kind": kind}}}
        optimizer = compose(recipe, [("weight", weight)], lr=1.0)
        for small in (1e-3, 1e-3, 0.0):
            weight.grad = torch.full((64, 64), small)
            weight.grad[:, 0] = 1.0
            optimizer.step()
        sizes[kind] = float(weight.detach().abs().max())
    assert sizes["int8"] > 1e3 and sizes["uint8"] < 10


def test_schedules_beyond_the_run_are_named() -> None:
    schedule = {"update.momentum.beta": [{"from": 0.8, "to": 0.95, "steps": 300}]}
    (message,) = warned("adamw", model(), overrides=schedule, steps=200)
    assert message.startswith("update.momentum.beta: ") and "300 steps and the run has 200" in message
    assert message.endswith("[schedule-beyond-run]")
    assert warned("adamw", model(), overrides=schedule, steps=300) == warned("adamw", model(), overrides=schedule) == []


def test_an_id_silences_its_warning_alone_and_an_unknown_id_is_refused() -> None:
    both = {"storage": {"second_moment": int8(), "first_moment": int8(10**9)}}
    ids = ["storage-unused", "storage-rounds-to-zero"]
    assert [message.rpartition(" ")[2].strip("[]") for message in warned("adamw", model(64), overrides=both)] == ids
    for silent, left in (ids, ids[::-1]):
        (message,) = warned("adamw", model(64), overrides=both, silence=[silent])
        assert message.endswith(f"[{left}]")
    with refused(ValueError, "silence", "storage"):
        compose("adamw", model(), silence=["storage"])


def test_a_check_of_ones_own_runs_beside_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lint, "_CHECKS", dict(lint._CHECKS))

    @recipe_check("no-decay")
    def no_decay(composed: Composition) -> Iterator[str]:
        if composed.optimizer.param_groups[0]["weight_decay"] == 0:
            yield "weight_decay: 0 overfits here; set a rate"

    assert warned("adamw", model(), weight_decay=0.0) == ["weight_decay: 0 overfits here; set a rate [no-decay]"]
    assert "no-decay" in known_checks() and warned("adamw", model(), weight_decay=0.1) == []


@pytest.mark.parametrize("recipe", ["soap_int8", "adamw_8bit", "shampoo_4bit", "muon_8bit"])
def test_shipped_storage_is_in_order_on_layers_of_usual_size(recipe: str) -> None:
    assert warned(recipe, model(256)) == []
