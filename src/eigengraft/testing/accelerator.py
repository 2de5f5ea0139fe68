"""A simulated accelerator: its tensors claim to be on `cuda:0`, but all operations run on the CPU and are counted.

    with accelerator("cuda") as run:
        model.to(run.device)
        optimizer = eigengraft.compose("soap", model)
        ...
        with accelerator("cuda") as step:
            optimizer.step()
    step.waits, step.uploads, step.kernels, step.traffic    # totals
    step.by_line()                                          # the same by "file:line operation"

So a test suite without a GPU can check that steps stay on the device. Results have the bits of a run on a CPU, unless
the code branches on the type of the device. Like CUDA, the device refuses operations that mix devices, and the host
waits for values, for sizes that depend on values, and for copies from or to pageable memory. Time, the rounding of
CUDA's kernels and fragmented memory are not simulated. Delayed refreshes are computed at the step at which they are
due.

There are two kinds. With "cuda", code runs its branches for `device.type == "cuda"`. It has no backward, so gradients
must be assigned. A copy on a second stream runs only when the code waits for it. After the `with` statement, torch is
as before. With "sim", which uses torch's PrivateUse1, there are backward, hooks and autocast. It stays registered after
the `with` statement, and must be entered before the first backward of a process. Both kinds use names that are private
to torch; `missing_names` returns those that this version of torch lacks.
"""

from __future__ import annotations

import sys
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from threading import RLock, local
from typing import Any, Literal
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ..numerics import active_fake_mode
from . import device_costs as costs
from .device_registration import missing_names as missing_names
from .device_registration import register_sim, set_cuda_guard

AcceleratorKind = Literal["cuda", "sim"]


@dataclass(eq=False)
class LineCounts:
    """Device work that one line of code caused.

    waits: number of times that the host waited for the device.
    uploads, downloads: number of copies to and from the device, including copies without a wait.
    kernels: lower bound of the number of launched kernels.
    traffic: bytes of the tensors that kernels read and wrote.
    """

    waits: int = 0
    uploads: int = 0
    downloads: int = 0
    kernels: int = 0
    traffic: int = 0

    def add(self, waits: int = 0, uploads: int = 0, downloads: int = 0, kernels: int = 0, traffic: int = 0) -> None:
        """Add numbers to the fields of the same names."""
        self.waits += waits
        self.uploads += uploads
        self.downloads += downloads
        self.kernels += kernels
        self.traffic += traffic


@dataclass(eq=False)
class DeviceCounts(LineCounts):
    """Work that the code inside `with accelerator(...)` caused on the device.

    waits, uploads, downloads, kernels, traffic: as in `LineCounts`, for all lines together.
    device: device of the accelerator's tensors.
    live: bytes of all tensors on the device now, minus their bytes at the start of the `with` statement.
    peak: the largest value of `live`.
    lines: the waits, copies, kernels and bytes that each line of code caused, by (file, line number, operation).
    """

    device: torch.device = torch.device("cuda:0")
    live: int = 0
    peak: int = 0
    lines: dict[tuple[str, int, str], LineCounts] = field(default_factory=lambda: defaultdict(LineCounts), repr=False)

    def by_line(self, *names: str) -> dict[str, LineCounts]:
        """Return the waits, copies, kernels and bytes that each line of code caused, for each operation in the line.

        Args:
            names: fields of `LineCounts`, such as "waits". Only operations for which one of these fields is above 0 are
                returned. Without names, all are returned.

        Returns:
            The counts by "file:line operation", with most waits first.
        """
        found = defaultdict[str, LineCounts](LineCounts)
        for (file, line, operation), counts in self.lines.items():
            if not names or any(getattr(counts, name) for name in names):
                place = "/".join(Path(file).parts[-3:])
                found[f"{place}:{line} {operation}"].add(**vars(counts))
        return dict(sorted(found.items(), key=lambda item: (-item[1].waits, -item[1].kernels)))


@contextmanager
def accelerator(kind: AcceleratorKind = "cuda") -> Iterator[DeviceCounts]:
    """Enter a simulated accelerator, and count its work until the end of the `with` statement.

    The statement may be inside another one of the same kind. Both statements have the same device, and work in the
    inner statement is counted in both.

    Args:
        kind: "cuda", without backward, or "sim", with backward; see the module.

    Returns:
        A context manager that returns the counts.

    Raises:
        RuntimeError: a `with` statement of the other kind is open.
    """
    device = _Device.current
    if device is not None and device.place.type != kind:
        raise RuntimeError(
            f"accelerator: kind '{kind}' cannot be entered inside a block of kind '{device.place.type}'; "
            "leave that block first"
        )
    with ExitStack() as stack:
        if device is None:
            device = stack.enter_context(_Device(kind))
        counts = DeviceCounts(device=device.place)
        device.sections.append(counts)
        stack.callback(device.sections.remove, counts)
        yield counts


