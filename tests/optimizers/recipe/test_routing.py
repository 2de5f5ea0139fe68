"""Which parameter goes where, and why."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import eigengraft
from eigengraft import Optimizer, RecipeError, compose, load_recipe, shipped_recipes
from eigengraft.optimizers.plan.plan import plan
from eigengraft.optimizers.recipe.loading import shipped
from eigengraft.optimizers.recipe.routing import canonical_name, canonical_names

from ...refusals import refused


class Block(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.attn = nn.MultiheadAttention(d, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(d, 3 * d), nn.GELU(), nn.Linear(3 * d, d))

    def forward(self, x: Tensor) -> Tensor:
        h = self.ln_1(x)
        x = x + self.attn(h, h, h, need_weights=False)[0]
        out: Tensor = x + self.mlp(self.ln_2(x))
        return out


class GPT(nn.Module):
    """A small transformer with every special kind of parameter; position: what the positional table is called."""

    def __init__(self, tied: bool = True, position: str = "pos_emb", vocabulary: int = 11, d: int = 8) -> None:
        super().__init__()
        self.wte = nn.Embedding(vocabulary, d)
        self.position = position
        self.register_parameter(position, nn.Parameter(torch.randn(1, 5, d)))
        self.blocks = nn.ModuleList([Block(d)])
        self.ln_f = nn.LayerNorm(d)
        self.out = nn.Linear(d, vocabulary, bias=False)
        if tied:
            self.out.weight = self.wte.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.wte(tokens) + getattr(self, self.position)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.out(self.ln_f(x))
        return logits


class CNN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.PReLU(), nn.Conv2d(4, 8, 3))
        self.norm = nn.GroupNorm(2, 8)
        self.hidden = nn.Linear(8, 16)
        self.classifier = nn.Linear(16, 10)


def routes(optimizer: Optimizer) -> dict[str, tuple[str, str]]:
    return {row.name: (row.route, row.reason) for row in optimizer.routing_table()}


def taken(optimizer: Optimizer, route: str = "") -> set[str]:
    return {name for name, (where, _) in routes(optimizer).items() if where == route}


MATRICES = {
    "blocks.0.attn.in_proj_weight",
    "blocks.0.attn.out_proj.weight",
    "blocks.0.mlp.0.weight",
    "blocks.0.mlp.2.weight",
}


@pytest.mark.parametrize("recipe", ["soap_fitted", "shampoo", "muon", "soap_factorized"])
@pytest.mark.parametrize("tied", [True, False])
def test_only_hidden_matrices_of_a_transformer_are_preconditioned(tied: bool, recipe: str) -> None:
    net = GPT(tied)
    optimizer = compose(recipe, net)
    assert taken(optimizer) == MATRICES
    assert taken(optimizer, "routes.adam") == {n for n, _ in net.named_parameters()} - MATRICES


@pytest.mark.parametrize(
    "name", ["pos_emb", "pos_embed", "pos_embedding", "position_embeddings", "positional_embedding"]
)
def test_a_positional_parameter_is_an_embedding(name: str) -> None:
    for optimizer in (
        compose("soap_fitted", GPT(position=name)),
        Optimizer(GPT(position=name).named_parameters(), "soap_fitted"),
    ):
        assert routes(optimizer)[name] == ("routes.adam", "embedding")


def test_reasons_say_how_it_was_seen() -> None:
    found = {name: reason for name, (_, reason) in routes(compose("soap_fitted", GPT(tied=False))).items()}
    assert found["wte.weight"] == "embedding"
    assert "Linear onto" in found["out.weight"] and "vocabulary" in found["out.weight"]
    assert found["ln_f.weight"] == found["blocks.0.ln_1.bias"] == "normalization"
    assert found["blocks.0.attn.in_proj_bias"] == found["blocks.0.mlp.0.bias"] == "bias"
    assert found["blocks.0.mlp.0.weight"] == "2-d weight, no route matches"


@pytest.mark.parametrize("tied", [True, False])
def test_a_hidden_layer_as_wide_as_the_vocabulary_is_no_head(tied: bool) -> None:
    assert taken(compose("soap_fitted", GPT(tied, vocabulary=24))) == MATRICES


def test_a_convolutional_network() -> None:
    optimizer = compose("soap_fitted", CNN())
    assert taken(optimizer) == {"features.0.weight", "features.3.weight", "hidden.weight"}
    assert routes(optimizer)["classifier.weight"] == ("routes.adam", "output head by name")
    assert routes(optimizer)["features.2.weight"] == ("routes.adam", "1-d")


def test_names_alone_find_most_roles() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed_tokens, self.lm_head = nn.Embedding(9, 4), nn.Linear(4, 9)
            self.input_layernorm, self.q_norm, self.up_proj = nn.LayerNorm(4), nn.LayerNorm(4), nn.Linear(4, 8)

    optimizer = Optimizer(Named().named_parameters(), "soap_fitted")
    assert taken(optimizer) == {"up_proj.weight"}
    assert routes(optimizer)["lm_head.weight"][1] == "output head by name"


@pytest.mark.parametrize(
    ("names", "head"),
    [
        (["fc1", "fc2", "fc"], "fc"),  # ResNet
        (["features.0", "classifier.0", "classifier.3", "classifier.6"], "classifier.6"),  # VGG
        (["classifier.0", "classifier.12", "classifier.3"], "classifier.12"),
        (["layers.0.mlp.fc", "model.up", "score"], "score"),  # sequence classification
        (["classifier.dense", "classifier.out_proj"], "classifier.out_proj"),  # RoBERTa
        (["blocks.0.fc", "head.fc"], "head.fc"),  # timm
        (["encoder.0", "heads.head"], "heads.head"),  # ViT
        (["decoder.gate.score", "lm_head"], "lm_head"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.parametrize("known", ["names", "model"])
def test_output_heads_by_name(names: list[str], head: str, known: str) -> None:
    model = nn.Module()
    for name in names:
        *path, own = name.split(".")
        holder = model
        for attribute in path:
            if not hasattr(holder, attribute):
                holder.add_module(attribute, nn.Module())
            holder = holder.get_submodule(attribute)
        holder.add_module(own, nn.Linear(3, 2, bias=False))
    optimizer = compose("soap_fitted", model if known == "model" else model.named_parameters())
    assert [row.name for row in optimizer.routing_table() if row.route == "routes.adam"] == [f"{head}.weight"]


@pytest.mark.parametrize("name", ["normal_projection", "lnet", "bnb_linear", "overhead", "headed", "reembedder"])
def test_names_that_only_look_special(name: str) -> None:
    optimizer = Optimizer([(f"{name}.weight", nn.Parameter(torch.ones(3, 2)))], "soap_fitted")
    assert routes(optimizer)[f"{name}.weight"][0] == ""


def test_without_names_shapes_decide_where_they_can() -> None:
    optimizer = Optimizer([nn.Parameter(torch.ones(s)) for s in ((3,), ())], "soap_fitted")
    assert [row.route for row in optimizer.routing_table()] == ["routes.adam"] * 2
    by_shape = {"update": "rms", "routes": [rule("matrices", ndim=2)]}
    optimizer = Optimizer([nn.Parameter(torch.ones(s)) for s in ((3, 2), (3,))], by_shape)
    assert [row.route for row in optimizer.routing_table()] == ["routes.matrices", ""]


@pytest.mark.parametrize("given", ["parameters", "group", "later group"])
def test_a_matrix_without_a_name_is_refused_where_routes_ask_what_it_is(given: str) -> None:
    says = ("params", "routes.adam", "(3, 2)", "routes")
    matrix, vector = nn.Parameter(torch.ones(3, 2)), nn.Parameter(torch.ones(3))
    if given == "later group":
        optimizer = Optimizer([vector], "soap_fitted")
        with refused(ValueError, *says):
            optimizer.add_param_group({"params": [matrix]})
        assert len(optimizer.param_groups) == 1
        return
    with refused(ValueError, *says):
        Optimizer([matrix, vector] if given == "parameters" else [{"params": [vector, matrix]}], "soap_fitted")
    optimizer = Optimizer([matrix, vector], "soap_fitted", overrides={"routes": []})
    assert [row.route for row in optimizer.routing_table()] == ["", ""]


def test_a_list_of_stages_sends_every_parameter_to_them() -> None:
    optimizer = compose(["momentum"], GPT())
    assert all(row.route == "" for row in optimizer.routing_table())
    count = len(optimizer.routing_table())
    assert repr(optimizer).splitlines()[0] == f"Optimizer(recipe=unnamed: {count} parameters by update"


@pytest.mark.parametrize("recipe", shipped_recipes())
def test_every_shipped_recipe_says_its_routes(recipe: str) -> None:
    assert {"routes", "base"} & shipped()[recipe].keys()


@pytest.mark.parametrize(
    ("name", "canonical"),
    [
        ("weight", "weight"),
        ("module", "module"),
        ("module.weight", "weight"),
        ("module.module.output.weight", "output.weight"),
        ("module._orig_mod.module.up.weight", "up.weight"),
        ("_orig_mod.module.up.weight", "up.weight"),
        ("blocks.0._checkpoint_wrapped_module._orig_mod.up.weight", "blocks.0.up.weight"),
        ("_fsdp_wrapped_module.blocks.0._fsdp_wrapped_module.scale", "blocks.0.scale"),
        ("blocks.module.weight", "blocks.module.weight"),
        ("my_orig_mod.weight", "my_orig_mod.weight"),
        ("blocks._orig_mod", "blocks._orig_mod"),
    ],
)
def test_names_are_those_without_wrappers(name: str, canonical: str) -> None:
    assert canonical_name(name) == canonical == canonical_name(canonical)


def test_names_that_would_be_equal_stay_as_they_are() -> None:
    names = ["module.a", "a", "_orig_mod.b", "module.c.d"]
    assert canonical_names(names) == ["module.a", "a", "b", "c.d"]
    assert canonical_names(canonical_names(names)) == canonical_names(names)
    tensors = [nn.Parameter(torch.ones(2, 2)) for _ in names]
    groups = [{"params": [pair]} for pair in zip(names, tensors, strict=True)]
    optimizer = Optimizer(groups, "soap_fitted")
    assert list(routes(optimizer)) == ["module.a", "a", "b", "c.d"]
    optimizer.add_param_group({"params": [("module.b", nn.Parameter(torch.ones(2))), ("module.e", nn.Parameter())]})
    assert list(routes(optimizer))[4:] == ["module.b", "e"]


class Held(nn.Module):
    """A wrapper that keeps a model in the attribute of that name."""

    def __init__(self, attribute: str, model: nn.Module) -> None:
        super().__init__()
        self.add_module(attribute, model)


class Output(nn.Module):
    """A model whose head is known by where it stands, and with two matrices for random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        self.output = nn.Linear(4, 3)


