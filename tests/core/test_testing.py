"""Each law refuses a component that breaks it, and the error says who, what and which law.

Checked mode says the same in a real run.
"""

import copy
from collections.abc import Mapping
from fractions import Fraction
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from eigengraft import ContractError, Optimizer, Slot, Stage, State, StepContext, Traits, compose
from eigengraft.experiments.tasks import Digits
from eigengraft.experiments.tasks.base import Metrics
from eigengraft.preconditioners import (
    BasisSolver,
    Cadence,
    Eigh,
    EighBasis,
    Every,
    PolarSolver,
    Root,
    RootSolver,
)
from eigengraft.preconditioners.roots.base import Basis
from eigengraft.quantization import Int8, Quantizer
from eigengraft.slots import Encoded, Uniform
from eigengraft.testing import LawError, check_quantizer, check_solver, check_stage
from eigengraft.testing.task_laws import TASK_LAWS, TaskCase

from ..trajectories import normal
from .outsider.adopt import Adopt

BLOCKS = ((3, 2),)
MEMORY: list[int] = []


class Broken(Stage):
    """RMSprop with a fault."""

    kind: Literal["broken_for_test"] = "broken_for_test"
    fault: str = "none"
    late: bool = False

    def slots(self, block: tuple[int, ...]) -> Mapping[str, Slot]:
        spare = {"spare": Slot(block)} if self.fault in ("idle slot", "a slot that is only read") else {}
        return {"v": Slot(block, role="second_moment"), "root": Slot(block, role="root"), **spare}

    def cadence(self) -> Cadence:
        return Every(steps=2, stagger="none")

    def traits(self, block: tuple[int, ...]) -> Traits:
        return Traits(lagged=self.late)

    def observe(self, state: State, gradient: Tensor, context: StepContext) -> None:
        v = state["v"]
        if self.fault == "writes to the gradient as it observes":
            gradient.mul_(2)
        v.mul_(0.9).addcmul_(gradient, gradient, value=0.1)
        if self.fault != "no write-back":
            state["v"] = v
        if self.fault == "changed after the write-back":
            v.mul_(2)

    def refresh(self, state: State, gradient: Tensor, context: StepContext) -> None:
        root = state["v"].sqrt()
        if self.fault == "state that is not finite":
            root = root.log()
        if self.fault == "a slot of another shape":
            root = root.mean(-1)
        if self.fault == "a slot of another dtype":
            root = root.half()
        if self.fault == "a number in a slot":
            root = 1.0  # type: ignore[assignment]
        state["root"] = root

    def measures(self, state: State, context: StepContext) -> Mapping[str, Tensor]:
        sizes = state["v"].flatten(1).mean(1)
        told = {"a measure of the stack": sizes / sizes.sum(), "a measure without rows": sizes.sum()}
        return {"size": told.get(self.fault, sizes)}

    def apply(self, state: State, gradient: Tensor, direction: Tensor, context: StepContext) -> Tensor:
        found = APPLY.get(self.fault, sound)
        return found(state, gradient, direction, context)  # type: ignore[no-any-return]


def sound(state: State, gradient: Tensor, direction: Tensor, context: StepContext) -> Tensor:
    return direction / (state["root"] + 1e-3)


def remembers(state: State, gradient: Tensor, direction: Tensor, context: StepContext) -> Tensor:
    MEMORY.append(1)
    return sound(state, gradient, direction, context) * len(MEMORY)


def over_the_stack(state: State, gradient: Tensor, direction: Tensor, context: StepContext) -> Tensor:
    return sound(state, gradient, direction, context) - direction.mean(0)


