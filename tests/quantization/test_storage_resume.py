"""Every quantizer in an optimizer: a saved run goes on as if it had not been stopped, to the last bit.

The rows are those of the law suite, in which every quantizer must have one; each is asked to store every slot of a
chain that has slots of all roles, and stores what it can.
"""

import copy
import io
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from eigengraft import Optimizer
from eigengraft.quantization.base import NEVER_CODED, Quantizer
from eigengraft.slots import Role

from ..laws.quantizers import QUANTIZERS, WITH_NOISE_INSIDE, small
from ..laws.rows import Row
from ..trajectories import normal, random_gradients

pytestmark = pytest.mark.slow

ROWS = (*QUANTIZERS, *WITH_NOISE_INSIDE)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
each = pytest.mark.parametrize("row", ROWS, ids=str)
ONE_OF_EACH = tuple({row.kind: row for row in reversed(ROWS)}.values())
"""The first row of each kind, for products with dtypes and settings that no row is about."""

EVERY = {"kind": "every", "steps": 2, "stagger": "none"}
UPDATE = [
    {"kind": "shampoo", "solver": {"kind": "eigh", "eps": 0.1, "relative": True}, "refresh": EVERY},
    {"kind": "eigenbasis", "inner": ["momentum", "rms"], "refresh": {**EVERY, "start": 2}},
]
SHAPES = [(10, 7), (10, 7), (6,)]
Parameters = list[torch.nn.Parameter]


def everywhere(quantizer: Quantizer) -> dict[str, Quantizer]:
    """By role, for every role that the quantizer takes."""
    roles = (quantizer.codec or quantizer).roles or get_args(Role)
    return {role: quantizer for role in roles if role not in NEVER_CODED}


def made(row: Row, dtype: torch.dtype = torch.float32, **changes: Any) -> tuple[Parameters, Optimizer]:
    """Parameters and an optimizer in which every slot that the quantizer takes is stored by it."""
    quantizer = small({**row.make, **changes})
    parameters = [torch.nn.Parameter(normal(*shape, seed=i).to(dtype)) for i, shape in enumerate(SHAPES)]
    storage = everywhere(quantizer)
    optimizer = Optimizer(parameters, {"update": UPDATE, "routes": [], "storage": storage}, lr=0.01)
    coded = {key.rpartition("/")[0] for key in optimizer.state[parameters[0]] if key.endswith("/format")}
    assert bool(coded) == (quantizer.codec is not None)
    return parameters, optimizer


def walk(optimizer: Optimizer, parameters: Parameters, given: list[list[Tensor]]) -> None:
    for step in given:
        for parameter, gradient in zip(parameters, step, strict=True):
            parameter.grad = gradient.to(parameter.dtype)
        optimizer.step()


def everything(optimizer: Optimizer) -> dict[tuple[int, str], Tensor]:
    state = optimizer.state_dict()["state"]
    return {(i, key): value.clone() for i, slots in state.items() for key, value in slots.items()}


def same(one: dict[Any, Tensor], two: dict[Any, Tensor]) -> bool:
    """The same names, dtypes, shapes and bits."""
    return one.keys() == two.keys() and all(
        one[key].dtype == two[key].dtype and torch.equal(one[key], two[key]) for key in one
    )


GRADIENTS = random_gradients(SHAPES, 7, dtype=torch.float32)


RUNS = [(row, torch.float32) for row in ROWS] + [(row, dtype) for dtype in DTYPES[1:] for row in ONE_OF_EACH]


@pytest.mark.parametrize(("row", "dtype"), RUNS, ids=str)
def test_a_run_saved_to_a_file_goes_on_exactly(row: Row, dtype: torch.dtype) -> None:
    """Three steps more, with refreshes among them and before, and with random numbers where the format draws some."""
    parameters, optimizer = made(row, dtype)
    start = copy.deepcopy(parameters)
    walk(optimizer, parameters, GRADIENTS[:4])
    assert all(bool(p.isfinite().all()) and not torch.equal(p, q) for p, q in zip(parameters, start, strict=True))
    file = io.BytesIO()
    torch.save({"optimizer": optimizer.state_dict(), "parameters": [p.detach() for p in parameters]}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    copies, resumed = made(row, dtype)
    for copied, parameter in zip(copies, saved["parameters"], strict=True):
        copied.data.copy_(parameter)
    assert not same(everything(resumed), everything(optimizer))
    resumed.load_state_dict(saved["optimizer"])
    assert same(everything(resumed), everything(optimizer))
    walk(optimizer, parameters, GRADIENTS[4:])
    walk(resumed, copies, GRADIENTS[4:])
    assert same(everything(resumed), everything(optimizer))
    assert all(torch.equal(a, b) for a, b in zip(parameters, copies, strict=True))


@pytest.mark.parametrize("row", [row for row in ROWS if "stochastic" in str(row)], ids=str)
def test_rounding_that_is_declared_stochastic_draws(row: Row) -> None:
    """The same run rounded to nearest is another one; without this the test above would say nothing of noise."""
    inner = row.make.get("inner")
    nearest = {"inner": {**inner, "rounding": "nearest"}} if inner else {"rounding": "nearest"}
    runs = [made(row), made(row, **nearest)]
    for parameters, optimizer in runs:
        walk(optimizer, parameters, GRADIENTS[:3])
    assert not torch.equal(runs[0][0][0], runs[1][0][0])


@pytest.mark.parametrize(
    ("row", "detect"), [*((row, "host") for row in ROWS), *((row, "device") for row in ONE_OF_EACH)], ids=str
)
def test_a_gradient_that_is_not_finite_leaves_what_is_stored(row: Row, detect: str) -> None:
    """Of its own parameter everything, bit for bit; the other two go on, one of them in the same stack."""
    quantizer = small(row.make)
    parameters = [torch.nn.Parameter(normal(*shape, seed=i).float()) for i, shape in enumerate(SHAPES)]
    storage = everywhere(quantizer)
    recipe = {"update": UPDATE, "routes": [], "storage": storage, "failure": {"detect": detect}}
    optimizer = Optimizer(parameters, recipe, lr=0.01)
    walk(optimizer, parameters, GRADIENTS[:3])
    before, kept = everything(optimizer), copy.deepcopy(parameters)
    spoiled = [gradient.clone() for gradient in GRADIENTS[3]]
    spoiled[1][2, 3] = float("nan")
    walk(optimizer, parameters, [spoiled])
    after = everything(optimizer)
    for index in range(len(SHAPES)):
        own = [{key: value for key, value in state.items() if key[0] == index} for state in (before, after)]
        assert same(*own) == (index == 1)
        assert torch.equal(parameters[index], kept[index]) == (index == 1)
    assert all(bool(value.isfinite().all()) for value in after.values() if value.is_floating_point())
