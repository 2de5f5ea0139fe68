"""The same trajectory on one process and on many, whatever holds the parameters. Real processes, gloo.

Results are equal bit for bit, with two exceptions in the last place: the norms of whole parameters that Adafactor and
constraints take are summed in another order, and the sums of averaging are fused where all weights of a call are one
number, which depends on what lies together. Ranks among themselves are equal without exception.
"""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from ...refusals import lacking
from .launch import Outcome, Run, launch_once
from .workers.trajectories import REWRITES, STEPS

pytestmark = pytest.mark.slow

SMALL = ["blocking.size=8", "blocking.merge=8"]
SPREAD = ["update.eigenbasis.refresh.steps=2", "update.eigenbasis.refresh.min_wave_work=1"]
SOAP = [*SMALL, *SPREAD, "distribution.bucket=5600"]
CODED = [
    f"storage.{slot}.min_elements=1"
    for slot in ("statistic.inner.inner", "basis.inner", "first_moment", "second_moment")
]
SHAMPOO = [f"update.graft.direction.shampoo.refresh.{field}" for field in ("steps=2", "min_wave_work=1")]
RECORD = ["radial_brake", "row_floor", "radius_pin", {"kind": "late_decay", "rate": 0.5}]
SCHEDULE = {"from": 0.7, "to": 0.99, "steps": 5}
SCHEDULED = [{"kind": "momentum", "beta": SCHEDULE}, {"kind": "rms", "beta": SCHEDULE}]
CASES: dict[str, dict[str, Any]] = {
    "adamw": {"recipe": "adamw"},
    "soap": {"recipe": "soap_fitted", "overrides": SOAP},
    "muon": {"recipe": "muon"},
    "psgd": {"recipe": "psgd_kron"},
    "quantized": {"recipe": "soap_int8", "overrides": [*SOAP, *CODED]},
    "turning": {"recipe": "soap_4bit", "overrides": [*SOAP, *CODED]},
    "l2": {"recipe": "soap_fitted", "overrides": [*SOAP, "weight_decay.kind=l2", "weight_decay.rate=0.1"]},
    "after_decay": {"recipe": "splus"},
    "averaged": {"recipe": "schedule_free_adamw"},
    "queue": {"recipe": {"base": "adamw", "averaging": {"kind": "lawa", "window": 5}}},
    "bfloat16": {"recipe": "soap_fitted", "overrides": SOAP, "dtype": "bfloat16"},
    "few": {"recipe": "soap_fitted", "overrides": SOAP[2:], "only": "out.weight"},
    "shampoo": {"recipe": "shampoo", "overrides": [*SMALL, *SHAMPOO]},
    "per_parameter": {
        "recipe": "shampoo",
        "overrides": [*SMALL, "update.graft.per=parameter", *SHAMPOO, "distribution.bucket=5600"],
        "gaps": True,
    },
    "adafactor": {"recipe": "adafactor"},
    "hyper": {"recipe": {"base": "muon", "view": "whole", "constraints": "hyperball"}},
    "record": {"recipe": {"base": "muon", "view": "whole", "constraints": RECORD}},
    "scheduled": {"recipe": {"update": SCHEDULED}, "overrides": SMALL},
    "scaled": {"recipe": {"base": "adamw", "width_scaling": {"base_width": 6}}},
    "scaled blocks": {"recipe": {"base": "soap_fitted", "width_scaling": "spectral"}, "overrides": SOAP},
    "signals": {
        "recipe": {"update": ["listening_for_test", {"kind": "momentum"}]},
        "overrides": SMALL,
        "provided": True,
    },
}
CASES["remainders"] = {
    "recipe": {"base": "soap_fitted", "constraints": "rounding"},
    "overrides": SOAP,
    "dtype": "bfloat16",
}
BY_CHANCE = {"kind": "rounding", "rule": "stochastic"}
CASES["chances"] = {"recipe": {"base": "adamw", "constraints": BY_CHANCE}, "dtype": "bfloat16"}
CASES["delayed"] = {"recipe": "soap_fitted", "overrides": [*SOAP, "update.eigenbasis.refresh.delay=2"]}
CASES["delayed roots"] = {
    "recipe": "shampoo",
    "overrides": [*SMALL, *SHAMPOO, "update.graft.direction.shampoo.refresh.delay=1"],
    "gaps": True,
}
CASES["pairs"] = {"recipe": "lora_rite"}
LEARNED = ["update.prodigy.start=0.1", "weight_decay.rate=0.5"]
CASES["learned rate"] = {"recipe": "prodigy", "overrides": LEARNED}
INPUTS = ["update.inputs.statistic.interval=2", "update.inputs.refresh.steps=2", "blocking.size=5", "lr=0.02"]
INPUTS += ["update.spectral.solver.precision=input"]
LAYERS = ["update.sirf.refresh.steps=2", "update.sirf.lr_preconditioner=0.2", "blocking.size=5", "lr=0.02"]
EARLY = ["distribution.overlap_backward=true"]
CASES["early"] = {"recipe": "soap_fitted", "overrides": [*SOAP, *EARLY], "early": True}
WRITTEN = ["distribution.gather=parameters"]
CASES["written"] = {"recipe": "soap_fitted", "overrides": [*SOAP, *WRITTEN], "dtype": "bfloat16"}
CASES["written after decay"] = {"recipe": "splus", "overrides": [*WRITTEN, "averaging=null"]}
CASES["written learned rate"] = {"recipe": "prodigy", "overrides": [*LEARNED, *WRITTEN]}
CASES["written with gaps"] = {"recipe": "soap_fitted", "overrides": [*SOAP, *WRITTEN], "gaps": True}
CASES["groups"] = {**CASES["l2"], "groups": True}
CASES["groups written"] = {**CASES["written"], "dtype": "float32", "groups": True}
CASES["groups after decay"] = {"recipe": "splus", "groups": True}
CASES["groups hyper"] = {**CASES["hyper"], "groups": True}
GAPPED = (
    "soap",
    "early",
    "turning",
    "shampoo",
    "adamw",
    "averaged",
    "hyper",
    "record",
    "signals",
    "scheduled",
    "delayed",
)
GAPS = [f"{name} with gaps" for name in GAPPED]
CASES |= {name: {**CASES[name.removesuffix(" with gaps")], "gaps": True} for name in GAPS}
PLAIN = {"recipe": "sgd", "overrides": [*SMALL, "update.heavy_ball.beta=0"]}
BF16 = ["distribution.dtype=bf16", "distribution.bucket=5600"]
ROUGH = {"rounded": {**PLAIN, "overrides": [*PLAIN["overrides"], *BF16]}}
TRAINED = ("ddp2", "ddp3", "fsdp2", "fsdp3", "hsdp4", "whole2")
CLOSE = (
    "adafactor",
    "averaged with gaps",
    "pairs",
    "learned rate",
    "written learned rate",
    *(f"{n}{gaps}" for n in ("hyper", "record", "signals") for gaps in ("", " with gaps")),
    "groups hyper",
)
TWICE = [
    "quantized",
    "averaged",
    "bfloat16",
    "few",
    "per_parameter",
    "adafactor",
    "pairs",
    "remainders",
    "chances",
    "groups",
    "groups after decay",
    "learned rate",
    "scaled blocks",
    "delayed roots",
]
PLACES = {
    "plain1": ["adamw", "soap"],
    "fsdp1": ["adamw", "soap"],
    "plain2": ["soap", "groups written", "written", "written after decay", "written learned rate", *TWICE, *GAPS[::2]],
    "fsdp2": ["groups hyper", "early", "scaled", *TWICE, *GAPS[1::2]],
    "plain3": ["written with gaps", *GAPS[1::2]],
    "fsdp3": ["soap", *GAPS[::2]],
    "plain4": ["few", "soap"],
    "fsdp4": ["few", "soap"],
    "hsdp4": ["few", "hyper", "after_decay", "per_parameter", "adamw with gaps", "soap with gaps", "early with gaps"],
    "mixed4": ["few", "queue", "muon", "psgd", *(GAPS[i] for i in (1, 3, 5, 6))],
    "grouped4": ["few", "adamw", "adafactor", "signals", "written", *(GAPS[i] for i in (0, 3, 6))],
    "late2": ["adamw", "averaged", "soap with gaps"],
    "whole2": ["soap"],
    "strided4": ["adamw", "soap with gaps", "early"],
    "strided6": ["soap"],  # three uneven parts of two uneven halves
}
"""What the matrix of layouts and recipes leaves out: blocks within parameters in many rounds, storage, other dtypes,
steps that parameters miss, averages, and placements that torch's wrappers do not make.

A case has one replicated and one sharded place, since exchanges differ in that. Cases with gaps have one of them on two
ranks and the other on three, in turn. They do all that the same cases without gaps do, which is why few of those are
here. Cases whose code depends on the mesh are on four ranks as well."""
PLACED = [(place, case) for place, cases in PLACES.items() for case in cases]
PAIRS = [pytest.param(place, case, id=f"{place}-{case}") for place, case in PLACED]
ALONE = dict.fromkeys(case for _, case in PLACED)
"""The cases that have a place, in order. One process does them too."""
SAME = 1e-6
"""Of the largest entry of a parameter: eight units in the last place of float32."""


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Outcome]]:
    alone = {name: {**CASES[name], "place": "plain"} for name in ALONE}
    alone["plain"] = {**PLAIN, "place": "plain", "always": True}
    runs = [Run("one", "trajectories:run", 0, alone)]
    for place, names in PLACES.items():
        rough = ROUGH if place in ("plain2", "fsdp2") else {}
        job = {name: {**(CASES | ROUGH)[name], "place": place[:-1]} for name in (*names, *rough)}
        runs.append(Run(place, "trajectories:run", int(place[-1]), job))
    for place in ("plain1", *TRAINED):
        runs.append(Run(f"{place} trained", "training:run", int(place[-1]), {"place": place[:-1], "overrides": []}))
    for place in ("plain1", "ddp2", "fsdp2"):
        job = {"place": place[:-1], "overrides": [], "sam": {"rho": 0.2}}
        runs.append(Run(f"{place} sharp", "training:run", int(place[-1]), job))
        job = {"place": place[:-1], "overrides": ["lr=0.5"], "recipe": {"base": "adamw", "line_search": {}}}
        runs.append(Run(f"{place} searched", "training:run", int(place[-1]), job))
        job = {"place": place[:-1], "overrides": INPUTS, "recipe": "newton_muon"}
        runs.append(Run(f"{place} of inputs", "training:run", int(place[-1]), job))
        job = {"place": place[:-1], "overrides": LAYERS, "recipe": "singd"}
        runs.append(Run(f"{place} of layers", "training:run", int(place[-1]), job))
        job = {"place": place[:-1], "recipes": {"newton_muon": INPUTS, "singd": LAYERS}}
        runs.append(Run(f"{place} interrupted", "training:interrupted", int(place[-1]), job))
    divided = {
        "newton_muon": [f"update.inputs.{field}=1" for field in ("statistic.interval", "refresh.steps")] + INPUTS[4:],
        "singd": ["update.sirf.refresh.steps=1", "update.sirf.lr_preconditioner=0.3"],
    }
    runs += [Run(f"layers on {ranks}", "training:tensor_parallel", ranks, divided) for ranks in (0, 2)]
    runs.append(Run("rounded trained", "training:run", 2, {"place": "fsdp", "overrides": BF16}))
    runs.append(Run("early trained", "training:run", 2, {"place": "fsdp", "overrides": EARLY}))
    runs += [Run(f"{place} copied", "copies:run", 2, place) for place in ("plain", "fsdp")]
    runs.append(Run("partial", "partial:run", 2))
    runs.sort(key=lambda run: run.world)
    return launch_once(runs, tmp_path_factory, "trajectories", limit=400)


