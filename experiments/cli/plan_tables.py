"""Tables of plans: a row per rank, or a row per number of ranks, and remarks beside the tables."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from rich import box
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from eigengraft.optimizers.plan.plan import Plan
from eigengraft.optimizers.plan.traffic import Traffic

MAX_ROWS = 16
"""Largest number of ranks with a row each."""


def columns(unit: str) -> list[tuple[str, Callable[[Plan], Any], str]]:
    """(title, values `[R]`, unit) of every column."""
    return [
        ("blocks", lambda plan: plan.blocks, ""),
        ("state", lambda plan: plan.state, "B"),
        ("work per step", lambda plan: plan.work, unit),
        ("work / mean", lambda plan: plan.work / (plan.work.mean() or 1.0), "x"),
        ("gradients sent", lambda plan: plan.traffic["gradients"].sent, "B"),
        ("received", lambda plan: plan.traffic["gradients"].received, "B"),
        ("updates sent", lambda plan: plan.traffic["updates"].sent, "B"),
        ("received", lambda plan: plan.traffic["updates"].received, "B"),
        ("messages", lambda plan: sum(traffic.messages for traffic in _everywhere(plan)), ""),
        ("buffers", lambda plan: sum(traffic.buffers for traffic in _everywhere(plan)), "B"),
    ]


def _everywhere(plan: Plan) -> list[Traffic]:
    """The messages of a step whatever the backend is."""
    return [traffic for kind, traffic in plan.traffic.items() if kind != "synchronization"]


def ranks_table(plan: Plan, title: str, unit: str) -> Table:
    """A row per rank; for many ranks the least, the median and the largest of each column."""
    told = [(name, np.asarray(values(plan)), of) for name, values, of in columns(unit)]
    ranks = len(plan.work)
    table = _table(title, ["rank", *(name for name, _, _ in told)])
    if ranks <= MAX_ROWS:
        for rank in range(ranks):
            _row(table, str(rank), ((values[rank], of) for _, values, of in told))
    else:
        for name, choose in (("least", np.min), ("median", np.median), ("largest", np.max)):
            _row(table, name, ((choose(values), of) for _, values, of in told))
    _row(table, "all", ((values.sum(), of) if of != "x" else (None, of) for _, values, of in told))
    return table


def growth(plans: Sequence[Plan], unit: str) -> Table:
    """A row per number of ranks, in Markdown: the largest value over ranks of each column, and the part of an interval
    that ranks need not spend waiting."""
    titles = ["ranks", "state", "/ mean", f"{unit} per step", "/ mean", "at best", "efficiency"]
    sent = ["gradients sent", "received", "updates sent", "received", "messages", "buffers"]
    table = _table("", [*titles, *sent], box.MARKDOWN)
    for plan in plans:
        told = [(np.asarray(values(plan)).max(), of) for _, values, of in columns(unit)]
        found = plan.state_imbalance, plan.imbalance, plan.least_imbalance, plan.balance.efficiency
        ratios = [(ratio, "x") for ratio in found]
        _row(table, str(len(plan.work)), [told[1], ratios[0], told[2], *ratios[1:], *told[4:]])
    return table


def remarks(plan: Plan, unit: str) -> list[str]:
    """Imbalance, exceptions and agreement, which the table does not show."""
    home = [name for name, share in plan.placements.items() if share.owners is None]
    agreement = plan.traffic["agreement"]
    lines = [
        f"imbalance (largest / mean) of work {plan.imbalance:.3f}, at best {plan.least_imbalance:.3f}: the "
        f"busiest rank has at least {amount(plan.bound, unit)}, however blocks are assigned; "
        f"of state {plan.state_imbalance:.3f}",
        f"critical path of {plan.interval} steps, each as long as its busiest rank works: "
        f"{amount(plan.balance.critical_path, unit)}, at best {amount(plan.balance.least, unit)}: efficiency "
        f"{plan.balance.efficiency:.3f}",
        "messages: to other ranks, summed over the collectives of a step; buffers: bytes that these read and write",
    ]
    if plan.advice is not None:
        better = " ".join(f"{name}={plan.advice.at_once}" for name in plan.advice.fields)
        lines.append(
            f"ranks wait for the one that refreshes: {better} gives an efficiency of "
            f"{plan.advice.balance.efficiency:.3f}, in another trajectory (that of one process with the same value)"
        )
    if home:
        lines.append(
            f"{len(home)} of {len(plan.placements)} parameters are updated by the ranks that hold them and send nothing"
        )
    if len(plan.work) > 1:
        before = amount(int(plan.traffic["synchronization"].sent[0]), "B")
        lines.append(
            f"agreement on gradients: {amount(int(agreement.sent[0]), 'B')} per rank, in an all-reduce (ring); before "
            f"it, with gloo, {before} in an all-to-all"
        )
    return lines


def amount(value: float | None, unit: str) -> str:
    """A number with three digits and a prefix in powers of 1000, such as 1.62 GB; counts in full."""
    if value is None:
        return ""
    if unit in ("", "x"):
        return f"{value:,.0f}" if unit == "" else f"{value:.3f}"
    prefixes = ("", "k", "M", "G", "T", "P", "E")
    power = 0
    while abs(value) >= 999.5 and unit != "ms" and power < len(prefixes) - 1:
        value, power = value / 1000, power + 1
    return f"{value:.3g} {prefixes[power]}{unit}"


def _table(title: str, names: Iterable[str], frame: box.Box = box.SIMPLE_HEAD) -> Table:
    table = Table(box=frame, title=title or None, title_justify="left", title_style="bold")
    for name in names:
        table.add_column(name, justify="right")
    return table


def _row(table: Table, name: str, cells: Iterable[tuple[Any, str]]) -> None:
    table.add_row(Text(name), *(Text(amount(None if value is None else float(value), of)) for value, of in cells))
