"""The processes that train one model together, and what they say to each other."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist

from eigengraft.component import RecipeError

from ...tasks import Batch
from ...tasks.base import generator

T = TypeVar("T")


@dataclass(frozen=True)
class Ranks:
    """Process number `rank` of `size`, `here` of them on its machine. together: there is a process group."""

    rank: int = 0
    size: int = 1
    here: int = 1
    device: torch.device = torch.device("cpu")
    together: bool = False

    @property
    def first(self) -> bool:
        """Whether this process is the one that owns the run's directory and speaks."""
        return self.rank == 0

    def part(self, batch: Batch) -> tuple[Batch, float]:
        """This rank's rows of a batch of B, and the weight of their mean loss.

        Rank r has the rows from floor(r B / R) on, n_r targets of n in all; its weight is R n_r / n, so that the mean
        over ranks of the weighted gradients is the gradient of the mean over the whole batch.
        """
        rows = len(batch.inputs)
        if rows < self.size:
            raise RecipeError(f"task.batch_size: a row for each of {self.size} ranks is required, got {rows} rows")
        own = slice(self.rank * rows // self.size, (self.rank + 1) * rows // self.size)
        targets = batch.targets[own]
        return Batch(batch.inputs[own], targets), self.size * targets.numel() / batch.targets.numel()

    def seed(self, seed: int, step: int) -> None:
        """Make torch's random numbers depend on seed, step and rank alone, so that no checkpoint has to hold them.

        A process alone goes on with its own.
        """
        if self.together:
            torch.manual_seed(int(generator(seed, step, self.rank).integers(2**63)))

    def mean(self, value: float) -> float:
        """The mean of what the ranks have."""
        if self.size == 1:
            return value
        total = torch.tensor(value, dtype=torch.float64, device=self.device)
        dist.all_reduce(total)
        return total.item() / self.size

    def every(self, mine: T) -> list[T]:
        """What each rank has, by rank; for small things."""
        if self.size == 1:
            return [mine]
        found: list[T | None] = [None] * self.size
        dist.all_gather_object(found, mine)
        return found  # type: ignore[return-value]  # all of them are filled

    def by_first(self, act: Callable[[], T]) -> T:
        """What `act` returns on rank 0, on every rank; a fault of the user's or of files there is everybody's."""
        if self.size == 1:
            return act()
        answer: list[T | Exception | None] = [None, None]
        if self.first:
            try:
                answer[0] = act()
            except (ValueError, OSError) as error:
                answer[1] = error
        dist.broadcast_object_list(answer, src=0)
        if isinstance(answer[1], Exception):
            raise answer[1]
        return answer[0]  # type: ignore[return-value]


def launched() -> int:
    """How many processes torchrun, or a launcher with the same environment, has started; 0: none."""
    return int(os.environ["WORLD_SIZE"]) if {"RANK", "WORLD_SIZE"} <= os.environ.keys() else 0


def is_first() -> bool:
    """Whether this process is the one of its launcher that speaks; known without a process group."""
    return os.environ.get("RANK", "0") == "0" or not launched()
