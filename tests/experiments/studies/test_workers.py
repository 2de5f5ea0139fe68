"""Several workers on one study: leases of runs, dead workers, and kills at any time."""

import itertools
import json
import multiprocessing
import os
import signal
import sys
import threading
import time
from contextlib import contextmanager
from functools import partial
from multiprocessing.sharedctypes import RawArray

import pytest
import sqlalchemy

from eigengraft import RecipeError
from eigengraft.experiments.files import files_named
from eigengraft.experiments.studies import database, rendezvous, running
from eigengraft.experiments.studies.plan import refuse_changed_study
from eigengraft.experiments.studies.pool import PoolEvent
from eigengraft.experiments.studies.rendezvous import FileLeases
from eigengraft.experiments.studies.running import StudyJob, complete_study, prepare_study, run_study, submit_study
from eigengraft.experiments.studies.study import load_study

from ...cli import invoke
from ...processes import FORK_SPAWNED, fork_what_is_spawned, start
from ...refusals import check_said, lacking, refused

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


@pytest.fixture(params=["files", "sqlite", pytest.param("postgresql", marks=pytest.mark.slow)])
def leases_of(request, tmp_path):
    """The leases of a run, by its name."""
    storage = None
    if request.param == "sqlite":
        storage = f"sqlite:///{tmp_path / 'study.db'}"
    elif request.param == "postgresql":
        storage = request.getfixturevalue("postgres").new()
    return running.rendezvous_at("one", tmp_path / "study", storage).leases


def test_one_worker_holds_a_run_and_leaves_nothing(leases_of):
    run = leases_of("cell/seed-0")
    with run.hold() as first:
        assert first == 1
        assert run.held()
        lease = run.present()
        assert lease is not None and lease.number == 1
        with leases_of("cell/seed-0").hold() as second:
            assert second == 0
        with leases_of("cell/seed-1").hold() as other:
            assert other == 1
        run.forget_dead()
        assert run.present() == lease
    assert not run.held() and run.present() is None


def test_of_many_workers_one_holds_a_run(leases_of):
    holders, gate, done = [], threading.Barrier(8), threading.Barrier(8, timeout=60)  # one that fails stops all

    def work():
        gate.wait()
        with leases_of("seed-0").hold() as number:
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


class Workers:
    """Workers of one run that start and end in a chosen order.

    holders: workers that hold the run.
    corpses: leases of workers that died. Nothing else tells that they are dead, as this process has not died.
    """

    def __init__(self, leases, monkeypatch):
        self.leases, self.holders, self.corpses, self.kept = leases, [], [], []
        kind = type(leases)
        alive = kind.alive
        monkeypatch.setattr(kind, "alive", lambda this, lease: lease not in self.corpses and alive(this, lease))
        monkeypatch.setattr(kind, "_keep_beating", lambda this, own, stop: None)

    def start(self, leases=None):
        worker = (leases or self.leases).hold()
        if worker.__enter__():
            self.holders.append(worker)
            assert len(self.holders) == 1
        else:
            worker.__exit__(None, None, None)

    def end(self):
        if self.holders:
            self.holders.pop(0).__exit__(None, None, None)

    def die(self):
        self.corpses.append(self.leases.present())
        self.kept.append(self.holders.pop())  # its block never ends


def stopping(leases, place, after, meanwhile):
    """Return the same leases for a worker that is stopped at its call number `place` to the storage, before or after
    it. The function `meanwhile` is called then."""
    kind, calls = type(leases), []

    def method(name):
        def call(self, *given):
            calls.append(name)
            now = len(calls) - 1 == place
            if now and not after:
                meanwhile()
            found = getattr(kind, name)(self, *given)
            if now and after:
                meanwhile()
            return found

        return call

    methods = {name: method(name) for name in ("present", "alive", "created", "remove")}
    return type("Stopping", (kind,), methods)(**vars(leases))


@pytest.mark.parametrize("act", ["start", "forget_dead", "end"])
@pytest.mark.parametrize("dead", [False, True], ids=["free", "dead"])
def test_two_workers_never_hold_a_run_however_slow_one_is(leases_of, monkeypatch, act, dead):
    """While one worker is stopped at any of its calls, others start and end. `dead`: a worker has died with the run."""
    for place, after in itertools.product(range(4), (False, True)):
        workers = Workers(leases_of(f"cell/seed-{place}-{after}"), monkeypatch)
        if dead:
            workers.start()
            workers.die()

        def others(workers=workers):
            for turn in (workers.start, workers.end, workers.start):
                turn()

        slow = stopping(workers.leases, place if act != "end" else place + 4, after, others)
        if act == "forget_dead":
            slow.forget_dead()
        else:
            workers.start(slow)
        if act == "end":
            workers.end()
        workers.start()
        workers.start()
        assert len(workers.holders) == 1 and workers.leases.held()
        while workers.holders:
            workers.end()
        assert workers.leases.present() is None


