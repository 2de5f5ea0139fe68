"""A stage with what it declares about its mathematics, for the laws of stages."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from eigengraft.component import Component
from eigengraft.errors import ContractError
from eigengraft.preconditioners import Stage

from .laws import LawError
from .samples import TRAJECTORY_STEPS, gradients
from .stage_bench import StageBench

BLOCKS = ((6, 5), (7,), (3, 2, 4), (1, 1))
"""Shapes of blocks to try: matrices, vectors, tensors and single numbers."""
Degree = float | Callable[[int], float]


@dataclass(frozen=True)
class StageCase:
    """stage: to be checked.

    blocks: the shapes to try.
    degree: d if scaling all gradients by c scales the direction by c^d, a number or a function of the number of axes of
    the block; None: no such law.
    rotates: whether U G V^T gives U D V^T.
    singular: whether bases or roots are taken of singular statistics; in their null space numbers are rounding, so that
    laws that compare two computations do not apply.
    steps: length of a trajectory.
    """

    stage: Stage
    blocks: tuple[tuple[int, ...], ...] = BLOCKS
    degree: Degree | None = None
    rotates: bool = False
    singular: bool = False
    steps: int = TRAJECTORY_STEPS

    @property
    def component(self) -> Component:
        return self.stage

    @property
    def who(self) -> str:
        return f"update.{self.stage.label}"

    def bench(self, block: tuple[int, ...], blocks: int = 3, dtype: torch.dtype = torch.float64) -> StageBench:
        """Fresh state for so many blocks."""
        return StageBench(self.stage, block, blocks, dtype)

    def gradients(self, block: tuple[int, ...], blocks: int = 3, dtype: torch.dtype = torch.float64) -> Tensor:
        """Standard normal gradients `[steps, blocks, *block]`."""
        return gradients(block, blocks, dtype)[: self.steps]

    @cached_property
    def _trajectories(self) -> dict[tuple[tuple[int, ...], torch.dtype], tuple[Tensor, StageBench, StageBench]]:
        return {}

    def trajectory(self, block: tuple[int, ...], dtype: torch.dtype = torch.float64) -> tuple[Tensor, StageBench]:
        """The directions of three blocks from fresh state for `gradients`, and the bench after them: what laws
        compare with. Made once for each shape and dtype; laws do not step the bench."""
        out, _, bench = self._trajectory(block, dtype)
        return out, bench

    def halfway(self, block: tuple[int, ...]) -> StageBench:
        """A copy of the bench of the trajectory after half of its steps."""
        return self._trajectory(block, torch.float64)[1].copy()

    def _trajectory(self, block: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, StageBench, StageBench]:
        """(directions, copy of the bench after half of the steps, bench after them)."""
        if (block, dtype) not in self._trajectories:
            bench, given = self.bench(block, dtype=dtype), self.gradients(block, dtype=dtype)
            first = bench.run(given[: self.steps // 2])
            half = bench.copy()
            out = torch.cat([first, bench.run(given[self.steps // 2 :])])
            self._trajectories[block, dtype] = out, half, bench
        return self._trajectories[block, dtype]

    def degree_on(self, block: tuple[int, ...]) -> float:
        """The degree for blocks of that shape."""
        assert self.degree is not None
        return self.degree(len(block)) if callable(self.degree) else self.degree


@contextmanager
def on(block: tuple[int, ...], what: str = "") -> Iterator[None]:
    """Says in a LawError which shape of block, and what else, it was raised for."""
    where = f"on blocks of shape {block}" + (f", {what}" if what else "")
    try:
        yield
    except (LawError, ContractError) as error:
        raise type(error)(f"{error} ({where})") from error.__cause__
    except Exception as error:
        error.add_note(where)
        raise
