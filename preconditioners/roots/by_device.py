"""The choice between solvers with the same result in exact arithmetic, for an accelerator, by a table of times.

CUDA decomposes matrices above order 32 one after another (`eigh`, QR), but multiplies and factorizes (Cholesky) a full
stack at once. On an accelerator a solver with `by_device: true` is therefore replaced by the fastest of the solvers
whose `equal_to` accepts it, itself included. On a CPU it is never replaced, so that the bits of a recipe there do not
depend on a table of times. The choice is made on the host and reads no values of tensors.

`timings.json` holds the times, in the format of the reports of `make gpu`, with the source of each number. The choice
depends on the device type, the order of the matrices and their dtype. It does not depend on the number of matrices in a
stack: that number differs between ranks and between the slices of a spread refresh, and the same block would then have
other bits on one rank than on two. The time of a row is divided by its batch. If several rows have the same order, the
row with the largest batch is used.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch
from pydantic import Field
from torch import Tensor

from eigengraft.schedules import Schedulable

from .base import BasisSolver, RootSolver

_Solver = TypeVar("_Solver", RootSolver, BasisSolver)


class ByDevice(Schedulable):
    """A solver that an equal one may replace for matrices on an accelerator."""

    by_device: bool = Field(
        default=False,
        description="on an accelerator, use the fastest solver by `timings.json`, of those with the same result in "
        "exact arithmetic",
    )

    def choice(self, device: str, order: int, dtype: torch.dtype) -> str:
        """Return one line with the solver chosen for matrices `[N, order, order]` on an accelerator, the solvers that
        it was compared with, and the times of all.
        """
        return choose_solver(self, device, order, dtype).why


@dataclass(frozen=True)
class Timing:
    """A measured time of an operation on a stack of symmetric matrices.

    device: type of the device, as torch names it.
    card: model of the device.
    date: day of the measurement or publication, as year-month-day.
    operation: kind of a solver. One call of it is timed.
    order, batch: size and number of the matrices.
    dtype: name of their dtype.
    milliseconds: time of one call for the whole batch.
    source: "measured", "read, not measured" or "estimated", followed by a colon and the origin of the number.
    """

    device: str
    card: str
    date: str
    operation: str
    order: int
    batch: int
    dtype: str
    milliseconds: float
    source: str = "measured: make gpu"


@cache
def timings() -> tuple[Timing, ...]:
    """Return all rows of `timings.json`."""
    rows = json.loads(Path(__file__).with_name("timings.json").read_text(encoding="utf-8"))
    return tuple(Timing(**row) for row in rows)


class Estimate(NamedTuple):
    """The time of one matrix.

    milliseconds: time of one matrix of a large stack.
    timing: row of the table that it is computed from.
    """

    milliseconds: float
    timing: Timing


def estimate(device: str, operation: str, order: int, dtype: torch.dtype) -> Estimate | None:
    """Return the time of one matrix of a large stack, from the row with the smallest order >= `order`.

    Above the largest order of the table, times are extrapolated with the third power of the order. If there are
    measured rows, all other rows are ignored. A device type without rows is treated as CUDA. Return None if the table
    has no row for the operation.
    """
    if device not in {row.device for row in timings()}:
        device = "cuda"
    rows = [row for row in timings() if (row.device, row.operation) == (device, operation)]
    if not rows:
        return None
    rows = [row for row in rows if row.source.startswith("measured")] or rows
    reference = min((row.order for row in rows if row.order >= order), default=max(row.order for row in rows))
    name = str(dtype).removeprefix("torch.")
    row = min((row for row in rows if row.order == reference), key=lambda row: (row.dtype != name, -row.batch))
    return Estimate(row.milliseconds / row.batch * max(1.0, order / row.order) ** 3, row)


class Choice(NamedTuple):
    """The chosen solver.

    solver: a RootSolver or BasisSolver.
    why: text with its name, the names of the solvers that it was compared with, and the times of all.
    """

    solver: RootSolver | BasisSolver
    why: str


@lru_cache(maxsize=1024)
def choose_solver(solver: RootSolver | BasisSolver, device: str, order: int, dtype: torch.dtype) -> Choice:
    """Return the fastest of a solver and its equal solvers, for matrices `[N, order, order]` on an accelerator."""
    equal = (member.equal_to(solver, dtype) for member in solver.members.values())  # type: ignore[attr-defined]
    found = []
    for one in (solver, *(other for other in equal if other is not None)):
        kind, place = str(getattr(one, "kind")), one.runs_on(device)  # noqa: B009  every member has a kind
        known = estimate(place, kind, order, dtype)
        if known is not None:
            where = "" if place == device else " on the host"
            nearest = f" as of order {known.timing.order}" * (known.timing.order != order)
            origin = known.timing.source.split(":")[0]
            text = f"{kind}{where} ({known.milliseconds:.2g} ms a matrix{nearest}, {origin})"
            found.append((known.milliseconds, one, text))
    if not found:
        return Choice(solver, "the solver itself, no times are known")
    found.sort(key=lambda each: each[0])
    return Choice(found[0][1], ", not ".join(text for _, _, text in found))


def chosen(solver: _Solver, a: Tensor) -> _Solver:
    """Return the solver for matrices a `[N, d, d]` on an accelerator: the fastest equal one if `solver` has
    `by_device`, else `solver` itself.
    """
    if not (isinstance(solver, ByDevice) and solver.by_device):
        return solver
    return choose_solver(solver, a.device.type, a.shape[-1], a.dtype).solver


def decomposed_on_host(device: str, order: int, dtype: torch.dtype) -> bool:
    """Return True if eigendecompositions of matrices on a device are faster on the host, by the table."""
    if device == "cpu":
        return False
    here, there = (estimate(where, "eigh", order, dtype) for where in (device, "cpu"))
    return here is not None and there is not None and there.milliseconds < here.milliseconds
