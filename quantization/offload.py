"""State that does not fit on its device: slots whose tensors are stored in host memory or in a file between steps.

`Offload` is the declaration in a recipe. `HostBuffer` is one piece of memory for all offloaded tensors of a stack (the
blocks that are updated together). One call copies the tensors to the device before the stack is computed, and one call
copies them back afterwards (`optimizers/step/offload.py`). The results of a run do not depend on where slots are
stored.
"""

from __future__ import annotations

import ctypes
import math
import os
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from eigengraft.numerics import active_fake_mode, apart
from eigengraft.slots import Encoded, Slot, Uniform

from .base import Location, Quantizer


class Offload(Quantizer):
    """Storage of a slot in pinned host memory or in a memory-mapped file. The slot is stored as it is, or encoded by
    the format `inner`.

    A step computes stacks (blocks that are updated together) one after another. The slots of a stack are copied to the
    device while the stack before it is computed, and copied back afterwards. The device thus holds the state of at most
    two stacks. On a CPU, slots in a file are read ahead, and their pages are removed from the memory of the process
    after the stack was computed.
    """

    kind: Literal["offload"] = "offload"
    to: Literal["cpu", "disk"] = Field(
        default="cpu", description="Memory: pinned memory of the host, or a file that is removed when the process ends."
    )
    directory: str | None = Field(
        default=None, description="Directory of the file; default: that of TMPDIR. Only for disk."
    )
    inner: Quantizer | None = Field(
        default=None, validate_default=False, description="Format of the slot; default: it is stored as it is."
    )
    min_elements: int = Field(
        default=4096, ge=1, description="Smallest number of entries of an offloaded slot; smaller slots stay in place."
    )

    @model_validator(mode="after")
    def _options_fit(self) -> Self:
        if self.directory is not None and self.to != "disk":
            raise ValueError(
                f"directory: {self.directory!r} has no effect, because to is '{self.to}'; remove it, or set to: disk"
            )
        return self

    def unsupported(self, slot: Slot) -> str | None:
        if slot.role in ("count", "failures", "pending") or slot.total:
            why = "is read between stacks" if slot.total else f"has the role {slot.role}"
            return f"only slots that a stack alone reads can be offloaded, got one that {why}"
        if math.prod(slot.shape) < self.min_elements:
            least = f"at least {self.min_elements} elements (min_elements)"
            return f"only slots with {least} are offloaded, got shape {slot.shape}"
        return None if self.inner is None else self.inner.unsupported(slot)

    @property
    def codec(self) -> Quantizer | None:
        return self.inner

    @property
    def location(self) -> Location:
        return Location(self.to, self.directory)

    @property
    def symmetric(self) -> bool:
        return self.inner is not None and self.inner.symmetric

    def encode(self, x: Tensor, before: Encoded | None = None, uniform: Uniform | None = None) -> Encoded:
        if self.inner is not None:
            return self.inner.encode(x, before, uniform)
        return {"values": x.clone(memory_format=torch.contiguous_format)}

    def decode(self, encoded: Encoded, slot: Slot, dtype: torch.dtype) -> Tensor:
        if self.inner is not None:
            return self.inner.decode(encoded, slot, dtype)
        return encoded["values"].to(dtype, copy=True)


def available(location: Location | None, device: torch.device) -> Location | None:
    """Return the location, or None if it has no effect for slots on this device, or if it is None.

    Tensors on a CPU are in host memory already. Tensors on the meta device, and fake tensors, have no memory.

    location: the memory for the slots between steps; None: the memory of their device.
    """
    if location is None or device.type == "meta" or active_fake_mode() is not None:
        return None
    return None if location.to == "cpu" and device.type == "cpu" else location


def in_memory(location: Location) -> bool:
    """Return True if the directory of a location is known to be on a file system in memory, such as tmpfs."""
    mounts, path = Path("/proc/self/mounts"), Path(location.path).resolve()
    if not mounts.is_file():
        return False
    rows = (line.split() for line in mounts.read_text().splitlines())
    kinds = {Path(row[1]): row[2] for row in rows}
    return kinds[max((own for own in kinds if path.is_relative_to(own)), key=lambda own: len(own.parts))] in _IN_MEMORY


