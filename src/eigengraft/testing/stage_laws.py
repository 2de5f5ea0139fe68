"""The laws of stages.

Tolerances, unless a law says otherwise: 1e-10 relative in float64, thousands of roundings; what must be the same is
compared bit for bit.
"""

from __future__ import annotations

import torch
from torch import Tensor

from eigengraft.quantization import Float32

from .device_laws import a_steady_step_stays_on_the_device, without_accelerator
from .laws import Law, require, require_close, the_declaration_survives
from .samples import difficult, rotation, standard_normal
from .stage_bench import StageBench
from .stage_case import StageCase, on
from .stage_state_laws import (
    a_checkpoint_resumes_exactly,
    a_copy_of_the_state_resumes_exactly,
    dtype_and_device_are_kept,
    measures_are_of_each_block_alone,
    state_is_reported_to_the_byte,
    storage_makes_no_difference,
    unpaired,
)


def the_contract_is_kept(case: StageCase) -> None:
    """In checked mode: slots declared and of their shape, state written back, inputs left alone, a direction of the
    right shape, all finite. Every slot is read or written, and written at least once.

    Encoded state is tried on the first shape: `storage_makes_no_difference` tries it on all of them.
    """
    for block in case.blocks:
        for quantizer in (None, Float32(min_elements=1)) if block == case.blocks[0] else (None,):
            with on(block):
                bench = StageBench(case.stage, block, 3, torch.float32, quantizer).checked()
                for t, gradient in enumerate(case.gradients(block, dtype=torch.float32)):
                    bench.step(gradient, standard_normal(*gradient.shape, seed=t).float() if t % 2 else gradient)
                if quantizer is None:
                    bench.require_used()
                    bench.require_written()


def a_stack_is_its_blocks(case: StageCase) -> None:
    """N blocks in a stack get the directions that each gets alone: its first and its last block."""
    for block in case.blocks:
        with on(block):
            given, (stacked, stack) = case.gradients(block), case.trajectory(block)
            for i in (0, 2):
                alone = stack.only(i).run(given[:, i : i + 1])[:, 0]
                what = f"block {i} alone as in a stack of 3 (does a sum or mean run over the stack axis 0?)"
                require_close(alone, stacked[:, i], 1e-10, what)


def blocks_without_a_gradient_wait(case: StageCase) -> None:
    """Rows by index, each with its own step: a block that was left out is where it would be without that step."""
    chosen = [torch.tensor(rows) for rows in ([0, 1, 2], [0, 2], [1], [2, 1], [0, 1, 2], [0], [0, 1], [1, 2])]
    for block in case.blocks:
        with on(block):
            stack = case.bench(block)
            alone = [stack.only(i) for i in range(3)]
            for gradient, rows in zip(case.gradients(block), chosen, strict=False):
                if stack.lagging and len({bool(stack.counts[i] == 0) for i in rows}) > 1:
                    continue
                ours = stack.step(gradient[rows], rows=rows)
                theirs = torch.cat([alone[i].step(gradient[i : i + 1]) for i in rows.tolist()])
                require_close(ours, theirs, 1e-10, f"rows {rows.tolist()} of a stack as each block alone,")


