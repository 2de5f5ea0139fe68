"""Refresh phases: a pure function of the names, updates and shapes of all parameters of an optimizer, and of nothing
else."""

import copy
import itertools
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

import eigengraft
from eigengraft.distributed.balance import Balance, Loads
from eigengraft.distributed.layouts import Layout
from eigengraft.optimizers import submodel
from eigengraft.optimizers.recipe.loading import load_recipe
from eigengraft.optimizers.stacks.assignment import assign_owners, warn_of_waiting, wave_fields
from eigengraft.optimizers.stacks.placement import (
    ParamKey,
    ParamSpec,
    natural_order,
    place,
    refresh_phases,
    refresh_units,
)

from ..refusals import refused, warned

CPU = torch.device("cpu")

SMOOTH = {"kind": "every", "min_wave_work": 1}
ROUTE = {
    "name": "mixed",
    "match": {"name": "mix"},
    "update": {"kind": "shampoo", "solver": "eigh", "refresh": SMOOTH},
    "optional": True,
}
RECIPE: Any = {
    "base": "soap_fitted",
    "set": {"update.eigenbasis.refresh.min_wave_work": 1},
    "blocking": {"size": 5},
    "routes": [ROUTE, "default"],
}
SHAPES = {
    "layers.10.a": (5, 5),
    "layers.2.a": (5, 5),
    "layers.2.b": (7, 10),
    "layers.0.mix": (5, 5),
    "layers.1.mix": (12, 3),
    "norm": (5,),
    "none": (0, 5),
}


def keys() -> list[ParamKey]:
    def path(name: str) -> str:
        return "routes.mixed" if "mix" in name else "routes.adam" if name == "norm" else ""

    return [ParamKey(name, path(name), shape) for name, shape in SHAPES.items()]


def groups_of(*groups: Sequence[str], dtypes: Sequence[torch.dtype] = (torch.float32,)) -> list[dict[str, Any]]:
    """Param groups of these names; the dtypes of parameters take turns."""
    turns = itertools.cycle(dtypes)
    return [{"params": [(n, torch.nn.Parameter(torch.ones(SHAPES[n], dtype=next(turns)))) for n in g]} for g in groups]


def due(optimizer: eigengraft.Optimizer) -> dict[tuple[str, int], float]:
    """The phase of every block that has state."""
    return {
        (param_set.names[position], key): float(stack_state.phases[row])
        for param_set in optimizer.param_sets
        for stack_state in param_set.stack_states
        for row, position, key in stack_state.rows()
    }


def test_a_phase_is_the_share_of_the_cost_before_the_middle_of_a_block() -> None:
    """The definition in exact numbers: blocks in the order of path, shape, name and key; costs are whole numbers."""
    recipe = load_recipe(RECIPE)
    blocks = []
    for param in keys():
        rule = recipe.rules()[param.path]
        for grid in rule.blocking.grids(param.shape):
            cost = Fraction(sum(stage.cached_traits(grid.shape).refresh_cost for _, stage in rule.stages()))
            blocks += [((param.path, grid.shape, natural_order(param.name), key), param, cost) for key in grid.keys]
    phases, before, total = refresh_phases(recipe, keys()), Fraction(0), sum(cost for *_, cost in blocks)
    assert len({cost for *_, cost in blocks}) > 3 and sum(map(len, phases.values())) == len(blocks)
    for order, param, cost in sorted(blocks):
        assert phases[param][order[-1]] == pytest.approx(float((before + cost / 2) / total), rel=1e-15)
        before += cost


def test_steps_of_an_interval_cost_nearly_the_same() -> None:
    """Four layers of a GPT: each of the eight costliest blocks has a step for itself, which lasts as long as others."""
    layer = [(768, 256), (256, 256), (1024, 256), (256, 1024)]
    given = [ParamKey(f"layers.{i}.{k}", "", shape) for i in range(4) for k, shape in enumerate(layer)]
    recipe = load_recipe({"base": "soap_fitted", "set": {"update.eigenbasis.refresh.min_wave_work": 1}})
    stage, steps = recipe.update[0], np.zeros(10)
    for param, phases in refresh_phases(recipe, given).items():
        steps[int(phases[0] * 10)] += stage.cached_traits(param.shape).refresh_cost
    assert steps.max() < 1.2 * steps.mean()  # 1.14


def test_the_order_of_the_parameters_enters_nothing() -> None:
    recipe, given = load_recipe(RECIPE), keys()
    phases = refresh_phases(recipe, given)
    for order in (given[::-1], given[3:] + given[:3]):
        found = refresh_phases(recipe, order)
        assert found.keys() == phases.keys()
        assert all(np.array_equal(found[param], phases[param]) for param in given)


def test_numbers_in_names_count_as_numbers() -> None:
    names = ["layers.10.a", "layers.2.b", "layers.2.a", "layers.2", "head"]
    assert sorted(names, key=natural_order) == ["head", "layers.2", "layers.2.a", "layers.2.b", "layers.10.a"]