def test_a_worker_without_its_lease_ends(leases_of, monkeypatch):
    """Another worker counted it as dead, and may train its run."""
    codes, ended = [], threading.Event()
    monkeypatch.setattr(rendezvous, "HEARTBEAT", 0.01)
    monkeypatch.setattr(rendezvous.os, "_exit", lambda code: (codes.append(code), ended.set()))
    run = leases_of("cell/seed-0")
    with run.hold():
        lease = run.present()
        run.remove(rendezvous.Lease(lease.number, "0" * 32))
        assert run.present() == lease and run.beat(lease)
        run.remove(lease)
        assert ended.wait(60)
    assert set(codes) == {1}


@pytest.mark.parametrize("failures", [2, 3])
def test_each_table_may_be_made_by_another_worker_meanwhile(tmp_path, monkeypatch, failures):
    """There are two, so that a worker may come too late twice; after that the database has them, or fails."""
    create, calls = database._TABLES.create_all, []

    def too_late(engine):
        calls.append(engine)
        if len(calls) <= failures:
            raise sqlalchemy.exc.OperationalError("CREATE TABLE", None, Exception("table already exists"))
        create(engine)

    monkeypatch.setattr(database._TABLES, "create_all", too_late)
    run = running.rendezvous_at("one", None, f"sqlite:///{tmp_path / 'study.db'}").leases("run")
    if failures == 3:
        with refused(OSError, "database"):
            run.present()
    else:
        assert run.present() is None and len(calls) == 3


@pytest.mark.slow
def test_workers_may_live_in_different_time_zones(postgres, monkeypatch):
    """PostgreSQL writes a time without a zone in that of the session, which libpq takes from the environment."""
    storage = postgres.new()
    for zone in ("Asia/Tokyo", "America/New_York"):
        run = running.rendezvous_at("one", None, storage).leases(zone)
        monkeypatch.setenv("PGTZ", zone)
        with run.hold():
            monkeypatch.setenv("PGTZ", "UTC")
            assert run.held()


def _die_holding(run):
    with FileLeases(run).hold():
        os.kill(os.getpid(), signal.SIGKILL)


def test_the_run_of_a_dead_worker_is_taken_by_the_next(tmp_path):
    run = tmp_path / "seed-0"
    context = multiprocessing.get_context("fork")
    for deaths in (1, 2):
        process = context.Process(target=_die_holding, args=(run,))
        process.start()
        process.join()
        lease = FileLeases(run).present()
        assert names(run) == ["seed-0.lease"] and lease is not None and lease.number == deaths
        assert not FileLeases(run).held()
    with FileLeases(run).hold() as number:
        assert number == 3
    assert names(run) == []


def test_a_worker_on_another_machine_lives_as_long_as_it_gives_signs(tmp_path, monkeypatch):
    """Locks of other machines may not be seen, so that its lease is one that nobody has locked."""
    lease = tmp_path / "seed-0.lease" / "1-abc"
    lease.parent.mkdir()
    lease.write_text("another machine")
    assert FileLeases(tmp_path / "seed-0").held()
    past = time.time() - rendezvous.STALE - 1
    os.utime(lease, (past, past))
    assert not FileLeases(tmp_path / "seed-0").held()
    monkeypatch.setattr(rendezvous, "HEARTBEAT", 0.01)
    with FileLeases(tmp_path / "seed-0").hold() as number:
        assert number == 2
        (own,) = (tmp_path / "seed-0.lease").iterdir()
        assert own.name.startswith("2-")
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


def in_this_process(work, jobs, workers, attempts, progress=lambda tick: None):
    """A pool without processes of its own, so that a worker is one process."""
    for number, job in enumerate(jobs):
        yield PoolEvent(number, "started")
        yield PoolEvent(number, "done", work(job, progress))


def count(steps, worker, tick):
    """Counts the steps of each worker, without a lock, which a killed one would keep; once they are nine together, a
    worker waits for its end."""
    steps[worker] += 1
    while sum(steps) > 8:
        signal.pause()


def steps_in(directory):
    return sum(path.read_bytes().count(b"\n") for path in files_named("metrics.jsonl", directory))


