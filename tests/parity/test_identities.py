"""Identities between configurations, and properties that the mathematics promises, in float64."""

from collections.abc import Mapping
from fractions import Fraction
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import pytest
import torch
from pydantic import Field
from torch import Tensor, nn

from eigengraft import Optimizer, State, StepContext
from eigengraft.preconditioners import (
    BasisSolver,
    Eigenbasis,
    EighBasis,
    Gram,
    GramNewtonSchulz,
    NewtonSchulz,
    Shampoo,
    chain_slots,
)
from eigengraft.preconditioners.roots.base import Basis

from ..trajectories import distance, follow, normal, random_gradients, recipe, rotation

pytestmark = pytest.mark.slow

NONE: dict[str, Any] = {"kind": "every", "steps": 1, "stagger": "none"}


def plain(*stages: Mapping[str, Any] | str, **more: Any) -> dict[str, Any]:
    """A recipe of these stages for every parameter, without decay."""
    return {"update": list(stages), "routes": [], **more}


def gathered(stage: Shampoo | Eigenbasis, gradients: list[Tensor]) -> tuple[State, StepContext]:
    """A stage that has observed the gradients `[1, *block]` and refreshed once."""
    block = tuple(gradients[0].shape[1:])
    slots = {f"{p}/{n}": s.allocate(1, torch.float64, torch.device("cpu")) for p, n, s in chain_slots((stage,), block)}
    state = State(slots, block, stage.label)
    for t, gradient in enumerate(gradients, start=1):
        context = StepContext(np.array([t]), np.zeros(1), np.zeros(1, dtype=np.int64))
        stage.observe(state, gradient, context)
    stage.refresh(state, gradients[-1], context.slice_rows(0, 1, first=True))
    return state, context


@pytest.mark.parametrize("shape", [(6, 6), (6, 9), (9, 4)])
def test_factored_soap_is_shampoo_of_power_one_half(shape: tuple[int, int]) -> None:
    """Q (Q^T G / sqrt(r c^T / mean r)) = tr(L)^(1/2) L^(-1/2) G R^(-1/2) for fixed statistics (Vyas et al. 2024).

    L and R are means over the gradients (a sum over K of them, / K), r and c means of squares in their eigenbasis.
    1e-9: inverse roots of matrices of condition 1e2 to 1e3 lose three or four digits of sixteen.
    """
    gradients = [normal(1, *shape, seed=k) for k in range(40)]
    inner = {"kind": "adafactor", "decay_power": 1.0}  # 1 - t^-1: a plain mean
    soap = Eigenbasis.model_validate({"inner": inner, "statistic": Gram(beta=1.0), "solver": EighBasis()})
    state, _ = gathered(soap, gradients)
    for t, gradient in enumerate(gradients, start=1):
        context = StepContext(np.array([t]), np.zeros(1), np.zeros(1, dtype=np.int64))
        ours = soap.apply(state, gradient, gradient, context)
    shampoo = Shampoo(statistic=Gram(beta=1.0), exponent=Fraction(1, 2))
    fixed, context = gathered(shampoo, gradients)
    trace = fixed["factor.0"].diagonal(dim1=1, dim2=2).sum() / len(gradients)
    theirs = trace.sqrt() * len(gradients) * shampoo.apply(fixed, gradients[-1], gradients[-1], context)
    assert (ours - theirs).abs().max() <= 1e-9 * theirs.abs().max()


@pytest.mark.parametrize("shape", [(6, 6), (5, 8), (8, 5)])
@pytest.mark.parametrize("stage", ["shampoo", "spectral"])
def test_power_one_quarter_without_accumulation_is_the_polar_factor(stage: str, shape: tuple[int, int]) -> None:
    """(G G^T)^(-1/4) G (G^T G)^(-1/4) = U V^T for G = U S V^T.

    The larger of the two factors is singular for a rectangular G: its null space must not enter, hence the
    pseudo-inverse with a cutoff far below the squared singular values. 1e-10: squaring costs digits twice.
    """
    solver = {"kind": "eigh", "eps": 1e-12, "relative": True, "deficiency": "pseudo_inverse"}
    configured = {
        "shampoo": {"kind": "shampoo", "statistic": Gram(beta=0.0), "solver": solver, "refresh": NONE},
        "spectral": {"kind": "spectral", "solver": "svd"},
    }
    init, gradients = [torch.zeros(shape, dtype=torch.float64)], random_gradients([shape], 6)
    path = follow(recipe(plain(configured[stage]), lr=1.0), init, gradients)[0]
    start = torch.zeros_like(path[0])
    for point, (gradient,) in zip(path, gradients, strict=True):
        u, _, vh = torch.linalg.svd(gradient, full_matrices=False)
        assert (start - point - u @ vh).abs().max() <= 1e-10
        start = point


