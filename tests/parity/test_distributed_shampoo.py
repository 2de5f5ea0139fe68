"""The options of Distributed Shampoo, each through a recipe, against its formulas in `distributed_shampoo.py`."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from eigengraft import Optimizer

from ..trajectories import normal, recipe
from .distributed_shampoo import Options, trajectory

pytestmark = pytest.mark.slow

STEPS = 25


Fields = Mapping[str, Any]
NONE: Fields = MappingProxyType({})


class Case(NamedTuple):
    """What the reference is told, and the parts of a recipe that say the same."""

    options: Fields
    statistic: Fields = NONE
    shampoo: Fields = NONE
    solver: Fields = NONE
    momentum: Fields = NONE
    shape: tuple[int, ...] = (5, 4)


ADAM = {"kind": "adam", "beta2": 0.99, "eps": 1e-8}
CASES = {
    "defaults": Case({}),
    "one axis": Case({}, shape=(5,)),
    "three axes": Case({}, shape=(3, 2, 4)),
    "one exponent": Case({"exponents": [0.5, 0.5]}, shampoo={"exponent": "1/2"}),
    "an exponent for each axis": Case({"exponents": [0.5, 0.25]}, shampoo={"exponent": {2: ["1/2", "1/4"]}}),
    "an axis left out": Case({"exponents": [0, 0.5]}, shampoo={"exponent": {2: [0, "1/2"]}}),
    "trace scaling": Case({"trace_scaling": 0.5}, {"trace_scaling": 0.5}),
    "trace below epsilon": Case({"trace_scaling": 0.5, "eps": 20.0}, {"trace_scaling": 0.5, "trace_floor": 20.0}),
    "trace scaling of power 1": Case(
        {"trace_scaling": 1.0, "exponents": [0.5, 0.5]}, {"trace_scaling": 1.0}, {"exponent": "1/2"}
    ),
    "dropped weight": Case({"drop_weighting": True}, {"damped": False}),
    "sum": Case({"beta2": 1.0}, {"beta": 1.0}),
    "no bias correction": Case(
        {"bias_correction": False}, {"bias_correction": False}, momentum={"bias_correction": False}
    ),
    "pseudo-inverse": Case(
        {"pseudo_inverse": (0.0, 0.0)},
        solver={"kind": "eigh", "eps": 0.0, "deficiency": "pseudo_inverse"},
        shape=(3, 3),
    ),
    "pseudo-inverse, rtol": Case(
        {"pseudo_inverse": (0.05, 0.0)},
        solver={"kind": "eigh", "eps": 0.0, "deficiency": "pseudo_inverse", "rtol": 0.05},
    ),
    "pseudo-inverse, rtol of the dtype": Case(
        {"pseudo_inverse": (None, 0.0)},
        solver={"kind": "eigh", "eps": 0.0, "deficiency": "pseudo_inverse", "rtol": None},
    ),
    "pseudo-inverse, atol": Case(
        {"pseudo_inverse": (0.0, 0.7)},
        solver={"kind": "eigh", "eps": 0.0, "deficiency": "pseudo_inverse", "atol": 0.7},
    ),
    "ridge before": Case({}, solver={"kind": "eigh", "eps": 1e-4, "deficiency": "perturb_before"}),
    "coupled newton": Case(
        {}, solver={"kind": "coupled_newton", "eps": 1e-4, "relative": False, "tolerance": 1e-12, "max_iterations": 100}
    ),
    "higher order": Case(
        {},
        solver={"kind": "higher_order", "eps": 1e-4, "relative": False, "tolerance": 1e-12},
    ),
    "beta3 below beta1": Case({"beta3": 0.5}, momentum={"beta3": 0.5}),
    "beta3 above beta1": Case({"beta3": 0.98}, momentum={"beta3": 0.98}),
    "no filter": Case({"beta1": 0.0}, momentum={"beta": 0.0}),
    "schedule 1, 3": Case({"start": 1, "frequency": 3}),
    "schedule 4, 4": Case({"start": 4, "frequency": 4, "graft": ADAM}),
    "schedule 7, 3": Case({"start": 7, "frequency": 3, "graft": ADAM}),
    "schedule 7, 3, no graft": Case({"start": 7, "frequency": 3}),
    "never": Case({"start": 999, "graft": ADAM}),
    "graft adam": Case({"graft": ADAM}),
    "graft rmsprop": Case({"graft": {**ADAM, "kind": "rmsprop"}}),
    "graft rmsprop, dropped weight": Case({"graft": {**ADAM, "kind": "rmsprop", "drop": True}}),
    "graft adagrad": Case({"graft": {"kind": "adagrad", "eps": 1e-8}}),
    "graft sgd": Case({"graft": {"kind": "sgd"}}),
    "l2": Case({"weight_decay": ("l2", 0.1)}),
    "decoupled, momentum": Case({"weight_decay": ("decoupled", 0.1), "momentum": {"mu": 0.8}}),
    "corrected": Case({"weight_decay": ("corrected", 0.1)}),
    "independent": Case({"weight_decay": ("independent", 0.01)}),
    "nesterov, dampening": Case({"momentum": {"mu": 0.8, "dampening": 0.3, "nesterov": True}, "graft": ADAM}),
    "kl": Case({"kl": True, "exponents": [0.5, 0.5], "eps": 1e-2}, shampoo={"exponent": "1/2"}),
    # the stored root is what the other axes are whitened by on both sides: q - 1 is minus twice the exponent
    "kl of power 1/4": Case({"kl": True, "eps": 1e-2}, {"q": "1/2"}),
    "kl, three axes": Case({"kl": True, "eps": 1e-2}, {"q": "2/3"}, shape=(3, 2, 4)),
    "soap": Case({"soap": "eigh", "start": 6, "frequency": 3, "eps": 1e-8}),
    "soap, another exponent": Case({"soap": "eigh", "start": 6, "frequency": 3, "eps": 1e-6, "soap_exponent": 0.25}),
    "soap, ignored axes": Case(
        {"soap": "eigh", "start": 6, "eps": 1e-8, "soap_ignored": [0]}, {"axes": {"side": {2: [1]}}}
    ),
    "soap, qr": Case({"soap": "qr", "start": 6, "frequency": 3, "eps": 1e-8}),
    "soap, qr, every step": Case({"soap": "qr", "start": 6, "frequency": 1, "eps": 1e-6, "graft": ADAM}),
}


def magnitude(graft: dict[str, Any]) -> dict[str, Any]:
    kind = graft["kind"]
    if kind == "sgd":
        return {"kind": "identity"}
    beta = 1.0 if kind == "adagrad" else graft["beta2"]
    more = {"bias_correction": False} if kind == "rmsprop" and not graft.get("drop") else {}
    return {"kind": "rms", "beta": beta, "eps": graft["eps"], "damped": not graft.get("drop"), **more}


def declared(case: Case, o: Options) -> dict[str, Any]:
    """The recipe that says what the options say."""
    kind = {"kind": "bregman", "q": 0, "normalize": "none", "first": "identity"} if o.kl else {"kind": "gram"}
    statistic = {**kind, "beta": o.beta2, **case.statistic}
    refresh = {"kind": "every", "steps": o.frequency, "start": o.start, "stagger": "none"}
    if o.soap:
        solver = {"kind": "qr_iteration", "eps": o.eps} if o.soap == "qr" else {"kind": "eigh", "order": "ascending"}
        inner = {"kind": "rms", "beta": o.beta2, "eps": o.eps, "exponent": o.soap_exponent}
        stage: dict[str, Any] = {"kind": "eigenbasis", "inner": inner, "solver": solver, "transport": "none"}
    else:
        stage = {"kind": "shampoo", "solver": case.solver or {"kind": "eigh", "eps": o.eps}, **case.shampoo}
    stage = {**stage, "statistic": statistic, "refresh": refresh}
    chain: list[Any] = [{"kind": "momentum", "beta": o.beta1, **case.momentum}] if o.beta1 or case.momentum else []
    if o.graft:
        stage = {"kind": "graft", "direction": stage, "magnitude": magnitude(o.graft), "start": min(o.start, 10**6)}
    decay, rate = o.weight_decay
    last = []
    if o.momentum:
        last = [{"kind": "heavy_ball", "beta": o.momentum["mu"]}]
        last[0] |= {key: value for key, value in o.momentum.items() if key != "mu"}
    return {
        "update": [*chain, stage],
        "after_decay": last,
        "weight_decay": {"kind": decay, "rate": rate},
        "routes": [],
    }


def ours(case: Case, o: Options, init: Tensor, given: Sequence[Tensor], lrs: Sequence[float]) -> Tensor:
    parameter = torch.nn.Parameter(init.clone())
    optimizer: Optimizer = recipe(declared(case, o), lr=lrs[0])([parameter])  # type: ignore[assignment]
    points = []
    for g, lr in zip(given, lrs, strict=True):
        optimizer.param_groups[0]["lr"] = lr
        parameter.grad = g.clone()
        optimizer.step()
        points.append(parameter.detach().clone())
    return torch.stack(points)


@pytest.mark.parametrize("name", CASES)
def test_an_option_of_distributed_shampoo_is_a_recipe(name: str) -> None:
    """To 1e-9 of the distance moved: 25 steps of roots of conditions up to 1e5 in float64. lr falls, as decays read it.

    A basis or root that is first taken of a full-rank factor is not sensitive to its null space; `start` sees to it.
    """
    case = CASES[name]
    o = Options(**case.options)
    init, given = normal(*case.shape, seed=1), [normal(*case.shape, seed=10 + t) for t in range(STEPS)]
    lrs = [o.lr * (1 - t / (2 * STEPS)) for t in range(STEPS)]
    theirs = trajectory(init, given, o, lrs)
    apart = (ours(case, o, init, given, lrs) - theirs).abs().max() / (theirs - init).abs().max()
    assert float(apart) <= 1e-9


def test_the_options_of_the_reference_make_a_difference() -> None:
    """Each option moves the reference itself elsewhere than the defaults do, so that agreement says something."""
    plain: dict[tuple[int, ...], Tensor] = {}
    same = {"defaults", "one axis", "three axes", "ridge before", "coupled newton", "higher order"}
    for name, case in CASES.items():
        init, given = normal(*case.shape, seed=1), [normal(*case.shape, seed=10 + t) for t in range(STEPS)]
        lrs = [0.05 * (1 - t / (2 * STEPS)) for t in range(STEPS)]
        base = plain.setdefault(case.shape, trajectory(init, given, Options(), lrs))
        moved = trajectory(init, given, Options(**case.options), lrs)
        apart = float((moved - base).abs().max() / (base - init).abs().max())
        assert (apart == 0) if name in same else apart > 1e-6, name
