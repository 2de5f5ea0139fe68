"""The family of quantizers, and the choice of a slot's quantizer by a recipe."""

from __future__ import annotations

import hashlib
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import ClassVar, Literal, NamedTuple, Self, final

import torch
from pydantic import model_validator
from torch import Tensor

from eigengraft.component import Component
from eigengraft.slots import Encoded, Slot, StateKey, Uniform

FORMAT_VERSION = 2
"""Version of the encodings. It must be increased when a change of the code decodes stored tensors of the same
declaration to other numbers."""


class Location(NamedTuple):
    """Where tensors of a slot are stored between steps, if not in the memory of their device.

    to: "cpu" for pinned memory of the host, "disk" for a file.
    directory: directory of the file. None: the directory that TMPDIR names, or the system's directory for temporary
        files.
    """

    to: Literal["cpu", "disk"]
    directory: str | None = None

    @property
    def path(self) -> str:
        """Directory of the file in which the slot is stored."""
        return tempfile.gettempdir() if self.directory is None else self.directory


class Quantizer(Component, ABC, family="quantizer"):
    """A map between a slot `[N, *shape]` and the plain tensors `[N, ...]` in which the slot is stored.

    These tensors have the keys "<slot>/<name of a tensor>" in the state. All quantizers satisfy three laws: the
    encoding of one of the N blocks does not depend on other blocks, zero is decoded as zero, and arguments are not
    changed.

    roles: purposes of slots (`Slot.role`) that the quantizer can store; () for all roles.
    """

    roles: ClassVar[tuple[str, ...]] = ()

    @model_validator(mode="after")
    def _inner_is_a_format(self) -> Self:
        inner = getattr(self, "inner", None)
        if isinstance(inner, Quantizer) and inner.location is not None:
            kind = getattr(inner, "kind", type(inner).__name__)
            raise ValueError(
                f"inner: a format is required, got {kind}, which chooses the memory of a slot and not its format; make "
                f"{kind} the outermost quantizer"
            )
        return self

    def unsupported(self, slot: Slot) -> str | None:
        """Return the reason why this quantizer cannot store the slot; None if it can. Called at construction, for each
        slot that a recipe stores by this quantizer.
        """
        return None

    @property
    def codec(self) -> Quantizer | None:
        """The quantizer that encodes the slot. None: the slot is not encoded.

        Usually this is the quantizer itself. A quantizer that only chooses the memory returns its inner quantizer.
        """
        return self

    @property
    def location(self) -> Location | None:
        """Memory in which the tensors are stored between steps. None: the memory of their device."""
        return None

    @property
    def symmetric(self) -> bool:
        """True if every decoded matrix is symmetric."""
        return False

    def encode_hollow(self, x: Tensor, before: Encoded | None = None, uniform: Uniform | None = None) -> Encoded:
        """Return the encoding of x `[N, d, d]` with its diagonal replaced by zeros. Called by quantizers that store the
        diagonal themselves. The arguments, and None for `before` or `uniform`, are those of `encode`.
        """
        rest = x.clone()
        rest.diagonal(dim1=-2, dim2=-1).zero_()
        return self.encode(rest, before, uniform)

    @abstractmethod
    def encode(self, x: Tensor, before: Encoded | None = None, uniform: Uniform | None = None) -> Encoded:
        """Return the tensors `[N, ...]`, by name, in which x `[N, *shape]` is stored. Called whenever a stage assigns
        the slot.

        x: float32 or float64. It must not be written to. Names, dtypes and shapes of the result follow from the shape
            of x alone.
        before: the tensors of the last encoding, which formats with error feedback read. None: nothing is stored yet.
        uniform: function (like, purpose) that draws numbers in [0, 1) in the shape and dtype of `like`, for stochastic
            rounding. The numbers follow from the block, the block's step and the text `purpose`. None: values are
            rounded to nearest.
        """

    @abstractmethod
    def decode(self, encoded: Encoded, slot: Slot, dtype: torch.dtype) -> Tensor:
        """Return the slot `[N, *shape]` in `dtype`, as a new tensor. Called whenever a stage reads the slot.

        encoded: the result of `encode`. It must not be written to.
        """

    def codebook_id(self) -> str:
        """Return the levels of the quantizer's codebooks as text, or "" if there are no codebooks."""
        return ""

    @final
    def format(self) -> int:
        """Return a hash of the declaration and its codebooks. The hash is stored with the tensors, and checked when the
        tensors are loaded.
        """
        text = f"{FORMAT_VERSION} {self.model_dump_json()} {self.codebook_id()}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)


