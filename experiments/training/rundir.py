"""The directory of one run: its files and checkpoints, written so that the run survives a kill at any time.

config.json        the resolved experiment
env.json           versions, machine, data, command line
metrics.jsonl      one row per line, append-only
diagnostics.jsonl  norms of all layers at the end, and tables of `optimizer.inspect()` if the experiment asks for them
fault.json         the first value that was not finite, or the error that ended the run; absent if nothing went wrong
checkpoint-<step>/ everything that is needed to continue from a step
result.json        written last: the run is complete
lock               locked while a process trains here

A file or checkpoint is either complete or absent: it is written under a temporary name and then renamed. A run that
continues from the checkpoint of a step drops the rows of later steps and computes the same rows again.

A checkpoint has the file run.pt. A single process stores everything in it. Several processes store model and optimizer
beside it, in torch's distributed format: shards are saved by name with their offset in the full tensor. A run continues
from its newest checkpoint on any number of processes and under any `parallel`.

The last two checkpoints are kept. The checkpoint before the learning rate falls (schedule wsd) is kept too, because a
longer run continues from it. A complete run keeps this one and the last one, or none with `keep_checkpoint: false`.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from eigengraft.errors import RecipeError
from eigengraft.optimizers.recipe.overrides import differences, first_differences

from ..files import PARTIAL, JsonLines, make_directory, read_object, write_text, writing
from ..provenance import REMEDY, without_folders
from .parallel import Ranks


def _hint(known: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    """Return advice for two configurations that differ in one field. Return "" if this field is not `steps`.

    known: recorded configuration.
    config: given configuration.
    """
    there, given = known.get("steps"), config.get("steps")
    if there is None or given is None or there == given:
        return ""
    if given < there:
        why = f"perhaps because it was continued by --extend {there}"
        return f" The run there has {there} steps, {why}; give steps={there} to continue it."
    return f" To continue the run there to {given} steps, give --extend {given}."


IGNORED_FIELDS = ("imports", "parallel", "diagnostics", "silence", "keep_checkpoint")
"""Fields of an experiment that may differ when a run is continued. Paths in `imports` change with the folder of the
checkout, and the other fields do not change the trajectory."""


def config_changes(
    known: Mapping[str, Any], config: Mapping[str, Any], ignored: Iterable[str] = IGNORED_FIELDS
) -> list[str]:
    """Return a line "field: recorded -> given" for each field in which two configurations differ.

    Fields of the experiment itself come first, then fields of its components, the most deeply nested last. Among fields
    of the same depth, short lines come first.

    known: recorded configuration.
    config: given configuration.
    ignored: fields that may differ. The folder of the data and the description of the recipe may differ, too.
    """
    nothing = dict.fromkeys(ignored)
    faults = differences(without_folders({**known, **nothing}), without_folders({**config, **nothing}))
    own = [line for line in faults if not line.startswith("recipe.about:")]
    return sorted(own, key=lambda line: (line.partition(":")[0].count("."), len(line)))


class RunDirectory:
    """The files of one run under `path`."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.metrics, self.diagnostics = (JsonLines(self.path / f"{name}.jsonl") for name in ("metrics", "diagnostics"))

    def acquire(
        self, config: Mapping[str, Any], extensible: bool = False, ignored: Iterable[str] = IGNORED_FIELDS
    ) -> None:
        """Make this the directory of a run with the configuration `config`.

        If an error ended the run in the directory before its first row and checkpoint, there is nothing to continue.
        The directory is then accepted for any configuration, which the caller must write.

        Raises RecipeError if the directory belongs to a run of another configuration, or contains other files.

        extensible, ignored: see `require_config`.
        """
        known = self.read("config")
        if known is None:
            if self.path.exists() and (not self.path.is_dir() or set(self.path.iterdir()) - self._partial()):
                raise RecipeError(f"{self.path}: contains other files; choose an empty or new directory")
            make_directory(self.path)
            self.write("config", config)
        elif self.begun or self.metrics.rows() or self.read("fault") is None:
            self.require_config(known, config, extensible, ignored)

    def require_config(
        self,
        known: Mapping[str, Any],
        config: Mapping[str, Any],
        extensible: bool = False,
        ignored: Iterable[str] = IGNORED_FIELDS,
    ) -> None:
        """Raise RecipeError if configurations differ in fields that change the trajectory.

        known: configuration of the run in this directory.
        config: configuration of the run to do.
        extensible: True if the error may advise `--extend` for another number of steps.
        ignored: fields that may differ.
        """
        if faults := config_changes(known, config, ignored):
            raise RecipeError(
                f"the directory '{self.path}' belongs to a run of another experiment (recorded -> given):\n"
                + "\n".join(first_differences(faults))
                + f"\n{REMEDY}{_hint(known, config) if extensible and len(faults) == 1 else ''}"
            )

    def read(self, name: str) -> dict[str, Any] | None:
        """Return the content of `name`.json, None if it does not exist."""
        return read_object(self.path / f"{name}.json") or None

    def write(self, name: str, content: Mapping[str, Any]) -> None:
        """Write `name`.json, completely or not at all."""
        write_text(self.path / f"{name}.json", json.dumps(content, indent=2, allow_nan=False) + "\n")

    def rewind(self, step: int) -> None:
        """Drop the rows of metrics and diagnostics of all steps after `step`, and the record of a fault after `step`.
        The run then continues from `step`.
        """
        self.metrics.rewind(step)
        self.diagnostics.rewind(step)
        if (self.read("fault") or {"step": 0})["step"] > step:
            (self.path / "fault.json").unlink()

    @property
    def begun(self) -> bool:
        """True if the run has a result, or a checkpoint from which it continues."""
        return self.read("result") is not None or bool(self.checkpoints())

    def checkpoints(self) -> dict[int, Path]:
        """Return all complete checkpoints by step, in ascending order."""
        paths = (path for path in self.path.glob("checkpoint-*") if re.fullmatch(r"checkpoint-\d+", path.name))
        return dict(sorted((int(path.name.rpartition("-")[2]), path) for path in paths))

    def keep_checkpoints(self, steps: Collection[int | None]) -> None:
        """Remove all checkpoints except those of `steps`. A None among them is ignored."""
        for step, path in self.checkpoints().items():
            if step not in steps:
                # The folder is renamed first, so that a kill during the removal leaves no incomplete checkpoint.
                shutil.rmtree(path.replace(path.with_name(f".{path.name}{PARTIAL}")))

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes from training in this directory during the block. The lock of a process that dies is
        released.

        Raises RecipeError if another process trains in the directory.
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


