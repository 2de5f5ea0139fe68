"""The signal `max_logit`: the largest attention logit of each head, recorded by attention modules that ask for it."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo

from ..engine.signals import Given
from ..optimizer import Optimizer
from .arguments import require_watchable
from .gradient_sums import GradientSums
from .layer_grams import ParamPlace, differentiable, parameter_at, places

_NAME = "max_logit"


class MaxLogits(nn.Module):
    """S_h = scale max_(i, j) q_i . k_j for each head h, over all calls that the gradient of a step was taken through.

    A part of an attention module that its forward calls with queries and keys, `self.max_logits(q, k, scale)`; it
    returns nothing and costs nothing unless an optimizer takes the signal. Names are those of weights in the module
    that holds it, whose outputs are heads: `query` and `key`, or `fused` for queries, keys and values one after the
    other. A key head that several query heads share has the largest of theirs.

    query, key: the weights of queries and keys.
    fused: the weight of queries, keys and values.
    causal: whether queries see no later key.
    """

    def __init__(
        self, query: str | None = None, key: str | None = None, *, fused: str | None = None, causal: bool = False
    ) -> None:
        super().__init__()
        if (query is None) is not (key is None) or (query is None) is (fused is None):
            raise ValueError(f"MaxLogits: query and key, or fused, is required, got {query}, {key} and {fused}")
        self.query, self.key, self.fused, self.causal = query, key, fused, causal
        self._source: weakref.ref[LogitSource] | None = None
        self._key_heads = 0

    @_disable_dynamo  # what torch.compiler.disable does, without importing the compiler before a call
    def forward(self, q: Tensor, k: Tensor, scale: float | None = None) -> None:
        """q `[batch, H, T, d]`, k `[batch, H_k, S, d]`, H a multiple of H_k; scale: default d^(-1/2)."""
        source, trained = None if self._source is None else self._source(), differentiable((q, k))
        if source is None or trained is None or not source.wants():
            return
        with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
            found = self._found(q.detach(), k.detach()) * (q.shape[-1] ** -0.5 if scale is None else scale)
        self._key_heads = k.shape[1]
        trained.register_hook(partial(source.add, self, found))  # type: ignore[no-untyped-call]

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

    def listen(self, source: LogitSource) -> None:
        """Records from now on, for this source."""
        self._source = weakref.ref(source)

    @property
    def weights(self) -> tuple[str, ...]:
        """Names of the weights, in the module that holds this one."""
        return (self.fused,) if self.fused is not None else (str(self.query), str(self.key))

    def signal(self, largest: Tensor) -> Sequence[Tensor]:
        """The signal of each weight, of S `[H]`."""
        largest = largest.clamp_min(0)
        keys = largest.view(self._key_heads, -1).amax(1)
        return [torch.cat([largest, keys, torch.zeros_like(keys)])] if self.fused is not None else [largest, keys]

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_source": None}  # copies record for nobody


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
        self._optimizer, self._sums = weakref.ref(optimizer), GradientSums(torch.maximum)
        optimizer.register_load_state_dict_post_hook(self._forget)
        self._places: weakref.WeakKeyDictionary[MaxLogits, list[ParamPlace | None]] = weakref.WeakKeyDictionary()
        known = dict(places(optimizer))
        for module in model.modules():
            for recorder in (part for part in module.children() if isinstance(part, MaxLogits)):
                weights = [module.get_parameter(name) for name in recorder.weights]
                self._places[recorder] = [known.get(id(weight)) for weight in weights]
                recorder.listen(self)

    def wants(self) -> bool:
        """Whether calls are to be recorded now."""
        optimizer = self._optimizer()
        if optimizer is None or optimizer.param_sets.signals.listeners.paused or not torch.is_grad_enabled():
            return False
        return torch._C._functorch.peek_interpreter_stack() is None

    def add(self, recorder: MaxLogits, largest: Tensor, gradient: Tensor) -> None:
        """Joins the S of one call with those of others whose backward the same gradients are accumulated in."""
        if (optimizer := self._optimizer()) is not None:
            parameters = [parameter_at(optimizer, place) for place in self._places[recorder] if place is not None]
            for parameter in [parameter for parameter in parameters if parameter.requires_grad][:1]:
                self._sums.add(recorder, parameter, largest)

    def __call__(self) -> Given | None:
        optimizer, found = self._optimizer(), dict[Tensor, float | Tensor]()
        assert optimizer is not None
        for recorder, (largest, _) in self._sums.take().items():
            for place, value in zip(self._places[recorder], recorder.signal(largest), strict=True):
                if place is not None:
                    parameter = parameter_at(optimizer, place)
                    before = found.get(parameter)
                    found[parameter] = value if before is None else torch.maximum(torch.as_tensor(before), value)
        return found or None

    def _forget(self, *_: object) -> None:
        self._sums.clear()
