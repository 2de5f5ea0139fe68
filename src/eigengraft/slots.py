"""State: slots, which a component declares, and the object by which a component reads and writes them.

A component declares slots (`Slot`) and never allocates. The optimizer allocates each slot once for a whole stack, as
`[N, *shape]`, under a key (`StateKey`). Every stage receives a `State`: `state[name]` loads a slot, and `state[name] =
value` writes it back. Between loading and writing back a component may change the slot in place. A component does not
know which rows of the stack its state contains: all rows, a slice that is due for a refresh, the rows that have a
gradient, or the rows with finite gradients.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, Protocol, Self, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from . import noise
from .errors import ContractError
from .numerics import copy_blocks, per_block

FORMAT = "format"
"""Name of the part of a quantized slot that holds the number of its format (`Quantizer.format`)."""
AVERAGING = "averaging"
"""Word in place of a stage path in the keys of averaged iterates, which belong to a parameter and not to a stage."""
PARTNER_STAGE = "partner"
"""Word in place of a stage path in the keys of tensors that a parameter stores for its partner, the other factor of a
product."""


def dotted(*names: str) -> str:
    """Return a path in a recipe: the names that are not empty, joined by dots.

    >>> dotted("routes.adam", "update", "rms"), dotted("", "update")
    ('routes.adam.update.rms', 'update')
    """
    return ".".join(name for name in names if name)


class StateKey(NamedTuple):
    """Address of one state tensor of a parameter, as text "<block>/<stage path>/<slot>/<part>".

    block: number of the block in the parameter; None: the tensor belongs to the parameter, and the text has no block.
    stage: dotted path of a stage or constraint, or "averaging"; "" for `step`, the count of gradients seen.
    slot: name of the slot.
    part: name of the tensor among those of a quantized slot; "" for a slot that is not quantized.

    >>> StateKey.parse("0/update.shampoo/root.1/codes")
    StateKey(block=0, stage='update.shampoo', slot='root.1', part='codes')
    >>> str(StateKey(None, "averaging", "mean"))
    'averaging/mean'
    """

    block: int | None
    stage: str
    slot: str
    part: str = ""

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the key that a text stands for; `str` is the inverse."""
        first, slash, rest = text.partition("/")
        block, path = (int(first), rest) if slash and first.isdecimal() else (None, text)
        if "/" not in path:
            return cls(block, "", path)
        stage, slot, *part = path.split("/", 2)
        return cls(block, stage, slot, *part)

    def __str__(self) -> str:
        block = None if self.block is None else str(self.block)
        return "/".join(text for text in (block, self.stage, self.slot, self.part) if text)

    @staticmethod
    def join(first: str | int, rest: str) -> str:
        """Return "<first>/<rest>", the text of a key. The function is fast enough to be called in every step.

        >>> StateKey.join("update.momentum", "m"), StateKey.join(0, "update.momentum/m")
        ('update.momentum/m', '0/update.momentum/m')
        """
        return f"{first}/{rest}"

    @staticmethod
    def within_block(text: str) -> str:
        """Return the text of a key without its first part, the block.

        >>> StateKey.within_block("0/update.momentum/m")
        'update.momentum/m'
        """
        return text.partition("/")[2]

    @property
    def name(self) -> str:
        """Return the key without its block and part: "<stage path>/<slot>", one name for all parameters."""
        return str(self._replace(block=None, part=""))


Role = Literal["statistic", "root", "basis", "first_moment", "second_moment", "iterate", "count", "failures", "pending"]
Frame = Literal["vector", "square", "row", "column", "none"]
_ROLES, _FRAMES = get_args(Role), get_args(Frame)


