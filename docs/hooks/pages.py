"""The pages that mkdocs generates at build time: the front page, the reference, the papers and the changelog."""

from __future__ import annotations

from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

import commands
import components
import gallery
import recipes
import repository

Pages = dict[str, str]
"""Markdown text by path below docs/."""


def reference() -> tuple[Pages, list[Any]]:
    """The generated pages of the reference and their entries in the navigation."""
    pages: Pages = {"reference/commands.md": commands.page()}
    families = {f"reference/{name}.md": text for name, text in components.family_pages().items()}
    declared = {f"reference/{name}.md": text for name, text in components.declaration_pages().items()}
    shipped = {f"reference/recipes/{name}.md": text for name, text in recipes.recipe_pages().items()}
    pages |= families | declared | shipped
    pages["reference/families.md"] = components.index_page()
    pages["reference/recipes/index.md"] = recipes.index_page()
    pages["reference/gallery.md"] = gallery.page()
    navigation = [
        "reference/commands.md",
        *declared,
        {"Families": ["reference/families.md", *families]},
        {"Recipes": ["reference/recipes/index.md", {"Gallery": "reference/gallery.md"}, *shipped]},
    ]
    return pages, navigation


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Appends generated pages to the navigation."""
    assert config.nav is not None
    pages, navigation = reference()
    section = next(entry["Reference"] for entry in config.nav if "Reference" in entry)
    section.extend(navigation)
    papers = repository.paper_pages()
    config.nav.append({"Papers": ["papers/index.md", *(path for path in papers if path.endswith("/README.md"))]})
    config.nav.append({"Changelog": "changelog.md"})
    config.extra["generated"] = pages | papers | repository.front_pages()
    return config


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Turns links of the repository into links of the site."""
    return repository.links_in_site(markdown, page.file.src_uri)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the generated pages and the figures that lie beside what they were measured with."""
    for path, text in config.extra.pop("generated").items():
        files.append(File.generated(config, path, content=text))
    for path, source in (repository.figures() | repository.paper_data()).items():
        files.append(File.generated(config, path, abs_src_path=str(source)))
    return files
