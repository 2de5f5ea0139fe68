"""Numbers of the shipped recipes: scores and runs on the laptop track, and the tables of them on pages of recipes."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import eigengraft
from eigengraft.experiments.cli.purposes import NUMBERS_FILE, RecipeNumbers, goals
from eigengraft.experiments.track.cost import COUNTED_MODELS, H100, optimizer_ms, state_bytes
from eigengraft.experiments.track.report import BASELINE, Standing, standing
from eigengraft.experiments.track.track import EntryRuns, TaskScore, entry_name, load_track, read_table
from eigengraft.optimizers.recipe.loading import shipped
from eigengraft.signals import asking
from markup import table

ROOT = Path(__file__).parents[2]
TRACK = ROOT / "papers" / "laptop_track"
GPU_ROWS = ROOT / "tests" / "gpu" / "results.jsonl"
"""Measurements that `make gpu` wrote, a JSON object in each line."""
COUNTED = next(iter(COUNTED_MODELS))
"""Model at which optimizers' steps and bytes of state are counted."""


@cache
def track() -> Standing:
    """Return the committed entries of the laptop track with their scores and costs."""
    return standing(load_track(), TRACK)


def task_scores(name: str) -> Mapping[str, TaskScore]:
    """Return task -> score of a recipe; {} if it was not run."""
    return track().scores.get(entry_name(name), {})


@cache
def runs(name: str) -> EntryRuns:
    """Return task -> runs of a recipe; {} if it was not run."""
    return track().entries.get(entry_name(name), {})


@cache
def signals(name: str) -> frozenset[str]:
    """Return the signals that stages and constraints of a recipe request."""
    rules = eigengraft.load_recipe(name).rules()
    return frozenset(asking(part for path, rule in rules.items() for part in rule.listeners(path)))


def reason_not_run(name: str, track: str = "the track") -> str:
    """Return a sentence that says why a recipe has no runs on the track, as far as its declaration shows it.

    track: text for the track, such as a link.
    """
    run = [other for other in eigengraft.shipped_recipes() if runs(other)]
    if any(route.match.pair for route in eigengraft.load_recipe(name).routes):
        return f"Not run on {track}, because its models have no adapters, for which this recipe is made."
    missing = signals(name) - frozenset[str]().union(*map(signals, run))
    if missing:
        named = ", ".join(f"`{signal}`" for signal in sorted(missing))
        return f"Not run on {track}, because its tasks do not provide the signal {named}."
    base = shipped()[name].get("base")
    return f"Not run on {track} so far" + (f"; its base `{base}` was." if base in run else ".")


@cache
def memory(name: str) -> float:
    """Return the bytes of state per parameter. Nothing is allocated."""
    return state_bytes(name, COUNTED)


@cache
def milliseconds(name: str) -> float:
    """Return the counted milliseconds of the optimizer in one step."""
    return optimizer_ms(name, COUNTED)


class MeasuredSteps(NamedTuple):
    """Measured steps of recipes on one card.

    card: name of the card.
    rows: candidate -> its measurements. The candidate of a shipped recipe without options is the recipe's name.
    """

    card: str
    rows: Mapping[str, Mapping[str, Any]]

    def milliseconds(self, name: str) -> float | None:
        """Return the mean milliseconds of the optimizer in a step of GPT-2 small, None if it was not measured."""
        return self.rows[name]["total_ms"]["mean"] if name in self.rows else None


@cache
def gpu() -> MeasuredSteps:
    """Return the steps that were measured on a card. docs/gpu.md has the same numbers."""
    rows = [json.loads(line) for line in GPU_ROWS.read_text(encoding="utf-8").splitlines()]
    steps = {row["candidate"]: row for row in rows if row["part"] == "step" and row["own"]}
    return MeasuredSteps(next(row["card"] for row in rows if row["part"] == "machine"), steps)


def measured_text(name: str) -> str:
    """Return the measured milliseconds of the optimizer in a step as text, "" if they were not measured."""
    own = gpu().milliseconds(name)
    return "" if own is None else f"{own:.3g}"


def profile_of(name: str, kind: str = "") -> float:
    """Return the profile of steps of a recipe that was run, or with the name of a model that of counted cost."""
    return track().profiles[kind][entry_name(name)]


def cells(name: str, tasks: Sequence[str]) -> list[str]:
    """Return the measured columns of an index: profile, and on each task steps, final loss and best learning rate."""
    own = task_scores(name)
    if not own:
        return [""] * (1 + 3 * len(tasks))
    numbers = [(steps_of(own[task]), _loss(own[task]), f"{own[task].lr:g}") for task in tasks]
    return [f"{profile_of(name):.2f}", *(cell for row in numbers for cell in row)]


def steps_of(one: TaskScore) -> str:
    """Return the steps to a target as text."""
    return f"{one.steps:.0f}" if one.steps < math.inf else "not reached"


def _loss(one: TaskScore) -> str:
    return f"{one.loss:.3f}" if math.isfinite(one.loss) else "diverged"


