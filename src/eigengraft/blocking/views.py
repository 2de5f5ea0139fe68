"""Views: rules that say which entries of a parameter form a matrix.

A parameter is divided by its view before it is cut into blocks. Two parameters whose product is one matrix, such as the
factors of LoRA, are a pair. A factor knows its partner by name.
"""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from eigengraft.component import Component

PAIR_NAMES = (
    ("lora_A", "lora_B"),
    ("lora_a", "lora_b"),
    ("lora_down", "lora_up"),
    ("lora_embedding_A", "lora_embedding_B"),
)
"""Parts of dotted names by which a pair is recognised: of the factor `[r, n]`, and of the factor `[m, r]`."""


@dataclass(frozen=True)
class Factor:
    """One factor of a product B A, with A `[r, n]` of inputs and B `[m, r]` of outputs.

    side: "inputs" for A, "outputs" for B.
    partner: qualified name of the other factor.
    """

    side: Literal["inputs", "outputs"]
    partner: str

    def tall(self, partner: Tensor) -> Tensor:
        """Return the partner with the shared axis last, as a view: `[m, r]` for B, `[n, r]` for A."""
        return partner if self.side == "inputs" else partner.mT


def named_factor(name: str | None) -> Factor | None:
    """Return the factor that a qualified name stands for; None if it is not the name of a factor."""
    parts = [] if name is None else name.split(".")
    for inputs, outputs in PAIR_NAMES:
        if inputs in parts:
            return Factor("inputs", ".".join(outputs if part == inputs else part for part in parts))
        if outputs in parts:
            return Factor("outputs", ".".join(inputs if part == outputs else part for part in parts))
    return None


