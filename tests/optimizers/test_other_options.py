"""Options of torch, SOAP and Distributed Shampoo: errors and docs/from-torch.md give the overrides of the formulas."""

import contextlib
import math
import re
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import eigengraft
from eigengraft import Optimizer, RecipeError, load_recipe
from eigengraft.optimizers.other_options import ON_PAGE, momentum_path, superfluous, translated
from eigengraft.optimizers.recipe.loading import parse_yaml

from ..parity.distributed_shampoo import Options, trajectory
from ..parity.test_golden import CASES
from ..parity.test_shampoo_jax import BETA1, BETA2, NAME, SMALL, START, defined
from ..refusals import refused
from ..trajectories import follow, normal, random_gradients

PAGE = (Path(__file__).parents[2] / "docs" / "from-torch.md").read_text(encoding="utf-8")
SECTIONS = {text.partition("\n")[0]: text for text in PAGE.split("\n## ")}
SHAMPOO = "reference/distributed_shampoo"
CORRECTED = "reference/eigenvalue_corrected_shampoo"
SHARED = {"betas": (0.81, 0.92), "momentum": 0.8, "beta2": 0.7, "eps": 1e-7, "precondition_frequency": 7, "ns_steps": 4}


def overrides(recipe: str, **options: Any) -> dict[str, Any]:
    """All overrides that an error about the options gives."""
    found = translated(options, load_recipe(recipe))
    assert all(found.values()), found
    return {path: value for one in found.values() for path, value in one.items()}


def ours(recipe: str, changes: Mapping[str, Any], init: Tensor, given: list[Tensor], lr: float) -> Tensor:
    def make(parameters: list[nn.Parameter]) -> Optimizer:
        named = [("w", one) for one in parameters]
        return Optimizer(named, recipe, lr=lr, weight_decay=0.0, overrides=changes)

    return follow(make, [init], [[g] for g in given])[0]


def apart(a: Tensor, b: Tensor, init: Tensor) -> float:
    return float((a - b).abs().max() / (b - init).abs().max())


def soap(init: Tensor, given: list[Tensor], betas: tuple[float, float], **options: Any) -> Tensor:
    """The parameter after each step of the authors' SOAP with lr=0.01, precondition_frequency=3 and eps=1e-6."""
    (b1, b2), w, path = betas, init.clone(), list[Tensor]()
    shampoo_beta, corrects = options.get("shampoo_beta", -1), options.get("correct_bias", True)
    decay = shampoo_beta if shampoo_beta >= 0 else b2
    left, right = (1 - decay) * given[0] @ given[0].T, (1 - decay) * given[0].T @ given[0]
    p, q = (torch.linalg.eigh(x).eigenvectors.flip(1) for x in (left, right))
    m, v = torch.zeros_like(w), torch.zeros_like(w)
    path.append(w.clone())
    for t, g in enumerate(given[1:], 1):
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * (p.T @ g @ q) ** 2
        size = 0.01 * math.sqrt(1 - b2**t) / (1 - b1**t) if corrects else 0.01
        d = p @ ((p.T @ m @ q) / (v.sqrt() + 1e-6)) @ q.T
        w = w - size * d
        left, right = left.lerp(g @ g.T, 1 - decay), right.lerp(g.T @ g, 1 - decay)
        if t % 3 == 0:
            orders = [(x.T @ s @ x).diagonal().argsort(descending=True) for x, s in ((p, left), (q, right))]
            v = v[orders[0]][:, orders[1]]
            p, q = (torch.linalg.qr(s @ x[:, o]).Q for x, s, o in ((p, left, orders[0]), (q, right, orders[1])))
        path.append(w.clone())
    return torch.stack(path)


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"shampoo_beta": 0.8},
        {"shampoo_beta": -1},
        {"correct_bias": False},
    ],
    ids=str,
)
def test_betas_of_soap_are_decays_of_moments_and_factors(more: dict[str, Any]) -> None:
    options: dict[str, Any] = {"betas": (0.9, 0.99), **more}
    init, given = normal(6, 5, seed=1), [normal(6, 5, seed=10 + t) for t in range(20)]
    found = translated(options | {"precondition_frequency": 3, "eps": 1e-6}, load_recipe("reference/soap"))
    changes = {path: value for one in found.values() for path, value in one.items()}
    expected = soap(init, given, **options)
    assert apart(ours("reference/soap", changes, init, given, 0.01), expected, init) <= 1e-9
    without = {path: value for path, value in changes.items() if "statistic" not in path}
    assert apart(ours("reference/soap", without, init, given, 0.01), expected, init) > 1e-3


