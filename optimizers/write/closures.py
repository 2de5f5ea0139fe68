"""Steps that call their closure several times.

`SharpnessAware` needs gradients at perturbed parameters, and `LineSearch` needs the losses after trial steps.

All calls in one step evaluate the same function, and together have the side effects of one call (`Passes`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any, Self

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from eigengraft.component import Component
from eigengraft.numerics import fake_mode, is_dtensor, local

BufferName = tuple[nn.Module, str]
"""A module, and the name of a buffer of this module."""


class Passes:
    """Calls the closure several times in one step, each time with the same buffers and the same random numbers.

    Dropout draws the same masks in all calls, and `spectral_norm` iterates from the same vectors. After the calls,
    buffers and random numbers are as the first call left them. Therefore BatchNorm's statistics advance once in each
    step, from the forward at W, as in the official code of SAM (google-research/sam, `get_sam_gradient`). Buffers that
    no call writes into are not copied back.

    closure: function that computes gradients and returns the loss.
    model: model whose buffers are restored. None: no buffers are restored.
    parameters: tensors on the devices whose random number generators are restored. The generator of the CPU is
        restored too. If there are no tensors, the closure may be called only once.
    """

    def __init__(self, closure: Callable[[], Any], model: nn.Module | None, parameters: Iterable[Tensor]) -> None:
        self._closure, self._model = closure, model
        devices = {parameter.device for parameter in parameters}
        self._repeats = bool(devices)
        self._devices = [  # the device of a fake tensor may not exist here
            device
            for device in devices
            if device.type not in ("cpu", "meta") and torch.get_device_module(device).is_available()
        ]
        self._start: tuple[Buffers, list[Tensor]] | None = None

    def first(self) -> Any:
        """Call the closure for the first time in this step, and return its result."""
        if self._repeats:
            self._start = Buffers.of(self._model), self._random_states()
        return self._call()

    def again(self) -> Any:
        """Call the closure again, with the buffers and random numbers of the first call, and return its result."""
        assert self._start is not None
        buffers, random = self._start
        written = buffers.written()
        after, random_after = Buffers(written), self._random_states()
        buffers.restore(written)
        self._set_random_states(random)
        try:
            return self._call()
        finally:
            after.restore(written)
            self._set_random_states(random_after)

    def _random_states(self) -> list[Tensor]:
        """Return the states of the random number generators: that of the CPU, and the default one of each device."""
        states = [torch.get_device_module(device).get_rng_state(*_at(device)) for device in self._devices]
        return [torch.get_rng_state(), *states]

    def _set_random_states(self, states: Sequence[Tensor]) -> None:
        torch.set_rng_state(states[0])
        for device, state in zip(self._devices, states[1:], strict=True):
            torch.get_device_module(device).set_rng_state(state, *_at(device))

    def _call(self) -> Any:
        with torch.enable_grad():
            return self._closure()


def require_closure(closure: object, repeated_by: str | None, scaled: bool) -> None:
    """Check the closure of a step.

    Raises RuntimeError if there is no closure and a part of the recipe calls it again, or if a `GradScaler` has scaled
    gradients and a closure is called. Raises TypeError if the closure cannot be called.

    repeated_by: field of the recipe that calls the closure again, `sam` or `line_search`. None: no field calls it
        again.
    scaled: True if the gradients are those of a `GradScaler`.
    """
    if scaled and (closure is not None or repeated_by is not None):
        found = "a closure" if repeated_by is None else f"`{repeated_by}`, which calls a closure again,"
        raise RuntimeError(
            f"Optimizer.step: {found} cannot be combined with a GradScaler, which unscales and checks the gradients "
            "that exist before the call; train in bfloat16, which needs no scaler"
        )
    if closure is None and repeated_by is not None:
        times = "twice" if repeated_by == "sam" else "again"
        raise RuntimeError(
            f"Optimizer.step: `{repeated_by}` needs a closure, which it calls {times}, got none; call step(closure) "
            "with a function that computes the loss and its gradients, and returns the loss"
        )
    if closure is not None and not callable(closure):
        raise TypeError(f"Optimizer.step: the closure must be a function that returns the loss, got {closure!r:.60}")


class Buffers:
    """A record of buffers by module and name: for each buffer its tensor object and a copy of its values."""

    def __init__(self, names: Sequence[BufferName]) -> None:
        self._tensors = {(module, name): module._buffers[name] for module, name in names}
        self._versions = {key: _version(tensor) for key, tensor in self._tensors.items()}
        self._values = {key: None if x is None else torch.empty_like(x) for key, x in self._tensors.items()}
        _copy((self._values[key], self._tensors[key]) for key in self._tensors)

    @classmethod
    def of(cls, model: nn.Module | None) -> Self:
        """Return a record of the buffers of all modules of a model. The record is empty if the model is None."""
        modules = () if model is None else model.modules()
        return cls([(module, name) for module in modules for name, kept in module._buffers.items() if kept is not None])

    def written(self) -> list[BufferName]:
        """Return the buffers whose values may have changed.

        Kernels of normalization layers write into buffers without raising the version counters. Buffers of these layers
        therefore always count as changed.
        """
        found = []
        for key, tensor in self._tensors.items():
            now = key[0]._buffers.get(key[1])
            if isinstance(key[0], _NormBase) or now is not tensor or _version(now) != self._versions[key]:
                found.append(key)
        return found

    def restore(self, names: Iterable[BufferName]) -> None:
        """Assign the recorded tensors to the modules again, with their recorded values."""
        for key in (names := list(names)):
            key[0]._buffers[key[1]] = self._tensors[key]
        _copy((self._tensors[key], self._values[key]) for key in names)


def _copy(pairs: Iterable[tuple[Tensor | None, Tensor | None]]) -> None:
    """Copy the second tensor of each pair into the first, in one launch for each device and dtype.

    Pairs with None, which stands for a buffer that is None, are passed over.

    Version counters are not raised. Otherwise autograd would report an error for tensors that it has saved for
    backward. This is safe for the statistics of normalization layers: backward uses them only in evaluation mode, in
    which they do not change.
    """
    kinds: dict[tuple[torch.device, torch.dtype], list[tuple[Tensor, Tensor]]] = {}
    for to, values in pairs:
        if to is not None and values is not None:
            kinds.setdefault((to.device, to.dtype), []).append((local(to).data, local(values)))
    for kind in kinds.values():
        torch._foreach_copy_([x for x, _ in kind], [y for _, y in kind])


def _version(tensor: Tensor | None) -> int | None:
    """Return torch's version counter of a tensor; None for None and for tensors made in inference mode."""
    return None if tensor is None or tensor.is_inference() else tensor._version


