"""Signals of an optimizer: what is provided from outside, and what all parameters together have."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from eigengraft.blocking import SideMatrix
from eigengraft.chains import PARTNER, SIDES, Signal, follows_run, known_signals
from eigengraft.distributed.layouts import local
from eigengraft.state_key import StateKey

from ...recipe.recipe import Recipe, slot_keys
from ...recipe.routing import ParamInfo
from ..exchange import Step
from ..param_set import ParamSet
from .first_step import FirstStep
from .gathered import GatheredSignals, SignalCall, gather_signals
from .listeners import Listeners
from .outputs import for_outputs
from .provided import Given, Provided, SignalSource, require_form
from .schedules import steps_taken

PER_STACK = frozenset({"lr", "parameter_rms"})
"""Signals that are found for each stack."""
OWN = PER_STACK | PARTNER | {"parameter", "step_fraction", "gradient_norm"}
"""Signals that the optimizer knows; any other is provided."""


class Signals:
    """The signals of an optimizer, from `provide` to the step that takes them.

    listeners: which stages and constraints ask for which signals, and when.
    provided: the values for the next step, and the sources of values.
    """

    def __init__(self, recipe: Recipe) -> None:
        self.recipe, self.listeners = recipe, Listeners(recipe)
        self.provided, self.first_step = Provided(), FirstStep(recipe)
        self._totals: WeakKeyDictionary[ParamSet, Mapping[str, str]] = WeakKeyDictionary()
        rules = recipe.updates()
        if follows_run(rules) and recipe.total_steps is None:
            raise ValueError(f"{follows_run(rules)}: `total_steps` of the recipe is required, got none")

    def provide(self, name: str, value: Given | SignalSource, parameters: Iterable[Tensor]) -> bool:
        """Keeps a signal for the next step, or its source for every step, if anything asks for it, and says so."""
        signal = known_signals().get(name)
        if signal is None or name in OWN:
            free = ", ".join(sorted(known_signals().keys() - OWN))
            raise ValueError(f"provide: a registered signal is required ({free}), got '{name}'")
        asked = name in self.listeners.asking
        if callable(value):
            if asked:
                self.provided.sources.setdefault(name, []).append(value)
            return asked
        require_form(signal, value)
        if asked:
            self.provided.add(signal, value, parameters)
        return asked

    def asked_by(self, param_sets: Iterable[ParamSet]) -> bool:
        """Whether steps of parameter sets take anything but signals that are found for each stack."""
        return not self.listeners.asking.keys() <= PER_STACK or any(map(self._total_keys, param_sets))

    def take(self, steps: Sequence[tuple[ParamSet, Step | None]]) -> list[tuple[ParamSet, Step | None]]:
        """The steps with their signals. Raises ValueError, on all ranks, for one that is required and not there."""
        parameters = [parameter for param_set, _ in steps for parameter in param_set.parameters]
        for name, sources in self.provided.sources.items():
            for given in [source() for source in sources]:
                if given is not None:
                    self.provide(name, given, parameters)
        self.first_step.follow(param_set for param_set, _ in steps)
        ready = [(param_set, step) for param_set, step in steps if step is not None]
        shared = dict(self._of_all(ready))
        found = [(param_set, step and self._of_one(param_set, step, shared)) for param_set, step in steps]
        self.first_step.close(self.provided.clear())
        made = {name for _, step in found if step is not None for name in step.outputs}
        for name, where in self.listeners.somewhere.items() if ready else ():
            if name not in made:
                raise _error(known_signals()[name], where, "every step", "none for any parameter")
        return found

    def require_all_parameters(self, param_sets: Iterable[ParamSet], others: Sequence[ParamInfo]) -> None:
        """Raises ValueError if an update of these parameters takes a sum over all parameters of a model.

        others: parameters of the model that other optimizers have, which such a sum would leave out.
        """
        if not others:
            return
        remedy = "make one optimizer of the full model, or choose a recipe without it"
        found = {"sam": self.recipe.sam, "line_search": self.recipe.line_search}
        paths = {name: f"; {remedy}" for name, rule in found.items() if rule is not None}
        elsewhere = {self.recipe.route(info)[0] for info in others}
        for param_set in param_sets:
            asked = [
                self.listeners.asked[path].get("gradient_norm") for path in {spec.path for spec in param_set.specs}
            ]
            clip = "clip gradients before step() by their norm over all stages, as docs/guide/distributed.md shows"
            paths |= {path: f"; {clip}, or {remedy}" for path in asked if path is not None}
            totals = self._total_keys(param_set).items()
            paths |= {StateKey.parse(key).stage: f"; {remedy}" for key, path in totals if path in elsewhere}
        for path, what in paths.items():
            raise ValueError(
                f"{path}: all parameters of the model are required, over which it takes a sum, got a part of them "
                f"(submodel), without {len(others)} that other optimizers have{what}"
            )

    def _total_keys(self, param_set: ParamSet) -> Mapping[str, str]:
        """The slots of which stages read the sum, on whatever rank their blocks are, and the path of their update."""
        if param_set not in self._totals:
            kinds = {(group.path, group.shape) for group in param_set.block_groups}
            kinds |= {(state.path, state.stack.block) for state in param_set.stack_states}
            slots = [(path, slot_keys(param_set.updates[path], path, block)) for path, block in kinds]
            found = {key.name: path for path, own in slots for key, slot in own.items() if slot.total}
            self._totals[param_set] = dict(sorted(found.items()))
        return self._totals[param_set]

    def _of_all(self, ready: Sequence[tuple[ParamSet, Step]]) -> Iterator[tuple[str, Tensor | float]]:
        """The numbers that all parameters together have."""
        if ready and "step_fraction" in self.listeners.asking:
            assert self.recipe.total_steps is not None
            taken = steps_taken(param_set for param_set, _ in ready)
            yield "step_fraction", (taken + 1) / self.recipe.total_steps
        if ready and "gradient_norm" in self.listeners.asking:
            squares = [_used_squares(step) for _, step in ready]
            yield "gradient_norm", torch.stack([square.to(squares[0].device) for square in squares]).sum().sqrt()
        totals: dict[str, Tensor] = {}
        for param_set, _ in ready:
            for key, total in _slot_totals(param_set, list(self._total_keys(param_set))).items():
                totals[key] = totals[key] + total.to(totals[key].device) if key in totals else total
        yield from totals.items()

    def _of_one(self, param_set: ParamSet, step: Step, shared: Mapping[str, Tensor | float]) -> Step:
        """A step with its signals, those of this parameter set included."""
        asked = {name for spec in param_set.specs for name in self.listeners.asked[spec.path]}
        entries: dict[str, Sequence[Tensor | None]] = {}
        entries |= {"parameter": param_set.iterates.parameters} if "parameter" in asked else {}
        calls = [self._call(known_signals()[name], param_set, step) for name in sorted(asked - OWN)]
        if not calls:
            return replace(step, numbers=shared, entries=entries)
        what = f"signals {', '.join(call.signal.name for call in calls)} of {param_set.names[0]}"
        device, ranks = param_set.parameters[0].device, param_set.rank_group
        gathered = gather_signals(calls, len(param_set.specs), device, ranks and ranks.all_ranks, what)
        if gathered.missing:
            raise self._missing(gathered.missing[0], param_set)
        step = replace(step, numbers={**shared, **gathered.numbers}, entries=entries)
        return _with_tensors(step, gathered, param_set)

    def _call(self, signal: Signal, param_set: ParamSet, step: Step) -> SignalCall:
        """What this rank was provided of a signal, and which parameters of the step ask for it."""
        wanted, needed, values = list[int](), list[int](), dict[int, Tensor]()
        counts = (param_set.update_counts + 1).tolist()
        due = cache(self.listeners.needed)  # the same for all parameters of an update at one step
        for at, (spec, parameter) in enumerate(zip(param_set.specs, param_set.parameters, strict=True)):
            if not step.active[at] or signal.name not in self.listeners.asked[spec.path]:
                continue
            wanted.append(at)
            if signal.name in due(spec.path, counts[at]) or self.first_step.asks(signal.name, spec.path):
                needed.append(at)
            if (value := self.provided.get(signal, parameter)) is not None:
                values[at] = param_set.part(at, local(value)) if signal.extent == "entry" else value
        return SignalCall(signal, values, wanted, needed)

    def _missing(self, call: SignalCall, param_set: ParamSet) -> ValueError:
        """The error of a signal that must be there for some parameters."""
        names = [param_set.names[at] for at in call.needed if at not in call.values]
        got = f"none for {', '.join(names[:3])}{' and more' if len(names) > 3 else ''}" if names else "none on a rank"
        name = call.signal.name
        return _error(call.signal, self.listeners.asking[name], self.first_step.when(name), got)


def _error(signal: Signal, where: str, when: str, got: str) -> ValueError:
    """The error of a signal that must be there; where: the path of what asks for it, when: the steps."""
    by = f"optimizer.provide('{signal.name}', ...) before it{f', or by {signal.by}' if signal.by else ''}"
    return ValueError(f"{where}: the signal '{signal.name}' is required in {when}, by {by}, got {got}")


def _with_tensors(step: Step, gathered: GatheredSignals, param_set: ParamSet) -> Step:
    """A step with the signals that are tensors, in the form that blocks or constraints take them from."""
    entries, matrices = dict(step.entries), dict[str, list[SideMatrix | None]]()
    outputs = dict[str, list[Tensor | None]]()
    for name, tensors in gathered.tensors.items():
        extent, specs = known_signals()[name].extent, param_set.specs
        if extent == "entry":
            entries[name] = [tensors.get(at) for at in range(len(specs))]
        elif extent == "outputs":
            rows = {at: for_outputs(tensors[at], param_set, at, name) for at in tensors}
            outputs[name] = [rows.get(at) for at in range(len(specs))]
        else:
            made = {at: _side_matrix(tensors[at], param_set, at, name) for at in tensors}
            matrices[name] = [made.get(at) for at in range(len(specs))]
    return replace(step, entries=entries, matrices=matrices, outputs=outputs)


def _side_matrix(value: Tensor, param_set: ParamSet, at: int, name: str) -> SideMatrix:
    spec = param_set.specs[at]
    try:
        return SideMatrix.of(value, spec.shape, spec.matrices, SIDES[known_signals()[name].extent])
    except ValueError as error:
        raise ValueError(f"provide: '{name}' of {spec.name}: {error}") from None


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
        param_set.rank_group.synchronize(f"totals of {keys[0]}", device=totals.device)
        param_set.rank_group.all_reduce(totals, f"totals of {keys[0]}")
    return dict(zip(keys, totals.unbind(0), strict=True))
