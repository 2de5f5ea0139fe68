"""What a run ran on: recorded beside its results, so that a number can be traced to what produced it."""

from __future__ import annotations

import platform
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy
import torch

import eigengraft

from ..tasks import Fingerprint


def environment(data: Fingerprint, device: torch.device) -> dict[str, Any]:
    """Versions, machine, command line, git commit of the working directory and fingerprint of the data."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "eigengraft": eigengraft.__version__,
        "platform": platform.platform(),
        "cpu": processor(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "threads": torch.get_num_threads(),
        "git": _git("rev-parse", "HEAD"),
        "git_changes": bool(_git("status", "--porcelain", "--untracked-files=no")),
        "command": sys.argv,
        "data": asdict(data),
    }


def processor() -> str:
    """The processor's name; on Linux the standard library does not know it."""
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
