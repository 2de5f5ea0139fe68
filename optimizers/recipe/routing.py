"""Routing of parameters to updates: names and descriptions of parameters, and rules that match them.

Names are canonical, without the attributes that wrappers add, so that no result depends on a wrapper.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from os import PathLike
from typing import Annotated, Any, Self

from pydantic import BeforeValidator, Field, field_validator
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from eigengraft.blocking import ModuleFacts, module_facts, named_factor
from eigengraft.component import Component, as_tuple

from .roles import (
    Heads,
    Holder,
    Layer,
    ParamRole,
    input_embeddings,
    layer_of,
    model_structure,
    parameter_holders,
    plain_role,
)

_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
"""Attributes in which torch.compile, activation checkpointing and FSDP store the wrapped module."""
_PARALLEL = "module"
"""Attribute in which DistributedDataParallel and DataParallel store the wrapped module.

Any module of a model may have an attribute of this name. So it is removed from the names of parameters only if the
module that has it is of one of these two types.
"""


def canonical_name(name: str) -> str:
    """Return a qualified name without the attributes of wrappers, and without a leading `module`.

    "module._orig_mod.blocks.0._checkpoint_wrapped_module.up.weight" becomes "blocks.0.up.weight".
    """
    *path, own = name.split(".")
    path = [attribute for attribute in path if attribute not in _WRAPPERS]
    while path and path[0] == _PARALLEL:
        del path[0]
    return ".".join([*path, own])


def canonical_names(names: Sequence[str], model: nn.Module | None = None) -> list[str]:
    """Return the names of parameters without the attributes of wrappers, as `canonical_name` returns them.

    If two names would become equal, neither is changed.

    model: the model of the parameters, in which wrappers for data parallelism are recognized; None if it is unknown.
    """
    inside = [] if model is None else _inside(model)
    found = [canonical_name(_without(inside, name)) for name in names]
    counts = Counter(found)
    return [new if counts[new] == 1 else name for new, name in zip(found, names, strict=True)]


def canonical_paths(model: nn.Module) -> dict[str, str]:
    """Return the canonical path of every module of a model, by its path in `named_modules`.

    A wrapper and the module inside it have the same canonical path.
    """
    inside = _inside(model)
    weights = {path: _without(inside, f"{path}.weight") for path, _ in model.named_modules()}
    return {path: canonical_name(name).rpartition(".")[0] for path, name in weights.items()}


def _inside(model: nn.Module) -> list[str]:
    """Return the path, with a dot at the end, of each wrapper for data parallelism inside a model, longest first."""
    kinds = (DistributedDataParallel, DataParallel)
    found = [f"{path}." for path, module in model.named_modules() if path and isinstance(module, kinds)]
    return sorted(found, key=len, reverse=True)


def _without(inside: Iterable[str], name: str) -> str:
    """Return a name without the attribute `module` of the wrappers whose paths are in `inside`."""
    for prefix in inside:
        if name.startswith(f"{prefix}{_PARALLEL}."):
            name = prefix + name.removeprefix(f"{prefix}{_PARALLEL}.")
    return name


def group_with_names(entry: Any) -> Any:
    """Return a param group with its parameters in a list, as (name, parameter) pairs if it has `param_names`.

    Any other object is returned unchanged, so that torch accepts or refuses it.
    """
    if not isinstance(entry, dict) or not isinstance(entry.get("params"), Iterable):
        return entry
    if isinstance(entry["params"], (Tensor, set)):
        return entry
    params, names = list(entry["params"]), entry.get("param_names") or ()
    if len(names) == len(params) and all(isinstance(own, Tensor) for own in params):
        params = list(zip(names, params, strict=True))
    return {**entry, "params": params}


@dataclass(frozen=True)
class ParamInfo:
    """Description of a parameter, against which rules are matched.

    name: qualified name without the attributes of wrappers; None for a parameter without a name.
    shape: global shape.
    numel: global number of entries.
    role: role of the parameter, such as "embedding" or "hidden".
    why: how the role was found.
    modules: class names of the modules that hold the parameter, and of their base classes.
    facts: which matrices form the parameter, and which factor of a product it is, as far as its modules define this.
    unclear: True for the weight of the last layer if the evidence does not decide whether it is an output head.
    """

    name: str | None
    shape: tuple[int, ...]
    numel: int
    role: ParamRole
    why: str
    modules: tuple[str, ...] = ()
    facts: ModuleFacts = field(default_factory=ModuleFacts)
    unclear: bool = False


@dataclass(frozen=True)
class DescribedParameters:
    """Parameters of an optimizer with their descriptions.

    params: tensors, (name, tensor) pairs, or param groups.
    infos: descriptions by `id` of the parameter. A missing description is made from name and shape.
    others: descriptions of parameters of the same model that other optimizers update.
    model: the model of all these parameters; None if it is unknown.
    """

    params: Iterable[Any]
    infos: Mapping[int, ParamInfo] = field(default_factory=dict)
    others: Sequence[ParamInfo] = ()
    model: nn.Module | None = None

    @classmethod
    def of(cls, params: Iterable[Any] | DescribedParameters) -> Self:
        """Describe every named parameter that has no description yet. Names in descriptions are canonical.

        Raises TypeError for a module or a recipe in place of parameters.
        """
        if isinstance(params, nn.Module):
            raise TypeError("params: got a module in place of parameters; use eigengraft.compose(recipe, model)")
        if _is_recipe(params):
            raise TypeError(
                f"params: got the recipe {params!r:.60} in place of parameters; the order is Optimizer(params, recipe) "
                "and compose(recipe, model)"
            )
        given = params if isinstance(params, DescribedParameters) else cls(params)
        return cls(given.params, given.infos) if isinstance(given.params, Tensor) else cls._completed(given)

    @classmethod
    def _completed(cls, given: DescribedParameters) -> Self:
        if not isinstance(given.params, Iterable):
            raise TypeError(f"params: they must be tensors, (name, tensor) pairs or groups, got {given.params!r:.60}")
        entries = (dict(entry) if isinstance(entry, Mapping) else entry for entry in given.params)
        params = [group_with_names(entry) for entry in entries]
        if not params:
            raise ValueError(
                "params: got an empty parameter list; a generator that was read before is empty, so pass "
                "model.parameters() anew, and check that the module has parameters"
            )
        groups = [entry.get("params", ()) if isinstance(entry, dict) else [entry] for entry in params]
        for group in groups:
            for entry in group if isinstance(group, Iterable) and not isinstance(group, Tensor) else [group]:
                if isinstance(found := entry[-1] if isinstance(entry, tuple) and entry else entry, nn.Module):
                    raise TypeError(
                        f"params: got the module {type(found).__name__} among the parameters; pass "
                        "model.named_parameters(), or several models as one, as in compose(recipe, "
                        "torch.nn.ModuleList([first, second]))"
                    )
        named = [entry for group in groups if not isinstance(group, Tensor) for entry in group]
        pairs = [entry for entry in named if isinstance(entry, tuple) and len(entry) == 2]
        for entry in params if pairs else ():
            if isinstance(entry, dict) and entry.get("params") == []:
                entry.setdefault("param_names", [])  # torch requires names of all groups or of none
        new = [pair for pair in pairs if isinstance(pair[1], Tensor) and id(pair[1]) not in given.infos]
        return cls(params, {**describe_named(new), **given.infos}, given.others, given.model)


def _is_recipe(value: object) -> bool:
    """Return True for a recipe in any form: a name, a path, a component, a mapping, or a list of stages."""
    if isinstance(value, (list, tuple)):
        return bool(value) and not isinstance(value[0], (list, tuple)) and _is_recipe(value[0])
    if isinstance(value, Mapping):
        return "params" not in value and not any(map(_holds_tensors, value.values()))
    return isinstance(value, (str, PathLike, Component))


def _holds_tensors(value: object) -> bool:
    """Return True for a tensor, for a list with a tensor, and for an iterator, which may be one of parameters."""
    if isinstance(value, (list, tuple)):
        return any(map(_holds_tensors, value))
    return isinstance(value, (Tensor, Iterator))


@dataclass(frozen=True)
class _Described:
    """A parameter, as known before output heads are searched. Weights of layers have a role only after the search.

    holders: the modules that hold the parameter, several if it is tied.
    plain: (role, how it was found), or None for the weight of a layer, which is hidden or a head.
    """

    name: str | None
    parameter: Tensor
    holders: Sequence[Holder]
    facts: ModuleFacts
    plain: tuple[ParamRole, str] | None

    @classmethod
    def of(cls, name: str | None, parameter: Tensor, holders: Sequence[Holder], facts: ModuleFacts) -> Self:
        factor = facts.factor is not None and parameter.ndim == 2
        return cls(name, parameter, holders, facts, None if factor else plain_role(holders, tuple(parameter.shape)))

    @property
    def rows(self) -> tuple[int, ...]:
        """Return the number of rows, as a tuple (rows,), if the parameter is an embedding; otherwise return ()."""
        table = self.plain is not None and self.plain[0] == "embedding" and self.parameter.ndim == 2
        return tuple(self.parameter.shape[:1]) if table else ()

    def layer(self, holder: Holder) -> tuple[Layer, ...]:
        """Return the layer whose weight this parameter is, as a tuple (layer,). Return () if it is no layer's weight.

        holder: one of the modules that hold the parameter.
        """
        tied = self.plain is not None and self.plain[0] == "embedding" and holder.is_layer
        if self.facts.factor is not None or (self.plain is not None and not tied):
            return ()
        return (layer_of(id(self.parameter), holder, tuple(self.parameter.shape), tied),)

    def info(self, heads: Heads) -> ParamInfo:
        """Return name, shape, role and layer of the parameter, from which routes are chosen.

        heads: the output heads of the model.
        """
        key, shape = id(self.parameter), tuple(self.parameter.shape)
        unclear = heads.unclear is not None and heads.unclear.key == key
        role, why = self.plain or ("hidden", f"{len(shape)}-d weight")
        if self.plain is None and key in heads.why:
            role, why = "head", heads.why[key]
        if unclear:
            why = f"{why}, perhaps an output head, because it is the last layer"
        modules = [holder.module for holder in self.holders if holder.module is not None]
        kinds = [cls.__name__ for module in modules for cls in type(module).__mro__ if cls is not object]
        return ParamInfo(
            self.name, shape, self.parameter.numel(), role, why, tuple(dict.fromkeys(kinds)), self.facts, unclear
        )


def describe_named(named: Sequence[tuple[str, Tensor]], taken: Container[str] = ()) -> dict[int, ParamInfo]:
    """Describe named parameters. Return their descriptions by `id`, with canonical names.

    taken: names of other parameters. A parameter whose canonical name is among them keeps its given name.
    """
    given = [name for name, _ in named]
    names = [name if new in taken else new for name, new in zip(given, canonical_names(given), strict=True)]
    rows = []
    for name, (_, parameter) in zip(names, named, strict=True):
        path, _, own = canonical_name(name).rpartition(".")
        rows.append(_Described.of(name, parameter, [Holder.of(path, own)], ModuleFacts(factor=named_factor(name))))
    layers = [layer for row in rows for holder in row.holders for layer in row.layer(holder)]
    heads = Heads(layers, {length for row in rows for length in row.rows})
    # if all given parameters are weights of layers, the user has selected hidden layers, and the last one is hidden too
    if all(row.plain is None for row in rows):
        heads.unclear = None
    return {id(row.parameter): row.info(heads) for row in rows}


def describe_unnamed(parameter: Tensor) -> ParamInfo:
    """Return the description of a parameter of which only the shape is known."""
    return _Described.of(None, parameter, [], ModuleFacts()).info(Heads([], ()))


def describe_model(model: nn.Module) -> dict[int, ParamInfo]:
    """Describe every parameter of a model. Return the descriptions by `id`."""
    paths = canonical_paths(model)
    places, facts, found = parameter_holders(model, paths), module_facts(model), dict(model.named_parameters())
    canonical = dict(zip(found, canonical_names(list(found), model), strict=True))
    holders, tables, rows = dict[int, list[Holder]](), input_embeddings(model), dict[int, _Described]()
    for key, holder in places:
        holders.setdefault(key, []).append(holder)
    for given, parameter in found.items():
        key, name = id(parameter), canonical[given]
        known = facts[key].factor
        factor = replace(known, partner=canonical[known.partner]) if known else named_factor(name)
        row = _Described.of(name, parameter, holders[key], replace(facts[key], factor=factor))
        rows[key] = replace(row, plain=("embedding", "embedding by get_input_embeddings")) if key in tables else row
    layers = [layer for key, holder in places for layer in rows[key].layer(holder)]
    lengths = {length for row in rows.values() for length in row.rows}
    heads = Heads(layers, lengths, model_structure(model, paths))
    return {key: row.info(heads) for key, row in rows.items()}


Strings = Annotated[tuple[str, ...], BeforeValidator(as_tuple, json_schema_input_type=str | tuple[str, ...])]
Roles = Annotated[
    tuple[ParamRole, ...], BeforeValidator(as_tuple, json_schema_input_type=ParamRole | tuple[ParamRole, ...])
]
AxisCounts = Annotated[tuple[int, ...], BeforeValidator(as_tuple, json_schema_input_type=int | tuple[int, ...])]


class Match(Component):
    """Conditions on a parameter. All given conditions must hold. A list of values holds if one of them matches."""

    module: Strings = Field(
        default=(),
        description="names of classes of the module that owns the parameter, or of their base classes, e.g. Linear",
    )
    name: Strings = Field(default=(), description="regular expressions searched in the parameter's qualified name")
    role: Roles = Field(default=(), description="roles of parameters, as `eigengraft show` prints them")
    ndim: AxisCounts = Field(default=(), description="numbers of axes of the parameter")
    min_size: int | None = Field(
        default=None, ge=0, description="least number of entries of the parameter; none: no bound"
    )
    max_size: int | None = Field(
        default=None, ge=0, description="largest number of entries of the parameter; none: no bound"
    )
    pair: bool | None = Field(
        default=None,
        description="true: the parameter is one of the two factors of a product, as in LoRA; false: it is not; none: "
        "either",
    )
    min_axis: int | None = Field(default=None, ge=1, description="least length of the longest axis; none: no bound")

    @field_validator("name")
    @classmethod
    def _compiles(cls, patterns: tuple[str, ...]) -> tuple[str, ...]:
        for pattern in patterns:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"it must be a regular expression ({error})") from None
        return patterns

    def reason(self, info: ParamInfo) -> str | None:
        """Return in a few words why a parameter matches, or None if it does not match."""
        modules = [kind for kind in self.module if kind in info.modules]
        names = [pattern for pattern in self.name if info.name is not None and re.search(pattern, info.name)]
        longest, most = max(info.shape, default=1), info.numel if self.max_size is None else self.max_size
        sized = self.min_size is not None or self.max_size is not None
        wanted = (
            (self.module, bool(modules), f"module {'/'.join(modules)}"),
            (self.name, bool(names), f"name ~ {'/'.join(names)}"),
            (self.role, info.role in self.role, info.why),
            (self.ndim, len(info.shape) in self.ndim, f"{len(info.shape)}-d"),
            (self.pair is not None, (info.facts.factor is not None) is self.pair, "a pair" if self.pair else "no pair"),
            (self.min_axis, longest >= (self.min_axis or 0), f"an axis of {longest}"),
            (sized, (self.min_size or 0) <= info.numel <= most, f"{info.numel} elements"),
        )
        reasons = ", ".join(why for asked, _, why in wanted if asked) or "every parameter"
        return reasons if all(holds for asked, holds, _ in wanted if asked) else None
