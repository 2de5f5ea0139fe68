"""Each law refuses a component that breaks it, and the error says who, what and which law.

Checked mode says the same in a real run.
"""

import copy
import traceback
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
    PSGD,
    BasisSolver,
    Cadence,
    Eigh,
    EighBasis,
    Every,
    Momentum,
    PolarSolver,
    Root,
    RootSolver,
)
from eigengraft.preconditioners.roots.base import Basis
from eigengraft.quantization import Float32, Int8, Quantizer
from eigengraft.slots import Encoded, Uniform
from eigengraft.testing import LawError, check_quantizer, check_solver, check_stage, check_task
from eigengraft.testing.laws import Case, in_parentheses, require_close
from eigengraft.testing.stage_case import StageCase
from eigengraft.testing.stage_laws import device_notes
from eigengraft.testing.task_laws import TASK_LAWS

from ..refusals import check_said, lacking, refused
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
        frame: Any = "vector" if self.fault == "squares as a vector" else "none"
        return {"v": Slot(block, role="second_moment", frame=frame), "root": Slot(block, role="root"), **spare}

    def cadence(self) -> Cadence:
        return Every(steps=200 if self.fault == "a rare refresh that raises for nan" else 2, stagger="none")

    def traits(self, block: tuple[int, ...]) -> Traits:
        return Traits(lagged=self.late, entrywise=self.fault == "a mean that says it is entry-wise")

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
        if self.fault == "a rare refresh that raises for nan":
            torch.linalg.svd(gradient)
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
    "steps that are not shaped": lambda s, g, d, c: d / (1 - 0.9**c.step),
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
    "a loop over blocks": lambda s, g, d, c: torch.stack([x.neg() for x in sound(s, g, d, c)]),
    "a mean that says it is entry-wise": lambda s, g, d, c: sound(s, g, d, c) - d.flatten(1).mean(1)[:, None, None],
    "a tensor of the host": lambda s, g, d, c: sound(s, g, d, c) + torch.zeros(3, 2, dtype=d.dtype, device="cpu"),
}
CONTRACT = {
    "undeclared": ("x", "slots()"),
    "undeclared write": ("x", "slots()"),
    "no write-back": ("observe()", 1, "v"),
    "changed after the write-back": ("observe()", 1, "v"),
    "writes to the gradient": ("apply()", 1, "p.grad", "gradient.mul_"),
    "writes to the gradient as it observes": ("observe()", 1),
    "writes to the direction": ("apply()", 1),
    "no return": ("[N, 3, 2]", "return"),
    "a float": ("[N, 3, 2]", "float"),
    "a number for each stack": ("apply()", 1, "[N, 3, 2]", "[]"),
    "another dtype": ("torch.float32", "torch.float16"),
    "a slot of another shape": ("root", "torch.float32", "[N, 3, 2]", 3),
    "a slot of another dtype": ("root", "torch.float32", "torch.float16"),
    "a number in a slot": ("root", "torch.float32", "float"),
    "a direction that is not finite": ("apply()", 1, "inf", 0),
    "an unknown signal": ("apply()", 1, "curvature"),
}
"""What a stage may do wrong by itself, and what it is told, in a law and in a run."""
DEVICE_LAW = "a steady step stays on the device"
LAWS = {
    "idle slot": (("slots()", "update.broken_for_test/spare"), "the contract is kept"),
    "a slot that is only read": (
        ('state["spare"] = ...', "update.broken_for_test/spare", 12),
        "the contract is kept",
    ),
    "an exception": (("RuntimeError", "apply()", 1), "the contract is kept"),
    "steps that are not shaped": (("context.per_block(f, like)",), "the contract is kept"),
    "zero over zero": (("nan",), "a zero gradient moves nothing"),
    "not blind to scale": (("c^(0)",), "scaling all gradients scales the direction"),
    "memory of its own": (("copy",), "a copy of the state resumes exactly"),
    "a measure of the stack": (
        ("measures()", "size", 1.0),
        "measures are of each block alone",
    ),
    "a measure without rows": (
        ("measures()", "size", "[N]", 3, "[]"),
        "measures are of each block alone",
    ),
    "over the stack": (("block 0", 3), "a stack is its blocks"),
    "a mean that says it is entry-wise": ((1e-10,), "entries are updated alone"),
    "a rare refresh that raises for nan": (("refresh", "nan"), "masked rows change nothing"),
    "a value": (("test_testing.py", "_local_scalar_dense"), DEVICE_LAW),
    "an upload": (("test_testing.py", "_to_copy"), DEVICE_LAW),
    "a table of the host": (("test_testing.py", "_to_copy"), DEVICE_LAW),
    "seeds of the host": (("test_testing.py", "_to_copy"), DEVICE_LAW),
    "numbers of numpy": (("test_testing.py", "_to_copy"), DEVICE_LAW),
    "a mask as index": (("test_testing.py", "index_put"), DEVICE_LAW),
    "the largest entry": (("test_testing.py", "_local_scalar_dense"), DEVICE_LAW),
    "a tensor of the host": (("cuda", 0), DEVICE_LAW),
    "a loop over blocks": (("test_testing.py", "neg", 6, 3), DEVICE_LAW),
    "squares as a vector": (("/v", "vector", "-G", "square"), "slots follow their frame when signs change"),
}


