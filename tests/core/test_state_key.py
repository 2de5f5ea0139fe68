"""State keys: text and fields say the same, for the keys of every kind of state."""

import pytest
import torch
from torch import nn

import eigengraft
from eigengraft import Optimizer
from eigengraft.state_key import FORMAT, StateKey

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
    optimizer = Optimizer(parameters, recipe)
    stages = {path for where, rule in optimizer.recipe.updates().items() for path, _ in rule.stages(where)}
    for state in optimizer.state.values():
        for text in state:
            key = StateKey.parse(text)
            assert str(key) == text
            assert key.stage in stages if key.block is not None else text == "step" or key.stage == "averaging"
