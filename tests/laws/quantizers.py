"""Rows of the quantizers, and what is made of them for small matrices."""

from typing import Any

from eigengraft.component import validated
from eigengraft.quantization import Quantizer

from .makes import unknown
from .rows import Fault, Row


def too_small(kind: str) -> Fault:
    return Fault({"kind": kind, "block_size": 0}, "block_size", 1, 0)


SMALL = {"kind": "int4", "min_elements": 1}

QUANTIZERS = (
    Row(
        {"kind": "symmetric"},
        faults=(unknown("symmetric"), Fault({"kind": "symmetric", "inner": "int5"}, "inner", "quantizer")),
    ),
    Row({"kind": "symmetric", "inner": SMALL}, "coded"),
    Row(
        {"kind": "float32"},
        faults=(unknown("float32"), Fault({"kind": "float32", "min_elements": 0}, "min_elements", 1)),
    ),
    Row({"kind": "bf16"}, faults=(unknown("bf16"), Fault({"kind": "bf16", "rounding": "up"}, "rounding", "up"))),
    Row({"kind": "bf16", "rounding": "stochastic"}, "stochastic"),
    Row({"kind": "split_float"}, faults=(unknown("split_float"),)),
    Row(
        {"kind": "fp8"},
        faults=(unknown("fp8"), too_small("fp8"), Fault({"kind": "fp8", "digits": "e3m4"}, "digits", "e3m4")),
    ),
    Row({"kind": "fp8", "digits": "e5m2"}, "e5m2"),
    Row(
        {"kind": "int8"},
        faults=(
            unknown("int8"),
            too_small("int8"),
            Fault({"kind": "int8", "buckets": "column", "scale": "double"}, "scale", "column", "double"),
            Fault({"kind": "int8", "buckets": "column", "block_size": 64}, "block_size"),
        ),
    ),
    Row({"kind": "int8", "buckets": "column"}, "columns"),
    Row({"kind": "int8", "rounding": "stochastic", "scale": "double"}, "stochastic, double"),
    Row({"kind": "int16"}, faults=(unknown("int16"), too_small("int16"))),
    Row({"kind": "int16", "buckets": "column"}, "columns"),
    Row(
        {"kind": "uint8"},
        faults=(unknown("uint8"), Fault({"kind": "uint8", "compand": "log"}, "compand", "log")),
    ),
    Row({"kind": "uint8", "compand": "sqrt"}, "companded"),
    Row({"kind": "int4"}, faults=(unknown("int4"), Fault({"kind": "int4", "codebook": "fp4"}, "codebook", "fp4"))),
    *(
        Row({"kind": "int4", "codebook": codebook}, codebook)
        for codebook in ("dynamic", "nf4", "symmetric_integer", "unsigned")
    ),
    Row({"kind": "int4", "scale": "double"}, "double"),
    Row({"kind": "int3"}, faults=(unknown("int3"), Fault({"kind": "int3", "codebook": "nf4"}, "codebook", "nf4"))),
    Row({"kind": "int3", "codebook": "dynamic"}, "dynamic"),
    Row({"kind": "codebook8"}, faults=(unknown("codebook8"), too_small("codebook8"))),
    *(Row({"kind": "codebook8", "codebook": codebook}, codebook) for codebook in ("dynamic_unsigned", "linear_square")),
    Row(
        {"kind": "exact_diagonal", "inner": SMALL},
        faults=(
            unknown("exact_diagonal"),
            Fault({"kind": "exact_diagonal", "inner": {"kind": "int4", "bits": 4}}, "inner.bits"),
            Fault(
                {"kind": "exact_diagonal", "inner": {"kind": "symmetric", "inner": SMALL}, "symmetrize": False},
                "symmetrize",
                "symmetric",
                "false",
            ),
        ),
    ),
    Row({"kind": "exact_diagonal", "inner": {"kind": "symmetric", "inner": SMALL}}, "triangular"),
    Row({"kind": "exact_diagonal", "inner": SMALL, "symmetrize": False}, "one-sided"),
    Row(
        {"kind": "orthogonal", "inner": SMALL},
        faults=(unknown("orthogonal"), Fault({"kind": "orthogonal", "rectify": -1}, "rectify", 0)),
    ),
    Row({"kind": "orthogonal", "inner": SMALL, "rectify": 4}, "rectified"),
    Row(
        {"kind": "cholesky", "inner": SMALL},
        faults=(
            unknown("cholesky"),
            Fault({"kind": "cholesky", "error_feedback": 1.0}, "error_feedback", 1),
            Fault({"kind": "cholesky", "eps": 0.0}, "eps", 0),
        ),
    ),
    Row({"kind": "cholesky", "inner": SMALL, "error_feedback": 0.0}, "compensated"),
    Row(
        {"kind": "eigen", "inner": SMALL},
        faults=(unknown("eigen"), Fault({"kind": "eigen", "steps": 0}, "steps", 1)),
    ),
    Row({"kind": "eigen", "inner": SMALL, "steps": 2, "rectify": 0}, "two steps"),
    Row(
        {"kind": "offload", "to": "disk"},
        "disk",
        faults=(
            unknown("offload"),
            Fault({"kind": "offload", "to": "tape"}, "to", "tape"),
            Fault({"kind": "offload", "to": "cpu", "directory": "/data"}, "directory", "/data", "disk"),
            Fault({"kind": "offload", "min_elements": 0}, "min_elements", 1),
            Fault({"kind": "offload", "inner": {"kind": "offload"}}, "inner", "offload"),
            Fault({"kind": "orthogonal", "inner": {"kind": "offload"}}, "inner", "offload"),
            Fault({"kind": "symmetric", "inner": {"kind": "offload"}}, "inner", "offload"),
        ),
    ),
    Row({"kind": "offload", "inner": SMALL}, "cpu"),
    Row({"kind": "offload", "to": "disk", "inner": {"kind": "symmetric", "inner": SMALL}}, "disk, coded"),
)

STOCHASTIC = {"kind": "int8", "rounding": "stochastic"}
WITH_NOISE_INSIDE = (
    Row({"kind": "symmetric", "inner": STOCHASTIC}, "stochastic inside"),
    Row({"kind": "exact_diagonal", "inner": {"kind": "bf16", "rounding": "stochastic"}}, "stochastic inside"),
    Row({"kind": "orthogonal", "inner": STOCHASTIC}, "stochastic inside"),
    Row({"kind": "cholesky", "inner": STOCHASTIC, "error_feedback": 0.5}, "stochastic inside"),
    Row({"kind": "eigen", "inner": STOCHASTIC}, "stochastic inside"),
    Row({"kind": "offload", "to": "disk", "inner": STOCHASTIC}, "stochastic inside"),
)
"""More of the structures, for the laws in which random numbers take part."""


def small(fields: Any, size: int = 8) -> Quantizer:
    """The quantizer that takes slots of any size, with blocks of `size` numbers where it has blocks; also inside."""
    quantizer = validated(Quantizer, fields)
    known = type(quantizer).model_fields
    changes = {name: value for name, value in (("min_elements", 1), ("block_size", size)) if name in known}
    if getattr(quantizer, "buckets", None) == "column":
        del changes["block_size"]
    inner = getattr(quantizer, "inner", None)
    return quantizer.replace(**changes, **({} if inner is None else {"inner": small(inner, size)}))
