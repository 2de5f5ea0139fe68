"""Traced programs: the update of equal blocks of many parameters as one graph of operations, compiled by Inductor.

A program is traced once by `make_fx`, for one chain of stages and one shape of blocks. While it is traced, stages
receive each number that depends on the step as an input tensor. Equal programs are compiled once in a process.
"""

from __future__ import annotations

import logging
import math
import operator
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cached_property, partial
from threading import Timer
from typing import Any, Literal, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch._ops import OpOverload, OpOverloadPacket
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode

from eigengraft.blocking.parameter_sums import sums_over
from eigengraft.component import Component
from eigengraft.errors import ContractError, warn_user
from eigengraft.numerics import upload
from eigengraft.schedules import NO_POWER, Schedule, extremes, value_at, with_numbers
from eigengraft.slots import EncodedSlot, State, StateKey, Storage, dotted
from eigengraft.step_context import TYPICAL_STEP, Question, StepContext

from ..recipe.recipe import UpdateRule
from ..write.write import StepRates, WeightDecay, WriteNumbers
from .stack_step import plus_decay, run_update, times_step_sizes, update_entries

NumberOfStep = Callable[[Tensor], Tensor]
"""Function from the step of a block, a float64 tensor, to a number that a stage needs, such as a bias correction."""
Ask = Callable[[NumberOfStep], Tensor]
"""Function that returns the value of a `NumberOfStep` at the current step, as a tensor that is an input of the program.
"""
CompiledCode = Callable[[list[Tensor]], Any]
"""A compiled program. It changes some of its input tensors in place, and empties the list in which it receives them."""
_LOG = logging.getLogger("eigengraft")
_PROGRESS_AFTER = 1.0
"""Duration of one compilation, in seconds, after which the log names the program, at level INFO. Loading a program from
the cache on disk takes less."""
_WARNING_AFTER = 10.0
"""Duration of all compilations of a parameter set, in seconds, after which the log names the present program, at level
WARNING, which Python shows by default. A user who has waited this long may think that the process hangs."""
_SPAN = 64
"""Number of successive steps for which the numbers that depend on the step, such as bias corrections, are computed and
uploaded together. If they were computed in each step alone, this would take a tenth of the time of a small model's step
(measured)."""


@dataclass(frozen=True)
class ScheduledNumbers:
    """The fields of an update's stages that have a schedule in place of a number. Traced programs read them as inputs.

    of_numbers: the schedules, in the order of the stages and of their fields.
    total_steps: number of steps of the run. None: it is unknown, or the update has no schedules.
    """

    of_numbers: tuple[Schedule, ...]
    total_steps: int | None

    @classmethod
    def of(cls, update: UpdateRule, total_steps: int | None) -> ScheduledNumbers:
        """Return the scheduled numbers of an update.

        total_steps: number of steps of the run. None: unknown, if no schedule depends on it.
        """
        of_numbers: list[Schedule] = []
        _with_numbers(update, of_numbers.append)
        return cls(tuple(of_numbers), total_steps if of_numbers else None)

    @property
    def names(self) -> tuple[str, ...]:
        """Names that the numbers have among the inputs of a traced program."""
        return tuple(f"scheduled.{at}" for at in range(len(self.of_numbers)))

    def at(self, step: int) -> list[float]:
        """Return the values of the schedules at a step of the run."""
        return [float(value_at(schedule, step, self.total_steps)) for schedule in self.of_numbers]


def _with_numbers(update: UpdateRule, number: Callable[[Schedule], Any]) -> UpdateRule:
    """Return an update in which `number(schedule)` replaces each scheduled number of the stages."""
    chains = {
        name: tuple(with_numbers(stage, number) for stage in getattr(update, name))
        for name in ("update", "after_decay")
    }
    return update.model_copy(update=chains)


