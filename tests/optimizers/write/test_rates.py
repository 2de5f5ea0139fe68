"""`Rates`: learning rates and weight decays of parameters in param groups, as a worked example."""

import numpy as np
import torch

from eigengraft.optimizers.write.write import Corrected, Decoupled, Hyper, Rates

GROUPS = np.array([0, 0, 1, 2])  # param group of each of four parameters
HYPERS = {0: Hyper(0.1, 0.4, 0.5), 1: Hyper(0.1, 0.4, 0.5), 2: Hyper(0.2, 0.4, 0.5)}
"""Learning rate, its peak and decay rate of each group. Groups 0 and 1 have equal values."""


def test_parameters_with_equal_rates_are_alike() -> None:
    rates = Rates(Decoupled(), {}, HYPERS, GROUPS)
    assert rates.alike.tolist() == [0, 0, 0, 2] and rates.same is None
    assert Rates(Decoupled(), {}, {0: HYPERS[0], 1: HYPERS[1]}, GROUPS[:3]).same == 0
    assert Rates(Decoupled(), {}, HYPERS, GROUPS, by_value=False).alike.tolist() == [0, 0, 1, 2]


def test_a_write_subtracts_lr_alpha_w_and_lr_u() -> None:
    rates = Rates(Decoupled(), {"routes.head": (2.0, None)}, HYPERS, GROUPS)
    body, head = rates.step_rates("", 3), rates.step_rates("routes.head", 3)
    assert (body.lr, body.alpha, body.shrink) == (0.2, 0.5, 1 - 0.2 * 0.5)
    assert (head.lr, head.alpha) == (0.4, 0.5)  # the route multiplies the learning rate


def test_a_route_may_have_a_decay_of_its_own() -> None:
    rates = Rates(Decoupled(), {"routes.head": (1.0, Decoupled(rate=0.25))}, HYPERS, GROUPS)
    assert rates.step_rates("routes.head", 0).alpha == 0.25 and rates.step_rates("", 0).alpha == 0.5


def test_a_factor_of_the_step_changes_the_learning_rate_and_not_alpha() -> None:
    plain, half = (Rates(Corrected(), {}, HYPERS, GROUPS, factor=x).step_rates("", 0) for x in (1.0, 0.5))
    assert half.lr == plain.lr / 2 and half.alpha == plain.alpha == 0.5 * 0.1 / 0.4


def test_rows_with_equal_rates_are_computed_by_one_call() -> None:
    rates, x, calls = Rates(Decoupled(), {}, HYPERS, GROUPS), torch.ones(4, 2), list[int]()

    def decayed(w: torch.Tensor, u: torch.Tensor, own: object) -> torch.Tensor:
        calls.append(len(w))
        return u + own.alpha * own.lr * w  # type: ignore[attr-defined]

    found = rates.map_rows("", np.arange(4), decayed, x, torch.zeros(4, 2))
    assert calls == [3, 1]
    torch.testing.assert_close(found[:, 0], torch.tensor([0.05, 0.05, 0.05, 0.1]))


def test_rates_of_a_captured_step_replace_those_of_the_groups() -> None:
    rates = Rates(Decoupled(), {}, HYPERS, GROUPS)
    tensors = rates.replaced({("", 2): rates.step_rates("", 0)})
    assert tensors.step_rates("", 3).lr == 0.1 and rates.step_rates("", 3).lr == 0.2
