"""The worked files of `experiments/examples/components`: each keeps the laws of its family, and works in a recipe."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from eigengraft.component import families
from eigengraft.experiments.benches import Bench
from eigengraft.experiments.studies.study import Study

from ..processes import run

FOLDER = Path(__file__).resolve().parents[2] / "experiments" / "examples" / "components"
FILES = sorted(path.name for path in FOLDER.glob("*.py"))
EXTENDED = {
    "stage", "root_solver", "basis_solver", "polar_solver", "statistic", "cadence", "quantizer", "averaging",
    "constraint", "weight_decay", "view", "task", "schedule", "eigenvalue_bound",
}  # fmt: skip
"""Families that users extend and that have a worked file."""
INSIDE = {"bench", "spectrum", "tuning", "parallel", "callback", "equation"}
"""Other families. The guide to tasks shows a callback and an equation."""

CHECK = """
import runpy, sys
for name in sys.argv[1:]:
    print(f"== {name}")
    runpy.run_path(name, run_name="__main__")
"""
USE = """
import ast, sys
import torch, yaml
import eigengraft
from eigengraft.experiments import load_experiment

for name in sys.argv[1:]:
    text = ast.get_docstring(ast.parse(open(name).read()))
    lines = [line for line in text.splitlines() if line.startswith("    ")]
    given = {"task": {"kind": "digits", "width": 8}, "steps": 12} | yaml.safe_load("\\n".join(lines))
    experiment = load_experiment(given)
    data, model = experiment.task.load(), experiment.task.new_model(0)
    optimizer = eigengraft.compose(experiment.run_recipe, model, lr=1e-3, steps=12)
    before = [p.detach().clone() for p in model.parameters()]
    for step in range(4):
        inputs, targets = data.batch(0, step)
        optimizer.zero_grad()
        experiment.task.loss(model(inputs), targets).backward()
        if name == "signals.py":
            optimizer.provide("sharpness", {p: 20.0 for p in model.parameters()})
        optimizer.step()
    optimizer.eval()
    assert all(bool(p.isfinite().all()) for p in model.parameters())
    assert not any(map(torch.equal, before, model.parameters()))
    print(f"== {name}")
"""


DEFINED = (Bench, Study)
"""Classes whose modules define all families."""


def test_every_family_that_users_extend_has_a_file() -> None:
    assert {*FILES} == {f"{family}.py" for family in EXTENDED} | {"signals.py"}
    ours = {name for name, family in families().items() if family.__module__.startswith("eigengraft.")}
    assert ours >= EXTENDED
    assert ours - EXTENDED == INSIDE


@pytest.mark.slow
def test_the_files_keep_the_laws_of_their_families() -> None:
    """In one process, as scripts: the first entry of `sys.path` is their folder."""
    done = run("-c", CHECK, *FILES, folder=FOLDER, PYTHONSAFEPATH="")
    assert done.returncode == 0, done.stderr
    said = dict(zip(FILES, done.stdout.split("== ")[1:], strict=True))
    for name, text in said.items():
        assert re.search(r"\d+ laws hold", text), (name, text)
        assert 15 <= len((FOLDER / name).read_text(encoding="utf-8").splitlines()) <= 60, name


@pytest.mark.slow
def test_the_files_work_in_the_recipes_that_they_show() -> None:
    done = run("-c", USE, *FILES, folder=FOLDER, PYTHONSAFEPATH="")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("== ") == len(FILES)
