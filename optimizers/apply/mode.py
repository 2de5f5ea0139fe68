"""Which iterate the parameters of an optimizer hold: the one to train, or the one to evaluate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from ..engine.param_set import ParamSet
    from ..optimizer import Optimizer

Mode = Literal["train", "eval"]
MODES: tuple[Mode, ...] = ("train", "eval")


def switch(optimizer: Optimizer, param_sets: Sequence[ParamSet], mode: Mode) -> None:
    """Makes all parameters hold the iterate of a mode. Every group says which under `iterate`."""
    if optimizer.recipe.averaging is None or optimizer.iterate == mode:
        return
    for param_set in param_sets:
        param_set.settle()
    for param_set in param_sets:
        param_set.switch(mode)
        optimizer.show(param_set)
    for group in optimizer.param_groups:
        group["iterate"] = mode


def require_training(mode: Mode) -> None:
    """Refuses a step from parameters that hold another iterate than the one that is trained."""
    if mode != "train":
        raise RuntimeError(
            "Optimizer.step: the parameters must hold the training iterate, got the evaluated one; "
            "call optimizer.train() first"
        )


def saved_mode(groups: Sequence[Mapping[str, Any]], averages: bool) -> Mode:
    """The mode that saved groups agree on; ValueError if they do not, or if it makes no sense."""
    found = [group.get("iterate", "train") for group in groups]
    for index, mode in enumerate(found):
        if mode not in MODES or mode != found[0]:
            wanted = "'train' or 'eval', the same in all groups,"
            raise ValueError(f"state_dict: group {index}: 'iterate': {wanted} is required, got {mode!r}")
        if mode == "eval" and not averages:
            raise ValueError(f"state_dict: group {index}: 'iterate': 'train' is required without averaging, got 'eval'")
    return "eval" if "eval" in found else "train"
