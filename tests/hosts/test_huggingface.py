"""Hugging Face's Trainer trains, saves and resumes recipes, alone and on two processes."""

from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

from eigengraft import compose  # noqa: E402
from eigengraft.hosts.huggingface import optimizer_factory, trainer_options  # noqa: E402

from .models import same, values  # noqa: E402
from .processes import torchrun  # noqa: E402

DATA = [{"input_ids": row, "labels": row} for row in torch.arange(256).remainder(31).reshape(32, 8)]


def model() -> Any:
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=32, n_positions=8, n_embd=16, n_layer=2, n_head=2)
    return transformers.GPT2LMHeadModel(config)


def trainer(folder: Path, recipe: str, net: Any = None, **changes: Any) -> Any:
    chosen: dict[str, Any] = {
        "output_dir": str(folder),
        "max_steps": 6,
        "save_steps": 3,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "max_grad_norm": 0.5,
        "learning_rate": 1e-2,
        "weight_decay": 0.1,
        "lr_scheduler_type": "cosine",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        **changes,
    }
    args = transformers.TrainingArguments(**chosen)
    options = trainer_options(recipe, args)
    return transformers.Trainer(net or model(), args, train_dataset=DATA, eval_dataset=DATA[:8], **options)


@pytest.mark.parametrize("recipe", ["soap_fitted", "muon", "soap_4bit", "schedule_free_adamw"])
def test_a_run_resumes_bit_for_bit(recipe: str, tmp_path: Path) -> None:
    whole = trainer(tmp_path, recipe)
    before = values(whole.model)
    whole.train()
    again = trainer(tmp_path, recipe)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    whole.optimizer.optimizer.train()
    again.optimizer.optimizer.train()
    assert same(values(whole.model), values(again.model)) and not same(before, values(whole.model))


def test_names_and_groups_are_those_of_the_trainer(tmp_path: Path) -> None:
    here = trainer(tmp_path, "soap_fitted", lr_scheduler_type="constant")
    optimizer = here.create_optimizer()
    optimizer = getattr(optimizer, "optimizer", optimizer)
    routes = {row.name: row.route for row in optimizer.routing_table()}
    assert routes == {row.name: row.route for row in compose("soap_fitted", here.model).routing_table()}
    assert routes["transformer.wte.weight"] == "routes.adam" and routes["transformer.h.0.attn.c_attn.weight"] == ""
    assert [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups] == [(1e-2, 0.1), (1e-2, 0.0)]
    assert not any("bias" in name or "ln" in name for name in optimizer.param_groups[0]["param_names"])


def test_a_factory_alone_takes_its_own_rate(tmp_path: Path) -> None:
    args = transformers.TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[])
    chosen = optimizer_factory("soap_fitted", lr=0.25, overrides={"update.eigenbasis.refresh.steps": 2})
    optimizer = transformers.Trainer(model(), args, optimizer_cls_and_kwargs=chosen).create_optimizer()
    assert optimizer.param_groups[0]["lr"] == 0.25 and "'refresh': {'kind': 'every', 'steps': 2" in str(
        optimizer.recipe.model_dump()
    )


def test_two_processes_save_and_resume(tmp_path: Path) -> None:
    torchrun("huggingface_ddp", str(tmp_path))
