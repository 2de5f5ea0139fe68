"""Numbers of a comparison as words and as tables: CSV and Parquet for runs, Markdown and LaTeX for panels.

Markdown and LaTeX are not written by pandas: its `to_markdown` needs a further package, and its `to_latex` does not
split a table that is wider than a page.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any, NamedTuple

from eigengraft.errors import RecipeError, counted

from ..files import make_directory, replacing, write_text
from .comparison import ComparisonPanel, ComparisonRow, all_panels, compare, leaders, twin
from .number_format import number_format
from .records import RESULT_NUMBERS, Abscissa, Records, Run, TunedCell, label_number, learning_rate, read_records
from .seed_statistics import Summary, Target

if TYPE_CHECKING:
    from pandas import DataFrame

_NONE, _MINUS = "\u2013", "\u2212"


def sentences(panel: ComparisonPanel) -> Iterator[str]:
    """Yield sentences about a panel: the best row, the baseline, their difference, and the steps to reach the
    baseline's value.
    """
    best, base, form = panel.best, panel.baseline, panel_format([panel])
    if best is None:
        return
    extreme = "Lowest" if panel.metric.sign > 0 else "Highest"
    if panel.second is None and any(len(row.finals) < len(row.runs) for row in panel.rows):
        yield f"Only {best.title} has complete runs: {panel.metric.title} {format_summary(best.final, form)}."
    else:
        yield f"{extreme} final {panel.metric.title}: {best.title}, {format_summary(best.final, form)}."
    if panel.risen:
        found = [(row.best_evaluation, row) for row in panel.rows if row.ended and row.best_evaluation]
        (value, where), row = min(found, key=lambda pair: panel.metric.sign * pair[0][0].mean)
        yield f"{extreme} best evaluation: {row.title}, {format_summary(value, form)} {where}."
    if edges := [f"{row.title} ({row.edge})" for row in panel.rows if row.edge]:
        yield f"At an end of the numbers that were tried: {', '.join(edges)}; a better number may lie beyond it."
    other = panel.second if best is base else best
    if base is None or base.final is None or other is None:
        return
    shown = other if best is base else base
    yield f"{shown.title}: {format_summary(shown.final, form)}."
    test, p = other.difference, panel.corrected.get(other.label)
    if test is not None and test.half is not None:
        interval = format_difference(other, form)[0]
        seeds = counted(test.n, "paired seed")
        yield f"{other.title} minus {base.title}: {interval}, with a 95 % interval over {seeds}."
    if test is not None and p is not None:
        tests = f", corrected for {len(panel.corrected)} comparisons" if len(panel.corrected) > 1 else ""
        significant = "significant at 5 percent" if p <= 0.05 else "not significant"
        yield f"With {counted(test.n, 'seed')} this difference is {significant} (p = {p:.2g}{tests})."
    elif test is not None and test.n < 2:
        yield "One seed allows no test of this difference."
    if best is base:
        return
    steps = [step for step in best.reached().values() if step is not None]
    if steps and len(steps) == len(best.runs):
        last, mean = max(base.runs[0].evaluations(panel.metric)), sum(steps) / len(steps)
        bounds = len(best.at_first_evaluation())
        when = f"after {'at most ' if bounds else ''}{mean:.0f} of {last} steps"
        if bounds == len(steps):
            when = f"by its first evaluation, step {mean:.0f} or earlier"
        yield f"{best.title} reaches {base.title}'s final value {when}."


class TableCell(NamedTuple):
    """A cell of a table: its text, a second line, and True for bold type. Only HTML pages show the second line."""

    text: str
    more: str = ""
    bold: bool = False


class TextTable(NamedTuple):
    """A table of texts.

    title: text above the table.
    caption: sentences about its contents; "" for none.
    note: sentences about its marks, tests and runs; "" for none.
    heads: titles of the columns.
    rows: cells of each row.
    """

    title: str
    caption: str
    note: str
    heads: list[str]
    rows: list[list[TableCell]]


def grid_of(records: Records) -> TextTable | None:
    """Return a table of the final metrics of all cells of a study.

    A row is a label of the compared axis, a column a label of the other axis. The best mean of the table is marked, and
    so are the means that are not significantly worse. If tasks or data differ between cells, each column has its own
    best mean.

    Return None unless exactly two axes, one of them the compared axis, have several labels. Return None, too, if no run
    has started, or if runs of one cell must not be averaged.
    """
    several = [axis for axis, labels in records.axes.items() if len(labels) > 1]
    panels = compare(records)
    apart = any(run.variant for run in records.runs)
    if len(several) != 2 or records.compare not in several or apart or not any(panel.begun for panel in panels):
        return None
    (column,) = (axis for axis in several if axis != records.compare)
    together = len({run.data for run in records.runs if run.config}) < 2
    groups = [[row for panel in panels for row in panel.rows]] if together else [list(panel.rows) for panel in panels]
    found = [leaders(group, records.metric) for group in groups]
    best, equal = {id(some[0]) for some in found if some}, {id(row) for some in found for row in some}
    rows: dict[str, list[TableCell]] = {row.label: [] for panel in panels for row in panel.rows}
    for panel in panels:
        own, form = {row.label: row for row in panel.rows}, panel_format(panels if together else [panel])
        for label, cells in rows.items():
            row = own.get(label)
            text = _NONE if row is None else format_summary(row.final, form) + (" *" if id(row) in best else "")
            cells.append(TableCell(text, bold=row is not None and row.tested and id(row) in equal))
    heads = [records.compare, *(panel.rows[0].runs[0].labels[column] for panel in panels)]
    caption = f"Final {records.metric.title} of each {records.compare} (rows) and {column} (columns)."
    note = marks(groups, "all cells" if together else "each column")
    return TextTable(records.name, caption, note, heads, [[TableCell(label), *cells] for label, cells in rows.items()])


def marks(groups: Iterable[Sequence[ComparisonRow]], place: str) -> str:
    """Return a sentence that explains which means of a table are marked: the best ones, and those not significantly
    worse.

    groups: rows among which a best mean is marked; several groups if, for example, each column has a best mean.
    place: name of a group in the sentence, as in "the best mean of each column".
    """
    if not any(row.tested for group in groups for row in group):
        return (
            f"* is the best mean of {place}. With three seeds or more, means that a test does not distinguish from it "
            "are marked."
        )
    test = "a paired t-test (5 percent, Holm) does not distinguish from it"
    return f"* is the best mean of {place}. In bold: this mean, and those that {test}."


def rise_notice(panel: ComparisonPanel) -> str:
    """Return sentences about rows whose metric ended much worse than its best evaluation, "" if there are none."""
    if not panel.risen:
        return ""
    rows = ", ".join(f"{row.title} ({len(row.rises)} of {counted(len(row.runs), 'run')})" for row in panel.risen)
    text = f"The {panel.metric.title} ended much worse than its best evaluation, as in overfitting or an unstable run: "
    text += f"{rows}. Compare the column of best evaluations, too."
    if panel.baseline is not None and panel.baseline.rises:
        text += f" Steps to the final value of {panel.baseline.title} are left out: its curve passes this value and "
        text += "returns to it."
    return text


def format_best(row: ComparisonRow, form: str) -> tuple[str, str]:
    """Return two texts: mean and spread of the best evaluation of each run, and the range of their steps."""
    best = row.best_evaluation
    return (_NONE, "") if best is None else (format_summary(best[0], form), best[1])


def format_reached(row: ComparisonRow, along: Abscissa) -> tuple[str, str]:
    """Return two texts: the mean step or second at which seeds reach the baseline's final value, and how many reach it.

    The first text begins with "≤" if a seed reaches the value by its first evaluation. The second text is empty if all
    seeds reach the value.
    """
    found = row.reached(along)
    hits = [value for value in found.values() if value is not None]
    if not hits:
        return ("never" if found else _NONE), ""
    mean = sum(hits) / len(hits)
    bound = "\u2264 " if row.at_first_evaluation(along) else ""
    return f"{bound}{mean:{'.0f' if along == 'steps' else '.1f'}}", "" if len(hits) == len(
        found
    ) else f"{len(hits)} of {len(found)} seeds"


_WORST = {
    "update_ratio_peak": "largest update / weight",
    "weight_growth": "largest growth of a weight",
    "gradient_norm": "largest gradient at the end",
    "zero_gradients": "most steps with gradient 0",
}
"""Titles of the columns in the table of worst layers, by the name of the measure."""


def worst_layers(panel: ComparisonPanel) -> TextTable | None:
    """Return a table of the worst layer of each measure: a row for each label, and in a cell the value and the layer.

    A value is the largest over layers and seeds. Returns None if no run has recorded its layers.
    """
    rows = [[TableCell(row.title), *(_worst(row, measure) for measure in _WORST)] for row in panel.rows]
    rows = [row for row in rows if any(cell.text != _NONE for cell in row[1:])]
    return TextTable("", "", "", ["", *_WORST.values()], rows) if rows else None


def _worst(row: ComparisonRow, measure: str) -> TableCell:
    found = [(value, layer) for run in row.runs for layer, value in run.layers.get(measure, {}).items()]
    if not found:
        return TableCell(_NONE)
    value, layer = max(found)
    if measure == "zero_gradients":
        return TableCell(f"{100 * value:.0f} %", layer if value else "")
    return TableCell("not finite" if math.isinf(value) else f"{value:.3g}", layer)


def tuned_table(tuned: Sequence[TunedCell]) -> TextTable | None:
    """Return a table of searches: the best values, and all tried values with their mean metrics. * marks the best.

    Returns None if there was no search.
    """
    rows = []
    for one in tuned:
        tried = []
        for trial in one.tried:
            stopped = "" if trial.stopped is None else f" at step {trial.stopped}, where it was stopped"
            best = " *" if trial.values == one.values else ""
            mean = "diverged" if trial.mean is None else f"{trial.mean:.5g}"
            tried.append(f"{_joined(trial.values)}: {mean}{stopped}{best}")
        rows.append([TableCell(one.cell), TableCell(_joined(one.values)), TableCell("; ".join(tried))])
    return TextTable("", "", "", [f"{', '.join(tuned[0].values)} of", "best", "tried"], rows) if tuned else None


def _joined(values: Mapping[str, Any]) -> str:
    return ", ".join(map(str, values.values()))


def format_length(row: ComparisonRow) -> tuple[str, str]:
    """Return two texts: the mean steps, and the mean training seconds corrected for other load of the machine."""
    ended = [run.seconds()[-1] for run in row.runs if run.result]
    return format_number(row.mean("steps"), ".0f"), format_number(sum(ended) / len(ended) if ended else None)


def panel_format(panels: Sequence[ComparisonPanel]) -> str:
    """Return one number format for all values of the compared metric in these panels.

    The values are means, spreads, differences and intervals, and best evaluations if a panel shows them.
    """
    rows = [row for panel in panels for row in panel.rows]
    finals = [row.final for row in rows if row.final is not None]
    finals += [best[0] for panel in panels if panel.risen for row in panel.rows if (best := row.best_evaluation)]
    errors = [(final.spread, final.mean) for final in finals if final.spread is not None]
    for row in rows:
        if row.difference is not None and row.final is not None:
            half = row.difference.half or 0.0
            errors += [(half, row.final.mean), (max(half, abs(row.difference.mean)), row.final.mean)]
    return number_format([final.mean for final in finals], errors)


def format_summary(summary: Summary | None, form: str) -> str:
    """Return mean and spread as text; "diverged" if the mean is not finite, and a dash for None.

    form: format of both numbers, such as ".3f".
    """
    if summary is None:
        return _NONE
    if not math.isfinite(summary.mean):
        return "diverged"
    spread = "" if summary.spread is None else f" \u00b1 {summary.spread:{form}}"
    return f"{summary.mean:{form}}{spread}"


def format_difference(row: ComparisonRow, form: str) -> tuple[str, str]:
    """Return two texts: the mean difference from the baseline with its 95 % interval, and its test.

    The second text has t, the p that is not corrected for other rows, and a bootstrap interval if there are enough
    pairs.

    form: format of the difference, such as ".3f".
    """
    difference = row.difference
    if difference is None:
        return _NONE, "" if row.comparable else "other task, code or data"
    mean = signed(difference.mean, form)
    if difference.t is None or difference.half is None:
        return mean, ""
    ends = [signed(difference.mean + side * difference.half, form) for side in (-1, 1)]
    t = f"{difference.t:.1f}".replace("-", _MINUS)
    drawn = ""
    if difference.bootstrap is not None:
        drawn = f"\nbootstrap [{', '.join(signed(end, form) for end in difference.bootstrap)}]"
    return f"{mean} [{ends[0]}, {ends[1]}]", f"t = {t}, p = {difference.p:.2g}{drawn}"


def signed(value: float, form: str) -> str:
    """Return a number with its sign, in the format `form`, such as ".3f". A negative number has a typographic minus
    sign; the minus of an exponent stays a hyphen.
    """
    text = format(value, f"+{form}")
    return text.replace("-", _MINUS, 1) if text.startswith("-") else text


def format_number(value: float | None, form: str = ".1f") -> str:
    """Return the number in the format of its column, a dash for None."""
    return _NONE if value is None else format(value, form)


def format_ratio(value: float | None, base: float | None) -> str:
    """Return `value / base` as a factor, an empty text if one is None or 0."""
    return "" if not value or not base else f"{value / base:.2f}\u00d7"


def format_rate(rate: float | None, edge: str = "") -> str:
    """Return a learning rate as text, such as "0.01 (largest tried)".

    rate: the rate. None: unknown, for which the text is empty.
    edge: "least" or "largest" if the rate is at that end of the tried rates, else "".
    """
    return "" if rate is None else f"{rate:g}" + (f" ({edge} tried)" if edge else "")


_LATEX = {
    "\\": r"\textbackslash{}",
    "{": r"\{",
    "}": r"\}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "\u00a0": "~",
    "\u2212": "$-$",
    "\u00b1": r"$\pm$",
    "\u2013": "--",
    "\u2019": "'",
    "\u2264": r"$\leq$",
    "\u00d7": r"$\times$",
    "\u2020": r"$\dagger$",
    **{sign: f"\\{sign}" for sign in "&%$#_"},
}


def write_tables(records: Records, folder: Path) -> None:
    """Write tables.md and tables.tex with the table of all cells (`grid_of`), if there is one, and a table for each
    comparison in which a run has started.

    The description of the study begins the caption of the first table. LaTeX needs the package booktabs.
    """
    panels = [panel for panel in all_panels(records) if panel.begun]
    grid = grid_of(records)
    tables = [*([] if grid is None else [grid]), *(panel_table(panel, records) for panel in panels)]
    if tables and records.description:
        tables[0] = tables[0]._replace(caption=f"{_sentence(records.description)} {tables[0].caption}".strip())
    for name, form in (("tables.md", markdown), ("tables.tex", latex)):
        write_text(folder / name, "\n\n".join(map(form, tables)) + "\n")


def _sentence(text: str) -> str:
    """Return a text with a full stop at its end, if it ends without a mark."""
    return text if text.endswith((".", "?", "!")) else f"{text}."


def markdown(table: TextTable) -> str:
    """Return a table of GitHub's Markdown with its title above."""
    text = "".join(f" {_plain(text)}" for text in (table.caption, table.note) if text)
    rows = [[f"**{_plain(text)}**" if bold else _plain(text) for text, _, bold in cells] for cells in table.rows]
    return f"**{_plain(table.title)}.**{text}\n\n{markdown_table(list(map(_plain, table.heads)), rows)}".rstrip("\n")