@dataclass(frozen=True)
class Slot:
    """One named state tensor of a stage.

    shape: shape per block, without the stack axis.
    fill: initial value of all entries. "identity": the identity matrix, or its first columns for a tall matrix.
    role: purpose of the slot, by which a recipe chooses its storage. A slot with role "failures" counts how often in a
        row a block's root or basis could not be computed. It is an int32 of shape (), which the optimizer reads after
        refreshes. A slot with role "pending" holds a result of a delayed refresh until the refresh takes effect.
    frame: how the slot is transformed when the basis in which its stage works changes from Q_old to Q_new, with
        R = Q_old^T Q_new:
        "vector": rotated, v <- R^T v on each axis.
        "square": multiplied by the Hadamard square of R, v <- (R*R)^T v on each axis.
        "row": as "square", for a slot without the block's last axis.
        "column": as "square", for a slot without the block's last but one axis.
        "none": not changed.
    dtype: dtype of the slot; None: the dtype that the block is computed in.
    axes: for frame "vector" or "square", the axes of the block that the slot has, in order; None: all of them. For a
        matrix with frame "none", such as a basis, `(axis,)`: the axis of the block that the matrix belongs to.
        `inspect` compares a basis with the statistic of the same axis.
    scale: factor by which the initial identity is multiplied.
    sensitive: True if the size of every update depends on the slot. A storage that a recipe chooses by role does not
        quantize such a slot.
    decay: for a slot that is a running mean or sum of squared gradients, in the basis in which its stage works: the
        factor by which each step multiplies the weights of earlier gradients. None: the slot is no such mean or sum.
    total: True if stages read the sum of the slot over all blocks of all parameters, as the step began, by
        `context.total`.
    step_size: True if the slot, of shape (), is a learning rate of the stage: the stage multiplies its direction by the
        slot. Decoupled weight decay is then multiplied by the slot too.
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

    def __post_init__(self) -> None:
        """Raise TypeError for a shape that is no tuple of lengths, and ValueError for an unknown role or frame."""
        shape: object = self.shape
        sizes = shape if isinstance(shape, tuple) else (None,)
        if not all(isinstance(size, (int, np.integer, torch.SymInt)) for size in sizes):
            fault = "a tuple with the length of each axis is required, such as block, (block[0],), or () for one number"
            raise TypeError(f"Slot.shape: {fault}; got {self.shape!r}")
        for name, value, known in (("role", self.role, _ROLES), ("frame", self.frame, _FRAMES)):
            if value not in known:
                raise ValueError(f"Slot.{name}: one of {', '.join(known)} is required, got {value!r}")

    def allocate(self, blocks: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return the initial slot of a stack, `[blocks, *shape]`.

        dtype: dtype of the result if the slot has none.
        """
        dtype = self.dtype or dtype
        if self.fill == "identity":
            eye = torch.eye(*self.shape, dtype=dtype, device=device).mul_(self.scale)
            return eye.expand(blocks, *self.shape).contiguous()
        return torch.full((blocks, *self.shape), self.fill, dtype=dtype, device=device)

    def initial(self, dtype: torch.dtype) -> Tensor:
        """Return the initial slot of one block on the CPU, `[1, *shape]`. If all entries are equal, the result is a
        view of one number.

        dtype: dtype of the result if the slot has none.
        """
        if self.fill == "identity":
            return self.allocate(1, dtype, torch.device("cpu"))
        return torch.full((), self.fill, dtype=self.dtype or dtype, device="cpu").expand(1, *self.shape)


Encoded = Mapping[str, Tensor]
"""Tensors `[N, ...]` that a quantized slot is stored in, by name."""
Uniform = Callable[[Tensor, str], Tensor]
"""Function uniform(like, purpose) that returns random numbers in [0, 1), with the shape and dtype of `like` `[N, ...]`.

Quantizers use them for stochastic rounding. Numbers for different purposes are independent.
"""


class Codec(Protocol):
    """A way to store a slot as one or more other tensors, such as codes and scales. `eigengraft.quantization` has the
    implementations.
    """

    def encode(self, x: Tensor, before: Encoded | None = None, uniform: Uniform | None = None) -> Encoded:
        """Return the tensors `[N, ...]` that encode x `[N, *shape]`, by name.

        before: the tensors in which the slot is stored now, which formats with error feedback read. None: nothing is
            stored.
        uniform: function that returns random numbers for stochastic rounding; None: rounding is to nearest.
        """

    def decode(self, encoded: Encoded, slot: Slot, dtype: torch.dtype) -> Tensor:
        """Return the slot `[N, *shape]` that encoded tensors stand for.

        encoded: the tensors that `encode` has returned.
        slot: the declaration of the slot.
        dtype: dtype of the result.
        """


@dataclass(frozen=True)
class EncodedSlot:
    """A slot that a codec stores in several tensors. Each has the key "<key of the slot>/<name>".

    slot: the declaration of the slot.
    codec: the codec that stores the slot.
    names: names of the tensors.
    dtype: dtype of the decoded slot.
    """

    slot: Slot
    codec: Codec
    names: tuple[str, ...]
    dtype: torch.dtype


