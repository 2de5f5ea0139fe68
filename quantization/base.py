"""The family of quantizers, and which of them a recipe gives to a slot."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import ClassVar

import torch
from torch import Tensor

from eigengraft.component import Component
from eigengraft.slots import Encoded, Slot, StateKey, Uniform

FORMAT_VERSION = 2
"""Version of the stored tensors. Raised when tensors of the same declaration change their meaning."""


class Quantizer(Component, ABC, family="quantizer"):
    """A map between a slot `[N, *shape]` and the plain tensors, `[N, ...]` each, that the slot is stored in.

    An encoded slot has the state keys "<slot>/<name of a tensor>".
    Laws: rows are encoded one by one, zero is decoded as zero, arguments are not changed.

    roles: roles of the slots that it can store; (): of all.
    """

    roles: ClassVar[tuple[str, ...]] = ()

    def unsupported(self, slot: Slot) -> str | None:
        """Return the reason why this quantizer cannot store the slot; None if it can."""
        return None

    @property
    def symmetric(self) -> bool:
        """True if every decoded matrix is symmetric."""
        return False

    def encode_hollow(self, x: Tensor, before: Encoded | None = None, uniform: Uniform | None = None) -> Encoded:
        """Return `encode` of x `[N, d, d]` with zeros on its diagonal."""
        rest = x.clone()
        rest.diagonal(dim1=-2, dim2=-1).zero_()
        return self.encode(rest, before, uniform)

    @abstractmethod
    def encode(self, x: Tensor, before: Encoded | None = None, uniform: Uniform | None = None) -> Encoded:
        """Return the tensors `[N, ...]` that stand for x `[N, *shape]`, by name.

        before: the tensors that the new ones replace, for formats with error feedback; None at the start.
        uniform: random numbers for stochastic rounding; None: rounding is to nearest.
        """

    @abstractmethod
    def decode(self, encoded: Encoded, slot: Slot, dtype: torch.dtype) -> Tensor:
        """Return the slot `[N, *shape]` in `dtype`, in memory of its own."""

    def codebook_id(self) -> str:
        """Return the values of the codebooks that codes refer to, as text; "" without codebooks."""
        return ""

    def format(self) -> int:
        """Return a hash of the declaration and its codebooks. It is stored with the tensors and checked when they are
        loaded."""
        text = f"{FORMAT_VERSION} {self.model_dump_json()} {self.codebook_id()}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)


NEVER_CODED = frozenset({"iterate", "count", "failures"})
"""Roles of slots that are never coded: their numbers must be exact."""


def require_coded_role(role: str, quantizer: Quantizer, roles: Iterable[str]) -> None:
    """Raise ValueError for a role in `storage` by which no slot can be coded, or not by this quantizer.

    roles: roles of the slots that a recipe may have; they are read as far as needed.
    """
    if quantizer.roles and role not in quantizer.roles:
        raise ValueError(f"storage.{role}: {_can_store(quantizer)}, got {role}")
    others = set[str]()
    for other in roles:
        if other == role:
            return
        others.add(other)
    why = "iterates and counts are always stored as they are computed; remove the entry"
    if role not in NEVER_CODED:
        why = f"there are: {', '.join(sorted(others)) or 'none'}; slots of a graft's magnitude are named by stage path"
    raise ValueError(f"storage: no slot can be coded by this role ({why}), got '{role}'")


def require_stage_roles(stage: str, quantizer: Quantizer, slots: Iterable[Slot]) -> None:
    """Raise ValueError for a stage in `storage` if the quantizer can store none of its slots."""
    roles = sorted({slot.role for slot in slots})
    if roles and quantizer.roles and not {*roles} & {*quantizer.roles}:
        raise ValueError(f"storage.{stage}: {_can_store(quantizer)}, got {' and '.join(roles)}")


def _can_store(quantizer: Quantizer) -> str:
    kind = getattr(quantizer, "kind", type(quantizer).__name__)
    return f"{kind} can store only slots of role {' or '.join(quantizer.roles)}"


def choose(storage: Mapping[str, Quantizer], key: StateKey, slot: Slot) -> Quantizer | None:
    """Return the quantizer of a slot: by its key, else by the path of its stage, else by its role. None: it is not
    coded.

    A quantizer that cannot store the slot is ignored, but refused under the slot's own key. Sensitive slots, the second
    moments of a graft's magnitude, are never coded by their role. They set the size of every update, and coding them
    does harm (DALL-E mini's study).
    """
    for where in (key.name, key.stage):
        if where in storage:
            problem = storage[where].unsupported(slot)
            if problem and where != key.stage:
                raise ValueError(f"storage.{where}: {problem}")
            return None if problem else storage[where]
    by_role = storage.get(slot.role)
    if by_role is None or slot.sensitive:
        return None
    return by_role if by_role.unsupported(slot) is None else None
