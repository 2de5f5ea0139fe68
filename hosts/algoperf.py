"""An AlgoPerf submission for PyTorch that trains with a recipe.

`eigengraft export algoperf RECIPE` copies this file as `submission.py`, beside `recipe.json` and
`tuning_search_space.json`. The hyperparameters `learning_rate`, `weight_decay`, `warmup_factor`, `grad_clip`,
`dropout_rate` and `label_smoothing` mean the same as in the baselines of AlgoPerf. Any other hyperparameter is an
override of the recipe, with "__" in place of dots: `update__rms__beta`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed.nn
from algoperf import spec
from torch import distributed

from eigengraft import compose

RECIPE = Path(__file__).with_name("recipe.json")
OF_LOOP = frozenset({"learning_rate", "weight_decay", "warmup_factor", "grad_clip", "dropout_rate", "label_smoothing"})
"""Names of the hyperparameters that this training loop uses itself. All other hyperparameters are overrides of the
recipe.
"""
LOCAL = {"distribution.mode": "local"}
"""Override with which every rank updates all parameters and holds their whole state. It is needed because AlgoPerf
saves only the optimizer of the first rank.
"""
BATCH_SIZES = {
    "criteo1tb": 262_144,
    "fastmri": 32,
    "imagenet_resnet": 1024,
    "imagenet_resnet_silu": 512,
    "imagenet_resnet_gelu": 512,
    "imagenet_vit": 1024,
    "librispeech_conformer": 256,
    "librispeech_deepspeech": 256,
    "ogbg": 512,
    "wmt": 128,
    "mnist": 16,
    "cifar": 128,
}
"""Global batch size by workload, as in AlgoPerf's own baseline."""


def get_batch_size(workload_name: str) -> int:
    """Return the global batch size of a workload."""
    for name in sorted(BATCH_SIZES, key=len, reverse=True):  # variants have longer names, as imagenet_vit_glu
        if workload_name.startswith(name):
            return BATCH_SIZES[name]
    raise ValueError(f"there is no workload '{workload_name}'; the workloads are {', '.join(BATCH_SIZES)}")


def init_optimizer_state(
    workload: Any, model_params: Any, model_state: Any, hyperparameters: Any, rng: Any
) -> dict[str, Any]:
    """Return the optimizer of the recipe and its learning rate schedule: a linear warm-up, then a cosine to 0."""
    given = {} if hyperparameters is None else hyperparameters._asdict()
    overrides = {name.replace("__", "."): value for name, value in given.items() if name not in OF_LOOP}
    optimizer = compose(
        RECIPE.read_text(encoding="utf-8"),
        model_params,
        given.get("learning_rate"),
        given.get("weight_decay"),
        overrides={"total_steps": workload.step_hint, **LOCAL, **overrides},
    )
    steps, warmup = workload.step_hint, given.get("warmup_factor", 0.05) * workload.step_hint

    def factor(step: int) -> float:
        if step < warmup:
            return float((step + 1) / math.ceil(warmup))
        return float(1 + math.cos(math.pi * min((step - warmup) / max(steps - warmup, 1), 1))) / 2

    return {"optimizer": optimizer, "scheduler": torch.optim.lr_scheduler.LambdaLR(optimizer, factor)}


def update_params(  # noqa: PLR0913  the signature is AlgoPerf's
    workload: Any,
    current_param_container: Any,
    current_params_types: Any,
    model_state: Any,
    hyperparameters: Any,
    batch: dict[str, Any],
    loss_type: Any,
    optimizer_state: dict[str, Any],
    eval_results: Any,
    global_step: int,
    rng: Any,
    train_state: Any = None,
) -> tuple[dict[str, Any], Any, Any]:
    """Make one training step with a batch. Return the optimizer state, the model and the model state, as AlgoPerf
    expects.
    """
    model, optimizer = current_param_container, optimizer_state["optimizer"]
    given = {} if hyperparameters is None else hyperparameters._asdict()
    optimizer.train()
    model.train()
    optimizer.zero_grad()
    dropout = {"dropout_rate": given["dropout_rate"]} if "dropout_rate" in given else {}
    outputs, model_state = workload.model_fn(
        params=model,
        augmented_and_preprocessed_input_batch=batch,
        model_state=model_state,
        mode=spec.ForwardPassMode.TRAIN,
        rng=rng,
        update_batch_norm=True,
        **dropout,
    )
    losses = workload.loss_fn(
        label_batch=batch["targets"],
        logits_batch=outputs,
        mask_batch=batch.get("weights"),
        label_smoothing=given.get("label_smoothing", 0.0),
    )
    total, count = losses["summed"], losses["n_valid_examples"]
    if distributed.is_initialized():
        # With loss and count summed over ranks, DDP's mean of gradients is the gradient of the mean over all rows.
        summed: Any = torch.distributed.nn.all_reduce
        total, count = summed(total), summed(count)
    (total / count).backward()
    if "grad_clip" in given:
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=given["grad_clip"])
    optimizer.step()
    optimizer_state["scheduler"].step()
    return optimizer_state, model, model_state


def prepare_for_eval(  # noqa: PLR0913  the signature is AlgoPerf's
    workload: Any,
    current_param_container: Any,
    current_params_types: Any,
    model_state: Any,
    hyperparameters: Any,
    loss_type: Any,
    optimizer_state: dict[str, Any],
    eval_results: Any,
    global_step: int,
    rng: Any,
) -> tuple[dict[str, Any], Any, Any]:
    """Switch the model to the weights that the recipe evaluates, for example averaged ones."""
    optimizer_state["optimizer"].eval()
    return optimizer_state, current_param_container, model_state


def data_selection(  # noqa: PLR0913  the signature is AlgoPerf's
    workload: Any,
    input_queue: Iterator[dict[str, Any]],
    optimizer_state: Any,
    current_param_container: Any,
    model_state: Any,
    hyperparameters: Any,
    global_step: int,
    rng: Any,
) -> dict[str, Any]:
    """Return the next batch of the input queue."""
    return next(input_queue)
