"""The laptop track: its rules, scores from runs, profiles, and the committed table."""

from __future__ import annotations

import csv
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eigengraft import RecipeError, Stage
from eigengraft.experiments.reports.seed_statistics import Target
from eigengraft.experiments.reproduction.claims import ResultRow
from eigengraft.experiments.studies.plan import plan_runs
from eigengraft.experiments.tasks.model_shapes import MODELS
from eigengraft.experiments.track.cost import H100, TOKENS, optimizer_ms, step_costs, step_ms
from eigengraft.experiments.track.report import rank_correlation, read_rankings, standing, steps_table, track_page
from eigengraft.experiments.track.track import (
    ENTRIES_FILE,
    RESULTS_FILE,
    TrackEntry,
    TrackTask,
    entry_study,
    find_entry,
    load_track,
    profile,
    profile_score,
    ratios,
    read_entries,
    read_table,
    results_text,
    score,
    table_text,
)
from eigengraft.optimizers.plan.plan import plan
from eigengraft.optimizers.recipe.loading import load_recipe

from ..cli import invoke
from ..refusals import lacking, refused

LAPTOP = Path(__file__).parents[2] / "papers" / "laptop_track"
FIRST = ("adafactor", "adamw", "lion", "muon", "shampoo", "soap_fitted")
TASK = TrackTask(experiment={"steps": 40}, target=1.0, sigma=0.3)


def run(seed: int, losses: list[float], seconds: float = 8.0) -> ResultRow:
    curve = [[10, 20, 30, 40][: len(losses)], losses]
    return ResultRow({"task": "t"}, seed, {"curve": curve, "seconds": seconds, "lr": 0.1, "edge": "", "data": "0"})


def test_a_mean_is_below_a_target_by_standard_errors_of_known_size() -> None:
    """The numbers of modded-nanogpt's track 3: 3.28 is reached if (3.28 - mean) sqrt(n) >= 0.004 = 3.08 * 0.0013."""
    target = Target(value=3.28, sigma=0.0013, z=0.004 / 0.0013)
    for n, mean in ((1, 3.276), (4, 3.278), (16, 3.279)):
        seeds = [{10: 3.5, 20: mean + 1e-6, 30: mean - 1e-9}] * n
        assert target.first(seeds) == 30
        assert target.first([{step: -loss for step, loss in own.items()} for own in seeds], sign=-1) is None
        above = Target(value=-3.28, sigma=0.0013, z=target.z)
        assert above.first([{step: -loss for step, loss in own.items()} for own in seeds], sign=-1) == 30
    assert target.first([{10: 1.0}, {10: math.inf, 20: 1.0}, {20: 1.0}]) is None


def test_the_score_is_the_first_step_whose_mean_lies_far_enough_below() -> None:
    """With four seeds and z = 2 the mean must be at most 0.7, which of 0.9, 0.71, 0.69, 0.8 the third is."""
    runs = [run(seed, [0.9 + d, 0.71 + d, 0.69 + d, 0.8]) for seed, d in enumerate([-0.1, 0.1, -0.1, 0.1])]
    found = score(TASK, 2.0, runs)
    assert (found.steps, found.seconds, found.lr) == (30, 6.0, 0.1)
    assert found.loss == pytest.approx(0.8)
    later = score(TASK, 2.0, [run(seed, [0.9, 0.71, 0.71, 0.71]) for seed in range(4)])
    assert (later.steps, later.seconds) == (math.inf, math.inf)


def test_a_run_that_diverged_reaches_nothing_from_there_on() -> None:
    lost = [run(0, [0.1, 0.1]), run(1, [0.1, 0.1, 0.1, 0.1])]
    assert score(TASK, 2.0, lost).steps == 10
    assert score(TASK, 2.0, lost).loss == math.inf
    assert score(TASK, 2.0, [run(0, []), run(1, [0.1] * 4)]).steps == math.inf


