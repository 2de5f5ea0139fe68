"""Every quantizer traced by `torch.compile`: one graph, and the same bits as without.

Backend "eager" runs the traced operations as they are, so that no C++ compiler is needed. What is traced differs from
what runs otherwise: there are no pieces that fit the cache, no look-ups by halves of a float, no looking at values.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from eigengraft import noise
from eigengraft.quantization import Quantizer
from eigengraft.slots import Slot
from eigengraft.testing.quantizer_laws import QuantizerCase

from ..laws.quantizers import QUANTIZERS, WITH_NOISE_INSIDE, small
from ..laws.rows import Row

pytestmark = pytest.mark.slow

OTHER_NUMBERS = {"e5m2", "nf4", "symmetric_integer", "unsigned", "dynamic_unsigned", "linear_square", "two steps"}
"""Notes of rows that differ from a row of their kind in a table or a count, and run the same code."""
TRACED = [row for row in (*QUANTIZERS, *WITH_NOISE_INSIDE) if row.note not in OTHER_NUMBERS]


@pytest.fixture(autouse=True)
def _nothing_traced_before() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def both_ways(quantizer: Quantizer, slot: Slot) -> Any:
    """Stores one stack, then another in its place, with random numbers; returns what is kept, and what comes back."""

    def stored(
        x: Tensor, y: Tensor, seeds: Tensor, steps: Tensor
    ) -> tuple[dict[str, Tensor], dict[str, Tensor], Tensor]:
        def uniform(like: Tensor, purpose: str) -> Tensor:
            return noise.uniform(seeds, steps, tuple(like.shape[1:]), like.dtype, stream=len(purpose))

        first = quantizer.encode(x, None, uniform)
        second = quantizer.encode(y, first, uniform)
        return dict(first), dict(second), quantizer.decode(second, slot, x.dtype)

    return stored


# tables of places are cached; traced, they are computed
@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`:UserWarning")
@pytest.mark.parametrize("row", TRACED, ids=str)
def test_traced_code_gives_the_same_bits(row: Row) -> None:
    quantizer = small(row.make)
    slot, x = QuantizerCase(quantizer, size=13).example(
        3
    )  # odd; products of sides from 8 to 11 depend on where a matrix begins
    y = x.flip(-1, -2) * 2
    x[1], y[2] = 0.0, 0.0
    given = (x, y, torch.arange(3), torch.full((3,), 7))
    stored = both_ways(quantizer, slot)
    traced = torch.compile(stored, backend="eager", fullgraph=True)(*given)
    expected = stored(*given)
    for parts, found in zip(expected[:2], traced[:2], strict=True):
        assert found.keys() == parts.keys()
        assert all(found[name].dtype == part.dtype and torch.equal(found[name], part) for name, part in parts.items())
    assert torch.equal(traced[2], expected[2])
