"""Pages and figures that lie elsewhere in the repository: the front page, the changelog, papers, measured figures."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
FIGURES = ("experiments/studies/results", "papers/basis_transport")
PLACES = {
    "docs/": "",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "papers/README.md": "papers/index.md",
}
LINK = re.compile(r"(\]\()([^)\s]+)(\))")


def front_pages() -> dict[str, str]:
    """Return README.md as the home page, CHANGELOG.md and CONTRIBUTING.md, with links as they are in the site."""
    home = "---\nhide: [navigation]\n---\n\n" + _moved(ROOT / "README.md")
    return {
        "index.md": home,
        "changelog.md": _moved(ROOT / "CHANGELOG.md"),
        "contributing.md": _moved(ROOT / "CONTRIBUTING.md"),
    }


def paper_pages() -> dict[str, str]:
    """papers/README.md as papers/index.md, and every Markdown file of a paper's folder at its own path."""
    pages = {"papers/index.md": (ROOT / "papers" / "README.md").read_text(encoding="utf-8")}
    for path in sorted((ROOT / "papers").glob("*/*.md")):
        pages[path.relative_to(ROOT).as_posix()] = path.read_text(encoding="utf-8")
    return pages


def figures() -> dict[str, Path]:
    """Figures in the folders of measured results, by their path in the site."""
    found = [path for folder in FIGURES for path in sorted((ROOT / folder).glob("*.svg"))]
    return {f"assets/measured/{path.name}": path for path in found}


def paper_data() -> dict[str, Path]:
    """Numbers and figures that the pages of the papers refer to, by their path in the site."""
    found = [path for kind in ("json", "svg") for path in sorted((ROOT / "papers").glob(f"*/*.{kind}"))]
    return {path.relative_to(ROOT).as_posix(): path for path in found}


def _moved(path: Path) -> str:
    """The text of a file at the root of the repository with links that start in docs/."""

    def moved(match: re.Match[str]) -> str:
        start = next((old for old in PLACES if match[2].startswith(old)), None)
        target = PLACES[start] + match[2].removeprefix(start) if start is not None else match[2]
        return f"{match[1]}{target}{match[3]}"

    text = LINK.sub(moved, path.read_text(encoding="utf-8"))
    return text.replace('src="docs/', 'src="')
