"""Studies: expansion and its errors, running, failing runs, and continuing after a kill."""

import json
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest

from eigengraft import RecipeError
from eigengraft.experiments.cli import study as study_commands
from eigengraft.experiments.reports.records import read_records
from eigengraft.experiments.studies import study as study_file
from eigengraft.experiments.studies.plan import cells, plan_runs, refuse_changed, refuse_other_provenance
from eigengraft.experiments.studies.preview import preview_study
from eigengraft.experiments.studies.running import complete_study, prepare_study, run_study
from eigengraft.experiments.studies.study import Study, load_study, shipped_studies
from eigengraft.experiments.training.train import train

from ...cli import invoke
from ...processes import FORK_SPAWNED, fork_what_is_spawned, run, start
from ...refusals import check_said, refused

pytestmark = pytest.mark.slow

TINY = {
    "task": {"kind": "digits", "layers": 1, "width": 8, "batch_size": 8},
    "recipe": "adamw",
    "steps": 6,
    "eval_every": 3,
    "log_every": 1,
    "checkpoint_every": 2,
}
AXES = {
    "task": {"small": {"task.width": 4}, "large": {"task.width": 8, "steps": 9}},
    "method": {"adam": {}, "soap": {"recipe": "soap_fitted", "update.eigenbasis.refresh.steps": 2}},
}


def study(**fields):
    return load_study({"name": "tiny", "base": TINY, "axes": AXES, **fields})


def complete(directory):
    return {path.parent.relative_to(directory).as_posix() for path in directory.rglob("result.json")}


def test_a_finished_study_gains_seeds_and_labels_and_only_new_runs_are_left(tmp_path):
    before = study(axes={"lr": [0.1, 0.2]}, seeds=[0])
    for planned in plan_runs(before):
        train(planned.experiment, tmp_path / planned.directory)
    assert prepare_study(before, tmp_path).left == ()
    after = study(axes={"lr": [0.1, 0.2, 0.3]}, seeds=[0, 1])
    left = {one.directory for one in prepare_study(after, tmp_path).left}
    assert left == {"lr=0.1/seed-1", "lr=0.2/seed-1", "lr=0.3/seed-0", "lr=0.3/seed-1"}
    assert len(read_records(tmp_path).runs) == 6
    prepare_study(study(axes={"lr": [0.2, 0.3]}, seeds=[0]), tmp_path)
    assert [one.directory.parent.name for one in read_records(tmp_path).runs] == ["lr=0.2", "lr=0.3"]


UNGUARDED = """
from eigengraft.experiments import Study

base = {"task": {"kind": "digits", "width": 4}, "recipe": "adamw", "steps": 2}
Study(name="tiny", base=base, axes={"lr": [0.1, 0.2]}).run("study", workers=1)
"""


def test_a_script_without_a_guard_is_refused_with_the_guard_that_it_needs(tmp_path):
    (tmp_path / "script.py").write_text(UNGUARDED)
    done = run("script.py", folder=tmp_path)
    assert done.returncode == 1 and "bootstrapping" not in done.stderr
    check_said(done.stderr.strip().splitlines()[-1], "__main__")


def test_expansion():
    settings = [
        {"when": {"task": "large", "method": "soap"}, "set": {"lr": 0.5}},
        {"when": {"method": ["adam", "soap"]}, "set": {"weight_decay": 0.25}},
    ]
    runs = plan_runs(study(settings=settings, seeds=[3, 5]))
    assert [run.directory for run in runs] == [
        f"task={task},method={method}/seed-{seed}"
        for task in ("small", "large")
        for method in ("adam", "soap")
        for seed in (3, 5)
    ]
    last = runs[-1].experiment
    assert (last.seed, last.steps, last.task.width, last.lr, last.weight_decay) == (5, 9, 8, 0.5, 0.25)
    assert (last.recipe.name, last.recipe.model_dump()["update"][0]["refresh"]["steps"]) == ("soap_fitted", 2)
    assert (runs[0].experiment.steps, runs[0].experiment.task.width, runs[0].experiment.lr) == (6, 4, None)


