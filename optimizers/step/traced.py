"""Traced programs: the program of a stack as one graph of tensors, compiled by Inductor.

A program is traced once by `make_fx`, and compiled for one kind of stack. While it is traced, the context of the step
gives each number of the step as an input tensor. Equal programs are compiled once in a process. Two forms exist:

- `EntryProgram`: an entry-wise chain with its write, for any number of entries; it updates parameters in place;
- `BlockProgram`: any chain, for stacks of one shape; it takes a stack of gradients and returns a stack of directions.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from threading import Timer
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode

from eigengraft.blocking.parameter_sums import sums_over
from eigengraft.component import Component
from eigengraft.errors import ContractError, warn_user
from eigengraft.numerics import number_like, upload
from eigengraft.schedules import NO_POWER, Schedule, extremes, value_at, with_numbers
from eigengraft.slots import EncodedSlot, State, StateKey, Storage
from eigengraft.step_context import TYPICAL_STEP, Question, StepContext

from ..recipe.recipe import UpdateRule
from ..write.write import StepRates, WeightDecay, WriteNumbers
from .program import add_decay, direction, move, plus_decay

NumberOfStep = Callable[[Tensor], Tensor]
"""Function from the step of a block, a float64 tensor, to a number that a stage needs, such as a bias correction."""
Ask = Callable[[NumberOfStep], Tensor]
"""Function that returns the value of a `NumberOfStep` at the current step, as a tensor that is an input of the program.
"""
Compiled = Callable[[list[Tensor]], Any]
"""A compiled program. It changes some of its input tensors in place, and empties the list in which it receives them."""
_LOG = logging.getLogger("eigengraft")
_PROGRESS_AFTER = 1.0
"""Duration of a compilation, in seconds, after which the log names the program. Loading a program from the cache on
disk takes less."""
_SPAN = 64
"""Number of steps whose numbers are computed together. If each step computed its numbers alone, this would take a tenth
of the time of a small model's step (measured)."""


