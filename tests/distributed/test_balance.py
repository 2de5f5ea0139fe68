"""Who owns which block: a pure function, balanced at every step and in memory, that remembers earlier groups."""

import copy
import itertools
import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from eigengraft import Optimizer, load_recipe
from eigengraft.distributed.balance import SLACK, Item, Loads, assign, least_work
from eigengraft.optimizers.plan.plan import plan
from eigengraft.optimizers.stacks.assignment import block_cost

INTERVAL = 4
number = st.integers(0, 50).map(float)
dues = st.lists(st.tuples(st.integers(0, INTERVAL - 1), number), max_size=2, unique_by=lambda due: due[0])
lists = st.lists(st.builds(Item, number, number, dues.map(lambda due: tuple(sorted(due)))), max_size=40)
worlds = st.integers(1, 9)


def constants(work: Sequence[float], state: Sequence[float]) -> list[Item]:
    """Items that are never due."""
    return [Item(*pair) for pair in zip(work, state, strict=True)]


@pytest.mark.parametrize(
    ("work", "carried", "least"),
    [
        ([1.0], [10.0, 0.0], 10.0),  # a rank has more than the mean already
        ([3.0, 1.0], [1.0, 3.0], 4.0),  # the mean
        ([4.0, 4.0, 3.0], [0.0, 0.0], 7.0),  # two of the three largest items have one owner
        ([], [2.0, 0.0], 2.0),
    ],
)
def test_the_busiest_rank_has_at_least_the_largest_of_three_bounds(
    work: list[float], carried: list[float], least: float
) -> None:
    assert least_work(work, np.array(carried)) == least


def sums(values: Sequence[float], owners: Sequence[int], ranks: int) -> list[float]:
    found = [0.0] * ranks
    for value, owner in zip(values, owners, strict=True):
        found[owner] += value
    return found


def best(values: Sequence[float], ranks: int) -> float:
    """The least possible load of the fullest rank, by trying everything."""
    ways = itertools.product(range(ranks), repeat=len(values))
    return min(max(sums(values, owners, ranks)) for owners in ways)


@given(items=lists, ranks=worlds)
def test_owners_are_a_function_of_the_arguments(items: list[Item], ranks: int) -> None:
    copy, loads = list(items), Loads(ranks, INTERVAL)
    owners = assign(items, loads)
    assert items == copy and owners == assign(items, Loads(ranks, INTERVAL))
    assert all(0 <= owner < ranks for owner in owners)
    assert loads.constant.tolist() == sums([item.constant for item in items], owners, ranks)
    assert loads.state.tolist() == sums([item.state for item in items], owners, ranks)
    for step in range(INTERVAL):
        assert loads.refresh[:, step].tolist() == sums([dict(item.due).get(step, 0.0) for item in items], owners, ranks)
    # units do not matter; powers of two change no rounding
    other = [Item(c / 1024, s * 4096, tuple((step, w / 1024) for step, w in due)) for c, s, due in items]
    assert owners == assign(other, Loads(ranks, INTERVAL))


@given(values=st.lists(st.integers(0, 20).map(float), max_size=7), ranks=st.integers(1, 3), which=st.integers(0, 3))
def test_one_measure_is_within_the_bound_of_longest_first(values: list[float], ranks: int, which: int) -> None:
    """Graham 1969: the fullest rank has at most 4/3 - 1/(3R) times the least possible.

    which: work of every step, state, both, or refreshes that are all due at one step.
    """
    loads = Loads(ranks, INTERVAL)
    ways = [(1.0, 0.0), (0.0, 1.0), (1.0, 8.0), (0.0, 0.0)]
    refreshes = [((2, value),) if which == 3 and value else () for value in values]
    work, state = ways[which]
    owners = assign([Item(work * v, state * v, due) for v, due in zip(values, refreshes, strict=True)], loads)
    # integers below 2^53, but shares are rounded when they are compared
    bound = (4 / 3 - 1 / (3 * ranks)) * best(values, ranks) * (1 + 1e-12)
    assert max(sums(values, owners, ranks)) <= bound
    assert which != 3 or loads.critical_path <= bound


