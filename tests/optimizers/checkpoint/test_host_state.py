"""What hosts do with `optimizer.state` is what is stepped and saved, or is refused by name before anything changes."""

import copy
import io
import pickle
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import eigengraft
from eigengraft import Optimizer, load_recipe

from ...quantization.test_storage_resume import GRADIENTS, ONE_OF_EACH, everything, made, walk
from ...recipes import BROAD
from ...refusals import refused, warned
from ...trajectories import named
from .test_checkpoint import drive, same, snapshot

SHAPES = ((6, 4), (6, 4), (5,))
QUICK = (
    "adafactor",
    "ademamix",
    "adamw",
    "muon",
    "prodigy",
    "psgd_kron",
    "schedule_free_adamw",
    "shampoo",
    "soap_fitted",
)
EACH = [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in BROAD]
Way = Callable[[Optimizer], object]


def parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]


def trained(recipe: Any, steps: int = 7, **options: Any) -> tuple[list[nn.Parameter], Optimizer]:
    params = parameters()
    optimizer = Optimizer(named(params), recipe, **options)
    drive(optimizer, params, range(steps))
    return params, optimizer


def each(change: Callable[[dict[str, Tensor], str, Tensor], object]) -> Way:
    def way(optimizer: Optimizer) -> None:
        for own in optimizer.state.values():
            for key, value in list(own.items()):
                change(own, key, value)

    return way


def replace_entries(optimizer: Optimizer) -> None:
    for parameter, own in optimizer.state.items():
        optimizer.state[parameter] = {key: value.clone() for key, value in own.items()}


def replace_state(optimizer: Optimizer) -> None:
    optimizer.state = {p: copy.deepcopy(own) for p, own in optimizer.state.items()}


def set_data(own: dict[str, Tensor], key: str, value: Tensor) -> None:
    value.data = value.data.clone()


def wider(value: Tensor) -> Tensor:
    return value.double() if value.is_floating_point() else value.clone()


MOVES: dict[str, Way] = {
    "assigned": each(lambda own, key, value: own.__setitem__(key, value.clone())),
    "data": each(set_data),
    "another dtype": each(lambda own, key, value: own.__setitem__(key, wider(value))),
    "entries": replace_entries,
    "state": replace_state,
}


@pytest.mark.parametrize("recipe", EACH)
def test_state_that_was_moved_away_and_back_is_stepped_and_saved(recipe: str) -> None:
    (stays, plain), (moves, moved) = trained(recipe, 0), trained(recipe, 0)
    for step, way in enumerate([*MOVES.values(), *MOVES.values()]):
        for params, optimizer in ((stays, plain), (moves, moved)):
            drive(optimizer, params, range(step, step + 1))
        way(moved)
    assert same(snapshot(moved), snapshot(plain))
    drive(moved, moves, range(10, 12))
    drive(plain, stays, range(10, 12))
    assert same(snapshot(moved), snapshot(plain))
    shown = next(iter(moved.state.values()))["step"]
    drive(moved, moves, range(12, 13))
    assert shown == 13, "what is shown is live again"


def set_zero(own: dict[str, Tensor], key: str, value: Tensor) -> None:
    own[key] = torch.zeros_like(value)


RESETS: dict[str, Way] = {
    "assigned": each(set_zero),
    "in place": each(lambda own, key, value: value.zero_()),
    "emptied": lambda optimizer: optimizer.state.clear(),
}
REMOVALS: dict[str, Way] = {
    "cleared": each(lambda own, key, value: own.clear()),
    "taken out": lambda optimizer: [optimizer.state.pop(p) for p in list(optimizer.state)],
    "another": lambda optimizer: setattr(optimizer, "state", defaultdict(dict)),
}


@pytest.mark.parametrize("recipe", EACH)
def test_state_that_was_reset_begins_afresh(recipe: str) -> None:
    """Bit for bit as with a new optimizer: slots that begin with other values than zero have these again."""
    others = [nn.Parameter(p.detach().clone()) for p in trained(recipe, 4)[0]]
    fresh = Optimizer(named(others), recipe)
    drive(fresh, others, range(20, 24))
    for name, way in RESETS.items():
        params, optimizer = trained(recipe, 4)
        way(optimizer)
        drive(optimizer, params, range(20, 24))
        assert same(snapshot(optimizer), snapshot(fresh)), name