class Watch(Protocol):
    """Observer of the stages of an optimizer, such as the checks of checked mode (`preconditioners.checked_mode`).

    Its methods are called when a stage loads or writes a slot, and when a hook of a stage runs.
    """

    def loaded(self, key: str, value: Tensor) -> None:
        """Called after a slot was loaded.

        key: "<stage path>/<slot>".
        value: the loaded slot, which the stage receives.
        """

    def storing(self, key: str, value: object, rows: int, dtype: torch.dtype) -> None:
        """Called before a slot is written back. Raises an error if the value does not fit.

        key: "<stage path>/<slot>".
        value: the assigned value.
        rows: number of rows of the slot.
        dtype: dtype that the slot was loaded in.
        """

    def stored(self, state: State, name: str, value: Tensor) -> None:
        """Called after a slot was written back.

        state: state of the stage.
        name: name of the slot.
        value: the assigned value.
        """

    def call(self, what: str, inputs: Mapping[str, Tensor], state: State) -> AbstractContextManager[None]:
        """Return the context manager in which a hook of a stage runs.

        what: "<stage path>: <hook>() at step <t>".
        inputs: the tensors that the hook receives, by name.
        state: state of the stage.
        """
        ...

    def returned(self, value: object, direction: Tensor) -> None:
        """Receive the value that `apply` returned.

        value: the returned value.
        direction: the direction that `apply` received.
        """


class DelayedRefreshes(Protocol):
    """Computes roots and bases of a stack in a thread, while training goes on (`refresh: {delay: k}`).

    A refresh is kept here from `begin` until `finish` has stored its results.
    """

    def begin(
        self, state: State, seeds: NDArray[np.int64], what: str, solve: Callable[[], Mapping[str, Tensor]]
    ) -> None:
        """Begin to compute the results of a refresh.

        state: state of the n blocks that are refreshed. `finish` stores the results in its slots of role "pending".
        seeds: `[n]`, seed of each block, which identifies the block.
        what: text for errors, "<stage path>: solve() at step <t>".
        solve: function that returns the results, by name of the pending slot. It reads nothing that a step changes.
        """

    def finish(self, path: str, seeds: NDArray[np.int64]) -> None:
        """Store the results of refreshes of one stage in its pending slots.

        path: path of the stage.
        seeds: seeds of blocks. Every refresh that includes one of these blocks is finished.
        """


@dataclass(frozen=True)
class Storage:
    """How a `State` stores its slots: formats such as int8, random numbers for rounding, and an observer of accesses.

    encoded: the slots that a codec stores in another format, by key.
    counters: function that returns the seed and the step of each block that the state selects, int64 `[n]` each, from
        which random numbers for stochastic rounding are computed. None: values are rounded to nearest.
    watch: observer of loads and writes of slots; None: there is none.
    delayed: computes delayed refreshes in a thread. None: they are computed in the step that begins them.
    """

    encoded: Mapping[str, EncodedSlot]
    counters: Callable[[], tuple[Tensor, Tensor]] | None = None
    watch: Watch | None = None
    delayed: DelayedRefreshes | None = None

    def slice_rows(self, start: int, stop: int) -> Storage:
        """Return the storage for the blocks start to stop - 1. Block 0 is the first one that this storage selects."""
        counters = self.counters
        if counters is None:
            return self

        def sliced() -> tuple[Tensor, Tensor]:
            seeds, steps = counters()
            return seeds[start:stop], steps[start:stop]

        return replace(self, counters=sliced)

    def uniform(self, key: str) -> Uniform | None:
        """Return the function that draws random numbers for stochastic rounding of one slot, or None if values are
        rounded to nearest.

        key: "<stage path>/<slot>". Different slots have independent random numbers.
        """
        counters = self.counters
        if counters is None:
            return None

        def draw(like: Tensor, purpose: str) -> Tensor:
            stream = _STORAGE_STREAM + zlib.crc32(f"{key}/{purpose}".encode())
            seeds, steps = counters()
            return noise.uniform(seeds, steps, tuple(like.shape[1:]), like.dtype, stream)

        return draw


_STORAGE_STREAM = 1 << 33
"""Number of the first stream of noise that belongs to storage. Smaller stream numbers belong to stages."""


