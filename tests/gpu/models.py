"""A model with parameters of every role, and an optimizer of it that takes given gradients on any device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

import eigengraft


class LoRA(nn.Module):
    def __init__(self, rank: int) -> None:
        super().__init__()
        self.lora_A, self.lora_B = nn.Linear(8, rank, bias=False), nn.Linear(rank, 8, bias=False)


class Net(nn.Module):
    """Embedding, linear layers of two shapes, norm, convolution, experts, a LoRA pair and a head.

    square: whether all matrices are square, that of the convolution included. The statistic of one gradient has then
        full rank, so that rounding chooses no vector of a basis.
    """

    def __init__(self, square: bool = False) -> None:
        super().__init__()
        words, width = (8, 8) if square else (11, 12)
        self.emb, self.lm_head = nn.Embedding(words, 8), nn.Linear(8, words, bias=False)
        self.fc1, self.fc2, self.fc3 = nn.Linear(8, width), nn.Linear(width, 8), nn.Linear(8, width)
        self.norm, self.conv = nn.LayerNorm(8), nn.Conv2d(1, 4, 2) if square else nn.Conv2d(2, 4, 3)
        self.lora = LoRA(8 if square else 2)
        self.experts = nn.Parameter(torch.randn(3, 6, 6) * 0.1)


def frequent(declaration: Any, every: int = 2) -> Any:
    """A declaration in which refreshes are due every few steps."""
    if isinstance(declaration, dict):
        often = {"steps": every} if declaration.get("kind") == "every" else {}
        return {key: frequent(value, every) for key, value in declaration.items()} | often
    return [frequent(item, every) for item in declaration] if isinstance(declaration, list) else declaration


def gradients(steps: int, square: bool = False) -> list[list[Tensor]]:
    """Gradients of `Net` on the host: gradients[t][i]."""
    generator = torch.Generator().manual_seed(1)
    shapes = [parameter.shape for parameter in Net(square).parameters()]
    return [[torch.randn(shape, generator=generator) * 0.1 for shape in shapes] for _ in range(steps)]


class Run:
    """A model with its optimizer; place: the device of both. moved: the model moves there after composing."""

    square = False

    def __init__(
        self,
        recipe: str,
        place: torch.device | None = None,
        *,
        dtype: torch.dtype = torch.float32,
        moved: bool = False,
        checked: bool = False,
        changes: Sequence[str] = (),
        **overrides: Any,
    ) -> None:
        torch.manual_seed(0)
        self.model, self.place, self.dtype = Net(self.square).to(dtype), place or torch.device("cpu"), dtype
        if not moved:
            self.model.to(self.place)
        declaration = frequent(eigengraft.load_recipe(recipe, changes).model_dump(mode="json")) | overrides
        self.optimizer = eigengraft.compose(declaration, self.model, lr=1e-2, weight_decay=0.1, checked=checked)
        self.model.to(self.place)

    def give(self, gradients: list[Tensor]) -> None:
        for parameter, gradient in zip(self.model.parameters(), gradients, strict=True):
            parameter.grad = gradient.to(self.place, self.dtype)

    def step(self, *steps: list[Tensor]) -> None:
        for given in steps:
            self.give(given)
            self.optimizer.step()

    def adopt(self, other: Run) -> None:
        """Take over parameters and state of a run that may be on another device, as a checkpoint on the host."""
        self.model.load_state_dict({key: value.cpu() for key, value in other.model.state_dict().items()})
        self.optimizer.load_state_dict(on_host(other.optimizer.state_dict()))

    def values(self) -> list[Tensor]:
        return [parameter.detach().cpu() for parameter in self.model.parameters()]


class SquareRun(Run):
    """A run of the model with square matrices."""

    square = True


def on_host(state: Any) -> Any:
    """A state dict with all tensors on the host."""
    if isinstance(state, Tensor):
        return state.detach().cpu()
    if isinstance(state, dict):
        return {key: on_host(value) for key, value in state.items()}
    return [on_host(value) for value in state] if isinstance(state, list) else state


def largest_difference(one: Run, other: Run) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(one.values(), other.values(), strict=True))


def rounding(steps: Sequence[list[Tensor]], run: Run, recipe: str, **options: Any) -> float:
    """How far errors of rounding may take a run in float32 on a CPU, after these steps.

    Measured as the distance to the same run in float64. Where a statistic is singular, its null space has no basis of
    its own, so that rounding alone may change a step by a tenth. Where products are in bfloat16, both runs round them
    alike, and the distance is a quarter of a unit of bfloat16 at least, as a share of the way that parameters went.
    """
    exact, start = type(run)(recipe, dtype=torch.float64, **options), type(run)(recipe, **options)
    low = "bfloat16" in start.optimizer.recipe.model_dump_json()
    way = largest_difference(run, start) * 2**-10 if low else 0.0
    exact.step(*steps)
    return max(way, largest_difference(run, exact))
