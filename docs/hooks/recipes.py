"""Reference pages of the shipped recipes: what they say of themselves, their YAML, their parts and their state."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import Any, Literal, get_args

import eigengraft
from eigengraft.component import Component
from eigengraft.experiments.cli.console import to_yaml
from eigengraft.optimizers.plan.plan import plan
from eigengraft.optimizers.recipe.loading import recipe_folder, shipped
from markup import inline, table

SHAPE = (1024, 1024)


def recipe_pages() -> dict[str, str]:
    """A page for each shipped recipe, by its name."""
    return {name: recipe_page(name) for name in eigengraft.shipped_recipes()}


def recipe_page(name: str) -> str:
    """One recipe: about, YAML as shipped, parts, state, and all fields."""
    recipe, up = eigengraft.load_recipe(name), "../" * (1 + name.count("/"))
    text = (recipe_folder() / f"{name}.yaml").read_text(encoding="utf-8")
    links = [f"[{family} `{kind}`]({up}{family}.md#{kind})" for family, kind in sorted(parts(name))]
    full = to_yaml(recipe.declaration()).rstrip().replace("\n", "\n    ")
    return "\n\n".join(
        [
            f"# {name}",
            inline(recipe.about or ""),
            *_relatives(name, up),
            f'```yaml title="optimizers/recipe/shipped/{name}.yaml"\n{text.rstrip()}\n```',
            f'`eigengraft.compose("{name}", model)` in Python, `recipe: {name}` in YAML.',
            f"**State:** {state_bytes(name):.2f} bytes per parameter of a {SHAPE[0]} x {SHAPE[1]} weight in float32.",
            f"**Parts:** {', '.join(links)}.",
            f'??? info "Every field, defaults included"\n\n    ```yaml\n    {full}\n    ```',
        ]
    )


def _relatives(name: str, up: str) -> Iterator[str]:
    """Links to the recipe that one is based on, and to those that are based on it."""

    def link(other: str) -> str:
        return f"[`{other}`]({up}recipes/{other}.md)"

    base = base_of(name)
    if base is not None:
        yield f"Based on {link(base)}: the lines below are what differs."
    derived = [other for other in eigengraft.shipped_recipes() if base_of(other) == name]
    if derived:
        yield f"Base of {', '.join(map(link, derived))}."


def index_page() -> str:
    """All shipped recipes with what they say of themselves."""
    rows = []
    for name in eigengraft.shipped_recipes():
        about = inline(eigengraft.load_recipe(name).about or "")
        rows.append([f"[`{name}`]({name}.md)", about, f"{state_bytes(name):.2f}"])
    head = (
        "# Shipped recipes\n\nState is in bytes per parameter of a "
        f"{SHAPE[0]} x {SHAPE[1]} weight in float32, with the recipe's own blocking."
    )
    return f"{head}\n\n{table(['recipe', 'what it is', 'state'], rows)}\n"


@cache
def state_bytes(name: str) -> float:
    """Bytes of state per parameter of one weight matrix, counted without allocating anything."""
    return int(plan(name, [("weight", SHAPE)], (1,)).state.max()) / math.prod(SHAPE)


def base_of(name: str) -> str | None:
    """The shipped recipe that a shipped recipe is based on."""
    base: str | None = shipped()[name].get("base")
    return base


@cache
def parts(name: str) -> set[tuple[str, str]]:
    """(family, kind) of every member that is written in a shipped recipe or, where it says nothing else, in its base.

    The resolved recipe of one with a base has every field set: what its base does not write counts if it is no default.
    """
    recipe, base = eigengraft.load_recipe(name), base_of(name)
    if base is None:
        return kinds(components_in(recipe, "given"))
    return kinds(components_in(recipe, "changed")) | (parts(base) & kinds(components_in(recipe, "all")))


def kinds(components: Iterable[Any]) -> set[tuple[str, str]]:
    """(family, kind) of components that are members of families."""
    return {(c.family_name or "", c.kind) for c in components if hasattr(c, "kind")}


def components_in(value: Any, which: Literal["all", "given", "changed"]) -> Iterator[Any]:
    """A component and every component in its fields, in those that were given, or in those that are no default."""
    if isinstance(value, Component):
        yield value
        fields = type(value).model_fields
        names = {name for name in fields if which != "given" or name in value.model_fields_set}
        values = {name: getattr(value, name) for name in fields if name in names}
        value = [item for name, item in values.items() if which != "changed" or item != fields[name].default]
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from components_in(item, which)


@cache
def used_by() -> dict[tuple[str, str], list[str]]:
    """Names of the shipped recipes that hold a member, by its family and kind."""
    found: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name in eigengraft.shipped_recipes():
        for part in parts(name):
            found[part].append(name)
    return found


def members_in(cls: type[Component]) -> Iterator[type[Component]]:
    """Component classes in the annotations of the fields of a component, at any depth of the annotation."""
    waiting: list[Any] = [field.annotation for field in cls.model_fields.values()]
    while waiting:
        annotation = waiting.pop()
        waiting.extend(get_args(annotation))
        if isinstance(annotation, type) and issubclass(annotation, Component):
            yield annotation
