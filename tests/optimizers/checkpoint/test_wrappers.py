"""What is saved of a model in any wrapper is loaded in any other, bit for bit; one process, which is one rank."""

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import eigengraft
from eigengraft import Optimizer

STEPS = 3


class Held(nn.Module):
    """A model inside of the attribute in which FSDP keeps the module that it wraps."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._fsdp_wrapped_module = model


def blocks(model: nn.Module) -> nn.Module:
    """Every layer of a model in a wrapper of its own, one of them for data parallelism."""
    children = dict(model.named_children())
    model.up, model.output = checkpoint_wrapper(children["up"]), nn.DataParallel(children["output"])  # type: ignore[assignment]
    return model


def sharded(model: nn.Module) -> nn.Module:
    fully_shard(model)
    return model


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "plain": lambda model: model,
    "ddp": DistributedDataParallel,
    "compiled": lambda model: torch.compile(model, backend="eager"),  # type: ignore[return-value]
    "checkpointed": checkpoint_wrapper,
    "fsdp1": Held,
    "fully_shard": sharded,
    "blocks": blocks,
    "compiled ddp of blocks": lambda model: torch.compile(  # type: ignore[return-value]
        DistributedDataParallel(blocks(model)), backend="eager"
    ),
}


@pytest.fixture(scope="module", autouse=True)
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    store: Path = tmp_path_factory.mktemp("group") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def start(wrapper: str) -> tuple[list[Tensor], Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential()
    for name, layer in (("up", nn.Linear(3, 5)), ("norm", nn.LayerNorm(5)), ("output", nn.Linear(5, 2))):
        model.add_module(name, layer)
    model = WRAPPERS[wrapper](model)
    return list(model.parameters()), eigengraft.compose("psgd_kron", model)


def train(parameters: list[Tensor], optimizer: Optimizer, steps: range) -> list[Tensor]:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for p in parameters:
            gradient = torch.randn(p.shape, generator=generator)
            sharded = isinstance(p, DTensor)
            p.grad = distribute_tensor(gradient, p.device_mesh, p.placements) if sharded else gradient  # type: ignore[attr-defined]
        optimizer.step()
    return [(p.full_tensor() if isinstance(p, DTensor) else p).detach().clone() for p in parameters]


@pytest.fixture(scope="module")
def saved() -> dict[str, tuple[list[Tensor], Any, list[Tensor]]]:
    """By wrapper: parameters and state after some steps, and parameters after some more."""
    found = {}
    for wrapper in WRAPPERS:
        run = start(wrapper)
        before = train(*run, range(STEPS))
        found[wrapper] = (before, copy.deepcopy(run[1].full_state_dict()), train(*run, range(STEPS, 2 * STEPS)))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("here", WRAPPERS)
def test_state_of_any_wrapper_is_loaded_in_any_other(saved: dict[str, Any], here: str) -> None:
    for there, (before, state, after) in saved.items():
        parameters, optimizer = start(here)
        own = optimizer.param_groups[0]["param_names"]
        with torch.no_grad():
            for p, value in zip(parameters, before, strict=True):
                p.copy_(distribute_tensor(value, p.device_mesh, p.placements) if isinstance(p, DTensor) else value)
        optimizer.load_state_dict(state)
        assert optimizer.param_groups[0]["param_names"] == own
        found = train(parameters, optimizer, range(STEPS, 2 * STEPS))
        assert all(map(torch.equal, found, after)), f"from {there}"


@pytest.mark.slow
def test_optimizers_that_trainers_wrap_take_the_same_steps(saved: dict[str, Any]) -> None:
    for wrapper, (_, state, after) in saved.items():
        assert all(map(torch.equal, after, saved["plain"][2])), wrapper
        names = ["up.weight", "up.bias", "norm.weight", "norm.bias", "output.weight", "output.bias"]
        assert state["param_groups"][0]["param_names"] == names, wrapper
