"""Training with backward, hooks and autocast on the simulated accelerator of kind "sim", in processes of their own."""

from __future__ import annotations

from pathlib import Path

import pytest

from ..processes import run
from .on_sim import FUNCTIONS

pytestmark = pytest.mark.slow  # a process each


@pytest.mark.parametrize("name", FUNCTIONS)
def test_on_the_accelerator_with_backward(name: str, tmp_path: Path) -> None:
    done = run(Path(__file__).with_name("on_sim.py"), name, folder=tmp_path)
    assert done.returncode == 0, done.stderr