def results(outcomes: Mapping[str, list[Outcome]], place: str, case: str) -> list[dict[str, Any]]:
    return [outcome.result[case] for outcome in outcomes[place]]


def paths(result: Mapping[str, Any]) -> dict[str, Tensor]:
    """All parameters that were looked at, each by a name of its own."""
    looks = [*result["evaluated"], result["parameters"]]
    return {f"{name} at look {i}": value for i, look in enumerate(looks) for name, value in look.items()}


def distance(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> float:
    """max |ours - theirs| / max |theirs| of the worst parameter."""
    assert ours.keys() == theirs.keys()
    return max(float((ours[name] - other).abs().max() / other.abs().max()) for name, other in theirs.items())


@pytest.mark.parametrize(("place", "case"), PAIRS)
def test_many_ranks_do_what_one_process_does(outcomes: dict[str, list[Outcome]], place: str, case: str) -> None:
    (one,), ranks = results(outcomes, "one", case), results(outcomes, place, case)
    for rank in ranks:
        assert rank["steps"] == one["steps"] and rank["skipped"] == one["skipped"]
        if case in CLOSE:
            assert distance(paths(rank), paths(one)) < SAME
        else:
            assert all(torch.equal(value, paths(one)[name]) for name, value in paths(rank).items())


@pytest.mark.parametrize(
    ("place", "case"), [*PAIRS, *((place, case) for place in ("plain2", "fsdp2") for case in ROUGH)]
)
def test_all_ranks_have_the_same_parameters(outcomes: dict[str, list[Outcome]], place: str, case: str) -> None:
    first, *others = results(outcomes, place, case)
    for other in others:
        assert all(torch.equal(value, paths(first)[name]) for name, value in paths(other).items())


@pytest.mark.parametrize(("place", "case"), PAIRS)
def test_every_rank_inspects_what_one_process_does(outcomes: dict[str, list[Outcome]], place: str, case: str) -> None:
    """Owners hold the state, and rows of parameters lie apart: all ranks get the table of one process."""
    (one,), ranks = results(outcomes, "one", case), results(outcomes, place, case)
    expected = one["inspected"]
    assert {"update_rms", "cosine", "skipped"} <= {key[-1] for key in expected}
    for rank in ranks:
        assert rank["inspected"].keys() == expected.keys()
        if case not in CLOSE:
            for key, value in expected.items():  # of equal bits: float64 sums in another order
                assert rank["inspected"][key] == pytest.approx(value, rel=1e-12, abs=1e-14, nan_ok=True), key


def test_the_trajectories_go_somewhere(outcomes: dict[str, list[Outcome]]) -> None:
    for name in ALONE:
        case, (one,) = CASES[name], results(outcomes, "one", name)
        trained = {n for n, count in one["steps"].items() if count}
        assert {n.startswith("out.weight") for n in trained} == ({True} if "only" in case else {True, False})
        moved = {n for n, p in one["parameters"].items() if not torch.equal(p, one["start"][n])}
        assert moved == trained, name
        if case.get("gaps"):
            assert one["skipped"] == {"down.weight": 1} and len(set(one["steps"].values())) > 2
    assert results(outcomes, "one", "quantized")[0]["bytes"] < results(outcomes, "one", "soap")[0]["bytes"] / 2
    assert any(name.startswith("frozen") for name in results(outcomes, "one", "soap with gaps")[0]["steps"])


@pytest.mark.parametrize("place", ["plain4", "fsdp4", "hsdp4", "mixed4"])
def test_ranks_without_blocks_take_part(outcomes: dict[str, list[Outcome]], place: str) -> None:
    assert sorted(rank["blocks"] for rank in results(outcomes, place, "few")) == [0, 0, 0, 1]


def test_groups_of_ranks_compute_all_updates_each(outcomes: dict[str, list[Outcome]]) -> None:
    """The state of two ranks of four is the whole one, and lies twice."""
    for case in ("soap with gaps", "adamw"):
        (one,), ranks = results(outcomes, "one", case), results(outcomes, "grouped4", case)
        if case != "adamw":  # of which each rank has rows of every parameter
            assert ranks[0]["blocks"] + ranks[1]["blocks"] == one["blocks"] == ranks[2]["blocks"] + ranks[3]["blocks"]
        # the step of every parameter, 8 bytes, is on each rank
        steps = 8 * len(one["steps"])
        held = [rank["bytes"] - steps for rank in ranks]
        assert held[:2] == held[2:] and sum(held[:2]) == one["bytes"] - steps


@pytest.mark.parametrize("place", ["plain2", "plain4"])
def test_every_block_is_computed_once(outcomes: dict[str, list[Outcome]], place: str) -> None:
    (one,), ranks = results(outcomes, "one", "soap"), results(outcomes, place, "soap")
    assert sum(rank["blocks"] for rank in ranks) == one["blocks"]
    assert min(rank["blocks"] for rank in ranks) > 0


@pytest.mark.parametrize("place", ["plain2", "fsdp2"])
def test_messages_may_be_rounded(outcomes: dict[str, list[Outcome]], place: str) -> None:
    """bf16 keeps 8 bits: what travels is off by up to 2^-8 of every entry: updates of replicated parameters, gradients
    of sharded ones, whose updates then need no rounding. Plain gradient descent adds these errors up.

    They are independent and uniform within 2^-8 / m of an entry with the significand m, whose logarithm is nearly
    uniform: their root mean square is 2^-8 of that of the steps times sqrt(mean of m^-2 / 3), which is 0.425. There are
    2000 entries of 5 steps.
    """
    (one,), (rough, *_) = results(outcomes, "one", "plain"), results(outcomes, place, "rounded")
    errors = squares = 0.0
    for name, value in rough["parameters"].items():
        stops = torch.stack([one["start"][name], *(look[name] for look in one["evaluated"])]).double()
        steps, error = stops.diff(dim=0), (value.double() - stops[-1]).abs()
        # float32 itself rounds each step by up to 2^-24 of the parameter
        slack = STEPS * 2**-23 * stops.abs().amax(0)
        assert bool((error <= 2**-8 * steps.abs().sum(0) + slack).all())
        errors, squares = errors + float(error.square().sum()), squares + float(steps.square().sum())
    assert (errors / squares) ** 0.5 == pytest.approx(0.425 * 2**-8, rel=0.1)


def test_training_goes_on_with_rounded_messages(outcomes: dict[str, list[Outcome]]) -> None:
    exact, rough = outcomes["fsdp2 trained"][0].result, outcomes["rounded trained"][0].result
    assert rough != exact
    # two roundings change a step by 0.6 * 2^-8 of itself (root mean square); six steps take about a tenth off the loss
    assert rough == pytest.approx(exact, rel=0.1 * 2**-8)


@pytest.mark.parametrize("place", TRAINED)
def test_training_has_the_losses_of_one_process(outcomes: dict[str, list[Outcome]], place: str) -> None:
    one = outcomes["plain1 trained"][0].result
    assert one[-1] < one[1] - 0.1  # of the same batch
    for outcome in outcomes[f"{place} trained"]:
        # sums of gradients in another order, float32: a few 1e-7, which assignments by small moments enlarge
        assert outcome.result == pytest.approx(one, rel=1e-5)


@pytest.mark.parametrize("place", ["ddp2", "fsdp2"])
def test_sharpness_aware_training_has_the_losses_of_one_process(outcomes: dict[str, list[Outcome]], place: str) -> None:
    one = outcomes["plain1 sharp"][0].result
    assert abs(one[-1] - outcomes["plain1 trained"][0].result[-1]) > 1e-3  # rho matters
    for outcome in outcomes[f"{place} sharp"]:
        assert outcome.result == pytest.approx(one, rel=1e-5)  # as above


@pytest.mark.parametrize("place", ["ddp2", "fsdp2"])
@pytest.mark.parametrize("moments", ["inputs", "layers"])
def test_moments_of_layers_are_those_of_the_whole_batch(
    outcomes: dict[str, list[Outcome]], place: str, moments: str
) -> None:
    """Second moments of inputs and of gradients in outputs are means over ranks, as gradients are."""
    one = outcomes[f"plain1 of {moments}"][0].result
    assert one[-1] < one[1] - 0.1  # of the same batch
    for outcome in outcomes[f"{place} of {moments}"]:
        assert outcome.result == pytest.approx(one, rel=1e-5)  # as above


@pytest.mark.parametrize("place", ["plain1", "ddp2", "fsdp2"])
def test_moments_of_layers_are_those_of_gradients_that_are_stepped_with(
    outcomes: dict[str, list[Outcome]], place: str
) -> None:
    """Of two micro-batches with a scaled loss after a batch that was thrown away, on one rank and on two."""
    for recipe, moments in (("newton_muon", "inputs"), ("singd", "layers")):
        one = outcomes[f"plain1 of {moments}"][0].result
        for outcome in outcomes[f"{place} interrupted"]:
            for forgets in ("none", "zero"):
                assert outcome.result[f"{recipe} {forgets}"] == pytest.approx(one, rel=1e-5)  # as above


def test_moments_of_layers_that_are_divided_are_those_of_the_whole_layer(outcomes: dict[str, list[Outcome]]) -> None:
    """Tensor parallelism, by columns and by rows: inputs and gradients in outputs are DTensors."""
    (one,), ranks = outcomes["layers on 0"], outcomes["layers on 2"]
    for outcome in ranks:
        for recipe, losses in one.result.items():
            assert outcome.result[recipe] == pytest.approx(losses, rel=1e-5), recipe  # as above


@pytest.mark.parametrize("place", ["ddp2", "fsdp2"])
def test_line_searches_take_the_steps_of_one_process(outcomes: dict[str, list[Outcome]], place: str) -> None:
    """By losses of the whole batch; every rank sees a part of it."""
    one = outcomes["plain1 searched"][0].result
    assert one[-1] < one[1]  # of the same batch, at a learning rate that is far too large
    for outcome in outcomes[f"{place} searched"]:
        assert outcome.result == pytest.approx(one, rel=1e-5)  # as above


@pytest.mark.parametrize(
    ("place", "case"), [(place, case) for place, case in PLACED if case.startswith("early") and place != "plain3"]
)
def test_gradients_travel_during_backward(outcomes: dict[str, list[Outcome]], place: str, case: str) -> None:
    """Buckets begin before the step. What was sent too early is sent again: not all, where the rank that has written
    gradients once more holds none of a round."""
    counts = [rank["early"] for rank in results(outcomes, place, case)]
    for own in counts:
        begun, good = own["plain"]
        assert 0 < good <= begun
        written = ("foreach",) if "gaps" in case else REWRITES  # rounds wait for gradients that are missing
        assert all(own[kind][0] > own[kind][1] for kind in (*written, "accumulated"))
        assert own["same"][0] == own["same"][1] and (own["same"][0] > 0 or "gaps" in case)
        assert own["assigned"][1] == 0
    assert counts[0]["assigned"][0] > 0 == counts[1]["assigned"][0]
    assert len({own["plain"][1] for own in counts}) == 1  # all ranks find the same


def test_training_is_the_same_with_early_gradients(outcomes: dict[str, list[Outcome]]) -> None:
    assert [rank.result for rank in outcomes["early trained"]] == [rank.result for rank in outcomes["fsdp2 trained"]]


@pytest.mark.parametrize("kind", ["deepcopy", "pickle"])
@pytest.mark.parametrize("place", ["plain", "fsdp"])
def test_a_copy_goes_on_as_the_original(outcomes: dict[str, list[Outcome]], place: str, kind: str) -> None:
    for outcome in outcomes[f"{place} copied"]:
        original, twin, steps = outcome.result[kind]
        assert steps == 4 and len(original) == len(twin)
        assert all(torch.equal(p, q) for p, q in zip(original, twin, strict=True))


@pytest.mark.parametrize("recipe", ["adamw", "soap_fitted"])
@pytest.mark.parametrize("place", ["replicated", "sequence_parallel"])
def test_partial_gradients_are_summed(outcomes: dict[str, list[Outcome]], place: str, recipe: str) -> None:
    """float64, sums of gradients in another order: a few units of 1e-16, ten times more after SOAP's rotations."""
    for outcome in outcomes["partial"]:
        far = outcome.result["trained"][f"{place} {recipe}"]
        assert far["one"] < 1e-13 and (far["torch"] < 1e-13) == (recipe == "adamw")


def test_a_gradient_of_any_placement_is_laid_out_as_its_parameter(outcomes: dict[str, list[Outcome]]) -> None:
    for outcome in outcomes["partial"]:
        assert len(outcome.result["given"]) == 10
        assert set(outcome.result["given"].values()) == {(True, True)}


def test_a_gradient_that_cannot_be_laid_out_is_refused(outcomes: dict[str, list[Outcome]]) -> None:
    for outcome in outcomes["partial"]:
        plain, other, sharded = outcome.result["refused"]
        assert lacking(plain, "w", "DTensor", "plain tensor") == [] and lacking(other, "w", "DeviceMesh") == []
        assert lacking(sharded, "w", "plain tensor", "DTensor") == []
