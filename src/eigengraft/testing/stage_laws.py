"""The laws of stages: about the directions that a stage computes, and about its state.

The relative tolerance in float64 is 1e-10, which allows thousands of rounding errors, unless a law says otherwise.
Numbers that must be the same are compared bit for bit.
"""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor, nn

from eigengraft import Optimizer, Stage
from eigengraft.errors import ContractError
from eigengraft.optimizers.signals import OWN, Given
from eigengraft.preconditioners import FirstMoment, SecondMoment, walk
from eigengraft.quantization import Float32
from eigengraft.schedules import schedules
from eigengraft.signals import PARTNER, SIDES, Signal, known_signals, requested
from eigengraft.slots import StateKey

from .accelerator import DeviceCounts, accelerator
from .causes import WATCHED_BLOCKS, stack_cause, write_cause
from .device_laws import WARM_UP_STEPS, require_no_more_kernels, require_no_waits, without_accelerator
from .laws import Law, in_parentheses, require, require_close, the_declaration_survives
from .samples import difficult, rotation, standard_normal
from .stage_case import StageBench, StageCase, on


def the_contract_is_kept(case: StageCase) -> None:
    """In checked mode a stage breaks no rule of the contract.

    Slots are declared and have their declared shapes, state is written back, inputs are not changed, the direction has
    the shape of the gradient, and all numbers are finite. Every slot is used, and written at least once. Encoded state
    is tried on the first shape only, because `storage_makes_no_difference` tries it on all shapes.
    """
    for block in case.blocks:
        for quantizer in (None, Float32(min_elements=1)) if block == case.blocks[0] else (None,):
            with on(block):
                bench = StageBench(case.component, block, 3, torch.float32, quantizer).checked()
                for t, gradient in enumerate(case.gradients(block, dtype=torch.float32)):
                    direction = standard_normal(*gradient.shape, seed=t).float() if t % 2 else gradient
                    try:
                        bench.step(gradient, direction)
                    except ContractError as error:
                        inputs = {"the direction": direction, "the gradient": gradient}
                        run = partial(_steps, StageBench(case.component, block, 3, torch.float32), gradient, direction)
                        raise ContractError(f"{error}{write_cause(case.component, inputs, run)}") from error.__cause__
                if quantizer is None:
                    bench.require_used()
                    bench.require_written()


def _steps(bench: StageBench, gradient: Tensor, direction: Tensor) -> None:
    """Run two steps with the same gradient and direction, because a lagged stage only initializes its statistics in the
    first step.

    bench: the stage.
    """
    for _ in range(2):
        bench.step(gradient, direction)


def a_stack_is_its_blocks(case: StageCase) -> None:
    """The first and the last block of a stack have the same directions as in a stack of one block, also beside a block
    with much larger gradients.
    """
    for block in case.blocks:
        with on(block):
            given, (stacked, stack) = case.gradients(block), case.trajectory(block)
            cause = partial(_stack_cause, case, block)
            alone = {i: stack.renewed([i]).run(given[:, i : i + 1])[:, 0] for i in (0, 2)}
            for i, own in alone.items():
                what = f"directions of block {i} alone and in a stack of 3"
                require_close(own, stacked[:, i], 1e-10, what, cause, True)
            unlike = given.clone()
            unlike[:, 1] *= 1e8
            what = "directions of block 0 alone and beside a block with gradients of 1e8 times the size"
            beside = stack.renewed([0, 1, 2]).run(unlike)[:, 0]
            require_close(alone[0], beside, 1e-10, what, cause, True)


def _stack_cause(case: StageCase, block: tuple[int, ...]) -> str:
    bench = case.bench(block, WATCHED_BLOCKS)
    return stack_cause(case.component, lambda: bench.run(case.gradients(block, WATCHED_BLOCKS)))


