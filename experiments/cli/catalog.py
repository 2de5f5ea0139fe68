"""The catalog of the library: shipped recipes, families and kinds, each with its formula and its fields.

The commands `list`, `show` and `diff` print it.
"""

from __future__ import annotations

import inspect
import math
import re
import sys
import textwrap
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from eigengraft.errors import RecipeError, did_you_mean
from eigengraft.reference import (
    aliases_in_contract,
    constructor_of,
    contract_of,
    fields_of,
    first_sentence,
    flow,
    public_module,
    summary,
    type_text,
    types_in_contract,
)

from .arguments import Imports
from .console import print_table
from .purposes import FAMILIES, RECIPE_GROUPS, STAGES, USES, Purpose, by_purpose, goals, recipe_numbers, timed_card

if TYPE_CHECKING:
    from eigengraft.component import Component
    from eigengraft.optimizers.recipe.recipe import Recipe

RECIPES, BY_GOAL, SIGNALS, EVERY_FAMILY = "recipes", "goals", "signals", "family"
"""Arguments of `list` that are no families: shipped recipes, recipes by goal, signals that stages may request, and the
families themselves."""
_HEADINGS = {EVERY_FAMILY: FAMILIES, "stage": STAGES, RECIPES: RECIPE_GROUPS}
"""Groups into which the command `list` divides a list of families, stages or recipes, by the argument that names the
list. Other lists are not divided."""
_OF_OTHER_MODELS = """\
Bytes of GPT-2 small are not those of other models: most recipes for matrices have Adam for its
embedding, and `adafactor` has 2.67 bytes for kernels of 3 x 3, as in torch. `eigengraft plan MODEL
--recipe RECIPE` gives the bytes of a task or a file of shapes, and
`compose(recipe, model).state_bytes()` those of a model in Python."""
"""Text on the memory of other models, below lists with the memory of recipes."""
_NOTES = {
    BY_GOAL: """\
A profile is a score from 0 to 1 on five small tasks, the laptop track. 1 is the fewest steps, or
the least time, on every task. Times of steps are counted and are lower bounds. Recipes that need
several backwards per step, such as `isomuon`, are left out. Without a special goal, start with
`soap_fitted`. `eigengraft list recipes` lists all recipes, `eigengraft show RECIPE` prints one.
"""
    + _OF_OTHER_MODELS,
    RECIPES: f"""\
lr        the recipe's own learning rate; tune it first
state     bytes per parameter of GPT-2 small in float32
>= ms     milliseconds of the optimizer in a step of GPT-2 small on one H100, a counted lower bound
measured  milliseconds of the same step on one {timed_card()}; -: not measured
profile   score of steps on five small tasks, the laptop track, 1 for the fewest; -: not run
`eigengraft list recipes WORDS` finds words of names, texts, headings and goals; names of several
recipes print their rows in one table. `--sort` prints one table of all, the best recipe first: by
profile of `steps` or of `time`, by `state`, or, with `ms`, by `measured`.
`eigengraft list goals` says which to use for few steps, little time or little memory, and
`eigengraft show RECIPE` prints one.
"""
    + _OF_OTHER_MODELS,
    EVERY_FAMILY: """\
`eigengraft list FAMILY [WORDS]` lists its members, `eigengraft list WORDS` searches everything.
`eigengraft show KIND` prints a member, `eigengraft show FAMILY` what one of your own defines.""",
    SIGNALS: """\
The extent is the shape of the value; `help(eigengraft.Signal)` explains each. `optimizer.provide`
provides a signal too, unless the optimizer computes it. `eigengraft.register_signal` adds one.""",
}
"""Text that the command `list` prints below a list, by the argument that names the list."""


