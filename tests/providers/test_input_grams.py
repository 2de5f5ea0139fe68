"""Second moments of the inputs of layers: what hooks collect, when, and the part of them that a block is given."""

import copy
import gc
import io
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from eigengraft import Optimizer, RecipeError, compose, watch_inputs

from ..parity.test_more_methods import LR
from ..refusals import refused
from ..trajectories import normal

INPUTS = {
    "kind": "shampoo",
    "name": "inputs",
    "statistic": {"kind": "input_gram", "beta": 0.9, "bias_correction": False, "initial": 0.01},
    "exponent": 1,
    "solver": {"kind": "cholesky", "eps": 1e-8, "ratio": 0.2},
    "refresh": {"kind": "every", "steps": 1, "stagger": "none"},
}
GRAMS: dict[str, Any] = {
    "update": [INPUTS],
    "routes": [{"name": "rest", "match": {"ndim": 1}, "update": "identity", "optional": True}],
    "blocking": {"merge": 64, "min_axes": 2},
}


class Net(nn.Module):
    """Convolutions, a layer that is used twice, two layers with one weight, and a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 3, 3, padding=1, stride=2)
        self.row = nn.Conv1d(3, 3, 2, padding="valid")
        self.wide = nn.Linear(24, 6)
        self.twice, self.tied, self.frozen = (nn.Linear(6, 6, bias=False) for _ in range(3))
        self.again = nn.Linear(6, 6, bias=False)
        self.again.weight = self.tied.weight
        self.frozen.weight.requires_grad_(False)
        self.seen: dict[str, list[Tensor]] = {}
        self.double()

    def see(self, name: str, x: Tensor) -> Tensor:
        self.seen.setdefault(name, []).append(x.detach().reshape(-1, x.shape[-1]))
        return x

    def forward(self, x: Tensor) -> Tensor:
        self.see("conv.weight", functional.unfold(x, 3, padding=1, stride=2).mT)
        y = self.conv(x).flatten(2)
        self.see("row.weight", y.unfold(2, 2, 1).transpose(1, 2).flatten(2))
        h = self.wide(self.see("wide.weight", self.row(y).flatten(1)))
        h = self.twice(self.see("twice.weight", h.tanh()))
        h = self.twice(self.see("twice.weight", h.tanh()))
        h = self.tied(self.see("tied.weight", h.tanh()))
        h = self.again(self.see("tied.weight", h.tanh()))
        result: Tensor = self.frozen(h)
        return result


def batch(seed: int, rows: int = 4) -> Tensor:
    return normal(rows, 2, 6, 6, seed=seed)


def gram(x: Tensor) -> Tensor:
    return x.mT @ x / len(x)


def damped_inverse(k: Tensor) -> Tensor:
    return torch.linalg.inv(k + (1e-8 + 0.2 * k.diagonal().mean()) * torch.eye(len(k), dtype=k.dtype))


def hooks(model: nn.Module) -> int:
    return sum(len(module._forward_hooks) for module in model.modules())


def test_moments_are_of_all_rows_that_a_weight_has_multiplied() -> None:
    """Two micro-batches of unequal length, W <- W - lr G (0.9 * 0.01 I + 0.1 A + r I)^(-1). 1e-9."""
    net = Net()
    optimizer = compose(GRAMS, net, lr=LR)
    start = {name: p.detach().clone() for name, p in net.named_parameters()}
    for seed, rows in ((0, 4), (1, 7)):
        net(batch(seed, rows)).square().sum().backward()
    with torch.no_grad():
        seen = {name: torch.cat(inputs) for name, inputs in net.seen.items()}
        net(batch(2))  # an evaluation
    optimizer.step()
    assert set(seen) == {"conv.weight", "row.weight", "wide.weight", "twice.weight", "tied.weight"}
    for name, x in seen.items():
        p = net.get_parameter(name)
        assert p.grad is not None
        k = 0.009 * torch.eye(x.shape[1], dtype=x.dtype) + 0.1 * gram(x)
        expected = start[name] - LR * (p.grad.flatten(1) @ damped_inverse(k)).view(p.shape)
        assert float((p.detach() - expected).abs().max()) <= 1e-9 * float(expected.abs().max()), name


@pytest.mark.parametrize("size", [None, 4, 3])
def test_newton_muon_takes_the_inverse_for_the_columns_of_each_block(size: int | None) -> None:
    """K <- 0.95 K + 0.05 A at updates 1, 33;  G K^(-1) of the columns of a block, and then Muon. 1e-9, but for the
    bfloat16 of its Newton-Schulz, which is computed in float64 here."""
    w = nn.Parameter(normal(6, 8, seed=9))
    precise = ["update.spectral.solver.precision=input", f"blocking.size={size or 'null'}", "routes=[]"]
    ours = Optimizer([w], "newton_muon", lr=LR, overrides=precise)
    v = nn.Parameter(w.detach().clone())
    muon = Optimizer([v], "muon", lr=LR, overrides=precise)
    columns = [slice(i, min(i + (size or 8), 8)) for i in range(0, 8, size or 8)]
    k, inverse = 0.001 * torch.eye(8, dtype=w.dtype), torch.zeros(8, 8, dtype=w.dtype)
    for t in range(34):
        g = normal(6, 8, seed=t)
        if t % 32 == 0:
            a = gram(normal(20, 8, seed=100 + t))
            assert ours.provide("activation_gram", {w: a})
            k = 0.95 * k + 0.05 * a
            for own in columns:
                inverse[own, own] = damped_inverse(k[own, own])
        w.grad, v.grad = g, g @ inverse
        ours.step()
        muon.step()
        assert float((w - v).detach().abs().max()) <= 1e-9


def test_a_weight_of_one_output_has_no_factor_and_one_of_one_input_a_number() -> None:
    """The inputs of the one are 8 times its outputs, more than `max_skew`."""
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1), nn.Linear(1, 8), nn.Linear(8, 8))
    optimizer = compose("newton_muon", net, lr=LR)
    before = [parameter.detach().clone() for parameter in net.parameters()]
    for t in range(2):
        net(normal(16, 8, seed=t).float()).square().mean().backward()
        optimizer.step()
    assert not any(map(torch.equal, before, net.parameters()))
    state = optimizer.state_dict()["state"]
    shapes = [[tuple(x.shape) for name, x in state[at].items() if "factor" in name] for at in (0, 2, 4)]
    assert shapes == [[(8, 8)], [], [(1, 1)]]


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
def test_a_matrix_of_a_view_has_the_moments_of_its_inputs(shape: tuple[int, ...], view: dict[str, Any]) -> None:
    """K = A of the inputs of the matrix alone, as the slots hold it. Exact."""
    w = nn.Parameter(normal(*shape, seed=9))
    stage = {**INPUTS, "statistic": {**INPUTS["statistic"], "beta": 0.0, "initial": 0.0}}
    optimizer = Optimizer([w], {"update": [stage], "routes": [], "view": view, "blocking": {"size": 4}}, lr=LR)
    n, batches = (shape[0] if view.get("outputs") else shape[-1]), shape[:1] if view.get("batch") else ()
    a = normal(*batches, n, n, seed=1)
    a = a @ a.mT
    w.grad = normal(*shape, seed=2)
    optimizer.provide("activation_gram", {w: a})
    optimizer.step()
    factors = [value for key, value in optimizer.state[w].items() if key.endswith("factor.1")]
    step = view.get("heads", 4) if view.get("side") else 4
    each = [m[i : i + step, i : i + step] for m in a.reshape(-1, n, n) for i in range(0, n, step)]
    found = {tuple(f.flatten().tolist()) for f in factors}
    assert found == {tuple(m.flatten().tolist()) for m in each}


def test_nothing_is_collected_that_no_stage_takes() -> None:
    net = Net()
    assert watch_inputs(compose("muon", net), net) is None and hooks(net) == 0
    optimizer = compose(GRAMS | {"update": [_every(3)]}, net, lr=LR)
    assert hooks(net) == 7  # one of a layer that is frozen, which may be thawed
    source = optimizer.param_sets.signals.provided.sources["activation_gram"][0].__self__  # type: ignore[attr-defined]
    collected = []
    for t in range(5):
        net(batch(t)).sum().backward()
        collected.append(len(source._held | source._loose))
        optimizer.step()
    assert collected == [5, 0, 0, 5, 0]  # by weight, of which two layers share one


def _every(interval: int) -> dict[str, Any]:
    return {**INPUTS, "statistic": {**INPUTS["statistic"], "interval": interval}}


def test_copies_of_a_model_collect_nothing_and_an_optimizer_that_is_gone_neither() -> None:
    net = Net()
    optimizer = compose(GRAMS, net, lr=LR)
    buffer = io.BytesIO()
    torch.save(net, buffer)
    buffer.seek(0)
    for other in (copy.deepcopy(net), torch.load(buffer, weights_only=False)):
        other(batch(0)).sum().backward()
    net(batch(0)).sum().backward()
    twin = copy.deepcopy(optimizer)
    for group in twin.param_groups:
        for p in group["params"]:
            p.grad = torch.ones_like(p)
    optimizer.step()
    with refused(ValueError, "update.inputs", "activation_gram"):
        twin.step()
    alive = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert alive() is None and hooks(net) == 0


def test_faults_are_named() -> None:
    net = Net()
    optimizer = compose(GRAMS, net, lr=LR)
    again = watch_inputs(optimizer, net)
    assert again is not None and hooks(net) == 7  # a layer is watched once
    net(batch(0)).sum().backward()
    parameters = {name: p.detach().clone() for name, p in net.named_parameters()}
    for hook in net.twice._forward_hooks.copy():
        del net.twice._forward_hooks[hook]
    optimizer.step()  # was collected before
    net(batch(0)).sum().backward()
    with refused(ValueError, "activation_gram", "eigengraft.watch_inputs", "none", "twice.weight"):
        optimizer.step()
    assert any(not torch.equal(p, parameters[name]) for name, p in net.named_parameters())
    other = compose(GRAMS, net, lr=LR)
    with refused(ValueError, "wide", 24, "activation_gram"):
        net.wide(input=batch(0).flatten(1)[:, :24])
    assert other.skipped == {}
    w = nn.Parameter(normal(4, 3, seed=9))
    plain = Optimizer([w], GRAMS, lr=LR)
    with refused(ValueError, "activation_gram", "shape", "(3, 4)"):
        plain.provide("activation_gram", {w: normal(3, 4, seed=9)})
    w.grad = normal(4, 3, seed=9)
    plain.provide("activation_gram", {w: gram(normal(5, 4, seed=9))})
    with refused(ValueError, "parameter 0", "(3, 3)", "(4, 4)"):
        plain.step()
    with refused(ValueError, "input_gram"):
        Optimizer([nn.Parameter(normal(4, 3, 3, 3, seed=9))], {**GRAMS, "blocking": {}, "view": "whole"}, lr=LR)
    with refused(RecipeError, "axes", "{side: right, vectors: false}"):
        Optimizer([w], [{**INPUTS, "statistic": {"kind": "input_gram", "axes": {"side": "left"}}}])
    with refused(RecipeError, "update.eigenbasis.inner.inputs"):
        Optimizer([w], [{"kind": "eigenbasis", "inner": [INPUTS]}])