class Relabeled(BasisSolver):
    """An eigenbasis whose columns are shuffled and flipped at random at every refresh."""

    kind: Literal["relabeled_for_test"] = "relabeled_for_test"
    seed: int = Field(default=0, description="of the shuffle")

    def basis(self, a: Tensor, q: Tensor, first: bool) -> Basis:
        q, _, ok = EighBasis().basis(a, q, first)
        generator = torch.Generator().manual_seed(self.seed + int(1e6 * float(a[0, 0, 0])) % 1000)
        order = torch.randperm(a.shape[-1], generator=generator)
        signs = torch.randint(0, 2, (a.shape[-1],), generator=generator) * 2 - 1
        return Basis(q[:, :, order] * signs, None, ok)


FACTORED = [{"kind": "momentum", "beta": 0.9, "nesterov": True}, {"kind": "adafactor", "beta": 0.9}]
FITTED = {"transport": "marginals", "statistic": {"kind": "gram", "beta": 0.9}}


@pytest.mark.parametrize(
    "more",
    [
        {"inner": [{"kind": "momentum", "beta": 0.9}, {"kind": "rms", "beta": 0.9}]},
        {"inner": FACTORED},
        {"inner": [{"kind": "rms", "beta": 0.9}, {"kind": "heavy_ball"}]},
        {"inner": ["sign"]},
        {"inner": [{"kind": "momentum", "beta": 0.9}, {"kind": "rms", "beta": 0.9}], **FITTED},
        {"inner": FACTORED, **FITTED},
    ],
    ids=["momentum rms", "momentum adafactor", "rms momentum", "sign", "fitted", "fitted factors"],
)
@pytest.mark.parametrize("shape", [(6, 6), (7,), (4, 3, 5)])
def test_relabelling_and_flipping_the_basis_changes_nothing(more: dict[str, Any], shape: tuple[int, ...]) -> None:
    """The state follows the columns, wherever they go and whatever their sign. 1e-10: rounding over 20 rotations.

    The first refresh comes when no statistic is singular: a null space has no basis of its own to relabel.
    """
    every = {"kind": "every", "steps": 3, "start": 12, "stagger": "none"}
    init, gradients = [torch.zeros(shape, dtype=torch.float64)], random_gradients([shape], 40)

    def path(solver: object) -> list[Tensor]:
        stage = {"kind": "eigenbasis", "refresh": every, "solver": solver, **more}
        return follow(recipe(plain(stage), lr=1.0), init, gradients)

    assert distance(path({"kind": "relabeled_for_test"}), path({"kind": "eigh"}), init) <= 1e-10


SOAP = {
    "kind": "eigenbasis",
    "inner": [{"kind": "momentum", "beta": 0.9}, {"kind": "rms", "beta": 0.9, "eps": 1e-3}],
    "solver": "eigh",
    "timing": "current",
    "refresh": NONE,
}
SHAMPOO = {"kind": "shampoo", "solver": {"kind": "eigh", "eps": 1e-6}, "refresh": NONE}
NEWTON = {**SHAMPOO, "solver": {"kind": "coupled_newton", "eps": 1e-3, "max_iterations": 100, "tolerance": 1e-12}}
EQUIVARIANT = {
    "shampoo": plain({"kind": "momentum"}, SHAMPOO),
    "shampoo, newton": plain({"kind": "momentum"}, NEWTON),
    "shampoo, grafted from sgd": plain({"kind": "graft", "direction": SHAMPOO, "magnitude": "identity"}),
    "soap_fitted": plain(SOAP),
    "soap, marginals": plain({**SOAP, "transport": "marginals", "statistic": {"kind": "gram", "beta": 0.9}}),
    "soap, momentum outside": plain({"kind": "momentum"}, {**SOAP, "inner": {"kind": "rms", "eps": 1e-3}}),
    "soap, factored": plain({**SOAP, "inner": {"kind": "adafactor", "beta": 0.9, "eps": 1e-2}}),
    "muon, svd": plain(
        {"kind": "momentum", "nesterov": True}, {"kind": "spectral", "solver": "svd"}, {"kind": "scale"}
    ),
    "muon, newton-schulz": plain({"kind": "momentum"}, "spectral", {"kind": "scale", "rule": "match_rms"}),
    "unit rms": plain({"kind": "momentum"}, {"kind": "normalize", "rule": "unit_rms"}, "clip_rms"),
}


