"""Mistakes of every kind: what a user writes is refused, and the error says where, what was required, what was got.

The tables beside this file hold them, one row each: what is written, and the paths and values that the error must name.
Wrong fields of components are in the rows of tests/laws; wrong checkpoints, gradients and overrides are tested with
their subjects.
"""

import json
import shlex
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import eigengraft
from eigengraft import RecipeError
from eigengraft.experiments import load_experiment
from eigengraft.experiments.studies.plan import plan_runs
from eigengraft.experiments.studies.study import load_study
from eigengraft.optimizers.recipe.loading import parse_yaml
from eigengraft.preconditioners import Momentum

from ..cli import invoke
from ..refusals import check_said, refused
from .calls import CALLS
from .command_line import COMMAND_LINES
from .experiments import EXPERIMENTS, STUDIES
from .recipes import RECIPES

PLANNED = {
    "study": {"name": "study", "description": "", "metric": "val_loss", "larger": False},
    "compare": "lr",
    "baseline": "0.1",
    "runs": [{"directory": "lr=0.1/seed-0", "labels": {"lr": "0.1"}, "seed": 0}],
}
"""What is beside the runs of a study of which none has begun."""
BASE = "{task: digits, recipe: soap, steps: 2}"


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 4))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "1000")  # so that no message is broken into lines
    Path("exp.yaml").write_text("{task: {kind: digits, width: 8}, recipe: soap, lr: 0.01, steps: 3}")
    Path("study.yaml").write_text(f"{{base: {BASE}, axes: {{lr: [0.1]}}}}")
    Path("broken.py").write_text("import nothing_of_this_name")
    Path("empty").mkdir()
    Path("planned").mkdir()
    Path("planned/study.json").write_text(json.dumps(PLANNED))
    return tmp_path


def test_no_mistake_is_listed_twice() -> None:
    rows = [*RECIPES, *EXPERIMENTS, *STUDIES, *COMMAND_LINES, *CALLS]
    assert len({written for written, _ in rows}) == len(rows)


@pytest.mark.parametrize(("written", "says"), RECIPES)
def test_wrong_recipes_are_refused(written: str, says: tuple[object, ...]) -> None:
    with refused(ValueError, *says) as caught:
        eigengraft.compose(parse_yaml(written), net())
    assert "pydantic" not in str(caught.value)


@pytest.mark.parametrize(("written", "says"), EXPERIMENTS)
def test_wrong_experiments_are_refused(written: str, says: tuple[object, ...], folder: Path) -> None:
    Path("e.yaml").write_text(written)
    with refused(RecipeError, *says):
        load_experiment("e.yaml")


@pytest.mark.parametrize(("written", "says"), STUDIES)
def test_wrong_studies_are_refused(written: str, says: tuple[object, ...], folder: Path) -> None:
    Path("s.yaml").write_text(written.replace("base: B", f"base: {BASE}"))
    with refused(RecipeError, *says):
        plan_runs(load_study("s.yaml"))


@pytest.mark.parametrize(("written", "says"), COMMAND_LINES)
def test_wrong_command_lines_are_refused(written: str, says: tuple[object, ...], folder: Path) -> None:
    result = invoke(shlex.split(written))
    assert isinstance(result.exception, SystemExit) and result.exit_code == 2
    check_said(" ".join(result.output.split()), *says)
    assert "Traceback" not in result.output and "None" not in result.output


@pytest.mark.parametrize(("written", "says"), CALLS)
def test_wrong_calls_are_refused(written: str, says: tuple[object, ...]) -> None:
    model = net()
    names = {name: getattr(eigengraft, name) for name in ("compose", "Optimizer", "load_recipe")}
    names |= {"eigengraft": eigengraft, "torch": torch, "nn": nn, "Momentum": Momentum, "model": model}
    names |= {"conv": nn.Sequential(nn.Conv2d(2, 3, 3)), "sgd": eigengraft.compose("sgd", model)}
    names["backward"] = lambda: model(torch.ones(2, 8)).square().sum().backward()
    with warnings.catch_warnings(), refused((ValueError, TypeError, RuntimeError, AttributeError), *says):
        warnings.simplefilter("ignore")  # torch warns of repeated parameters first
        eval(written, names)


