"""Runs of two processes: `python -m torch.distributed.run` of this file, with the name of a scenario below."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def torchrun(scenario: str, *args: str) -> None:
    """Runs a scenario on two processes; what they say is the message if they fail."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    variables = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT / 'tests'}", "OMP_NUM_THREADS": "1"}
    variables |= {"ACCELERATE_USE_CPU": "true", "PYTHONSAFEPATH": "1"}  # hosts is also a folder of the checkout
    done = subprocess.run(
        [*command, "-m", "hosts.processes", scenario, *args],
        env=variables,
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-8000:]


def huggingface_ddp(folder: str) -> None:
    from . import operators as operators
    from .models import same, values
    from .test_huggingface import trainer

    whole = trainer(Path(folder), "soap_fitted")
    whole.train()
    again = trainer(Path(folder), "soap_fitted")
    again.train(resume_from_checkpoint=str(Path(folder) / "checkpoint-3"))
    assert same(values(whole.model), values(again.model))


def _accelerated(folder: str, sharded: bool, recipe: str = "soap_fitted") -> None:
    import torch
    from accelerate import Accelerator, PartialState
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

    from eigengraft import compose
    from eigengraft.hosts.accelerate import consolidate_on_save

    from .models import Net, loss_of

    def start() -> tuple[Any, Any, Any]:
        accelerator = Accelerator(cpu=True)
        if sharded:  # accelerate shards on accelerators alone, for which it says so itself
            PartialState._shared_state["distributed_type"] = DistributedType.FSDP
            accelerator.state.distributed_type = DistributedType.FSDP
            plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="no_wrap")
            accelerator.state.fsdp_plugin = plugin
        model = Net()
        optimizer = compose(recipe, model, lr=1e-2)
        prepared, own = accelerator.prepare(model, optimizer)
        if not sharded:
            consolidate_on_save(accelerator)
        return accelerator, prepared, own

    def train(accelerator: Any, model: Any, optimizer: Any, steps: range) -> None:
        for step in steps:
            loss = loss_of(model, 2 * step + accelerator.process_index)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()

    def whole(model: Any) -> list[Any]:
        found = (p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters())
        return [p.detach().clone() for p in found]

    accelerator, model, optimizer = start()
    train(accelerator, model, optimizer, range(4))
    accelerator.save_state(folder)
    train(accelerator, model, optimizer, range(4, 8))
    found = whole(model)
    if sharded:
        assert all(type(p).__name__ == "DTensor" for p in model.parameters())
    accelerator.free_memory()
    accelerator, model, optimizer = start()
    accelerator.load_state(folder)
    train(accelerator, model, optimizer, range(4, 8))
    assert all(map(torch.equal, found, whole(model)))


def accelerate_ddp(folder: str) -> None:
    _accelerated(folder, sharded=False)


def accelerate_fsdp2(folder: str) -> None:
    _accelerated(folder, sharded=True)


SCENARIOS = {run.__name__: run for run in (huggingface_ddp, accelerate_ddp, accelerate_fsdp2)}

if __name__ == "__main__":
    SCENARIOS[sys.argv[1]](*sys.argv[2:])
    sys.stdout.flush()
    os._exit(0)  # torch aborts now and then where an interpreter ends after FSDP2 on gloo, with torch's own AdamW too
