"""What users of torch's optimizers count on, after the generic tests of torch (test_optim.py, common_optimizers.py).

A promise is a function of a subject, which makes optimizers; it fails with an AssertionError, or the error it got.
"""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler as schedulers
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook


@dataclass(frozen=True)
class Subject:
    """What is asked: a name, and a function that makes an optimizer of parameters and of torch's options."""

    name: str
    make: Callable[..., Any]


NAMES = ("hidden.weight", "hidden.bias")
Promise = Callable[[Subject], None]
PROMISES: dict[str, Promise] = {}


def promise(function: Promise) -> Promise:
    PROMISES[function.__name__.replace("_", " ")] = function
    return function


def weights(dtype: torch.dtype = torch.float32, names: bool = True) -> tuple[list[Tensor], list[Any]]:
    """A matrix and a vector, and what an optimizer is given of them."""
    generator = torch.Generator().manual_seed(0)
    found: list[Tensor] = [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in ((4, 3), (4,))]
    return found, list(zip(NAMES, found, strict=True)) if names else found


def loss_of(params: list[Tensor]) -> Tensor:
    """A convex loss that gives both gradients."""
    x = torch.tensor([[1.0, -0.5, 0.25], [0.3, 0.8, -1.0]], dtype=params[0].dtype)
    return (x @ params[0].T + params[1]).square().sum()


def closure_of(optimizer: Any, params: list[Tensor]) -> Callable[[], Tensor]:
    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(params)
        loss.backward()
        return loss

    return closure


def run(optimizer: Any, params: list[Tensor], steps: int = 2) -> float:
    closure = closure_of(optimizer, params)
    return [optimizer.step(closure).item() for _ in range(steps)][-1] if steps else closure().item()


def started(subject: Subject, names: bool = True, steps: int = 2, **options: Any) -> tuple[list[Tensor], Any]:
    params, given = weights(names=names)
    optimizer = subject.make(given, **options)
    run(optimizer, params, steps)
    return params, optimizer


