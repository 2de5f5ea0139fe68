"""Solvers that are chosen for the device of their matrices: the table of times, the choice, and what it does there."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from fractions import Fraction
from typing import Any, Literal, Self

import pytest
import torch
from torch import Tensor, nn

import eigengraft
from eigengraft.optimizers.recipe.loading import shipped_recipes
from eigengraft.preconditioners import (
    Basis,
    BasisSolver,
    CholeskyQR,
    CoupledMinimax,
    Eigh,
    EighBasis,
    PowerQR,
    RootSolver,
)
from eigengraft.preconditioners.roots import Timing, by_device, timings
from eigengraft.testing import accelerator
from eigengraft.testing.samples import definite

F32, F64 = torch.float32, torch.float64
RIDGE = {"eps": 1e-6, "relative": True}
ORDER = 48
"""Above the 32 rows up to which CUDA decomposes stacks at once."""


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Timing]]:
    """Rows that stand for the table."""
    own: list[Timing] = []
    monkeypatch.setattr(by_device, "timings", lambda: tuple(own))
    by_device.choose_solver.cache_clear()
    yield own
    by_device.choose_solver.cache_clear()


def row(device: str, operation: str, order: int, milliseconds: float, **others: Any) -> Timing:
    fields = {"card": "", "date": "2026-11-25", "batch": 1, "dtype": "float32", "source": "measured: a test"} | others
    return Timing(device, operation=operation, order=order, milliseconds=milliseconds, **fields)


def test_each_number_of_the_table_has_a_source() -> None:
    kinds = {*BasisSolver.members, *RootSolver.members}
    for one in timings():
        assert (
            one.operation.removesuffix("_on_host") in kinds and one.milliseconds > 0 and one.order > 0 and one.batch > 0
        )
        assert hasattr(torch, one.dtype) and torch.device(one.device).index is None
        assert one.source.split(":")[0] in ("measured", "read, not measured", "estimated")
    keys = [(one.device, one.card, one.operation, one.order, one.batch, one.dtype) for one in timings()]
    assert len(set(keys)) == len(keys)


def test_a_row_of_a_report_has_no_source_of_its_own() -> None:
    made = dataclasses.asdict(row("cuda", "eigh", 256, 1.0))
    del made["source"]
    assert Timing(**made).source.startswith("measured")


def test_a_time_follows_from_the_next_larger_order(rows: list[Timing]) -> None:
    rows += [row("cuda", "eigh", 32, 64.0, batch=64), row("cuda", "eigh", 32, 3.0), row("cuda", "eigh", 128, 10.0)]
    rows += [row("cuda", "eigh", 128, 40.0, dtype="float64"), row("cpu", "eigh", 512, 1.0)]
    found = [by_device.estimate("cuda", "eigh", order, F32) for order in (8, 32, 33, 256)]
    assert [one and one.milliseconds for one in found] == [1.0, 1.0, 10.0, 80.0]
    assert by_device.estimate("cuda", "eigh", 100, F64) == (40.0, rows[3])
    assert by_device.estimate("xpu", "eigh", 100, F32) == (10.0, rows[2])
    assert by_device.estimate("cuda", "power_qr", 100, F32) is None


def test_measured_times_count_before_others(rows: list[Timing]) -> None:
    rows += [row("cuda", "eigh", 64, 1.0, source="read, not measured: a page"), row("cuda", "eigh", 256, 9.0)]
    assert by_device.estimate("cuda", "eigh", 64, F32) == (9.0, rows[1])


@pytest.mark.parametrize(
    ("solver", "order", "expected"),
    [
        (PowerQR(by_device=True), 1024, CholeskyQR(rounds=2, wide=True)),
        (
            PowerQR(by_device=True, steps=2, bootstrap=False),
            256,
            CholeskyQR(steps=2, rounds=2, wide=True, bootstrap=False),
        ),
        (Eigh(**RIDGE, by_device=True), 32, Eigh(**RIDGE, by_device=True)),
        (Eigh(by_device=True), 512, Eigh(on_host=True)),
        (Eigh(by_device=True), 1024, Eigh(by_device=True)),
        (Eigh(**RIDGE, deficiency="floor", by_device=True), 64, Eigh(**RIDGE, deficiency="floor", on_host=True)),
    ],
)
def test_a_choice_of_the_shipped_table(solver: Any, order: int, expected: Any) -> None:
    assert by_device.choose_solver(solver, "cuda", order, F32).solver == expected


def test_a_ridge_of_the_size_of_rounding_needs_a_decomposition() -> None:
    for eps, dtype, iterated in ((1e-6, F32, True), (1e-7, F32, False), (1e-7, F64, True)):
        found = by_device.choose_solver(Eigh(eps=eps, relative=True, by_device=True), "cuda", 512, dtype).solver
        assert isinstance(found, CoupledMinimax) is iterated
    made = CoupledMinimax.equal_to(Eigh(**RIDGE), F32)
    assert made is not None and made.eps == RIDGE["eps"] and made.relative


def test_a_solver_without_times_is_taken_itself(rows: list[Timing]) -> None:
    solver = PowerQR(by_device=True)
    assert by_device.choose_solver(solver, "cuda", 64, F32).solver is solver


def test_nothing_is_chosen_on_a_cpu_or_unasked() -> None:
    a, q = definite(2, ORDER, F32), torch.eye(ORDER).expand(2, -1, -1)
    asked = by_device.choose_solver.cache_info()
    assert torch.equal(PowerQR(by_device=True).basis(a, q, False).q, PowerQR().basis(a, q, False).q)
    assert by_device.choose_solver.cache_info() == asked
    with accelerator("cuda") as run:
        assert isinstance(by_device.chosen(PowerQR(by_device=True), a.to(run.device)), CholeskyQR)
        assert by_device.chosen(PowerQR(), a.to(run.device)) == PowerQR()


def test_an_outsider_may_offer_an_equal_solver(rows: list[Timing]) -> None:
    class Fast(BasisSolver):
        kind: Literal["fast_qr"] = "fast_qr"

        @classmethod
        def equal_to(cls, other: BasisSolver, dtype: torch.dtype) -> Self | None:
            return cls() if isinstance(other, PowerQR) and other.steps == 1 else None

        def basis(self, a: Tensor, q: Tensor, first: bool) -> Basis:
            raise NotImplementedError

    try:
        rows += [row("cuda", "power_qr", 64, 2.0), row("cuda", "cholesky_qr", 64, 1.0), row("cuda", "fast_qr", 64, 0.5)]
        assert by_device.choose_solver(PowerQR(by_device=True), "cuda", 64, F32).solver == Fast()
        assert by_device.choose_solver(PowerQR(steps=2, by_device=True), "cuda", 64, F32).solver == CholeskyQR.equal_to(
            PowerQR(steps=2), F32
        )
    finally:
        del BasisSolver.members["fast_qr"]


def test_a_first_basis_is_decomposed_on_the_host_and_steps_wait_for_nothing() -> None:
    solver, a = PowerQR(by_device=True), definite(3, ORDER, F32)
    eye = torch.eye(ORDER).repeat(3, 1, 1)
    first = solver.basis(a, eye, True)
    second = solver.basis(a + a.flip(-2, -1), first.q, False)
    with accelerator("cuda") as run:
        given, start = a.to(run.device), eye.to(run.device)
        with accelerator("cuda") as counts:
            ours = solver.basis(given, start, True)
        assert (counts.waits, counts.downloads, counts.uploads) == (1, 1, 3)
        with accelerator("cuda") as counts:
            step, diagonal = solver.basis_and_diagonal(given + given.flip(-2, -1), ours.q, False)
        assert (counts.waits, counts.downloads, counts.uploads) == (0, 0, 0)
        assert torch.equal(ours.q.cpu(), first.q) and ours.ok.cpu().all() and step.ok.cpu().all()
        assert torch.allclose(step.q.cpu(), second.q, atol=1e-4) and diagonal is None


@pytest.mark.parametrize("rank", [1, 4, 64])
@pytest.mark.parametrize("spike", [0.0, 1e2, 1e8])
def test_a_basis_follows_new_directions_on_a_device_as_on_a_cpu(rank: int, spike: float) -> None:
    """Gradients of low rank, and one that outweighs all others, make columns of A Q nearly parallel."""
    solver, generator, d = PowerQR(by_device=True), torch.Generator().manual_seed(0), 64
    a, fall = torch.zeros(2, d, d), 1 / (1 + torch.arange(float(d)))[:, None]
    ours = theirs = torch.eye(d).repeat(2, 1, 1)
    with accelerator("cuda") as run:
        for refresh in range(10):
            for step in range(10 if refresh else 2):
                g = (
                    torch.randn(2, d, rank, generator=generator)
                    * fall
                    * (1 + spike * (refresh == 5 and step == 9)) ** 0.5
                )
                a = 0.95 * a + 0.05 * g @ g.mT
            theirs = solver.basis(a, theirs, refresh == 0).q
            found = solver.basis(a.to(run.device), ours.to(run.device), refresh == 0)
            assert found.ok.cpu().all()
            ours = found.q.cpu()
            assert float((ours.mT @ ours - torch.eye(d)).abs().max()) <= 1e-5
            assert off_diagonal(a, ours) <= 1.2 * off_diagonal(a, theirs) + 1e-3


def off_diagonal(a: Tensor, q: Tensor) -> float:
    """||B - diag B||_F / ||B||_F of B = Q^T A Q, over the stack."""
    b = q.mT @ a @ q
    return float((b - torch.diag_embed(b.diagonal(dim1=-2, dim2=-1))).norm() / b.norm())


@pytest.mark.parametrize("solver", [Eigh(on_host=True), EighBasis(on_host=True)], ids=["root", "basis"])
def test_a_decomposition_on_the_host_waits_once_and_marks_bad_matrices(solver: Eigh | EighBasis) -> None:
    a = definite(3, ORDER, F32)
    a[1] = torch.nan

    def solve(a: Tensor) -> tuple[Tensor, Tensor]:
        if isinstance(solver, Eigh):
            return solver.root(a, Fraction(1, 4))[:2]
        found = solver.basis(a, a, True)
        return found.q, found.ok

    value, ok = solve(a)
    with accelerator("cuda") as run:
        given = a.to(run.device)
        with accelerator("cuda") as counts:
            ours, known = solve(given)
        assert (counts.waits, counts.downloads, counts.uploads) == (1, 1, 3)
        assert known.tolist() == ok.tolist() == [True, False, True]
        assert torch.equal(ours.cpu()[[0, 2]], value[[0, 2]])


def test_a_root_on_a_device_is_an_iteration_with_the_same_ridge() -> None:
    solver, a = Eigh(**RIDGE, by_device=True), definite(3, 128, F64)
    for exponent in (Fraction(1, 2), Fraction(1, 4), Fraction(1, 8)):
        expected = solver.root(a, exponent)
        with accelerator("cuda") as run:
            found = solver.root(a.to(run.device), exponent)
            assert torch.allclose(found.value.cpu(), expected.value, rtol=1e-5, atol=1e-6)
            assert found.ok.cpu().all() and bool((found.iterations.cpu() > 0).all())


def test_an_optimizer_says_what_is_chosen() -> None:
    values = [("w", torch.randn(ORDER, 20))]
    on_cpu = eigengraft.Optimizer([(name, nn.Parameter(x)) for name, x in values], "soap_fitted")
    lines = on_cpu.solver_choices("cuda")
    assert [line.split(":")[0] for line in lines] == [
        f"update.eigenbasis.solver, order {order} on cuda" for order in (20, ORDER)
    ]
    assert on_cpu.solver_choices() == [] and "cholesky_qr" not in repr(on_cpu)
    with accelerator("cuda") as run:
        named = [(name, nn.Parameter(x.to(run.device))) for name, x in values]
        shown = repr(eigengraft.Optimizer(named, "soap_fitted"))
        assert all(line in shown for line in lines)


def test_no_reference_leaves_a_solver_to_the_device() -> None:
    for name in shipped_recipes():
        if name.startswith("reference/"):
            assert '"by_device":true' not in eigengraft.load_recipe(name).model_dump_json()
