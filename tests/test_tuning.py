"""The demo's learning rates are what the committed tuning study found."""

import csv
import itertools
import math
from pathlib import Path

import pytest

from eigengraft.experiments import study as studies
from eigengraft.experiments.plan import plan
from eigengraft.experiments.study import load_study

TABLE = Path(studies.__file__).parent / "studies" / "results" / "tune.csv"


@pytest.fixture(scope="module")
def table():
    """(task, method) -> {lr: validation loss summed over seeds, infinite where a run diverged}."""
    found = {}
    with TABLE.open(encoding="utf-8", newline="") as stream:
        for row in csv.DictReader(stream):
            loss = float(row["val_loss"]) if row["status"] == "complete" else math.inf
            losses = found.setdefault((row["task"], row["method"]), {})
            losses[float(row["lr"])] = losses.get(float(row["lr"]), 0.0) + loss
            assert row["status"] in ("complete", "diverged")
    return found


def test_the_table_is_the_tuning_study_of_the_demo(table):
    demo, tune = load_study("demo"), load_study("tune")
    assert tune.base == demo.base
    assert {axis: tune.axes[axis] for axis in demo.axes} == demo.axes
    assert not set(tune.seeds) & set(demo.seeds)
    cells = {(run.labels["task"], run.labels["method"], run.experiment.lr) for run in plan(tune)}
    assert cells == {(*key, lr) for key, losses in table.items() for lr in losses}


def test_the_grid_is_fine_enough(table):
    for losses in table.values():
        assert all(1.9 <= high / low <= 2.1 for low, high in itertools.pairwise(sorted(losses)))


def test_every_learning_rate_is_the_best_and_inside_its_grid(table):
    for run in plan(load_study("demo")):
        losses = table[run.labels["task"], run.labels["method"]]
        best = min(losses, key=losses.__getitem__)
        assert min(losses) < best < max(losses), run.labels
        assert run.experiment.lr == best, run.labels
