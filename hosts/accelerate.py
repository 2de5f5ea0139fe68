"""Hugging Face's accelerate: checkpoints of optimizers that divide replicated parameters over processes."""

from __future__ import annotations

from typing import Any

from accelerate import Accelerator
from torch.utils.hooks import RemovableHandle

from eigengraft import Optimizer


def consolidate_on_save(accelerator: Accelerator, *optimizers: Any) -> RemovableHandle:
    """Makes `accelerator.save_state` gather the state of optimizers first, of which it asks the main process alone.

    Needed with DDP; one process and FSDP2 do without. Steps of optimizers that all processes share are divided.

    optimizers: default those that the accelerator has prepared; others than eigengraft's are left alone.
    """

    def gather(*_: Any) -> None:
        for optimizer in optimizers or accelerator._optimizers:
            own = getattr(optimizer, "optimizer", optimizer)
            if isinstance(own, Optimizer):
                own.consolidate_state_dict()

    handle: RemovableHandle = accelerator.register_save_state_pre_hook(gather)
    return handle