FILES: dict[str, tuple[str | bytes, tuple[object, ...]]] = {
    "malformed": ("update: [rms", ("mine.yaml", 1, 9)),
    # the parser sees the next two in line 4: before the colon of `lr`, and at the end of the file
    "an open brace": ("update:\n  - {kind: rms, beta: 0.9\n  - sign\nlr: 1\n", ("mine.yaml", 2, 5, "brace", 4)),
    "an open bracket": ("update:\n  - [rms\n  - sign\n", ("mine.yaml", 2, 5, "bracket", 4)),
    "an open quote": ("lr: 1\nupdate: 'rms\n", ("mine.yaml", 2, 9, "quote")),
    "a missing comma": ("update: {kind: rms,\n  beta: 0.9\n  eps: 1}", ("mine.yaml", 1, 9, "brace", 3)),
    "tab": ("update:\n\t- rms", ("mine.yaml", 2, 1)),
    "twice the same key": ("update: rms\nupdate: sign", ("mine.yaml", 2, 1)),
    "a list": ("- rms", ("mine.yaml", "update", "base", "list")),
    "empty": ("", ("mine.yaml", "update", "base", "NoneType")),
    "not text": (b"\xff\xfe\x00", ("mine.yaml", "UTF", 8)),
    "a fault": ("update:\n  - kind: rms\n    beta: 2", ("update.rms.beta", 2)),
}


@pytest.mark.parametrize("case", FILES)
def test_wrong_recipe_files_are_refused(case: str, tmp_path: Path) -> None:
    content, says = FILES[case]
    path = tmp_path / "mine.yaml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    for source in (path, str(path)):
        with refused(RecipeError, *says):
            eigengraft.load_recipe(source)


def test_the_faults_of_a_file_name_the_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("update: rmss")
    with refused(RecipeError, "mine.yaml"):
        eigengraft.load_recipe(path)


def test_a_missing_recipe_file_is_refused() -> None:
    with refused(RecipeError, "nowhere.yaml"):
        eigengraft.load_recipe("nowhere.yaml")


def test_all_faults_of_a_recipe_are_named_at_once() -> None:
    with pytest.raises(RecipeError) as caught:
        eigengraft.load_recipe({"update": {"kind": "rms", "beta": 2, "epss": 1}, "lr": "fast", "blocking": {"sise": 3}})
    paths = [line.partition(":")[0] for line in str(caught.value).splitlines()]
    assert sorted(paths) == ["blocking.sise", "lr", "update.rms.beta", "update.rms.epss"]


@pytest.mark.parametrize("value", ["x", float("nan"), float("inf"), None])
@pytest.mark.parametrize("key", ["lr", "weight_decay"])
def test_wrong_numbers_put_into_a_group_are_refused_in_the_step(key: str, value: Any) -> None:
    p = nn.Parameter(torch.ones(2, 2))
    optimizer = eigengraft.Optimizer([p])
    p.grad = torch.ones_like(p)
    optimizer.param_groups[0][key] = value
    before = p.detach().clone()
    with refused((ValueError, TypeError), key):
        optimizer.step()
    assert torch.equal(p, before) and int(optimizer.state[p]["step"]) == 0


def test_forms_that_look_like_mistakes_are_accepted(folder: Path) -> None:
    Path("e.yaml").write_text("{task: digits, recipe: soap, overrides: {update.eigenbasis.refresh.steps: 3}}")
    (stage,) = load_experiment("e.yaml").recipe.update
    assert stage.model_dump()["refresh"]["steps"] == 3
    assert eigengraft.load_recipe({"update": "rms", "storage": {}}) == eigengraft.load_recipe({"update": "rms"})
    assert eigengraft.load_recipe("sgd", "lr=1e-2").lr == 0.01
