"""Pairs of factors: how they are found, what stages see of a partner, and the recipes made of that."""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal

import pytest
import torch
from torch import Tensor, nn

import eigengraft
from eigengraft import Optimizer, Request, Stage, State, StepContext, Traits, load_recipe

from ..refusals import refused
from ..trajectories import normal

STEPS, LR = 8, 0.05
Pair = tuple[Tensor, Tensor]
EXACT = "routes.pairs.update.partner_basis.inner.spectral.solver=svd"
RATIO = "routes.pairs.lr_multiplier=1"
SHAPES = {"q": (7, 5), "v": (7, 9)}
"""Inputs and outputs of two layers: the second factors differ in length, the first ones are computed in one stack."""


class Spy(Stage):
    """Writes down what it sees of partners, and moves along the gradient."""

    kind: Literal["partner_spy_for_test"] = "partner_spy_for_test"
    told: ClassVar[list[dict[str, Any]]] = []

    def traits(self, block: tuple[int, ...]) -> Traits:
        return Traits(signals=(Request("partner"), Request("partner_before"), Request("partner_gradient")))

    def apply(self, state: State, gradient: Tensor, direction: Tensor, context: StepContext) -> Tensor:
        self.told.append({name: torch.as_tensor(value).clone() for name, value in context.signals.items()})
        return direction


Stage.members.pop("partner_spy_for_test")  # the laws are about every member of the family
SPY = {"update": [Spy()], "view": "pairs"}


class Layer(nn.Module):
    """W x with W = B A."""

    def __init__(self, n: int, m: int, names: tuple[str, str] = ("lora_A", "lora_B"), rank: int = 3) -> None:
        super().__init__()
        self.names = names
        self.register_parameter(names[0], nn.Parameter(normal(rank, n, seed=n)))
        self.register_parameter(names[1], nn.Parameter(normal(m, rank, seed=m)))

    @property
    def pair(self) -> tuple[nn.Parameter, nn.Parameter]:
        return self.get_parameter(self.names[0]), self.get_parameter(self.names[1])


class Published(Layer):
    """Names that tell nothing, and a method that does."""

    def parameter_pairs(self) -> list[tuple[str, str]]:
        return [self.names]


def model(change: Tensor | None = None) -> nn.ModuleDict:
    layers = nn.ModuleDict({name: Layer(n, m) for name, (n, m) in SHAPES.items()})
    if change is not None:
        with torch.no_grad():
            for layer in layers.values():
                a, b = layer.pair
                a.copy_(change @ a)
                b.copy_(b @ torch.linalg.inv(change))
    return layers


def target(step: int, n: int, m: int) -> Tensor:
    return normal(m, n, seed=100 * step + n + m)


def give(layers: nn.ModuleDict, step: int) -> None:
    """Gradients of ||B A - T||^2 / 2, T another one at each step."""
    for layer in layers.values():
        a, b = (factor.detach() for factor in layer.pair)
        g = b @ a - target(step, a.shape[1], b.shape[0])
        layer.pair[0].grad, layer.pair[1].grad = b.mT @ g, g @ a.mT


def trained(recipe: Any, change: Tensor | None = None, overrides: Sequence[str] = ()) -> nn.ModuleDict:
    layers = model(change)
    optimizer = eigengraft.compose(load_recipe(recipe, list(overrides)), layers, lr=LR)
    for step in range(STEPS):
        give(layers, step)
        optimizer.step()
    return layers


def products(layers: nn.ModuleDict) -> Tensor:
    return torch.cat([(layer.pair[1] @ layer.pair[0]).detach().flatten() for layer in layers.values()])


