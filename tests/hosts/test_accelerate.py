"""accelerate prepares, saves and resumes recipes: one process, DDP and FSDP2."""

from pathlib import Path
from typing import Any

import pytest

accelerate = pytest.importorskip("accelerate")

from eigengraft import compose  # noqa: E402

from .models import Net, loss_of, same, values  # noqa: E402
from .processes import torchrun  # noqa: E402


@pytest.mark.parametrize("recipe", ["soap_fitted", "shampoo_int8", "schedule_free_adamw"])
def test_accumulation_clipping_and_checkpoints(recipe: str, tmp_path: Path) -> None:
    def start() -> tuple[Any, Any, Any]:
        accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
        model = Net()
        return accelerator, *accelerator.prepare(model, compose(recipe, model, lr=1e-2))

    def train(accelerator: Any, model: Any, optimizer: Any, steps: range) -> None:
        for step in steps:
            with accelerator.accumulate(model):
                accelerator.backward(loss_of(model, step))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()

    own = start()
    train(*own, range(8))
    own[0].save_state(str(tmp_path))
    train(*own, range(8, 16))
    again = start()
    again[0].load_state(str(tmp_path))
    train(*again, range(8, 16))
    assert same(values(own[1]), values(again[1])) and not same(values(own[1]), values(Net()))


@pytest.mark.parametrize("scenario", ["accelerate_ddp", "accelerate_fsdp2"])
def test_two_processes_save_and_resume(scenario: str, tmp_path: Path) -> None:
    torchrun(scenario, str(tmp_path))
