"""What the page of Distributed Shampoo says of costs follows from its models' shapes and its committed rows."""

import json
import math

import pytest

from eigengraft.optimizers.plan.plan import plan

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


def test_the_shares_on_the_page_are_those_of_the_rows() -> None:
    page, found = (RESULTS.parent / "README.md").read_text(), json.loads((RESULTS / "overhead.json").read_text())
    share = {(r["model"], r["block"], r["interval"], r["ranks"]): r["step"] / r["gradient"] for r in found["counted"]}
    for ranks in (1, 8, 64):
        cells = [f"{100 * share[model, 1024, 50, ranks]:.1f} %" for model in OVERHEAD.MODELS]
        assert f"| {ranks} | {' | '.join(cells)} |" in page
    time = {
        (r["model"], r["ranks"]): OVERHEAD.seconds_over(r)
        for r in found["counted"]
        if r["block"] == 1024 and r["interval"] == 50
    }
    for ranks, label in ((8, "8"), (64, "64"), (8, "64, in groups of 8")):
        cells = [f"{100 * time[model, ranks]:.1f} %" for model in OVERHEAD.MODELS]
        assert f"| {label} | {' | '.join(cells)} |" in page
    assert "\n".join(OVERHEAD.shares_table(found["measured"])) in page


def test_a_group_of_ranks_does_what_as_many_ranks_alone_do() -> None:
    """The row of 64 ranks in groups of 8 is that of 8 ranks."""
    recipe = OVERHEAD.shampoo(1024, 50)
    grouped = recipe.replace(distribution=recipe.distribution.replace(group_size=8))
    layers = [(f"p{i}", shape) for i, (shape, _) in enumerate(OVERHEAD.MODELS["ResNet-50"][0])]
    eight, many = plan(recipe, layers, (8,), "ddp"), plan(grouped, layers, (64,), "ddp")
    assert many.work.tolist() == 8 * eight.work.tolist()
    assert many.traffic["updates"].received.tolist() == 8 * eight.traffic["updates"].received.tolist()


def test_seconds_are_operations_and_messages_by_the_data_sheet() -> None:
    """(15.7e12 / 15.7e12 + 150e9 / 150e9) seconds over 4 seconds of gradient."""
    row = {"step": 15.7e12, "received": 150e9, "ranks": 8, "gradient": 4 * 15.7e12}
    assert OVERHEAD.seconds_over(row) == pytest.approx(0.5)


def test_a_share_is_the_time_beyond_adamw_over_the_whole_step_with_it() -> None:
    """(30 - 10) / (90 + 10) and (16 - 6) / (94 + 6), by hand."""
    rows = [
        {"block": 8, "interval": 1, "ranks": 1, "gradient": {"64": 90.0}, "diagonal": 10.0, "step": 30.0},
        {"block": 8, "interval": 1, "ranks": 2, "gradient": {"64": 94.0}, "diagonal": 6.0, "step": 16.0},
    ]
    assert OVERHEAD.shares_table(rows)[2:] == ["| 8 | 1 | 64 | 20 % | 10 % |"]
