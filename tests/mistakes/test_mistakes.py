"""Mistakes of every kind: what a user writes is refused, and the error says where, what was required, what was got.

The tables beside this file hold them, one row each: what is written, and the words that the error must hold, of which
several are divided by " / ".
"""

import json
import re
import shlex
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import eigengraft
from eigengraft.experiments import load_experiment
from eigengraft.experiments.cli.main import app
from eigengraft.experiments.studies.plan import plan_runs
from eigengraft.experiments.studies.study import load_study
from eigengraft.optimizers.recipe.loading import parse_yaml
from eigengraft.preconditioners import Momentum

from .calls import CALLS, WARNINGS
from .command_line import COMMAND_LINES
from .experiments import EXPERIMENTS, STUDIES
from .recipes import RECIPES

PLANNED = {
    "name": "study",
    "description": "",
    "metric": "val_loss",
    "compare": "lr",
    "baseline": "0.1",
    "runs": [{"directory": "lr=0.1/seed-0", "labels": {"lr": "0.1"}, "seed": 0}],
}
"""What is beside the runs of a study of which none has begun."""
BASE = "{task: digits, recipe: soap, steps: 2}"


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 4))


def missing(words: str, text: str) -> list[str]:
    return [part for part in words.split(" / ") if part not in text]


def refused(act: Callable[[], object], words: str) -> str:
    """What is wrong with the way in which something is refused; nothing if it is as it should be."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of repeated parameters first
        try:
            act()
        except (ValueError, TypeError, RuntimeError, AttributeError) as error:
            text = str(error)
            return f"misses {absent} in: {text}" if (absent := missing(words, text)) else ""
    return "accepted without a word"


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


def test_there_are_at_least_150_different_mistakes() -> None:
    rows = [*RECIPES, *EXPERIMENTS, *STUDIES, *COMMAND_LINES, *CALLS, *WARNINGS]
    assert len({written for written, _ in rows}) == len(rows) >= 150
    assert all(words.strip() for _, words in rows)


@pytest.mark.parametrize(("written", "words"), RECIPES)
def test_a_recipe(written: str, words: str) -> None:
    assert refused(lambda: eigengraft.compose(parse_yaml(written), net()), words) == ""


@pytest.mark.parametrize(("written", "words"), EXPERIMENTS)
def test_an_experiment(written: str, words: str, folder: Path) -> None:
    Path("e.yaml").write_text(written)
    assert refused(lambda: load_experiment("e.yaml"), words) == ""


@pytest.mark.parametrize(("written", "words"), STUDIES)
def test_a_study(written: str, words: str, folder: Path) -> None:
    Path("s.yaml").write_text(written.replace("base: B", f"base: {BASE}"))
    assert refused(lambda: plan_runs(load_study("s.yaml")), words) == ""


@pytest.mark.parametrize(("written", "words"), COMMAND_LINES)
def test_a_command_line(written: str, words: str, folder: Path) -> None:
    result = CliRunner().invoke(app, shlex.split(written))
    assert isinstance(result.exception, SystemExit) and result.exit_code == 2
    assert missing(words, " ".join(result.output.split())) == [], result.output
    assert "Traceback" not in result.output


@pytest.mark.parametrize(("written", "words"), CALLS)
def test_a_call(written: str, words: str) -> None:
    model = net()
    names = {name: getattr(eigengraft, name) for name in ("compose", "Optimizer", "load_recipe")}
    names |= {"eigengraft": eigengraft, "torch": torch, "nn": nn, "Momentum": Momentum, "model": model}
    names |= {"conv": nn.Sequential(nn.Conv2d(2, 3, 3)), "sgd": eigengraft.compose("sgd", model)}
    names["backward"] = lambda: model(torch.ones(2, 8)).square().sum().backward()
    assert refused(lambda: eval(written, names), words) == ""


@pytest.mark.parametrize(("written", "words"), WARNINGS)
def test_a_warning(written: str, words: str) -> None:
    optimizers = {name: eigengraft.compose(name, net()) for name in ("sgd", "adamw")}
    with pytest.warns(UserWarning, match=f"^{re.escape(words)}$"):
        eval(written, dict(optimizers))


def test_what_is_meant_is_done(folder: Path) -> None:
    """Forms that look like mistakes and are none."""
    Path("e.yaml").write_text("{task: digits, recipe: soap, overrides: {update.eigenbasis.refresh.steps: 3}}")
    (stage,) = load_experiment("e.yaml").recipe.update
    assert stage.model_dump()["refresh"]["steps"] == 3
    assert eigengraft.load_recipe({"update": "rms", "storage": {}}) == eigengraft.load_recipe({"update": "rms"})
    assert eigengraft.load_recipe("sgd", "lr=1e-2").lr == 0.01
