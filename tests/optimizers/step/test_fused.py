"""Adam's chain by torch's fused kernels: its numbers, and that no entry depends on its place in a tensor or a stack."""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from eigengraft import Optimizer
from eigengraft.optimizers.step import fused, gradients
from eigengraft.optimizers.step.execution import Fused

from ...trajectories import normal

SIZES = (1, 2, 3, 7, 10, 15, 16, 17, 31, 33, 63, 64, 65, 100, 127, 128, 129, 320, 1000, 20_001)
RATES = {"lr": 0.01, "weight_decay": 0.1}


def run(recipe: Any, values: Sequence[Tensor], steps: int = 4, without: Sequence[tuple[int, int]] = ()) -> Optimizer:
    """Steps along gradients that are functions of the values alone; (parameter, step) in `without` have none."""
    held = [nn.Parameter(value.detach().clone(memory_format=torch.preserve_format)) for value in values]
    optimizer = Optimizer([(f"p{i}", parameter) for i, parameter in enumerate(held)], recipe, **RATES)
    start = [value.detach().float() for value in values]
    for step in range(steps):
        for i, parameter in enumerate(held):
            parameter.grad = None if (i, step) in without else (start[i] * (7.3 + step)).sin().to(parameter.dtype)
        optimizer.step()
    return optimizer


def ends(optimizer: Optimizer) -> list[Tensor]:
    """Parameters, and m and v, entry by entry."""
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    slots = [value for parameter in held for key, value in optimizer.state[parameter].items() if key != "step"]
    return [x.detach().reshape(-1) for x in (*held, *slots)]


def fused_chains(optimizer: Optimizer) -> list[bool]:
    return [isinstance(each.execution(own), Fused) for each in optimizer.param_sets for own in each.stack_states]


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_slices_have_the_bits_that_they_have_inside_a_tensor(dtype: torch.dtype, threads: None) -> None:
    """Of any length, from anywhere, alone or in a stack with others of their shape."""
    whole = normal(70_000, seed=0).to(dtype)
    expected = ends(run("adamw", [whole]))
    spans = [(start, size) for size in SIZES for start in (0, 1, 5, 4097)]
    found = ends(run("adamw", [whole[start : start + size] for start, size in spans]))
    slots = len(spans)
    for at, (start, size) in enumerate(spans):
        own = [found[at], *found[slots + 2 * at : slots + 2 * at + 2]]
        assert all(torch.equal(a, b[start : start + size]) for a, b in zip(own, expected, strict=True)), (start, size)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_strides_and_stacks_change_no_bit(dtype: torch.dtype) -> None:
    shapes = [(3, 5), (64, 33), (8, 16), (300, 1000)]
    values = [normal(*shape, seed=i).to(dtype) for i, shape in enumerate(shapes)]
    plain = ends(run("adamw", values))
    columns = [value.mT.contiguous().mT for value in values]
    assert not any(value.is_contiguous() for value in columns)
    assert all(map(torch.equal, plain, ends(run("adamw", columns))))
    double = [value for value in values for _ in range(3)]
    stacked = ends(run("adamw", double))
    assert all(map(torch.equal, plain[: len(shapes)], stacked[: 3 * len(shapes) : 3]))


