"""What makes a report fit to print: fair comparisons, named axes and runs, honest seconds, tables."""

import json
import math
import re
import shutil
from dataclasses import replace
from itertools import combinations, pairwise
from pathlib import Path

import matplotlib
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.font_manager import FontProperties
from matplotlib.textpath import TextPath

from eigengraft.experiments.reports import figures
from eigengraft.experiments.reports.comparison import (
    at_their_best,
    compare,
    describe_comparisons,
    method_axis,
    named,
    swept,
)
from eigengraft.experiments.reports.figures import Curve, Level, LostRun, draw_curves, stroke, styles_of
from eigengraft.experiments.reports.records import METRICS, Records, Run, read_records
from eigengraft.experiments.reports.report import MEASURES, Report, axis_name, difference_dots, internals
from eigengraft.experiments.reports.tables import (
    TableCell,
    TextTable,
    format_difference,
    grid_of,
    latex,
    markdown,
    panel_format,
    panel_table,
    sentences,
    write_tables,
)

from ...cli import invoke
from ...refusals import refused
from .test_report import ADAM, DECLARED, SOAP, Page, write_run, write_study

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _no_pictures(monkeypatch):
    """Figures are made, and no pictures of them: here numbers and sentences are read, and `test_report.py` has the
    pictures."""
    monkeypatch.setattr(figures, "inline_svg", lambda figure, name: "<svg></svg>")


FINALS = {
    "adam": {"0.01": (3.0, 3.2, 3.1), "0.1": (2.0, 2.2, 2.1), "1": (None, 9.0, 9.0)},
    "soap": {"0.01": (1.5, 1.6, 1.8), "0.1": (2.5, 2.5, 2.6), "1": (4.0, 4.0, 4.0)},
}


@pytest.fixture
def grid(tmp_path):
    """Two methods at three learning rates, three seeds."""
    listed = []
    for method, rates in FINALS.items():
        for lr, finals in rates.items():
            for seed, final in enumerate(finals):
                place = f"{method}-{lr}-{seed}"
                write_run(tmp_path / place, ADAM if method == "adam" else SOAP, [4.0, final], seed=seed, lr=float(lr))
                listed.append({"directory": place, "labels": {"method": method, "lr": lr}, "seed": seed})
    manifest = {"study": {**DECLARED, "name": "grid"}, "compare": "lr", "baseline": "0.01"}
    (tmp_path / "study.json").write_text(json.dumps({**manifest, "runs": listed}))
    return tmp_path


def test_each_method_is_compared_at_its_own_best_learning_rate(grid):
    records = read_records(grid)
    (panel,) = at_their_best(records)
    assert [row.label for row in panel.rows] == ["adam, lr 0.1", "soap, lr 0.01"]
    # 1.5 - 2.0, 1.6 - 2.2, 1.8 - 2.1: mean -0.4667
    assert panel.rows[1].difference.mean == pytest.approx(-1.4 / 3)
    text = " ".join(Page(Report(grid).write().read_text(encoding="utf-8")).text.split())
    assert "each at its own best lr" in text and "favors methods" in text
    assert "Lowest final validation loss: soap, lr 0.01, 1.633" in text


def test_methods_that_are_compared_beside_learning_rates_have_each_its_best(grid):
    """The baseline comes first, wherever it stands, and the sections for each rate stay."""
    manifest = json.loads((grid / "study.json").read_text())
    (grid / "study.json").write_text(json.dumps({**manifest, "compare": "method", "baseline": "soap"}))
    (panel,) = at_their_best(swept(read_records(grid)))
    assert [row.label for row in panel.rows] == ["soap, lr 0.01", "adam, lr 0.1"]
    assert panel.rows[1].difference.mean == pytest.approx(1.4 / 3)  # as above
    text = " ".join(Page(Report(grid).write().read_text(encoding="utf-8")).text.split())
    heads = ["Validation loss against lr", "each at its own best lr", "lr = 0.01 Lowest", "lr = 0.1 Lowest"]
    assert [text.find(head) for head in heads] == sorted(text.find(head) for head in heads) and heads[-1] in text


def test_runs_at_one_rate_that_is_the_best_of_all_methods_have_one_panel(grid):
    manifest = json.loads((grid / "study.json").read_text())
    runs = [run for run in manifest["runs"] if not run["directory"].startswith("soap-0.01")]
    changed = {**manifest, "compare": "method", "baseline": "adam", "runs": runs}
    (grid / "study.json").write_text(json.dumps(changed))
    report = Report(grid)
    assert [panel.title for panel in report.panels] == ["each at its own best lr", "lr = 0.01", "lr = 1"]
    assert "favors methods with many numbers" in report.page()
    text = " ".join(Page(report.page()).text.split())
    place = "lr = 0.1 All methods are best here, so that the section “each at its own best lr” has these runs. lr = 1 "
    assert place in text and text.count("All methods are best here") == 1
    (_, each) = describe_comparisons(report.records)
    assert all(head in text for head in re.search("for each of (.*)", each)[1].split("; "))  # as the preview promised
    best, *others = (panel_table(panel, report.records).note for panel in report.panels)
    assert "all runs of lr = 0.1, which has no table" in best and not any("no table" in note for note in others)


