"""The laws of stages with an accelerator as the default device: a few on a simulated one, all on a real one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from eigengraft.testing import accelerator
from eigengraft.testing.stage_laws import STAGE_LAWS

from ..laws.rows import Row
from ..laws.table import TABLE

FIRST = {row.kind: row for row in reversed(TABLE["stage"])}
QUICK = ("rms", "momentum", "eigenbasis", "clip_norm")
ABOUT_DEVICES = (
    "the contract is kept",
    "inputs are never written to",
    "masked rows change nothing",
    "dtype and device are kept",
    "a copy of the state resumes exactly",
    "storage makes no difference",
    "state is reported to the byte",
    "a checkpoint resumes exactly",
    "measures are of each block alone",
)
"""Laws in which something is made, masked, coded, stored or loaded; the others are about mathematics."""


@pytest.mark.parametrize(
    "row",
    [pytest.param(row, id=kind, marks=() if kind in QUICK else pytest.mark.slow) for kind, row in FIRST.items()],
)
def test_the_laws_of_stages_hold_on_a_simulated_accelerator(row: Row) -> None:
    case = replace(row.stage(), blocks=row.blocks[:1])
    with accelerator("cuda") as run, run.device:
        for law in STAGE_LAWS:
            if law.name in ABOUT_DEVICES and law.skip(case) is None:
                law.require(case)


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


def test_every_law_about_devices_is_a_law_of_stages() -> None:
    laws: tuple[Any, ...] = STAGE_LAWS
    assert set(ABOUT_DEVICES) < {law.name for law in laws}
