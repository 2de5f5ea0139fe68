"""What stages do in one step, measured while they do it: directions, and what storage keeps of what is written."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from eigengraft.slots import State, Watch


class Sample(NamedTuple):
    """Sums of one measure over some rows of a stack.

    stage, slot, measure: what is measured.
    rows: rows of the stack, a slice or their numbers; None: all of them.
    mask: `[n]`, rows whose state the step writes; None: all of them.
    sums: `[n, 3]` float64, numbers a, b, c of a / sqrt(b c) for each row.
    """

    stage: str
    slot: str
    measure: str
    rows: slice | Tensor | None
    mask: Tensor | None
    sums: Tensor


class StepWatch(Watch):
    """Measures what stages of one stack return and write during one step; changes nothing.

    update_rms: root mean square of a direction; of a chain that of its last stage.
    cosine: cosine of the direction and the gradient that the stage was given.
    storage_error: ||stored - written||_F / ||written||_F of a coded slot, where it was written last.
    """

    def __init__(self, inner: Watch | None) -> None:
        """inner: what follows the step as well."""
        self.inner = inner
        self.samples: dict[tuple[str, str, str, tuple[int, ...] | None], Sample] = {}
        self._calls: list[tuple[State, Mapping[str, Tensor]]] = []
        self._given: tuple[weakref.ref[Tensor], Tensor] | None = None

    def loaded(self, key: str, value: Tensor) -> None:
        if self.inner is not None:
            self.inner.loaded(key, value)

    def storing(self, key: str, value: object, rows: int, dtype: torch.dtype) -> None:
        if self.inner is not None:
            self.inner.storing(key, value, rows, dtype)

    def stored(self, state: State, name: str, value: Tensor) -> None:
        if self.inner is not None:
            self.inner.stored(state, name, value)
        kept = state.decoded(name)
        if kept is not None:
            error, written = _wide(kept - value), _wide(value)
            square = _dot(error, error)
            self._add(state, state.path, (name, "storage_error"), (square, square, _dot(written, written)))

    @contextmanager
    def call(self, what: str, inputs: Mapping[str, Tensor], state: State) -> Iterator[None]:
        self._calls.append((state, inputs))
        try:
            with nullcontext() if self.inner is None else self.inner.call(what, inputs, state):
                yield
        finally:
            self._calls.pop()

    def returned(self, value: object, direction: Tensor) -> None:
        if self.inner is not None:
            self.inner.returned(value, direction)
        if not isinstance(value, Tensor):
            return
        state, inputs = self._calls[-1]
        update, gradient = _wide(value), _wide(inputs["gradient"])
        square, product = _dot(update, update), _dot(update, gradient)
        squares = self._squares(inputs["gradient"], gradient)
        paths = (state.path, *([] if len(self._calls) > 1 else [state.path.rpartition(".")[0]]))
        for path in paths:  # outside of all stages the last direction that returns is that of the chain
            self._add(state, path, ("", "update_rms"), (square, square, torch.full_like(square, update.shape[1])))
            self._add(state, path, ("", "cosine"), (product, square, squares))

    def _squares(self, gradient: Tensor, wide: Tensor) -> Tensor:
        """`[N]`: sums of squares, made once for all stages that are given the same gradient; wide: in float64."""
        if self._given is None or self._given[0]() is not gradient:
            self._given = weakref.ref(gradient), _dot(wide, wide)
        return self._given[1]

    def _add(self, state: State, path: str, what: tuple[str, str], sums: tuple[Tensor, Tensor, Tensor]) -> None:
        """Keeps a sample, as the last; an earlier one of the same rows is forgotten."""
        (slot, measure), rows = what, state.rows
        place = tuple(rows.tolist()) if isinstance(rows, Tensor) else rows and (rows.start, rows.stop)
        sample = Sample(path, slot, measure, rows, state.mask, torch.stack(sums, -1))
        self.samples.pop((path, slot, measure, place), None)
        self.samples[path, slot, measure, place] = sample


def _wide(x: Tensor) -> Tensor:
    """The entries of each block in float64, `[N, *block] -> [N, n]`."""
    return x.flatten(1).double() if x.ndim > 1 else x[:, None].double()


def _dot(x: Tensor, y: Tensor) -> Tensor:
    """`[N, n] -> [N]`: the sum of products of entries, without a tensor for the products."""
    return torch.bmm(x.unsqueeze(1), y.unsqueeze(2)).flatten()
