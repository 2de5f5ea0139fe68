"""Data of other libraries: Hydra's nodes, numbers of numpy, keys of wrappers in param groups, schedulers."""

import copy
import io
from collections import UserDict, UserList
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import eigengraft
from eigengraft import Optimizer, RecipeError, load_recipe
from eigengraft.component import plain
from eigengraft.preconditioners import RMS, Momentum
from eigengraft.preconditioners.cadence import Every

from ..refusals import refused

DECLARED: dict[str, Any] = {
    "update": [
        {
            "kind": "eigenbasis",
            "inner": [
                {"kind": "momentum", "beta": {"from": 0.5, "to": 0.9, "steps": 5}},
                {"kind": "rms", "beta": 0.95},
            ],
            "refresh": {"kind": "every", "steps": 3},
        }
    ],
    "routes": ["default", {"name": "rest", "match": {"role": ["bias", "norm"]}, "update": "sign", "optional": True}],
    "storage": {"statistic": {"kind": "int8"}},
    "weight_decay": {"kind": "independent", "rate": 0.1},
    "averaging": {"kind": "ema", "inner": {"kind": "schedule_free"}},
    "total_steps": 10,
}


def node(value: Any) -> Any:
    """A value in a mapping and a sequence of another library, numbers as numpy's."""
    if isinstance(value, dict):
        return UserDict({key: node(item) for key, item in value.items()})
    if isinstance(value, list):
        return UserList(map(node, value))
    if isinstance(value, float):
        return np.float64(value)
    return np.int64(value) if isinstance(value, int) and not isinstance(value, bool) else value


def test_a_recipe_may_be_any_mapping() -> None:
    assert load_recipe(node(DECLARED)) == load_recipe(DECLARED)
    based = {"base": "soap_fitted", "set": {"update.eigenbasis.refresh.steps": 7}, "lr": 0.25}
    assert load_recipe(node(based)) == load_recipe(based)
    assert load_recipe({"base": node(DECLARED), "lr": 0.25}) == load_recipe({"base": DECLARED, "lr": 0.25})


def test_stages_may_be_any_sequence() -> None:
    assert load_recipe(node(DECLARED["update"])) == load_recipe(DECLARED["update"])


def test_overrides_may_be_any_mapping_or_sequence() -> None:
    changes = {key: DECLARED[key] for key in ("routes", "weight_decay", "update")}
    changes |= {"update.eigenbasis.refresh.steps": 4}
    assert load_recipe("adamw", node(changes)) == load_recipe("adamw", changes)
    assert load_recipe("adamw", UserList(["lr=0.5"])) == load_recipe("adamw", ["lr=0.5"])


def test_components_take_them_too() -> None:
    assert Momentum(beta=np.float32(0.5)) == Momentum(beta=0.5)
    assert RMS(beta=UserDict({"from": np.float32(0.5), "to": 0.75, "steps": np.int32(4)})) == RMS(
        beta={"from": 0.5, "to": 0.75, "steps": 4}
    )
    assert Every(steps=np.int64(3)) == Every(steps=3)
    assert Momentum(beta=0.25).replace(beta=np.float32(0.5)) == Momentum(beta=0.5)
    assert plain({"a": np.array([0.25, 0.5]), "b": (np.int64(1), "text")}) == {"a": [0.25, 0.5], "b": (1, "text")}


@pytest.mark.parametrize(
    ("given", "path"),
    [
        (UserDict({"kind": "rms", "beta": "0.9"}), ("update.rms.beta",)),
        (UserDict({"kind": "rms", "beta": np.float64("nan")}), ("update.rms.beta",)),
        (UserDict({"kind": "rms", "betas": 0.9}), ("update.rms.betas",)),
        (UserDict({"kind": "rsm"}), ("update.rsm",)),
        ({"kind": "rms", "per": UserList(["entry"])}, ("update.rms.per",)),
    ],
)
def test_faults_in_them_have_their_path(given: Any, path: tuple[object, ...]) -> None:
    with refused(RecipeError, *path):
        load_recipe(UserList([given]))


def weight() -> nn.Parameter:
    return nn.Parameter(torch.ones(3, 2))


def stepped(optimizer: Optimizer, steps: int = 2) -> list[Tensor]:
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for _ in range(steps):
        for parameter in params:
            parameter.grad = torch.full_like(parameter, 0.5)
        optimizer.step()
    return params


