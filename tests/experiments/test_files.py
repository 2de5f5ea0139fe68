"""Files on a full disk, cut short by a crash, or under long names; output where no UTF-8 is."""

import errno
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from ruamel.yaml import YAML

from eigengraft import RecipeError, load_recipe
from eigengraft.experiments import load_experiment
from eigengraft.experiments.files import JsonLines, files_named, read_json, replacing, short_name, write_text
from eigengraft.experiments.reports.records import read_records
from eigengraft.experiments.reports.report import Report
from eigengraft.experiments.studies.plan import plan_runs, plan_tuning
from eigengraft.experiments.studies.running import prepare_study
from eigengraft.experiments.studies.study import load_study
from eigengraft.experiments.training.train import train

from ..processes import run as run_process
from ..refusals import refused

FULL = Path("/dev/full")
TINY = {"task": {"kind": "digits", "layers": 1, "width": 8, "batch_size": 8}, "recipe": "adamw", "steps": 4}
on_linux = pytest.mark.skipif(not FULL.exists(), reason="a device that is always full is needed")


def test_files_are_found_while_directories_are_removed(tmp_path, monkeypatch):
    for name in ("kept", "also/kept", "checkpoint"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "env.json").touch()
    scan = os.scandir

    def removing(path):
        if str(path).endswith("checkpoint"):
            shutil.rmtree(path)
        return scan(path)

    monkeypatch.setattr(os, "scandir", removing)
    found = set(files_named("env.json", tmp_path))
    assert found == {tmp_path / "kept" / "env.json", tmp_path / "also" / "kept" / "env.json"}
    assert not (tmp_path / "checkpoint").exists()


@on_linux
@pytest.mark.parametrize("call", [lambda path: JsonLines(path).append({"step": 1}), lambda path: torch_save(path)])
def test_a_full_disk_is_said_with_the_name_of_the_file(call, tmp_path):
    (tmp_path / "rows").symlink_to(FULL)
    with refused(OSError, tmp_path):
        call(tmp_path / "rows")


def torch_save(path):
    with replacing(path.with_name("run.pt")) as temporary:
        temporary.symlink_to(FULL)
        with temporary.open("wb") as stream:
            torch.save({"x": torch.zeros(1000)}, stream)


def test_a_failed_write_leaves_the_old_content_and_nothing_beside_it(tmp_path):
    path = tmp_path / "result.json"
    write_text(path, "old")
    with refused(OSError, "result.json"):
        fail_half_way(path, OSError(28, "No space left on device"))
    assert path.read_text() == "old" and [*tmp_path.iterdir()] == [path]


def test_a_file_system_that_is_read_only_is_said_with_the_name_of_the_file(tmp_path, monkeypatch):
    def caught(*_, **__):
        raise OSError(errno.EROFS, "Read-only file system", ".x.partial")

    monkeypatch.setattr(Path, "write_text", caught)
    monkeypatch.setattr(Path, "unlink", caught)
    with refused(OSError, f"{tmp_path}/report.html"):
        write_text(tmp_path / "report.html", "page")


def test_errors_that_are_none_of_the_disk_pass(tmp_path):
    with refused(RuntimeError, "mine"):
        fail_half_way(tmp_path / "x", RuntimeError("mine"))


def fail_half_way(path, error):
    with replacing(path) as temporary:
        temporary.write_text("half")
        raise error


@pytest.mark.slow
def test_a_run_whose_disk_fills_up_ends_in_a_sentence_and_goes_on_later(tmp_path):
    """A limit of the size of files stands for the disk: metrics fit, the checkpoint does not."""
    path = tmp_path / "exp.yaml"
    YAML(typ="safe").dump({**TINY, "checkpoint_every": 2, "task": {**TINY["task"], "width": 64}}, path)
    limit = """
import resource, signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # a write fails, as on a full disk
resource.setrlimit(resource.RLIMIT_FSIZE, (16384, 16384))
"""
    full = command(tmp_path, "train", path, "--out", tmp_path / "run", before=limit)
    said = full.stderr.replace("\n", "").replace("│", "").replace(" ", "")
    assert full.returncode == 2 and "checkpoint-2" in said and "toolarge" in said and "Traceback" not in full.stderr
    assert not list((tmp_path / "run").glob("*checkpoint*")) and not list((tmp_path / "run").glob(".*"))
    again = command(tmp_path, "train", path, "--out", tmp_path / "run")
    assert again.returncode == 0, again.stderr
    expected = train(load_experiment(path), tmp_path / "other")
    assert json.loads((tmp_path / "run" / "result.json").read_text())["val_loss"] == expected.val_loss


@pytest.mark.parametrize("content", [b"", b"\0" * 40, b'{"step": 1, "lo', b"\xff\xfe"])
def test_a_file_that_a_crash_cut_short_is_named(content, tmp_path):
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with refused(RecipeError, path):
        read_json(path)


