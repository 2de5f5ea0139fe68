"""State: what a component declares (`Slot`) and how it reaches it (`State`).

A component declares slots and never allocates. The optimizer allocates each slot once for a whole stack, as `[N,
*shape]`, and hands every stage a `State`: `state[name]` loads, `state[name] = value` writes back. Between the two a
component may work in place. What lies behind (all rows, a slice that is due for a refresh, the rows that have a
gradient, a mask of the rows whose gradient is finite) is the same code for the component.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Literal, Protocol, Self

import torch
from torch import Tensor

from . import noise
from .errors import ContractError
from .numerics import copy_blocks, per_block
from .state_key import StateKey

Role = Literal["statistic", "root", "basis", "first_moment", "second_moment", "iterate", "count", "failures"]
Frame = Literal["vector", "square", "row", "column", "none"]


@dataclass(frozen=True)
class Slot:
    """One named state tensor of a stage.

    shape: shape per block, without the stack axis.
    fill: initial value, or "identity" for a matrix (its first columns if it is tall).
    role: what the slot is for; storage is chosen by it. "failures" counts how often in a row a block's root or basis
        could not be computed: an int32 of shape (), which the optimizer reads after refreshes.
    frame: how the slot follows a change of basis R = Q_old^T Q_new of the frame it lives in. "vector": rotated;
        "square": transported by the Hadamard square, v <- (R*R)^T v on each axis; "row" and "column": squares without
        the last and without the last but one axis; "none": unchanged.
    dtype: dtype of the slot; default: the dtype that the block is computed in.
    axes: axes of the block that a "vector" or "square" slot has, in order; default: all of them. Of a matrix without a
        frame: the axis that it is a factor of, by which a basis and the statistic that it was made of are paired.
    scale: factor of the initial identity.
    sensitive: whether the size of every update depends on the slot, so that no storage takes it by its role.
    decay: b, if the slot is the running mean or sum of squared gradients of its frame, b^k the weight of the k-th last;
        None: it is something else.
    total: whether stages read the slot's sum over all blocks of all parameters as the step began, `context.total`.
    step_size: whether the stage multiplies its direction by the slot, of shape (), as by a learning rate of its own:
        weight decay beside the update is multiplied by it too.
    """

    shape: tuple[int, ...]
    fill: float | Literal["identity"] = 0.0
    role: Role = "second_moment"
    frame: Frame = "none"
    dtype: torch.dtype | None = None
    axes: tuple[int, ...] | None = None
    scale: float = 1.0
    sensitive: bool = False
    decay: float | None = None
    total: bool = False
    step_size: bool = False

    def allocate(self, blocks: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The slot of a fresh stack, `[blocks, *shape]`, in its own dtype or else `dtype`."""
        dtype = self.dtype or dtype
        if self.fill == "identity":
            eye = torch.eye(*self.shape, dtype=dtype, device=device).mul_(self.scale)
            return eye.expand(blocks, *self.shape).contiguous()
        return torch.full((blocks, *self.shape), self.fill, dtype=dtype, device=device)


Encoded = Mapping[str, Tensor]
"""The plain tensors `[N, ...]` that are kept of a coded slot, by name."""
Uniform = Callable[[Tensor, str], Tensor]
"""(like `[N, ...]`, purpose) -> numbers in [0, 1) of its shape and dtype, for stochastic rounding."""


class Codec(Protocol):
    """A way to store a slot as other tensors; see `eigengraft.quantization`."""

    def encode(self, x: Tensor, before: Encoded | None = None, uniform: Uniform | None = None) -> Encoded:
        """`[N, *shape]` -> tensors `[N, ...]` by name; before: the tensors that they replace."""

    def decode(self, encoded: Encoded, slot: Slot, dtype: torch.dtype) -> Tensor:
        """The slot `[N, *shape]` that the tensors stand for."""


@dataclass(frozen=True)
class EncodedSlot:
    """A slot that a codec stores in the tensors "<key>/<name>"; dtype: to compute in."""

    slot: Slot
    codec: Codec
    names: tuple[str, ...]
    dtype: torch.dtype


class Watch(Protocol):
    """What follows a stage's use of its state in checked mode; see `eigengraft.preconditioners.checked_mode`."""

    def loaded(self, key: str, value: Tensor) -> None:
        """A slot was loaded; key: "<stage path>/<slot>"."""

    def storing(self, key: str, value: object, rows: int, dtype: torch.dtype) -> None:
        """A slot of so many rows, loaded in that dtype, is about to be written back. Raises for what does not fit."""

    def stored(self, state: State, name: str, value: Tensor) -> None:
        """A slot was written back."""

    def call(self, what: str, inputs: Mapping[str, Tensor], state: State) -> AbstractContextManager[None]:
        """Around a hook of a stage. what: "<stage path>: <hook>() at step <t>". state: of the stage."""
        ...

    def returned(self, value: object, direction: Tensor) -> None:
        """The running hook returned this for that direction."""


@dataclass(frozen=True)
class Storage:
    """Encoded slots of a stack, and the counters behind the random numbers of the selected rows.

    encoded: the encoded slots, by key.
    counters: gives seeds and steps, int64 `[n]`; a random number depends on them, on the slot and on the place in the
        slot alone. None: rounding is to nearest.
    watch: checks how stages use their state; None outside checked mode.
    """

    encoded: Mapping[str, EncodedSlot]
    counters: Callable[[], tuple[Tensor, Tensor]] | None = None
    watch: Watch | None = None

    def slice_rows(self, start: int, stop: int) -> Storage:
        """Storage of the selected rows start to stop."""
        counters = self.counters
        if counters is None:
            return self

        def sliced() -> tuple[Tensor, Tensor]:
            seeds, steps = counters()
            return seeds[start:stop], steps[start:stop]

        return replace(self, counters=sliced)

    def uniform(self, key: str) -> Uniform | None:
        """Random numbers for stochastic rounding of one slot; None where rounding is to nearest."""
        counters = self.counters
        if counters is None:
            return None

        def draw(like: Tensor, purpose: str) -> Tensor:
            stream = _STORAGE_STREAM + zlib.crc32(f"{key}/{purpose}".encode())
            seeds, steps = counters()
            return noise.uniform(seeds, steps, tuple(like.shape[1:]), like.dtype, stream)

        return draw


