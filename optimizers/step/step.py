"""A parameter set: parameters of any param groups that are updated together, and the code of one step."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cached_property, partial
from operator import is_

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from eigengraft.distributed.layouts import local_gradients
from eigengraft.numerics import StackRows, any_dtensors, kept_on_device, local
from eigengraft.signals import asking
from eigengraft.slots import StateKey
from eigengraft.step_context import StepContext

from ..recipe.recipe import Recipe, Route, slot_keys
from ..stacks.placement import ParamSpec, Phases
from ..stacks.rank_checks import RankChecks
from ..stacks.stack import ActiveBlocks, StackState, active_blocks, build
from ..write import IterateStore, ParameterUpdate
from ..write.averaging import Mode
from ..write.write import EntryUpdates, Hyper, Rates, write
from .capture import Graphs
from .exchange import LocalExchange, LocalStep, find_signals, gathers_decaying
from .execution import Execution, Fused, choose_execution
from .fused import FusedCalls
from .gradients import FiniteCheck, GivenGradients, GradientCheck, LossScale, copy_answers
from .inputs import StepInputs
from .offload import OffloadedState
from .rank_exchange import RankExchange
from .stack_step import StackStep, run_together, sharing_sums
from .traced import compile_programs

_is_none = partial(is_, None)


def as_pairs(tensor: Tensor) -> Tensor:
    """Return a complex tensor as a view `[..., 2]` of real and imaginary parts, and any other tensor as it is."""
    return torch.view_as_real(tensor.detach().resolve_conj()) if tensor.is_complex() else tensor


class ParamSet:
    """P parameters on one device that the same ranks share. Their positions are 0 .. P - 1.

    specs: name, update, placement and param group of each parameter.
    own_entries: for each parameter, the entries that this rank updates. In one process they are the parameter itself.
        `StepInputs` and `IterateStore` have the same list. Its items are replaced before every step, because a
        framework may have replaced the memory of a parameter.
    rank_group: ranks that share the parameters. None: this process updates the parameters alone.
    names: names of the parameters.
    rules: the update rules of the recipe, by path.
    step_counts: `[P]` on the host, number of gradients of each parameter so far. `state["step"]` of a parameter is a
        view of one entry.
    stack_states: stacks of blocks with their state. The attribute `number` of a stack is its index in this list.
    block_groups: blocks that ranks exchange. The list is empty without a rank group.
    together: the stacks, in lists. Stacks whose stages sum over the same parameter are in one list.
    executions: for each stack, the way in which its steps run.
    graphs: captured steps of stacks. None: the recipe captures no steps.
    iterates: state of the averaging and of constraints.
    finite_check: decides which gradients a step uses.
    exchange: copies gradients into stacks and directions to parameters. On several ranks it sends them in messages.
    offloaded: state of stacks that is in host memory between steps. None: all state is on the device.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        specs: Sequence[ParamSpec],
        recipe: Recipe,
        phases: Phases,
        skip_counts: Counter[str],
    ) -> None:
        self.parameters, self.specs = list(parameters), list(specs)
        rank_group = specs[0].rank_group
        self.recipe, self.rank_group, self.rules = recipe, rank_group, recipe.rules()
        routes = ((path, rule) for path, rule in self.rules.items() if isinstance(rule, Route))
        self._routes = {path: (route.lr_multiplier, route.weight_decay) for path, route in routes}
        self._adds_decay = {path: rule.adds_decay() for path, rule in self.rules.items()}
        self._gathers_decaying = {path: gathers_decaying(recipe, path) for path in self.rules}
        self._complex = any(parameter.is_complex() for parameter in parameters)
        self.names, self.own_entries = [spec.name for spec in specs], self._local(parameters)
        self.step_counts: NDArray[np.int64] = np.zeros(len(parameters), dtype=np.int64)
        self._begun = self.step_counts > 0
        self._nonempty = np.array([math.prod(spec.shape) > 0 for spec in specs], dtype=np.bool_)
        self._nonempty.setflags(write=False)
        self._groups = np.array([spec.group for spec in specs], dtype=np.int64)
        self._known_groups = np.unique(self._groups).tolist()
        self._update_ids = np.unique([spec.path for spec in specs], return_inverse=True)[1]
        self._priming = np.array([self.rules[spec.path].lagging() for spec in specs], dtype=np.int64)
        self.stack_states, self.block_groups = build(specs, recipe, phases, rank_group)
        for number, stack_state in enumerate(self.stack_states):
            stack_state.number = number
        self._counts_failures = [x for x in self.stack_states if x.failure_counts]
        spans = any(x.spans for x in self.stack_states)
        self.together = sharing_sums(self.stack_states) if spans else [[x] for x in self.stack_states]
        offloads = any(x.host_buffers for x in self.stack_states)
        self.offloaded = OffloadedState(self.together, specs[0].device) if offloads else None
        shared = {x.number for group in self.together if len(group) > 1 for x in group}
        self.executions = [
            choose_execution(x, recipe, [specs[at] for at, _ in x.stack.grids], x.number in shared)
            for x in self.stack_states
        ]
        if compiled := [program for how in self.executions for program in how.compiled]:
            compile_programs(compiled)
        self.graphs = Graphs(self.together, recipe, self.executions, self._run) if recipe.graph else None
        constraints, paths = {at: rule.constraints for at, rule in self.rules.items()}, [spec.path for spec in specs]
        squaring = {path for path, update in self.rules.items() if update.squares()}
        self._linear = np.array([spec.path not in squaring for spec in specs], dtype=np.bool_)
        rank_checks = (
            None if rank_group is None else RankChecks(rank_group, specs, recipe.failure, self._linear.tolist())
        )
        constrains_shards = any(spec.divided and self.rules[spec.path].constraints for spec in specs)
        shard_sums = rank_checks.sums if rank_checks is not None and constrains_shards else None
        paired = {path for path, update in self.rules.items() if "partner_before" in asking(update.stages())}
        self.iterates = IterateStore(recipe.averaging, constraints, self.own_entries, paths, shard_sums, paired)
        self._keeps_iterates = bool(self.iterates)
        # a graph reads gradients at fixed addresses, so the check of gradients does not copy gradients of small
        # parameters into stacks
        small = [x for x in self.stack_states if x.stack.joins and self.graphs is None]
        self.exchange = (
            LocalExchange(specs, self.iterates, recipe.failure.roots, small)
            if rank_checks is None
            else RankExchange(specs, self.iterates, recipe, self.parameters, rank_checks, self.block_groups)
        )
        self.finite_check = FiniteCheck(recipe.failure, self.names, self.exchange.survey, skip_counts)

    @property
    def update_counts(self) -> NDArray[np.int64]:
        """`[P]`, number of updates of each parameter, without first gradients that only initialized statistics."""
        return self.step_counts - self._priming

    @cached_property
    def totals(self) -> dict[str, str]:
        """The slots whose sums over all blocks and ranks stages read: {path of the slot: path of its update}."""
        kinds = {(group.path, group.shape) for group in self.block_groups}
        kinds |= {(state.path, state.stack.block) for state in self.stack_states}
        slots = [(path, slot_keys(self.rules[path], path, block)) for path, block in kinds]
        totals = {key.name: path for path, keys in slots for key, slot in keys.items() if slot.total}
        return dict(sorted(totals.items()))

    @property
    def real_parameters(self) -> Sequence[Tensor]:
        """The parameters. A complex parameter is a view `[..., 2]` of real and imaginary parts."""
        return [*map(as_pairs, self.parameters)] if self._complex else self.parameters

    def resolve_deferred(self) -> None:
        """Read the checks that the last step made on a device, and set back the step count of each parameter that the
        step did not change.

        Raises ArithmeticError for roots that failed too often, and FloatingPointError for an unusable gradient if the
        recipe requests an error.
        """
        if self.offloaded is not None:
            self.offloaded.finish()
        left, bad = self.finite_check.resolve_deferred()
        self._count_back(left)
        for stack_state in self._counts_failures:
            self._report_failed_roots(stack_state, wait=True)
        self.finite_check.raise_nonfinite(
            bad, "these gradients were those of the previous step, which did not change these parameters"
        )

    def _count_back(self, positions: Iterable[int]) -> None:
        """Set back the step counts of parameters that the last step counted but did not change."""
        for position in positions:
            if self.step_counts[position]:  # a framework may have set this count to 0
                self.step_counts[position] -= 1
                self._begun[position] = self.step_counts[position] > 0

    def undo_counts(self, before: NDArray[np.int64]) -> None:
        """Set the step counts back to those before the last step, whose parameters the caller has set back.

        before: `[P]`, the step counts before that step.
        """
        self.finite_check.resolve_deferred()  # counts unusable gradients; otherwise the next step would count back too
        self.step_counts[:] = before
        self.note_counts()

    def finish_refreshes(self) -> None:
        """Wait for all delayed refreshes that have begun, and store their results in the state.

        Slots of role "pending" store the results until these take effect.
        """
        for stack_state in self.stack_states:
            if stack_state.refreshes is not None:
                stack_state.refreshes.finish_all()

    def note_counts(self) -> None:
        """Record which parameters have been updated before. Called after other code, such as a load, has set step
        counts.
        """
        self._begun = self.step_counts > 0

    def counts_set_back(self) -> NDArray[np.bool_]:
        """Return `[P]`, True for parameters whose step count other code has set back.

        Such a count is below 0, or is 0 although the parameter has had steps.
        """
        back: NDArray[np.bool_] = self.step_counts < self._begun
        return back

    def any_count_set_back(self) -> bool:
        """Return True if other code has set back the step count of any parameter."""
        return min(self.step_counts.tolist()) < 1 and bool(self.counts_set_back().any())

    def swap_iterate(self, mode: Mode) -> None:
        """Copy the iterate for training or for evaluation into the parameters, as `mode` says."""
        self.own_entries[:] = self._local(
            self.parameters
        )  # new views: a framework may have replaced the memory of the parameters
        self.iterates.swap(mode, self.update_counts)

    def views(self, mode: Mode | None = None) -> list[dict[str, Tensor]]:
        """Return the state of each parameter, as a dictionary.

        The keys of a dictionary are `step`, the names of the iterates, and "<block>/<stage path>/<slot>" for the slots
        of stages. A slot is one tensor for equal blocks of many parameters, so the value in a dictionary is a view of
        the row of one block.

        mode: the iterate that the parameters are assumed to hold, because keys and shapes depend on it. None: the
            iterate that they hold now.
        """
        states: list[dict[str, Tensor]] = [{"step": step} for step in torch.from_numpy(self.step_counts).unbind()]
        for stack_state in self.stack_states:
            for row, position, key in stack_state.rows():
                states[position].update((StateKey.join(key, k), x[row]) for k, x in stack_state.tensors.items())
        for position, state in enumerate(states):
            state.update(self.iterates.view(position, mode))
        return states

    def _local(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        """Return for each parameter a view of the entries that this rank updates. Complex entries are pairs of numbers.

        tensors: the parameters.
        """
        held = list(tensors)
        if self.rank_group is not None and any_dtensors(held):
            held = [local(tensor) for tensor in held]
        held = [*map(as_pairs, held)] if self._complex else held
        return held if self.rank_group is None else [self.part(*one) for one in enumerate(held)]

    def part(self, position: int, tensor: Tensor) -> Tensor:
        """Return a view of the entries of a parameter, or of its gradient, that this rank updates.

        If several ranks hold the same entries of a parameter, each of them may update only a part of these entries
        (`ParamPlacement.parts`). Otherwise the result is `tensor` itself.

        position: position of the parameter.
        tensor: the entries that this rank holds of the parameter or the gradient.
        """
        placement = self.specs[position].placement
        if placement is None or placement.parts is None or self.rank_group is None or tensor.is_sparse:
            return tensor
        rank = self.rank_group.rank
        return tensor.detach()[placement.parts.boxes[rank].within(placement.layout.boxes[rank])]

    def check_gradients(
        self, hypers: Sequence[Hyper], loss_scale: LossScale | None, only: NDArray[np.bool_] | None
    ) -> GradientCheck:
        """Begin the check of the gradients of a step.

        Nothing changes but gradients, which are divided by the scale of the loss. Raises the errors of
        `FiniteCheck.begin`.

        hypers: values of the param groups, by index of the group.
        loss_scale: numbers of a scaler of the loss. None: there is no scaler.
        only: `[P]`, True for parameters to check, if the step updates its parameters in several calls. None: all.
        """
        self.own_entries[:] = self._local(self.parameters)
        gradients = [p.grad if only is None or only[at] else None for at, p in enumerate(self.parameters)]
        if self.rank_group is not None or any_dtensors(gradients):
            places = range(len(gradients)) if only is None else np.flatnonzero(only).tolist()
            names, parameters = [self.names[at] for at in places], [self.parameters[at] for at in places]
            shards = local_gradients(names, parameters, self.rank_group)
            for at, shard in zip(places, shards, strict=True):
                gradients[at] = shard
        if self._complex:
            gradients = [None if gradient is None else as_pairs(gradient) for gradient in gradients]
        allowed = None
        if loss_scale is not None:
            loss_scale.unscale(self.names, gradients)
            allowed = loss_scale.usable(self.parameters[0].device)
        complete = not any(map(_is_none, gradients))
        present = self._nonempty if complete else self._nonempty & [gradient is not None for gradient in gradients]
        values = {group: hypers[group].on(self.parameters[0].device) for group in self._known_groups}
        rates = Rates(self.recipe.weight_decay, self._routes, values, self._groups, self.iterates.shard_sums is None)
        given = GivenGradients(
            gradients, present, self._linear, rates, max(self.step_counts.tolist()), allowed, more=only is not None
        )
        return self.finite_check.begin(given)

    @cached_property
    def _may_launch_early(self) -> bool:
        """True if fused kernels compute every step of this set, and change nothing if `StepInputs.found_inf` is 1.

        It is False on a CPU, with several ranks, graphs, offloaded state, an averaging or a constraint, and if weight
        decay follows the update, because that decay is a kernel of its own.
        """
        return (
            self.specs[0].device.type != "cpu"
            and self.rank_group is None
            and not (self._keeps_iterates or self.graphs or self.offloaded)
            and all(isinstance(how, Fused) for how in self.executions)
            and not any((rule.weight_decay or self.recipe.weight_decay).after for rule in self.rules.values())
        )

    def launch_early(self, check: GradientCheck) -> bool:
        """Launch the step before the host has read the check of the gradients, so that the device does not wait.

        The kernels change nothing if any gradient is not usable, or if a scaler of the loss stops the step. When the
        host has read such a result, the caller must call `take_back`, and run the step of the parameters with usable
        gradients.

        Return False, and launch nothing, if the step cannot be launched early. No step of this set can be
        (`_may_launch_early`), the host need not read the check, a learning rate is a tensor, or `inspect` or
        `checked=True` observes the stages.
        """
        answers = check.answers
        if not self._may_launch_early or answers is None:
            return False
        if any(isinstance(hyper.lr, Tensor) for hyper in check.given.rates.hypers.values()):
            return False
        if any(stack_state.watched for stack_state in self.stack_states):
            return False
        self.step(self._inputs(check, check.present, found_inf=1 - answers.prod(dtype=torch.float32)))
        return True

    def take_back(self, check: GradientCheck) -> None:
        """Set step counts back to those before `launch_early`, whose kernels have changed nothing."""
        self._count_back(np.flatnonzero(check.present).tolist())

    def inputs(self, check: GradientCheck, answers: Sequence[bool]) -> StepInputs | None:
        """Return the inputs of the step, which updates the parameters with usable gradients. None: there are none.

        Nothing changes but the counts of unusable gradients.

        check: check of the gradients, from `check_gradients`.
        answers: the booleans of `check.answers`, which `copy_answers` has copied to the host: for each checked
            gradient, True if it is usable. Empty if `check.answers` is None.

        Raises the errors of `FiniteCheck.finish`.
        """
        active, mask = self.finite_check.finish(check, answers)
        if mask is None and not any(active.tolist()):
            return None
        return self._inputs(check, active, mask)

    def _inputs(
        self,
        check: GradientCheck,
        active: NDArray[np.bool_],
        mask: Tensor | None = None,
        found_inf: Tensor | None = None,
    ) -> StepInputs:
        """Return the inputs of a step. The arguments are fields of `StepInputs`."""
        gradients = list(check.given.gradients)
        if self.rank_group is not None:
            gradients = [None if x is None else self.part(position, x) for position, x in enumerate(gradients)]
        counts: NDArray[np.int64] = self.step_counts + active
        written = active & (counts > self._priming)  # the first gradient of some updates only primes
        return StepInputs(
            gradients=gradients,
            active=active,
            written=written,
            mask=mask,
            rates=check.given.rates,
            survey=check.survey,
            counts=counts,
            own_entries=self.own_entries,
            found_inf=found_inf,
        )

    def step(self, inputs: StepInputs) -> None:
        """Update every parameter that has a usable gradient."""
        self.step_counts[:] = inputs.counts
        self._begun |= inputs.active
        if self._keeps_iterates:
            self.iterates.signals = inputs.signals
            self.iterates.adopt_writes(np.flatnonzero(inputs.written & (self.update_counts > 1)).tolist())
            self.iterates.begin(np.flatnonzero(inputs.written & (self.update_counts == 1)).tolist())
        groups: Sequence[Sequence[StackState]] = self.together
        if self.graphs is not None:
            groups = self.graphs.run(inputs)
        if groups or self.graphs is None:
            self._run(groups, inputs)

    def _run(self, groups: Sequence[Sequence[StackState]], inputs: StepInputs) -> None:
        """Run one step of all blocks in some stacks. A stack is a tensor of blocks with one shape.

        groups: the stacks, in lists. Stacks whose stages sum over the same parameter are in one list.
        """
        stack_states = [stack_state for group in groups for stack_state in group]
        active: NDArray[np.bool_] | None = None
        first: NDArray[np.bool_] | None = None
        written: NDArray[np.bool_] | None = None
        if not inputs.written.all():
            active, first, written = inputs.active, inputs.active & (inputs.counts == 1), inputs.written
        exchange = self.exchange.begin(inputs, stack_states, partial(self._write, inputs=inputs, written=written))
        calls = FusedCalls(inputs)
        if self.offloaded is not None:
            self.offloaded.schedule(groups, inputs.active)
        for group in groups:
            if self.offloaded is None:
                self._run_group(active_blocks(group, active, first), exchange, calls)
                continue
            with self.offloaded.held(group):
                self._run_group(active_blocks(group, active, first), exchange, calls)
                calls.run()
        calls.run()
        exchange.finish()

    def _run_group(
        self, chosen: Sequence[tuple[Sequence[ActiveBlocks], bool]], exchange: LocalStep, calls: FusedCalls
    ) -> None:
        """Run one step of one stack (blocks with one shape), or of several whose stages sum over the same parameters.

        chosen: pairs (active blocks of the stacks, priming), as `active_blocks` returns them. priming: True if the
            gradient only initializes statistics of these blocks.
        exchange: copies gradients into stacks and directions to parameters, or sends them between ranks.
        calls: collects the stacks that fused kernels update. The caller runs them later, all together.
        """
        for together, priming in chosen:
            blocks, execution = together[0], self.execution(together[0].stack_state)
            if isinstance(execution, Fused) and blocks.stack_state.watched:
                self._stack_step(blocks, exchange).rehearse()
            if len(together) > 1 or not execution.try_in_place(blocks, calls):
                self._advance(together, exchange, priming)

    def _advance(self, together: Sequence[ActiveBlocks], exchange: LocalStep, priming: bool) -> None:
        """Compute the directions of all blocks of one stack or several stacks. Pass them to parameters or other ranks.

        A stack is a tensor of blocks with one shape.

        together: active blocks of each stack. There are several if stages need sums over parameters that have blocks in
            all of these stacks.
        exchange: copies gradients into stacks and directions to parameters, or sends them between ranks.
        priming: True if the gradient only initializes statistics, and no parameter changes.
        """
        steps = [self._stack_step(blocks, exchange) for blocks in together]
        contexts = [step.context for step in steps]
        if priming:
            run_together(steps, StackStep.prime)
        else:
            numbers = exchange.inputs.numbers
            directions = run_together(
                steps, lambda step: self.execution(step.blocks.stack_state).direction(step, numbers)
            )
            del steps  # frees the gathered gradients
            for blocks, direction in zip(together, directions, strict=True):
                if self.offloaded is not None:
                    direction = self.offloaded.outlasting(direction)
                exchange.deliver(blocks, direction)
        for blocks, context in zip(together, contexts, strict=True):
            if blocks.stack_state.failure_counts:
                if any(context.due.values()):  # `due` has an entry for every stage
                    blocks.stack_state.note_failures(self.recipe.failure.roots)
                self._report_failed_roots(blocks.stack_state, wait=False)

    def execution(self, stack_state: StackState) -> Execution:
        """Return the object that runs the steps of a stack: by a fused kernel, in chunks, compiled, or by stages."""
        return self.executions[stack_state.number]

    def _report_failed_roots(self, stack_state: StackState, wait: bool) -> None:
        """Report matrix roots that failed too often, in a stack (blocks with one shape).

        wait: True to wait for the answer of a device. False to leave the answer of a device to a later call.
        """
        if positions := stack_state.failing(wait):
            self.exchange.report_failed_roots(stack_state.path, positions)

    def _stack_step(self, blocks: ActiveBlocks, exchange: LocalStep) -> StackStep:
        """Return the inputs of a chain of stages for one step: gradients, step counts, signals, rates.

        blocks: the blocks of a stack (all with one shape) that the step updates.
        """
        gradient, inputs = exchange.gradients(blocks), exchange.inputs
        context = blocks.stack_state.context(blocks, inputs.counts, find_signals(blocks, exchange))
        mask = None if inputs.mask is None else inputs.mask[blocks.param_index]
        decaying = self._decaying(blocks, context, exchange)
        return StackStep(blocks, gradient, mask, context, inputs.rates, decaying)

    def _decaying(self, blocks: ActiveBlocks, context: StepContext, exchange: LocalStep) -> Tensor | None:
        """Return the tensors whose weight decay is added to directions. Return None if no decay is added to them."""
        path = blocks.stack_state.path
        if not (self._adds_decay[path] and exchange.inputs.rates.decays(path)):
            return None
        if self._gathers_decaying[path]:
            return exchange.decaying(blocks)
        parameter = context.signals["parameter"]
        assert isinstance(parameter, Tensor)
        return parameter

    def _write(self, updates: EntryUpdates, inputs: StepInputs, written: NDArray[np.bool_] | None) -> None:
        """Apply updates to the parameters that the step changes. Updates of other parameters are dropped.

        Parameters with the same update rule, learning rate and weight decay are processed together.

        written: `inputs.written`. None: the step changes all parameters.
        """
        if written is not None:
            updates = updates.chosen(written[updates.positions])
        kinds = self._update_ids[updates.positions]
        if inputs.rates.same is None:
            kinds = (kinds << 32) + inputs.rates.alike[updates.positions]
        for kind in (distinct := dict.fromkeys(kinds.tolist())):
            self._write_alike(updates if len(distinct) == 1 else updates.chosen(kinds == kind), inputs)

    def _write_alike(self, updates: EntryUpdates, inputs: StepInputs) -> None:
        """Apply updates to parameters that have the same update rule, learning rate and weight decay."""
        positions, entries, values = updates.positions.tolist(), updates.entries, updates.values
        path, group = self.specs[positions[0]].path, int(inputs.rates.alike[positions[0]])
        masks = None
        if inputs.mask is not None:
            masks = StackRows(inputs.mask[kept_on_device(updates.positions, inputs.mask.device)])
        rates = inputs.rates.step_rates(path, positions[0])
        rates = rates.without_decay if self._adds_decay[path] else rates
        if self._keeps_iterates:
            rows = StackRows(values) if isinstance(values, Tensor) else values
            update = ParameterUpdate(rows, rates, masks)
            self.iterates.step(positions, self.update_counts[positions], update, inputs.rates.hypers[group])
        else:
            write(entries, values, rates, masks)


ReadySteps = Sequence[tuple[ParamSet, StepInputs | None]]
"""Pairs (parameter set, inputs of its step). The inputs are None if no step is left to run: it would update no
parameter of the set, or it was launched early (`ParamSet.launch_early`)."""


def prepare(
    param_sets: Iterable[ParamSet],
    hypers: Sequence[Hyper],
    loss_scale: LossScale | None = None,
    only: NDArray[np.bool_] | None = None,
    early: bool = False,
) -> ReadySteps:
    """Check the gradients of parameter sets. Return each set with the inputs of its step, which the caller must run.

    The inputs are None if there is no step to run (`ReadySteps`). The host reads the results of all checks together, so
    that it waits only once for a device. Gradients are divided by the scale of the loss, and unusable gradients are
    counted. Without `early`, nothing else changes. Raises the errors of `FiniteCheck`.

    hypers: values of the param groups.
    loss_scale: numbers of a scaler of the loss. None: there is no scaler.
    only: `[P]`, True for parameters to check, as in `ParamSet.check_gradients`. None: all. If it is given, `param_sets`
        must have a single set.
    early: True if the step needs only gradients and rates. The step of a single set may then be launched here, before
        the host waits (`ParamSet.launch_early`). If the launched step updates the parameters, the set's inputs are
        None. If a gradient is not usable, the launched step changes nothing, and the caller must run the step.
    """
    checks = [(param_set, param_set.check_gradients(hypers, loss_scale, only)) for param_set in param_sets]
    read = copy_answers([check for _, check in checks])  # begun first: the host must not wait for the launched step
    launched = early and len(checks) == 1 and checks[0][0].launch_early(checks[0][1])
    answers = read()
    if launched:
        param_set, check = checks[0]
        if all(answers[0]):
            param_set.finite_check.finish(check, answers[0])
            return [(param_set, None)]
        param_set.take_back(check)
    pairs = zip(checks, answers, strict=True)
    return [(param_set, param_set.inputs(check, of_check)) for (param_set, check), of_check in pairs]
