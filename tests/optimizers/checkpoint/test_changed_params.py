"""Parameters that are converted, moved, cast or tied after compose, and parameters that are stored in integers."""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import eigengraft
from eigengraft import Optimizer

from ...recipes import COVER
from ...refusals import refused

CODED = {
    "base": "soap_fitted",
    "storage": {role: {"kind": "int8", "min_elements": 1} for role in ("first_moment", "second_moment", "statistic")},
}
QUICK = ("adamw", "soap_fitted", "shampoo", "prodigy")
SOME_QUICK = [pytest.param(recipe, marks=() if recipe in QUICK else pytest.mark.slow) for recipe in COVER]
MASTER = {"base": "soap_fitted", "constraints": {"kind": "rounding", "rule": "split"}}


class LM(nn.Module):
    """An embedding, two matrices with a norm between them, and a head of the embedding's shape."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.emb, self.up, self.norm, self.down = nn.Embedding(11, 6), nn.Linear(6, 9), nn.LayerNorm(9), nn.Linear(9, 6)
        self.lm_head = nn.Linear(6, 11, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.lm_head(self.down(self.norm(self.up(self.emb(x)))))  # type: ignore[no-any-return]


def give(model: nn.Module, step: int) -> None:
    """Write the gradients of a step, which depend on names and the step alone."""
    for name, p in model.named_parameters():
        if p.requires_grad:
            generator = torch.Generator().manual_seed(1000 * step + sum(map(ord, name)))
            p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)


def run(model: nn.Module, optimizer: Optimizer, steps: range) -> list[Tensor]:
    for step in steps:
        give(model, step)
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(map(torch.equal, one, other))


@pytest.fixture
def swap() -> Any:
    """Make conversions of a module swap its parameters, as they do for DTensors and tensor subclasses."""
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield
    torch.__future__.set_swap_module_params_on_conversion(False)


@pytest.mark.parametrize("recipe", ["adamw", "newton_muon", "singd"])
def test_a_model_may_be_converted_by_swapping(swap: None, recipe: str) -> None:
    model = LM()
    optimizer = eigengraft.compose(recipe, model)
    before = [p.detach().clone() for p in model.parameters()]
    model.to(torch.float64).to(torch.float32)
    assert equal(before, list(model.parameters())) and {*optimizer.state} == {*model.parameters()}


@pytest.mark.parametrize("recipe", ["adamw", "soap_fitted", "schedule_free_adamw"])
def test_conversions_there_and_back_change_no_step(swap: None, recipe: str) -> None:
    (expected, reference), (model, optimizer) = ((m := LM(), eigengraft.compose(recipe, m)) for _ in range(2))
    run(model, optimizer, range(3))
    model.zero_grad()
    model.to(torch.float64).to(torch.float32)
    assert equal(run(expected, reference, range(6)), run(model, optimizer, range(3, 6)))


def lost_place(optimizer: Optimizer) -> None:
    """Make the optimizer believe that its parameters were on another device until now."""
    for param_set in optimizer.param_sets:
        param_set.specs = [replace(spec, device=torch.device("meta")) for spec in param_set.specs]


MOVED = [pytest.param(recipe, torch.float32, marks=() if recipe in QUICK else pytest.mark.slow) for recipe in COVER]
MOVED += [pytest.param(CODED, torch.float32), pytest.param(MASTER, torch.bfloat16)]
MOVED += [pytest.param(recipe, torch.bfloat16) for recipe in ("adamw", "schedule_free_adamw")]


@pytest.mark.parametrize(("recipe", "dtype"), MOVED, ids=lambda value: value if isinstance(value, str) else None)
def test_state_follows_parameters_to_another_device(recipe: Any, dtype: torch.dtype) -> None:
    expected, model = LM().to(dtype), LM().to(dtype)
    for net in (expected, model):
        net.up.bias.requires_grad_(False)
    reference, optimizer = eigengraft.compose(recipe, expected), eigengraft.compose(recipe, model)
    run(model, optimizer, range(4))
    sets = [*optimizer.param_sets]
    lost_place(optimizer)
    optimizer.state_dict()
    assert not {*map(id, optimizer.param_sets)} & {*map(id, sets)}, "the state was made anew on the device"
    assert equal(run(expected, reference, range(9)), run(model, optimizer, range(4, 9)))
    assert {*optimizer.state} == {p for p in model.parameters() if p.requires_grad}


@pytest.mark.parametrize("recipe", ["adamw", "soap_fitted", "gpa_adamw"])
def test_a_cast_before_the_first_step_is_a_cast_before_compose(recipe: str) -> None:
    early, late = LM().to(torch.bfloat16), LM()
    first, second = eigengraft.compose(recipe, early), eigengraft.compose(recipe, late)
    late.to(torch.bfloat16)
    assert equal(run(early, first, range(5)), run(late, second, range(5)))
    states = [[value.dtype for own in o.state.values() for value in own.values()] for o in (first, second)]
    assert states[0] == states[1]


@pytest.mark.parametrize("call", [Optimizer.step, Optimizer.state_dict, Optimizer.eval, copy.deepcopy])
def test_a_cast_after_a_step_is_refused_by_name_and_changes_nothing(call: Any) -> None:
    model = LM()
    optimizer = eigengraft.compose("gpa_adamw", model)
    expected = run(model, optimizer, range(2))
    model.half()
    before = [p.detach().clone() for p in model.parameters()]
    with refused(ValueError, "emb.weight", "(11, 6)", "float32", "float16"):
        call(optimizer)
    assert equal(before, [p.detach() for p in model.parameters()])
    model.float()
    assert [int(own["step"]) for own in optimizer.state.values()] == [2] * len(expected)


@pytest.mark.parametrize("call", [Optimizer.step, Optimizer.state_dict])
def test_parameters_on_the_meta_device_are_refused_and_their_state_stays(swap: None, call: Any) -> None:
    model = LM()
    optimizer = eigengraft.compose("adamw", model)
    values = run(model, optimizer, range(2))
    moments = [x.clone() for own in optimizer.state.values() for x in own.values()]
    model.zero_grad()
    model.to("meta")
    with refused(ValueError, "emb.weight"):
        call(optimizer)
    model.to_empty(device="cpu").load_state_dict(dict(zip(model.state_dict(), values, strict=True)))
    assert equal(moments, [x for own in optimizer.state_dict()["state"].values() for x in own.values()])


@pytest.mark.parametrize("tie", ["head to embedding", "embedding to head"])
@pytest.mark.parametrize("recipe", ["adamw", "muon"])
def test_weights_tied_after_compose_are_trained_by_what_the_optimizer_has(recipe: str, tie: str) -> None:
    model = LM()
    optimizer = eigengraft.compose(recipe, model)
    first, second = (model.emb, model.lm_head) if tie == "embedding to head" else (model.lm_head, model.emb)
    dropped = first.weight
    first.weight = second.weight
    before = dropped.detach().clone()
    expected = LM()
    expected.lm_head.weight = expected.emb.weight
    with torch.no_grad():
        expected.emb.weight.copy_(second.weight)
    reference = eigengraft.compose(recipe, expected)
    for net, own in ((model, optimizer), (expected, reference)):
        for step in range(3):
            net.zero_grad()
            net(torch.arange(11).roll(step)).square().mean().backward()
            own.step()
    assert torch.equal(model.emb.weight, expected.emb.weight) and torch.equal(dropped, before)


@pytest.mark.parametrize("name", ["emb", "up"])
def test_a_gradient_that_no_parameter_of_the_optimizer_has_is_still_refused(name: str) -> None:
    model = LM()
    optimizer = eigengraft.compose("adamw", model)
    layer = getattr(model, name)
    layer.weight = nn.Parameter(layer.weight.detach().clone())
    model(torch.arange(11)).square().mean().backward()
    with refused(RuntimeError, f"{name}.weight"):
        optimizer.step()


class Quantized(nn.Module):
    """Adapters beside a frozen base weight, as QLoRA stores it."""

    def __init__(self, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lora_A, self.lora_B = nn.Linear(8, 2, bias=False), nn.Linear(2, 64, bias=False)
        nn.init.normal_(self.lora_B.weight)
        self.weight = nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=False)


BASES = [(torch.uint8, (256, 1)), (torch.int8, (64, 8)), (torch.bool, (64, 8)), (torch.float8_e4m3fn, (64, 8))]


@pytest.mark.parametrize("recipe", SOME_QUICK)
def test_a_frozen_base_in_any_dtype_leaves_adapters_as_they_are_alone(recipe: str) -> None:
    net = Quantized(*BASES[0])
    expected = run(net, Optimizer([(n, p) for n, p in net.named_parameters() if "lora" in n], recipe), range(4))
    for dtype, shape in BASES:
        model = Quantized(dtype, shape)
        optimizer = eigengraft.compose(recipe, model)
        assert equal(run(model, optimizer, range(4))[1:], expected[1:])
        assert model.weight not in optimizer.state and not model.weight.any()
        optimizer.load_state_dict(optimizer.state_dict())
