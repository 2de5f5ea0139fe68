"""More shipped recipes against the formulas of their papers, in float64: signs, Adam's relatives, Muon's, low rank.

As in `test_methods.py`: each definition gives the updates U_t from the gradients alone, and a recipe has to follow
W <- (1 - lr decay) W - lr U.
"""

import math
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from eigengraft import Optimizer, compose, load_recipe, noise
from eigengraft.optimizers.recipe.loading import parse_yaml
from eigengraft.preconditioners.polar.coefficients import CoefficientName, triples
from eigengraft.preconditioners.polar.spectral import NewtonSchulz

from ..house.pages import blocks
from ..refusals import refused
from ..trajectories import distance, follow, normal, random_gradients, recipe
from .test_methods import (
    BASIS,
    CARRIED,
    KL,
    LR,
    RMS,
    Gram,
    Mean,
    OwnRMS,
    Sign,
    adam,
    ahead,
    by_eigh,
    by_qr,
    cadence,
    in_basis,
    moved,
    muon,
    newton_schulz,
    normuon,
    of_rms,
    power,
)

pytestmark = pytest.mark.slow

STEPS = 12
SHAPES = [(5, 8), (8, 5), (6, 6)]
Updates = Callable[[Sequence[Tensor]], list[Tensor]]


def means(given: Sequence[Tensor], beta: float, corrected: bool = False) -> list[Tensor]:
    """M <- b M + (1 - b) G;  M, or M / (1 - b^t)."""
    mean, found = Mean(beta, *given[0].shape), []
    for g in given:
        mean(g)
        found.append(mean.value() if corrected else mean.raw)
    return found


# Signs and Adam's relatives.


def lion(given: Sequence[Tensor]) -> list[Tensor]:
    m, found = torch.zeros_like(given[0]), []
    for g in given:
        found.append((0.9 * m + 0.1 * g).sign())
        m = 0.99 * m + 0.01 * g
    return found


def signum(given: Sequence[Tensor]) -> list[Tensor]:
    return [m.sign() for m in means(given, 0.9)]


def laprop(given: Sequence[Tensor]) -> list[Tensor]:
    v, m = Mean(0.999, *given[0].shape), Mean(0.9, *given[0].shape)
    return [m(g / (v(g.square()).sqrt() + 1e-15)) for g in given]


def adopt(given: Sequence[Tensor]) -> list[Tensor]:
    """v_0 = G_0^2, no step;  m <- 0.9 m + 0.1 clip(G / max(sqrt(v), eps), t^(1/4));  v <- b v + (1 - b) G^2."""
    v, m, found = given[0].square(), torch.zeros_like(given[0]), [torch.zeros_like(given[0])]
    for t, g in enumerate(given[1:], start=1):
        bound = t**0.25
        m = 0.9 * m + 0.1 * (g / v.sqrt().clamp(min=1e-6)).clamp(-bound, bound)
        v = 0.9999 * v + 0.0001 * g.square()
        found.append(m)
    return found


def adam_atan2(given: Sequence[Tensor]) -> list[Tensor]:
    m, v = Mean(0.9, *given[0].shape), Mean(0.999, *given[0].shape)
    return [1.27 * torch.atan2(m(g), v(g.square()).sqrt()) for g in given]


def adam_before_correction(m: Mean, v: Mean, g: Tensor, eps: float) -> Tensor:
    """M / (sqrt(V) + eps) sqrt(1 - b2^t) / (1 - b1^t), as Grams', GaLore's, Fira's and APOLLO's codes."""
    v(g.square())
    return m(g) / (v.raw.sqrt() + eps) * math.sqrt(1 - v.beta**v.t)


def grams(given: Sequence[Tensor]) -> list[Tensor]:
    m, v = Mean(0.9, *given[0].shape), Mean(0.999, *given[0].shape)
    return [adam_before_correction(m, v, g, 1e-6).abs() * g.sign() for g in given]


def mars(given: Sequence[Tensor]) -> list[Tensor]:
    """Adam of C / max(1, ||C||),  C = G + 0.025 b / (1 - b) (G - G_last) with b = 0.95, G_last = 0 at first."""
    last, corrected = torch.zeros_like(given[0]), []
    for g in given:
        c = g + 0.025 * 0.95 / 0.05 * (g - last)
        corrected.append(c / max(1.0, float(c.norm())))
        last = g
    return adam(corrected, 0.95, 0.99)


def ademamix(given: Sequence[Tensor]) -> list[Tensor]:
    """(M_1 / (1 - 0.9^t) + a_t M_2) / (sqrt(V^) + eps),  a_t = 5 t / T,  M_2 <- b_t M_2 + (1 - b_t) G,
    b_t = exp(ln 0.9 ln 0.9999 / ((1 - t / T) ln 0.9999 + (t / T) ln 0.9)), both constant from T = 8 on."""
    m, v, slow, found = Mean(0.9, *given[0].shape), Mean(0.999, *given[0].shape), torch.zeros_like(given[0]), []
    fast, last = math.log(0.9), math.log(0.9999)
    for t, g in enumerate(given, start=1):
        x = min(t / 8, 1.0)
        beta = math.exp(fast * last / ((1 - x) * last + x * fast))
        slow = beta * slow + (1 - beta) * g
        found.append((m(g) + 5 * x * slow) / (v(g.square()).sqrt() + 1e-8))
    return found


def adam_mini(given: Sequence[Tensor]) -> list[Tensor]:
    m, v = Mean(0.9, *given[0].shape), Mean(0.95, len(given[0]), 1)
    return [m(g) / (v(g.square().mean(1, keepdim=True)).sqrt() + 1e-8) for g in given]


# Muon's relatives.


def steps_of(x: Tensor, triples: Sequence[tuple[float, float, float]]) -> Tensor:
    """X <- a X + b (X X^T) X + c (X X^T)^2 X with another triple at each step; X as it is given."""
    for a, b, c in triples:
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


def matched(x: Tensor) -> Tensor:
    return x * (0.2 * math.sqrt(max(x.shape)))


def spectrally(x: Tensor) -> Tensor:
    return x * math.sqrt(x.shape[0] / x.shape[1])


def muon_squared(given: Sequence[Tensor]) -> list[Tensor]:
    """NS_3(M / (sqrt(V) + eps)) sqrt(m / n), both means without correction."""
    v = means([g.square() for g in given], 0.95)
    return [spectrally(newton_schulz(m / (x.sqrt() + 1e-8), 3)) for m, x in zip(means(given, 0.95), v, strict=True)]


def ended(x: Tensor) -> Tensor:
    """Eight steps of Muon's, and two that end them at 1."""
    return newton_schulz(newton_schulz(x, 8), 2, (2.0, -1.5, 0.5), scaled=False)


