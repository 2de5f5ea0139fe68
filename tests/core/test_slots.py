"""State keys: text and fields say the same, for the keys of every kind of state."""

import re
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import eigengraft
from eigengraft import Optimizer
from eigengraft.slots import FORMAT, Slot, StateKey

from ..house.test_house import sources
from ..refusals import refused
from ..trajectories import named

KEYS = {
    "step": StateKey(None, "", "step"),
    "averaging/mean": StateKey(None, "averaging", "mean"),
    "routes.adam.constraints.hyperball/radius": StateKey(None, "routes.adam.constraints.hyperball", "radius"),
    "0/update.momentum/m": StateKey(0, "update.momentum", "m"),
    "12/routes.adam.update.shampoo/root.1/format": StateKey(12, "routes.adam.update.shampoo", "root.1", FORMAT),
    "3/update.shampoo/root.1/inner/codes": StateKey(3, "update.shampoo", "root.1", "inner/codes"),
}


@pytest.mark.parametrize("text", KEYS)
def test_a_key_and_its_text_say_the_same(text: str) -> None:
    assert StateKey.parse(text) == KEYS[text] and str(KEYS[text]) == text


@pytest.mark.parametrize("recipe", eigengraft.shipped_recipes())
def test_state_of_a_block_belongs_to_a_stage_that_the_recipe_has(recipe: str) -> None:
    parameters = [nn.Parameter(torch.zeros(4, 3)), nn.Parameter(torch.zeros(3))]
    optimizer = Optimizer(named(parameters), recipe)
    updates = optimizer.recipe.rules().items()
    stages = {path for where, rule in updates for path, _ in rule.stages(where)}
    constraints = {f"{where}.constraints.{c.label}".lstrip(".") for where, rule in updates for c in rule.constraints}
    for state in optimizer.state.values():
        for text in state:
            key = StateKey.parse(text)
            assert str(key) == text
            assert (
                key.stage in stages
                if key.block is not None
                else text == "step" or key.stage in constraints | {"averaging"}
            )


SPELLED = re.compile(r"""partition\("/"\)|split\("/"|\}/\{""")
OTHERS = {
    "eigengraft.slots": "the purpose of random numbers",
    "eigengraft.optimizers.stacks.stack": "the seed of a block",
    "eigengraft.optimizers.inspect.inspect": "what a stage calls a measure of a slot",
}
"""Modules that put a slash between two texts which are no state key, and what they are."""


def test_state_keys_are_spelled_in_one_place() -> None:
    packages = (
        "eigengraft.optimizers.",
        "eigengraft.preconditioners.",
        "eigengraft.quantization.",
        "eigengraft.testing.",
    )
    texts = {name: path.read_text() for name, path in sources().items() if name.startswith(packages) or name in OTHERS}
    assert [name for name, text in texts.items() if SPELLED.search(text) and name not in OTHERS] == []
    assert all(SPELLED.search(texts[name]) for name in OTHERS)


def test_a_slot_refuses_an_unknown_role_or_frame() -> None:
    with refused(ValueError, "Slot.role", "history", "first_moment"):
        Slot((2, 2), role="history")  # type: ignore[arg-type]
    with refused(ValueError, "Slot.frame", "rotated", "vector"):
        Slot((2, 2), frame="rotated")  # type: ignore[arg-type]


@pytest.mark.parametrize("shape", [3, (3.0,), [3], ((3, 2), 2), "ab", None], ids=repr)
def test_a_slot_refuses_a_shape_that_is_no_tuple_of_lengths(shape: Any) -> None:
    with refused(TypeError, "Slot.shape", "tuple", repr(shape)):
        Slot(shape)


def test_a_slot_takes_every_kind_of_whole_number() -> None:
    assert Slot((np.int64(3), 2)).allocate(2, torch.float32, torch.device("cpu")).shape == (2, 3, 2)
    assert Slot(torch.Size([3])).shape == (3,)
