"""Facts about parameters that follow from the modules of a model: convolutions, fused projections, heads, experts.

Modules are recognised by their structure and the names of their attributes, never by the names of classes. No library
of models is imported.

Legend of attention: h heads of queries, g of keys and values, d the length of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Literal

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.utils.parametrize import ParametrizationList

from eigengraft.component import validated

from .views import KERNEL, Factor, Matrices, ModuleFacts


def parametrized_layer(modules: Mapping[str, nn.Module], path: str) -> nn.Module:
    """Return the layer that the parameters of a module belong to.

    For a list of parametrizations it is the parametrized layer.

    modules: all modules of the model, by path.
    path: path of the module.
    """
    module = modules[path]
    return modules[path.rpartition(".parametrizations")[0]] if isinstance(module, ParametrizationList) else module


def is_convolution(module: nn.Module) -> bool:
    """Return True if a module is a convolution of torch, or has a weight `[m, n, *kernel]` that fits its
    `kernel_size`."""
    if isinstance(module, _ConvNd):
        return True
    weight, size = own_parameter(module, "weight"), getattr(module, "kernel_size", None)
    if weight is None or weight.ndim < 3 or not isinstance(size, (int, tuple, list)):
        return False
    kernel = tuple(weight.shape[2:])
    return kernel == ((size,) * len(kernel) if isinstance(size, int) else tuple(size))


def is_transposed(module: nn.Module) -> bool:
    """Return True if a layer stores its weight as `[inputs, outputs]`, as Conv1D of Hugging Face with `nf` outputs."""
    weight, outputs = own_parameter(module, "weight"), getattr(module, "nf", None)
    return weight is not None and weight.ndim == 2 and isinstance(outputs, int) and weight.shape[1] == outputs


def weight_of(module: nn.Module, name: str) -> nn.Parameter | None:
    """Return the weight of a layer inside a module if it is a matrix; if parametrized, the tensor of its shape."""
    weight = own_parameter(getattr(module, name, None), "weight")
    return weight if weight is not None and weight.ndim == 2 else None


def own_parameter(module: object, name: str) -> nn.Parameter | None:
    """Return the parameter of a module under a name, or the one from which a parametrization or an older hook computes
    it.

    Of several parameters it is the largest: with weight_norm the one of the directions. None if the module has none.
    """
    if not isinstance(module, nn.Module):
        return None
    lists = getattr(module, "parametrizations", None)
    if isinstance(lists, nn.ModuleDict) and name in lists:
        originals = list(lists[name].parameters(recurse=False))
        return max(originals, key=nn.Parameter.numel, default=None)
    value = getattr(module, name, None)  # by attribute: wrappers of modules forward attributes
    names = (f"{name}_orig", f"{name}_v")
    found = [value, *(module._parameters.get(own) for own in names)]
    return next((own for own in found if isinstance(own, nn.Parameter)), None)


FoundMatrices = Iterator[tuple[Tensor, Matrices, str]]
"""Iterator of (parameter, its matrices, description)."""
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


def attention_matrices(module: nn.Module) -> FoundMatrices:
    """Yield the matrices of the projections of an attention module; nothing for other modules.

    Projections onto queries, keys and values have heads. The projection of the output is one matrix.
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
    """Multi-head latent attention (DeepSeek-V2): heads of queries, and heads of keys and values made of latent
    vectors."""
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
    """GPT-NeoX and BLOOM: [q k v] for each head; Falcon and Megatron: [q ... q k v] for each group, or one group."""
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
    """Return the first of these attributes of a module, or else of its `config`, that is a positive whole number."""
    for owner in (module, getattr(module, "config", None)):
        for name in names:
            value = getattr(owner, name, None)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
    return None


def _outputs(module: nn.Module, name: str) -> Literal["first", "last"]:
    """Return which axis of a layer's weight holds the outputs; `Conv1D` of Hugging Face stores `[inputs, outputs]`."""
    return "last" if is_transposed(getattr(module, name)) else "first"


