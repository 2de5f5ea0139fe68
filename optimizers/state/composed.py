"""An optimizer as the rooms see it that may not import it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any, Protocol

from torch.utils.hooks import RemovableHandle

from ..recipe.recipe import Recipe
from .param_sets import ParamSets

Hook = Callable[..., Any]


class ComposedOptimizer(Protocol):
    """A torch optimizer with the recipe that it was composed from and its parameter sets.

    state: by parameter, and by whatever keys a user adds.
    """

    recipe: Recipe
    param_sets: ParamSets
    param_groups: list[dict[str, Any]]
    state: defaultdict[Any, Any]
    defaults: dict[str, Any]

    def __setstate__(self, state: dict[str, Any]) -> None: ...
    def state_dict(self) -> dict[str, Any]: ...
    def register_state_dict_post_hook(self, hook: Hook, prepend: bool = False) -> RemovableHandle: ...
    def register_load_state_dict_pre_hook(self, hook: Hook, prepend: bool = False) -> RemovableHandle: ...
    def register_load_state_dict_post_hook(self, hook: Hook, prepend: bool = False) -> RemovableHandle: ...
