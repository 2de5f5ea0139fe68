"""Constraints after a step, and cautious updates, against their formulas.

Tolerances, unless a test says otherwise: 1e-13 in float64, a hundred roundings.
"""

import copy
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard

from eigengraft import Optimizer, RecipeError, load_recipe
from eigengraft.optimizers.plan.plan import plan
from eigengraft.optimizers.write import Constraint

from ...laws.table import TABLE
from ...recipes import BROAD, few_quick, without_routes
from ...refusals import refused
from ...trajectories import normal

LR = 0.1


def recipe(constraints: Any = "hyperball", update: Any = "identity", **more: Any) -> dict[str, Any]:
    return {"update": update, "routes": [], "constraints": constraints, **more}


def run(declared: Any, init: Tensor, steps: int = 6, decay: float = 0.0, lr: float = LR) -> Tensor:
    """The path of one parameter under given gradients, `[steps, *shape]`."""
    weight = nn.Parameter(init.clone())
    optimizer = Optimizer([weight], declared, lr=lr, weight_decay=decay)
    path = []
    for t in range(steps):
        weight.grad = normal(*init.shape, seed=10 + t, dtype=init.dtype)
        optimizer.step()
        path.append(weight.detach().clone())
    return torch.stack(path)


def close(ours: Tensor, theirs: Tensor, tolerance: float = 1e-13) -> None:
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("relative", [True, False])
@pytest.mark.parametrize("shape", [(4, 3), (5,), (), (2, 3, 2)], ids=str)
@pytest.mark.parametrize("stage", ["identity", "sign"])
def test_hyperball_is_its_formula(stage: str, shape: tuple[int, ...], relative: bool) -> None:
    init = normal(*shape, seed=1)
    w, expected = init, []
    for t in range(6):
        u = normal(*shape, seed=10 + t)
        u = u.sign() if stage == "sign" else u
        if relative:
            u = u * w.norm() / u.norm()
        moved = w - LR * u
        w = moved * init.norm() / moved.norm()
        expected.append(w)
    close(run(recipe({"kind": "hyperball", "relative": relative}, stage), init), torch.stack(expected))


def test_weight_decay_only_lengthens_the_step() -> None:
    """The retraction undoes the shrinking: (1 - lr a) W - lr U is on the ray of W - lr / (1 - lr a) U."""
    init = normal(4, 3, seed=1)
    close(run(recipe(), init, decay=2.0), run(recipe(), init, lr=LR / (1 - LR * 2.0)))


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *(pytest.param(*each.values, torch.float32, marks=each.marks) for each in few_quick(BROAD)),
        *((name, dtype) for name in ("adamw", "soap_fitted", "muon") for dtype in (torch.float64, torch.bfloat16)),
    ],
    ids=str,
)
def test_every_recipe_keeps_the_norm(name: str, dtype: torch.dtype) -> None:
    """Of whole parameters, however they are cut into blocks: to a rounding of each entry, once a step."""
    raw = load_recipe(name).model_dump(mode="json")
    alike = {"blocking": {"size": 2}, "averaging": None}
    declared = {**without_routes(raw), "constraints": [{"kind": "hyperball"}], **alike}
    params = [nn.Parameter(normal(*shape, seed=1, dtype=dtype)) for shape in ((6, 4), (4, 4), (8,), ())]
    before = [p.detach().clone() for p in params]
    optimizer = Optimizer(params, declared, lr=LR, weight_decay=0.1)
    for t in range(5):
        for i, p in enumerate(params):
            p.grad = normal(*p.shape, seed=100 * t + i, dtype=dtype)
        optimizer.step()
    for p, start in zip(params, before, strict=True):
        assert abs(float(p.detach().double().norm() / start.double().norm()) - 1) <= 4 * torch.finfo(dtype).eps
        assert p.ndim == 0 or not torch.equal(p, start)


def test_parameters_of_zero_are_left_alone_and_zero_updates_move_nothing() -> None:
    init = torch.zeros(4, 3, dtype=torch.float64)
    close(run(recipe(), init), run(recipe(()), init), 0.0)
    weight = nn.Parameter(normal(4, 3, seed=1))
    optimizer = Optimizer([weight], recipe(), lr=LR, weight_decay=0.5)
    for _ in range(3):
        weight.grad = torch.zeros(4, 3, dtype=torch.float64)
        optimizer.step()
    assert torch.equal(weight, normal(4, 3, seed=1))