@dataclass(frozen=True)
class ScheduledNumbers:
    """The scheduled numbers of the stages of an update. Programs of the update read these numbers as inputs.

    of_numbers: the schedule of each number, in the order of `_with_numbers`.
    total_steps: number of steps of the run.
    """

    of_numbers: tuple[Schedule, ...]
    total_steps: int | None

    @classmethod
    def of(cls, update: UpdateRule, total_steps: int | None) -> ScheduledNumbers:
        """Return the scheduled numbers of an update."""
        found: list[Schedule] = []
        _with_numbers(update, lambda schedule: found.append(schedule))
        return cls(tuple(found), total_steps if found else None)

    def samples(self, device: torch.device) -> list[Tensor]:
        """Return one 0-d sample input for each number.

        The inputs are float64, because stages compute numbers such as 1 - beta from them, which would lose bits in
        float32.
        """
        return _samples_of_numbers(0.0, len(self.of_numbers), torch.float64, device)

    def at(self, step: int) -> list[float]:
        """Return the numbers at a step of the run."""
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

    An operation whose argument `alpha` or `value` must be a float multiplies by the tensor instead. A comparison
    returns the result that holds for all values of the schedule. If there is no such result, or the number is read on
    the host in any other way, ContractError is raised.
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
    """Return the result of a comparison with `other` if it is the same for all numbers from `low` to `high`.

    Returns None if the result differs between these numbers, or if `name` is no comparison.
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


@dataclass(frozen=True)
class EntryProgram:
    """An object from which a program is traced. The program updates parameters and their state in place: it runs a
    chain of entry-wise stages and writes the result into the parameters.

    update: the update whose stages form the chain.
    path: path of the update in the recipe.
    decay: weight decay of the parameters.
    axes: number of axes of the blocks.
    keys: state keys of the slots.
    dtype: dtype of the computation.
    stored: dtype of parameters and gradients.
    schedules: scheduled numbers of the stages.
    masked: True if the inputs contain a mask `[n]` of the n blocks, after the numbers of the write. Then parameters,
        gradients and slots have the shape `[n, numel, 1, ...]`.
    """

    update: UpdateRule
    path: str
    decay: WeightDecay
    axes: int
    keys: tuple[str, ...]
    dtype: torch.dtype
    stored: torch.dtype
    device: torch.device
    schedules: ScheduledNumbers
    masked: bool = False
    symbolic: ClassVar[bool] = True
    """True if the length of the second axis of the tensors may change from call to call."""

    def __str__(self) -> str:
        return f"entries in {str(self.dtype).removeprefix('torch.')} on {self.device}"

    def same(self) -> tuple[Any, ...]:
        """Return the key of the compiled program: sources with equal keys share one program."""
        decay, run = self.decay.model_dump_json(), (self.schedules.total_steps, self.masked)
        return (_chains(self.update), self.path, decay, self.axes, self.keys, self.dtype, self.stored, self.device, run)

    @property
    def block(self) -> tuple[int, ...]:
        """Shape of a sample block for tracing: 64 entries, with as many axes as the blocks of the stack."""
        return (64, *[1] * (self.axes - 1))

    def samples(self) -> list[Tensor]:
        """Return sample inputs of the program, except the numbers that stages request.

        They are a parameter, its gradient and its slots, `[n, *block]` each; then the rates and the factor of the write
        (`WriteNumbers`), the mask `[n]` if the program has one, and the scheduled numbers.
        """
        shape = (2 if self.masked else 1, *self.block)
        dtypes = (self.stored, self.stored, *[self.dtype] * len(self.keys))
        numbers = _samples_of_numbers(0.0, len(WriteNumbers._fields), self.dtype, self.device)
        numbers += [torch.ones(3, dtype=torch.bool, device=self.device)[1:]] * self.masked  # not aligned, as a row
        entries = (torch.zeros(shape, dtype=own, device=self.device) for own in dtypes)
        return [*entries, *numbers, *self.schedules.samples(self.device)]

    def run(self, tensors: Sequence[Tensor], ask: Ask, questions: list[Question]) -> tuple[Tensor, ...]:
        """Run one step in place, and return no directions.

        tensors: inputs in the order of `samples`.
        ask: function that returns the value of each number of the step that a stage requests (`context.per_block`).
        questions: list to which each condition on the step that a stage checks (`context.holds`) is appended.
        """
        parameter, gradient, *rest = tensors
        held = dict(zip(self.keys, rest, strict=False))
        given = iter(rest[len(held) :])
        lr, shrink, alpha, rate, factor = (next(given) for _ in WriteNumbers._fields)
        mask = next(given) if self.masked else None
        scale = StepRates(lr, alpha, self.decay, rate, shrink)
        state = State(held, self.block, self.path, mask=mask)
        context, entries = tracing_context(ask, questions), (parameter, gradient)
        with _scheduled(self, given) as update:
            move(update, state.scope, entries, context, scale, factor)
        return ()


@dataclass(frozen=True)
class BlockProgram:
    """Source of a program that computes the directions of N blocks from their gradients, `[N, *block]` each.

    The program changes the state in place.

    update: the update whose stages form the chain.
    path: path of the update in the recipe.
    block: shape of a block.
    blocks: number N of blocks.
    slots: by name, shape and dtype of each tensor that stores state.
    encoded: slots that a quantizer stores.
    widths: True if the directions are multiplied by factors `[N]`, one for each block.
    decay: weight decay that is added to the directions; None if the write applies the decay.
    sizes: slots with step sizes, by which that decay is multiplied.
    signals: by name, shape and dtype of each signal that stages request.
    schedules: scheduled numbers of the stages.
    parameters: number of parameters to which the blocks belong, if stages take sums over the blocks of a parameter;
        None if they take no such sums.
    masked: True if one input is a mask `[N]` of the blocks whose state is written.
    """

    update: UpdateRule
    path: str
    block: tuple[int, ...]
    blocks: int
    dtype: torch.dtype
    device: torch.device
    slots: Mapping[str, tuple[tuple[int, ...], torch.dtype]]
    encoded: Mapping[str, EncodedSlot]
    widths: bool
    decay: WeightDecay | None
    sizes: tuple[StateKey, ...]
    signals: Mapping[str, tuple[tuple[int, ...], torch.dtype]]
    schedules: ScheduledNumbers
    parameters: int | None = None
    masked: bool = False
    symbolic: ClassVar[bool] = False

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.blocks} blocks of shape {list(self.block)} in {dtype} on {self.device}"

    def same(self) -> tuple[Any, ...]:
        decay = None if self.decay is None else self.decay.model_dump_json()
        coded = tuple((key, _json(how.codec), how.slot, how.dtype) for key, how in self.encoded.items())
        tensors = tuple(self.slots.items()), tuple(self.signals.items())
        kind = (self.block, self.blocks, self.dtype, self.device, self.widths, self.sizes, self.parameters)
        run = (self.schedules.total_steps, self.masked)
        return (_chains(self.update), self.path, decay, coded, *tensors, *kind, *run)

    def samples(self) -> list[Tensor]:
        """Return sample inputs of the program, except the numbers that stages request."""
        shapes = [((self.blocks, *self.block), self.dtype), *self.slots.values(), *self.signals.values()]
        shapes += [((self.blocks,), torch.int64)] * 2  # seeds and steps
        shapes += [((self.blocks,), torch.int64)] * (self.parameters is not None)
        shapes += [((self.blocks,), self.dtype)] * self.widths
        if self.decay is not None:
            shapes += [((self.blocks, *self.block), self.dtype), ((), self.dtype)]
        shapes += [((self.blocks,), torch.bool)] * self.masked
        tensors = [torch.zeros(shape, dtype=dtype, device=self.device) for shape, dtype in shapes]
        return [*tensors, *self.schedules.samples(self.device)]

    def run(self, tensors: Sequence[Tensor], ask: Ask, questions: list[Question]) -> tuple[Tensor, ...]:
        """Run one step, and return its directions. The arguments are those of `EntryProgram.run`."""
        given = iter(tensors)
        gradient, held = next(given), {name: next(given) for name in self.slots}
        signals = {name: next(given) for name in self.signals}
        seeds, steps = next(given), next(given)
        index = None if self.parameters is None else next(given)
        factors = next(given) if self.widths else None
        context = tracing_context(ask, questions, signals, steps)
        if index is not None and self.parameters is not None:
            context = context.with_sums(partial(sums_over, index, self.parameters))
        decaying, alpha = (next(given), next(given)) if self.decay is not None else (None, None)
        mask = next(given) if self.masked else None
        state = State(held, self.block, self.path, mask=mask, storage=Storage(self.encoded, lambda: (seeds, steps)))
        decay = None
        if self.decay is not None and decaying is not None and alpha is not None:
            scale = StepRates(1.0, alpha, self.decay)

            def decay(found: Tensor) -> Tensor:
                one_rate = lambda parameters, found: plus_decay(parameters, found, scale)  # noqa: E731
                return add_decay(found, decaying, state.scope("update"), self.sizes, one_rate)

        with _scheduled(self, given) as update:
            return (direction(update, state.scope, gradient, context, factors, decay),)


ProgramSource = EntryProgram | BlockProgram


@contextmanager
def _scheduled(source: ProgramSource, given: Iterator[Tensor]) -> Iterator[UpdateRule]:
    """Yield the update rule of a program for the time of its trace, with an input tensor for each scheduled number.

    A scheduled number is a field of a stage that has a schedule instead of one number.

    given: iterator over the inputs of the program. Its next inputs, the scheduled numbers, are read.
    """
    schedules = source.schedules
    if not schedules.of_numbers:
        yield source.update
        return
    numbers = [next(given) for _ in schedules.of_numbers]
    left = iter(numbers)
    with _TracedNumbers(schedules, numbers):
        yield _with_numbers(source.update, lambda _: next(left))


def _chains(update: UpdateRule) -> tuple[str, ...]:
    return tuple(stage.model_dump_json() for stage in (*update.update, *update.after_decay))


def _json(codec: object) -> str:
    assert isinstance(codec, Component)
    return codec.model_dump_json()


def _samples_of_numbers(value: float, count: int, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """Return equal numbers as 0-d sample inputs that are not aligned to 16 bytes.

    If a sample is aligned, Inductor's program on a GPU copies an input that is not, in each call and by a kernel.
    """
    return [torch.full((2,), value, dtype=dtype, device=device)[1] for _ in range(count)]


def tracing_context(
    ask: Ask, questions: list[Question], signals: Mapping[str, Tensor] | None = None, steps: Tensor | None = None
) -> StepContext:
    """Return the context of a step with which stages are traced. It has no refreshes.

    Stages receive numbers that depend on the step only as tensors, by the method `context.per_block`. If a stage reads
    a step count or a phase from the context itself, AttributeError is raised: otherwise this number of one step would
    become a constant of the program.

    ask: function that `context.per_block` calls for each number that a stage requests. It returns the tensor.
    questions: list to which each condition on the step that a stage checks (`context.holds`) is appended.
    signals: signals by name; None: there are none.
    steps: step of each block, int64 `[N]`; None: the context has no steps.
    """
    context = StepContext(
        np.ones(1, dtype=np.int64), np.zeros(1), np.zeros(1, dtype=np.int64), signals=signals or {}, numbers=ask
    )
    for name in ("steps", "phases", "param_ids", "seeds"):
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


@dataclass
class Program:
    """A traced program, with the functions that compute its inputs for a step.

    asked: for each number of the step that the stages request, the function that computes it, in the order of requests.
    questions: conditions on the step that the stages check. The program was traced with their results at
        `TYPICAL_STEP`, a step late in the run.
    """

    source: ProgramSource
    asked: list[NumberOfStep] = field(default_factory=list, init=False)
    questions: list[Question] = field(default_factory=list, init=False)
    _on_host: _Table = field(init=False)
    _asked: _Table = field(init=False)
    _scheduled: _Table = field(init=False)
    _writes: dict[WriteNumbers, list[Tensor]] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self._on_host = _Table(self._answers, torch.device("cpu"))
        self._asked, self._scheduled = (_Table(rows, self.source.device) for rows in (self._answers, self._present))
        with FakeTensorMode(allow_non_fake_inputs=True) as fake:  # as in the trace, so that decisions are the same
            samples = [fake.from_tensor(sample) for sample in self.source.samples()]
            self.source.run(samples, self._learn, self.questions)
        if any(
            isinstance(number(torch.ones((), dtype=torch.float64, device="cpu")), FakeTensor) for number in self.asked
        ):
            raise ContractError(
                "`context.per_block` needs a function of the step alone, got one that also reads a signal or a "
                "scheduled field"
            )

    def suits(self, steps: NDArray[np.int64]) -> bool:
        """Return True if the program is valid at all of these step counts of blocks.

        It is valid at a step count at which every condition in `questions` has the same result as at `TYPICAL_STEP`.
        """
        return all((question(steps) == question(TYPICAL_STEP)).all() for question in self.questions)

    def _learn(self, number: NumberOfStep) -> Tensor:
        self.asked.append(number)
        return number(torch.ones((), dtype=torch.float64, device="cpu"))

    @cached_property
    def graph(self) -> torch.fx.GraphModule:
        """The traced program. Its inputs are those of `source`, and then the numbers that stages request (`asked`)."""
        samples = self.samples()
        first = len(samples) - len(self.asked)

        def step(*tensors: Tensor) -> tuple[Tensor, ...]:
            numbers: Iterator[Tensor] = iter(tensors[first:])
            return self.source.run(tensors[:first], lambda number: next(numbers), [])

        return trace(step, samples, self.source.symbolic)

    @cached_property
    def compiled(self) -> Compiled:
        """The compiled program, with the inputs of `graph`."""
        try:
            compiled = generate(self.graph, self.source.symbolic)
            compiled(self.samples())
        except Exception as error:
            path = f"{self.source.path}.compile".lstrip(".")
            needs = "on a CPU it needs a C++ compiler"
            raise RuntimeError(f"{path}: Inductor could not compile the steps: {error}; {needs}") from error
        return compiled

    def samples(self) -> list[Tensor]:
        """Return sample tensors for all inputs of the program."""
        ones = _samples_of_numbers(1.0, len(self.asked), self.source.dtype, self.source.device)
        return [*self.source.samples(), *ones]

    def numbers(self, step: int, run_step: int) -> tuple[Tensor, ...]:
        """Return the last inputs of the program as tensors: scheduled numbers, then the numbers that stages request.

        step: step count of the blocks, from which the requested numbers are computed.
        run_step: step of the run, from which the scheduled numbers are computed.
        """
        asked = self._asked.row(step) if self.asked else ()
        return (*self._scheduled.row(run_step), *asked) if self.source.schedules.of_numbers else asked

    def host_numbers(self, step: int, run_step: int) -> list[float]:
        """Return the same numbers as the method `numbers`, as floats on the host."""
        asked = self._on_host.row(step) if self.asked else ()
        return [*self.source.schedules.at(run_step), *map(float, asked)]

    def eager(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Run the program without compilation, kernel by kernel, on the inputs of `compiled`."""
        first = len(tensors) - len(self.asked)
        numbers = iter(tensors[first:])
        return self.source.run(tensors[:first], lambda number: next(numbers), [])

    def _answers(self, steps: range) -> Tensor:
        at = torch.tensor(steps, dtype=torch.float64, device="cpu")
        return torch.stack([number(at).expand(len(steps)).to(self.source.dtype) for number in self.asked], 1)

    def _present(self, steps: range) -> Tensor:
        rows = [self.source.schedules.at(step) for step in steps]
        return torch.tensor(rows, dtype=torch.float64, device="cpu")

    def write_numbers(self, write: WriteNumbers) -> list[Tensor]:
        """Return the numbers of a write as tensors on the device, in the dtype of the program.

        A cache keeps the tensors of recent writes whose numbers are floats. The values of tensors may change.
        """
        if any(isinstance(x, Tensor) for x in write):
            like = torch.empty((), dtype=self.source.dtype, device=self.source.device)
            return [number_like(x, like) for x in write]
        if write not in self._writes:
            self._writes = {} if len(self._writes) == _SPAN else self._writes
            values = torch.tensor(write, dtype=self.source.dtype, device="cpu")
            self._writes[write] = list(upload(values, self.source.device).unbind())
        return self._writes[write]