def list_command(
    what: Annotated[
        str | None,
        typer.Argument(help="`goals`, `recipes`, `signals`, a family, or a word to search for; default all families"),
    ] = None,
    words: Annotated[
        list[str] | None,
        typer.Argument(
            help="print only entries in which each of these is a word or the beginning of a word; after `recipes`, "
            "several names of recipes print a table of these recipes, in this order"
        ),
    ] = None,
    imports: Imports = None,
    sort: Annotated[
        _Sort | None,
        typer.Option(
            help="print recipes in one table, the best first: by their score for few steps or little time on five "
            "small tasks (steps, time), by bytes of state (state), or by measured milliseconds of a step (ms)",
            show_default="groups",
        ),
    ] = None,
) -> None:
    """List recipes by goal, all recipes, signals, families of parts, or members of a family; or search in all."""
    by_goal: list[tuple[str, ...]] = [
        (goal.title, "\n".join(f"{name} ({numbers})" if numbers else name for name, numbers in goal.recipes), goal.rule)
        for goal in goals()
    ]
    if what == BY_GOAL and not words and sort is None:  # needs no component, and so no torch
        _print_entries(_GOAL_HEADS, by_goal)
        typer.echo(f"\n{_NOTES[BY_GOAL]}")
        return
    from eigengraft.optimizers.recipe.loading import shipped_recipes
    from eigengraft.signals import known_signals

    registered = _registered()
    about = {
        BY_GOAL: "which recipe to use: for few steps, little time, little memory, little tuning, fine-tuning",
        RECIPES: "all shipped recipes by method, with learning rate, memory, time and profile",
        SIGNALS: "values beside the gradient that stages may request, such as the loss",
        **{name: _about(family) for name, family in sorted(registered.items())},
    }
    recipes = shipped_recipes() if sort is None else sorted(shipped_recipes(), key=partial(_rank, sort=sort))
    lists: dict[str, list[tuple[str, ...]]] = {
        EVERY_FAMILY: [*about.items()],
        BY_GOAL: by_goal,
        RECIPES: [_recipe_row(name, sort) for name in recipes],
        SIGNALS: [(name, one.about, one.extent, one.by) for name, one in sorted(known_signals().items())],
        **{
            name: [(k, "\n".join([_about(m), *_use(name, k, m)])) for k, m in sorted(own.members.items())]
            for name, own in sorted(registered.items())
        },
    }
    what = EVERY_FAMILY if what is None else _in_either_number(what, lists)
    if sort is not None and what != RECIPES:
        raise ValueError(
            f"--sort {sort}: this option sorts recipes only; write `eigengraft list {RECIPES} --sort {sort}`"
        )
    sought = [word.lower() for word in (*((what,) if what not in lists else ()), *(words or ()))]
    chosen = {what: lists[what]} if what in lists else lists
    compared = what == RECIPES and len(sought) > 1 and set(sought) <= set(recipes)
    if compared:
        rows_by_name = {row[0]: row for row in lists[RECIPES]}
        order = sought if sort is None else [name for name in recipes if name in sought]
        chosen, sought = {RECIPES: [rows_by_name[name] for name in order]}, []
    found = {
        name: [row for row in rows if all(_begins_a_word(part, _searched_text(name, row)) for part in sought)]
        for name, rows in chosen.items()
    }
    if RECIPES in found and not sought and sys.stdout.isatty():
        found[RECIPES] = [(name, _shortened(about), *numbers) for name, about, *numbers in found[RECIPES]]
    if not any(found.values()):
        raise _nothing_found(what, sought, lists)
    for name, rows in found.items():
        if rows:
            heads = {
                EVERY_FAMILY: ("family", "members"),
                BY_GOAL: _GOAL_HEADS,
                RECIPES: (*_RECIPE_HEADS[:-1], "time") if sort == "time" else _RECIPE_HEADS,
                SIGNALS: ("signal", "about", "extent", "provided by"),
            }
            headings = () if compared or sort else _HEADINGS.get(name, ())
            _print_entries(heads.get(name, (name, "about")), rows, headings)
    if what in _NOTES:
        typer.echo(f"\n{_NOTES[what]}")


def _begins_a_word(part: str, text: str) -> bool:
    """Return True if a word of the text begins with `part`. The words of the name `soap_muon` are `soap` and `muon`."""
    return re.search(rf"(?<![a-z]){re.escape(part)}", text) is not None


def _in_either_number(name: str, known: Iterable[str]) -> str:
    """Return the known name of which `name` is the singular or the plural. Return `name` if there is none."""
    plurals = {one: (one, f"{one}s", f"{one}es", re.sub("um$", "a", one)) for one in known}
    return next((one for one, forms in plurals.items() if name in forms or one == f"{name}s"), name)


