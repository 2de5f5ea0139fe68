"""Bases of axes of equal length, which a solver is given together where they are small."""

from typing import Any

import pytest
import torch
from torch import nn

from eigengraft import Optimizer
from eigengraft.preconditioners import PowerQR
from eigengraft.preconditioners.kronecker.base import Factored
from eigengraft.preconditioners.roots import Eigh

from ...trajectories import normal


def trained(
    monkeypatch: pytest.MonkeyPatch, apart: bool = False, storage: Any = None, **fields: Any
) -> tuple[list[torch.Size], list[torch.Tensor]]:
    """Shapes that the solver was given, and the parameters after 6 steps, two of [6, 6, 3, 3] and one of [7, 7]."""
    seen: list[torch.Size] = []
    solved = PowerQR.basis_and_diagonal

    def basis_and_diagonal(self: PowerQR, a: torch.Tensor, q: torch.Tensor, first: bool) -> Any:
        seen.append(a.shape)
        return solved(self, a, q, first)

    with monkeypatch.context() as patched:
        if apart:
            patched.setattr(Factored, "equal_axes", lambda self, state, axes: [[axis] for axis in axes])
        patched.setattr(PowerQR, "basis_and_diagonal", basis_and_diagonal)
        held = [nn.Parameter(normal(*shape, seed=1).float()) for shape in ((6, 6, 3, 3), (6, 6, 3, 3), (7, 7))]
        inner = ["momentum", {"kind": "rms", "beta": 0.95}]
        stage = {"kind": "eigenbasis", "inner": inner, "refresh": {"kind": "every", "steps": 2}, **fields}
        optimizer = Optimizer(held, {"update": [stage], "routes": [], "storage": storage or {}}, lr=0.01)
        for step in range(6):
            for place, parameter in enumerate(held):
                parameter.grad = normal(*parameter.shape, seed=10 * step + place).float()
            optimizer.step()
    return seen, [parameter.detach() for parameter in held]


@pytest.mark.parametrize("transport", ["exact", "permute", "marginals"])
def test_equal_axes_are_solved_in_one_call_with_the_same_bits(transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two axes of a square matrix together are larger than it, and are solved one by one."""
    apart, expected = trained(monkeypatch, apart=True, transport=transport)
    together, found = trained(monkeypatch, transport=transport)
    assert set(apart) == {(2, 6, 6), (2, 3, 3), (1, 7, 7)}
    assert set(together) == {(4, 6, 6), (4, 3, 3), (1, 7, 7)}
    assert 3 * len(together) == 2 * len(apart) > 12
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))


def test_bases_that_are_stored_in_codes_are_solved_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is kept of them, and so what state follows, is the code."""
    seen, _ = trained(monkeypatch, storage={"basis": {"kind": "int8", "min_elements": 1}})
    assert set(seen) == {(2, 6, 6), (2, 3, 3), (1, 7, 7)}


@pytest.mark.parametrize(("recipe", "stage"), [("soap_fitted", "eigenbasis"), ("shampoo", "graft.direction.shampoo")])
def test_squares_of_which_few_are_due_are_solved_in_one_call_with_the_same_bits(
    recipe: str, stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both axes of the 2 of 8 squares that are due at a step are no larger than the 8 squares."""

    def parameters(apart: bool) -> tuple[set[torch.Size], list[torch.Tensor]]:
        seen: list[torch.Size] = []
        of_basis, of_root = PowerQR.basis_and_diagonal, Eigh.root
        with monkeypatch.context() as patched:
            if apart:
                patched.setattr(Factored, "equal_axes", lambda self, state, axes: [[axis] for axis in axes])
            patched.setattr(
                PowerQR, "basis_and_diagonal", lambda own, a, *rest: seen.append(a.shape) or of_basis(own, a, *rest)
            )
            patched.setattr(Eigh, "root", lambda own, a, power: seen.append(a.shape) or of_root(own, a, power))
            held = [nn.Parameter(normal(8, 8, seed=place).float()) for place in range(8)]
            refresh = [f"update.{stage}.refresh.{change}" for change in ("steps=4", "min_wave_work=1")]
            optimizer = Optimizer(held, recipe, lr=0.01, overrides=["routes=[]", *refresh])
            for step in range(9):
                for place, parameter in enumerate(held):
                    parameter.grad = normal(8, 8, seed=100 + 10 * step + place).float()
                optimizer.step()
        return {*seen[-4:]}, [parameter.detach() for parameter in held]

    apart, expected = parameters(apart=True)
    together, found = parameters(apart=False)
    assert (apart, together) == ({(2, 8, 8)}, {(4, 8, 8)})
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))
