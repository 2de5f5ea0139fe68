"""Write the best learning rates of the searches to the pages and recipes in which users read them.

python rates.py     renews the last column of the table of recipes in docs/guide/recipes.md, and the words
                    "best on text" beside `lr` in the shipped recipes whose lr was chosen here, from searches.json
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parents[1]
GUIDE, SHIPPED = ROOT / "docs/guide/recipes.md", ROOT / "optimizers/recipe/shipped"
HEAD = "| recipe | what it is | best lr on text |"
BESIDE = "; best on text "
"""Text between the source of an lr and the best rate, in the comment beside `lr`."""


def rates() -> dict[str, float]:
    """Return the best learning rate of each recipe that was searched, by the name of the recipe."""
    return {row["recipe"].replace("-", "/"): row["lr"] for row in json.loads((FOLDER / "searches.json").read_text())}


def with_column(page: str, best: Mapping[str, float]) -> str:
    """Return the page with the best learning rates of the searches in its last column.

    A row has a number for each of its recipes, or one number if the rates of all its recipes are equal.
    """
    before, head, rest = page.partition(HEAD)
    lines = rest.split("\n")
    for i, line in enumerate(lines[1:], start=1):
        if not line.startswith("|"):
            break
        recipes, about = [cell.strip() for cell in line.split("|")[1:3]]
        if i > 1:
            found = [f"{best[name]:g}" if name in best else "-" for name in re.findall(r"`([^`]+)`", recipes)]
            lines[i] = f"| {recipes} | {about} | {', '.join(found if len({*found}) > 1 else found[:1])} |"
    return before + head + "\n".join(lines)


def with_comment(text: str, rate: float | None) -> str:
    """Return the YAML of a recipe with the best learning rate at the end of the comment beside `lr`.

    A recipe whose comment does not say "chosen here" stays as it is. rate: the best rate, None if there was no search.
    """

    def renewed(found: re.Match[str]) -> str:
        line = found[0].split(BESIDE)[0]
        ours = re.search(r"# (lr\b[^;:]*)?chosen here", line)
        return f"{line}{BESIDE}{rate:g}, see docs/guide/recipes.md" if ours and rate is not None else line

    return re.sub(r"^lr: .*$", renewed, text, count=1, flags=re.MULTILINE)


def main() -> None:
    best = rates()
    GUIDE.write_text(with_column(GUIDE.read_text(), best))
    for path in SHIPPED.rglob("*.yaml"):
        name = path.relative_to(SHIPPED).with_suffix("").as_posix()
        path.write_text(with_comment(path.read_text(), best.get(name)))


if __name__ == "__main__":
    main()
