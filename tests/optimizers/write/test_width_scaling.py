"""Learning rates that carry over to other widths: factors by role, shape and update."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import eigengraft
from eigengraft import Optimizer, compose, load_recipe
from eigengraft.experiments.tasks.models import spectral_init_
from eigengraft.optimizers.width_scaling import WidthScaling
from eigengraft.preconditioners.base import chain_bounds
from eigengraft.signals import requested

from ...refusals import refused

SHAPES = {
    "wte.weight": (11, 6),
    "hidden.weight": (4, 6),
    "hidden.bias": (4,),
    "norm.weight": (6,),
    "head.weight": (9, 4),
}
"""Parameters of every role, by name."""
ENTRIES = {"wte.weight": 1, "hidden.weight": 1 / 6, "hidden.bias": 1, "norm.weight": 1, "head.weight": 1 / 4}
"""sqrt(m / n) / sqrt(m n), with n = 1 for what takes one input at a time."""
HIDDEN = {  # m, n = 4, 6
    "adamw": 1 / 6,
    "lion": 1 / 6,
    "laprop": 1 / 6,
    "adopt": 1 / 6,
    "adam_atan2": 1 / 6 / (1.27 * math.pi / 4),
    "soap_fitted": math.sqrt(4 / 6) / (math.sqrt(4) + math.sqrt(6)),
    "muon": math.sqrt(4 / 6) / (0.2 * math.sqrt(6)),
    "polar_express": math.sqrt(4 / 6) / (0.2 * math.sqrt(6)),
}


def parameters(seed: int = 0) -> list[tuple[str, nn.Parameter]]:
    numbers = torch.Generator().manual_seed(seed)
    return [(name, nn.Parameter(torch.randn(shape, generator=numbers).double())) for name, shape in SHAPES.items()]


def step(optimizer: torch.optim.Optimizer, named: list[tuple[str, nn.Parameter]], steps: int = 3) -> None:
    numbers = torch.Generator().manual_seed(7)
    for _ in range(steps):
        for _, parameter in named:
            parameter.grad = torch.randn(parameter.shape, generator=numbers).double()
        optimizer.step()


@pytest.mark.parametrize("base_width", [None, 8])
@pytest.mark.parametrize("recipe", HIDDEN)
def test_a_factor_is_a_learning_rate_of_the_parameter(recipe: str, base_width: int | None) -> None:
    """As if every parameter had a param group with lr f; relative to f(8, 8) for matrices, 1 for the rest.

    Within 1e-11 of a step: lr (f U) and (lr f) U are rounded alike in float64 but not equally, as is the 0.2 of Muon.
    """
    factors = ENTRIES | {"hidden.weight": HIDDEN[recipe]}
    if recipe == "adam_atan2":
        factors = {name: f / (1.27 * math.pi / 4) for name, f in ENTRIES.items()}
    if base_width is not None:
        at_base = {"soap_fitted": 1 / (2 * math.sqrt(8)), "muon": 5 / math.sqrt(8), "polar_express": 5 / math.sqrt(8)}
        entries = factors["norm.weight"] / 8
        relative = {"hidden.weight": at_base.get(recipe, entries), "head.weight": entries}
        factors = {name: f / relative[name] if name in relative else 1.0 for name, f in factors.items()}
    scaled, grouped = parameters(), parameters()
    step(
        Optimizer(scaled, {"base": recipe, "width_scaling": {"base_width": base_width}}, lr=0.1, weight_decay=0.0),
        scaled,
    )
    groups = [{"params": [pair], "lr": 0.1 * factors[pair[0]], "weight_decay": 0.0} for pair in grouped]
    step(Optimizer(groups, recipe), grouped)
    for (name, own), (_, other) in zip(scaled, grouped, strict=True):
        torch.testing.assert_close(own, other, rtol=0, atol=1e-11 * factors[name], msg=name)


@pytest.mark.parametrize("recipe", ["adamw", "adam_atan2", "lion", "muon"])
def test_a_repeated_gradient_of_rank_one_changes_outputs_by_the_learning_rate(recipe: str) -> None:
    """An update is then as large as it gets: its spectral norm is lr sqrt(m / n) for m outputs and n inputs.

    Muon by its exact polar factor, and without the look-ahead, whose mean starts from zero without a correction.
    """
    exact = {"update.spectral.solver": "svd"} if recipe == "muon" else {}
    weight = nn.Parameter(torch.zeros(12, 5, dtype=torch.float64))
    signs = torch.tensor([1.0, -1.0], dtype=torch.float64)
    optimizer = Optimizer(
        [("hidden.weight", weight)], recipe, lr=0.25, weight_decay=0, overrides={"width_scaling": "spectral", **exact}
    )
    for _ in range(3):
        before = weight.detach().clone()
        weight.grad = torch.outer(signs.repeat(6), signs.repeat(3)[:5])
        optimizer.step()
    size = torch.linalg.matrix_norm(weight.detach() - before, 2).item()
    assert size == pytest.approx(0.25 * math.sqrt(12 / 5), rel=1e-6)  # eps, 1e-8 beside 1


def test_directions_in_a_basis_are_as_large_as_random_signs() -> None:
    """Independent gradients: SOAP's directions have the norm sqrt(m) + sqrt(n) within a third; sqrt(m n) is 36."""
    stages = load_recipe("soap_fitted").update
    bound = chain_bounds(stages, (48, 27))[0]
    assert bound == pytest.approx(math.sqrt(48) + math.sqrt(27), rel=1e-12)
    weight = nn.Parameter(torch.zeros(48, 27))
    optimizer = Optimizer(
        [("hidden.weight", weight)],
        "soap_fitted",
        lr=1.0,
        weight_decay=0,
        overrides=["update.eigenbasis.inner.momentum.beta=0"],
    )
    numbers = torch.Generator().manual_seed(0)
    for _ in range(12):
        before = weight.detach().clone()
        weight.grad = torch.randn(48, 27, generator=numbers)
        optimizer.step()
    assert torch.linalg.matrix_norm(weight.detach() - before, 2).item() == pytest.approx(bound, rel=1 / 3)