NEVER_CODED = frozenset({"iterate", "count", "failures", "pending"})
"""Roles of slots that are never quantized: their numbers must be exact."""


def require_coded_role(role: str, quantizer: Quantizer, roles: Iterable[str]) -> None:
    """Raise ValueError if an entry {role: quantizer} of a recipe's `storage` has no effect.

    The entry has no effect if the quantizer cannot store slots with the role, or if the recipe has no slot with the
    role that can be quantized.

    roles: roles of the slots that the recipe may have and that can be quantized. The iterable is read only until `role`
        is found.
    """
    quantizer = quantizer.codec or quantizer
    if quantizer.roles and role not in quantizer.roles:
        raise ValueError(f"storage.{role}: {_can_store(quantizer)}, got {role}; choose another quantizer")
    others = set[str]()
    for other in roles:
        if other == role:
            return
        others.add(other)
    why = "iterates, counts and pending results are never quantized; remove the entry"
    if role not in NEVER_CODED:
        why = (
            f"its slots with these roles can be quantized: {', '.join(sorted(others)) or 'none'}. For slots of a "
            "graft's `magnitude`, give the path of their stage in place of a role"
        )
    raise ValueError(f"storage: the recipe has no slot with the role '{role}' that can be quantized; {why}")


def require_stage_roles(stage: str, quantizer: Quantizer, slots: Iterable[Slot]) -> None:
    """Raise ValueError if a recipe stores the slots of a stage by a quantizer that can store none of these slots.

    stage: path of the stage, which is the key of the entry in the recipe's `storage`.
    quantizer: the quantizer in this entry.
    slots: the slots of the stage.
    """
    quantizer = quantizer.codec or quantizer
    roles = sorted({slot.role for slot in slots})
    if roles and quantizer.roles and not {*roles} & {*quantizer.roles}:
        raise ValueError(
            f"storage.{stage}: {_can_store(quantizer)}, got {' and '.join(roles)}; choose another quantizer"
        )


def _can_store(quantizer: Quantizer) -> str:
    kind = getattr(quantizer, "kind", type(quantizer).__name__)
    return f"{kind} can store only slots of role {' or '.join(quantizer.roles)}"


def choose_codec(storage: Mapping[str, Quantizer], key: StateKey, slot: Slot) -> Quantizer | None:
    """Return the quantizer that encodes a slot, from the entry that `choose` returns. Return None if the slot is not
    encoded.

    storage, key, slot: as in `choose`.
    """
    found = choose(storage, key, slot)
    return None if found is None else found.codec


def choose(storage: Mapping[str, Quantizer], key: StateKey, slot: Slot) -> Quantizer | None:
    """Return the entry of `storage` for a slot: the entry for the slot's key, else for the path of its stage, else for
    its role. Return None if there is no entry for the slot, which is then stored as it is on its device.

    storage: the quantizers of a recipe, by key, path or role.
    key: the key of the slot in a state.
    slot: the declaration of the slot.

    A quantizer that cannot store the slot is ignored if it is chosen by path or role. If it is chosen by the slot's
    key, ValueError is raised. An entry for a role does not quantize sensitive slots, such as the second moments of a
    graft's magnitude. These slots set the size of every update, and quantizing them does harm (DALL-E mini's study). If
    the entry for a role only chooses the memory, it applies to sensitive slots, too.
    """
    where = entry_for(storage, key, slot)
    if where is None:
        return None
    problem = storage[where].unsupported(slot)
    if problem and where == key.name:
        raise ValueError(f"storage.{where}: {problem}; choose another format, or remove the entry")
    return None if problem else storage[where]


def entry_for(storage: Mapping[str, Quantizer], key: StateKey, slot: Slot) -> str | None:
    """Return the key of the entry of `storage` that applies to a slot by its key, stage or role. None: there is no such
    entry. The entry's quantizer may be unable to store the slot. See `choose` for the order and for sensitive slots.
    """
    for where in (key.name, key.stage):
        if where in storage:
            return where
    by_role = storage.get(slot.role)
    return None if by_role is None or (slot.sensitive and by_role.codec is not None) else slot.role
