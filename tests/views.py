"""Matrices of a parameter, selected index by index, for tests of views."""

import itertools

import torch
from torch import Tensor

from eigengraft.blocking import Matrices


def matrices_by_hand(x: Tensor, view: Matrices) -> list[Tensor]:
    """The matrices of a parameter: sections, in each the batch, in each the groups and heads."""
    cut = view.axis(tuple(x.shape))
    period, start, found = x.shape[cut] // view.groups, 0, []
    for part, head in zip(view.parts(tuple(x.shape)), view.head_lengths, strict=True):
        rows = [range(start + group * period, start + group * period + part) for group in range(view.groups)]
        heads = [list(some[k : k + head]) for some in rows for k in range(0, part, head)] if head else []
        own = heads or [list(itertools.chain(*rows))]
        start += part
        for index in itertools.product(*map(range, x.shape[: view.batch])):
            for chosen in own:
                matrix = x[index].index_select(cut - view.batch, torch.tensor(chosen))
                found.append((matrix.movedim(-1, 0) if view.outputs == "last" else matrix).contiguous())
    return found
