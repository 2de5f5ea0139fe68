"""What papers/recipes_on_text says was measured follows from its runs."""

import json
from pathlib import Path
from typing import Any

import pytest

from eigengraft import shipped_recipes
from eigengraft.experiments.studies.study import load_study

from .scripts import PAPERS, script

FOLDER = PAPERS / "recipes_on_text"
TABLE = script("recipes_on_text", "table")
STUDIES = {
    name + ".yaml": FOLDER / folder
    for name, folder in (("study", ""), ("track3", "track3"), ("track3_parts", "track3_parts"))
}


def read(folder: Path, name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((folder / f"{name}.json").read_text())
    return found


@pytest.mark.parametrize("file", STUDIES)
def test_the_runs_that_were_measured_are_those_the_study_plans(file: str) -> None:
    study, rows = load_study(FOLDER / file), read(STUDIES[file], "runs")
    measured = [(row["recipe"], row["seed"]) for row in rows]
    planned = {(recipe, seed) for recipe in study.axes["recipe"] for seed in study.seeds}
    assert len(measured) == len(set(measured)) and set(measured) == planned
    assert {row["recipe"] for row in read(STUDIES[file], "steps")} == set(study.axes["recipe"])


@pytest.mark.parametrize("file", STUDIES)
def test_a_run_has_the_learning_rate_that_its_search_found_best(file: str) -> None:
    for found in read(STUDIES[file], "searches"):
        tried = {lr: loss for lr, loss in found["tried"] if loss is not None}
        assert found["lr"] == min(tried, key=tried.__getitem__)
        assert {row["lr"] for row in read(STUDIES[file], "runs") if row["recipe"] == found["recipe"]} == {found["lr"]}


@pytest.mark.parametrize("file", STUDIES)
def test_the_tables_are_those_of_the_runs(file: str) -> None:
    """In the table beside the runs and in README.md."""
    folder = STUDIES[file]
    base = load_study(FOLDER / file).compared[1]
    table = TABLE.markdown(*(read(folder, name) for name in ("runs", "searches", "steps")), base)
    assert (folder / "table.md").read_text() == table
    assert table in (FOLDER / "README.md").read_text()


def test_the_best_learning_rates_stand_in_the_guide_and_beside_the_rates_that_were_chosen_here() -> None:
    rates = script("recipes_on_text", "rates")
    best, page = rates.rates(), rates.GUIDE.read_text()
    assert best["polargrad"] == 0.256 and "shampoo | Shampoo with Adam grafting" in page.replace("`", "")
    assert rates.with_column(page, best) == page
    for name in shipped_recipes():
        text = (rates.SHIPPED / f"{name}.yaml").read_text()
        assert rates.with_comment(text, best.get(name)) == text, name


def test_every_shipped_recipe_is_in_the_table_or_said_to_be_left_out() -> None:
    study = load_study(FOLDER / "study.yaml")
    asked = {changes["recipe"] for changes in study.axes["recipe"].values()}
    left_out = (FOLDER / "README.md").read_text().split("## Left out")[1]
    assert [name for name in shipped_recipes() if name not in asked and f"`{name}`" not in left_out] == []
