"""Stacks hold a bounded number of blocks: how they are cut, and that nothing but time and memory depends on it."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from eigengraft import Optimizer, load_recipe
from eigengraft.blocking import stacks
from eigengraft.blocking.blocks import BlockGrid

from ..distributed.ranks.workers.memory import Watch
from ..laws.quantizers import small
from ..optimizers.step.test_kernels import Kernels, at_once
from ..recipes import COVER, without_routes
from ..trajectories import normal


@given(st.lists(st.integers(0, 5), min_size=1, max_size=40).map(sorted), st.integers(1, 50), st.booleans())
def test_ranges_cover_all_blocks_evenly(owners: list[int], most: int, together: bool) -> None:
    ranges = stacks.split_ranges(owners, most, together)
    assert [block for start, stop in ranges for block in range(start, stop)] == list(range(len(owners)))
    if together:
        held = [set(owners[start:stop]) for start, stop in ranges]
        assert sum(map(len, held)) == len(set(owners)), "a parameter is in two stacks"
    else:
        lengths = [stop - start for start, stop in ranges]
        assert max(lengths) <= most
        assert max(lengths) - min(lengths) <= 1
        assert len(ranges) == -(-len(owners) // most), "more stacks than needed"


def test_the_bound_is_in_bytes_and_a_block_may_exceed_it() -> None:
    cpu, device = torch.device("cpu"), torch.device("cuda")
    assert stacks.max_blocks(256 * 256, torch.float32, cpu) == 8
    assert stacks.max_blocks(256 * 256, torch.float64, cpu) == 4
    assert stacks.max_blocks(256 * 256, torch.float32, device) == 1024
    assert stacks.max_blocks(50257 * 1024, torch.float32, cpu) == 1


def test_the_bound_counts_factors_that_are_larger_than_the_block() -> None:
    """A block 512 x 128 has a factor of 1 MiB, two in a stack; for Adam 8 blocks are that large."""
    held = [nn.Parameter(torch.zeros(512, 128)) for _ in range(20)]
    for recipe, expected in (("soap_fitted", 10), ("adamw", 3)):
        assert units(Optimizer(held, {**load_recipe(recipe).declaration(), "routes": []})) == expected


def parameters() -> list[nn.Parameter]:
    """Three parameters of one block, and one of six."""
    shapes = ((16, 16), (16, 16), (16, 16), (48, 32))
    return [nn.Parameter(normal(*shape, seed=i)) for i, shape in enumerate(shapes)]


def declared(recipe: str) -> dict[str, Any]:
    """Everything in blocks of 16, coded slots whatever their size."""
    found = without_routes(load_recipe(recipe).declaration())
    return {**found, "blocking": {"size": 16}, "storage": stored(found)}


def stored(declaration: dict[str, Any]) -> dict[str, Any]:
    """Its storage, for slots of any size."""
    return {key: small(quantizer) for key, quantizer in declaration.get("storage", {}).items()}


def trained(recipe: str, steps: int, start: dict[str, Any] | None = None) -> tuple[Optimizer, list[torch.Tensor]]:
    held = parameters()
    optimizer = Optimizer(held, declared(recipe), lr=0.01)
    if start is not None:
        optimizer.load_state_dict(start)
    for step in range(steps):
        for i, parameter in enumerate(held):
            parameter.grad = normal(*parameter.shape, seed=1000 + 10 * step + i)
        if step == 3:
            held[1].grad = None
        optimizer.step()
    return optimizer, [parameter.detach() for parameter in held]


@pytest.mark.slow
@pytest.mark.parametrize("recipe", COVER)
def test_cut_stacks_make_the_same_steps(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """float64, in which a batch of products may be rounded otherwise than one of them."""
    whole, expected = trained(recipe, 12)
    monkeypatch.setattr(stacks, "BYTES_ON_CPU", 2 * 16 * 16 * 8)
    cut, found = trained(recipe, 12)
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-11)
    assert units(cut) > units(whole)
    theirs, ours = (optimizer.state_dict()["state"] for optimizer in (whole, cut))
    assert {key: sorted(value) for key, value in ours.items()} == {key: sorted(value) for key, value in theirs.items()}


@pytest.mark.slow
def test_a_checkpoint_does_not_know_how_stacks_were_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, _ = trained("soap_int8", 7)
    saved = whole.state_dict()
    _, expected = trained("soap_int8", 5, saved)
    monkeypatch.setattr(stacks, "BYTES_ON_CPU", 16 * 16 * 8)
    cut, found = trained("soap_int8", 5, saved)
    assert units(cut) > units(whole)
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-11)


def test_what_a_stage_spans_stays_in_one_stack(monkeypatch: pytest.MonkeyPatch) -> None:
    """A grafting over whole parameters takes the norm of blocks that are together."""
    recipe = {
        "update": [
            {"kind": "graft", "direction": {"kind": "sign"}, "magnitude": {"kind": "identity"}, "per": "parameter"}
        ],
        "blocking": {"size": 16},
    }
    monkeypatch.setattr(stacks, "BYTES_ON_CPU", 2 * 16 * 16 * 8)
    parameter = nn.Parameter(torch.zeros(64, 16, dtype=torch.float64))
    parameter.grad = normal(64, 16, seed=1)
    Optimizer([parameter], recipe, lr=1.0).step()
    update = -parameter.detach()
    torch.testing.assert_close(update.norm(), parameter.grad.norm())
    torch.testing.assert_close(update, parameter.grad.sign() * parameter.grad.norm() / 32)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["adamw", "shampoo", "soap_fitted", "muon", "adamw_8bit", "soap_int8", "soap_4bit"])
def test_a_step_makes_nothing_larger_than_a_stack(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the number of blocks; steps up to the third fill caches, the tenth or eleventh refreshes all blocks, and
    those between are like the fourth."""
    bound = 2 * 64 * 64 * 4
    monkeypatch.setattr(stacks, "BYTES_ON_CPU", bound)
    declaration = load_recipe(recipe).declaration()
    held = [nn.Parameter(normal(64, 64, seed=i).float()) for i in range(12)]
    optimizer = Optimizer(held, {**at_once(declaration), "routes": [], "storage": stored(declaration)})
    for step in range(11):
        for i, parameter in enumerate(held):
            parameter.grad = normal(64, 64, seed=100 * step + i).float()
        if step not in (3, 9, 10):
            optimizer.step()
            continue
        with Watch() as watch:
            optimizer.step()
        assert 0 < watch.largest <= bound


