"""A transform: every stage inside it sees another gradient, from the first one on and in every frame."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from eigengraft import Optimizer, RecipeError

from ..refusals import refused
from ..trajectories import normal

MOMENTUM, RMS = {"kind": "momentum", "beta": 0.9}, {"kind": "rms", "beta": 0.99}


def gradients(steps: int = 6) -> Tensor:
    """`[steps, 4, 3]`, of which some are long and some are short."""
    return torch.stack([normal(4, 3, seed=t) * 10.0 ** (t % 3 - 1) for t in range(steps)])


def trained(update: Any, given: Tensor, lr: float = 0.1) -> Tensor:
    """The parameter after one step for each gradient."""
    parameter = nn.Parameter(torch.zeros(given.shape[1:], dtype=given.dtype))
    optimizer = Optimizer([parameter], {"update": update, "routes": []}, lr=lr, checked=True)
    for gradient in given:
        parameter.grad = gradient.clone()
        optimizer.step()
    return parameter.detach()


def test_adam_with_clipped_gradients_is_that_of_torch() -> None:
    given, theirs = gradients(), nn.Parameter(torch.zeros(4, 3, dtype=torch.float64))
    adam = torch.optim.Adam([theirs], lr=0.1, betas=(0.9, 0.99))
    for gradient in given:
        theirs.grad = gradient.clone()
        torch.nn.utils.clip_grad_norm_([theirs], 0.5)
        adam.step()
    ours = trained([{"kind": "clip_norm", "max_norm": 0.5}, MOMENTUM, RMS], given)
    assert torch.allclose(ours, theirs.detach(), rtol=0, atol=1e-5)  # torch adds 1e-6 to the norm: 2e-6 of each step


def test_centered_gradients() -> None:
    given = gradients()
    ours = trained([{"kind": "transform", "before": "center", "inner": [MOMENTUM, RMS]}], given)
    assert torch.allclose(ours, trained([MOMENTUM, RMS], given - given.mean(-1, keepdim=True)), rtol=0, atol=1e-12)


def test_after_other_stages_the_inner_chain_goes_on_from_their_direction() -> None:
    """m / sqrt(mean of clip(g)^2): the momentum is of g, the second moment of the clipped one."""
    clip = {"kind": "clip_norm", "max_norm": 0.5}
    given = gradients(1)
    ours = trained([MOMENTUM, {"kind": "transform", "before": clip, "inner": RMS}], given)
    scale = (given[0].norm() / 0.5).clamp_min(1)
    assert torch.allclose(ours, -0.1 * given[0].sign() * scale, atol=1e-6)


SOAP = {
    "kind": "eigenbasis",
    "timing": "lagged",
    "inner": [MOMENTUM, RMS],
    "refresh": {"kind": "every", "steps": 2, "stagger": "none"},
}


@pytest.mark.parametrize("inner", [[MOMENTUM, RMS], [SOAP]], ids=["adam", "lagged"])
def test_a_transform_with_state_maps_every_gradient_once(inner: Any) -> None:
    """Lagged stages learn from the first gradient and move nothing: T has had that gradient too."""
    given, mean, mapped = gradients(), torch.zeros(4, 3, dtype=torch.float64), []
    for t, gradient in enumerate(given, start=1):
        mean = 0.5 * mean + 0.5 * gradient
        mapped.append(mean / (1 - 0.5**t))
    ours = trained([{"kind": "transform", "before": {"kind": "momentum", "beta": 0.5}, "inner": inner}], given)
    assert torch.allclose(ours, trained(inner, torch.stack(mapped)), rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    "around",
    [
        lambda inner: {"kind": "chain", "stages": inner},
        lambda inner: {"kind": "split", "rank": 2, "inside": inner, "outside": inner},
        lambda inner: {**SOAP, "inner": inner},
    ],
    ids=["chain", "split", "eigenbasis"],
)
def test_stages_around_a_transform_hand_it_their_gradient_as_direction(around: Any) -> None:
    """Doubling before momentum alone doubles the direction, wherever the transform stands."""
    given, twice = gradients(), {"kind": "scale", "factor": 2.0}
    ours = trained([around([{"kind": "transform", "before": twice, "inner": MOMENTUM}])], given)
    assert torch.allclose(ours, 2 * trained([around([MOMENTUM])], given), rtol=0, atol=1e-12)


def test_stages_that_lag_cannot_map_gradients() -> None:
    with refused(RecipeError, "before.eigenbasis"):
        trained([{"kind": "transform", "before": [SOAP], "inner": "rms"}], gradients())
