"""Constraints: the contract of the family, three constraints, and the write of an update under constraints.

A constraint changes updates before the write and parameters after it.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, ClassVar, Literal, final

import torch
from pydantic import AfterValidator, Field
from torch import Tensor

from eigengraft.component import ChainOf, PathName
from eigengraft.numerics import block_norm, compute_dtype, copies, in_dtypes_of, over_stacks, safe_ratio, squares_of
from eigengraft.preconditioners.polar.spectral import NewtonSchulz, PolarSolver
from eigengraft.schedules import Schedulable
from eigengraft.signals import Request
from eigengraft.slots import Slot, dotted

from .write import StepRates, after_write, decay, put, with_decay, write

Tensors = Sequence[Tensor]
"""n tensors, one for each parameter of an update."""
Slots = Mapping[str, Tensors]
"""The slots of n parameters: by name of the slot, n tensors."""


@dataclass(frozen=True)
class ConstraintContext:
    """Inputs of a constraint beside n parameters and their updates. The tensors may be this rank's shards.

    lr: learning rate of the update.
    mask: n 0-d booleans. False: the parameter and its slots must not change. None: all may change.
    shard_sums: function of numbers `[n]` float64, one for each tensor, that returns their sums over all ranks. All
        ranks call it together. None: this rank holds whole tensors.
    signals: by name, the signals in `requires_some` of the constraints. A signal has for each parameter a tensor, or
        None if the parameter does not have the signal in this step.
    """

    lr: float | Tensor = 0.0
    mask: Tensors | None = None
    shard_sums: Callable[[Tensor], Tensor] | None = None
    signals: Mapping[str, Sequence[Tensor | None]] = field(default_factory=dict)

    def norms(self, tensors: Tensors) -> Tensor:
        """Return the Frobenius norms `[n]` of n full tensors, of which this rank may hold shards."""
        return self.norms_of(tensors)[0]

    def norms_of(self, *columns: Tensors) -> Sequence[Tensor]:
        """Return the Frobenius norms of several lists of n full tensors, `[n]` for each list.

        If this rank holds shards of the tensors, the shards of the other ranks are included.
        """
        if self.shard_sums is None:
            return _norms([tensor for tensors in columns for tensor in tensors]).chunk(len(columns))
        return [self.squares(tensors).sqrt().to(compute_dtype(tensors[0].dtype)) for tensors in columns]

    def squares(self, tensors: Tensors) -> Tensor:
        """Return the sums of squares `[n]` float64 of n full tensors, of which this rank may hold shards."""
        found = squares_of(tensors)
        return found if self.shard_sums is None else self.shard_sums(found)

    def dots(self, xs: Tensors, ys: Tensors) -> Tensor:
        """Return the dot products `[n]` float64 of n pairs of full tensors, of which this rank may hold shards."""
        found = torch.stack(over_stacks(_dots, xs, ys))
        return found if self.shard_sums is None else self.shard_sums(found)


class Constraint(Schedulable, ABC, family="constraint"):
    """Changes n updates U before the write (`adjust`) and n parameters W after it (`retract`).

    The write between `adjust` and `retract` is W <- W - lr alpha W - lr U, with the learning rate lr and the weight
    decay alpha. W and U have the shape of the full parameter and the dtype in which updates are computed. For a
    constraint that is `shardable`, W and U may be this rank's shards.

    Some averagings, such as `schedule_free`, apply updates to a tensor of their own state in place of the parameter.
    W is then this tensor, which is called the base iterate.
    """

    name: PathName | None = Field(
        default=None,
        description="name of the constraint in paths; default: its kind. Needed if a kind repeats",
    )

    requires_some: ClassVar[frozenset[str]] = frozenset()
    """Names of signals that at least one parameter must have in every step."""

    rounds: ClassVar[bool] = False
    """True if the constraint rounds the parameter. Such a constraint must be the last one, and cannot be combined with
    an averaging."""

    @property
    @final
    def requests(self) -> tuple[Request, ...]:
        """Requests for the signals in `requires_some`. A parameter without the signal is not constrained."""
        return tuple(Request(name, "if_given") for name in sorted(self.requires_some))

    @final
    def signals_at(self, step: int) -> frozenset[str]:
        """Return the names of the inputs beside the gradient (signals) that every parameter must have at a step.

        The result is empty, because a constraint is applied only to those parameters that have its signals.
        """
        return frozenset()

    @property
    @final
    def label(self) -> str:
        """Name of the constraint in paths: the field `name`, or `kind` if the constraint has no name."""
        return self.name or str(getattr(self, "kind"))  # noqa: B009  every member has a kind, the family has none

    @final
    def path_in(self, update: str) -> str:
        """Return the dotted path of the constraint in a recipe, which also stands for it in state keys.

        update: path of the update that has the constraint.
        """
        return dotted(update, "constraints", self.label)

    def slots(self, shape: tuple[int, ...]) -> Mapping[str, Slot]:
        """Return the slots of one parameter of this shape, by name. Called at construction.

        The shape of a slot is (), or ends with the axes of the parameter. Any other shape raises a ContractError when
        an optimizer is made.
        """
        return {}

    def keeps(self, dtype: torch.dtype) -> bool:
        """Return True if the constraint has slots for parameters of this dtype."""
        return True

    def sets_length(self) -> bool:
        """Return True if the constraint replaces the length of updates, so that factors of updates have no effect."""
        return False

    def shardable(self, whole_rows: bool) -> bool:
        """Return True if the constraint can be computed on shards of parameters.

        On shards, the constraint may compute sums over whole parameters only by the methods of `ConstraintContext`.

        whole_rows: True if parameters are sharded only along the first axis.
        """
        return False

    def begin(self, slots: Slots, parameters: Tensors, context: ConstraintContext) -> None:
        """Set slots whose initial values depend on the parameters. Called before the first update of each parameter.

        slots: by name, n tensors, which are changed in place.
        parameters: n parameters before their first update.
        """

    def adjust(self, slots: Slots, parameters: Tensors, updates: Tensors, context: ConstraintContext) -> Tensors:
        """Return the updates to write. Called in every step before the write. Only slots may be changed in place.

        slots: by name, n tensors. They may be changed where `context.mask` is True, or everywhere if it is None.
        parameters: n parameters before the write.
        updates: n updates U, as the constraints before this one returned them.
        context: further inputs, such as the learning rate and the mask.
        """
        return updates

    def retract(
        self, slots: Slots, parameters: Tensors, updates: Tensors, moved: Tensors, context: ConstraintContext
    ) -> Tensors:
        """Return the parameters after the step. Called in every step after the write. Only slots may be changed in
        place.

        slots, context: as in `adjust`.
        parameters: n parameters before the write.
        updates: n updates as they were written, after `adjust` of all constraints.
        moved: n parameters after the write, as `retract` of the constraints before this one returned them.
        """
        return moved


def _dots(x: Tensor, y: Tensor) -> Tensor:
    return x.to(torch.float64, copy=True).mul_(y).flatten(1).sum(1)


def _norms(tensors: Tensors) -> Tensor:
    """Return the Frobenius norms `[n]` of tensors of one dtype, without overflow or underflow of the squares."""
    dtype = compute_dtype(tensors[0].dtype)
    if dtype == torch.float64:
        return torch.stack(over_stacks(block_norm, tensors))
    return torch.stack(torch._foreach_norm(list(tensors), 2, dtype=torch.float64)).to(dtype)


def _rounded_last(constraints: tuple[Constraint, ...]) -> tuple[Constraint, ...]:
    early = [constraint.label for constraint in constraints[:-1] if constraint.rounds]
    if early:
        raise ValueError(
            f"'{early[0]}' must be the last constraint, because it rounds the parameter; move it to the end of the list"
        )
    return constraints


Constraints = Annotated[tuple[Constraint, ...], ChainOf("constraint", "constraints"), AfterValidator(_rounded_last)]
"""Constraints in the order in which they are applied. YAML gives a list, or a single constraint."""


class Hyperball(Constraint):
    """U <- U ||W|| / ||U||;  W <- (W - lr U) ||W_0|| / ||W - lr U||  with Frobenius norms of whole parameters.

    Hyperball optimization: W keeps the norm of W_0, the parameter before its first update, and lr is the length of a
    step in units of this norm. A parameter with W_0 = 0 is not constrained. A parameter with U = 0 does not change.
    Weight decay is applied before the retraction, which undoes the shrinking. With decay alpha, the only effect of the
    decay is a step that is longer by the factor 1 / (1 - lr alpha). Prefer a larger lr with rate 0.
    """

    kind: Literal["hyperball"] = "hyperball"
    relative: bool = Field(default=True, description="true: scale U to the norm of W first; false: U stays as it is")

    def slots(self, shape: tuple[int, ...]) -> Mapping[str, Slot]:
        return {"radius": Slot((), role="iterate")}

    def shardable(self, whole_rows: bool) -> bool:
        return True

    def sets_length(self) -> bool:
        return self.relative

    def begin(self, slots: Slots, parameters: Tensors, context: ConstraintContext) -> None:
        torch._foreach_copy_(list(slots["radius"]), list(context.norms(parameters).unbind(0)))

    def adjust(self, slots: Slots, parameters: Tensors, updates: Tensors, context: ConstraintContext) -> Tensors:
        if not self.relative:
            return updates
        free = torch.stack(list(slots["radius"])) == 0
        ratios = safe_ratio(*context.norms_of(parameters, updates))
        return over_stacks(torch.mul, updates, ratios.masked_fill(free, 1.0))

    def retract(
        self, slots: Slots, parameters: Tensors, updates: Tensors, moved: Tensors, context: ConstraintContext
    ) -> Tensors:
        radii, (given, there) = torch.stack(list(slots["radius"])), context.norms_of(updates, moved)
        still = (given == 0) | (there == 0)
        scales = safe_ratio(radii, there).masked_fill(radii == 0, 1.0)
        return over_stacks(_unless, parameters, moved, scales, still & (radii != 0))


def _unless(old: Tensor, new: Tensor, scale: Tensor, stays: Tensor) -> Tensor:
    scaled = new * scale
    return torch.where(stays, old, scaled, out=scaled)


class Polar(Constraint):
    """W' <- polar(W') = U V^T  for W' = U S V^T.  W' is the parameter after the step.

    Rows or columns of W stay orthonormal: W lies on the Stiefel manifold. With a polar factor as the update this is
    SPEL, W <- polar(W - lr polar(M)) (Manifold Constrained Steepest Descent 2026, arXiv:2601.21487; NVIDIA's Emerging
    Optimizers), for which lr is about the angle by which a step turns W. Parameters are treated as matrices, first axis
    x the rest. Parameters with one axis are not constrained. A parameter of zeros stays 0.
    """

    kind: Literal["polar"] = "polar"
    solver: PolarSolver = Field(default=NewtonSchulz(), description="solver that computes the polar factor")

    def retract(
        self, slots: Slots, parameters: Tensors, updates: Tensors, moved: Tensors, context: ConstraintContext
    ) -> Tensors:
        return over_stacks(self._factors, moved)

    def _factors(self, tensors: Tensor) -> Tensor:
        return tensors if tensors.ndim < 3 else self.solver.of_blocks(tensors)


class QKClip(Constraint):
    """W_h <- W_h min(1, bound / S_h)^power  after the write, for every head h.

    W_h are the rows of W that compute head h, and S_h is the signal `max_logit`, the largest logit of the head in the
    step. This is the QK-clip of MuonClip (Kimi K2, arXiv:2507.20534, section 2.1). Weights of queries and of keys have
    power 1/2. In multi-head latent attention the rotary part of queries has power 1, and the rotary key, which all
    heads share, is not clipped. Parameters without the signal do not change, and neither do rows of a fused weight for
    which S_h is 0 or not finite. At least one parameter must have the signal.
    """

    kind: Literal["qk_clip"] = "qk_clip"
    bound: float = Field(
        default=100.0, gt=0, description="largest logit S_h with which the weights of a head do not change"
    )
    power: float = Field(
        default=0.5,
        gt=0,
        le=1,
        description="exponent of the factor min(1, bound / S_h); 1/2 for weights of queries and of keys",
    )
    requires_some: ClassVar[frozenset[str]] = frozenset({"max_logit"})

    def shardable(self, whole_rows: bool) -> bool:
        return True

    def retract(
        self, slots: Slots, parameters: Tensors, updates: Tensors, moved: Tensors, context: ConstraintContext
    ) -> Tensors:
        largest = context.signals.get("max_logit", [None] * len(moved))
        given = [(index, logits) for index, logits in enumerate(largest) if logits is not None]
        clipped = list(moved)
        columns = [moved[index] for index, _ in given], [logits for _, logits in given]
        for (index, _), own in zip(given, over_stacks(self._clipped, *columns), strict=True):
            clipped[index] = own
        return clipped

    def _clipped(self, weights: Tensor, largest: Tensor) -> Tensor:
        factor = (self.bound / largest.clamp_min(self.bound)) ** self.power
        return weights * torch.where(largest.isfinite(), factor, 1.0).to(weights.dtype)


@dataclass(frozen=True)
class ParameterUpdate:
    """One update of n tensors under constraints:  W <- W - lr alpha W - lr U.

    updates: n tensors U, of the shapes of W.
    step_rates: lr and alpha.
    mask: n 0-d booleans, False for tensors that do not change. None: all may change.
    constraints: constraints in order, with their slots. Each constraint is applied before the write (`adjust`) and
        after the write (`retract`).
    context: further inputs of the constraints. The learning rate and mask in it are replaced by those of this update.
    """

    updates: Tensors
    step_rates: StepRates
    mask: Tensors | None = None
    constraints: Sequence[tuple[Constraint, Slots]] = ()
    context: ConstraintContext = ConstraintContext()

    def __call__(self, tensors: Tensors) -> None:
        """Change n parameters W in place by weight decay, the updates U (`updates`) and the constraints.

        tensors: the n parameters W, in the order of the updates.
        """
        if not self.constraints:
            write(tensors, self.updates, self.step_rates, self.mask)
            return
        updates = self.updates
        before = in_dtypes_of(tensors, updates)
        if not before[0].is_cpu:  # one copy serves all constraints
            before = over_stacks(lambda x: x, before)
        context = replace(self.context, lr=self.step_rates.lr, mask=self.mask)
        for constraint, slots in self.constraints:
            updates = constraint.adjust(slots, before, updates, context)
        after: Tensors = over_stacks(partial(after_write, self.step_rates), before, updates)
        for constraint, slots in self.constraints:
            after = constraint.retract(slots, before, updates, after, context)
        put(tensors, after, self.mask)

    def slice_rows(self, chosen: Sequence[int]) -> ParameterUpdate:
        """Return the update of the tensors with the chosen indices. It has no constraints."""
        if len(chosen) == len(self.updates):  # all indices, in order
            return replace(self, constraints=())
        mask = None if self.mask is None else [self.mask[index] for index in chosen]
        return ParameterUpdate([self.updates[index] for index in chosen], self.step_rates, mask)

    def decayed_at(self, others: Tensors) -> ParameterUpdate:
        """Return this update with weight decay computed at other tensors V:  U <- U + alpha V  and  alpha <- 0.

        others: n tensors V.
        """
        updates = with_decay(self.updates, others, self.step_rates)
        return replace(self, updates=updates, step_rates=self.step_rates.without_decay)

    def decay(self, tensors: Tensors) -> ParameterUpdate:
        """Apply the weight decay to the tensors now, and return the update without a decay."""
        targets = tensors if self.mask is None else copies(tensors, tensors[0].dtype)
        decay(targets, self.updates, self.step_rates)
        if targets is not tensors:
            put(tensors, targets, self.mask)
        return replace(self, step_rates=self.step_rates.without_decay)