@pytest.mark.parametrize("fault", CONTRACT)
def test_a_stage_that_breaks_its_contract_is_refused_by_name(fault: str) -> None:
    with refused(LawError, *CONTRACT[fault]) as caught:
        check_stage(Broken(fault=fault), BLOCKS)
    assert "update.broken_for_test" in str(caught.value)
    assert str(caught.value).endswith("(on blocks of shape (3, 2))  [broken law: the contract is kept]")


@pytest.mark.parametrize("fault", LAWS)
def test_a_stage_that_breaks_a_law_is_told_which(fault: str) -> None:
    says, law = LAWS[fault]
    with pytest.raises(LawError) as caught:
        check_stage(Broken(fault=fault), BLOCKS, degree=0, rotates=fault == "not blind to scale")
    lines = [line for line in str(caught.value).splitlines() if line.endswith(f"[broken law: {law}]")]
    assert len(lines) == 1 and lines[0].startswith("update.broken_for_test: ")
    check_said(lines[0], *says, kind="LawError")
    assert fault != "a value" or " test_testing.py:" in lines[0]  # the file without folders


@pytest.mark.parametrize(("wrong", "got"), [(0.5, "0.5"), (torch.nan, "nan")])
def test_a_broken_law_names_the_first_step_that_differs(wrong: float, got: str) -> None:
    theirs = torch.full((4, 3), 2.0)
    ours = theirs.clone()
    require_close(ours, theirs, 0.1, "A and B", by_step=True)
    ours[2:, 1] += 2 * wrong
    with refused(LawError, "A and B", 0.1, got, "step 3", 4, "here"):
        require_close(ours, theirs, 0.1, "A and B", lambda: in_parentheses("here"), by_step=True)


def test_all_laws_that_are_broken_are_named_at_once() -> None:
    with refused(LawError, "update.broken_for_test", 2) as caught:
        check_stage(Broken(fault="not blind to scale"), ((6, 5),), degree=0, rotates=True)
    assert [line.partition("[broken law: ")[2] for line in str(caught.value).splitlines()[1:]] == [
        "scaling all gradients scales the direction]",
        "rotating all gradients rotates the direction]",
    ]


@pytest.mark.parametrize("late", [False, True])
def test_a_sound_stage_gets_a_report_of_laws_held_and_not_asked(late: bool) -> None:
    report = check_stage(Broken(late=late), BLOCKS)
    assert report.who == "update.broken_for_test" and "a stack is its blocks" in report.held
    assert [*report.skipped] == [
        "scaling all gradients scales the direction",
        "rotating all gradients rotates the direction",
        "entries are updated alone",
        "a declared moment is adams",
        "slots follow their frame when signs change",
    ]
    assert "Traits(entrywise=True)" in report.skipped["entries are updated alone"]
    assert str(report).startswith("update.broken_for_test: 16 laws hold\n  the contract is kept\n")


def test_a_method_from_a_paper_is_one_file_that_keeps_all_laws() -> None:
    assert len(check_stage(Adopt(eps=1e-30), degree=0).held) == 18


def test_the_report_of_a_stage_has_the_device_work_of_a_step() -> None:
    """Momentum updates m from m and g, and makes a direction of m: 2 times the bytes each, and 1 is allocated."""
    (note,) = check_stage(Momentum()).notes
    check_said(note, 12, 2, "(6, 5)", 4.0, 1.0, kind="note")
    assert device_notes(StageCase(PSGD())) == ()  # a refresh in every step


def test_check_stage_refuses_a_class() -> None:
    with refused(TypeError, "check_stage", "Stage", "Broken"):
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
    with refused(ContractError, "update.chain.stages.broken_for_test", *CONTRACT[fault]):
        run(fault, checked=True)


@pytest.mark.parametrize("fault", ["no write-back", "writes to the gradient"])
def test_a_run_without_it_checks_nothing(fault: str) -> None:
    assert all(stack_state.checks is None for stack_state in run(fault, checked=False).stack_states())