LARGER = {"mud": "rank one"}
"""The recipe whose directions exceed their size for some gradients: its triangular solver does not see that rows depend
on each other."""


def sized(name: str) -> bool:
    """Whether a shipped recipe has directions of known size that it writes as they are."""
    recipe = load_recipe(name)
    asked = {signal for _, stage in recipe.stages() for signal in requested(stage)}
    plain = not (recipe.constraints or recipe.averaging or recipe.storage or asked)
    return plain and chain_bounds(recipe.update, (12, 5))[0] is not None


@pytest.mark.parametrize("name", sorted(filter(sized, eigengraft.shipped_recipes())))
def test_directions_of_shipped_recipes_are_not_larger_than_they_say(name: str) -> None:
    """The same gradient of rank one four times, and eight independent ones, from the third on, when there is a basis.
    A fifth above, because the polynomials of Newton-Schulz iterations take singular values to between 0.7 and 1.2."""
    signs = torch.tensor([1.0, -1.0], dtype=torch.float64).repeat(6)
    numbers = torch.Generator().manual_seed(0)
    series = {
        "rank one": [torch.outer(signs, signs[:5])] * 4,
        "independent": [torch.randn(12, 5, generator=numbers, dtype=torch.float64) for _ in range(8)],
    }
    bound = chain_bounds(load_recipe(name).update, (12, 5))[0]
    assert bound is not None
    for what, gradients in series.items():
        weight, largest = nn.Parameter(torch.zeros(12, 5, dtype=torch.float64)), 0.0
        optimizer = Optimizer([("hidden.weight", weight)], name, lr=1.0, weight_decay=0.0)
        for count, gradient in enumerate(gradients):
            before = weight.detach().clone()
            weight.grad = gradient
            optimizer.step()
            size = torch.linalg.matrix_norm(weight.detach() - before, 2).item()
            largest = max(largest, size) if count > 1 else 0.0
        assert (largest > 1.2 * bound) == (LARGER.get(name) == what), what


