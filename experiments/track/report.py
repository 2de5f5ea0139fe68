"""The table of a track and the figure of its performance profiles."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.figure import Figure

from ..reports.figures import INK, LIGHT, save_figure, style_axes
from ..reports.formatting import format_rate
from ..reproduction.pages import markdown_table
from .entries import EntryRuns
from .scores import WORST_RATIO, TaskScore, profile, profile_score, ratios
from .track import Track

DRAWN, BASELINE = 8, "adamw"
"""How many of the best entries the figure has, and the one that it always has."""


def track_table(track: Track, entries: Sequence[EntryRuns], found: Mapping[str, Mapping[str, TaskScore]]) -> str:
    """A row per entry, the best profile first: steps to the target and seconds, or the loss at the end, and rates."""
    apart = ratios(found)
    order = sorted(found, key=lambda name: (-profile_score(apart[name]), name))
    goals = [f"{name} to {task.target:g} of {task.experiment['steps']}" for name, task in track.tasks.items()]
    steps = markdown_table(
        ("entry", "profile", *goals),
        [(f"`{name}`", f"{profile_score(apart[name]):.2f}", *map(_reached, found[name].values())) for name in order],
    )
    rates = markdown_table(
        ("entry", *track.tasks, "made"),
        [(f"`{name}`", *map(_rate, found[name].values()), _made(entries, name)) for name in order],
    )
    return f"Steps to the target, and seconds:\n\n{steps}\nLearning rates that the searches chose:\n\n{rates}"


def draw_profiles(found: Mapping[str, Mapping[str, TaskScore]]) -> Figure:
    """rho(tau) of the entries with the best profiles, DRAWN of them, and of AdamW."""
    figure = Figure(figsize=(6.0, 3.6), layout="constrained")
    axes = figure.add_subplot()
    apart = ratios(found)
    order = sorted(found, key=lambda name: (-profile_score(apart[name]), name))
    for style, name in enumerate([*order[:DRAWN], *(name for name in order[DRAWN:] if name == BASELINE)]):
        at = sorted({1.0, WORST_RATIO, *(one for one in apart[name].values() if one < WORST_RATIO)})
        dash = "-" if style < len(LIGHT) else (0, (5, 1.5))
        # lines that coincide stay visible: each is a little lower than the one before
        shares = [share - 0.006 * style for share in profile(apart[name], at)]
        colour = LIGHT[style % len(LIGHT)]
        axes.plot(at, shares, drawstyle="steps-post", color=colour, linewidth=1.7, linestyle=dash, label=name)
    axes.set_xlabel("steps, divided by the fewest of all entries")
    axes.set_ylabel("share of tasks")
    axes.set_xlim(1, WORST_RATIO)
    axes.set_ylim(-0.06, 1.04)
    style_axes(axes)
    figure.legend(loc="outside right center", fontsize=8.5, labelcolor=INK, frameon=False, handlelength=2.2)
    return figure


def write_profiles(found: Mapping[str, Mapping[str, TaskScore]], path: Path) -> None:
    """Draw the profiles and save them; the suffix decides the format."""
    save_figure(draw_profiles(found), path)


def _reached(one: TaskScore) -> str:
    if one.steps < math.inf:
        return f"{one.steps:.0f} ({one.seconds:.1f} s)"
    return f"no ({one.loss:.3f})" if math.isfinite(one.loss) else "diverged"


def _rate(one: TaskScore) -> str:
    return format_rate(one.lr, one.edge)


def _made(entries: Sequence[EntryRuns], name: str) -> str:
    made = next(entry.made for entry in entries if entry.name == name)
    return f"{made['date']}, eigengraft {made['eigengraft']}, torch {made['torch']}"
