"""The Markdown pages of the project and the code blocks in them."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = {
    path.relative_to(ROOT).as_posix(): path
    for path in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
}
PAPERS = {path.relative_to(ROOT).as_posix(): path for path in sorted((ROOT / "papers").rglob("*.md"))}
FILE = re.compile(r"# (\w+\.(?:py|yaml))\n")


def text(page: str) -> str:
    return (PAGES | PAPERS)[page].read_text(encoding="utf-8")


def blocks(page: str, language: str) -> list[str]:
    """The code blocks of a page in one language, in order."""
    return re.findall(rf"```{language}\n(.*?)```", text(page), flags=re.DOTALL)


def files(page: str) -> dict[str, str]:
    """Blocks that are a file, by its name: the first line says `# name.py` or `# name.yaml`."""
    found = [*blocks(page, "python"), *blocks(page, "yaml")]
    return {match[1]: block for block in found if (match := FILE.match(block))}


def script(page: str) -> str:
    """The Python blocks of a page that are no file, one after another."""
    return "\n".join(block for block in blocks(page, "python") if not FILE.match(block))


def links(page: str) -> list[str]:
    """Targets of links and pictures that lie in the repository, without anchors."""
    found = re.findall(r"\]\(([^)\s]+)\)", re.sub(r"```.*?```", "", text(page), flags=re.DOTALL))
    return [target.partition("#")[0] for target in found if "://" not in target and not target.startswith("#")]
