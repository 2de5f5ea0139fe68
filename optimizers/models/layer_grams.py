"""The signals `activation_gram` and `output_gradient_gram`: sums of outer products that hooks collect from layers.

Second moments of the inputs of a layer are known after a forward, those of the gradients in its outputs during
backward. Both wait for the next step of the optimizer.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.nn import functional
from torch.utils import _pytree as pytree

from eigengraft.blocking import is_transposed
from eigengraft.distributed.layouts import is_dtensor
from eigengraft.numerics import compute_dtype

from ..isolation import without_autocast
from ..optimizer import Optimizer
from .arguments import require_watchable
from .gradient_sums import GradientSums

CallRows = Callable[[Tensor], tuple[Tensor, int]]
"""The gradient in an output of a layer -> (the Gram of the rows of that call, what they add to N)."""
INPUT_GRAM, OUTPUT_GRAM = "activation_gram", "output_gradient_gram"
"""Names of the two signals."""
ParamPlace = tuple[int, int]
"""A parameter of an optimizer: its param group, and its position in that."""


class LayerGrams:
    """X^T X for every layer with a weight whose update asks for a signal, X `[N, n]` its rows.

    X has the rows of all calls whose backward the present gradient of the weight was accumulated in: of micro-batches,
    of several calls of a module in one forward, and of modules that share the weight. A forward whose backward does not
    run, or whose gradient is thrown away, adds none; a forward that activation checkpointing repeats adds its rows
    once. Collected is only where a stage takes the signal in the next step.

    The optimizer and the model keep this object alive, which keeps neither. Copies and pickles of the model do not
    collect: their hooks do nothing.

    name: of the signal. made: the signal of a layer, of X^T X and N. of_gradients: whether rows are in the unit of
    gradients; X^T X then is in the unit of the gradients that the step takes, also where they were scaled since the
    backward.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        name: str,
        made: Callable[[Tensor, int | Tensor], Tensor],
        of_gradients: bool = False,
    ) -> None:
        self.name, self._made, self._optimizer = name, made, weakref.ref(optimizer)
        self._sums = GradientSums(torch.add, measured=of_gradients)
        self._places: WeakKeyDictionary[nn.Module, ParamPlace] = WeakKeyDictionary()
        self._due: set[ParamPlace] | None = None
        self._handles: list[Any] = [optimizer.register_load_state_dict_post_hook(self._forget)]
        weakref.finalize(optimizer, _remove, self._handles)

    def watch(self, model: nn.Module, see: Callable[..., tuple[CallRows, Tensor | None]]) -> None:
        """Registers a hook at each layer whose update asks, and that no other object watches for this optimizer.

        see: of a layer's path, the layer, its arguments and what it returned: the rows of that call, and the tensor in
        whose gradient they are known.
        """
        optimizer = self._optimizer()
        assert optimizer is not None
        takers = optimizer.param_sets.signals.listeners.takers(self.name, optimizer.param_sets)
        known = {key: place for key, place in places(optimizer) if key in takers}
        for path, module in model.named_modules():
            if _multiplies(module) and id(module._parameters["weight"]) in known and not self._is_watched(module):
                self._places[module] = known[id(module._parameters["weight"])]
                self._handles.append(module.register_forward_hook(LayerHook(self, path, see)))

    def remove(self) -> None:
        """Removes the hooks; steps that need the signal are refused from now on."""
        _remove(self._handles)
        self._sums.clear()

    def _is_watched(self, module: nn.Module) -> bool:
        """Whether another object collects the same for the same optimizer."""
        found = (hook.grams for hook in module._forward_hooks.values() if isinstance(hook, LayerHook))
        return any(g is not None and g.name == self.name and g._optimizer() is self._optimizer() for g in found)

    def _forget(self, *_: Any) -> None:
        self._sums.clear()
        self._due = None

    def wants(self, module: nn.Module) -> bool:
        """Whether rows of a layer are to be collected now."""
        optimizer, weight = self._optimizer(), module._parameters.get("weight")
        if optimizer is None or weight is None or not (weight.requires_grad and torch.is_grad_enabled()):
            return False
        listeners = optimizer.param_sets.signals.listeners
        if listeners.paused or torch._C._functorch.peek_interpreter_stack() is not None:
            return False
        if self._due is None:
            due = listeners.next(self.name, optimizer.param_sets)
            self._due = {place for key, place in places(optimizer) if key in due}
        if (place := self._places.get(module)) not in self._due or place is None:
            return False
        parameter = parameter_at(optimizer, place)
        return weight is parameter or is_dtensor(parameter)  # else a weight that `functional_call` was given

    def add(self, module: nn.Module, rows: CallRows, output: Tensor) -> None:
        """Has the rows of one call added when the backward makes the gradient of its output.

        A hook of the tensor leaves the graph as it is, also where the next layer writes into the output.
        """
        output.register_hook(partial(self._add, self._places[module], rows))  # type: ignore[no-untyped-call]

    def _add(self, place: ParamPlace, rows: CallRows, gradient: Tensor) -> None:
        if (optimizer := self._optimizer()) is not None:
            self._sums.add(place, parameter_at(optimizer, place), *rows(gradient))

    def take(self) -> Mapping[Tensor, Tensor] | None:
        """The signal of the step, for each parameter whose layer had rows; what was collected is forgotten."""
        optimizer = self._optimizer()
        assert optimizer is not None
        factor, found = self._sums.factor(), self._sums.take()
        self._forget()
        rows = {place: own for place, own in found.items() if isinstance(own[1], Tensor) or own[1]}
        made = {parameter_at(optimizer, place): self._made(*own) for place, own in rows.items()}
        if factor is not None:
            square = factor.square()
            made = {parameter: x * square.to(x.device) for parameter, x in made.items()}
        return made or None


