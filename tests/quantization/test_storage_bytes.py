"""What quantized recipes hold, against closed formulas written from the shapes of blocks alone.

Legend: n numbers in a row; B the block size; a format has so many bytes a code and a float32 scale for each block. What
the formulas leave out, counts, steps and format numbers, is a few bytes a block: below 2 % on every set of shapes here.
"""

import math
from collections.abc import Callable

import pytest
import torch
from torch import nn

import eigengraft
from eigengraft import load_recipe
from eigengraft.experiments.tasks.models import GPT
from eigengraft.optimizers.plan.plan import plan

Shape = tuple[int, int]
Bytes = Callable[[int, int], int]
LEAST = 4096
"""Slots with fewer entries stay in float32."""


def eight(rows: int, n: int, size: int = 256) -> int:
    """8-bit codes."""
    return rows * (n + 4 * math.ceil(n / size)) if rows * n >= LEAST else 4 * rows * n


def four(rows: int, n: int, size: int = 64) -> int:
    """4-bit codes, each row in whole bytes."""
    return rows * (math.ceil(n / 2) + 4 * math.ceil(n / size)) if rows * n >= LEAST else 4 * rows * n


def triangle(d: int) -> int:
    """4 bits of the d (d + 1) / 2 entries of one triangle, in one row."""
    n = d * (d + 1) // 2
    return math.ceil(n / 2) + 4 * math.ceil(n / 64) if d * d >= LEAST else 4 * d * d


def triangle16(d: int) -> int:
    """16 bits of the same entries."""
    n = d * (d + 1) // 2
    return 2 * n + 4 * math.ceil(n / 256) if d * d >= LEAST else 4 * d * d


def beside(d: int, codes: int) -> int:
    """A matrix of order d with a float32 vector, diagonal or eigenvalues, beside its codes; small ones as they are."""
    return 4 * d + codes if d * d >= LEAST else 4 * d * d


def below(d: int) -> int:
    """4 bits of the d (d - 1) / 2 entries below the diagonal of a factor."""
    folded = d - 1 + d % 2
    return d // 2 * (math.ceil(folded / 2) + 4 * math.ceil(folded / 64))


def plain(rows: int, n: int) -> int:
    return 4 * rows * n


SHAMPOO = {  # (of each axis: statistic and root or basis; of each entry: both moments)
    "shampoo_4bit": (lambda d: beside(d, four(d, d)) + beside(d, triangle(d)), eight),
    "shampoo_4bit_naive": (lambda d: beside(d, four(d, d)) + beside(d, triangle(d)), eight),
    "shampoo_cq": (lambda d: beside(d, below(d)) + beside(d, triangle(d)), eight),
    "shampoo_cq_ef": (lambda d: beside(d, 2 * below(d)) + beside(d, triangle(d)), eight),
    "shampoo_int8": (lambda d: beside(d, triangle16(d)) + beside(d, eight(d, d)), plain),
    "soap_int8": (lambda d: beside(d, triangle16(d)) + eight(d, d), eight),
    "soap_4bit": (lambda d: beside(d, triangle16(d)) + four(d, d), eight),
    "soap_fitted": (lambda d: 8 * d * d, plain),
}
ADAM: dict[str, Bytes] = {"adamw": plain, "adamw_8bit": eight, "adamw_4bit": lambda rows, n: four(rows, n, 128)}


def formula(recipe: str, preconditioned: list[Shape], others: list[Shape]) -> int:
    """Bytes of state for blocks `[rows, n]` that are preconditioned and for what goes to Adam."""
    if recipe in ADAM:
        return sum(2 * ADAM[recipe](*shape) for shape in (*preconditioned, *others))
    if recipe == "muon_8bit":
        momentum = sum(eight(*shape, size=2048) for shape in preconditioned)
        return momentum + sum(eight(*shape, size=2048) + plain(*shape) for shape in others)
    factors, moment = SHAMPOO[recipe]
    moments = sum(2 * moment(*shape) for shape in (*preconditioned, *others))
    return moments + sum(factors(d) for shape in preconditioned for d in shape)


WIDTH, DEPTH = 96, 2
LAYER = [(WIDTH, WIDTH)] * 4 + [(4 * WIDTH, WIDTH), (WIDTH, 4 * WIDTH)]
DEMO = (DEPTH * LAYER, [(256, WIDTH), (64, WIDTH), (256, WIDTH)] + [(1, WIDTH)] * (4 * DEPTH + 2))
"""The matrices of the demo's GPT that are preconditioned, and its embeddings, head and norms."""


