"""A bench of quantizers on symmetric matrices of several spectra, sizes and dtypes.

It measures how far a matrix and its root are from the exact ones after storage, the stored bytes, and the times to
encode and decode.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import BeforeValidator, Field
from torch import Tensor

from eigengraft import noise
from eigengraft.component import validated
from eigengraft.numerics import identity_like, symmetrized
from eigengraft.preconditioners.algebra.exponents import Rational
from eigengraft.quantization import Quantizer
from eigengraft.slots import Encoded, Role, Slot

from . import view
from .bench import Column, Declaration, Listed, MatrixDtypes, PositiveInts, Problem, defaults, label, listed
from .matrices import DampedBench, MatrixSource, Synthetic, angle, orthogonal, relative_error, worst_of
from .view import BenchRows, Panel, Recommendation, Row, Table

INT4: Declaration = {"kind": "int4"}
INT4_NF4: Declaration = {"kind": "int4", "codebook": "nf4"}
_PREFERRED: tuple[Declaration, ...] = (
    {"kind": "float32"},
    {"kind": "bf16"},
    {"kind": "int16"},
    {"kind": "int8"},
    {"kind": "fp8"},
    {"kind": "codebook8"},
    INT4,
    INT4_NF4,
    {"kind": "int4", "codebook": "dynamic"},
    {"kind": "exact_diagonal", "inner": {"kind": "int16", "buckets": "column"}},
    {"kind": "exact_diagonal", "inner": {"kind": "int8"}},
    {"kind": "exact_diagonal", "inner": INT4},
    {"kind": "symmetric", "inner": {"kind": "int16"}},
    {"kind": "cholesky", "inner": {"kind": "int8"}},
    {"kind": "cholesky", "inner": INT4},
    {"kind": "eigen", "inner": INT4},
    {"kind": "orthogonal", "inner": {"kind": "int8"}},
    {"kind": "orthogonal", "inner": INT4, "rectify": 0},
    {"kind": "orthogonal", "inner": INT4},
    {"kind": "orthogonal", "inner": INT4_NF4},
    {"kind": "orthogonal", "inner": {"kind": "int3"}},
)


def without_least_size(declared: Any) -> Any:
    """Return the declaration of a quantizer, with `min_elements: 1` added if it declares no `min_elements`.

    In recipes, slots with fewer entries than `min_elements` are not quantized. The bench measures formats on matrices
    of every size, small ones too. The declaration of an `inner` quantizer is changed in the same way.

    declared: the kind of a quantizer, or a mapping of its fields. Other values are returned unchanged.
    """
    if isinstance(declared, str):
        declared = {"kind": declared}
    if not isinstance(declared, Mapping):
        return declared
    member = Quantizer.members.get(str(declared.get("kind")))
    fields = member.model_fields if member is not None else {}
    found: dict[str, Any] = {"min_elements": 1} if "min_elements" in fields else {}
    inner = fields["inner"].default if "inner" in fields else None
    if isinstance(inner, Quantizer):
        found["inner"] = {name: value for name, value in inner.declaration().items() if name != "min_elements"}
    found.update(declared)
    return {name: without_least_size(value) if name == "inner" and value else value for name, value in found.items()}


def parse_quantizers(value: Any) -> Any:
    """Add `min_elements: 1` to declarations of quantizers without this field. Return instances unchanged."""
    return tuple(map(without_least_size, listed(value)))


def quantizer_label(quantizer: Quantizer) -> str:
    """Return the name of a quantizer in tables: kind, inner quantizer, and the fields that differ from the defaults.

    `inner` is the quantizer that this quantizer wraps, if it wraps one. `min_elements: 1` is not shown.
    """
    return label(quantizer, without_least_size, always=("inner",)).replace(" inner=None", "").replace(" inner=", " ")


def default_quantizers() -> tuple[Quantizer, ...]:
    """Return the quantizers that can store factors: the preferred ones, then all others without required fields."""
    declared = map(without_least_size, defaults(Quantizer, _PREFERRED))
    made = (validated(Quantizer, item) for item in declared)  # type: ignore[type-abstract]
    return tuple(quantizer for quantizer in made if role_of(quantizer, 64, ("statistic", "basis")) is not None)


def role_of(quantizer: Quantizer, size: int, roles: Iterable[Role]) -> Role | None:
    """Return the first role (use of a matrix, such as "statistic" or "basis") for which the quantizer stores matrices
    of this size. Return None if there is none.
    """
    return next((role for role in roles if quantizer.unsupported(Slot((size, size), role=role)) is None), None)


class QuantizerBench(DampedBench):
    """Measure the errors of stored matrices and of the roots computed from them, for every quantizer, spectrum, size
    and dtype.

    A = V Diag(l) V^T is the exact matrix, with eigenvectors V and eigenvalues l. B is the matrix after storage, and
    (B + r I)^-e its root, where r is `ridge` times the largest eigenvalue. The role is the first of `roles` that a
    quantizer accepts. It determines which matrix is stored:

    - `statistic`: A is stored, and B is the decoded A.
    - `basis`: V is stored, and B = W Diag(l) W^T with the decoded basis W and the exact l.
    - `root`: (A + r I)^-e is stored, and all errors are those of the decoded root.

    Each matrix is encoded `writings` times, each time over the previous codes, because the format `eigen` is made for
    matrices that change slowly. The last decoding is measured. A quantizer with error feedback is more accurate in the
    mean of many decodings, but less accurate in a single one. Its errors therefore look too large here.

    `min_elements` of a quantizer is 1 here if its declaration does not set it. Times do not depend on the values of a
    matrix, and are measured once for each size and dtype.
    """

    kind: Literal["quantizers"] = "quantizers"
    quantizers: Annotated[tuple[Quantizer, ...], BeforeValidator(parse_quantizers)] = Field(
        default_factory=default_quantizers, description="quantizers to measure, each a kind or a declaration"
    )
    sizes: PositiveInts = Field((64, 128), description="d of the matrices d x d")
    dtypes: MatrixDtypes = Field(("float32",), description="dtypes of the matrices")
    roles: Listed[Literal["statistic", "basis", "root"]] = Field(
        ("statistic", "basis"),
        description="matrices that may be stored: A, its eigenvectors, or its root; each quantizer stores the first "
        "one that it accepts",
    )
    exponent: Rational = Field(Fraction(1, 4), description="exponent e of the root A^-e")
    ridge: float = Field(
        1e-4,
        ge=0,
        description="ridge that is added to all eigenvalues before a root is computed, in units of the largest one",
    )
    writings: int = Field(
        32, ge=1, description="number of times that a matrix is encoded, each time over its previous codes"
    )
    threshold: float = Field(0.1, gt=0, description="largest relative error of the root that the advice accepts")
    candidate_field: ClassVar[str] = "quantizers"
    columns: ClassVar[Mapping[str, Column]] = {
        "condition": Column("condition number of A"),
        "role": Column("role of the stored matrix: statistic (A), basis (V) or root"),
        "error": Column("||B - A||_F / ||A||_F, here and below the worst of the matrices decoded as finite"),
        "angle": Column("angle between B and A", "degrees"),
        "largest": Column("max |B - A| / max |A|"),
        "orthogonality": Column("||W^T W - I||_F / sqrt(d), W the decoded basis or the eigenvectors of B in `dtype`"),
        "off_diagonal": Column("||offdiag(W^T A W)||_F / ||A||_F"),
        "smallest": Column("least eigenvalue of B over the largest in size"),
        "root_error": Column("relative error of (B + r I)^-e to (A + r I)^-e, eigenvalues of B below 0 taken for 0"),
        "root_angle": Column("angle between these roots", "degrees"),
        "ok": Column("share of the matrices decoded as finite"),
        "bytes": Column("stored bytes per entry of A, l included", "bytes"),
        "encode_ms": Column("time to encode one matrix", "ms"),
        "decode_ms": Column("time to decode one matrix", "ms"),
        "encode_speed": Column("bytes read and written per second over those of `clone`; of small stacks the overhead"),
        "decode_speed": Column("the same of decoding"),
    }
    quick_fields: ClassVar[dict[str, Any]] = {
        "sizes": [64],
        "spectra": [*({"kind": "geometric", "condition": c} for c in (1e2, 1e4, 1e6)), "clustered", "recorded"],
        "count": 2,
        "writings": 8,
        "seconds": 0.005,
    }

    def problems(self) -> Sequence[Problem]:
        times: dict[Any, dict[str, float]] = {}
        return [
            Problem({"spectrum": source.name, "size": source.size, "dtype": dtype, "exponent": str(self.exponent)},
                    partial(self._problem, source, dtype, times))
            for dtype in self.dtypes
            for source in self.sources()
        ]  # fmt: skip

    def _problem(self, source: MatrixSource, dtype: str, times: dict[Any, dict[str, float]]) -> StorageProblem | None:
        a, spectrum, d = source.stack(), source.spectrum, source.size
        if a is None:
            return None
        values, vectors = torch.linalg.eigh(a)
        if isinstance(spectrum, Synthetic):
            # The drawn eigenvectors are used: where eigenvalues are equal, `eigh` returns other ones.
            values, vectors = spectrum.eigenvalues(d).expand(len(a), d), orthogonal(len(a), d, self.seed)
        settings = (self.exponent, self.ridge, self.target_device(), getattr(torch, dtype), times)
        return StorageProblem(a, values, vectors, *settings)

    def label(self, candidate: Quantizer) -> str:
        return quantizer_label(candidate)

    def measure(self, candidate: Quantizer, given: StorageProblem) -> Iterator[Row]:
        shape = tuple(given.a.shape[1:])
        role = role_of(candidate, shape[0], self.roles)
        if role is None:
            yield {"problem": "; ".join(str(candidate.unsupported(Slot(shape, role=own))) for own in self.roles)}
            return
        stored = StoredStack(candidate, given.to_store(role), role, self.seed).encoded(self.writings)
        key = (candidate, *stored.x.shape, given.dtype)
        if key not in given.times:
            given.times[key] = self._times(stored)
        yield {
            "condition": given.condition(),
            "role": role,
            **losses(given, role, stored.decode()),
            "bytes": stored.bytes_per_entry(),
            **given.times[key],
        }

    def _times(self, stored: StoredStack) -> dict[str, float]:
        """Return the milliseconds to encode and to decode one matrix, and the speed of both, by column of the results.

        A speed is the number of bytes read and written per second, divided by that of a copy of the stack.
        """
        works = (stored.encode, stored.x.clone, stored.decode)
        encode, copy, decode = (self.milliseconds(work) / len(stored.x) for work in works)
        speed = stored.traffic_over_copy() * copy
        return {
            "encode_ms": encode,
            "decode_ms": decode,
            "encode_speed": speed / encode,
            "decode_speed": speed / decode,
        }

    def table(self) -> Table:
        return Table(
            "stored factors: the worst over matrices; in brackets bytes per second, in percent of those of a copy",
            {"quantizer": "candidate", "size": "size", "dtype": "dtype"},
            {
                "stored": view.cell("role"),
                "bytes": view.cell("bytes", "first", view.finite("{:.3g}")),
                "error": view.cell("error", "worst", view.scientific),
                "angle": view.cell("angle", "worst", view.degrees),
                "largest": view.cell("largest", "worst", view.scientific),
                "not orthogonal": view.cell("orthogonality", "worst", view.scientific),
                "off diagonal": view.cell("off_diagonal", "worst", view.scientific),
                "least": view.cell("smallest", "min", view.scientific),
                "root: median": view.cell("root_error", "median", view.scientific),
                "worst": view.cell("root_error", "worst", view.scientific),
                "at": view.cell("spectrum", of=view.at_worst("root_error")),
                "encode ms": lambda rows: _cost(rows, "encode"),
                "decode ms": lambda rows: _cost(rows, "decode"),
            },
        )

    def panels(self) -> tuple[Panel, Panel]:
        root, same = f"error of $A^{{-{self.exponent}}}$", ("dtype",)
        errors, band = (view.reduction("root_error"), view.reduction("root_error", "worst")), self.threshold
        return (
            Panel("bytes per entry", f"{root}, median and worst over matrices",
                  {"{}": lambda rows: [(rows[0]["bytes"], error(rows)) for error in errors]},
                  same=same, largest=() if self.own else ("size",), band=band),
            self.sweep("root_error", root, same, band),
        )  # fmt: skip

    def recommendations(self) -> Sequence[Recommendation]:
        error = view.reduction("root_error", "worst", "ok")
        fields: dict[str, Any] = {"error": error, "error_name": "worst root error", "threshold": self.threshold}
        fewest = {"cost": view.reduction("bytes"), "cost_text": "{:.3g} bytes per entry".format, "costs": "bytes"}
        recorded = any(spectrum.declaration()["kind"] == "recorded" for spectrum in self.spectra)
        apart = recorded and len(self.spectra) > 1 and not self.own
        found: list[Recommendation] = []
        for name in (", recorded factors", ", all spectra") if apart else ("",):
            chosen = {"recorded"} if name == ", recorded factors" else None
            found += self.recommended(_where(f"{name}, fewest bytes"), keep=_keep(chosen, False), **fewest, **fields)
            where = _where(f"{name}, fastest that saves bytes")
            found += self.recommended(where, keep=_keep(chosen, True), cost=_milliseconds, **fields)
        return found


def _where(more: str) -> Callable[[Row], str]:
    """Return a function from a row of the results to the name of its problem: exponent, size and dtype, then `more`.

    more: text with the choice of rows and the cost that a recommendation is about, such as ", fewest bytes".
    """
    return lambda row: f"A^(-{row['exponent']}), {row['size']} x {row['size']}, {row['dtype']}{more}"


def _keep(spectra: set[str] | None, saving: bool) -> Callable[[Row], bool]:
    """Return a function that selects rows of the results: it returns True for a row to keep.

    spectra: labels of the spectra whose rows are selected; None: all spectra.
    saving: True to select only rows whose quantizer stores fewer bytes than the matrix has.
    """

    def keep(row: Row) -> bool:
        saves = row["bytes"] < getattr(torch, row["dtype"]).itemsize
        return (spectra is None or row["spectrum"] in spectra) and (saves or not saving)

    return keep


def _milliseconds(rows: BenchRows) -> float:
    """Return the median milliseconds to encode one matrix plus those to decode it, over rows of the results."""
    return view.reduction("encode_ms")(rows) + view.reduction("decode_ms")(rows)


def _cost(rows: BenchRows, name: str) -> str:
    return f"{view.milli(view.reduction(f'{name}_ms')(rows))} ({100 * view.reduction(f'{name}_speed')(rows):.0f} %)"


@dataclass(frozen=True)
class StorageProblem:
    """A stack A = V Diag(l) V^T to store, in float64, and the root that is computed from the decoded stack.

    a, values, vectors: A `[N, d, d]`, l `[N, d]` and V `[N, d, d]`.
    exponent, ridge: e and r / lambda_max of the root (A + r I)^-e.
    device, dtype: device and dtype of the tensor that the quantizer encodes.
    times: times measured so far, by quantizer, shape and dtype.
    """

    a: Tensor
    values: Tensor
    vectors: Tensor
    exponent: Fraction
    ridge: float
    device: torch.device
    dtype: torch.dtype
    times: dict[Any, dict[str, float]]

    def condition(self) -> float:
        """Return the largest condition number of the N matrices A to store.

        A condition number is infinite if the smallest eigenvalue is below the rounding errors of float64.
        """
        low, high = self.values.amin(-1), self.values.amax(-1)
        rounding = self.a.shape[-1] * torch.finfo(torch.float64).eps * high
        return worst_of(torch.where(low > rounding, high / low, torch.inf))

    def exact(self, role: Role) -> Tensor:
        """Return, in float64, the matrix that a decoded one should equal: the root of A for the role `root`, else A."""
        return self.root(self.a) if role == "root" else self.a

    def to_store(self, role: Role) -> Tensor:
        """Return the tensor to encode: eigenvectors of A for the role "basis", the root of A for "root", else A."""
        x = self.vectors if role == "basis" else self.exact(role)
        return x.to(self.device, self.dtype)

    def root(self, b: Tensor) -> Tensor:
        """Return (B + r I)^-e for symmetric matrices B. Eigenvalues of B below 0 count as 0."""
        values, q = torch.linalg.eigh(b)
        values = values.clamp_min(0)
        values = values + self.ridge * values[:, -1:]
        root: Tensor = (q * values.pow(-float(self.exponent)).unsqueeze(1)) @ q.mT
        return root


@dataclass(frozen=True)
class StoredStack:
    """A stack of matrices `x`, and the codes that a quantizer stores for them after `step` encodings.

    role: use of the matrices: "statistic", "basis" or "root".
    seed: seed of the first matrix. Each further matrix has the next larger seed.
    codes: the stored codes; None before the first encoding.
    """

    quantizer: Quantizer
    x: Tensor
    role: Role
    seed: int
    codes: Encoded | None = None
    step: int = 0

    def encode(self) -> Encoded:
        """Return new codes of the stack `x`.

        As in the optimizer, the quantizer receives the present codes and a generator of random numbers.
        """
        seeds = torch.arange(len(self.x), device=self.x.device) + self.seed

        def draw(like: Tensor, purpose: str) -> Tensor:
            steps = torch.full_like(seeds, self.step)
            return noise.uniform(seeds, steps, tuple(like.shape[1:]), like.dtype, zlib.crc32(purpose.encode()))

        return self.quantizer.encode(self.x, self.codes, draw)

    def encoded(self, times: int) -> StoredStack:
        """Return the stack after `times` encodings, each over the previous codes."""
        stored = self
        for step in range(1, times + 1):
            stored = replace(stored, codes=stored.encode(), step=step)
        return stored

    def decode(self) -> Tensor:
        """Return the stack as decoded from the stored codes."""
        return self.quantizer.decode(self.codes or {}, Slot(tuple(self.x.shape[1:]), role=self.role), self.x.dtype)

    def traffic_over_copy(self) -> float:
        """Return the bytes that an encoding reads and writes, divided by those that a copy of `x` reads and writes."""
        return (self.x.nbytes + self.code_bytes()) / (2 * self.x.nbytes)

    def bytes_per_entry(self) -> float:
        """Return the stored bytes per entry of `x`. The eigenvalues that belong to a basis count as stored too."""
        total = self.code_bytes()
        if self.role == "basis":
            total += self.x[..., 0].numel() * self.x.element_size()
        return total / self.x.numel()

    def code_bytes(self) -> int:
        """Return the bytes of the stored codes."""
        return sum(tensor.nbytes for tensor in (self.codes or {}).values())


def losses(problem: StorageProblem, role: Role, decoded: Tensor) -> dict[str, float]:
    """Return the errors of a decoded stack, by column of the results (see `QuantizerBench.columns`).

    problem: the exact matrices.
    role: use for which the stack was stored: "statistic", "basis" or "root".
    decoded: `[N, d, d]`, the stack as decoded from its codes.
    """
    ok = decoded.isfinite().all(-1).all(-1).cpu()
    y, a = decoded.double().cpu()[ok], problem.exact(role)[ok]
    b = (y * problem.values[ok].unsqueeze(1)) @ y.mT if role == "basis" else y
    even = symmetrized(b)
    basis = y if role == "basis" else torch.linalg.eigh(even.to(problem.dtype)).eigenvectors.double()
    rotated = basis.mT @ a @ basis
    off = rotated - torch.diag_embed(rotated.diagonal(dim1=-2, dim2=-1))
    gram = basis.mT @ basis - identity_like(a)
    values = torch.linalg.eigvalsh(even)
    wanted, found = (a, even) if role == "root" else (problem.root(a), problem.root(even))
    return {
        "error": worst_of(relative_error(b, a)),
        "angle": worst_of(angle(b, a)),
        "largest": worst_of((b - a).abs().flatten(1).amax(1) / a.abs().flatten(1).amax(1)) if len(a) else math.nan,
        "orthogonality": worst_of(torch.linalg.matrix_norm(gram)) / a.shape[-1] ** 0.5,
        "off_diagonal": worst_of(torch.linalg.matrix_norm(off) / torch.linalg.matrix_norm(a)),
        "smallest": -worst_of(-values[:, 0] / values.abs().amax(-1)) if len(a) else math.nan,
        "root_error": worst_of(relative_error(found, wanted)),
        "root_angle": worst_of(angle(found, wanted)),
        "ok": float(ok.double().mean()),
    }