def markdown_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown. Bars inside cells are escaped, other marks are not."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)


_LINE = 86
"""Largest width of a LaTeX table, in characters with two for each column. In the size of `latex` this is about 310 pt,
and a page of the class `article` has 345 pt.
"""
_HEAD = 10
"""Least width of the lines, in characters, into which the title of a column is broken."""


def latex(table: TextTable) -> str:
    """Return a LaTeX table with its caption and its label, `tab:` and the words of its title joined by hyphens.

    The note is a paragraph below the table, so that a paper can leave it out or move it.

    Columns that do not fit on a page follow in further tables, each after the first column. The labels of these tables
    end in -2, -3 and so on. So a paper can use the first table alone. Further tables have about equal widths. An empty
    cell is a dash.
    """
    columns = []
    for place, head in enumerate(table.heads):
        cells = [row[place] for row in table.rows]
        widths = [len(cell.text) for cell in cells]
        lines = wrap(head.replace(" %", "\u00a0%"), max(_HEAD, *widths), break_long_words=False) or [""]
        columns.append((2 + max(*map(len, lines), *widths), lines, cells))
    first, *others = columns
    blocks = _pages(others, _LINE - first[0])
    further = others[len(blocks[0]) :]
    for limit in range(_LINE - first[0], max((width for width, *_ in further), default=_LINE) - 1, -1):
        if len(narrower := _pages(further, limit)) < len(blocks):
            blocks[1:] = narrower
    title, label = _escaped(table.title), "-".join(re.findall(r"[a-z0-9.]+", table.title.lower()))
    captions = {label: f"{title}. {_escaped(table.caption)}".strip()}
    for number in range(2, len(blocks) + 1):
        captions[f"{label}-{number}"] = rf"{title}, further columns of Table~\ref{{tab:{label}}}."
    parts = list[str]()
    for (own, caption), block in zip(captions.items(), blocks, strict=True):
        begin = ["\\begin{table}", "\\centering", f"\\caption{{{caption}}}", f"\\label{{tab:{own}}}"]
        begin.append("\\footnotesize\\setlength{\\tabcolsep}{4pt}")
        tabular = _tabular([(lines, cells) for _, lines, cells in (first, *block)])
        if table.note and not parts:  # only the first table has the note
            tabular += f"\n\n\\smallskip\\begin{{minipage}}{{\\linewidth}}{_escaped(table.note)}\\end{{minipage}}"
        parts.append("\n".join([*begin, tabular, "\\end{table}"]))
    return "\n\n".join(parts)


