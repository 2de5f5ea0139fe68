"""The signal `activation_gram`: second moments of the inputs of layers, collected by forward hooks."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from eigengraft.blocking import is_transposed

from ..optimizer import Optimizer
from .arguments import require_watchable
from .layer_grams import CallRows, LayerGrams, differentiable, gram_of, whole

_NAME = "activation_gram"


def watch_inputs(optimizer: Optimizer, model: nn.Module) -> LayerGrams | None:
    """Provides `activation_gram` in every step that needs it, from the inputs of a model's layers; `compose` calls it.

    A = X^T X / N for every layer `y = W x`, X `[N, n]` the inputs whose outputs the gradient of the step was taken
    through: of matrices, of which x is the last axis of the first argument, and of 1-d and 2-d convolutions of one
    group, of which x are patches. Returns None, and no hook is there, if no stage asks. The model may be wrapped (DDP)
    or sharded before or after.
    """
    require_watchable("watch_inputs", optimizer, model)
    if _NAME not in optimizer.param_sets.signals.listeners.asking:
        return None
    grams = LayerGrams(optimizer, _NAME, lambda total, rows: total / rows)
    grams.watch(model, _see)
    optimizer.provide(_NAME, grams.take)
    return grams


def _see(path: str, module: nn.Module, args: tuple[Any, ...], output: Any) -> tuple[CallRows, Tensor | None]:
    """The inputs of one call, kept until backward as a copy or as their Gram, whichever is smaller."""
    rows = _rows(path, module, args)
    few = len(rows) < rows.shape[1]
    return partial(_contribution, rows.clone() if few else gram_of(rows), len(rows), few), differentiable(output)


def _contribution(kept: Tensor, count: int, few: bool, gradient: Tensor) -> tuple[Tensor, int]:
    return gram_of(kept) if few else kept, count


def _rows(path: str, module: nn.Module, args: tuple[Any, ...]) -> Tensor:
    x = whole(args[0].detach()) if args and isinstance(args[0], Tensor) else None
    if isinstance(module, (nn.Conv1d, nn.Conv2d)) and x is not None:
        return _patches(module, x)
    weight = module._parameters["weight"]
    assert weight is not None
    n = int(weight.shape[0 if is_transposed(module) else 1])
    if x is None or x.shape[-1] != n:
        got = "no tensor" if x is None else f"shape {tuple(x.shape)}"
        raise ValueError(f"{path}: inputs of length {n} as first argument are required by '{_NAME}', got {got}")
    return x.reshape(-1, n)


def _patches(module: nn.Conv1d | nn.Conv2d, x: Tensor) -> Tensor:
    """What a kernel is multiplied by at every place, `[places, channels * kernel]`; one axis is a row of an image."""
    padding: Any = (0,) * len(module.kernel_size) if module.padding == "valid" else module.padding
    how = [module.kernel_size, module.dilation, padding, module.stride]
    if isinstance(module, nn.Conv1d):
        x, how = x.unsqueeze(-2), [(neutral, *given) for neutral, given in zip((1, 1, 0, 1), how, strict=True)]
    images = x if x.ndim == 4 else x.unsqueeze(0)
    return functional.unfold(images, *how).mT.flatten(0, 1)