class _TracedNumbers(TorchFunctionMode):
    """Lets stages compute with 0-d tensors where their fields are floats.

    Some operations, such as `x.add(y, alpha=a)` and `x.addcmul(y, z, value=a)`, accept only a float a. If a stage calls
    them with a tensor a, y is multiplied by a, and the operation is called without a. A comparison of a scheduled
    number returns the result that holds for all values of its schedule. ContractError is raised if there is no such
    result, or if the number is read on the host in any other way. ValueError is raised if the number is the base of a
    power.
    """

    def __init__(self, schedules: ScheduledNumbers, numbers: Sequence[Tensor]) -> None:
        super().__init__()
        self._numbers = list(numbers)  # keeps the tensors alive, so that no other tensor gets one of their ids
        pairs = zip(self._numbers, schedules.of_numbers, strict=True)
        self._bounds = {id(x): extremes(schedule) for x, schedule in pairs}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, given = func.__name__, dict(kwargs or {})
        if args and (bounds := self._bounds.get(id(args[0]))) is not None:
            if name in ("__pow__", "pow"):
                raise ValueError(NO_POWER)
            if name in _ON_THE_HOST:
                answer = _answer(name, *bounds, *(args[1:] or (0.0,)))
                if answer is None:
                    raise ContractError(
                        "a scheduled number must not be read on the host, because the program would keep its value for "
                        "all steps"
                    )
                return answer
        if name in _WITH_ALPHA and isinstance(alpha := given.get("alpha"), Tensor):
            args, given = (args[0], args[1] * alpha), {}
        if name in _WITH_VALUE and isinstance(value := given.get("value"), Tensor):
            args, given = (args[0], args[1] * value, args[2]), {}
        if name in ("lerp", "lerp_") and isinstance(args[2], Tensor) and args[2].ndim == 0:
            args = (args[0], args[1], args[2].to(args[0].dtype))
        if name == "clamp" and sum(isinstance(x, Tensor) for x in args[1:]) == 1 and len(args) == 3:
            return args[0].clamp_min(args[1]).clamp_max(args[2])
        return func(*args, **given)


_WITH_ALPHA = frozenset({"add", "add_", "sub", "sub_"})
_WITH_VALUE = frozenset({"addcmul", "addcmul_", "addcdiv", "addcdiv_"})
_ON_THE_HOST = frozenset(
    f"__{name}__" for name in ("lt", "le", "gt", "ge", "eq", "ne", "bool", "float", "int", "index")
) | {"item", "tolist", "lt", "le", "gt", "ge", "eq", "ne"}


def _answer(name: str, low: float, high: float, other: Any) -> bool | None:
    """Return the result of a comparison of a number with `other`, if it is the same for all numbers in [low, high].

    Returns None if the result differs between these numbers, or if the method is no comparison.

    name: name of the method of the number, such as "lt" or "__lt__". "__bool__" is a comparison with 0.
    """
    name = name.strip("_")
    if not isinstance(other, (int, float)):
        return None
    if name in ("eq", "ne", "bool"):
        apart = not low <= other <= high
        return (apart if name != "eq" else False) if apart else None
    if name not in ("lt", "le", "gt", "ge"):
        return None
    answers = {bool(getattr(operator, name)(bound, other)) for bound in (low, high)}
    return answers.pop() if len(answers) == 1 else None


TensorKind = tuple[tuple[int, ...], torch.dtype]
"""Shape and dtype of a tensor."""


