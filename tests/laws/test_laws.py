"""The laws of DESIGN section 10, for every component: a row in `laws/table.py` enrols one.

Tolerances, unless a test says otherwise: 1e-10 relative in float64, thousands of roundings; where numbers must be the
same, they are compared bit for bit.
"""

from collections.abc import Mapping
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from eigengraft import Optimizer, RecipeError, Stage
from eigengraft.component import Component, checked, families

from ..trajectories import normal, rotation
from .bench import STEPS, Bench, difficult, gradients
from .rows import Row
from .table import TABLE


class Halve(Stage):
    """d / 2, written outside the package: defining it is all it takes."""

    kind: Literal["halve_for_test"] = "halve_for_test"

    def apply(self, state: Any, gradient: Tensor, direction: Tensor, context: Any) -> Tensor:
        return direction / 2


STAGES = (*TABLE["stage"], Row({"kind": "halve_for_test"}, "third party", degree=1, rotates=True))
every_stage = pytest.mark.parametrize("row", STAGES, ids=str)
every_comparable_stage = pytest.mark.parametrize("row", [row for row in STAGES if not row.singular], ids=str)


def unlisted(table: Mapping[str, tuple[Row, ...]], package: str = "eigengraft.") -> list[str]:
    """Members, of all families below the experiments, that no row of the table is about."""
    library = {n: f for n, f in families().items() if not f.__module__.startswith("eigengraft.experiments")}
    return [
        f"{name}.{kind}"
        for name, family in library.items()
        for kind, member in family.members.items()
        if member.__module__.startswith(package) and kind not in {row.kind for row in table.get(name, ())}
    ]


def test_every_member_of_every_family_has_a_row() -> None:
    assert unlisted(TABLE) == []


def test_a_member_without_a_row_is_noticed() -> None:
    assert unlisted(TABLE, package="") != unlisted(TABLE)
    assert "stage.halve_for_test" in unlisted(TABLE, package="")
    assert "cadence.every" in unlisted({**TABLE, "cadence": ()})


@pytest.mark.parametrize("family", TABLE)
def test_every_kind_lists_error_inputs(family: str) -> None:
    assert TABLE[family]
    kinds = {row.kind for row in TABLE[family]}
    assert kinds == {row.kind for row in TABLE[family] if row.faults}


FAULTS = [(family, fault) for family, rows in TABLE.items() for row in rows for fault in row.faults]


@pytest.mark.parametrize(("family", "fault"), FAULTS, ids=[f"{family} {fault.fields}" for family, fault in FAULTS])
def test_wrong_declarations_are_refused_by_name(family: str, fault: Any) -> None:
    with pytest.raises(RecipeError, match=fault.message):
        checked(families()[family], dict(fault.fields))


@pytest.mark.parametrize(("family", "row"), [(f, r) for f, rows in TABLE.items() for r in rows], ids=str)
def test_a_component_survives_its_own_declaration(family: str, row: Row) -> None:
    made: Component = checked(families()[family], dict(row.make))
    assert checked(families()[family], made.model_dump(mode="json")) == made
    assert made.replace() == made
    with pytest.raises(ValueError, match="frozen"):
        made.kind = "other"  # type: ignore[attr-defined]


def close(ours: Tensor, theirs: Tensor, tolerance: float = 1e-10) -> bool:
    return float((ours - theirs).abs().max()) <= tolerance * max(float(theirs.abs().max()), 1e-300)


@every_comparable_stage
def test_a_stack_is_its_blocks(row: Row) -> None:
    for block in row.blocks:
        given = gradients(block)
        stack = Bench(row, block, 3)
        together = stack.run(given)
        for i in range(3):
            assert close(stack.only(i).run(given[:, i : i + 1])[:, 0], together[:, i]), block


@every_comparable_stage
def test_blocks_without_a_gradient_wait(row: Row) -> None:
    """Rows by index, each with its own step: a block that was left out is where it would be without that step."""
    chosen = [torch.tensor(rows) for rows in ([0, 1, 2], [0, 2], [1], [2, 1], [0, 1, 2], [0], [0, 1], [1, 2])]
    for block in row.blocks:
        given = gradients(block)
        stack = Bench(row, block, 3)
        alone = [stack.only(i) for i in range(3)]
        for gradient, rows in zip(given, chosen, strict=False):
            if stack.lagging and len({stack.counts[i] == 0 for i in rows}) > 1:
                continue
            ours = stack.step(gradient[rows], rows=rows)
            theirs = [alone[i].step(gradient[i : i + 1]) for i in rows.tolist()]
            assert close(ours, torch.cat(theirs)), block


