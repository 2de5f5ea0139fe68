"""The search of a value for every cell of a study before its runs."""

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eigengraft import RecipeError
from eigengraft.experiments import load_experiment
from eigengraft.experiments.reports.records import METRICS, Tried, read_records, read_tuned
from eigengraft.experiments.reports.report import Report
from eigengraft.experiments.reports.tables import write_tables
from eigengraft.experiments.reproduction.claims import collect_results
from eigengraft.experiments.studies.plan import plan_runs, plan_tuning
from eigengraft.experiments.studies.running import prepare_study, run_study
from eigengraft.experiments.studies.study import load_study
from eigengraft.experiments.studies.tuning import CoordinateDescent, Trial

from ...cli import invoke
from ...processes import fork_what_is_spawned
from ...refusals import refused

TINY = {"task": {"kind": "digits", "layers": 1, "width": 4, "batch_size": 8}, "recipe": "adamw", "steps": 2}
LOSS = METRICS["val_loss"]


def study(**fields):
    axes = {"method": {"adam": {"lr": 0.01}, "lion": {"recipe": "lion", "lr": 0.5}}}
    return load_study(
        {"name": "tiny", "base": TINY, "axes": axes, "seeds": [0, 1], "tune": {"seeds": [7, 8]}, **fields}
    )


def search(tuning, loss, start=0.01, metric=LOSS):
    """What the search of `tuning` finds where the loss is a function of the values, by path."""
    cell, trials = load_experiment({**TINY, "lr": start}), []
    while wanted := tuning.next(cell, trials):
        trials += [Trial(values, loss(**values)) for values in wanted]
    return tuning.found(cell, trials, metric, "a cell")


@pytest.mark.parametrize(
    ("fields", "start"), [({}, 0.01), ({"weight_decay": 0.5}, 0.5), ({"recipe": "sgd"}, None), ({"lr": 0.2}, 0.01)]
)
def test_a_search_of_the_weight_decay_starts_at_that_of_the_cell(fields, start):
    """The weight decay of the recipe adamw is 0.01. The recipe sgd has no weight decay."""
    tuning, cell = (
        CoordinateDescent(seeds=(0,), space={"weight_decay": {"ratio": 2}}),
        load_experiment({**TINY, **fields}),
    )
    if start is None:
        with refused(RecipeError, "tune.space.weight_decay.start", "`start`"):
            tuning.next(cell, [])
    else:
        assert [values["weight_decay"] for values in tuning.next(cell, [])] == [start / 2, start, start * 2]


def steps(lr, start=0.01):
    """How many factors of 2 lie between a learning rate and the start."""
    return round(math.log2(lr / start))


def rates(found):
    return sorted(trial.values["lr"] for trial in found.tried)


@given(st.integers(-6, 6), st.integers(0, 9))
@settings(max_examples=30)
def test_the_least_value_of_a_valley_is_found_and_lies_inside(best, diverges_above):
    limit = best + 1 + diverges_above

    def loss(lr):
        k = steps(lr)
        return math.inf if k >= limit else abs(k - best) + 0.25 * (k > best)

    one = search(CoordinateDescent(seeds=(0,), trials=40), loss)
    assert one.values == {"lr": pytest.approx(0.01 * 2.0**best, rel=1e-5)}  # values have six digits
    assert one.edges == {}
    # Downhill from the start: never more than three values beyond those between the start and the best.
    assert len(one.tried) <= abs(best) + 3


def test_a_search_ends_after_its_trials_and_says_so():
    one = search(CoordinateDescent(seeds=(0,), trials=5), lambda lr: -lr, start=1.0)
    assert (rates(one), one.values, one.edges) == ([0.5, 1, 2, 4, 8], {"lr": 8.0}, {"lr": "largest"})


def test_where_every_value_diverges_the_least_is_taken():
    one = search(CoordinateDescent(seeds=(0,), trials=6), lambda lr: math.inf, start=1.0)
    assert rates(one) == [2.0**k for k in range(-4, 2)]
    assert (one.values, one.edges) == ({"lr": 2.0**-4}, {"lr": "least"})
    assert {trial.mean for trial in one.tried} == {None}


