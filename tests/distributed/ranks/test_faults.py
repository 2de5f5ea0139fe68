"""What goes wrong on one rank ends on every rank with a cause that can be read, in time, and damages nothing.

The table: (what happens on rank 1, what rank 0 and rank 1 say).
"""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from eigengraft.optimizers.checkpoint.consolidation import GATHER_FIRST
from eigengraft.optimizers.stacks.rank_checks import AVERAGE_FIRST, STEP_ALIKE

from ...refusals import lacking
from .launch import Outcome, Run, launch, launch_once

pytestmark = pytest.mark.slow

PLACES = ("plain", "fsdp")
GROUPS = ("", " unnamed")
"""Suffixes of runs: the process group names gloo, or names no backend and gets torch's default."""
TIMEOUT, STALL = 20.0, 2.0
"""Seconds: of the process group, and of the optimizer's own collectives where a rank never comes."""
Cause = tuple[object, ...]
"""The type of an error, and paths, names and numbers that stand in its message."""
AGREEMENT: Cause = ("DistributedError", "agreement on gradients", "scale and 12 more", "rank 0 of 2")
UPDATES: Cause = ("DistributedError", "round 0", "rank 0 of 2")
ENDS: dict[str, tuple[Cause, Cause | None]] = {
    "raises_in_backward": (AGREEMENT, ("RuntimeError", "no such luck")),
    "killed_in_step": (UPDATES, None),
    "raises_in_step": (UPDATES, ("OutOfMemoryError", "no memory left")),
}
GROUP: Cause = ("ValueError", "param group 0")
DIFFERENT: dict[str, Cause] = {
    "other_recipe": (*GROUP, "recipe", "rank 1"),
    "other_shapes": (*GROUP, "parameters", "rank 1"),
    "other_order": (*GROUP, "parameters", "rank 1"),
    "fewer": (*GROUP, "parameters", "rank 1"),
    "other_frozen": GROUP,
    "other_lr": GROUP,
}
COPIES: Cause = (*GROUP, "rank 1", "seed")
FLAT = ("FSDP1", "fully_shard")
MORE: Cause = ("ValueError", "param groups", "rank 0", "param group 1")


def together(first: str, second: str, *remedy: str) -> Cause:
    """What both ranks say if they come to different things."""
    return ("DistributedError", f"'{first}'", "rank 0", f"'{second}'", "rank 1", *remedy)


def require_said(text: str, kind: object, *data: object) -> None:
    """Check the type of an error, and that data stand in its message."""
    assert text.startswith(f"{kind}: ") and lacking(text, *data) == [], text


