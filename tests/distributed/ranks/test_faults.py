"""What goes wrong on one rank ends on every rank with a cause that can be read, in time, and damages nothing.

The table: (what happens on rank 1, what rank 0 and rank 1 say).
"""

import re
from typing import Any

import pytest
import torch

from eigengraft.optimizers.checkpoint.consolidation import GATHER_FIRST
from eigengraft.optimizers.stacks.rank_checks import AVERAGE_FIRST, STEP_ALIKE

from .launch import Outcome, Run, launch_once

pytestmark = pytest.mark.slow

PLACES = ("plain", "fsdp")
GROUPS = ("", " unnamed")
"""Suffixes of runs: the process group names gloo, or names no backend and gets torch's default."""
TIMEOUT, STALL = 20.0, 2.0
"""Seconds: of the process group, and of the optimizer's own collectives where a rank never comes."""
LEFT = r": rank 0 of 2 could not finish it with the others; one of them has failed, has stopped, or does something else"
AGREEMENT = rf"DistributedError: agreement on gradients \(scale and 12 more\){LEFT}"
UPDATES = rf"DistributedError: updates of round 0 \(.*\){LEFT}"
GROUP = "ValueError: param group 0: all ranks must have the same"
OTHERS = ", got others than rank 0's on rank 1"
ENDS = {
    "raises_in_backward": (AGREEMENT, "RuntimeError: no such luck"),
    "killed_in_step": (UPDATES, None),
    "raises_in_step": (UPDATES, "OutOfMemoryError: no memory left"),
}
DIFFERENT = {
    "other_recipe": f"{GROUP} recipe{OTHERS}",
    "other_shapes": f"{GROUP} parameters{OTHERS}",
    "other_order": f"{GROUP} parameters{OTHERS}",
    "fewer": f"{GROUP} parameters{OTHERS}",
    "other_frozen": GROUP,
    "other_lr": GROUP,
}
COPIES = "ValueError: param group 0: ranks that hold the same entries of a parameter must hold the same values, got "
COPIES += "other values on rank 1 than on the lowest rank for "
SEED = "; set the same seed or load the same weights on all ranks before composing"
DDP = f"{SEED}, or wrap the model in DistributedDataParallel, which broadcasts; for plain tensors that differ"
LOCAL = r"; for plain tensors that differ .* use `distribution.mode: local`, or make them DTensors on a mesh of"
FLAT = "a parameter must have its own shape, got a flat one of .* \\(FSDP1\\); use .*fully_shard \\(FSDP2\\)$"
MORE = (
    "ValueError: param groups: all ranks must have the same number of param groups, "
    "got no more param groups on rank 0, param group 1 on"
)


def together(first: str, second: str, remedy: str = "") -> str:
    """What both ranks say if they come to different things."""
    said = f": all ranks must come to it together, got '{first}' on rank 0, '{second}' on rank 1; nothing was changed"
    said += remedy
    return f"DistributedError: ({re.escape(first)}|{re.escape(second)}){re.escape(said)}$"


