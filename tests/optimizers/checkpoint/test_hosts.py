"""What libraries do to an optimizer that hosts of training loops own: parameters replaced, events of a Trainer."""

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from eigengraft import Optimizer
from eigengraft.optimizers import ConsolidateOnSave

from ...refusals import refused


def start(recipe: str = "soap_fitted", frozen: bool = False) -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3))
    model[1].bias.requires_grad_(not frozen)
    decayed, rest = (
        [entry for entry in model.named_parameters() if (entry[1].ndim > 1) == matrix] for matrix in (True, False)
    )
    return model, Optimizer([{"params": decayed, "weight_decay": 0.1}, {"params": rest, "lr": 0.01}], recipe)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        for p in model.parameters():
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(step)) if p.requires_grad else None
        optimizer.step()


def renewed(model: nn.Module) -> dict[int, nn.Parameter]:
    """Puts new parameters of the same values into a model; by the id of the old ones."""
    found = {}
    for module in model.modules():
        for name, p in list(module.named_parameters(recurse=False)):
            found[id(p)] = nn.Parameter(p.detach().clone(), p.requires_grad)
            setattr(module, name, found[id(p)])
    return found


def prepared(model: nn.Module, optimizer: Optimizer, meanwhile: Callable[[], Any] = lambda: None) -> None:
    """What accelerate does: tiny tensors in place of parameters, in the lists of the groups, then new parameters."""
    old = [list(group["params"]) for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        for i, p in enumerate(group["params"]):
            group["params"][i] = torch.empty(1, dtype=p.dtype)
    meanwhile()
    new = renewed(model)
    for group, own in zip(optimizer.param_groups, old, strict=True):
        group["params"] = [new[id(p)] for p in own]


def same(one: nn.Module, other: nn.Module) -> bool:
    return all(map(torch.equal, one.parameters(), other.parameters()))


def loaded_at_once(optimizer: Optimizer) -> None:
    optimizer.load_state_dict(optimizer.state_dict())


@pytest.mark.parametrize(
    "first",
    [Optimizer.state_dict, loaded_at_once, copy.deepcopy, Optimizer.eval, None],
    ids=["saved", "loaded", "copied", "evaluated", "neither"],
)
@pytest.mark.parametrize("recipe", ["soap_fitted", "schedule_free_adamw"])
def test_replaced_parameters_are_taken_over_before_the_first_step(recipe: str, first: Any) -> None:
    (expected, reference), (model, optimizer) = start(recipe), start(recipe)
    loaded_at_once(optimizer)  # accelerate does
    prepared(model, optimizer)
    if first is not None:
        first(optimizer)
        optimizer.train()
    train(expected, reference, range(12))
    train(model, optimizer, range(12))
    assert same(model, expected) and {*optimizer.state} == {*model.parameters()}
    assert [row.name for row in optimizer.routing_table()] == [row.name for row in reference.routing_table()]


def test_a_provided_value_outlasts_replaced_parameters() -> None:
    weight = nn.Parameter(torch.ones(2))
    recipe = {"update": [{"kind": "clip_norm"}], "failure": {"spike": {"measure": "loss"}}}
    optimizer = Optimizer([("w", weight)], recipe, lr=0.1)
    optimizer.provide("loss", 2.0)
    optimizer.param_groups[0]["params"][0] = nn.Parameter(weight.detach().clone())
    optimizer.param_groups[0]["params"][0].grad = torch.ones(2)
    optimizer.step()
    assert optimizer.spikes is not None and optimizer.spikes.mean == 2.0


def test_an_optimizer_works_while_a_trainer_holds_placeholders_in_its_groups() -> None:
    model, optimizer = start()
    shown, table = repr(optimizer), optimizer.routing_table()

    def meanwhile() -> None:
        assert repr(optimizer) == shown and optimizer.routing_table() == table and optimizer.state_bytes() > 0
        optimizer.zero_grad()
        with refused(ValueError, "0.weight", "(5, 4)", "(1,)"):
            optimizer.state_dict()

    prepared(model, optimizer, meanwhile)
    train(model, optimizer, range(2))


def test_a_frozen_parameter_is_taken_over_and_thawed() -> None:
    (expected, reference), (model, optimizer) = start(frozen=True), start(frozen=True)
    prepared(model, optimizer)
    for net, own in ((expected, reference), (model, optimizer)):
        train(net, own, range(3))
        net[1].bias.requires_grad_(True)  # type: ignore[index,union-attr]
        train(net, own, range(3, 6))
    assert same(model, expected)


def later(model: nn.Module, optimizer: Optimizer) -> None:
    train(model, optimizer, range(1))
    prepared(model, optimizer)


def later_by_a_load(model: nn.Module, optimizer: Optimizer) -> None:
    other = start()
    train(*other, range(1))
    optimizer.load_state_dict(other[1].state_dict())
    prepared(model, optimizer)


def appended(model: nn.Module, optimizer: Optimizer) -> None:
    optimizer.param_groups[1]["params"].append(nn.Parameter(torch.ones(3)))


def removed(model: nn.Module, optimizer: Optimizer) -> None:
    del optimizer.param_groups[1]["params"][0]


def reordered(model: nn.Module, optimizer: Optimizer) -> None:
    optimizer.param_groups[0]["params"].reverse()


def other_group(model: nn.Module, optimizer: Optimizer) -> None:
    optimizer.param_groups.append({**optimizer.param_groups[0], "params": [nn.Parameter(torch.ones(3))]})


def flattened(model: nn.Module, optimizer: Optimizer) -> None:
    optimizer.param_groups[0]["params"][1] = nn.Parameter(torch.ones(15))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (later, (0, "0.weight")),
        (later_by_a_load, (0, "0.weight")),
        (appended, (1, 2, 3, "optimizer.add_param_group")),
        (removed, (1, 2)),
        (reordered, (0, "0.weight")),
        (other_group, ("param_groups", 2, 3, "optimizer.add_param_group")),
        (flattened, ("1.weight", "(3, 5)", "(15,)")),
    ],
)
def test_other_parameters_are_refused_by_name(change: Callable[..., None], says: tuple[object, ...]) -> None:
    model, optimizer = start()
    change(model, optimizer)
    before = [p.detach().clone() for p in model.parameters()]
    for call in (optimizer.step, optimizer.state_dict, lambda: train(model, optimizer, range(1))):
        with refused(ValueError, *says):
            call()
    assert all(map(torch.equal, before, model.parameters()))