class SimulatedTensor(torch.Tensor):
    """A tensor on a simulated accelerator.

    host: CPU tensor with the numbers; views of the simulated tensor share its memory.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    host: Tensor
    _memory: _Memory

    @staticmethod
    def __new__(cls, host: Tensor, shares: SimulatedTensor | None = None) -> SimulatedTensor:
        """Make a tensor on the device of the entered accelerator.

        Args:
            host: a CPU tensor that requires no gradient.
            shares: a tensor on the device, if `host` is a view of its memory; else None.
        """
        device = _entered()
        make: Any = torch.Tensor._make_wrapper_subclass
        made: SimulatedTensor = make(
            cls,
            host.size(),
            strides=host.stride(),
            storage_offset=host.storage_offset(),
            dtype=host.dtype,
            device=device.place,
        )
        made.host, made._memory = host, _Memory(device, host) if shares is None else shares._memory
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        # the dispatch mode is called here, because modes are not active in the thread in which torch runs backward
        return _entered().__torch_dispatch__(func, types, args, kwargs)

    @property
    def data(self) -> Tensor:
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        if not isinstance(value, SimulatedTensor) or (value.shape, value.dtype) != (self.shape, self.dtype):
            raise TypeError(f"data of {self!r}: must be a tensor with the same device, shape and dtype, got {value!r}")
        self.host, self._memory = value.host, value._memory

    def data_ptr(self) -> int:
        """Return the address of the first entry."""
        return self.host.data_ptr()

    def numpy(self, *, force: bool = False) -> Any:
        if not force:
            raise TypeError(f"a tensor on the host is required, got one on {self.device}: call `.cpu()` first")
        return self.detach().cpu().numpy()

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def __repr__(self) -> str:  # type: ignore[override]
        return f"SimulatedTensor({tuple(self.shape)}, {self.dtype}, {self.device})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        made: Tensor = SimulatedTensor(self.host.clone())
        if isinstance(self, torch.nn.Parameter):
            made = torch.nn.Parameter(made, self.requires_grad)
        return memo.setdefault(id(self), made.requires_grad_(self.requires_grad))


class _Memory:
    """Counts the bytes of a tensor's storage as used memory, until the last tensor that shares it is deleted."""

    def __init__(self, device: _Device, host: Tensor) -> None:
        storage = host.untyped_storage()
        self.device, self.key, self.size = device, storage._cdata, storage.nbytes()
        others = device.held.get(self.key, 0)
        if others == 0:
            device.hold(self.size)
        device.held[self.key] = others + 1

    def __del__(self) -> None:
        others = self.device.held[self.key] - 1
        if others:
            self.device.held[self.key] = others
        else:
            del self.device.held[self.key]
            self.device.hold(-self.size)


