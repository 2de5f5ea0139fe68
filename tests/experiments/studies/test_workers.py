"""Several workers on one study: claims of runs, dead workers, and kills at any time."""

import json
import multiprocessing
import os
import signal
import sys
import threading
import time

import pytest
from typer.testing import CliRunner

from eigengraft import RecipeError
from eigengraft.experiments.cli.main import app
from eigengraft.experiments.studies import running
from eigengraft.experiments.studies.pool import PoolEvent
from eigengraft.experiments.studies.running import complete_study, prepare_study, run_study
from eigengraft.experiments.studies.study import load_study
from eigengraft.experiments.studies.workers import claims
from eigengraft.experiments.studies.workers.claims import Claims
from eigengraft.experiments.studies.workers.submission import StudyJob, submit_study

from ...processes import fork_what_is_spawned

TINY = {
    "task": {"kind": "digits", "layers": 1, "width": 4, "batch_size": 8},
    "recipe": "adamw",
    "steps": 8,
    "eval_every": 4,
    "log_every": 1,
    "checkpoint_every": 3,
}


def names(run):
    return sorted(path.name for path in run.parent.iterdir())


def test_one_worker_holds_a_run_and_leaves_nothing(tmp_path):
    run = tmp_path / "cell" / "seed-0"
    with Claims(run).hold() as first:
        assert first == 1
        assert Claims(run).held()
        assert names(run) == ["seed-0.claim-1"]
        with Claims(run).hold() as second:
            assert second == 0
        with Claims(run.with_name("seed-1")).hold() as other:
            assert other == 1
        Claims(run).forget_dead()
        assert names(run) == ["seed-0.claim-1"]
    assert not Claims(run).held() and names(run) == []


