"""A recipe as a `torch.optim.Optimizer`."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from eigengraft.component import plain
from eigengraft.errors import warn_user
from eigengraft.signals import PARTNER

from .checkpoint.consolidation import consolidate, divided_state, full_state
from .checkpoint.load_plan import strict_loading
from .checkpoint.pickling import restored, snapshot
from .checkpoint.replaced_params import adopt_parameters, require_values
from .inspect.reached import require_expected, require_matches, require_partners
from .inspect.reporting import Reporting
from .isolation import in_surroundings, isolated, isolation, kept_from_compiler, without_dynamo
from .param_groups import check_options, own_keys, read_hyper, warn_of_options
from .recipe.loading import RecipeSource, load_recipe
from .recipe.overrides import Overrides
from .recipe.routing import DescribedParameters, ParamInfo
from .signals import Given, SignalSource, Steps, with_partners
from .state.param_sets import ParamSets
from .write.averaging import Mode
from .write.closures import Passes, require_closure
from .write.rounding import RoundingWatch
from .write.write import Hyper


class Optimizer(Reporting, torch.optim.Optimizer):
    """W <- W - lr alpha W - lr U  with U what the recipe's update chain makes of the gradients.

    params: what torch optimizers take: tensors, (name, tensor) pairs, or groups, with their `lr` and `weight_decay`.
    recipe: a shipped name, a YAML path, a mapping, a list of stages or a `Recipe`.
    lr, weight_decay: default the recipe's.
    overrides: changes of the recipe, as a mapping {dotted path: value} or as strings "path=value".
    checked: check at every step that each stage keeps its contract, and raise a `ContractError` that names it; slower.
    options: `foreach`, `fused` and `capturable`, as torch's optimizers take them, which have no effect.

    All state is allocated here; parameters with `requires_grad=False` get theirs if they are thawed later.
    """

    _known: Mapping[int, ParamInfo] | None = None
    """What the constructor knows of parameters, by id, while it adds the groups; None: all groups are there."""
    _model: weakref.ref[torch.nn.Module] | None = None
    _unknown_buffers = False
    """Whether the user was warned that no model, and so no buffers, are known."""
    _rounding: RoundingWatch | None = None
    """What watches for updates that rounding loses, until it has seen enough."""
    _warned_of_peak = False
    """Whether the user was warned that the peak of the learning rate rose."""

    def __init__(
        self,
        params: Iterable[Any] | DescribedParameters,
        recipe: RecipeSource = "adamw",
        lr: float | Tensor | None = None,
        weight_decay: float | None = None,
        *,
        overrides: Overrides = (),
        checked: bool = False,
        **options: Any,
    ) -> None:
        check_options(options, "Optimizer")
        self.recipe = load_recipe(recipe, overrides)
        described = DescribedParameters.of(params)
        self.param_sets = ParamSets(self.recipe, checked, described.others)
        defaults = {
            "lr": self.recipe.lr if lr is None else plain(lr),
            "weight_decay": self.recipe.weight_decay.rate if weight_decay is None else plain(weight_decay),
        }
        self._known = described.infos
        if described.model is not None:
            self._model = weakref.ref(described.model)
        super().__init__(described.params, defaults)
        self._known = None
        if not any(constraint.rounds for rule in self.recipe.updates().values() for constraint in rule.constraints):
            self._rounding = RoundingWatch()
        with isolation(self):
            self.param_sets.complete(0, self.param_groups, self.state)
        if not all(route.optional for route in self.recipe.routes):
            require_matches(self.recipe, chain(described.others, *self.param_sets.infos))
        if PARTNER & self.param_sets.signals.listeners.asking.keys():
            require_partners(self.recipe, chain(*self.param_sets.infos))
        if self.recipe.expect:
            require_expected(self.recipe, chain(described.others, *self.param_sets.infos))

    @property
    def known_model(self) -> torch.nn.Module | None:
        """The model that the optimizer was composed with, if it is there; copies of the optimizer know none."""
        return None if self._model is None else self._model()

    @property
    def iterate(self) -> Mode:
        """Which iterate the parameters hold: the one to "train" or the one to "eval"."""
        return next((group.get("iterate", "train") for group in self.param_groups), "train")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group: `params`, optionally `lr`, `weight_decay` and `peak_lr`, and keys of the user's own.

        peak_lr: the largest learning rate of the run, which the decays `corrected` and `independent` are relative to.
        Default: the group's `lr`, or the larger `max_lr` of a OneCycleLR; a larger `lr` in a step becomes the peak.

        An option of the recipe or of torch's optimizers is a ValueError, after which the optimizer is as it was.
        """
        self._add_group(own_keys(param_group, self.param_sets.recipe_text))

    @isolated
    def _add_group(self, group: dict[str, Any]) -> None:
        index = len(self.param_groups)
        without_dynamo(super().add_param_group)(group)
        try:
            self.param_sets.declare_group(self.param_groups, self._known)
            if self._known is None:
                if self.recipe.expect:
                    require_expected(self.recipe, chain(self.param_sets.others, *self.param_sets.infos))
                self.param_sets.complete(index, self.param_groups, self.state)
        except Exception:
            del self.param_groups[index:]
            self.param_sets.forget(index)
            raise

    @kept_from_compiler
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets gradients, or makes them zero."""
        without_dynamo(super().zero_grad)(set_to_none)

    @isolated
    def train(self) -> None:
        """Makes the parameters hold the iterate that is trained again, bit for bit."""
        self._swap_iterate("train")

    @isolated
    def eval(self) -> None:
        """Makes the parameters hold the iterate to evaluate, where the recipe has an `averaging`.

        Until `train()` the training iterate is in the state, and what is written into the parameters is lost. Under
        `fully_shard` call `model.reshard()` before `train()`: a forward leaves gathered parameters behind.
        """
        self._swap_iterate("eval")

    def _swap_iterate(self, mode: Mode) -> None:
        if self.recipe.averaging is not None and self.iterate != mode:
            self._settle()
            self.param_sets.swap_iterate(mode, self.state)
            for group in self.param_groups:
                group["iterate"] = mode

    @kept_from_compiler
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update; returns what the closure returns first, which `sam` and `line_search` call again.

        The update is the same in any surroundings. A closure runs in those of the caller, under autocast too.
        """
        given = in_surroundings(closure) if callable(closure) else closure
        with isolation(self):
            return self._step(given)

    def _step(self, closure: Callable[[], Any] | None) -> Any:
        if self.iterate != "train":
            held = "the parameters must hold the training iterate, got the evaluated one"
            raise RuntimeError(f"Optimizer.step: {held}; call optimizer.train() first")
        self.param_sets.consolidated = None
        parameters, rule = [p for group in self.param_groups for p in group["params"]], self.recipe.line_search
        passes = self._passes(closure, parameters)
        loss = None if passes is None else self._loss(passes, parameters)
        search = None if rule is None else rule.begin(parameters)
        if isinstance(loss, (Tensor, float)):
            self.provide("loss", loss)
        self._settle(thorough=False)
        require_values(self.param_sets)
        warn_of_options(self.param_groups, self.recipe)
        self.param_sets.thaw(self.state, "train")
        if self.param_sets.schedules.by_path:
            self.param_sets.schedules.follow(self.param_sets)
        hypers = [read_hyper(group, self.param_sets.follows_peak is not None) for group in self.param_groups]
        ready: Steps = [(param_set, param_set.prepare(hypers)) for param_set in self.param_sets]
        if self.param_sets.asks_signals:
            ready = with_partners(self.param_sets, self.param_sets.signals.take(ready))  # all have prepared
        for group, hyper in zip(self.param_groups, hypers, strict=True):
            if hyper.peak_lr != group["peak_lr"]:
                self._keep_peak(group, hyper)
        for param_set, inputs in ready:
            if inputs is not None:
                param_set.step(inputs)
        if search is not None and passes is not None:
            with self.param_sets.signals.listeners.pause():
                search.finish(passes, loss, self.param_groups, self._mean_over_ranks)
        if self._rounding is not None and self._rounding.look(self):
            self._rounding = None
        return loss

    def _passes(self, closure: Callable[[], Any] | None, parameters: Iterable[Tensor]) -> Passes | None:
        """The calls of a closure in this step; None without one."""
        rule = next((name for name in ("sam", "line_search") if getattr(self.recipe, name) is not None), None)
        if closure is None and rule is None:
            return None
        require_closure(closure, rule)
        model = self.known_model
        if rule is not None and model is None and not self._unknown_buffers:
            self._unknown_buffers = True
            warn_user(
                f"{rule}: the closure of a step is called again, and only an optimizer that was composed with the "
                "model leaves its buffers (BatchNorm's statistics) as the first call did; use "
                "`eigengraft.compose(recipe, model)`"
            )
        return None if closure is None else Passes(closure, model, parameters if rule else ())

    def _loss(self, passes: Passes, parameters: Iterable[Tensor]) -> Any:
        """What the closure returns at the parameters; it leaves the gradients and the signals that the step takes."""
        if self.recipe.sam is None:
            return passes.first()
        with self.param_sets.signals.listeners.pause():
            loss = passes.first()
        with self.recipe.sam.perturbed(parameters):
            passes.again()
        return loss

    def _keep_peak(self, group: dict[str, Any], hyper: Hyper) -> None:
        """Keeps a peak of the learning rate that is higher than the group's; warns once if a step made it so."""
        known, group["peak_lr"] = group["peak_lr"], hyper.peak_lr
        rose = isinstance(hyper.lr, float) and hyper.peak_lr == hyper.lr != group.get("max_lr") and known > 0
        if rose and not self._warned_of_peak:
            self._warned_of_peak = True
            warn_user(
                f"{self.param_sets.follows_peak}: it is relative to the peak of the learning rate, which rises from "
                f"{known:g} to {hyper.peak_lr:g}; give the param group the largest lr of the run as 'peak_lr'"
            )

    def _mean_over_ranks(self, value: Tensor) -> Tensor:
        """The mean of a number over the ranks that share parameters, all of which call it."""
        groups = [one.rank_group.all_ranks for one in self.param_sets if one.rank_group is not None]
        ranks = max(groups, key=lambda group: group.size, default=None)
        if ranks is None:
            return value
        ranks.synchronize("loss of a line search", device=value.device)
        return ranks.all_reduce(value.clone(), "loss of a line search") / ranks.size

    @isolated
    def provide(self, name: str, value: Given | SignalSource) -> bool:
        """Gives a signal to the next step: a number, {parameter: number or tensor}, or a function asked in every step.

        Tensors of the shape of a parameter are the same wherever ranks hold the same entries; numbers, and matrices
        over inputs, may differ. Returns whether anything asks.
        """
        return self.param_sets.signals.provide(name, value, chain.from_iterable(self.param_sets.parameters))

    def unprovided_signals(self) -> list[tuple[str, str, bool]]:
        """(signal, path of what asks for it, whether steps are refused without it) of signals that have no source.

        A number that `provide` was given for the next step counts as one, and so does the loss, which closures return.
        """
        return self.param_sets.signals.unprovided(self.param_sets)

    def _settle(self, thorough: bool = True) -> None:
        """Adopt parameters and state that a host replaced, cast or moved. Take back steps with unusable gradients."""
        moved = adopt_parameters(self)
        self.param_sets.follow(self.state, self.iterate, thorough, moved)
        self.param_sets.resolve_deferred()

    @isolated
    def state_dict(self) -> dict[str, Any]:
        """The state dict of torch, with state keys "<block>/<stage path>/<slot>" and, for iterates, "averaging/<slot>".

        Every group holds the recipe as JSON text, and in `iterate` which iterate the parameters hold. Ranks that divide
        parameters all call it: state comes as DTensors for torch.distributed.checkpoint, unlike `full_state_dict`.
        """
        self._settle()
        with divided_state(self):
            return without_dynamo(super().state_dict)()

    @isolated
    def full_state_dict(self) -> dict[str, Any]:
        """The state dict with all state as plain tensors on the CPU, for torch.save; all ranks call it."""
        return full_state(self)

    @isolated
    def consolidate_state_dict(self, to: int = 0) -> None:
        """Gathers all state on rank `to`, where `state_dict` returns it until it changes; all ranks call this."""
        self._settle()
        consolidate(self, to)

    @isolated
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads state bit for bit, and the param groups.

        A recipe with other settings applies from then on, and a parameter without saved state begins afresh: a
        UserWarning names either. Raises one ValueError, and nothing changes, for missing, extra or misshapen state of a
        parameter, and for a recipe by which the numbers mean something else.
        """
        self.param_sets.resolve_deferred()
        if adopt_parameters(self):
            self.param_sets.follow(self.state, self.iterate, moved=True)
        require_values(self.param_sets)
        with strict_loading(self, state_dict):
            without_dynamo(super().load_state_dict)(state_dict)

    @isolated
    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        self._settle()
        return restored, (type(self), snapshot(self))
