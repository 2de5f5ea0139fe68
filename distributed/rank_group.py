"""Groups of ranks that share parameters, and collectives between these ranks, which send tensors as bytes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

Received = TypeVar("Received")
PADDING = 1.1
"""Largest factor by which padding may lengthen the messages of an all-gather of uneven lengths."""


@dataclass
class Work(Generic[Received]):
    """A collective under way.

    handles: torch's handles of the collective; empty if it is finished.
    result: the tensors that the collective writes.
    finish: function that waits for a handle, and raises DistributedError if the collective fails.
    inputs: tensors that must exist until the collective is finished.
    """

    handles: Sequence[Any]
    result: Received
    finish: Callable[[Any], None]
    inputs: Sequence[Tensor] = ()

    def done(self) -> bool:
        """Return True if the collective has finished or failed, so that `wait` returns or raises at once."""
        return all(handle.is_completed() for handle in self.handles)

    def wait(self) -> Received:
        """Wait for the collective and return its result. Raises DistributedError if the collective fails."""
        for handle in self.handles:
            self.finish(handle)
        self.handles, self.inputs = (), ()
        return self.result


def pads(lengths: Sequence[int]) -> bool:
    """Return True if messages of these lengths should be gathered by one collective, each padded to the longest length.

    The result is False if padding would lengthen the messages together by more than a tenth. Each rank then broadcasts
    its message instead.

    lengths: length of each rank's message.
    """
    return max(lengths) * len(lengths) <= PADDING * sum(lengths)


def as_bytes(x: Tensor) -> Tensor:
    """Return the bytes of a tensor, `[n]` uint8; a view if the tensor is contiguous."""
    # the view as bytes needs stride 1, but `view(-1)` would keep the stride of a single entry, which may be any number
    return x.contiguous().as_strided((x.numel(),), (1,)).view(torch.uint8)


class DistributedError(RuntimeError):
    """A collective failed, or ranks differ in something that must be equal on all ranks.

    The message names the collective or the difference.
    """


DIGEST = 16
"""Bytes of the hash of the next collective that ranks send to each other, to check that all of them call the same one.
With 16 bytes, different collectives practically never have the same hash."""
CPU = torch.device("cpu")


class RankGroup:
    """The R ranks of a process group. Tensors are sent as bytes, so that every dtype can be sent.

    group: the process group.
    timeout: seconds to wait for a collective on a CPU; None: the time-out of the process group.
    all_ranks: a group with all ranks that execute the same step; None: this group.
    rank: this process, 0 .. R - 1.
    size: R.
    """

    def __init__(self, group: Any, timeout: float | None = None, all_ranks: RankGroup | None = None) -> None:
        self.group, self.timeout, self.all_ranks = group, timeout, all_ranks or self
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self._mesh: DeviceMesh | None = None

    @property
    def members(self) -> tuple[int, ...]:
        """The ranks of the group, as numbers of the default process group."""
        return tuple(dist.get_process_group_ranks(self.group))

    def mesh(self, device: torch.device) -> DeviceMesh:
        """Return the ranks as a device mesh of one axis."""
        if self._mesh is None:
            self._mesh = DeviceMesh.from_group(self.group, device.type)
        return self._mesh

    def subgroup(self, size: int) -> RankGroup:
        """Return the group of `size` consecutive ranks that contains this one. Raises ValueError if `size` does not
        divide the number of ranks.
        """
        if self.size % size:
            raise ValueError(f"distribution.group_size: must divide the number of ranks, {self.size}, got {size}")
        first = self.rank - self.rank % size
        ranks = self.members[first : first + size]
        return self if size == self.size else RankGroup(_process_group(ranks), self.timeout, self)

    def duplicate(self) -> RankGroup:
        """Return a `RankGroup` of the same ranks with another process group, whose messages never wait for messages of
        this group.

        All ranks call this method. The process group is new, or is one that an earlier duplicate gave back by
        `give_back`.
        """
        if spare := _SPARE.get(self._kind):
            return RankGroup(spare.pop(), self.timeout)
        span = None if self.timeout is None else timedelta(seconds=self.timeout)
        return RankGroup(dist.new_group(list(self.members), timeout=span, use_local_synchronization=True), self.timeout)

    def give_back(self) -> None:
        """Make this group available to later calls of `duplicate`.

        All ranks call this method after the last message of the group.
        """
        _SPARE.setdefault(self._kind, []).append(self.group)

    @property
    def _kind(self) -> tuple[Any, ...]:
        return dist.group.WORLD, self.members, self.timeout

    def all_reduce(self, values: Tensor, what: str) -> Tensor:
        """Sum `values` over all ranks, in place, and return them.

        what: name of the collective in errors.
        """
        with self._named(what):
            self._wait(dist.all_reduce(values, group=self.group, async_op=True), values.device)
        return values

    def mean(self, values: Tensor, what: str) -> Tensor:
        """Return the mean of `values` over all ranks. `values` is overwritten.

        The method checks first that all ranks call it with the same `what`.

        what: name of the collective in errors.
        """
        self.synchronize(what, device=values.device)
        return self.all_reduce(values, what) / self.size

    @cached_property
    def gloo_devices(self) -> frozenset[str]:
        """Types of the devices whose tensors gloo sends.

        They are read from the backend configuration, because `dist.get_backend` does not return them for a group that
        was made without an explicit backend.
        """
        pairs = (pair.split(":") for pair in dist.get_backend_config(self.group).split(","))
        return frozenset(device for device, backend in pairs if backend == "gloo")

    def synchronize(self, what: str, remedy: str = "", device: torch.device = CPU) -> None:
        """Check that all ranks are about to call the same collective. Otherwise raise DistributedError on every rank.

        Without this check, gloo ends a process without an error message if the tensors of a collective differ in length
        between ranks. The check is itself an all-to-all, in which ranks exchange a hash (digest) of `what`. If a rank
        calls another kind of collective at that time, it sends no digest, and the wait for its digest times out. With
        backends other than gloo nothing is sent, and no rank waits.

        what: name of the collective that follows.
        remedy: advice for the user of this rank. The error contains the remedies of all ranks.
        device: device of the tensors of the collective that follows.
        """
        if not {"cpu", device.type} <= self.gloo_devices:
            return
        digest = hashlib.blake2b(what.encode(), digest_size=DIGEST).digest()
        sent, each = torch.tensor(list(digest * self.size), dtype=torch.uint8, device="cpu"), [DIGEST] * self.size
        if torch.equal(self.all_to_all(sent, each, each, what).wait(), sent):
            return
        every = self._gather_object((what, remedy), what)
        found = ", ".join(f"{other!r} on rank {rank}" for rank, (other, _) in enumerate(every[:8]))
        remedies = "".join(f"; {text}" for text in dict.fromkeys(text for _, text in every) if text)
        raise DistributedError(
            f"{what}: all ranks must begin the same operation together, got {found}; nothing was changed{remedies}"
        )

    def all_gather(self, values: Tensor, what: str) -> Work[Tensor]:
        """Start to gather a tensor `[n]` from every rank. Return the collective under way, whose result is `[R, n]`.

        values: the tensor of this rank. All ranks have the same n.
        what: name of the collective in errors.
        """
        found = values.new_empty(self.size, values.numel())
        if not values.numel():
            return Work((), found, self._finish(what, values.device))
        with self._named(what):
            handle = _all_gather(as_bytes(found), as_bytes(values), group=self.group, async_op=True)
        return Work((handle,), found, self._finish(what, values.device), (values,))

    def all_gather_uneven(self, values: Tensor, lengths: Sequence[int], what: str) -> Work[list[Tensor]]:
        """Start to gather tensors of different lengths from all ranks. Return the collective under way.

        The result of the collective is a list of the tensors, by rank.

        values: the tensor of this rank.
        lengths: length of the tensor of each rank.
        what: name of the collective in errors.
        """
        if pads(lengths):
            missing = max(lengths) - values.numel()
            work = self.all_gather(torch.cat([values, values.new_zeros(missing)]) if missing else values, what)
            found = [row[:length] for row, length in zip(work.result, lengths, strict=True)]
            return Work(work.handles, found, work.finish, work.inputs)
        found = list(torch.split(values.new_empty(sum(lengths)), list(lengths)))
        found[self.rank].copy_(values)
        with self._named(what):
            handles = [
                dist.broadcast(as_bytes(own), dist.get_global_rank(self.group, rank), self.group, async_op=True)
                for rank, own in enumerate(found)
                if own.numel()
            ]
        return Work(handles, found, self._finish(what, values.device))

    def all_to_all(self, sent: Tensor, sending: Sequence[int], receiving: Sequence[int], what: str) -> Work[Tensor]:
        """Start to send a part of a tensor to each rank, and to receive a part from each rank. Return the collective
        under way.

        Its result is a tensor of all received entries. Sent and received entries are in the order of the ranks.

        sent: `[n]`, the entries for all ranks.
        sending: number of entries for each rank.
        receiving: number of entries from each rank.
        what: name of the collective in errors.
        """
        result, width = sent.new_empty(sum(receiving)), sent.element_size()
        with self._named(what):
            handle = dist.all_to_all_single(
                as_bytes(result),
                as_bytes(sent),
                [n * width for n in receiving],
                [n * width for n in sending],
                group=self.group,
                async_op=True,
            )
        return Work((handle,), result, self._finish(what, sent.device), (sent,))

    def all_gather_object(self, values: Any, what: str) -> list[Any]:
        """Gather a small Python object from every rank, and return the objects by rank.

        values: the object of this rank.
        what: name of the collective in errors.
        """
        self.synchronize(what)  # the collective that follows has no time-out of its own
        return self._gather_object(values, what)

    def _gather_object(self, values: Any, what: str) -> list[Any]:
        found: list[Any] = [None] * self.size
        with self._named(what):
            dist.all_gather_object(found, values, group=self.group)
        return found

    def _finish(self, what: str, device: torch.device) -> Callable[[Any], None]:
        def wait(work: Any) -> None:
            with self._named(what):
                self._wait(work, device)

        return wait

    def _wait(self, work: Any, device: torch.device) -> None:
        """Wait for a collective, for at most `timeout` seconds if gloo sends tensors of the device.

        work: torch's handle of the collective.
        device: device of the tensors of the collective.
        """
        if self.timeout is not None and device.type in self.gloo_devices:
            work.wait(timedelta(seconds=self.timeout))
        else:
            work.wait()

    @contextmanager
    def _named(self, what: str) -> Iterator[None]:
        """Return a context manager that replaces an error of torch by a DistributedError with the names of the
        collective and of the rank.

        what: name of the collective.
        """
        try:
            yield
        except (RuntimeError, ValueError) as error:
            if isinstance(error, DistributedError):
                raise
            first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise DistributedError(
                f"{what}: rank {self.rank} of {self.size} could not finish this operation with the other ranks; one of "
                f"them has failed, has stopped, or runs other code; see its output. This rank's error: {first}"
            ) from error


def mesh_group(mesh: DeviceMesh) -> Any:
    """Return the process group of all ranks of a mesh."""
    if mesh.ndim == 1:
        return mesh.get_group()
    ranks = tuple(sorted(mesh.mesh.flatten().tolist()))
    return dist.group.WORLD if len(ranks) == dist.get_world_size() else _process_group(ranks)


def _process_group(ranks: tuple[int, ...]) -> Any:
    key = dist.group.WORLD, ranks
    if key not in _GROUPS:
        _GROUPS[key] = dist.new_group(list(ranks), use_local_synchronization=True)
    return _GROUPS[key]


_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""Torch's all-gather into one tensor, which has another name in newer versions of torch."""

_GROUPS: dict[tuple[Any, tuple[int, ...]], Any] = {}
"""Cache of process groups, by (default process group, ranks of the group). A group is made once, by all of its ranks.
"""

_SPARE: dict[tuple[Any, ...], list[Any]] = {}
"""Process groups that were given back, by (default process group, ranks of the group, time-out).

They are not destroyed, because all ranks would have to destroy them at the same time."""
