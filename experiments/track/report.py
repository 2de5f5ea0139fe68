"""The page of a track, a set of small tasks on which recipes race to a target loss.

It has tables of steps, cost and learning rates, the agreement with published rankings, and a figure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray
from pydantic import Field

from eigengraft.component import Component, validated
from eigengraft.optimizers.recipe.loading import read_yaml

from ..reports.figures import INK, stroke, style_axes, styles_of
from ..reports.tables import format_rate, markdown_table
from ..reproduction.pages import renewed
from .cost import COUNTED_MODELS, H100, TOKENS, optimizer_ms, step_costs
from .track import (
    WORST_RATIO,
    EntryRuns,
    Scores,
    TaskScore,
    Track,
    profile,
    profile_score,
    ratios,
    read_entries,
    read_table,
    scores,
)

DRAWN, BASELINE = 8, "adamw"
"""Number of best entries in the figure, and the entry that is always in it."""
PUBLISHED = "published.yaml"
"""Name of the file with published rankings in the folder of a track."""
RESAMPLES = 2000
"""Number of bootstrap resamples from which the interval of a rank correlation is computed."""
EMPTY_PAGE = "# Track\n\n" + "\n".join(
    f"## {title}\n\n<!-- results: {name} -->\n<!-- end of results -->\n"
    for name, title in {
        "steps": "Steps to the target",
        "cost": "Counted cost",
        "rates": "Learning rates",
        "published": "Published rankings",
    }.items()
)
"""Initial page of a folder without a page: headings, and the markers of all tables."""


class Ranking(Component):
    """A published ranking of methods, which are entries of a track (a set of small tasks on which recipes are
    compared).
    """

    source: str = Field(min_length=1, description="paper or repository in which the ranking was published")
    ranks: str = Field(
        min_length=1, description="number by which methods are ranked, and the models on which it was measured"
    )
    entries: dict[str, float] = Field(min_length=2, description="entry -> number; the smallest number is the best")


def read_rankings(folder: Path) -> dict[str, Ranking]:
    """Return the published rankings of optimizers in the file PUBLISHED of a track's folder, by name.

    Return {} if there is no such file. Raise RecipeError if its content is not valid.
    """
    path = folder / PUBLISHED
    return {k: validated(Ranking, v, k) for k, v in read_yaml(path).items()} if path.is_file() else {}


@dataclass(frozen=True)
class Standing:
    """All entries in the folder of a track with their scores. An entry is a recipe that was run on all tasks.

    recipes: entry -> recipe without its learning rate.
    scores: entry -> task -> steps and seconds to the target.
    costs: model -> entry -> time of a step with the model, divided by that of AdamW. The time is counted, not measured:
        it is computed from operations and bytes (`step_ms`).
    profiles: kind of score -> entry -> score from 0 to 1 (`profile_score`). An entry that needs least on every task has
        1. For the kind "" the score compares steps to the target. For the kind that is the name of a model, it compares
        steps times the cost of a step with this model (`costs`).
    """

    track: Track
    entries: Mapping[str, EntryRuns]
    recipes: Mapping[str, Mapping[str, Any]]
    scores: Scores
    costs: Mapping[str, Mapping[str, float]]
    profiles: Mapping[str, Mapping[str, float]]

    @property
    def order(self) -> list[str]:
        """Names of the entries, the best score for the steps to the targets first (the kind "" of `profiles`)."""
        return sorted(self.scores, key=lambda name: (-self.profiles[""][name], name))


def standing(track: Track, folder: Path) -> Standing:
    """Return the recipes of a track's folder with their scores and costs. Raises ValueError if results are missing."""
    entries, known = read_entries(track, folder), read_table(folder)
    recipes = {name: {key: value for key, value in known[name].recipe.items() if key != "lr"} for name in entries}
    found = scores(track, entries)
    costs = {model: step_costs(recipes, model) for model in COUNTED_MODELS}
    apart = {"": ratios(found), **{model: ratios(found, own) for model, own in costs.items()}}
    profiles = {key: {name: profile_score(own) for name, own in some.items()} for key, some in apart.items()}
    return Standing(track, entries, recipes, found, costs, profiles)


def track_page(now: Standing, folder: Path) -> dict[Path, str]:
    """Return path and text of a folder's README.md, with new tables between the comments that mark their place."""
    tables = {
        "steps": steps_table(now),
        "cost": cost_table(now),
        "rates": rates_table(now),
        "published": published_table(now, read_rankings(folder)),
    }
    page = folder / "README.md"
    return {page: renewed(page.read_text(encoding="utf-8") if page.is_file() else EMPTY_PAGE, tables, str(page))}


def steps_table(now: Standing) -> str:
    """Return a table with a row for each entry: its scores (`Standing.profiles`), and for each task the steps and
    seconds to the target.

    If the target is not reached, the cell has the final loss.
    """
    goals = [f"{name} to {task.target:g} of {task.experiment['steps']}" for name, task in now.track.tasks.items()]
    heads = ("entry", "profile", *(f"by cost, {title}" for title in COUNTED_MODELS.values()), *goals)
    rows = []
    for name in now.order:
        profiles = [f"{own[name]:.2f}" for own in now.profiles.values()]
        rows.append((f"`{name}`", *profiles, *map(_reached, now.scores[name].values())))
    return markdown_table(heads, rows)


