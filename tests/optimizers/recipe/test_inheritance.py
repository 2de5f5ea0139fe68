"""Recipes that say only what distinguishes them from the recipe they are based on."""

from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import eigengraft
from eigengraft import RecipeError, load_recipe
from eigengraft.experiments.training.experiment import load_experiment
from eigengraft.optimizers.recipe.loading import parse_yaml, shipped
from eigengraft.optimizers.recipe.overrides import apply_overrides, differences, flatten
from eigengraft.preconditioners import RMS, Gram, Momentum

from ...recipes import few_quick
from ...refusals import refused

REFRESH = "update.eigenbasis.refresh.steps"


def test_a_base_alone_is_the_base() -> None:
    assert load_recipe({"base": "soap_fitted"}) == load_recipe("soap_fitted")


def test_what_is_loaded_once_is_handed_out_as_copies() -> None:
    """Neither a recipe nor the data of a text sees a change of another that was loaded from the same source."""
    one, other, data = load_recipe("soap_4bit"), load_recipe("soap_4bit"), parse_yaml("{a: [1]}")
    one.storage.clear()
    one.expect["adam"] = "> 0 parameters"
    data["a"].append(2)
    assert load_recipe("soap_4bit") == other == load_recipe({"base": "soap_4bit"}) != one
    assert parse_yaml("{a: [1]}") == {"a": [1]}


def test_fields_beside_the_base_replace_its_fields() -> None:
    recipe = load_recipe({"base": "soap_4bit", "lr": 0.5, "storage": {"basis": "bf16"}})
    assert recipe == load_recipe("soap_4bit").replace(lr=0.5, storage={"basis": {"kind": "bf16"}})


def test_values_inside_the_base_are_addressed_as_on_the_command_line() -> None:
    changes = {
        REFRESH: 3,
        "update.eigenbasis.solver.kind": "eigh",
        "blocking.size": None,
        "routes.adam.lr_multiplier": 0.5,
    }
    overrides = [
        f"{REFRESH}=3",
        "update.eigenbasis.solver.kind=eigh",
        "blocking.size=null",
        "routes.adam.lr_multiplier=0.5",
    ]
    assert load_recipe({"base": "soap_fitted", "set": changes}) == load_recipe("soap_fitted", overrides)


def test_components_may_stand_in_a_mapping_with_a_base() -> None:
    chain = (Momentum(beta=0.8), RMS())
    assert load_recipe({"base": "adamw", "update": chain}) == load_recipe("adamw").replace(update=chain)
    statistic = Gram.model_validate({"normalize": "dimension", "axes": {"max_skew": 4}})
    found = load_recipe({"base": load_recipe("soap_fitted"), "set": {"update.eigenbasis.statistic": statistic}})
    assert found == load_recipe("soap_fitted", ["update.eigenbasis.statistic.normalize=dimension"])
    assert load_recipe({"base": [RMS()], "lr": 2}) == load_recipe([RMS()]).replace(lr=2.0)


def test_a_tilde_removes_a_stage_or_the_value_of_a_field() -> None:
    base = load_recipe({"update": ["clip_norm", "momentum", "rms"], "routes": "default", "lr": 0.5})
    assert load_recipe(base, ["~update.clip_norm"]).update == (Momentum(), RMS())
    assert load_recipe(base, ["~routes", "~lr"]) == base.replace(routes=(), lr=1e-3)
    assert load_recipe(
        "soap", ["update.eigenbasis.refresh.steps=3", "~update.eigenbasis.refresh.steps"]
    ) == load_recipe("soap", ["update.eigenbasis.refresh.steps=10"])
    for wrong, data in (
        ("~update.clip", ("update", "clip", "clip_norm")),
        ("~update.rms=3", ("~update.rms=3",)),
        ("~", ("~",)),
        ("~update", ("update",)),
    ):
        with refused(RecipeError, *data):
            load_recipe(base, [wrong])


