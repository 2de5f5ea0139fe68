"""Typical mistakes in components of one's own, by family: the check names the cause, in words of the family."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any, ClassVar, Literal

import numpy as np
import pytest
import torch
from torch import Tensor

from eigengraft import Signal, Slot, Stage, State, StepContext, register_signal
from eigengraft.blocking import Matrices, ModuleFacts, View, ViewChoice
from eigengraft.component import Component, families
from eigengraft.experiments.training.schedule import LearningRateSchedule
from eigengraft.numerics import finite_blocks, identity_like, symmetrized, tiny
from eigengraft.optimizers import WeightDecay
from eigengraft.optimizers.write import (
    Averaging,
    Constraint,
    ConstraintContext,
    IterateBatch,
    ParameterUpdate,
    Slots,
    Tensors,
    blend,
)
from eigengraft.preconditioners import (
    Basis,
    BasisSolver,
    CholeskyInverse,
    Contribution,
    EigenvalueBound,
    Eigh,
    Every,
    Momentum,
    PolarSolver,
    Root,
    RootSolver,
    Statistic,
)
from eigengraft.quantization import Quantizer
from eigengraft.slots import Encoded, Uniform
from eigengraft.testing import (
    LawError,
    check_averaging,
    check_constraint,
    check_eigenvalue_bound,
    check_quantizer,
    check_schedule,
    check_solver,
    check_stage,
    check_statistic,
    check_view,
    check_weight_decay,
)

from ..refusals import refused

HERE = "test_family_checks.py"


def test_a_check_names_the_check_of_another_family() -> None:
    for given, said in ((Every(), "check_cadence"), (Every, "check_cadence"), (Eigh(), "check_solver")):
        with refused(TypeError, "check_stage", "Stage", said):
            check_stage(given)  # type: ignore[arg-type]
    with refused(TypeError, "check_stage", "Momentum", "instance"):
        check_stage(Momentum)  # type: ignore[arg-type]


CALLS: list[int] = []
COUNT = itertools.count()


def rows(x: Tensor, count: int) -> Tensor:
    return x.reshape(-1, *[1] * (count - 1))


def seeded(x: Tensor) -> Tensor:
    """Numbers of a generator of one's own: they depend on the place in the stack."""
    return torch.rand(x.shape, generator=torch.Generator().manual_seed(0), dtype=x.dtype)


# Stages.

STAGE: dict[str, Callable[[Tensor, StepContext], Any]] = {
    "sound": lambda d, c: d,
    "a global draw": lambda d, c: d * torch.rand_like(d),
    "numpy draws": lambda d, c: d * float(np.random.rand()),
    "python draws": lambda d, c: d * random.random(),
    "own generator": lambda d, c: d * seeded(d),
    "mean over the stack": lambda d, c: d - d.mean(0),
    "largest entry": lambda d, c: d / (1 + d.abs().max()),
    "floor of the stack": lambda d, c: d * (d.abs() > 1e-9 * d.nan_to_num(0, 0, 0).abs().max()),
    "softmax over the stack": lambda d, c: d * d.softmax(0),
    "first block": lambda d, c: d * (1 + d[0].abs()),
    "gram of the stack": lambda d, c: (d.flatten(1) @ (d.flatten(1).T @ d.flatten(1))).reshape(d.shape),
    "a loop that counts": lambda d, c: torch.stack([x * (i + 1) for i, x in enumerate(d)]),
    "numbers of blocks": lambda d, c: d * rows(torch.arange(1, len(d) + 1, dtype=d.dtype, device=d.device), d.ndim),
    "item": lambda d, c: d * (0.5 if d.flatten(1).norm(dim=1).amax().item() < 0 else 1.0),
    "steps of the host": lambda d, c: d / rows(torch.from_numpy(c.steps).to(d), d.ndim),
    "half": lambda d, c: d.half(),
    "in place": lambda d, c: d.mul_(0.5),
}


class WrongStage(Stage):
    """The direction, with a fault."""

    kind: Literal["wrong_stage"] = "wrong_stage"
    fault: str

    def apply(self, state: State, gradient: Tensor, direction: Tensor, context: StepContext) -> Tensor:
        found: Tensor = STAGE[self.fault](direction, context)
        return found


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("a global draw", ("torch's global generator", "rand_like", "context.seed")),
        ("numpy draws", ("NumPy's global generator", "context.seed")),
        ("python draws", ("`random`", "context.seed")),
        ("own generator", ("`rand`", HERE, "context.seed")),
        ("mean over the stack", ("`mean`", HERE, "axis 0")),
        ("largest entry", ("`max`", HERE, "axis 0")),
        ("floor of the stack", ("`max`", HERE, "axis 0")),
        ("softmax over the stack", ("`_softmax`", HERE, "axis 0")),
        ("first block", ("`select`", HERE, "axis 0")),
        ("gram of the stack", ("`mm`", HERE, "axis 0")),
        ("a loop that counts", ("`unbind`", HERE, "place")),
        ("numbers of blocks", ("`arange`", HERE, "place")),
        ("item", (HERE, "_local_scalar_dense", "step 3")),
        ("steps of the host", (HERE, "context.step")),
        ("half", ("apply()", "torch.float16")),
        ("in place", ("apply()", "gradient.mul_")),
    ],
)
def test_mistakes_in_stages(fault: str, says: tuple[object, ...]) -> None:
    with refused(LawError, "update.wrong_stage", *says):
        check_stage(WrongStage(fault=fault), ((6, 5),))


