"""Reference pages of the shipped recipes: what they say of themselves, their YAML, their parts and their state."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, get_args

import torch

import eigengraft
from eigengraft.component import Component
from eigengraft.experiments.cli.console import to_yaml
from eigengraft.optimizers.recipe.yaml_files import recipe_folder
from markup import inline, table

SHAPE = (1024, 1024)


def recipe_pages() -> dict[str, str]:
    """A page for each shipped recipe, by its name."""
    return {name: recipe_page(name) for name in eigengraft.shipped_recipes()}


def recipe_page(name: str) -> str:
    """One recipe: about, YAML as shipped, parts, state, and all fields."""
    recipe, up = eigengraft.load_recipe(name), "../" * (1 + name.count("/"))
    text = (recipe_folder() / f"{name}.yaml").read_text(encoding="utf-8")
    links = [f"[{family} `{kind}`]({up}{family}.md#{kind})" for family, kind in sorted(parts(recipe))]
    full = to_yaml(recipe.declaration()).rstrip().replace("\n", "\n    ")
    return "\n\n".join(
        [
            f"# {name}",
            inline(recipe.about or ""),
            f'```yaml title="optimizers/recipe/shipped/{name}.yaml"\n{text.rstrip()}\n```',
            f'`eigengraft.compose("{name}", model)` in Python, `recipe: {name}` in YAML.',
            f"**State:** {state_bytes(name):.2f} bytes per parameter of a {SHAPE[0]} x {SHAPE[1]} weight in float32.",
            f"**Parts:** {', '.join(links)}.",
            f'??? info "Every field, defaults included"\n\n    ```yaml\n    {full}\n    ```',
        ]
    )


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
    weight = torch.nn.Parameter(torch.empty(SHAPE, device="meta"))
    return eigengraft.Optimizer([("weight", weight)], recipe=name).state_bytes() / weight.numel()


def parts(value: Any) -> set[tuple[str, str]]:
    """(family, kind) of every member in a component, in fields at any depth."""
    return {(c.family_name or "", c.kind) for c in components_in(value) if hasattr(c, "kind")}


def components_in(value: Any) -> Iterator[Any]:
    """A component and every component in its fields, at any depth."""
    if isinstance(value, Component):
        yield value
        value = [getattr(value, name) for name in type(value).model_fields]
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from components_in(item)


@cache
def used_by() -> dict[tuple[str, str], list[str]]:
    """Names of the shipped recipes that hold a member, by its family and kind."""
    found: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name in eigengraft.shipped_recipes():
        for part in parts(eigengraft.load_recipe(name)):
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