class State:
    """The slots of one stage, for the selected rows of a stack.

    tensors: the state tensors of the whole stack, by key.
    block: shape of the blocks that the stage sees.
    path: path of the stage.
    rows: the selected rows; None: all rows.
    mask: bool `[n]`, True for each selected row that may be written; None: all of them.
    storage: formats of encoded slots, and random numbers for rounding; None: every slot is stored as it is.
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
        """Return the slot `[n, *shape]`, which may be changed in place.

        Changes are stored only when the slot is assigned back.
        """
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

    def read(self, name: str) -> Tensor:
        """Return the slot `[n, *shape]`, which must not be changed in place.

        This method does not copy the slot. `state[name]` copies it if `mask` is set, because rows whose mask is False
        must keep their values.
        """
        value, _ = self._stored(name)
        if self.written and (watch := self.storage.watch) is not None:
            watch.loaded(StateKey.join(self.path, name), value)
        return value

    def _load(self, name: str) -> Tensor:
        value, decoded = self._stored(name)
        if decoded:
            return value
        if self.mask is not None or not self.written:
            value = value.clone()
        self._loaded[name] = value
        return value

    def _stored(self, name: str) -> tuple[Tensor, bool]:
        """Return (values of a slot for the selected blocks, True if they were decoded from another format)."""
        key = StateKey.join(self.path, name)
        if (how := self.storage.encoded.get(key)) is not None:
            return how.codec.decode(self._encoded(key, how), how.slot, how.dtype), True
        if key not in self.tensors:
            raise self._undeclared(name)
        return self._select(self.tensors[key]), False

    def _store(self, name: str, value: Tensor) -> None:
        key = StateKey.join(self.path, name)
        how = self.storage.encoded.get(key)
        declared = how.slot.shape if how is not None else self.tensors[key].shape[1:] if key in self.tensors else None
        if declared is not None and value.shape[1:] != declared:  # a copy would broadcast the value
            raise ContractError(
                f"{self.path}: slot '{name}' needs a tensor of shape [{', '.join(['N', *map(str, declared)])}], "
                f"got {list(value.shape)}"
            )
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
            known, mask = self._select(target), per_block(self.mask, value)
            if value.shape == known.shape and value.dtype is known.dtype and not isinstance(self.rows, Tensor):
                torch.where(mask, value, known, out=known)
                return
            value = torch.where(mask, value, known)
        if isinstance(self.rows, Tensor):
            target.index_copy_(0, self.rows, value.to(target.dtype))
        else:
            copy_blocks(self._select(target), value)

    def decoded(self, name: str) -> Tensor | None:
        """Return the decoded slot `[n, *shape]` if a codec stores it, or None if the slot is not encoded."""
        return self._load(name) if self.coded(name) else None

    def coded(self, name: str) -> bool:
        """Return True if the slot is stored in coded form, such as int8.

        Reading it then decodes a copy, and writing may round.
        """
        return StateKey.join(self.path, name) in self.storage.encoded

    def copied(self, name: str) -> bool:
        """Return True if loading the slot returns a copy instead of the stored tensor."""
        return self.coded(name) or self.mask is not None or not self.written or isinstance(self.rows, Tensor)

    def __contains__(self, name: str) -> bool:
        return self.coded(name) or StateKey.join(self.path, name) in self.tensors

    @property
    def blocks(self) -> int:
        """Number N of blocks of the whole stack, even if this state selects only some of them."""
        return len(next(iter(self.tensors.values())))

    def _select(self, tensor: Tensor) -> Tensor:
        if self.rows is None:
            return tensor
        return tensor.index_select(0, self.rows) if isinstance(self.rows, Tensor) else tensor[self.rows]

    def scope(self, part: str, block: tuple[int, ...] | None = None) -> Self:
        """Return the state of the stage called `part` inside this one.

        block: shape of the blocks that the inner stage sees; None: the same as here.
        """
        path = f"{self.path}.{part}" if self.path else part
        seen = self.block if block is None else block
        return type(self)(self.tensors, seen, path, self.rows, self.mask, self.storage)

    def slice_rows(self, start: int, stop: int) -> Self:
        """Return the state of the blocks start to stop - 1. Block 0 is the first one that this state selects."""
        if self.rows is None:
            rows: slice | Tensor = slice(start, stop)
        elif isinstance(self.rows, slice):
            rows = slice(self.rows.start + start, self.rows.start + stop)
        else:
            rows = self.rows[start:stop]
        mask = None if self.mask is None else self.mask[start:stop]
        return type(self)(self.tensors, self.block, self.path, rows, mask, self.storage.slice_rows(start, stop))

    def snapshot(self, names: Iterable[str]) -> Self:
        """Return a state with copies of some slots, for the blocks that this state selects. Later steps do not change
        the copies.

        names: names of the slots that are copied. The result has no other slots.
        """
        copies = {}
        for key in (StateKey.join(self.path, name) for name in names):
            how = self.storage.encoded.get(key)
            for text in [key] if how is None else [StateKey.join(key, part) for part in how.names]:
                found = self._select(self.tensors[text])
                copies[text] = found if isinstance(self.rows, Tensor) else found.clone()
        return type(self)(copies, self.block, self.path, storage=Storage(self.storage.encoded))

    def unwritten(self) -> Self:
        """Return a copy of this state in which writes have no effect, such as `state[name] = value`.

        Only the slots of this stage are protected. States of stages inside this one, which `scope` makes from the copy,
        are written as usual.
        """
        own = type(self)(self.tensors, self.block, self.path, self.rows, self.mask, self.storage)
        own.written = False
        return own