def _searched_text(what: str, row: Sequence[str]) -> str:
    """Return the text in which `list` searches words for an entry, in lower case.

    It is the row of the entry, with the titles of its headings and goals.

    what: name of the list that has the entry, such as "recipes".
    row: columns of the entry. The first is its name.
    """
    headings = (one.title for one in _HEADINGS.get(what, ()) if row[0] in one.members)
    by_goal = (goal.title for goal in goals() if what == RECIPES and row[0] in dict(goal.recipes))
    return " ".join((*row, *headings, *by_goal)).lower()


def _nothing_found(what: str, sought: Sequence[str], lists: Iterable[str]) -> ValueError:
    """Return the error of the command `list` for words that it has not found, with advice for another search.

    what: first argument of the command: the name of a list, or a word that was sought in all lists.
    sought: the words. No entry contains all of them.
    lists: names of all lists.
    """
    place = f"of the list '{what}'" if what in lists else "of any list"
    missing = f"list: no entry {place} contains {' and '.join(map(repr, sought))}"
    if what not in lists:
        if hint := did_you_mean(what, lists):
            return ValueError(f"{missing}{hint} {OF_FILES}")
        return ValueError(f"{missing}; search for fewer words (lists: {', '.join(lists)}); {OF_FILES}")
    titles = [one.title for one in _HEADINGS.get(what, ())]
    titles += [goal.title for goal in goals() if what == RECIPES]
    kinds = "its headings and goals" if what == RECIPES else "its headings"
    headings = f", or for one of {kinds}: {'; '.join(titles)}" if titles else ""
    return ValueError(f"{missing}; search for fewer words{headings}. {OF_FILES}")


_SHORT = 68
"""Largest number of characters of the text about a recipe in the list of all recipes. It fills two lines of its column.
"""
_GOAL_HEADS = ("goal", "recipes (profiles and numbers)", "chosen by")
_RECIPE_HEADS = ("recipe", "about", "lr", "state", ">= ms", "measured", "profile")


_Sort = Literal["steps", "time", "state", "ms"]
"""Numbers of recipes to sort by: profile of steps or of time, bytes of state, measured milliseconds of a step."""


def _rank(name: str, sort: _Sort) -> float:
    """Return a number of a recipe by which recipes are sorted in ascending order, the best first.

    It is infinity for a recipe without this number.

    name: name of the recipe.
    sort: number to sort by. The scores "steps" and "time" are negated, because larger scores are better.
    """
    own = recipe_numbers()[name]
    number = {"steps": own.steps, "time": own.time, "state": own.state, "ms": own.measured}[sort]
    if number is None:
        return math.inf
    return -number if sort in ("steps", "time") else number


def _recipe_row(name: str, sort: _Sort | None) -> tuple[str, ...]:
    """Return the row of a shipped recipe, with the columns `_RECIPE_HEADS`.

    sort: with `time`, the last column has the recipe's score for little time, else its score for few steps (fields
        `time` and `steps` of `RecipeNumbers`).
    """
    from eigengraft.optimizers.recipe.loading import raw_recipe

    recipe, own = raw_recipe(name), recipe_numbers()[name]
    score = own.time if sort == "time" else own.steps
    profile = "-" if score is None else f"{score:.2f}"
    measured = "-" if own.measured is None else f"{own.measured:.3g}"
    about, lr = recipe.get("about") or "", recipe.get("lr")
    numbers = (f"{own.state:.2f}", f"{own.counted:.3g}", measured, profile)
    return name, str(about), "-" if lr is None else f"{lr:g}", *numbers


def measured_cost(recipe: str) -> str:
    """Return a line with the measured time of the optimizer in a step of GPT-2 small. Return "" if `recipe` was not
    measured or is not a shipped recipe.
    """
    own = recipe_numbers().get(recipe)
    if own is None or own.measured is None:
        return ""
    times = (
        f"the optimizer takes {own.measured:.3g} ms of this step, {own.measured / own.counted:.1f} times the counted"
    )
    return f"measured on one {timed_card()}: {times} {own.counted:.3g} ms"


def _shortened(about: str) -> str:
    """Return the text about a recipe without references to papers, which have a year in parentheses, and shortened to
    `_SHORT` characters.
    """
    return textwrap.shorten(re.sub(r" \([^()]*\b20\d\d\b[^()]*\)", "", about), _SHORT, placeholder=" \u2026")


