"""Warnings of `compose`: what has no effect or goes wrong is named with a remedy, and an id silences it."""

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from eigengraft import MaxLogits, Optimizer, compose, shipped_recipes
from eigengraft.errors import RecipeError
from eigengraft.optimizers import grouped
from eigengraft.optimizers.models import lint
from eigengraft.optimizers.models.lint import Composition, known_checks, recipe_check

from ...refusals import check_said, refused


def model(width: int = 64) -> nn.Module:
    """A matrix of width^2 numbers and a head."""
    return nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 10))


def warned(recipe: Any, own: Any, **options: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        compose(recipe, own, **options)
    return [str(one.message) for one in found if one.category is UserWarning]


def int8(least: int = 4096) -> dict[str, Any]:
    return {"kind": "int8", "min_elements": least}


def test_a_storage_that_stores_nothing_is_named_with_the_largest_slot() -> None:
    storage = {"storage": {"statistic": int8(), "first_moment": int8(1)}}
    (message,) = warned("soap_fitted", model(32), overrides=storage)
    check_said(message, "storage", "statistic", "update.eigenbasis/factor", 4096, "(32, 32)")
    assert message.endswith("[storage-unused]")
    assert warned("soap_fitted", model(64), overrides=storage) == []
    assert warned("soap_fitted", model(32), overrides={"storage": {"statistic": int8(1)}}) == []


def test_vectors_that_a_stage_for_matrices_normalizes_are_named() -> None:
    bare = {"update": ["momentum", "spectral"], "routes": []}
    (message,) = warned(bare, model())
    check_said(message, "update.spectral", "0.bias", "2.bias", "routes: default")
    assert message.endswith("[vectors-normalized]")
    assert warned({**bare, "routes": "default"}, model()) == []
    assert warned(bare, nn.Linear(8, 8, bias=False)) == []
    assert warned({"update": ["momentum", "rms"], "routes": []}, model()) == []


def test_entries_by_stage_and_by_slot_are_judged_by_the_slots_that_they_decide_on() -> None:
    """The entry of the slot decides on it, so that the role has no slot left and is not asked for."""
    named = {"update.eigenbasis.inner.momentum/m": int8(1)}
    assert (
        warned("soap_fitted", model(32), overrides={"storage": {**named, "first_moment": int8(1)}, "routes": []}) == []
    )
    stage = {"storage": {"update.eigenbasis.inner.momentum": int8()}}
    (message,) = warned("soap_fitted", model(32), overrides=stage)
    check_said(message, "storage", "update.eigenbasis.inner.momentum")


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


def test_a_learning_rate_of_0_is_named() -> None:
    (message,) = warned("adamw", model(), lr=0.0)
    check_said(message, "lr", 0.001)
    assert message.endswith("[lr-zero]")
    assert warned("adamw", model(), lr=1e-9) == warned("adamw", model(), lr=0.0, silence=["lr-zero"]) == []


def test_a_route_that_takes_every_parameter_is_named() -> None:
    rms = {"update": [{"kind": "rms"}]}
    (message,) = warned({"update": "momentum", "routes": [{"name": "rest", **rms}]}, model())
    check_said(message, "routes.rest", "match")
    assert message.endswith("[route-takes-all]")
    named = {"update": "momentum", "routes": [{"name": "rest", "match": {"name": "0.*"}, **rms}]}
    assert warned(named, model()) == []


def test_trainable_parameters_in_no_group_are_named() -> None:
    net = model()
    first, *others = net.parameters()
    (message,) = warned("adamw", grouped(net, [{"params": others}]))
    check_said(message, "0.weight")
    assert message.endswith("[parameters-left]") and "0.bias" not in message
    first.requires_grad_(requires_grad=False)
    assert warned("adamw", grouped(net, [{"params": others}])) == []
    assert warned("adamw", grouped(net, None)) == warned("adamw", net) == []


def test_a_model_without_recorded_logits_is_named() -> None:
    (message,) = warned("muonclip", model())
    check_said(message, "constraints.qk_clip", "max_logit", "MaxLogits")
    assert message.endswith("[logits-missing]")
    attention = nn.Sequential(*model(), layer := nn.Linear(8, 8))
    layer.max_logits = MaxLogits("weight", "weight")
    assert warned("muonclip", attention) == []
    assert warned("muonclip", model().named_parameters(), silence=["head-unclear"]) == []  # logits may come later


def test_schedules_beyond_the_run_are_named() -> None:
    schedule = {"update.momentum.beta": [{"from": 0.8, "to": 0.95, "steps": 300}]}
    (message,) = warned("adamw", model(), overrides=schedule, steps=200)
    check_said(message, "update.momentum.beta", 300, 200)
    assert message.endswith("[schedule-beyond-run]")
    assert warned("adamw", model(), overrides=schedule, steps=300) == warned("adamw", model(), overrides=schedule) == []
    mean = {"weight": 1.0, "beta": schedule["update.momentum.beta"]}
    mixture = {"update.momentum": {"kind": "momentum_mixture", "means": [mean]}}
    (message,) = warned("adamw", model(), overrides=mixture, steps=200)
    check_said(message, "update.momentum_mixture.means.0.beta", 300, 200)


def test_the_length_of_the_run_is_that_of_fractions() -> None:
    schedule = {"update.momentum.beta": [{"from": 0.5, "to": 0.9, "fraction": 0.5}]}
    for overrides, total in ((schedule, 8), ({**schedule, "total_steps": 4}, 4)):
        assert compose("adamw", model(), overrides=overrides, steps=8).recipe.total_steps == total
    assert compose("adamw", model(), steps=8).recipe.total_steps is None
    with refused(ValueError, "update.momentum.beta", "total_steps"):
        compose("adamw", model(), overrides=schedule)


@pytest.mark.parametrize(
    ("overrides", "steps", "total", "data"),
    [
        ({}, None, 3250, (3250,)),
        ({}, 8, 8, ()),
        ({"total_steps": 4}, None, 4, ()),
        ({"total_steps": 4}, 8, 4, (4, 8, "total_steps: null")),
        ({"total_steps": 8}, 8, 8, ()),
    ],
)
def test_a_recipe_for_a_run_of_another_length_is_named(
    overrides: dict[str, int], steps: int | None, total: int, data: tuple[object, ...]
) -> None:
    found = warned("bimaxwell_muon", model(), overrides=overrides, steps=steps)
    assert compose("bimaxwell_muon", model(), overrides=overrides, steps=steps).recipe.total_steps == total
    assert len(found) == bool(data), found
    if data:
        check_said(found[0], "update.momentum_mixture.means.0.beta", *data)
        assert found[0].endswith("[run-length]")


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


NEW = ("whitening-after-graft", "clip-unused", "decay-twice", "schedule-beyond-run")


def said(recipe: Any, name: str, *data: object, own: nn.Module | None = None) -> None:
    """Check that one warning with this id and these data comes, or none if there are no data."""
    found = [message for message in warned(recipe, own or model(32)) if message.endswith(f"[{name}]")]
    assert len(found) == bool(data), found
    if data:
        check_said(found[0], *data)


def grafted(magnitude: Any, *after: Any) -> dict[str, Any]:
    return {"update": [{"kind": "graft", "direction": {"kind": "spectral"}, "magnitude": magnitude}, *after]}


@pytest.mark.parametrize("after", ["rms", "shampoo", "sign", "spectral", "normalize", "standardize"])
def test_what_whitens_after_a_graft_is_named(after: str) -> None:
    recipe = grafted({"kind": "rms"}, {"kind": "momentum"}, {"kind": after, "name": "last"})
    said(recipe, NEW[0], "update.last", "update.graft", "direction")


@pytest.mark.parametrize(
    "recipe",
    [
        grafted({"kind": "rms"}, {"kind": "momentum"}, {"kind": "scale", "factor": 2.0}),
        grafted({"kind": "rms"}, {"kind": "normalize", "rule": "norm_preserving"}),
        grafted({"kind": "rms"}, {"kind": "eigenbasis", "inner": [{"kind": "momentum"}]}),
        grafted({"kind": "identity"}, {"kind": "momentum"}, {"kind": "rms"}),
        {"update": [{"kind": "rms"}, {"kind": "sign"}, *grafted({"kind": "rms"})["update"]]},
    ],
)
def test_what_keeps_the_norm_of_a_graft_is_not(recipe: Any) -> None:
    said(recipe, NEW[0])


def test_a_chain_inside_a_stage_is_checked_too() -> None:
    inner = grafted({"kind": "rms"}, {"kind": "sign"})["update"]
    said({"update": [{"kind": "eigenbasis", "inner": inner}]}, NEW[0], "update.eigenbasis.inner.sign")


@pytest.mark.parametrize(
    ("chain", "data"),
    [
        ([{"kind": "clip_norm"}, {"kind": "spectral"}], ("update.clip_norm", "spectral")),
        ([{"kind": "clip_norm", "per": "model"}, {"kind": "sign"}], ("update.clip_norm", "sign")),
        ([{"kind": "momentum"}, {"kind": "clip_rms"}, {"kind": "normalize"}], ("update.clip_rms", "normalize")),
        ([{"kind": "spectral"}, {"kind": "clip_norm", "max_norm": 20.0}], ("update.clip_norm", "5.66", "20")),
        ([{"kind": "spectral"}, {"kind": "scale", "factor": 4.0}, {"kind": "clip_norm", "max_norm": 20.0}], ()),
        ([{"kind": "spectral"}, {"kind": "clip_norm", "max_norm": 5.0}], ()),
        ([{"kind": "spectral"}, {"kind": "clip_norm", "max_norm": 20.0, "per": "parameter"}], ()),
        ([{"kind": "clip_norm"}, {"kind": "momentum"}, {"kind": "spectral"}], ()),
        ([{"kind": "clip_norm"}, {"kind": "spectral", "nuclear_norm": True}], ()),
        ([{"kind": "clip_norm"}, {"kind": "momentum"}, {"kind": "rms"}], ()),
        ([{"kind": "momentum"}, {"kind": "rms"}, {"kind": "clip_rms", "threshold": 3.0}], ()),
    ],
)
def test_a_clip_that_cannot_clip_is_named(chain: list[Any], data: tuple[str, ...]) -> None:
    said({"update": chain}, NEW[1], *data)


def test_a_clip_of_which_one_block_is_in_reach_is_not() -> None:
    """The norm of a polar factor is at most the root of the shorter side: 4 for one layer, 1 for the bias."""
    wide = nn.Sequential(nn.Linear(16, 64), nn.Linear(64, 64, bias=False))
    chain = [{"kind": "spectral"}, {"kind": "clip_norm", "max_norm": 7.0}]
    said({"update": chain}, NEW[1], own=wide)
    said({"update": chain}, NEW[1], "update.clip_norm", own=wide[0])


def test_a_clip_that_cannot_clip_changes_no_bit() -> None:
    """The claim of the warnings, on gradients of several sizes."""
    for chain in ([{"kind": "spectral"}], [{"kind": "momentum"}, {"kind": "sign"}]):
        clip = {"kind": "clip_norm", "max_norm": 1e-2 if chain[0]["kind"] == "momentum" else 20.0}
        place = -1 if chain[0]["kind"] == "momentum" else len(chain)
        found = []
        for update in (chain, [*chain[:place], clip, *chain[place:]]):
            weight = nn.Parameter(torch.zeros(8, 8))
            optimizer = Optimizer([("weight", weight)], {"update": update}, lr=0.1)
            for step in range(3):
                weight.grad = torch.randn(8, 8, generator=torch.Generator().manual_seed(step)) * 10.0**step
                optimizer.step()
            found.append(weight.detach().clone())
        assert torch.equal(*found)


LATE = {"update": [{"kind": "momentum"}], "constraints": [{"kind": "late_decay", "rate": 0.05}]}


def test_decay_by_the_group_or_the_route_and_by_a_constraint_is_named() -> None:
    decay = {"weight_decay": {"kind": "decoupled", "rate": 0.1}}
    said(LATE | decay, NEW[2], "constraints.late_decay", "0.weight", "weight_decay", 0.1)
    said(LATE | {"weight_decay": {"kind": "l2", "rate": 0.1}}, NEW[2], "constraints.late_decay")
    said(LATE, NEW[2])
    said({"update": [{"kind": "momentum"}], "constraints": [{"kind": "radius_pin"}]} | decay, NEW[2])
    route = {"name": "head", "match": {"role": "head"}, **LATE, "weight_decay": {"kind": "cautious", "rate": 0.2}}
    whole = {"update": [{"kind": "momentum"}], "routes": [route]}
    said(whole, NEW[2], "routes.head.constraints.late_decay", "routes.head.weight_decay", 0.2)
    assert any("decay-twice" in message for message in warned(LATE, model(), weight_decay=0.3))


@pytest.mark.parametrize("recipe", ["lora_rite", "lora_muon"])
def test_a_recipe_for_pairs_without_a_pair_is_named(recipe: str) -> None:
    (message,) = warned(recipe, model())
    check_said(message, "routes.pairs", "lora_A", "lora_B")
    assert message.endswith("[pairs-unmatched]")
    assert warned(recipe, model(), silence=["pairs-unmatched"]) == [] == warned("adamw", model())


@pytest.mark.slow
def test_no_shipped_recipe_has_these_faults() -> None:
    pair = nn.Sequential()
    for name, shape in (("lora_A", (4, 32)), ("lora_B", (32, 4))):
        pair.add_module(name, nn.Linear(*shape[::-1], bias=False))
    asked = 0
    for name in shipped_recipes():
        for own in (model(32), pair):
            try:
                found = warned(name, own)
            except (RecipeError, ValueError):  # recipes for pairs alone, and a pair's views that a recipe refuses
                continue
            asked += 1
            assert [message for message in found if message.endswith(tuple(f"[{own}]" for own in NEW))] == [], name
    assert asked > len(shipped_recipes()) - 5


def test_parameters_without_their_model_get_a_warning_of_a_head_that_is_not_found() -> None:
    deep = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 10))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        Optimizer(deep.named_parameters(), recipe="muon")
    (message,) = (str(one.message) for one in caught if one.category is UserWarning)
    check_said(message, "2.weight", "default")
    (same,) = warned("muon", deep.named_parameters())  # type: ignore[arg-type]
    assert same == f"{message} [head-unclear]"
    assert warned("muon", deep.named_parameters(), silence="head-unclear") == []  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("recipe", "names"),
    [
        ("adamw", {"0.weight": (8, 8), "0.bias": (8,), "2.weight": (4, 8)}),  # every layer has this update
        ("muon", {"up.weight": (8, 8), "up.bias": (8,), "lm_head.weight": (4, 8)}),  # a name that says so
        ("muon", {"blocks.0.up.weight": (16, 8), "blocks.1.up.weight": (16, 8)}),  # hidden layers that were selected
        ("muon", {"wte.weight": (50, 8), "mlp.0.weight": (16, 8), "mlp.2.weight": (8, 16)}),  # so is one block's
        (
            "muon",  # repeated, and the next block consumes it: the head is tied to the embedding
            {
                "wte.weight": (50, 8),
                "blocks.0.up.weight": (16, 8),
                "blocks.0.down.weight": (8, 16),
                "blocks.1.up.weight": (16, 8),
                "blocks.1.down.weight": (8, 16),
            },
        ),
    ],
)
def test_parameters_without_their_model_whose_head_is_clear_get_none(recipe: str, names: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Optimizer([(name, nn.Parameter(torch.zeros(shape))) for name, shape in names.items()], recipe=recipe)
