"""Whatever a root or basis solver is given, through a recipe: no exception escapes, parameters stay finite."""

from typing import Any

import pytest
import torch
from torch import Tensor

from eigengraft import Optimizer

from ...laws.rows import Row
from ...laws.table import TABLE
from ...refusals import refused
from ...trajectories import normal

pytestmark = pytest.mark.slow

SOLVERS = [(family, row) for family in ("root_solver", "basis_solver") for row in TABLE[family]]
each_solver = pytest.mark.parametrize(("family", "row"), SOLVERS, ids=[f"{f} {row}" for f, row in SOLVERS])
D, BLOCKS, STEPS = 6, 4, 5
EVERY = {"kind": "every", "steps": 1, "stagger": "none"}


def recipe(family: str, row: Row, tolerated: int = 10**6) -> dict[str, Any]:
    """A stage whose factors go through the solver at every step."""
    if family == "root_solver":
        stage: dict[str, Any] = {"kind": "shampoo", "solver": dict(row.make), "refresh": EVERY}
        stage |= {"exponent": {2: [1, 0]}} if row.kind == "cholesky" else {}
    else:
        stage = {"kind": "eigenbasis", "inner": ["momentum", "rms"], "solver": dict(row.make), "refresh": EVERY}
    return {"update": [stage], "routes": [], "failure": {"roots": tolerated}}


def spectrum(name: str) -> Tensor:
    """Gradients `[STEPS, BLOCKS, D, D]`, float32, whose factors are what the name says."""
    x = normal(STEPS, BLOCKS, D, D, seed=3)
    fixed = x[:1].expand_as(x)
    if name == "rank one":
        x = x[..., :1] * x[..., :1, :]
    elif name == "zero":
        x = torch.zeros_like(x)
    elif name in ("huge", "tiny"):  # factors of 1e30 and 1e-30
        x = x * (1e15 if name == "huge" else 1e-15)
    elif name == "condition 1e12":
        u, _, vh = torch.linalg.svd(fixed)
        x = u * torch.logspace(0, -6, D, dtype=torch.float64) @ vh
    elif name == "singular by rounding":
        x = (fixed[..., :1] + 1e-7 * x) * torch.ones(D)
    elif name == "suddenly huge":
        x = x * torch.tensor([1, 1, 1e10, 1, 1]).reshape(-1, 1, 1, 1)
    return x.float()


NAMES = ["rank one", "zero", "huge", "tiny", "condition 1e12", "singular by rounding", "suddenly huge"]


def walk(optimizer: Optimizer, parameters: list[torch.nn.Parameter], given: Tensor) -> None:
    for step in given:
        for parameter, gradient in zip(parameters, step, strict=True):
            parameter.grad = gradient.clone()
        optimizer.step()


def fresh(
    family: str, row: Row, tolerated: int = 10**6, blocks: int = BLOCKS
) -> tuple[Optimizer, list[torch.nn.Parameter]]:
    parameters = [torch.nn.Parameter(normal(D, D, seed=i).float()) for i in range(blocks)]
    return Optimizer(parameters, recipe(family, row, tolerated), lr=1e-3), parameters


@each_solver
def test_difficult_factors_leave_parameters_finite(family: str, row: Row) -> None:
    """Four blocks of each difficulty, all in one stack."""
    optimizer, parameters = fresh(family, row, blocks=BLOCKS * len(NAMES))
    walk(optimizer, parameters, torch.cat([spectrum(name) for name in NAMES], 1))
    for place, parameter in enumerate(parameters):
        name = NAMES[place // BLOCKS]
        assert parameter.isfinite().all(), name
        assert all(value.isfinite().all() for value in optimizer.state[parameter].values()), name


def factor(optimizer: Optimizer, parameter: Tensor) -> Tensor:
    """The first factor of a parameter, a view of the state."""
    return next(value for key, value in optimizer.state[parameter].items() if key.endswith("factor.0"))


@each_solver
def test_one_spoiled_factor_is_rejected_and_the_others_do_not_notice(family: str, row: Row) -> None:
    """NaN in the factor of one block: it keeps its last root or basis, is counted and then named; the rest of the stack
    is bit for bit what it is without."""
    given = spectrum("plain")
    clean, others = fresh(family, row)
    optimizer, parameters = fresh(family, row, tolerated=2)
    walk(clean, others, given[:3])
    walk(optimizer, parameters, given[:3])
    factor(optimizer, parameters[1])[0, 0] = torch.nan
    walk(clean, others, given[3:])
    walk(optimizer, parameters, given[3:])
    assert all(parameter.isfinite().all() for parameter in parameters)
    for i in (0, 2, 3):
        assert torch.equal(parameters[i], others[i])
    assert not torch.equal(parameters[1], others[1])
    counts = [int(v) for k, v in optimizer.state[parameters[1]].items() if k.endswith("failures.0")]
    assert counts == [2]
    with refused(ArithmeticError, 2, 1):
        walk(optimizer, parameters, given[:1])
