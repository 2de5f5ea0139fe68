"""Signals of an optimizer: requests of stages and constraints, provided values, and the signals of one step.

The values of a parameter set are gathered from all ranks and reduced as each signal declares.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain

import torch
from torch import Tensor

from eigengraft.blocking import SideMatrix
from eigengraft.distributed.checks import Field, gather_fields
from eigengraft.distributed.rank_group import RankGroup
from eigengraft.errors import counted, name_some, warn_user
from eigengraft.numerics import local, number_like
from eigengraft.schedules import component_at, schedules, value_at
from eigengraft.signals import PARTNER, SIDES, Signal, asking, known_signals
from eigengraft.slots import StateKey

from ..recipe.recipe import Recipe
from ..recipe.routing import ParamInfo
from ..step.exchange import PROVIDERS
from ..step.inputs import StepInputs
from ..step.spikes import gradient_norm
from ..step.step import ParamSet, ReadySteps

MISSING, SOME, ALL = 0.0, 1.0, 2.0
"""How complete the values of a signal are on a rank. MISSING: a required value is missing. SOME: only optional values
are missing. ALL: no value is missing."""
TENSORS = ("input_matrix", "output_matrix", "outputs")
"""Kinds of signals (`Signal.extent`) whose values are tensors with the same shape on all ranks. Ranks reduce them."""
Given = float | Tensor | Mapping[Tensor, float | Tensor]
"""A provided value of a signal: a number, or numbers or tensors by parameter."""
SignalSource = Callable[[], Given | None]
"""A function that is called in every step and returns the value of a signal, or None for no value in this step."""


class Provided:
    """Values of signals for the next step, by name and parameter, and functions that return values in every step."""

    def __init__(self) -> None:
        self.sources: dict[str, list[SignalSource]] = {}
        self._kept: dict[str, dict[int | None, tuple[Tensor | float, int]]] = {}

    @property
    def names(self) -> set[str]:
        """Names of the signals (inputs of stages beside gradients) that have a value for the next step."""
        return {name for name, values in self._kept.items() if values}

    def add(self, signal: Signal, value: Given, parameters: Iterable[Tensor]) -> None:
        """Store a value of a signal for the next step. If there is one already, join both by `signal.reduce`.

        value: a number, or a mapping {parameter: number or tensor}.
        parameters: the parameters of the optimizer.

        Raises:
            ValueError: a key of the mapping is no parameter of the optimizer, or a tensor has a wrong shape.
        """
        kept = self._kept.setdefault(signal.name, {})
        known = {id(parameter): parameter for parameter in parameters}
        pairs = [(id(own), x) for own, x in value.items()] if isinstance(value, Mapping) else [(None, value)]
        for key, one in pairs:
            if key is not None and key not in known:
                raise ValueError(f"provide: '{signal.name}' has a key that is not a parameter of the optimizer")
            one = one.detach() if isinstance(one, Tensor) else float(one)
            if key is not None:
                _require_shape(signal, known[key], one)
            before, count = kept.get(key, (None, 0))
            joined = torch.maximum if signal.reduce == "max" else torch.add
            kept[key] = (one if before is None else joined(_as_tensor(before), _as_tensor(one)), count + 1)

    def get(self, signal: Signal, parameter: Tensor) -> Tensor | None:
        """Return the value of a signal (an input beside the gradient) for a parameter; None if none was provided.

        A signal that is one number for the whole step has the same value for all parameters.
        """
        kept = self._kept.get(signal.name, {}).get(None if signal.extent == "step" else id(parameter))
        if kept is None:
            return None
        value = _as_tensor(kept[0])
        return value / kept[1] if signal.reduce == "mean" and kept[1] > 1 else value

    def clear(self) -> list[str]:
        """Delete the values that were added for the next step. Return the names of the signals that had a value.

        The functions in `sources` are not deleted.
        """
        names = list(self.names)
        self._kept.clear()
        return names


def _as_tensor(value: Tensor | float) -> Tensor:
    """Return a number as a float64 tensor on the CPU, and a tensor unchanged."""
    return value if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64, device="cpu")


def _require_shape(signal: Signal, parameter: Tensor, value: Tensor | float) -> None:
    found = tuple(value.shape) if isinstance(value, Tensor) else ()
    if signal.extent in SIDES:
        if len(found) < 2 or found[-1] != found[-2]:
            side = SIDES[signal.extent]
            raise ValueError(f"provide: '{signal.name}' must be a square matrix over {side}, got shape {found}")
        return
    if signal.extent == "outputs":
        if len(found) != 1:
            raise ValueError(f"provide: '{signal.name}' must be a tensor with one axis, got shape {found}")
        return
    shape = tuple(parameter.shape) if signal.extent == "entry" else ()
    if found not in {shape, tuple(local(parameter).shape) if signal.extent == "entry" else ()}:
        raise ValueError(f"provide: '{signal.name}' must be a tensor of shape {shape} for this parameter, got {found}")


def steps_taken(param_sets: Iterable[ParamSet]) -> int:
    """Return the number of steps of the run so far, the largest step count of all parameters."""
    return max((int(param_set.step_counts.max()) for param_set in param_sets), default=0)


class Schedules:
    """The schedules of a recipe.

    by_path: every schedule, by the dotted path of its field.
    """

    def __init__(self, recipe: Recipe) -> None:
        self.recipe, self.by_path = recipe, dict(schedules(recipe))

    def follow(self, param_sets: Iterable[ParamSet], steps_before: int | None = None) -> None:
        """Set the scheduled numbers of a step in the stages and constraints of all parameters.

        steps_before: number of steps before the step. None: the largest step count of the parameters.
        """
        step = (steps_taken(param_sets) if steps_before is None else steps_before) + 1
        rules = component_at(self.recipe, step, self.recipe.total_steps).rules()
        for param_set in param_sets:
            param_set.iterates.constraints = {path: rule.constraints for path, rule in rules.items()}
            for stack_state in param_set.stack_states:
                stack_state.rule, stack_state.run_step = rules[stack_state.path], step

    def values(self, step: int) -> dict[str, float]:
        """Return the scheduled numbers of a step by dotted path. Step 0 has the numbers of step 1, the first step."""
        total = self.recipe.total_steps
        return {path: float(value_at(schedule, max(step, 1), total)) for path, schedule in self.by_path.items()}


def for_outputs(value: Tensor, param_set: ParamSet, at: int, name: str) -> Tensor:
    """Return numbers for a parameter's outputs in a shape that broadcasts to this rank's shard of the parameter.

    value: `[parts]`, the values of a signal. The outputs are divided into this many equal parts, such as heads.
    at: position of the parameter in its set.
    name: name of the signal, for the message.

    Raises:
        ValueError: the number of outputs is no multiple of the number of parts.
    """
    spec = param_set.specs[at]
    axis = spec.matrices.matrix_axes(spec.shape)[0]
    length, parts = spec.shape[axis], len(value)
    if not parts or length % parts:
        raise ValueError(
            f"provide: '{name}' of {spec.name} must have a number of values that divides the number of outputs, "
            f"{length}, got {parts} values; each value is for an equal part of the outputs, such as a head"
        )
    rows = value.repeat_interleave(length // parts)
    if spec.placement is not None and param_set.rank_group is not None:
        box = spec.placement.layout.boxes[param_set.rank_group.rank]
        rows = rows[box.start[axis] : box.stop[axis]]
    shape = [-1 if own == axis else 1 for own in range(local(param_set.parameters[at]).ndim)]
    return rows.reshape(shape)


@dataclass(frozen=True)
class SignalCall:
    """One signal that a parameter set requests in one step, with this rank's values.

    values: provided values by position of the parameter.
    wanted: positions whose update requests the signal.
    needed: positions in `wanted` for which the signal is required in this step.
    """

    signal: Signal
    values: Mapping[int, Tensor]
    wanted: Sequence[int]
    needed: Sequence[int]

    def fields(self, positions: int, device: torch.device) -> dict[str, Field]:
        """Return the numbers that ranks gather for this signal, in one or two fields, by name of the field.

        The first field says how complete the values are on this rank (`MISSING`, `SOME` or `ALL`). The second field
        depends on the signal:
        - one number for the whole step: the number, `[1]`.
        - a number for each parameter: these numbers, `[P]`.
        - a tensor for each parameter, such as a Gram matrix: the numbers of entries of the tensors, `[P]`.
        - a value for each entry of a parameter: there is no second field.

        positions: number P of parameters in the set.
        device: device on which numbers are returned.
        """
        name, extent = self.signal.name, self.signal.extent
        level = ALL if all(position in self.values for position in self.wanted) else SOME
        level = MISSING if any(position not in self.values for position in self.needed) else level
        if extent == "entry":
            return {self.level_field: [level]}
        if extent in TENSORS:
            sizes = [float(self.values[at].numel()) if at in self.values else 0.0 for at in range(positions)]
            return {self.level_field: [level], name: sizes}
        zero = torch.zeros((), dtype=torch.float64, device=device)
        places = [next(iter(self.values), 0)] if extent == "step" else range(positions)
        numbers = [number_like(self.values[at].reshape(()), zero) if at in self.values else zero for at in places]
        return {self.level_field: [level], name: torch.stack(numbers)}

    @property
    def level_field(self) -> str:
        """Name of the field (see `fields`) that says how complete the values of a rank are."""
        return f"level of {self.signal.name}"

    def used(self, level: float, sizes: Tensor | None) -> Sequence[int]:
        """Return the positions of the parameters that receive the signal in this step. They are the same on all ranks.

        If all ranks have all values (`ALL`), every parameter whose update requests the signal receives it. If optional
        values are missing on some rank (`SOME`), only the parameters that require the signal in this step receive it.
        Signals with a number for each group of outputs, such as a head, are an exception: every parameter whose update
        requests the signal receives it, if all ranks have a value for this parameter.

        level: how complete the values are on the rank with the least complete ones, `SOME` or `ALL`.
        sizes: `[R, P]`, number of entries of each parameter's tensor on each rank, 0 if it is missing. None: the signal
            has no tensors.
        """
        if self.signal.extent == "outputs" and sizes is not None:
            there = (sizes > 0).all(0).tolist()
            return [at for at in self.wanted if there[at]]
        return self.wanted if level == ALL else self.needed


def gather_signals(
    calls: Sequence[SignalCall], positions: int, device: torch.device, ranks: RankGroup | None, what: str
) -> tuple[dict[str, Tensor], dict[str, dict[int, Tensor]], SignalCall | None]:
    """Gather the values of all ranks and reduce them as each signal declares. All ranks of the group must call it.

    Return three values. The first has numbers by name of the signal, float64: `[P]`, one for each parameter, or 0-d for
    the whole step. The second has tensors by name of the signal and position of the parameter. If a signal has a value
    for each entry, its tensors have the entries that this rank updates. The third is the first required signal that is
    missing on some rank, or None.

    An optional signal that is missing for some parameters is not used in this step, and a warning says so.

    calls: the signals that the parameter set requests in this step, with this rank's values.
    positions: number P of parameters in the set.
    device: device of the parameters, on which numbers are gathered and returned.
    ranks: ranks that share the parameters; None for one process.
    what: name of the collective, for messages.
    """
    fields: dict[str, Field] = {}
    for call in calls:
        fields |= call.fields(positions, device)
    found, missing = gather_fields(ranks, fields, device, what), list[SignalCall]()
    numbers, tensors = dict[str, Tensor](), dict[str, dict[int, Tensor]]()
    for call in calls:
        level, values, name = float(found[call.level_field].min()), found.get(call.signal.name), call.signal.name
        if level == MISSING:
            missing.append(call)
        elif used := call.used(level, values):
            if call.signal.extent in ("step", "parameter") and values is not None:
                reduced = _reduced(values, call.signal.reduce)
                numbers[name] = reduced[:1].sum() if call.signal.extent == "step" else reduced
            else:
                tensors[name] = _tensors(call, used, values, ranks)
        elif call.values and call.signal.extent != "outputs":
            warn_user(
                f"provide: the signal '{name}' is not used in this step, because at least one parameter has no value "
                f"of it on at least one rank; this rank has values for {len(call.values)} of {len(call.wanted)} "
                "parameters. Provide a value for each parameter on each rank"
            )
    return numbers, tensors, next(iter(missing), None)


def _tensors(call: SignalCall, used: Sequence[int], sizes: Tensor | None, ranks: RankGroup | None) -> dict[int, Tensor]:
    """Return the tensors of a signal by position of the parameter, as their sum, mean or maximum over ranks.

    `Signal.reduce` says which of the three. Raise ValueError on all ranks if ranks have tensors of different sizes.

    used: positions of the parameters that receive the signal.
    sizes: `[R, P]`, sizes of the tensors on all ranks; None for signals with a value for each entry, which are not
        reduced.
    """
    tensors, signal = {at: call.values[at] for at in used}, call.signal
    if ranks is None or sizes is None:
        return tensors
    given = sizes[:, list(used)]
    if bool((given != given[0]).any()):
        totals = given.sum(1).int().tolist()
        raise ValueError(
            f"provide: the values of '{signal.name}' must have the same shapes on all ranks, got {totals} entries by "
            "rank"
        )
    flat, what = torch.cat([tensor.reshape(-1) for tensor in tensors.values()]), f"signal {signal.name}"
    if signal.reduce == "max":
        flat = ranks.all_gather(flat, what).wait().amax(0)
    else:
        flat = ranks.all_reduce(flat, what)
        flat = flat / ranks.size if signal.reduce == "mean" else flat
    parts = torch.split(flat, [tensor.numel() for tensor in tensors.values()])
    return {at: part.view(tensors[at].shape) for at, part in zip(tensors, parts, strict=True)}


def _reduced(values: Tensor, how: str) -> Tensor:
    if how == "max":
        return values.amax(0)
    return values.sum(0) / (len(values) if how == "mean" else 1)


PER_STACK = frozenset(PROVIDERS)
"""Signals whose values are computed separately for each stack, when the stack is updated."""
OWN = PER_STACK | PARTNER | {"parameter", "step_fraction", "gradient_norm"}
"""Signals that the optimizer computes itself. All other signals are provided by the user or by watched models."""


class Signals:
    """The signals of an optimizer, from `provide` to the step that uses them.

    recipe: the recipe, with `total_steps` if it depends on the length of the run; otherwise ValueError is raised.
    asking: {name of the signal: path of the first stage or constraint that requests it}, for the whole recipe.
    asked: {path of an update rule: mapping like `asking`, for the signals that this rule requests}.
    somewhere: {name of the signal: path of the constraint}, for constraints that require a signal for at least one
        parameter, no matter which.
    paused: True during forwards whose gradients no step uses, such as the trials of a line search. No signal is
        collected from them, and `provide` stores no value.
    provided: values for the next step, and functions that return values in every step.
    open_first: {name of the signal: paths of the update rules that require it}, for signals that are required only in
        the first step of a parameter. A signal is removed when a step has used a value of it, or when a parameter of
        one of these rules has made a step.
    """

    def __init__(self, recipe: Recipe) -> None:
        self.recipe, self._rules, self.paused = recipe, recipe.rules(), False
        self.asking = asking(pair for where, rule in self._rules.items() for pair in rule.listeners(where))
        if recipe.failure.spike is not None and recipe.failure.spike.measure == "loss":
            self.asking.setdefault("loss", "failure.spike")
        bound = [(own.path_in(where), own) for where, rule in self._rules.items() for own in rule.constraints]
        self.somewhere = {name: path for path, own in reversed(bound) for name in own.requires_some}
        self.asked = {where: asking(rule.listeners(where)) for where, rule in self._rules.items()}
        self.provided, self.open_first = Provided(), dict[str, set[str]]()
        for path, rule in self._rules.items():
            for request in chain.from_iterable(stage.requests for _, stage in rule.stages(path)):
                if request.when == "first":
                    self.open_first.setdefault(request.name, set()).add(path)
        if (lacking := recipe.lacks_total_steps()) is not None:
            raise ValueError(
                f"{lacking}: depends on the length of the run, which is not known; set `total_steps` of the recipe, or "
                "`steps` of eigengraft.compose"
            )

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Collect no signals from forwards in this context, and drop values that are provided in it."""
        before, self.paused = self.paused, True
        try:
            yield
        finally:
            self.paused = before

    def needed(self, path: str, step: int) -> frozenset[str]:
        """Return the names of the signals that an update rule requires in a step.

        path: path of the update rule.
        step: step count of a parameter in that step.
        """
        asks = [own.signals_at(step) for _, own in self._rules[path].listeners(path)]
        return frozenset().union(*asks)

    def takers(self, name: str, rows: Iterable[tuple[Tensor, ParamInfo]]) -> set[int]:
        """Return the ids of all parameters whose update requests a signal.

        rows: all parameters of the optimizer with their descriptions.
        """
        return {id(parameter) for parameter, info in rows if name in self.asked[self.recipe.route(info)[0]]}

    def due(self, name: str, param_sets: Iterable[ParamSet], rows: Iterable[tuple[Tensor, ParamInfo]]) -> set[int]:
        """Return the ids of parameters whose update uses a signal in its next step.

        On an accelerator the host may not know yet whether the last step of a parameter was skipped because of its
        gradient, and so which step is the next. A parameter is included if it uses the signal in one of the two steps.

        rows: all parameters of the optimizer with their descriptions, including parameters without state.
        """
        due, seen = set[int](), set[int]()
        for param_set in param_sets:
            back = (0,) if param_set.parameters[0].device == torch.device("cpu") else (0, 1)
            steps = (param_set.update_counts + 1).tolist()
            for parameter, spec, step in zip(param_set.parameters, param_set.specs, steps, strict=True):
                seen.add(id(parameter))
                if any(self._takes(spec.path, name, step - less) for less in back):
                    due.add(id(parameter))
        unseen = [(id(own), self.recipe.route(info)[0]) for own, info in rows if id(own) not in seen]
        return due | {own for own, path in unseen if self._takes(path, name, 1 - self._rules[path].lagging())}

    def _takes(self, path: str, name: str, step: int) -> bool:
        """Return True if an update rule uses a signal in a step: the step requires the signal, or may use it.

        path: path of the update rule.
        step: step count of a parameter in that step.
        """
        if name not in self.asked[path]:
            return False
        own = [listener for _, listener in self._rules[path].listeners(path)]
        return name in self.needed(path, step) or any(
            request.optional and request.name == name for listener in own for request in listener.requests
        )

    def provide(self, name: str, value: Given | SignalSource, parameters: Iterable[Tensor]) -> bool:
        """Store a value of a signal for the next step, or a function that returns a value in every step.

        Return True if a stage or constraint requests the signal.

        name: name of a signal that may be provided.
        value: a number, for a signal of a step; a mapping {parameter: value} for all others; or a function.
        parameters: all parameters of the optimizer.

        Raises ValueError if the name is unknown or that of a signal that the optimizer computes itself, or if the value
        has the wrong form.
        """
        signal = known_signals().get(name)
        if signal is None or name in OWN:
            free = ", ".join(sorted(known_signals().keys() - OWN))
            raise ValueError(f"provide: '{name}' is not a signal that can be provided; those are {free}")
        asked = name in self.asking
        if callable(value):
            if asked:
                self.provided.sources.setdefault(name, []).append(value)
            return asked
        if (signal.extent == "step") is isinstance(value, Mapping):
            wanted = "a number" if signal.extent == "step" else "a mapping {parameter: value}"
            raise ValueError(f"provide: the signal '{name}' must be {wanted}, got {type(value).__name__}")
        if asked and not self.paused:
            self.provided.add(signal, value, parameters)
        return asked

    def unprovided(self, param_sets: Iterable[ParamSet]) -> list[tuple[str, str, bool]]:
        """Return (signal, path of the stage that requests it, True if it is required) for each signal that lacks a
        value.

        A signal that a function provides in every step is not among them.
        """
        self._follow_first(param_sets)
        known = OWN | {"loss"} | self.provided.sources.keys() | self.provided.names
        asked = [
            request for path, rule in self._rules.items() for _, own in rule.listeners(path) for request in own.requests
        ]
        needed = {*self.open_first, *self.somewhere, *(request.name for request in asked if not request.optional)}
        left = {name: path for name, path in self.asking.items() if name not in known}
        return [(name, path, name in needed) for name, path in left.items()]

    def _follow_first(self, param_sets: Iterable[ParamSet]) -> None:
        """Remove signals from `open_first` that are not required any more.

        A signal in `open_first` is required until a parameter whose update requires it has made a step, in this run or
        in the run that saved a loaded checkpoint.
        """
        if self.open_first:
            rows = [row for own in param_sets for row in zip(own.specs, own.step_counts.tolist(), strict=True)]
            trained = {spec.path for spec, count in rows if count}
            self.open_first = {name: paths for name, paths in self.open_first.items() if not paths & trained}

    def asked_by(self, param_sets: Iterable[ParamSet]) -> bool:
        """Return True if a step of these parameter sets needs signals whose values are computed before the first stack.

        This is so for every signal that is not in `PER_STACK`, and for the sums of a slot over all blocks. The signals
        in `PER_STACK` are computed for each stack, when it is updated.
        """
        return not self.asking.keys() <= PER_STACK or any(param_set.totals for param_set in param_sets)

    def collect(self, parameters: Sequence[Tensor]) -> None:
        """Call the functions that were given to `provide`, and store the values that they return for this step."""
        for name, sources in self.provided.sources.items():
            for given in [source() for source in sources]:
                if given is not None:
                    self.provide(name, given, parameters)

    def drop(self) -> None:
        """Drop the values that were provided for the next step.

        A signal that had a value and is required only in a first step counts as used, and is not required any more.
        """
        for name in self.provided.clear():
            self.open_first.pop(name, None)

    def loss(self, parameter: Tensor) -> Tensor | None:
        """Return the loss that was provided for the next step, or None if there is none.

        parameter: any parameter, because the loss is one number for all of them.
        """
        return self.provided.get(known_signals()["loss"], parameter)

    def take(self, ready: ReadySteps, steps_before: int | None = None) -> ReadySteps:
        """Return the inputs of steps with the values of all signals added. All values are then dropped.

        Raise ValueError on all ranks if a required signal has no value.

        ready: parameter sets with the inputs of their steps.
        steps_before: number of steps before this one. None: the largest step count of the parameters.
        """
        self._follow_first(param_set for param_set, _ in ready)
        given = [(param_set, inputs) for param_set, inputs in ready if inputs is not None]
        shared = dict(self._of_all(given, steps_before))
        complete = [(own, None if inputs is None else self._of_one(own, inputs, shared)) for own, inputs in ready]
        self.drop()  # also if no gradient was usable and nothing is updated
        made = {name for _, inputs in complete if inputs is not None for name in inputs.signals}
        for name, where in self.somewhere.items() if given else ():
            if name not in made:
                raise _error(known_signals()[name], where, "every step", "none for any parameter")
        return complete

    def require_all_parameters(self, param_sets: Iterable[ParamSet], others: Sequence[ParamInfo]) -> None:
        """Raise ValueError if an update needs a sum over all parameters, but other optimizers update some of them.

        others: descriptions of the model's parameters that other optimizers update.
        """
        if not others:
            return
        remedy = "make one optimizer of the full model, or choose a recipe that needs no such sum"
        found = {"sam": self.recipe.sam, "line_search": self.recipe.line_search}
        paths = {name: f"; {remedy}" for name, rule in found.items() if rule is not None}
        elsewhere = {self.recipe.route(info)[0] for info in others}
        for param_set in param_sets:
            asked = [self.asked[path].get("gradient_norm") for path in {spec.path for spec in param_set.specs}]
            clip = "clip gradients before step() by their norm over all pipeline stages (docs/guide/distributed.md)"
            paths |= {path: f"; {clip}, or {remedy}" for path in asked if path is not None}
            totals = param_set.totals.items()
            paths |= {StateKey.parse(key).stage: f"; {remedy}" for key, path in totals if path in elsewhere}
        if (spike := self.recipe.failure.spike) is not None and spike.measure == "gradient_norm":
            paths["failure.spike"] = f"; compare losses, with failure.spike.measure=loss, or {remedy}"
        for path, what in paths.items():
            raise ValueError(
                f"{path}: needs a sum over all parameters of the model, but {counted(len(others), 'parameter')} "
                f"{'belongs' if len(others) == 1 else 'belong'} to other optimizers (submodel){what}"
            )

    def _of_all(
        self, ready: Sequence[tuple[ParamSet, StepInputs]], steps_before: int | None
    ) -> Iterator[tuple[str, Tensor | float]]:
        """Yield (name, number) for signals that are one number for all parameters: the fraction of the run that is
        over, the norm of all gradients, and sums of a slot over all parameters.

        ready: parameter sets that take the step, with its inputs.
        steps_before: number of earlier steps of the run. None: the largest step count of the parameters.
        """
        if ready and "step_fraction" in self.asking:
            assert self.recipe.total_steps is not None
            steps_before = steps_taken(param_set for param_set, _ in ready) if steps_before is None else steps_before
            yield "step_fraction", (steps_before + 1) / self.recipe.total_steps
        if ready and "gradient_norm" in self.asking:
            yield "gradient_norm", gradient_norm([inputs for _, inputs in ready])
        totals: dict[str, Tensor] = {}
        for param_set, _ in ready:
            for key, total in _slot_totals(param_set, list(param_set.totals)).items():
                totals[key] = totals[key] + total.to(totals[key].device) if key in totals else total
        yield from totals.items()

    def _of_one(self, param_set: ParamSet, inputs: StepInputs, shared: Mapping[str, Tensor | float]) -> StepInputs:
        """Return the inputs of a step with the values of all signals added (`StepInputs.signals`).

        shared: signals that are one number for all parameters, by name.
        """
        asked = {name for spec in param_set.specs for name in self.asked[spec.path]}
        found: dict[str, object] = {**shared}
        if "parameter" in asked:
            found["parameter"] = param_set.iterates.own_entries
        calls = [self._call(known_signals()[name], param_set, inputs) for name in sorted(asked - OWN)]
        if not calls:
            return replace(inputs, signals=found)
        what = f"signals {', '.join(call.signal.name for call in calls)} of {param_set.names[0]}"
        device, ranks = param_set.parameters[0].device, param_set.rank_group
        numbers, tensors, missing = gather_signals(calls, len(param_set.specs), device, ranks and ranks.all_ranks, what)
        if missing is not None:
            raise self._missing(missing, param_set)
        lists = {name: _by_position(name, values, param_set) for name, values in tensors.items()}
        return replace(inputs, signals={**found, **numbers, **lists})

    def _call(self, signal: Signal, param_set: ParamSet, inputs: StepInputs) -> SignalCall:
        """Return this rank's values of a signal for one step, and the parameters of the set that request it.

        Parameters that the step leaves out, for example because they have no gradient, are left out here too.
        """
        wanted, needed, values = list[int](), list[int](), dict[int, Tensor]()
        counts = (param_set.update_counts + 1).tolist()
        due = cache(self.needed)  # parameters with one update and one step count require the same signals
        for at, (spec, parameter) in enumerate(zip(param_set.specs, param_set.parameters, strict=True)):
            if not inputs.active[at] or signal.name not in self.asked[spec.path]:
                continue
            wanted.append(at)
            if signal.name in due(spec.path, counts[at]) or spec.path in self.open_first.get(signal.name, ()):
                needed.append(at)
            if (value := self.provided.get(signal, parameter)) is not None:
                values[at] = param_set.part(at, local(value)) if signal.extent == "entry" else value
        return SignalCall(signal, values, wanted, needed)

    def _missing(self, call: SignalCall, param_set: ParamSet) -> ValueError:
        """Return the error about a signal without a value, which the updates of some parameters require."""
        names = [param_set.names[at] for at in call.needed if at not in call.values]
        got = f"none for {name_some(names, 3)}" if names else "none on a rank"
        name = call.signal.name
        when = "the first step" if name in self.open_first else "every step"
        return _error(call.signal, self.asking[name], when, got)


