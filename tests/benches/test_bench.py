"""The benches of single components: rows that are right where the answer is known, the command, and what it writes."""

import json
import math
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import Tensor
from typer.testing import Result

from eigengraft.errors import RecipeError
from eigengraft.experiments.benches import Bench, load_bench, run_bench
from eigengraft.experiments.benches import statistics as kronecker
from eigengraft.experiments.benches.bench import defaults, label
from eigengraft.experiments.benches.matrices import (
    FILE,
    Geometric,
    Recorded,
    Spectrum,
    Synthetic,
    angle,
    recorded_factors,
    relative_error,
)
from eigengraft.experiments.benches.roots import ridgeless
from eigengraft.experiments.benches.view import Recommendation, in_ms, lay_out, recommend, reduction
from eigengraft.preconditioners import Basis, BasisSolver, CoupledNewton, Eigh, Root, RootSolver, Statistic

from ..cli import invoke
from ..refusals import refused
from ..trajectories import normal, rotation
from .published import fixed_point, gram_factors
from .record_factors import record

pytestmark = pytest.mark.slow

FAST: dict[str, Any] = {"seconds": 1e-4}
TINY = {
    "roots": ["sizes=[4,6]", "spectra=power_law", "--only", "eigh", "--only", "coupled_newton"],
    "bases": ["sizes=6", "refreshes=[1,3]", "--only", "eigh", "--only", "{kind: power_qr, steps: 2}"],
    "statistics": ["width=4", "samples=[5,9]", "held_out=9", "steps=2", "--only", "gram"],
    "polar": ["shapes=4", "conditions=[1,10]", "--only", "svd", "--only", "newton_schulz"],
}  # fmt: skip


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "400")
    monkeypatch.delenv("EIGENGRAFT_DEBUG", raising=False)


@pytest.fixture
def families() -> Iterator[None]:
    """Parts defined in a test leave their families with it."""
    touched = (RootSolver, BasisSolver, Spectrum)
    before = [dict(family.members) for family in touched]
    yield
    for family, members in zip(touched, before, strict=True):
        family.members.clear()
        family.members.update(members)


def call(*arguments: str) -> Result:
    return invoke(["bench", *arguments])


