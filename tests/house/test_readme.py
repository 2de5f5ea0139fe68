"""What the README shows is run as it stands there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def run(arguments: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True)


def test_the_python_examples_run_one_after_another(tmp_path: Path) -> None:
    code = [block for block in blocks("python") if not block.startswith("# belief.py")]
    assert len(code) == 2 and code[0].count("\n") <= 14
    (tmp_path / "example.py").write_text("\n".join(code) + "\nprint(optimizer)\n")
    done = run(["example.py"], tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Optimizer(recipe=" in done.stdout


def test_the_yaml_example_is_an_experiment(tmp_path: Path) -> None:
    (tmp_path / "experiment.yaml").write_text(blocks("yaml")[0])
    done = run(["-m", "eigengraft.experiments.cli.main", "show", "experiment.yaml", "steps=40"], tmp_path)
    assert done.returncode == 0, done.stderr
    assert "graft" in done.stdout


@pytest.mark.parametrize("inside", ["chain", "basis"])
def test_the_new_preconditioner_trains_from_one_file_and_yaml(tmp_path: Path, inside: str) -> None:
    (tmp_path / "belief.py").write_text(next(b for b in blocks("python") if b.startswith("# belief.py")))
    text = next(block for block in blocks("yaml") if "belief.py" in block)
    if inside == "basis":
        stages = re.search(r"update: (\[.*\])", text)
        assert stages is not None
        text = text.replace(stages[1], f"[{{kind: eigenbasis, inner: {stages[1]}}}]")
    (tmp_path / "experiment.yaml").write_text(text)
    quick = ["steps=30", "eval_every=15", "--out", "run"]
    done = run(["-m", "eigengraft.experiments.cli.main", "train", "experiment.yaml", *quick], tmp_path)
    assert done.returncode == 0, done.stderr
    rows = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    losses = [float(m[1]) for row in rows if (m := re.search(r'"loss": ([0-9.e+-]+)', row))]
    assert losses[-1] < 0.7 * losses[0]


def test_every_shipped_recipe_is_listed() -> None:
    import eigengraft

    for name in eigengraft.shipped_recipes():
        assert f"`{name}`" in README, name


def test_the_fragment_with_iterates_and_storage_is_a_recipe() -> None:
    from eigengraft import load_recipe
    from eigengraft.optimizers.recipe.yaml_files import parse_yaml

    fragment = next(block for block in blocks("yaml") if block.startswith("recipe:"))
    recipe = load_recipe(parse_yaml(fragment)["recipe"])
    assert recipe.averaging is not None and recipe.constraints and recipe.storage