def _error(signal: Signal, where: str, when: str, got: str) -> ValueError:
    """Return the error about a missing signal.

    where: path of the stage or constraint that requests the signal.
    when: text about the steps that require the signal.
    got: text about the parameters that have no value.
    """
    by = f"optimizer.provide('{signal.name}', ...) before the step{f', or with {signal.by}' if signal.by else ''}"
    return ValueError(f"{where}: the signal '{signal.name}' is required in {when}, got {got}; provide it with {by}")


def _by_position(name: str, gathered: Mapping[int, Tensor], param_set: ParamSet) -> list[Tensor | SideMatrix | None]:
    """Return the values of a signal in the form in which stages receive them: a list with an item for each parameter.

    A Gram matrix of a layer's inputs or output gradients becomes a `SideMatrix` of the layer's weight. Numbers for
    groups of outputs get a shape that broadcasts to the weight. The item is None for a parameter without a value.

    name: name of the signal.
    gathered: values by position of the parameter, already reduced over ranks.
    """
    found: list[Tensor | SideMatrix | None] = [None] * len(param_set.specs)
    extent = known_signals()[name].extent
    for at, value in gathered.items():
        if extent == "entry":
            found[at] = value
        elif extent == "outputs":
            found[at] = for_outputs(value, param_set, at, name)
        else:
            spec = param_set.specs[at]
            try:
                found[at] = SideMatrix.of(value, spec.shape, spec.matrices, SIDES[extent])
            except ValueError as error:
                raise ValueError(f"provide: '{name}' of {spec.name}: {error}") from None
    return found


def _slot_totals(param_set: ParamSet, keys: Sequence[str]) -> dict[str, Tensor]:
    """Return the sum of each slot over all blocks of a parameter set and all ranks, 0-d float64, by path of the slot.

    keys: dotted paths of the slots. All ranks that share the parameters must call this with the same paths.
    """
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
