"""What an optimizer keeps on a rank, the largest tensor that a step of it makes, and all that it holds at once."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import eigengraft
from eigengraft import load_recipe

from .models import lay_out, model
from .trajectories import give

LAYERS, BUCKET = 100, 10 * 4 * 64 * 64
"""Matrices of the model of `hold`, and bytes of a bucket: with a bucket of 10 matrices a message is one matrix."""


class Watch(TorchDispatchMode):
    """largest: bytes of the largest memory that an operation has allocated for what it returns.

    peak: bytes of all such memory that was there at once.
    """

    def __init__(self) -> None:
        super().__init__()
        self.largest = self.peak = 0
        self._living: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._bytes = 0

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        known = {_address(x) for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        out = func(*args, **(kwargs or {}))
        made = [x for x in tree_leaves(out) if isinstance(x, Tensor) and _address(x) not in known]
        self.largest = max([self.largest, *(x.untyped_storage().nbytes() for x in made)])
        for x in made:
            self._follow(x.untyped_storage())
        self.peak = max(self.peak, self._bytes)
        return out

    def _follow(self, storage: torch.UntypedStorage) -> None:
        """Counts the bytes of a storage as long as it lives."""
        key, nbytes = storage._cdata, storage.nbytes()

        def freed(_: Any) -> None:
            del self._living[key]
            self._bytes -= nbytes

        if key not in self._living:
            self._living[key] = weakref.ref(storage, freed)
            self._bytes += nbytes


def _address(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


def run(job: dict[str, Any]) -> dict[str, Any]:
    """By the name of a case (recipe, overrides, place): (bytes of state, bytes of state of each block here)."""
    return {name: keep(**case) for name, case in job.items()}


def keep(recipe: str, overrides: Sequence[str], place: str) -> tuple[int, list[int]]:
    """What is there after two steps."""
    module = lay_out(model(48, 96), place)
    optimizer = eigengraft.compose(load_recipe(recipe, list(overrides)), module)
    for step in range(2):
        give(module, step, gaps=False)
        optimizer.step()
    blocks = [
        sum(x[0].nbytes for x in unit.tensors.values())
        for unit in optimizer.stack_states()
        if len(unit.stack.param_ids)
    ]
    return optimizer.state_bytes(), blocks


def allocate(job: dict[str, Any]) -> dict[str, int]:
    """By case: bytes of the largest tensor that three steps make for one parameter [128, 96], float32."""
    return {name: watch(**case) for name, case in job.items()}


def watch(recipe: str, overrides: Sequence[str], place: str) -> int:
    """One case; the steps include refreshes."""
    torch.manual_seed(0)
    module = lay_out(nn.Sequential(nn.Linear(96, 128, bias=False), nn.LayerNorm(128)), place)
    optimizer = eigengraft.compose(load_recipe(recipe, list(overrides)), module)
    watched = Watch()
    for step in range(3):
        give(module, step, gaps=False)
        with watched:
            optimizer.step()
    return watched.largest


def hold(job: dict[str, Any]) -> dict[str, int]:
    """By case (recipe, place): bytes that a step holds at once beside state, for LAYERS matrices of [64, 64]."""
    return {name: peak(**case) for name, case in job.items()}


def peak(recipe: str, place: str) -> int:
    """One case; its buckets have room for eight matrices."""
    torch.manual_seed(0)
    module = lay_out(nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(LAYERS))), place)
    optimizer = eigengraft.compose(load_recipe(recipe, [f"distribution.bucket={BUCKET}"]), module)
    watched = Watch()
    for step in range(4):
        give(module, step, gaps=False)
        with watched:
            optimizer.step()
    return watched.peak