def test_an_axis_may_be_a_path_with_values():
    runs = plan_runs(study(axes={"lr": [1e-3, 0.1], "task.layers": [1, 2]}))
    assert [run.directory.partition("/")[0] for run in runs][1] == "lr=0.001,task.layers=2"
    assert [(run.experiment.lr, run.experiment.task.layers) for run in runs] == [
        (1e-3, 1),
        (1e-3, 2),
        (0.1, 1),
        (0.1, 2),
    ]


def test_labels_of_settings_and_baseline_may_be_values():
    some = study(
        axes={"lr": [0.001, 0.1], "method": AXES["method"]},
        settings=[{"when": {"lr": 0.1}, "set": {"steps": 7}}],
        baseline={"lr": 0.1},
    )
    assert [run.experiment.steps for run in plan_runs(some)] == [6, 6, 7, 7]
    assert some.compared == ("lr", "0.1")
    assert study().compared == ("method", "adam")


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"axes": {}}, ("axes", 1)),
        ({"axes": {"lr": []}}, ("axes.lr",)),
        ({"axes": {"lr": [1, 1]}}, ("lr", 1)),
        (
            {"axes": {"task.path": ["/a b"]}},
            ("/a b",),
        ),
        ({"axes": {"a": {"x": {"lr": 1.0}}, "b": {"y": {"lr": 2.0}}}}, ("lr", "a", "b")),
        ({"baseline": {"methd": "adam"}}, ("baseline", "methd", "method")),
        ({"baseline": {"method": "adamw"}}, ("baseline.method", "adamw", "adam")),
        ({"settings": [{"when": {"task": "smal"}, "set": {"lr": 1.0}}]}, ("settings.when.task", "smal")),
        ({"settings": [{"when": {"task": "small"}}]}, ("set",)),
        ({"seeds": [1, 1]}, ("seeds",)),
        ({"seeds": []}, ("seeds", 1)),
        ({"metric": "loss"}, ("metric", "val_loss")),
        ({"sedes": [1]}, ("sedes",)),
        ({"seeds": [0, -1]}, ("seeds", -1)),
        ({"tune": {"seeds": [-7]}}, ("tune", "seeds", -7)),
        (
            {"axes": {"lr": [0.1, 0.01]}, "settings": [{"when": {"lr": 0.1}, "set": {"lr": 0.3}}]},
            ("settings", "lr", 0.1, 0.3),
        ),
        (
            {
                "axes": {"recipe": ["adamw", "soap"], "steps": [4, 6]},
                "settings": [{"when": {"recipe": "soap"}, "set": {"steps": 4}}],
            },
            ("settings", "steps", 6, 4),
        ),
        (
            {
                "axes": {"task": ["digits", "byte_lm"]},
                "settings": [{"when": {"task": "digits"}, "set": {"task.kind": "byte_lm"}}],
            },
            ("settings", "task.kind", "digits", "byte_lm"),
        ),
    ],
)
def test_wrong_studies(fields, says):
    with refused(RecipeError, *says):
        study(**fields)


