"""Hugging Face's accelerate: complete checkpoints of optimizers whose state is split over the processes of DDP."""

from __future__ import annotations

from typing import Any

from accelerate import Accelerator
from torch.utils.hooks import RemovableHandle

from eigengraft import Optimizer


def consolidate_on_save(accelerator: Accelerator, *optimizers: Any) -> RemovableHandle:
    """Make `accelerator.save_state` gather the state of optimizers first.

    With DDP each process holds the state of the blocks that it owns, but accelerate saves only the state of the main
    process. Call this function with DDP. It is not needed for a single process or for FSDP2.

    Args:
        accelerator: the accelerator.
        optimizers: the optimizers. If none are given, all optimizers that the accelerator has prepared are used.
            Optimizers of other libraries are skipped.

    Returns:
        A handle whose `remove()` undoes the registration.
    """

    def gather(*_: Any) -> None:
        for optimizer in optimizers or accelerator._optimizers:
            own = getattr(optimizer, "optimizer", optimizer)
            if isinstance(own, Optimizer):
                own.consolidate_state_dict()

    handle: RemovableHandle = accelerator.register_save_state_pre_hook(gather)
    return handle