def same(one: Any, other: Any) -> bool:
    """Whether nested mappings, lists and tensors are equal bit for bit."""
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return isinstance(other, dict) and one.keys() == other.keys() and all(same(one[k], other[k]) for k in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def refused(error: type[Exception] | tuple[type[Exception], ...], call: Callable[[], Any], text: str = "") -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(error) as caught:
            call()
    assert text in str(caught.value)


def without_names(state: dict[str, Any]) -> dict[str, Any]:
    groups = [{k: v for k, v in group.items() if k != "param_names"} for group in state["param_groups"]]
    return {**state, "param_groups": groups}


# construction


@promise
def a_bare_tensor_is_a_type_error(subject: Subject) -> None:
    refused(TypeError, lambda: subject.make(weights()[0][0]), "should be an iterable of Tensors or dicts")


@promise
def no_parameters_are_refused(subject: Subject) -> None:
    refused(ValueError, lambda: subject.make([]), "empty parameter list")


@promise
def what_is_no_tensor_is_a_type_error(subject: Subject) -> None:
    refused(TypeError, lambda: subject.make([1.0]), "optimizer can only optimize Tensors")


@promise
def what_is_no_leaf_is_refused(subject: Subject) -> None:
    params, _ = weights(names=False)
    refused(ValueError, lambda: subject.make([params[0] * 2]), "can't optimize a non-leaf Tensor")


@promise
def a_parameter_twice_in_a_group_is_said(subject: Subject) -> None:
    params, _ = weights()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        subject.make([params[1], params[1]])
    assert any("duplicate parameters" in str(warning.message) for warning in caught)


@promise
def a_parameter_in_two_groups_is_refused(subject: Subject) -> None:
    params, _ = weights()
    text = "some parameters appear in more than one parameter group"
    refused(ValueError, lambda: subject.make([{"params": params[1]}, {"params": params[1]}]), text)


@promise
def names_are_for_all_parameters_of_a_group(subject: Subject) -> None:
    params, _ = weights()
    text = "all optimizer params should be with/without names"
    refused(ValueError, lambda: subject.make([("weight", params[0]), params[1]]), text)


@promise
def names_are_for_all_groups(subject: Subject) -> None:
    params, _ = weights()
    groups = [{"params": [params[1]]}, {"params": [("weight", params[0])]}]
    refused(ValueError, lambda: subject.make(groups), "all optimizer param groups should be with/without names")


@promise
def rates_that_cannot_be_are_refused(subject: Subject) -> None:
    for options in ({"lr": -1.0}, {"weight_decay": -1.0}, {"lr": torch.tensor([0.1, 0.1])}):
        refused(ValueError, lambda options=options: subject.make(weights()[1], **options))


@promise
def parameters_without_names_are_taken_as_they_are(subject: Subject) -> None:
    params, given = weights(names=False)
    run(subject.make(given, shipped=True), params)


@promise
def a_generator_of_parameters_is_taken(subject: Subject) -> None:
    model = nn.Linear(3, 4)
    subject.make(model.named_parameters())


@promise
def it_is_an_optimizer_of_torch_and_can_be_printed(subject: Subject) -> None:
    _, optimizer = started(subject)
    assert isinstance(optimizer, torch.optim.Optimizer) and repr(optimizer) and optimizer.defaults["lr"] >= 0


# steps


@promise
def the_loss_falls(subject: Subject) -> None:
    params, optimizer = started(subject, steps=0, lr=0.01)
    assert run(optimizer, params, 12) < run(optimizer, weights()[0], 0)


@promise
def strided_parameters_are_trained_alike(subject: Subject) -> None:
    values = [value.detach() for value in weights()[0]]
    strided = [nn.Parameter(torch.stack((value, value), -1)[..., 0]) for value in values]
    assert not any(value.is_contiguous() for value in strided)
    params, given = weights()
    run(subject.make(given), params)
    run(subject.make(list(zip((name for name, _ in given), strided, strict=True))), strided)
    for one, other in zip(params, strided, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)  # sums may be taken in another order


@promise
def dtypes_may_differ_in_a_group(subject: Subject) -> None:
    params, given = weights()
    wide = nn.Parameter(params[1].detach().double())
    optimizer = subject.make([given[0], ("hidden.wide.bias", wide)])
    for p in (params[0], wide):
        p.grad = torch.ones_like(p)
    before = [params[0].detach().clone(), wide.detach().clone()]
    for _ in range(2):
        optimizer.step()
    assert not any(map(torch.equal, before, (params[0], wide)))


@promise
def the_default_dtype_does_not_matter(subject: Subject) -> None:
    expected, _ = started(subject)
    torch.set_default_dtype(torch.float64)
    try:
        params, optimizer = [nn.Parameter(p.detach().float()) for p in weights()[0]], None
        optimizer = subject.make(list(zip(NAMES, params, strict=True)))
        run(optimizer, params)
    finally:
        torch.set_default_dtype(torch.float32)
    assert same(params, expected)


@promise
def a_tensor_as_learning_rate_is_a_number(subject: Subject) -> None:
    (one, _), (other, optimizer) = started(subject, lr=0.125), started(subject, lr=torch.tensor(0.125))
    assert torch.is_tensor(optimizer.param_groups[0]["lr"])
    for p, q in zip(one, other, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-6)  # torch multiplies by the tensor, and rounds elsewhere


@promise
def complex_parameters_are_trained(subject: Subject) -> None:
    parameter = nn.Parameter(torch.ones(3, dtype=torch.complex64))
    optimizer = subject.make([("hidden.bias", parameter)])
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert not torch.equal(parameter, torch.ones_like(parameter))


@promise
def implementations_are_chosen_and_change_nothing(subject: Subject) -> None:
    expected, _ = started(subject)
    for options in ({"foreach": True}, {"fused": True, "foreach": None}):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            params, _ = started(subject, **options)
        for p, q in zip(params, expected, strict=True):
            torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)  # torch's fused kernels round elsewhere


@promise
def capturable_and_differentiable_may_be_off(subject: Subject) -> None:
    assert same(started(subject, capturable=False, differentiable=False)[0], started(subject)[0])


@promise
def steps_can_be_differentiated(subject: Subject) -> None:
    params, given = weights()
    moved = [(name, p.clone()) for name, p in given]
    optimizer = subject.make(moved, differentiable=True)
    for (_, p), own in zip(moved, params, strict=True):
        p.grad = own.square()
    optimizer.step()
    assert torch.autograd.grad(moved[0][1].sum(), params, allow_unused=True)[0] is not None


@promise
def maximize_climbs(subject: Subject) -> None:
    params, optimizer = started(subject, steps=0, maximize=True)
    assert run(optimizer, params, 5) > run(optimizer, weights()[0], 0)


@promise
def maximize_may_be_off(subject: Subject) -> None:
    assert same(started(subject, maximize=False)[0], started(subject)[0])