def _at(device: torch.device) -> tuple[torch.device, ...]:
    """Return the arguments that select a device's generator. MPS has one device, and its functions take no argument."""
    return () if device.type == "mps" else (device,)


class SharpnessAware(Component):
    """g <- gradient at W + E,  E = rho G / ||G||  with G the gradient at W, and norms over all parameters.

    Sharpness-aware minimization, SAM (Foret et al. 2021, arXiv:2010.01412, equation 2), with any update: chain, decay
    and write use only g and W. G and g are gradients of the same function: dropout has the same masks. If the optimizer
    was composed with the model, buffers such as BatchNorm's statistics are those after the first forward.
    With `adaptive`, E = rho W^2 G / ||W G||, entry by entry (ASAM, Kwon et al. 2021, arXiv:2102.11600, algorithm 1),
    which does not depend on the scale of parameters. If G has entries that are not finite, E is 0.
    """

    rho: float = Field(default=0.05, gt=0, description="length of E; with `adaptive`, of E / |W|")
    adaptive: bool = Field(default=False, description="true: E is relative to the size of each entry of W")

    @contextmanager
    def perturbed(self, parameters: Iterable[Tensor]) -> Iterator[None]:
        """Enter a context in which the parameters hold W + E and have no gradients.

        After the context the parameters hold W again, bit for bit.
        """
        moved = [parameter for parameter in parameters if parameter.grad is not None]
        gradients = [aligned_gradient(parameter) for parameter in moved]
        saved = [parameter.detach().clone() for parameter in moved]
        scaled = [g * w.abs() for g, w in zip(gradients, saved, strict=True)] if self.adaptive else gradients
        norm = _norm(scaled)
        scale = torch.where(norm.isfinite() & (norm > 0), self.rho / norm, 0.0)
        try:
            for parameter, own, start in zip(moved, scaled, saved, strict=True):
                towards = local(own * start.abs() if self.adaptive else own)
                step = towards * scale.to(towards.device, towards.dtype)
                local(parameter.detach()).add_(torch.where(step.isfinite(), step, 0.0))
                parameter.grad = None
            yield
        finally:
            for parameter, start in zip(moved, saved, strict=True):
                local(parameter.detach()).copy_(local(start))


