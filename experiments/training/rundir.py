"""The directory of one run: its files, written so that the run survives a kill at any time.

config.json     the resolved experiment            env.json      versions, machine, data, command line
metrics.jsonl   one row per line, append-only      checkpoint.pt everything needed to continue
result.json     written last: the run is complete  lock          held while a process trains here
diagnostics.jsonl what the optimizer tells of itself, if it is asked

Runs of several processes have directories checkpoint-<step> in place of checkpoint.pt (see `sharded_checkpoint.py`).

A file is either complete or not there: it is written beside its place and moved in. The checkpoint knows how many bytes
of metrics.jsonl it covers; rows after them are dropped and computed again, the same ones.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from eigengraft.errors import RecipeError
from eigengraft.optimizers.recipe.overrides import differences

from ..files import PARTIAL, append_text, make_directory, read_object, read_rows, replacing, write_text, writing


class RunDirectory:
    """The files of one run under `path`."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.metrics = self.path / "metrics.jsonl"

    def claim(self, config: Mapping[str, Any]) -> None:
        """Make this the directory of `config`. Raises RecipeError when it already belongs to another one."""
        known = self.read("config")
        if known is None:
            if self.path.exists() and (not self.path.is_dir() or set(self.path.iterdir()) - self._partial()):
                raise RecipeError(f"{self.path}: an empty or new directory is required, got other files in it")
            make_directory(self.path)
            self.write("config", config)
            return
        # `imports` may differ, so that a moved checkout continues its runs, and the others because the trajectory is
        # the same.
        ignored = dict.fromkeys(("imports", "parallel", "diagnostics", "silence"))
        faults = differences({**known, **ignored}, {**config, **ignored})
        if faults:
            raise RecipeError(
                f"{self.path} holds a run of another experiment; what is there -> what was asked for:\n"
                + "\n".join(faults[:8])
                + "\nChoose another directory, or remove this one."
            )

    def read(self, name: str) -> dict[str, Any] | None:
        """The content of `name`.json, None when it is not there."""
        return read_object(self.path / f"{name}.json") or None

    def write(self, name: str, content: Mapping[str, Any]) -> None:
        """Write `name`.json atomically."""
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
            write_text(file, "".join(json.dumps(row) + "\n" for row in read_rows(file) if row["step"] <= step))

    def rows(self) -> list[dict[str, Any]]:
        """The rows of metrics so far."""
        return read_rows(self.metrics)

    def save(self, state: Mapping[str, Any]) -> None:
        """Write the checkpoint atomically, with the length of the metrics it covers."""
        size = self.metrics_size()
        with replacing(self.path / "checkpoint.pt") as temporary, temporary.open("wb") as stream:
            torch.save({**state, "metrics_bytes": size}, stream)

    def load(self) -> dict[str, Any] | None:
        """The last checkpoint, None when there is none; drops the rows of metrics it does not cover."""
        file = self.path / "checkpoint.pt"
        state: dict[str, Any] | None = None
        if any(self.path.glob("checkpoint-*")):
            raise RecipeError(
                f"{self.path}: its checkpoints are of a run with parallel: ddp, fsdp2 or hsdp; continue it with one of "
                "them, 'torchrun --nproc-per-node 1' is enough"
            )
        if file.is_file():
            try:
                state = torch.load(file, map_location="cpu", weights_only=True)
            except Exception as error:  # torch raises whatever its unpickler meets
                raise RecipeError(f"{file}: a readable checkpoint is required; remove {self.path}") from error
        self.rewind(state["metrics_bytes"] if state is not None else 0)
        return state

    def metrics_size(self) -> int:
        """The size of metrics.jsonl in bytes, after it has been written to disk."""
        if not self.metrics.exists():
            return 0
        with self.metrics.open("rb") as stream:
            os.fsync(stream.fileno())
            return os.fstat(stream.fileno()).st_size

    def rewind(self, size: int) -> None:
        """Drop the rows of metrics after the first `size` bytes."""
        if self.metrics.exists():
            if self.metrics.stat().st_size < size:
                raise RecipeError(f"{self.metrics}: {size} bytes are required by the checkpoint; remove {self.path}")
            os.truncate(self.metrics, size)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes from training here meanwhile; the system releases it when the process dies."""
        with writing(self.path / "lock"):
            lock = (self.path / "lock").open("w", encoding="utf-8")
        with lock as stream:
            if sys.platform != "win32":
                import fcntl

                try:
                    fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    raise RecipeError(f"{self.path}: another process trains here; wait for it or stop it") from None
            for stray in self._partial():  # of a process that was killed
                shutil.rmtree(stray) if stray.is_dir() else stray.unlink()
            yield

    def _partial(self) -> set[Path]:
        """Files and checkpoints that were never finished."""
        return set(self.path.glob(f".*{PARTIAL}"))
