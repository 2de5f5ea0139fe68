"""Attention, recognised by the names of its projections and of its numbers of heads.

Legend: h heads of queries, g of keys and values, d the length of a head.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from torch import Tensor, nn

from .layers import is_transposed, own_parameter, weight_of
from .matrices import Matrices

Told = Iterator[tuple[Tensor, Matrices, str]]
"""(parameter, its matrices, what it is)"""
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
"""Names of fused projections: all queries, then all keys, then all values."""
INTERLEAVED = ("query_key_value", "linear_qkv")
"""Names of fused projections onto queries, keys and values of the first group of heads, then of the next."""


def attention_matrices(module: nn.Module) -> Told:
    """The matrices of the projections of an attention module; nothing for other modules.

    Projections onto queries, keys and values have heads; the projection of the output is one matrix.
    """
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


def _multihead_attention(module: nn.MultiheadAttention) -> Told:
    heads, width = module.head_dim, module.embed_dim
    fused = own_parameter(module, "in_proj_weight")
    if fused is not None:
        yield fused, Matrices(sections=(width,) * 3, heads=heads), "queries, keys, values by head"
        return
    for name in ("q_proj_weight", "k_proj_weight", "v_proj_weight"):
        weight = own_parameter(module, name)
        assert weight is not None
        yield weight, Matrices(heads=heads), f"heads of {name}"


def _latent(module: nn.Module, h: int) -> Told:
    """Multi-head latent attention (DeepSeek-V2): heads of queries, and of what latent vectors become."""
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


def _separate(module: nn.Module, h: int, d: int | None) -> Told:
    for names in SEPARATE:
        weights = [weight_of(module, name) for name in names]
        if any(weight is None for weight in weights):
            continue
        for name, weight in zip(names, weights, strict=True):
            assert weight is not None
            outputs = _outputs(module, name)
            rows = weight.shape[0 if outputs == "first" else 1]
            length = d or (len(weights[0] if weights[0] is not None else ()) // h)
            if name == names[0] and d is not None and rows == 2 * h * d:
                yield weight, Matrices(groups=h, sections=(d, d), heads=d), "queries and gates by head"
            elif length > 0:
                yield weight, Matrices(outputs=outputs, heads=length), f"heads of {name}"


def _sectioned(module: nn.Module, h: int, d: int | None) -> Told:
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


def _interleaved(module: nn.Module, h: int, d: int | None) -> Told:
    """GPT-NeoX and BLOOM: [q k v] for each head; Falcon: [q ... q k v] for each group, or one group; Megatron alike."""
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
    """The first of these attributes that is a positive whole number, of a module or else of its `config`."""
    for owner in (module, getattr(module, "config", None)):
        for name in names:
            value = getattr(owner, name, None)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
    return None


def _outputs(module: nn.Module, name: str) -> Literal["first", "last"]:
    """Which axis of the weight of a layer holds the outputs; `Conv1D` of Hugging Face stores `[inputs, outputs]`."""
    return "last" if is_transposed(getattr(module, name)) else "first"