def test_parameters_at_different_steps_have_the_bits_that_they_have_alone() -> None:
    values = [normal(10, 7, seed=i).float() for i in range(4)]
    together = ends(run("adamw", values, without=[(1, 1), (2, 0), (2, 1)]))
    for i, missing in enumerate([[], [(0, 1)], [(0, 0), (0, 1)], []]):
        assert torch.equal(ends(run("adamw", [values[i]], without=missing))[0], together[i])


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"weight_decay": {"kind": "l2", "rate": 0.1}},
        {"weight_decay": "corrected"},
        {"weight_decay": "independent"},
        {"width_scaling": {"base_width": 16}},
        {"set": {"update.momentum.beta": 0.0, "update.rms.beta": 0.9, "update.rms.eps": 1e-3}},
    ],
    ids=str,
)
def test_fused_steps_are_the_chain_and_its_write(changes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, values = {"base": "adamw", **changes}, [normal(40, 33, seed=0), normal(7, seed=1), normal(5, 4, 3, seed=2)]
    found = run(recipe, values)
    assert all(fused_chains(found))
    monkeypatch.setattr("eigengraft.optimizers.step.execution.declared_moments", lambda rule, block: None)
    wanted = run(recipe, values)
    assert not any(fused_chains(wanted))
    torch.testing.assert_close(ends(found), ends(wanted), rtol=1e-13, atol=1e-15)  # a few roundings of float64


def test_fused_steps_are_as_exact_as_the_chain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the same steps in float64: the error of float32 is that of the chain, to a tenth."""
    values = [normal(400, 100, seed=0).float()]
    exact = ends(run("adamw", [value.double() for value in values], 12))[0]
    found = ends(run("adamw", values, 12))[0]
    monkeypatch.setattr("eigengraft.optimizers.step.execution.declared_moments", lambda rule, block: None)
    chain = ends(run("adamw", values, 12))[0]
    errors = [float((x.double() - exact).square().mean().sqrt()) for x in (found, chain)]
    assert errors[0] <= 1.1 * errors[1] < 1e-6


def test_one_call_takes_all_stacks_with_the_same_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, kernel = list[int](), torch._fused_adamw_
    monkeypatch.setattr(
        torch, "_fused_adamw_", lambda p, *args, **options: (calls.append(len(p)), kernel(p, *args, **options))
    )
    run(
        "adamw", [normal(*shape, seed=i).float() for i, shape in enumerate([(64, 64), (8, 8), (8, 8), (64,), (10,)])], 1
    )
    assert calls == [4]  # the two of one shape as one, and the end of the last in a buffer


def test_copies_are_kept_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters in bfloat16 are updated piece by piece, with the bits of the whole."""
    values = [normal(1000, 300, seed=i).bfloat16() for i in range(2)]
    wanted = ends(run("adamw", values))
    monkeypatch.setattr(fused, "CHUNK_ENTRIES", 1 << 10)
    monkeypatch.setattr(fused, "BYTES_ON_CPU", 1 << 14)
    assert all(map(torch.equal, wanted, ends(run("adamw", values))))


def test_a_rejected_gradient_changes_nothing() -> None:
    held = [nn.Parameter(normal(8, 8, seed=i).float()) for i in range(3)]
    optimizer = Optimizer(held, "adamw", lr=0.01)
    before = held[1].detach().clone()
    for parameter in held:
        parameter.grad = torch.ones_like(parameter)
    held[1].grad = torch.full((8, 8), torch.nan)
    optimizer.step()
    assert torch.equal(held[1], before) and optimizer.state[held[1]]["step"] == 0
    assert not any(value.any() for key, value in optimizer.state[held[1]].items() if key != "step")
    assert optimizer.state[held[0]]["step"] == optimizer.state[held[2]]["step"] == 1


@pytest.mark.parametrize("decay", ["decoupled", {"kind": "decoupled", "placed": "after"}, "l2"], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("limit", [1, 1 << 21], ids=["stack by stack", "together"])
@pytest.mark.filterwarnings("ignore:.*its gradient has inf or nan")
def test_a_mask_keeps_rejected_parameters_and_the_bits_of_all_others(
    decay: Any, dtype: torch.dtype, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small and large stacks, with gradients of nan, and one that is missing."""
    monkeypatch.setattr(fused, "BYTES_ON_CPU", limit)
    monkeypatch.setattr(gradients, "squares_are_finite", lambda tensors: False)
    found = []
    for detect in ("host", "device"):
        held = [nn.Parameter(normal(*shape, seed=i).to(dtype)) for i, shape in enumerate(MASKED)]
        recipe = {"base": "adamw", "weight_decay": decay, "failure": {"detect": detect}}
        optimizer = Optimizer([(f"p{i}", p) for i, p in enumerate(held)], recipe, **RATES)
        assert all(fused_chains(optimizer))
        for step in range(6):
            for i, parameter in enumerate(held):
                parameter.grad = normal(*parameter.shape, seed=10 * step + i).to(dtype)
                if (step, i) in ((2, 1), (4, 5), (4, 6)):
                    parameter.grad.view(-1)[3] = torch.nan
            held[0].grad = None if step == 3 else held[0].grad
            optimizer.step()
        optimizer.state_dict()  # reads the last masks
        assert optimizer.skipped == {"p1": 1, "p5": 1, "p6": 1}
        found.append(ends(optimizer))
    assert all(map(torch.equal, *found))


MASKED = ((8, 6), (8, 6), (12, 5), (6,), (6,), (300, 70), (3, 5, 7))


@pytest.mark.parametrize("compiled", [False, True])
def test_a_learning_rate_in_a_tensor_is_the_number(compiled: bool) -> None:
    """`compile: true` takes the fused kernel too."""
    results = []
    for lr in (0.01, torch.tensor(0.01, dtype=torch.float64)):
        held = nn.Parameter(normal(8, 9, seed=0).float())
        optimizer = Optimizer([held], {"base": "adamw", "compile": compiled}, lr=lr)
        held.grad = torch.ones_like(held)
        optimizer.step()
        assert all(fused_chains(optimizer))
        results.append(held.detach())
    assert torch.equal(*results)
