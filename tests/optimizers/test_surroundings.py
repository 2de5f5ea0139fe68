"""What an optimizer computes is the same in whatever contexts of torch its caller is, and keeps working in them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from eigengraft import Optimizer, compose
from eigengraft.optimizers import convert_storage

from ..processes import run
from ..recipes import ALL_KINDS, COVER
from ..refusals import refused

Surroundings = Callable[[], AbstractContextManager[Any]]
QUICK = ("adam_h", "psgd_kron", "shampoo_4bit", "soap_muon")
EVERY_KIND = [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in ALL_KINDS]


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextmanager
def saved_on_cpu() -> Iterator[None]:
    with torch.autograd.graph.save_on_cpu(), torch.autograd.set_detect_anomaly(True, check_nan=True):
        yield


SURROUNDINGS: dict[str, Surroundings] = {
    "autocast to bfloat16": partial(torch.autocast, "cpu", torch.bfloat16),
    "autocast to float16": partial(torch.autocast, "cpu", torch.float16),
    "inference mode": torch.inference_mode,
    "deterministic algorithms": deterministic,
    "default dtype float64": partial(default_dtype, torch.float64),
    "default dtype bfloat16": partial(default_dtype, torch.bfloat16),
    "default device": partial(torch.device, "meta"),
    "gradients": torch.enable_grad,
    "saved tensors and anomalies": saved_on_cpu,
}


@contextmanager
def all_at_once() -> Iterator[None]:
    """Autocast, inference mode, another default dtype and another default device."""
    contexts = ("autocast to bfloat16", "inference mode", "default dtype bfloat16", "default device")
    with ExitStack() as stack:
        for name in contexts:
            stack.enter_context(SURROUNDINGS[name]())
        yield


class Few(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 12)
        self.conv = nn.Conv2d(2, 3, 3)
        self.large = nn.Linear(72, 64, bias=False)  # enough entries for coded storage
        self.lora_A, self.lora_B = nn.Linear(12, 4, bias=False), nn.Linear(4, 12, bias=False)


class Net(Few):
    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(12, 16)
        self.lm_head = nn.Linear(12, 5, bias=False)


def trajectory(recipe: str, inside: Surroundings) -> list[Tensor]:
    """Parameters and state after all that an optimizer computes, each in new surroundings."""
    torch.manual_seed(0)
    model = Net()
    parameters, generator = list(model.parameters()), torch.Generator().manual_seed(1)
    with inside():
        optimizer = compose(recipe, model, lr=0.1)
    for step in range(4):
        for place, p in enumerate(parameters):
            given = 0.1 * torch.randn(p.shape, generator=generator)
            p.grad = None if step == 2 and place % 3 == 1 else given
        with inside():
            optimizer.step()
    with inside():
        optimizer.load_state_dict(optimizer.state_dict())
        optimizer.inspect()
        optimizer.eval()
        optimizer.train()
        optimizer.step()
    return [*parameters, *(x for state in optimizer.state.values() for x in state.values())]


@pytest.mark.slow
@pytest.mark.parametrize("recipe", EVERY_KIND)
def test_everything_is_the_same_in_any_surroundings(recipe: str) -> None:
    """The quick recipes in each of the surroundings, the others in those that stages could see, together."""
    usual = trajectory(recipe, nullcontext)
    for name, inside in (SURROUNDINGS if recipe in QUICK else {"all at once": all_at_once}).items():
        found = trajectory(recipe, inside)
        for one, other in zip(found, usual, strict=True):
            assert torch.equal(one, other) and one.dtype == other.dtype and one.device == other.device, name
            assert not one.is_inference(), name


@pytest.mark.parametrize("name", SURROUNDINGS)
def test_a_storage_is_converted_alike_in_any_surroundings(name: str) -> None:
    torch.manual_seed(0)
    model = nn.Linear(80, 64)
    start = compose("soap_fitted", model)
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    start.step()
    target = compose(
        "soap_fitted", model, overrides={"storage": {"basis": {"kind": "orthogonal", "inner": {"kind": "int4"}}}}
    )
    usual = convert_storage(start.state_dict(), target)["state"]
    with SURROUNDINGS[name]():
        found = convert_storage(start.state_dict(), target)["state"]
    pairs = [(found[at][key], usual[at][key]) for at in usual for key in usual[at]]
    assert pairs and all(torch.equal(a, b) and a.dtype == b.dtype for a, b in pairs)


@pytest.mark.parametrize("extra", [{}, {"sam": {"rho": 0.1}}, {"line_search": {}}])
def test_a_closure_runs_in_the_surroundings_of_its_caller(extra: dict[str, Any]) -> None:
    model, seen = nn.Linear(4, 4), list[tuple[object, ...]]()
    optimizer = compose({"base": "sgd", **extra}, model)
    inputs = torch.ones(2, 4)

    def closure() -> Tensor:
        out = model(inputs)
        enabled, dtype = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
        seen.append((enabled, dtype, out.dtype, torch.is_grad_enabled()))
        optimizer.zero_grad()
        loss: Tensor = out.float().square().mean()
        loss.backward()
        return loss

    with torch.autocast("cpu", torch.float16):
        optimizer.step(closure)
        assert torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") == torch.float16
    assert set(seen) == {(True, torch.float16, torch.float16, True)} and len(seen) > len(extra)
    assert not torch.is_autocast_enabled("cpu")


def test_a_forward_after_a_step_in_one_autocast_sees_the_new_parameters() -> None:
    """Autocast keeps the parameters that it has cast, until it ends."""
    model, x = nn.Linear(3, 2, bias=False), torch.ones(1, 3)
    nn.init.ones_(model.weight)
    optimizer = compose("sgd", model, lr=0.25, weight_decay=0.0)
    with torch.autocast("cpu", torch.bfloat16):
        out = model(x)
        out.sum().backward()
        optimizer.step()
        assert model(x).tolist() == [[2.25, 2.25]]


def test_the_second_gradient_of_sam_in_one_autocast_is_that_of_the_neighborhood() -> None:
    weight, seen = nn.Parameter(torch.ones(1, 3)), list[float]()
    optimizer = Optimizer([("w", weight)], {"base": "sgd", "sam": {"rho": 3**0.5}}, lr=0.5)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = nn.functional.linear(torch.ones(1, 3), weight).sum()
        loss.backward()
        seen.append(loss.item())
        return loss

    with torch.autocast("cpu", torch.bfloat16):
        optimizer.step(closure)
    assert seen == [3.0, 6.0]


def test_a_closure_that_raises_leaves_the_surroundings_as_they_were() -> None:
    optimizer = compose("sgd", nn.Linear(2, 2))

    def closure() -> Tensor:
        raise KeyError("batch")

    with torch.autocast("cpu", torch.bfloat16), torch.device("meta"):
        with pytest.raises(KeyError):
            optimizer.step(closure)
        assert torch.is_autocast_enabled("cpu") and torch.empty(1).is_meta and torch.is_grad_enabled()


def test_parameters_made_in_inference_mode_are_refused_by_name() -> None:
    with torch.inference_mode():
        model = nn.Linear(2, 2)
        with refused(ValueError, "params", "weight", "inference_mode"):
            compose("adamw", model)


def test_gradients_made_in_inference_mode_are_taken() -> None:
    found = []
    for inside in (nullcontext, torch.inference_mode):
        p = nn.Parameter(torch.ones(40, 1000))
        optimizer = Optimizer([("w", p)], "adamw", lr=0.1)
        with inside():
            given = torch.full_like(p, 0.5)
        p.grad = given
        optimizer.step()
        found.append(p.detach())
    assert torch.equal(*found)


@pytest.mark.slow
class TestFakeTensors:
    """Estimates of memory build optimizers and step them with tensors that have no numbers."""

    @staticmethod
    def stepped(recipe: str, inside: bool) -> Optimizer:
        with (mode := FakeTensorMode()):
            model = Few()
            for p in model.parameters():
                p.grad = torch.ones_like(p)
        with mode if inside else nullcontext():
            optimizer = compose(recipe, model)
            for _ in range(2):  # one with the first refresh, and one that uses what it made
                optimizer.step()
            optimizer.state_dict()
            optimizer.eval()
            optimizer.train()
        assert all(type(x).__name__ == "FakeTensor" for state in optimizer.state.values() for x in state.values())
        return optimizer

    @pytest.mark.parametrize("recipe", ALL_KINDS)
    def test_every_recipe_steps_and_has_its_state(self, recipe: str) -> None:
        fake, real = self.stepped(recipe, True), compose(recipe, Few())
        assert fake.state_bytes() == real.state_bytes()
        assert [p.shape for p in fake.state] == [p.shape for p in real.state]

    @pytest.mark.parametrize(
        "recipe", ["newton_muon", "singd", {"base": "adamw", "sam": {"rho": 0.1}}, {"base": "sgd", "line_search": {}}]
    )
    def test_what_a_model_and_a_closure_provide_is_taken(self, recipe: Any) -> None:
        with FakeTensorMode():
            model = nn.Sequential(nn.Linear(6, 8, dtype=torch.bfloat16), nn.Linear(8, 4, dtype=torch.bfloat16))
            optimizer = compose(recipe, model, checked=True)

            def closure() -> Tensor:
                optimizer.zero_grad()
                loss: Tensor = model(torch.ones(2, 6, dtype=torch.bfloat16)).square().mean()
                loss.backward()
                return loss

            for _ in range(7):  # parameters in 16 bits are watched for so long
                optimizer.step(closure)
        with refused(ValueError, "inspect"):
            optimizer.inspect()

    @pytest.mark.parametrize("recipe", ["adamw", "shampoo_4bit"])
    def test_steps_of_fake_tensors_leave_none_for_real_steps(self, recipe: str) -> None:
        self.stepped(recipe, False)
        assert not any(type(x).__name__ == "FakeTensor" for x in trajectory(recipe, nullcontext))

    def test_real_parameters_are_stepped_outside_of_the_mode(self) -> None:
        usual = trajectory("soap_fitted", nullcontext)
        found = trajectory("soap_fitted", FakeTensorMode)
        assert all(torch.equal(a, b) for a, b in zip(found, usual, strict=True))

    @pytest.mark.slow  # it imports what torch has for processes
    def test_ranks_refuse_them_by_name(self) -> None:
        import torch.distributed as dist
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
        try:
            with FakeTensorMode(), refused(ValueError, "weight"):
                compose("adamw", nn.Linear(2, 2))
        finally:
            dist.destroy_process_group()


def test_a_model_of_the_meta_device_is_composed_and_stepped_after_it_has_values() -> None:
    """Deferred initialization replaces every parameter by another one before the first step."""
    torch.manual_seed(0)
    for recipe in COVER[:6]:
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 70))
            optimizer = compose(recipe, model)
        model.to_empty(device="cpu")
        for p in model.parameters():
            nn.init.ones_(p)
        other = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 70))
        other.load_state_dict(model.state_dict())
        optimizer.param_groups[0]["params"] = list(model.parameters())
        reference = compose(recipe, other)
        for a, b in zip(model.parameters(), other.parameters(), strict=True):
            a.grad = torch.randn_like(a)
            b.grad = a.grad.clone()
        optimizer.step()
        reference.step()
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True)), recipe


def frames(make: Callable[[nn.Module], Any], compiled: bool) -> int:
    """Frames that Dynamo traces of eight steps, each after a change of the learning rate."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
    optimizer = make(model)

    def train() -> None:
        optimizer.zero_grad()
        model(torch.ones(2, 6)).square().mean().backward()
        optimizer.step()
        optimizer.provide("loss", 1.0)

    step = torch.compile(train, backend="eager") if compiled else torch.compile(optimizer.step, backend="eager")
    for at in range(8):
        optimizer.param_groups[0]["lr"] = 0.1 / (1 + at)
        if not compiled:
            model(torch.ones(2, 6)).square().mean().backward()
        step()
    optimizer.state_dict()
    return int(counters["frames"]["total"])


