"""The number of kernels in a step depends on the number of distinct block shapes, not on the number of blocks."""

from collections import Counter
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from eigengraft import Optimizer, load_recipe

from ...recipes import COVER, without_routes
from ...trajectories import normal

pytestmark = pytest.mark.slow

FREE = {"aten::detach", "aten::lift_fresh", "aten::is_pinned", "aten::empty", "aten::_local_scalar_dense"}
"""Operators that run no kernel although their schema does not say that they return a view."""
VIEWS = {"aten::_unsafe_view", "aten::_reshape_alias"}
"""Views by another name."""

DATA_DRIVEN = {"adaptive_shampoo": {"threshold": 1e-9}}
"""Fields by which a stage refreshes all blocks at every step, and not those that its data tell."""


class Kernels(TorchDispatchMode):
    """Counts operators that are neither views nor free. A foreach operator counts once, as it is launched once."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if name.startswith("aten::") and not func.is_view and name not in FREE | VIEWS:
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


def parameters(layout: str, blocks: int) -> list[nn.Parameter]:
    """`blocks` blocks of 32 x 32: as many parameters, or one parameter that is cut into them."""
    if layout == "parameters":
        return [nn.Parameter(normal(32, 32, seed=i).float()) for i in range(blocks)]
    return [nn.Parameter(normal(32 * 4, 32 * blocks // 4, seed=0).float())]


def at_once(node: Any) -> Any:
    """The same declaration with every refresh of a stage at the same step for all blocks, at least every 10th."""
    if isinstance(node, dict):
        changes = {"every": {"stagger": "none", "steps": min(node.get("steps", 1), 10)}, **DATA_DRIVEN}
        return {key: at_once(value) for key, value in node.items()} | changes.get(str(node.get("kind")), {})
    return [at_once(value) for value in node] if isinstance(node, list) else node


def kernels(recipe: str, layout: str, blocks: int) -> dict[str, Counter[str]]:
    """Operators, by name, of the 8th step and of the one that refreshes: the 10th update (the first may only prime)."""
    declared = at_once(load_recipe(recipe).model_dump(mode="json"))
    held = parameters(layout, blocks)
    optimizer = Optimizer(held, {**without_routes(declared), "blocking": {"size": 32}})
    counted = {}
    for step in range(1, 12):
        for i, parameter in enumerate(held):
            parameter.grad = normal(*parameter.shape, seed=100 * step + i).float()
        with Kernels() if step in (8, 10, 11) else nullcontext() as mode:
            optimizer.step()
        counted[step] = Counter() if mode is None else mode.counts
    return {"steady": counted[8], "refresh": max(counted[10], counted[11], key=Counter.total)}


REFRESHING = {"soap_fitted", "shampoo", "reference/soap", "caspr", "shampoo_kl"}
"""Some recipes whose refresh steps run more kernels than the others."""


LAYOUTS = [(recipe, "parameters") for recipe in COVER] + [
    (recipe, "one parameter") for recipe in ("adamw", "soap_fitted")
]


@pytest.mark.parametrize(("recipe", "layout"), LAYOUTS)
def test_kernels_do_not_grow_with_the_number_of_blocks(recipe: str, layout: str) -> None:
    few, many = (kernels(recipe, layout, blocks) for blocks in (8, 64))
    for kind in ("steady", "refresh"):
        less, more = few[kind].total(), many[kind].total()
        assert more <= 1.1 * less, f"{kind}: {less} -> {more}, more of {many[kind] - few[kind]}"


def test_the_count_sees_a_loop_over_parameters() -> None:
    held = parameters("parameters", 8)
    with Kernels() as mode, torch.no_grad():
        for parameter in held:
            parameter.add_(1.0)
        torch._foreach_add_(held, 1.0)
        views: list[Tensor] = [parameter.view(-1).unsqueeze(0) for parameter in held]
    assert mode.counts == {"aten::add_": 8, "aten::_foreach_add_": 1}
    assert len(views) == 8


@pytest.mark.parametrize("recipe", ["adamw", "muon", *sorted(REFRESHING)])
def test_refreshes_are_counted(recipe: str) -> None:
    counted = kernels(recipe, "parameters", 2)
    assert (counted["refresh"].total() > 1.1 * counted["steady"].total()) == (recipe in REFRESHING)