UNPROVIDED: Cause = ("ValueError", "update.diagonal_newton", "'hessian_diagonal'")
GRADIENTS = "agreement on gradients (scale and {} more)"
SUMS = "redistribution of gradients (scale and {} more{})"
REFUSED: dict[str, Cause] = {f"{fault} {place}": cause for fault, cause in DIFFERENT.items() for place in PLACES} | {
    "other_values plain": (*COPIES, "emb.weight, up.weight", "DistributedDataParallel"),
    "other_values hsdp": (*COPIES, "emb.weight, up.weight"),
    "experts plain": (*COPIES, "experts.weight, experts.bias", "DistributedDataParallel"),
    "stages plain": (*GROUP, "parameters", "rank 1", "distribution.mode: local"),
    "flat plain": ("ValueError", "_flat_param", *FLAT),
    "flat_original plain": ("ValueError", "weight", *FLAT),
    "thawed plain": together(GRADIENTS.format(12), GRADIENTS.format(13)),
    "thawed fsdp": together(GRADIENTS.format(12), GRADIENTS.format(13)),
    "added plain": together(GRADIENTS.format(12), "agreement on param groups"),
    "unprovided plain": UNPROVIDED,
    "unprovided fsdp": UNPROVIDED,
    "another_group plain": MORE,
    "another_group fsdp": MORE,
}
"""What both ranks say of what they cannot do together, by fault and place."""
SURVIVED: dict[str, dict[str, Any]] = {
    "nan skip": {"fault": "nan", "policy": "skip"},
    "nan raise": {"fault": "nan", "policy": "raise"},
    "large signum": {"fault": "large", "recipe": "signum"},
    "large adamw": {"fault": "large", "recipe": "adamw"},
    "nan skip adamw": {"fault": "nan", "policy": "skip", "recipe": "adamw"},
    "nan raise adamw": {"fault": "nan", "policy": "raise", "recipe": "adamw"},
    "one_sided": {"fault": "one_sided"},
    "other lr": {"fault": "changed", "key": "lr"},
    "other lr in a tensor": {"fault": "changed", "key": "lr", "tensor": True},
    "other weight_decay": {"fault": "changed", "key": "weight_decay"},
    "twice": {"fault": "twice"},
    "ahead": {"fault": "ahead"},
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Outcome]]:
    folder = str(tmp_path_factory.mktemp("notes"))
    together: list[Run] = []  # in one group of ranks, which every fault must leave in order
    apart: list[Run] = []
    for place in PLACES:
        jobs: dict[str, dict[str, Any]] = {"roots": {"fault": "roots"}, **SURVIVED}
        if place == "plain":
            jobs["one_sided_sum"] = {"fault": "one_sided_sum"}
            jobs["changed_on_device"] = {"fault": "changed_on_device"}
            jobs |= {name: {"fault": name} for name in ("not_averaged", "not_averaged_on_device", "rounded_apart")}
            jobs["outside"] = {"fault": "not_averaged", "outside": True}
        together += [Run(f"{name} {place}", "faults:run", 2, {**job, "place": place}) for name, job in jobs.items()]
        jobs = {name: {"fault": name} for name in (*ENDS, "alone")}
        jobs["saves_alone"] = {"fault": "saves_alone", "timeout": STALL}
        jobs["stalls"] = {"fault": "stalls", "folder": folder, "timeout": STALL}
        if place == "plain":
            jobs["sparse"] = {"fault": "sparse"}  # a DTensor is never sparse
        for name in ("saves_alone", "stalls"):
            jobs[f"{name} unnamed"] = {**jobs[name], "store": f"{folder}/{name}-{place}.store"}
        for name, job in jobs.items():
            apart.append(Run(f"{name} {place}", "faults:run", 2, {**job, "place": place}, TIMEOUT, fails=True))
    for place in (*PLACES, "hsdp"):
        faults = [name.split()[0] for name in REFUSED if name.endswith(place)]
        together.append(
            Run(f"refused {place}", "faults:run", 2, {"fault": "refused", "place": place, "faults": faults})
        )
    together.append(Run("groups_apart", "faults:run", 4, {"fault": "groups_apart", "place": "plain"}))
    return launch_once([*together, *apart], tmp_path_factory, "faults", limit=300)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("fault", ENDS)
def test_every_rank_ends_with_a_cause(outcomes: dict[str, list[Outcome]], fault: str, place: str) -> None:
    for rank, (outcome, cause) in enumerate(zip(outcomes[f"{fault} {place}"], ENDS[fault], strict=True)):
        assert outcome.seconds < TIMEOUT
        assert outcome.code == (-9 if cause is None else 1), f"rank {rank}: {outcome.output}"
        if cause is not None:
            require_said(outcome.error, *cause)


@pytest.mark.parametrize("name", REFUSED)
def test_all_ranks_refuse_recipes_and_layouts_that_do_not_fit_them(
    outcomes: dict[str, list[Outcome]], name: str
) -> None:
    fault, place = name.split()
    for outcome in outcomes[f"refused {place}"]:
        require_said(outcome.result[fault], *REFUSED[name])
        if fault == "other_values":
            assert ("DistributedDataParallel" in outcome.result[fault]) == (place == "plain")


@pytest.mark.parametrize("place", PLACES)
def test_a_round_is_named_by_its_parameters(outcomes: dict[str, list[Outcome]], place: str) -> None:
    assert re.search(r"round 0 \([\w.]+ and \d+ more\)", outcomes[f"killed_in_step {place}"][0].error)


