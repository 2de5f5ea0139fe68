"""Storage, solvers, averaging, constraints, decay and what else an optimizer does, on a device as on a CPU.

The device is the simulated accelerator, or the CUDA device of a machine that has one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import eigengraft
from eigengraft.component import validated
from eigengraft.numerics import finite_blocks, number_like
from eigengraft.optimizers.step import step, traced
from eigengraft.preconditioners import BasisSolver, Eigh, PolarSolver, PowerQR, RootSolver
from eigengraft.quantization import Quantizer
from eigengraft.slots import Slot
from eigengraft.testing.samples import definite, rotation, standard_normal
from eigengraft.testing.solver_laws import usual_exponent

from ..laws.rows import Row
from ..laws.table import TABLE
from .models import Run, gradients, largest_difference, rounding
from .places import MANY, PLACES, Waits, counting, on_device, simulated

ROUNDING = 1e-6
"""Of values near 1 in float32, where a CPU decomposes matrix by matrix or computes the last entries once more."""


@pytest.fixture(autouse=True, params=PLACES)
def device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    with on_device(request.param) as place:
        yield place


def both(function: Callable[..., Any], *tensors: Tensor) -> tuple[Any, Any]:
    """A function of tensors on the host, and of the same on the device."""
    return function(*tensors), function(*(x.to("cuda") for x in tensors))


LOW = {"float16": 1e-3, "bfloat16": 1e-2}
"""Tolerance of roots by the dtype of factors in products, where a real device adds in another order."""


def near(one: Run, two: Run, tolerance: float, steps: Sequence[list[Tensor]], recipe: str, **options: Any) -> bool:
    """Return True if two runs agree up to the tolerance, or on a real device up to errors of rounding."""
    if not simulated():
        usable = [step for step in steps if all(x.isfinite().all() for x in step)]
        tolerance = max(tolerance, MANY * rounding(usable, one, recipe, **options))
    return largest_difference(one, two) <= tolerance


def close(ours: Tensor, theirs: Tensor, tolerance: float = ROUNDING) -> bool:
    return torch.allclose(ours, theirs.cpu(), rtol=tolerance, atol=tolerance, equal_nan=True)


def ids(family: str) -> list[Any]:
    return [pytest.param(row, id=str(row)) for row in TABLE[family]]


@pytest.mark.parametrize("row", ids("quantizer"))
def test_a_quantizer_stores_the_same_numbers(row: Row) -> None:
    quantizer = validated(Quantizer, dict(row.make))  # type: ignore[type-abstract]
    x = definite(3, 16, torch.float32)
    slot = Slot((16, 16), role="statistic")
    ours, theirs = both(lambda x: quantizer.decode(quantizer.encode(x), slot, torch.float32), x)
    assert close(ours, theirs)


@pytest.mark.parametrize("row", ids("root_solver"))
def test_a_root_solver_finds_the_same_roots(row: Row) -> None:
    solver = row.solver("root_solver").component
    assert isinstance(solver, RootSolver)
    ours, theirs = both(lambda a: solver.root(a, usual_exponent(solver)), definite(3, 6))
    low = 1e-9 if simulated() else LOW.get(getattr(solver, "precision", "input"), 1e-9)
    assert close(ours.value, theirs.value, low) and torch.equal(ours.ok, theirs.ok.cpu())


@pytest.mark.parametrize("row", ids("basis_solver"))
def test_a_basis_solver_finds_the_same_bases(row: Row) -> None:
    solver = row.solver("basis_solver").component
    assert isinstance(solver, BasisSolver)
    ours, theirs = both(lambda a, q: solver.basis(a, q, False), definite(3, 6), torch.eye(6).double().repeat(3, 1, 1))
    signs = (ours.q * theirs.q.cpu()).sum(-2, keepdim=True).sign()  # which an eigenvector does not have
    assert close(ours.q if simulated() else ours.q * signs, theirs.q, 1e-9) and torch.equal(ours.ok, theirs.ok.cpu())


@pytest.mark.parametrize("row", ids("polar_solver"))
def test_a_polar_solver_finds_the_same_factors(row: Row) -> None:
    solver = row.solver("polar_solver").component
    assert isinstance(solver, PolarSolver)
    ours, theirs = both(solver.polar, standard_normal(3, 6, 5, seed=1))
    assert close(ours, theirs, 1e-9)


def steady(run: Run, given: list[Tensor], without: Sequence[int] = ()) -> Waits:
    """One step, some parameters of which have no gradient. The look at gradients may wait once."""
    run.give(given)
    parameters = list(run.model.parameters())
    for position in without:
        parameters[position].grad = None
    with counting() as counts:
        run.optimizer.step()
    return counts


def _options() -> Iterator[Any]:
    """(recipe, overrides) of runs with one option each."""
    for kind in ("bf16", "fp8", "int16", "int8", "int4", "codebook8"):
        storage = {role: {"kind": kind, "min_elements": 1} for role in ("first_moment", "second_moment")}
        yield pytest.param("adamw", {"storage": storage}, id=f"storage {kind}")
    stochastic = {"first_moment": {"kind": "bf16", "rounding": "stochastic", "min_elements": 1}}
    yield pytest.param("adamw", {"storage": stochastic}, id="stochastic storage")
    for family, field in (("averaging", "averaging"), ("weight_decay", "weight_decay")):
        for row in TABLE[family]:
            yield pytest.param("adamw", {field: dict(row.make)}, id=f"{field} {row}")
    for name in ("adamw", "muon", "soap_fitted", "shampoo"):
        yield pytest.param(name, {"failure": {"detect": "device"}}, id=f"masks {name}")
    for row in TABLE["constraint"]:
        if row.kind != "qk_clip":  # which needs a model with attention
            yield pytest.param("muon", {"constraints": [dict(row.make)]}, id=f"constraint {row}")


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "overrides"), list(_options()))
def test_an_option_makes_the_same_steps(recipe: str, overrides: dict[str, Any], device: torch.device) -> None:
    given = gradients(5)
    one, two = Run(recipe, **overrides), Run(recipe, device, **overrides)
    one.step(*given)
    two.step(*given[:4])
    counts = steady(two, given[4])
    assert near(one, two, 1e-5 if recipe == "soap_fitted" else ROUNDING, given, recipe, **overrides)
    assert counts.waits <= 1 and not counts.uploads, counts.by_line("waits", "uploads")


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["marginals", "exact", "permute", "none"])
def test_a_transport_makes_the_same_steps(transport: str, device: torch.device) -> None:
    given, changes = gradients(5), (f"update.eigenbasis.transport={transport}",)
    one, two = Run("soap_fitted", changes=changes), Run("soap_fitted", device, changes=changes)
    one.step(*given)
    two.step(*given)
    assert near(one, two, 1e-5 if transport == "marginals" else ROUNDING, given, "soap_fitted", changes=changes)


@pytest.mark.parametrize("recipe", ["adamw", "adafactor", "muon", "soap_fitted", "shampoo", "schedule_free_adamw"])
def test_addresses_of_state_never_move(recipe: str, device: torch.device) -> None:
    """Nor do those of parameters: a captured graph holds on to them."""
    run, given = Run(recipe, device), gradients(5)
    run.step(*given[:2])
    before = addresses(run)
    run.step(*given[2:])
    assert addresses(run) == before


def addresses(run: Run) -> list[int]:
    return [x.data_ptr() for x in (*run.model.parameters(), *addressed(run))]


@pytest.mark.slow
@pytest.mark.parametrize("detect", ["host", "device"])
def test_what_users_do_around_steps(detect: str, device: torch.device) -> None:
    """A closure, a scheduled rate, a gradient of inf, a missing one, checked mode, `inspect` and `zero_grad`."""
    given, runs = (
        gradients(6),
        [
            Run("soap_fitted", place, checked=True, failure={"detect": detect})
            for place in (torch.device("cpu"), device)
        ],
    )
    given[2][0][0, 0] = torch.inf
    reports = []
    for run in runs:
        parameters = list(run.model.parameters())
        for number, own in enumerate(given):
            run.give(own)
            parameters[1].grad = None if number == 3 else parameters[1].grad
            run.optimizer.param_groups[0]["lr"] = 0.01 / (1 + number)
            assert float(run.optimizer.step(lambda: torch.tensor(1.0, device=run.place))) == 1.0  # noqa: B023
        run.optimizer.zero_grad()
        reports.append(str(run.optimizer.inspect()))
    assert near(*runs, 1e-5, given, "soap_fitted")
    assert runs[0].optimizer.skipped == runs[1].optimizer.skipped != {}
    assert len(reports[0].splitlines()) == len(reports[1].splitlines())


@pytest.mark.parametrize("scaled", [False, True])
def test_fused_kernels_are_launched_before_the_host_waits(
    scaled: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, given, order = Run("adamw", device), gradients(2), list[str]()
    fused, copy = torch._fused_adamw_, step.copy_answers
    monkeypatch.setattr(
        torch, "_fused_adamw_", lambda *args, **options: (order.append("fused"), fused(*args, **options))
    )

    def ordered(checks: Any) -> Any:
        order.append("copy")
        read = copy(checks)
        return lambda: (order.append("read"), read())[1]

    monkeypatch.setattr(step, "copy_answers", ordered)
    if scaled:
        run.optimizer.grad_scale, run.optimizer.found_inf = (torch.full((), x, device=device) for x in (8.0, 0.0))
    run.step(*given)
    assert order == ["copy", "fused", "read"] * 2


@pytest.mark.parametrize("nonfinite", ["skip", "raise"])
def test_a_step_that_was_launched_early_changes_nothing_for_gradients_of_nan(
    nonfinite: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is then that of the other parameters, as if it had begun after the host had read the check."""
    given, found = gradients(5), list[Any]()
    given[0][1][0], given[3][2][0] = torch.nan, torch.inf
    for early in (True, False):
        if not early:
            monkeypatch.setattr(step.ParamSet, "launch_early", lambda self, check: False)
        run, errors = Run("adamw", device, failure={"nonfinite": nonfinite}), list[str]()
        for own in given:
            run.give(own)
            before = [*run.values(), *map(Tensor.cpu, addressed(run))]
            try:
                run.optimizer.step()
            except FloatingPointError as error:
                errors.append(str(error))
                assert all(map(torch.equal, [*run.values(), *map(Tensor.cpu, addressed(run))], before))
        counts = [int(own["step"]) for own in run.optimizer.state.values()]
        found.append(([*run.values(), *map(Tensor.cpu, addressed(run))], counts, run.optimizer.skipped, errors))
    (values, *rest), (others, *same) = found
    assert all(map(torch.equal, values, others)) and rest == same and bool(rest[-1]) is (nonfinite == "raise")


