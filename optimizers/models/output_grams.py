"""The signal `output_gradient_gram`: second moments of gradients in what layers return, collected during backward."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..optimizer import Optimizer
from .arguments import require_watchable
from .layer_grams import LayerGrams, LayerHook, is_transposed, whole

_NAME = "output_gradient_gram"


def watch_output_gradients(optimizer: Optimizer, model: nn.Module) -> LayerGrams | None:
    """Provides `output_gradient_gram` in every step that needs it, from a model's backward; `compose` calls it.

    N sum_i g_i g_i^T for every layer `y = W x`, g_i the gradient of the loss in the i-th of all y since the last step:
    the mean of the products of each row's own gradient, where the loss is the mean over N rows, as the losses of
    language models over tokens are. N counts the rows of a matrix, and the images, not the places, of a 1-d or 2-d
    convolution. Where a loss is the mean over fewer, such as sequences, it is larger by the rows of each.

    Gradients must not be scaled, as a GradScaler does: outputs in float16 are refused. Returns None, and no hook is
    there, if no stage asks. The model may be wrapped (DDP) or sharded before or after.
    """
    require_watchable("watch_output_gradients", optimizer, model)
    if _NAME not in optimizer.param_sets.signals.listeners.asking:
        return None
    grams = LayerGrams(optimizer, _NAME, lambda total, rows: total * rows)
    grams.watch(model, lambda module, path: module.register_forward_hook(LayerHook(grams, path, _see)))
    optimizer.provide(_NAME, grams.take)
    return grams


def _see(grams: LayerGrams, path: str, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    """Has the gradient of an output counted when backward makes it: a hook of the tensor, which leaves the graph as it
    is, also where the next layer writes into the output."""
    weight = module._parameters["weight"]
    assert weight is not None
    m, axis = int(weight.shape[1 if is_transposed(module) else 0]), _channels(module)
    if not isinstance(output, Tensor) or output.shape[axis] != m:
        got = f"shape {tuple(output.shape)}" if isinstance(output, Tensor) else type(output).__name__
        raise ValueError(
            f"{path}: an output of length {m} is required by '{_NAME}', got {got}; under tensor parallelism say "
            "`use_local_output=False`, so that it is a DTensor"
        )
    if output.dtype == torch.float16:
        raise ValueError(
            f"{path}: gradients without a loss scale are required by '{_NAME}', got an output in float16, whose "
            "gradients a GradScaler scales; bfloat16 needs none"
        )
    if output.requires_grad:
        output.register_hook(partial(_add, grams, module))  # type: ignore[no-untyped-call]


def _add(grams: LayerGrams, module: nn.Module, gradient: Tensor) -> None:
    axis, gradient = _channels(module), whole(gradient.detach())
    rows = gradient.movedim(axis, -1).reshape(-1, gradient.shape[axis])
    images = len(gradient) if gradient.ndim + axis > 0 else 1
    grams.add(module, rows, len(rows) if axis == -1 else images)


def _channels(module: nn.Module) -> int:
    """The axis of an output that the rows of the weight belong to."""
    return -1 - len(module.kernel_size) if isinstance(module, (nn.Conv1d, nn.Conv2d)) else -1
