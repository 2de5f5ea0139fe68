"""Rows of the root solvers and of the bounds that they scale by.

A size that does not turn with the matrix (row sums, fixed start vectors) makes the ridge of a turned matrix another
one: `rotates` is for the others.
"""

from .makes import EXACT, unknown
from .rows import Fault, Row

NEWTON = {"kind": "coupled_newton"}

ROOT_SOLVERS = (
    Row(
        EXACT,
        degree=-1,
        rotates=True,
        faults=(
            unknown("eigh"),
            Fault({"kind": "eigh", "eps": -1e-6}, "eps: .*greater than or equal to 0"),
            Fault({"kind": "eigh", "deficiency": "drop"}, "deficiency: .*, got 'drop'"),
            Fault({"kind": "eigh", "rtol": 1e-6}, "rtol and atol belong to .*pseudo_inverse, got .*clip_shift"),
            Fault({"kind": "eigh", "deficiency": "add", "atol": 0.1}, "belong to deficiency pseudo_inverse, got .*add"),
            Fault({"kind": "eigh", "deficiency": "pseudo_inverse", "rtol": -1.0}, "rtol: .*or equal to 0"),
            Fault({"kind": "eigh", "deficiency": "perturb_before", "relative": True}, "`relative: false` required"),
        ),
    ),
    Row({"kind": "eigh", "eps": 1e-6, "relative": True, "deficiency": "add"}, "relative", degree=-1, rotates=True),
    Row({"kind": "eigh", "eps": 1e-6, "relative": True, "deficiency": "floor"}, "floor", degree=-1, rotates=True),
    Row({"kind": "eigh", "eps": 1e-6, "relative": True, "by_device": True}, "by device", degree=-1, rotates=True),
    Row({"kind": "eigh", "on_host": True}, "on the host", rotates=True),
    Row({"kind": "eigh", "eps": 0.0, "deficiency": "pseudo_inverse"}, "pseudo-inverse", degree=-1, rotates=True),
    Row(
        {"kind": "eigh", "eps": 0.0, "deficiency": "pseudo_inverse", "rtol": None},
        "pseudo-inverse, cut off at rounding",
        degree=-1,
        rotates=True,
    ),
    Row({"kind": "eigh", "eps": 1e-8, "deficiency": "perturb_before"}, "ridge before", rotates=True),
    Row({**EXACT, "precision": "float64"}, "float64", degree=-1, rotates=True),
    Row(
        {"kind": "cholesky", "eps": 0.0, "ratio": 0.0},
        degree=-1,
        rotates=True,
        faults=(
            unknown("cholesky"),
            Fault({"kind": "cholesky", "eps": -1.0}, "eps: .*or equal to 0"),
            Fault({"kind": "cholesky", "ratio": -1.0}, "ratio: .*or equal to 0"),
        ),
    ),
    Row(
        NEWTON,
        degree=-1,
        rotates=True,
        faults=(
            unknown("coupled_newton"),
            Fault({**NEWTON, "max_iterations": 0}, "max_iterations: .*or equal to 1"),
            Fault({**NEWTON, "max_iterations": 2.5}, "max_iterations: .*integer"),
            Fault({**NEWTON, "tolerance": 0.0}, "tolerance: .*greater than 0"),
            Fault({**NEWTON, "growth": 0.9}, "growth: .*or equal to 1"),
            Fault({**NEWTON, "norm": "spectral"}, "norm: .*, got 'spectral'"),
            Fault({**NEWTON, "stop": "never"}, "stop: .*, got 'never'"),
            Fault({**NEWTON, "eps": 2.0}, "eps: .*less than or equal to 1"),
            Fault({**NEWTON, "retries": -1}, "retries: .*or equal to 0"),
            Fault({**NEWTON, "precision": "float8"}, "precision: .*, got 'float8'"),
            Fault({**NEWTON, "relative": False, "relative_to": "trace"}, "relative_to: .* relative false"),
            Fault({**NEWTON, "retry_above": 0.05}, "retry_above: .* retries 0"),
            Fault({**NEWTON, "scaling": "spectral"}, "scaling: unknown eigenvalue_bound kind 'spectral'"),
        ),
    ),
    Row({**NEWTON, "relative": False}, "absolute ridge", rotates=True),
    Row(
        {
            **NEWTON,
            "relative_to": {"kind": "power_iteration", "steps": 100},
            "max_iterations": 100,
            "growth": 1.2,
            "norm": "max",
            "stop": "rise",
            "retries": 5,
            "retry_above": 0.05,
        },
        "jax",
        degree=-1,
    ),
    Row({**NEWTON, "eps": 1e-3, "precision": "float16"}, "float16"),
    Row({**NEWTON, "eps": 1e-3, "precision": "bfloat16", "scaling": "infinity"}, "bfloat16"),
    Row(
        {"kind": "higher_order", "tolerance": 1e-13, "relative_to": "trace"},
        "invariant",
        degree=-1,
        rotates=True,
        faults=(
            unknown("higher_order"),
            Fault({"kind": "higher_order", "order": 1}, "order: .*or equal to 2"),
            Fault({"kind": "higher_order", "floor": -1.0}, "floor: .*or equal to 0"),
        ),
    ),
    Row({"kind": "higher_order"}, "as it comes", degree=-1),
    Row({"kind": "higher_order", "order": 5, "floor": 1e-7}, "order 5"),
    Row(
        {"kind": "newton_db", "tolerance": 1e-13, "scaling": "frobenius"},
        "invariant",
        degree=-1,
        rotates=True,
        faults=(
            unknown("newton_db"),
            Fault({"kind": "newton_db", "max_error": 0.0}, "max_error: .*greater than 0"),
        ),
    ),
    Row({"kind": "newton_db"}, "as it comes", degree=-1),
    Row(
        {"kind": "newton_db", "eps": 1e-3, "max_iterations": 15, "scaling": {"kind": "power_iteration", "factor": 2.0}},
        "twice the power iteration",
        degree=-1,
    ),
    Row(
        {"kind": "chebyshev", "eps": 1e-6, "interval": [1e-2, 1.0], "scaling": "frobenius"},
        "interval",
        degree=-1,
        rotates=True,
        faults=(
            unknown("chebyshev"),
            Fault({"kind": "chebyshev", "degree": 0}, "degree: .*or equal to 1"),
            Fault({"kind": "chebyshev", "interval": [1.0, 0.5]}, r"0 < low < high, got \[1\.0, 0\.5\]"),
            Fault({"kind": "chebyshev", "interval": [0.0, 1.0]}, r"0 < low < high, got \[0\.0, 1\.0\]"),
            Fault({"kind": "chebyshev", "interval": [0.5]}, "interval"),
            Fault({"kind": "chebyshev", "relative": False}, "needs a ridge relative to `scaling`"),
            Fault({"kind": "chebyshev", "eps": 0.0}, "needs a ridge relative to `scaling`"),
        ),
    ),
    Row({"kind": "chebyshev"}, "as it comes", degree=-1),
    Row(
        {"kind": "cans", "scaling": "frobenius"},
        degree=-1,
        rotates=True,
        faults=(
            unknown("cans"),
            Fault({"kind": "cans", "schedule": []}, "schedule"),
            Fault({"kind": "cans", "schedule": [[1.5, -0.5, 0.0]]}, "schedule"),
            Fault({"kind": "cans", "safety": 0.97}, "safety: .*or equal to 1"),
        ),
    ),
    Row({"kind": "cans"}, "as it comes", degree=-1),
    Row({"kind": "cans", "schedule": [[1.5, -0.5]] * 25}, "Newton-Schulz", degree=-1),
)

EIGENVALUE_BOUNDS = (
    *(Row({"kind": kind}, faults=(unknown(kind),)) for kind in ("guaranteed", "frobenius", "infinity", "trace")),
    Row(
        {"kind": "power_iteration"},
        faults=(
            unknown("power_iteration"),
            Fault({"kind": "power_iteration", "steps": 0}, "steps: .*or equal to 1"),
            Fault({"kind": "power_iteration", "factor": 0.0}, "factor: .*greater than 0"),
        ),
    ),
    Row({"kind": "power_iteration", "steps": 100, "vectors": 1}, "long"),
)
