"""Reports about synthetic run directories: numbers, what is partial, what is foreign, what is dangerous."""

import csv
import json
import math
import re
import sys
from html.parser import HTMLParser

import pytest

from eigengraft import RecipeError
from eigengraft.experiments import RunLog
from eigengraft.experiments.reports import figures
from eigengraft.experiments.reports.comparison import compare, sweeps, tuning_curves
from eigengraft.experiments.reports.recipe_diff import diff_recipes
from eigengraft.experiments.reports.records import read_records
from eigengraft.experiments.reports.report import Report, difference_dots, internals
from eigengraft.experiments.reports.tables import (
    format_reached,
    load_metrics,
    load_runs,
    sentences,
    worst_layers,
    write_parquet,
)
from eigengraft.experiments.reproduction.claims import collect_results

from ...cli import invoke
from ...refusals import check_said, lacking, refused

pytestmark = pytest.mark.slow

ADAM = {"name": "adamw", "update": [{"kind": "momentum", "beta": 0.9}, {"kind": "rms", "eps": 1e-8}]}
SOAP = {
    "name": "soap",
    "update": [{"kind": "eigenbasis", "inner": [{"kind": "momentum", "beta": 0.95}], "refresh": {"steps": 10}}],
}


DECLARED = {"name": "trial", "description": "", "metric": "val_loss", "larger": False}
DECLARED |= {"equal": "steps", "target": None, "tuned_in": ""}
"""Fields of a study that reports read from its manifest."""


def write_run(path, recipe, values, seed=0, task="bytes", ended=True, **fields):
    """A run with an evaluation every 10 steps, 0.1 s apart; None is a loss that is not finite."""
    path.mkdir(parents=True)
    config = {"task": {"kind": task}, "recipe": recipe, "lr": 0.01, "steps": 10 * len(values), "seed": seed}
    (path / "config.json").write_text(json.dumps(config | fields))
    (path / "env.json").write_text(json.dumps({"python": "3.11.2", "data": {"sha256": "abc"}, "git": None}))
    rows = [
        {"step": 10 * i, "loss": 1.0, "val_loss": v, "val_accuracy": None, "lr": 0.01, "seconds": i / 10, "step_ms": 10}
        for i, v in enumerate(values, start=1)
    ]
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if ended:
        result = {"val_loss": values[-1], "val_accuracy": None, "steps": 10 * len(values), "step_ms": 10.0}
        result |= {"optimizer_ms": 2.0, "state_bytes_per_parameter": 8.0, "seconds": len(values) / 10}
        (path / "result.json").write_text(json.dumps(result))


def write_study(directory, runs, **fields):
    """`runs`: (method, seed, arguments of write_run or None for a run that never started)."""
    listed = []
    for method, seed, arguments in runs:
        place = f"method={method}/seed-{seed}".replace("<", "").replace(">", "").replace("script/", "")
        listed.append({"directory": place, "labels": {"method": method}, "seed": seed})
        if arguments is not None:
            write_run(directory / place, seed=seed, **arguments)
    own = {name: fields.pop(name) for name in DECLARED if name in fields}
    manifest = {"study": {**DECLARED, **own}, "compare": "method", "baseline": "adamw"}
    directory.mkdir(exist_ok=True)
    (directory / "study.json").write_text(json.dumps({**manifest, **fields, "runs": listed}))


@pytest.fixture
def study(tmp_path):
    write_study(
        tmp_path,
        [
            ("adamw", 0, {"recipe": ADAM, "values": [4.0, 3.0, 2.0]}),
            ("adamw", 1, {"recipe": ADAM, "values": [4.0, 3.0, 2.5]}),
            ("soap", 0, {"recipe": SOAP, "values": [3.0, 1.0, 0.8]}),
            ("soap", 1, {"recipe": SOAP, "values": [3.0, 2.0, 1.0]}),
        ],
    )
    return tmp_path


@pytest.fixture
def no_pictures(monkeypatch):
    """Figures are made, and no pictures of them, where numbers and sentences are read."""
    monkeypatch.setattr(figures, "inline_svg", lambda figure, name: "<svg></svg>")


class Page(HTMLParser):
    """Collects attributes, text and whether every element is closed."""

    VOID = frozenset({"meta", "br", "wbr", "link", "img", "input", "hr"})

    def __init__(self, text):
        super().__init__()
        self.attributes, self.open, self.text, self.tags = [], [], "", set()
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.add(tag)
        self.attributes += attributes
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.add(tag)
        self.attributes += attributes

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def test_comparison_by_hand(study):
    (panel,) = compare(read_records(study))
    adamw, soap = panel.rows
    assert (adamw.label, soap.label, panel.best.label) == ("adamw", "soap", "soap")
    assert adamw.final.mean == pytest.approx(2.25)
    assert adamw.final.spread == pytest.approx(0.5 / 2**0.5)
    # seed 0: 0.8 - 2 = -1.2; seed 1: 1 - 2.5 = -1.5; mean -1.35, spread 0.3 / sqrt(2), t = -1.35 * 2 / 0.3
    assert (soap.difference.mean, soap.difference.t) == (pytest.approx(-1.35), pytest.approx(-9.0))
    # seed 0 falls from 3 to 1 between steps 10 and 20 and passes 2 at 15; seed 1 passes 2.5 at 15 as well
    assert soap.reached("steps") == {0: pytest.approx(15), 1: pytest.approx(15)}
    assert soap.reached("seconds") == {0: pytest.approx(0.15), 1: pytest.approx(0.15)}
    assert adamw.reached("steps") == {0: 30, 1: 30}
    curve = soap.curve("steps")
    assert (curve.x, curve.mean) == ([10, 20, 30], pytest.approx([3.0, 1.5, 0.9]))
    assert (curve.low, curve.high) == ([3.0, 1.0, 0.8], [3.0, 2.0, 1.0])


@pytest.mark.parametrize("baseline", ["adamw", "soap"])
@pytest.mark.parametrize("labels", [{}, {"soap": "SOAP of 2024"}])
def test_a_method_keeps_its_color_whatever_it_is_compared_with(study, baseline, labels):
    (panel,) = compare(read_records(study, baseline, labels=labels))
    before = {row.label: row.style for row in panel.rows}
    soap = labels.get("soap", "soap")
    assert before["adamw"] == 0 and before[soap] not in (0, 1, 2, 4)  # colors of others
    write_study(study, [("soap", 0, None), ("muon", 0, None), ("adamw", 0, None)])
    write_run(study / "method=muon" / "seed-0", ADAM, [4.0, 3.0])
    (panel,) = compare(read_records(study, baseline, labels=labels))
    assert {row.label: row.style for row in panel.rows} == {**before, "muon": 4}


