"""Hugging Face's Trainer: optimizers from recipes, with parameter names, the Trainer's groups of weight decay, and
checkpoints of the state of all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from transformers import Trainer

from eigengraft import Optimizer, compose
from eigengraft.optimizers import ConsolidateOnSave, grouped


def trainer_options(recipe: Any, args: Any, *, overrides: Any = ()) -> dict[str, Any]:
    """Return the keyword arguments of a Trainer for a recipe.

    `Trainer(model, args, **trainer_options("soap", args), train_dataset=...)`

    Args:
        recipe: the recipe, as `compose` accepts it.
        args: the `TrainingArguments`. Their `learning_rate` and `weight_decay` are used; `optim` and `adam_*` are not.
        overrides: changes of the recipe, as `compose` accepts them.

    Returns:
        The arguments `optimizer_cls_and_kwargs` and `callbacks`.
    """
    chosen = optimizer_factory(recipe, args.learning_rate, args.weight_decay, overrides=overrides)
    return {"optimizer_cls_and_kwargs": chosen, "callbacks": [ConsolidateOnSave()]}


def optimizer_factory(
    recipe: Any, lr: float | None = None, weight_decay: float | None = None, *, overrides: Any = ()
) -> tuple[Callable[[], Callable[..., Optimizer]], dict[str, Any]]:
    """Return the argument `optimizer_cls_and_kwargs` of a Trainer: a factory of the optimizer, and its keyword
    arguments.

    The learning rate and the weight decay are the arguments of this function. `learning_rate` and `weight_decay` of
    the Trainer's `args` are not used; use `trainer_options` for them. With several processes and a model that is not
    sharded, the Trainer also needs the callback `ConsolidateOnSave`.

    Args:
        recipe: the recipe, as `compose` accepts it.
        lr: learning rate; None: the learning rate of the recipe.
        weight_decay: weight decay; None: the weight decay of the recipe.
        overrides: changes of the recipe, as `compose` accepts them.

    Returns:
        A factory and its keyword arguments.
    """
    return _factory, {"recipe": recipe, "lr": lr, "weight_decay": weight_decay, "overrides": overrides}


def _factory() -> Callable[..., Optimizer]:
    """Return the function that makes the optimizer from a model. A Trainer calls `_factory` first, without
    arguments.
    """
    return _optimizer


def _optimizer(
    model: nn.Module, recipe: Any, lr: float | None, weight_decay: float | None, overrides: Mapping[str, Any]
) -> Optimizer:
    """Return an optimizer with the two param groups of a Trainer: one with weight decay, and one without for norms and
    biases.

    model: the model.
    recipe, lr, weight_decay, overrides: as in `optimizer_factory`.
    """
    unused: Any = None
    decaying = set(Trainer.get_decay_parameter_names(unused, model))
    named = list(model.named_parameters())
    groups: list[dict[str, Any]] = [
        {"params": [entry for entry in named if entry[0] in decaying]},
        {"params": [entry for entry in named if entry[0] not in decaying], "weight_decay": 0.0},
    ]
    described = grouped(model, [group for group in groups if group["params"]])
    return compose(recipe, described, lr, weight_decay, overrides=overrides)
