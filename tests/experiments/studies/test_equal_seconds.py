"""Studies whose cells train for equal seconds: timed runs, the lengths that follow from them, and what reports say."""

import json
from contextlib import nullcontext

import pytest

from eigengraft import RecipeError
from eigengraft.experiments.reports.records import Run, read_records
from eigengraft.experiments.reports.report import Report
from eigengraft.experiments.studies.plan import plan_runs, plan_timing, plan_tuning, unfinished
from eigengraft.experiments.studies.preview import preview_study
from eigengraft.experiments.studies.run_cost import RUN_SECONDS, study_cost
from eigengraft.experiments.studies.running import complete_study, prepare_study
from eigengraft.experiments.studies.study import load_study
from eigengraft.experiments.training.train import train

from ...processes import fork_what_is_spawned
from ...refusals import refused

pytestmark = pytest.mark.slow

TASK = {"kind": "digits", "layers": 1, "width": 4, "batch_size": 8}
BASE = {"task": TASK, "recipe": "adamw", "steps": 400, "log_every": 7, "checkpoint_every": 50}
AXES = {
    "task": {"small": {}, "large": {"task.width": 8, "steps": 600}},
    "method": {"adam": {}, "soap": {"recipe": "soap_fitted"}},
}
MILLISECONDS = {"small,adam": 3.0, "small,soap": 4.0, "large,adam": 2.0, "large,soap": 1.5}


def study(**fields):
    return load_study({"name": "tiny", "base": BASE, "axes": AXES, "equal": "seconds", "seeds": [3, 4], **fields})


def write_timed(directory, run, ms):
    """A timed run whose first row has ten times the seconds, for what is done once, and whose fourth was disturbed."""
    steps = run.experiment.callbacks[0].step
    folder = directory / run.directory
    folder.mkdir(parents=True)
    seconds, rows = 0.0, []
    for at in range(10, steps + 1, 10):
        slower = 3 if at == 40 else 1
        seconds += 0.01 * ms * slower * (10 if at == 10 else 1)
        rows.append(json.dumps({"step": at, "seconds": seconds, "step_ms": ms * slower}) + "\n")
    (folder / "metrics.jsonl").write_text("".join(rows))
    (folder / "result.json").write_text(json.dumps({"steps": steps}))


def test_a_cell_has_as_many_steps_as_take_the_seconds_of_its_baseline(tmp_path):
    timed, same = plan_timing(study(), tmp_path)
    assert [run.directory for run in timed] == [
        f"timing/task={task},method={method}/round-{turn}"
        for turn in (1, 2, 3)
        for task in ("small", "large")
        for method in ("adam", "soap")
    ]
    first = timed[0].experiment
    assert (first.seed, first.steps, first.log_every, first.eval_every) == (3, 400, 5, 400)
    assert (first.callbacks[0].step, same.settings) == (100, ())
    for place, run in enumerate(timed):
        busy = (1, 2, 1, 1, 3, 3, 3, 3, 1, 1, 5, 1)[place]  # a whole round, and two runs that the median leaves out
        write_timed(tmp_path, run, busy * MILLISECONDS[",".join(run.labels[axis] for axis in ("task", "method"))])
    left, found = plan_timing(study(), tmp_path)
    steps = {run.directory: run.experiment.steps for run in plan_runs(found) if run.seed == 3}
    assert left == []
    assert steps == {
        "task=small,method=adam/seed-3": 400,
        "task=small,method=soap/seed-3": 300,
        "task=large,method=adam/seed-3": 600,
        "task=large,method=soap/seed-3": 800,
    }
    (tmp_path / timed[1].directory / "metrics.jsonl").write_text('{"step": 3, "seconds": 1, "step_ms": 1}\n')
    with refused(RecipeError, "equal", "soap/round", 1, 3):
        plan_timing(study(), tmp_path)


