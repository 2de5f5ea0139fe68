"""The provenance of a run: the code and the data that produced its numbers.

Runs of one cell of a study are averaged. Their mean has a meaning only if all of them have the same provenance. A run
or a study whose provenance has changed is therefore refused, and reports keep runs of different provenance apart. The
processor, the commit of the working directory and the command line are recorded too, but are not compared: machines
that share a study may differ in these three.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_VERSIONS = ("eigengraft", "sources", "torch", "numpy")
_SHA256 = re.compile(r"\b([0-9a-f]{16})[0-9a-f]{48}\b")
"""Pattern of a sha256. Only the first 16 digits are compared and shown: their 64 bits distinguish all files of a study.
"""
REMEDY = "Choose another directory, or remove this one."
"""End of errors about a directory whose runs have another provenance."""


def provenance_of(environment: Mapping[str, Any]) -> dict[str, str]:
    """Return the entries of a recorded environment which comparisons use: versions, sha256 of data and imported files.

    An entry that an older version did not record is left out. An environment without an entry differs from an
    environment with it.
    """
    found = {key: environment[key] for key in _VERSIONS if key in environment}
    data, imports = environment.get("data"), environment.get("imports")
    if isinstance(data, Mapping):
        found["data"] = data.get("sha256")
    if isinstance(imports, Mapping):
        found |= {f"imports {name}": sha256 for name, sha256 in imports.items()}
    return {name: _SHA256.sub(r"\1", str(value)) for name, value in found.items()}


def provenance_changes(known: Mapping[str, Any], found: Mapping[str, Any]) -> list[str]:
    """Return a line "entry: recorded -> present" for each entry in which two environments differ.

    The line about the data names their present source, such as a path.

    known, found: the recorded and the present environment.
    """
    # Imported here, because overrides.py imports torch, which reports do not need.
    from eigengraft.optimizers.recipe.overrides import differences

    source = found.get("data", {}).get("source")
    lines = differences(provenance_of(known), provenance_of(found))
    return [re.sub("^data:", lambda _: f"data of {source}:", line) if source else line for line in lines]


def without_folders(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration of a run with the last part of `task.path` in place of the whole absolute path.

    Configurations are compared without folders, because machines that share a study may keep its data in different
    places. That the data are equal is checked by their sha256.
    """
    task = config.get("task")
    path = task.get("path") if isinstance(task, Mapping) else None
    if not isinstance(path, str) or not Path(path).is_absolute():
        return dict(config)
    return {**config, "task": {**config["task"], "path": Path(path).name}}


def variants(found: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a name for each of the declarations `found`, such as configurations of runs, made of the values in which
    they differ.

    Equal declarations have equal names, and different declarations have different names. All names are empty if all
    declarations are equal.
    """
    if all(one == found[0] for one in found):
        return ["" for _ in found]
    # Imported here, because overrides.py imports torch, which most reports do not need.
    from eigengraft.optimizers.recipe.overrides import flatten

    flat = [{path: str(value) for path, value in flatten(one)} for one in found]
    paths = sorted({path for one in flat for path in one})
    differing = [path for path in paths if len({one.get(path) for one in flat}) > 1]
    short = [", ".join(f"{_last(path)} {one.get(path, 'absent')[:12]}" for path in differing[:2]) for one in flat]
    whole = [tuple(one.get(path) for path in differing) for one in flat]
    if len(set(short)) == len(set(whole)):
        return short
    places = {values: place for place, values in enumerate(dict.fromkeys(whole), start=1)}
    return [f"{name}, {places[values]}" for name, values in zip(short, whole, strict=True)]


def _last(path: str) -> str:
    """Return the last two parts of a dotted path.

    A path that starts with "imports " is returned whole, because its dots belong to the name of a file or module.
    """
    return path if path.startswith("imports ") else ".".join(path.split(".")[-2:])