@pytest.mark.parametrize("size", [1e-30, 1e30])
def test_tiny_and_huge_updates_are_normalized_too(size: float) -> None:
    """In float32, where their squares are not numbers."""
    weight, gradient = normal(4, 3, seed=1, dtype=torch.float32), normal(4, 3, seed=2, dtype=torch.float32)
    moved = []
    for scale in (1.0, size):
        parameter = nn.Parameter(weight.clone())
        parameter.grad = gradient * scale
        Optimizer([parameter], recipe(failure={"nonfinite": "ignore"}), lr=LR).step()
        moved.append(parameter.detach())
    torch.testing.assert_close(*moved, rtol=1e-5, atol=1e-6)


def test_the_radius_is_that_of_the_parameter_at_its_first_update() -> None:
    weight = nn.Parameter(normal(4, 3, seed=1))
    optimizer = Optimizer([weight], recipe(), lr=LR)
    weight.data.copy_(normal(4, 3, seed=5) * 3)  # weights loaded after construction
    norm = float(weight.detach().norm())
    for t in range(3):
        weight.grad = normal(4, 3, seed=t)
        optimizer.step()
    assert float(weight.detach().norm()) == pytest.approx(norm, rel=1e-14)
    assert float(optimizer.state[weight]["constraints.hyperball/radius"]) == pytest.approx(norm, rel=1e-14)


def test_resume_is_exact_and_the_state_is_one_number() -> None:
    params = [nn.Parameter(normal(4, 3, seed=1).float()), nn.Parameter(normal(3, seed=2).float())]
    optimizer = Optimizer(params, recipe(update="momentum"), lr=LR)
    plain = Optimizer([nn.Parameter(p.detach().clone()) for p in params], recipe((), "momentum"), lr=LR)
    assert optimizer.state_bytes() == plain.state_bytes() + 2 * 4

    def drive(optimizer: Optimizer, steps: range) -> list[Tensor]:
        held = optimizer.param_groups[0]["params"]
        for t in steps:
            for p in held:
                p.grad = normal(*p.shape, seed=t).float()
            optimizer.step()
        return [p.detach().clone() for p in held]

    drive(optimizer, range(4))
    resumed = Optimizer([nn.Parameter(p.detach() * 1.0) for p in params], recipe(update="momentum"), lr=LR)
    resumed.load_state_dict(optimizer.state_dict())
    copied = copy.deepcopy(optimizer)
    ends = [drive(one, range(4, 9)) for one in (optimizer, resumed, copied)]
    assert all(torch.equal(a, b) for other in ends[1:] for a, b in zip(ends[0], other, strict=True))


def test_routes_have_their_own_constraints() -> None:
    route = {"name": "free", "match": {"name": "free"}, "update": "identity"}
    held, free = nn.Parameter(normal(4, 3, seed=1)), nn.Parameter(normal(4, 3, seed=1))
    optimizer = Optimizer([("held", held), ("free", free)], {**recipe(), "routes": [route]}, lr=LR)
    for p in (held, free):
        p.grad = normal(4, 3, seed=2)
    optimizer.step()
    close(free.detach(), normal(4, 3, seed=1) - LR * normal(4, 3, seed=2))
    close(held.detach().norm(), normal(4, 3, seed=1).norm())
    assert not any("constraints" in key for key in optimizer.state[free])
    turned = {**recipe(()), "routes": [{**route, "constraints": "hyperball"}]}
    state = Optimizer([("held", held), ("free", free)], turned).state
    assert "routes.free.constraints.hyperball/radius" in state[free] and len(state[held]) == 1


@pytest.mark.parametrize("row", TABLE["constraint"], ids=str)
def test_a_bad_gradient_leaves_a_constrained_parameter_where_it_is(row: Any) -> None:
    for detect in ("host", "device"):
        params = [nn.Parameter(normal(4, 3, seed=i)) for i in range(2)]
        optimizer = Optimizer(params, recipe(row.make, failure={"detect": detect}), lr=LR)
        for t in range(3):
            params[0].grad = torch.full((4, 3), torch.nan, dtype=torch.float64)
            params[1].grad = normal(4, 3, seed=t)
            optimizer.provide("max_logit", {p: torch.full((2,), 1e3) for p in params})
            optimizer.step()
        assert torch.equal(params[0], normal(4, 3, seed=0)) and not torch.equal(params[1], normal(4, 3, seed=1))


