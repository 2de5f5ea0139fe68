"""Entry-wise updates as compiled kernels: what is traced, against the same updates as they are, and what is refused.

Kernels run here as they were traced, without a compiler, but for one test that is skipped unless `EIGENGRAFT_COMPILE`
is set: compiling takes half a minute.
"""

import os
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

from eigengraft import ContractError, Optimizer, Stage, State, StepContext, Traits, compose
from eigengraft.numerics import per_block
from eigengraft.optimizers.step import execution, traced
from eigengraft.optimizers.write.write import WriteNumbers

from ...refusals import refused, warned
from ...trajectories import normal

ADAM = {"base": "adamw", "set": {"update.momentum.nesterov": True}}
"""Two moments that no fused kernel computes."""
RECIPES: dict[str, Any] = {
    "adam": ADAM,
    "l2": {"base": "sgd", "weight_decay": {"kind": "l2"}},
    "cautious": {"base": "lion", "weight_decay": {"kind": "cautious"}},
    "decay after": {**ADAM, "weight_decay": {"kind": "decoupled", "placed": "after"}, "width_scaling": {}},
}
pytestmark = pytest.mark.slow

SHAPES = ((10, 32), (10, 32), (7,), (7,), (7,), (4, 3, 5), ())
MISSING = {(0, 1), (2, 1)}
"""(Parameter, step) without a gradient: one of the large ones that are equal, and one of the small ones."""


