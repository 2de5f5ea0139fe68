"""Every layout goes on with what every other one has saved, in every way that torch has. Real processes, gloo.

Every pair of layouts at least once, and every kind from every layout and into every layout: after half of the steps the
state is saved, another layout goes on with it, and ends where one process does, bit for bit.
"""

import itertools
from pathlib import Path
from typing import Any

import pytest

from .launch import Outcome, Run, launch

pytestmark = pytest.mark.slow

LAYOUTS = ("plain 1", "fsdp2 2", "compiled 2", "fsdp2 3", "tp 3", "hsdp 4", "grouped 4")
"""Layout and number of ranks, in ascending order. compiled: DDP within other wrappers; grouped: DDP in two groups.
On three ranks parts are uneven, and some are empty."""
SAVED = ["tree", "offload", "full offload", "flat", "trained", "whole"]
KINDS = [*SAVED, "full broadcast"]
"""Flags of torch's StateDictOptions; tree: none; whole: `full_state_dict` of the optimizer; full broadcast: how a file
of the kind "full offload" is loaded, too. What torch flattens and
gathers in one it cannot load itself, not even for its own AdamW (2.13: KeyError of 'param_groups.0.params.0')."""
CELLS = [
    (LAYOUTS[(place + turn) % len(LAYOUTS)], target, kind)
    for place, target in enumerate(LAYOUTS)
    for turn, kind in enumerate(KINDS)
]
"""(source, target, kind)."""
SLOTS = ["statistic.inner.inner", "basis.inner", "first_moment", "second_moment"]
ADAM = {
    "name": "adam",
    "match": {"role": ["norm", "bias"]},
    "update": [{"kind": "momentum", "beta": 0.9}, {"kind": "rms", "beta": 0.99}],
}
RECIPE = {
    "recipe": {"base": "soap_int8", "averaging": {"kind": "schedule_free", "beta": 0.9}, "routes": [ADAM]},
    "overrides": [
        *("blocking.size=8", "blocking.merge=8", "view=modules", "lr=0.05"),
        *("update.eigenbasis.refresh.steps=2", "update.eigenbasis.refresh.min_wave_work=1"),
        *(f"storage.{slot}.min_elements=1" for slot in SLOTS),
    ],
}
"""State of every sort: coded, of blocks of sections and heads, divided as its parameter is, and iterates."""


def case(layout: str) -> dict[str, Any]:
    if layout.startswith("grouped"):
        return {"layout": "ddp", **RECIPE, "overrides": [*RECIPE["overrides"], "distribution.group_size=2"]}
    return {"layout": layout.split()[0], **RECIPE}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Outcome]]:
    root = tmp_path_factory.mktemp("state_dicts")
    path = str(root / "one.pt")
    runs = [Run("one", "matrix:uninterrupted", 0, {"path": path, **RECIPE})]
    for layout in LAYOUTS:
        folder = root / layout
        folder.mkdir()
        job = {"folder": str(folder), "kinds": SAVED, **case(layout)}
        runs.append(Run(f"save {layout}", "matrix:save", int(layout[-1]), job, 20.0))
    for layout in LAYOUTS:
        folders = {f"{source}, {kind}": str(root / source) for source, target, kind in CELLS if target == layout}
        job = {"path": path, "folders": folders, **case(layout)}
        runs.append(Run(f"load {layout}", "matrix:load", int(layout[-1]), job, 20.0))
    return launch(runs, Path(tmp_path_factory.mktemp("ranks")), limit=400)


def test_every_pair_and_every_kind_is_there() -> None:
    assert {(source, target) for source, target, _ in CELLS} == set(itertools.product(LAYOUTS, LAYOUTS))
    for side in (0, 1):
        assert {(cell[side], cell[2]) for cell in CELLS} == set(itertools.product(LAYOUTS, KINDS))


@pytest.mark.parametrize(("source", "target", "kind"), CELLS)
def test_a_run_resumed_on_other_ranks_continues_as_if_it_had_not_stopped(
    outcomes: dict[str, list[Outcome]], source: str, target: str, kind: str
) -> None:
    for outcome in outcomes[f"load {target}"]:
        found = outcome.result[f"{source}, {kind}"]
        assert not isinstance(found, str), found
        assert {name: error for name, (error, _, _) in found.items() if error} == {}
