"""The directory of one run: its files and checkpoints, written so that the run survives a kill at any time.

config.json        the resolved experiment
env.json           versions, machine, data, command line
metrics.jsonl      one row per line, append-only
diagnostics.jsonl  norms of all layers at the end, and tables of `optimizer.inspect()` if the experiment asks for them
fault.json         the first value that was not finite, or the error that ended the run; absent if nothing went wrong
checkpoint.pt      everything that is needed to continue; for several processes checkpoint-<step>/
branch.pt          a checkpoint before the learning rate falls (schedule wsd), from which a longer run continues
result.json        written last: the run is complete
lock               locked while a process trains here

A file is either complete or absent: it is written under a temporary name and then renamed. A checkpoint contains the
length of metrics.jsonl at its step. A continued run drops later rows and computes the same rows again.

Checkpoints of several processes are directories in torch's distributed format. Any number of ranks can read them under
any `parallel`: shards of parameters and state are saved by name with their offset in the full tensor. The last two
checkpoints are kept, and the one of the step before the learning rate falls.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from eigengraft.errors import RecipeError
from eigengraft.optimizers.recipe.overrides import differences

from ..files import PARTIAL, append_text, make_directory, read_object, read_rows, replacing, write_text, writing
from ..provenance import REMEDY, without_folders
from .parallel import Ranks


def _hint(known: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    """Return a sentence about the number of steps if two configurations differ in nothing else, else an empty text."""
    there, given = known.get("steps"), config.get("steps")
    if there is None or given is None or there == given:
        return ""
    if given < there:
        return f" The run there has {there} steps, as after --extend {there}; steps={there} selects it."
    return f" To continue the run there to {given} steps, give --extend {given}."


class RunDirectory:
    """The files of one run under `path`."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.metrics = self.path / "metrics.jsonl"

    def acquire(self, config: Mapping[str, Any], extensible: bool = False) -> None:
        """Make this the directory of a run with the configuration `config`.

        Raises RecipeError if it belongs to a run of another configuration, or contains other files.

        extensible: see `require_config`.
        """
        known = self.read("config")
        if known is None:
            if self.path.exists() and (not self.path.is_dir() or set(self.path.iterdir()) - self._partial()):
                raise RecipeError(f"{self.path}: contains other files; choose an empty or new directory")
            make_directory(self.path)
            self.write("config", config)
            return
        self.require_config(known, config, extensible)

    def require_config(self, known: Mapping[str, Any], config: Mapping[str, Any], extensible: bool = False) -> None:
        """Raise RecipeError if configurations differ in fields that change the trajectory.

        known: configuration of the run in this directory.
        config: configuration of the run to do.
        extensible: True if the error may advise `--extend` for another number of steps.
        """
        # `imports` is ignored because its paths change if the checkout is moved, as do folders of data. The other
        # ignored fields do not change the trajectory.
        ignored = dict.fromkeys(("imports", "parallel", "diagnostics", "silence", "keep_checkpoint"))
        faults = differences(without_folders({**known, **ignored}), without_folders({**config, **ignored}))
        if faults:
            raise RecipeError(
                f"{self.path} belongs to a run of another experiment (recorded -> given):\n"
                + "\n".join(faults[:8])
                + f"\n{REMEDY}{_hint(known, config) if extensible and len(faults) == 1 else ''}"
            )

    def read(self, name: str) -> dict[str, Any] | None:
        """Return the content of `name`.json, None if it does not exist."""
        return read_object(self.path / f"{name}.json") or None

    def write(self, name: str, content: Mapping[str, Any]) -> None:
        """Write `name`.json, completely or not at all."""
        write_text(self.path / f"{name}.json", json.dumps(content, indent=2, allow_nan=False) + "\n")

    def append(self, row: Mapping[str, Any]) -> None:
        """Append one row of metrics."""
        append_text(self.metrics, json.dumps(row, allow_nan=False) + "\n")

    def append_diagnostics(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Append rows of diagnostics, each with its `step`."""
        lines = (json.dumps(row, allow_nan=False) + "\n" for row in rows)
        append_text(self.path / "diagnostics.jsonl", "".join(lines))

    def rewind_diagnostics(self, step: int) -> None:
        """Drop rows of diagnostics after a step, and a last line that was cut short."""
        file = self.path / "diagnostics.jsonl"
        if file.exists():
            write_text(file, "".join(json.dumps(row) + "\n" for row in self.diagnostics() if row["step"] <= step))

    def diagnostics(self) -> list[dict[str, Any]]:
        """Return the rows of diagnostics so far."""
        return read_rows(self.path / "diagnostics.jsonl")

    def rewind_fault(self, step: int) -> dict[str, Any] | None:
        """Return the recorded fault, or None without one. Remove a fault after `step`, from which the run continues."""
        fault = self.read("fault")
        if fault is not None and fault["step"] > step:
            (self.path / "fault.json").unlink()
            return None
        return fault

    def rows(self) -> list[dict[str, Any]]:
        """Return the rows of metrics so far."""
        return read_rows(self.metrics)

    def save(self, state: Mapping[str, Any], name: str = "checkpoint") -> None:
        """Write a checkpoint of a single process, completely or not at all, with the length of metrics.jsonl."""
        size = self.metrics_size()
        with replacing(self.path / f"{name}.pt") as temporary, temporary.open("wb") as stream:
            torch.save({**state, "metrics_bytes": size}, stream)

    @property
    def begun(self) -> bool:
        """True if the run has a result, or a checkpoint from which it continues."""
        return self.read("result") is not None or bool(self._checkpoint_files() or _complete(self))

    def checkpoint_steps(self) -> list[int]:
        """Return the steps of all complete checkpoints."""
        return [*map(_file_step, self._checkpoint_files()), *map(_step, _complete(self))]

    def _checkpoint_files(self) -> list[Path]:
        """Return the checkpoints of a single process that exist."""
        files = (self.path / f"{name}.pt" for name in ("checkpoint", "branch"))
        return [file for file in files if file.is_file()]

    def rewind_checkpoints(self, step: int) -> None:
        """Drop checkpoints after a step, so that the run continues from the newest remaining checkpoint."""
        branch, last = self.path / "branch.pt", self.path / "checkpoint.pt"
        if branch.is_file() and _file_step(branch) <= step and last.is_file() and _file_step(last) > step:
            branch.replace(last)
        for folder in _complete(self):
            if _step(folder) > step:
                shutil.rmtree(folder)

    def drop_checkpoints(self) -> None:
        """Remove all checkpoints. Only a complete run may lose them."""
        for name in ("checkpoint", "branch"):
            (self.path / f"{name}.pt").unlink(missing_ok=True)
        for folder in self.path.glob("checkpoint-*"):
            shutil.rmtree(folder, ignore_errors=True)

    def load(self) -> dict[str, Any] | None:
        """Return the checkpoint of a single process, None if there is none. Drops rows of metrics after it."""
        file = self.path / "checkpoint.pt"
        state: dict[str, Any] | None = None
        if any(self.path.glob("checkpoint-*")):
            raise RecipeError(
                f"{self.path}: its checkpoints were written with parallel ddp, fsdp2 or hsdp; continue the run with "
                "one of these, for instance by 'torchrun --nproc-per-node 1'"
            )
        if file.is_file():
            try:
                state = torch.load(file, map_location="cpu", weights_only=True)
            except Exception as error:  # torch raises many kinds of errors for a damaged file
                raise RecipeError(f"{file}: the checkpoint cannot be read; remove {self.path}") from error
        self.rewind(state["metrics_bytes"] if state is not None else 0)
        return state

    def metrics_size(self) -> int:
        """Return the length of metrics.jsonl in bytes, after it has been written to disk."""
        if not self.metrics.exists():
            return 0
        with self.metrics.open("rb") as stream:
            os.fsync(stream.fileno())
            return os.fstat(stream.fileno()).st_size

    def rewind(self, size: int) -> None:
        """Drop the rows of metrics after the first `size` bytes."""
        if self.metrics.exists():
            if self.metrics.stat().st_size < size:
                raise RecipeError(
                    f"{self.metrics}: is shorter than the {size} bytes that its checkpoint covers; remove {self.path}"
                )
            os.truncate(self.metrics, size)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes from training in this directory during the block. The lock of a process that dies is
        released.
        """
        with writing(self.path / "lock"):
            lock = (self.path / "lock").open("w", encoding="utf-8")
        with lock as stream:
            if sys.platform != "win32":
                import fcntl

                try:
                    fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    raise RecipeError(
                        f"{self.path}: another process trains in this directory; wait for it or stop it"
                    ) from None
            for stray in self._partial():  # left by a process that was killed
                shutil.rmtree(stray) if stray.is_dir() else stray.unlink()
            yield

    def _partial(self) -> set[Path]:
        """Return files and checkpoints that were never completed."""
        return set(self.path.glob(f".*{PARTIAL}"))


_KEPT = 2
_NOTES = "run.pt"


def newest_checkpoint(run: RunDirectory) -> Path | None:
    """Return the last complete checkpoint of several processes, None if there is none."""
    return max(_complete(run), key=_step, default=None)


def _complete(run: RunDirectory) -> list[Path]:
    return [path for path in run.path.glob("checkpoint-*") if re.fullmatch(r"checkpoint-\d+", path.name)]


def _step(path: Path) -> int:
    return int(path.name.rpartition("-")[2])


def _file_step(path: Path) -> int:
    try:
        return int(torch.load(path, map_location="cpu", weights_only=True, mmap=True)["step"])
    except Exception as error:  # torch raises many kinds of errors for a damaged file
        raise RecipeError(f"{path}: the checkpoint cannot be read; remove {path.parent}") from error


def save_sharded(
    run: RunDirectory,
    ranks: Ranks,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    notes: Mapping[str, Any],
    branch: int | None = None,
) -> None:
    """Write the checkpoint of step `notes["step"]`. All ranks must call this.

    notes: state of the run without the states of model and optimizer. Rank 0 writes the notes.
    branch: step whose checkpoint is never removed. None: there is no such step.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_saver import save as write

    final = run.path / f"checkpoint-{notes['step']}"
    temporary = run.path / f".{final.name}{PARTIAL}"
    ranks.on_first(lambda: shutil.rmtree(temporary, ignore_errors=True))
    try:
        write(_state(model, optimizer), checkpoint_id=temporary)
    except CheckpointException as error:
        raise OSError(f"{final}: cannot be written: {_first(error)}") from error

    def publish() -> None:
        with writing(final), (temporary / _NOTES).open("wb") as stream:
            torch.save({**notes, "metrics_bytes": run.metrics_size()}, stream)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(final)
        others = (path for path in _complete(run) if _step(path) != branch)
        for old in sorted(others, key=_step)[:-_KEPT]:
            doomed = run.path / f".{old.name}{PARTIAL}"
            old.replace(doomed)  # a kill during removal then leaves no incomplete checkpoint under the name
            shutil.rmtree(doomed)

    ranks.on_first(publish)


def load_sharded(
    run: RunDirectory, ranks: Ranks, model: nn.Module, optimizer: torch.optim.Optimizer
) -> dict[str, Any] | None:
    """Restore model and optimizer from the last checkpoint and return its notes, None if there is none.

    All ranks must call this. Rows of metrics after the checkpoint are dropped.
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
        raise RecipeError(f"{found}: cannot be read; {_remedy(run, found)}: {_first(error)}") from error
    state_dict.set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return notes


def _notes(run: RunDirectory) -> tuple[Path | None, dict[str, Any] | None]:
    """Return the last checkpoint and its notes, and drop the rows of metrics after it."""
    if (run.path / "checkpoint.pt").exists():
        raise RecipeError(f"{run.path}: its checkpoint was written by a single process; continue with parallel=none")
    found = newest_checkpoint(run)
    notes = None
    if found is not None:
        try:
            notes = torch.load(found / _NOTES, map_location="cpu", weights_only=True)
        except Exception as error:  # torch raises many kinds of errors for a damaged file
            raise RecipeError(f"{found}: the checkpoint cannot be read; {_remedy(run, found)}") from error
    run.rewind(notes["metrics_bytes"] if notes is not None else 0)
    return found, notes


def _first(error: BaseException) -> str:
    """Return the error of the first failing rank in one line. torch's own text is a traceback."""
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
