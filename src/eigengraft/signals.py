"""Signals: values other than the gradient that stages and constraints may request."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, get_args

from .blocking.stacks import MatrixSide
from .errors import did_you_mean

Extent = Literal["step", "parameter", "entry", "input_matrix", "output_matrix", "outputs", "partner"]
"""Shapes of the values of signals. The docstring of `Signal` explains each."""
Reduction = Literal["mean", "sum", "max"]
"""Ways in which the values of a signal of several ranks, or of several calls of `provide`, become one value."""


@dataclass(frozen=True)
class Signal:
    """A value that stages may request beside the gradient, after `register_signal` has made it known.

    name: the name in requests.
    extent: shape of the value:
        "step": one number.
        "parameter": one number for each parameter.
        "entry": one number for each entry of a parameter.
        "input_matrix", "output_matrix": a matrix `[n, n]` for a parameter with n inputs or outputs, or `[*batch, n, n]`
            for a batch of matrices. A block receives its own rows and columns of the matrix.
        "outputs": one number for each group of outputs of a parameter, such as a head. All groups have equally many
            outputs. Only constraints may request such a signal.
        "partner": one number for each entry of the partner, which is the other factor of a product, such as LoRA's B A.
            The value is `[p, r]`; its last axis is the axis that both factors share. Only parameters that the view
            `pairs` shows as matrices `[q, r]` have such a signal.
    about: meaning of the value.
    reduce: how the numbers of several ranks, or of several calls of `provide` before a step, are combined.
    by: name of the function that provides the signal, for errors. "": only `optimizer.provide` provides it.
    """

    name: str
    extent: Extent
    about: str
    reduce: Reduction = "mean"
    by: str = ""

    def __post_init__(self) -> None:
        for field, kinds in (("extent", Extent), ("reduce", Reduction)):
            value, known = getattr(self, field), get_args(kinds)
            if value not in known:
                raise ValueError(
                    f"signal '{self.name}': {field} must be one of {', '.join(known)}, got {value!r}; "
                    "`help(eigengraft.Signal)` explains each"
                )


_SIGNALS: dict[str, Signal] = {}


def register_signal(signal: Signal) -> Signal:
    """Register a signal: a named input beside the gradient. Stages may then request it, and training loops provide it.

    A name may be registered again only by an equal signal.

    Args:
        signal: the signal.

    Returns:
        The signal.

    Raises:
        ValueError: another signal has the name.
    """
    if _SIGNALS.setdefault(signal.name, signal) != signal:
        raise ValueError(
            f"signal '{signal.name}': the name already belongs to {_SIGNALS[signal.name]}; choose another name"
        )
    return signal


def known_signals() -> Mapping[str, Signal]:
    """Return every registered signal, by name."""
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
        "gradient_variance",
        "entry",
        "the variance of the gradient over the micro-batches of the step",
        by="eigengraft.watch_gradient_variance(optimizer), or by eigengraft.compose, from two or more backwards per "
        "step: in an experiment set `accumulate: 2`, in a loop of your own call backward on two halves of the batch",
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
        by="an eigengraft.MaxLogits in each attention layer of the model, which eigengraft.compose finds, or "
        "eigengraft.watch_logits(optimizer, model)",
    ),
):
    register_signal(_signal)
PARTNER = frozenset(name for name, signal in _SIGNALS.items() if signal.extent == "partner")
"""Names of the signals with extent "partner": values of the other factor of a product, such as the pairs of LoRA."""
SIDES: Mapping[str, MatrixSide] = {"input_matrix": "inputs", "output_matrix": "outputs"}
"""Side of a parameter, inputs or outputs, that the matrix of a signal belongs to, by the extent of the signal."""


@dataclass(frozen=True)
class Request:
    """A request of a stage for a signal.

    name: name of a registered signal.
    when: steps at which the signal is required. A step without a required signal raises an error.
        "always": every `interval`-th step, from the first.
        "refresh": steps at which a refresh may be due.
        "first": the first step of an optimizer.
        "if_given": no step.
        At other steps the signal is in the context only if it was provided, which `name in context.signals` says.
    interval: with "always", the number of steps from one step that requires the signal to the next.
    """

    name: str
    when: Literal["always", "refresh", "first", "if_given"] = "always"
    interval: int = 1

    @property
    def optional(self) -> bool:
        """True if no step after the first requires the signal."""
        return self.when in ("first", "if_given")

    def needed_at(self, step: int, refreshes: bool) -> bool:
        """Return True if a block requires the signal at a step.

        step: number of the step for the block, from 1 on; 0 while priming.
        refreshes: True if a refresh may be due at the step.
        """
        if self.when == "always":
            return step <= 1 or (step - 1) % self.interval == 0
        return self.when == "refresh" and refreshes


class Asks(Protocol):
    """The methods by which stages and constraints request signals (inputs beside the gradient)."""

    @property
    def requests(self) -> tuple[Request, ...]: ...

    def signals_at(self, step: int) -> frozenset[str]: ...


def requested(own: Asks) -> frozenset[str]:
    """Return the names of all signals that a stage or a constraint requests in any step.

    own: the stage or the constraint.
    """
    return frozenset(request.name for request in own.requests)


def require_signals(stages: Iterable[tuple[str, Asks]], constraints: Sequence[tuple[str, Asks]] = ()) -> None:
    """Raise ValueError if a component requests an unknown signal, if a stage requests a signal for constraints, or if a
    constraint requests a signal for stages.

    stages: every stage with its path. Stages cannot request signals with a value for each output of a layer.
    constraints: every constraint with its path. Constraints can request only such signals.
    """
    known, stages = known_signals(), list(stages)
    for own, others, members in (("stage", "constraints", stages), ("constraint", "stages", constraints)):
        for path, asks in members:
            for name in sorted(requested(asks) & known.keys()):
                if (known[name].extent == "outputs") is (own == "stage"):
                    raise ValueError(
                        f"{path}: a {own} cannot request the signal '{name}', which is for {others} only; remove it"
                    )
    for path, stage in [*stages, *constraints]:
        for name in sorted(requested(stage) - known.keys()):
            hint = did_you_mean(name, known)
            raise ValueError(
                f"{path}: requires the unknown signal '{name}' (the signals are {', '.join(sorted(known))}){hint}"
            )


def asking(stages: Iterable[tuple[str, Asks]]) -> dict[str, str]:
    """Return {name of a signal: path of the first stage that requests the signal}.

    stages: every stage with its path.
    """
    found: dict[str, str] = {}
    for path, stage in stages:
        for name in sorted(requested(stage)):
            found.setdefault(name, path)
    return found


def entries(asked: Iterable[str]) -> int:
    """Return how many of the signals named in `asked` have one number for each entry of a parameter."""
    return sum(known_signals()[name].extent == "entry" for name in asked)