@pytest.mark.slow
@given(items=lists, ranks=worlds)
def test_no_rank_works_much_more_than_the_mean(items: list[Item], ranks: int) -> None:
    loads = Loads(ranks, INTERVAL)
    assign(items, loads)
    work = [item.work(INTERVAL) for item in items]
    mean, largest = sum(work) / ranks, max(work, default=0.0)
    assert max(loads.work) <= (SLACK * mean + largest) * (1 + 1e-12)


@given(counts=st.lists(st.integers(0, 25), min_size=INTERVAL, max_size=INTERVAL), ranks=worlds)
def test_equal_refreshes_are_dealt_out_at_every_step(counts: list[int], ranks: int) -> None:
    """However many are due at a step, no rank does more of them than it must, nor more of all."""
    loads = Loads(ranks, INTERVAL)
    assign([Item(2.0, 3.0, ((step, 10.0),)) for step, count in enumerate(counts) for _ in range(count)], loads)
    assert (loads.refresh.max(0) / 10).tolist() == [math.ceil(count / ranks) for count in counts]
    assert loads.state.max() <= 3 * math.ceil(sum(counts) / ranks)


def test_a_rank_that_refreshes_at_a_step_leaves_the_others_that_are_due() -> None:
    """Two large refreshes at one step, two at another: averages are even too if a rank does both of a step."""
    items = [Item(0.0, 1.0, ((step, 8.0),)) for step in (0, 2, 0, 2)]
    loads = Loads(2, INTERVAL)
    assign(items, loads)
    assert loads.refresh.tolist() == [[8.0, 0.0, 8.0, 0.0]] * 2 and loads.critical_path == 16.0


def test_equal_blocks_are_dealt_out() -> None:
    for count, ranks in itertools.product((0, 1, 7, 12, 13), (1, 3, 4)):
        owners = assign([Item(2.0, 3.0)] * count, Loads(ranks))
        held = [owners.count(rank) for rank in range(ranks)]
        assert max(held) == math.ceil(count / ranks) and min(held) == count // ranks
        assert owners[:ranks] == list(range(min(count, ranks)))  # ties go to the lower rank


def test_work_and_memory_that_pull_apart_are_both_balanced() -> None:
    """Half of the blocks cost time, the other half memory: each rank gets half of both."""
    loads = Loads(4)
    assign([Item(1.0, 0.0)] * 8 + [Item(0.0, 1.0)] * 8, loads)
    assert loads.work.tolist() == loads.state.tolist() == [2.0] * 4


def test_blocks_that_cost_nothing_have_owners() -> None:
    assert assign([Item(0.0, 0.0)] * 5, Loads(2)) == [0, 0, 0, 0, 0]
    assert assign([], Loads(3)) == []


@given(items=lists, ranks=worlds, at=st.integers(0, 40))
def test_groups_one_after_the_other_see_what_lies_there(items: list[Item], ranks: int, at: int) -> None:
    """Each group is balanced on top of those before: no rank has more than the mean of all and the largest, or what it
    had been given before."""
    loads = Loads(ranks, INTERVAL)
    first = assign(items[:at], loads)
    before = loads.work.tolist()
    second = assign(items[at:], loads)
    work = [item.work(INTERVAL) for item in items]
    assert loads.work.tolist() == pytest.approx(sums(work, [*first, *second], ranks), rel=1e-12)
    mean, largest = sum(work) / ranks, max(work[at:], default=0.0)
    for rank in range(ranks):
        bound = max(SLACK * mean + largest, before[rank])
        assert loads.work[rank] <= bound * (1 + 1e-12)


def test_a_full_rank_gets_nothing_more() -> None:
    loads = Loads(3)
    assert assign([Item(30.0, 1.0)], loads) == [0]
    assert set(assign([Item(5.0, 0.0)] * 4, loads)) == {1, 2}
    assert loads.work.tolist() == [30.0, 10.0, 10.0]


def test_what_stays_at_home_counts_where_it_is() -> None:
    loads = Loads(2)
    loads.divide([0.75, 0.25], work=8.0, state=80.0)
    assert (loads.work.tolist(), loads.state.tolist()) == ([6.0, 2.0], [60.0, 20.0])
    assert assign([Item(4.0, 40.0)], loads) == [1]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("name", ["soap_fitted", "shampoo", "muon", "psgd_kron", "shampoo_4bit"])