def section(name: str, up: str) -> str:
    """Return the measured part of a recipe's page.

    up: path from the page to the folder of the reference.
    """
    counted = (
        f"**Counted time:** {milliseconds(name):.3g} ms for the optimizer in a step of {COUNTED_MODELS[COUNTED]} on "
        f"one {H100.name}, [a lower bound]({up}../papers/laptop_track/README.md#counted-cost)."
    )
    if name in gpu().rows:
        note = gpu().rows[name].get("note", "")
        counted += (
            f"\n\n**Measured time:** {measured_text(name)} ms for the optimizer in a step of {COUNTED_MODELS[COUNTED]} "
            f"on one {gpu().card}, [mean of steps with and without refreshes]({up}../gpu.md#steps)"
            f"{note and f' ({note})'}."
        )
    else:
        counted += f" It was not [measured on a card]({up}../gpu.md#steps); measured steps take longer."
    own, now = task_scores(name), track()
    if not own:
        reason = reason_not_run(name, f"the [laptop track]({up}../papers/laptop_track/README.md)")
        return f"{counted}\n\n{reason}"
    rows = []
    for task, one in own.items():
        rule = now.track.tasks[task]
        best = steps_of(now.scores[BASELINE][task])
        rows.append([task, f"{rule.target:g}", steps_of(one), best, _loss(one), f"{one.lr:g}"])
    head = ["task", "target", "steps", "AdamW's steps", "final loss", "best learning rate"]
    profiles = (
        f"**On the [laptop track]({up}../papers/laptop_track/README.md):** profile {profile_of(name):.2f}, "
        f"by counted cost {profile_of(name, COUNTED):.2f}, AdamW {profile_of(BASELINE):.2f}."
    )
    return f"{counted}\n\n{profiles}\n\n{table(head, rows)}"


def numbers() -> dict[str, RecipeNumbers]:
    """Return the numbers of all shipped recipes, rounded as `purposes.NUMBERS_FILE` has them."""
    found, entries = {}, read_table(TRACK)
    for name in eigengraft.shipped_recipes():
        own, run, accumulate = task_scores(name), list[float | None](), None
        if own:
            rates = [one.lr for one in own.values()]
            reached = all(one.steps < math.inf for one in own.values())
            run = [profile_of(name), profile_of(name, COUNTED), max(rates) / min(rates) if reached else None]
            for tasks in (("digits",), ("python", "documentation")):
                steps = sum(own[task].steps for task in tasks)
                run.append(steps if steps < math.inf else None)
            accumulate = entries[entry_name(name)].accumulate
        own_numbers = (memory(name), milliseconds(name), gpu().milliseconds(name), *run)
        rounded = (None if one is None else float(f"{one:.4g}") for one in own_numbers)
        found[name] = RecipeNumbers(*rounded)._replace(accumulate=accumulate)  # type: ignore[arg-type]
    return found


def numbers_text() -> str:
    """Return the measured card and the numbers of all shipped recipes as JSON, a line for each recipe."""
    lines = (f"{json.dumps(name)}: {json.dumps(list(own))}" for name, own in numbers().items())
    return f'{{"card": {json.dumps(gpu().card)}, "recipes": {{\n' + ",\n".join(lines) + "\n}}\n"


FIRST_CHOICE = ("adamw", "shampoo", "soap", "soap_fitted", "soap_int8", "soap_muon", "muon", "muon_8bit")
"""Recipes that the front page compares."""
TASK_TITLES = {
    "python": "GPT, Python code",
    "documentation": "GPT, English",
    "digits": "CNN, digits",
    "burgers": "PINN, Burgers",
    "sorting": "seq2seq, sorting",
}
"""Titles of the laptop track's tasks on the front page."""


def steps_table(link: Callable[[str], str]) -> str:
    """Return the table of the front page: steps to the targets of the laptop track, time of a step, bytes of state.

    link: function that returns the target of the link to a recipe.
    """
    now = track()
    rows = []
    for name in FIRST_CHOICE:
        steps = [steps_of(task_scores(name)[task]) for task in TASK_TITLES]
        rows.append([f"[`{name}`]({link(name)})", *steps, f"{now.costs[COUNTED][name]:.2f}", f"{memory(name):.1f}"])
    return table(["recipe", *TASK_TITLES.values(), "time of a step", "bytes of state"], rows)


def goals_table(link: Callable[[str], str]) -> str:
    """Return the table of goals, with the numbers of each recipe that is named.

    link: function that returns the target of the link to a recipe.
    """
    rows = []
    for goal in goals():
        recipes = [f"[`{name}`]({link(name)})" + (f" ({numbers})" if numbers else "") for name, numbers in goal.recipes]
        rows.append([goal.title, ", ".join(recipes), goal.rule])
    return table(["goal", "recipes (profiles and numbers)", "chosen by"], rows)


if __name__ == "__main__":
    NUMBERS_FILE.write_text(numbers_text(), encoding="utf-8")