@pytest.mark.parametrize("name", EQUIVARIANT)
@pytest.mark.parametrize("shape", [(6, 6), (5, 8)])
def test_rotating_the_problem_rotates_the_trajectory(name: str, shape: tuple[int, int]) -> None:
    """W0 -> U W0 V^T and G_t -> U G_t V^T give U W_t V^T: nothing depends on the coordinates.

    SOAP learns the current gradient first: a basis from earlier ones is arbitrary where they had nothing.
    The first statistics are singular, and what eigenvectors of their null space do is rounding: eps and ridges are
    chosen so large that rounding (1e-16) divided by them stays below the bound.
    """
    u, v = rotation(shape[0], 1), rotation(shape[1], 2)
    init, gradients = [normal(*shape, seed=5)], random_gradients([shape], 25)
    made = recipe(EQUIVARIANT[name], lr=0.1, weight_decay=0.1)
    straight = follow(made, init, gradients)
    turned = follow(made, [u @ init[0] @ v.T], [[u @ g @ v.T] for (g,) in gradients])
    assert distance(turned, [u @ straight[0] @ v.T], [u @ init[0] @ v.T]) <= 1e-9


def test_a_rotation_is_noticed_by_what_is_not_equivariant() -> None:
    u, v = rotation(6, 1), rotation(6, 2)
    init, gradients = [normal(6, 6, seed=5)], random_gradients([(6, 6)], 25)
    straight = follow(recipe("adam"), init, gradients)
    turned = follow(recipe("adam"), [u @ init[0] @ v.T], [[u @ g @ v.T] for (g,) in gradients])
    assert distance(turned, [u @ straight[0] @ v.T], [u @ init[0] @ v.T]) > 0.1


SPIKE = 25
AFTER = "update.eigenbasis.transport"
OUTSIDE = plain({"kind": "momentum", "beta": 0.95}, {"kind": "eigenbasis", "inner": {"kind": "rms", "beta": 0.95}})


def sizes(made: Any, gradients: list[list[Tensor]]) -> Tensor:
    """Update RMS / lr of every step (`made` has lr 1)."""
    start = torch.zeros_like(gradients[0][0])
    (path,) = follow(made, [start], gradients)
    return torch.diff(torch.cat([start[None], path]), dim=0).double().square().mean((1, 2)).sqrt()


def overshoot(source: object, *overrides: str) -> float:
    """Largest update in the 20 steps after a gradient 1e4 times too large, against those before it; median of 5."""
    made, ratios = recipe(source, *overrides, "weight_decay.rate=0.0", lr=1.0), []
    for seed in range(5):
        gradients = random_gradients([(32, 48)], 45, seed=100_000 * seed, dtype=torch.float32)
        gradients[SPIKE - 1][0].mul_(1e4)
        size = sizes(made, gradients)
        ratios.append(float(size[SPIKE:].max() / size[SPIKE - 6 : SPIKE - 1].max()))
    return sorted(ratios)[2]


@pytest.mark.parametrize(
    "source", ["soap_fitted", "soap_factorized", OUTSIDE], ids=["soap_fitted", "factorized", "momentum outside"]
)
@pytest.mark.parametrize("more", [(), ("update.eigenbasis.solver.kind=eigh",), ("update.eigenbasis.timing=lagged",)])
def test_with_exact_transport_a_spike_is_forgotten(source: object, more: tuple[str, ...]) -> None:
    """The second moments follow the basis, and the spike stays where its squares are: 1.1 to 1.2 measured."""
    assert overshoot(source, f"{AFTER}=exact", *more) <= 1.5


@pytest.mark.parametrize("more", ["solver.kind=eigh", "timing=lagged", "statistic_frame=basis", "refresh.steps=7"])
def test_with_fitted_marginals_a_spike_is_forgotten(more: str) -> None:
    """Second moments are concentrated, but not below what the momentum needs: 1.08 to 1.10 measured, as exact."""
    assert overshoot("soap_fitted", f"update.eigenbasis.{more}") <= 1.5