def test_a_transformer_is_divided_evenly(name: str, ranks: int) -> None:
    """Blocks of at most 256 of 12 layers of width 768: each costs a small part of a rank's share, and so both measures
    are even to 10%."""
    recipe = load_recipe(name, ["blocking.size=256", "blocking.merge=256"])
    shapes = [(2304, 768), (768, 768), (3072, 768), (768, 3072)] * 12
    blocks = [p.shape for shape in shapes for p in recipe.blocking.grids(shape) for _ in p.keys]
    costs = [block_cost(recipe, "", block, torch.float32) for block in blocks]
    loads = Loads(ranks)
    assign([Item(cost.work, float(cost.state)) for cost in costs], loads)
    for carried in (loads.work, loads.state):
        assert max(carried) <= 1.1 * sum(carried) / ranks


@given(items=lists, ranks=worlds)
def test_items_go_where_the_definition_says(items: list[Item], ranks: int) -> None:
    """The rule of `assign`, one item after the other, by scalar products of vectors that are written out."""
    total = math.fsum(item.work(INTERVAL) for item in items) or 1.0, math.fsum(item.state for item in items) or 1.0
    kinds = sorted(dict.fromkeys(items), key=lambda kind: -(kind.work(INTERVAL) / total[0] + kind.state / total[1]))
    units = np.array([total[0] * INTERVAL**0.5] * INTERVAL + [total[1]]) / ranks
    carried, work, owners = np.zeros((ranks, INTERVAL + 1)), [0.0] * ranks, assign(items, Loads(ranks, INTERVAL))
    for kind in kinds:
        vector = np.array([kind.constant + dict(kind.due).get(step, 0.0) for step in range(INTERVAL)] + [kind.state])
        for owner in [owner for item, owner in zip(items, owners, strict=True) if item == kind]:
            products = (carried / units) @ (vector / units)
            able = [rank for rank in range(ranks) if work[rank] <= SLACK * total[0] / ranks]
            assert owner in able and products[owner] <= min(products[able]) + 1e-12  # rounding decides near ties
            carried[owner] += vector
            work[owner] += kind.work(INTERVAL)


GPT = {f"h.{i}.{k}": s for i in range(4) for k, s in enumerate([(768, 256), (256, 256), (1024, 256), (256, 1024)])}


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_ranks_do_not_wait_for_each_other_by_default(ranks: int) -> None:
    """16 blocks whose refreshes have the work of ten of the largest: a wave of all of them keeps every rank busy."""
    busy = plan("shampoo", GPT.items(), (ranks,), "ddp")
    assert busy.balance.efficiency >= 0.92 and busy.advice is None


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_wait_where_every_step_pays_the_same_and_advice_ends_that(ranks: int) -> None:
    """The same blocks over 10 steps: only one rank has a large block to refresh at a step."""
    field = "update.graft.direction.shampoo.refresh.min_wave_work"
    waiting = plan(load_recipe("shampoo", {field: 1}), GPT.items(), (ranks,), "ddp")
    assert waiting.balance.efficiency < 0.75 and waiting.advice is not None
    assert waiting.advice.fields == [field]
    busy = plan(load_recipe("shampoo", {field: waiting.advice.min_wave_work}), GPT.items(), (ranks,), "ddp")
    assert busy.balance.efficiency >= 0.92 and busy.advice is None
    assert busy.balance == waiting.advice.balance


def test_the_critical_path_is_what_the_owners_and_phases_give() -> None:
    """Counted from the owners of the plan and the steps at which the optimizer finds blocks due."""
    paper = plan("shampoo", GPT.items(), (3,), "ddp")
    recipe = load_recipe("shampoo")
    params = [(name, torch.nn.Parameter(torch.zeros(shape))) for name, shape in GPT.items()]
    optimizer = Optimizer(params, recipe)
    work, constant = Counter[tuple[int, int]](), Counter[int]()
    for stack_state in optimizer.stack_states():
        cost = block_cost(recipe, "", stack_state.stack.block, torch.float32)
        ((cadence, refresh),) = cost.refreshes
        for row, position, key in stack_state.rows():
            owners = paper.placements[list(GPT)[position]].owners
            assert owners is not None
            constant[owners[key]] += cost.constant
            for step in range(100, 110):
                counts = np.full(len(GPT), step)
                context = stack_state.context(stack_state.all_blocks, counts, {}).slice_rows(row, row + 1, False)
                if list(cadence.due(context, 1)):
                    work[step, owners[key]] += refresh
    path = sum(max(constant[rank] + work[step, rank] for rank in range(3)) for step in range(100, 110))
    assert paper.balance.critical_path == pytest.approx(path, rel=1e-12)
    total = 10 * sum(constant.values()) + sum(work.values())
    assert paper.interval == 10 and paper.balance.least == pytest.approx(total / 3, rel=1e-12)


