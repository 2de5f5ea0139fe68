"""Checkpoints of a run on several ranks: directories `checkpoint-<step>/` in torch's own distributed format.

Any number of ranks reads them under any `parallel`: shards of parameters and state are saved by name with their place
in the full tensor. The last two checkpoints are kept. A directory gets its final name when it is complete.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from eigengraft.errors import RecipeError

from ..files import PARTIAL, writing
from .parallel.ranks import Ranks
from .rundir import RunDirectory

_KEPT = 2
_NOTES = "run.pt"


def newest_checkpoint(run: RunDirectory) -> Path | None:
    """The last complete checkpoint."""
    return max(_complete(run), key=_step, default=None)


def _complete(run: RunDirectory) -> list[Path]:
    return [path for path in run.path.glob("checkpoint-*") if re.fullmatch(r"checkpoint-\d+", path.name)]


def _step(path: Path) -> int:
    return int(path.name.rpartition("-")[2])


def save_sharded(
    run: RunDirectory, ranks: Ranks, model: nn.Module, optimizer: torch.optim.Optimizer, notes: Mapping[str, Any]
) -> None:
    """Write the checkpoint of step `notes["step"]`; all ranks call it.

    notes: the state of the run besides model and optimizer, saved by rank 0.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_saver import save as write

    final = run.path / f"checkpoint-{notes['step']}"
    temporary = run.path / f".{final.name}{PARTIAL}"
    ranks.on_first(lambda: shutil.rmtree(temporary, ignore_errors=True))
    try:
        write(_state(model, optimizer), checkpoint_id=temporary)
    except CheckpointException as error:
        raise OSError(f"{final}: it could not be written: {_first(error)}") from error

    def publish() -> None:
        with writing(final), (temporary / _NOTES).open("wb") as stream:
            torch.save({**notes, "metrics_bytes": run.metrics_size()}, stream)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(final)
        for old in sorted(_complete(run), key=_step)[:-_KEPT]:
            doomed = run.path / f".{old.name}{PARTIAL}"
            old.replace(doomed)  # so that a kill leaves no half of it under its name
            shutil.rmtree(doomed)

    ranks.on_first(publish)


def load_sharded(
    run: RunDirectory, ranks: Ranks, model: nn.Module, optimizer: torch.optim.Optimizer
) -> dict[str, Any] | None:
    """Restore model and optimizer from the last checkpoint and return its notes; None when there is none.

    Rows of metrics after the checkpoint are dropped.
    """
    from torch.distributed.checkpoint import state_dict
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_loader import load as read

    found, notes = ranks.on_first(lambda: _notes(run))
    if found is None or notes is None:
        return None
    state = _state(model, optimizer)
    try:
        read(state, checkpoint_id=found)
    except (CheckpointException, OSError) as error:
        raise RecipeError(
            f"{found}: a readable checkpoint is required; {_remedy(run, found)}: {_first(error)}"
        ) from error
    state_dict.set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return notes


def _notes(run: RunDirectory) -> tuple[Path | None, dict[str, Any] | None]:
    """The last checkpoint and its notes."""
    if (run.path / "checkpoint.pt").exists():
        raise RecipeError(f"{run.path}: its checkpoint is of a single process; continue it with parallel=none")
    found = newest_checkpoint(run)
    notes = None
    if found is not None:
        try:
            notes = torch.load(found / _NOTES, map_location="cpu", weights_only=True)
        except Exception as error:  # torch raises whatever its unpickler meets
            raise RecipeError(f"{found}: a readable checkpoint is required; {_remedy(run, found)}") from error
    run.rewind(notes["metrics_bytes"] if notes is not None else 0)
    return found, notes


def _first(error: BaseException) -> str:
    """The error of the first failing rank in one line; torch's own text is a traceback."""
    failures = getattr(error, "failures", None)
    fault = next(iter(failures.values()))[0] if failures else error
    return f"{type(fault).__name__}: {fault}"


def _remedy(run: RunDirectory, broken: Path) -> str:
    others = len(_complete(run)) > 1
    return f"remove {broken} to continue from the one before" if others else f"remove {run.path}"


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    from torch.distributed.checkpoint import state_dict

    model_state, optimizer_state = state_dict.get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state}
