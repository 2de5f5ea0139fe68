"""Programs of users under mypy with pydantic's plugin: accepted as they run, refused only where they would fail."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from ..processes import run
from .pages import ROOT

pytest.importorskip("mypy")

RUNS = """
from eigengraft import Recipe, Route
from eigengraft.experiments.training.experiment import Experiment
from eigengraft.preconditioners import RMS, Eigenbasis, Eigh, Graft, Momentum, RootSolver, Shampoo, Spectral

shampoo = Shampoo(solver="eigh", exponent="1/2", statistic={"kind": "gram", "beta": 0.95}, refresh="every")
graft = Graft(direction=[Momentum(beta={"from": 0.8, "to": 0.9, "steps": 10}), shampoo], magnitude="rms")
basis = Eigenbasis(inner=["momentum", RMS()], solver="power_qr", refresh={"kind": "every", "steps": 10})
spectral = Spectral(solver={"kind": "newton_schulz", "coefficients": [(3.0, -3.2, 1.2)]})
route = Route(name="wide", match={"ndim": 2}, update="momentum", constraints=["hyperball"])
recipe = Recipe(update=[graft, basis, spectral], routes="default", storage={"basis": "int8"})
recipe.replace(routes=[route, "default"], weight_decay={"kind": "decoupled", "rate": 0.1}, averaging="ema")
Experiment(task="digits", recipe=recipe, schedule={"kind": "cosine"}, callbacks=["patience"], steps=100)
solver: RootSolver = shampoo.solver
"""
MISTAKES = {
    "misspelled": 'Shampoo(solvr="eigh")',
    "missing": 'Graft(direction="momentum")',
    "frozen": "shampoo.solver = Eigh()",
    "attribute": "shampoo.solver.shape",
}


@pytest.mark.slow
def test_programs_that_run_are_typed_and_mistakes_are_found(tmp_path: Path) -> None:
    (tmp_path / "runs.py").write_text(RUNS)
    (tmp_path / "wrong.py").write_text("\n".join([RUNS, *(f"{line}  # {name}" for name, line in MISTAKES.items())]))
    ran = run("runs.py", folder=tmp_path)
    assert ran.returncode == 0, ran.stderr
    # the options of `make check` (strict, with the plugin), whose cache has the library where it has run before
    command = [sys.executable, "-m", "mypy", "--no-error-summary", tmp_path / "runs.py", tmp_path / "wrong.py"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500)
    lines = [int(line) for line in re.findall(r"\bwrong\.py:(\d+): error", found.stdout, flags=re.MULTILINE)]
    text = (tmp_path / "wrong.py").read_text().splitlines()
    assert "runs.py" not in found.stdout
    assert [text[line - 1].rpartition("# ")[2] for line in lines] == list(MISTAKES)