def inside(model: Output) -> nn.Module:
    model.body[0] = checkpoint_wrapper(model.body[0])
    model.body[1] = torch.compile(model.body[1], backend="eager")
    return model


def data_parallel(model: Output) -> nn.Module:
    model.body = nn.DataParallel(model.body)  # type: ignore[assignment]
    return nn.DataParallel(model)


WRAPPED: dict[str, Callable[[Output], nn.Module]] = {
    "plain": lambda model: model,
    "data parallel": lambda model: Held("module", model),
    "data parallel inside": data_parallel,
    "compiled": lambda model: torch.compile(model, backend="eager"),  # type: ignore[return-value,arg-type]
    "checkpointed": checkpoint_wrapper,
    "compiled and checkpointed inside": inside,
    "fsdp": lambda model: Held("_fsdp_wrapped_module", model),
    "all": lambda model: Held("module", torch.compile(Held("_fsdp_wrapped_module", inside(model)), backend="eager")),
}


@pytest.mark.parametrize("wrapped", WRAPPED)
@pytest.mark.parametrize("recipe", ["psgd_kron", "soap_fitted"])
def test_wrappers_change_neither_routes_nor_random_numbers(recipe: str, wrapped: str) -> None:
    def run(wrap: Callable[[Output], nn.Module]) -> tuple[Optimizer, list[Tensor]]:
        torch.manual_seed(0)
        model = wrap(Output())
        optimizer = compose(recipe, model)
        for step in range(3):
            generator = torch.Generator().manual_seed(step)
            for p in model.parameters():
                p.grad = torch.randn(p.shape, generator=generator)
            optimizer.step()
        return optimizer, list(model.parameters())

    (plain, expected), (optimizer, found) = run(WRAPPED["plain"]), run(WRAPPED[wrapped])
    assert routes(optimizer) == routes(plain) and routes(plain)["output.weight"][1] == "output head by name"
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    names = [name for name, _ in WRAPPED[wrapped](Output()).named_parameters()]
    assert optimizer.param_groups[0]["param_names"] == names  # as torch stored them
    assert optimizer.state_dict()["param_groups"][0]["param_names"] == list(routes(plain))


