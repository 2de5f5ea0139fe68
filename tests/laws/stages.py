"""Rows of the stages: preconditioners, graftings, combinators."""

from .makes import COARSE, DELAYED, EVERY, MOMENTUM, RMS, SAME_DECAY, SPREAD, basis, shampoo, unknown
from .rows import Fault, Row

SCHEDULE = {"from": 0.8, "to": 0.95, "steps": 6}
HEAVY_BALL = {"kind": "heavy_ball", "beta": 0.9, "dampening": 0.3}

STAGES = (
    Row({"kind": "identity"}, degree=1, rotates=True, faults=(unknown("identity"),)),
    Row({"kind": "sign"}, degree=0, faults=(unknown("sign"),)),
    Row({"kind": "gradient_sign"}, degree=1, faults=(unknown("gradient_sign"),)),
    Row(
        {"kind": "lagged_rms", "beta": 0.9},
        faults=(
            unknown("lagged_rms"),
            Fault({"kind": "lagged_rms", "beta": 1.0}, "beta", 1),
            Fault({"kind": "lagged_rms", "eps": 0.0}, "eps", 0),
            Fault({"kind": "lagged_rms", "clip_power": -0.25}, "clip_power", 0, -0.25),
        ),
    ),
    Row({"kind": "lagged_rms", "beta": 0.9, "eps": 1e-30, "clip_power": None}, "unclipped", degree=0),
    Row(
        {"kind": "gradient_difference"},
        degree=1,
        rotates=True,
        faults=(
            unknown("gradient_difference"),
            Fault({"kind": "gradient_difference", "beta": 1.0}, "beta", 1),
            Fault({"kind": "gradient_difference", "gamma": 0.0}, "gamma", 0),
        ),
    ),
    Row(
        {"kind": "diagonal_newton", "beta": 0.9},
        faults=(
            unknown("diagonal_newton"),
            Fault({"kind": "diagonal_newton", "gamma": 0.0}, "gamma", 0),
            Fault({"kind": "diagonal_newton", "bound": 0.0}, "bound", 0),
        ),
    ),
    Row(
        {"kind": "atan2", "beta": 0.9},
        degree=0,
        faults=(
            unknown("atan2"),
            Fault({"kind": "atan2", "beta": 1.0}, "beta", 1),
            Fault({"kind": "atan2", "scale": 0.0}, "scale", 0),
            Fault({"kind": "atan2", "width": -1.0}, "width", 0, -1.0),
        ),
    ),
    Row(
        {"kind": "sinkhorn", "rounds": 2},
        degree=0,
        faults=(unknown("sinkhorn"), Fault({"kind": "sinkhorn", "rounds": 0}, "rounds", 1, 0)),
    ),
    Row(
        {"kind": "dion", "beta": 0.9, "rank": 3},
        degree=0,
        faults=(
            unknown("dion"),
            Fault({"kind": "dion", "beta": 1.0}, "beta", 1),
            Fault({"kind": "dion", "rank": 0}, "rank", 1, 0),
        ),
    ),
    Row(
        {"kind": "dion2", "fraction": 0.5},
        degree=0,
        faults=(
            unknown("dion2"),
            Fault({"kind": "dion2", "fraction": 0.0}, "fraction", 0),
            Fault({"kind": "dion2", "side": "all"}, "side", "all"),
            Fault({"kind": "dion2", "solver": "qr"}, "polar_solver", "qr"),
        ),
    ),
    Row(
        MOMENTUM,
        degree=1,
        rotates=True,
        faults=(
            unknown("momentum"),
            Fault({"kind": "momentum", "beta": 1.0}, "beta", 1),
            Fault({"kind": "momentum", "beta": -0.1}, "beta", 0, -0.1),
            Fault({"kind": "momentum", "beta": float("nan")}, "beta", "nan"),
            Fault({"kind": "momentum", "beta": "0.9"}, "beta", "0.9"),
            Fault(
                {"kind": "momentum", "beta3": 0.5, "nesterov": True},
                "nesterov",
                "beta3",
                "true",
            ),
            Fault({"kind": "momentum", "dampening": 0.1}, "dampening"),
            Fault({"kind": "momentum", "name": "a.b"}, "name"),
        ),
    ),
    Row({**MOMENTUM, "nesterov": True}, "nesterov", degree=1, rotates=True),
    Row({**MOMENTUM, "bias_correction": False}, "uncorrected", degree=1, rotates=True),
    Row(
        {"kind": "row_gains", "inner": [MOMENTUM], "gain": [MOMENTUM]},
        faults=(
            unknown("row_gains"),
            Fault({"kind": "row_gains", "inner": [], "gain": ["sign"]}, "inner"),
            Fault({"kind": "row_gains", "inner": ["sign"]}, "gain"),
        ),
    ),
    Row(
        {"kind": "noise_metric", "inner": [MOMENTUM]},
        faults=(
            unknown("noise_metric"),
            Fault({"kind": "noise_metric", "inner": []}, "inner"),
            Fault({"kind": "noise_metric", "inner": ["sign"], "bound": 0.5}, "bound", 1),
            Fault({"kind": "noise_metric", "inner": ["sign"], "power": 3.0}, "power", 2),
        ),
    ),
    Row(
        {**HEAVY_BALL, "nesterov": True},
        degree=1,
        rotates=True,
        faults=(
            unknown("heavy_ball"),
            Fault({"kind": "heavy_ball", "beta": 1.0}, "beta", 1),
            Fault({"kind": "heavy_ball", "dampening": 1.0}, "dampening", 1),
            Fault({"kind": "heavy_ball", "bias_correction": False}, "bias_correction"),
            Fault({"kind": "heavy_ball", "undamped_start": True}, "undamped_start", 0),
            Fault(
                {"kind": "heavy_ball", "nesterov": True, "undamped_nesterov": True},
                "undamped_nesterov",
                0,
            ),
            Fault({**HEAVY_BALL, "undamped_nesterov": True}, "undamped_nesterov"),
        ),
    ),
    Row({**MOMENTUM, "beta": SCHEDULE, "nesterov": True}, "scheduled", degree=1, rotates=True),
    Row(
        {"kind": "momentum_mixture", "means": [{"beta": 0.5, "weight": 0.4}, {"beta": 0.9, "weight": 0.6}]},
        degree=1,
        rotates=True,
        faults=(
            unknown("momentum_mixture"),
            Fault({"kind": "momentum_mixture", "means": []}, "means"),
            Fault({"kind": "momentum_mixture", "means": [{"beta": 1.0, "weight": 1.0}]}, "means", 1),
            Fault({"kind": "momentum_mixture", "means": [{"beta": 0.9}]}, "means", "weight"),
            Fault(
                {"kind": "momentum_mixture", "means": [{"beta": 0.9, "weight": 1.0}], "nesterov": 1.0}, "nesterov", 1
            ),
        ),
    ),
    Row(
        {
            "kind": "momentum_mixture",
            "means": [{"beta": SCHEDULE, "weight": {"from": 1.0, "to": 0.2, "steps": 6}}, {"beta": 0.9, "weight": 0.6}],
            "nesterov": 0.9,
        },
        "scheduled",
        degree=1,
        rotates=True,
    ),
    Row(
        {"kind": "aligned_decay", "rate": 0.1},
        faults=(unknown("aligned_decay"), Fault({"kind": "aligned_decay", "rate": 0.0}, "rate", 0)),
    ),
    Row({"kind": "aligned_decay", "rate": 2.0, "follow_lr": True}, "following"),
    Row({**RMS, "beta": SCHEDULE}, "scheduled", degree=0),
    Row({**HEAVY_BALL, "undamped_start": True}, "undamped", degree=1, rotates=True),
    Row({**HEAVY_BALL, "nesterov": True, "undamped_nesterov": True}, "undamped look-ahead", degree=1, rotates=True),
    Row(
        RMS,
        degree=0,
        faults=(
            unknown("rms"),
            Fault({"kind": "rms", "beta": 1.1}, "beta", 1, 1.1),
            Fault({"kind": "rms", "eps": 0.0}, "eps", 0),
            Fault({"kind": "rms", "beta": 1.0, "bias_correction": False}, "bias_correction", 1, "false"),
            Fault({"kind": "rms", "damped": False, "bias_correction": False}, "bias_correction", "false"),
            Fault({"kind": "rms", "beta": 1.0, "eps_on": "raw"}, "eps_on", 1, "raw"),
            Fault({"kind": "rms", "damped": False, "eps_on": "raw"}, "eps_on", "false"),
            Fault({"kind": "rms", "bias_correction": False, "eps_on": "raw"}, "eps_on", "bias_correction", "false"),
            Fault({"kind": "rms", "beta": 1.0, "damped": False}, "damped", 1),
        ),
    ),
    Row({**RMS, "bias_correction": False}, "uncorrected", degree=0),
    Row({**RMS, "eps_on": "raw"}, "raw eps", degree=0),
    Row({**RMS, "beta": 1.0}, "sum", degree=0),
    Row({**RMS, "source": "direction", "per": "longest"}, "lanes"),
    Row({"kind": "rms"}, "as it comes"),
    Row(
        {"kind": "adafactor"},
        degree=0,
        faults=(
            unknown("adafactor"),
            Fault({"kind": "adafactor", "decay_power": 0.0}, "decay_power", 0),
            Fault({"kind": "adafactor", "beta": 1.0}, "beta", 1),
            Fault({"kind": "adafactor", "beta": 0.9, "decay_power": 0.5}, "decay_power", "beta", 0.9),
        ),
    ),
    Row({"kind": "adafactor", "beta": 0.9}, "constant decay", degree=0),
    Row(
        {"kind": "relative_step"},
        degree=1,
        rotates=True,
        faults=(unknown("relative_step"), Fault({"kind": "relative_step", "floor": 0.0}, "floor", 0)),
    ),
    Row({"kind": "relative_step", "decay": False}, "no decay", degree=1, rotates=True),
    Row(
        {"kind": "clip_rms"},
        rotates=True,
        faults=(unknown("clip_rms"), Fault({"kind": "clip_rms", "threshold": -1.0}, "threshold", 0)),
    ),
    Row(
        {"kind": "clip_norm", "max_norm": 0.5},
        rotates=True,
        faults=(
            unknown("clip_norm"),
            Fault({"kind": "clip_norm", "max_norm": 0.0}, "max_norm", 0),
            Fault({"kind": "clip_norm", "per": "row"}, "per", "parameter", "model", "row"),
        ),
    ),
    Row({"kind": "clip_norm", "per": "parameter"}, "whole"),
    Row({"kind": "clip_norm", "per": "model", "max_norm": 0.1}, "of the model", degree=1, rotates=True),
    Row({"kind": "center"}, degree=1, faults=(unknown("center"),)),
    Row(
        {"kind": "scale"},
        degree=1,
        rotates=True,
        faults=(
            unknown("scale"),
            Fault({"kind": "scale", "rule": "mup"}, "rule", "mup"),
            Fault({"kind": "scale", "rule": "unit_rms"}, "rule", "unit_rms"),
            Fault({"kind": "scale", "factor": 0.0}, "factor", 0),
        ),
    ),
    Row({"kind": "scale", "rule": "match_rms"}, "match_rms", degree=1, rotates=True),
    Row({"kind": "scale", "rule": "aspect"}, "aspect", degree=1, rotates=True),
    Row({"kind": "scale", "rule": "spectral", "factor": 3.0}, "spectral", degree=1, rotates=True),
    Row({"kind": "scale", "rule": "kernel"}, "kernel", degree=1, rotates=True),
    Row(
        {"kind": "normalize", "factor": 0.2},
        degree=0,
        rotates=True,
        faults=(
            unknown("normalize"),
            Fault({"kind": "normalize", "rule": "aspect"}, "rule", "aspect"),
            Fault({"kind": "normalize", "factor": 0.0}, "factor", 0),
        ),
    ),
    Row({"kind": "normalize", "rule": "norm_preserving"}, "norm_preserving", degree=1, rotates=True),
    Row(
        shampoo(),
        degree=0,
        faults=(
            unknown("shampoo"),
            Fault({"kind": "shampoo", "exponent": "1/0"}, "exponent", "1/4"),
            Fault({"kind": "shampoo", "exponent": -0.5}, "exponent", "1/4"),
            Fault({"kind": "shampoo", "solver": "eig"}, "solver", "root_solver", "eig", "eigh"),
            Fault({"kind": "shampoo", "solver": "coupled_newton", "exponent": "1/100"}, "q/p"),
        ),
    ),
    Row(shampoo(refresh=DELAYED), "delayed", degree=0),
    Row(shampoo(exponent="1/2"), "power 1/2", degree=lambda order: 1 - order),
    Row(shampoo(statistic={"kind": "gram", "beta": 1.0}), "sum", degree=0),
    Row(shampoo(statistic={"kind": "gram", "axes": {"side": "smaller"}}, exponent="1/2"), "one side", degree=0),
    Row(shampoo(statistic={"kind": "gram", "axes": {"max_size": 6}}), "bounded", blocks=((6, 5), (7,), (8, 4))),
    Row(shampoo(solver="coupled_newton", refresh=SPREAD), "newton, spread", degree=0),
    Row(
        shampoo(solver={"kind": "coupled_newton", "eps": 1e-2, "tolerance": 1e-13}, refresh=EVERY),
        "newton",
        degree=0,
        rotates=True,
    ),
    Row(shampoo(solver={"kind": "eigh", "eps": 1e-3}, refresh=EVERY), "ridge", rotates=True),
    Row({"kind": "shampoo"}, "as it comes", singular=True),
    Row(
        basis(MOMENTUM, RMS),
        degree=0,
        faults=(
            unknown("eigenbasis"),
            Fault({"kind": "eigenbasis"}, "inner"),
            Fault({"kind": "eigenbasis", "inner": ["rms", "rms"]}, "inner", "rms", "name"),
            Fault({"kind": "eigenbasis", "inner": "shampoo"}, "inner.shampoo"),
            Fault({"kind": "eigenbasis", "inner": "rms", "timing": "late"}, "timing", "late"),
            Fault({"kind": "eigenbasis", "inner": "sign", "transport": "marginals"}, "transport", 0.95, "none"),
            Fault({"kind": "eigenbasis", "inner": "rms", "statistic_frame": "own"}, "statistic_frame", "own"),
            Fault(
                {
                    "kind": "eigenbasis",
                    "inner": "rms",
                    "statistic_frame": "basis",
                    "solver": {"kind": "subspace", "rank": 2},
                },
                "statistic_frame",
            ),
        ),
    ),
    Row(basis(MOMENTUM, COARSE, solver="eigh", timing="current", refresh=EVERY), "eigh", rotates=True),
    Row(basis(MOMENTUM, RMS, timing="lagged", refresh=SPREAD), "lagged, spread", degree=0),
    Row(basis(MOMENTUM, RMS, timing="lagged", transport="permute"), "published", degree=0),
    Row(basis(MOMENTUM, RMS, timing="lagged", transport="permute", refresh=DELAYED), "published, delayed", degree=0),
    Row(
        basis(RMS, transport="marginals", statistic=SAME_DECAY, statistic_frame="basis", refresh=DELAYED),
        "in the basis, delayed",
        degree=0,
    ),
    Row(basis(RMS, transport="none", refresh=SPREAD), "none, spread", degree=0),
    Row(basis(MOMENTUM, {"kind": "adafactor", "beta": 0.9}), "factored", degree=0),
    Row(basis(MOMENTUM, RMS, transport="marginals", statistic=SAME_DECAY), "marginals", degree=0),
    Row(
        basis(RMS, transport="marginals", statistic=SAME_DECAY, statistic_frame="basis", refresh=SPREAD),
        "marginals, spread",
        degree=0,
    ),
    Row(
        basis(
            MOMENTUM,
            {"kind": "adafactor", "beta": 0.9},
            transport="marginals",
            statistic={**SAME_DECAY, "axes": {"side": "right"}},
        ),
        "marginals, factored, one side",
        degree=0,
    ),
    Row(
        basis(MOMENTUM, RMS, transport="marginals", statistic={**SAME_DECAY, "kind": "bregman"}, refresh=EVERY),
        "marginals, whitened",
        degree=0,
    ),
    Row(basis({"kind": "sign"}, statistic={"kind": "gram", "axes": {"side": "right"}}), "one side, sign", degree=0),
    Row(
        basis(MOMENTUM, RMS, statistic={"kind": "gram", "axes": {"vectors": False}}, refresh=SPREAD),
        "no vectors",
        degree=0,
    ),
    Row({"kind": "eigenbasis", "inner": ["momentum", "rms"]}, "as it comes", singular=True),
    Row({"kind": "eigenbasis", "inner": ["momentum", "rms"], "timing": "current"}, "current at once", singular=True),
    Row({"kind": "eigenbasis", "inner": ["momentum", "rms"], "statistic_frame": "basis"}, "turning", singular=True),
    Row(
        {"kind": "spectral"},
        degree=0,
        rotates=True,
        faults=(unknown("spectral"), Fault({"kind": "spectral", "solver": "qr"}, "polar_solver", "qr")),
    ),
    Row({"kind": "spectral", "solver": "svd"}, "svd", degree=0, rotates=True),
    Row({"kind": "spectral", "nuclear_norm": True}, "nuclear norm", degree=1, rotates=True),
    Row({"kind": "spectral", "solver": {"kind": "newton_schulz", "precision": "bfloat16"}}, "bfloat16"),
    Row(
        {"kind": "graft", "direction": [MOMENTUM, shampoo()], "magnitude": RMS},
        degree=0,
        faults=(
            unknown("graft"),
            Fault({"kind": "graft", "direction": "sign"}, "magnitude"),
            Fault({"kind": "graft", "direction": "sign", "magnitude": "sgd"}, "magnitude.sgd", "sgd"),
            Fault({"kind": "graft", "direction": "sign", "magnitude": "rms", "start": 0}, "start", 1),
        ),
    ),
    Row({"kind": "graft", "direction": "sign", "magnitude": "identity", "start": 5}, "late", degree=1),
    Row({"kind": "graft", "direction": "sign", "magnitude": "identity", "per": "parameter"}, "whole", degree=1),
    Row({"kind": "eigenbasis", "inner": ["momentum", "rms"], "timing": "lagged"}, "lagged at once", singular=True),
    Row(
        {
            "kind": "graft",
            "direction": shampoo(solver={"kind": "eigh", "eps": 1e-3}, refresh=EVERY),
            "magnitude": "identity",
        },
        "rotating",
        rotates=True,
    ),
    Row(
        {"kind": "chain", "stages": [MOMENTUM, RMS]},
        degree=0,
        faults=(
            unknown("chain"),
            Fault({"kind": "chain", "stages": 3}, "stages"),
            Fault({"kind": "chain", "stages": [{"beta": 1}]}, "stages"),
        ),
    ),
    Row(
        {"kind": "transform", "before": {"kind": "clip_norm"}, "inner": [MOMENTUM, RMS]},
        faults=(
            unknown("transform"),
            Fault({"kind": "transform", "before": "center"}, "inner"),
            Fault({"kind": "transform", "before": [], "inner": "rms"}, "before", 1),
            Fault(
                {
                    "kind": "transform",
                    "before": {"kind": "eigenbasis", "inner": "rms", "timing": "lagged"},
                    "inner": "rms",
                },
                "before.eigenbasis",
            ),
        ),
    ),
    Row(
        {"kind": "transform", "before": MOMENTUM, "inner": [basis(MOMENTUM, RMS, timing="lagged")]}, "lagged", degree=0
    ),
    Row(
        {"kind": "cautious"},
        degree=1,
        faults=(
            unknown("cautious"),
            Fault({"kind": "cautious", "floor": 0.0}, "floor", 0),
            Fault({"kind": "cautious", "per": "row"}, "per", "block", "parameter", "row"),
        ),
    ),
    Row({"kind": "cautious", "per": "parameter", "floor": 0.1}, "whole", degree=1),
)
