"""The environment of a run, recorded beside its results: versions, machine, commit, command and data."""

from __future__ import annotations

import hashlib
import platform
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy
import torch

import eigengraft
from eigengraft.errors import RecipeError

from ..provenance import REMEDY, provenance_changes
from ..tasks import Fingerprint
from .imports import imported_sources
from .rundir import RunDirectory

if TYPE_CHECKING:
    from .experiment import Experiment

_COMPUTING = (
    *("blocking", "preconditioners", "quantization", "distributed", "optimizers"),
    *("experiments.tasks", "experiments.training"),
)
"""Packages of the library whose code affects the numbers of a run. Modules at the library's root affect them too."""


def describe_provenance(data: Fingerprint, experiment: Experiment | None = None) -> dict[str, Any]:
    """Return the provenance of a run: versions, sha256 of code and imported files, and the identity of the data.

    experiment: experiment whose imported files are included. A file is left out if it defines components and the
        experiment uses none of them. None: no imported files.
    """
    return {
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "eigengraft": eigengraft.__version__,
        "sources": library_digest(),
        "imports": {} if experiment is None else imported_sources(experiment.imports, experiment),
        "data": asdict(data),
    }


def describe_environment(
    data: Fingerprint, device: torch.device, ranks: int = 1, experiment: Experiment | None = None
) -> dict[str, Any]:
    """Return the provenance, machine, number of ranks, command line, and git commit of the working directory.

    data, experiment: as in `describe_provenance`.
    """
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": processor_name(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "threads": torch.get_num_threads(),
        "ranks": ranks,
        "git": _git("rev-parse", "HEAD"),
        "git_changes": bool(_git("status", "--porcelain", "--untracked-files=no")),
        "command": sys.argv,
        **describe_provenance(data, experiment),
    }


@cache
def library_digest() -> str:
    """Return one sha256 of the names and texts of all files of the library whose code affects the numbers of a run."""
    digest, home = hashlib.sha256(), Path(eigengraft.__path__[0])
    files = [(file.name, file) for file in sorted(home.glob("*.py"))]
    for package in _COMPUTING:
        spec = find_spec(f"eigengraft.{package}")
        assert spec is not None and spec.submodule_search_locations, f"eigengraft.{package} is not a package"
        folder = Path(spec.submodule_search_locations[0])
        files += [(f"{package} {file.relative_to(folder).as_posix()}", file) for file in sorted(folder.rglob("*.py"))]
    for name, file in files:
        digest.update(f"{name}\0".encode() + file.read_bytes())
    return digest.hexdigest()


def record_environment(run: RunDirectory, found: Mapping[str, Any]) -> None:
    """Write the environment of a run that begins at its first step.

    Raises RecipeError if the run continues, and was started with other code or data.

    found: the present environment.
    """
    require_provenance(run, found)
    if not run.begun:
        run.write("env", found)


def require_provenance(run: RunDirectory, found: Mapping[str, Any]) -> None:
    """Raise RecipeError if the run has a result or a checkpoint, and was started with other code or data.

    found: the present environment.
    """
    known = run.read("env") if run.begun else None
    faults = [] if known is None else provenance_changes(known, found)
    if faults:
        raise RecipeError(
            f"{run.path}: the run was started with other code or data (recorded -> present):\n"
            + "\n".join(faults)
            + f"\n{REMEDY}"
        )


def processor_name() -> str:
    """Return the name of the processor, on Linux from /proc, as the standard library does not know it there."""
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
