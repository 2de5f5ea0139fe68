"""Roles of parameters: what a tensor is for, by the type and the sizes of the layer that holds it, else by its name."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from eigengraft.blocking import is_convolution, is_transposed, parametrized_layer

from .output_heads import Attributes, DeclaredHeads, Layer, ModelStructure
from .param_names import canonical_path

ParamRole = Literal["embedding", "head", "norm", "bias", "scalar", "vector", "hidden"]
_EMBEDDING = re.compile(
    r"(^|\.|_)(emb|embed|embeds|embedding|embeddings|embed_(?!out$)[a-z_]+|tok_embeddings|embedding_table|wte|wpe)$"
    r"|(^|\.|_)((pos|position|positional)_(encodings?|table)|relative_(attention|position)_bias(_table)?)$"
    r"|^(model\.)?shared$"
)
_NORM = re.compile(r"(^|\.|_)((layer|rms|batch|group|instance)?_?norm|bn|ln)(_?\d+|_[a-z])?$", re.IGNORECASE)
_NAMED_NORM = re.compile(r"(^|\.|_)(layer|rms|batch|group|instance)_?norm(_?\d+|_[a-z])?$", re.IGNORECASE)
"""Paths of norms whose gains may have two axes, as those of a LayerNorm over several axes."""
_BIAS = re.compile(r"(^|_)bias$")
_HELD = re.compile(r"(?P<own>\w*weight\w*)_(orig|v|bar)")
"""The tensor in which torch.nn.utils.spectral_norm and weight_norm keep a weight that they compute from it."""
_ORIGINAL = re.compile(r"original\d*")
_KEPT = ("base_layer", "original_module")
"""Attributes in which adapters (peft) keep the layer that they wrap."""
_COPIES = "modules_to_save"
"""The attribute in which adapters (peft) keep copies of a layer by the name of the adapter."""
NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, _NormBase)
"""Norms of torch.nn."""


@dataclass(frozen=True)
class Holder:
    """One place of a model that holds a parameter.

    path: attributes that lead to its layer, without wrappers, adapters and parametrizations.
    own: the attribute of the layer that is the parameter, or is computed from it.
    module: the layer; None: its names alone are known.
    magnitude: whether the parameter scales the rows of a weight, as weight_norm has it.
    """

    path: Attributes
    own: str
    module: nn.Module | None = None
    magnitude: bool = False

    @classmethod
    def of(cls, path: str, own: str, module: nn.Module | None = None, magnitude: bool = False) -> Holder:
        """The holder of a parameter under the attribute `own` of the module with that canonical path."""
        attributes, kept = path.split(".") if path else [], list[str]()
        if _ORIGINAL.fullmatch(own) and attributes[-2:-1] == ["parametrizations"]:
            magnitude, own = own == "original0", attributes[-1]
            attributes = attributes[:-2]
        elif matched := _HELD.fullmatch(own):
            own = matched["own"]
        for attribute in attributes:
            if kept[-1:] == [_COPIES]:
                kept.pop()
            elif attribute not in _KEPT:
                kept.append(attribute)
        return cls(tuple(kept), own, module, magnitude)

    @property
    def is_weight(self) -> bool:
        """Whether the parameter is the weight of a layer, by the attribute's name."""
        return self.own == "weight"

    @property
    def is_layer(self) -> bool:
        """Whether the module multiplies its inputs by the weight: a Linear, a convolution or a module like these."""
        module = self.module
        linear = all(isinstance(getattr(module, name, None), int) for name in ("in_features", "out_features"))
        return module is not None and self.is_weight and (linear or is_convolution(module) or is_transposed(module))


def plain_role(holders: Sequence[Holder], shape: tuple[int, ...]) -> tuple[ParamRole, str] | None:
    """(role, reason) of a parameter by its holders and shape; None for the weight of a layer, hidden or head."""
    thin = sum(length > 1 for length in shape) < 2
    if any(_is_table(holder, thin) for holder in holders):
        return "embedding", "embedding"
    if any(_is_norm(holder, shape, thin) for holder in holders):
        return "norm", "normalisation"
    if not any(holder.is_layer for holder in holders) and any(_is_named_table(holder, shape) for holder in holders):
        return "embedding", "embedding"
    if any(_BIAS.search(holder.own) for holder in holders):
        return "bias", "bias"
    if len(shape) < 2:
        return ("vector" if shape else "scalar"), f"{len(shape)}-d"
    if thin and holders and not any(_may_be_matrix(holder) for holder in holders):
        return "vector", f"a vector of shape {list(shape)}"
    return None


def layer_of(key: int, holder: Holder, shape: tuple[int, ...], tied: bool = False) -> Layer:
    """The layer that a weight belongs to, with as many inputs and outputs as its module or else its shape says."""
    module, path = holder.module, holder.path
    if not holder.is_weight or "parametrizations" in path:
        return Layer(key, (*path, holder.own) if not holder.is_weight else path, "other", shape, 0, tied)
    if isinstance(module, (nn.RNNBase, nn.modules.linear.NonDynamicallyQuantizableLinear)):  # attention's projection
        return Layer(key, path, "other", shape, 0, tied)
    if module is not None and is_convolution(module):
        n, m = _sizes(module, ("in_channels", "out_channels"), (shape[1], shape[0]))
        return Layer(key, path, "conv", (n,), m, tied)
    if len(shape) == 2:
        stored = shape if module is not None and is_transposed(module) else shape[::-1]
        n, m = _sizes(module, ("in_features", "out_features"), (stored[0], stored[1]))
        return Layer(key, path, "linear", (n,), m, tied)
    if module is None and len(shape) > 3:
        return Layer(key, path, "conv", (shape[1],), shape[0], tied)
    return Layer(key, path, "other", shape, 0, tied)