def test_options_of_a_recorded_soap_are_the_overrides_of_its_test() -> None:
    options = {"betas": (0.9, 0.99), "shampoo_beta": 0.9, "precondition_frequency": 1, "max_precond_dim": 8}
    changes = overrides("reference/soap", **options, precondition_1d=True) | {"weight_decay.rate": 0.0}
    case = CASES["soap_reference_1d_one_sided"]
    assert load_recipe("reference/soap", changes).to_json() == load_recipe("reference/soap", case.overrides).to_json()


ROWS: tuple[tuple[dict[str, Any], dict[str, Any]], ...] = (
    ({}, {}),
    ({"betas": (0.8, 0.95)}, {"beta1": 0.8, "beta2": 0.95}),
    ({"betas": (0.8, 1.0), "beta3": 0.5}, {"beta1": 0.8, "beta2": 1.0, "beta3": 0.5}),
    ({"precondition_frequency": 4}, {"frequency": 4, "start": 4}),
    ({"precondition_frequency": 3, "start_preconditioning_step": 7}, {"frequency": 3, "start": 7}),
    ({"start_preconditioning_step": 7, "precondition_frequency": 3}, {"frequency": 3, "start": 7}),
    ({"use_bias_correction": False}, {"bias_correction": False}),
    (
        {"betas": (0.8, 1.0), "use_bias_correction": False},
        {"beta1": 0.8, "beta2": 1.0, "bias_correction": False},
    ),
    ({"epsilon": 1e-3}, {"eps": 1e-3}),
    ({"momentum": 0.8}, {"momentum": {"mu": 0.8}}),
    (
        {"momentum": 0.8, "dampening": 0.3, "use_nesterov": True},
        {"momentum": {"mu": 0.8, "dampening": 0.3, "nesterov": True}},
    ),
)


@pytest.mark.parametrize(("options", "theirs"), ROWS, ids=[str(row[0]) for row in ROWS])
@pytest.mark.parametrize("kind", ["Adam", "RMSprop", "AdaGrad", "SGD"])
def test_options_of_distributed_shampoo(kind: str, options: dict[str, Any], theirs: dict[str, Any]) -> None:
    graft = {"kind": kind.lower(), "beta2": 0.9, "eps": 1e-6}
    config = type(f"{kind}PreconditionerConfig", (), {"beta2": 0.9, "epsilon": 1e-6})()
    init, given = normal(5, 4, seed=1), [normal(5, 4, seed=10 + t) for t in range(15)]
    expected = trajectory(init, given, Options(**{"eps": 1e-4, **theirs}, graft=graft))
    changes = overrides(SHAMPOO, **{"epsilon": 1e-4, **options}, grafting_config=config)
    assert apart(ours(SHAMPOO, changes, init, given, 0.05), expected, init) <= 1e-9


def test_options_of_an_eigenvalue_corrected_shampoo() -> None:
    init, given = normal(5, 4, seed=1), [normal(5, 4, seed=10 + t) for t in range(20)]
    own = {"beta1": 0.8, "beta2": 0.95, "frequency": 3, "start": 6, "eps": 1e-6, "bias_correction": False}
    expected = trajectory(init, given, Options(soap="eigh", **own))  # type: ignore[arg-type]
    shared = {"betas": (0.8, 0.95), "epsilon": 1e-6, "use_bias_correction": False, "precondition_frequency": 3}
    changes = overrides(CORRECTED, **shared, start_preconditioning_step=6)
    assert apart(ours(CORRECTED, changes, init, given, 0.05), expected, init) <= 1e-9


@pytest.mark.parametrize("shape", [(12, 4), (41, 4)])
def test_betas_of_distributed_shampoo_in_jax_hold_in_all_routes(shape: tuple[int, int]) -> None:
    changes = overrides(NAME, betas=(BETA1, BETA2))
    away = [f"{path}=0.5" for path in changes]
    recipe = load_recipe(load_recipe(NAME, [*SMALL, *away]), changes)
    given, init = random_gradients([shape], START + 3), torch.zeros(shape, dtype=torch.float64)
    (path,) = follow(lambda one: Optimizer([("w", one[0])], recipe, lr=0.1, weight_decay=0.0), [init], given)
    assert apart(path, torch.stack(defined([g for (g,) in given], max(shape) <= 40)), init) <= 1e-9
    assert len(changes) == 5


@pytest.mark.parametrize(
    ("name", "options"),
    [
        (CORRECTED, {"betas": (0.9, 1.0), "use_bias_correction": False}),
        (NAME, {"beta2": 1.0}),
        (NAME, {"betas": (0.9, 1.0)}),
    ],
)
def test_sums_of_squares_have_no_bias_correction(name: str, options: dict[str, Any]) -> None:
    changes = overrides(name, **options)
    load_recipe(name, changes)
    sums = [path.removesuffix(".beta") for path, value in changes.items() if value == 1.0 and path.endswith(".beta")]
    assert len(sums) == (2 if name == CORRECTED else 3)
    assert all(changes.get(f"{path}.bias_correction", True) for path in sums)


