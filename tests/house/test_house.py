"""The plan of the house, read from the source: who may import whom, which packages exist, what a file may hold."""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("preconditioners", "quantization", "distributed", "optimizers", "experiments", "hosts")
GROUND, FACE, TESTING, DOOR = "ground floor", "face", "testing", "__main__"
# Rooms on one floor never import each other; everything else may import only from lower floors.
FLOORS = (
    {GROUND},
    {"preconditioners", "quantization", "distributed"},
    {"optimizers"},
    {FACE},
    {"experiments", "hosts"},
    {TESTING},
    {DOOR},
)
CORE_LIBRARIES = {"torch", "pydantic", "pydantic_core", "numpy", "greenlet", "typing_extensions"}
PUBLIC = {"Component", "Optimizer", "Recipe", "RecipeError", "compose", "load_recipe", "shipped_recipes"}
# A machine's own paths and the hosts of package registries have no place in the project.
FORBIDDEN = re.compile(r"(?<![\w.~$)}])/(home|root|work|opt|tmp|mnt|srv|Users)/|pypi[.]org|python[h]osted")
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def sources() -> dict[str, Path]:
    """Every module of the library by its dotted name; symlinks are not followed, so each file is seen once."""
    base = ROOT / "src" / "eigengraft"
    found = {"eigengraft." + path.stem: path for path in base.glob("*.py")}
    for folder in (TESTING, "blocking", "numerics"):
        found |= {f"eigengraft.{folder}.{path.stem}": path for path in (base / folder).glob("*.py")}
    for room in ROOMS:
        for path in (ROOT / room).rglob("*.py"):
            if path.parent.name == "examples":  # what users write, in their place: read from files, never imported
                continue
            found[".".join(["eigengraft", *path.relative_to(ROOT).with_suffix("").parts])] = path
    return {name.removesuffix(".__init__"): path for name, path in sorted(found.items())}


def room_of(module: str) -> str:
    parts = module.split(".")
    if len(parts) == 1:
        return FACE
    if parts[1] in (TESTING, DOOR):
        return parts[1]
    return parts[1] if parts[1] in ROOMS else GROUND


def floor_of(room: str) -> int:
    return next(level for level, rooms in enumerate(FLOORS) if room in rooms)


def imports(tree: ast.Module, module: str, is_package: bool) -> Iterator[tuple[str, bool, int]]:
    """(absolute name, written relatively, line) of all imports, those inside functions and `TYPE_CHECKING` included."""
    package = module.split(".") if is_package else module.split(".")[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, False, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            base = [*base, *(node.module or "").split(".")] if node.module else base
            # `from package import name`: the name may be a module, and only then does it say which room is meant
            if node.module is None or base == ["eigengraft"]:
                yield from ((".".join([*base, alias.name]), node.level > 0, node.lineno) for alias in node.names)
            else:
                yield ".".join(base), node.level > 0, node.lineno


def target_room(name: str, modules: Iterable[str]) -> str:
    """The room that an imported `eigengraft...` name lies in; a name that is no module belongs to the face."""
    head = ".".join(name.split(".")[:2])
    return room_of(head) if head.split(".")[-1] in (*ROOMS, TESTING) or head in modules else FACE


def violations(modules: dict[str, tuple[str, bool]]) -> list[str]:
    """Faults of a house given as {module: (source, whether it is a package)}, one line each."""
    faults = []
    for module, (source, is_package) in modules.items():
        for name, relative, line in imports(ast.parse(source), module, is_package):
            fault = _fault(module, name, relative, modules)
            if fault:
                faults.append(f"{module}:{line} imports {name}: {fault}")
    return faults


def _fault(module: str, name: str, relative: bool, modules: Iterable[str]) -> str | None:
    if name.split(".")[0] in (*ROOMS, "papers", "tests", "src"):
        return "a folder of the checkout is reached as `eigengraft.<room>` or not at all"
    if name.split(".")[0] != "eigengraft":
        return None
    here, there = room_of(module), target_room(name, modules)
    if here == there or (here, there) == (FACE, GROUND):
        return None if relative or here in (GROUND, FACE) else "inside a room imports are relative"
    if relative:
        return "between rooms imports are absolute"
    if floor_of(there) >= floor_of(here):
        return f"{here} may import only from the floors below it, not from {there}"
    return None


def library() -> dict[str, tuple[str, bool]]:
    return {name: (path.read_text(), path.name == "__init__.py") for name, path in sources().items()}


def house(**files: str) -> dict[str, tuple[str, bool]]:
    """A small house for the checker itself: `a__b="..."` is module eigengraft.a.b."""
    base = {"eigengraft": ("", True), "eigengraft.component": ("", False)}
    rooms = {f"eigengraft.{room}": ("", True) for room in ROOMS}
    return base | rooms | {"eigengraft." + name.replace("__", "."): (text, False) for name, text in files.items()}


def test_each_module_imports_only_from_lower_floors() -> None:
    assert violations(library()) == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("optimizers__composer", "from eigengraft.preconditioners.base import Stage"),
        ("optimizers__composer", "from .recipe import Recipe"),
        ("preconditioners__diagonal", "from .base import Stage\nfrom eigengraft.component import Component"),
        ("preconditioners__roots__eigh", "from ..base import Stage"),
        ("experiments__cli", "import eigengraft\nfrom eigengraft import compose, load_recipe"),
        ("experiments__cli", "from eigengraft.optimizers import composer"),
        ("slots", "from .component import Component\nimport torch.distributed\nfrom torch import distributed"),
    ],
)
def test_the_checker_accepts_what_the_plan_allows(module: str, source: str) -> None:
    assert violations(house(**{module: source})) == []