TRIED = [{"values": {"lr": 0.01}, "mean": 3.0, "stopped": None}]
SEARCHED = {"values": {"lr": 0.01}, "edges": {}, "tried": TRIED, "rule": "Descent."}


@pytest.mark.parametrize("done", ["one rate", "one rate of one", "an axis", "searched", "elsewhere", "one recipe"])
def test_a_learning_rate_that_was_not_tuned_is_a_notice(done, tmp_path, no_pictures):
    runs = [("adamw", 0, {"recipe": ADAM, "values": [4.0, 3.0]})]
    runs.append(("soap", 0, {"recipe": ADAM if done == "one recipe" else SOAP, "values": [4.0, 3.0]}))
    fields = {
        "elsewhere": {"tuned_in": "grid.yaml"},
        "searched": {"tuned": {f"method={name}": SEARCHED for name in ("adamw", "soap")}},
    }
    write_study(tmp_path, runs, **fields.get(done, {}))
    manifest = json.loads((tmp_path / "study.json").read_text())
    for run in manifest["runs"] if done in ("an axis", "one rate of one") else []:
        run["labels"]["lr"] = "0.01"
    more = {"an axis": ("adamw", "soap"), "one rate of one": ("soap",)}.get(done, ())
    for method in more:
        place, recipe = f"{method}-high/seed-0", {"adamw": ADAM, "soap": SOAP}[method]
        manifest["runs"].append({"directory": place, "labels": {"method": method, "lr": "0.1"}, "seed": 0})
        write_run(tmp_path / place, recipe, [4.0, 3.0], lr=0.1)
    (tmp_path / "study.json").write_text(json.dumps(manifest))
    names = {"one rate": ("adamw, soap",), "one rate of one": ("adamw",)}.get(done, ())
    found = [*filter(None, [Report(tmp_path).records.untuned])]
    assert len(found) == len(names) and all(lacking(*pair) == [] for pair in zip(found, names, strict=True))
    page, said = Report(tmp_path).page(), invoke(["report", str(tmp_path)])
    assert all(notice in page and notice in said.stderr for notice in found)
    assert ("grid.yaml" in page) == (done == "elsewhere")
    assert len(collect_results(tmp_path)["rows"]) == len(manifest["runs"])  # such runs may be kept as results


@pytest.mark.parametrize(
    ("soap", "says"),
    [
        ({"values": [3.0, 1.0]}, "Lowest final validation loss: soap, 1.000."),
        ({"values": [3.0, None]}, "Lowest final validation loss: adamw, 2.000."),
        (None, "Only adamw has complete runs: validation loss 2.000."),
    ],
    ids=["complete", "diverged", "not run"],
)
def test_a_lowest_loss_is_one_of_several(tmp_path, no_pictures, soap, says):
    runs = [("adamw", 0, {"recipe": ADAM, "values": [4.0, 2.0]}), ("soap", 0, soap and {"recipe": SOAP, **soap})]
    write_study(tmp_path, runs)
    text = " ".join(Page(Report(tmp_path).write().read_text(encoding="utf-8")).text.split())
    assert says in text and text.count("Lowest final") + text.count("Only adamw") == 1


def test_page_says_the_numbers(study, no_pictures):
    page = Page(Report(study).write().read_text(encoding="utf-8"))
    text = " ".join(page.text.split())
    assert "Lowest final validation loss: soap, 0.900 ± 0.141. adamw: 2.250 ± 0.354." in text
    # half of the interval: 12.706, the 97.5 % point of Student's t with one degree of freedom, times 0.3 / 2
    assert "soap minus adamw: \u22121.350 [\u22123.256, +0.556], with a 95 % interval over 2 paired seeds." in text
    # t = -9 with one degree of freedom: p = 1 - 2/pi atan(9) = 0.0704
    assert "With 2 seeds this difference is not significant (p = 0.07)." in text
    assert "soap reaches adamw's final value after 15 of 30 steps." in text
    assert "t = \u22129.0" in text
    assert "With 2 seeds a test needs |t| above 12.7" in text
    assert "4 complete" in text and "not complete" not in text
    assert "recipe.update.eigenbasis.refresh" in text and "steps 10" in text
    assert "momentum → rms" in text


def test_a_value_reached_by_the_first_evaluation_is_a_bound(tmp_path):
    write_study(
        tmp_path,
        [
            ("adamw", 0, {"recipe": ADAM, "values": [4.0, 3.0]}),
            ("adamw", 1, {"recipe": ADAM, "values": [4.0, 3.0]}),
            ("soap", 0, {"recipe": SOAP, "values": [2.0, 1.0]}),
            ("soap", 1, {"recipe": SOAP, "values": [None, 1.0]}),
        ],
    )
    records = read_records(tmp_path)
    (panel,) = compare(records)
    adamw, soap = panel.rows
    assert (adamw.at_first_evaluation("steps"), soap.at_first_evaluation("steps")) == (set(), {0, 1})
    assert "soap reaches adamw's final value by its first evaluation, step 15 or earlier." in list(sentences(panel))
    assert format_reached(soap, "steps") == ("\u2264 15", "") and format_reached(adamw, "steps") == ("20", "")
    write_run(tmp_path / "method=soap" / "seed-2", SOAP, [4.0, 2.0], seed=2)
    write_run(tmp_path / "method=adamw" / "seed-2", ADAM, [4.0, 3.0], seed=2)
    manifest = json.loads((tmp_path / "study.json").read_text())
    manifest["runs"] += [
        {"directory": f"method={method}/seed-2", "labels": {"method": method}, "seed": 2}
        for method in ("adamw", "soap")
    ]
    (tmp_path / "study.json").write_text(json.dumps(manifest))
    records = read_records(tmp_path)
    (panel,) = compare(records)  # 10, 20 and 15
    assert "soap reaches adamw's final value after at most 15 of 20 steps." in list(sentences(panel))
    text = " ".join(Page(Report(tmp_path).write().read_text(encoding="utf-8")).text.split())
    assert "In 6 of 6 complete runs there are fewer than 5 evaluations" in text and "set eval_every to" in text
    assert "\u2264 15" in text


def test_a_value_reached_at_second_0_is_no_bound(tmp_path):
    for name, values in {"adamw": [4.0, 3.0], "soap": [2.0, 1.0]}.items():
        with RunLog(tmp_path / name, "text", 2) as log:
            for second, value in enumerate(values):
                log.row(second + 1, value, val_loss=value, seconds=second)
    (panel,) = Report(tmp_path, baseline="adamw").panels
    soap = panel.rows[1]
    assert (soap.reached("steps"), soap.reached("seconds")) == ({0: 1}, {0: 0})
    assert (soap.at_first_evaluation("steps"), soap.at_first_evaluation("seconds")) == ({0}, set())