def test_an_experiment_hands_removals_to_its_recipe() -> None:
    base = {"task": "digits", "steps": 1, "lr": 0.1, "recipe": {"update": ["clip_norm", "rms"]}}
    for override in ("~update.clip_norm", "~recipe.update.clip_norm"):
        assert load_experiment(base, [override]).recipe.update == (RMS(),)
    assert load_experiment(base, ["~lr"]).lr is None


def test_files_are_based_on_files_beside_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "recipes"
    folder.mkdir()
    (folder / "first.yaml").write_text(f"{{base: soap_fitted, lr: 1, set: {{{REFRESH}: 2}}}}")
    (folder / "second.yaml").write_text("{base: first.yaml, lr: 2}")
    monkeypatch.chdir(tmp_path)
    expected = load_recipe("soap_fitted", [f"{REFRESH}=2", "lr=2", "name=second"])
    assert load_recipe("recipes/second.yaml") == load_recipe(folder / "second.yaml") == expected
    (tmp_path / "experiment.yaml").write_text("{task: digits, steps: 1, recipe: {base: recipes/first.yaml, lr: 3}}")
    monkeypatch.chdir(folder)
    assert load_experiment(tmp_path / "experiment.yaml").recipe == load_recipe("first.yaml", ["lr=3"])


def test_a_checkpoint_holds_the_resolved_recipe() -> None:
    parameter = torch.nn.Parameter(torch.zeros(3, 2))
    derived = eigengraft.Optimizer([("w", parameter)], {"base": "soap_fitted", "set": {REFRESH: 3}})
    plain = eigengraft.Optimizer([("w", parameter)], load_recipe("soap_fitted", [f"{REFRESH}=3"]))
    assert "base" not in load_recipe(derived.recipe.to_json()).declaration()
    plain.load_state_dict(derived.state_dict())


def test_storage_of_a_stage_is_one_name_in_a_path() -> None:
    """Keys of `storage` may hold dots; a longer path goes on inside the quantizer."""
    key = "update.graft.magnitude.rms"
    set_ = apply_overrides({"storage": {}}, [f'storage.{key}={{"kind": "bf16"}}', f"storage.{key}/v=int8"])
    assert set_ == {"storage": {key: {"kind": "bf16"}, f"{key}/v": "int8"}}
    deeper = apply_overrides(set_, [f"storage.{key}.rounding=stochastic", f"storage.{key}/v.block_size=8"])
    assert deeper["storage"][key] == {"kind": "bf16", "rounding": "stochastic"}
    assert deeper["storage"][f"{key}/v"] == {"kind": "int8", "block_size": 8}
    assert apply_overrides(set_, ["storage.statistic=symmetric"])["storage"]["statistic"] == "symmetric"


DIFFERENCES = {
    "soap_kl": {"about", "name", "update.eigenbasis.statistic"},
    "adamw": {"about", "name", "weight_decay.kind", "weight_decay.rate", "weight_decay.placed"},
    "shampoo_cq_ef": {"about", "name", "storage.statistic.error_feedback"},
}


@pytest.mark.parametrize("name", DIFFERENCES)
def test_a_shipped_recipe_differs_from_its_base_where_it_says(name: str) -> None:
    base, found = load_recipe(shipped()[name]["base"]), load_recipe(name)
    paths = {
        line.partition(":")[0] for line in differences(base.model_dump(mode="json"), found.model_dump(mode="json"))
    }
    assert {next((p for p in DIFFERENCES[name] if path.startswith(p)), path) for path in paths} == DIFFERENCES[name]


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ({"base": "soup"}, ("base", "soup", "soap")),
        ({"base": 3}, ("base", "recipe", "int")),
        ({"base": {"lr": 1}}, ("base", "update")),
        ({"base": "none.yaml"}, ("base", "none.yaml")),
        ({"base": "soap_fitted", "lrr": 1}, ("lrr", "lr", 1)),
        ({"base": "soap_fitted", "set": {"lr": "fast"}}, ("lr", "fast")),
        ({"base": "soap_fitted", "set": ["lr=1"]}, ("set", "lr=1")),
        ({"update": "rms", "set": {"lr": 1}}, ("set", "base")),
        (
            {"base": "soap_fitted", "set": {"update.eigenbase.refresh.steps": 1}},
            ("set", "update.eigenbase.refresh.steps", "eigenbase", "update", "eigenbasis"),
        ),
        (
            {"base": "soap_fitted", "blocking": {"size": 8}, "set": {"blocking.size": 4}},
            ("set", "blocking.size"),
        ),
        ({"base": {"base": "soap_fitted", "set": {"lr.x": 1}}}, ("base", "set", "lr.x", "lr", 0.003)),
        ({"base": {"schema": 7, "update": "rms"}}, ("base", "schema", 2, 7)),
    ],
)
def test_a_wrong_base_is_refused_with_its_path(source: Any, says: tuple[object, ...]) -> None:
    with refused(RecipeError, *says):
        load_recipe(source)