@pytest.mark.parametrize(
    ("module", "source", "fault"),
    [
        ("slots", "from eigengraft.preconditioners.base import Stage", "floors below"),
        ("slots", "from eigengraft import preconditioners", "floors below"),
        ("preconditioners__base", "import eigengraft.quantization", "floors below"),
        ("preconditioners__base", "from eigengraft.distributed.blocks import Block", "floors below"),
        ("distributed__blocks", "from eigengraft.preconditioners.base import Stage", "floors below"),
        ("quantization__int4", "def f():\n    from eigengraft.optimizers.recipe import Recipe", "floors below"),
        ("preconditioners__base", "from eigengraft import Recipe", "floors below"),
        ("optimizers__composer", "from eigengraft.experiments import cli", "floors below"),
        ("experiments__cli", "from eigengraft.testing import check_task", "floors below"),
        ("slots", "def f():\n    from eigengraft.testing.laws import LawError", "floors below"),
        ("optimizers__composer", "import eigengraft", "floors below"),
        ("optimizers__composer", "from eigengraft.optimizers.recipe import Recipe", "relative"),
        ("optimizers__composer", "from ..preconditioners.base import Stage", "absolute"),
        ("optimizers__composer", "from ..component import Component", "absolute"),
        ("optimizers__composer", "from .. import preconditioners", "absolute"),
        ("optimizers__composer", "import preconditioners.base", "checkout"),
        ("optimizers__composer", "from distributed import Client", "checkout"),
        ("experiments__cli", "from papers.soap import claim", "checkout"),
    ],
)
def test_the_checker_finds_what_the_plan_forbids(module: str, source: str, fault: str) -> None:
    found = violations(house(**{module: source}))
    assert len(found) == 1 and fault in found[0]


def test_only_experiments_and_hosts_need_more_than_the_runtime_dependencies() -> None:
    assert PYPROJECT["project"]["dependencies"] == ["torch", "pydantic>=2.13", "numpy", "greenlet"]
    allowed = CORE_LIBRARIES | set(sys.stdlib_module_names) | {"eigengraft"}
    strangers = []
    for module, path in sources().items():
        if room_of(module) in ("experiments", "hosts"):
            continue
        tree = ast.parse(path.read_text())
        top = ast.Module([node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)], [])
        names = {name for name, relative, _ in imports(top, module, path.name == "__init__.py") if not relative}
        strangers += [f"{module} imports {name}" for name in names if name.split(".")[0] not in allowed]
    assert strangers == []