def test_a_metric_that_rose_again_is_named_with_its_best_evaluation(tmp_path, no_pictures):
    """The curve of adamw passes its final value in the first ten steps: other runs reach it there, and much later."""
    values = {"adamw": [3.0, 0.5, 1.75], "soap": [3.0, 0.75, 0.75]}
    write_study(tmp_path, [(m, seed, {"recipe": ADAM, "values": own}) for m, own in values.items() for seed in (0, 1)])
    (panel,) = compare(read_records(tmp_path))
    adamw, soap = panel.rows
    assert adamw.rises == dict.fromkeys((0, 1), (20, 0.5)) and panel.risen == [adamw]
    assert adamw.reached("steps") == soap.reached("steps") == soap.reached("seconds") == {}
    text = " ".join(Page(Report(tmp_path).write().read_text(encoding="utf-8")).text.split())
    assert "Lowest best evaluation: adamw, 0.500 ± 0.000 at step 20." in text
    assert "as in overfitting or an unstable run: adamw (2 of 2 runs)." in text
    assert "Steps to the final value of adamw are left out" in text
    assert "steps to adamw" not in text and "soap reaches" not in text
    assert "more than a tenth of its improvement" in text
    table = (tmp_path / "tables.md").read_text(encoding="utf-8")
    assert " | best evaluation | " in table and "0.500 ± 0.000 at step 20" in table
    other = tmp_path / "other"
    other.mkdir()
    write_study(
        other,
        [
            ("adamw", seed, {"recipe": ADAM, "values": own})
            for seed, own in enumerate(([3.0, 0.5, 1.0, 1.75], [3.0, 1.0, 0.5, 1.75]))
        ],
    )
    Report(other).write()
    assert "0.500 ± 0.000 at steps 20 to 30" in (other / "tables.md").read_text(encoding="utf-8")


def test_runs_with_five_evaluations_are_not_coarse(tmp_path):
    write_study(tmp_path, [("adamw", 0, {"recipe": ADAM, "values": [5.0, 4.0, 3.0, 2.0, 1.0]})])
    assert read_records(tmp_path).coarse == ""


def test_runs_that_diverged_are_not_coarse(tmp_path):
    """They have few evaluations because they ended early, and `eval_every` would not change that."""
    whole = ("adamw", 0, {"recipe": ADAM, "values": [5.0, 4.0, 3.0, 2.0, 1.0]})
    write_study(tmp_path, [whole, ("soap", 0, {"recipe": SOAP, "values": [5.0, None]})])
    assert read_records(tmp_path).coarse == ""
    write_run(tmp_path / "method=soap" / "seed-1", SOAP, [5.0, 4.0], seed=1)
    write_study(tmp_path, [("soap", 1, None), ("adamw", 0, None), ("soap", 0, None)])
    assert read_records(tmp_path).coarse.startswith("In 1 of 2 complete runs")


def test_page_is_self_contained_and_well_formed(study):
    text = Report(study).write().read_text(encoding="utf-8")
    page = Page(text)
    assert page.open == []
    assert "svg" in page.tags
    assert not page.tags & {"script", "link", "img", "iframe", "object", "image"}
    links = [value for name, value in page.attributes if name in ("src", "href", "xlink:href", "srcset", "action")]
    assert all(link.startswith("#") for link in links)
    assert "http" not in text and "@import" not in text
    assert set(re.findall(r"url\((.)", text)) <= {"#"}
    ids = [value for name, value in page.attributes if name == "id"]
    assert len(ids) == len(set(ids))
    assert {link[1:] for link in links} <= set(ids)


