"""Captured steps: the operations of stacks on a device are recorded as graphs. The host replays each by one launch.

Stacks that have blocks of the same parameter are in the same set. All sets without refreshes share one graph. Every
other set has a graph of its own, and a step in which a stack of the set has a refresh runs the set without the graph.
A graph reads the numbers of a step (rates, step counts) from one tensor, which one copy fills before each run.

A graph is valid for steps with equal addresses, layouts and constants (`_Key`):

1. The first such step runs without a graph, and fills caches.
2. The operations of the second and the third step are recorded and compared. If they differ, a number of the step
   would be a constant of the graph, and no graph is made.
3. The third step runs twice from the same state, without a graph and by a replay. If the results differ in any bit,
   the graph is dropped. This check needs memory for a copy of the state and the parameters.
4. Later steps are replayed. If addresses, layouts or constants have changed, a gradient is missing or a refresh is due,
   the step runs without the graph, and the reason is counted.

A warning gives the reason if a graph is dropped or cannot be made, and if `PATIENCE` steps ran without a replay.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from eigengraft.distributed.checks import as_integers
from eigengraft.errors import warn_user
from eigengraft.numerics import upload

from ..recipe.recipe import Recipe
from ..stacks.stack import StackState, connected
from ..write.write import Rates, StepRates, WriteNumbers
from .capturers import CAPTURERS, Body
from .execution import Execution, Fused
from .inputs import GraphNumbers, StepInputs
from .reasons import not_captured
from .stack_step import CHECKED_UPDATES
from .traced import Program

Signature = list[tuple[str, ...]]
"""The operations of a run, in order. Each is a tuple of texts: the name of the operation, and its arguments without the
lists that they are in. The text of a tensor is its shape, dtype and device type."""


PATIENCE = 30
"""Number of steps without a replay after which a warning gives the most frequent reason.

The first replay is usually the seventh step, after three first updates and three steps that make the graph. It is about
the twelfth if every second step has a refresh."""

RunStacks = Callable[[Sequence[Sequence[StackState]], StepInputs], None]
"""Function that runs one step of stacks.

Arguments: the stacks, in lists (stacks whose stages sum over the same parameter are in one list); the inputs of the
step.
"""

NumberKey = tuple[str | int, int, str]
"""Key of a number that a graph reads from a tensor:

