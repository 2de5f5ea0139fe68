"""Differential equations: their solutions, the derivatives of the network, the loss, and runs that continue."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from eigengraft import RecipeError
from eigengraft.component import validated
from eigengraft.experiments import Tick, load_experiment, train
from eigengraft.experiments.tasks import DifferentialEquation, equations
from eigengraft.experiments.tasks.equations import (
    AllenCahn,
    Burgers,
    Equation,
    EquationNetwork,
    FourierMethod,
    Grid,
    KortewegDeVries,
    Partials,
    Poisson,
    Wave,
    solution_on_grid,
)
from eigengraft.testing import check_task

from ...refusals import refused

EQUATIONS = (Poisson(), Wave(), Burgers(), AllenCahn(), KortewegDeVries())
EXAMPLE = Path(__file__).resolve().parents[3] / "experiments" / "examples" / "burgers.yaml"
pytestmark = pytest.mark.slow


def kinds(equation: Equation) -> str:
    return str(equation.model_dump()["kind"])


def distance(one: Grid, other: Grid) -> float:
    return float(np.linalg.norm(one - other) / np.linalg.norm(other))


@pytest.mark.parametrize("equation", EQUATIONS, ids=kinds)
def test_the_laws_of_tasks(equation: Equation) -> None:
    task = DifferentialEquation(equation=equation, layers=2, width=8, batch_size=16)
    assert "a mean over targets" in str(check_task(task))


@pytest.mark.parametrize("equation", [Wave(), KortewegDeVries()], ids=kinds)
def test_derivatives_are_those_of_automatic_differentiation(equation: Equation) -> None:
    """Series carried forward against one backward pass an order, in float64: rounding alone differs."""
    network = EquationNetwork(equation, layers=2, width=6, harmonics=2).double()
    x, t = (torch.linspace(0, 0.9, 5, dtype=torch.float64).roll(shift).requires_grad_() for shift in (0, 2))
    found = network.partials(x, t, (3, 2))
    for axis, series in ((x, found.x), (t, found.t)):
        expected = network.partials(x, t, (0, 0)).u
        for derivative in series:
            (expected,) = torch.autograd.grad(expected.sum(), axis, create_graph=True)
            torch.testing.assert_close(derivative, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("equation", [Poisson(waves=3), Wave(speed=1.5)], ids=kinds)
def test_solutions_in_closed_form_solve_their_equation(equation: Equation) -> None:
    """Central differences of step h have errors h^2 f''''/12: below 1e-4 of the largest second derivative."""
    h = 1e-3
    x, t = np.linspace(0.2, 0.8, 5), np.linspace(0.2, 0.8, 4)
    stencil = {shift: equation.solution(x + shift * h, t) for shift in (-1, 0, 1)}
    later, earlier = (equation.solution(x, t + sign * h) for sign in (1, -1))
    u, u_xx = stencil[0], (stencil[1] - 2 * stencil[0] + stencil[-1]) / h**2
    u_tt = (later - 2 * u + earlier) / h**2
    points = [torch.from_numpy(np.broadcast_to(axis, u.shape).copy()) for axis in (x, t[:, None])]
    zero = torch.zeros_like(points[0])
    partials = Partials(torch.from_numpy(u), (zero, torch.from_numpy(u_xx)), (zero, torch.from_numpy(u_tt)))
    residual = equation.residual(partials, *points)
    assert float(residual.abs().max()) < 1e-4 * max(abs(u_xx).max(), abs(u_tt).max())


@pytest.mark.parametrize("viscosity", [0.02, 0.3])
def test_the_solution_of_burgers_is_that_of_a_spectral_method(viscosity: float) -> None:
    """Cole-Hopf's integrals and ETDRK4 share nothing; the odd solution is periodic too. Both are exact to 1e-9."""
    equation = Burgers(viscosity=viscosity)
    x, t, u = solution_on_grid(equation)
    method = FourierMethod(
        x_range=(-1.0, 1.0),
        linear=lambda k: -viscosity * k**2,
        nonlinear=lambda u: -(u**2) / 2,
        outer=lambda k: 1j * k,
        points=256,
        step=1 / 500,
    )
    assert distance(method.solve(equation.initial, x, t), u) < 1e-8


def test_the_shock_of_burgers_has_its_published_slope() -> None:
    """max |u_x| at x = 0 is 152.00516 at t = 1.6037 / pi, at nu = 0.01 / pi (Basdevant et al. 1986, table 1)."""
    h = 1e-5
    u = Burgers().solution(np.array([-h, h]), np.array([0.0, 1.6037 / math.pi]))[1]
    assert (u[0] - u[1]) / (2 * h) == pytest.approx(152.00516, rel=1e-4)  # central difference: u''' h^2 / 6