def write_diagnostics(run, values):
    """Values of measures at steps 10 and 20: {measure: (value at 10, value at 20)}, of two parameters."""
    lines = [
        {"step": step, "parameter": name, "stage": stage, "slot": "", "measure": measure, "value": value}
        for measure, both in values.items()
        for step, value in zip((10, 20), both, strict=True)
        for name in ("a", "b")
        for stage in ("update.rms", "update")
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (run / "diagnostics.jsonl").write_text(text + '{"step": 30, "par')


def test_differences_are_dots_with_intervals_the_best_uppermost(tmp_path):
    """Of three seeds t(0.975, 2) = 4.303; muon has one seed, and no interval."""
    ends = {"adamw": (2.0, 2.0, 2.0), "soap": (1.9, 1.8, 1.7), "lion": (2.1, 2.3, 2.2), "muon": (1.0,)}
    runs = [
        (method, seed, {"recipe": ADAM, "values": [3.0, value]})
        for method, values in ends.items()
        for seed, value in enumerate(values)
    ]
    write_study(tmp_path, runs)
    (panel,) = compare(read_records(tmp_path))
    (axes,) = difference_dots(panel).axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["lion", "soap"]
    dots = [container.lines[0].get_xydata()[0].tolist() for container in axes.containers]
    bars = [container.lines[2][0].get_segments()[0][:, 0].tolist() for container in axes.containers]
    half = 4.302653 * 0.1 / math.sqrt(3)
    for (x, y), bar, mean, place in zip(dots, bars, (0.2, -0.2), (0, 1), strict=True):
        assert (x, y) == (pytest.approx(mean), place)
        assert bar == pytest.approx([mean - half, mean + half], rel=1e-6)
    assert "Differences from the baseline over paired seeds" in Report(tmp_path).write().read_text(encoding="utf-8")
    assert tmp_path / "figures" / "trial-differences.png" in Report(tmp_path).save_figures(tmp_path / "figures")


def test_steps_to_a_target_of_the_study_are_compared(tmp_path):
    """With sigma 0.1 sqrt(3) and z = 1 a mean of three seeds must be at most 1.9; a run of muon has not begun."""
    values = {"adamw": [2.5, 2.1, 1.95, 1.9], "soap": [2.0, 1.85, 1.8, 1.7], "muon": [1.9, 1.8, 1.7, 1.6]}
    runs = [
        (method, seed, {"recipe": ADAM, "values": own, "ended": (method, seed) != ("muon", 2)})
        for method, own in values.items()
        for seed in range(3)
    ]
    runs[-1][2]["values"] = []
    target = {"value": 2.0, "sigma": 0.1 * math.sqrt(3), "z": 1 - 1e-9}
    write_study(tmp_path, runs, target=target)
    begun = tmp_path / "method=muon" / "seed-2" / "config.json"
    begun.write_text(begun.read_text().replace('"steps": 0', '"steps": 40'))
    records = read_records(tmp_path)
    (panel,) = compare(records)
    assert {row.label: row.first(records.target) for row in panel.rows} == {"adamw": 40, "soap": 20, "muon": None}
    text = Page(Report(tmp_path).write().read_text(encoding="utf-8")).text
    assert "steps to validation loss 2" in text and "0.50\u00d7" in text and "acceptance test of track 3" in text
    lines = (tmp_path / "tables.md").read_text(encoding="utf-8").splitlines()
    assert [line.split(" | ")[-4] for line in lines[2:] if "|" in line] == [
        "steps to validation loss 2",
        "---",
        "40",
        "20",
        "never",
    ]


def test_parquet_has_every_number_of_every_run(study):
    parquet = pytest.importorskip("pyarrow.parquet", reason="the extra `parquet` is not installed")
    records = read_records(study)
    runs, metrics = (parquet.read_table(path).to_pylist() for path in write_parquet(records, study))
    assert [(row["axis.method"], row["seed"]) for row in runs] == [
        (run.labels["method"], run.seed) for run in records.runs
    ]
    assert [row["val_loss"] for row in runs] == [run.result.get("val_loss") for run in records.runs]
    assert [row["val_loss"] for row in metrics] == [row["val_loss"] for run in records.runs for row in run.rows]
    assert {row["status"] for row in runs} == {run.status(records.metric) for run in records.runs}


def test_labels_and_tuned_values_never_replace_measured_numbers(tmp_path):
    """An axis has the name of each column of metrics.jsonl and result.json; the rate was tuned."""
    parquet = pytest.importorskip("pyarrow.parquet", reason="the extra `parquet` is not installed")
    write_run(tmp_path / "run", ADAM, [3.0, 2.0], seed=4)
    names = ["lr", "steps", "val_loss", "seed", "status", "step", "peak_lr", "variant"]
    labels = {name: f"label of {name}" for name in names}
    cell = ",".join(f"{axis}={label}" for axis, label in labels.items())
    best = {"values": {"lr": 0.25}, "mean": 2.0, "stopped": None}
    manifest = {"study": DECLARED, "compare": "lr", "baseline": "label of lr"}
    manifest["tuned"] = {cell: {"values": {"lr": 0.25}, "edges": {}, "tried": [best], "rule": ""}}
    manifest["runs"] = [{"directory": "run", "labels": labels, "seed": 4}]
    (tmp_path / "study.json").write_text(json.dumps(manifest))
    Report(tmp_path).write()
    (runs,), metrics = (
        parquet.read_table(path).to_pylist() for path in write_parquet(read_records(tmp_path), tmp_path)
    )
    for row in (runs, *metrics):
        assert {axis: row[f"axis.{axis}"] for axis in labels} == labels
        assert (row["seed"], row["status"]) == (4, "complete")
    assert (runs["peak_lr"], runs["tuned.lr"], runs["steps"], runs["val_loss"]) == (0.01, 0.25, 20, 2.0)
    assert [(row["lr"], row["step"], row["val_loss"]) for row in metrics] == [(0.01, 10, 3.0), (0.01, 20, 2.0)]
    with (tmp_path / "runs.csv").open(encoding="utf-8", newline="") as stream:
        (printed,) = csv.DictReader(stream)
    assert {name: printed[name] for name in ("axis.lr", "peak_lr", "tuned.lr", "steps")} == {
        "axis.lr": "label of lr",
        "peak_lr": "0.01",
        "tuned.lr": "0.25",
        "steps": "20",
    }


def test_data_frames_have_every_number_of_every_run(study):
    records = read_records(study)
    runs, metrics = load_runs(study), load_metrics(str(study))
    assert runs["axis.method"].tolist() == [run.labels["method"] for run in records.runs]
    expected = [math.nan if (loss := run.result.get("val_loss")) is None else loss for run in records.runs]
    assert runs["directory"].tolist() == [str(run.directory) for run in records.runs]
    assert runs["val_loss"].tolist() == pytest.approx(expected, nan_ok=True)
    assert len(metrics) == sum(len(run.rows) for run in records.runs)
    assert set(zip(metrics["axis.method"], metrics["seed"], strict=True)) == {
        (run.labels["method"], run.seed) for run in records.runs if run.rows
    }


def test_parquet_names_what_is_missing(study, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with refused(RecipeError, "--parquet", "pip install pyarrow"):
        write_parquet(read_records(study), study)


def test_one_difference_is_no_figure(study):
    (panel,) = compare(read_records(study))
    assert difference_dots(panel) is None and "Differences from" not in Report(study).write().read_text(
        encoding="utf-8"
    )


def test_internals_are_drawn_where_runs_have_diagnostics(study):
    (panel,) = compare(read_records(study))
    assert internals(panel) is None and "Inside the optimizer" not in Report(study).write().read_text(encoding="utf-8")
    write_diagnostics(study / "method=adamw" / "seed-0", {"update_rms": (1.0, 0.5), "cosine": (0.5, -0.25)})
    write_diagnostics(study / "method=soap" / "seed-1", {"cosine": (0.75, 0.25), "condition": (10.0, None)})
    (panel,) = compare(read_records(study))
    figure = internals(panel)
    drawn = {axes.get_title(loc="left"): axes for axes in figure.axes}
    assert list(drawn) == ["update, root mean square", "cosine with the gradient", "condition number of statistics"]
    cosine = {line.get_label(): line.get_xydata().tolist() for line in drawn["cosine with the gradient"].get_lines()}
    assert cosine == {"adamw": [[10, 0.5], [20, -0.25]], "soap": [[10, 0.75], [20, 0.25]]}
    (condition,) = drawn["condition number of statistics"].get_lines()
    assert condition.get_xydata().tolist() == [[10, 10.0]]  # at step 20 nobody knew
    assert "Inside the optimizer: medians over parameters" in Report(study).write().read_text(encoding="utf-8")
    assert Page((study / "report.html").read_text(encoding="utf-8")).open == []
    assert {path.name for path in Report(study).save_figures(study / "figures")} >= {
        "trial-internals.svg",
        "trial-internals.png",
    }


def test_the_worst_layer_of_each_measure_is_listed_over_all_seeds(study, no_pictures):
    assert "Worst layers" not in Report(study).write().read_text(encoding="utf-8")
    values = {
        ("soap", 0): {"update_ratio_peak": (0.1, 0.5), "zero_gradients": (0.0, 1.0)},
        ("soap", 1): {"update_ratio_peak": (0.9, 0.2), "weight_growth": (3.0, None)},
    }
    for (method, seed), measures in values.items():
        lines = [
            {"step": 30, "parameter": layer, "stage": "", "slot": "", "measure": measure, "value": value}
            for measure, pair in measures.items()
            for layer, value in zip(("first", "head"), pair, strict=True)
        ]
        old = {**lines[0], "step": 10, "value": 99.0}
        file = study / f"method={method}" / f"seed-{seed}" / "diagnostics.jsonl"
        file.write_text("".join(json.dumps(line) + "\n" for line in [old, *lines]))
    (panel,) = compare(read_records(study))
    (soap,) = worst_layers(panel).rows
    assert [(text, more) for text, more, _ in soap[1:]] == [
        ("0.9", "first"),
        ("not finite", "head"),
        ("\u2013", ""),
        ("100 %", "head"),
    ]
    assert "Worst layers" in Report(study).write().read_text(encoding="utf-8")


def test_a_band_goes_from_quartile_to_quartile(study):
    run = study / "method=soap" / "seed-0"
    lines = [
        {"step": 5, "parameter": f"p{i}", "stage": "update.x", "slot": "s", "measure": "angle", "value": float(i)}
        for i in range(5)
    ]
    (run / "diagnostics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (panel,) = compare(read_records(study))
    (axes,) = internals(panel).axes
    (band,) = axes.collections
    assert axes.get_lines()[0].get_ydata().tolist() == [2.0]
    assert (band.get_datalim(axes.transData).y0, band.get_datalim(axes.transData).y1) == (1.0, 3.0)


def test_everything_foreign_is_escaped(tmp_path):
    evil = "<script>alert('&')</script>"
    recipe = {**ADAM, "name": evil}
    write_study(tmp_path, [(evil, 0, {"recipe": recipe, "values": [2.0]})], name=evil, description=evil, baseline=evil)
    run = next(tmp_path.glob("method=*/seed-0"))
    (run / "result.json").unlink()
    run.with_name("seed-0.error.txt").write_text(f"Traceback\nValueError: {evil}")
    (run / "env.json").write_text(json.dumps({evil: evil}))
    text = Report(tmp_path).write().read_text(encoding="utf-8")
    assert "script" not in Page(text).tags
    assert Page(text).text.count(evil) >= 7


def test_partial_study(study):
    write_study(study / "more", [("soap", 0, None)])
    unfinished = study / "method=soap" / "seed-1"
    (unfinished / "result.json").unlink()
    with (unfinished / "metrics.jsonl").open("a") as stream:
        stream.write('{"step": 40, "val_l')
    (panel,) = compare(read_records(study))
    adamw, soap = panel.rows
    assert (len(soap.finals), len(soap.runs), soap.difference.n) == (1, 2, 1)
    assert panel.best is adamw
    assert (adamw.curve().label, soap.curve().label) == ("adamw", "soap: 1 of 2 unfinished")
    text = Page(Report(study).write().read_text(encoding="utf-8")).text
    assert "This study is not complete" in text
    assert "method=soap/seed-1: unfinished, last at step 30" in text
    with refused(ValueError, "none", 1):
        Report(study / "more").write()


def test_diverged_runs_are_shown_as_such(tmp_path):
    write_study(
        tmp_path,
        [
            ("adamw", 0, {"recipe": ADAM, "values": [4.0, 3.0]}),
            ("soap", 0, {"recipe": SOAP, "values": [5.0, None]}),
        ],
    )
    (panel,) = compare(read_records(tmp_path))
    soap = panel.rows[1]
    assert (soap.diverged, soap.difference, panel.best.label) == (1, None, "adamw")
    assert soap.reached("steps") == {0: None}
    text = " ".join(Page(Report(tmp_path).write().read_text(encoding="utf-8")).text.split())
    assert "1 of 1 diverged" in text and "never" in text


def test_a_larger_accuracy_is_better(tmp_path):
    write_study(
        tmp_path,
        [("adamw", 0, {"recipe": ADAM, "values": [2.0]}), ("soap", 0, {"recipe": SOAP, "values": [2.0]})],
        metric="val_accuracy",
    )
    for method, values in (("adamw", (0.4, 0.6)), ("soap", (0.5, 0.9))):
        run = tmp_path / f"method={method}" / "seed-0"
        rows = [{"step": 10 * i, "seconds": i, "val_accuracy": v} for i, v in enumerate(values)]
        (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (run / "result.json").write_text(json.dumps({"val_accuracy": values[-1]}))
    (panel,) = compare(read_records(tmp_path))
    assert panel.best.label == "soap"
    assert panel.rows[1].reached("steps") == {0: pytest.approx(2.5)}  # 0.5 to 0.9 passes 0.6 after a quarter
    assert "Highest final validation accuracy: soap, 0.900." in Report(tmp_path).write().read_text(encoding="utf-8")
    (axes,) = Report(tmp_path).figures()["trial validation accuracy against steps"].axes
    assert axes.get_yscale() == "linear"  # also if values span a wide range


def test_runs_without_a_study(tmp_path):
    write_run(tmp_path / "a" / "seed-0", ADAM, [3.0, 2.0])
    write_run(tmp_path / "a" / "seed-1", ADAM, [3.0, 2.2], seed=1)
    write_run(tmp_path / "b", SOAP, [3.0, 1.0])
    (panel,) = compare(read_records(tmp_path))
    assert [(row.label, row.final.n, row.final.mean) for row in panel.rows] == [("a", 2, 2.1), ("b", 1, 1.0)]
    assert Report(tmp_path).write().exists()
    assert [row.label for row in compare(read_records(tmp_path / "b"))[0].rows] == ["b"]


def test_two_directories_compare_what_can_be_compared(tmp_path, no_pictures):
    """Cells of studies and no trials of searches; no baseline but a named one; nothing of another length or width."""
    for name, losses in (("a", (2.0, 1.0)), ("b", (3.0, 4.0))):
        runs = [
            (method, seed, {"recipe": ADAM, "values": [5.0, loss + seed]})
            for method, loss in zip(("adamw", "soap"), losses, strict=True)
            for seed in (0, 1)
        ]
        write_study(tmp_path / name, runs)
        for place in ("tuning/method=adamw/lr=1", "timing/method=adamw"):
            write_run(tmp_path / name / place / "seed-7", ADAM, [9.0, 9.0])
    write_run(tmp_path / "longer" / "seed-0", ADAM, [5.0, 1.0, 0.5])
    write_run(tmp_path / "wide" / "seed-0", ADAM, [5.0, 0.1])
    config = tmp_path / "wide" / "seed-0" / "config.json"
    config.write_text(config.read_text().replace('"kind": "bytes"', '"kind": "bytes", "width": 64'))
    panels = compare(read_records(tmp_path))
    assert [(panel.title, [row.label for row in panel.rows]) for panel in panels] == [
        (
            "task = bytes, steps 20, task.width absent",
            ["a/method=adamw", "a/method=soap", "b/method=adamw", "b/method=soap"],
        ),
        ("task = bytes, steps 30, task.width absent", ["longer"]),
        ("task = bytes, steps 20, task.width 64", ["wide"]),
    ]
    assert [(panel.baseline, [row.difference for row in panel.rows]) for panel in panels] == [
        (None, [None] * len(panel.rows)) for panel in panels
    ]
    assert "--baseline LABEL" in Report(tmp_path).write().read_text(encoding="utf-8")
    first, *others = compare(read_records(tmp_path, "a/method=soap"))
    assert {row.label: row.difference and row.difference.mean for row in first.rows} == {
        "a/method=adamw": 1.0,
        "a/method=soap": None,
        "b/method=adamw": 2.0,
        "b/method=soap": 3.0,
    }
    assert all(row.difference is None for panel in others for row in panel.rows)
    with refused(ValueError, "`baseline=`", "soap"):
        read_records(tmp_path, "soap")


def test_searches_and_the_target_of_studies_are_in_the_report_of_several(tmp_path, no_pictures):
    """Study a searched its rates, b says where they were tuned, and c has one untuned rate for each method."""
    best = {"values": {"lr": 0.01}, "mean": 1.0, "stopped": None}
    searched = {"values": {"lr": 0.01}, "edges": {"lr": "largest"}, "tried": [best], "rule": "Descent."}
    target = {"value": 1.5, "sigma": 0.1}
    tuned = {"a": {"tuned": {"method=adamw": searched, "method=soap": searched}}, "b": {"tuned_in": "grid.yaml"}}
    for name in ("a", "b", "c"):
        runs = [
            (name, 0, {"recipe": recipe, "values": [2.0, 1.0]}) for name, recipe in (("adamw", ADAM), ("soap", SOAP))
        ]
        write_study(tmp_path / name, runs, target=target, **tuned.get(name, {}))
    records = read_records(tmp_path)
    assert lacking(records.untuned, "c/method=adamw", "c/method=soap") == []
    assert not re.search(r"\b[ab]/method", records.untuned)
    assert {one.cell for one in records.tuned} == {"run=a/method=adamw", "run=a/method=soap"}
    assert [records.rate_edge({"run": f"{name}/method=soap"}) for name in "abc"] == ["largest", "", ""]
    assert records.target is not None and records.target.value == 1.5
    assert "grid.yaml" in Report(tmp_path).write().read_text(encoding="utf-8")
    with (tmp_path / "runs.csv").open(encoding="utf-8", newline="") as stream:
        rates = {row["axis.run"]: row["tuned.lr"] for row in csv.DictReader(stream)}
    assert [rates[f"{name}/method=adamw"] for name in "abc"] == ["0.01", "", ""]


def record(run, **entries):
    """Change entries of what a run says of its environment."""
    path = run / "env.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **entries}))


@pytest.mark.parametrize(
    ("entries", "names"),
    [
        ({"torch": "2.9.1"}, ["soap [torch absent]", "soap [torch 2.9.1]"]),
        ({"sources": "5f" * 32}, ["soap [sources absent]", "soap [sources 5f5f5f5f5f5f]"]),
        ({"imports": {"net.py": "ab"}}, ["soap [imports net.py absent]", "soap [imports net.py ab]"]),
        ({"data": {"sha256": "cd"}}, ["soap [data abc]", "soap [data cd]"]),
    ],
)
def test_runs_of_other_code_or_data_are_kept_apart_by_name(study, entries, names, no_pictures):
    record(study / "method=soap" / "seed-1", **entries)
    records = read_records(study)
    (panel,) = compare(records)
    assert [row.label for row in panel.rows] == ["adamw", *names]
    assert [row.final.mean for row in panel.rows[1:]] == [0.8, 1.0]
    assert panel.rows[0].difference is None and panel.rows[1].difference.n == 1
    assert (panel.rows[2].difference is None) == ("data" in entries)  # the others say nothing of adamw's runs
    (notice,) = records.apart
    assert records.notices[0] == notice
    assert "The runs of soap were made differently" in notice
    assert notice in Page(Report(study).write().read_text(encoding="utf-8")).text
    assert (study / "runs.csv").read_text(encoding="utf-8").startswith("axis.method,seed,variant,status,")


def test_a_baseline_of_two_kinds_is_one_of_them_and_no_version_is_subtracted_from_another(study):
    for method in ("adamw", "soap"):
        for seed in (0, 1):
            record(study / f"method={method}" / f"seed-{seed}", torch=f"2.{seed}")
    (panel,) = compare(read_records(study))
    assert panel.baseline.label == "adamw [torch 2.0]"
    assert {row.label: row.difference is None for row in panel.rows} == {
        "adamw [torch 2.0]": True,
        "adamw [torch 2.1]": True,
        "soap [torch 2.0]": False,
        "soap [torch 2.1]": True,
    }


def test_seeds_of_an_edited_recipe_file_are_kept_apart(tmp_path):
    for seed, eps in ((0, 1e-8), (1, 1e-8), (2, 1e-3)):
        recipe = {**ADAM, "update": [ADAM["update"][0], {"kind": "rms", "eps": eps}]}
        write_run(tmp_path / "mine" / f"seed-{seed}", recipe, [2.0], seed=seed)
    (panel,) = compare(read_records(tmp_path))
    assert [(row.label, len(row.runs)) for row in panel.rows] == [
        ("mine [rms.eps 1e-08]", 2),
        ("mine [rms.eps 0.001]", 1),
    ]


def test_nothing_to_report(tmp_path):
    with refused(ValueError, "study", "runs"):
        Report(tmp_path / "nothing")


def test_numbers_compared_become_curves(tmp_path, no_pictures):
    listed = []
    for lr, finals in (("0.01", (2.0, 3.0)), ("0.1", (1.0, None)), ("0.001", (4.0, 6.0))):
        for seed, final in enumerate(finals):
            write_run(tmp_path / f"{lr}-{seed}", ADAM, [final], seed=seed)
            labels = {"task": "t", "method": "adam", "lr": lr}
            listed.append({"directory": f"{lr}-{seed}", "labels": labels, "seed": seed})
    manifest = {"study": DECLARED, "compare": "lr", "baseline": "0.01"}
    (tmp_path / "study.json").write_text(json.dumps({**manifest, "runs": listed}))
    records = read_records(tmp_path)
    (title, (curve,)) = next(iter(sweeps(records).items()))
    assert (title, curve.label, curve.x) == ("task = t", "adam", [0.001, 0.01, 0.1])
    assert curve.mean[:2] == [5.0, 2.5] and math.isnan(curve.mean[2])
    assert (curve.low[0], curve.high[0]) == (4.0, 6.0)
    assert "Final validation loss against learning rate: task = t." in Report(tmp_path).write().read_text(
        encoding="utf-8"
    )


def test_names_compared_have_no_curve_over_them(study):
    records = read_records(study)
    assert sweeps(records) == {}


def differences(configs):
    """The rows of the table of differences as texts."""
    return [tuple(cell.text for cell in row) for row in diff_recipes(configs).rows]


def test_only_fields_that_distinguish_are_told():
    def config(recipe, lr, task="a"):
        return {"name": "n", "seed": 3, "lr": lr, "task": {"kind": task}, "recipe": recipe}

    again = {**SOAP, "update": [{**SOAP["update"][0], "refresh": {"steps": 1}}]}
    rows = differences({"a": {"x": config(SOAP, 0.1), "y": config(again, 0.1)}})
    assert rows == [("recipe.update.eigenbasis.refresh.steps", "10", "1")]
    rows = differences(
        {
            "a": {"x": config(SOAP, 0.1), "y": config(SOAP, 0.2)},
            "b": {"x": config(SOAP, 0.1, "b"), "y": config(SOAP, 0.4, "b")},
        }
    )
    assert rows == [("lr", "0.1", "0.2 (a), 0.4 (b)")]
    assert differences({"a": {"x": config(ADAM, 0.1), "y": config(ADAM, 0.1)}}) == []


def test_a_stage_without_fields_is_named_by_its_chain_alone():
    more = {**ADAM, "update": [*ADAM["update"], {"kind": "sign", "damped": False}]}
    (row,) = differences({"a": {"x": {"recipe": ADAM}, "y": {"recipe": more}}})
    assert row[0] == "recipe.update"


def test_a_part_that_not_all_have_is_one_row():
    rows = differences(
        {"a": {"x": {"recipe": ADAM}, "y": {"recipe": SOAP}, "z": {"recipe": {**SOAP, "blocking": None}}}}
    )
    assert {path: tuple(values) for path, *values in rows} == {
        "recipe.update": ("momentum \u2192 rms", "eigenbasis", "eigenbasis"),
        "recipe.update.momentum": ("beta 0.9", "", ""),
        "recipe.update.rms": ("eps 1e-08", "", ""),
        "recipe.update.eigenbasis.inner": ("", "momentum", "momentum"),
        "recipe.update.eigenbasis.inner.momentum": ("", "beta 0.95", "beta 0.95"),
        "recipe.update.eigenbasis.refresh": ("", "steps 10", "steps 10"),
    }


def test_the_learning_rate_is_the_one_in_force():
    rows = differences({"a": {"x": {"lr": None, "recipe": {"lr": 0.3}}, "y": {"lr": 0.1, "recipe": {"lr": 0.3}}}})
    assert rows == [("lr", "0.3", "0.1")]


def test_runs_as_a_table(study, no_pictures):
    Report(study).write()
    lines = (study / "runs.csv").read_text(encoding="utf-8").splitlines()
    assert lines[0].startswith("axis.method,seed,status,peak_lr,val_loss,val_accuracy,train_loss,steps,seconds,")
    assert lines[1:] == [
        "adamw,0,complete,0.01,2,,,30,0.3,10,2,8",
        "adamw,1,complete,0.01,2.5,,,30,0.3,10,2,8",
        "soap,0,complete,0.01,0.8,,,30,0.3,10,2,8",
        "soap,1,complete,0.01,1,,,30,0.3,10,2,8",
    ]


def test_figures_as_files(study, tmp_path):
    paths = Report(study).save_figures(tmp_path / "figures")
    drawn = ("trial-training-loss-against-steps", *(f"trial-validation-loss-against-{x}" for x in ("seconds", "steps")))
    assert sorted(path.name for path in paths) == [f"{name}.{suffix}" for name in drawn for suffix in ("png", "svg")]
    svg = (tmp_path / "figures" / "trial-validation-loss-against-steps.svg").read_text(encoding="utf-8")
    assert "var(--" not in svg and "soap" in svg


@pytest.mark.parametrize(("formats", "data"), [("pdf", ("pdf", "['svg', 'pdf']")), (["pdf", "pfd"], ("pfd", "svg"))])
def test_formats_that_are_no_list_or_unknown_are_refused(study, formats, data):
    with refused(ValueError, "`formats=`", *data):
        Report(study).save_figures(study / "figures", formats=formats)
    assert not (study / "figures").exists()


class TestOptions:
    """What a report shows, and how its figures are drawn."""

    def test_only_some_labels_are_compared_under_other_texts(self, study, no_pictures):
        report = Report(study, only=["so*"], labels={"soap": "SOAP, ours"})
        (panel,) = report.panels
        assert [row.label for row in panel.rows] == ["SOAP, ours"] and panel.baseline is None
        assert "SOAP, ours" in Page(report.write().read_text(encoding="utf-8")).text
        renamed = Report(study, labels={"adamw": "AdamW"})
        assert renamed.panels[0].baseline.label == "AdamW" and len(renamed.panels[0].rows) == 2
        assert [row.label for row in Report(study, only=["method=adamw"]).panels[0].rows] == ["adamw"]

    def test_a_report_of_some_runs_leaves_that_of_all_runs_as_it_is_and_says_that_the_baseline_is_missing(
        self, study, no_pictures
    ):
        assert Report(study).write() == study / "report.html"
        before = {path: path.read_bytes() for path in study.iterdir() if path.is_file()}
        said = invoke(["report", str(study), "--only", "so*"])
        assert said.exit_code == 0 and said.stdout.split() == [str(study / "only-soap" / "report.html")]
        assert {path: path.read_bytes() for path in study.iterdir() if path.is_file()} == before
        names = {"report.html", "runs.csv", "tables.md", "tables.tex"}
        assert {path.name for path in (study / "only-soap").iterdir()} == names
        notice = Report(study, only=["so*"]).records.without_baseline
        assert lacking(notice, "baseline", "adamw", "--only") == [] and notice in said.stderr
        for only in (["adamw"], ["*"], ["soap", "adamw"]):
            assert Report(study, only=only).records.without_baseline == ""
        assert Report(study, only=["soap", "adamw"]).folder == study
        assert Report(study, "soap", only=["method=adamw"]).folder == study / "only-adamw"

    @pytest.mark.parametrize(
        ("options", "data"),
        [
            ({"only": ["lion"]}, ("lion", "method", "adamw")),
            ({"labels": {"lion": "x"}}, ("lion", "soap")),
            ({"labels": {"adamw": "soap"}}, ("method", "soap")),
            ({"baseline": "lion"}, ("lion",)),
            ({"x": ["tokens"]}, ("tokens",)),
        ],
    )
    def test_what_does_not_exist_is_refused_by_the_name_of_the_argument_or_the_option(
        self, study, options, data, monkeypatch
    ):
        monkeypatch.setenv("COLUMNS", "1000")  # so that no message is broken into lines
        ((name, value),) = options.items()
        with refused(ValueError, f"`{name}=`", *data):
            Report(study, **options)
        text = "=".join(next(iter(value.items()))) if name == "labels" else value if name == "baseline" else value[0]
        said = invoke(["report", str(study), f"--{name}", text])
        assert said.exit_code == 2
        check_said(" ".join(said.output.split()), f"--{name}: ", *data)
        assert f"{name}=`" not in said.output

    @pytest.mark.parametrize(
        ("options", "data"),
        [
            ({"log": "q"}, ("auto", "xy", "q")),
            ({"log": True}, ("auto", True)),
            ({"width": "3in"}, (1, 20, "3in")),
            ({"width": 0}, (1, 20, 0)),
            ({"width": True}, (1, 20, True)),
            ({"x": "tokens"}, ("['tokens']", "flops")),
            ({"x": ["hours"]}, ("hours", "flops")),
            ({"x": []}, ("tokens", "[]")),
            ({"only": "soap"}, ("list", "soap")),
            ({"labels": ["soap"]}, ("dictionary", "soap")),
            ({"labels": {"soap": 3}}, ("dictionary", 3)),
            ({"baseline": 3}, ("AXIS=LABEL", 3)),
            ({"directory": 3}, ("path", 3)),
        ],
    )
    def test_a_wrong_argument_is_refused_when_a_report_is_made(self, options, data):
        with refused(ValueError, f"`{next(iter(options))}=`", *data):
            Report(**{"directory": "nothing", **options})

    def test_figures_have_the_width_the_axes_and_the_quantity_that_are_asked_for(self, study):
        for path in study.glob("*/*/metrics.jsonl"):
            rows = [json.loads(line) for line in path.read_text().splitlines()]
            path.write_text(
                "".join(json.dumps(row | {"tokens": 8 * row["step"], "flops": row["step"]}) + "\n" for row in rows)
            )
        found = Report(study, x=["tokens", "flops"], width=3.25, log="xy").figures()
        assert sorted(found) == [
            "trial training loss against tokens",
            "trial validation loss against flops",
            "trial validation loss against tokens",
        ]
        (axes,) = found["trial validation loss against tokens"].axes
        assert (axes.get_xscale(), axes.get_yscale(), axes.get_xlabel()) == ("log", "log", "training tokens")
        assert list(axes.get_lines()[0].get_xdata()) == [80.0, 160.0, 240.0] and axes.figure.get_figwidth() == 3.25
        (axes,) = Report(study, log="none").figures()["trial validation loss against steps"].axes
        assert (axes.get_xscale(), axes.get_yscale()) == ("linear", "linear")

    def test_the_training_loss_is_drawn_for_the_runs_that_did_not_diverge(self, study):
        (axes,) = Report(study).figures()["trial training loss against steps"].axes
        assert [line.get_label() for line in axes.get_lines()] == ["adamw", "soap"]
        assert all(list(line.get_ydata()) == [1.0, 1.0, 1.0] for line in axes.get_lines())

    def test_the_command_has_all_of_it(self, study, tmp_path):
        options = ["--only", "soap", "--only", "adamw", "--labels", "soap=SOAP", "--width", "3.4", "--log", "none"]
        out = tmp_path / "figures"
        done = invoke(["report", str(study), *options, "--x", "seconds", "--figures", str(out), "--pdf"])
        assert done.exit_code == 0, done.output
        assert {path.suffix for path in out.iterdir()} == {".svg", ".png", ".pdf"}
        fonts = [path.read_bytes() for path in out.glob("*.pdf")]
        assert all(b"/FontFile2" in one and b"/Type3" not in one for one in fonts)
        assert "SOAP" in (study / "runs.csv").read_text()
        refused_call = invoke(["report", str(study), "--pdf"])
        assert refused_call.exit_code == 2 and "--figures" in refused_call.stderr

    def test_runs_of_a_report_are_a_data_frame(self, study):
        pytest.importorskip("pandas")
        frame = Report(study, only=["soap"]).runs()
        assert list(frame["axis.method"]) == ["soap", "soap"] and list(frame["val_loss"]) == [0.8, 1.0]


def test_the_curve_of_a_search_is_drawn_and_its_means_are_not_rounded_to_a_decimal(tmp_path):
    """Two methods on two tasks; one value diverged, one was stopped early."""
    tuned, listed = {}, []
    for task in ("digits", "bytes"):
        for method, best in (("adamw", 0.01), ("soap", 0.02)):
            labels = {"task": task, "method": method}
            tried = [
                {"values": {"lr": best * 2**k}, "mean": None if k == 2 else 1.2341 + 0.0123 * k * k, "stopped": None}
                for k in range(-2, 3)
            ]
            tried.append({"values": {"lr": best * 8}, "mean": 0.5, "stopped": 10})
            found = {"values": {"lr": best}, "edges": {}, "tried": tried, "rule": "Descent."}
            tuned[f"task={task},method={method}"] = found
            listed.append({"directory": f"{task}-{method}", "labels": labels, "seed": 0})
            write_run(tmp_path / f"{task}-{method}", ADAM, [2.0, 1.0])
    manifest = {"study": DECLARED, "compare": "method", "baseline": "adamw"}
    (tmp_path / "study.json").write_text(json.dumps({**manifest, "tuned": tuned, "runs": listed}))
    curves = tuning_curves(read_records(tmp_path))
    assert list(curves) == [("lr", "task = digits"), ("lr", "task = bytes")]
    adamw, soap = curves["lr", "task = digits"]
    assert (adamw.label, soap.label) == ("adamw", "soap") and adamw.style == 0 != soap.style
    assert adamw.x == [0.0025, 0.005, 0.01, 0.02]
    assert adamw.mean == pytest.approx([1.2833, 1.2464, 1.2341, 1.2464])
    assert [one.end for one in adamw.lost] == [0.04]
    text = Report(tmp_path).write().read_text(encoding="utf-8")
    assert "0.0025: 1.2833; 0.005: 1.2464; " in text and "0.04: diverged" in text
    assert "Tuning, mean validation loss against learning rate: task = digits." in text
    names = {path.name for path in Report(tmp_path).save_figures(tmp_path / "figures")}
    assert "trial-task-digits-tuning-mean-validation-loss-against-learning-rate.svg" in names


def test_a_search_of_names_has_no_curve(tmp_path):
    write_run(tmp_path / "run", ADAM, [2.0])
    tried = [{"values": {"kind": kind}, "mean": 1.0, "stopped": None} for kind in "abc"]
    manifest = {"study": DECLARED, "compare": "m", "baseline": "x"}
    manifest["tuned"] = {"m=x": {"values": {"kind": "a"}, "edges": {}, "tried": tried, "rule": ""}}
    manifest["runs"] = [{"directory": "run", "labels": {"m": "x"}, "seed": 0}]
    (tmp_path / "study.json").write_text(json.dumps(manifest))
    assert tuning_curves(read_records(tmp_path)) == {}
    assert Report(tmp_path).write().exists()
