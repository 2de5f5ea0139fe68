"""Run user.py on the built wheel with several versions of torch and Python, each in an environment of its own.

An environment takes about 5 GB where torch brings CUDA's libraries; it is removed when its run is over. A version that
cannot be installed is skipped, and the reason is said.

    python tests/versions/versions.py [--torch 2.11.0 2.15.0] [--python /path/to/python3.12]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

TORCH = ("2.11.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0")
HERE = Path(__file__).resolve().parent


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    """A command's result, its output as text."""
    return subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False)


def last_line(done: subprocess.CompletedProcess[str]) -> str:
    """The last line that a command wrote, errors before output."""
    return ((done.stderr.strip() or done.stdout.strip()).splitlines() or ["no output"])[-1]


def outcome(python: str, torch: str, wheel: Path) -> str:
    """`passed`, `failed` or `skipped` with its reason, for a Python and a version of torch."""
    with tempfile.TemporaryDirectory() as folder:
        made = run(python, "-m", "venv", folder)
        if made.returncode:
            return f"skipped: {last_line(made)}"
        own = Path(folder, "bin", "python")
        installed = run(own, "-m", "pip", "install", "--quiet", f"torch=={torch}", wheel)
        if installed.returncode:
            return f"skipped: {last_line(installed)}"
        used = run(own, "-P", HERE / "user.py")
        return f"failed: {last_line(used)}" if used.returncode else f"passed: {used.stdout.strip()}"


def main() -> int:
    parser = argparse.ArgumentParser(description="The wheel with several versions of torch and Python.")
    parser.add_argument("--torch", nargs="+", default=TORCH)
    parser.add_argument("--python", nargs="+", default=[sys.executable])
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        built = run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, HERE.parents[1])
        if built.returncode:
            raise SystemExit(f"the wheel could not be built: {last_line(built)}")
        [wheel] = Path(folder).glob("*.whl")
        found = []
        for python in given.python:
            for torch in given.torch:
                found.append(outcome(python, torch, wheel))
                sys.stdout.write(f"{python}, torch {torch}: {found[-1]}\n")
    return int(any(line.startswith("failed") for line in found))


if __name__ == "__main__":
    sys.exit(main())
