"""Traced programs: the program of a stack as one graph of tensors, compiled by Inductor.

A program is traced once by `make_fx`, through a context that gives every number of a step as an input, and compiled for
one kind of stack. Equal programs are compiled once in a process. Two forms exist:

- `EntryProgram`: entry-wise chains with their write, for any number of entries, run where parameters lie;
- `BlockProgram`: any chain, for stacks of one shape, from a stack of gradients to a stack of directions.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from threading import Timer
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode

from eigengraft.blocking.parameter_sums import sums_over
from eigengraft.component import Component
from eigengraft.errors import ContractError, warn_user
from eigengraft.numerics import upload
from eigengraft.schedules import NO_POWER, Schedule, extremes, value_at, with_numbers
from eigengraft.slots import EncodedSlot, State, StateKey, Storage
from eigengraft.step_context import TYPICAL_STEP, Question, StepContext

from ..recipe.recipe import UpdateRule
from ..write.write import StepRates, WeightDecay
from .program import add_decay, direction, move, plus_decay

NumberOfStep = Callable[[Tensor], Tensor]
"""A number that a stage needs, as a function of the step of a block, float64."""
Ask = Callable[[NumberOfStep], Tensor]
Compiled = Callable[[list[Tensor]], Any]
"""A compiled program, which changes some of its tensors in place; it empties the list that it is given."""
_LOG = logging.getLogger("eigengraft")
_PROGRESS_AFTER = 1.0
"""Seconds of a compilation after which the log says what is compiled: programs that a cache on disk holds take less."""
_SPAN = 64
"""Steps whose numbers are computed at once: one at a time they take a tenth of a step of small models (measured)."""


class WriteNumbers(NamedTuple):
    """The numbers of a write: lr, 1 - lr alpha, alpha, rate of a decay in the gradient, factor of the direction."""

    lr: float
    shrink: float
    alpha: float
    rate: float
    factor: float


class ProgramSource(Protocol):
    """What a program is traced from."""

    @property
    def path(self) -> str: ...

    @property
    def schedules(self) -> ScheduledNumbers:
        """The scheduled numbers of its stages, which are the last of `samples`."""

    @property
    def masked(self) -> bool:
        """Whether a mask says which blocks are written."""

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def symbolic(self) -> bool:
        """Whether the only long axis of the tensors may have another length in each call."""

    def same(self) -> tuple[Any, ...]:
        """What sources of the same compiled program have in common."""

    def samples(self) -> list[Tensor]:
        """Tensors like the inputs that a step has, without the numbers that stages ask for."""

    def run(self, tensors: Sequence[Tensor], ask: Ask, questions: list[Question]) -> tuple[Tensor, ...]:
        """One step; tensors: as of `samples`; ask: gives the numbers that stages ask for.

        questions: is given those that stages ask of the steps of blocks.
        """


@dataclass(frozen=True)
class ScheduledNumbers:
    """The scheduled numbers of the stages of an update, which are inputs of its programs.

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
        """One number for each, in float64: 1 - b loses the bits of b in 32."""
        return [torch.zeros((), dtype=torch.float64, device=device) for _ in self.of_numbers]

    def at(self, step: int) -> list[float]:
        """The numbers at a step of the run."""
        return [float(value_at(schedule, step, self.total_steps)) for schedule in self.of_numbers]


def _with_numbers(update: UpdateRule, number: Callable[[Schedule], Any]) -> UpdateRule:
    """Return an update whose stages have other values in place of their scheduled numbers."""
    chains = {
        name: tuple(with_numbers(stage, number) for stage in getattr(update, name))
        for name in ("update", "after_decay")
    }
    return update.model_copy(update=chains)


