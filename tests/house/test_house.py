"""The packages: which exist, what they need, and what importing them brings.

Who may import whom stands in `pyproject.toml`, as contracts that `make check` reads (import-linter).
"""

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("preconditioners", "quantization", "distributed", "optimizers", "experiments", "hosts")
LOWEST, TESTING = "lowest layer", "testing"
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
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            if "examples" in path.parts:  # what users write, in their place: read from files, never imported
                continue
            found[".".join(["eigengraft", *path.relative_to(ROOT).with_suffix("").parts])] = path
    return {name.removesuffix(".__init__"): path for name, path in sorted(found.items())}


def package_of(module: str) -> str:
    """Return the first folder of a module: a package, `testing`, or the lowest layer for everything else."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in (TESTING, *PACKAGES) else LOWEST


def imported_first(source: str) -> set[str]:
    """Return the packages that a module imports absolutely at its top level, by their first names."""
    found = set()
    for node in ast.parse(source).body:
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.split(".")[0])
    return found


def test_only_experiments_and_hosts_need_more_than_the_runtime_dependencies() -> None:
    assert PYPROJECT["project"]["dependencies"] == ["torch", "pydantic>=2.13", "numpy", "greenlet"]
    allowed = CORE_LIBRARIES | set(sys.stdlib_module_names) | {"eigengraft"}
    strangers = []
    for module, path in sources().items():
        if package_of(module) in ("experiments", "hosts"):
            continue
        strangers += [f"{module} imports {name}" for name in imported_first(path.read_text()) - allowed]
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
    assert set(PYPROJECT["tool"]["setuptools"]["package-dir"]) == {
        "eigengraft",
        *(f"eigengraft.{name}" for name in PACKAGES),
    }


def test_distributed_stays_a_namespace_folder() -> None:
    assert (ROOT / "distributed").is_dir()
    assert not (ROOT / "distributed" / "__init__.py").exists()


@pytest.mark.parametrize("package", PACKAGES)
def test_type_checkers_and_bare_checkouts_reach_each_package_by_a_symlink(package: str) -> None:
    link = ROOT / "src" / "eigengraft" / package
    assert link.is_symlink() and link.readlink() == Path("..", "..", package)


def test_no_file_names_a_machine_or_a_registry() -> None:
    suffixes = {".py", ".md", ".toml", ".txt", ".yaml", ".json", ".html", ".jinja", ""}
    folders = [ROOT / name for name in (*PACKAGES, "src", "papers", "tests", "docs", ".ci")]
    files = [path for folder in folders for path in folder.rglob("*") if path.suffix in suffixes]
    files += [path for path in ROOT.iterdir() if path.suffix in suffixes and path.name != ".git"]  # a worktree's file
    texts = {path: path.read_text() for path in files if path.is_file() and path.stat().st_size < 1_000_000}
    assert [f"{path.relative_to(ROOT)}: {m[0]}" for path, text in texts.items() for m in FORBIDDEN.finditer(text)] == []


BRITISH = {
    **{f"{stem}ur": "" for stem in ("colo", "neighbo", "behavio", "favo")},
    **{
        f"{stem}is": r"(e[ds]?|ing|ation)\b"
        for stem in ("normal", "recogn", "initial", "amort", "factor", "diagonal", "quant", "optim")
    },
    f"{'label'}led": "",
}
"""Beginnings of words, and expressions for the rest of the word."""


def british(text: str) -> list[str]:
    """Return words of a text that are spelled in another way in America, in lower case."""
    text = text.lower()  # to look for the beginnings in it takes a tenth of the time of one expression for all words
    found = (re.search(start + rest, text) for start, rest in BRITISH.items() if start in text)
    return [match[0] for match in found if match]


def test_words_are_spelled_as_in_america() -> None:
    suffixes = {".py", ".md", ".yaml", ".jinja"}
    folders = [ROOT / name for name in (*PACKAGES, "src", "papers", "tests", "docs")]
    files = [path for folder in folders for path in folder.rglob("*") if path.suffix in suffixes and path.is_file()]
    found = {str(path.relative_to(ROOT)): british(path.read_text(encoding="utf-8")) for path in files}
    assert {path: words for path, words in found.items() if words} == {}


def test_the_search_for_words_finds_them() -> None:
    words = ["Neighbo" + "urs", "normalis" + "ation", "optimis" + "es", "labell" + "ed", "optimism", "normal is"]
    assert british(" ".join(words)) == ["neighbo" + "ur", "normalis" + "ation", "optimis" + "es", "labell" + "ed"]


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
