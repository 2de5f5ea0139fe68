"""Sums of outer products that hooks collect from the layers of a model, for the next step of its optimizer."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.utils import _pytree as pytree

from eigengraft.distributed.layouts import is_dtensor
from eigengraft.numerics import compute_dtype

from ..isolation import without_autocast
from ..optimizer import Optimizer
from .gradient_sums import GradientSums

CallRows = Callable[[Tensor], tuple[Tensor, int]]
"""The gradient in an output of a layer -> (the Gram of the rows of that call, what they add to N)."""
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
