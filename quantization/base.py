"""The family of quantizers, and which of them a recipe gives to a slot."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import ClassVar

import torch
from torch import Tensor

from eigengraft.component import Component
from eigengraft.slots import Encoded, Slot, Uniform
from eigengraft.state_key import StateKey

FORMAT_VERSION = 2
"""Goes up when tensors stored by the same declaration change their meaning."""


class Quantizer(Component, ABC, family="quantizer"):
    """A map between a slot `[N, *shape]` and the plain tensors, `[N, ...]` each, that it is stored in.

    An encoded slot has the state keys "<slot>/<name of a tensor>".
    Laws: rows are encoded one by one, zero comes back as zero, arguments are not written to.

    roles: roles of the slots that it can store; (): of all.
    """

    roles: ClassVar[tuple[str, ...]] = ()

    def unsupported(self, slot: Slot) -> str | None:
        """Why this quantizer cannot store the slot, or None."""
        return None

    @property
    def symmetric(self) -> bool:
        """Whether every decoded matrix is symmetric."""
        return False

    def encode_hollow(self, x: Tensor, before: Encoded | None = None, uniform: Uniform | None = None) -> Encoded:
        """`encode` of x `[N, d, d]` with zeros on its diagonal."""
        rest = x.clone()
        rest.diagonal(dim1=-2, dim2=-1).zero_()
        return self.encode(rest, before, uniform)

    @abstractmethod
    def encode(self, x: Tensor, before: Encoded | None = None, uniform: Uniform | None = None) -> Encoded:
        """x `[N, *shape]` -> tensors `[N, ...]` by name.

        before: the tensors that these replace, for formats that carry an error on; None at the start.
        uniform: random numbers for stochastic rounding; None: to nearest.
        """

    @abstractmethod
    def decode(self, encoded: Encoded, slot: Slot, dtype: torch.dtype) -> Tensor:
        """The slot `[N, *shape]` in `dtype`, in memory of its own."""

    def codebook_id(self) -> str:
        """The values of the codebooks that codes refer to, as text; "" without codebooks."""
        return ""

    def format(self) -> int:
        """A hash of the declaration and its codebooks, stored beside the tensors and checked on loading."""
        text = f"{FORMAT_VERSION} {self.model_dump_json()} {self.codebook_id()}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)


NEVER_CODED = frozenset({"iterate", "count", "failures"})
"""Roles of slots that are always stored as they are computed."""


def require_coded_role(role: str, quantizer: Quantizer, roles: Iterable[str]) -> None:
    """Raises ValueError for a role in `storage` that no slot has which could be coded by its role, or not so.

    roles: of the slots that a recipe may have, read as far as needed.
    """
    if quantizer.roles and role not in quantizer.roles:
        raise ValueError(f"storage.{role}: {_needs(quantizer)}, which stores nothing else, got {role}")
    others = set[str]()
    for other in roles:
        if other == role:
            return
        others.add(other)
    why = "iterates and counts are always stored as they are computed; remove the entry"
    if role not in NEVER_CODED:
        why = f"there are: {', '.join(sorted(others)) or 'none'}; slots of a graft's magnitude are named by stage path"
    raise ValueError(f"storage: the role of a slot that can be coded is required ({why}), got '{role}'")


def require_stage_roles(stage: str, quantizer: Quantizer, slots: Iterable[Slot]) -> None:
    """Raises ValueError for a stage in `storage` with slots of which none has a role that the quantizer can store."""
    roles = sorted({slot.role for slot in slots})
    if roles and quantizer.roles and not {*roles} & {*quantizer.roles}:
        raise ValueError(f"storage.{stage}: {_needs(quantizer)}, got {' and '.join(roles)}")


def _needs(quantizer: Quantizer) -> str:
    kind = getattr(quantizer, "kind", type(quantizer).__name__)
    return f"slots of role {' or '.join(quantizer.roles)} are required by {kind}"


def choose(storage: Mapping[str, Quantizer], key: StateKey, slot: Slot) -> Quantizer | None:
    """The quantizer of a slot: by its key, else by its stage's path, else by its role if it can be stored so.

    Sensitive slots, the second moments of a graft's magnitude, are never taken by their role: they set the size of
    every update, and quantizing them is what hurts (DALL-E mini's study).
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