@pytest.mark.parametrize("way", REMOVALS)
def test_state_that_was_removed_is_gone_until_the_next_gradient(way: str) -> None:
    """As with torch's optimizers."""
    params, optimizer = trained("adamw")
    REMOVALS[way](optimizer)
    assert optimizer.state_dict()["state"] == {} and optimizer.state_bytes() == 0
    optimizer.zero_grad()
    drive(optimizer, params[:1], range(7, 9))
    assert [len(optimizer.state.get(p, {})) for p in params] == [3, 0, 0]
    assert int(optimizer.state[params[0]]["step"]) == 2


@pytest.mark.parametrize("way", [*REMOVALS, *MOVES])
def test_changes_count_where_a_group_is_added_at_once(way: str) -> None:
    """To add a group records the state of all parameters, which then must not hold what was taken out."""
    runs = []
    for late in (False, True):
        params, optimizer = trained("soap_fitted")
        added = nn.Parameter(torch.ones(4, 3))
        (REMOVALS | MOVES)[way](optimizer)
        if not late:
            optimizer.state_dict()
        optimizer.add_param_group({"params": [("p3", added)]})
        drive(optimizer, [*params, added], range(7, 12))
        runs.append([snapshot(optimizer), *params, added])
    assert same(runs[0], runs[1])


def test_changes_of_small_tensors_count_where_a_parameter_is_thawed_at_once() -> None:
    params = [nn.Parameter(torch.ones(4 if i else 5)) for i in range(80)]
    late = nn.Parameter(torch.ones(3), requires_grad=False)
    optimizer = Optimizer(named(params), "adam", lr=0.1)
    drive(optimizer, params, range(2))
    optimizer.add_param_group({"params": [("late", late)]})
    optimizer.state[params[79]][V].data = torch.full((4,), 400.0)
    late.requires_grad_(True)
    optimizer.zero_grad()
    drive(optimizer, [late], range(2, 3))
    before = params[79].detach().clone()
    drive(optimizer, params, range(3, 4))
    assert float((params[79] - before).detach().abs().max()) < 0.1 * 3 / 20


def keeps_weights(recipe: str) -> bool:
    keys = Optimizer(named(parameters()), recipe).state_dict()["state"][0]
    return any(key in keys for key in ("averaging/z", "averaging/mean", "averaging/queue", "0/update.prodigy/origin"))


@pytest.mark.parametrize("recipe", EACH)
def test_zeros_in_all_state_but_the_steps_give_finite_steps(recipe: str) -> None:
    """Weights that are kept beside parameters are no moments: zeros in their place are refused."""
    for in_place in (False, True):
        params, optimizer = trained(recipe)
        for own in optimizer.state.values():
            for key, value in [pair for pair in own.items() if pair[0] != "step"]:
                value.zero_() if in_place else set_zero(own, key, value)
        if keeps_weights(recipe):
            before = [p.detach().clone() for p in params]
            with refused(ValueError, "p0", 7):
                drive(optimizer, params, range(20, 21))
            assert same([*params], before)
            continue
        drive(optimizer, params, range(20, 32))
        tensors = [*params, *(x for own in optimizer.state.values() for x in own.values())]
        assert all(bool(x.isfinite().all()) for x in tensors)


def test_zeros_in_bases_and_roots_are_identities_again() -> None:
    for recipe, key in (
        ("soap_fitted", "0/update.eigenbasis/basis.0"),
        ("shampoo", "0/update.graft.direction.shampoo/root.0"),
    ):
        for in_place in (False, True):
            params, optimizer = trained(load_recipe(recipe, ["routes=[]"]))
            own = optimizer.state[params[0]]
            key = next(key for key in own if key.endswith(("/basis.0", "/root.0")))
            own[key].zero_() if in_place else set_zero(own, key, own[key])
            assert torch.equal(optimizer.state_dict()["state"][0][key], torch.eye(6))