@dataclass(frozen=True)
class ProgramSource:
    """The declaration of a program: all that determines which operations are traced.

    A program changes state in place. It has one of two forms:

    - Directions (`stored` is None): it computes directions `[N, *block]` from gradients `[N, *block]`, for any chain
      and a fixed number N of blocks.
    - Entries (`stored` is a dtype): it updates entries of parameters in place, for an entry-wise chain and any number
      of entries. It is traced with sample tensors `[blocks, *block]`, in which a block is a row of a parameter's
      entries. In a step, the tensors may have another length on their second axis.

    Fields of both forms:

    update: the update whose stages form the chain.
    path: path of the update in the recipe.
    blocks: number N of blocks.
    block: shape of a block.
    dtype: dtype of the computation.
    device: device on which the program runs.
    slots: by name, shape and dtype of each tensor that stores state.
    decay: in the form directions, the rule of the weight decay that is added to directions, or None if none is added.
        In the form entries, the rule of the weight decay with which parameters are written.
    schedules: scheduled numbers of the stages.
    masked: True if one input is a mask `[blocks]`, True for each block whose state and parameters are written.
    stored: dtype of the parameters that a program of the form entries writes. None: the form is directions.

    Fields of the form directions, which have their defaults in the form entries:

    encoded: slots that a quantizer stores, by name.
    scaled: True if the directions are multiplied by factors `[N]`, one for each block.
    step_sizes: slots in which stages store a step size of each block. Decay that is added to directions is multiplied
        by this step size.
    signals: by name, shape and dtype of each signal that stages request.
    matrices: number of parameters to which the blocks belong, if stages take sums over the blocks of a parameter. Each
        matrix of a view of a parameter counts. None: the stages take no such sums.
    """

    update: UpdateRule
    path: str
    blocks: int
    block: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    slots: Mapping[str, TensorKind]
    decay: WeightDecay | None
    schedules: ScheduledNumbers
    masked: bool = False
    stored: torch.dtype | None = None
    encoded: Mapping[str, EncodedSlot] = field(default_factory=dict)
    scaled: bool = False
    step_sizes: tuple[StateKey, ...] = ()
    signals: Mapping[str, TensorKind] = field(default_factory=dict)
    matrices: int | None = None

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        what = "entries" if self.symbolic else f"{self.blocks} blocks of shape {list(self.block)}"
        return f"{what} in {dtype} on {self.device}"

    @property
    def symbolic(self) -> bool:
        """True if the length of the second axis of the tensors may change from call to call."""
        return self.stored is not None

    @cached_property
    def inputs(self) -> Mapping[str, TensorKind]:
        """Shape and dtype of each input of the program by name, in order.

        Left out are the numbers that stages request by `context.per_block`, such as bias corrections. They are known
        only after tracing (`Program.asked`). The inputs of a program that updates parameters begin with the parameter,
        the gradient, the slots and the fields of `WriteNumbers`. Scheduled numbers are float64, because stages compute
        numbers such as 1 - beta from them, which would lose bits in float32.
        """
        entries, each, number = (self.blocks, *self.block), (self.blocks,), ((), self.dtype)
        known: dict[str, TensorKind | None] = {"gradient": (entries, self.stored or self.dtype), **self.slots}
        if self.stored is not None:
            known = {"parameter": (entries, self.stored), **known, **dict.fromkeys(WriteNumbers._fields, number)}
        else:
            known |= {signal_input(name): kind for name, kind in self.signals.items()}
            known |= {"seeds": (each, torch.int64), "steps": (each, torch.int64)}
            known["matrix_index"] = None if self.matrices is None else (each, torch.int64)
            known["factor"] = (each, self.dtype) if self.scaled else None
            known |= {} if self.decay is None else {"decaying": (entries, self.dtype), "alpha": number}
        known["mask"] = (each, torch.bool) if self.masked else None
        known |= dict.fromkeys(self.schedules.names, ((), torch.float64))
        return {name: kind for name, kind in known.items() if kind is not None}

    def run(self, given: Mapping[str, Tensor], ask: Ask, questions: list[Question]) -> tuple[Tensor, ...]:
        """Run one step. Return (directions,) in the form directions, and () in the form entries.

        given: the inputs by name.
        ask, questions: arguments of `tracing_context`, by which stages request numbers of the step and check conditions
            on it.
        """
        signals = {name: given[signal_input(name)] for name in self.signals}
        context = tracing_context(ask, questions, signals, given.get("steps"))
        if self.matrices is not None:
            context = context.with_sums(partial(sums_over, given["matrix_index"], self.matrices))
        storage = Storage(self.encoded, lambda: (given["seeds"], given["steps"]))
        held = {name: given[name] for name in self.slots}
        state = State(held, self.block, self.path, mask=given.get("mask"), storage=storage)
        with _scheduled(self, given) as update:
            if self.stored is None:
                added = None if self.decay is None else partial(self._add_decay, given, state)
                return (run_update(update, state.scope, given["gradient"], context, given.get("factor"), added),)
            assert self.decay is not None
            lr, shrink, alpha, rate, factor = (given[name] for name in WriteNumbers._fields)
            rates = StepRates(lr, alpha, self.decay, rate, shrink)
            update_entries(update, state.scope, (given["parameter"], given["gradient"]), context, rates, factor)
            return ()

    def _add_decay(self, given: Mapping[str, Tensor], state: State, directions: Tensor) -> Tensor:
        """Return directions plus their weight decay alpha W. The inputs `decaying` and `alpha` are W and alpha.

        given: the inputs of the program by name.
        state: state of the stages.
        directions: directions `[N, *block]`.
        """
        assert self.decay is not None
        rates = StepRates(1.0, given["alpha"], self.decay)
        return plus_decay(
            times_step_sizes(given["decaying"], state.scope("update"), self.step_sizes), directions, rates
        )


