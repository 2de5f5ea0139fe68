"""The laws of stages, root solvers, bases and quantizers with an accelerator as the default device.

The simulated accelerator runs them everywhere, a real one where there is one (marked `gpu`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest
import torch

from eigengraft.testing import accelerator
from eigengraft.testing.stage_laws import CONTRACT, STAGE_LAWS

from ..laws.rows import Row
from ..laws.table import TABLE

QUICK = {"rms", "momentum", "shampoo", "eigenbasis", "spectral", "graft"}
SEEN: set[str] = set()


def rows() -> Iterator[object]:
    """Rows of stages; the first of a few kinds are quick."""
    for row in TABLE["stage"]:
        quick = row.kind in QUICK and row.kind not in SEEN
        SEEN.add(row.kind)
        yield pytest.param(row, id=str(row), marks=() if quick else pytest.mark.slow)


@pytest.mark.parametrize("kind", ["simulated", pytest.param("real", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("row", rows())
def test_the_laws_of_stages_hold_on_an_accelerator(row: Row, kind: str) -> None:
    with ExitStack() as stack:
        if kind == "simulated":
            stack.enter_context(accelerator("cuda"))
        stack.enter_context(torch.device("cuda"))
        for law in (CONTRACT, *STAGE_LAWS):
            if law.skip(row.stage()) is None:
                law.require(row.stage())