def test_errors_and_counts_use_the_names_without_wrappers() -> None:
    model = Held("module", Output())
    optimizer = compose("soap_fitted", model)
    next(model.parameters()).grad = torch.full((4, 4), float("nan"))
    optimizer.step()
    assert dict(optimizer.skipped) == {"body.0.weight": 1}


def rule(called: str, **match: Any) -> dict[str, Any]:
    return {"name": called, "match": match, "update": "sign"}


@pytest.mark.parametrize(
    ("match", "expected", "reason"),
    [
        (
            {"module": "Conv2d"},
            {"features.0.weight", "features.0.bias", "features.3.weight", "features.3.bias"},
            "module Conv2d",
        ),
        ({"module": ["_ConvNd"], "ndim": 4}, {"features.0.weight", "features.3.weight"}, "module _ConvNd, 4-d"),
        ({"name": r"^hidden\."}, {"hidden.weight", "hidden.bias"}, r"name ~ ^hidden\."),
        ({"name": ["^hid", "fier.w"], "ndim": 2}, {"hidden.weight", "classifier.weight"}, None),
        ({"ndim": [2, 4], "min_size": 130}, {"features.3.weight", "classifier.weight"}, None),
        ({"ndim": 2, "max_size": 130}, {"hidden.weight"}, "2-d, 128 elements"),
        ({"role": "head"}, {"classifier.weight"}, "output head by name"),
        (
            {"role": ["head", "norm"], "ndim": 1},
            {"norm.weight", "norm.bias", "features.1.weight", "features.1.bias"},
            None,
        ),
        ({}, {name for name, _ in CNN().named_parameters()}, "every parameter"),
    ],
)
def test_every_condition_must_hold_and_any_of_its_values(
    match: dict[str, Any], expected: set[str], reason: str | None
) -> None:
    optimizer = compose({"update": "rms", "routes": [rule("r", **match)]}, CNN())
    assert taken(optimizer, "routes.r") == expected
    if reason is not None:
        assert {why for where, why in routes(optimizer).values() if where} == {reason}


