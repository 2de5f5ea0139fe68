"""Where the workers of a study meet: how they claim runs, and how each gets the results of the others."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from .claims import Claims
from .file_claims import FileClaims


@dataclass(frozen=True)
class Rendezvous(ABC):
    """Where the workers of a study meet.

    directory: of the study, for this worker's files.
    """

    directory: Path

    @abstractmethod
    def claims(self, run: str) -> Claims:
        """The claims of a run, given by its directory relative to that of the study."""

    @abstractmethod
    def fetch(self, runs: Collection[str] | None = None) -> None:
        """Bring the results of runs that have ended elsewhere into the directory; none: of all runs of the study."""

    @abstractmethod
    def publish(self, run: str) -> None:
        """Let others know the result of a run that has ended here, or why it failed."""


@dataclass(frozen=True)
class SharedDirectory(Rendezvous):
    """Workers that see one directory: results are where all find them."""

    def claims(self, run: str) -> Claims:
        return FileClaims(self.directory / run)

    def fetch(self, runs: Collection[str] | None = None) -> None:
        """Nothing: what ended is in the directory."""

    def publish(self, run: str) -> None:
        """Nothing: what ended is in the directory."""
