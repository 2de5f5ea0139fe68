"""Writes `recipes/shipped.json` from the YAML files beside it: `python -m eigengraft.optimizers.ship`."""

from __future__ import annotations

import json

from .files import read_yaml, recipe_folder


def collect() -> str:
    """All YAML recipes as JSON text, what `shipped.json` must hold. A test keeps the two equal."""
    folder = recipe_folder()
    names = sorted(folder.rglob("*.yaml"))
    data = {path.relative_to(folder).with_suffix("").as_posix(): read_yaml(path) for path in names}
    return json.dumps(data, indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    (recipe_folder() / "shipped.json").write_text(collect(), encoding="utf-8")