def test_the_first_match_wins_and_everything_is_owned_once() -> None:
    rules = [rule("conv", module="Conv2d"), rule("flat", ndim=1), rule("rest", ndim=[1, 2, 4])]
    optimizer = compose({"update": "rms", "routes": rules}, CNN())
    sets = [taken(optimizer, f"routes.{r['name']}") for r in rules]
    assert (
        "features.0.bias" in sets[0] and "hidden.bias" in sets[1] and sets[2] == {"hidden.weight", "classifier.weight"}
    )
    assert sum(map(len, sets)) == len(optimizer.routing_table()) == len(list(CNN().parameters()))
    for p, row in zip(optimizer.param_groups[0]["params"], optimizer.routing_table(), strict=True):
        own = [key for key in optimizer.state[p] if key != "step"]
        assert all(f"/{row.route}.update." in key for key in own)


def test_a_route_does_to_its_parameters_what_a_recipe_would() -> None:
    def pair() -> list[tuple[str, nn.Parameter]]:
        generator = torch.Generator().manual_seed(0)
        return [(n, nn.Parameter(torch.randn(3, 2, generator=generator))) for n in ("one", "two")]

    both, alone = pair(), pair()
    recipe = {"update": ["momentum", "rms"], "routes": [rule("r", name="two")]}
    optimizer = Optimizer(both, recipe, lr=0.25)
    separate = [
        Optimizer([alone[0]], {"update": ["momentum", "rms"]}, 0.25),
        Optimizer([alone[1]], {"update": "sign"}, 0.25),
    ]
    for _ in range(4):
        for (_, p), (_, q) in zip(both, alone, strict=True):
            p.grad = torch.randn(3, 2)
            q.grad = p.grad.clone()
        for o in (optimizer, *separate):
            o.step()
    assert all(torch.equal(p, q) for (_, p), (_, q) in zip(both, alone, strict=True))


