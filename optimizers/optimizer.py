"""A recipe as a `torch.optim.Optimizer`."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from .apply.mode import Mode
from .checkpoint import strict_load as checkpoint
from .checkpoint.sharded_state import closing_hook, fill, gathered, shard_hook, visible_state
from .engine.param_set import ParamSet
from .engine.stack_state import StackState
from .engine.step_inputs import Hyper
from .param_groups import check_keys, check_values, inherit, make_param_sets, number, require_matches
from .recipe.loading import Source, load_recipe
from .recipe.recipe import Recipe
from .recipe.routing import ParamInfo, describe_parameter
from .reporting import RoutedParameter, SlotSize, describe, routing_table, slot_bytes, slot_sizes
from .sharding.assignment import Assignments


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
        infos: Mapping[int, ParamInfo] | None = None,
    ) -> None:
        self.recipe: Recipe = load_recipe(recipe)
        self._known = dict(infos or {})
        self._infos: list[list[ParamInfo]] = []
        self._param_sets: list[list[ParamSet]] = []
        self._assignments = Assignments(self.recipe)
        self._loaded: list[tuple[list[ParamSet], Mapping[Tensor, Mapping[str, Tensor]]]] = []
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
        require_matches(self.recipe, [info for infos in self._infos for info in infos])

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
            del self.param_groups[index:], self._infos[index:], self._param_sets[index:]
            self._assignments.forget(index)
            raise

    def _complete_group(self, index: int) -> None:
        group = self.param_groups[index]
        check_values(group)
        group.setdefault("peak_lr", float(group["lr"]))
        group["recipe"] = self.recipe.to_json()
        group["iterate"] = self.param_groups[0]["iterate"] if index else "train"
        names = group.get("param_names") or [None] * len(group["params"])
        known = self._known
        self._infos.append(
            [known.get(id(p)) or describe_parameter(n, p) for n, p in zip(names, group["params"], strict=True)]
        )
        self._param_sets.append([])
        self._assignments.add(group["params"], self._infos[-1], self.labels(index))
        self._assignments.agree(index, group)
        self._install(index, self._build(index, {id(p) for p in group["params"] if p.requires_grad}), {})

    def _build(self, index: int, wanted: set[int]) -> list[ParamSet]:
        """Fresh parameter sets for those parameters of a group whose id is wanted, one for each device and set of
        ranks.

        They depend on nothing but that set, so that a copy or a resumed run has the same ones.
        """
        rows = zip(self.param_groups[index]["params"], self._infos[index], self.labels(index), strict=True)
        return make_param_sets([row for row in rows if id(row[0]) in wanted], self.recipe, self._assignments, index)

    def _install(self, index: int, param_sets: list[ParamSet], values: Mapping[Tensor, Mapping[str, Tensor]]) -> None:
        """Makes parameter sets the group's, and fills their state from `values` where a parameter is in there."""
        for param_set in param_sets:
            param_set.iterates.hold(self.param_groups[index]["iterate"])
            self.show(param_set)
            for parameter in param_set.parameters:
                fill(self.state[parameter], values.get(parameter, {}))
        inherit(param_sets, self._param_sets[index])
        self._param_sets[index] = param_sets

    def show(self, param_set: ParamSet) -> None:
        """Puts the state of a parameter set where torch looks for it."""
        self.state.update(zip(param_set.parameters, visible_state(param_set), strict=True))

    def infos(self, index: int) -> list[ParamInfo]:
        """Description of each parameter of a group, as routes see it."""
        return self._infos[index]

    def labels(self, index: int) -> list[str]:
        """What errors and counts call the parameters of a group."""
        return [info.name or f"group {index} parameter {place}" for place, info in enumerate(self._infos[index])]

    @property
    def iterate(self) -> Mode:
        """Which iterate the parameters hold: the one to "train" or the one to "eval"."""
        mode: Mode = self.param_groups[0].get("iterate", "train") if self.param_groups else "train"
        return mode

    def train(self) -> None:
        """Makes the parameters hold the iterate that is trained again, bit for bit."""
        self._swap("train")

    def eval(self) -> None:
        """Makes the parameters hold the iterate to evaluate, where the recipe has an `averaging`.

        Until `train()` the training iterate is in the state; what is written into the parameters meanwhile is lost.
        Under `fully_shard` call `model.reshard()` before `train()`: a forward leaves gathered parameters behind.
        """
        self._swap("eval")

    def _swap(self, mode: Mode) -> None:
        if self.recipe.averaging is None or self.iterate == mode:
            return
        self._settle()
        for param_set in self._all():
            param_set.swap_iterate(mode)
            self.show(param_set)
        for group in self.param_groups:
            group["iterate"] = mode

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update. A closure is called once, with gradients enabled, before anything else; its value is returned."""
        if self.iterate != "train":
            raise RuntimeError(
                "Optimizer.step: the parameters must hold the training iterate, got the evaluated one; "
                "call optimizer.train() first"
            )
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._settle()
        ready = []
        for index, group in enumerate(self.param_groups):
            self._thaw(index)
            hyper = Hyper(number(group, "lr"), float(group["peak_lr"]), float(number(group, "weight_decay")))
            ready += [(param_set, param_set.prepare(hyper)) for param_set in self._param_sets[index]]
        for param_set, now in ready:
            if now is not None:
                param_set.step(now)
        return loss

    def _thaw(self, index: int) -> None:
        """Gives state to parameters that were frozen and now have a gradient."""
        parameters = self.param_groups[index]["params"]
        if any(p.grad is not None and p not in self.state for p in parameters):
            owned = {p: self.state[p] for p in parameters if p in self.state}
            wanted = {id(p) for p in parameters if p in owned or p.grad is not None}
            self._install(index, self._build(index, wanted), owned)

    def _settle(self) -> None:
        for param_set in self._all():
            param_set.settle()

    def divided(self) -> list[list[ParamSet]]:
        """The parameter sets of each group, one for each device and set of ranks."""
        return self._param_sets

    def _all(self) -> list[ParamSet]:
        return [param_set for param_sets in self._param_sets for param_set in param_sets]

    @property
    def skipped(self) -> Counter[str]:
        """How often each parameter was left alone because its gradient was not finite, by name."""
        self._settle()
        return sum((param_set.skipped for param_set in self._all()), Counter())

    def routing_table(self) -> list[RoutedParameter]:
        """Where each parameter went and why, in the order of the groups."""
        return routing_table(self)

    def slot_sizes(self) -> list[SlotSize]:
        """What each slot was declared to take, in bytes, and what it takes in its storage."""
        return slot_sizes(self)

    def stack_states(self) -> list[StackState]:
        """The stacks with their state."""
        return [stack_state for param_set in self._all() for stack_state in param_set.stack_states]

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
        with closing_hook(self.register_state_dict_post_hook(shard_hook, prepend=True)):
            return super().state_dict()

    def full_state_dict(self) -> dict[str, Any]:
        """The state dict with the whole state as plain tensors on the CPU, for torch.save; all ranks call it."""
        full: dict[str, Any] = gathered(self.state_dict())
        return full

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Bit-exact, strict: another recipe, missing, extra or misshapen state is one ValueError, nothing changes."""
        self._settle()
        with closing_hook(self.register_load_state_dict_pre_hook(checkpoint.take_state)):
            super().load_state_dict(state_dict)

    def __getstate__(self) -> dict[str, Any]:
        self._settle()
        skipped = [[param_set.skipped for param_set in param_sets] for param_sets in self._param_sets]
        return {**super().__getstate__(), "recipe": self.recipe, "_infos": self._infos, "_skipped": skipped}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "_infos" not in state:  # torch's load_state_dict; what take_state kept is installed
            views, loaded = self.state, self._loaded
            super().__setstate__(state)
            self.state, self._loaded = views, []
            for index, (param_sets, values) in enumerate(loaded):
                self.param_groups[index].setdefault("iterate", "train")
                self.param_groups[index]["recipe"] = self.recipe.to_json()
                self._install(index, param_sets, values)
            return
        skipped, saved = state.pop("_skipped"), state.pop("state")
        self._known, self._loaded = {}, []
        super().__setstate__({**state, "state": defaultdict(dict)})
        self._param_sets = [[] for _ in self.param_groups]
        self._assignments = Assignments(self.recipe)
        for index, group in enumerate(self.param_groups):
            self._assignments.add(group["params"], self._infos[index], self.labels(index))
            self._install(index, self._build(index, {id(p) for p in group["params"] if p in saved}), saved)
            for param_set, counts in zip(self._param_sets[index], skipped[index], strict=True):
                param_set.skipped.update(counts)
