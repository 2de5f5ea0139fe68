"""Training on several processes: the losses of one, and no lost rank that changes them."""

import json
import math
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from eigengraft import RecipeError
from eigengraft.experiments import Experiment, load_experiment, train
from eigengraft.experiments.tasks import Batch
from eigengraft.experiments.training.parallel import Ranks

from ..distributed.ranks.launch import Outcome, Run, launch
from ..processes import start
from ..refusals import check_said, refused

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
WORKER = "train_parallel:run"
KINDS = ["ddp", "fsdp2"]
Launched = dict[str, list[Outcome]]
TRAJECTORY = ("step", "loss", "val_loss", "lr", "weight_norm", "gradient_norm", "update_ratio", "weight_growth")

TASK = '''
"""A byte-level language model in float64, where `FAULT=rank:step:what` makes a rank fail at a step, as it is asked."""

import os
import signal
from typing import Literal

from eigengraft.experiments.tasks import Batch, ByteLM, Dataset, Task


class Exact(Task):
    kind: Literal["exact"] = "exact"
    text: str
    batch_size: int = 6

    def model(self):
        sizes = dict(layers=1, width=12, heads=2, context=12, batch_size=self.batch_size, eval_sequences=16)
        return ByteLM(path=self.text, max_bytes=8192, **sizes)

    def load(self):
        return Faulty(self.model().load())

    def build(self):
        return self.model().build().double()


class Faulty(Dataset):
    def __init__(self, inner):
        self.inner, self.fingerprint = inner, inner.fingerprint

    def batch(self, seed, step):
        rank, _, rest = os.environ.get("FAULT", "").partition(":")
        at, _, what = rest.partition(":")
        if (os.environ.get("RANK"), str(step)) == (rank, at):
            if what == "raise":
                raise ValueError(f"the data of step {step} are gone")
            os.kill(os.getpid(), getattr(signal, what))
        return self.inner.batch(seed, step)

    def evaluation(self):
        return self.inner.evaluation()
'''


