"""Rows of the smaller parts: polar solvers, statistics, cadences, weight decays, views."""

from .makes import unknown
from .rows import Fault, Make, Row

POLAR_SOLVERS = (
    Row(
        {"kind": "newton_schulz"},
        faults=(
            unknown("newton_schulz"),
            Fault({"kind": "newton_schulz", "coefficients": [1.0, 2.0]}, "coefficients"),
            Fault({"kind": "newton_schulz", "coefficients": []}, "coefficients"),
            Fault(
                {"kind": "newton_schulz", "steps": 1, "coefficients": [[2.0, -1.5, 0.5], [1.5, -0.5, 0.0]]},
                "coefficients",
                1,
                2,
            ),
            Fault({"kind": "newton_schulz", "precision": "float16"}, "precision", "float16"),
            Fault(
                {"kind": "newton_schulz", "coefficients": "jorden"},
                "coefficients",
                "jorden",
            ),
            Fault({"kind": "newton_schulz", "coefficients": "deepseek"}, "steps", 10, "deepseek", 5),
            Fault({"kind": "newton_schulz", "scaling": "rows"}, "scaling", "rows"),
        ),
    ),
    Row({"kind": "newton_schulz", "steps": 10, "coefficients": "cans"}, "by name"),
    Row({"kind": "newton_schulz", "scaling": "almost_orthogonal"}, "scaled rows", rotates=False),
    Row(
        {"kind": "triangular"},
        rotates=False,
        faults=(unknown("triangular"), Fault({"kind": "triangular", "passes": 0}, "passes", 1, 0)),
    ),
    Row({"kind": "triangular", "passes": 2}, "twice", rotates=False),
    Row({"kind": "newton_schulz", "steps": 3, "coefficients": [[2.0, -1.5, 0.5], [1.5, -0.5, 0.0]]}, "schedule"),
    Row(
        {"kind": "gram_newton_schulz"},
        faults=(
            unknown("gram_newton_schulz"),
            Fault({"kind": "gram_newton_schulz", "restart": 0}, "restart", 1),
            Fault(
                {"kind": "gram_newton_schulz", "steps": 1, "coefficients": [[2.0, -1.5, 0.5], [1.5, -0.5, 0.0]]},
                "coefficients",
                1,
            ),
        ),
    ),
    Row({"kind": "gram_newton_schulz", "steps": 6, "restart": 4}, "seldom restarted"),
    Row({"kind": "svd"}, faults=(unknown("svd"), Fault({"kind": "svd", "cutoff": -1.0}, "cutoff", 0))),
)

AXES_FAULTS: tuple[tuple[Make, tuple[object, ...]], ...] = (
    ({"side": "top"}, ("side", "top")),
    ({"side": {"two": [0]}}, ("side",)),
    ({"side": {2: [0, 2]}}, ("side", 2, "[0, 2]")),
    ({"side": {1: [0]}, "vectors": False}, ("vectors", "false")),
    ({"max_size": 0}, ("max_size", 1)),
    ({"max_skew": 0.0}, ("max_skew", 0)),
    ({"oversize": "full"}, ("oversize", "diagonal", "full")),
    ({"oversize": "diagonal"}, ("oversize", "max_size", "max_skew", "diagonal")),
    ({"oversize": "diagonal", "max_size": 4, "entries": "diagonal"}, ("oversize", "diagonal")),
)