@pytest.mark.parametrize(
    ("axes", "setting"),
    [
        ({"lr": {"high": {"lr": 0.1}, "low": {"lr": 0.01}}}, {"when": {"lr": "high"}, "set": {"lr": 0.3}}),
        ({"lr": [0.1, 0.01]}, {"when": {"lr": 0.1}, "set": {"lr": 0.1, "steps": 9}}),
        ({"recipe": ["adamw", "soap"]}, {"when": {"recipe": "soap"}, "set": {"update.eigenbasis.refresh.steps": 2}}),
        ({"recipe": ["adamw", "soap"]}, {"when": {"recipe": "soap"}, "set": {"recipe": {"base": "soap", "lr": 0.1}}}),
        ({"task": ["digits"]}, {"when": {"task": "digits"}, "set": {"task": {"kind": "digits", "width": 4}}}),
    ],
)
def test_settings_may_change_what_a_label_does_not_say(axes, setting):
    assert plan_runs(study(axes=axes, settings=[setting]))


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"axes": {"stepps": [1, 2]}}, ("axes.stepps:", "'steps'")),
        ({"axes": {"m": {"a": {"stepps": 1}}}}, ("axes.m.stepps:", "'steps'")),
        ({"axes": {"width": [1, 2]}}, ("axes.width:", "task: {kind:")),
        ({"base": {**TINY, "step": 5}}, ("base.step:", "'steps'")),
        (
            {"axes": {"lr": [1, 2]}, "settings": [{"when": {"lr": 1}, "set": {"stepps": 1}}]},
            ("settings.0.set.stepps:", "'steps'"),
        ),
        ({"tune": {"space": {"stepps": [1, 2]}, "seeds": [7]}}, ("tune.space.stepps:", "'steps'")),
    ],
)
def test_a_field_that_no_experiment_has_is_refused_when_the_study_is_made(fields, says):
    with refused(RecipeError, *says):
        study(**fields)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"axes": {"steps": [5, 0]}}, (0, "steps", 1)),
        ({"axes": {"m": {"a": {"recipe": "sopa"}}}}, ("m=a", "sopa")),
        ({"axes": {"m": {"a": {"recipe": "adamw", "update.eigenbasis.refresh.steps": 1}}}}, ("m=a", "eigenbasis")),
    ],
)
def test_wrong_cells_are_all_named_before_any_run(fields, says):
    with refused(RecipeError, *says):
        plan_runs(study(**fields))


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"axes": {"recipe": ["adamw", "sophia"]}}, ("recipe=sophia", "update.diagonal_newton", "hessian_diagonal")),
        ({"axes": {"recipe": ["adamw", "sophia"]}, "tune": {"seeds": [7]}}, ("recipe=sophia", "hessian_diagonal")),
        ({"axes": {"method": {"sophia": {"recipe": "sophia"}}}, "equal": "seconds"}, ("method=sophia",)),
        ({"axes": {"callbacks": {"none": {}, "log": {"callbacks": ["wandb"]}}}}, ("callbacks=log", "wandb")),
    ],
)
def test_cells_whose_runs_cannot_start_are_refused_before_any_run(fields, says, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    one = study(**fields)
    for check in (prepare_study, preview_study):
        with refused(RecipeError, *says):
            check(one, tmp_path / "out")
    assert not (tmp_path / "out").exists()


PROVIDED = """
from typing import Literal
import torch
from eigengraft.experiments.training.callbacks import Callback

class Hessian(Callback):
    kind: Literal["hessian"] = "hessian"

    def started(self, run):
        (run.directory / "started").touch()
        ones = {parameter: torch.ones_like(parameter) for parameter in run.model.parameters()}
        run.optimizer.provide("hessian_diagonal", lambda: ones)
"""


def test_a_callback_of_ones_own_may_provide_a_signal_and_is_not_called_by_a_preview(tmp_path):
    (tmp_path / "provided.py").write_text(PROVIDED)
    base = {**TINY, "imports": [str(tmp_path / "provided.py")], "callbacks": ["hessian"]}
    assert preview_study(study(base=base, axes={"recipe": ["sophia"]}), tmp_path / "out").runs == 1
    assert not (tmp_path / "out").exists()
    timed = prepare_study(study(base=base, axes={"recipe": ["sophia"]}, equal="seconds"), tmp_path / "out").left[0]
    assert [type(one).__name__ for one in timed.experiment.callbacks] == ["Hessian", "StopAfter"]
    assert not train(timed.experiment, tmp_path / "timed").diverged


def test_every_wrong_cell_is_named():
    with pytest.raises(RecipeError) as error:
        plan_runs(study(axes={"lr": [-1.0, 1.0, -2.0]}))
    assert [line.partition(":")[0] for line in str(error.value).splitlines()] == ["lr=-1.0", "lr=-2.0"]
    with pytest.raises(RecipeError) as error:
        plan_runs(study(axes={"recpe": ["adamw", "soap", "sgd"]}))
    (line,) = str(error.value).splitlines()
    assert line.partition(":")[0] == "axes.recpe"


def test_files(tmp_path):
    (tmp_path / "base.yaml").write_text("task: {kind: digits, width: 4}\nrecipe: adamw\nsteps: 3\n")
    (tmp_path / "trial.yaml").write_text("base: base.yaml\naxes: {lr: [0.1, 0.2]}\n")
    loaded = load_study(tmp_path / "trial.yaml", ["base.steps=4", "seeds=[1, 2]"])
    assert (loaded.name, loaded.seeds) == ("trial", (1, 2))
    assert {run.experiment.steps for run in plan_runs(loaded)} == {4}
    with refused(RecipeError, "none.yaml"):
        load_study("none.yaml")
    (tmp_path / "bad.yaml").write_text("base: base.yaml\naxes: 3\n")
    with refused(RecipeError, "bad.yaml"):
        load_study(tmp_path / "bad.yaml")


@pytest.mark.parametrize(
    "axes",
    [
        "recipe: [adamw, own.yaml]",
        "method: {recipe: [adamw, own.yaml], lr: [0.1, 0.2]}",
        "method: {adamw: {}, own.yaml: {recipe: own.yaml}}",
        "method: {adamw: {}, own.yaml: {}}\nsettings: [{when: {method: own.yaml}, set: {recipe: own.yaml}}]",
    ],
)
def test_files_that_a_study_names_are_beside_it(axes, tmp_path):
    """Not in the present directory, however an axis is written; labels stay as they are."""
    (tmp_path / "own.yaml").write_text("base: lion\n")
    base = "base: {task: {kind: digits, width: 4}, recipe: adamw, steps: 3}\n"
    (tmp_path / "trial.yaml").write_text(f"{base}axes:\n  {axes}\n")
    loaded = load_study(tmp_path / "trial.yaml")
    assert [list(cell.labels.values()) for cell in cells(loaded)] == [["adamw"], ["own.yaml"]]
    assert [run.experiment.recipe.name for run in plan_runs(loaded)] == ["adamw", "own"]


def test_python_and_data_say_the_same():
    some = study(settings=[{"when": {"task": "small"}, "set": {"lr": 1.0}}])
    assert load_study(some) == some
    assert Study(**some.model_dump()) == some
    assert load_study(json.loads(some.model_dump_json())) == some


def test_run_keep_and_refuse(tmp_path, monkeypatch):
    fork_what_is_spawned(monkeypatch)
    prepared = prepare_study(study(), tmp_path)
    assert len(prepared.left) == 4
    assert prepared.left[0].directory.startswith("task=large")
    news = list(run_study(prepared, workers=2))
    assert sorted(item.run.directory for item in news if item.kind == "done") == sorted(complete(tmp_path))
    assert len(complete(tmp_path)) == 4
    assert news[-1].fraction == pytest.approx(1)
    assert [run.status(read_records(tmp_path).metric) for run in read_records(tmp_path).runs] == ["complete"] * 4

    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("result.json")}
    assert prepare_study(study(), tmp_path).left == ()
    more = prepare_study(study(seeds=[0, 1]), tmp_path)
    assert {run.seed for run in more.left} == {1}
    assert before == {path: path.stat().st_mtime_ns for path in tmp_path.rglob("result.json")}

    changed = study(settings=[{"when": {"task": "small", "method": "adam"}, "set": {"lr": 0.5}}])
    with refused(RecipeError, "adam/seed", 0, 0.5):
        prepare_study(changed, tmp_path)
    refuse_changed(plan_runs(study()), tmp_path)


