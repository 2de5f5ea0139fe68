"""An optimizer as the rooms see it that may not import it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any, Protocol

from torch.utils.hooks import RemovableHandle

from ..recipe.recipe import Recipe
from .param_sets import ParamSets


class ComposedOptimizer(Protocol):
    """A torch optimizer with the recipe that it was composed from and its parameter sets.

    state: by parameter, and by whatever keys a user adds.
    """

    recipe: Recipe
    param_sets: ParamSets
    param_groups: list[dict[str, Any]]
    state: defaultdict[Any, Any]
    defaults: dict[str, Any]

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Fill an optimizer that was made without its constructor."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state dict, for which the hooks below are called."""

    def register_state_dict_post_hook(self, hook: Callable[..., Any], prepend: bool = False) -> RemovableHandle:
        """Call a hook with every state dict. It may return another one."""

    def register_load_state_dict_pre_hook(self, hook: Callable[..., Any], prepend: bool = False) -> RemovableHandle:
        """Call a hook with every state dict before it is loaded. It may return another one."""

    def register_load_state_dict_post_hook(self, hook: Callable[..., None], prepend: bool = False) -> RemovableHandle:
        """Call a hook after a state dict was loaded."""