class _TracedNumbers(TorchFunctionMode):
    """Lets stages compute with 0-d tensors where their fields are floats.

    An operation that takes a number of the host takes the tensor in a product instead. A comparison has the answer
    that all values of the schedule give. Any other reading on the host is refused.
    """

    def __init__(self, schedules: ScheduledNumbers, numbers: Sequence[Tensor]) -> None:
        super().__init__()
        self._numbers = list(numbers)  # an id is of one tensor as long as it is held
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
                    raise ContractError("a scheduled number is read on the host, where a program would keep its value")
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
    """Return the answer of a comparison with all numbers between two; None: they differ, or it is no comparison."""
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
    """Entries of parameters and of their state, moved in place by an entry-wise chain and its write.

    update, path: the update, and where it stands in the recipe.
    decay: weight decay of the parameters.
    axes: number of axes of a block of which the stages keep state.
    keys: state keys of the slots.
    dtype: to compute in. stored: dtype of parameters and gradients.
    schedules: scheduled numbers of the stages.
    masked: whether a mask `[n]` of blocks follows the numbers of the write. Then entries are `[n, numel, 1, ...]`.
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
    symbolic = True

    def __str__(self) -> str:
        return f"entries in {str(self.dtype).removeprefix('torch.')} on {self.device}"

    def same(self) -> tuple[Any, ...]:
        decay, run = self.decay.model_dump_json(), (self.schedules.total_steps, self.masked)
        return (_chains(self.update), self.path, decay, self.axes, self.keys, self.dtype, self.stored, self.device, run)

    @property
    def block(self) -> tuple[int, ...]:
        """A shape of some entries, with as many axes as blocks have."""
        return (64, *[1] * (self.axes - 1))

    def samples(self) -> list[Tensor]:
        """A parameter, its gradient and slots `[n, 64, 1, ...]`, numbers of a write, a mask `[n]`, scheduled ones."""
        shape = (2 if self.masked else 1, *self.block)
        dtypes = (self.stored, self.stored, *[self.dtype] * len(self.keys))
        numbers = numbers_of(WriteNumbers(*[0.0] * len(WriteNumbers._fields)), self.dtype, self.device)
        numbers += [torch.ones(2, dtype=torch.bool, device=self.device)] * self.masked
        entries = (torch.zeros(shape, dtype=own, device=self.device) for own in dtypes)
        return [*entries, *numbers, *self.schedules.samples(self.device)]

    def run(self, tensors: Sequence[Tensor], ask: Ask, questions: list[Question]) -> tuple[Tensor, ...]:
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
    """The directions of a stack of N blocks, from their gradients `[N, *block]`; the state changes in place.

    update, path: the update, and where it stands in the recipe.
    block, blocks: shape of a block, and N.
    slots: shape and dtype of the tensors that state is stored in, by name.
    encoded: slots that a quantizer stores.
    widths: whether directions have factors `[N]`.
    decay: weight decay that is added to directions; None: the write decays.
    sizes: slots by which that decay is multiplied.
    signals: shape and dtype of the signals that stages ask for, by name.
    schedules: scheduled numbers of the stages.
    parameters: number of parameters that the blocks are of, if stages take sums over each; None: they take none.
    masked: whether a mask `[N]` says which blocks have their state written.
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
    symbolic = False

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


@contextmanager
def _scheduled(source: EntryProgram | BlockProgram, given: Iterator[Tensor]) -> Iterator[UpdateRule]:
    """The update of a program, whose scheduled fields are the tensors that are left of its inputs."""
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


