"""Adapters, experts, convolutions, recurrent nets and large vocabularies: what they cost, and that they train."""

import math
import warnings
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

import eigengraft
from eigengraft.experiments.cli.main import app
from eigengraft.optimizers.plan.plan import plan
from eigengraft.optimizers.recipe.loading import shipped

from ..refusals import warned

PAGE = Path(__file__).resolve().parents[2] / "docs" / "guide" / "odd-models.md"
ALL_AXES: dict[str, object] = {"update.eigenbasis.statistic.axes": {}}


@pytest.mark.slow
def test_the_figures_of_the_page_are_those_of_the_command() -> None:
    printed = CliRunner().invoke(app, ["costs"]).stdout.strip()
    assert printed in PAGE.read_text(encoding="utf-8")


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
AVERAGED = {"track3": 12.0}
"""Bytes of averaged iterates, which are no part of an update: three copies of the parameter."""


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
        assert state - AVERAGED.get(name, 0.0) <= 42.2  # diagonals of `caspr`, counts and dampings


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
