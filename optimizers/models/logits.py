"""The signal `max_logit`: the largest attention logit of each head, recorded by `MaxLogits` in attention modules."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._compile import _disable_dynamo

from eigengraft.blocking.blocks import Box
from eigengraft.distributed.layouts import Layout, whole_box
from eigengraft.numerics import is_dtensor, local

from ..isolation import without_autocast
from ..optimizer import Optimizer
from .arguments import require_watchable
from .gradient_sums import GradientSums, ParamPlace
from .layer_grams import differentiable

if TYPE_CHECKING:  # this import takes as long as that of all of this library
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.placement_types import Placement

_NAME = "max_logit"


class MaxLogits(nn.Module):
    """S_h = scale max_(i, j) q_i . k_j for each head h, over all calls that contribute to the gradient of a step.

    q_i and k_j are the query at position i and the key at position j. An attention module has this module as a
    submodule, and calls `self.max_logits(q, k, scale)` in its forward. The call returns None, and costs nothing unless
    an optimizer requests the signal. A key head that several query heads share receives the largest S of these query
    heads.

    Under tensor parallelism a rank makes the call with its own heads, as plain tensors or DTensors. The heads must be
    the outputs of the rank's shards of the weights. A shard of `fused` has the rank's queries, keys and values in this
    order. If keys are not sharded, because there are fewer key heads than ranks, a rank passes the keys of its own
    queries. Under context parallelism, keys must be gathered before the call.

    Args:
        query: name of the weight of queries in the attention module.
        key: name of the weight of keys.
        fused: name of a weight whose outputs are queries, keys and values in this order, in place of `query` and `key`.
        causal: True if a query attends to no later key.

    Raises:
        ValueError: the weights are not given by `query` and `key` together, or by `fused` in place of both.
    """

    def __init__(
        self, query: str | None = None, key: str | None = None, *, fused: str | None = None, causal: bool = False
    ) -> None:
        super().__init__()
        if (query is None) is not (key is None) or (query is None) is (fused is None):
            raise ValueError(
                f"MaxLogits: give either the names query and key, or the name fused; got query={query}, key={key}, "
                f"fused={fused}"
            )
        self.query, self.key, self.fused, self.causal = query, key, fused, causal
        self._source: weakref.ref[LogitSource] | None = None
        self._holder: weakref.ref[nn.Module] | None = None
        self._seen: _Seen | None = None

    @_disable_dynamo  # equals torch.compiler.disable, but does not import the compiler before the first call
    def forward(self, q: Tensor, k: Tensor, scale: float | None = None) -> None:
        """Record the largest logits of one call.

        Args:
            q: queries `[batch, H, T, d]`.
            k: keys `[batch, H_k, S, d]`. H is a multiple of H_k.
            scale: factor of the products; None means d^(-1/2).
        """
        source, trained = None if self._source is None else self._source(), differentiable((q, k))
        if source is None or trained is None or not source.records:
            return
        holder = None if self._holder is None else self._holder()
        assert holder is not None
        # in a forward `fully_shard` has gathered the weights; a weight that is still sharded has tensor parallelism
        shards = {name: _shard(holder.get_parameter(name)) for name in self.weights}
        queries, keys = local(q.detach()), local(k.detach())
        with torch.no_grad(), without_autocast():
            found = self._found(queries, keys) * (q.shape[-1] ** -0.5 if scale is None else scale)
        heads = _heads(q, k) if is_dtensor(q) or is_dtensor(k) else None
        self._seen = _Seen(q.shape[-1], keys.shape[1], heads, shards)
        trained.register_hook(partial(source.add_call, self, found))  # type: ignore[no-untyped-call]

    def _found(self, q: Tensor, k: Tensor) -> Tensor:
        """Return the largest product q_i . k_j of each query head of this rank, `[H]`, over the batch and all i and j.

        With `causal`, j is at most i. Sequences are processed one by one to save memory.
        """
        k, found = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1), []
        for queries, keys in zip(q.float(), k.float(), strict=True):
            products = queries @ keys.mT  # [H, T, S]
            if self.causal:
                later = torch.ones(products.shape[1:], dtype=torch.bool, device=q.device).triu(1)
                products = products.masked_fill(later, -torch.inf)
            found.append(products.amax((1, 2)))
        return torch.stack(found).amax(0)

    @property
    def weights(self) -> tuple[str, ...]:
        """Return the names of the projection weights in the attention module: `fused` alone, or `query` and `key`."""
        return (self.fused,) if self.fused is not None else (str(self.query), str(self.key))

    def signal(self, largest: Tensor, axis_of: Callable[[str], int]) -> Mapping[str, Tensor]:
        """Return the signal of each weight by its name: a tensor with a number for each head of the full weight.

        The number of a head is S, or 0 if S is negative. It is 0 for heads of other ranks, and for the heads of values
        in `fused`.

        largest: S `[H]` of this rank's query heads.
        axis_of: function that returns, for the name of a weight, the axis of the weight along which its outputs are.

        Raises:
            ValueError: the sharding does not determine which outputs of a weight form this rank's heads.
        """
        seen = self._seen
        assert seen is not None
        largest = largest.clamp_min(0)
        keys = largest.view(seen.key_heads, -1).amax(1)
        if self.fused is not None:
            outputs = torch.cat([largest, keys, torch.zeros_like(keys)])
            own = seen.outputs(self.fused, axis_of(self.fused))
            if seen.has_all(len(outputs), own):
                return {self.fused: outputs}
            return {self.fused: own.place(outputs, self.fused)}
        query, key = str(self.query), str(self.key)
        own = seen.outputs(query, axis_of(query))
        if seen.has_all(len(largest), own):
            return {query: largest, key: keys}
        largest = (own if seen.heads is None else seen.heads[0]).place(largest, query)
        total = seen.all_key_heads(seen.outputs(key, axis_of(key)))
        if not total or len(largest) % total:
            raise ValueError(
                f"MaxLogits: '{key}': the number of query heads, {len(largest)}, must be a multiple of the number of "
                f"key heads, {total}"
            )
        return {query: largest, key: largest.view(total, -1).amax(1)}

    def __getstate__(self) -> dict[str, object]:
        # a copy of the module records nothing
        return {**self.__dict__, "_source": None, "_holder": None, "_seen": None}


@dataclass(frozen=True)
class _Span:
    """A rank's range of items, which are either heads or outputs of a weight.

    start: index of the first item of the rank.
    length: number of items of the rank.
    full: number of items of all ranks together.
    """

    start: int
    length: int
    full: int

    def place(self, numbers: Tensor, name: str) -> Tensor:
        """Return one number for each head of all ranks: the given numbers for heads of this rank, 0 for other heads.

        The range of this rank (`start`, `length`) counts heads, or outputs of a weight. Every head has the same number
        d of outputs, so the first head of this rank has the index `start` / d. For a range of heads d is 1.

        numbers: one number for each head of this rank.
        name: name of the weight, for the message.

        Raises:
            ValueError: the range begins or ends inside a head. Or the range of this rank has the items of all ranks, so
                that it does not show which heads the numbers belong to.
        """
        each, rest = divmod(self.length, max(len(numbers), 1))
        if self.length == self.full or not each or rest or self.start % each or self.full % each:
            raise ValueError(
                f"MaxLogits: '{name}': a rank must hold exactly the outputs of its heads, got {len(numbers)} heads "
                f"and outputs {self.start} to {self.start + self.length} of {self.full}; shard the weight along its "
                "outputs over a number of ranks that divides its heads, or pass all heads on every rank"
            )
        found = numbers.new_zeros(self.full // each)
        found[self.start // each : self.start // each + len(numbers)] = numbers
        return found


@dataclass(frozen=True)
class _Seen:
    """The heads in the last call of a `MaxLogits`, and the shards of the weights at that time.

    width: number of entries of a head.
    key_heads: number of key heads on this rank.
    heads: this rank's ranges of query heads and of key heads, if queries and keys are DTensors; None if queries and
        keys are plain tensors.
    shards: (shape of the weight, indices of this rank's shard) by name of the weight.
    """

    width: int
    key_heads: int
    heads: tuple[_Span, _Span] | None
    shards: Mapping[str, tuple[tuple[int, ...], Box]]

    def outputs(self, name: str, axis: int) -> _Span:
        """Return the range of a weight's outputs that this rank's shard has.

        name: name of the weight.
        axis: axis of the weight that contains its outputs.
        """
        shape, box = self.shards[name]
        return _Span(box.start[axis], box.shape[axis], shape[axis])

    def has_all(self, heads: int, own: _Span) -> bool:
        """Return True if this rank called `MaxLogits` with the heads of all ranks.

        This is so if the weight is not sharded, or if its outputs were gathered before the call.

        heads: number of heads with which this rank called `MaxLogits`.
        own: the outputs that are in this rank's shard of the weight.
        """
        if self.heads is not None:
            return self.heads[0].length == self.heads[0].full
        return own.length == own.full or heads * self.width == own.full

    def all_key_heads(self, own: _Span) -> int:
        """Return the number of key heads of all ranks together, computed from DTensors or else from the weight of keys.

        own: the outputs that are in this rank's shard of the weight of keys.
        """
        if self.heads is not None:
            return self.heads[1].full
        if own.length == own.full:
            return own.full // self.width  # `self.key_heads` may count only the heads that this rank's queries use
        return self.key_heads * own.full // max(own.length, 1)


def _shard(weight: Tensor) -> tuple[tuple[int, ...], Box]:
    """Return the shape of a full weight, and the part of it that this rank holds under tensor parallelism.

    The part is a `Box`, a range of indices along each axis. The sharding of `fully_shard` is ignored, because a forward
    uses gathered weights.
    """
    shape = tuple(weight.shape)
    if not is_dtensor(weight):
        return shape, whole_box(shape)
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.placement_types import _StridedShard

    placements = tuple(Replicate() if isinstance(p, _StridedShard) else p for p in weight.placements)
    return shape, _box(shape, weight.device_mesh, placements)


def _heads(q: Tensor, k: Tensor) -> tuple[_Span, _Span]:
    """Return this rank's spans of query heads and key heads.

    Raises:
        ValueError: queries and keys are not both DTensors, have different placements, or are sharded along another axis
            than the batch or the heads.
    """
    if not (is_dtensor(q) and is_dtensor(k) and q.placements == k.placements) or not all(
        placement.is_replicate() or placement.is_shard(0) or placement.is_shard(1) for placement in q.placements
    ):
        found = [getattr(x, "placements", "a plain tensor") for x in (q, k)]
        raise ValueError(f"MaxLogits: q and k must be sharded alike, along the batch or the heads, got {found}")
    boxes = [_box(tuple(x.shape), x.device_mesh, tuple(x.placements)) for x in (q, k)]
    queries, keys = (_Span(box.start[1], box.shape[1], x.shape[1]) for box, x in zip(boxes, (q, k), strict=True))
    return queries, keys


def _box(shape: tuple[int, ...], mesh: DeviceMesh, placements: tuple[Placement, ...]) -> Box:
    """Return the entries of a sharded tensor that this rank holds, as ranges of indices along its axes.

    shape: shape of the full tensor.
    mesh: mesh of the tensor.
    placements: placement of the tensor on each axis of the mesh.
    """
    ranks = mesh.mesh.flatten().tolist()
    return Layout.from_placements(shape, tuple(mesh.mesh.shape), placements).boxes[ranks.index(dist.get_rank())]


def watch_logits(optimizer: Optimizer, model: nn.Module) -> None:
    """Provide the signal `max_logit` from the `MaxLogits` in a model. `compose` calls this function.

    Nothing is recorded if no constraint requests the signal. A model without `MaxLogits` does not provide it.

    Args:
        optimizer: the optimizer that receives the signal.
        model: the model, which may be wrapped (DDP) or sharded before or after this call.
    """
    require_watchable("watch_logits", optimizer, model)
    recorded = any(isinstance(module, MaxLogits) for module in model.modules())
    if recorded and _NAME in optimizer.param_sets.signals.asking:
        LogitSource(optimizer, model)


class LogitSource(GradientSums):
    """The signal `max_logit`, collected from all `MaxLogits` of a model. The model is referenced weakly."""

    def __init__(self, optimizer: Optimizer, model: nn.Module) -> None:
        super().__init__(optimizer, _NAME, torch.maximum)
        self._weights: weakref.WeakKeyDictionary[MaxLogits, dict[str, ParamPlace]] = weakref.WeakKeyDictionary()
        known = dict(self.places())
        for module in model.modules():
            for recorder in (part for part in module.children() if isinstance(part, MaxLogits)):
                weights = {name: id(module.get_parameter(name)) for name in recorder.weights}
                self._weights[recorder] = {name: known[own] for name, own in weights.items() if own in known}
                recorder._source, recorder._holder = weakref.ref(self), weakref.ref(module)

    def add_call(self, recorder: MaxLogits, largest: Tensor, gradient: Tensor) -> None:
        """Join the largest logits of one call with those of earlier calls.

        The method is a hook of the call's queries or keys. Backward calls it with their gradient, which is not used.
        """
        if self._optimizer() is not None:
            parameters = map(self.parameter, self._weights[recorder].values())
            for parameter in [parameter for parameter in parameters if parameter.requires_grad][:1]:
                self.add(recorder, parameter, largest)

    def signal(self) -> Mapping[Tensor, Tensor] | None:
        found = dict[Tensor, Tensor]()
        specs = {
            id(parameter): spec
            for param_set in self.optimizer.param_sets
            for parameter, spec in zip(param_set.parameters, param_set.specs, strict=True)
        }
        for recorder, (largest, _) in self.take().items():
            held = {name: self.parameter(place) for name, place in self._weights[recorder].items()}

            def axis_of(name: str, held: Mapping[str, Tensor] = held) -> int:
                spec = specs.get(id(held.get(name)))
                return 0 if spec is None else spec.matrices.matrix_axes(spec.shape)[0]

            for name, value in recorder.signal(largest, axis_of).items():
                if (parameter := held.get(name)) is not None:
                    before = found.get(parameter)
                    found[parameter] = value if before is None else torch.maximum(before, value)
        return found or None
