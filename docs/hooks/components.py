"""Reference pages of the families and of the declarations that hold them, from docstrings and fields."""

from __future__ import annotations

import inspect
from functools import cache
from pathlib import Path

from eigengraft.blocking import Blocking
from eigengraft.component import Component, families
from eigengraft.distributed.distribution import Distribution
from eigengraft.experiments.benches import Bench  # with the declarations it defines every family and member
from eigengraft.experiments.cli.catalog import use_and_cost
from eigengraft.experiments.studies.study import Study
from eigengraft.experiments.training.experiment import Experiment
from eigengraft.optimizers import Recipe, Route
from eigengraft.optimizers.recipe.routing import Match
from eigengraft.optimizers.write.failure import Failure
from eigengraft.reference import (
    aliases_in_contract,
    constructor_of,
    contract_of,
    first_sentence,
    public_module,
    summary,
    types_in_contract,
)
from fields import Links, field_table
from markup import docstring, inline, table
from recipes import members_in, used_by

EXAMPLES = Path(__file__).parents[2] / "experiments" / "examples" / "components"
"""Folder of the worked files, one for each family that users extend."""

DECLARATIONS: dict[str, tuple[str, tuple[type[Component], ...]]] = {
    "recipe": ("Recipe", (Recipe, Route, Match, Blocking, Failure, Distribution)),
    "experiment": ("Experiment and study", (Experiment, Study)),
}


def shipped_families() -> dict[str, type[Component]]:
    """The families of the library by name, the stages first."""
    found = {name: family for name, family in families().items() if family.__module__.startswith("eigengraft.")}
    return dict(sorted(found.items(), key=lambda item: (item[0] != "stage", item[0])))


def shipped_members(family: type[Component]) -> dict[str, type[Component]]:
    """The members of a family that the library defines, by kind."""
    return {k: m for k, m in sorted(family.members.items()) if m.__module__.startswith("eigengraft.")}


def family_pages() -> dict[str, str]:
    """A page for each family, by its name."""
    return {name: family_page(name, family) for name, family in shipped_families().items()}


def family_page(name: str, family: type[Component]) -> str:
    """Title, contract and members of one family."""
    members = shipped_members(family)
    kinds = ", ".join(f"[`{kind}`](#{kind})" for kind in members)
    shown: set[type[Component]] = set()  # components that several members hold
    own = "**Of your own:** [what a member defines, with an example](#own)"
    parts = [f"# {name}", docstring(summary(family)), f"**Kinds:** {kinds}", own, where(family)]
    for kind, member in members.items():
        parts += [f"## {kind} {{ #{kind} }}", docstring(summary(member))]
        facts = (line.partition(": ") for line in use_and_cost(name, kind, member))
        parts += [f"**{label.capitalize()}:** {inline(text)}" for label, _, text in facts]
        parts.append(where(member))
        parts.append(field_table(member, _links(member)))
        if issubclass(member, Bench):
            columns = [[f"`{name}`", inline(column.meaning), column.unit] for name, column in member.columns.items()]
            parts += ["Columns of its rows:", table(["column", "meaning", "unit"], columns)]
        parts += [_component_section(inner) for inner in _inner(member) if inner not in shown]
        shown.update(_inner(member))
        names = used_by().get((name, kind), [])
        if names:
            parts.append("In the recipes " + ", ".join(f"[`{n}`](recipes/{n}.md)" for n in names) + ".")
    parts += contract_section(name, family)
    return "\n\n".join(parts) + "\n"


ON_PAGE_PYTHON = ("Slot", "StepContext", "Inner", "Traits")
"""Classes in signatures that the page of the Python interface describes."""


def contract_section(name: str, family: type[Component]) -> list[str]:
    """Return the text on members of one's own: the contract of the class, and the worked file if the family has one."""
    base, kind = family.__name__, 'kind: Literal["mine"] = "mine"'
    parts = ["## A member of your own { #own }"]
    parts.append(
        f"A member is a class with the base `{base}` and a field `{kind}`. It defines what is required here. "
        "[Components of your own](../guide/own-components.md) explains random numbers and the check."
    )
    for one in contract_of(family):
        parts.append(f"**`{one.signature}`**" + (" (required)" if one.required else ""))
        parts.append(docstring(one.meaning, formula_first=False))
    for cls in types_in_contract(family):
        if cls.__name__ in ON_PAGE_PYTHON:
            link = f"python.md#eigengraft.{cls.__name__}"
            parts.append(f"[`{cls.__name__}`]({link}) is described with the Python interface.")
            continue
        parts += [f"### {cls.__name__}", docstring(inspect.getdoc(cls) or "", formula_first=False)]
        parts.append(f"`from {public_module(cls)} import {cls.__name__}`, `{constructor_of(cls)}`")
        if inspect.isabstract(cls):
            methods = [f"`{one.signature}`: {inline(one.meaning)}" for one in contract_of(cls)]
            parts.append("\n".join(f"- {text}" for text in methods))
    for alias, (definition, meaning) in aliases_in_contract(family).items():
        parts += [f"**`{alias} = {definition}`**", docstring(meaning, formula_first=False)]
    example = EXAMPLES / f"{name}.py"
    if example.exists():
        parts += [
            f"A complete file, `experiments/examples/components/{name}.py`:",
            f"```python\n{example.read_text()}```",
        ]
    return parts


def index_page() -> str:
    """All families with their members."""
    rows = []
    for name, family in shipped_families().items():
        kinds = ", ".join(f"[`{kind}`]({name}.md#{kind})" for kind in shipped_members(family))
        rows.append([f"[{name}]({name}.md)", inline(first_sentence(summary(family))), kinds])
    about = "A family is an open set of parts that fit in the same place. A recipe names a member by its kind."
    return f"# Families\n\n{about}\n\n{table(['family', 'what it is', 'kinds'], rows)}\n"


def declaration_pages() -> dict[str, str]:
    """A page for each declaration that is written in YAML, with the components that only it holds."""
    pages = {}
    for page, (title, classes) in DECLARATIONS.items():
        held = dict.fromkeys(inner for cls in classes for inner in (cls, *_inner(cls)))
        sections = [_component_section(cls, "##") for cls in held]
        pages[page] = "\n\n".join([f"# {title}", *sections]) + "\n"
    return pages


def where(cls: type[Component]) -> str:
    """The import line and the file of a class."""
    path = cls.__module__.removeprefix("eigengraft.").replace(".", "/") + ".py"
    room = path if "/" in path else f"src/eigengraft/{path}"
    return f"`from {public_module(cls)} import {cls.__name__}`, defined in `{room}`."


@cache
def _declared() -> Links:
    return {
        c.__name__: f"{page}.md#{c.__name__.lower()}" for page, (_, classes) in DECLARATIONS.items() for c in classes
    }


def _links(cls: type[Component]) -> Links:
    return _declared() | {inner.__name__: f"#{inner.__name__.lower()}" for inner in _inner(cls)}


def _inner(cls: type[Component]) -> list[type[Component]]:
    """Components without a family that are fields of this one and are described nowhere else."""
    found = [c for c in members_in(cls) if not c.is_family() and c.family_name is None]
    return [c for c in dict.fromkeys(found) if c.__name__ not in _declared()]


def _component_section(cls: type[Component], level: str = "###") -> str:
    head = f"{level} {cls.__name__} {{ #{cls.__name__.lower()} }}"
    return "\n\n".join([head, docstring(summary(cls)), where(cls), field_table(cls, _declared() | _links(cls))])