class LayerHook:
    """A forward hook of one layer, while its rows are wanted. Copies of it do nothing.

    path: of the layer, for errors. see: of path, layer, arguments and output, the rows of a call and the tensor in
    whose gradient they are known.
    """

    def __init__(self, grams: LayerGrams | None, path: str, see: Callable[..., tuple[CallRows, Tensor | None]]) -> None:
        self.grams, self.path, self._see = grams, path, see

    @_disable_dynamo  # what torch.compiler.disable does, without importing the compiler before a call
    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if self.grams is not None and self.grams.wants(module):
            rows, differentiable = self._see(self.path, module, args, output)
            if differentiable is not None:
                self.grams.add(module, rows, differentiable)

    def __reduce__(self) -> tuple[Any, ...]:
        return LayerHook, (None, self.path, self._see)


def gram_of(rows: Tensor) -> Tensor:
    """X^T X of rows `[k, n]`, in the dtype that they are computed in, also under autocast."""
    rows = rows.detach().to(compute_dtype(rows.dtype))
    with without_autocast():
        return rows.mT @ rows


def differentiable(output: Any) -> Tensor | None:
    """The first tensor in what a layer returned that has a gradient."""
    leaves = (output,) if isinstance(output, Tensor) else pytree.tree_leaves(output)
    return next((leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad), None)


def whole(x: Tensor) -> Tensor:
    """All of a tensor that ranks hold parts of, as layers under tensor parallelism are given it."""
    return x.full_tensor() if is_dtensor(x) else x


def places(optimizer: Optimizer) -> Iterator[tuple[int, ParamPlace]]:
    """(id, place) of the parameters that an optimizer was made for; a host may have put others in their places."""
    for index, parameters in enumerate(optimizer.param_sets.parameters):
        yield from ((id(parameter), (index, at)) for at, parameter in enumerate(parameters))


def parameter_at(optimizer: Optimizer, place: ParamPlace) -> Tensor:
    """The parameter that a param group holds now."""
    parameter: Tensor = optimizer.param_groups[place[0]]["params"][place[1]]
    return parameter