@pytest.mark.parametrize("recipe", ["adamw", "soap_fitted", "muon"])
def test_at_its_base_width_a_square_matrix_moves_as_without(recipe: str) -> None:
    found = []
    for more in ({}, {"width_scaling": {"base_width": 6}}):
        weight = nn.Parameter(torch.linspace(-1, 1, 36, dtype=torch.float64).reshape(6, 6))
        pair = ("hidden.weight", weight)
        step(Optimizer([pair], {"base": recipe, **more}, lr=0.1), [pair])
        found.append(weight.detach())
    assert torch.equal(*found)


def first_steps(weight: Tensor, recipe: Any, **options: Any) -> Tensor:
    """The first step of a weight with gradient 1 everywhere, in units of lr."""
    parameter = nn.Parameter(torch.zeros_like(weight))
    optimizer = Optimizer([("hidden.weight", parameter)], recipe, lr=1.0, overrides=options)
    parameter.grad = weight
    optimizer.step()
    return -parameter.detach()


@pytest.mark.slow
def test_factors_are_of_whole_matrices_and_not_of_blocks() -> None:
    ones = torch.ones(8, 12)
    for blocking in ({}, {"size": 4}, {"size": 3, "merge": 3}):
        moved = first_steps(ones, {"base": "adam", "width_scaling": "spectral", "blocking": blocking})
        torch.testing.assert_close(moved, ones / 12, rtol=1e-6, atol=0)  # eps


@pytest.mark.parametrize(
    ("shape", "view", "matrix"),
    [
        ((3, 4, 5), {"kind": "matrices", "batch": 1}, (4, 5)),
        ((12, 5), {"kind": "matrices", "heads": 4}, (4, 5)),
        ((5, 12), {"kind": "matrices", "outputs": "last"}, (12, 5)),
        ((4, 6), {"kind": "matrices", "side": "inputs", "heads": 2}, (4, 2)),
        ((8, 3, 2, 2), {"kind": "whole"}, (8, 12)),
    ],
)
def test_a_view_tells_what_outputs_and_inputs_are(
    shape: tuple[int, ...], view: dict[str, Any], matrix: tuple[int, int]
) -> None:
    """Signs before the first basis, so that every entry moves by f."""
    update = [{"kind": "eigenbasis", "inner": ["sign"], "refresh": {"kind": "every", "steps": 9, "start": 9}}]
    moved = first_steps(torch.ones(shape), {"update": update, "view": view, "width_scaling": "spectral"})
    m, n = matrix
    expected = math.sqrt(m / n) / (math.sqrt(m) + math.sqrt(n))
    torch.testing.assert_close(moved, torch.full(shape, expected), rtol=1e-6, atol=0)


