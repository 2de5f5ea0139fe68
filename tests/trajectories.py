"""Shared by the numerical tests: follow an optimizer along given gradients, and measure how far two paths are apart."""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from eigengraft import Optimizer, load_recipe
from eigengraft.testing.samples import rotation as rotation
from eigengraft.testing.samples import standard_normal as normal

Maker = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]
"""What makes an optimizer from parameters."""


def named(parameters: Iterable[torch.Tensor], first: int = 0) -> list[tuple[str, torch.Tensor]]:
    """Parameters under the names p0, p1, ..., which tell routes that a matrix is neither an embedding nor a head."""
    return [(f"p{first + index}", parameter) for index, parameter in enumerate(parameters)]


def recipe(source: object, *overrides: str, lr: float | None = None, weight_decay: float | None = None) -> Maker:
    """An optimizer from a recipe and overrides."""
    loaded = load_recipe(source, overrides)  # type: ignore[arg-type]
    return lambda parameters: Optimizer(named(parameters), loaded, lr=lr, weight_decay=weight_decay)


def follow(make: Maker, init: Sequence[Tensor], gradients: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """The parameters after every step, `[steps, *shape]` each; gradients[t][i] belongs to parameter i at step t."""
    parameters = [torch.nn.Parameter(x.clone()) for x in init]
    optimizer = make(parameters)
    path: list[list[Tensor]] = [[] for _ in parameters]
    for step in gradients:
        for parameter, gradient in zip(parameters, step, strict=True):
            parameter.grad = gradient.clone()
        optimizer.step()
        for points, parameter in zip(path, parameters, strict=True):
            points.append(parameter.detach().clone())
    return [torch.stack(points) for points in path]


def distance(ours: Sequence[Tensor], theirs: Sequence[Tensor], init: Sequence[Tensor]) -> float:
    """max |ours - theirs| / max |theirs - init|, both over all steps; the worst parameter."""
    ratios = []
    for a, b, start in zip(ours, theirs, init, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape and b.isfinite().all()
        ratios.append(float((a - b).abs().max() / (b - start).abs().max()))
    return max(ratios)


def random_gradients(
    shapes: Sequence[tuple[int, ...]], steps: int, seed: int = 0, dtype: torch.dtype = torch.float64
) -> list[list[Tensor]]:
    """Independent standard normal gradients, gradients[t][i]."""
    seeds = [seed + 1000 * t for t in range(steps)]
    return [[normal(*shape, seed=s + i, dtype=dtype) for i, shape in enumerate(shapes)] for s in seeds]
