"""Claims of runs: of all workers that share a study, on one machine or many, one trains a run at a time.

A worker holds the claim `number` of a run while it trains it. Making a claim either succeeds or finds that it is there,
so that of several workers one succeeds, and it is gone when the run has ended or failed. The claim of a worker that
died is not removed but followed by `number + 1`, which again one worker alone can make.
"""

from __future__ import annotations

import contextlib
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager

HEARTBEAT = 5.0
"""Seconds between two signs of life of a worker."""
STALE = 60.0
"""Seconds without a sign of life after which a worker counts as dead of which nothing else is known."""


class Claims(ABC):
    """The claims of one run. Where they are cannot be reached, methods raise OSError."""

    @abstractmethod
    def numbers(self) -> list[int]:
        """The numbers of all claims there are."""

    @abstractmethod
    def alive(self, number: int) -> bool:
        """Whether the worker of a claim lives; False where there is no such claim."""

    @abstractmethod
    def made(self, number: int) -> AbstractContextManager[bool]:
        """Make a claim, whose worker lives meanwhile; False: another worker has made it."""

    @abstractmethod
    def remove(self, numbers: Iterable[int]) -> None:
        """Remove claims, as far as they are there."""

    @abstractmethod
    def sign(self, number: int) -> None:
        """Give a sign of life."""

    def held(self) -> bool:
        """Whether a worker that is alive holds the run."""
        last = self._last()
        return last > 0 and self.alive(last)

    @contextmanager
    def hold(self) -> Iterator[int]:
        """Hold the run meanwhile: the number of the claim, one more than workers died; 0: another worker holds it."""
        own = self._last() + 1
        if own > 1 and self.alive(own - 1):
            yield 0
            return
        with self.made(own) as made:
            if made and any(number != own and self.alive(number) for number in self.numbers()):
                self.remove([own])  # claims were removed meanwhile, and two workers counted differently
                made = False
            if not made:
                yield 0
                return
            stop = threading.Event()
            beating = threading.Thread(target=self._beat, args=(own, stop), daemon=True)
            beating.start()
            try:
                yield own
            finally:
                stop.set()
                beating.join()
                self.remove(number for number in self.numbers() if number <= own)

    def forget_dead(self) -> None:
        """Remove the claims of dead workers, so that attempts are counted anew."""
        self.remove(number for number in self.numbers() if not self.alive(number))

    def _beat(self, own: int, stop: threading.Event) -> None:
        """Give signs of life; end this process when another worker took it for dead and holds the run."""
        while not stop.wait(HEARTBEAT):
            with contextlib.suppress(OSError):
                if own + 1 in self.numbers():
                    os._exit(1)
                self.sign(own)

    def _last(self) -> int:
        """The number of the last claim; 0: there is none."""
        return max(self.numbers(), default=0)