# Root solvers.


def eigen(a: Tensor, exponent: Fraction) -> tuple[Tensor, Tensor]:
    ok = finite_blocks(a)
    values, q = torch.linalg.eigh(torch.where(ok[:, None, None], a, identity_like(a)))
    return symmetrized((q * values.clamp_min(1e-12).pow(-float(exponent)).unsqueeze(1)) @ q.mT), ok


def floored(a: Tensor, exponent: Fraction, largest: Callable[[Tensor], Tensor]) -> Root:
    s, u = torch.linalg.eigh(a.nan_to_num(0, 0, 0))
    s = torch.maximum(s, 1e-3 * largest(s))
    return Root(symmetrized((u * s.pow(-float(exponent)).unsqueeze(1)) @ u.mT), finite_blocks(a))


ROOT: dict[str, Callable[[Tensor, Fraction], Any]] = {
    "sound": lambda a, e: Root(*eigen(a, e)),
    "only a tensor": lambda a, e: eigen(a, e)[0],
    "raises for nan": lambda a, e: Root(torch.linalg.inv(torch.linalg.cholesky(a))),
    "a global draw": lambda a, e: Root(*eigen(a + 1e-9 * torch.randn_like(a).square(), e)),
    "ridge of the stack": lambda a, e: Root(*eigen(a + 1e-3 * a.abs().max() * identity_like(a), e)),
    "floor of the stack": lambda a, e: floored(a, e, lambda s: s.amax(-1).max()),
    "small floor of the stack": lambda a, e: floored(a, e, lambda s: 1e-6 * s.max()),
    "in place": lambda a, e: Root(*eigen(a.add_(identity_like(a)), e)),
    "mean after a helper": lambda a, e: Root((r := eigen(a, e)[0]) + 1e-3 * r.mean(0), finite_blocks(a)),
    "float32": lambda a, e: Root(eigen(a, e)[0].float(), finite_blocks(a)),
    "one ok": lambda a, e: Root(eigen(a, e)[0], torch.tensor(True)),
    "power": lambda a, e: Root(*eigen(a, 2 * e)),
    "not symmetric": lambda a, e: Root(torch.linalg.solve(a, torch.tril(a))),
}


class WrongRoot(RootSolver):
    """The inverse root, with a fault."""

    kind: Literal["wrong_root"] = "wrong_root"
    fault: str

    def root(self, a: Tensor, exponent: Fraction) -> Root:
        found: Root = ROOT.get(self.fault, ROOT["sound"])(a, exponent)
        return found

    def diagonal_root(self, a: Tensor, exponent: Fraction) -> Root:
        if self.fault == "diagonals of the stack":
            a = torch.maximum(a, 1e-12 * a.nan_to_num().max())
        return super().diagonal_root(a, exponent)


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("only a tensor", ("root()", "Root", "Tensor")),
        ("raises for nan", ("nan", "`ok`", "finite_blocks")),
        ("a global draw", ("torch's global generator", "randn_like", "torch.Generator")),
        ("ridge of the stack", ("`max`", HERE, "axis 0")),
        ("in place", ("`add_`", "the matrix", HERE)),
        ("mean after a helper", ("`mean`", HERE, "axis 0")),
        ("float32", ("torch.float32", "torch.float64")),
        ("one ok", ("ok", "[4]", "[]")),
        ("power", (0.01, "1/4")),
        ("not symmetric", (1e-14, "transpose")),
        ("floor of the stack", ("1e16", "`max`", HERE, "axis 0")),
        ("small floor of the stack", ("1e16", "`max`", HERE, "axis 0")),
        ("diagonals of the stack", ("diagonal", "1e-8", "`max`", HERE, "axis 0")),
    ],
)
def test_mistakes_in_root_solvers(fault: str, says: tuple[object, ...]) -> None:
    with refused(LawError, "root_solver.wrong_root", *says):
        check_solver(WrongRoot(fault=fault), degree=-1, rotates=True)


UNIT: dict[str, Callable[[Tensor], Tensor]] = {
    "largest": lambda values: values.amax(1, keepdim=True),
    "trace": lambda values: values.sum(1, keepdim=True),
    "one": lambda values: torch.ones_like(values[:, :1]),
}


class Ridged(RootSolver):
    """Roots with a ridge in units of `unit`, which is added, or, with `floor`, is the least eigenvalue.

    hidden: True if `regularized` does not know the ridge.
    safe: False if the eigenvalues of a zero matrix stay 0.
    """

    kind: Literal["ridged"] = "ridged"
    strength: float = 1e-6
    unit: Literal["largest", "trace", "one"] = "largest"
    floor: bool = False
    hidden: bool = False
    safe: bool = True

    def root(self, a: Tensor, exponent: Fraction) -> Root:
        ok = finite_blocks(a)
        values, q = torch.linalg.eigh(torch.where(ok[:, None, None], a, identity_like(a)))
        power = self.replace(hidden=False).regularized(values).pow(-float(exponent))
        return Root(symmetrized((q * power.unsqueeze(1)) @ q.mT), ok)

    def regularized(self, values: Tensor) -> Tensor:
        if self.hidden:
            return values
        ridge = self.strength * UNIT[self.unit](values)
        found = torch.maximum(values, ridge) if self.floor else values + ridge
        return found.clamp_min(tiny(values.dtype)) if self.safe else found


