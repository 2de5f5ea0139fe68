"""Random search, TPE and successive halving: draws that follow from earlier trials, and runs that are stopped."""

import dataclasses
import json
import math
from collections import Counter

import numpy as np
import pytest

from eigengraft import RecipeError
from eigengraft.experiments import load_experiment
from eigengraft.experiments.reports.records import METRICS, Run
from eigengraft.experiments.studies.plan import plan_tuning
from eigengraft.experiments.studies.study import load_study
from eigengraft.experiments.studies.tuning import TPE, Halving, Random, Range, Trial, best_trial, trial_name
from eigengraft.experiments.training.train import train

from ...refusals import refused

TINY = {"task": {"kind": "digits", "layers": 1, "width": 4, "batch_size": 8}, "recipe": "adamw", "steps": 9}
CELL = load_experiment(TINY)
SPACE = {"lr": {"low": 1e-4, "high": 1.0, "log": True}, "schedule.warmup_steps": [10, 30]}
LOSS = METRICS["val_loss"]


def search(tuning, loss):
    trials = []
    while wanted := tuning.next(CELL, trials):
        trials += [Trial(values, loss(values)) for values in wanted]
    return tuning.found(CELL, trials, LOSS, "a cell")


def test_random_values_are_uniform_on_their_scale_and_the_same_again():
    space = {**SPACE, "n": {"low": 1.0, "high": 4.0, "integer": True}, "x": {"low": -1.0, "high": 1.0}}
    drawn = Random(seeds=(0,), space=space, trials=2000).draw([], 2000)
    logs = np.log10([values["lr"] for values in drawn])
    # twelve intervals of equal length in the logarithm: chi squared with 11 degrees of freedom, p > 0.001 below 31.3
    counts, _ = np.histogram(logs, 12, (-4, 0))
    assert ((counts - 2000 / 12) ** 2 / (2000 / 12)).sum() < 31.3
    assert abs(np.corrcoef(logs, [values["x"] for values in drawn])[0, 1]) < 0.1  # 4.5 standard errors
    shares = Counter(values["n"] for values in drawn)
    assert sorted(shares) == [1, 2, 3, 4] and min(shares.values()) > 400  # 5 standard errors below 500
    assert {values["schedule.warmup_steps"] for values in drawn} == {10, 30}
    assert Random(seeds=(0,), space=space).draw([Trial(values, 0.0) for values in drawn[:3]], 2) == drawn[3:5]


def test_the_best_draw_is_found_and_its_place_in_the_range():
    one = search(Random(seeds=(0,), space=SPACE, trials=30), lambda values: values["lr"])
    assert one.values["lr"] == min(trial.values["lr"] for trial in one.tried)
    assert one.edges == {"lr": "least"}  # below 1e-4 * 10^(0.05 * 4)
    assert Range(low=1e-4, high=1.0, log=True).edge(1.6e-4) is None
    assert Range(low=0.0, high=1.0).edge(0.0) is None  # nothing lies beyond 0
    assert Range(low=0.0, high=1.0).edge(0.96) == "largest"


def test_a_stopped_trial_is_the_best_only_where_all_were_stopped():
    """It may have the lowest score, for it was never seen at the end."""
    stopped, worse, ended = (
        Trial({"lr": 0.3}, 0.1, stopped=3),
        Trial({"lr": 0.2}, 0.2, stopped=3),
        Trial({"lr": 0.1}, 0.5),
    )
    assert best_trial([stopped, worse, ended]) is ended
    assert best_trial([worse, stopped]) is stopped


@pytest.mark.slow
def test_tpe_comes_closer_than_random_search_and_draws_the_same_again():
    pytest.importorskip("optuna", reason="the extra `search` is not installed")
    space = {"lr": {"low": 1e-4, "high": 1.0, "log": True}, "decay": {"low": 0.0, "high": 1.0}}

    def loss(values):
        return math.log10(values["lr"] / 0.02) ** 2 + 4 * (values["decay"] - 0.3) ** 2

    def best(kind, seed):
        found = search(kind(seeds=(0,), space=space, trials=30, seed=seed), loss)
        return min(trial.mean for trial in found.tried)

    seeds = range(3)
    assert np.median([best(TPE, s) for s in seeds]) < np.median([best(Random, s) for s in seeds])
    tuning = TPE(seeds=(0,), space=space, together=2, startup=2)
    trials = [Trial(values, loss(values)) for values in tuning.draw([], 4)]
    trials[1] = dataclasses.replace(trials[1], score=math.inf)
    trials[2] = dataclasses.replace(trials[2], stopped=3)
    first = tuning.draw(trials, 2)
    assert first == tuning.draw(trials, 2) and first[0] != first[1]
    assert all(1e-4 <= values["lr"] <= 1 and 0 <= values["decay"] <= 1 for values in first)


