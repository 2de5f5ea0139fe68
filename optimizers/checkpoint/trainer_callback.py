"""A callback for Hugging Face's Trainer, which under DDP asks one rank alone for the optimizer's state dict."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class ConsolidateOnSave:
    """Calls `consolidate_state_dict` on all ranks before Trainer saves: `Trainer(callbacks=[ConsolidateOnSave()])`.

    Needs nothing of transformers; other events than these are ignored.
    """

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """After a step that Trainer saves."""
        _consolidate(args, control.should_save, others)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """After an epoch that Trainer saves."""
        _consolidate(args, control.should_save, others)

    def on_evaluate(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """After an evaluation, where Trainer saves the best model so far and decides only now whether this is it."""
        _consolidate(args, getattr(args, "save_strategy", None) == "best", others)

    def __getattr__(self, name: str) -> Callable[..., None]:
        if not name.startswith("on_"):
            raise AttributeError(name)
        return lambda *_, **__: None


def _consolidate(args: Any, saves: bool, others: dict[str, Any]) -> None:
    """Gathers the state of the optimizer of an event, which accelerate may have wrapped, on rank 0."""
    optimizer = others.get("optimizer")
    while optimizer is not None and not hasattr(optimizer, "consolidate_state_dict"):
        optimizer = getattr(optimizer, "optimizer", None)
    if saves and optimizer is not None and not getattr(args, "save_only_model", False):
        optimizer.consolidate_state_dict(to=0)