@pytest.mark.parametrize("state", ["diverged", "unfinished", "not planned"])
def test_another_method_never_takes_the_place_of_the_baseline(grid, state):
    """adam, the baseline, has no best rate in the second condition, in which sgd is the same as adam was."""
    manifest = json.loads((grid / "study.json").read_text())
    listed = [{**run, "labels": {"data": "all", **run["labels"]}} for run in manifest["runs"]]
    for run in manifest["runs"]:
        method = run["labels"]["method"]
        others = {"adam": ["adam", "sgd"], "soap": ["soap"]}[method]
        listed += [
            {
                **run,
                "directory": f"{other}/{run['directory']}",
                "labels": {"data": "half", **run["labels"], "method": other},
            }
            for other in others
            if other != "adam" or state != "not planned"
        ]
        for other in others:
            place = grid / other / run["directory"]
            shutil.copytree(grid / run["directory"], place)
            if other == "adam" and state == "unfinished":
                (place / "result.json").unlink()
            elif other == "adam":
                result = json.loads((place / "result.json").read_text())
                (place / "result.json").write_text(json.dumps({**result, "val_loss": None}))
    (grid / "study.json").write_text(json.dumps({**manifest, "runs": listed}))
    records = read_records(grid)
    whole, half = at_their_best(records)
    assert [row.label for row in half.rows] == ["sgd, lr 0.1", "soap, lr 0.01"]
    assert half.baseline is None and all(row.difference is None for row in half.rows)
    assert "without the baseline adam" in half.title
    assert whole.baseline.label == "adam, lr 0.1" and "without" not in whole.title
    assert "with the baseline adam" in describe_comparisons(records)[0]
    text = " ".join(Page(Report(grid).write().read_text(encoding="utf-8")).text.split())
    assert "without the baseline adam, which has no best lr" in text and "minus sgd" not in text


@pytest.mark.parametrize("name", ["lr", "recipe.lr"])
def test_a_table_of_best_rates_is_headed_by_the_axis_of_methods(grid, name):
    manifest = json.loads((grid / "study.json").read_text())
    for run in manifest["runs"]:
        run["labels"] = {"method": run["labels"]["method"], name: run["labels"]["lr"]}
    for axis, baseline in ((name, "0.01"), ("method", "adam")):
        (grid / "study.json").write_text(json.dumps({**manifest, "compare": axis, "baseline": baseline}))
        records = read_records(grid)
        best, *others = Report(grid).panels
        assert best.axis == "method" and {panel.axis for panel in others} == {axis}
        assert markdown(panel_table(best, records)).splitlines()[2].startswith("| method | learning rate | ")
        page = Report(grid).page()
        assert [row[0].text for row in panel_table(best, records).rows] == ["adam", "soap"]  # the rate has a column
        assert page.count("<th>method</th>") == (1 if axis == name else 5)  # the table of all cells is one
        # where rates are compared, they are the titles of rows
        assert page.count("<th>learning rate</th>") == (1 if axis == name else len(others) + 1)
        assert "difference from adam [95 % interval]" in page and "from adam, lr" not in page
    assert "<tr><th>field</th><th>adam</th><th>soap</th></tr>" in page


def test_two_learning_rates_suffice_and_a_best_rate_at_an_end_is_named(grid):
    manifest = json.loads((grid / "study.json").read_text())
    two = [run for run in manifest["runs"] if run["labels"]["lr"] != "1"]
    (grid / "study.json").write_text(json.dumps({**manifest, "runs": two}))
    records = read_records(grid)
    (panel,) = at_their_best(records)
    assert [(row.label, row.edge) for row in panel.rows] == [("adam, lr 0.1", "largest"), ("soap, lr 0.01", "least")]
    text = markdown(panel_table(panel, records))
    assert "(largest tried)" in text and "0.01 (least tried)" in text
    (text,) = [text for text in sentences(panel) if "largest" in text]
    assert "adam, lr 0.1" in text and "soap, lr 0.01 (least)" in text


def test_the_best_rate_between_others_is_at_no_end(grid):
    (panel,) = at_their_best(read_records(grid))
    assert [row.edge for row in panel.rows] == ["", "least"]  # adam is best at 0.1, between 0.01 and 1