def test_nothing_is_due_where_nothing_is_refreshed() -> None:
    phases = refresh_phases(load_recipe("muon"), [ParamKey("a", "", (5, 5)), ParamKey("b", "routes.adam", (5,))])
    assert [values.tolist() for values in phases.values()] == [[0.0], [0.0]]


def test_groups_dtypes_and_order_change_no_phase() -> None:
    names = list(SHAPES)
    together = due(eigengraft.Optimizer(groups_of(names), RECIPE))
    assert len(set(together.values())) > 5
    mixed = (torch.float32, torch.float64, torch.bfloat16)
    for groups in ([names[::-1]], [names[:3], names[3:]], [names[4:], names[:1], names[1:4]]):
        assert due(eigengraft.Optimizer(groups_of(*groups), RECIPE)) == together
        assert due(eigengraft.Optimizer(groups_of(*groups, dtypes=mixed), RECIPE)) == together


def test_groups_that_come_later_and_frozen_parameters_are_as_if_there_from_the_start() -> None:
    names = list(SHAPES)
    together = due(eigengraft.Optimizer(groups_of(names), RECIPE))
    first, second = groups_of(names[:3], names[3:])
    frozen: torch.nn.Parameter = first["params"][1][1].requires_grad_(False)
    optimizer = eigengraft.Optimizer([first], RECIPE)
    before = due(optimizer)
    optimizer.add_param_group(second)
    after = due(optimizer)
    assert after == {place: phase for place, phase in together.items() if place[0] != names[1]}
    assert before != {place: after[place] for place in before}
    assert due(copy.deepcopy(optimizer)) == after
    frozen.requires_grad_()
    frozen.grad = torch.ones_like(frozen)
    optimizer.step()
    assert due(optimizer) == together


