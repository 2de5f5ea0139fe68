"""Building stacks: blocks, phases and random seeds are the same on any number of ranks, with or without owners."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from eigengraft.distributed.balance import Loads
from eigengraft.distributed.comm_plan import pack
from eigengraft.distributed.layouts import Layout
from eigengraft.numerics import compute_dtype
from eigengraft.optimizers.recipe.loading import load_recipe
from eigengraft.optimizers.recipe.recipe import Recipe
from eigengraft.optimizers.recipe.routing import describe_named
from eigengraft.optimizers.stacks.assignment import assign_owners, block_cost, common_interval
from eigengraft.optimizers.stacks.placement import ParamSpec, place, refresh_phases
from eigengraft.optimizers.stacks.stack import build, divide, round_bytes

SHAPES = {"a.weight": (17, 12), "b.weight": (24, 8), "c.weight": (12, 17), "norm.weight": (12,), "none.weight": (0, 4)}
RECIPES: dict[str, Any] = {
    "soap_fitted": {"base": "soap_fitted", "blocking": {"size": 5}, "distribution": {"bucket": 800}},
    "shampoo": {"base": "shampoo", "blocking": {"size": 8, "merge": 8}},
    "grafted": {
        "base": "shampoo",
        "set": {"update.graft.per": "parameter"},
        "blocking": {"size": 8},
        "distribution": {"bucket": 800},
    },
    "adafactor": "adafactor",
}


def specs_of(recipe: Recipe, ranks: int | None) -> list[ParamSpec]:
    """Parameters of a small model, replicated over that many ranks; None: without any placement."""
    specs = []
    infos = describe_named([(name, torch.empty(shape)) for name, shape in SHAPES.items()])
    for info, (name, shape) in zip(infos.values(), SHAPES.items(), strict=True):
        path = recipe.route(info)[0]
        placement = None if ranks is None else place(recipe, path, Layout.replicate(shape, ranks))
        specs.append(ParamSpec(name, path, shape, torch.float32, torch.device("cpu"), placement))
    if ranks is not None:
        phases = refresh_phases(recipe, (spec.key for spec in specs))
        assign_owners(specs, recipe, phases, Loads(ranks, common_interval(recipe)))
    return specs


@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
@pytest.mark.parametrize("name", RECIPES)
def test_phases_do_not_depend_on_the_number_of_ranks(name: str, ranks: int) -> None:
    recipe = load_recipe(RECIPES[name])
    specs = specs_of(recipe, None)
    table = refresh_phases(recipe, (spec.key for spec in specs))
    stacks, none = build(specs, recipe, table)
    alone = {(position, key): state.phases[row] for state in stacks for row, position, key in state.rows()}
    assert none == []
    assert len(set(alone.values())) > 1 or name == "adafactor"  # which has nothing to refresh
    divided, placed = {}, specs_of(recipe, ranks)
    for group, phases in divide(placed, recipe, table, ranks):
        assert group.dtype == compute_dtype(torch.float32)
        for block, phase in zip(group.blocks, phases, strict=True):
            divided[block.position, block.grid.keys[0]] = phase
    in_place = {position for position, spec in enumerate(placed) if spec.placement and spec.placement.owners is None}
    assert divided == {key: phase for key, phase in alone.items() if key[0] not in in_place}
    assert in_place or ranks == 1 or name == "adafactor"


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("name", RECIPES)
def test_rows_of_an_owner_count_its_blocks(name: str, ranks: int) -> None:
    """Every block has one owner, rows are numbered from 0 on each, and a round holds each group that can be split."""
    recipe = load_recipe(RECIPES[name])
    specs = specs_of(recipe, ranks)
    phases = refresh_phases(recipe, (spec.key for spec in specs))
    for group, _ in divide(specs, recipe, phases, ranks):
        for rank in range(ranks):
            assert [block.row for block in group.owned(rank)] == list(range(len(group.owned(rank))))
        positions = {block.position for block in group.blocks}
        spans = any(stage.cached_traits().sums for _, stage in recipe.rules()[group.path].stages())
        fits = group.nbytes <= round_bytes(specs, recipe, ranks)
        assert fits or len(group.blocks) == 1 or (spans and len(positions) == 1)


@pytest.mark.parametrize("ranks", [2, 3])
def test_blocks_of_a_parameter_that_sums_are_over_are_computed_together(ranks: int) -> None:
    """They have one owner, and are sent in one round, whatever its size; (17, 12) has blocks of four shapes."""
    recipe = load_recipe(RECIPES["grafted"])
    specs = specs_of(recipe, ranks)
    groups = [group for group, _ in divide(specs, recipe, refresh_phases(recipe, (spec.key for spec in specs)), ranks)]
    rounds, owners = dict[int, set[int]](), dict[int, set[int]]()
    for index, numbers in enumerate(pack(groups, round_bytes(specs, recipe, ranks))):
        for block in (block for number in numbers for block in groups[number].blocks):
            rounds.setdefault(block.position, set()).add(index)
            owners.setdefault(block.position, set()).add(block.owner)
    assert len({group.shape for group in groups if 0 in {block.position for block in group.blocks}}) == 4
    assert {len(found) for found in (*rounds.values(), *owners.values())} == {1}
    assert len(set().union(*rounds.values())) > 1 and len(set().union(*owners.values())) > 1


@pytest.mark.parametrize("measured", [False, True])
@pytest.mark.parametrize("name", RECIPES)
def test_one_rank_does_the_work_of_all_blocks(name: str, measured: bool) -> None:
    """Whether operations are counted or times of shapes are measured, and whether or not blocks have one owner."""
    recipe, blocks = load_recipe(RECIPES[name]), list[tuple[str, tuple[int, ...]]]()
    for spec in specs_of(recipe, None):
        for grid in recipe.rules()[spec.path].blocking.grids(spec.shape):
            blocks += [(spec.path, grid.shape)] * len(grid.keys)
    if measured:
        times = {"x".join(map(str, shape)): 0.5 + index for index, (_, shape) in enumerate(blocks)}
        recipe = load_recipe(recipe, {"distribution.work": times})
        works = [times["x".join(map(str, shape))] for _, shape in blocks]
    else:
        works = [block_cost(recipe, path, shape, torch.float32).work for path, shape in blocks]
    specs, loads = specs_of(recipe, 1), Loads(1, common_interval(recipe))
    balance = assign_owners(specs, recipe, refresh_phases(recipe, (spec.key for spec in specs)), loads)
    assert balance.critical_path == pytest.approx(sum(works) * loads.interval, rel=1e-12)


def test_work_is_balanced_over_the_longest_periods_that_fit() -> None:
    def roots(steps: int) -> list[dict[str, Any]]:
        return [{"kind": "eigenbasis", "inner": "rms", "refresh": {"kind": "every", "steps": steps}}]

    routes = [{"name": f"r{n}", "match": {"name": f"r{n}"}, "update": roots(n)} for n in (7, 450, 1100)]
    assert common_interval(load_recipe({"update": roots(900), "routes": routes})) == 900
    assert common_interval(load_recipe({"update": roots(6), "routes": routes[:1]})) == 42


def test_seeds_depend_on_names_and_keys_alone() -> None:
    recipe = load_recipe(RECIPES["soap_fitted"])
    specs = specs_of(recipe, None)
    seeds = []
    for own in (specs, specs[::-1]):
        stacks, _ = build(own, recipe, refresh_phases(recipe, (spec.key for spec in own)))
        seeds.append({(own[p].name, key): state.seeds[row] for state in stacks for row, p, key in state.rows()})
    assert seeds[0] == seeds[1] and len(set(seeds[0].values())) == len(seeds[0])
