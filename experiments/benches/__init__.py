"""Benches of components and of whole steps, a folder each, and claims that can fail. Command: `eigengraft bench`.

rows = bench_roots(sizes=(32, 64), solvers=["eigh", {"kind": "coupled_newton", "eps": 1e-6}])
"""

from __future__ import annotations

from typing import Any

from .bases.bench import BasisBench as BasisBench
from .bases.rows import BasisRow as BasisRow
from .claims.registry import Finding as Finding
from .claims.registry import find_claims as find_claims
from .common.bench import Bench as Bench
from .common.bench import load_bench as load_bench
from .common.results import BenchRow as BenchRow
from .common.results import write_rows as write_rows
from .grafting.bench import GraftingBench as GraftingBench
from .grafting.rows import GraftingRow as GraftingRow
from .polar.bench import PolarBench as PolarBench
from .polar.rows import PolarRow as PolarRow
from .quantizers.bench import QuantizerBench as QuantizerBench
from .quantizers.rows import QuantizerRow as QuantizerRow
from .roots.bench import RootBench as RootBench
from .roots.rows import RootRow as RootRow
from .statistics.bench import StatisticBench as StatisticBench
from .statistics.rows import StatisticRow as StatisticRow
from .steps.ranks.bench import RankBench as RankBench
from .steps.ranks.rows import RankRow as RankRow
from .steps.step.bench import StepBench as StepBench
from .steps.step.rows import StepRow as StepRow
from .steps.storage.bench import StorageBench as StorageBench
from .steps.storage.rows import StorageRow as StorageRow


def bench_roots(*, quick: bool = False, **fields: Any) -> list[RootRow]:
    """Rows of `RootBench(**fields)`: inverse roots. With `quick`, fields that are not given have small settings."""
    return load_bench("roots", fields, quick).run()


def bench_bases(*, quick: bool = False, **fields: Any) -> list[BasisRow]:
    """Rows of `BasisBench(**fields)`: eigenbases."""
    return load_bench("bases", fields, quick).run()


def bench_statistics(*, quick: bool = False, **fields: Any) -> list[StatisticRow]:
    """Rows of `StatisticBench(**fields)`: statistics."""
    return load_bench("statistics", fields, quick).run()


def bench_grafting(*, quick: bool = False, **fields: Any) -> list[GraftingRow]:
    """Rows of `GraftingBench(**fields)`: magnitudes."""
    return load_bench("grafting", fields, quick).run()


def bench_polar(*, quick: bool = False, **fields: Any) -> list[PolarRow]:
    """Rows of `PolarBench(**fields)`: polar factors."""
    return load_bench("polar", fields, quick).run()


def bench_quantizers(*, quick: bool = False, **fields: Any) -> list[QuantizerRow]:
    """Rows of `QuantizerBench(**fields)`: quantizers."""
    return load_bench("quantizers", fields, quick).run()


def bench_storage(*, quick: bool = False, **fields: Any) -> list[StorageRow]:
    """Rows of `StorageBench(**fields)`: time of stored recipes over plain ones."""
    return load_bench("storage", fields, quick).run()


def bench_ranks(*, quick: bool = False, **fields: Any) -> list[RankRow]:
    """Rows of `RankBench(**fields)`: waiting of ranks for each other."""
    return load_bench("ranks", fields, quick).run()


def bench_step(*, quick: bool = False, **fields: Any) -> list[StepRow]:
    """Rows of `StepBench(**fields)`: steps of recipes and of other libraries in turn."""
    return load_bench("step", fields, quick).run()
