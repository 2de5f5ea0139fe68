"""Candidates of the bench of steps: recipes of this library, and optimizer classes of other libraries by module and
name.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import torch
from pydantic import Field, model_validator
from torch.nn import Parameter

from eigengraft.component import Component
from eigengraft.errors import RecipeError
from eigengraft.optimizers import Optimizer

INTERVAL = "{interval}"
"""Placeholder for the interval between refreshes, in overrides and options."""


class StepCase(Component):
    """A recipe with overrides, or a peer: an optimizer class "module:Class" or "file.py:Class" with options.

    "{interval}" in an override, or as the value of an option, is replaced by the interval that is measured. Candidates
    with the same `maths`, the name of their algorithm, take turns. Their times are compared with those of peers, and of
    recipes that are `compared`.
    """

    recipe: str | None = Field(default=None, examples=["soap"], description="shipped name or YAML file")
    overrides: tuple[str, ...] = Field(default=(), strict=False, description="dotted.path=value, in order")
    peer: str | None = Field(default=None, description="class of another library: module:Class, or file.py:Class")
    options: dict[str, Any] = Field(default={}, description="what the class is called with besides parameters")
    switches: dict[str, Any] = Field(
        default={}, description="attributes of modules that are set before the class is called: module:name = value"
    )
    maths: str = Field(default="", description="name of the algorithm; default: the recipe, or the class")
    name: str | None = Field(default=None, description="name in tables; default: the recipe, or the class")
    compared: bool = Field(default=False, description="true: recipes with the same `maths` are compared with this one")

    @model_validator(mode="after")
    def _one_of_two(self) -> Self:
        if (self.recipe is None) == (self.peer is None):
            raise ValueError("exactly one of recipe and peer is required; give one of the two")
        if self.recipe is not None and (self.options or self.switches):
            raise ValueError("options and switches cannot be combined with recipe; give overrides, or a peer")
        if self.peer is not None and (self.overrides or ":" not in self.peer):
            raise ValueError(
                f"peer: '{self.peer}' must have the form module:Class, and cannot be combined with overrides; give "
                "options"
            )
        return self

    def label(self) -> str:
        """Return the name of the candidate in tables."""
        return self.name or self.recipe or str(self.peer)

    def kind_of_maths(self) -> str:
        """Return the name of the algorithm. Only candidates with the same algorithm are compared."""
        return self.maths or self.label()

    @property
    def refreshes(self) -> bool:
        """Return True if the candidate depends on the interval between refreshes."""
        return any(INTERVAL in text for text in self.overrides) or INTERVAL in self.options.values()

    @property
    def is_other(self) -> bool:
        """True if recipes with the same algorithm are compared with this candidate."""
        return self.compared or self.recipe is None

    def build(self, parameters: Sequence[Parameter], interval: int) -> torch.optim.Optimizer:
        """Return the optimizer. Raise ImportError if the library of a peer is not installed."""
        if self.recipe is not None:
            changes = [text.replace(INTERVAL, str(interval)) for text in self.overrides]
            return Optimizer(list(parameters), self.recipe, lr=1e-3, overrides=changes)
        options = {key: interval if value == INTERVAL else value for key, value in self.options.items()}
        for where, value in self.switches.items():
            module, _, attribute = where.partition(":")
            setattr(importlib.import_module(module), attribute, value)
        made: torch.optim.Optimizer = self._peer_class()(list(parameters), **options)
        return made

    def _peer_class(self) -> Any:
        where, _, name = str(self.peer).rpartition(":")
        if where.endswith(".py"):
            path = Path(where).resolve()
            if not path.is_file():
                raise RecipeError(f"peer: '{where}' is not a file; give the path of an existing file")
            sys.path.insert(0, str(path.parent))
            where = path.stem
        module = importlib.import_module(where)
        if not hasattr(module, name):
            raise RecipeError(f"peer: '{where}' has no class '{name}'; give a class that '{where}' defines")
        return getattr(module, name)


_AXES = '.statistic.axes={"max_size": 1024, "vectors": false}'


def _recipe(recipe: str, stage: str, maths: str, *changes: str) -> StepCase:
    """Return a candidate whose recipe computes the same as optimizers of other libraries with the algorithm `maths`.

    Parameters are not split or merged, long axes and vectors have no factor, and refreshes are spread over all steps of
    an interval.
    """
    refresh = (f"{stage}.refresh.steps={INTERVAL}", f"{stage}.refresh.min_wave_work=1")
    same = ("routes=[]", "blocking={}", f"{stage}{_AXES}", *refresh, *changes)
    return StepCase(recipe=recipe, overrides=same, maths=maths, name=maths if changes else recipe)


_EIGENBASIS, _SHAMPOO = "update.eigenbasis", "update.graft.direction.shampoo"


def _heavyball(name: str, maths: str) -> StepCase:
    """Return the candidate for an optimizer class of HeavyBall, without compilation.

    name: name of the class.
    maths: name of its algorithm.
    """
    options = {"lr": 1e-3, "precondition_frequency": INTERVAL, "max_precond_dim": 1024, "merge_dims": False}
    return StepCase(
        peer=f"heavyball:{name}",
        options={**options, "use_precond_schedule": False},
        switches={"heavyball.utils:compile_mode": None},
        maths=maths,
        name=f"HeavyBall {name}",
    )


STEP_CASES = (
    _recipe("soap_fitted", _EIGENBASIS, "soap"),
    StepCase(
        peer="pytorch_optimizer:SOAP",
        options={"lr": 1e-3, "precondition_frequency": INTERVAL, "max_precondition_dim": 1024},
        maths="soap",
        name="pytorch-optimizer SOAP",
    ),
    _heavyball("SOAP", "soap"),
    _recipe("soap_fitted", _EIGENBASIS, "soap, permuted", f"{_EIGENBASIS}.transport=permute"),
    _recipe("soap_kl", _EIGENBASIS, "kl_soap"),
    _heavyball("KLSOAP", "kl_soap"),
    _recipe("shampoo", _SHAMPOO, "shampoo"),
    StepCase(recipe="muon", overrides=("routes=[]",), maths="muon"),
    StepCase(peer="torch.optim:Muon", options={"lr": 1e-3}, maths="muon", name="torch Muon"),
    StepCase(recipe="adamw", maths="adamw"),
    StepCase(peer="torch.optim:AdamW", options={"fused": True}, maths="adamw", name="torch AdamW, fused"),
    StepCase(peer="torch.optim:AdamW", options={"foreach": True}, maths="adamw", name="torch AdamW, foreach"),
    StepCase(recipe="sgd", maths="sgd"),
    StepCase(
        peer="torch.optim:SGD",
        options={"lr": 1e-3, "momentum": 0.9, "fused": True},
        maths="sgd",
        name="torch SGD, fused",
    ),
    StepCase(recipe="lion", maths="lion"),
    StepCase(recipe="adamw_8bit", maths="adamw_8bit"),
    StepCase(peer="torchao.optim:AdamW8bit", maths="adamw_8bit", name="torchao AdamW8bit"),
)
"""Default candidates. If the library of an optimizer is not installed, its row says so."""
QUICK = len(STEP_CASES) - 2
"""Number of candidates of the quick run. The last two are left out, because torchao compiles its steps for minutes."""
