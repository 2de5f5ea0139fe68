"""Published and measured claims by name: each has a check that can fail, with measured and expected numbers."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from eigengraft.errors import RecipeError


@dataclass(frozen=True)
class Measured:
    """One number and the closed interval that it is claimed to lie in."""

    name: str
    value: float
    low: float = -math.inf
    high: float = math.inf

    @property
    def passed(self) -> bool:
        """Whether the number lies in the interval; NaN does not."""
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
    """The result of checking a claim.

    statement: the claim in words.
    source: who made the claim, where.
    """

    name: str
    statement: str
    source: str
    results: tuple[Measured, ...]

    @property
    def measured(self) -> dict[str, float]:
        """Every number by its name."""
        return {result.name: result.value for result in self.results}

    @property
    def expected(self) -> dict[str, str]:
        """The interval of every number, in words, by its name."""
        return {result.name: result.expected for result in self.results}

    @property
    def passed(self) -> bool:
        """Whether all numbers are as expected."""
        return all(result.passed for result in self.results)


Check = Callable[[bool], Iterable[Measured]]
"""quick -> numbers. The docstring states the claim and ends with `Source: ...`."""


@dataclass(frozen=True)
class Claim:
    """A published or measured claim with its check; `bench` is the kind of the bench that it belongs to."""

    name: str
    bench: str
    check: Check

    def verify(self, quick: bool = True) -> Finding:
        """Run the check; `quick` takes smaller problems."""
        text = " ".join((self.check.__doc__ or "").split())
        statement, _, source = text.partition("Source: ")
        return Finding(self.name, statement.strip(), source.strip(), tuple(self.check(quick)))


_CLAIMS: dict[str, Claim] = {}


def claim(bench: str) -> Callable[[Check], Check]:
    """Register a check of this bench under the name of its function."""

    def register(check: Check) -> Check:
        name = str(getattr(check, "__name__"))  # noqa: B009  a Callable need not have one, a function does
        _CLAIMS[name] = Claim(name, bench, check)
        return check

    return register


def known_claims(bench: str | None = None) -> dict[str, Claim]:
    """All claims by name, or those that belong to one bench."""
    for module in ("polar", "roots", "statistics"):  # importing a module registers its claims
        importlib.import_module(f".{module}", __package__)
    return {name: found for name, found in _CLAIMS.items() if bench in (None, found.bench)}


def find_claims(bench: str | None = None, quick: bool = True, names: Iterable[str] = ()) -> Iterator[Finding]:
    """Verify claims one by one: all, those of one bench, or those named."""
    known = known_claims(bench)
    unknown = sorted(set(names) - set(known))
    if unknown:
        raise RecipeError(f"claims: one of {', '.join(known)} is required, got '{unknown[0]}'")
    for name, found in known.items():
        if not names or name in names:
            yield found.verify(quick)
