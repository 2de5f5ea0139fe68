"""Exchange of blocks: gradients to where blocks are computed, updates to where parameters lie.

`LocalExchange` finds everything in this process. `RankExchange` sends blocks to their owners and updates back, and
leaves to a `LocalExchange` what needs no messages. A parameter set steps through either by the same lines.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from eigengraft.distributed.comm_plan import BlockGroup, CommPlan
from eigengraft.distributed.comm_step import CommStep, Source
from eigengraft.distributed.layouts import local
from eigengraft.distributed.param_gather import ParamGather
from eigengraft.distributed.rank_group import RankGroup
from eigengraft.numerics import compute_dtype
from eigengraft.stacks import Stack

from ..apply import IterateStore
from ..recipe.recipe import Recipe
from ..sharding.placement import ParamSpec
from ..sharding.rank_sync import RankSync, failed_roots
from .build import bucket_bytes
from .finite_check import GradientSurvey, LocalSurvey
from .stack_state import ActiveBlocks
from .step_inputs import GatherSource, Step


class BlockExchange(Protocol):
    """Brings blocks to where they are computed and updates to where parameters lie.

    In a step: `survey`, `begin`, then for every stack in order `gather` and `deliver`, then `finish`.
    """

    def survey(self, gradients: Sequence[Tensor | None], present: NDArray[np.bool_]) -> GradientSurvey:
        """What is known of the full gradients; present: `[P]`, which parameters have one here."""

    def begin(self, step: Step) -> None:
        """Starts the exchange of one step."""

    def gather(self, blocks: ActiveBlocks, source: GatherSource) -> Tensor:
        """The blocks of gradients, with the decay that belongs into them, or of what decays, `[n, *block]`."""

    def parameter_rms(self, stack: Stack) -> Tensor:
        """The root mean square of the full parameter that each block belongs to, `[n]`."""

    def deliver(self, blocks: ActiveBlocks, direction: Tensor) -> Mapping[int, Tensor]:
        """Takes the directions of blocks; returns updates that are complete by now, by position of the parameter."""

    def report_failed_roots(self, path: str, positions: Sequence[int]) -> None:
        """Says that roots of these parameters have failed too often: ArithmeticError, here or on all ranks."""

    def finish(self) -> Mapping[int, Tensor]:
        """The updates that no `deliver` has returned, by position; all updates that it has returned are written."""


class LocalExchange:
    """Blocks and updates of what this process holds: views and copies, no messages."""

    def __init__(self, specs: Sequence[ParamSpec], iterates: IterateStore, tolerated: int) -> None:
        self.names = [spec.name for spec in specs]
        self.iterates, self.tolerated = iterates, tolerated
        self._numels = [math.prod(spec.shape) for spec in specs]
        self._updates: dict[int, Tensor] = {}
        self._step: Step | None = None

    @property
    def step(self) -> Step:
        """The step under way."""
        assert self._step is not None
        return self._step

    def survey(self, gradients: Sequence[Tensor | None], present: NDArray[np.bool_]) -> GradientSurvey:
        return LocalSurvey(gradients, present)

    def begin(self, step: Step) -> None:
        self._step, self._updates = step, {}

    def gather(self, blocks: ActiveBlocks, source: GatherSource) -> Tensor:
        if source == "parameters":
            return blocks.stack.gather(self.iterates.decaying())
        gradient = blocks.stack.gather(self.step.gradients)
        rate = self.step.rates.gradient_decay(blocks.stack_state.path)
        return torch.add(gradient, blocks.stack.gather(self.iterates.parameters), alpha=rate) if rate else gradient

    def parameter_rms(self, stack: Stack) -> Tensor:
        positions = list(dict.fromkeys(stack.param_ids.tolist()))
        norms = torch._foreach_norm([self.iterates.parameters[p].to(stack.dtype) for p in positions])
        means = torch._foreach_div(norms, [self._numels[p] ** 0.5 for p in positions])
        rms = dict(zip(positions, means, strict=True))
        return torch.stack([rms[p] for p in stack.param_ids.tolist()])

    def deliver(self, blocks: ActiveBlocks, direction: Tensor) -> Mapping[int, Tensor]:
        stack = blocks.stack
        if all(grid.is_parameter for _, grid in stack.grids):
            return dict(zip(stack.param_ids.tolist(), direction.unbind(0), strict=True))
        for position, grid in stack.grids:
            if position not in self._updates:
                self._updates[position] = torch.empty(grid.merged, dtype=stack.dtype, device=stack.device)
        stack.scatter(direction, self._updates)
        return {}

    def report_failed_roots(self, path: str, positions: Sequence[int]) -> None:
        names = sorted({self.names[position] for position in positions})
        raise failed_roots(path or "update", self.tolerated, names)

    def finish(self) -> Mapping[int, Tensor]:
        updates, self._updates, self._step = self._updates, {}, None
        return updates


class RankExchange:
    """Blocks travel to the ranks that own them and updates back; all ranks call the same methods in the same order."""

    def __init__(
        self,
        local: LocalExchange,
        parameters: Sequence[Tensor],
        specs: Sequence[ParamSpec],
        recipe: Recipe,
        rank_group: RankGroup,
        block_groups: Sequence[BlockGroup],
    ) -> None:
        self.local, self.rank_sync = local, RankSync(rank_group, specs, recipe.failure)
        self.paths = [spec.path for spec in specs]
        layouts = [spec.placement.layout for spec in specs if spec.placement is not None]
        names, size = [spec.name for spec in specs], bucket_bytes(recipe, rank_group.size)
        self.comm_plan = CommPlan(rank_group, layouts, block_groups, names, size)
        self._param_gather = ParamGather(rank_group, names, recipe.distribution.bucket)
        self._parameters = parameters
        self._gathered = [i for i, spec in enumerate(specs) if spec.placement and spec.placement.gathers_rows]
        used = [recipe.updates()[path] for path in dict.fromkeys(self.paths)]
        self._needs_rms = any("parameter_rms" in stage.requires for rule in used for _, stage in rule.stages())
        self._needs_parameters = any(rule.after_decay for rule in used)
        self._rms: Tensor | None = None
        self._comm_step: CommStep | None = None

    @property
    def comm_step(self) -> CommStep:
        """The messages of the step under way."""
        assert self._comm_step is not None
        return self._comm_step

    def survey(self, gradients: Sequence[Tensor | None], present: NDArray[np.bool_]) -> GradientSurvey:
        return self.rank_sync.survey(gradients, present)

    def begin(self, step: Step) -> None:
        self.local.begin(step)
        if self._needs_rms and not self.comm_plan.replicated:
            self._rms = self.rank_sync.parameter_rms(self.local.iterates.parameters)
        sources: dict[str, Source] = {"gradients": lambda position: self._decayed(position, step)}
        if self._needs_parameters:
            decaying = self.local.iterates.decaying()
            sources["parameters"] = lambda position: decaying[position]
        self._comm_step = CommStep(self.comm_plan, sources)

    def _decayed(self, position: int, step: Step) -> Tensor | None:
        """What this rank holds of a gradient, with the decay that belongs into it."""
        gradient: Tensor | None = step.gradients[position]
        rate = step.rates.gradient_decay(self.paths[position])
        if gradient is None or not rate:
            return gradient
        dtype = compute_dtype(gradient.dtype)
        return torch.add(gradient.to(dtype), self.local.iterates.parameters[position].to(dtype), alpha=rate)

    def gather(self, blocks: ActiveBlocks, source: GatherSource) -> Tensor:
        group = blocks.stack_state.block_group
        if group is None:
            return self.local.gather(blocks, source)
        self.comm_step.advance(group)
        if not self.comm_step.carries(source):
            return self.local.gather(blocks, source)
        stack = self.comm_step.gather(group, source)
        return stack if blocks.rows is None else stack.index_select(0, blocks.rows)

    def parameter_rms(self, stack: Stack) -> Tensor:
        if self._rms is None:
            return self.local.parameter_rms(stack)
        return self._rms[torch.from_numpy(stack.param_ids).to(stack.device)].to(stack.dtype)

    def deliver(self, blocks: ActiveBlocks, direction: Tensor) -> Mapping[int, Tensor]:
        group = blocks.stack_state.block_group
        if group is None:
            return self.local.deliver(blocks, direction)
        self.comm_step.deliver(group, blocks.rows, direction)
        return self.comm_step.take()

    def report_failed_roots(self, path: str, positions: Sequence[int]) -> None:
        self.rank_sync.failed.update(positions)

    def finish(self) -> Mapping[int, Tensor]:
        active, updates = self.local.step.active, {**self.local.finish(), **self.comm_step.close()}
        self._comm_step, self._rms = None, None
        gathered = {position: local(self._parameters[position]) for position in self._gathered if active[position]}
        self._param_gather.run({position: parameter.detach() for position, parameter in gathered.items()})
        return updates
