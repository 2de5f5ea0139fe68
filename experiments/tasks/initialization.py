"""Initial weights whose sizes suit every width, which learning rates that carry over need."""

from __future__ import annotations

import math
from typing import Literal

from torch import nn

from eigengraft.optimizers.recipe.routing import describe_model

Init = Literal["standard", "spectral"]


def initialized(model: nn.Module, init: Init) -> nn.Module:
    """The model with initial weights as its modules draw them, or with `spectral_init_`."""
    if init == "spectral":
        spectral_init_(model)
    return model


def spectral_init_(model: nn.Module) -> None:
    """W ~ N(0, s^2),  s = min(1, sqrt(m / n)) / sqrt(n)  for a matrix with m outputs and n inputs: outputs of size 1.

    Yang, Simon & Bernstein 2023, arXiv:2310.17813, Parametrization 1. By roles, as routes know them: hidden weights as
    above, embeddings N(0, 1), output heads 0 (Yang et al. 2021, arXiv:2203.03466, appendix D.2), biases 0; norms and
    other vectors stay. Weights of convolutions count as [m, the rest]. Draws from torch's global generator.
    """
    described = describe_model(model)
    for parameter in model.parameters():
        role = described[id(parameter)].role
        if role == "embedding":
            nn.init.normal_(parameter)
        elif role in ("head", "bias"):
            nn.init.zeros_(parameter)
        elif role == "hidden":
            m, n = parameter.shape[0], math.prod(parameter.shape[1:])
            nn.init.normal_(parameter, std=min(1.0, math.sqrt(m / n)) / math.sqrt(n))
