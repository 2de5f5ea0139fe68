"""Sets of parameters on which steps are measured, as shapes, with initial values and gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from eigengraft.errors import RecipeError, did_you_mean

Shapes = list[tuple[int, ...]]
TURNS = 8
"""Number of gradients that are used in turn. With a single gradient, statistics would have low rank."""


class ShapeSet(NamedTuple):
    """Shapes of parameters.

    name: name as it was declared.
    shapes: shape of each parameter.
    varied: the declared dimension, such as "layers"; "" for the default dimensions.
    value: the value of this dimension; 0 for the default dimensions.
    """

    name: str
    shapes: Shapes
    varied: str = ""
    value: int = 0

    @property
    def numbers(self) -> int:
        """Return the number of entries of all parameters."""
        return sum(map(math.prod, self.shapes))


def gpt(layers: int = 4, width: int = 256, vocabulary: int = 4096) -> Shapes:
    """Return the shapes of a GPT: an embedding and, in each layer, qkv, output, two MLP matrices, four norms."""
    w = width
    layer: Shapes = [(3 * w, w), (w, w), (4 * w, w), (w, 4 * w), (w,), (w,), (w,), (w,)]
    return [(vocabulary, w), *layers * layer, *2 * [(w,)]]


def convolutions() -> Shapes:
    """Return the shapes of a small ResNet: kernels, the norms after them, and the head."""
    kernels: Shapes = [(64, 3, 7, 7), *2 * [(64, 64, 3, 3)], (128, 64, 3, 3), (128, 128, 3, 3), (256, 128, 3, 3)]
    kernels += [(256, 256, 3, 3), (512, 256, 1, 1)]
    return [*kernels, *(norm for kernel in kernels for norm in 2 * [(kernel[0],)]), (10, 512), (10,)]


def matrices() -> Shapes:
    """Return the shapes of sixteen matrices of sides 256 and 512."""
    return [*8 * [(256, 256)], *4 * [(512, 256)], *4 * [(256, 512)]]


def squares(blocks: int = 256, size: int = 32) -> Shapes:
    """Return the shapes of many square matrices of one size."""
    return [(size, size) for _ in range(blocks)]


def embedding(rows: int = 50_000, width: int = 64) -> Shapes:
    """Return the shape of one long embedding."""
    return [(rows, width)]


def gpt2(layers: int = 12, width: int = 768, vocabulary: int = 50_257) -> Shapes:
    """Return the shapes of GPT-2 small with an untied head: 163 million numbers."""
    return [*gpt(layers, width, vocabulary), (1024, width), (vocabulary, width)]


SETS: Mapping[str, Callable[..., Shapes]] = {
    own.__name__: own for own in (gpt, convolutions, matrices, squares, embedding, gpt2)
}


def shape_set(name: str) -> ShapeSet:
    """Return the set that a name declares, such as "gpt", or "gpt:layers=8" with a value for one dimension."""
    kind, _, given = name.partition(":")
    dimension, _, number = given.partition("=")
    if kind not in SETS:
        hint = did_you_mean(kind, SETS)
        raise RecipeError(f"sets: '{kind}' is no set of shapes{hint} (the sets are {', '.join(SETS)})")
    if not given:
        return ShapeSet(name, SETS[kind]())
    known = SETS[kind].__annotations__.keys() - {"return"}
    if dimension not in known or not number.isdecimal() or int(number) == 0:
        options = ", ".join(f"{kind}:{own}=NUMBER" for own in sorted(known)) or f"{kind} alone"
        raise RecipeError(f"sets: '{name}' must set a dimension of {kind} to a whole number above 0; write {options}")
    return ShapeSet(name, SETS[kind](**{dimension: int(number)}), dimension, int(number))


def initial_values(shapes: Sequence[tuple[int, ...]], seed: int) -> list[Tensor]:
    """Draw parameters from N(0, 0.02^2)."""
    generator = torch.Generator().manual_seed(seed)
    return [0.02 * torch.randn(shape, generator=generator) for shape in shapes]


def turns_of_gradients(shapes: Sequence[tuple[int, ...]], seed: int) -> list[list[Tensor]]:
    """Draw TURNS gradients of each parameter from N(0, 1e-4). Row i and column i are then scaled by i^(-1/2)."""
    generator = torch.Generator().manual_seed(seed + 1)
    return [[_scaled(torch.randn(shape, generator=generator)) for shape in shapes] for _ in range(TURNS)]


def _scaled(x: Tensor) -> Tensor:
    for axis, d in enumerate(x.shape[:2]):
        x = x * torch.arange(1, d + 1).rsqrt().reshape(-1, *[1] * (x.ndim - 1 - axis))
    return 1e-2 * x