def rows(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def trajectory(directory: Path) -> list[list[Any]]:
    return [[row[key] for key in TRAJECTORY] for row in rows(directory)]


def apart(directory: Path, other: Path) -> float:
    """The largest relative difference of two trajectories with the same rows."""
    both = zip(trajectory(directory), trajectory(other), strict=True)
    pairs = [pair for a, b in both for pair in zip(a, b, strict=True)]
    assert all((a is None) == (b is None) for a, b in pairs)
    return max(abs(a - b) / abs(b) for a, b in pairs if a is not None)


def free_port() -> int:
    with socket.socket() as stream:
        stream.bind(("127.0.0.1", 0))
        port: int = stream.getsockname()[1]
    return port


def torchrun(arguments: list[str], fault: str = "") -> tuple[int, str]:
    """`eigengraft train` under torchrun on two ranks: exit code and all that was said, as one line without boxes."""
    command = [sys.executable, "-m", "torch.distributed.run", "--master-port", str(free_port())]
    command += ["--nproc-per-node", "2", "-m", "eigengraft", "train", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1"}
    environment |= {"FAULT": fault, "COLUMNS": "2000"}
    output: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "start_new_session": True}
    with subprocess.Popen(command, env=environment, **output) as process:
        try:
            said, _ = process.communicate(timeout=120)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    return process.returncode, " ".join(said.replace("│", " ").split())


def as_torchrun(arguments: list[str], size: int = 2, fault: str = "") -> tuple[int, str]:
    """Train as `torchrun` does, without processes of its own, which take seconds to import torch.

    Returns the largest exit code of the ranks, and all that they print.

    size: number of ranks.
    fault: "rank:step:signal" for the task, by which that rank ends itself; "": none.
    """
    both = {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1"}
    both |= {"MASTER_PORT": str(free_port()), "FAULT": fault}
    ranks = [
        start("-m", "eigengraft", "train", *arguments, folder=ROOT, RANK=str(rank), LOCAL_RANK=str(rank), **both)
        for rank in range(size)
    ]
    try:
        said = "".join(text for rank in ranks for text in rank.communicate())
    finally:
        for rank in ranks:
            rank.kill()
    return max(abs(rank.wait()) for rank in ranks), said


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a text, a task and an experiment."""
    home = tmp_path_factory.mktemp("parallel")
    (home / "text.txt").write_bytes((ROOT / "LICENSE").read_bytes()[:8192])
    (home / "exact.py").write_text(TASK)
    (home / "exact.yaml").write_text(json.dumps(declared(home)))  # JSON is YAML
    return home


LATER = {"base": "soap_fitted", "set": {"update.eigenbasis.refresh.start": 6}}
"""By then most statistics have as many directions as axes, so that rounding decides little of the first basis."""


def declared(home: Path, **changes: Any) -> dict[str, Any]:
    """Rows of a batch do not divide by the number of ranks, and the gradient is clipped."""
    return {
        "name": "exact",
        "imports": [str(home / "exact.py")],
        "task": {"kind": "exact", "text": str(home / "text.txt"), "batch_size": 7},
        "recipe": LATER,
        "lr": 0.01,
        "schedule": {"kind": "cosine", "warmup_steps": 3},
        "steps": 14,
        "log_every": 1,
        "eval_every": 5,
        "checkpoint_every": 3,
        "grad_clip": 0.5,
        **changes,
    }


SINGLE = {"layers": 1, "width": 16, "heads": 2, "context": 16, "batch_size": 8, "eval_sequences": 16}


def variants(home: Path) -> dict[str, dict[str, Any]]:
    """What is trained in one process and in several."""
    ema = {"update": ["momentum", "rms"], "averaging": {"kind": "ema", "decay": 0.9}}
    single = {"kind": "byte_lm", "path": str(home / "text.txt"), "max_bytes": 8192, **SINGLE}
    last = {"checkpoint_every": 14}  # what is not continued need not be written on the way
    return {
        "soap": declared(home),
        "shampoo": declared(home, recipe="shampoo", diagnostics="every 5", **last),
        "averaged": declared(home, recipe=ema, **last),
        "free": declared(home, recipe="schedule_free_adamw", grad_clip=None, **last),
        "single": declared(home, task=single, **last),
    }


@pytest.fixture(scope="module")
def alone(home: Path) -> dict[str, Path]:
    """Runs of one process."""
    found = {}
    for name, experiment in variants(home).items():
        found[name] = home / "alone" / name
        train(load_experiment(experiment), found[name])
    return found


FAULTS = {"killed": "1:7:SIGKILL", "first": "0:7:SIGKILL", "told": "1:7:SIGTERM", "failed": "1:7:raise"}
"""In step 8 (of 14) of rank 0 or 1; the last checkpoint is that of step 6."""


@pytest.fixture(scope="module")
def launched(home: Path, tmp_path_factory: pytest.TempPathFactory) -> Launched:
    """What ranks said: two of each fault, then two that train all variants, then four; runs are in `home/<launch>`."""
    own = variants(home)
    soap = own["soap"]
    grid = {**soap, "parallel": {"kind": "hsdp", "replicas": 2}}
    two: dict[str, Any] = {
        f"{name}-{kind}": {"experiment": {**one, "parallel": kind}} for name, one in own.items() for kind in KINDS
    }
    two["resumed"] = {"experiment": {**soap, "parallel": "fsdp2"}, "of": str(home / "killed" / "run")}
    two["other"] = {"experiment": {**soap, "parallel": "ddp", "seed": 1}, "directory": str(home / "two" / "soap-ddp")}
    two["disagreed"] = {"experiment": {**soap, "parallel": "ddp"}, "own": [["seed=1"], ["seed=2"]]}
    two["diverged"] = {"experiment": {**soap, "parallel": "ddp", "recipe": "sgd", "lr": 1e200}}
    four: dict[str, Any] = {
        "hsdp": {"experiment": {**own["shampoo"], "parallel": grid["parallel"]}},
        "ddp": {"experiment": {**own["shampoo"], "parallel": "ddp"}},
        "resumed": {"experiment": grid, "of": str(home / "killed" / "run")},
        "odd": {"experiment": {**soap, "parallel": {"kind": "hsdp", "replicas": 3}}},
        "few": {"experiment": {**grid, "task": {**soap["task"], "batch_size": 3}}},
    }
    runs = [
        Run(name, WORKER, 2, {"cases": placed(home / name, {"run": two["soap-fsdp2"]}), "fault": fault}, fails=True)
        for name, fault in FAULTS.items()
    ]
    runs += [Run("two", WORKER, 2, {"cases": placed(home / "two", two)})]
    runs += [Run("four", WORKER, 4, {"cases": placed(home / "four", four)})]
    return launch(runs, tmp_path_factory.mktemp("launches"))


def placed(folder: Path, cases: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {name: {"directory": str(folder / name), **case} for name, case in cases.items()}


EXACT = 1e-9
"""Relative, float64: rows are summed in another order (1e-16), and 14 steps of an optimizer that divides by roots make
that larger. One row with a wrong weight would change the loss by more than 1e-3."""
ROUNDED = 1e-3
"""Relative, float32: three times the largest difference seen. It is that of the update ratio after the first basis of
SOAP, in whose null space rounding decides; losses differ by at most 5e-6."""


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["soap", "shampoo", "averaged", "free"])
def test_two_ranks_have_the_losses_of_one(
    home: Path, launched: Launched, alone: dict[str, Path], name: str, kind: str
) -> None:
    assert apart(home / "two" / f"{name}-{kind}", alone[name]) < EXACT


@pytest.mark.parametrize("place", ["two/shampoo-ddp", "two/shampoo-fsdp2", "four/hsdp"])
def test_ranks_tell_what_one_process_does(home: Path, launched: Launched, alone: dict[str, Path], place: str) -> None:
    one, many = (
        {tuple(line.values())[:5]: line["value"] for line in map(json.loads, (path / "diagnostics.jsonl").open())}
        for path in (alone["shampoo"], home / place)
    )
    assert one.keys() == many.keys() and {step for step, *_ in one} == {5, 10, 14}
    steady = {key: value for key, value in one.items() if key[-1] in ("update_rms", "cosine", "staleness", "skipped")}
    # trajectories are equal up to EXACT; a cosine may be small beside its terms
    assert {key: many[key] for key in steady} == pytest.approx(steady, rel=1e-6, abs=1e-7)


@pytest.mark.parametrize("name", ["hsdp", "ddp"])
def test_four_ranks_have_the_losses_of_one(home: Path, launched: Launched, alone: dict[str, Path], name: str) -> None:
    assert apart(home / "four" / name, alone["shampoo"]) < EXACT


@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_have_the_losses_of_one_in_float32(
    home: Path, launched: Launched, alone: dict[str, Path], kind: str
) -> None:
    directory = home / "two" / f"single-{kind}"
    # before the first basis, in step 6, SOAP is Adam: some roundings
    for found, expected in zip(rows(directory)[:2], rows(alone["single"])[:2], strict=True):
        assert found["loss"] == pytest.approx(expected["loss"], rel=5e-7)
    assert apart(directory, alone["single"]) < ROUNDED


def test_the_first_rank_alone_writes_and_tells(home: Path, launched: Launched) -> None:
    first, second = (outcome.result for outcome in launched["two"])
    assert first["heard"] > 0 and second["heard"] == 0
    assert first["outcome"] == second["outcome"]
    directory = home / "two" / "soap-fsdp2"
    names = {"config.json", "env.json", "metrics.jsonl", "diagnostics.jsonl", "result.json", "lock"}
    names |= {"checkpoint-14"}
    assert {path.name for path in directory.iterdir()} == names
    assert json.loads((directory / "env.json").read_text())["ranks"] == 2
    assert len(rows(directory)) == 14


def test_each_rank_holds_its_part_of_the_state(launched: Launched, alone: dict[str, Path]) -> None:
    whole = json.loads((alone["shampoo"] / "result.json").read_text())["state_bytes"]
    for ranks, case, size in (("two", "shampoo-ddp", 2), ("two", "shampoo-fsdp2", 2), ("four", "ddp", 4)):
        largest = launched[ranks][0].result["outcome"][case][1]
        assert whole / size <= largest < 1.5 * whole / size


def test_a_diverging_run_ends_on_every_rank(home: Path, launched: Launched) -> None:
    assert [said.result["outcome"]["diverged"][0] for said in launched["two"]] == [None, None]
    result = json.loads((home / "two" / "diverged" / "result.json").read_text())
    assert result["diverged"] and 1 < result["steps"] < 14


@pytest.mark.parametrize(
    ("launch", "case", "says"),
    [
        ("two", "other", ("seed: 0 -> 1",)),
        ("two", "disagreed", ("ranks",)),
        ("four", "odd", ("parallel.replicas", 4, 3)),
        ("four", "few", ("task.batch_size", 4, 3)),
    ],
)
def test_every_rank_refuses_experiments_that_do_not_fit_its_ranks(
    launched: Launched, launch: str, case: str, says: tuple[object, ...]
) -> None:
    for said in launched[launch]:
        check_said(said.result["outcome"][case], "RecipeError", *says)


LOST = r"another rank has stopped or does not answer \(.+\)\."
TOLD = r"received SIGTERM, which torchrun sends when another rank has failed\."
ADVICE = " Give the same command again to continue from step 6, with any number of ranks, .*parallel=none.*[.]"


@pytest.mark.parametrize(
    ("fault", "victim", "words"),
    [
        ("killed", 1, None),
        ("first", 0, None),
        ("told", 1, f"DistributedError: rank 1 of 2: {TOLD}{ADVICE}"),
        ("failed", 1, r"TaskError: .*Faulty\.batch\(\) raised ValueError: the data of step 7 are gone .*"),
    ],
)
def test_when_a_rank_is_lost_every_other_says_so(
    home: Path, launched: Launched, fault: str, victim: int, words: str | None
) -> None:
    lost, left = launched[fault][victim], launched[fault][1 - victim]
    expected = f"DistributedError: rank {1 - victim} of 2: {LOST}{ADVICE}"
    assert re.fullmatch(expected, left.result["outcome"]["run"])
    if words is None:
        assert lost.code == -signal.SIGKILL
    else:
        assert re.fullmatch(words, lost.result["outcome"]["run"])
    names = {path.name for path in (home / fault / "run").iterdir()}
    assert names == {"config.json", "env.json", "metrics.jsonl", "lock", "checkpoint-3", "checkpoint-6"}


def test_torchrun_ends_a_run_with_a_killed_rank_and_continues_it(home: Path, launched: Launched) -> None:
    directory = home / "torchrun"
    arguments = [str(home / "exact.yaml"), "parallel=fsdp2", "--out", str(directory)]
    code, said = torchrun(arguments, FAULTS["killed"])
    assert code != 0
    # the rank that is left notices it by itself, or torchrun is faster
    assert re.search(f"rank 0 of 2: ({LOST}|{TOLD}){ADVICE}", said), said
    assert "Signal 9 (SIGKILL)" in said  # torchrun's own summary
    (directory / ".checkpoint-9.partial").mkdir()  # a kill while it was written
    (directory / ".checkpoint-9.partial" / "__0_0.distcp").write_bytes(b"?")
    code, said = as_torchrun(arguments)
    assert code == 0, said
    assert said.count("validation loss") == 1
    assert trajectory(directory) == trajectory(home / "two" / "soap-fsdp2")
    assert not list(directory.glob(".*"))


def test_a_killed_run_continues_bit_for_bit_on_two_ranks(home: Path, launched: Launched) -> None:
    assert trajectory(home / "two" / "resumed") == trajectory(home / "two" / "soap-fsdp2")


def test_a_killed_run_continues_on_four_ranks_that_divide_it_otherwise(home: Path, launched: Launched) -> None:
    assert trajectory(home / "four" / "resumed")[:6] == trajectory(home / "two" / "soap-fsdp2")[:6]
    assert apart(home / "four" / "resumed", home / "two" / "soap-fsdp2") < EXACT


@pytest.fixture
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torchrun starts a single process."""
    for key, value in {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1}.items():
        monkeypatch.setenv(key, str(value))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))


