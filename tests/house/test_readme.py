"""The front page: complete, and what it shows is run as it stands there."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest

from ..processes import run
from .pages import ROOT, files, links, script, text

README = "README.md"


@pytest.mark.parametrize("word", ["pip install", "make demo", "make test", "make quick", "make docs", "recipe.svg"])
def test_the_front_page_says(word: str) -> None:
    assert word in text(README)


def test_every_guide_is_linked_from_the_front_page() -> None:
    guides = {path.relative_to(ROOT).as_posix() for path in (ROOT / "docs" / "guide").glob("*.md")}
    assert guides <= set(links(README))


@pytest.mark.slow
def test_the_python_example_runs(tmp_path: Path) -> None:
    (tmp_path / "example.py").write_text(script(README) + "\nprint(optimizer)\n")
    done = run("example.py", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Optimizer(recipe=" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("place", ["chain", "basis", "soap_fitted"])
def test_the_new_stage_trains_from_one_file_and_yaml(tmp_path: Path, place: str) -> None:
    (tmp_path / "belief.py").write_text(files(README)["belief.py"])
    chain = "[{kind: momentum, beta: 0.9, bias_correction: false}, {kind: belief, beta: 0.99}]"
    update = chain if place == "chain" else f"[{{kind: eigenbasis, inner: {chain}}}]"
    recipe = f"{{update: {update}}}"
    if place == "soap_fitted":  # as the page says under the stage
        (changes,) = re.findall(r'`(\{"update\.eigenbasis\.inner": \[.*?"exact"\})`', text(README))
        recipe = f"{{base: soap_fitted, set: {json.dumps(ast.literal_eval(changes))}}}"
    experiment = f"imports: [belief.py]\ntask: {{kind: digits, model: mlp}}\nlr: 0.002\nrecipe: {recipe}\n"
    (tmp_path / "experiment.yaml").write_text(experiment)
    quick = ["steps=30", "eval_every=15", "--out", "run"]
    done = run("-m", "eigengraft", "train", "experiment.yaml", *quick, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "run" / "result.json").read_text())["val_accuracy"] > 0.5  # of ten digits


@pytest.mark.slow
def test_the_new_stage_keeps_the_laws(tmp_path: Path) -> None:
    check = "from eigengraft.testing import check_stage\nprint(check_stage(Belief()))\n"
    (tmp_path / "check.py").write_text(files(README)["belief.py"] + check)
    done = run("check.py", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "update.belief: " in done.stdout and "laws hold" in done.stdout


def test_one_line_makes_the_recipes_that_the_front_page_says() -> None:
    import eigengraft

    rows = re.findall(r"^\| `(\{.*?\})` \| .*?`(\w+)` \|$", text(README), flags=re.MULTILINE)
    assert len(rows) == 2
    for overrides, name in rows:
        changed = eigengraft.load_recipe("soap_fitted", ast.literal_eval(overrides))
        assert changed.update == eigengraft.load_recipe(name).update


def test_the_picture_names_parts_and_recipes_that_exist() -> None:
    import eigengraft
    from eigengraft.component import families

    drawing = (ROOT / "docs" / "assets" / "recipe.svg").read_text(encoding="utf-8")
    recipes = re.findall(r'class="makes"[^>]*>in ([\w/]+)<', drawing)
    assert recipes and set(recipes) <= set(eigengraft.shipped_recipes())
    parts = re.findall(r'class="mono[^"]*"[^>]*>([^<]+)<', drawing)
    kinds = {kind for family in families().values() for kind in family.members} | {"plain"}
    words = {word for part in parts for word in re.findall(r"[a-z]\w+", part)}
    assert words <= kinds, words - kinds
