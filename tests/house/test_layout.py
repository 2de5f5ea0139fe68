"""Every package says in a sentence what is inside, no modules import each other, and rooms keep their order."""

import ast
from collections.abc import Mapping

import pytest

from .test_house import imports, library, sources

OPTIMIZER_ROOMS = (
    *("isolation", "write", "lr_scale", "recipe", "param_groups"),
    *("stacks", "step", "signals", "state", "checkpoint"),
)
"""Rooms of `optimizers`, each of which imports only from those before it; plan may import from all."""


def circles(modules: Mapping[str, tuple[str, bool]]) -> list[list[str]]:
    """Modules that import each other, directly or through others; imports for types and in functions count."""
    edges = {module: targets(module, *text, modules) for module, text in modules.items()}
    reached = {module: reachable(module, edges) for module in edges}
    groups = {tuple(sorted(b for b in reached[a] if a in reached[b])) for a in edges if a in reached[a]}
    return sorted(list(group) for group in groups)


def targets(module: str, source: str, is_package: bool, modules: Mapping[str, object]) -> set[str]:
    """Modules of the house that this one imports: of `from package import name` the module `name`, if it is one."""
    tree, found = ast.parse(source), {name for name, _, _ in imports(ast.parse(source), module, is_package)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            alone = ast.Module([node], [])
            for base, _, _ in list(imports(alone, module, is_package)):
                named = {f"{base}.{alias.name}" for alias in node.names} & set(modules)
                found = (found - {base}) | named if len(named) == len(node.names) else found | named
    return {name for name in found if name in modules and name != module}


def reachable(start: str, edges: Mapping[str, set[str]]) -> set[str]:
    seen: set[str] = set()
    ahead = list(edges[start])
    while ahead:
        module = ahead.pop()
        if module not in seen:
            seen.add(module)
            ahead += edges[module]
    return seen


def test_no_modules_import_each_other() -> None:
    assert circles(library()) == []


@pytest.mark.parametrize(
    ("modules", "circle"),
    [
        ({"a": "import eigengraft.b", "b": "from . import a"}, ["eigengraft.a", "eigengraft.b"]),
        ({"a": "from .b import X", "b": "def f():\n    from .a import Y"}, ["eigengraft.a", "eigengraft.b"]),
        (
            {
                "a": "if TYPE_CHECKING:\n    from .b import X",
                "b": "from .c import Y",
                "c": "from eigengraft.a import Z",
            },
            ["eigengraft.a", "eigengraft.b", "eigengraft.c"],
        ),
    ],
)
def test_the_checker_finds_circles(modules: dict[str, str], circle: list[str]) -> None:
    house = {"eigengraft": ("", True), **{f"eigengraft.{name}": (text, False) for name, text in modules.items()}}
    assert circles(house) == [circle]


def test_the_checker_passes_two_ways_to_one_module() -> None:
    texts = {"a": "from . import b, c", "b": "from .d import X", "c": "from .d import X", "d": ""}
    assert circles({f"eigengraft.{name}": (text, False) for name, text in texts.items()}) == []


def upward(modules: Mapping[str, tuple[str, bool]]) -> list[str]:
    """Imports from a room of `optimizers` into a later room, or into a module beside the rooms."""
    prefix, rooms, found = "eigengraft.optimizers.", OPTIMIZER_ROOMS, []
    for module, text in modules.items():
        own = module.removeprefix(prefix).split(".")[0]
        if module.startswith(prefix) and own in rooms:
            for target in targets(module, *text, modules):
                other = target.removeprefix(prefix).split(".")[0]
                if target.startswith(prefix) and other not in rooms[: rooms.index(own) + 1]:
                    found.append(f"{module} imports {target}")
    return found


def test_rooms_of_optimizers_import_only_from_earlier_ones() -> None:
    assert upward(library()) == []


@pytest.mark.parametrize("target", ["step.step", "optimizer", "plan.plan"])
def test_an_import_from_a_later_room_is_found(target: str) -> None:
    prefix = "eigengraft.optimizers"
    texts = {
        f"{prefix}.stacks.a": f"from {prefix}.{target} import X",
        f"{prefix}.{target}": "",
        f"{prefix}.write.b": "",
    }
    assert len(upward({name: (text, False) for name, text in texts.items()})) == 1


def test_every_package_says_what_is_inside() -> None:
    packages = {module: path for module, path in sources().items() if path.name == "__init__.py"}
    assert [module for module, path in packages.items() if not ast.get_docstring(ast.parse(path.read_text()))] == []