def signal_input(name: str) -> str:
    """Return the name that a signal has among the inputs of a traced program."""
    return f"signals.{name}"


@contextmanager
def _scheduled(source: ProgramSource, given: Mapping[str, Tensor]) -> Iterator[UpdateRule]:
    """Yield the update rule that is traced, with an input tensor in place of each scheduled number.

    A scheduled number is a field of a stage that has a schedule. Within this context stages compute with the tensor as
    with a float.

    source: the declaration of the traced program.
    given: the inputs of the program by name.
    """
    schedules = source.schedules
    if not schedules.of_numbers:
        yield source.update
        return
    numbers = [given[name] for name in schedules.names]
    left = iter(numbers)
    with _TracedNumbers(schedules, numbers):
        yield _with_numbers(source.update, lambda _: next(left))


def _key(x: Any) -> Hashable:
    """Return a hashable key of a declaration (`ProgramSource`), by which a cache finds its program.

    The key has the keys of all fields, which this function computes by calling itself. The key of an
    update rule has only its two chains of stages. Declarations with equal keys share one compiled program.

    x: the declaration, or a part of it.
    """
    if isinstance(x, UpdateRule):
        return _key((x.update, x.after_decay))
    if isinstance(x, Component):
        return type(x), x.model_dump_json()
    if isinstance(x, Mapping):
        return tuple((name, _key(value)) for name, value in x.items())
    if is_dataclass(x):
        return type(x), *(_key(getattr(x, member.name)) for member in fields(x))
    return tuple(map(_key, x)) if isinstance(x, tuple) else cast(Hashable, x)


def _sample(kind: TensorKind, device: torch.device, value: float = 0.0) -> Tensor:
    """Return a tensor in place of an input, with which a program is traced. All of its entries are `value`.

    Samples of 0-d numbers and of masks (a boolean for each block) begin at an address that is no multiple of 16 bytes.
    Their memory is not aligned because in a step they may be parts of a larger tensor, at any address. With aligned
    samples, Inductor would compile a program for a GPU that copies such inputs in every call, by one more kernel.

    kind: shape and dtype of the input.
    """
    shape, dtype = kind
    if shape and dtype != torch.bool:
        return torch.full(shape, value, dtype=dtype, device=device)
    return torch.full((math.prod(shape) + 1,), value, dtype=dtype, device=device)[1:].view(shape)


def tracing_context(
    ask: Ask, questions: list[Question], signals: Mapping[str, Tensor], steps: Tensor | None
) -> StepContext:
    """Return the context that stages receive while their operations are traced. No refresh of a stage is due in it.

    A number that depends on the step must not become a constant of the traced program. Stages therefore receive such a
    number as a tensor, from the method `context.per_block`. If a stage reads `steps`, `phases`, `matrix_ids` or `seeds`
    of the context, which are numbers of one step or stack on the host, ContractError is raised.

    ask: function that `context.per_block` calls. The argument is a stage's function of the step, and the result is a
        tensor that stands for the value of that function in the traced program.
    questions: list to which `context.holds` appends each condition on the step that a stage checks.
    signals: signals (inputs of stages beside gradient and direction) by name.
    steps: int64 `[N]` on the device, the step of each block, which stages read as `context.step`. None: stages cannot
        read it.
    """
    context = StepContext(
        np.ones(1, dtype=np.int64), np.zeros(1), np.zeros(1, dtype=np.int64), signals=signals, ask=ask
    )
    for name in ("steps", "phases", "matrix_ids", "seeds"):
        del context.__dict__[name]
    context.__dict__["questions"] = questions
    context.__dict__["due"] = context.__dict__["asked"] = _NothingDue()
    if steps is not None:
        context.__dict__["step"] = steps
    return context


class _NothingDue(dict[int, tuple[()]]):
    """Mapping from any stage to an empty tuple: no refresh is due in a traced step."""

    def __contains__(self, key: object) -> bool:
        return True

    def __missing__(self, key: int) -> tuple[()]:
        return ()


