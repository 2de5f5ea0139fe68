"""Finite check: which gradients may be used, before anything is changed by them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from eigengraft.blocking.stacks import max_blocks
from eigengraft.distributed.rank_group import HostCopy
from eigengraft.errors import warn_user
from eigengraft.numerics import (
    compute_dtype,
    has_values,
    kept_on_device,
    may_branch_on_values,
    norms_by_dtype,
    squares_are_finite,
)

from ..write.failure import Failure
from ..write.write import Rates


@dataclass(frozen=True)
class LossScale:
    """What `torch.amp.GradScaler` leaves to the step of an optimizer that supports it.

    scale: 0-d, factor of all gradients; None: they have been divided by it.
    found_inf: 0-d, 0 unless some gradient of the optimizer holds inf or nan; None: nothing looked for them.
    """

    scale: Tensor | None
    found_inf: Tensor | None

    @classmethod
    def of(cls, optimizer: object) -> LossScale:
        """Return what a scaler has put on an optimizer for this step."""
        given = [getattr(optimizer, name, None) for name in ("grad_scale", "found_inf")]
        scale, found = (
            x if x is None or isinstance(x, Tensor) else torch.tensor(x, dtype=torch.float64, device="cpu")
            for x in given
        )
        return cls(scale, found)

    @property
    def stops(self) -> bool:
        """Whether the host knows, without a wait, that the step must change nothing."""
        found = self.found_inf
        return found is not None and may_branch_on_values(found) and bool(found)

    def usable(self, device: torch.device) -> Tensor | None:
        """Return, 0-d on a device, whether the step may be taken; None: it may, as the host knows."""
        if self.found_inf is None or self.found_inf.is_cpu:
            return None
        return self.found_inf.to(device, non_blocking=True) == 0

    def unscale(self, names: Sequence[str], gradients: Sequence[Tensor | None]) -> None:
        """Divide gradients by the scale in place, as `GradScaler.unscale_` does.

        Raises ValueError for one in float16, in which small numbers would be lost.
        """
        if self.scale is None:
            return
        kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for name, gradient in zip(names, gradients, strict=True):
            if gradient is None or gradient.layout is not torch.strided:  # the finite check refuses other layouts
                continue
            if gradient.dtype == torch.float16:
                raise ValueError(
                    f"{name}: a gradient in float16 loses small numbers when it is divided by the scale of the loss; "
                    "keep parameters in float32 and compute in float16 under torch.autocast"
                )
            kinds.setdefault((gradient.device, gradient.dtype), []).append(gradient)
        inverse = self.scale.double().reciprocal().float()  # as the scaler rounds it
        for (device, _), scaled in kinds.items():
            torch._foreach_mul_(scaled, inverse.to(device, non_blocking=True))


@dataclass(frozen=True)
class GivenGradients:
    """Gradients of P parameters that a step is asked to take.

    gradients: what this rank holds of each gradient, by position, whether or not it updates all of that; None: no
        gradient.
    present: `[P]` on the host, parameters that have a gradient here.
    linear: `[P]`, parameters whose updates square nothing.
    rates, steps: what all ranks must step with: learning rates and decays, and the number of steps before this one.
    allowed: 0-d on a device, whether the scaler of the loss found no inf and no nan; None: the step is allowed.
    """

    gradients: Sequence[Tensor | None]
    present: NDArray[np.bool_]
    linear: NDArray[np.bool_]
    rates: Rates
    steps: int
    allowed: Tensor | None = None


STALLED = 10
"""Steps in a row without any usable gradient after which a run is taken to be lost."""


class GradientSurvey(Protocol):
    """What is known of the gradients of P parameters, wherever they lie."""

    @property
    def device(self) -> torch.device:
        """Where the numbers are."""

    def agreed(self) -> NDArray[np.bool_]:
        """`[P]`, parameters that have a gradient, read on the host."""

    def nonzero(self, positions: Sequence[int]) -> bool:
        """Whether any of these gradients has an entry other than 0, read on the host."""

    def usable(self, positions: Sequence[int], finite: bool) -> Tensor | None:
        """`[n]` on the device, gradients that can be used, or None for all; finite: whether they must be finite, and
        their squares too where updates square them."""

    @property
    def squares(self) -> Tensor:
        """`[P]` float64 on the device, sum of squares of each full gradient; 0 where there is none."""


@dataclass(frozen=True)
class LocalSurvey:
    """Gradients of P parameters that this process holds.

    gradients: by position; None: no gradient.
    present: `[P]`, parameters that have a gradient.
    linear: `[P]`, parameters whose updates square nothing.
    """

    gradients: Sequence[Tensor | None]
    present: NDArray[np.bool_]
    linear: NDArray[np.bool_]

    @property
    def device(self) -> torch.device:
        return next((gradient.device for gradient in self.gradients if gradient is not None), torch.device("cpu"))

    def agreed(self) -> NDArray[np.bool_]:
        return self.present

    def nonzero(self, positions: Sequence[int]) -> bool:
        found = (gradient for at in positions if (gradient := self.gradients[at]) is not None)
        return any(not has_values(gradient) or bool(gradient.any()) for gradient in found)

    def usable(self, positions: Sequence[int], finite: bool) -> Tensor | None:
        here = [position for position in positions if self.gradients[position] is not None]
        found = [gradient for position in here if (gradient := self.gradients[position]) is not None]
        return finite_gradients(found, self.linear[here].tolist()) if found and finite else None

    @property
    def squares(self) -> Tensor:
        norms = torch.zeros(len(self.gradients), dtype=torch.float64, device=self.device)
        here = [(place, gradient) for place, gradient in enumerate(self.gradients) if gradient is not None]
        if here:
            found = torch._foreach_norm([gradient for _, gradient in here], 2, dtype=torch.float64)
            norms[[place for place, _ in here]] = torch.stack(found)
        return norms.square()


class FiniteCheck:
    """Finds gradients with inf or nan, and those too large to be squared in the dtype of the state, and counts them.

    Updates that square nothing, as those of SGD and Lion, take every finite gradient.

    On the host the answer is known at once. On a device it stays there as a mask, read one step later without waiting.

    failure: what the recipe says of unusable gradients.
    names: what errors and counts call the parameters.
    survey: what is known of gradients, of all ranks that share them.
    """

    def __init__(
        self, failure: Failure, names: Sequence[str], survey: Callable[[GivenGradients], GradientSurvey]
    ) -> None:
        self.failure, self.names, self.survey = failure, list(names), survey
        self.skipped: Counter[str] = Counter()
        self._deferred: tuple[list[int], HostCopy] | None = None
        self._stalled = 0

    def check(self, given: GivenGradients) -> tuple[NDArray[np.bool_], Tensor | None, GradientSurvey]:
        """(active `[P]` on the host, mask `[P]` on the device or None, survey). Changes nothing but the count.

        With lr 0 and gradients 0 a group is not active: torch.distributed.checkpoint steps so to have state allocated.
        Raises TypeError for sparse gradients, FloatingPointError if the recipe asks for it, and what the survey raises.
        """
        self._require_dense(given.gradients)
        survey = self.survey(given)
        present = survey.agreed() if self._on_host else given.present
        idle = given.rates.idle(survey.nonzero)
        if idle.all():
            return np.zeros_like(present), None, survey
        present = present & ~idle
        positions = np.flatnonzero(present).tolist()
        usable = survey.usable(positions, self.failure.nonfinite != "ignore")
        return (*self._decide(positions, usable, present, given), survey)

    def _decide(
        self,
        positions: list[int],
        usable: Tensor | None,
        present: NDArray[np.bool_],
        given: GivenGradients,
    ) -> tuple[NDArray[np.bool_], Tensor | None]:
        if usable is None and (given.allowed is None or not positions):
            self._stalled *= not positions  # a step without gradients is none
            return present, None
        if not self._on_host or usable is None:  # of a scaler alone nothing is read on the host
            return present, self._defer(positions, usable, given.allowed, len(present))
        found = _answers(usable, given.allowed)
        if found.stopped:
            return np.zeros_like(present), None
        bad = self._count(positions, found.usable, given.gradients)
        self.raise_nonfinite(bad, "nothing was changed", given.gradients)
        present[bad] = False
        return present, None

    def _count(
        self, positions: list[int], found: Sequence[bool], gradients: Sequence[Tensor | None] | None = None
    ) -> list[int]:
        """Positions of unusable gradients, which are counted by name; gradients: None where they are gone."""
        bad = [position for position, good in zip(positions, found, strict=True) if not good]
        self.skipped.update(self.names[position] for position in bad)
        self._stalled = self._stalled + 1 if positions and len(bad) == len(positions) else 0
        if self._stalled == STALLED:
            fault = _fault(None if gradients is None else gradients[bad[0]])
            warn_user(
                f"gradients: usable values are required, got none in {STALLED} steps in a row ({self.names[bad[0]]}, "
                f"among others, with {fault}); nothing is updated any more. With failure.nonfinite=raise the first is "
                "an error"
            )
        return bad

    def lost(self) -> bool:
        """Whether no gradient could be used for so many steps that the run is lost."""
        return self._stalled >= STALLED

    def _require_dense(self, gradients: Sequence[Tensor | None]) -> None:
        for name, gradient in zip(self.names, gradients, strict=True):
            if gradient is not None and gradient.layout is not torch.strided:
                raise TypeError(f"{name}: a dense gradient is required, got layout {gradient.layout}")

    def resolve_deferred(self) -> tuple[list[int], list[int]]:
        """(positions that were not updated one step ago, those of unusable gradients, which are counted now).

        They differ where the scaler of the loss stopped the step.
        """
        if self._deferred is None:
            return [], []
        (positions, answers), self._deferred = self._deferred, None
        found = _read(answers.wait(), len(positions))
        if found.stopped:
            return positions, []
        bad = self._count(positions, found.usable)
        return bad, bad

    def raise_nonfinite(
        self, bad: Sequence[int], outcome: str, gradients: Sequence[Tensor | None] | None = None
    ) -> None:
        """Raises FloatingPointError for unusable gradients if the recipe says so."""
        if bad and self.failure.nonfinite == "raise":
            names = ", ".join(self.names[position] for position in bad[:5])
            found = _fault(None if gradients is None else gradients[bad[0]])
            raise FloatingPointError(f"gradient of {names}: finite values are required, got {found}; {outcome}")

    @property
    def _on_host(self) -> bool:
        """Whether the host reads which gradients can be used."""
        return self.failure.detect != "device"

    def _defer(self, positions: list[int], usable: Tensor | None, allowed: Tensor | None, total: int) -> Tensor:
        """The mask `[P]` of gradients that are usable and allowed; what it says is copied to the host meanwhile."""
        if usable is None:
            assert allowed is not None
            usable = torch.ones(len(positions), dtype=torch.bool, device=allowed.device)
        self._deferred = (positions, HostCopy(_with(usable, allowed)))
        usable = usable if allowed is None else usable & allowed
        if len(positions) == total:
            return usable
        mask = torch.ones(total, dtype=torch.bool, device=usable.device)
        return mask.index_copy_(0, kept_on_device(np.array(positions, dtype=np.int64), usable.device), usable)


class _Answers(NamedTuple):
    """Which of n gradients are usable, and whether the scaler of the loss stopped the step, on the host."""

    usable: list[bool]
    stopped: bool


def _with(usable: Tensor, allowed: Tensor | None) -> Tensor:
    """Which gradients are usable `[n]`, followed by whether the step is allowed where a scaler says so."""
    return usable if allowed is None else torch.cat([usable, allowed.view(1)])


def _answers(usable: Tensor, allowed: Tensor | None) -> _Answers:
    """Read answers on the host, in one copy."""
    return _read(_with(usable, allowed), len(usable))


def _read(answers: Tensor, gradients: int) -> _Answers:
    """Take `_with` apart; of fake tensors, which have no values, everything is usable."""
    found = answers.tolist() if has_values(answers) else [True] * len(answers)
    return _Answers(found[:gradients], not all(found[gradients:]))


def _fault(gradient: Tensor | None) -> str:
    """The reason why a gradient is not usable, as far as this rank knows; None: it is gone."""
    if gradient is not None and not bool(gradient.isfinite().all()):
        return "inf or nan"
    dtype = None if gradient is None else compute_dtype(gradient.dtype)
    if gradient is None or dtype is None or bool(torch.linalg.vector_norm(gradient, dtype=dtype).square().isfinite()):
        return "inf, nan or values whose squares overflow"
    peak = float(gradient.abs().max())
    return f"values up to {peak:.3g}, whose squares overflow {str(dtype).removeprefix('torch.')}; scale the loss down"


def finite_gradients(gradients: Sequence[Tensor], linear: Sequence[bool]) -> Tensor | None:
    """Which gradients have a finite sum of squares in the dtype they are computed in, `[n]`; None: all, on a CPU.

    linear: n, gradients whose values alone must be finite.
    """
    if squares_are_finite(gradients, max_blocks):
        return None
    flags: dict[int, Tensor] = {}
    for order, wanted in ((2.0, False), (math.inf, True)):
        here = [place for place, own in enumerate(linear) if own is wanted]
        for places, norms in norms_by_dtype([gradients[place] for place in here], order=order):
            good = (norms if wanted else norms.square()).isfinite()
            flags.update(zip((here[place] for place in places), good.unbind(), strict=True))
    return torch.stack([flags[place] for place in range(len(gradients))])