FULL_GRAPH = """
import torch
from torch import nn
from eigengraft import Optimizer

weight = nn.Parameter(torch.ones(2, 2))
optimizer = Optimizer([("w", weight)], "adamw")
weight.grad = torch.ones(2, 2)
try:
    torch.compile(lambda: optimizer.step(), backend="eager", fullgraph=True)()
except torch._dynamo.exc.Unsupported:
    assert torch.equal(weight, torch.ones(2, 2))
else:
    raise SystemExit("the compiler took a step into a graph")
"""


@pytest.mark.slow
class TestCompiler:
    """Steps are kept from torch.compile, which traces every function of the package otherwise, for minutes."""

    @pytest.mark.parametrize("recipe", ["adamw", "soap_fitted", {"base": "adamw", "averaging": {"kind": "ema"}}])
    def test_a_compiled_step_is_not_traced(self, recipe: Any) -> None:
        make = partial(compose, recipe)
        assert min(frames(make, compiled=False) for _ in range(2)) <= 12  # the first in a process traces some of torch

    def test_a_compiled_training_function_traces_the_model_alone(self) -> None:
        assert frames(partial(compose, "soap_fitted"), compiled=True) <= 40

    def test_a_full_graph_with_a_step_is_refused_by_the_compiler(self, tmp_path: Path) -> None:
        """In a process of its own: after such a failure, Python's frames keep tensors longer, as budgets measure."""
        done = run("-c", FULL_GRAPH, folder=tmp_path)
        assert done.returncode == 0, done.stderr
