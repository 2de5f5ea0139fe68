"""The processes of one training run, and the small collectives that the trainer needs."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist

from eigengraft.errors import RecipeError

from ...tasks import Batch
from ...tasks.base import generator

Answer = TypeVar("Answer")


@dataclass(frozen=True)
class Ranks:
    """One process among those of a run.

    rank, size: number of this process, and of how many.
    local_size: number of processes on this machine.
    device: the device of this process.
    distributed: whether there is a process group.
    """

    rank: int = 0
    size: int = 1
    local_size: int = 1
    device: torch.device = torch.device("cpu")
    distributed: bool = False

    @property
    def first(self) -> bool:
        """Whether this process owns the run's directory and prints."""
        return self.rank == 0

    def shard_batch(self, batch: Batch) -> tuple[Batch, float]:
        """This rank's rows of a batch of B, and the weight of their mean loss.

        Rank r of R has the rows from floor(r B / R) on, with n_r of the n targets. Its weight is R n_r / n, so that the
        mean over ranks of the weighted gradients is the gradient of the mean over the batch.
        """
        rows = len(batch.inputs)
        if rows < self.size:
            raise RecipeError(f"task.batch_size: a row for each of {self.size} ranks is required, got {rows} rows")
        own = slice(self.rank * rows // self.size, (self.rank + 1) * rows // self.size)
        targets = batch.targets[own]
        return Batch(batch.inputs[own], targets), self.size * targets.numel() / batch.targets.numel()

    def seed_step(self, seed: int, step: int) -> None:
        """Make torch's random numbers depend on seed, step and rank alone, so that no checkpoint has to hold them.

        Without a process group, nothing is changed: the checkpoint holds the random state.
        """
        if self.distributed:
            torch.manual_seed(int(generator(seed, step, self.rank).integers(2**63)))

    def mean(self, value: float) -> float:
        """The mean of a number over ranks."""
        if self.size == 1:
            return value
        total = torch.tensor(value, dtype=torch.float64, device=self.device)
        dist.all_reduce(total)
        return total.item() / self.size

    def all_gather(self, mine: Answer) -> list[Answer]:
        """One object per rank, by rank; for small objects."""
        if self.size == 1:
            return [mine]
        found: list[Answer | None] = [None] * self.size
        dist.all_gather_object(found, mine)
        return found  # type: ignore[return-value]  # all of them are filled

    def on_first(self, act: Callable[[], Answer]) -> Answer:
        """Run `act` on rank 0 and return its result on every rank; a ValueError or OSError is raised on every rank."""
        if self.size == 1:
            return act()
        answer: list[Answer | Exception | None] = [None, None]
        if self.first:
            try:
                answer[0] = act()
            except (ValueError, OSError) as error:
                answer[1] = error
        dist.broadcast_object_list(answer, src=0)
        if isinstance(answer[1], Exception):
            raise answer[1]
        return answer[0]  # type: ignore[return-value]


def launched_processes() -> int:
    """Number of processes that torchrun, or a launcher with the same environment, has started; 0 without one."""
    return int(os.environ["WORLD_SIZE"]) if {"RANK", "WORLD_SIZE"} <= os.environ.keys() else 0


def is_first_process() -> bool:
    """Whether this process prints; known without a process group."""
    return os.environ.get("RANK", "0") == "0" or not launched_processes()
