"""Distributed Shampoo in JAX (google-research/precondition, Anil et al. 2020) in float64, blocks of every shape."""

import itertools
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from eigengraft import Optimizer, load_recipe

from ..trajectories import follow, random_gradients, recipe

NAME = "reference/distributed_shampoo_jax"
DIRECTION = "update.graft.direction.shampoo"
SIZE, LONGEST, START, EVERY, LR = 8, 40, 4, 3, 0.1
SMALL = (
    f"blocking.size={SIZE}",
    f"blocking.merge={SIZE}",
    f"routes.long_axis.match.min_axis={LONGEST + 1}",
    f"update.graft.start={START}",
    f"{DIRECTION}.refresh.steps={EVERY}",
    *(f"{DIRECTION}.solver.{field}" for field in ("kind=eigh", "eps=1e-6", "relative=true", "deficiency=add")),
)
"""The recipe for small matrices, with roots up to rounding; recordings of the original are of its solver."""
EPS, BETA2, BETA1 = 1e-6, 0.999, 0.9


def root(s: Tensor, order: int) -> Tensor:
    """(S + eps lambda_max(S) I)^(-1/order)."""
    values, vectors = torch.linalg.eigh(s)
    return (vectors * (values + EPS * values.max()) ** (-1 / order)) @ vectors.T


def defined(gradients: Sequence[Tensor], preconditioned: bool) -> list[Tensor]:
    """The parameter after each step, from zero: the steps of the original in order, without weight decay."""
    m, n = gradients[0].shape
    cuts = [[slice(at, min(at + SIZE, d)) for at in range(0, d, SIZE)] for d in (m, n)]
    blocks = list(itertools.product(*cuts))
    zero = torch.zeros(m, n, dtype=torch.float64)
    eyes = [tuple(torch.eye(cut.stop - cut.start).double() for cut in block) for block in blocks]
    statistics, roots = [(EPS * left, EPS * right) for left, right in eyes], list(eyes)
    a, momentum, graft, w, path = zero, zero, zero, zero, []
    for t, g in enumerate(gradients):  # counts start at 0 there
        for k, block in enumerate(blocks):
            x, (left, right) = g[block], statistics[k]
            statistics[k] = (
                BETA2 * left + (1 - BETA2) * x @ x.T,
                BETA2 * right + (1 - BETA2) * x.T @ x,
            )
            if t % EVERY == 0:
                roots[k] = (root(statistics[k][0], 4), root(statistics[k][1], 4))
        a = BETA2 * a + (1 - BETA2) * g.square()
        f = g / (a.sqrt() + 1e-10)
        u = f
        if preconditioned:
            u = torch.zeros_like(g)
            for k, block in enumerate(blocks):
                u[block] = roots[k][0] @ g[block] @ roots[k][1]
            u = u * f.norm() / u.norm()
        momentum, graft = BETA1 * momentum + u, BETA1 * graft + f
        chosen, used = (momentum, u) if t >= START - 1 else (graft, f)
        w = w - LR * (used + BETA1 * chosen)
        path.append(w)
    return path


@pytest.mark.parametrize("shape", [(12, 4), (6, 18), (12, 20), (41, 4), (40, 4)])
def test_norms_are_over_the_parameter_and_long_axes_are_not_preconditioned(shape: tuple[int, int]) -> None:
    """Blocks of up to four shapes. The ratios of (1536, 64), (768, 2304) and (50257, 16) to blocks of 1024, and an axis
    of as much as is preconditioned. 1e-10: a million roundings, of roots of matrices with a ridge of 1e-6."""
    gradients = random_gradients([shape], 9)
    start = torch.zeros(shape, dtype=torch.float64)
    (path,) = follow(recipe(NAME, *SMALL, lr=LR, weight_decay=0.0), [start], gradients)
    expected = torch.stack(defined([g for (g,) in gradients], preconditioned=max(shape) <= LONGEST))
    assert float((path - expected).abs().max() / expected.abs().max()) <= 1e-10


@pytest.mark.parametrize("name", [NAME, "dalle_mini_quantized"])
def test_the_shapes_of_a_gpt_are_built(name: str) -> None:
    for shape, kinds in (((1536, 64), 2), ((768, 2304), 2), ((50257, 16), 1)):
        optimizer = Optimizer([("w", torch.nn.Parameter(torch.zeros(shape)))], load_recipe(name), lr=0.1)
        assert len({state.stack.block for state in optimizer.stack_states()}) == kinds
