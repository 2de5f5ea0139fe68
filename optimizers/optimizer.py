"""A recipe as a `torch.optim.Optimizer`."""

from __future__ import annotations

import difflib
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import checkpoint
from .cohort import Cohort, Hyper
from .loading import Source, load_recipe
from .recipe import Recipe
from .routing import Facts, examine

_GROUP_KEYS = (
    "params",
    "param_names",
    "lr",
    "weight_decay",
    "name",
    "initial_lr",
    "peak_lr",
    "recipe",
    "fused",
    "foreach",
)


@dataclass(frozen=True)
class Assignment:
    """Where one parameter went and why. route: "" is the recipe's own update; state_bytes: of all its slots."""

    name: str
    shape: tuple[int, ...]
    route: str
    reason: str
    blocks: tuple[tuple[int, ...], ...]
    state_bytes: int


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
        self._incoming: Mapping[Any, Any] | None = None
        defaults = {
            "lr": self.recipe.lr if lr is None else lr,
            "weight_decay": self.recipe.weight_decay.rate if weight_decay is None else weight_decay,
        }
        super().__init__(params, defaults)
        self._known = {}
        self._require_matches()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group: `params`, and optionally `lr`, `weight_decay`.

        Other keys are an error; `fused`, `foreach` are ignored.
        """
        group = {key: value for key, value in param_group.items() if key not in ("fused", "foreach")}
        _check_group(group)
        super().add_param_group(group)
        group = self.param_groups[-1]
        _check_values(group)
        group.setdefault("peak_lr", float(group["lr"]))
        group["recipe"] = self.recipe.to_json()
        names = group.get("param_names") or [None] * len(group["params"])
        self._facts.append(
            [self._known.get(id(p)) or examine(n, p) for n, p in zip(names, group["params"], strict=True)]
        )
        self._cohorts.append([])
        self._adopt(len(self.param_groups) - 1, [p for p in group["params"] if p.requires_grad])

    def _adopt(self, index: int, parameters: list[Tensor]) -> None:
        """Allocates the state of parameters of a group, one cohort for each device."""
        group, facts = self.param_groups[index], self._facts[index]
        wanted = {id(parameter) for parameter in parameters}
        devices = dict.fromkeys(parameter.device for parameter in parameters)
        for device in devices:
            here = [
                (p, f) for p, f in zip(group["params"], facts, strict=True) if id(p) in wanted and p.device == device
            ]
            cohort = Cohort([p for p, _ in here], [f for _, f in here], self.recipe)
            self._cohorts[index].append(cohort)
            for (parameter, _), state in zip(here, cohort.views(), strict=True):
                self.state[parameter] = state

    def _require_matches(self) -> None:
        taken = {path for cohorts in self._cohorts for cohort in cohorts for path, _ in cohort.routed}
        frozen = {self.recipe.route(fact)[0] for facts in self._facts for fact in facts}
        for route in self.recipe.routes:
            if not route.optional and f"routes.{route.name}" not in taken | frozen:
                raise ValueError(
                    f"routes.{route.name}: a rule must match at least one parameter, got none "
                    "(earlier rules match first; names need named_parameters; set `optional: true` if that is meant)"
                )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update. A closure is called once, with gradients enabled, before anything else; its value is returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._settle()
        for index, group in enumerate(self.param_groups):
            thawed = [p for p in group["params"] if p.grad is not None and p not in self.state]
            if thawed:
                self._adopt(index, thawed)
            hyper = Hyper(_number(group["lr"]), float(group["peak_lr"]), float(group["weight_decay"]))
            for cohort in self._cohorts[index]:
                cohort.step(hyper)
        return loss

    def _settle(self) -> None:
        for cohort in self._all():
            cohort.settle()

    def _all(self) -> list[Cohort]:
        return [cohort for cohorts in self._cohorts for cohort in cohorts]

    @property
    def skipped(self) -> Counter[str]:
        """How often each parameter was left alone because its gradient was not finite, by name."""
        self._settle()
        return sum((cohort.skipped for cohort in self._all()), Counter())

    def assignments(self) -> list[Assignment]:
        """Where each parameter went and why, in the order of the groups."""
        rows = []
        for group, facts in zip(self.param_groups, self._facts, strict=True):
            for index, (parameter, fact) in enumerate(zip(group["params"], facts, strict=True)):
                route, reason = self.recipe.route(fact)
                blocking = self.recipe.updates()[route].blocking
                pieces = blocking.pieces(tuple(parameter.shape))
                blocks = tuple(piece.tile for piece in pieces for _ in piece.keys)
                size = sum(t.numel() * t.element_size() for t in self.state.get(parameter, {}).values())
                reason = reason if parameter.requires_grad or parameter in self.state else f"{reason}; frozen, no state"
                rows.append(Assignment(fact.name or f"parameter {index}", fact.shape, route, reason, blocks, size))
        return rows

    def state_bytes(self) -> int:
        """Bytes of all state tensors."""
        return sum(t.numel() * t.element_size() for state in self.state.values() for t in state.values())

    def __repr__(self) -> str:
        lines = [f"Optimizer(recipe={self.recipe.name or 'unnamed'}"]
        for index, group in enumerate(self.param_groups):
            routes = Counter(path or "update" for cohort in self._cohorts[index] for path, _ in cohort.routed)
            where = ", ".join(f"{count} by {path}" for path, count in routes.items())
            lines.append(
                f"  group {index}: {len(group['params'])} parameters ({where}), "
                f"lr={float(group['lr']):g}, weight_decay={float(group['weight_decay']):g}"
            )
        return "\n".join([*lines, f"  state: {self.state_bytes()} bytes)"])

    def state_dict(self) -> dict[str, Any]:
        """As in torch. State keys are "<block>/<stage path>/<slot>"; every group holds the recipe as JSON text."""
        self._settle()
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Strict: another recipe, missing, extra or misshapen state is one ValueError, and nothing is changed.

        Bit-exact.
        """
        self._settle()
        handle = self.register_load_state_dict_pre_hook(checkpoint.take_state)
        try:
            super().load_state_dict(state_dict)
        finally:
            self._incoming = None
            handle.remove()

    def __getstate__(self) -> dict[str, Any]:
        self._settle()
        return {**super().__getstate__(), "recipe": self.recipe.to_json(), "_facts": self._facts}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "_facts" in state:  # a copy or a pickle: built anew, then filled
            self.recipe = load_recipe(state["recipe"])
            self._incoming, self._known, self._facts = None, {}, state["_facts"]
            saved, self.state = state["state"], {}  # type: ignore[assignment]
            super().__setstate__({**state, "recipe": self.recipe, "state": {}})
            checkpoint.rebuild(self, saved)
            return
        incoming, views = self._incoming, self.state
        super().__setstate__(state)
        if incoming is not None:
            self.state = views
            checkpoint.install(self, incoming)


