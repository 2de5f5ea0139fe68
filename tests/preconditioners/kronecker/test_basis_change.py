"""State of a chain whose basis changes: rotations against their definition and their cost, sums of second moments
against gradients that are remembered. In float64 where nothing else is said."""

from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from eigengraft import load_recipe
from eigengraft.errors import RecipeError
from eigengraft.preconditioners import RMS, Momentum
from eigengraft.preconditioners.algebra.products import rotate
from eigengraft.preconditioners.base import chain_slots
from eigengraft.preconditioners.kronecker.basis_change import Turn, fit_, marginals, transport
from eigengraft.slots import State

from ...refusals import refused
from ...trajectories import normal, random_gradients
from ..algebra.test_products import Products, defined
from ..test_statistics import Stepper, times

CHAIN = (Momentum(), RMS())
FIRST, SECOND = "inner.momentum/m", "inner.rms/v"


def bases(block: tuple[int, ...], seed: int, dtype: torch.dtype = torch.float64) -> dict[int, Tensor]:
    """Orthonormal bases `[2, d, d]` of every axis."""
    return {axis: torch.linalg.qr(normal(2, d, d, seed=seed + axis))[0].to(dtype) for axis, d in enumerate(block)}


def moments(block: tuple[int, ...]) -> dict[str, Tensor]:
    return {FIRST: normal(2, *block, seed=1), SECOND: normal(2, *block, seed=2).square()}


def moved(
    block: tuple[int, ...], turns: dict[int, Turn], how: Literal["exact", "marginals", "permute", "none"]
) -> dict[str, Tensor]:
    tensors = moments(block)
    transport(chain_slots(CHAIN, block), State(tensors, block, "inner"), turns, how)
    return tensors


@pytest.mark.parametrize("block", [(7,), (9, 4), (6, 5, 3), (6, 5, 3, 3)], ids=str)
def test_all_axes_turn_as_each_is_defined_to(block: tuple[int, ...]) -> None:
    """Rounding of float64 over all sums: 1e-12 of entries of about 1."""
    old, new = bases(block, 10), bases(block, 20)
    order = {
        axis: torch.stack([torch.randperm(d, generator=seeded(axis)) for _ in range(2)]) for axis, d in enumerate(block)
    }
    rotations = {axis: old[axis].mT @ new[axis] for axis in old}
    before, first = moments(block), defined(moments(block)[FIRST], {axis: r.mT for axis, r in rotations.items()})
    second = {
        "exact": defined(before[SECOND], {axis: r.square().mT for axis, r in rotations.items()}),
        "permute": defined(
            before[SECOND], {axis: torch.eye(len(o[0]), dtype=torch.float64)[o] for axis, o in order.items()}
        ),
        "none": before[SECOND],
    }
    for how in ("exact", "permute", "none"):
        found = moved(block, {axis: Turn(new[axis], old[axis], order[axis]) for axis in old}, how)
        torch.testing.assert_close(found[FIRST], before[FIRST] if how == "none" else first, rtol=0, atol=1e-12)
        torch.testing.assert_close(found[SECOND], second[how], rtol=0, atol=1e-12)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_a_basis_that_stays_moves_nothing() -> None:
    block = (6, 5)
    old = bases(block, 10)
    with Products() as counted:
        found = moved(block, {axis: Turn(q.clone(), q) for axis, q in old.items()}, "exact")
    assert counted.operations == 0
    assert all(torch.equal(found[name], value) for name, value in moments(block).items())


@pytest.mark.parametrize(
    ("block", "how", "expected"),
    [
        ((8, 2), "permute", "by parts"),  # 2 d^2 rest twice is less than 2 d^3 + 2 d^2 rest
        ((4, 32), "permute", "whole"),
        ((8, 2), "exact", "whole"),  # R is needed for the squares, which are one more product
    ],
)
def test_a_rotation_is_made_where_it_saves_operations(
    block: tuple[int, int], how: Literal["exact", "permute"], expected: str
) -> None:
    d, rest = block
    old, new = bases(block, 10)[0], bases(block, 20)[0]
    with Products() as counted:
        moved(block, {0: Turn(new, old, torch.arange(d).expand(2, d))}, how)
    product, rotation = 2 * 2 * d * d * rest, 2 * 2 * d**3
    assert (
        counted.operations
        == {"by parts": 2 * product, "whole": rotation + (2 if how == "exact" else 1) * product}[expected]
    )


COPIES = {(64, 48, 3, 3): 1, (24, 40, 3): 1, (24, 20, 3): 0, (96, 90, 20): 0, (64, 48): 0}


@pytest.mark.parametrize(("block", "copies"), COPIES.items(), ids=str)
def test_rotations_copy_a_block_only_for_short_last_axes(block: tuple[int, ...], copies: int) -> None:
    x, matrices = normal(2, *block, seed=1), bases(block, 10)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profile:
        rotate(x, matrices)
    copied = [
        event
        for event in profile.events()
        if event.name == "aten::copy_" and _numel(event.input_shapes[0]) == x.numel()
    ]
    assert len(copied) == copies


def _numel(shape: list[int]) -> int:
    return torch.Size(shape).numel()


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
def test_the_diagonal_of_a_statistic_is_the_sum_of_second_moments(shape: tuple[int, ...], more: dict[str, str]) -> None:
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
    for how in ("exact", "marginals"):
        stepper, gradients = Stepper(soap(transport=how), shape), skewed(shape, 11)
        for gradient in gradients:
            stepper.step(gradient)
        true = squares_in(gradients, [stepper.state[f"basis.{axis}"][0] for axis in range(len(shape))])
        v = stepper.state.scope("inner").scope("rms")["v"][0]
        distances[how] = max(float((sums(v, a) / sums(true, a) - 1).abs().max()) for a in range(len(shape)))
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
    ("source", "changes", "says"),
    [
        ("soap_fitted", {f"{INSIDE}.statistic.beta": 0.9}, (0.9, 0.95)),
        (
            "soap_fitted",
            {f"{INSIDE}.inner": ["momentum", "sign"]},
            (0.95, "none", "Slot(decay=beta)", "exact"),
        ),
        ("soap_fitted", {f"{INSIDE}.statistic.interval": 2}, ("interval", 2)),
        ("soap_kl", {f"{INSIDE}.statistic.interval": 2}, ("kind", "bregman")),
        (
            "soap_kl",
            {f"{INSIDE}.inner": ["momentum", {"kind": "adafactor", "beta": 0.95}]},
            (),
        ),
        ("soap_fitted", {f"{INSIDE}.solver": {"kind": "subspace", "rank": 4}}, ()),
    ],
)
def test_stages_whose_second_moments_have_other_sums_are_refused(
    source: str, changes: dict[str, Any], says: tuple[object, ...]
) -> None:
    with refused(RecipeError, f"{INSIDE}.transport", "marginals", *says):
        load_recipe(source, {f"{INSIDE}.transport": "marginals", **changes})
