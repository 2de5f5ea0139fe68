"""Axes whose values belong together, combinations that are left out, and what a study would run."""

import json
import os
from pathlib import Path

import pytest

import eigengraft
from eigengraft import RecipeError
from eigengraft.experiments.cli.study import sentence
from eigengraft.experiments.studies.plan import plan_runs
from eigengraft.experiments.studies.preview import preview_study
from eigengraft.experiments.studies.run_cost import study_cost
from eigengraft.experiments.studies.running import _option, available_cores, prepare_study
from eigengraft.experiments.studies.study import load_study, split_axes
from eigengraft.experiments.training.experiment import load_experiment
from eigengraft.experiments.training.train import train

from ...cli import invoke
from ...refusals import refused

TINY = {"task": {"kind": "digits", "layers": 1, "width": 4}, "recipe": "adamw", "steps": 2}
METHODS = {"adam": {}, "soap": {"recipe": "soap_fitted"}}


def study(**fields):
    return load_study({"name": "tiny", "base": TINY, "axes": {"method": METHODS}, **fields})


def test_values_at_the_same_place_belong_together():
    one = study(axes={"size": {"task.width": [4, 8], "lr": [0.1, 0.05]}, "method": METHODS})
    assert one.axes["size"] == {"4": {"task.width": 4, "lr": 0.1}, "8": {"task.width": 8, "lr": 0.05}}
    runs = plan_runs(one)
    assert [run.labels["size"] for run in runs] == ["4", "4", "8", "8"]
    assert [(run.experiment.task.width, run.experiment.lr) for run in runs][1:3] == [(4, 0.1), (8, 0.05)]
    assert load_study(one.model_dump(mode="json")) == one


def test_excluded_combinations_are_not_run():
    axes = {"method": METHODS, "lr": [0.1, 0.2, 0.3]}
    runs = plan_runs(study(axes=axes, exclude=[{"method": "soap", "lr": [0.1, 0.3]}], baseline={"lr": 0.1}))
    assert [(run.labels["method"], run.labels["lr"]) for run in runs] == [
        ("adam", "0.1"),
        ("adam", "0.2"),
        ("adam", "0.3"),
        ("soap", "0.2"),
    ]


def test_a_preview_counts_runs_and_plans_the_state_that_an_optimizer_has(tmp_path):
    one = study(seeds=[0, 1], tune={"seeds": [7], "trials": 5})
    (tmp_path / "method=soap" / "seed-1").mkdir(parents=True)
    (tmp_path / "method=soap" / "seed-1" / "result.json").write_text('{"diverged": false}')
    with refused(RecipeError, "weight_deacy", "weight_decay"):
        preview_study(study(tune={"seeds": [7], "space": {"weight_deacy": [0.0, 0.1]}}), tmp_path)
    preview = preview_study(one, tmp_path)
    assert [(cell.runs, cell.complete, cell.tuning) for cell in preview.cells] == [(2, 0, 5), (2, 1, 5)]
    assert preview.runs == 13
    assert preview.seconds == pytest.approx(sum(n * c.seconds for n, c in zip((7, 6), preview.cells, strict=True)))
    for run, cell in zip(plan_runs(one)[::2], preview.cells, strict=True):
        model = run.experiment.task.new_model(0)
        assert cell.parameters == sum(parameter.numel() for parameter in model.parameters())
        assert cell.state_bytes == eigengraft.compose(run.experiment.run_recipe, model).state_bytes()


def test_a_preview_makes_the_checks_of_a_run_and_refuses_with_the_same_error(tmp_path):
    """In the directory are runs of the same study with other steps, and the metric is none of the task's."""
    for run in plan_runs(study(seeds=[0, 1])):
        train(run.experiment, tmp_path / run.directory)
    longer = study(seeds=[0, 1], base={**TINY, "steps": 3, "lr": 0.5})
    for check in (preview_study, prepare_study):
        with refused(RecipeError, tmp_path, "4 runs", "steps: 2 -> 3", "seed-0 and 3 more", "name", "--out") as caught:
            check(longer, tmp_path)
        assert str(caught.value).count("steps: 2 -> 3") == 1 and "eval_every" not in str(caught.value)
        with refused(RecipeError, "metric", "val.nosuch", "digits", "val_accuracy"):
            check(study(metric="val.nosuch"), tmp_path / "new")
    assert not (tmp_path / "new").exists() and not (tmp_path / "study.json").exists()
    assert preview_study(study(seeds=[0, 1]), tmp_path).runs == 0


