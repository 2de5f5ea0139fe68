"""Shipped recipes against the formulas of their papers, written out for one matrix in float64.

Each definition gives the updates U_t of a method from the gradients alone, without the library; a recipe has to follow
W <- (1 - lr decay) W - lr U. Numbers that a recipe ships (decays, ridges, scales) stand in the definition as well, so
that neither can change alone. Only the cadence is overridden: a basis is renewed at updates 2, 3, 6, 9, all blocks at
once. L, R are the factors of G `[m, n]`, hats are bias corrections, primes are coordinates in the basis.
"""

import math
from collections.abc import Callable, Sequence
from itertools import combinations, pairwise
from typing import Protocol

import pytest
import torch
from torch import Tensor

from eigengraft import Optimizer, load_recipe

from ..trajectories import distance, follow, normal, random_gradients, recipe, rotation

pytestmark = pytest.mark.slow

STEPS, LR = 10, 0.1
SHAPES = [(5, 8), (8, 5), (6, 6)]
"""Two gradients fill every factor: none is singular at the first refresh."""


class Mean:
    """raw <- b raw + (1 - b) x;  raw / (1 - b^t)."""

    def __init__(self, beta: float, *shape: int) -> None:
        self.beta, self.t, self.raw = beta, 0, torch.zeros(shape, dtype=torch.float64)

    def __call__(self, x: Tensor) -> Tensor:
        self.t += 1
        self.raw = self.beta * self.raw + (1 - self.beta) * x
        return self.value()

    def value(self) -> Tensor:
        return self.raw / (1 - self.beta**self.t)


def power(a: Tensor, p: float, ridge: float = 0.0) -> Tensor:
    """(A + ridge I)^p."""
    values, q = torch.linalg.eigh(a)
    return (q * (values + ridge).pow(p)) @ q.T


def newton_schulz(
    x: Tensor, steps: int = 5, triple: tuple[float, float, float] = (3.4445, -4.7750, 2.0315), scaled: bool = True
) -> Tensor:
    """X <- a X + b (X X^T) X + c (X X^T)^2 X  from X / ||X||, or from X where it is not scaled."""
    a, b, c = triple
    x = x / x.norm() if scaled else x
    for _ in range(steps):
        gram = x @ x.T if x.shape[0] <= x.shape[1] else x.T @ x
        polynomial = b * gram + c * gram @ gram
        x = a * x + (polynomial @ x if x.shape[0] <= x.shape[1] else x @ polynomial)
    return x


def of_rms(x: Tensor, rms: float) -> Tensor:
    return x * (rms * math.sqrt(x.numel()) / x.norm())


def ahead(given: Sequence[Tensor], beta: float, corrected: bool = False) -> list[Tensor]:
    """Nesterov on a running mean: b M + (1 - b) G, over 1 - b^(t + 1) if corrected."""
    mean, found = Mean(beta, *given[0].shape), []
    for t, g in enumerate(given, start=1):
        mean(g)
        found.append((beta * mean.raw + (1 - beta) * g) / (1 - beta ** (t + 1) if corrected else 1.0))
    return found


def adam(given: Sequence[Tensor], first: float, second: float) -> list[Tensor]:
    """M^ / (sqrt(V^) + 1e-8)."""
    m, v = Mean(first, *given[0].shape), Mean(second, *given[0].shape)
    return [m(g) / (v(g.square()).sqrt() + 1e-8) for g in given]


def grafted(directions: Sequence[Tensor], magnitudes: Sequence[Tensor]) -> list[Tensor]:
    return [d * (m.norm() / d.norm()) for d, m in zip(directions, magnitudes, strict=True)]


# What an eigenbasis is of, how it is renewed, and what runs in it.


def due(t: int, start: int = 2) -> bool:
    return t == start or (t > start and t % 3 == 0)


Solve = Callable[[Tensor, Tensor, bool], Tensor]
"""(A, Q, whether it is the first refresh) -> the new Q."""