def test_a_rule_that_matches_nothing_is_an_error_unless_it_is_optional() -> None:
    recipe = {"update": "rms", "routes": [rule("all"), rule("late", ndim=2)]}
    with refused(ValueError, "routes.late", "true"):
        compose(recipe, CNN())
    with refused(ValueError, "routes.named"):
        Optimizer(CNN().hidden.named_parameters(), {"update": "rms", "routes": [rule("named", name="hidden")]})
    compose({"update": "rms", "routes": [rule("all"), {**rule("late", ndim=2), "optional": True}]}, CNN())


def test_a_rule_for_frozen_parameters_matches() -> None:
    net = CNN()
    net.features.requires_grad_(False)
    recipe = {"update": "rms", "routes": [rule("conv", name="features")]}
    assert len(taken(Optimizer(net.named_parameters(), recipe), "routes.conv")) == 7


def test_compose_gives_no_state_to_what_is_frozen() -> None:
    net = CNN()
    net.features.requires_grad_(False)
    rows = {row.name: row for row in compose("soap_fitted", net).routing_table()}
    assert all((row.state_bytes == 0) == name.startswith("features") for name, row in rows.items())
    assert "frozen, no state" in rows["features.0.weight"].reason
    with refused(ValueError, "compose"):
        compose("soap_fitted", net.requires_grad_(False))


def test_the_walk_through_a_model_trains_it() -> None:
    net = GPT()
    optimizer = eigengraft.compose("soap_fitted", net, lr=0.01)
    tokens = torch.randint(0, 11, (4, 5), generator=torch.Generator().manual_seed(0))
    losses = []
    for _ in range(8):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(net(tokens).flatten(0, 1), tokens.roll(-1, 1).flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]


def expecting(**expect: str) -> dict[str, Any]:
    return {"base": "muon", "expect": expect}


def test_an_expectation_that_routes_meet_is_told() -> None:
    model = GPT()
    found = compose(expecting(spectral=">= 60% of parameters", adam="> 3 tensors"), model).reached()
    hidden = sum(p.numel() for n, p in model.named_parameters() if p.ndim == 2 and "wte" not in n)
    total = sum(p.numel() for p in model.parameters())
    assert [(row.key, row.found, row.total, row.holds) for row in found] == [
        ("spectral", hidden, total, True),
        ("adam", len(list(model.parameters())) - 4, len(list(model.parameters())), True),
    ]
    assert str(found[0]).startswith(f"spectral >= 60% of parameters: {100 * hidden / total:.3g}% ({hidden:,} of ")


