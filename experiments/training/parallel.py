"""Training of one model on several processes: ranks and their collectives, DDP, FSDP2 and HSDP, and lost ranks."""

from __future__ import annotations

import os
import signal
import threading
from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from types import FrameType
from typing import Annotated, Literal, TypeVar

import torch
import torch.distributed as dist
from pydantic import Field
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from eigengraft.component import Component, TextForm, stage_name
from eigengraft.distributed.rank_group import DistributedError
from eigengraft.errors import RecipeError

from ..tasks import Batch, TaskError
from ..tasks.base import generator

Answer = TypeVar("Answer")


@dataclass(frozen=True)
class Ranks:
    """The place of this process among the processes of a run.

    rank: number of this process.
    size: number of processes.
    local_size: number of processes on this machine.
    device: device of this process.
    distributed: True if there is a process group.
    """

    rank: int = 0
    size: int = 1
    local_size: int = 1
    device: torch.device = torch.device("cpu")
    distributed: bool = False

    @property
    def first(self) -> bool:
        """True on rank 0, the process that owns the run's directory and prints."""
        return self.rank == 0

    def shard_batch(self, batch: Batch) -> tuple[Batch, float]:
        """Return this rank's rows of a batch of B rows, and the weight of the mean loss of these rows.

        Rank r of R has the rows floor(r B / R) to floor((r + 1) B / R) - 1, with n_r of the n targets of the batch. Its
        weight is R n_r / n, so that the mean over ranks of the weighted gradients is the gradient of the mean over the
        batch.

        Raises RecipeError if the batch has fewer rows than there are ranks.
        """
        rows = len(batch.inputs)
        if rows < self.size:
            raise RecipeError(f"task.batch_size: {rows} rows cannot be split over {self.size} ranks; use more rows")
        own = slice(self.rank * rows // self.size, (self.rank + 1) * rows // self.size)
        targets = batch.targets[own]
        return Batch(batch.inputs[own], targets), self.size * targets.numel() / batch.targets.numel()

    def mean(self, value: float) -> float:
        """Return the mean of a number over ranks."""
        if self.size == 1:
            return value
        total = torch.tensor(value, dtype=torch.float64, device=self.device)
        dist.all_reduce(total)
        return total.item() / self.size

    def all_gather(self, mine: Answer) -> list[Answer]:
        """Return the objects of all ranks in the order of ranks. Meant for small objects."""
        if self.size == 1:
            return [mine]
        found: list[Answer | None] = [None] * self.size
        dist.all_gather_object(found, mine)
        return found  # type: ignore[return-value]  # all entries are filled

    def on_first(self, act: Callable[[], Answer]) -> Answer:
        """Run `act` on rank 0 and return its result on every rank. A ValueError, OSError or TaskError of `act` is
        raised on every rank.
        """
        if self.size == 1:
            return act()
        answer: list[Answer | Exception | None] = [None, None]
        if self.first:
            try:
                answer[0] = act()
            except (ValueError, OSError, TaskError) as error:
                answer[1] = error
        dist.broadcast_object_list(answer, src=0)
        if isinstance(answer[1], Exception):
            raise answer[1]
        return answer[0]  # type: ignore[return-value]


def seed_step(seed: int, step: int, rank: int = 0) -> None:
    """Seed torch's random numbers by seed, step and rank, so that checkpoints of ranks need not contain the random
    state.
    """
    torch.manual_seed(int(generator(seed, step, rank).integers(2**63)))


def launched_processes() -> int:
    """Return the number of processes that torchrun, or a similar launcher, has started; 0 without a launcher."""
    return int(os.environ["WORLD_SIZE"]) if {"RANK", "WORLD_SIZE"} <= os.environ.keys() else 0


def is_first_process() -> bool:
    """Return True if this is the only process or the process with rank 0, which prints. Needs no process group."""
    return os.environ.get("RANK", "0") == "0" or not launched_processes()


class Parallelism(Component, family="parallel"):
    """A placement of parameters on ranks. Each rank computes the gradient of its rows of the batch, and a step uses the
    mean over ranks.
    """

    @abstractmethod
    def wrap(self, model: nn.Module, ranks: Ranks) -> nn.Module:
        """Return the module to call in training. Parameters keep their names, and `model` is used for evaluation."""


class SingleProcess(Parallelism):
    """Training on one process."""

    kind: Literal["none"] = "none"

    def wrap(self, model: nn.Module, ranks: Ranks) -> nn.Module:
        return model


class MultiProcess(Parallelism):
    """Training on several processes, which torchrun has started."""

    timeout: float = Field(default=600, gt=0, description="seconds to wait for a rank before the run fails")


class DDP(MultiProcess):
    """Every rank holds all parameters (torch's DistributedDataParallel)."""

    kind: Literal["ddp"] = "ddp"

    def wrap(self, model: nn.Module, ranks: Ranks) -> nn.Module:
        devices = [ranks.device] if ranks.device.type == "cuda" else None
        return DistributedDataParallel(model, device_ids=devices, gradient_as_bucket_view=True)


class FSDP2(MultiProcess):
    """Every rank holds a shard of each parameter (torch's `fully_shard`)."""

    kind: Literal["fsdp2"] = "fsdp2"

    def wrap(self, model: nn.Module, ranks: Ranks) -> nn.Module:
        return _sharded(model, init_device_mesh(ranks.device.type, (ranks.size,)))


class HSDP(MultiProcess):
    """Every group of ranks holds all parameters; each rank of a group holds a shard of each parameter (`fully_shard` on
    a mesh of two axes).
    """

    kind: Literal["hsdp"] = "hsdp"
    replicas: int | None = Field(
        default=None,
        ge=1,
        description="number of groups of ranks, each of which holds all parameters; none: one group per machine",
    )

    def wrap(self, model: nn.Module, ranks: Ranks) -> nn.Module:
        groups = self.replicas or -(-ranks.size // ranks.local_size)
        if ranks.size % groups:
            raise RecipeError(f"parallel.replicas: must be a divisor of the {ranks.size} ranks, got {groups}")
        return _sharded(model, _grid(ranks, groups, self.timeout))


def reshard_model(model: nn.Module) -> None:
    """Make a sharded model gather its parameters again for the next forward pass.

    After a forward pass without a backward pass `fully_shard` keeps the gathered parameters of the outermost module.
    The next training step would use them although the sharded parameters have changed since.
    """
    reshard = getattr(model, "reshard", None)
    if callable(reshard):
        reshard()


def _sharded(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Shard the model in place and return it. Each layer (see `_layers`) is sharded alone, all other parameters
    together.
    """
    from torch.distributed.fsdp import fully_shard  # takes half a second to import

    for layer in _layers(model):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def _grid(ranks: Ranks, groups: int, timeout: float) -> DeviceMesh:
    """Return a mesh of shape [groups, n] for HSDP. Rank r is number r % n of group r // n.

    `init_device_mesh` is not used, because it ignores the time-out.

    groups: number of groups. Each group holds all parameters.
    timeout: seconds to wait for a rank before the run fails.
    """
    grid = torch.arange(ranks.size).reshape(groups, -1)
    span = timedelta(seconds=timeout)
    both = [rows.tolist() for rows in (grid.T, grid)]
    axes = [dist.new_subgroups_by_enumeration(rows, timeout=span)[0] for rows in both]  # type: ignore[no-untyped-call]
    return DeviceMesh.from_group(axes, ranks.device.type, mesh=grid, mesh_dim_names=("replicate", "shard"))


def _layers(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the layers of a model, which are sharded one by one.

    They are the modules with parameters in an `nn.ModuleList` or `nn.Sequential` that is in no other list.
    """
    for child in model.children():
        if not isinstance(child, (nn.Sequential, nn.ModuleList)):
            yield from _layers(child)
            continue
        for layer in child:
            if any(True for _ in layer.parameters()):
                yield layer


_SIGNS = ("gloo", "NCCL", "Connection closed by peer", "Connection reset by peer", "Timed out waiting")


@contextmanager
def process_group(parallel: Parallelism, device_name: str) -> Iterator[Ranks]:
    """Yield the place of this process among the processes of a run.

    Without data parallelism (`SingleProcess`), this process is the only one. Otherwise, the processes are those that
    torchrun has started, in the default process group. If this group is missing, it is created, and destroyed at the
    end. Raises RecipeError if `parallel` does not fit the number of processes.

    device_name: kind of device, such as cpu or cuda.
    """
    if not isinstance(parallel, MultiProcess):
        if launched_processes() > 1:
            raise RecipeError(
                f"parallel: 'none' cannot be used with the {launched_processes()} processes that were started, as each "
                "would train the whole experiment in the same directory; use ddp, fsdp2 or hsdp"
            )
        yield Ranks(device=local_device(device_name, 0))
        return
    if not launched_processes() and not dist.is_initialized():
        raise RecipeError(
            f"parallel: {stage_name(parallel)} needs several processes, got a single one; start them with "
            "'torchrun --nproc-per-node 2 --no-python eigengraft train ...', or use parallel=none"
        )
    own = not dist.is_initialized()
    size = launched_processes() if own else dist.get_world_size()
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", size))
    local_rank = int(os.environ.get("LOCAL_RANK", os.environ.get("RANK", 0)))
    device = local_device(device_name, local_rank, local_size)
    if own:
        if device.type == "cuda":
            torch.cuda.set_device(device)
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=timedelta(seconds=parallel.timeout))
    try:
        yield Ranks(dist.get_rank(), dist.get_world_size(), local_size, device, distributed=True)
    finally:
        if own:
            dist.destroy_process_group()


DeviceName = Annotated[str, TextForm(r"^(cpu|cuda(:\d+)?)$", "cpu, cuda or cuda:N")]
"""Name of the device of a run or a bench."""


def local_device(name: str, local_rank: int, local_size: int = 1) -> torch.device:
    """Return the device of one process of a run.

    name: kind of device, such as cpu or cuda. With cuda each process has its own device.
    local_rank: number of the process among the processes of the run on this machine.
    local_size: number of these processes.

    Raises RecipeError if the machine has no such device, or several processes would share a numbered one.
    """
    device = torch.device(name)
    if device.type != "cuda":
        return device
    if local_size > 1:
        if device.index is not None:
            raise RecipeError(
                f"device: '{name}' would be shared by {local_size} ranks; use 'cuda', which gives each rank a device"
            )
        device = torch.device("cuda", local_rank)
    if (device.index or 0) >= torch.cuda.device_count():
        raise RecipeError(f"device: this machine has no device '{device}'; use device=cpu")
    return device


class Terminated(DistributedError):
    """SIGTERM was received. torchrun sends it to the remaining ranks when a rank has failed."""


@contextmanager
def report_lost_rank(ranks: Ranks, advice: Callable[[], str]) -> Iterator[None]:
    """If an error in the `with` statement was caused by a rank that died, raise a DistributedError in its place.

    The message names the rank of this process and ends with `advice()`.
    """
    if not ranks.distributed:
        yield
        return
    restore = _on_terminate()
    try:
        yield
    except Exception as error:
        if ranks.size == 1:
            restore()
            raise
        _ignore_terminate()
        if _lost(error):
            raise DistributedError(f"rank {ranks.rank} of {ranks.size}: {_cause(error)} {advice()}") from error
        raise
    except BaseException:
        restore()
        raise
    restore()


def _lost(error: Exception) -> bool:
    if isinstance(error, DistributedError):
        # A DistributedError without a cause reports a wrong use of ranks, not a lost rank.
        return isinstance(error, Terminated) or error.__cause__ is not None
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and any(s in str(error) for s in _SIGNS)
    )


def _cause(error: Exception) -> str:
    if isinstance(error, Terminated):
        return "received SIGTERM, which torchrun sends when another rank has failed."
    first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return f"another rank has stopped or does not answer ({first.rstrip('.')})."


def _on_terminate() -> Callable[[], None]:
    """Make SIGTERM raise Terminated; return a function that undoes this. Does nothing outside the main thread."""
    if threading.current_thread() is not threading.main_thread():
        return lambda: None

    def stop(number: int, frame: FrameType | None) -> None:
        raise Terminated

    before = signal.signal(signal.SIGTERM, stop)

    def restore() -> None:
        signal.signal(signal.SIGTERM, before)

    return restore


def _ignore_terminate() -> None:
    """Ignore SIGTERM while an error is printed, so that the launcher's signal does not cut the message short."""
    if threading.current_thread() is threading.main_thread() and launched_processes():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
