"""Reference pages of the shipped recipes: what they follow, their YAML, their parts, their state and their numbers."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any, get_args

import eigengraft
from eigengraft.component import Component, components_in
from eigengraft.experiments.cli.console import to_yaml
from eigengraft.optimizers.recipe.loading import recipe_folder, shipped
from markup import inline, table
from measured import (
    COUNTED_MODELS,
    H100,
    ROOT,
    cells,
    goals_table,
    gpu,
    measured_text,
    memory,
    milliseconds,
    section,
)

ARXIV = re.compile(r"arXiv:(\d{4}\.\d{4,5})")
INDEX_TASKS = {"python": "Python sources", "digits": "digits"}
"""Tasks of the laptop track in the index, with their headings."""


def recipe_pages() -> dict[str, str]:
    """A page for each shipped recipe, by its name."""
    return {name: recipe_page(name) for name in eigengraft.shipped_recipes()}


@cache
def recipe_page(name: str) -> str:
    """One recipe: about, YAML as shipped, parts, state, and all fields."""
    recipe, up = eigengraft.load_recipe(name), "../" * (1 + name.count("/"))
    text = (recipe_folder() / f"{name}.yaml").read_text(encoding="utf-8")
    links = [f"[{family} `{kind}`]({up}{family}.md#{kind})" for family, kind in sorted(parts(name))]
    full = to_yaml(recipe.declaration()).rstrip().replace("\n", "\n    ")
    return "\n\n".join(
        [
            f"# {name}",
            linked(inline(recipe.about or "")),
            *_papers(recipe.about or "", up),
            *_relatives(name, up),
            f'```yaml title="optimizers/recipe/shipped/{name}.yaml"\n{text.rstrip()}\n```',
            f'`eigengraft.compose("{name}", model)` in Python, `recipe: {name}` in YAML.',
            f"**State:** {memory(name):.2f} bytes per parameter of GPT-2 small in float32, embeddings included.",
            section(name, up),
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


def linked(text: str) -> str:
    """Return Markdown in which numbers of arXiv are links."""
    return ARXIV.sub(r"[arXiv:\1](https://arxiv.org/abs/\1)", text)


def _papers(about: str, up: str) -> Iterator[str]:
    """Links to the pages of the papers here that a recipe names."""
    pages = dict.fromkeys(page for number in ARXIV.findall(about) for page in paper_pages().get(number, ()))
    if pages:
        links = (f"[{title}]({up}../papers/{folder}/README.md)" for folder, title in pages)
        yield f"Tested against its paper: {', '.join(links)}."


@cache
def paper_pages() -> dict[str, list[tuple[str, str]]]:
    """(folder, title) of the pages of papers/ by the numbers of arXiv that are in the first lines of the page."""
    found: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for path in sorted((ROOT / "papers").glob("*/README.md")):
        lines = path.read_text(encoding="utf-8").splitlines()[:5]
        for number in ARXIV.findall("\n".join(lines)):
            found[number].append((path.parent.name, lines[0].removeprefix("# ")))
    return found


def index_page() -> str:
    """All shipped recipes with what they follow and with their numbers, below a table of recipes by goal."""
    rows = []
    for name in eigengraft.shipped_recipes():
        about = linked(inline(eigengraft.load_recipe(name).about or ""))
        times = f"{milliseconds(name):.3g}", measured_text(name)
        numbers = (f"{memory(name):.2f}", *times, *cells(name, list(INDEX_TASKS)))
        rows.append([f"[`{name}`]({name}.md)<br>{about}", *numbers])
    tasks = [f"{title}: {what}" for title in INDEX_TASKS.values() for what in ("steps", "loss", "rate")]
    head = ["recipe", "state", "≥ ms", "measured ms", "profile", *tasks]
    model = next(iter(COUNTED_MODELS.values()))
    return f"""# Shipped recipes

## Which one should I use?

The table follows from the runs of the [laptop track](../../papers/laptop_track/README.md), small tasks that train in
seconds. Without a special goal, start with `soap_fitted`. Compare a recipe with `adamw` on a task of your own
(`eigengraft ablate`). The two profiles are scores from 0 to 1, means over the tasks. If a recipe needs r times the
fewest steps to a target loss, its profile of steps has (4 - r) / 3 for this task, and 0 for r above 4. The profile of
time does the same with the steps times the time of a step. This time is computed, not measured, and is a lower bound.

{goals_table("{}.md".format)}

The table leaves out recipes that need several backward passes per step, such as `isomuon`.

## All recipes

- **state**: bytes per parameter of GPT-2 small in float32, embeddings and vectors included.
  [Other models](../../guide/odd-models.md#convolutions) differ; `eigengraft plan` gives the bytes of a model.
- **≥ ms**: counted time of the optimizer in a step of {model} on one
  {H100.name}, [a lower bound](../../papers/laptop_track/README.md#counted-cost).
- **measured ms**: mean time of the optimizer in this step on one {gpu().card}, [where it was
  measured](../../gpu.md#steps).
- **profile**: score on the laptop track, 1 for the fewest steps on every task.
- **steps, loss, rate**: steps to the target, final loss and best learning rate on two of its tasks.

{table(head, rows)}
"""


def base_of(name: str) -> str | None:
    """The shipped recipe that a shipped recipe is based on."""
    base: str | None = shipped()[name].get("base")
    return base


@cache
def parts(name: str) -> set[tuple[str, str]]:
    """Return (family, kind) of every member that is written in a shipped recipe or, where it says nothing else, in its
    base.

    A recipe with a base has every field set. In such a recipe a field counts as written if its value is not the
    default.
    """
    recipe, base = eigengraft.load_recipe(name), base_of(name)
    if base is None:
        return kinds(components_in(recipe, walked=lambda own: own.model_fields_set))
    return kinds(components_in(recipe, walked=changed_fields)) | (parts(base) & kinds(components_in(recipe)))


def kinds(found: Iterable[tuple[str, Component]]) -> set[tuple[str, str]]:
    """Return (family, kind) of the components among (path, component) that are members of families."""
    return {(own.family_name or "", kind) for _, own in found if (kind := getattr(own, "kind", None))}


def changed_fields(component: Component) -> set[str]:
    """Return the names of the fields of a component whose values are not the defaults."""
    fields = type(component).model_fields
    return {name for name in fields if getattr(component, name) != fields[name].default}


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
