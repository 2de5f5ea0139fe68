"""Names of parameters without what wrappers of modules put into them, so that no result depends on a wrapper."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
"""Attributes in which torch.compile, activation checkpointing and FSDP keep the module that they wrap."""
_PARALLEL = "module"
"""The attribute in which DistributedDataParallel and DataParallel keep theirs: a name that any module may use."""
HEAD = re.compile(
    r"((^|\.)(lm_head|head|classifier|embed_out|logits)|(^|\.)(heads?|classifier)\.(head|fc|proj|out_proj)"
    r"|^(model\.)?(output|output_projection|score|fc))$"
)
"""Paths of modules that are output heads by name."""
_STACKED = re.compile(r"(?P<stack>(.*\.)?(classifier|heads?))\.(?P<place>\d+)\.weight")


def canonical_name(name: str) -> str:
    """A qualified name without the attributes of wrappers; `module` counts as one where it comes first.

    "module._orig_mod.blocks.0._checkpoint_wrapped_module.up.weight" is "blocks.0.up.weight".
    """
    *path, own = name.split(".")
    path = [attribute for attribute in path if attribute not in _WRAPPERS]
    while path and path[0] == _PARALLEL:
        del path[0]
    return ".".join([*path, own])


def canonical_path(path: str) -> str:
    """The path of a module without the attributes of wrappers; "" for the model itself."""
    return canonical_name(f"{path}.weight").rpartition(".")[0]


def canonical_names(names: Sequence[str], model: nn.Module | None = None) -> list[str]:
    """The canonical names of all parameters of an optimizer, or of a model; names that would be equal stay as they are.

    model: what the names are of; wrappers for data parallelism inside of it are known by their types.
    """
    inside = [] if model is None else _inside(model)
    found = [canonical_name(_without(inside, name)) for name in names]
    counts = Counter(found)
    return [new if counts[new] == 1 else name for new, name in zip(found, names, strict=True)]


def canonical_paths(model: nn.Module) -> dict[str, str]:
    """The canonical path of every module of a model, by path; several may be equal."""
    inside = _inside(model)
    return {path: canonical_path(_without(inside, f"{path}.")[:-1]) for path, _ in model.named_modules()}


def last_of_stacks(names: Sequence[str], parameters: Sequence[Tensor]) -> dict[str, str]:
    """Weights that are output heads because they come last in a stack called `classifier`, `head` or `heads`, and why.

    Of "classifier.0.weight", "classifier.3.weight" and "classifier.6.weight" (VGG) the last is the head.
    """
    found: dict[str, list[tuple[int, str]]] = {}
    for name, parameter in zip(names, parameters, strict=True):
        matched = _STACKED.fullmatch(name)
        if matched is not None and parameter.ndim > 1:
            found.setdefault(matched["stack"], []).append((int(matched["place"]), name))
    return {max(places)[1]: f"last layer of {stack}" for stack, places in found.items()}


def _inside(model: nn.Module) -> list[str]:
    """Prefixes of names inside of each wrapper for data parallelism in a model, the longest first."""
    kinds = (DistributedDataParallel, DataParallel)
    found = [f"{path}." for path, module in model.named_modules() if path and isinstance(module, kinds)]
    return sorted(found, key=len, reverse=True)


def _without(inside: Iterable[str], name: str) -> str:
    """A name without the `module` that follows each of the prefixes."""
    for prefix in inside:
        if name.startswith(f"{prefix}{_PARALLEL}."):
            name = prefix + name.removeprefix(f"{prefix}{_PARALLEL}.")
    return name


def unnamed_head(model: nn.Module) -> Tensor | None:
    """The weight of the last Linear with as many outputs as an embedding has rows, where no head has a head's name.

    Others may have as many by chance: only the last counts, and none if one shares its weight with an embedding.
    """
    tables = [m for m in model.modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag))]
    paths = canonical_paths(model)
    linears = [(paths[path], m) for path, m in model.named_modules() if isinstance(m, nn.Linear)]
    if any(HEAD.search(path) or any(linear.weight is table.weight for table in tables) for path, linear in linears):
        return None
    rows = {table.num_embeddings for table in tables}
    return next((m.weight for _, m in reversed(linears) if m.out_features in rows), None)


def group_with_names(entry: Any) -> Any:
    """A param group whose parameters can be read twice; anything else as it is, for torch to take or refuse.

    Names beside the parameters, under `param_names` as torch keeps them, are those of the parameters.
    """
    if not isinstance(entry, dict) or not isinstance(entry.get("params"), Iterable):
        return entry
    if isinstance(entry["params"], (Tensor, set)):
        return entry
    params, names = list(entry["params"]), entry.get("param_names") or ()
    if len(names) == len(params) and all(isinstance(own, Tensor) for own in params):
        params = list(zip(names, params, strict=True))
    return {**entry, "params": params}
