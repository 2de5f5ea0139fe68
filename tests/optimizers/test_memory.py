"""Parameters that share memory are refused by name, and parameters that lie beside each other in one tensor train."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import eigengraft
from eigengraft import Optimizer

from ..refusals import refused


def pair(first: Tensor, second: Tensor) -> list[tuple[str, nn.Parameter]]:
    return [("a", nn.Parameter(first)), ("b", nn.Parameter(second))]


BUFFER = torch.arange(24.0)
SHARED: dict[str, Callable[[], list[tuple[str, nn.Parameter]]]] = {
    "tied by data": lambda: pair(BUFFER[:6].view(2, 3), BUFFER[:6].view(2, 3)),
    "transposed": lambda: pair(BUFFER[:6].view(2, 3), BUFFER[:6].view(2, 3).T),
    "one in the other": lambda: pair(BUFFER, BUFFER[3:5]),
    "one entry": lambda: pair(BUFFER[:4], BUFFER[3:]),
    "crossing strides": lambda: pair(BUFFER[::2], BUFFER[::3]),
    "another storage": lambda: pair(BUFFER, torch.from_numpy(BUFFER.numpy()[20:])),
    "complex and real": lambda: pair(torch.view_as_complex(BUFFER.view(-1, 2)), BUFFER[1::2]),
}


@pytest.mark.parametrize("case", SHARED)
@pytest.mark.parametrize("groups", [1, 2])
def test_parameters_that_share_memory_are_refused_by_name(case: str, groups: int) -> None:
    """A step reads all parameters before it writes them, so it would lose one of the two updates."""
    named = SHARED[case]()
    given = [{"params": named}] if groups == 1 else [{"params": [one]} for one in named]
    with refused(ValueError, "a", "b"):
        Optimizer(given, "sgd")


def test_a_group_that_shares_memory_is_not_added() -> None:
    (_, a), (_, b) = named = SHARED["tied by data"]()
    optimizer = Optimizer(named[:1], "sgd", lr=0.1)
    with refused(ValueError, "a", "b"):
        optimizer.add_param_group({"params": named[1:]})
    assert len(optimizer.param_groups) == 1
    a.grad = b.grad = torch.ones(2, 3)
    before = a.detach().clone()
    optimizer.step()
    torch.testing.assert_close(a.detach(), before - 0.1)


def test_frozen_weights_may_share_memory_until_both_train() -> None:
    model = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})
    model["b"].weight.data = model["a"].weight.data
    model["b"].requires_grad_(False)
    optimizer = eigengraft.compose("soap_fitted", model, lr=0.1)
    for p in model["a"].parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    model["b"].requires_grad_(True)
    model["b"].weight.grad = torch.ones(4, 4)
    before = [p.detach().clone() for p in model.parameters()]
    with refused(ValueError, "a.weight", "b.weight"):
        optimizer.step()
    assert all(map(torch.equal, before, model.parameters()))


@pytest.mark.parametrize("recipe", ["adamw", "soap_fitted"])
def test_parts_of_one_tensor_train_as_tensors_of_their_own(recipe: str) -> None:
    def run(together: bool) -> list[Tensor]:
        whole = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))
        parts = [whole[:3, :5], whole[:3, 5:], whole[3:, ::2], whole[3:, 1::2]]
        parts = parts if together else [part.clone() for part in parts]
        params = [nn.Parameter(part) for part in [*parts, torch.empty(0), torch.ones(())]]
        optimizer = Optimizer([(f"{i}.weight", p) for i, p in enumerate(params)], recipe, lr=0.1)
        for step in range(3):
            for p in params:
                p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(step))
            optimizer.step()
        return [p.detach() for p in params]

    for one, other in zip(run(True), run(False), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)  # sums may be taken in another order


WRITTEN_NOWHERE = {
    "expanded": lambda: torch.ones(4).expand(3, 4),
    "windows": lambda: torch.ones(5).unfold(0, 3, 1),
    "conjugate": lambda: torch.ones(3, dtype=torch.complex64).conj(),
    "negative": lambda: torch.ones(3, dtype=torch.complex64).conj().imag,
}


@pytest.mark.parametrize("case", WRITTEN_NOWHERE)
def test_views_that_cannot_be_written_are_refused_by_name(case: str) -> None:
    with refused(ValueError, "w"):
        Optimizer([("w", nn.Parameter(WRITTEN_NOWHERE[case]()))], "adam")


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr], ids=str)
@pytest.mark.filterwarnings("ignore:Sparse CSR:UserWarning")
def test_a_sparse_parameter_is_left_until_it_has_a_gradient(layout: torch.layout) -> None:
    w, v = nn.Parameter(torch.eye(3).to_sparse(layout=layout)), nn.Parameter(torch.ones(3))
    optimizer = Optimizer([("w", w), ("v", v)], "sgd", lr=0.1)
    v.grad = torch.ones(3)
    optimizer.step()
    torch.testing.assert_close(v.detach(), torch.full((3,), 0.9))
    w.grad = torch.eye(3).to_sparse(layout=layout)
    with refused(TypeError, "w", f"{layout}"):
        optimizer.step()