def polargrad(given: Sequence[Tensor]) -> list[Tensor]:
    """<M, U> U, which is ||M||_* U V^T to what the steps leave."""
    return [ended(m) * float((m * ended(m)).sum()) for m in means(given, 0.95)]


def muoneq(given: Sequence[Tensor]) -> list[Tensor]:
    return [matched(newton_schulz(x / x.norm(dim=1, keepdim=True))) for x in ahead(given, 0.95)]


def mud(given: Sequence[Tensor]) -> list[Tensor]:
    """V <- b V + G, M = G + b V;  rows of size 1, tril(Q Q^T)^-1 Q, rows of size 1, on the shorter side."""
    v, found = torch.zeros_like(given[0]), []
    for g in given:
        v = 0.95 * v + g
        x = g + 0.95 * v
        q = x if x.shape[0] <= x.shape[1] else x.T
        q = q / q.norm(dim=1, keepdim=True)
        q = torch.linalg.inv((q @ q.T).tril()) @ q
        q = q / q.norm(dim=1, keepdim=True)
        found.append(matched(q if x.shape[0] <= x.shape[1] else q.T))
    return found


YOU = ((3.9505, -6.3029, 2.6377), (3.7418, -5.5913, 2.3037), (2.8769, -3.1427, 1.2046), (2.8366, -3.0525, 1.2012))


def turbo_muon(given: Sequence[Tensor]) -> list[Tensor]:
    """X <- diag(s) X with s_i = (sum_j |X X^T|_ij)^(-1/2), rows of the shorter side, then four steps."""
    found = []
    for m in ahead(given, 0.95):
        x = m if m.shape[0] <= m.shape[1] else m.T
        x = steps_of(x / (x @ x.T).abs().sum(1, keepdim=True).sqrt(), YOU)
        found.append(matched(x if m.shape[0] <= m.shape[1] else x.T))
    return found


EXPRESS_OF_DION2 = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)


def best_quintic(least: float, most: float) -> tuple[float, float, float]:
    """(a, b, c) of the odd p of degree 5 with the least max |1 - p| on [least, most], by Remez' algorithm: the error
    has one size and alternating signs at the ends and at two extrema between them."""
    if least / most >= 1 - 5e-6:
        return 15 / 8 / most, -10 / 8 / most**3, 3 / 8 / most**5
    inner, before = [(3 * least + most) / 4, (least + 3 * most) / 4], math.inf
    for _ in range(50):
        points = torch.tensor([least, *inner, most], dtype=torch.float64)
        signs = torch.tensor([1.0, -1.0, 1.0, -1.0], dtype=torch.float64)
        equations = torch.stack([points, points**3, points**5, signs], dim=1)
        a, b, c, error = torch.linalg.solve(equations, torch.ones(4, dtype=torch.float64)).tolist()
        root = math.sqrt(9 * b**2 - 20 * a * c)
        inner = [math.sqrt((-3 * b - root) / (10 * c)), math.sqrt((-3 * b + root) / (10 * c))]
        if abs(before - error) <= 1e-15:
            break
        before = error
    return a, b, c


def polar_express_steps(count: int, cushion: float, margin: float = 1.0) -> list[tuple[float, float, float]]:
    """Amsel et al. 2025, Theorem 4.1 and section 4.4: each step is the best one on the image [l, 2 - l] of the steps
    before it, which begins at [0.001, 1].  A step whose interval is wide is fitted to [cushion u, u] instead and scaled
    so that its image is centered at 1.  All but the last are steps on X / margin."""
    low, high, steps = 1e-3, 1.0, []
    for k in range(count):
        a, b, c = best_quintic(max(low, cushion * high), high)
        if cushion * high > low:
            ends = sum(a * x + b * x**3 + c * x**5 for x in (low, high))
            a, b, c = (2 * x / ends for x in (a, b, c))
        if k < count - 1:
            a, b, c = a / margin, b / margin**3, c / margin**5
        steps.append((a, b, c))
        low = a * low + b * low**3 + c * low**5
        high = 2 - low
    return steps


def divided(triple: tuple[float, float, float], margin: float) -> tuple[float, float, float]:
    a, b, c = triple
    return a / margin, b / margin**3, c / margin**5


def express(steps: int) -> list[tuple[float, float, float]]:
    """Algorithm 1 of the paper: eight steps fitted without a margin, whose first seven then have one of 1.01, and the
    last one for ever."""
    found = polar_express_steps(8, cushion=0.02407327424182761)
    return ([divided(x, 1.01) for x in found[:-1]] + [found[-1]] * steps)[:steps]


@pytest.mark.parametrize("steps", [1, 5, 8, 11])
def test_polar_express_is_the_composition_of_best_steps(steps: int) -> None:
    """The published digits: 1e-7 is what the last interval, [1 - 1e-8, 1 + 1e-8], leaves undetermined."""
    found = triples("polar_express", steps)
    expected = [divided(x, 1.01) if k == 0 else x for k, x in enumerate(express(steps))]
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-7, atol=0)


def test_polar_express_for_five_steps_knows_its_margins() -> None:
    expected = polar_express_steps(5, cushion=0.02, margin=1.02)
    for found, triple in (
        (triples("polar_express_5", 5), [divided(expected[0], 1.02), *expected[1:]]),
        (EXPRESS_OF_DION2, expected),
    ):
        torch.testing.assert_close(torch.tensor(found), torch.tensor(triple), rtol=1e-12, atol=0)


@pytest.mark.parametrize(
    ("name", "steps", "error"), [("polar_express", 5, 0.16), ("polar_express", 6, 0.007), ("polar_express", 8, 1e-13)]
)
def test_polar_express_ends_at_polar_factors(name: CoefficientName, steps: int, error: float) -> None:
    """Singular values from 0.001 to 1, of matrices diag(cos t, sin t)."""
    t = torch.logspace(-3, -0.2, 2000, dtype=torch.float64).asin()
    x = torch.diag_embed(torch.stack([t.cos(), t.sin()], dim=-1))
    polar = NewtonSchulz(steps=steps, coefficients=name).polar(x)
    assert 0.5 * error * (steps < 8) <= float((polar - torch.eye(2)).abs().max()) <= error


@pytest.mark.parametrize("steps", [4, 6])
def test_five_steps_are_five_steps(steps: int) -> None:
    with refused(ValueError, "polar_express_5", steps):
        NewtonSchulz(steps=steps, coefficients="polar_express_5")


def polar_express(given: Sequence[Tensor]) -> list[Tensor]:
    """The steps on X / (1.01 ||X||)."""
    found = []
    for m in ahead(given, 0.95):
        x = m if m.shape[0] <= m.shape[1] else m.T
        x = steps_of(x / (1.01 * x.norm()), express(5))
        found.append(matched(x if m.shape[0] <= m.shape[1] else x.T))
    return found


