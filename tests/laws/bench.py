"""The bench of a stage that is declared as plain data."""

import torch

from eigengraft import Stage
from eigengraft.component import validated
from eigengraft.testing.stage_case import StageBench

from .rows import Make


def bench(make: Make, block: tuple[int, ...], blocks: int = 1, dtype: torch.dtype = torch.float64) -> StageBench:
    """State by the keys "<stage path>/<slot>", without the path of an update before it."""
    stage = validated(Stage, dict(make))  # type: ignore[type-abstract]
    return StageBench(stage, block, blocks, dtype, path="")
