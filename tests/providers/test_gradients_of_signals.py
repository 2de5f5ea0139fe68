"""Signals of layers belong to the gradients that a step takes, in their unit: what may happen between two steps."""

import copy
import gc
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from eigengraft import Optimizer, compose, watch_inputs, watch_output_gradients

from ..trajectories import normal
from .test_logits import CLIP, Attention, largest

SINGD: dict[str, Any] = {
    "base": "singd",
    "routes": [{"name": "rest", "match": {"ndim": 1}, "update": "identity", "optional": True}],
}
NAMES = ("activation_gram", "output_gradient_gram")
Grams = dict[str, list[Tensor]]


class Net(nn.Module):
    """Two layers; `again` calls the first one twice; `saved` recomputes it in backward."""

    def __init__(self, again: bool = False, saved: bool | None = None) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 4, bias=False)
        self.again, self.saved = again, saved
        self.double()
        with torch.no_grad():
            for index, parameter in enumerate(self.parameters()):
                parameter.copy_(normal(*parameter.shape, seed=50 + index) / 2)

    def hidden(self, x: Tensor) -> Tensor:
        h = self.first(x).tanh()
        return self.first(h).tanh() if self.again else h

    def forward(self, x: Tensor) -> Tensor:
        h = self.hidden(x) if self.saved is None else checkpoint(self.hidden, x, use_reentrant=self.saved)
        result: Tensor = self.second(h)
        return result


def batch(seed: int, rows: int = 8) -> Tensor:
    return normal(rows, 6, seed=seed).requires_grad_()


def loss_of(net: nn.Module, x: Tensor) -> Tensor:
    result: Tensor = net(x).square().sum(1).mean()
    return result


def collected(optimizer: Optimizer, net: Net) -> Grams:
    """What a step would be given now."""
    sources = optimizer.param_sets.signals.provided.sources
    given = {name: sources[name][0]() for name in NAMES}
    return {
        name: [value[p] for p in (net.first.weight, net.second.weight)]  # type: ignore[index]
        for name, value in given.items()
        if value is not None
    }


def definition(net: Net, losses: list[Tensor], factor: float = 1.0) -> Grams:
    """X^T X / N and N sum g g^T, of the inputs x of each layer and gradients g of the sum of losses in its outputs.

    losses: batches, each with the factor of its loss.
    """
    net, calls = copy.deepcopy(net), list[tuple[nn.Module, Tensor, Tensor]]()
    net.saved = None

    def see(module: nn.Module, args: tuple[Tensor], output: Tensor) -> None:
        calls.append((module, args[0].detach(), output))

    for module in net.children():
        module._forward_hooks.clear()
        module.register_forward_hook(see)  # type: ignore[arg-type]
    total = torch.stack([loss_of(net, x) for x in losses]).mean() * factor
    gradients = torch.autograd.grad(total, [output for _, _, output in calls])
    found: Grams = {name: [] for name in NAMES}
    for layer in (net.first, net.second):
        own = [(x, g) for (module, x, _), g in zip(calls, gradients, strict=True) if module is layer]
        x, g = (torch.cat(list(parts)) for parts in zip(*own, strict=True))
        found[NAMES[0]].append(x.mT @ x / len(x))
        found[NAMES[1]].append(len(g) * g.mT @ g)
    return found


def require_close(found: Grams, wanted: Grams, rtol: float = 1e-12) -> None:
    assert found.keys() == wanted.keys()
    for name, values in wanted.items():
        for ours, theirs in zip(found[name], values, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=rtol, atol=1e-14, msg=lambda text, n=name: f"{n}: {text}")


def by_none(optimizer: Optimizer, net: Net) -> None:
    optimizer.zero_grad()


def by_model(optimizer: Optimizer, net: Net) -> None:
    net.zero_grad()


def in_place(optimizer: Optimizer, net: Net) -> None:
    optimizer.zero_grad(set_to_none=False)


def of_data(optimizer: Optimizer, net: Net) -> None:
    for p in net.parameters():
        assert p.grad is not None
        p.grad.data.zero_()


def by_zeros(optimizer: Optimizer, net: Net) -> None:
    for p in net.parameters():
        p.grad = torch.zeros_like(p)


@pytest.mark.parametrize("forget", [by_none, by_model, in_place, of_data, by_zeros])
@pytest.mark.parametrize("spike", [100.0, torch.inf])
def test_a_batch_whose_gradients_are_thrown_away_is_in_no_signal(
    forget: Callable[[Optimizer, Net], None], spike: float
) -> None:
    """Nor what a step that was refused or skipped left; two micro-batches that are kept add up. 1e-12, rounding."""
    net = Net()
    optimizer = compose(SINGD, net)
    for _ in range(2):
        (loss_of(net, batch(1)) * spike).backward()
        forget(optimizer, net)
        for seed in (2, 3):
            (loss_of(net, batch(seed)) / 2).backward()
        require_close(collected(optimizer, net), definition(net, [batch(2), batch(3)]))
        optimizer.zero_grad()