def test_a_baseline_may_be_a_label_of_another_axis_which_is_then_compared(grid):
    for text in ("soap", "method=soap"):
        records = read_records(grid, text)
        assert (records.compare, records.baseline) == ("method", "soap")
    assert [row.label for row in Report(grid, "soap").panels[0].rows] == ["soap, lr 0.01", "adam, lr 0.1"]
    assert read_records(grid, "lr=0.1").baseline == "0.1"
    with refused(ValueError, "muon", "method", "adam", "soap", "lr"):
        read_records(grid, "muon")
    with refused(ValueError, "lr=soap", "0.01"):
        read_records(grid, "lr=soap")


def test_comparisons_are_described_before_any_run_has_started(tmp_path):
    runs = [Run({"method": m, "lr": lr}, 0, tmp_path / f"{m}-{lr}") for m in ("adam", "soap") for lr in ("0.1", "0.2")]
    records = Records("n", "", METRICS["val_loss"], "method", "adam", tuple(runs))
    best, each = describe_comparisons(records)
    assert "adam, soap, each at its own best lr of 0.1, 0.2" in best and "lr = 0.1; lr = 0.2" in each
    assert method_axis(records) == "method"
    single = replace(records, runs=tuple(run for run in runs if run.labels["lr"] == "0.1"))
    assert method_axis(single) is None and len(describe_comparisons(single)) == 1


def test_p_is_corrected_for_the_comparisons_of_a_table(tmp_path):
    runs = [("adamw", s, {"recipe": ADAM, "values": [3.0 + 0.01 * s**2]}) for s in range(4)]
    runs += [("soap", s, {"recipe": SOAP, "values": [2.9 + 0.02 * s]}) for s in range(4)]
    runs += [("other", s, {"recipe": ADAM, "values": [2.5 + 0.03 * s]}) for s in range(4)]
    write_study(tmp_path, runs)
    (panel,) = compare(read_records(tmp_path))
    p = {row.label: row.difference.p for row in panel.rows if row.baseline}
    assert panel.corrected == pytest.approx({"other": 2 * p["other"], "soap": max(p["soap"], 2 * p["other"])})
    row = next(row for row in panel.rows if row.label == "other")
    text = " ".join(format_difference(row, panel_format([panel])))
    table = panel_table(panel, read_records(tmp_path))
    place = table.heads.index("p (Holm)")
    assert [cells[place].text for cells in table.rows] == [
        "",
        *(f"{panel.corrected[x]:.2g}" for x in ("soap", "other")),
    ]
    assert "corrected for 2 comparisons (Holm). Intervals" in table.note and "are not corrected" in table.note
    two = tmp_path / "two"
    write_study(two, [run for run in runs if run[0] != "other"])
    assert "orrected" not in panel_table(compare(read_records(two))[0], read_records(two)).note
    low, high = row.difference.mean - row.difference.half, row.difference.mean + row.difference.half
    assert f"[{low:+.3f}, {high:+.3f}]".replace("-", "\u2212") in text


@pytest.mark.parametrize("seeds", [3, 8])
def test_a_bootstrap_interval_is_shown_where_there_are_seeds_enough(tmp_path, seeds):
    runs = [("adamw", s, {"recipe": ADAM, "values": [3.0]}) for s in range(seeds)]
    runs += [("soap", s, {"recipe": SOAP, "values": [2.0 + 0.01 * s**2]}) for s in range(seeds)]
    write_study(tmp_path, runs)
    (panel,) = compare(read_records(tmp_path))
    text = " ".join(Page(Report(tmp_path).write().read_text(encoding="utf-8")).text.split())
    low, high = panel.rows[1].difference.bootstrap or (0.0, 0.0)
    shown = f"bootstrap [{low:+.3f}, {high:+.3f}]".replace("-", "\u2212")
    assert (shown in text, "(BCa), 10,000 draws" in text, "intervals are not used" in text) == (
        (False, False, True) if seeds == 3 else (True, True, False)
    )


@pytest.mark.parametrize("study", [True, False])
def test_runs_of_several_tasks_are_never_subtracted(tmp_path, study):
    runs = {"adamw": {"recipe": ADAM, "values": [3.0]}, "soap": {"recipe": SOAP, "values": [1.0], "task": "digits"}}
    write_study(tmp_path, [(method, 0, fields) for method, fields in runs.items()])
    if study:
        (panel,) = compare(read_records(tmp_path))
        assert panel.best is None and panel.rows[1].difference is None and panel.rows[1].reached("steps") == {}
    else:  # runs that belong to no study: a panel for each task
        (tmp_path / "study.json").unlink()
        panels = compare(read_records(tmp_path))
        assert [[row.label for row in panel.rows] for panel in panels] == [["method=adamw"], ["method=soap"]]
        assert [panel.title for panel in panels] == ["task = bytes", "task = digits"]
    text = " ".join(Page(Report(tmp_path).write().read_text(encoding="utf-8")).text.split())
    assert "\u22122.000" not in text and ("other task, code or data" in text) == study