@pytest.mark.parametrize(
    "key", ["update.spectral", "spectral", "update", "routes.adam.update.rms", "rms", "routes.adam", "adam"]
)
def test_a_stage_is_expected_by_path_name_or_kind_and_a_route_by_path_or_name(key: str) -> None:
    (row,) = compose(expecting(**{key: ">= 1 tensors"}), GPT()).reached()
    assert row.found == (4 if key in ("update.spectral", "spectral", "update") else 16 - 4)


@pytest.mark.parametrize(
    ("expect", "says"),
    [
        (
            {"spectral": ">= 90% of parameters"},
            ("expect.spectral", ">= 90% of parameters", "wte.weight", "routes.adam"),
        ),
        (
            {"adam": "<= 10% of tensors"},
            ("expect.adam", "<= 10% of tensors", "wte.weight", "9 more"),
        ),
        ({"update": "== 3 tensors"}, ("expect.update", "== 3 tensors", 4, 16, "25%")),
        ({"spectral": "> 99999 parameters", "adam": "< 1 parameters"}, ("expect.spectral", "expect.adam")),
    ],
)
def test_routes_that_send_matrices_elsewhere_are_refused(expect: dict[str, str], says: tuple[object, ...]) -> None:
    with refused(RecipeError, *says):
        compose(expecting(**expect), GPT())


def test_a_group_that_is_added_is_expected_too() -> None:
    first = [("a.weight", nn.Parameter(torch.ones(4, 4)))]
    optimizer = Optimizer(first, expecting(spectral=">= 50% of parameters"))
    before = optimizer.routing_table()
    with refused(RecipeError, "expect.spectral", 33.3, 16, 48, "b.bias"):
        optimizer.add_param_group({"params": [("b.bias", nn.Parameter(torch.ones(32)))]})
    assert optimizer.routing_table() == before
    optimizer.add_param_group({"params": [("b.bias", nn.Parameter(torch.ones(16)))]})


@pytest.mark.parametrize(
    ("expect", "says"),
    [
        (
            {"spectrl": ">= 90% of parameters"},
            ("expect", "spectrl", "spectral"),
        ),
        (
            {"spectral": "90%"},
            ("expect.spectral", ">= 90% of parameters", "90%"),
        ),
        ({"spectral": ">= 90 % of parameters"}, ("expect.spectral",)),
        ({"spectral": ">= 101% of tensors"}, ("expect.spectral", 100, 101)),
        ({"spectral": ">= 1.5 tensors"}, ("expect.spectral",)),
        ({"spectral": 0.9}, ("expect.spectral", 0.9)),
        ([">= 1 tensors"], ("expect", ">= 1 tensors")),
    ],
)
def test_expectations_that_say_nothing_are_refused(expect: Any, says: tuple[object, ...]) -> None:
    with refused(RecipeError, *says):
        load_recipe({"base": "muon", "expect": expect})


def test_a_name_of_both_a_stage_and_a_route_needs_a_path() -> None:
    routes = [{"name": "rms", "update": ["sign"], "match": {"role": "bias"}}]
    recipe = {"update": ["momentum", "rms"], "routes": routes, "expect": {"rms": ">= 1 tensors"}}
    with refused(RecipeError, "expect", "rms"):
        load_recipe(recipe)
    load_recipe({**recipe, "expect": {"update.rms": ">= 1 tensors", "routes.rms": ">= 1 tensors"}})


def test_a_plan_whose_routes_do_otherwise_is_refused() -> None:
    shapes = [("a.weight", (8, 8)), ("lm_head.weight", (64, 8))]
    with refused(RecipeError, "expect.spectral", "lm_head.weight", "routes.adam"):
        plan(expecting(spectral=">= 90% of parameters"), shapes, (2,))
    assert plan(expecting(spectral="== 64 parameters"), shapes, (2,))