def blocks_without_a_gradient_wait(case: StageCase) -> None:
    """A block that is left out of a step keeps its state and its step number. Blocks at different steps have the same
    directions as each block alone.
    """
    chosen = [torch.tensor(rows) for rows in ([0, 1, 2], [0, 2], [1], [2, 1], [0, 1, 2], [0], [0, 1], [1, 2])]
    for block in case.blocks:
        with on(block):
            stack = case.bench(block)
            alone = [stack.renewed([i]) for i in range(3)]
            for t, (gradient, rows) in enumerate(zip(case.gradients(block), chosen, strict=False), start=1):
                if stack.lagging and len({bool(stack.counts[i] == 0) for i in rows}) > 1:
                    continue
                ours = stack.step(gradient[rows], rows=rows)
                theirs = torch.cat([alone[i].step(gradient[i : i + 1]) for i in rows.tolist()])
                what = f"directions of blocks {rows.tolist()} at step {t}, in a stack and each alone"
                require_close(ours, theirs, 1e-10, what)


_DROPPED = (
    "the gradient of one block is nan: the result for this block is not used, but no exception may be raised; "
    "torch.linalg raises one for nan, so pass it `x.nan_to_num(0, 0, 0)`"
)


def masked_rows_change_nothing(case: StageCase) -> None:
    """A row whose gradient is not finite keeps its state bit for bit, and other rows are not affected.

    This is checked in the first step, in which every cadence has a refresh, and in the second half of a run.
    """
    mask = torch.tensor([True, False, True])
    for block in case.blocks:
        with on(block, _DROPPED):
            given, (expected, _) = case.gradients(block), case.trajectory(block)
            cause, half = partial(_stack_cause, case, block), case.steps // 2
            for stack, steps in ((case.bench(block), range(1)), (case.halfway(block), range(half, case.steps))):
                before = {key: tensor.clone() for key, tensor in stack.tensors.items()}
                for t in steps:
                    spoiled = given[t].clone()
                    spoiled[1] = torch.nan
                    ours = stack.step(spoiled, mask=mask)[mask]
                    what = f"directions of blocks 0 and 2 at step {t + 1}, with and without nan gradients in block 1"
                    require_close(ours, expected[t][mask], 1e-10, what, cause)
                for key, tensor in stack.tensors.items():
                    same = torch.equal(tensor[1], before[key][1])
                    require(same, f"{key} of a block whose gradient is nan", "no change", "other numbers")


def inputs_are_never_written_to(case: StageCase) -> None:
    """Gradient and direction have the same bits after a step as before the step."""
    for block in case.blocks:
        with on(block):
            stack = case.bench(block)
            for t, gradient in enumerate(case.gradients(block)):
                direction = standard_normal(*gradient.shape, seed=t)
                copies = {"gradient": gradient.clone(), "direction": direction.clone()}
                stack.step(gradient, direction if t % 2 else gradient)
                for name, tensor in (("gradient", gradient), ("direction", direction)):
                    same = torch.equal(tensor, copies[name])
                    require(same, f"the {name} after step {t + 1}", "no change", "other numbers")


def numbers_stay_finite(case: StageCase) -> None:
    """Direction and state are finite for gradients that are zero, huge, tiny or rank-deficient, or change abruptly, and
    no root or basis fails.
    """
    for block in case.blocks:
        given = {name: some[: case.steps] for name, some in difficult(block)}
        stack = case.bench(block, 3 * len(given), torch.float32)
        failures = {key: stack.tensors[key] for key, slot in stack.declared.items() if slot.role == "failures"}
        directions = [stack.step(gradient).clone() for gradient in torch.cat([*given.values()], 1)]
        seen = [*directions, *stack.tensors.values()]
        if all(bool(x.isfinite().all()) for x in seen) and not any(bool(count.any()) for count in failures.values()):
            continue
        for place, name in enumerate(given):
            rows = slice(3 * place, 3 * place + 3)
            with on(block, f"gradients: {name}"):
                for t, out in enumerate(directions, start=1):
                    finite = out[rows].isfinite().all()
                    require(finite, f"the direction of step {t}", "finite numbers", _odd(out[rows]))
                failed = [key for key, count in failures.items() if count[rows].any()]
                require(not failed, "roots and bases", "no failures", f"failures in {failed}")
                for key, tensor in stack.tensors.items():
                    finite = tensor[rows].isfinite().all()
                    require(finite, key, "finite numbers", _odd(tensor[rows]))