def test_parameters_of_bfloat16_and_of_two_devices(device: torch.device) -> None:
    values = [standard_normal(6, 5, seed=1).bfloat16(), standard_normal(6, 5, seed=2)]
    runs = []
    for places in (("cpu", "cpu"), (device, "cpu")):
        own = [nn.Parameter(value.clone().to(place)) for value, place in zip(values, places, strict=True)]
        optimizer = eigengraft.Optimizer([(f"w{i}", p) for i, p in enumerate(own)], "adamw", lr=0.1)
        for _ in range(3):
            for p, value in zip(own, values, strict=True):
                p.grad = (value * 0.1).to(p.device)
            optimizer.step()
        runs.append([p.detach().cpu() for p in own])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


@pytest.mark.parametrize("recipe", ["adamw", *(pytest.param(r, marks=pytest.mark.slow) for r in ("muon", "soap"))])
@pytest.mark.parametrize(
    "failure",
    [{}, {"detect": "device"}, {"nonfinite": "ignore"}, {"nonfinite": "raise"}],
    ids=["host", "device", "ignore", "raise"],
)
def test_a_scaler_of_the_loss_costs_no_wait(recipe: str, failure: dict[str, Any], device: torch.device) -> None:
    """A step that it stops is none, whatever the gradients; others are those of gradients that were divided before."""
    given, ignored = gradients(6), failure.get("nonfinite") == "ignore"
    plain, scaled = (Run(recipe, place, failure=failure) for place in (device, device))
    waits = []
    for number, own in enumerate(given):
        stopped = number == 2
        if not stopped:
            plain.give(own)
            with counting() as counts:
                plain.optimizer.step()
            waits.append(counts.waits)
        scaled.give([x * 8 for x in own])
        scaled.optimizer.grad_scale = torch.full((), 8.0, device=device)
        scaled.optimizer.found_inf = torch.full((), float(stopped), device=device)
        if stopped:
            next(scaled.model.parameters()).grad.fill_(torch.nan)
            before = [*scaled.values(), *map(Tensor.cpu, addressed(scaled))]
        with counting() as counts:
            scaled.optimizer.step()
        if stopped:
            assert all(map(torch.equal, [*scaled.values(), *map(Tensor.cpu, addressed(scaled))], before))
            waits.append(waits[-1])
        if number > 3 or not ignored:  # directions of the first updates are checked where no fused kernel makes them
            assert counts.waits <= waits[-1] and not counts.uploads, counts.by_line("waits", "uploads")
    states = [run.optimizer.state_dict()["state"] for run in (plain, scaled)]
    # under `ignore` the scaler's mask is the only one, and Adam's fused kernels take none
    tolerance = ROUNDING if ignored else 0.0
    assert largest_difference(plain, scaled) <= tolerance and not scaled.optimizer.skipped
    pairs = [(x.cpu(), states[1][i][key].cpu()) for i, own in states[0].items() for key, x in own.items()]
    assert all(torch.allclose(x.double(), y.double(), rtol=tolerance, atol=tolerance) for x, y in pairs)


