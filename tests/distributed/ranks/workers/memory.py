"""What an optimizer keeps on a rank, the largest tensor that a step of it makes, and all that it holds at once."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import eigengraft
from eigengraft import load_recipe

from .models import lay_out, model
from .trajectories import give

LAYERS, BUCKET = 60, 10 * 4 * 64 * 64
"""Matrices of the model of `hold`, and bytes of a bucket: with a bucket of 10 matrices a message is one matrix."""


class Watch(TorchDispatchMode):
    """largest: bytes of the largest memory that an operation has allocated for what it returns.

    peak: bytes of all such memory that was there at once.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is traced here, and to say so at every operation takes as long as the operation

    def __init__(self) -> None:
        super().__init__()
        self.largest = self.peak = 0
        self._living: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._bytes = 0

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        known = {x.data_ptr() for x in _storages((*args, *kwargs.values()))}
        out = func(*args, **kwargs)
        for storage in _storages([out]):
            if storage.data_ptr() not in known:
                self.largest = max(self.largest, storage.nbytes())
                self._follow(storage)
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


def _storages(values: Iterable[Any]) -> list[torch.UntypedStorage]:
    """Of tensors among values and in lists of them: what an operation is given and what it returns has no other form,
    and torch's own search through trees takes longer than the operations."""
    found = []
    for x in values:
        if isinstance(x, Tensor):
            found.append(x.untyped_storage())
        elif isinstance(x, (list, tuple)):
            found += _storages(x)
    return found


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
    """One case; its buckets have room for ten matrices."""
    torch.manual_seed(0)
    module = lay_out(nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(LAYERS))), place)
    optimizer = eigengraft.compose(load_recipe(recipe, [f"distribution.bucket={BUCKET}", "routes=[]"]), module)
    watched = Watch()
    for step in range(3):  # one that only gathers statistics, one with the first bases, one in between
        give(module, step, gaps=False)
        with watched:
            optimizer.step()
    return watched.peak
