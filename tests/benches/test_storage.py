"""The bench of storage: rows whose bytes and ratios are known, the command, and what is refused."""

import json
import math
from pathlib import Path
from statistics import fmean, median
from typing import Any

import pytest
from typer.testing import CliRunner

from eigengraft.errors import RecipeError
from eigengraft.experiments.benches import Row, load_bench, run_bench
from eigengraft.experiments.benches.storage import CASES, StorageBench
from eigengraft.experiments.benches.view import lay_out, lines_of
from eigengraft.experiments.cli.main import app
from eigengraft.optimizers.recipe.loading import load_recipe

from ..refusals import refused

pytestmark = pytest.mark.slow

TINY: dict[str, Any] = {"layers": 1, "width": 16, "vocabulary": 8, "warm": 1}
ADAM = """
update: [{kind: momentum, beta: 0.9}, {kind: rms, beta: 0.99}]
storage: {second_moment: {kind: uint8, min_elements: 1, block_size: 16}}
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "400")
    Path("adam.yaml").write_text(ADAM, encoding="utf-8")


def rows_of(*recipes: Any, **fields: Any) -> list[Row]:
    return run_bench("storage", recipes=list(recipes), **{**TINY, **fields})


def test_rows_of_a_recipe_whose_bytes_are_known() -> None:
    """Adam, one moment of two in 8 bits: 4 + 1 bytes a number and 4 for 16 of them, instead of 8. A few bytes more are
    a step for each of 5 matrices and the number of the format."""
    (row,) = rows_of({"recipe": "adam.yaml", "steps": 3})
    numbers = 16 * (8 + 3 * 16 + 16 + 4 * 16 + 16 * 4)
    assert row["candidate"] == "adam.yaml" and row["steps"] == len(row["stored_ms"]) == len(row["plain_ms"]) == 3
    extra = 5 * 16 / (8 * numbers)
    assert (4 + 1 + 4 / 16) / 8 - extra <= row["bytes"] <= (4 + 1 + 4 / 16) / 8 + extra
    assert min(row["stored_ms"]) > 0 and min(row["plain_ms"]) > 0
    assert row["ratio"] == pytest.approx(fmean(row["stored_ms"]) / fmean(row["plain_ms"]), rel=1e-12)
    assert row["ordinary"] == pytest.approx(median(row["stored_ms"]) / median(row["plain_ms"]), rel=1e-12)


def test_the_pair_differs_in_storage_alone() -> None:
    for case in CASES:
        stored, plain = case.pair()
        declared = stored.declaration()
        assert declared["storage"] == load_recipe(case.recipe).declaration()["storage"] and declared["storage"]
        assert plain.declaration() == {**declared, "storage": {}}
    graft = CASES[1].pair()[0].declaration()["update"][0]
    direction = graft["direction"][0] if isinstance(graft["direction"], list) else graft["direction"]
    assert (direction["statistic"]["interval"], direction["refresh"]["steps"], CASES[1].steps) == (100, 500, 500)


def test_the_matrices_of_a_language_model() -> None:
    bench = load_bench("storage", {"layers": 4, "width": 256, "vocabulary": 4096})
    assert isinstance(bench, StorageBench)
    shapes = bench.shapes()
    assert len(shapes) == 17 and sum(math.prod(shape) for shape in shapes) == 4_194_304
    assert set(shapes) == {(4096, 256), (768, 256), (256, 256), (1024, 256), (256, 1024)}


def test_table_figure_and_advice() -> None:
    bench = load_bench("storage", {"recipes": [{"recipe": "adam.yaml", "steps": 4}], **TINY})
    (row,) = bench.run()
    row |= {"bytes": 0.25, "ratio": 1.5, "ordinary": 1.25, "stored_ms": [2.0, 6.0, 2.5, 2.5], "plain_ms": [2.0] * 4}
    (line,) = lay_out(bench.table(), [row])[1]
    assert line == ("adam.yaml", "4", "0.25", "1.5", "1.25", "2.5", "2")
    (_, price), (_, steps) = (lines_of(panel, [row]) for panel in bench.panels())
    assert (price[0].x, price[0].y) == ([0.25], [1.5])
    assert [(own.label, own.x, own.y) for own in steps] == [
        ("adam.yaml", [1, 2, 3, 4], [3, 1.25, 1.25, 1]), ("adam.yaml, plain", [1, 2, 3, 4], [1, 1, 1, 1])
    ]  # fmt: skip
    (said,) = bench.advice([row])
    assert "adam.yaml" in said and "1.50 times" in said and "0.25" in said


def test_the_command() -> None:
    fields = [f"{name}={value}" for name, value in TINY.items()]
    case = "{recipe: shampoo_4bit, overrides: [update.graft.direction.shampoo.refresh.steps=2], steps: 3}"
    result = CliRunner().invoke(app, ["bench", "storage", *fields, "--only", case, "--only", "adam.yaml", "--out", "o"])
    assert result.exit_code == 0, result.output
    rows = [json.loads(line) for line in Path("o/rows.jsonl").read_text().splitlines()]
    assert [(row["candidate"], row["steps"]) for row in rows] == [("shampoo_4bit steps=2", 3), ("adam.yaml", 10)]
    assert "shampoo_4bit steps=2: " in result.stdout and Path("o/figure.svg").exists()


def test_what_is_refused() -> None:
    (row,) = rows_of("adam")
    assert "'adam'" in row["problem"] and "ratio" not in row
    with refused(RecipeError, "recipes", "'adam.yaml'"):
        rows_of("adam.yaml", {"recipe": "adam.yaml", "steps": 3})
    with refused(RecipeError, "steps", 1, 0):
        rows_of({"recipe": "adam.yaml", "steps": 0})
