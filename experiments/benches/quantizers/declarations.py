"""Which quantizers the bench compares, and the names they go by."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from eigengraft.component import checked
from eigengraft.quantization import Quantizer
from eigengraft.slots import Role, Slot

from ..common.declarations import Declaration, defaults, label, listed

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
    """The declaration with `min_elements: 1`: a least size chooses slots and does not belong to a format."""
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
    """Read declarations without a least size; instances stay as they are."""
    return tuple(map(without_least_size, listed(value)))


def quantizer_label(quantizer: Quantizer) -> str:
    """The quantizer's kind, its inner format and the fields that differ from those of a format without a least size."""
    return label(quantizer, without_least_size, always=("inner",)).replace(" inner=None", "").replace(" inner=", " ")


def default_quantizers() -> tuple[Quantizer, ...]:
    """The preferred quantizers that are registered, and every other that needs no field and stores factors."""
    return tuple(
        quantizer for quantizer in _made(defaults(Quantizer, filter(_known, _PREFERRED))) if _stores_factors(quantizer)
    )


def _known(declared: Declaration) -> bool:
    inner = declared.get("inner")
    return declared["kind"] in Quantizer.members and (inner is None or _known(inner))


def _made(declared: Iterable[Declaration]) -> Iterable[Quantizer]:
    return (checked(Quantizer, without_least_size(item)) for item in declared)  # type: ignore[type-abstract]


def _stores_factors(quantizer: Quantizer) -> bool:
    return role_of(quantizer, 64, ("statistic", "basis")) is not None


def role_of(quantizer: Quantizer, size: int, roles: Iterable[Role]) -> Role | None:
    """The first of the roles in which the quantizer stores a matrix of this size, None where it stores none."""
    return next((role for role in roles if quantizer.unsupported(Slot((size, size), role=role)) is None), None)