@dataclass
class _Table:
    """A cache, on a device, of numbers that depend on the step, as 0-d tensors.

    Steps are grouped in fixed spans of 64. The numbers of a span are computed together and uploaded by one copy.

    rows: function that computes the k numbers of each of n steps on the host, `[n, k]`.
    """

    rows: Callable[[range], Tensor]
    device: torch.device
    _kept: tuple[int, list[tuple[Tensor, ...]]] | None = None

    def row(self, step: int) -> tuple[Tensor, ...]:
        """Return the k numbers that `rows` computes for a step, as 0-d tensors on the device."""
        start = step - step % _SPAN
        if self._kept is None or self._kept[0] != start:
            table = upload(self.rows(range(start, start + _SPAN)), self.device)
            self._kept = start, [row.unbind() for row in table.unbind()]
        return self._kept[1][step - start]


_PROGRAMS: dict[tuple[Any, ...], Program] = {}


def program_of(source: ProgramSource) -> Program:
    """Return the compiled program of a source. Equal sources are compiled once in a process.

    Raises ValueError if the update cannot be traced, RuntimeError if Inductor cannot compile the program, for example
    because there is no C++ compiler.
    """
    same = (type(source), source.same())
    if same not in _PROGRAMS:
        with _logged(source):
            try:
                program = Program(source)
                assert program.graph is not None
            except Exception as error:
                path = f"{source.path}.compile".lstrip(".")
                raise ValueError(f"{path}: the steps of this update cannot be traced: {error}") from error
            assert program.compiled is not None
        _PROGRAMS[same] = program
    return _PROGRAMS[same]


