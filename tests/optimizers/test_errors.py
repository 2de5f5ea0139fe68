"""Wrong input of every kind gets one clear message: where, what was required, what was got, what to do.

Wrong checkpoints are in test_checkpoint.py, wrong overrides in test_recipe.py, wrong gradients in test_failure.py.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import eigengraft
from eigengraft import Optimizer, RecipeError, load_recipe

RECIPES: dict[str, tuple[Any, str]] = {
    # the update
    "no update": ({}, r"^update: required, got nothing$"),
    "only a rate": ({"lr": 0.1}, r"^update: required, got nothing$"),
    "unknown stage": (
        {"update": "rmss"},
        r"^update\.rmss: unknown stage kind 'rmss'; did you mean 'rms'\? \(the kinds are .*adafactor.*sign",
    ),
    "no kind": (
        {"update": [{"beta": 0.9}]},
        r"^update.*: a stage is required: .*'kind'.*, got \{'beta': 0\.9\}",
    ),
    "a number": ({"update": 3}, r"^update.*: a stage is required: .*, got 3$"),
    "kind is null": ({"update": {"kind": None}}, r"^update.*: .*kind None .*the kinds are"),
    "nothing inside": ({"update": "eigenbasis"}, r"^update\.eigenbasis\.inner: required, got nothing$"),
    "half a graft": (
        {"update": {"kind": "graft", "direction": "sign"}},
        r"^update\.graft\.magnitude: required, got nothing$",
    ),
    "unknown field": (
        {"update": {"kind": "rms", "betta": 0.9}},
        r"^update\.rms\.betta: unknown field .*'beta'.*, got 0\.9$",
    ),
    "out of range": (
        {"update": ["sign", {"kind": "rms", "beta": 2}]},
        r"^update\.rms\.beta: .*less than or equal to 1, got 2$",
    ),
    "deep inside": (
        {"update": {"kind": "eigenbasis", "inner": ["momentum", {"kind": "rms", "beta": -1}]}},
        r"^update\.eigenbasis\.inner\.rms\.beta: .*greater than or equal to 0, got -1$",
    ),
    "text for a number": ({"update": {"kind": "rms", "beta": "0.9"}}, r"^update\.rms\.beta: .*number, got '0\.9'$"),
    "truth for a number": ({"update": {"kind": "rms", "beta": True}}, r"^update\.rms\.beta: .*number, got True$"),
    "infinity": ({"update": {"kind": "rms", "eps": float("inf")}}, r"^update\.rms\.eps: .*finite number, got inf$"),
    "a choice": (
        {"update": {"kind": "rms", "source": "grad"}},
        r"^update\.rms\.source: .*'gradient' or 'direction', got 'grad'$",
    ),
    "twice the same": ({"update": ["rms", "rms"]}, r"^update: .*give each 'rms' its own `name`"),
    "a dotted name": ({"update": {"kind": "rms", "name": "a.b"}}, r"^update\..*name: .*pattern.*, got 'a\.b'$"),
    "cadence": (
        {"update": {"kind": "shampoo", "refresh": {"kind": "every", "steps": 0}}},
        r"^update\.shampoo\.refresh\.steps: .*greater than or equal to 1, got 0$",
    ),
    "a bare interval": (
        {"update": {"kind": "shampoo", "refresh": 10}},
        r"^update\.shampoo\.refresh: a cadence is required: .*every, probability, got 10$",
    ),
    "exponent": (
        {"update": {"kind": "shampoo", "exponent": "x"}},
        r"^update\.shampoo\.exponent: .*'1/4' is required, got 'x'$",
    ),
    "solver and exponent": (
        {"update": {"kind": "shampoo", "solver": "coupled_newton", "exponent": "1/100"}},
        r"^update\.shampoo\.exponent: coupled_newton takes exponents .* got 1/100; .*`exponent` .*`solver` .*eigh",
    ),
    "factors inside a basis": (
        {"update": {"kind": "eigenbasis", "inner": ["momentum", "shampoo"]}},
        r"^update\.eigenbasis\.inner\.shampoo: .*move it outside",
    ),
    "solver of another family": (
        {"update": {"kind": "shampoo", "solver": "power_qr"}},
        r"^update\.shampoo\.solver: unknown root_solver kind 'power_qr'.*coupled_newton, eigh",
    ),
    # the rest of the recipe
    "unknown key": (
        {"update": "rms", "learning_rate": 1},
        r"^learning_rate: unknown field.*did you mean 'lr'.*, got 1$",
    ),
    "a solver among stages": (
        {"update": "eigh"},
        r"^update\.eigh: unknown stage kind 'eigh', which is a basis_solver and a root_solver \(.*--import FILE\.py",
    ),
    "no stage": ({"update": []}, r"update: a stage is required \('identity' takes the gradient as it is\), got none$"),
    "negative lr": ({"update": "rms", "lr": -1}, r"^lr: .*greater than or equal to 0, got -1$"),
    "decay kind": (
        {"update": "rms", "weight_decay": "l3"},
        r"^weight_decay: unknown weight_decay kind 'l3'; did you mean 'l2'",
    ),
    "decay as a number": (
        {"update": "rms", "weight_decay": 0.1},
        r"^weight_decay: a weight_decay is required: .*, got 0\.1$",
    ),
    "decay rate": ({"update": "rms", "weight_decay": {"kind": "l2", "rate": -1}}, r"^weight_decay\.rate: .*, got -1$"),
    "block size": (
        {"update": "rms", "blocking": {"size": 0}},
        r"^blocking\.size: .*greater than or equal to 1, got 0$",
    ),
    "failure": (
        {"update": "rms", "failure": {"nonfinite": "panic"}},
        r"^failure\.nonfinite: .*'skip', 'raise' or 'ignore', got 'panic'$",
    ),
    "unknown routes": ({"update": "rms", "routes": "defalt"}, r"^routes: .*'?default'?.*, got 'defalt'$"),
    "unknown route": ({"update": "rms", "routes": ["defalt"]}, r"^routes: .*the word 'default'.*'defalt'"),
    "route without a name": (
        {"update": "rms", "routes": [{"update": "sign"}]},
        r"^routes.*name: required, got nothing$",
    ),
    "inside a route": (
        {"update": "rms", "routes": [{"name": "a", "update": {"kind": "rms", "beta": 2}}]},
        r"^routes\.a\.update\.rms\.beta: .*, got 2$",
    ),
    "routes of one name": (
        {"update": "rms", "routes": [{"name": "a", "update": "sign"}] * 2},
        r"routes need distinct names, got 'a' twice",
    ),
    "pattern": (
        {"update": "rms", "routes": [{"name": "a", "update": "sign", "match": {"name": "("}}]},
        r"^routes\.a\.match\.name: a regular expression is required .*, got '\('$",
    ),
    "role": (
        {"update": "rms", "routes": [{"name": "a", "update": "sign", "match": {"role": "hed"}}]},
        r"^routes\.a\.match\.role.*: .*'embedding'.*, got 'hed'$",
    ),
    # what a recipe is
    "unknown name": (
        "saop",
        r"^recipe 'saop': a shipped recipe or .*\.yaml.* did you mean 'soap'\? "
        r"\(shipped and near it: soap, .*shipped_recipes\(\) has all\)$",
    ),
    "another type": (3, r"^recipe: a name, path, mapping, list of stages or Recipe is required, got int$"),
    "bytes": (b"soap_fitted", r"^recipe: a name, .* is required, got bytes$"),
    "none": (None, r"^recipe: a name, .* is required, got NoneType$"),
    "broken JSON": ('{"update": ', r"^recipe: .*JSON.*line 1"),
    "another schema": ({"schema": 99, "update": "rms"}, r"^schema: .*1.*, got 99$"),
}


@pytest.mark.parametrize("case", RECIPES)
def test_a_wrong_recipe(case: str) -> None:
    source, message = RECIPES[case]
    with pytest.raises(RecipeError) as caught:
        load_recipe(source)
    text = str(caught.value)
    assert re.search(message, text), text
    assert len(text.splitlines()) == 1 and len(text) < 700 and "pydantic" not in text
    with pytest.raises(RecipeError, match=re.escape(text)):
        Optimizer([nn.Parameter(torch.ones(2, 2))], source)


FILES: dict[str, tuple[str | bytes, str]] = {
    "malformed": ("update: [rms", r"mine\.yaml, line \d+, column \d+: "),
    "tab": ("update:\n\t- rms", r"mine\.yaml, line 2, column 1: "),
    "twice the same key": ("update: rms\nupdate: sign", r"mine\.yaml, line 2, column 1: .*update"),
    "a list": ("- rms", r"mine\.yaml: a mapping with `update` or `base` is required, got list"),
    "empty": ("", r"mine\.yaml: a mapping with `update` or `base` is required, got NoneType"),
    "not text": (b"\xff\xfe\x00", r"mine\.yaml: a readable UTF-8 file is required"),
    "a fault": ("update:\n  - kind: rms\n    beta: 2", r"update\.rms\.beta: .*, got 2$"),
}


@pytest.mark.parametrize("case", FILES)
def test_a_wrong_file(case: str, tmp_path: Path) -> None:
    content, message = FILES[case]
    path = tmp_path / "mine.yaml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    for source in (path, str(path)):
        with pytest.raises(RecipeError, match=message):
            load_recipe(source)


def test_the_faults_of_a_file_name_the_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("update: rmss")
    with pytest.raises(RecipeError, match=r"mine\.yaml"):
        load_recipe(path)


def test_a_missing_file() -> None:
    with pytest.raises(RecipeError, match=r"^nowhere\.yaml: an existing YAML file is required"):
        load_recipe("nowhere.yaml")


def test_many_faults_are_all_told() -> None:
    with pytest.raises(RecipeError) as caught:
        load_recipe({"update": {"kind": "rms", "beta": 2, "epss": 1}, "lr": "fast", "blocking": {"sise": 3}})
    paths = [line.partition(":")[0] for line in str(caught.value).splitlines()]
    assert sorted(paths) == ["blocking.sise", "lr", "update.rms.beta", "update.rms.epss"]


def weight(*shape: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(torch.ones(shape or (2, 2), dtype=dtype))


CALLS: dict[str, tuple[Callable[[], Any], str]] = {
    "lr text": (lambda: Optimizer([weight()], lr="0.1"), r"^lr: a number is required, got '0\.1'"),  # type: ignore[arg-type]
    "lr negative": (lambda: Optimizer([weight()], lr=-1.0), r"^lr: a finite number >= 0 is required, got -1\.0"),
    "lr nan": (lambda: Optimizer([weight()], lr=float("nan")), r"^lr: a finite number >= 0 is required, got nan"),
    "lr tensor": (
        lambda: Optimizer([weight()], lr=torch.ones(2)),
        r"^lr: a number or a tensor with one element .*\(2,\)",
    ),
    "decay": (
        lambda: Optimizer([weight()], weight_decay=-1.0),
        r"^weight_decay: a finite number >= 0 is required, got -1\.0",
    ),
    "decay tensor": (
        lambda: Optimizer([{"params": [weight()], "weight_decay": torch.ones(2)}]),
        r"^weight_decay: a number .*is required",
    ),
    "betas": (lambda: Optimizer([{"params": [weight()], "betas": 0.9}]), r"param group: .*got 'betas'.*[.;,].*recipe"),
    "near": (
        lambda: Optimizer([{"params": [weight()], "weight_deca": 0.9}]),
        r"got 'weight_deca', did you mean 'weight_decay'\?",
    ),
    "recipe": (lambda: Optimizer([{"params": [weight()], "recipe": "soap_fitted"}]), r"param group: .*got 'recipe'"),
    "nothing": (lambda: Optimizer([]), r"empty parameter list"),
    "twice": (lambda: Optimizer([{"params": [p := weight()]}, {"params": [p]}]), r"more than one parameter group"),
    "no tensor": (lambda: Optimizer([3]), r"."),
    "a tensor": (lambda: Optimizer(weight()), r"."),
    "complex": (
        lambda: Optimizer([("w", weight(dtype=torch.complex64))], "soap_fitted", overrides={"routes": []}),
        r"^w: .*complex.*update\.eigenbasis.*view_as_real",
    ),
    "a module": (lambda: Optimizer(nn.Linear(2, 2)), r"compose|parameters\(\)"),  # type: ignore[arg-type]
    "frozen": (
        lambda: eigengraft.compose("soap_fitted", nn.Linear(2, 2).requires_grad_(False)),
        r"^compose: .*trainable .*got none",
    ),
    "no match": (
        lambda: Optimizer(
            [("w", weight())], {"update": "rms", "routes": [{"name": "x", "update": "rms", "match": {"name": "y"}}]}
        ),
        r"^routes\.x: a rule must match at least one parameter, got none .*named_parameters.*optional: true",
    ),
}


@pytest.mark.parametrize("case", CALLS)
def test_a_wrong_call(case: str) -> None:
    call, message = CALLS[case]
    with pytest.raises((ValueError, TypeError), match=message):
        call()


@pytest.mark.parametrize("value", ["x", float("nan"), None])
@pytest.mark.parametrize("key", ["lr", "weight_decay"])
def test_a_group_spoiled_between_steps(key: str, value: Any) -> None:
    p = weight()
    optimizer = Optimizer([p])
    p.grad = torch.ones_like(p)
    optimizer.param_groups[0][key] = value
    before = p.detach().clone()
    with pytest.raises((ValueError, TypeError), match=key):
        optimizer.step()
    assert torch.equal(p, before) and int(optimizer.state[p]["step"]) == 0