def test_the_base_iterate_of_an_averaging_is_what_is_constrained() -> None:
    weight = nn.Parameter(normal(4, 3, seed=1))
    optimizer = Optimizer([weight], recipe(averaging={"kind": "primal_averaging", "mu_x": 0.9}), lr=LR)
    for t in range(5):
        weight.grad = normal(4, 3, seed=10 + t)
        optimizer.step()
    state = optimizer.state[weight]
    close(state["averaging/z"].norm(), normal(4, 3, seed=1).norm())
    close(state["averaging/z"], run(recipe(), normal(4, 3, seed=1), 5)[-1])  # gradients are given: z is the base method
    assert float(weight.detach().norm()) < 0.999 * float(state["averaging/z"].norm())  # a mean of points on a sphere


def test_constraints_are_declared_in_a_list_or_alone_and_have_names() -> None:
    assert load_recipe(recipe("hyperball")) == load_recipe(recipe([{"kind": "hyperball"}]))
    assert load_recipe(recipe()).constraints[0].label == "hyperball"
    changed = load_recipe(recipe(), ["constraints.hyperball.relative=false"])
    assert changed.constraints[0].model_dump()["relative"] is False
    for wrong, says in (
        ("sphere", ("constraints.sphere",)),
        (["hyperball", "hyperball"], ("constraints", "hyperball", "name")),
        ({"kind": "hyperball", "radius": 1.0}, ("radius",)),
    ):
        with refused(RecipeError, *says):
            load_recipe(recipe(wrong))
    load_recipe(recipe(["hyperball", {"kind": "hyperball", "name": "again"}]))


def test_a_constraint_may_come_from_outside() -> None:
    class Box(Constraint):
        """W <- clip(W, -1, 1)."""

        kind: Literal["box_for_test"] = "box_for_test"

        def retract(self, slots: Any, parameters: Any, updates: Any, moved: Any, norms: Any) -> Any:
            return [new.clamp(-1, 1) for new in moved]

    declared = recipe(["hyperball", {"kind": "box_for_test"}])
    try:
        path = run(declared, normal(4, 3, seed=1))
        assert float(path.abs().max()) == 1.0
        plan(declared, [("a", (4, 3))], (2,), "ddp")
        plan(recipe("hyperball"), [("a", (4, 3))], (2,), "fsdp2")
        with refused(ValueError, "a", "recipe.constraints.box_for_test"):
            plan(declared, [("a", (4, 3))], (2,), "fsdp2")  # it does not say that shards are enough
    finally:
        del Constraint.members["box_for_test"]


# cautious updates


def masked(d: Tensor, g: Tensor, floor: float = 1e-3) -> Tensor:
    agrees = (d * g > 0).double()
    return d * agrees / max(float(agrees.mean()), floor)


@pytest.mark.parametrize("blocks", [None, 2])
@pytest.mark.parametrize("per", ["block", "parameter"])
def test_cautious_updates_are_their_formula(per: str, blocks: int | None) -> None:
    """After momentum, on whole parameters and on blocks of them."""
    stages = [{"kind": "momentum", "beta": 0.9, "bias_correction": False}, {"kind": "cautious", "per": per}]
    init = normal(4, 6, seed=1)
    w, m, expected = init, torch.zeros_like(init), []
    for t in range(6):
        g = normal(4, 6, seed=10 + t)
        m = 0.9 * m + 0.1 * g
        if per == "parameter" or blocks is None:
            u = masked(m, g)
        else:
            u = torch.cat([torch.cat([masked(a, b) for a, b in zip(x.split(2, 1), y.split(2, 1), strict=True)], 1)
                           for x, y in zip(m.split(2), g.split(2), strict=True)])  # fmt: skip
        w = w - LR * u
        expected.append(w)
    close(run(recipe((), stages, blocking={"size": blocks}), init), torch.stack(expected))


def test_cautious_updates_count_signs_not_products() -> None:
    """Where d g underflows in float32 the signs still agree; an entry of 0 agrees with nothing; nothing kept is 0."""
    for g, expected in (
        ([1e-30, -1e-30, 0.0, 1e-30], [4 / 3e30, -4 / 3e30, 0.0, 4 / 3e30]),
        ([0.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]),
    ):
        weight = nn.Parameter(torch.zeros(4))
        weight.grad = torch.tensor(g)
        Optimizer([weight], recipe((), "cautious"), lr=1.0).step()
        torch.testing.assert_close(weight.detach(), -torch.tensor(expected), rtol=1e-6, atol=0)