def diff_command(
    old: Annotated[str, typer.Argument(help="a recipe's name or file, an experiment file, or the directory of a run")],
    new: Annotated[
        str, typer.Argument(help="the recipe, experiment or run to compare with the first, given in the same way")
    ],
    imports: Imports = None,
) -> None:
    """Print the fields in which two recipes, experiments or runs differ, as lines `path: old -> new`.

    The text `about` is not compared. If one of the two is a recipe, only the recipes are compared.
    """
    from eigengraft.optimizers.recipe.overrides import changed_leaves

    declared = [_declaration_of(source) for source in (old, new)]
    if not all("task" in one for one in declared):
        declared = [one["recipe"] if "task" in one else one for one in declared]
    changes = [change for change in changed_leaves(*declared) if change[0].split(".")[-1] != "about"]
    for path, before, after in changes:
        typer.echo(f"{path}: {flow(before)} -> {flow(after)}")
    if not changes:
        typer.echo("no field differs")


def _declaration_of(source: str) -> dict[str, Any]:
    """Return the resolved experiment if `source` is the directory of a run or an experiment file. Otherwise, return the
    resolved recipe of this name or file.
    """
    from eigengraft.optimizers.recipe.loading import load_recipe, read_yaml

    from ..training.experiment import load_experiment
    from ..training.rundir import RunDirectory

    path = Path(source)
    if path.is_dir():
        config = RunDirectory(path).read("config")
        if config is None:
            raise ValueError(f"diff: {path} is not the directory of a run, because it has no config.json")
        return config
    if path.is_file() and "task" in (read_yaml(path) or ()):
        return load_experiment(path).model_dump(mode="json")
    return load_recipe(source).model_dump(mode="json")


OF_FILES = "--import FILE.py adds the kinds that a file defines"
"""Hint in errors of commands about names that do not exist."""


def unknown(source: str) -> RecipeError:
    """Return the error about `source` if no recipe, kind, family, signal or file has this name."""
    from eigengraft.optimizers.recipe.loading import shipped_recipes
    from eigengraft.signals import known_signals

    registered = _registered()
    kinds = (kind for family in registered.values() for kind in family.members)
    hint = did_you_mean(source.lower(), dict.fromkeys([*shipped_recipes(), *registered, *kinds, *known_signals()]), 0.5)
    return RecipeError(
        f"show: there is no recipe, kind, family, signal or file '{source}'{hint or '.'} `eigengraft list` shows all "
        f"names; {OF_FILES}"
    )


def find_kinds(source: str) -> list[tuple[str, type[Component]]]:
    """Return (family, component) for each kind that `source` names, as KIND or FAMILY.KIND. Return [] if no family has
    the kind KIND.

    Raises RecipeError if FAMILY has no kind KIND.
    """
    family, _, kind = source.rpartition(".")
    registered = _registered()
    if family in registered and kind not in (known := registered[family].members):
        hint = did_you_mean(kind, known)
        raise RecipeError(
            f"{source}: {family} has no kind '{kind}'{hint or f'; `eigengraft list {family}` lists them'}; {OF_FILES}"
        )
    found = ((name, own.members.get(kind)) for name, own in sorted(registered.items()) if family in ("", name))
    return [(name, member) for name, member in found if member is not None]


def print_kind(family: str, member: type[Component]) -> None:
    """Print a component: its family and kind, the Python line that imports it, its docstring with the formula, its use
    and cost, and a table of its fields.
    """
    kind = next(kind for kind, own in _registered()[family].members.items() if own is member)
    typer.echo(f"{family} '{kind}' (in Python: `from {public_module(member)} import {member.__name__}`)\n")
    typer.echo(summary(member))
    if facts := use_and_cost(family, kind, member):
        typer.echo("\n" + "\n".join(facts))
    fields = fields_of(member)
    rows = [(f.name, type_text(f.schema), "required" if f.required else f.default or "none", f.meaning) for f in fields]
    if rows:
        print_table(("field", "values", "default", "meaning"), rows, expand=True)


def use_and_cost(family: str, kind: str, member: type[Component]) -> list[str]:
    """Return a line on when to use a component and a line on its cost. A line is left out if nothing is known.

    The cost is that of one 1024 x 1024 matrix in float32, for the defaults of the component, or for the examples of its
    required fields.

    - A stage: counted bytes of state and floating-point operations per number, as `eigengraft plan` counts them.
    - A quantizer: bytes per number.
    - A solver of roots or bases: measured times from `timings.json`. A time on a GPU is that of a matrix of a stack.
    """
    cost = _cost(kind, member)
    return [*_use(family, kind, member), *([f"cost for a {_ORDER} x {_ORDER} matrix: {cost}"] if cost else [])]


