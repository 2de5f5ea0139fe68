"""Pages and figures from elsewhere in the repository, and the links of all pages that are not generated.

Links are written for the repository, where they can be followed in a clone. `links_in_site` turns them into links of
the site. A link to a source file becomes a link to the generated page that describes it.
"""

from __future__ import annotations

import inspect
import posixpath
import re
from functools import cache
from pathlib import Path

import components
import eigengraft

ROOT = Path(__file__).parents[2]
FIGURES = ("experiments/studies/results", "papers/basis_transport")
MOVED = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "papers/README.md": "papers/index.md",
}
"""Pages with another path in the site than in the repository."""
LINK = re.compile(r"(\]\(|\bsrc=\")([^)#\s\"]+)(#[^)\s\"]*)?(?=[)\"])")
"""Start, path and fragment of a link or picture."""


def front_pages() -> dict[str, str]:
    """Return README.md as the home page, CHANGELOG.md and CONTRIBUTING.md, by their path in the site."""
    pages = {site: (ROOT / path).read_text(encoding="utf-8") for path, site in MOVED.items() if "/" not in path}
    return pages | {"index.md": "---\nhide: [navigation]\n---\n\n" + pages["index.md"]}


def paper_pages() -> dict[str, str]:
    """Return every Markdown file of papers/ by its path in the site."""
    found = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "papers").rglob("*.md"))
    return {MOVED.get(path, path): (ROOT / path).read_text(encoding="utf-8") for path in found}


def figures() -> dict[str, Path]:
    """Return figures in the folders of measured results by their path in the site."""
    found = [path for folder in FIGURES for path in sorted((ROOT / folder).glob("*.svg"))]
    return {f"assets/measured/{path.name}": path for path in found}


def paper_data() -> dict[str, Path]:
    """Return numbers and figures that the pages of the papers refer to, by their path in the site."""
    found = [path for kind in ("csv", "json", "svg", "yaml") for path in sorted((ROOT / "papers").glob(f"*/*.{kind}"))]
    return {path.relative_to(ROOT).as_posix(): path for path in found}


def links_in_site(text: str, page: str) -> str:
    """Return the Markdown text of a page of the site with the links of the repository turned into those of the site.

    page: path of the page in the site. The text of a generated page is returned unchanged.
    """
    names = {site: path for path, site in MOVED.items()}
    source = names.get(page, page if page.startswith("papers/") else f"docs/{page}")
    if not (ROOT / source).is_file():
        return text

    def turned(match: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), match[2]))
        target = _in_site(path, match[3] or "")
        return match[0] if target is None else match[1] + posixpath.relpath(target, posixpath.dirname(page) or ".")

    return LINK.sub(turned, text)


def _in_site(path: str, fragment: str) -> str | None:
    """Return the path in the site, with its fragment, of a path in the repository; None if it has no page."""
    described = source_pages().get(path + fragment)
    if described is not None or not (ROOT / path).exists():
        return described
    moved = MOVED | {file.relative_to(ROOT).as_posix(): site for site, file in figures().items()}
    return moved.get(path, path.removeprefix("docs/")) + fragment


@cache
def source_pages() -> dict[str, str]:
    """Return the generated page that describes a source file, by the path in links to the file.

    A family or declaration is described by its class, with the name as fragment: `preconditioners/base.py#stage`.
    A worked file of a family is part of the page of the family.
    """
    pages = {"optimizers/recipe/shipped": "reference/recipes/index.md"}
    pages["src/eigengraft/component.py"] = "reference/families.md"
    for name in eigengraft.shipped_recipes():
        pages[f"optimizers/recipe/shipped/{name}.yaml"] = f"reference/recipes/{name}.md"
    for name, family in components.shipped_families().items():
        pages[f"{_file(family)}#{name}"] = f"reference/{name}.md"
    for page, (_, classes) in components.DECLARATIONS.items():
        for name, cls in {cls.__name__.lower(): cls for cls in classes}.items():
            pages[f"{_file(cls)}#{name}"] = f"reference/{page}.md#{name}"
    for path in components.EXAMPLES.glob("*.py"):
        pages[path.relative_to(ROOT).as_posix()] = f"reference/{path.stem}.md#own"
    return pages


def _file(cls: type) -> str:
    """Return the path in the repository of the file that defines a class."""
    return Path(inspect.getsourcefile(cls) or "").resolve().relative_to(ROOT).as_posix()
