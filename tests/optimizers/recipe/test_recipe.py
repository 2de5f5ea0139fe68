"""Recipes: shipped files, the three ways to say the same, overrides, the schema."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import nn

import eigengraft
from eigengraft import Recipe, RecipeError, Route, Stage, load_recipe
from eigengraft.optimizers.recipe.export_shipped import shipped_json
from eigengraft.optimizers.recipe.loading import parse_yaml, read_yaml, recipe_folder
from eigengraft.optimizers.recipe.overrides import apply_overrides, differences
from eigengraft.optimizers.recipe.recipe import adam_route
from eigengraft.optimizers.recipe.schema import json_schema
from eigengraft.optimizers.write.write import Decoupled
from eigengraft.preconditioners import RMS, Chain, Eigenbasis, Every, Gram, Momentum, PowerQR

from ...json_schemas import CHECKED, NOTES, keywords, violations
from ...recipes import COVER, EVERY, SHIPPED, plain, stage_kinds
from ...refusals import check_said, refused

SOAP = """
name: mine
lr: 3e-3
update:
  - kind: eigenbasis
    statistic: {kind: gram, beta: 0.9}
    solver: power_qr
    inner: [momentum, {kind: rms, beta: 0.95}]
    refresh: {kind: every, steps: 5}
weight_decay: {kind: decoupled, rate: 0.01}
routes:
  - default
  - {name: slow, match: {name: '^slow', ndim: 2}, update: sign, lr_multiplier: 0.1, optional: true}
"""
# the grammar block of the design, with its dots filled in
GRAMMAR = {
    "adam": "[{kind: momentum, beta: 0.9}, {kind: rms, beta: 0.999}]",
    "soap_fitted": "[{kind: eigenbasis, statistic: {kind: gram, beta: 0.95}, solver: {kind: power_qr}, "
    "inner: [{kind: momentum, beta: 0.95}, {kind: rms, beta: 0.95}], refresh: {kind: every, steps: 10}}]",
    "factorized": "[{kind: eigenbasis, inner: [{kind: momentum}, {kind: adafactor}]}]",
    "shampoo": "[{kind: momentum}, {kind: graft, direction: {kind: shampoo, solver: {kind: coupled_newton}}, "
    "magnitude: {kind: rms}}]",
    "grafted soap": "[{kind: graft, direction: {kind: eigenbasis, inner: [{kind: momentum}, {kind: rms}]}, "
    "magnitude: [{kind: momentum}, {kind: rms}]}]",
    "muon": "[{kind: momentum, nesterov: true}, {kind: spectral, solver: {kind: newton_schulz}}, "
    "{kind: scale, rule: match_rms}]",
}


@pytest.fixture
def outsider() -> Iterator[str]:
    """A method in one file of a user's: its kind, gone after the test."""

    class Clipped(Stage):
        """min(max(d, -bound), bound)"""

        kind: Literal["test_clipped"] = "test_clipped"
        bound: float = 1.0

        def apply(
            self,
            state: eigengraft.State,
            gradient: torch.Tensor,
            direction: torch.Tensor,
            context: eigengraft.StepContext,
        ) -> torch.Tensor:
            return direction.clamp(-self.bound, self.bound)

    yield "test_clipped"
    del Stage.members["test_clipped"]


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 12), nn.LayerNorm(12), nn.Tanh(), nn.Linear(12, 3))


