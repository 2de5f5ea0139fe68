"""Rows of the averagings and constraints."""

from .makes import unknown
from .rows import Fault, Row

AVERAGINGS = (
    Row(
        {"kind": "ema", "decay": 0.9},
        faults=(
            unknown("ema"),
            Fault({"kind": "ema", "decay": 1.0}, r"decay: .*less than 1, got 1\.0"),
            Fault({"kind": "ema", "every": 0}, "every: .*greater than or equal to 1, got 0"),
            Fault({"kind": "ema", "start": 0}, "start: .*greater than or equal to 1, got 0"),
            Fault(
                {"kind": "ema", "inner": {"kind": "ema"}}, "inner: an averaging without a mean of its own is required"
            ),
        ),
    ),
    Row({"kind": "ema", "decay": 0.8, "every": 2, "start": 3, "bias_correction": False}, "late, uncorrected"),
    Row(
        {"kind": "lawa", "window": 3},
        faults=(
            unknown("lawa"),
            Fault({"kind": "lawa", "window": 0}, "window: .*greater than or equal to 1, got 0"),
            Fault({"kind": "lawa", "every": 1.5}, r"every: .*integer, got 1\.5"),
        ),
    ),
    Row({"kind": "lawa", "window": 2, "every": 2, "start": 1}, "every second"),
    Row(
        {"kind": "schedule_free"},
        faults=(
            unknown("schedule_free"),
            Fault({"kind": "schedule_free", "beta": 0.0}, r"beta: .*greater than 0, got 0\.0"),
            Fault({"kind": "schedule_free", "beta": 1.1}, r"beta: .*less than or equal to 1, got 1\.1"),
            Fault({"kind": "schedule_free", "lr_power": -1.0}, r"lr_power: .*or equal to 0, got -1\.0"),
            Fault({"kind": "schedule_free", "step_power": 50.0}, r"step_power: .*or equal to 32, got 50\.0"),
            Fault({"kind": "schedule_free", "decay_at": "x"}, "decay_at: .*'z', 'y' or 'z_apart', got 'x'"),
        ),
    ),
    Row({"kind": "schedule_free", "beta": 0.7, "step_power": 1.0, "decay_at": "z"}, "polynomial"),
    Row(
        {"kind": "primal_averaging", "mu_x": 0.9},
        faults=(
            unknown("primal_averaging"),
            Fault({"kind": "primal_averaging", "mu_x": 1.0}, r"mu_x: .*less than 1, got 1\.0"),
            Fault({"kind": "primal_averaging", "mu_y": 0.0}, r"mu_y: .*greater than 0, got 0\.0"),
        ),
    ),
    Row({"kind": "primal_averaging", "mu_x": 0.9, "mu_y": 0.8, "decay_at": "z_apart"}, "apart"),
    Row(
        {"kind": "ema_nesterov", "beta": 0.9},
        faults=(
            unknown("ema_nesterov"),
            Fault({"kind": "ema_nesterov", "ahead": 0.0}, r"ahead: .*greater than 0, got 0\.0"),
            Fault({"kind": "ema_nesterov", "start": 5, "stop": 5}, "stop: more than start, 5, is required, got 5"),
        ),
    ),
    Row({"kind": "ema_nesterov", "beta": 0.5, "start": 2, "stop": 9, "follow_lr": True}, "for a while"),
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
            Fault({"kind": "hyperball", "relative": 1}, "relative: .*boolean, got 1"),
            Fault({"kind": "hyperball", "name": "a.b"}, "name: .*match pattern"),
        ),
    ),
    Row({"kind": "hyperball", "relative": False}, "absolute"),
    Row(
        {"kind": "radial_brake"},
        faults=(
            unknown("radial_brake"),
            Fault({"kind": "radial_brake", "strength": 1.1}, "strength: .*equal to 1,"),
        ),
    ),
    Row(
        {"kind": "row_floor"},
        faults=(unknown("row_floor"), Fault({"kind": "row_floor", "ratio": 0.0}, r"ratio: .*greater than 0, got 0\.0")),
    ),
    Row(
        {"kind": "qk_clip"},
        faults=(
            unknown("qk_clip"),
            Fault({"kind": "qk_clip", "bound": 0.0}, "bound: .*greater than 0"),
            Fault({"kind": "qk_clip", "power": 1.5}, "power: .*or equal to 1,"),
        ),
    ),
    Row(
        {"kind": "rounding"},
        faults=(unknown("rounding"), Fault({"kind": "rounding", "rule": "up"}, "rule: .*'stochastic'")),
    ),
    Row({"kind": "rounding", "rule": "stochastic"}, "at random"),
    Row({"kind": "radius_pin"}, faults=(unknown("radius_pin"),)),
    Row(
        {"kind": "late_decay"},
        faults=(unknown("late_decay"), Fault({"kind": "late_decay", "rate": 0.0}, r"rate: .*greater than 0, got 0\.0")),
    ),
    Row({"kind": "late_decay", "cautious": False}, "of all entries"),
)
