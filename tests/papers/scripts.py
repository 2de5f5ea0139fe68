"""Scripts of papers as modules; the folders are no packages."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

PAPERS = Path(__file__).resolve().parents[2] / "papers"


def script(paper: str, name: str) -> ModuleType:
    """A script in the folder of a paper."""
    spec = importlib.util.spec_from_file_location(f"papers_{name}", PAPERS / paper / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look up their module there
    spec.loader.exec_module(module)
    return module