def test_overrides_of_several_options_load_together() -> None:
    recipe = load_recipe(SHAMPOO, {"update.graft.direction.shampoo.statistic.bias_correction": False})
    given = {"beta1": 0.5, "beta2": 1.0}  # the recipe, not an option, has turned the correction off
    assert translated(given, recipe) == {"beta1": {"update.momentum.beta": 0.5}, "beta2": {}}


def test_a_recipe_without_bias_correction_is_not_taken_for_the_one_in_jax() -> None:
    recipe = load_recipe(SHAMPOO, overrides(SHAMPOO, use_bias_correction=False))
    found = translated({"betas": (0.8, 0.95)}, recipe)["betas"]
    assert found == overrides(SHAMPOO, betas=(0.8, 0.95)) and not any("magnitude" in path for path in found)


def test_an_option_without_certain_meaning_gives_no_overrides() -> None:
    for name, options in (
        ("sgd", {"betas": (0.9, 0.99)}),
        ("splus", {"betas": (0.9, 0.99)}),
        ("caspr", {"betas": (0.9, 0.99)}),
        ("soap_schedule_free", {"betas": (0.9, 0.99)}),
        ("soap", {"max_precond_dim": 512, "merge_dims": True, "data_format": "channels_last"}),
        ("shampoo", {"epsilon": 1e-12, "eps": 1e-8, "dampening": 0.1}),
        ("reference/soap", {"shampoo_beta": -1, "normalize_grads": True, "betas": 0.9}),
        ("reference/soap", {"merge_dims": True}),
        ("reference/soap", {"betas": (0.9, 1.0)}),
    ):
        assert not any(translated(options, load_recipe(name)).values()), name


def test_options_that_ask_for_nothing_are_to_be_left_out() -> None:
    for name, options, expected in (
        ("reference/soap", {"shampoo_beta": -1}, ["shampoo_beta"]),
        ("soap", {"shampoo_beta": -1.0, "betas": (0.9, 0.99)}, ["shampoo_beta"]),
        (
            "soap_fitted",
            {"data_format": "channels_first", "normalize_grads": False},
            ["data_format", "normalize_grads"],
        ),
        ("reference/soap", {"shampoo_beta": 0.9, "normalize_grads": True, "data_format": "channels_last"}, []),
        ("adamw", {"shampoo_beta": -1, "normalize_grads": False}, []),
        ("reference/soap", {"merge_dims": False}, ["merge_dims"]),
        ("soap", {"merge_dims": False}, []),  # it merges axes
        ("reference/eigenvalue_corrected_shampoo", {"grafting_config": None}, ["grafting_config"]),
        ("reference/distributed_shampoo", {"grafting_config": None}, []),
        ("adamw", {"grafting_config": None}, []),
    ):
        found = superfluous(options, load_recipe(name))
        assert sorted(found) == expected and not any(translated(options, load_recipe(name))[key] for key in found), name
    other = load_recipe("reference/soap", {"update.eigenbasis.statistic.beta": 0.5})
    assert superfluous({"shampoo_beta": -1}, other) == []
    with refused(TypeError, "shampoo_beta") as caught:
        eigengraft.compose("soap", nn.Linear(3, 2), shampoo_beta=-1)
    assert "docs/from-torch.md" not in str(caught.value)


def test_the_page_and_the_errors_give_the_same_overrides_for_muon() -> None:
    rows = re.findall(r'^\| `Muon\(hidden, (\w+=[^`]+)\)`[^|]*\| `(\{"[^`]+\})`', PAGE, flags=re.MULTILINE)
    assert len(rows) == 2
    for options, expected in rows:
        for name in ("muon", "reference/muon"):
            assert overrides(name, **eval(f"dict({options})")) == eval(expected)
    for name in ("anvil", "adamw", "dion"):  # one triple for each step; no such solver
        assert not any(translated({"ns_steps": 5}, load_recipe(name)).values()), name


@pytest.mark.parametrize("name", eigengraft.shipped_recipes())
def test_translations_fit_every_shipped_recipe(name: str) -> None:
    recipe = load_recipe(name)
    for found in translated(SHARED, recipe).values():
        load_recipe(recipe, found)
    if path := momentum_path(recipe):
        load_recipe(recipe, {path: 0.5})


@pytest.mark.parametrize(
    ("section", "name", "count"),
    [("SOAP and Muon", "reference/soap", 9), ("Distributed Shampoo (JAX) and DALL-E mini", NAME, 11)],
)
def test_the_page_and_the_errors_give_the_same_overrides(section: str, name: str, count: int) -> None:
    rows = re.findall(r'^\| `(\w+=[^`]+)` \| `(\{"[^`]+\})`', SECTIONS[section], flags=re.MULTILINE)
    assert len(rows) == count
    for options, expected in rows:
        given = eval(f"dict({options})")
        assert overrides(name, **given) == eval(expected), options