def sinkhorn(x: Tensor, rounds: int = 5) -> Tensor:
    for _ in range(rounds):
        x = x / x.square().mean(1, keepdim=True).sqrt()
        x = x / x.square().mean(0, keepdim=True).sqrt()
    return x


def aro(given: Sequence[Tensor]) -> list[Tensor]:
    """Q <- qr(M f(Q^T M)^T);  Q f(Q^T M), an RMS of 0.2; on the right of tall matrices. Signs cancel, as f is odd."""
    tall = given[0].shape[0] > given[0].shape[1]
    q, found = torch.eye(min(given[0].shape), dtype=torch.float64), []
    for m in means(given, 0.95):
        q = torch.linalg.qr(m.T @ sinkhorn(m @ q) if tall else m @ sinkhorn(q.T @ m).T).Q
        found.append(of_rms(sinkhorn(m @ q) @ q.T if tall else q @ sinkhorn(q.T @ m), 0.2))
    return found


class Balanced(Sign):
    """Rows scaled to RMS 1, then columns, ten times."""

    def __call__(self, g: Tensor, d: Tensor) -> Tensor:
        return sinkhorn(d, 10)


def sinksoap(given: Sequence[Tensor]) -> list[Tensor]:
    """The lines of the record (427dfc6) without eps: a norm of sqrt(m), and NorMuon unless the matrix is square."""
    (m, n), found = given[0].shape, []
    long, v = int(m >= n), Mean(0.95, *((m, 1) if m >= n else (1, n)))
    for x in in_basis(given, ahead(given, 0.95), Gram((m, n)), by_eigh, Balanced(), lambda t: t >= 2):
        x = x * (math.sqrt(m) / x.norm())
        if m != n:
            v(x.square().mean(long, keepdim=True))
            x = x / v.raw.sqrt()
        found.append(x * (math.sqrt(m) / x.norm()))
    return found


def okls(given: Sequence[Tensor]) -> list[Tensor]:
    """The lines of `okls_step.py` without eps: S_L = sqrt(m / n) G G^T / |G|,  S_L <- S_L + |S_L| / sqrt(m) I first,
    P = S^(-1/2);  in each step, the first too,  S_L <- b S_L + (1 - b) (G P_R)(G P_R)^T / n  with the old P,  then the
    update P_L N P_R c s.  N is the Nesterov momentum, 1 / c its standard deviation for independent G with variance 1,
    s = sqrt(m / n) / (sqrt(m) + sqrt(n)). Without eps, a first gradient of 0 makes the code
    divide by 0. Here the first gradient that is not 0 starts the factors, and is then observed once."""
    (m, n), b1, b2 = given[0].shape, 0.9684, 0.9482
    begin, g = next((t, g) for t, g in enumerate(given) if g.any())
    s = [math.sqrt(m / n) * g @ g.T / g.norm(), math.sqrt(n / m) * g.T @ g / g.norm()]
    s = [a + a.norm() / math.sqrt(len(a)) * torch.eye(len(a), dtype=torch.float64) for a in s]
    p, found = [power(a, -0.5) for a in s], []
    factor = ((1 - b1) / (1 + b1) * (1 + 2 * b1 - 2 * b1**3)) ** -0.5 * math.sqrt(m / n) / (math.sqrt(m) + math.sqrt(n))
    for t, (g, x) in enumerate(zip(given, ahead(given, b1), strict=True)):
        right, left = g @ p[1], p[0] @ g
        if t > begin or t == 0 == begin:
            s = [b2 * s[0] + (1 - b2) / n * right @ right.T, b2 * s[1] + (1 - b2) / m * left.T @ left]
            p = [power(a, -0.5) for a in s]
        found.append(p[0] @ x @ p[1] * factor)
    return found


# Low rank, and momenta with error feedback.

RANK = 3


def leading(g: Tensor, old: Tensor | None) -> Tensor:
    """The leading left singular vectors, with the signs of the old ones."""
    p = torch.linalg.svd(g, full_matrices=False)[0][:, :RANK]
    old = torch.eye(len(g), RANK, dtype=torch.float64) if old is None else old
    return p * torch.where((p * old).sum(0) < 0, -1.0, 1.0)


def wide(given: Sequence[Tensor], update: Callable[[Sequence[Tensor]], list[Tensor]]) -> list[Tensor]:
    """The method on matrices whose first axis is the projected one: of tall and of square ones the transposes."""
    m, n = given[0].shape
    return update(given) if m < n else [u.T for u in update([g.T for g in given])]


def projected(given: Sequence[Tensor], finish: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]) -> list[Tensor]:
    """finish(G, P, R, N) with R = P^T G, N = Adam's direction of R with eps before the correction for bias; P renewed
    at updates 1, 4, 8, 12."""
    m, v = (Mean(beta, RANK, given[0].shape[1]) for beta in (0.9, 0.999))
    p, found = None, []
    for t, g in enumerate(given, start=1):
        p = leading(g, p) if t == 1 or t % 4 == 0 else p
        assert p is not None
        r = p.T @ g
        found.append(finish(g, p, r, adam_before_correction(m, v, r, 1e-6)))
    return found


class Limiter:
    """X, or X shortened to 1.01 times the norm that the last one had in the end."""

    def __init__(self) -> None:
        self.size: float | None = None

    def __call__(self, x: Tensor) -> Tensor:
        norm = float(x.norm())
        self.size = norm if self.size is None else min(norm, 1.01 * self.size)
        return x * (self.size / norm)


def galore(given: Sequence[Tensor]) -> list[Tensor]:
    return wide(given, lambda gs: projected(gs, lambda g, p, r, n: 0.25 * p @ n))


def fira(given: Sequence[Tensor]) -> list[Tensor]:
    """(P N + limited((G - P R) diag(||N_j|| / ||R_j||))) / 4, Algorithm 1 of the paper."""
    limited = Limiter()

    def finish(g: Tensor, p: Tensor, r: Tensor, n: Tensor) -> Tensor:
        return 0.25 * (p @ n + limited((g - p @ r) * (n.norm(dim=0) / r.norm(dim=0))))

    return wide(given, lambda gs: projected(gs, finish))


def dion2(given: Sequence[Tensor]) -> list[Tensor]:
    """Two of five or six rows with the largest sum of sizes, decayed by 0.95 where they are used."""

    def update(gs: Sequence[Tensor]) -> list[Tensor]:
        m, found = torch.zeros_like(gs[0]), []
        for g in gs:
            m = m + g
            rows = m.abs().sum(1).argsort(descending=True)[:2]
            x = m[rows] / (1.02 * m[rows].norm())
            found.append(torch.zeros_like(m).index_copy(0, rows, steps_of(x, EXPRESS_OF_DION2)))
            m = m.index_copy(0, rows, 0.95 * m[rows])
        return found

    m, n = given[0].shape
    updates = update(given) if m <= n else [u.T for u in update([g.T for g in given])]
    return [spectrally(u) for u in updates]