- (path of an update rule, index of a param group, field of `WriteNumbers`): a rate.
- (index of a stack, 0, ""): step count of the blocks.
- (index of a stack, index of a program of this stack, name of an input): a number of a traced program.
"""


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records operations, and holds references to all inputs that are no results of recorded operations.

    A graph reads the inputs at their addresses in every replay, so their memory must not be freed.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.signature: Signature = []
        self.kept: dict[int, Tensor] = {}
        self._made: dict[int, Tensor] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        self.signature.append((str(func), *map(self._described, tree_leaves((args, given)))))
        result = func(*args, **given)
        for made in result if isinstance(result, (list, tuple)) else [result]:
            if isinstance(made, Tensor) and id(made) not in self.kept:
                self._made[id(made)] = made
        return result

    def _described(self, x: Any) -> str:
        if not isinstance(x, Tensor):
            return repr(x)
        if id(x) not in self._made:
            self.kept[id(x)] = x
        return f"a tensor {list(x.shape)} in {x.dtype} on {x.device.type}"


def _recorded(run: Callable[[], None], gradients: Collection[int]) -> _Recorder:
    """Call `run`, record its operations, and return the recorder.

    gradients: addresses of the gradients. The recorder does not hold these tensors, so that `zero_grad` can free them.
    """
    recorder = _Recorder()
    with recorder:
        run()
    recorder._made.clear()
    recorder.kept = {key: x for key, x in recorder.kept.items() if x.data_ptr() not in gradients}
    return recorder


def difference(one: Signature, other: Signature) -> str | None:
    """Return a description of the first difference between the operations of two steps; None if there is none.

    Values of tensors are not compared.
    """
    if len(one) != len(other):
        return f"{len(one)} operations in one step and {len(other)} in the next"
    for a, b in zip(one, other, strict=True):
        if a[0] != b[0]:
            return f"{a[0]} in one step and {b[0]} in the next"
        for x, y in zip_longest(a, b, fillvalue="nothing"):
            if x != y:
                return f"{a[0]} takes {x} in one step and {y} in the next"
    return None


_Place = tuple[int, tuple[int, ...], torch.dtype]
"""Address, strides and dtype of a tensor."""


def _place(x: Tensor) -> _Place:
    return x.data_ptr(), x.stride(), x.dtype


class _Key(NamedTuple):
    """The kind of a step: the addresses, layouts and constants that its graph keeps.

    gradients, parameters: address and layout of each tensor. The kernels of a graph read a tensor at the strides and in
        the dtype of the capture, so a gradient with other strides at the same address needs another graph.
    state: addresses of the state tensors, whose layouts never change.
    groups: for each parameter, the index of the first param group that has the same rates. The field has the bytes of
        the array of these indices.
    zeros: for each rate of weight decay, True if the rate is 0, so that the graph computes no decay.
    decays: weight decays of the stacks (tensors of blocks with one shape) that a fused kernel updates. They are
        constants of the graph.
    steps: for each stack that a fused kernel updates, the index of the first such stack with the same step count. One
        call of a kernel updates the stacks with one step count.
    mask: True if the step has a mask: a boolean on the device for each parameter, True if its gradient is usable.
    """

    gradients: tuple[_Place, ...]
    parameters: tuple[_Place, ...]
    state: tuple[int, ...]
    groups: bytes
    zeros: tuple[bool, ...]
    decays: tuple[float, ...]
    steps: tuple[int, ...]
    mask: bool

    def changed(self, before: _Key) -> str:
        """Return a description of the first field in which this key differs from `before`, the key of a graph."""
        hint = " (`zero_grad(set_to_none=False)` keeps them)"
        texts = {"gradients": f"addresses or layouts of gradients{hint}"}
        texts |= {"parameters": "addresses or layouts of parameters", "state": "addresses of state"}
        texts |= {"groups": "param groups with equal rates"}
        texts |= {"zeros": "rates of weight decay that are 0", "mask": "whether gradients are masked"}
        texts |= {"decays": "weight decay, which is a constant of a fused kernel,"}
        texts |= {"steps": "which stacks have the same step count"}
        return next(f"{text} changed" for name, text in texts.items() if getattr(self, name) != getattr(before, name))


class CapturedStacks:
    """Stacks whose step is captured as one CUDA graph, and this graph.

    groups: the stacks, in lists. Stacks whose stages sum over the same parameter are in one list.
    executions: for each stack of the parameter set, by its index, the way in which its steps run.
    fused: indices of the stacks that a fused kernel updates.
    reason: why the stacks are never captured; None if no reason is known.
    without: by reason, number of steps without a graph since the last replay. Steps that make a graph do not count.
    """

    def __init__(
        self,
        groups: Sequence[Sequence[StackState]],
        recipe: Recipe,
        executions: Sequence[Execution],
        run: RunStacks,
    ) -> None:
        self.groups, self._run, self.executions = list(groups), run, executions
        self.stack_states = [stack_state for group in groups for stack_state in group]
        self._of_kernels = [x for x in self.stack_states if isinstance(executions[x.number], Fused)]
        self.fused = {stack_state.number for stack_state in self._of_kernels}
        # paths of updates whose weight decay a graph stores as a constant
        self._constant = {stack_state.path for stack_state in self._of_kernels}
        self.device, self.reason = self.stack_states[0].stack.device, not_captured(self.stack_states, recipe)
        if any(not executions[x.number].programs and x.number not in self.fused for x in self.stack_states):
            self.reason = self.reason or "each of its steps has a refresh, or sums over parameters of other stacks"
        self.replay: Body | None = None
        self.without: Counter[str] = Counter()
        self._key: _Key | None = None
        self._record: _Recorder | None = None
        self._static: Tensor | None = None
        self._pairs: tuple[bytes, dict[tuple[str, int], int]] | None = None
        self._mask: Tensor | None = None
        self._positions = np.unique(np.concatenate([stack_state.stack.param_ids for stack_state in self.stack_states]))
        self._capturer = CAPTURERS[self.device.type](self.device) if self.reason is None else None

    def unfit(self, inputs: StepInputs) -> str | None:
        """Return why this step can neither be captured nor replayed; None if it can be."""
        if not inputs.active[self._positions].all():
            return "a parameter has no gradient"
        for stack_state in self.stack_states:
            if stack_state.watched:
                return "something watches the stages"
            programs = self.executions[stack_state.number].programs
            context = stack_state.context(stack_state.all_blocks, inputs.counts, {})
            if context.uniform is None:
                return "blocks are at different updates"
            if context.uniform <= CHECKED_UPDATES or not all(program.suits(context.steps) for program in programs):
                return "one of the first updates"
            if any(stage.refreshes(context) for _, stage in stack_state.rule.stages()):
                return "a refresh"
            has_masks = stack_state.number in self.fused or (programs and all(x.source.masked for x in programs))
            if inputs.mask is not None and not has_masks:
                return "a mask of gradients that `failure.detect: device` would announce"
            path, positions = stack_state.path, stack_state.stack.param_ids
            if stack_state.adds_decay and len(inputs.rates.alphas(path, positions)) > 1:
                return "parameters of a stack are in groups with different rates"
        every = self._rates(inputs.rates).values()
        if any(isinstance(x, Tensor) for rates in every for x in (rates.lr, rates.alpha, rates.rate)):
            return "a rate is a tensor on a device, whose value the host does not know"
        return None

    def step(self, inputs: StepInputs) -> str | None:
        """Run a step that can be captured or replayed: the method `unfit` has returned None for it.

        If there is a graph for steps with the key (`_Key`) of this step, replay it. Otherwise run the step without a
        graph. The third such step in a row with the same key also captures a graph.

        Return the reason for which this step dropped a graph or could not make one, else None. A graph is dropped if
        the key differs from that of the last step that this method ran. The reason then names the difference.
        """
        key, before = self._key_of(inputs), self._key
        self._fill(inputs)
        if key == before and self.replay is not None:
            self.replay()
            self.without.clear()
            return None
        body = self._body(inputs)
        if key != before:
            left = None if before is None else key.changed(before)
            self._key, self.replay, self._record = key, None, None
            body()
            return left
        if self._record is None:
            self._record = _recorded(body, {address for address, *_ in key.gradients})
            return None
        self.reason = self._capture(body, inputs.own_entries, {address for address, *_ in key.gradients})
        return self.reason

    def _rates(self, rates: Rates) -> dict[tuple[str, int], StepRates]:
        """Return the learning rates and weight decays of a step, by (path, group). Param groups with equal values share
        one item.

        path: path of the update rule in the recipe, such as "routes.adam".
        group: index of the first param group with these values.
        """
        known, alike = self._pairs, rates.alike.tobytes()
        if known is None or known[0] != alike:
            first = {group: at for at, group in reversed([*enumerate(rates.alike.tolist())])}
            pairs = {
                (stack_state.path, group): first[group]
                for stack_state in self.stack_states
                for group in rates.alike[stack_state.stack.param_ids].tolist()
            }
            known = self._pairs = alike, pairs
        return {pair: rates.step_rates(pair[0], position) for pair, position in known[1].items()}

    def _key_of(self, inputs: StepInputs) -> _Key:
        positions = self._positions.tolist()
        steps = [self._count(stack_state, inputs.counts) for stack_state in self._of_kernels]
        pairs = self._rates(inputs.rates).items()
        decays = [(path, float(x)) for (path, _), rates in pairs for x in (rates.alpha, rates.gradient_rate)]
        return _Key(
            tuple(_place(inputs.gradients[at]) for at in positions),
            tuple(_place(inputs.own_entries[at]) for at in positions),
            tuple(x.data_ptr() for stack_state in self.stack_states for x in stack_state.tensors.values()),
            inputs.rates.alike.tobytes(),
            tuple(x == 0 for _, x in decays),
            tuple(x for path, x in decays if path in self._constant),
            tuple(map(steps.index, steps)),
            inputs.mask is not None,
        )

    @staticmethod
    def _count(stack_state: StackState, counts: NDArray[np.int64]) -> int:
        """Return the step count of a stack, a tensor of blocks with one shape. All its blocks are at the same step.

        counts: `[P]`, step count of each parameter.
        """
        return int(counts[stack_state.stack.param_ids[0]]) - int(stack_state.lagging)

    def _numbers(self, inputs: StepInputs) -> Iterator[tuple[NumberKey, float]]:
        """Yield the numbers of a step that change from step to step: rates, step counts, and inputs of programs."""
        for (path, group), rates in self._rates(inputs.rates).items():
            for name, value in zip(WriteNumbers._fields, WriteNumbers.of(rates), strict=True):
                yield (path, group, name), float(value)
        for stack_state in self.stack_states:
            number, count = stack_state.number, self._count(stack_state, inputs.counts)
            yield (number, 0, ""), float(count)
            for index, program in enumerate(self.executions[number].programs):
                values = program.host_numbers(count, stack_state.run_step)
                for name, value in zip(program.numbered, values, strict=True):
                    yield (number, index, name), value

    def _fill(self, inputs: StepInputs) -> None:
        """Copy all numbers of a step (`_numbers`) to the tensor that graphs read.

        The step's mask, True for each parameter with a usable gradient, is also copied if there is one.
        """
        values = [value for _, value in self._numbers(inputs)]
        numbers = upload(torch.tensor(values, dtype=torch.float64, device="cpu"), self.device)
        self._static = numbers.clone() if self._static is None else self._static.copy_(numbers)
        if inputs.mask is not None:
            self._mask = inputs.mask.clone() if self._mask is None else self._mask.copy_(inputs.mask)

    def _body(self, inputs: StepInputs) -> Body:
        """Return the function that a graph captures: a step that reads its rates and step counts from tensors.

        The function also reads from a tensor which gradients are usable. The method `_fill` overwrites all of these
        tensors before each replay.
        """
        rates_of, mask = self._rates(inputs.rates), None if inputs.mask is None else self._mask
        places = {key: place for place, (key, _) in enumerate(self._numbers(inputs))}
        dtypes = {x.stack.dtype for x in self.stack_states} | ({torch.float32} if self.fused else set())
        # Rates are Python numbers in a step without a graph, and tensors in a graph. Kernels on a CPU round a float64
        # tensor to the same value as a Python number, so float64 gives the same bits.
        widest = torch.float64 if torch.float64 in dtypes or self.device.type == "cpu" else torch.float32

        def body() -> None:
            assert self._static is not None
            rounded = {torch.float64: self._static.unbind()}
            rounded |= {dtype: self._static.to(dtype).unbind() for dtype in dtypes - {torch.float64}}

            def read(dtype: torch.dtype, *key: *NumberKey) -> Tensor:
                return rounded[dtype][places[key]]

            replaced = dict[tuple[str, int], StepRates]()
            for (path, group), rates in rates_of.items():
                write = WriteNumbers(*(read(widest, path, group, name) for name in WriteNumbers._fields))
                alpha = rates.alpha if path in self._constant or not rates.alpha else write.alpha
                rate = rates.rate if path in self._constant or not rates.gradient_rate else write.rate
                replaced[path, group] = replace(rates, lr=write.lr, alpha=alpha, rate=rate, kept=write.shrink)
            counts, of_programs = dict[int, Tensor](), dict[tuple[int, Program], dict[str, Tensor]]()
            for number in (stack_state.number for stack_state in self.stack_states):
                counts[number] = read(torch.float32 if number in self.fused else torch.float64, number, 0, "")
                for index, program in enumerate(self.executions[number].programs):
                    of_programs[number, program] = {
                        name: read(program.inputs[name][1], number, index, name) for name in program.numbered
                    }
            numbers = GraphNumbers(counts, of_programs)
            self._run(self.groups, replace(inputs, rates=inputs.rates.replaced(replaced), mask=mask, numbers=numbers))

        return body

    def _capture(self, body: Body, own_entries: Sequence[Tensor], gradients: Collection[int]) -> str | None:
        """Run this step, capture it as a graph and check the graph.

        Return why no graph is kept; None if one is kept.

        body: function that runs the step, as `_body` returns it.
        own_entries: P tensors, the entries of each parameter that this rank updates.
        gradients: addresses of the gradients.
        """
        assert self._capturer is not None and self._record is not None
        targets = [x for stack_state in self.stack_states for x in stack_state.tensors.values()]
        targets += [own_entries[at] for at in self._positions.tolist()]
        before, capturer = _copied(targets), self._capturer
        record = _recorded(lambda: capturer.warm_up(body), gradients)
        _restore(targets, before)
        changed = difference(self._record.signature, record.signature)
        if changed is not None:
            body()
            return (
                f"a number or an operation of a stage changes from step to step, and the graph would repeat that of "
                f"the captured step: {changed}; set `graph: false`, or let the stage take the number from its context"
            )
        try:
            replay = capturer.capture(body)
        except RuntimeError as error:
            _restore(targets, before)
            body()
            return (
                f"the device cannot capture an operation of this step ({error}); set `graph: false`, or replace stages "
                "that wait for the device"
            )
        _restore(targets, before)
        body()
        _exchange(targets, before)
        after = before
        replay()
        if not all(torch.equal(as_integers(x.detach()), as_integers(y)) for x, y in zip(targets, after, strict=True)):
            _restore(targets, after)
            return (
                "a replay of the graph gave other bits than the same step without the graph, as if an operation read "
                "memory that the graph does not update; set `graph: false`, or replace your own stages one by one to "
                "find the operation"
            )
        self.replay, self._record = replay, record
        return None


def _copied(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [x.detach().clone() for x in tensors]


def _restore(targets: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    torch._foreach_copy_([x.detach() for x in targets], list(values))


def _exchange(targets: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Swap the values of two lists of tensors pair by pair, with a temporary copy of only one tensor at a time."""
    for target, value in zip(targets, values, strict=True):
        kept = value.clone()
        value.copy_(target.detach())
        target.detach().copy_(kept)