_IN_MEMORY = ("tmpfs", "ramfs")
"""Kinds of Linux file systems whose files are in memory."""
_ALIGNMENT = 256
"""Alignment of a tensor in its buffer, in bytes.

torch's allocators align tensors to 64 bytes on a CPU and to 512 on CUDA, and some kernels round differently at other
addresses. 256 is enough, because it is a multiple of the size of every vector register.
"""
_WILL_NEED, _DONT_NEED = 3, 4
"""Advice of madvise(2), the same on Linux and macOS: read the pages ahead, and remove the pages from the process."""


class HostBuffer:
    """One piece of host memory, pinned memory or a mapped file, that holds named state tensors between steps.

    location: kind of the memory ("cpu" for pinned memory, "disk" for a file), and the directory of the file.
    memory: the bytes, uint8 `[n]` on the CPU.
    """

    def __init__(self, location: Location, like: Mapping[str, Tensor]) -> None:
        """Allocate memory for tensors, all 0.

        like: tensors with the shapes and dtypes, by name. Their values and their memory are not used.

        Raises:
            OSError: there is no room for the file, or its directory cannot be written.
        """
        self.location, self._layout, end = location, dict[str, tuple[int, torch.Size, torch.dtype]](), 0
        for name, tensor in like.items():
            self._layout[name] = end, tensor.shape, tensor.dtype
            end += -(-tensor.numel() * tensor.element_size() // _ALIGNMENT) * _ALIGNMENT
        if self.is_file:
            self.memory = _mapped(end, location.path)
        else:
            self.memory = torch.zeros(end, dtype=torch.uint8, device="cpu", pin_memory=True)
        self._process = os.getpid()

    def views(self, memory: Tensor) -> dict[str, Tensor]:
        """Return tensors in the given memory, with the names, shapes and dtypes of the buffer's tensors.

        memory: uint8 `[n]` on any device, of the size of the buffer.
        """
        found = dict[str, Tensor]()
        for name, (start, shape, dtype) in self._layout.items():
            stop = start + math.prod(shape) * dtype.itemsize
            found[name] = apart(memory[start:stop].view(dtype).view(shape))
        return found

    @property
    def is_file(self) -> bool:
        """True if the memory is a mapped file."""
        return self.location.to == "disk"

    def require_own_process(self) -> None:
        """Raise RuntimeError if the buffer is a file, and this process was forked from the process that made the file.
        Both processes would write to the file.
        """
        if self.is_file and self._process != os.getpid():
            raise RuntimeError(
                f"storage: the file of offloaded state belongs to process {self._process}, but process {os.getpid()}, "
                "a fork of it, would write the same file; compose the optimizer in the new process, or load a state "
                "dict there"
            )

    def read_ahead(self) -> None:
        """Begin to read the file into memory, without waiting. Pinned memory needs no reading."""
        self._advise(_WILL_NEED)

    def release(self) -> None:
        """Remove the pages of the file from the memory of the process. Written pages reach the file later."""
        self._advise(_DONT_NEED)

    def _advise(self, advice: int) -> None:
        if self.is_file and self.memory.numel():
            _madvise()(self.memory.data_ptr(), self.memory.numel(), advice)


def _mapped(size: int, directory: str) -> Tensor:
    """Return zeros, uint8 `[size]`, in a memory-mapped file. The file has no name, and disappears with the last tensor
    that uses it.

    Room for the file is reserved at once. Otherwise a full disk would end the process when a page is written.
    """
    try:
        with tempfile.NamedTemporaryFile(prefix="eigengraft-", suffix=".state", dir=directory) as file:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), 0, max(size, 1))
            return torch.from_file(file.name, shared=True, size=size, dtype=torch.uint8)
    except OSError as error:
        raise OSError(
            f"storage: no file of {size} bytes for offloaded state can be made in {directory}: {error.strerror}; set "
            "`directory` or TMPDIR to a directory with room"
        ) from error


@cache
def _madvise() -> ctypes._NamedFuncPointer:
    """Return the function madvise(2) of the C library, which advises the system about the future use of pages."""
    function = ctypes.CDLL(None).madvise
    function.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    return function
