"""One stage and its state, without an optimizer: what the laws of preconditioners are tried on."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from eigengraft import Stage, State, StepContext
from eigengraft.component import checked
from eigengraft.preconditioners import chain_slots, walk

from ..trajectories import normal
from .rows import Row

STEPS = 14


class Recorder(dict[str, Tensor]):
    """State tensors that remember which of them were asked for."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        super().__init__(tensors)
        self.used: set[str] = set()

    def __getitem__(self, key: str) -> Tensor:
        self.used.add(key)
        return super().__getitem__(key)


class Bench:
    """N blocks of one shape with a stage's state. counts: gradients that each block has seen."""

    def __init__(self, row: Row, block: tuple[int, ...], blocks: int, dtype: torch.dtype = torch.float64) -> None:
        self.row, self.block, self.blocks, self.dtype = row, block, blocks, dtype
        self.stage: Any = checked(Stage, dict(row.make))  # type: ignore[type-abstract]
        self.declared = {f"{path}/{name}": slot for path, name, slot in chain_slots((self.stage,), block)}
        cpu = torch.device("cpu")
        self.tensors = Recorder({key: slot.allocate(blocks, dtype, cpu) for key, slot in self.declared.items()})
        self.counts = np.zeros(blocks, dtype=np.int64)
        self.phases = np.arange(blocks) / blocks
        self.seeds = np.arange(blocks) * 7919 - 11
        self.parameter_rms = torch.linspace(0.5, 1.5, blocks, dtype=dtype)
        self.lagging = any(stage.lagged() for _, stage in walk((self.stage,)))

    def step(
        self, gradient: Tensor, direction: Tensor | None = None, rows: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensor:
        """One step of the selected rows; the first of a lagged stage only primes and returns zero."""
        chosen = np.arange(self.blocks) if rows is None else rows.numpy()
        self.counts[chosen] += 1
        state = State(self.tensors, self.block, self.stage.label, rows, mask)
        context = self.context(chosen)
        if self.lagging and (context.steps == 0).any():
            assert (context.steps == 0).all()
            self.stage.prime(state, gradient, context)
            return torch.zeros_like(gradient)
        result = self.stage.run(state, gradient, gradient if direction is None else direction, context)
        assert isinstance(result, Tensor)
        return result

    def context(self, chosen: Any) -> StepContext:
        signals = {"lr": 0.1, "parameter_rms": self.parameter_rms[chosen]}
        steps = self.counts[chosen] - int(self.lagging)
        return StepContext(steps, self.phases[chosen], chosen, seeds=self.seeds[chosen], signals=signals)

    def run(self, gradients: Tensor) -> Tensor:
        """gradients `[T, N, *block]` -> the directions, of the same shape."""
        return torch.stack([self.step(gradient) for gradient in gradients])

    def copy(self) -> "Bench":
        twin = Bench(self.row, self.block, self.blocks, self.dtype)
        for key, tensor in self.tensors.items():
            twin.tensors[key] = tensor.clone()
        twin.counts = self.counts.copy()
        return twin

    def only(self, block: int) -> "Bench":
        """A bench for one block of this one, fresh."""
        alone = Bench(self.row, self.block, 1, self.dtype)
        alone.phases, alone.parameter_rms = self.phases[block : block + 1], self.parameter_rms[block : block + 1]
        alone.seeds = self.seeds[block : block + 1]
        return alone


def gradients(block: tuple[int, ...], blocks: int = 3, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    """`[STEPS, blocks, *block]`, standard normal."""
    return normal(STEPS, blocks, *block, seed=seed + sum(block), dtype=dtype)


def difficult(block: tuple[int, ...]) -> Iterator[tuple[str, Tensor]]:
    """Gradients that are hard on numbers, float32."""
    base = gradients(block, dtype=torch.float32)
    yield "zero", torch.zeros_like(base)
    yield "huge", base * 1e12
    yield "tiny", base * 1e-30
    yield "denormal", base * 1e-42
    yield "mixed", base * torch.tensor([1e12, 1e-30, 1.0]).reshape(1, 3, *[1] * len(block))
    yield "one entry", torch.zeros_like(base).index_fill_(-1, torch.tensor([0]), 1.0)
    flat = base.flatten(2)
    yield "constant", (flat[..., :1] * flat[:1, :1]).reshape(base.shape)
    yield "suddenly zero", torch.cat([base[:5], torch.zeros_like(base[5:])])
    yield "suddenly huge", torch.cat([base[:5], base[5:] * 1e12])
    if len(block) == 2:
        yield "rank one", base[..., :1] * base[..., :1, :]
        yield "one and the same", base[:1].expand_as(base)
