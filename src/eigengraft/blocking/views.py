"""Views of parameters as matrices: which entries form one, and the family of rules that decide it.

A parameter is divided by its view before it is cut into blocks. Two parameters whose product is one matrix, such as the
factors of LoRA, are a pair; a factor knows its partner by name.
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

NAMES = (
    ("lora_A", "lora_B"),
    ("lora_a", "lora_b"),
    ("lora_down", "lora_up"),
    ("lora_embedding_A", "lora_embedding_B"),
)
"""Parts of dotted names that tell a pair: of the factor `[r, n]`, and of the factor `[m, r]`."""


@dataclass(frozen=True)
class Factor:
    """One factor of a product B A, with A `[r, n]` of inputs and B `[m, r]` of outputs.

    side: which of the two it is.
    partner: qualified name of the other.
    """

    side: Literal["inputs", "outputs"]
    partner: str

    def tall(self, partner: Tensor) -> Tensor:
        """The partner with the axis that both share last: `[m, r]` of B, `[n, r]` of A; a view."""
        return partner if self.side == "inputs" else partner.mT


def named_factor(name: str | None) -> Factor | None:
    """What a qualified name tells of a factor; None: nothing."""
    parts = [] if name is None else name.split(".")
    for inputs, outputs in NAMES:
        if inputs in parts:
            return Factor("inputs", ".".join(outputs if part == inputs else part for part in parts))
        if outputs in parts:
            return Factor("outputs", ".".join(inputs if part == outputs else part for part in parts))
    return None


def stacked_rows(matrices: Mapping[int, Tensor], positions: Sequence[int], dtype: torch.dtype) -> Tensor:
    """`[N, p, r]` of the matrices `[p_i, r]` at N positions; zeros fill up those that are shorter than the longest."""
    tensors = [matrices[position] for position in positions]
    longest = max(len(tensor) for tensor in tensors)
    out = torch.zeros((len(tensors), longest, tensors[0].shape[-1]), dtype=dtype, device=tensors[0].device)
    for row, tensor in zip(out, tensors, strict=True):
        row[: len(tensor)] = tensor
    return out


KERNEL = 16
"""Longest kernel, in entries of an axis: where no module tells, a tensor whose axes after the second are at most this
long counts as a convolution's weight. Kernels of 7 to 13 are in use, matrices this small are not."""


