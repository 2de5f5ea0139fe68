"""Products in bfloat16, on devices with instructions for them and without."""

from __future__ import annotations

import platform

import torch
from torch import Tensor


def has_fast_bfloat16(device: torch.device) -> bool | None:
    """Whether a device multiplies matrices in bfloat16 by instructions of its own; None: nobody says."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    return _cpu_has_bfloat16() if device.type == "cpu" else None


def _cpu_has_bfloat16() -> bool:
    if platform.machine().lower() in ("aarch64", "arm64"):
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return bool(torch.cpu._is_avx512_bf16_supported())


def multiplied_in_float32(x: Tensor) -> bool:
    """Whether products of x, in bfloat16, are to be taken in float32 and rounded: on a CPU without instructions for
    bfloat16 torch multiplies 50 times as long, for the same sums in float32 in another order."""
    return x.dtype == torch.bfloat16 and x.device.type == "cpu" and not _cpu_has_bfloat16()
