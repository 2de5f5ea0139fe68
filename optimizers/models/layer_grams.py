"""The signals `activation_gram` and `output_gradient_gram`: sums of outer products that hooks collect from layers.

`activation_gram` sums over a layer's inputs, and `output_gradient_gram` over the gradients of a layer's outputs. The
sums are stored until the next step of the optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.nn import functional
from torch.utils import _pytree as pytree

from eigengraft.blocking import is_transposed
from eigengraft.numerics import compute_dtype, is_dtensor

from ..isolation import without_autocast
from ..optimizer import Optimizer
from .arguments import require_watchable
from .gradient_sums import GradientSums, ParamPlace

CallRows = Callable[[Tensor], tuple[Tensor, int]]
"""Function that backward calls with the gradient of the output of one call of a layer. It returns the Gram matrix X^T X
of the rows X of that call, and the number of rows to add to the layer's count N."""
INPUT_GRAM, OUTPUT_GRAM = "activation_gram", "output_gradient_gram"
"""Names of the two signals, in this order: from inputs of layers, and from gradients of outputs of layers."""


class LayerGrams(GradientSums):
    """Collector of X^T X for every layer whose update requests the signal `name`.

    The rows of X `[N, n]` are the layer's inputs, or the gradients of its outputs. X has the rows of all calls whose
    backward contributed to the present gradient of the layer's weight. There are several such calls if the step has
    several micro-batches, if a forward calls the module several times, or if modules share the weight. A forward
    without a backward, or with a gradient that is dropped, adds no rows. A forward that activation checkpointing
    repeats adds its rows once. Rows are collected only if a stage needs the signal in the next step. In copies and
    pickles of the model the hooks do nothing.

    If the gradients of parameters are scaled after the backward, and the rows of X are gradients, X^T X is multiplied
    by the square of the same factor.

    optimizer: the optimizer of the model's parameters, made from a recipe.
    model: the model at whose layers hooks are registered.
    name: the signal: `activation_gram` for inputs, `output_gradient_gram` for gradients of outputs.
    """

    def __init__(self, optimizer: Optimizer, model: nn.Module, name: str) -> None:
        """Register a hook at each layer whose update requests the signal, unless another collector has done so."""
        super().__init__(optimizer, name, torch.add, measured=name == OUTPUT_GRAM)
        self._watched: WeakKeyDictionary[nn.Module, ParamPlace] = WeakKeyDictionary()
        self._due: set[ParamPlace] | None = None

        known = self.takers()
        for path, module in model.named_modules():
            if _multiplies(module) and id(module._parameters["weight"]) in known and not self._is_watched(module):
                self._watched[module] = known[id(module._parameters["weight"])]
                self._handles.append(module.register_forward_hook(LayerHook(self, path)))

    def _is_watched(self, module: nn.Module) -> bool:
        """Return True if a hook of this layer already collects the same signal for the same optimizer."""
        found = (hook.grams for hook in module._forward_hooks.values() if isinstance(hook, LayerHook))
        return any(g is not None and g.name == self.name and g._optimizer() is self._optimizer() for g in found)

    def clear(self) -> None:
        super().clear()
        self._due = None

    def wants(self, module: nn.Module) -> bool:
        """Return True if the call of a layer that runs now must be collected.

        This is so if the forward has gradients, if the next step of the layer's weight uses the signal, and if the call
        uses this weight and not another one (as `functional_call` may).
        """
        weight = module._parameters.get("weight")
        if weight is None or not (weight.requires_grad and self.records):
            return False
        if self._due is None:
            sets = self.optimizer.param_sets
            due = sets.signals.due(self.name, sets, sets.rows())
            self._due = {place for key, place in self.places() if key in due}
        if (place := self._watched.get(module)) not in self._due or place is None:
            return False
        parameter = self.parameter(place)
        return weight is parameter or is_dtensor(parameter)  # otherwise `functional_call` passed another weight

    def _add(self, place: ParamPlace, rows: CallRows, gradient: Tensor) -> None:
        if self._optimizer() is not None:
            self.add(place, self.parameter(place), *rows(gradient))

    def signal(self) -> Mapping[Tensor, Tensor] | None:
        factor, found = self.factor(), self.take()
        rows = {place: own for place, own in found.items() if isinstance(own[1], Tensor) or own[1]}
        of_inputs = self.name == INPUT_GRAM
        made = {self.parameter(at): total / n if of_inputs else total * n for at, (total, n) in rows.items()}
        if factor is not None:
            square = factor.square()
            made = {parameter: x * square.to(x.device) for parameter, x in made.items()}
        return made or None