CHECKPOINT = "run.pt"
"""Name of the file in a checkpoint that has the notes and, if a single process wrote it, model and optimizer."""


def save_checkpoint(
    run: RunDirectory,
    ranks: Ranks,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    notes: Mapping[str, Any],
    branch: int | None = None,
) -> None:
    """Write the checkpoint of step `notes["step"]`. Of the older checkpoints, keep only the latest and that of step
    `branch`. All ranks must call this.

    notes: state of the run without the states of model and optimizer.
    branch: step whose checkpoint is never removed. None: there is no such step.

    Raises OSError if the checkpoint cannot be written.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_saver import save as write

    final = run.path / f"checkpoint-{notes['step']}"
    temporary = final.with_name(f".{final.name}{PARTIAL}")
    whole: dict[str, Any] = {}

    def publish() -> None:
        with writing(final):
            temporary.mkdir(exist_ok=True)
            with (temporary / CHECKPOINT).open("wb") as stream:
                torch.save({**notes, **whole}, stream)
                stream.flush()
                os.fsync(stream.fileno())
            run.metrics.sync()
            run.diagnostics.sync()
            temporary.replace(final)
        run.keep_checkpoints([*list(run.checkpoints())[-2:], branch])

    try:
        if ranks.distributed:
            write(_sharded(model, optimizer), checkpoint_id=temporary)
        else:
            whole |= {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        ranks.on_first(publish)
    except CheckpointException as error:
        raise OSError(f"{final}: cannot be written: {_first(error)}") from error
    finally:
        if ranks.first:
            shutil.rmtree(temporary, ignore_errors=True)


def load_checkpoint(
    run: RunDirectory, ranks: Ranks, model: nn.Module, optimizer: torch.optim.Optimizer
) -> dict[str, Any] | None:
    """Restore model and optimizer from the newest checkpoint, and return its notes: the other state of the run. Return
    None if there is no checkpoint.

    All ranks must call this. The checkpoint may be of one process or of several. Rows of metrics and
    diagnostics, and the record of a fault (fault.json), are dropped if they are of later steps than the checkpoint.
    Without a checkpoint, all are dropped.

    Raises RecipeError if the checkpoint cannot be read.
    """
    from torch.distributed.checkpoint.api import CheckpointException

    def rewound() -> Path | None:
        step, newest = max(run.checkpoints().items(), default=(0, None))
        run.rewind(step)
        return newest

    found = ranks.on_first(rewound)
    if found is None:
        return None
    try:
        notes = _read(found / CHECKPOINT)
        if "model" in notes:
            _load(notes, ranks, model, optimizer)
        else:
            _load_sharded(found, ranks, model, optimizer)
    except (CheckpointException, OSError) as error:
        others = len(run.checkpoints()) > 1
        remedy = (
            f"remove {found} to continue from the one before"
            if others
            else f"remove {run.path} and give the same command again"
        )
        raise RecipeError(f"{found}: the checkpoint cannot be read ({_first(error)}); {remedy}") from error
    return notes


def _read(path: Path) -> dict[str, Any]:
    try:
        content: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many kinds of errors for a damaged file
        raise OSError(f"{path.name} is damaged") from error
    return content


def _load(notes: dict[str, Any], ranks: Ranks, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Restore model and optimizer from a checkpoint that a single process wrote.

    notes: content of the file of the checkpoint. The states of model and optimizer are removed from it.
    """
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    if ranks.distributed:
        set_model_state_dict(model, notes.pop("model"), options=StateDictOptions(full_state_dict=True))
    else:
        model.load_state_dict(notes.pop("model"))
    optimizer.load_state_dict(notes.pop("optimizer"))


def _load_sharded(found: Path, ranks: Ranks, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Restore model and optimizer from the shards that several processes wrote."""
    from torch.distributed.checkpoint import state_dict
    from torch.distributed.checkpoint.state_dict_loader import load as read

    state = _sharded(model, optimizer)
    with warnings.catch_warnings():
        # Without a process group, torch warns that it assumes a single process, even if `no_dist` declares this.
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        read(state, checkpoint_id=found, no_dist=not ranks.distributed)
    state_dict.set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


def _sharded(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    from torch.distributed.checkpoint import state_dict

    model_state, optimizer_state = state_dict.get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state}


def _first(error: BaseException) -> str:
    """Return the error of the first failing rank in one line. torch's own text is a traceback."""
    failures = getattr(error, "failures", None)
    fault = next(iter(failures.values()))[0] if failures else error
    return f"{type(fault).__name__}: {fault}".partition("\n")[0].rstrip()