def rows_of(path: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


class TestCommand:
    @pytest.mark.parametrize("kind", TINY)
    def test_rows_figure_table_and_advice(self, kind: str) -> None:
        result = call(kind, *TINY[kind], "seconds=1e-4", "--quick", "--out", "out")
        assert result.exit_code == 0, result.output
        rows = rows_of("out/rows.jsonl")
        assert rows and all({"candidate", "declaration", "device"} <= set(row) for row in rows)
        assert f"{len(rows)} rows: out/rows.jsonl" in result.stdout
        lines = result.stdout.splitlines()
        for name in {row["candidate"] for row in rows}:
            assert any(line.strip().startswith(name) for line in lines), f"no line of the table is about {name}"
        advice = lines[next(i for i, line in enumerate(lines) if line.startswith("on cpu (")) + 1 : -1]
        assert advice and all(line.startswith("  ") for line in advice)
        assert any(row["candidate"] in line for row in rows for line in advice)
        figure = ET.parse("out/figure.svg").getroot()
        assert figure.tag.endswith("svg")
        text = "".join(figure.itertext())
        drawn = {row["candidate"] for row in rows if row["declaration"] is not None}
        assert [name for name in drawn if name not in text] == [], "every candidate is named in the legend"
        assert len([node for node in figure.iter() if node.tag.endswith("path")]) > 10

    def test_the_declaration_written_makes_the_same_bench(self) -> None:
        assert call("roots", *TINY["roots"], "seconds=1e-4", "--out", "out").exit_code == 0
        written = json.loads(Path("out/bench.json").read_text())
        declared = written["bench"]
        again = load_bench(declared.pop("kind"), declared)
        assert again.declaration() == {"kind": "roots", **declared}
        assert again.declaration()["sizes"] == [4, 6]
        assert written["environment"]["torch"] == torch.__version__

    def test_a_bench_from_a_file_and_components_from_an_import(self, families: None) -> None:
        Path("mine.py").write_text(
            "from typing import Literal\n"
            "from eigengraft.experiments.benches.matrices import Synthetic\n"
            "import torch\n\n\n"
            "class Flat(Synthetic):\n"
            '    """1"""\n\n'
            '    kind: Literal["flat"] = "flat"\n\n'
            "    def eigenvalues(self, d):\n"
            "        return torch.ones(d, dtype=torch.float64)\n"
        )
        Path("mine.yaml").write_text("kind: roots\nsizes: 5\nspectra: flat\nsolvers: eigh\nseconds: 1.0e-4\n")
        result = call("mine.yaml", "--import", "mine.py", "dtypes=float64", "ridge=0")
        assert result.exit_code == 0, result.output
        (row,) = rows_of("runs/bench-roots/rows.jsonl")
        assert (row["spectrum"], row["size"], row["dtype"]) == ("flat", 5, "float64")
        assert row["condition"] == pytest.approx(1) and row["error"] < 1e-13


WRONG = {
    "unknown bench": (["rootz"], ["'rootz'", "did you mean 'roots'"]),
    "missing file": (["gone.yaml"], ["gone.yaml"]),
    "file without kind": (["empty.yaml"], ["empty.yaml: ", "'kind'"]),
    "unknown solver": (["roots", "--only", "eig"], ["unknown root_solver kind 'eig'", "did you mean 'eigh'"]),
    "unknown solver beside others": (["roots", "--candidate", "eig"], ["bench.solvers", "'eig'", "'eigh'"]),
    "solver of another bench": (["polar", "--only", "eigh"], ["unknown polar_solver kind 'eigh'", "svd"]),
    "unknown field of a solver": (["roots", "--only", "{kind: eigh, epz: 1}"], ["eigh.epz", "did you mean 'eps'"]),
    "broken YAML": (["roots", "--candidate", "{kind: ["], ["--candidate '{kind: ['", "line 1"]),
    "broken YAML of the only one": (["roots", "--only", "{kind: ["], ["--only '{kind: ['", "line 1"]),
    "equal solvers": (["roots", "--only", "eigh", "--only", "eigh"], ["solvers: 'eigh'", "more than once"]),
    "a solver that is there": (["roots", "--candidate", "eigh"], ["solvers: 'eigh'", "more than once"]),
    "unknown field": (["roots", "sizs=3"], ["bench.sizs: unknown field", "did you mean 'sizes'"]),
    "size out of range": (["roots", "sizes=0"], ["bench.sizes: ", "greater than or equal to 1, got 0"]),
    "no size": (["bases", "sizes=[]"], ["bench.sizes: ", "empty"]),
    "broken shape": (["polar", "shapes=16xa"], ["bench.shapes: ", "'16xa'"]),
    "not an override": (["roots", "sizes"], ["override 'sizes'"]),
    "exponent that nobody takes": (["roots", "--only", "cans", "exponents=1/3"], ["cans", "1/3"]),
    "no inverse": (["roots", "spectra=rank_deficient", "ridge=0"], ["bench.ridge: ", "'rank_deficient'"]),
    "no gradients to draw": (["bases", "spectra=recorded"], ["bench.spectra: ", "'recorded'"]),
    "nothing to measure": (["roots", "spectra=recorded", "sizes=65", "--only", "eigh"], ["nothing to measure"]),
    "no such device": (["roots", "--device", "cuda:99"], ["device", "'cuda:99'"]),
    "no such kind of device": (["roots", "--device", "gpu"], ["bench.device: ", "got 'gpu'"]),
    "a file as directory": (["roots", "--out", "empty.yaml"], ["--out: ", "'empty.yaml'"]),
    "no such checkpoint": (["roots", "--from", "gone.pt"], ["checkpoint: ", "'gone.pt'"]),
    "no checkpoint": (["roots", "--from", "empty.yaml"], ["checkpoint: ", "'empty.yaml'"]),
    "no run": (["roots", "--record", "."], ["'.'"]),
    "two sources": (["roots", "--from", "a", "--record", "b"], ["checkpoint", "record"]),
    "sizes of own matrices": (["roots", "--from", "a", "sizes=[8]"], ["sizes", "checkpoint"]),
    "steps of no run": (["roots", "steps=5"], ["bench.steps: ", "record"]),
    "steps of no run of gradients": (["polar", "steps=5"], ["bench.steps: ", "record"]),
    "shapes of own gradients": (["polar", "--record", "a", "shapes=8x8"], ["bench.shapes: ", "record"]),
    "steps of another name": (["bases", "--record", "a", "steps=5"], ["bench.steps: ", "every", "refreshes"]),
    "drift of own matrices": (["bases", "--record", "a", "drift=0.1"], ["bench.drift: ", "record"]),
    "interval of a checkpoint": (["bases", "--from", "a", "every=5"], ["bench.every: ", "checkpoint"]),
    "matrices of no bench": (["storage", "--from", "a"], ["--from", "storage", "roots"]),
    "gradients of a checkpoint": (["statistics", "--from", "a"], ["--from", "statistics", "roots"]),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_input_gets_one_clear_message(case: str) -> None:
    Path("empty.yaml").write_text("")
    arguments, parts = WRONG[case]
    result = call(*arguments)
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.output and "pydantic" not in result.output
    assert [name for name in parts if name not in result.stderr] == [], result.stderr


class TestRoots:
    def test_rows_of_a_root_that_is_known(self, families: None) -> None:
        """A = Q diag(1, 1/16, 1/16, 1/16) Q^T, whose fourth root is (1, 2, 2, 2): 2 X, -X and a refusal of it."""

        class Changed(RootSolver):
            """factor A^-e"""

            kind: Literal["changed"] = "changed"
            factor: float
            refuse: bool = False

            def root(self, a: Tensor, exponent: Fraction) -> Root:
                values, q = torch.linalg.eigh(a)
                x = (q * values.unsqueeze(1) ** -float(exponent)) @ q.mT * self.factor
                yes, n = torch.full((len(a),), True), len(a)
                return Root(x, yes if not self.refuse else ~yes, torch.full((n,), 7), torch.full((n,), 0.5), yes)

        spectrum = {"kind": "clustered", "ratio": 16.0, "share": 0.01}
        given = [{"kind": "changed", "factor": 2.0}, {"kind": "changed", "factor": -1.0},
                 {"kind": "changed", "factor": 1.0, "refuse": True}]  # fmt: skip
        twice, negative, refused = run_bench(
            "roots", solvers=given, spectra=spectrum, sizes=4, dtypes="float64", ridge=0.0, count=3, **FAST
        )
        assert twice["condition"] == pytest.approx(16) and twice["spectrum"] == "clustered ratio=16 share=0.01"
        # float64 with condition 16: everything is exact to 1e-12
        assert (twice["error"], twice["residual"]) == pytest.approx((1.0, 2**4 - 1), abs=1e-12)
        assert twice["angle"] == pytest.approx(0, abs=1e-6) and twice["definite"] == twice["ok"] == 1
        assert (twice["iterations"], twice["reported"]) == (7, 0.5)
        assert (negative["error"], negative["angle"]) == pytest.approx((2.0, 180.0), abs=1e-6)
        assert negative["residual"] == pytest.approx(0, abs=1e-12) and negative["definite"] == 0 and negative["ok"] == 1
        assert refused["ok"] == 0 and math.isnan(refused["error"])
        (line,) = load_bench("roots", {"sizes": 4}).advice([twice, negative, refused])
        assert line.startswith("A^(-1/4), 4 x 4, float64: none ") and line.endswith("changed factor=2 (1)")

    def test_a_bare_kind_has_no_ridge_of_its_own_and_the_bench_adds_one_for_all(self) -> None:
        assert ridgeless("coupled_newton")["eps"] == 0
        rows = run_bench(
            "roots", solvers=["coupled_newton", CoupledNewton(), "eigh"], spectra="rank_deficient", sizes=8,
            ridge=1e-3, dtypes="float64", **FAST,
        )  # fmt: skip
        assert [row["candidate"] for row in rows] == ["coupled_newton", "coupled_newton eps=1e-06", "eigh"]
        assert all(row["condition"] == pytest.approx(1001) for row in rows)
        # its own ridge of 1e-6 ||A||_F shifts eigenvalues of 1e-3 by about a thousandth, the root by a quarter of that
        assert rows[0]["error"] < 1e-6 < 1e-5 < rows[1]["error"] < 1e-3 and rows[2]["error"] < 1e-12

    def test_time_is_that_of_one_matrix(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Bench, "milliseconds", lambda self, work: 8.0)  # of all 4 matrices
        (row,) = run_bench("roots", solvers="eigh", spectra="geometric", sizes=2, count=4, **FAST)
        assert row["milliseconds"] == 2.0

    def test_a_solver_that_does_not_take_an_exponent_says_so_in_its_row(self) -> None:
        fields = {"solvers": ["eigh", "cans"], "exponents": ["1/3", "1/2"], "spectra": "geometric", "sizes": 3}
        rows = run_bench("roots", **fields, **FAST)
        assert [(row["candidate"], row["exponent"], "error" in row) for row in rows] == [
            ("eigh", "1/3", True), ("cans", "1/3", False), ("eigh", "1/2", True), ("cans", "1/2", True)
        ]  # fmt: skip
        assert "1/3" in rows[1]["problem"] and [bool(row["problem"]) for row in rows] == [False, True, False, False]

    def test_a_solver_that_fails_says_so_in_its_row(self, families: None) -> None:
        class Failing(RootSolver):
            """nothing"""

            kind: Literal["failing"] = "failing"

            def root(self, a: Tensor, exponent: Fraction) -> Root:
                raise RuntimeError("no room")

        bench = load_bench("roots", {"solvers": ["failing", "eigh"], "spectra": "geometric", "sizes": 3, **FAST})
        failing, eigh = bench.run()
        assert failing["problem"] == "RuntimeError: no room" and not eigh["problem"]
        headings, lines = lay_out(bench.table(), [failing, eigh])
        assert [line[-1] for line in lines] == ["RuntimeError: no room", ""] and len(headings) == len(lines[0])
        assert len(bench.advice([failing, eigh])) == 1


class TestSpectra:
    @pytest.mark.parametrize("kind", sorted(set(Spectrum.members) - {"recorded"}))
    def test_stacks_have_the_eigenvalues_declared_and_are_reproducible(self, kind: str) -> None:
        spectrum = Spectrum.model_validate({"kind": kind})
        assert isinstance(spectrum, Synthetic)
        a = spectrum.stack(3, 9, 5)
        assert a is not None and a.dtype == torch.float64
        expected = spectrum.eigenvalues(9).sort().values
        assert float(expected[-1]) == 1
        torch.testing.assert_close(torch.linalg.eigvalsh(a), expected.expand(3, -1), rtol=0, atol=1e-14)
        again, other = spectrum.stack(3, 9, 5), spectrum.stack(3, 9, 6)
        assert torch.equal(a, again) and (kind == "clustered" or not torch.equal(a, other))  # type: ignore[arg-type]

    def test_sizes_of_clusters_and_ranks(self) -> None:
        clustered = Spectrum.model_validate({"kind": "clustered"})
        deficient = Spectrum.model_validate({"kind": "rank_deficient", "share": 0.5})
        assert isinstance(clustered, Synthetic) and isinstance(deficient, Synthetic)
        assert clustered.eigenvalues(12).tolist() == [1.0] * 8 + [1e-3] * 4
        assert int((deficient.eigenvalues(12) > 0).sum()) == 6

    def test_recorded_factors_are_factors(self) -> None:
        factors = recorded_factors()
        assert FILE.stat().st_size < 300_000 and factors.shape[1:] == (64, 64) and len(factors) > 12
        values = torch.linalg.eigvalsh(factors.double())
        assert torch.equal(factors, factors.mT) and bool((values[:, -1] > 0).all())
        # float32 entries: eigenvalues are exact to 64 machine epsilons of the largest
        assert float((values[:, 0] / values[:, -1]).min()) > -64 * torch.finfo(torch.float32).eps
        a = Recorded().stack(4, 16, 0)
        assert a is not None and a.shape == (4, 16, 16) and Recorded().stack(4, 65, 0) is None
        norms = torch.linalg.matrix_norm(a, ord=2)
        torch.testing.assert_close(norms, torch.ones(4, dtype=torch.float64), rtol=1e-12, atol=0)

    def test_recording_again_gives_the_same(self) -> None:
        layer = "blocks.0.attention.query"
        first, second = record((1, 2), (layer,)), record((1, 2), (layer,))
        assert set(first) == {"made", *(f"000{k}/{layer}/factor.{axis}" for k in (1, 2) for axis in (0, 1))}
        assert all(np.array_equal(first[name], second[name]) for name in first)
        with np.load(FILE) as file:
            assert "text sha256" in str(file["made"]) and f"0010/{layer}/factor.0" in file.files


class TestBases:
    def test_rows_of_a_basis_that_is_known(self, families: None) -> None:
        class Standing(BasisSolver):
            """The first columns of 2 I: neither orthonormal nor diagonal."""

            kind: Literal["standing"] = "standing"

            def columns(self, d: int) -> int:
                return d - 1

            def basis(self, a: Tensor, q: Tensor, first: bool) -> Basis:
                assert q.shape == (len(a), a.shape[-1], a.shape[-1] - 1)
                return Basis(2 * torch.eye(*q.shape[1:], dtype=a.dtype).expand_as(q), None, torch.ones(len(a)) > 0)

        bench = load_bench("bases", {"solvers": ["standing", "eigh"], "sizes": 5, "spectra": "power_law",
                                     "refreshes": [1, 3], "dtypes": "float64", "count": 2, **FAST})  # fmt: skip
        rows = bench.run()
        assert [(row["candidate"], row["refresh"]) for row in rows] == [
            (p, k) for p in ("standing", "eigh") for k in (1, 3)
        ]
        spectrum = Spectrum.model_validate({"kind": "power_law"})
        assert isinstance(spectrum, Synthetic)
        last = bench.drifting_statistic(spectrum, 5)[2]  # type: ignore[attr-defined]
        rotated = 4 * last[:, :4, :4]
        off = rotated - torch.diag_embed(rotated.diagonal(dim1=-2, dim2=-1))
        assert rows[1]["offdiagonal"] == pytest.approx(float((off.norm(dim=(1, 2)) / rotated.norm(dim=(1, 2))).max()))
        assert rows[1]["orthogonality"] == 3 and rows[1]["columns"] == 4
        assert rows[3]["offdiagonal"] < 1e-13 and rows[3]["eigenvalues"] < 1e-13 and rows[3]["orthogonality"] < 1e-13
        assert all("eigh" in line and "standing" not in line for line in bench.advice(rows))

    def test_the_statistic_is_the_running_mean_of_gradients_with_that_covariance(self) -> None:
        bench = load_bench("bases", {"drift": 0.0, "beta": 0.999, "every": 200, "refreshes": [8], "count": 1})
        spectrum = Geometric(condition=10.0)
        path = bench.drifting_statistic(spectrum, 6)  # type: ignore[attr-defined]
        assert len(path) == 8
        # 1600 gradients of 6 columns, weighted: relative sampling noise sqrt(2 / (6 * 1000)) = 2 %, five times that
        torch.testing.assert_close(
            torch.linalg.eigvalsh(path[-1])[0].flip(0), spectrum.eigenvalues(6), rtol=0.1, atol=0
        )

    def test_a_turning_basis_makes_single_power_steps_lag_behind(self) -> None:
        def off(drift: float) -> float:
            rows = run_bench(
                "bases", solvers="power_qr", sizes=16, spectra="power_law", refreshes=[20], drift=drift, **FAST
            )
            return rows[0]["offdiagonal"]

        assert off(0.02) > 1.5 * off(0.0)


class TestKronecker:
    """The dense mathematics against products that are known."""

    def test_an_exact_product_has_cosine_1_and_gain_1(self) -> None:
        a, b = torch.tensor([4.0, 1.0, 0.25]).double(), torch.tensor([9.0, 1.0]).double()
        u, v = rotation(3, 0), rotation(2, 1)
        # gradients sqrt(6 a_i b_j) u_i v_j^T: their mean outer product is exactly (U a U^T) x (V b V^T)
        g = torch.stack([torch.outer(u[:, i], v[:, j]) * (6 * a[i] * b[j]).sqrt() for i in range(3) for j in range(2)])
        left, right = (u * a) @ u.T, (v * b) @ v.T
        c = kronecker.second_moment(g)
        torch.testing.assert_close(c, torch.kron(left, right), rtol=0, atol=1e-12)
        assert kronecker.best_cosine(c, 3, 2) == pytest.approx(1) == kronecker.cosine_product(c, left, right)
        assert kronecker.gain_error(g, left, right) < 1e-12
        # a factor of 100 in S is a gain of 1/10 everywhere: one decade of error, and no spread
        assert kronecker.gain_error(g, 100 * left, right) == pytest.approx(1)
        assert kronecker.gain_spread(g, 100 * left, right) < 1e-12
        for q in (2.0, 1.0, 0.5, 0.0):
            torch.testing.assert_close(torch.kron(*fixed_point(g, q)), c, rtol=0, atol=1e-9)

    def test_the_von_neumann_fixed_point_is_shampoo_over_its_trace(self) -> None:
        g = normal(50, 4, 5, seed=0)
        left, right = gram_factors(g)
        expected = torch.kron(left, right) / left.trace()
        torch.testing.assert_close(torch.kron(*fixed_point(g, 1.0)), expected, rtol=0, atol=1e-12)

    def test_the_frobenius_fixed_point_is_the_best_product(self) -> None:
        g = normal(50, 4, 5, seed=1)
        c = kronecker.second_moment(g)
        product = torch.kron(*fixed_point(g, 2.0, rounds=200))
        # the alternation is a power iteration on the rearranged C, whose gap is not small: converged to rounding
        assert kronecker.cosine(c, product) == pytest.approx(kronecker.best_cosine(c, 4, 5), abs=1e-9)

    def test_the_kullback_leibler_fixed_point_is_stationary(self) -> None:
        g = normal(60, 3, 4, seed=2)
        left, right = fixed_point(g, 0.0, rounds=200)
        expected = torch.einsum("kij,jl,kml->im", g, torch.linalg.inv(right), g) / (60 * 4)
        torch.testing.assert_close(left, expected, rtol=0, atol=1e-9)


class TestStatistics:
    def test_a_sum_of_gram_matrices_is_the_gram_matrix_of_all_gradients(self) -> None:
        from eigengraft.experiments.benches.matrices import GRADIENT_LAYERS, layer_gradients

        rows = run_bench(
            "statistics",
            statistics={"kind": "gram", "beta": 1.0},
            width=4,
            samples=12,
            held_out=20,
            seed=1,
            steps=2,
            dtype="float64",
            **FAST,
        )
        g = layer_gradients(4, 32, 1, 2)
        own = [row for row in rows if "gain_error" in row]
        assert [row["layer"] for row in own] == list(GRADIENT_LAYERS) and len(rows) == 3 * len(GRADIENT_LAYERS)
        for layer, row in enumerate(own):
            left, right = gram_factors(g[:12, layer])
            c = kronecker.second_moment(g[:12, layer])
            # float64; the smallest eigenvalues are exact to about 1e-16 of the largest, those that count to 1e-6
            assert row["cosine"] == pytest.approx(kronecker.cosine_product(c, left, right), abs=1e-12)
            expected = kronecker.gain_error(g[12:, layer], left / left.trace(), right)
            assert row["gain_error"] == pytest.approx(expected, abs=1e-6)

    def test_gradients_have_unit_size_and_depend_on_the_seed_alone(self) -> None:
        from eigengraft.experiments.benches.matrices import layer_gradients

        g = layer_gradients(4, 32, 1, 2)
        layer_gradients.cache_clear()
        assert torch.equal(g, layer_gradients(4, 32, 1, 2))
        torch.testing.assert_close(g.square().sum((2, 3)).mean(0), torch.ones(g.shape[1], dtype=torch.float64))


class TestPolar:
    def test_bands_and_distances_that_are_known(self) -> None:
        exact, steps = run_bench(
            "polar", solvers=["svd", {"kind": "newton_schulz", "coefficients": "cubic", "steps": 3}],
            shapes="6x9", conditions=10.0, dtypes="float64", **FAST,
        )  # fmt: skip
        assert (exact["low"], exact["high"]) == pytest.approx((1, 1)) and exact["distance"] < 1e-12
        s = np.geomspace(1, 0.1, 6)
        s = s / np.sqrt((s**2).sum())
        for _ in range(3):
            s = 1.5 * s - 0.5 * s**3
        assert (steps["low"], steps["high"]) == pytest.approx((s.min(), s.max()))
        assert steps["distance"] == pytest.approx(np.sqrt(((s - 1) ** 2).mean()))
        assert steps["candidate"] == "newton_schulz steps=3 coefficients=cubic"


class TestNames:
    def test_defaults_begin_with_the_preferred_and_add_all_other_kinds(self) -> None:
        declared = defaults(RootSolver, [{"kind": "eigh", "eps": 0.5}])
        kinds = [item["kind"] for item in declared]
        assert declared[0] == {"kind": "eigh", "eps": 0.5}
        assert "coupled_newton" in kinds and kinds.count("eigh") == 1

    @pytest.mark.parametrize("kind", sorted(set(Bench.members) - {"statistics"}))
    def test_every_default_and_quick_declaration_is_valid_and_counts_its_cells(self, kind: str) -> None:
        for quick in (False, True):
            bench = load_bench(kind, {}, quick)
            candidates = bench.contenders()
            # Candidates of the bench of steps meet those of the same maths only, which its own tests count.
            assert len(candidates) > 1
            assert bench.cells() > 0 and (kind == "step" or bench.cells() % len(candidates) == 0)

    def test_statistics_of_all_kinds_that_gradients_give_are_measured(self) -> None:
        """By default; one of a layer's inputs, which are not recorded, says so in its row."""
        fields: dict[str, Any] = {"width": 4, "samples": 2, "held_out": 2, "steps": 0, "start": 1, "every": 1}
        bench = load_bench("statistics", {**fields, **FAST})
        ours = {kind: own for kind, own in Statistic.members.items() if own.__module__.startswith("eigengraft.")}
        kinds = {kind for kind, member in ours.items() if not member.of_inputs}
        assert {statistic.kind for statistic in bench.contenders()} & {*ours} == kinds < {*ours}
        cells = list(bench.cell_by_cell())
        assert len(cells) == bench.cells() and all(cells)
        *_, row = run_bench("statistics", statistics=["gram", "input_gram"], **fields, **FAST)
        assert row["candidate"] == "input_gram beta=0.995" or row["candidate"] == "input_gram"
        assert "inputs" in row["problem"]

    def test_a_name_has_what_differs(self) -> None:
        assert label(Eigh()) == "eigh"
        assert label(Eigh(eps=1e-6, relative=True)) == "eigh eps=1e-06 relative=True"
        assert label(Eigh(eps=0.0), ridgeless) == "eigh"

    def test_cells_are_counted(self) -> None:
        fields = {"solvers": ["eigh", "cans"], "sizes": [2, 65], "spectra": ["recorded", "geometric"]}
        bench = load_bench("roots", {**fields, "exponents": ["1/2", "1/3"], "dtypes": ["float32", "float64"], **FAST})
        cells = list(bench.cell_by_cell())
        assert len(cells) == bench.cells() == 32
        rows = [row for cell in cells for row in cell]
        assert len(rows) == 24  # recorded has no matrix of size 65
        assert sum(not row["problem"] for row in rows) == 18  # eigh takes both exponents, cans one

    def test_quick_settings_give_way_to_what_is_given(self) -> None:
        bench = load_bench("roots", {"sizes": 5}, quick=True).declaration()
        assert bench["sizes"] == [5] and bench["count"] == 4 and len(bench["spectra"]) == 4

    def test_unknown_benches_are_refused_in_python_too(self) -> None:
        with refused(RecipeError, "'rootz'", "'roots'"):
            load_bench("rootz", {})


class TestMeasures:
    def test_errors_and_angles(self) -> None:
        x = torch.eye(2, dtype=torch.float64).unsqueeze(0)
        y = torch.tensor([[[0.0, 1.0], [-1.0, 0.0]]]).double()
        assert float(angle(x, y)) == pytest.approx(90) and float(angle(3 * x, x)) < 1e-13
        assert float(angle(x + 1e-9 * y, x)) == pytest.approx(math.degrees(1e-9), rel=1e-6)
        assert float(relative_error(1.5 * x, x)) == pytest.approx(0.5)

    def test_advice_takes_the_fastest_that_is_good_enough(self) -> None:
        values = {"a": (1.0, 0.5), "b": (2.0, 0.01), "c": (8.0, 0.001), "d": (0.5, math.nan)}
        rows = [{"candidate": name, "ms": ms, "e": e, "problem": ""} for name, (ms, e) in values.items()]
        rows.append({"candidate": "e", "problem": "it failed"})

        def line(threshold: float) -> str:
            error = reduction("e", "worst")
            one = Recommendation(lambda row: "here", reduction("ms"), in_ms, "time", error, "error", threshold)
            return recommend([one], rows)[0]

        assert line(0.05) == "here: b, 2 ms, error 0.01; then c, 4.00 times the time (2 of 4 above the error 0.05)"
        assert line(1e-4).endswith("c (0.001)")
        rows = [{**row, "e": math.inf} for row in rows]
        assert "none" in line(0.05) and "(" not in line(0.05)

    def test_what_is_no_number_becomes_null(self, families: None) -> None:
        class Refusing(RootSolver):
            """nothing"""

            kind: Literal["refusing"] = "refusing"

            def root(self, a: Tensor, exponent: Fraction) -> Root:
                no = torch.zeros(len(a))
                return Root(a, no > 0, no.int(), no, no > 0)

        result = call("roots", "sizes=2", "spectra=geometric", "seconds=1e-4", "--only", "refusing", "--out", "out")
        assert result.exit_code == 0, result.output
        (row,) = rows_of("out/rows.jsonl")
        assert row["error"] is None and row["ok"] == 0
        assert "none gives a usable result" in result.stdout
