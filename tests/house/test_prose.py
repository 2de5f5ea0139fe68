"""Docstrings stand alone: an editor shows one without the line above it."""

import ast
import re
from collections.abc import Iterator

import pytest

from .test_house import sources

LEANING = re.compile(r"(Of|And|As|Likewise|The same)\b")
"""First words that lean on the line above."""


def docstrings(source: str) -> Iterator[tuple[int, str]]:
    """(line, text) of the docstrings of modules, classes and functions, and of strings below fields and constants."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        for place, inner in enumerate(node.body):
            documented = place == 0 or isinstance(node.body[place - 1], ast.Assign | ast.AnnAssign)
            text = inner.value.value if isinstance(inner, ast.Expr) and isinstance(inner.value, ast.Constant) else None
            if documented and isinstance(text, str):
                yield inner.lineno, text.strip()


def leaning(source: str) -> list[str]:
    return [f"{line}: {text.splitlines()[0]}" for line, text in docstrings(source) if LEANING.match(text)]


def test_docstrings_stand_alone() -> None:
    assert [f"{module}:{fault}" for module, path in sources().items() for fault in leaning(path.read_text())] == []


@pytest.mark.parametrize(
    "source",
    [
        '"""Of one parameter."""',
        'def f():\n    """And back."""',
        'class K:\n    """As `f`."""',
        'class K:\n    field: int\n    """Likewise."""',
        'X = 1\n"""The same for Y."""',
        'class K:\n    async def f(self):\n        """\n        Of both.\n        """',
    ],
)
def test_the_checker_finds_docstrings_that_lean_on_the_line_above(source: str) -> None:
    assert len(leaning(source)) == 1


@pytest.mark.parametrize(
    "source", ['"""Offsets of rows."""', '"""Assignment of blocks."""', 'f("Of one")', 'X = "Of one"']
)
def test_the_checker_passes_other_words_and_other_strings(source: str) -> None:
    assert leaning(source) == []
