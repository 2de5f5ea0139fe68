"""Plans: what they say of every rank is what an optimizer does there, and what arithmetic says it must.

Optimizers run here on the ranks of a pretended process group, one after the other: what collectives are given is
counted, and zeros arrive.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import eigengraft
from eigengraft.blocking import Blocking
from eigengraft.distributed.balance import SLACK, Item, Loads, assign
from eigengraft.distributed.distribution import Distribution
from eigengraft.distributed.layouts import Layout, holding
from eigengraft.distributed.rank_group import RankGroup, Work, pads
from eigengraft.errors import RecipeError
from eigengraft.experiments.tasks.model_shapes import MODELS, parameters_of, read_shapes
from eigengraft.optimizers.plan.measure import measured_work
from eigengraft.optimizers.plan.plan import Plan, known, plan
from eigengraft.optimizers.plan.shard_placement import whole_block_shards
from eigengraft.optimizers.plan.traffic import all_reduced
from eigengraft.optimizers.recipe.loading import load_recipe
from eigengraft.optimizers.recipe.routing import DescribedParameters, ParamInfo, describe_model
from eigengraft.optimizers.stacks.assignment import block_cost

from ...cli import invoke
from ...refusals import check_said, refused

pytestmark = pytest.mark.slow

SOAP = {
    "update": [
        {
            "kind": "eigenbasis",
            "inner": [{"kind": "momentum"}, {"kind": "rms"}],
            "refresh": {"kind": "every", "steps": 5},
        }
    ],
    "blocking": {"size": 8, "merge": 8, "min_axes": 2},
}
GRAFT = {"kind": "graft", "direction": {"kind": "shampoo"}, "magnitude": {"kind": "rms"}, "per": "parameter"}
RECIPES: dict[str, Any] = {
    "soap_fitted": SOAP,
    "in many messages, rounded": {**SOAP, "distribution": {"dtype": "bf16", "bucket": 2048}},
    "written by owners": {**SOAP, "distribution": {"gather": "parameters"}},
    "begun in backward": {**SOAP, "distribution": {"overlap_backward": True, "bucket": 2048}},
    "quantized": {**SOAP, "storage": {"basis": {"kind": "int8", "min_elements": 1}}},
    "averaged": {**SOAP, "averaging": {"kind": "ema"}},
    "by parameter": {"update": [{"kind": "momentum"}, GRAFT], "weight_decay": {"kind": "l2", "rate": 0.1}},
    "adamw": "adamw",
    "muon": "muon",
    "adafactor": "adafactor",
    "splus": "splus",
}
RANKS = 4


class Odd(nn.Module):
    """Axes that 4 ranks do not divide, one shorter than them, a convolution, vectors, a tied head, a frozen weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(37, 10)
        self.conv = nn.Conv1d(10, 7, 3)
        self.norm = nn.LayerNorm(7)
        self.up = nn.Linear(7, 13)
        self.down = nn.Linear(13, 3)
        self.frozen = nn.Linear(3, 10)
        self.head = nn.Linear(10, 37, bias=False)
        self.head.weight = self.embedding.weight
        self.frozen.requires_grad_(False)


