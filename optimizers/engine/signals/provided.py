"""Signals as they are provided before a step: checked, and several values of one joined."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

import torch
from torch import Tensor

from eigengraft.chains import SIDES, Signal
from eigengraft.distributed.layouts import local

Given = float | Tensor | Mapping[Tensor, float | Tensor]
"""A signal as it is provided: a number, or numbers or tensors by parameter."""
SignalSource = Callable[[], Given | None]
"""What is asked for a signal in every step; None: there is none in this one."""


class Provided:
    """The values of signals before one step, by name and parameter, and the sources that are asked in every step."""

    def __init__(self) -> None:
        self.sources: dict[str, list[SignalSource]] = {}
        self._kept: dict[str, dict[int | None, tuple[Tensor | float, int]]] = {}

    def add(self, signal: Signal, value: Given, parameters: Iterable[Tensor]) -> None:
        """Joins a value of the required form with those before it, as the signal declares; ValueError if it does not
        fit."""
        kept = self._kept.setdefault(signal.name, {})
        known = {id(parameter): parameter for parameter in parameters}
        for key, one in _by_id(value):
            if key is not None and key not in known:
                raise ValueError(
                    f"provide: parameters of the optimizer are required for '{signal.name}', got another tensor"
                )
            one = one.detach() if isinstance(one, Tensor) else float(one)
            if key is not None:
                _require_shape(signal, known[key], one)
            before, count = kept.get(key, (None, 0))
            joined = torch.maximum if signal.reduce == "max" else torch.add
            kept[key] = (one if before is None else joined(_as_tensor(before), _as_tensor(one)), count + 1)

    def get(self, signal: Signal, parameter: Tensor) -> Tensor | None:
        """What was provided for one parameter, or for all."""
        kept = self._kept.get(signal.name, {}).get(None if signal.extent == "step" else id(parameter))
        if kept is None:
            return None
        value = _as_tensor(kept[0])
        return value / kept[1] if signal.reduce == "mean" and kept[1] > 1 else value

    def clear(self) -> list[str]:
        """Forgets the values, and returns their names; the sources stay."""
        names = [name for name, values in self._kept.items() if values]
        self._kept.clear()
        return names


def require_form(signal: Signal, value: Given) -> None:
    """Raises ValueError for a mapping where one number is required, and the other way round."""
    if (signal.extent == "step") is isinstance(value, Mapping):
        wanted = "a number" if signal.extent == "step" else "a mapping {parameter: value}"
        raise ValueError(f"provide: {wanted} is required for the signal '{signal.name}', got {type(value).__name__}")


def _as_tensor(value: Tensor | float) -> Tensor:
    """A number as float64 on the CPU; a tensor as it is."""
    return value if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64, device="cpu")


def _by_id(value: Given) -> Iterator[tuple[int | None, float | Tensor]]:
    """The numbers of a signal by the id of their parameter; None for the only one."""
    if isinstance(value, Mapping):
        yield from ((id(parameter), one) for parameter, one in value.items())
    else:
        yield None, value


def _require_shape(signal: Signal, parameter: Tensor, value: Tensor | float) -> None:
    found = tuple(value.shape) if isinstance(value, Tensor) else ()
    if signal.extent in SIDES:
        if len(found) < 2 or found[-1] != found[-2]:
            side = SIDES[signal.extent]
            raise ValueError(f"provide: '{signal.name}' takes a square matrix over {side}, got shape {found}")
        return
    if signal.extent == "outputs":
        if len(found) != 1:
            raise ValueError(f"provide: '{signal.name}' takes a tensor with one axis, got shape {found}")
        return
    shape = tuple(parameter.shape) if signal.extent == "entry" else ()
    if found not in {shape, tuple(local(parameter).shape) if signal.extent == "entry" else ()}:
        raise ValueError(f"provide: '{signal.name}' takes a tensor of shape {shape} for this parameter, got {found}")
