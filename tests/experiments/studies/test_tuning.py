"""The demo's learning rates are what the committed tuning study found."""

import csv
import itertools
import math
from pathlib import Path

import pytest

from eigengraft.experiments.studies import study as studies
from eigengraft.experiments.studies.plan import plan_runs
from eigengraft.experiments.studies.study import load_study

pytestmark = pytest.mark.slow

RESULTS = Path(studies.__file__).parent / "results"
TUNING = ("tune-bytes", "tune-digits")


@pytest.fixture(scope="module")
def table():
    """(task, method) -> {lr: validation loss summed over seeds, infinite where a run diverged}."""
    found = {}
    for row in rows():
        losses = found.setdefault((row["task"], row["method"]), {})
        loss = float(row["val_loss"]) if row["status"] == "complete" else math.inf
        losses[float(row["lr"])] = losses.get(float(row["lr"]), 0.0) + loss
    return found


def rows():
    for name in TUNING:
        with (RESULTS / f"{name}.csv").open(encoding="utf-8", newline="") as stream:
            for row in csv.DictReader(stream):
                yield {column.removeprefix("axis."): value for column, value in row.items()}


def test_the_table_is_the_tuning_study_of_the_demo():
    demo = load_study("demo")
    planned = []
    for tune in map(load_study, TUNING):
        assert tune.base == demo.base
        assert tune.axes["method"] == demo.axes["method"]
        assert tune.axes["task"].items() <= demo.axes["task"].items()
        assert not set(tune.seeds) & set(demo.seeds)
        planned += [(r.labels["task"], r.labels["method"], r.labels["lr"], str(r.seed)) for r in plan_runs(tune)]
    assert {task for task, *_ in planned} == set(demo.axes["task"])
    assert planned == [(row["task"], row["method"], row["lr"], row["seed"]) for row in rows()]
    assert {row["status"] for row in rows()} <= {"complete", "diverged"}


def test_the_grid_is_fine_enough(table):
    for losses in table.values():
        assert all(1.9 <= high / low <= 2.1 for low, high in itertools.pairwise(sorted(losses)))


def test_every_learning_rate_is_the_best_and_inside_its_grid(table):
    for run in plan_runs(load_study("demo")):
        losses = table[run.labels["task"], run.labels["method"]]
        best = min(losses, key=losses.__getitem__)
        assert min(losses) < best < max(losses), run.labels
        assert run.experiment.lr == best, run.labels
