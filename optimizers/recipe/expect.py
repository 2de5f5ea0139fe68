"""Expectations of a recipe: how much of a model must reach a stage or a route, as short texts."""

from __future__ import annotations

import difflib
import operator
import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any, NamedTuple

from pydantic import AfterValidator, WithJsonSchema

PATTERN = r"^(>=|<=|==|>|<) (\d+(\.\d+)?)(% of)? (parameters|tensors)$"
_COMPARED: Mapping[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
    ">": operator.gt,
    "<": operator.lt,
}


class Expectation(NamedTuple):
    """A bound on what reaches a stage or a route.

    relation: ">=", "<=", "==", ">" or "<".
    number: what is compared with; percent if `share`.
    share: whether it is a share of all parameters or tensors, not a number of them.
    unit: "parameters", which are counted by entries, or "tensors", which count as one each.
    """

    relation: str
    number: float
    share: bool
    unit: str

    def holds(self, found: int, total: int) -> bool:
        """Whether a number out of a total fits."""
        return _COMPARED[self.relation](100 * found / max(total, 1) if self.share else found, self.number)

    @property
    def upper(self) -> bool:
        """Whether too much may reach the stage, but never too little."""
        return self.relation in ("<=", "<")


def parse_expectation(text: str) -> Expectation:
    """The expectation that a text stands for; ValueError if it stands for none."""
    match = re.fullmatch(PATTERN, text)
    if match is None:
        raise ValueError(
            "an expectation such as '>= 90% of parameters', '> 1000000 parameters' or '== 4 tensors' is required "
            "(>=, <=, ==, > or <; parameters count by entries)"
        )
    relation, number, share, unit = match[1], float(match[2]), match[4] is not None, match[5]
    if share and number > 100:
        raise ValueError("a share of at most 100% is required")
    if not share and not number.is_integer():
        raise ValueError("a whole number is required, or a share: 'N% of ...'")
    return Expectation(relation, number, share, unit)


def _validated(text: str) -> str:
    parse_expectation(text)
    return text


ExpectationText = Annotated[str, AfterValidator(_validated), WithJsonSchema({"type": "string", "pattern": PATTERN})]
"""A text that `parse_expectation` takes."""


def expected_updates(key: str, updates: Mapping[str, Any]) -> frozenset[str]:
    """The paths of the updates that a key of `expect` means; updates: of a recipe, by path.

    A key is the path, name or kind of a stage, the path or name of a route, or `update` for what no route takes.
    Raises ValueError for a key that means nothing, or both a stage and a route.
    """
    routes = {
        name: where for where in updates for name in ((where, where.rpartition(".")[2]) if where else ("update",))
    }
    stages: dict[str, set[str]] = {}
    for where, rule in updates.items():
        for path, stage in rule.stages(where):
            for name in {path, stage.label, str(stage.kind)}:
                stages.setdefault(name, set()).add(where)
    if key in routes and key in stages:
        raise ValueError(
            f"expect: a stage or a route is required, got '{key}', which is both; give the path of one of them"
        )
    if key in routes:
        return frozenset({routes[key]})
    if key not in stages:
        near = difflib.get_close_matches(key, [*routes, *stages], n=1)
        hint = f", did you mean '{near[0]}'?" if near else ""
        raise ValueError(f"expect: the path, name or kind of a stage, or a route is required, got '{key}'{hint}")
    return frozenset(stages[key])