def cost_table(now: Standing) -> str:
    """Return a table with a row for each entry: times that are counted from operations and bytes, not measured.

    For each of COUNTED_MODELS it has the milliseconds of the optimizer in a step, and the time of a step, divided by
    that with AdamW. For each task it has the cost of reaching the target: the number of steps times this quotient for
    the first model.
    """
    first = next(iter(COUNTED_MODELS))
    models = [head for title in COUNTED_MODELS.values() for head in (f"{title}: optimizer ms", "step / AdamW's")]
    heads = ("entry", *models, *(f"{task}, AdamW steps" for task in now.track.tasks))
    rows = []
    for name in sorted(now.scores, key=lambda name: (-now.profiles[first][name], name)):
        cells = [f"`{name}`"]
        for model, costs in now.costs.items():
            cells += [f"{optimizer_ms(now.recipes[name], model):.3g}", f"{costs[name]:.3f}"]
        for one in now.scores[name].values():
            cells.append(f"{one.steps * now.costs[first][name]:.0f}" if one.steps < math.inf else "no")
        rows.append(tuple(cells))
    return f"{H100.name}, {TOKENS:,} tokens a step:\n\n{markdown_table(heads, rows)}"


def rates_table(now: Standing) -> str:
    """Return a table with the learning rates that the searches chose, and where and when the runs were made."""
    made = {name: next(iter(runs.values()))[0].numbers for name, runs in now.entries.items()}
    rows = [
        (
            f"`{name}`",
            *(format_rate(one.lr, one.edge) for one in now.scores[name].values()),
            f"{made[name]['date']}, eigengraft {made[name]['eigengraft']}, torch {made[name]['torch']}",
        )
        for name in now.order
    ]
    return markdown_table(("entry", *now.track.tasks, "made"), rows)


def published_table(now: Standing, rankings: Mapping[str, Ranking]) -> str:
    """Return a table that compares published rankings of methods with the rankings of the same methods on this track.

    There is a row for each published ranking. It has the rank correlations of this ranking with two kinds of rankings
    on the track: by steps to the targets, and by the counted cost of these steps.
    """
    heads = ("ranking", "ranked by", "entries", "steps", *(f"cost, {title}" for title in COUNTED_MODELS.values()))
    rows = []
    for name, ranking in rankings.items():
        both = [entry for entry in ranking.entries if entry in now.scores]
        theirs = [ranking.entries[entry] for entry in both]
        found = [_correlated([-own[entry] for entry in both], theirs) for own in now.profiles.values()]
        rows.append((f"{name}: {ranking.source}", ranking.ranks, str(len(both)), *found))
    return markdown_table(heads, rows)


def _correlated(ours: Sequence[float], theirs: Sequence[float]) -> str:
    value, low, high = rank_correlation(ours, theirs)
    return f"{value:+.2f} [{low:+.2f}, {high:+.2f}]"


def rank_correlation(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, float, float]:
    """Return Spearman's rank correlation of two lists of numbers, and the two ends of its 95 % interval.

    The interval is that of a percentile bootstrap over pairs, drawn with a fixed seed. If all numbers of one list are
    equal in a resample, the correlation of this resample counts as 0.

    ours, theirs: numbers of the same entries in the same order, such as the negative score and the published number.
    """
    from scipy.stats import bootstrap, rankdata

    def spearman(x: NDArray[np.float64], y: NDArray[np.float64], axis: int = -1) -> NDArray[np.float64]:
        a, b = (rankdata(values, axis=axis) - (values.shape[axis] + 1) / 2 for values in (x, y))
        size = np.sqrt((a * a).sum(axis) * (b * b).sum(axis))
        return np.asarray((a * b).sum(axis) / np.where(size > 0, size, 1.0))

    pairs = np.asarray(ours, dtype=np.float64), np.asarray(theirs, dtype=np.float64)
    options = {"paired": True, "vectorized": True, "method": "percentile", "n_resamples": RESAMPLES}
    found = bootstrap(pairs, spearman, rng=np.random.default_rng(0), **options).confidence_interval
    return float(spearman(*pairs)), float(found.low), float(found.high)


def draw_profiles(now: Standing) -> Figure:
    """Draw performance profiles of recipes: shares of tasks against a factor tau (Dolan & More 2002).

    In the first diagram, the share is that of the tasks on which a recipe needs at most tau times the fewest steps of
    all recipes. The second diagram has counted cost in place of steps. The best recipes, at most DRAWN of them, and
    AdamW are drawn.
    """
    first, title = next(iter(COUNTED_MODELS.items()))
    figure = Figure(figsize=(9.6, 3.8), layout="constrained")
    shown = [*now.order[:DRAWN], *(name for name in now.order[DRAWN:] if name == BASELINE)]
    labels = {
        "steps, divided by the fewest of all entries": ratios(now.scores),
        f"counted cost at {title}, divided by the least": ratios(now.scores, now.costs[first]),
    }
    for place, (label, apart) in enumerate(labels.items(), start=1):
        axes = figure.add_subplot(1, len(labels), place)
        for down, (name, style) in enumerate(styles_of({name: name for name in shown}).items()):
            at = sorted({1.0, WORST_RATIO, *(one for one in apart[name].values() if one < WORST_RATIO)})
            # Each line is a little lower than the one before, so that lines that coincide stay visible.
            shares = [share - 0.006 * down for share in profile(apart[name], at)]
            own = {**stroke(style), "marker": None}
            axes.plot(at, shares, **own, drawstyle="steps-post", linewidth=1.7, label=name)
        axes.set_xlabel(label)
        axes.set_ylabel("share of tasks")
        axes.set_xlim(1, WORST_RATIO)
        axes.set_ylim(-0.06, 1.04)
        style_axes(axes)
    handles = axes.get_legend_handles_labels()
    figure.legend(*handles, loc="outside right center", fontsize=8.5, labelcolor=INK, frameon=False, handlelength=2.2)
    return figure


def _reached(one: TaskScore) -> str:
    if one.steps < math.inf:
        return f"{one.steps:.0f} ({one.seconds:.1f} s)"
    return f"no ({one.loss:.3f})" if math.isfinite(one.loss) else "diverged"
