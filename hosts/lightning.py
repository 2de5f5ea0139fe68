"""Lightning: evaluation and checkpoints at averaged weights, which Lightning's loops do not support."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lightning.pytorch import Callback

from eigengraft import Optimizer

AVERAGED = "averaged_state_dict"
"""Key of a checkpoint under which the module's state at the averaged iterate is stored."""


class AveragedIterates(Callback):
    """A callback that evaluates the averaged iterate of recipes with averaging, and adds it to checkpoints.

    It calls `optimizer.eval()` before validation, test and prediction, and `optimizer.train()` after them. Checkpoints
    contain the iterate that is trained, from which runs resume bit for bit. Their key "averaged_state_dict" has the
    module's state at the averaged iterate. Recipes without averaging are not affected.
    """

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Switch to the averaged iterate. This method is also called before a test and a prediction."""
        _switch(trainer, "eval")

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Switch back to the trained iterate.

        Checkpoints contain this iterate, because Lightning calls the callbacks that save checkpoints after all others.
        """
        _switch(trainer, "train")

    on_test_start = on_predict_start = on_validation_start
    on_test_end = on_predict_end = on_validation_end

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Add the module's state at the averaged iterate to a checkpoint."""
        if any(optimizer.iterate == "train" for optimizer in _averaging(trainer)):
            _switch(trainer, "eval")
            state = pl_module.state_dict()
            checkpoint[AVERAGED] = {name: value.detach().clone() for name, value in state.items()}
            _switch(trainer, "train")


def _averaging(trainer: Any) -> Iterator[Optimizer]:
    """Yield the optimizers of a trainer whose recipes average iterates."""
    for optimizer in trainer.optimizers:
        if isinstance(optimizer, Optimizer) and optimizer.recipe.averaging is not None:
            yield optimizer


def _switch(trainer: Any, mode: str) -> None:
    for optimizer in _averaging(trainer):
        getattr(optimizer, mode)()