def test_of_many_workers_one_holds_a_run(tmp_path):
    holders, gate, done = [], threading.Barrier(8), threading.Barrier(8)

    def work():
        gate.wait()
        with Claims(tmp_path / "seed-0").hold() as number:
            holders.append(number)
            done.wait()

    for _ in range(5):
        holders.clear()
        threads = [threading.Thread(target=work) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(holders) == [0] * 7 + [1]


def _die_holding(run):
    with Claims(run).hold():
        os.kill(os.getpid(), signal.SIGKILL)


def test_the_run_of_a_dead_worker_is_taken_by_the_next(tmp_path):
    run = tmp_path / "seed-0"
    context = multiprocessing.get_context("fork")
    for deaths in (1, 2):
        process = context.Process(target=_die_holding, args=(run,))
        process.start()
        process.join()
        assert names(run) == [f"seed-0.claim-{n + 1}" for n in range(deaths)]
        assert not Claims(run).held()
    with Claims(run).hold() as number:
        assert number == 3
    assert names(run) == []


def test_a_worker_on_another_machine_lives_as_long_as_it_gives_signs(tmp_path, monkeypatch):
    """Locks of other machines may not be seen, so that its claim is one that nobody has locked."""
    claim = tmp_path / "seed-0.claim-1"
    claim.write_text("another machine")
    assert Claims(tmp_path / "seed-0").held()
    past = time.time() - claims.STALE - 1
    os.utime(claim, (past, past))
    assert not Claims(tmp_path / "seed-0").held()
    monkeypatch.setattr(claims, "HEARTBEAT", 0.01)
    with Claims(tmp_path / "seed-0").hold() as number:
        assert number == 2
        own = tmp_path / "seed-0.claim-2"
        os.utime(own, (past, past))
        for _ in range(500):
            if own.stat().st_mtime > past + 1:
                break
            time.sleep(0.01)
        else:
            pytest.fail("no sign of life")


def trajectories(directory):
    """What every run of a study measured, but for times."""
    found = {}
    for path in sorted(directory.rglob("result.json")):
        losses = [(row["step"], row["loss"], row["val_loss"], row["lr"]) for row in rows(path.parent)]
        found[path.parent.relative_to(directory).as_posix()] = losses, json.loads(path.read_text())["val_loss"]
    return found


def rows(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines() if line.endswith("}")]


def in_this_process(work, jobs, workers, attempts):
    """A pool without processes of its own, so that a worker is one process."""
    for number, job in enumerate(jobs):
        yield PoolEvent(number, "started")
        yield PoolEvent(number, "done", work(job, lambda tick: None))


def steps_in(directory):
    return sum(path.read_bytes().count(b"\n") for path in directory.rglob("metrics.jsonl"))


@pytest.mark.slow
def test_a_study_whose_workers_are_killed_ends_like_one_that_was_not(tmp_path, monkeypatch):
    """Twelve runs, six of them of a search; workers on one directory, one or two at a time, killed ten times."""
    monkeypatch.setattr(running, "run_pool", in_this_process)
    monkeypatch.setattr(running, "POLL", 0.01)
    tune = {"seeds": [7], "space": {"weight_decay": {"start": 0.01, "ratio": 10.0}}, "trials": 3}
    methods = {"adam": {}, "lion": {"recipe": "lion"}}
    one = load_study({"base": TINY, "axes": {"method": methods}, "seeds": [0, 1, 2], "tune": tune})
    assert complete_study(one, tmp_path / "whole") == {}
    whole, killed = trajectories(tmp_path / "whole"), tmp_path / "killed"
    assert len(whole) == 12

    def worker():
        process = multiprocessing.get_context("fork").Process(target=complete_study, args=(one, killed))
        process.start()
        return process

    for number in range(10):
        workers = [worker() for _ in range(1 + number % 2)]
        # a kill takes back at most the three steps since the last checkpoint of each run that it ends
        while steps_in(killed) < 9 * (number + 1) and any(process.is_alive() for process in workers):
            time.sleep(0.002)
        for process in workers:
            process.kill()
            process.join()
    assert len(trajectories(killed)) < 12
    two = [worker(), worker()]
    for process in two:
        process.join()
    assert [process.exitcode for process in two] == [0, 0]
    assert trajectories(killed) == whole
    assert not any(Claims(path.parent).held() for path in killed.rglob("result.json"))


@pytest.mark.slow
def test_jobs_of_a_cluster_share_the_runs(tmp_path, monkeypatch):
    """Two processes that submitit starts on this machine."""
    pytest.importorskip("submitit", reason="the extra `slurm` is not installed")
    (tmp_path / "two.yaml").write_text(json.dumps({"base": TINY, "axes": {"lr": [0.001, 0.01, 0.1]}, "seeds": [0, 1]}))
    one, directory = load_study(tmp_path / "two.yaml"), tmp_path / "out"
    jobs = submit_study(one, directory, "local", jobs=2, workers=1, options=["timeout_min=5"])
    assert [job.result() for job in jobs] == [{}, {}]
    assert len(trajectories(directory)) == 6
    assert StudyJob({}, "", 1).checkpoint().function == StudyJob({}, "", 1)
    with pytest.raises(RecipeError, match="--submit: a cluster and options that submitit knows are required"):
        submit_study(one, directory, "local", jobs=1, workers=1, options=["slurm_partitoin=gpu"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--jobs", "2"], "--jobs: --submit is required beside it, got none"),
        (["--option", "timeout_min=5"], "--option: --submit is required beside it, got none"),
        (["--submit", "local"], "--submit: submitit is required (pip install eigengraft[slurm]), got none"),
    ],
)
def test_options_of_jobs(options, message, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "submitit", None)
    monkeypatch.setenv("COLUMNS", "1000")
    done = CliRunner().invoke(app, ["ablate", "demo", "--out", str(tmp_path / "out"), *options])
    assert done.exit_code == 2 and message in done.output
    assert not (tmp_path / "out").exists()


DYING = """
import os, signal
from pathlib import Path
from typing import Literal
from eigengraft.experiments.tasks import Task
from eigengraft.experiments.tasks.digits import Digits, Images

class Dying(Images):
    def batch(self, seed, step):
        deaths = Path("deaths")
        if step == 4 and (count := len(deaths.read_text())) < seed:
            deaths.write_text("x" * (count + 1))
            os.kill(os.getpid(), signal.SIGKILL)
        return super().batch(seed, step)

class DyingDigits(Task):
    kind: Literal["dying_digits"] = "dying_digits"
    def load(self): return Dying(8)
    def build(self): return Digits(layers=1, width=4).build()
"""


@pytest.mark.slow
def test_a_run_whose_process_dies_is_begun_again_and_marked_after_three_times(tmp_path, monkeypatch):
    fork_what_is_spawned(monkeypatch)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "dying.py").write_text(DYING)
    base = {**TINY, "imports": ["dying.py"], "task": "dying_digits"}
    for seed, kinds in ((2, ["died", "died", "done"]), (3, ["died", "died", "failed"])):
        (tmp_path / "deaths").write_text("")
        one = load_study({"base": base, "axes": {"method": {"adam": {}}}, "seeds": [seed]})
        events = list(run_study(prepare_study(one, tmp_path / "out"), workers=1))
        assert [event.kind for event in events if event.kind in ("died", "done", "failed")] == kinds
        assert events[0].kind == "started" and events[-1].fraction == 1
    assert events[-1].value == "its process ended with signal SIGKILL"
    fault = tmp_path / "out" / "method=adam" / "seed-3.error.txt"
    assert fault.read_text() == events[-1].value
    # the same command counts anew
    assert complete_study(one, tmp_path / "out", workers=1) == {}
    assert not fault.exists()
