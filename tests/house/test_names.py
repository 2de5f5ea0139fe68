"""A public name is defined in one module, so that a reader who searches for it finds one thing."""

import ast
from collections.abc import Iterator, Mapping

import pytest

from .test_house import sources

SHARED: dict[str, str] = {}
"""Names that several modules define, and why they may."""


def definitions(source: str) -> Iterator[str]:
    """Public names that a module defines at its top level: classes, functions, constants and aliases."""
    for node in ast.parse(source).body:
        names: list[str] = []
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names = [node.name]
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = [name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)]
        yield from (name for name in names if not name.startswith("_"))


def defined_twice(modules: Mapping[str, str]) -> dict[str, list[str]]:
    """The modules of each public name that more than one module defines."""
    found: dict[str, list[str]] = {}
    for module, source in modules.items():
        for name in set(definitions(source)):
            found.setdefault(name, []).append(module)
    return {name: places for name, places in found.items() if len(places) > 1}


def test_each_public_name_is_defined_in_one_module() -> None:
    found = defined_twice({module: path.read_text() for module, path in sources().items()})
    assert {name: places for name, places in found.items() if name not in SHARED} == {}
    assert set(SHARED) <= set(found), "SHARED lists a name that is defined once"


@pytest.mark.parametrize(
    "text",
    [
        "class Name:\n    pass",
        "def Name(): ...",
        "Name = 1",
        "Name: int = 1",
        "(Other, Name) = 1, 2",
        "Other = Name = 1",
    ],
)
def test_the_checker_sees_every_kind_of_definition(text: str) -> None:
    assert defined_twice({"one": text, "two": "Name = 2"}) == {"Name": ["one", "two"]}


@pytest.mark.parametrize(
    "text",
    ["_Name = 1", "def f():\n    Name = 1", "class K:\n    Name = 1", "from x import Name", "other.Name = 1", "Name"],
)
def test_the_checker_passes_what_defines_no_public_name(text: str) -> None:
    assert defined_twice({"one": text, "two": "Name = 2"}) == {}