class Graphs:
    """The CUDA graphs in which the steps of the parameters of one device are captured.

    pieces: the stacks, divided into sets with one graph each.
    left: by reason, how often a set of stacks ran a step without its graph.
    """

    def __init__(
        self,
        together: Sequence[Sequence[StackState]],
        recipe: Recipe,
        executions: Sequence[Execution],
        run: RunStacks,
    ) -> None:
        shared = connected(
            [{at for stack_state in group for at in stack_state.stack.param_ids.tolist()} for group in together]
        )
        pieces = [[together[number] for number in numbers] for numbers in shared]
        rare = [any(stack_state.rule.cadences() for group in piece for stack_state in group) for piece in pieces]
        steady = [group for piece, refreshes in zip(pieces, rare, strict=True) if not refreshes for group in piece]
        apart = [piece for piece, refreshes in zip(pieces, rare, strict=True) if refreshes]
        self.pieces = [
            CapturedStacks(piece, recipe, executions, run) for piece in ([steady, *apart] if steady else apart)
        ]
        self.left: Counter[str] = Counter()
        self._named = set[str]()

    def run(self, inputs: StepInputs) -> list[Sequence[StackState]]:
        """Run this step for each set of stacks whose graph can be captured or replayed in this step.

        Return all other stacks, in lists as in `CapturedStacks.groups`. The caller must run the step of these stacks.
        """
        rest: list[Sequence[StackState]] = []
        for piece in self.pieces:
            fixed, had = piece.reason is not None, piece.replay is not None
            reason = piece.reason or piece.unfit(inputs)
            if reason is not None:
                rest += piece.groups
                self._leave(piece, reason, fixed)
            elif (reason := piece.step(inputs)) is not None:
                self._leave(piece, reason, had or piece.reason is not None)
        return rest

    def _leave(self, piece: CapturedStacks, reason: str, unplanned: bool) -> None:
        """Count a step that a set of stacks ran without a graph.

        Warn of the reason if `unplanned` is True. If the set has now run PATIENCE steps without a replay, warn of the
        most frequent reason. Every reason is named only once.

        piece: the set of stacks.
        reason: why the step ran without a graph.
        unplanned: True if the graph was dropped or cannot be captured. False for steps that never have a graph, such as
            those with a refresh.
        """
        self.left[reason] += 1
        piece.without[reason] += 1
        late = piece.without.total() == PATIENCE
        often, steps = piece.without.most_common(1)[0] if late else (reason, 0)
        if (unplanned or late) and often not in self._named:
            self._named.add(often)
            since = f" ({steps} of {PATIENCE} steps without a replay)" if late else ""
            warn_user(f"graph: steps run without a captured graph{since}: {often}")

    def lines(self) -> list[str]:
        """Return lines of a report: how many stacks have a graph, and why steps ran without one."""
        captured = sum(len(piece.stack_states) for piece in self.pieces if piece.replay is not None)
        total = sum(len(piece.stack_states) for piece in self.pieces)
        return [
            f"graph: {captured} of {total} stacks have one",
            *(f"graph: {count} steps without, {reason}" for reason, count in self.left.most_common()),
        ]