def test_only_the_settings_that_differ_are_named_with_their_runs(tmp_path):
    """One cell has another rate, and both cells have other steps."""
    for run in plan_runs(study()):
        train(run.experiment, tmp_path / run.directory)
    other = study(base={**TINY, "steps": 3}, settings=[{"when": {"method": "soap"}, "set": {"lr": 0.5}}])
    with refused(RecipeError, "2 runs", "steps: 2 -> 3 (method=adam/seed-0 and 1 more)", "0.5 (method=soap/seed-0)"):
        preview_study(other, tmp_path)


def test_expected_times_count_optimizers_evaluations_and_runs(tmp_path):
    def seconds(**fields):
        return [cell.seconds for cell in preview_study(study(base={**TINY, **fields}), tmp_path).cells]

    adam, soap = seconds(steps=300)
    assert 300 * 2e-3 < adam < soap  # its products and bases
    often = seconds(steps=300, eval_every=1)
    assert often[0] - adam == pytest.approx(294 * 1e-3, rel=0.1)  # 6 evaluations before, of one small batch
    assert seconds(steps=1)[0] > 0.1


def test_expected_times_are_those_of_finished_runs(tmp_path):
    """adam took ten times the guess, soap has not run, so that it is expected to take ten times the guess as well."""
    one = study(base={**TINY, "steps": 300}, seeds=[0, 1])
    guess = preview_study(one, tmp_path)
    assert guess.measured == 0
    step = study_cost(plan_runs(one), tmp_path).costs["method=adam/seed-0"].step
    place = tmp_path / "method=adam" / "seed-0"
    place.mkdir(parents=True)
    (place / "result.json").write_text(json.dumps({"seconds": 3000 * step, "steps": 300}))
    found = preview_study(one, tmp_path)
    assert [cell.seconds for cell in found.cells] == pytest.approx([10 * cell.seconds for cell in guess.cells])
    assert found.measured == 1 and found.seconds == pytest.approx(10 * (guess.seconds - guess.cells[0].seconds))
    assert "by the time of 1 finished run" in sentence(found)


def test_the_time_of_a_small_task_does_not_say_how_long_operations_of_a_large_one_take(tmp_path):
    """adam's steps took ten times the guess on a task of 4 units, whose steps have hardly any operations. On the task
    of 4096 units, most of a step is operations, whose guess stays."""
    sizes = {"small": {"task.width": 4}, "large": {"task.width": 4096, "task.batch_size": 1024}}
    one = study(axes={"size": sizes, "method": METHODS}, base={**TINY, "steps": 300})
    costs, guess = study_cost(plan_runs(one), tmp_path).costs, preview_study(one, tmp_path)
    step = costs["size=small,method=adam/seed-0"].step
    place = tmp_path / "size=small,method=adam" / "seed-0"
    place.mkdir(parents=True)
    (place / "result.json").write_text(json.dumps({"seconds": 3000 * step, "steps": 300}))
    found = preview_study(one, tmp_path)
    for before, after in zip(guess.cells, found.cells, strict=True):
        cost = costs[f"size={before.labels['size']},method={before.labels['method']}/seed-0"]
        factor = 10 if before.labels["size"] == "small" else 1 + 9 * cost.fixed / cost.step
        assert after.seconds == pytest.approx(factor * before.seconds)
    assert factor < 2


@pytest.mark.parametrize("share", [0.5, 6.0])
def test_a_guess_says_that_the_machine_is_busy(share, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "getloadavg", lambda: (share * available_cores(), 0.0, 0.0))
    said = sentence(preview_study(study(), tmp_path))
    assert "guessed from operations for an idle core" in said and ("6 processes share each core" in said) == (share > 1)


