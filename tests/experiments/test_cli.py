"""The command line: what a user gets for a right and for a wrong input."""

import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from io import StringIO
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console
from ruamel.yaml import YAML
from typer.testing import Result

import eigengraft
from eigengraft.component import families
from eigengraft.distributed.rank_group import DistributedError
from eigengraft.experiments import load_experiment
from eigengraft.experiments.cli import study as study_commands
from eigengraft.experiments.cli.catalog import use_and_cost
from eigengraft.experiments.cli.plan import amount
from eigengraft.experiments.cli.purposes import (
    FAMILIES,
    RECIPE_GROUPS,
    STAGES,
    USES,
    by_purpose,
    goals,
    recipe_numbers,
    timed_card,
)
from eigengraft.experiments.studies import progress
from eigengraft.preconditioners import RMS
from eigengraft.preconditioners.roots import timings
from eigengraft.signals import known_signals

from ..cli import invoke
from ..processes import Process, fork_what_is_spawned, start
from ..refusals import check_said, lacking

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / "experiments" / "examples").glob("*.yaml"))
EXPERIMENT = """
task: {kind: digits, width: 8, batch_size: 16}
recipe: soap_fitted
lr: 0.01
steps: 6
checkpoint_every: 2
"""
SHARPEN = '''
"""A stage and a task that the package does not know."""
from typing import Literal

from pydantic import Field
from torch import nn

import eigengraft
from eigengraft.experiments.tasks import Digits, Task


class Sharpen(eigengraft.Stage):
    """d |d|^(p - 1)"""

    kind: Literal["sharpen"] = "sharpen"
    power: float = Field(1.5, gt=0, description="p")

    def apply(self, state, gradient, direction, context):
        return direction.sign() * direction.abs() ** self.power


class Line(Task):
    """Digits with a linear model."""

    kind: Literal["line"] = "line"
    images: int = Field(16, ge=1, description="per step")

    def load(self):
        return Digits(batch_size=self.images).load()

    def build(self):
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
'''


ROWS = '''
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from pydantic import Field
from torch import nn

from eigengraft.experiments.tasks import Batch, Examples, Fingerprint, Task


class Rows(Task):
    """Classes of the rows of a file."""

    kind: Literal["rows"] = "rows"
    path: str
    labels: Path = Field(Path("names.txt"), strict=False)

    def load(self):
        rows = torch.from_numpy(np.loadtxt(self.path, delimiter=",", dtype="float32"))
        parts = (Batch(own[:, :-1], own[:, -1].long()) for own in (rows[:40], rows[40:]))
        return Examples(*parts, 8, Fingerprint.of(self.path, Path(self.path).read_bytes()))

    def build(self):
        return nn.Linear(2, 2)
'''


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An own working directory with one experiment, and lines wide enough that no message is broken."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "400")
    monkeypatch.delenv("EIGENGRAFT_DEBUG", raising=False)
    (tmp_path / "exp.yaml").write_text(EXPERIMENT)
    return tmp_path


def call(*arguments: str) -> Result:
    return invoke(list(arguments))


