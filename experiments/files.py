"""Reading and writing of files. Every error names the file, what failed and what to do.

Neither the operating system nor torch names the file when a write fails on a full disk. The JSON parser does not name a
file that a power loss has cut short.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from eigengraft.errors import RecipeError

PARTIAL = ".partial"
"""Suffix of a file that is being written. Such a file remains only if the process is killed while it writes."""


LABEL = re.compile(r"[\w.+-]+")
"""Pattern of a label. The label of a value on an axis, and of a value that a search tries, is part of the name of a
directory."""
_LONGEST = 255
"""Largest length of a file name in bytes. It is the limit of common file systems (ext4, XFS, APFS, NTFS)."""


def short_name(name: str, suffix: str = "") -> str:
    """Return a file name: `name`, followed by `suffix`.

    If `name` is too long for a file system or contains a slash, it is changed, and ends with a hash of the whole name.
    """
    plain = name.replace("/", "-")
    if plain == name and len((name + suffix).encode()) <= _LONGEST:
        return name + suffix
    end = f"-{hashlib.sha256(name.encode()).hexdigest()[:16]}{suffix}"
    return plain.encode()[: _LONGEST - len(end.encode())].decode(errors="ignore") + end


def make_directory(path: Path) -> None:
    """Create a directory and its parents if they do not exist. Raises RecipeError if they cannot be created."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise RecipeError(f"{path}: is a file, not a directory; choose another directory") from None
    except OSError as error:
        raise RecipeError(
            f"{path}: the directory cannot be created: {_reason(error)}; choose another directory"
        ) from None


def files_named(name: str, directory: Path) -> Iterator[Path]:
    """Yield the paths of all files with the name `name` in a directory and its subdirectories, in no order.

    Subdirectories may be removed during the search: a worker that trains removes old checkpoints. `Path.rglob` would
    fail then.
    """
    for folder, _, files in os.walk(directory):
        if name in files:
            yield Path(folder, name)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raise any failure to write inside the block as an OSError in one sentence that names `path`."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, OSError):
            cause = cause.__context__  # torch wraps the OSError of a failed write in its own error
        if cause is None:
            raise
        full = cause.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        remedy = "free some space or choose another directory" if full else "choose another directory"
        raise OSError(
            f"{path}: cannot be written: {_reason(cause)}; {remedy}, then give the same command again"
        ) from None


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield the path of a temporary file, which replaces `path` after the block. So `path` is never half written."""
    temporary = path.with_name(f".{uuid.uuid4().hex[:12]}{PARTIAL}")
    try:
        with writing(path):
            yield temporary
            with temporary.open("rb") as stream:
                os.fsync(stream.fileno())
            temporary.replace(path)
    finally:
        with suppress(OSError):  # a read-only file system refuses the removal
            temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write a text file. If writing fails, an older file of this name is unchanged."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


class JsonLines:
    """A file of JSON objects, one per line, each with its `step`. Rows are appended, with ascending steps.

    A kill during an append leaves a last line without a newline. This line does not count as a row.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, *rows: Mapping[str, Any]) -> None:
        """Append rows. The file is created if it does not exist."""
        text = "".join(json.dumps(row, allow_nan=False) + "\n" for row in rows)
        with writing(self.path), self.path.open("a", encoding="utf-8") as stream:
            stream.write(text)

    def rows(self) -> list[dict[str, Any]]:
        """Return all rows, [] if there is no file.

        Raises:
            RecipeError: a finished line is no JSON. The error names the file and the line.
        """
        return [_parsed(self.path, line, f"line {number}") for number, line in enumerate(self._lines(), start=1)]

    def sync(self) -> None:
        """Wait until all rows are on disk."""
        if self.path.exists():
            with self.path.open("rb") as stream:
                os.fsync(stream.fileno())

    def rewind(self, step: int) -> None:
        """Drop all rows after a step. A line that a crash damaged is dropped with all rows behind it."""
        size = 0
        with suppress(ValueError):
            for line in self._lines():
                if json.loads(line)["step"] > step:
                    break
                size += len(line)
        if self.path.exists():
            os.truncate(self.path, size)

    def _lines(self) -> list[bytes]:
        lines = self.path.read_bytes().splitlines(keepends=True) if self.path.is_file() else []
        return [line for line in lines if line.endswith(b"\n")]


def read_json(path: Path) -> Any:
    """Return the content of a JSON file. Raises RecipeError for a file that is not JSON, for example after a power
    loss.
    """
    return _parsed(path, path.read_bytes(), "the file")


def read_object(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; {} if there is no file. Raises RecipeError for a file with other content."""
    if not path.is_file():
        return {}
    content = read_json(path)
    if not isinstance(content, dict):
        raise RecipeError(f"{path}: contains a JSON {type(content).__name__}, not an object; remove the file")
    return content


def _parsed(path: Path, content: bytes, what: str) -> Any:
    try:
        return json.loads(content.decode("utf-8"))
    except ValueError as error:
        state = "is empty" if not content.strip(b"\0 \n") else f"is not valid JSON ({error})"
        raise RecipeError(
            f"{path}: {what} {state}, perhaps because the machine crashed or the disk was full; remove {path.parent} "
            "and give the same command again"
        ) from None


def _reason(error: OSError) -> str:
    return (error.strerror or str(error)).lower()
