"""Declarations that several tables of rows are made of.

A stage is made so that its laws are exact: an eps is an absolute size, so that what is scale-invariant only up to eps
gets a small one; a basis or root of a singular statistic is arbitrary in its null space, so that what is compared
refreshes late, or has a large eps, or is marked `singular`.
"""

from typing import Any

from .rows import Fault, Make

EVERY = {"kind": "every", "steps": 1, "stagger": "none"}
LATE = {"kind": "every", "steps": 2, "start": 5, "stagger": "none"}
SPREAD = {"kind": "every", "steps": 3, "start": 4}
DELAYED = {"kind": "every", "steps": 2, "start": 4, "min_wave_work": 1, "delay": 2}
MOMENTUM = {"kind": "momentum", "beta": 0.9}
SAME_DECAY = {"kind": "gram", "beta": 0.9}
"""A statistic that forgets as fast as RMS."""
RMS = {"kind": "rms", "beta": 0.9, "eps": 1e-30}
COARSE = {**RMS, "eps": 1e-3}
EXACT = {"kind": "eigh", "eps": 0.0}


def shampoo(**more: Any) -> Make:
    return {"kind": "shampoo", "solver": EXACT, "refresh": LATE, **more}


def basis(*inner: Make, **more: Any) -> Make:
    return {"kind": "eigenbasis", "inner": list(inner), "refresh": LATE, **more}


def unknown(kind: str) -> Fault:
    return Fault({"kind": kind, "bete": 0.9}, "bete", 0.9)