def test_rows_that_a_crash_spoilt_are_named_and_a_last_one_without_end_is_left_out(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2}\n{"st')
    assert JsonLines(path).rows() == [{"step": 1}, {"step": 2}]
    path.write_bytes(b'{"step": 1}\n\0\0\0\n{"step": 3}\n')
    with refused(RecipeError, path, 2):
        JsonLines(path).rows()


@pytest.mark.parametrize("end", [b"", b'{"st', b'\0\0\n{"step": 2}\n', b'{"step": 3}\n{"step": 4}\n'])
def test_rows_are_rewound_to_a_step_also_behind_a_damaged_line(end, tmp_path):
    path = tmp_path / "metrics.jsonl"
    JsonLines(path).rewind(0)
    assert not path.exists()
    path.write_bytes(b'{"step": 1}\n{"step": 2}\n' + end)
    for step in (2, 1, 0):
        JsonLines(path).rewind(step)
        assert [row["step"] for row in JsonLines(path).rows()] == [*range(1, step + 1)]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["config.json", "result.json", "env.json", "metrics.jsonl"])
def test_a_study_and_its_report_name_the_file_that_is_cut_short(name, tmp_path):
    study = load_study({"name": "tiny", "base": TINY, "axes": {"lr": [0.01, 0.02]}})
    prepared = prepare_study(study, tmp_path)
    for run in prepared.runs:
        train(run.experiment, tmp_path / run.directory)
    broken = tmp_path / prepared.runs[1].directory / name
    broken.write_bytes(broken.read_bytes()[:30] + b"\n")
    with refused(RecipeError, broken):
        Report(tmp_path).write()
    if name in ("config.json", "result.json"):
        with refused(RecipeError, broken):
            prepare_study(study, tmp_path)
    if name == "config.json":
        with refused(RecipeError, broken):
            train(prepared.runs[1].experiment, broken.parent)
    (tmp_path / "study.json").write_text("{")
    with refused(RecipeError, f"{tmp_path}/study.json"):
        read_records(tmp_path)


def test_names_are_kept_where_a_file_system_takes_them_and_distinct_where_not():
    assert short_name("lr=0.1,beta=0.9") == "lr=0.1,beta=0.9" and short_name("x" * 251, ".png") == "x" * 251 + ".png"
    names = ["x" * 256, "x" * 300, "x" * 299 + "y", "ü" * 128, "ü" * 200, "a/b", "a-b", "x/" * 200]
    short = [short_name(name, ".png") for name in names]
    assert all(len(one.encode()) <= 255 and "/" not in one and one.endswith(".png") for one in short)
    assert len({*short}) == len(names)


def test_a_study_with_long_labels_plans_runs_that_can_be_made(tmp_path):
    fields = {"lr": 0.02, "update.momentum.beta": 0.8, "update.rms.beta": 0.9, "weight_decay": 0.1, "task.width": 16}
    axes = {
        f"part{i}": {"as-published-in-the-paper-without-a-change-of-ours-ever": {}, "other": {path: value}}
        for i, (path, value) in enumerate(fields.items())
    }
    tune = {"space": {path: [0.1, 0.2] for path in fields if path != "task.width"}, "seeds": [7]}
    study = load_study({"name": "s" * 300, "base": TINY, "axes": axes, "tune": tune})
    runs, (tuning, _) = plan_runs(study), plan_tuning(study, tmp_path)
    assert len({run.directory for run in runs}) == 2**5 and tuning
    for run in (*runs, *tuning):
        (tmp_path / run.directory).mkdir(parents=True)


@pytest.mark.slow
@pytest.mark.parametrize("encoding", ["ascii", "cp1252"])
def test_a_recipe_is_shown_so_that_it_reads_back_equal_where_output_is_not_utf8(encoding, tmp_path):
    (tmp_path / "r.yaml").write_text("base: soap_fitted\nabout: Größe μ → 0, 名前\n", encoding="utf-8")
    code, output, errors = encoded(encoding, tmp_path, "show", "r.yaml")
    assert code == 0, errors
    shown = load_recipe(YAML(typ="safe").load(output.decode(encoding)))
    assert shown.to_json() == load_recipe(tmp_path / "r.yaml").to_json() and shown.about == "Größe μ → 0, 名前"


@pytest.mark.slow
@pytest.mark.parametrize(("code", "line"), [(0, ["bench", "roots", "--quick", "sizes=[8]"]), (2, ["ablate", "ü.yaml"])])
def test_output_that_is_not_utf8_ends_no_command(code, line, tmp_path):
    found, _, errors = encoded("ascii", tmp_path, *line)
    assert found == code and b"Unicode" not in errors


def command(folder, *line, before=""):
    """Run the command line in a process that has run some code before, and return its result."""
    code = (
        f"import runpy, sys\n{before}\nsys.argv[0] = 'eigengraft'\nrunpy.run_module('eigengraft', run_name='__main__')"
    )
    return run_process("-c", code, *line, folder=folder)


def encoded(encoding, folder, *line):
    """Exit code and bytes of both streams of the command line, whose streams are as with PYTHONIOENCODING."""
    redirect = f"""
import os
for number, stream in ((1, sys.stdout), (2, sys.stderr)):
    os.dup2(os.open(f"stream{{number}}", os.O_WRONLY | os.O_CREAT), number)
    stream.reconfigure(encoding="{encoding}", errors=("strict", "backslashreplace")[number - 1])
"""
    done = command(folder, *line, before=redirect)
    return done.returncode, *((folder / f"stream{number}").read_bytes() for number in (1, 2))