@contextmanager
def _logged(source: ProgramSource) -> Iterator[None]:
    """Write one line to the log of `eigengraft`, at level INFO, if the compilation of a program takes long."""
    path = f"{source.path}.compile".lstrip(".")
    line = f"{path}: compiling program {len(_PROGRAMS) + 1}, of {source}; later processes load it from a cache on disk"
    timer = Timer(_PROGRESS_AFTER, _LOG.info, [line])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()


def generate(graph: torch.fx.GraphModule, symbolic: bool) -> Compiled:
    """Compile a traced program.

    The compiled code is called without the guards of torch.compile. A call takes 4 us; with guards it takes ten times
    as long (measured). If this version of torch lacks functions for a call without guards, torch.compile is used, with
    a warning.

    symbolic: True if the length of the program's long axis may change from call to call.
    """
    try:
        return _without_guards(graph)
    except (ImportError, AttributeError, TypeError, AssertionError) as error:
        warn_user(
            f"compile: with torch {torch.__version__} the program runs with guards, so steps take longer ({error!r})"
        )
        guarded = torch.compile(lambda *tensors: graph(*tensors), dynamic=symbolic, fullgraph=True)
        return lambda tensors: guarded(*tensors)


def trace(step: Callable[..., Sequence[Tensor]], samples: Sequence[Tensor], symbolic: bool) -> torch.fx.GraphModule:
    """Return the operations of a step as a graph in which the writes in place come last."""
    from torch._inductor.decomposition import select_decomp_table  # loads the compiler
    from torch.fx.experimental.proxy_tensor import make_fx

    functional = torch.func.functionalize(step, remove="mutations_and_views")
    mode: Literal["fake", "symbolic"] = "symbolic" if symbolic else "fake"
    graph = make_fx(functional, decomposition_table=select_decomp_table(), tracing_mode=mode)(*samples)
    if symbolic:
        # Inductor's cache on disk pickles the graph, but cannot pickle this object; the inputs still reference it
        graph.shape_env = None
    return graph


def _without_guards(traced: torch.fx.GraphModule) -> Compiled:
    from torch._guards import TracingContext, tracing
    from torch._inductor.compile_fx import compile_fx_inner

    given = [node.meta["val"] for node in traced.graph.nodes if node.op == "placeholder"]
    with tracing(TracingContext(given[0].fake_mode)):
        graph: Any = compile_fx_inner(traced, given)
    found: Compiled = graph.current_callable
    return found
