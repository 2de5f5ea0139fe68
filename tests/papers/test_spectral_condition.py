"""What papers/spectral_condition_2023 says was measured follows from its runs."""

import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest

from eigengraft.experiments.studies.study import load_study
from eigengraft.experiments.training.experiment import load_experiment

from .scripts import PAPERS, script

FOLDER = PAPERS / "spectral_condition_2023"
WIDTHS = script("spectral_condition_2023", "widths")


def read(name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((FOLDER / f"{name}.json").read_text())
    return found


@pytest.mark.parametrize(("name", "file"), [("widths", "study"), ("text", "text"), ("rates", "rates")])
def test_the_runs_that_were_measured_are_those_the_study_plans(name: str, file: str) -> None:
    study, rows = load_study(FOLDER / f"{file}.yaml"), read(name)
    axes = [[json.loads(label) if label[0].isdigit() else label for label in axis] for axis in study.axes.values()]
    planned = {(*cell, seed) for cell in itertools.product(*axes) for seed in study.seeds}
    measured = [(row["method"], row["rule"], row["width"], row["lr"], row["seed"]) for row in rows]
    assert len(measured) == len(set(measured)) and set(measured) == planned


def test_the_rule_of_the_study_is_relative_to_its_smallest_width() -> None:
    study = load_study(FOLDER / "study.yaml")
    changes = study.axes["rule"]
    assert changes["plain"] == {}
    scaled = load_experiment(
        {**study.base, "recipe": "soap"}, [f"width_scaling={json.dumps(changes['scaled']['width_scaling'])}"]
    )
    assert scaled.recipe.width_scaling is not None and scaled.recipe.width_scaling.base_width == 32


@pytest.mark.parametrize("name", ["widths", "text", "rates"])
def test_the_tables_are_those_of_the_runs(name: str) -> None:
    """In the table beside the study all of them, in README.md the lines of the summary."""
    rows = read(name)
    assert (FOLDER / f"{name}.md").read_text() == WIDTHS.markdown(rows)
    told = (FOLDER / "README.md").read_text().splitlines()
    assert [line for line in WIDTHS.summary(rows) if line not in told] == []


@pytest.mark.parametrize("name", ["widths", "text"])
@pytest.mark.parametrize("method", ["adam", "muon", "soap"])
def test_the_best_learning_rate_of_one_width_is_that_of_all_within_a_step(method: str, name: str) -> None:
    """With the rule; without it that of the largest width is lower by a step at least."""
    assert max(map(abs, WIDTHS.drift(read(name), method, "scaled"))) <= 1
    assert WIDTHS.drift(read(name), method, "plain")[-1] <= -1


@pytest.mark.slow
def test_the_best_is_the_least_mean_and_a_run_that_diverged_is_worst(tmp_path: Path) -> None:
    """Two seeds of two widths: at width 8 the best rate is 1/2, at width 16, where one seed of it diverged, 1/8."""
    table = {(8, 0.125): (3.0, 2.0), (8, 0.5): (2.0, 2.5), (16, 0.125): (1.0, 3.0), (16, 0.5): (0.5, None)}
    made = [
        {"method": method, "rule": rule, "width": width, "lr": lr, "seed": seed, "val_loss": loss}
        for method in WIDTHS.METHODS
        for rule in WIDTHS.RULES
        for (width, lr), both in table.items()
        for seed, loss in enumerate(both)
    ]
    assert WIDTHS.losses(made, "muon", "plain")[16] == {0.125: 2.0, 0.5: math.inf}
    assert WIDTHS.drift(made, "muon", "plain") == [0, -2]
    assert "| Muon | plain | 2^-1 | 2^-3 | 2.000, inf |" in WIDTHS.summary(made)
    assert "| 16 | **2.000** | diverged |" in WIDTHS.every_loss(made, "soap", "scaled")
    WIDTHS.draw(made, tmp_path / "widths.svg")
    assert (tmp_path / "widths.svg").read_text().count("width 16") == 1


@pytest.mark.parametrize("method", ["adam", "muon", "soap"])
def test_learning_rates_alone_do_it_on_text(method: str) -> None:
    """Within a step of the grid, and at width 128 better than without the rule and than with the initial weights."""
    alone, text = read("rates"), read("text")
    assert max(map(abs, WIDTHS.drift(alone, method, "rates"))) <= 1
    least = min(WIDTHS.losses(alone, method, "rates")[128].values())
    assert all(least < min(WIDTHS.losses(text, method, rule)[128].values()) - 0.04 for rule in ("plain", "scaled"))
