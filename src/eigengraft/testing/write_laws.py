"""The laws of averagings and constraints, which act on whole parameters after the chain.

Averagings and constraints are tried without an optimizer, on a few parameters with their slots. Each step has one
update of each parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from eigengraft.blocking.parameter_sums import run_stacks
from eigengraft.errors import counted
from eigengraft.numerics import compute_dtype
from eigengraft.optimizers.write.averaging import Averaging, IterateBatch
from eigengraft.optimizers.write.constraints import Constraint, ConstraintContext, ParameterUpdate, Slots, Tensors
from eigengraft.optimizers.write.write import Decoupled, StepRates
from eigengraft.slots import Slot

from .accelerator import accelerator
from .causes import write_cause
from .device_laws import WARM_UP_STEPS, require_no_waits, without_accelerator
from .laws import Case, Law, broken, in_parentheses, require, require_close, the_declaration_survives
from .samples import standard_normal

PARAMETER_SHAPES = ((4, 3), (5,), (4, 2, 3))
"""Shapes of the parameters to try."""
_STEPS = 6
_LR = 0.1
_WEIGHT_DECAY = 0.05
_DTYPES = (torch.float32, torch.float64, torch.bfloat16)
_PLACES = range(len(PARAMETER_SHAPES))


def _drawn(place: int, seed: int, dtype: torch.dtype) -> Tensor:
    return standard_normal(*PARAMETER_SHAPES[place], seed=seed + place).to(dtype)


def _require_slot(name: str, slot: object, shape: tuple[int, ...]) -> None:
    """Raise a LawError unless the shape of a slot is (), or ends with the shape of its parameter."""
    if not isinstance(slot, Slot):
        raise broken(f"slots(), '{name}'", "a Slot", type(slot).__name__)
    fine = slot.shape == () or slot.shape[-len(shape) :] == shape
    what, cause = f"slots(), shape of '{name}' of a parameter of shape {shape}", "a slot is sharded like its parameter"
    require(fine, what, f"(), or a shape that ends with {shape}", slot.shape, in_parentheses(cause))


def _copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.clone() for tensor in tensors]


def _kinds(tensors: Sequence[Tensor]) -> list[tuple[str, tuple[int, ...]]]:
    return [(str(tensor.dtype), tuple(tensor.shape)) for tensor in tensors]


def _require_tensors(found: object, wanted: Sequence[Tensor], what: str, dtype: bool = True) -> None:
    """Raise a LawError unless a method returned a tensor of the right shape for each parameter.

    found: the value that the method returned.
    wanted: tensors with the right shapes, one for each parameter.
    what: name of the method, for the error.
    dtype: True if the dtypes must be those of `wanted`, too.
    """
    if not isinstance(found, (list, tuple)) or len(found) != len(wanted):
        got = f"a list of {len(found)}" if isinstance(found, (list, tuple)) else type(found).__name__
        raise broken(what, f"a list of {len(wanted)} tensors, one for each parameter", got)
    for place, (own, like) in enumerate(zip(found, wanted, strict=True)):
        fine = isinstance(own, Tensor) and own.shape == like.shape and (own.dtype == like.dtype or not dtype)
        want = f"shape {tuple(like.shape)}" + (f" in {like.dtype}" if dtype else "")
        got = type(own).__name__
        if isinstance(own, Tensor):
            got = f"shape {tuple(own.shape)}" + (f" in {own.dtype}" if dtype else "")
        require(fine, f"{what}, parameter {place}", f"a tensor of {want}", got)


class _Bench:
    """Parameters with their slots, without an optimizer. Averagings and constraints are tried on them."""

    def __init__(self, parameters: list[Tensor], slots: Sequence[Mapping[str, Slot]], dtype: torch.dtype) -> None:
        self.parameters, device = parameters, torch.get_default_device()
        self.slots: Slots = {name: [own[name].allocate(1, dtype, device)[0] for own in slots] for name in slots[0]}

    def everything(self) -> list[Tensor]:
        """Return the parameters and all their slots."""
        return [*self.parameters, *(tensor for tensors in self.slots.values() for tensor in tensors)]

    def names(self) -> list[str]:
        """Return the names of the tensors of `everything`, for errors."""
        parameters = [f"parameter {i}" for i in range(len(self.parameters))]
        return [*parameters, *(f"slot '{slot}' of {name}" for slot in self.slots for name in parameters)]


@dataclass(frozen=True)
class _CountedUpdate(ParameterUpdate):
    """An update that counts how often it was applied."""

    calls: list[None] = field(default_factory=list)

    def __call__(self, tensors: Tensors) -> None:
        self.calls.append(None)
        super().__call__(tensors)


# Averagings.


class AveragingBench(_Bench):
    """An averaging with n parameters and their iterates, without an optimizer.

    steps: `[n]`, number of updates of each parameter.
    """

    def __init__(
        self,
        averaging: Averaging,
        dtype: torch.dtype = torch.float64,
        places: Sequence[int] = _PLACES,
        size: float = 1.0,
        apart: bool = False,
    ) -> None:
        """Allocate the iterates.

        places: index of each parameter's shape in `PARAMETER_SHAPES`.
        size: factor by which updates are multiplied.
        apart: True if parameters begin at different steps.
        """
        self.averaging, self.places, self.size, self.compute = averaging, places, size, compute_dtype(dtype)
        slots = [averaging.slots(PARAMETER_SHAPES[place], dtype.itemsize == 2) for place in places]
        super().__init__([_drawn(place, 1, dtype) for place in places], slots, self.compute)
        self.steps = np.array(places if apart else [0] * len(places), dtype=np.int64)
        self.ran, self.applied = 0, list[None]()

    def batch(self, lr: float | Tensor = _LR, mask: Sequence[Tensor] | None = None) -> IterateBatch:
        """Return the parameters and their iterates at the present step, as the methods of an averaging receive them.

        lr: learning rate.
        mask: for each parameter, a 0-d bool tensor, True if the parameter is updated. None: all are.
        """
        return IterateBatch(self.parameters, self.slots, self.steps.copy(), lr, mask, peak_lr=_LR)

    def step(self, lr: float | Tensor = _LR, mask: Sequence[Tensor] | None = None, decay: float = 0.0) -> None:
        """Update all parameters once, by random directions that follow from the number of the step.

        lr: learning rate.
        mask: for each parameter, a 0-d bool tensor, True if the parameter is updated. None: all are.
        decay: alpha in  W <- W - lr alpha W - lr U.
        """
        if self.ran == 0:
            self.averaging.begin(self.batch(lr, mask))
        self.steps += 1
        self.ran += 1
        updates = [_drawn(place, 10 * self.ran, self.compute) * self.size for place in self.places]
        rates = StepRates(lr, decay, Decoupled())
        self.averaging.step(self.batch(lr, mask), _CountedUpdate(updates, rates, mask, calls=self.applied))

    def run(self, steps: int = _STEPS, decay: float = 0.0) -> AveragingBench:
        """Run several steps, and return this bench.

        decay: alpha, as in `step`.
        """
        for _ in range(steps):
            self.step(decay=decay)
        return self


def iterates_have_the_shape_of_their_parameter(case: Case[Averaging]) -> None:
    """Slots have the role `iterate`. Their shape is (), or ends with the axes of the parameter."""
    for low_precision in (False, True):
        for shape in PARAMETER_SHAPES:
            for name, slot in case.component.slots(shape, low_precision).items():
                _require_slot(name, slot, shape)
                require(slot.role == "iterate", f"slots(), role of '{name}'", "'iterate'", f"'{slot.role}'")


def the_update_is_applied_once_a_step(case: Case[Averaging]) -> None:
    """`step` receives a function `update`, which applies the direction, weight decay and constraints to tensors in
    place. `step` calls it exactly once.
    """
    for dtype in _DTYPES:
        bench = AveragingBench(case.component, dtype)
        for number in range(1, _STEPS + 1):
            bench.step()
            count = len(bench.applied)
            fine = count == number
            cause = in_parentheses("`update(batch.parameters)` trains as without averaging; call it once in step()")
            require(fine, f"calls of `update` in {counted(number, 'step')}", f"{number}", count, cause)


def evaluated_iterates_are_like_their_parameters(case: Case[Averaging]) -> None:
    """`evaluated` returns a finite tensor of the parameter's shape for each parameter, and changes nothing."""
    for dtype in _DTYPES:
        bench = AveragingBench(case.component, dtype)
        for _ in range(_STEPS):
            bench.step()
            before = _copies(bench.everything())
            found: Any = case.component.evaluated(bench.batch())
            _require_tensors(found, bench.parameters, "evaluated()", dtype=False)
            for place, tensor in enumerate(found):
                finite = bool(tensor.isfinite().all())
                require(finite, f"evaluated(), parameter {place}", "finite numbers", "nan or inf")
            if not all(map(torch.equal, before, bench.everything())):
                inputs = dict(zip(bench.names(), bench.everything(), strict=True))
                cause = write_cause(case.component, inputs, partial(case.component.evaluated, bench.batch()))
                raise broken("parameters and slots after evaluated()", "no change", "other numbers", cause)