def units(optimizer: Optimizer) -> int:
    return len(optimizer.stack_states())


@pytest.mark.parametrize("given", ["as they are", "another dtype", "transposed", "another shape"])
def test_stacks_are_gathered_from_whatever_parameters_are(given: str) -> None:
    """Parameters of the stack's dtype in one kernel, others by a copy of each; the only one as it is."""
    blocks = [normal(4, 3, seed=seed).float() for seed in range(3)]
    held = {
        "as they are": blocks,
        "another dtype": [block.bfloat16() for block in blocks],
        "transposed": [block.T.contiguous().T for block in blocks],
        "another shape": [block.reshape(4, 3, 1) for block in blocks],
    }[given]
    grid, cpu = BlockGrid.single((4, 3)), torch.device("cpu")
    stack = stacks.Stack((4, 3), torch.float32, cpu, tuple((at, grid) for at in (2, 0, 1)))
    with Kernels() as counted:
        found = stack.gather(held)
    expected = torch.stack([held[at].float().reshape(4, 3) for at in (2, 0, 1)])
    assert torch.equal(found, expected)
    assert (counted.counts["aten::stack"] + counted.counts["aten::cat"] > 0) == (given != "another dtype")
    single = stacks.Stack((4, 3), torch.float32, cpu, ((2, grid),)).gather(held)
    assert torch.equal(single[0], expected[0])
    assert (single.data_ptr() == held[2].data_ptr()) == (given in ("as they are", "another shape"))


@pytest.mark.parametrize("offset", [0, 1, 3, 4])
def test_a_block_is_aligned_wherever_its_tensor_starts(offset: int) -> None:
    source = torch.arange(31.0)[offset : offset + 15].view(3, 5)
    stack = stacks.Stack((3, 5), torch.float32, torch.device("cpu"), ((0, BlockGrid.single((3, 5))),))
    found = stack.gather([source])
    assert torch.equal(found[0], source)
    assert found.data_ptr() % stacks.ALIGNMENT == 0
    assert (found.data_ptr() == source.data_ptr()) == (offset % 4 == 0)


@pytest.mark.parametrize("recipe", ["shampoo", "soap_fitted"])
def test_gradients_that_are_views_of_a_bucket_make_the_same_steps(recipe: str) -> None:
    """As DistributedDataParallel with `gradient_as_bucket_view=True` leaves them, at any offset."""

    def train(offset: int | None) -> torch.Tensor:
        weight = nn.Parameter(normal(10, 3, 3, 3, seed=0).float())
        optimizer = Optimizer([("weight", weight)], recipe, lr=0.01)
        for step in range(8):
            gradient = normal(10, 3, 3, 3, seed=1 + step).float()
            if offset is not None:
                gradient = torch.cat([torch.zeros(offset), gradient.flatten()])[offset:].view_as(gradient)
            weight.grad = gradient
            optimizer.step()
        return weight.detach()

    expected = train(None)
    assert all(torch.equal(train(offset), expected) for offset in (1, 2, 3))