def masked_rows_change_nothing(case: StageCase) -> None:
    """A row whose gradient is not finite keeps its state bit for bit; the others do not notice it."""
    mask = torch.tensor([True, False, True])
    for block in case.blocks:
        with on(block, "a block with a gradient of nan is computed and then dropped: it must not raise"):
            given, stack, (expected, _) = case.gradients(block), case.halfway(block), case.trajectory(block)
            before = {key: tensor.clone() for key, tensor in stack.tensors.items()}
            for t in range(case.steps // 2, case.steps):
                spoiled = given[t].clone()
                spoiled[1] = torch.nan
                ours = stack.step(spoiled, mask=mask)[mask]
                require_close(ours, expected[t][mask], 1e-10, "blocks beside one whose gradient is nan")
            for key, tensor in stack.tensors.items():
                same = torch.equal(tensor[1], before[key][1])
                require(same, f"unchanged state of a block whose gradient is nan is required, got another {key}")


def inputs_are_never_written_to(case: StageCase) -> None:
    """Gradient and direction hold the same bits after a step as before it."""
    for block in case.blocks:
        with on(block):
            stack = case.bench(block)
            for t, gradient in enumerate(case.gradients(block)):
                direction = standard_normal(*gradient.shape, seed=t)
                copies = {"gradient": gradient.clone(), "direction": direction.clone()}
                stack.step(gradient, direction if t % 2 else gradient)
                for name, tensor in (("gradient", gradient), ("direction", direction)):
                    require(torch.equal(tensor, copies[name]), f"an untouched {name} is required, got a changed one")


def numbers_stay_finite(case: StageCase) -> None:
    """Direction and state, for zero, huge, tiny, rank-deficient, suddenly different gradients, all in one stack."""
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
                    require(finite, f"a finite direction is required, got {_odd(out[rows])} at step {t}")
                failed = [key for key, count in failures.items() if count[rows].any()]
                require(not failed, f"roots and bases that succeed are required, got failures in {failed}")
                for key, tensor in stack.tensors.items():
                    finite = tensor[rows].isfinite().all()
                    require(finite, f"finite state is required, got {_odd(tensor[rows])} in {key}")


def a_zero_gradient_moves_nothing(case: StageCase) -> None:
    """From the first step on; 0 / 0 is the usual fault, which an eps or `numerics.safe_ratio` avoids."""
    for block in case.blocks:
        with on(block):
            out = case.bench(block).run(torch.zeros_like(case.gradients(block)))
            require(not out.any(), f"a zero direction for a zero gradient is required, got {_odd(out)}")


def scaling_all_gradients_scales_the_direction(case: StageCase) -> None:
    """By the degree. The last step counts: roots and bases are no longer the identity they start from."""
    scales = (2.0**-10, 2.0**10)
    for block in case.blocks:
        with on(block):
            degree, (plain, bench) = case.degree_on(block), case.trajectory(block)
            given = torch.cat([case.gradients(block) * scale for scale in scales], 1)
            both = bench.repeated(len(scales)).run(given)[-1]
        for scale, scaled in zip(scales, torch.split(both, bench.blocks), strict=True):
            with on(block, f"gradients times {scale:g}"):
                what = f"a direction that scales by the power {degree:g} of the gradients' scale,"
                require_close(scaled * scale**-degree, plain[-1], 1e-7, what)


def rotating_all_gradients_rotates_the_direction(case: StageCase) -> None:
    """U G V^T gives U D V^T."""
    for block in ((6, 5), (5, 5)):
        with on(block):
            u, v = rotation(block[0], 1), rotation(block[1], 2)
            straight, turned = case.trajectory(block)[0], case.bench(block).run(u @ case.gradients(block) @ v.T)
            require_close(turned, u @ straight @ v.T, 1e-9, "a direction that turns with the gradients")


def traits_follow_from_no_shape(case: StageCase) -> None:
    """What the engine asks with the empty block is the same for every block."""
    for block in case.blocks:
        with on(block):
            for fact in ("signals", "lagged", "entrywise", "matrices", "sums", "learns"):
                known, own = (getattr(case.stage.cached_traits(some), fact) for some in ((), block))
                require(known == own, f"traits(()).{fact}: {own!r} is required, as of every block, got {known!r}")


def entries_are_updated_alone(case: StageCase) -> None:
    """Entries in another order give the same directions and state in that order."""
    for block in case.blocks:
        with on(block):
            given, (straight, _) = case.gradients(block), case.trajectory(block)
            order = torch.randperm(given[0, 0].numel(), generator=torch.Generator().manual_seed(0))

            def mixed(x: Tensor, order: Tensor = order) -> Tensor:
                return x.flatten(2)[..., order].reshape(x.shape)

            require_close(case.bench(block).run(mixed(given)), mixed(straight), 1e-10, "entries in another order, each")


def _odd(x: Tensor) -> str:
    """What an error shows of x: the first entry that is not finite, or else the largest."""
    bad = x[~x.isfinite()]
    return f"{float(bad[0] if len(bad) else x.abs().max()):g}"


def _comparable(case: StageCase) -> str | None:
    return "singular=True" if case.singular else None


def _scales(case: StageCase) -> str | None:
    return "no degree is given" if case.degree is None else None


def _rotates(case: StageCase) -> str | None:
    return None if case.rotates else "rotates=False"


def _mixes(case: StageCase) -> str | None:
    traits = case.stage.cached_traits()
    if traits.signals:
        return "it asks for signals, whose entries have places"
    return None if traits.entrywise else "it does not say that it is entry-wise"


CONTRACT: Law[StageCase] = Law(the_contract_is_kept)


STAGE_LAWS: tuple[Law[StageCase], ...] = (
    Law(the_declaration_survives),
    Law(a_stack_is_its_blocks, _comparable),
    Law(blocks_without_a_gradient_wait, _comparable),
    Law(masked_rows_change_nothing, _comparable),
    Law(inputs_are_never_written_to),
    Law(numbers_stay_finite),
    Law(a_zero_gradient_moves_nothing),
    Law(scaling_all_gradients_scales_the_direction, _scales),
    Law(rotating_all_gradients_rotates_the_direction, _rotates),
    Law(traits_follow_from_no_shape),
    Law(entries_are_updated_alone, _mixes),
    Law(dtype_and_device_are_kept),
    Law(a_steady_step_stays_on_the_device, without_accelerator),
    Law(a_copy_of_the_state_resumes_exactly),
    Law(storage_makes_no_difference),
    Law(state_is_reported_to_the_byte, unpaired),
    Law(a_checkpoint_resumes_exactly, unpaired),
    Law(measures_are_of_each_block_alone),
)
