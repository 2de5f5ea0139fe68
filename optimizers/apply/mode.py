"""Which iterate the parameters of an optimizer hold: the one to train, or the one to evaluate."""

from __future__ import annotations

from typing import Literal

Mode = Literal["train", "eval"]
MODES: tuple[Mode, ...] = ("train", "eval")
