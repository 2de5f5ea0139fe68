"""Storage: a recipe says how slots are kept, and no stage notices."""

from typing import Any

import pytest
import torch
from torch import Tensor

from eigengraft import Optimizer, RecipeError, State, load_recipe
from eigengraft.optimizers import convert_storage
from eigengraft.quantization import Symmetric
from eigengraft.slots import EncodedSlot, Slot, Storage

from ..refusals import refused
from ..trajectories import distance, follow, normal, random_gradients, recipe

PACKED = {"statistic": "symmetric", "root": "symmetric"}
SHAMPOO: dict[str, Any] = {
    "kind": "shampoo",
    "solver": {"kind": "eigh", "eps": 1e-3},
    "refresh": {"kind": "every", "steps": 2, "stagger": "none"},
}
SHAPES = [(8, 6), (5,), (2, 3, 4)]


def declared(storage: Any) -> dict[str, Any]:
    return {"update": ["momentum", SHAMPOO], "routes": [], "storage": storage}


@pytest.mark.parametrize("d", [1, 2, 7])
def test_a_triangle_is_the_whole_matrix(d: int) -> None:
    x = normal(3, d, d, seed=d)
    a = x + x.mT
    parts = Symmetric().encode(a)
    assert parts["upper"].shape == (3, d * (d + 1) // 2)
    assert torch.equal(Symmetric().decode(parts, Slot((d, d)), torch.float64), a)


def test_the_lower_triangle_is_the_mirror_image() -> None:
    x = normal(1, 4, 4, seed=1)
    back = Symmetric().decode(Symmetric().encode(x), Slot((4, 4)), torch.float64)
    assert torch.equal(back.triu(), x.triu()) and torch.equal(back, back.mT)


def test_packed_factors_follow_the_same_path() -> None:
    """A root is symmetric up to rounding, of which half is lost: 1e-12 in float64 for conditions up to 1e3."""
    init = [normal(*shape, seed=i) for i, shape in enumerate(SHAPES)]
    given = random_gradients(SHAPES, 12)
    plain, packed = (follow(recipe(declared(s), lr=0.1), init, given) for s in ({}, PACKED))
    assert distance(packed, plain, init) <= 1e-12


def test_half_the_bytes() -> None:
    sizes = []
    for storage in ({}, PACKED):
        parameter = torch.nn.Parameter(torch.zeros(32, 16))
        optimizer = Optimizer([parameter], declared(storage))
        sizes.append(optimizer.state_bytes())
    rest = 4 * 32 * 16 + 2 * 4 + 8  # momentum, two counts, the step
    full, triangle = 2 * 4 * (32 * 32 + 16 * 16), 2 * 4 * (32 * 33 // 2 + 16 * 17 // 2)
    formats = 4 * 8
    assert sizes == [rest + full, rest + triangle + formats]


def walk(optimizer: Optimizer, parameters: list[torch.nn.Parameter], given: list[list[Tensor]]) -> None:
    for step in given:
        for parameter, gradient in zip(parameters, step, strict=True):
            parameter.grad = gradient.clone()
        optimizer.step()


def test_another_storage_is_not_loaded() -> None:
    packed, plain = (Optimizer([torch.nn.Parameter(torch.zeros(3, 3))], declared(s)) for s in (PACKED, {}))
    with refused(ValueError, "recipe") as error:
        plain.load_state_dict(packed.state_dict())
    assert "storage" in str(error.value)


@pytest.mark.parametrize("part", [slice(1, 3), torch.tensor([2, 0])], ids=["slice", "rows"])
@pytest.mark.parametrize("masked", [False, True])
def test_selected_rows_are_written_and_no_others(part: Any, masked: bool) -> None:
    x = normal(4, 3, 3, seed=1)
    a = x + x.mT
    tensors = {f"s/a/{name}": value.clone() for name, value in Symmetric().encode(a).items()}
    coded = Storage({"s/a": EncodedSlot(Slot((3, 3)), Symmetric(), ("upper",), torch.float64)})
    mask = torch.tensor([True, False]) if masked else None
    State(tensors, (3,), "s", part, mask, coded)["a"] = torch.zeros(2, 3, 3, dtype=torch.float64)
    expected, chosen = a.clone(), torch.arange(4)[part]
    expected[chosen[:1] if masked else chosen] = 0.0
    state = State(tensors, (3,), "s", None, None, coded)
    assert torch.equal(state["a"], expected) and "a" in state and "b" not in state
    assert torch.equal(state.slice_rows(1, 3)["a"], expected[1:3])


def test_storage_by_role_leaves_alone_what_does_not_fit() -> None:
    """Diagonal factors and rectangular bases are not symmetric matrices."""
    stage = {**SHAMPOO, "statistic": {"kind": "gram", "axes": {"max_size": 4, "oversize": "diagonal"}}}
    parameter = torch.nn.Parameter(torch.zeros(8, 3))
    optimizer = Optimizer([parameter], {"update": [stage], "routes": [], "storage": PACKED})
    keys = set(optimizer.state[parameter])
    assert {"0/update.shampoo/factor.0", "0/update.shampoo/factor.1/upper"} <= keys


def test_storage_by_path_goes_before_the_role() -> None:
    parameter = torch.nn.Parameter(torch.zeros(4, 3))
    optimizer = Optimizer([parameter], declared({"update.shampoo/factor.1": "symmetric"}))
    keys = set(optimizer.state[parameter])
    assert {"0/update.shampoo/factor.0", "0/update.shampoo/factor.1/upper", "0/update.shampoo/root.1"} <= keys


CODED = {"second_moment": {"kind": "int8", "min_elements": 1}}


@pytest.mark.parametrize(
    "update",
    [
        {"kind": "rms", "name": "magnitude"},
        {"kind": "sum", "paths": [{"name": "magnitude", "stages": "rms"}]},
        {"kind": "chain", "name": "magnitude", "stages": "rms"},
        {"kind": "graft", "direction": "rms", "magnitude": "identity", "name": "magnitude"},
    ],
    ids=["stage", "path", "chain", "direction"],
)
def test_a_second_moment_is_coded_by_its_role_whatever_its_path(update: Any) -> None:
    parameter = torch.nn.Parameter(torch.zeros(8, 3))
    optimizer = Optimizer([parameter], {"update": update, "routes": [], "storage": CODED})
    assert any(key.endswith("/v/codes") for key in optimizer.state[parameter])


@pytest.mark.parametrize("name", ["graft", "size"])
@pytest.mark.parametrize("magnitude", ["rms", {"kind": "chain", "name": "first", "stages": ["momentum", "rms"]}])
def test_the_magnitude_of_a_graft_is_coded_only_by_its_path(name: str, magnitude: Any) -> None:
    """Not by the role, whatever the graft and the stages inside are called."""
    graft = {"kind": "graft", "name": name, "direction": "sign", "magnitude": magnitude}
    parameter = torch.nn.Parameter(torch.zeros(8, 3))

    def keys(storage: Any) -> set[str]:
        optimizer = Optimizer([parameter], {"update": ["rms", graft], "routes": [], "storage": storage})
        assert not storage or storage != CODED or "0/update.rms/v/codes" in optimizer.state[parameter]
        return {key for key in optimizer.state[parameter] if "/v" in key and f"update.{name}." in key}

    (plain,) = keys({})
    assert keys(CODED) == {plain}
    path = plain.removeprefix("0/").removesuffix("/v")
    assert f"{plain}/codes" in keys({path: CODED["second_moment"]})


@pytest.mark.parametrize(
    ("storage", "says"),
    [
        ({"statistics": "symmetric"}, ("statistics", "statistic")),
        ({"update.shampo": "symmetric"}, ("update.shampoo",)),
        ({"iterate": "bf16"}, ("iterate",)),
        ({"count": "bf16"}, ("count",)),
        ({"basis": "bf16"}, ("first_moment", "basis")),
        ({"statistic": "int5"}, ("storage.statistic", "quantizer", "int5")),
        ({"statistic": {"kind": "symmetric", "upper": True}}, ("upper",)),
    ],
)
def test_wrong_storage_is_refused(storage: Any, says: tuple[object, ...]) -> None:
    with refused(RecipeError, *says):
        load_recipe(declared(storage))


def test_a_slot_that_is_not_there_is_refused_by_name() -> None:
    with refused(ValueError, "update.momentum/m", "momentum/v"):
        Optimizer([torch.nn.Parameter(torch.zeros(3, 3))], declared({"update.momentum/v": "symmetric"}))


def test_a_slot_that_cannot_be_stored_so_is_refused_by_name() -> None:
    with refused(ValueError, "storage.update.momentum/m", "first_moment"):
        Optimizer([torch.nn.Parameter(torch.zeros(3, 3))], declared({"update.momentum/m": "symmetric"}))


def test_codes_of_another_format_are_not_loaded() -> None:
    """What a newer or older version of the library means by the same bytes is not guessed."""
    one, two = (Optimizer([torch.nn.Parameter(torch.zeros(3, 3))], declared(PACKED)) for _ in range(2))
    state = one.state_dict()
    state["state"][0]["0/update.shampoo/root.1/format"] += 1
    with refused(ValueError, "root.1"):
        two.load_state_dict(state)


def test_sizes_by_slot_are_the_bytes_that_are_held() -> None:
    parameters = [torch.nn.Parameter(torch.zeros(shape)) for shape in ((8, 6), (3, 6), (5,))]
    averaged = {**declared(PACKED), "averaging": "ema", "blocking": {"size": 4}}
    optimizer = Optimizer(parameters, averaged)
    rows = {row.key: row for row in optimizer.slot_sizes()}
    assert sum(row.stored for row in rows.values()) == optimizer.state_bytes()
    elements = 8 * 6 + 3 * 6 + 5
    momentum, mean = rows["update.momentum/m"], rows["averaging/mean"]
    assert momentum.declared == momentum.stored == mean.stored == 4 * elements
    left = rows["update.shampoo/factor.0"]
    # blocks: 2 of 4x4 and 2 of 4x2; 3x4 and 3x2; of the vector 4 and 1
    sides = [4, 4, 4, 4, 3, 3, 4, 1]
    assert left.storage == "symmetric" and left.declared == 4 * sum(d * d for d in sides)
    assert left.stored == sum(4 * d * (d + 1) // 2 + 8 for d in sides)


def trained(storage: Any, steps: int, **more: Any) -> tuple[Optimizer, list[torch.nn.Parameter]]:
    parameters = [torch.nn.Parameter(normal(*shape, seed=i)) for i, shape in enumerate(SHAPES)]
    groups = [{"params": parameters[:2]}, {"params": parameters[2:], "lr": 0.05}]
    optimizer = Optimizer(groups, {**declared(storage), **more})
    walk(optimizer, parameters, random_gradients(SHAPES, steps))
    return optimizer, parameters


def test_a_conversion_recodes_every_slot_and_the_run_goes_on() -> None:
    """Triangles hold what the squares do, so that the converted run follows the plain one: 1e-12, see above."""
    averaged = {"averaging": {"kind": "ema", "decay": 0.5}}
    plain, parameters = trained({}, 5, **averaged)
    packed = Optimizer(
        [
            {"params": (copies := [torch.nn.Parameter(p.detach().clone()) for p in parameters])[:2]},
            {"params": copies[2:], "lr": 0.05},
        ],
        {**declared(PACKED), **averaged},
    )
    before = {key: value.clone() for key, value in plain.state_dict()["state"][0].items()}
    with refused(ValueError, "recipe"):
        packed.load_state_dict(plain.state_dict())
    packed.load_state_dict(convert_storage(plain.state_dict(), packed))
    assert all(torch.equal(value, before[key]) for key, value in plain.state_dict()["state"][0].items())
    more = random_gradients(SHAPES, 6, seed=77)
    walk(plain, parameters, more)
    walk(packed, copies, more)
    for ours, theirs in zip(copies, parameters, strict=True):
        assert float((ours - theirs).detach().abs().max() / theirs.detach().abs().max()) <= 1e-12
    back = convert_storage(packed.state_dict(), plain)
    plain.load_state_dict(back)
    assert packed.state_dict()["param_groups"][1]["lr"] == back["param_groups"][1]["lr"] == 0.05


def test_a_conversion_changes_nothing_but_storage() -> None:
    plain, _ = trained({}, 1)
    other = Optimizer([torch.nn.Parameter(torch.zeros(3, 3))], {"update": ["sign"], "routes": []})
    with refused(ValueError, "storage"):
        convert_storage(plain.state_dict(), other)


def test_fresh_slots_are_encoded_once_for_all_equal_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """4-bit Shampoo of matrices of two shapes, one in four blocks: QR rectifies fresh eigenvectors of either axis."""
    calls: list[int] = []
    qr = torch.linalg.qr
    monkeypatch.setattr(torch.linalg, "qr", lambda a, *args, **more: calls.append(len(a)) or qr(a, *args, **more))
    shapes = [*3 * [(64, 64)], (128, 160)]
    parameters = [torch.nn.Parameter(torch.zeros(shape)) for shape in shapes]
    optimizer = Optimizer(parameters, "shampoo_4bit", overrides=["routes=[]", "blocking.size=80"])
    assert calls == [1, 1, 1, 1]
    for param_set in optimizer.param_sets:
        for state in param_set.stack_states:
            for key, how in state.encoded.items():
                fresh = how.slot.allocate(len(state.stack.param_ids), how.dtype, state.stack.device)
                codes = how.codec.encode(fresh)
                assert all(torch.equal(state.tensors[f"{key}/{part}"], code) for part, code in codes.items())


def test_equal_slots_may_be_stored_in_different_ways() -> None:
    """Fresh codes are those of the quantizer of each slot, though everything else of the two is the same."""
    update = [{"kind": "momentum", "name": "a"}, {"kind": "momentum", "name": "b"}]
    formats = {"a": {"kind": "int8", "min_elements": 1}, "b": {"kind": "int4", "min_elements": 1}}

    def codes(**storage: Any) -> dict[str, Tensor]:
        declared = {f"update.{name}/m": how for name, how in storage.items()}
        optimizer = Optimizer([torch.nn.Parameter(normal(16, 8, seed=0))], {"update": update, "storage": declared})
        (own,) = optimizer.stack_states()
        return own.tensors

    both, alone = codes(**formats), codes(a=formats["b"], b=formats["b"])
    mine = {name: tensor for name, tensor in both.items() if name.startswith("update.b/")}
    assert len(mine) > 1
    assert all(tensor.dtype is alone[name].dtype and torch.equal(tensor, alone[name]) for name, tensor in mine.items())
