"""Laws (tests that every component of a family must pass), the error about a broken law, and the report of a check."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from traceback import extract_tb
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from eigengraft.component import Component, families, validated
from eigengraft.errors import ContractError

from .causes import RandomStates, files_of, global_draw


class LawError(AssertionError):
    """Error about a component that breaks a law. The message has the component, the problem and the name of the law.

    law: name of the broken law. "": it is the law that is being checked.
    """

    def __init__(self, message: str, law: str = "") -> None:
        super().__init__(message)
        self.law = law


class GlobalDrawError(LawError):
    """Error about a component that draws from a global generator of random numbers."""


_C = TypeVar("_C", bound=Component)


@dataclass(frozen=True)
class Case(Generic[_C]):
    """A component under test. Subclasses add properties that are declared for the component."""

    component: _C

    @property
    def who(self) -> str:
        """Name of the component in error messages."""
        return f"{self.component.family_name}.{getattr(self.component, 'kind', '?')}"


AnyCase = TypeVar("AnyCase", bound=Case[Any])


@dataclass(frozen=True)
class Law(Generic[AnyCase]):
    """A test that every component of a family must pass.

    check: function that raises a LawError if the component breaks the law. Any exception of the component counts as a
        break, too.
    skip: function that returns the reason why the law does not apply to a component, or None if it applies.
    decisive: True if a component that breaks this law breaks other laws for the same reason. A decisive law is checked
        first. If it is broken, no further law is checked.
    """

    check: Callable[[AnyCase], None]
    skip: Callable[[AnyCase], str | None] = lambda case: None
    decisive: bool = False

    @property
    def name(self) -> str:
        return self.check.__name__.replace("_", " ")

    def __str__(self) -> str:
        return self.name

    def require(self, case: AnyCase) -> None:
        """Raise a LawError that names the component and this law if the component breaks the law.

        If the component draws random numbers from a global generator, raise a GlobalDrawError instead, because the draw
        may be the cause.
        """
        states = RandomStates.now()
        broken = self._broken(case)
        generator = states.drawn_from()
        if generator is not None:
            text = global_draw(case.component, generator, lambda: self.check(case))
            raise GlobalDrawError(f"{case.who}: {text}  [broken law: global generators are left alone]")
        if broken is not None:
            raise broken

    def _broken(self, case: AnyCase) -> LawError | None:
        """Return the error about a broken law; None if the law is kept."""
        try:
            self.check(case)
        except LawError as error:
            return LawError(f"{case.who}: {error}  [broken law: {error.law or self.name}]")
        except Exception as error:
            problem = str(error)
            if not isinstance(error, ContractError):
                frames = extract_tb(error.__traceback__)
                own = files_of(case.component)
                frame = next((frame for frame in reversed(frames) if frame.filename in own), frames[-1])
                where = f"{Path(frame.filename).name}:{frame.lineno} in {frame.name}"
                known = f"raised in the stage {case.who}, "  # the message already names the stage and the line
                found_notes = (note for note in getattr(error, "__notes__", ()) if not note.startswith(known))
                notes = "".join(f"; {note}" for note in found_notes)
                got = f"{type(error).__name__}: {error}, raised at {where}{notes}"
                problem = f"{case.who}: expected no exception in its methods, got {got}"
            found = LawError(f"{problem}  [broken law: {self.name}]")
            found.__cause__ = error
            return found
        return None


@dataclass(frozen=True)
class LawReport:
    """The result of checking a component that breaks no law.

    who: name of the component.
    held: names of the laws that the component satisfies.
    skipped: laws that do not apply to the component, with the reason.
    notes: sentences about what no law judges, such as the bytes of a quantizer and possible faults of a task.
    """

    who: str
    held: tuple[str, ...]
    skipped: Mapping[str, str]
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [f"{self.who}: {len(self.held)} laws hold", *(f"  {law}" for law in self.held)]
        lines += [f"  not checked: {law} ({reason})" for law, reason in self.skipped.items()]
        return "\n".join([*lines, *(f"  note: {note}" for note in self.notes)])


def check(case: AnyCase, laws: Iterable[Law[AnyCase]]) -> LawReport:
    """Check laws on a case and return a report.

    Raises one LawError, which names all broken laws. In two cases the check ends early, and the error names only one
    law: if this law is decisive, because others would fail for the same reason, or if the component draws random
    numbers from a global generator.
    """
    held, skipped, broken = [], {}, []
    for law in sorted(laws, key=lambda law: not law.decisive):
        reason = law.skip(case)
        if reason is not None:
            skipped[law.name] = reason
            continue
        try:
            law.require(case)
            held.append(law.name)
        except LawError as error:
            if law.decisive or isinstance(error, GlobalDrawError):
                raise
            broken.append(error)
    if len(broken) == 1:
        raise broken[0]
    if broken:
        problems: dict[str, list[str]] = {}
        for text in map(str, broken):  # an exception of the component often breaks several laws
            problem, _, name = text.partition("  [broken law: ")
            problems.setdefault(problem, []).append(name.removesuffix("]"))
        lines = (f"{p}  [broken law{'s' * (len(own) > 1)}: {', '.join(own)}]" for p, own in problems.items())
        raise LawError("\n".join([f"{case.who}: {len(broken)} laws are broken", *lines]))
    return LawReport(case.who, tuple(held), skipped)


def broken(what: str, expected: str, got: object, cause: str = "") -> LawError:
    """Return the error about a broken law, in the form that all laws use.

    what: the value that was checked, with the step or the block if there are several.
    expected: the value that the law requires.
    got: the value that was found.
    cause: end of the message with a likely cause or remedy, from `in_parentheses` or a function of `causes`; "": none
        is known.
    """
    return LawError(f"{what}: expected {expected}, got {got}{cause}")


def require(fine: object, what: str, expected: str, got: object, cause: str = "") -> None:
    """Raise a LawError unless `fine` is true. The other arguments are those of `broken`, which makes the error."""
    if not fine:
        raise broken(what, expected, got, cause)


def in_parentheses(text: str) -> str:
    """Return a cause or a remedy as the end of an error; "" for an empty text."""
    return f" ({text})" if text else ""


def require_close(
    ours: Tensor,
    theirs: Tensor,
    tolerance: float,
    what: str,
    cause: Callable[[], str] = lambda: "",
    by_step: bool = False,
) -> None:
    """Raise a LawError unless two tensors agree.

    tolerance: largest difference, relative to the largest entry of `theirs`.
    what: names of the two tensors, as in "A and B".
    cause: function that returns the end of the error, as in `broken`. Called only if the tensors differ.
    by_step: True if the first axis of the tensors counts steps. The error then names the first step at which they
        differ.
    """
    largest = max(float(theirs.abs().max()), 1e-300, torch.finfo(theirs.dtype).tiny)
    errors = (ours - theirs).abs() / largest
    error = float(errors.max())
    if error <= tolerance:
        return
    got = f"{error:.2g}" if math.isfinite(error) else "nan or inf"
    if by_step:
        first = next(step for step, own in enumerate(errors, start=1) if not float(own.max()) <= tolerance)
        got = f"{got}, first at step {first} of {len(errors)}"
    raise broken(what, f"a relative difference of at most {tolerance:g}", got, cause())


def the_declaration_survives(case: Case[Any]) -> None:
    """A component that is written as plain data and read again is the same, and its fields cannot be changed."""
    component = case.component
    family = families()[str(component.family_name)]
    again = validated(family, component.model_dump(mode="json"))
    require(again == component, "the declaration, read again", f"{component!r}", f"{again!r}")
    copy = component.replace()
    require(copy == component, "replace() without changes", f"{component!r}", f"{copy!r}")
    try:
        setattr(component, "kind", "other")  # noqa: B010  a frozen field, which type checkers know
    except ValueError:
        return
    raise broken("setting `kind`", "an error, because fields are frozen", "no error")