def _use(family: str, kind: str, member: type[Component]) -> list[str]:
    """Return one line on when to use a component of the library, else []."""
    use = USES.get(family, {}).get(kind) if member.__module__.startswith("eigengraft.") else None
    return [f"use: {use}"] if use else []


_ORDER = 1024
"""Order of the matrix for which costs of components are printed: a usual size of layers and of blocks."""


def _cost(kind: str, member: type[Component]) -> str:
    """Return the text on the cost of a component, as `use_and_cost` describes it, or "" if its cost is not known."""
    import torch

    from eigengraft.optimizers import Recipe
    from eigengraft.optimizers.recipe.recipe import StoredSlot
    from eigengraft.optimizers.stacks.assignment import FACTORIZATION, block_cost
    from eigengraft.preconditioners import BasisSolver, RootSolver, Stage
    from eigengraft.preconditioners.roots.by_device import estimate
    from eigengraft.quantization import Quantizer
    from eigengraft.slots import Slot

    block, numel = (_ORDER, _ORDER), _ORDER**2
    if issubclass(member, RootSolver | BasisSolver):
        known = (estimate(device, kind, _ORDER, torch.float32) for device in ("cpu", "cuda"))
        return "; ".join(f"{_number(one.milliseconds)} ms on {one.timing.card}" for one in known if one is not None)
    required = [(info.alias or name, info.examples) for name, info in member.model_fields.items() if info.is_required()]
    if not all(examples for _, examples in required):
        return ""
    given = {name: examples[0] for name, examples in required if examples}
    if not issubclass(member, Stage | Quantizer):
        return ""
    try:
        if issubclass(member, Quantizer):
            stored = StoredSlot(Slot(block), torch.float32, member.model_validate(given).codec, None)
            return f"{_number(stored.nbytes() / numel)} bytes per number"
        recipe = Recipe.model_validate({"update": [{"kind": kind, **given}]})
        cost = block_cost(recipe, next(iter(recipe.rules())), block, torch.float32)
    except Exception:  # a part of one's own may need other stages or other blocks, or may not be finished
        return ""
    # operations on entries are counted by the entries of the state: a stage with little state has more than are counted
    few = cost.constant < numel
    uncounted = "a few operations per number, which are not counted"
    state = f"{_number(cost.state / numel)} bytes of state per number" if cost.state or not few else "no state"
    if few and not cost.refreshes:
        return f"{state}, and {uncounted}"
    per_number = [state, uncounted if few else f"{_number(cost.constant / numel)} operations per number in a step"]
    counted = f"counted for {flow(given)}" if given else "counted"
    if refreshes := sum(operations for _, operations in cost.refreshes):
        per_number.append(f"{_number((cost.constant + refreshes) / numel)} in a step with a refresh")
        counted += f", a refresh of order d as {FACTORIZATION:g} d^3"
    return f"{', '.join(per_number)} ({counted})"


def _number(x: float) -> str:
    """Return a number with three significant digits, or "less than 0.01"."""
    return "less than 0.01" if 0 < x < 0.01 else f"{float(f'{x:.3g}'):,g}"


def print_chain(recipe: Recipe) -> None:
    """Print the name of a recipe, its text `about` and the dotted path of each of its stages, as comments of YAML.

    Below the first stage of each kind, the formula of the kind is printed.
    """
    if recipe.about:
        title = f"{recipe.name}: {recipe.about}" if recipe.name else recipe.about
        encoding = sys.stdout.encoding or "utf-8"  # click writes UTF-8 to a stream that is ASCII
        title = title.encode(encoding, "replace").decode(encoding)
        typer.echo(textwrap.fill(title, 100, initial_indent="# ", subsequent_indent="# "))
    shown = set[type]()
    for at, rule in recipe.rules().items():
        for path, stage in rule.stages(at):
            typer.echo(f"# {path}")
            if type(stage) not in shown:
                typer.echo(textwrap.indent(_formula(type(stage)), "#     "))
            shown.add(type(stage))


