"""What the modules of a model tell of its parameters: convolutions, fused projections, heads, experts.

Modules are recognised by structure and by names of their attributes; no library of models is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import nn

from eigengraft.component import checked

from .attention_views import Told, attention_matrices
from .layers import is_convolution, own_parameter, parametrized_layer, weight_of
from .matrices import KERNEL, Matrices, ModuleFacts
from .pairs import Factor


def module_facts(model: nn.Module) -> dict[int, ModuleFacts]:
    """The facts of every parameter of a model by `id`. What a module itself tells goes before what is recognised."""
    modules = dict(model.named_modules())
    told: dict[int, tuple[Matrices, str]] = {}
    for path, module in modules.items():
        for parameter, matrices, source in _published(path, module):
            told.setdefault(id(parameter), (matrices, source))
    for module in modules.values():
        for recognised in RECOGNISED:
            for parameter, matrices, source in recognised(module):
                if _fits(matrices, tuple(parameter.shape)):
                    told.setdefault(id(parameter), (matrices, f"{source} of {type(module).__name__}"))
    convolutions, factors = _convolutions(modules), _factors(model)
    facts = dict[int, ModuleFacts]()
    for parameter in model.parameters():
        key = id(parameter)
        found: tuple[Matrices | None, str] = told.get(key, (None, ""))
        facts[key] = ModuleFacts(key in convolutions, *found, factors.get(key))
    return facts


def _factors(model: nn.Module) -> dict[int, Factor]:
    """The factors, by `id`, that modules tell by `parameter_pairs()`: pairs of names, first that of `[r, n]`."""
    names, found = {id(parameter): name for name, parameter in model.named_parameters()}, dict[int, Factor]()
    for path, module in model.named_modules():
        pairs = getattr(module, "parameter_pairs", None)
        for pair in pairs() if callable(pairs) else ():
            where, known = f"{path or type(module).__name__}.parameter_pairs", [_reached(module, name) for name in pair]
            if len(known) != 2 or not all(isinstance(parameter, nn.Parameter) for parameter in known):
                raise ValueError(f"{where}: pairs of names of parameters of the module are required, got {pair!r}")
            inputs, outputs = map(id, known)
            found[inputs], found[outputs] = Factor("inputs", names[outputs]), Factor("outputs", names[inputs])
    return found


def _published(path: str, module: nn.Module) -> Told:
    """What a module's own `parameter_views()` says: {parameter name: matrices, or a mapping of their fields}."""
    views = getattr(module, "parameter_views", None)
    if not callable(views):
        return
    where, found = f"{path or type(module).__name__}.parameter_views", views()
    if not isinstance(found, Mapping):
        raise ValueError(f"{where}: a mapping from names of parameters to matrices is required, got {found!r}")
    for name, fields in found.items():
        parameter = _reached(module, name)
        if not isinstance(parameter, nn.Parameter):
            raise ValueError(f"{where}: names of parameters of the module are required, got '{name}'")
        matrices = fields if isinstance(fields, Matrices) else checked(Matrices, fields, f"{where}.{name}")
        try:
            matrices.require_fit(tuple(parameter.shape))
        except ValueError as error:
            raise ValueError(f"{where}.{name}: {error}") from None
        yield parameter, matrices, f"parameter_views of {type(module).__name__}"


def _reached(module: nn.Module, name: object) -> object:
    """The attribute at a dotted path, which wrappers of modules pass on, or the parameter that it is computed from.

    None: there is no such attribute.
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
    """Parameters, by `id`, that are convolved with their inputs.

    That is all of a convolution, and by its shape a tensor of four or more axes in a module of another kind.
    """
    found = set()
    for path, module in modules.items():
        convolution = is_convolution(parametrized_layer(modules, path))
        for parameter in module.parameters(recurse=False):
            if convolution or (parameter.ndim > 3 and max(parameter.shape[2:]) <= KERNEL):
                found.add(id(parameter))
    return found


GATED_LAYERS = (("gate_up_proj", "down_proj"), ("Wi", "Wo"), ("w12", "w3"))
"""Names of a projection onto gates and values, one after the other, and of the projection that follows."""


def _gated_layer(module: nn.Module) -> Told:
    """Fused gates and values of a feed-forward layer, as in Phi 3 and ModernBERT."""
    for name, following in GATED_LAYERS:
        weight, after = weight_of(module, name), weight_of(module, following)
        if weight is None or after is None:
            continue
        if weight.shape[0] == 2 * after.shape[1]:
            yield weight, Matrices(sections=(after.shape[1],) * 2), f"gates and values {name}"


def _experts(module: nn.Module) -> Told:
    """Stacked experts `[E, m, n]` with fused gates and values, as in Mixtral, Llama 4 and gpt-oss."""
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


RECOGNISED: tuple[Callable[[nn.Module], Told], ...] = (attention_matrices, _gated_layer, _experts)
"""What recognises modules, in order; the first that tells of a parameter counts."""