def test_the_kept_fraction_has_a_floor() -> None:
    """Momentum against the gradient but for one entry of a hundred."""
    weight, first = nn.Parameter(torch.zeros(100, dtype=torch.float64)), torch.ones(100, dtype=torch.float64)
    stages = [{"kind": "momentum", "beta": 0.9, "bias_correction": False}, {"kind": "cautious", "floor": 0.1}]
    optimizer = Optimizer([weight], recipe((), stages), lr=1.0)
    weight.grad = first
    optimizer.step()
    before = weight.detach().clone()
    weight.grad = -0.1 * first
    weight.grad[0] = 1.0
    optimizer.step()
    moved = before - weight.detach()
    expected = torch.zeros(100, dtype=torch.float64)
    expected[0] = (0.9 * 0.1 + 0.1) / 0.1
    close(moved, expected)


BRAKE, FLOOR = {"kind": "radial_brake", "strength": 0.5}, {"kind": "row_floor", "ratio": 0.8}
PIN, LATE = {"kind": "radius_pin"}, {"kind": "late_decay", "rate": 0.5}


@pytest.mark.parametrize("shape", [(4, 3), (5,), (2, 3, 2)], ids=str)
@pytest.mark.parametrize("left_out", ["nothing", "radial_brake", "row_floor", "radius_pin", "late_decay"])
def test_the_record_stack_is_its_formulas_and_each_part_can_be_taken_out(left_out: str, shape: tuple[int, ...]) -> None:
    w, expected, braked = normal(*shape, seed=1), [], set()
    for t in range(6):
        u, before = normal(*shape, seed=10 + t), w
        along = (u * w).sum() / w.norm() ** 2
        braked.add(bool(along < 0))
        if left_out != "radial_brake" and along < 0:
            u = u - 0.5 * along * w
        if left_out != "row_floor" and len(shape) > 1:
            own = [0.8 * row_w.norm() / row_u.norm() for row_w, row_u in zip(w, u, strict=True)]
            u = torch.stack([row * max(1.0, float(factor)) for row, factor in zip(u, own, strict=True)])
        radius = w.norm() - LR * (u * w).sum() / w.norm()
        w = w - LR * u
        if left_out != "radius_pin":
            w = w * radius / w.norm()
        if left_out != "late_decay":
            w = w * (1 - 0.5 * LR * (u * before > 0).double())
        expected.append(w)
    assert braked == {True, False}
    stack = [part for part in (BRAKE, FLOOR, PIN, LATE) if part["kind"] != left_out]
    close(run(recipe(stack), normal(*shape, seed=1)), torch.stack(expected))


def test_late_decay_of_all_entries_and_a_learning_rate_that_changes() -> None:
    weight = nn.Parameter(normal(4, 3, seed=1))
    optimizer = Optimizer([weight], recipe({**LATE, "cautious": False}), lr=LR)
    w = weight.detach().clone()
    for t, lr in enumerate((0.1, 0.4)):
        optimizer.param_groups[0]["lr"] = lr
        weight.grad = normal(4, 3, seed=t)
        optimizer.step()
        w = (w - lr * normal(4, 3, seed=t)) * (1 - lr * 0.5)
    close(weight.detach(), w)


def test_a_strength_may_be_scheduled() -> None:
    """A brake that is released: the second step is that of no brake."""
    release = {"kind": "radial_brake", "strength": {"from": 1.0, "to": 1e-9, "steps": 1}}
    close(run(recipe(release), normal(4, 3, seed=1)), run(recipe(()), normal(4, 3, seed=1)), 1e-8)


@pytest.mark.parametrize("constraint", [BRAKE, FLOOR, PIN, LATE], ids=lambda made: str(made["kind"]))
def test_parts_of_the_record_leave_zeros_alone(constraint: Any) -> None:
    """A parameter of zeros moves as without them; without a gradient nothing moves, bit for bit."""
    init = torch.zeros(4, 3, dtype=torch.float64)
    close(run(recipe(constraint), init)[0], run(recipe(()), init)[0], 0.0)
    weight = nn.Parameter(normal(4, 3, seed=1))
    weight.grad = torch.zeros(4, 3, dtype=torch.float64)
    Optimizer([weight], recipe(constraint), lr=LR).step()
    assert torch.equal(weight, normal(4, 3, seed=1))


def test_rows_that_are_cut_are_refused() -> None:
    columns = [("a", (8, 6))]
    with refused(ValueError, "a", "recipe.constraints.row_floor"):
        plan(recipe(FLOOR), columns, mesh=(2,), parallel=(Shard(1),))
    plan(recipe(FLOOR), columns, mesh=(2,), parallel=(Shard(0),))
    plan(recipe([BRAKE, PIN, LATE]), columns, mesh=(2,), parallel=(Shard(1),))