EXACT = "update.spectral.solver.precision=input"
LOW_RANK = ("update.projected.rank=3", "update.projected.renewal.steps=4", "update.projected.renewal.stagger=none")

METHODS: dict[str, tuple[Updates, float, tuple[str, ...]]] = {
    "lion": (lion, 0.1, ()),
    "signum": (signum, 0.0, ()),
    "laprop": (laprop, 0.0, ()),
    "adopt": (adopt, 0.0, ()),
    "adam_atan2": (adam_atan2, 0.01, ()),
    "grams": (grams, 0.01, ()),
    "mars": (mars, 0.01, ()),
    "ademamix": (ademamix, 0.1, ("total_steps=8",)),
    "adam_mini": (adam_mini, 0.1, ()),
    "muon_squared": (muon_squared, 0.01, ()),
    "polargrad": (polargrad, 0.01, ()),
    "muoneq": (muoneq, 0.01, (EXACT,)),
    "mud": (mud, 0.01, ()),
    "turbo_muon": (turbo_muon, 0.01, (EXACT,)),
    "polar_express": (polar_express, 0.01, (EXACT,)),
    "aro": (aro, 0.01, ()),
    # one gradient leaves a factor singular, and norms of rows and columns in its null space are rounding errors
    "sinksoap": (sinksoap, 0.025, (f"{BASIS}.start=2",)),
    # exact roots without a ridge: those of the recipe are 1e-4 off
    "okls": (okls, 0.0303, tuple(f"update.shampoo.solver.{x}" for x in ("kind=eigh", "eps=0"))),
    "galore": (galore, 0.0, LOW_RANK),
    "fira": (fira, 0.0, LOW_RANK),
    "dion2": (dion2, 0.01, ()),
}


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", METHODS)
def test_a_recipe_is_its_papers_formula(name: str, shape: tuple[int, int]) -> None:
    """1e-9 for the reasons given in `test_methods.py`."""
    defined, decay, overrides = METHODS[name]
    init, gradients = [normal(*shape, seed=5)], random_gradients([shape], STEPS)
    ours = follow(recipe(name, *overrides, lr=LR), init, gradients)
    assert distance(ours, [moved(init[0], defined([g for (g,) in gradients]), decay)], init) <= 1e-9


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_okls_starts_with_the_first_gradient_that_is_not_zero(shape: tuple[int, int]) -> None:
    """1e-9 as above."""
    _, decay, overrides = METHODS["okls"]
    init, gradients = [normal(*shape, seed=5)], random_gradients([shape], STEPS)
    gradients[0][0].zero_()
    ours = follow(recipe("okls", *overrides, lr=LR), init, gradients)
    assert distance(ours, [moved(init[0], okls([g for (g,) in gradients]), decay)], init) <= 1e-9


@pytest.mark.parametrize("shape", [(1, 6), (6, 1)], ids=str)
@pytest.mark.parametrize("name", ["normuon", "adam_mini", "muon_squared", "muoneq", "polargrad", "mud", "aro", "dion2"])
def test_the_weight_of_a_layer_with_one_input_or_output_is_a_matrix(name: str, shape: tuple[int, int]) -> None:
    """1e-9 as above."""
    defined, decay, overrides = {**METHODS, "normuon": (normuon, 0.01, ())}[name]
    init, gradients = [normal(*shape, seed=5)], random_gradients([shape], STEPS)
    loaded = load_recipe(name, overrides)
    ours = follow(lambda given: Optimizer([("layer.weight", given[0])], loaded, lr=LR), init, gradients)
    assert distance(ours, [moved(init[0], defined([g for (g,) in gradients]), decay)], init) <= 1e-9


def test_no_two_of_these_formulas_are_the_same() -> None:
    given = [g for (g,) in random_gradients([(5, 8)], STEPS)]
    init = torch.zeros(5, 8, dtype=torch.float64)
    paths = [moved(init, defined(given)) for defined, _, _ in METHODS.values()]
    for i, one in enumerate(paths):
        assert all(distance([one], [other], [init]) > 1e-2 for other in paths[:i])


def soap_h(given: Sequence[Tensor], factors: Gram | KL) -> list[Tensor]:
    return in_basis(given, 0.95, factors, by_qr, RMS(given[0].shape), lambda t: t >= 2)


ON_SPHERES: dict[str, tuple[Updates, tuple[str, ...]]] = {
    "muon_h": (muon, (EXACT,)),
    "adam_h": (lambda given: adam(given, 0.9, 0.95), ()),
    "soap_h": (lambda given: soap_h(given, Gram(given[0].shape)), (CARRIED,)),
    "soap_kl_h": (lambda given: soap_h(given, KL(given[0].shape)), (CARRIED,)),
}


def on_sphere(init: Tensor, updates: Sequence[Tensor]) -> Tensor:
    """W <- (W - lr U ||W|| / ||U||) ||W_0|| / ||.||, `[steps, *shape]`."""
    path, w, radius = [], init, init.norm()
    for u in updates:
        w = w - LR * u * (w.norm() / u.norm())
        w = w * (radius / w.norm())
        path.append(w)
    return torch.stack(path)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", ON_SPHERES)
