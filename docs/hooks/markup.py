"""Plain text of docstrings and descriptions as Markdown that shows it as it is."""

from __future__ import annotations

import re
from html import escape

SPECIAL = str.maketrans({char: f"&#{ord(char)};" for char in "\\*_[]|^~$#"})


def inline(text: str) -> str:
    """One line of prose: `code` in backticks becomes code, everything else stays what it is."""
    pieces = re.split(r"``?([^`]+)``?", " ".join(text.split()))
    plain = [escape(piece, quote=False).translate(SPECIAL) for piece in pieces]
    return "".join(f"<code>{piece}</code>" if index % 2 else piece for index, piece in enumerate(plain))


def docstring(text: str, formula_first: bool = True) -> str:
    """The first paragraph set off as the formula, and so every one that is aligned or has arrows; others as prose."""
    blocks = []
    for index, paragraph in enumerate(re.split(r"\n\s*\n", text.strip())):
        aligned = "<-" in paragraph or re.search(r"\S {2,}\S", paragraph) is not None
        formula = aligned or (formula_first and index == 0)
        blocks.append(f'<pre class="formula">{escape(paragraph)}</pre>' if formula else prose(paragraph))
    return "\n".join(blocks)


def prose(paragraph: str) -> str:
    """A paragraph; lines that explain a field or a value, "transport: ...", begin anew."""
    lines = re.split(r"\n(?=[a-z_]+(?:, [a-z_]+)*(?: `[^`]+`)?: )", paragraph)
    return "<p>" + "<br>\n".join(map(inline, lines)) + "</p>"


def table(head: list[str], rows: list[list[str]]) -> str:
    """A Markdown table of cells that are Markdown already."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)
