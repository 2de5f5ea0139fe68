"""Signals of an optimizer: what is provided from outside, and what all parameters together have."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from eigengraft.chains import asking, follows_run
from eigengraft.distributed.layouts import local
from eigengraft.step_context import Signal, known_signals

from ..recipe.recipe import Recipe
from ..recipe.slot_keys import slot_keys
from .exchange import Step
from .param_set import ParamSet
from .schedules import steps_taken

Given = float | Tensor | Mapping[Tensor, float | Tensor]
"""A signal as it is provided: a number, or numbers or tensors by parameter."""
PER_STACK = frozenset({"lr", "parameter_rms"})
"""Signals that are found for each stack."""
OWN = PER_STACK | {"parameter", "step_fraction", "gradient_norm"}
"""Signals that the optimizer knows; any other is provided."""


class Signals:
    """The signals of an optimizer, from `provide` to the step that takes them.

    asking: path of the first stage that asks for each signal, by name.
    """

    def __init__(self, recipe: Recipe) -> None:
        self.recipe, rules = recipe, recipe.updates()
        self.asking = asking(pair for where, rule in rules.items() for pair in rule.stages(where))
        self._asked = {where: asking(rule.stages(where)) for where, rule in rules.items()}
        self._required = {name for rule in rules.values() for _, stage in rule.stages() for name in stage.signals()}
        self._given: dict[str, dict[int | None, tuple[Tensor | float, int]]] = {}
        self._totals: WeakKeyDictionary[ParamSet, Sequence[str]] = WeakKeyDictionary()
        if follows_run(rules) and recipe.total_steps is None:
            raise ValueError(f"{follows_run(rules)}: `total_steps` of the recipe is required, got none")

    def provide(self, name: str, value: Given, parameters: Iterable[Tensor]) -> bool:
        """Keeps a signal for the next step, if a stage asks for it, and says so; several values before a step are
        reduced as the signal declares."""
        signal = known_signals().get(name)
        if signal is None or name in OWN:
            free = ", ".join(sorted(known_signals().keys() - OWN))
            raise ValueError(f"provide: a registered signal is required ({free}), got '{name}'")
        if (signal.extent == "step") is isinstance(value, Mapping):
            wanted = "a number" if signal.extent == "step" else "a mapping {parameter: value}"
            raise ValueError(f"provide: {wanted} is required for the signal '{name}', got {type(value).__name__}")
        if name not in self.asking:
            return False
        kept = self._given.setdefault(name, {})
        known = {id(parameter): parameter for parameter in parameters}
        for key, one in _by_id(value):
            if key is not None and key not in known:
                raise ValueError(f"provide: parameters of the optimizer are required for '{name}', got another tensor")
            one = one.detach() if isinstance(one, Tensor) else float(one)
            if key is not None:
                _require_shape(signal, known[key], one)
            before, count = kept.get(key, (None, 0))
            joined = torch.maximum if signal.reduce == "max" else torch.add
            kept[key] = (one if before is None else joined(torch.as_tensor(before), torch.as_tensor(one)), count + 1)
        return True

    def take(self, steps: Sequence[tuple[ParamSet, Step | None]]) -> list[tuple[ParamSet, Step | None]]:
        """The steps with their signals. Raises ValueError, on all ranks, for one that is required and not there."""
        if self.asking.keys() <= PER_STACK and not any(self._total_keys(param_set) for param_set, _ in steps):
            return list(steps)
        ready = [(param_set, step) for param_set, step in steps if step is not None]
        shared = dict(self._of_all(ready))
        found = [(param_set, step and self._of_one(param_set, step, shared)) for param_set, step in steps]
        self._given.clear()
        return found

    def _total_keys(self, param_set: ParamSet) -> Sequence[str]:
        """The slots of which stages read the sum, on whatever rank their blocks are."""
        if param_set not in self._totals:
            kinds = {(group.path, group.shape) for group in param_set.block_groups}
            kinds |= {(state.path, state.stack.block) for state in param_set.stack_states}
            slots = [slot_keys(param_set.updates[path], path, block) for path, block in kinds]
            self._totals[param_set] = sorted({key.name for found in slots for key, slot in found.items() if slot.total})
        return self._totals[param_set]

    def _of_all(self, ready: Sequence[tuple[ParamSet, Step]]) -> Iterator[tuple[str, Tensor | float]]:
        """The numbers that all parameters together have."""
        if ready and "step_fraction" in self.asking:
            assert self.recipe.total_steps is not None
            taken = steps_taken(param_set for param_set, _ in ready)
            yield "step_fraction", (taken + 1) / self.recipe.total_steps
        if ready and "gradient_norm" in self.asking:
            squares = [_used_squares(step) for _, step in ready]
            yield "gradient_norm", torch.stack([square.to(squares[0].device) for square in squares]).sum().sqrt()
        totals: dict[str, Tensor] = {}
        for param_set, _ in ready:
            for key, total in _slot_totals(param_set, self._total_keys(param_set)).items():
                totals[key] = totals[key] + total.to(totals[key].device) if key in totals else total
        yield from totals.items()

    def _of_one(self, param_set: ParamSet, step: Step, shared: Mapping[str, Tensor | float]) -> Step:
        """A step with its signals, those of this parameter set included."""
        asked = sorted({name for spec in param_set.specs for name in self._asked[spec.path]})
        entries: dict[str, Sequence[Tensor | None]] = {}
        entries |= {"parameter": param_set.iterates.parameters} if "parameter" in asked else {}
        outside = [known_signals()[name] for name in asked if name not in OWN]
        numbers = self._agreed(param_set, outside) if outside else {}
        for signal in outside:
            if signal.extent == "entry" and signal.name in numbers:
                entries[signal.name] = [self._held(signal, param_set, at) for at in range(len(param_set.specs))]
        return replace(step, numbers={**shared, **numbers}, entries=entries)

    def _agreed(self, param_set: ParamSet, outside: Sequence[Signal]) -> dict[str, Tensor | float]:
        """Provided numbers, `[P]` or alone, of all ranks together; a signal with entries is there as a 1."""
        parts, ranks = [self._told(signal, param_set) for signal in outside], param_set.rank_group
        found = torch.cat(parts)[None]
        if ranks is not None:
            what = f"signals {', '.join(signal.name for signal in outside)} of {param_set.names[0]}"
            ranks.meet(what)
            found = ranks.all_gather(found[0], what).wait()  # [R, numbers]
        numbers: dict[str, Tensor | float] = {}
        for signal, told in zip(outside, torch.split(found, [len(part) for part in parts], dim=1), strict=True):
            if bool((told[:, 0] == 0).any()):
                self._require_optional(signal)
                continue
            values = told[:, 1:].amax(0) if signal.reduce == "max" else told[:, 1:].sum(0)
            values = values / len(told) if signal.reduce == "mean" else values
            numbers[signal.name] = values[:1].sum() if signal.extent == "step" else values
        return numbers

    def _require_optional(self, signal: Signal) -> None:
        if signal.name in self._required:
            how = ", or by a closure that returns it" if signal.name == "loss" else ""
            by = f"optimizer.provide('{signal.name}', ...) before it{how}"
            where, got = self.asking[signal.name], "got none for some parameter or rank"
            raise ValueError(f"{where}: the signal '{signal.name}' is required in every step, by {by}, {got}")

    def _told(self, signal: Signal, param_set: ParamSet) -> Tensor:
        """Whether all of a signal is there, and then its numbers: float64 `[1]`, `[2]` or `[1 + P]`."""
        values = [self._held(signal, param_set, at) for at in range(len(param_set.specs))]
        needed = [signal.name in self._asked[spec.path] for spec in param_set.specs]
        there = all(value is not None for value, wanted in zip(values, needed, strict=True) if wanted)
        device = param_set.parameters[0].device
        flag = torch.tensor([float(there)], dtype=torch.float64, device=device)
        if signal.extent == "entry":
            return flag
        own = [values[0] if values[0] is not None else 0.0] if signal.extent == "step" else values
        numbers = [torch.as_tensor(x if x is not None else 0.0, dtype=torch.float64, device=device) for x in own]
        return torch.cat([flag, torch.stack([x.reshape(()) for x in numbers])])

    def _held(self, signal: Signal, param_set: ParamSet, at: int) -> Tensor | None:
        """What was provided for one parameter, or for all: of a tensor what this rank holds or updates."""
        kept = self._given.get(signal.name, {}).get(None if signal.extent == "step" else id(param_set.parameters[at]))
        if kept is None:
            return None
        value = torch.as_tensor(kept[0], dtype=torch.float64) if isinstance(kept[0], float) else kept[0]
        value = value / kept[1] if signal.reduce == "mean" else value
        return param_set.rows(at, local(value)) if signal.extent == "entry" else value


def _by_id(value: Given) -> Iterator[tuple[int | None, float | Tensor]]:
    """The numbers of a signal by the id of their parameter; None for the only one."""
    if isinstance(value, Mapping):
        yield from ((id(parameter), one) for parameter, one in value.items())
    else:
        yield None, value


def _require_shape(signal: Signal, parameter: Tensor, value: Tensor | float) -> None:
    shape = tuple(parameter.shape) if signal.extent == "entry" else ()
    found = tuple(value.shape) if isinstance(value, Tensor) else ()
    if found not in {shape, tuple(local(parameter).shape) if signal.extent == "entry" else ()}:
        raise ValueError(f"provide: '{signal.name}' takes a tensor of shape {shape} for this parameter, got {found}")


def _used_squares(step: Step) -> Tensor:
    """The sum of squares of all gradients that the step uses."""
    squares = step.survey.squares
    used = torch.from_numpy(step.active).to(squares.device)
    used = used if step.mask is None else used & step.mask
    return torch.where(used, squares, 0.0).sum()


def _slot_totals(param_set: ParamSet, keys: Sequence[str]) -> dict[str, Tensor]:
    """The sums of slots over all blocks of a parameter set, on all ranks, 0-d float64."""
    if not keys:
        return {}
    totals = torch.zeros(len(keys), dtype=torch.float64, device=param_set.parameters[0].device)
    for place, key in enumerate(keys):
        for state in param_set.stack_states:
            if key in state.tensors:
                totals[place] += state.tensors[key].sum(dtype=torch.float64)
    if param_set.rank_group is not None:
        param_set.rank_group.meet(f"totals of {keys[0]}")
        param_set.rank_group.all_reduce(totals, f"totals of {keys[0]}")
    return dict(zip(keys, totals.unbind(0), strict=True))
