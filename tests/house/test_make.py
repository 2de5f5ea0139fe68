"""The environments of `make`: the demo installs the packages of its extra alone, all other commands everything.

A script that only notes its arguments stands for Python, so that nothing is installed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from .pages import ROOT

STUB = """#!/bin/sh
echo "$@" >> "$LOG"
if [ "$1 $2" = "-m venv" ]; then mkdir -p "$3/bin"; cp "$0" "$3/bin/python"; cp "$0" "$3/bin/eigengraft"; fi
"""


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_the_demo_installs_only_its_extra_and_tests_install_the_rest(tmp_path: Path) -> None:
    stub, log = tmp_path / "python", tmp_path / "log"
    stub.write_text(STUB)
    stub.chmod(0o755)
    # a make that runs this test exports its own variables, and those of its command line, to the makes started here
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "ARGS", "BENCH"))}

    def installed_by(target: str) -> list[str]:
        """Arguments of `pip install`, without options that choose no packages."""
        log.write_text("")
        command = ["make", "-C", ROOT, target, f"PYTHON={stub}", f"VENV={tmp_path / '.venv'}"]
        subprocess.run(command, env=kept | {"LOG": str(log)}, check=True, capture_output=True)
        *lines, last = log.read_text().splitlines()
        assert target == last or "pytest" in last  # the command itself comes after the installation
        pip = [line.removeprefix("-m pip install ") for line in lines if line.startswith("-m pip install ")]
        return [line for line in pip if "--no-deps" not in line]

    pinned = "--constraint requirements.txt"
    extra = [f"--quiet {pinned} setuptools", f"{pinned} --no-build-isolation --editable .[experiments]"]
    assert installed_by("demo") == extra
    assert installed_by("demo") == []
    assert installed_by("quick") == ["--requirement requirements.txt"]
    assert installed_by("demo") == installed_by("test") == []


def test_everything_that_the_demo_installs_is_pinned() -> None:
    """On an accelerator, torch itself pins the packages of CUDA that it brings."""
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    pinned = {canonicalize_name(line.partition("==")[0]) for line in lines if "==" in line}
    assert {"typer", "matplotlib", "torch"} <= _brought("eigengraft", frozenset({"experiments"}), set())
    assert _brought("eigengraft", frozenset({"experiments"}), set()) - {"eigengraft"} <= pinned


def _brought(name: str, extras: frozenset[str], seen: set[tuple[str, frozenset[str]]]) -> set[str]:
    """Names of the installed packages that a package needs, itself among them."""
    if (name, extras) in seen:
        return set()
    seen.add((name, extras))
    try:
        lines = metadata.requires(name) or []
    except metadata.PackageNotFoundError:  # of another platform
        return set()
    found = {name}
    for needed in map(Requirement, lines):
        markers = [{"extra": extra} for extra in (extras or {""})]
        cuda = name == "torch" and needed.name.startswith(("nvidia", "cuda", "triton"))
        if not cuda and (needed.marker is None or any(map(needed.marker.evaluate, markers))):
            found |= _brought(canonicalize_name(needed.name), frozenset(needed.extras), seen)
    return found
