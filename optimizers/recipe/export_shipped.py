"""Export of the YAML recipes to `shipped/shipped.json`: `python -m eigengraft.optimizers.recipe.export_shipped`."""

from __future__ import annotations

import json

from .loading import read_yaml, recipe_folder


def shipped_json() -> str:
    """Return all YAML recipes as JSON text, one recipe on each line.

    A test requires that `shipped.json` has exactly this text.
    """
    folder = recipe_folder()
    names = sorted(folder.rglob("*.yaml"))
    data = {path.relative_to(folder).with_suffix("").as_posix(): read_yaml(path) for path in names}
    lines = (f"{json.dumps(name)}: {json.dumps(recipe, ensure_ascii=False)}" for name, recipe in data.items())
    return "{\n" + ",\n".join(lines) + "\n}\n"


if __name__ == "__main__":
    (recipe_folder() / "shipped.json").write_text(shipped_json(), encoding="utf-8")