class View(Component, ABC, family="view"):
    """A rule that says which entries of a parameter form a matrix; decided on the shape of the full parameter."""

    @abstractmethod
    def of(self, shape: tuple[int, ...], facts: ModuleFacts) -> ViewChoice:
        """The matrices of a parameter of that shape. Raises ValueError where the rule does not fit it."""


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
    side: Literal["outputs", "inputs"] = Field(default="outputs", description="the axis that sections and heads lie on")
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
            raise ValueError(f"groups: sections are required, which the groups repeat, got groups {self.groups}")
        if self.side == "inputs" and not self.sections and not self.heads:
            raise ValueError("side: sections or heads are required, which lie on a side, got 'inputs' without any")
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
        """The length of a head of each section; 0: the section has no heads."""
        if isinstance(self.heads, tuple):
            return self.heads
        return (self.heads or 0,) * max(len(self.sections), 1)

    @property
    def divides(self) -> bool:
        """Whether an axis is divided into sections or heads."""
        return bool(self.sections) or self.heads is not None

    def axis(self, shape: tuple[int, ...]) -> int:
        """The axis of a parameter that sections and heads lie on."""
        first = (self.outputs == "first") == (self.side == "outputs")
        return self.batch if first else len(shape) - 1

    def parts(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Lengths of the sections in one group; the whole axis, if there are no sections."""
        return self.sections or (shape[self.axis(shape)],)

    def matrix_axes(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The axes of a parameter that a matrix is made of, outputs first."""
        axes = tuple(range(self.batch, len(shape)))
        return axes if self.outputs == "first" else (axes[-1], *axes[:-1])

    def require_fit(self, shape: tuple[int, ...]) -> None:
        """Raises ValueError if a parameter of that shape does not have these matrices."""
        least = self.batch + (2 if self.divides or self.outputs == "last" else min(self.batch, 1))
        if len(shape) < least:
            raise ValueError(f"view: at least {least} axes are required by {self.fields()}, got shape {shape}")
        if not self.divides:
            return
        length = shape[self.axis(shape)]
        if sum(self.parts(shape)) * self.groups != length:
            raise ValueError(
                f"view: sections whose sum times groups is the length {length} of axis {self.axis(shape)} of shape "
                f"{shape} are required, got sections {self.sections} and groups {self.groups}"
            )
        for part, head in zip(self.parts(shape), self.head_lengths, strict=True):
            if head and part % head:
                raise ValueError(
                    f"view: heads that divide {part}, the length of a section of axis {self.axis(shape)} of shape "
                    f"{shape}, are required, got {head}"
                )

    def of(self, shape: tuple[int, ...], facts: ModuleFacts) -> ViewChoice:
        self.require_fit(shape)
        return ViewChoice(self, "as the recipe says")

    def fields(self) -> str:
        """The fields that are not at their default, as a recipe would write them."""
        set_ = {name: value for name, value in self if value != type(self).model_fields[name].default}
        return ", ".join(f"{name}: {value}" for name, value in set_.items()) or "the parameter as it is"

    def counted(self, shape: tuple[int, ...]) -> dict[tuple[int, ...], int]:
        """How many matrices of which shape a parameter has, blocking left aside."""
        return dict(Counter(self.each(shape)))

    def each(self, shape: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        """The shape of each matrix of a parameter, outputs first, in the order of their numbers."""
        for part, head in zip(self.parts(shape), self.head_lengths, strict=True):
            lengths = {self.axis(shape): (head or part * self.groups)} if self.divides else {}
            matrix = tuple(lengths.get(axis, shape[axis]) for axis in self.matrix_axes(shape))
            count = math.prod(shape[: self.batch]) * (part * self.groups // head if head else 1)
            yield from itertools.repeat(matrix, count)


class ViewChoice(NamedTuple):
    """The matrices of one parameter, and who decided.

    matrices: which entries form a matrix.
    why: what the decision follows from; "" where there was none to make.
    decided: whether it is more than a guess from the shape; stages that need matrices refuse a guess.
    """

    matrices: Matrices
    why: str = ""
    decided: bool = True

    def required_by(self, path: str | None, shape: tuple[int, ...]) -> Self:
        """This choice, for a stage at `path` that needs matrices (None: there is none); ValueError for a guess."""
        if path is not None and not self.decided:
            raise ValueError(
                f"{path}: a tensor whose matrices are known is required, got shape {shape} without a module, which may "
                "be a convolution or a batch of matrices; use eigengraft.compose(recipe, model), or say `view: whole` "
                f"(a convolution) or `view: {{kind: matrices, batch: {len(shape) - 2}}}` in a route"
            )
        return self

    def describe(self, shape: tuple[int, ...]) -> str:
        """The matrices of a parameter of that shape and what they follow from, in a few words; "" if `why` is."""
        if not self.why or self.matrices == Matrices():
            return self.why and f"one tensor: {self.why}"
        found = self.matrices.counted(shape).items()
        return f"{' + '.join(f'{count} of {_times(matrix)}' for matrix, count in found)}: {self.why}"


def _times(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))


@dataclass(frozen=True)
class ModuleFacts:
    """What the modules of a model tell of one parameter.

    convolution: whether a convolution owns it; None: no module is known.
    matrices: which entries form a matrix, as projections, heads and experts of its module are laid out; None: that is
        not known.
    source: what told it, in a few words.
    factor: which factor of a product it is; None: it is none.
    """

    convolution: bool | None = None
    matrices: Matrices | None = None
    source: str = ""
    factor: Factor | None = None


class Batches(View):
    """Tensors of three and more axes are batches of matrices, which are the last two axes; weights of convolutions are
    one tensor, which `blocking` merges.

    Modules tell what is a convolution. Where only a shape is known, a tensor whose axes after the second are at most 16
    long counts as one. Stages that need matrices refuse what a shape cannot tell: three axes with a short last one, or
    more than three without.
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
    """The matrices that the modules of the model tell: fused projections and heads of attention, fused experts; what no
    module tells is as with `batches`.

    A module tells by a method `parameter_views()` that returns {parameter name: matrices}, or is recognised:
    torch.nn.MultiheadAttention, attention as Hugging Face, timm and nanoGPT write it, experts and gated layers.
    """

    kind: Literal["modules"] = "modules"
    heads: bool = Field(default=True, description="whether heads are matrices of their own, or sections alone")

    def of(self, shape: tuple[int, ...], facts: ModuleFacts) -> ViewChoice:
        if facts.convolution is None:
            raise ValueError(
                "view 'modules': modules that tell which entries form a matrix are required, got a parameter without "
                "its module; use eigengraft.compose(recipe, model), or say `view: {kind: matrices, ...}` in a route"
            )
        if facts.matrices is None:
            return Batches().of(shape, facts)
        told = facts.matrices if self.heads else facts.matrices.replace(**_without_heads(facts.matrices))
        return ViewChoice(told, facts.source)


def _without_heads(told: Matrices) -> dict[str, object]:
    return {"heads": None, **({} if told.sections else {"side": "outputs"})}


class Pairs(View):
    """Low-rank factors of a product B A, A `[r, n]` and B `[m, r]`, as matrices `[n, r]` and `[m, r]`: the axis that
    both share is the last one, so that stages treat both alike.

    Factors are told by names, `lora_A` and `lora_B` as in peft, or `lora_down` and `lora_up`, or by a module's method
    `parameter_pairs()`, which returns pairs of names: that of A, that of B.
    """

    kind: Literal["pairs"] = "pairs"

    def of(self, shape: tuple[int, ...], facts: ModuleFacts) -> ViewChoice:
        if facts.factor is None or len(shape) != 2:
            got = f"a parameter of shape {shape}" if facts.factor is None else f"one of shape {shape}"
            raise ValueError(
                "view 'pairs': matrices that names (lora_A, lora_B) or a module's `parameter_pairs()` tell to be "
                f"factors of a product are required, got {got}; send others elsewhere by a route"
            )
        why = f"factor of {facts.factor.side}, with {facts.factor.partner}"
        return ViewChoice(Matrices(outputs="last") if facts.factor.side == "inputs" else Matrices(), why)


class Whole(View):
    """The parameter as it is, one tensor, which `blocking` merges and splits; as a matrix it is m x the rest."""

    kind: Literal["whole"] = "whole"

    def of(self, shape: tuple[int, ...], facts: ModuleFacts) -> ViewChoice:
        return ViewChoice(Matrices(), "as the recipe says" if len(shape) > 2 else "")
