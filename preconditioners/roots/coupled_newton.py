"""Inverse roots by the coupled Newton iteration: matrix products only (Iannazzo 2006; Higham 2008, section 7.3).

A coupled iteration updates two or three matrices together, one of which tends to I. The class `Coupled` runs such
iterations and decides when each matrix stops.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from eigengraft.numerics import (
    block_norm,
    has_values,
    identity_like,
    may_branch_on_values,
    may_wait_for_values,
    per_block,
)

from .iterative import Iterative, Solved, largest_entry

Iterates = tuple[Tensor, ...]
"""The matrices `[N, d, d]` of a coupled iteration after a step. The last one tends to I."""


class Best(NamedTuple):
    """The result of an iteration.

    state: for each matrix of the stack, the iterate with the smallest error.
    error: `[N]`, ||M - I|| of that iterate, with M the matrix that tends to I.
    steps: `[N]`, number of steps that were run for each matrix.
    """

    state: Iterates
    error: Tensor
    steps: Tensor


class Coupled(Iterative):
    """X_k -> C^(-1/p),  M_k = X_k^p C -> I `[N, d, d]`:  the X_k with the least ||M_k - I||, k <= max_iterations

    C is the scaled matrix, X_k the iterate of step k, and p an integer. In floating point ||M - I|| grows again once it
    is as small as rounding errors. For every matrix, the best iterate is therefore kept, and the iteration stops when
    the error no longer falls. The residual is the smallest error, and has no unit.

    The eigenvalues of M rise to 1 one after the other. A single eigenvalue close to 0 causes an error of 1 in the
    Frobenius norm, but possibly only of 1 / d in the largest entry. With `norm: max`, the rule of Distributed Shampoo,
    the root of a large matrix may therefore satisfy `max_error` although it is wrong by a large factor in the direction
    of the smallest eigenvalue.
    """

    max_iterations: int = Field(default=40, ge=1, le=200, description="largest number of steps")
    tolerance: float = Field(default=1e-6, gt=0, description="a matrix is done when ||M - I|| is below this")
    growth: float = Field(
        default=1.0,
        ge=1,
        description="a matrix with M within 1/2 of I stops when its error is at least this times its least error",
    )
    stop: Literal["near", "rise"] = Field(
        default="near",
        description="near: a rise of the error ends the iteration only near I; rise: any rise ends it, and the "
        "iterate before the rise is the result. rise is the published rule; it also stops matrices that would "
        "converge, which `retries` solve again",
    )
    norm: Literal["frobenius", "max"] = Field(
        default="frobenius", description="norm of M - I that is the error; max: the largest absolute entry"
    )
    check_every: int = Field(
        default=4,
        ge=1,
        description="steps between checks that all matrices are done; the host waits for a device at each check",
    )

    def run(self, state: Iterates, step: Callable[[Iterates, int], Iterates]) -> Best:
        """Run steps until no matrix needs further steps. Return the iterate of each matrix with the smallest error.

        state: the iterates before the first step.
        step: function of (iterates, number of the step) that returns the next iterates.
        """
        eye = identity_like(state[-1])
        best, error = state, self._distance(state[-1] - eye)
        live, steps = error > self.tolerance, torch.zeros_like(error, dtype=torch.int32)
        for iteration in range(self.max_iterations):
            # in the first iteration the host does not wait for the device, because matrices are rarely done then
            readable = may_wait_for_values(eye) if iteration else may_branch_on_values(eye)
            if readable and iteration % self.check_every == 0 and not bool(live.any()):
                break
            if iteration and not has_values(eye):
                break  # fake tensors have no values; one step is enough for shapes and dtypes
            state = step(state, iteration)
            steps = steps + live
            new = self._distance(state[-1] - eye)
            better, ended = self._judged(new, error, iteration == 0, eye.shape[-1])
            better = live & better
            live = live & ~ended & new.isfinite() & (new > self.tolerance)
            best = tuple(torch.where(per_block(better, x), x, y) for x, y in zip(state, best, strict=True))
            error = torch.where(better, new, error)
        return Best(best, error, steps)

    def _judged(self, new: Tensor, error: Tensor, first: bool, d: int) -> tuple[Tensor, Tensor]:
        """Return (better, ended) for the new iterates, two tensors of bool `[N]`.

        better: True where the new iterate is better than all iterates before.
        ended: True where no better iterate is expected.

        new: `[N]`, error of the new iterate.
        error: `[N]`, smallest error so far.
        first: True in the first step.
        d: order of the matrices.
        """
        if self.stop == "rise":
            better = new < self.growth * error
            return better, ~better
        # The iterate of the first step always counts as better than the start. Its error may be larger than that of
        # M_0, because M_0, unlike later M_k, may have eigenvalues above 1.
        better = (new < error) | first
        # a growing error ends the iteration only if M is near I, because there the growth is due to rounding errors
        near = error <= (0.5 if self.norm == "frobenius" else 0.5 / d)  # all eigenvalues of M are within 1/2 of 1
        return better, near & ~better & ((new >= self.growth * error) | (new == error))

    def _distance(self, rest: Tensor) -> Tensor:
        """Return the norm of M - I for each matrix, by the field `norm`.

        rest: M - I `[N, d, d]`.
        """
        return largest_entry(rest) if self.norm == "max" else block_norm(rest)

    def newton(self, state: Iterates, p: int, order: int) -> Iterates:
        """X <- X T,  M <- T^p M,  T = sum over i < order of b_i (I - M)^i

        Return the next (X, M). With b_i = prod over j <= i of (1 + (j - 1) p) / (j p), T is the truncated series of
        M^(-1/p) around I. Products are computed with T - I and T^p - I in place of T and T^p. These differences tend to
        0 as M tends to I, and so do the rounding errors of their products.
        """
        x, m = state
        eye = identity_like(m)
        b = [1.0]
        for j in range(1, order):
            b.append(b[-1] * (1 + (j - 1) * p) / (j * p))
        rest = eye - m
        inner = b[-1] * eye
        for coefficient in b[-2:0:-1]:
            inner = coefficient * eye + self.times(rest, inner)
        t = self.times(rest, inner) if order > 2 else b[1] * rest
        return x + self.times(x, t), m + self.times(self.power(t, p), m)


def rational(kind: str, exponent: Fraction) -> str | None:
    """Return the reason why a solver does not accept the exponent q/p, or None if it does.

    The solvers that call this function compute p-th roots and then their q-th powers.

    kind: kind of the solver, for the message.
    exponent: q/p in lowest terms.
    """
    if exponent.denominator > 64 or exponent.numerator > 8:
        return f"{kind} takes exponents q/p with p <= 64 and q <= 8, got {exponent}"
    return None


class CoupledNewton(Coupled):
    """X <- X T,  M <- T^p M,  T = ((p + 1) I - M) / p,  from  X = z^(1/p) I,  M = z C,  z = (1 + p) / 2

    This is the iteration of Iannazzo 2006 (Higham 2008, section 7.3). C is (A + r I) / t, with A the matrix and r the
    ridge. t is a bound or an estimate of the largest eigenvalue of A + r I, chosen by the field `scaling`. X `[N, d,
    d]` tends to C^(-1/p) and M to I; convergence is quadratic for eigenvalues of z C in (0, p + 1). The root C^(-q/p)
    is the q-th power of X. The solver accepts exponents e = q/p with p <= 64 and q <= 8. The residual is ||M - I||.

    These fields reproduce Distributed Shampoo in PyTorch:

        relative: false, norm: max

    These fields reproduce Distributed Shampoo in JAX:

        relative_to: {kind: power_iteration, steps: 100}, norm: max, stop: rise, growth: 1.2, max_iterations: 100,
        retries: 5, retry_above: 0.05
    """

    kind: Literal["coupled_newton"] = "coupled_newton"

    def check(self, exponent: Fraction) -> str | None:
        return rational(self.kind, exponent)

    def solve(self, c: Tensor, exponent: Fraction, ridge: float) -> Solved:
        p, q = exponent.denominator, exponent.numerator
        z = (1 + p) / 2
        (x, _), error, steps = self.run((z ** (1 / p) * identity_like(c), z * c), lambda s, _: self.newton(s, p, 2))
        return Solved(x, error, steps, q)
