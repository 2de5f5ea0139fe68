"""Canonical names of parameters, without the attributes that wrappers add, so that no result depends on a wrapper."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
"""Attributes in which torch.compile, activation checkpointing and FSDP store the wrapped module."""
_PARALLEL = "module"
"""The attribute in which DistributedDataParallel and DataParallel store it. Any other module may use this name too."""


def canonical_name(name: str) -> str:
    """Return a qualified name without the attributes of wrappers, and without a leading `module`.

    "module._orig_mod.blocks.0._checkpoint_wrapped_module.up.weight" becomes "blocks.0.up.weight".
    """
    *path, own = name.split(".")
    path = [attribute for attribute in path if attribute not in _WRAPPERS]
    while path and path[0] == _PARALLEL:
        del path[0]
    return ".".join([*path, own])


def canonical_path(path: str) -> str:
    """Return the path of a module without the attributes of wrappers; "" for the model itself."""
    return canonical_name(f"{path}.weight").rpartition(".")[0]


def canonical_names(names: Sequence[str], model: nn.Module | None = None) -> list[str]:
    """Return the canonical names of parameters. Names that would become equal are not changed.

    model: the model of all parameters; None if it is unknown. Wrappers for data parallelism inside it are recognized by
        their types.
    """
    inside = [] if model is None else _inside(model)
    found = [canonical_name(_without(inside, name)) for name in names]
    counts = Counter(found)
    return [new if counts[new] == 1 else name for new, name in zip(found, names, strict=True)]


def canonical_paths(model: nn.Module) -> dict[str, str]:
    """Return the canonical path of every module of a model, by path. Several may be equal."""
    inside = _inside(model)
    return {path: canonical_path(_without(inside, f"{path}.")[:-1]) for path, _ in model.named_modules()}


def _inside(model: nn.Module) -> list[str]:
    """Return the prefixes of names inside each wrapper for data parallelism in a model, longest first."""
    kinds = (DistributedDataParallel, DataParallel)
    found = [f"{path}." for path, module in model.named_modules() if path and isinstance(module, kinds)]
    return sorted(found, key=len, reverse=True)


def _without(inside: Iterable[str], name: str) -> str:
    """Return a name without the `module` that follows each prefix."""
    for prefix in inside:
        if name.startswith(f"{prefix}{_PARALLEL}."):
            name = prefix + name.removeprefix(f"{prefix}{_PARALLEL}.")
    return name


def group_with_names(entry: Any) -> Any:
    """Return a param group whose parameters can be iterated twice, as (name, parameter) pairs if it has `param_names`.

    Anything that is no param group is returned unchanged, for torch to accept or refuse.
    """
    if not isinstance(entry, dict) or not isinstance(entry.get("params"), Iterable):
        return entry
    if isinstance(entry["params"], (Tensor, set)):
        return entry
    params, names = list(entry["params"]), entry.get("param_names") or ()
    if len(names) == len(params) and all(isinstance(own, Tensor) for own in params):
        params = list(zip(names, params, strict=True))
    return {**entry, "params": params}