class Net(torch.nn.Module):
    """A model whose output has no name of a head: it is found beside the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = torch.nn.Embedding(9, 6)
        self.layers = torch.nn.ModuleDict({str(i): torch.nn.Linear(6, 6) for i in range(4)})
        self.pair = torch.nn.Bilinear(4, 3, 5)  # five matrices in one parameter
        self.last = torch.nn.Linear(6, 9, bias=False)


@pytest.mark.slow
def test_an_optimizer_of_some_layers_does_what_one_of_the_full_model_does() -> None:
    recipe = load_recipe(RECIPE, {"update.eigenbasis.refresh.steps": 4})
    torch.manual_seed(0)
    full, pieces = Net(), torch.nn.ModuleList([Net(), Net()])
    for piece, gone in zip(pieces, ("01", "23"), strict=True):
        piece.load_state_dict(full.state_dict())
        for name in gone:
            del piece.layers[name]
    del pieces[0].last, pieces[0].pair, pieces[1].emb
    with torch.device("meta"):
        known = Net()
    optimizers = [eigengraft.compose(recipe, module) for module in (full,)]
    optimizers += [copy.deepcopy(eigengraft.compose(recipe, submodel(piece, known))) for piece in pieces]
    given = [dict(full.named_parameters())]
    given += [
        dict(zip(dict(m.named_parameters()), o.state, strict=True)) for m, o in zip(pieces, optimizers[1:], strict=True)
    ]
    assert {row.name: row.route for o in optimizers[1:] for row in o.routing_table()} == {
        row.name: row.route for row in optimizers[0].routing_table()
    }
    for step in range(9):
        for optimizer, parameters in zip(optimizers, given, strict=True):
            for name, parameter in parameters.items():
                seed = torch.Generator().manual_seed(sum(name.encode()) + 1000 * step)
                parameter.grad = torch.randn(parameter.shape, generator=seed)
            optimizer.step()
    assert due(optimizers[1]) | due(optimizers[2]) == due(optimizers[0])
    for parameters in given[1:]:
        assert all(torch.equal(parameter, given[0][name]) for name, parameter in parameters.items())


def test_layers_that_the_full_model_does_not_have_are_refused_by_name() -> None:
    other = torch.nn.ModuleDict({"emb": torch.nn.Embedding(9, 7)})
    with refused(ValueError, "emb.weight", "(9, 7)", "full", "(9, 6)"):
        submodel(other, Net())
    with refused(ValueError, "more.weight"):
        submodel(torch.nn.ModuleDict({"more": torch.nn.Linear(2, 2)}), Net())


CLIP = {"kind": "clip_norm", "per": "model"}
SUMS: dict[str, tuple[Any, str]] = {
    "norm": ([{"kind": "transform", "before": [CLIP], "inner": ["momentum"]}], "update.transform.before.clip_norm"),
    "norm in a route": (
        {"base": "adamw", "routes": [{"name": "own", "match": {"name": "^layers"}, "update": [CLIP, "momentum"]}]},
        "routes.own.update.clip_norm",
    ),
    "total": ("prodigy", "update.prodigy"),
    "sam": ({"base": "adamw", "sam": {}}, "sam"),
    "search": ({"base": "adamw", "line_search": {}}, "line_search"),
}


@pytest.mark.parametrize("recipe", SUMS)
def test_sums_over_all_parameters_are_refused_for_some(recipe: str) -> None:
    declared, path = SUMS[recipe]
    layers = torch.nn.ModuleDict({"layers": torch.nn.ModuleDict({"2": torch.nn.Linear(6, 6)})})
    with refused(ValueError, path, 10):
        eigengraft.compose(declared, submodel(layers, Net()))
    eigengraft.compose(declared, submodel(Net(), Net()))


def test_a_sum_over_parameters_that_are_all_there_is_taken() -> None:
    """Of a route, whose parameters are in one stage; other stages do not take it."""
    route = {"name": "own", "match": {"name": "^last"}, "update": [{"kind": "prodigy", "inner": ["momentum"]}]}
    for name in ("last", "emb"):
        layers = torch.nn.ModuleDict({name: getattr(Net(), name)})
        own = eigengraft.compose({"base": "adamw", "routes": [route]}, submodel(layers, Net()))
        assert [row.route for row in own.routing_table()] == ["routes.own" if name == "last" else ""]


def test_a_group_that_cannot_be_added_leaves_the_phases() -> None:
    names = list(SHAPES)
    optimizer = eigengraft.Optimizer(groups_of(names[:3]), RECIPE)
    before = due(optimizer)
    (later,) = groups_of(names[3:])
    with refused(ValueError, "lr"):
        optimizer.add_param_group({**later, "lr": -1.0})
    assert due(optimizer) == before and len(optimizer.param_groups) == 1
    optimizer.add_param_group(later)
    assert due(optimizer) == due(eigengraft.Optimizer(groups_of(names), RECIPE))


def test_blocks_of_a_stack_that_are_due_together_are_neighbors() -> None:
    optimizer = eigengraft.Optimizer(groups_of(list(SHAPES)), RECIPE)
    stacks = [stack_state.phases for stack_state in optimizer.stack_states()]
    assert max(map(len, stacks)) > 3 and all(np.all(np.diff(phases) >= 0) for phases in stacks)


def test_a_copy_takes_a_group_too() -> None:
    names = list(SHAPES)
    optimizer = copy.deepcopy(eigengraft.Optimizer(groups_of(names[:3]), RECIPE))
    optimizer.add_param_group(groups_of(names[3:])[0])
    assert due(optimizer) == due(eigengraft.Optimizer(groups_of(names), RECIPE))


def test_waves_round_phases_down() -> None:
    """With half of the work at once, in units of the costliest block, there are two waves; routes have their own."""
    recipe, params = load_recipe(RECIPE), [param for param in keys() if param.name != "layers.1.mix"]
    spread, units = refresh_phases(recipe, params), refresh_units(recipe, params)
    assert units > 4
    waves = load_recipe(recipe, {"update.eigenbasis.refresh.min_wave_work": int(units / 2)})
    found = refresh_phases(waves, params)
    for param in params:
        halves = np.floor(2 * spread[param]) / 2
        assert np.array_equal(found[param], spread[param] if param.path else halves)
    assert {phase for param in params if not param.path for phase in found[param]} == {0.0, 0.5}


def test_the_fields_that_decide_on_waves_are_named() -> None:
    recipe = load_recipe(RECIPE)
    fields = ["update.eigenbasis.refresh.min_wave_work", "routes.mixed.update.shampoo.refresh.min_wave_work"]
    assert wave_fields(recipe, ["", "routes.mixed", "routes.adam"]) == fields
    for field in fields:
        assert load_recipe(recipe, {field: 3}) != recipe
    together = load_recipe("soap_fitted", ["update.eigenbasis.refresh.stagger=none"])
    assert wave_fields(together, [""]) == []


def test_ranks_that_wait_much_are_told_what_helps() -> None:
    """32 blocks of a matrix of order 1024 on 64 ranks: at most 4 of them refresh at a step, and the others wait."""
    recipe = load_recipe("shampoo", {"update.graft.direction.shampoo.refresh.min_wave_work": 1})
    layout = Layout.replicate((1024, 1024), 64)
    placements = [place(recipe, "", layout) for _ in range(32)]
    specs = [ParamSpec(f"{i}", "", layout.shape, torch.float32, CPU, own) for i, own in enumerate(placements)]
    params = [spec.key for spec in specs]
    balance = assign_owners(specs, recipe, refresh_phases(recipe, params), Loads(64, 10))
    before = [dict(own.owners or {}) for own in placements]
    assert balance.efficiency < 0.3
    says = ("graft.direction.shampoo.refresh.min_wave_work", 64, 32, "1.00")
    with warned(UserWarning, *says):
        warn_of_waiting(specs, recipe, params, 64, balance)
    assert [own.owners for own in placements] == before  # advice changes nothing


def test_ranks_that_wait_little_are_not_warned(recwarn: pytest.WarningsRecorder) -> None:
    recipe, layout = load_recipe("shampoo"), Layout.replicate((8, 8), 64)
    specs = [ParamSpec("small", "", layout.shape, torch.float32, CPU, place(recipe, "", layout))]
    balance = assign_owners(specs, recipe, refresh_phases(recipe, [specs[0].key]), Loads(64, 10))
    warn_of_waiting(specs, recipe, [specs[0].key], 64, balance)
    warn_of_waiting(specs, recipe, [specs[0].key], 64, Balance(2e10, 1.9e10))
    assert not recwarn.list