def test_a_root_of_a_singular_matrix_that_is_not_finite_must_be_marked() -> None:
    with refused(LawError, "roots_of_singular_matrices".replace("_", " "), False):
        check_solver(Ridged(strength=0.0, safe=False), degree=-1, rotates=True)


@pytest.mark.parametrize(
    "solver",
    [
        Ridged(),
        Ridged(strength=0.3),
        Eigh(ratio=1e-6),
        Eigh(eps=0.2),
        Eigh(eps=1.0, deficiency="pseudo_inverse"),
        CholeskyInverse(),
    ],
    ids=repr,
)
def test_roots_are_compared_with_the_ridge_of_their_solver(solver: RootSolver) -> None:
    """The field of a ridge may have any name."""
    check_solver(solver, rotates=True)


@pytest.mark.parametrize(
    "fields",
    [
        {"strength": 0.3},
        {"strength": 1e-4},
        {"strength": 1e-4, "unit": "trace"},
        {"strength": 1e-4, "unit": "one"},
        {"strength": 1e-4, "floor": True},
    ],
    ids=repr,
)
def test_a_ridge_is_added_by_regularized_too(fields: Any) -> None:
    """A ridge that `regularized` does not add is refused; the same ridge, added by it, is not."""
    check_solver(Ridged(**fields), rotates=True)
    with refused(LawError, "a root undoes its matrix", "`regularized`"):
        check_solver(Ridged(**fields, hidden=True))


def test_a_root_and_a_basis_need_one_tensor() -> None:
    """The rest has defaults: ok where all numbers are finite."""
    value = torch.eye(3).repeat(2, 1, 1)
    value[1, 0, 0] = torch.nan
    root, basis = Root(value), Basis(value)
    assert root.ok.tolist() == root.definite.tolist() == basis.ok.tolist() == [True, False]
    assert root.iterations.dtype == torch.int32 and root.residual.dtype == value.dtype and basis.order is None
    assert isinstance(root._replace(ok=root.ok), Root) and len(root) == 5 and len(basis) == 3
    one = Contribution(value)
    assert one.z is None and one.scale == 1.0


def test_a_basis_refuses_ok_in_the_place_of_the_order() -> None:
    q = torch.eye(4).expand(2, 4, 4)
    ok = torch.tensor([False, True])
    with refused(TypeError, "order", "ok=ok"):
        Basis(q, ok)
    assert Basis(q, ok=ok).ok is ok


# Basis and polar solvers.

BASIS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "sound": lambda a, q: Basis(torch.linalg.qr(a @ q).Q),
    "only a tensor": lambda a, q: torch.linalg.qr(a @ q).Q,
    "raises for nan": lambda a, q: Basis(torch.linalg.eigh(a).eigenvectors.flip(-1)),
    "a global draw": lambda a, q: Basis(torch.linalg.qr(a @ (q + 1e-6 * torch.randn(6, 6, dtype=a.dtype))).Q),
    "writes to q": lambda a, q: Basis(q.contiguous().copy_(torch.linalg.qr(a @ q).Q)),
    "not normalized": lambda a, q: Basis(a @ q),
    "ridge of the stack": lambda a, q: Basis(
        torch.linalg.qr((a + 1e-13 * a.nan_to_num().abs().max() * identity_like(a)) @ q).Q
    ),
    "in place": lambda a, q: Basis(torch.linalg.qr(a.div_(2.0) @ q).Q),
}


class WrongBasis(BasisSolver):
    """A step of orthogonal iteration, with a fault."""

    kind: Literal["wrong_basis"] = "wrong_basis"
    fault: str

    def basis(self, a: Tensor, q: Tensor, first: bool) -> Basis:
        found: Basis = BASIS[self.fault](a, q)
        return found


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("only a tensor", ("basis()", "Basis", "Tensor")),
        ("raises for nan", ("nan", "`ok`", "finite_blocks")),
        ("a global draw", ("torch's global generator", "randn", "torch.Generator")),
        ("writes to q", ("`copy_`", "q", HERE)),
        ("not normalized", ("Q^T Q", "I", 1e-13)),
        ("in place", ("`div_`", "matrix", HERE)),
        ("ridge of the stack", ("1e16", "`max`", HERE, "axis 0")),
    ],
)
def test_mistakes_in_basis_solvers(fault: str, says: tuple[object, ...]) -> None:
    with refused(LawError, "basis_solver.wrong_basis", *says):
        check_solver(WrongBasis(fault=fault))


POLAR: dict[str, Callable[[Tensor], Any]] = {
    "no guard": lambda x: x / torch.linalg.matrix_norm(x)[:, None, None],
    "over the stack": lambda x: x / x.norm(),
    "floor of the stack": lambda x: (
        x / torch.maximum(n := torch.linalg.matrix_norm(x), 1e-3 * n.max()).clamp_min(1e-30)[:, None, None]
    ),
    "transposed": lambda x: x.mT,
    "in place": lambda x: x.mul_(2.0),
}


