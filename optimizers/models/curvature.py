"""The signal `hessian_diagonal`: estimators of the Hessian's diagonal that a training loop calls every few steps."""

from __future__ import annotations

import operator
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
from .arguments import described, require_optimizer

_NAME = "hessian_diagonal"
PROBES = 1 << 34
"""Index of the first random stream for probes, larger than the index of any other random stream of the library."""


@kept_from_compiler
def hutchinson(optimizer: Optimizer, loss: Callable[[], Tensor], samples: int = 1) -> bool:
    """Provide D = mean of u * (H u), an estimate of the diagonal of H, to the next step.

    H is the Hessian of the loss, and the probes u are tensors of random signs. This is Hutchinson's estimator as in
    Sophia-H (Liu et al. 2023, arXiv:2305.14342, algorithm 1) and AdaHessian. D is unbiased, and exact for a diagonal H.
    Every rank calls the function with the loss of its own batch, and D is the mean over ranks. All ranks draw the same
    probes. If the optimizer was composed with its model, the buffers of the model are restored.

    Args:
        optimizer: the optimizer that receives the signal.
        loss: function that runs a forward and returns the loss, without a backward. The loss must be differentiable
            twice (for attention, use `torch.nn.attention.sdpa_kernel(SDPBackend.MATH)`).
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
    """Provide D = count G * G, an estimate of the diagonal of the Gauss-Newton matrix, to the next step.

    G is the gradient of the mean loss over `count` examples, with labels that are drawn from the model's distribution.
    This is the Gauss-Newton-Bartlett estimator of Sophia-G (Liu et al. 2023, arXiv:2305.14342, algorithm 2). D is
    unbiased and never negative. Every rank calls the function with its own batch, and D is the mean over ranks. If the
    optimizer was composed with its model, the buffers of the model are restored.

    Args:
        optimizer: the optimizer that receives the signal.
        loss: function that runs a forward, draws a label for each example from the model's distribution, and returns
            the mean of the labels' negative log-likelihoods, without a backward.
        count: number of examples in the mean.

    Returns:
        True if a stage requests the signal. If none does, `loss` is not called.

    Raises:
        ValueError: the loss does not depend on the parameters, or a parameter is a DTensor.
    """
    _require("gauss_newton_bartlett", optimizer, loss, count=count)
    if count < 1:
        raise ValueError(f"gauss_newton_bartlett: `count` (examples in the mean) must be at least 1, got {count}")

    def estimate(parameters: Sequence[Tensor], names: Sequence[str]) -> list[Tensor]:
        gradients = _gradients("gauss_newton_bartlett", loss(), parameters, names)
        pairs = zip(gradients, parameters, strict=True)
        return [torch.zeros_like(p) if g is None else count * g.square() for g, p in pairs]

    return _provide("gauss_newton_bartlett", optimizer, estimate)


def _require(who: str, optimizer: Optimizer, loss: Callable[[], Tensor], **integers: int) -> None:
    """Raise TypeError for arguments of a wrong type.

    who: name of the public function, for the message.
    integers: arguments that must be integers, by name.
    """
    require_optimizer(who, optimizer)
    if not callable(loss):
        raise TypeError(f"{who}: loss must be a function that returns the loss, got {described(loss)}")
    for name, value in integers.items():
        try:
            operator.index(value)
        except TypeError:
            raise TypeError(f"{who}: {name} must be an integer, got {described(value)}") from None


def _gradients(
    who: str, loss: Tensor, parameters: Sequence[Tensor], names: Sequence[str], create_graph: bool = False
) -> Sequence[Tensor | None]:
    """Return the gradients of a loss, with None for parameters that the loss does not depend on.

    who: name of the public function, for errors.
    parameters: the trained parameters.
    names: names of the parameters, for errors.
    create_graph: True if the gradients are differentiated too.

    Raises:
        TypeError: the loss is no tensor.
        ValueError: there are no trained parameters, or the loss is no number or depends on none of them.
    """
    if not parameters:
        raise ValueError(f"{who}: no parameter of the optimizer has `requires_grad`, so there is nothing to estimate")
    if not isinstance(loss, Tensor):
        raise TypeError(f"{who}: the function `loss` must return a tensor, got {described(loss)}")
    if loss.numel() != 1:
        raise ValueError(f"{who}: the function `loss` must return one number, got shape {tuple(loss.shape)}")
    if not loss.requires_grad:
        raise ValueError(
            f"{who}: the loss has no gradient; the function `loss` must run the model's forward pass itself, without "
            "`no_grad` or `detach`"
        )
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
    """Estimate curvature for the trained parameters whose update requests it as a signal, and provide the mean over
    ranks.

    Return False, without an estimate, if no update requests the signal.

    who: name of the public function, for errors.
    estimate: function of parameters and their names that returns a tensor for each parameter.
    """
    signals = optimizer.param_sets.signals
    if _NAME not in signals.asking:
        return False
    takers = signals.takers(_NAME, optimizer.param_sets.rows())
    rows = [row for param_set in optimizer.param_sets for row in _rows(who, param_set, takers)]
    parameters, names = [parameter for _, _, parameter in rows], [name for _, name, _ in rows]
    buffers = Buffers.of(optimizer.known_model)
    try:
        with torch.enable_grad(), signals.pause():
            found = estimate(parameters, names)
    finally:
        buffers.restore(buffers.written())
    for param_set in optimizer.param_sets:
        _average(param_set, [value for (own, _, _), value in zip(rows, found, strict=True) if own is param_set], who)
    return optimizer.provide(_NAME, dict(zip(parameters, found, strict=True)))


def _rows(who: str, param_set: ParamSet, takers: set[int]) -> Iterator[tuple[ParamSet, str, Tensor]]:
    """Yield (parameter set, name, parameter) for the parameters of a set for which curvature is estimated.

    who: name of the public function, for errors.
    takers: ids of the parameters whose update requests the estimate.
    """
    for name, parameter in zip(param_set.names, param_set.parameters, strict=True):
        if id(parameter) in takers and parameter.requires_grad:
            if is_dtensor(parameter):
                raise ValueError(
                    f"{who}: {name} is a DTensor, and only plain tensors are supported; provide the signal "
                    f"with optimizer.provide('{_NAME}', ...)"
                )
            yield param_set, name, parameter


def _average(param_set: ParamSet, tensors: Sequence[Tensor], who: str) -> None:
    """Replace tensors by their mean over ranks, in place. All ranks that share the parameters must call it.

    tensors: estimates for parameters of the set; equal shapes on all ranks.
    who: name of the public function, for errors.
    """
    if param_set.rank_group is None or not tensors:
        return
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    flat = param_set.rank_group.all_ranks.mean(flat, f"{who} of {param_set.names[0]}")
    for tensor, mean in zip(tensors, torch.split(flat, [tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(mean.view(tensor.shape))


def _signs(like: Tensor, name: str, step: int, sample: int) -> Tensor:
    """Return random signs with the shape of a tensor. Equal names, steps and samples give equal signs.

    like: the tensor whose shape, dtype and device the result has.
    name: name of the parameter.
    step: number of steps before this one.
    sample: index of the probe among the probes of this step.
    """
    seed = zlib.crc32(name.encode())
    seeds, steps = (torch.full((1,), one, dtype=torch.int64, device=like.device) for one in (seed, step))
    drawn = uniform(seeds, steps, tuple(like.shape), torch.float32, PROBES + sample)[0]
    return signs(drawn - 0.5).to(like.dtype)


def _products(
    gradients: Sequence[Tensor | None], parameters: Sequence[Tensor], probes: Sequence[Tensor]
) -> Sequence[Tensor]:
    """Return the product H u of Hessian and probes for each parameter.

    gradients: gradients with a graph; None for a gradient that does not depend on the parameters.
    probes: the probe u of each parameter.
    """
    rows = [(g, u) for g, u in zip(gradients, probes, strict=True) if g is not None]
    if not rows:
        return [torch.zeros_like(parameter) for parameter in parameters]
    curved, given = zip(*rows, strict=True)
    found: Sequence[Tensor | None] = torch.autograd.grad(
        curved, parameters, given, retain_graph=True, allow_unused=True
    )
    return [torch.zeros_like(p) if x is None else x for p, x in zip(parameters, found, strict=True)]