def parameters_are_averaged_one_by_one(case: Case[Averaging]) -> None:
    """Parameters that are averaged together, at different steps, have the same iterates as if averaged one by one."""
    together = AveragingBench(case.component, apart=True).run(decay=_WEIGHT_DECAY)
    evaluated = case.component.evaluated(together.batch())
    for place in _PLACES:
        alone = AveragingBench(case.component, places=[place], apart=True).run(decay=_WEIGHT_DECAY)
        pairs = [(alone.parameters[0], together.parameters[place], "the trained iterate")]
        pairs += [(case.component.evaluated(alone.batch())[0], evaluated[place], "the evaluated iterate")]
        pairs += [(tensors[0], together.slots[name][place], f"slot '{name}'") for name, tensors in alone.slots.items()]
        for one, other, what in pairs:
            where = f"{what} of parameter {place}, averaged alone and together with two others"
            cause = in_parentheses("does step() use one number of `batch.steps` for all parameters?")
            require_close(one, other, 1e-12, where, partial(str, cause))


def masked_parameters_change_nothing(case: Case[Averaging]) -> None:
    """A parameter whose mask is False is unchanged bit for bit, and so are its iterates, although its update contains
    nan.
    """
    bench = AveragingBench(case.component).run(2)
    before = _copies(bench.everything())
    keep = [torch.tensor(place != 1) for place in _PLACES]
    bench.step(mask=keep)
    names = ["the parameter"] + [f"slot '{name}'" for name in bench.slots]
    for name, start in zip(names, range(0, len(before), len(PARAMETER_SHAPES)), strict=True):
        same = torch.equal(bench.everything()[start + 1], before[start + 1])
        require(same, f"{name} after step() where `batch.mask` is False", "no change", "other numbers")


