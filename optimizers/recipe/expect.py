"""The field `expect` of a recipe: bounds on how much of a model a stage or a route receives, written as texts."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import AfterValidator, WithJsonSchema

from eigengraft.errors import RecipeError, did_you_mean, name_some

from .routing import ParamInfo

# An expectation, such as ">= 90% of parameters".
PATTERN = r"^(>=|<=|==|>|<) (\d+(\.\d+)?)(% of)? (parameters|tensors)$"
_COMPARED: Mapping[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
    ">": operator.gt,
    "<": operator.lt,
}


def parse_expectation(text: str) -> tuple[str, float, bool, str]:
    """Parse an expectation such as ">= 90% of parameters". Raise ValueError if the text has another form.

    Return (relation, number, share, unit). The number is in percent if `share` is True, for a bound on a share of the
    model. The unit is "parameters" if entries of tensors are counted, or "tensors".
    """
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
    return relation, number, share, unit


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
        raise ValueError(f"expect: '{key}' is neither a path, name or kind of a stage nor a route{hint}")
    return frozenset(stages[key])


@dataclass(frozen=True)
class Reached:
    """The share of a model that a stage or a route receives, and the bound that the recipe expects.

    key: the stage or route, as in `expect`.
    text: the expected bound, such as ">= 90% of parameters".
    found: number of entries, or of tensors, that the stage or route receives.
    total: number of entries, or of tensors, of the model.
    holds: True if `found` satisfies the bound.
    astray: text with the largest tensors that are on the wrong side of the bound.
    """

    key: str
    text: str
    found: int
    total: int
    holds: bool
    astray: str

    @property
    def percent(self) -> str:
        """Return `found` as a percentage of `total`, such as "72.7%"."""
        return f"{100 * self.found / max(self.total, 1):.3g}%"

    def __str__(self) -> str:
        return f"{self.key} {self.text}: {self.percent} ({self.found:,} of {self.total:,})"


def reached(
    expect: Mapping[str, str], rules: Mapping[str, Any], routed: Sequence[tuple[ParamInfo, str, str]]
) -> list[Reached]:
    """Return, for each expectation of a recipe, the share of the model that its stage or route receives.

    expect: expectations, by stage or route.
    rules: update rules of the recipe by path.
    routed: each parameter of the model with the path of its update rule, and the reason for it.
    """
    rows = []
    for key, text in expect.items():
        (relation, number, share, unit), paths = parse_expectation(text), expected_rules(key, rules)
        sizes = [(path in paths, info.numel if unit == "parameters" else 1) for info, path, _ in routed]
        found, total = sum(size for there, size in sizes if there), sum(size for _, size in sizes)
        holds = _COMPARED[relation](100 * found / max(total, 1) if share else found, number)
        upper = relation in ("<=", "<")
        chosen = sorted((row for row in routed if (row[1] in paths) == upper), key=lambda row: -row[0].numel)
        named = [f"{info.name or info.shape} in {path or 'update'} ({why})" for info, path, why in chosen]
        which = f"in '{key}'" if upper else f"that are not in '{key}'"
        astray = f"the largest tensors {which} are {name_some(named, 3)}" if named else f"there are no tensors {which}"
        rows.append(Reached(key, text, found, total, holds, astray))
    return rows


def require_expected(rows: Iterable[Reached]) -> None:
    """Raise RecipeError if the share of the model that a stage or route receives is not as the recipe expects.

    The message names the largest parameters that violate the expectation.

    rows: shares of the model, as `reached` returns them.
    """
    faults = [
        f"expect.{row.key}: the recipe expects {row.text} in the stage or route '{row.key}', got {row.found:,} of the "
        f"model's {row.total:,} ({row.percent}); {row.astray}; change the routes or `expect`"
        for row in rows
        if not row.holds
    ]
    if faults:
        raise RecipeError("\n".join(faults))
