"""`train` on the ranks of a process group that is already there."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import torch.distributed as dist

from eigengraft.experiments import load_experiment, train


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Experiments one after the other: the outcome of each by name, and how often a progress callback was called.

    A case may have overrides for each rank (`own`) and a run to continue a copy of (`of`). fault: see `exact.py`.
    """
    rank = dist.get_rank()
    os.environ["FAULT"] = job.get("fault", "")
    heard: list[int] = []
    outcome: dict[str, Any] = {}
    for name, case in job["cases"].items():
        directory = Path(case["directory"])
        if "of" in case and rank == 0:
            shutil.copytree(case["of"], directory)
        dist.barrier()
        try:
            experiment = load_experiment(case["experiment"], case["own"][rank] if "own" in case else ())
            result = train(experiment, directory, lambda tick: heard.append(tick.step))
            outcome[name] = [result.val_loss, result.state_bytes]
        except Exception as error:
            outcome[name] = f"{type(error).__name__}: {error}"
    return {"outcome": outcome, "heard": len(heard)}
