"""Byte-level language modeling on a text that every machine with Python has: the sources of the standard library."""

from __future__ import annotations

import bz2
import gzip
import hashlib
import importlib.util
import lzma
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn

from .base import IN_LIBRARY, IN_PACKAGE, Batch, Dataset, Fingerprint, Task, generator
from .models import GPT, HeadCount, Init, initialized

SYMBOLS = 256
"""Number of classes of a prediction: the values of a byte."""

_OPENERS: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}


class ByteLM(Task):
    """Predict the next byte of a text with a small pre-norm GPT; loss in nats per byte.

    The text is one file, or the .py files of the running Python's standard library without its tests, in an order fixed
    by their names. The first 95 % are for training, the last 5 % for validation.
    """

    kind: Literal["byte_lm"] = "byte_lm"
    path: str | None = Field(
        default=None,
        description="a text file, also .gz, .bz2 or .xz; 'python:FILE' in the folder of Python's standard library, or "
        "'package:NAME/FILE' in that of an installed package; none: the sources of Python's standard library",
    )
    max_bytes: int = Field(default=8 * 2**20, ge=4096, description="read at most this many bytes of text")
    layers: int = Field(default=2, ge=1, le=64, description="transformer blocks")
    width: int = Field(default=64, ge=4, le=4096, description="size of the residual stream")
    heads: HeadCount = Field(default=4, ge=1, le=64, description="attention heads; a divisor of width")
    context: int = Field(default=64, ge=2, le=8192, description="bytes per sequence")
    batch_size: int = Field(default=32, ge=1, description="sequences per step")
    init: Init = "standard"
    eval_sequences: int = Field(
        default=512, ge=1, description="validation sequences, evenly spaced in the validation text"
    )

    def load(self) -> Dataset:
        if self.path is None:
            return Text(self, standard_library_text(self.max_bytes))
        return Text(self, read_text([text_file(self.path)], self.max_bytes))

    def build(self) -> nn.Module:
        return initialized(GPT(SYMBOLS, self.context, self.layers, self.width, self.heads), self.init)


class Text(Dataset):
    """A text cut into a training and a validation part, both uint8."""

    def __init__(self, task: ByteLM, text: bytes) -> None:
        cut = len(text) * 95 // 100
        if len(text) - cut <= task.context:
            raise ValueError(
                f"byte_lm: {len(text)} bytes of text are too few for task.context={task.context}, which needs more "
                f"than {20 * task.context}; lower task.context or give a longer text as task.path"
            )
        content = torch.from_numpy(np.frombuffer(text, dtype=np.uint8).copy())
        self.train, self.validation = content[:cut], content[cut:]
        self.task = task
        self.fingerprint = Fingerprint.of(task.path or "the Python standard library's sources", text)

    def batch(self, seed: int, step: int) -> Batch:
        starts = generator(seed, step).integers(0, len(self.train) - self.task.context, self.task.batch_size)
        return _sequences(self.train, torch.from_numpy(starts), self.task.context)

    def evaluation(self) -> Iterator[Batch]:
        last = len(self.validation) - self.task.context - 1
        starts = torch.linspace(0, last, self.task.eval_sequences, dtype=torch.float64).long()
        for some in torch.split(starts, 64):
            yield _sequences(self.validation, some, self.task.context)


def _sequences(text: Tensor, starts: Tensor, context: int) -> Batch:
    """Return windows of `context` bytes at `starts` [B], and as targets the byte after each position."""
    windows = text[starts[:, None] + torch.arange(context + 1)].long()  # [B, context + 1]
    return Batch(windows[:, :-1], windows[:, 1:])


@lru_cache(maxsize=1)
def standard_library_text(max_bytes: int) -> bytes:
    """Return the first `max_bytes` bytes of the sources of the standard library."""
    return read_text(standard_library_files(), max_bytes)


def text_file(path: str) -> Path:
    """Return the file that a `path` of the task names. Raises ValueError if it does not exist."""
    file = Path(path)
    if path.startswith(IN_LIBRARY):
        file = library_folder() / path.removeprefix(IN_LIBRARY)
    if path.startswith(IN_PACKAGE):
        name, _, inside = path.removeprefix(IN_PACKAGE).partition("/")
        found = importlib.util.find_spec(name) if name.isidentifier() else None
        if found is None or not found.submodule_search_locations:
            raise ValueError(
                f"task.path: the package '{name}' after '{IN_PACKAGE}' is not installed; install the package, or name "
                "another one"
            )
        file = Path(found.submodule_search_locations[0]) / inside
    if not file.is_file():
        raise ValueError(f"task.path: there is no file '{path}'; give an existing file")
    return file


def read_text(files: Iterable[Path], max_bytes: int) -> bytes:
    """Return the first `max_bytes` bytes of the files, one after the other."""
    parts: list[bytes] = []
    size = 0
    for file in files:
        with _OPENERS.get(file.suffix, open)(file, "rb") as stream:
            parts.append(stream.read(max_bytes - size))
        size += len(parts[-1])
        if size >= max_bytes:
            break
    return b"".join(parts)


def library_folder() -> Path:
    """Return the folder of the running Python's standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


def standard_library_files() -> list[Path]:
    """Return the .py files of the standard library, in an order that depends on their names alone.

    Raises ValueError if Python was installed without its sources.
    """
    root = library_folder()
    skipped = {"test", "tests", "idle_test", "site-packages", "dist-packages"}
    files = {file.relative_to(root).as_posix(): file for file in root.rglob("*.py")}
    # _sysconfigdata contains the paths and flags of the machine that built Python, and differs between machines.
    kept = [name for name in files if not skipped & set(name.split("/")) and not name.startswith("_sysconfigdata")]
    if not kept:
        raise ValueError(f"byte_lm: {root} has no Python sources; give a text file as task.path")
    # The order is that of hashes of names, so that neighbors are unrelated and the last 5 % resemble the rest.
    return [files[name] for name in sorted(kept, key=lambda name: hashlib.sha256(name.encode()).digest())]
