"""Checks of work on a simulated accelerator: the host must not wait, and no kernel must be launched for one block."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import torch

from .accelerator import DeviceCounts, missing_names
from .device_costs import DECOMPOSITIONS, LOOPED
from .laws import in_parentheses, require

WARM_UP_STEPS = 2
"""Number of first steps in which a component may copy tables to the device for later steps."""


def require_no_waits(counts: DeviceCounts, when: str, remedy: str = "") -> None:
    """Raise a LawError that names the lines at which the host waited for the device or copied numbers to it.

    torch itself waits for the results of decompositions. The error does not name these waits.

    when: text that names the step or the call that was watched, such as "step 3".
    remedy: advice at the end of the error.
    """
    lines = [Path(x).name for x in counts.by_line("waits", "uploads")]  # file names, as in other laws
    found = [f"{x}{_SOURCES.get(x.split()[-1], '')}" for x in lines if x.split()[-1] not in DECOMPOSITIONS]
    expected = "no operation for which the CPU waits for the device or copies numbers to it"
    require(not found, when, expected, ", ".join(found), in_parentheses(remedy))


def require_no_more_kernels(few: DeviceCounts, many: DeviceCounts, when: str, remedy: str) -> None:
    """Raise a LawError that names the lines which launch more kernels for a larger stack.

    Decompositions are left out, because CUDA computes them for one matrix after another.

    few, many: counts of the same step for a small and a large stack.
    when: text that names the step and the stacks.
    remedy: advice at the end of the error.
    """
    before, after = _kernels_by_line(few), _kernels_by_line(many)
    grown = ", ".join(f"{Path(file).name}:{line} {name}" for file, line, name in after - before)
    found = f"{after.total()}, with more of {grown}"
    require(after.total() <= before.total(), when, f"{before.total()} kernels", found, in_parentheses(remedy))


def _kernels_by_line(counts: DeviceCounts) -> Counter[tuple[str, int, str]]:
    return Counter({line: own.kernels for line, own in counts.lines.items() if line[-1] not in LOOPED})


_SOURCES = {"_local_scalar_dense": " (item(), float() or `if`)", "_to_copy": " (a copy between CPU and device)"}
"""Calls of Python from which operations of torch come whose names do not say it."""


def without_accelerator(case: object) -> str | None:
    """Return the reason why no accelerator can be simulated; None if it can.

    case: the component under test, which every function `Law.skip` receives. It is not used.
    """
    if (default := torch.get_default_device()).type != "cpu":
        return f"an accelerator is simulated on the CPU, and the default device is {default}"
    missing = missing_names()
    return f"torch {torch.__version__} has no {missing[0]}" if missing else None
