"""Rows of stages made of stages, and of the modes that other methods need of the simple ones."""

from .makes import COARSE, EVERY, LATE, MOMENTUM, RMS, SPREAD, basis, shampoo, unknown
from .rows import Fault, Make, Row

BREGMAN: Make = {"kind": "bregman", "beta": 0.9}
WARM: Make = {**BREGMAN, "bias_correction": False, "warm_start": True}
DIAGONAL: Make = {"kind": "gram", "beta": 0.9, "axes": {"entries": "diagonal"}}
PROJECTED: Make = {"kind": "projected", "inner": [MOMENTUM, RMS], "rank": 3, "renewal": SPREAD}
RIGHT: Make = {"kind": "gram", "beta": 0.9, "axes": {"side": "right"}}
FACTORS = ((6, 5), (4, 4), (1, 1))
RIDGE: Make = {"kind": "eigh", "eps": 1e-3}


def paths(*stages: Make) -> list[Make]:
    return [{"name": f"path_{i}", "weight": 0.5 + i, "stages": stage} for i, stage in enumerate(stages)]


MODES = (
    Row({**RMS, "source": "direction"}, "of the direction", degree=0),
    Row({**RMS, "per": "row"}, "of rows", degree=0),
    Row({**RMS, "per": "column", "source": "direction"}, "of columns", degree=0),
    Row({**RMS, "per": "block"}, "of blocks", degree=0),
    Row({**RMS, "exponent": "1/4"}, "fourth root", degree=0.5),
    Row({**RMS, "damped": False, "exponent": {2: "1/4"}}, "undamped", degree=lambda order: 0.5 if order == 2 else 0),
    Row({**MOMENTUM, "beta3": 0.5}, "filtered", degree=1, rotates=True),
    Row({"kind": "normalize", "rule": "unit_norm"}, "unit_norm", degree=0, rotates=True),
    Row({"kind": "normalize", "rule": "unit_rows"}, "unit_rows", degree=0, rotates=True),
    Row({"kind": "scale", "rule": "inverse_mean"}, "inverse_mean", degree=1, rotates=True),
    Row({"kind": "scale", "rule": "dimensions"}, "dimensions", degree=1, rotates=True),
    Row(
        {"kind": "standardize"},
        degree=0,
        faults=(unknown("standardize"), Fault({"kind": "standardize", "center": 1}, "center")),
    ),
    Row({"kind": "standardize", "center": False}, "uncentered", degree=0),
    Row(
        {"kind": "graft", "direction": "sign", "magnitude": RMS, "start": 5, "after": MOMENTUM},
        "two momenta",
        degree=0,
    ),
)

SLOW = {"beta": 0.9, "weight": 0.3}