def test_the_profile_score_is_the_area_under_the_profile() -> None:
    """By the midpoint rule on a grid that has every ratio at the end of a cell, so that the rule is exact."""
    own = {"a": 1.0, "b": 1.5, "c": 3.25, "d": 7.0, "e": math.inf}
    grid = np.arange(1, 4, 0.25) + 0.125
    assert profile(own, [1.0, 1.49, 1.5, 100.0]) == [0.2, 0.2, 0.4, 0.8]
    assert profile_score(own) == pytest.approx(np.mean(profile(own, list(grid))))
    assert profile_score({"a": 1.0, "b": 1.0}) == 1.0


def test_ratios_are_to_the_fewest_steps_of_all_entries() -> None:
    reached = [score(TASK, 0.0, [run(0, losses)]) for losses in ([2.0, 0.5], [2.0, 2.0, 2.0, 0.5], [2.0])]
    found = {name: {"t": one} for name, one in zip("xyz", reached, strict=True)}
    assert ratios(found) == {"x": {"t": 1.0}, "y": {"t": 2.0}, "z": {"t": math.inf}}
    nobody = {"z": {"t": reached[2]}}
    assert ratios(nobody) == {"z": {"t": math.inf}}


def test_an_entry_changes_the_recipe_and_nothing_else() -> None:
    track = load_track()
    plans = [plan_runs(entry_study(track, find_entry(name, LAPTOP))) for name in ("adamw", "muon")]
    assert len(plans[0]) == len(track.tasks) * len(track.seeds)
    for one, other in zip(*plans, strict=True):
        assert one.directory == other.directory and one.experiment.recipe != other.experiment.recipe
        assert one.experiment.replace(recipe=other.experiment.recipe) == other.experiment


def test_an_entry_is_one_of_the_folder_a_file_or_a_shipped_recipe(tmp_path: Path) -> None:
    assert find_entry("soap", LAPTOP).recipe == {"base": "soap", "lr": 0.016}
    assert find_entry("reference/soap", tmp_path).name == "reference_soap"
    assert find_entry("reference/soap", tmp_path).recipe == {"base": "reference/soap"}
    (tmp_path / "own.yaml").write_text("base: muon\nlr: 0.5\n")
    own = find_entry(str(tmp_path / "own.yaml"), tmp_path)
    assert (own.name, own.recipe) == ("own", {"base": "muon", "lr": 0.5})
    (tmp_path / "derived.yaml").write_text("base: ./own.yaml\nlr: 0.25\n")  # its base is not in the table
    derived = find_entry(str(tmp_path / "derived.yaml"), tmp_path).recipe
    assert load_recipe(derived).update == load_recipe("muon").update
    assert load_recipe(derived).lr == 0.25
    with refused(RecipeError, "adanw"):
        find_entry("adanw", tmp_path)


def test_an_entry_may_split_batches_and_keeps_the_number_in_the_table(tmp_path: Path) -> None:
    track, split, whole = load_track(), find_entry("isomuon", tmp_path, 2), find_entry("isomuon", tmp_path)
    (tmp_path / ENTRIES_FILE).write_text(table_text([whole, replace(split, name="split")]))
    known = read_table(tmp_path)
    assert known == {"isomuon": whole, "split": TrackEntry("split", {"base": "isomuon"}, 2)}
    assert find_entry("split", tmp_path).accumulate == 2
    assert find_entry("split", tmp_path, 4).accumulate == 4
    for one, other in zip(*(plan_runs(entry_study(track, entry)) for entry in (split, whole)), strict=True):
        assert one.experiment.accumulate == 2
        assert one.experiment.replace(accumulate=None) == other.experiment


@pytest.mark.slow
def test_the_committed_page_is_that_of_the_committed_runs() -> None:
    track = load_track()
    now = standing(track, LAPTOP)
    ((path, text),) = track_page(now, LAPTOP).items()
    assert path.read_text() == text
    assert steps_table(now) in text
    assert set(now.scores) <= set(read_table(LAPTOP))
    for name, task in track.tasks.items():  # the targets are such that AdamW reaches them, and not with its last step
        assert now.scores["adamw"][name].steps < task.experiment["steps"]
        assert {run.numbers["data"] for runs in now.entries.values() for run in runs[name]} == {task.sha256[:16]}
    for ranking in read_rankings(LAPTOP).values():
        assert set(ranking.entries) <= set(now.scores)