def test_steps_on_spheres_are_those_of_the_method(name: str, shape: tuple[int, int]) -> None:
    """1e-9 as above."""
    defined, overrides = ON_SPHERES[name]
    init, gradients = [normal(*shape, seed=5)], random_gradients([shape], STEPS)
    expected = on_sphere(init[0], defined([g for (g,) in gradients]))
    assert distance(follow(recipe(name, *overrides, lr=LR), init, gradients), [expected], init) <= 1e-9


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_soap_with_schedule_free_steps_by_its_direction_without_momentum(shape: tuple[int, int]) -> None:
    """Z <- Z - lr (U + rate Y),  X <- X + (Z - X) / t,  Y = 0.1 Z + 0.9 X,  U is RMSProp in SOAP's basis at Y.

    1e-9 as above."""
    init, gradients = normal(*shape, seed=5), random_gradients([shape], STEPS)
    given = [g for (g,) in gradients]
    z, x, y, path = init, init, init, []
    for t, u in enumerate(in_basis(given, given, Gram(shape), by_qr, RMS(shape)), start=1):
        z = z - LR * (u + 0.01 * y)
        x = x + (z - x) / t
        y = 0.1 * z + 0.9 * x
        path.append(y)
    ours = follow(recipe("soap_schedule_free", *cadence(BASIS, CARRIED), lr=LR), [init], gradients)
    assert distance(ours, [torch.stack(path)], [init]) <= 1e-9


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_blend_of_the_guide_is_of_polar_factors_with_and_without_the_nuclear_norm(shape: tuple[int, int]) -> None:
    """0.95 * 0.2 sqrt(max(m, n)) P + 0.05 <N, P> P,  P = NS(N), where <N, P> is the nuclear norm of N for the exact
    polar factor. 1e-9 as above."""
    (block,) = [x for x in blocks("docs/guide/recipes.md", "yaml") if "nuclear_norm" in x]
    exact = [f"update.sum.paths.{name}.stages.spectral.solver.precision=input" for name in ("polar", "nuclear")]
    init, gradients = [normal(*shape, seed=5)], random_gradients([shape], STEPS)
    updates = []
    for m in ahead([g for (g,) in gradients], 0.95):
        p = newton_schulz(m)
        updates.append(0.95 * matched(p) + 0.05 * float((m * p).sum()) * p)
    ours = follow(recipe(parse_yaml(block), *exact, lr=LR), init, gradients)
    assert distance(ours, [moved(init[0], updates, 0.01)], init) <= 1e-9


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Tensor]:
    """What a stage draws, which only the shape decides here: standard normal numbers `shape`."""

    def draw(*shape: int) -> Tensor:
        return normal(*shape, seed=77)

    def stacked(seeds: Tensor, step: Tensor, shape: tuple[int, ...], dtype: torch.dtype, stream: int = 0) -> Tensor:
        return draw(*shape).to(dtype).expand(len(seeds), *shape)

    monkeypatch.setattr(noise, "normal", stacked)
    return draw


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", ["apollo", "apollo_mini"])
def test_apollo_scales_the_gradient(name: str, shape: tuple[int, int], drawn: Callable[..., Tensor]) -> None:
    """limited(G diag(s)), s_j = ||N_j|| / ||R_j||, R = P G with P of variance 1 / r; one s and sqrt(128) in the mini.

    1e-9 as above.
    """
    rank, mini = (1, True) if name == "apollo_mini" else (3, False)

    def update(gs: Sequence[Tensor]) -> list[Tensor]:
        p, limited, found = drawn(len(gs[0]), rank).T / math.sqrt(rank), Limiter(), []
        m, v = (Mean(beta, rank, gs[0].shape[1]) for beta in (0.9, 0.999))
        for g in gs:
            r = p @ g
            n = adam_before_correction(m, v, r, 1e-6)
            found.append(limited(g * (n.norm() / r.norm() if mini else n.norm(dim=0) / r.norm(dim=0))))
        return [x * math.sqrt(128) for x in found] if mini else found

    init, gradients = [normal(*shape, seed=5)], random_gradients([shape], STEPS)
    ours = follow(recipe(name, f"update.projected.rank={rank}", lr=LR), init, gradients)
    assert distance(ours, [moved(init[0], wide([g for (g,) in gradients], update), 0.0)], init) <= 1e-9


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_dion_orthogonalizes_what_a_power_step_finds(shape: tuple[int, int], drawn: Callable[..., Tensor]) -> None:
    """P = qr(M Q), R = M^T P, M <- M - 0.05 P R^T, Q = R over its column norms, P Q^T sqrt(m / n). 1e-9 as above."""
    init, gradients = [normal(*shape, seed=5)], random_gradients([shape], STEPS)
    m, q, updates = torch.zeros(shape, dtype=torch.float64), drawn(shape[1], RANK), []
    for (g,) in gradients:
        m = m + g
        p = torch.linalg.qr(m @ q).Q
        r = m.T @ p
        m, q = m - 0.05 * p @ r.T, r / r.norm(dim=0)
        updates.append(spectrally(p @ q.T))
    ours = follow(recipe("dion", "update.dion.rank=3", lr=LR), init, gradients)
    assert distance(ours, [moved(init[0], updates)], init) <= 1e-9


ROLES: dict[str, dict[str, tuple[tuple[int, ...], Updates]]] = {
    "scion": {
        "layer.weight": ((5, 8), lambda g: [50 * spectrally(newton_schulz(m)) for m in means(g, 0.9)]),
        "lm_head.weight": ((6, 4), lambda g: [3000 / 4 * m.sign() for m in means(g, 0.9)]),
        "wte.weight": ((6, 4), lambda g: [50 * m / m.square().mean(1, keepdim=True).sqrt() for m in means(g, 0.9)]),
        "layer.bias": ((7,), lambda g: [50 * m / m.square().mean().sqrt() for m in means(g, 0.9)]),
    },
    "modular_norm": {
        "layer.weight": ((5, 8), lambda g: [spectrally(ended(m)) for m in means(g, 0.95)]),
        "wte.weight": ((6, 4), lambda g: [m / m.square().mean(1, keepdim=True).sqrt() for m in means(g, 0.95)]),
        "layer.bias": ((7,), lambda g: [m / m.square().mean().sqrt() for m in means(g, 0.95)]),
    },
    "adam_mini": {
        "wte.weight": ((6, 4), adam_mini),
        "norm.weight": (
            (7,),
            lambda g: [
                m / (v.sqrt() + 1e-8)
                for m, v in zip(means(g, 0.9, True), means([x.square().mean() for x in g], 0.95, True), strict=True)
            ],
        ),
    },
}


# ------------------------------------------------------------------------------------------------------ 4-bit Shampoo
def root_of_all(a: Tensor) -> Tensor:
    """(A + 1e-6 lambda_max I)^(-1/4)"""
    values, vectors = torch.linalg.eigh(a)
    return (vectors * (values + 1e-6 * values[-1]) ** -0.25) @ vectors.T


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", ["shampoo_4bit", "shampoo_cq_ef"])
@pytest.mark.parametrize(("t1", "t2"), [(1, 1), (2, 4)])
def test_4_bit_shampoo_is_algorithm_3_of_the_paper(name: str, shape: tuple[int, int], t1: int, t2: int) -> None:
    """Wang et al. 2024, Algorithm 3, with all state in float64: the first-order optimizer receives
    G' = U ||G|| / ||U||, U = L^(-1/4) G R^(-1/4), in place of the gradient. Statistics observe the gradients of steps
    t1, 2 t1, ...; roots are computed in steps t2, 2 t2, ..., and are the identity before."""
    init, gradients = [normal(*shape, seed=5)], random_gradients([shape], STEPS)
    left, right = (1e-6 * torch.eye(d, dtype=torch.float64) for d in shape)
    roots = [torch.eye(d, dtype=torch.float64) for d in shape]
    first, second, updates = Mean(0.9, *shape), Mean(0.999, *shape), []
    for t, (g,) in enumerate(gradients, start=1):
        if t % t1 == 0:
            left, right = 0.95 * left + 0.05 * g @ g.T, 0.95 * right + 0.05 * g.T @ g
        if t % t2 == 0:
            roots = [root_of_all(left), root_of_all(right)]
        u = roots[0] @ g @ roots[1]
        u = u * g.norm() / u.norm()
        first(u)
        second(u.square())
        updates.append(first.value() / (second.value().sqrt() + 1e-8))
    stage = "update.transform.before.graft.direction.shampoo"
    exact = (
        f"{stage}.refresh.steps={t2}",
        f"{stage}.refresh.start={t2}",
        f"{stage}.statistic.interval={t1}",
        f"{stage}.statistic.start={t1}",
        f"{stage}.solver.deficiency=add",
        "storage={}",
    )
    ours = follow(recipe(name, *exact, lr=LR), init, gradients)
    assert distance(ours, [moved(init[0], updates, 0.01)], init) <= 1e-9


