"""The gallery of shipped recipes: for each recipe its loss on two tasks of the laptop track, its bytes and its cost."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping
from functools import cache

import eigengraft
from markup import inline
from measured import ROOT, gpu, measured_text, memory, milliseconds, reason_not_run, runs, steps_of, task_scores

BUDGETS = ROOT / "tests" / "gpu" / "budgets.csv"
TASKS = {"python": "Python sources", "digits": "handwritten digits"}
"""Tasks in the pictures, by their name in the results, with their caption."""
BASELINE = "adamw"
WIDTH, HEIGHT = 160, 76
"""Size of one picture in pixels."""
HEAD = """# Gallery

Each picture has the validation loss of a recipe (orange) and of AdamW (gray) over the steps of a task of the
[laptop track](../papers/laptop_track/README.md). It is the mean of three seeds at the best learning rate of a search.
The axis of losses is logarithmic, and the same for all recipes. A card without pictures says why the recipe was not
run.

- **state**: bytes of state per parameter of GPT-2 small in float32.
- **traffic**: memory that a step between two refreshes reads and writes on an accelerator, as a multiple of the
  parameters' bytes. It is counted on GPT-2 small with a simulated accelerator.
- **≥ ms**: counted time of the optimizer in a step of GPT-2 small on one H100,
  [a lower bound](../papers/laptop_track/README.md#counted-cost). In brackets is the time that was
  [measured](../gpu.md#steps) on another card, with its name.
- **steps**: steps to the track's target loss, of 200, on the two tasks.
"""

Curve = Mapping[int, float]
"""Validation loss by step."""


def page() -> str:
    """Return the page: a card for each recipe."""
    cards = "\n".join(map(card, eigengraft.shipped_recipes()))
    return f'{HEAD}\n<div class="gallery">\n{cards}\n</div>\n'


def card(name: str) -> str:
    """Return the HTML of one recipe: name, summary, two pictures or why there are none, and up to four numbers."""
    about = (eigengraft.load_recipe(name).about or "").partition(" (")[0]
    if curves(name):
        pictures = "".join(
            f"<figure>{picture(task, name)}<figcaption>{caption}</figcaption></figure>"
            for task, caption in TASKS.items()
        )
    else:
        pictures = f"<p>{inline(reason_not_run(name))}</p>"
    traffic = traffics().get(name)
    facts = [f"state {memory(name):.1f}", f"traffic {traffic:.0f}" if traffic is not None else ""]
    measured = measured_text(name) and f" ({measured_text(name)} ms on {gpu().card})"
    facts.append(f"≥ {milliseconds(name):.3g} ms{measured}")
    if curves(name):
        facts.append(f"steps {' / '.join(steps_of(task_scores(name)[task]) for task in TASKS)}")
    return (
        f'<div class="card"><a href="recipes/{name}.html"><code>{name}</code></a><p>{inline(about)}</p>'
        f"<div>{pictures}</div><p>{' · '.join(filter(None, facts))}</p></div>"
    )


@cache
def curves(name: str) -> dict[str, Curve]:
    """Return the mean curve of a recipe for each task in the pictures; {} if one of them was not run."""
    found = {}
    for task in TASKS:
        seeds = [dict(zip(*run.numbers["curve"], strict=True)) for run in runs(name).get(task, ())]
        steps = [
            step for step in (seeds[0] if seeds else {}) if all(seed.get(step, math.inf) < math.inf for seed in seeds)
        ]
        found[task] = {step: sum(seed[step] for seed in seeds) / len(seeds) for step in steps}
    return found if all(found.values()) else {}


@cache
def limits(task: str) -> tuple[float, float]:
    """Return the range of losses in the pictures of a task: from the best of all recipes to AdamW's first."""
    shown = [curves(name)[task] for name in eigengraft.shipped_recipes() if curves(name)]
    return min(min(curve.values()) for curve in shown), next(iter(curves(BASELINE)[task].values())) * 1.1


def picture(task: str, name: str) -> str:
    """Return an SVG with the curves of a recipe and of AdamW on a task."""
    low, high = limits(task)

    def points(curve: Curve) -> str:
        last = max(curve)
        places = []
        for step, loss in curve.items():
            height = math.log(high / min(max(loss, low), high)) / math.log(high / low)
            places.append(f"{4 + step / last * (WIDTH - 8):.1f},{4 + height * (HEIGHT - 8):.1f}")
        return " ".join(places)

    lines = [(curves(BASELINE)[task], "baseline")] + [(curves(name)[task], "own")] * (name != BASELINE)
    drawn = "".join(f'<polyline class="{kind}" points="{points(curve)}"/>' for curve, kind in lines)
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="loss of {name}, {task}">{drawn}</svg>'


@cache
def traffics() -> dict[str, float]:
    """Return the traffic of a steady step by recipe, from the table of budgets that the tests check."""
    with BUDGETS.open(encoding="utf-8", newline="") as file:
        return {row["recipe"]: float(row["traffic"]) for row in csv.DictReader(file)}