def inverse_root(a: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(a)
    return (vectors * values.rsqrt()) @ vectors.mT


def lora_rite(a: Tensor, b: Tensor, gradients: Callable[[int, Tensor, Tensor], Pair]) -> Pair:
    """Algorithm 1 of LoRA-RITE in the paper's notation, X `[n, r]` beside Y `[m, r]`; means with bias correction."""
    x, y = a.mT.clone(), b.clone()
    moments: dict[str, list[Tensor]] = {}
    for t in range(STEPS):
        moved = {}
        gradient_a, gradient_b = gradients(t, x.mT, y)
        for name, own, other, g in (("x", x, y, gradient_a.mT), ("y", y, x, gradient_b)):
            u, r = torch.linalg.qr(other)
            before, v, m = moments.get(name, [u, torch.zeros(3, 3).double(), torch.zeros_like(own)])
            p, unmagnified = u.mT @ before, g @ torch.linalg.inv(r)
            v = 0.999 * p @ v @ p.mT + 0.001 * unmagnified.mT @ unmagnified / len(own)
            m = 0.9 * m @ p.mT + 0.1 * unmagnified @ inverse_root(v / (1 - 0.999 ** (t + 1)))
            moments[name] = [u, v, m]
            moved[name] = own - LR * m / (1 - 0.9 ** (t + 1)) @ torch.linalg.inv(r).mT
        x, y = moved["x"], moved["y"]
    return x.mT, y


def lora_muon(a: Tensor, b: Tensor, gradients: Callable[[int, Tensor, Tensor], Pair]) -> Pair:
    """LoRA-Muon as the paper writes it: S_B^(-1/2), exact polar factors, no decay."""
    x, y = a.mT.clone(), b.clone()
    m = {"x": torch.zeros_like(x), "y": torch.zeros_like(y)}
    for t in range(STEPS):
        gradient_a, gradient_b = gradients(t, x.mT, y)
        moved = {}
        for name, own, other, g in (("x", x, y, gradient_a.mT), ("y", y, x, gradient_b)):
            m[name] = 0.95 * m[name] + 0.05 * g
            root = inverse_root(other.mT @ other)
            left, _, right = torch.linalg.svd(m[name] @ root, full_matrices=False)
            moved[name] = own - LR / 2 * left @ right @ root
        x, y = moved["x"], moved["y"]
    return x.mT, y


def quadratic(step: int, a: Tensor, b: Tensor) -> Pair:
    g = b @ a - target(step, a.shape[1], b.shape[0])
    return b.mT @ g, g @ a.mT


@pytest.mark.parametrize(
    ("recipe", "definition", "exact"), [("lora_rite", lora_rite, ()), ("lora_muon", lora_muon, (EXACT, RATIO))]
)
def test_recipes_are_the_papers_algorithms(
    recipe: str, definition: Callable[..., Pair], exact: tuple[str, ...]
) -> None:
    ours = trained(recipe, overrides=exact)
    for name, start in model().items():
        expected = definition(*(factor.detach() for factor in start.pair), quadratic)
        for factor, wanted in zip(ours[name].pair, expected, strict=True):
            # the ridge of the root, 1e-12 of squared gradients of size 1, moves it by as much
            torch.testing.assert_close(factor.detach(), wanted, rtol=0, atol=1e-9)


@pytest.mark.parametrize("recipe", ["lora_rite", "lora_muon"])
def test_the_product_moves_alike_whatever_its_factors(recipe: str) -> None:
    change = normal(3, 3, seed=4) + 2 * torch.eye(3).double()
    ours, plain = products(trained(recipe, change, [RATIO])), products(trained(recipe, None, [RATIO]))
    torch.testing.assert_close(ours, plain, rtol=0, atol=1e-10)  # rounding, times the condition of what changes it
    adam = {"update": [{"kind": "momentum"}, {"kind": "rms"}]}
    assert (products(trained(adam, change)) - products(trained(adam))).abs().max() > 0.01


def test_a_factor_of_zeros_begins_to_move() -> None:
    layers = model()
    with torch.no_grad():
        for layer in layers.values():
            layer.pair[1].zero_()
    start = {name: layer.pair[0].detach().clone() for name, layer in layers.items()}
    optimizer = eigengraft.compose("lora_rite", layers, lr=LR)
    for step in range(2):
        give(layers, step)
        optimizer.step()
        for name, layer in layers.items():
            assert torch.equal(layer.pair[0], start[name]) is (step == 0)
            assert layer.pair[1].abs().max() > 0
            assert layer.pair[0].isfinite().all()
            assert layer.pair[1].isfinite().all()


def test_stages_see_the_partner_and_its_gradient_and_what_it_was() -> None:
    layers = model()
    del layers["v"]
    a, b = layers["q"].pair
    optimizer = Optimizer(layers.named_parameters(), SPY, lr=1.0)
    Spy.told.clear()
    seen = []
    for step in range(3):
        give(layers, step)
        assert a.grad is not None
        if step == 1:
            a.grad = None  # B moves alone
        seen.append((a.detach().clone(), b.detach().clone(), None if a.grad is None else a.grad.clone(), b.grad))
        optimizer.step()
    of_b, of_a = [told for told in Spy.told if told["partner"].shape[1] == 7], Spy.told[::1]
    of_a = [told for told in of_a if told["partner"].shape[1] == 5]
    assert (len(of_a), len(of_b)) == (2, 3)
    for told, step in zip(of_b, range(3), strict=True):
        assert torch.equal(told["partner"][0], seen[step][0].mT)
        wanted = seen[step][2]
        assert torch.equal(told["partner_gradient"][0], torch.zeros(7, 3).double() if wanted is None else wanted.mT)
        assert torch.equal(told["partner_before"][0], seen[max(step - 1, 0)][0].mT)
    assert torch.equal(of_a[1]["partner_before"][0], seen[0][1])  # A was not updated at the second step
    assert torch.equal(of_a[1]["partner"][0], seen[2][1])


def test_pairs_are_told_by_names_or_by_modules() -> None:
    named = eigengraft.compose("lora_muon", model()).routing_table()
    assert named[0].view.endswith("factor of inputs, with q.lora_B")
    published = nn.ModuleDict({"head": Published(7, 5, ("down", "up"))})
    rows = eigengraft.compose("lora_muon", published).routing_table()
    assert rows[1].view.endswith("factor of outputs, with head.down")
    peft = {"x.lora_A.default.weight": normal(3, 7, seed=0), "x.lora_B.default.weight": normal(5, 3, seed=1)}
    optimizer = Optimizer([(name, nn.Parameter(value)) for name, value in peft.items()], "lora_rite")
    assert len(optimizer.param_groups[0]["params"]) == 2


def test_trajectories_do_not_depend_on_groups_and_go_on_after_a_checkpoint() -> None:
    wanted = products(trained("lora_rite"))
    layers = model()
    pairs = [layer.pair for layer in layers.values()]
    names = [[f"{name}.lora_{side}" for name in SHAPES] for side in "AB"]
    sides = list(zip(*pairs, strict=True))
    groups = [{"params": list(zip(own, factors, strict=True))} for own, factors in zip(names, sides, strict=True)]
    optimizer = Optimizer(groups, "lora_rite", lr=LR)
    for step in range(STEPS):
        if step == 4:
            saved = optimizer.state_dict()
            optimizer = Optimizer(groups, "lora_rite", lr=LR)
            optimizer.load_state_dict(saved)
        give(layers, step)
        optimizer.step()
    torch.testing.assert_close(products(layers), wanted, rtol=0, atol=1e-12)  # frames of padded rows are rounded apart


def test_a_frozen_partner_is_seen() -> None:
    layers = model()
    for layer in layers.values():
        layer.pair[0].requires_grad_(False)
    optimizer = eigengraft.compose("lora_rite", layers, lr=LR)
    give(layers, 0)
    optimizer.step()
    for name, layer in layers.items():
        assert not torch.equal(layer.pair[1], model()[name].pair[1])


@pytest.mark.parametrize(
    ("shapes", "recipe", "says"),
    [
        ({"x.weight": (4, 3)}, SPY, ("pairs",)),
        ({"x.lora_A": (3, 4)}, "lora_rite", ("x.lora_A", "x.lora_B", "partner")),
        ({"x.lora_A": (3, 4), "x.lora_B": (5, 2)}, "lora_muon", ("x.lora_A",)),
        ({"x.lora_A": (3, 4, 1), "x.lora_B": (5, 3, 1)}, "lora_muon", ("pairs",)),
        ({"x.lora_A": (3, 4), "x.lora_B": (5, 3)}, {"update": [Spy()]}, ("view", "pairs")),
        (
            {"x.lora_A": (3, 4), "x.lora_B": (5, 3)},
            {**SPY, "blocking": {"size": 2}},
            ("view", "pairs"),
        ),
    ],
)
def test_parameters_that_make_no_pair_are_refused(
    shapes: dict[str, tuple[int, ...]], recipe: Any, says: tuple[object, ...]
) -> None:
    named = [(name, nn.Parameter(torch.zeros(shape))) for name, shape in shapes.items()]
    with refused(ValueError, *says):
        Optimizer(named, recipe)


def test_a_module_that_names_no_parameters_is_refused() -> None:
    layer = Published(4, 3, ("down", "up"))
    layer.names = ("down", "sideways")
    with refused(ValueError, "Published.parameter_pairs", "down"):
        eigengraft.compose("lora_muon", layer)


def test_partners_are_not_provided() -> None:
    optimizer = eigengraft.compose("lora_muon", model())
    with refused(ValueError, "provide"):
        optimizer.provide("partner", 1.0)