def test_resets_of_single_entries_are_torchs() -> None:
    """Moments, or the count, of one parameter in mid-run: the same numbers as Adam of torch, entry by entry."""
    pairs = {"exp_avg": "0/update.momentum/m", "exp_avg_sq": "0/update.rms/v", "step": "step"}
    for theirs, ours in pairs.items():
        for value in (0.0, 3.0):
            if theirs != "step" and value:
                continue
            params, optimizer = trained(load_recipe("adam", ["update.rms.beta=0.999"]), lr=0.01)
            others = parameters()
            torchs = torch.optim.Adam(others, lr=0.01)
            drive(torchs, others, range(7))
            torchs.state[others[0]][theirs] = torch.full_like(torchs.state[others[0]][theirs], value)
            optimizer.state[params[0]][ours] = torch.full_like(optimizer.state[params[0]][ours], value)
            drive(torchs, others, range(20, 25))
            drive(optimizer, params, range(20, 25))
            torch.testing.assert_close([p.detach() for p in params], [p.detach() for p in others], rtol=2e-5, atol=1e-6)


def test_a_constraint_begins_again_at_the_weights_as_they_are() -> None:
    params, optimizer = trained({"update": ["momentum"], "routes": [], "constraints": ["hyperball"]})
    with torch.no_grad():
        params[0].mul_(2)
    set_zero(optimizer.state[params[0]], "constraints.hyperball/radius", torch.zeros(()))
    radius = optimizer.state_dict()["state"][0]["constraints.hyperball/radius"]
    torch.testing.assert_close(radius, params[0].detach().norm())


@pytest.mark.parametrize("row", ONE_OF_EACH, ids=str)
@pytest.mark.slow
def test_coded_state_is_moved_and_reset_whole(row: Any) -> None:
    def zero(optimizer: Optimizer, in_place: bool, chosen: Callable[[str, Tensor], bool]) -> None:
        for own in optimizer.state.values():
            for key, value in [pair for pair in own.items() if chosen(*pair)]:
                value.zero_() if in_place else set_zero(own, key, value)

    for in_place in (False, True):
        (params, optimizer), (others, fresh) = made(row), made(row)
        walk(optimizer, params, GRADIENTS[:4])
        for p, q in zip(params, others, strict=True):
            q.data.copy_(p)
        zero(optimizer, in_place, lambda key, x: True)
        assert same(everything(optimizer), everything(fresh)), "formats too"
        for own, ps in ((optimizer, params), (fresh, others)):
            walk(own, ps, GRADIENTS[4:])
        assert same(everything(optimizer), everything(fresh))
        zero(optimizer, in_place, lambda key, x: x.is_floating_point())  # scales, and not the codes
        walk(optimizer, params, GRADIENTS[4:])
        assert all(bool(x.isfinite().all()) for x in [*params, *everything(optimizer).values()])


V = "0/update.rms/v"
WRONG: dict[str, tuple[Callable[[dict[str, Any]], object], tuple[object, ...]]] = {
    "shape": (lambda own: own.update({V: torch.zeros(4, 6)}), ("p0", V, "(6, 4)", "(4, 6)")),
    "dtype": (
        lambda own: own.update({V: torch.full((6, 4), 0.1).double() / 3}),
        ("p0", V, "torch.float32", "torch.float64"),
    ),
    "no tensor": (lambda own: own.update({V: None}), ("p0", V, "NoneType")),
    "missing": (lambda own: own.pop(V), ("p0", V)),
    "only a count": (lambda own: own.clear() or own.update(step=torch.tensor(3)), ("p0", V)),
    "unknown": (lambda own: own.update({"0/update.rms/w": torch.zeros(())}), ("p0", "0/update.rms/w")),
    "negative": (lambda own: own.update(step=torch.tensor(-1)), ("p0", "step", -1)),
    "negative in place": (lambda own: own["step"].fill_(-2), ("p0", "step", -2)),
}
READS: dict[str, Callable[[Optimizer], object]] = {
    "step": lambda optimizer: optimizer.step(),
    "state_dict": lambda optimizer: optimizer.state_dict(),
    "inspect": lambda optimizer: optimizer.inspect(),
    "pickle": pickle.dumps,
    "copy": copy.deepcopy,
    "eval": lambda optimizer: optimizer.eval(),
}