_STORAGE_STREAM = 1 << 33
"""Streams of noise from here on belong to storage."""


class State:
    """The slots of one stage for the selected rows of a stack.

    `scope` gives the state of a stage inside it, `slice_rows` a slice of rows.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        block: tuple[int, ...],
        path: str = "",
        rows: slice | Tensor | None = None,
        mask: Tensor | None = None,
        storage: Storage | None = None,
    ) -> None:
        self.tensors, self.block, self.path, self.rows, self.mask = tensors, block, path, rows, mask
        self.storage, self.written = storage or Storage({}), True
        self._loaded: dict[str, Tensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        """The slot `[n, *shape]`, safe to work on in place; nothing is kept before it is assigned back."""
        value = self._load(name)
        if self.written and (watch := self.storage.watch) is not None:
            watch.loaded(StateKey.join(self.path, name), value)
        return value

    def __setitem__(self, name: str, value: Tensor) -> None:
        if not self.written:
            return
        if (watch := self.storage.watch) is not None:
            known = self._load(name)
            watch.storing(StateKey.join(self.path, name), value, len(known), known.dtype)
        self._store(name, value)
        if watch is not None:
            watch.stored(self, name, value)

    def _load(self, name: str) -> Tensor:
        key = StateKey.join(self.path, name)
        if (how := self.storage.encoded.get(key)) is not None:
            return how.codec.decode(self._encoded(key, how), how.slot, how.dtype)
        if key not in self.tensors:
            raise self._undeclared(name)
        value = self._select(self.tensors[key])
        if self.mask is not None or not self.written:
            value = value.clone()
        self._loaded[name] = value
        return value

    def _store(self, name: str, value: Tensor) -> None:
        key = StateKey.join(self.path, name)
        how = self.storage.encoded.get(key)
        if how is not None:
            parts = how.codec.encode(value, self._encoded(key, how), self.storage.uniform(key))
            for part, stored in parts.items():
                self._write(self.tensors[StateKey.join(key, part)], stored)
        elif key not in self.tensors:
            raise self._undeclared(name)
        elif self.mask is not None or isinstance(self.rows, Tensor) or value is not self._loaded.get(name):
            self._write(self.tensors[key], value)

    def _undeclared(self, name: str) -> ContractError:
        keys = [StateKey.parse(text) for text in (*self.tensors, *self.storage.encoded)]
        declared = dict.fromkeys(key.slot for key in keys if key.stage == self.path)
        return ContractError(
            f"{self.path}: slot '{name}' is not declared in slots() (declared: {', '.join(declared) or 'none'})"
        )

    def _encoded(self, key: str, how: EncodedSlot) -> Encoded:
        return {part: self._select(self.tensors[StateKey.join(key, part)]) for part in how.names}

    def _write(self, target: Tensor, value: Tensor) -> None:
        if self.mask is not None:
            value = torch.where(per_block(self.mask, value), value, self._select(target))
        if isinstance(self.rows, Tensor):
            target.index_copy_(0, self.rows, value.to(target.dtype))
        else:
            copy_blocks(self._select(target), value)

    def decoded(self, name: str) -> Tensor | None:
        """What is read of a slot that a codec stores, `[n, *shape]`; None: the slot is stored as it is."""
        return self._load(name) if self.coded(name) else None

    def coded(self, name: str) -> bool:
        """Whether a codec stores the slot: what is loaded is a copy, and what is kept may differ from it."""
        return StateKey.join(self.path, name) in self.storage.encoded

    def copied(self, name: str) -> bool:
        """Whether what is loaded of the slot is a copy, and not the stored tensor itself."""
        return self.coded(name) or self.mask is not None or not self.written or isinstance(self.rows, Tensor)

    def __contains__(self, name: str) -> bool:
        return self.coded(name) or StateKey.join(self.path, name) in self.tensors

    def _select(self, tensor: Tensor) -> Tensor:
        if self.rows is None:
            return tensor
        return tensor.index_select(0, self.rows) if isinstance(self.rows, Tensor) else tensor[self.rows]

    def scope(self, part: str, block: tuple[int, ...] | None = None) -> Self:
        """The state of the stage called `part` inside this one; block: the shape it sees, if it sees another."""
        path = f"{self.path}.{part}" if self.path else part
        seen = self.block if block is None else block
        return type(self)(self.tensors, seen, path, self.rows, self.mask, self.storage)

    def slice_rows(self, start: int, stop: int) -> Self:
        """The state of rows start to stop of the selected ones."""
        if self.rows is None:
            rows: slice | Tensor = slice(start, stop)
        elif isinstance(self.rows, slice):
            rows = slice(self.rows.start + start, self.rows.start + stop)
        else:
            rows = self.rows[start:stop]
        mask = None if self.mask is None else self.mask[start:stop]
        return type(self)(self.tensors, self.block, self.path, rows, mask, self.storage.slice_rows(start, stop))

    def unwritten(self) -> Self:
        """This state, with writes that are dropped; the states of stages inside it write as always."""
        own = type(self)(self.tensors, self.block, self.path, self.rows, self.mask, self.storage)
        own.written = False
        return own