def test_the_counted_time_of_a_step_is_its_formula() -> None:
    """AdamW has no products: bytes decide. One Newton-Schulz of five steps has 30 m^2 n operations in bfloat16."""
    shapes = list(MODELS["gpt2"].shapes())
    n = sum(math.prod(shape) for _, shape in shapes)
    state = int(plan("adamw", shapes, (1,), "ddp").state[0])
    bytes_ms = 1e3 * (12 * n + 2 * state) / H100.traffic
    assert optimizer_ms("adamw", "gpt2") == pytest.approx(bytes_ms)
    assert step_ms("adamw", "gpt2") == pytest.approx(bytes_ms + 6e3 * n * TOKENS / H100.bfloat16)
    d = 768
    products = 12 * 30 * d**3 * (1 + 3 + 4 + 4)  # projections of attention, and both layers of the feed-forward part
    entries = float(plan("muon", shapes, (1,), "ddp").work[0]) - products
    assert 0 < entries < 10 * n  # momentum, and Adam for all others
    counted = 1e3 * (products / H100.bfloat16 + entries / H100.float32)
    assert optimizer_ms("muon", "gpt2") == pytest.approx(counted)
    full = {"base": "muon", "set": {"update.spectral.solver.precision": "input"}}
    assert optimizer_ms(full, "gpt2") == pytest.approx(1e3 * (products + entries) / H100.float32)
    costs = step_costs({"muon": {"base": "muon"}, "adamw": {"base": "adamw"}}, "gpt2")
    assert costs["adamw"] == 1.0 < costs["muon"]


def test_operations_of_polar_factors_follow_their_solver() -> None:
    """With m <= n a step of Newton-Schulz has 6 m^2 n operations, a triangular pass 3 m^2 n."""

    def work(**declared: Any) -> float:
        return Stage.model_validate(declared).work((8, 20))

    square = 8 * 8 * 20
    assert work(kind="spectral", solver={"kind": "newton_schulz", "steps": 4}) == 24 * square
    assert work(kind="spectral", solver={"kind": "triangular", "passes": 2}) == 6 * square
    half = {"kind": "dion2", "fraction": 0.5, "solver": {"kind": "newton_schulz", "steps": 5}}
    assert work(**half) == 30 * 4 * 4 * 20 + 4 * 8 * 20  # of four rows, and the momentum
    assert work(kind="dion", rank=3) == 8 * 8 * 20 * 3 + 4 * 8 * 9


def test_costs_multiply_steps_before_they_are_compared() -> None:
    reached = [score(TASK, 0.0, [run(0, losses)]) for losses in ([2.0, 0.5], [2.0, 2.0, 2.0, 0.5], [2.0])]
    found = {name: {"t": one} for name, one in zip("xyz", reached, strict=True)}
    assert ratios(found, {"x": 3.0, "y": 1.0, "z": 1.0}) == {"x": {"t": 1.5}, "y": {"t": 1.0}, "z": {"t": math.inf}}


def test_a_rank_correlation_is_spearmans_with_ties_and_an_interval() -> None:
    from scipy.stats import spearmanr

    random = np.random.default_rng(3)
    x, y = random.normal(size=12), np.round(random.normal(size=12))
    value, low, high = rank_correlation(list(x), list(y))
    assert value == pytest.approx(spearmanr(x, y).statistic)
    assert -1 <= low <= value <= high <= 1
    assert rank_correlation([1, 2, 3, 4], [2, 4, 6, 8])[0] == pytest.approx(1.0)
    assert rank_correlation([1, 2, 3, 4], [1, 1, 1, 1]) == (0.0, 0.0, 0.0)