@pytest.mark.parametrize("case", WRONG)
def test_tensors_that_cannot_be_state_are_refused_by_name_and_change_nothing(case: str) -> None:
    change, says = WRONG[case]
    params, optimizer = trained(load_recipe("adamw", {"averaging": {"kind": "ema"}}))
    before, weights = snapshot(optimizer), [p.detach().clone() for p in params]
    change(optimizer.state[params[0]])
    set_zero(optimizer.state[params[1]], V, torch.zeros(6, 4))  # fits, and waits
    for read in READS.values():
        with refused(ValueError, *says):
            read(optimizer)
    assert same([*params], weights)
    optimizer.load_state_dict({key: before[key] for key in ("state", "param_groups")})  # is a way out
    assert same(snapshot(optimizer), before)


def test_codes_of_another_format_are_refused() -> None:
    params, optimizer = trained(load_recipe("adamw", ['storage.second_moment={"kind": "int8", "min_elements": 1}']))
    optimizer.state[params[0]][f"{V}/format"] = torch.tensor(5)
    with refused(ValueError, "p0", f"{V}/format", 5):
        optimizer.step()


def test_values_that_are_exact_in_the_dtype_of_the_state_are_taken_as_they_are() -> None:
    params, optimizer = trained("adamw")
    optimizer.state[params[0]].update({V: torch.ones(6, 4, dtype=torch.float16), "step": 3})
    state = optimizer.state_dict()["state"][0]
    assert (state[V].dtype, state["step"].dtype) == (torch.float32, torch.int64)
    assert bool((state[V] == 1).all()) and state["step"] == 3


def test_state_in_evaluation_is_taken_too() -> None:
    params, optimizer = trained("schedule_free_adamw")
    optimizer.eval()
    assert "averaging/train" in optimizer.state[params[0]]
    wanted = torch.randn(6, 4)
    optimizer.state[params[0]]["averaging/train"] = wanted
    optimizer.train()
    assert torch.equal(params[0], wanted)


def test_state_that_comes_back_later_is_what_it_was() -> None:
    """Taken out, stepped without, put back: neither other parameters nor it have noticed."""
    (params, optimizer), (others, plain) = trained("soap_fitted"), trained("soap_fitted")
    kept = optimizer.state.pop(params[1])
    for own, ps in ((optimizer, params), (plain, others)):
        own.zero_grad()
        drive(own, [p for i, p in enumerate(ps) if i != 1], range(7, 9))
    assert params[1] not in optimizer.state
    optimizer.state[params[1]] = kept
    for own, ps in ((optimizer, params), (plain, others)):
        drive(own, ps, range(9, 23))
    state = [{p: own.state[p] for p in ps}.values() for own, ps in ((optimizer, params), (plain, others))]
    assert same([*params], [*others]) and all(same(a, b) for a, b in zip(*state, strict=True))


def test_a_read_of_the_state_of_a_frozen_parameter_leaves_none() -> None:
    """`optimizer.state` makes an empty entry where it is asked for one that is missing."""
    params = parameters()
    params[0].requires_grad_(False)
    optimizer = Optimizer(named(params), "adamw")
    drive(optimizer, params[1:], range(2))
    assert optimizer.state[params[0]] == {}
    assert 0 not in optimizer.state_dict()["state"]
    params[0].requires_grad_(True)
    assert optimizer.state[params[0]] == {}
    drive(optimizer, params, range(2, 4))
    assert [int(optimizer.state[p]["step"]) for p in params[:2]] == [2, 4]


@pytest.mark.parametrize("way", ["assigned", "in place"])
def test_a_reset_after_a_step_that_is_found_to_be_none_counts_no_step(way: str) -> None:
    """On a device what was wrong with a gradient is found one step later, and the step taken back then."""
    params, optimizer = trained(load_recipe("adamw", ["failure.detect=device"]))
    params[0].grad = torch.full((6, 4), torch.nan)
    optimizer.step()
    RESETS[way](optimizer)
    assert [int(own["step"]) for own in optimizer.state_dict()["state"].values()] == [0] * len(SHAPES)
    params, optimizer = trained(load_recipe("adamw", ["failure.detect=device"]))
    params[0].grad = torch.full((6, 4), torch.nan)
    optimizer.step()
    MOVES["assigned"](optimizer)
    assert [int(own["step"]) for own in optimizer.state_dict()["state"].values()] == [7, *[8] * (len(SHAPES) - 1)]


