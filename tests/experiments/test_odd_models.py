"""Adapters, experts, convolutions, recurrent nets and large vocabularies: what they cost, and that they train."""

import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import eigengraft
from eigengraft.optimizers.plan.plan import plan
from eigengraft.optimizers.recipe.loading import shipped
from eigengraft.optimizers.recipe.routing import describe_model

from ..refusals import warned

PAGE = Path(__file__).resolve().parents[2] / "docs" / "guide" / "odd-models.md"
ALL_AXES: dict[str, object] = {"update.eigenbasis.statistic.axes": {}}


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
COLUMNS: Mapping[str, tuple[str, Mapping[str, object]]] = {
    **{name: (name, {}) for name in ("adamw", "muon", "psgd_kron", "shampoo", "soap_fitted", "soap_int8")},
    "soap_fitted, no bound": ("soap_fitted", ALL_AXES),
}


def cost_table() -> Iterator[str]:
    """Yield the lines of the page's table: bytes of state and operations of a step for each trained parameter."""
    yield f"| {' | '.join(('model', *COLUMNS))} |"
    yield f"| --- |{' --: |' * len(COLUMNS)}"
    for name, build in ODD_MODELS.items():
        with torch.device("meta"):
            model = build()
        described = describe_model(model)
        infos = [described[id(parameter)] for parameter in model.parameters() if parameter.requires_grad]
        entries, cells = sum(info.numel for info in infos), [name]
        for recipe, overrides in COLUMNS.values():
            planned = plan(eigengraft.load_recipe(recipe, overrides), infos, (1,), "ddp")
            costs = (planned.state[0] / entries, planned.work[0] / entries)
            cells.append(", ".join(f"{cost:.1f}" if cost < 10 else f"{cost:,.0f}" for cost in costs))
        yield f"| {' | '.join(cells)} |"


@pytest.mark.slow
def test_the_table_of_the_page_is_that_of_plans() -> None:
    assert "\n".join(cost_table()) in PAGE.read_text(encoding="utf-8")


@pytest.mark.parametrize(("overrides", "expected"), [(ALL_AXES, 1032), ({}, 8)])
def test_the_bytes_of_a_thin_matrix_are_those_of_its_factors(overrides: dict[str, object], expected: int) -> None:
    """Blocks [8, 1024]: two moments, 4 bytes each, and two matrices for each factor, over 8 * 1024 entries."""
    both = 8 + 2 * 4 * (8**2 + 1024**2) / (8 * 1024)
    short = 8 + 2 * 4 * 8**2 / (8 * 1024)
    assert expected == int(both if overrides else short)
    recipe = eigengraft.load_recipe("soap_fitted", overrides)
    planned = plan(recipe, [("lora_A.weight", (8, 4096))], (1,), "ddp")
    assert planned.state[0] / (8 * 4096) == pytest.approx(both if overrides else short, abs=0.01)  # counts of steps


def test_costly_state_is_said_once_with_the_remedy() -> None:
    model = nn.Module()
    model.base, model.lora_A = nn.Linear(8, 8).requires_grad_(False), nn.Linear(1024, 8, bias=False)
    with warned(UserWarning, "lora_A.weight", 1032, "[8, 1024]", "max_skew"):
        eigengraft.compose("soap_fitted", model, overrides=ALL_AXES)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer = eigengraft.compose("soap_fitted", model)
        eigengraft.compose("soap_fitted", nn.Linear(64, 64))
    (row,) = (row for row in optimizer.routing_table() if row.name == "lora_A.weight")
    assert row.left_out == ("8x1024: axis 1 without a factor: 1024 > max_skew 4 x 8",)


EXTREME = [(512, 512), (256, 1024), (1024, 256), (200, 1000), (8, 768), (50000, 1), (4, 50000)]
"""Matrices up to 50,000 times as long as wide, and the ones of transformers; all but some are whole blocks."""
BESIDE = {"track3": 16.0, "track3_kfac": 16.0}
"""Bytes a parameter of three averaged iterates and of the second running mean of a `momentum_mixture`."""