@pytest.mark.parametrize(
    ("source", "overrides", "measured"),
    [("soap_fitted", (f"{AFTER}=permute",), 13), ("reference/soap", (), 10), (OUTSIDE, (f"{AFTER}=none",), 24)],
    ids=["permute", "published", "none"],
)
def test_without_it_the_refreshes_after_a_spike_overshoot(source: object, overrides: Any, measured: float) -> None:
    """The old basis' huge squares stand in the new one's slots: other codes showed 12 to 47 times. The cost of a
    choice, not a defect: the published recipes are what they are. `none` shows with momentum outside the basis; inside
    it the momentum is left in the wrong slots as well, where it is as huge. A factor of two for other random numbers.
    """
    assert measured / 2 <= overshoot(source, *overrides) <= measured * 2


def test_soap_is_the_published_method_where_every_parameter_takes_it() -> None:
    """Three hidden matrices within one block each, two refreshes after the first: the same bits."""
    gradients = random_gradients([(6, 9), (9, 6), (9, 9)], 22, dtype=torch.float32)
    ends = []
    for name in ("soap", "reference/soap"):
        weights = {f"layer{i}.weight": nn.Parameter(g.clone()) for i, g in enumerate(gradients[0])}
        optimizer = Optimizer(list(weights.items()), name, lr=0.01)
        assert {row.route for row in optimizer.routing_table()} == {""}
        for step in gradients:
            for parameter, gradient in zip(weights.values(), step, strict=True):
                parameter.grad = gradient.clone()
            optimizer.step()
        ends.append([*weights.values()])
    assert all(torch.equal(one, two) for one, two in zip(*ends, strict=True))


LOW_RANK = [[normal(32, 4, seed=t) @ normal(4, 48, seed=t + 500)] for t in range(25)]
SAME_SUBSPACE = [[normal(32, 4, seed=1) @ normal(4, 4, seed=t) @ normal(4, 48, seed=2)] for t in range(25)]
GRADIENTS = {
    "random": random_gradients([(32, 48)], 25),
    "rank 4": LOW_RANK,
    "rank 4, one subspace": SAME_SUBSPACE,
    "rank 1": [[normal(32, 1, seed=t) @ normal(1, 48, seed=t + 500)] for t in range(25)],
}


@pytest.mark.parametrize("gradients", GRADIENTS)
@pytest.mark.parametrize("source", ["soap_fitted", "soap_factorized", "shampoo", "muon", "reference/soap"])
def test_updates_have_the_size_of_lr_after_every_refresh(source: str, gradients: str) -> None:
    """Adam's update RMS is at most about lr, whatever the gradients: so is that of what runs in its place. Two allows
    for a bound that holds up to the unequal decay of momentum and second moment."""
    made = recipe(source, "weight_decay.rate=0.0", "routes=[]", lr=1.0)
    assert float(sizes(made, [[g.float() for g in step] for step in GRADIENTS[gradients]]).max()) <= 2


@pytest.mark.parametrize("shape", [(3, 9), (9, 3), (5, 5)])
@pytest.mark.parametrize("steps", [1, 4, 5])
def test_newton_schulz_on_the_gram_matrix_is_newton_schulz(steps: int, shape: tuple[int, int]) -> None:
    """1e-12 in float64: eigenvalues of R are squares, so that half the digits of small singular values would be lost
    without the restarts; random matrices of these shapes have none below 1e-2."""
    x = normal(2, *shape, seed=steps)
    plain = NewtonSchulz(steps=steps).polar(x)
    for restart in (1, 2, 5):
        assert (GramNewtonSchulz(steps=steps, restart=restart).polar(x) - plain).abs().max() <= 1e-12


def test_the_nuclear_norm_scales_the_polar_factor() -> None:
    """sum(S) U V^T. 1e-13: a sum of products, and the norm that it is compared with."""
    (g,), *_ = gradients = random_gradients([(5, 3)], 1)
    stage = {"kind": "spectral", "solver": "svd", "nuclear_norm": True}
    (path,) = follow(recipe(plain(stage), lr=1.0), [torch.zeros(5, 3, dtype=torch.float64)], gradients)
    u, s, vh = torch.linalg.svd(g, full_matrices=False)
    assert (path[0] + s.sum() * u @ vh).abs().max() <= 1e-13


