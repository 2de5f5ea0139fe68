"""Which parameter goes to which update: roles, and rules that match them."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, field_validator
from torch import Tensor, nn

from eigengraft.blocking import Factor, ModuleFacts, module_facts, named_factor
from eigengraft.component import Component

from .param_names import (
    HEAD,
    canonical_names,
    canonical_path,
    canonical_paths,
    group_with_names,
    last_of_stacks,
    unnamed_head,
)

ParamRole = Literal["embedding", "head", "norm", "bias", "scalar", "vector", "hidden"]
_EMBEDDING = re.compile(r"(^|\.|_)(emb|embed|embeds|embedding|embeddings|embed_tokens|tok_embeddings|wte|wpe)$")
_NORM = re.compile(r"(^|\.|_)((layer|rms|batch|group|instance)?_?norm|bn|ln)(_?\d+|_[a-z])?$", re.IGNORECASE)


@dataclass(frozen=True)
class ParamInfo:
    """Description of a parameter, which rules match.

    name: qualified name, without the attributes of wrappers; None: unnamed.
    shape, numel: of the whole parameter.
    role, why: what the parameter is for, and how that was found.
    modules, facts: class names of the modules that hold it and of their bases; what these tell of its matrices.
    """

    name: str | None
    shape: tuple[int, ...]
    numel: int
    role: ParamRole
    why: str
    modules: tuple[str, ...] = ()
    facts: ModuleFacts = field(default_factory=ModuleFacts)


@dataclass(frozen=True)
class DescribedParameters:
    """What a torch optimizer takes as parameters, with what routes are told about them in place of names and shapes.

    params: tensors, (name, tensor) pairs, or groups.
    infos: descriptions by the `id` of the parameter; one that is missing is made of name and shape.
    others: parameters of the same model that other optimizers have.
    model: the model of all these parameters, if they are of one that is known.
    """

    params: Iterable[Any]
    infos: Mapping[int, ParamInfo] = field(default_factory=dict)
    others: Sequence[ParamInfo] = ()
    model: nn.Module | None = None

    @classmethod
    def of(cls, params: Iterable[Any] | DescribedParameters) -> Self:
        """Parameters with a description of every one that has a name; names are canonical among all of them."""
        if isinstance(params, nn.Module):
            raise TypeError("params: parameters are required, got a module; use eigengraft.compose(recipe, model)")
        given = params if isinstance(params, DescribedParameters) else cls(params)
        return cls(given.params, given.infos) if isinstance(given.params, Tensor) else cls._completed(given)

    @classmethod
    def _completed(cls, given: DescribedParameters) -> Self:
        if not isinstance(given.params, Iterable):
            raise TypeError(f"params: tensors, (name, tensor) pairs or groups are required, got {given.params!r:.60}")
        params = [group_with_names(entry) for entry in given.params]
        groups = [entry.get("params", ()) if isinstance(entry, dict) else [entry] for entry in params]
        named = [entry for group in groups if not isinstance(group, Tensor) for entry in group]
        pairs = (entry for entry in named if isinstance(entry, tuple) and len(entry) == 2)
        new = [pair for pair in pairs if isinstance(pair[1], Tensor) and id(pair[1]) not in given.infos]
        return cls(params, {**describe_named(new), **given.infos}, given.others, given.model)


def describe_parameter(
    name: str | None,
    parameter: Tensor,
    holders: Iterable[tuple[str, nn.Module]] = (),
    head: str = "",
    factor: Factor | None = None,
) -> ParamInfo:
    """Description of one parameter, with the role it plays.

    name: qualified name; a role that is told by a name is told by the canonical one.
    holders: (path, module) of the modules that hold the parameter, several if it is tied.
    head: why it is an output head; "" if it is none.
    factor: which factor of a product it is, as modules tell; default: what the name tells.
    """
    shape = tuple(parameter.shape)
    kinds = [cls.__name__ for _, module in holders for cls in type(module).__mro__ if cls is not object]
    paths = [canonical_path(path) for path, _ in holders] or ([canonical_path(name.rpartition(".")[0])] if name else [])

    facts = ModuleFacts(factor=factor or named_factor(name))

    def info(role: ParamRole, why: str) -> ParamInfo:
        return ParamInfo(name, shape, parameter.numel(), role, why, tuple(dict.fromkeys(kinds)), facts)

    if "Embedding" in kinds or "EmbeddingBag" in kinds or any(map(_EMBEDDING.search, [*paths, name or ""])):
        return info("embedding", "embedding")
    if any(kind.endswith(("Norm", "Norm1d", "Norm2d", "Norm3d")) for kind in kinds) or any(map(_NORM.search, paths)):
        return info("norm", "normalisation")
    if name is not None and name.endswith("bias"):
        return info("bias", "bias")
    if parameter.ndim < 2:
        return info("vector" if parameter.ndim else "scalar", f"{parameter.ndim}-d")
    if (head or any(map(HEAD.search, paths))) and facts.factor is None:
        return info("head", head or "output head by name")
    return info("hidden", f"{parameter.ndim}-d weight")


def describe_named(named: Sequence[tuple[str, Tensor]], taken: Container[str] = ()) -> dict[int, ParamInfo]:
    """ParamInfo of named parameters by `id`, under canonical names; a name that is taken already stays as it is."""
    given = [name for name, _ in named]
    names = [name if new in taken else new for name, new in zip(given, canonical_names(given), strict=True)]
    heads = last_of_stacks(names, [parameter for _, parameter in named])
    rows = zip(names, named, strict=True)
    return {id(p): describe_parameter(name, p, head=heads.get(name, "")) for name, (_, p) in rows}


def describe_model(model: nn.Module) -> dict[int, ParamInfo]:
    """ParamInfo of every parameter of a model by `id`."""
    holders: dict[int, list[tuple[str, nn.Module]]] = {}
    paths = canonical_paths(model)
    for path, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            holders.setdefault(id(parameter), []).append((paths[path], module))
    head, facts, found = unnamed_head(model), module_facts(model), dict(model.named_parameters())
    names, infos = canonical_names(list(found), model), {}
    canonical = dict(zip(found, names, strict=True))
    heads = last_of_stacks(names, list(found.values()))
    for name, parameter in zip(names, found.values(), strict=True):
        why, key = "last Linear onto a vocabulary" if parameter is head else heads.get(name, ""), id(parameter)
        told = facts[key].factor
        told = told and replace(told, partner=canonical[told.partner])
        info = describe_parameter(name, parameter, holders[key], why, told)
        infos[key] = replace(info, facts=replace(facts[key], factor=info.facts.factor))
    return infos


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, (list, tuple)) else (value,)


Strings = Annotated[tuple[str, ...], BeforeValidator(_as_tuple, json_schema_input_type=str | tuple[str, ...])]
Roles = Annotated[
    tuple[ParamRole, ...], BeforeValidator(_as_tuple, json_schema_input_type=ParamRole | tuple[ParamRole, ...])
]
AxisCounts = Annotated[tuple[int, ...], BeforeValidator(_as_tuple, json_schema_input_type=int | tuple[int, ...])]


class Match(Component):
    """Conditions on a parameter. Every condition given must hold; of the values in one condition, any."""

    module: Strings = Field(default=(), description="class names of the owning module or its bases, e.g. Linear")
    name: Strings = Field(default=(), description="regular expressions searched in the parameter's qualified name")
    role: Roles = Field(default=(), description="roles, as `eigengraft show` prints them")
    ndim: AxisCounts = Field(default=(), description="numbers of axes")
    min_size: int | None = Field(default=None, ge=0, description="least number of elements")
    max_size: int | None = Field(default=None, ge=0, description="largest number of elements")
    pair: bool | None = Field(default=None, description="whether it is one of two factors of a product, as in LoRA")
    min_axis: int | None = Field(default=None, ge=1, description="least length of the longest axis")

    @field_validator("name")
    @classmethod
    def _compiles(cls, patterns: tuple[str, ...]) -> tuple[str, ...]:
        for pattern in patterns:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"a regular expression is required ({error})") from None
        return patterns

    def reason(self, info: ParamInfo) -> str | None:
        """Why a parameter matches, in a few words; None if it does not match."""
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