class Experts(nn.Module):
    """A batch of matrices and a transposed one, as GPT-2's Conv1D, whose module tells it."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.Parameter(torch.zeros(3, 4, 5))
        self.turned = nn.Parameter(torch.zeros(7, 2))

    def parameter_views(self) -> dict[str, object]:
        return {"experts": {"batch": 1}, "turned": {"outputs": "last"}}


def test_entries_that_no_view_cuts_have_the_inputs_of_their_matrices() -> None:
    model = Experts()
    optimizer = compose("lion", model, lr=1.0, weight_decay=0, overrides={"width_scaling": "spectral"})
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    torch.testing.assert_close(-model.experts.detach(), torch.full((3, 4, 5), 1 / 5))
    torch.testing.assert_close(-model.turned.detach(), torch.full((7, 2), 1 / 7))


class Sections(nn.Module):
    """Two outputs of different lengths, fused."""

    def __init__(self) -> None:
        super().__init__()
        self.fused = nn.Linear(5, 9, bias=False)

    def parameter_views(self) -> dict[str, object]:
        return {"fused.weight": {"sections": [6, 3]}}


def test_each_section_has_the_factor_of_its_own_shape() -> None:
    model = Sections()
    before = model.fused.weight.detach().clone()
    recipe = {"update": [{"kind": "spectral", "solver": "svd"}], "view": "modules", "width_scaling": "spectral"}
    model.fused.weight.grad = torch.cat([torch.eye(6, 5), torch.eye(3, 5)])
    compose(recipe, model, lr=1.0).step()
    moved = before - model.fused.weight.detach()
    sizes = [torch.linalg.matrix_norm(part, 2).item() for part in moved.split([6, 3])]
    assert sizes == pytest.approx([math.sqrt(6 / 5), math.sqrt(3 / 5)], rel=1e-5)


def test_weight_decay_is_not_scaled() -> None:
    weight = nn.Parameter(torch.full((3, 50), 2.0))
    optimizer = Optimizer(
        [("hidden.weight", weight)], "adamw", lr=0.1, weight_decay=0.5, overrides={"width_scaling": "spectral"}
    )
    weight.grad = torch.zeros(3, 50)
    optimizer.step()
    torch.testing.assert_close(weight.detach(), torch.full((3, 50), 2.0 * 0.95))


def test_a_recipe_says_it_in_one_line_and_keeps_it() -> None:
    assert load_recipe({"base": "adam", "width_scaling": "spectral"}).width_scaling == WidthScaling()
    recipe = load_recipe("muon", {"width_scaling": {"base_width": 64}})
    assert recipe.width_scaling == WidthScaling(base_width=64)
    assert load_recipe(recipe.to_json()) == recipe
    assert load_recipe("adam").width_scaling is None


def test_the_routing_table_tells_the_factors() -> None:
    model = nn.Sequential(nn.Linear(6, 4), nn.LayerNorm(4))
    rows = compose("adam", model, overrides={"width_scaling": {"base_width": 8}}).routing_table()
    assert {row.name: row.width_factors for row in rows} == {
        "0.weight": pytest.approx((8 / 6,)),
        "0.bias": (1.0,),
        "1.weight": (1.0,),
        "1.bias": (1.0,),
    }
    assert all(row.width_factors == () for row in compose("adam", model).routing_table())


REFUSED: dict[str, tuple[Any, tuple[object, ...]]] = {
    "unknown size": ("shampoo", ("hidden.weight", "width_scaling")),
    "length set": ("adam_h", ("hidden.weight", "constraints.hyperball", "width_scaling")),
    "after decay": ({"update": ["rms"], "after_decay": ["momentum"]}, ("after_decay",)),
    "kernel positions": ("scion", ("width_scaling", "update")),
    "summed squares": ({"update": [{"kind": "rms", "beta": 1.0}]}, ("width_scaling", "update", "rms")),
}


@pytest.mark.parametrize("case", REFUSED)
def test_width_scaling_of_parameters_without_a_known_size_are_refused(case: str) -> None:
    recipe, says = REFUSED[case]
    with refused(ValueError, *says):
        Optimizer([("hidden.weight", nn.Parameter(torch.zeros(3, 2)))], recipe, overrides={"width_scaling": "spectral"})


def test_other_words_and_widths_are_refused() -> None:
    for wrong, says in (
        ("mup", ("width_scaling",)),
        ({"base_width": 0}, ("width_scaling.base_width", 1)),
    ):
        with refused(eigengraft.RecipeError, *says):
            load_recipe("adam", {"width_scaling": wrong})


def test_initial_weights_give_outputs_of_size_one_at_every_width() -> None:
    """Root mean squares of outputs for inputs of size 1; 4096 numbers: 1 / sqrt(2 * 4096) = 1.1 %, four of these."""
    for m, n in ((64, 64), (64, 256), (512, 512)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(20, n), nn.Linear(n, m), nn.LayerNorm(m), nn.Linear(m, 20))
        spectral_init_(model)
        table, hidden, norm, head = model
        assert isinstance(table, nn.Embedding) and isinstance(hidden, nn.Linear) and isinstance(head, nn.Linear)
        inputs = torch.randn(4096 // m * 4, n)
        assert hidden(inputs).square().mean().sqrt().item() == pytest.approx(min(1.0, math.sqrt(m / n)), rel=0.1)
        assert table.weight.std().item() == pytest.approx(1, rel=0.05)
        assert not head.weight.any() and not head.bias.any() and not hidden.bias.any() and (norm.weight == 1).all()
