"""When numbers go wrong: one policy everywhere, counted, and named."""

import copy
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from eigengraft import Optimizer, load_recipe
from eigengraft.optimizers.step.gradients import STALLED

from ..recipes import COVER, with_options
from ..refusals import refused, warned

SHAPES = ((4, 3), (4, 3), (5,), ())
BAD = (float("nan"), float("inf"), float("-inf"))


def named(dtype: torch.dtype = torch.float64, shapes: Any = SHAPES) -> list[tuple[str, nn.Parameter]]:
    generator = torch.Generator().manual_seed(0)
    return [(f"p{i}", nn.Parameter(torch.randn(s, generator=generator).to(dtype))) for i, s in enumerate(shapes)]


def gradients(step: int, like: list[tuple[str, nn.Parameter]]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(p.shape, generator=generator).to(p.dtype) for _, p in like]


def assign(params: list[tuple[str, nn.Parameter]], grads: list[Tensor | None]) -> None:
    for (_, p), g in zip(params, grads, strict=True):
        p.grad = g


def everything(optimizer: Optimizer) -> list[Tensor]:
    optimizer.state_dict()  # settles what a device still has to say
    params = [p for group in optimizer.param_groups for p in group["params"]]
    return [t.detach().clone() for p in params for t in (p, *optimizer.state[p].values())]