@pytest.fixture
def as_traced(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Kernels that run as they were traced; the number of entries of each call."""
    calls = list[int]()

    def generate(graph: Any, symbolic: bool) -> Any:
        def run(tensors: list[Tensor]) -> Any:
            calls.append(tensors[0].numel())
            return graph(*tensors)

        return run

    monkeypatch.setattr(traced, "generate", generate)
    monkeypatch.setattr(traced, "_PROGRAMS", {})
    monkeypatch.setattr(execution, "JOINED_IN_KERNEL", 20)
    return calls


def trained(
    recipe: Any, dtype: torch.dtype = torch.float64, groups: int = 1
) -> tuple[list[Tensor], list[dict[str, Tensor]]]:
    """Parameters and their state after three steps; two have no gradient in one of them."""
    held = [nn.Parameter(normal(*shape, seed=i).to(dtype)) for i, shape in enumerate(SHAPES)]
    named = [(f"p{i}" if i else "wte.weight", p) for i, p in enumerate(held)]  # an embedding has another width_scaling
    rates = [{"lr": 0.01 * (1 + at), "weight_decay": 0.1 * (1 + at)} for at in range(groups)]
    optimizer = Optimizer([{"params": named[at::groups], **own} for at, own in enumerate(rates)], recipe)
    for step in range(3):
        for i, parameter in enumerate(held):
            gradient = normal(*parameter.shape, seed=10 * step + i).to(dtype)
            parameter.grad = None if (i, step) in MISSING else gradient
        optimizer.param_groups[0]["lr"] *= 0.5
        optimizer.step()
    return [parameter.detach() for parameter in held], [optimizer.state[parameter] for parameter in held]


def compiled_recipe(name: str) -> dict[str, Any]:
    declared = RECIPES[name]
    return {"base": declared, "compile": True} if isinstance(declared, str) else {**declared, "compile": True}


@pytest.mark.parametrize("name", RECIPES)
def test_traced_kernels_are_the_chain_and_its_write(name: str, as_traced: list[int]) -> None:
    wanted, wanted_state = trained(RECIPES[name])
    assert not as_traced
    found, state = trained(compiled_recipe(name))
    assert set(as_traced) >= {320, 21, 7, 60}
    # the same operations in another order: some roundings of float64 apart
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(state, wanted_state, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", ["adam", "l2"])
def test_parameters_of_a_stack_have_the_rates_of_their_groups(name: str, as_traced: list[int]) -> None:
    found, wanted = (trained(recipe, groups=2)[0] for recipe in (compiled_recipe(name), RECIPES[name]))
    assert as_traced
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-14)  # as above


class Early(Stage):
    """Add 1 to the direction in the first two updates of a block."""

    kind: Literal["test_early"] = "test_early"

    def traits(self, block: tuple[int, ...]) -> Traits:
        return Traits(entrywise=True)

    def apply(self, state: State, gradient: Tensor, direction: Tensor, context: StepContext) -> Tensor:
        early = context.holds(lambda steps: steps <= 2)
        if isinstance(early, bool):
            return direction + 1 if early else direction * 1
        return direction + per_block(torch.from_numpy(early).to(direction), direction)


Stage.members.pop("test_early")  # the laws are about every member of the family


def test_steps_for_which_no_program_was_traced_run_by_the_stages(as_traced: list[int]) -> None:
    """A stage that asks of the step has one program, of late updates; the second of three blocks falls one behind."""
    held = [nn.Parameter(torch.zeros(10, dtype=torch.float64)) for _ in range(3)]
    optimizer = Optimizer(held, {"update": [Early()], "compile": True}, lr=1.0)
    as_traced.clear()
    for step in range(4):
        for at, parameter in enumerate(held):
            parameter.grad = torch.ones_like(parameter) if (at, step) != (1, 1) else None
        optimizer.step()
    assert [float(parameter[0].detach()) for parameter in held] == [-6.0, -5.0, -6.0]
    assert as_traced == [10] * 3  # in the fourth step alone, block by block: they are at different updates


def test_parameters_in_bfloat16_are_rounded_once(as_traced: list[int]) -> None:
    found, wanted = (trained(recipe, torch.bfloat16)[0] for recipe in (compiled_recipe("adam"), ADAM))
    assert as_traced
    # float32 sums that differ in last bits may round to neighbors in bfloat16, whose spacing is 2^-8
    torch.testing.assert_close(found, wanted, rtol=2**-7, atol=0)


def test_equal_updates_are_traced_once(as_traced: list[int]) -> None:
    for _ in range(2):
        Optimizer([nn.Parameter(normal(3, 4, seed=0))], compiled_recipe("adam"))
    assert len(traced._PROGRAMS) == 1


def test_updates_that_differ_in_one_thing_are_traced_apart(as_traced: list[int]) -> None:
    decays = ["decoupled", {"kind": "decoupled", "placed": "after"}, "cautious", "l2"]
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 2**-7)):
        for decay in decays if dtype is torch.float32 else decays[-1:]:
            recipe = {**ADAM, "weight_decay": decay}
            found, wanted = trained({**recipe, "compile": True}, dtype)[0], trained(recipe, dtype)[0]
            # roundings of sums in another order; in bfloat16 to a neighbor, 2^-7 apart
            torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance / 100)


def test_small_equal_parameters_take_one_call(as_traced: list[int]) -> None:
    held = [nn.Parameter(normal(3, seed=i)) for i in range(5)]
    optimizer = Optimizer(held, compiled_recipe("adam"))
    as_traced.clear()
    for parameter in held:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert as_traced == [15]


def test_numbers_of_a_step_do_not_depend_on_the_steps_before() -> None:
    """A run that goes on from a checkpoint has the bits of one that was never stopped."""
    source = _adamw(torch.float64)
    write = WriteNumbers(0.01, 0.999, 0.1, 0.0, 1.0)
    going = traced.Program(source)
    for step in (1, 2, 63, 64, 65, 1000):
        found, again = (
            torch.stack([*own.write_numbers(write).values(), *own.numbers(step, 1).values()])
            for own in (going, traced.Program(source))
        )
        assert torch.equal(found, again)
        # 1 - b^t loses up to four digits of float64 where b = 0.999 and t = 1
        wanted = torch.tensor([*write, 1 - 0.9**step, (1 - 0.999**step) ** 0.5], dtype=torch.float64)
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=0)


def test_a_warning_names_a_private_function_that_torch_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traced, "_without_guards", lambda graph: graph.no_such_function)
    monkeypatch.setattr(torch, "compile", lambda step, **options: step)
    tensor = torch.ones(1, 8)
    with warned(UserWarning, "no_such_function"):
        double = traced.generate(traced.trace(lambda x: (x.mul_(2),), [tensor], True), True)
    double([tensor])
    assert torch.equal(tensor, torch.full((1, 8), 2.0))


def test_signals_that_programs_do_not_support_are_refused() -> None:
    pair = [(f"q.lora_{own}.weight", nn.Parameter(normal(4, 4, seed=0))) for own in "AB"]
    with refused(ValueError, "routes.pairs.compile", "partner_basis", "partner"):
        Optimizer(pair, {"base": "lora_muon", "set": {"routes.pairs.compile": True}})


class Broken(Stage):
    """nan  where the gradient is above 1."""

    kind: Literal["nonfinite_for_test"] = "nonfinite_for_test"

    def traits(self, block: tuple[int, ...]) -> Traits:
        return Traits(entrywise=True)

    def apply(self, state: State, gradient: Tensor, direction: Tensor, context: StepContext) -> Tensor:
        return torch.where(gradient > 1, torch.nan, direction)


Stage.members.pop("nonfinite_for_test")  # the laws are about every member of the family


@pytest.mark.parametrize("shape", [(10, 32), (5, 2)], ids=["apart", "together"])
@pytest.mark.parametrize("update", [[Broken()], [Broken(), "clip_norm"]], ids=["entries", "blocks"])
def test_a_compiled_result_that_is_not_finite_is_an_error(
    update: Any, shape: tuple[int, ...], as_traced: list[int]
) -> None:
    """In the first updates, as without compilation. It is none if the gradient itself is not finite."""
    held = [nn.Parameter(normal(*shape, seed=i)) for i in range(2)]
    optimizer = Optimizer(held, {"update": update, "compile": True, "failure": {"nonfinite": "ignore"}})

    def step(*gradients: float) -> None:
        for parameter, gradient in zip(held, gradients, strict=True):
            parameter.grad = torch.full_like(parameter, gradient)
        optimizer.step()

    step(1.0, 1.0)
    step(1.0, torch.inf)
    held[1].data.fill_(1.0)
    as_traced.clear()
    with refused(ContractError, "update", 1, 2, str(list(shape))):
        step(1.0, 2.0)
    held[1].data.fill_(1.0)
    step(1.0, 2.0)  # a later update is not checked
    assert as_traced and bool(held[1].isnan().all())


@pytest.mark.parametrize("beta", [0.9, {"from": 0.5, "to": 0.9, "steps": 5}], ids=["constant", "scheduled"])
def test_a_mask_leaves_entries_of_a_compiled_program(beta: Any, as_traced: list[int]) -> None:
    """A gradient with nan changes nothing of its parameter, of which small equal ones are rows of one call."""
    update = [{"kind": "momentum", "beta": beta, "bias_correction": beta == 0.9}, "sign"]
    runs, calls = [], []
    for extra in ({}, {"compile": True}):
        held = [nn.Parameter(normal(*shape, seed=i)) for i, shape in enumerate(SHAPES)]
        optimizer = Optimizer(held, {"update": update, "failure": {"detect": "device"}, **extra})
        as_traced.clear()
        for step in range(4):
            for i, parameter in enumerate(held):
                parameter.grad = normal(*parameter.shape, seed=10 * step + i)
                if step == 2 and i in (0, 3):
                    parameter.grad.fill_(torch.nan)
            optimizer.step()
        runs.append([*held, *(x for p in held for x in optimizer.state[p].values())])
        calls.append(set(as_traced))
    assert calls[1] >= {320, 21, 7, 60} and not calls[0]
    torch.testing.assert_close(runs[1], runs[0], rtol=1e-12, atol=1e-14)


def test_a_scheduled_program_is_made_once(as_traced: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    made, generate = list[Any](), traced.generate
    monkeypatch.setattr(traced, "generate", lambda graph, symbolic: made.append(graph) or generate(graph, symbolic))
    held = [nn.Parameter(normal(10, seed=i)) for i in range(3)]
    moving = {"from": 0.5, "to": 0.9, "steps": 100}
    momentum = {"kind": "momentum", "beta": moving, "bias_correction": False}
    optimizer = Optimizer(held, {"update": [momentum], "compile": True})
    for step in range(100):
        for parameter in held:
            parameter.grad = torch.ones_like(parameter)
        optimizer.param_groups[0]["lr"] = 0.1 / (1 + step)
        optimizer.step()
    assert len(made) == 1 and as_traced[-100:] == [30] * 100


def test_the_adam_route_of_a_recipe_is_compiled(as_traced: list[int]) -> None:
    model = nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 8))
    nesterov = {"routes.adam.compile": True, "routes.adam.update.momentum.nesterov": True}
    optimizer = compose("soap_fitted", model, overrides=nesterov)
    assert {own.path for each in optimizer.param_sets for own in each.stack_states if each.execution(own).compiled} == {
        "routes.adam"
    }
    assert "  compiled: steps of 2 parameters;" in repr(optimizer)


def test_construction_without_a_compiler_is_refused(as_traced: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*given: Any) -> None:
        raise OSError("no g++")

    monkeypatch.setattr(traced, "generate", broken)
    with refused(RuntimeError, "compile"):
        Optimizer([nn.Parameter(normal(3, 4, seed=0))], compiled_recipe("adam"))


@pytest.mark.skipif("EIGENGRAFT_COMPILE" not in os.environ, reason="compiles for half a minute: set EIGENGRAFT_COMPILE")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_results_do_not_depend_on_the_place_of_entries_in_a_tensor(dtype: torch.dtype) -> None:
    """Slices of any length from anywhere have the bits that they have inside of the tensor."""
    program = traced.program_of(_adamw(dtype))
    tensors = [normal(1, 4096, 1, seed=i).to(dtype).square() for i in range(4)]
    write = WriteNumbers(0.01, 0.999, 0.1, 0.0, 1.0)
    numbers = [*program.write_numbers(write).values(), *program.numbers(3, 1).values()]
    whole = [tensor.clone() for tensor in tensors]
    program.compiled([*whole, *numbers])
    for start in range(20):
        for length in (2, 3, 15, 16, 17, 31, 100, 1023):
            part = [tensor[:, start : start + length].clone() for tensor in tensors]
            program.compiled([*part, *numbers])
            assert all(torch.equal(a, b[:, start : start + length]) for a, b in zip(part, whole, strict=True))


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_program_has_no_operations_on_lists(recipe: str, as_traced: list[int]) -> None:
    """Inductor compiles each of them as a kernel of its own on a GPU, however many operations it could fuse."""
    Optimizer([nn.Parameter(normal(8, 8, seed=0))], compiled_recipe(recipe))
    operations = [str(node.target) for program in traced._PROGRAMS.values() for node in program.graph.graph.nodes]
    assert any("aten.mul" in name for name in operations)
    assert not [name for name in operations if "_foreach_" in name]


def _adamw(dtype: torch.dtype) -> traced.ProgramSource:
    """The source of a program that writes AdamW's updates into parameters with two axes."""
    optimizer = Optimizer([nn.Parameter(torch.zeros(2, 2, dtype=dtype))], "adamw")
    (own,) = optimizer.stack_states()
    return execution._entry_source(own, optimizer.recipe, dtype)
