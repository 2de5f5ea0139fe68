"""The signal `activation_gram`: second moments of the inputs of layers, collected by forward-pre-hooks."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.nn import functional

from eigengraft.numerics import compute_dtype

from ..optimizer import Optimizer

_NAME = "activation_gram"


class InputGrams:
    """A = X^T X / N for every layer `y = W x` of a model, X `[N, n]` the inputs that it has had since the last step.

    Layers with a `weight` whose update asks for `activation_gram`: matrices, of which x is the last axis of the first
    argument, and 1-d and 2-d convolutions of one group, of which x are patches. Micro-batches, and several calls of a
    module in one forward, add rows to X; modules that share a weight share A. Collected are forwards with gradients,
    of layers that are trained, and only where a stage observes in the next step.

    The optimizer and the model keep this object alive, which keeps neither. Copies and pickles of the model do not
    collect: their hooks do nothing.
    """

    def __init__(self, optimizer: Optimizer, model: nn.Module) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._sums: WeakKeyDictionary[nn.Module, tuple[Tensor, int]] = WeakKeyDictionary()
        self._weights: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()
        self._due: set[int] | None = None
        takers = optimizer.param_sets.signals.listeners.takers(_NAME, optimizer.param_sets)
        self._handles: list[Any] = [optimizer.register_load_state_dict_post_hook(self._forget)]
        for path, module in model.named_modules():
            if _has_inputs(module) and id(module._parameters["weight"]) in takers and not self._is_watched(module):
                self._weights[module] = id(module._parameters["weight"])
                self._handles.append(module.register_forward_pre_hook(InputHook(self, path)))
        weakref.finalize(optimizer, _remove, self._handles)

    def remove(self) -> None:
        """Removes the hooks; steps that need the signal are refused from now on."""
        _remove(self._handles)
        self._sums.clear()

    def _is_watched(self, module: nn.Module) -> bool:
        """Whether another object collects for the same optimizer."""
        hooks = [hook for hook in module._forward_pre_hooks.values() if isinstance(hook, InputHook)]
        return any(hook.grams is not None and hook.grams._optimizer() is self._optimizer() for hook in hooks)

    def _forget(self, *_: Any) -> None:
        self._sums.clear()
        self._due = None

    def wants(self, module: nn.Module) -> bool:
        """Whether inputs of a layer are to be collected now."""
        optimizer, weight = self._optimizer(), module._parameters.get("weight")
        if optimizer is None or weight is None or not (weight.requires_grad and torch.is_grad_enabled()):
            return False
        listeners = optimizer.param_sets.signals.listeners
        if self._due is None:
            self._due = listeners.next(_NAME, optimizer.param_sets)
        return not listeners.paused and self._weights[module] in self._due

    def add(self, module: nn.Module, rows: Tensor) -> None:
        """Adds rows `[k, n]` to the inputs of a layer."""
        rows = rows.to(compute_dtype(rows.dtype))
        total, count = self._sums.get(module, (None, 0))
        made = rows.mT @ rows if total is None else torch.addmm(total, rows.mT, rows)
        self._sums[module] = (made, count + len(rows))

    def take(self) -> Mapping[Tensor, Tensor] | None:
        """The signal of the step: A for each parameter whose layer had inputs; what was collected is forgotten."""
        optimizer, totals = self._optimizer(), dict[int, tuple[Tensor, Tensor, int]]()
        assert optimizer is not None
        known = {id(parameter) for parameters in optimizer.param_sets.parameters for parameter in parameters}
        for module, (total, count) in self._sums.items():
            weight = module._parameters.get("weight")  # sharded again after the backward, whatever the forward saw
            if weight is None or id(weight) not in known:
                continue
            self._weights[module] = id(weight)
            _, before, rows = totals.get(id(weight), (weight, None, 0))
            totals[id(weight)] = (weight, total if before is None else before + total, rows + count)
        self._forget()
        return {weight: total / rows for weight, total, rows in totals.values() if rows} or None


class InputHook:
    """A forward-pre-hook that hands the inputs of one layer over; path: of the layer, for errors."""

    def __init__(self, grams: InputGrams | None, path: str) -> None:
        self.grams, self.path = grams, path

    @_disable_dynamo  # what torch.compiler.disable does, without importing the compiler before a call
    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if self.grams is not None and self.grams.wants(module):
            with torch.no_grad(), torch.autocast(args[0].device.type if args else "cpu", enabled=False):
                self.grams.add(module, self._rows(module, args))

    def _rows(self, module: nn.Module, args: tuple[Any, ...]) -> Tensor:
        x = args[0].detach() if args and isinstance(args[0], Tensor) else None
        if isinstance(module, (nn.Conv1d, nn.Conv2d)) and x is not None:
            return _patches(module, x)
        n = inputs_of(module)
        if x is None or x.shape[-1] != n:
            got = "no tensor" if x is None else f"shape {tuple(x.shape)}"
            raise ValueError(
                f"{self.path}: inputs of length {n} as first argument are required by '{_NAME}', got {got}"
            )
        return x.reshape(-1, n)

    def __reduce__(self) -> tuple[Any, ...]:
        return InputHook, (None, self.path)


def inputs_of(module: nn.Module) -> int:
    """The number of inputs of a layer; of Hugging Face's Conv1D, which stores `[in, out]`, the first axis."""
    weight = module._parameters["weight"]
    assert weight is not None
    return int(weight.shape[0 if type(module).__name__ == "Conv1D" else 1])


def watch_inputs(optimizer: Optimizer, model: nn.Module) -> InputGrams | None:
    """Provides `activation_gram` in every step that needs it, from the inputs of a model's layers; `compose` calls it.

    Returns None, and no hook is there, if no stage asks. The model may be wrapped (DDP) or sharded before or after.
    """
    if _NAME not in optimizer.param_sets.signals.listeners.asking:
        return None
    grams = InputGrams(optimizer, model)
    optimizer.provide(_NAME, grams.take)
    return grams


def _has_inputs(module: nn.Module) -> bool:
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


def _patches(module: nn.Conv1d | nn.Conv2d, x: Tensor) -> Tensor:
    """What a kernel is multiplied by at every place, `[places, channels * kernel]`; one axis is a row of an image."""
    padding: Any = (0,) * len(module.kernel_size) if module.padding == "valid" else module.padding
    how = [module.kernel_size, module.dilation, padding, module.stride]
    if isinstance(module, nn.Conv1d):
        x, how = x.unsqueeze(-2), [(neutral, *given) for neutral, given in zip((1, 1, 0, 1), how, strict=True)]
    images = x if x.ndim == 4 else x.unsqueeze(0)
    return functional.unfold(images, *how).mT.flatten(0, 1)
