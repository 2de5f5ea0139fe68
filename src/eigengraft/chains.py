"""Chains: components of one family in order, and the signals that they ask for."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import CoreSchema, core_schema

from .blocking.side_blocks import MatrixSide
from .component import FAMILY_MARK
from .errors import stage_name
from .ramps import schedules


@dataclass(frozen=True)
class ChainOf:
    """Annotation of a field `tuple[Family, ...]`: in YAML a list, or a single component; names must be distinct.

    family: name of the family.
    members: what errors call the components, in plural.
    """

    family: str
    members: str

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        distinct = core_schema.no_info_after_validator_function(self._distinct, handler(source))
        return core_schema.no_info_before_validator_function(_as_tuple, distinct)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        component = {FAMILY_MARK: self.family}
        return {"anyOf": [{"type": "array", "items": component}, component]}

    def _distinct(self, components: tuple[Any, ...]) -> tuple[Any, ...]:
        names = [stage_name(component) for component in components]
        twice = sorted({name for name in names if name is not None and names.count(name) > 1})
        if twice:
            raise ValueError(f"{self.members} need distinct names: give each '{twice[0]}' its own `name`")
        return components


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, (list, tuple)) else (value,)


@dataclass(frozen=True)
class Signal:
    """What stages may ask for besides the gradient; `register_signal` makes it known.

    name: what stages ask for.
    extent: "step": one number; "parameter": one for each parameter; "entry": one for each entry of a parameter;
        "input_matrix", "output_matrix": a matrix `[n, n]` for a parameter with n inputs or outputs, `[*batch, n, n]`
        for a batch of matrices, of which a block is given the rows and columns of its own; "outputs": one for each of
        equally many outputs of a parameter, such as heads, which constraints alone ask for; "partner": what the other
        factor of a product has, `[p, r]`, the shared axis last, for parameters that the view `pairs` shows as `[q, r]`.
    about: what it is.
    reduce: what becomes of numbers that several ranks give, or several calls of `provide` before a step.
    by: what provides it beside `optimizer.provide`, as errors say it.
    """

    name: str
    extent: Literal["step", "parameter", "entry", "input_matrix", "output_matrix", "outputs", "partner"]
    about: str
    reduce: Literal["mean", "sum", "max"] = "mean"
    by: str = ""


_SIGNALS: dict[str, Signal] = {}


def register_signal(signal: Signal) -> Signal:
    """Makes a signal known, so that stages may ask for it; the same name may only be registered alike."""
    if _SIGNALS.setdefault(signal.name, signal) != signal:
        raise ValueError(f"signal '{signal.name}': a new name is required, got that of {_SIGNALS[signal.name]}")
    return signal


def known_signals() -> Mapping[str, Signal]:
    """Every registered signal, by name."""
    return dict(_SIGNALS)


for _signal in (
    Signal("lr", "step", "the learning rate of the update"),
    Signal("step_fraction", "step", "steps taken so far, this one included, over the recipe's `total_steps`"),
    Signal("gradient_norm", "step", "the norm of all gradients together, as they come, over whole parameters"),
    Signal(
        "loss", "step", "the loss, what the closure of `step` returns or is provided", by="a closure that returns it"
    ),
    Signal("parameter_rms", "parameter", "the root mean square of the parameter"),
    Signal("parameter", "entry", "the parameter, as gradients were taken at it"),
    Signal("partner", "partner", "the other factor of the product, as gradients were taken at it"),
    Signal("partner_before", "partner", "the other factor at the last update of the parameter, else as it is"),
    Signal("partner_gradient", "partner", "the gradient of the other factor, 0 where it has no usable one"),
    Signal(
        "hessian_diagonal",
        "entry",
        "an estimate of the diagonal of the Hessian",
        by="eigengraft.hutchinson or eigengraft.gauss_newton_bartlett",
    ),
    Signal(
        "activation_gram",
        "input_matrix",
        "the mean of x x^T over the inputs x that the parameter's layer has had",
        by="eigengraft.watch_inputs(optimizer, model), or by eigengraft.compose with the model",
    ),
    Signal(
        "output_gradient_gram",
        "output_matrix",
        "the mean of g g^T over gradients g of the loss of each row alone in what the parameter's layer returned",
        by="eigengraft.watch_output_gradients(optimizer, model), or by eigengraft.compose with the model",
    ),
    Signal(
        "max_logit",
        "outputs",
        "the largest attention logit of each head, 0 for outputs that make no logits",
        "max",
        by="eigengraft.watch_logits(optimizer, model), or by eigengraft.compose with the model",
    ),
):
    register_signal(_signal)
PARTNER = frozenset(name for name, signal in _SIGNALS.items() if signal.extent == "partner")
"""Signals of the other factor of a product."""
SIDES: Mapping[str, MatrixSide] = {"input_matrix": "inputs", "output_matrix": "outputs"}
"""The side of a matrix that signals are over, by their extent."""


@dataclass(frozen=True)
class Request:
    """A signal that a stage asks for.

    name: of a registered signal.
    when: the steps in which a step without it is an error. "always": every `interval`-th, from the first; "refresh":
        those in which a refresh may be due; "first": the first of an optimizer; "if_given": none. In other steps the
        signal is on the context if it was provided, as `name in context.signals` says.
    """

    name: str
    when: Literal["always", "refresh", "first", "if_given"] = "always"
    interval: int = 1

    @property
    def optional(self) -> bool:
        """Whether steps take the signal if it is there, and most steps need not have it."""
        return self.when in ("first", "if_given")

    def needed_at(self, step: int, refreshes: bool) -> bool:
        """Whether the signal must be there at a step of a block; refreshes: whether a refresh may be due then."""
        if self.when == "always":
            return step <= 1 or (step - 1) % self.interval == 0
        return self.when == "refresh" and refreshes


class Asks(Protocol):
    """A stage or a constraint, as far as signals are concerned."""

    @property
    def requests(self) -> tuple[Request, ...]: ...

    def signals_at(self, step: int) -> frozenset[str]: ...


def requested(own: Asks) -> frozenset[str]:
    """The names of all signals that a stage or a constraint asks for."""
    return frozenset(request.name for request in own.requests)


def require_signals(stages: Iterable[tuple[str, Asks]], constraints: Sequence[tuple[str, Asks]] = ()) -> None:
    """Raises ValueError for a signal that nobody has registered, or that is for others; each with its path."""
    known, stages = known_signals(), list(stages)
    for path, asks in stages:
        for name in sorted(name for name in requested(asks) if name in known):
            if known[name].extent == "outputs":
                raise ValueError(f"{path}: a signal for stages is required, got '{name}', which constraints alone see")
    for path, asks in constraints:
        for name in sorted(name for name in requested(asks) if name in known):
            if known[name].extent != "outputs":
                raise ValueError(f"{path}: a signal with outputs is required, got '{name}', which stages alone see")
    for path, stage in [*stages, *constraints]:
        for name in sorted(requested(stage) - known.keys()):
            near = difflib.get_close_matches(name, known, n=1)
            hint = f", did you mean '{near[0]}'?" if near else ""
            raise ValueError(
                f"{path}: requires the signal '{name}', which nobody provides ({', '.join(sorted(known))}){hint}"
            )


def asking(stages: Iterable[tuple[str, Asks]]) -> dict[str, str]:
    """The path of the first stage that asks for each signal, by the signal's name."""
    found: dict[str, str] = {}
    for path, stage in stages:
        for name in sorted(requested(stage)):
            found.setdefault(name, path)
    return found


def entries(asked: Iterable[str]) -> int:
    """How many signals, by name, have a number for each entry of parameters."""
    return sum(known_signals()[name].extent == "entry" for name in asked)


def follows_run(updates: Mapping[str, Any]) -> str | None:
    """The path of what needs to know the length of the run, if anything does; updates of a recipe, by path."""
    fractions = [path for path, ramps in schedules(updates[""]) if any(ramp.fraction for ramp in ramps)]
    found = asking(pair for where, update in updates.items() for pair in update.stages(where))
    return next(iter(fractions), found.get("step_fraction"))