def succeeds(*arguments: str) -> str:
    result = call(*arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


def yaml(text: str) -> object:
    return YAML(typ="safe", pure=True).load(text)


def write(name: str, text: str) -> str:
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    Path(name).write_text(text)
    return name


class TestTrain:
    def test_a_file_is_trained_in_a_directory_named_after_it(self) -> None:
        output = succeeds("train", "exp.yaml")
        result = json.loads(Path("runs/exp/result.json").read_text())
        assert result["steps"] == 6
        assert f"validation loss {result['val_loss']:.4f}" in output
        assert output.splitlines()[-1] == str(Path("runs/exp"))

    def test_overrides_reach_the_experiment_the_task_the_schedule_and_the_recipe(self) -> None:
        succeeds(
            "train", "exp.yaml", "steps=3", "task.width=5", "schedule.warmup_steps=2", "lr=1e-3", "weight_decay=0.2",
            "update.eigenbasis.refresh.steps=1", "recipe.update.eigenbasis.inner.momentum.beta=0.5",
            "weight_decay.kind=l2", "--out", "elsewhere",
        )  # fmt: skip
        config = json.loads(Path("elsewhere/config.json").read_text())
        assert (config["steps"], config["lr"], config["weight_decay"]) == (3, 0.001, 0.2)
        assert config["task"]["width"] == 5
        assert config["schedule"] == {"kind": "constant", "warmup_steps": 2}
        (stage,) = config["recipe"]["update"]
        assert stage["refresh"]["steps"] == 1
        assert stage["inner"][0]["beta"] == 0.5
        assert config["recipe"]["weight_decay"]["kind"] == "l2"

    def test_another_recipe_takes_the_overrides_that_follow(self) -> None:
        experiment = load_experiment("exp.yaml", ["update.momentum.beta=0.5", "recipe=muon"])
        assert experiment.recipe == eigengraft.load_recipe("muon", ["update.momentum.beta=0.5"])

    def test_a_kind_changes_with_its_fields(self) -> None:
        experiment = load_experiment("exp.yaml", ["schedule={kind: linear, warmup_steps: 1}", "schedule.kind=cosine"])
        assert experiment.schedule.model_dump() == {"kind": "cosine", "warmup_steps": 0, "final": 0.1}

    def test_python_mapping_and_file_say_the_same(self) -> None:
        data = yaml(EXPERIMENT)
        assert isinstance(data, dict)
        from_mapping = load_experiment({"name": "exp", **data})
        assert from_mapping == load_experiment("exp.yaml") == load_experiment(from_mapping)

    def test_overrides_in_the_file_change_the_recipe_and_are_applied_once(self) -> None:
        write("other.yaml", EXPERIMENT + "name: exp\noverrides: [update.eigenbasis.refresh.steps=3]\n")
        experiment = load_experiment("other.yaml")
        assert experiment == load_experiment("exp.yaml", ["update.eigenbasis.refresh.steps=3"])
        assert load_experiment(experiment.model_dump(mode="json")) == experiment

    def test_paths_in_a_file_are_relative_to_it(self) -> None:
        write("there/mine.yaml", "update: [momentum]\nlr: 0.125\n")
        write("there/text", "abc" * 3000)
        task = "task: {kind: byte_lm, path: text, context: 8}"
        experiment = load_experiment(write("there/exp.yaml", f"{task}\nrecipe: mine.yaml\n"))
        assert experiment.recipe.lr == 0.125
        assert experiment.task.load().fingerprint.size == 9000

    @pytest.mark.parametrize("given", [["exp.yaml"], ["exp.yaml", "task.path=data.csv"], ["there/exp.yaml"]])
    def test_a_run_of_a_task_with_a_relative_path_continues_from_any_directory(
        self, given: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch, registry: None
    ) -> None:
        home = Path(given[0]).parent
        write(f"{home}/rows.py", ROWS)
        write(f"{home}/data.csv", "".join(f"{i / 60},{1 - i / 60},{int(i > 30)}\n" for i in range(60)))
        task = "task: {kind: rows, path: data.csv, labels: names.txt}"
        write(f"{home}/exp.yaml", f"imports: [rows.py]\n{task}\nrecipe: adamw\nsteps: 4\nschedule: wsd\n")
        succeeds("train", *given, "--out", "runs/long")
        task = json.loads(Path("runs/long/config.json").read_text())["task"]
        assert task == {"kind": "rows", "path": str(folder / home / "data.csv"), "labels": str(folder / "names.txt")}
        assert "after 8 steps" in succeeds("train", "runs/long", "--extend", "8")
        monkeypatch.chdir("/")
        assert "after 8 steps" in succeeds("train", str(folder / "runs/long"))
        assert "after 12 steps" in succeeds("train", str(folder / "runs/long"), "--extend", "12")
        found = call("doctor", str(folder / "runs/long"))
        assert found.output.count("not checked") == 0, found.output

    def test_the_same_command_again_continues_or_shows_the_result(self) -> None:
        first = succeeds("train", "exp.yaml")
        assert succeeds("train", "exp.yaml") == first

    def test_a_diverged_run_is_told_without_a_traceback(self) -> None:
        found = call("train", "exp.yaml", "recipe=sgd", "lr=1e30", "steps=40")
        output = found.stdout
        assert found.exit_code == 1 and "diverged at step" in output and "smaller lr" in output

    @pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
    def test_the_examples_load(self, example: Path) -> None:
        assert load_experiment(example).name == example.stem


class TestProgress:
    def test_a_log_file_gets_plain_lines(self) -> None:
        result = call("train", "exp.yaml", "steps=40")
        lines = [line for line in result.stderr.splitlines() if "step" in line]
        assert re.fullmatch(r"\S+ \S+ exp: step 1/40  loss [0-9.]+  [0-9.]+ ms", lines[0])
        assert not set(result.stderr) & set("\x1b\r\x08")

    def test_a_log_file_gets_lines_of_a_study(self, monkeypatch: pytest.MonkeyPatch) -> None:
        fork_what_is_spawned(monkeypatch)
        study = "base: {task: {kind: digits, width: 8}, recipe: adamw, steps: 4}\naxes: {lr: [0.1, 0.01]}\n"
        result = call("ablate", write("study.yaml", study), "--workers", "1")
        assert result.exit_code == 0, result.output
        assert re.search(r"^\S+ \S+ study: 0 of 2 runs.*; .+: step 1/4  loss ", result.stderr, flags=re.MULTILINE)
        assert result.stderr.count("validation loss") == 2
        assert not set(result.stderr) & set("\x1b\r\x08")

    @pytest.mark.parametrize(("lr", "hint"), [(1e-12, True), (0.03, False)])
    def test_a_study_ends_with_a_hint_at_runs_that_went_wrong(
        self, lr: float, hint: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        fork_what_is_spawned(monkeypatch)
        base = "base: {task: {kind: digits, width: 8}, recipe: adamw, steps: 40, eval_every: 20, log_every: 5}"
        result = call("ablate", write("study.yaml", f"{base}\naxes: {{lr: [{lr}]}}\n"), "--workers", "1")
        assert result.exit_code == 0, result.output
        assert ("eigengraft doctor" in result.stdout) == hint

    def test_a_log_file_gets_lines_of_a_bench(self) -> None:
        result = call("bench", "roots", "--quick", "sizes=[8]", "solvers=[eigh]", "--out", "bench")
        assert result.exit_code == 0, result.output
        assert re.search(r"^\S+ \S+ measuring: 1 of \d+ cells$", result.stderr, flags=re.MULTILINE)

    def test_lines_become_rarer_in_a_long_run(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Every 10 seconds at first, then after a twentieth of the elapsed time, and after 10 minutes at the latest."""
        clock = {"now": 0.0}
        monkeypatch.setattr(progress, "monotonic", lambda: clock["now"])
        meter, seconds = progress.Meter(Console(file=StringIO())), 48 * 3600
        bar = meter.add("run", seconds)
        for second in range(0, seconds, 5):
            clock["now"] = float(second)
            meter.update(bar, second, f"at {second}")
        lines = capsys.readouterr().err.splitlines()
        written = [float(re.search(r"run: at (\d+)", line)[1]) for line in lines]
        gaps = [later - earlier for earlier, later in itertools.pairwise(written)]
        assert written[:3] == [0, 10, 20] and gaps == sorted(gaps) and max(gaps) <= 605
        assert 300 < len(written) < 400 and lines[-1].endswith(" left")


def shown_progress(monkeypatch, events, left=(), seconds=(), **options):
    """Return {time: text of the bar of the study} for a study of twelve runs.

    events: (time, kind of event, step of the run, fraction of the study that is done). The run has 60 steps.
    left: names of the runs without a result.
    seconds: expected seconds of these runs, already corrected by finished runs.
    """
    clock, shown = {"now": 0.0}, {}
    monkeypatch.setattr(progress, "monotonic", lambda: clock["now"])
    of_study = {"seconds": dict(zip(left, seconds, strict=True)), "measured": len(left)}
    runs = [SimpleNamespace(directory=name) for name in left] or range(12)
    prepared = SimpleNamespace(phase="", runs=range(12), left=runs, **of_study)
    run = SimpleNamespace(directory="a", title="a", experiment=SimpleNamespace(steps=60))
    result = SimpleNamespace(val_loss=1.0, val_accuracy=None, metrics={}, seconds=1.0)
    update = progress.Progress.update
    monkeypatch.setattr(
        progress.Progress,
        "update",
        lambda self, bar, **new: shown.update({(clock["now"], bar): new["text"]}) or update(self, bar, **new),
    )
    study, console = SimpleNamespace(metric="val_loss"), Console(file=StringIO())
    with progress.study_progress(prepared, study, console, **options) as on_event:
        for now, kind, step, fraction in events:
            clock["now"] = now
            tick = SimpleNamespace(step=step, steps=60, loss=1.0, step_ms=1.0)
            value = {"started": None, "progress": tick, "done": result}[kind]
            on_event(SimpleNamespace(kind=kind, run=run, value=value, fraction=fraction))
    return {now: text for (now, bar), text in shown.items() if bar == 0}


def test_a_study_estimates_the_time_left_from_the_first_progress_of_a_run(monkeypatch):
    events = [(0.0, "started", 0, 0.0), (60.0, "progress", 1, 0.02), (62.0, "progress", 1, 0.05)]
    events += [(66.0, "progress", 1, 0.12), (70.0, "done", 1, 0.22)]
    assert shown_progress(monkeypatch, events) == {
        **dict.fromkeys((60.0, 62.0), "0 of 12 runs"),
        66.0: "0 of 12 runs, about 0:53 left",
        70.0: "1 of 12 runs, about 0:39 left",
    }


@pytest.mark.parametrize(("step", "says"), [(None, ""), (7, "step 7")])
def test_a_study_says_where_a_run_goes_on_whose_process_died(tmp_path, step, says):
    (tmp_path / "a" / ("" if step is None else f"checkpoint-{step}")).mkdir(parents=True)
    place = SimpleNamespace(directory=tmp_path)
    prepared = SimpleNamespace(phase="", runs=range(1), left=range(1), measured=0, rendezvous=place)
    run, printed = SimpleNamespace(directory="a", title="a", experiment=SimpleNamespace(steps=60)), StringIO()
    with progress.study_progress(prepared, SimpleNamespace(metric="val_loss"), Console(file=printed)) as on_event:
        for kind in ("started", "died"):
            on_event(SimpleNamespace(kind=kind, run=run, value="signal SIGKILL", fraction=0.0))
    assert lacking(printed.getvalue(), "a: signal SIGKILL", *([says] if says else [])) == []
    assert ("step" in printed.getvalue()) == bool(says)


def test_a_study_has_no_less_time_left_than_its_run_in_the_same_line(monkeypatch, capsys):
    events = [(0.0, "started", 0, 0.0), (60.0, "progress", 1, 0.1), (66.0, "progress", 2, 0.6)]
    events += [(80.0, "progress", 3, 0.7)]
    shown_progress(monkeypatch, events)
    last = capsys.readouterr().err.splitlines()[-1]
    assert re.findall(r"about (\d+:\d\d) left", last) == ["9:30", "9:30"]
    events[-1] = (80.0, "done", 3, 0.7)
    assert shown_progress(monkeypatch, events)[80.0] == "1 of 12 runs, about 0:10 left"


def test_a_study_first_estimates_the_time_that_is_announced_if_runs_have_been_measured(monkeypatch):
    events = [(0.0, "started", 0, 0.0), (60.0, "progress", 0, 0.02), (66.0, "progress", 30, 0.03)]
    events += [(76.0, "progress", 45, 0.2)]
    own = shown_progress(monkeypatch, events, left=["a", "b"], seconds=[2000.0, 580.0], workers=3)
    assert own[66.0].endswith(", about 19:44 left")  # 9/10 of 1290 s and 1/10 of 600 s, times 0.97
    assert own[76.0].endswith(", about 1:11 left")  # by the progress alone


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 seconds"), (0.4, "1 second"), (14, "14 seconds"), (340, "6 minutes"), (7500, "2:05 hours")],
)
def test_a_preview_gives_short_times_in_seconds_or_minutes(seconds, text):
    cells = [SimpleNamespace(tuning=0, timing=0)]
    preview = SimpleNamespace(name="tiny", runs=2, seconds=seconds, cells=cells, measured=0)
    assert f"tiny: 2 runs in 1 cell, about {text} on one core" in study_commands.sentence(preview)


class TestImports:
    def test_a_file_named_on_the_command_line(self) -> None:
        write("sharpen.py", SHARPEN)
        succeeds("train", "exp.yaml", "--import", "sharpen.py", "recipe=[{kind: sharpen, power: 2}]", "task=line")
        config = json.loads(Path("runs/exp/config.json").read_text())
        assert config["recipe"]["update"][0]["power"] == 2
        assert config["task"] == {"kind": "line", "images": 16}

    def test_a_file_named_in_the_experiment_relative_to_it(self) -> None:
        write("there/parts/sharpen.py", SHARPEN)
        recipe = "recipe: {update: [momentum, sharpen]}\nimports: [parts/sharpen.py]\n"
        write("there/exp.yaml", f"task: {{kind: digits, width: 8}}\n{recipe}steps: 2\n")
        finish(process("train", "there/exp.yaml"))
        # what a run has recorded is enough to run it again in a process that knows nothing, in another directory
        Path("else/where").mkdir(parents=True)
        finish(process("train", "../../runs/exp/config.json", "--out", "again", folder="else/where"))
        assert Path("else/where/again/result.json").exists()

    def test_extend_continues_a_finished_run(self) -> None:
        succeeds("train", "exp.yaml")
        assert "after 9 steps" in succeeds("train", "exp.yaml", "--extend", "9")
        assert json.loads(Path("runs/exp/config.json").read_text())["steps"] == 9

    def test_checked_names_the_stage_and_the_step_that_went_wrong(self) -> None:
        faulty = SHARPEN.replace('"sharpen"', '"faulty"').replace('"line"', '"faulty_line"')
        write("faulty.py", faulty.replace("return direction", "return gradient.mul_(2) + direction"))
        given = ("train", "exp.yaml", "--import", "faulty.py", "recipe={update: [faulty], routes: []}", "steps=2")
        succeeds(*given)
        result = call(*given, "--checked", "--out", "checked")
        assert result.exit_code == 2
        check_said(" ".join(result.output.split()), "update.faulty", "apply()", "step 1")

    def test_show_and_schema_know_the_import(self) -> None:
        write("sharpen.py", SHARPEN.replace('"sharpen"', '"sharpen_too"').replace('"line"', '"line_too"'))
        write("mine.yaml", "update: [sharpen_too]\n")
        assert "kind: sharpen_too" in succeeds("show", "mine.yaml", "--import", "sharpen.py")
        schema = json.loads(succeeds("schema", "recipe", "--import", "sharpen.py"))
        assert "power" in json.dumps(schema)


class TestList:
    def test_every_family_is_listed(self) -> None:
        rows = [line.split()[0] for line in succeeds("list").splitlines() if line.strip()]
        assert {"goals", "recipes", "signals", *families()} <= set(rows)

    def test_recipes_by_goal_are_listed_and_exist(self) -> None:
        every, memory = succeeds("list", "goals"), succeeds("list", "goals", "memory")
        for goal in goals():
            assert {name for name, _ in goal.recipes} <= set(eigengraft.shipped_recipes())
            assert all(recipe_numbers()[name].accumulate is None for name, _ in goal.recipes)
            check_said(every, goal.title, *(word for recipe in goal.recipes for word in recipe))
            assert (f"\n{goal.title}  " in memory) == ("memory" in goal.title)

    def test_signals_are_listed_and_shown(self) -> None:
        rows = {line.split()[0] for line in succeeds("list", "signals").splitlines() if line.strip()}
        assert known_signals().keys() <= rows
        assert succeeds("show", "signal") == succeeds("show", "signals") == succeeds("list", "signals")
        signal = known_signals()["gradient_variance"]
        check_said(succeeds("show", "gradient_variance"), signal.about, signal.extent, signal.by, signal.reduce)

    def test_every_recipe_and_every_kind_is_listed(self) -> None:
        for what, names in (("recipes", eigengraft.shipped_recipes()), ("stage", eigengraft.Stage.members)):
            rows = {line.split()[0] for line in succeeds("list", what).splitlines() if line.strip()}
            assert set(names) <= rows

    def test_families_and_stages_are_grouped_by_purpose(self) -> None:
        for arguments, purposes, names in (
            ((), FAMILIES, {"goals", "recipes", "signals", *families()}),
            (("stage",), STAGES, set(eigengraft.Stage.members)),
            (("recipes",), RECIPE_GROUPS, set(eigengraft.shipped_recipes())),
        ):
            members = [name for purpose in purposes for name in purpose.members]
            assert len(members) == len(set(members)) and set(members) <= names
            lines = [line.strip() for line in succeeds("list", *arguments).splitlines()]
            for purpose in purposes:
                at = next(i for i, line in enumerate(lines) if line.startswith(f"{purpose.title} "))
                assert purpose.when.split()[0] in lines[at]
                following = [line.split()[0] for line in lines[at + 1 :] if line]
                assert [name for name in following if name in purpose.members] == list(purpose.members)

    def test_every_recipe_has_a_row_of_numbers_in_120_columns(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("COLUMNS", "80")  # of a terminal that does not show the pipe
        lines = succeeds("list", "recipes").splitlines()
        assert max(map(len, lines)) <= 120
        rows = {line.split()[0]: line.split()[-5:] for line in lines if line.startswith("  ") and line[2:3].strip()}
        assert rows.keys() == set(eigengraft.shipped_recipes()) == recipe_numbers().keys()
        for name, own in recipe_numbers().items():
            lr, profile = eigengraft.load_recipe(name).lr, "-" if own.steps is None else f"{own.steps:.2f}"
            measured = "-" if own.measured is None else f"{own.measured:.3g}"
            assert rows[name] == [f"{lr:g}", f"{own.state:.2f}", f"{own.counted:.3g}", measured, profile]
            assert own.measured is None or own.measured > own.counted  # counted times are lower bounds
        assert any(timed_card() in line for line in lines)
        assert timed_card() in succeeds("show", "soap_fitted")
        assert timed_card() not in succeeds("show", "soap_fitted", "lr=0.1")
        assert all(max(map(len, succeeds("list", *what).splitlines())) <= 120 for what in ((), ("stage",), ("goals",)))

    def test_an_own_stage_is_in_the_last_group(self) -> None:
        assert [(p.title, n) for p, n in by_purpose(STAGES, ["mine", "rms"])] == [
            ("Second moments", ["rms"]),
            ("Others", ["mine"]),
        ]

    def test_words_select_by_name_and_by_text_in_any_case(self) -> None:
        output = succeeds("list", "recipes", "MUON", "row")
        check_said(output, "normuon", "arXiv:2510.05491")
        assert "adamw" not in output and "polargrad" not in output

    def test_kinds_of_an_imported_file_are_listed_and_shown(self) -> None:
        file = write("hone.py", SHARPEN.replace("sharpen", "hone").replace("line", "hone_line"))
        check_said(succeeds("list", "stage", "hone", "--import", file), "hone", "d |d|^(p - 1)")
        check_said(succeeds("show", "hone", "--import", file), "from hone import", "power", "(0, ∞)", 1.5)

    def test_a_word_that_is_no_family_is_searched_in_all_lists(self) -> None:
        output = succeeds("list", "norm", "clip")
        check_said(output, "clip_norm", "recipe", "stage")
        assert "adamw" not in output and "cadence" not in output

    def test_families_are_accepted_in_the_singular_and_the_plural(self) -> None:
        for one, other in (("stages", "stage"), ("spectra", "spectrum"), ("benches", "bench"), ("recipe", "recipes")):
            assert succeeds("list", one) == succeeds("list", other)
        assert succeeds("show", "cadences") == succeeds("show", "cadence")

    def test_printed_headings_are_found(self) -> None:
        for purpose in (*FAMILIES, *STAGES, *RECIPE_GROUPS):
            output = succeeds("list", purpose.title)
            assert all(re.search(rf"^ +{re.escape(name)} ", output, re.M) for name in purpose.members)
        result = call("list", "recipes", "memory", "xyzzy")
        assert result.exit_code == 2
        check_said(" ".join(result.stderr.split()), "recipes", "memory", "xyzzy", "least memory", "LoRA")

    def test_only_a_terminal_gets_shortened_texts(self) -> None:
        about = " ".join(str(eigengraft.load_recipe("adam_mini").about).split()[-2:])
        assert about in succeeds("list", "recipes")

    def test_an_unknown_family_and_words_without_an_entry_are_refused(self) -> None:
        for arguments, data in ((("stagee",), ("stagee", "stage")), (("stage", "xyzzy"), ("stage", "xyzzy"))):
            result = call("list", *arguments)
            assert result.exit_code == 2
            check_said(result.stderr, *data)


class TestDiff:
    def test_recipes_differ_in_the_fields_that_were_set(self) -> None:
        write("mine.yaml", "base: soap\nlr: 0.5\nset: {update.eigenbasis.refresh.steps: 3}\n")
        base = eigengraft.load_recipe("soap")
        lines = succeeds("diff", "soap", "mine.yaml").splitlines()
        steps = base.model_dump()["update"][0]["refresh"]["steps"]
        assert set(lines) == {
            f"lr: {base.lr} -> 0.5",
            "name: soap -> mine",
            f"update.eigenbasis.refresh.steps: {steps} -> 3",
        }
        assert succeeds("diff", "soap", "soap").split() == ["no", "field", "differs"]

    def test_runs_and_experiments_differ_in_their_settings(self) -> None:
        write("one.yaml", "{task: digits, steps: 1, recipe: adamw, name: one}")
        succeeds("train", "one.yaml", "--out", "run")
        write("two.yaml", "{task: digits, steps: 2, recipe: adamw, name: one}")
        assert succeeds("diff", "run", "two.yaml").splitlines() == ["steps: 1 -> 2"]
        assert "update: " in succeeds("diff", "run", "soap")  # of a run and a recipe, the recipes are compared
        Path("empty").mkdir()
        result = call("diff", "empty", "soap")
        assert result.exit_code == 2 and "empty" in result.stderr


class TestShowKind:
    def test_a_kind_is_shown_with_its_formula_and_the_range_of_every_field(self) -> None:
        output = succeeds("show", "rms")
        check_said(output, "stage 'rms'", "v <- b v + w x^2", "[0, 1]", "0.999", "decay of the second moment")
        assert set(RMS.model_fields) - {"kind"} <= set(output.split())

    def test_every_part_has_a_use_that_is_listed_and_shown(self) -> None:
        for family, uses in USES.items():
            members = {k for k, m in families()[family].members.items() if m.__module__.startswith("eigengraft.")}
            assert uses.keys() == members
            assert all(len(use.split()) <= 12 for use in uses.values())
            listed = " ".join(succeeds("list", family).split())
            assert [use for use in uses.values() if f" use: {use}" not in listed] == []
        assert f"\nuse: {USES['cadence']['every']}\n" in succeeds("show", "every")

    @pytest.mark.parametrize(
        ("kind", "numbers"),
        [
            ("stage.momentum", [4, 4]),
            ("stage.shampoo", [4 * 4, 4 * 2 * 1024, 4 * 2 * 1024 + 2 * 20 * 1024]),  # 2 statistics and 2 roots
            ("stage.graft", [2 * 2 * 4, 2 * 2 * 4]),  # of the example, Adam with the norm of Adam
            ("quantizer.symmetric", [4 / 2]),
            ("quantizer.bf16", [2]),
        ],
    )
    def test_the_cost_of_a_kind_is_that_of_its_state_and_its_products(self, kind: str, numbers: list[float]) -> None:
        (line,) = (line for line in succeeds("show", kind).splitlines() if line.startswith("cost "))
        found = re.findall(r"[\d,]*\.?\d+", line.partition(": ")[2].partition(" (")[0])
        assert [float(one.replace(",", "")) for one in found] == pytest.approx(numbers, rel=5e-3)  # three digits

    def test_every_stage_solver_and_quantizer_has_a_cost(self) -> None:
        for family in ("stage", "root_solver", "basis_solver", "quantizer"):
            for kind in USES[family]:
                *_, cost = use_and_cost(family, kind, families()[family].members[kind])
                assert re.match(r"cost for a 1024 x 1024 matrix: .*(\d|not counted)", cost), kind
        times = [row for row in timings() if (row.operation, row.order, row.device) == ("cans", 1024, "cpu")]
        assert f"{times[0].milliseconds:,g} ms on {times[0].card}" in succeeds("show", "cans")

    def test_a_stage_that_accepts_no_matrix_has_no_cost(self) -> None:
        hook = "    def slots(self, block):\n        raise KeyError('a vector is required')\n\n    def apply"
        text = SHARPEN.replace("sharpen", "fussy").replace("line", "fussy_line").replace("    def apply", hook)
        file = write("fussy.py", text)
        output = succeeds("show", "fussy", "--import", file)
        assert "power" in output and "\ncost" not in output and "\nuse" not in output

    def test_the_family_tells_a_kind_from_a_recipe_of_its_name(self) -> None:
        output = succeeds("show", "stage.shampoo")
        check_said(output, "stage 'shampoo'", "solver")
        assert len(output.splitlines()) < 30  # no column of the table is as narrow as a letter

    def test_a_family_is_shown_with_what_a_member_defines(self) -> None:
        output = succeeds("show", "cadence")
        check_said(output, "due_again(context: StepContext)", "(required)", "first_due", "interval", "cadence.py")
        assert Path(output.split()[-1]).is_file() and "  due(" not in output
        check_said(succeeds("show", "task"), "load() -> Dataset", "reports_accuracy: ClassVar[bool] = False")

    @pytest.mark.parametrize(
        ("family", "shown"),
        [
            ("root_solver", ("\n  Root(value: Tensor, ok: Tensor | None = None,", "preconditioners import Root`")),
            ("basis_solver", ("\n  Basis(q: Tensor, order:", "\n  Diagonal = Callable[[Tensor], Tensor]")),
            ("task", ("\n  Dataset  (", "\n      evaluation() -> Iterator[Batch]  (required)")),
        ],
    )
    def test_types_in_the_signatures_of_a_family_are_shown_too(self, family: str, shown: tuple[str, ...]) -> None:
        output = succeeds("show", family)
        assert all(text in output for text in shown)

    def test_the_short_form_leaves_out_defaults(self) -> None:
        long, short = succeeds("show", "soap_int8"), succeeds("show", "soap_int8", "--short")
        assert "warm_start: false" in long and "warm_start" not in short and "max_skew: 4.0" in short
        assert long.partition("routes:")[0] != short.partition("routes:")[0]

    @pytest.mark.parametrize("source", ["rms", "stage.shampoo", "cadence", "signals", "max_logit"])
    @pytest.mark.parametrize("option", ["beta=0.9", "--short"])
    def test_a_component_takes_no_overrides(self, source: str, option: str) -> None:
        result = call("show", source, option)
        assert result.exit_code == 2 and not result.stdout
        check_said(result.stderr, source, "--task")


class TestShow:
    def test_a_recipe_is_printed_whole_and_the_output_is_a_recipe_file(self) -> None:
        output = succeeds("show", "soap_fitted", "update.eigenbasis.refresh.steps=7")
        expected = eigengraft.load_recipe("soap_fitted", ["update.eigenbasis.refresh.steps=7"])
        assert eigengraft.load_recipe(yaml(output)) == expected  # type: ignore[arg-type]
        assert eigengraft.load_recipe(write("mine.yaml", output)) == expected

    def test_a_recipe_begins_with_its_purpose_its_chain_and_its_cost(self) -> None:
        lines = succeeds("show", "soap_fitted").splitlines()
        first = lines[: next(at for at, line in enumerate(lines) if not line.startswith("#"))]
        paths = [
            path for at, rule in eigengraft.load_recipe("soap_fitted").rules().items() for path, _ in rule.stages(at)
        ]
        assert first[0].startswith("# soap_fitted: SOAP")
        shown = [line[2:] for line in first if line[2:3] != " "]
        assert shown[shown.index(paths[0]) :][: len(paths)] == paths
        assert [sum(formula in line for line in first) for formula in ("v <- b v", "m <- b m")] == [1, 1]
        assert "counted" in first[-2] and "measured" in first[-1]

    def test_every_parameter_has_its_row(self) -> None:
        output = succeeds("show", "soap_fitted", "task.width=8", "task.model=cnn", "--task", "digits")
        table = [line for line in output.splitlines() if line.startswith("#")]
        model = load_experiment("exp.yaml", ["task.width=8", "task.model=cnn"]).task.new_model(0)
        optimizer = eigengraft.compose("soap_fitted", model)
        for row in optimizer.routing_table():
            (line,) = (line for line in table if f" {row.name} " in line)
            assert (row.route or "recipe") in line and row.reason in line and f"{row.state_bytes:,}" in line
        (total,) = (line for line in table if f"{len(optimizer.routing_table())} parameters" in line)
        assert f"{optimizer.state_bytes():,}" in total
        counts = sum(row.stored for row in optimizer.slot_sizes() if row.role in ("count", "failures"))
        (sizes,) = (line for line in table if " all " in line)
        assert f"{optimizer.state_bytes() - counts:,}" in sizes

    def test_offloaded_slots_have_their_memory(self) -> None:
        write("offload.yaml", "{base: adamw, storage: {first_moment: {kind: offload, to: disk, min_elements: 1}}}")
        lines = succeeds("show", "offload.yaml", "task.width=8", "task.model=cnn", "--task", "digits").splitlines()
        (line,) = (line for line in lines if line.startswith("# offloaded to disk: "))
        size = line.split()[4]
        (total,) = (line for line in lines if line.startswith("#") and " all " in line)
        assert f"disk {size}" in total
        for line in lines:
            assert (
                ("rms/v" in line and " device " in line)
                or ("momentum/m" in line and " disk " in line)
                or ("/m" not in line and "/v" not in line)
            )
        planned = succeeds("plan", "gpt2", "--recipe", "offload.yaml", "--ranks", "2")
        assert "offloaded to disk: at most " in planned and " of a rank's state" in planned

    def test_expectations_are_told(self) -> None:
        recipe = write("expecting.yaml", "{base: muon, expect: {spectral: '>= 50% of parameters'}}")
        lines = succeeds("show", recipe, "--task", "digits").splitlines()  # others may follow: bfloat16 saves no time
        (line,) = (line for line in lines if line.startswith("# expected: "))
        assert line.startswith("# expected: spectral >= 50% of parameters: ") and " of " in line

    def test_an_experiment_is_printed_whole_and_the_output_is_an_experiment_file(self) -> None:
        output = succeeds("show", "exp.yaml", "steps=9")
        assert load_experiment(write("copy.yaml", output)) == load_experiment("exp.yaml", ["steps=9"])

    @pytest.mark.parametrize("name", eigengraft.shipped_recipes())
    def test_every_shipped_recipe_can_be_shown(self, name: str) -> None:
        output = succeeds("show", name, "--task", "digits")
        assert "state bytes" in output and "declared bytes" in output
        ((ratio, state),) = re.findall(r"at least ([\d.]+) times as long as with adamw; ([\d.]+) bytes", output)
        assert float(ratio) > 0.9 and (name != "adamw" or (ratio, state) == ("1.00", "8.0"))


class TestSchema:
    @pytest.mark.parametrize("kind", ["recipe", "experiment", "study"])
    def test_the_schema_is_json_with_all_fields(self, kind: str) -> None:
        schema = json.loads(succeeds("schema", kind))
        wanted = {"recipe": "update", "experiment": "task", "study": "axes"}
        assert wanted[kind] in schema["properties"]
        assert schema["additionalProperties"] is False

    def test_an_experiment_may_name_its_recipe(self) -> None:
        recipe = json.loads(succeeds("schema", "experiment"))["properties"]["recipe"]
        assert {"type": "string"} in recipe["anyOf"] and {"$ref": "#/$defs/Recipe"} in recipe["anyOf"]


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (999.4, "B", "999 B"),
        (999.6, "B", "1 kB"),
        (1.62e9, "B", "1.62 GB"),
        (1e4, "", "10,000"),
    ],
)
def test_an_amount_has_three_digits_and_a_prefix(value: float, unit: str, text: str) -> None:
    assert amount(value, unit) == text


def test_version() -> None:
    assert succeeds("--version").strip() == f"eigengraft {eigengraft.__version__}"


WRONG = {
    "no such file": (["train", "nowhere.yaml"], ("nowhere.yaml",)),
    "a file with another suffix": (["train", "exp.yml"], ("exp.yml", "'exp.yaml'")),
    "no such recipe file": (["train", "exp.yaml", "recipe=minee.yaml"], ("minee.yaml",)),
    "no such directory": (["doctor", "takne"], ("takne", "exist", "'taken'")),
    "a file for the doctor": (["doctor", "exp.yaml"], ("exp.yaml",)),
    "a directory": (["train", "."], ("experiment", "'.'")),
    "malformed YAML": (
        ["train", "broken.yaml"],
        (
            "broken.yaml",
            "line 4",
        ),
    ),
    "two keys in a line": (["train", "keys.yaml"], ("keys.yaml", "line 2", "'recipe: soap lr: 3'", "own line")),
    "empty file": (["train", "empty.yaml"], ("empty.yaml", "task", "recipe")),
    "a list": (["train", "list.yaml"], ("list.yaml", "task", "recipe")),
    "no task": (["train", "part.yaml"], ("part.yaml", "task")),
    "unknown key": (["train", "key.yaml"], ("key.yaml", "stepz", "steps")),
    "a wrong value of an override": (["train", "exp.yaml", "lr=abc"], ("exp.yaml with lr=abc", "lr")),
    "a wrong value of an override of a study": (["ablate", "demo", "seeds=-1"], ("demo.yaml with seeds=-1", "seeds")),
    "a directory without a run": (["train", "."], ("directory '.'", "config.json")),
    "a directory in place of a study": (["ablate", "."], ("directory", "study file")),
    "unknown key in the task": (["train", "exp.yaml", "task.widht=3"], ("task.widht", "width")),
    "unknown override": (["train", "exp.yaml", "stpes=3"], ("stpes", "steps")),
    "unknown override of the recipe": (
        ["train", "exp.yaml", "update.eigenbasis.refresh.stesp=1"],
        ("update.eigenbasis.refresh.stesp", "steps"),
    ),
    "unknown stage": (["train", "exp.yaml", "update.eigenbases.transport=none"], ("eigenbasis",)),
    "override without value": (["train", "exp.yaml", "steps"], ("steps", "dotted.path")),
    "override with an empty value": (["train", "exp.yaml", "lr="], ("lr=", "~lr", "lr=null")),
    "override of the recipe with an empty value": (["show", "soap", "update.rms.beta="], ("~update.rms.beta",)),
    "override of a study with an empty value": (["ablate", "demo", "base.lr="], ("base.lr=null",)),
    "override of the demo that does not exist": (["demo", "seedz=[0]"], ("seedz", "seeds")),
    "override with an empty part": (["train", "exp.yaml", "task..width=3"], ("dotted.path",)),
    "override with broken YAML": (["train", "exp.yaml", "task={kind: digits"], ("override 'task={kind: digits'",)),
    "value of the wrong type": (["train", "exp.yaml", "steps=many"], ("steps", "many")),
    "an option of another command": (["train", "exp.yaml", "--dry-run"], ("--dry-run", "ablate", "train")),
    "Python code as an experiment": (["train", str(Path(__file__))], ("test_cli.py", "imports")),
    "a setting as an option": (["train", "exp.yaml", "--steps", "10"], ("steps=10",)),
    "a field of a stage": (["train", "exp.yaml", "betas=0.9"], ("betas", "update.rms.beta=0.99")),
    "several values": (["train", "exp.yaml", "lr=1e-3,1e-2"], ("eigengraft ablate exp.yaml lr=1e-3,1e-2",)),
    "value out of range": (["train", "exp.yaml", "lr=-1"], ("lr", 0, -1)),
    "value of the recipe out of range": (
        ["train", "exp.yaml", "update.eigenbasis.inner.rms.beta=2"],
        ("update.eigenbasis.inner.rms.beta", 2),
    ),
    "no steps after the warm-up": (
        ["train", "exp.yaml", "schedule.warmup_steps=6"],
        ("steps", 6, "warmup_steps"),
    ),
    "unknown task": (
        ["train", "exp.yaml", "task=digit"],
        ("task", "digit", "digits", "--import FILE.py"),
    ),
    "unknown recipe": (["train", "exp.yaml", "recipe=saop"], ("'saop'", "soap")),
    "fault in a recipe given in the file": (["train", "own.yaml"], ("recipe.update.rms.beta", 3)),
    "missing recipe file": (["train", "lost.yaml"], ("lost/mine.yaml",)),
    "missing text": (["train", "exp.yaml", "task={kind: byte_lm, path: gone}"], ("task.path", "gone'")),
    "missing import": (["train", "exp.yaml", "--import", "gone.py"], ("imports", "gone.py")),
    "broken import": (["train", "exp.yaml", "--import", "bad.py"], ("bad.py'", "line 2")),
    "failing import": (["train", "exp.yaml", "--import", "fails.py"], ("fails.py'", "ZeroDivisionError", "line 2")),
    "unknown module": (["train", "exp.yaml", "--import", "no_such_module"], ("'no_such_module'",)),
    "another run's directory": (
        ["train", "exp.yaml", "steps=7", "--out", "taken"],
        ("taken", "steps: 6 -> 7"),
    ),
    "a run that is not there to be extended": (["train", "exp.yaml", "--extend", "9", "--out", "new"], ("new",)),
    "two lengths": (["train", "exp.yaml", "steps=8", "--extend", "9"], ("--extend", 9, "steps")),
    "a directory in use": (["train", "exp.yaml", "--out", "full"], ("full",)),
    "a file as directory": (["train", "exp.yaml", "--out", "exp.yaml"], ("exp.yaml",)),
    "broken checkpoint": (["train", "exp.yaml", "--out", "damaged"], ("checkpoint-6", "remove damaged")),
    "show an unknown recipe": (["show", "saop"], ("'saop'", "soap")),
    "show an unknown kind": (["show", "mystage"], ("'mystage'", "--import FILE.py", "eigengraft list")),
    "show an unknown kind of a family": (["show", "stage.mementum"], ("stage.mementum", "momentum")),
    "show on an unknown task": (["show", "soap_fitted", "--task", "word_lm"], ("word_lm", "byte_lm")),
    "show two recipes": (["show", "soap", "muon"], ("'muon'", "eigengraft diff soap muon")),
    "list with a typing error": (["list", "recipies"], ("did you mean 'recipes'?",)),
    "sort another list": (["list", "goals", "--sort", "ms"], ("--sort ms", "list recipes --sort ms")),
    "unknown schema": (["schema", "recipes"], ("recipes", "recipe", "experiment", "study")),
    "unknown command": (["trian", "exp.yaml"], ("trian", "train")),
    "unknown option": (["train", "exp.yaml", "--lr", "3"], ("--lr",)),
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A complete run of the experiment."""
    directory = tmp_path_factory.mktemp("trained")
    write(str(directory / "exp.yaml"), EXPERIMENT)
    eigengraft.experiments.train(load_experiment(directory / "exp.yaml"), directory / "run")
    return directory / "run"


def prepare_study(run: Path) -> None:
    """Everything that the wrong commands name."""
    for name, text in {
        "broken.yaml": "task: digits\nrecipe: soap\nschedule: {kind: cosine\nsteps: 3\n",
        "keys.yaml": "task: digits\nrecipe: soap lr: 3\n",
        "empty.yaml": "",
        "list.yaml": "- task\n",
        "part.yaml": "recipe: soap_fitted\n",
        "key.yaml": EXPERIMENT + "stepz: 3\n",
        "own.yaml": "task: digits\nrecipe: {update: [{kind: rms, beta: 3}]}\n",
        "lost.yaml": "task: digits\nrecipe: lost/mine.yaml\n",
        "bad.py": "x = 1\ndef (\n",
        "fails.py": "x = 1\ny = x / 0\n",
        "full/thesis.tex": "",
    }.items():
        write(name, text)
    for name in ("taken", "damaged"):
        shutil.copytree(run, name)
    Path("damaged/result.json").unlink()
    Path("damaged/checkpoint-6/run.pt").write_bytes(b"?")


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_input_gets_one_clear_message(case: str, trained: Path) -> None:
    prepare_study(trained)
    arguments, says = WRONG[case]
    result = call(*arguments)
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.output and "pydantic" not in result.output
    assert result.stdout == ""
    check_said(" ".join(result.stderr.split()), *says)


def process(*arguments: str, folder: str = ".") -> Process:
    return start("-m", "eigengraft", *arguments, folder=Path(folder).resolve())


def finish(child: Process) -> None:
    output = child.communicate()
    assert child.returncode == 0, output


def test_a_real_process_reports_an_error_in_a_box() -> None:
    child = process("train", "nowhere.yaml")
    output, errors = child.communicate()
    assert (child.returncode, output) == (2, "")
    assert errors.startswith("╭") and "nowhere.yaml" in errors and "Traceback" not in errors


def test_help_wrong_commands_and_reports_come_without_torch(trained: Path) -> None:
    """One process for all of them: what one imports is still there after the next."""
    code = """
import functools
import sys
import typer.testing
from eigengraft.experiments.cli.main import app
typer.testing._get_command = functools.cache(typer.testing._get_command)
runner = typer.testing.CliRunner()
names = [command.name for command in app.registered_commands]
for arguments in (["--version"], ["--help"], *([name, "--help"] for name in names), ["trian"], ["show", "--lr"]):
    assert bool(runner.invoke(app, arguments).exit_code) == (arguments[-1] in ("trian", "--lr")), arguments
    assert "torch" not in sys.modules, arguments
report = runner.invoke(app, ["report", sys.argv[1]])
assert report.exit_code == 0 and "torch" not in sys.modules, report.output
assert runner.invoke(app, ["list", "goals"]).exit_code == 0 and "torch" not in sys.modules
assert runner.invoke(app, ["list", "spectrum"]).exit_code == 0 and "torch.utils.cpp_extension" not in sys.modules
print(*names)
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "PYTHONSAFEPATH": "1"}
    command = [sys.executable, "-c", code, str(trained.parent)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert {"train", "show", "schema", "report"} < set(done.stdout.split())


def test_an_error_of_ranks_is_told_and_another_runtime_error_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(error: Exception) -> None:
        raise error

    loading = "eigengraft.experiments.training.experiment.load_experiment"
    monkeypatch.setattr(loading, lambda *_: fail(DistributedError("rank 1 is lost")))
    assert call("train", "exp.yaml").exit_code == 2 and "rank 1 is lost" in call("train", "exp.yaml").stderr
    monkeypatch.setattr(loading, lambda *_: fail(RuntimeError("a fault of the program")))
    assert isinstance(call("train", "exp.yaml").exception, RuntimeError)


def test_debug_lets_the_error_itself_through() -> None:
    result = call("--debug", "train", "nowhere.yaml")
    assert isinstance(result.exception, eigengraft.RecipeError)


def test_an_interrupt_says_how_to_continue_and_the_command_does_continue() -> None:
    child = process("train", "exp.yaml", "steps=100000", "checkpoint_every=10", "--out", "run")
    while not list(Path("run").glob("checkpoint-*")):
        assert child.poll() is None, child.communicate()
        time.sleep(0.01)
    child.send_signal(signal.SIGINT)
    output, errors = child.communicate(timeout=60)
    assert child.returncode == 130
    assert lacking(errors, "command", "run") == [] and "Traceback" not in errors
    assert not Path("run/result.json").exists() and output == ""


def test_a_reader_that_leaves_is_no_error() -> None:
    code = """
import os, runpy, sys
reader, writer = os.pipe()
os.dup2(writer, 1)
os.close(writer)
os.close(reader)
sys.argv = ["eigengraft", "schema", "study"]
try:
    runpy.run_module("eigengraft", run_name="__main__", alter_sys=True)
finally:
    sys.stdout.flush()  # as the interpreter does at its end
"""
    done = start("-c", code, folder=Path.cwd())
    assert done.communicate() == ("", "")
    assert done.wait() == 1


def test_recipes_are_found_by_a_part_of_their_goal() -> None:
    said = invoke(["list", "recipes", "fine-tun"]).output
    assert all(name in said for name in ("adamw", "lora_rite", "lora_muon"))


@pytest.mark.parametrize(
    ("key", "column", "sign"),
    [("steps", "profile", -1), ("time", "time", -1), ("state", "state", 1), ("ms", "measured", 1)],
)
def test_sorted_recipes_are_one_table_with_the_best_first(key: str, column: str, sign: int) -> None:
    head, _, *rest = succeeds("list", "recipes", "--sort", key).splitlines()
    place = {"state": -4, "measured": -2}.get(column, -1)
    rows = [line.split() for line in rest if line.split("  ")[0] in eigengraft.shipped_recipes()]
    values = [sign * float(row[place]) if row[place] != "-" else float("inf") for row in rows]
    assert column in head.split() and len(rows) == len(eigengraft.shipped_recipes())
    assert values == sorted(values)


def test_words_are_found_from_their_beginning_on() -> None:
    assert {"muown", "rmnp"} <= {*succeeds("list", "recipes", "norm", "rows").split()}
    assert "soap_muon" in succeeds("list", "recipes", "muon").split()
    assert invoke(["list", "recipes", "orms", "rows"]).exit_code == 2  # "orms" is inside of words only


def test_named_recipes_are_one_table_in_the_given_order() -> None:
    def listed(*arguments: str) -> list[str]:
        lines = succeeds("list", "recipes", *arguments).splitlines()
        return [line.split()[0] for line in lines if line.split("  ")[0] in eigengraft.shipped_recipes()]

    assert listed("soap_fitted", "adamw", "muon") == ["soap_fitted", "adamw", "muon"]
    assert listed("soap_fitted", "adamw", "muon", "--sort", "state") == ["muon", "adamw", "soap_fitted"]
    assert listed("muon", "row") == []  # words, whose entries are below headings


def test_a_command_names_the_package_that_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "eigengraft.experiments.reports.report", raising=False)
    monkeypatch.delitem(sys.modules, "eigengraft.experiments.reports", raising=False)
    monkeypatch.setitem(sys.modules, "jinja2", None)
    found = invoke(["report", str(tmp_path)])
    assert found.exit_code == 2
    assert "pip install jinja2" in " ".join(found.output.split())