def _number(lr: float | Tensor) -> float | Tensor:
    """A learning rate as a float where reading it costs nothing."""
    return lr if isinstance(lr, Tensor) and lr.device.type != "cpu" else float(lr)


def _check_group(group: Mapping[str, Any]) -> None:
    for key in group:
        if key not in _GROUP_KEYS:
            near = difflib.get_close_matches(key, _GROUP_KEYS, n=1)
            hint = f", did you mean '{near[0]}'?" if near else ""
            raise ValueError(
                f"param group: the keys are params, lr and weight_decay, got '{key}'{hint} The rest is the recipe's"
            )


def _check_values(group: Mapping[str, Any]) -> None:
    lr = group["lr"]
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise ValueError(f"lr: a number or a tensor with one element is required, got shape {tuple(lr.shape)}")
    for key in ("lr", "weight_decay"):
        value = group[key]
        if isinstance(value, bool) or not isinstance(value, (int, float, Tensor)):
            raise ValueError(f"{key}: a number is required, got {value!r}")
        if not (math.isfinite(value) and value >= 0):
            raise ValueError(f"{key}: a finite number >= 0 is required, got {float(value)}")
    for parameter in group["params"]:
        if not parameter.is_floating_point():
            raise ValueError(f"params: real floating-point tensors are required, got {parameter.dtype}")
