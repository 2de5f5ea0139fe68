"""Transport by marginals: sums of second moments against gradients that are remembered, in float64."""

from typing import Any

import pytest
import torch
from torch import Tensor

from eigengraft import load_recipe
from eigengraft.errors import RecipeError
from eigengraft.preconditioners.algebra.proportional_fitting import fit_
from eigengraft.preconditioners.kronecker.marginals import marginals

from ...trajectories import normal, random_gradients
from ..test_statistics import Stepper, times

BETA = 0.9


def soap(**more: Any) -> dict[str, Any]:
    """SOAP refreshed at updates 2, 5, 8, ..."""
    return {
        "kind": "eigenbasis",
        "inner": [{"kind": "momentum", "beta": BETA}, {"kind": "rms", "beta": BETA}],
        "statistic": {"kind": "gram", "beta": BETA},
        "refresh": {"kind": "every", "steps": 3, "start": 2, "offset": 2, "stagger": "none"},
        "transport": "marginals",
        **more,
    }


def alone(inner: str) -> dict[str, Any]:
    """With no first moment whose size in v would count, and statistics that hold what the second moments hold."""
    return soap(inner=[{"kind": inner, "beta": BETA}], timing="lagged")


def skewed(shape: tuple[int, ...], steps: int) -> list[Tensor]:
    """Gradients of which every axis has directions of its own sizes."""
    out = []
    for (gradient,) in random_gradients([shape], steps):
        for axis, n in enumerate(shape):
            gradient = times(gradient, normal(n, n, seed=90 + axis), axis)
        out.append(gradient)
    return out


def sums(x: Tensor, axis: int) -> Tensor:
    """Over all axes but one."""
    return x.movedim(axis, 0).flatten(1).sum(1) if x.ndim > 1 else x


def squares_in(gradients: list[Tensor], bases: list[Tensor]) -> Tensor:
    """The running mean of squared gradients had they been in this basis from the first one on."""
    v = torch.zeros_like(gradients[0])
    for gradient in gradients:
        for axis, q in enumerate(bases):
            gradient = times(gradient, q.T, axis)
        v = BETA * v + (1 - BETA) * gradient.square()
    return v


@pytest.mark.parametrize("more", [{}, {"timing": "lagged"}, {"statistic_frame": "basis"}], ids=str)
@pytest.mark.parametrize("shape", [(6, 9), (4, 5, 3)])
def test_what_a_statistic_knows_is_the_sum_of_second_moments(shape: tuple[int, ...], more: dict[str, str]) -> None:
    """Of all gradients that the second moments hold, in the basis of now: to the rounding of Q, 3 refreshes old."""
    stepper, gradients = Stepper(soap(**more), shape), skewed(shape, 11)
    for gradient in gradients:
        stepper.step(gradient)
    state = stepper.state
    bases = [state[f"basis.{axis}"] for axis in range(len(shape))]
    true = squares_in(gradients, [q[0] for q in bases])
    for axis, q in enumerate(bases):
        known = marginals(state[f"factor.{axis}"], None if "statistic_frame" in more else q)[0]
        torch.testing.assert_close(known, sums(true, axis), rtol=1e-10, atol=0)


def test_the_second_moment_of_a_vector_is_known_whole() -> None:
    """A vector has one axis: after a refresh its second moments are as if the basis had always been this one."""
    stepper, gradients = Stepper(alone("rms"), (7,)), skewed((7,), 8)
    for gradient in gradients:
        stepper.step(gradient)
    (v,) = stepper.state.scope("inner").scope("rms")["v"]
    torch.testing.assert_close(v, squares_in(gradients, [stepper.state["basis.0"][0]]), rtol=1e-9, atol=0)


@pytest.mark.parametrize("shape", [(6, 9), (4, 5, 3)])
def test_the_last_refresh_leaves_sums_nearer_to_the_truth(shape: tuple[int, ...]) -> None:
    """After the refresh at update 11, in relative distance of sums by axis; exact transport flattens them."""
    distances = {}
    for transport in ("exact", "marginals"):
        stepper, gradients = Stepper(soap(transport=transport), shape), skewed(shape, 11)
        for gradient in gradients:
            stepper.step(gradient)
        true = squares_in(gradients, [stepper.state[f"basis.{axis}"][0] for axis in range(len(shape))])
        v = stepper.state.scope("inner").scope("rms")["v"][0]
        distances[transport] = max(float((sums(v, a) / sums(true, a) - 1).abs().max()) for a in range(len(shape)))
    assert distances["marginals"] < distances["exact"] / 3


def test_factored_second_moments_go_half_of_the_way_to_the_sums() -> None:
    """r and c become the roots of what is carried over, (R*R)^T r, times the true sums in the new basis."""
    stepper, gradients = Stepper(alone("adafactor"), (6, 9)), skewed((6, 9), 8)
    inside, sizes = stepper.state.scope("inner").scope("adafactor"), ("row", "column")
    for gradient in gradients[:-1]:
        stepper.step(gradient)
    old = [stepper.state[f"basis.{axis}"][0].clone() for axis in range(2)]
    before = [BETA * inside[name][0] for name in sizes]
    last = times(times(gradients[-1], old[0].T, 0), old[1].T, 1).square()
    stepper.step(gradients[-1])  # the newest gradient first, then the refresh
    new = [stepper.state[f"basis.{axis}"][0] for axis in range(2)]
    true = squares_in(gradients, new)
    for axis, name in enumerate(sizes):
        own = before[axis] + (1 - BETA) * last.mean(1 - axis)
        root = ((old[axis].T @ new[axis]).square().T @ own * true.mean(1 - axis)).sqrt()
        torch.testing.assert_close(inside[name][0], root * (own.sum() / root.sum()), rtol=1e-9, atol=0)