def test_a_circle_of_bases_is_refused(tmp_path: Path) -> None:
    for name, base in (("a", "b"), ("b", "c"), ("c", "a")):
        (tmp_path / f"{name}.yaml").write_text(f"{{base: {base}.yaml, lr: 1}}")
    with refused(RecipeError, "a.yaml", "c.yaml"):
        load_recipe(tmp_path / "a.yaml")


def test_an_error_in_a_file_names_the_file_and_the_path(tmp_path: Path) -> None:
    (tmp_path / "wrong.yaml").write_text("{update: {kind: rms, beta: 2}}")
    (tmp_path / "mine.yaml").write_text("{base: wrong.yaml, lr: 1}")
    with pytest.raises(RecipeError) as error:
        load_recipe(tmp_path / "mine.yaml")
    first, second = str(error.value).splitlines()
    assert first == f"in {tmp_path / 'mine.yaml'}:" and second.startswith("base: ") and "update.rms.beta" in second


def steps_and_rates(recipe: eigengraft.Recipe) -> list[str]:
    """Overrides that change each number of the recipe that may be changed alone."""
    found = []
    for path, value in flatten(recipe.model_dump(mode="json")):
        if isinstance(value, (int, float)) and value not in (0, True, False) and not path.startswith("storage"):
            found.append(f"{path}={value + 1 if isinstance(value, int) else value / 2}")
    return found


@pytest.mark.parametrize("name", few_quick(sorted(shipped())))
def test_the_short_form_reads_back_as_an_equal_recipe(name: str) -> None:
    recipe = load_recipe(name)
    short = parse_yaml(recipe.to_yaml())
    assert short == {"base": name} and load_recipe(short) == recipe
    for base in ("adamw", "soap"):
        assert load_recipe(parse_yaml(recipe.to_yaml(base))) == recipe
    unnamed = recipe.replace(name="mine")
    text = unnamed.to_yaml()
    assert "base:" not in text and load_recipe(parse_yaml(text)) == unnamed


@pytest.mark.parametrize("name", ["adamw", "soap", "shampoo_4bit", "muon"])
def test_the_short_form_has_only_the_change(name: str) -> None:
    tried = 0
    for override in steps_and_rates(load_recipe(name)):
        with suppress(RecipeError):
            changed = load_recipe(name, [override])
            short = parse_yaml(changed.to_yaml())
            assert load_recipe(short) == changed
            assert len(short) == 2 and "update" not in short and "routes" not in short
            tried += 1
    assert tried > 2


def test_the_short_form_keeps_schedules() -> None:
    beta = {"from": 0.9, "to": 0.99, "steps": 10}
    recipe = load_recipe({"update": [{"kind": "momentum", "beta": beta}, "rms"], "routes": "default"})
    assert load_recipe(parse_yaml(recipe.to_yaml())) == recipe and parse_yaml(recipe.to_yaml())["routes"] == ["default"]
    assert load_recipe(parse_yaml(recipe.to_yaml("adamw"))) == recipe