APPLY: dict[str, Any] = {
    "undeclared": lambda s, g, d, c: d + s["x"],
    "undeclared write": lambda s, g, d, c: s.__setitem__("x", d),
    "writes to the gradient": lambda s, g, d, c: g.mul_(2) + 0 * s["root"],
    "writes to the direction": lambda s, g, d, c: d.add_(0) + 0 * s["root"],
    "no return": lambda s, g, d, c: None,
    "a float": lambda s, g, d, c: float(d.sum()),
    "a number for each stack": lambda s, g, d, c: d.sum() + s["root"].sum(),
    "another dtype": lambda s, g, d, c: sound(s, g, d, c).half(),
    "a direction that is not finite": lambda s, g, d, c: d / (s["root"] - s["root"]),
    "a slot that is only read": lambda s, g, d, c: sound(s, g, d, c) + s["spare"],
    "an exception": lambda s, g, d, c: torch.bmm(d, d),
    "an unknown signal": lambda s, g, d, c: d * c.signal("curvature"),
    "zero over zero": lambda s, g, d, c: torch.where(d == 0, d / d, sound(s, g, d, c)),
    "not blind to scale": sound,
    "memory of its own": remembers,
    "over the stack": over_the_stack,
    "a value": lambda s, g, d, c: sound(s, g, d, c) * (2.0 if bool(d.isfinite().all()) else 1.0),
    "an upload": lambda s, g, d, c: sound(s, g, d, c) * torch.tensor(2.0, dtype=d.dtype, device=d.device),
    "a table of the host": lambda s, g, d, c: sound(s, g, d, c) * d.new_tensor([1.0, 2.0]),
    "seeds of the host": lambda s, g, d, c: d * (torch.from_numpy(c.seeds).to(d.device) != 0)[:, None, None],
    "numbers of numpy": lambda s, g, d, c: d / float(np.sqrt(d.cpu().numpy().size)),
    "a mask as index": lambda s, g, d, c: sound(s, g, d, c).index_put((d > 1e9,), d.new_zeros(())),
    "the largest entry": lambda s, g, d, c: d / d.abs().max().item() + 0 * s["root"] if d.any() else d,
    "a tensor of the host": lambda s, g, d, c: sound(s, g, d, c) + torch.zeros(3, 2, dtype=d.dtype, device="cpu"),
}
CONTRACT = {
    "undeclared": r"update\.broken_for_test: slot 'x' is not declared in slots\(\) \(declared: v, root\)",
    "undeclared write": r"slot 'x' is not declared in slots\(\) \(declared: v, root\)",
    "no write-back": r"observe\(\) at step 1 changed slot 'v' in place .*`state\[\"v\"\] = ",
    "changed after the write-back": r"observe\(\) at step 1 changed slot 'v' in place .* after the last change",
    "writes to the gradient": r"apply\(\) at step 1 wrote to its input `gradient`.*`p\.grad`.*gradient\.mul_",
    "writes to the gradient as it observes": r"observe\(\) at step 1 wrote to its input `gradient`",
    "writes to the direction": r"apply\(\) at step 1 wrote to its input `(gradient|direction)`",
    "no return": r"a direction of shape \[N, 3, 2\], got nothing; is a `return` missing",
    "a float": r"a direction of shape \[N, 3, 2\], got float",
    "a number for each stack": r"apply\(\) at step 1 .*direction of shape \[N, 3, 2\] with N = \d, got \[\]",
    "another dtype": r"a direction in torch\.float32 on cpu, got torch\.float16",
    "a slot of another shape": r"slot 'root' needs a torch\.float32 tensor of shape \[N, 3, 2\] .*, got \[\d, 3\]",
    "a slot of another dtype": r"slot 'root' needs a torch\.float32 tensor .*, got torch\.float16",
    "a number in a slot": r"slot 'root' needs a torch\.float32 tensor .*, got float",
    "a direction that is not finite": r"apply\(\) at step 1 returned a direction .*not finite.* -?inf in block 0",
    "an unknown signal": r"apply\(\) at step 1: signal 'curvature': .*in its traits",
}
"""What a stage may do wrong by itself, and what it is told, in a law and in a run."""
DEVICE_LAW = "a steady step stays on the device"
LAWS = {
    "idle slot": (r"every slot of slots\(\) .* not used: update\.broken_for_test/spare", "the contract is kept"),
    "a slot that is only read": (
        r"`state\[\"spare\"\] = \.\.\.` is required for update\.broken_for_test/spare, .* in 12 steps",
        "the contract is kept",
    ),
    "an exception": (r"no exception is required, got RuntimeError.*apply\(\) at step 1", "the contract is kept"),
    "zero over zero": (r"a zero direction for a zero gradient is required, got nan", "a zero gradient moves nothing"),
    "not blind to scale": (r"scales by the power 0 .* got 0\.\d+", "scaling all gradients scales the direction"),
    "memory of its own": (r"from a copy of the state are required", "a copy of the state resumes exactly"),
    "a measure of the stack": (
        r"measures\(\) 'size': 1\.0 is required, got 0\.\d+ in a stack",
        "measures are of each block alone",
    ),
    "a measure without rows": (
        r"measures\(\) 'size': a tensor of shape \[N\] with N = 3 is required, got \[\]",
        "measures are of each block alone",
    ),
    "over the stack": (r"block 0 alone as in a stack of 3 .*stack axis 0", "a stack is its blocks"),
    "a value": (r"test_testing\.py:\d+ _local_scalar_dense", DEVICE_LAW),
    "an upload": (r"test_testing\.py:\d+ _to_copy", DEVICE_LAW),
    "a table of the host": (r"test_testing\.py:\d+ _to_copy", DEVICE_LAW),
    "seeds of the host": (r"test_testing\.py:\d+ _to_copy", DEVICE_LAW),
    "numbers of numpy": (r"test_testing\.py:\d+ _to_copy", DEVICE_LAW),
    "a mask as index": (r"test_testing\.py:\d+ index_put by a mask", DEVICE_LAW),
    "the largest entry": (r"test_testing\.py:\d+ _local_scalar_dense", DEVICE_LAW),
    "a tensor of the host": (r"expected all tensors to be on the same device, got cuda:0 and cpu", DEVICE_LAW),
}


