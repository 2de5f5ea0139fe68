"""Execution: the way in which the steps of a stack run: by a fused kernel, in chunks, compiled, or on the whole stack.

The choice is made once, when a stack is made, and `show` prints the reason. If a step cannot run in the chosen way, for
example because the blocks have different step counts, it runs on the whole stack.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import ClassVar, Literal

import torch
from torch import Tensor

from eigengraft.blocking.parameter_sums import matrix_index
from eigengraft.blocking.stacks import Stack
from eigengraft.numerics import CHUNK_ENTRIES, JOINED_IN_KERNEL, VECTOR, active_fake_mode, cached_tensors, number_like
from eigengraft.signals import asking, known_signals
from eigengraft.slots import State, dotted
from eigengraft.step_context import TYPICAL_STEP

from ..recipe.recipe import Recipe
from ..stacks.placement import ParamSpec
from ..stacks.stack import ActiveBlocks, StackState
from ..write.write import WriteNumbers
from .fused import FusedAdam, FusedCalls, declared_moments, fused_adam
from .gradients import leaves_masks
from .inputs import GraphNumbers, StepInputs
from .reasons import not_captured, not_compiled, not_fused, not_in_place
from .stack_step import StackStep, finite_writes, is_checked, require_finite, update_entries
from .traced import Program, ProgramSource, ScheduledNumbers, program_of, signal_input

_LEAST = 1 << 15
"""Number of entries of the smallest block that runs in chunks. Smaller blocks run faster on the whole stack."""
_SAMPLE = 64
"""Number of entries of a sample block from which a program of entries is traced, for any number of entries."""


Way = Literal["fused", "in chunks", "compiled"]
"""A way in which steps run that is faster than stages on the whole stack."""


@dataclass(frozen=True)
class Execution:
    """Decides how the steps of a stack (equal blocks of many parameters, as one tensor `[N, *block]`) are computed.

    In this class, stages compute the directions of all blocks together. Subclasses compute most steps in a faster way,
    and all other steps as this class does.

    why_not: by name of a faster way that cannot be used, the reason why.
    """

    why_not: Mapping[Way, str] = field(default_factory=dict)
    by_parameter: ClassVar[bool] = False
    """True if every parameter is updated by itself, so that its bits do not depend on other parameters."""

    @property
    def compiled(self) -> Sequence[Program]:
        """The programs that Inductor compiles. Empty if steps run without a compiled program."""
        return ()

    @property
    def programs(self) -> Sequence[Program]:
        """The programs that a CUDA graph of this stack may contain. Empty if the stack has no traced program."""
        return ()

    def try_in_place(self, blocks: ActiveBlocks, calls: FusedCalls) -> bool:
        """Update active blocks within the memory of their parameters, without a copy in a stack.

        Return False, and change nothing, if the blocks cannot be updated in this way in this step.

        calls: inputs of the step, and its calls of fused kernels. Blocks that are added to the calls are updated later,
            when the caller runs the calls.
        """
        return False

    def direction(self, step: StackStep, numbers: GraphNumbers | None) -> Tensor:
        """Return the directions of all active blocks of a stack, `[n, *block]`.

        numbers: numbers that a CUDA graph reads, if a graph captures the step. A traced program then computes the
            directions. None: no graph captures the step.
        """
        return step.by_stages()


@dataclass(frozen=True)
class Fused(Execution):
    """Runs the steps of a stack by torch's fused Adam kernel, which updates parameters and state in one pass.

    adam: arguments of the kernel.
    """

    adam: FusedAdam = field(kw_only=True)
    by_parameter = True

    def try_in_place(self, blocks: ActiveBlocks, calls: FusedCalls) -> bool:
        return calls.add(self.adam, blocks)


@dataclass(frozen=True)
class Capturable(Execution):
    """Runs the stages of a stack, except while a CUDA graph captures a step: then a traced program computes directions.

    program: the traced program. None: no graph captures steps of the stack.
    """

    program: Program | None = None

    @property
    def programs(self) -> Sequence[Program]:
        return () if self.program is None else (self.program,)

    def direction(self, step: StackStep, numbers: GraphNumbers | None) -> Tensor:
        if numbers is None:
            return step.by_stages()
        assert self.program is not None
        inputs = _block_inputs(self.program, step, numbers)
        assert inputs is not None  # no graph captures a step that a program cannot compute (`CapturedStacks.unfit`)
        (directions,) = self.program.eager(inputs)
        return directions


@dataclass(frozen=True)
class Compiled(Capturable):
    """Runs the steps of a stack by one compiled program, which computes the directions of all its blocks.

    Steps that the program cannot compute, such as those with a refresh, run the stages.
    """

    @property
    def compiled(self) -> Sequence[Program]:
        return self.programs

    def direction(self, step: StackStep, numbers: GraphNumbers | None) -> Tensor:
        assert self.program is not None
        inputs = _block_inputs(self.program, step, numbers)
        if inputs is None:
            return step.by_stages()
        (directions,) = self.program.compiled(inputs)
        assert isinstance(directions, Tensor)
        require_finite(directions, step.gradient, step.blocks.stack_state.chain_path("update"), step.context)
        return directions


@dataclass(frozen=True)
class Chunks(Execution):
    """Runs the steps of a stack in chunks of its parameters. The update of each chunk is computed and written at once,
    so that it stays in the cache of the CPU.
    """

    by_parameter = True

    def try_in_place(self, blocks: ActiveBlocks, calls: FusedCalls) -> bool:
        inputs = calls.inputs
        return inputs.mask is None and _in_memory(blocks, inputs) and _run_chunks(blocks, inputs)


@dataclass(frozen=True)
class Entries(Capturable):
    """Runs the steps of an entry-wise update by compiled programs that also write the parameters.

    program_of_dtype: the program for each dtype of parameters.
    """

    program_of_dtype: Mapping[torch.dtype, Program] = field(kw_only=True)

    @property
    def compiled(self) -> Sequence[Program]:
        return tuple(self.program_of_dtype.values())

    @property
    def programs(self) -> Sequence[Program]:
        return () if self.program is None else (self.program, *self.compiled)

    def try_in_place(self, blocks: ActiveBlocks, calls: FusedCalls) -> bool:
        inputs, programs = calls.inputs, self.program_of_dtype.values()
        counts = inputs.counts[blocks.stack.param_ids]
        if inputs.mask is not None and not all(program.source.masked for program in programs):
            return False
        if not _in_memory(blocks, inputs) or not all(program.suits(counts) for program in programs):
            return False
        _run_entries(blocks, inputs, self.program_of_dtype)
        return True


def _in_memory(blocks: ActiveBlocks, inputs: StepInputs) -> bool:
    """Return True if blocks can be updated in the memory of their parameters, without a copy as one tensor (a stack).

    Parameters and gradients must be contiguous. No inspection may observe the stages (`StackState.watched`).
    """
    tensors = (x[at] for at in blocks.stack.positions for x in (inputs.own_entries, inputs.gradients))
    return not blocks.stack_state.watched and all(x.is_contiguous() for x in tensors)


def choose_execution(stack_state: StackState, recipe: Recipe, specs: Sequence[ParamSpec], shared: bool) -> Execution:
    """Choose how the steps of a stack run: by a fused kernel, in chunks, by compiled programs, or on the whole stack.

    specs: specifications of the parameters whose blocks the stack holds.
    shared: True if a stage needs a sum over a whole parameter, and other stacks have blocks of this parameter too.

    Programs are traced here. `compile_programs` compiles them.

    Raises ValueError for a program that cannot be traced or captured.
    """
    stored, of_numbers = {spec.dtype for spec in specs}, any(spec.shape == () for spec in specs)
    moments = declared_moments(stack_state.rule, stack_state.stack.block)
    reason = moments and next(
        chain(not_fused(stack_state, moments, recipe, of_numbers), not_in_place(stack_state, recipe)), None
    )
    if moments is not None and reason is None:
        return Fused(adam=fused_adam(stack_state, *moments))
    how = _choose_program(stack_state, recipe, stored, shared)
    if reason is not None:
        same = not stack_state.rule.compile and reason in how.why_not.values()
        how = replace(how, why_not={"fused": reason, **({} if same else how.why_not)})
    if isinstance(how, Compiled) or not _is_captured(stack_state, recipe, shared):
        return how
    try:
        program = Program(_block_source(stack_state, recipe))
    except Exception as error:
        where = stack_state.path or "update"
        raise ValueError(f"graph: steps of {where} cannot be captured: {error}; remove graph") from error
    return replace(how, program=program) if isinstance(how, Entries) else Capturable(how.why_not, program)


def _is_captured(stack_state: StackState, recipe: Recipe, shared: bool) -> bool:
    """Return True if a device graph, such as a CUDA graph, may capture steps of a stack (blocks with one shape).

    The device must have graphs, tensors must not be fake or on the meta device, and a step must need no other rank.
    There must be steps without a refresh. Stages may request only signals (inputs beside the gradient) whose address is
    the same in every step.

    shared: True if stages sum over a parameter that also has blocks in other stacks. The result is then False.
    """
    if not recipe.graph or shared or active_fake_mode() is not None:
        return False
    steady = all(cadence.interval > 1 for cadence in stack_state.rule.cadences().values())
    return steady and not_captured([stack_state], recipe) is None


def _choose_program(stack_state: StackState, recipe: Recipe, stored: Iterable[torch.dtype], shared: bool) -> Execution:
    """Return how the blocks of a stack are updated without a fused kernel: whole, in chunks, or by compiled programs.

    A stack is a tensor of blocks with one shape.

    stored: dtypes of the parameters of the stack.
    shared: True if stages sum over a parameter that also has blocks in other stacks.
    """
    stack, rule = stack_state.stack, stack_state.rule
    chunked = stack.device.type == "cpu" and math.prod(stack.block) >= _LEAST and rule.entrywise()
    if not rule.compile and not chunked:
        return Execution()
    apart = next(not_in_place(stack_state, recipe), None)
    if rule.compile:
        if reason := not_compiled(stack_state, apart is None, shared):
            return Execution(why_not={"compiled": reason})
        _require_traceable(stack_state)
        if apart is None:
            return Entries(
                program_of_dtype={dtype: program_of(_entry_source(stack_state, recipe, dtype)) for dtype in stored}
            )
        return Compiled(program=program_of(_block_source(stack_state, recipe)))
    if apart is None and math.prod(stack.block) % VECTOR and len(stack.grids) > 1:
        apart = f"the size of its blocks is no multiple of {VECTOR}, and it has several"
    return Execution(why_not={"in chunks": apart}) if apart else Chunks()


def _require_traceable(stack_state: StackState) -> None:
    """Raise ValueError if stages request a signal (an input beside the gradient) that no traced program can read."""
    known = known_signals()
    for name, path in asking(stack_state.rule.stages(stack_state.path)).items():
        if name in _signals_of_program(stack_state) and known[name].extent not in _SHAPES_OF_SIGNALS:
            raise ValueError(
                f"{dotted(stack_state.path, 'compile')}: {path} requests the signal '{name}', which compiled programs "
                "do not support; remove compile"
            )


def _signals_of_program(stack_state: StackState) -> list[str]:
    """Return the names of the signals (inputs of stages beside the gradient) that stages use in most steps.

    A step with other signals runs without the compiled program.
    """
    late, requested = int(TYPICAL_STEP[0]), set[str]()
    for _, stage in stack_state.rule.stages():
        requested |= stage.signals_at(late)
        requested |= {request.name for request in stage.requests if request.when == "if_given"}
    return sorted(requested)


_SHAPES_OF_SIGNALS: Mapping[str, Callable[[Stack], tuple[int, ...]]] = {
    "step": lambda stack: (),
    "parameter": lambda stack: (len(stack.param_ids),),
    "entry": lambda stack: (len(stack.param_ids), *stack.block),
    "input_matrix": lambda stack: (len(stack.param_ids), *2 * stack.block[-1:]),
    "output_matrix": lambda stack: (len(stack.param_ids), *2 * stack.block[-2:-1]),
}
"""Functions that return the shape of a signal in a compiled program of a stack, by the extent of the signal ("step":
one number, "parameter": one number for each parameter, ...).

