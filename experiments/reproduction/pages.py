"""The generated pages in the folder of a reproduced paper, such as papers/soap_2024.

These are results/claims.md, and the tables between markers in README.md.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

from eigengraft.errors import RecipeError

from ..reports.number_format import number_format
from ..reports.records import group_by
from ..reports.seed_statistics import Summary, summarize
from ..reports.tables import format_rate, format_summary, markdown_table
from ..studies.study import load_study
from .claims import ClaimFinding, PaperClaim, PaperClaims, ResultRow, StudyResults, judge, load_claims, read_results

_MARKED = re.compile(r"(<!-- results: (?P<name>[\w.-]+) -->\n).*?(<!-- end of results -->)", re.DOTALL)


def read_studies(folder: Path, claims: PaperClaims) -> dict[str, StudyResults]:
    """Return the results of all studies that claims refer to. Raises ValueError if results are missing."""
    found = {}
    for name in claims.studies:
        path = folder / "results" / f"{name}.json"
        if name in claims.measured and not path.exists():
            path = folder / claims.measured[name]
        found[name] = read_results(path, load_study(folder / f"{name}.yaml"))
    return found


def paper_pages(folder: Path) -> dict[Path, str]:
    """Return the text of the generated pages of a folder by path: results/claims.md and, if it exists, README.md."""
    claims = load_claims(folder)
    results = read_studies(folder, claims)
    table = claims_table(claims.claims, judge(claims.claims, results))
    tables = {"claims": table, **{name: study_table(study) for name, study in results.items()}}
    pages = {folder / "results" / "claims.md": f"# {claims.paper}\n\n{table}"}
    readme = folder / "README.md"
    if readme.is_file():
        pages[readme] = renewed(readme.read_text(encoding="utf-8"), tables, str(readme))
    return pages


def claims_table(claims: Mapping[str, PaperClaim], found: Mapping[str, ClaimFinding]) -> str:
    """Return a table with a row for each claim. A row has the required interval, the measured value and the verdict.

    claims, found: each claim and its finding, by the name of the claim.
    """
    heads = ("claim", "source", "published", "required", "measured [95 % interval]", "seeds", "p (Holm)", "verdict")
    rows = []
    for name, claim in claims.items():
        finding = found[name]
        p = "" if finding.p is None else f"{finding.p:.2g}"
        measured = (_measured(finding, claim), str(len(finding.values)), p, f"**{finding.verdict}**")
        rows.append((claim.says, claim.source, claim.published, _required(claim), *measured))
    return markdown_table(heads, rows)


def study_table(results: StudyResults) -> str:
    """Return a line about when and on which machine the runs were made, and a table with a row for each cell.

    A row has mean and spread of the loss over seeds, and bytes of state. In studies of equal seconds it also has steps
    and seconds. Other times are left out, because they are not comparable if the machine had other load. Losses that
    are compared with each other have equally many decimals.
    """
    cells = group_by(results.rows, lambda row: tuple(row.labels.values()))
    lengths = ("steps", "seconds") if results.timed else ()
    heads = (*results.rows[0].labels, "learning rate", *lengths, "validation loss", "bytes per parameter")
    losses = {labels: _loss(own) for labels, own in cells.items()}
    panels: dict[tuple[str, ...], list[Summary]] = {}
    for labels, own in cells.items():
        if (loss := losses[labels]) is not None:
            panels.setdefault(_panel(own[0], results.compare), []).append(loss)
    forms = {
        panel: number_format((loss.mean for loss in own), ((loss.spread or 0.0, loss.mean) for loss in own))
        for panel, own in panels.items()
    }
    rows = []
    for labels, own in cells.items():
        form = forms.get(_panel(own[0], results.compare), ".3f")
        rows.append((*labels, *_numbers(own, lengths, format_summary(losses[labels], form))))
    seeds = ", ".join(map(str, sorted({row.seed for row in results.rows})))
    made = "; ".join(f"{key} {value}" for key, value in results.made.items())
    return f"{made}; seeds {seeds}\n\n{markdown_table(heads, rows)}"


def _panel(row: ResultRow, compare: str) -> tuple[str, ...]:
    """Return the labels of a run on all axes but the compared one."""
    return tuple(label for axis, label in row.labels.items() if axis != compare)


def _loss(rows: Sequence[ResultRow]) -> Summary | None:
    """Return mean and spread of the loss. The mean is infinite if a run diverged."""
    losses = [row.numbers.get("val_loss") for row in rows]
    return summarize([math.inf if x is None else x for x in losses])


def _numbers(rows: Sequence[ResultRow], lengths: Sequence[str], loss: str) -> tuple[str, ...]:
    """Return the cells of a row with numbers: learning rate, `lengths`, loss, and bytes of state per parameter.

    A cell is empty if the runs do not have its number.

    rows: results of the runs that the row of the table is about, one for each seed.
    lengths: names of results whose means over the runs are shown: "steps" and "seconds", or none.
    loss: text of the cell for the loss.
    """
    first = rows[0].numbers
    known = [row.numbers["state_bytes_per_parameter"] for row in rows if "state_bytes_per_parameter" in row.numbers]
    size = f"{sum(known) / len(known):.1f}" if known else ""
    means = [fmean(row.numbers[key] for row in rows) for key in lengths]
    return format_rate(first.get("lr"), first.get("edge", "")), *(f"{mean:.0f}" for mean in means), loss, size


def _required(claim: PaperClaim) -> str:
    what = f"{claim.compare} of {claim.metric.replace('_', ' ')}"
    if claim.least is None:
        return f"{what} at most {claim.most:g}"
    return f"{what} at least {claim.least:g}" if claim.most is None else f"{what} {claim.least:g} to {claim.most:g}"


def _measured(finding: ClaimFinding, claim: PaperClaim) -> str:
    sign = "+" if claim.compare == "difference" else ""
    if not math.isfinite(finding.mean):
        lost = sum(not math.isfinite(value) for value in finding.values.values())
        return f"no value with {lost} of {len(finding.values)} seeds"
    if finding.low is None or finding.high is None or finding.low == finding.high:
        return format(finding.mean, sign + number_format((), [(finding.mean, 0.0)]))
    ends = (finding.low, finding.high)
    sizes = (finding.high - finding.low) / 2, max(map(abs, (finding.mean, *ends)))
    form = sign + number_format((), [(size, 0.0) for size in sizes])
    low, high = (format(end, form) for end in ends)
    return f"{finding.mean:{form}} [{low}, {high}]"


def renewed(text: str, tables: Mapping[str, str], where: str) -> str:
    """Return a page with new tables between its markers. Raises RecipeError for a marker of an unknown table.

    where: path of the page, for the error.
    """

    def table(found: re.Match[str]) -> str:
        name = found["name"]
        if name not in tables:
            raise RecipeError(
                f"{where}: the marker '{name}' is not the name of a table; the tables are {', '.join(tables)}"
            )
        return f"{found[1]}{tables[name]}{found[3]}"

    return _MARKED.sub(table, text)