costs = st.sampled_from([Item(1.0, 2.0), Item(3.0, 1.0), Item(1.0, 2.0, ((2, 5.0),))])
holders = st.dictionaries(st.integers(0, 4), st.integers(1, 9), max_size=4)


@given(rows=st.lists(st.tuples(costs, holders), max_size=25))
def test_owners_are_exchanged_at_no_cost(rows: list[tuple[Item, dict[int, int]]]) -> None:
    """Each rank owns as many items of every cost as before, and an item that nobody holds stays where it was."""
    items, held = [item for item, _ in rows], [own for _, own in rows]
    before, after = assign(items, Loads(5, INTERVAL)), assign(items, Loads(5, INTERVAL), held)
    assert Counter(zip(items, after, strict=True)) == Counter(zip(items, before, strict=True))
    assert all(old == new for old, new, own in zip(before, after, held, strict=True) if not own)


def test_owners_stay_where_nothing_is_gained() -> None:
    """Neighboring blocks have different owners, and keep them where every rank holds as much of each."""
    held = [dict.fromkeys(range(4), 5)] * 8
    assert assign([Item(1.0, 1.0)] * 8, Loads(4), held) == [0, 1, 2, 3] * 2


def test_a_rank_owns_what_it_holds() -> None:
    """Each rank holds two items; a seventh has halves on two ranks, one of which has nothing better."""
    held: list[dict[int, int]] = [{2 - i % 3: 8} for i in range(6)] + [{0: 4, 1: 4}]
    assert assign([Item(1.0, 1.0)] * 7, Loads(3), held) == [2, 1, 0, 2, 1, 0, 0]


@pytest.mark.parametrize(("ranks", "parallel", "copies"), [((4,), "fsdp2", 1), ((2, 4), "hsdp", 2)])
def test_blocks_that_lie_within_shards_do_not_travel(ranks: tuple[int, ...], parallel: str, copies: int) -> None:
    """64 rows on 4 ranks are two rows of blocks on each: no gradient is sent, and updates only to other copies."""
    recipe = load_recipe("soap_fitted", ["blocking.size=8", "blocking.merge=8", "update.eigenbasis.refresh.steps=1"])
    paper = plan(recipe, [("a.weight", (64, 32)), ("b.weight", (64, 16))], ranks, parallel)  # type: ignore[arg-type]
    assert not paper.traffic["gradients"].sent.any()
    assert paper.traffic["updates"].sent.sum() == (copies - 1) * 4 * 64 * 48
    assert len(set(paper.blocks.tolist())) == 1


def owners_of(optimizer: Optimizer) -> dict[str, set[int]]:
    """The ranks that own blocks of each parameter that an optimizer has state of."""
    return {
        spec.name: set(((spec.placement and spec.placement.owners) or {}).values())
        for param_set in optimizer.param_sets
        for spec in param_set.specs
    }


def test_work_is_even_over_trained_parameters_alone() -> None:
    """Eight small weights are trained beside three large frozen ones: each of 4 ranks owns two, also after a thaw."""
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    try:
        shapes = {**{f"base{i}": 24 for i in range(3)}, **{f"lora{i}": 8 for i in range(8)}}
        named = [(f"{name}.weight", nn.Parameter(torch.ones(side, side))) for name, side in shapes.items()]
        for _, parameter in named[:3]:
            parameter.requires_grad_(False)
        optimizer = Optimizer(named, "soap_fitted")
        trained = owners_of(optimizer)
        assert set(trained) == {name for name, _ in named[3:]}
        assert Counter(rank for ranks in trained.values() for rank in ranks) == dict.fromkeys(range(4), 2)
        for _, parameter in named[:3]:
            parameter.requires_grad_()
        again = owners_of(copy.deepcopy(optimizer))
        assert {name: again[name] for name in trained} == trained
    finally:
        dist.destroy_process_group()
