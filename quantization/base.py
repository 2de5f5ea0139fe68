"""The family of quantizers, and which of them a recipe gives to a slot."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch
from torch import Tensor

from eigengraft.component import Component
from eigengraft.slots import Parts, Slot, Uniform

FORMAT_VERSION = 2
"""Goes up when what is stored by the same declaration changes its meaning."""


class Quantizer(Component, ABC, family="quantizer"):
    """A map between a slot `[N, *shape]` and the plain tensors, `[N, ...]` each, that are kept of it.

    A coded slot has the state keys "<slot>/<part>". Laws: rows are coded one by one, zero comes back as zero, nothing
    given is written to.
    """

    def refuses(self, slot: Slot) -> str | None:
        """Why this slot cannot be stored so, or None."""
        return None

    @property
    def symmetric(self) -> bool:
        """Whether every decoded matrix is symmetric."""
        return False

    def encode_hollow(self, x: Tensor, before: Parts | None = None, uniform: Uniform | None = None) -> Parts:
        """`encode` of x `[N, d, d]` with zeros on its diagonal."""
        rest = x.clone()
        rest.diagonal(dim1=-2, dim2=-1).zero_()
        return self.encode(rest, before, uniform)

    @abstractmethod
    def encode(self, x: Tensor, before: Parts | None = None, uniform: Uniform | None = None) -> Parts:
        """x `[N, *shape]` -> the parts kept, by name.

        before: the parts that these replace, for formats that carry an error on; None at the start. uniform: random
        numbers for stochastic rounding; None: to nearest.
        """

    @abstractmethod
    def decode(self, parts: Parts, slot: Slot, dtype: torch.dtype) -> Tensor:
        """The slot `[N, *shape]` in `dtype`, in memory of its own."""

    def meaning(self) -> str:
        """What the parts mean beyond the declaration: the values of code books."""
        return ""

    def format(self) -> int:
        """A number that tells one meaning of the parts from another, kept beside them and checked on loading."""
        text = f"{FORMAT_VERSION} {self.model_dump_json()} {self.meaning()}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)


def choose(storage: Mapping[str, Quantizer], path: str, name: str, slot: Slot) -> Quantizer | None:
    """The quantizer of a slot: by "path/slot", else by its stage's path, else by its role if it can be stored so.

    Sensitive slots, the second moments of a graft's magnitude, are never taken by their role: they set the size of
    every update, and quantizing them is what hurts (DALL-E mini's study).
    """
    for key in (f"{path}/{name}", path):
        if key in storage:
            problem = storage[key].refuses(slot)
            if problem and key != path:
                raise ValueError(f"storage.{key}: {problem}")
            return None if problem else storage[key]
    by_role = storage.get(slot.role)
    if by_role is None or slot.sensitive:
        return None
    return by_role if by_role.refuses(slot) is None else None