class LayerHook:
    """A forward hook of one layer that collects the inputs of its calls, or the gradients of their outputs.

    A copy of the hook, in a copy of the model, does nothing.

    grams: the collector of X^T X, where the rows of X are the inputs or gradients; None in a copy of the hook.
    path: path of the layer, for error messages.
    """

    def __init__(self, grams: LayerGrams | None, path: str) -> None:
        self.grams, self.path = grams, path

    @_disable_dynamo  # equals torch.compiler.disable, but does not import the compiler before the first call
    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if self.grams is not None and self.grams.wants(module):
            see = _see_inputs if self.grams.name == INPUT_GRAM else _see_outputs
            rows, differentiable = see(self.path, module, args, output)
            if differentiable is not None:
                # backward calls this hook even if the next layer writes into the output
                add = partial(self.grams._add, self.grams._watched[module], rows)
                differentiable.register_hook(add)  # type: ignore[no-untyped-call]

    def __reduce__(self) -> tuple[Any, ...]:
        return LayerHook, (None, self.path)


def gram_of(rows: Tensor) -> Tensor:
    """Return X^T X of rows X `[k, n]`, in the compute dtype of X even under autocast."""
    rows = rows.detach().to(compute_dtype(rows.dtype))
    with without_autocast():
        return rows.mT @ rows


def differentiable(output: Any) -> Tensor | None:
    """Return the first tensor in a layer's output that requires a gradient, or None."""
    leaves = (output,) if isinstance(output, Tensor) else pytree.tree_leaves(output)
    return next((leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad), None)


def whole(x: Tensor) -> Tensor:
    """Return the full plain tensor of a DTensor (of tensor parallelism), and a plain tensor unchanged."""
    return x.full_tensor() if is_dtensor(x) else x


def _multiplies(module: nn.Module) -> bool:
    """Return True if a layer multiplies its inputs by its weight, as far as its class and the weight's axes show.

    The result is True for a weight of two axes, except in embeddings, and for 1-d and 2-d convolutions of one group
    with zeros as padding.
    """
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag, torch.jit.ScriptModule)):  # compiled code calls no hooks
        return False
    weight = module._parameters.get("weight")
    if weight is None:
        return False
    if isinstance(module, (nn.Conv1d, nn.Conv2d)):
        return module.groups == 1 and module.padding_mode == "zeros" and module.padding != "same"
    return weight.ndim == 2


def watch_inputs(optimizer: Optimizer, model: nn.Module) -> LayerGrams | None:
    """Provide the signal `activation_gram` from the inputs of a model's layers. `compose` calls this function.

    The signal is A = X^T X / N for every layer `y = W x`. The rows of X `[N, n]` are the inputs x of all calls that
    contribute to the gradient of the step. For a matrix W, an input x is a slice along the last axis of the layer's
    first argument. For 1-d and 2-d convolutions of one group, the inputs x are patches.

    Args:
        optimizer: the optimizer that receives the signal.
        model: the model, which may be wrapped (DDP) or sharded before or after this call.

    Returns:
        The collector, or None if no stage requests the signal. Without a request no hook is registered.
    """
    require_watchable("watch_inputs", optimizer, model)
    asking = optimizer.param_sets.signals.asking
    return LayerGrams(optimizer, model, INPUT_GRAM) if INPUT_GRAM in asking else None


def _see_inputs(path: str, module: nn.Module, args: tuple[Any, ...], output: Any) -> tuple[CallRows, Tensor | None]:
    """Prepare to collect the inputs of a layer in one call of the layer.

    Return (function, tensor). The tensor belongs to the output; it is None if no gradient reaches the output. Backward
    calls the function with the gradient of the tensor. The function returns the Gram matrix of the inputs of this call,
    and the number of inputs.

    Until the backward, a copy of the inputs is stored, or the Gram matrix of the inputs if it is smaller.

    path: path of the layer, for errors.
    args: positional arguments of the call. The first one has the inputs.
    """
    rows = _input_rows(path, module, args)
    few = len(rows) < rows.shape[1]
    return partial(_kept_rows, rows.clone() if few else gram_of(rows), len(rows), few), differentiable(output)


def _kept_rows(kept: Tensor, count: int, few: bool, gradient: Tensor) -> tuple[Tensor, int]:
    return gram_of(kept) if few else kept, count


