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
            Fault({"kind": "eigh", "eps": -1e-6}, "eps", 0),
            Fault({"kind": "eigh", "deficiency": "drop"}, "deficiency", "drop"),
            Fault({"kind": "eigh", "rtol": 1e-6}, "pseudo_inverse", "clip_shift"),
            Fault({"kind": "eigh", "deficiency": "add", "atol": 0.1}, "pseudo_inverse"),
            Fault({"kind": "eigh", "deficiency": "pseudo_inverse", "rtol": -1.0}, "rtol", 0),
            Fault({"kind": "eigh", "deficiency": "perturb_before", "relative": True}, "relative: false"),
            Fault({"kind": "eigh", "deficiency": "perturb_before", "ratio": 0.1}, "perturb_before", "ratio", 0.1),
            Fault({"kind": "eigh", "ratio": -0.1}, "ratio", 0),
        ),
    ),
    Row({"kind": "eigh", "eps": 1e-6, "relative": True, "deficiency": "add"}, "relative", degree=-1, rotates=True),
    Row({"kind": "eigh", "eps": 1e-6, "relative": True, "deficiency": "floor"}, "floor", degree=-1, rotates=True),
    Row({"kind": "eigh", "eps": 1e-6, "relative": True, "by_device": True}, "by device", degree=-1, rotates=True),
    Row({"kind": "eigh", "eps": 0.0, "ratio": 1e-11, "deficiency": "add"}, "mean", degree=-1, rotates=True),
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
            Fault({"kind": "cholesky", "eps": -1.0}, "eps", 0),
            Fault({"kind": "cholesky", "ratio": -1.0}, "ratio", 0),
        ),
    ),
    Row(
        NEWTON,
        degree=-1,
        rotates=True,
        faults=(
            unknown("coupled_newton"),
            Fault({**NEWTON, "max_iterations": 0}, "max_iterations", 1),
            Fault({**NEWTON, "max_iterations": 2.5}, "max_iterations"),
            Fault({**NEWTON, "tolerance": 0.0}, "tolerance", 0),
            Fault({**NEWTON, "growth": 0.9}, "growth", 1),
            Fault({**NEWTON, "norm": "spectral"}, "norm", "spectral"),
            Fault({**NEWTON, "stop": "never"}, "stop", "never"),
            Fault({**NEWTON, "eps": 2.0}, "eps", 1),
            Fault({**NEWTON, "retries": -1}, "retries", 0),
            Fault({**NEWTON, "precision": "float8"}, "precision", "float8"),
            Fault({**NEWTON, "relative": False, "relative_to": "trace"}, "relative_to"),
            Fault({**NEWTON, "retry_above": 0.05}, "retry_above", "retries", 0),
            Fault({**NEWTON, "scaling": "spectral"}, "scaling", "eigenvalue_bound", "spectral"),
        ),
    ),
    Row({**NEWTON, "relative": False}, "absolute ridge", rotates=True),
    Row(
        {"kind": "coupled_minimax"},
        degree=-1,
        rotates=True,
        faults=(unknown("coupled_minimax"), Fault({"kind": "coupled_minimax", "eps": 2.0}, "eps", 1)),
    ),
    Row({"kind": "coupled_minimax", "relative": False}, "absolute ridge", rotates=True),
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
            Fault({"kind": "higher_order", "order": 1}, "order", 2),
            Fault({"kind": "higher_order", "floor": -1.0}, "floor", 0),
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
            Fault({"kind": "newton_db", "max_error": 0.0}, "max_error", 0),
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
            Fault({"kind": "chebyshev", "degree": 0}, "degree", 1),
            Fault({"kind": "chebyshev", "interval": [1.0, 0.5]}, 0),
            Fault({"kind": "chebyshev", "interval": [0.0, 1.0]}, 0),
            Fault({"kind": "chebyshev", "interval": [0.5]}, "interval"),
            Fault({"kind": "chebyshev", "relative": False}, "scaling"),
            Fault({"kind": "chebyshev", "eps": 0.0}, "scaling"),
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
            Fault({"kind": "cans", "safety": 0.97}, "safety", 1),
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
            Fault({"kind": "power_iteration", "steps": 0}, "steps", 1),
            Fault({"kind": "power_iteration", "factor": 0.0}, "factor", 0),
        ),
    ),
    Row({"kind": "power_iteration", "steps": 100, "vectors": 1}, "long"),
)