@promise
def groups_have_their_own_rates(subject: Subject) -> None:
    params, given = weights()
    before = [p.detach().clone() for p in params]
    optimizer = subject.make([{"params": given[:1], "lr": 0.0, "weight_decay": 0.0}, {"params": given[1:], "lr": 0.1}])
    run(optimizer, params)
    assert torch.equal(params[0], before[0]) and not torch.equal(params[1], before[1])


@promise
def a_rate_written_into_a_group_is_used(subject: Subject) -> None:
    params, optimizer = started(subject)
    before = [p.detach().clone() for p in params]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    run(optimizer, params, 1)
    assert same(before, [p.detach() for p in params])


@promise
def without_gradients_a_step_does_nothing(subject: Subject) -> None:
    params, optimizer = started(subject, steps=0)
    optimizer.zero_grad()
    before = [p.detach().clone() for p in params]
    optimizer.step(lambda: torch.tensor(1.0))
    assert same(before, [p.detach() for p in params])


@promise
def gradients_of_zero_move_nothing(subject: Subject) -> None:
    params, optimizer = started(subject, steps=0, weight_decay=0.0)
    before = [p.detach().clone() for p in params]
    for p in params:
        p.grad = torch.zeros_like(p)
    optimizer.step()
    assert same(before, [p.detach() for p in params])


@promise
def a_closure_runs_with_gradients_and_its_loss_is_returned(subject: Subject) -> None:
    _, optimizer = started(subject, steps=0)
    seen: list[bool] = []

    def closure() -> Tensor:
        seen.append(torch.is_grad_enabled())
        return torch.tensor(3.0)

    with torch.no_grad():
        assert float(optimizer.step(closure)) == 3.0 and seen == [True]
    assert optimizer.step() is None


@promise
def gradients_are_cleared(subject: Subject) -> None:
    params, optimizer = started(subject)
    optimizer.zero_grad(set_to_none=False)
    assert all(p.grad is not None and not p.grad.any() for p in params)
    optimizer.zero_grad()
    assert all(p.grad is None for p in params)


# groups


@promise
def a_group_is_added_and_trained(subject: Subject) -> None:
    params, given = weights()
    optimizer = subject.make(given[:1])
    run(optimizer, params, 2)
    optimizer.add_param_group({"params": given[1:], "lr": 0.05})
    before = params[1].detach().clone()
    run(optimizer, params, 2)
    assert not torch.equal(before, params[1]) and optimizer.param_groups[1]["lr"] == 0.05
    assert len(optimizer.state_dict()["param_groups"]) == 2


@promise
def a_parameter_of_another_group_is_not_added(subject: Subject) -> None:
    _, given = weights()
    optimizer = subject.make(given)
    refused(ValueError, lambda: optimizer.add_param_group({"params": given[1:]}))
    assert len(optimizer.param_groups) == 1


@promise
def keys_of_users_stay_in_groups_and_in_checkpoints(subject: Subject) -> None:
    _, given = weights()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimizer = subject.make([{"params": given, "layer_id": 3}])
        other = subject.make([{"params": weights()[1], "layer_id": 4}])
    assert optimizer.param_groups[0]["layer_id"] == 3
    optimizer.param_groups[0]["note"] = "mine"
    other.load_state_dict(optimizer.state_dict())
    assert other.param_groups[0]["layer_id"] == 3 and other.param_groups[0]["note"] == "mine"


@promise
def groups_listed_twice_are_saved_twice(subject: Subject) -> None:
    _, optimizer = started(subject)
    expected = optimizer.state_dict()["param_groups"][-1]
    optimizer.param_groups.extend(optimizer.param_groups)
    assert same(optimizer.state_dict()["param_groups"][-1], expected)


# state dicts


def _continued(subject: Subject, first: bool, second: bool) -> None:
    """A run and its copy through a state dict, with and without names, stay equal."""
    shipped = None if first == second else False  # routes of shipped recipes ask for names, on both sides
    params, optimizer = started(subject, first, shipped=shipped)
    others: list[Tensor] = [nn.Parameter(p.detach().clone()) for p in params]
    other = subject.make(list(zip(NAMES, others, strict=True)) if second else others, shipped=shipped)
    saved = optimizer.state_dict()
    kept = copy.deepcopy(saved)
    other.load_state_dict(copy.deepcopy(saved))  # torch's take over the tensors of a state dict, and write into them
    assert same(saved, kept)
    run(optimizer, params)
    run(other, others)
    assert same(params, others)
    assert same(without_names(optimizer.state_dict()), without_names(other.state_dict()))
    if first or second:
        assert other.state_dict()["param_groups"][0]["param_names"] == list(NAMES)