UNPROVIDED = (
    r"ValueError: update\.diagonal_newton: the signal 'hessian_diagonal' .* first step, got none (for|on a rank)"
)
GRADIENTS = "agreement on gradients (scale and {} more)"
SUMS = "redistribution of gradients (scale and {} more{})"
REFUSED = {f"{fault} {place}": cause for fault, cause in DIFFERENT.items() for place in PLACES} | {
    "other_values plain": f"{COPIES}emb.weight, up.weight{DDP}",
    "other_values hsdp": f"{COPIES}emb.weight, up.weight{SEED}$",
    "experts plain": f"{COPIES}experts.weight, experts.bias{DDP}",
    "stages plain": f"{GROUP} parameters{OTHERS}{LOCAL}",
    "flat plain": f"ValueError: _flat_param: {FLAT}",
    "flat_original plain": f"ValueError: weight: {FLAT}",
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
            assert re.match(cause, outcome.error), f"rank {rank}: {outcome.error}"


@pytest.mark.parametrize("name", REFUSED)
def test_all_ranks_refuse_recipes_and_layouts_that_do_not_fit_them(
    outcomes: dict[str, list[Outcome]], name: str
) -> None:
    fault, place = name.split()
    for outcome in outcomes[f"refused {place}"]:
        assert re.match(REFUSED[name], outcome.result[fault]), outcome.result[fault]


@pytest.mark.parametrize("place", PLACES)
def test_a_round_is_named_by_its_parameters(outcomes: dict[str, list[Outcome]], place: str) -> None:
    assert re.search(r"round 0 \([\w.]+ and \d+ more\)", outcomes[f"killed_in_step {place}"][0].error)


@pytest.mark.parametrize("place", PLACES)
def test_a_rank_that_takes_no_part_is_missed(outcomes: dict[str, list[Outcome]], place: str) -> None:
    first, second = outcomes[f"alone {place}"]
    assert re.match(rf"DistributedError: agreement on param groups{LEFT}", first.error) and first.seconds < TIMEOUT
    if place == "plain":
        assert second.code == 0
    else:
        assert second.error.startswith("ValueError: scale: distribution.mode: 'local' is for plain tensors, got a ")


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("group", GROUPS)
def test_a_state_dict_of_one_rank_alone_says_what_to_call(
    outcomes: dict[str, list[Outcome]], place: str, group: str
) -> None:
    first, second = outcomes[f"saves_alone{group} {place}"]
    cause = together(GRADIENTS.format(12), "state_dict", remedy=f"; {GATHER_FIRST}")
    assert re.match(cause, first.error)
    assert re.match(f"DistributedError: state_dict: all ranks must call it. Here: {cause[18:]}", second.error)
    assert max(first.seconds, second.seconds) < TIMEOUT


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("group", GROUPS)
def test_nobody_waits_longer_than_the_time_out(outcomes: dict[str, list[Outcome]], place: str, group: str) -> None:
    first, second = outcomes[f"stalls{group} {place}"]
    assert re.match(AGREEMENT, first.error) and "Operation timed out" in first.error and second.code == 0
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
                assert found["said"].startswith(
                    "FloatingPointError: gradient of down.weight: finite values are required"
                )
                assert found["said"].endswith("nothing was changed") and found["changed"] == []


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
    gradients = "DistributedError: gradients: all ranks must have the same norm of scale, got "
    values = "the same values, got other values on ranks 2, 3 than on the lowest rank for up.weight; set the same seed"
    for outcome in outcomes["groups_apart"]:
        found = outcome.result
        assert re.match(
            rf"{gradients}.* on ranks 0, 1, .* on ranks 2, 3; .*; and 10 more; nothing was changed", found["said"]
        )
        assert found["changed"] == [] and values in found["values"]
        assert "distribution.group_size: must divide the number of ranks, 4, got 3" in found["size"]
        assert re.search(r"distribution\.group_size: \d cannot be combined with a DTensor", found["kind"])
    parameters = [outcome.result["parameters"] for outcome in outcomes["groups_apart"]]
    assert all(torch.equal(value, parameters[0][name]) for own in parameters for name, value in own.items())


@pytest.mark.parametrize("place", PLACES)
def test_a_gradient_on_some_ranks_only_is_refused_by_all(outcomes: dict[str, list[Outcome]], place: str) -> None:
    said = "DistributedError: gradients: a parameter must have a gradient on all ranks or on none, "
    said += "got a gradient on some ranks for up.weight"
    for outcome in outcomes[f"one_sided {place}"]:
        assert outcome.result["changed"] == [] and outcome.result["said"] == f"{said}; nothing was changed"


NUMBERS = {
    "other lr": "lr, got 0.003 on rank 0, 0.5 on rank 1",
    "other lr in a tensor": "lr, got 0.003 on rank 0, 0.5 on rank 1",
    "other weight_decay": "weight_decay, got 0.01 on rank 0, 0.5 on rank 1",
    "twice": "number of steps since the gradients were written, got 0 on rank 0, 1 on rank 1",
    "ahead": "number of steps, got 2 on rank 0, 1 on rank 1",
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("fault", NUMBERS)
def test_another_number_on_one_rank_is_refused_by_all(
    outcomes: dict[str, list[Outcome]], fault: str, place: str
) -> None:
    said = f"DistributedError: step of scale and 12 more: all ranks must have the same {NUMBERS[fault]}"
    for outcome in outcomes[f"{fault} {place}"]:
        assert outcome.result["changed"] == []
        assert outcome.result["said"] == f"{said}; nothing was changed; {STEP_ALIKE}"


def test_another_number_is_found_one_step_later_on_a_device(outcomes: dict[str, list[Outcome]]) -> None:
    said = f"DistributedError: step of scale and 12 more: all ranks must have the same {NUMBERS['other lr']}"
    for outcome in outcomes["changed_on_device plain"]:
        assert outcome.result["changed"] == []
        assert outcome.result["said"] == f"{said}; found one step later; {STEP_ALIKE}"


APART = {
    "not_averaged": ("scale", "; and 10 more; nothing was changed; "),
    "outside": ("scale", "; nothing was changed; "),
    "not_averaged_on_device": ("up.weight", "; found one step later; "),
}


@pytest.mark.parametrize("fault", APART)
def test_gradients_that_nobody_has_averaged_are_refused_by_all(outcomes: dict[str, list[Outcome]], fault: str) -> None:
    name, end = APART[fault]
    for outcome in outcomes[f"{fault} plain"]:
        said = outcome.result["said"]
        assert said.startswith(f"DistributedError: gradients: all ranks must have the same norm of {name}, got ")
        norms = [float(norm) for norm in re.findall(r"([\d.e-]+) on rank", said)]
        assert norms[1::2] == pytest.approx([2 * norm for norm in norms[::2]], rel=1e-5)  # six digits are said
        assert f"on rank 1{end}{AVERAGE_FIRST}" in said
        assert outcome.result["changed"] == []


def test_gradients_that_differ_by_rounding_are_used(outcomes: dict[str, list[Outcome]]) -> None:
    for outcome in outcomes["rounded_apart plain"]:
        assert outcome.result["said"] == "" and outcome.result["changed"]


def test_a_partial_sum_on_some_ranks_only_is_refused_by_all(outcomes: dict[str, list[Outcome]]) -> None:
    cause = together(SUMS.format(13, ""), SUMS.format(12, "; none of up.weight"))
    for outcome in outcomes["one_sided_sum plain"]:
        assert outcome.result["changed"] == [] and re.match(cause, outcome.result["said"])


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
    said = r"update: at most 1 failed roots in a row are tolerated \(failure.roots\), got more for ([\w.]+(, |;))+"
    for outcome in outcomes[f"roots {place}"]:
        assert outcome.result["count"] == 3 and re.match(said, outcome.result["said"])


def test_a_sparse_gradient_is_refused_by_name(outcomes: dict[str, list[Outcome]]) -> None:
    first, second = outcomes["sparse plain"]
    assert second.error == "TypeError: up.weight: a dense gradient is required, got layout torch.sparse_coo"
    assert re.match(AGREEMENT, first.error)