def dtypes_are_kept(case: Case[Averaging]) -> None:
    """Parameters and iterates keep dtype and shape, with parameters in float32, float64 and bfloat16."""
    for dtype in _DTYPES:
        bench = AveragingBench(case.component, dtype)
        before = _kinds(bench.everything())
        after = _kinds(bench.run().everything())
        require(after == before, "(dtype, shape) of parameters and slots", f"{before}", after)


def slots_are_all_the_memory(case: Case[Averaging]) -> None:
    """Training continues exactly from a copy of parameters and slots."""
    one, two = AveragingBench(case.component).run(3), AveragingBench(case.component)
    for target, source in zip(two.everything(), one.everything(), strict=True):
        target.copy_(source)
    two.steps[:], two.ran = one.steps, one.ran
    one.run(2)
    two.run(2)
    same = all(map(torch.equal, one.everything(), two.everything()))
    cause = in_parentheses("does the averaging keep anything in memory outside its slots?")
    what = "iterates of a run that goes on from a copy of the slots"
    require(same, what, "the same bits", "other bits", cause)


def without_updates_nothing_moves(case: Case[Averaging]) -> None:
    """While all updates are 0, the trained and the evaluated iterate stay equal to the initial parameter. The tolerance
    is 1e-6, because the sums of an average are rounded.
    """
    bench = AveragingBench(case.component, size=0.0)
    start = _copies(bench.parameters)
    for number in range(1, _STEPS + 1):
        bench.step()
        found = case.component.evaluated(bench.batch())
        for place, before in enumerate(start):
            steps = "1 step" if number == 1 else f"{number} steps"
            where = f"of parameter {place} after {steps} with updates of 0, and the initial parameter"
            require_close(bench.parameters[place], before, 1e-6, f"the trained iterate {where}")
            require_close(found[place].to(before.dtype), before, 1e-6, f"the evaluated iterate {where}", lambda: _BEGIN)


