"""Recipes against torch.optim over 50 steps, on random gradients and on those of a real model.

Measured is max |ours - torch| / max |torch - start|. Where torch computes the same formula the bound is 1e-6 in float32
and 1e-12 in float64: rounding, about 50 steps of half a unit in the last place (6e-8, 1e-16), amplified by divisions by
small second moments. Parameters start small against the distance moved, so that their own resolution is no part of the
measure. Where torch computes something else the test says what, and shows that nothing but that is the difference.
"""

import dataclasses
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ..trajectories import Maker, distance, follow, normal, random_gradients, recipe

pytestmark = pytest.mark.slow

STEPS = 30
SHAPES = ((6, 5), (7,), (3, 2, 4), (), (4, 1))
BFLOAT16 = {"random": 0.02, "model": 0.15}
TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-12}


@dataclasses.dataclass(frozen=True)
class Pair:
    """The same optimizer twice; matrices: whether it takes 2-d parameters only."""

    torch: Callable[[Any], torch.optim.Optimizer]
    source: object
    overrides: tuple[str, ...] = ()
    lr: float = 0.1
    weight_decay: float = 0.0
    matrices: bool = False

    def ours(self) -> Maker:
        return recipe(self.source, *self.overrides, lr=self.lr, weight_decay=self.weight_decay)


M = "update.momentum"
H = "update.heavy_ball"
ADAGRAD = {"update": [{"kind": "rms", "beta": 1.0, "eps": 1e-10}], "weight_decay": "l2", "routes": []}
RMSPROP_STAGE = {"kind": "rms", "beta": 0.99, "bias_correction": False}
RMSPROP = {"update": [RMSPROP_STAGE], "weight_decay": "l2", "routes": []}
RMSPROP_MOMENTUM = {**RMSPROP, "update": [RMSPROP_STAGE, {"kind": "heavy_ball", "beta": 0.8}]}
EPS = (1e-15, 1e-3)
"""Floors of torch.optim.Adafactor that bite nowhere here: its default is the subject of a test of its own."""

PAIRS = {
    "sgd": Pair(lambda p: torch.optim.SGD(p, lr=0.1), "sgd", ('update=["identity"]',)),
    "sgd, decay": Pair(
        lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.1), "sgd", ('update=["identity"]',), weight_decay=0.1
    ),
    "sgd, momentum": Pair(lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), "sgd"),
    "sgd, momentum, dampening": Pair(
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.4),
        "sgd",
        (f"{H}.dampening=0.4", f"{H}.undamped_start=true"),
    ),
    "sgd, nesterov": Pair(
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.8, nesterov=True),
        "sgd",
        (f"{H}.beta=0.8", f"{H}.nesterov=true"),
    ),
    "sgd, nesterov, decay": Pair(
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
        "sgd",
        (f"{H}.nesterov=true",),
        weight_decay=0.1,
    ),
    "sgd, momentum, dampening, decay": Pair(
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.5, weight_decay=0.05),
        "sgd",
        (f"{H}.dampening=0.5", f"{H}.undamped_start=true"),
        weight_decay=0.05,
    ),
    "adam": Pair(lambda p: torch.optim.Adam(p, lr=0.1), "adam"),
    "adam, betas, eps": Pair(
        lambda p: torch.optim.Adam(p, lr=0.1, betas=(0.8, 0.95), eps=1e-3),
        "adam",
        (f"{M}.beta=0.8", "update.rms.beta=0.95", "update.rms.eps=1e-3"),
    ),
    "adam, l2": Pair(lambda p: torch.optim.Adam(p, lr=0.1, weight_decay=0.1), "adam", weight_decay=0.1),
    "adamw": Pair(lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.1), "adamw", weight_decay=0.1),
    "adagrad": Pair(lambda p: torch.optim.Adagrad(p, lr=0.1), ADAGRAD),
    "adagrad, decay": Pair(lambda p: torch.optim.Adagrad(p, lr=0.1, weight_decay=0.1), ADAGRAD, weight_decay=0.1),
    "rmsprop": Pair(lambda p: torch.optim.RMSprop(p, lr=0.1), RMSPROP),
    "rmsprop, decay": Pair(lambda p: torch.optim.RMSprop(p, lr=0.1, weight_decay=0.01), RMSPROP, weight_decay=0.01),
    "rmsprop, momentum": Pair(lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=0.8), RMSPROP_MOMENTUM),
    "rmsprop, momentum, decay": Pair(
        lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=0.8, weight_decay=0.01), RMSPROP_MOMENTUM, weight_decay=0.01
    ),
    "adafactor": Pair(lambda p: torch.optim.Adafactor(p, lr=0.1, eps=EPS), "adafactor"),
    "adafactor, decay": Pair(
        lambda p: torch.optim.Adafactor(p, lr=0.3, eps=EPS, beta2_decay=-0.6, d=1.5, weight_decay=0.1),
        "adafactor",
        ("update.adafactor.decay_power=0.6", "update.clip_rms.threshold=1.5"),
        lr=0.3,
        weight_decay=0.1,
    ),
}


