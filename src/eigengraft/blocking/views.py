"""Views of parameters as matrices: rules by which a parameter is divided before it is cut into blocks."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from .matrices import KERNEL, Matrices, ModuleFacts, View, ViewChoice


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