OWN = """
from typing import Literal
from eigengraft.experiments.tasks import ByteLM, Task

class Own(Task):
    kind: Literal["own"] = "own"
    path: str
    def text(self): return ByteLM(path=self.path, width=8, heads=2, layers=1, context=8, batch_size=4)
    def load(self): return self.text().load()
    def build(self): return self.text().build()
"""


@pytest.mark.parametrize(
    ("edited", "named"),
    [("own.py", "imports own.py: "), ("text", "data of "), ("recipe.yaml", "recipe.update.rms.beta: 0.9 -> 0.5")],
)
def test_more_seeds_of_other_code_or_data_are_refused(tmp_path, edited, named):
    """A file is edited between the first seeds of a study and the next ones."""
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "text").write_bytes(b"one thing " * 1000)
    (tmp_path / "recipe.yaml").write_text("update: [{kind: momentum}, {kind: rms, beta: 0.9}]\n")
    (tmp_path / "study.yaml").write_text(
        "base:\n  imports: [own.py]\n  task: {kind: own, path: text}\n"
        "  recipe: recipe.yaml\n  steps: 3\n"
        "axes: {method: {mine: {}, adam: {recipe: adamw}}}\ntune: {seeds: [7], trials: 3}\n"
    )
    command = ("-m", "eigengraft", "ablate", "study.yaml", "--out", "out", "--workers", "1")
    assert run(*command, folder=tmp_path, **FORK_SPAWNED).returncode == 0
    before = complete(tmp_path / "out")
    path = tmp_path / edited
    path.write_text(path.read_text().replace("0.9", "0.5").replace("one", "two") + "\n")
    again = run(*command, "seeds=[0, 1]", folder=tmp_path, **FORK_SPAWNED)
    assert again.returncode == 2 and named in " ".join(again.stderr.replace("\u2502", "").split())
    assert complete(tmp_path / "out") == before
    assert len(before) == 2 + 6  # and what the searches tried


