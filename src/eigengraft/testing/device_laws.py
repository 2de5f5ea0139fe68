"""The law of stages that is about devices: a step without a refresh stays there."""

from __future__ import annotations

import torch

from .accelerator import accelerator, missing_names
from .device_costs import DECOMPOSITIONS
from .laws import require
from .stage_case import StageBench, StageCase, on

_WARM_UP = 2
"""Number of first steps in which a stage may copy tables to the device for later steps."""


def a_steady_step_stays_on_the_device(case: StageCase) -> None:
    """In steps without a refresh the host neither waits for the device nor copies numbers to it.

    A stage may decompose matrices in every step, for which torch waits.
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
                    f"step {number} has no refresh, but the host waits for the device or copies to it at "
                    f"{', '.join(found)} (`context.step`, `context.seed` and `context.tensor(...)` are on "
                    "the device)",
                )


def without_accelerator(case: StageCase) -> str | None:
    """Return the reason why no accelerator can be simulated; None if it can."""
    missing = missing_names()
    return f"torch {torch.__version__} has no {missing[0]}" if missing else None
