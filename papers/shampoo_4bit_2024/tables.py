"""The synthetic quantization errors of "4-bit Shampoo" (Wang et al. 2024, arXiv:2405.18144), Tables 1, 5 and 6.

A = U diag(l) U^T has order n. U is from the QR factorization of a matrix of independent normal numbers, and two thirds
of the eigenvalues l are 1000 and one third are 1.
    NRE = ||f(A) - F||_F / ||f(A)||_F,   AE = the angle between f(A) and F in degrees,   f(A) = A^(-1/4)
F is the approximation of f(A) if A, its eigenvectors U, its root B = f(A), or two of them are stored in few bits. A and
B are stored with their diagonals in float32, and l is not quantized. "+OR" means that the eigenvectors are made
orthogonal by one step of rectification.

    python tables.py            writes tables.json and tables.md: 30 published pairs, the measured ones, the deviations
    python tables.py --order 192 --seed 0 --out DIR    writes smaller tables to DIR
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from eigengraft.component import validated
from eigengraft.preconditioners.roots import CoupledNewton, PowerIteration
from eigengraft.quantization import Quantizer
from eigengraft.slots import Slot

HERE = Path(__file__).parent
MAPS = ("dynamic", "linear_square")
EPS = 1e-6
"""Ridge, in units of the largest eigenvalue."""


class Errors(NamedTuple):
    """nre: relative error in the Frobenius norm. ae: angle in degrees."""

    nre: float
    ae: float


def quantizer(**declared: Any) -> Quantizer:
    """Return a quantizer of the library, declared as in a recipe."""
    return validated(Quantizer, declared)


def formats(codebook: str) -> dict[str, Quantizer]:
    """Return the quantizers of A and of U, by name. Blocks of 64 entries run along the rows of A, or of U^T."""
    four, eight = (
        {"kind": kind, "codebook": codebook, "block_size": 64, "min_elements": 1} for kind in ("int4", "codebook8")
    )
    return {
        "A": quantizer(kind="exact_diagonal", inner=four, symmetrize=False),
        "A 8-bit": quantizer(kind="exact_diagonal", inner=eight, symmetrize=False),
        "U": quantizer(kind="orthogonal", inner=four, rectify=0),
        "U+OR": quantizer(kind="orthogonal", inner=four, rectify=1),
    }


def stored(x: Tensor, how: Quantizer) -> Tensor:
    """Return the matrix x `[n, n]`, encoded and decoded by the quantizer `how`."""
    slot = Slot(tuple(x.shape), role="basis" if getattr(how, "kind", "") == "orthogonal" else "statistic")
    return how.decode(how.encode(x[None]), slot, x.dtype)[0]


def matrix(n: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return the eigenvectors `[n, n]` and the eigenvalues `[n]` of A, in float64."""
    generator = torch.Generator().manual_seed(seed)
    u = torch.linalg.qr(torch.randn(n, n, generator=generator, dtype=torch.float64)).Q
    values = torch.ones(n, dtype=torch.float64)
    values[: 2 * n // 3] = 1000.0
    return u, values


def published_root(a: Tensor, largest: float = 1000.0, steps: int = 10) -> tuple[Tensor, int]:
    """A^(-1/4) as the paper's code computes it, and the steps it took.

    Coupled Newton in float32 that ends at a step whose error exceeds 1.2 times the last one, and after 10 steps at the
    latest, before the small eigenvalues have converged. A that was quantized is not symmetric, and is not made so.
    """
    a = a.float()
    eye = torch.eye(len(a))
    a = a + EPS * largest * eye
    z = 5 / (2 * float(torch.linalg.matrix_norm(a)))
    x, m = z**0.25 * eye, z * a
    error = float((m - eye).abs().max())
    for step in range(steps):
        t = 1.25 * eye - 0.25 * m
        square = t @ t
        m = square @ square @ m
        last, error = error, float((m - eye).abs().max())
        if error > 1.2 * last:
            return x.double(), step
        x = x @ t
    return x.double(), steps


def library_root(a: Tensor) -> tuple[Tensor, int]:
    """Return A^(-1/4) and the number of steps of the library's solver.

    It is the same iteration, but on the symmetric part of A.
    """
    size = PowerIteration(steps=100)
    solver = CoupledNewton(eps=EPS, relative_to=size, norm="max", stop="rise", growth=1.2, max_iterations=10)
    found = solver.root(a.float()[None], Fraction(1, 4))
    return found.value[0].double(), int(found.iterations[0])


def exact_root(a: Tensor) -> tuple[Tensor, int]:
    """Return (root, 0): A^(-1/4) of the symmetric part of A by its eigenvalues, with the same ridge.

    The root is NaN if an eigenvalue is not positive. 0 is the number of steps.
    """
    values, vectors = torch.linalg.eigh((a + a.mT) / 2)
    return (vectors * values.add(EPS * 1000.0).pow(-0.25)) @ vectors.mT, 0


ROOTS = {"published": published_root, "library": library_root, "exact": exact_root}


def errors(exact: Tensor, found: Tensor) -> Errors:
    """Return NRE and AE of the matrix `found` in place of the matrix `exact`."""
    norms = [float(torch.linalg.matrix_norm(x)) for x in (exact, found, exact - found)]
    cosine = float((exact * found).sum()) / (norms[0] * norms[1])
    return Errors(norms[2] / norms[0], math.degrees(math.acos(cosine if math.isnan(cosine) else min(1.0, cosine))))


def offdiagonal(x: Tensor) -> Tensor:
    """Return x with 0 on its diagonal."""
    return x - torch.diag(x.diagonal())


def measure(n: int, seed: int, root: str = "published") -> dict[tuple[int, str, str], tuple[Errors, int]]:
    """Return (number of the paper's table, codebook, stored matrices) -> (errors, steps of the root).

    The steps are 0 if no root was computed from a quantized matrix.
    """
    u, values = matrix(n, seed)
    f = ROOTS[root]
    a = (u * values) @ u.mT
    exact = f(a)[0]
    found = {}
    for codebook in MAPS:
        how = formats(codebook)
        roots = {key: f(stored(a, how[key])) for key in ("A 8-bit", "A")}
        for key in ("U", "U+OR"):
            v = stored(u, how[key])
            roots[key] = f((v * values) @ v.mT)
        for key, (value, steps) in roots.items():
            found[1, codebook, key] = errors(exact, value), steps
        roots = {"B": (exact, 0), **{f"{key}, B": roots[key] for key in ("A", "U", "U+OR")}, **roots}
        for key, (value, steps) in roots.items():
            value = stored(value, how["A"]) if key.endswith("B") else value
            if key.endswith("B"):
                found[5, codebook, key] = errors(exact, value), steps
            if key != "A 8-bit":
                found[6, codebook, key] = errors(offdiagonal(exact), offdiagonal(value)), steps
    return found


def compare(n: int, seed: int) -> list[dict[str, Any]]:
    """Return a row for each published pair of errors.

    It has the errors measured with the published root, their deviations, and the errors measured with the other roots.
    """
    published = json.loads((HERE / "published.json").read_text())["errors"]
    measured = {root: measure(n, seed, root) for root in ROOTS}
    rows = []
    for row in published:
        key = row["table"], row["map"], row["stored"]
        (nre, ae), steps = measured["published"][key]
        rows.append({**row, "measured_nre": nre, "measured_ae": ae, "steps": steps})
        rows[-1]["deviation_nre"], rows[-1]["deviation_ae"] = nre / row["nre"] - 1, ae / row["ae"] - 1
        for root in ("library", "exact"):
            values = [None if math.isnan(value) else value for value in measured[root][key][0]]
            rows[-1][f"{root}_nre"], rows[-1][f"{root}_ae"] = values
    return rows


def markdown(rows: list[dict[str, Any]], n: int, seed: int) -> str:
    """Return the rows as a table."""
    head = ["table", "map", "stored", "steps", "NRE published", "measured", "deviation", "AE published", "measured"]
    head += ["deviation", "NRE, library's root", "NRE, exact root"]
    lines = [f"Order {n}, seed {seed}, torch {torch.__version__.split('+')[0]}. Deviations in percent.", ""]
    lines += ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    for row in rows:
        cells = [row["table"], row["map"], row["stored"], row["steps"] or ""]
        for name, digits in (("nre", 4), ("ae", 3)):
            cells += [f"{row[name]:.{digits}f}", f"{row[f'measured_{name}']:.{digits}f}"]
            cells += [f"{100 * row[f'deviation_{name}']:+.2f}"]
        others = [row[f"{root}_nre"] for root in ("library", "exact")]
        cells += ["none" if nre is None else f"{nre:.4f}" for nre in others]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    worst = max(abs(row[f"deviation_{name}"]) for row in rows for name in ("nre", "ae"))
    return "\n".join([*lines, "", f"Largest deviation: {100 * worst:.2f} %.", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description="Published and measured quantization errors of 4-bit Shampoo.")
    parser.add_argument("--order", type=int, default=1200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=HERE)
    given = parser.parse_args()
    rows = compare(given.order, given.seed)
    text = markdown(rows, given.order, given.seed)
    (given.out / "tables.json").write_text(json.dumps(rows, indent=1) + "\n")
    (given.out / "tables.md").write_text(text)
    sys.stdout.write(text)


if __name__ == "__main__":
    main()
