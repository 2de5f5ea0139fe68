"""Rows of the basis solvers."""

from .makes import unknown
from .rows import Fault, Row

BASIS_SOLVERS = (
    Row(
        {"kind": "eigh"},
        faults=(
            unknown("eigh"),
            Fault({"kind": "eigh", "order": "random"}, "order", "descending"),
            Fault({"kind": "eigh", "tolerance": 1.0}, "tolerance", 1),
        ),
    ),
    Row({"kind": "eigh", "order": "ascending"}, "ascending"),
    Row({"kind": "eigh", "on_host": True}, "on the host"),
    Row({"kind": "eigh", "tolerance": 1e-10}, "when needed"),
    Row(
        {"kind": "power_qr"},
        faults=(unknown("power_qr"), Fault({"kind": "power_qr", "steps": 0}, "steps", 1)),
    ),
    Row({"kind": "power_qr", "steps": 3, "bootstrap": False}, "no bootstrap"),
    Row({"kind": "power_qr", "by_device": True}, "by device"),
    Row(
        {"kind": "adaptive_qr", "tolerance": 1e-10},
        faults=(
            unknown("adaptive_qr"),
            Fault({"kind": "adaptive_qr", "tolerance": -0.1}, "tolerance", 0),
            Fault({"kind": "adaptive_qr", "max_steps": 0}, "max_steps", 1),
        ),
    ),
    Row({"kind": "adaptive_qr", "tolerance": 0.0, "max_steps": 1, "bootstrap": False}, "no bootstrap"),
    Row(
        {"kind": "cholesky_qr"},
        faults=(
            unknown("cholesky_qr"),
            Fault({"kind": "cholesky_qr", "rounds": 1}, "rounds", 2),
            Fault({"kind": "cholesky_qr", "max_error": 0.0}, "max_error", 1),
        ),
    ),
    Row({"kind": "cholesky_qr", "steps": 2, "rounds": 3, "bootstrap": False}, "no bootstrap"),
    Row({"kind": "cholesky_qr", "wide": True}, "wide"),
    Row(
        {"kind": "subspace", "rank": 3},
        faults=(unknown("subspace"), Fault({"kind": "subspace", "rank": 0}, "rank", 1)),
    ),
    Row({"kind": "subspace", "rank": 64, "steps": 2}, "of all"),
    Row(
        {"kind": "qr_iteration"},
        faults=(
            unknown("qr_iteration"),
            Fault({"kind": "qr_iteration", "order": "sorted"}, "order", "descending"),
            Fault({"kind": "qr_iteration", "eps": -1e-9}, "eps", 0),
        ),
    ),
    Row({"kind": "qr_iteration", "steps": 100, "tolerance": 1e-10}, "to the end"),
    Row({"kind": "qr_iteration", "order": "descending", "bootstrap": True}, "descending"),
)
