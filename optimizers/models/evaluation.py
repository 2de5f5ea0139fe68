"""A word about models that are evaluated at the iterate that is trained, while their optimizer averages iterates."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn

from eigengraft.errors import warn_user

from ..optimizer import Optimizer


def watch_evaluation(optimizer: Optimizer, model: nn.Module) -> None:
    """Warns once if a model is evaluated without `optimizer.eval()`; without an averaging nothing is watched.

    What is seen is a forward of the model in evaluation mode and without gradients, after a step.
    """
    if optimizer.recipe.averaging is not None:
        hook = EvaluationHook(optimizer)
        hook.handle = model.register_forward_pre_hook(hook)
        weakref.finalize(optimizer, hook.handle.remove)


class EvaluationHook:
    """A forward-pre-hook of a model, which removes itself when it has warned; it goes with the optimizer.

    A copy or a pickle of it does nothing.
    """

    def __init__(self, optimizer: Optimizer | None = None) -> None:
        self._optimizer = None if optimizer is None else weakref.ref(optimizer)
        self.handle: Any = None

    def __reduce__(self) -> tuple[type[EvaluationHook], tuple[()]]:
        return EvaluationHook, ()

    def __call__(self, model: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling() or model.training or torch.is_grad_enabled():
            return
        optimizer = self._optimizer() if self._optimizer is not None else None
        if optimizer is not None and optimizer.iterate == "train":
            if not any(bool(param_set.step_counts.any()) for param_set in optimizer.param_sets):
                return
            kind = getattr(optimizer.recipe.averaging, "kind", "")
            warn_user(
                f"the recipe averages iterates ({kind}), and the model is evaluated at the one that is trained; call "
                "optimizer.eval() before an evaluation and optimizer.train() after it"
            )
        elif optimizer is not None:
            return
        if self.handle is not None:
            self.handle.remove()
