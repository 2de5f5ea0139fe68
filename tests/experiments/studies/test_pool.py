"""The process pool: order, results, and jobs that raise, die or are left."""

import os
import sys
import time
from pathlib import Path

import pytest

from eigengraft.experiments.studies import pool
from eigengraft.experiments.studies.pool import run_pool

from ...processes import ROOT, fork_what_is_spawned, start

pytestmark = pytest.mark.slow

JOBS = """
import os, signal, time, warnings

def work(job, report):
    if job == "raise":
        raise ValueError("no such luck")
    if job == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if job == "warn":
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            for text in ("one", "two", "one"):
                warnings.warn_explicit(text, UserWarning, os.__file__, 1)
    if job == "wait":
        report(os.getpid())
        time.sleep(600)
    report(job)
    return job * 2
"""


@pytest.fixture
def work(tmp_path, monkeypatch):
    """A function that a spawned process can import."""
    (tmp_path / "pool_jobs.py").write_text(JOBS)
    monkeypatch.syspath_prepend(str(tmp_path))
    fork_what_is_spawned(monkeypatch)
    import pool_jobs

    yield pool_jobs.work
    del sys.modules["pool_jobs"]


def test_failures_cost_only_their_own_job(work):
    jobs = [1, "raise", 2, "die", 3, 4]
    events = list(run_pool(work, jobs, workers=2))
    ends = {event.job: event for event in events if event.kind in ("done", "failed")}
    assert {job: event.value for job, event in ends.items() if event.kind == "done"} == {0: 2, 2: 4, 4: 6, 5: 8}
    assert "ValueError: no such luck" in ends[1].value
    assert ends[3].value == "its process ended with signal SIGKILL"
    assert [event.job for event in events if event.kind == "started"] == [0, 1, 2, 3, 4, 5]
    assert {event.job: event.value for event in events if event.kind == "progress"} == {0: 1, 2: 2, 4: 3, 5: 4}


def test_a_process_that_dies_before_its_next_job_costs_one_attempt(work, monkeypatch):
    """It dies after the pool has seen it alive. Its first job is sent to a process that has died too."""
    start, started = pool._Worker.start, []

    def killed(worker, job, value):
        if job in (0, 2) and started.count(job) == 0:
            worker.process.kill()
            worker.process.join()
        started.append(job)
        return start(worker, job, value)

    monkeypatch.setattr(pool._Worker, "start", killed)
    events = [(event.job, event.kind, event.value) for event in run_pool(work, [1, 2, 3], workers=1, attempts=2)]
    died = "its process ended with signal SIGKILL"
    assert [event for event in events if event[1] in ("died", "done")] == [
        (0, "died", died),
        (0, "done", 2),
        (1, "done", 4),
        (2, "died", died),
        (2, "done", 6),
    ]


def test_leaving_stops_the_processes(work):
    events = run_pool(work, ["wait", 1], workers=1)
    pid = next(event.value for event in events if event.kind == "progress")
    events.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_warnings_of_jobs_are_events(work):
    events = list(run_pool(work, ["warn", 1, "warn"], workers=1))
    assert [(event.job, event.value) for event in events if event.kind == "warned"] == [
        (job, f"UserWarning: {text}\n") for job in (0, 2) for text in ("one", "two", "one")
    ]
    assert [event.value for event in events if event.kind == "done"] == ["warnwarn", 2, "warnwarn"]


def test_no_jobs():
    assert list(run_pool(print, [], workers=2)) == []


def test_workers_end_with_a_killed_parent(work, tmp_path):
    (tmp_path / "parent.py").write_text(
        "from pathlib import Path\nfrom pool_jobs import work\n"
        "from eigengraft.experiments.studies.pool import run_pool\n"
        "if __name__ == '__main__':\n"
        "    for event in run_pool(work, ['wait'], workers=1):\n"
        "        Path(event.kind).write_text(f'{event.value}\\n')\n"
    )
    parent = start("parent.py", folder=tmp_path, PYTHONPATH=os.pathsep.join([str(ROOT / "src"), str(tmp_path)]))
    told = tmp_path / "progress"
    while not (told.exists() and told.read_text().endswith("\n")):
        assert parent.poll() is None, parent.communicate()
        time.sleep(0.02)
    assert (tmp_path / "started").read_text() == "None\n"
    pid = int(told.read_text())
    parent.kill()
    parent.wait()
    for _ in range(100):
        if not Path(f"/proc/{pid}").exists():
            return
        time.sleep(0.05)
    pytest.fail("the worker outlived its parent")
