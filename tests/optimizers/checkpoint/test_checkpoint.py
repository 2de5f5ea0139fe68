"""Resuming is bit-exact, loading is strict, and reading state changes nothing."""

import copy
import io
import pickle
import re
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict

import eigengraft
from eigengraft import Optimizer, load_recipe
from eigengraft.optimizers.checkpoint.sharded_state import ShardedStateDict

from ...recipes import SHIPPED, with_options
from ...refusals import refused, warned
from ...trajectories import named

SHAPES = ((6, 4), (6, 4), (4, 4), (5,), (), (0,), (3, 2, 17))
STAGE = r"\d+/(routes\.\w+\.)?(update|after_decay)(\.[A-Za-z_]\w*)+"
KEY = re.compile(rf"({STAGE}|averaging|(routes\.\w+\.)?constraints\.\w+)/[a-z_]+\d*(\.\d+)?")


def parameters(dtype: torch.dtype, shapes: Iterable[tuple[int, ...]] = SHAPES) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for s in shapes]


def drive(optimizer: torch.optim.Optimizer, params: Iterable[Tensor], steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
        optimizer.step()


def through_a_file(data: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(data, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def held(optimizer: Optimizer) -> dict[str, Any]:
    """The state dict and the parameters, as they are."""
    return {**optimizer.state_dict(), "params": [p for g in optimizer.param_groups for p in g["params"]]}


def snapshot(optimizer: Optimizer) -> dict[str, Any]:
    return copy.deepcopy(held(optimizer))


def same(one: Any, two: Any) -> bool:
    if isinstance(one, Tensor):
        return isinstance(two, Tensor) and one.dtype == two.dtype and torch.equal(one, two)
    if isinstance(one, dict):
        return one.keys() == two.keys() and all(same(one[k], two[k]) for k in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(two) and all(map(same, one, two))
    return bool(one == two)


@pytest.mark.parametrize(("recipe", "dtype"), with_options(torch.float32, torch.bfloat16), ids=str)
def test_resume_is_bit_exact(recipe: str, dtype: torch.dtype) -> None:
    params = parameters(dtype)
    optimizer = Optimizer(named(params), recipe)
    drive(optimizer, params, range(8))  # between refreshes, which are every 10 steps
    weights, state = through_a_file([[p.detach() for p in params], optimizer.state_dict()])
    again = [nn.Parameter(w) for w in weights]
    resumed = Optimizer(named(again), recipe, lr=0.5, weight_decay=0.5)
    resumed.load_state_dict(state)
    assert same(held(resumed), held(optimizer))
    drive(optimizer, params, range(8, 13))  # a refresh, and steps before and after it
    drive(resumed, again, range(8, 13))
    assert same(held(resumed), held(optimizer))


def test_resume_with_a_schedule_groups_and_missing_gradients() -> None:
    def build() -> tuple[list[Tensor], Optimizer, torch.optim.lr_scheduler.LRScheduler]:
        params = parameters(torch.float32)
        groups = [{"params": named(params[:3]), "lr": 0.05}, {"params": named(params[3:], 3), "weight_decay": 0.0}]
        optimizer = Optimizer(
            groups, load_recipe("soap_fitted", ["weight_decay.kind=corrected", "weight_decay.rate=0.1"])
        )
        return params, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 30)

    def go(params: list[Tensor], optimizer: Optimizer, schedule: Any, steps: range) -> None:
        for step in steps:
            drive(optimizer, [p for i, p in enumerate(params) if (step + i) % 3], range(step, step + 1))
            schedule.step()
            optimizer.zero_grad()

    run, resumed = build(), build()
    go(*run, range(12))
    saved = through_a_file([[p.detach() for p in run[0]], run[1].state_dict(), run[2].state_dict()])
    for p, w in zip(resumed[0], saved[0], strict=True):
        p.data.copy_(w)
    resumed[1].load_state_dict(saved[1])
    resumed[2].load_state_dict(saved[2])
    for optimizer_run in (run, resumed):
        go(*optimizer_run, range(12, 25))
    assert same(snapshot(run[1]), snapshot(resumed[1]))


@pytest.mark.slow
@pytest.mark.parametrize("frozen_again", [True, False])
def test_resume_after_a_thaw(frozen_again: bool) -> None:
    def build(frozen: bool) -> tuple[list[Tensor], Optimizer]:
        params = parameters(torch.float32)
        params[1].requires_grad_(not frozen)
        optimizer = Optimizer(named(params), "soap_fitted")
        params[1].requires_grad_(True)
        return params, optimizer

    params, optimizer = build(True)
    drive(optimizer, [p for i, p in enumerate(params) if i != 1], range(4))
    drive(optimizer, params, range(4, 7))
    again, resumed = build(frozen_again)
    for p, q in zip(again, params, strict=True):
        p.data.copy_(q.data)
    resumed.load_state_dict(through_a_file(optimizer.state_dict()))
    twin_params, twin = copy.deepcopy((params, optimizer))
    for o, ps in ((optimizer, params), (resumed, again), (twin, twin_params)):
        drive(o, ps, range(7, 30))
    assert same(snapshot(optimizer), snapshot(resumed))
    assert same(snapshot(optimizer), snapshot(twin))


def test_load_hooks_of_the_user_come_before_the_check_and_after_the_load() -> None:
    """An earlier hook may adapt the state dict, a later one finds the loaded state."""
    (trained, fresh), seen = (parameters(torch.float32) for _ in range(2)), []
    source, target = Optimizer(trained, "adamw"), Optimizer(fresh, "adamw")
    drive(source, trained, range(3))
    shown = target.state

    def adapt(_: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
        return {**state_dict, "state": {index: state for index, state in state_dict["state"].items() if index != "x"}}

    target.register_load_state_dict_pre_hook(adapt)
    target.register_load_state_dict_post_hook(lambda other: seen.append(int(other.state[fresh[0]]["step"])), True)
    saved = source.state_dict()
    target.load_state_dict({**saved, "state": {**saved["state"], "x": {}}})
    assert seen == [3] and target.state is shown
    target.load_state_dict(source.state_dict())
    assert seen == [3, 3], "no hook of a load stays behind"


@pytest.mark.parametrize("here", [True, False])
def test_a_gathered_state_without_entries_is_no_shard_on_the_rank_that_has_it(here: bool) -> None:
    optimizer = Optimizer(named([nn.Parameter(torch.zeros(2))]), "sgd", lr=0.1)
    optimizer.param_sets.consolidated = (
        {"state": {}} if here else ShardedStateDict(state={})
    )  # as of an optimizer without parameters
    found = optimizer.state_dict()
    assert found["state"] == {}
    if here:
        assert pickle.loads(pickle.dumps(found)) == found
    else:
        with refused(RuntimeError, "full_state_dict"):
            pickle.dumps(found)


def test_a_loaded_state_is_a_copy() -> None:
    params, other = parameters(torch.float32), parameters(torch.float32)
    one, two = Optimizer(named(params), "soap_fitted"), Optimizer(named(other), "soap_fitted")
    drive(one, params, range(3))
    two.load_state_dict(one.state_dict())
    before = snapshot(two)
    drive(one, params, range(3, 6))
    assert same(snapshot(two), before)
    one.load_state_dict(one.state_dict())
    drive(one, params, range(6, 8))


@pytest.mark.slow
def test_state_is_plain_tensors_under_flat_keys() -> None:
    net = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 70), nn.LayerNorm(70))
    for recipe in SHIPPED:
        optimizer = eigengraft.compose(load_recipe(recipe, ["blocking.size=32"]), net)
        for state in optimizer.state_dict()["state"].values():
            assert {type(value) for value in state.values()} == {Tensor}
            assert all(KEY.fullmatch(key) for key in state if key != "step"), sorted(state)
            assert state["step"].dtype == torch.int64 and state["step"].shape == ()
    keys = Optimizer(named([net[1].weight]), load_recipe("soap_fitted", ["blocking.size=32"])).state_dict()["state"][0]
    assert {int(key.partition("/")[0]) for key in keys if key != "step"} == {0, 1, 2}
    assert {key.partition("/")[2] for key in keys} >= {"update.eigenbasis/basis.0", "update.eigenbasis.inner.rms/v"}


def test_state_of_bfloat16_parameters_stays_float32_through_loading() -> None:
    params = parameters(torch.bfloat16, [(3, 2)])
    optimizer = Optimizer(named(params), "soap_fitted")
    optimizer.load_state_dict(through_a_file(optimizer.state_dict()))
    floats = [t.dtype for t in optimizer.state[params[0]].values() if t.is_floating_point()]
    assert floats and set(floats) == {torch.float32}


# strict


def edit(*path: Any, to: Any = None, drop: bool = False, rename: Any = None) -> Callable[[dict[str, Any]], Any]:
    """An edit of a nested dict or list at `path`."""

    def change(data: dict[str, Any]) -> Any:
        node: Any = data
        for part in path[:-1]:
            node = node[part]
        if drop:
            del node[path[-1]]
        elif rename is not None:
            node[rename] = node.pop(path[-1])
        else:
            node[path[-1]] = to
        return data

    return change


V = "0/update.rms/v"
WRONG: dict[str, tuple[Callable[[dict[str, Any]], Any], tuple[object, ...]]] = {
    "missing slot": (edit("state", 0, V, drop=True), ("w", V)),
    "extra slot": (edit("state", 0, "0/update.rms/w", to=torch.ones(1)), ("w", "0/update.rms/w")),
    "renamed slot": (edit("state", 0, V, rename="0/update.rms_2/v"), ("w", V)),
    "missing step": (edit("state", 0, "step", drop=True), ("w", "step")),
    "only a count": (edit("state", 1, to={"step": torch.tensor(1)}), ("b", V)),
    "no state of a parameter": (edit("state", 1, to=[]), ("b", "list")),
    "extra parameter": (edit("state", 7, to={"step": torch.tensor(0)}), ("state_dict", 7)),
    "shape": (edit("state", 0, V, to=torch.ones(2, 3)), ("w", V, "torch.float32", "(3, 2)", "(2, 3)")),
    "dtype": (edit("state", 0, V, to=torch.ones(3, 2).double()), ("w", V, "torch.float32", "torch.float64")),
    "not a tensor": (edit("state", 0, V, to=1.0), ("w", V, "float")),
    "group sizes": (edit("param_groups", 0, "params", to=[0]), ("[2]", "[1]")),
    "no recipe": (edit("param_groups", 0, "recipe", drop=True), (0,)),
    "broken recipe": (edit("param_groups", 0, "recipe", to="{"), ("state_dict",)),
    "no lr": (edit("param_groups", 0, "lr", drop=True), ("state_dict",)),
    "nan lr": (edit("param_groups", 0, "lr", to=float("nan")), ("lr",)),
    "negative decay": (edit("param_groups", 0, "weight_decay", to=-1.0), ("weight_decay",)),
    "other names": (
        edit("param_groups", 0, "param_names", to=["w", "c"]),
        ("state_dict", 0, "b", "c"),
    ),
    "names of others": (edit("param_groups", 0, "param_names", to=["b", "w"]), ("w", 0, "(3, 2)")),
    "no groups": (edit("param_groups", drop=True), ("state_dict", "param_groups")),
    "no state": (edit("state", drop=True), ("state_dict",)),
    "torch": (
        lambda _: torch.optim.AdamW(parameters(torch.float32, [(3, 2), (2,)])).state_dict(),
        ("recipe", "torch.optim.AdamW", "convert_adamw"),
    ),
    "list": (lambda _: [], ("state_dict",)),
    "other keys": (lambda _: {"a": 1}, ("state_dict", "'a'")),
    "empty": (lambda _: {}, ("state_dict",)),
    "whole checkpoint": (lambda saved: {"model": {}, "optimizer": saved}, ("'model'", "'optimizer'")),
}


def weight_and_bias(recipe: Any = "adamw", shapes: Iterable[tuple[int, ...]] = ((3, 2), (2,))) -> Optimizer:
    return Optimizer(list(zip("wb", parameters(torch.float32, shapes), strict=True)), recipe)


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_state_dict_is_refused_and_changes_nothing(case: str) -> None:
    optimizer = weight_and_bias()
    params = optimizer.param_groups[0]["params"]
    drive(optimizer, params, range(3))
    change, says = WRONG[case]
    saved = change(copy.deepcopy(optimizer.state_dict()))
    drive(optimizer, params, range(3, 5))
    before = snapshot(optimizer)
    with refused(ValueError, *says):
        optimizer.load_state_dict(saved)
    assert same(snapshot(optimizer), before)
    twin_params, twin = copy.deepcopy((params, optimizer))
    drive(optimizer, params, range(5, 7))
    drive(twin, twin_params, range(5, 7))
    assert same(snapshot(optimizer), snapshot(twin))


def shuffled(names: str, groups: int = 1, names_known: bool = True) -> tuple[dict[str, Tensor], Optimizer]:
    """Parameters by name, which say their shapes and values, and an optimizer that has them in that order."""
    found = {}
    for name in names.split():
        generator = torch.Generator().manual_seed(ord(name[-1]))
        found[name] = nn.Parameter(torch.randn(3, 2 + (name[-1] == "d"), generator=generator))
    entries: list[Any] = list(found.items() if names_known else found.values())
    recipe = {"base": "psgd_kron", "routes": []}  # without routes names are not needed
    size = -(-len(entries) // groups)
    return found, Optimizer([{"params": entries[i : i + size]} for i in range(0, len(entries), size)], recipe)


def train(found: dict[str, Tensor], optimizer: Optimizer, steps: range) -> None:
    for step in steps:
        for name, p in found.items():
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(100 * step + ord(name[-1])))
        optimizer.step()


@pytest.mark.parametrize(
    ("saved", "here", "groups"),
    [
        ("a b c d", "d b a c", 1),
        ("module.a module.b module.c module.d", "c d a b", 1),
        ("d _orig_mod.c b._checkpoint_wrapped_module.b a", "module.a b.b c module._fsdp_wrapped_module.d", 1),
        ("a b c d", "module.b module.a module.d module.c", 2),
    ],
)
def test_parameters_with_names_are_loaded_in_any_order(saved: str, here: str, groups: int) -> None:
    run, resumed = shuffled(saved, groups), shuffled(here, groups)
    train(*run, range(5))
    for name, p in resumed[0].items():
        p.data.copy_(next(q for other, q in run[0].items() if other[-1] == name[-1]))
    resumed[1].load_state_dict(through_a_file(run[1].state_dict()))
    assert [name for group in resumed[1].param_groups for name in group["param_names"]] == here.split()
    train(*run, range(5, 9))
    train(*resumed, range(5, 9))
    for name, p in resumed[0].items():
        assert torch.equal(p, next(q for other, q in run[0].items() if other[-1] == name[-1]))


@pytest.mark.parametrize(
    ("saved", "here", "groups", "says"),
    [
        ("a b c", "a b d", 1, (0, "d", "c")),
        ("a b", "a b c d", 1, (0, "c", "d")),
        ("a b c d", "b a", 1, (0, "c", "d")),
        ("a b c d", "a c b d", 2, (0, "c", "b")),
        ("a b c d", "a b c d e f", 3, ("[2, 2, 2]", "[2, 2]")),
    ],
)
def test_parameters_that_do_not_match_are_named(saved: str, here: str, groups: int, says: tuple[object, ...]) -> None:
    run, resumed = shuffled(saved, min(groups, 2)), shuffled(here, groups)
    train(*run, range(2))
    before = snapshot(resumed[1])
    with refused(ValueError, *says):
        resumed[1].load_state_dict(run[1].state_dict())
    assert same(snapshot(resumed[1]), before)


@pytest.mark.parametrize("known", ["neither", "saved", "here"])
def test_without_names_on_one_side_the_order_counts(known: str) -> None:
    run, resumed = shuffled("a b c", 1, known == "saved"), shuffled("c b a", 1, known == "here")
    train(*run, range(4))
    resumed[1].load_state_dict(run[1].state_dict())
    assert ("param_names" in resumed[1].param_groups[0]) == (known != "neither")  # of whoever knows them, as in torch
    for p, q in zip(run[0].values(), resumed[0].values(), strict=True):
        assert same(run[1].state[p], resumed[1].state[q])


ADAM, SOAP = "update.rms", "update.eigenbasis"
MEAN = ['averaging={"kind": "ema"}']


@pytest.mark.parametrize(
    ("saved", "here", "message"),
    [
        (["adamw"], ["blocking.size=2"], "blocking.size: absent -> 2"),
        (["soap_fitted"], ["routes=[]"], "routes.adam"),
        (["soap_fitted"], ["update.eigenbasis.inner.rms.name=second"], "update.eigenbasis.inner"),
        (["soap_fitted"], ['update=["sign"]'], "update"),
        (["adamw"], [f"{ADAM}.beta=1.0"], f"{ADAM}.beta: 0.999 -> 1.0"),  # a sum
        (["adamw"], [f"{ADAM}.source=direction"], f"{ADAM}.source: gradient -> direction"),
        (["sgd"], ["update.heavy_ball.dampening=0.5"], "update.heavy_ball.dampening: 0.0 -> 0.5"),
        (["adamw"], ['update.momentum.beta={"from": 0.5, "to": 0.9, "steps": 9}'], "update.momentum.beta.from"),
        (["soap_fitted"], [f"{SOAP}.statistic_frame=basis"], f"{SOAP}.statistic_frame: fixed -> basis"),
        (["reference/soap"], [f"{SOAP}.statistic.normalize=dimension"], "statistic.normalize: none -> dimension"),
        (["reference/soap"], [f"{SOAP}.statistic.kind=bregman"], "statistic.kind: gram -> bregman"),
        (["psgd_kron"], ["update.psgd.form=quad"], "update.psgd.form: triangular -> quad"),
        (["adamw"], MEAN, "averaging.kind: absent -> ema"),
        (["adamw", *MEAN], ["averaging.decay=0.9"], "averaging.decay: 0.999 -> 0.9"),  # it divides what is evaluated
        (["schedule_free_adamw"], ["averaging.beta=0.8"], "averaging.beta: 0.9 -> 0.8"),
        (["adamw"], ['storage.first_moment={"kind": "int8", "min_elements": 1}'], "storage.first_moment.kind"),
    ],
)
def test_a_recipe_whose_state_means_something_else_is_refused(saved: list[str], here: list[str], message: str) -> None:
    old = load_recipe(saved[0], saved[1:])
    source, target = weight_and_bias(old), weight_and_bias(load_recipe(old, here))
    before = snapshot(target)
    with refused(ValueError) as error:
        target.load_state_dict(source.state_dict())
    assert same(snapshot(target), before)
    assert ("convert_storage" in str(error.value)) == message.startswith("storage")


@pytest.mark.parametrize(
    ("saved", "here", "says"),
    [
        (["adamw"], [f"{ADAM}.beta=0.9"], (f"{ADAM}.beta", 0.999, 0.9)),
        (["adamw"], [f"{ADAM}.eps=1e-6"], (f"{ADAM}.eps", 1e-08, 1e-06)),
        (["adamw"], [f"{ADAM}.bias_correction=false"], (f"{ADAM}.bias_correction", "True", "False")),
        (["adamw"], ["weight_decay.kind=cautious"], ("weight_decay.kind",)),
        (["adamw"], ["failure.nonfinite=raise"], ("failure.nonfinite",)),
        (["adamw"], ["blocking.size=512"], ("blocking.size", 512)),  # blocks are the same
        (["adamw"], ["storage.first_moment=int8"], ("storage.first_moment.kind", "int8")),  # too small for it
        (["soap_fitted"], [f"{SOAP}.refresh.steps=3"], (f"{SOAP}.refresh.steps", 10, 3)),
        (["soap_fitted"], [f"{SOAP}.refresh.stagger=none"], (f"{SOAP}.refresh.stagger",)),
        (["soap_fitted"], [f"{SOAP}.solver=eigh"], (f"{SOAP}.solver.kind", "power_qr")),
        (["soap_fitted"], ["view=whole"], ("view.kind",)),  # of matrices the same
        (["soap_fitted"], ["routes.adam.lr_multiplier=0.5"], ("routes.adam.lr_multiplier", 1.0, 0.5)),
        (["soap_fitted"], ["total_steps=50"], ("total_steps", 50)),
        (["adamw", *MEAN], ["averaging.weight=0.5"], ("averaging.weight", 1.0, 0.5)),
    ],
)
def test_other_settings_load_with_a_word_and_apply(saved: list[str], here: list[str], says: tuple[object, ...]) -> None:
    """The run goes on as one whose settings were changed in the middle."""
    old = load_recipe(saved[0], saved[1:])
    new = load_recipe(old, here)
    source = weight_and_bias(old)
    drive(source, source.param_groups[0]["params"], range(4))
    target = weight_and_bias(new)
    for p, q in zip(target.param_groups[0]["params"], source.param_groups[0]["params"], strict=True):
        p.data.copy_(q.data)
    with warned(UserWarning, *says) as words:
        target.load_state_dict(source.state_dict())
    assert len(words) == 1 and words[0].filename == __file__
    assert same(target.state_dict()["state"], source.state_dict()["state"])
    assert {group["recipe"] for group in target.param_groups} == {new.to_json()}
    twin = copy.deepcopy(target)
    drive(target, target.param_groups[0]["params"], range(4, 8))
    drive(twin, twin.param_groups[0]["params"], range(4, 8))
    assert same(snapshot(target), snapshot(twin))
    again = weight_and_bias(new)
    again.load_state_dict(target.state_dict())  # and is saved with the new ones: no word


def test_the_warning_names_every_changed_setting() -> None:
    """Ten settings differ, and no line is left out."""
    old, new = load_recipe("soap"), load_recipe("soap_fitted")
    source, target = weight_and_bias(old), weight_and_bias(new)
    drive(source, source.param_groups[0]["params"], range(2))
    with warned(UserWarning, f"{SOAP}.timing", f"{SOAP}.transport", "weight_decay.placed") as words:
        target.load_state_dict(source.state_dict())
    assert "more" not in str(words[0].message)


def test_a_changed_setting_is_what_steps_follow() -> None:
    """With eps 1 in place of 1e-8 a step of m = v = g = 1 is half as long."""
    p = nn.Parameter(torch.zeros(1))
    source, target = (Optimizer([("p", p)], load_recipe("adam", [f"{ADAM}.eps={eps}"]), lr=0.1) for eps in (1e-8, 1.0))
    p.grad = torch.ones(1)
    source.step()
    with warned(UserWarning, f"{ADAM}.eps"):
        target.load_state_dict(source.state_dict())
    before = p.detach().clone()
    target.step()
    torch.testing.assert_close(before - p.detach(), torch.full((1,), 0.05))


def test_groups_of_different_iterates_are_refused() -> None:
    groups = [{"params": [pair]} for pair in zip("wb", parameters(torch.float32, [(3, 2), (2,)]), strict=True)]
    optimizer = Optimizer(groups, {"base": "adamw", "averaging": "ema"})
    saved = copy.deepcopy(optimizer.state_dict())
    saved["param_groups"][1]["iterate"] = "eval"
    with refused(ValueError, "group 1", "iterate", "eval"):
        optimizer.load_state_dict(saved)


def test_a_group_saved_without_a_peak_keeps_its_own() -> None:
    optimizer = weight_and_bias({"base": "adamw", "weight_decay": "corrected"})
    saved = copy.deepcopy(optimizer.state_dict())
    peak = saved["param_groups"][0].pop("peak_lr")
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["peak_lr"] == peak
    drive(optimizer, optimizer.param_groups[0]["params"], range(1))


def test_groups_keep_the_saved_rates_as_with_torch() -> None:
    source, target = (
        weight_and_bias("adamw"),
        weight_and_bias(load_recipe("adamw", ["lr=0.5", "weight_decay.rate=0.7"])),
    )
    saved = source.state_dict()
    with warned(UserWarning, 0.001, 0.5, "weight_decay.rate", 0.01, 0.7):
        target.load_state_dict(saved)
    assert [(group["lr"], group["weight_decay"]) for group in target.param_groups] == [(0.001, 0.01)]


def test_a_warning_made_an_error_changes_nothing() -> None:
    source, target = weight_and_bias("adamw"), weight_and_bias(load_recipe("adamw", [f"{ADAM}.eps=1e-6"]))
    drive(source, source.param_groups[0]["params"], range(3))
    before = snapshot(target)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with refused(UserWarning, "eps"):
            target.load_state_dict(source.state_dict())
    assert same(snapshot(target), before)


@pytest.mark.parametrize("option", ["compile=true", "distribution.mode=local", 'expect={"rms": "> 0 parameters"}'])
def test_options_by_which_no_number_differs_load_without_a_word(option: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        changed = load_recipe("adamw", [option])
        saved = weight_and_bias().state_dict()
        saved["param_groups"][0]["recipe"] = changed.to_json()
        weight_and_bias().load_state_dict(saved)


def test_the_recipe_of_a_checkpoint_composes_an_optimizer_that_loads_it() -> None:
    """What the refusal says to do."""
    source = weight_and_bias(load_recipe("adamw", MEAN))
    saved = source.state_dict()
    weight_and_bias(saved["param_groups"][0]["recipe"]).load_state_dict(saved)


def test_a_checkpoint_with_other_names_of_fields_is_refused() -> None:
    one, two = weight_and_bias("adamw"), weight_and_bias("adamw")
    saved = one.state_dict()
    for group in saved["param_groups"]:
        group["recipe"] = group["recipe"].replace('"schema": 2', '"schema": 1')
    with refused(ValueError, "schema 1", "schema 2"):
        two.load_state_dict(saved)


def test_another_order_of_stages_is_another_recipe() -> None:
    one, two = weight_and_bias({"update": ["momentum", "rms"]}), weight_and_bias({"update": ["rms", "momentum"]})
    with refused(ValueError, "recipe"):
        two.load_state_dict(one.state_dict())


def test_what_a_recipe_is_called_does_not_matter() -> None:
    one, two = weight_and_bias(), weight_and_bias(load_recipe("adamw").replace(name="mine", about="the same"))
    drive(one, one.param_groups[0]["params"], range(2))
    two.load_state_dict(one.state_dict())
    assert same(two.state_dict()["state"], one.state_dict()["state"])


def test_another_shape_is_refused() -> None:
    with refused(ValueError, "w", "(3, 2)", "torch.float32", "(2, 3)"):
        weight_and_bias().load_state_dict(weight_and_bias(shapes=[(2, 3), (2,)]).state_dict())


def test_a_refused_load_of_a_frozen_parameter_changes_nothing() -> None:
    saved = weight_and_bias().state_dict()
    del saved["state"][1][V]
    optimizer = weight_and_bias()
    frozen = Optimizer([("w", nn.Parameter(torch.ones(3, 2))), ("b", nn.Parameter(torch.ones(2), requires_grad=False))])
    drive(optimizer, optimizer.param_groups[0]["params"], range(2))
    before = snapshot(frozen)
    with refused(ValueError, "b", V):
        frozen.load_state_dict(saved)
    assert same(snapshot(frozen), before)


# torch.distributed.checkpoint, in one process


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.body, self.norm = nn.Embedding(6, 4), nn.Linear(4, 3), nn.LayerNorm(3)


def make(recipe: str) -> tuple[Net, Optimizer]:
    torch.manual_seed(0)
    net = Net()
    return net, eigengraft.compose(recipe, net)


class Reordered(nn.Module):
    """The parameters of `Net` in another order, in what wrappers make of it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.norm, self.body, self.tokens = nn.LayerNorm(3), checkpoint_wrapper(nn.Linear(4, 3)), nn.Embedding(6, 4)


@pytest.mark.parametrize(("flat", "full"), [(False, False), (True, False), (False, True)])
def test_the_state_dict_api_of_torch_reorders_and_unwraps(flat: bool, full: bool) -> None:
    options = StateDictOptions(flatten_optimizer_state_dict=flat, full_state_dict=full)
    run = make("psgd_kron")
    drive(run[1], run[0].parameters(), range(3))
    net = Reordered()
    resumed = eigengraft.compose("psgd_kron", net)
    saved = copy.deepcopy(get_optimizer_state_dict(*run, options=options))
    set_optimizer_state_dict(net, resumed, saved, options=options)
    other = {name.replace("_checkpoint_wrapped_module.", ""): p for name, p in net.named_parameters()}
    assert all(same(run[1].state[p], resumed.state[other[name]]) for name, p in run[0].named_parameters())
    assert resumed.param_groups[0]["param_names"] == [name for name, _ in net.named_parameters()]


def continues_alike(*runs: tuple[Net, Optimizer]) -> bool:
    for net, optimizer in runs:
        drive(optimizer, net.parameters(), range(50, 62))
    return all(same(snapshot(runs[0][1]), snapshot(optimizer)) for _, optimizer in runs[1:])


# both at once is beyond torch 2.13, for its own AdamW too: KeyError 'param_groups.0.params.0'
@pytest.mark.parametrize(("flat", "full"), [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("recipe", ["soap_fitted", "shampoo", "reference/soap", "adafactor"])
def test_the_state_dict_api_round_trips(recipe: str, flat: bool, full: bool) -> None:
    options = StateDictOptions(flatten_optimizer_state_dict=flat, full_state_dict=full)
    run, resumed = make(recipe), make(recipe)
    drive(run[1], run[0].parameters(), range(13))
    saved = copy.deepcopy(get_optimizer_state_dict(*run, options=options))
    resumed[0].load_state_dict(run[0].state_dict())
    set_optimizer_state_dict(*resumed, saved, options=options)
    assert continues_alike(run, resumed)


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("recipe", ["soap_fitted", "reference/soap"])
def test_a_distributed_checkpoint_on_disk_round_trips(recipe: str, flat: bool, tmp_path: Path) -> None:
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    run, resumed = make(recipe), make(recipe)
    drive(run[1], run[0].parameters(), range(13))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, about its file reader
        saved = {"net": run[0].state_dict(), "optimizer": get_optimizer_state_dict(*run, options=options)}
        dcp.save(saved, checkpoint_id=tmp_path, no_dist=True)
        target = {"net": resumed[0].state_dict(), "optimizer": get_optimizer_state_dict(*resumed, options=options)}
        dcp.load(target, checkpoint_id=tmp_path, no_dist=True)
    resumed[0].load_state_dict(target["net"])
    set_optimizer_state_dict(*resumed, target["optimizer"], options=options)
    assert continues_alike(run, resumed)


@pytest.mark.parametrize(("recipe", "case"), with_options((13, "host"), (13, "device"), (0, "host"), (0, "device")))
def test_reading_state_changes_nothing(recipe: str, case: tuple[int, str]) -> None:
    trained, detect = case
    torch.manual_seed(0)
    net = Net()
    optimizer = eigengraft.compose(load_recipe(recipe, [f"failure.detect={detect}", "weight_decay.rate=0.1"]), net)
    drive(optimizer, net.parameters(), range(trained))
    before = snapshot(optimizer)
    optimizer.state_dict()
    get_optimizer_state_dict(net, optimizer)
    optimizer.routing_table(), optimizer.state_bytes(), repr(optimizer)
    lr = [group["lr"] for group in optimizer.param_groups]
    for zero in (0.0, torch.tensor(0.0)):  # what libraries do that know no other way to see the state
        for group in optimizer.param_groups:
            group["lr"] = zero
        for p in net.parameters():
            p.grad = torch.zeros_like(p)
        optimizer.step()
        optimizer.zero_grad()
    for group, value in zip(optimizer.param_groups, lr, strict=True):
        group["lr"] = value
    assert same(snapshot(optimizer), before)
