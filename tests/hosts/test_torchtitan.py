"""torchtitan's container builds recipes, steps them, and writes and reads its flat checkpoints."""

from typing import Any

import pytest

pytest.importorskip("torchtitan.components.optimizer")

from torchtitan.components.optimizer import ParamGroupConfig

from eigengraft.hosts.torchtitan import RecipesContainer

from .models import Net, loss_of, same, values


def start(recipe: str) -> tuple[Net, Any]:
    groups = [
        ParamGroupConfig(pattern=r"bias$|norm", optimizer_name="AdamW", optimizer_kwargs={"lr": 1e-2}),
        ParamGroupConfig(pattern=r"table", optimizer_name=recipe, optimizer_kwargs={"lr": 2e-2, "weight_decay": 0.0}),
        ParamGroupConfig(pattern=r".*", optimizer_name=recipe, optimizer_kwargs={"lr": 1e-2, "weight_decay": 0.1}),
    ]
    net = Net()
    config = RecipesContainer.Config(param_groups=groups, implementation="for-loop")
    return net, config.build(model_parts=[net])


def train(net: Net, container: Any, steps: range) -> None:
    for step in steps:
        container.zero_grad()
        loss_of(net, step).backward()
        container.step()


@pytest.mark.parametrize("recipe", ["soap_fitted", "muon"])
def test_a_run_resumes_bit_for_bit_from_flat_keys(recipe: str) -> None:
    whole, again = start(recipe), start(recipe)
    before = values(whole[0])
    whole[1].state_dict()  # torchtitan makes a step without gradients before the first one
    assert same(before, values(whole[0]))
    train(*whole, range(4))
    saved = {key: value.clone() if hasattr(value, "clone") else value for key, value in whole[1].state_dict().items()}
    assert all(key.startswith(("state.", "param_groups.")) for key in saved)
    assert any(key.startswith("state.hidden.weight.") for key in saved)
    again[0].load_state_dict(whole[0].state_dict())
    train(*whole, range(4, 8))
    again[1].load_state_dict(saved)
    train(*again, range(4, 8))
    assert same(values(whole[0]), values(again[0]))


def test_routes_tell_names_apart() -> None:
    _, container = start("soap_fitted")
    own = next(optimizer for optimizer in container if type(optimizer).__name__ == "Optimizer")
    assert {row.name: row.route for row in own.routing_table()} == {
        "table.weight": "routes.adam",
        "hidden.weight": "",
        "head.weight": "routes.adam",
    }