def a_zero_gradient_moves_nothing(case: StageCase) -> None:
    """Zero gradients give zero directions from the first step on. The usual fault is 0 / 0, which an eps or
    `numerics.safe_ratio` avoids."""
    for block in case.blocks:
        with on(block):
            out = case.bench(block).run(torch.zeros_like(case.gradients(block)))
            first = next((t for t, own in enumerate(out, start=1) if own.any()), 0)
            cause = in_parentheses("0 / 0? `numerics.safe_ratio(a, b)` is 0 where b is 0")
            require(not first, f"the direction of a zero gradient at step {first}", "0", _odd(out), cause)


def scaling_all_gradients_scales_the_direction(case: StageCase) -> None:
    """Gradients times c give directions times c^degree. The last step of a run is compared, because roots and bases are
    the identity in early steps.
    """
    scales = (2.0**-10, 2.0**10)
    for block in case.blocks:
        with on(block):
            degree, (plain, bench) = case.degree_on(block), case.trajectory(block)
            given = torch.cat([case.gradients(block) * scale for scale in scales], 1)
            both = bench.renewed([*range(bench.blocks)] * len(scales)).run(given)[-1]
        for scale, scaled in zip(scales, torch.split(both, bench.blocks), strict=True):
            with on(block, f"c = {scale:g}"):
                what = f"the direction for gradients c G, divided by c^({degree:g}), and the direction for gradients G"
                require_close(scaled * scale**-degree, plain[-1], 1e-7, what, lambda: _DEGREE)


_DEGREE = in_parentheses("is `degree` the power of c by which the direction grows?")


def rotating_all_gradients_rotates_the_direction(case: StageCase) -> None:
    """Gradients U G V^T, with orthogonal U and V, give the directions U D V^T, where D are the directions of G."""
    for block in ((6, 5), (5, 5)):
        with on(block):
            u, v = rotation(block[0], 1), rotation(block[1], 2)
            straight, turned = case.trajectory(block)[0], case.bench(block).run(u @ case.gradients(block) @ v.T)
            what = "directions of the gradients U G V^T and U D V^T for the directions D of G"
            require_close(turned, u @ straight @ v.T, 1e-9, what, by_step=True)


def traits_follow_from_no_shape(case: StageCase) -> None:
    """`signals`, `lagged`, `entrywise`, `matrices`, `sums` and `learns` of a stage are the same for blocks of any
    shape.
    """
    for block in case.blocks:
        with on(block):
            for fact in ("signals", "lagged", "entrywise", "matrices", "sums", "learns"):
                known, own = (getattr(case.component.cached_traits(some), fact) for some in ((), block))
                require(known == own, f"traits(()).{fact}", f"{own!r}, as for this shape", f"{known!r}")


