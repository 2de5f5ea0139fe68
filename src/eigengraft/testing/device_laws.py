"""The law of stages that is about devices: a step without a refresh stays there."""

from __future__ import annotations

import torch

from .accelerator import accelerator, missing_names
from .device_costs import DECOMPOSITIONS
from .laws import require
from .stage_bench import StageBench
from .stage_case import StageCase, on

_WARM_UP = 2
"""Steps in which a stage may copy tables to the device that later steps use again."""


def a_steady_step_stays_on_the_device(case: StageCase) -> None:
    """In steps without a refresh the host neither waits for a device nor copies numbers there.

    A stage may decompose in every step, for which torch waits.
    """
    block = case.blocks[0]
    with on(block, "on a simulated accelerator"), accelerator("cuda") as run, run.device:
        bench = StageBench(case.stage, block, 3, torch.float32)
        for number, gradient in enumerate(case.gradients(block, dtype=torch.float32), start=1):
            step, context = bench.start(gradient)
            with accelerator("cuda") as counts:
                step()
            if number > _WARM_UP and not any(context.due.values()):
                found = [x for x in counts.by_line("waits", "uploads") if x.split()[-1] not in DECOMPOSITIONS]
                require(
                    not found,
                    f"no wait for the device and no copy to it are required in step {number}, which has no refresh, "
                    f"got some at {', '.join(found)} (`context.step`, `context.seed` and `context.tensor(...)` are on "
                    "the device)",
                )


def without_accelerator(case: StageCase) -> str | None:
    """Return why no simulated accelerator can be made."""
    missing = missing_names()
    return f"torch {torch.__version__} has no {missing[0]}" if missing else None