def test_a_step_that_a_scaler_skips_leaves_nothing_behind() -> None:
    net = Net().float()
    optimizer, scaler = compose(SINGD, net), torch.amp.GradScaler("cpu", init_scale=2.0**12)
    before = [p.detach().clone() for p in net.parameters()]
    scaler.scale(loss_of(net, batch(1).detach().float() * torch.inf)).backward()
    scaler.step(optimizer)
    scaler.update()
    assert all(torch.equal(p, x) for p, x in zip(net.parameters(), before, strict=True))
    optimizer.zero_grad()
    scaler.scale(loss_of(net, batch(2).detach().float())).backward()
    scaler.unscale_(optimizer)
    found = collected(optimizer, net)
    require_close({n: [x.double() for x in v] for n, v in found.items()}, definition(Net(), [batch(2)]), 1e-4)


@pytest.mark.parametrize("clip", [None, 0.01])
@pytest.mark.parametrize("scale", [2.0**16, 1000.0, 1.0])
def test_gradients_in_outputs_are_in_the_unit_of_the_step(scale: float, clip: float | None) -> None:
    """A scaler's factor is taken back, and a clipped gradient is clipped here too. 1e-9: the scaler divides in float32
    for scales that are no powers of two."""
    net = Net()
    optimizer, scaler = compose(SINGD, net), torch.amp.GradScaler("cpu", init_scale=scale)
    for seed in (2, 3):
        scaler.scale(loss_of(net, batch(seed)) / 2).backward()
    scaler.unscale_(optimizer)
    factor = 1.0
    if clip is not None:
        norm = nn.utils.clip_grad_norm_(net.parameters(), clip)
        factor = clip / (float(norm) + 1e-6)
    require_close(collected(optimizer, net), definition(net, [batch(2), batch(3)], factor), 1e-6)


def test_entries_that_are_clipped_by_themselves_hide_no_scale() -> None:
    net = Net()
    optimizer, scaler = compose(SINGD, net), torch.amp.GradScaler("cpu", init_scale=2.0**10)
    scaler.scale(loss_of(net, batch(2))).backward()
    scaler.unscale_(optimizer)
    grads = [abs(g).flatten() for p in net.parameters() if (g := p.grad) is not None]
    nn.utils.clip_grad_value_(net.parameters(), float(torch.cat(grads).quantile(0.8)))
    require_close(collected(optimizer, net), definition(net, [batch(2)]))


def test_gradients_that_change_their_direction_keep_their_unit() -> None:
    """As the mean over processes, by hand, does."""
    net = Net()
    optimizer = compose(SINGD, net)
    loss_of(net, batch(2)).backward()
    for index, p in enumerate(net.parameters()):
        assert p.grad is not None
        p.grad.add_(normal(*p.shape, seed=80 + index)).div_(2)
    require_close(collected(optimizer, net), definition(net, [batch(2)]))


def in_evaluation(net: Net, x: Tensor) -> None:
    net.eval()
    net(x)
    net.train()


def without_gradients(net: Net, x: Tensor) -> None:
    with torch.no_grad():
        net(x)


def in_inference(net: Net, x: Tensor) -> None:
    with torch.inference_mode():
        net(x.detach())


def of_inputs(net: Net, x: Tensor) -> None:
    torch.autograd.grad(loss_of(net, x), x)


def of_parameters(net: Net, x: Tensor) -> None:
    """A product with the Hessian, as a probe."""
    w = net.first.weight
    (gradient,) = torch.autograd.grad(loss_of(net, x), w, create_graph=True)
    torch.autograd.grad(gradient.sum(), w)


def of_some(net: Net, x: Tensor) -> None:
    loss_of(net, x).backward(inputs=[x])