def _sizes(module: nn.Module | None, names: tuple[str, str], stored: tuple[int, int]) -> tuple[int, int]:
    """Numbers of inputs and outputs by the attributes of a module, or else as they are stored."""
    n, m = (getattr(module, name, None) for name in names)
    return (n, m) if isinstance(n, int) and isinstance(m, int) else stored


def model_structure(model: nn.Module, paths: dict[str, str]) -> ModelStructure:
    """Facts of the modules of a model; paths: the canonical path of each, by path."""
    sequentials, lists, declared = set[Attributes](), set[Attributes](), list[DeclaredHeads]()
    for path, module in model.named_modules():
        place = Holder.of(paths[path], "weight").path
        if isinstance(module, nn.Sequential):
            sequentials.add(place)
        if isinstance(module, nn.ModuleList):
            lists.add(place)
        if isinstance(module, nn.AdaptiveLogSoftmaxWithLoss):
            keys = _weights([module.head, *module.tail])
            declared.append(DeclaredHeads(place, keys, "clusters of AdaptiveLogSoftmaxWithLoss", complete=True))
        for method, complete in (("get_output_embeddings", False), ("get_classifier", True)):
            heads = _returned(module, method)
            if heads is not None:
                declared.append(DeclaredHeads(place, _weights(heads), f"output head by {method}", complete))
    return ModelStructure(sequentials, lists, declared)


def input_embeddings(model: nn.Module) -> set[int]:
    """Weights, by `id`, that modules return by `get_input_embeddings()` as tables of rows, not as layers."""
    found = set[int]()
    for module in model.modules():
        for table in _returned(module, "get_input_embeddings") or ():
            weights = [own for own in table.parameters(recurse=False) if own.ndim == 2]
            if not Holder((), "weight", table).is_layer:
                found.update(map(id, weights))
    return found


def _returned(module: nn.Module, method: str) -> list[nn.Module] | None:
    """The modules that a method of a module's class returns; None if there is none, or it does not say."""
    if not callable(getattr(type(module), method, None)):
        return None
    try:
        value = getattr(module, method)()
    except Exception:  # a method of the user's that asks for more, or is not implemented: it says nothing
        return None
    values = value if isinstance(value, (tuple, list)) else (value,)
    return list(values) if all(isinstance(own, nn.Module) for own in values) else None


def _weights(heads: Sequence[nn.Module]) -> frozenset[int]:
    """The last weight of each head, by `id`."""
    weights = [[p for p in head.parameters() if sum(length > 1 for length in p.shape) > 1] for head in heads]
    return frozenset(id(own[-1]) for own in weights if own)


def _is_table(holder: Holder, thin: bool) -> bool:
    module = holder.module
    known = isinstance(module, (nn.Embedding, nn.EmbeddingBag)) or isinstance(
        getattr(module, "num_embeddings", None), int
    )
    return known and holder.is_weight and not (holder.magnitude and thin)


def _is_norm(holder: Holder, shape: tuple[int, ...], thin: bool) -> bool:
    module = holder.module
    if isinstance(module, NORMS) or (shape and tuple(_lengths(module)) == shape):
        return True
    path = ".".join(holder.path)
    if not thin:
        return module is None and _NAMED_NORM.search(path) is not None
    named = any(cls.__name__.endswith(("Norm", "Norm1d", "Norm2d", "Norm3d")) for cls in type(module).__mro__)
    return not holder.is_layer and (named or _NORM.search(path) is not None)


def _lengths(module: nn.Module | None) -> Iterator[int]:
    lengths = getattr(module, "normalized_shape", ())
    return iter(lengths if isinstance(lengths, (tuple, list)) else ())


def _may_be_matrix(holder: Holder) -> bool:
    return holder.is_weight and not holder.magnitude and (holder.module is None or holder.is_layer)


def _is_named_table(holder: Holder, shape: tuple[int, ...]) -> bool:
    """Whether a name is that of an embedding, and the shape of a weight is that of a table."""
    names = holder.path if holder.is_weight else (*holder.path, holder.own)
    return _EMBEDDING.search(".".join(names)) is not None and (not holder.is_weight or len(shape) == 2)


def parameter_holders(model: nn.Module, paths: dict[str, str]) -> list[tuple[int, Holder]]:
    """(`id` of a parameter, its holder) of all modules in their order; paths: the canonical path of each, by path."""
    modules, found = dict(model.named_modules()), list[tuple[int, Holder]]()
    for path, module in modules.items():
        layer = parametrized_layer(modules, path)
        for own, parameter in module.named_parameters(recurse=False):
            found.append((id(parameter), Holder.of(paths[path], own, layer)))
    return found


def named_holder(name: str) -> Holder:
    """The holder of a parameter of which only the name is known."""
    path, _, own = name.rpartition(".")
    return Holder.of(canonical_path(path), own)
