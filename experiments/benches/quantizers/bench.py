"""Quantizers: what is lost of a factor and of its root, bytes and time, over spectra, sizes and dtypes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, field_validator
from pydantic_core.core_schema import ValidationInfo

from eigengraft.preconditioners.algebra.exponents import Rational
from eigengraft.quantization import Quantizer
from eigengraft.slots import Role, Slot

from ..common.bench import Bench
from ..common.declarations import label, listed, require_distinct
from ..common.fields import DTYPES, MatrixDtypes, PositiveInts
from ..common.results import FigurePanel, ResultTable
from ..common.timing import milliseconds
from ..problems.spectra import Geometric, Spectrum, default_spectra, require_invertible
from .declarations import default_quantizers, parse_quantizers, quantizer_label, role_of
from .measure import StorageProblem, StoredStack, decompose, losses, store_repeatedly
from .rows import QuantizerRow
from .view import quantizer_advice, quantizer_panels, quantizer_summary


class QuantizerBench(Bench):
    """Quantizers x spectra x sizes x dtypes, and the root (B + r I)^-e, r = ridge lambda_max, of what comes back.

    A quantizer stores the matrices in the first of `roles` that it takes: structures for orthonormal columns get the
    eigenvectors. A quantizer declared without a least size has none. Each matrix is written `writings` times over the
    codes stored before, because `eigen` is meant for matrices that move slowly. Error feedback makes a single decoding,
    as measured here, worse, and the mean over many better. Time does not depend on the spectrum and is measured once.
    """

    kind: Literal["quantizers"] = "quantizers"
    quantizers: Annotated[tuple[Quantizer, ...], BeforeValidator(parse_quantizers)] = Field(
        default_factory=default_quantizers, strict=False, description="declarations, or kinds"
    )
    spectra: Annotated[tuple[Spectrum, ...], BeforeValidator(listed)] = Field(
        default_factory=default_spectra, strict=False, description="the matrices"
    )
    sizes: PositiveInts = Field(default=(64, 128), strict=False, description="d of the matrices d x d")
    dtypes: MatrixDtypes = Field(default=("float32",), strict=False, description="dtypes of the matrices")
    roles: Annotated[tuple[Literal["statistic", "basis", "root"], ...], BeforeValidator(listed)] = Field(
        default=("statistic", "basis"), strict=False, description="what may be stored: A, its eigenvectors, its root"
    )
    exponent: Rational = Field(default=Fraction(1, 4), description="exponent e of the root A^-e")
    ridge: float = Field(default=1e-4, ge=0, description="added to all eigenvalues, in units of the largest")
    writings: int = Field(default=32, ge=1, description="times a matrix is written, each over the one before")
    count: int = Field(default=4, ge=1, description="matrices in a stack")
    threshold: float = Field(default=0.1, gt=0, description="largest root error that the advice accepts")
    candidate_field: ClassVar[str] = "quantizers"
    quick_fields: ClassVar[dict[str, Any]] = {
        "sizes": [64],
        "spectra": [*({"kind": "geometric", "condition": c} for c in (1e2, 1e4, 1e6)), "clustered", "recorded"],
        "count": 2,
        "writings": 8,
        "seconds": 0.005,
    }

    @field_validator("quantizers")
    @classmethod
    def _distinct(cls, quantizers: tuple[Quantizer, ...]) -> tuple[Quantizer, ...]:
        require_distinct(quantizers, quantizer_label)
        return quantizers

    @field_validator("roles")
    @classmethod
    def _each_has_a_role(cls, roles: tuple[Role, ...], info: ValidationInfo) -> tuple[Role, ...]:
        for quantizer in info.data.get("quantizers", ()):
            sizes = info.data.get("sizes", ())
            if sizes and not any(role_of(quantizer, size, roles) for size in sizes):
                refusals = (quantizer.unsupported(Slot((max(sizes), max(sizes)), role=role)) for role in roles)
                raise ValueError(f"{quantizer_label(quantizer)}: {'; '.join(map(str, refusals))}")
        return roles

    @field_validator("ridge")
    @classmethod
    def _inverses_exist(cls, ridge: float, info: ValidationInfo) -> float:
        return require_invertible(ridge, info.data.get("spectra", ()))

    def cells(self) -> int:
        return len(self.quantizers) * len(self.spectra) * len(self.sizes) * len(self.dtypes)

    def measure(self) -> Iterator[list[QuantizerRow]]:
        device = self.target_device()
        for size, dtype in ((size, dtype) for size in self.sizes for dtype in self.dtypes):
            times: dict[Quantizer, dict[str, float]] = {}
            for spectrum in self.spectra:
                stack = decompose(spectrum, self.count, size, self.seed)
                problem = None
                if stack is not None:
                    problem = StorageProblem(stack, self.exponent, self.ridge, device, DTYPES[dtype])
                for quantizer in self.quantizers:
                    role = role_of(quantizer, size, self.roles)
                    yield [] if problem is None or role is None else [self._row(quantizer, problem, role, times)]

    def _row(
        self, quantizer: Quantizer, problem: StorageProblem, role: Role, times: dict[Quantizer, dict[str, float]]
    ) -> QuantizerRow:
        stored = store_repeatedly(quantizer, problem, role, self.writings, self.seed)
        if quantizer not in times:
            times[quantizer] = self._times(stored)
        return QuantizerRow(
            candidate=quantizer_label(quantizer),
            declaration=quantizer.declaration(),
            device=self.device,
            spectrum=problem.stack.name,
            condition=problem.stack.condition(),
            size=stored.x.shape[-1],
            dtype=str(problem.dtype).removeprefix("torch."),
            role=role,
            exponent=str(self.exponent),
            **losses(problem, role, stored.decode()),
            bytes=stored.bytes_per_entry(),
            **times[quantizer],
        )

    def _times(self, stored: StoredStack) -> dict[str, float]:
        """The fields of a row that are times; a copy is measured between encoding and decoding."""
        works = (stored.encode, stored.x.clone, stored.decode)
        encode, copy, decode = (milliseconds(work, self.threads, self.seconds) / len(stored.x) for work in works)
        speed = stored.traffic_over_copy() * copy
        return {
            "encode_ms": encode,
            "decode_ms": decode,
            "encode_speed": speed / encode,
            "decode_speed": speed / decode,
        }

    def summary(self, rows: Sequence[QuantizerRow]) -> ResultTable:
        return quantizer_summary(rows)

    def panels(self, rows: Sequence[QuantizerRow]) -> tuple[FigurePanel, FigurePanel]:
        swept = {label(spectrum) for spectrum in self.spectra if isinstance(spectrum, Geometric)}
        return quantizer_panels(rows, swept, self.threshold)

    def advice(self, rows: Sequence[QuantizerRow]) -> list[str]:
        return quantizer_advice(rows, self.threshold)
