"""A cohort: parameters of one group that were adopted together, their units, and one step of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from eigengraft.clock import Clock
from eigengraft.distributed.stacks import Stack
from eigengraft.distributed.trip import Trip
from eigengraft.numerics import compute_dtype

from .building import build
from .division import Division, local
from .iterates import Iterates, Move
from .iterates.mode import Mode
from .moment import GRADIENTS, PARAMETERS, Hyper, Step
from .recipe import Recipe, Route
from .routing import Facts
from .screening import Screen
from .together import Together, failed_roots
from .unit import Unit
from .weight_decay import WeightDecay
from .writing import Pace, write


class Cohort:
    """Parameters by position; counts `[P]`: gradients that each has seen (what `step` in the state is a view of).

    parts: what this rank holds of each parameter, the parameter itself if it is alone. together: other ranks.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        facts: Sequence[Facts],
        names: Sequence[str],
        recipe: Recipe,
        division: Division | None = None,
    ) -> None:
        self.parameters, self.names, self.recipe = list(parameters), list(names), recipe
        self.parts = [local(parameter) for parameter in parameters]
        self.routed = [recipe.route(fact) for fact in facts]
        self.updates = recipe.updates()
        self.steps = torch.zeros(len(parameters), dtype=torch.int64)
        self.counts: NDArray[np.int64] = self.steps.numpy()
        paths = [path for path, _ in self.routed]
        self.units, exchange = build(self.parameters, self.names, paths, recipe, division)
        self.together: Together | None = None
        if division is not None and exchange is not None:
            self.together = Together(division, exchange, self.parameters, self.names, recipe.failure)
        self.screen = Screen(recipe.failure, self.names)
        self.iterates = Iterates(recipe, self.parts, paths)
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

    def switch(self, mode: Mode) -> None:
        """Makes the parameters hold the iterate to train or the one to evaluate."""
        self.iterates.switch(mode, self.moves)

    def views(self, mode: Mode | None = None) -> list[dict[str, Tensor]]:
        """The state of each parameter: `step`, "<block>/<stage path>/<slot>", views of the stacks, and iterates.

        mode: of which the keys and shapes are asked for; default: the present one.
        """
        states: list[dict[str, Tensor]] = [{"step": step} for step in self.steps.unbind(0)]
        for unit in self.units:
            for row, owner, key in unit.rows():
                states[owner].update((f"{key}/{path}", tensor[row]) for path, tensor in unit.tensors.items())
        for position, state in enumerate(states):
            state.update(self.iterates.view(position, mode))
        return states

    def prepare(self, hyper: Hyper) -> Step | None:
        """Looks at the gradients and changes nothing; None if there is nothing to do. Raises as the screen does."""
        self.parts[:] = [local(parameter) for parameter in self.parameters]
        gradients = [None if parameter.grad is None else local(parameter.grad) for parameter in self.parameters]
        present = np.array([p.grad is not None and p.numel() > 0 for p in self.parameters], dtype=np.bool_)
        if self.together is not None:
            active, mask = self.screen.look_together(gradients, present, self.together, hyper.lr)
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
        if self.together is not None:
            now.trip = self._depart(now, self.together)
        for unit in self.units:
            if now.trip is not None and unit.family is not None:
                now.trip.done(unit.family)
            for part, priming in self._phases(unit, now.active):
                stack, rows = unit.stack.select(part)
                if len(stack.owners):
                    self._advance(unit, stack, rows, now, priming)
        if now.trip is not None:
            for position, update in now.trip.close().items():
                if now.active[position] and self.moves[position] > 0:  # not a gradient that only primed
                    now.buffers.setdefault(self.routed[position][0], {})[position] = update
        for path, whole in now.buffers.items():
            self._write(path, list(whole), list(whole.values()), now)

    def _depart(self, now: Step, together: Together) -> Trip:
        """Sends gradients, and what decays if a stage needs it, on their way to the owners of blocks."""
        trip = Trip(together.exchange)
        if together.exchange.replicated:
            return trip
        used = [self.updates[path] for path in {path for path, _ in self.routed}]
        if any("parameter_rms" in stage.requires for update in used for _, stage in update.stages()):
            now.rms = together.rms(self.parts)
        trip.send([self._with_decay(position, now) for position in range(len(self.parts))], GRADIENTS)
        if any(update.after_decay for update in used):
            trip.send(self.iterates.decaying(), PARAMETERS)
        return trip

    def _with_decay(self, position: int, now: Step) -> Tensor | None:
        """What this rank holds of a gradient, with its decay if that is part of the gradient."""
        gradient: Tensor | None = now.gradients[position]
        decay, rate = self._decay(self.routed[position][0], now.hyper)
        if gradient is None or not (decay.in_gradient and rate):
            return gradient
        dtype = compute_dtype(gradient.dtype)
        return torch.add(gradient.to(dtype), self.parts[position].to(dtype), alpha=rate)

    def _phases(self, unit: Unit, active: NDArray[np.bool_]) -> Iterator[tuple[NDArray[np.bool_], bool]]:
        if unit.lagging and (self.counts[active] == 1).any():
            yield active & (self.counts == 1), True
            yield active & (self.counts > 1), False
        else:
            yield active, False

    def _advance(self, unit: Unit, stack: Stack, rows: Tensor | None, now: Step, priming: bool) -> None:
        hyper = now.hyper
        gradient = self._gather(unit, stack, rows, now, GRADIENTS)
        clock = unit.clock(stack, rows, self.counts, self._signals(unit, stack, now))
        mask = None if now.mask is None else now.mask[torch.from_numpy(stack.owners).to(stack.device)]
        if priming:
            unit.prime(gradient, rows, mask, clock)
        else:
            direction = unit.direct(gradient, rows, mask, clock)
            if unit.rule.after_decay:
                term = self._pace(unit.path, hyper).decay_term(
                    self._gather(unit, stack, rows, now, PARAMETERS), direction
                )
                direction = unit.finish(gradient, direction + term, rows, mask, clock)
            if now.trip is not None and unit.family is not None:
                now.trip.deliver(unit.family, rows, direction)
            else:
                self._deliver(unit.path, stack, direction, now)
        self._check_roots(unit, clock)

    def _gather(self, unit: Unit, stack: Stack, rows: Tensor | None, now: Step, what: str) -> Tensor:
        """Blocks of the gradients, or of what decays: from this rank's tensors, or from what has come from others."""
        if now.trip is not None and unit.family is not None and now.trip.carries(what):
            whole = now.trip.stack(unit.family, what)
            return whole if rows is None else whole.index_select(0, rows)
        if what == PARAMETERS:
            return stack.gather(self.iterates.decaying())
        gradient = stack.gather(now.gradients)
        decay, rate = self._decay(unit.path, now.hyper)
        if decay.in_gradient and rate:
            gradient = torch.add(gradient, stack.gather(self.parts), alpha=rate)
        return gradient

    def _deliver(self, path: str, stack: Stack, direction: Tensor, now: Step) -> None:
        """Writes the parameters that are one block; collects the blocks of the others."""
        if all(piece.whole for _, piece in stack.pieces):
            self._write(path, stack.owners.tolist(), list(direction.unbind(0)), now)
            return
        buffers = now.buffers.setdefault(path, {})
        for owner, piece in stack.pieces:
            if owner not in buffers:
                buffers[owner] = torch.empty(piece.merged, dtype=stack.dtype, device=stack.device)
        stack.scatter(direction, buffers)

    def _write(self, path: str, owners: list[int], updates: list[Tensor], now: Step) -> None:
        parameters = [self.parts[owner] for owner in owners]
        shaped = [u if u.shape == p.shape else u.reshape(p.shape) for u, p in zip(updates, parameters, strict=True)]
        masks = None if now.mask is None else [now.mask[owner] for owner in owners]
        pace = self._pace(path, now.hyper)
        if self.updates[path].after_decay:
            pace = pace.without_decay
        if self.iterates:
            self.iterates.step(owners, self.moves[owners], Move(shaped, pace, masks), now.hyper.lr)
        else:
            write(parameters, shaped, pace, masks)

    def _decay(self, path: str, hyper: Hyper) -> tuple[WeightDecay, float]:
        """The decay rule of an update and its rate; a route's own rule does not follow the group's rate."""
        rule = self.updates[path]
        if isinstance(rule, Route) and rule.weight_decay is not None:
            return rule.weight_decay, rule.weight_decay.rate
        return self.recipe.weight_decay, hyper.rate

    def _pace(self, path: str, hyper: Hyper) -> Pace:
        rule = self.updates[path]
        decay, rate = self._decay(path, hyper)
        ratio = rule.lr_ratio if isinstance(rule, Route) else 1.0
        return Pace(hyper.lr * ratio, decay.alpha(rate, hyper.lr * ratio, hyper.peak * ratio), decay)

    def _signals(self, unit: Unit, stack: Stack, now: Step) -> dict[str, Any]:
        hyper = now.hyper
        signals: dict[str, Any] = {}
        if "lr" in unit.signals:
            signals["lr"] = self._pace(unit.path, hyper).lr
        if "parameter_rms" in unit.signals and now.rms is not None:
            signals["parameter_rms"] = now.rms[torch.from_numpy(stack.owners).to(stack.device)].to(stack.dtype)
        elif "parameter_rms" in unit.signals:
            owners = list(dict.fromkeys(stack.owners.tolist()))
            norms = torch._foreach_norm([self.parts[o].to(stack.dtype) for o in owners])
            means = torch._foreach_div(norms, [self.parameters[o].numel() ** 0.5 for o in owners])
            rms = dict(zip(owners, means, strict=True))
            signals["parameter_rms"] = torch.stack([rms[o] for o in stack.owners.tolist()])
        return signals

    def _check_roots(self, unit: Unit, clock: Clock) -> None:
        bad = unit.failing(clock, self.recipe.failure.roots)
        if bad and self.together is not None:
            self.together.failed.update(int(unit.stack.owners[row]) for row in bad)
        elif bad:
            names = sorted({self.names[unit.stack.owners[row]] for row in bad})
            raise failed_roots(unit.path or "update", self.recipe.failure.roots, names)