@pytest.mark.parametrize("phase", ["", "timing", "tuning"])
def test_runs_of_every_phase_have_the_same_provenance(phase, tmp_path):
    planned = plan_runs(study(axes={"lr": [0.1]}, seeds=[0]))
    train(planned[0].experiment, tmp_path / phase / planned[0].directory)
    refuse_other_provenance(planned, tmp_path)
    (file,) = tmp_path.rglob("env.json")
    file.write_text(json.dumps({**json.loads(file.read_text()), "torch": "0.1"}))
    folder = (Path(phase) / planned[0].directory).parent
    with refused(RecipeError, tmp_path, "torch: 0.1 -> ", f"rm -r {tmp_path / folder}"):
        refuse_other_provenance(planned, tmp_path)
    shutil.rmtree(tmp_path / folder)
    refuse_other_provenance(planned, tmp_path)


def test_the_cells_whose_runs_had_other_code_are_named_and_no_others(tmp_path):
    planned = plan_runs(study(axes={"lr": [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7]}, seeds=[0]))
    train(planned[0].experiment, tmp_path / planned[0].directory)
    first, *others = (tmp_path / one.directory for one in planned)
    for other in others:
        shutil.copytree(first, other)
        file = other / "env.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), "torch": "0.1"}))
    with refused(RecipeError, "6 runs", *(other.parent for other in others)) as caught:
        refuse_other_provenance(planned, tmp_path)
    assert "lr=0.1" not in str(caught.value)


BROKEN = """
from typing import Literal
from eigengraft.experiments.tasks.base import Examples
from eigengraft.experiments.tasks.images import Digits

class Breaking(Examples):
    def batch(self, seed, step):
        if step == 3:
            raise RuntimeError("[bold]no more data")
        return super().batch(seed, step)

from eigengraft.experiments.tasks import Task

class BreakingDigits(Task):
    kind: Literal["breaking_digits"] = "breaking_digits"
    def load(self):
        whole = Digits(batch_size=8).load()
        return Breaking(whole.train, whole.validation, whole.batch_size, whole.fingerprint)
    def build(self): return Digits(layers=1, width=4).build()
"""


def test_a_failing_run_does_not_stop_the_others(tmp_path):
    (tmp_path / "broken.py").write_text(BROKEN)
    (tmp_path / "trial.yaml").write_text(
        "base: {imports: [broken.py], task: digits, recipe: adamw, steps: 5}\n"
        "axes: {task: {good: {task.width: 4}, bad: {task: {kind: breaking_digits}}}}\n"
    )
    out = tmp_path / "out"
    ablate = ("-m", "eigengraft", "ablate", "trial.yaml", "--out", out, "--workers", "1")
    done = run(*ablate, folder=tmp_path, **FORK_SPAWNED)
    assert done.returncode == 1
    assert "RuntimeError: [bold]no more data" in done.stderr
    assert "1 of 2 runs failed" in done.stderr and "Traceback" not in done.stderr
    assert complete(out) == {"task=good/seed-0"}
    assert "no more data" in (out / "task=bad" / "seed-0.error.txt").read_text()
    report = run("-m", "eigengraft", "report", out, folder=tmp_path)
    assert report.stdout == f"{out / 'report.html'}\n"
    assert "[bold]no more data" in (out / "report.html").read_text()
    # The repaired file repeats the run that failed. The other run does not use the file, so that it is kept.
    before = (out / "task=good" / "seed-0" / "result.json").read_bytes()
    (tmp_path / "broken.py").write_text(BROKEN.replace("step == 3", "step < 0"))
    again = run(*ablate, folder=tmp_path, **FORK_SPAWNED)
    assert again.returncode == 0, again.stderr
    assert complete(out) == {"task=good/seed-0", "task=bad/seed-0"}
    assert (out / "task=good" / "seed-0" / "result.json").read_bytes() == before
    # A change after a result is refused.
    (tmp_path / "broken.py").write_text(BROKEN.replace("step == 3", "step < -1"))
    again = run(*ablate, folder=tmp_path, **FORK_SPAWNED)
    assert again.returncode == 2 and "imports broken.py: " in " ".join(again.stderr.replace("\u2502", "").split())


