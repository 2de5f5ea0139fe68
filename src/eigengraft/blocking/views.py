"""Views: rules that say which entries of a parameter form a matrix.

A parameter is divided into matrices by its view before it is cut into blocks. Two parameters whose product is one
matrix, such as the factors of LoRA, are a pair.

The second half of the file derives facts about parameters from the modules of a model: convolutions, fused projections,
heads, experts. Modules are recognized by their structure and the names of their attributes, never by the names of
classes. No library of models is imported.

Legend of attention: h heads of queries, g of keys and values, d the length of a head.
"""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.utils.parametrize import ParametrizationList

from eigengraft.component import Component, validated
from eigengraft.errors import counted

PAIR_NAMES = (
    ("lora_A", "lora_B"),
    ("lora_a", "lora_b"),
    ("lora_down", "lora_up"),
    ("lora_embedding_A", "lora_embedding_B"),
)
"""Names of the modules that hold the two factors of a product B A: (name for A `[r, n]`, name for B `[m, r]`). A name
counts if it is one part of the dotted path of a parameter."""


@dataclass(frozen=True)
class Factor:
    """One factor of a product B A. A `[r, n]` multiplies the n inputs, and B `[m, r]` computes the m outputs.

    side: "inputs" for A, "outputs" for B.
    partner: qualified name of the other factor.
    """

    side: Literal["inputs", "outputs"]
    partner: str

    def tall(self, partner: Tensor) -> Tensor:
        """Return the partner as a view with the shared axis last: `[m, r]` if the partner is B, `[n, r]` if it is A."""
        return partner if self.side == "inputs" else partner.mT


def named_factor(name: str | None) -> Factor | None:
    """Return the `Factor` of a parameter that is one factor of a low-rank product B A, such as LoRA's. Return None for
    all other parameters.

    name: qualified name of the parameter, from which the result follows (see `PAIR_NAMES`).
    """
    parts = [] if name is None else name.split(".")
    for inputs, outputs in PAIR_NAMES:
        if inputs in parts:
            return Factor("inputs", ".".join(outputs if part == inputs else part for part in parts))
        if outputs in parts:
            return Factor("outputs", ".".join(inputs if part == outputs else part for part in parts))
    return None