_Column = tuple[int, list[str], list[TableCell]]
"""Width of a column in characters, lines of its title, and its cells."""


def _pages(columns: Sequence[_Column], limit: int) -> list[list[_Column]]:
    """Split columns into lists whose widths sum to at most `limit`. A column that is wider has a list of its own."""
    found, width = [list[_Column]()], 0
    for column in columns:
        if found[-1] and width + column[0] > limit:
            found.append([])
            width = 0
        found[-1].append(column)
        width += column[0]
    return found


def _tabular(columns: Sequence[tuple[list[str], list[TableCell]]]) -> str:
    """Return columns as a LaTeX tabular. A column is given by the lines of its title and by its cells."""
    stacked = [r"\\".join(map(_escaped, lines)) for lines, _ in columns]
    heads = [
        rf"\begin{{tabular}}[b]{{@{{}}r@{{}}}}{head}\end{{tabular}}" if len(lines) > 1 else head
        for head, (lines, _) in zip(stacked, columns, strict=True)
    ]
    rows = zip(*(cells for _, cells in columns), strict=True)
    body = [
        [rf"\textbf{{{_escaped(text)}}}" if bold else _escaped(text or _NONE) for text, _, bold in row] for row in rows
    ]
    head, *lines = [" & ".join(cells) + r" \\" for cells in (heads, *body)]
    begin = rf"\begin{{tabular}}{{l{'r' * (len(columns) - 1)}}}"
    return "\n".join([begin, "\\toprule", head, "\\midrule", *lines, "\\bottomrule", "\\end{tabular}"])


