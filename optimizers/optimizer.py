"""A recipe as a `torch.optim.Optimizer`."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from . import checkpoint
from .cohort import Cohort
from .division import Divisions
from .groups import check_keys, check_values, inherit, make_cohorts, number, require_matches
from .iterates.mode import Mode, require_training, switch
from .loading import Source, load_recipe
from .moment import Hyper
from .recipe import Recipe
from .reporting import Assignment, SlotSize, assignments, describe, slot_bytes, slot_sizes
from .routing import Facts, examine
from .sharing import closing_hook, fill, gathered, give_state, visible_state
from .unit import Unit


class Optimizer(torch.optim.Optimizer):
    """W <- W - lr alpha W - lr U  with U what the recipe's update chain makes of the gradients.

    params: what torch optimizers take: tensors, (name, tensor) pairs, or groups. A group may set `lr` and
    `weight_decay`.
    recipe: a shipped name, a YAML path, a mapping, a list of stages or a `Recipe`. lr, weight_decay: default the
    recipe's. All state is allocated here; parameters with `requires_grad=False` get theirs if they are thawed later.
    """

    def __init__(
        self,
        params: Iterable[Any],
        recipe: Source = "adamw",
        lr: float | Tensor | None = None,
        weight_decay: float | None = None,
        *,
        facts: Mapping[int, Facts] | None = None,
    ) -> None:
        self.recipe: Recipe = load_recipe(recipe)
        self._known = dict(facts or {})
        self._facts: list[list[Facts]] = []
        self._cohorts: list[list[Cohort]] = []
        self._divisions = Divisions(self.recipe)
        self._loaded: list[tuple[list[Cohort], Mapping[Tensor, Mapping[str, Tensor]]]] = []
        defaults = {
            "lr": self.recipe.lr if lr is None else lr,
            "weight_decay": self.recipe.weight_decay.rate if weight_decay is None else weight_decay,
        }
        if isinstance(params, torch.nn.Module):
            raise TypeError(
                "params: parameters are required, got a module; use eigengraft.compose or model.named_parameters()"
            )
        super().__init__(params, defaults)
        self._known = {}
        require_matches(self.recipe, [fact for facts in self._facts for fact in facts])

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group: `params`, optionally `lr` and `weight_decay`; `fused` and `foreach` are ignored.

        Anything else is a ValueError, after which the optimizer is as it was.
        """
        group = {key: value for key, value in param_group.items() if key not in ("fused", "foreach")}
        check_keys(group, self.recipe.to_json())
        index = len(self.param_groups)
        super().add_param_group(group)
        try:
            self._complete_group(index)
        except Exception:
            del self.param_groups[index:], self._facts[index:], self._cohorts[index:]
            self._divisions.forget(index)
            raise

    def _complete_group(self, index: int) -> None:
        group = self.param_groups[index]
        check_values(group)
        group.setdefault("peak_lr", float(group["lr"]))
        group["recipe"] = self.recipe.to_json()
        group["iterate"] = self.param_groups[0]["iterate"] if index else "train"
        names = group.get("param_names") or [None] * len(group["params"])
        known = self._known
        self._facts.append([known.get(id(p)) or examine(n, p) for n, p in zip(names, group["params"], strict=True)])
        self._cohorts.append([])
        self._divisions.add(group["params"], self._facts[-1], self.labels(index))
        self._divisions.agree(index, group)
        self._install(index, self._build(index, {id(p) for p in group["params"] if p.requires_grad}), {})

    def _build(self, index: int, wanted: set[int]) -> list[Cohort]:
        """Fresh cohorts for those parameters of a group whose id is wanted, one for each device and set of ranks.

        They depend on nothing but that set, so that a copy or a resumed run has the same ones.
        """
        rows = zip(self.param_groups[index]["params"], self._facts[index], self.labels(index), strict=True)
        return make_cohorts([row for row in rows if id(row[0]) in wanted], self.recipe, self._divisions, index)

    def _install(self, index: int, cohorts: list[Cohort], values: Mapping[Tensor, Mapping[str, Tensor]]) -> None:
        """Makes cohorts the group's, and fills their state from `values` where a parameter is in there."""
        for cohort in cohorts:
            cohort.iterates.hold(self.param_groups[index]["iterate"])
            self.show(cohort)
            for parameter in cohort.parameters:
                fill(self.state[parameter], values.get(parameter, {}))
        inherit(cohorts, self._cohorts[index])
        self._cohorts[index] = cohorts

    def show(self, cohort: Cohort) -> None:
        """Puts the state of a cohort where torch looks for it."""
        self.state.update(zip(cohort.parameters, visible_state(cohort), strict=True))

    def facts(self, index: int) -> list[Facts]:
        """What routes were told about the parameters of a group."""
        return self._facts[index]

    def labels(self, index: int) -> list[str]:
        """What errors and counts call the parameters of a group."""
        return [fact.name or f"group {index} parameter {place}" for place, fact in enumerate(self._facts[index])]

    @property
    def iterate(self) -> Mode:
        """Which iterate the parameters hold: the one to "train" or the one to "eval"."""
        mode: Mode = self.param_groups[0].get("iterate", "train") if self.param_groups else "train"
        return mode

    def train(self) -> None:
        """Makes the parameters hold the iterate that is trained again, bit for bit."""
        switch(self, self._all(), "train")

    def eval(self) -> None:
        """Makes the parameters hold the iterate to evaluate, where the recipe has an `averaging`.

        Until `train()` the training iterate is in the state; what is written into the parameters meanwhile is lost.
        Under `fully_shard` call `model.reshard()` before `train()`: a forward leaves gathered parameters behind.
        """
        switch(self, self._all(), "eval")

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update. A closure is called once, with gradients enabled, before anything else; its value is returned."""
        require_training(self.iterate)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._settle()
        ready = []
        for index, group in enumerate(self.param_groups):
            self._thaw(index)
            hyper = Hyper(number(group, "lr"), float(group["peak_lr"]), float(number(group, "weight_decay")))
            ready += [(cohort, cohort.prepare(hyper)) for cohort in self._cohorts[index]]
        for cohort, now in ready:
            if now is not None:
                cohort.step(now)
        return loss

    def _thaw(self, index: int) -> None:
        """Gives state to parameters that were frozen and now have a gradient."""
        parameters = self.param_groups[index]["params"]
        if any(p.grad is not None and p not in self.state for p in parameters):
            owned = {p: self.state[p] for p in parameters if p in self.state}
            wanted = {id(p) for p in parameters if p in owned or p.grad is not None}
            self._install(index, self._build(index, wanted), owned)

    def _settle(self) -> None:
        for cohort in self._all():
            cohort.settle()

    def divided(self) -> list[list[Cohort]]:
        """The cohorts of each group, one for each device and set of ranks."""
        return self._cohorts

    def _all(self) -> list[Cohort]:
        return [cohort for cohorts in self._cohorts for cohort in cohorts]

    @property
    def skipped(self) -> Counter[str]:
        """How often each parameter was left alone because its gradient was not finite, by name."""
        self._settle()
        return sum((cohort.skipped for cohort in self._all()), Counter())

    def assignments(self) -> list[Assignment]:
        """Where each parameter went and why, in the order of the groups."""
        return assignments(self)

    def slot_sizes(self) -> list[SlotSize]:
        """What each slot was declared to take, in bytes, and what it takes in its storage."""
        return slot_sizes(self)

    def units(self) -> list[Unit]:
        """The stacks with their state."""
        return [unit for cohort in self._all() for unit in cohort.units]

    def state_bytes(self) -> int:
        """Bytes of all state tensors."""
        return sum(slot_bytes(state) for state in self.state.values())

    def __repr__(self) -> str:
        return describe(self)

    def state_dict(self) -> dict[str, Any]:
        """As in torch. State keys are "<block>/<stage path>/<slot>" and, for iterates, "averaging/<slot>".

        Every group holds the recipe as JSON text, and in `iterate` which iterate the parameters hold. Where parameters
        are divided over ranks all of them must call it: state comes as DTensors, which cannot be pickled as they are;
        torch.distributed.checkpoint takes them, or `full_state_dict`.
        """
        self._settle()
        with closing_hook(self.register_state_dict_post_hook(give_state, prepend=True)):
            return super().state_dict()

    def full_state_dict(self) -> dict[str, Any]:
        """The state dict with the whole state as plain tensors on the CPU, for torch.save; all ranks call it."""
        whole: dict[str, Any] = gathered(self.state_dict())
        return whole

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Bit-exact, strict: another recipe, missing, extra or misshapen state is one ValueError, nothing changes."""
        self._settle()
        with closing_hook(self.register_load_state_dict_pre_hook(checkpoint.take_state)):
            super().load_state_dict(state_dict)

    def __getstate__(self) -> dict[str, Any]:
        self._settle()
        skipped = [[cohort.skipped for cohort in cohorts] for cohorts in self._cohorts]
        return {**super().__getstate__(), "recipe": self.recipe, "_facts": self._facts, "_skipped": skipped}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "_facts" not in state:  # torch's load_state_dict; what take_state kept is installed
            views, loaded = self.state, self._loaded
            super().__setstate__(state)
            self.state, self._loaded = views, []
            for index, (cohorts, values) in enumerate(loaded):
                self.param_groups[index].setdefault("iterate", "train")
                self.param_groups[index]["recipe"] = self.recipe.to_json()
                self._install(index, cohorts, values)
            return
        skipped, saved = state.pop("_skipped"), state.pop("state")
        self._known, self._loaded = {}, []
        super().__setstate__({**state, "state": defaultdict(dict)})
        self._cohorts = [[] for _ in self.param_groups]
        self._divisions = Divisions(self.recipe)
        for index, group in enumerate(self.param_groups):
            self._divisions.add(group["params"], self._facts[index], self.labels(index))
            self._install(index, self._build(index, {id(p) for p in group["params"] if p in saved}), saved)
            for cohort, counts in zip(self._cohorts[index], skipped[index], strict=True):
                cohort.skipped.update(counts)
