"""Numbers of the shipped recipes: scores and runs on the laptop track, and the tables of them on pages of recipes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path

import eigengraft
from eigengraft.experiments.cli.purposes import GOALS
from eigengraft.experiments.track.cost import COUNTED_MODELS, H100, optimizer_ms
from eigengraft.experiments.track.report import BASELINE, Standing, standing
from eigengraft.experiments.track.track import TaskRun, TaskScore, entry_name, load_track
from eigengraft.optimizers.plan.plan import plan
from markup import table

ROOT = Path(__file__).parents[2]
SHAPE = (1024, 1024)
"""Shape of the weight whose bytes of state are shown."""
COUNTED = next(iter(COUNTED_MODELS))
"""Model at which optimizers' steps are counted."""
NEAR_BEST = 0.8
"""Least profile of recipes that count as fast. AdamW has 0.40, and the best recipe 0.95."""
SHOWN = 3
"""Number of recipes that are named for a goal."""


@cache
def track() -> Standing:
    """Return the committed entries of the laptop track with their scores and costs."""
    return standing(load_track(), ROOT / "papers" / "laptop_track")


def task_scores(name: str) -> Mapping[str, TaskScore]:
    """Return task -> score of a recipe; {} if it was not run."""
    return track().scores.get(entry_name(name), {})


@cache
def runs(name: str) -> Mapping[str, Sequence[TaskRun]]:
    """Return task -> runs of a recipe; {} if it was not run."""
    return next((entry.runs for entry in track().entries if entry.name == entry_name(name)), {})


@cache
def state_bytes(name: str) -> float:
    """Return the bytes of state per parameter of one weight matrix. Nothing is allocated."""
    return int(plan(name, [("weight", SHAPE)], (1,)).state.max()) / math.prod(SHAPE)


@cache
def milliseconds(name: str) -> float:
    """Return the counted milliseconds of the optimizer in one step."""
    return optimizer_ms(name, COUNTED)


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
    own, now = task_scores(name), track()
    if not own:
        return f"{counted}\n\nNot run on the [laptop track]({up}../papers/laptop_track/README.md)."
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


@cache
def goals() -> dict[str, tuple[tuple[str, str], ...]]:
    """Return goal -> (name, numbers) of the recipes that the track chooses, the best first, as `purposes.GOALS` has."""
    run = [name for name in eigengraft.shipped_recipes() if task_scores(name)]
    near = [name for name in run if profile_of(name) >= NEAR_BEST]
    least = [name for name in run if profile_of(name) >= profile_of(BASELINE)]
    all_reached = [name for name in run if all(one.steps < math.inf for one in task_scores(name).values())]

    def first(names: Sequence[str], key: Callable[[str], float], text: str) -> tuple[tuple[str, str], ...]:
        chosen = sorted(names, key=lambda name: (key(name), -profile_of(name), name))[:SHOWN]
        return tuple((name, _numbers(name, text)) for name in chosen)

    return {
        "few steps and little time": first(
            run, lambda name: -min(profile_of(name), profile_of(name, COUNTED)), "{steps:.2f}, {time:.2f}"
        ),
        "fewest steps": first(run, lambda name: -profile_of(name), "{steps:.2f}"),
        "least time": first(run, lambda name: -profile_of(name, COUNTED), "{time:.2f}"),
        "few steps and little memory": first(near, state_bytes, "{steps:.2f}, {state:.2f} bytes"),
        "least memory": first(least, state_bytes, "{steps:.2f}, {state:.2f} bytes"),
        "no tuning": first(all_reached, spread_of_rates, "{steps:.2f}, factor {rates:.3g}"),
        "to compare with": ((BASELINE, _numbers(BASELINE, "{steps:.2f}, {time:.2f}, {state:.2f} bytes")),),
    }


def _numbers(name: str, text: str) -> str:
    """Return a text with the profiles, the bytes of state and the spread of learning rates of a recipe."""
    numbers = {"steps": profile_of(name), "time": profile_of(name, COUNTED), "state": state_bytes(name)}
    return text.format(**numbers, rates=spread_of_rates(name))


def spread_of_rates(name: str) -> float:
    """Return the largest over the smallest of the best learning rates of the tasks."""
    rates = [one.lr for one in task_scores(name).values()]
    return max(rates) / min(rates)


def goals_table(link: Callable[[str], str]) -> str:
    """Return the table of goals, with the numbers of each recipe that is named.

    link: function that returns the target of the link to a recipe.
    """
    rows = []
    for goal in GOALS:
        recipes = [f"[`{name}`]({link(name)})" + (f" ({numbers})" if numbers else "") for name, numbers in goal.recipes]
        rows.append([goal.title, ", ".join(recipes), goal.rule])
    return table(["goal", "recipes (measured)", "chosen by"], rows)
