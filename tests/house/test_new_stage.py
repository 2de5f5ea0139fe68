"""The stages of the guide "A new stage" follow the formulas that it gives, and train from one file."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from ..processes import run
from .pages import ROOT, blocks, files, text

PAGE = "docs/guide/new-stage.md"
PREPARE = """
import torch, eigengraft
from eigengraft.preconditioners import Momentum
torch.manual_seed(0)
start, gradients = torch.randn(6, 4).double(), torch.randn(5, 6, 4).double()
weight = torch.nn.Parameter(start.clone())

def follow(*chain, lr=0.1):
    optimizer = eigengraft.compose(list(chain), [("weight", weight)], lr=lr)
    for gradient in gradients:
        weight.grad = gradient.clone()
        optimizer.step()
    return weight.detach() - start
"""
ADOPT = """
from adopt import Adopt
ours, v, m, w = follow(Adopt(beta=0.9), Momentum(beta=0.8, bias_correction=False)), gradients[0] ** 2, 0.0, 0.0
for g in gradients[1:]:
    m = 0.8 * m + 0.2 * g / v.sqrt().clamp_min(1e-6)
    w, v = w - 0.1 * m, 0.9 * v + 0.1 * g**2
torch.testing.assert_close(ours, w, rtol=1e-12, atol=0)
"""
LION = """
from lion import Lion
ours, m, w = follow(Lion()), 0.0, 0.0
for g in gradients:
    w, m = w - 0.1 * (0.9 * m + 0.1 * g).sign(), 0.99 * m + 0.01 * g
torch.testing.assert_close(ours, w, rtol=1e-12, atol=0)
"""
LOW_RANK = """
from low_rank import LowRank
from eigengraft.preconditioners import Every
ours, w = follow(LowRank(inner=(Momentum(beta=0.0),), rank=2, renewal=Every(steps=3, start=1, stagger="none"))), 0.0
for t, g in enumerate(gradients):
    if t in (0, 2):
        p = torch.linalg.svd(g)[0][:, :2]
    w = w - 0.1 * p @ p.mT @ g
torch.testing.assert_close(ours, w, rtol=1e-12, atol=1e-15)
"""


def run_beside_the_files(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A process that can import the files of the page."""
    for name, source in files(PAGE).items():
        (folder / name).write_text(source)
    return run(*arguments, folder=folder, PYTHONPATH=os.pathsep.join([str(ROOT / "src"), str(folder)]))


@pytest.mark.slow
@pytest.mark.parametrize("code", [ADOPT, LION, LOW_RANK], ids=["adopt", "lion", "low rank"])
def test_the_stages_of_the_guide_follow_their_formulas(code: str, tmp_path: Path) -> None:
    done = run_beside_the_files(tmp_path, "-c", PREPARE + code)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_the_experiment_of_the_guide_trains(tmp_path: Path) -> None:
    (tmp_path / "experiment.yaml").write_text(next(block for block in blocks(PAGE, "yaml") if "imports" in block))
    command = ["-m", "eigengraft", "train", "experiment.yaml", "steps=20", "--out", "run"]
    done = run_beside_the_files(tmp_path, *command)
    assert done.returncode == 0, done.stderr
    assert "validation loss" in done.stdout


MISTAKES = """
from typing import Literal
from eigengraft import Slot, Stage
from eigengraft.testing import LawError, check_stage

class Mine(Stage):
    kind: Literal["mine"] = "mine"
    def slots(self, block):
        return {"v": Slot(block)} if DECLARED else {}
    def apply(self, state, gradient, direction, context):
        v = x = 1.0 * direction
        if "v" in MISTAKE:
            v = state["v"]
        result = eval(MISTAKE.removeprefix("return "))
        return result if "return" in MISTAKE else 1.0 * direction

try:
    check_stage(Mine())
except LawError as error:
    print(error)
"""
ROWS = re.findall(
    r"^\| `([^|`]*)`[^|`]*(?:`[^`]*`)?[^|`]* \| `((?:apply|slot)[^`]*)` \|$", text(PAGE), flags=re.MULTILINE
)


@pytest.mark.slow
def test_the_messages_of_the_guide_are_those_of_the_checks(tmp_path: Path) -> None:
    assert len(ROWS) == 4
    for mistake, message in ROWS:
        values = f"MISTAKE, DECLARED = {mistake!r}, {'add_' in mistake}"
        done = run_beside_the_files(tmp_path, "-c", values + MISTAKES)
        assert f"update.mine: {message}" in done.stdout, done.stdout + done.stderr
