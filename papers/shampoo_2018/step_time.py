"""Measure the time of a step of Shampoo, SGD, AdaGrad and Adam, on the models of this folder's studies.

A step is the gradient of one batch and an update. Its time is the processor time of one thread. In every round, each
method makes one step. The time of a method is the median over rounds. For Shampoo with roots at longer intervals it is
the mean over whole intervals, so that the time of new roots is included.

    python step_time.py            writes results/step_time.json and results/step_time.md
"""

from __future__ import annotations

import copy
import json
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
from torch import Tensor, nn

from eigengraft import Optimizer
from eigengraft.experiments.benches.step_times import Contender, take_turns
from eigengraft.experiments.studies.plan import plan_runs
from eigengraft.experiments.studies.study import load_study
from eigengraft.experiments.training.experiment import Experiment

FOLDER = Path(__file__).parent
STUDIES = ("study", "convolutions")
INTERVALS = (1, 20, 100)
"""Numbers of steps between two computations of Shampoo's roots. The studies have 1."""
ROUNDS = 200


def experiments(name: str) -> dict[str, Experiment]:
    """Return the experiments of a study by method, and those of Shampoo with roots at longer intervals."""
    study = load_study(FOLDER / f"{name}.yaml", ["tune=null", "seeds=[0]"])
    found = {run.labels["method"]: run.experiment for run in plan_runs(study)}
    chain = study.axes["method"]["shampoo"]["recipe.update"]
    for interval in INTERVALS[1:]:
        rare = [{**chain[0], "refresh": {"kind": "every", "steps": interval}}, *chain[1:]]
        label = f"shampoo, roots every {interval}"
        other = load_study(study, [f"axes.method.shampoo={json.dumps({'recipe.update': rare, 'lr': 0.1})}"])
        found[label] = next(r.experiment for r in plan_runs(other) if r.labels["method"] == "shampoo")
    return found


def gradients(model: nn.Module, experiment: Experiment, turns: int = 8) -> tuple[list[list[Tensor]], float]:
    """Return the gradients of `turns` batches, and the median of the milliseconds that a gradient takes."""
    task, times, found = experiment.task, [], []
    data = task.load()
    for turn in range(3 * turns):
        batch = data.batch(0, turn)
        model.zero_grad()
        start = time.thread_time()
        task.loss(model(batch.inputs), batch.targets).backward()
        times.append(1e3 * (time.thread_time() - start))
        found.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    return found[:turns], median(times)


def measured(name: str) -> dict[str, Any]:
    """Return the milliseconds of a gradient, and of an update by each method, on the model of a study."""
    methods = experiments(name)
    torch.manual_seed(0)
    model = next(iter(methods.values())).task.build()
    given, gradient = gradients(model, methods["sgd"])
    contenders = []
    for experiment in methods.values():
        own = copy.deepcopy(model)
        optimizer = Optimizer(own.named_parameters(), experiment.recipe, lr=1e-4)
        contenders.append(Contender(optimizer, list(own.parameters()), 0.0))
    taken = take_turns(contenders, given, warm=INTERVALS[-1], steps=ROUNDS, clock=time.thread_time)
    times = [[step.total for step in own] for own in taken]
    updates = dict(zip(methods, map(step_of, methods, times), strict=True))
    return {"study": name, "gradient": gradient, "updates": updates}


def step_of(method: str, times: Sequence[float]) -> float:
    """Return the milliseconds of an update: the median, or the mean over whole intervals if roots are rare."""
    return mean(times) if "roots every" in method else median(times)


def markdown(found: Mapping[str, Any]) -> str:
    """Return a table with a row for each method: milliseconds of an update, and the time of a step over that of SGD.

    The time of a step is that of gradient and update together.
    """
    lines = [f"Times of a gradient and of an update are in milliseconds ({found['made']}).", ""]
    for one in found["measured"]:
        sgd = one["gradient"] + one["updates"]["sgd"]
        lines += [f"`{one['study']}`: the gradient takes {one['gradient']:.2f}.", ""]
        lines += ["| method | update | step, in steps of SGD |", "| --- | --- | --- |"]
        for method, update in one["updates"].items():
            lines.append(f"| {method} | {update:.2f} | {(one['gradient'] + update) / sgd:.2f} |")
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    torch.set_num_threads(1)
    made = f"{datetime.now(UTC):%Y-%m-%d}, one thread, torch {torch.__version__}, batches of 64"
    found = {"made": made, "measured": [measured(name) for name in STUDIES]}
    (FOLDER / "results" / "step_time.json").write_text(json.dumps(found, indent=1) + "\n")
    (FOLDER / "results" / "step_time.md").write_text(markdown(found))
    sys.stdout.write(markdown(found))


if __name__ == "__main__":
    main()
