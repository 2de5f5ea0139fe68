"""Rows of the stages: preconditioners, graftings, combinators."""

from .makes import COARSE, EVERY, MOMENTUM, RMS, SAME_DECAY, SPREAD, basis, shampoo, unknown
from .rows import Fault, Row

RAMP = {"from": 0.8, "to": 0.95, "steps": 6}
HEAVY_BALL = {"kind": "heavy_ball", "beta": 0.9, "dampening": 0.3}

STAGES = (
    Row({"kind": "identity"}, degree=1, rotates=True, faults=(unknown("identity"),)),
    Row({"kind": "sign"}, degree=0, faults=(unknown("sign"),)),
    Row({"kind": "gradient_sign"}, degree=1, faults=(unknown("gradient_sign"),)),
    Row(
        {"kind": "lagged_rms", "beta": 0.9},
        faults=(
            unknown("lagged_rms"),
            Fault({"kind": "lagged_rms", "beta": 1.0}, r"beta: .*less than 1, got 1\.0"),
            Fault({"kind": "lagged_rms", "eps": 0.0}, r"eps: .*greater than 0, got 0\.0"),
            Fault({"kind": "lagged_rms", "clip_power": -0.25}, r"clip_power: .*or equal to 0, got -0\.25"),
        ),
    ),
    Row({"kind": "lagged_rms", "beta": 0.9, "eps": 1e-30, "clip_power": None}, "unclipped", degree=0),
    Row(
        {"kind": "gradient_difference"},
        degree=1,
        rotates=True,
        faults=(
            unknown("gradient_difference"),
            Fault({"kind": "gradient_difference", "beta": 1.0}, r"beta: .*less than 1, got 1\.0"),
            Fault({"kind": "gradient_difference", "gamma": 0.0}, r"gamma: .*greater than 0, got 0\.0"),
        ),
    ),
    Row(
        {"kind": "diagonal_newton", "beta": 0.9},
        faults=(
            unknown("diagonal_newton"),
            Fault({"kind": "diagonal_newton", "gamma": 0.0}, r"gamma: .*greater than 0, got 0\.0"),
            Fault({"kind": "diagonal_newton", "bound": 0.0}, r"bound: .*greater than 0, got 0\.0"),
        ),
    ),
    Row(
        {"kind": "atan2", "beta": 0.9},
        degree=0,
        faults=(
            unknown("atan2"),
            Fault({"kind": "atan2", "beta": 1.0}, r"beta: .*less than 1, got 1\.0"),
            Fault({"kind": "atan2", "scale": 0.0}, r"scale: .*greater than 0, got 0\.0"),
            Fault({"kind": "atan2", "width": -1.0}, r"width: .*greater than 0, got -1\.0"),
        ),
    ),
    Row(
        {"kind": "sinkhorn", "rounds": 2},
        degree=0,
        faults=(unknown("sinkhorn"), Fault({"kind": "sinkhorn", "rounds": 0}, "rounds: .*or equal to 1, got 0")),
    ),
    Row(
        {"kind": "dion", "beta": 0.9, "rank": 3},
        degree=0,
        faults=(
            unknown("dion"),
            Fault({"kind": "dion", "beta": 1.0}, r"beta: .*less than 1, got 1\.0"),
            Fault({"kind": "dion", "rank": 0}, "rank: .*or equal to 1, got 0"),
        ),
    ),
    Row(
        {"kind": "dion2", "fraction": 0.5},
        degree=0,
        faults=(
            unknown("dion2"),
            Fault({"kind": "dion2", "fraction": 0.0}, r"fraction: .*greater than 0, got 0\.0"),
            Fault({"kind": "dion2", "side": "all"}, "side: .*, got 'all'"),
            Fault({"kind": "dion2", "solver": "qr"}, "unknown polar_solver kind 'qr'"),
        ),
    ),
    Row(
        MOMENTUM,
        degree=1,
        rotates=True,
        faults=(
            unknown("momentum"),
            Fault({"kind": "momentum", "beta": 1.0}, r"beta: .*less than 1, got 1\.0"),
            Fault({"kind": "momentum", "beta": -0.1}, r"beta: .*greater than or equal to 0, got -0\.1"),
            Fault({"kind": "momentum", "beta": float("nan")}, "beta: .*, got nan"),
            Fault({"kind": "momentum", "beta": "0.9"}, "beta: .*valid number, got '0.9'"),
            Fault(
                {"kind": "momentum", "beta3": 0.5, "nesterov": True},
                "nesterov: false is required with beta3, .*got true",
            ),
            Fault({"kind": "momentum", "dampening": 0.1}, "dampening: unknown field"),
            Fault({"kind": "momentum", "name": "a.b"}, "name: .*match pattern"),
        ),
    ),
    Row({**MOMENTUM, "nesterov": True}, "nesterov", degree=1, rotates=True),
    Row({**MOMENTUM, "bias_correction": False}, "uncorrected", degree=1, rotates=True),
    Row(
        {**HEAVY_BALL, "nesterov": True},
        degree=1,
        rotates=True,
        faults=(
            unknown("heavy_ball"),
            Fault({"kind": "heavy_ball", "beta": 1.0}, r"beta: .*less than 1, got 1\.0"),
            Fault({"kind": "heavy_ball", "dampening": 1.0}, r"dampening: .*less than 1, got 1\.0"),
            Fault({"kind": "heavy_ball", "bias_correction": False}, "bias_correction: unknown field"),
            Fault({"kind": "heavy_ball", "undamped_start": True}, "undamped_start: a dampening above 0 is required"),
            Fault(
                {"kind": "heavy_ball", "nesterov": True, "undamped_nesterov": True},
                "undamped_nesterov: a dampening above 0 is required",
            ),
            Fault({**HEAVY_BALL, "undamped_nesterov": True}, "undamped_nesterov: `nesterov: true` is required"),
        ),
    ),
    Row({**MOMENTUM, "beta": RAMP, "nesterov": True}, "scheduled", degree=1, rotates=True),
    Row({**RMS, "beta": RAMP}, "scheduled", degree=0),
    Row({**HEAVY_BALL, "undamped_start": True}, "undamped", degree=1, rotates=True),
    Row({**HEAVY_BALL, "nesterov": True, "undamped_nesterov": True}, "undamped look-ahead", degree=1, rotates=True),
    Row(
        RMS,
        degree=0,
        faults=(
            unknown("rms"),
            Fault({"kind": "rms", "beta": 1.1}, r"beta: .*less than or equal to 1, got 1\.1"),
            Fault({"kind": "rms", "eps": 0.0}, r"eps: .*greater than 0, got 0\.0"),
            Fault(
                {"kind": "rms", "beta": 1.0, "bias_correction": False}, "bias_correction: true .* beta 1, .*got false"
            ),
            Fault({"kind": "rms", "damped": False, "bias_correction": False}, "bias_correction: true .* damped false"),
            Fault({"kind": "rms", "beta": 1.0, "eps_on": "raw"}, "eps_on: 'corrected' .* beta 1, .*got 'raw'"),
            Fault({"kind": "rms", "damped": False, "eps_on": "raw"}, "eps_on: 'corrected' .* damped false"),
            Fault({"kind": "rms", "bias_correction": False, "eps_on": "raw"}, "eps_on: .* bias_correction false"),
            Fault({"kind": "rms", "beta": 1.0, "damped": False}, "damped: true is required with beta 1"),
        ),
    ),
    Row({**RMS, "bias_correction": False}, "uncorrected", degree=0),
    Row({**RMS, "eps_on": "raw"}, "raw eps", degree=0),
    Row({**RMS, "beta": 1.0}, "sum", degree=0),
    Row({"kind": "rms"}, "as it comes"),
    Row(
        {"kind": "adafactor"},
        degree=0,
        faults=(
            unknown("adafactor"),
            Fault({"kind": "adafactor", "decay_power": 0.0}, r"decay_power: .*greater than 0, got 0\.0"),
            Fault({"kind": "adafactor", "beta": 1.0}, r"beta: .*less than 1, got 1\.0"),
            Fault(
                {"kind": "adafactor", "beta": 0.9, "decay_power": 0.5}, "decay_power: no constant `beta`.*got beta 0.9"
            ),
        ),
    ),
    Row({"kind": "adafactor", "beta": 0.9}, "constant decay", degree=0),
    Row(
        {"kind": "relative_step"},
        degree=1,
        rotates=True,
        faults=(unknown("relative_step"), Fault({"kind": "relative_step", "floor": 0.0}, "floor: .*greater than 0")),
    ),
    Row({"kind": "relative_step", "decay": False}, "no decay", degree=1, rotates=True),
    Row(
        {"kind": "clip_rms"},
        rotates=True,
        faults=(unknown("clip_rms"), Fault({"kind": "clip_rms", "threshold": -1.0}, "threshold: .*greater than 0")),
    ),
    Row(
        {"kind": "clip_norm", "max_norm": 0.5},
        rotates=True,
        faults=(
            unknown("clip_norm"),
            Fault({"kind": "clip_norm", "max_norm": 0.0}, "max_norm: .*greater than 0"),
            Fault({"kind": "clip_norm", "per": "row"}, "per: .*'parameter' or 'model', got 'row'"),
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
            Fault({"kind": "scale", "rule": "mup"}, "rule: .*, got 'mup'"),
            Fault({"kind": "scale", "rule": "unit_rms"}, "rule: .*, got 'unit_rms'"),
            Fault({"kind": "scale", "factor": 0.0}, "factor: .*greater than 0"),
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
            Fault({"kind": "normalize", "rule": "aspect"}, "rule: .*, got 'aspect'"),
            Fault({"kind": "normalize", "factor": 0.0}, "factor: .*greater than 0"),
        ),
    ),
    Row({"kind": "normalize", "rule": "norm_preserving"}, "norm_preserving", degree=1, rotates=True),
    Row(
        shampoo(),
        degree=0,
        faults=(
            unknown("shampoo"),
            Fault({"kind": "shampoo", "exponent": "1/0"}, "exponent: .*fraction such as '1/4' is required"),
            Fault({"kind": "shampoo", "exponent": -0.5}, "exponent: .*fraction such as '1/4' is required"),
            Fault({"kind": "shampoo", "solver": "eig"}, "solver: unknown root_solver kind 'eig'; did you mean 'eigh'"),
            Fault({"kind": "shampoo", "solver": "coupled_newton", "exponent": "1/100"}, "takes exponents q/p"),
        ),
    ),
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
            Fault({"kind": "eigenbasis"}, "inner: required, got nothing"),
            Fault({"kind": "eigenbasis", "inner": ["rms", "rms"]}, "inner: .*give each 'rms' its own `name`"),
            Fault({"kind": "eigenbasis", "inner": "shampoo"}, r"inner\.shampoo: .*factors of its own"),
            Fault({"kind": "eigenbasis", "inner": "rms", "timing": "late"}, "timing: .*, got 'late'"),
            Fault({"kind": "eigenbasis", "inner": "sign", "transport": "marginals"}, "transport: .* 0.95, got none"),
            Fault({"kind": "eigenbasis", "inner": "rms", "statistic_frame": "own"}, "statistic_frame: .*, got 'own'"),
            Fault(
                {
                    "kind": "eigenbasis",
                    "inner": "rms",
                    "statistic_frame": "basis",
                    "solver": {"kind": "subspace", "rank": 2},
                },
                "statistic_frame: all columns of a basis are required, got a solver that keeps fewer",
            ),
        ),
    ),
    Row(basis(MOMENTUM, COARSE, solver="eigh", timing="current", refresh=EVERY), "eigh", rotates=True),
    Row(basis(MOMENTUM, RMS, timing="lagged", refresh=SPREAD), "lagged, spread", degree=0),
    Row(basis(MOMENTUM, RMS, timing="lagged", transport="permute"), "published", degree=0),
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
        faults=(unknown("spectral"), Fault({"kind": "spectral", "solver": "qr"}, "unknown polar_solver kind 'qr'")),
    ),
    Row({"kind": "spectral", "solver": "svd"}, "svd", degree=0, rotates=True),
    Row({"kind": "spectral", "nuclear_norm": True}, "nuclear norm", degree=1, rotates=True),
    Row({"kind": "spectral", "solver": {"kind": "newton_schulz", "precision": "bfloat16"}}, "bfloat16"),
    Row(
        {"kind": "graft", "direction": [MOMENTUM, shampoo()], "magnitude": RMS},
        degree=0,
        faults=(
            unknown("graft"),
            Fault({"kind": "graft", "direction": "sign"}, "magnitude: required, got nothing"),
            Fault({"kind": "graft", "direction": "sign", "magnitude": "sgd"}, "magnitude.*: unknown stage kind"),
            Fault({"kind": "graft", "direction": "sign", "magnitude": "rms", "start": 0}, "start: .*or equal to 1"),
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
            Fault({"kind": "chain", "stages": 3}, "stages.*: a stage is required"),
            Fault({"kind": "chain", "stages": [{"beta": 1}]}, "stages.*: a stage is required"),
        ),
    ),
    Row(
        {"kind": "transform", "before": {"kind": "clip_norm"}, "inner": [MOMENTUM, RMS]},
        faults=(
            unknown("transform"),
            Fault({"kind": "transform", "before": "center"}, "inner: required, got nothing"),
            Fault({"kind": "transform", "before": [], "inner": "rms"}, "before: .*at least 1 item"),
            Fault(
                {
                    "kind": "transform",
                    "before": {"kind": "eigenbasis", "inner": "rms", "timing": "lagged"},
                    "inner": "rms",
                },
                r"before\.eigenbasis: a stage that maps every gradient is required, got one that is lagged",
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
            Fault({"kind": "cautious", "floor": 0.0}, r"floor: .*greater than 0, got 0\.0"),
            Fault({"kind": "cautious", "per": "row"}, "per: .*'block' or 'parameter', got 'row'"),
        ),
    ),
    Row({"kind": "cautious", "per": "parameter", "floor": 0.1}, "whole", degree=1),
)