def test_larger_is_better_where_the_metric_says_so():
    one = search(CoordinateDescent(seeds=(0,)), lambda lr: -0.75 + abs(lr - 0.01), metric=METRICS["val_accuracy"])
    assert Tried({"lr": 0.01}, 0.75, None) in one.tried


def test_several_fields_are_searched_one_after_the_other():
    """A valley that is not along the axes: its lowest place on the grid has no better neighbor."""

    def loss(lr, decay):
        x, y = steps(lr), (0.0, 0.01, 0.1, 1.0).index(decay)
        return (x - 2) ** 2 + (y - 3) ** 2 + (x - 2) * (y - 3)

    space = {"lr": {"ratio": 2.0}, "decay": [0.0, 0.01, 0.1, 1.0]}
    one = search(CoordinateDescent(seeds=(0,), trials=40, space=space), lambda **values: loss(*values.values()))
    assert one.values == {"lr": 0.04, "decay": 1.0}
    assert one.edges == {"decay": "largest"}  # the list ends there
    first = [trial.values for trial in one.tried[:3]]
    assert first == [{"lr": lr, "decay": 0.01} for lr in (0.005, 0.01, 0.02)]
    assert len({json.dumps(dict(trial.values)) for trial in one.tried}) == len(one.tried)


def test_no_value_is_tried_after_the_seconds_are_spent():
    tuning = CoordinateDescent(seeds=(0,), seconds=10.0)
    cell = load_experiment({**TINY, "lr": 1.0})
    trials = [Trial({"lr": lr}, -lr, seconds=3.0) for lr in (0.5, 1.0, 2.0)]
    assert tuning.next(cell, trials) == [{"lr": 4.0}]
    assert tuning.next(cell, [*trials, Trial({"lr": 4.0}, -4.0, seconds=3.0)]) == []


def end(directory, runs, loss):
    """Let planned runs have ended with loss(lr, seed)."""
    for run in runs:
        path = directory / run.directory
        path.mkdir(parents=True)
        (path / "config.json").write_text(json.dumps(run.experiment.model_dump(mode="json")))
        (path / "result.json").write_text(
            json.dumps({"val_loss": loss(run.experiment.lr, run.experiment.seed), "steps": 2, "seconds": 1.0})
        )


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
    assert {cell: one.values["lr"] for cell, one in tuned.items()} == {"method=adam": 0.04, "method=lion": 0.03125}
    assert {trial.values["lr"]: trial.mean for trial in tuned["method=lion"].tried}[1.0] is None
    assert rounds == [12, 4, 4, 2, 2]  # lion goes down to half of 0.03125
    planned = plan_runs(study(), tuned)
    assert [(run.directory, run.experiment.lr) for run in planned][::2] == [
        ("method=adam/seed-0", 0.04),
        ("method=lion/seed-0", 0.03125),
    ]
    with refused(RecipeError, 2, 3):
        plan_tuning(study(base={**TINY, "steps": 3}), tmp_path)


@pytest.mark.parametrize("cause", ["data", "learning rate"])
def test_a_search_ends_if_the_data_are_at_fault(cause, tmp_path):
    runs = plan_tuning(study(), tmp_path)[0]
    end(tmp_path, runs, lambda lr, seed: None)
    for run in runs:
        (tmp_path / run.directory / "fault.json").write_text(json.dumps({"cause": cause, "text": "row 40 has NaN"}))
    if cause == "data":
        with refused(RecipeError, "row 40", tmp_path / "tuning"):
            plan_tuning(study(), tmp_path)
    else:
        assert plan_tuning(study(), tmp_path)[0]


