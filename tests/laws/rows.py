"""What a component declares to be held to the laws: one row, or several where it has modes."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Make = Mapping[str, Any]


@dataclass(frozen=True)
class Fault:
    """A declaration that must be refused at construction, and what the error must say (a regular expression)."""

    fields: Make
    message: str


@dataclass(frozen=True)
class Row:
    """make: the component. note: tells the rows of one kind apart. faults: error inputs, once for each kind.

    degree: d if scaling all gradients by c scales the result by c^d, a number or a function of the number of axes of
    the block; None: no such law. rotates: whether U G V^T gives U D V^T. blocks: the shapes to try.
    singular: whether bases or roots are taken of singular statistics; in their null space numbers are rounding, so that
    laws that compare two computations do not apply.
    """

    make: Make
    note: str = ""
    degree: float | Callable[[int], float] | None = None
    rotates: bool = False
    blocks: tuple[tuple[int, ...], ...] = ((6, 5), (7,), (3, 2, 4), (1, 1))
    faults: tuple[Fault, ...] = ()
    singular: bool = False

    @property
    def kind(self) -> str:
        return str(self.make["kind"])

    def __str__(self) -> str:
        return f"{self.kind} {self.note}".strip()