SIMPLE = [{"kind": "momentum"}]


@pytest.mark.parametrize("number", [np.float32, np.float64, np.int64])
def test_rates_may_be_numbers_of_numpy(number: Any) -> None:
    """In the constructor, in groups and by hand; checkpoints hold Python's numbers, which weights_only reads."""
    rate, own = number(1), float(number(1))
    ours = Optimizer([weight()], SIMPLE, lr=rate, weight_decay=rate)
    group = UserDict({"params": [weight()], "lr": rate, "weight_decay": rate})
    grouped = Optimizer([group], SIMPLE)
    by_hand = Optimizer([weight()], SIMPLE, lr=0.0, weight_decay=0.0)
    by_hand.param_groups[0].update(lr=rate, weight_decay=rate)
    expected = stepped(Optimizer([weight()], SIMPLE, lr=own, weight_decay=own))
    for optimizer in (ours, grouped, by_hand):
        assert torch.equal(stepped(optimizer)[0], expected[0])
        file = io.BytesIO()
        torch.save(optimizer.state_dict(), file)
        file.seek(0)
        assert torch.load(file, weights_only=True)["param_groups"][0]["lr"] == own


@pytest.mark.parametrize("bad", [np.bool_(True), np.float32("nan"), np.float32(-1), np.str_("1")])
def test_other_values_of_numpy_are_no_rates(bad: Any) -> None:
    with refused(ValueError, "lr"):
        Optimizer([weight()], SIMPLE, lr=bad)


class Wrapper(torch.optim.Optimizer):
    """What wrappers of optimizers do: keys of their own in groups that the optimizer inside shares with them."""

    def __init__(self, params: Any, **own: Any) -> None:
        super().__init__(params, {"lr": 0.1, **own})
        self.inside = Optimizer(self.param_groups, SIMPLE)
        self.param_groups = self.inside.param_groups
        self.defaults.update(self.inside.defaults)


@pytest.mark.filterwarnings("ignore:param group:UserWarning")
def test_keys_of_wrappers_stay_in_groups() -> None:
    own = {"rho": 0.05, "adaptive": True, "alpha": 0.7, "k": 5, "weight_decay_mult": 0.5, "iteration": 3, "max_lr": 0.1}
    wrapper = Wrapper([weight()], **own)
    wrapper.inside.defaults.update(own)
    wrapper.inside.add_param_group({"params": [weight()], "lr": 0.1})
    stepped(wrapper.inside)
    for group in wrapper.inside.state_dict()["param_groups"]:
        assert {key: group[key] for key in own} == own


@pytest.mark.parametrize("overrides", [{"update.rms.beta": 0.9}, ["update.rms.beta=0.9"], ()], ids=str)
@pytest.mark.parametrize("recipe", ["adamw", {"update": ["momentum", "rms"]}, [Momentum(), RMS()]], ids=str)
@pytest.mark.filterwarnings("error")
def test_wrappers_may_pass_the_recipe_in_groups_too(recipe: Any, overrides: Any) -> None:
    """SAM and ZeroRedundancyOptimizer make groups with all arguments of the optimizer, and pass both to it."""
    given = {"recipe": recipe, "lr": 0.1, "overrides": overrides}
    wrapper = torch.optim.Optimizer([weight()], given)
    inside = Optimizer(wrapper.param_groups, **given)
    alone = Optimizer([weight()], **given)
    stepped(inside)
    stepped(alone)
    assert torch.equal(inside.param_groups[0]["params"][0], alone.param_groups[0]["params"][0])


def test_a_group_of_another_recipe_is_refused() -> None:
    with refused(ValueError, "recipe"):
        Optimizer([weight()], "adamw").add_param_group({"params": [weight()], "recipe": "sgd"})


@pytest.mark.parametrize(
    "key", ["betas", "eps", "momentum", "nesterov", "amsgrad", "update", "routes", "weight_deacy", "learning_rate"]
)
def test_options_of_other_optimizers_are_refused_in_groups(key: str) -> None:
    with refused(ValueError, key):
        Optimizer([{"params": [weight()], key: 0.5}], SIMPLE)


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("betas", (0.8, 0.95), ("{'update.momentum.beta': 0.8, 'update.rms.beta': 0.95}", "route")),
        ("eps", 1e-6, ("{'update.rms.eps': 1e-06}", "route")),
        ("momentum", 0.8, ("{'update.momentum.beta': 0.8}", "route")),
        ("update", ["sign"], ("route",)),
        ("graph", True, ()),
        ("lambd", 1e-4, ()),
    ],
)
def test_an_option_of_a_group_that_a_route_can_have_is_answered_with_a_route(
    key: str, value: Any, says: tuple[str, ...]
) -> None:
    with refused(ValueError, key, *says) as caught:
        Optimizer([{"params": [weight()], key: value}], "adamw")
    assert ("route" in str(caught.value)) == bool(says)


