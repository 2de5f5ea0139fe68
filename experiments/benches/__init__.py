"""Benches of single parts: rows from Python, and named facts that can fail. The command is `eigengraft bench`.

rows = bench_roots(sizes=(32, 64), solvers=["eigh", {"kind": "coupled_newton", "eps": 1e-6}])
"""

from __future__ import annotations

from typing import Any

from .bases.bench import Bases as Bases
from .bases.bench import BasisRow as BasisRow
from .claims.registry import Finding as Finding
from .claims.registry import find_facts as find_facts
from .common.bench import Bench as Bench
from .common.bench import Row as Row
from .common.bench import load_bench as load_bench
from .common.bench import write_rows as write_rows
from .grafting.bench import GraftingRow as GraftingRow
from .grafting.bench import Graftings as Graftings
from .polar.bench import PolarRow as PolarRow
from .polar.bench import Spectral as Spectral
from .quantizers.bench import Quantizers as Quantizers
from .quantizers.rows import QuantizerRow as QuantizerRow
from .roots.bench import RootRow as RootRow
from .roots.bench import Roots as Roots
from .statistics.bench import StatisticRow as StatisticRow
from .statistics.bench import Statistics as Statistics
from .storage.bench import StorageBench as StorageBench
from .storage.bench import StorageRow as StorageRow


def bench_roots(*, quick: bool = False, **fields: Any) -> list[RootRow]:
    """Inverse roots: the rows of `Roots(**fields)`. quick: small settings for all fields that are not given."""
    return load_bench("roots", fields, quick).run()


def bench_bases(*, quick: bool = False, **fields: Any) -> list[BasisRow]:
    """Eigenbases: the rows of `Bases(**fields)`."""
    return load_bench("bases", fields, quick).run()


def bench_statistics(*, quick: bool = False, **fields: Any) -> list[StatisticRow]:
    """Statistics: the rows of `Statistics(**fields)`."""
    return load_bench("statistics", fields, quick).run()


def bench_graftings(*, quick: bool = False, **fields: Any) -> list[GraftingRow]:
    """Magnitudes: the rows of `Graftings(**fields)`."""
    return load_bench("graftings", fields, quick).run()


def bench_spectral(*, quick: bool = False, **fields: Any) -> list[PolarRow]:
    """Polar factors: the rows of `Spectral(**fields)`."""
    return load_bench("spectral", fields, quick).run()


def bench_quantizers(*, quick: bool = False, **fields: Any) -> list[QuantizerRow]:
    """Quantizers: the rows of `Quantizers(**fields)`."""
    return load_bench("quantizers", fields, quick).run()


def bench_storage(*, quick: bool = False, **fields: Any) -> list[StorageRow]:
    """Time of stored recipes over plain ones: the rows of `StorageBench(**fields)`."""
    return load_bench("storage", fields, quick).run()