def module_facts(model: nn.Module) -> dict[int, ModuleFacts]:
    """Return the facts of every parameter of a model, by the `id` of the parameter.

    `parameter_views()` of a module has precedence over recognised layouts.
    """
    modules = dict(model.named_modules())
    known: dict[int, tuple[Matrices, str]] = {}
    for path, module in modules.items():
        for parameter, matrices, source in _published(path, module):
            known.setdefault(id(parameter), (matrices, source))
    for module in modules.values():
        for recognised in RECOGNISED:
            for parameter, matrices, source in recognised(module):
                if _fits(matrices, tuple(parameter.shape)):
                    known.setdefault(id(parameter), (matrices, f"{source} of {type(module).__name__}"))
    convolutions, factors = _convolutions(modules), _factors(model)
    facts = dict[int, ModuleFacts]()
    for parameter in model.parameters():
        key = id(parameter)
        found: tuple[Matrices | None, str] = known.get(key, (None, ""))
        facts[key] = ModuleFacts(key in convolutions, *found, factors.get(key))
    return facts


def _factors(model: nn.Module) -> dict[int, Factor]:
    """Return the factors that modules declare by `parameter_pairs()`, by the `id` of the parameter.

    The method returns pairs of names, with the factor `[r, n]` first.
    """
    names, found = {id(parameter): name for name, parameter in model.named_parameters()}, dict[int, Factor]()
    for path, module in model.named_modules():
        pairs = getattr(module, "parameter_pairs", None)
        for pair in pairs() if callable(pairs) else ():
            where, given = f"{path or type(module).__name__}.parameter_pairs", [_reached(module, name) for name in pair]
            if len(given) != 2 or not all(isinstance(parameter, nn.Parameter) for parameter in given):
                raise ValueError(f"{where}: must return pairs of names of parameters of the module, got {pair!r}")
            inputs, outputs = map(id, given)
            found[inputs], found[outputs] = Factor("inputs", names[outputs]), Factor("outputs", names[inputs])
    return found


def _published(path: str, module: nn.Module) -> FoundMatrices:
    """Yield the matrices that a module declares by `parameter_views()`.

    The method returns {parameter name: matrices, or a mapping of their fields}.
    """
    views = getattr(module, "parameter_views", None)
    if not callable(views):
        return
    where, found = f"{path or type(module).__name__}.parameter_views", views()
    if not isinstance(found, Mapping):
        raise ValueError(f"{where}: must return a mapping from names of parameters to matrices, got {found!r}")
    for name, fields in found.items():
        parameter = _reached(module, name)
        if not isinstance(parameter, nn.Parameter):
            raise ValueError(f"{where}: '{name}' is not the name of a parameter of the module")
        matrices = fields if isinstance(fields, Matrices) else validated(Matrices, fields, f"{where}.{name}")
        try:
            matrices.require_fit(tuple(parameter.shape))
        except ValueError as error:
            raise ValueError(f"{where}.{name}: {error}") from None
        yield parameter, matrices, f"parameter_views of {type(module).__name__}"


def _reached(module: nn.Module, name: object) -> object:
    """Return the attribute at a dotted path, or the parameter that it is computed from; None if there is none.

    Attributes are read by name, because wrappers of modules forward them.
    """
    found: object = module
    *path, last = str(name).split(".")
    for part in path:
        found = getattr(found, part, None)
    parameter = own_parameter(found, last)
    return getattr(found, last, None) if parameter is None else parameter


def _fits(matrices: Matrices, shape: tuple[int, ...]) -> bool:
    try:
        matrices.require_fit(shape)
    except ValueError:
        return False
    return True


def _convolutions(modules: Mapping[str, nn.Module]) -> set[int]:
    """Return the `id`s of the parameters that are convolved with their inputs.

    They are all parameters of convolutions, and tensors of four or more axes with small kernels in other modules.
    """
    found = set()
    for path, module in modules.items():
        convolution = is_convolution(parametrized_layer(modules, path))
        for parameter in module.parameters(recurse=False):
            if convolution or (parameter.ndim > 3 and max(parameter.shape[2:]) <= KERNEL):
                found.add(id(parameter))
    return found


GATED_LAYERS = (("gate_up_proj", "down_proj"), ("Wi", "Wo"), ("w12", "w3"))
"""Names of a fused projection onto gates and values, and of the projection that follows it."""


def _gated_layer(module: nn.Module) -> FoundMatrices:
    """Yield the fused gates and values of a feed-forward layer, as in Phi 3 and ModernBERT."""
    for name, following in GATED_LAYERS:
        weight, after = weight_of(module, name), weight_of(module, following)
        if weight is None or after is None:
            continue
        if weight.shape[0] == 2 * after.shape[1]:
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


RECOGNISED: tuple[Callable[[nn.Module], FoundMatrices], ...] = (attention_matrices, _gated_layer, _experts)
"""Functions that recognise layouts of modules, in order. The first that yields a parameter decides."""
