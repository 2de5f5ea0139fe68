"""Named checks of published and measured claims: each can fail, and says what it measured and what it expected."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from eigengraft.component import RecipeError


@dataclass(frozen=True)
class Measured:
    """One number and the closed interval it should lie in."""

    name: str
    value: float
    low: float = -math.inf
    high: float = math.inf

    @property
    def passed(self) -> bool:
        """Whether it does; NaN does not."""
        return self.low <= self.value <= self.high

    @property
    def expected(self) -> str:
        """The interval in words."""
        if math.isinf(self.low):
            return f"at most {self.high:.4g}"
        if math.isinf(self.high):
            return f"at least {self.low:.4g}"
        return f"{self.low:.4g} to {self.high:.4g}"


@dataclass(frozen=True)
class Finding:
    """What a check found."""

    name: str
    claim: str
    source: str
    results: tuple[Measured, ...]

    @property
    def measured(self) -> dict[str, float]:
        """Every number by its name."""
        return {result.name: result.value for result in self.results}

    @property
    def expected(self) -> dict[str, str]:
        """What every number should be."""
        return {result.name: result.expected for result in self.results}

    @property
    def passed(self) -> bool:
        """Whether all numbers are as expected."""
        return all(result.passed for result in self.results)


Check = Callable[[bool], Iterable[Measured]]
"""quick -> numbers. The docstring's first paragraph is the claim, the last line, `Source: ...`, where it is from."""


@dataclass(frozen=True)
class Fact:
    """A check with its claim; `about` is the kind of the bench that it belongs to."""

    name: str
    about: str
    check: Check

    def find(self, quick: bool = True) -> Finding:
        """Run the check."""
        text = " ".join((self.check.__doc__ or "").split())
        claim, _, source = text.partition("Source: ")
        return Finding(self.name, claim.strip(), source.strip(), tuple(self.check(quick)))


_FACTS: dict[str, Fact] = {}


def fact(about: str) -> Callable[[Check], Check]:
    """Registers a check under the name of its function."""

    def register(check: Check) -> Check:
        name = str(getattr(check, "__name__"))  # noqa: B009  a Callable need not have one, a function does
        _FACTS[name] = Fact(name, about, check)
        return check

    return register


def known_facts(about: str | None = None) -> dict[str, Fact]:
    """All facts by name, or those that belong to one bench."""
    for module in ("polar", "roots", "statistics"):  # they register what they hold
        importlib.import_module(f".{module}", __package__)

    return {name: found for name, found in _FACTS.items() if about in (None, found.about)}


def find_facts(about: str | None = None, quick: bool = True, names: Iterable[str] = ()) -> Iterator[Finding]:
    """Run the checks one by one: all, those of one bench, or those named."""
    known = known_facts(about)
    unknown = sorted(set(names) - set(known))
    if unknown:
        raise RecipeError(f"facts: one of {', '.join(known)} is required, got '{unknown[0]}'")
    for name, found in known.items():
        if not names or name in names:
            yield found.find(quick)