class Trainer:
    """The events of Hugging Face's Trainer: all of a protocol are called on every callback, with keyword arguments."""

    EVENTS = ("on_init_end", "on_train_begin", "on_step_begin", "on_step_end", "on_log", "on_evaluate", "on_epoch_end")

    def __init__(self, optimizer: Any, callbacks: list[Any], **args: Any) -> None:
        self.optimizer, self.callbacks = SimpleNamespace(optimizer=optimizer), callbacks  # as accelerate wraps it
        self.args = SimpleNamespace(**args)

    def call(self, saving: str) -> None:
        for event in self.EVENTS:
            control = SimpleNamespace(should_save=event == saving)
            for callback in self.callbacks:
                assert getattr(callback, event)(self.args, None, control, model=None, optimizer=self.optimizer) is None


@pytest.mark.parametrize(
    ("args", "saving", "calls"),
    [
        ({"save_strategy": "steps"}, "on_step_end", 1),
        ({"save_strategy": "epoch"}, "on_epoch_end", 1),
        ({"save_strategy": "best"}, "", 1),
        ({"save_strategy": "steps"}, "", 0),
        ({"save_strategy": "steps", "save_only_model": True}, "on_step_end", 0),
    ],
)
def test_the_callback_consolidates_before_a_trainer_saves(args: dict[str, Any], saving: str, calls: int) -> None:
    found: list[int] = []
    optimizer = SimpleNamespace(consolidate_state_dict=lambda to: found.append(to))
    callback = ConsolidateOnSave()
    Trainer(optimizer, [callback], **args).call(saving)
    assert found == [0] * calls
    with pytest.raises(AttributeError):
        callback.other  # noqa: B018


def test_one_process_needs_no_consolidation() -> None:
    model, optimizer = start()
    train(model, optimizer, range(2))
    before = optimizer.state_dict()
    optimizer.consolidate_state_dict()
    found: dict[int, dict[str, Tensor]] = optimizer.state_dict()["state"]
    assert all(torch.equal(value, before["state"][i][key]) for i, own in found.items() for key, value in own.items())
