"""Failure policy: how a step treats gradients that are not finite, failed roots, and spikes of loss or gradients."""

from __future__ import annotations

import math
from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from eigengraft.component import Component


class Spike(Component):
    """A step whose value v (the loss, or the norm of all gradients) exceeds  b = m + sigmas s  is a spike.

    m and s are the mean and the standard deviation (with n - 1) of the n values in the window: the last `window` values
    that were finite. A spike enters the window as m + min(sigmas, 2.5) s, other values as they are.

    The rule is that of OLMo-core's `SkipStepOptimizer` (olmo_core/optim/skip_step_optimizer.py) with two changes. In
    OLMo-core, values below m - sigmas s are spikes too, and a spike enters the window as it is, so that a large spike
    hides all other spikes for `window` steps. If spikes did not enter the window at all, no step would pass any more
    after a lasting rise of the values.
    """

    entering: ClassVar[float] = 2.5
    """Largest number of standard deviations above the mean with which a spike enters the window.

    Measured in a window of 128 values with 10 % of noise. With 2.5, every value that is 5 times too large is found,
    even if 1 in 10 values is too large. After a lasting growth by a factor of 10, the next 123 values count as spikes,
    until the window has adapted. With 2, spikes are found even if 1 in 5 values is too large, but 252 values count as
    spikes after the growth. With 6, most spikes are missed if 1 in 20 values is too large.
    """

    measure: Literal["gradient_norm", "loss"] = Field(
        default="gradient_norm",
        description="the value that is compared: gradient_norm: the norm of all usable gradients together; loss: the "
        "loss of the closure of `step`, or of `provide`, as the mean over ranks",
    )
    window: int = Field(default=128, ge=2, description="number n of values from which mean and deviation are computed")
    sigmas: float = Field(
        default=6.0, gt=0, description="number of standard deviations above the mean beyond which a value is a spike"
    )
    least: int | None = Field(
        default=None,
        ge=2,
        description="number of values that the window must have before a step can be a spike; default: half of "
        "`window`",
    )
    then: Literal["skip", "scale", "clip"] = Field(
        default="skip",
        description="treatment of a spike: skip: the step changes no parameter and no state; scale: the update is "
        "multiplied by b / v, weight decay included; clip: gradients are multiplied by b / v, in place",
    )

    @property
    def needed(self) -> int:
        """Number of values in the window before any step can be a spike."""
        return max(2, self.window // 2) if self.least is None else self.least

    def describe(self, spikes: int, entered: int, mean: float, deviation: float, bound: float) -> str:
        """Return a text about the present numbers of the spike check, which are the fields of `SpikeCounts`."""
        held = f"{min(entered, self.window)} of {self.window} values"
        where = f"above {bound:.4g}" if bound < math.inf else f"none before {self.needed} values"
        return f"{spikes} by {self.measure} ({where}; mean {mean:.4g}, deviation {deviation:.4g}, {held}; {self.then})"

    @model_validator(mode="after")
    def _window_can_fill(self) -> Self:
        if self.least is not None and self.least > self.window:
            raise ValueError(
                f"least: a window of {self.window} values never has {self.least}; raise window or lower least"
            )
        return self


class Failure(Component):
    """Policy of a step for gradients that are not finite, for roots that fail, and for spikes."""

    nonfinite: Literal["skip", "raise", "ignore"] = Field(
        default="skip",
        description="treatment of a gradient with inf or nan, or too large for an update that squares it: skip: leave "
        "its parameter and state as they are, and count it; raise: do the same, then raise; ignore: do not check",
    )
    detect: Literal["auto", "host", "device"] = Field(
        default="auto",
        description="where gradients are checked: host: the host waits for one result in each step; device: the step "
        "applies masks without waiting, with more memory traffic, and bad gradients are counted one step later; auto: "
        "host",
    )
    """`auto` is `host` also where all steps are compiled or in a graph, for three reasons. With `device`, a user learns
    of a bad gradient one step later, also with `nonfinite: raise`. Steps that a program cannot compute, such as those
    with a refresh, run as stages, which copy statistics and moments under a mask. And the time that `device` saves was
    measured only together with `compile` and `graph` (docs/gpu.md), not with `compile` alone.
    """
    spike: Spike | None = Field(
        default=None,
        validate_default=False,
        description="treatment of steps whose loss or gradient norm is far above that of the steps before; default: no "
        "step is compared",
    )

    roots: int = Field(
        default=3, ge=0, description="refreshes of one root or basis that may fail in a row before an error is raised"
    )