def test_the_fields_that_the_page_gives_for_distributed_shampoo_exist() -> None:
    cells = re.findall(r"^\| .*? \| (.*) \|$", SECTIONS["Distributed Shampoo (PyTorch)"], flags=re.MULTILINE)
    fields = re.findall(r"`(\w+): (\{[^`]+\})`", "\n".join(cells))
    assert len(fields) > 25
    places = (
        (SHAMPOO, ""),
        (SHAMPOO, "update.graft."),
        (SHAMPOO, "update.graft.direction.shampoo."),
        (CORRECTED, "update.eigenbasis."),
    )
    for field, value in fields:
        given: Any = parse_yaml(value)
        assert any(loads(name, f"{at}{field}", given) for name, at in places), (field, value)


def loads(name: str, path: str, given: dict[str, Any]) -> bool:
    """True if the recipe accepts a mapping at a path, in place of the value there or as changes of its fields."""
    for changes in ({path: given}, {f"{path}.{key}": value for key, value in given.items()}):
        with contextlib.suppress(RecipeError):
            load_recipe(name, changes)
            return True
    return False


def test_errors_name_the_page_for_its_options_alone() -> None:
    own = PAGE[PAGE.index("\n## Distributed Shampoo") :]
    texts = re.findall(r"^\| (.*?) \|", own, flags=re.MULTILINE)
    texts += [text for text in own.split("\n\n") if "have no recipe" in text]
    spans = re.findall(r"`([^`]+)`", "\n".join(texts))
    names = {name for span in spans for name in re.findall(r"\b([a-z]\w*)=", span)}
    names |= {span for span in spans if re.fullmatch(r"[a-z]\w+", span)}
    assert names - {"lr", "weight_decay"} == ON_PAGE

    model = nn.Linear(3, 2)
    for key in ("stat_compute_steps", "decay_preconditioning_compute_steps"):
        with refused(TypeError, key, "from-torch.md") as caught:
            eigengraft.compose("shampoo_4bit", model, **{key: 10})
        assert "'steps'" not in str(caught.value)
    with pytest.raises(TypeError) as caught:
        eigengraft.compose("shampoo_4bit", model, unheard_of=10)
    assert "from-torch.md" not in str(caught.value)


def test_the_page_and_the_errors_give_the_same_overrides_for_distributed_shampoo() -> None:
    (call,) = re.findall(r"^DistributedShampoo\((.*?)^\)", PAGE, flags=re.MULTILINE | re.DOTALL)
    (expected,) = re.findall(r'"reference/distributed_shampoo",.*?overrides=(\{.*?\n    \})', PAGE, flags=re.DOTALL)
    (every,) = re.findall(r"^every_tenth = (.*)$", PAGE, flags=re.MULTILINE)

    class AdamPreconditionerConfig(SimpleNamespace):
        pass

    names = {"AdamPreconditionerConfig": AdamPreconditionerConfig, "SingleDeviceDistributedConfig": SimpleNamespace}
    arguments = call.replace("model.parameters(),", "")
    given = eval(f"dict({arguments})", names)
    given = {key: given[key] for key in given if key not in ("lr", "weight_decay", "distributed_config")}
    changes = eval(expected, {"every_tenth": eval(every)})
    hinted = load_recipe(SHAMPOO, overrides(SHAMPOO, **given))
    assert hinted.to_json() == load_recipe(SHAMPOO, changes).to_json()


def test_errors_name_the_function_that_was_called() -> None:
    model = nn.Linear(3, 2)
    with refused(TypeError, "compose: 'betas'", "update.eigenbasis.statistic.beta"):
        eigengraft.compose("soap", model, betas=(0.9, 0.99))
    with refused(TypeError, "Optimizer: 'betas'"):
        Optimizer(model.parameters(), betas=(0.9, 0.99))
    with refused(ValueError, "compose: maximize"):
        eigengraft.compose("adamw", model, maximize=True)


@pytest.mark.parametrize("nested", [lambda m: m.parameters(), lambda m: m.parameters, lambda m: list(m.parameters())])
def test_parameters_inside_a_list_are_refused_with_advice(nested: Any) -> None:
    with refused(TypeError, "optimizer can only optimize Tensors", "position 0", "model.named_parameters()"):
        eigengraft.compose("adamw", [nested(nn.Linear(3, 2))])


def test_pairs_in_place_of_overrides_are_refused() -> None:
    with refused(ValueError, "mapping {path: value}", "update.rms.beta"):
        load_recipe("adamw", [("update.rms.beta", 0.9)])  # type: ignore[list-item]
