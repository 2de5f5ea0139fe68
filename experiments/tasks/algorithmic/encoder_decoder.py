"""A transformer that reads one sequence and writes another."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..models import Attention, Block


class DecoderBlock(nn.Module):
    """Pre-norm block that attends to itself and to a memory, [B, T, width], [B, S, width] -> [B, T, width]."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention_norm, self.attention = nn.LayerNorm(width), Attention(width, heads)
        self.memory_norm, self.memory_attention = nn.LayerNorm(width), Attention(width, heads, causal=False)
        self.mlp_norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        x = x + self.memory_attention(self.memory_norm(x), memory)
        return cast(Tensor, x + self.down(functional.gelu(self.up(self.mlp_norm(x)))))


class EncoderDecoder(nn.Module):
    """Encoder and decoder of n symbols each, [B, 2 n] -> logits [B, n, symbols], with learned positions.

    The first n columns are read, the others are the symbols before each one that is written, from a start symbol on.
    """

    def __init__(self, symbols: int, length: int, layers: int, width: int, heads: int) -> None:
        super().__init__()
        self.length = length
        self.embedding = nn.Embedding(symbols + 1, width)
        self.position = nn.Embedding(2 * length, width)
        self.encoder = nn.Sequential(*(Block(width, heads, causal=False) for _ in range(layers)))
        self.encoder_norm = nn.LayerNorm(width)
        self.decoder = nn.ModuleList(DecoderBlock(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, symbols, bias=False)
        for parameter in self.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, symbols: Tensor) -> Tensor:
        embedded = self.embedding(symbols) + self.position(torch.arange(symbols.shape[1], device=symbols.device))
        memory = self.encoder_norm(self.encoder(embedded[:, : self.length]))
        x = embedded[:, self.length :]
        for block in self.decoder:
            x = block(x, memory)
        return cast(Tensor, self.head(self.norm(x)))
