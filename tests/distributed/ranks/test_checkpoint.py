"""Checkpoints know of no rank: saved beside training, of blocks in parameters of a transformer, and what is refused.

Every pair of layouts is in `test_state_dicts.py`.
"""

import itertools
from typing import Any

import pytest
import torch

from .launch import Outcome, Run, launch
from .test_trajectories import CASES as TRAJECTORIES

pytestmark = pytest.mark.slow

SOURCES = ("plain2", "fsdp3", "hsdp4")
TARGETS = ("plain1", "plain3", "fsdp1", "fsdp2", "hsdp4")
NAMES = ("adamw", "averaged", "queue", "quantized", "delayed")
HOSTED = {"plain2": NAMES, "fsdp2": NAMES, "hsdp4": ("adamw", "quantized")}
"""The cases by place. Two copies of shards are put where one is: there, one case of each sort of update."""
BLOCKS = ["blocking.size=16", "blocking.merge=16"]
CASES = {name: TRAJECTORIES[name] for name in NAMES}
for _name in ("quantized", "delayed"):
    CASES[_name] = {**CASES[_name], "overrides": [*CASES[_name]["overrides"], *BLOCKS]}
"""With a third of the blocks, whose state is many tensors."""
FEW = {"plain1": "whole", "fsdp2": "flat", "hsdp4": "full"}
"""Where the case with the most state goes to, from fsdp3, and how it is read and loaded: nested or flattened keys, the
latter saved asynchronously; gathered by torch, or by `full_state_dict`."""


def wanted(source: str, target: str) -> list[tuple[str, str]]:
    """(case, kind) of what is loaded: half of the cases in turn, so that each source and each target has them all.

    Every pair of layouts, and every kind of each, is in `test_state_dicts.py`."""
    few = [("quantized", FEW[target])] if source == "fsdp3" and target in FEW else []
    queue = "full" if target == "fsdp2" else "tree"
    cases = [("adamw", "tree"), ("averaged", "flat"), ("queue", queue), ("delayed", queue)]
    turn = SOURCES.index(source) + TARGETS.index(target)
    return [cases[turn % 4], cases[(turn + 2) % 4], *few]


def kinds(source: str, name: str) -> list[str]:
    """The kinds of a case that are loaded from a source: others are not saved there."""
    return sorted({kind for target in TARGETS for found, kind in wanted(source, target) if found == name})


def case(name: str, place: str, **more: Any) -> dict[str, Any]:
    return {"place": place[:-1], "recipe": CASES[name]["recipe"], "overrides": CASES[name].get("overrides", []), **more}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Outcome]]:
    root = tmp_path_factory.mktemp("checkpoints")

    def folder(source: str, name: str) -> str:
        path = root / source / name
        path.mkdir(parents=True, exist_ok=True)
        return str(path)

    one = {name: {**CASES[name], "place": "plain"} for name in NAMES}
    saves = [Run("one", "trajectories:run", 0, one)]
    for source in SOURCES:
        kept = [name for name in NAMES if name != "quantized" or source == "fsdp3"]
        job = {name: case(name, source, folder=folder(source, name), kinds=kinds(source, name)) for name in kept}
        saves.append(Run(f"save {source}", "snapshots:save", int(source[-1]), job))
    found = launch(sorted(saves, key=lambda run: run.world), tmp_path_factory.mktemp("saves"), limit=400)
    loads = []
    for target in TARGETS:
        job = {
            f"{source} {name} {kind}": case(name, target, folder=folder(source, name), kind=kind)
            for source in SOURCES
            for name, kind in wanted(source, target)
        }
        loads.append(Run(f"load {target}", "snapshots:load", int(target[-1]), job))
    for place in ("plain2", "fsdp2"):
        job = case("quantized", place, folder=folder("fsdp3", "quantized"))
        loads.append(Run(f"spoil {place}", "snapshots:spoil", 2, job))
    for place, names in HOSTED.items():
        job = {name: case(name, place) for name in names}
        loads.append(Run(f"host {place}", "snapshots:host", int(place[-1]), job, 60.0))
    return found | launch(sorted(loads, key=lambda run: run.world), tmp_path_factory.mktemp("loads"), limit=300)


def test_every_case_is_saved_by_each_source_and_loaded_by_each_target() -> None:
    found = [(s, t, name) for s in SOURCES for t in TARGETS for name, _ in wanted(s, t) if name != "quantized"]
    for side, places in ((0, SOURCES), (1, TARGETS)):
        assert {(cell[side], cell[2]) for cell in found} == set(itertools.product(places, set(NAMES) - {"quantized"}))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("source", SOURCES)
def test_a_run_goes_on_elsewhere_as_if_it_had_not_stopped(
    outcomes: dict[str, list[Outcome]], source: str, target: str
) -> None:
    compared = 0
    for rank in outcomes[f"load {target}"]:
        for name, iterates in rank.result.items():
            if name.startswith(f"{source} "):
                for iterate, parameters in iterates.items():
                    expected = outcomes["one"][0].result[name.split()[1]][iterate]
                    assert all(torch.equal(value, expected[key]) for key, value in parameters.items()), name
                compared += 1
    assert compared == int(target[-1]) * len(wanted(source, target))


@pytest.mark.parametrize("source", SOURCES)
def test_reading_state_moves_nothing_and_a_part_is_not_pickled(outcomes: dict[str, list[Outcome]], source: str) -> None:
    for rank in outcomes[f"save {source}"]:
        for found in rank.result.values():
            assert found["moved"] == [] and "one rank's shard" in found["refused"]
            assert "full_state_dict()" in found["refused"]


@pytest.mark.parametrize("source", SOURCES)
def test_a_full_state_dict_gathers_many_tensors_in_one_message(outcomes: dict[str, list[Outcome]], source: str) -> None:
    """Not one by one."""
    for rank in outcomes[f"save {source}"]:
        for name, found in rank.result.items():
            assert found["messages"] == 1 and found["tensors"] > 20, (name, found)


@pytest.mark.parametrize("source", SOURCES)
def test_one_rank_keeps_what_was_consolidated(outcomes: dict[str, list[Outcome]], source: str) -> None:
    *others, last = outcomes[f"save {source}"]
    assert {found["consolidated"] for found in last.result.values()} == {"whole: True"}
    for other in others:
        assert all(found["consolidated"].startswith("0: state_dict: ") for found in other.result.values())


@pytest.mark.parametrize("place", ["plain2", "fsdp2"])
def test_what_does_not_fit_is_named_on_every_rank(outcomes: dict[str, list[Outcome]], place: str) -> None:
    for rank in outcomes[f"spoil {place}"]:
        said = rank.result
        assert "state_dict" in said["missing"] and "missing '0/" in said["missing"]
        assert "unexpected '0/nobody/knows'" in said["foreign"]
        assert "parameters" in said["absent on one"]
        assert said["missing on one"].startswith("rank 1: ") and "missing '0/" in said["missing on one"]


@pytest.mark.parametrize("place", HOSTED)
def test_what_hosts_do_with_state_is_done_on_all_ranks(outcomes: dict[str, list[Outcome]], place: str) -> None:
    """Moved, reset, taken out, entries of hosts, and a checkpoint of fewer parameters, as in one process."""
    for rank in outcomes[f"host {place}"]:
        assert rank.result == dict.fromkeys(HOSTED[place], "")