@pytest.mark.parametrize(("equation", "most"), [(AllenCahn(), 1e-5), (KortewegDeVries(), 1e-6)], ids=["ac", "kdv"])
def test_a_finer_spectral_method_gives_the_same_solution(equation: AllenCahn | KortewegDeVries, most: float) -> None:
    """Twice the points, steps half as long. x^2 cos(pi x) has a kink at its ends, which limits Allen-Cahn."""
    x, t, u = solution_on_grid(equation)
    points, step = (2048, 1 / 1000) if equation.kind == "allen_cahn" else (1024, 1 / 4000)
    fine = equation.method(points, step).solve(equation.initial, x, t[:9])
    assert distance(u[:9], fine) < most


@pytest.mark.parametrize("equation", [AllenCahn(diffusion=0.05), KortewegDeVries(dispersion=0.2)], ids=kinds)
def test_another_method_gives_the_same_solution(equation: AllenCahn | KortewegDeVries) -> None:
    """Residual by differentiation matrices of sines (Trefethen 2000, chapter 3), time by scipy to 1e-8."""
    from scipy.integrate import solve_ivp

    n = 32
    x = -1 + 2 * np.arange(n) / n
    k = 1j * math.pi * np.fft.fftfreq(n, 1 / n)
    k[n // 2] = 0
    first = np.fft.ifft(k[:, None] * np.fft.fft(np.eye(n), axis=0), axis=0).real

    def rate(_: float, u: Grid) -> Grid:
        if isinstance(equation, AllenCahn):
            return equation.diffusion * first @ (first @ u) + equation.reaction * (u - u**3)
        return -u * (first @ u) - equation.dispersion**2 * (first @ (first @ (first @ u)))

    def smooth(x: Grid) -> Grid:
        return np.asarray(np.cos(math.pi * x) / 2)

    t = np.array([0.0, 0.1])
    other = solve_ivp(rate, (0, 0.1), smooth(x), method="DOP853", t_eval=t, rtol=1e-8, atol=1e-10).y.T
    assert distance(equation.method(256, 1 / 2000).solve(smooth, x, t), other) < 1e-6


@pytest.mark.parametrize("equation", EQUATIONS, ids=kinds)
def test_the_loss_is_the_weighted_sum_of_its_definition(equation: Equation) -> None:
    task = DifferentialEquation(
        equation=equation,
        width=8,
        batch_size=16,
        initial_weight=7.0 if equation.evolves else None,
        boundary_weight=None if equation.periodic else 3.0,
    )
    rows, targets = (part.double() for part in task.load().batch(1, 2))
    network = task.new_model(0).double()
    assert isinstance(network, EquationNetwork)
    loss = task.loss(network(rows), targets)
    x, t, a, b, c = rows.unbind(1)
    partials = network.partials(x, t, equation.orders)
    start = torch.from_numpy(equation.initial(x.numpy()))
    at_start, at_ends = (c != 0) & (t == 0), (c != 0) & ((x == equation.x_range[0]) | (x == equation.x_range[1]))
    if not equation.evolves:
        at_start, at_ends = torch.zeros_like(at_start), c != 0
    expected = equation.residual(partials, x, t)[a != 0].square().mean()
    assert int((a != 0).sum()) == 16
    if equation.evolves:
        expected = expected + 7 * (partials.u - start)[at_start].square().mean()
        assert int(at_start.sum()) == 4
    if equation.at_rest:
        expected = expected + 7 * partials.t[0][b != 0].square().mean()
    if not equation.periodic:
        sides = [at_ends] if equation.evolves else [c != 0]
        groups = 1 if equation.evolves else 2
        expected = expected + 3 * groups * sum(partials.u[side].square().mean() for side in sides)
        assert int(at_ends.sum()) == 4 * groups
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)  # rows are rounded to float32