def equal(one: list[Tensor], two: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def spoil(g: Tensor, bad: float) -> Tensor:
    g = g.clone()
    g.view(-1)[-1:] = bad
    return g


class Ended(NamedTuple):
    """A run after its last step: skipped updates by name, steps of each parameter, parameters and state."""

    skipped: dict[str, int]
    steps: list[int]
    tensors: list[Tensor]


@cache
def run(recipe: str, detect: str, missing: bool) -> Ended:
    """Eight steps in which p0 gets bad gradients at 0 and 3 and p2 at 4; or, `missing`, none there."""
    params = named()
    optimizer = Optimizer(params, load_recipe(recipe, [f"failure.detect={detect}", "weight_decay.rate=0.1"]))
    for step in range(8):
        grads: list[Tensor | None] = list(gradients(step, params))
        for index, when in ((0, (0, 3)), (2, (4,))):
            g = grads[index]
            assert g is not None
            if step in when:
                grads[index] = None if missing else spoil(g, BAD[step % 3])
        assign(params, grads)
        optimizer.step()
    tensors = everything(optimizer)
    return Ended(dict(optimizer.skipped), [int(optimizer.state[p]["step"]) for _, p in params], tensors)


@pytest.mark.parametrize(("recipe", "detect"), with_options("host", "device"))
def test_a_bad_gradient_is_as_if_there_were_none(recipe: str, detect: str) -> None:
    got, want = run(recipe, detect, missing=False), run(recipe, detect, missing=True)
    for a, b in zip(got.tensors, want.tensors, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
    assert got.skipped == {"p0": 2, "p2": 1}


def test_other_parameters_may_be_without_a_gradient_in_each_step() -> None:
    """The mask on the device is of all parameters, those with a gradient are found in it anew in each step."""
    held = [torch.nn.Parameter(torch.zeros(3, dtype=torch.float64)) for _ in range(3)]
    named = [(f"p{i}", parameter) for i, parameter in enumerate(held)]
    plain = {"kind": "clip_norm", "max_norm": 1e9}  # the gradient, which is no longer than that
    optimizer = Optimizer(named, {"update": [plain], "failure": {"detect": "device"}}, lr=1.0)
    for absent, bad in ((0, 1), (1, 0), (2, 1)):
        for i, parameter in enumerate(held):
            parameter.grad = None if i == absent else torch.full((3,), torch.nan if i == bad else 1.0).double()
        optimizer.step()
    optimizer.state_dict()  # settles what a device still has to say
    assert [parameter.tolist() for parameter in held] == [[-1.0] * 3, [0.0] * 3, [-2.0] * 3]
    assert "skipped: 3 updates of 2 parameters" in repr(optimizer)
    assert optimizer.skipped == {"p0": 1, "p1": 2}


@pytest.mark.parametrize("recipe", COVER)
def test_host_and_device_detection_agree(recipe: str) -> None:
    host, device = run(recipe, "host", missing=False), run(recipe, "device", missing=False)
    for a, b in zip(host.tensors, device.tensors, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
    assert host.skipped == device.skipped
    assert host.steps == [6, 8, 7, 8]


def test_every_solver_survives_a_bad_gradient_on_a_device() -> None:
    for update in ("svd", "newton_schulz"):
        params = named(shapes=[(4, 3), (4, 3)])
        recipe = {"update": {"kind": "spectral", "solver": update}, "failure": {"detect": "device"}}
        optimizer = Optimizer(params, recipe, lr=1.0)
        before = params[0][1].detach().clone()
        assign(params, [spoil(g, BAD[0]) if i == 0 else g for i, g in enumerate(gradients(0, params))])
        optimizer.step()
        assert torch.equal(params[0][1], before) and optimizer.skipped == {"p0": 1}
        assert bool(params[1][1].isfinite().all())


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("split", [False, True], ids=["one group", "two groups"])
def test_raise_names_the_parameter_and_changes_nothing(split: bool, bad: float) -> None:
    params = named()
    recipe = load_recipe("soap_fitted", ["failure.nonfinite=raise"])
    optimizer = Optimizer([{"params": params[:1]}, {"params": params[1:]}] if split else params, recipe)
    for step in range(3):
        assign(params, list(gradients(step, params)))
        optimizer.step()
    before = everything(optimizer)
    assign(params, [spoil(g, bad) if i in (1, 3) else g for i, g in enumerate(gradients(3, params))])
    with refused(FloatingPointError, "p1", "p3"):
        optimizer.step()
    assert equal(everything(optimizer), before)
    assign(params, list(gradients(4, params)))
    optimizer.step()


def test_raise_on_a_device_comes_a_step_later_and_leaves_the_state_right() -> None:
    params, twins = named(), named()
    late = Optimizer(params, load_recipe("soap_fitted", ["failure.nonfinite=raise", "failure.detect=device"]))
    skip = Optimizer(twins, load_recipe("soap_fitted", ["failure.detect=device"]))
    for pairs, optimizer in ((params, late), (twins, skip)):
        assign(pairs, [spoil(g, BAD[0]) if i == 1 else g for i, g in enumerate(gradients(0, pairs))])
        optimizer.step()
    assign(params, list(gradients(1, params)))
    with refused(FloatingPointError, "p1"):
        late.step()
    assert [int(late.state[p]["step"]) for _, p in params] == [1, 0, 1, 1]
    assert equal(everything(late), everything(skip))
    assert late.skipped == {"p1": 1}


def test_ignore_looks_at_nothing() -> None:
    params = named()
    optimizer = Optimizer(params, load_recipe("sgd", ["failure.nonfinite=ignore"]))
    assign(params, [spoil(g, BAD[1]) for g in gradients(0, params)])
    optimizer.step()
    assert not optimizer.skipped and not params[0][1].isfinite().all()


@pytest.mark.parametrize(
    ("recipe", "case"), with_options((torch.float32, 1e30), (torch.float64, 1e200), (torch.bfloat16, 1e30)), ids=str
)
def test_a_gradient_too_large_to_be_squared_is_skipped(recipe: str, case: tuple[torch.dtype, float]) -> None:
    dtype, size = case
    # its square would be inf in every second moment and Gram matrix, for ever
    params, apart = named(dtype), named(dtype)
    optimizer, other = Optimizer(params, recipe), Optimizer(apart, recipe)
    for step, scale in enumerate((1.0, 1.0, size, 1.0, 1.0)):
        assign(params, [(g * scale).to(dtype) for g in gradients(step, params)])
        optimizer.step()
        if scale == 1.0:
            assign(apart, [g.to(dtype) for g in gradients(step, apart)])
            other.step()
    assert sorted(optimizer.skipped) == ["p0", "p1", "p2", "p3"]
    assert all(torch.equal(p, q) for (_, p), (_, q) in zip(params, apart, strict=True))


@pytest.mark.parametrize(("recipe", "size"), with_options(1e18, 1e15))
def test_a_huge_gradient_that_can_be_squared_is_finite(recipe: str, size: float) -> None:
    params = named(torch.float32)
    optimizer = Optimizer(params, recipe)
    for step, scale in enumerate((1.0, 1.0, size, 1.0, 1.0)):
        assign(params, [g * scale for g in gradients(step, params)])
        optimizer.step()
    assert not optimizer.skipped
    assert all(bool(p.isfinite().all()) for _, p in params)


@pytest.mark.parametrize(("recipe", "size"), with_options(1e-44, 1e-30))
def test_tiny_gradients_are_finite(recipe: str, size: float) -> None:
    params = named(torch.float32)
    optimizer = Optimizer(params, recipe)
    for step in range(5):
        assign(params, [g * size for g in gradients(step, params)])
        optimizer.step()
    assert all(bool(t.isfinite().all()) for t in everything(optimizer))


@pytest.mark.parametrize(
    ("recipe", "detect"),
    [own for own in with_options("host", "device") if own.values[0] != "spel"],  # whose constraint iterates anew
)
def test_zero_gradients_from_the_start_move_nothing(recipe: str, detect: str) -> None:
    params = named(torch.float32)
    optimizer = Optimizer(params, load_recipe(recipe, [f"failure.detect={detect}", "weight_decay.rate=0"]))
    before = [p.detach().clone() for _, p in params]
    for _ in range(4):
        assign(params, [torch.zeros_like(p) for _, p in params])
        optimizer.step()
    assert equal([p.detach() for _, p in params], before)
    assert all(bool(t.isfinite().all()) for t in everything(optimizer)) and not optimizer.skipped


@pytest.mark.parametrize(
    "update",
    [
        "identity",
        "sign",
        "rms",
        ["adafactor", "clip_rms", "relative_step"],
        "shampoo",
        "spectral",
        {"kind": "eigenbasis", "inner": "rms"},
        {"kind": "eigenbasis", "inner": "adafactor", "timing": "lagged"},
        {"kind": "graft", "direction": "shampoo", "magnitude": "rms"},
        [{"kind": "normalize", "rule": "unit_rms"}],
    ],
    ids=str,
)
def test_without_momentum_a_zero_gradient_moves_nothing(update: Any) -> None:
    params = named(torch.float32)
    optimizer = Optimizer(params, {"update": update, "routes": []}, lr=0.1)
    for step in range(3):
        assign(params, list(gradients(step, params)))
        optimizer.step()
    before = [p.detach().clone() for _, p in params]
    for _ in range(12):
        assign(params, [torch.zeros_like(p) for _, p in params])
        optimizer.step()
    assert equal([p.detach() for _, p in params], before)


# roots

ROOTED: dict[str, tuple[dict[str, Any], str]] = {
    # a ridge far above rounding: the first factor of a 4 x 3 gradient has rank 3
    "shampoo": ({"kind": "shampoo", "solver": {"kind": "eigh", "eps": 0.001}}, "update.shampoo/root"),
    "eigenbasis": ({"kind": "eigenbasis", "inner": "rms", "solver": "eigh"}, "update.eigenbasis/basis"),
}


def rooted(kind: str, tolerated: int = 2) -> tuple[list[tuple[str, nn.Parameter]], Optimizer, str]:
    stage, slot = copy.deepcopy(ROOTED[kind])
    stage["refresh"] = {"kind": "every", "steps": 1, "stagger": "none"}
    params = named(shapes=[(4, 3), (3, 2)])
    recipe = {"update": stage, "failure": {"roots": tolerated}, "routes": []}
    return params, Optimizer(params, recipe, lr=0.01), slot


def broken(*_: Any, **__: Any) -> Any:
    raise torch.linalg.LinAlgError("did not converge")


@pytest.mark.parametrize("kind", ROOTED)
def test_a_failed_root_keeps_the_previous_one_counts_and_finally_raises(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    params, optimizer, slot = rooted(kind)

    def step(number: int) -> None:
        assign(params, list(gradients(number, params)))
        optimizer.step()

    def slots(part: str) -> list[Tensor]:
        return [t.clone() for _, p in params for key, t in optimizer.state[p].items() if part in key]

    step(0)
    kept = slots(slot)
    with monkeypatch.context() as patch:
        patch.setattr(torch.linalg, "eigh", broken)
        for count in (1, 2):
            step(count)
            assert equal(slots(slot), kept) and {int(t) for t in slots("/failures.")} == {count}
    step(3)
    assert {int(t) for t in slots("/failures.")} == {0} and not equal(slots(slot), kept)
    monkeypatch.setattr(torch.linalg, "eigh", broken)
    step(4)
    step(5)
    with refused(ArithmeticError, 2, "p0"):
        step(6)


@pytest.mark.parametrize("kind", ROOTED)
def test_a_float32_failure_is_tried_again_in_float64(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = torch.linalg.eigh

    def only_double(a: Tensor) -> Any:
        return real(a) if a.dtype == torch.float64 else broken()

    stage, slot = ROOTED[kind]
    results = []
    for decompose in (real, only_double):
        params = named(torch.float32, [(4, 3), (4, 3)])
        optimizer = Optimizer(params, {"update": stage, "routes": []}, lr=0.01)
        with monkeypatch.context() as patch:
            patch.setattr(torch.linalg, "eigh", decompose)
            assign(params, list(gradients(0, params)))
            optimizer.step()
        state = {f"{n} {key}": t for n, p in params for key, t in optimizer.state[p].items()}
        assert not any(bool(t.any()) for key, t in state.items() if "/failures." in key)
        results.append({key: t for key, t in state.items() if slot in key})
    for one, two in zip(results[0].values(), results[1].values(), strict=True):
        if kind == "eigenbasis":  # eigenvectors are unique up to their sign
            one, two = (one.T @ two).abs(), torch.eye(len(one))
        torch.testing.assert_close(one, two, rtol=1e-3, atol=1e-3)


def test_one_bad_matrix_spoils_no_other() -> None:
    """A gradient whose square overflows makes one factor infinite; its neighbor in the stack goes on as if alone."""
    stage = {"kind": "shampoo", "refresh": {"kind": "every", "steps": 1, "stagger": "none"}}
    both, alone = named(torch.float32, [(4, 3), (4, 3)]), named(torch.float32, [(4, 3), (4, 3)])
    recipe = {"update": stage, "routes": []}
    one, two = Optimizer(both, recipe, lr=0.01), Optimizer(alone[1:], recipe, lr=0.01)
    for step, scale in enumerate((1.0, 1e30, 1.0)):
        grads = gradients(step, both)
        assign(both, [grads[0] * scale, grads[1]])
        assign(alone[1:], [grads[1].clone()])
        one.step()
        two.step()
    torch.testing.assert_close(both[1][1], alone[1][1], rtol=1e-5, atol=1e-6)
    failures = [max(int(t) for k, t in one.state[p].items() if "/failures." in k) for _, p in both]
    assert failures[1] == 0


# gradients and parameters of the wrong kind


@pytest.mark.parametrize("split", [False, True], ids=["one group", "two groups"])
def test_a_sparse_gradient_is_refused_by_name_and_changes_nothing(split: bool) -> None:
    params = named(shapes=[(3, 2), (3, 2)])
    optimizer = Optimizer([{"params": [pair]} for pair in params] if split else params)
    before = everything(optimizer)
    dense = torch.ones(3, 2, dtype=torch.float64)
    assign(params, [dense, dense.to_sparse()])
    with refused(TypeError, "p1", "layout", "torch.sparse_coo"):
        optimizer.step()
    assert equal(everything(optimizer), before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_gradients_are_used_up_to_the_largest_number_that_has_a_square(dtype: torch.dtype) -> None:
    root = 2.0 ** (64 if dtype == torch.float32 else 512)  # the least number whose square is infinite
    sizes = (root * 0.4, root * 0.6, root * (1 - 2**-20), root)
    params = named(dtype, ((1,),) * len(sizes))
    optimizer = Optimizer(params, "adam", lr=1e-6)
    assign(params, [torch.full((1,), size, dtype=dtype) for size in sizes])
    optimizer.step()
    assert optimizer.skipped == {"p3": 1}


def test_steps_without_usable_gradients_count_in_a_row_alone() -> None:
    params = named(shapes=((3,),))
    optimizer = Optimizer(params, "sgd", lr=1e-6)
    for step in range(2 * STALLED - 1):  # one good step after nine bad ones
        assign(params, [torch.full((3,), 1.0 if step == STALLED - 1 else float("nan"), dtype=torch.float64)])
        optimizer.step()
    assert optimizer.skipped == {"p0": 2 * STALLED - 2}
    with warned(UserWarning, "none", 10):
        optimizer.step()


def test_a_step_without_gradients_is_none_without_usable_ones() -> None:
    params = named(shapes=((3,),))
    optimizer = Optimizer(params, "sgd", lr=1e-6)
    for step in range(STALLED):  # nine bad ones
        assign(params, [None if step == 4 else torch.full((3,), float("nan"), dtype=torch.float64)])
        optimizer.step()
    with warned(UserWarning, "none", STALLED):
        optimizer.step()


LINEAR: dict[str, Any] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9),
    "sgd, nesterov": lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9, nesterov=True),
    "signum": None,
    "lion": None,
}
"""Recipes that square nothing, and the same of torch; None: the first step is the sign of the gradient."""


@pytest.mark.parametrize("detect", ["host", "device"])
@pytest.mark.parametrize("case", [(torch.float32, 1e30), (torch.float64, 1e200), (torch.bfloat16, 1e30)], ids=str)
@pytest.mark.parametrize("recipe", LINEAR)
def test_updates_that_square_nothing_take_every_finite_gradient(
    recipe: str, case: tuple[torch.dtype, float], detect: str
) -> None:
    """As torch's SGD takes them. Gradients with inf or nan leave their parameter as it is."""
    (dtype, size), (name, _, more) = case, recipe.partition(", ")
    params, twins = named(dtype), named(dtype)
    changes = [f"failure.detect={detect}", *["update.heavy_ball.nesterov=true"] * bool(more)]
    optimizer = Optimizer(params, load_recipe(name, changes), lr=1e-3, weight_decay=0.0)
    theirs = LINEAR[recipe] and LINEAR[recipe]([p for _, p in twins])
    for step in range(3 if theirs else 1):
        grads = [(g * size).to(dtype) for g in gradients(step, params)]
        assign(params, [*grads[:3], spoil(grads[3], BAD[step])])
        optimizer.step()
        if theirs:
            assign(twins, [*grads[:3], None])
            theirs.step()
        else:
            for (_, p), g in zip(twins[:3], grads, strict=False):
                p.data.sub_((1e-3 * g.sign()).to(dtype))
    everything(optimizer)
    rounding = 0.05 if dtype == torch.bfloat16 else 1e-6
    for (_, p), (_, q) in zip(params, twins, strict=True):
        torch.testing.assert_close(p, q, rtol=rounding, atol=rounding)
    assert optimizer.skipped == {"p3": 3 if theirs else 1}


@pytest.mark.parametrize("update", [["momentum", "sign"], ["heavy_ball"], ["identity", "gradient_sign"]], ids=str)
def test_chains_that_square_nothing_are_known_by_their_state(update: Any) -> None:
    assert not load_recipe(update).squares()


@pytest.mark.parametrize(
    "recipe",
    [
        ["momentum", "rms"],
        ["lagged_rms", "momentum"],
        ["momentum", {"kind": "spectral"}],
        [{"kind": "clip_norm"}, "sign"],
        {"update": ["sign"], "constraints": ["hyperball"]},
        {"update": ["identity"], "after_decay": ["rms"]},
    ],
    ids=str,
)
def test_other_chains_may_square(recipe: Any) -> None:
    assert load_recipe(recipe).squares()


@pytest.mark.parametrize(("value", "says"), [(1e20, (20, "float32")), (float("nan"), ("inf", "nan"))])
@pytest.mark.parametrize("raises", [False, True])
def test_the_reason_why_a_gradient_is_not_used_is_said(value: float, says: tuple[object, ...], raises: bool) -> None:
    params = named(torch.float32)
    changes = ["failure.nonfinite=raise"] if raises else []
    optimizer = Optimizer(params, load_recipe("adam", changes))
    grads = [torch.full_like(p, value) for _, p in params]
    if raises:
        assign(params, list(grads))
        with refused(FloatingPointError, *says):
            optimizer.step()
        return
    for step in range(STALLED):
        assign(params, list(grads))
        if step < STALLED - 1:
            optimizer.step()
    with warned(UserWarning, *says):
        optimizer.step()
    assert optimizer.skipped["p0"] == STALLED


def test_one_update_squares_and_another_does_not() -> None:
    """Routes are told apart, with the mask of a device too."""
    route = {"name": "signs", "match": {"name": "p1"}, "update": "sign"}
    for detect in ("host", "device"):
        params = named(torch.float32)
        before = [p.detach().clone() for _, p in params]
        recipe = {"update": ["momentum", "rms"], "routes": [route], "failure": {"detect": detect}}
        optimizer = Optimizer(params, recipe, lr=0.1)
        assign(params, [torch.full_like(p, 1e20) for _, p in params])
        optimizer.step()
        moved = [not torch.equal(p, old) for (_, p), old in zip(params, before, strict=True)]
        everything(optimizer)
        assert moved == [False, True, False, False] and sorted(optimizer.skipped) == ["p0", "p2", "p3"]