def wait_for(condition):
    for _ in range(1200):
        if condition():
            return
        time.sleep(0.05)
    pytest.fail("waited a minute in vain")


GATED = """
import time
from pathlib import Path
from typing import Literal
from eigengraft.experiments.tasks import Task
from eigengraft.experiments.tasks.base import Examples
from eigengraft.experiments.tasks.images import Digits

class Gated(Examples):
    def batch(self, seed, step):
        while step == 30 and not Path("open").exists():
            time.sleep(0.01)
        return super().batch(seed, step)

class GatedDigits(Task):
    kind: Literal["gated_digits"] = "gated_digits"
    def load(self):
        whole = Digits(batch_size=8).load()
        return Gated(whole.train, whole.validation, whole.batch_size, whole.fingerprint)
    def build(self): return Digits(layers=1, width=8).build()
"""


@pytest.fixture
def started(tmp_path, monkeypatch):
    """A study in a process of its own: a run that has ended (the one with more steps is first), and a run with a
    checkpoint that waits in step 31 until there is a file `open`."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gated.py").write_text(GATED)
    gated = {"recipe": "soap_fitted", "steps": 40, "checkpoint_every": 20, "task": {"kind": "gated_digits"}}
    base = {**TINY, "imports": [str(tmp_path / "gated.py")]}
    study = {"base": base, "axes": {"method": {"ended": {"steps": 41}, "gated": gated}}}
    (tmp_path / "trial.yaml").write_text(json.dumps(study))
    command = ("-m", "eigengraft", "ablate", "trial.yaml", "--out", "out", "--workers", "1")
    process = start(*command, folder=tmp_path, **FORK_SPAWNED)
    ended, gated = (tmp_path / "out" / f"method={method}" / "seed-0" for method in ("ended", "gated"))
    wait_for(lambda: process.poll() is not None or (gated / "checkpoint-20").exists())
    assert process.poll() is None, process.communicate()
    assert (ended / "result.json").exists() and not (gated / "result.json").exists()
    yield process, ended, gated
    process.kill()
    process.wait()


def losses(run):
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [(row["step"], row["loss"], row["val_loss"]) for row in rows]


def test_a_killed_study_continues_with_the_same_trajectory(started, tmp_path):
    process, ended, gated = started
    process.kill()
    process.communicate()
    assert not (gated / "result.json").exists()
    stamp = (ended / "result.json").stat().st_mtime_ns
    (tmp_path / "open").touch()
    assert run(*process.args, folder=tmp_path, **FORK_SPAWNED).returncode == 0
    assert (ended / "result.json").stat().st_mtime_ns == stamp
    straight = tmp_path / "straight"
    train(plan_runs(load_study(tmp_path / "trial.yaml"))[1].experiment, straight)
    assert len(losses(gated)) == 40
    assert losses(gated) == losses(straight)


def test_an_interrupted_study_ends_cleanly(started):
    process, _, gated = started
    process.send_signal(signal.SIGINT)
    _, message = process.communicate()
    assert process.returncode == 130
    assert "interrupted" in message and "Traceback" not in message
    assert not (gated / "result.json").exists()


@pytest.mark.parametrize("name", sorted(shipped_studies()))
def test_shipped_studies_expand(name):
    assert plan_runs(load_study(name))


def test_a_study_runs_from_python_and_returns_its_report(tmp_path, monkeypatch, capsys):
    fork_what_is_spawned(monkeypatch)
    own = study(seeds=[0]).replace(name="own")
    report = own.run(tmp_path / "out", workers=1)
    assert capsys.readouterr().err.count("validation loss") == len(report.records.runs)
    own.run(tmp_path / "out", workers=1, progress=False)
    assert not capsys.readouterr().err
    assert [run.status(report.records.metric) for run in report.records.runs] == ["complete"] * len(report.records.runs)
    assert report.figures()
    failing = Study(**{**own.model_dump(mode="json"), "name": "failing", "base": {**TINY, "device": "cuda:99"}})
    with refused((RuntimeError, RecipeError), "cuda:99"):
        failing.run(tmp_path / "failing", workers=1)


def test_a_warning_of_many_runs_is_said_once_for_the_study(tmp_path, monkeypatch, capfd):
    fork_what_is_spawned(monkeypatch)
    one = study(base={**TINY, "lr": 0.0}, axes={"method": {"adam": {}}}, seeds=[0, 1, 2, 3])
    assert complete_study(one, tmp_path, workers=2) == {}
    assert capfd.readouterr().err.count("[lr-zero]") == 1


def test_the_demo_reports_its_quickest_task_and_its_first_seed_before_the_others(tmp_path, monkeypatch):
    fork_what_is_spawned(monkeypatch)
    monkeypatch.setattr(study_file, "load_study", lambda name, changes: load_study(study(seeds=[3, 1]), changes))
    demo = ["demo", "--out", str(tmp_path), "--workers", "1"]
    short = " ".join(invoke([*demo, "seeds=[3]"]).output.split())
    assert short.index("4 runs in 4 cells") < short.index("guessed") < short.index("report of 2 runs")
    assert short.index("by the time of 2 finished runs") < short.index("report of 4 runs")
    assert complete(tmp_path) == {f"task={t},method={m}/seed-3" for t in ("small", "large") for m in ("adam", "soap")}
    whole = invoke(demo).output
    assert "report of 2 runs" not in whole and "4 runs in 4 cells" in whole and "report of 8 runs" in whole
    assert len(complete(tmp_path)) == 8
    (tmp_path / "report.html").unlink()
    assert "report of 8 runs" in invoke(demo).output and (tmp_path / "report.html").exists()


def test_an_interrupted_demo_reports_its_finished_runs(tmp_path, monkeypatch):
    fork_what_is_spawned(monkeypatch)
    monkeypatch.setattr(study_file, "load_study", lambda name, changes: load_study(study(seeds=[3, 1]), changes))
    parts, run_to_end = [], study_commands.run_to_end

    def run(part, directory, workers):
        parts.append(part)
        if len(parts) == 2:
            (tmp_path / "report.html").unlink()
            raise KeyboardInterrupt
        run_to_end(part, directory, workers)

    monkeypatch.setattr(study_commands, "run_to_end", run)
    done = invoke(["demo", "--out", str(tmp_path), "--workers", "1"])
    assert done.exit_code == 130 and done.output.count("report of 2 runs") == 2
    assert (tmp_path / "report.html").exists()


def test_a_baseline_may_be_a_label_alone() -> None:
    axes = {"recipe": ["adamw", "soap"], "lr": [0.1, 0.01]}
    base = {"task": "digits", "recipe": "adamw", "steps": 10}
    assert Study(base=base, axes=axes, baseline="soap").compared == ("recipe", "soap")
    assert Study(base=base, axes=axes, baseline=0.01).compared == ("lr", "0.01")
    with refused(RecipeError, "baseline", "muon", "adamw", "soap", "0.01"):
        Study(base=base, axes=axes, baseline="muon")
    twice = {"a": {"x": {"lr": 0.1}, "y": {"lr": 0.2}}, "b": {"x": {"steps": 3}, "z": {"steps": 4}}}
    with refused(RecipeError, "baseline", "a and b", "{a: x}"):
        Study(base=base, axes=twice, baseline="x")
    with refused(RecipeError, "seeds", "[0, 1]", "[2]"):
        Study(base=base, axes=axes, seeds=2)