@pytest.mark.parametrize("name", ["scion", "modular_norm"])
@pytest.mark.parametrize("kernel", [(3,), (3, 3), (1, 5)])
def test_convolutions_are_sums_over_kernel_positions(name: str, kernel: tuple[int, ...]) -> None:
    """U sqrt(m / c) / p, U the polar factor of the weight as a matrix m x (c p), p kernel positions (LIONS-EPFL/scion,
    SpectralConv). 1e-9 as above."""
    layer = (torch.nn.Conv1d if len(kernel) == 1 else torch.nn.Conv2d)(4, 6, kernel, bias=False, dtype=torch.float64)
    weight, optimizer = layer.weight, compose(name, layer, lr=LR)
    given = [g for (g,) in random_gradients([tuple(weight.shape)], STEPS)]
    factor = math.sqrt(6 / 4) / math.prod(kernel) * (50 if name == "scion" else 1)
    polar: Callable[[Tensor], Tensor] = newton_schulz if name == "scion" else ended
    updates = [polar(m.flatten(1)).reshape(m.shape) * factor for m in means(given, 0.9 if name == "scion" else 0.95)]
    expected = moved(weight.detach().clone(), updates, load_recipe(name).weight_decay.rate)[-1]
    for g in given:
        weight.grad = g.clone()
        optimizer.step()
    assert float((weight.detach() - expected).abs().max()) <= 1e-9 * float(expected.abs().max())


@pytest.mark.parametrize("outputs", [1, 6])
def test_convolutions_are_matrices_of_outputs_by_all_else(outputs: int) -> None:
    """0.2 sqrt(max(m, c p)) U, U the polar factor of the weight as a matrix m x (c p), p kernel positions. 1e-9 as
    above."""
    layer = torch.nn.Conv2d(4, outputs, 3, bias=False, dtype=torch.float64)
    weight, optimizer = layer.weight, compose("muon", layer, lr=LR, overrides=[EXACT])
    given = [g for (g,) in random_gradients([tuple(weight.shape)], STEPS)]
    updates = [u.reshape(weight.shape) for u in muon([g.flatten(1) for g in given])]
    expected = moved(weight.detach().clone(), updates, 0.01)[-1]
    for g in given:
        weight.grad = g.clone()
        optimizer.step()
    assert float((weight.detach() - expected).abs().max()) <= 1e-9 * float(expected.abs().max())


@pytest.mark.parametrize("name", ROLES)
def test_each_role_has_its_norm(name: str) -> None:
    """1e-9 as above; weight decay is the recipe's own."""
    shapes = [shape for shape, _ in ROLES[name].values()]
    init, gradients = [normal(*shape, seed=i) for i, shape in enumerate(shapes)], random_gradients(shapes, STEPS)
    params = [torch.nn.Parameter(x.clone()) for x in init]
    optimizer = Optimizer(list(zip(ROLES[name], params, strict=True)), name, lr=LR)
    for row in gradients:
        for p, g in zip(params, row, strict=True):
            p.grad = g.clone()
        optimizer.step()
    rate = load_recipe(name).weight_decay.rate
    for i, (_, defined) in enumerate(ROLES[name].values()):
        expected = moved(init[i], defined([row[i] for row in gradients]), rate)[-1]
        assert float((params[i].detach() - expected).abs().max()) <= 1e-9 * float(expected.abs().max())


@pytest.mark.parametrize("decay", [None, "decoupled", "cautious", "independent"])
def test_prodigy_learns_its_learning_rate(decay: str | None) -> None:
    """M <- b1 M + (1 - b1) D G, V <- b2 V + (1 - b2) (D G)^2, W <- W - lr D alpha W - lr D M / sqrt(V),
    r <- b3 r + lr D^2 <G, W_0 - W>, s <- b3 s + lr D^2 G,  D <- max(D, r / |s|_1), sums over both parameters.

    On a quadratic, so that D leaves its start: by more than a hundredfold in 40 steps. 1e-9 as above.
    """
    shapes, lr, b3 = [(5, 8), (7,)], 0.5, 0.999**0.5
    init, goal = [normal(*s, seed=1) for s in shapes], [normal(*s, seed=2) for s in shapes]
    params = [torch.nn.Parameter(x.clone()) for x in init]
    declared = load_recipe("prodigy", ["update.prodigy.inner.rms.eps=1e-60", *[f"weight_decay={decay}"] * bool(decay)])
    optimizer = Optimizer(params, declared, lr=lr, weight_decay=0.3 if decay else 0.0)
    w, m, v, s = ([x.clone() if i == 0 else torch.zeros_like(x) for x in init] for i in range(4))
    d, r = 1e-6, 0.0
    for _ in range(40):
        g = [x - y for x, y in zip(w, goal, strict=True)]
        r = b3 * r + sum(lr * d**2 * float((x * (y - z)).sum()) for x, y, z in zip(g, init, w, strict=True))
        for i in range(2):
            m[i] = 0.9 * m[i] + 0.1 * d * g[i]
            v[i] = 0.999 * v[i] + 0.001 * (d * g[i]).square()
            s[i] = b3 * s[i] + lr * d**2 * g[i]
            u = m[i] / v[i].sqrt()
            alpha = {"decoupled": 0.3, "independent": 0.3 / lr, "cautious": 0.3 * (u * w[i] > 0).double()}.get(
                decay or "", 0.0
            )
            w[i] = w[i] - lr * d * alpha * w[i] - lr * d * u
        d = max(d, r / sum(float(x.abs().sum()) for x in s))
        for p, y in zip(params, goal, strict=True):
            p.grad = p.detach() - y
        optimizer.step()
    assert d > 1e-4
    for p, x, start in zip(params, w, init, strict=True):
        assert float((p.detach() - x).abs().max()) <= 1e-9 * float((x - start).abs().max())