def train(net: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    """Losses on one fixed batch."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(64, 6, generator=generator)
    y = torch.stack([x[:, 0] * x[:, 1], x[:, 2:4].sum(1), x[:, 4].sin()], 1)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = (net(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.slow
def test_the_shipped_json_is_the_yaml() -> None:
    assert (recipe_folder() / "shipped.json").read_text(encoding="utf-8") == shipped_json()


def test_every_stage_and_every_combination_with_stages_inside_is_in_the_cover() -> None:
    """Tests of products of recipes and options rest on it; a stage that must be told its signal has its own tests."""
    kinds = {name: stage_kinds(name) for name in SHIPPED}
    told = {"diagonal_newton", "noise_metric"}  # tests/providers
    assert told.union(*(kinds[name] for name in COVER)) == told.union(*kinds.values())
    asked = [name for name in SHIPPED if not plain(name) and not kinds[name] & told]
    assert {kinds[name] for name in asked} <= {kinds[name] for name in COVER}
    assert len({kinds[name] for name in COVER}) == len(COVER) < len(SHIPPED)


def test_the_known_recipes_are_shipped() -> None:
    assert {"sgd", "adam", "adamw", "adafactor", "shampoo", "soap_fitted", "soap_factorized", "muon"} <= set(SHIPPED)
    assert sum(name.startswith("reference/") for name in SHIPPED) >= 3


def test_a_recipe_says_where_its_rates_come_from() -> None:
    texts = {name: (recipe_folder() / f"{name}.yaml").read_text() for name in SHIPPED}
    rates = {name: re.search("^lr: .*$", text, re.MULTILINE) for name, text in texts.items()}
    assert [name for name, rate in rates.items() if rate and "  # " not in rate[0]] == []
    assert all(rates[name] or "\nbase: " in text for name, text in texts.items())


@pytest.mark.slow
@pytest.mark.parametrize("name", EVERY)
def test_a_shipped_recipe_is_short_says_its_source_and_trains(name: str) -> None:
    text = (recipe_folder() / f"{name}.yaml").read_text()
    recipe = load_recipe(name)
    assert len(text.splitlines()) <= 25 and recipe.name == name
    assert recipe.about.count("(") == recipe.about.count(")")  # " #" would begin a comment of YAML
    assert recipe.about and (re.search(r"(19|20)\d\d", recipe.about) or name.startswith("reference/"))
    net = model()
    optimizer = eigengraft.compose(recipe, net, lr=max(recipe.lr, 1e-3))  # signs take small steps
    hidden = next(route.name for route in optimizer.routing_table() if route.route == "")
    optimizer.provide("max_logit", lambda: {net.get_parameter(hidden): torch.zeros(1)})  # there is no attention to clip
    for signal in ("hessian_diagonal", "gradient_variance"):
        optimizer.provide(signal, lambda: {p: torch.ones_like(p) for p in net.parameters()})
    losses = train(net, optimizer, 30)
    assert losses[-1] < 0.95 * losses[0]


@pytest.mark.parametrize("name", EVERY)
def test_a_recipe_survives_every_way_out_and_in(name: str, tmp_path: Path) -> None:
    recipe = load_recipe(name)
    assert load_recipe(recipe) is recipe
    assert load_recipe(recipe.model_dump()) == recipe
    assert load_recipe(json.loads(recipe.model_dump_json())) == recipe
    assert load_recipe(recipe.to_json()) == recipe and hash(load_recipe(recipe.to_json())) == hash(recipe)
    assert Recipe.model_validate_json(recipe.model_dump_json()) == recipe
    path = tmp_path / "again.yaml"
    path.write_text(recipe.model_dump_json())  # JSON is YAML
    assert load_recipe(path) == recipe
    written = json.loads(json.dumps(parse_yaml((recipe_folder() / f"{name}.yaml").read_text())))
    assert {**_raw(name), **written} == _raw(name)


def _raw(name: str) -> dict[str, Any]:
    raw: dict[str, Any] = json.loads((recipe_folder() / "shipped.json").read_text())[name]
    return raw


def test_python_mapping_and_yaml_say_the_same(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(SOAP)
    stage = Eigenbasis(
        statistic=Gram(beta=0.9), solver=PowerQR(), inner=(Momentum(), RMS(beta=0.95)), every=Every(steps=5)
    )
    slow = Route(name="slow", match={"name": "^slow", "ndim": 2}, update="sign", lr_multiplier=0.1, optional=True)
    python = Recipe(name="mine", lr=3e-3, update=stage, weight_decay=Decoupled(rate=0.01), routes=(adam_route(), slow))
    assert load_recipe(path) == load_recipe(str(path)) == load_recipe(parse_yaml(SOAP)) == python
    assert load_recipe([stage]).update == python.update


def test_a_file_is_named_after_itself(tmp_path: Path) -> None:
    path = tmp_path / "quick.yaml"
    path.write_text("update: sign")
    assert load_recipe(path).name == "quick"


@pytest.mark.parametrize("name", GRAMMAR)
def test_the_grammar_of_the_design(name: str) -> None:
    net = model()
    optimizer = eigengraft.compose({"update": parse_yaml(GRAMMAR[name])}, net)
    losses = train(net, optimizer, 3)
    assert losses[-1] < losses[0]


def test_a_stage_from_a_user_file_works_from_yaml(outsider: str, tmp_path: Path) -> None:
    path = tmp_path / "clipped.yaml"
    path.write_text(f"update: [{{kind: {outsider}, bound: 0.25}}]\nroutes: []\nlr: 1")
    weight = nn.Parameter(torch.zeros(2))
    optimizer = eigengraft.Optimizer([weight], path)
    weight.grad = torch.tensor([0.125, -3.0])
    optimizer.step()
    assert weight.tolist() == [-0.125, 0.25]
    assert violations(json_schema(Recipe), read_yaml(path)) == []


# overrides


@pytest.mark.parametrize(
    ("override", "change"),
    [
        ("update.eigenbasis.refresh.steps=1", ["update.eigenbasis.refresh.steps: 10 -> 1"]),
        ("update.eigenbasis.inner.momentum.beta = 0.9", ["update.eigenbasis.inner.momentum.beta: 0.95 -> 0.9"]),
        ("lr=1e-3", ["lr: 0.003 -> 0.001"]),
        ("lr=.5", ["lr: 0.003 -> 0.5"]),
        ("blocking.size=null", ["blocking.size: 1024 -> absent"]),
        ("failure.nonfinite=raise", ["failure.nonfinite: skip -> raise"]),
        ("routes.adam.lr_multiplier=0.5", ["routes.adam.lr_multiplier: 1.0 -> 0.5"]),
        ("routes.adam.update.rms.beta=0.5", ["routes.adam.update.rms.beta: 0.95 -> 0.5"]),
        ("update.eigenbasis.inner.rms.name=second", None),
    ],
)
def test_overrides_address_stages_by_name(override: str, change: list[str] | None) -> None:
    before, after = load_recipe("soap_fitted"), load_recipe("soap_fitted", [override])
    found = differences(before.model_dump(), after.model_dump())
    assert found == change if change is not None else any("inner.second" in line for line in found)
    assert before == load_recipe("soap_fitted")


def test_overrides_apply_in_order() -> None:
    changes = ["update.eigenbasis.solver.kind=eigh", "update.eigenbasis.solver.order=ascending", "lr=1", "lr=2"]
    recipe = load_recipe("soap_fitted", changes)
    solver = recipe.update[0].solver.model_dump()  # type: ignore[attr-defined]
    assert recipe.lr == 2 and (solver["kind"], solver["order"]) == ("eigh", "ascending")


def test_a_mapping_of_overrides_says_what_strings_say() -> None:
    strings = ["update.eigenbasis.refresh.steps=1", "update.eigenbasis.solver.kind=eigh", "storage={}", "lr=1e-4"]
    mapping = {
        "update.eigenbasis.refresh.steps": 1,
        "update.eigenbasis.solver.kind": "eigh",
        "storage": {},
        "lr": 1e-4,
    }
    assert load_recipe("soap_fitted", mapping) == load_recipe("soap_fitted", strings) != load_recipe("soap_fitted")
    assert load_recipe("soap_fitted", "lr=1e-4") == load_recipe("soap_fitted", {"lr": 1e-4})
    later = {"update.eigenbasis.inner": [RMS()], "update.eigenbasis.inner.rms.beta": 0.95}
    inner = load_recipe("soap_fitted", later).update[0].chain  # type: ignore[attr-defined]
    assert inner == (RMS(beta=0.95),)


def test_optimizer_and_compose_take_overrides() -> None:
    wanted = load_recipe("soap_fitted", ["update.eigenbasis.refresh.steps=1"])
    for overrides in (["update.eigenbasis.refresh.steps=1"], {"update.eigenbasis.refresh.steps": 1}):
        net = model()
        assert eigengraft.compose("soap_fitted", net, overrides=overrides).recipe == wanted
        assert eigengraft.compose("soap_fitted", net.named_parameters(), overrides=overrides).recipe == wanted
        assert eigengraft.Optimizer(net.named_parameters(), "soap_fitted", overrides=overrides).recipe == wanted
    net = model()
    assert eigengraft.compose("soap_fitted", net, overrides=None).recipe == load_recipe("soap_fitted", None)


def test_switching_a_kind_drops_the_fields_of_the_old_one_but_not_the_name() -> None:
    data = {"update": [{"kind": "rms", "name": "second", "beta": 0.5}], "solver": {"kind": "a", "x": 1}, "bare": "rms"}
    changed = apply_overrides(data, ["update.second.kind=sign", "solver.kind=b", "bare.kind=sign", "bare.y=1"])
    assert changed == {
        "update": [{"kind": "sign", "name": "second"}],
        "solver": {"kind": "b"},
        "bare": {"kind": "sign", "y": 1},
    }
    assert data["update"] == [{"kind": "rms", "name": "second", "beta": 0.5}]
    assert load_recipe("soap_fitted", ["update.eigenbasis.kind=shampoo"]).update[0].label == "shampoo"


def test_the_longest_key_of_storage_is_the_one_that_is_meant() -> None:
    storage = {"update.rms": {"kind": "int8"}, "update.rms.inner": {"kind": "int8"}}
    changed = apply_overrides({"storage": storage}, {"storage.update.rms.inner.min_elements": 5})
    assert changed["storage"] == storage | {"update.rms.inner": {"kind": "int8", "min_elements": 5}}


def test_a_single_stage_is_addressed_as_if_in_a_list() -> None:
    recipe = load_recipe({"update": {"kind": "graft", "direction": "sign", "magnitude": "rms"}})
    assert load_recipe(recipe, ["update.graft.magnitude.rms.beta=0.5"]).update[0].magnitude[0].beta == 0.5  # type: ignore[attr-defined]
    changed = apply_overrides({"update": {"kind": "rms"}}, ["update.rms.beta=0.5"])
    assert changed == {"update": {"kind": "rms", "beta": 0.5}}


@pytest.mark.parametrize(
    ("override", "says"),
    [
        (
            "update.eigenbas.refresh.steps=1",
            ("update.eigenbas.refresh.steps", "eigenbas", "update"),
        ),
        (
            "update.eigenbasis.inner.1.beta=0",
            ("1", "update.eigenbasis.inner"),
        ),
        ("update.eigenbasis.refresh.step=1", ("update.eigenbasis.refresh.step", "steps", 1)),
        ("update.eigenbasis.refresh.steps=0", ("update.eigenbasis.refresh.steps", 0)),
        ("update.eigenbasis.solver.kind=eig", ("update.eigenbasis.solver", "eig", "eigh")),
        ("lr=fast", ("lr", "fast")),
        ("lr.x=1", ("lr.x", "lr", 0.003)),
        ("about.x=1", ("about.x", "about")),
        ("lrr=1", ("lrr", "lr", 1)),
        ("lr", ("lr", "dotted.path")),
        ("=1", ("=1", "dotted.path")),
        ("rms.beta=1", ("rms.beta", "rms", "the top level")),
        ("update..rms=1", ("update..rms=1", "dotted.path")),
        ("update={a", ("update={a", "JSON")),
    ],
)
def test_wrong_overrides(override: str, says: tuple[object, ...]) -> None:
    with refused(RecipeError, *says):
        load_recipe("soap_fitted", [override])
    with refused(RecipeError, *says):
        eigengraft.compose("soap_fitted", model(), overrides=[override])


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("update.momentum.beta", "'update.eigenbasis.inner.momentum.beta'"),
        ("update.eigenbasis.momentum.beta", "'update.eigenbasis.inner.momentum.beta'"),
        ("inner.momentum.beta", "'update.eigenbasis.inner.momentum.beta'"),
        ("~update.momentum", "'update.eigenbasis.inner.momentum'"),
        ("update.momentum.steps", "'update.eigenbasis.inner.momentum'"),  # the stage has no such field
        ("update.steps.x", None),  # several parts have steps
    ],
)
def test_a_path_without_a_level_is_answered_with_the_only_one_that_ends_so(path: str, meant: str | None) -> None:
    with pytest.raises(RecipeError) as caught:
        load_recipe({"base": "soap", "averaging": "ema"}, [path if path.startswith("~") else f"{path}=1"])
    check_said(str(caught.value), *([meant] if meant else []), kind="RecipeError")
    assert meant or "did you mean" not in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ({"update.eigenbasis.refresh.steps": 0}, ("update.eigenbasis.refresh.steps", 0)),
        ({"update.eigenbas.refresh.steps": 1}, ("update.eigenbas.refresh.steps", "eigenbas", "update")),
        ({"update.eigenbasis.inner.rms.beta": "0.5"}, ("update.eigenbasis.inner.rms.beta", "0.5")),
        ({" ": 1}, ("overrides", " ")),
        ([3], ("3", "dotted.path")),
        (3, ("overrides", "int")),
    ],
    ids=str,
)
def test_a_wrong_mapping_of_overrides(overrides: Any, says: tuple[object, ...]) -> None:
    for make in (load_recipe, lambda recipe, changes: eigengraft.compose(recipe, model(), overrides=changes)):
        with refused(RecipeError, *says):
            make("soap_fitted", overrides)


def test_an_ambiguous_path_is_an_error() -> None:
    twice = {"update": [{"kind": "rms", "beta": 0.5}, {"kind": "rms", "beta": 0.9}]}
    with refused(RecipeError, "rms"):
        apply_overrides(twice, ["update.rms.beta=0.1"])
    with refused(RecipeError, "rms", "name"):
        load_recipe(twice)
    named = Chain(stages=(RMS(beta=0.5), RMS(name="second")))
    changed = load_recipe([named], ["update.chain.stages.second.beta=0.25"]).update[0]
    assert [stage.beta for stage in changed.stages] == [0.5, 0.25]  # type: ignore[attr-defined]


def test_the_order_of_stages_is_a_difference() -> None:
    one, two = load_recipe({"update": ["momentum", "rms"]}), load_recipe({"update": ["rms", "momentum"]})
    assert one != two and differences(one.model_dump(), two.model_dump())


# the schema


def test_the_schema_says_nothing_that_the_tests_cannot_read() -> None:
    assert keywords(json_schema(Recipe)) <= CHECKED | NOTES


@pytest.fixture(scope="module")
def schema() -> dict[str, Any]:
    return json_schema(Recipe)


@pytest.mark.parametrize("name", EVERY)
def test_shipped_recipes_follow_the_schema(name: str, schema: dict[str, Any]) -> None:
    assert violations(schema, read_yaml(recipe_folder() / f"{name}.yaml")) == []
    assert violations(schema, json.loads(load_recipe(name).model_dump_json())) == []


RIGHT = [
    "{update: rms, expect: {rms: '>= 90% of parameters', update: '== 4 tensors'}}",
    "{update: momentum, storage: {first_moment: int8}}",
    SOAP,
    *(f"update: {chain}" for chain in GRAMMAR.values()),
    "update: {kind: shampoo, exponent: 1/4}",
    "update: {kind: shampoo, exponent: 0.25}",
    "{base: soap_fitted, lr: 1, set: {update.eigenbasis.refresh.steps: 1}}",
    "{base: {update: rms}, routes: []}",
    "{update: rms, routes: default}",
    "{update: rms, routes: []}",
    "{update: rms, routes: [{name: a, update: sign, match: {role: norm, name: [x, y], ndim: 1, module: Linear}}]}",
    "update: {kind: spectral, solver: {kind: newton_schulz, coefficients: [[3, -3, 1], [2, -1.5, 0.5]]}}",
]
WRONG = [
    "{update: rms, expect: {rms: 90}}",
    "{update: rms, expect: {rms: '90% of parameters'}}",
    "{update: momentum, storage: {first_moment: int9}}",
    "update: rmss",
    "update: {kind: rms, betta: 0.9}",
    "update: {kind: rms, beta: 2}",
    "update: {kind: rms, beta: '0.9'}",
    "update: {beta: 0.9}",
    "update: eigenbasis",
    "update: {kind: eigenbasis, inner: rms, refresh: {kind: every, steps: 0}}",
    "update: {kind: shampoo, exponent: quarter}",
    "{update: rms, lr: -1}",
    "{update: rms, weight_decay: {kind: l3}}",
    "{update: rms, routes: [{update: rms}]}",
    "{update: rms, routes: defalt}",
    "{update: rms, learning_rate: 1}",
    "{base: soap_fitted, learning_rate: 1}",
    "{base: soap_fitted, set: [lr]}",
    "{base: 3, lr: 1}",
    "lr: 1",
]


@pytest.mark.parametrize("text", RIGHT)
def test_the_schema_accepts_what_the_loader_accepts(text: str, schema: dict[str, Any]) -> None:
    load_recipe(parse_yaml(text))
    assert violations(schema, parse_yaml(text)) == []


@pytest.mark.parametrize("text", WRONG)
def test_the_schema_refuses_what_the_loader_refuses(text: str, schema: dict[str, Any]) -> None:
    with pytest.raises(RecipeError):
        load_recipe(parse_yaml(text))
    assert violations(schema, parse_yaml(text)) != []


@pytest.mark.parametrize("name", EVERY)
def test_a_declaration_reads_back_and_leaves_out_what_is_not_set(name: str) -> None:
    recipe = load_recipe(name)
    declared = recipe.declaration()
    assert load_recipe(declared) == recipe
    assert "null" not in json.dumps(declared) and next(iter(declared["update"][0])) == "kind"