def _formula(cls: type[Component]) -> str:
    """Return the first paragraph of a component's docstring. If it has no formula (`<-`), and the first line of the
    second paragraph has one, add this line.
    """
    first, second, *_ = *summary(cls).split("\n\n"), "", ""
    line = second.split("\n")[0].strip()
    return f"{first}\n{line}" if "<-" in line and "<-" not in first else first


def names_signal(name: str) -> bool:
    """Return True for the name of a signal, and for the words `signal` and `signals`."""
    from eigengraft.signals import known_signals

    return _in_either_number(name, (SIGNALS,)) == SIGNALS or name in known_signals()


def print_signal(name: str) -> None:
    """Print the description of a signal, which is an input of stages beside the gradient. The words `signal` and
    `signals` print a list of all.
    """
    from eigengraft.signals import known_signals

    if _in_either_number(name, (SIGNALS,)) == SIGNALS:
        list_command(SIGNALS)
        return
    signal = known_signals()[name]
    typer.echo(f"signal {name}: {signal.about}\n\nextent: {signal.extent}\nreduce: {signal.reduce}")
    if signal.by:
        typer.echo(f"provided by: {signal.by}")
    typer.echo(f"\nA stage requests it by Request('{name}') in its traits. `eigengraft list {SIGNALS}` lists all.")


def names_family(name: str) -> bool:
    """Return True for the name of a family, in the singular or the plural."""
    registered = _registered()
    return _in_either_number(name, registered) in registered


def print_family(name: str) -> None:
    """Print the docstring of a family, the methods that a member of it defines, the types in their signatures, and the
    path of an example file.
    """
    registered = _registered()
    name = _in_either_number(name, registered)
    family = registered[name]
    typer.echo(f"{name} is a family of components. `eigengraft list {name}` lists its kinds.\n\n{summary(family)}\n")
    typer.echo(f"A member of your own is a class with the base {public_module(family)}.{family.__name__}. It defines:")
    typer.echo(_members_text(family))
    types, aliases = types_in_contract(family), aliases_in_contract(family)
    if types or aliases:
        typer.echo("\nTypes in these signatures:")
    for cls in types:
        typer.echo(f"\n  {constructor_of(cls)}  (`from {public_module(cls)} import {cls.__name__}`)")
        typer.echo(textwrap.indent(inspect.getdoc(cls) or "", "      "))
        if inspect.isabstract(cls):
            typer.echo(textwrap.indent(_members_text(cls), "    "))
    for alias, (definition, meaning) in aliases.items():
        typer.echo(f"\n  {alias} = {definition}\n{textwrap.indent(meaning, '      ')}")
    file = Path(__file__).parents[1] / "examples" / "components" / f"{name}.py"
    if file.is_file():
        typer.echo(f"\nA complete file, with its check: {file}")


def _members_text(cls: type[Any]) -> str:
    """Return the methods, properties and class variables that a subclass may define, with their docstrings."""
    return "\n".join(
        f"\n  {one.signature}{'  (required)' if one.required else ''}\n{textwrap.indent(one.meaning, '      ')}"
        for one in contract_of(cls)
    )


def _about(cls: type[Component]) -> str:
    return first_sentence(summary(cls))


def _registered() -> dict[str, type[Component]]:
    """Return the families of components ("stage", "cadence", ...) by name. Components that imported files define are
    among their members.
    """
    from eigengraft.component import families

    from .. import benches  # noqa: F401  defines the families of benches
    from ..studies import study  # noqa: F401  defines all other families

    return families()


def _print_entries(head: Sequence[str], rows: Iterable[Sequence[str]], purposes: Sequence[Purpose] = ()) -> None:
    """Print a table of rows.

    head: titles of the columns.
    rows: texts of the columns. The first text of a row is the name of its entry.
    purposes: groups of names. For each group, its title and a table of its rows are printed. (): one table is printed.
    """
    by_name = {row[0]: row for row in rows}
    numbers = len(head) - 2 if head[:2] == _RECIPE_HEADS[:2] else 0
    for purpose, names in by_purpose(purposes, by_name):
        if purposes:
            typer.echo(f"\n{typer.style(purpose.title, bold=True)}  {typer.style(purpose.when, italic=True)}")
        own = [(f"{'  ' if purposes else ''}{name}", *by_name[name][1:]) for name in names]
        print_table(head, own, numbers=numbers, expand=True)