def test_sophia_divides_by_the_diagonal_of_the_hessian_where_it_is_known() -> None:
    """h <- 0.99 h + 0.01 H at steps 1, 4, 7, ...;  W <- (1 - 0.2 lr) W - lr clip(M / max(0.01 h, 1e-12), 1). 1e-9."""
    shape = (5, 8)
    w, h = normal(*shape, seed=5), torch.zeros(shape, dtype=torch.float64)
    p = torch.nn.Parameter(w.clone())
    optimizer, given = Optimizer([p], "sophia", lr=LR), [g for (g,) in random_gradients([shape], STEPS)]
    for t, (g, m) in enumerate(zip(given, means(given, 0.96), strict=True)):
        p.grad = g.clone()
        if t % 3 == 0:
            diagonal = 1e4 * normal(*shape, seed=100 + t)
            optimizer.provide("hessian_diagonal", {p: diagonal})
            h = 0.99 * h + 0.01 * diagonal
        optimizer.step()
        w = w * (1 - 0.2 * LR) - LR * (m / (0.01 * h).clamp(min=1e-12)).clamp(-1, 1)
        assert float((p.detach() - w).abs().max()) <= 1e-9
    assert 0.1 < float(((0.01 * h) > m.abs()).double().mean()) < 0.9  # some are clipped, some are not


def test_adam_mini_has_one_second_moment_for_each_head() -> None:
    """Heads of queries, keys and values in one projection of `nn.MultiheadAttention`, by the view `modules`."""
    attention = torch.nn.MultiheadAttention(8, 2, bias=False, dtype=torch.float64)
    route = {"name": "heads", "match": {"name": "in_proj"}, "view": "modules"}
    update = [{"kind": "momentum", "beta": 0.9}, {"kind": "rms", "beta": 0.95, "per": "block"}]
    routes = [{**route, "update": update}, *load_recipe("adam_mini").model_dump(mode="json")["routes"]]
    optimizer = compose({"base": "adam_mini", "routes": routes}, attention, lr=LR)
    weight, gradients = attention.in_proj_weight, random_gradients([(24, 8)], STEPS)
    start = weight.detach().clone()
    for (g,) in gradients:
        weight.grad = g.clone()
        optimizer.step()
    heads = zip(*(g.split(4) for (g,) in gradients), strict=True)
    moments = [zip(means(h, 0.9, True), means([x.square().mean() for x in h], 0.95, True), strict=True) for h in heads]
    updates = [
        torch.cat(parts) for parts in zip(*([m / (v.sqrt() + 1e-8) for m, v in h] for h in moments), strict=True)
    ]
    expected = moved(start, updates, 0.1)[-1]
    assert float((weight.detach() - expected).abs().max()) <= 1e-9 * float(expected.abs().max())


def constrained(w: Tensor, u: Tensor, lr: float) -> Tensor:
    """Radial brake, row floor, step, radius pin and cautious decay, as the record of track 3 has them."""
    along, before = (u * w).sum() / w.norm() ** 2, w
    u = u - 0.5 * along.clamp(max=0) * w
    u = u * (0.3825 * w.norm(dim=1, keepdim=True) / u.norm(dim=1, keepdim=True)).clamp(min=1)
    radius = w.norm() - lr * (u * w).sum() / w.norm()
    w = w - lr * u
    return w * (radius / w.norm()) * (1 - 0.025 * lr * (u * before > 0).double())


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_record_of_track_3_is_its_formulas(shape: tuple[int, int]) -> None:
    """NS12(SOAP(N)) sqrt(max(1, m / n)), constrained;  N = n M + (1 - n) G with n = 0.85 + 0.1 t / 300.

    M = 0.4385 M_fast + 0.5615 M_slow, both of decay 0.9 before update 5, and of 0.85 and 0.98 from then on. Gradients
    are at W + 0.3 D + a (W - E): D <- 0.99 D + 0.01 (W - W_last), added after updates 3 to 8; E <- E + (W - E) / 10
    from update 4 on; a goes from 0 at update 5 to 0.45 at update 8. 1e-9 as above."""
    init, gradients = normal(*shape, seed=5), random_gradients([shape], STEPS)
    given, moments = [g for (g,) in gradients], []
    fast, slow = torch.zeros(shape, dtype=torch.float64), torch.zeros(shape, dtype=torch.float64)
    for t, g in enumerate(given, start=1):
        n, b, c = 0.85 + 0.1 * t / 300, *((0.9, 0.9) if t < 5 else (0.85, 0.98))
        fast, slow = b * fast + (1 - b) * g, c * slow + (1 - c) * g
        moments.append(n * (0.4385 * fast + 0.5615 * slow) + (1 - n) * g)
    w, mean = init, torch.zeros_like(init)
    ahead, drift, path = torch.zeros_like(init), torch.zeros_like(init), []
    for t, x in enumerate(in_basis(given, moments, Gram(shape, 0.9), by_qr, OwnRMS(shape, 0.9)), start=1):
        u = newton_schulz(x, 12, (2.0, -1.5, 0.5)) * math.sqrt(max(1.0, shape[0] / shape[1]))
        moved_to = constrained(w + ahead, u, LR)
        drift = 0.99 * drift + 0.01 * (moved_to - w)
        w = moved_to
        mean = w if t <= 3 else mean + (w - mean) / 10
        ahead = 0.3 * drift if 3 <= t < 9 else torch.zeros_like(w)
        path.append(w + ahead + 0.45 * min(1.0, max(0.0, (t - 5) / 3)) * (w - mean))
    early = {
        "averaging.start": 5,
        "averaging.full": 8,
        "averaging.inner.start": 3,
        "averaging.inner.decay": 0.9,
        "averaging.inner.inner.start": 3,
        "averaging.inner.inner.stop": 9,
        "update.momentum_mixture.means": [
            {"weight": weight, "beta": [{"from": 0.9, "to": 0.9, "steps": 5}, {"from": beta, "to": beta, "steps": 1}]}
            for weight, beta in ((0.4385, 0.85), (0.5615, 0.98))
        ],
    }
    ours = follow(recipe({"base": "track3", "set": early}, *cadence(BASIS), lr=LR), [init], gradients)
    assert distance(ours, [torch.stack(path)], [init]) <= 1e-9


def gram_norm(x: Tensor) -> Tensor:
    return (x @ x.mT).norm().sqrt()


def cosine(x: Tensor, y: Tensor) -> Tensor:
    return (x * y).sum() / (x.norm() * y.norm())


def trusted(x: Tensor, raw: Tensor, g: Tensor, bounds: tuple[float, float]) -> tuple[Tensor, float]:
    """The formulas of the record's code: what becomes of the direction x of the momentum `raw`, and the gate."""
    made = x * gram_norm(raw) / gram_norm(x)
    agree = ((cosine(made, raw) - 0.2) / 0.8).clamp(0, 1)
    gate = (agree * (cosine(made, g) / cosine(raw, g).clamp_min(1e-8)).clamp(0, 1)).clamp(*bounds)
    blended = raw + gate * (made - raw)
    return blended * gram_norm(raw) / gram_norm(blended), float(gate)