@every_comparable_stage
def test_masked_rows_change_nothing(row: Row) -> None:
    """A row whose gradient is not finite keeps its state bit for bit; the others do not notice it."""
    mask = torch.tensor([True, False, True])
    for block in row.blocks:
        given = gradients(block)
        stack = Bench(row, block, 3)
        stack.run(given[: STEPS // 2])
        reference = stack.copy()
        before = {key: tensor.clone() for key, tensor in stack.tensors.items()}
        for gradient in given[STEPS // 2 :]:
            spoiled = gradient.clone()
            spoiled[1] = torch.nan
            ours = stack.step(spoiled, mask=mask)[mask]
            assert close(ours, reference.step(gradient)[mask]), block
        for key, tensor in stack.tensors.items():
            assert torch.equal(tensor[1], before[key][1]), key


@every_stage
def test_inputs_are_never_written_to(row: Row) -> None:
    for block in row.blocks:
        stack = Bench(row, block, 3)
        for t, gradient in enumerate(gradients(block)):
            direction = normal(*gradient.shape, seed=t)
            copies = gradient.clone(), direction.clone()
            stack.step(gradient, direction if t % 2 else gradient)
            assert torch.equal(gradient, copies[0]) and torch.equal(direction, copies[1])


@every_stage
def test_numbers_stay_finite(row: Row) -> None:
    for block in row.blocks:
        for name, given in difficult(block):
            stack = Bench(row, block, 3, torch.float32)
            failures = [stack.tensors[key] for key, slot in stack.declared.items() if slot.role == "failures"]
            for gradient in given:
                assert stack.step(gradient).isfinite().all(), (block, name)
                assert not any(count.any() for count in failures), (block, name)
            assert all(tensor.isfinite().all() for tensor in stack.tensors.values()), (block, name)


@every_stage
def test_a_zero_gradient_moves_nothing(row: Row) -> None:
    for block in row.blocks:
        assert not Bench(row, block, 3).run(torch.zeros_like(gradients(block))).any()


@pytest.mark.parametrize("scale", [2.0**-10, 2.0**10])
@pytest.mark.parametrize("row", [row for row in STAGES if row.degree is not None], ids=str)
def test_scaling_all_gradients_scales_the_direction(row: Row, scale: float) -> None:
    """By the degree in the row. The last step counts: roots and bases are no longer the identity they start from."""
    for block in row.blocks:
        degree = row.degree(len(block)) if callable(row.degree) else row.degree
        assert degree is not None
        given = gradients(block)
        plain, scaled = Bench(row, block, 3).run(given)[-1], Bench(row, block, 3).run(given * scale)[-1]
        assert close(scaled * scale**-degree, plain, 1e-7), block


@pytest.mark.parametrize("block", [(6, 5), (5, 5)], ids=str)
@pytest.mark.parametrize("row", [row for row in STAGES if row.rotates], ids=str)
def test_rotating_all_gradients_rotates_the_direction(row: Row, block: tuple[int, int]) -> None:
    u, v = rotation(block[0], 1), rotation(block[1], 2)
    given = gradients(block)
    straight, turned = Bench(row, block, 3).run(given), Bench(row, block, 3).run(u @ given @ v.T)
    assert close(turned, u @ straight @ v.T, 1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@every_stage
def test_dtype_and_device_are_kept(row: Row, dtype: torch.dtype) -> None:
    for block in row.blocks:
        given = gradients(block, dtype=dtype)
        stack = Bench(row, block, 3, dtype)
        before = {key: (tensor.dtype, tensor.device, tensor.shape) for key, tensor in stack.tensors.items()}
        out = stack.run(given)
        assert out.dtype == dtype and out.device == given.device and out.shape == given.shape
        assert before == {key: (tensor.dtype, tensor.device, tensor.shape) for key, tensor in stack.tensors.items()}


@every_stage
def test_slots_declared_are_slots_used_are_bytes_reported(row: Row) -> None:
    for block in row.blocks:
        stack = Bench(row, block, 2)
        stack.run(gradients(block, 2))
        assert stack.tensors.used == stack.declared.keys(), block
        size = sum(tensor[0].numel() * tensor.element_size() for tensor in stack.tensors.values())
        parameter = torch.nn.Parameter(torch.zeros(block, dtype=torch.float64))
        optimizer = Optimizer([parameter], {"update": [dict(row.make)], "routes": []})
        (assignment,) = optimizer.routing_table()
        step = 8  # the int64 count of steps
        assert optimizer.state_bytes() == assignment.state_bytes == size + step


@every_stage
def test_a_copy_of_the_state_resumes_exactly(row: Row) -> None:
    for block in row.blocks:
        given = gradients(block)
        stack = Bench(row, block, 3)
        stack.run(given[: STEPS // 2])
        twin = stack.copy()
        assert torch.equal(twin.run(given[STEPS // 2 :]), stack.run(given[STEPS // 2 :]))


@every_stage
def test_a_checkpoint_resumes_exactly(row: Row) -> None:
    """Of two parameters cut into blocks, in float32, through `state_dict`."""
    for block in ((6, 6), (8,)):
        declared = {"update": [dict(row.make)], "routes": [], "blocking": {"size": 2}}
        given = gradients(block, 2, torch.float32)
        parameters = [torch.nn.Parameter(normal(*block, seed=i).float()) for i in range(2)]
        optimizer = Optimizer(parameters, declared, lr=0.1)
        run(optimizer, parameters, given[: STEPS // 2])
        copies = [torch.nn.Parameter(parameter.detach().clone()) for parameter in parameters]
        resumed = Optimizer(copies, declared, lr=0.1)
        resumed.load_state_dict(optimizer.state_dict())
        run(optimizer, parameters, given[STEPS // 2 :])
        run(resumed, copies, given[STEPS // 2 :])
        assert all(torch.equal(a, b) for a, b in zip(parameters, copies, strict=True)), block


def run(optimizer: Optimizer, parameters: list[torch.nn.Parameter], given: Tensor) -> None:
    """given: `[T, parameters, *shape]`."""
    for step in given:
        for parameter, gradient in zip(parameters, step, strict=True):
            parameter.grad = gradient.clone()
        optimizer.step()


def test_a_third_party_stage_works_from_a_recipe() -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    parameter.grad = torch.full((3,), 4.0)
    Optimizer([parameter], {"update": [{"kind": "halve_for_test"}], "routes": []}, lr=0.5).step()
    assert parameter.tolist() == [0.0, 0.0, 0.0]
