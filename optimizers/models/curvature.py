"""The signal `hessian_diagonal`: estimates of the Hessian's diagonal, called by a training loop every few steps."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from eigengraft.errors import name_some
from eigengraft.noise import uniform
from eigengraft.numerics import is_dtensor, signs

from ..isolation import kept_from_compiler
from ..optimizer import Optimizer
from ..signals.signals import steps_taken
from ..step.step import ParamSet
from ..write.closures import Buffers
from .arguments import require_function, require_integer, require_loss, require_optimizer

_NAME = "hessian_diagonal"
PROBES = 1 << 34
"""Index of the first random stream for probes. It is larger than those of all other random numbers."""


@kept_from_compiler
def hutchinson(optimizer: Optimizer, loss: Callable[[], Tensor], samples: int = 1) -> bool:
    """D = mean of u * (H u),  u random signs, H the Hessian of the loss: provided to the next step.

    Hutchinson's estimator as in Sophia-H (Liu et al. 2023, arXiv:2305.14342, algorithm 1) and AdaHessian. It is
    unbiased, and exact for a diagonal H. Every rank calls it with the loss of its own batch, and the result is the mean
    over ranks. The probes u follow from names and steps, so that they are equal on all ranks. Buffers of the model that
    the optimizer was composed with are restored.

    Args:
        optimizer: the optimizer that receives the signal.
        loss: runs a forward and returns the loss, without a backward. It must be differentiable twice (for attention,
            use `torch.nn.attention.sdpa_kernel(SDPBackend.MATH)`).
        samples: number of probes u.

    Returns:
        True if a stage requests the signal. If none does, `loss` is not called.

    Raises:
        ValueError: the loss does not depend on the parameters, a parameter is a DTensor, or `samples` < 1.
    """
    _require("hutchinson", optimizer, loss, samples=samples)
    if samples < 1:
        raise ValueError(f"hutchinson: samples must be at least 1, got {samples}")

    def estimate(parameters: Sequence[Tensor], names: Sequence[str]) -> list[Tensor]:
        gradients = _gradients("hutchinson", loss(), parameters, names, create_graph=True)
        curved = [g if g is not None and g.requires_grad else None for g in gradients]
        total, step = [torch.zeros_like(parameter) for parameter in parameters], steps_taken(optimizer.param_sets)
        for sample in range(samples):
            probes = [_signs(p, name, step, sample) for p, name in zip(parameters, names, strict=True)]
            for mean, u, product in zip(total, probes, _products(curved, parameters, probes), strict=True):
                mean += u * product / samples
        return total

    return _provide("hutchinson", optimizer, estimate)


@kept_from_compiler
def gauss_newton_bartlett(optimizer: Optimizer, loss: Callable[[], Tensor], count: int) -> bool:
    """D = count G * G,  G the gradient of the mean loss of labels that the model draws: provided to the next step.

    The Gauss-Newton-Bartlett estimator of Sophia-G (Liu et al. 2023, arXiv:2305.14342, algorithm 2): an unbiased
    estimate of the diagonal of the Gauss-Newton matrix, never negative. Every rank calls it with its own batch, and the
    result is the mean over ranks. Buffers of the model that the optimizer was composed with are restored.

    Args:
        optimizer: the optimizer that receives the signal.
        loss: runs a forward, draws a label for each example from the model's distribution, and returns the mean of
            their negative log-likelihoods, without a backward.
        count: number of examples in that mean.

    Returns:
        True if a stage requests the signal. If none does, `loss` is not called.

    Raises:
        ValueError: the loss does not depend on the parameters, or a parameter is a DTensor.
    """
    _require("gauss_newton_bartlett", optimizer, loss, count=count)
    if count < 1:
        raise ValueError(f"gauss_newton_bartlett: a count of at least 1 is required, got {count}")

    def estimate(parameters: Sequence[Tensor], names: Sequence[str]) -> list[Tensor]:
        gradients = _gradients("gauss_newton_bartlett", loss(), parameters, names)
        pairs = zip(gradients, parameters, strict=True)
        return [torch.zeros_like(p) if g is None else count * g.square() for g, p in pairs]

    return _provide("gauss_newton_bartlett", optimizer, estimate)


def _require(who: str, optimizer: Optimizer, loss: Callable[[], Tensor], **integers: int) -> None:
    """Raise TypeError for arguments of a wrong type. integers: arguments that must be integers, by name."""
    require_optimizer(who, optimizer)
    require_function(who, loss)
    for name, value in integers.items():
        require_integer(who, name, value)


def _gradients(
    who: str, loss: Tensor, parameters: Sequence[Tensor], names: Sequence[str], create_graph: bool = False
) -> Sequence[Tensor | None]:
    """Return the gradients of a loss, with None for parameters that it does not depend on.

    Raises:
        ValueError: there are no trained parameters, or the loss depends on none of them.
    """
    if not parameters:
        raise ValueError(f"{who}: no parameter has `requires_grad`")
    require_loss(who, loss)
    found: Sequence[Tensor | None] = torch.autograd.grad(loss, parameters, create_graph=create_graph, allow_unused=True)
    if all(gradient is None for gradient in found):
        raise ValueError(
            f"{who}: the loss depends on none of the optimizer's parameters ({name_some(names, 3)}); use the "
            "model that the optimizer was composed with"
        )
    return found


def _provide(
    who: str, optimizer: Optimizer, estimate: Callable[[Sequence[Tensor], Sequence[str]], list[Tensor]]
) -> bool:
    """Estimate the signal for the trained parameters whose update requests it, and provide its mean over ranks."""
    listeners = optimizer.param_sets.signals.listeners
    if _NAME not in listeners.asking:
        return False
    takers = listeners.takers(_NAME, optimizer.param_sets.rows())
    rows = [row for param_set in optimizer.param_sets for row in _rows(who, param_set, takers)]
    parameters, names = [parameter for _, _, parameter in rows], [name for _, name, _ in rows]
    buffers = Buffers.of(optimizer.known_model)
    try:
        with torch.enable_grad(), listeners.pause():
            found = estimate(parameters, names)
    finally:
        buffers.restore(buffers.written())
    for param_set in optimizer.param_sets:
        _average(param_set, [value for (own, _, _), value in zip(rows, found, strict=True) if own is param_set], who)
    return optimizer.provide(_NAME, dict(zip(parameters, found, strict=True)))


def _rows(who: str, param_set: ParamSet, takers: set[int]) -> Iterator[tuple[ParamSet, str, Tensor]]:
    """Yield (parameter set, name, parameter) for the parameters to estimate."""
    for name, parameter in zip(param_set.names, param_set.parameters, strict=True):
        if id(parameter) in takers and parameter.requires_grad:
            if is_dtensor(parameter):
                raise ValueError(
                    f"{who}: {name} is a DTensor, and only replicated parameters are supported; provide the signal "
                    f"with optimizer.provide('{_NAME}', ...)"
                )
            yield param_set, name, parameter


def _average(param_set: ParamSet, tensors: Sequence[Tensor], who: str) -> None:
    """Replace tensors by their mean over ranks, in place."""
    if param_set.rank_group is None or not tensors:
        return
    ranks = param_set.rank_group.all_ranks
    what = f"{who} of {param_set.names[0]}"
    ranks.synchronize(what, device=tensors[0].device)
    flat = ranks.all_reduce(torch.cat([tensor.reshape(-1) for tensor in tensors]), what) / ranks.size
    for tensor, mean in zip(tensors, torch.split(flat, [tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(mean.view(tensor.shape))


def _signs(like: Tensor, name: str, step: int, sample: int) -> Tensor:
    """Return random signs of the shape of a tensor. They follow from name, step and sample."""
    seed = zlib.crc32(name.encode())
    seeds, steps = (torch.full((1,), one, dtype=torch.int64, device=like.device) for one in (seed, step))
    drawn = uniform(seeds, steps, tuple(like.shape), torch.float32, PROBES + sample)[0]
    return signs(drawn - 0.5).to(like.dtype)


def _products(
    gradients: Sequence[Tensor | None], parameters: Sequence[Tensor], probes: Sequence[Tensor]
) -> Sequence[Tensor]:
    """Return H u for each parameter. gradients: None for gradients that do not depend on parameters."""
    rows = [(g, u) for g, u in zip(gradients, probes, strict=True) if g is not None]
    if not rows:
        return [torch.zeros_like(parameter) for parameter in parameters]
    curved, given = zip(*rows, strict=True)
    found: Sequence[Tensor | None] = torch.autograd.grad(
        curved, parameters, given, retain_graph=True, allow_unused=True
    )
    return [torch.zeros_like(p) if x is None else x for p, x in zip(parameters, found, strict=True)]
