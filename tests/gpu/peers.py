"""Optimizers of other libraries that `report.py` measures and that take more than a class and options to make."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import Parameter


class TorchMuon:
    """torch's Muon for hidden matrices and its fused AdamW for the rest, as the recipe `muon` divides a GPT-2."""

    def __init__(self, parameters: Sequence[Parameter]) -> None:
        hidden = [own for own in parameters[2:] if own.ndim == 2]  # the first two are embeddings
        rest = [own for own in parameters if not any(own is matrix for matrix in hidden)]
        self.parts = torch.optim.Muon(hidden, lr=1e-3), torch.optim.AdamW(rest, fused=True)

    def step(self) -> None:
        for part in self.parts:
            part.step()


class Shampoo:
    """Distributed Shampoo grafted from Adam, with the numbers of the recipe `shampoo`."""

    def __init__(self, parameters: Sequence[Parameter]) -> None:
        from distributed_shampoo import AdamPreconditionerConfig, DistributedShampoo

        magnitude = AdamPreconditionerConfig(beta2=0.95, epsilon=1e-8)
        options = {"max_preconditioner_dim": 1024, "precondition_frequency": 10, "start_preconditioning_step": 10}
        self.optimizer = DistributedShampoo(
            parameters, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.01, grafting_config=magnitude, **options
        )

    def step(self) -> None:
        self.optimizer.step()