def panel_table(panel: ComparisonPanel, records: Records) -> TextTable:
    """Return the table of one comparison, with a row for each compared label, such as each recipe."""
    base, target, sign, form = panel.baseline, records.target, busy_sign(panel), panel_format([panel])
    begun = [row for row in panel.rows if row.label in panel.configs]
    rates_are_titles = panel.axis == records.rates and all(_labeled_rate(row, panel, records) for row in begun)
    base_title = "" if base is None else _method(base, panel, records)
    columns: list[tuple[str, Callable[[ComparisonRow], tuple[Any, ...]]]] = [
        (panel.axis, lambda row: (_method(row, panel, records),)),
        *([] if rates_are_titles else [("learning rate", lambda row: (_rate(row, panel, records),))]),
        (f"final {panel.metric.title}", lambda row: _final(row, panel, form)),
    ]
    if base is not None:
        interval = f"difference from {base_title} [95 % interval]"
        columns.append((interval, lambda row: format_difference(row, form) if row.baseline else ("",)))
        columns.append(("p (Holm)" if len(panel.corrected) > 1 else "p", lambda row: (_corrected(row, panel),)))
    if panel.risen:
        columns.append(("best evaluation", lambda row: (" ".join(format_best(row, form)),)))
    if panel.reports_accuracy:
        columns.append(("accuracy", _summaries(panel, "val_accuracy", small=False)))
    columns += [(name, _summaries(panel, name)) for name in panel.further]
    columns.append(("seeds", lambda row: (_seeds(row),)))
    if base is not None and not base.rises:
        goal = f"{base_title}\u2019s final value"
        columns.append((f"steps to {goal}", lambda row: format_reached(row, "steps")))
        columns.append((f"seconds to {goal}{sign}", lambda row: format_reached(row, "seconds")))
    if target is not None:
        columns.append((f"steps to {panel.metric.title} {target.value:g}", lambda row: _to_target(row, target)))
    if records.equal == "seconds":
        columns.append(("steps", lambda row: format_length(row)[:1]))
        columns.append((f"seconds{sign}", lambda row: format_length(row)[1:]))
    columns.append((f"step time (ms){sign}", _step_ms))
    columns.append((f"optimizer time (ms){sign}", lambda row: (format_number(row.mean("optimizer_ms")),)))
    state = "state (bytes per parameter)"
    columns.append((state, lambda row: (format_number(row.mean("state_bytes_per_parameter")),)))
    title = panel.title if panel.title == records.name else f"{records.name}: {panel.title}"
    seeds = {len(row.finals) for row in panel.rows}
    what = f"Final {panel.metric.title}, mean \u00b1 sample standard deviation over "
    caption = what + (counted(seeds.pop(), "seed") if len(seeds) == 1 else "seeds") + "."
    notes = [marks([panel.rows], "the table")] if panel.best else []
    if panel.corrected:
        test = "Differences are paired by seed. p is that of a two-sided t-test"
        if len(panel.corrected) > 1:
            test += f", corrected for {len(panel.corrected)} comparisons (Holm). Intervals are those of the same test, "
            test += "each at 95 % for itself: they are not corrected, and one that excludes 0 may have a p above 0.05"
        notes.append(f"{test}.")
    if same := [one.title for one in compare(records) if twin(one, records) is panel]:
        notes.append(f"These are all runs of {', '.join(same)}, which has no table of its own.")
    notes += [BUSY] if panel.busy else []
    rows = [[TableCell(*cell(row)) for _, cell in columns] for row in panel.rows]
    return TextTable(title, caption, " ".join(notes), [head for head, _ in columns], rows)