def _input_rows(path: str, module: nn.Module, args: tuple[Any, ...]) -> Tensor:
    x = whole(args[0].detach()) if args and isinstance(args[0], Tensor) else None
    if isinstance(module, (nn.Conv1d, nn.Conv2d)) and x is not None:
        return _patches(module, x)
    weight = module._parameters["weight"]
    assert weight is not None
    n = int(weight.shape[0 if is_transposed(module) else 1])
    if x is None or x.shape[-1] != n:
        got = "no tensor" if x is None else f"shape {tuple(x.shape)}"
        raise ValueError(
            f"{path}: the signal '{INPUT_GRAM}' needs a tensor whose last axis has the length {n} as the first "
            f"argument of this module, got {got}"
        )
    return x.reshape(-1, n)


def _patches(module: nn.Conv1d | nn.Conv2d, x: Tensor) -> Tensor:
    """Return the patches of an input to which a convolution applies its kernel, `[patches, channels * kernel]`."""
    padding: Any = (0,) * len(module.kernel_size) if module.padding == "valid" else module.padding
    how = [module.kernel_size, module.dilation, padding, module.stride]
    if isinstance(module, nn.Conv1d):
        x, how = x.unsqueeze(-2), [(neutral, *given) for neutral, given in zip((1, 1, 0, 1), how, strict=True)]
    images = x if x.ndim == 4 else x.unsqueeze(0)
    return functional.unfold(images, *how).mT.flatten(0, 1)


def watch_output_gradients(optimizer: Optimizer, model: nn.Module) -> LayerGrams | None:
    """Provide the signal `output_gradient_gram` from a model's backward. `compose` calls this function.

    The signal is N sum_i g_i g_i^T for every layer `y = W x`, where g_i is the gradient of the loss with respect to the
    i-th output y that contributes to the gradient of the step. For a linear layer, N is the number of outputs y. For a
    1-d or 2-d convolution, N is the number of images, and i runs over all positions of all images.

    If the loss is the mean over N outputs, as in language models over tokens, the signal is the mean of h_i h_i^T,
    where h_i = N g_i is the gradient of the loss of output i. If the loss is the mean over fewer items, such as M
    sequences, the factor N is too large: the factor that fits this mean is M, so the signal is N / M times as large as
    M sum_i g_i g_i^T.

    The g_i have the scale of the step's gradient: if GradScaler's `unscale_` or `clip_grad_norm_` scaled the gradients
    after the backward, the g_i are scaled by the same factor.

    Args:
        optimizer: the optimizer that receives the signal.
        model: the model, which may be wrapped (DDP) or sharded before or after this call.

    Returns:
        The collector, or None if no stage requests the signal. Without a request no hook is registered.
    """
    require_watchable("watch_output_gradients", optimizer, model)
    asking = optimizer.param_sets.signals.asking
    return LayerGrams(optimizer, model, OUTPUT_GRAM) if OUTPUT_GRAM in asking else None


def _see_outputs(path: str, module: nn.Module, args: tuple[Any, ...], output: Any) -> tuple[CallRows, Tensor | None]:
    """Prepare to collect the gradients of a layer's output in one call of the layer.

    Return (function, output). None stands in place of the output if no gradient reaches it. Backward calls the function
    with the gradient of the output. The function returns the Gram matrix of the gradient, and the number to add
    to the layer's count N.

    path: path of the layer, for errors.
    args: positional arguments of the call.
    """
    weight = module._parameters["weight"]
    assert weight is not None
    m, axis = int(weight.shape[1 if is_transposed(module) else 0]), _channels(module)
    if not isinstance(output, Tensor) or output.shape[axis] != m:
        got = f"shape {tuple(output.shape)}" if isinstance(output, Tensor) else type(output).__name__
        raise ValueError(
            f"{path}: the signal '{OUTPUT_GRAM}' needs an output of this layer whose axis {axis} has the length {m}, "
            f"got {got}; under tensor parallelism set `use_local_output=False`, so that the output is a DTensor"
        )
    return partial(_gradient_rows, axis), output if output.requires_grad else None


def _gradient_rows(axis: int, gradient: Tensor) -> tuple[Tensor, int]:
    gradient = whole(gradient.detach())
    rows = gradient.movedim(axis, -1).reshape(-1, gradient.shape[axis])
    images = len(gradient) if gradient.ndim + axis > 0 else 1
    return gram_of(rows), len(rows) if axis == -1 else images


def _channels(module: nn.Module) -> int:
    """Return the axis of a layer's output that has one entry for each output unit, as a negative index.

    For a linear layer this is -1, the last axis. For a convolution it is the axis of the channels.
    """
    return -1 - len(module.kernel_size) if isinstance(module, (nn.Conv1d, nn.Conv2d)) else -1