def test_a_preview_names_comparisons_and_the_fields_in_which_their_labels_differ(tmp_path):
    """Methods are compared wherever the rates stand, and an axis with one label is not compared."""
    preview = preview_study(study(axes={"method": METHODS, "lr": [0.1, 0.2]}), tmp_path)
    assert list(preview.configs) == ["method"] and len(preview.comparisons) == 2
    assert {label for panel in preview.configs["method"].values() for label in panel} == {"adam", "soap"}
    assert "adam, soap" in preview.comparisons[0] and "lr = 0.1; lr = 0.2" in preview.comparisons[1]
    rates = preview_study(study(axes={"method": METHODS, "lr": [0.1, 0.2]}, baseline={"lr": "0.1"}), tmp_path)
    assert list(rates.configs) == ["lr", "method"] and "lr 0.1, lr 0.2" in rates.comparisons[1]
    one = study(axes={"method": METHODS, "lr": [0.1]})
    assert one.compared == ("method", "adam") and list(preview_study(one, tmp_path).configs) == ["method"]


@pytest.mark.parametrize(
    ("axes", "compared"),
    [
        ({"method": METHODS, "recipe.lr": [0.1, 0.2]}, ("method", "adam")),
        ({"lr": [0.1, 0.2], "method": METHODS}, ("method", "adam")),
        ({"steps": [2, 4], "method": METHODS, "lr": [0.1, 0.2]}, ("method", "adam")),
        ({"method": METHODS, "steps": [2, 4]}, ("steps", "2")),
        ({"lr": [0.1, 0.2]}, ("lr", "0.1")),
        ({"method": METHODS, "lr": {"low": {"lr": 0.1}, "high": {"lr": 0.2}}}, ("lr", "low")),
    ],
)
def test_an_axis_of_learning_rates_is_compared_only_if_no_other_axis_has_several_labels(axes, compared):
    assert study(axes=axes).compared == compared


def test_a_preview_counts_what_constraints_keep_of_parameters_in_their_dtype(tmp_path, monkeypatch):
    one = study(base={**TINY, "recipe": {"base": "adamw", "constraints": {"kind": "rounding", "rule": "compensated"}}})
    task = plan_runs(one)[0].experiment.task

    def mixed(self, seed):
        model = self.build()
        for parameter in model.parameters():
            parameter.data = parameter.data.bfloat16() if parameter.ndim > 1 else parameter.data
        return model

    monkeypatch.setattr(type(task), "new_model", mixed)
    run, cell = plan_runs(one)[0], preview_study(one, tmp_path).cells[0]
    assert cell.state_bytes == eigengraft.compose(run.experiment.run_recipe, mixed(task, 0)).state_bytes()


def test_the_command_lists_cells_and_differences_and_writes_nothing(tmp_path):
    path = tmp_path / "tiny.yaml"
    path.write_text(
        "{base: {task: digits, recipe: adamw, steps: 60}, axes: {lr: [1], m: {a: {}, s: {recipe: soap_fitted}}}}"
    )
    done = invoke(["ablate", str(path), "--dry-run", "--out", str(tmp_path / "runs")])
    assert done.exit_code == 0, done.output
    assert "seconds a run" in done.output
    assert "tiny: 2 runs in 2 cells" in done.output
    assert "recipe.update.eigenbasis" in done.output
    assert list(tmp_path.iterdir()) == [path]


def test_a_comma_in_a_text_of_a_study_separates_nothing():
    study = load_study("demo", ["description=a, b", "tuned_in=grid A, grid B", "seeds=4,5"])
    assert (study.description, study.tuned_in, study.seeds) == ("a, b", "grid A, grid B", (4, 5))
    assert load_study("demo", ["description=is it: [faster", "name='a'"]).model_dump(
        include={"description", "name"}
    ) == {
        "description": "is it: [faster",
        "name": "a",
    }


