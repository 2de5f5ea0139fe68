"""The field `expect` of a recipe: bounds on how much of a model a stage or a route receives, written as texts."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any, NamedTuple

from pydantic import AfterValidator, WithJsonSchema

from eigengraft.errors import did_you_mean

PATTERN = r"^(>=|<=|==|>|<) (\d+(\.\d+)?)(% of)? (parameters|tensors)$"
_COMPARED: Mapping[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
    ">": operator.gt,
    "<": operator.lt,
}


class Expectation(NamedTuple):
    """A bound on how much of a model a stage or a route receives.

    relation: ">=", "<=", "==", ">" or "<".
    number: the bound, in percent if `share`.
    share: True if the bound is a share of the model, False if it is an absolute number.
    unit: "parameters" to count entries of tensors, or "tensors" to count tensors.
    """

    relation: str
    number: float
    share: bool
    unit: str

    def holds(self, found: int, total: int) -> bool:
        """Return True if `found` of `total` entries or tensors satisfy the bound."""
        return _COMPARED[self.relation](100 * found / max(total, 1) if self.share else found, self.number)

    @property
    def upper(self) -> bool:
        """Return True if this is an upper bound."""
        return self.relation in ("<=", "<")


def parse_expectation(text: str) -> Expectation:
    """Parse an expectation such as ">= 90% of parameters". Raise ValueError if the text has another form."""
    match = re.fullmatch(PATTERN, text)
    if match is None:
        raise ValueError(
            "an expectation looks like '>= 90% of parameters', '> 1000000 parameters' or '== 4 tensors' "
            "(relations are >=, <=, ==, > and <; parameters are counted by entries)"
        )
    relation, number, share, unit = match[1], float(match[2]), match[4] is not None, match[5]
    if share and number > 100:
        raise ValueError("a share cannot be larger than 100%")
    if not share and not number.is_integer():
        raise ValueError("the number must be whole, or a share: 'N% of ...'")
    return Expectation(relation, number, share, unit)


def _validated(text: str) -> str:
    parse_expectation(text)
    return text


ExpectationText = Annotated[str, AfterValidator(_validated), WithJsonSchema({"type": "string", "pattern": PATTERN})]
"""A text that `parse_expectation` accepts."""


def expected_rules(key: str, rules: Mapping[str, Any]) -> frozenset[str]:
    """Return the paths of the update rules that a key of `expect` refers to.

    key: path, name or kind of a stage; path or name of a route; or `update` for the recipe's own update.
    rules: update rules of a recipe by path.

    Raises:
        ValueError: the key refers to nothing, or to both a stage and a route.
    """
    routes = {name: where for where in rules for name in ((where, where.rpartition(".")[2]) if where else ("update",))}
    stages: dict[str, set[str]] = {}
    for where, rule in rules.items():
        for path, stage in rule.stages(where):
            for name in {path, stage.label, str(stage.kind)}:
                stages.setdefault(name, set()).add(where)
    if key in routes and key in stages:
        raise ValueError(f"expect: '{key}' is both a stage and a route; give the path of one of them")
    if key in routes:
        return frozenset({routes[key]})
    if key not in stages:
        hint = did_you_mean(key, [*routes, *stages])
        raise ValueError(f"expect: '{key}' is no path, name or kind of a stage, and no route{hint}")
    return frozenset(stages[key])