class WrongPolar(PolarSolver):
    """The matrix over its norm, with a fault."""

    kind: Literal["wrong_polar"] = "wrong_polar"
    fault: str

    def polar(self, x: Tensor) -> Tensor:
        found: Tensor = POLAR[self.fault](x)
        return found


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("no guard", ("finite", "zero")),
        ("over the stack", ("linalg_vector_norm", HERE, "axis 0")),
        ("transposed", ("(6, 4)", "[3, 4, 6]")),
        ("in place", ("`mul_`", HERE)),
        ("floor of the stack", ("1e16", "`max`", HERE, "axis 0")),
    ],
)
def test_mistakes_in_polar_solvers(fault: str, says: tuple[object, ...]) -> None:
    with refused(LawError, "polar_solver.wrong_polar", *says):
        check_solver(WrongPolar(fault=fault), rotates=False)


BOUND: dict[str, Callable[[Tensor], Any]] = {
    "of the stack": lambda a: torch.linalg.vector_norm(a).expand(len(a)),
    "floor of the stack": lambda a: torch.maximum(n := torch.linalg.matrix_norm(a), 0.5 * n.max()),
    "one number": lambda a: torch.linalg.vector_norm(a),
    "too small": lambda a: a.diagonal(dim1=1, dim2=2).amax(1) * 0.5,
    "in place": lambda a: torch.linalg.matrix_norm(a.mul_(1.5)),
}


class WrongBound(EigenvalueBound):
    """The Frobenius norm, with a fault."""

    kind: Literal["wrong_bound"] = "wrong_bound"
    fault: str

    def of_scaled(self, a: Tensor) -> Tensor:
        found: Tensor = BOUND[self.fault](a)
        return found


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("of the stack", ("linalg_vector_norm", HERE, "axis 0")),
        ("one number", ("of_scaled()", "[4]", "[]")),
        ("too small", ("largest eigenvalue",)),
        ("in place", ("`mul_`", "the matrix", HERE)),
        ("floor of the stack", ("1e16", "`max`", HERE, "axis 0")),
    ],
)
def test_mistakes_in_bounds(fault: str, says: tuple[object, ...]) -> None:
    with refused(LawError, "eigenvalue_bound.wrong_bound", *says):
        check_eigenvalue_bound(WrongBound(fault=fault))


# Statistics.


def unfolded(x: Tensor, axis: int) -> Tensor:
    return x.movedim(axis + 1, 1).reshape(len(x), x.shape[axis + 1], -1)


def gram(x: Tensor, axis: int) -> Contribution:
    y = unfolded(x, axis)
    return Contribution(y, y)


def counted(x: Tensor, axis: int, context: StepContext) -> Contribution:
    CALLS.append(1)
    return gram(x * len(CALLS), axis)


def rounded(x: Tensor, axis: int, context: StepContext) -> Contribution:
    """A Gram matrix that is rounded differently in each call, as a sum is whose terms are added in another order."""
    CALLS.append(1)
    return gram(x * (1 + 2**-46 * len(CALLS)), axis)


STATISTIC: dict[str, Callable[[Tensor, int, StepContext], Any]] = {
    "sound": lambda x, axis, c: gram(x, axis),
    "the unfolding alone": lambda x, axis, c: Contribution(unfolded(x, axis)),
    "only a tensor": lambda x, axis, c: unfolded(x, axis),
    "without the stack": lambda x, axis, c: Contribution(torch.eye(x.shape[axis + 1], dtype=x.dtype)),
    "float32": lambda x, axis, c: gram(x.float(), axis),
    "scale of a shape": lambda x, axis, c: gram(x, axis)._replace(scale=x.new_ones(len(x), 1, 1)),
    "in place": lambda x, axis, c: gram(x.mul_(2.0), axis),
    "over the stack": lambda x, axis, c: gram(x / x.norm(), axis),
    "over the stack, in another order": lambda x, axis, c: rounded(x / x.norm(), axis, c),
    "a global draw": lambda x, axis, c: gram(x * torch.rand_like(x), axis),
    "own generator": lambda x, axis, c: gram(x * seeded(x), axis),
    "negative": lambda x, axis, c: gram(x, axis)._replace(scale=-1.0),
    "not symmetric": lambda x, axis, c: Contribution((y := unfolded(x, axis)) @ y.mT @ y[:, :, :1] @ y[:, :1] @ y.mT),
    "zero over zero": lambda x, axis, c: gram(x / rows(x.flatten(1).norm(dim=1), x.ndim), axis),
    "item": lambda x, axis, c: gram(x, axis)._replace(scale=1.0 / (1.0 + x.abs().max().item() * 0)),
    "a count": counted,
    "a plain reshape": lambda x, axis, c: Contribution(*[x.reshape(len(x), x.shape[axis + 1], -1)] * 2),
}