FACTORED = (
    Row(shampoo(statistic=BREGMAN, exponent="1/2", solver="eigh"), "kl"),
    Row(
        shampoo(statistic={**BREGMAN, "order": "gauss_seidel"}, exponent="1/2", solver="eigh", refresh=SPREAD),
        "kl, one by one",
    ),
    Row(shampoo(statistic={**BREGMAN, "q": 2}), "frobenius"),
    Row(shampoo(statistic={**BREGMAN, "q": "1/2"}, exponent="1/2", solver="eigh"), "square root"),
    Row(shampoo(statistic={**BREGMAN, "q": 1}, exponent="1/2", solver=RIDGE, refresh=EVERY), "vn", rotates=True),
    Row(shampoo(statistic=DIAGONAL, refresh=EVERY), "diagonal", degree=0),
    Row(shampoo(statistic={**BREGMAN, "axes": {"entries": "diagonal"}}, exponent="1/2", refresh=EVERY), "diagonal kl"),
    Row(
        shampoo(statistic={"kind": "gram", "axes": {"max_size": 5, "oversize": "diagonal"}}),
        "diagonal where long",
        degree=0,
    ),
    Row(shampoo(statistic={"kind": "gram", "interval": 3}), "seldom observed", degree=0, blocks=((6, 5), (3, 2, 4))),
    Row(shampoo(statistic={"kind": "gram", "source": "direction"}), "of the direction", degree=0),
    Row(shampoo(statistic={"kind": "gram", "beta": 0.5, "slow": SLOW}), "of two rates", degree=0),
    Row(basis(MOMENTUM, RMS, statistic={"kind": "gram", "beta": 0.5, "slow": SLOW}), "of two rates", degree=0),
    Row(
        basis(MOMENTUM, RMS, statistic={"kind": "gram", "beta": 0.5, "slow": SLOW}, statistic_frame="basis"),
        "of two rates in the basis",
        degree=0,
    ),
    Row(shampoo(statistic={"kind": "gram", "source": "orthogonalized"}), "of the polar factor", degree=1),
    Row(shampoo(statistic={"kind": "gram", "trace_scaling": 0.5}, exponent="1/2"), "trace-scaled"),
    Row(
        shampoo(statistic={"kind": "input_gram", "interval": 3}, exponent=1, solver="cholesky", refresh=EVERY),
        "of inputs",
        degree=1,
        blocks=((6, 5), (7,), (1, 1)),
    ),
    Row(shampoo(exponent={2: ["1/2", 0], 1: "1/2"}), "one exponent for each axis"),
    Row({"kind": "shampoo", "statistic": {"kind": "bregman"}, "exponent": "1/2"}, "kl as it comes", singular=True),
    Row(basis(MOMENTUM, RMS, statistic=BREGMAN), "kl", degree=0),
    Row(basis(MOMENTUM, RMS, statistic=WARM), "kl, warm", degree=0),
    Row(basis(MOMENTUM, RMS, statistic=WARM, statistic_frame="basis"), "kl in the basis, warm", degree=0),
    Row(shampoo(statistic=WARM, exponent="1/2", refresh=EVERY, solver="cans"), "kl, warm"),
    Row(shampoo(statistic={**WARM, "order": "gauss_seidel"}, exponent="1/2"), "in turn, warm"),
    Row(basis(MOMENTUM, RMS, statistic={**BREGMAN, "q": 2, "order": "gauss_seidel"}, refresh=SPREAD), "frobenius"),
    Row(
        shampoo(statistic={"kind": "gram", "source": "orthogonalized", "polar": "svd"}),
        "of the exact polar factor",
        degree=1,
        singular=True,
    ),
    Row(basis(MOMENTUM, RMS, solver={"kind": "subspace", "rank": 3}), "in a subspace", degree=0),
    Row(
        basis(MOMENTUM, shampoo(statistic={**BREGMAN, "axes": {"entries": "diagonal"}}, exponent="1/2", refresh=EVERY)),
        "eigenvalues",
    ),
    Row(
        basis(MOMENTUM, {**COARSE, "per": "row"}, statistic={"kind": "gram", "axes": {"side": {2: [0], 3: [1]}}}),
        "chosen axes",
    ),
    Row(basis(RMS, statistic={"kind": "bregman"}, refresh={**LATE, "start": 1}), "kl at once", singular=True),
)

