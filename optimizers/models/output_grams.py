"""The signal `output_gradient_gram`: second moments of gradients in what layers return, collected during backward."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor, nn

from eigengraft.blocking import is_transposed

from ..optimizer import Optimizer
from .arguments import require_watchable
from .layer_grams import CallRows, LayerGrams, gram_of, whole

_NAME = "output_gradient_gram"


def watch_output_gradients(optimizer: Optimizer, model: nn.Module) -> LayerGrams | None:
    """Provides `output_gradient_gram` in every step that needs it, from a model's backward; `compose` calls it.

    N sum_i g_i g_i^T for every layer `y = W x`, g_i the gradient of the loss in the i-th of all y that the gradient of
    the step was taken through: the mean of the products of each row's own gradient, where the loss is the mean over N
    rows, as the losses of language models over tokens are. N counts the rows of a matrix, and the images, not the
    places, of a 1-d or 2-d convolution. Where a loss is the mean over fewer, such as sequences, it is larger by the
    rows of each.

    The g_i are in the unit of the gradient that the step takes: a factor that it was multiplied by since the backward,
    by GradScaler's `unscale_` or by `clip_grad_norm_`, multiplies them too. Returns None, and no hook is there, if no
    stage asks. The model may be wrapped (DDP) or sharded before or after.
    """
    require_watchable("watch_output_gradients", optimizer, model)
    if _NAME not in optimizer.param_sets.signals.listeners.asking:
        return None
    grams = LayerGrams(optimizer, _NAME, lambda total, rows: total * rows, of_gradients=True)
    grams.watch(model, _see)
    optimizer.provide(_NAME, grams.take)
    return grams


def _see(path: str, module: nn.Module, args: tuple[Any, ...], output: Any) -> tuple[CallRows, Tensor | None]:
    weight = module._parameters["weight"]
    assert weight is not None
    m, axis = int(weight.shape[1 if is_transposed(module) else 0]), _channels(module)
    if not isinstance(output, Tensor) or output.shape[axis] != m:
        got = f"shape {tuple(output.shape)}" if isinstance(output, Tensor) else type(output).__name__
        raise ValueError(
            f"{path}: an output of length {m} is required by '{_NAME}', got {got}; under tensor parallelism say "
            "`use_local_output=False`, so that it is a DTensor"
        )
    return partial(_contribution, axis), output if output.requires_grad else None


def _contribution(axis: int, gradient: Tensor) -> tuple[Tensor, int]:
    gradient = whole(gradient.detach())
    rows = gradient.movedim(axis, -1).reshape(-1, gradient.shape[axis])
    images = len(gradient) if gradient.ndim + axis > 0 else 1
    return gram_of(rows), len(rows) if axis == -1 else images


def _channels(module: nn.Module) -> int:
    """The axis of an output that the rows of the weight belong to."""
    return -1 - len(module.kernel_size) if isinstance(module, (nn.Conv1d, nn.Conv2d)) else -1