class WrongStatistic(Statistic):
    """Gram matrices, with a fault."""

    kind: Literal["wrong_statistic"] = "wrong_statistic"
    fault: str

    def contribution(self, x: Tensor, axis: int, context: StepContext) -> Contribution:
        found: Contribution = STATISTIC[self.fault](x, axis, context)
        return found


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("the unfolding alone", ("axis 0", "[N, 6, 6]", "[3, 6, 3]", "Contribution(y, z)")),
        ("only a tensor", ("axis 0", "Contribution", "Tensor")),
        ("without the stack", ("axis 0", "[N, 6, 6]", "[6, 6]")),
        ("float32", ("y", "torch.float64", "torch.float32")),
        ("scale of a shape", ("scale", "[N]", "[3, 1, 1]")),
        ("in place", ("`mul_`", "gradient", HERE)),
        ("over the stack", ("linalg_vector_norm", HERE, "axis 0", "factor")),
        ("a global draw", ("torch's global generator", "rand_like", HERE, "context.seed")),
        ("own generator", ("`rand`", HERE, "context.seed")),
        ("negative", ("eigenvalues", "axis 0", 0)),
        ("not symmetric", ("symmetric", "axis 0")),
        ("zero over zero", ("finite", "zero", "axis 0")),
        ("item", (HERE, "_local_scalar_dense")),
        ("a count", ("memory",)),
        ("a plain reshape", ("axis 1", "permuted", "movedim(axis + 1, 1)")),
        ("over the stack, in another order", ("linalg_vector_norm", HERE, "law: factors of a stack")),
    ],
)
def test_mistakes_in_statistics(fault: str, says: tuple[object, ...]) -> None:
    with refused(LawError, "statistic.wrong_statistic", *says):
        check_statistic(WrongStatistic(fault=fault), ((6, 3),))


def test_a_sound_statistic_and_one_without_a_contribution() -> None:
    assert len(check_statistic(WrongStatistic(fault="sound"), degree=2).held) == 11
    with refused(TypeError, "Empty", "contribution(self, x, axis, context)"):

        class Empty(Statistic):
            """Nothing."""

            kind: Literal["empty_for_test"] = "empty_for_test"


# Quantizers.


def eighth(
    x: Tensor, scale: Tensor, integer: Callable[[Tensor], Tensor] = torch.round, size: int = 127
) -> dict[str, Tensor]:
    whole = rows(scale, x.ndim) if scale.ndim == 1 and len(scale) == len(x) else scale
    return {"codes": integer(size * x / whole).to(torch.int8), "scale": scale}


def largest(x: Tensor) -> Tensor:
    return x.abs().reshape(len(x), -1).amax(1).clamp_min(1e-30)


ENCODE: dict[str, Callable[[Tensor], Any]] = {
    "sound": lambda x: {"halves": x.half()},
    "only a tensor": lambda x: x.half(),
    "a global draw": lambda x: {"halves": (x + 1e-4 * torch.rand_like(x) * (x != 0)).half()},
    "scale of the stack": lambda x: {"halves": (x / x.abs().max()).half(), "scale": x.abs().max().repeat(len(x))},
    "floor of the stack": lambda x: {"halves": (x + 1e-7 * x.abs().max()).half()},
    "zero over zero": lambda x: eighth(x, x.reshape(len(x), -1).abs().amax(1)),
    "last axis": lambda x: eighth(x, x.abs().amax(-1, keepdim=True)),
    "last axis, undeclared": lambda x: eighth(x, x.abs().amax(-1, keepdim=True).clamp_min(1e-30)),
    "last two axes": lambda x: eighth(x, x.abs().amax((-2, -1), keepdim=True).clamp_min(1e-30)),
    "rounded down": lambda x: eighth(x, largest(x), torch.floor, 120),
    "rounded toward 0": lambda x: eighth(x, largest(x), torch.trunc, 120),
    "too large for int8": lambda x: eighth(x, largest(x), size=128),
    "no room for a sign": lambda x: {**eighth(x, largest(x)), "codes": (9 * x / x.abs().max()).to(torch.uint8)},
    "no sign": lambda x: eighth(x.abs(), largest(x)),
    "another scale": lambda x: eighth(x, largest(x), size=40),
    "coarse": lambda x: eighth(x, largest(x), size=3),
    "coarse, too large": lambda x: eighth(x, largest(x), size=3),
    "coarse, too small": lambda x: eighth(x, largest(x), size=3),
    "one scale": lambda x: {"halves": x.half(), "scale": x.abs().max()},
    "in place": lambda x: {"halves": x.mul_(0.99).half()},
    "item": lambda x: {"halves": (x / max(x.abs().max().item(), 1.0)).half()},
}