@dataclass(eq=False)
class Program:
    """An update as a traced program: a graph of operations, and the functions that compute numbers of a step for it.

    While stages are traced, they branch as at `TYPICAL_STEP`, a late step. They request numbers that depend on the
    step, such as bias corrections, by `context.per_block`. Each of these numbers is an input of the program.

    source: the declaration of the program.
    asked: for each requested number, the function of the step that computes it, in the order of requests.
    questions: conditions on the step that stages check, such as `step > 10`, each as a function of step counts. The
        program is valid for steps at which all conditions have the same values as at `TYPICAL_STEP`.
    inputs: shape and dtype of each input by name, in order: the inputs that `source` declares, then the requested
        numbers.
    numbered: names of the last inputs: scheduled numbers, and then the requested numbers.
    """

    source: ProgramSource
    asked: list[NumberOfStep] = field(default_factory=list, init=False)
    questions: list[Question] = field(default_factory=list, init=False)
    inputs: Mapping[str, TensorKind] = field(init=False)
    numbered: tuple[str, ...] = field(init=False)
    _on_host: _Table = field(init=False)
    _asked: _Table = field(init=False)
    _scheduled: _Table = field(init=False)
    _constants: dict[tuple[float | Tensor, ...], tuple[Tensor, ...]] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        source = self.source
        # The numbers that stages request are found by a run with fake tensors. `trace` uses fake tensors too, so stages
        # take the same branches of their code in both.
        with FakeTensorMode(allow_non_fake_inputs=True) as fake:
            samples = {name: fake.from_tensor(_sample(kind, source.device)) for name, kind in source.inputs.items()}
            source.run(samples, self._learn, self.questions)
        if any(
            isinstance(number(torch.ones((), dtype=torch.float64, device="cpu")), FakeTensor) for number in self.asked
        ):
            raise ContractError(
                "`context.per_block` needs a function of the step alone, got one that also reads a signal or a "
                "scheduled field"
            )
        scheduled, asked = source.schedules.names, tuple(f"asked.{at}" for at in range(len(self.asked)))
        self.inputs, self.numbered = {**source.inputs, **dict.fromkeys(asked, ((), source.dtype))}, scheduled + asked
        self._on_host = _Table(asked, self._answers, torch.device("cpu"))
        self._asked = _Table(asked, self._answers, source.device)
        self._scheduled = _Table(scheduled, self._present, source.device)

    def suits(self, steps: NDArray[np.int64]) -> bool:
        """Return True if the program is valid at all of these step counts of blocks.

        The program is valid at a step count if every condition in `questions` has the same result as at `TYPICAL_STEP`.

        steps: step counts of blocks, int64, of any number.
        """
        return all((question(steps) == question(TYPICAL_STEP)).all() for question in self.questions)

    def _learn(self, number: NumberOfStep) -> Tensor:
        self.asked.append(number)
        return number(torch.ones((), dtype=torch.float64, device="cpu"))

    @cached_property
    def graph(self) -> torch.fx.GraphModule:
        """The traced program. Its arguments are the tensors of `inputs`."""
        return trace(lambda *tensors: self.eager(tensors), self.samples(), self.source.symbolic)

    @cached_property
    def compiled(self) -> CompiledCode:
        """The compiled program, which receives the tensors of `inputs` as a list."""
        try:
            compiled = generate(self.graph, self.source.symbolic)
            compiled(self.samples())
        except Exception as error:
            path = dotted(self.source.path, "compile")
            needs = "on a CPU, install a C++ compiler, or remove compile"
            raise RuntimeError(f"{path}: Inductor could not compile the steps: {error}; {needs}") from error
        return compiled

    def samples(self) -> list[Tensor]:
        """Return tensors of the right shapes and dtypes for all inputs, with which the program is traced.

        Numbers that depend on the step, such as bias corrections, are 1; all other inputs are 0.
        """
        known, device = self.source.inputs, self.source.device
        return [_sample(kind, device, float(name not in known)) for name, kind in self.inputs.items()]

    def ordered(self, given: Mapping[str, Tensor]) -> list[Tensor]:
        """Return the inputs of the program as a list, from tensors by name."""
        return [given[name] for name in self.inputs]

    def numbers(self, step: int, run_step: int) -> dict[str, Tensor]:
        """Return the inputs of the program that depend on the step, as 0-d tensors on the device, by name.

        These inputs are the scheduled fields of stages, and the functions of the step that stages compute by
        `context.per_block`, such as bias corrections.

        step: step count of the program's blocks, at which these functions are evaluated; the first step is 1.
        run_step: step of the run, at which the scheduled fields are evaluated; the first step is 1. `run_step` is
            larger than `step` if, for example, the parameters of the blocks had no gradients in some steps.
        """
        return {**self._scheduled.row(run_step), **self._asked.row(step)}

    def host_numbers(self, step: int, run_step: int) -> list[float]:
        """Return the inputs that depend on the step, as the method `numbers` does, but as floats on the host.

        The floats are in the order of `numbered`, the names of these inputs. The arguments are those of `numbers`.
        """
        return [*self.source.schedules.at(run_step), *map(float, self._on_host.row(step).values())]

    def eager(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Run the program without compilation, kernel by kernel.

        tensors: the inputs in the order of `inputs`.
        """
        given = dict(zip(self.inputs, tensors, strict=True))
        asked = iter(tensors[len(self.source.inputs) :])
        return self.source.run(given, lambda number: next(asked), [])

    def _answers(self, steps: range) -> Tensor:
        at = torch.tensor(steps, dtype=torch.float64, device="cpu")
        return torch.stack([number(at).expand(len(steps)).to(self.source.dtype) for number in self.asked], 1)

    def _present(self, steps: range) -> Tensor:
        rows = [self.source.schedules.at(step) for step in steps]
        return torch.tensor(rows, dtype=torch.float64, device="cpu")

    def write_numbers(self, write: WriteNumbers) -> dict[str, Tensor]:
        """Return learning rate, weight decay and factor of an update as 0-d tensors on the device, by name.

        The tensors have the dtype of the program. Tensors of recent floats are cached, so that a constant rate is
        uploaded once. A rate that is a tensor is only cast, because its value may change.
        """
        if not any(isinstance(x, Tensor) for x in write):
            return dict(zip(write._fields, self._uploaded(write), strict=True))
        dtype, device = self.source.dtype, self.source.device
        tensors = (x.to(device, dtype) if isinstance(x, Tensor) else self._uploaded((x,))[0] for x in write)
        return dict(zip(write._fields, tensors, strict=True))

    def _uploaded(self, numbers: tuple[float | Tensor, ...]) -> tuple[Tensor, ...]:
        """Return floats as cached 0-d tensors on the device."""
        if numbers not in self._constants:
            self._constants = {} if len(self._constants) == _SPAN else self._constants
            values = torch.tensor(numbers, dtype=self.source.dtype, device="cpu")
            self._constants[numbers] = upload(values, self.source.device).unbind()
        return self._constants[numbers]


@dataclass
class _Table:
    """A cache, on a device, of numbers that depend on the step, as 0-d tensors.

    Steps are grouped in fixed spans of 64. The numbers of a span are computed together and uploaded by one copy.

    names: names of the k numbers.
    rows: function that computes the k numbers of each of n steps on the host, `[n, k]`. It is not called if k = 0.
    """

    names: tuple[str, ...]
    rows: Callable[[range], Tensor]
    device: torch.device
    _kept: tuple[int, list[dict[str, Tensor]]] | None = None

    def row(self, step: int) -> dict[str, Tensor]:
        """Return the numbers of a step by name, as 0-d tensors on the device, from the cache if it has them."""
        if not self.names:
            return {}
        start = step - step % _SPAN
        if self._kept is None or self._kept[0] != start:
            table = upload(self.rows(range(start, start + _SPAN)), self.device)
            self._kept = start, [dict(zip(self.names, row.unbind(), strict=True)) for row in table.unbind()]
        return self._kept[1][step - start]


_PROGRAMS: dict[Hashable, Program] = {}


def program_of(source: ProgramSource) -> Program:
    """Return the traced program of a source, which `compile_programs` compiles. Equal sources have one program in a
    process.

    Raises ValueError if the update cannot be traced.
    """
    key = _key(source)
    if key not in _PROGRAMS:
        try:
            program = Program(source)
            assert program.graph is not None
        except Exception as error:
            path = dotted(source.path, "compile")
            raise ValueError(f"{path}: the steps of this update cannot be traced: {error}; remove compile") from error
        _PROGRAMS[key] = program
    return _PROGRAMS[key]


def compile_programs(programs: Iterable[Program]) -> None:
    """Compile the programs that are not compiled yet, one after another, and log those that take long.

    Raises RuntimeError if Inductor cannot compile a program, for example because there is no C++ compiler.
    """
    left = [program for program in dict.fromkeys(programs) if "compiled" not in vars(program)]
    if not left:
        return
    line = ""
    with _after(_WARNING_AFTER, lambda: _LOG.warning(line)):
        for number, program in enumerate(left, 1):
            path = dotted(program.source.path, "compile")
            line = (
                f"{path}: compiling program {number} of {len(left)}, of {program.source}; later processes load it from "
                "a cache on disk"
            )
            with _after(_PROGRESS_AFTER, partial(_LOG.info, line)):
                assert program.compiled is not None


@contextmanager
def _after(seconds: float, act: Callable[[], None]) -> Iterator[None]:
    """Call `act` in another thread if the block under `with` still runs after this time, in seconds."""
    timer = Timer(seconds, act)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()


def generate(graph: torch.fx.GraphModule, symbolic: bool) -> CompiledCode:
    """Compile a traced program.

    The compiled code is called without the guards of torch.compile. A call takes 4 us; with guards it takes ten times
    as long (measured). If this version of torch lacks functions for a call without guards, torch.compile is used, with
    a warning.

    symbolic: True if the length of the second axis of the input tensors may change from call to call.
    """
    try:
        return _without_guards(graph)
    except (ImportError, AttributeError, TypeError, AssertionError) as error:
        warn_user(
            f"compile: steps take longer with torch {torch.__version__}, because torch checks the inputs of the "
            f"compiled program in each step; a function that avoids these checks failed: {error!r}"
        )
        guarded = torch.compile(lambda *tensors: graph(*tensors), dynamic=symbolic, fullgraph=True)
        return lambda tensors: guarded(*tensors)


def trace(step: Callable[..., Sequence[Tensor]], samples: Sequence[Tensor], symbolic: bool) -> torch.fx.GraphModule:
    """Return the operations of a step as a graph in which the writes in place come last.

    step: function of tensors, which it may change in place.
    samples: tensors with the shapes and dtypes of the arguments of `step`.
    symbolic: True if the length of the second axis of the tensors may change from call to call.
    """
    from torch._inductor.decomposition import select_decomp_table  # loads the compiler
    from torch.fx.experimental.proxy_tensor import make_fx

    functional = torch.func.functionalize(step, remove="mutations_and_views")
    mode: Literal["fake", "symbolic"] = "symbolic" if symbolic else "fake"
    table = {**select_decomp_table(), **_one_by_one()}
    graph = make_fx(functional, decomposition_table=table, tracing_mode=mode)(*samples)
    if symbolic:
        # Inductor's cache on disk pickles the graph, but cannot pickle this object; the inputs still reference it
        graph.shape_env = None
    return graph


def _one_by_one() -> dict[OpOverload, Callable[..., list[Tensor]]]:
    """Return a decomposition for each operation `_foreach_...` of torch: it calls the operation on single tensors.

    On a GPU, Inductor compiles an operation on a list as a kernel of its own, which it fuses with no other operation. A
    step of AdamW would then be two kernels, both of which read the moments.
    """
    aten, functions = torch.ops.aten, dict[OpOverload, Callable[..., list[Tensor]]]()
    for name in ("add", "sub", "mul", "div", "lerp", "sign", "clamp_min", "copy"):
        packet = getattr(aten, f"_foreach_{name}")
        overloads = (overload for overload in packet.overloads() if not overload.endswith("out"))
        functions |= {getattr(packet, overload): partial(_each, getattr(aten, name)) for overload in overloads}
    return functions


def _each(single: OpOverloadPacket, tensors: Sequence[Tensor], *others: Any, **options: Any) -> list[Tensor]:
    """Call the operation `single` for each tensor of a list, and return the list of the results.

    others: further arguments. A list has an item for each tensor. Any other value is used for all tensors.
    options: keyword arguments, which are used for all tensors.
    """
    rows = (
        [other[at] if isinstance(other, (list, tuple)) else other for other in others] for at in range(len(tensors))
    )
    return [single(x, *row, **options) for x, row in zip(tensors, rows, strict=True)]


def _without_guards(traced: torch.fx.GraphModule) -> CompiledCode:
    from torch._guards import TracingContext, tracing
    from torch._inductor.compile_fx import compile_fx_inner

    given = [node.meta["val"] for node in traced.graph.nodes if node.op == "placeholder"]
    with tracing(TracingContext(given[0].fake_mode)):
        graph: Any = compile_fx_inner(traced, given)
    code: CompiledCode = graph.current_callable
    return code
