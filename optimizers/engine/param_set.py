"""A parameter set: parameters of one group that were adopted together, their stacks, and one step of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from eigengraft.distributed.comm_step import CommStep
from eigengraft.distributed.layouts import local
from eigengraft.numerics import compute_dtype
from eigengraft.stacks import Stack
from eigengraft.step_context import StepContext

from ..apply import IterateStore, ParameterUpdate
from ..apply.mode import Mode
from ..apply.weight_decay import WeightDecay
from ..apply.write import StepScale, write
from ..recipe.recipe import Recipe, Route
from ..recipe.routing import ParamInfo
from ..sharding.assignment import Assignment
from ..sharding.rank_sync import RankSync, failed_roots
from .build import build
from .finite_check import Screen
from .stack_state import StackState
from .step_inputs import GRADIENTS, PARAMETERS, Hyper, Step


class ParamSet:
    """Parameters by position; counts `[P]`: gradients that each has seen (what `step` in the state is a view of).
    parts: what this rank holds of each parameter, the parameter itself if it is alone. together: other ranks.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        facts: Sequence[ParamInfo],
        names: Sequence[str],
        recipe: Recipe,
        assignment: Assignment | None = None,
    ) -> None:
        self.parameters, self.names, self.recipe = list(parameters), list(names), recipe
        self.parts = [local(parameter) for parameter in parameters]
        self.routed, self.updates = [recipe.route(fact) for fact in facts], recipe.updates()
        self.steps = torch.zeros(len(parameters), dtype=torch.int64)
        self.counts: NDArray[np.int64] = self.steps.numpy()
        paths = [path for path, _ in self.routed]
        self.stack_states, comm_plan = build(self.parameters, self.names, paths, recipe, assignment)
        self.rank_sync: RankSync | None = None
        if assignment is not None and comm_plan is not None:
            self.rank_sync = RankSync(assignment, comm_plan, self.parameters, self.names, recipe.failure)
        self.screen = Screen(recipe.failure, self.names)
        bound = {p: u.constraints for p, u in self.updates.items()}
        self.iterates = IterateStore(recipe.averaging, bound, self.parts, paths)
        self._unmoved: NDArray[np.int64] = np.array([self.updates[path].lagging() for path in paths], dtype=np.int64)

    @property
    def skipped(self) -> Counter[str]:
        """How often the gradient of each parameter was not usable."""
        return self.screen.skipped

    def settle(self) -> None:
        """Takes back the step of parameters whose last gradient turned out, on the device, to be unusable."""
        bad = self.screen.settle()
        self.counts[bad] -= 1
        self.screen.complain(bad, "one step ago; these parameters were left as they were")

    @property
    def moves(self) -> NDArray[np.int64]:
        """`[P]`, updates that each parameter has had: gradients without one that only primed."""
        return self.counts - self._unmoved

    def swap_iterate(self, mode: Mode) -> None:
        """Makes the parameters hold the iterate to train or the one to evaluate."""
        self.iterates.swap(mode, self.moves)

    def views(self, mode: Mode | None = None) -> list[dict[str, Tensor]]:
        """The state of each parameter: `step`, "<block>/<stage path>/<slot>", views of the stacks, and iterates.

        mode: of which the keys and shapes are asked for; default: the present one.
        """
        states: list[dict[str, Tensor]] = [{"step": step} for step in self.steps.unbind(0)]
        for stack_state in self.stack_states:
            for row, owner, key in stack_state.rows():
                states[owner].update((f"{key}/{path}", tensor[row]) for path, tensor in stack_state.tensors.items())
        for position, state in enumerate(states):
            state.update(self.iterates.view(position, mode))
        return states

    def prepare(self, hyper: Hyper) -> Step | None:
        """Looks at the gradients and changes nothing; None if there is nothing to do. Raises as the screen does."""
        self.parts[:] = [local(parameter) for parameter in self.parameters]
        gradients = [None if parameter.grad is None else local(parameter.grad) for parameter in self.parameters]
        present = np.array([p.grad is not None and p.numel() > 0 for p in self.parameters], dtype=np.bool_)
        if self.rank_sync is not None:
            active, mask = self.screen.look_together(gradients, present, self.rank_sync, hyper.lr)
            return Step(gradients, active, mask, hyper) if active.any() or mask is not None else None
        if not present.any():
            return None
        if isinstance(hyper.lr, float) and hyper.lr == 0 and not any(bool(g.any()) for g in gradients if g is not None):
            return None  # lr 0 and gradients 0: somebody only wants to see the state
        active, mask = self.screen.look(gradients, present)
        return Step(gradients, active, mask, hyper) if active.any() else None

    def step(self, now: Step) -> None:
        """One update of every parameter that has a usable gradient."""
        self.counts[now.active] += 1
        if self.iterates:
            self.iterates.begin(np.flatnonzero(now.active & (self.moves == 1)).tolist())
        if self.rank_sync is not None:
            now.comm_step = self._depart(now, self.rank_sync)
        for stack_state in self.stack_states:
            if now.comm_step is not None and stack_state.block_group is not None:
                now.comm_step.done(stack_state.block_group)
            for part, priming in self._phases(stack_state, now.active):
                stack, rows = stack_state.stack.select(part)
                if len(stack.param_ids):
                    self._advance(stack_state, stack, rows, now, priming)
        if now.comm_step is not None:
            for position, update in now.comm_step.close().items():
                if now.active[position] and self.moves[position] > 0:  # not a gradient that only primed
                    now.buffers.setdefault(self.routed[position][0], {})[position] = update
        for path, whole in now.buffers.items():
            self._write(path, list(whole), list(whole.values()), now)

    def _depart(self, now: Step, rank_sync: RankSync) -> CommStep:
        """Sends gradients, and what decays if a stage needs it, on their way to the owners of blocks."""
        comm_step = CommStep(rank_sync.comm_plan)
        if rank_sync.comm_plan.replicated:
            return comm_step
        used = [self.updates[path] for path in {path for path, _ in self.routed}]
        if any("parameter_rms" in stage.requires for update in used for _, stage in update.stages()):
            now.rms = rank_sync.rms(self.parts)
        comm_step.send([self._with_decay(position, now) for position in range(len(self.parts))], GRADIENTS)
        if any(update.after_decay for update in used):
            comm_step.send(self.iterates.decaying(), PARAMETERS)
        return comm_step

    def _with_decay(self, position: int, now: Step) -> Tensor | None:
        """What this rank holds of a gradient, with its decay if that is part of the gradient."""
        gradient: Tensor | None = now.gradients[position]
        decay, rate = self._decay(self.routed[position][0], now.hyper)
        if gradient is None or not (decay.in_gradient and rate):
            return gradient
        dtype = compute_dtype(gradient.dtype)
        return torch.add(gradient.to(dtype), self.parts[position].to(dtype), alpha=rate)

    def _phases(self, stack_state: StackState, active: NDArray[np.bool_]) -> Iterator[tuple[NDArray[np.bool_], bool]]:
        if stack_state.lagging and (self.counts[active] == 1).any():
            yield active & (self.counts == 1), True
            yield active & (self.counts > 1), False
        else:
            yield active, False

    def _advance(self, stack_state: StackState, stack: Stack, rows: Tensor | None, now: Step, priming: bool) -> None:
        hyper = now.hyper
        gradient = self._gather(stack_state, stack, rows, now, GRADIENTS)
        context = stack_state.context(stack, rows, self.counts, self._signals(stack_state, stack, now))
        mask = None if now.mask is None else now.mask[torch.from_numpy(stack.param_ids).to(stack.device)]
        if priming:
            stack_state.prime(gradient, rows, mask, context)
        else:
            direction = stack_state.direction(gradient, rows, mask, context)
            if stack_state.rule.after_decay:
                term = self._pace(stack_state.path, hyper).decay_term(
                    self._gather(stack_state, stack, rows, now, PARAMETERS), direction
                )
                direction = stack_state.after_decay(gradient, direction + term, rows, mask, context)
            if now.comm_step is not None and stack_state.block_group is not None:
                now.comm_step.deliver(stack_state.block_group, rows, direction)
            else:
                self._deliver(stack_state.path, stack, direction, now)
        self._check_roots(stack_state, context)

    def _gather(self, stack_state: StackState, stack: Stack, rows: Tensor | None, now: Step, what: str) -> Tensor:
        """Blocks of the gradients, or of what decays: from this rank's tensors, or from what has come from others."""
        if now.comm_step is not None and stack_state.block_group is not None and now.comm_step.carries(what):
            whole = now.comm_step.stack(stack_state.block_group, what)
            return whole if rows is None else whole.index_select(0, rows)
        if what == PARAMETERS:
            return stack.gather(self.iterates.decaying())
        gradient = stack.gather(now.gradients)
        decay, rate = self._decay(stack_state.path, now.hyper)
        if decay.in_gradient and rate:
            gradient = torch.add(gradient, stack.gather(self.parts), alpha=rate)
        return gradient

    def _deliver(self, path: str, stack: Stack, direction: Tensor, now: Step) -> None:
        """Writes the parameters that are one block; collects the blocks of the others."""
        if all(grid.whole for _, grid in stack.grids):
            self._write(path, stack.param_ids.tolist(), list(direction.unbind(0)), now)
            return
        buffers = now.buffers.setdefault(path, {})
        for owner, grid in stack.grids:
            if owner not in buffers:
                buffers[owner] = torch.empty(grid.merged, dtype=stack.dtype, device=stack.device)
        stack.scatter(direction, buffers)

    def _write(self, path: str, owners: list[int], updates: list[Tensor], now: Step) -> None:
        parameters = [self.parts[owner] for owner in owners]
        shaped = [u if u.shape == p.shape else u.reshape(p.shape) for u, p in zip(updates, parameters, strict=True)]
        masks = None if now.mask is None else [now.mask[owner] for owner in owners]
        step_scale = self._pace(path, now.hyper)
        if self.updates[path].after_decay:
            step_scale = step_scale.without_decay
        if self.iterates:
            self.iterates.step(owners, self.moves[owners], ParameterUpdate(shaped, step_scale, masks), now.hyper.lr)
        else:
            write(parameters, shaped, step_scale, masks)

    def _decay(self, path: str, hyper: Hyper) -> tuple[WeightDecay, float]:
        """The decay rule of an update and its rate; a route's own rule does not follow the group's rate."""
        rule = self.updates[path]
        if isinstance(rule, Route) and rule.weight_decay is not None:
            return rule.weight_decay, rule.weight_decay.rate
        return self.recipe.weight_decay, hyper.weight_decay

    def _pace(self, path: str, hyper: Hyper) -> StepScale:
        rule = self.updates[path]
        decay, rate = self._decay(path, hyper)
        ratio = rule.lr_ratio if isinstance(rule, Route) else 1.0
        return StepScale(hyper.lr * ratio, decay.alpha(rate, hyper.lr * ratio, hyper.peak_lr * ratio), decay)

    def _signals(self, stack_state: StackState, stack: Stack, now: Step) -> dict[str, Any]:
        hyper = now.hyper
        signals: dict[str, Any] = {}
        if "lr" in stack_state.signals:
            signals["lr"] = self._pace(stack_state.path, hyper).lr
        if "parameter_rms" in stack_state.signals and now.rms is not None:
            signals["parameter_rms"] = now.rms[torch.from_numpy(stack.param_ids).to(stack.device)].to(stack.dtype)
        elif "parameter_rms" in stack_state.signals:
            owners = list(dict.fromkeys(stack.param_ids.tolist()))
            norms = torch._foreach_norm([self.parts[o].to(stack.dtype) for o in owners])
            means = torch._foreach_div(norms, [self.parameters[o].numel() ** 0.5 for o in owners])
            rms = dict(zip(owners, means, strict=True))
            signals["parameter_rms"] = torch.stack([rms[o] for o in stack.param_ids.tolist()])
        return signals

    def _check_roots(self, stack_state: StackState, context: StepContext) -> None:
        bad = stack_state.failing(context, self.recipe.failure.roots)
        if bad and self.rank_sync is not None:
            self.rank_sync.failed.update(int(stack_state.stack.param_ids[row]) for row in bad)
        elif bad:
            names = sorted({self.names[stack_state.stack.param_ids[row]] for row in bad})
            raise failed_roots(stack_state.path or "update", self.recipe.failure.roots, names)