def soap(home: Path, kind: str) -> Experiment:
    return load_experiment({**variants(home)["soap"], "parallel": kind})


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("kind", [*KINDS, "hsdp"])
def test_a_killed_run_continues_on_one_rank(home: Path, tmp_path: Path, launched: Launched, kind: str) -> None:
    shutil.copytree(home / "killed" / "run", tmp_path / "run")
    train(soap(home, kind), tmp_path / "run")
    assert apart(tmp_path / "run", home / "two" / "soap-fsdp2") < EXACT


@pytest.mark.usefixtures("one_rank")
def test_a_run_of_ranks_is_extended_from_the_checkpoint_before_its_rates_fall(home: Path, tmp_path: Path) -> None:
    """wsd falls after step 6 of 12 and after step 9 of 18. The other checkpoint kept is the last one."""
    falling = {**declared(home), "schedule": {"kind": "wsd", "decay_fraction": 0.5}, "parallel": "ddp"}
    for directory, steps, extend in (("run", 12, False), ("run", 18, True), ("whole", 18, False)):
        train(load_experiment({**falling, "steps": steps}), tmp_path / directory, extend=extend)
        if (directory, steps) == ("run", 12):
            kept = {path.name for path in (tmp_path / "run").glob("checkpoint-*")}
            assert kept == {"checkpoint-6", "checkpoint-12"}
    assert trajectory(tmp_path / "run") == trajectory(tmp_path / "whole")


