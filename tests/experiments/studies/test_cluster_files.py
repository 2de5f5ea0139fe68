"""Job files for clusters: their commands run a study, with SQLite in place of PostgreSQL."""

import json
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from eigengraft.experiments import load_study
from eigengraft.experiments.studies.plan import plan_runs

from ...processes import FORK_SPAWNED, run_command

ROOT = Path(__file__).resolve().parents[3]
CLUSTER = ROOT / "docs" / "assets" / "cluster"
STUDY = {
    "base": {"task": {"kind": "digits", "width": 4}, "recipe": "adamw", "steps": 2},
    "axes": {"lr": [0.01, 0.1]},
    "seeds": [0],
}


def documents(name: str) -> list[Any]:
    return list(YAML(typ="safe", pure=True).load_all((CLUSTER / name).read_text()))


def kubernetes() -> tuple[Any, Any, Any]:
    service, database, job = documents("kubernetes.yaml")
    return service, database, job


def worker() -> Any:
    (container,) = kubernetes()[2]["spec"]["template"]["spec"]["containers"]
    return container


def commands() -> dict[str, str]:
    (sky,) = documents("skypilot.yaml")
    return {"kubernetes": worker()["args"][0], "skypilot": sky["run"].splitlines()[-1]}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["kubernetes", "skypilot"])
def test_the_command_of_a_worker_runs_the_study(tmp_path: Path, name: str) -> None:
    pytest.importorskip("sqlalchemy")
    (tmp_path / "study.yaml").write_text(json.dumps(STUDY))
    given = {"STUDY": "study.yaml", "STORAGE": f"sqlite:///{tmp_path}/study.db", "OUT": "runs/study", "WORKERS": "1"}
    done = run_command(["sh", "-c", commands()[name]], tmp_path, **given, **FORK_SPAWNED)
    assert done.returncode == 0, done.stderr
    assert len(list((tmp_path / "runs" / "study").rglob("result.json"))) == 2


def test_every_variable_of_a_command_is_set() -> None:
    (sky,) = documents("skypilot.yaml")
    given = {
        "kubernetes": {one["name"] for one in worker()["env"]},
        "skypilot": {*sky["envs"], *sky["secrets"]},
    }
    for name, command in commands().items():
        assert {word.strip('"$') for word in command.split() if word.startswith('"$')} <= given[name]


def test_the_parts_of_the_cluster_fit_together() -> None:
    service, database, job = kubernetes()
    env = {one["name"]: one.get("value") for one in worker()["env"]}
    labels = database["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"] == labels == database["spec"]["selector"]["matchLabels"]
    host = f"@{service['metadata']['name']}:{service['spec']['ports'][0]['port']}/"
    assert env["STORAGE"].startswith("postgresql+psycopg://postgres:$(PASSWORD)") and host in env["STORAGE"]
    stored = {one["name"]: one.get("value") for one in database["spec"]["template"]["spec"]["containers"][0]["env"]}
    assert env["STORAGE"].endswith(f"/{stored['POSTGRES_DB']}")
    mounted = {one["name"] for one in worker()["volumeMounts"]}
    assert mounted == {one["name"] for one in job["spec"]["template"]["spec"]["volumes"]}
    assert job["spec"]["parallelism"] == job["spec"]["completions"] == 10
    # Kubernetes replaces $(NAME) by variables that stand before
    names = [one["name"] for one in worker()["env"]]
    assert names.index("PASSWORD") < names.index("STORAGE")


def test_the_study_is_one() -> None:
    study = load_study(CLUSTER / "study.yaml")
    assert study.compared == ("recipe", "adamw") and len(plan_runs(study)) == 4 * 3 * 5
