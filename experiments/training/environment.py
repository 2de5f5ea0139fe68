"""The environment of a run, recorded beside its results: versions, machine, commit, command and data."""

from __future__ import annotations

import platform
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy
import torch

import eigengraft
from eigengraft.errors import RecipeError
from eigengraft.optimizers.recipe.overrides import differences

from ..tasks import Fingerprint
from .rundir import RunDirectory


def describe_environment(data: Fingerprint, device: torch.device, ranks: int = 1) -> dict[str, Any]:
    """Versions, machine, processes, command line, git commit of the working directory and fingerprint of the data."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "eigengraft": eigengraft.__version__,
        "platform": platform.platform(),
        "cpu": processor_name(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "threads": torch.get_num_threads(),
        "ranks": ranks,
        "git": _git("rev-parse", "HEAD"),
        "git_changes": bool(_git("status", "--porcelain", "--untracked-files=no")),
        "command": sys.argv,
        "data": asdict(data),
    }


def require_data(run: RunDirectory, found: Mapping[str, Any]) -> None:
    """Record an environment in a new run; an older one must have seen the same data. Raises RecipeError."""
    known = run.read("env")
    if known is None:
        run.write("env", found)
    elif known["data"]["sha256"] != found["data"]["sha256"]:
        faults = "\n".join(differences({"data": known["data"]}, {"data": found["data"]}))
        raise RecipeError(f"{run.path}: the data of the run's start is required:\n{faults}")


def processor_name() -> str:
    """The processor's name, read from /proc on Linux, where the standard library does not know it."""
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", *arguments], capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