def test_values_of_overrides_are_yaml_as_in_a_file(tmp_path: Path) -> None:
    own = {"base": TINY, "axes": {"recipe": ["adamw"]}}
    changes = ["axes.recipe=[adamw, muon]", "base.callbacks=[tensorboard]", "base.schedule={kind: cosine}"]
    found = load_study(own, changes)
    assert list(found.axes["recipe"]) == ["adamw", "muon"]
    assert (found.base["callbacks"], found.base["schedule"]) == (["tensorboard"], {"kind": "cosine"})
    file = tmp_path / "mine.yaml"
    file.write_text("{task: digits, recipe: adamw, steps: 9}")
    assert load_study(file, ["lr=0.1,0.2", "baseline={lr: 0.2}", "seeds=[3]"]).baseline == {"lr": "0.2"}
    for overrides, says in ((["seeds=[a]"], ("seeds", "'a'")), (["base.task={kind"], ("base.task", "{kind", "brace"))):
        with refused(RecipeError, *says):
            load_study(own, overrides)


@pytest.mark.parametrize(
    ("option", "pair"),
    [
        ("slurm_partition=gpu", ("slurm_partition", "gpu")),
        ("timeout_min=5", ("timeout_min", 5)),
        ("slurm_additional_parameters={account: a}", ("slurm_additional_parameters", {"account": "a"})),
    ],
)
def test_options_of_jobs_are_yaml_too(option, pair):
    assert _option(option) == pair


def test_several_values_of_an_override_are_an_axis() -> None:
    axes, own = split_axes(
        [
            "lr=0.001,0.01",
            "base.task={kind: digits, width: 8}",
            "recipe=adamw,[rms],{base: soap, lr: 1}",
            "seeds=0,1",
            'axes.method.a={"recipe.update": [{"kind": "rms", "refresh": {"steps": 20}}, {"beta": 1}], "lr": 0.1}',
        ]
    )
    assert axes == {"lr": [0.001, 0.01], "recipe": ["adamw", ["rms"], {"base": "soap", "lr": 1}]}
    assert own[:2] == ["base.task={kind: digits, width: 8}", "seeds=[0,1]"] and len(own) == 3


def test_an_experiment_with_an_axis_is_a_study(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("{task: digits, recipe: adamw, steps: 9}")
    found = load_study(file, ["recipe=adamw,soap", "lr=0.1,0.2", "steps=5", "seeds=0,1", "update.rms.beta=0.9"])
    assert (found.name, found.seeds, list(found.axes)) == ("mine", (0, 1), ["recipe", "lr"])
    runs = plan_runs(found)
    assert [(run.labels["recipe"], run.experiment.lr, run.experiment.steps) for run in runs[::2]] == [
        ("adamw", 0.1, 5),
        ("adamw", 0.2, 5),
        ("soap", 0.1, 5),
        ("soap", 0.2, 5),
    ]
    with refused(RecipeError, "study", "experiment"):
        load_study(file, ["steps=5"])


def test_an_experiment_with_fields_of_a_study_is_a_study_of_one_cell(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("{task: digits, recipe: adamw, steps: 9}")
    runs = plan_runs(load_study(file, ["seeds=0,1", "lr=0.1"]))
    assert [(run.labels, run.experiment.lr, run.experiment.seed) for run in runs] == [
        ({"recipe": "adamw"}, 0.1, 0),
        ({"recipe": "adamw"}, 0.1, 1),
    ]
    assert load_study(file, ["tune={seeds: [7]}"]).tune is not None
    assert load_study(file, ["seeds=3"]).seeds == (3,) == load_study(file, ["seeds=[3]"]).seeds
    with refused(RecipeError, "ablate", "mine.yaml seeds=0,1"):
        load_experiment(file, ["seed=0,1"])


def test_an_axis_of_an_override_replaces_the_axis_of_a_study() -> None:
    own = {"base": {"task": "digits", "recipe": "adamw", "steps": 1}, "axes": {"lr": [1.0], "steps": [1, 2]}}
    assert load_study(own, ["lr=0.1,0.2"]).axes == {
        "steps": {"1": {"steps": 1}, "2": {"steps": 2}},
        "lr": {"0.1": {"lr": 0.1}, "0.2": {"lr": 0.2}},
    }
