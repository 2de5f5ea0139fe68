"""The examples of the page about hosts run."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")

ROOT = Path(__file__).resolve().parents[2]
LIBRARIES = {
    "Hugging Face Trainer": "transformers",
    "accelerate": "accelerate",
    "Lightning": "lightning",
    "timm": "timm",
    "torchtitan": "torchtitan",
    "Optuna": "optuna",
    "Ray Tune": "ray",
}
SECTIONS = (ROOT / "docs" / "guide" / "hosts.md").read_text().split("\n## ")[1:]
EXAMPLES = {section.splitlines()[0]: re.findall(r"```python\n(.*?)```", section, re.DOTALL) for section in SECTIONS}
BEFORE = f"import sys; sys.path.append({str(ROOT / 'tests' / 'hosts')!r})\nimport operators\n"


@pytest.mark.parametrize("section", LIBRARIES)
def test_an_example_runs(section: str, tmp_path: Path) -> None:
    pytest.importorskip(LIBRARIES[section])
    if section == "Ray Tune" and " " in sys.executable:
        pytest.skip(
            f"Ray's workers start through a shell that cuts the interpreter's path at a space: {sys.executable}"
        )
    (tmp_path / "example.py").write_text(BEFORE + "\n".join(EXAMPLES[section]))
    command = [sys.executable, "example.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_example_is_tried() -> None:
    assert {section for section, found in EXAMPLES.items() if found} == set(LIBRARIES)
