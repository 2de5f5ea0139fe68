"""RankGroup: the ranks that share an optimizer, and what they say to each other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh


class DistributedError(RuntimeError):
    """Ranks could not finish something together. Says what it was, which rank says so, and what is known of why."""


@dataclass
class Work:
    """A collective under way; `wait` returns its result. keep: what must live until then."""

    work: Any
    result: Tensor
    wrap: Callable[[Callable[[], None]], None]
    keep: Sequence[Tensor] = ()

    def wait(self) -> Tensor:
        """The result, once it is there. Raises DistributedError."""
        if self.work is not None:
            self.wrap(self.work)
            self.work = None
        return self.result


class RankGroup:
    """The R ranks of a process group. Tensors travel as bytes, so that every dtype does.

    timeout: seconds, for collectives on a CPU; None: the process group's.
    """

    def __init__(self, group: Any, timeout: float | None = None) -> None:
        self.group, self.timeout = group, timeout
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    def all_reduce(self, values: Tensor, what: str) -> Tensor:
        """Sums `values` over all ranks, in place."""
        with self._named(what):
            self._wait(dist.all_reduce(values, group=self.group, async_op=True))
        return values

    def all_gather(self, mine: Tensor, what: str) -> Work:
        """`[n]` of each rank, all of the same length -> `[R, n]`."""
        result = mine.new_empty(self.size, mine.numel())
        if not mine.numel():
            return Work(None, result, self._finish(what))
        with self._named(what):
            work = _all_gather(as_bytes(result), as_bytes(mine), group=self.group, async_op=True)
        return Work(work, result, self._finish(what), (mine,))

    def all_to_all(self, sent: Tensor, sending: Sequence[int], receiving: Sequence[int], what: str) -> Work:
        """Gives rank r its `sending[r]` numbers of `sent`, and takes `receiving[r]` numbers from each, in order."""
        result, width = sent.new_empty(sum(receiving)), sent.element_size()
        with self._named(what):
            work = dist.all_to_all_single(
                as_bytes(result),
                as_bytes(sent),
                [n * width for n in receiving],
                [n * width for n in sending],
                group=self.group,
                async_op=True,
            )
        return Work(work, result, self._finish(what), (sent,))

    def all_gather_object(self, mine: Any, what: str) -> list[Any]:
        """What every rank has, by rank; for small things."""
        found: list[Any] = [None] * self.size
        with self._named(what):
            dist.all_gather_object(found, mine, group=self.group)
        return found

    def raise_on_any(self, fault: str | None, what: str) -> None:
        """Raises ValueError on every rank if one has found a fault, with what each of them says."""
        faults = {rank: said for rank, said in enumerate(self.all_gather_object(fault, what)) if said is not None}
        if len(set(faults.values())) == 1 and len(faults) == self.size:
            raise ValueError(next(iter(faults.values())))
        if faults:
            raise ValueError("\n".join(f"rank {rank}: {said}" for rank, said in faults.items()))

    def _finish(self, what: str) -> Callable[[Any], None]:
        def wait(work: Any) -> None:
            with self._named(what):
                self._wait(work)

        return wait

    def _wait(self, work: Any) -> None:
        gloo = dist.get_backend(self.group) == "gloo"
        if self.timeout is not None and gloo:
            work.wait(timedelta(seconds=self.timeout))
        else:
            work.wait()

    @contextmanager
    def _named(self, what: str) -> Iterator[None]:
        try:
            yield
        except (RuntimeError, ValueError) as error:
            if isinstance(error, DistributedError):
                raise
            first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise DistributedError(
                f"{what}: rank {self.rank} of {self.size} could not finish it with the others; one of them has "
                f"failed, has stopped, or does something else (its own message says why). Here: {first}"
            ) from error


def mesh_group(mesh: DeviceMesh) -> Any:
    """The process group of all ranks of a mesh."""
    if mesh.ndim == 1:
        return mesh.get_group()
    ranks = tuple(sorted(mesh.mesh.flatten().tolist()))
    if len(ranks) == dist.get_world_size():
        return dist.group.WORLD
    if ranks not in _GROUPS:
        _GROUPS[ranks] = dist.new_group(list(ranks), use_local_synchronization=True)
    return _GROUPS[ranks]


_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""Its new name where torch has it."""

_GROUPS: dict[tuple[int, ...], Any] = {}
"""Made once for each set of ranks: a process group cannot be made again by some of its ranks alone."""


def as_bytes(x: Tensor) -> Tensor:
    """The bytes of a tensor, `[n]` uint8; a view if it is dense."""
    return x.contiguous().view(-1).view(torch.uint8)