def searching_study():
    """Twelve runs, six of them of a search."""
    tune = {"seeds": [7], "space": {"weight_decay": {"start": 0.01, "ratio": 10.0}}, "trials": 3}
    methods = {"adam": {}, "lion": {"recipe": "lion"}}
    return load_study({"base": TINY, "axes": {"method": methods}, "seeds": [0, 1, 2], "tune": tune})


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """The trajectories of `searching_study` by one worker that nothing disturbs."""
    directory = tmp_path_factory.mktemp("uninterrupted")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(running, "run_pool", in_this_process)
        assert complete_study(searching_study(), directory) == {}
    whole = trajectories(directory)
    assert len(whole) == 12
    return whole


def started_worker(directory, storage=None):
    """A process of its own, with what is patched here at its start."""
    arguments = {"study": searching_study(), "directory": directory, "storage": storage}
    process = multiprocessing.get_context("fork").Process(target=complete_study, kwargs=arguments)
    process.start()
    return process


@pytest.mark.slow
def test_a_study_whose_workers_are_killed_ends_like_one_that_was_not(tmp_path, monkeypatch, uninterrupted):
    """Workers on one directory, one or two at a time, killed ten times, when together they have made nine steps.

    Two workers may make a tenth at the same moment: ten kills are at most 95 of the study's 96 steps. A run may die
    more often than a study allows.
    """
    monkeypatch.setattr(running, "POLL", 0.01)
    monkeypatch.setattr(rendezvous, "ATTEMPTS", 10)
    monkeypatch.setattr(rendezvous, "_throttled", lambda report: report)  # steps are reported one by one
    for number in range(10):
        steps, workers = RawArray("i", 2), []
        for worker in range(1 + number % 2):
            progress = partial(count, steps, worker)
            monkeypatch.setattr(running, "run_pool", partial(in_this_process, progress=progress))
            workers.append(started_worker(tmp_path))
        while sum(steps) < 9:
            assert any(process.is_alive() for process in workers)
            time.sleep(0.002)
        for process in workers:
            process.kill()
            process.join()
    monkeypatch.setattr(running, "run_pool", in_this_process)
    assert len(trajectories(tmp_path)) < 12
    two = [started_worker(tmp_path), started_worker(tmp_path)]
    for process in two:
        process.join()
    assert [process.exitcode for process in two] == [0, 0]
    assert trajectories(tmp_path) == uninterrupted
    assert not any(FileLeases(path.parent).held() for path in tmp_path.rglob("result.json"))


@pytest.mark.slow
def test_workers_that_share_a_database_and_no_directory_split_a_study(storage, tmp_path, monkeypatch, uninterrupted):
    """One is killed in its second run; two others end the study, and each has every result."""
    monkeypatch.setattr(running, "run_pool", in_this_process)
    monkeypatch.setattr(running, "POLL", 0.05)
    monkeypatch.setattr(rendezvous, "HEARTBEAT", 0.2)
    monkeypatch.setattr(database, "STALE", 4.0)  # SQLite tells whole seconds; twenty signs may come late
    killed, first, second = (tmp_path / name for name in ("killed", "first", "second"))
    process = started_worker(killed, storage)
    while steps_in(killed) < 12:
        assert process.is_alive()
        time.sleep(0.002)
    process.kill()
    process.join()
    two = [started_worker(directory, storage) for directory in (first, second)]
    for process in two:
        process.join()
    assert [process.exitcode for process in two] == [0, 0]
    assert trajectories(first) == trajectories(second) == uninterrupted
    # checkpoints stay where they are: the result of the killed worker was taken over, and nothing was run twice
    trained = [{path.parent.relative_to(one) for path in one.rglob("checkpoint-*")} for one in (first, second)]
    assert not trained[0] & trained[1] and all(trained)
    assert len(trained[0] | trained[1]) == 12 - len(trajectories(killed))
    # a worker that comes last finds everything there
    assert complete_study(searching_study(), tmp_path / "late", storage=storage) == {}
    assert trajectories(tmp_path / "late") == uninterrupted
    assert not list((tmp_path / "late").rglob("checkpoint-*"))