@promise
def names_to_names_resumes(subject: Subject) -> None:
    _continued(subject, True, True)


@promise
def names_to_no_names_resumes(subject: Subject) -> None:
    _continued(subject, True, False)


@promise
def no_names_to_names_resumes(subject: Subject) -> None:
    _continued(subject, False, True)


@promise
def no_names_to_no_names_resumes(subject: Subject) -> None:
    _continued(subject, False, False)


@promise
def other_names_are_loaded_in_order(subject: Subject) -> None:
    (_, optimizer), (params, given) = started(subject), weights()
    renamed = [(f"wrapped.{name}", p) for name, p in given]
    other = subject.make(renamed)
    other.load_state_dict(optimizer.state_dict())
    run(other, params, 1)


@promise
def what_older_versions_lack_is_filled_in(subject: Subject) -> None:
    params, optimizer = started(subject)
    saved = copy.deepcopy(optimizer.state_dict())
    for group in saved["param_groups"]:
        for key in ("foreach", "maximize", "capturable", "differentiable", "fused", "peak_lr", "iterate"):
            group.pop(key, None)
    optimizer.load_state_dict(saved)
    run(optimizer, params)


@promise
def keys_of_later_versions_are_loaded(subject: Subject) -> None:
    params, optimizer = started(subject)
    saved = optimizer.state_dict()
    saved["param_groups"][0]["of_a_later_version"] = 1
    saved["of_a_later_version"] = 2
    optimizer.load_state_dict(saved)
    run(optimizer, params)


@promise
def a_checkpoint_is_read_with_weights_only(subject: Subject) -> None:
    for names in (True, False):
        _, optimizer = started(subject, names)
        saved, file = optimizer.state_dict(), io.BytesIO()
        torch.save(saved, file)
        file.seek(0)
        assert same(torch.load(file, weights_only=True), saved)


@promise
def a_step_that_is_a_number_is_loaded(subject: Subject) -> None:
    params, optimizer = started(subject)
    saved = copy.deepcopy(optimizer.state_dict())
    for own in saved["state"].values():
        own.update({"step": own["step"].item()} if torch.is_tensor(own.get("step")) else {})
    optimizer.load_state_dict(saved)
    run(optimizer, params)


@promise
def a_saved_rate_replaces_the_own(subject: Subject) -> None:
    _, optimizer = started(subject, lr=0.125)
    other = subject.make(weights()[1], lr=0.5)
    other.load_state_dict(optimizer.state_dict())
    assert other.param_groups[0]["lr"] == 0.125


@promise
def loaded_groups_are_not_shared(subject: Subject) -> None:
    (_, optimizer), (_, other) = started(subject, lr=0.125), started(subject)
    saved = optimizer.state_dict()
    other.load_state_dict(saved)
    other.param_groups[0]["lr"] = 0.5
    assert saved["param_groups"][0]["lr"] == 0.125 == optimizer.param_groups[0]["lr"]


@promise
def groups_of_other_sizes_are_refused(subject: Subject) -> None:
    (_, optimizer), (_, given) = started(subject), weights()
    other = subject.make([{"params": given[:1]}, {"params": given[1:]}])
    refused(ValueError, lambda: other.load_state_dict(optimizer.state_dict()))


@promise
def state_is_cast_to_the_dtype_of_parameters(subject: Subject) -> None:
    (_, optimizer), (params, given) = started(subject), weights(torch.float64)
    other = subject.make(given)
    other.load_state_dict(optimizer.state_dict())
    run(other, params, 1)


@promise
def state_of_users_is_saved_and_loaded(subject: Subject) -> None:
    params, optimizer = started(subject)
    optimizer.state["mine"] = 1
    other = started(subject)[1]
    other.load_state_dict(optimizer.state_dict())
    assert other.state["mine"] == 1 and optimizer.state_dict()["state"]["mine"] == 1
    run(optimizer, params, 1)


# hooks


def _mark(optimizer: Any) -> None:
    optimizer.state["test"] = 1


def _unmark(optimizer: Any, state: dict[str, Any]) -> dict[str, Any]:
    state["marked"] = state["state"].pop("test", None) is not None
    return state


def _rate(value: float, copied: bool) -> Callable[[Any, dict[str, Any]], dict[str, Any] | None]:
    def hook(optimizer: Any, state: dict[str, Any]) -> dict[str, Any] | None:
        own = copy.deepcopy(state) if copied else state
        own["param_groups"][0]["lr"] = value
        return own if copied else None

    return hook


