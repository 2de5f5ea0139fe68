"""Updates of entries of parameters, as they travel from where they are computed to the write."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import compress
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray
from torch import Tensor


class EntryUpdates(NamedTuple):
    """n updates, in three columns: no object is made for each of the many parameters of a stack.

    positions: `[n]`, position of the parameter that each changes.
    entries: the entries that it changes, a view of what this rank holds of the parameter, or all of that.
    values: what they are changed by, of the same shape.
    """

    positions: NDArray[np.int64]
    entries: Sequence[Tensor]
    values: Sequence[Tensor]

    @classmethod
    def of_rows(cls, rows: Iterable[tuple[int, Tensor, Tensor]]) -> Self:
        """The updates (position, entries, value)."""
        found = list(rows)
        positions = np.fromiter((position for position, _, _ in found), np.int64, len(found))
        return cls(positions, [entries for _, entries, _ in found], [value for _, _, value in found])

    @classmethod
    def of_parameters(cls, parameters: Sequence[Tensor], values: Mapping[int, Tensor]) -> Self:
        """Updates of whole parameters, by position, given in any shape."""
        entries = [parameters[position] for position in values]
        fitted = [
            u if u.shape == p.shape else u.reshape(p.shape) for p, u in zip(entries, values.values(), strict=True)
        ]
        return cls(np.fromiter(values, np.int64, len(values)), entries, fitted)

    def chosen(self, rows: NDArray[np.bool_]) -> Self:
        """The updates where `rows` `[n]` is True."""
        if rows.all():
            return self
        entries, values = (list(compress(column, rows.tolist())) for column in (self.entries, self.values))
        return type(self)(self.positions[rows], entries, values)