def test_packages_are_complete() -> None:
    declared = PYPROJECT["tool"]["setuptools"]["packages"]
    modules = sources()
    packages = {name for name, path in modules.items() if path.name == "__init__.py"}
    holding = {".".join(["eigengraft", *path.parent.relative_to(ROOT).parts]) for path in modules.values()}
    holding = {name.replace(".src.eigengraft", "") for name in holding}
    assert sorted(declared) == sorted(set(declared))
    assert set(declared) == holding, "pyproject.toml: `packages` lists every folder that holds a module"
    assert holding - packages <= {"eigengraft.distributed"}, "a folder with modules needs an __init__.py"
    assert set(PYPROJECT["tool"]["setuptools"]["package-dir"]) == {"eigengraft", *(f"eigengraft.{r}" for r in ROOMS)}


def test_distributed_stays_a_namespace_folder() -> None:
    assert (ROOT / "distributed").is_dir()
    assert not (ROOT / "distributed" / "__init__.py").exists()


@pytest.mark.parametrize("room", ROOMS)
def test_type_checkers_and_bare_checkouts_reach_each_room_by_a_symlink(room: str) -> None:
    link = ROOT / "src" / "eigengraft" / room
    assert link.is_symlink() and link.readlink() == Path("..", "..", room)


def test_no_file_names_a_machine_or_a_registry() -> None:
    suffixes = {".py", ".md", ".toml", ".txt", ".yaml", ".json", ".html", ".jinja", ""}
    folders = [ROOT / name for name in (*ROOMS, "src", "papers", "tests", "docs", ".ci")]
    files = [path for folder in folders for path in folder.rglob("*") if path.suffix in suffixes]
    files += [path for path in ROOT.iterdir() if path.suffix in suffixes]
    texts = {path: path.read_text() for path in files if path.is_file() and path.stat().st_size < 1_000_000}
    assert [f"{path.relative_to(ROOT)}: {m[0]}" for path, text in texts.items() for m in FORBIDDEN.finditer(text)] == []


@pytest.mark.parametrize("parts", [("", "home", "me"), ("file = '", "work", "x"), ("https:", "", "pypi" + ".org", "")])
def test_the_search_for_machine_paths_finds_them(parts: tuple[str, ...]) -> None:
    assert FORBIDDEN.search("/".join(parts))


@pytest.mark.slow
def test_public_names_and_what_importing_them_brings() -> None:
    code = """
import sys
extras = ["typer", "rich", "ruamel", "matplotlib", "sklearn", "scipy"]
sys.modules.update(dict.fromkeys(extras))  # importing any of them now fails
import eigengraft
assert "torch" not in sys.modules, "names are imported when they are asked for"
import torch
public = {name for name in dir(eigengraft) if not name.startswith("_")}
assert not any(type(getattr(eigengraft, name)) is type(sys) for name in public)
print(*sorted(public))
assert not any(name.startswith("eigengraft.experiments") for name in sys.modules)
layer = torch.nn.Linear(3, 2)
optimizer = eigengraft.Optimizer(layer.named_parameters(), recipe="soap_fitted", lr=1e-2)
for _ in range(3):
    optimizer.zero_grad()
    layer(torch.eye(3)).square().sum().backward()
    optimizer.step()
optimizer.load_state_dict(optimizer.state_dict())
assert "torch._dynamo" not in sys.modules, "importing torch.compile takes as long as importing torch"
"""
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment(), capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    names = set(run.stdout.split())
    assert names >= PUBLIC
    assert names == exported((ROOT / "src" / "eigengraft" / "__init__.py").read_text())


def exported(source: str) -> set[str]:
    """Names that `__init__` imports for type checkers, which is all that they know of the public names."""
    (block,) = (node for node in ast.parse(source).body if isinstance(node, ast.If))
    return {alias.name for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names}


def environment() -> dict[str, str]:
    return {"PYTHONPATH": str(ROOT / "src"), "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1", "PATH": ""}