def aligned_gradient(parameter: Tensor) -> Tensor:
    """Return the gradient of a parameter, with the placements of the parameter if both are DTensors."""
    gradient = parameter.grad
    assert gradient is not None
    if is_dtensor(gradient) and is_dtensor(parameter):
        return gradient.redistribute(placements=parameter.placements)
    return gradient


def _norm(tensors: Sequence[Tensor]) -> Tensor:
    """Return the Frobenius norm of all tensors together, 0-d float64. For DTensors, all shards are included."""
    groups: dict[Any, list[Tensor]] = {}
    for tensor in tensors:
        key = (tensor.device_mesh, tensor.placements) if is_dtensor(tensor) else None
        groups.setdefault((key, tensor.device, tensor.dtype), []).append(tensor)
    squares = []
    for own in groups.values():
        norm = torch.nn.utils.get_total_norm(own)
        squares.append((norm.full_tensor() if is_dtensor(norm) else norm).double().square())
    return (
        torch.stack([square.to(squares[0].device) for square in squares]).sum().sqrt()
        if squares
        else torch.zeros((), dtype=torch.float64, device="cpu")
    )


SCALE = "step_scale"
"""Key of param groups for the fraction s of the whole step that the last line search accepted."""
Average = Callable[[Tensor], Tensor]
"""A function that returns the mean over all ranks of a number of this rank."""
Start = Sequence[tuple[Tensor, Tensor]]
"""Pairs (parameter that has a gradient, copy of this rank's entries of that parameter before the step)."""


class LineSearch(Component):
    """W <- W - s D  with the first s of s_0, shrink s_0, shrink^2 s_0, ... for which
    f(W - s D) <= f(W) - sufficient s max(<G, D>, 0)

    Armijo's condition with backtracking, on the batch of the step (Vaswani et al. 2019, arXiv:1905.09997, equation 1
    and Algorithm 1). D is the whole step of the recipe at its learning rate, including decay. G is the gradient, and f
    is the loss that the closure returns, averaged over ranks. s_0 = min(1, grow s'), where s' is the fraction accepted
    in the previous step. The learning rate is thus the largest step, and schedules may change it. A loss that is not
    finite does not satisfy the condition. After `trials` calls the last s is used. Every trial calls the closure, and
    its gradients are dropped. All calls evaluate the same function: dropout has the same masks. If the optimizer was
    composed with the model, buffers such as BatchNorm's statistics are those after the first forward. If a call raises
    an error, parameters, gradients and step counts are set back to those before the step, but statistics and moments
    are not: they have been updated with the gradient.
    """

    sufficient: float = Field(default=0.1, ge=0, lt=1, description="fraction of the decrease along G that is required")
    shrink: float = Field(default=0.5, gt=0, lt=1, description="factor from one trial s to the next")
    grow: float = Field(
        default=2.0, ge=1, description="largest ratio of the first trial s to the s of the previous step"
    )
    trials: int = Field(default=10, ge=1, description="largest number of calls of the closure after the step")

    def require_line(self, parts: Mapping[str, bool]) -> None:
        """Raise ValueError if a part of the recipe moves parameters off the line from W to W - D.

        parts: by name of each part that moves parameters off the line, True if the recipe has it.
        """
        what = next((name for name, there in parts.items() if there), None)
        if what is not None:
            raise ValueError(
                f"line_search: cannot be combined with `{what}`, which moves parameters off the line that is searched; "
                "remove one of the two"
            )

    def begin(self, parameters: Iterable[Tensor]) -> Start:
        """Return each parameter that has a gradient, with a copy of its values. Called before the step."""
        return [(p, local(p.detach()).clone()) for p in parameters if p.grad is not None]

    def finish(
        self, start: Start, passes: Passes, loss: Any, groups: Sequence[MutableMapping[str, Any]], average: Average
    ) -> None:
        """Shorten the step until Armijo's condition holds, and store the accepted fraction in the param groups.

        With fake tensors, which have no values, the whole step is kept. If a trial raises an error, parameters and
        gradients are set back to those before the step.

        start: result of `begin` before the step.
        passes: the calls of the closure in this step.
        loss: loss before the step, of this rank.
        groups: param groups.
        average: function that averages losses over ranks.
        """
        if any(fake_mode(parameter) is not None for parameter, _ in start):
            return
        gradients = [parameter.grad for parameter, _ in start]
        try:
            scale = self._search(start, passes, loss, groups, average)
        except BaseException:
            for parameter, before in start:
                local(parameter.detach()).copy_(before)
            raise
        finally:
            for (parameter, _), gradient in zip(start, gradients, strict=True):
                parameter.grad = gradient
        for group in groups if scale is not None else ():
            group[SCALE] = scale

    def _search(
        self, start: Start, passes: Passes, loss: Any, groups: Sequence[MutableMapping[str, Any]], average: Average
    ) -> float | None:
        """Shorten the step, and return the accepted fraction. The gradients are then those of the last trial.

        Return None if the step changed no parameter, or if the loss before the step is not finite: the whole step is
        then kept.

        The arguments are those of `finish`.
        """
        ends = [local(parameter.detach()).clone() for parameter, _ in start]
        slope, length = _products(start, ends)
        highest = average(_number(loss, ends))
        if not (length > 0 and bool(highest.isfinite())):
            return None
        scale = min(1.0, self.grow * float(groups[0].get(SCALE, 1.0)))
        for trial in range(self.trials):
            scale *= self.shrink if trial else 1.0
            for (parameter, before), end in zip(start, ends, strict=True):
                local(parameter.detach()).copy_(torch.lerp(before, end, scale))
                parameter.grad = None  # a closure that sets gradients to 0 in place must not change those of the step
            found = average(_number(passes.again(), ends))
            if bool(found <= highest - self.sufficient * scale * max(slope, 0.0)):
                break
        return scale