@pytest.mark.parametrize("cyclic", [False, True])
def test_schedulers_of_momentum_are_refused_at_once(cyclic: bool) -> None:
    """torch asks for `momentum` or `betas` in the groups; without them it says so, and nothing has changed."""
    optimizer = Optimizer([weight()], "sgd", lr=0.01)

    def schedule(**more: Any) -> Any:
        if cyclic:
            return torch.optim.lr_scheduler.CyclicLR(optimizer, 0.01, 0.1, **more)
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=4, **more)

    with refused(ValueError, "cycle_momentum"):
        schedule()
    assert schedule(cycle_momentum=False).get_last_lr()[0] == optimizer.param_groups[0]["lr"]


COMPLEX: dict[str, Any] = {
    "adam": torch.optim.Adam,
    "adamw": partial(torch.optim.AdamW, weight_decay=0.1),
    "sgd": partial(torch.optim.SGD, momentum=0.9, weight_decay=0.1),
}


def complex_weights(dtype: torch.dtype) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, dtype=dtype, generator=generator)) for shape in ((4, 3), (5,), ())]


@pytest.mark.parametrize("recipe", COMPLEX)
@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=str)
def test_complex_parameters_are_updated_as_torch_does(recipe: str, dtype: torch.dtype) -> None:
    """torch's optimizers take real and imaginary parts as entries of their own."""
    ours, theirs = complex_weights(dtype), complex_weights(dtype)
    decay = None if recipe == "adam" else 0.1
    optimizer = Optimizer([(f"w{i}", p) for i, p in enumerate(ours)], recipe, 0.1, decay, overrides={"routes": []})
    reference = COMPLEX[recipe](theirs, lr=0.1)
    for step in range(5):
        for p, q in zip(ours, theirs, strict=True):
            q.grad = torch.randn(p.shape, dtype=dtype, generator=torch.Generator().manual_seed(step))
            p.grad = q.grad.conj().resolve_conj().conj()  # lazily conjugated, as backward may leave it
        optimizer.step()
        reference.step()
        saved = copy.deepcopy(optimizer.state_dict())
        optimizer.load_state_dict(saved)
    tolerance = 1e-6 if dtype == torch.complex64 else 1e-14  # a few roundings of sums of order 1
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("recipe", ["soap_fitted", "muon", "prodigy", "shampoo"])
def test_stages_that_mix_entries_refuse_complex_parameters_by_name(recipe: str) -> None:
    with refused(ValueError, "w"):
        Optimizer([("w", complex_weights(torch.complex64)[0])], recipe, overrides={"routes": []})


def test_a_complex_matrix_that_is_thawed_is_refused_where_its_stage_cannot_take_it() -> None:
    model = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3, dtype=torch.complex64), "head": nn.Linear(3, 2)})
    model["b"].requires_grad_(False)
    optimizer = eigengraft.compose("soap_fitted", model)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    before = [p.detach().clone() for p in model.parameters()]
    with refused(ValueError, "b.weight"):
        optimizer.step()
    assert all(map(torch.equal, before, model.parameters()))


def test_a_real_parameter_behind_complex_weights_trains() -> None:
    """The remedy that the error names: pairs of real numbers are updated as torch.optim updates complex ones."""
    start = torch.randn(3, 2, 2, generator=torch.Generator().manual_seed(0))
    pairs, whole = nn.Parameter(start.clone()), nn.Parameter(torch.view_as_complex(start.clone()))
    ours, theirs = Optimizer([("w", pairs)], "adam", lr=0.1), torch.optim.Adam([whole], lr=0.1)
    for _ in range(3):
        for optimizer, weights in ((ours, torch.view_as_complex(pairs)), (theirs, whole)):
            optimizer.zero_grad()
            (weights - 1j).abs().square().sum().backward()
            optimizer.step()
    torch.testing.assert_close(torch.view_as_complex(pairs.detach()), whole.detach())