def _final(row: ComparisonRow, panel: ComparisonPanel, form: str) -> TableCell:
    diverged = f" ({row.diverged} of {len(row.runs)} diverged)" if row.diverged else ""
    text = format_summary(row.final, form) + (" *" if row is panel.best else "") + diverged
    return TableCell(text, bold=row.tested and row in panel.leaders)


def _summaries(panel: ComparisonPanel, field: str, small: bool = True) -> Callable[[ComparisonRow], tuple[str]]:
    """Return a function from a row to its cell in a column with the mean and the spread of a field over seeds.

    small: if False, small means do not lead to more than three decimals. Small spreads still do.
    """
    found = [own for row in panel.rows if (own := row.summary(field)) is not None]
    errors = [(own.spread, own.mean) for own in found if own.spread is not None]
    form = number_format([own.mean for own in found] if small else [], errors)
    return lambda row: (format_summary(row.summary(field), form),)


def _labeled_rate(row: ComparisonRow, panel: ComparisonPanel, records: Records) -> bool:
    """Return True if the label of a row on the axis of learning rates is the learning rate of its runs.

    The two differ if, for example, the axis sets the learning rate of only one layer.
    """
    label = row.runs[0].labels.get(records.rates, "")
    return label_number(label) == learning_rate(panel.configs.get(row.label, {}))


