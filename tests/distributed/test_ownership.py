"""Who owns which block: a pure function, balanced in work and in memory, that remembers earlier groups."""

import itertools
import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eigengraft import load_recipe
from eigengraft.distributed.ownership import SLACK, Loads, assign
from eigengraft.optimizers.sharding.cost_model import block_cost

sizes = st.lists(st.integers(0, 50).map(float), max_size=40)
pairs = st.lists(st.tuples(st.integers(0, 50).map(float), st.integers(0, 50).map(float)), max_size=40)
worlds = st.integers(1, 9)


def sums(values: Sequence[float], owners: Sequence[int], ranks: int) -> list[float]:
    found = [0.0] * ranks
    for value, owner in zip(values, owners, strict=True):
        found[owner] += value
    return found


def best(values: Sequence[float], ranks: int) -> float:
    """The least possible load of the fullest rank, by trying everything."""
    ways = itertools.product(range(ranks), repeat=len(values))
    return min(max(sums(values, owners, ranks)) for owners in ways)


@given(pairs=pairs, ranks=worlds)
def test_it_is_a_function_of_its_arguments(pairs: list[tuple[float, float]], ranks: int) -> None:
    work, state = [w for w, _ in pairs], [s for _, s in pairs]
    given_work, given_state = list(work), list(state)
    loads = Loads(ranks)
    owners = assign(work, state, loads)
    assert owners == assign(work, state, Loads(ranks))
    assert (work, state) == (given_work, given_state)
    assert all(0 <= owner < ranks for owner in owners)
    assert loads.work == sums(work, owners, ranks) and loads.state == sums(state, owners, ranks)
    # units do not matter; powers of two change no rounding
    assert owners == assign([w / 1024 for w in work], [s * 4096 for s in state], Loads(ranks))


@given(values=st.lists(st.integers(0, 20).map(float), max_size=7), ranks=st.integers(1, 3), which=st.integers(0, 2))
def test_one_measure_is_within_the_bound_of_longest_first(values: list[float], ranks: int, which: int) -> None:
    """Graham 1969: the fullest rank has at most 4/3 - 1/(3R) times the least possible. which: work, state, or both."""
    nothing = [0.0] * len(values)
    work, state = [(values, nothing), (nothing, values), (values, [8 * value for value in values])][which]
    owners = assign(work, state, Loads(ranks))
    # integers below 2^53, but shares are rounded when they are compared
    assert max(sums(values, owners, ranks)) <= (4 / 3 - 1 / (3 * ranks)) * best(values, ranks) * (1 + 1e-12)


@given(pairs=pairs, ranks=worlds)
def test_no_rank_works_much_more_than_the_mean(pairs: list[tuple[float, float]], ranks: int) -> None:
    work = [w for w, _ in pairs]
    owners = assign(work, [s for _, s in pairs], Loads(ranks))
    mean, largest = sum(work) / ranks, max(work, default=0.0)
    bound = max(mean + largest, SLACK * max(mean, largest))
    assert max(sums(work, owners, ranks)) <= bound * (1 + 1e-12)


def test_equal_blocks_are_dealt_out() -> None:
    for count, ranks in itertools.product((0, 1, 7, 12, 13), (1, 3, 4)):
        owners = assign([2.0] * count, [3.0] * count, Loads(ranks))
        held = [owners.count(rank) for rank in range(ranks)]
        assert max(held) == math.ceil(count / ranks) and min(held) == count // ranks
        assert owners[:ranks] == list(range(min(count, ranks)))  # ties go to the lower rank


def test_work_and_memory_that_pull_apart_are_both_balanced() -> None:
    """Half of the blocks cost time, the other half memory: each rank gets half of both."""
    work, state = [1.0] * 8 + [0.0] * 8, [0.0] * 8 + [1.0] * 8
    loads = Loads(4)
    assign(work, state, loads)
    assert loads.work == loads.state == [2.0] * 4