def _multiplies(module: nn.Module) -> bool:
    """Whether a layer multiplies inputs by its weight, as far as can be told."""
    weight = module._parameters.get("weight")
    if weight is None or isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        return False
    if isinstance(module, (nn.Conv1d, nn.Conv2d)):
        return module.groups == 1 and module.padding_mode == "zeros" and module.padding != "same"
    return weight.ndim == 2


def _remove(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()


def watch_inputs(optimizer: Optimizer, model: nn.Module) -> LayerGrams | None:
    """Provides `activation_gram` in every step that needs it, from the inputs of a model's layers; `compose` calls it.

    A = X^T X / N for every layer `y = W x`, X `[N, n]` the inputs whose outputs the gradient of the step was taken
    through: of matrices, of which x is the last axis of the first argument, and of 1-d and 2-d convolutions of one
    group, of which x are patches. Returns None, and no hook is there, if no stage asks. The model may be wrapped (DDP)
    or sharded before or after.
    """
    require_watchable("watch_inputs", optimizer, model)
    if INPUT_GRAM not in optimizer.param_sets.signals.listeners.asking:
        return None
    grams = LayerGrams(optimizer, INPUT_GRAM, lambda total, rows: total / rows)
    grams.watch(model, _see_inputs)
    optimizer.provide(INPUT_GRAM, grams.take)
    return grams


def _see_inputs(path: str, module: nn.Module, args: tuple[Any, ...], output: Any) -> tuple[CallRows, Tensor | None]:
    """The inputs of one call, kept until backward as a copy or as their Gram, whichever is smaller."""
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
        raise ValueError(f"{path}: inputs of length {n} as first argument are required by '{INPUT_GRAM}', got {got}")
    return x.reshape(-1, n)


def _patches(module: nn.Conv1d | nn.Conv2d, x: Tensor) -> Tensor:
    """What a kernel is multiplied by at every place, `[places, channels * kernel]`; one axis is a row of an image."""
    padding: Any = (0,) * len(module.kernel_size) if module.padding == "valid" else module.padding
    how = [module.kernel_size, module.dilation, padding, module.stride]
    if isinstance(module, nn.Conv1d):
        x, how = x.unsqueeze(-2), [(neutral, *given) for neutral, given in zip((1, 1, 0, 1), how, strict=True)]
    images = x if x.ndim == 4 else x.unsqueeze(0)
    return functional.unfold(images, *how).mT.flatten(0, 1)


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
    if OUTPUT_GRAM not in optimizer.param_sets.signals.listeners.asking:
        return None
    grams = LayerGrams(optimizer, OUTPUT_GRAM, lambda total, rows: total * rows, of_gradients=True)
    grams.watch(model, _see_outputs)
    optimizer.provide(OUTPUT_GRAM, grams.take)
    return grams


def _see_outputs(path: str, module: nn.Module, args: tuple[Any, ...], output: Any) -> tuple[CallRows, Tensor | None]:
    weight = module._parameters["weight"]
    assert weight is not None
    m, axis = int(weight.shape[1 if is_transposed(module) else 0]), _channels(module)
    if not isinstance(output, Tensor) or output.shape[axis] != m:
        got = f"shape {tuple(output.shape)}" if isinstance(output, Tensor) else type(output).__name__
        raise ValueError(
            f"{path}: an output of length {m} is required by '{OUTPUT_GRAM}', got {got}; under tensor parallelism say "
            "`use_local_output=False`, so that it is a DTensor"
        )
    return partial(_gradient_rows, axis), output if output.requires_grad else None


def _gradient_rows(axis: int, gradient: Tensor) -> tuple[Tensor, int]:
    gradient = whole(gradient.detach())
    rows = gradient.movedim(axis, -1).reshape(-1, gradient.shape[axis])
    images = len(gradient) if gradient.ndim + axis > 0 else 1
    return gram_of(rows), len(rows) if axis == -1 else images


def _channels(module: nn.Module) -> int:
    """The axis of an output that the rows of the weight belong to."""
    return -1 - len(module.kernel_size) if isinstance(module, (nn.Conv1d, nn.Conv2d)) else -1