A stage that requests a signal of another extent cannot be compiled."""


def _entry_source(stack_state: StackState, recipe: Recipe, stored: torch.dtype) -> ProgramSource:
    """Return the declaration of a program that updates entries of parameters in place. The caller traces the program.

    stack_state: stack (blocks with one shape) of the parameters.
    stored: dtype of the parameters.
    """
    stack, masked = stack_state.stack, leaves_masks(recipe.failure, stack_state.stack.device)
    blocks, block = 2 if masked else 1, (_SAMPLE, *[1] * (len(stack.block) - 1))
    return ProgramSource(
        stack_state.rule,
        stack_state.path,
        blocks,
        block,
        stack.dtype,
        stack.device,
        dict.fromkeys(stack_state.tensors, ((blocks, *block), stack.dtype)),
        stack_state.rule.weight_decay or recipe.weight_decay,
        ScheduledNumbers.of(stack_state.rule, recipe.total_steps),
        masked,
        stored,
    )


def _block_source(stack_state: StackState, recipe: Recipe) -> ProgramSource:
    """Return the declaration of a program that computes the directions of all blocks of a stack.

    The caller traces the program. A stack is a tensor of blocks with one shape.
    """
    known, stack = known_signals(), stack_state.stack
    shapes = {name: _SHAPES_OF_SIGNALS[known[name].extent](stack) for name in _signals_of_program(stack_state)}
    shapes |= dict.fromkeys(stack_state.totals, ())
    return ProgramSource(
        stack_state.rule,
        stack_state.path,
        len(stack.param_ids),
        stack.block,
        stack.dtype,
        stack.device,
        {name: (tuple(x.shape), x.dtype) for name, x in stack_state.tensors.items()},
        stack_state.rule.weight_decay or recipe.weight_decay if stack_state.adds_decay else None,
        ScheduledNumbers.of(stack_state.rule, recipe.total_steps),
        leaves_masks(recipe.failure, stack.device),
        encoded=stack_state.encoded,
        scaled=stack_state.width_factors is not None,
        step_sizes=stack_state.step_sizes,
        signals={name: (shape, stack.dtype) for name, shape in shapes.items()},
        matrices=matrix_index(stack.matrix_ids, stack.device)[0] if stack_state.spans else None,
    )


def _block_inputs(program: Program, step: StackStep, numbers: GraphNumbers | None) -> list[Tensor] | None:
    """Return the inputs of a traced program for a step of a stack, a tensor of blocks with one shape.

    Return None if the program cannot compute this step. It can compute the step under these conditions:

    - All parameters of the stack have gradients and the same step count. If weight decay is added to directions, the
      parameters also have the same rates.
    - No refresh is due, conditions of stages on the step have the results for which the program was traced
      (`Program.suits`), and nothing observes the stages (`inspect`, checked mode).
    - If the step has a mask, which is True for each block with a usable gradient, the program was traced with a mask.
    - The step has the signals with which the program was traced, in the same shapes.

    numbers: as in `Execution.direction`.
    """
    stack_state, context, source = step.blocks.stack_state, step.context, program.source
    if step.blocks.places is not None or stack_state.watched or context.uniform is None:
        return None
    if step.mask is not None and not source.masked:
        return None
    if not program.suits(context.steps) or any(stage.refreshes(context) for _, stage in stack_state.rule.stages()):
        return None
    if context.signals.keys() != source.signals.keys():
        return None
    like = step.gradient
    if numbers is None:
        steps = context.step
    else:  # `context.step` would be a constant of the graph
        steps = numbers.counts[stack_state.number].to(torch.int64).expand(len(context.steps)).contiguous()
    known = {signal_input(name): number_like(x, like).contiguous() for name, x in context.signals.items()}
    known |= {"gradient": like, **stack_state.tensors, "seeds": context.seed, "steps": steps}
    if source.matrices is not None:
        known["matrix_index"] = matrix_index(context.matrix_ids, like.device)[1]
    if stack_state.width_factors is not None:
        known["factor"] = stack_state.width_factors
    if source.decay is not None:
        alphas = step.rates.alphas(stack_state.path, step.blocks.stack.param_ids)
        if len(alphas) > 1:
            return None
        decaying = torch.zeros_like(like) if step.decaying is None else step.decaying
        known |= {"decaying": decaying.contiguous(), "alpha": number_like(alphas[0], like).contiguous()}
    if source.masked:
        known["mask"] = _all_usable(len(like), like.device) if step.mask is None else step.mask
    inputs = program.ordered({**known, **_numbers_of_step(program, stack_state, context.uniform, numbers)})
    kinds = zip(inputs, program.inputs.values(), strict=True)
    return inputs if all(x.shape == shape for x, (shape, _) in kinds) else None


def _numbers_of_step(
    program: Program, stack_state: StackState, step: int, numbers: GraphNumbers | None
) -> Mapping[str, Tensor]:
    """Return the inputs of a program that depend on the step, by name.

    step: step count of the blocks.
    numbers: numbers that a CUDA graph reads, if a graph captures the step.
    """
    if numbers is None:
        return program.numbers(step, stack_state.run_step)
    return numbers.of_programs[stack_state.number, program]


@cached_tensors(maxsize=64)
def _all_usable(blocks: int, device: torch.device) -> Tensor:
    """Return the mask `[blocks]` of a step in which every gradient is usable: True for each block.

    The tensor is cached and must not be changed.
    """
    return torch.ones(blocks, dtype=torch.bool, device=device)


def _run_chunks(blocks: ActiveBlocks, inputs: StepInputs) -> bool:
    """Update active blocks chunk by chunk. The result has the same bits as an update of all blocks as one tensor.

    Return False, and change nothing, if the blocks have different step counts.
    """
    stack_state = blocks.stack_state
    context = stack_state.context(blocks, inputs.counts, {})
    if context.uniform is None:
        return False
    for row, position in zip(blocks.row_numbers, blocks.stack.positions, strict=True):
        rates = inputs.rates.step_rates(stack_state.path, position)
        factors = None if stack_state.width_factors is None else stack_state.width_factors[row]
        for entries, state in _chunks(stack_state, row, inputs.own_entries[position], inputs.gradients[position]):
            update_entries(stack_state.rule, state.scope, entries, context, rates, factors)
    return True


def _chunks(
    stack_state: StackState, row: int, parameter: Tensor, gradient: Tensor
) -> Iterator[tuple[tuple[Tensor, Tensor], State]]:
    """Yield ((parameter, gradient), state) for each chunk of n entries of a block, as views `[1, n, 1, ...]`.

    stack_state: stack of the block, with its state tensors `[N, *block]`.
    row: index of the block in the stack.
    parameter, gradient: entries of the block.
    """
    shape = (1, -1, *[1] * (len(stack_state.stack.block) - 1))
    slots = [tensor[row] for tensor in stack_state.tensors.values()]
    parts = [torch.split(tensor.view(shape), CHUNK_ENTRIES, 1) for tensor in (parameter, gradient, *slots)]
    for entries, gradients, *slots_of_chunk in zip(*parts, strict=True):
        tensors = dict(zip(stack_state.tensors, slots_of_chunk, strict=True))
        yield (entries, gradients), State(tensors, stack_state.stack.block, stack_state.path)


def _run_entries(blocks: ActiveBlocks, inputs: StepInputs, programs: Mapping[torch.dtype, Program]) -> None:
    """Update active blocks by compiled programs.

    If the blocks are small, and have equal step counts, dtypes, rates and factors, one call updates them all.

    programs: compiled program of entries for each dtype of parameters.
    """
    stack_state, positions, mask = blocks.stack_state, blocks.stack.positions, inputs.mask
    steps, writes = inputs.counts[blocks.stack.param_ids].tolist(), _writes(blocks, inputs)
    parameters, gradients = [inputs.own_entries[at] for at in positions], [inputs.gradients[at] for at in positions]
    alike = blocks.places is None and len({*steps}) == len({x.dtype for x in parameters}) == len({*writes}) == 1
    if programs[parameters[0].dtype].source.masked:
        mask = _all_usable(len(positions), stack_state.stack.device) if mask is None else mask[blocks.param_index]
    of_writes = dict[tuple[torch.dtype, WriteNumbers], dict[str, Tensor]]()  # shared by blocks with equal rates

    def numbers(dtype: torch.dtype, write: WriteNumbers, at: int) -> dict[str, Tensor]:
        """Return by name the inputs of a compiled program that are single numbers.

        These are the numbers with which updates are written into parameters, and the numbers that follow from the step
        count, such as scheduled fields of stages.

        dtype: dtype of the parameters. It selects the program in `programs`.
        write: learning rate, weight decay and factor of the update.
        at: step count of the blocks.
        """
        program, key = programs[dtype], (dtype, write)
        if key not in of_writes:
            of_writes[key] = program.write_numbers(write)
        return {**of_writes[key], **_numbers_of_step(program, stack_state, at, inputs.numbers)}

    checked = is_checked(min(steps))
    with finite_writes(stack_state, parameters, gradients) if checked else nullcontext():
        if alike and math.prod(stack_state.stack.block) < JOINED_IN_KERNEL and len(parameters) > 1:
            dtype = parameters[0].dtype
            given = {**numbers(dtype, writes[0], steps[0]), **({} if mask is None else {"mask": mask})}
            _run_joined(stack_state, parameters, gradients, programs[dtype], given)
            return
        shape, masks = _shape(stack_state), [None] * len(parameters) if mask is None else mask.view(-1, 1).unbind()
        for row, parameter, gradient, at, write, usable in zip(
            blocks.row_numbers, parameters, gradients, steps, writes, masks, strict=True
        ):
            given = {
                "parameter": parameter.view(shape),
                "gradient": gradient.view(shape),
                **stack_state.slots_of_blocks[row],
            }
            given |= numbers(parameter.dtype, write, at)
            if usable is not None:
                given["mask"] = usable
            program = programs[parameter.dtype]
            program.compiled(program.ordered(given))


def _run_joined(
    stack_state: StackState,
    parameters: Sequence[Tensor],
    gradients: Sequence[Tensor],
    program: Program,
    given: Mapping[str, Tensor],
) -> None:
    """Update all blocks of a stack, which have one shape, by one call of a program.

    The call updates copies of the parameters in one tensor, which are then copied back.

    given: inputs of the program by name, except parameter, gradient and state tensors.
    """
    shape = _shape(stack_state, len(parameters), rows=program.source.masked)
    parameter, gradient = (torch.cat([x.flatten() for x in some]).view(shape) for some in (parameters, gradients))
    slots = {name: tensor.view(shape) for name, tensor in stack_state.tensors.items()}
    program.compiled(program.ordered({"parameter": parameter, "gradient": gradient, **slots, **given}))
    after = parameter.view(len(parameters), *stack_state.stack.block).unbind()
    torch._foreach_copy_([x.view(stack_state.stack.block) for x in parameters], list(after))


def _writes(blocks: ActiveBlocks, inputs: StepInputs) -> list[WriteNumbers]:
    """Return for each active block the numbers with which its direction U is written into its parameter W.

    The write is  W <- W - lr alpha W - lr factor U.  Blocks with equal rates and factors share one object.
    """
    stack_state, rates = blocks.stack_state, inputs.rates
    groups = rates.alike[blocks.stack.param_ids].tolist()
    members = dict(zip(groups, blocks.stack.positions, strict=True))  # a parameter of each group
    numbers = {group: WriteNumbers.of(rates.step_rates(stack_state.path, at)) for group, at in members.items()}
    if stack_state.host_factors is None:
        return [numbers[group] for group in groups]
    rows = zip(groups, blocks.row_numbers, strict=True)
    return [numbers[group]._replace(factor=stack_state.host_factors[row]) for group, row in rows]


def _shape(stack_state: StackState, blocks: int = 1, rows: bool = False) -> tuple[int, ...]:
    """Return the shape of one tensor with the entries of several blocks, for a program that updates entries one by one.

    The shape is `[blocks, entries, 1, ...]` or `[1, blocks * entries, 1, ...]`, with as many axes as a stack.

    blocks: number of blocks.
    rows: True if every block is a row of the tensor, False if one row has the entries of all blocks.
    """
    entries = math.prod(stack_state.stack.block)
    return (*((blocks, entries) if rows else (1, blocks * entries)), *[1] * (len(stack_state.stack.block) - 1))
