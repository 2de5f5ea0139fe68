"""Adam's chain by torch's fused kernels, which read and write each entry once.

`torch._fused_adam_` and `torch._fused_adamw_` compute a chain of two stages that declare the first and the second
moment of Adam (`Traits.moment`), if the update is written into the parameter without constraints or averaging. All
parameters with the same numbers (rates, step, betas, eps) are updated by one call, whichever stacks hold their state.

On a CPU, the last entries of a tensor that do not fill a vector register are rounded differently from the entries
before them. A trajectory must not depend on how a parameter is sharded over ranks. Tensors are therefore cut after the
last multiple of 64 entries, and the ends of all tensors are updated in one padded buffer.

A fused kernel has no masks. In a step with a mask of usable gradients (`failure.detect: device`), parameters and
moments are copied before the kernel, and copied back where the mask is False.

A captured step (`capture.py`) reads the learning rate and the step on the device; the decay is a constant of its graph.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from eigengraft.blocking.stacks import BYTES_ELSEWHERE, BYTES_ON_CPU
from eigengraft.numerics import (
    CHUNK_ENTRIES,
    JOINED_IN_KERNEL,
    VECTOR,
    over_stacks,
    per_block,
    stacked_copies,
)
from eigengraft.preconditioners import FirstMoment, SecondMoment
from eigengraft.slots import StateKey, dotted

from ..recipe.recipe import Recipe, Route
from ..stacks.stack import ActiveBlocks, StackState
from ..write.write import put, where_masked
from .gradients import gather_gradients
from .inputs import StepInputs


@dataclass(frozen=True, eq=False)
class FusedAdam:
    """Arguments of torch's fused Adam kernel for one stack (blocks with one shape) that are the same in all steps.

    names: names of the moments m and v among the tensors of the stack.
    constants: numbers that blocks of one kernel call share: beta1, beta2, eps, and the dtype of the moments.
    small: True if the blocks are so small that they are copied into one tensor and updated by one call.
    factors: `[N]`, factor by which the learning rate of each block is multiplied; None: 1 for all.
    """

    names: tuple[str, str]
    constants: tuple[float, float, float, torch.dtype]
    small: bool
    factors: tuple[float, ...] | None


def declared_moments(rule: Recipe | Route, block: tuple[int, ...]) -> tuple[FirstMoment, SecondMoment] | None:
    """Return the moments that the stages of an update declare, or None if the stages do not form Adam's chain.

    block: shape of the block that is updated.
    """
    if len(rule.update) != 2 or rule.after_decay:
        return None
    first, second = (stage.cached_traits(block).moment for stage in rule.update)
    return (first, second) if isinstance(first, FirstMoment) and isinstance(second, SecondMoment) else None


def fused_adam(stack_state: StackState, first: FirstMoment, second: SecondMoment) -> FusedAdam:
    """Return the arguments of torch's fused Adam kernel that stay the same in all steps: betas, eps, names of slots.

    The caller has checked that the kernel can compute the chain of this stack (`not_fused`).

    first, second: the moments that the two stages of the chain declare in `Traits.moment`.
    """
    stack, names = stack_state.stack, moment_slots(stack_state.rule, stack_state.path, first, second)
    small = math.prod(stack.block) < JOINED_IN_KERNEL and len(stack.param_ids) > 1
    constants = first.beta, second.beta, second.eps, stack_state.tensors[names[0]].dtype
    return FusedAdam(names, constants, small and stack.device.type == "cpu", stack_state.host_factors)


def moment_slots(rule: Recipe | Route, path: str, *moments: FirstMoment | SecondMoment) -> tuple[str, str]:
    """Return "<stage path>/<slot>" of the two moments of Adam's chain.

    path: path of the update in the recipe, "" or "routes.<name>".
    """
    pairs = zip(rule.update, moments, strict=True)
    first, second = (StateKey.join(dotted(path, "update", stage.label), moment.slot) for stage, moment in pairs)
    return first, second


class _Numbers(NamedTuple):
    """Numbers that are equal for all parameters that one call of a fused kernel updates.

    lr: learning rate; if a tensor holds the rate, the id of that tensor and the factor by which it is multiplied.
    decay: weight decay.
    in_gradient: True if the decay is added to the gradient.
    after: True if the parameters decay after their update.
    step: step count, including the present step.
    beta1, beta2, eps: constants of Adam.
    dtype: dtype of the moments.
    """

    lr: float | tuple[int, float]
    decay: float
    in_gradient: bool
    after: bool
    step: int
    beta1: float
    beta2: float
    eps: float
    dtype: torch.dtype


@dataclass(frozen=True, eq=False)
class _Copies:
    """Copies of the parameters and moments of a stack (blocks with one shape), made before a step with a mask.

    The mask is True for parameters with a usable gradient. A fused kernel has no masks, and changes the other
    parameters too. After the kernel, `restore` writes their copies back. n of the N blocks of the stack take part in
    the step, the active blocks. Parameters are copied for active blocks, moments for all blocks.

    usable: `[n]`, the mask of the active blocks.
    own_entries: the entries of the parameters of the active blocks that this rank updates.
    parameters: copies of `own_entries`.
    kept: `[N, 1, ...]`, the mask of all blocks. Where it is True, the moments keep the values that the kernel writes.
    moments: for each of the two moments, a pair of the moment `[N, *block]` and its copy.
    """

    usable: Tensor
    own_entries: Sequence[Tensor]
    parameters: Sequence[Tensor]
    kept: Tensor
    moments: Sequence[tuple[Tensor, Tensor]]

    @classmethod
    def of(cls, adam: FusedAdam, blocks: ActiveBlocks, mask: Tensor, own_entries: Sequence[Tensor]) -> _Copies:
        """Copy the parameters of the active blocks of a stack, and the moments of all its blocks.

        mask: `[P]`, True for parameters whose gradient is usable.
        own_entries: the entries of the parameters of the active blocks that this rank updates.
        """
        usable = whole = mask[blocks.param_index]
        if blocks.places is not None:
            whole = mask[blocks.stack_state.all_blocks.param_index]
        moments = [(x, x.clone()) for x in (blocks.stack_state.tensors[name] for name in adam.names)]
        return cls(usable, own_entries, stacked_copies(own_entries), per_block(whole, moments[0][0]), moments)

    @property
    def nbytes(self) -> int:
        """Bytes of the copies of parameters and moments."""
        return sum(x.nbytes for x in (*self.parameters, *(copy for _, copy in self.moments)))

    def restore(self) -> None:
        """Copy parameters and moments back where gradients are not usable."""
        put(self.own_entries, over_stacks(where_masked, self.own_entries, self.parameters, self.usable))
        for x, before in self.moments:
            torch.where(self.kept, x, before, out=x)


_AdamTensors = tuple[Tensor, Tensor, Tensor, Tensor]
"""Tuple of four tensors of one shape: a parameter, its gradient, and its moments m and v."""


@dataclass
class _Call:
    """Tensors that one call of a fused Adam kernel updates, with the numbers that they share.

    numbers: numbers that all these tensors share, such as step, betas and weight decay.
    lr: learning rate.
    shrink: factor 1 - lr alpha by which the parameters are multiplied after their update, in a separate operation,
        because the kernel decays only before the update. None: no decay follows the update.
    step: the step as a 0-d float32 tensor on the device.
    found_inf: 0-d on the device, as in `StepInputs`.
    entries: tensors of one dtype and equal strides, which the kernel updates in place.
    copied: tensors whose parameter or gradient differs from the state in dtype or strides; the kernel updates copies.
    back: pairs of a parameter and its copy; after the kernel the copy is written back.
    nbytes: size of the copies in bytes. The call runs early when this size exceeds a limit.
    """

    numbers: _Numbers
    lr: float | Tensor
    shrink: float | Tensor | None
    device: torch.device
    step: Tensor
    found_inf: Tensor | None
    entries: list[_AdamTensors] = field(default_factory=list)
    copied: list[_AdamTensors] = field(default_factory=list)
    back: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    nbytes: int = 0

    def add(self, parameter: Tensor, gradient: Tensor, m: Tensor, v: Tensor) -> None:
        """Add one parameter with its gradient and its moments m and v."""
        if parameter.shape != m.shape:
            m, v = m.view(parameter.shape), v.view(parameter.shape)
        same_strides = parameter.stride() == m.stride() == gradient.stride()
        if same_strides and parameter.dtype is m.dtype and gradient.dtype is m.dtype:
            self.entries.append((parameter, gradient, m, v))
            return
        pieces = [(parameter, gradient, m, v)]
        if self.device.type == "cpu" and parameter.is_contiguous() and gradient.is_contiguous():
            pieces = list(zip(*(torch.split(x.view(-1), CHUNK_ENTRIES) for x in pieces[0]), strict=True))
        for piece in pieces:
            self.copied.append(piece)
            self._add_bytes(piece[2])

    def add_stack(self, parameters: Sequence[Tensor], joined: _AdamTensors) -> None:
        """Add all parameters of a stack of small blocks to the call, in joined copies `[N, *block]`.

        joined: copies of all parameters and of all gradients of the stack, and its moments m and v, `[N, *block]` each.
        """
        rows, shape = joined[0].unbind(), joined[0].shape[1:]
        pairs = zip(parameters, rows, strict=True)
        self.back += [(x, row if x.shape == shape else row.view(x.shape)) for x, row in pairs]
        self.entries.append(joined)
        self._add_bytes(joined[2])

    def _add_bytes(self, copied: Tensor) -> None:
        self.nbytes += 2 * copied.numel() * copied.element_size()
        if self.nbytes > _copy_limit(self.device):
            self.run()

    def run(self) -> None:
        """Update the tensors that were added, and remove them from the call."""
        if self.copied:
            self._copy()
        ends = self._cut_ends() if self.device.type == "cpu" else []
        padded = _padded(ends)
        if self.entries or padded:
            self._launch(*(list(column) for column in zip(*self.entries, *padded, strict=True)))
        if ends:
            sizes, ((p, _, m, v),) = [p.numel() for p, *_ in ends], padded
            parameters, _, first, second = zip(*ends, strict=True)
            for targets, buffer in ((parameters, p), (first, m), (second, v)):
                torch._foreach_copy_(list(targets), list(torch.split(buffer[: sum(sizes)], sizes)))
        if self.back:
            targets, sources = zip(*self.back, strict=True)
            torch._foreach_copy_(list(targets), list(sources))
        self.entries, self.copied, self.back, self.nbytes = [], [], [], 0

    def _copy(self) -> None:
        """Make contiguous copies of parameters and gradients, in the dtype of their state."""
        parameters, gradients, first, second = zip(*self.copied, strict=True)
        ours, given = ([torch.empty_like(m) for m in first] for _ in range(2))
        torch._foreach_copy_(ours, list(parameters))
        torch._foreach_copy_(given, list(gradients))
        self.entries += zip(ours, given, first, second, strict=True)
        self.back += zip(parameters, ours, strict=True)

    def _cut_ends(self) -> list[_AdamTensors]:
        """Cut each tensor after its last multiple of `VECTOR` entries, and return the ends that were cut off."""
        kept, ends = list[_AdamTensors](), list[_AdamTensors]()
        for entries in self.entries:
            size = entries[0].numel()
            if not (rest := size % VECTOR):
                kept.append(entries)
                continue
            p, g, m, v = (x.view(-1) for x in entries)
            if size > rest:
                kept.append((p[:-rest], g[:-rest], m[:-rest], v[:-rest]))
            ends.append((p[-rest:], g[-rest:], m[-rest:], v[-rest:]))
        self.entries = kept
        return ends

    def _launch(self, parameters: list[Tensor], gradients: list[Tensor], m: list[Tensor], v: list[Tensor]) -> None:
        numbers, lr = self.numbers, self.lr
        if isinstance(lr, Tensor) and not lr.is_cpu:
            lr = lr.to(torch.float32)
        kernel = torch._fused_adam_ if numbers.in_gradient else torch._fused_adamw_
        kernel(
            parameters,
            gradients,
            m,
            v,
            [],
            [self.step] * len(parameters),
            lr=lr,
            beta1=numbers.beta1,
            beta2=numbers.beta2,
            weight_decay=0.0 if numbers.after else numbers.decay,
            eps=numbers.eps,
            amsgrad=False,
            maximize=False,
            found_inf=self.found_inf,
        )
        if self.shrink is not None:
            torch._foreach_mul_(parameters, self.shrink)


def _copy_limit(device: torch.device) -> int:
    """Return the limit of the bytes of copies that exist at a time.

    The limit holds for the copies of parameters and gradients of one call (`_Call`), and for the copies that are made
    because of a mask (`_Copies`). Above the limit the kernels run, and the copies are freed, before more parameters are
    copied.
    """
    return BYTES_ON_CPU if device.type == "cpu" else BYTES_ELSEWHERE


def _padded(ends: Sequence[_AdamTensors]) -> list[_AdamTensors]:
    """Join the ends of many tensors into one parameter, one gradient, one m and one v, each padded with zeros.

    Return the four joined tensors as the only item of a list, or [] if there are no ends. The number of entries of each
    joined tensor is a multiple of `VECTOR`.

    ends: the last entries of tensors, which `_cut_ends` has cut off.
    """
    if not ends:
        return []
    missing = -sum(p.numel() for p, *_ in ends) % VECTOR
    p, g, m, v = (torch.cat([*column, column[0].new_zeros(missing)]) for column in zip(*ends, strict=True))
    return [(p, g, m, v)]


class FusedCalls:
    """The calls of fused kernels in one step of a parameter set.

    Stacks that fused kernels update are added (`add`), then updated at once (`run`), in the memory of their parameters.

    inputs: inputs of the step.
    """

    def __init__(self, inputs: StepInputs) -> None:
        self.inputs = inputs
        self._calls: dict[_Numbers, _Call] = {}
        self._call_of: dict[tuple[object, ...], _Call | None] = {}
        self._copies: list[_Copies] = []
        counts, group = inputs.counts.tolist(), inputs.rates.same
        alike = group is not None and counts.count(counts[0]) == len(counts)
        self._alike = (group, counts[0], 1.0) if group is not None and alike else None

    def add(self, adam: FusedAdam, blocks: ActiveBlocks) -> bool:
        """Add the active blocks of a stack to the calls of fused kernels.

        If no fused kernel can compute this stack's step, add nothing and return False.
        """
        inputs, stack = self.inputs, blocks.stack
        chosen = [(rows, self._call(adam, blocks, rows[0], kind)) for kind, rows in self._kinds(adam, blocks)]
        calls = [(rows, call) for rows, call in chosen if call is not None]
        if len(calls) < len(chosen):
            return False
        own_entries = [inputs.own_entries[position] for position in stack.positions]
        if inputs.mask is not None:
            made = _Copies.of(adam, blocks, inputs.mask, own_entries)
            if sum(copies.nbytes for copies in (made, *self._copies)) > _copy_limit(stack.device):
                self.run()  # of the stacks before
            self._copies.append(made)
        if adam.small and blocks.places is None and len(calls) == 1:
            # made contiguous, because torch joins tensors in the format channels_last to a tensor in this format
            gathered = gather_gradients(blocks, inputs.gradients, inputs.survey)
            ours, given = stack.gather(inputs.own_entries).contiguous(), gathered.contiguous()
            first, second = (blocks.stack_state.tensors[name] for name in adam.names)
            calls[0][1].add_stack(own_entries, (ours, given, first, second))
            return True
        places, (m, v) = blocks.row_numbers, map(blocks.stack_state.parameter_rows, adam.names)
        for rows, call in calls:
            for row in rows:
                call.add(own_entries[row], inputs.gradients[stack.positions[row]], m[places[row]], v[places[row]])
        return True

    def run(self) -> None:
        """Update all parameters that have been added."""
        for call in self._calls.values():
            call.run()
        while self._copies:
            self._copies.pop().restore()

    def _kinds(self, adam: FusedAdam, blocks: ActiveBlocks) -> Iterable[tuple[_Kind, Sequence[int]]]:
        """Divide the active blocks by the numbers that blocks of one kernel call must share (`_Kind`).

        Return pairs (kind, indices of all active blocks of this kind).
        """
        ids, factors = blocks.stack.param_ids, adam.factors
        if factors is None and self._alike is not None:
            return [(self._alike, range(len(ids)))]
        rates, counts = self.inputs.rates.alike[ids].tolist(), self.inputs.counts[ids].tolist()
        of_blocks = [1.0] * len(ids) if factors is None else [factors[place] for place in blocks.row_numbers]
        kinds: dict[_Kind, list[int]] = {}
        for row, kind in enumerate(zip(rates, counts, of_blocks, strict=True)):
            kinds.setdefault(kind, []).append(row)
        return kinds.items()

    def _call(self, adam: FusedAdam, blocks: ActiveBlocks, row: int, kind: _Kind) -> _Call | None:
        """Return the call of a fused kernel to which blocks with equal numbers (rates, step, factor) are added.

        Blocks of several shapes share a call if all their numbers are equal. A call is made at its first use. Return
        None if no kernel can compute the weight decay.

        row: index, among the active blocks, of one of the blocks that are added.
        kind: numbers that the blocks share. Among them is a factor of the learning rate, which must not change the
            weight decay. Because the kernel multiplies the decay by the learning rate, it receives the decay divided by
            the factor.
        """
        path, (group, step, factor) = blocks.stack_state.path, kind
        key = (path, group, step, factor, adam.constants)
        if key not in self._call_of:
            rates, call = self.inputs.rates.step_rates(path, blocks.stack.positions[row]), None
            if not isinstance(rates.alpha, Tensor):
                lr, in_gradient, after = rates.lr, rates.decay.in_gradient, rates.decay.after
                decay = float(rates.gradient_rate if in_gradient else rates.alpha / factor)
                rate = (id(lr), factor) if isinstance(lr, Tensor) else lr * factor
                numbers = _Numbers(rate, decay, in_gradient, after, step, *adam.constants)
                if numbers not in self._calls:
                    shrink = rates.shrink if after and decay else None
                    count = self._step_tensor(blocks.stack_state, step)
                    scaled, found_inf = lr if factor == 1 else lr * factor, self.inputs.found_inf
                    self._calls[numbers] = _Call(numbers, scaled, shrink, blocks.stack.device, count, found_inf)
                call = self._calls[numbers]
            self._call_of[key] = call
        return self._call_of[key]

    def _step_tensor(self, stack_state: StackState, step: int) -> Tensor:
        """Return the step count of the blocks of a stack as a 0-d float32 tensor on their device."""
        numbers = self.inputs.numbers
        if numbers is not None:
            return numbers.counts[stack_state.number]
        return torch.full((), float(step), dtype=torch.float32, device=stack_state.stack.device)


_Kind = tuple[int, int, float]
"""Numbers that blocks of one kind share: the group of parameters with equal rates (`Rates.alike`), the step, and the
factor of the learning rate."""
