"""The bench of ranks: paths and efficiencies counted by hand, one launch of real processes, and what is refused."""

from multiprocessing import Pipe
from typing import Any

import pytest

from eigengraft.errors import RecipeError
from eigengraft.experiments.benches import Row, load_bench
from eigengraft.experiments.benches.ranks import RankBench, answer, efficiency_of, path_of
from eigengraft.experiments.benches.view import lay_out, lines_of

from ..processes import fork_what_is_spawned
from ..refusals import refused

pytestmark = pytest.mark.slow

TINY: dict[str, Any] = {"layers": 1, "width": 8, "intervals": 1, "ranks": [1, 2]}


def bench_of(**fields: Any) -> RankBench:
    bench = load_bench("ranks", {**TINY, **fields})
    assert isinstance(bench, RankBench)
    return bench


def test_a_step_lasts_as_long_as_its_busiest_rank() -> None:
    busy = [[1.0, 5.0, 1.0, 1.0], [2.0, 1.0, 1.0, 4.0]]
    assert path_of(busy) == (2 + 5 + 1 + 4) / 4
    assert path_of(busy[:1]) == 2.0
    assert efficiency_of(4.0, 2, path_of(busy)) == 4 / (2 * 3)
    assert efficiency_of(path_of(busy[:1]), 1, path_of(busy[:1])) == 1.0


def test_the_matrices_are_sixteen_blocks_of_a_small_transformer() -> None:
    shapes = [shape for _, shape in RankBench().shapes()]
    assert shapes == 4 * [(768, 256), (256, 256), (1024, 256), (256, 1024)]


def test_rows_of_real_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four blocks on two ranks, over one interval: as many times as steps, of every rank; counts are a plan's."""
    fork_what_is_spawned(monkeypatch)
    bench = bench_of()
    rows = bench.run()
    assert [(row["ranks"], row["min_wave_work"]) for row in rows] == [(1, 1), (1, 8), (2, 1), (2, 8)]
    for row in rows:
        assert row["steps"] == 10 and len(row["busy_ms"]) == row["ranks"]
        # a mean of largest is no less than the largest mean
        assert 0 < max(row["busy_ms"]) <= row["path_ms"] * (1 + 1e-9)
        alone = next(own for own in rows if own["ranks"] == 1 and own["min_wave_work"] == row["min_wave_work"])
        assert row["efficiency"] == pytest.approx(alone["path_ms"] / (row["ranks"] * row["path_ms"]), rel=1e-12)
        assert 1 / row["ranks"] <= row["counted"] <= 1 + 1e-12
        assert (row["efficiency"] == row["counted"] == 1.0) or row["ranks"] > 1
    spread, together = rows[2:]
    assert spread["counted"] < together["counted"]
    assert spread["declaration"]["update"] != together["declaration"]["update"]


def made(candidate: str, ranks: int, path: float, efficiency: float) -> Row:
    measured = {"path_ms": path, "efficiency": efficiency, "counted": 0.75, "busy_ms": [path / 2] * ranks}
    return {"candidate": candidate, "problem": "", "ranks": ranks, "min_wave_work": 1, "steps": 10, **measured}


def test_table_figure_and_advice() -> None:
    rows = [made("a, 1 at once", 1, 8.0, 1.0), made("a, 1 at once", 2, 6.0, 0.667), made("a, 2 at once", 2, 5.0, 0.8)]
    bench = bench_of()
    assert lay_out(bench.table(), rows)[1][1] == ("a, 1 at once", "2", "6", "3", "0.67", "0.75")
    (_, efficiency), (_, paths) = (lines_of(panel, rows) for panel in bench.panels())
    assert [(line.label, line.x, line.y) for line in efficiency][:1] == [("a, 1 at once", [1, 2], [1.0, 0.667])]
    assert efficiency[-1].label == "a, 2 at once, counted" and efficiency[-1].y == [0.75]
    assert [(line.x, line.y) for line in paths] == [([1, 2], [8.0, 6.0]), ([2], [5.0])]
    one, two = bench.advice(rows)
    assert one == "on 1 rank: a, 1 at once, 8 ms" and two.startswith("on 2 ranks: a, 2 at once, 5 ms; then a, 1 at")


@pytest.mark.parametrize(
    ("fields", "data"),
    [
        ({"ranks": [2, 4]}, ("ranks", 2)),
        ({"threads": 2}, ("threads", 2)),
        ({"recipes": ["adamw"]}, ("recipes", "'adamw'")),
        ({"recipes": ["soap_fitted", "soap_fitted"]}, ("recipes", "'soap_fitted'")),
    ],
)
def test_what_cannot_be_measured_is_refused(fields: dict[str, Any], data: tuple[object, ...]) -> None:
    with refused(RecipeError, *data):
        bench_of(**fields)


def test_a_rank_that_fails_is_an_error_with_its_cause() -> None:
    ours, theirs = Pipe(duplex=False)
    theirs.send("MemoryError: too much")
    with refused(RecipeError, "MemoryError: too much"):
        answer(ours)
    theirs.close()
    with refused(RecipeError, "process"):
        answer(ours)
