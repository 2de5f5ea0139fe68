"""Failure policy: how a step treats gradients that are not finite and roots that fail."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from eigengraft.component import Component


class Failure(Component):
    """Policy of a step for gradients that are not finite and for roots that fail."""

    nonfinite: Literal["skip", "raise", "ignore"] = Field(
        default="skip",
        description="treatment of a gradient with inf or nan, or too large for an update that squares it: skip: leave "
        "its parameter and state as they are, and count it; raise: do the same, then raise; ignore: do not check",
    )
    detect: Literal["auto", "host", "device"] = Field(
        default="auto",
        description="where gradients are checked: on the host (one read per step) or by masks on the device "
        "(no read, more traffic, counted one step later); auto: host",
    )

    @property
    def leaves_masks(self) -> bool:
        """True if steps have masks on the device, which the host does not read."""
        return self.detect == "device" and self.nonfinite != "ignore"

    roots: int = Field(
        default=3, ge=0, description="refreshes of one root or basis that may fail in a row before an error is raised"
    )
