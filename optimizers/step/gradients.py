"""Check of the gradients of a step, before anything changes: it finds the gradients that can be used."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from eigengraft.errors import counted, warn_user
from eigengraft.numerics import (
    HostCopy,
    compute_dtype,
    has_values,
    kept_on_device,
    may_branch_on_values,
    norms_by_dtype,
    squares_are_finite,
    squares_of,
)

from ..stacks.rank_checks import RankSurvey
from ..stacks.stack import ActiveBlocks, StackState
from ..write.failure import Failure
from ..write.write import Rates


def leaves_masks(failure: Failure, device: torch.device) -> bool:
    """Return True if a step on a device may have a mask of usable gradients that the host does not read."""
    skips = failure.spike is not None and failure.spike.then == "skip" and device.type != "cpu"
    return skips or (failure.detect == "device" and failure.nonfinite != "ignore")


@dataclass(frozen=True)
class LossScale:
    """The numbers that `torch.amp.GradScaler` passes to an optimizer that supports it.

    scale: 0-d, factor of the loss and so of all gradients. None: the gradients have already been divided by the factor.
    found_inf: 0-d, nonzero if a gradient of the optimizer has inf or nan. None: the scaler has not checked gradients.
    """

    scale: Tensor | None
    found_inf: Tensor | None

    @classmethod
    def of(cls, optimizer: object) -> LossScale:
        """Return the numbers that a scaler has set on an optimizer for this step."""
        given = [getattr(optimizer, name, None) for name in ("grad_scale", "found_inf")]
        scale, found_inf = (
            x if x is None or isinstance(x, Tensor) else torch.tensor(x, dtype=torch.float64, device="cpu")
            for x in given
        )
        return cls(scale, found_inf)

    @property
    def stops(self) -> bool:
        """True if the host knows without waiting that the step must change nothing."""
        found_inf = self.found_inf
        return found_inf is not None and may_branch_on_values(found_inf) and bool(found_inf)

    def usable(self, device: torch.device) -> Tensor | None:
        """Return a 0-d boolean on a device, True if the step may change parameters.

        Return None if the scaler has checked nothing. Return None also if `found_inf` is on the CPU: the host then
        reads it in `stops`, which tells before the step whether it must change nothing.
        """
        if self.found_inf is None or self.found_inf.is_cpu:
            return None
        return self.found_inf.to(device, non_blocking=True) == 0

    def unscale(self, names: Sequence[str], gradients: Sequence[Tensor | None]) -> None:
        """Divide gradients by the scale in place, as `GradScaler.unscale_` does.

        names: names of the parameters, for the error.
        gradients: the gradients. None: the parameter has no gradient.

        Raises ValueError for a gradient in float16, because the division would lose small numbers.
        """
        if self.scale is None:
            return
        for name, gradient in zip(names, gradients, strict=True):
            if gradient is not None and gradient.dtype == torch.float16 and gradient.layout is torch.strided:
                raise ValueError(
                    f"{name}: a gradient in float16 loses small numbers when it is divided by the scale of the loss; "
                    "keep parameters in float32 and compute in float16 under torch.autocast"
                )
        inverse = self.scale.double().reciprocal().float()  # as the scaler rounds it
        multiply_gradients(gradients, inverse)


def multiply_gradients(gradients: Iterable[Tensor | None], factor: float | Tensor) -> None:
    """Multiply gradients by a number in place. Sparse gradients do not change, and None, no gradient, is left out."""
    kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for gradient in gradients:
        if gradient is not None and gradient.layout is torch.strided:  # `FiniteCheck` raises an error for other layouts
            kinds.setdefault((gradient.device, gradient.dtype), []).append(gradient)
    for (device, _), tensors in kinds.items():
        torch._foreach_mul_(tensors, factor.to(device, non_blocking=True) if isinstance(factor, Tensor) else factor)


@dataclass(frozen=True)
class GivenGradients:
    """The inputs of a `GradientCheck`: gradients of P parameters, and numbers that must be the same on all ranks.

    gradients: by position, the entries of each gradient that this rank holds. The rank may update only a part of them.
        None: the parameter has no gradient.
    present: `[P]` on the host, True for parameters that have a gradient on this rank.
    linear: `[P]`, True for parameters whose update never squares the gradient, so that the square may overflow.
    rates: learning rate and weight decay of each parameter.
    steps: largest step count of all parameters before this step.
    allowed: 0-d on a device, True if the scaler of the loss found no inf and no nan. None: the step is allowed.
    more: True if other gradients of the same step are checked later.
    """

    gradients: Sequence[Tensor | None]
    present: NDArray[np.bool_]
    linear: NDArray[np.bool_]
    rates: Rates
    steps: int
    allowed: Tensor | None = None
    more: bool = False


@dataclass(frozen=True)
class LocalSurvey:
    """Facts about the gradients of P parameters in one process: whether they are 0 or usable, and their squares.

    `RankSurvey` has the same methods for several ranks.

    given: the gradients.
    small: stacks of small parameters on a CPU. The method `usable` copies the gradients of such a stack into one
        tensor, because one check of this tensor is faster than a check of each gradient. The step then uses the tensor.
    large: positions (indices in the parameter set) of the parameters that are in no small stack.
    gathered: the tensors `[N, *block]` that `usable` has made, by index of the small stack (`StackState.number`).
        `gather_gradients` removes the tensor that it returns.
    """

    given: GivenGradients
    small: Sequence[StackState]
    large: Sequence[int]
    gathered: dict[int, Tensor] = field(default_factory=dict)

    @property
    def device(self) -> torch.device:
        """Device of the gradients and of numbers computed from them. It is the CPU if there is no gradient."""
        return next((x.device for x in self.given.gradients if x is not None), torch.device("cpu"))

    def agreed(self) -> NDArray[np.bool_]:
        """Return `[P]`, True for parameters that have a gradient."""
        return self.given.present

    def nonzero(self, positions: Sequence[int]) -> bool:
        """Return True if a gradient at these positions has an entry other than 0. The host waits for the answer."""
        present = (gradient for at in positions if (gradient := self.given.gradients[at]) is not None)
        return any(not has_values(gradient) or bool(gradient.any()) for gradient in present)

    def usable(self, positions: Sequence[int], finite: bool) -> Tensor | None:
        """Return `[n]` booleans on the device, one for each parameter at `positions` that has a gradient.

        A boolean is True if the gradient can be used: it is finite, and its squares are finite too if the update
        squares it. Return None if all gradients can be used. Gradients of small stacks are stored in `gathered`.

        finite: False if the recipe allows inf and nan. The gradients are then not checked, and the result is None.
        """
        if not (positions and finite) or squares_are_finite(self._joined(positions)):
            return None
        present = [gradient for position in positions if (gradient := self.given.gradients[position]) is not None]
        return finite_gradients(present, self.given.linear[positions].tolist())

    def _joined(self, positions: Sequence[int]) -> list[Tensor]:
        """Return tensors with all gradients of the parameters at these positions, so that few tensors are checked.

        Gradients of a stack of small parameters are copied into one tensor, which the step uses too (`gathered`).
        """
        gradients: Sequence[Any] = self.given.gradients
        small, alone = self.small, self.large
        if len(positions) < len(gradients):
            wanted = set(positions)
            small = [x for x in small if wanted.issuperset(x.stack.positions)]
            alone = sorted(wanted.difference(*(x.stack.positions for x in small)))
        self.gathered.update((x.number, x.stack.gather(gradients)) for x in small)
        return [*self.gathered.values(), *(gradients[position] for position in alone)]

    @property
    def squares(self) -> Tensor:
        """`[P]` float64 on the device, sum of squares of each gradient. The sum is 0 for a parameter without one."""
        gradients = self.given.gradients
        here = [(place, gradient) for place, gradient in enumerate(gradients) if gradient is not None]
        if not here:
            return torch.zeros(len(gradients), dtype=torch.float64, device=self.device)
        squares = squares_of([gradient for _, gradient in here])
        if len(here) == len(gradients):
            return squares
        places = kept_on_device(np.array([place for place, _ in here], dtype=np.int64), self.device)
        return squares.new_zeros(len(gradients)).index_copy_(0, places, squares)

    def scaled(self, factor: float | Tensor) -> Self:
        """Return the facts about the gradients after the caller has multiplied them by `factor` in place.

        Facts such as `squares` follow without further work, because they are computed from the gradients when they are
        read. `gathered` is empty in the result, because it has copies that were made before the multiplication.
        """
        return replace(self, gathered={})


GradientSurvey = LocalSurvey | RankSurvey
"""Facts about the gradients of P parameters, in one process or on several ranks."""


def gather_gradients(blocks: ActiveBlocks, gradients: Sequence[Any], survey: GradientSurvey) -> Tensor:
    """Return the gradients of blocks as one tensor `[n, *block]`. The caller must not write to this tensor.

    The check of the gradients has gathered those of small stacks already. Such a tensor is removed from
    `survey.gathered`, so that its memory is freed after use.

    gradients: by position, the gradients of the parameters.
    survey: facts about the same gradients.
    """
    gathered = survey.gathered.pop(blocks.stack_state.number, None)
    return blocks.stack.gather(gradients) if gathered is None or blocks.places is not None else gathered


STALLED = 10
"""Number of steps in a row without a usable gradient after which the run counts as lost, and a warning is issued."""


@dataclass(frozen=True)
class GradientCheck:
    """A check of gradients that has begun. `FiniteCheck.finish` reads it and decides which gradients are used.

    given: the gradients, and the numbers that must be the same on all ranks, such as learning rates.
    survey: facts about the gradients, such as their squares.
    present: `[P]` on the host, True for parameters that have a gradient and whose param group is not idle. A group is
        idle if its learning rate and all of its gradients are 0.
    usable: `[n]` on the device, for the n parameters that are True in `present`: True if the gradient is usable. None:
        all n gradients are usable.
    answers: booleans on the device that the host must read: the n booleans of `usable`, and one more if a GradScaler
        has checked the gradients, which is True if the scaler allows the step. None: the host need not read anything.
    """

    given: GivenGradients
    survey: GradientSurvey
    present: NDArray[np.bool_]
    usable: Tensor | None
    answers: Tensor | None


class FiniteCheck:
    """Check that finds and counts unusable gradients, which have inf or nan or are too large to be squared.

    The sum of squares of a gradient must be finite in the dtype of the state. Updates that square no gradient, such as
    SGD and Lion, use every finite gradient. A check on the host gives its answer at once. A check on a device gives a
    mask, which the host reads one step later without waiting.

    failure: policy of the recipe for unusable gradients.
    names: names of the parameters in errors and counts.
    survey: function from the gradients of a step to facts about them, such as which are finite and their sums of
        squares, for all ranks that share the parameters.
    skipped: number of unusable gradients of each parameter of the optimizer, by name. All checks of the optimizer share
        this counter.
    """

    def __init__(
        self,
        failure: Failure,
        names: Sequence[str],
        survey: Callable[[GivenGradients], GradientSurvey],
        skipped: Counter[str],
    ) -> None:
        self.failure, self.names, self.survey, self.skipped = failure, list(names), survey, skipped
        self._on_host = failure.detect != "device"
        self._deferred: list[_Deferred] = []
        self._stalled, self._checked = 0, 0
        self._faults: list[tuple[int, Tensor | None]] = []

    def begin(self, given: GivenGradients) -> GradientCheck:
        """Begin the check of the gradients of one step. No gradient and no count changes.

        Raises TypeError for sparse gradients, and the errors of `survey`, such as DistributedError if only some ranks
        have a gradient of a parameter.
        """
        for name, gradient in zip(self.names, given.gradients, strict=True):
            if gradient is not None and gradient.layout is not torch.strided:
                raise TypeError(
                    f"{name}: a dense gradient is required, got layout {gradient.layout}; an nn.Embedding makes dense "
                    "gradients with sparse=False"
                )
        survey = self.survey(given)
        present = survey.agreed() if self._on_host else given.present
        idle = given.rates.idle(survey.nonzero)
        present = present if idle is None else present & ~idle
        checked = idle is None or not idle.all()
        usable = survey.usable(_places(present), self.failure.nonfinite != "ignore") if checked else None
        answers = None if usable is None or not self._on_host else _with(usable, given.allowed)
        return GradientCheck(given, survey, present, usable, answers)

    def finish(self, check: GradientCheck, answers: Sequence[bool]) -> tuple[NDArray[np.bool_], Tensor | None]:
        """Decide which parameters the step updates. Return (active, mask).

        Nothing changes but the counts of unusable gradients.

        active: `[P]` on the host, True for parameters that the step updates, unless `mask` excludes them. A group with
            lr 0 and gradients 0 is not active, because torch.distributed.checkpoint makes such a step only to have
            state allocated.
        mask: `[P]` on the device, if the host does not read the check. Where it is False, the step leaves an active
            parameter unchanged. None: all active parameters are updated.

        answers: the booleans of `check.answers`, copied to the host. Empty if `check.answers` is None.

        Raises FloatingPointError for an unusable gradient if the recipe requests an error.
        """
        positions, present, given = _places(check.present), check.present, check.given
        if check.usable is None and (given.allowed is None or not positions):
            self._count(len(positions), [], given.gradients, given.more)
            return present, None
        # The host has nothing to read, and the result is a mask on the device. There are two such cases: with
        # `failure.detect: device`, and if all gradients count as usable but a GradScaler decides whether there is a
        # step.
        if check.answers is None:
            return present, self._defer(positions, check.usable, given.allowed, len(present))
        if (bad := _unusable(positions, answers)) is None:
            return np.zeros_like(present), None
        self._count(len(positions), bad, given.gradients, given.more)
        self.raise_nonfinite(bad, "nothing was changed", given.gradients)
        active = present.copy()
        active[bad] = False
        return active, None

    def _count(
        self, checked: int, bad: list[int], gradients: Sequence[Tensor | None] | None = None, more: bool = False
    ) -> None:
        """Count unusable gradients by name of the parameter.

        Warn of the first unusable gradient that is skipped, and if no gradient could be used in STALLED steps in a row.

        checked: number of gradients that were checked.
        bad: positions of the unusable gradients.
        gradients: gradients by position of the parameter. None: they do not exist any more.
        more: True if other gradients of the same step are counted later.
        """
        if bad and not self.skipped and self.failure.nonfinite == "skip":
            fault = _fault(None if gradients is None else gradients[bad[0]])
            warn_user(
                f"{self.names[bad[0]]}: its gradient has {fault}; this update is skipped for "
                f"{counted(len(bad), 'parameter')}. `optimizer.skipped` counts skipped updates without further "
                "warnings; failure.nonfinite=raise stops at the first"
            )
        if bad:
            self.skipped.update(self.names[position] for position in bad)
            self._faults += [(position, None if gradients is None or more else gradients[position]) for position in bad]
        self._checked += checked
        if more or not self._checked:  # a step without gradients does not count
            return
        self._stalled = self._stalled + 1 if len(self._faults) == self._checked else 0
        faults, self._faults, self._checked = self._faults, [], 0
        if self._stalled == STALLED:
            first, gradient = faults[0]
            fault = _fault(gradient)
            warn_user(
                f"gradients: usable values are required, got none in {STALLED} steps in a row, so no parameter was "
                f"updated in these steps ({self.names[first]}, for example, has {fault}). Set failure.nonfinite=raise "
                "to stop at the first such gradient"
            )

    def lost(self) -> bool:
        """Return True if no gradient could be used for STALLED steps in a row."""
        return self._stalled >= STALLED

    def resolve_deferred(self) -> tuple[list[int], list[int]]:
        """Read the checks of the last step that the host has not read yet, and count the unusable gradients.

        Return two lists of positions of parameters: those that the last step left unchanged because of these checks,
        and those with an unusable gradient. The lists differ if the scaler of the loss, or a spike, stopped the step:
        the first list then has all parameters of the step.
        """
        halted, bad = list[int](), list[int]()
        deferred, self._deferred = self._deferred, []
        for number, (updated, checked, answers) in enumerate(deferred, 1):
            unusable = _unusable(checked, _values(answers.wait()))
            if unusable is None:
                halted = updated
            if unusable is not None or not checked:
                self._count(len(checked), unusable or [], more=number < len(deferred))
                bad += unusable or []
        return halted or bad, bad

    def stop(self, active: NDArray[np.bool_], mask: Tensor | None, allowed: Tensor) -> Tensor:
        """Return the mask `[P]` of usable gradients for a step that `allowed` may stop: all False if it stops the step.

        `allowed` is copied to the host without waiting, for `resolve_deferred` in the next step.

        active, mask: result of `finish`.
        allowed: 0-d boolean on the device, False if the step must change nothing.
        """
        self._deferred.append(_Deferred(_places(active), [], HostCopy(allowed.view(1))))
        return allowed.expand(len(active)).clone() if mask is None else mask & allowed

    def raise_nonfinite(
        self, bad: Sequence[int], outcome: str, gradients: Sequence[Tensor | None] | None = None
    ) -> None:
        """Raise FloatingPointError for unusable gradients if the recipe requests an error.

        bad: positions of unusable gradients.
        outcome: part of the message that says what became of the step.
        gradients: gradients by position of the parameter. None: they do not exist any more.
        """
        if bad and self.failure.nonfinite == "raise":
            names = ", ".join(self.names[position] for position in bad[:5])
            fault = _fault(None if gradients is None else gradients[bad[0]])
            raise FloatingPointError(f"gradient of {names}: finite values are required, got {fault}; {outcome}")

    def _defer(self, positions: list[int], usable: Tensor | None, allowed: Tensor | None, total: int) -> Tensor:
        """Return a mask for the step, `[P]` on the device: False for parameters whose gradient is not usable.

        If the scaler of the loss stops the step, the mask is False for all checked gradients. The result of the check
        is copied to the host without waiting, for `resolve_deferred` in the next step.

        positions: positions of the n parameters whose gradients were checked.
        usable: `[n]`, True for usable gradients. None: all of them are usable.
        allowed: 0-d, True if the scaler of the loss allows the step. None: there is no scaler.
        total: number P of parameters.
        """
        if usable is None:
            assert allowed is not None
            usable = torch.ones(len(positions), dtype=torch.bool, device=allowed.device)
        self._deferred.append(_Deferred(positions, positions, HostCopy(_with(usable, allowed))))
        usable = usable if allowed is None else usable & allowed
        if len(positions) == total:
            return usable
        mask = torch.ones(total, dtype=torch.bool, device=usable.device)
        return mask.index_copy_(0, kept_on_device(np.array(positions, dtype=np.int64), usable.device), usable)


class _Deferred(NamedTuple):
    """The result of a check of gradients on a device, which the host reads only in the next step, so that it need not
    wait.

    updated: positions (indices in the parameter set) of the parameters that the step updates unless the result forbids
        it.
    checked: positions of the parameters whose gradients were checked.
    answers: booleans: for each checked gradient, True if it is usable. One more follows if a scaler of the loss or a
        spike may stop the step: True if it did not.
    """

    updated: list[int]
    checked: list[int]
    answers: HostCopy


def _places(flags: NDArray[np.bool_]) -> list[int]:
    """Return the positions (indices) of the parameters whose flag in `[P]` is True."""
    places: list[int] = np.flatnonzero(flags).tolist()
    return places


def _with(usable: Tensor, allowed: Tensor | None) -> Tensor:
    """Return the booleans `[n]` of n gradients, followed by the boolean of the scaler of the loss if there is one.

    usable: `[n]`, True for usable gradients.
    allowed: 0-d, True if the scaler allows the step. None: there is no scaler.
    """
    return usable if allowed is None else torch.cat([usable, allowed.view(1)])


def copy_answers(checks: Sequence[GradientCheck]) -> Callable[[], list[list[bool]]]:
    """Begin to copy the booleans of `GradientCheck.answers` to the host.

    Return a function that waits for the copies, once for each device, and returns the booleans, as one list for each
    check. The list is empty if the host need not read the result of the check. The wait ends when the check is
    complete, although the device may have later work.
    """
    by_device: dict[torch.device, list[tuple[int, Tensor]]] = {}
    for index, answers in enumerate(check.answers for check in checks):
        if answers is not None:
            by_device.setdefault(answers.device, []).append((index, answers))
    copies = [
        (rows, HostCopy(torch.cat([answers for _, answers in rows]) if len(rows) > 1 else rows[0][1]))
        for rows in by_device.values()
    ]

    def read() -> list[list[bool]]:
        of_checks: list[list[bool]] = [[] for _ in checks]
        for rows, copy in copies:
            values = iter(_values(copy.wait()))
            for index, answers in rows:
                of_checks[index] = list(islice(values, len(answers)))
        return of_checks

    return read


def _values(answers: Tensor) -> list[bool]:
    """Return the values of booleans on the host. Fake tensors have no values: all of their booleans count as True."""
    return answers.tolist() if has_values(answers) else [True] * len(answers)


def _unusable(positions: Sequence[int], answers: Sequence[bool]) -> list[int] | None:
    """Return the positions of the gradients that are not usable. Return None if a GradScaler or a spike stops the step.

    positions: positions (indices in the parameter set) of the parameters whose gradients were checked.
    answers: True for each usable gradient. One more boolean may follow: False if the step is stopped.
    """
    bad = [position for position, good in zip(positions, answers, strict=False) if not good]
    return bad if all(answers[len(positions) :]) else None


def _fault(gradient: Tensor | None) -> str:
    """Return the reason why a gradient is not usable, as far as this rank knows.

    gradient: the unusable gradient. None: it does not exist any more.
    """
    if gradient is not None and not bool(gradient.isfinite().all()):
        return "inf or nan"
    dtype = None if gradient is None else compute_dtype(gradient.dtype)
    if gradient is None or dtype is None or bool(torch.linalg.vector_norm(gradient, dtype=dtype).square().isfinite()):
        return "inf, nan or values whose squares overflow"
    peak = float(gradient.abs().max())
    return f"values up to {peak:.3g}, whose squares overflow {str(dtype).removeprefix('torch.')}; scale the loss down"


def finite_gradients(gradients: Sequence[Tensor], linear: Sequence[bool]) -> Tensor:
    """Return `[n]`, True for each of n gradients whose sum of squares is finite in the dtype of the computation.

    linear: for each gradient, True if only its values must be finite, not its sum of squares.
    """
    parts = []
    for order, wanted in ((2.0, False), (math.inf, True)):
        here = [place for place, is_linear in enumerate(linear) if is_linear is wanted]
        for places, norms in norms_by_dtype([gradients[place] for place in here], order=order):
            # the least power of 2 whose square overflows
            limit = math.inf if wanted else 2.0 ** (round(math.log2(torch.finfo(norms.dtype).max)) // 2)
            parts.append(([here[place] for place in places], norms < limit))  # False for nan
    if len(parts) == 1:
        return parts[0][1]
    flags = {place: flag for places, good in parts for place, flag in zip(places, good.unbind(), strict=True)}
    return torch.stack([flags[place] for place in range(len(gradients))])
