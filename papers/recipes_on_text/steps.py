"""Measure the time of a step of each recipe of a study, relative to a step of the baseline, in one process and thread.

The recipes make steps in turn, each on its own model, so that a busy moment of the machine affects all of them. The
time of a step is that of the optimizer after the gradients are computed. A round has two periods of ten steps. A row
has the median over rounds of the mean time of a step.

    python steps.py study.yaml OUT     writes OUT/steps.json, one row a recipe

Only recipes that OUT/steps.json does not have are measured, and the baseline beside them. Without this file all are.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch

import eigengraft
from eigengraft.experiments.studies.plan import plan_runs
from eigengraft.experiments.studies.study import load_study
from eigengraft.experiments.training.experiment import Experiment

PERIOD = 20
ROUNDS = 5


class Timed:
    """An experiment whose optimizer steps are timed."""

    def __init__(self, experiment: Experiment) -> None:
        self.model, self.dataset = experiment.task.new_model(0), experiment.task.load()
        self.backward = experiment.gradient_pass.backward
        self.optimizer = eigengraft.compose(experiment.run_recipe, self.model, experiment.lr, experiment.weight_decay)
        self.steps, self.middle = 0, 0.0

    def step(self) -> float:
        """Train one step. Return the seconds that it took after the gradients were computed."""
        batch = self.dataset.batch(0, self.steps)

        def closure() -> torch.Tensor:
            self.optimizer.zero_grad()
            loss = self.backward(self.model, batch, 1.0)
            self.middle = time.perf_counter()
            return loss

        self.optimizer.step(closure)
        self.steps += 1
        return time.perf_counter() - self.middle


def measure(experiments: dict[str, Experiment], base: str) -> list[dict[str, Any]]:
    """Return a row for each experiment: milliseconds of a step, and this time divided by the time of `base`."""
    timed = {label: Timed(experiment) for label, experiment in experiments.items()}
    for one in (*timed.values(), *timed.values()):  # caches, first refreshes
        one.step()
    means: dict[str, list[float]] = {label: [] for label in timed}
    for _ in range(ROUNDS):
        seconds: dict[str, list[float]] = {label: [] for label in timed}
        for _ in range(PERIOD):
            for label, one in timed.items():
                seconds[label].append(one.step())
        for label, some in seconds.items():
            means[label].append(fmean(some))
    ratios = {label: median(a / b for a, b in zip(own, means[base], strict=True)) for label, own in means.items()}
    return [{"recipe": label, "ms": 1e3 * median(means[label]), "of_base": ratios[label]} for label in timed]


def main() -> None:
    parser = argparse.ArgumentParser(description="Steps of recipes in steps of the baseline.")
    parser.add_argument("study", type=Path)
    parser.add_argument("out", type=Path, help="where steps.json goes")
    given = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    study = load_study(given.study)
    axis, base = study.compared
    path = given.out / "steps.json"
    before = json.loads(path.read_text()) if path.is_file() else []
    known = {row["recipe"] for row in before}
    experiments = {run.labels[axis]: run.experiment for run in plan_runs(study) if run.seed == study.seeds[0]}
    asked = {label: one for label, one in experiments.items() if label not in known or label == base}
    rows = before + [row for row in measure(asked, base) if row["recipe"] not in known]
    text = ",\n".join(json.dumps(row) for row in rows)
    path.write_text(f"[\n{text}\n]\n")


if __name__ == "__main__":
    main()