_BEGIN = " (start each iterate at its parameter, in begin(), or divide the mean by the sum of its weights)"


def steps_of_averages_stay_on_the_device(case: Case[Averaging]) -> None:
    """The host does not wait for the device in a step, also if the learning rate is a tensor on the device."""
    with accelerator("cuda") as run, run.device:
        lr, bench = torch.tensor(_LR, device=run.device), AveragingBench(case.component, torch.float32)
        for number in range(1, _STEPS + 1):
            bench.steps += 1
            updates = [torch.ones_like(parameter) for parameter in bench.parameters]
            if number == 1:
                case.component.begin(bench.batch(lr))
            update = ParameterUpdate(updates, StepRates(lr, 0.0, Decoupled()))
            with accelerator("cuda") as counts:
                case.component.step(bench.batch(lr), update)
            if number > WARM_UP_STEPS:
                remedy = (
                    "`batch.lr` may be a tensor on the device, so use neither float() nor `if` with it; `batch.steps` "
                    "is a NumPy array"
                )
                require_no_waits(counts, f"step {number}", remedy)


AVERAGING_LAWS: tuple[Law[Case[Averaging]], ...] = (
    Law(the_declaration_survives),
    Law(iterates_have_the_shape_of_their_parameter, decisive=True),
    Law(the_update_is_applied_once_a_step, decisive=True),
    Law(evaluated_iterates_are_like_their_parameters, decisive=True),
    Law(slots_are_all_the_memory, decisive=True),
    Law(parameters_are_averaged_one_by_one),
    Law(masked_parameters_change_nothing),
    Law(dtypes_are_kept),
    Law(without_updates_nothing_moves),
    Law(steps_of_averages_stay_on_the_device, without_accelerator),
)


# Constraints.


@dataclass(frozen=True)
class ConstraintCase(Case[Constraint]):
    """A constraint under test."""

    @property
    def who(self) -> str:
        return f"constraints.{self.component.label}"


