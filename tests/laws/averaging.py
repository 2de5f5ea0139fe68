"""Rows of the averagings and constraints."""

from .makes import unknown
from .rows import Fault, Row

AVERAGINGS = (
    Row(
        {"kind": "ema", "decay": 0.9},
        faults=(
            unknown("ema"),
            Fault({"kind": "ema", "decay": 1.0}, "decay", 1),
            Fault({"kind": "ema", "every": 0}, "every", 1, 0),
            Fault({"kind": "ema", "start": 0}, "start", 1, 0),
            Fault({"kind": "ema", "inner": {"kind": "ema"}}, "inner", "averaging"),
        ),
    ),
    Row({"kind": "ema", "decay": 0.8, "every": 2, "start": 3, "bias_correction": False}, "late, uncorrected"),
    Row(
        {"kind": "lawa", "window": 3},
        faults=(
            unknown("lawa"),
            Fault({"kind": "lawa", "window": 0}, "window", 1, 0),
            Fault({"kind": "lawa", "every": 1.5}, "every", 1.5),
        ),
    ),
    Row({"kind": "lawa", "window": 2, "every": 2, "start": 1}, "every second"),
    Row(
        {"kind": "schedule_free"},
        faults=(
            unknown("schedule_free"),
            Fault({"kind": "schedule_free", "beta": 0.0}, "beta", 0),
            Fault({"kind": "schedule_free", "beta": 1.1}, "beta", 1, 1.1),
            Fault({"kind": "schedule_free", "lr_power": -1.0}, "lr_power", 0, -1.0),
            Fault({"kind": "schedule_free", "step_power": 50.0}, "step_power", 32, 50.0),
            Fault({"kind": "schedule_free", "decay_at": "x"}, "decay_at", "z", "y", "z_apart", "x"),
        ),
    ),
    Row({"kind": "schedule_free", "beta": 0.7, "step_power": 1.0, "decay_at": "z"}, "polynomial"),
    Row(
        {"kind": "primal_averaging", "mu_x": 0.9},
        faults=(
            unknown("primal_averaging"),
            Fault({"kind": "primal_averaging", "mu_x": 1.0}, "mu_x", 1),
            Fault({"kind": "primal_averaging", "mu_y": 0.0}, "mu_y", 0),
        ),
    ),
    Row({"kind": "primal_averaging", "mu_x": 0.9, "mu_y": 0.8, "decay_at": "z_apart"}, "apart"),
    Row(
        {"kind": "ema_nesterov", "beta": 0.9},
        faults=(
            unknown("ema_nesterov"),
            Fault({"kind": "ema_nesterov", "ahead": 0.0}, "ahead", 0),
            Fault({"kind": "ema_nesterov", "start": 5, "stop": 5}, "stop", 5),
        ),
    ),
    Row({"kind": "ema_nesterov", "beta": 0.5, "start": 2, "stop": 9, "follow_lr": True}, "for a while"),
    Row(
        {"kind": "anchored", "start": 2, "full": 5, "inner": {"kind": "ema", "decay": 0.8}},
        faults=(
            unknown("anchored"),
            Fault({"kind": "anchored", "start": 2, "full": 2}, "full", 2),
            Fault({"kind": "anchored", "start": 3, "full": 9, "inner": {"kind": "ema", "start": 5}}, "start", 5, 3),
            Fault(
                {"kind": "anchored", "start": 1, "full": 2, "inner": {"kind": "ema", "inner": "schedule_free"}}, "inner"
            ),
        ),
    ),
    Row(
        {
            "kind": "anchored",
            "start": 3,
            "full": 6,
            "inner": {"kind": "ema", "decay": 0.8, "start": 3, "inner": {"kind": "ema_nesterov"}},
        },
        "over a look-ahead",
    ),
    Row({"kind": "ema", "decay": 0.8, "weight": 0.6}, "beside the parameter"),
    Row(
        {"kind": "ema", "decay": 0.8, "weight": 0.6, "start": 3, "inner": {"kind": "ema_nesterov"}}, "over a look-ahead"
    ),
)

CONSTRAINTS = (
    Row(
        {"kind": "hyperball"},
        faults=(
            unknown("hyperball"),
            Fault({"kind": "hyperball", "relative": 1}, "relative", 1),
            Fault({"kind": "hyperball", "name": "a.b"}, "name"),
        ),
    ),
    Row({"kind": "hyperball", "relative": False}, "absolute"),
    Row(
        {"kind": "radial_brake"},
        faults=(
            unknown("radial_brake"),
            Fault({"kind": "radial_brake", "strength": 1.1}, "strength", 1),
        ),
    ),
    Row(
        {"kind": "row_floor"},
        faults=(unknown("row_floor"), Fault({"kind": "row_floor", "ratio": 0.0}, "ratio", 0)),
    ),
    Row({"kind": "polar"}, faults=(unknown("polar"), Fault({"kind": "polar", "solver": "qr"}, "solver", "qr"))),
    Row(
        {"kind": "qk_clip"},
        faults=(
            unknown("qk_clip"),
            Fault({"kind": "qk_clip", "bound": 0.0}, "bound", 0),
            Fault({"kind": "qk_clip", "power": 1.5}, "power", 1),
        ),
    ),
    Row(
        {"kind": "rounding"},
        faults=(unknown("rounding"), Fault({"kind": "rounding", "rule": "up"}, "rule", "stochastic")),
    ),
    Row({"kind": "rounding", "rule": "stochastic"}, "at random"),
    Row({"kind": "radius_pin"}, faults=(unknown("radius_pin"),)),
    Row(
        {"kind": "late_decay"},
        faults=(unknown("late_decay"), Fault({"kind": "late_decay", "rate": 0.0}, "rate", 0)),
    ),
    Row({"kind": "late_decay", "cautious": False}, "of all entries"),
)