@pytest.mark.parametrize("equation", EQUATIONS, ids=kinds)
def test_the_solution_keeps_the_conditions(equation: Equation) -> None:
    x, _, u = solution_on_grid(equation)
    np.testing.assert_allclose(u[0], equation.initial(x), atol=1e-4)  # the series of Allen-Cahn's kink
    if not equation.periodic:
        np.testing.assert_allclose(u[:, [0, -1]], 0, atol=1e-12)
    if not equation.evolves:
        np.testing.assert_allclose(u[[0, -1]], 0, atol=1e-12)


def test_the_validation_loss_is_the_relative_error() -> None:
    """The error of u = 0 is 1; that of a network with output m is |m - solution| / |solution|."""
    task = DifferentialEquation(equation=Wave(), width=4)
    data, network = task.load(), task.new_model(0)
    u = solution_on_grid(Wave())[2]
    assert isinstance(network, EquationNetwork)
    with torch.no_grad():
        network.head.weight.zero_()
        assert task.evaluate(network, data, torch.device("cpu")).val_loss == pytest.approx(1, rel=1e-6)
        network.head.bias.fill_(0.3)
    expected = float(np.linalg.norm(0.3 - u) / np.linalg.norm(u))
    assert task.evaluate(network, data, torch.device("cpu")).val_loss == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"equation": "allen_cahn", "harmonics": 0}, ("harmonics", 1, "allen_cahn")),
        ({"equation": "allen_cahn", "boundary_weight": 1.0}, ("boundary_weight", "allen_cahn")),
        ({"equation": "poisson", "initial_weight": 1.0}, ("initial_weight",)),
        ({"equation": "burger"}, ("equation", "burger", "burgers")),
    ],
)
def test_options_without_effect_are_refused(fields: dict[str, object], says: tuple[object, ...]) -> None:
    with refused(RecipeError, *says):
        validated(DifferentialEquation, fields)


class _StoppedError(Exception):
    """Ends a run at a chosen step."""


def test_a_run_that_was_stopped_continues_bit_for_bit(tmp_path: Path) -> None:
    fields = ["task.width=8", "task.batch_size=8", "steps=9", "schedule.warmup_steps=2"]
    experiment = load_experiment(EXAMPLE, [*fields, "checkpoint_every=4", "log_every=1", "eval_every=3"])

    def stop(tick: Tick) -> None:
        if tick.step == 6:
            raise _StoppedError

    whole = train(experiment, tmp_path / "whole")
    with pytest.raises(_StoppedError):
        train(experiment, tmp_path / "parts", stop)
    continued = train(experiment, tmp_path / "parts")
    assert continued.val_loss == whole.val_loss is not None
    one, other = (
        [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("whole", "parts")
    )
    assert [(row["loss"], row["val_loss"]) for row in one] == [(row["loss"], row["val_loss"]) for row in other]


def test_the_fingerprint_ignores_the_last_bits_of_the_solution(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sines of different processors differ in the last bits, and a digest of them would tell equal data apart."""
    task = DifferentialEquation(equation=Burgers(viscosity=0.1), layers=1, width=4)
    x, t, u = solution_on_grid(task.equation)

    def digest(error: float) -> str:
        wrong = u + error * np.cos(np.arange(x.size))
        monkeypatch.setattr(equations, "solution_on_grid", lambda equation: (x, t, wrong))
        return task.load().fingerprint.sha256

    assert digest(1e-12) == digest(-1e-12) == digest(0.0) != digest(1e-3)