def test_blocks_that_cost_nothing_have_owners() -> None:
    assert assign([0.0] * 5, [0.0] * 5, Loads(2)) == [0, 0, 0, 0, 0]
    assert assign([], [], Loads(3)) == []


@given(pairs=pairs, ranks=worlds, at=st.integers(0, 40))
def test_groups_one_after_the_other_see_what_lies_there(pairs: list[tuple[float, float]], ranks: int, at: int) -> None:
    """Each group is balanced on top of those before: no rank has more than the mean of all and the largest, or what it
    had been given before."""
    loads = Loads(ranks)
    first = assign([w for w, _ in pairs[:at]], [s for _, s in pairs[:at]], loads)
    before = list(loads.work)
    second = assign([w for w, _ in pairs[at:]], [s for _, s in pairs[at:]], loads)
    work = [w for w, _ in pairs]
    assert loads.work == sums(work, [*first, *second], ranks)
    mean, largest = sum(work) / ranks, max(work[at:], default=0.0)
    for rank in range(ranks):
        bound = max(mean + largest, SLACK * max(mean, largest), before[rank])
        assert loads.work[rank] <= bound * (1 + 1e-12)


def test_a_full_rank_gets_nothing_more() -> None:
    loads = Loads(3)
    assert assign([30.0], [1.0], loads) == [0]
    assert set(assign([5.0, 5.0, 5.0, 5.0], [0.0] * 4, loads)) == {1, 2}
    assert loads.work == [30.0, 10.0, 10.0]


def test_what_stays_at_home_counts_where_it_is() -> None:
    loads = Loads(2)
    loads.carry([0.75, 0.25], work=8.0, state=80.0)
    assert (loads.work, loads.state) == ([6.0, 2.0], [60.0, 20.0])
    assert assign([4.0], [40.0], loads) == [1]


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("name", ["soap", "shampoo", "muon", "psgd_kron", "shampoo_4bit"])
def test_a_transformer_is_divided_evenly(name: str, ranks: int) -> None:
    """Blocks of at most 256 of 12 layers of width 768: each costs a small part of a rank's share, and so both measures
    are even to 10%."""
    recipe = load_recipe(name, ["blocking.size=256", "blocking.merge=256"])
    shapes = [(2304, 768), (768, 768), (3072, 768), (768, 3072)] * 12
    blocks = [p.tile for shape in shapes for p in recipe.blocking.grids(shape) for _ in p.keys]
    costs = [block_cost(recipe, "", block, torch.float32, recipe.storage) for block in blocks]
    loads = Loads(ranks)
    assign([cost.work for cost in costs], [float(cost.state) for cost in costs], loads)
    for carried in (loads.work, loads.state):
        assert max(carried) <= 1.1 * sum(carried) / ranks


@given(pairs=pairs, ranks=worlds)
def test_items_go_where_the_definition_says(pairs: list[tuple[float, float]], ranks: int) -> None:
    """The rule of `assign`, by asking every rank for every item: a rank that was full is asked again for less work."""
    work, state = [w for w, _ in pairs], [s for _, s in pairs]
    all_work, all_state = sum(work) or 1.0, sum(state) or 1.0
    limit = SLACK * max([all_work / ranks, *work])
    shares = [(w / all_work, s / all_state) for w, s in pairs]
    loads, owners = [(0.0, 0.0)] * ranks, [0] * len(pairs)
    for item in sorted(range(len(pairs)), key=lambda i: (-max(shares[i]), -sum(shares[i]), i)):
        w, s = pairs[item]
        able = [rank for rank in range(ranks) if loads[rank][0] + w <= limit]
        parts = {rank: (loads[rank][0] / all_work, loads[rank][1] / all_state) for rank in able}
        owner = min(able, key=lambda rank: (max(parts[rank]), sum(parts[rank]), rank), default=-1)
        if not able:
            owner = min(range(ranks), key=lambda rank: loads[rank])
        owners[item], loads[owner] = owner, (loads[owner][0] + w, loads[owner][1] + s)
    assert assign(work, state, Loads(ranks)) == owners
