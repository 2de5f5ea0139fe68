"""Coming together and falling apart: the process group of a run, and what is said when a rank is lost."""

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

from eigengraft.component import RecipeError, stage_name
from eigengraft.distributed.rank_group import DistributedError

from ..experiment import Experiment
from .modes import Together
from .ranks import Ranks, launched

_SIGNS = ("gloo", "NCCL", "Connection closed by peer", "Connection reset by peer", "Timed out waiting")


@contextmanager
def joined(experiment: Experiment) -> Iterator[Ranks]:
    """The ranks of `experiment`: those that torchrun has started, in the default process group, made if it is missing.

    Raises RecipeError where `parallel` and the way of starting do not fit.
    """
    if not isinstance(experiment.parallel, Together):
        if launched() > 1:
            raise RecipeError(
                f"parallel: ddp, fsdp2 or hsdp is required for the {launched()} processes that were started, got none: "
                "each of them would train the whole experiment in the same directory"
            )
        yield Ranks(device=local_device(experiment.device, 0))
        return
    if not launched() and not dist.is_initialized():
        raise RecipeError(
            f"parallel: ranks are required for {stage_name(experiment.parallel)}, got a single process; start it with "
            "'torchrun --nproc-per-node 2 --no-python eigengraft train ...', or train alone with parallel=none"
        )
    own = not dist.is_initialized()
    size = launched() if own else dist.get_world_size()
    here = int(os.environ.get("LOCAL_WORLD_SIZE", size))
    device = local_device(experiment.device, int(os.environ.get("LOCAL_RANK", os.environ.get("RANK", 0))), here)
    if own:
        _start(device, experiment.parallel.timeout)
    try:
        yield Ranks(dist.get_rank(), dist.get_world_size(), here, device, together=True)
    finally:
        if own:
            dist.destroy_process_group()


def _start(device: torch.device, timeout: float) -> None:
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=timedelta(seconds=timeout))


def local_device(name: str, local_rank: int, here: int = 1) -> torch.device:
    """The device that `name` means to the process `local_rank` of `here` on this machine; on cuda each has its own."""
    device = torch.device(name)
    if device.type != "cuda":
        return device
    if here > 1:
        if device.index is not None:
            raise RecipeError(f"device: 'cuda' is required for {here} ranks, each takes its own, got '{name}'")
        device = torch.device("cuda", local_rank)
    if (device.index or 0) >= torch.cuda.device_count():
        raise RecipeError(f"device: a device of this machine is required, got '{device}'; use device=cpu")
    return device


class Stopped(DistributedError):
    """SIGTERM has come: torchrun sends it to the ranks that are left when another one has failed."""


@contextmanager
def watched(ranks: Ranks, advice: Callable[[], str]) -> Iterator[None]:
    """Says as a DistributedError which rank was stopped, or noticed that another one is lost, and then `advice`."""
    if not ranks.together:
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
        return isinstance(error, Stopped) or error.__cause__ is not None  # without one, a rank has done something wrong
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and any(s in str(error) for s in _SIGNS)
    )


def _cause(error: Exception) -> str:
    if isinstance(error, Stopped):
        return "told to stop (SIGTERM), as when another rank has failed."
    first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return f"another rank has stopped or does not answer ({first.rstrip('.')})."


def _on_terminate() -> Callable[[], None]:
    """Makes SIGTERM raise Stopped; returns what undoes it. Signals are the main thread's."""
    if threading.current_thread() is not threading.main_thread():
        return lambda: None

    def stop(number: int, frame: FrameType | None) -> None:
        raise Stopped

    before = signal.signal(signal.SIGTERM, stop)

    def restore() -> None:
        signal.signal(signal.SIGTERM, before)

    return restore


def _ignore_terminate() -> None:
    """The launcher's signal may come while a fault is being told: it must not cut the message short."""
    if threading.current_thread() is threading.main_thread() and launched():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