@promise
def hooks_before_and_after_a_state_dict_see_it(subject: Subject) -> None:
    _, optimizer = started(subject)
    optimizer.register_state_dict_post_hook(_unmark)
    assert optimizer.state_dict()["marked"] is False
    optimizer.register_state_dict_pre_hook(_mark)
    saved = optimizer.state_dict()
    assert saved["marked"] is True and "test" not in saved["state"]


@promise
def hooks_before_a_load_change_it_in_order(subject: Subject) -> None:
    _, optimizer = started(subject)
    saved = optimizer.state_dict()
    optimizer.register_load_state_dict_pre_hook(_rate(0.002, copied=False))
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["lr"] == 0.002
    first = optimizer.register_load_state_dict_pre_hook(_rate(0.003, copied=True), prepend=True)
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["lr"] == 0.002
    first.remove()
    optimizer.register_load_state_dict_pre_hook(_rate(0.003, copied=True))
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["lr"] == 0.003


@promise
def hooks_after_a_load_write_into_the_state(subject: Subject) -> None:
    _, optimizer = started(subject)
    optimizer.register_load_state_dict_post_hook(lambda own: own.state.update({"loaded": True}))
    optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer.state["loaded"] is True


@promise
def hooks_of_steps_are_called_in_order_and_removed(subject: Subject) -> None:
    params, optimizer = started(subject)
    seen: list[str] = []
    handles = [
        register_optimizer_step_pre_hook(lambda *_: seen.append("all, before")),
        register_optimizer_step_post_hook(lambda *_: seen.append("all, after")),
        optimizer.register_step_pre_hook(lambda *_: seen.append("before")),
        optimizer.register_step_post_hook(lambda *_: seen.append("after")),
    ]
    run(optimizer, params, 1)
    assert seen == ["all, before", "before", "after", "all, after"]
    for handle in handles:
        handle.remove()
    run(optimizer, params, 1)
    assert len(seen) == 4


# copies and schedules


@promise
def a_copy_has_all_attributes_and_continues(subject: Subject) -> None:
    params, optimizer = started(subject)
    copies = []
    for others, other in (copy.deepcopy((params, optimizer)), pickle.loads(pickle.dumps((params, optimizer)))):
        public = [{key for key in vars(some) if not key.startswith("_")} for some in (optimizer, other)]
        assert public[0] == public[1]
        run(other, others)
        copies.append(others)
    run(optimizer, params)
    assert all(same(others, params) for others in copies)


SCHEDULES: Iterable[Callable[[Any], Any]] = (
    lambda own: schedulers.StepLR(own, step_size=2, gamma=0.5),
    lambda own: schedulers.OneCycleLR(own, max_lr=0.1, total_steps=9, cycle_momentum=False),
    lambda own: schedulers.ReduceLROnPlateau(own, patience=0, factor=0.5),
    lambda own: schedulers.SequentialLR(
        own, [schedulers.ConstantLR(own, total_iters=2), schedulers.ExponentialLR(own, 0.5)], milestones=[2]
    ),
)


@promise
def schedules_drive_the_rate_and_resume(subject: Subject) -> None:
    for schedule in SCHEDULES:
        dummy = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
        (params, optimizer), (others, other) = started(subject, lr=0.1, steps=0), started(subject, lr=0.1, steps=0)
        pairs = [(optimizer, schedule(optimizer)), (dummy, schedule(dummy)), (other, schedule(other))]
        for _ in range(2):
            run(optimizer, params, 1)
            dummy.step()
            for _, driver in pairs[:2]:
                driver.step(*((1.0,) if isinstance(driver, schedulers.ReduceLROnPlateau) else ()))
            assert float(optimizer.param_groups[0]["lr"]) == float(dummy.param_groups[0]["lr"])
        other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        pairs[2][1].load_state_dict(pairs[0][1].state_dict())
        with torch.no_grad():
            for p, own in zip(others, params, strict=True):
                p.copy_(own)
        for some, (own, driver) in ((params, pairs[0]), (others, pairs[2])):
            run(own, some, 1)
            driver.step(*((1.0,) if isinstance(driver, schedulers.ReduceLROnPlateau) else ()))
        assert same(params, others) and optimizer.param_groups[0]["lr"] == other.param_groups[0]["lr"]


@promise
def a_scaler_of_gradients_steps_it(subject: Subject) -> None:
    params, optimizer = started(subject, steps=0)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    before = params[0].detach().clone()
    for _ in range(2):
        optimizer.zero_grad()
        scaler.scale(loss_of(params)).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    assert not torch.equal(before, params[0])