@pytest.mark.parametrize("place", PLACES)
def test_a_rank_that_takes_no_part_is_missed(outcomes: dict[str, list[Outcome]], place: str) -> None:
    first, second = outcomes[f"alone {place}"]
    require_said(first.error, "DistributedError", "agreement on param groups", "rank 0 of 2")
    assert first.seconds < TIMEOUT
    if place == "plain":
        assert second.code == 0
    else:
        require_said(second.error, "ValueError", "scale: distribution.mode", "'local'")


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("group", GROUPS)
def test_a_state_dict_of_one_rank_alone_says_what_to_call(
    outcomes: dict[str, list[Outcome]], place: str, group: str
) -> None:
    first, second = outcomes[f"saves_alone{group} {place}"]
    cause = together(GRADIENTS.format(12), "state_dict", GATHER_FIRST)
    require_said(first.error, *cause)
    require_said(second.error, *cause)
    assert second.error.count(GATHER_FIRST) == 1
    assert max(first.seconds, second.seconds) < TIMEOUT


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("group", GROUPS)
def test_nobody_waits_longer_than_the_time_out(outcomes: dict[str, list[Outcome]], place: str, group: str) -> None:
    first, second = outcomes[f"stalls{group} {place}"]
    require_said(first.error, *AGREEMENT)
    assert "timed out" in first.error and second.code == 0
    # rank 1 returned because rank 0 had given up, long before the process group would have
    assert second.result == 0.0 and STALL <= first.seconds < TIMEOUT


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("recipe", ["", " adamw"])
def test_a_nan_on_one_rank_is_skipped_or_raised_on_all(
    outcomes: dict[str, list[Outcome]], place: str, recipe: str
) -> None:
    for policy in ("skip", "raise"):
        for outcome in outcomes[f"nan {policy}{recipe} {place}"]:
            found = outcome.result
            assert found["skipped"] == {"down.weight": 1}
            if policy == "skip":
                trained = {name for name in found["parameters"] if not name.startswith("frozen")}
                assert found["said"] == "" and set(found["changed"]) == trained - {"down.weight"}
            else:
                require_said(found["said"], "FloatingPointError", "down.weight")
                assert found["changed"] == []


@pytest.mark.parametrize("place", PLACES)
def test_large_finite_gradients_are_used_where_nothing_squares_them(
    outcomes: dict[str, list[Outcome]], place: str
) -> None:
    for recipe in ("signum", "adamw"):
        for outcome in outcomes[f"large {recipe} {place}"]:
            found = outcome.result
            trained = {name for name in found["parameters"] if not name.startswith("frozen")}
            used, skipped = (trained, set()) if recipe == "signum" else (set(), trained)
            assert found["said"] == "" and set(found["changed"]) == used and set(found["skipped"]) == skipped


def test_groups_of_ranks_agree_with_each_other(outcomes: dict[str, list[Outcome]]) -> None:
    for outcome in outcomes["groups_apart"]:
        found = outcome.result
        require_said(found["said"], "DistributedError", "norm of scale", "on ranks 0, 1", "on ranks 2, 3", "10 more")
        assert found["changed"] == [] and lacking(found["values"], "ranks 2, 3", "up.weight", "seed") == []
        assert lacking(found["size"], "distribution.group_size", 4, 3) == []
        assert lacking(found["kind"], "distribution.group_size", "DTensor") == []
    parameters = [outcome.result["parameters"] for outcome in outcomes["groups_apart"]]
    assert all(torch.equal(value, parameters[0][name]) for own in parameters for name, value in own.items())


@pytest.mark.parametrize("place", PLACES)
def test_a_gradient_on_some_ranks_only_is_refused_by_all(outcomes: dict[str, list[Outcome]], place: str) -> None:
    for outcome in outcomes[f"one_sided {place}"]:
        require_said(outcome.result["said"], "DistributedError", "gradients", "up.weight")
        assert outcome.result["changed"] == []


NUMBERS = {
    "other lr": ("lr", 0.003, 0.5),
    "other lr in a tensor": ("lr", 0.003, 0.5),
    "other weight_decay": ("weight_decay", 0.01, 0.5),
    "twice": ("number of steps", 0, 1),
    "ahead": ("number of steps", 2, 1),
}
"""A number that ranks have, its value on rank 0, and its value on rank 1."""


def require_apart(said: str, number: str, first: float, second: float) -> None:
    """Check that an error names a number of a step, its values on both ranks, and the remedy."""
    data = ("scale and 12 more", number, f"{first} on rank 0", f"{second} on rank 1", STEP_ALIKE)
    require_said(said, "DistributedError", *data)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("fault", NUMBERS)
def test_another_number_on_one_rank_is_refused_by_all(
    outcomes: dict[str, list[Outcome]], fault: str, place: str
) -> None:
    for outcome in outcomes[f"{fault} {place}"]:
        assert outcome.result["changed"] == []
        require_apart(outcome.result["said"], *NUMBERS[fault])


def test_another_number_is_found_one_step_later_on_a_device(outcomes: dict[str, list[Outcome]]) -> None:
    for outcome in outcomes["changed_on_device plain"]:
        assert outcome.result["changed"] == []
        require_apart(outcome.result["said"], *NUMBERS["other lr"])