@pytest.mark.parametrize("kind", [Random, TPE])
def test_searches_with_neighboring_seeds_share_no_draw(kind):
    pytest.importorskip("optuna", reason="the extra `search` is not installed")
    space = {"lr": {"low": 1e-4, "high": 1.0, "log": True}}
    draws = [kind(seeds=(0,), space=space, seed=seed).draw([], 5) for seed in range(4)]
    assert len({values["lr"] for drawn in draws for values in drawn}) == 20


@pytest.mark.parametrize("rate", [2, 3, 4])
def test_successive_halving_decides_as_optuna(rate):
    optuna = pytest.importorskip("optuna", reason="the extra `search` is not installed")
    study = optuna.create_study(
        pruner=optuna.pruners.SuccessiveHalvingPruner(min_resource=2, reduction_factor=rate, min_early_stopping_rate=0)
    )
    halving, cell = Halving(rate=rate, least=2), CELL.replace(steps=2 * rate**2 + 1, eval_every=1)
    assert halving.rungs(cell) == [2, 2 * rate, 2 * rate**2]
    generator, earlier = np.random.default_rng(0), []
    for _ in range(25):
        losses, theirs, curve = generator.random(3).tolist(), study.ask(), {}
        limits = halving.limits(cell, earlier, LOSS)
        for step, loss in zip(halving.rungs(cell), losses, strict=True):
            theirs.report(loss, step)
            curve[step] = loss
            stops = limits is not None and limits.exceeded(step, loss)
            assert stops == theirs.should_prune()
            if stops:
                break
        study.tell(theirs, state=optuna.trial.TrialState.PRUNED if stops else None, values=None if stops else [loss])
        earlier.append(Trial({}, loss, curves={cell.seed: curve}))


def test_comparisons_are_at_evaluations():
    with refused(RecipeError, "tune.halving.least", 50, 9):
        Halving(least=3).limits(CELL, [], LOSS)
    assert Halving(rate=3, least=10).rungs(CELL.replace(steps=300, eval_every=20)) == [20, 40, 100, 280]


@pytest.mark.slow
def test_a_search_with_halving_stops_runs_and_takes_none_of_them(tmp_path):
    tune = {"kind": "random", "seeds": [7], "trials": 4, "space": SPACE["lr"], "halving": {"least": 3, "rate": 2}}
    tune["space"] = {"lr": SPACE["lr"]}
    one = load_study(
        {
            "base": {**TINY, "eval_every": 3, "log_every": 3},
            "axes": {"method": {"adam": {}}},
            "tune": tune,
            "seeds": [0],
        }
    )
    while runs := plan_tuning(one, tmp_path)[0]:
        for run in runs:
            assert load_experiment(json.loads(run.experiment.model_dump_json())) == run.experiment
            train(run.experiment, tmp_path / run.directory)
    found = plan_tuning(one, tmp_path)[1]["method=adam"]
    places = (tmp_path / "tuning" / "method=adam" / trial_name(trial.values) / "seed-7" for trial in found.tried)
    curves = [Run({}, 7, place).evaluations(LOSS) for place in places]
    for k, trial in enumerate(found.tried):
        # the rule with 2: at step 3 as good as the best of n + 1 over 2, rounded down and at least 1
        others = sorted(curve[3] for curve in curves[:k])
        behind = bool(others) and curves[k][3] > others[max((k + 1) // 2 - 1, 0)]
        assert (trial.stopped == 3) == behind
        assert max(curves[k]) == (trial.stopped or 9)
    assert {trial.stopped for trial in found.tried} > {None}
    assert found.values == min((t for t in found.tried if t.stopped is None), key=lambda t: t.mean).values
    assert "Successive halving: at step 3, and at every 2-fold" in found.rule


def test_tpe_without_optuna_names_the_package(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "optuna", None)
    with refused(RecipeError, "tune.kind", "pip install optuna"):
        TPE(seeds=(0,), space=SPACE).draw([], 1)
