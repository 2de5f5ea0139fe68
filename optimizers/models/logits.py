"""The signal `max_logit`: the largest attention logit of each head, recorded by attention modules that ask for it."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo

from ..engine.signals import Given
from ..optimizer import Optimizer
from .arguments import require_watchable

_NAME = "max_logit"


class MaxLogits(nn.Module):
    """S_h = scale max_(i, j) q_i . k_j for each head h, over all calls since the last step.

    A part of an attention module that its forward calls with queries and keys, `self.max_logits(q, k, scale)`; it
    returns nothing and costs nothing unless an optimizer takes the signal. Names are those of weights in the module
    that holds it, whose outputs are heads: `query` and `key`, or `fused` for queries, keys and values one after the
    other. A key head that several query heads share has the largest of theirs.

    query, key: the weights of queries and keys.
    fused: the weight of queries, keys and values.
    causal: whether queries see no later key.
    """

    largest: Tensor | None

    def __init__(
        self, query: str | None = None, key: str | None = None, *, fused: str | None = None, causal: bool = False
    ) -> None:
        super().__init__()
        if (query is None) is not (key is None) or (query is None) is (fused is None):
            raise ValueError(f"MaxLogits: query and key, or fused, is required, got {query}, {key} and {fused}")
        self.query, self.key, self.fused, self.causal = query, key, fused, causal
        self._listener: weakref.ref[Optimizer] | None = None
        self._key_heads, self.largest = 0, None

    @_disable_dynamo  # what torch.compiler.disable does, without importing the compiler before a call
    def forward(self, q: Tensor, k: Tensor, scale: float | None = None) -> None:
        """q `[batch, H, T, d]`, k `[batch, H_k, S, d]`, H a multiple of H_k; scale: default d^(-1/2)."""
        optimizer = None if self._listener is None else self._listener()
        if optimizer is None or optimizer.param_sets.signals.listeners.paused or not torch.is_grad_enabled():
            return
        with torch.no_grad():
            found = self._found(q.detach(), k.detach()) * (q.shape[-1] ** -0.5 if scale is None else scale)
        self._key_heads = k.shape[1]
        self.largest = found if self.largest is None else torch.maximum(self.largest, found)

    def _found(self, q: Tensor, k: Tensor) -> Tensor:
        """The largest products `[H]`; one sequence after another, so that few products are held at once."""
        k, found = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1), []
        for queries, keys in zip(q.float(), k.float(), strict=True):
            products = queries @ keys.mT  # [H, T, S]
            if self.causal:
                later = torch.ones(products.shape[1:], dtype=torch.bool, device=q.device).triu(1)
                products = products.masked_fill(later, -torch.inf)
            found.append(products.amax((1, 2)))
        return torch.stack(found).amax(0)

    def listen(self, optimizer: Optimizer) -> None:
        """Records from now on, for this optimizer."""
        self._listener = weakref.ref(optimizer)

    def take(self) -> Mapping[str, Tensor]:
        """The signal of the step by name of the weight, which is forgotten; none if nothing was recorded."""
        largest, self.largest = self.largest, None
        if largest is None:
            return {}
        largest = largest.clamp_min(0)
        keys = largest.view(self._key_heads, -1).amax(1)
        if self.fused is not None:
            return {self.fused: torch.cat([largest, keys, torch.zeros_like(keys)])}
        return {str(self.query): largest, str(self.key): keys}

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_listener": None, "largest": None}  # copies record for nobody


def watch_logits(optimizer: Optimizer, model: nn.Module) -> None:
    """Provides `max_logit` in every step from the `MaxLogits` in a model; `compose` calls it.

    Nothing is recorded if no constraint asks. The model may be wrapped (DDP) or sharded before or after.
    """
    require_watchable("watch_logits", optimizer, model)
    if _NAME in optimizer.param_sets.signals.listeners.asking:
        optimizer.provide(_NAME, LogitSource(optimizer, model))


class LogitSource:
    """What the `MaxLogits` of a model have recorded, by parameter of an optimizer; it keeps neither alive."""

    def __init__(self, optimizer: Optimizer, model: nn.Module) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._holders = weakref.WeakSet(module for module in model.modules() if list(_recorders(module)))
        for module in self._holders:
            for recorder in _recorders(module):
                recorder.listen(optimizer)

    def __call__(self) -> Given | None:
        optimizer, found = self._optimizer(), dict[Tensor, float | Tensor]()
        assert optimizer is not None
        known = {id(parameter) for parameters in optimizer.param_sets.parameters for parameter in parameters}
        for module in self._holders:
            for name, value in (pair for recorder in _recorders(module) for pair in recorder.take().items()):
                parameter = module.get_parameter(name)
                if id(parameter) in known:
                    before = found.get(parameter)
                    found[parameter] = value if before is None else torch.maximum(torch.as_tensor(before), value)
        return found or None


def _recorders(module: nn.Module) -> Iterator[MaxLogits]:
    return (part for part in module.children() if isinstance(part, MaxLogits))