def _method(row: ComparisonRow, panel: ComparisonPanel, records: Records) -> str:
    """Return the name of a row: its method if another column shows its learning rate, else its title."""
    return row.method if row.method and _labeled_rate(row, panel, records) else row.title


def _rate(row: ComparisonRow, panel: ComparisonPanel, records: Records) -> str:
    edge = records.rate_edge(row.runs[0].labels) if row.runs else ""
    edge = edge or (row.edge if records.rates else "")
    return format_rate(learning_rate(panel.configs.get(row.label, {})), edge)


def _corrected(row: ComparisonRow, panel: ComparisonPanel) -> str:
    p = panel.corrected.get(row.label)
    return "" if p is None else f"{p:.2g}"


def _seeds(row: ComparisonRow) -> str:
    """Return the number of runs that have ended. If some have not ended, return it with the number of all runs."""
    ended, runs = len(row.finals), len(row.runs)
    return str(ended) if ended == runs else f"{ended} of {runs}"


def _to_target(row: ComparisonRow, target: Target) -> tuple[str, str]:
    steps = row.first(target)
    return str(steps or "never"), format_ratio(steps, row.baseline.first(target) if row.baseline else None)


def _step_ms(row: ComparisonRow) -> tuple[str, str]:
    own = row.mean("step_ms")
    return format_number(own), format_ratio(own, row.baseline.mean("step_ms") if row.baseline else None)