def entries_are_updated_alone(case: StageCase) -> None:
    """Gradients with their entries in another order give the same directions in that order, in every step of a
    trajectory. Gradients with half of their entries replaced give the same directions in the other half.
    """
    for block in case.blocks:
        with on(block):
            given, (straight, _) = case.gradients(block), case.trajectory(block)
            generator = torch.Generator().manual_seed(0)
            order = torch.randperm(given[0, 0].numel(), generator=generator, device="cpu").to(given.device)

            def mixed(x: Tensor, order: Tensor = order) -> Tensor:
                return x.flatten(2)[..., order].reshape(x.shape)

            what = "directions of gradients with their entries in another order and directions in that order"
            require_close(case.bench(block).run(mixed(given)), mixed(straight), 1e-10, what, by_step=True)
            kept, replaced = order[: len(order) // 2], order[len(order) // 2 :]
            if len(kept):
                changed = given.flatten(2).clone()
                changed[..., replaced] = 100 * standard_normal(*changed[..., replaced].shape, seed=len(order))
                found = case.bench(block).run(changed.reshape(given.shape)).flatten(2)[..., kept]
                what = "directions of half of the entries, with other and with the original gradients of the other half"
                require_close(found, straight.flatten(2)[..., kept], 1e-10, what, lambda: _MIXED, by_step=True)


_MIXED = in_parentheses("does the stage use sums or norms of several entries? Then its traits must not be `entrywise`")


def a_declared_moment_is_adams(case: StageCase) -> None:
    """A stage whose traits declare a first or second moment of Adam computes it exactly as `FirstMoment` or
    `SecondMoment` says.

    The optimizer may run torch's fused kernel in place of such a stage.
    """
    for block in case.blocks:
        if (moment := case.component.cached_traits(block).moment) is None:
            continue
        with on(block, f"whose traits declare {moment}"):
            bench, first = case.bench(block), isinstance(moment, FirstMoment)
            key = str(StateKey(None, case.who, moment.slot))
            require([*bench.tensors] == [key], "slots()", f"the slot {key} alone", [*bench.tensors])
            mean, beta = torch.zeros_like(bench.tensors[key]), moment.beta
            for t, gradient in enumerate(case.gradients(block), start=1):
                direction = standard_normal(*gradient.shape, seed=t)
                mean = beta * mean + (1 - beta) * (direction if first else gradient.square())
                wanted = corrected = mean / (1 - beta**t)
                if isinstance(moment, SecondMoment):
                    wanted = direction / (corrected.sqrt() + moment.eps)
                found = bench.step(gradient, direction)
                require_close(found, wanted, 1e-10, f"the direction of step {t} and that of the declared moment")
                require_close(bench.tensors[key], mean, 1e-10, f"{key} at step {t} and the declared moment")


def _odd(x: Tensor) -> str:
    """Return, as text, the first entry of x that is not finite, or the largest entry if all are finite."""
    bad = x[~x.isfinite()]
    return f"{float(bad[0] if len(bad) else x.abs().max()):g}"


def _comparable(case: StageCase) -> str | None:
    return "singular=True" if case.singular else None


def _mixes(case: StageCase) -> str | None:
    traits = case.component.cached_traits()
    if traits.signals:
        return "it asks for signals, whose entries have places"
    return None if traits.entrywise else _ENTRYWISE


_ENTRYWISE = "it is a law of stages that update each entry by its own gradients and declare Traits(entrywise=True)"


def slots_follow_their_frame_when_signs_change(case: StageCase) -> None:
    """If all gradients change their sign, a slot with frame "vector" changes its sign, and a slot with frame "square",
    "row" or "column" does not. Slots of chains inside the stage are not compared, because the signs of a basis that the
    stage gives them may follow the gradients.
    """
    for block in case.blocks:
        with on(block):
            bench, (_, plain) = case.bench(block), case.trajectory(block)
            bench.run(-case.gradients(block))
            for name, slot in case.component.slots(block).items():
                key, odd = str(StateKey(None, case.who, name)), slot.frame == "vector"
                if slot.frame == "none":
                    continue
                sign = "minus " if odd else ""
                what = f"{key} for the gradients -G, compared with {sign}its value for G (frame '{slot.frame}')"
                require_close(bench.tensors[key], plain.tensors[key] * (-1 if odd else 1), 1e-10, what, lambda: _FRAME)


_FRAME = in_parentheses(
    "a mean of gradients or directions is a 'vector', a mean of squares or sizes is a 'square', and all else has 'none'"
)


def _no_frames(case: StageCase) -> str | None:
    """Return the reason to skip `slots_follow_their_frame_when_signs_change`, or None if it applies.

    It does not apply to a stage that requests signals (inputs beside the gradient), because these keep their sign when
    the gradients change theirs. It also does not apply to a stage without slots that have a frame.
    """
    if case.component.cached_traits().signals:
        return "it asks for signals, which keep their sign"
    slots = (slot for block in case.blocks for slot in case.component.slots(block).values())
    return None if any(slot.frame != "none" for slot in slots) else "no slot has a frame"


def a_copy_of_the_state_resumes_exactly(case: StageCase) -> None:
    """A trajectory that continues from a copy of the slots has the same bits as one without an interruption."""
    for block in case.blocks:
        with on(block):
            given, twin, (expected, _) = case.gradients(block), case.halfway(block), case.trajectory(block)
            same = torch.equal(twin.run(given[case.steps // 2 :]), expected[case.steps // 2 :])
            cause = in_parentheses("does the stage remember anything outside its slots?")
            require(
                same, "directions of a run that goes on from a copy of the slots", "the same bits", "other bits", cause
            )


def dtype_and_device_are_kept(case: StageCase) -> None:
    """Direction and state keep dtype, device and shape, in float32 and float64."""
    for block in case.blocks:
        for dtype in (torch.float32, torch.float64):
            with on(block, str(dtype)):
                want = _kind(case.gradients(block, dtype=dtype))
                before = {key: _kind(tensor) for key, tensor in case.bench(block, dtype=dtype).tensors.items()}
                out, stack = case.trajectory(block, dtype)
                require(_kind(out) == want, "(dtype, device, shape) of the directions", f"{want}", _kind(out))
                after = {key: _kind(tensor) for key, tensor in stack.tensors.items()}
                require(after == before, "(dtype, device, shape) of the state", f"{before}", after)


def _kind(x: Tensor) -> tuple[str, str, tuple[int, ...]]:
    return str(x.dtype), str(x.device), tuple(x.shape)


def storage_makes_no_difference(case: StageCase) -> None:
    """State that is encoded and decoded without loss gives the same bits as state that is not encoded, in float32."""
    for block in case.blocks:
        with on(block):
            coder = StageBench(case.component, block, 3, torch.float32, Float32(min_elements=1))
            coded = coder.run(case.gradients(block, dtype=torch.float32))
            same = torch.equal(case.trajectory(block, torch.float32)[0], coded)
            require(
                same, "directions from encoded state", "the same bits as from state that is not encoded", "other bits"
            )


def state_is_reported_to_the_byte(case: StageCase) -> None:
    """An optimizer with this stage alone reports the bytes of the declared slots, plus 8 for the count of steps. All
    slots are used.
    """
    for block in case.blocks:
        with on(block):
            _, stack = case.trajectory(block)
            stack.require_used()
            size = sum(tensor[0].numel() * tensor.element_size() for tensor in stack.tensors.values())
            parameter = nn.Parameter(torch.zeros(block, dtype=torch.float64))
            optimizer = Optimizer(
                [parameter], {"update": [case.component], "routes": [], "view": "whole", "total_steps": 1}
            )
            (route,) = optimizer.routing_table()
            step = 8  # the int64 count of steps
            found = (optimizer.state_bytes(), route.state_bytes)
            require(
                found == (size + step,) * 2,
                "bytes of state, (by state_bytes(), in the routing table)",
                f"{(size + step,) * 2}",
                found,
            )


def a_checkpoint_resumes_exactly(case: StageCase) -> None:
    """The training of two parameters that are cut into blocks continues from a `state_dict` bit for bit, in float32."""
    for block in ((6, 6), (8,)):
        with on(block):
            blocking = {"size": 2}
            declared = {"update": [case.component], "routes": [], "blocking": blocking, "total_steps": case.steps}
            given = case.gradients(block, 2, torch.float32)
            parameters = [nn.Parameter(standard_normal(*block, seed=i).float()) for i in range(2)]
            optimizer = Optimizer(parameters, declared, lr=0.1)
            _train(optimizer, parameters, given[: case.steps // 2])
            copies = [nn.Parameter(parameter.detach().clone()) for parameter in parameters]
            resumed = Optimizer(copies, declared, lr=0.1)
            resumed.load_state_dict(optimizer.state_dict())
            _train(optimizer, parameters, given[case.steps // 2 :])
            _train(resumed, copies, given[case.steps // 2 :])
            same = all(torch.equal(a, b) for a, b in zip(parameters, copies, strict=True))
            cause = in_parentheses("does the stage remember anything outside its slots?")
            what = "parameters of a run that goes on from its state_dict"
            require(same, what, "the same bits", "other bits", cause)


def measures_are_of_each_block_alone(case: StageCase) -> None:
    """`measures` returns numbers `[N]`, the same for a block in a stack and alone, and does not change the state."""
    for block in case.blocks if type(case.component).measures is not Stage.measures else ():
        with on(block):
            stack = case.trajectory(block)[1].copy()
            before = {key: tensor.clone() for key, tensor in stack.tensors.items()}
            together = stack.measures(slice(0, 3))
            for name, values in together.items():
                found: object = values
                got: object = list(found.shape) if isinstance(found, Tensor) else f"{found!r}"
                require(got == [3], f"measures() '{name}'", "a tensor of shape [N] with N = 3", got)
            for i in range(3):
                alone = stack.measures(slice(i, i + 1))
                names = f"the names {[*together]}"
                require(alone.keys() == together.keys(), f"measures() of block {i} alone", names, [*alone])
                for name, values in alone.items():
                    # the tolerance allows for products of a single matrix, which are rounded differently
                    close = torch.isclose(values[0], together[name][i], rtol=1e-6, atol=1e-8, equal_nan=True)
                    where = f"measures() '{name}' of block {i} in a stack"
                    require(close, where, f"{values[0]}, as of the block alone", together[name][i])
            same = all(torch.equal(before[key], tensor) for key, tensor in stack.tensors.items())
            require(same, "the state after measures()", "no change", "other numbers")


def needs_a_pair(case: object) -> str | None:
    """Return the reason to skip laws that train one parameter alone, or None if they apply. They do not apply to a
    stage that needs the partner of the parameter, such as LoRA's B for A.
    """
    asks = isinstance(case, StageCase) and any(requested(stage) & PARTNER for _, stage in walk((case.component,)))
    return "a pair of parameters is required" if asks else None


def _train(optimizer: Optimizer, parameters: list[nn.Parameter], given: Tensor) -> None:
    """Run one optimizer step for each of the given gradients, `[T, parameters, *shape]`."""
    for step in given:
        for parameter, gradient in zip(parameters, step, strict=True):
            parameter.grad = gradient.clone()
        for name, signal in known_signals().items():
            if name not in OWN:
                by_parameter: Given = {parameter: _half(signal, parameter) for parameter in parameters}
                optimizer.provide(name, 0.5 if signal.extent == "step" else by_parameter)
        optimizer.step()


def _half(signal: Signal, parameter: Tensor) -> Tensor | float:
    """Return the value of a signal for a parameter: 1/2 for every entry, or 1/2 times the identity for a matrix."""
    if signal.extent in SIDES:
        own = parameter.shape[1:] if SIDES[signal.extent] == "inputs" else parameter.shape[:1]
        return torch.eye(math.prod(own), dtype=parameter.dtype) / 2
    if signal.extent == "outputs":
        return torch.full((1,), 0.5)
    return torch.full_like(parameter, 0.5) if signal.extent == "entry" else 0.5


def _no_moment(case: StageCase) -> str | None:
    declared = any(case.component.cached_traits(block).moment is not None for block in case.blocks)
    if declared and any(True for _ in schedules(case.component)):
        return "a number of it is scheduled"
    return None if declared else "its traits declare no moment of Adam"


def a_steady_step_stays_on_the_device(case: StageCase) -> None:
    """In steps without a refresh the host neither waits for the device nor copies numbers to it, and the number of
    kernels does not depend on the number of blocks in the stack.

    Decompositions of matrices are left out, because a stage may decompose matrices in every step: torch waits for them,
    and CUDA computes one matrix after another.
    """
    with on(case.blocks[0], "on a simulated accelerator"):
        steps = steady_steps(case)
        for number, counts in steps.items():
            require_no_waits(counts, f"step {number}, without a refresh", _WITHOUT_WAITS)
        first = min(steps, default=0)
        larger = steady_steps(case, 2 * FEW, first).get(first)
        if larger is not None:
            when = f"step {first}, without a refresh, for {2 * FEW} blocks in place of {FEW}"
            require_no_more_kernels(
                steps[first], larger, when, "compute all blocks `[N, *block]` at once, with torch.bmm"
            )


_WITHOUT_WAITS = (
    "`context.step`, `context.seed` and `context.tensor(...)` are on the device; in place of `if`, use torch.where or, "
    "for conditions on steps, `context.per_block` and `context.holds`"
)
FEW = 3
"""Number of blocks in stacks of which device work is counted."""


def steady_steps(case: StageCase, blocks: int = FEW, last: int | None = None) -> dict[int, DeviceCounts]:
    """Return the work on a simulated accelerator of each step without a refresh, by the number of the step.

    The first WARM_UP_STEPS steps are left out. The blocks are float32 and of the first shape of the case.

    blocks: number of blocks in the stack.
    last: number of the last step to run; None: the whole trajectory.
    """
    block, found = case.blocks[0], dict[int, DeviceCounts]()
    with accelerator("cuda") as run, run.device:
        bench = StageBench(case.component, block, blocks, torch.float32)
        for number, gradient in enumerate(case.gradients(block, blocks, torch.float32)[:last], start=1):
            step, context = bench.start(gradient)
            with accelerator("cuda") as counts:
                step()
            if number > WARM_UP_STEPS and not any((*context.due.values(), *context.asked.values())):
                found[number] = counts
    return found


def device_notes(case: StageCase) -> tuple[str, ...]:
    """Return a sentence about the work of a step without a refresh on a simulated accelerator.

    Return no sentence if every step has a refresh, or if no accelerator can be simulated.
    """
    if without_accelerator(case) is not None or not (steps := steady_steps(case)):
        return ()
    number, counts = max(steps.items())
    size = FEW * math.prod(case.blocks[0]) * torch.float32.itemsize
    traffic, peak, shape = counts.traffic / size, counts.peak / size, case.blocks[0]
    return (
        f"step {number}, without a refresh, launches {counts.kernels} kernels for {FEW} blocks of shape {shape} on a "
        f"simulated accelerator; it moves {traffic:.1f} and allocates {peak:.1f} times the bytes of the blocks",
    )


STAGE_LAWS: tuple[Law[StageCase], ...] = (
    Law(the_declaration_survives),
    Law(the_contract_is_kept, decisive=True),
    Law(a_copy_of_the_state_resumes_exactly, decisive=True),
    Law(a_stack_is_its_blocks, _comparable),
    Law(blocks_without_a_gradient_wait, _comparable),
    Law(masked_rows_change_nothing, _comparable),
    Law(inputs_are_never_written_to),
    Law(numbers_stay_finite),
    Law(a_zero_gradient_moves_nothing),
    Law(scaling_all_gradients_scales_the_direction, lambda case: "no degree is given" if case.degree is None else None),
    Law(rotating_all_gradients_rotates_the_direction, lambda case: None if case.rotates else "rotates=False"),
    Law(traits_follow_from_no_shape),
    Law(entries_are_updated_alone, _mixes),
    Law(a_declared_moment_is_adams, _no_moment),
    Law(slots_follow_their_frame_when_signs_change, _no_frames),
    Law(dtype_and_device_are_kept),
    Law(a_steady_step_stays_on_the_device, without_accelerator),
    Law(storage_makes_no_difference),
    Law(state_is_reported_to_the_byte, needs_a_pair),
    Law(a_checkpoint_resumes_exactly, needs_a_pair),
    Law(measures_are_of_each_block_alone),
)