def test_a_database_tells_why_a_run_failed_until_it_is_tried_again(storage, tmp_path):
    here, there = (running.rendezvous_at("one", tmp_path / name, storage) for name in ("here", "there"))
    other = running.rendezvous_at("other", tmp_path / "other", storage)
    run, faults = "cell/seed-0", [tmp_path / name / "cell" / "seed-0.error.txt" for name in ("here", "there")]
    (here.directory / run).mkdir(parents=True)
    faults[0].write_text("no memory")
    here.publish(run)
    there.fetch()
    other.fetch()
    assert faults[1].read_text() == "no memory" and not other.directory.exists()
    faults[0].unlink()
    (here.directory / run / "metrics.jsonl").write_text("{}\n")  # of a run that has not ended: it stays here
    here.publish(run)
    there.fetch([run])
    assert not faults[1].exists() and list((there.directory / run).glob("*")) == []
    (here.directory / run / "result.json").write_text("{}")
    here.publish(run)
    there.fetch([run])
    assert sorted(path.name for path in (there.directory / run).iterdir()) == ["metrics.jsonl", "result.json"]


@pytest.mark.parametrize(
    ("url", "error", "says"),
    [
        ("study.db", RecipeError, ("--storage", "URL", "SQLAlchemy", "study.db")),
        ("nosuch://host/x", RecipeError, ("--storage", "nosuch", "SQLite", "PostgreSQL", "nosuch://host/x")),
        ("sqlite:////nowhere/study.db", OSError, ("--storage",)),
    ],
)
def test_wrong_storage(url, error, says, tmp_path):
    with refused(error, *says):
        running.rendezvous_at("one", tmp_path, url).fetch()


TASK_OF_A_JOB = """
import os, runpy
os.environ["SUBMITIT_LOCAL_JOB_ID"] = str(os.getpid())
runpy.run_module("submitit.core._submit", run_name="__main__")
"""
"""Script that submitit's controller starts for a job on this machine. The task knows the job by its number."""


@pytest.mark.slow
def test_jobs_of_a_cluster_share_the_runs(tmp_path, monkeypatch):
    """Two jobs that submitit submits to this machine, and whose results it reads. Their tasks are forked: controllers,
    tasks and workers in interpreters of their own would import torch four times."""
    submitit = pytest.importorskip("submitit", reason="the extra `slurm` is not installed")

    def start_task(folder, command, **options):
        assert "submitit.core._submit" in command and options["tasks_per_node"] == 1
        variables = {"SUBMITIT_EXECUTOR": "local", "SUBMITIT_LOCAL_NTASKS": "1", "SUBMITIT_LOCAL_GLOBALID": "0"}
        variables |= {"SUBMITIT_LOCAL_NODEID": "0", "SUBMITIT_LOCAL_LOCALID": "0", "SUBMITIT_LOCAL_JOB_NUM_NODES": "1"}
        return start("-c", TASK_OF_A_JOB, str(folder), folder=tmp_path, **variables, **FORK_SPAWNED)

    monkeypatch.setattr(submitit.local.local, "start_controller", start_task)
    (tmp_path / "two.yaml").write_text(json.dumps({"base": TINY, "axes": {"lr": [0.001, 0.01, 0.1]}, "seeds": [0, 1]}))
    one, directory = load_study(tmp_path / "two.yaml"), tmp_path / "out"
    jobs = submit_study(one, directory, "local", jobs=2, workers=1, options=["timeout_min=5"])
    assert [job.result() for job in jobs] == [{}, {}]
    assert len(trajectories(directory)) == 6
    assert StudyJob({}, "", 1).checkpoint().function == StudyJob({}, "", 1)
    with refused(RecipeError, "--submit"):
        submit_study(one, directory, "local", jobs=1, workers=1, options=["slurm_partitoin=gpu"])


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--jobs", "2"], ("--jobs", "--submit")),
        (["--option", "timeout_min=5"], ("--option", "--submit")),
        (["--storage", "sqlite:///x.db", "--submit", "local"], ("--storage",)),
        (["--storage", "sqlite:///x.db", "--dry-run"], ("--storage",)),
        (["--submit", "local", "--dry-run"], ("--submit", "--dry-run")),
        (["--jobs", "2", "--dry-run"], ("--jobs", "--submit")),
        (["--option", "timeout_min=5", "--dry-run"], ("--option", "--submit")),
        (["--workers", "2", "--dry-run"], ("--workers", "--dry-run")),
        (["--submit", "local"], ("--submit", "submitit", "pip install submitit")),
    ],
)
def test_options_of_jobs_that_do_not_fit_are_refused(options, says, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "submitit", None)
    monkeypatch.setenv("COLUMNS", "1000")
    done = invoke(["ablate", "demo", "--out", str(tmp_path / "out"), *options])
    assert done.exit_code == 2
    check_said(" ".join(done.output.split()), *says)
    assert not (tmp_path / "out").exists()