@pytest.mark.usefixtures("one_rank")
def test_a_broken_checkpoint_is_named_and_the_one_before_it_serves(
    home: Path, tmp_path: Path, launched: Launched
) -> None:
    directory = tmp_path / "run"
    shutil.copytree(home / "killed" / "run", directory)
    (directory / "checkpoint-6" / "__0_0.distcp").write_bytes(b"?")
    with refused(RecipeError, "checkpoint-6"):
        train(soap(home, "ddp"), directory)
    shutil.rmtree(directory / "checkpoint-6")
    train(soap(home, "ddp"), directory)
    assert apart(directory, home / "two" / "soap-fsdp2") < EXACT


@pytest.mark.parametrize("kind", KINDS)
def test_commands_continue_a_run_of_one_process_on_two_and_back(
    home: Path, tmp_path: Path, alone: dict[str, Path], kind: str
) -> None:
    """Killed in step 8 of one process, then in step 11 of two: checkpoints of steps 6 and 9 have different files."""
    arguments = [str(home / "exact.yaml"), "--out", str(tmp_path / "run")]
    assert as_torchrun(arguments, 1, "0:7:SIGKILL")[0] != 0
    code, said = as_torchrun([*arguments, f"parallel={kind}"], 2, "1:10:SIGKILL")
    assert code != 0 and "step 9" in said and "parallel=none" in said
    sharded = {path.name: any(path.glob("*.distcp")) for path in (tmp_path / "run").glob("checkpoint*")}
    assert sharded == {"checkpoint-6": False, "checkpoint-9": True}
    code, said = as_torchrun(arguments, 1)
    assert code == 0, said
    assert trajectory(tmp_path / "run")[:6] == trajectory(alone["soap"])[:6]
    assert apart(tmp_path / "run", alone["soap"]) < EXACT