def test_a_study_is_timed_tuned_and_run_and_its_report_says_so(tmp_path, monkeypatch):
    fork_what_is_spawned(monkeypatch)
    tune = {"seeds": [7], "trials": 3, "space": {"lr": [0.01, 0.02]}}  # coordinate descent tries two
    axes = {"method": {"adam": {}, "averaged": {"recipe": "schedule_free_adamw"}}}
    one = study(base={**BASE, "steps": 40, "eval_every": 10}, axes=axes, seeds=[3], tune=tune)
    assert preview_study(one, tmp_path).runs == 3 * 2 + 2 + 2 * 3
    phases = []

    def watch(prepared):
        phases.append((prepared.phase, len(prepared.left)))
        return nullcontext(lambda event: None)

    assert complete_study(one, tmp_path, 2, watch) == {}
    assert phases == [("timing", 6), ("tuning", 4), ("study", 2)]
    assert prepare_study(one, tmp_path).left == ()
    done = preview_study(one, tmp_path)
    assert (done.runs, done.seconds) == (0, 0.0)
    ratios = []
    for turn in (1, 2, 3):
        runs = [Run({}, 0, tmp_path / f"timing/method={method}/round-{turn}") for method in axes["method"]]
        base, own = (
            (run.seconds()[-1] - run.seconds()[0]) / (run.rows[-1]["step"] - run.rows[0]["step"]) for run in runs
        )
        ratios.append(base / own)
    expected = {"adam": 40, "averaged": round(40 * sorted(ratios)[1])}
    records = read_records(tmp_path)
    assert {run.labels["method"]: run.result["steps"] for run in records.runs} == expected
    tuned = tmp_path / "tuning/method=averaged/lr=0.01/seed-7/result.json"
    assert json.loads(tuned.read_text())["steps"] == expected["averaged"]
    assert "train for the seconds of the baseline" in Report(tmp_path).write().read_text()
    head, _, *rows = (tmp_path / "tables.md").read_text().splitlines()[2:]
    place = head.split(" | ").index("steps")
    assert [row.split(" | ")[place] for row in rows] == [str(steps) for steps in expected.values()]


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"equal": "second"}, ("equal", "steps", "seconds", "second")),
        ({"axes": {"steps": [100, 200]}}, ("equal", 100, "steps")),
        (
            {"settings": [{"when": {"method": "soap"}, "set": {"steps": 9}}]},
            ("equal", "adam", "steps", "method"),
        ),
        (
            {"exclude": [{"task": "small", "method": "adam"}]},
            ("equal", "adam", "soap"),
        ),
        ({"tune": {"seeds": [7], "space": {"steps": [9, 18]}}}, ("tune.space",)),
    ],
)
def test_wrong_studies(fields, says):
    with refused(RecipeError, *says):
        study(**fields)


def test_timed_runs_are_expected_to_take_the_time_of_their_steps(tmp_path):
    """They have 100 steps and one evaluation."""
    preview = preview_study(study(), tmp_path)
    runs = plan_runs(study(seeds=[3]))
    costs = study_cost(runs, tmp_path).costs
    timed = [RUN_SECONDS + 100 * costs[run.directory].step + costs[run.directory].evaluation for run in runs]
    assert preview.seconds == pytest.approx(sum(2 * cell.seconds for cell in preview.cells) + sum(3 * s for s in timed))


def test_a_search_that_has_begun_needs_fewer_runs(tmp_path):
    tune = {"kind": "random", "seeds": [7, 8], "trials": 3, "space": {"lr": [0.01, 0.02, 0.03]}}
    base = {**BASE, "steps": 4}
    one = study(base=base, axes={"method": {"adam": {}}}, equal="steps", tune=tune)
    assert preview_study(one, tmp_path).cells[0].tuning == 6
    left = [6]
    while runs := unfinished(plan_tuning(one, tmp_path)[0], tmp_path):
        train(runs[0].experiment, tmp_path / runs[0].directory)
        left.append(preview_study(one, tmp_path).cells[0].tuning)
    assert left[:3] == [6, 5, 4] and left[-1] == 0 and sorted(left, reverse=True) == left
