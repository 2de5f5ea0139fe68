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

Checkpoints of several processes are directories in torch's distributed format: shards of parameters and state are saved
by name with their offset in the full tensor. The last two directories are kept, and the one of the step before the
learning rate falls. A run continues from its newest checkpoint of either form, on any number of processes and under any
`parallel`.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from eigengraft.errors import RecipeError, first_lines
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
        why = f"perhaps because it was continued by --extend {there}"
        return f" The run there has {there} steps, {why}; give steps={there} to continue it."
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
            faults.sort(key=lambda line: (line.partition(":")[0].count("."), len(line)))  # details and long texts last
            raise RecipeError(
                f"{self.path} belongs to a run of another experiment (recorded -> given):\n"
                + "\n".join(first_lines(faults))
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
        """Return the recorded fault of a run that continues from `step`, or None if there is none.

        A fault after this step is removed, and None is returned.
        """
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

    def newest_checkpoint(self) -> Path | None:
        """Return the checkpoint from which the run continues: checkpoint.pt or the directory of the last step. Return
        None if there is none.
        """
        file = self.path / "checkpoint.pt"
        return max([file] * file.is_file() + _complete(self), key=checkpoint_step, default=None)

    def checkpoint_steps(self) -> list[int]:
        """Return the steps of all complete checkpoints."""
        return [checkpoint_step(path) for path in (*self._checkpoint_files(), *_complete(self))]

    def _checkpoint_files(self) -> list[Path]:
        """Return the checkpoints of a single process that exist."""
        files = (self.path / f"{name}.pt" for name in ("checkpoint", "branch"))
        return [file for file in files if file.is_file()]

    def rewind_checkpoints(self, step: int) -> None:
        """Drop checkpoints after a step, so that the run continues from the newest remaining checkpoint."""
        branch, last = self.path / "branch.pt", self.path / "checkpoint.pt"
        if last.is_file() and checkpoint_step(last) > step:
            if branch.is_file() and checkpoint_step(branch) <= step:
                branch.replace(last)
            else:  # no file is left to continue from, but a checkpoint directory may be
                last.unlink()
        for folder in _complete(self):
            if checkpoint_step(folder) > step:
                shutil.rmtree(folder)

    def drop_checkpoints(self) -> None:
        """Remove all checkpoints. Only a complete run may lose them."""
        for name in ("checkpoint", "branch"):
            (self.path / f"{name}.pt").unlink(missing_ok=True)
        for folder in self.path.glob("checkpoint-*"):
            shutil.rmtree(folder, ignore_errors=True)

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


def _complete(run: RunDirectory) -> list[Path]:
    return [path for path in run.path.glob("checkpoint-*") if re.fullmatch(r"checkpoint-\d+", path.name)]


def checkpoint_step(path: Path) -> int:
    """Return the step of a checkpoint: of a directory by its name, of a file by its content."""
    if path.suffix != ".pt":
        return int(path.name.rpartition("-")[2])
    return int(_read_file(path, mmap=True)["step"])


def _read_file(path: Path, mmap: bool = False) -> dict[str, Any]:
    """Return the content of the checkpoint of a single process."""
    try:
        content: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
    except Exception as error:  # torch raises many kinds of errors for a damaged file
        raise RecipeError(f"{path}: the checkpoint cannot be read; remove {path.parent}") from error
    return content


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
        others = (path for path in _complete(run) if checkpoint_step(path) != branch)
        for old in sorted(others, key=checkpoint_step)[:-_KEPT]:
            doomed = run.path / f".{old.name}{PARTIAL}"
            old.replace(doomed)  # a kill during removal then leaves no incomplete checkpoint under the name
            shutil.rmtree(doomed)

    ranks.on_first(publish)


def load_checkpoint(
    run: RunDirectory, ranks: Ranks, model: nn.Module, optimizer: torch.optim.Optimizer
) -> dict[str, Any] | None:
    """Restore model and optimizer from the newest checkpoint, of one process or of several.

    All ranks must call this. Rows of metrics after the checkpoint are dropped. Return the entries of the checkpoint
    without the states of model and optimizer, None if there is no checkpoint. Only a checkpoint of a single process has
    the random state, in the entries `rng` and `device_rng`.
    """
    found, notes = ranks.on_first(lambda: _notes(run))
    if found is None:
        return None
    if notes is None:
        return _load_file(found, ranks, model, optimizer)
    _load_directory(run, ranks, found, model, optimizer)
    return notes


def _notes(run: RunDirectory) -> tuple[Path | None, dict[str, Any] | None]:
    """Return the newest checkpoint and, if it is a directory, the notes that `save_sharded` wrote into it.

    Drop the rows of metrics after the checkpoint. If there is none, return (None, None) and drop all rows.
    """
    found = run.newest_checkpoint()
    if found is None:
        run.rewind(0)
        return None, None
    if found.suffix == ".pt":
        run.rewind(_read_file(found, mmap=True)["metrics_bytes"])
        return found, None
    try:
        notes: dict[str, Any] = torch.load(found / _NOTES, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many kinds of errors for a damaged file
        raise RecipeError(f"{found}: the checkpoint cannot be read; {_remedy(run, found)}") from error
    run.rewind(notes["metrics_bytes"])
    return found, notes


def _load_file(found: Path, ranks: Ranks, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Restore model and optimizer from the file of a single process and return its other entries."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    content = _read_file(found)
    if ranks.distributed:
        set_model_state_dict(model, content.pop("model"), options=StateDictOptions(full_state_dict=True))
    else:
        model.load_state_dict(content.pop("model"))
    optimizer.load_state_dict(content.pop("optimizer"))
    return content


def _load_directory(
    run: RunDirectory, ranks: Ranks, found: Path, model: nn.Module, optimizer: torch.optim.Optimizer
) -> None:
    """Restore model and optimizer from the directory of several processes."""
    from torch.distributed.checkpoint import state_dict
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_loader import load as read

    state = _state(model, optimizer)
    try:
        with warnings.catch_warnings():
            # torch warns that a load without a process group is one of a single process, even if `no_dist` says so.
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
            read(state, checkpoint_id=found, no_dist=not ranks.distributed)
    except (CheckpointException, OSError) as error:
        raise RecipeError(f"{found}: cannot be read; {_remedy(run, found)}: {_first(error)}") from error
    state_dict.set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


def _first(error: BaseException) -> str:
    """Return the error of the first failing rank in one line. torch's own text is a traceback."""
    failures = getattr(error, "failures", None)
    fault = next(iter(failures.values()))[0] if failures else error
    return f"{type(fault).__name__}: {fault}"


def _remedy(run: RunDirectory, broken: Path) -> str:
    others = len(_complete(run)) > 1 or (run.path / "checkpoint.pt").is_file()
    return f"remove {broken} to continue from the one before" if others else f"remove {run.path}"


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    from torch.distributed.checkpoint import state_dict

    model_state, optimizer_state = state_dict.get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state}
