"""Plain text of docstrings and descriptions as Markdown that shows it as it is."""

from __future__ import annotations

import re
from html import escape

SPECIAL = str.maketrans({char: f"&#{ord(char)};" for char in "\\*_[]|^~$#"})

FORMULA = re.compile(r"->|[=^|]|\b\w+_[a-z0-9]\b|^(\(.*\)|\S+) [/*] ")
"""Operators and indices that make a first paragraph a formula."""


def inline(text: str) -> str:
    """One line of prose: `code` in backticks becomes code, everything else stays what it is."""
    pieces = re.split(r"``?([^`]+)``?", " ".join(text.split()))
    plain = [escape(piece, quote=False).translate(SPECIAL) for piece in pieces]
    return "".join(f"<code>{piece}</code>" if index % 2 else piece for index, piece in enumerate(plain))


def docstring(text: str, formula_first: bool = True) -> str:
    """Return HTML of a docstring.

    Formulas and aligned paragraphs stay as typed. Four or more rows of three columns become a table, the rest prose.

    formula_first: True if a first paragraph with an operator is a formula, as in the docstrings of components.
    """
    blocks = []
    for index, paragraph in enumerate(re.split(r"\n\s*\n", text.strip())):
        rows = [re.split(r"\s{2,}", line.strip()) for line in paragraph.splitlines()]
        sentences = re.search(r"\w[.] [A-Z]", paragraph) and min(map(len, paragraph.splitlines()[:-1]), default=0) >= 85
        aligned = not sentences and ("<-" in paragraph or any(len(row) > 1 for row in rows))
        if len(rows) > 3 and all(len(row) == 3 for row in rows):
            blocks.append(aligned_table(rows))
        elif aligned or (formula_first and index == 0 and FORMULA.search(paragraph)):
            blocks.append(f'<pre class="formula">{escape(paragraph.replace("`", ""))}</pre>')
        else:
            blocks.append(prose(paragraph))
    return "\n".join(blocks)


def aligned_table(rows: list[list[str]]) -> str:
    """Return an HTML table without a head. The first cell of a row is code."""
    lines = [[f"<code>{escape(first)}</code>", *map(inline, rest)] for first, *rest in rows]
    return "<table>" + "".join(f"<tr><td>{'</td><td>'.join(cells)}</td></tr>" for cells in lines) + "</table>"


def prose(paragraph: str) -> str:
    """Return a paragraph in which every line that explains a field or a value, "transport: ...", begins anew.

    A wrapped line may begin so by chance: it begins anew only if the line before is short or ends a sentence.
    """
    lines = re.split(r"\n(?=[a-z_]+(?:, [a-z_]+)*(?: `[^`]+`)?: )", paragraph)
    joined = [lines[0]]
    for line in lines[1:]:
        before = joined[-1].splitlines()[-1]
        if len(before) >= 70 and before[-1] not in ".:;)":
            joined[-1] += "\n" + line
        else:
            joined.append(line)
    return "<p>" + "<br>\n".join(map(inline, joined)) + "</p>"


def table(head: list[str], rows: list[list[str]]) -> str:
    """A Markdown table of cells that are Markdown already."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)
