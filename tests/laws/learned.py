"""Rows of the stages that keep a factor directly, without a statistic beside it.

Without damping a whitening is blind to the size of all gradients; the factors of Jorge and SIRF are not, they start
from a fixed size.
"""

from .makes import EVERY, LATE, SPREAD, unknown
from .rows import Fault, Make, Row

PURE = {"kind": "psgd", "damping": 0.0}
EIGEN = {"kind": "eigenfactors", "initial": 0.1}
"""A factor that starts as 0.1 I has a condition below 1e4 here, so that none of its basis is made of rounding."""


def bounded(size: int) -> Make:
    """Axes whose factors are diagonals where they are longer than that."""
    return {"max_size": size, "oversize": "diagonal"}


DIRECT: tuple[Row, ...] = (
    Row(
        PURE,
        degree=0,
        faults=(
            unknown("psgd"),
            Fault({"kind": "psgd", "form": "dense"}, "form", "triangular", "quad", "dense"),
            Fault({"kind": "psgd", "lr_preconditioner": 0.0}, "lr_preconditioner", 0),
            Fault({"kind": "psgd", "lr_preconditioner": 1.5}, "lr_preconditioner", 1),
            Fault({"kind": "psgd", "smoothing": 1.0}, "smoothing", 1),
            Fault({"kind": "psgd", "damping": -1e-9}, "damping", 0),
            Fault({"kind": "psgd", "axes": {"max_size": 0}}, "axes.max_size", 1),
            Fault({"kind": "psgd", "source": "momentum"}, "source", "momentum"),
        ),
    ),
    Row({**PURE, "form": "quad"}, "quad", degree=0),
    Row({**PURE, "smoothing": 0.0, "lr_preconditioner": 1.0}, "long steps", degree=0),
    Row({**PURE, "form": "quad", "axes": bounded(5), "lr_preconditioner": 1.0}, "quad, diagonals", degree=0),
    Row({**PURE, "axes": bounded(4), "source": "direction"}, "diagonals, of the direction"),
    Row(
        {**PURE, "axes": {"max_skew": 1.0, "oversize": "diagonal"}, "initial_scale": 3.0},
        "skew, fixed start",
        blocks=((6, 5), (7,), (8, 2)),
    ),
    Row({**PURE, "axes": {"side": "left", "vectors": False}}, "one side"),
    Row({"kind": "psgd", "refresh": SPREAD}, "spread"),
    Row({"kind": "psgd"}, "as it comes"),
    Row({"kind": "psgd", "form": "quad"}, "quad as it comes"),
    Row(
        {"kind": "adaptive_shampoo", "eps": 1e-3, "ceiling": 1e-2},
        blocks=((6, 5), (7,)),
        faults=(
            unknown("adaptive_shampoo"),
            Fault({"kind": "adaptive_shampoo", "eps": 0.0}, "eps", 0),
            Fault({"kind": "adaptive_shampoo", "threshold": 0.0}, "threshold", 0),
            Fault({"kind": "adaptive_shampoo", "ceiling": 1e-12}, "ceiling", 1e-10, 1e-12),
            Fault({"kind": "adaptive_shampoo", "statistic": {"kind": "bregman"}}, "statistic"),
            Fault(
                {"kind": "adaptive_shampoo", "statistic": {"kind": "gram", "axes": {"entries": "diagonal"}}},
                "axes",
                "diagonal",
            ),
        ),
    ),
    Row(
        {"kind": "jorge"},
        rotates=True,
        faults=(
            unknown("jorge"),
            Fault({"kind": "jorge", "exponent": "2/3"}, "exponent", "jorge", 1, 64, "2/3"),
            Fault({"kind": "jorge", "exponent": "1/3", "form": "symmetric"}, 1, "1/3"),
            Fault({"kind": "jorge", "initial": 0.0}, "initial", 0),
            Fault({"kind": "jorge", "axes": {"entries": "diagonal"}}, "axes", "diagonal"),
        ),
    ),
    Row({"kind": "jorge", "form": "symmetric", "refresh": SPREAD}, "symmetric, spread", rotates=True),
    Row(
        {"kind": "jorge", "exponent": "1/2", "axes": {"max_size": 5}},
        "power 1/2, bounded",
        blocks=((6, 5), (7, 4), (3, 2, 4)),
    ),
    Row(
        {"kind": "sirf"},
        rotates=True,
        faults=(
            unknown("sirf"),
            Fault({"kind": "sirf", "lr_preconditioner": 1.0}, "lr_preconditioner", 1),
            Fault({"kind": "sirf", "momentum": 1.0}, "momentum", 1),
            Fault({"kind": "sirf", "damping": -1.0}, "damping", 0),
            Fault({"kind": "sirf", "batch_size": 0.0}, "batch_size", 0),
        ),
    ),
    Row({"kind": "sirf", "momentum": 0.0, "lr_preconditioner": 0.5, "batch_size": 32.0}, "no momentum", rotates=True),
    Row({"kind": "sirf", "axes": {"side": {1: [], 2: [1]}}}, "chosen axes"),
    Row({"kind": "sirf", "axes": bounded(4), "refresh": SPREAD}, "diagonals, spread"),
    Row(
        {"kind": "sirf", "moments": "layer", "norm": "max", "axes": {"vectors": False}},
        "of a layer",
        blocks=((6, 5), (7,)),
        faults=(
            Fault({"kind": "sirf", "moments": "layer"}, "axes", "{vectors: false}", "moments: layer"),
            Fault({"kind": "sirf", "moments": "layer", "source": "direction"}, "source"),
            Fault({"kind": "sirf", "moments": "layer", "axes": {"vectors": False}, "norm": "spectral"}, "norm", "max"),
        ),
    ),
    Row(
        {"kind": "sirf", "moments": "layer", "axes": {"vectors": False, **bounded(5)}, "refresh": LATE},
        "of a layer, diagonals",
        blocks=((6, 5), (5, 8)),
    ),
    Row(
        {"kind": "eigenfactors"},
        "as it comes",
        singular=True,
        faults=(
            unknown("eigenfactors"),
            Fault({"kind": "eigenfactors", "beta": 1.0}, "beta", 1),
            Fault({"kind": "eigenfactors", "eps": -1e-6}, "eps", 0),
            Fault({"kind": "eigenfactors", "initial": -1.0}, "initial", 0),
            Fault({"kind": "eigenfactors", "exponent": "1/0"}, "exponent", "1/4"),
            Fault(
                {"kind": "eigenfactors", "solver": {"kind": "subspace", "rank": 3}},
                "solver",
            ),
        ),
    ),
    Row({**EIGEN, "solver": "eigh", "refresh": EVERY}, "eigh", rotates=True),
    Row({**EIGEN, "refresh": SPREAD, "solver": {"kind": "power_qr", "steps": 2}}, "spread"),
    Row({**EIGEN, "initial": 0.0, "refresh": LATE}, "from nothing", degree=0, blocks=((5, 5), (3, 2, 4), (1, 1))),
    Row({**EIGEN, "exponent": {2: [0, "1/2"], 1: 0}, "refresh": EVERY}, "one side"),
    Row({**EIGEN, "axes": bounded(4), "source": "direction", "refresh": EVERY}, "diagonals"),
    Row({**EIGEN, "axes": {"max_size": 5}, "beta": 0.0}, "bounded", blocks=((6, 5), (7, 4), (3, 2, 4))),
)
