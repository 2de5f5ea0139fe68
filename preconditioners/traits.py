"""What the engine must know of a stage beside what its hooks do."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from eigengraft.chains import Request


@dataclass(frozen=True)
class Traits:
    """The facts about a stage on a block of one shape; every default is safe. The engine asks once and keeps them.

    Of the first six the engine also asks with the empty block `()`: they may not depend on the shape.

    signals: what the stage asks for beside the gradient.
    lagged: whether the present gradient is used before it is learned. A step then applies, observes, refreshes, and the
        first gradient of a parameter only primes the chain: statistics are made of it and nothing moves.
    entrywise: whether each entry of direction and state depends on that entry of the gradients alone, so that any part
        of a block may be updated wherever it is.
    matrices: whether blocks are read as matrices, first axis x the rest.
    sums: whether `apply` takes `context.parameter_sum`: all blocks of a parameter then have one owner, and step
        together.
    learns: whether `observe` and `refresh` see the gradient or the direction that comes in.
    refresh_cost: cost of one refresh of the block, in any unit common to all stages; refreshes are spread by it.
    work: floating-point operations of one step without refreshes; None: they are counted from the slots.
    left_out: what the stage leaves alone of the block, and why, as `show` prints it.
    spectral_norm: the largest spectral norm that a direction of the stage may have; None: it has no bound of its own.
    spectral_gain: the largest factor from the spectral norm of the direction that comes in to that which goes out;
        None: no such factor is known.
    """

    signals: tuple[Request, ...] = ()
    lagged: bool = False
    entrywise: bool = False
    matrices: bool = False
    sums: bool = False
    learns: Literal["gradient", "direction"] = "gradient"
    refresh_cost: float = 0.0
    work: float | None = None
    left_out: tuple[str, ...] = ()
    spectral_norm: float | None = None
    spectral_gain: float | None = None


def matrix_shape(block: tuple[int, ...]) -> tuple[int, int]:
    """(m, n) of a block seen as a matrix, first axis x the rest; a vector is one column."""
    return (block[0] if block else 1), math.prod(block[1:])
