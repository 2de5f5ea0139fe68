"""Rows of the bench of steps."""

from __future__ import annotations

from dataclasses import dataclass

from ...common.results import BenchRow


@dataclass(frozen=True)
class StepRow(BenchRow):
    """One candidate on one set of parameters.

    maths: what is computed; candidates of the same maths are compared.
    interval: steps between refreshes.
    numbers: entries of all parameters.
    steady: milliseconds of a step without refreshes, the lower quartile over the steps of an interval.
    refresh: milliseconds that refreshes add in one interval.
    amortised: milliseconds of a step, refreshes included, from medians over intervals.
    median, largest: of the same steps.
    state: bytes of state for each entry of parameters.
    peak: most bytes that a step allocates beyond the state, for each entry; None: not measured.
    host: milliseconds until `step` returns, the median; on a device the rest of the step runs after that.
    operators: operators that a step without refresh calls, views left out, a foreach once; None: not counted.
    kernels: kernels that a CUDA device runs in a step without refresh; None on a CPU.
    build: seconds that construction took.
    floor: least milliseconds of a step by its arithmetic and traffic; None: unknown.
    problem: why nothing was measured, or "".
    steps_ms: milliseconds of every step that was measured.
    """

    set: str
    maths: str
    interval: int
    dtype: str
    threads: int
    numbers: int
    steady: float = 0.0
    refresh: float = 0.0
    amortised: float = 0.0
    median: float = 0.0
    largest: float = 0.0
    state: float = 0.0
    peak: float | None = None
    host: float = 0.0
    operators: int | None = None
    kernels: int | None = None
    build: float = 0.0
    floor: float | None = None
    problem: str = ""
    steps_ms: tuple[float, ...] = ()

    @property
    def times_floor(self) -> float | None:
        """How often the floor fits into an amortised step."""
        return None if not self.floor or self.problem else self.amortised / self.floor
