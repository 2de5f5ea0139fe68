"""Sums of outer products that hooks collect from the layers of a model, for the next step of its optimizer."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo

from eigengraft.distributed.layouts import is_dtensor
from eigengraft.numerics import compute_dtype

from ..optimizer import Optimizer


class LayerGrams:
    """X^T X for every layer with a weight whose update asks for a signal, X `[N, n]` its rows since the last step.

    Micro-batches, and several calls of a module in one forward, add rows to X; modules that share a weight share X.
    Collected are forwards with gradients, of layers that are trained, and only where a stage takes the signal in the
    next step.

    The optimizer and the model keep this object alive, which keeps neither. Copies and pickles of the model do not
    collect: their hooks do nothing.

    name: of the signal. made: the signal of a layer, of X^T X and N.
    """

    def __init__(self, optimizer: Optimizer, name: str, made: Callable[[Tensor, int], Tensor]) -> None:
        self.name, self._made, self._optimizer = name, made, weakref.ref(optimizer)
        self._sums: WeakKeyDictionary[nn.Module, tuple[Tensor, int]] = WeakKeyDictionary()
        self._weights: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()
        self._due: set[int] | None = None
        self._handles: list[Any] = [optimizer.register_load_state_dict_post_hook(self._forget)]
        weakref.finalize(optimizer, _remove, self._handles)

    def watch(self, model: nn.Module, register: Callable[[nn.Module, str], Any]) -> None:
        """Registers a hook at each layer whose update asks, and that no other object watches for this optimizer.

        register: given a layer and its path, returns the handle of its hook.
        """
        optimizer = self._optimizer()
        assert optimizer is not None
        takers = optimizer.param_sets.signals.listeners.takers(self.name, optimizer.param_sets)
        for path, module in model.named_modules():
            if _multiplies(module) and id(module._parameters["weight"]) in takers and not self._is_watched(module):
                self._weights[module] = id(module._parameters["weight"])
                self._handles.append(register(module, path))

    def remove(self) -> None:
        """Removes the hooks; steps that need the signal are refused from now on."""
        _remove(self._handles)
        self._sums.clear()

    def _is_watched(self, module: nn.Module) -> bool:
        """Whether another object collects the same for the same optimizer."""
        found = (hook.grams for hook in _hooks(module) if isinstance(hook, LayerHook))
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
        if self._due is None:
            self._due = listeners.next(self.name, optimizer.param_sets)
        return not listeners.paused and self._weights[module] in self._due

    def add(self, module: nn.Module, rows: Tensor, count: int) -> None:
        """Adds rows `[k, n]` to those of a layer; count: what they add to N."""
        with torch.no_grad(), torch.autocast(rows.device.type, enabled=False):
            rows = rows.to(compute_dtype(rows.dtype))
            total, before = self._sums.get(module, (None, 0))
            made = rows.mT @ rows if total is None else torch.addmm(total, rows.mT, rows)
            self._sums[module] = (made, before + count)

    def take(self) -> Mapping[Tensor, Tensor] | None:
        """The signal of the step, for each parameter whose layer had rows; what was collected is forgotten."""
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
        return {weight: self._made(total, rows) for weight, total, rows in totals.values() if rows} or None


class LayerHook:
    """A forward or forward-pre hook of one layer, while its rows are wanted. Copies of it do nothing.

    path: of the layer, for errors. see: collects, given the object that collects, the path, the layer, and what the
    hook is given.
    """

    def __init__(self, grams: LayerGrams | None, path: str, see: Callable[..., None]) -> None:
        self.grams, self.path, self._see = grams, path, see

    @_disable_dynamo  # what torch.compiler.disable does, without importing the compiler before a call
    def __call__(self, module: nn.Module, *given: Any) -> None:
        if self.grams is not None and self.grams.wants(module):
            self._see(self.grams, self.path, module, *given)

    def __reduce__(self) -> tuple[Any, ...]:
        return LayerHook, (None, self.path, self._see)


def whole(x: Tensor) -> Tensor:
    """All of a tensor that ranks hold parts of, as layers under tensor parallelism are given it."""
    return x.full_tensor() if is_dtensor(x) else x


def is_transposed(module: nn.Module) -> bool:
    """Whether a layer stores its weight as `[in, out]`, as Hugging Face's Conv1D does."""
    return type(module).__name__ == "Conv1D"


def _hooks(module: nn.Module) -> Iterator[Any]:
    yield from module._forward_pre_hooks.values()
    yield from module._forward_hooks.values()


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