class ConstraintBench(_Bench):
    """A constraint with n parameters and their slots, without an optimizer."""

    def __init__(
        self,
        constraint: Constraint,
        dtype: torch.dtype = torch.float64,
        places: Sequence[int] = _PLACES,
        shard: Callable[[Tensor], Tensor] = lambda x: x,
        size: float = 1.0,
    ) -> None:
        """Allocate the slots.

        places: index of each parameter's shape in `PARAMETER_SHAPES`.
        shard: function that returns a rank's shard of a parameter.
        size: factor by which parameters and updates are multiplied.
        """
        self.constraint, self.places, self.shard, self.size = constraint, places, shard, size
        self.compute, self.steps = compute_dtype(dtype), 0
        parameters = [shard(_drawn(place, 1, dtype) * size) for place in places]
        slots = [constraint.slots(tuple(p.shape)) if constraint.keeps(dtype) else {} for p in parameters]
        super().__init__(parameters, slots, self.compute)

    def context(self, lr: float | Tensor = _LR) -> ConstraintContext:
        """Return the inputs of the constraint beside parameters and updates, with a sample of each signal that it
        requires.

        Such a signal has a value for each output of a layer. The values differ between the rows of a parameter.
        """
        shapes = [PARAMETER_SHAPES[place] for place in self.places]
        rows = [torch.linspace(50, 150, d).reshape(-1, *[1] * len(rest)).expand(d, *rest) for d, *rest in shapes]
        signals = {name: [self.shard(x) for x in rows] for name in self.constraint.requires_some}
        return ConstraintContext(lr=lr, signals=signals)

    def step(
        self,
        lr: float | Tensor = _LR,
        mask: Sequence[Tensor] | None = None,
        shard_sums: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        """Run one step: write updates into the parameters under the constraint.

        lr: learning rate.
        mask: for each parameter, a 0-d bool tensor, True if the parameter is updated. None: all are.
        shard_sums: function that adds one number for each parameter, `[n]`, over all shards of the parameter. None: the
            parameters are not sharded.
        """
        context = replace(self.context(lr), shard_sums=shard_sums, mask=mask)
        if self.steps == 0:
            self.constraint.begin(self.slots, [p.to(self.compute) for p in self.parameters], context)
        self.steps += 1
        updates = [self.update(place) for place in range(len(self.parameters))]
        rates = StepRates(lr, _WEIGHT_DECAY, Decoupled())
        ParameterUpdate(updates, rates, mask, [(self.constraint, self.slots)], context)(self.parameters)

    def update(self, place: int) -> Tensor:
        """Return the update of the parameter with the index `place` at the present step."""
        return self.shard(_drawn(self.places[place], 10 * self.steps + 10, self.compute) * self.size)

    def run(self, steps: int = _STEPS, shard_sums: Callable[[Tensor], Tensor] | None = None) -> ConstraintBench:
        """Run several steps, and return this bench.

        shard_sums: as in `step`.
        """
        for _ in range(steps):
            self.step(shard_sums=shard_sums)
        return self


def slots_have_the_shape_of_their_parameter(case: ConstraintCase) -> None:
    """The shape of a slot is (), or ends with the axes of the parameter."""
    for shape in PARAMETER_SHAPES:
        for name, slot in case.component.slots(shape).items():
            _require_slot(name, slot, shape)


def results_are_like_what_was_given(case: ConstraintCase) -> None:
    """`adjust` and `retract` return a tensor of the right shape and dtype for each parameter. They, and `begin`, do not
    write to the tensors that they receive.
    """
    for dtype in _DTYPES:
        bench = ConstraintBench(case.component, dtype)
        w = [p.to(bench.compute) for p in bench.parameters]
        u = [bench.update(place) for place in _PLACES]
        after = [x - _LR * y for x, y in zip(w, u, strict=True)]
        context = bench.context()
        hooks: dict[str, tuple[Callable[[], object], dict[str, list[Tensor]]]] = {
            "begin": (
                partial(case.component.begin, bench.slots, w, context), {"parameters": w},
            ),
            "adjust": (
                partial(case.component.adjust, bench.slots, w, u, context), {"parameters": w, "updates": u},
            ),
            "retract": (
                partial(case.component.retract, bench.slots, w, u, after, context),
                {"parameters": w, "updates": u, "moved": after},
            ),
        }  # fmt: skip
        for name, (hook, given) in hooks.items():
            before = {key: _copies(tensors) for key, tensors in given.items()}
            found = hook()
            for key, tensors in given.items():
                if not all(map(torch.equal, tensors, before[key])):
                    cause = write_cause(case.component, {f"`{key}[{i}]`": x for i, x in enumerate(tensors)}, hook)
                    raise broken(f"tensors of `{key}` after {name}()", "no change", "other numbers", cause)
            if name != "begin":
                _require_tensors(found, u, f"{name}()")


def parameters_are_constrained_one_by_one(case: ConstraintCase) -> None:
    """Parameters that are constrained together have the same values as if each were constrained alone."""
    together = ConstraintBench(case.component).run()
    for place in _PLACES:
        alone = ConstraintBench(case.component, places=[place]).run()
        where = f"parameter {place}, constrained alone and together with two others"
        cause = in_parentheses("does a norm or sum run over all parameters?")
        require_close(alone.parameters[0], together.parameters[place], 1e-12, where, partial(str, cause))


def masked_parameters_and_slots_change_nothing(case: ConstraintCase) -> None:
    """A parameter whose mask is False is unchanged bit for bit, and so are its slots."""
    for dtype in _DTYPES:
        bench = ConstraintBench(case.component, dtype).run(2)
        before = _copies(bench.everything())
        bench.step(mask=[torch.tensor(place != 1) for place in _PLACES])
        names = ["the parameter"] + [f"slot '{name}'" for name in bench.slots]
        for name, start in zip(names, range(0, len(before), len(PARAMETER_SHAPES)), strict=True):
            same = torch.equal(bench.everything()[start + 1], before[start + 1])
            require(same, f"{name} where `context.mask` is False", "no change", "other numbers")


def dtypes_and_shapes_are_kept(case: ConstraintCase) -> None:
    """Parameters and slots keep dtype and shape, with parameters in float32, float64 and bfloat16."""
    for dtype in _DTYPES:
        bench = ConstraintBench(case.component, dtype)
        before = _kinds(bench.everything())
        after = _kinds(bench.run().everything())
        require(after == before, "(dtype, shape) of parameters and slots", f"{before}", after)


def parameters_stay_finite(case: ConstraintCase) -> None:
    """In float32, parameters and slots stay finite for zero, tiny and huge parameters with updates of the same size as
    the parameters.
    """
    for name, size in (("zero", 0.0), ("tiny", 1e-30), ("huge", 1e12)):
        bench = ConstraintBench(case.component, torch.float32, size=size).run(3)
        for what, tensor in zip(bench.names(), bench.everything(), strict=True):
            finite = bool(tensor.isfinite().all())
            hint = in_parentheses("`numerics.safe_ratio(a, b)` is 0 where b is 0")
            require(finite, f"{what} for {name} parameters and updates", "finite numbers", "nan or inf", hint)


def copies_of_slots_continue_exactly(case: ConstraintCase) -> None:
    """Training continues exactly from a copy of parameters and slots."""
    one, two = ConstraintBench(case.component).run(3), ConstraintBench(case.component)
    for target, source in zip(two.everything(), one.everything(), strict=True):
        target.copy_(source)
    two.steps = one.steps
    one.run(2)
    two.run(2)
    same = all(map(torch.equal, one.everything(), two.everything()))
    cause = in_parentheses("does the constraint keep anything in memory outside its slots?")
    what = "parameters of a run that goes on from a copy of the slots"
    require(same, what, "the same bits", "other bits", cause)


def shards_are_constrained_as_the_whole(case: ConstraintCase) -> None:
    """A shardable constraint that is applied to two shards of each parameter, with sums over both shards, gives the
    same parameters as on whole parameters.
    """
    whole = ConstraintBench(case.component).run()
    for by_rows in (True, False):
        if not case.component.shardable(by_rows):
            continue
        cuts = [partial(_half, rows=by_rows, second=second) for second in (False, True)]
        benches = [ConstraintBench(case.component, shard=cut) for cut in cuts]
        ids = [np.arange(len(_PLACES)) for _ in benches]
        run_stacks([partial(bench.run, _STEPS) for bench in benches], ids)
        for cut, bench in zip(cuts, benches, strict=True):
            for place, tensor in enumerate(bench.parameters):
                where = f"a shard of parameter {place}, constrained as a shard and as a part of the whole"
                require_close(tensor, cut(whole.parameters[place]), 1e-10, where, lambda: _OF_SHARDS)


_OF_SHARDS = " (compute sums over a parameter by `context.norms` or `context.dots`; else shardable() must return False)"


def _half(x: Tensor, rows: bool, second: bool) -> Tensor:
    """Return the first or the second half of a parameter, cut along its first axis (`rows`) or else along its last."""
    axis = 0 if rows else x.ndim - 1
    cut = x.shape[axis] // 2
    return x.narrow(axis, cut, x.shape[axis] - cut).contiguous() if second else x.narrow(axis, 0, cut).contiguous()


def writes_stay_on_the_device(case: ConstraintCase) -> None:
    """The host does not wait for the device while parameters are written, also if the learning rate is a tensor on the
    device.
    """
    with accelerator("cuda") as run, run.device:
        lr, bench = torch.tensor(_LR, device=run.device), ConstraintBench(case.component, torch.float32)
        for number in range(1, _STEPS + 1):
            w, u = bench.parameters, [torch.ones_like(parameter) for parameter in bench.parameters]
            context = bench.context(lr)
            if number == 1:
                case.component.begin(bench.slots, w, context)
            with accelerator("cuda") as counts:
                adjusted = case.component.adjust(bench.slots, w, u, context)
                case.component.retract(bench.slots, w, adjusted, w, context)
            if number > WARM_UP_STEPS:
                remedy = "`context.lr` may be a tensor on the device, so use neither float() nor `if` with it"
                require_no_waits(counts, f"step {number}", remedy)


CONSTRAINT_LAWS: tuple[Law[ConstraintCase], ...] = (
    Law(the_declaration_survives),
    Law(slots_have_the_shape_of_their_parameter, decisive=True),
    Law(results_are_like_what_was_given, decisive=True),
    Law(copies_of_slots_continue_exactly, decisive=True),
    Law(parameters_are_constrained_one_by_one),
    Law(masked_parameters_and_slots_change_nothing),
    Law(dtypes_and_shapes_are_kept),
    Law(parameters_stay_finite),
    Law(
        shards_are_constrained_as_the_whole,
        lambda case: None if case.component.shardable(True) else "shardable() returns False",
    ),
    Law(writes_stay_on_the_device, without_accelerator),
)