def reproduced() -> set[str]:
    """Recipes that do what a published program does, whatever it costs: references and what is based on them."""
    bases = {name: data.get("base", "") for name, data in shipped().items()}
    return {name for name, base in bases.items() for known in (name, base, bases.get(base, "")) if known[:4] == "refe"}


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(shipped()) - reproduced()))
def test_no_shape_costs_more_than_42_bytes_a_parameter(name: str) -> None:
    """Two moments, 8 bytes, and two matrices for each axis, 8 (r + 1 / r) at a ratio of r, at most 34 at r = 4."""
    recipe = eigengraft.load_recipe(name)
    for shape in EXTREME:
        state = plan(recipe, [("w.weight", shape)], (1,), "ddp").state[0] / math.prod(shape)
        assert state - BESIDE.get(name, 0.0) <= 42.2  # diagonals of `caspr`, counts and dampings


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("shampoo", {"statistic": {"kind": "gram", "beta": 0.0, "axes": {"max_skew": 4.0}}}),
        ("adaptive_shampoo", {"statistic": {"kind": "gram", "beta": 0.0, "axes": {"max_skew": 4.0}}}),
        ("eigenfactors", {"beta": 0.0, "axes": {"max_skew": 4.0}, "eps": 0.0, "solver": "eigh"}),
    ],
)
def test_a_root_of_one_side_alone_is_a_square_root(kind: str, fields: dict[str, object]) -> None:
    """(G G^T)^(-1/2) G has singular values of 1 whatever G is; with e = 1/4 they would be the roots of those of G."""
    w = nn.Parameter(torch.zeros(3, 40))
    stage = {"kind": kind, "refresh": {"kind": "every", "steps": 1}, **fields}
    optimizer = eigengraft.Optimizer(
        [("w", w)], {"update": [stage], "weight_decay": {"kind": "decoupled", "rate": 0.0}}, lr=1.0
    )
    w.grad = torch.randn(3, 40, generator=torch.Generator().manual_seed(0)) * torch.tensor([10.0, 1.0, 0.1])[:, None]
    optimizer.step()
    values = torch.linalg.svdvals(w.detach())
    assert torch.allclose(values, torch.ones(3), atol=1e-3)  # squares of the least singular value: 1e-4 of the largest


class Adapted(nn.Module):
    """x W + x A B with W frozen, experts, a convolution, an LSTM and an embedding: one forward uses all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.base = nn.Embedding(40, 6), nn.Linear(6, 6).requires_grad_(False)
        self.lora_A, self.lora_B = nn.Linear(6, 2, bias=False), nn.Linear(2, 6, bias=False)
        self.experts = nn.Parameter(torch.empty(3, 6, 6))
        self.kernel, self.cells, self.lm_head = nn.Conv1d(6, 6, 3, padding=1), nn.LSTM(6, 6), nn.Linear(6, 40)
        generator = torch.Generator().manual_seed(0)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.3, generator=generator)

    def forward(self, symbols: Tensor) -> Tensor:
        x = self.table(symbols)
        x = self.base(x) + self.lora_B(self.lora_A(x))
        x = torch.einsum("btd,edf->btf", x, self.experts[:2])  # the last expert sees nothing
        x = self.kernel(x.mT).mT
        out: Tensor = self.lm_head(self.cells(x)[0])
        return out


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["adamw", "muon", "shampoo", "soap_fitted", "psgd_kron"])
def test_all_of_them_train_in_one_model(recipe: str) -> None:
    model, symbols = Adapted(), torch.arange(24).reshape(2, 12)
    idle, frozen = model.experts[2].clone(), model.base.weight.clone()
    optimizer = eigengraft.compose(recipe, model, lr=0.02, weight_decay=0.0)
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(symbols).flatten(0, 1), symbols.flatten())
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.9 * losses[0]
    assert torch.equal(model.base.weight, frozen)
    assert torch.equal(model.experts[2], idle)  # a gradient of zeros moves nothing
    table = {row.name: row.route for row in optimizer.routing_table()}
    assert table["table.weight"] == table["lm_head.weight"] == "routes.adam" or recipe == "adamw"
    assert table["lora_A.weight"] == table["cells.weight_ih_l0"] == table["experts"] == ""


@pytest.mark.parametrize(
    "recipe",
    ["adam_mini", "apollo_mini", "galore", "muon_8bit", "newton_muon", "normuon", "singd"],
)
def test_a_wide_convolution_has_the_state_of_a_matrix(recipe: str) -> None:
    with torch.device("meta"):
        models = nn.Sequential(nn.Conv2d(512, 512, 3, bias=False)), nn.Sequential(nn.Linear(4608, 512, bias=False))
    kernels, matrix = (eigengraft.compose(recipe, model, overrides={"routes": []}).state_bytes() for model in models)
    assert kernels == pytest.approx(matrix, rel=0.01)
