"""Exchange of blocks between ranks: gradients are sent to owners of blocks, and updates to holders of parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from eigengraft.distributed.comm_plan import (
    Arrived,
    BlockGroup,
    CommPlan,
    EntryView,
    Source,
    assemble,
    copy_all,
    reading,
)
from eigengraft.distributed.comm_step import CommStep
from eigengraft.distributed.gradients import BackwardGather, UsedGradients
from eigengraft.distributed.param_gather import ParamGather
from eigengraft.distributed.rank_group import Work
from eigengraft.numerics import compute_dtype, is_dtensor, local
from eigengraft.signals import known_signals, requested

from ..recipe.recipe import Recipe
from ..stacks.placement import ParamSpec
from ..stacks.rank_checks import RankChecks, agreed_numbers
from ..stacks.stack import ActiveBlocks, StackState, round_bytes, sends_parameters
from ..write import IterateStore
from ..write.write import EntryUpdates, StepRates, after_write, decayed_gradient
from .exchange import LocalExchange, LocalStep, Write, gathers_decaying
from .gradients import GivenGradients, GradientSurvey
from .inputs import StepInputs

_GRADIENTS = "gradients"
"""Name of the messages with gradients."""
_DECAYING = "parameters"
"""Name of the messages with the tensors to which weight decay applies."""


def _signal(name: str) -> str:
    """Return the name of the messages with a signal."""
    return f"signal {name}"


class RankExchange(LocalExchange):
    """Exchange between ranks. All ranks call the same methods in the same order.

    The blocks of most parameters are sent to the ranks that own them. The blocks of all other parameters have no
    owners: each rank computes the update of the entries that it holds, without messages, as `LocalExchange` does. If
    several ranks hold the same entries of a parameter without owners, each of them updates a part of these entries, and
    `RankStep.finish` sends each part to the others.

    needs_rms: True if a stage requests the root mean squares of parameters.
    sends_decaying: True if owners of blocks receive the tensors to which weight decay applies.
    sends_parameters: True if owners send updated parameters in place of updates.
    moves_at_once: True if updates are written together at the end of a step, because constraints sum over all ranks.
    exchanged: positions of the parameters whose blocks are sent.
    at_end: positions of parameters that are written at the end of a step.
    """

    def __init__(
        self,
        specs: Sequence[ParamSpec],
        iterates: IterateStore,
        recipe: Recipe,
        parameters: Sequence[Tensor],
        rank_checks: RankChecks,
        block_groups: Sequence[BlockGroup],
    ) -> None:
        super().__init__(specs, iterates, recipe.failure.roots)
        self.rank_checks, rank_group = rank_checks, rank_checks.rank_group
        self.paths = [spec.path for spec in specs]
        layouts = [spec.placed.layout for spec in specs]
        size = round_bytes(specs, recipe, rank_group.size)
        self.comm_plan = CommPlan(rank_group, layouts, block_groups, self.names, size)
        overlaps = recipe.distribution.overlap_backward and not self.comm_plan.replicated
        if overlaps and recipe.decays_in_gradient():
            raise ValueError(
                "distribution.overlap_backward: cannot be combined with a weight decay that is added to gradients, "
                "because gradients are sent before step() reads its rate; remove one of the two"
            )
        self._backward_gather = BackwardGather(self.comm_plan, parameters) if overlaps else None
        self._copied = not any(is_dtensor(parameter) for parameter in parameters)
        self._gathering: dict[int, Work[Tensor]] = {}
        self._gathered = {i: layouts[i] for i, spec in enumerate(specs) if spec.placed.parts}
        self._param_gather = ParamGather(rank_group, self._gathered, self.names, recipe.distribution.message)
        self._parameters, self._used_gradients = parameters, UsedGradients(parameters)
        self.exchanged = [i for i, spec in enumerate(specs) if not spec.without_owners]
        used = [recipe.rules()[path] for path in dict.fromkeys(self.paths)]
        self.needs_rms = any("parameter_rms" in requested(stage) for rule in used for _, stage in rule.stages())
        self.sends_decaying = any(gathers_decaying(recipe, path) for path in dict.fromkeys(self.paths))
        self.moves_at_once = iterates.shard_sums is not None
        self.sends_parameters = sends_parameters(specs, recipe)
        if self.sends_parameters and iterates:
            raise ValueError(
                "distribution.gather: must be 'updates' with averaging or constraints, which need the updates on every "
                "rank, got 'parameters'"
            )
        empty = [i for i, held in enumerate(iterates.own_entries) if not held.numel() and self.numels[i]]
        self.at_end = sorted({*empty, *self.exchanged} if self.moves_at_once else empty if iterates else ())

    def survey(self, given: GivenGradients) -> GradientSurvey:
        numbers = agreed_numbers(given.rates.hypers, given.steps, self._used_gradients.count())
        rank_checks, gather = self.rank_checks, self._backward_gather
        if gather is None:
            return rank_checks.survey(given.gradients, given.present, numbers, self._copied, {})
        for work in self._gathering.values():  # messages with gradients of a step that was skipped
            work.wait()
        begun = gather.report(self._parameters[0].device)
        survey = rank_checks.survey(given.gradients, given.present, numbers, self._copied, begun)
        self._gathering = gather.finish(survey.sums)
        return survey

    def begin(self, inputs: StepInputs, stacks: Sequence[StackState], write: Write) -> RankStep:
        self._used_gradients.record_step()
        begun, self._gathering = {(_GRADIENTS, index): work for index, work in self._gathering.items()}, {}
        return RankStep(self, inputs, stacks, write, begun)

    def gather_parts(self, active: NDArray[np.bool_]) -> None:
        """Exchange updated entries of parameters without owners, if several ranks hold the same entries.

        Each of these ranks has updated a part of the entries. It sends this part to the others, and receives theirs.

        active: `[P]`, True for parameters that the step updates. Entries of all others are not sent.
        """
        self._param_gather.run({i: local(self._parameters[i]).detach() for i in self._gathered if active[i]})

    def close(self) -> None:
        for work in self._gathering.values():
            work.wait()
        if self._backward_gather is not None:
            self._backward_gather.close()

    def report_failed_roots(self, path: str, positions: Sequence[int]) -> None:
        """Record that roots of these parameters failed too often. All ranks raise the error in the next step."""
        self.rank_checks.failed.update(positions)


class RankStep(LocalStep):
    """Sends blocks of gradients of one step to the ranks that own the blocks, and their directions back.

    All ranks call the same methods in the same order.

    exchange: the exchange that has begun this step. It has the plan of the messages, which is the same in all steps.
    comm_step: messages of this step.
    """

    def __init__(
        self,
        exchange: RankExchange,
        inputs: StepInputs,
        stacks: Sequence[StackState],
        write: Write,
        begun: Mapping[tuple[str, int], Work[Tensor]],
    ) -> None:
        super().__init__(exchange, inputs, stacks, write)
        self.exchange, self._waiting = exchange, dict[int, tuple[Tensor, Tensor]]()
        if exchange.needs_rms:  # computed before a stage reads it, because all ranks must take part in the sum
            self._rms = self._root_mean_squares()
        sources: dict[str, Source] = {_GRADIENTS: self._gradient_entries}
        if exchange.sends_decaying:
            sources[_DECAYING] = reading(self.decaying_tensors)
        known = known_signals() if inputs.signals else {}
        for name in sorted(known.keys() & inputs.signals.keys()):  # sorted, because all ranks send in the same order
            if known[name].extent == "entry":
                sources[_signal(name)] = reading(inputs.signals[name])
        self.comm_step = CommStep(exchange.comm_plan, sources, self._write_arrived, begun)

    def _root_mean_squares(self) -> dict[int, Tensor]:
        if self.exchange.comm_plan.replicated:
            return self._rms_of(self.exchange.exchanged)
        norms = self.exchange.rank_checks.parameter_norms(self.iterates.own_entries)
        return self._rms_from_norms(range(len(norms)), norms)

    def _gradient_entries(self, position: int, view: EntryView) -> Tensor | None:
        """Return selected entries of a parameter's gradient, as they are sent to the ranks that own its blocks.

        Weight decay that the recipe adds to gradients is included. Returns None if the parameter has no gradient.

        position: index of the parameter in the parameter set.
        view: function that selects the entries: it returns a view of them in this rank's shard.
        """
        gradient: Tensor | None = self.inputs.gradients[position]
        path, rates = self.exchange.paths[position], self.inputs.rates
        if gradient is None or not rates.decays_gradients(path):
            return None if gradient is None else view(gradient)
        parameter, dtype = self.iterates.own_entries[position], compute_dtype(gradient.dtype)
        own_rates = rates.step_rates(path, position)
        return decayed_gradient(view(gradient).to(dtype), view(parameter).to(dtype), own_rates)

    def gradients(self, blocks: ActiveBlocks) -> Tensor:
        received = self._blocks_sent(blocks, _GRADIENTS)
        return super().gradients(blocks) if received is None else received

    def decaying(self, blocks: ActiveBlocks) -> Tensor:
        received = self._blocks_sent(blocks, _DECAYING)
        return super().decaying(blocks) if received is None else received

    def signal(self, blocks: ActiveBlocks, name: str) -> Tensor:
        received = self._blocks_sent(blocks, _signal(name))
        return super().signal(blocks, name) if received is None else received

    def _blocks_sent(self, blocks: ActiveBlocks, source: str) -> Tensor | None:
        """Return active blocks of tensors that ranks send, `[n, *block]`. None: they are not sent, and are read here.

        source: name of the tensors in `CommStep.sources`.
        """
        group = blocks.stack_state.block_group
        if group is None:
            return None
        self.comm_step.advance(self.exchange.comm_plan.starts[group])
        if source not in self.comm_step.sources:
            return None
        stack = self.comm_step.gather(group, source)
        return stack if blocks.rows is None else stack.index_select(0, blocks.rows)

    def deliver(self, blocks: ActiveBlocks, direction: Tensor) -> None:
        group = blocks.stack_state.block_group
        if group is None:
            super().deliver(blocks, direction)
            return
        if self.exchange.sends_parameters:
            direction = self._after_step(blocks, direction)
        self.comm_step.deliver(group, blocks.rows, direction)

    def _after_step(self, blocks: ActiveBlocks, direction: Tensor) -> Tensor:
        """Return the blocks `[n, *block]` of parameters as they are after the step.

        direction: directions `[n, *block]`.
        """
        stack_state, inputs = blocks.stack_state, self.inputs
        before = blocks.stack.gather(self.iterates.own_entries)

        def write(x: Tensor, update: Tensor, rates: StepRates) -> Tensor:
            return after_write(rates.without_decay if stack_state.adds_decay else rates, x, update)

        after = inputs.rates.map_rows(stack_state.path, blocks.stack.param_ids, write, before, direction)
        if inputs.mask is None:
            return after
        usable = inputs.mask[blocks.param_index]
        return torch.where(usable.view(-1, *(1 for _ in blocks.stack.block)), after, before)

    def _write_arrived(self, arrived: Arrived) -> None:
        """Apply updates from other ranks to the parameters, or copy updated blocks of parameters from them.

        If the recipe has constraints or an averaging, the updates of whole parameters are assembled first.

        arrived: pairs (`Transfer`, tensor). The tensor has entries that the owner of a block has sent, and the
            `Transfer` says where these entries are stored.
        """
        parameters = self.iterates.own_entries
        if self.iterates:
            rows = [(i, parameters[i], whole) for i, whole in assemble(self._assembly, arrived, parameters).items()]
        else:
            rows = [(x.position, x.view(parameters[x.position]), values.to(x.dtype)) for x, values in arrived]
        if self.exchange.sends_parameters:
            chosen = [(entries, value) for i, entries, value in rows if self.inputs.written[i]]
            copy_all([entries for entries, _ in chosen], [value for _, value in chosen])
        elif self.exchange.moves_at_once:
            self._waiting.update({i: (entries, value) for i, entries, value in rows})
        else:
            self.write(EntryUpdates.of_rows(rows))

    def finish(self) -> None:
        active, parameters = self.inputs.active, self.iterates.own_entries
        self.comm_step.close()
        del self.comm_step  # breaks a reference cycle, so that tensors are freed at once
        # All ranks must write the same parameters together: constraints sum norms over ranks, and an averaging stores
        # numbers of each parameter, such as a sum of weights. A rank whose shard of a parameter is empty therefore
        # writes it too, with an empty update.
        if chosen := [i for i in self.exchange.at_end if active[i]]:
            for i in (i for i in chosen if i not in self._waiting):
                self._waiting[i] = parameters[i], torch.zeros_like(parameters[i])
            self.write(EntryUpdates.of_rows((i, *self._waiting[i]) for i in chosen))
        super().finish()
        self.exchange.gather_parts(active)
