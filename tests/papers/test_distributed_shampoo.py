"""What the page of Distributed Shampoo says of costs follows from its models' shapes and its committed rows."""

import json
import math

import pytest

from .scripts import PAPERS, script

pytestmark = pytest.mark.slow

OVERHEAD = script("distributed_shampoo_2023", "overhead")
RESULTS = PAPERS / "distributed_shampoo_2023" / "results"


def test_the_committed_costs_are_what_the_script_counts() -> None:
    found = json.loads((RESULTS / "overhead.json").read_text())
    wanted = OVERHEAD.counted("transformer", 1024, 50, 8)
    assert wanted in found["counted"]
    assert (RESULTS / "overhead.md").read_text() == OVERHEAD.markdown(found)


def test_the_shapes_are_those_of_resnet_50() -> None:
    """25,557,032 parameters and 4.09 billion products for an image, as torchvision's model card says."""
    layers = OVERHEAD.MODELS["ResNet-50"][0]
    assert sum(math.prod(shape) for shape, _ in layers) == 25_557_032
    products = sum(math.prod(shape) * uses for shape, uses in layers)
    assert products == pytest.approx(4.09e9, abs=0.005e9)  # published to two digits after the point