APART = {"not_averaged": ("scale", "10 more"), "outside": ("scale",), "not_averaged_on_device": ("up.weight",)}
"""The first parameter whose norms differ, and the number of others, if there are too many to name."""


@pytest.mark.parametrize("fault", APART)
def test_gradients_that_nobody_has_averaged_are_refused_by_all(outcomes: dict[str, list[Outcome]], fault: str) -> None:
    name, *more = APART[fault]
    for outcome in outcomes[f"{fault} plain"]:
        said = outcome.result["said"]
        require_said(said, "DistributedError", "gradients", f"norm of {name}", "rank 1", AVERAGE_FIRST, *more)
        norms = [float(norm) for norm in re.findall(r"([\d.e-]+) on rank", said)]
        assert norms[1::2] == pytest.approx([2 * norm for norm in norms[::2]], rel=1e-5)  # six digits are said
        assert outcome.result["changed"] == []


def test_gradients_that_differ_by_rounding_are_used(outcomes: dict[str, list[Outcome]]) -> None:
    for outcome in outcomes["rounded_apart plain"]:
        assert outcome.result["said"] == "" and outcome.result["changed"]


def test_a_partial_sum_on_some_ranks_only_is_refused_by_all(outcomes: dict[str, list[Outcome]]) -> None:
    cause = together(SUMS.format(12, ""), SUMS.format(11, "; none of up.weight"))
    for outcome in outcomes["one_sided_sum plain"]:
        assert outcome.result["changed"] == []
        require_said(outcome.result["said"], *cause)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("fault", SURVIVED)
def test_ranks_go_on_together_after_it(outcomes: dict[str, list[Outcome]], fault: str, place: str) -> None:
    first, second = (outcome.result["parameters"] for outcome in outcomes[f"{fault} {place}"])
    assert all(torch.equal(value, second[name]) and bool(value.isfinite().all()) for name, value in first.items())


def test_a_refused_call_changes_nothing_on_any_rank(outcomes: dict[str, list[Outcome]]) -> None:
    """A step that raised on all ranks left nothing behind: later steps are those of a run without it."""
    for place in PLACES:
        one, other = (outcomes[f"{fault} {place}"][0].result["parameters"] for fault in ("nan raise", "one_sided"))
        assert all(torch.equal(value, other[name]) for name, value in one.items())


@pytest.mark.parametrize("place", PLACES)
def test_failing_roots_on_one_rank_raise_on_all(outcomes: dict[str, list[Outcome]], place: str) -> None:
    """Tolerated once, counted at the second failure, and told to the others with the next gradients."""
    for outcome in outcomes[f"roots {place}"]:
        assert outcome.result["count"] == 3 and lacking(outcome.result["said"], "update", "failure.roots", 1) == []


def test_a_sparse_gradient_is_refused_by_name(outcomes: dict[str, list[Outcome]]) -> None:
    first, second = outcomes["sparse plain"]
    require_said(second.error, "TypeError", "up.weight", "torch.sparse_coo")
    require_said(first.error, *AGREEMENT)


@pytest.mark.parametrize("place", PLACES)
def test_a_killed_run_with_delayed_refreshes_and_state_in_files_resumes(place: str, tmp_path: Path) -> None:
    whole, files = (tmp_path / name for name in ("whole", "files"))
    job = {"fault": "killed_after_save", "place": place, "folder": str(files)}
    runs = [
        Run("whole", "faults:run", 2, {**job, "folder": str(whole), "kill": False}),
        Run("killed", "faults:run", 2, {**job, "kill": True}, TIMEOUT, fails=True),
        Run("resumed", "faults:run", 2, {**job, "kill": False}),
    ]
    for folder in (whole, files):
        folder.mkdir()
    found = launch(runs, tmp_path / "runs")
    assert [outcome.code for outcome in found["killed"]] == [1, -9], found["killed"][0].output
    require_said(found["killed"][0].error, "DistributedError", "rank 0 of 2")
    assert [path.name for path in files.iterdir()] == ["saved.pt"]
    for resumed, expected in zip(found["resumed"], found["whole"], strict=True):
        assert (resumed.result["resumed"], expected.result["resumed"]) == (6, 0)
        for name, value in expected.result["parameters"].items():
            assert torch.equal(resumed.result["parameters"][name], value), name
