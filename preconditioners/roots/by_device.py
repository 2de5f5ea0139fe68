"""The choice, on an accelerator, of the fastest of all solvers with the same result in exact arithmetic.

CUDA decomposes matrices above order 32 one after another (`eigh`, QR), but multiplies and factorizes (Cholesky) a full
stack at once. On an accelerator a solver with `by_device: true` is therefore replaced by the fastest of all solvers
that have the same result, according to their `equal_to`. On a CPU a solver is never replaced, so that the results of a
recipe on a CPU do not depend on measured times. The choice is made on the host and reads no values of tensors.

The times are in the file `timings.json`, in the format of the reports of `make gpu`, with the source of each number.
The choice depends on the device type, the order of the matrices and their dtype. It does not depend on the number of
matrices in a stack, because this number differs between ranks and between the slices of a spread refresh: the last bits
of a block would then differ between runs on one rank and on two ranks.
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
    """A solver that may be replaced, for matrices on an accelerator, by a faster solver with the same result."""

    by_device: bool = Field(
        default=False,
        description="true: on an accelerator, use the solver that is fastest by `timings.json`, among solvers with "
        "the same result in exact arithmetic",
    )

    def choice(self, device: str, order: int, dtype: torch.dtype) -> str:
        """Return one line about the choice of a solver for matrices `[N, order, order]` on an accelerator.

        The line names the chosen solver and the solvers with which it was compared, with the times of all.
        """
        return choose_solver(self, device, order, dtype).why


@dataclass(frozen=True)
class Timing:
    """The time of an operation on a stack of symmetric matrices: measured, published or estimated.

    device: type of the device, as torch names it.
    card: model of the device.
    date: day of the measurement or publication, as year-month-day.
    operation: kind of the solver whose call was timed. With the suffix "_on_host": matrices on the device were copied
        to the host, decomposed there, and copied back.
    order: order of the matrices.
    batch: number of the matrices.
    dtype: name of the dtype of the matrices.
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
    """Return all rows of the file `timings.json`."""
    rows = json.loads(Path(__file__).with_name("timings.json").read_text(encoding="utf-8"))
    return tuple(Timing(**row) for row in rows)


class Estimate(NamedTuple):
    """The estimated time for one matrix.

    milliseconds: time for one matrix of a large stack.
    timing: row of `timings.json` from which the time is computed.
    """

    milliseconds: float
    timing: Timing


def estimate(device: str, operation: str, order: int, dtype: torch.dtype) -> Estimate | None:
    """Return the time of an operation for one matrix of a large stack, or None if `timings.json` has no time for it.

    The row with the smallest order >= `order` is used. Above the largest order in the file, times grow with the third
    power of the order. Times from publications, and estimated times, are only used if there is no measured time of the
    operation on the device. A device type without rows is treated as CUDA.

    device: type of the device.
    operation: name of the operation in the file, such as "eigh" or "eigh_on_host".
    order: order of the matrix.
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


def estimate_on_host(device: str, operation: str, order: int, dtype: torch.dtype) -> Estimate | None:
    """Return the time in which one matrix is copied from a device to the host, decomposed there, and copied back.

    If `timings.json` has no such time ("<operation>_on_host"), return the time of a CPU without the copies, or None if
    this time is unknown, too.

    device, operation, order: as in `estimate`.
    """
    return estimate(device, f"{operation}_on_host", order, dtype) or estimate("cpu", operation, order, dtype)


class Choice(NamedTuple):
    """The chosen solver, and the reason.

    solver: the solver.
    why: text with the name of the solver, the names of the solvers with which it was compared, and the times of all.
    """

    solver: RootSolver | BasisSolver
    why: str


@lru_cache(maxsize=1024)
def choose_solver(solver: RootSolver | BasisSolver, device: str, order: int, dtype: torch.dtype) -> Choice:
    """Return the fastest of `solver` and all solvers that have the same result in exact arithmetic.

    The choice is for matrices `[N, order, order]` on an accelerator, by the times in `timings.json`.

    device: type of the accelerator, such as "cuda".
    """
    equal = (member.equal_to(solver, dtype) for member in solver.members.values())  # type: ignore[attr-defined]
    found = []
    for one in (solver, *(other for other in equal if other is not None)):
        kind, place = str(getattr(one, "kind")), one.runs_on(device)  # noqa: B009  every member has a kind
        known = (
            estimate(device, kind, order, dtype) if place == device else estimate_on_host(device, kind, order, dtype)
        )
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
    """Return the solver to use for matrices a `[N, d, d]` on an accelerator.

    If `solver` has `by_device: true`, this is the fastest solver with the same result, else `solver` itself.
    """
    if not (isinstance(solver, ByDevice) and solver.by_device):
        return solver
    return choose_solver(solver, a.device.type, a.shape[-1], a.dtype).solver


def decomposed_on_host(device: str, order: int, dtype: torch.dtype) -> bool:
    """Return True if matrices on a device are decomposed faster on the host, by the times in `timings.json`.

    device: type of the device. For "cpu" the result is False.
    order: order of the matrices.
    """
    if device == "cpu":
        return False
    here, there = estimate(device, "eigh", order, dtype), estimate_on_host(device, "eigh", order, dtype)
    return here is not None and there is not None and there.milliseconds < here.milliseconds