def addressed(run: Run) -> list[Tensor]:
    """The tensors that state is stored in."""
    return [x for own in run.optimizer.stack_states() for x in own.tensors.values()]


@pytest.mark.parametrize("recipe", ["adamw", "muon"])
def test_parameters_without_a_gradient_cost_no_wait(recipe: str, device: torch.device) -> None:
    run, given = Run(recipe, device), gradients(6)
    run.step(*given[:4])
    steady(run, given[4], without=(4, 6))  # where the rows of active blocks are copied to the device
    counts = steady(run, given[5], without=(4, 6))
    assert counts.waits <= 1 and not counts.uploads, counts.by_line("waits", "uploads")


def test_numbers_of_the_host_are_filled_in_without_a_wait(device: torch.device) -> None:
    like = torch.zeros(2, dtype=torch.float64, device=device)
    with counting() as counts:
        found = [number_like(value, like) for value in (0.5, torch.tensor(0.5))]
    assert counts.waits == counts.uploads == 0
    assert all(own.device == like.device and own.dtype is like.dtype and own.item() == 0.5 for own in found)


def test_blocks_are_checked_for_inf_and_nan_by_two_kernels(device: torch.device) -> None:
    x = standard_normal(7, 3, 4, seed=0).float()
    for row, value in enumerate((torch.nan, torch.inf, -torch.inf, 3e38)):
        x[row, row % 3, row] = value
    x[4] = 0
    given = x.to(device)
    with counting() as counts:
        found = finite_blocks(given)
    assert found.tolist() == finite_blocks(x).tolist() == [False] * 3 + [True] * 4
    assert counts.waits == 0 and (not simulated() or counts.kernels == 2)
    assert finite_blocks(given[:, :0]).all() and finite_blocks(given[:0]).shape == (0,)