def _products(start: Start, ends: Sequence[Tensor]) -> tuple[float, float]:
    """Return <G, D> and <D, D>, where G is the gradient and D the whole step.

    The products are sums over all entries of all parameters, including shards of other ranks.

    start: parameters, with copies of their entries before the step.
    ends: this rank's entries of the parameters after the whole step.
    """
    sums: dict[Any, Tensor] = {}
    for (parameter, before), end in zip(start, ends, strict=True):
        step, gradient = (before - end).double(), local(aligned_gradient(parameter)).double()
        own = torch.stack([(gradient * step).sum(), step.square().sum()])
        key = (parameter.device_mesh, parameter.placements) if is_dtensor(parameter) else None
        sums[key] = sums[key] + own.to(sums[key].device) if key in sums else own
    wholes = [own if key is None else _whole(own, *key) for key, own in sums.items()]
    if not wholes:
        return 0.0, 0.0
    slope, square = torch.stack([own.to(wholes[0].device) for own in wholes]).sum(0).tolist()
    return slope, square


def _whole(own: Tensor, mesh: Any, placements: Sequence[Any]) -> Tensor:
    """Add numbers, which each rank has computed from its shard of a tensor, over all shards. Return the sums.

    own: numbers that this rank has computed from its shard.
    mesh: mesh of the sharded tensors.
    placements: placements of the sharded tensors.
    """
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    parts = [Partial() if isinstance(placement, Shard) else Replicate() for placement in placements]
    return DTensor.from_local(own, mesh, parts).full_tensor()


def _number(loss: Any, like_these: Sequence[Tensor]) -> Tensor:
    """Return a loss as a 0-d float64 tensor, on the device of the first of `like_these`; on the CPU if it is empty."""
    if not isinstance(loss, (Tensor, float)):
        raise TypeError(f"line_search: the closure must return the loss, a tensor or float, got {type(loss).__name__}")
    device = like_these[0].device if like_these else torch.device("cpu")
    return torch.as_tensor(loss, dtype=torch.float64, device=device).detach().reshape(())
