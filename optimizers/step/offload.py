"""Offloaded state in a step: it is copied to the device before the step of a stack, and back to the host after it.

Stacks whose stages sum over the same parameter form a group; any other stack is a group by itself. While one group
computes, the state of the next group is copied. A device has two buffers, which the groups use in turns. Each buffer is
as large as the largest state of a group, so the device holds the state of at most two groups. A step on a CPU
computes in host memory, and nothing is copied: pages of state that is in a file are read ahead, and are released from
the process's memory afterwards.

A parameter set without offloaded state has no object of this module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from eigengraft.quantization.offload import HostBuffer

from ..stacks.stack import StackState
from ..stacks.streams import Streams

Group = Sequence[StackState]
"""Stacks whose stages sum over the same parameter. Their state must be on the device at the same time."""


class OffloadedState:
    """Brings state that is stored on the host or on disk to the device, for the stacks that are updated next.

    groups: all stacks, in lists. Stacks whose stages need sums over the same parameter are in one list. At least one
        stack has offloaded state.
    """

    def __init__(self, groups: Sequence[Group], device: torch.device) -> None:
        offloaded = [group for group in groups if _host_buffers(group)]
        sizes = [sum(host.memory.numel() for host in _host_buffers(group)) for group in offloaded]
        # on a CPU, stages read and write the mapped files themselves, and nothing is copied
        self._copied = None if device.type == "cpu" else CopiedState(device, sizes, offloaded)
        self._queue: list[Group] = []
        self._turn = 0

    def schedule(self, groups: Sequence[Group], active: NDArray[np.bool_] | None = None) -> None:
        """Begin to copy the state of the first group of stacks to the device.

        The caller then updates each group inside `with held(group)`, in the order of `groups`.

        active: `[P]`, True for parameters that take part in the step. The state of groups without such parameters is
            not copied. None: all parameters take part.
        """
        self._queue = [
            group
            for group in groups
            if _host_buffers(group) and (active is None or any(active[x.stack.param_ids].any() for x in group))
        ]
        self._turn = 0
        for host in _host_buffers(self._queue[0]) if self._queue else ():
            host.require_own_process()
        self._fetch(0)

    def _fetch(self, turn: int) -> None:
        if turn >= len(self._queue):
            return
        if self._copied is not None:
            self._copied.fetch(self._queue[turn], turn % 2)
        else:
            for host in _host_buffers(self._queue[turn]):
                host.read_ahead()

    @contextmanager
    def held(self, group: Group) -> Iterator[None]:
        """Enter a context in which the state of a group is on its device. Meanwhile the next group's state is copied.

        For a group that was not scheduled the context does nothing.
        """
        turn = self._turn
        if turn >= len(self._queue) or self._queue[turn] is not group:
            yield
            return
        self._turn += 1
        self._fetch(turn + 1)
        if self._copied is not None:
            self._copied.enter(group, turn % 2)
        try:
            yield
        finally:
            if self._copied is not None:
                self._copied.leave(group, turn % 2)
            else:
                for host in _host_buffers(group):
                    host.release()

    def outlasting(self, direction: Tensor) -> Tensor:
        """Return a direction that stays valid after the context `held` of its stack has ended.

        A stage may return a state tensor as its direction. After the context has ended, another stack uses the buffer
        of this tensor, but the direction may still have to be sent to other ranks. Such a direction is copied.
        """
        return direction.clone() if self._copied is not None and self._copied.lends(direction) else direction

    def finish(self) -> None:
        """Wait until all state is in host memory. Called before code other than a step reads or writes state."""
        if self._copied is not None:
            self._copied.finish()


class CopiedState:
    """The state of stacks (tensors of blocks with one shape), copied between host memory and two buffers on a device.

    All copies are on one stream, in the order of the calls. A buffer is therefore filled only after its last content
    was copied back. On the device, the kernels of a step wait for the copies to their buffer, and the copies back wait
    for the kernels. Neither wait blocks the host. A thread reads and writes files through pinned memory, because copies
    from and to other memory would block the host.

    device: device of the stacks.
    sizes: bytes of the offloaded state of each group.
    groups: the groups with offloaded state.

    Arguments of the methods:

    group: stacks whose state must be on the device at the same time, because they are updated together.
    buffer: 0 or 1, index of the buffer to which the state of the group is copied.
    """

    def __init__(self, device: torch.device, sizes: Sequence[int], groups: Sequence[Group]) -> None:
        self._streams = Streams(device)
        buffers = min(2, len(groups))
        self._buffers = [torch.empty(max(sizes), dtype=torch.uint8, device=device) for _ in range(buffers)]
        made = self._streams.mark()
        with self._streams.aside():
            self._streams.wait(made)  # the buffers may be memory that earlier work still uses
        files = [host.memory.numel() for group in groups for host in _host_buffers(group) if host.is_file]
        self._pinned = torch.empty(max(files), dtype=torch.uint8, device="cpu", pin_memory=True) if files else None
        self._thread = ThreadPoolExecutor(1, "eigengraft-offload") if files else None
        self._arrived: list[Callable[[], Any]] = [lambda: None] * buffers
        self._stored: list[Callable[[], Any]] = []
        self._pieces: dict[tuple[int, ...], list[_Piece]] = {}

    def fetch(self, group: Group, buffer: int) -> None:
        """Begin to copy the state of a group's blocks from host memory to a buffer on the device, without waiting."""
        pieces = self._pieces_of(group, buffer)

        def copy() -> Any:
            with self._streams.aside():
                for piece in pieces:
                    self._read(piece)
                return self._streams.mark()

        self._arrived[buffer] = self._begin(copy)

    def enter(self, group: Group, buffer: int) -> None:
        """Replace the state tensors of a group's blocks by their copies in a buffer on the device.

        Kernels that are launched afterwards wait until the copies are complete.
        """
        self._streams.wait(self._arrived[buffer]())
        for piece in self._pieces_of(group, buffer):
            piece.show(on_device=True)

    def leave(self, group: Group, buffer: int) -> None:
        """Begin to copy the state of a group's blocks from a buffer on the device back to host memory, without waiting.

        From now on, the state tensors of the blocks are those in host memory.
        """
        pieces, computed = self._pieces_of(group, buffer), self._streams.mark()
        for piece in pieces:
            piece.show(on_device=False)

        def copy() -> Any:
            with self._streams.aside():
                self._streams.wait(computed)
                for piece in pieces:
                    self._write(piece)
                return self._streams.mark()

        self._stored.append(self._begin(copy))

    def lends(self, tensor: Tensor) -> bool:
        """Return True if a tensor is stored in one of the two buffers on the device.

        The content of such a tensor is lost when the buffer is filled with the state of other blocks.
        """
        starts = [buffer.data_ptr() for buffer in self._buffers]
        return any(start <= tensor.data_ptr() < start + self._buffers[0].numel() for start in starts)

    def finish(self) -> None:
        """Wait until all state is in host memory."""
        stored, self._stored = self._stored, []
        for last in stored:
            self._streams.synchronize(last())

    def _begin(self, copy: Callable[[], Any]) -> Callable[[], Any]:
        """Run a function, and return a function that waits for its result.

        If state is stored in files, the function runs in the thread that reads and writes files, else at once.
        """
        if self._thread is not None:
            future: Future[Any] = self._thread.submit(copy)
            return future.result
        result = copy()
        return lambda: result

    def _read(self, piece: _Piece) -> None:
        source = piece.host.memory
        if piece.host.is_file:
            source = self._pinned_for(piece).copy_(source)
            piece.host.release()
        piece.memory.copy_(source, non_blocking=self._streams.concurrent)
        if piece.host.is_file:
            self._streams.synchronize(self._streams.mark())  # the next file uses the same pinned memory

    def _write(self, piece: _Piece) -> None:
        if not piece.host.is_file:
            piece.host.memory.copy_(piece.memory, non_blocking=self._streams.concurrent)
            return
        pinned = self._pinned_for(piece).copy_(piece.memory, non_blocking=self._streams.concurrent)
        self._streams.synchronize(self._streams.mark())
        piece.host.memory.copy_(pinned)
        piece.host.release()

    def _pinned_for(self, piece: _Piece) -> Tensor:
        assert self._pinned is not None
        return self._pinned[: piece.memory.numel()]

    def _pieces_of(self, group: Group, buffer: int) -> list[_Piece]:
        """Return the host buffers with the state of a group's blocks, each with its own part of a buffer on the device.

        The state in a host buffer is copied to this part. The parts follow one another in the buffer on the device.
        """
        key = buffer, *(stack_state.number for stack_state in group)
        if key not in self._pieces:
            self._pieces[key], start = [], 0
            for stack_state in group:
                for host in stack_state.host_buffers:
                    stop = start + host.memory.numel()
                    self._pieces[key].append(_Piece(stack_state, host, self._buffers[buffer][start:stop]))
                    start = stop
        return self._pieces[key]


class _Piece:
    """A host buffer with state of a stack, and the part of a buffer on the device to which this state is copied.

    A stack is a tensor of blocks with one shape.

    stack_state: state of the stack.
    host: the host buffer.
    memory: the part of the buffer on the device, uint8 `[n]`.
    """

    def __init__(self, stack_state: StackState, host: HostBuffer, memory: Tensor) -> None:
        self.host, self.memory = host, memory
        self._stack_state, self._on_device, self._on_host = stack_state, host.views(memory), host.views(host.memory)

    def show(self, on_device: bool) -> None:
        """Replace the state tensors of the stack by their copies in the buffer on the device, or in host memory."""
        self._stack_state.replace_tensors(self._on_device if on_device else self._on_host)


def _host_buffers(group: Group) -> list[HostBuffer]:
    return [host for stack_state in group for host in stack_state.host_buffers]
