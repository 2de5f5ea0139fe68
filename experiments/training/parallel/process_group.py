"""The process group of a run, from its start to the error message when a rank is lost."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import FrameType

import torch
import torch.distributed as dist

from eigengraft.distributed.rank_group import DistributedError
from eigengraft.errors import RecipeError, stage_name

from .modes import MultiProcess, Parallelism
from .ranks import Ranks, launched_processes

_SIGNS = ("gloo", "NCCL", "Connection closed by peer", "Connection reset by peer", "Timed out waiting")


@contextmanager
def process_group(parallel: Parallelism, device_name: str) -> Iterator[Ranks]:
    """The ranks of a run: the processes that torchrun has started, in the default process group, made if it is missing.

    Raises RecipeError where `parallel` does not fit the number of processes.
    """
    if not isinstance(parallel, MultiProcess):
        if launched_processes() > 1:
            raise RecipeError(
                f"parallel: ddp, fsdp2 or hsdp is required for the {launched_processes()} processes that were started, "
                "got none: each of them would train the whole experiment in the same directory"
            )
        yield Ranks(device=local_device(device_name, 0))
        return
    if not launched_processes() and not dist.is_initialized():
        raise RecipeError(
            f"parallel: ranks are required for {stage_name(parallel)}, got a single process; start it with "
            "'torchrun --nproc-per-node 2 --no-python eigengraft train ...', or train alone with parallel=none"
        )
    own = not dist.is_initialized()
    size = launched_processes() if own else dist.get_world_size()
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", size))
    local_rank = int(os.environ.get("LOCAL_RANK", os.environ.get("RANK", 0)))
    device = local_device(device_name, local_rank, local_size)
    if own:
        _start(device, parallel.timeout)
    try:
        yield Ranks(dist.get_rank(), dist.get_world_size(), local_size, device, distributed=True)
    finally:
        if own:
            dist.destroy_process_group()


def _start(device: torch.device, timeout: float) -> None:
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=timedelta(seconds=timeout))


def local_device(name: str, local_rank: int, local_size: int = 1) -> torch.device:
    """The device that `name` means to process `local_rank` of `local_size` on this machine; with cuda, one each."""
    device = torch.device(name)
    if device.type != "cuda":
        return device
    if local_size > 1:
        if device.index is not None:
            raise RecipeError(f"device: 'cuda' is required for {local_size} ranks, one device each, got '{name}'")
        device = torch.device("cuda", local_rank)
    if (device.index or 0) >= torch.cuda.device_count():
        raise RecipeError(f"device: a device of this machine is required, got '{device}'; use device=cpu")
    return device


class Terminated(DistributedError):
    """SIGTERM was received: torchrun sends it to the remaining ranks when one has failed."""


@contextmanager
def report_lost_rank(ranks: Ranks, advice: Callable[[], str]) -> Iterator[None]:
    """Turn the loss of a rank into a DistributedError that names the rank which noticed it, followed by `advice`."""
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
        # A DistributedError without a cause is a mistake of some rank, not a lost rank.
        return isinstance(error, Terminated) or error.__cause__ is not None
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and any(s in str(error) for s in _SIGNS)
    )


def _cause(error: Exception) -> str:
    if isinstance(error, Terminated):
        return "told to stop (SIGTERM), as when another rank has failed."
    first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return f"another rank has stopped or does not answer ({first.rstrip('.')})."


def _on_terminate() -> Callable[[], None]:
    """Make SIGTERM raise Terminated and return the function that undoes it; only the main thread receives signals."""
    if threading.current_thread() is not threading.main_thread():
        return lambda: None

    def stop(number: int, frame: FrameType | None) -> None:
        raise Terminated

    before = signal.signal(signal.SIGTERM, stop)

    def restore() -> None:
        signal.signal(signal.SIGTERM, before)

    return restore


def _ignore_terminate() -> None:
    """Ignore SIGTERM while an error is printed: the launcher's signal must not cut the message short."""
    if threading.current_thread() is threading.main_thread() and launched_processes():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