def test_labels_that_are_numbers_have_the_name_of_their_axis():
    assert named("update.eigenbasis.refresh.steps", "10") == "refresh.steps 10"
    assert named("lr", "1e-3") == "lr 1e-3" and named("method", "soap") == "soap"
    assert axis_name("lr") == "learning rate" and axis_name("task.depth") == "task.depth"


def test_runs_that_diverged_are_drawn_and_named(grid, tmp_path):
    records = read_records(grid)
    row = next(row for row in compare(records)[0].rows if row.label == "1")
    curve = row.curve("steps")
    assert curve.mean == [4.0, 9.0]  # of the two runs that did not
    assert curve.lost == (LostRun([10.0], [4.0], 20.0),)
    assert curve.lost_label == "lr 1: 1 of 3 diverged"
    figure = draw_curves([curve], "training steps", "loss")
    assert "lr 1: 1 of 3 diverged" in [text.get_text() for text in figure.legends[0].get_texts()]


def test_a_method_has_one_style_in_all_figures_and_no_two_have_the_same():
    names = [f"method {i}" for i in range(12)] + ["muon", "adamw", "soap_fitted"]
    whole = styles_of({name: name for name in names})
    assert whole == styles_of({name: name for name in reversed(names)})  # the order of labels does not matter
    assert len({tuple(map(str, stroke(style).values())) for style in range(24)}) == 24
    assert len(set(whole.values())) == len(names)
    assert len({stroke(style)["color"] for style in styles_of({n: n for n in names[-8:]}).values()}) == 8
    for some in (["muon", "soap_fitted"], ["soap_fitted", "another", "muon"], ["adamw", "muon", "soap_fitted"]):
        found = styles_of({f"{name}, lr 0.1": name for name in some})
        assert all(found[f"{name}, lr 0.1"] == whole[name] for name in some if name in whole)


def test_no_legend_covers_a_curve():
    """Whatever there is to say: legends end below the axes."""
    some = [
        Curve(f"method number {i}", i, [0, 1], [i, 1], [i, 1], [i, 1], (LostRun((), (), 0.5),), f"m {i}")
        for i in range(7)
    ]
    for log in ("auto", None):
        figure = draw_curves(some, "x", "y", level=Level(1.0, "level", 0), log=log)
        FigureCanvasAgg(figure).draw()
        (axes,), (legend,) = figure.axes, figure.legends
        assert axes.get_legend() is None
        assert legend.get_window_extent().y1 <= axes.get_window_extent().y0
        assert axes.get_window_extent().height > 150  # pixels: the curves keep room


@pytest.mark.parametrize(("decades", "first"), [(0.05, None), (1, "1"), (2.9, "1"), (4, "10⁰"), (8, "10⁰"), (40, None)])
@pytest.mark.parametrize("width", [3.25, 4.8])
def test_ticks_of_losses_over_many_decades_are_few_and_apart(decades, first, width):
    y = [1.5 * 10 ** (-decades * k / 9) for k in range(10)]
    figure = draw_curves([Curve("a", 0, range(1, 11), y, y, y)], "x", "y", log="xy", width=width)
    FigureCanvasAgg(figure).draw()
    for axis in (figure.axes[0].yaxis, figure.axes[0].xaxis):
        low, high = axis.get_view_interval()
        labels = [tick.label1 for tick in axis.get_major_ticks() if low <= tick.get_loc() <= high]
        boxes = [label.get_window_extent() for label in labels]
        assert 3 <= len(boxes) <= 10 and not any(a.overlaps(b) for a, b in pairwise(boxes))
        assert axis is figure.axes[0].xaxis or first in (None, *(label.get_text() for label in labels))


def boxes_of(figure):
    """Boxes of all texts of a drawn figure, and of the horizontal tick labels of each of its axes."""
    FigureCanvasAgg(figure).draw()
    texts, ticks = [text for legend in figure.legends for text in legend.get_texts()], []
    for axes in figure.axes:
        low, high = axes.get_xlim()
        shown = [tick.label1 for tick in axes.xaxis.get_major_ticks() if low <= tick.get_loc() <= high]
        ticks.append([label.get_window_extent() for label in shown])
        texts += [axes.xaxis.label, axes.yaxis.label, axes._left_title, *shown]
    return [text.get_window_extent() for text in texts if text.get_text()], ticks


