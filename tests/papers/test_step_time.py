"""What papers/shampoo_2018 says of the time of a step follows from what its script measured."""

import json

from .scripts import PAPERS, script

FOLDER = PAPERS / "shampoo_2018"
STEP_TIME = script("shampoo_2018", "step_time")


def test_the_committed_times_are_those_of_the_page() -> None:
    found = json.loads((FOLDER / "results" / "step_time.json").read_text())
    table = STEP_TIME.markdown(found)
    assert (FOLDER / "results" / "step_time.md").read_text() == table
    rows = [line for line in table.splitlines() if line.startswith("| ")]
    assert [row for row in rows if row not in (FOLDER / "README.md").read_text()] == []
    methods = {name: list(STEP_TIME.experiments(name)) for name in STEP_TIME.STUDIES}
    assert {one["study"]: list(one["updates"]) for one in found["measured"]} == methods


def test_steps_are_gradient_and_update_in_those_of_sgd() -> None:
    """(1 + 5) / (1 + 2) by hand."""
    measured = {"study": "s", "gradient": 1.0, "updates": {"sgd": 2.0, "shampoo": 5.0}}
    assert "| shampoo | 5.00 | 2.00 |" in STEP_TIME.markdown({"made": "today", "measured": [measured]})


def test_rare_roots_count_with_the_steps_that_compute_them() -> None:
    assert STEP_TIME.step_of("shampoo, roots every 20", [1.0, 1.0, 7.0]) == 3.0
    assert STEP_TIME.step_of("shampoo", [1.0, 1.0, 7.0]) == 1.0
