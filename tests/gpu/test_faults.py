"""Faults that are put in by hand, and the test of the suite that finds each."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from eigengraft import Optimizer
from eigengraft.optimizers.step import capture, capturers
from eigengraft.optimizers.step.gradients import FiniteCheck
from eigengraft.preconditioners import Eigenbasis, Momentum, Spectral
from eigengraft.slots import State
from eigengraft.testing import accelerator

from ..optimizers.step.test_capture import test_replayed_steps_have_the_results_of_steps_without_a_graph as replays
from .recording import Recording
from .test_budgets import test_a_step_keeps_to_its_budget as budget
from .test_budgets import test_a_step_with_a_mask_waits_for_nothing as waits
from .test_budgets import test_decays_and_writes_are_launched_for_stacks as decays
from .test_budgets import test_roots_and_bases_are_not_copied_under_a_mask as read_only
from .test_features import test_addresses_of_state_never_move as addresses

Fault = Callable[[pytest.MonkeyPatch], object]
"""A function that puts a fault in until the end of the test."""


def around(owner: Any, name: str, change: Callable[..., Any]) -> Fault:
    """Replace a method by change(the method, *its arguments)."""

    def put_in(patch: pytest.MonkeyPatch) -> None:
        method = getattr(owner, name)
        patch.setattr(owner, name, lambda *args, **options: change(method, *args, **options))

    return put_in


def in_apply(stage: type, change: Callable[[Any, Tensor], object]) -> Fault:
    """Call change(state, direction) before `apply`, and multiply the direction by a tensor that it returns."""

    def changed(apply: Any, self: Any, state: Any, gradient: Tensor, direction: Tensor, context: Any) -> Any:
        factor = change(state, direction)
        return apply(self, state, gradient, direction * factor if isinstance(factor, Tensor) else direction, context)

    return around(stage, "apply", changed)


def move_state(step: Any, optimizer: Optimizer) -> None:
    step(optimizer)
    for own in optimizer.stack_states():
        own.tensors.update({key: x.clone() for key, x in own.tensors.items()})


def on_mask(change: Callable[[Tensor], Any]) -> Fault:
    """Change the mask of usable gradients."""

    def changed(finish: Any, *args: Any) -> Any:
        active, mask = finish(*args)
        return active, mask if mask is None else change(mask)

    return around(FiniteCheck, "finish", changed)


def one_by_one(add: Any, tensors: Any, others: Any, alpha: float = 1.0) -> None:
    for x, y in zip(tensors, others, strict=True):
        x.add_(y, alpha=alpha)


def frozen(replace: Any, values: Any, /, **changes: Any) -> Any:
    return replace(values, **changes | ({"lr": values.lr} if "lr" in changes else {}))


def on_device(check: Any, *args: Any) -> None:
    with accelerator("cuda") as run:
        check(*args, run.device)


def replayed(recipe: str) -> None:
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = Recording()
        patch.setitem(capturers.CAPTURERS, "cpu", found)
        replays(recipe, found)


FAULTS: dict[str, tuple[Fault, Callable[[], None], str]] = {
    "item": (in_apply(Spectral, lambda s, d: d.sum().item()), partial(waits, "muon"), "_local_scalar_dense"),
    "upload": (
        in_apply(Eigenbasis, lambda s, d: torch.tensor(1.0, device=d.device)),
        partial(waits, "soap_fitted"),
        r"_to_copy.*\(4, 4\) == \(0, 0\)",
    ),
    "upload in float64 without a wait": (
        in_apply(Eigenbasis, lambda s, d: torch.ones((), dtype=torch.float64).to(d.device, non_blocking=True)),
        partial(waits, "soap_fitted"),
        r"_to_copy.*\(0, 4\) == \(0, 0\)",
    ),
    "state as numpy": (in_apply(Momentum, lambda s, d: s["m"].cpu().numpy()), partial(waits, "muon"), "downloads=4"),
    "nonzero": (on_mask(lambda mask: (mask.nonzero(), mask)[1]), partial(waits, "muon"), "nonzero"),
    "mask on the CPU": (on_mask(Tensor.cpu), partial(waits, "muon"), "cuda:0 and cpu"),
    "another kernel": (
        in_apply(Momentum, lambda s, d: torch.ones((), device=d.device)),
        partial(budget, "muon"),
        "'kernels': .*'traffic': .*'graph': ",
    ),
    "copied basis": (
        around(State, "read", lambda read, self, name: self[name]),
        partial(read_only, "soap_fitted"),
        "/slots.py:[0-9]+ clone",
    ),
    "launch for each parameter": (
        around(torch, "_foreach_add_", one_by_one),
        partial(decays, "decoupled"),
        "add_.*<= 8",
    ),
    "moved address": (around(Optimizer, "step", move_state), partial(on_device, addresses, "muon"), r"\] == \["),
    "frozen rate": (around(capture, "replace", frozen), partial(replayed, "ademamix"), "0 >= 3"),
}
"""Each fault, the test that must fail, and a part of its error."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name == "another kernel" else ()) for name in FAULTS]
)
def test_a_fault_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fault, check, says = FAULTS[name]
    fault(monkeypatch)
    with pytest.raises((AssertionError, RuntimeError), match=f"(?s){says}"):
        check()
