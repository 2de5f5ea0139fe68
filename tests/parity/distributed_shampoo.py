"""Distributed Shampoo (PyTorch) for one parameter that is one block, written from its published formulas in float64.

Shi et al. 2023, arXiv:2309.06497, Algorithm 2, and the options of its code at f606606. Nothing of the library is used.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass
class Options:
    """exponents: of each axis, 0 leaves it out; default 1 / (2 order), or 1/2 of the second moment for SOAP."""

    lr: float = 0.05
    beta1: float = 0.9
    beta2: float = 0.99
    beta3: float | None = None
    eps: float = 1e-4
    frequency: int = 1
    start: int = 1
    exponents: Sequence[float] | None = None
    trace_scaling: float = 0.0
    drop_weighting: bool = False
    bias_correction: bool = True
    pseudo_inverse: tuple[float | None, float] | None = None  # (rtol, atol)
    soap: str | None = None  # None | "eigh" | "qr"
    soap_exponent: float = 0.5
    soap_ignored: Sequence[int] = ()
    kl: bool = False
    graft: dict[str, Any] | None = None  # kind, beta2, eps, drop
    weight_decay: tuple[str, float] = ("decoupled", 0.0)
    momentum: dict[str, Any] = field(default_factory=dict)  # mu, dampening, nesterov


def mode(x: Tensor, c: Tensor, axis: int) -> Tensor:
    return torch.tensordot(c, x, dims=([1], [axis])).movedim(0, axis)


class Reference:
    """The state of one parameter and its steps."""

    def __init__(self, w: Tensor, o: Options, peak: float) -> None:
        self.w, self.o, self.peak, self.t = w.clone(), o, peak, 0
        k = w.ndim
        given = o.exponents if o.exponents is not None else [1 / (2 * k)] * k
        self.axes = [i for i in range(k) if given[i] and (o.soap is None or i not in o.soap_ignored)]
        self.exponents = given
        self.a = {i: torch.zeros(w.shape[i], w.shape[i], dtype=w.dtype) for i in self.axes}
        self.c = {i: torch.eye(w.shape[i], dtype=w.dtype) for i in self.axes}  # inverse roots or bases
        self.m, self.big, self.v, self.graft = (torch.zeros_like(w) for _ in range(4))

    def step(self, g: Tensor, lr: float) -> None:
        o, self.t = self.o, self.t + 1
        kind, rate = o.weight_decay
        if kind == "l2":
            g = g + rate * self.w
        weight = 1.0 if o.beta2 == 1 or o.drop_weighting else 1 - o.beta2
        seen = {}
        for i in self.axes:
            h = g
            for j in self.axes if o.kl else ():
                h = mode(h, self.c[j], j) if j != i else h
            x = h.movedim(i, 0).reshape(h.shape[i], -1)
            seen[i] = x @ x.T
        for i in self.axes:
            self.a[i] = o.beta2 * self.a[i] + weight * seen[i]
        corrected = o.bias_correction and o.beta2 < 1 and not o.drop_weighting
        c2 = 1 - o.beta2**self.t if corrected else 1.0
        if (self.t % o.frequency == 0 and self.t > o.start) or self.t == o.start:
            for i in self.axes:
                self.c[i] = self._renewed(i, self.a[i] / c2)
        if o.soap:
            self.v = o.beta2 * self.v + weight * self._rotated(g) ** 2
        magnitude = self._magnitude(g)
        f = self._filtered(g)
        if o.graft and self.t < o.start:
            p = magnitude(f)
        else:
            p = self._direction(f, c2)
            if o.graft:
                p = p * magnitude(f).norm() / (p.norm() + 1e-16)
        alpha = {"decoupled": rate, "corrected": rate * lr / self.peak, "independent": rate / self.peak}.get(kind, 0.0)
        p = p + alpha * self.w
        if o.momentum:
            mu, damp = o.momentum["mu"], o.momentum.get("dampening", 0.0)
            self.big = mu * self.big + (1 - damp) * p
            p = (1 - damp) * p + mu * self.big if o.momentum.get("nesterov") else self.big
        self.w = self.w - lr * p

    def _rotated(self, x: Tensor, back: bool = False) -> Tensor:
        for i in self.axes:
            x = mode(x, self.c[i] if back else self.c[i].T, i)
        return x

    def _direction(self, f: Tensor, c2: float) -> Tensor:
        if self.o.soap:
            scaled = self._rotated(f) / ((self.v / c2) ** self.o.soap_exponent + self.o.eps)
            return self._rotated(scaled, back=True)
        for i in self.axes:
            f = mode(f, self.c[i], i)
        return f

    def _renewed(self, i: int, a: Tensor) -> Tensor:
        o, d = self.o, a.shape[0]
        if o.trace_scaling:
            a = a * max(float(a.trace()), o.eps) ** -o.trace_scaling
        if o.soap == "qr":
            q = self.c[i]
            turn, r = torch.linalg.qr(q.T @ (a + o.eps * torch.eye(d, dtype=a.dtype)) @ q)
            order = (r @ turn).diagonal().argsort(stable=True)
            return (q @ turn)[:, order]
        if o.soap:
            return torch.linalg.eigh(a + o.eps * torch.eye(d, dtype=a.dtype)).eigenvectors
        if o.pseudo_inverse is not None:
            rtol, atol = o.pseudo_inverse
            values, q = torch.linalg.eigh(a)
            rtol = d * torch.finfo(a.dtype).eps if rtol is None else rtol
            keep = values > max(rtol * max(float(values[-1]), 0.0), atol)
            powers = torch.where(keep, values.clamp_min(1e-300) ** -self.exponents[i], 0.0)
            return (q * powers) @ q.T
        values, q = torch.linalg.eigh(a + o.eps * torch.eye(d, dtype=a.dtype))
        if values[0] < o.eps:
            values = values - values[0] + o.eps
        return (q * values ** -self.exponents[i]) @ q.T

    def _magnitude(self, g: Tensor) -> Any:
        o = self.o.graft or {"kind": "sgd"}
        if o["kind"] == "sgd":
            return lambda f: f
        b = 1.0 if o["kind"] == "adagrad" else o["beta2"]
        weight = 1.0 if b == 1 or o.get("drop") else 1 - b
        self.graft = b * self.graft + weight * g**2
        c = 1 - b**self.t if o["kind"] == "adam" and not o.get("drop") else 1.0
        return lambda f: f / ((self.graft / c).sqrt() + o["eps"])

    def _filtered(self, g: Tensor) -> Tensor:
        o = self.o
        if o.beta1 == 0:
            return g
        beta3 = o.beta1 if o.beta3 is None else o.beta3
        filtered = beta3 * self.m + (1 - beta3) * g
        self.m = o.beta1 * self.m + (1 - o.beta1) * g
        return filtered / (1 - beta3 * o.beta1 ** (self.t - 1)) if o.bias_correction else filtered


def trajectory(init: Tensor, given: Sequence[Tensor], o: Options, lrs: Sequence[float] | None = None) -> Tensor:
    """The parameter after every step."""
    lrs = lrs or [o.lr] * len(given)
    reference, points = Reference(init, o, lrs[0]), []
    for g, lr in zip(given, lrs, strict=True):
        reference.step(g, lr)
        points.append(reference.w.clone())
    assert all(math.isfinite(float(point.sum())) for point in points)
    return torch.stack(points)
