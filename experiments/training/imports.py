"""Files that an experiment names: Python files that define components, and paths of other files."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import site
import sys
import sysconfig
import traceback
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from eigengraft.component import Component, components_in
from eigengraft.errors import RecipeError, near_path
from eigengraft.slots import dotted

from ..tasks.base import absolute_path


def import_component(source: str) -> ModuleType:
    """Import a Python file, or an installed module by its dotted name, and return the module. A file is imported once.

    The file can import other files of its folder by their names.

    Raises RecipeError with the file and the line if the import fails.
    """
    try:
        module = _from_file(Path(source)) if names_a_file(source) else importlib.import_module(source)
    except RecipeError:
        raise
    except Exception as error:
        raise RecipeError(f"imports: '{source}' cannot be imported: {_where(error)}") from error
    _digests(module.__name__)  # cached now: the file may change after its text was executed
    return module


def imported_sources(sources: Iterable[str], user: Component | None = None) -> dict[str, str]:
    """Return the sha256 of every imported file and of the modules that it uses, by file or module name.

    This includes modules of the same package, and modules that are neither installed nor part of the library, such as
    a model in a file beside the task. Modules that are imported inside a function are not included.

    user: a component, such as an experiment. A file that defines components is left out if this component contains
        none of them. None: all files are included.
    """
    used = None if user is None else {type(part).__module__ for _, part in components_in(user)}
    found: dict[str, set[str]] = {}
    for source in sources:
        module = import_component(source)
        if used is not None and module.__name__ not in used and _defines_components(module):
            continue
        for name, digest in _digests(module.__name__).items():
            named = Path(source).name if name == module.__name__ and names_a_file(source) else name
            found.setdefault(named, set()).add(digest)
    return {name: " ".join(sorted(digests)) for name, digests in sorted(found.items())}


def _defines_components(module: ModuleType) -> bool:
    """Return True if a module defines classes of components."""
    classes = (value for value in vars(module).values() if isinstance(value, type) and issubclass(value, Component))
    return any(cls.__module__ == module.__name__ for cls in classes)


@cache
def _digests(root: str) -> dict[str, str]:
    """Return the sha256 of an imported module and of the modules that it uses, by name.

    root: dotted name of the imported module.
    """
    found: dict[str, str] = {}
    left = [root]
    while left:
        name = left.pop()
        module = sys.modules.get(name)
        file = getattr(module, "__file__", None)
        if module is None or file is None or name in found or not _followed(name, Path(file), root):
            continue
        found[name] = hashlib.sha256(Path(file).read_bytes()).hexdigest()
        left += _used(module)
    return found


def _used(module: ModuleType) -> Iterator[str]:
    """Yield the names of modules that a module uses: modules among its globals, and the modules that define its other
    globals.
    """
    for value in vars(module).values():
        if isinstance(value, ModuleType):
            yield value.__name__
        else:
            home: Any = (value if isinstance(value, (type, FunctionType)) else type(value)).__module__
            yield from [home] if isinstance(home, str) else []


def _followed(name: str, file: Path, root: str) -> bool:
    """Return True if the module `name` belongs to the code of the imported module `root`.

    A module of this library belongs to that code only if the module is `root` itself. Any other module belongs to that
    code if both modules are of one package, or if the module is not installed.

    file: the file of the module.
    """
    if not file.is_file():  # modules that are made at run time, as torch.ops, may name a file that does not exist
        return False
    package = name.partition(".")[0]
    if package == "eigengraft" or package == root.partition(".")[0]:
        return package != "eigengraft" or name == root
    installed = [*site.getsitepackages(), site.getusersitepackages(), sysconfig.get_paths()["stdlib"]]
    return not any(file.resolve().is_relative_to(Path(one).resolve()) for one in installed)


def names_a_file(source: str) -> bool:
    """Return True if `source` names a file, False if it is the dotted name of a module."""
    return source.endswith(".py") or "/" in source


def _from_file(path: Path) -> ModuleType:
    path = path.expanduser().resolve()
    if not path.is_file():
        hint = near_path(path, (".py",)) or "; give an existing file"
        raise RecipeError(f"imports: there is no file '{path}'{hint}")
    known = [module for module in sys.modules.values() if getattr(module, "__file__", None) == str(path)]
    if known and known[0].__name__ != "__main__":
        return known[0]
    if str(path.parent) not in sys.path:  # last, so that a file hides no installed package
        sys.path.append(str(path.parent))
    # The module's name has a hash of the path: two files of one name make two modules, and all processes use the same
    # name for a file.
    name = f"{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    names = [name]
    if path.stem not in sys.modules and getattr(importlib.util.find_spec(path.stem), "origin", None) == str(path):
        names.append(path.stem)  # so that `import NAME` in other files of its folder finds this module
    sys.modules.update(dict.fromkeys(names, module))  # before execution, as pydantic reads annotations from there
    try:
        spec.loader.exec_module(module)
        _require_own_files(module, path)
    except BaseException:
        for own in names:
            del sys.modules[own]
        raise
    return module


def _require_own_files(module: ModuleType, path: Path) -> None:
    """Raise RecipeError if a module uses a file of another folder, although its own folder has a file of this name.

    Python keeps only one module of each name. If files of two folders import a name that both folders have, the files
    of the second folder would get the module of the first.
    """
    for name in _used(module):
        file, beside = getattr(sys.modules.get(name), "__file__", None), path.parent / f"{name}.py"
        if file is not None and beside.is_file() and Path(file).resolve() != beside:
            raise RecipeError(f"imports: '{path}' uses '{file}', but '{beside}' has the same name; rename one of them")


def _where(error: Exception) -> str:
    """Return an error of an import as text, with a file and a line.

    This is the first line of the traceback outside this module and Python's import system: a line of the imported file.
    """
    if isinstance(error, SyntaxError):
        return f"{error.msg} (line {error.lineno})"
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "importlib" not in frame.filename]
    own = [frame for frame in frames if frame.filename != __file__]
    return f"{type(error).__name__}: {error}" + (f" (line {own[0].lineno} of {own[0].filename})" if own else "")


def resolve_paths(value: Any, home: Path, path: str = "") -> Any:
    """Return a value of an experiment, in which names of files are resolved against the folder `home`.

    value: the experiment itself, one of its fields, or a mapping from dotted paths of fields to values.
    path: dotted path of the field; "" for the experiment itself and for a mapping from dotted paths.
    """
    if isinstance(value, Mapping):
        return {key: resolve_paths(inner, home, dotted(path, str(key))) for key, inner in value.items()}
    if path == "imports" and isinstance(value, (str, list, tuple)):
        names = [value] if isinstance(value, str) else value
        return [str(home / name) if names_a_file(str(name)) else name for name in names]
    if path in ("recipe", "recipe.base") and isinstance(value, str) and value.endswith((".yaml", ".yml", ".json")):
        return str(home / value)
    return absolute_path(value, home) if path == "task.path" and isinstance(value, str) else value