def test_zeros_in_place_count_where_another_parameter_is_taken_out_at_once() -> None:
    """State is built again then, from what the others show."""
    params, optimizer = trained(load_recipe("soap_fitted", ["routes=[]", "failure.detect=device"]))
    params[0].grad = torch.full((6, 4), torch.nan)  # found one step later
    optimizer.step()
    for value in optimizer.state[params[1]].values():
        value.zero_()
    del optimizer.state[params[2]]
    state = optimizer.state_dict()["state"]
    assert [int(state[i]["step"]) for i in sorted(state)] == [7, 0] and optimizer.skipped["p0"] == 1
    fresh = Optimizer(named(parameters()), load_recipe("soap_fitted", ["routes=[]"])).state_dict()["state"]
    assert same(state[1], fresh[1])


def test_memory_that_was_moved_is_found_in_large_tensors_by_a_step_and_in_all_by_a_read() -> None:
    params = [nn.Parameter(torch.ones(4 if i else 5)) for i in range(80)]
    optimizer = Optimizer(named(params), "adam", lr=0.1)
    drive(optimizer, params, range(2))
    for p in (params[0], params[79]):
        optimizer.state[p][V].data = torch.full_like(p, 100.0)
    assert float(optimizer.state_dict()["state"][79][V][0]) == 100
    optimizer.state[params[0]][V].data = torch.full((5,), 400.0)
    before = params[0].detach().clone()
    drive(optimizer, params, range(2, 3))
    assert float((params[0] - before).detach().abs().max()) < 0.1 * 3 / 20


# entries of hosts


def test_entries_of_hosts_stay_through_everything() -> None:
    """As Lookahead of timm keeps its slow weights in the state of the optimizer that it wraps."""
    params, optimizer = trained("schedule_free_adamw")
    slow = params[0].detach().clone()
    optimizer.state[params[0]]["slow"], optimizer.state["mine"] = slow, 1
    frozen = nn.Parameter(torch.ones(3), requires_grad=False)
    optimizer.add_param_group({"params": [("frozen", frozen)]})
    drive(optimizer, params, range(7, 9))
    frozen.requires_grad_(True)
    drive(optimizer, [*params, frozen], range(9, 11))
    optimizer.eval()
    optimizer.train()
    optimizer.state[params[0]].update(step=torch.tensor(4))
    assert optimizer.state_dict()["state"][0]["slow"] is slow and repr(optimizer) and optimizer.slot_sizes()
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    resumed = Optimizer(
        [{"params": named(parameters())}, {"params": [("frozen", nn.Parameter(torch.ones(3)))]}], "schedule_free_adamw"
    )
    resumed.load_state_dict(torch.load(file, weights_only=True))
    first = resumed.param_groups[0]["params"][0]
    assert torch.equal(resumed.state[first]["slow"], slow) and resumed.state["mine"] == 1
    assert torch.equal(copy.deepcopy(resumed).state_dict()["state"][0]["slow"], slow)
    del optimizer.state[params[0]]["0/update.rms/v"], optimizer.state[params[1]]
    with refused(ValueError, "p0", "0/update.rms/v"):
        optimizer.step()


def test_a_parameter_with_entries_of_hosts_alone_begins_afresh() -> None:
    params, optimizer = trained("adamw")
    optimizer.state.clear()
    optimizer.state[params[0]]["slow"] = slow = torch.ones(3)
    assert optimizer.state_dict()["state"] == {0: {"slow": slow}}
    drive(optimizer, params, range(2))
    assert optimizer.state[params[0]]["slow"] is slow and int(optimizer.state[params[0]]["step"]) == 2


# sizes


def size(data: Any) -> int:
    file = io.BytesIO()
    torch.save(data, file)
    return len(file.getvalue())


def test_the_state_of_one_parameter_is_saved_and_copied_alone() -> None:
    """200 matrices in one stack: what torch writes for a tensor is its storage."""
    params = [nn.Parameter(torch.randn(32, 32)) for _ in range(200)]
    optimizer = Optimizer([(f"p{i}", p) for i, p in enumerate(params)], "adamw")
    drive(optimizer, params, range(1))
    one, whole = 2 * 32 * 32 * 4 + 8, 200 * (2 * 32 * 32 * 4 + 8)
    assert optimizer.state_bytes() == whole
    state, saved = optimizer.state[params[3]], optimizer.state_dict()
    for data in (state, saved["state"][3], copy.deepcopy(state), copy.deepcopy(saved)["state"][3]):
        assert size(data) < one + 3000
    assert len(pickle.dumps(state)) < one + 5000
    assert whole < size(saved) < 1.1 * whole + 200 * 3 * 300  # and a header for each tensor, as of torch's optimizers
    assert size(saved) < size(copy.deepcopy(saved)) * 1.01
    torchs = torch.optim.AdamW(params)
    torchs.step()
    assert size(saved) < size(torchs.state_dict()) * 1.05