def test_a_basis_that_stays_moves_no_state() -> None:
    """With a tolerance that every basis meets a second refresh does nothing: moments keep every bit."""
    solver = {"kind": "adaptive_qr", "tolerance": 0.999}
    soap = Eigenbasis.model_validate({"inner": ["momentum", "rms"], "statistic": Gram(beta=1.0), "solver": solver})
    state, context = gathered(soap, [normal(1, 6, 5, seed=k) for k in range(12)])
    inside = state.scope("inner").scope("rms")
    inside["v"] = normal(1, 6, 5, seed=99).square()
    before, basis = inside["v"].clone(), state["basis.0"].clone()
    gradient = normal(1, 6, 5, seed=50)
    soap.observe(state, gradient, context)
    soap.refresh(state, gradient, context)
    assert torch.equal(inside["v"], before) and torch.equal(state["basis.0"], basis)


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("soap_fitted", []),
        ("soap_fitted", ["update.eigenbasis.timing=lagged", "update.eigenbasis.transport=permute"]),
        ("soap_fitted", ["update.eigenbasis.solver=eigh", "update.eigenbasis.refresh.steps=3"]),
        ("soap_fitted", ["update.eigenbasis.solver=adaptive_qr", "update.eigenbasis.refresh.stagger=none"]),
        ("soap_muon", []),
        ("soap_kl", []),
        ("soap_kl", ["update.eigenbasis.statistic.order=gauss_seidel", "update.eigenbasis.refresh.start=20"]),
    ],
    ids=str,
)
def test_statistics_in_the_basis_make_the_same_steps(name: str, overrides: list[str]) -> None:
    """Q^T A Q and A are the same statistic, and P the same rotation as Q_old^T Q_new: 1e-12 of what they moved in
    40 steps (measured: 3e-15). Factors have full rank from the first refresh on, or bases would not be unique."""
    shapes = [(12, 7), (7, 12), (12, 7), (9, 9)]
    gradients = random_gradients(shapes, 40, seed=3)
    init = [normal(*shape, seed=i) for i, shape in enumerate(shapes)]
    path = "update.eigenbasis.statistic_frame"
    frames = (recipe(name, *overrides, "routes=[]", f"{path}={f}") for f in ("basis", "fixed"))
    assert distance(*(follow(frame, init, gradients) for frame in frames), init) <= 1e-12


@pytest.mark.parametrize(("frame", "kept"), [("basis", True), ("fixed", False)])
def test_coarsely_stored_bases_spoil_no_moments_that_turn_with_statistics(frame: str, kept: bool) -> None:
    """Without a gradient a refresh at every step only rotates the momentum, beta = 0.9 shorter. With bases in 4 bits,
    not rectified, that holds to the rounding of float32 (24 products, 1e-5) where P is a rotation; Q_old^T Q_new is not
    one, and changes the norm by parts in a hundred."""
    inner = [{"kind": "momentum", "beta": 0.9}]
    soap = {"kind": "eigenbasis", "statistic_frame": frame, "inner": inner, "refresh": NONE}
    bases = {"kind": "orthogonal", "rectify": 0, "inner": {"kind": "int4", "min_elements": 1}}
    parameter = torch.nn.Parameter(normal(24, 24, seed=0).float())
    optimizer = recipe(plain(soap, storage={"basis": bases}), lr=1e-3)([parameter])
    norms = []
    for step in range(40):
        zero = torch.zeros(24, 24)
        parameter.grad = normal(24, 24, seed=step).float() if step < 20 else zero
        optimizer.step()
        momentum = optimizer.state[parameter]["0/update.eigenbasis.inner.momentum/m"]
        norms.append(float(momentum.double().norm()))
    off = max(abs(b / a / 0.9 - 1) for a, b in pairwise(norms[20:]))
    assert off < 1e-5 if kept else off > 1e-2, off


@pytest.mark.parametrize("transport", ["exact", "permute"])
def test_momentum_that_turns_with_the_basis_is_momentum_outside_of_it(transport: str) -> None:
    """R^T (Q_old^T M) = Q_new^T M for square bases: 1e-12 of what parameters moved in 40 steps (measured: 1e-15)."""
    shapes = [(12, 7), (7, 12), (5, 4, 3)]  # R takes more operations than what it is for, or fewer
    basis = {"kind": "eigenbasis", "transport": transport, "refresh": {"kind": "every", "steps": 3, "start": 2}}
    momentum, rms = {"kind": "momentum", "beta": 0.95}, {"kind": "rms", "beta": 0.95}
    inside = plain({**basis, "inner": [momentum, rms]})
    outside = plain(momentum, {**basis, "inner": [rms]})
    gradients = random_gradients(shapes, 40, seed=3)
    init = [normal(*shape, seed=i) for i, shape in enumerate(shapes)]
    assert distance(*(follow(recipe(made), init, gradients) for made in (inside, outside)), init) <= 1e-12