class WrongQuantizer(Quantizer):
    """float16, with a fault."""

    kind: Literal["wrong_quantizer"] = "wrong_quantizer"
    fault: str

    def unsupported(self, slot: Slot) -> str | None:
        return "no axes" if self.fault == "last axis" and not slot.shape else None

    def encode(self, x: Tensor, before: Encoded | None = None, uniform: Uniform | None = None) -> Encoded:
        return ENCODE.get(self.fault, ENCODE["sound"])(x)  # type: ignore[no-any-return]

    def decode(self, encoded: Encoded, slot: Slot, dtype: torch.dtype) -> Tensor:
        if "codes" in encoded:
            scale = encoded["scale"].to(dtype)
            known = {"coarse": 3, "coarse, too large": 3 * 8 / 9, "coarse, too small": 3 * 8 / 7}
            size = 120 if self.fault.startswith("rounded") else known.get(self.fault, 127)
            return encoded["codes"] * (rows(scale, 1 + len(slot.shape)) if scale.ndim == 1 else scale) / size
        x = encoded["halves"].to(torch.float32 if self.fault == "float32" else dtype)
        return x.flatten(1) if self.fault == "flat" else x


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("only a tensor", ("encode()", "Tensor")),
        ("a global draw", ("torch's global generator", "rand_like", HERE, "`uniform`")),
        ("scale of the stack", ("`max`", HERE, "axis 0")),
        ("one scale", ("scale", "[4, ...]", "[]")),
        ("in place", ("`mul_`", "x", HERE)),
        ("item", (HERE, "_local_scalar_dense")),
        ("float32", ("torch.float64", "torch.float32")),
        ("flat", ("(4, 9, 9)", "(4, 81)")),
        ("floor of the stack", ("`max`", HERE, "axis 0")),
        ("zero over zero", ("zeros", "torch.int8", HERE, "torch.where")),
        ("last axis", ("zeros", "torch.int8", HERE, "torch.where")),
        ("last axis, undeclared", ("shape ()", "scale", "[4, ...]", "[1]", "`unsupported`")),
        ("last two axes", ("shape ()", "`unsupported`", "IndexError", HERE)),
        ("rounded down", ("mean error", "0.6", "encode()")),
        ("rounded toward 0", ("mean error", "0.6", "sign", "encode()")),
        ("too large for int8", ("relative error", "torch.int8", HERE, "clamp")),
        ("no room for a sign", ("relative error", "torch.uint8", HERE, "clamp")),
        ("no sign", ("relative error", "sign")),
        ("another scale", ("relative error", "decode()", "encode()")),
        ("coarse, too large", ("factor", "enlarged", 1.05, "decode()", "encode()")),
        ("coarse, too small", ("factor", "reduced", 1.05, "decode()", "encode()")),
    ],
)
def test_mistakes_in_quantizers(fault: str, says: tuple[object, ...]) -> None:
    with refused(LawError, "quantizer.wrong_quantizer", *says):
        check_quantizer(WrongQuantizer(fault=fault))


def test_a_coarse_format_of_the_right_scale_keeps_the_laws() -> None:
    check_quantizer(WrongQuantizer(fault="coarse"))


# Averagings.


def blended(batch: IterateBatch, weights: Sequence[float | Tensor], masked: bool = True) -> None:
    blend(batch.slots["mean"], batch.parameters, weights, batch.mask if masked else None)


def ages(batch: IterateBatch) -> list[float]:
    return [1.0 / t for t in batch.steps.tolist()]


def noisy(batch: IterateBatch) -> None:
    blended(batch, ages(batch))
    for mean in batch.slots["mean"]:
        mean.add_(torch.randn_like(mean), alpha=1e-3)


def read(batch: IterateBatch) -> None:
    blended(batch, [1.0 / (t + 0 * float(batch.lr)) for t in batch.steps.tolist()])


AFTER: dict[str, Callable[[IterateBatch], None]] = {
    "one step for all": lambda b: blended(b, [1.0 / int(b.steps[0])] * len(b.parameters)),
    "no mask": lambda b: blended(b, ages(b), masked=False),
    "begins at zero": lambda b: blended(b, [0.5] * len(b.parameters)),
    "a global draw": noisy,
    "reads the rate": read,
    "a count": lambda b: (CALLS.append(1), blended(b, [1.0 / len(CALLS)] * len(b.parameters)))[-1],
}


class WrongAveraging(Averaging):
    """The mean of all iterates, with a fault."""

    kind: Literal["wrong_averaging"] = "wrong_averaging"
    fault: str

    def slots(self, shape: tuple[int, ...], low_precision: bool) -> Mapping[str, Slot]:
        own = (shape[0],) if self.fault == "rows" else (4, 3) if self.fault == "one shape" else shape
        return {"mean": Slot(own) if self.fault == "no role" else Slot(own, role="iterate")}

    def step(self, batch: IterateBatch, write: ParameterUpdate) -> None:
        for _ in range({"no update": 0, "twice": 2}.get(self.fault, 1)):
            write(batch.parameters)
        AFTER.get(self.fault, lambda b: blended(b, ages(b)))(batch)

    def evaluated(self, batch: IterateBatch) -> Sequence[Tensor]:
        means = batch.slots["mean"]
        if self.fault == "in place":
            return [mean.mul_(1.01) for mean in means]
        if self.fault == "one tensor":
            return means[0]
        if self.fault == "flat":
            return [mean.flatten() for mean in means]
        return means


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("rows", ("slots()", "mean", "(4, 3)", "(4,)")),
        ("one shape", ("slots()", "mean", "(5,)", "(4, 3)")),
        ("no role", ("slots()", "iterate", "second_moment")),
        ("no update", ("step()", 0, "update(batch.parameters)")),
        ("twice", ("step()", 2)),
        ("one step for all", ("parameter", "batch.steps")),
        ("no mask", ("step()", "batch.mask", "mean")),
        ("begins at zero", ("evaluated", "begin()")),
        ("a global draw", ("torch's global generator", "randn_like", HERE)),
        ("reads the rate", (HERE, "_local_scalar_dense", "batch.lr")),
        ("a count", ("memory",)),
        ("in place", ("evaluated()", "`mul_`", HERE)),
        ("one tensor", ("evaluated()", 3)),
        ("flat", ("evaluated()", "(4, 3)", "(12,)")),
    ],
)
def test_mistakes_in_averagings(fault: str, says: tuple[object, ...]) -> None:
    with refused(LawError, "averaging.wrong_averaging", *says):
        check_averaging(WrongAveraging(fault=fault))