class Counted:
    """What one rank gives to collectives, as a plan counts it: (sent, received, messages, buffers)."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.counts: dict[str, list[int]] = {}

        def swapped(rank_group: RankGroup, sent: Tensor, sending: list[int], receiving: list[int], what: str) -> Any:
            out, into = ([n * sent.element_size() for n in numbers] for numbers in (sending, receiving))
            me, others = rank_group.rank, [r for r in range(rank_group.size) if r != rank_group.rank]
            peered = sum(out[r] > 0 for r in others)
            digests = what.startswith("agreement")
            kind = "synchronization" if digests else what
            self.add(kind, sum(out) - out[me], sum(into) - into[me], peered, sum(out) + sum(into))
            return Work((), sent if digests else sent.new_zeros(sum(receiving)), lambda wait: None)

        def gathered(rank_group: RankGroup, mine: Tensor, what: str) -> Any:
            each, others = mine.nbytes, rank_group.size - 1
            self.add(what, others * each, others * each, others if each else 0, (1 + rank_group.size) * each)
            return Work((), mine.new_zeros(rank_group.size, mine.numel()), lambda wait: None)

        def cast(rank_group: RankGroup, mine: Tensor, lengths: list[int], what: str) -> Any:
            if pads(lengths):
                work = gathered(rank_group, mine.new_zeros(max(lengths)), what)
                return Work((), [row[:length] for row, length in zip(work.result, lengths, strict=True)], work.finish)
            own, total, others = mine.nbytes, sum(lengths) * mine.element_size(), rank_group.size - 1
            self.add(what, others * own, total - own, others if own else 0, own + total)
            return Work((), [mine.new_zeros(length) for length in lengths], lambda wait: None)

        def totalled(rank_group: RankGroup, values: Tensor, what: str) -> Tensor:
            self.add("agreement", 0, 0, 1, values.nbytes)
            return values

        monkeypatch.setattr(RankGroup, "gloo_devices", frozenset({"cpu"}))
        monkeypatch.setattr(RankGroup, "all_to_all", swapped)
        monkeypatch.setattr(RankGroup, "all_gather", gathered)
        monkeypatch.setattr(RankGroup, "all_gather_uneven", cast)
        monkeypatch.setattr(RankGroup, "all_reduce", totalled)
        monkeypatch.setattr(RankGroup, "all_gather_object", lambda rank_group, mine, what: [mine] * rank_group.size)

    def add(self, what: str, *numbers: int) -> None:
        kind = {"parameters": "gradients"}.get(what.split()[0], what.split()[0])
        self.counts[kind] = [a + b for a, b in zip(self.counts.get(kind, [0] * 4), numbers, strict=True)]


def spread(model: nn.Module, parallel: str) -> None:
    if parallel == "fsdp2":
        fully_shard(model, mesh=init_device_mesh("cpu", (RANKS,)))
    if parallel == "hsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", (2, RANKS // 2), mesh_dim_names=("copies", "parts")))


def test_names_are_an_optimizers() -> None:
    found = known([("module.output.weight", (4, 3)), ("module.a", (2,)), ("a", (2,))])
    assert [(info.name, info.role) for info in found] == [
        ("output.weight", "head"),
        ("module.a", "vector"),
        ("a", "vector"),
    ]


@pytest.fixture(params=range(RANKS))
def rank(request: pytest.FixtureRequest) -> Iterator[int]:
    dist.init_process_group("fake", rank=request.param, world_size=RANKS, store=FakeStore())
    yield request.param
    dist.destroy_process_group()


@cache
def planned(name: str, parallel: Any) -> tuple[list[ParamInfo], Plan]:
    """What is told of the odd model, and the plan that follows from it alone: the same on every rank."""
    model = Odd()
    facts = describe_model(model)
    told = [facts[id(parameter)] for parameter in model.parameters() if parameter.requires_grad]
    mesh, way = (2, 2) if parallel == "hsdp" else (RANKS,), "ddp" if parallel == "grouped" else parallel
    return told, plan(recipe_for(name, parallel), told, mesh, way)


def recipe_for(name: str, parallel: Any) -> eigengraft.Recipe:
    """One of the recipes; grouped: with two groups of ranks, each of which computes all updates."""
    return eigengraft.load_recipe(RECIPES[name], ["distribution.group_size=2"] if parallel == "grouped" else [])


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("parallel", ["ddp", "fsdp2", "hsdp", "grouped"])
@pytest.mark.parametrize("name", RECIPES)
def test_a_plan_is_what_the_optimizer_does(
    rank: int, parallel: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The blocks that each rank owns, its bytes of state, and the bytes and messages of a step, exactly."""
    model, (told, paper) = Odd(), planned(name, parallel)
    spread(model, parallel)
    counted = Counted(monkeypatch)
    trained = [(path, parameter) for path, parameter in model.named_parameters() if parameter.requires_grad]
    optimizer = eigengraft.Optimizer(DescribedParameters(trained, describe_model(model)), recipe_for(name, parallel))
    names = [str(fact.name) for fact in told]
    owned = {
        (names[position], key)
        for unit in optimizer.stack_states()
        if unit.block_group is not None
        for _, position, key in unit.rows()
    }
    assert owned == {
        (name, key)
        for name, placement in paper.placements.items()
        for key, owner in (placement.owners or {}).items()
        if owner == (rank % 2 if parallel == "grouped" else rank)
    }
    assert len(owned) == paper.blocks[rank]
    assert optimizer.state_bytes() == paper.state[rank]
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter) if parameter.requires_grad else None
    optimizer.step()
    for kind in ("gradients", "updates", "synchronization"):
        traffic = paper.traffic[kind]
        found = [int(numbers[rank]) for numbers in (traffic.sent, traffic.received, traffic.messages, traffic.buffers)]
        assert counted.counts.get(kind, [0] * 4) == found, kind
    agreement = paper.traffic["agreement"]
    assert counted.counts["agreement"][2:] == [agreement.messages[rank], agreement.buffers[rank]]


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_gradients_that_step_changes_are_not_sent_before() -> None:
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    module = nn.Linear(8, 8, bias=False)
    fully_shard(module, mesh=init_device_mesh("cpu", (2,)))
    early = ["distribution.overlap_backward=true", "weight_decay.kind=l2", "weight_decay.rate=0.1"]
    with refused(ValueError, "overlap_backward"):
        eigengraft.compose(eigengraft.load_recipe("muon", early), module)
    dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_owners_do_not_write_what_needs_updates() -> None:
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    written = ["distribution.gather=parameters", "averaging=ema"]
    with refused(ValueError, "distribution.gather", "updates", "averaging"):
        eigengraft.compose(eigengraft.load_recipe("muon", written), nn.Linear(8, 8, bias=False))
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"mode": "local", "overlap_backward": True}, ("overlap_backward", "local")),
        ({"mode": "sharded", "gather": "parameters"}, ("gather", "parameters")),
        ({"dtype": "bf16", "gather": "parameters"}, ("gather", "parameters")),
        ({"mode": "local", "group_size": 2}, ("group_size", "replicated", "local")),
    ],
)
def test_settings_without_effect_are_refused(fields: dict[str, Any], says: tuple[object, ...]) -> None:
    with refused(ValueError, *says):
        Distribution(**fields)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_whole_blocks_do_not_travel(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 8 x 8 on 4 ranks: 32 columns are cut into whole blocks, 8 rows would not be."""
    recipe = {**SOAP, "update": [{**SOAP["update"][0], "refresh": {"kind": "every", "steps": 1}}]}
    model = nn.Sequential(nn.Linear(32, 8, bias=False), nn.Linear(8, 32, bias=False), nn.LayerNorm(32))
    placements = whole_block_shards(recipe, model, RANKS)
    assert [placements(parameter) for parameter in model.parameters()] == [Shard(1), Shard(0), Shard(0), Shard(0)]
    assert whole_block_shards(recipe, model, 3)(model[0].weight) == Shard(0)  # torch cuts other axes evenly only
    fully_shard(model, mesh=init_device_mesh("cpu", (RANKS,)), shard_placement_fn=placements)
    counted = Counted(monkeypatch)
    optimizer = eigengraft.compose(recipe, model)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert [counted.counts[kind][:2] for kind in ("gradients", "updates")] == [[0, 0], [0, 0]]
    assert sum(len(unit.stack.param_ids) for unit in optimizer.stack_states() if unit.block_group is not None) == 4
    with refused(ValueError, "whole_block_shards", "(8, 32)"):
        placements(model[0].weight)


def one_block(mesh: tuple[int, ...], parallel: Any, dtype: torch.dtype = torch.float32, **distribution: Any) -> Plan:
    """8 x 8 entries, which rank 0 owns."""
    recipe = {"update": SOAP["update"], "distribution": distribution}
    return plan(recipe, [("hidden.weight", (8, 8))], mesh, parallel, dtype)


def test_bytes_of_one_block() -> None:
    """Of 64 entries rank 0 owns all; each of 2 ranks holds 32, of 2 x 2 too, under DDP 64."""
    cut = one_block((2,), "fsdp2").traffic
    assert cut["gradients"].sent.tolist() == [0, 128] and cut["gradients"].received.tolist() == [128, 0]
    assert cut["updates"].sent.tolist() == [128, 0] and cut["updates"].messages.tolist() == [1, 0]
    half = one_block((2,), "fsdp2", torch.bfloat16).traffic
    assert half["gradients"].sent.tolist() == [0, 64] and half["updates"].sent.tolist() == [128, 0]
    copied = one_block((2, 2), "hsdp").traffic
    assert copied["gradients"].sent.tolist() == [0, 128, 0, 0]  # owners take from their own copy
    assert copied["updates"].sent.tolist() == [384, 0, 0, 0] and copied["updates"].messages[0] == 3
    assert copied["updates"].received.tolist() == [0, 128, 128, 128]
    whole = one_block((4,), "ddp").traffic
    assert not whole["gradients"].sent.any() and whole["updates"].sent.tolist() == [3 * 256, 0, 0, 0]
    assert whole["updates"].received.tolist() == [0, 256, 256, 256]
    narrow = [one_block((4,), "ddp", torch.bfloat16, gather=what).traffic for what in ("updates", "parameters")]
    assert [traffic["updates"].sent[0] for traffic in narrow] == [3 * 256, 3 * 128]
    alone = one_block((1,), "ddp").traffic
    assert not any(traffic.sent.any() or traffic.messages.any() for traffic in alone.values())


def test_entrywise_updates_stay_where_the_parts_lie() -> None:
    paper = plan("soap_fitted", [("embedding.weight", (37, 10))], (4,), "fsdp2")
    assert paper.placements["embedding.weight"].owners is None and not paper.blocks.any()
    assert not paper.traffic["gradients"].sent.any() and not paper.traffic["updates"].sent.any()
    assert paper.state.tolist() == [2 * 4 * 100 + 8] * 3 + [2 * 4 * 70 + 8]  # two moments; 10, 10, 10 and 7 rows


def test_state_of_equal_shapes_counts_each_dtype() -> None:
    shapes = [("a.weight", (6, 4)), ("b.weight", (6, 4))]
    paper = plan("adamw", shapes, (2,), "fsdp2", [torch.float64, torch.float32])
    assert paper.state.tolist() == [2 * (8 + 4) * 12 + 2 * 8] * 2  # two moments of 3 rows, and the step counts


def test_ranks_without_a_part_send_no_message() -> None:
    """The parameter has 3 entries. Ranks 0 and 2 hold the first two and update one each.

    Ranks 1 and 3 hold the last one, which rank 1 updates.
    """
    updates = plan("adamw", [("norm.bias", (3,))], (2, 2), "hsdp").traffic["updates"]
    assert updates.sent.tolist() == [4, 4, 4, 0] and updates.received.tolist() == [4, 0, 4, 4]
    assert updates.messages.tolist() == [1, 1, 1, 0]


@given(
    shape=st.lists(st.integers(1, 7), min_size=1, max_size=4).map(tuple),
    size=st.integers(1, 9),
    merge=st.integers(1, 30) | st.none(),
    cuts=st.lists(st.integers(-1, 3), min_size=2, max_size=2),
)
@settings(max_examples=60, deadline=None)
def test_what_ranks_hold_of_a_block(shape: tuple[int, ...], size: int, merge: int | None, cuts: list[int]) -> None:
    """Counted entry by entry: each is marked with its position, cut into blocks, and looked for in every box."""
    placements = tuple(Shard(axis) if 0 <= axis < len(shape) else Replicate() for axis in cuts)
    layout = Layout.from_placements(shape, (2, 3), placements)
    marks = torch.arange(math.prod(shape))
    for grid in Blocking(size=size, merge=merge).grids(shape):
        for index in range(len(grid.keys)):
            block = grid.block(index)
            inside = set(block.in_parameter(marks.view(grid.merged))[0].flatten().tolist())
            held = [marks.view(shape)[tuple(map(slice, box.start, box.stop))] for box in layout.boxes]
            expected = [len(inside & set(own.flatten().tolist())) for own in held]
            assert holding(layout, block).tolist() == expected


@given(
    sizes=st.lists(st.tuples(st.integers(1, 24), st.integers(1, 24)), min_size=1, max_size=7), ranks=st.integers(2, 3)
)
@settings(max_examples=25, deadline=None)
def test_the_bound_is_below_the_best_division(sizes: list[tuple[int, int]], ranks: int) -> None:
    """The best of all ways to give at most 7 blocks to at most 3 ranks."""
    recipe = eigengraft.load_recipe({"update": SOAP["update"], "routes": []})
    shapes = [(f"hidden.{i}", shape) for i, shape in enumerate(sizes)]
    paper = plan(recipe, shapes, (ranks,), "ddp")
    work = [block_cost(recipe, "", shape, torch.float32).work for shape in sizes]
    best = min(
        max(math.fsum(w for w, own in zip(work, owners, strict=True) if own == r) for r in range(ranks))
        for owners in itertools.product(range(ranks), repeat=len(work))
    )
    # sums of at most 7 numbers in different orders, refreshes apart: 14 roundings, and 2 for those of an interval
    assert paper.bound <= best * (1 + 1e-15) ** 16 and best <= paper.work.max() * (1 + 1e-15) ** 16
    assert paper.work.sum() == pytest.approx(math.fsum(work), rel=1e-14)


@given(
    items=st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)), min_size=1, max_size=60),
    carried=st.lists(st.integers(0, 20), min_size=1, max_size=6),
)
@settings(max_examples=200, deadline=None)
def test_no_owner_works_much_more_than_the_mean(items: list[tuple[int, int]], carried: list[int]) -> None:
    """At most SLACK times the mean and the largest item together, or what it carried before."""
    work, state = [float(w) for w, _ in items], [float(s) for _, s in items]
    loads = Loads(len(carried))
    loads.constant[:], loads.state[:] = carried, 1
    owners = assign([Item(*pair) for pair in zip(work, state, strict=True)], loads)
    for rank, before in enumerate(carried):
        assert loads.work[rank] == before + sum(w for w, own in zip(work, owners, strict=True) if own == rank)
        assert loads.state[rank] == 1 + sum(s for s, own in zip(state, owners, strict=True) if own == rank)
    mean, largest = sum(loads.work) / len(carried), max(work)
    # integers below 2^53 add exactly; the mean and the limit are rounded once or twice
    assert max(loads.work) <= max(SLACK * mean + largest, *carried) * (1 + 1e-15)


def test_memory_is_even_where_work_is() -> None:
    """Many small items of two kinds, one of nothing but work, one of nothing but bytes: both are divided evenly."""
    loads = Loads(7)
    assign([Item(1.0, 0.0)] * 700 + [Item(0.0, 1.0)] * 700, loads)
    assert max(loads.work) <= 108 and max(loads.state) <= 108


@pytest.mark.parametrize("recipe", ["soap_fitted", "shampoo", "muon"])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_a_large_embedding_leaves_the_work_even(recipe: str, ranks: int) -> None:
    """GPT-2's table has nearly half of Muon's bytes and none of its work."""
    shapes = [("wte.weight", (50257, 768))]
    for layer in range(12):
        blocks = {
            "attn.c_attn": (2304, 768),
            "attn.c_proj": (768, 768),
            "mlp.c_fc": (3072, 768),
            "mlp.c_proj": (768, 3072),
        }
        shapes += [(f"h.{layer}.{name}.weight", shape) for name, shape in blocks.items()]
    paper = plan(recipe, shapes, (ranks,), "ddp")
    assert paper.least_imbalance < 1.1 and paper.imbalance < 1.1


def test_llama_70b_on_1024_ranks() -> None:
    shapes = dict(MODELS["llama-70b"].shapes())
    assert sum(map(math.prod, shapes.values())) == 70_553_706_496  # as published
    assert sum(math.prod(shape) for _, shape in MODELS["llama-8b"].shapes()) == 8_030_261_248
    assert sum(math.prod(shape) for _, shape in MODELS["gpt2"].shapes()) == 124_439_808
    paper = plan("soap_fitted", shapes.items(), (1024,), "fsdp2", torch.bfloat16)
    tiles = sum(math.prod(-(-n // 1024) for n in shape) for name, shape in shapes.items() if "_proj" in name)
    assert paper.blocks.sum() == tiles and paper.blocks.max() == -(-tiles // 1024)
    assert paper.least_imbalance <= paper.imbalance < 1.1 and paper.state_imbalance < 1.1
    assert paper.balance.efficiency >= 0.95 and paper.advice is None
    there, back = paper.traffic["gradients"], paper.traffic["updates"]
    assert there.sent.sum() == there.received.sum() and back.sent.sum() == back.received.sum()
    hidden = 2**20 * tiles  # every block is full; bfloat16 goes there, float32 comes back
    assert 0.99 * 2 * hidden < there.sent.sum() < 2 * hidden and back.sent.sum() == 2 * there.sent.sum()
    assert paper.state.sum() - 1024 * 8 * len(shapes) == (
        tiles * (6 * 4 * 2**20 + 8) + 2 * 4 * (70_553_706_496 - hidden)
    )  # two factors, two bases, two moments and two counts of failures; two moments of the rest


def test_more_ranks_change_no_sum() -> None:
    papers = [plan(SOAP, parameters_of("byte_lm"), (ranks,), "fsdp2") for ranks in (1, 2, 3, 8)]
    parameters = len(papers[0].placements)
    state = [int(paper.state.sum()) - 8 * parameters * len(paper.state) for paper in papers]
    assert len(set(state)) == 1
    assert [paper.work.sum() for paper in papers] == pytest.approx([papers[0].work.sum()] * 4, rel=1e-12)


@pytest.mark.parametrize(
    ("recipe", "shapes", "mesh", "parallel", "says"),
    [
        ("soap_fitted", [], (2,), "ddp", ("plan", "parameters")),
        ("soap_fitted", [("a", (2, -1))], (2,), "ddp", ("a",)),
        ("soap_fitted", [("a", (2,)), ("b", (2,)), ("b", (3,))], (2,), "ddp", ("b",)),
        ("soap_fitted", [("a", ())], (2,), "fsdp2", ("a",)),
        ("soap_fitted", [("a", (2, 2))], (2, 2), "fsdp2", ("mesh", 1)),
        ("soap_fitted", [("a", (2, 2))], (4,), "hsdp", ("mesh", 2)),
        ("soap_fitted", [("a", (2, 2))], (0,), "ddp", ("mesh",)),
        ({**SOAP, "distribution": {"mode": "local"}}, [("a", (2, 2))], (2,), "ddp", ("distribution.mode", "local")),
        ({**SOAP, "distribution": {"mode": "sharded"}}, [("a", (2, 2))], (2,), "ddp", ("sharded",)),
        ({**SOAP, "distribution": {"mode": "replicated"}}, [("a", (2, 2))], (2,), "fsdp2", ("replicated",)),
        ({**SOAP, "distribution": {"group_size": 2}}, [("a", (2, 2))], (3,), "ddp", (2, 3)),
        ({**SOAP, "distribution": {"group_size": 2}}, [("a", (2, 2))], (4,), "fsdp2", ("parallel", "fsdp2")),
    ],
)
def test_impossible_plans_are_refused(
    recipe: Any, shapes: Any, mesh: Any, parallel: Any, says: tuple[object, ...]
) -> None:
    with refused(ValueError, *says):
        plan(recipe, shapes, mesh, parallel)


@pytest.fixture
def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The command with those arguments, in an own directory, on lines wide enough that no message is broken."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "400")
    return lambda *arguments: invoke(["plan", *arguments])


def test_shapes_in_files(tmp_path: Path) -> None:
    expected = [("a.weight", (8, 4)), ("b", (3,)), ("c", ())]
    (tmp_path / "s.json").write_text(json.dumps([["a.weight", [8, 4]], ["b", [3]], ["c", []]]))
    (tmp_path / "s.yaml").write_text("a.weight: 8x4\nb: '3'  # a vector\nc: []\n")
    for name in ("s.json", "s.yaml"):
        assert read_shapes(tmp_path / name) == expected, name
    for text in ("a: 8xb\n", "a: 8x-4\n", "- [a, '2']\n- [a, '2']\n", "# nothing\n"):
        (tmp_path / "bad.yaml").write_text(text)
        with refused(RecipeError, "bad.yaml"):
            read_shapes(tmp_path / "bad.yaml")


def test_the_command_prints_every_rank(call: Any, tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_text("hidden.weight: 8x8\n")
    result = call("s.yaml", "blocking={}", "--ranks", "2")
    assert result.exit_code == 0, result.output
    rows = [line.split() for line in result.output.splitlines() if line.split()[:1] in (["0"], ["1"])]
    assert [row[:2] for row in rows] == [["0", "1"], ["1", "0"]]
    assert "128 B" in result.output and "imbalance (largest / mean) of work 2.000, at best 2.000" in result.output
    many = call("digits", "--mesh", "5x8", "--dtype", "bfloat16")
    assert many.exit_code == 0 and "hsdp" in many.output
    assert all(word in many.output for word in ("least", "median", "largest"))


def test_the_command_plans_one_rank_unless_it_gets_more(call: Any) -> None:
    alone = call("digits")
    assert alone.exit_code == 0 and "one rank" in alone.output and "fsdp2" not in alone.output
    assert [line.split()[0] for line in alone.output.splitlines() if line.split()[:1] in (["0"], ["1"])] == ["0"]
    assert "imbalance" not in alone.output and "imbalance" in call("digits", "--ranks", "2").output
    for ranks, mesh in {"1": "one rank", "4": "mesh 1x4", "16": "mesh 2x8"}.items():
        assert mesh in call("digits", "--parallel", "hsdp", "--ranks", ranks).output


def test_the_command_writes_how_it_grows(call: Any) -> None:
    result = call("digits", "--ranks", "2,4,16", "--parallel", "ddp")
    assert call("digits", "--world", "2,4,16", "--parallel", "ddp").output == result.output
    assert result.exit_code == 0, result.output
    table = [[cell.strip() for cell in line.split("|")[1:-1]] for line in result.output.splitlines() if "|" in line]
    assert table[0][0] == "ranks" and set(table[1][0]) == {"-"} and [row[0] for row in table[2:]] == ["2", "4", "16"]
    assert len({len(row) for row in table}) == 1
    efficiency = table[0].index("efficiency")
    assert all(0 < float(row[efficiency]) <= 1 for row in table[2:])


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["llama-7b"], ("llama-7b", "llama-70b")),
        (["digits", "--mesh", "2y4"], ("--mesh", "2y4")),
        (["digits", "--mesh", "2x4", "--ranks", "4"], ("--ranks", 8, 4)),
        (["digits", "--ranks", "8,12", "--parallel", "hsdp"], ("hsdp", 8, 12)),
        (["digits", "--recipe", "soup"], ("soup", "soap")),
        (["nothing.yaml"], ("nothing.yaml",)),
    ],
)
def test_wrong_options_of_the_command_are_refused(call: Any, arguments: list[str], says: tuple[object, ...]) -> None:
    result = call(*arguments)
    assert result.exit_code == 2
    check_said(" ".join(result.output.split()), *says)


def test_measured_work_is_of_every_block_shape_and_decides_on_owners() -> None:
    shapes = [("a.weight", (24, 16)), ("b.weight", (16, 16)), ("c.bias", (16,)), ("huge.weight", (1 << 13, 1 << 12))]
    unmerged = ["blocking.min_axes=1", "blocking.merge=null"]
    recipe = load_recipe("soap_fitted", ["blocking.size=16", *unmerged])
    work = measured_work(recipe, known(shapes[:3]))
    assert set(work) == {"16x16", "8x16", "16"} and min(work.values()) > 0
    whole = load_recipe("soap_fitted", ["blocking.size=null", *unmerged])
    assert measured_work(whole, known(shapes[3:])) == {}

    def loads(times: Mapping[str, float]) -> list[float]:
        timed = recipe.replace(distribution=Distribution(work=dict(times)))
        return sorted(plan(timed, shapes[:2], (2,), "ddp").work.tolist())

    # blocks: 16x16, 8x16 of a and 16x16 of b; one rank has the expensive one, the other what is left
    assert loads({"16x16": 1.0, "8x16": 5.0}) == pytest.approx([2.0, 5.0], rel=1e-15)
    assert loads({"16x16": 3.0, "8x16": 1.0}) == pytest.approx([3.0, 4.0], rel=1e-15)


@pytest.mark.parametrize(("model", "recipe"), [("gpt2", "muon"), ("gpt2", "soap_fitted"), ("llama-8b", "muon")])
@pytest.mark.parametrize("ranks", [2, 3, 16, 32])
def test_replicas_are_sent_little_more_than_their_updates(model: str, recipe: str, ranks: int) -> None:
    """Each rank sends its share of all updates, 1 / R, to the R - 1 others: at most 1.3 times that, where matrices that
    are not split are owned unevenly (muon on 32 ranks); together the ranks send what there is and padding."""
    shapes = list(MODELS[model].shapes())
    updates = plan(recipe, shapes, (ranks,), "ddp").traffic["updates"]
    share = 4 * sum(math.prod(shape) for _, shape in shapes) * (ranks - 1) / ranks
    assert share <= updates.sent.max() <= 1.3 * share
    assert share <= updates.sent.mean() <= 1.01 * share


def test_an_all_reduce_in_a_ring_sends_each_rank_all_but_its_own_part_twice() -> None:
    """Reduce-scatter and all-gather of 3 and 8 float64 over 4 ranks: 2 * 3/4 of 24 and of 64 bytes."""
    traffic = all_reduced([3, 8], 4)
    assert traffic.sent.tolist() == traffic.received.tolist() == [36 + 96] * 4
    assert traffic.messages.tolist() == [2] * 4 and traffic.buffers.tolist() == [24 + 64] * 4
    assert not all_reduced([3, 8], 1).sent.any()