@pytest.mark.parametrize("width", [3.25, 4.8])
@pytest.mark.parametrize("what", ["curves", "long names", "logarithmic", "differences", "internals"])
def test_no_text_of_a_figure_is_cut_off_or_covers_another(what, width, tmp_path):
    long = "a method whose name is much longer than a column of a paper is wide"
    y = [3 / (1 + k / 50) + 0.1 * math.sin(7 * k) ** 2 for k in range(1500)]
    if what in ("differences", "internals"):
        ends = {"soap_fitted": (2.0, 2.1, 2.2), long: (2.3, 2.4, 2.5), "muon": (1.0, 1.2, 1.1), "adamw": (1, 1.1, 1.3)}
        runs = [(m, s, {"recipe": ADAM, "values": [3.5, y]}) for m, own in ends.items() for s, y in enumerate(own)]
        write_study(tmp_path, runs, baseline="soap_fitted")
        for seed in tmp_path.glob("*/seed-0"):
            lines = [
                {"step": k, "parameter": "a", "stage": "update", "slot": "", "measure": measure, "value": 2 / k}
                for measure in MEASURES
                for k in (1000, 70000, 139000)
            ]
            (seed / "diagnostics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        (panel,) = compare(read_records(tmp_path))
        figure = (difference_dots if what == "differences" else internals)(panel, width)
    else:
        name = long if what == "long names" else "a"
        curves = [Curve(f"{name} {k}", k, [64 * (k + 5) for k in range(1500)], y, y, y) for k in range(2)]
        log = "x" if what == "logarithmic" else "none"
        figure = draw_curves(curves, "training tokens", f"metric of {name}", log=log, width=width)
    texts, ticks = boxes_of(figure)
    assert texts and all(box.x0 >= 0 and box.x1 <= figure.bbox.x1 for box in texts)
    assert all(box.y0 >= 0 and box.y1 <= figure.bbox.y1 for box in texts)
    assert all(len(own) > 1 and not any(a.overlaps(b) for a, b in pairwise(own)) for own in ticks)
    assert not any(a.overlaps(b) for a, b in combinations(texts, 2))


@pytest.mark.parametrize("log", ["none", "x"])
def test_markers_of_a_long_line_are_few_and_at_equal_distances(log):
    x, y = [float(k) for k in range(1, 1501)], [1 / k for k in range(1, 1501)]
    (axes,) = draw_curves([Curve("a", 0, x, y, y, y)], "x", "y", log=log).axes
    line = axes.get_lines()[0]
    places = axes.transData.transform(line.get_xydata()[line.get_markevery()])[:, 0]
    gaps = [after - before for before, after in pairwise(places)]
    assert 5 <= len(places) <= 9 and max(gaps) < 1.2 * min(gaps)


def test_every_tried_value_has_a_marker():
    tried = [0.0005 * 2**k for k in range(9)]
    (axes,) = draw_curves([Curve("a", 0, tried, tried, tried, tried)], "learning rate", "y", log=None).axes
    line = axes.get_lines()[0]
    assert line.get_marker() not in ("", "None", None) and line.get_markevery() is None


@pytest.mark.parametrize("width", [3.25, 4.8])
def test_tried_values_have_ticks_wherever_their_texts_fit(width):
    for tried, shown in (
        ((0.003, 0.01), ["0.003", "0.01"]),
        ((0.0025, 0.005, 0.01, 0.04), ["0.0025", "0.005", "0.01", "0.04"]),
        ((0.01,), ["0.01"]),
        ((1, 10, 1000), ["1", "10", "1000"]),
        ((0, 0.01, 0.1), ["0.01", "0.1"]),  # a logarithmic axis has no 0
        ([0.01 * 1.1**k for k in range(30)], None),
    ):
        some = Curve(
            "a", 0, tried[:-1], tried[:-1], tried[:-1], tried[:-1], (LostRun((), (), tried[-1]),), "a: diverged"
        )
        figure = draw_curves([some], "learning rate", "y", log=None, width=width)
        FigureCanvasAgg(figure).draw()
        labels = [tick.label1 for tick in figure.axes[0].xaxis.get_major_ticks()]
        assert shown is None or [label.get_text() for label in labels] == shown
        boxes = [label.get_window_extent() for label in labels]
        assert len(boxes) >= min(2, len(tried)) and not any(a.overlaps(b) for a, b in pairwise(boxes))
        assert all(any(place == pytest.approx(x) for x in tried) for place in figure.axes[0].get_xticks())


def test_seconds_are_those_of_median_steps_and_a_busy_machine_is_named(tmp_path):
    write_run(tmp_path / "run", ADAM, [4.0] * 10)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    total = 0.0
    for index, row in enumerate(rows):  # two rows at a third of the speed; every row has 0.05 s of rare work
        slow = 3.0 if index in (4, 5) else 1.0
        total += slow * (10 * 0.010 + 0.05)
        row |= {"seconds": total, "step_ms": 10.0 * slow}
    (tmp_path / "run" / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (panel,) = compare(read_records(tmp_path))
    run = panel.rows[0].runs[0]
    assert run.seconds() == pytest.approx([0.15 * k for k in range(1, 11)])
    assert run.busy and panel.busy == 1
    assert "1 of the runs had rows" in Report(tmp_path).write().read_text(encoding="utf-8")
    labels = {name: figure.axes[0].get_xlabel() for name, figure in Report(tmp_path).figures().items()}
    assert {name for name, label in labels.items() if "\u2020" in label} == {
        f"{tmp_path.name} validation loss against seconds"
    }
    for x in ("seconds", "steps"):
        arguments = ["report", str(tmp_path), "--figures", str(tmp_path / "figures"), "--x", x]
        assert (
            ("\u2020" in invoke(arguments).stderr) == (x == "seconds") == ("\u2020" in Report(tmp_path, x=[x]).footnote)
        )


@pytest.mark.parametrize(
    ("threads", "device", "cpu_ms", "busy"),
    [
        (1, "cpu", 7.9, True),
        (1, "cpu", 8.1, False),
        (2, "cpu", 7.9, False),
        (1, "GPU", 7.9, False),
        (1, "cpu", None, False),
    ],
)
def test_load_during_a_whole_run_is_seen_by_its_processor_time(tmp_path, threads, device, cpu_ms, busy):
    """A step takes 10 ms in every row, so that no row is slower than the others."""
    write_run(tmp_path / "run", ADAM, [4.0] * 10)
    environment = {"threads": threads, "device": device}
    (tmp_path / "run" / "env.json").write_text(json.dumps(environment))
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    timed = [row | {"step_ms": 10.0} | ({} if cpu_ms is None else {"cpu_ms": cpu_ms}) for row in rows]
    (tmp_path / "run" / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in timed))
    (panel,) = compare(read_records(tmp_path))
    assert panel.busy == busy


def test_all_cells_of_two_axes_are_one_table(grid):
    """The best mean is 1.633. The mean 2.1 differs from it by 0.467 +- 0.153, t = 5.3, p = 0.034.

    The mean 2.533 differs from it by 0.9, t = 9.8, p = 0.01.

    By Holm's rule p of the first is multiplied by the number of tests that have not a smaller p.
    """
    _, caption, note, heads, rows = grid_of(read_records(grid))
    assert heads == ["lr", "adam", "soap"] and [cells[0].text for cells in rows] == ["0.01", "0.1", "1"]
    cells = {(own[0].text, column): cell for own in rows for column, cell in zip(heads[1:], own[1:], strict=True)}
    assert cells["0.01", "soap"] == TableCell("1.633 \u00b1 0.153 *", bold=True)
    assert cells["0.1", "adam"].text == "2.100 \u00b1 0.100" and cells["1", "adam"] == TableCell("diverged")
    assert "of each lr (rows) and method (columns)" in caption
    text = " ".join(Page(Report(grid).write().read_text(encoding="utf-8")).text.split())
    assert f"All cells {caption} {note} lr" in text
    for name, best in (("tables.md", "**1.633 \u00b1 0.153 \\***"), ("tables.tex", r"\textbf{1.633 $\pm$ 0.153 *}")):
        assert best in (grid / name).read_text(encoding="utf-8")


def test_a_best_baseline_is_compared_with_the_next_method_and_equals_are_marked(tmp_path):
    ends = {"adamw": (1.0, 1.1, 1.2), "soap": (1.0, 1.3, 1.1), "lion": (2.0, 2.11, 2.2)}
    runs = [(m, s, {"recipe": ADAM, "values": [3.0, y]}) for m, own in ends.items() for s, y in enumerate(own)]
    write_study(tmp_path, runs)
    (panel,) = compare(read_records(tmp_path))
    assert panel.best is panel.baseline and [row.label for row in panel.leaders] == ["adamw", "soap"]
    text = " ".join(Page(Report(tmp_path).write().read_text(encoding="utf-8")).text.split())
    assert "Lowest final validation loss: adamw, 1.100 \u00b1 0.100. soap: 1.133" in text
    assert "soap minus adamw: +0.033" in text and "With 3 seeds this difference is not significant (p = 0.74" in text


def test_tables_legends_and_dots_have_one_order_with_the_baseline_first(tmp_path):
    ends = {"soap": (1.0, 1.3, 1.1), "adamw": (2.0, 2.1, 2.2), "lion": (0.1, 0.2, 0.4), "muon": (3.0, 3.11, 3.2)}
    runs = [(m, s, {"recipe": ADAM, "values": [3.5, y]}) for m, own in ends.items() for s, y in enumerate(own)]
    write_study(tmp_path, runs)
    report, order = Report(tmp_path), ["adamw", "soap", "lion", "muon"]
    (panel,) = report.panels
    assert [row.label for row in panel.rows] == order
    assert [cells[0].text for cells in panel_table(panel, report.records).rows] == order
    for figure in report.figures().values():
        shown = [text.get_text() for legend in figure.legends for text in legend.get_texts()]
        assert [text for text in shown if text in order] in ([], order)
    (axes,) = difference_dots(panel).axes
    heights = sorted(zip(axes.get_yticks(), [text.get_text() for text in axes.get_yticklabels()], strict=True))
    assert [text for _, text in reversed(heights)] == order[1:]


def test_one_seed_marks_no_winner(tmp_path):
    write_study(tmp_path, [(m, 0, {"recipe": ADAM, "values": [3.0, y]}) for m, y in (("adamw", 1.0), ("soap", 2.0))])
    page = Report(tmp_path).write().read_text(encoding="utf-8")
    assert "One seed allows no test of this difference." in page and "number best" not in page and "1.000 *" in page


def test_tables_have_accuracy_and_mark_times_of_a_busy_machine(tmp_path):
    write_study(tmp_path, [("adamw", 0, {"recipe": ADAM, "values": [3.0] * 10})])
    run = tmp_path / "method=adamw" / "seed-0"
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rows = [row | {"step_ms": 30 if row["step"] in (50, 60) else 10} for row in rows]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = json.loads((run / "result.json").read_text())
    (run / "result.json").write_text(json.dumps({**result, "val_accuracy": 0.75}))
    page = Report(tmp_path).write().read_text(encoding="utf-8")
    assert "step time (ms) \u2020</th>" in page and "Do not compare columns with the sign \u2020" in page
    assert "training seconds \u2020" in page and "corrected for other load" not in page
    table = (tmp_path / "tables.md").read_text(encoding="utf-8")
    assert " | accuracy | " in table and " | 0.750 | " in table and "(ms) \u2020" in table and "other load" in table
    assert r"(ms) $\dagger$" in (tmp_path / "tables.tex").read_text(encoding="utf-8")


def test_tables_in_markdown_and_latex(grid):
    records = read_records(grid)
    (panel,) = at_their_best(records)
    head, rule, *rows = markdown(panel_table(panel, records)).splitlines()[2:]
    assert head.count("|") == rule.count("|") == rows[0].count("|") and len(rows) == 2
    assert rows[1].startswith("| soap | 0.01 (least tried) | **1.633 \u00b1 0.153 \\*** | \u22120.467 [")
    text = latex(panel_table(panel, records))
    assert text.count("&") == (4 + 6) * 3 and text.count(" \\\\\n") == 2 * 3 and "$-$0.467" in text and r"95~\%" in text
    assert not re.search(r"(?<!\\)[%#_]", text) and text.isascii()
    assert text.splitlines()[3] == r"\label{tab:grid-each-at-its-own-best-lr}"
    write_tables(records, grid)
    assert (grid / "tables.md").read_text(encoding="utf-8").count("**") == 2 * (4 + 4)  # titles, best means
    assert (grid / "tables.tex").read_text(encoding="utf-8").count(r"\toprule") > 1 + 3


@pytest.mark.parametrize("columns", [2, 9, 30])
def test_a_latex_table_fits_on_a_page(columns):
    """Measured in Computer Modern: columns that do not fit are in further tables, again with the names of the rows."""
    head, cell = "final validation loss of it", "\u22120.467 [\u22120.547, \u22120.386]"
    names = ["soap_fitted-every-step", "adamw"]
    rows = [[TableCell(name), *[TableCell(f"{cell} {n}", bold=True) for n in range(columns)]] for name in names]
    text = latex(
        TextTable("study", "", "* is best.", ["method", *[f"{head} {place}" for place in range(columns)]], rows)
    )
    labels = re.findall(r"\\label\{(.*)\}", text)
    assert labels == ["tab:study", *(f"tab:study-{number}" for number in range(2, text.count(r"\begin{table}") + 1))]
    assert text.count(r"\toprule") == len(labels) == text.count(r"\ref{tab:study}") + 1
    assert (
        text.count("* is best.") == 1
        and "* is best." in text.partition(r"\end{tabular}")[2].partition(r"\end{table}")[0]
    )
    font = FontProperties(fname=str(Path(matplotlib.get_data_path(), "fonts", "ttf", "cmr10.ttf")))
    shown, counts = dict.fromkeys(range(columns), 0), list[int]()
    for part in text.split(r"\toprule")[1:]:
        own = [line.removesuffix(r" \\").split(" & ") for line in part.splitlines() if " & " in line]
        cells = [[re.sub(r"\\textbf|[{}$]", "", text).replace(r"\_", "_") for text in row] for row in own[1:]]
        assert [row[0] for row in cells] == ["soap_fitted-every-step", "adamw"]
        counts.append(len(cells[0]))
        widths = [
            max(TextPath((0, 0), row[place], 8, prop=font).get_extents().width for row in cells)
            for place in range(len(cells[0]))
        ]
        assert sum(widths) + 8 * len(widths) < 345
        for text in cells[0][1:]:
            shown[int(text.split()[-1])] += 1
    assert set(shown.values()) == {1}
    assert max(counts[1:], default=0) - min(counts[1:], default=0) <= 1


SMALL = {
    "small": ((2.9e-4, 3.0e-4, 3.1e-4), (4.0e-4, 4.2e-4, 4.4e-4), "0.000300", "0.000010", "0.000420", "+0.000120"),
    "close": ((0.0238, 0.0240, 0.0242), (0.0243, 0.0241, 0.0245), "0.02400", "0.00020", "0.02430", "+0.00030"),
    "parallel": ((0.5, 0.6, 0.7), (0.50011, 0.6001, 0.70009), "0.600000", "0.100000", "0.600100", "+0.000100"),
    "tiny": ((2.9e-7, 3.0e-7, 3.1e-7), (4.0e-7, 4.2e-7, 4.4e-7), "3.00e-07", "1.00e-08", "4.20e-07", "+1.20e-07"),
    "ordinary": ((1.5, 1.6, 1.8), (2.0, 2.2, 2.1), "1.633", "0.153", "2.100", "+0.467"),
}
"""Finals of two methods -> texts of the first mean and its spread, of the second mean, and of their difference."""


@pytest.mark.parametrize("case", SMALL)
def test_small_losses_have_digits_everywhere(tmp_path, case):
    first, second, mean, spread, other, difference = SMALL[case]
    runs = [
        (m, s, {"recipe": ADAM, "values": [3.0, y]})
        for m, own in (("adamw", first), ("soap", second))
        for s, y in enumerate(own)
    ]
    write_study(tmp_path, runs)
    text = " ".join(Page(Report(tmp_path).write().read_text(encoding="utf-8")).text.split())
    assert f"Lowest final validation loss: adamw, {mean} \u00b1 {spread}. soap: {other} \u00b1 " in text
    assert f"soap minus adamw: {difference} [" in text
    table, tex = (tmp_path / "tables.md").read_text("utf-8"), (tmp_path / "tables.tex").read_text("utf-8")
    assert f"{mean} \u00b1 {spread} \\*" in table and f" | {difference} [" in table
    assert f"{mean} $\\pm$ {spread} *" in tex and f"& {difference} [" in tex
    lines = [line.split(" | ") for line in table.splitlines() if line.startswith(("| adamw", "| soap"))]
    numbers = re.findall(r"\d\.[\de.-]+", " ".join(cell for line in lines for cell in line[2:4]))
    assert len({len(number) for number in numbers}) == 1 and len(numbers) == 7  # a column has one format
    assert not any(float(number) == 0 for number in numbers)


def test_an_accuracy_has_its_spread_over_seeds_and_a_curve(tmp_path):
    accuracies = {0: 0.75, 1: 0.85}
    write_study(tmp_path, [("adamw", seed, {"recipe": ADAM, "values": [3.0, 2.0]}) for seed in accuracies])
    for seed, accuracy in accuracies.items():
        run = tmp_path / "method=adamw" / f"seed-{seed}"
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        rows = [{**row, "val_accuracy": accuracy - 0.1 + 0.1 * (row is rows[-1])} for row in rows]
        (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        result = json.loads((run / "result.json").read_text())
        (run / "result.json").write_text(json.dumps({**result, "val_accuracy": accuracy, "metrics": {"f1": accuracy}}))
    report = Report(tmp_path)
    report.write()
    assert (tmp_path / "tables.md").read_text(encoding="utf-8").count(" | 0.800 \u00b1 0.071") == 2
    (drawn,) = [figure for name, figure in report.figures().items() if "validation accuracy against steps" in name]
    (line,) = drawn.axes[0].get_lines()
    assert line.get_ydata() == pytest.approx([0.7, 0.8])


def test_a_small_metric_of_the_task_has_digits(tmp_path):
    write_study(tmp_path, [(m, 0, {"recipe": ADAM, "values": [3.0, 2.0]}) for m in ("adamw", "soap")])
    for method, value in (("adamw", 3e-4), ("soap", 0.5)):
        path = tmp_path / f"method={method}" / "seed-0" / "result.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "metrics": {"mse": value}, "val_accuracy": 2e-4}))
    Report(tmp_path).write()
    table = (tmp_path / "tables.md").read_text(encoding="utf-8")
    assert (
        " | 0.000 | 0.000300 | 1 | " in table and " | 0.000 | 0.500000 | 1 | " in table
    )  # accuracy keeps three decimals


def test_exported_figures_say_what_they_show(grid, tmp_path, monkeypatch):
    monkeypatch.setattr(figures, "save_figure", lambda figure, path: None)  # names alone
    names = {path.stem for path in Report(grid).save_figures(tmp_path / "figures")}
    assert "grid-final-validation-loss-against-lr" in names
    assert "grid-method-adam-validation-loss-against-steps" in names
    assert "grid-each-at-its-own-best-lr-validation-loss-against-steps" in names
