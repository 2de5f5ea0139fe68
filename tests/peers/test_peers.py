"""Recipes keep their distance from public packages, where these are installed: see `compare.py`."""

import json

import pytest

from .compare import COMPARISONS, RESULTS, distance

FOUND = json.loads(RESULTS.read_text(encoding="utf-8"))


def test_every_comparison_was_made() -> None:
    assert FOUND.keys() == COMPARISONS.keys()


@pytest.mark.slow
@pytest.mark.parametrize("name", COMPARISONS)
def test_distances_are_those_that_were_measured(name: str) -> None:
    pytest.importorskip(COMPARISONS[name].package)
    found = distance(COMPARISONS[name])
    assert found <= 2 * FOUND[name] + 1e-12  # rounding differs between versions of torch and machines
    assert found >= FOUND[name] / 2 or FOUND[name] < 1e-5