def study_of_a_file(tmp_path, axes):
    """A study on a file of text, and the file."""
    file = tmp_path / "text"
    file.write_bytes(b"one thing " * 1000)
    task = {"kind": "byte_lm", "path": str(file), "width": 8, "heads": 2, "layers": 1, "context": 8, "batch_size": 4}
    return load_study({"base": {**TINY, "task": task}, "axes": axes, "seeds": [0, 1]}), file


def after_the_first(change):
    """Return a function for `watch` of a study: it calls `change` once, when the first run has ended."""
    ended = []

    @contextmanager
    def watch(prepared):
        def on_event(event):
            if event.kind == "done" and not ended:
                change()
            ended.extend([event.run] if event.kind == "done" else [])

        yield on_event

    return watch


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("axes", [{"lr": [0.1, 0.01, 0.001]}, {"task.width": [8, 16, 24]}], ids=["equal", "other"])
def test_data_that_change_while_a_study_runs_stop_it_like_the_next_command(tmp_path, monkeypatch, workers, axes):
    """Also if the tasks of the cells differ in other fields. No run fails by it."""
    fork_what_is_spawned(monkeypatch)
    one, file = study_of_a_file(tmp_path, axes)
    change = partial(file.write_bytes, b"two thing " * 1000)
    with pytest.raises(RecipeError) as caught:  # the message counts runs, which depends on speed
        complete_study(one, tmp_path / "out", workers, after_the_first(change))
    assert lacking(str(caught.value), f"data of {file}", "rm -r") == []
    assert 1 <= len(trajectories(tmp_path / "out")) <= workers
    assert not list((tmp_path / "out").rglob("*.error.txt"))
    with pytest.raises(RecipeError) as again:
        prepare_study(one, tmp_path / "out")
    assert str(again.value).splitlines()[0] == str(caught.value).splitlines()[0]
    file.write_bytes(b"one thing " * 1000)
    assert complete_study(one, tmp_path / "out", workers) == {}
    assert len(trajectories(tmp_path / "out")) == 6


@pytest.mark.slow
def test_a_worker_compares_its_run_with_those_of_other_workers_alone_where_they_share_something(tmp_path, monkeypatch):
    """Files that only other cells import, and data of other tasks, may differ."""
    monkeypatch.setattr(running, "run_pool", in_this_process)
    one, file = study_of_a_file(tmp_path, {"lr": [0.1, 0.01]})
    assert complete_study(one, tmp_path / "out") == {}
    paths = sorted((tmp_path / "out").rglob("env.json"))
    first, before = paths[0], [path.read_text() for path in paths]
    config, environment = (json.loads(first.with_name(f"{name}.json").read_text()) for name in ("config", "env"))
    check = partial(refuse_changed_study, config, environment, tmp_path / "out")
    check()
    for known, now, says in [
        ({"imports": {"own.py": "a"}}, {"imports": {"own.py": "b"}}, "imports own.py: a -> b (4 runs)"),
        ({"imports": {"own.py": "a"}}, {"imports": {"other.py": "b"}}, None),
        ({"torch": "0.1"}, {}, "torch: 0.1 -> "),
        ({"data": {"source": "text", "sha256": "c"}}, {}, f"data of {file}: c -> "),
    ]:
        for path, text in zip(paths, before, strict=True):
            path.write_text(json.dumps({**json.loads(text), **known}))
        check = partial(refuse_changed_study, config, {**environment, **now}, tmp_path / "out")
        if says is None:
            check()
        else:
            with refused(RecipeError, says):
                check()
    check = partial(refuse_changed_study, {**config, "task": {"kind": "digits"}}, environment, tmp_path / "out")
    check()


DYING = """
import os, signal
from pathlib import Path
from typing import Literal
from eigengraft.experiments.tasks import Task
from eigengraft.experiments.tasks.base import Examples
from eigengraft.experiments.tasks.images import Digits

class Dying(Examples):
    def batch(self, seed, step):
        deaths = Path("deaths")
        if step == 4 and (count := len(deaths.read_text())) < seed:
            deaths.write_text("x" * (count + 1))
            os.kill(os.getpid(), signal.SIGKILL)
        return super().batch(seed, step)

class DyingDigits(Task):
    kind: Literal["dying_digits"] = "dying_digits"
    def load(self):
        whole = Digits(batch_size=8).load()
        return Dying(whole.train, whole.validation, whole.batch_size, whole.fingerprint)
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
