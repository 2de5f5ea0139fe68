"""Largest logits of attention heads: what is recorded, and what is clipped."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from eigengraft import MaxLogits, Optimizer, compose, load_recipe

from ..parity.test_more_methods import LR
from ..refusals import refused
from ..trajectories import normal

HEADS, SHARED, WIDTH = 4, 2, 3
CLIP: dict[str, Any] = {"update": "sign", "routes": [], "constraints": {"kind": "qk_clip", "bound": 0.5}}


class Attention(nn.Module):
    """Four heads of queries, of which two share a key; causal or not, with one weight or three."""

    def __init__(self, fused: bool = False, causal: bool = True) -> None:
        super().__init__()
        rows = [HEADS * WIDTH, SHARED * WIDTH, SHARED * WIDTH]
        if fused:
            self.qkv = nn.Linear(8, sum(rows), bias=False)
            self.max_logits = MaxLogits(fused="qkv.weight", causal=causal)
        else:
            self.q, self.k, self.v = (nn.Linear(8, n, bias=False) for n in rows)
            self.max_logits = MaxLogits("q.weight", "k.weight", causal=causal)
        self.fused, self.causal, self.rows = fused, causal, rows
        self.double()

    def weights(self) -> tuple[Tensor, ...]:
        return self.qkv.weight.split(self.rows) if self.fused else (self.q.weight, self.k.weight, self.v.weight)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (x @ w.mT for w in self.weights())
        q, k, v = (y.unflatten(-1, (-1, WIDTH)).transpose(1, 2) for y in (q, k, v))
        self.max_logits(q, k)
        result: Tensor = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal, enable_gqa=True)
        return result


def largest(net: Attention, x: Tensor) -> Tensor:
    """S `[heads]`, from all products of queries with keys that they see."""
    q, k, _ = (x @ w.detach().mT for w in net.weights())
    logits = torch.zeros(HEADS, dtype=x.dtype)
    for head in range(HEADS):
        queries = q[..., head * WIDTH :][..., :WIDTH]
        keys = k[..., head // (HEADS // SHARED) * WIDTH :][..., :WIDTH]
        products = queries @ keys.mT / WIDTH**0.5
        logits[head] = max(
            float(p[i, j]) for p in products for i in range(5) for j in range(i + 1 if net.causal else 5)
        )
    return logits


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_queries_and_keys_shrink_by_their_head(fused: bool, causal: bool) -> None:
    """W_h <- (W - lr sign(G))_h min(1, 1 / 2 S_h)^(1/2), S over two micro-batches, of shared keys that of the group;
    values are left alone. 1e-6: logits are recorded in float32."""
    net = Attention(fused, causal)
    optimizer = compose(CLIP, net, lr=LR)
    batches = [3 * normal(2, 5, 8, seed=seed) for seed in range(2)]
    start = [w.detach().clone() for w in net.weights()]
    s = torch.maximum(largest(net, batches[0]), largest(net, batches[1])).clamp_min(0)
    for x in batches:
        net(x).square().sum().backward()
    grads = net.qkv.weight.grad.split(net.rows) if fused else [net.q.weight.grad, net.k.weight.grad, net.v.weight.grad]  # type: ignore[union-attr]
    with torch.no_grad():
        net(100 * batches[0])  # an evaluation
    optimizer.step()
    factors = [s, s.view(SHARED, -1).amax(1), torch.zeros(SHARED, dtype=s.dtype)]
    assert int((s > 0.5).sum()) > 0
    for w, before, grad, own in zip(net.weights(), start, grads, factors, strict=True):
        factor = (0.5 / own.clamp_min(0.5)).sqrt().repeat_interleave(WIDTH)[:, None]
        expected = (before - LR * grad.sign()) * factor  # type: ignore[union-attr]
        assert float((w.detach() - expected).abs().max()) <= 1e-6


def test_muonclip_is_muon_and_a_clip() -> None:
    """W <- Muon(W) min(1, 100 / S)^(1/2) for rows of heads, three steps. Exact."""
    recipes = load_recipe("muonclip", ["routes=[]"]), load_recipe("muon", ["routes=[]", "weight_decay.rate=0.1"])
    ours, w = (nn.Parameter(normal(6, 8, seed=1)) for _ in range(2))
    clipped, muon = Optimizer([ours], recipes[0], lr=LR), Optimizer([w], recipes[1], lr=LR)
    for t, logits in enumerate(([50.0, 400.0], [100.0, 0.0], [torch.inf, 101.0])):
        clipped.provide("max_logit", {ours: torch.tensor([-1.0, 1.0])})
        clipped.provide("max_logit", {ours: torch.tensor(logits)})  # the largest of both
        ours.grad = w.grad = normal(6, 8, seed=10 + t)
        clipped.step()
        muon.step()
        factor = [(100 / max(s, 100)) ** 0.5 if s < torch.inf else 1.0 for s in logits]
        with torch.no_grad():
            w *= torch.tensor(factor, dtype=w.dtype).repeat_interleave(3)[:, None]
        assert float((ours - w).detach().abs().max()) <= 1e-7  # factors are float32
        with torch.no_grad():
            w.copy_(ours)


def test_nothing_is_recorded_that_nobody_takes() -> None:
    net, calls = Attention(), list[Tensor]()
    net.max_logits._found = lambda q, k: calls.append(q) or q.amax((0, 2, 3))  # type: ignore[assignment,func-returns-value]
    compose("adamw", net)
    net(normal(2, 5, 8, seed=0))
    assert not calls
    del net.max_logits._found
    optimizer = compose(CLIP, net, lr=LR)
    source: Any = optimizer.param_sets.signals.provided.sources["max_logit"][0].__self__  # type: ignore[attr-defined]
    net(normal(2, 5, 8, seed=0)).sum().backward()
    assert len(source._held) == 1
    optimizer.step()
    assert not source._held
    for other in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        other(normal(2, 5, 8, seed=0)).sum().backward()
    assert not source._held
    assert "max_logits" not in "".join(net.state_dict())


def test_faults_are_named() -> None:
    net = Attention()
    optimizer = compose(CLIP, net, lr=LR)
    start = [w.detach().clone() for w in net.weights()]
    for p in net.parameters():
        p.grad = torch.ones_like(p)
    with refused(ValueError, "constraints.qk_clip", "max_logit", "none"):
        optimizer.step()
    assert all(torch.equal(w, before) for w, before in zip(net.weights(), start, strict=True))
    with refused(ValueError, "max_logit", "shape", "(2, 2)"):
        optimizer.provide("max_logit", {net.q.weight: torch.ones(2, 2)})
    optimizer.provide("max_logit", {net.q.weight: torch.ones(5)})
    with refused(ValueError, "q.weight", 12, 5):
        optimizer.step()
    with refused(ValueError, "MaxLogits", "q", "None"):
        MaxLogits("q")
    with refused(ValueError, "bound", 0):
        load_recipe({**CLIP, "constraints": {"kind": "qk_clip", "bound": 0}})


def test_logits_are_recorded_in_float32_under_autocast() -> None:
    net = Attention()
    optimizer = compose(CLIP, net, lr=LR)
    q, k = (normal(1, 2, 5, 16, seed=seed).float().requires_grad_() for seed in (0, 1))
    with torch.autocast("cpu", torch.bfloat16):
        net.max_logits(q, k, 1.0)
    (q.sum() + k.sum()).backward()
    given = optimizer.param_sets.signals.provided.sources["max_logit"][0]()
    assert isinstance(given, dict)
    expected = (q[0].double() @ k[0].double().mT).amax((1, 2)).clamp_min(0)
    torch.testing.assert_close(given[net.q.weight].double(), expected, rtol=1e-6, atol=0)  # products in float32
