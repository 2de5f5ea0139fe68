"""The laws of stages that are about their state: all of it is in the slots, of one dtype, to the byte, and a checkpoint
holds it."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from eigengraft import Optimizer, Stage
from eigengraft.chains import PARTNER, SIDES, Signal, known_signals, requested
from eigengraft.optimizers.signals import OWN, Given
from eigengraft.preconditioners import walk
from eigengraft.quantization import Float32

from .laws import require
from .samples import standard_normal
from .stage_bench import StageBench
from .stage_case import StageCase, on


def a_copy_of_the_state_resumes_exactly(case: StageCase) -> None:
    """All that a stage remembers is in its slots."""
    for block in case.blocks:
        with on(block):
            given, twin, (expected, _) = case.gradients(block), case.halfway(block), case.trajectory(block)
            same = torch.equal(twin.run(given[case.steps // 2 :]), expected[case.steps // 2 :])
            require(
                same, "the same directions from a copy of the state are required, got others; is there other memory?"
            )


def dtype_and_device_are_kept(case: StageCase) -> None:
    """Direction and state keep theirs, in float32 and float64."""
    for block in case.blocks:
        for dtype in (torch.float32, torch.float64):
            with on(block, str(dtype)):
                want = _kind(case.gradients(block, dtype=dtype))
                before = {key: _kind(tensor) for key, tensor in case.bench(block, dtype=dtype).tensors.items()}
                out, stack = case.trajectory(block, dtype)
                require(
                    _kind(out) == want, f"directions of (dtype, device, shape) {want} are required, got {_kind(out)}"
                )
                after = {key: _kind(tensor) for key, tensor in stack.tensors.items()}
                require(after == before, f"state of {before} is required, got {after}")


def _kind(x: Tensor) -> tuple[str, str, tuple[int, ...]]:
    return str(x.dtype), str(x.device), tuple(x.shape)


def storage_makes_no_difference(case: StageCase) -> None:
    """State kept as it is and state encoded and decoded without loss give the same bits, in float32."""
    for block in case.blocks:
        with on(block):
            coder = StageBench(case.stage, block, 3, torch.float32, Float32(min_elements=1))
            plain, coded = (
                case.trajectory(block, torch.float32)[0],
                coder.run(case.gradients(block, dtype=torch.float32)),
            )
            require(torch.equal(plain, coded), "the same directions from encoded state are required, got others")


def state_is_reported_to_the_byte(case: StageCase) -> None:
    """Slots declared = slots used = bytes reported."""
    for block in case.blocks:
        with on(block):
            _, stack = case.trajectory(block)
            stack.require_used()
            size = sum(tensor[0].numel() * tensor.element_size() for tensor in stack.tensors.values())
            parameter = nn.Parameter(torch.zeros(block, dtype=torch.float64))
            optimizer = Optimizer(
                [parameter], {"update": [case.stage], "routes": [], "view": "whole", "total_steps": 1}
            )
            (route,) = optimizer.routing_table()
            step = 8  # the int64 count of steps
            found = (optimizer.state_bytes(), route.state_bytes)
            require(found == (size + step,) * 2, f"{size + step} bytes of state are required, got (all, route) {found}")


def a_checkpoint_resumes_exactly(case: StageCase) -> None:
    """Two parameters cut into blocks, in float32, go on from a `state_dict` bit for bit."""
    for block in ((6, 6), (8,)):
        with on(block):
            blocking = {"size": 2}
            declared = {"update": [case.stage], "routes": [], "blocking": blocking, "total_steps": case.steps}
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
            require(
                same, "the same parameters after a resume are required, got others; is there memory beside the slots?"
            )


def measures_are_of_each_block_alone(case: StageCase) -> None:
    """What `measures` tells of a block is a number `[N]`, the same as from that block alone, and changes no state."""
    for block in case.blocks if type(case.stage).measures is not Stage.measures else ():
        with on(block):
            stack = case.trajectory(block)[1].copy()
            before, told = {key: tensor.clone() for key, tensor in stack.tensors.items()}, stack.measures(slice(0, 3))
            for name, values in told.items():
                what = f"measures() '{name}': a tensor of shape [N] with N = 3 is required, got "
                known = isinstance(values, Tensor)
                require(known and values.shape == (3,), what + (f"{list(values.shape)}" if known else f"{values!r}"))
            for i in range(3):
                alone = stack.measures(slice(i, i + 1))
                require(alone.keys() == told.keys(), f"measures(): the names {[*told]} are required, got {[*alone]}")
                for name, values in alone.items():
                    # a residual may be rounding, and a product of one matrix rounds as it likes
                    close = torch.isclose(values[0], told[name][i], rtol=1e-6, atol=1e-8, equal_nan=True)
                    require(
                        bool(close), f"measures() '{name}': {values[0]} is required, got {told[name][i]} in a stack"
                    )
            same = all(torch.equal(before[key], tensor) for key, tensor in stack.tensors.items())
            require(same, "measures(): unchanged state is required, got other values")


def unpaired(case: object) -> str | None:
    """Why laws with one parameter do not apply."""
    asks = isinstance(case, StageCase) and any(requested(stage) & PARTNER for _, stage in walk((case.stage,)))
    return "a pair of parameters is required" if asks else None


def _train(optimizer: Optimizer, parameters: list[nn.Parameter], given: Tensor) -> None:
    """given: `[T, parameters, *shape]`."""
    for step in given:
        for parameter, gradient in zip(parameters, step, strict=True):
            parameter.grad = gradient.clone()
        for name, signal in known_signals().items():
            if name not in OWN:
                by_parameter: Given = {parameter: _half(signal, parameter) for parameter in parameters}
                optimizer.provide(name, 0.5 if signal.extent == "step" else by_parameter)
        optimizer.step()


def _half(signal: Signal, parameter: Tensor) -> Tensor | float:
    """A signal of a parameter that is 1/2 everywhere, or 1/2 times the identity."""
    if signal.extent in SIDES:
        own = parameter.shape[1:] if SIDES[signal.extent] == "inputs" else parameter.shape[:1]
        return torch.eye(math.prod(own), dtype=parameter.dtype) / 2
    if signal.extent == "outputs":
        return torch.full((1,), 0.5)
    return torch.full_like(parameter, 0.5) if signal.extent == "entry" else 0.5