def by_eigh(a: Tensor, q: Tensor, first: bool) -> Tensor:
    return torch.linalg.eigh(a).eigenvectors.flip(1)


def step(a: Tensor, q: Tensor) -> Tensor:
    order = (q.T @ a @ q).diagonal().argsort(descending=True)
    return torch.linalg.qr(a @ q[:, order]).Q


def by_qr(a: Tensor, q: Tensor, first: bool) -> Tensor:
    """One power step and a QR, columns by descending diag(Q^T A Q) (Vyas et al. 2024, Algorithm 4)."""
    return by_eigh(a, q, first) if first else step(a, q)


def until_diagonal(a: Tensor, q: Tensor, first: bool) -> Tensor:
    """Such steps while ||offdiag(Q^T A Q)|| > 0.1 ||Q^T A Q|| (Eschenhagen et al. 2025); five at most."""
    if first:
        return by_eigh(a, q, first)
    for _ in range(5):
        b = q.T @ a @ q
        if (b - b.diagonal().diag()).norm() <= 0.1 * b.norm():
            break
        q = step(a, q)
    return q


class Gram:
    """L^, R^ with L <- b L + (1 - b) G G^T,  R <- b R + (1 - b) G^T G."""

    def __init__(self, shape: Sequence[int], beta: float = 0.95) -> None:
        self.left, self.right = (Mean(beta, d, d) for d in shape)

    def __call__(self, g: Tensor, q: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        return self.left(g @ g.T), self.right(g.T @ g)


class KL:
    """L <- b L + (1 - b) G R^-1 G^T / n,  R <- b R + (1 - b) G^T L^-1 G / m,  both with the old inverses.

    What the old basis makes of a factor A is Q diag(Q^T A Q) Q^T, at least 1e-3 of the mean; at first it is RMS(G) I.
    """

    def __init__(self, shape: Sequence[int]) -> None:
        self.means = [Mean(0.95, d, d) for d in shape]

    def __call__(self, g: Tensor, q: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        left, right = (self.inverse(mean, basis, g) for mean, basis in zip(self.means, q, strict=True))
        m, n = g.shape
        return self.means[0](g @ right @ g.T / n), self.means[1](g.T @ left @ g / m)

    @staticmethod
    def inverse(mean: Mean, q: Tensor, g: Tensor) -> Tensor:
        if mean.t == 0:
            return torch.eye(len(q), dtype=torch.float64) / g.square().mean().sqrt()
        values = (q.T @ mean.value() @ q).diagonal()
        return (q / values.clamp_min(1e-3 * values.mean())) @ q.T


class Inner(Protocol):
    """carry: R_L, R_R = Q_old^T Q_new, before the new basis is used. (G', M') -> the direction in the basis."""

    def carry(self, turns: Sequence[Tensor]) -> None: ...

    def __call__(self, g: Tensor, d: Tensor) -> Tensor: ...


class RMS:
    """V <- b V + (1 - b) G'^2;  M' / (sqrt(V^) + 1e-8);  V follows the basis as (R*R)^T V."""

    def __init__(self, shape: Sequence[int], beta: float = 0.95) -> None:
        self.v = Mean(beta, *shape)

    def carry(self, turns: Sequence[Tensor]) -> None:
        self.v.raw = turns[0].square().T @ self.v.raw @ turns[1].square()

    def __call__(self, g: Tensor, d: Tensor) -> Tensor:
        return d / (self.v(g.square()).sqrt() + 1e-8)


class OwnRMS(RMS):
    """The same with M'^2 in place of G'^2."""

    def __call__(self, g: Tensor, d: Tensor) -> Tensor:
        return super().__call__(d, d)


class Sign:
    def carry(self, turns: Sequence[Tensor]) -> None: ...

    def __call__(self, g: Tensor, d: Tensor) -> Tensor:
        return d.sign()


class Axes:
    """One vector for each axis, in the basis, which follow it as (R*R)^T v."""

    def __init__(self, shape: Sequence[int], beta: float = 0.95) -> None:
        self.rows, self.columns = (Mean(beta, d) for d in shape)

    def carry(self, turns: Sequence[Tensor]) -> None:
        for mean, turn in zip((self.rows, self.columns), turns, strict=True):
            mean.raw = turn.square().T @ mean.raw


class Adafactor(Axes):
    """V = r c^T / mean(r) of means of squares over columns and rows;  M' / sqrt(V)."""

    def __call__(self, g: Tensor, d: Tensor) -> Tensor:
        r, c = self.rows(g.square().mean(1)), self.columns(g.square().mean(0))
        return d / (torch.outer(r, c) / r.mean()).sqrt()


class CASPR(Axes):
    """(l^(-1/2) M' + 2 l^(-1/4) M' r^(-1/4) + M' r^(-1/2)) / 4  with sums of squares l, r over columns and rows."""

    def __call__(self, g: Tensor, d: Tensor) -> Tensor:
        left = self.rows(g.square().sum(1)).add(1e-12)[:, None]
        right = self.columns(g.square().sum(0)).add(1e-12)
        return (d * left**-0.5 + 2 * d * left**-0.25 * right**-0.25 + d * right**-0.5) / 4


class KLEigenvalues(Axes):
    """l <- b l + (1 - b) mean_j(G'_ij^2 / r_j),  r <- b r + (1 - b) mean_i(G'_ij^2 / l_i);  M'_ij / sqrt(l_i r_j)

    Both read the old ones, at least 1e-6 of the largest; at first they are RMS(G).
    """

    def __call__(self, g: Tensor, d: Tensor) -> Tensor:
        means, square = (self.rows, self.columns), g.square()
        left, right = (self.floored(mean.value()) if mean.t else square.mean().sqrt() for mean in means)
        new = self.rows((square / right).mean(1)), self.columns((square.T / left).mean(1))
        return d / torch.outer(*(self.floored(values) for values in new)).sqrt()

    @staticmethod
    def floored(values: Tensor) -> Tensor:
        return values.clamp_min(1e-6 * float(values.max()))


def in_basis(
    given: Sequence[Tensor],
    moments: float | Sequence[Tensor],
    factors: Gram | KL,
    solve: Solve,
    inner: Inner,
    renews: Callable[[int], bool] = due,
) -> list[Tensor]:
    """Q_L inner(Q_L^T G Q_R, Q_L^T M^ Q_R) Q_R^T.  M is rotated with the basis, that is, kept outside of it.

    moments: the M^ themselves, or their decay.
    """
    m = Mean(moments if isinstance(moments, float) else 0.0, *given[0].shape)
    q = [torch.eye(d, dtype=torch.float64) for d in given[0].shape]
    found, first = [], True
    for t, g in enumerate(given, start=1):
        estimates = factors(g, q)
        if renews(t):
            new = [solve(a, old, first) for a, old in zip(estimates, q, strict=True)]
            inner.carry([old.T @ basis for old, basis in zip(q, new, strict=True)])
            q, first = new, False
        moment = m(g) if isinstance(moments, float) else moments[t - 1]
        inside = inner(q[0].T @ g @ q[1], q[0].T @ moment @ q[1])
        found.append(q[0] @ inside @ q[1].T)
    return found


# The methods.


def soap(given: Sequence[Tensor]) -> list[Tensor]:
    return in_basis(given, 0.95, Gram(given[0].shape), by_qr, RMS(given[0].shape))


def soap_factorized(given: Sequence[Tensor]) -> list[Tensor]:
    return in_basis(given, 0.95, Gram(given[0].shape), by_qr, Adafactor(given[0].shape))


def adafactor_in_basis(given: Sequence[Tensor]) -> list[Tensor]:
    return in_basis(given, 0.95, Gram(given[0].shape), by_eigh, Adafactor(given[0].shape))


def eshampoo(given: Sequence[Tensor]) -> list[Tensor]:
    return in_basis(given, 0.9, Gram(given[0].shape), until_diagonal, RMS(given[0].shape))


def soap_kl(given: Sequence[Tensor]) -> list[Tensor]:
    return in_basis(given, 0.95, KL(given[0].shape), by_qr, RMS(given[0].shape))


def shampoo_kl(given: Sequence[Tensor]) -> list[Tensor]:
    return in_basis(given, 0.95, KL(given[0].shape), by_qr, KLEigenvalues(given[0].shape))


def caspr(given: Sequence[Tensor]) -> list[Tensor]:
    directions = in_basis(given, 0.9, Gram(given[0].shape), by_qr, CASPR(given[0].shape))
    return grafted(directions, adam(given, 0.9, 0.95))


def splus(given: Sequence[Tensor]) -> list[Tensor]:
    signs = in_basis(given, 0.9, Gram(given[0].shape, 0.999), by_eigh, Sign())
    return [x * (2 / sum(x.shape)) for x in signs]


def soap_muon(given: Sequence[Tensor]) -> list[Tensor]:
    """The momentum over its own root mean square in the basis of the gradients, then its polar factor."""
    shape = given[0].shape
    inside = in_basis(given, ahead(given, 0.95), Gram(shape, 0.9), by_qr, OwnRMS(shape, 0.9))
    return [newton_schulz(x, 12, (2.0, -1.5, 0.5)) * (0.2 * math.sqrt(max(x.shape))) for x in inside]


def shampoo(given: Sequence[Tensor]) -> list[Tensor]:
    """L^(-1/4) M R^(-1/4), the identity before the first refresh, with the norm of Adam's step."""
    m, factors, found = Mean(0.9, *given[0].shape), Gram(given[0].shape), []
    roots = [torch.eye(d, dtype=torch.float64) for d in given[0].shape]
    for t, g in enumerate(given, start=1):
        estimates = factors(g, ())
        if due(t):
            roots = [power(a, -0.25, ridge=1e-6 * float(torch.linalg.matrix_norm(a, 2))) for a in estimates]
        found.append(roots[0] @ m(g) @ roots[1])
    return grafted(found, adam(given, 0.9, 0.95))


def one_sided_shampoo(given: Sequence[Tensor]) -> list[Tensor]:
    """(G G^T)^(-1/2) M, or M (G^T G)^(-1/2), whichever factor is smaller, with the norm of Adam's step."""
    m, factors, found = Mean(0.95, *given[0].shape), Gram(given[0].shape), []
    for t, g in enumerate(given, start=1):
        left, right = factors(g, ())
        if due(t, start=1):
            root = power(left if g.shape[0] <= g.shape[1] else right, -0.5)
        found.append(root @ m(g) if g.shape[0] <= g.shape[1] else m(g) @ root)
    return grafted(found, adam(given, 0.95, 0.95))


def muon(given: Sequence[Tensor]) -> list[Tensor]:
    return [newton_schulz(x) * (0.2 * math.sqrt(max(x.shape))) for x in ahead(given, 0.95)]


def normuon(given: Sequence[Tensor]) -> list[Tensor]:
    """O = NS(M);  v <- b v + (1 - b) mean_j(O_ij^2);  O_ij / (sqrt(v_i) + eps), an RMS of 0.2."""
    v, found = Mean(0.95, len(given[0]), 1), []
    for x in ahead(given, 0.95):
        o = newton_schulz(x)
        v(o.square().mean(1, keepdim=True))
        found.append(of_rms(o / (v.raw.sqrt() + 1e-8), 0.2))
    return found


def adamuon(given: Sequence[Tensor]) -> list[Tensor]:
    """O = NS(sign(M));  V <- b V + (1 - b) O^2;  O / (sqrt(V) + eps), an RMS of 0.2."""
    v, found = Mean(0.95, *given[0].shape), []
    for x in ahead(given, 0.95):
        o = newton_schulz(x.sign())
        v(o.square())
        found.append(of_rms(o / (v.raw.sqrt() + 1e-8), 0.2))
    return found


def swan(given: Sequence[Tensor]) -> list[Tensor]:
    """Rows standardized over the columns, then whitened, then of the norm that they had."""
    found = []
    for g in given:
        rows = g - g.mean(1, keepdim=True)
        rows = rows / rows.square().mean(1, keepdim=True).sqrt()
        white = newton_schulz(rows, steps=10, triple=(2.0, -1.5, 0.5))
        found.append(white * (rows.norm() / white.norm()))
    return found


def cosmos(given: Sequence[Tensor], rank: int = 3) -> list[Tensor]:
    """A + 0.2 B of one RMS:  A = (M U / (sqrt(V^) + eps)) U^T,  B = NS(M - M U U^T) with ||B|| = sqrt(m n)."""
    v, core, found, b = Mean(0.95, len(given[0]), rank), torch.zeros(rank, rank, dtype=torch.float64), [], 0.95
    u = torch.linalg.svd(given[0]).Vh[:rank].T
    for t, (g, x) in enumerate(zip(given, ahead(given, 0.95, corrected=True), strict=True), start=1):
        old = u
        if t > 1:
            u = torch.linalg.qr(b * old @ core + (1 - b) * g.T @ (g @ old)).Q
        core = b * (u.T @ old) @ core @ (old.T @ u) + (1 - b) * (g @ u).T @ (g @ u)
        inside = (x @ u / (v((g @ u).square()).sqrt() + 1e-8)) @ u.T
        outside = newton_schulz(x - x @ u @ u.T)
        found.append(of_rms(inside + of_rms(outside, 0.2), 0.2))
    return found


BASIS = "update.eigenbasis.refresh"
CARRIED = "update.eigenbasis.transport=exact"
"""Second moments as in the papers' formulas, not fitted to the statistics."""
GRAFTED = "update.graft.direction"


def cadence(path: str, *more: str) -> tuple[str, ...]:
    return (f"{path}.steps=3", f"{path}.stagger=none", *more)


METHODS: dict[str, tuple[Callable[[Sequence[Tensor]], list[Tensor]], tuple[str, ...]]] = {
    "soap_fitted": (soap, cadence(BASIS, CARRIED)),
    "soap_factorized": (soap_factorized, cadence(BASIS, CARRIED)),
    "adafactor_in_basis": (adafactor_in_basis, cadence(BASIS)),
    "eshampoo": (eshampoo, cadence(BASIS)),
    "soap_kl": (soap_kl, cadence(BASIS, CARRIED)),
    "shampoo_kl": (shampoo_kl, cadence(BASIS)),
    "caspr": (caspr, cadence(f"{GRAFTED}.eigenbasis.refresh")),
    "soap_muon": (soap_muon, cadence(BASIS)),
    # a root of one gradient's 8 x 8 factor is 1e10^(1/4) times rounding in three directions
    "shampoo": (shampoo, cadence(f"{GRAFTED}.shampoo.refresh", f"{GRAFTED}.shampoo.refresh.start=2")),
    "one_sided_shampoo": (one_sided_shampoo, cadence(f"{GRAFTED}.shampoo.refresh")),
    "muon": (muon, ("update.spectral.solver.precision=input",)),
    "normuon": (normuon, ()),
    "adamuon": (adamuon, ()),
    "swan": (swan, ()),
    "cosmos": (cosmos, ("update.split.rank=3",)),
}


def moved(start: Tensor, updates: Sequence[Tensor], decay: float = 0.01) -> Tensor:
    """W <- (1 - lr decay) W - lr U, `[steps, m, n]`."""
    path, w = [], start
    for u in updates:
        w = w * (1 - LR * decay) - LR * u
        path.append(w)
    return torch.stack(path)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", METHODS)
def test_a_recipe_is_its_papers_formula(name: str, shape: tuple[int, int]) -> None:
    """1e-9: rounding (1e-16), over the gaps between eigenvalues (1e-2) and the smallest second moments (1e-2), through
    slopes of up to 3.4^5 at zero in Newton-Schulz."""
    defined, overrides = METHODS[name]
    init, gradients = [normal(*shape, seed=5)], random_gradients([shape], STEPS)
    ours = follow(recipe(name, *overrides, lr=LR), init, gradients)
    assert distance(ours, [moved(init[0], defined([g for (g,) in gradients]))], init) <= 1e-9


def test_no_two_of_these_formulas_are_the_same() -> None:
    """The closest two differ by more than a million times the bound that they are held to."""
    given = [g for (g,) in random_gradients([(5, 8)], STEPS)]
    init = torch.zeros(5, 8, dtype=torch.float64)
    paths = {name: moved(init, defined(given)) for name, (defined, _) in METHODS.items()}
    for one, other in combinations(paths, 2):
        assert distance([paths[one]], [paths[other]], [init]) > 1e-2, (one, other)


def splus_run(shape: tuple[int, int], *overrides: str) -> tuple[Tensor, Tensor]:
    """The parameter after the last update, and what is evaluated then."""
    parameter = torch.nn.Parameter(normal(*shape, seed=5))
    optimizer = Optimizer([("p", parameter)], load_recipe("splus", (*cadence(BASIS), *overrides)), lr=LR)
    for (g,) in random_gradients([shape], STEPS):
        parameter.grad = g.clone()
        optimizer.step()
    trained = parameter.detach().clone()
    optimizer.eval()
    return trained, parameter.detach()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_splus_is_its_formula_and_evaluates_its_average(shape: tuple[int, int]) -> None:
    """The paper's algorithm has no decay. The average of the iterates is corrected, as it starts from zero.

    1e-12: signs pass no rounding on but through the basis.
    """
    trained, evaluated = splus_run(shape, "weight_decay.rate=0.0")
    w, mean = normal(*shape, seed=5), Mean(0.999, *shape)
    for u in splus([g for (g,) in random_gradients([shape], STEPS)]):
        w = w - LR * u
        mean(w)
    assert float((trained - w).abs().max()) <= 1e-12
    assert float((evaluated - mean.value()).abs().max()) <= 1e-12


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_splus_scales_its_decay_by_the_shape_as_well(shape: tuple[int, int]) -> None:
    """W <- W - lr 2 / (m + n) (Q_L sign(Q_L^T M Q_R) Q_R^T + 0.01 W) in the authors' code. 1e-12 as above."""
    trained, _ = splus_run(shape)
    w = normal(*shape, seed=5)
    for u in splus([g for (g,) in random_gradients([shape], STEPS)]):
        w = w - LR * (u + 0.01 * w * 2 / sum(shape))
    assert float((trained - w).abs().max()) <= 1e-12


# Where the eigenvectors of the statistics stay, an online approximation is the dense formula.


def with_fixed_eigenvectors(d: int) -> list[Tensor]:
    """U D_t P_t V^T with diagonal D_t, permutations P_t: U and V diagonalize all factors, of whitened gradients too."""
    u, v, found = rotation(d, 1), rotation(d, 2), []
    for t in range(STEPS):
        order = torch.randperm(d, generator=torch.Generator().manual_seed(t))
        found.append(u @ (torch.eye(d, dtype=torch.float64)[order] * normal(d, seed=t)) @ v.T)
    return found


def fixed(path: str) -> tuple[str, ...]:
    """A basis from the first gradient, of which the eigenvalues have to be distinct, for ever."""
    return (f"{path}.start=1", f"{path}.steps=1000000", f"{path}.stagger=none")


def test_kl_shampoo_is_dense_where_eigenvectors_stay() -> None:
    """S_L^(-1/2) M^ S_R^(-1/2),  S_L <- b S_L + (1 - b) G S_R^-1 G^T / n,  S_R likewise, both with the old inverses.

    1e-9: inverses of factors with a condition of up to 1e4, of which the next ones are made.
    """
    given = with_fixed_eigenvectors(6)
    left, right, m, updates = Mean(0.95, 6, 6), Mean(0.95, 6, 6), Mean(0.95, 6, 6), []
    for t, g in enumerate(given):
        rms = g.square().mean().sqrt()
        inverses = [power(mean.value(), -1) if t else torch.eye(6, dtype=torch.float64) / rms for mean in (left, right)]
        a, b = left(g @ inverses[1] @ g.T / 6), right(g.T @ inverses[0] @ g / 6)
        updates.append(power(a, -0.5) @ m(g) @ power(b, -0.5))
    init = [normal(6, 6, seed=5)]
    ours = follow(recipe("shampoo_kl", *fixed(BASIS), lr=LR), init, [[g] for g in given])
    assert distance(ours, [moved(init[0], updates)], init) <= 1e-9


def dense_caspr(given: Sequence[Tensor], beta: float = 0.9) -> list[Tensor]:
    """(L^(-1/2) M + 2 L^(-1/4) M R^(-1/4) + M R^(-1/2)) / 4, L and R the corrected means of the factors."""
    m, factors, found = Mean(beta, *given[0].shape), Gram(given[0].shape), []
    for g in given:
        x, (left, right) = m(g), factors(g, ())
        two_sided = power(left, -0.25, 1e-12) @ x @ power(right, -0.25, 1e-12)
        found.append((power(left, -0.5, 1e-12) @ x + 2 * two_sided + x @ power(right, -0.5, 1e-12)) / 4)
    return found


def test_caspr_in_a_basis_is_dense_where_eigenvectors_stay() -> None:
    """1e-9: roots of factors with a condition of up to 1e4, between which the norms are taken."""
    given, init = with_fixed_eigenvectors(6), [normal(6, 6, seed=5)]
    ours = follow(recipe("caspr", *fixed(f"{GRAFTED}.eigenbasis.refresh"), lr=LR), init, [[g] for g in given])
    theirs = moved(init[0], grafted(dense_caspr(given), adam(given, 0.9, 0.95)))
    assert distance(ours, [theirs], init) <= 1e-9


def plain_caspr(beta: float, solver: object, momentum: float) -> dict[str, object]:
    """CASPR as a sum of three Shampoos with dense factors of their own."""
    stage = {
        "kind": "shampoo",
        "statistic": {"kind": "gram", "beta": beta},
        "solver": solver,
        "refresh": {"kind": "every", "steps": 1, "stagger": "none"},
    }
    exponents = {"left": (0.25, {2: ["1/2", 0]}), "both": (0.5, "1/4"), "right": (0.25, {2: [0, "1/2"]})}
    paths = [{"name": k, "weight": w, "stages": {**stage, "exponent": e}} for k, (w, e) in exponents.items()]
    return {"update": [{"kind": "momentum", "beta": momentum}, {"kind": "sum", "paths": paths}], "routes": []}


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_sum_of_three_shampoos_is_dense_caspr(shape: tuple[int, int]) -> None:
    """The first update apart, at which the larger factor is singular. 1e-9: conditions of up to 1e3."""
    given, init = [g for (g,) in random_gradients([shape], STEPS)], [normal(*shape, seed=5)]
    (path,) = follow(recipe(plain_caspr(0.95, "eigh", 0.9), lr=LR), init, [[g] for g in given])
    for (before, after), u in zip(pairwise(path), dense_caspr(given)[1:], strict=True):
        assert float(((before - after) / LR - u).abs().max()) <= 1e-9 * float(u.abs().max())


# Without accumulation.


NOW = {"kind": "every", "steps": 1, "stagger": "none"}
PSEUDO_INVERSE = {"kind": "eigh", "eps": 1e-12, "relative": True, "deficiency": "pseudo_inverse"}
"""The larger factor of one gradient is singular; the cutoff is far below the squares of its singular values."""


def polar(g: Tensor) -> Tensor:
    u, _, vh = torch.linalg.svd(g, full_matrices=False)
    return u @ vh


def forgetful(**more: object) -> dict[str, object]:
    """A Shampoo whose factors are of the current gradient alone."""
    return {
        "kind": "shampoo",
        "statistic": {"kind": "gram", "beta": 0.0},
        "solver": PSEUDO_INVERSE,
        "refresh": NOW,
        **more,
    }


WITHOUT_ACCUMULATION: dict[str, object] = {
    "shampoo, power 1/4": {"update": forgetful(exponent="1/4"), "routes": []},
    "one-sided, the smaller": {
        "update": forgetful(exponent="1/2", statistic={"kind": "gram", "beta": 0.0, "axes": {"side": "smaller"}}),
        "routes": [],
    },
    "one-sided, the larger": {"update": forgetful(exponent={2: ["1/2", 0]}), "routes": []},
    "caspr": plain_caspr(0.0, PSEUDO_INVERSE, 0.0),
    "muon with a singular value decomposition": {"update": {"kind": "spectral", "solver": "svd"}, "routes": []},
}


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", WITHOUT_ACCUMULATION)
def test_without_accumulation_these_are_the_polar_factor(name: str, shape: tuple[int, int]) -> None:
    """(G G^T)^(-1/4) G (G^T G)^(-1/4) = (G G^T)^(-1/2) G = G (G^T G)^(-1/2) = U V^T.

    1e-10: squares of singular values with a condition of up to 1e2 lose digits twice.
    """
    gradients = random_gradients([shape], 6)
    (path,) = follow(recipe(WITHOUT_ACCUMULATION[name], lr=1.0), [torch.zeros(shape, dtype=torch.float64)], gradients)
    for (before, after), (g,) in zip(pairwise([torch.zeros_like(path[0]), *path]), gradients, strict=True):
        assert float((before - after - polar(g)).abs().max()) <= 1e-10


@pytest.mark.parametrize("shape", [(5, 8), (6, 6)], ids=str)
def test_instantaneous_kl_shampoo_is_the_polar_factor(shape: tuple[int, int]) -> None:
    """L = G G^T / n, then R = G^T L^-1 G / m = (n / m) V V^T:  L^(-1/2) G R^(-1/2) = sqrt(m) U V^T  for m <= n.

    1e-10: an inverse of squares with a condition of up to 1e4, and its product with them.
    """
    m, n = shape
    statistic = {"kind": "bregman", "q": 0, "beta": 0.0, "order": "gauss_seidel", "normalize": "dimension"}
    declared = forgetful(exponent="1/2", statistic={**statistic, "first": "identity"})
    for seed in range(4):
        g, parameter = normal(*shape, seed=seed), torch.nn.Parameter(torch.zeros(shape, dtype=torch.float64))
        optimizer = Optimizer([parameter], {"update": declared, "routes": []}, lr=1.0)
        parameter.grad = g.clone()
        optimizer.step()
        assert float((parameter.detach() + math.sqrt(m) * polar(g)).abs().max()) <= 1e-10
        (right,) = (x for key, x in optimizer.state[parameter].items() if key.endswith("/factor.1"))
        assert float((right - n / m * polar(g).T @ polar(g)).abs().max()) <= 1e-10


UNIT_FREE = (
    *("shampoo", "shampoo_int8", "one_sided_shampoo", "caspr", "eshampoo", "reference/distributed_shampoo"),
    *("soap_fitted", "soap_kl", "shampoo_kl", "okls", "splus", "swan", "muon", "scion"),
)


@pytest.mark.parametrize("name", UNIT_FREE)
def test_steps_do_not_depend_on_the_unit_of_gradients(name: str) -> None:
    """Gradients a million times as large move parameters alike. 1e-8: eps of Adam."""
    shapes = [(5, 8), (8, 5), (6, 6)]
    init, gradients = [normal(*s, seed=5) for s in shapes], random_gradients(shapes, 2 * STEPS)
    paths = [follow(recipe(name, lr=LR), init, [[k * g for g in row] for row in gradients]) for k in (1e2, 1e8)]
    assert distance(paths[0], paths[1], init) <= 1e-8