def test_an_exception_is_told_where_it_happened() -> None:
    with pytest.raises(RuntimeError) as raised:
        run("an exception", checked=True)
    notes = raised.value.__notes__
    assert notes[0] == "in update.chain.stages.broken_for_test: apply() at step 1, on a stack of shape [2, 3, 2]"


@pytest.mark.parametrize("checked", [False, True])
def test_an_exception_of_a_stage_names_its_path_its_class_and_its_line(checked: bool) -> None:
    """The line is that of the code outside of the library, also where the stage is inside another one."""
    with pytest.raises(RuntimeError) as raised:
        run("an exception", checked)
    (note,) = [note for note in raised.value.__notes__ if "raised" in note]
    frames = [frame for frame in traceback.extract_tb(raised.value.__traceback__) if frame.filename == __file__]
    assert lacking(note, "update.chain.stages.broken_for_test", "Broken", f"({__file__}:{frames[-1].lineno})") == []


def test_checked_mode_accepts_gradients_that_are_not_finite() -> None:
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
    ("fault", "says"),
    [
        ("stacked", (0, 4)),
        ("writes", ("matrix",)),
        ("dtype", ("torch.float64", "torch.float32")),
        ("ok", ("[True, False, True]", "nan", 1, "[True, True, True]")),
        (
            "another power",
            (0.01, "1/4", "a root undoes its matrix"),
        ),
        ("report", ("iterations", "torch.int32", "[4]", "torch.float32")),
    ],
)
def test_root_solvers_that_break_a_law_are_told_which(fault: str, says: tuple[object, ...]) -> None:
    with refused(LawError, *says) as caught:
        check_solver(BrokenRoot(fault=fault), degree=-1, rotates=True)
    assert str(caught.value).startswith("root_solver.broken_for_test: ")


@pytest.mark.parametrize(
    ("solver", "says"),
    [
        (BrokenBasis(fault="lengths"), ("basis_solver.broken_for_test", "bases are orthonormal")),
        (
            BrokenBasis(),
            ("1e-9", "bases converge to the eigenvectors"),
        ),
        (BrokenPolar(fault="scale"), ("polar_solver.broken_for_test", "P(2^30 X)", "P(X)", "(6, 4)")),
        (BrokenPolar(), ("U V^T", 0.9)),
        (BrokenPolar(fault="no guard"), ("zero",)),
    ],
    ids=lambda value: getattr(value, "fault", None),
)
def test_basis_and_polar_solvers_that_break_a_law_are_told_which(solver: Any, says: tuple[object, ...]) -> None:
    with refused(LawError, *says):
        check_solver(solver)


def test_sound_solvers_get_a_report() -> None:
    assert len(check_solver(BrokenRoot(), degree=-1, rotates=True).held) == 12


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
        if self.fault == "biased" and uniform is not None:
            x = x * (1 + 0.02 * uniform(x, "noise"))
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
        if self.fault == "scale":
            y = y * 1.27
        return y.half() if self.fault == "dtype" else y


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("picky", ("quantizer",)),
        ("writes", ("encode()", "x", "mul_")),
        ("stacked", (0,)),
        ("random", ("torch's global generator", "test_testing.py", "encode()", "uniform")),
        ("hides", ("nan", "encode", "amax")),
        ("loose", ("largest", "[4, ...]", "Tensor", "[]")),
        ("shift", ("up", 0.001)),
        ("loses", (0.5, 0.9)),
        ("dtype", ("torch.float32", "torch.float16")),
        ("scale", ("decoded again", 0.34, "decode()")),
        ("biased", ("mean of 32",)),
    ],
)
def test_quantizers_that_break_a_law_are_told_which(fault: str, says: tuple[object, ...]) -> None:
    with refused(LawError, *says) as caught:
        check_quantizer(BrokenQuantizer(fault=fault))
    assert str(caught.value).startswith("quantizer.broken_for_test: ")


def test_a_stage_that_asks_a_shape_for_its_shape_is_told_so(registry: None) -> None:
    class Shaped(Stage):
        """d"""

        kind: Literal["shaped_for_test"] = "shaped_for_test"

        def slots(self, block: Any) -> Any:
            return {"v": Slot(block.shape)}

        def apply(self, state: State, gradient: Tensor, direction: Tensor, context: StepContext) -> Tensor:
            return direction

    with refused(LawError, "update.shaped_for_test", "'shape'", "Slot(block)"):
        check_stage(Shaped())


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("slots as a list", ("update.mistyped_for_test", "slots()", "{name: Slot}")),
        ("a shape as a slot", ("update.mistyped_for_test", "'m'", "Slot(block)", "(6, 5)")),
        ("traits as a mapping", ("traits()", "Traits(...)", "entrywise")),
        ("a slot of a wrong shape", ("update.mistyped_for_test/m [3, 3]", "[3, 6, 5]")),
    ],
)
def test_a_stage_whose_hooks_return_another_type_is_told_so(
    fault: str, says: tuple[object, ...], registry: None
) -> None:
    class Mistyped(Stage):
        """d"""

        kind: Literal["mistyped_for_test"] = "mistyped_for_test"

        def slots(self, block: Any) -> Any:
            found = {"slots as a list": [Slot(block)], "a shape as a slot": {"m": block}}
            return found.get(fault, {"m": Slot((3,))})

        def traits(self, block: Any) -> Any:
            return {"entrywise": True} if fault == "traits as a mapping" else Traits()

        def apply(self, state: State, gradient: Tensor, direction: Tensor, context: StepContext) -> Tensor:
            return direction * state["m"]

    with refused(LawError, *says):
        check_stage(Mistyped())


