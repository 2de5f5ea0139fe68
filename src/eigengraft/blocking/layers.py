"""Kinds of layers, by their types and by the attributes that their weights fit, never by names of classes."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.utils.parametrize import ParametrizationList


def parametrized_layer(modules: Mapping[str, nn.Module], path: str) -> nn.Module:
    """The layer that a module's parameters belong to: of a list of parametrizations, the parametrized one.

    modules: all modules of the model, by path.
    """
    module = modules[path]
    return modules[path.rpartition(".parametrizations")[0]] if isinstance(module, ParametrizationList) else module


def is_convolution(module: nn.Module) -> bool:
    """Whether a module convolves: a convolution of torch, or one whose weight `[m, n, *kernel]` fits `kernel_size`."""
    if isinstance(module, _ConvNd):
        return True
    weight, size = own_parameter(module, "weight"), getattr(module, "kernel_size", None)
    if weight is None or weight.ndim < 3 or not isinstance(size, (int, tuple, list)):
        return False
    kernel = tuple(weight.shape[2:])
    return kernel == ((size,) * len(kernel) if isinstance(size, int) else tuple(size))


def is_transposed(module: nn.Module) -> bool:
    """Whether a layer stores its weight as `[inputs, outputs]`, as Conv1D of Hugging Face does with `nf` outputs."""
    weight, outputs = own_parameter(module, "weight"), getattr(module, "nf", None)
    return weight is not None and weight.ndim == 2 and isinstance(outputs, int) and weight.shape[1] == outputs


def weight_of(module: nn.Module, name: str) -> nn.Parameter | None:
    """The weight of a layer inside a module, if it is a matrix; of a parametrized one, the tensor of its shape."""
    weight = own_parameter(getattr(module, name, None), "weight")
    return weight if weight is not None and weight.ndim == 2 else None


def own_parameter(module: object, name: str) -> nn.Parameter | None:
    """The parameter of a module under a name, or the one that a parametrization or an older hook computes it from.

    Of several it is the largest: that of weight_norm with the directions. None if the module has none.
    """
    if not isinstance(module, nn.Module):
        return None
    lists = getattr(module, "parametrizations", None)
    if isinstance(lists, nn.ModuleDict) and name in lists:
        originals = list(lists[name].parameters(recurse=False))
        return max(originals, key=nn.Parameter.numel, default=None)
    value = getattr(module, name, None)  # by attribute, which wrappers of modules pass on
    names = (f"{name}_orig", f"{name}_v")
    found = [value, *(module._parameters.get(own) for own in names)]
    return next((own for own in found if isinstance(own, nn.Parameter)), None)