def test_one_process_continues_a_killed_run_of_ranks(home: Path, tmp_path: Path, launched: Launched) -> None:
    shutil.copytree(home / "killed" / "run", tmp_path / "run")
    train(soap(home, "none"), tmp_path / "run")
    assert trajectory(tmp_path / "run")[:6] == trajectory(home / "two" / "soap-fsdp2")[:6]
    assert apart(tmp_path / "run", home / "two" / "soap-fsdp2") < EXACT


@pytest.mark.usefixtures("one_rank")
def test_a_run_that_changed_its_processes_is_extended(home: Path, tmp_path: Path) -> None:
    """wsd falls after step 6 of 12. One process trains to step 12; two more checkpoints are those of another form."""
    falling = {**declared(home), "schedule": {"kind": "wsd", "decay_fraction": 0.5}}
    for kind, steps, extend in (("ddp", 12, False), ("none", 18, True), ("ddp", 24, True)):
        experiment = load_experiment({**falling, "parallel": kind, "steps": steps})
        train(experiment, tmp_path / "run", extend=extend)
    train(load_experiment({**falling, "steps": 24}), tmp_path / "whole")
    both = [{row["step"]: row["loss"] for row in rows(tmp_path / name)} for name in ("run", "whole")]
    assert both[0] == pytest.approx(both[1], rel=EXACT)


@pytest.mark.parametrize(
    ("kind", "processes", "says"),
    [("ddp", 0, ("ddp",)), ("none", 2, (2,))],
)
def test_parallel_and_the_way_of_starting_must_fit(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, processes: int, says: tuple[object, ...]
) -> None:
    if processes:
        monkeypatch.setenv("RANK", "0")
        monkeypatch.setenv("WORLD_SIZE", str(processes))
    with refused(RecipeError, *says):
        train(soap(home, kind), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("size", [1, 2, 3, 5, 7])
def test_weighted_means_of_the_parts_are_the_mean_of_the_batch(size: int) -> None:
    values = torch.arange(21, dtype=torch.float64).square().reshape(7, 3)
    batch = Batch(torch.arange(7), values)
    parts = [Ranks(rank, size).shard_batch(batch) for rank in range(size)]
    assert torch.equal(torch.cat([part.inputs for part, _ in parts]), batch.inputs)
    mean = sum(weight * part.targets.mean().item() for part, weight in parts) / size
    assert math.isclose(mean, values.mean().item(), rel_tol=1e-14)  # some roundings of 1e-16


def test_overrides_reach_into_parallel(home: Path) -> None:
    experiment = load_experiment(declared(home), ["parallel.kind=hsdp", "parallel.replicas=2"])
    assert experiment.parallel.model_dump() == {"kind": "hsdp", "replicas": 2, "timeout": 600}
    with refused(RecipeError, "fsdp", "fsdp2"):
        load_experiment(declared(home), ["parallel=fsdp"])
