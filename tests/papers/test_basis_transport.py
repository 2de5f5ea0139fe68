"""What papers/basis_transport says was measured follows from its runs."""

import itertools
import json
from typing import Any

import pytest
import torch

from eigengraft.experiments.studies.plan import plan_runs
from eigengraft.experiments.studies.study import load_study

from .scripts import PAPERS, script

FOLDER = PAPERS / "basis_transport"
TRANSPORT = script("basis_transport", "transport")
SIZES = script("basis_transport", "sizes")


def read(name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((FOLDER / f"{name}.json").read_text())
    return found


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    return read("transport")


def test_the_runs_that_were_measured_are_those_the_study_plans(rows: list[dict[str, Any]]) -> None:
    for name, measured in [
        ("study", rows),
        *((name, read(name)) for name in ("seeds", "intervals", "larger", "kl", "rates")),
    ]:
        study = load_study(FOLDER / f"{name}.yaml")
        planned = {(*cell, seed) for cell in itertools.product(*study.axes.values()) for seed in study.seeds}
        cells = [(*(row[axis] for axis in study.axes), row["seed"]) for row in measured]
        assert len(cells) == len(set(cells)) == len(plan_runs(study)) and set(cells) == planned


@pytest.mark.slow
def test_the_tables_are_those_of_the_runs(rows: list[dict[str, Any]]) -> None:
    """In the table beside the study and in README.md."""
    assert (FOLDER / "transport.md").read_text() == TRANSPORT.markdown(rows)
    told = (FOLDER / "README.md").read_text().splitlines()
    tables = [line for task in ("bytes", "digits") for line in TRANSPORT.table(rows, task)]
    tables += TRANSPORT.training_table(rows, "digits")
    tables += [*TRANSPORT.paired_table(read("seeds")), *TRANSPORT.table(read("intervals"), "bytes")]
    tables += [
        *TRANSPORT.paired_table(read("larger")),
        *TRANSPORT.paired_table(read("kl")),
        *SIZES.table(read("rates")),
    ]
    assert len(tables) == 62 and [line for line in tables if line not in told] == []


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


def test_ratios_of_training_losses_are_between_runs_of_one_seed() -> None:
    """Counted by hand: 1/4 and 4/4 to exact, 1/1 and 4/1 to permute; their geometric means are 1/2 and 2."""
    values = {"exact": (0.004, 0.004), "permute": (0.001, 0.001), "marginals": (0.001, 0.004)}
    rows = [
        {"task": "a", "transport": rule, "case": "kl", "seed": seed, "train_loss": loss}
        for rule, losses in values.items()
        for seed, loss in enumerate(losses)
    ]
    assert TRANSPORT.training_table(rows, "a")[2:] == [
        "| kl | 4 | 1 | 2.5 | 0.50 (0.25 to 1.00) | 2.00 (1.00 to 4.00) |"
    ]


def test_sizes_weigh_entries_by_the_root_of_the_second_moment() -> None:
    """u = (1, 2) after many steps, v = (1, 9): mean of squares 5/2, weighted with 1 and 3: 13/4."""
    even, energy = SIZES.update_sizes(torch.tensor([1.0, 6.0]), torch.tensor([1.0, 9.0]), 10_000)
    assert even == pytest.approx(2.5**0.5) and energy == pytest.approx(3.25**0.5)