def test_a_sound_averaging() -> None:
    assert len(check_averaging(WrongAveraging(fault="sound")).held) == 10


# Constraints.


def scaled(moved: Tensors, factors: Sequence[Tensor | float]) -> Tensors:
    return [w * (f.to(w.dtype) if isinstance(f, Tensor) else f) for w, f in zip(moved, factors, strict=True)]


def tallied(moved: Tensors) -> Tensors:
    CALLS.append(1)
    return scaled(moved, [1 - 1e-3 * len(CALLS)] * len(moved))


RETRACT: dict[str, Callable[[Tensors, ConstraintContext], Any]] = {
    "sound": lambda w, c: scaled(w, (c.norms(w).clamp_max(2.0) / c.norms(w).clamp_min(1e-30)).unbind(0)),
    "norms of the shard": lambda w, c: scaled(w, [x.norm().clamp_max(2.0) / x.norm().clamp_min(1e-30) for x in w]),
    "norm of all": lambda w, c: scaled(w, [1 / (1 + torch.stack([x.norm() for x in w]).sum())] * len(w)),
    "in place": lambda w, c: [x.mul_(0.5) for x in w],
    "one tensor": lambda w, c: w[0],
    "float64": lambda w, c: [x.double() * 0.5 for x in w],
    "item": lambda w, c: scaled(w, [min(1.0, 2.0 / (x.norm().item() + 1e-30)) for x in w]),
    "reads the rate": lambda w, c: scaled(w, [1 - float(c.lr)] * len(w)),
    "zero over zero": lambda w, c: scaled(w, [2.0 / x.norm() for x in w]),
    "a global draw": lambda w, c: [x + 1e-3 * torch.randn_like(x) for x in w],
    "a count": lambda w, c: tallied(w),
}


class WrongConstraint(Constraint):
    """Norms of at most 2, with a fault."""

    kind: Literal["wrong_constraint"] = "wrong_constraint"
    fault: str
    whole: ClassVar[tuple[str, ...]] = ("norm of all", "zero over zero", "item")

    def shardable(self, whole_rows: bool) -> bool:
        return self.fault not in self.whole

    def slots(self, shape: tuple[int, ...]) -> Mapping[str, Slot]:
        shapes = {"rows": (shape[0],), "no mask": ()}
        return {"own": Slot(shapes[self.fault], role="iterate")} if self.fault in shapes else {}

    def retract(
        self, slots: Slots, parameters: Tensors, updates: Tensors, moved: Tensors, context: ConstraintContext
    ) -> Tensors:
        if self.fault == "no mask":
            for slot in slots["own"]:
                slot.add_(1)
        return RETRACT.get(self.fault, RETRACT["sound"])(moved, context)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("rows", ("slots()", "own", "(4, 3)", "(4,)")),
        ("norms of the shard", ("shard", "context.norms")),
        ("norm of all", ("parameter", "norm")),
        ("in place", ("retract()", "`mul_`", "moved", HERE)),
        ("one tensor", ("retract()", 3)),
        ("float64", ("retract()", "torch.float32", "torch.float64")),
        ("item", (HERE, "_local_scalar_dense")),
        ("reads the rate", (HERE, "_local_scalar_dense", "context.lr")),
        ("zero over zero", ("finite", "zero", "safe_ratio")),
        ("a global draw", ("torch's global generator", "randn_like", HERE)),
        ("a count", ("memory",)),
        ("no mask", ("own", "context.mask")),
    ],
)
def test_mistakes_in_constraints(fault: str, says: tuple[object, ...]) -> None:
    with refused(LawError, "constraints.wrong_constraint", *says):
        check_constraint(WrongConstraint(fault=fault))


def test_a_sound_constraint() -> None:
    assert len(check_constraint(WrongConstraint(fault="sound")).held) == 10


# Views, schedules, weight decay.


