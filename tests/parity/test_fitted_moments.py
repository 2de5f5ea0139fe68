"""The shipped SOAP against its definition on whole vectors: K = Q_1 x Q_2 x ... (Kronecker) and S_i, the sum over all
axes but i, as matrices; statistics and the sums of second moments from one covariance C of all entries.
"""

import math
from collections.abc import Sequence
from functools import reduce

import pytest
import torch
from torch import Tensor

from ..trajectories import distance, follow, normal, random_gradients, recipe
from .test_methods import Mean, by_qr, cadence, due

BETA, LR, STEPS = 0.95, 0.1, 30


def kron(factors: Sequence[Tensor]) -> Tensor:
    return reduce(torch.kron, [factor.contiguous() for factor in factors])


def partial_trace(c: Tensor, shape: Sequence[int], axis: int) -> Tensor:
    """`[D, D]` -> `[d, d]`, the trace over all axes but one."""
    p, d, q = math.prod(shape[:axis]), shape[axis], math.prod(shape[axis + 1 :])
    return torch.einsum("pdqpeq->de", c.reshape(p, d, q, p, d, q))


class Definition:
    """What the shipped recipes do to one parameter of that shape, with bases on `axes`."""

    def __init__(self, shape: Sequence[int], axes: Sequence[int], whitened: bool) -> None:
        self.shape, self.axes, self.whitened = shape, axes, whitened
        size = math.prod(shape)
        self.q = [torch.eye(d, dtype=torch.float64) for d in shape]
        self.m, self.v = Mean(BETA, size), Mean(BETA, size)
        self.c = {axis: Mean(BETA, size, size) for axis in axes}
        """The covariance as axis i has it: whitened on all other axes for KL-Shampoo, else the same for every axis."""
        self.held = 0
        """How often second moments were enlarged."""
        self.largest: set[int] = set()
        """Which of the two bounds of an update's size was the larger at some refresh."""

    def update(self, t: int, gradient: Tensor) -> Tensor:
        g = gradient.flatten()
        white = {axis: self.inverse(axis, g) for axis in self.axes} if self.whitened else {}
        eyes = [torch.eye(d, dtype=torch.float64) for d in self.shape]
        for i in self.axes:
            others = [white.get(j, eye) if j != i else eye for j, eye in enumerate(eyes)]
            self.c[i](torch.outer(kron(others) @ g, g))
        if due(t):
            self.refresh(t == 2)
        k = kron(self.q)
        return k @ ((k.T @ self.m(g)) / (self.v((k.T @ g).square()).sqrt() + 1e-8))

    def inverse(self, axis: int, g: Tensor) -> Tensor:
        """Q diag(Q^T A Q)^-1 Q^T, eigenvalues from 1e-3 of their mean up; RMS(G)^(-2/k) I before A has anything."""
        q = self.q[axis]
        if self.c[axis].t == 0:
            return torch.eye(len(q), dtype=torch.float64) / g.square().mean() ** (1 / len(self.axes))
        values = (q.T @ self.statistic(axis) @ q).diagonal()
        return (q / values.clamp_min(1e-3 * values.mean())) @ q.T

    def statistic(self, axis: int) -> Tensor:
        a = partial_trace(self.c[axis].value(), self.shape, axis)
        return a / (math.prod(self.shape) / self.shape[axis]) if self.whitened else a

    def refresh(self, first: bool) -> None:
        old, moments = kron(self.q), self.m.raw
        even = moments.square().sum() / self.v.raw.sum()
        for axis in self.axes:
            self.q[axis] = by_qr(self.statistic(axis), self.q[axis], first)
        new = kron(self.q)
        v = self.fitted((old.T @ new).square().T @ self.v.raw)
        after = ((new.T @ moments).square() / v).mean()
        bounds = [float(even), 1 - BETA]
        self.largest.add(bounds.index(max(bounds)))
        growth = max(1.0, float(after) / max(bounds))
        self.held += growth > 1
        self.v.raw = growth * v

    def fitted(self, v: Tensor) -> Tensor:
        """v prod_i S_i^T (d_i / s_i) with the sum of v; s_i = S_i w_i v, where w_i = prod_(j != i) S_j^T rho_j^-1 for
        KL-Shampoo, else 1; d_i = S_i of what s_i should be: the diagonal of C in the new basis."""
        k = kron(self.q)
        eyes = [torch.eye(d, dtype=torch.float64) for d in self.shape]
        ones = [torch.ones(1, d, dtype=torch.float64) for d in self.shape]
        s = {i: kron([eye if j == i else ones[j] for j, eye in enumerate(eyes)]) for i in self.axes}
        sought = {i: s[i] @ (k.T @ self.c[i].raw @ k).diagonal() for i in self.axes}
        rho = {i: (d / d.mean()).clamp_min(1e-3) for i, d in sought.items()}
        new = v
        for i, d in sought.items():
            weighted = v
            for j in self.axes:
                weighted = weighted / (s[j].T @ rho[j]) if self.whitened and j != i else weighted
            new = new * (s[i].T @ (d / (s[i] @ weighted)))
        return new * (v.sum() / new.sum())


BASIS = "update.eigenbasis"
CASES = [
    ("soap_fitted", (6, 6), (0, 1)),
    ("soap_fitted", (5, 8), (0, 1)),
    ("soap_fitted", (5, 8), (1,)),
    ("soap_fitted", (3, 4, 2), (0, 1, 2)),
    ("soap_kl", (5, 8), (0, 1)),
    ("soap_kl", (3, 4, 2), (0, 1, 2)),
]


@pytest.mark.parametrize(("name", "shape", "axes"), CASES, ids=str)
def test_the_shipped_recipe_is_its_definition(name: str, shape: tuple[int, ...], axes: tuple[int, ...]) -> None:
    """With a gradient 30 times too large in the middle, and gradients that agree with each other at the end. 1e-9:
    rounding (1e-16), over gaps between eigenvalues (1e-2) and the smallest second moments (1e-4 after the spike)."""
    init, gradients = [normal(*shape, seed=5)], random_gradients([shape], STEPS)
    gradients[13][0] *= 30
    for (gradient,) in gradients[20:]:
        gradient += 100 * normal(*shape, seed=6)
    definition = Definition(shape, axes, whitened=name == "soap_kl")
    path, w = [], init[0]
    for t, (g,) in enumerate(gradients, start=1):
        w = w * (1 - LR * 0.01) - LR * definition.update(t, g).reshape(shape)
        path.append(w)
    side = (f"{BASIS}.statistic.axes.side=right",) if len(axes) < len(shape) else ()
    maker = recipe(name, *cadence(f"{BASIS}.refresh", "blocking={}", *side), lr=LR)
    assert distance(follow(maker, init, gradients), [torch.stack(path)], init) <= 1e-9
    assert 0 < definition.held < STEPS // 3  # both forms of the last step were taken
    assert definition.largest == {0, 1}