@pytest.mark.parametrize("fault", CONTRACT)
def test_a_stage_that_breaks_its_contract_is_refused_by_name(fault: str) -> None:
    with pytest.raises(LawError, match=CONTRACT[fault]) as refused:
        check_stage(Broken(fault=fault), BLOCKS)
    assert "update.broken_for_test" in str(refused.value)
    assert str(refused.value).endswith("(on blocks of shape (3, 2))  [law: the contract is kept]")


@pytest.mark.parametrize("fault", LAWS)
def test_a_stage_that_breaks_a_law_is_told_which(fault: str) -> None:
    message, law = LAWS[fault]
    with pytest.raises(LawError) as refused:
        check_stage(Broken(fault=fault), BLOCKS, degree=0, rotates=fault == "not blind to scale")
    told = [line for line in str(refused.value).splitlines() if line.endswith(f"[law: {law}]")]
    assert len(told) == 1 and told[0].startswith("update.broken_for_test: ")
    assert pytest.raises(AssertionError, match=message).matches(AssertionError(told[0]))


def test_all_laws_that_are_broken_are_named_at_once() -> None:
    with pytest.raises(LawError, match=r"^update\.broken_for_test: 2 laws are broken\n") as refused:
        check_stage(Broken(fault="not blind to scale"), ((6, 5),), degree=0, rotates=True)
    assert [line.partition("[law: ")[2] for line in str(refused.value).splitlines()[1:]] == [
        "scaling all gradients scales the direction]",
        "rotating all gradients rotates the direction]",
    ]


@pytest.mark.parametrize("late", [False, True])
def test_a_sound_stage_gets_a_report_of_laws_held_and_not_asked(late: bool) -> None:
    report = check_stage(Broken(late=late), BLOCKS)
    assert report.who == "update.broken_for_test" and "a stack is its blocks" in report.held
    assert report.skipped == {
        "scaling all gradients scales the direction": "no degree is given",
        "rotating all gradients rotates the direction": "rotates=False",
        "entries are updated alone": "it does not say that it is entry-wise",
    }
    assert str(report).startswith("update.broken_for_test: 16 laws hold\n  the contract is kept\n")


