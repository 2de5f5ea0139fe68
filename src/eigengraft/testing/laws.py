"""Laws, the error about a broken law, and the report on a component that breaks no law."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from traceback import extract_tb
from typing import Generic, Protocol, TypeVar

from torch import Tensor

from eigengraft.component import Component, families, validated
from eigengraft.errors import ContractError


class LawError(AssertionError):
    """Error about a component that breaks a law. The message has the component, the problem and the name of the law."""


class Case(Protocol):
    """A component under test, and the properties that are declared for it.

    who: name of the component in error messages.
    """

    @property
    def who(self) -> str: ...

    @property
    def component(self) -> Component: ...


AnyCase = TypeVar("AnyCase", bound=Case)


@dataclass(frozen=True)
class Law(Generic[AnyCase]):
    """A statement about every component of a family.

    check: function that raises a LawError if the case breaks the law. Any exception of the component breaks it, too.
    skip: function that returns the reason why the law does not apply to a case, or None if it applies.
    """

    check: Callable[[AnyCase], None]
    skip: Callable[[AnyCase], str | None] = lambda case: None

    @property
    def name(self) -> str:
        return self.check.__name__.replace("_", " ")

    def __str__(self) -> str:
        return self.name

    def require(self, case: AnyCase) -> None:
        """Raise a LawError that names the case and this law if the law is broken."""
        try:
            self.check(case)
        except LawError as error:
            raise LawError(f"{case.who}: {error}  [law: {self.name}]") from None
        except ContractError as error:
            raise LawError(f"{error}  [law: {self.name}]") from error
        except Exception as error:
            frame = extract_tb(error.__traceback__)[-1]
            where = f"{Path(frame.filename).name}:{frame.lineno} in {frame.name}"
            notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
            raise LawError(
                f"{case.who}: no exception is required, got {type(error).__name__}: {error}{notes}, "
                f"raised at {where}  [law: {self.name}]"
            ) from error


@dataclass(frozen=True)
class LawReport:
    """The result of checking a component that breaks no law.

    who: name of the component.
    held: names of the laws that the component satisfies.
    skipped: laws that do not apply to the component, with the reason.
    """

    who: str
    held: tuple[str, ...]
    skipped: Mapping[str, str]

    def __str__(self) -> str:
        lines = [f"{self.who}: {len(self.held)} laws hold", *(f"  {law}" for law in self.held)]
        return "\n".join([*lines, *(f"  not checked: {law} ({reason})" for law, reason in self.skipped.items())])


def check(case: AnyCase, first: Iterable[Law[AnyCase]], laws: Iterable[Law[AnyCase]]) -> LawReport:
    """Check laws on a case and return a report.

    first: laws that are checked first. If one is broken, no further law is checked, because other laws depend on it.
    laws: all other laws. One LawError names all broken laws among them.
    """
    held, skipped, broken = [], {}, []
    for law in first:
        law.require(case)
        held.append(law.name)
    for law in laws:
        reason = law.skip(case)
        if reason is not None:
            skipped[law.name] = reason
            continue
        try:
            law.require(case)
            held.append(law.name)
        except LawError as error:
            broken.append(error)
    if len(broken) == 1:
        raise broken[0]
    if broken:
        raise LawError("\n".join([f"{case.who}: {len(broken)} laws are broken", *map(str, broken)]))
    return LawReport(case.who, tuple(held), skipped)


def require(fine: object, problem: str) -> None:
    """Raise a LawError with the problem unless `fine` is true."""
    if not fine:
        raise LawError(problem)


def require_close(ours: Tensor, theirs: Tensor, tolerance: float, what: str) -> None:
    """Raise a LawError unless two tensors agree.

    tolerance: largest difference, relative to the largest entry of `theirs`.
    what: beginning of the error message.
    """
    largest = max(float(theirs.abs().max()), 1e-300)
    error = float((ours - theirs).abs().max()) / largest
    require(error <= tolerance, f"{what} within {tolerance:g} of the largest entry is required, got {error:.2g}")


def the_declaration_survives(case: Case) -> None:
    """A component that is written as plain data and read again is the same, and its fields cannot be changed."""
    component = case.component
    family = families()[str(component.family_name)]
    again = validated(family, component.model_dump(mode="json"))
    require(again == component, f"the declaration gives another component, {again!r}")
    require(
        component.replace() == component, f"an equal copy from `replace()` is required, got {component.replace()!r}"
    )
    try:
        setattr(component, "kind", "other")  # noqa: B010  a frozen field, which type checkers know
    except ValueError:
        return
    raise LawError("frozen fields are required, got a component whose `kind` can be set")