def test_a_sound_quantizer_gets_a_report() -> None:
    report = check_quantizer(BrokenQuantizer())
    assert len(report.held) == 12 and "draws no random numbers" in str(report)
    assert "draws average out" in check_quantizer(Int8(min_elements=1, block_size=8, rounding="stochastic")).held


def test_a_report_of_a_quantizer_has_bytes_and_error(monkeypatch: pytest.MonkeyPatch) -> None:
    (note,) = check_quantizer(Int8(block_size=64), 64).notes
    assert " 1.06 bytes per number" in note  # one scale of 4 bytes for 64 codes of one byte
    monkeypatch.setattr(BrokenQuantizer, "unsupported", lambda own, slot: "large" if 64 in slot.shape else None)
    assert " of 9 x 9 takes " in check_quantizer(BrokenQuantizer()).notes[0]
    (exact,) = check_quantizer(Float32(), 64).notes
    assert " 4 bytes per number, with a relative error of 0" in exact


# Tasks.


def unseeded(task: Any) -> Any:
    with torch.random.fork_rng(devices=[]):
        return task.build()


TASK_FAULTS: dict[str, tuple[Any, str, tuple[object, ...]]] = {
    "new_model": (
        lambda task, seed: unseeded(task),
        ("seed",),
        "initial weights depend on the seed alone",
    ),
    "loss": (
        lambda task, outputs, targets: outputs.sum((0, 1), keepdim=True),
        ("[]", "[1, 1]"),
        "the loss is a number with gradients",
    ),
    "evaluate": (
        lambda task, model, data, device: Metrics(1.0, 0.5),
        ("val_loss", 1),
        "metrics are means over all validation targets",
    ),
    "load": (
        lambda task: 1 / 0,
        ("ZeroDivisionError", "test_testing.py"),
        "the data have a fingerprint",
    ),
}


@pytest.mark.parametrize("method", TASK_FAULTS)
def test_tasks_that_break_a_law_are_told_which(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small task of which one method is another one."""
    function, says, name = TASK_FAULTS[method]
    (law,) = [law for law in TASK_LAWS if law.name == name]
    case = Case[Any](Digits(width=4, batch_size=16))
    law.require(case)
    monkeypatch.setattr(Digits, method, function)
    with refused(LawError, "task.digits", *says, name):
        law.require(case)


@pytest.mark.parametrize("fault", ["a fixed seed", "seeds as it loads"])
def test_a_task_that_sets_a_seed_is_told_so(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    build, load = Digits.build, Digits.load
    if fault == "a fixed seed":
        monkeypatch.setattr(Digits, "build", lambda task: torch.manual_seed(0) and build(task))
        says: tuple[object, ...] = ("seed", "build()")
    else:
        monkeypatch.setattr(Digits, "load", lambda task: torch.manual_seed(0) and load(task))
        says = ("torch's global generator", "generator(seed, step)")
    torch.rand(3)  # so that the generator is not where the seed takes it
    with refused(LawError, "task.digits", *says):
        check_task(Digits(width=4, batch_size=16))


@pytest.mark.parametrize("source", ["torch", "numpy"])
def test_a_task_that_draws_from_a_global_generator_is_told_so(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing of what follows from it: here batches of one seed and step differ."""
    load = Digits.load

    def shuffled(task: Digits) -> Any:
        data = load(task)
        order = torch.randperm(100) if source == "torch" else torch.from_numpy(np.random.permutation(100))
        monkeypatch.setattr(data, "train", type(data.train)(*(x[order] for x in data.train)))
        return data

    monkeypatch.setattr(Digits, "load", shuffled)
    with refused(LawError, "task.digits", "generator(seed, step)") as caught:
        check_task(Digits(width=4, batch_size=16))
    assert ("torch" if source == "torch" else "NumPy") in str(caught.value) and "\n" not in str(caught.value)