@pytest.mark.slow
def test_a_study_tunes_then_runs(tmp_path, monkeypatch):
    fork_what_is_spawned(monkeypatch)
    one = study(axes={"method": {"adam": {"lr": 0.01}}}, seeds=[0], tune={"seeds": [7], "trials": 3})
    counts = []
    while True:
        prepared = prepare_study(one, tmp_path)
        list(run_study(prepared, workers=2))
        counts.append((prepared.phase, len(prepared.left)))
        if prepared.phase == "study":
            break
    assert counts == [("tuning", 3), ("study", 1)]
    manifest = json.loads((tmp_path / "study.json").read_text())
    found = manifest["tuned"]["method=adam"]
    tried = {trial["values"]["lr"]: trial["mean"] for trial in found["tried"]}
    assert list(tried) == [0.005, 0.01, 0.02]
    assert found["values"] == {"lr": min(tried, key=tried.__getitem__)}
    config = json.loads((tmp_path / manifest["runs"][0]["directory"] / "config.json").read_text())
    assert config["lr"] == found["values"]["lr"]
    page = Report(tmp_path).page()
    assert "Tuned values" in page and all(f"{value}: " in page for value in tried)  # as the report writes them
    assert ("a better one may lie beyond it" in page) == (config["lr"] != 0.01)


@pytest.mark.slow
def test_a_rate_at_an_end_of_what_was_tried_is_told_wherever_it_is_shown(tmp_path, monkeypatch):
    """Of three rates that are all far too small the largest is best."""
    fork_what_is_spawned(monkeypatch)
    one = study(axes={"method": {"adam": {"lr": 1e-5}}}, seeds=[0], tune={"seeds": [7], "trials": 3})
    (tmp_path / "tiny.yaml").write_text(json.dumps(one.model_dump(mode="json")))
    out = tmp_path / "out"
    done = invoke(["ablate", str(tmp_path / "tiny.yaml"), "--out", str(out)])
    (found,) = read_tuned(out)
    assert found.values == {"lr": 2e-5}
    assert "method=adam: the best lr, 2e-05, is at the largest end of what was tried" in done.output
    write_tables(read_records(out), tmp_path)
    for name in ("tables.md", "tables.tex"):
        assert "2e-05 (largest tried)" in (tmp_path / name).read_text()
    assert [row["edge"] for row in collect_results(out)["rows"]] == ["largest"]


@pytest.mark.parametrize(
    ("tune", "says"),
    [
        ({}, ("tune.seeds",)),
        ({"seeds": [1]}, ("tune.seeds", 1)),
        ({"seeds": [7, 7]}, ("tune.seeds",)),
        ({"seeds": [7], "space": {"lr": {"ratio": 1}}}, ("tune.space.lr.ratio", 1)),
        ({"seeds": [7], "trials": 2}, ("tune.trials", 3)),
        (
            {"seeds": [7], "space": {"method": {}}},
            ("tune.space", "method"),
        ),
        ({"seeds": [7], "spaec": {}}, ("tune.spaec", "space")),
        ({"seeds": [7], "kind": "tpee"}, ("tune", "tpee", "tpe")),
        ({"seeds": [7], "kind": "tpe"}, ("tune.space",)),
        (
            {"seeds": [7], "kind": "random", "space": {"lr": {"low": 1.0, "high": 0.1}}},
            ("tune.space.lr.high", 1),
        ),
        (
            {"seeds": [7], "kind": "random", "space": {"lr": {"ratio": 2.0}}},
            ("tune.space.lr.low", "lr.ratio"),
        ),
        (
            {"seeds": [7], "space": {"lr": 0.1}},
            ("tune.space.lr",),
        ),
        ({"seeds": [7], "space": {"lr": [0.1]}}, ("tune.space.lr",)),
    ],
)
def test_wrong_searches(tune, says):
    with refused(RecipeError, *says):
        study(tune=tune)


def test_a_search_needs_a_value_to_start_from(tmp_path):
    with refused(RecipeError, "tune.space.update.rms.eps.start", "None"):
        plan_tuning(study(tune={"seeds": [7], "space": {"update.rms.eps": {}}}), tmp_path)
    runs, _ = plan_tuning(study(tune={"seeds": [7], "space": {"grad_clip": {"start": 4.0}}}), tmp_path)
    assert sorted({run.experiment.grad_clip for run in runs}) == [2.0, 4.0, 8.0]
