"""Benches of components and of complete steps, one file for each bench.

rows = run_bench("roots", sizes=(32, 64), solvers=["eigh", {"kind": "coupled_newton", "eps": 1e-6}])
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .bases import BasisBench as BasisBench
from .bench import Bench as Bench
from .bench import load_bench as load_bench
from .bench import read_bench as read_bench
from .bench import write_rows as write_rows
from .budget import BudgetBench as BudgetBench
from .polar import PolarBench as PolarBench
from .quantizers import QuantizerBench as QuantizerBench
from .roots import RootBench as RootBench
from .statistics import StatisticBench as StatisticBench
from .step import StepBench as StepBench
from .view import Row as Row


def run_bench(kind: str, *, quick: bool = False, more: Sequence[Any] = (), **fields: Any) -> list[Row]:
    """Run a bench and return its rows, which are dictionaries.

    Args:
        kind: Name of the bench: roots, bases, statistics, polar, quantizers, budget, storage or step.
        quick: If True, fields that are not given have the small values of the quick run.
        more: Further candidates, in addition to those of the bench.
        **fields: Fields of the bench, as in its YAML.

    Returns:
        One row for each measurement. The attribute `columns` of the bench describes the numbers of a row.

    Raises:
        RecipeError: The bench, a field or a candidate is unknown, or a field has a value that is not allowed.
    """
    declared = {**read_bench(kind), **fields}
    return load_bench(declared.pop("kind"), declared, quick, more).run()