class Net(nn.Module):
    """A classifier with parameters of one, two and four axes, and gradients of different sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(1, 3, 3)
        self.norm = nn.LayerNorm(12)
        self.hidden = nn.Linear(12, 6)
        self.second = nn.Linear(6, 5)
        self.head = nn.Linear(5, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.hidden(self.norm(self.convolution(x).flatten(1))))
        return self.head(torch.tanh(self.second(x)))

    def trained(self, matrices: bool) -> list[nn.Parameter]:
        """The parameters that take part. Gradients of the head sum to zero over the classes: they are singular, and a
        polar factor would make noise of size 1 of their rounding, so that matrices alone are the hidden ones."""
        hidden = [self.hidden.weight, self.second.weight]
        return hidden if matrices else list(self.parameters())


@cache
def _net_gradients(name: str, dtype: torch.dtype) -> tuple[list[Tensor], list[list[Tensor]]]:
    """(initial parameters, gradients[t][i]) of a classifier that torch's optimizer trains, fresh random batches."""
    torch.manual_seed(0)
    pair, net = PAIRS[name], Net().to(dtype)
    parameters = net.trained(pair.matrices)
    for p in parameters:
        p.data.div_(4)
    init = [p.detach().clone() for p in parameters]
    optimizer, gradients = pair.torch(parameters), []
    for t in range(STEPS):
        x = normal(16, 1, 4, 4, seed=t, dtype=dtype)
        labels = (x.flatten(1)[:, :4].sum(0) + x[:, 0, 0, :]).argmax(-1)
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x), labels).backward()
        gradients.append([p.grad.clone() for p in parameters if p.grad is not None])
        optimizer.step()
    return init, gradients


def _problem(name: str, gradients: str, dtype: torch.dtype) -> tuple[list[Tensor], Sequence[Sequence[Tensor]]]:
    if gradients == "model":
        return _net_gradients(name, dtype)
    shapes = [shape for shape in SHAPES if len(shape) == 2 or not PAIRS[name].matrices]
    init = [normal(*shape, seed=99 + i, dtype=dtype) / 4 for i, shape in enumerate(shapes)]
    return init, random_gradients(shapes, STEPS, dtype=dtype)


MUON = {
    "original": Pair(lambda p: torch.optim.Muon(p, lr=0.1), "reference/muon", weight_decay=0.1, matrices=True),
    "plain momentum": Pair(
        lambda p: torch.optim.Muon(p, lr=0.1, momentum=0.8, nesterov=False, weight_decay=0.0, ns_steps=3),
        "reference/muon",
        (f"{M}.beta=0.8", f"{M}.nesterov=false", "update.spectral.solver.steps=3"),
        matrices=True,
    ),
    "match_rms_adamw": Pair(
        lambda p: torch.optim.Muon(p, lr=0.1, adjust_lr_fn="match_rms_adamw"),
        "reference/muon",
        ("update.scale.rule=match_rms",),
        weight_decay=0.1,
        matrices=True,
    ),
}
PAIRS |= {f"muon, {name}": pair for name, pair in MUON.items()}
SAME = [name for name in PAIRS if not name.startswith("muon")]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=["float32", "float64"])
@pytest.mark.parametrize("gradients", ["random", "model"])
@pytest.mark.parametrize("name", SAME)
def test_same_formula_as_torch(name: str, gradients: str, dtype: torch.dtype) -> None:
    pair = PAIRS[name]
    init, given = _problem(name, gradients, dtype)
    apart = distance(follow(pair.ours(), init, given), follow(pair.torch, init, given), init)
    assert apart <= TOLERANCE[dtype]


