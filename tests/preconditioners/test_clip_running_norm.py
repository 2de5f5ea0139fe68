"""Clipping by a running mean of norms, against a definition in float64."""

import pytest
import torch
from torch import Tensor, nn

from eigengraft import Optimizer

FACTOR, BETA, START, STEPS = 1.5, 0.8, 3, 12


def defined(rows: list[Tensor]) -> list[Tensor]:
    """The clipped gradients of one block or parameter, by the docstring's formula."""
    mean, found = 0.0, []
    for step, g in enumerate(rows, 1):
        norm = float(g.norm())
        shrink = 1.0 if step <= START or mean == 0 or norm == 0 else min(1.0, FACTOR * mean / norm)
        mean += max(1 - BETA, 1 / step) * (shrink * norm - mean)
        found.append(g * shrink)
    return found


@pytest.mark.parametrize("per", ["block", "parameter"])
def test_gradients_are_clipped_by_the_definition(per: str) -> None:
    """Of two parameters, one of which is cut into blocks, and has gradients of 0 at first."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(4, 3), (6, 6)]
    rows = [[torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes] for _ in range(STEPS)]
    for step, row in enumerate(rows):
        row[0] *= 20 if step == 6 else 1
        row[1] *= 0 if step < 5 else 30 if step == 9 else 1
    params = [nn.Parameter(torch.zeros(s, dtype=torch.float64)) for s in shapes]
    clip = {"kind": "clip_running_norm", "factor": FACTOR, "beta": BETA, "start": START, "per": per}
    recipe = {"update": [clip], "blocking": {"size": 3, "merge": 1}}
    optimizer = Optimizer([(f"w{i}", p) for i, p in enumerate(params)], recipe, lr=1.0)
    for row in rows:
        for p, g in zip(params, row, strict=True):
            p.grad = g.clone()
        optimizer.step()
    for place, p in enumerate(params):
        whole = [row[place] for row in rows]
        side = 3 if per == "block" else 6  # blocks of 3 x 3 and of what is left
        for i in range(0, p.shape[0], side):
            for j in range(0, p.shape[1], side):
                clipped = defined([g[i : i + side, j : j + side] for g in whole])
                found = p.detach()[i : i + side, j : j + side]
                assert torch.allclose(found, -torch.stack(clipped).sum(0), rtol=1e-12, atol=1e-12)
