"""The laws of stages with an accelerator as the default device.

On a simulated one, the first row of each kind is asked all laws but one, with blocks of one shape. The law "a steady
step stays on the device" is left out, because it enters a simulated accelerator itself. The other shapes and rows take
four times as long and run the same code, and only `tests/laws` asks them, on the CPU. On a real accelerator, the first
row of each kind is asked with all of its shapes.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from eigengraft.testing import accelerator
from eigengraft.testing.laws import check
from eigengraft.testing.stage_laws import STAGE_LAWS

from ..laws.rows import Row
from ..laws.table import TABLE

FIRST = {row.kind: row for row in reversed(TABLE["stage"])}
QUICK = ("rms", "momentum", "eigenbasis", "clip_norm")


@pytest.mark.parametrize(
    "row",
    [pytest.param(row, id=kind, marks=() if kind in QUICK else pytest.mark.slow) for kind, row in FIRST.items()],
)
def test_the_laws_of_stages_hold_on_a_simulated_accelerator(row: Row) -> None:
    case = replace(row.stage(), blocks=row.blocks[:1])
    with accelerator("cuda") as run, run.device:
        assert "dtype and device are kept" in check(case, STAGE_LAWS).held


NULL_SPACE = ("adaptive_rotation", "eigenbasis", "eigenfactors")
"""Stages that rotate gradients into a basis. Gradients of a block `[7]` have a statistic of rank 1 at first, and CUDA
completes its basis otherwise for one matrix than for three."""


@pytest.mark.gpu
@pytest.mark.parametrize("row", FIRST.values(), ids=str)
def test_the_laws_of_stages_hold_on_an_accelerator(row: Row) -> None:
    with torch.device("cuda"):
        for law in STAGE_LAWS:
            if law.name == "a stack is its blocks" and row.kind in NULL_SPACE:
                continue
            if law.skip(row.stage()) is None:
                law.require(row.stage())
