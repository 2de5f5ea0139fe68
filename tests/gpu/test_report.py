"""`make gpu`: its code runs to the end on the simulated accelerator, it refuses a machine without one, and its page."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from ..processes import run
from .budgets import table
from .page import GROUPS, PAGE, page, read

SCRIPT = Path(__file__).with_name("report.py")
TIMING = {"device", "card", "date", "operation", "order", "batch", "dtype", "milliseconds", "source"}


def test_the_page_is_made_of_the_last_results() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(read())


def test_parts_without_rows_were_not_run() -> None:
    assert page([]).count("\n\nNot run.\n") == page([]).count("\n## ") == 8


def test_problems_are_named() -> None:
    step = {"part": "step", "candidate": "adamw", "problem": "RuntimeError: out of memory"}
    matrix = {"part": "decomposition", "operation": "eigh", "order": 4096, "problem": "RuntimeError: no result"}
    inputs = {"part": "torch", "compared": 3, "failed": ["SGD, momentum"], "left": {"Adam, amsgrad": "no stage"}}
    graph = {"part": "capture", "candidate": "muon", "problem": "RuntimeError: not permitted"}
    text = page([step, matrix, inputs, graph])
    assert "- muon: RuntimeError: not permitted" in text and "SGD, momentum" in text and "Adam, amsgrad" in text
    assert "- adamw: RuntimeError: out of memory" in text and "- eigh of order 4096: RuntimeError: no result" in text


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is an accelerator")
@pytest.mark.slow
def test_a_machine_without_an_accelerator_is_refused(tmp_path: Path) -> None:
    done = run(SCRIPT, folder=tmp_path)
    assert done.returncode == 1 and len(done.stderr.strip().splitlines()) == 1
    assert "--simulated" in done.stderr and not done.stdout


@pytest.mark.slow
def test_everything_runs_on_the_simulated_accelerator(tmp_path: Path) -> None:
    done = run(SCRIPT, "--simulated", "--out", str(tmp_path), folder=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = read(tmp_path / "results.jsonl")
    parts = {"machine", "laws", "torch", "capture", "step", "tf32", "decomposition", "slow", "host"}
    assert {row["part"] for row in rows} == parts
    (laws,) = (row for row in rows if row["part"] == "laws")
    assert laws["tests"] > 0 and laws["failed"] == []
    (torchs,) = (row for row in rows if row["part"] == "torch")
    assert torchs["compared"] > 20 and torchs["failed"] == []
    captured = {row["candidate"]: row for row in rows if row["part"] == "capture"}
    assert set(captured) == {"adamw", "muon", "soap_fitted", "shampoo"}
    assert all(row["replays"] > 6 and row["differing"] == 0 and row["apart"] < 1e-5 for row in captured.values())
    steps = {row["candidate"]: row for row in rows if row["part"] in GROUPS[0] and "problem" not in row}
    assert {
        "adamw",
        "adamw, graph: true",
        "muon",
        "soap_fitted",
        "soap_fitted, by_device: false",
        "shampoo",
        "torch AdamW, fused",
    } <= set(steps)
    assert sum(steps["adamw"]["waits"].values()) == table()["adamw"].waits
    assert steps["adamw, detect: device"]["waits"] == {}
    for row in steps.values():
        assert 0 < row["host_ms"]["median"] <= row["total_ms"]["longest"] and row["kernels"] > 0
        if row["own"] and "graph" not in row["candidate"]:  # whose numbers are on the device, beside the state
            # a plan counts the steps of 16 parameters, which are on the host
            assert 0 <= row["planned_bytes"] - row["state_bytes"] <= 16 * 8
    text = (tmp_path / "gpu.md").read_text(encoding="utf-8")
    assert text == page(rows) and text.count("Not run.") == 1  # without a model that trains
    timings = json.loads((tmp_path / "timings.json").read_text(encoding="utf-8"))
    assert all(set(row) == TIMING for row in timings)
    assert {(row["device"], row["operation"]) for row in timings} == {
        (device, operation)
        for device in ("cuda", "cpu")
        for operation in ("eigh", "power_qr", "cholesky_qr", "coupled_minimax", "coupled_newton", "newton_db")
    } | {("cuda", "eigh_on_host")}