def test_a_method_from_a_paper_is_one_file_that_keeps_all_laws() -> None:
    assert len(check_stage(Adopt(eps=1e-30), degree=0).held) == 17


def test_what_is_not_an_instance_is_refused() -> None:
    with pytest.raises(TypeError, match="check_stage: an instance of Stage is required, got the class Broken"):
        check_stage(Broken)  # type: ignore[arg-type]


# Checked mode.


def run(fault: str, checked: bool, steps: int = 2) -> Optimizer:
    """Two parameters under a broken stage inside another one."""
    parameters = [nn.Parameter(normal(3, 2, seed=i).float()) for i in range(2)]
    update = [{"kind": "chain", "stages": [{"kind": "broken_for_test", "fault": fault}]}]
    optimizer = compose({"update": update, "routes": []}, parameters, lr=0.1, checked=checked)
    for step in range(steps):
        for i, parameter in enumerate(parameters):
            parameter.grad = normal(3, 2, seed=10 * step + i).float()
        optimizer.step()
    return optimizer


@pytest.mark.parametrize("fault", CONTRACT)
def test_a_run_in_checked_mode_raises_what_the_law_says(fault: str) -> None:
    message = CONTRACT[fault].replace(r"update\.broken", r"update\.chain\.stages\.broken")
    with pytest.raises(ContractError, match=message):
        run(fault, checked=True)


@pytest.mark.parametrize("fault", ["no write-back", "writes to the gradient"])
def test_a_run_without_it_checks_nothing(fault: str) -> None:
    assert all(stack_state.checks is None for stack_state in run(fault, checked=False).stack_states())


def test_an_exception_is_told_where_it_happened() -> None:
    with pytest.raises(RuntimeError) as raised:
        run("an exception", checked=True)
    notes = raised.value.__notes__
    assert notes[0] == "in update.chain.stages.broken_for_test: apply() at step 1, on a stack of shape [2, 3, 2]"


def test_what_comes_in_not_finite_is_nobodys_fault() -> None:
    """The gradient of one block of two is nan and masked: only the other one must stay finite."""
    parameters = [nn.Parameter(normal(3, 2, seed=i).float()) for i in range(2)]
    recipe = {"update": ["momentum", "rms"], "routes": [], "failure": {"detect": "device"}}
    optimizer = Optimizer(parameters, recipe, lr=0.1, checked=True)
    before = [parameter.detach().clone() for parameter in parameters]
    parameters[0].grad, parameters[1].grad = torch.full((3, 2), torch.nan), torch.ones(3, 2)
    optimizer.step()
    assert torch.equal(parameters[0], before[0]) and not torch.equal(parameters[1], before[1])