def stacked_rows(matrices: Mapping[int, Tensor], positions: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return the matrices `[p_i, r]` at N positions as `[N, p, r]`; shorter ones are filled up with zeros.

    matrices: the matrices, by position.
    """
    tensors = [matrices[position] for position in positions]
    longest = max(len(tensor) for tensor in tensors)
    out = torch.zeros((len(tensors), longest, tensors[0].shape[-1]), dtype=dtype, device=tensors[0].device)
    for row, tensor in zip(out, tensors, strict=True):
        row[: len(tensor)] = tensor
    return out


KERNEL = 16
"""Longest kernel of a convolution, in entries of an axis, where no module is known. A tensor whose axes after the
second are at most this long counts as a convolution's weight. Kernels of 7 to 13 are in use, and no batch of matrices
this small."""


class View(Component, ABC, family="view"):
    """A rule that says which entries of a parameter form a matrix, by the shape of the full parameter."""

    @abstractmethod
    def of(self, shape: tuple[int, ...], facts: ModuleFacts) -> ViewChoice:
        """Return the matrices of a parameter of that shape. Raises ValueError if the rule does not fit the parameter.

        facts: what the modules of the model say about the parameter.
        """


class Matrices(View):
    """A parameter `[*batch, m, n]` as matrices: one for each index of `batch`, each section of the outputs, each head.

    m counts outputs and n inputs, as in torch.nn.Linear. Grafting, scale rules and blocking see each matrix as if it
    were a parameter of its own. Without any field the parameter is one tensor.
    """

    kind: Literal["matrices"] = "matrices"
    batch: int = Field(
        default=0, ge=0, description="number of leading axes, every index of which has a matrix of its own (experts)"
    )
    outputs: Literal["first", "last"] = Field(
        default="first",
        description="which axis after the batch holds the outputs; last: the matrix is transposed, as GPT-2's Conv1D "
        "stores it",
    )
    side: Literal["outputs", "inputs"] = Field(
        default="outputs", description="the axis that is divided into sections and heads"
    )
    sections: tuple[int, ...] = Field(
        default=(),
        strict=False,
        description="lengths of the parts of a fused projection, such as queries, keys and values, in one group",
    )
    groups: int = Field(
        default=1, ge=1, description="how often the sections follow each other: 1, or once for each group of heads"
    )
    heads: int | Annotated[tuple[int, ...], Field(strict=False)] | None = Field(
        default=None,
        description="length of a head, or of a head of each section, 0 for sections without heads; default: no heads",
    )

    @model_validator(mode="after")
    def _options_matter(self) -> Self:
        if len(self.sections) == 1 or any(length < 1 for length in self.sections):
            raise ValueError(f"sections: at least two lengths of at least 1 are required, got {self.sections}")
        if self.groups > 1 and not self.sections:
            raise ValueError(f"groups: there are no sections to repeat, got groups {self.groups}; set `sections`")
        if self.side == "inputs" and not self.sections and not self.heads:
            raise ValueError("side: has no effect without sections or heads, got 'inputs'; set `sections` or `heads`")
        parts = max(len(self.sections), 1)
        if isinstance(self.heads, tuple) and (len(self.heads) != parts or not any(self.heads)):
            raise ValueError(f"heads: a length for each of {parts} sections is required, got {self.heads}")
        if any(length < 0 for length in self.head_lengths) or self.heads == 0:
            raise ValueError(f"heads: positive lengths are required, got {self.heads}")
        return self

    def __hash__(self) -> int:
        return hash((self.batch, self.outputs, self.side, self.sections, self.groups, self.heads))

    @property
    def head_lengths(self) -> tuple[int, ...]:
        """Length of a head of each section; 0: the section has no heads."""
        if isinstance(self.heads, tuple):
            return self.heads
        return (self.heads or 0,) * max(len(self.sections), 1)

    @property
    def divides(self) -> bool:
        """True if an axis is divided into sections or heads."""
        return bool(self.sections) or self.heads is not None

    def axis(self, shape: tuple[int, ...]) -> int:
        """Return the axis of a parameter that is divided into sections and heads."""
        first = (self.outputs == "first") == (self.side == "outputs")
        return self.batch if first else len(shape) - 1

    def parts(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the lengths of the sections in one group; the length of the axis if there are no sections."""
        return self.sections or (shape[self.axis(shape)],)

    def matrix_axes(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the axes of a parameter that a matrix is made of, outputs first."""
        axes = tuple(range(self.batch, len(shape)))
        return axes if self.outputs == "first" else (axes[-1], *axes[:-1])

    def require_fit(self, shape: tuple[int, ...]) -> None:
        """Raise ValueError if a parameter of that shape does not have these matrices."""
        least = self.batch + (2 if self.divides or self.outputs == "last" else min(self.batch, 1))
        if len(shape) < least:
            raise ValueError(f"view: at least {least} axes are required by {self.fields()}, got shape {shape}")
        if not self.divides:
            return
        length = shape[self.axis(shape)]
        if sum(self.parts(shape)) * self.groups != length:
            raise ValueError(
                f"view: the sum of sections {self.sections} times groups {self.groups} must be the length {length} of "
                f"axis {self.axis(shape)} of shape {shape}"
            )
        for part, head in zip(self.parts(shape), self.head_lengths, strict=True):
            if head and part % head:
                raise ValueError(
                    f"view: heads of length {head} must divide {part}, the length of a section of axis "
                    f"{self.axis(shape)} of shape {shape}"
                )

    def of(self, shape: tuple[int, ...], facts: ModuleFacts) -> ViewChoice:
        self.require_fit(shape)
        return ViewChoice(self, "as the recipe says")

    def fields(self) -> str:
        """Return the fields that are not at their default, as a recipe would write them."""
        set_ = {name: value for name, value in self if value != type(self).model_fields[name].default}
        return ", ".join(f"{name}: {value}" for name, value in set_.items()) or "the parameter as it is"

    def counted(self, shape: tuple[int, ...]) -> dict[tuple[int, ...], int]:
        """Return the number of matrices of each shape that a parameter has before blocking."""
        return dict(Counter(self.each(shape)))

    def each(self, shape: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        """Yield the shape of each matrix of a parameter, outputs first, in the order of their numbers."""
        for part, head in zip(self.parts(shape), self.head_lengths, strict=True):
            lengths = {self.axis(shape): (head or part * self.groups)} if self.divides else {}
            matrix = tuple(lengths.get(axis, shape[axis]) for axis in self.matrix_axes(shape))
            count = math.prod(shape[: self.batch]) * (part * self.groups // head if head else 1)
            yield from itertools.repeat(matrix, count)


class ViewChoice(NamedTuple):
    """The matrices of one parameter, and the reason.

    matrices: which entries form a matrix.
    why: the reason; "" if there was nothing to decide.
    decided: True if the matrices are more than a guess from the shape. Stages that need matrices refuse a guess.
    """

    matrices: Matrices
    why: str = ""
    decided: bool = True

    def required_by(self, path: str | None, shape: tuple[int, ...]) -> Self:
        """Return this choice. Raises ValueError if it is a guess and a stage needs matrices.

        path: path of a stage that needs matrices; None: there is none.
        shape: shape of the parameter.
        """
        if path is not None and not self.decided:
            raise ValueError(
                f"{path}: needs matrices, and a tensor of shape {shape} without its module may be a convolution or a "
                "batch of matrices; use eigengraft.compose(recipe, model), or say `view: whole` "
                f"(a convolution) or `view: {{kind: matrices, batch: {len(shape) - 2}}}` in a route"
            )
        return self

    def describe(self, shape: tuple[int, ...]) -> str:
        """Return a short text about the matrices of a parameter of that shape and the reason; "" if there is no
        reason."""
        if not self.why or self.matrices == Matrices():
            return self.why and f"one tensor: {self.why}"
        found = self.matrices.counted(shape).items()
        return f"{' + '.join(f'{count} of {_times(matrix)}' for matrix, count in found)}: {self.why}"


def _times(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))


@dataclass(frozen=True)
class ModuleFacts:
    """Facts about one parameter that follow from the modules of a model.

    convolution: True if a convolution owns the parameter; None: no module is known.
    matrices: which entries form a matrix, by the layout of projections, heads and experts; None: unknown.
    source: where the facts come from, in a few words.
    factor: which factor of a product the parameter is; None: it is no factor.
    """

    convolution: bool | None = None
    matrices: Matrices | None = None
    source: str = ""
    factor: Factor | None = None


class Batches(View):
    """Tensors of three and more axes are batches of matrices, which are the last two axes.

    Weights of convolutions are one tensor, which `blocking` merges. A convolution is recognised by its module. If only
    a shape is known, a tensor whose axes after the second are at most 16 long counts as a convolution. Stages that need
    matrices refuse shapes that may be either: three axes with a short last one, or more than three without.
    """

    kind: Literal["batches"] = "batches"

    def of(self, shape: tuple[int, ...], facts: ModuleFacts) -> ViewChoice:
        if len(shape) < 3:
            return ViewChoice(Matrices())
        small = max(shape[2:]) <= KERNEL
        if facts.convolution or (facts.convolution is None and small):
            why = "convolution" if facts.convolution else f"convolution by shape, {_unknown(len(shape))}"
            return ViewChoice(Matrices(), why, facts.convolution is not None or len(shape) > 3)
        known = facts.convolution is not None
        why = f"{len(shape)}-d, {'not a convolution' if known else _unknown(len(shape))}"
        return ViewChoice(Matrices(batch=len(shape) - 2), why, known or len(shape) == 3)


def _unknown(order: int) -> str:
    return "whose module is not known"


class Modules(View):
    """The matrices that follow from the modules of the model: fused projections, heads of attention, fused experts.

    A module may have a method `parameter_views()` that returns {parameter name: matrices}. Others are recognised:
    torch.nn.MultiheadAttention, attention as in Hugging Face, timm and nanoGPT, experts and gated layers. Parameters of
    all other modules are viewed as by `batches`.
    """

    kind: Literal["modules"] = "modules"
    heads: bool = Field(default=True, description="true: each head is a matrix; false: sections alone are")

    def of(self, shape: tuple[int, ...], facts: ModuleFacts) -> ViewChoice:
        if facts.convolution is None:
            raise ValueError(
                "view 'modules': the module of the parameter is not known, and nothing else says which entries form a "
                "matrix; use eigengraft.compose(recipe, model), or set `view: {kind: matrices, ...}` in a route"
            )
        if facts.matrices is None:
            return Batches().of(shape, facts)
        known = facts.matrices if self.heads else facts.matrices.replace(**_without_heads(facts.matrices))
        return ViewChoice(known, facts.source)


def _without_heads(matrices: Matrices) -> dict[str, object]:
    return {"heads": None, **({} if matrices.sections else {"side": "outputs"})}


class Pairs(View):
    """Low-rank factors of a product B A, A `[r, n]` and B `[m, r]`, as matrices `[n, r]` and `[m, r]`.

    The shared axis is the last one, so that stages treat both factors alike. Factors are recognised by their names,
    `lora_A` and `lora_B` as in peft, or `lora_down` and `lora_up`. A module may also have a method `parameter_pairs()`
    that returns pairs of names: the name of A, the name of B.
    """

    kind: Literal["pairs"] = "pairs"

    def of(self, shape: tuple[int, ...], facts: ModuleFacts) -> ViewChoice:
        if facts.factor is None or len(shape) != 2:
            got = f"a parameter of shape {shape}" if facts.factor is None else f"one of shape {shape}"
            raise ValueError(
                "view 'pairs': the parameter must be a matrix that is a factor of a product, by its name (lora_A, "
                f"lora_B) or by `parameter_pairs()` of its module, got {got}; send others elsewhere by a route"
            )
        why = f"factor of {facts.factor.side}, with {facts.factor.partner}"
        return ViewChoice(Matrices(outputs="last") if facts.factor.side == "inputs" else Matrices(), why)


class Whole(View):
    """The parameter as one tensor, which `blocking` merges and splits. As a matrix it is m x the rest."""

    kind: Literal["whole"] = "whole"

    def of(self, shape: tuple[int, ...], facts: ModuleFacts) -> ViewChoice:
        return ViewChoice(Matrices(), "as the recipe says" if len(shape) > 2 else "")