class WrongView(View):
    """Two halves, with a fault."""

    kind: Literal["wrong_view"] = "wrong_view"
    fault: str

    def of(self, shape: tuple[int, ...], facts: ModuleFacts) -> ViewChoice:
        CALLS.append(1)
        half = shape[0] // 2
        found: dict[str, Callable[[], Any]] = {
            "matrices alone": lambda: Matrices(),
            "three rows": lambda: ViewChoice(Matrices(sections=(3, 3))),
            "a count": lambda: ViewChoice(Matrices(), str(len(CALLS))),
            "a global draw": lambda: ViewChoice(Matrices(), str(random.random() < 0)),
            "index error": lambda: ViewChoice(Matrices(sections=(half, shape[1]))),
        }
        if self.fault == "refuses all":
            raise ValueError(f"view: no shape is good enough, got {shape}")
        return found[self.fault]()  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("matrices alone", ("of((6, 4))", "ViewChoice")),
        ("three rows", ("of((5,))", "view")),
        ("a count", ("of()", "equal")),
        ("a global draw", ("`random`",)),
        ("index error", ("of((5,))", "IndexError", HERE)),
        ("refuses all", ("shapes", "(8, 4, 3, 3)")),
    ],
)
def test_mistakes_in_views(fault: str, says: tuple[object, ...]) -> None:
    with refused(LawError, "view.wrong_view", *says):
        check_view(WrongView(fault=fault))


DECAY: dict[str, Callable[[float], Any]] = {
    "a rate": lambda t: 3e-4 * (1 - t),
    "a step": lambda t: 1 - t / 1000 if t < 1 else -1,
    "a tensor": lambda t: torch.tensor(1 - t),
    "negative": lambda t: 1 - 2 * t,
    "a global draw": lambda t: 1 - t * random.random(),
    "a count": lambda t: 1 - 1e-6 * next(COUNT) if t else 1.0,
    "at the end": lambda t: 1 / (1 - t),
}


class WrongSchedule(LearningRateSchedule):
    """Linear, with a fault."""

    kind: Literal["wrong_schedule"] = "wrong_schedule"
    fault: str

    def decay(self, t: float) -> float:
        return DECAY[self.fault](t)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("a rate", ("factor", 1, 0.0003)),
        ("a step", ("decay(1)", "[0, 1]", -1)),
        ("a tensor", ("decay(0)", "tensor")),
        ("negative", ("[0, 1]", "decay(0.51)")),
        ("a global draw", ("`random`",)),
        ("a count", ("count",)),
        ("at the end", ("decay(0.01)", "[0, 1]")),
    ],
)
def test_mistakes_in_schedules(fault: str, says: tuple[object, ...]) -> None:
    with refused(LawError, "schedule.wrong_schedule", *says):
        check_schedule(WrongSchedule(fault=fault))


@pytest.mark.parametrize("warmup_steps", [0, 7])
def test_the_shipped_schedules_keep_the_laws(warmup_steps: int) -> None:
    shipped = [one for one in LearningRateSchedule.members.values() if one.__module__.startswith("eigengraft.")]
    assert len(shipped) >= 5
    for member in shipped:
        assert len(check_schedule(member(warmup_steps=warmup_steps), 50).held) == 4  # type: ignore[arg-type]


ALPHA: dict[str, Callable[[float, Any, float], Any]] = {
    "divides by the rate": lambda rate, lr, peak: rate * peak / lr,
    "reads the rate": lambda rate, lr, peak: rate * float(lr) / peak,
    "a branch": lambda rate, lr, peak: rate if lr < peak else 0.0,
    "constant": lambda rate, lr, peak: 0.1,
    "negative": lambda rate, lr, peak: -rate,
}


class WrongDecay(WeightDecay):
    """Decay, with a fault."""

    kind: Literal["wrong_decay"] = "wrong_decay"
    fault: str

    def alpha(self, rate: float, lr: float | Tensor, peak_lr: float) -> float | Tensor:
        return ALPHA[self.fault](rate, lr, peak_lr)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("divides by the rate", ("ZeroDivisionError", HERE)),
        ("reads the rate", (HERE, "_local_scalar_dense", "lr")),
        ("a branch", (HERE, "_local_scalar_dense", "lr")),
        ("constant", ("rate 0", 0.1)),
        ("negative", ("alpha(0.1", -0.1)),
    ],
)
def test_mistakes_in_weight_decay(fault: str, says: tuple[object, ...]) -> None:
    with refused(LawError, "weight_decay.wrong_decay", *says):
        check_weight_decay(WrongDecay(fault=fault))


# Signals.

register_signal(Signal("heat_for_test", "parameter", "a number of each parameter"))


class Unrequested(Stage):
    """d * heat, without a request."""

    kind: Literal["unrequested_for_test"] = "unrequested_for_test"

    def apply(self, state: State, gradient: Tensor, direction: Tensor, context: StepContext) -> Tensor:
        return direction * rows(context.tensor("heat_for_test", direction), direction.ndim)


def test_a_signal_that_is_not_requested_is_named() -> None:
    with refused(LawError, "heat_for_test", "Request('heat_for_test')"):
        check_stage(Unrequested(), ((6, 5),))


# The components of this file belong to their families while its tests run, and to no test of other files.

FAULTY = [own for own in list(globals().values()) if isinstance(own, type) and own.__module__ == __name__]
OWN: list[Any] = [own for own in FAULTY if issubclass(own, Component)]
for own in OWN:
    own.members.pop(own.model_fields["kind"].default)


@pytest.fixture(autouse=True)
def own_members() -> Iterator[None]:
    known = list(families().values())
    before = [dict(family.members) for family in known]
    for own in OWN:
        own.members[own.model_fields["kind"].default] = own
    yield
    for family, members in zip(known, before, strict=True):
        family.members.clear()
        family.members.update(members)