@pytest.mark.parametrize("recipe", ["soap_fitted", "shampoo_4bit", "shampoo_kl", "muon", "psgd_kron", "cosmos", "sirf"])
def test_checked_runs_are_the_same_runs(recipe: str) -> None:
    """Bit for bit, also from a copy, which stays checked."""
    ends = []
    for checked in (False, True):
        model = nn.Linear(12, 9)
        with torch.no_grad():
            model.weight.copy_(normal(9, 12, seed=1))
            model.bias.copy_(normal(9, seed=2))
        optimizer = compose(recipe, model, lr=0.1, checked=checked)
        for step in range(6):
            for i, parameter in enumerate(model.parameters()):
                parameter.grad = normal(*parameter.shape, seed=10 * step + i).float()
            optimizer.step()
        twin = copy.deepcopy(optimizer)
        assert all((stack_state.checks is not None) == checked for stack_state in twin.stack_states())
        ends.append([parameter.detach() for parameter in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


# Solvers.


class BrokenRoot(RootSolver):
    """The inverse root by eigenvalues, with a fault."""

    kind: Literal["broken_for_test"] = "broken_for_test"
    fault: str = "none"

    def root(self, a: Tensor, exponent: Fraction) -> Root:
        if self.fault == "stacked":
            a = a / a.mean()
        if self.fault == "writes":
            a.mul_(1.0)
            a[..., 0, 0] += 1
        root = Eigh(eps=0.0).root(a, exponent if self.fault != "another power" else exponent * 2)
        if self.fault == "dtype":
            return root._replace(value=root.value.float())
        if self.fault == "ok":
            return root._replace(ok=torch.ones_like(root.ok), value=root.value.nan_to_num())
        if self.fault == "report":
            return root._replace(iterations=root.iterations.float())
        return root


class BrokenBasis(BasisSolver):
    """Eigenvectors, with a fault."""

    kind: Literal["broken_for_test"] = "broken_for_test"
    fault: str = "none"

    def basis(self, a: Tensor, q: Tensor, first: bool) -> Basis:
        basis = EighBasis().basis(a, q, first)
        if self.fault == "lengths":
            return basis._replace(q=basis.q * 2)
        return basis._replace(q=torch.where(basis.ok[:, None, None], torch.eye(a.shape[-1], dtype=a.dtype), basis.q))


class BrokenPolar(PolarSolver):
    """A polar factor, with a fault."""

    kind: Literal["broken_for_test"] = "broken_for_test"
    fault: str = "none"

    def polar(self, x: Tensor) -> Tensor:
        if self.fault == "no guard":
            return x / torch.linalg.matrix_norm(x, ord=2)[:, None, None]
        if self.fault == "scale":
            return x
        u, _, v = torch.linalg.svd(x.nan_to_num(), full_matrices=False)
        return u[..., :1] @ v[:, :1]


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("stacked", r"matrix 0 of 4 as alone, .* \[law: a stack is solved as its matrices\]"),
        ("writes", r"untouched matrix is required, got a changed one"),
        ("dtype", r"\(dtype, device, shape\) \(torch\.float64, .*got \(torch\.float32"),
        ("ok", r"ok = \[True, False, True\] for a nan in matrix 1 is required, got \[True, True, True\]"),
        (
            "another power",
            r"A\^-e A\^e = I up to 0\.01 for e = 1/4 is required, got .* \[law: a root undoes its matrix\]",
        ),
        ("report", r"iterations: torch\.int32 of shape \[4\] is required, got torch\.float32"),
    ],
)
def test_root_solvers_that_break_a_law_are_told_which(fault: str, message: str) -> None:
    with pytest.raises(LawError, match=message) as refused:
        check_solver(BrokenRoot(fault=fault), degree=-1, rotates=True)
    assert str(refused.value).startswith("root_solver.broken_for_test: ")


@pytest.mark.parametrize(
    ("solver", "message"),
    [
        (BrokenBasis(fault="lengths"), r"^basis_solver\.(.*\n)*.* Q\^T Q = I within .* \[law: bases are orthonormal"),
        (
            BrokenBasis(),
            r"a diagonal Q\^T A Q up to 1e-9 is required, got .* \[law: bases converge to the eigenvectors\]",
        ),
        (BrokenPolar(fault="scale"), r"^polar_solver\.(.*\n)*.* P\(2\^30 X\) = P\(X\) for matrices \(6, 4\)"),
        (BrokenPolar(), r"a cosine with U V\^T of 0\.9 for matrices \(\d, \d\) is required, got 0\.\d+"),
        (BrokenPolar(fault="no guard"), r"finite numbers for a matrix that is zero are required"),
    ],
    ids=lambda value: getattr(value, "fault", None),
)
def test_basis_and_polar_solvers_that_break_a_law_are_told_which(solver: Any, message: str) -> None:
    with pytest.raises(LawError, match=message):
        check_solver(solver)


def test_sound_solvers_get_a_report() -> None:
    assert len(check_solver(BrokenRoot(), degree=-1, rotates=True).held) == 9


# Quantizers.


