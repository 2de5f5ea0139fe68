"""Roles of parameters, from the type and sizes of the layer that holds a parameter, else from its name.

Output heads are searched among all layers of a model: by the model's own methods, by names, by sizes, and by position.
Many names mean an output only at certain places in the model. For example, a layer `proj` directly in the model is a
head, but a layer `proj` in a repeated module, such as a transformer block, is not. A layer is no head either if another
layer may consume its outputs. No role depends on values, wrappers, ranks or devices.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from eigengraft.blocking import is_convolution, is_transposed, parametrized_layer

Attributes = tuple[str, ...]
"""Path of a layer: the attributes that lead from the model to it."""

_CLEAR = re.compile(
    r"lm_head|mlp_head|head|head_dist|classifier|cls|logits|to_logits|embed_out|unembed|unembedding"
    r"|(text|visual|vision|image|audio)_projection"
)
"""Names that always mean an output head, wherever in the model the layer is."""
_SUFFIXED = re.compile(r"(?!conv_).+_(head|classifier|logits|unembed)|qa_outputs|seq_relationship|predict_.+")
"""Names of output heads, if the layer is outside lists of blocks and no other layer consumes its outputs."""
_SEVERAL = re.compile(r"(.+_)?(heads|classifiers|predictors|readouts|exits)|outputs|(output|final)_layers")
"""Names of containers in which each element is an output head."""
_AUXILIARY = re.compile(r"[Aa]ux(iliary)?_?([Ll]ogits|[Hh]ead|\d*)")
"""Names of auxiliary heads, as in Inception."""
_LIKELY = re.compile(
    r"out|outc|output|readout|proj|projection|score|fc|linear|dense|decoder|generator|predictor|regressor|final|last"
    r"|(?!.*norm).+_(out|output|outputs|pred|prediction)"
    r"|(out|output|final|last|pred|prediction|vocab|lm|class|action|value|policy)"
    r"_?(proj|projection|projector|layer|linear|fc|dense|conv|net)"
)
"""Names that mean an output head if the layer is directly in the model, and not inside one of its blocks. They are used
only if no head is found by stronger evidence."""
_ALSO_IN_ATTENTION = re.compile(r"out|out_proj|proj|projection|(out|output)_?(proj|projection)")
"""Names of output heads that are also names of the output projection of attention. If the last layer of a model has
such a name, it counts as a head only if no other layer may consume its outputs."""
_NUMBERED = re.compile(r"(fc|lin|linear|dense)_?(\d+)")
_FINAL = re.compile(
    r"head|fc|fc_?\d|proj|out|out_proj|output|decoder|linear|final|conv|conv_seg|classifier|cls|logits"
    r"|.+_(out|pred|score|logits)"
)
"""Names of the last layer in a head of several layers."""
_HIDDEN = frozenset(("dense", "pre_logits"))
"""Names of hidden layers in a head of several layers."""
_PARTS = frozenset(("model", "module", "backbone", "net", "network", "base_model", "student", "transformer"))
"""Names of attributes that hold a complete model inside a larger one."""
MOST_PADDING = 256
"""A vocabulary may be padded by fewer rows than this, as in a head of 50,304 rows for an embedding of 50,257 rows."""


@dataclass(frozen=True)
class Layer:
    """A layer whose weight has at least two axes longer than 1.

    key: `id` of the weight.
    path: path of the layer, without wrappers, adapters and parametrizations.
    kind: "linear", "conv" or "other" (attention, recurrent cells, experts). A layer of kind "other" is a head only if
        it has a clear name.
    inputs: number of inputs, or several candidates if it is unknown which axis is the input.
    outputs: number of outputs; 0 if it is unknown.
    tied: True if the weight is shared with an embedding.
    """

    key: int
    path: Attributes
    kind: Literal["linear", "conv", "other"]
    inputs: tuple[int, ...]
    outputs: int
    tied: bool = False


@dataclass(frozen=True)
class DeclaredHeads:
    """Heads that a module itself declares.

    path: path of the module.
    keys: `id` of the weights of the heads; empty if the module declares that it has no head.
    why: how the module declares them.
    complete: True if the module declares all its heads.
    """

    path: Attributes
    keys: Collection[int]
    why: str
    complete: bool


@dataclass(frozen=True)
class ModelStructure:
    """Facts about the modules of a model, beyond names and shapes of parameters.

    sequentials: paths of `nn.Sequential`, whose children are called in order.
    lists: paths of `nn.ModuleList`.
    declared: heads that modules declare.
    """

    sequentials: Collection[Attributes] = ()
    lists: Collection[Attributes] = ()
    declared: Sequence[DeclaredHeads] = ()


class Heads:
    """The output heads among the layers of one model, found from the strongest evidence to the weakest.

    The evidence is: modules that declare their heads; clear names; as many outputs as an embedding has rows; likely
    names directly in the model; the last position.

    layers: layers in the order of registration.
    rows: numbers of rows of the embeddings.
    structure: facts about the modules; None if only named parameters are known. The parameters may then be a part of a
        model. Therefore the last layer does not become a head by its position, but becomes `unclear`.
    why: for each head, by key, how it was found.
    unclear: the last layer if the evidence does not decide whether it is a head; else None.
    """

    def __init__(self, layers: Sequence[Layer], rows: Collection[int], structure: ModelStructure | None = None) -> None:
        self.layers, self.rows, self.structure = list(layers), rows, structure or ModelStructure()
        self.known = structure is not None
        self.places = {layer: place for place, layer in enumerate(self.layers)}
        self.consumers = defaultdict[int, list[Layer]](list)
        # Among all layers of a model, the first one consumes the inputs of the model, not the outputs of another layer,
        # and is left out here. If the model is unknown, `layers` may be a part of it, and no layer is left out.
        for layer in self.layers[self.known :]:
            for length in set(layer.inputs):
                self.consumers[length].append(layer)
        self.elements = Counter(pattern for path in {layer.path for layer in self.layers} for pattern in _lists(path))
        self.root = _common([layer.path for layer in self.layers]) if self.known else ()
        self.why = dict[int, str]()
        self.unclear = self._search()

    def _search(self) -> Layer | None:
        """Find all heads, and record in `self.why` how each was found.

        Return the last layer if the evidence does not decide whether it is a head; else None.
        """
        complete = self._declared()
        free = [layer for layer in self.layers if not any(_within(layer.path, path) for path in complete)]
        self._named(free, _CLEAR, self._clear)
        self._named(free, _SUFFIXED, self._outside_of_lists)
        self._several(free)
        unclear = None
        if not self.why and not complete and not any(layer.tied for layer in self.layers):
            self._vocabulary()
            unclear = None if self.why else self._likely()
        if self.why:
            self._named(free, _AUXILIARY, self._outside_of_lists)
        self._beside()
        return unclear

    def consumed(self, layer: Layer) -> bool:
        """Return True if another layer may consume the outputs of a layer, judged by numbers of inputs and outputs."""
        if any(other.path != layer.path for other in self.consumers[layer.outputs]):
            return True
        after = self.layers[self.places[layer] + 1 :] if layer.kind == "conv" and layer.outputs > 1 else ()
        return any(other.kind == "linear" and other.inputs[0] % layer.outputs == 0 for other in after)

    def repeated(self, layer: Layer) -> bool:
        """Return True if a layer is in a module that a list repeats, such as a transformer block.

        Another element of the list then has a layer at the same path within the element.
        """
        return any(self.elements[pattern] > 1 for pattern in _lists(layer.path))

    def _declared(self) -> list[Attributes]:
        """Add the heads that modules declare. Return the paths of modules that declare all their heads."""
        complete = []
        for declared in self.structure.declared:
            heads = [layer for layer in self.layers if layer.key in declared.keys and not layer.tied]
            part = not _within(self.root, declared.path)
            if part and any(self.consumed(layer) for layer in heads):
                continue  # the model has layers after this module
            self.why.update((layer.key, declared.why) for layer in heads)
            complete += [declared.path] if declared.complete else []
        return complete

    def _named(self, layers: Sequence[Layer], names: re.Pattern[str], accepts: Callable[[Layer, int], bool]) -> None:
        """Record a head for each attribute that has a name like `lm_head`, one that matches `names`.

        If the attribute holds a layer, this layer is the head. If it holds a module with several layers, the last of
        them is the head. The head is recorded only if `accepts(layer, index)` returns True for it.

        layers: the layers that are searched.
        accepts: function of the head and of an index. The path of a layer has the names of the attributes through which
            the model holds it, and `layer.path[index]` is the name that matches.
        """
        named = dict[Attributes, list[Layer]]()
        for layer in layers:
            for depth, attribute in enumerate(layer.path):
                if names.fullmatch(attribute):
                    named.setdefault(layer.path[: depth + 1], []).append(layer)
        for path, inside in named.items():
            head = self._last(inside, len(path))
            if head is not None and not head.tied and accepts(head, len(path) - 1):
                direct = len(head.path) == len(path)
                self.why.setdefault(head.key, "output head by name" if direct else f"last layer of {'.'.join(path)}")
                for layer in inside:  # an adapter stores a copy of the head at the same path, which is a head too
                    if layer.path == head.path and layer.kind == head.kind:
                        self.why.setdefault(layer.key, self.why[head.key])

    def _last(self, layers: Sequence[Layer], depth: int) -> Layer | None:
        """Return the last layer of a head that may consist of several layers, or None if no layer can be the last.

        layers: the layers of the head.
        depth: number of attributes in the path of the head. The layers inside have longer paths.
        """
        direct = [layer for layer in layers if len(layer.path) == depth]
        if direct:
            return direct[-1]
        inside = [layer for layer in layers if layer.kind != "other" and not self.repeated(layer)]
        free = [layer for layer in inside if not layer.tied and not self.consumed(layer)]
        # A layer whose weight is tied to an embedding is no candidate. If there is one, the candidates are the layers
        # whose outputs no other layer consumes.
        if any(layer.tied for layer in inside):
            inside = free
        final = [layer for layer in free if _is_final(layer.path[depth:]) and not _HIDDEN.intersection(layer.path)]
        final = final or [layer for layer in inside if not _names(layer.path[depth:])]
        if final and all(len(layer.path) == depth + 1 and layer.path[depth].isdigit() for layer in final):
            return max(final, key=lambda layer: int(layer.path[depth]))
        rest = [layer for layer in free or inside if not _HIDDEN.intersection(layer.path[depth:])]
        return next(reversed(final or rest), None)

    def _clear(self, layer: Layer, depth: int) -> bool:
        return not _has_number(layer.path[:depth]) or not self.consumed(layer)

    def _outside_of_lists(self, layer: Layer, depth: int) -> bool:
        free = layer is self.layers[-1] or not self.consumed(layer)
        return layer.kind != "other" and free and not _has_number(layer.path[:depth])

    def _several(self, layers: Sequence[Layer]) -> None:
        """Add heads in containers with a name such as `heads`: the last layer of each element of a container.

        In an `nn.Sequential` only the last element has a head.

        layers: the layers that are searched.
        """
        groups = dict[Attributes, list[Layer]]()
        for layer in layers:
            for depth, attribute in enumerate(layer.path[:-1]):
                if _SEVERAL.fullmatch(attribute) and not _has_number(layer.path[:depth]):
                    groups.setdefault(layer.path[: depth + 2], []).append(layer)
        stacks = {path[:-1]: [p for p in groups if p[:-1] == path[:-1]] for path in groups}
        for stack, paths in stacks.items():
            ends = list[Layer]()
            for path in paths:
                last = [own for own in groups[path] if own.kind != "other" and _is_final(own.path[len(path) :])]
                ends += last[-1:]
            if stack in self.structure.sequentials:
                ends = ends[-1:]
            for end in ends:
                if not self.consumed(end):
                    self.why.setdefault(end.key, f"output head in {'.'.join(stack)}")

    def _vocabulary(self) -> None:
        """Add the last Linear with as many outputs as an embedding has rows, or slightly more."""
        for layer in reversed(self.layers):
            fits = layer.kind == "linear" and any(rows > 1 and _pads(layer.outputs, rows) for rows in self.rows)
            exact = layer is self.layers[-1] and layer.outputs in self.rows and layer.inputs != (layer.outputs,)
            if fits and not self.repeated(layer) and (exact or not self.consumed(layer)):
                self.why[layer.key] = "last Linear onto a vocabulary"
                return

    def _likely(self) -> Layer | None:
        """Add heads by likely names, else by position.

        Return the last layer if the evidence does not decide whether it is a head; else None.
        """
        if not self.layers:
            return None
        last = self.layers[-1]
        self._named(self.layers, _LIKELY, self._at_top)
        if self.why:
            return None
        if (numbered := self._numbered(last)) is not None:
            self.why[numbered.key] = "last of numbered layers"
            return None
        if last.kind == "other" or len({layer.path for layer in self.layers}) < 2:
            return None
        if not self.known:
            # If the model has an embedding, the head may be tied to it, and is then not among `layers`. In this case,
            # and in a repeated module, the last layer counts as hidden if another layer may consume its outputs.
            tied = bool(self.rows)
            return None if self.consumed(last) and (tied or self.repeated(last)) else last
        ordered = all(
            last.path[:depth] in self.structure.sequentials for depth in range(len(self.root), len(last.path))
        )
        consumed, repeated = not ordered and self.consumed(last), not ordered and self.repeated(last)
        if consumed or repeated:
            return None if consumed and repeated else last
        why = "last layer of a sequence" if ordered else "last layer, no other consumes its outputs"
        self.why[last.key] = why
        if not ordered:
            self._parallel(last)
        return None

    def _at_top(self, layer: Layer, depth: int) -> bool:
        """Return True if a layer whose name suggests a head, such as `proj` or `out`, may be a head.

        There are two conditions. First, the layer is an attribute of the model itself, or of a complete model inside
        it, such as `model.backbone`. Second, no other layer consumes its outputs. The last layer of the model need not
        satisfy the second condition, unless its name is also usual for the output projection of attention, as
        `out_proj`.

        depth: `layer.path[depth]` is the attribute whose name suggests a head.
        """
        inner = layer.path[len(self.root) : depth]
        if depth < len(self.root) or not _PARTS.issuperset(inner) or layer.kind == "other" or self.repeated(layer):
            return False
        waived = layer is self.layers[-1] and not _ALSO_IN_ATTENTION.fullmatch(layer.path[depth])
        return waived or not self.consumed(layer)

    def _numbered(self, last: Layer) -> Layer | None:
        """Return the last layer if it is the last of numbered layers (`fc1`, `fc2`, `fc3`) of one module; else None."""
        matched = _NUMBERED.fullmatch(last.path[-1]) if last.path else None
        if matched is None or last.kind == "other" or _has_number(last.path[:-1]) or self.consumed(last):
            return None
        others = (layer.path for layer in self.layers[:-1] if layer.path[:-1] == last.path[:-1])
        stems = [found for path in others if path and (found := _NUMBERED.fullmatch(path[-1])) is not None]
        before = [int(found[2]) for found in stems if found[1] == matched[1]]
        return last if before and max(before) < int(matched[2]) else None

    def _parallel(self, head: Layer) -> None:
        """Add the heads of sibling modules, as in a model with a policy module and a value module.

        The modules directly in the model are visited backward, from the one before the module of `head`. The last layer
        of each becomes a head. The search ends at the first module whose last layer cannot be a head, or differs from
        `head` in both its number of inputs and its number of outputs.
        """
        depth = len(self.root)
        parts = dict[Attributes, Layer]()
        for layer in self.layers:
            parts[layer.path[: depth + 1]] = layer
        for part, end in list(parts.items())[-2::-1]:
            alike = end.inputs == head.inputs or end.outputs == head.outputs
            if end is self.layers[0] or end.kind != head.kind or not alike or self.consumed(end) or self.repeated(end):
                return
            self.why[end.key] = f"last layer of {'.'.join(part)}, beside {'.'.join(head.path)}"

    def _beside(self) -> None:
        """Add output layers in the same module as a head, such as the regression of boxes beside a classification.

        For each head, two searches go through its neighbors: one through the layers after it, and one through the
        layers before it, both beginning with the nearest. A search makes each layer a head, until it ends at the first
        layer that is in another module, has another number of inputs, or cannot be a head. In a `ModuleList` the number
        of inputs may differ, as for detection heads at several scales.

        There is no search before a head that is directly in the model, or in a `Sequential`: the layers there are
        usually hidden.
        """
        for head in [layer for layer in self.layers if layer.key in self.why and self.known and layer.path]:
            stack, place = head.path[:-1], self.places[head]
            if head.path[-1].isdigit() and stack not in self.structure.lists:
                continue  # all layers of a sequence but the last are hidden
            before = self.layers[:place][::-1] if len(stack) > len(self.root) else ()
            for direction in (self.layers[place + 1 :], before if stack not in self.structure.sequentials else ()):
                for layer in direction:
                    alike = layer.inputs == head.inputs or (stack in self.structure.lists and stack != self.root)
                    if layer.path[:-1] != stack or layer.kind != head.kind or not alike or self._hidden(layer):
                        break
                    self.why.setdefault(layer.key, f"output head beside {'.'.join(head.path)}")

    def _hidden(self, layer: Layer) -> bool:
        """Return True if a layer next to a head is not a head itself.

        This is so if its name, its kind or a tied weight excludes it, if another layer uses its output, or if a list
        repeats it.
        """
        named = layer.path[-1] in _HIDDEN or layer.tied or layer.kind == "other"
        return named or self.consumed(layer) or self.repeated(layer)


def _lists(path: Attributes) -> Iterator[tuple[Attributes, Attributes]]:
    """Yield (path of the list, path of the layer within its element of the list) for each list that contains a layer.

    A list of modules is recognized by a number in the layer's path, which is the index of the element.

    path: path of the layer.
    """
    for depth, attribute in enumerate(path[:-1]):
        if attribute.isdigit():
            yield path[:depth], path[depth + 1 :]


def _common(paths: Sequence[Attributes]) -> Attributes:
    """Return the path of the innermost module that contains all layers and is not itself a layer.

    paths: paths of the layers.
    """
    shared = list[str]()
    for attributes in zip(*(path[:-1] for path in paths), strict=False):
        if len(set(attributes)) > 1 or (attributes[0].isdigit() and shared):
            break
        shared.append(attributes[0])
    return tuple(shared)


def _within(path: Attributes, outer: Attributes) -> bool:
    return path[: len(outer)] == outer


def _has_number(path: Iterable[str]) -> bool:
    return any(attribute.isdigit() for attribute in path)


def _is_final(path: Attributes) -> bool:
    """Return True if a layer inside a head may be the last layer of the head.

    This is so if the last name in the path matches `_FINAL`, or if the path has only numbers.

    path: path of the layer, relative to the head.
    """
    names = _names(path)
    return not names or _FINAL.fullmatch(names[-1]) is not None


def _names(path: Attributes) -> list[str]:
    return [attribute for attribute in path if not attribute.isdigit()]


def _pads(outputs: int, rows: int) -> bool:
    """Return True if `outputs` is `rows`, or `rows` rounded up to a multiple of 8 or of a larger power of two."""
    power = outputs & -outputs  # the largest power of two that divides `outputs`
    return outputs == rows or (power >= 8 and 0 < outputs - rows < min(power, MOST_PADDING, rows))


ParamRole = Literal["embedding", "head", "norm", "bias", "scalar", "vector", "hidden"]
_EMBEDDING = re.compile(
    r"(^|\.|_)(emb|embed|embeds|embedding|embeddings|embed_(?!out$)[a-z_]+|tok_embeddings|embedding_table|wte|wpe)$"
    r"|(^|\.|_)((pos|position|positional)_(encodings?|table)|relative_(attention|position)_bias(_table)?)$"
    r"|^(model\.)?shared$"
)
_VECTORS = re.compile(r"((\w+_)?(pos|position|positional|pe|tokens?|latents?|prompts?|codebook)|positions|queries)")
"""Names of parameters that are tables of vectors if no layer owns them: `self.pos = nn.Parameter(...)`."""
_NORM = re.compile(r"(^|\.|_)((layer|rms|batch|group|instance)?_?norm|bn|ln)(_?\d+|_[a-z])?$", re.IGNORECASE)
_NAMED_NORM = re.compile(r"(^|\.|_)(layer|rms|batch|group|instance)_?norm(_?\d+|_[a-z])?$", re.IGNORECASE)
"""Names that clearly mean a normalization layer, even if its gain has several axes."""
_BIAS = re.compile(r"(^|_)bias$")
_HELD = re.compile(r"(?P<own>\w*weight\w*)_(orig|v|bar)")
"""Attributes in which torch.nn.utils.spectral_norm and weight_norm store a tensor from which a weight is computed."""
_ORIGINAL = re.compile(r"original\d*")
_KEPT = ("base_layer", "original_module")
"""Attributes in which adapters (peft) store the layer that they wrap."""
_COPIES = "modules_to_save"
"""Attribute in which adapters (peft) store copies of a layer, under the names of the adapters."""
NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, _NormBase)
"""Classes of normalization layers in torch.nn."""


@dataclass(frozen=True)
class Holder:
    """The layer to which a parameter belongs, and the layer's attribute that is the parameter.

    path: path of the layer, without wrappers, adapters and parametrizations.
    own: the layer's attribute that is the parameter, or that is computed from the parameter.
    module: the layer; None if only its name is known.
    magnitude: True if the parameter scales the rows of a weight, as in weight_norm.
    """

    path: Attributes
    own: str
    module: nn.Module | None = None
    magnitude: bool = False

    @classmethod
    def of(cls, path: str, own: str, module: nn.Module | None = None) -> Holder:
        """Return the holder of a parameter: its layer, and the layer's attribute.

        Modules that adapters and parametrizations insert are not part of the result. For example, the parameter
        `up.parametrizations.weight.original1` belongs to the layer `up` and its attribute `weight`.

        path: path of the module that has the parameter, without wrappers.
        own: the module's attribute that is the parameter.
        module: the layer; None if only its name is known.
        """
        attributes, kept, magnitude = path.split(".") if path else [], list[str](), False
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
        """Return True if the attribute is called `weight`."""
        return self.own == "weight"

    @property
    def is_layer(self) -> bool:
        """Return True if the module multiplies its inputs by the weight, as a Linear or a convolution does."""
        module = self.module
        linear = all(isinstance(getattr(module, name, None), int) for name in ("in_features", "out_features"))
        return module is not None and self.is_weight and (linear or is_convolution(module) or is_transposed(module))


def plain_role(holders: Sequence[Holder], shape: tuple[int, ...]) -> tuple[ParamRole, str] | None:
    """Return (role, reason) of a parameter by its holders and shape, or None for the weight of a layer.

    Only the search for heads decides if the weight of a layer is hidden or a head.
    """
    thin = sum(length > 1 for length in shape) < 2
    if any(_is_table(holder, thin) for holder in holders):
        return "embedding", "embedding"
    if any(_is_norm(holder, shape, thin) for holder in holders):
        return "norm", "normalization"
    if not any(holder.is_layer for holder in holders) and any(_is_named_table(holder, shape) for holder in holders):
        return "embedding", "embedding"
    if any(_BIAS.search(holder.own) for holder in holders):
        return "bias", "bias"
    if len(shape) < 2:
        return ("vector" if shape else "scalar"), f"{len(shape)}-d"
    if thin and holders and not any(_may_be_matrix(holder) for holder in holders):
        return "vector", f"a vector of shape {list(shape)}"
    return None


def layer_of(key: int, holder: Holder, shape: tuple[int, ...], tied: bool) -> Layer:
    """Return the layer of a weight, with its numbers of inputs and outputs from the module, or else from the shape.

    key: `id` of the weight.
    holder: module and attribute to which the weight belongs.
    shape: shape of the weight.
    tied: True if the weight is also that of an embedding.
    """
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
    """Return the numbers of inputs and outputs of a layer.

    module: the layer; None if it is not known.
    names: attributes of the module that have these two numbers.
    stored: the two numbers as the shape of the weight shows them. They are returned if there is no module, or if it
        lacks an attribute.
    """
    n, m = (getattr(module, name, None) for name in names)
    return (n, m) if isinstance(n, int) and isinstance(m, int) else stored


def model_structure(model: nn.Module, paths: dict[str, str]) -> ModelStructure:
    """Return the containers among the modules of a model, and the output heads that its modules declare.

    paths: path of each module without wrappers (`canonical_paths`), by its path in `named_modules`.
    """
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
    """Return the `id` of the weights of all modules that `get_input_embeddings()` returns, except Linear layers."""
    found = set[int]()
    for module in model.modules():
        for table in _returned(module, "get_input_embeddings") or ():
            weights = [own for own in table.parameters(recurse=False) if own.ndim == 2]
            if not Holder((), "weight", table).is_layer:
                found.update(map(id, weights))
    return found


def _returned(module: nn.Module, method: str) -> list[nn.Module] | None:
    """Return the modules that a method of a module returns, or None if it has no such method or the method fails."""
    if not callable(getattr(type(module), method, None)):
        return None
    try:
        value = getattr(module, method)()
    except Exception:  # the user's method needs arguments or is not implemented, so it gives no information
        return None
    values = value if isinstance(value, (tuple, list)) else (value,)
    return list(values) if all(isinstance(own, nn.Module) for own in values) else None


def _weights(heads: Sequence[nn.Module]) -> frozenset[int]:
    """Return, for each head, the `id` of its last parameter with at least two axes longer than 1."""
    weights = [[p for p in head.parameters() if sum(length > 1 for length in p.shape) > 1] for head in heads]
    return frozenset(id(own[-1]) for own in weights if own)


def _is_table(holder: Holder, thin: bool) -> bool:
    known = isinstance(getattr(holder.module, "num_embeddings", None), int)
    return known and holder.is_weight and not (holder.magnitude and thin)


def _is_norm(holder: Holder, shape: tuple[int, ...], thin: bool) -> bool:
    module, lengths = holder.module, getattr(holder.module, "normalized_shape", None)
    if isinstance(module, NORMS) or (shape and isinstance(lengths, (tuple, list)) and tuple(lengths) == shape):
        return True
    path = ".".join(holder.path)
    if not thin:
        return module is None and _NAMED_NORM.search(path) is not None
    named = any(cls.__name__.endswith(("Norm", "Norm1d", "Norm2d", "Norm3d")) for cls in type(module).__mro__)
    return not holder.is_layer and (named or _NORM.search(path) is not None)


def _may_be_matrix(holder: Holder) -> bool:
    return holder.is_weight and not holder.magnitude and (holder.module is None or holder.is_layer)


def _is_named_table(holder: Holder, shape: tuple[int, ...]) -> bool:
    """Return True if the name of the module or parameter is usual for embeddings.

    If the parameter is called `weight`, it must also have two axes, as a table has.
    """
    if not holder.is_weight and _VECTORS.fullmatch(holder.own) and sum(length > 1 for length in shape) > 1:
        return True
    names = holder.path if holder.is_weight else (*holder.path, holder.own)
    return _EMBEDDING.search(".".join(names)) is not None and (not holder.is_weight or len(shape) == 2)


def parameter_holders(model: nn.Module, paths: dict[str, str]) -> list[tuple[int, Holder]]:
    """Return pairs (`id` of a parameter, its layer and attribute) for every parameter of every module, in order.

    A parameter that several modules share has several pairs.

    paths: path of each module without wrappers (`canonical_paths`), by its path in `named_modules`.
    """
    modules, found = dict(model.named_modules()), list[tuple[int, Holder]]()
    for path, module in modules.items():
        layer = parametrized_layer(modules, path)
        for own, parameter in module.named_parameters(recurse=False):
            found.append((id(parameter), Holder.of(paths[path], own, layer)))
    return found
