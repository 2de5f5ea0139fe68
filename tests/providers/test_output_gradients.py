"""Second moments of gradients in what layers return: what is collected, when, and SINGD, which takes them."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from eigengraft import Optimizer, compose, watch_output_gradients

from ..parity.test_more_methods import LR
from ..refusals import refused
from ..trajectories import normal
from .test_input_grams import batch, gram, hooks

RATE, DECAY, DAMPING = 0.3, 0.5, 0.01
SINGD: dict[str, Any] = {
    "base": "singd",
    "routes": [{"name": "rest", "match": {"ndim": 1}, "update": "identity", "optional": True}],
}
FAST = [f"update.sirf.lr_preconditioner={RATE}", f"update.sirf.damping={DAMPING}", "update.sirf.refresh.steps=2"]
FAST += ["update.sirf.axes.max_skew=null"]


class Net(nn.Module):
    """Convolutions, of which one's output is written into by what follows, and a layer that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 3, 3, padding=1, stride=2)
        self.row = nn.Conv1d(3, 3, 2)
        self.wide = nn.Linear(24, 6)
        self.twice = nn.Linear(6, 6, bias=False)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        h = self.row(functional.elu(self.conv(x), inplace=True).flatten(2)).flatten(1)
        h = self.twice(self.wide(h).tanh())
        result: Tensor = self.twice(h.tanh())
        return result


def loss_of(net: nn.Module, x: Tensor) -> Tensor:
    result: Tensor = net(x).square().sum(1).mean()
    return result