def demo() -> nn.Module:
    model = GPT(256, 64, DEPTH, WIDTH, 4)
    shapes = [tuple(p.shape) if p.ndim > 1 else (1, *p.shape) for p in model.parameters()]
    assert sorted(shapes) == sorted(DEMO[0] + DEMO[1])
    return model


@pytest.mark.parametrize("recipe", [*SHAMPOO, *ADAM, "muon_8bit"])
def test_the_demo_holds_what_the_formula_says(recipe: str) -> None:
    optimizer = eigengraft.compose(load_recipe(recipe), demo())
    assert optimizer.state_bytes() == pytest.approx(formula(recipe, *DEMO), rel=0.02)
    assert optimizer.state_bytes() == sum(row.stored for row in optimizer.slot_sizes())


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [*SHAMPOO, *ADAM, "muon_8bit"])
@pytest.mark.parametrize("shape", [(1000, 333), (130, 65), (64, 64), (256, 64)], ids=str)
def test_a_matrix_of_any_shape_holds_what_the_formula_says(recipe: str, shape: Shape) -> None:
    """Odd orders, orders that blocks do not divide, and orders at the limit below which nothing is coded."""
    held = plan(load_recipe(recipe, ["routes=[]"]), [("weight", shape)], (1,)).state.max()
    assert held == pytest.approx(formula(recipe, [shape], []), rel=0.02)


def test_second_order_state_is_smaller_than_that_of_adam() -> None:
    """Bytes per parameter of the demo: `soap_4bit` below AdamW's 8, `shampoo_4bit` below 5, of which moments in 8 bits
    are 2.1. Both triangles of the roots would make it 5.4, both and moments in float32 11.3."""
    model = demo()
    parameters = sum(p.numel() for p in model.parameters())
    held = {
        name: eigengraft.compose(load_recipe(name), model).state_bytes() / parameters
        for name in ("adamw", "soap_4bit", "shampoo_4bit")
    }
    assert held["adamw"] == pytest.approx(8.0, abs=0.01)
    assert held["soap_4bit"] < 8.0 and held["shampoo_4bit"] < 5.0


TRIANGLES = 2 * 1025 / 2048
WIDE = {  # one matrix of 1024 x 1024, bytes per parameter of everything: see the reasons beside
    "adamw_8bit": 2 * (1 + 4 / 256),
    "adamw_4bit": 2 * (0.5 + 4 / 128),
    "muon_8bit": 1 + 4 / 1024,  # rows of 1024 are shorter than the block of 2048
    # for each of two axes a basis or root, and one triangle, 1025 / 2048 of the square, of a statistic or root
    "soap_4bit": 2 * (0.5 + 4 / 64) + TRIANGLES * (2 + 4 / 256) + 2 * 4 / 1024 + 2 * (1 + 4 / 256),
    "soap_int8": 2 * (1 + 4 / 256) + TRIANGLES * (2 + 4 / 256) + 2 * 4 / 1024 + 2 * (1 + 4 / 256),
    "shampoo_int8": 2 * (1 + 4 / 256) + TRIANGLES * (2 + 4 / 256) + 4 * 4 / 1024 + 8,
    "shampoo_4bit": (2 + TRIANGLES) * (0.5 + 4 / 64) + 4 * 4 / 1024 + 2 * (1 + 4 / 256),
    "shampoo_cq": (1 + TRIANGLES) * (0.5 + 4 / 64) + 4 * 4 / 1024 + 2 * (1 + 4 / 256),
}


@pytest.mark.parametrize("recipe", WIDE)
def test_bytes_a_parameter_of_a_wide_layer(recipe: str) -> None:
    """1e-3: counts and format numbers of one block, and the row that the folded triangle of a factor is shorter by."""
    held = plan(load_recipe(recipe), [("weight", (1024, 1024))], (1,)).state.max()
    assert held / 1024**2 == pytest.approx(WIDE[recipe], rel=1e-3)


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((64, 96), torch.complex64),
        ((9000,), torch.complex64),
        ((64, 48, 3, 3), torch.float32),
        ((96, 128, 1, 1), torch.float32),
        ((5000, 2), torch.float32),
    ],
    ids=str,
)
@pytest.mark.parametrize(("recipe", "most"), [("adamw_8bit", 0.27), ("adamw_4bit", 0.14)])
def test_short_rows_take_the_bytes_of_long_ones(
    recipe: str, most: float, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    """Real and imaginary parts are rows of 2 numbers, kernels are rows of 3 or 1."""
    coded, whole = (
        eigengraft.compose(name, [("w", nn.Parameter(torch.ones(shape, dtype=dtype)))]).state_bytes()
        for name in (recipe, "adamw")
    )
    assert coded <= most * whole