COMBINED = (
    Row(
        {"kind": "sum", "paths": paths(MOMENTUM, RMS)},
        faults=(
            unknown("sum"),
            Fault({"kind": "sum", "paths": []}, "paths", 1),
            Fault({"kind": "sum", "paths": paths(RMS) * 2}, "path_0"),
            Fault({"kind": "sum", "paths": [{"name": "a"}]}, "stages"),
        ),
    ),
    Row({"kind": "sum", "paths": paths(shampoo(), "identity")}, "of shampoo and the gradient"),
    Row(basis({"kind": "sum", "paths": paths(MOMENTUM, RMS)}), "a sum in a basis"),
    Row(
        {"kind": "split", "inside": [MOMENTUM, RMS], "outside": MOMENTUM, "rank": 2, "follow": "exact"},
        faults=(
            unknown("split"),
            Fault({"kind": "split", "inside": "rms"}, "outside"),
            Fault({"kind": "split", "inside": "rms", "outside": "sign", "rank": 0}, "rank", 1),
            Fault({"kind": "split", "inside": "shampoo", "outside": "sign"}, "shampoo"),
        ),
    ),
    Row({"kind": "split", "inside": "identity", "outside": "identity", "rank": 3}, "nothing", degree=1, rotates=True),
    Row({"kind": "split", "inside": RMS, "outside": "spectral", "side": "smaller", "rank": 64}, "of all", degree=0),
    Row({"kind": "split", "inside": "sign", "outside": MOMENTUM, "side": "left", "rank": 1}, "left"),
    Row(
        {**PROJECTED, "result": "lift_and_rest", "growth": 1.01},
        degree=0,
        faults=(
            unknown("projected"),
            Fault({"kind": "projected"}, "inner"),
            Fault({**PROJECTED, "inner": {"kind": "lagged_rms"}}, "inner.lagged_rms"),
            Fault({**PROJECTED, "rank": 0}, "rank", 1, 0),
            Fault({**PROJECTED, "growth": 1.01}, "growth", "lift", 1.01),
            Fault({**PROJECTED, "per": "block"}, "per", "lift", "block"),
            Fault(
                {**PROJECTED, "projection": "random", "result": "lift_and_rest"},
                "projection",
                "leading",
                "random",
            ),
        ),
    ),
    Row({**PROJECTED, "side": "left", "renewal": LATE}, "lifted, left", degree=0),
    Row({**PROJECTED, "projection": "random", "result": "rescale", "per": "block"}, "rescaled", degree=0),
    Row(
        {"kind": "trust", "inner": [MOMENTUM, RMS], "floor": 0.1, "cap": 0.85},
        degree=1,
        blocks=((6, 5), (7,), (1, 1)),
        faults=(
            unknown("trust"),
            Fault({"kind": "trust", "inner": []}, "inner", 1),
            Fault({"kind": "trust", "inner": RMS, "agreement": 1.0}, "agreement", 1),
            Fault({"kind": "trust", "inner": RMS, "cap": 1.5}, "cap", 1),
        ),
    ),
    Row(
        {"kind": "partner_basis", "inner": [MOMENTUM]},
        degree=1,
        blocks=FACTORS,
        faults=(
            unknown("partner_basis"),
            Fault({"kind": "partner_basis", "inner": []}, "inner", 1),
            Fault({"kind": "partner_basis", "inner": "lagged_rms"}, "inner.lagged_rms"),
            Fault({"kind": "partner_basis", "inner": "shampoo"}, "inner.shampoo", "factor.0"),
            Fault({"kind": "partner_basis", "inner": basis(RMS)}, "inner.eigenbasis"),
        ),
    ),
    Row(
        {"kind": "partner_basis", "inner": [shampoo(statistic=RIGHT, solver=RIDGE, refresh=EVERY), MOMENTUM, RMS]},
        "statistics",
        blocks=FACTORS[:1],
    ),
    Row(
        {"kind": "prodigy", "inner": [MOMENTUM, RMS]},
        degree=0,
        faults=(
            unknown("prodigy"),
            Fault({"kind": "prodigy", "inner": []}, "inner", 1),
            Fault({"kind": "prodigy", "inner": "rms", "start": 0.0}, "start", 0),
            Fault({"kind": "prodigy", "inner": "rms", "growth": 1.0}, "growth", 1),
        ),
    ),
    Row({"kind": "prodigy", "inner": "sign", "growth": 2.0, "start": 0.1}, "slowly", degree=0),
    Row(
        {"kind": "adaptive_rotation", "inner": "sinkhorn"},
        degree=0,
        faults=(
            unknown("adaptive_rotation"),
            Fault({"kind": "adaptive_rotation", "inner": []}, "inner", 1),
            Fault({"kind": "adaptive_rotation", "inner": ["sign", "momentum"]}, "momentum"),
            Fault(
                {"kind": "adaptive_rotation", "inner": {"kind": "clip_norm", "per": "parameter"}},
                "clip_norm",
            ),
        ),
    ),
    Row({"kind": "adaptive_rotation", "inner": "sign", "side": "left", "renewal": SPREAD}, "left", degree=0),
)

COMPOSITIONS = (*MODES, *FACTORED, *COMBINED)