def moments(net: Net, batches: list[Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    """By name of the layer: the mean of x x^T over its inputs, and N sum g g^T of the loss over all batches."""
    net, calls, found = copy.deepcopy(net), list[tuple[nn.Module, Tensor, Tensor]](), dict[str, Any]()

    def see(module: nn.Module, args: tuple[Tensor], output: Tensor) -> Tensor:
        calls.append((module, args[0].detach(), output))
        return output.clone()  # what follows may write into it

    for module in net.children():
        module.register_forward_hook(see)
    loss = torch.stack([loss_of(net, x) for x in batches]).mean()
    gradients = torch.autograd.grad(loss, [output for _, _, output in calls])
    for name, module in net.named_children():
        own = [(x, g) for (layer, x, _), g in zip(calls, gradients, strict=True) if layer is module]
        inputs = torch.cat([patches(module, x) for x, _ in own])
        out = torch.cat([g.flatten(2).mT.flatten(0, 1) if g.ndim > 2 else g for _, g in own])
        found[name] = gram(inputs), sum(len(g) for _, g in own) * out.mT @ out
    return found


def patches(module: nn.Module, x: Tensor) -> Tensor:
    if isinstance(module, nn.Conv2d):
        return functional.unfold(x, 3, padding=1, stride=2).mT.flatten(0, 1)
    return x.unfold(2, 2, 1).transpose(1, 2).flatten(2).flatten(0, 1) if isinstance(module, nn.Conv1d) else x


def inverse_free_step(k: Tensor, m: Tensor, own: Tensor, others: float, ridge: float) -> tuple[Tensor, Tensor]:
    """m <- a m + (1 - a) / 2 (tr(H_j) / d_j H_i + damping tr(C^T C) / d_j K^T K - I);  K (I - b / max(1, max |m|) m)"""
    eye = torch.eye(len(k), dtype=k.dtype)
    m = DECAY * m + (1 - DECAY) / 2 * (others * own + ridge * k.T @ k - eye)
    return k @ (eye - RATE / max(1.0, float(m.abs().max())) * m), m


def mean_trace(x: Tensor) -> float:
    return float(x.trace()) / len(x)


def test_singd_is_its_formula_with_moments_of_all_micro_batches() -> None:
    """Five steps of two micro-batches of equal length, factors moved at the first, third and fifth. 1e-9."""
    net = Net()
    optimizer = compose(SINGD, net, lr=LR, overrides=FAST)
    layers = {name: m for name, m in net.named_children() if isinstance(m, (nn.Linear, nn.Conv1d, nn.Conv2d))}
    w = {name: layer.weight.detach().flatten(1).clone() for name, layer in layers.items()}
    k = {name: [torch.eye(d).double() for d in x.shape] for name, x in w.items()}
    m = {name: [torch.zeros(d, d).double() for d in x.shape] for name, x in w.items()}
    velocity = {name: torch.zeros_like(x) for name, x in w.items()}
    for t in range(5):
        batches = [batch(2 * t), batch(2 * t + 1)]
        known = moments(net, batches) if t % 2 == 0 else {}
        optimizer.zero_grad()
        for x in batches:
            (loss_of(net, x) / 2).backward()
        with torch.no_grad():
            loss_of(net, batch(99))  # an evaluation
        gradients = {name: layer.weight.grad.flatten(1).clone() for name, layer in layers.items()}  # type: ignore[union-attr]
        optimizer.step()
        for name, (inputs, outputs) in known.items():
            c, a = k[name]
            h, u = c.T @ outputs @ c, a.T @ inputs @ a
            ridges = [DAMPING * mean_trace(x.T @ x) for x in (a, c)]
            k[name][0], m[name][0] = inverse_free_step(c, m[name][0], h, mean_trace(u), ridges[0])
            k[name][1], m[name][1] = inverse_free_step(a, m[name][1], u, mean_trace(h), ridges[1])
        for name, g in gradients.items():
            c, a = k[name]
            velocity[name] = 0.9 * velocity[name] + c @ c.T @ g @ a @ a.T
            w[name] = w[name] - LR * velocity[name]
            error = (layers[name].weight.detach().flatten(1) - w[name]).abs().max()
            assert float(error) <= 1e-9 * float(w[name].abs().max()), (name, t)


@pytest.mark.parametrize(
    ("shape", "view"),
    [
        ((3, 4, 6), {"kind": "matrices", "batch": 1}),
        ((12, 6), {"kind": "matrices", "sections": [8, 4], "heads": 2}),
        ((6, 9), {"kind": "matrices", "outputs": "last"}),
        ((4, 6), {"kind": "matrices", "heads": 3, "side": "inputs"}),
    ],
    ids=["experts", "heads", "conv1d", "heads of inputs"],
)
def test_a_matrix_of_a_view_has_the_moments_of_its_outputs(shape: tuple[int, ...], view: dict[str, Any]) -> None:
    """C = I - b / 2 (G - I) of the outputs of the matrix alone, the moments of its inputs I. 1e-12."""
    w = nn.Parameter(normal(*shape, seed=9))
    stage = {"kind": "sirf", "moments": "layer", "norm": "max", "momentum": 0.0, "damping": 0.0}
    update = [{**stage, "lr_preconditioner": 0.5, "axes": {"vectors": False}}]
    optimizer = Optimizer([w], {"update": update, "routes": [], "view": view, "blocking": {"size": 4}}, lr=LR)
    last = view.get("outputs") == "last"
    m, n, batches = shape[-1 if last else -2], shape[-2 if last else -1], shape[:1] if view.get("batch") else ()
    g = normal(*batches, m, m, seed=1) / m
    g = g @ g.mT
    w.grad = normal(*shape, seed=2)
    optimizer.provide("output_gradient_gram", {w: g})
    optimizer.provide("activation_gram", {w: torch.eye(n, dtype=w.dtype).expand(*batches, n, n)})
    optimizer.step()
    factors = [value for key, value in optimizer.state[w].items() if key.endswith("k.0")]
    step = 2 if view.get("sections") else 4
    each = [x[i : i + step, i : i + step] for x in g.reshape(-1, m, m) for i in range(0, m, step)]
    made = [torch.eye(len(x)).double() * 1.25 - x / 4 for x in each]
    for factor in factors:
        assert min(float((factor - x).abs().max()) for x in made if x.shape == factor.shape) <= 1e-12
    assert len(factors) >= len(made)


def test_nothing_is_collected_that_no_stage_takes() -> None:
    net = Net()
    assert watch_output_gradients(compose("newton_muon", net), net) is None
    assert not any(module._forward_hooks for module in net.modules())
    optimizer = compose(SINGD, net, lr=LR, overrides=["update.sirf.refresh.steps=3"])
    assert hooks(net) == 8  # two of each layer: inputs, and gradients in outputs
    sums = optimizer.param_sets.signals.provided.sources["output_gradient_gram"][0].__self__  # type: ignore[attr-defined]
    collected = []
    for t in range(5):
        loss_of(copy.deepcopy(net), batch(t)).backward()
        assert not sums._held  # a copy collects nothing
        loss_of(net, batch(t)).backward()
        collected.append(len(sums._held | sums._loose))
        optimizer.step()
    assert collected == [4, 0, 0, 4, 0]


def test_faults_are_named() -> None:
    net = Net()
    optimizer = compose(SINGD, net, lr=LR)
    twice = watch_output_gradients(optimizer, net)
    assert twice is not None and hooks(net) == 8
    plain = nn.Sequential(nn.Linear(4, 3)).double()
    alone = Optimizer(plain.named_parameters(), {**SINGD, "routes": SINGD["routes"]}, lr=LR)
    plain(normal(2, 4, seed=0)).sum().backward()
    with refused(ValueError, "update.sirf", "activation_gram"):
        alone.step()
    alone.provide("activation_gram", {plain[0].weight: torch.eye(4).double()})
    with refused(ValueError, "output_gradient_gram", "shape", "(3, 4)"):
        alone.provide("output_gradient_gram", {plain[0].weight: torch.ones(3, 4)})
    alone.provide("output_gradient_gram", {plain[0].weight: torch.eye(4).double()})
    with refused(ValueError, "0.weight", "(3, 3)", "(4, 4)"):
        alone.step()
    with refused(ValueError, "update.sirf", "moments: layer"):
        Optimizer([nn.Parameter(normal(4, 3, 3, 3, seed=9))], {**SINGD, "blocking": {}, "view": "whole"}, lr=LR)
