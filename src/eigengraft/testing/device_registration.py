"""Registration of the simulated accelerator with torch, by names that are private to torch: guards, hooks, autocast."""

from __future__ import annotations

import ctypes
from contextlib import ExitStack
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

PRIVATE_NAMES = (
    "torch._C._set_only_lift_cpu_tensors",
    "torch._C._only_lift_cpu_tensors",
    "torch._C._autograd.DeviceType",
    "torch._C._disabled_torch_function_impl",
    "torch._C._acc.DeviceGuard",
    "torch._C._acc.register_python_privateuseone_device_guard",
    "torch._C._ensureCUDADeviceGuardSet",
    "torch._C._ExcludeDispatchKeyGuard",
    "torch.Tensor._make_wrapper_subclass",
    "torch.ops.aten.view.default.is_view",
    "torch.__future__.set_swap_module_params_on_conversion",
    "torch.utils.backend_registration._setup_privateuseone_for_python_backend",
    "torch.cuda._lazy_init",
)
_GUARDS = "_ZN3c104impl26device_guard_impl_registryE"
"""Mangled name of c10::impl::device_guard_impl_registry, the table of device guards by type of device."""
_AUTOCAST = "AutocastPrivateUse1"
_KEPT: list[Any] = []
"""Device guards and registrations of operators, which must stay alive because torch has their addresses."""
_TORCH: Any = torch
"""The module torch as an untyped object, because torch's type annotations lack some private names."""


def missing_names() -> list[str]:
    """Return the private names that the simulated accelerator needs and this version of torch does not have."""
    missing = []
    for name in PRIVATE_NAMES:
        own: Any = torch
        for part in name.split(".")[1:]:
            own = getattr(own, part, None)
        if own is None:
            missing.append(name)
    try:
        _guard_table()
    except (AttributeError, OSError, ValueError, StopIteration):
        missing.append(f"{_GUARDS} in libc10")
    return missing


def set_cuda_guard(stack: ExitStack) -> None:
    """Register a device guard for CUDA that does nothing. It stays registered until the exit callbacks of `stack` run.

    Without a guard, operations on tensors that claim to be on CUDA fail, even `x[0]`. If torch is built for CUDA,
    torch's own guard is used.
    """
    if _TORCH.backends.cuda.is_built():
        _TORCH._C._ensureCUDADeviceGuardSet()
        return
    table, cuda = _guard_table(), _device_types()[1]
    stack.callback(table.__setitem__, cuda, table[cuda])
    table[cuda] = _cuda_guard()


@cache
def _guard_table() -> Any:
    library = next((Path(torch.__file__).parent / "lib").glob("*c10.*"))
    return (ctypes.c_void_p * (max(_device_types()) + 1)).in_dll(ctypes.CDLL(str(library)), _GUARDS)


def _device_types() -> tuple[int, int]:
    """Return the numbers of the device types PrivateUse1 and CUDA."""
    types = _TORCH._C._autograd.DeviceType
    return int(types.PrivateUse1), int(types.CUDA)


@cache
def _cuda_guard() -> Any:
    """Make a guard for CUDA and return its address.

    torch lets Python register a guard only for PrivateUse1. So this function registers one for PrivateUse1, takes its
    address, and restores the guard that was there before.
    """
    private, table, own = _TORCH._C._acc, _guard_table(), _device_types()[0]
    type_of_device = _TORCH._C._autograd.DeviceType.CUDA
    guard = type("Guard", (private.DeviceGuard,), {"type_": lambda self: type_of_device})()
    before = table[own]
    private.register_python_privateuseone_device_guard(guard)
    address, table[own] = table[own], before
    _KEPT.append(guard)
    return address


@cache
def register_sim() -> None:
    """Register the device "sim" with torch permanently: its guard, its hooks, and autocast for products of matrices."""
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

    _setup_privateuseone_for_python_backend("sim")
    _TORCH.sim.get_amp_supported_dtype = lambda: [torch.float16, torch.bfloat16]
    others, products = _TORCH.library.Library("_", "IMPL"), _TORCH.library.Library("aten", "IMPL")
    others.fallback(torch.library.fallthrough_kernel, _AUTOCAST)
    for name in ("linear", "matmul", "mm", "addmm", "bmm"):
        products.impl(name, partial(_autocast, getattr(torch.ops.aten, name)), _AUTOCAST)
    _KEPT.extend((others, products))


def _autocast(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Cast the arguments in float32 to autocast's dtype, and call a function with them. Autocast is off during the
    call.
    """
    dtype = torch.get_autocast_dtype("sim")
    cast = [x.to(dtype) if isinstance(x, Tensor) and x.dtype == torch.float32 else x for x in args]
    with _TORCH._C._ExcludeDispatchKeyGuard(_TORCH._C.DispatchKeySet(getattr(_TORCH._C.DispatchKey, _AUTOCAST))):
        return function(*cast, **kwargs)