def test_reading_state_copies_none_of_it() -> None:
    params, optimizer = trained("soap_fitted")
    own, saved = optimizer.state[params[0]], optimizer.state_dict()["state"][0]
    assert all(saved[key] is own[key] for key in own)
    address = {key: value.data_ptr() for key, value in own.items()}
    drive(optimizer, params, range(7, 9))
    assert {key: value.data_ptr() for key, value in optimizer.state[params[0]].items()} == address
    assert int(saved["step"]) == 9


# frozen on one side


def build(frozen: int | None) -> tuple[list[nn.Parameter], Optimizer]:
    params = parameters()
    if frozen is not None:
        params[frozen].requires_grad_(False)
    return params, Optimizer(named(params), "soap_fitted")


def test_a_parameter_that_was_frozen_when_state_was_saved_begins_afresh_with_a_word() -> None:
    params, optimizer = build(1)
    drive(optimizer, [p for i, p in enumerate(params) if i != 1], range(4))
    others, resumed = build(None)
    drive(resumed, others, range(50, 53))
    resumed.state[others[1]]["slow"] = torch.ones(2)
    with warned(UserWarning, "p1"):
        resumed.load_state_dict(optimizer.state_dict())
    state = resumed.state_dict()["state"]
    assert [int(state[i]["step"]) for i in range(3)] == [4, 0, 4] and "slow" not in state[1]
    fresh = Optimizer(named(parameters()), "soap_fitted").state_dict()["state"]
    assert same(state[1], fresh[1])
    params[1].requires_grad_(True)
    for p, q in zip(others, params, strict=True):
        p.data.copy_(q.data)
    for own, ps in ((optimizer, params), (resumed, others)):
        drive(own, ps, range(4, 18))
    assert same(snapshot(resumed), snapshot(optimizer))


def test_state_of_a_parameter_that_is_frozen_now_is_kept() -> None:
    """As torch keeps it: it goes on where it was when the parameter is thawed."""
    params, optimizer = build(None)
    drive(optimizer, params, range(4))
    _, resumed = build(1)
    resumed.load_state_dict(optimizer.state_dict())
    assert same(resumed.state_dict()["state"], optimizer.state_dict()["state"])


def test_a_state_dict_without_state_begins_afresh_with_a_word() -> None:
    """As a state dict of torch's optimizers is before the first step."""
    params, optimizer = trained("adamw")
    with warned(UserWarning, "p0", "p1", "p2"):
        optimizer.load_state_dict({**optimizer.state_dict(), "state": {}})
    assert [int(own["step"]) for own in optimizer.state.values()] == [0] * len(params)


def test_a_thaw_leaves_scheduled_numbers_of_the_step_as_they_are() -> None:
    """State is built for the thawed parameter and anew for the others, whose step goes on with the present numbers."""
    recipe = load_recipe("adamw", {"update.momentum.beta": {"from": 0.1, "to": 0.9, "steps": 6}})
    runs = []
    for thawed in (True, False):
        params = parameters()
        params[1].requires_grad_(False)
        optimizer = Optimizer(named(params), recipe)
        drive(optimizer, params[:1], range(4))
        params[1].requires_grad_(thawed)
        drive(optimizer, params[: 1 + thawed], range(4, 6))
        runs.append((params[0].detach(), optimizer.state[params[0]]))
    assert same(runs[0], runs[1])


def test_state_survives_a_wrapper_that_asks_for_plain_types() -> None:
    net = nn.Linear(4, 3)
    optimizer = eigengraft.compose("adamw", net)
    optimizer.state[net.weight] = dict(optimizer.state[net.weight])
    net(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    assert type(optimizer.state[net.weight]) is dict
    assert type(optimizer.state_dict()["state"][0]) is dict
