"""Models whose matrices are not the usual ones, and what recipes cost on them; nothing is allocated."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import nn

from eigengraft.optimizers.plan.plan import plan
from eigengraft.optimizers.recipe.loading import load_recipe
from eigengraft.optimizers.recipe.routing import ParamInfo, describe_model


class LoRA(nn.Module):
    """A frozen matrix of order 4096 with an adapter of rank 8: lora_A [8, 4096], lora_B [4096, 8]."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(4096, 4096, bias=False).requires_grad_(False)
        self.lora_A, self.lora_B = nn.Linear(4096, 8, bias=False), nn.Linear(8, 4096, bias=False)


class Experts(nn.Module):
    """Eight experts in two tensors, [8, 1024, 2816] and [8, 2816, 1024], and their router."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = (nn.Parameter(torch.empty(8, *shape)) for shape in ((1024, 2816), (2816, 1024)))
        self.router = nn.Linear(1024, 8, bias=False)


def convolution_layers() -> nn.Module:
    """3x3, depthwise 7x7 and 1x1 convolutions of 256 channels, with a norm; a list, because none of them is a head."""
    layers = (nn.Conv2d(256, 256, 3), nn.Conv2d(256, 256, 7, groups=256), nn.BatchNorm2d(256), nn.Conv2d(256, 256, 1))
    return nn.ModuleList(layers)


def large_vocabulary() -> nn.Module:
    """50,000 symbols: embedding and head of width 512, and one hidden matrix."""
    return nn.Sequential(nn.Embedding(50000, 512), nn.Linear(512, 512), nn.Linear(512, 50000, bias=False))


ODD_MODELS: Mapping[str, Callable[[], nn.Module]] = {
    "lora": LoRA,
    "experts": Experts,
    "convolutions": convolution_layers,
    "recurrent": lambda: nn.LSTM(512, 512, num_layers=2),
    "vocabulary": large_vocabulary,
}
"""Models by name, to be built on the meta device."""

COST_COLUMNS: Mapping[str, tuple[str, Mapping[str, object]]] = {
    "adamw": ("adamw", {}),
    "muon": ("muon", {}),
    "psgd_kron": ("psgd_kron", {}),
    "shampoo": ("shampoo", {}),
    "soap_fitted": ("soap_fitted", {}),
    "soap_int8": ("soap_int8", {}),
    "soap_fitted, no bound": ("soap_fitted", {"update.eigenbasis.statistic.axes": {}}),
}
"""Recipes and overrides by what the table calls them."""


def trained(model: str) -> list[ParamInfo]:
    """Descriptions of the parameters of an odd model that are trained."""
    with torch.device("meta"):
        module = ODD_MODELS[model]()
    infos = describe_model(module)
    return [infos[id(parameter)] for parameter in module.parameters() if parameter.requires_grad]


def cost_table() -> Iterator[tuple[str, ...]]:
    """Rows of a table: bytes of state and operations of a step, as `plan` counts them, for each trained parameter."""
    yield ("model", *COST_COLUMNS)
    for model in ODD_MODELS:
        infos = trained(model)
        entries, costs = sum(info.numel for info in infos), []
        for name, overrides in COST_COLUMNS.values():
            planned = plan(load_recipe(name, overrides), infos, (1,), "ddp")
            costs.append(f"{_short(planned.state[0] / entries)}, {_short(planned.work[0] / entries)}")
        yield (model, *costs)


def _short(value: float) -> str:
    """A number to two digits, or to the unit."""
    return f"{value:.1f}" if value < 10 else f"{value:,.0f}"