def of_a_function(net: Net, x: Tensor) -> None:
    def f(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        return loss_of_call(torch.func.functional_call(net, parameters, x))

    parameters = {name: p.detach().clone().requires_grad_() for name, p in net.named_parameters()}
    f(parameters, x).backward()
    torch.func.grad(f)(parameters, x.detach())


def of_each_row(net: Net, x: Tensor) -> None:
    torch.func.vmap(torch.func.grad(lambda row: net(row).square().sum()))(x.detach())


def that_fails(net: Net, x: Tensor) -> None:
    y = net.first(x)
    y.register_hook(_fail)  # after the output's gradient is known, before the weight has its own
    with pytest.raises(ArithmeticError):
        loss_of_call(net.second(y)).backward()
    net.zero_grad()


def _fail(gradient: Tensor) -> None:
    raise ArithmeticError


def loss_of_call(output: Tensor) -> Tensor:
    result: Tensor = output.square().sum(1).mean()
    return result


OTHERS = [in_evaluation, without_gradients, in_inference, of_inputs, of_parameters, of_some, of_a_function]
OTHERS += [of_each_row]


@pytest.mark.parametrize(
    ("other", "after"), [(other, after) for other in OTHERS for after in (False, True)] + [(that_fails, False)]
)
def test_forwards_of_other_purposes_are_in_no_signal(other: Callable[[Net, Tensor], None], after: bool) -> None:
    """Before the backward, or, where gradients are left alone, between it and the step."""
    net = Net()
    optimizer = compose(SINGD, net)
    if not after:
        other(net, 10 * batch(1).detach().requires_grad_())
    loss_of(net, batch(2)).backward()
    if after:
        other(net, 10 * batch(1).detach().requires_grad_())
    require_close(collected(optimizer, net), definition(net, [batch(2)]))


@pytest.mark.parametrize("saved", [True, False])
@pytest.mark.parametrize("again", [True, False])
def test_a_forward_that_is_recomputed_counts_once(saved: bool, again: bool) -> None:
    """One micro-batch of two is recomputed: rows that were counted twice would have more weight in the mean."""
    net = Net(again, saved)
    optimizer = compose(SINGD, net)
    (loss_of(net, batch(2)) / 2).backward()
    net.saved = None
    (loss_of(net, batch(3)) / 2).backward()
    require_close(collected(optimizer, net), definition(net, [batch(2), batch(3)]))


def test_a_shared_layer_counts_each_call_and_a_graph_each_backward() -> None:
    """N is the rows of all passes, and the gradient the sum of all: 2 N 2 sum g g^T after two backwards."""
    net = Net(again=True)
    optimizer = compose(SINGD, net)
    loss = loss_of(net, batch(2))
    loss.backward(retain_graph=True)
    once = definition(net, [batch(2)])
    loss.backward()
    twice = {NAMES[0]: once[NAMES[0]], NAMES[1]: [4 * x for x in once[NAMES[1]]]}
    require_close(collected(optimizer, net), twice)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph:UserWarning")
def test_gradients_that_are_accumulated_out_of_place_add_up() -> None:
    net = Net()
    optimizer = compose(SINGD, net)
    for seed in (2, 3):
        (loss_of(net, batch(seed)) / 2).backward(create_graph=True)
    require_close(collected(optimizer, net), definition(net, [batch(2), batch(3)]))
    net.zero_grad()


def test_gradients_that_a_loop_assigns_have_the_rows_they_were_taken_through() -> None:
    """`torch.autograd.grad` in place of backward, over two micro-batches, after a backward that was thrown away."""
    net = Net()
    optimizer, parameters = compose(SINGD, net), list(net.parameters())
    loss_of(net, batch(1)).backward()
    optimizer.zero_grad()
    found = [torch.autograd.grad(loss_of(net, batch(seed)) / 2, parameters) for seed in (2, 3)]
    for p, *parts in zip(parameters, *found, strict=True):
        p.grad = torch.stack(parts).sum(0)
    require_close(collected(optimizer, net), definition(net, [batch(2), batch(3)]))


def test_a_step_inside_a_backward_has_the_rows_of_its_parameter() -> None:
    net, seen = Net(), list[Tensor]()
    optimizer = Optimizer([net.second.weight], {**SINGD, "routes": []}, lr=0.0)
    watch_inputs(optimizer, net)
    watch_output_gradients(optimizer, net)

    def step(p: Tensor) -> None:
        for name in NAMES:
            given = optimizer.param_sets.signals.provided.sources[name][0]()
            assert isinstance(given, dict)
            seen.append(given[p])
        p.grad = None

    net.second.weight.register_post_accumulate_grad_hook(step)
    for _ in range(2):
        seen.clear()
        loss_of(net, batch(2)).backward()
        wanted = definition(net, [batch(2)])
        require_close({NAMES[0]: seen[:1], NAMES[1]: seen[1:]}, {name: wanted[name][1:] for name in NAMES})


def test_a_sharpness_aware_step_has_the_signals_of_its_second_gradient() -> None:
    """At W + rho G / ||G||, which is far from W here."""
    net, rho = Net(), 0.5
    optimizer = compose({**SINGD, "sam": {"rho": rho}}, net, lr=0.0, weight_decay=0.0)
    there = copy.deepcopy(net)
    loss_of(there, batch(2)).backward()
    norm = nn.utils.get_total_norm([p.grad for p in there.parameters() if p.grad is not None])
    with torch.no_grad():
        for p in there.parameters():
            assert p.grad is not None
            p += rho * p.grad / norm
    sources, seen = optimizer.param_sets.signals.provided.sources, dict[str, Any]()
    for name in NAMES:
        sources[name][:] = [lambda name=name, own=sources[name][0]: seen.setdefault(name, own())]

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(net, batch(2))
        loss.backward()
        return loss

    optimizer.step(closure)
    found = {name: [seen[name][p] for p in (net.first.weight, net.second.weight)] for name in NAMES}
    require_close(found, definition(there, [batch(2)]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_changes_neither_the_dtype_nor_the_unit(dtype: torch.dtype) -> None:
    """Grams are float32 of the values in half precision; 5 %, the rounding of forward and backward in 8 bits."""
    net = Net().float()
    optimizer, scaler = compose(SINGD, net), torch.amp.GradScaler("cpu", init_scale=2.0**8)
    with torch.autocast("cpu", dtype):
        loss = loss_of(net, batch(2).detach().float())
        scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    found = collected(optimizer, net)
    assert {x.dtype for values in found.values() for x in values} == {torch.float32}
    for name, wanted in definition(Net(), [batch(2)]).items():
        for ours, theirs in zip(found[name], wanted, strict=True):
            assert float((ours.double() - theirs).norm()) <= 0.05 * float(theirs.norm())


def test_a_float16_step_of_a_scaler_is_taken() -> None:
    net = Net().float()
    optimizer, scaler = compose(SINGD, net), torch.amp.GradScaler("cpu", init_scale=2.0**8)
    before = net.first.weight.detach().clone()
    with torch.autocast("cpu", torch.float16):
        loss = loss_of(net, batch(2).detach().float())
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    assert bool(net.first.weight.isfinite().all()) and not torch.equal(net.first.weight, before)


@pytest.mark.parametrize("discard", [by_none, in_place])
def test_logits_are_those_of_the_gradient(discard: Callable[..., None]) -> None:
    """Largest over two micro-batches; not of a batch that was thrown away, nor of a forward without a backward. 1e-6:
    logits are recorded in float32, also under autocast."""
    net = Attention()
    optimizer = compose(CLIP, net)
    batches = [normal(2, 5, 8, seed=seed) for seed in range(3)]
    net(100 * batches[2]).sum().backward()
    discard(optimizer, net)
    for x in batches[:2]:
        net(x).square().sum().backward()
    net.eval()(100 * batches[2])
    given = optimizer.param_sets.signals.provided.sources["max_logit"][0]()
    assert isinstance(given, dict)
    wanted = torch.maximum(largest(net, batches[0]), largest(net, batches[1])).clamp_min(0)
    torch.testing.assert_close(given[net.q.weight].double(), wanted, rtol=1e-6, atol=1e-6)


def hooks(net: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in net.modules())


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [SINGD, "newton_muon", "schedule_free_adamw"])
def test_an_optimizer_that_is_gone_leaves_no_hook(recipe: Any) -> None:
    """Whether it has stepped or holds sums of a backward; one that is composed in its place has hooks of its own."""
    net = Net()
    alone = None
    for _ in range(2):
        optimizer = compose(recipe, net)
        alone = alone or hooks(net)
        assert hooks(net) == alone > 0
        loss_of(net, batch(2)).backward()
        optimizer.step()
        loss_of(net, batch(3)).backward()
        del optimizer
        gc.collect()
        assert hooks(net) == 0


def test_models_with_hooks_are_copied_and_saved() -> None:
    """Copies hold no sums and train with an optimizer of their own."""
    net = Net()
    optimizer = compose(SINGD, net)
    loss_of(net, batch(1)).backward()  # sums are there
    buffer = io.BytesIO()
    torch.save(net, buffer)
    buffer.seek(0)
    for other in (copy.deepcopy(net), torch.load(buffer, weights_only=False)):
        other.zero_grad()
        own = compose(SINGD, other)
        loss_of(other, batch(2)).backward()
        require_close(collected(own, other), definition(other, [batch(2)]))
    require_close(collected(optimizer, net), definition(net, [batch(1)]))


@pytest.mark.slow
def test_a_compiled_model_gives_the_same_signals() -> None:
    net = Net()
    optimizer = compose(SINGD, net)
    compiled: Any = torch.compile(net, backend="eager")
    loss_of(compiled, batch(2)).backward()
    require_close(collected(optimizer, net), definition(net, [batch(2)]))
