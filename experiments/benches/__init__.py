"""Benches of single parts: rows from Python, and named facts that can fail. The command is `eigengraft bench`.

rows = bench_roots(sizes=(32, 64), solvers=["eigh", {"kind": "coupled_newton", "eps": 1e-6}])
"""

from __future__ import annotations

from typing import Any

from .bases import Bases as Bases
from .bases import BasisRow as BasisRow
from .bench import Bench as Bench
from .bench import Row as Row
from .bench import load_bench as load_bench
from .bench import write_rows as write_rows
from .facts import Finding as Finding
from .facts import find_facts as find_facts
from .graftings import GraftingRow as GraftingRow
from .graftings import Graftings as Graftings
from .quantizer_rows import QuantizerRow as QuantizerRow
from .quantizers import Quantizers as Quantizers
from .roots import RootRow as RootRow
from .roots import Roots as Roots
from .spectral import PolarRow as PolarRow
from .spectral import Spectral as Spectral
from .statistics import StatisticRow as StatisticRow
from .statistics import Statistics as Statistics
from .storage import StorageBench as StorageBench
from .storage import StorageRow as StorageRow


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
