"""What papers/basis_transport says was measured follows from its runs."""

import itertools
import json
from typing import Any

import pytest

from eigengraft.experiments.studies.plan import plan_runs
from eigengraft.experiments.studies.study import load_study

from .scripts import PAPERS, script

FOLDER = PAPERS / "basis_transport"
TRANSPORT = script("basis_transport", "transport")


def read(name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((FOLDER / f"{name}.json").read_text())
    return found


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    return read("transport")


def test_the_runs_that_were_measured_are_those_the_study_plans(rows: list[dict[str, Any]]) -> None:
    for name, measured in (("study", rows), ("seeds", read("seeds")), ("intervals", read("intervals"))):
        study = load_study(FOLDER / f"{name}.yaml")
        planned = {(*cell, seed) for cell in itertools.product(*study.axes.values()) for seed in study.seeds}
        cells = [(*(row[axis] for axis in study.axes), row["seed"]) for row in measured]
        assert len(cells) == len(set(cells)) == len(plan_runs(study)) and set(cells) == planned


def test_the_tables_are_those_of_the_runs(rows: list[dict[str, Any]]) -> None:
    """In the table beside the study and in README.md."""
    assert (FOLDER / "transport.md").read_text() == TRANSPORT.markdown(rows)
    told = (FOLDER / "README.md").read_text().splitlines()
    tables = [line for task in ("bytes", "digits") for line in TRANSPORT.table(rows, task)]
    tables += [*TRANSPORT.paired_table(read("seeds")), *TRANSPORT.table(read("intervals"), "bytes")]
    assert len(tables) == 33 and [line for line in tables if line not in told] == []


def test_differences_are_between_runs_of_one_seed() -> None:
    """Counted by hand: 1 - 3 and 2 - 5 against exact, 1 - 4 and 2 - 4 against permute."""
    values = {"exact": (3.0, 5.0), "permute": (4.0, 4.0), "marginals": (1.0, 2.0)}
    rows = [
        {"task": "a", "transport": rule, "case": "lr-0.1", "seed": seed, "diverged": False, "val_loss": loss}
        for rule, losses in values.items()
        for seed, loss in enumerate(losses)
    ]
    assert TRANSPORT.table(rows, "a")[2:] == [
        "| lr 0.1 | 4.000 | 4.000 | **1.500** | -2.500 (-3.000 to -2.000) | -2.500 (-3.000 to -2.000) |"
    ]