class _Stream:
    """A replacement of `torch.cuda.Stream` that finds code which forgets to wait.

    A copy on a stream other than the first one runs only when the host, or another stream, waits for an event that was
    recorded after the copy. Code that does not wait therefore reads old numbers. All other work runs at once.
    """

    present = local()
    """Thread-local object. Its attribute `stream` is the current stream of the thread. If it is not set, `first` is the
    current stream."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        self.asked, self._done, self._waiting, self._lock = 0, 0, deque[Callable[[], Any]](), RLock()

    def add(self, work: Callable[[], Any]) -> None:
        """Add a function without arguments, such as a copy, to the end of the stream. It runs after all earlier ones.

        work: the function.
        """
        self._waiting.append(work)
        self.asked += 1

    def run(self, number: int) -> None:
        """Run the functions that were added to the stream, up to the one with this number, if they have not run yet.

        number: number of a function, counted from 1 since the stream was made.
        """
        with self._lock:
            while self._done < number:
                self._done += 1
                self._waiting.popleft()()

    def wait_event(self, event: _Event) -> None:
        if self is _Stream.first:
            event.run()
        else:
            self.add(event.run)

    @staticmethod
    def current(*device: object) -> _Stream:
        found: _Stream = getattr(_Stream.present, "stream", _Stream.first)
        return found

    @staticmethod
    @contextmanager
    def enter(stream: _Stream) -> Iterator[None]:
        before, _Stream.present.stream = _Stream.current(), stream
        try:
            yield
        finally:
            _Stream.present.stream = before

    first: _Stream


_Stream.first = _Stream()


class _Event:
    """A replacement of `torch.cuda.Event`.

    A wait of the host for an event is counted only while the innermost open `with accelerator(...)` statement is the
    one in which the event was recorded. In any other statement, the event counts as already reached, and nothing is
    counted.
    """

    def __init__(self, *args: object, **kwargs: object) -> None:
        self._section: DeviceCounts | None = None
        self._stream, self._number = _Stream.first, 0

    def record(self, stream: _Stream | None = None) -> None:
        self._section, self._stream = _entered().sections[-1], stream or _Stream.current()
        self._number = self._stream.asked

    def run(self) -> None:
        """Run all functions that were added to the stream before the event was recorded, if they have not run yet."""
        self._stream.run(self._number)

    def query(self) -> bool:
        return self._section is not _entered().sections[-1]

    def synchronize(self) -> None:
        if not self.query():
            _entered().note("Event.synchronize", waits=1)
        self.run()


def _cuda_answers() -> dict[str, Any]:
    """Return the functions that replace attributes of `torch.cuda` inside `with accelerator("cuda")`, by name."""
    wait = mock.Mock(side_effect=lambda *device: _entered().note("synchronize", waits=1))
    answers = {"is_available": True, "is_bf16_supported": True, "device_count": 1, "current_device": 0}
    values = {name: mock.Mock(return_value=value) for name, value in (answers | {"_lazy_init": None}).items()}
    streams = {"Stream": _Stream, "current_stream": _Stream.current, "stream": _Stream.enter}
    return {**values, **streams, "synchronize": wait, "Event": _Event}


class _Device(TorchDispatchMode):
    """The dispatch mode of a simulated accelerator. It runs each operation on the CPU and counts its cost.

    sections: for each `with` statement that is open, the kernels, waits and bytes counted in it; the innermost last.
    held: number of tensors that share each storage.
    """

    current: _Device | None = None

    def __init__(self, kind: AcceleratorKind) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        if kind == "sim":
            register_sim()
        self.kind, self.place = kind, torch.device(f"{kind}:0")
        self.sections, self.held = list[DeviceCounts](), dict[int, int]()

    def __enter__(self) -> _Device:
        with ExitStack() as stack:
            if self.kind == "cuda":
                from ..optimizers.stacks.delayed import SIDE_STREAMS

                stack.enter_context(mock.patch.dict(SIDE_STREAMS, clear=True))
                set_cuda_guard(stack)
                stack.enter_context(mock.patch.multiple(torch.cuda, **_cuda_answers()))
            # with this setting `model.to(device)` keeps the parameter objects
            swapping = torch.__future__.get_swap_module_params_on_conversion()
            stack.callback(torch.__future__.set_swap_module_params_on_conversion, swapping)
            torch.__future__.set_swap_module_params_on_conversion(True)
            # with this setting `torch.tensor(..., device=device)` makes a CPU tensor first, whose copy is counted
            stack.callback(torch._C._set_only_lift_cpu_tensors, torch._C._only_lift_cpu_tensors())
            torch._C._set_only_lift_cpu_tensors(True)
            stack.enter_context(mock.patch.object(_Device, "current", self))
            super().__enter__()  # type: ignore[no-untyped-call]
            self._undo = stack.pop_all()
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)  # type: ignore[no-untyped-call]
        self._undo.close()

    def hold(self, size: int) -> None:
        """Add `size` to the bytes in use, `DeviceCounts.live`, of all `with accelerator(...)` statements that are open.

        size: number of bytes that are allocated; negative if they are freed.
        """
        for counts in self.sections:
            counts.live = live = counts.live + size
            if live > counts.peak:
                counts.peak = live

    def note(
        self, operation: str, waits: int = 0, uploads: int = 0, downloads: int = 0, kernels: int = 0, traffic: int = 0
    ) -> None:
        """Add device work to the counts of all `with accelerator(...)` statements that are open.

        The work is also counted for the line of code that runs, in `DeviceCounts.lines`.

        operation: name of the operation that causes the work.
        waits, uploads, downloads, kernels: numbers of events, as in `LineCounts`.
        traffic: bytes that kernels read and write.
        """
        line = (*_site(), operation)
        for counts in self.sections:
            counts.add(waits, uploads, downloads, kernels, traffic)
            counts.lines[line].add(waits, uploads, downloads, kernels, traffic)

    def launch(self, operation: str, kernels: int, traffic: int) -> None:
        """Add launched kernels and their traffic. This is a short form of `note`, without waits and copies.

        operation: name of the operation that launches the kernels.
        kernels: number of kernels.
        traffic: bytes that the kernels read and write.
        """
        line = (*_site(), operation)
        for counts in self.sections:
            for each in (counts, counts.lines[line]):
                each.kernels += kernels
                each.traffic += traffic

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = costs.name_of(func)
        # under `FakeTensorMode` the operation runs on fake tensors, which have this device and need no simulation
        if (fake := active_fake_mode()) is not None:
            given = args, kwargs or {}
            known = _mapped(lambda x: fake.from_tensor(x) if isinstance(x, SimulatedTensor) else x, given)
            return func(*known[0], **known[1])
        tensors: list[Tensor] = []
        hosts: list[Tensor] = []
        target, plain_kwargs = None, {}
        plain_args = _on_host(args, tensors, hosts)
        if kwargs:
            plain_kwargs = dict(zip(kwargs, _on_host(kwargs.values(), tensors, hosts), strict=True))
            # pin_memory is ignored, because memory cannot be pinned without a device
            plain_kwargs.pop("pin_memory", None)
            if plain_kwargs.get("device") is not None:
                target = torch.device(plain_kwargs["device"]).type
        here = target == self.kind
        own = [x for x, host in zip(tensors, hosts, strict=True) if x is not host]
        if not own and not here:
            if name in ("_pin_memory", "is_pinned"):
                return args[0].clone() if name == "_pin_memory" else False
            return func(*args, **plain_kwargs)
        copies = name in _COPIES and self._copies(name, args, plain_kwargs, (own, tensors), target)
        if not copies and (name in _CHECKED or len(own) < len(tensors)):
            self._require_one_device(name, args, own, tensors)
        if here:
            plain_kwargs["device"] = _HOST
        if copies and name == "copy_" and (stream := _Stream.current()) is not _Stream.first:
            stream.add(lambda: func(*plain_args, **plain_kwargs))
            return args[0]
        result = found = _computed(func, name, plain_args, plain_kwargs)
        stored: list[Tensor] = []
        if found is not None and (here or (target is None and name != "_local_scalar_dense")):
            shares: Any = own[0] if own and func.is_view else None
            known = dict(zip(map(id, hosts), tensors, strict=True))

            def on_device(x: Tensor) -> Tensor:
                made = known.get(id(x))
                if made is None:
                    made = SimulatedTensor(x, shares)
                if made is not x:
                    stored.append(made)
                return made

            result = on_device(found) if isinstance(found, Tensor) else _mapped(on_device, found)
        if not copies and (launched := costs.launched_kernels(func, plain_args)):
            self.launch(name, launched, costs.traffic(own, stored))
        return result

    def _copies(self, name: str, args: Any, kwargs: Any, tensors: tuple[Any, Any], target: str | None) -> bool:
        """Return True if an operation is a copy between host and device, and count the copy.

        name: name of the operation.
        args, kwargs: its arguments.
        tensors: (tensors on the device, all tensors) among the arguments.
        target: type of the device in the argument `device`; None: the operation has no such argument.
        """
        own, given = tensors
        up = not own if name == "_to_copy" else isinstance(tensors_in(args[:1])[0], SimulatedTensor) if given else False
        if name == "_to_copy":
            if target is None or (target == self.kind) is not up:
                return False
        elif name not in ("copy_", "_foreach_copy_") or len(own) == len(given) or not own:
            return False
        blocking = not (kwargs.get("non_blocking") or (len(args) > 2 and args[2]))
        times = len(args[0]) if name == "_foreach_copy_" else 1
        self.note(name, waits=times * blocking, **{"uploads" if up else "downloads": times})
        return True

    def _require_one_device(self, name: str, args: Any, own: Any, tensors: Any) -> None:
        """Raise RuntimeError if an operation mixes tensors of the host and the device in a way that CUDA refuses.

        Otherwise count the waits that the operation causes.

        name: name of the operation.
        args: its positional arguments.
        own: the tensors on the device among its arguments.
        tensors: all tensors among its arguments.
        """
        indices = tensors_in(args[1]) if name in costs.INDEXING else []
        for index in indices:
            if not isinstance(index, SimulatedTensor):
                self.note(f"{name} by indices of the host", waits=1, uploads=1)
            if costs.is_mask(index):
                self.note(f"{name} by a mask", waits=1)
        foreign = [x for x in tensors if own and not isinstance(x, SimulatedTensor)]
        if name == "where" and foreign:
            self.note("where with a number of the host", waits=1, uploads=1)
        if name in costs.WAITING:
            self.note(name, waits=1)
        foreign = [x for x in foreign if not any(x is index for index in indices)]
        if wrong := [tuple(x.shape) for x in foreign if x.ndim or name in costs.ONE_DEVICE]:
            raise RuntimeError(
                f"{name}: expected all tensors to be on the same device, got {self.place} and cpu (shapes {wrong})"
            )


def _entered() -> _Device:
    if _Device.current is None:
        raise RuntimeError(
            "a tensor of a simulated accelerator is used outside of `with accelerator(...)`; move it inside"
        )
    return _Device.current


def _on_host(items: Iterable[Any], tensors: list[Tensor], hosts: list[Tensor]) -> list[Any]:
    """Return arguments with the CPU tensor in place of each simulated tensor, also inside lists, tuples and dicts.

    Args:
        items: the arguments.
        tensors: list to which all tensors among the arguments are appended.
        hosts: list to which the CPU tensors that replace them are appended. A tensor of the host replaces itself.
    """
    made = []
    for x in items:
        kind = type(x)
        if kind is SimulatedTensor:
            tensors.append(x)
            hosts.append(x := x.host)
        elif kind in _NUMBERS:
            pass
        elif isinstance(x, Tensor):
            tensors.append(x)
            hosts.append(x)
        elif isinstance(x, (tuple, list)):
            x = kind(_on_host(x, tensors, hosts))
        elif isinstance(x, dict):
            x = dict(zip(x, _on_host(x.values(), tensors, hosts), strict=True))
        made.append(x)
    return made


def _computed(func: Any, name: str, args: Any, kwargs: Any) -> Any:
    """Return the result of an operation on the CPU.

    Products in low precision with sums in float32 exist only on CUDA, so they are computed from float32 copies.

    Args:
        func: the operation.
        name: its name without that of the overload.
        args: its positional arguments, with tensors on the CPU.
        kwargs: its keyword arguments.
    """
    if name == "bmm" and func._overloadname == "dtype":
        return torch.bmm(args[0].float(), args[1].float()).to(args[2])
    return func(*args, **kwargs)


def tensors_in(x: Any) -> list[Tensor]:
    """Return all tensors among the arguments or results of an operation."""
    found = list[Tensor]()
    _collect((x,), found)
    return found


def _collect(items: Iterable[Any], found: list[Tensor]) -> None:
    """Append to a list all tensors among items, also those inside lists, tuples and dicts."""
    for item in items:
        if isinstance(item, Tensor):
            found.append(item)
        elif isinstance(item, (tuple, list)):
            _collect(item, found)
        elif isinstance(item, dict):
            _collect(item.values(), found)


def _mapped(function: Callable[[Tensor], Any], x: Any) -> Any:
    """Return arguments or results with function(tensor) in place of each tensor, also inside lists, tuples, dicts."""
    if isinstance(x, Tensor):
        return function(x)
    if isinstance(x, (tuple, list)):
        return type(x)(_mapped(function, item) for item in x)
    return {key: _mapped(function, item) for key, item in x.items()} if isinstance(x, dict) else x


_COPIES = {"copy_", "_foreach_copy_", "_to_copy"}
"""Operations that may copy between host and device."""
_CHECKED = costs.INDEXING | costs.WAITING
"""Operations that may wait although all of their tensors are on the device."""
_NUMBERS = {int, float, bool, complex, type(None), str, torch.dtype, torch.device, torch.layout, torch.memory_format}
"""Types of arguments that hold no tensor."""
_HOST = torch.device("cpu")
_OWN_FILES = (__file__, costs.__file__, mock.__file__)


def _site() -> tuple[str, int]:
    """Return the file and the line of the innermost function call outside of torch and of this file."""
    frame: Any = sys._getframe(1)
    while _is_inner(file := frame.f_code.co_filename) and frame.f_back is not None:
        frame = frame.f_back
    return file, frame.f_lineno


@cache
def _is_inner(file: str) -> bool:
    return file in _OWN_FILES or "/torch/" in file or file.startswith("<")