def stacked_rows(matrices: Mapping[int, Tensor], positions: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return N matrices `[p_i, r]` as one tensor `[N, p, r]`, with p the largest p_i.

    Shorter matrices are filled up with zeros.

    matrices: the matrix of each parameter, by position of the parameter.
    positions: positions of the N parameters whose matrices are stacked.
    dtype: dtype of the result.
    """
    tensors = [matrices[position] for position in positions]
    longest = max(len(tensor) for tensor in tensors)
    out = torch.zeros((len(tensors), longest, tensors[0].shape[-1]), dtype=dtype, device=tensors[0].device)
    for row, tensor in zip(out, tensors, strict=True):
        row[: len(tensor)] = tensor
    return out


KERNEL = 16
"""Longest axis of a convolution's kernel.

If the module of a tensor is not known, the tensor counts as the weight of a convolution if its axes after the second
are at most this long. Kernels of 7 to 13 are common, and matrices in batches are larger.
"""


class View(Component, ABC, family="view"):
    """A rule that says which entries of a parameter form a matrix, by the shape of the full parameter."""

    @abstractmethod
    def of(self, shape: tuple[int, ...], facts: ModuleFacts) -> ViewChoice:
        """Return the matrices of a parameter of shape `shape`. Called at construction, for each parameter.

        Raises ValueError if the rule does not fit the parameter.

        shape: shape of the full parameter, before it is sharded or cut into blocks.
        facts: facts about the parameter that follow from the modules of the model.
        """


class Matrices(View):
    """A parameter `[*batch, m, n]` as matrices: one for each index of `batch`, each section of the outputs, each head.

    m is the number of outputs and n of inputs, as in torch.nn.Linear. Grafting, scale rules and blocking treat each
    matrix like a separate parameter. If no field is set, the parameter is one tensor.
    """

    kind: Literal["matrices"] = "matrices"
    batch: int = Field(
        default=0, ge=0, description="number of leading axes, every index of which has a matrix of its own (experts)"
    )
    outputs: Literal["first", "last"] = Field(
        default="first",
        description="axis after the batch that holds the outputs; last: the matrix is transposed, as GPT-2's Conv1D "
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
        default=1,
        ge=1,
        description="number of times that the sections are repeated along the axis, such as once for each group of "
        "heads",
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
            raise ValueError(f"groups: has no effect without sections, got {self.groups}; set `sections`")
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
        """Length of a head in each section (queries, keys, values); 0: the section has no heads."""
        if isinstance(self.heads, tuple):
            return self.heads
        return (self.heads or 0,) * max(len(self.sections), 1)

    @property
    def divides(self) -> bool:
        """True if an axis is divided into sections or heads."""
        return bool(self.sections) or self.heads is not None

    def axis(self, shape: tuple[int, ...]) -> int:
        """Return the axis of outputs, or the axis of inputs with `side: inputs`. Sections and heads are parts of this
        axis.

        shape: shape of the parameter.
        """
        first = (self.outputs == "first") == (self.side == "outputs")
        return self.batch if first else len(shape) - 1

    def parts(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the length of each section, from the field `sections`. Without sections, the full axis is one section.

        shape: shape of the parameter.
        """
        return self.sections or (shape[self.axis(shape)],)

    def matrix_axes(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the axes of a parameter that are axes of each matrix, outputs first."""
        axes = tuple(range(self.batch, len(shape)))
        return axes if self.outputs == "first" else (axes[-1], *axes[:-1])

    def require_fit(self, shape: tuple[int, ...]) -> None:
        """Raise ValueError if a parameter of shape `shape` does not have these matrices."""
        least = self.batch + (2 if self.divides or self.outputs == "last" else min(self.batch, 1))
        if len(shape) < least:
            raise ValueError(
                f"view: `{self.fields()}` needs at least {counted(least, 'axis', 'axes')}, got a parameter of shape "
                f"{shape}"
            )
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
        """Return the fields that are not at their default as text, such as "batch: 1, heads: 8"; "the parameter as it
        is" if all are.
        """
        set_ = {name: value for name, value in self if value != type(self).model_fields[name].default}
        return ", ".join(f"{name}: {value}" for name, value in set_.items()) or "the parameter as it is"

    def each(self, shape: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        """Yield the shape of each matrix of a parameter, outputs first, in the order in which matrices are numbered."""
        for part, head in zip(self.parts(shape), self.head_lengths, strict=True):
            lengths = {self.axis(shape): (head or part * self.groups)} if self.divides else {}
            matrix = tuple(lengths.get(axis, shape[axis]) for axis in self.matrix_axes(shape))
            count = math.prod(shape[: self.batch]) * (part * self.groups // head if head else 1)
            yield from itertools.repeat(matrix, count)


class ViewChoice(NamedTuple):
    """The matrices of one parameter, and the reason.

    matrices: the matrices.
    why: the reason; "" if there was nothing to decide.
    decided: False if the matrices are only a guess from the shape. Stages that need matrices refuse a guess.
    """

    matrices: Matrices
    why: str = ""
    decided: bool = True

    def required_by(self, path: str | None, shape: tuple[int, ...]) -> Self:
        """Return this choice. Raises ValueError if the choice is a guess and a stage needs matrices.

        path: path of a stage that needs matrices; None: there is none.
        shape: shape of the parameter.
        """
        if path is not None and not self.decided:
            raise ValueError(
                f"{path}: needs matrices, but without the module a tensor of shape {shape} may be a convolution or a "
                "batch of matrices; use eigengraft.compose(recipe, model), or set `view: whole` "
                f"(a convolution) or `view: {{kind: matrices, batch: {len(shape) - 2}}}` in a route"
            )
        return self

    def describe(self, shape: tuple[int, ...]) -> str:
        """Return a short text about the matrices of a parameter, with the reason for the choice; "" if the choice has
        no reason.

        shape: shape of the parameter.
        """
        if not self.why or self.matrices == Matrices():
            return self.why and f"one tensor: {self.why}"
        found = Counter(self.matrices.each(shape)).items()
        return f"{' + '.join(f'{count} of {_times(matrix)}' for matrix, count in found)}: {self.why}"


def _times(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))


@dataclass(frozen=True)
class ModuleFacts:
    """Facts about one parameter that follow from the modules of a model.

    convolution: True if the parameter counts as a parameter of a convolution, by its module or by its shape; None: no
        module is known.
    matrices: the matrices of the parameter, which follow from the layout of projections, heads and experts; None:
        unknown.
    source: short text about the origin of the facts.
    factor: for a parameter that is A or B in a product B A, as in LoRA: which of the two it is, and the name of the
        other. None: it is no factor of a product.
    """

    convolution: bool | None = None
    matrices: Matrices | None = None
    source: str = ""
    factor: Factor | None = None


class Batches(View):
    """A rule for tensors `[*batch, m, n]` of three or more axes: one matrix `[m, n]` for each index of `batch`.

    The weight of a convolution is an exception: it is one tensor, whose axes `blocking` merges. A convolution is
    recognized by its module. If the module is not known, a tensor counts as the weight of a convolution if its axes
    after the second are at most 16 long. This rule is only a guess in two cases: if it takes a tensor of three axes for
    a convolution, or a tensor of more than three axes for a batch of matrices. Stages that need matrices refuse a
    guess.
    """

    kind: Literal["batches"] = "batches"

    def of(self, shape: tuple[int, ...], facts: ModuleFacts) -> ViewChoice:
        if len(shape) < 3:
            return ViewChoice(Matrices())
        known = facts.convolution is not None
        if facts.convolution or (not known and max(shape[2:]) <= KERNEL):
            why = "convolution" if known else "convolution by shape, whose module is not known"
            return ViewChoice(Matrices(), why, known or len(shape) > 3)
        why = f"{len(shape)}-d, {'not a convolution' if known else 'whose module is not known'}"
        return ViewChoice(Matrices(batch=len(shape) - 2), why, known or len(shape) == 3)


class Modules(View):
    """The matrices that follow from the modules of the model: fused projections, heads of attention, fused experts.

    It is made for models whose parameters contain several matrices, such as fused query, key and value projections.

    A module may have a method `parameter_views()` that returns {parameter name: matrices}. Without it, these modules
    are recognized: torch.nn.MultiheadAttention, attention as in Hugging Face, timm and nanoGPT, experts, and gated
    layers. Parameters of all other modules have the matrices of the view `batches`.
    """

    kind: Literal["modules"] = "modules"
    heads: bool = Field(
        default=True, description="true: each head is a matrix; false: each section is one, with all its heads"
    )

    def of(self, shape: tuple[int, ...], facts: ModuleFacts) -> ViewChoice:
        if facts.convolution is None:
            raise ValueError(
                "view 'modules': the module of the parameter is not known, and nothing else says which entries form a "
                "matrix; use eigengraft.compose(recipe, model), or set `view: {kind: matrices, ...}` in a route"
            )
        if facts.matrices is None:
            return Batches().of(shape, facts)
        if self.heads:
            return ViewChoice(facts.matrices, facts.source)
        side = facts.matrices.side if facts.matrices.sections else "outputs"
        return ViewChoice(facts.matrices.replace(heads=None, side=side), facts.source)


class Pairs(View):
    """Low-rank factors A `[r, n]` and B `[m, r]` of a product B A, viewed as matrices `[n, r]` and `[m, r]`.

    The shared axis is the last one, so that stages treat both factors alike. Factors are recognized by their names,
    `lora_A` and `lora_B` as in peft, or `lora_down` and `lora_up`. A module may also have a method `parameter_pairs()`
    that returns pairs of names: the name of A, the name of B.
    """

    kind: Literal["pairs"] = "pairs"

    def of(self, shape: tuple[int, ...], facts: ModuleFacts) -> ViewChoice:
        if facts.factor is None or len(shape) != 2:
            got = f"a parameter of shape {shape}" if facts.factor is None else f"a factor of shape {shape}"
            raise ValueError(
                "view 'pairs': the parameter must be a matrix that is a factor of a product, by its name (lora_A, "
                f"lora_B) or by `parameter_pairs()` of its module, got {got}; set another view in a route"
            )
        why = f"factor of {facts.factor.side}, with {facts.factor.partner}"
        return ViewChoice(Matrices(outputs="last") if facts.factor.side == "inputs" else Matrices(), why)


class Whole(View):
    """The parameter as one tensor, which `blocking` merges and splits. Stages that need a matrix use the first axis as
    rows, and all other axes together as columns.
    """

    kind: Literal["whole"] = "whole"

    def of(self, shape: tuple[int, ...], facts: ModuleFacts) -> ViewChoice:
        return ViewChoice(Matrices(), "as the recipe says" if len(shape) > 2 else "")


def parametrized_layer(modules: Mapping[str, nn.Module], path: str) -> nn.Module:
    """Return the layer that the parameters of a module belong to.

    A module may be the list in which torch keeps the parametrizations of one tensor of a layer. The layer is then the
    one that has this tensor. In all other cases it is the module itself.

    modules: all modules of the model, by path.
    path: path of the module.
    """
    module = modules[path]
    return modules[path.rpartition(".parametrizations")[0]] if isinstance(module, ParametrizationList) else module


def is_convolution(module: nn.Module) -> bool:
    """Return True if a layer is a convolution.

    module: the layer. It counts as a convolution if it is one of torch, or if it has a weight `[m, n, *kernel]` that
        fits its `kernel_size`.
    """
    if isinstance(module, _ConvNd):
        return True
    weight, size = own_parameter(module, "weight"), getattr(module, "kernel_size", None)
    if weight is None or weight.ndim < 3 or not isinstance(size, (int, tuple, list)):
        return False
    kernel = tuple(weight.shape[2:])
    return kernel == ((size,) * len(kernel) if isinstance(size, int) else tuple(size))


def is_transposed(module: nn.Module) -> bool:
    """Return True if a layer stores its weight as `[inputs, outputs]`.

    module: the layer, such as Conv1D of Hugging Face, which has `nf` outputs.
    """
    weight, outputs = own_parameter(module, "weight"), getattr(module, "nf", None)
    return weight is not None and weight.ndim == 2 and isinstance(outputs, int) and weight.shape[1] == outputs


def weight_of(module: nn.Module, name: str) -> nn.Parameter | None:
    """Return the weight of the layer `name` inside a module if it is a matrix, else None.

    For a parametrized weight, the parameter from which it is computed is returned.
    """
    weight = own_parameter(getattr(module, name, None), "weight")
    return weight if weight is not None and weight.ndim == 2 else None


def own_parameter(module: object, name: str) -> nn.Parameter | None:
    """Return the parameter `name` of a module, or None if it has none.

    A parametrization or an older hook may compute the attribute `name`. Then the parameter from which it is computed is
    returned. If there are several, the largest is returned; for weight_norm these are the directions.
    """
    if not isinstance(module, nn.Module):
        return None
    lists = getattr(module, "parametrizations", None)
    if isinstance(lists, nn.ModuleDict) and name in lists:
        originals = list(lists[name].parameters(recurse=False))
        return max(originals, key=nn.Parameter.numel, default=None)
    # by getattr, which wrappers of modules forward; compiled modules (torch.jit) have no dict of parameters
    found = [getattr(module, own, None) for own in (name, f"{name}_orig", f"{name}_v")]
    return next((own for own in found if isinstance(own, nn.Parameter)), None)


FoundMatrices = Iterator[tuple[Tensor, Matrices, str]]
"""Iterator of (parameter, its matrices, description of the recognized layout)."""
SEPARATE = (
    ("q_proj", "k_proj", "v_proj"),
    ("query", "key", "value"),
    ("q", "k", "v"),
    ("wq", "wk", "wv"),
    ("to_q", "to_k", "to_v"),
    ("q_lin", "k_lin", "v_lin"),
)
"""Names of separate projections onto queries, keys and values."""
SECTIONED = ("c_attn", "qkv", "qkv_proj", "Wqkv", "to_qkv", "W_pack", "in_proj")
"""Names of fused projections whose rows are all queries, then all keys, then all values."""
INTERLEAVED = ("query_key_value", "linear_qkv")
"""Names of fused projections whose rows are grouped by heads: queries, keys and values of the first group of heads,
then those of the next group."""


def attention_matrices(module: nn.Module) -> FoundMatrices:
    """Yield the matrices of projections onto queries, keys and values, if the module is an attention; else nothing."""
    if isinstance(module, nn.MultiheadAttention):
        yield from _multihead_attention(module)
        return
    h = _number(module, "num_heads", "num_attention_heads", "n_heads", "n_head", "nhead")
    if h is None:
        return
    if _number(module, "qk_nope_head_dim") is not None:
        yield from _latent(module, h)
        return
    d = _number(module, "head_dim", "attention_head_size", "key_value_proj_dim", "head_size", "kv_channels")
    yield from _separate(module, h, d)
    yield from _sectioned(module, h, d)
    yield from _interleaved(module, h, d)


def _multihead_attention(module: nn.MultiheadAttention) -> FoundMatrices:
    heads, width = module.head_dim, module.embed_dim
    fused = own_parameter(module, "in_proj_weight")
    if fused is not None:
        yield fused, Matrices(sections=(width,) * 3, heads=heads), "queries, keys, values by head"
        return
    for name in ("q_proj_weight", "k_proj_weight", "v_proj_weight"):
        weight = own_parameter(module, name)
        assert weight is not None
        yield weight, Matrices(heads=heads), f"heads of {name}"


def _latent(module: nn.Module, h: int) -> FoundMatrices:
    """Yield the matrices of multi-head latent attention (DeepSeek-V2): heads of queries, and heads of keys and values
    that are computed from latent vectors.

    h: number of heads of queries.
    """
    nope, rope = _number(module, "qk_nope_head_dim") or 0, _number(module, "qk_rope_head_dim") or 0
    values, rank = _number(module, "v_head_dim") or 0, _number(module, "kv_lora_rank") or 0
    for name in ("q_proj", "q_b_proj"):
        weight = weight_of(module, name)
        if weight is not None and len(weight) == h * (nope + rope):
            yield weight, Matrices(heads=nope + rope), f"heads of {name}"
    weight = weight_of(module, "kv_b_proj")
    if weight is not None and len(weight) == h * (nope + values) and min(h, nope, values) > 0:
        yield weight, Matrices(groups=h, sections=(nope, values), heads=(nope, values)), "keys and values by head"
    weight = weight_of(module, "kv_a_proj_with_mqa")
    if weight is not None and len(weight) == rank + rope and min(rank, rope) > 0:
        yield weight, Matrices(sections=(rank, rope)), "latent vectors and rotated keys"


def _separate(module: nn.Module, h: int, d: int | None) -> FoundMatrices:
    for names in SEPARATE:
        weights = {name: weight for name in names if (weight := weight_of(module, name)) is not None}
        if len(weights) < len(names):
            continue
        for name, weight in weights.items():
            outputs = _outputs(module, name)
            rows = weight.shape[0 if outputs == "first" else 1]
            length = d or len(weights[names[0]]) // h
            if name == names[0] and d is not None and rows == 2 * h * d:
                yield weight, Matrices(groups=h, sections=(d, d), heads=d), "queries and gates by head"
            elif length > 0:
                yield weight, Matrices(outputs=outputs, heads=length), f"heads of {name}"


def _sectioned(module: nn.Module, h: int, d: int | None) -> FoundMatrices:
    g = _number(module, "num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_kv_head") or h
    for name in SECTIONED:
        weight = weight_of(module, name)
        if weight is None:
            continue
        outputs = _outputs(module, name)
        rows = weight.shape[0 if outputs == "first" else 1]
        length = d or rows // (h + 2 * g)
        if rows == (h + 2 * g) * length:
            sections = (h * length, g * length, g * length)
            yield weight, Matrices(outputs=outputs, sections=sections, heads=length), f"{name}, by head"


def _interleaved(module: nn.Module, h: int, d: int | None) -> FoundMatrices:
    """Yield the matrices of interleaved projections: [q k v] for each head in GPT-NeoX and BLOOM, [q ... q k v] for
    each group of heads in Falcon and Megatron.

    h: number of heads of queries.
    d: length of a head; None: the length follows from the number of rows of the weight.
    """
    for name in INTERLEAVED:
        weight = weight_of(module, name)
        if weight is None:
            continue
        grouped = name == "linear_qkv" or bool(getattr(module, "new_decoder_architecture", False))
        g = _number(module, "num_query_groups", "num_kv_heads", "num_key_value_heads") if grouped else h
        g = 1 if not grouped and getattr(module, "multi_query", False) else g
        if not g or h % g:
            continue
        length = d or len(weight) // (h + 2 * g)
        sections = (h // g * length, length, length)
        if length and len(weight) == g * sum(sections):
            yield weight, Matrices(groups=g, sections=sections, heads=length), f"{name}, by head"


def _number(module: nn.Module, *names: str) -> int | None:
    """Return the first of the attributes `names` that is a positive whole number; None if there is none.

    The attributes of the module are searched first, then those of its `config`.
    """
    for owner in (module, getattr(module, "config", None)):
        for name in names:
            value = getattr(owner, name, None)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
    return None


def _outputs(module: nn.Module, name: str) -> Literal["first", "last"]:
    """Return the axis of a layer's weight that holds the outputs. `Conv1D` of Hugging Face has `[inputs, outputs]`.

    name: name of the layer in `module`.
    """
    return "last" if is_transposed(getattr(module, name)) else "first"


def module_facts(model: nn.Module) -> dict[int, ModuleFacts]:
    """Return for every parameter of a model the facts that follow from its module, by the `id` of the parameter.

    The matrices of a parameter are those that a module declares by a method `parameter_views()`. Without a declaration,
    the functions in `RECOGNIZED` find the matrices of known layers, such as attention, by the names of their weights.

    model: the model whose parameters are described.
    """
    modules = dict(model.named_modules())
    known: dict[int, tuple[Matrices, str]] = {}
    for path, module in modules.items():
        for parameter, matrices, source in _published(path, module):
            known.setdefault(id(parameter), (matrices, source))
    for module in modules.values():
        for recognized in RECOGNIZED:
            for parameter, matrices, source in recognized(module):
                with suppress(ValueError):  # the matrices do not fit
                    matrices.require_fit(tuple(parameter.shape))
                    known.setdefault(id(parameter), (matrices, f"{source} of {type(module).__name__}"))
    convolutions, factors = _convolutions(modules), _factors(model)
    facts = dict[int, ModuleFacts]()
    for parameter in model.parameters():
        key = id(parameter)
        found: tuple[Matrices | None, str] = known.get(key, (None, ""))
        facts[key] = ModuleFacts(key in convolutions, *found, factors.get(key))
    return facts


def _factors(model: nn.Module) -> dict[int, Factor]:
    """Return the factors A and B of low-rank products B A, such as LoRA's, that modules declare by a method
    `parameter_pairs()`, by the `id`s of the parameters.

    The method returns pairs of names of parameters: the name of A `[r, n]`, the name of B `[m, r]`.
    """
    names, found = {id(parameter): name for name, parameter in model.named_parameters()}, dict[int, Factor]()
    for path, module in model.named_modules():
        pairs = getattr(module, "parameter_pairs", None)
        for pair in pairs() if callable(pairs) else ():
            where, given = f"{path or type(module).__name__}.parameter_pairs", [_reached(module, name) for name in pair]
            if len(given) != 2:
                raise ValueError(f"{where}: must return pairs of two names of parameters, got {pair!r}")
            if unknown := [name for name, x in zip(pair, given, strict=True) if not isinstance(x, nn.Parameter)]:
                raise ValueError(
                    f"{where}: {unknown[0]!r} in the pair {pair!r} is not a parameter of the module; return names "
                    "of its parameters"
                )
            inputs, outputs = map(id, given)
            found[inputs], found[outputs] = Factor("inputs", names[outputs]), Factor("outputs", names[inputs])
    return found


def _published(path: str, module: nn.Module) -> FoundMatrices:
    """Yield the matrices that a module declares by its method `parameter_views()`.

    The method returns a mapping from names of parameters. A value is an object of the class `Matrices`, or a mapping
    from fields of `Matrices` to values, such as {"heads": 64}.

    path: path of the module in the model, for errors.
    """
    views = getattr(module, "parameter_views", None)
    if not callable(views):
        return
    where, found = f"{path or type(module).__name__}.parameter_views", views()
    if not isinstance(found, Mapping):
        raise ValueError(
            f"{where}: the method must return a mapping from names of the module's parameters to fields of `Matrices`, "
            f"such as {{'weight': {{'heads': 8}}}}, got {found!r}"
        )
    for name, fields in found.items():
        parameter = _reached(module, name)
        if not isinstance(parameter, nn.Parameter):
            raise ValueError(f"{where}: '{name}' is not a parameter of the module; use a name of named_parameters()")
        matrices = fields if isinstance(fields, Matrices) else validated(Matrices, fields, f"{where}.{name}")
        try:
            matrices.require_fit(tuple(parameter.shape))
        except ValueError as error:
            raise ValueError(f"{where}.{name}: {error}") from None
        yield parameter, matrices, f"parameter_views of {type(module).__name__}"


def _reached(module: nn.Module, name: object) -> object:
    """Return the attribute of a module at the dotted path `name`; None if there is none.

    If a parametrization computes the attribute, return the parameter from which it is computed. Attributes are read by
    getattr, because wrappers of modules forward attributes of the module inside.
    """
    found: object = module
    *path, last = str(name).split(".")
    for part in path:
        found = getattr(found, part, None)
    parameter = own_parameter(found, last)
    return getattr(found, last, None) if parameter is None else parameter


def _convolutions(modules: Mapping[str, nn.Module]) -> set[int]:
    """Return the `id` of each parameter that counts as a parameter of a convolution.

    All parameters of convolutions count. A parameter of another module counts if it has four or more axes, and if all
    axes after the second are at most `KERNEL` long.
    """
    found = set()
    for path, module in modules.items():
        convolution = is_convolution(parametrized_layer(modules, path))
        for parameter in module.parameters(recurse=False):
            if convolution or (parameter.ndim > 3 and max(parameter.shape[2:]) <= KERNEL):
                found.add(id(parameter))
    return found


GATED_LAYERS = (("gate_up_proj", "down_proj"), ("Wi", "Wo"), ("w12", "w3"))
"""Names of the two projections of a gated layer: the fused projection onto gates and values, and the one after it."""


def _gated_layer(module: nn.Module) -> FoundMatrices:
    """Yield the weight that computes both gates and values of a feed-forward layer, divided into these two matrices.

    Phi 3 and ModernBERT have such layers.
    """
    for name, following in GATED_LAYERS:
        weight, after = weight_of(module, name), weight_of(module, following)
        if weight is not None and after is not None and weight.shape[0] == 2 * after.shape[1]:
            yield weight, Matrices(sections=(after.shape[1],) * 2), f"gates and values {name}"


def _experts(module: nn.Module) -> FoundMatrices:
    """Yield stacked experts `[E, m, n]` with fused gates and values, as in Mixtral, Llama 4 and gpt-oss."""
    fused, after = own_parameter(module, "gate_up_proj"), own_parameter(module, "down_proj")
    if fused is None or after is None or not fused.ndim == after.ndim == 3:
        return
    if fused.shape[1:] == (2 * after.shape[2], after.shape[1]):
        yield fused, Matrices(batch=1, sections=(after.shape[2],) * 2), "experts, gates and values"
        yield after, Matrices(batch=1), "experts"
    elif fused.shape[1:] == (after.shape[2], 2 * after.shape[1]):
        hidden = after.shape[1]
        alternating = own_parameter(module, "gate_up_proj_bias") is not None and hasattr(module, "limit")  # gpt-oss
        sections = {"sections": (1, 1), "groups": hidden} if alternating else {"sections": (hidden, hidden)}
        matrices = Matrices.model_validate({"batch": 1, "outputs": "last", **sections})
        yield fused, matrices, "experts [inputs, outputs], gates and values"
        yield after, Matrices(batch=1, outputs="last"), "experts [inputs, outputs]"


RECOGNIZED: tuple[Callable[[nn.Module], FoundMatrices], ...] = (attention_matrices, _gated_layer, _experts)
"""Functions that recognize layouts of modules. If several functions yield a parameter, the first one counts."""
