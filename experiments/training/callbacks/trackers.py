"""Trackers: callbacks that pass the rows of a run on, all behind one `log(step, values)`."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from pydantic import Field

from eigengraft.errors import RecipeError

from ...files import append_text, make_directory, read_object, read_rows, write_text
from .base import Callback, RunView


class Log(Protocol):
    """What a tracker writes to during one run."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Record values at a step; steps come in ascending order."""

    def close(self) -> None:
        """Finish the record; the run has ended."""


class Tracker(Callback, ABC):
    """Passes every row of metrics on: step -> loss, val_loss, val_accuracy, lr, seconds, step_ms, optimizer_ms.

    One of your own is a component with `open`. What it opens belongs to the process and not to the component.
    """

    @abstractmethod
    def open(self, run: RunView, step: int) -> Log:
        """The log of a run whose next row is that of `step`; what a stopped run logged from there on is void."""


class JSONL(Tracker):
    """Rows of JSON, {"step": 10, "loss": 2.3, ...}, in one file."""

    kind: Literal["jsonl"] = "jsonl"
    path: str = Field("track.jsonl", min_length=1, description="the file, relative to the run's directory")

    def open(self, run: RunView, step: int) -> Log:
        return _JSONLLog(run.directory / self.path, step)


class TensorBoard(Tracker):
    """Event files of TensorBoard in the folder `tensorboard` of the run: `tensorboard --logdir runs`.

    Needs TensorBoard: `pip install eigengraft[trackers]`.
    """

    kind: Literal["tensorboard"] = "tensorboard"

    def open(self, run: RunView, step: int) -> Log:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise _missing("tensorboard") from None
        # rows of a continued run that its checkpoint does not cover are written again
        return _TensorBoardLog(SummaryWriter(run.directory / "tensorboard", purge_step=step))


class WandB(Tracker):
    """A run of Weights & Biases, offline unless `mode` says online: `wandb sync` uploads it later.

    Each start of a continued run is a run of its own in the group of the run's directory. Needs wandb:
    `pip install eigengraft[trackers]`.
    """

    kind: Literal["wandb"] = "wandb"
    project: str = Field("eigengraft", min_length=1, description="project of the runs")
    mode: Literal["offline", "online"] = Field("offline", description="whether runs are uploaded at once")

    def open(self, run: RunView, step: int) -> Log:
        try:
            import wandb
        except ImportError:
            raise _missing("wandb") from None
        directory = run.directory
        config = read_object(directory / "config.json")
        name = "/".join(directory.absolute().parts[-2:])
        named = {"project": self.project, "name": name, "group": name}
        began = wandb.init(mode=self.mode, dir=directory, config=config, reinit="create_new", **named)
        return _WandBLog(began)


@dataclass(frozen=True)
class _JSONLLog:
    path: Path
    first: int

    def __post_init__(self) -> None:
        make_directory(self.path.parent)
        kept = (json.dumps(row) + "\n" for row in read_rows(self.path) if row["step"] < self.first)
        write_text(self.path, "".join(kept))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        append_text(self.path, json.dumps({"step": step, **values}) + "\n")

    def close(self) -> None:
        """Nothing is open between rows."""


@dataclass(frozen=True)
class _TensorBoardLog:
    writer: Any

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()

    def close(self) -> None:
        self.writer.close()


@dataclass(frozen=True)
class _WandBLog:
    began: Any

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.began.log(dict(values), step=step)

    def close(self) -> None:
        self.began.finish()


def _missing(package: str) -> RecipeError:
    required = f"{package} is required (pip install eigengraft[trackers]), got none"
    return RecipeError(f"callbacks.{package}: {required}")