def _uncast(gradient: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """The Newton-Schulz iteration of torch.optim.Muon without its cast to bfloat16."""
    tall = gradient.size(0) > gradient.size(1)
    x = gradient.T if tall else gradient
    x = x / x.norm().clamp(min=eps)
    a, b, c = coefficients
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if tall else x


@pytest.mark.parametrize("dtype", TOLERANCE, ids=["float32", "float64"])
@pytest.mark.parametrize("gradients", ["random", "model"])
@pytest.mark.parametrize("name", MUON)
def test_muon_is_torchs_but_for_the_cast(
    name: str, gradients: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch.optim.Muon iterates in bfloat16; with the cast taken out of it, and of the recipe, both are one formula.

    10 times the tolerance: a Newton-Schulz step multiplies roundings of small singular values by up to 3.4, five of
    them by 480, and how products round depends on the processor.
    """
    monkeypatch.setattr("torch.optim._muon._zeropower_via_newtonschulz", _uncast)
    init, given = _problem(f"muon, {name}", gradients, dtype)
    pair = MUON[name]
    ours = dataclasses.replace(pair, overrides=(*pair.overrides, "update.spectral.solver.precision=input")).ours()
    assert distance(follow(ours, init, given), follow(pair.torch, init, given), init) <= 10 * TOLERANCE[dtype]


@pytest.mark.parametrize("gradients", ["random", "model"])
@pytest.mark.parametrize("name", MUON)
def test_muon_in_bfloat16(name: str, gradients: str) -> None:
    """Both iterate in bfloat16 (unit 4e-3), but torch rounds before it divides by the norm and we divide first.

    Five steps multiply small singular values, and rounding with them, by up to 3.4445^5. Random matrices have few of
    them (1e-2 measured, two to three units), the momentum of a trained layer has more (7e-2 measured).
    """
    init, given = _problem(f"muon, {name}", gradients, torch.float32)
    pair = MUON[name]
    assert distance(follow(pair.ours(), init, given), follow(pair.torch, init, given), init) <= BFLOAT16[gradients]


def _adafactor(eps: float | None, size: float, dtype: torch.dtype) -> float:
    """How far our Adafactor is from torch's with floor `eps` (None: its default), for gradients of that size."""
    init = [normal(6, 5, seed=1, dtype=dtype) / 4]
    given = [[size * g for g in step] for step in random_gradients([(6, 5)], STEPS, dtype=dtype)]
    theirs = follow(lambda p: torch.optim.Adafactor(p, lr=0.1, eps=(eps, 1e-3)), init, given)
    return distance(follow(recipe("adafactor", lr=0.1), init, given), theirs, init)


def test_torchs_adafactor_floors_the_mean_of_squares_at_the_machine_epsilon() -> None:
    """v = r c^T / max(mean(r), eps1) with eps1 = 1.2e-7 by default in float32, though r is of the size of squares.

    Gradients below 3e-4 get another step from torch, rounding or not; the paper adds 1e-30 to the squares, we floor$
    them there. With a small eps1 both agree.
    """
    assert _adafactor(None, 1.0, torch.float32) <= TOLERANCE[torch.float32]
    assert _adafactor(None, 1e-5, torch.float32) > 0.01
    assert _adafactor(1e-15, 1e-5, torch.float32) <= TOLERANCE[torch.float32]
    assert _adafactor(None, 1e-9, torch.float64) > 0.01
    assert _adafactor(1e-15, 1e-5, torch.float64) <= TOLERANCE[torch.float64]


@pytest.mark.parametrize("size", [1e-8, 1e-4, 1e4])
def test_adams_eps_is_added_where_torch_adds_it(size: float) -> None:
    """To the root of the corrected second moment: visible when gradients are as small as eps."""
    init = [normal(6, 5, seed=1) / 4]
    given = [[size * g for g in step] for step in random_gradients([(6, 5)], STEPS)]
    theirs = follow(lambda p: torch.optim.Adam(p, lr=0.1), init, given)
    assert distance(follow(recipe("adam", lr=0.1), init, given), theirs, init) <= TOLERANCE[torch.float64]
    raw = follow(recipe("adam", "update.rms.eps_on=raw", lr=0.1), init, given)
    assert (distance(raw, theirs, init) > 0.1) == (size == 1e-8)


@pytest.mark.parametrize("decoupled", [False, True])
def test_torchs_foreach_and_fused_codes_are_the_same_formula(decoupled: bool) -> None:
    """Parity is with the formula, not with one of torch's three codes of it."""
    cls = torch.optim.AdamW if decoupled else torch.optim.Adam
    name = "adamw" if decoupled else "adam"
    init = [normal(*shape, seed=i) / 4 for i, shape in enumerate(SHAPES)]
    given = random_gradients(SHAPES, STEPS)
    ours = follow(recipe(name, lr=0.1, weight_decay=0.1), init, given)
    for code in ({"foreach": False, "fused": False}, {"foreach": True}, {"fused": True}):
        theirs = follow(lambda p, code=code: cls(p, lr=0.1, weight_decay=0.1, **code), init, given)
        assert distance(ours, theirs, init) <= TOLERANCE[torch.float64]


def test_adagrads_lr_decay_is_a_schedule() -> None:
    """torch.optim.Adagrad has a schedule of its own, lr / (1 + (t - 1) lr_decay); here that is a scheduler's job."""
    init, given = [normal(6, 5, seed=1) / 4], random_gradients([(6, 5)], STEPS)
    theirs = follow(lambda p: torch.optim.Adagrad(p, lr=0.1, lr_decay=0.05), init, given)
    parameter = nn.Parameter(init[0].clone())
    optimizer = recipe(ADAGRAD, lr=0.1)([parameter])
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 1 / (1 + 0.05 * t))
    for step in given:
        parameter.grad = step[0]
        optimizer.step()
        scheduler.step()
    assert distance([parameter.detach()[None]], [theirs[0][-1:]], init) <= TOLERANCE[torch.float64]