PROGRAMS = defaultdict[bool, dict[Any, traced.Program]](dict)
"""Programs of the test below, which do not depend on rates: by whether the device is simulated, and by their source."""


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [False, True], ids=["as it is", "compiled"])
@pytest.mark.parametrize("shape", [(), (1,)], ids=["0-d", "one element"])
def test_a_rate_on_the_device_is_not_read(
    shape: tuple[int, ...], compiled: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The steps are those of a rate on the host, also when the tensor changes in place."""
    monkeypatch.setattr(traced, "generate", lambda graph, symbolic: lambda tensors: graph(*tensors))
    monkeypatch.setattr(traced, "_PROGRAMS", PROGRAMS[simulated()])
    given, rate = gradients(6), torch.zeros(shape, device=device)
    runs = [Run("adamw", device, failure={"detect": "device"}, compile=compiled) for _ in range(2)]
    for at, values in enumerate(given):
        lr = 2.0 ** -(7 + at)
        rate.fill_(lr)
        for run, own in zip(runs, (lr, rate), strict=True):
            for group in run.optimizer.param_groups:
                group["lr"] = own
        runs[0].step(values)
        counts = steady(runs[1], values)
    assert counts.waits == 0, counts.by_line("waits")
    assert largest_difference(*runs) <= ROUNDING


@pytest.mark.slow
def test_a_moved_model_takes_its_state_along(device: torch.device) -> None:
    given, one, two = gradients(4), Run("shampoo"), Run("shampoo")
    one.step(*given)
    two.step(*given[:2])
    two.model.to(device)
    two.place = device
    two.step(*given[2:])
    assert largest_difference(one, two) <= ROUNDING
    state = two.optimizer.state[two.model.fc1.weight]
    assert {x.device.type for key, x in state.items() if key != "step"} == {"cuda"}


def test_cholesky_qr_keeps_a_basis_that_it_cannot_improve_without_asking() -> None:
    """A bound that rounding exceeds: a CPU takes Householder QR, a device keeps the columns of Q."""
    solver = validated(BasisSolver, {"kind": "cholesky_qr", "max_error": 1.0})  # type: ignore[type-abstract]
    q = rotation(6, 1).float()[None]
    u = rotation(6, 2).float()
    a = (u @ torch.diag(torch.tensor([1.0, *[1e-6] * 5])) @ u.mT)[None]
    ours = solver.basis(a, q, False)
    with counting() as counts:
        theirs = solver.basis(a.to("cuda", non_blocking=True), q.to("cuda", non_blocking=True), False)
    assert counts.waits == 0
    assert (ours.ok.tolist(), theirs.ok.tolist()) == ([True], [False])
    assert torch.equal(theirs.q.cpu().sort(-1).values, q.sort(-1).values)


@pytest.mark.parametrize("kind", ["coupled_newton", "newton_db", "higher_order"])
def test_an_iterative_root_stops_early_on_a_device(kind: str) -> None:
    solver = validated(RootSolver, {"kind": kind})  # type: ignore[type-abstract]
    a = definite(4, 16, torch.float32).to("cuda")
    with counting() as counts:
        solver.root(a, usual_exponent(solver))
    assert 0 < counts.waits <= 15 and counts.kernels < 2500, counts


DECOMPOSED: dict[str, tuple[str, Any, str]] = {
    "soap_fitted": ("eigenbasis", PowerQR, "basis_and_diagonal"),
    "shampoo": ("graft.direction.shampoo", Eigh, "root"),
}


@pytest.mark.slow
@pytest.mark.parametrize("delay", [0, 2])
@pytest.mark.parametrize("recipe", DECOMPOSED)
def test_products_of_refreshes_are_never_in_tf32(
    recipe: str, delay: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other products are as the user says. On a real device no root and no basis fails."""
    path, solver, method = DECOMPOSED[recipe]
    seen, solve, before = set(), getattr(solver, method), torch.get_float32_matmul_precision()

    def watched(*given: Any) -> Any:
        seen.add(torch.backends.cuda.matmul.fp32_precision)
        return solve(*given)

    monkeypatch.setattr(solver, method, watched)
    run = Run(recipe, device, changes=(f"update.{path}.refresh.delay={delay}",))
    torch.set_float32_matmul_precision("high")
    try:
        run.step(*gradients(8))
        assert torch.backends.cuda.matmul.fp32_precision == "tf32"
    finally:
        torch.set_float32_matmul_precision(before)
    assert seen == {"ieee"}
    assert not any(row["value"] for row in run.optimizer.inspect().records() if row["measure"] == "failures")
