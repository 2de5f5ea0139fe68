"""The small models of the tasks, and initial weights that are scaled by the inputs and outputs of their layer.

Every matrix is a parameter of its own, so that a preconditioner receives plain matrices.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Annotated, Literal, cast

import torch
from pydantic import AfterValidator, Field, ValidationInfo
from torch import Tensor, nn
from torch.nn import functional

from eigengraft.optimizers.recipe.routing import describe_model


def _divides_width(heads: int, info: ValidationInfo) -> int:
    width = info.data.get("width", heads)  # absent if it is invalid itself
    if width % heads:
        raise ValueError(f"must be a divisor of width {width}")
    return heads


HeadCount = Annotated[int, AfterValidator(_divides_width)]
"""Number of attention heads, a divisor of the field `width`, which a task declares before this field."""


class Attention(nn.Module):
    """Multi-head attention, [B, T, width] -> [B, T, width].

    A position attends to itself and to earlier positions (`causal`), or to all positions.
    """

    def __init__(self, width: int, heads: int, causal: bool = True) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width, bias=False)
        self.mix = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        """Return the attention of x [B, T, width] to other positions.

        memory: outputs of an encoder [B, S, width], to which x attends. None: x attends to itself.
        """
        seen = x if memory is None else memory
        query, key, value = (
            layer(given).unflatten(-1, (self.heads, -1)).transpose(1, 2)  # [B, heads, T, d]
            for layer, given in ((self.query, x), (self.key, seen), (self.value, seen))
        )
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        return cast(Tensor, self.mix(mixed.transpose(1, 2).flatten(2)))


class Block(nn.Module):
    """Pre-norm transformer block, [B, T, width] -> [B, T, width]. With `memory` it also attends to an encoder."""

    def __init__(self, width: int, heads: int, causal: bool = True, memory: bool = False) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads, causal)
        if memory:
            self.memory_norm, self.memory_attention = nn.LayerNorm(width), Attention(width, heads, causal=False)
        self.mlp_norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        """Return the outputs for x [B, T, width].

        memory: outputs of an encoder [B, S, width], in a block with memory. None: x attends only to itself.
        """
        x = x + self.attention(self.attention_norm(x))
        if memory is not None:
            x = x + self.memory_attention(self.memory_norm(x), memory)
        return cast(Tensor, x + self.down(functional.gelu(self.up(self.mlp_norm(x)))))


class GPT(nn.Module):
    """Decoder-only transformer over symbols, [B, T] -> logits [B, T, symbols], with learned positions."""

    def __init__(self, symbols: int, context: int, layers: int, width: int, heads: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(symbols, width)
        self.position = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, symbols, bias=False)
        for parameter in self.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02)
        for name, parameter in self.named_parameters():
            # The residual stream sums 2 * layers branches. The factor keeps its initial variance independent of depth.
            if name.endswith(("mix.weight", "down.weight")):
                nn.init.normal_(parameter, std=0.02 / (2 * layers) ** 0.5)

    def forward(self, symbols: Tensor) -> Tensor:
        positions = torch.arange(symbols.shape[1], device=symbols.device)
        x = self.embedding(symbols) + self.position(positions)
        return cast(Tensor, self.head(self.norm(self.blocks(x))))


def mlp(inputs: int, classes: int, layers: int, width: int) -> nn.Sequential:
    """Return an MLP with `layers` hidden layers and ReLU, from flattened inputs [B, ...] to logits [B, classes].

    inputs: number of entries of a flattened input.
    width: units of each hidden layer.
    """
    model = nn.Sequential(nn.Flatten())
    for index, (fan_in, fan_out) in enumerate(pairwise([inputs] + [width] * layers)):
        model.add_module(f"hidden{index}", nn.Linear(fan_in, fan_out))
        model.add_module(f"relu{index}", nn.ReLU())
    model.add_module("head", nn.Linear(width, classes))
    return model


def cnn(side: int, classes: int, layers: int, width: int) -> nn.Sequential:
    """Return a CNN with `layers` 3x3 convolutions and ReLU, 2x2 mean pooling and a linear head.

    Its inputs are images [B, 1, side, side], its outputs logits [B, classes]. Each convolution has `width` channels.
    """
    model = nn.Sequential()
    for index, (fan_in, fan_out) in enumerate(pairwise([1] + [width] * layers)):
        model.add_module(f"convolution{index}", nn.Conv2d(fan_in, fan_out, 3, padding=1))
        model.add_module(f"relu{index}", nn.ReLU())
    model.add_module("pool", nn.AvgPool2d(2))
    model.add_module("flatten", nn.Flatten())
    model.add_module("head", nn.Linear(width * (side // 2) ** 2, classes))
    return model


Init = Annotated[
    Literal["standard", "spectral"],
    Field(
        description="initial weights; standard: as torch draws them; spectral: with spectral norms that suit any width"
    ),
]
"""Rule for the initial weights of a task's model, see `initialized`."""


def initialized(model: nn.Module, init: Init) -> nn.Module:
    """Return the model with initial weights by the rule `init`.

    With `spectral` the weights are drawn by `spectral_init_`. With `standard` they stay as the modules have drawn them.
    """
    if init == "spectral":
        spectral_init_(model)
    return model


def spectral_init_(model: nn.Module) -> None:
    """W ~ N(0, s^2),  s = min(1, sqrt(m / n)) / sqrt(n)  for a matrix W with m outputs and n inputs

    Yang, Simon & Bernstein 2023, arXiv:2310.17813, Parametrization 1. The spectral norm of W is then of the order of
    sqrt(m / n). The rule depends on the role that the library finds for a parameter in the model. Hidden weights are
    drawn as above and embeddings from N(0, 1). Output heads (Yang et al. 2021, arXiv:2203.03466, appendix D.2) and
    biases are 0. Norms and other vectors are unchanged. Weights of convolutions count as matrices [m, product of the
    other axes]. Random numbers are drawn from torch's global generator.
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