WARM: Make = {"bias_correction": False, "warm_start": True}
STATISTICS = (
    Row(
        {"kind": "gram", "beta": 0.9},
        degree=2,
        faults=(
            unknown("gram"),
            Fault({"kind": "gram", "beta": 1.5}, "beta", 1),
            *(Fault({"kind": "gram", "axes": fields}, "axes", *says) for fields, says in AXES_FAULTS),
            Fault({"kind": "gram", "interval": 0}, "interval", 1),
            Fault({"kind": "gram", "trace_scaling": 2.0}, "trace_scaling", 1),
            Fault({"kind": "gram", "trace_floor": 1e-12}, "trace_floor", "trace_scaling", 1e-12),
            Fault({"kind": "gram", "polar": "svd"}, "polar", "source", "gradient"),
            Fault({"kind": "gram", "beta": 1.0, "damped": False}, "damped", 1, "false"),
            Fault({"kind": "gram", "beta": 1.0, "bias_correction": False}, "bias_correction", 1, "false"),
            Fault({"kind": "gram", "damped": False, "bias_correction": False}, "bias_correction", "false"),
            Fault({"kind": "gram", "beta": 0.9, "slow": {"beta": 0.8, "weight": 0.5}}, "slow", 0.9, 0.8),
            Fault({"kind": "gram", "beta": 0.9, "slow": {"beta": 0.99, "weight": 2.0}}, "slow", "weight", 1),
            Fault({"kind": "gram", "beta": 1.0, "slow": {"beta": 0.99, "weight": 0.5}}, "slow", "beta", 1),
        ),
    ),
    Row({"kind": "gram", "beta": 0.5, "slow": {"beta": 0.9, "weight": 0.3}}, "two rates", degree=2),
    Row(
        {
            "kind": "gram",
            "beta": 0.5,
            "interval": 3,
            "slow": {"beta": 0.9, "weight": 0.3},
            "axes": {"entries": "diagonal"},
        },
        "two rates, seldom",
        degree=2,
    ),
    Row({"kind": "gram", "beta": 0.9, "bias_correction": False}, "uncorrected", degree=2),
    Row({"kind": "gram", "beta": 1.0}, "sum", degree=2),
    Row({"kind": "gram", "beta": 0.9, "axes": {"side": "left"}}, "left", degree=2),
    Row({"kind": "gram", "beta": 0.0, "axes": {"side": "smaller"}}, "smaller", degree=2),
    Row({"kind": "gram", "beta": 0.9, "axes": {"entries": "diagonal"}, "normalize": "dimension"}, "diagonal", degree=2),
    Row({"kind": "gram", "beta": 0.9, "interval": 3, "damped": False}, "seldom", degree=2),
    Row({"kind": "gram", "beta": 0.9, "trace_scaling": 0.5}, "trace-scaled", degree=1),
    Row(
        {"kind": "bregman", "beta": 0.9},
        degree=lambda order: 2 / order,
        faults=(
            unknown("bregman"),
            Fault({"kind": "bregman", "q": -1}, "q", 0),
            Fault({"kind": "bregman", "order": "both"}, "order", "jacobi", "gauss_seidel"),
            Fault({"kind": "bregman", "normalize": "none"}, "first", "identity", "none", "rms"),
            Fault({"kind": "bregman", "warm_start": True}, "warm_start", "bias_correction", "false"),
            Fault({"kind": "bregman", **WARM, "initial": 0.5}, "warm_start", "initial", 0.5),
        ),
    ),
    Row({"kind": "bregman", "beta": 0.9, **WARM}, "warm", degree=lambda order: 2 / order),
    Row({"kind": "gram", "beta": 0.9, "axes": {"entries": "diagonal"}, **WARM}, "warm diagonal", degree=2),
    Row({"kind": "bregman", "beta": 0.9, "q": 2}, "frobenius", degree=lambda order: 2 / order),
    Row(
        {"kind": "bregman", "beta": 0.9, "q": "1/2", "axes": {"entries": "diagonal"}},
        "diagonal",
        degree=lambda order: 2 / order,
    ),
    Row(
        {"kind": "input_gram", "beta": 0.9},
        degree=0,
        faults=(
            unknown("input_gram"),
            Fault({"kind": "input_gram", "axes": {"side": "left"}}, "axes", "false", "side", "left"),
            Fault({"kind": "input_gram", "source": "direction"}, "source", "direction"),
        ),
    ),
    Row(
        {"kind": "input_gram", "interval": 3, "axes": {"side": "right", "vectors": False, "entries": "diagonal"}},
        "diagonal",
        degree=0,
    ),
    Row({"kind": "bregman", "beta": 0.9, "q": 1, "normalize": "none", "first": "identity"}, "gram", degree=2),
)

CADENCES = (
    Row(
        {"kind": "every", "steps": 5},
        faults=(
            unknown("every"),
            Fault({"kind": "every", "steps": 0}, "steps", 1),
            Fault({"kind": "every", "steps": True}, "steps"),
            Fault({"kind": "every", "stagger": "random"}, "stagger", "random"),
        ),
    ),
    Row({"kind": "every", "steps": 5, "stagger": "none", "start": 7}, "at once, late"),
    Row({"kind": "every", "steps": 1}, "always"),
    Row({"kind": "every", "steps": 5, "offset": 1, "start": 1, "stagger": "none"}, "counted from 0"),
    Row(
        {"kind": "probability", "probability": 0.3},
        faults=(
            unknown("probability"),
            Fault({"kind": "probability", "probability": 0.0}, "probability", 0),
            Fault({"kind": "probability", "probability": 1.5}, "probability", 1),
            Fault({"kind": "probability", "seed": -1}, "seed", 0),
        ),
    ),
    Row({"kind": "probability", "probability": 0.5, "start": 7, "shared": True}, "at once, late"),
)


def decay(kind: str) -> Row:
    wrong = Fault({"kind": kind, "rate": -0.1}, "rate", 0)
    return Row({"kind": kind, "rate": 0.1}, faults=(unknown(kind), wrong))


WEIGHT_DECAYS = (
    *(decay(kind) for kind in ("l2", "decoupled", "corrected", "independent", "cautious")),
    Row({"kind": "decoupled", "rate": 0.1, "placed": "after"}, "after"),
)

VIEWS = (
    Row({"kind": "batches"}, faults=(unknown("batches"),)),
    Row({"kind": "whole"}, faults=(unknown("whole"),)),
    Row({"kind": "pairs"}, faults=(unknown("pairs"),)),
    Row({"kind": "modules"}, faults=(unknown("modules"), Fault({"kind": "modules", "heads": 1}, "heads"))),
    Row(
        {"kind": "matrices", "sections": [4, 2, 2], "heads": 2},
        faults=(
            unknown("matrices"),
            Fault({"kind": "matrices", "batch": -1}, "batch", 0),
            Fault({"kind": "matrices", "sections": [4]}, "sections"),
            Fault({"kind": "matrices", "groups": 2}, "groups", 2),
            Fault({"kind": "matrices", "outputs": "second"}, "outputs", "second"),
        ),
    ),
)