def test_one_factor_of_a_second_moment_is_known_whole() -> None:
    """Where the other axis has no basis nothing counts twice."""
    side = {"kind": "gram", "beta": BETA, "axes": {"side": "left"}}
    one = soap(inner=[{"kind": "adafactor", "beta": BETA}], timing="lagged", statistic=side)
    stepper, gradients = Stepper(one, (6, 9)), skewed((6, 9), 8)
    for gradient in gradients:
        stepper.step(gradient)
    true = squares_in(gradients, [stepper.state["basis.0"][0], torch.eye(9, dtype=torch.float64)])
    inside = stepper.state.scope("inner").scope("adafactor")
    torch.testing.assert_close(inside["row"][0], true.mean(1), rtol=1e-9, atol=0)
    torch.testing.assert_close(inside["column"][0], true.mean(0), rtol=1e-9, atol=0)


def test_products_of_factors_are_fitted_exactly() -> None:
    rows, columns, depth = (normal(1, n, seed=n).square() for n in (4, 6, 3))
    d = [normal(1, n, seed=10 + n).square() for n in (4, 6, 3)]
    for sought in ({0: d[0], 1: d[1] * 7.0, 2: d[2] / 9.0}, {1: d[1]}):
        v = torch.einsum("na,nb,nc->nabc", rows, columns, depth)
        new = [sought.get(axis, own) for axis, own in enumerate((rows, columns, depth))]
        expected = torch.einsum("na,nb,nc->nabc", *new)
        expected *= v.sum() / expected.sum()
        torch.testing.assert_close(fit_(v.clone(), sought), expected, rtol=1e-12, atol=0)


def test_axes_are_taken_alike() -> None:
    v, d0, d1 = (normal(*shape, seed=3).square() for shape in ((2, 5, 7), (2, 5), (2, 7)))
    straight, turned = fit_(v.clone(), {0: d0, 1: d1}), fit_(v.mT.clone(), {0: d1, 1: d0})
    torch.testing.assert_close(turned.mT, straight, rtol=1e-12, atol=0)


def test_sums_that_nobody_knows_change_nothing() -> None:
    """Where rounding hides a sum, or a row has no second moment, the row is left to the other axis."""
    v = normal(1, 4, 6, seed=1).square()
    v[0, 2] = 0
    d = torch.tensor([[3.0, 0.0, 2.0, 1.0]], dtype=torch.float64)
    new = fit_(v.clone(), {0: d})
    assert torch.equal(new[0, 2], v[0, 2]) and new.isfinite().all()
    one = (new[0, 1] / v[0, 1]).unique()
    assert float(one.max() - one.min()) < 1e-12  # of its own sum only the common factor has changed
    zero = torch.zeros_like(v)
    assert torch.equal(fit_(zero.clone(), {0: d}), zero)


@pytest.mark.parametrize("spike", [8, 9, 10])
@pytest.mark.parametrize("inner", ["rms", "adafactor"])
def test_updates_after_a_refresh_are_within_their_limit(inner: str, spike: int) -> None:
    """RMS of m / sqrt(v) after the change of basis, wherever between two refreshes the spike comes: at most what a v
    without differences gives, by the moments before it, or what one gradient that outweighs all others gives."""
    moments = [{"kind": "momentum", "beta": BETA}, {"kind": inner, "beta": BETA}]
    stepper, gradients = Stepper(soap(inner=moments), (12, 16)), skewed((12, 16), 20)
    inside, excess = stepper.state.scope("inner"), []

    def moments_now() -> tuple[Tensor, Tensor]:
        kept = inside.scope(inner)
        v = kept["v"] if inner == "rms" else kept["row"].mT @ kept["column"] / kept["row"].mean()
        return inside.scope("momentum")["m"].square(), v

    refresh = type(stepper.stage).refresh

    def watched(self: Any, state: Any, gradient: Tensor, context: Any) -> None:
        m2, v = moments_now()
        even = float(m2.mean() / v.mean())
        refresh(self, state, gradient, context)
        m2, v = moments_now()
        excess.append(float((m2 / v).mean()) / max(even, 1 - BETA))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(stepper.stage), "refresh", watched)
        for t, gradient in enumerate(gradients):
            stepper.step(gradient * (1e4 if t == spike else 1.0))
    assert max(excess[1:]) <= 1 + 1e-12
    assert max(excess[1:]) > 1 - 1e-12  # it was reached


INSIDE = "update.eigenbasis"


@pytest.mark.parametrize(
    ("source", "changes", "message"),
    [
        ("soap_fitted", {f"{INSIDE}.statistic.beta": 0.9}, r"second moments .* of the statistic, 0\.9, got 0\.95"),
        (
            "soap_fitted",
            {f"{INSIDE}.inner": ["momentum", "sign"]},
            r"second moments .* of the statistic, 0\.95, got none .*Slot\(decay=beta\).*exact",
        ),
        ("soap_fitted", {f"{INSIDE}.statistic.interval": 2}, r"the squares of every gradient: .*'interval': 2"),
        ("soap_kl", {f"{INSIDE}.statistic.interval": 2}, r"the squares of every gradient: .*'kind': 'bregman'"),
        (
            "soap_kl",
            {f"{INSIDE}.inner": ["momentum", {"kind": "adafactor", "beta": 0.95}]},
            "second moments of every entry with a statistic that is whitened, got factored ones",
        ),
        ("soap_fitted", {f"{INSIDE}.solver": {"kind": "subspace", "rank": 4}}, "all columns of a basis"),
    ],
)
def test_what_does_not_know_sums_is_refused(source: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=rf"{INSIDE}.transport: 'marginals' needs {message}"):
        load_recipe(source, {f"{INSIDE}.transport": "marginals", **changes})