BUSY = "\u2020 The machine had other load, so that times of methods cannot be compared."
"""Meaning of the mark of `busy_sign`."""


def busy_sign(panel: ComparisonPanel) -> str:
    """Return a mark for columns of times that are not comparable, because the machine had other load; else ""."""
    return " \u2020" if panel.busy else ""


def _plain(text: str) -> str:
    """Return a text in which all marks of Markdown except bars are escaped."""
    return re.sub(r"([*_<>`\\])", r"\\\1", text)


def _escaped(text: str) -> str:
    return "".join(_LATEX.get(sign, sign) for sign in text)


def write_parquet(records: Records, folder: Path) -> list[Path]:
    """Write runs.parquet with a row for each run, as in runs.csv, and metrics.parquet with a row for each logged step.

    Labels, seed and status are columns of both files. Numbers are not rounded, and missing numbers are null. Raises
    RecipeError if pyarrow is not installed.
    """
    try:
        import pyarrow  # noqa: F401
    except ImportError:
        raise RecipeError("--parquet: pyarrow is not installed; run `pip install pyarrow`") from None
    make_directory(folder)
    frames = {"runs.parquet": runs_frame(records), "metrics.parquet": _metrics_frame(records)}
    for name, frame in frames.items():
        with replacing(folder / name) as temporary:
            frame.to_parquet(temporary, index=False)
    return [folder / name for name in frames]


def load_runs(directory: str | Path) -> DataFrame:
    """Return a data frame with a row for each run of a directory.

    Args:
        directory: directory of a study, or of studies and single runs, finished or not.

    Returns:
        A frame with the columns of runs.csv: labels as `axis.NAME`, `seed`, `status`, `peak_lr`, values found by a
        search as `tuned.PATH`, the numbers of result.json, and metrics of the task as `val.NAME`. The last column,
        `directory`, is the path of the run's directory. Missing numbers are NaN.

    Raises:
        ValueError: no run has started.
    """
    records = read_records(Path(directory))
    return runs_frame(records).assign(directory=[str(run.directory) for run in records.runs])


def load_metrics(directory: str | Path) -> DataFrame:
    """Return a data frame with a row for each row of metrics of all runs of a directory.

    Args:
        directory: directory of a study, or of studies and single runs, finished or not.

    Returns:
        A frame with the columns `axis.NAME` (the labels), `seed` and `status` of the run, and those of metrics.jsonl. A
        column of metrics.jsonl with the name of one of these is called `logged.NAME`.

    Raises:
        ValueError: no run has started.
    """
    return _metrics_frame(read_records(Path(directory)))


def runs_frame(records: Records) -> DataFrame:
    """Return a data frame with a row for each run, see `load_runs`."""
    from pandas import DataFrame

    return DataFrame([run_row(run, records) for run in records.runs])


def _metrics_frame(records: Records) -> DataFrame:
    from pandas import DataFrame

    rows = []
    for run in records.runs:
        own = _identity(run, records)
        rows += [{**own, **{f"logged.{k}" if k in own else k: v for k, v in row.items()}} for row in run.rows]
    return DataFrame(rows)


def run_row(run: Run, records: Records) -> dict[str, Any]:
    """Return all table entries of a run by column.

    Labels have columns `axis.NAME`, values found by a search have columns `tuned.PATH`, and metrics of the task have
    columns `val.NAME`. The prefix keeps the label on an axis called `lr` or `steps` apart from the measured number of
    that name. `peak_lr` is the peak learning rate of the run.
    """
    search = records.search(run.labels)
    values = {} if search is None else search.values
    tuned = {f"tuned.{path}": values.get(path) for one in records.tuned for path in one.values}
    numbers = {column: run.result.get(column) for column in RESULT_NUMBERS}
    return {**_identity(run, records), "peak_lr": learning_rate(run.config), **tuned, **numbers, **run.metrics}


def _identity(run: Run, records: Records) -> dict[str, Any]:
    """Return the columns that identify a run: its labels, its seed, its variant if any run has one, and its status."""
    apart = {"variant": run.variant} if any(one.variant for one in records.runs) else {}
    labels = {f"axis.{axis}": run.labels.get(axis) for axis in records.axes}
    return {**labels, "seed": run.seed, **apart, "status": run.status(records.metric)}
