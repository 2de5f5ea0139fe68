"""Claims of papers: their tests against scipy, how cells are paired, and that every page says what its results say."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from eigengraft import RecipeError
from eigengraft.experiments.reproduction.claims import (
    PaperClaim,
    ResultRow,
    StudyResults,
    interval_test,
    judge,
    load_claims,
    measure_claim,
)
from eigengraft.experiments.reproduction.pages import paper_pages, read_studies, study_table

from ..cli import invoke
from ..refusals import refused
from .scripts import PAPERS

FOLDERS = sorted(path.parent.name for path in PAPERS.glob("*/claims.yaml"))


@pytest.mark.parametrize("name", FOLDERS)
def test_pages_say_what_the_results_of_the_folder_say(name: str) -> None:
    """Every verdict is the one that the folder reports, and every table between markers is that of its results."""
    folder = PAPERS / name
    claims = load_claims(folder)
    found = judge(claims.claims, read_studies(folder, claims))
    assert {key: one.verdict for key, one in found.items()} == {k: c.expected for k, c in claims.claims.items()}
    for path, text in paper_pages(folder).items():
        assert path.read_text() == text, f"{path}: eigengraft reproduce papers/{name} --write"
    assert "<!-- results: claims -->" in (folder / "README.md").read_text()


VALUES = [0.3, -0.1, 0.45, 0.2]


@pytest.mark.parametrize(
    ("low", "high"), [(-math.inf, 0.0), (-math.inf, 1.0), (0.0, math.inf), (-0.5, 0.5), (0.4, 2.0)]
)
def test_p_is_that_of_the_t_test_against_the_nearest_end(low: float, high: float) -> None:
    """Two-sided, as scipy computes it; inside both ends it is twice the larger one-sided p, that of equivalence."""
    from scipy import stats  # takes a second, also in runs without this test

    mean, half, p, verdict = interval_test(VALUES, low, high)
    ends = [end for end in (low, high) if math.isfinite(end)]
    if low < mean < high:
        sides = [
            stats.ttest_1samp(VALUES, low, alternative="greater"),
            stats.ttest_1samp(VALUES, high, alternative="less"),
        ]
        expected = 2 * max(side.pvalue for side, end in zip(sides, (low, high), strict=True) if math.isfinite(end))
    else:
        expected = max(stats.ttest_1samp(VALUES, end).pvalue for end in ends)
    assert p == pytest.approx(expected, rel=1e-9)  # both evaluate the same function in float64
    assert verdict == ("holds" if low <= mean <= high else "fails")
    interval = stats.ttest_1samp(VALUES, 0).confidence_interval(0.95)
    assert (mean - half, mean + half) == pytest.approx(tuple(interval), rel=1e-9)  # type: ignore[operator]


@pytest.mark.parametrize(
    ("values", "exact", "verdict"),
    [
        ([0.5], False, "undecided"),
        ([0.5], True, "holds"),
        ([2.0], True, "fails"),
        ([0.5, 0.5], False, "holds"),
        ([math.inf, 0.5], False, "undecided"),
        ([math.inf, math.inf], False, "fails"),
        ([math.inf, -math.inf], False, "fails"),
        ([math.nan, math.nan], False, "undecided"),
    ],
)
def test_without_a_test_there_is_a_verdict_only_where_nothing_is_left_to_chance(
    values: list[float], exact: bool, verdict: str
) -> None:
    assert interval_test(values, 0.0, 1.0, exact)[2:] == (None, verdict)


def results(*rows: tuple[str, str, int, Any]) -> StudyResults:
    """Runs of method, task and seed with these losses, evaluated at steps 5 and 10."""
    made = [
        ResultRow({"method": m, "task": t}, seed, {"val_loss": loss[1], "steps": 10, "curve": [[5, 10], list(loss)]})
        for m, t, seed, loss in rows
    ]
    return StudyResults(tuple(made), {})


RUNS = results(
    ("a", "x", 0, (3.0, 1.0)),
    ("a", "x", 1, (4.0, 2.0)),
    ("b", "x", 0, (4.0, 2.0)),
    ("b", "x", 1, (6.0, 3.0)),
    ("a", "y", 0, (9.0, 5.0)),
    ("a", "y", 1, (9.0, 8.0)),
    ("b", "y", 0, (9.0, 10.0)),
    ("b", "y", 1, (9.0, None)),
)


def test_small_losses_have_digits_among_the_rows_that_are_compared() -> None:
    runs = [("a", "x", seed, (1.0, 0.0015 + 0.0003 * seed)) for seed in range(2)]
    runs += [("b", "x", seed, (1.0, 0.3 + 0.01 * seed)) for seed in range(2)]
    runs += [("a", "y", seed, (9.0, 2.0 + seed)) for seed in range(2)]
    lines = study_table(replace(results(*runs), compare="method")).splitlines()[-3:]
    losses = [line.split(" | ")[-2] for line in lines]
    assert losses == ["0.00165 \u00b1 0.00021", "0.30500 \u00b1 0.00707", "2.500 \u00b1 0.707"]


def claim(of: dict[str, Any], **fields: Any) -> PaperClaim:
    return PaperClaim(says="s", source="t", of=of, than={"method": "b"}, most=0.5, **fields)


def test_values_are_those_of_cells_that_differ_in_the_labels_named() -> None:
    """Differences 1 - 2 and 2 - 3; ratios 1/2 and 2/3; the ratio of y, 5/10 at seed 0, divided by that of x."""
    on_x = {"method": "a", "task": "x"}
    assert measure_claim(claim(on_x), RUNS).values == {0: -1.0, 1: -1.0}
    assert measure_claim(claim(on_x, compare="ratio"), RUNS).values == pytest.approx({0: 1 / 2, 1: 2 / 3})
    assert measure_claim(claim({"method": "a"}), RUNS).values == {0: (-1 - 5) / 2, 1: -math.inf}
    beside = {"of": on_x, "than": {"method": "b"}}
    of_y = measure_claim(claim({"method": "a", "task": "y"}, compare="ratio", beside=beside), RUNS)
    assert of_y.values == pytest.approx({0: 1.0, 1: 0.0})


def test_steps_to_a_loss_are_counted_on_the_curve() -> None:
    """From 3 at step 5 to 1 at step 10 the 2 of the partner is reached at 7.5; from 4 to 2 the 3 at 7.5 as well.

    The other way round the partner's loss is never reached.
    """
    on_x = {"method": "a", "task": "x"}
    assert measure_claim(claim(on_x, metric="steps_to_loss", compare="ratio"), RUNS).values == pytest.approx(
        {0: 0.75, 1: 0.75}
    )
    back = PaperClaim(
        says="s", source="t", of={"method": "b", "task": "x"}, than={"method": "a"}, most=1.0,
        metric="steps_to_loss", compare="ratio",
    )  # fmt: skip
    assert measure_claim(back, RUNS).verdict == "fails"


def test_p_is_corrected_for_all_claims_of_a_folder() -> None:
    """Differences 1.1, 1.0 and 0.9 have t = 10 sqrt(3) against 0, p = 0.0033; sixteen claims make it 0.053."""
    runs = results(*((m, "x", s, (9.0, 1 + (m == "a") * (1.1 - s / 10))) for m in "ab" for s in range(3)))
    one = PaperClaim(says="s", source="t", of={"method": "a"}, than={"method": "b"}, least=0.0)
    assert {c.verdict for c in judge({str(i): one for i in range(15)}, {"study": runs}).values()} == {"holds"}
    assert {c.verdict for c in judge({str(i): one for i in range(16)}, {"study": runs}).values()} == {"undecided"}


STUDY = "base: {task: {kind: digits, model: mlp, width: 8}, recipe: adamw, steps: 2}\naxes: {lr: [0.01, 0.001]}\n"
CLAIMS = "paper: p\nclaims: {one: {says: s, source: t, of: {lr: 0.01}, than: {lr: 0.001}, metric: %s, %s}}\n"


def write_folder(folder: Path, metric: str, more: str) -> None:
    (folder / "study.yaml").write_text(STUDY)
    (folder / "claims.yaml").write_text(CLAIMS % (metric, more))
    (folder / "README.md").write_text("# p\n\n<!-- results: claims -->\nstale\n<!-- end of results -->\n\nmore\n")
    rows = [
        {"labels": {"lr": lr}, "seed": 0, "val_loss": 1.0, "state_bytes_per_parameter": 8.0} for lr in ("0.01", "0.001")
    ]
    (folder / "results").mkdir()
    (folder / "results" / "study.json").write_text(json.dumps({"study": "study", "made": {"cpu": "c"}, "rows": rows}))


def test_the_command_judges_and_renews_pages(tmp_path: Path) -> None:
    """Exit code 1 while a page is old, and where what is said to hold does not."""
    write_folder(tmp_path, "state_bytes_per_parameter", "compare: ratio, most: 1.0")
    check = ["reproduce", str(tmp_path), "--check"]
    before = invoke(check)
    assert before.exit_code == 1 and "1 of 1 claims hold" in before.output
    assert invoke(["reproduce", str(tmp_path), "--write"]).exit_code == 0
    assert invoke(check).exit_code == 0
    readme = (tmp_path / "README.md").read_text()
    assert "| s | t |  | ratio of state bytes per parameter at most 1 | 1.000 | 1 |  | **holds** |" in readme
    assert readme.startswith("# p\n") and readme.endswith("\nmore\n") and "stale" not in readme
    (tmp_path / "claims.yaml").write_text(CLAIMS % ("state_bytes_per_parameter", "compare: ratio, most: 0.5"))
    wrong = invoke(["reproduce", str(tmp_path), "--write"])
    assert wrong.exit_code == 1 and "expected to hold, but do not: one" in wrong.output


@pytest.mark.parametrize(
    ("metric", "more", "says"),
    [
        ("val_loss", "expected: holds", ("least", "most")),
        ("val_loss", "least: 1.0, most: 0.0", ("least", "most")),
        ("val_loss", "compare: ratio, most: -1.0", ("ratio",)),
        ("steps_to_loss", "most: 1.0", ("ratio",)),
        ("val_loss", "most: 1.0, beside: {of: {rate: 1}, than: {lr: 0.01}}", ("rate",)),
    ],
)
def test_a_claim_that_means_nothing_is_refused(
    tmp_path: Path, metric: str, more: str, says: tuple[object, ...]
) -> None:
    write_folder(tmp_path, metric, more)
    with refused((RecipeError, ValueError), *says):
        load_claims(tmp_path)


def test_results_of_other_runs_than_the_study_plans_are_refused(tmp_path: Path) -> None:
    write_folder(tmp_path, "val_loss", "most: 1.0")
    (tmp_path / "study.yaml").write_text(STUDY + "seeds: [0, 1]\n")
    with refused(ValueError, "seed"):
        read_studies(tmp_path, load_claims(tmp_path))