def numbers_of(values: Sequence[float], dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """Return 0-d tensors of some numbers, which are brought to a device at once."""
    return list(upload(torch.tensor(values, dtype=dtype, device="cpu"), device).unbind())


def tracing_context(
    ask: Ask, questions: list[Question], signals: Mapping[str, Tensor] | None = None, steps: Tensor | None = None
) -> StepContext:
    """Return a context of a step without a refresh that has no numbers of its own.

    A stage that reads one raises AttributeError, so that no number of a step is frozen into a program.
    """
    context = StepContext(
        np.ones(1, dtype=np.int64), np.zeros(1), np.zeros(1, dtype=np.int64), signals=signals or {}, numbers=ask
    )
    for name in ("steps", "phases", "param_ids", "seeds"):
        del context.__dict__[name]
    context.__dict__["questions"] = questions
    context.__dict__["due"] = _NothingDue()
    if steps is not None:
        context.__dict__["step"] = steps
    return context


class _NothingDue(dict[int, tuple[()]]):
    """The refreshes of a step without any: none, whichever stage asks."""

    def __contains__(self, key: object) -> bool:
        return True

    def __missing__(self, key: int) -> tuple[()]:
        return ()


@dataclass
class Program:
    """A traced program, and the numbers that it asks for in each step.

    asked: numbers that the stages ask for, in their order.
    questions: questions of stages, whose answers late in the run the program was traced with.
    """

    source: ProgramSource
    asked: list[NumberOfStep] = field(default_factory=list, init=False)
    questions: list[Question] = field(default_factory=list, init=False)
    _lists: tuple[int, list[list[float]]] | None = field(default=None, init=False)
    _asked: _Table = field(init=False)
    _scheduled: _Table = field(init=False)
    _writes: dict[WriteNumbers, list[Tensor]] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self._asked, self._scheduled = (_Table(rows, self.source.device) for rows in (self._answers, self._present))
        with FakeTensorMode(allow_non_fake_inputs=True) as fake:  # decisions on values are those of the trace
            samples = [fake.from_tensor(sample) for sample in self.source.samples()]
            self.source.run(samples, self._learn, self.questions)
        if any(
            isinstance(number(torch.ones((), dtype=torch.float64, device="cpu")), FakeTensor) for number in self.asked
        ):
            raise ContractError(
                "a function of the step alone is required for `context.per_block`, got one of a signal or of a field "
                "that is scheduled"
            )

    def suits(self, steps: NDArray[np.int64]) -> bool:
        """Return whether the program is of all these steps: they answer every question as it was traced with."""
        return all((question(steps) == question(TYPICAL_STEP)).all() for question in self.questions)

    def _learn(self, number: NumberOfStep) -> Tensor:
        self.asked.append(number)
        return number(torch.ones((), dtype=torch.float64, device="cpu"))

    @cached_property
    def graph(self) -> torch.fx.GraphModule:
        """The traced program, of tensors as of `ProgramSource.samples` and the numbers that the stages ask for."""
        samples = self.samples()
        first = len(samples) - len(self.asked)

        def step(*tensors: Tensor) -> tuple[Tensor, ...]:
            numbers: Iterator[Tensor] = iter(tensors[first:])
            return self.source.run(tensors[:first], lambda number: next(numbers), [])

        return trace(step, samples, self.source.symbolic)

    @cached_property
    def compiled(self) -> Compiled:
        """The compiled program, of the same tensors."""
        try:
            compiled = generate(self.graph, self.source.symbolic)
            compiled(self.samples())
        except Exception as error:
            path = f"{self.source.path}.compile".lstrip(".")
            needs = "on a CPU it needs a C++ compiler"
            raise RuntimeError(f"{path}: Inductor could not compile the steps, {error}; {needs}") from error
        return compiled

    def samples(self) -> list[Tensor]:
        """Tensors like all inputs of the program."""
        ones = numbers_of([1.0] * len(self.asked), self.source.dtype, self.source.device)
        return [*self.source.samples(), *ones]

    def numbers(self, step: int, run_step: int) -> tuple[Tensor, ...]:
        """Return the scheduled numbers at a step of the run, and those that stages ask for at a step of the blocks."""
        asked = self._asked.row(step) if self.asked else ()
        return (*self._scheduled.row(run_step), *asked) if self.source.schedules.of_numbers else asked

    def host_numbers(self, step: int, run_step: int) -> list[float]:
        """Return the same numbers on the host."""
        start = step - step % _SPAN
        if self.asked and (self._lists is None or self._lists[0] != start):
            self._lists = start, self._answers(range(start, start + _SPAN)).tolist()
        asked = self._lists[1][step - start] if self._lists is not None else []
        return [*self.source.schedules.at(run_step), *asked]

    def eager(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Run the program as it is, kernel by kernel, on the tensors that `compiled` is given."""
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
        """Return the numbers of a write as tensors; those of the last writes are kept."""
        if write not in self._writes:
            self._writes = {} if len(self._writes) == _SPAN else self._writes
            self._writes[write] = numbers_of(write, self.source.dtype, self.source.device)
        return self._writes[write]


@dataclass
class _Table:
    """Numbers of steps on a device, 0-d. Those of 64 steps are computed at once, the same from any of them, and
    uploaded by one copy.

    rows: computes the numbers `[n, k]` of n steps on the host.
    """

    rows: Callable[[range], Tensor]
    device: torch.device
    _kept: tuple[int, list[tuple[Tensor, ...]]] | None = None

    def row(self, step: int) -> tuple[Tensor, ...]:
        """Return the numbers of a step."""
        start = step - step % _SPAN
        if self._kept is None or self._kept[0] != start:
            table = upload(self.rows(range(start, start + _SPAN)), self.device)
            self._kept = start, [row.unbind() for row in table.unbind()]
        return self._kept[1][step - start]


_PROGRAMS: dict[tuple[Any, ...], Program] = {}


def program_of(source: ProgramSource) -> Program:
    """Return the compiled program of a source; equal ones are compiled once in a process.

    Raises ValueError for what cannot be traced, RuntimeError where no compiler is found.
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
    """Compile a traced program; symbolic: whether the length of its long axis may be another in each call.

    A call takes 4 us, where the guards of torch.compile take ten times as long (measured). Where this version of
    torch has other inner functions, it is torch.compile's code, with a warning.
    """
    try:
        return _without_guards(graph)
    except (ImportError, AttributeError, TypeError, AssertionError) as error:
        warn_user(f"compile: torch {torch.__version__} is called with its guards, which take longer ({error!r})")
        guarded = torch.compile(lambda *tensors: graph(*tensors), dynamic=symbolic, fullgraph=True)
        return lambda tensors: guarded(*tensors)


def trace(step: Callable[..., Sequence[Tensor]], samples: Sequence[Tensor], symbolic: bool) -> torch.fx.GraphModule:
    """Return the operations of a step, whose writes come last."""
    from torch._inductor.decomposition import select_decomp_table  # loads the compiler
    from torch.fx.experimental.proxy_tensor import make_fx

    functional = torch.func.functionalize(step, remove="mutations_and_views")
    mode: Literal["fake", "symbolic"] = "symbolic" if symbolic else "fake"
    graph = make_fx(functional, decomposition_table=select_decomp_table(), tracing_mode=mode)(*samples)
    if symbolic:
        graph.shape_env = None  # it is that of the inputs; Inductor's cache on disk refuses what it cannot pickle
    return graph


def _without_guards(traced: torch.fx.GraphModule) -> Compiled:
    from torch._guards import TracingContext, tracing
    from torch._inductor.compile_fx import compile_fx_inner

    given = [node.meta["val"] for node in traced.graph.nodes if node.op == "placeholder"]
    with tracing(TracingContext(given[0].fake_mode)):
        graph: Any = compile_fx_inner(traced, given)
    found: Compiled = graph.current_callable
    return found