class BrokenQuantizer(Quantizer):
    """int8, with a fault."""

    kind: Literal["broken_for_test"] = "broken_for_test"
    fault: str = "none"

    def unsupported(self, slot: Slot) -> str | None:
        return "no slot is good enough" if self.fault == "picky" else None

    def encode(self, x: Tensor, before: Encoded | None = None, uniform: Uniform | None = None) -> Encoded:
        if self.fault == "writes":
            x.mul_(0)
        if self.fault == "stacked":
            x = x - x.mean(0)
        if self.fault == "random":
            x = x + torch.rand_like(x)
        if self.fault == "hides":
            x = x.nan_to_num(1.0, 1.0, 1.0)
        parts = dict(Int8(min_elements=1, block_size=8).encode(x))
        if self.fault == "loose":
            parts["largest"] = x.abs().max()
        return parts

    def decode(self, parts: Encoded, slot: Slot, dtype: torch.dtype) -> Tensor:
        codes = {name: part for name, part in parts.items() if name != "largest"}
        y = Int8(min_elements=1, block_size=8).decode(codes, slot, dtype)
        if self.fault == "shift":
            y = y + 1e-3
        if self.fault == "loses":
            y = y * 0.1
        return y.half() if self.fault == "dtype" else y


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("picky", r"a quantizer that takes a statistic, .* \(the last one: no slot is good enough\)"),
        ("writes", r"untouched numbers are required of encode\(\), got changed ones"),
        ("stacked", r"block 0 encoded alone as in its stack .* \[law: rows are coded one by one\]"),
        ("random", r"the same parts for the same numbers are required, got others"),
        ("hides", r"a block with nan that comes back so, or as it was, is required"),
        ("loose", r"part 'largest': a plain tensor of shape \[4, \.\.\.\] is required, got Tensor of shape \[\]"),
        ("shift", r"zeros for a block of zeros are required, got up to 0\.001"),
        ("loses", r"a relative error of at most 0\.5 is required, got 0\.9"),
        ("dtype", r"\(dtype, shape\) \(torch\.float32, .* required, got \(torch\.float16"),
    ],
)
def test_quantizers_that_break_a_law_are_told_which(fault: str, message: str) -> None:
    with pytest.raises(LawError, match=message) as refused:
        check_quantizer(BrokenQuantizer(fault=fault))
    assert str(refused.value).startswith("quantizer.broken_for_test: ")


def test_a_sound_quantizer_gets_a_report() -> None:
    assert len(check_quantizer(BrokenQuantizer()).held) == 9


# Tasks.


TASK_FAULTS: dict[str, tuple[Any, str, str]] = {
    "new_model": (
        lambda task, seed: task.build(),
        r"untouched global generator is required of new_model\(\)",
        "initial weights depend on the seed alone",
    ),
    "loss": (
        lambda task, outputs, targets: outputs.sum((0, 1), keepdim=True),
        r"a finite loss of shape \[\] is required, got .* of shape \[1, 1\]",
        "the loss is a number with gradients",
    ),
    "evaluate": (
        lambda task, model, data, device: Metrics(1.0, 0.5),
        r"val_loss .*, the mean over all targets, is required, got 1",
        "metrics are means over all validation targets",
    ),
    "load": (
        lambda task: 1 / 0,
        "no exception is required, got ZeroDivisionError: division by zero, raised at test_testing.py:",
        "the data have a fingerprint",
    ),
}


@pytest.mark.parametrize("method", TASK_FAULTS)
def test_tasks_that_break_a_law_are_told_which(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small task of which one method is another one."""
    function, message, name = TASK_FAULTS[method]
    (law,) = [law for law in TASK_LAWS if law.name == name]
    case = TaskCase(Digits(width=4, batch_size=16))
    law.require(case)
    monkeypatch.setattr(Digits, method, function)
    with pytest.raises(LawError, match=rf"^task\.digits: .*{message}.* \[law: {name}\]$"):
        law.require(case)
