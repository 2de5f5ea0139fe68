"""One step of a parameter set by hand, call by call, as `ParamSet.step` makes it."""

import pytest
import torch
from torch import nn

from eigengraft import Optimizer
from eigengraft.optimizers.stacks.stack import active_blocks
from eigengraft.optimizers.step.step import prepare
from eigengraft.optimizers.write.write import EntryUpdates, write

DESCENT = {"update": [{"kind": "scale", "factor": 1.0}], "routes": []}
"""The direction is the gradient:  W <- W - lr alpha W - lr G."""


@torch.no_grad()
def test_gradients_become_inputs_stacks_directions_and_writes() -> None:
    a, b, c = (nn.Parameter(torch.ones(*shape)) for shape in ((2, 3), (2, 3), (4,)))
    optimizer = Optimizer([("a", a), ("b", b), ("c", c)], DESCENT, lr=0.5, weight_decay=0.25)
    (param_set,) = optimizer.param_sets
    a.grad, b.grad = torch.full((2, 3), 2.0), torch.full((2, 3), 4.0)  # c has no gradient

    ((_, inputs),) = prepare([param_set], optimizer.hypers())
    assert inputs is not None and inputs.mask is None  # all gradients are usable
    assert inputs.active.tolist() == inputs.written.tolist() == [True, True, False]
    assert inputs.counts.tolist() == [1, 1, 0] and param_set.step_counts.tolist() == [0, 0, 0]  # nothing has changed
    assert [x.data_ptr() for x in inputs.own_entries] == [p.data_ptr() for p in (a, b, c)]
    rates = inputs.rates.step_rates("", 0)
    assert (rates.lr, rates.alpha) == (0.5, 0.25)

    matrices, vector = param_set.stack_states
    assert matrices.select(inputs.active) is matrices.all_blocks and vector.select(inputs.active) is None
    (((blocks,), priming),) = active_blocks([matrices], inputs.active, None)
    written = list[EntryUpdates]()
    exchange = param_set.exchange.begin(inputs, [matrices], written.append)
    gradients = exchange.gradients(blocks)
    assert gradients.tolist() == torch.stack([a.grad, b.grad]).tolist() and not priming
    exchange.deliver(blocks, gradients)  # the directions of this recipe
    exchange.finish()

    (updates,) = written
    assert updates.positions.tolist() == [0, 1]
    write(updates.entries, updates.values, rates, None)
    assert a.tolist() == torch.full((2, 3), 1 - 0.5 * 0.25 - 0.5 * 2.0).tolist()
    assert b.tolist() == torch.full((2, 3), 1 - 0.5 * 0.25 - 0.5 * 4.0).tolist() and c.tolist() == [1.0] * 4


@pytest.mark.filterwarnings("ignore:.*its gradient has inf or nan")
def test_a_gradient_with_nan_is_left_out_and_counted() -> None:
    a, b = (nn.Parameter(torch.ones(2, 3)) for _ in range(2))
    optimizer = Optimizer([("a", a), ("b", b)], DESCENT, lr=0.5)
    (param_set,) = optimizer.param_sets
    a.grad, b.grad = torch.full((2, 3), torch.nan), torch.ones(2, 3)
    ((_, inputs),) = prepare([param_set], optimizer.hypers())
    assert inputs is not None and inputs.active.tolist() == [False, True] and inputs.counts.tolist() == [0, 1]
    assert optimizer.skipped == {"a": 1}
    b.grad = None
    assert prepare([param_set], optimizer.hypers()) == [(param_set, None)]  # no parameter would change


@torch.no_grad()
def test_a_first_gradient_that_only_primes_is_active_and_writes_nothing() -> None:
    weight = nn.Parameter(torch.ones(2, 3))
    optimizer = Optimizer([("weight", weight)], {"update": "lagged_rms", "routes": []}, lr=0.5)
    (param_set,) = optimizer.param_sets
    weight.grad = torch.ones(2, 3)
    for written in (False, True):
        ((_, inputs),) = prepare([param_set], optimizer.hypers())
        assert inputs is not None and inputs.active.all() and inputs.written.tolist() == [written]
        param_set.step(inputs)
        assert bool((weight != 1).all()) is written
