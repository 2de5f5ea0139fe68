"""Which parameter goes to which update: roles, and rules that match them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator
from torch import Tensor, nn

from eigengraft.component import Component

Role = Literal["embedding", "head", "norm", "bias", "scalar", "vector", "hidden"]
_HEAD = re.compile(r"(^|\.)(lm_head|head|classifier|output|output_projection|embed_out|logits)$")
_EMBEDDING = re.compile(r"(^|\.|_)(emb|embed|embeds|embedding|embeddings|embed_tokens|tok_embeddings|wte|wpe)$")
_NORM = re.compile(r"(^|\.|_)(norm|layernorm|layer_norm|rmsnorm|batchnorm|groupnorm|bn|ln)[_0-9a-z]*$", re.IGNORECASE)


@dataclass(frozen=True)
class Facts:
    """What rules may ask about a parameter. `why` says how the role was found."""

    name: str | None
    shape: tuple[int, ...]
    numel: int
    role: Role
    why: str
    modules: tuple[str, ...] = ()


def examine(name: str | None, parameter: Tensor, owners: Iterable[tuple[str, nn.Module]] = (), head: str = "") -> Facts:
    """The facts of one parameter.

    owners: the modules that hold it (several if tied); head: why it is an output head.
    """
    shape = tuple(parameter.shape)
    kinds = [cls.__name__ for _, module in owners for cls in type(module).__mro__ if cls is not object]
    holders = [path for path, _ in owners] or ([name.rpartition(".")[0]] if name else [])

    def fact(role: Role, why: str) -> Facts:
        return Facts(name, shape, parameter.numel(), role, why, tuple(dict.fromkeys(kinds)))

    if "Embedding" in kinds or "EmbeddingBag" in kinds or any(map(_EMBEDDING.search, [*holders, name or ""])):
        return fact("embedding", "embedding")
    if any(kind.endswith(("Norm", "Norm1d", "Norm2d", "Norm3d")) for kind in kinds) or any(map(_NORM.search, holders)):
        return fact("norm", "normalisation")
    if name is not None and name.endswith("bias"):
        return fact("bias", "bias")
    if parameter.ndim < 2:
        return fact("vector" if parameter.ndim else "scalar", f"{parameter.ndim}-d")
    if head or any(map(_HEAD.search, holders)):
        return fact("head", head or "output head by name")
    return fact("hidden", f"{parameter.ndim}-d weight")


def examine_model(model: nn.Module) -> dict[int, Facts]:
    """Facts of every parameter of a model by `id`. Heads: by name, or a Linear onto the vocabulary of an embedding."""
    owners: dict[int, list[tuple[str, nn.Module]]] = {}
    for path, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), []).append((path, module))
    vocabularies = {m.num_embeddings for m in model.modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag))}
    facts = {}
    for name, parameter in model.named_parameters():
        held = owners[id(parameter)]
        onto = any(isinstance(m, nn.Linear) and m.out_features in vocabularies - {m.in_features} for _, m in held)
        facts[id(parameter)] = examine(name, parameter, held, "Linear onto the vocabulary" if onto else "")
    return facts


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, (list, tuple)) else (value,)


Strings = Annotated[tuple[str, ...], BeforeValidator(_as_tuple)]
Roles = Annotated[tuple[Role, ...], BeforeValidator(_as_tuple)]
Sizes = Annotated[tuple[int, ...], BeforeValidator(_as_tuple)]


class Match(Component):
    """Conditions on a parameter. Every condition given must hold; of the values in one condition, any."""

    module: Strings = Field((), description="class names of the owning module or its bases, e.g. Linear, _ConvNd")
    name: Strings = Field((), description="regular expressions searched in the parameter's qualified name")
    role: Roles = Field((), description="roles, as `eigengraft show` prints them")
    ndim: Sizes = Field((), description="numbers of axes")
    min_size: int | None = Field(None, ge=0, description="least number of elements")
    max_size: int | None = Field(None, ge=0, description="largest number of elements")

    @field_validator("name")
    @classmethod
    def _compiles(cls, patterns: tuple[str, ...]) -> tuple[str, ...]:
        for pattern in patterns:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"a regular expression is required ({error})") from None
        return patterns

    def reason(self, facts: Facts) -> str | None:
        """Why the parameter matches, in a few words, or None if it does not."""
        modules = [kind for kind in self.module if kind in facts.modules]
        names = [pattern for pattern in self.name if facts.name is not None and re.search(pattern, facts.name)]
        wanted = (
            (self.module, bool(modules), f"module {'/'.join(modules)}"),
            (self.name, bool(names), f"name ~ {'/'.join(names)}"),
            (self.role, facts.role in self.role, facts.why),
            (self.ndim, len(facts.shape) in self.ndim, f"{len(facts.shape)}-d"),
        )
        if not all(holds for asked, holds, _ in wanted if asked):
            return None
        if facts.numel < (self.min_size or 0) or (self.max_size is not None and facts.numel > self.max_size):
            return None
        sized = self.min_size is not None or self.max_size is not None
        reasons = [why for asked, _, why in wanted if asked] + [f"{facts.numel} elements"] * sized
        return ", ".join(reasons) or "every parameter"