def test_other_parameters_of_the_record_are_its_formulas() -> None:
    """Attention outputs by NS12(trust(SOAP(N))) constrained; embedding, head, norms and biases by Adam with rates of
    their own, which is uncorrected for norms and biases. 1e-9 as above.

    From update 4 on the head is in the eigenvectors Q of C <- 0.95 C + 0.05 G^T G, which are new in every third update:
    M <- M R and V <- V (R * R) with R = Q_last^T Q. Bases of attention outputs are new at every update from the second
    on. The look-ahead begins later."""
    shapes = {
        "attn.c_proj.weight": (5, 8),
        "wte.weight": (6, 4),
        "lm_head.weight": (4, 6),
        "layer.bias": (7,),
        "ln_f.weight": (7,),
    }
    decays = {"wte.weight": (0.99, 8.0), "layer.bias": (0.997, 0.267), "ln_f.weight": (0.99, 0.267)}
    gradients, init = random_gradients([*shapes.values()], STEPS), {n: normal(*s, seed=5) for n, s in shapes.items()}
    params = {name: torch.nn.Parameter(x.clone()) for name, x in init.items()}
    early = {
        f"routes.head.update.eigenbasis.refresh.{name}": x for name, x in (("steps", 3), ("start", 4), ("offset", 1))
    }
    optimizer = Optimizer(params.items(), {"base": "track3", "set": early}, lr=LR)
    for row in gradients:
        for p, g in zip(params.values(), row, strict=True):
            p.grad = g.clone()
        optimizer.step()
    given = {name: [row[i] for row in gradients] for i, name in enumerate(shapes)}
    for name, (beta, ratio) in decays.items():
        own, matrix = given[name], len(shapes[name]) == 2
        roots = [v.sqrt() + 1e-10 for v in means([g.square() for g in own], beta, matrix)]
        init[name] -= LR * ratio * sum(m / root for m, root in zip(means(own, 0.8, matrix), roots, strict=True))
    q, c = torch.eye(6).double(), torch.zeros(6, 6).double()
    m, v = torch.zeros(4, 6).double(), torch.zeros(4, 6).double()
    for t, g in enumerate(given["lm_head.weight"], start=1):
        c = 0.95 * c + 0.05 * g.T @ g
        if t in (4, 7, 10):
            q, last = torch.linalg.eigh(c)[1], q
            m, v = m @ (last.T @ q), v @ (last.T @ q).square()
        m, v = 0.8 * m + 0.2 * g @ q, 0.99 * v + 0.01 * (g @ q).square()
        u = m / (1 - 0.8**t) / ((v / (1 - 0.99**t)).sqrt() + 1e-10)
        init["lm_head.weight"] -= LR * 0.0833 * u @ q.T
    w, moments, own = init["attn.c_proj.weight"], list[Tensor](), given["attn.c_proj.weight"]
    m = torch.zeros(5, 8).double()
    for t, g in enumerate(own, start=1):
        b = 0.85 + 0.1 * t / 300
        m = b * m + (1 - b) * g
        moments.append(b * m + (1 - b) * g)
    soap = in_basis(own, moments, Gram((5, 8), 0.9), by_qr, OwnRMS((5, 8), 0.9), lambda t: t >= 2)
    for x, raw, g in zip(soap, moments, own, strict=True):
        w = constrained(w, newton_schulz(trusted(x, raw, g, (0.45, 0.85))[0], 12, (2.0, -1.5, 0.5)), LR)
    for name, expected in {**init, "attn.c_proj.weight": w}.items():
        assert float((params[name].detach() - expected).abs().max()) <= 1e-9 * float(expected.abs().max()), name


@pytest.mark.parametrize(("floor", "cap"), [(0.0, 1.0), (0.45, 0.85)])
def test_trust_is_the_gate_of_the_record(floor: float, cap: float) -> None:
    """The formulas of the record's code, of signs in place of SOAP's direction; 1e-12 is rounding."""
    weight, gradients = torch.nn.Parameter(normal(5, 4, seed=5)), random_gradients([(5, 4)], STEPS)
    update = [
        {"kind": "momentum", "beta": 0.9, "nesterov": True, "bias_correction": False},
        {"kind": "trust", "inner": "sign", "floor": floor, "cap": cap},
    ]
    optimizer = Optimizer([weight], {"update": update, "weight_decay": {"kind": "decoupled", "rate": 0.0}}, lr=LR)
    w, m, gates = weight.detach().clone(), torch.zeros(5, 4).double(), set()
    for (g,) in gradients:
        m = 0.9 * m + 0.1 * g
        raw = 0.9 * m + 0.1 * g
        direction, gate = trusted(raw.sign(), raw, g, (floor, cap))
        w = w - LR * direction
        gates.add(round(gate, 6))
        weight.grad = g.clone()
        optimizer.step()
        torch.testing.assert_close(weight.detach(), w, rtol=0, atol=1e-12)
    assert len(gates) > 2


@pytest.mark.parametrize("averaged", [True, False])
def test_the_tail_average_is_of_the_base_iterate_and_can_be_taken_out(averaged: bool) -> None:
    """E <- E + (W - E) / 150 from the second update on, evaluated 0.4 W + 0.6 E; training does not see it."""
    weight, gradients = torch.nn.Parameter(normal(5, 4, seed=5)), random_gradients([(5, 4)], 6)
    inner = {"kind": "ema_nesterov", "start": 2, "ahead": 0.5}
    tail = {"kind": "ema", "decay": 1 - 1 / 150, "start": 2, "bias_correction": False, "weight": 0.6, "inner": inner}
    plain = {"update": [{"kind": "heavy_ball", "beta": 0.0}], "weight_decay": {"kind": "decoupled", "rate": 0.0}}
    optimizer = Optimizer([weight], {**plain, "averaging": tail if averaged else inner}, lr=LR)
    w, drift, mean = weight.detach().clone(), torch.zeros(5, 4).double(), torch.zeros(5, 4).double()
    for t, (g,) in enumerate(gradients, start=1):
        y = weight.detach().clone()
        torch.testing.assert_close(y, w + 0.5 * drift if t > 2 else w)
        weight.grad = g.clone()
        optimizer.step()
        moved_to = y - LR * g
        drift, w = 0.99 * drift + 0.01 * (moved_to - w), moved_to
        mean = w.clone() if t == 2 else mean + (w - mean) / 150 if t > 2 else mean
    optimizer.eval()
    torch.testing.assert_close(weight.detach(), 0.4 * w + 0.6 * mean if averaged else w)
