"""The search of a value for every cell of a study before its runs."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eigengraft import RecipeError
from eigengraft.experiments.reports.records import read_records
from eigengraft.experiments.reports.report import render
from eigengraft.experiments.reports.run import METRICS
from eigengraft.experiments.studies.plan import plan_runs
from eigengraft.experiments.studies.running import prepare_study, run_study
from eigengraft.experiments.studies.search import plan_tuning
from eigengraft.experiments.studies.study import load_study
from eigengraft.experiments.studies.tuning import Tuning, found

from ..processes import fork_what_is_spawned

TINY = {"task": {"kind": "digits", "layers": 1, "width": 4, "batch_size": 8}, "recipe": "adamw", "steps": 2}
LOSS = METRICS["val_loss"]


def study(**fields):
    axes = {"method": {"adam": {"lr": 0.01}, "lion": {"recipe": "lion", "lr": 0.5}}}
    return load_study(
        {"name": "tiny", "base": TINY, "axes": axes, "seeds": [0, 1], "tune": {"seeds": [7, 8]}, **fields}
    )


def search(tuning, loss):
    """Every score that the search of `tuning` sees of loss(exponent)."""
    scores = {}
    while wanted := tuning.missing(scores):
        scores |= {exponent: loss(exponent) for exponent in wanted}
    return scores


@given(st.integers(-6, 6), st.integers(0, 9))
def test_the_least_value_of_a_valley_is_found_and_lies_inside(best, diverges_above):
    limit = best + 1 + diverges_above
    scores = search(
        Tuning(seeds=(0,), trials=40), lambda k: math.inf if k >= limit else abs(k - best) + 0.25 * (k > best)
    )
    one = found(Tuning(seeds=(0,)), 0.01, scores, LOSS)
    assert one.value == pytest.approx(0.01 * 2.0**best, rel=1e-5)  # values have six digits
    assert one.inside
    assert list(one.tried) == sorted(one.tried)
    # Downhill from the start: never more than three values beyond those between the start and the best.
    assert len(scores) <= abs(best) + 3


def test_a_search_ends_after_its_trials_and_says_so():
    scores = search(Tuning(seeds=(0,), trials=5), lambda k: -float(k))
    one = found(Tuning(seeds=(0,)), 1.0, scores, LOSS)
    assert (sorted(scores), one.value, one.inside) == ([-1, 0, 1, 2, 3], 8.0, False)


def test_where_every_value_diverges_the_least_is_taken():
    scores = search(Tuning(seeds=(0,), trials=6), lambda k: math.inf)
    one = found(Tuning(seeds=(0,)), 1.0, scores, LOSS)
    assert (sorted(scores), one.value, one.inside) == ([-4, -3, -2, -1, 0, 1], 2.0**-4, False)
    assert set(one.tried.values()) == {None}


def test_larger_is_better_where_the_metric_says_so():
    accuracy = METRICS["val_accuracy"]
    assert found(Tuning(seeds=(0,)), 1.0, {0: -0.75, 1: -0.5, -1: -0.25}, accuracy).tried[1.0] == 0.75


def end(directory, runs, loss):
    """Let planned runs have ended with loss(lr, seed)."""
    for run in runs:
        path = directory / run.directory
        path.mkdir(parents=True)
        (path / "config.json").write_text(json.dumps(run.experiment.model_dump(mode="json")))
        (path / "result.json").write_text(json.dumps({"val_loss": loss(run.experiment.lr, run.experiment.seed)}))


def test_a_search_goes_on_from_what_has_been_run(tmp_path):
    rounds = []
    while runs := plan_tuning(study(), tmp_path)[0]:
        rounds.append(len(runs))
        # Seed 8 alone would choose another value; the value 1.0 diverges with one seed of two.
        end(
            tmp_path,
            runs,
            lambda lr, seed: None if lr == 1.0 and seed == 7 else abs(math.log2(lr / 0.04)) + (seed == 8) * lr,
        )
    tuned = plan_tuning(study(), tmp_path)[1]
    assert {cell: one.value for cell, one in tuned.items()} == {"method=adam": 0.04, "method=lion": 0.03125}
    assert tuned["method=lion"].tried[1.0] is None
    assert rounds == [12, 4, 4, 2, 2]  # lion goes down to half of 0.03125
    planned = plan_runs(study(), tuned)
    assert [(run.directory, run.experiment.lr) for run in planned][::2] == [
        ("method=adam/seed-0", 0.04),
        ("method=lion/seed-0", 0.03125),
    ]
    with pytest.raises(RecipeError, match=r"the study has changed since these runs were made:\n.*\nsteps: 2 -> 3"):
        plan_tuning(study(base={**TINY, "steps": 3}), tmp_path)


def test_a_study_tunes_then_runs(tmp_path, monkeypatch):
    fork_what_is_spawned(monkeypatch)
    one = study(axes={"method": {"adam": {"lr": 0.01}}}, seeds=[0], tune={"seeds": [7], "trials": 3})
    counts = []
    while True:
        prepared = prepare_study(one, tmp_path)
        list(run_study(prepared, workers=2))
        counts.append((prepared.tuning, len(prepared.left)))
        if not prepared.tuning:
            break
    assert counts == [(True, 3), (False, 1)]
    manifest = json.loads((tmp_path / "study.json").read_text())
    tried = dict(manifest["tuned"]["method=adam"]["tried"])
    assert list(tried) == [0.005, 0.01, 0.02]
    assert manifest["tuned"]["method=adam"]["value"] == min(tried, key=tried.__getitem__)
    config = json.loads((tmp_path / manifest["runs"][0]["directory"] / "config.json").read_text())
    assert config["lr"] == manifest["tuned"]["method=adam"]["value"]
    page = render(read_records(tmp_path))
    assert "Tuned values" in page and all(f"{value}: " in page for value in tried)
    assert ("a better one may lie beyond it" in page) == (config["lr"] != 0.01)


@pytest.mark.parametrize(
    ("tune", "message"),
    [
        ({}, "tune.seeds: required"),
        ({"seeds": [1]}, "tune.seeds: other seeds than those that are compared are required, got 1 in both"),
        ({"seeds": [7, 7]}, "tune.seeds: distinct seeds are required"),
        ({"seeds": [7], "ratio": 1}, "tune.ratio: .*greater than 1"),
        ({"seeds": [7], "trials": 2}, "tune.trials: .*greater than or equal to 3"),
        (
            {"seeds": [7], "field": "method"},
            "tune.field: a path that is no axis of the study is required, got 'method'",
        ),
        ({"seeds": [7], "feild": "lr"}, "tune.feild: unknown field"),
    ],
)
def test_wrong_searches(tune, message):
    with pytest.raises(RecipeError, match=message):
        study(tune=tune)


def test_a_search_needs_a_value_to_start_from(tmp_path):
    with pytest.raises(
        RecipeError, match=r"tune.start: a positive value of 'update.rms.eps' to start from is required, got None"
    ):
        plan_tuning(study(tune={"seeds": [7], "field": "update.rms.eps"}), tmp_path)
    runs, _ = plan_tuning(study(tune={"seeds": [7], "field": "grad_clip", "start": 4.0}), tmp_path)
    assert sorted({run.experiment.grad_clip for run in runs}) == [2.0, 4.0, 8.0]