def test_sigmas_are_medians_of_the_spread_of_the_first_six_entries() -> None:
    """The sample standard deviation over seeds where the mean is first at or below the target, to one digit. They are
    of the first runs; `soap`, which changed, was run again since."""
    track, first = load_track(), json.loads((LAPTOP / "spreads.json").read_text())
    for name, task in track.tasks.items():
        assert task.sigma == float(f"{np.median(list(first[name].values())):.1g}")
        entries = read_entries(track, LAPTOP)
        for entry in set(FIRST) - {"soap_fitted"}:
            losses = np.array([run.numbers["curve"][1] for run in entries[entry][name]])
            below = np.flatnonzero(losses.mean(axis=0) <= task.target)
            spread = losses[:, below[0]].std(ddof=1) if len(below) else None
            # written to four digits
            assert first[name].get(entry) == (None if spread is None else pytest.approx(spread, rel=1e-3))


def rows_of(name: str) -> list[dict[str, str]]:
    with (LAPTOP / RESULTS_FILE).open(newline="") as file:
        return [row for row in csv.DictReader(file) if row["entry"] == name]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda rows: rows[0].update(track="0"), (1, 0)),
        (lambda rows: rows.pop(), ("seeds", "[0, 1, 2]", "[0, 1]")),
        (lambda rows: [row.update(data="abc") for row in rows[:3]], ("data", "python")),
    ],
)
def test_results_that_do_not_compare_are_refused(change, says, tmp_path) -> None:  # type: ignore[no-untyped-def]
    other = [{**row, "entry": "other"} for row in rows_of("adamw")]
    change(other)
    (tmp_path / RESULTS_FILE).write_text(results_text([*rows_of("adamw"), *other]))
    with refused(ValueError, *says):
        read_entries(load_track(), tmp_path)


def test_the_table_of_runs_survives_reading_and_writing() -> None:
    with (LAPTOP / RESULTS_FILE).open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert results_text(rows) == (LAPTOP / RESULTS_FILE).read_text()
    assert table_text(read_table(LAPTOP).values()) == (LAPTOP / ENTRIES_FILE).read_text()
    assert [row["entry"] for row in rows] == sorted(row["entry"] for row in rows)


def test_a_folder_without_results_is_refused(tmp_path: Path) -> None:
    with refused(ValueError, "results"):
        read_entries(load_track(), tmp_path)


@pytest.mark.slow
def test_the_command_runs_an_entry_and_keeps_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A track of one task of eight steps."""
    from eigengraft.experiments.studies import running
    from eigengraft.experiments.studies.pool import PoolEvent
    from eigengraft.experiments.track import track as module

    def in_this_process(work, jobs, workers, attempts):  # type: ignore[no-untyped-def]
        for number, job in enumerate(jobs):
            yield PoolEvent(number, "done", work(job, lambda tick: None))

    small = {
        "version": 1,
        "base": {"eval_every": 4, "log_every": 4},
        "tasks": {
            "digits": {
                "experiment": {"task": {"kind": "digits", "layers": 1, "width": 4}, "steps": 8},
                "target": 10.0,
                "sigma": 0.1,
            }
        },
        "tune": {"seeds": [7], "trials": 3},
        "seeds": [0, 1],
        "z": 2.0,
    }
    monkeypatch.setattr(running, "run_pool", in_this_process)
    tiny = module.Track.model_validate(small)
    monkeypatch.setattr(module, "load_track", lambda: tiny)
    monkeypatch.chdir(tmp_path)
    done = invoke(["track", "run", "adamw", "--workers", "1"])
    assert done.exit_code == 0, done.output
    assert lacking(done.output, "digits", "version 1") == []
    folder = tmp_path / "runs" / "track"
    assert read_table(folder) == {"adamw": TrackEntry("adamw", {"base": "adamw"})}
    before = (folder / RESULTS_FILE).read_text()
    assert invoke(["track", "run", "adamw", "--workers", "1"]).exit_code == 0
    assert (folder / RESULTS_FILE).read_text() == before  # rows of an entry are replaced
    shown = invoke(["track", "report"])
    assert shown.exit_code == 0, shown.output
    assert "| `adamw` | 1.00 | 1.00 | 1.00 | 4 (" in shown.output
    assert (folder / "profile.svg").exists()
    assert invoke(["track", "report", "--check"]).exit_code == 0
    page = folder / "README.md"
    page.write_text(page.read_text().replace("1.00", "0.99"))
    assert invoke(["track", "report", "--check"]).exit_code == 1
