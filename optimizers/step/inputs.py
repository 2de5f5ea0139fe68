"""The inputs of one step of a parameter set: its gradients, rates, step counts and signals.

A step is made in two phases. The check of the gradients returns the inputs, and nothing has changed by then. Signals
and the check for spikes may replace fields of the inputs. `ParamSet.step` then runs the step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ..write.write import Rates
from .gradients import GradientSurvey
from .traced import Program


@dataclass(frozen=True)
class GraphNumbers:
    """Numbers of a captured step that follow from step counts, as tensors on the device that the graph reads.

    The tensors are filled before each replay. A stack is a set of equal blocks of parameters that are updated together,
    and a program is a traced function that computes their update.

    counts: by index of a stack, the step count of its blocks, 0-d; float32 for a fused kernel, else float64.
    of_programs: {(index of a stack, program of this stack): {name of an input: tensor}}, for the inputs of the program
        that change from step to step (`Program.numbered`).
    """

    counts: Mapping[int, Tensor]
    of_programs: Mapping[tuple[int, Program], Mapping[str, Tensor]]


@dataclass(frozen=True)
class StepInputs:
    """The inputs of one step of P parameters. Lists have an item for each parameter, by position.

    gradients: gradients of the entries that this rank updates. None: the parameter has no gradient.
    active: `[P]` on the host, True for parameters that the step updates.
    written: `[P]` on the host, True for the active parameters that the step changes. It is False for a parameter whose
        gradient, the first one, only initializes statistics (priming).
    mask: `[P]` on the device, True for usable gradients. None: the gradients of all active parameters are usable.
    rates: learning rate and weight decay of each parameter.
    survey: facts about the full gradients, such as their norms.
    counts: `[P]` on the host, number of gradients of each parameter, including the present gradient if it is active.
    own_entries: the entries of each parameter that this rank updates. In one process they are the parameters.
    signals: inputs of stages beside gradients, of two kinds. A sum of a slot over all parameters is a number, under the
        key of the slot. A signal is stored under its name, in a form that follows from its `Signal.extent`:
        "step": one number.
        "parameter": `[P]`.
        "input_matrix", "output_matrix": a list with a `SideMatrix` for each parameter.
        "partner": a mapping from the position of a parameter to its tensor.
        any other extent: a list with a tensor for each parameter.
    numbers: numbers that follow from step counts, in the memory that a graph reads. None: no graph captures the step,
        and the host computes these numbers.
    found_inf: 0-d float32 on the device. 1: fused kernels change nothing, because a gradient is not usable or a scaler
        of the loss stops the step. None: kernels need no such number, because the host has read the check of the
        gradients, or `mask` has its result.
    """

    gradients: Sequence[Any]
    active: NDArray[np.bool_]
    written: NDArray[np.bool_]
    mask: Tensor | None
    rates: Rates
    survey: GradientSurvey
    counts: NDArray[np.int64]
    own_entries: Sequence[Tensor]
    signals: Mapping[str, Any] = field(default_factory=dict)
    numbers: GraphNumbers | None = None
    found_inf: Tensor | None = None
