"""A recipe as a `torch.optim.Optimizer`."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from eigengraft.component import plain
from eigengraft.errors import name_some, warn_user
from eigengraft.signals import PARTNER

from .checkpoint.consolidation import consolidate, divided_state, full_state
from .checkpoint.load_plan import strict_loading
from .checkpoint.pickling import restored, snapshot
from .checkpoint.replaced_params import adopt_parameters
from .inspect.reporting import ComposedOptimizer, unfused_warning
from .isolation import in_surroundings, isolated, isolation, kept_from_compiler, without_dynamo
from .param_groups import (
    KNOWN_KEYS,
    Defaults,
    check_options,
    own_keys,
    require_leaves,
    require_matches,
    require_names,
    require_options,
    require_partners,
    unclear_heads,
    warn_of_options,
)
from .recipe.expect import require_expected
from .recipe.loading import RecipeSource, load_recipe
from .recipe.overrides import Overrides
from .recipe.routing import DescribedParameters, ParamInfo
from .signals import Given, SignalSource, with_partners
from .state.param_sets import ParamSets
from .step.gradients import LossScale
from .step.spikes import ranks_of
from .step.step import ParamSet, ReadySteps, prepare
from .write.averaging import Mode
from .write.closures import Passes, require_closure
from .write.rounding import RoundingWatch
from .write.write import Hyper


class Optimizer(ComposedOptimizer):
    """W <- W - lr alpha W - lr U  with the update U that the chain of the recipe computes from the gradients.

    lr is the learning rate and alpha the weight decay. All state is allocated at construction, except for parameters
    with `requires_grad=False`, whose state is allocated when they are thawed.

    Args:
        params: parameters in any form that torch's optimizers accept: tensors, (name, tensor) pairs, or groups, which
            may have their own `lr` and `weight_decay`.
        recipe: name of a shipped recipe, path of a YAML file, mapping, list of stages, or `Recipe`. The default is
            AdamW.
        lr: learning rate of param groups without an `lr`. None: the learning rate of the recipe.
        weight_decay: decay rate of param groups without a `weight_decay`. None: the decay rate of the recipe.
        overrides: changes of the recipe, as a mapping {dotted path: value} or as strings "path=value".
        checked: True to check the contract of every stage at every step, which is slower. A stage that breaks the
            contract raises a `ContractError` with the path of the stage.
        options: options of torch's optimizers. `capturable` sets the recipe's `graph`. `foreach=True` is always in
            effect. `fused=True` is in effect for parameters with Adam's chain; a warning names other parameters.
            `foreach=False` and `fused=False` have no effect, and cause one warning.

    Raises:
        RecipeError: the recipe or an override is not valid.
        TypeError: `params` is a recipe or a model.
        ValueError: a parameter or a param group does not fit the recipe.
    """

    _known: Mapping[int, ParamInfo] | None = None
    """Descriptions of parameters by id, while the constructor adds the groups. None after the constructor."""
    _model: ModelLink | None = None
    """The model with which the optimizer was composed. None: no model is known."""
    _unknown_buffers = False
    """True after the warning that buffers cannot be restored without the model."""
    _rounding: RoundingWatch | None = None
    """The check that updates are not lost to rounding. None after the check, for a copy, and for a recipe with a
    constraint that rounds."""
    _asks_fused = False
    """True from `fused=True` until `_warn_of_fused` has checked which parameters no fused kernel updates."""
    _warned_of_peak = False
    """True after the warning that the peak of the learning rate rose."""
    _warned_of_no_gradient = False
    """True after the warning that no parameter had a gradient."""
    _step_supports_amp_scaling = True
    """Attribute of torch's protocol with `GradScaler`. True: the scaler does not wait for the device. It sets
    `found_inf` and `grad_scale` on the optimizer, and the step uses both."""

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
        captured = options.pop("capturable", None)
        if not isinstance(checked, bool):
            raise TypeError(f"checked: True or False is required, got {checked!r}")
        described = DescribedParameters.of(params)
        self.recipe = load_recipe(recipe, overrides).for_unknown_run()
        who = "compose" if isinstance(params, DescribedParameters) else "Optimizer"  # `compose` passes no others
        require_options(options, self.recipe, who)
        check_options(options, who)
        if captured is not None and captured != self.recipe.graph:
            self.recipe = self.recipe.replace(graph=captured)
        self.param_sets = ParamSets(self.recipe, checked, described.others)
        defaults = {
            "lr": self.recipe.lr if lr is None else plain(lr),
            "weight_decay": self.recipe.weight_decay.rate if weight_decay is None else plain(weight_decay),
        }
        self._known = described.infos
        self._asks_fused = bool(options.get("fused"))
        super().__init__(described.params, Defaults(defaults, self.param_sets.recipe_text))
        self._known = None
        if described.model is not None:
            self._model = ModelLink(described.model, self.param_groups)
        rules = self.recipe.rules().values()
        if not any(constraint.rounds for rule in rules for constraint in rule.constraints):
            self._rounding = RoundingWatch()
        with isolation(self):
            self.param_sets.complete(0, self.param_groups, self.state)
        self._warn_of_fused(who)
        if not all(route.optional for route in self.recipe.routes):
            require_matches(self.recipe, [*described.others, *self.param_sets.infos])
        if PARTNER & self.param_sets.signals.asking.keys():
            require_partners(self.recipe, self.param_sets.infos)
        if self.recipe.expect:
            require_expected(self.reached())
        if not isinstance(params, DescribedParameters):  # for a model, `compose` warns
            for message in unclear_heads(self.recipe, self.param_sets.rows(), names_only=True):
                warn_user(message)

    @property
    def known_model(self) -> torch.nn.Module | None:
        """The model with which the optimizer was composed.

        None: no model was given, the model was deleted, or this optimizer is a copy.
        """
        return None if self._model is None else self._model.model()

    @property
    def iterate(self) -> Mode:
        """The iterate that the parameters hold, "train" or "eval"."""
        groups = self.param_groups
        iterate: Mode = groups[0].get("iterate", "train") if groups else "train"
        return iterate

    @isolated
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a param group, and allocate its state.

        Args:
            param_group: a dict with `params`, optionally `lr`, `weight_decay` and `peak_lr`, and any keys of the user.
                `peak_lr` is the largest learning rate of the run. The decays `corrected` and `independent` are relative
                to it. Without `peak_lr`, the peak starts as the group's `lr`, or as `max_lr` of OneCycleLR if that is
                larger; a larger `lr` in a step becomes the peak.

        Raises:
            ValueError: the group has an option of the recipe or of torch's optimizers, or does not fit the recipe. The
                optimizer does not change.
        """
        if self._known is None:
            self._adopt_changes()
        own, relative = self.param_sets, self.param_sets.follows_peak is not None
        group, index = own_keys(param_group, own.recipe_text, relative), len(self.param_groups)
        require_names(group, self.param_groups)
        require_leaves(group)
        self._asks_fused = self._asks_fused or bool(param_group.get("fused"))
        without_dynamo(super().add_param_group)(group)
        try:
            self.param_sets.declare_group(self.param_groups, self._known)
            if self._known is None:
                if self.recipe.expect:
                    require_expected(self.reached())
                self.param_sets.complete(index, self.param_groups, self.state)
        except Exception:
            del self.param_groups[index:]
            self.param_sets.forget(index)
            raise
        if self._known is None:
            self._warn_of_fused("param group")

    def _warn_of_fused(self, who: str) -> None:
        """Warn of parameters that no fused kernel updates, if `fused=True` was given since the last call.

        who: beginning of the warning, such as "compose" or "param group".
        """
        if self._asks_fused and (text := unfused_warning(self.param_sets)):
            warn_user(f"{who}: {text}")
        self._asks_fused = False

    @kept_from_compiler
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Set the gradients of all parameters to None, or to zero.

        Args:
            set_to_none: False to keep the tensors of the gradients, and fill them with zeros.
        """
        without_dynamo(super().zero_grad)(set_to_none)

    @isolated
    def train(self) -> None:
        """Copy the training iterate back into the parameters, bit for bit, after `eval()`."""
        self._swap_iterate("train")

    @isolated
    def eval(self) -> None:
        """Copy the evaluated iterate into the parameters. Without an `averaging` in the recipe nothing changes.

        Until `train()` is called, the training iterate is in the state. `train()` discards values that were written
        into the parameters in between. Under `fully_shard`, call `model.reshard()` before `train()`, because a forward
        leaves gathered parameters, which `train()` does not change.
        """
        self._swap_iterate("eval")

    def _swap_iterate(self, mode: Mode) -> None:
        if self.recipe.averaging is not None and self.iterate != mode:
            self._adopt_changes()
            self.param_sets.swap_iterate(mode, self.state)
            for group in self.param_groups:
                group["iterate"] = mode

    @kept_from_compiler
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient.

        The update does not depend on modes of the caller, such as autocast. A closure runs in the modes of the caller.

        Args:
            closure: function that computes the loss and its gradients, and returns the loss. Recipes with `sam` or
                `line_search` need a closure, and call it several times. None: the gradients were computed before.

        Returns:
            The result of the first call of the closure, or None without a closure.

        Raises:
            RuntimeError: the parameters hold the evaluated iterate, or the recipe needs a closure and there is none.
            FloatingPointError: a gradient is not finite, and the recipe has `failure: {nonfinite: raise}`.
            ArithmeticError: more successive roots or bases failed than `failure.roots` tolerates.
            DistributedError: ranks have different gradients, or different values in param groups.
        """
        given = in_surroundings(closure) if callable(closure) else closure
        with isolation(self):
            try:
                return self._step(given)
            except ArithmeticError:
                # An ArithmeticError is a fault of the present gradients. The values that `provide` has stored for this
                # step belong to these gradients, and are dropped. Any other error is a fault of the call, for example a
                # missing closure. The caller may call again, and that call uses the values.
                self.param_sets.signals.drop()
                raise

    def _step(self, closure: Callable[[], Any] | None) -> Any:
        self._require_training_iterate()
        loss_scale, signals = self._loss_scale(), self.param_sets.signals
        if closure is not None or self._calls_again is not None:
            require_closure(closure, self._calls_again, loss_scale is not None)
        if loss_scale is not None and loss_scale.stops:
            self._collect_signals()
            signals.drop()
            return None
        parameters, rule = [p for group in self.param_groups for p in group["params"]], self.recipe.line_search
        passes = self._passes(closure, parameters)
        loss = None if passes is None else self._loss(passes, parameters)
        start = None if rule is None else rule.begin(parameters)
        if isinstance(loss, (Tensor, float)):
            self.provide("loss", loss)
        hypers, steps_before = self._begin_after_backward(parameters)
        counts = [] if rule is None else [(param_set, param_set.step_counts.copy()) for param_set in self.param_sets]
        ready = self._ready(parameters, hypers, steps_before, loss_scale)
        for group, hyper in zip(self.param_groups, hypers, strict=True):
            if hyper.peak_lr != group["peak_lr"]:
                self._keep_peak(group, hyper)
        for param_set, inputs in ready:
            if inputs is not None:
                param_set.step(inputs)
        if rule is not None and start is not None and passes is not None:
            try:
                with signals.pause():
                    rule.finish(start, passes, loss, self.param_groups, self._mean_over_ranks)
            except BaseException:
                for param_set, before in counts:
                    param_set.undo_counts(before)
                raise
        if self._rounding is not None and self._rounding.check(self):
            self._rounding = None
        return loss

    def _loss_scale(self) -> LossScale | None:
        """Return the numbers that a GradScaler has set on this optimizer for this step; None if there are none."""
        if not {"grad_scale", "found_inf"} & vars(self).keys():
            return None
        if self.released is not None and self.released.stepped:
            raise RuntimeError(
                "release: parameters have stepped with gradients that a GradScaler has not divided by its scale; "
                "train in bfloat16, which needs no scaler, or step without release"
            )
        return LossScale.of(self)

    def _begin_after_backward(self, parameters: Sequence[Tensor]) -> tuple[list[Hyper], int | None]:
        """Begin a step whose gradients have been computed. Backward has begun it if it has updated parameters.

        Return the values of param groups, and the number of steps before this one. None: the largest step count of the
        parameters.
        """
        begun = None if self.released is None else self.released.finish()
        if self._model is not None and begun is None and [p for p in parameters if p.grad is None and p.requires_grad]:
            self._model.check(self.param_groups)
        if not self._warned_of_no_gradient and self.released is None:
            self._warn_of_no_gradient(parameters)
        if begun is None:
            return self.begin_step(), None
        self.param_sets.begin_step(self.state, begun[1])
        return begun

    def _ready(
        self,
        parameters: Sequence[Tensor],
        hypers: Sequence[Hyper],
        steps_before: int | None,
        loss_scale: LossScale | None,
    ) -> ReadySteps:
        """Check the gradients. Return the parameter sets with the inputs of their steps, which have all signals.

        The order matters. The check may divide gradients by the scale of the loss, so functions that provide signals
        are called after it. The check for spikes reads the loss, and `take` drops all signals. It may also clip
        gradients, so partner signals, which may be copies of gradients, are made last.

        steps_before: number of steps before this one. None: the largest step count of the parameters.
        """
        signals, spikes, needed = self.param_sets.signals, self.param_sets.spikes, self.param_sets.needs_signals
        ready = prepare(self.param_sets, hypers, loss_scale, early=spikes is None and not needed)
        self._collect_signals()
        if spikes is not None and parameters:
            ready = spikes.apply(ready, signals.loss(parameters[0]))
        if needed:
            ready = with_partners(signals.asked, self.param_sets.rows(), signals.take(ready, steps_before))
        return ready

    def _collect_signals(self) -> None:
        """Call the functions that `provide` has received, and store the values of signals that they return."""
        if self.param_sets.needs_signals:
            known = [parameter for param_set in self.param_sets for parameter in param_set.parameters]
            self.param_sets.signals.collect(known)

    def _require_training_iterate(self) -> None:
        if self.iterate != "train":
            held = "the parameters hold the evaluated iterate, and steps need the training iterate"
            raise RuntimeError(f"Optimizer.step: {held}; call optimizer.train() first")

    def begin_step(self) -> list[Hyper]:
        """Begin a step: adopt changes that other code made since the last step. Return the values of param groups."""
        self._require_training_iterate()
        self.param_sets.consolidated = None
        self._adopt_changes(thorough=False)
        self.param_sets.require_values()
        if any(group.keys() - KNOWN_KEYS for group in self.param_groups):
            warn_of_options(self.param_groups, self.recipe)
        self.param_sets.begin_step(self.state)
        return self.hypers()

    def hypers(self) -> list[Hyper]:
        """Return the learning rate, its peak and the weight decay that each param group has now."""
        return [Hyper.of(group, self.param_sets.follows_peak is not None) for group in self.param_groups]

    def step_some(
        self, param_set: ParamSet, hypers: Sequence[Hyper], steps_before: int, only: NDArray[np.bool_]
    ) -> None:
        """Update some parameters of a set during backward. The method `step` later updates the rest.

        hypers: values of the param groups.
        steps_before: number of steps before this one.
        only: `[P]`, True for the parameters to update.
        """
        ready = prepare([param_set], hypers, only=only)
        if self.param_sets.needs_signals:
            ready = self.param_sets.signals.take(ready, steps_before)
        for _, inputs in ready:
            if inputs is not None:
                param_set.step(inputs)

    @property
    def _calls_again(self) -> str | None:
        """The option that calls the closure several times, "sam" or "line_search"; None if the recipe sets neither."""
        return next((name for name in ("sam", "line_search") if getattr(self.recipe, name) is not None), None)

    def _passes(self, closure: Callable[[], Any] | None, parameters: Iterable[Tensor]) -> Passes | None:
        """Return an object that calls the closure of a step, or None without a closure.

        A recipe with `sam` or `line_search` calls the closure several times. The object then gives all calls the same
        buffers of the model and the same random numbers.

        parameters: the trained parameters. The random number generators of their devices are restored between calls.
        """
        rule = self._calls_again
        if closure is None and rule is None:
            return None
        model = self.known_model
        if rule is not None and model is None and not self._unknown_buffers:
            self._unknown_buffers = True
            warn_user(
                f"{rule}: each call of the closure changes buffers of the model (BatchNorm's statistics), and the "
                "optimizer cannot restore them, because it was made without the model; use `eigengraft.compose(recipe, "
                "model)`"
            )
        return None if closure is None else Passes(closure, model, parameters if rule else ())

    def _loss(self, passes: Passes, parameters: Iterable[Tensor]) -> Any:
        """Call the closure, which computes gradients, and return the loss of its first call.

        With `sam`, the gradients and signals of the step come from a second call, at perturbed parameters.
        """
        if self.recipe.sam is None:
            return passes.first()
        with self.param_sets.signals.pause():
            loss = passes.first()
        with self.recipe.sam.perturbed(parameters):
            passes.again()
        return loss

    def _keep_peak(self, group: dict[str, Any], hyper: Hyper) -> None:
        """Store the peak of the learning rate in a param group. Warn once if the learning rate of a step has raised it.

        hyper: learning rate, its peak and weight decay of the group in this step.
        """
        known, group["peak_lr"] = group["peak_lr"], hyper.peak_lr
        rose = isinstance(hyper.lr, float) and hyper.peak_lr == hyper.lr != group.get("max_lr") and known > 0
        if rose and not self._warned_of_peak:
            self._warned_of_peak = True
            warn_user(
                f"{self.param_sets.follows_peak}: it is relative to the peak of the learning rate, which rose from "
                f"{known:g} to {hyper.peak_lr:g}; set 'peak_lr' of the param group to the largest lr of the run"
            )

    def _warn_of_no_gradient(self, parameters: Sequence[Tensor]) -> None:
        """Warn once if no parameter of this process has a gradient.

        The check stops at the first parameter that has a gradient.
        """
        if parameters and all(parameter.grad is None for parameter in parameters):
            self._warned_of_no_gradient = True
            warn_user(
                "step: no parameter has a gradient, so this step changes nothing; call backward() before step(), and "
                "zero_grad() after it. Further such steps give no warning"
            )

    def _mean_over_ranks(self, value: Tensor) -> Tensor:
        """Return the mean of a number over the ranks that share parameters. All of these ranks call the method."""
        ranks = ranks_of(self.param_sets)
        if ranks is None:
            return value
        return ranks.mean(value.clone(), "loss of a line search")

    @isolated
    def provide(self, name: str, value: Given | SignalSource) -> bool:
        """Provide a signal.

        Args:
            name: name of the signal.
            value: a number or a mapping {parameter: number or tensor} for the next step, or a function that is called
                in every step. The next step drops the number or mapping, even if no gradient is usable. A tensor of
                the parameter's shape must be equal on all ranks that hold the same entries of the parameter. Any other
                value may differ between ranks, and ranks combine their values.

        Returns:
            True if any part of the recipe requests the signal.
        """
        return self.param_sets.signals.provide(name, value, self.param_sets.parameters)

    def unprovided_signals(self) -> list[tuple[str, str, bool]]:
        """Return the requested signals that have no source.

        A number that `provide` received for the next step counts as a source, and a closure as the source of the loss.

        Returns:
            Triples (name of the signal, path of the stage or constraint that requests it, required). `required` is True
            if a step without the signal raises an error.
        """
        return self.param_sets.signals.unprovided(self.param_sets)

    def _adopt_changes(self, thorough: bool = True) -> None:
        """Adopt parameters and state that other code replaced, cast or moved.

        Also undo the step counts of parameters that the last step counted but did not update, for example because a
        gradient was not finite.

        thorough: True if state is read or written outside of a step. All state is then checked for changes, and delayed
            refreshes are finished. False: only the largest tensors are checked.
        """
        moved = not self.param_sets.matches(self.param_groups) and adopt_parameters(self)
        self.param_sets.follow(self.state, self.iterate, thorough, moved)
        self.param_sets.resolve_deferred()
        if thorough:
            self.param_sets.finish_refreshes()
            self.param_sets.store_spikes(self.param_groups)

    def _require_no_half_step(self, what: str) -> None:
        """Raise RuntimeError if backward has updated some parameters of a step that `step` has not ended yet.

        what: name of the method that needs a complete step, for the error.
        """
        if self.released is not None and self.released.stepped:
            raise RuntimeError(
                f"{what}: backward has updated {name_some(self.released.stepped, 1)}, and the other parameters have "
                "not stepped yet, so that the state belongs to no step; call optimizer.step() first"
            )

    @isolated
    def state_dict(self) -> dict[str, Any]:
        """Return the state dict of torch.

        Keys of state are "<block>/<stage path>/<slot>", and "averaging/<slot>" for iterates. Every param group contains
        the recipe as JSON text, and in `iterate` the name of the iterate that the parameters hold. If state is sharded
        over ranks, all of these ranks must call this method, and the state consists of DTensors for
        torch.distributed.checkpoint. For plain tensors use `full_state_dict`.

        Raises:
            RuntimeError: backward has updated some parameters of a step (`eigengraft.release`), and `step` has not
                updated the other parameters yet. All methods that save, copy or load the optimizer raise this error.
        """
        self._require_no_half_step("state_dict")
        self._adopt_changes()
        with divided_state(self):
            return without_dynamo(super().state_dict)()

    @isolated
    def full_state_dict(self) -> dict[str, Any]:
        """Return the state dict with all state as plain tensors on the CPU, for torch.save. All ranks call it."""
        self._require_no_half_step("full_state_dict")
        return full_state(self)

    @isolated
    def consolidate_state_dict(self, to: int = 0) -> None:
        """Gather all state on one rank. All ranks call this method.

        On that rank `state_dict` returns the gathered state until the state changes.

        Args:
            to: rank that receives the state.
        """
        self._require_no_half_step("consolidate_state_dict")
        self._adopt_changes()
        consolidate(self, to)

    @isolated
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load state, bit for bit, and the param groups.

        If the recipe of this optimizer has other settings than the saved recipe, the settings of this optimizer apply.
        A parameter without saved state starts with new state. In both cases a UserWarning names the differences.

        Args:
            state_dict: result of `state_dict` or `full_state_dict`.

        Raises:
            ValueError: state of a parameter is missing, extra or misshapen, or has another meaning under the recipe of
                this optimizer. One error names all differences, and nothing changes.
        """
        self._require_no_half_step("load_state_dict")
        self.param_sets.resolve_deferred()
        self.param_sets.finish_refreshes()
        if adopt_parameters(self):
            self.param_sets.follow(self.state, self.iterate, moved=True)
        self.param_sets.require_values()
        with strict_loading(self, state_dict):
            without_dynamo(super().load_state_dict)(state_dict)

    @isolated
    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        self._require_no_half_step("copy")
        self._adopt_changes()
        return restored, (type(self), snapshot(self))


class ModelLink:
    """The model of an optimizer, to detect that a parameter was replaced in the model after the optimizer was made.

    Parameters are found by name. A weak reference to a parameter would make `model.to` fail for DTensors, because torch
    refuses to swap a parameter that has weak references.

    model: weak reference to the model.
    """

    def __init__(self, model: torch.nn.Module, groups: Sequence[Mapping[str, Any]]) -> None:
        self.model = weakref.ref(model)
        places = {id(own): (at, place) for at, group in enumerate(groups) for place, own in enumerate(group["params"])}
        named = dict(model.named_parameters())
        self._names = frozenset(named)
        self._places = {name: places[id(own)] for name, own in named.items() if id(own) in places}

    def check(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Raise RuntimeError if a new parameter of the model has replaced a parameter that the optimizer updates.

        A new parameter is in no param group and has a gradient. The old parameter is in a group, requires a gradient
        and has none. The new parameter has replaced the old one in two cases:

        - It has the name of the old one.
        - It has a new name and the shape of the old one, and the old one is no longer in the model (as after
          `remove_parametrizations`).

        Weights that were tied after the optimizer was made are accepted, because the tied parameter is in a group.
        """
        ours = {id(parameter) for group in groups for parameter in group["params"]}
        held = {} if (model := self.model()) is None else dict(model.named_parameters())
        strange = {name: own for name, own in held.items() if own.grad is not None and id(own) not in ours}
        for name, own in strange.items():
            old = name if name in self._names else self._left(groups, held, own.shape)
            if old not in self._places:
                continue
            at, place = self._places[old]
            parameter = groups[at]["params"][place]
            if parameter.grad is None and parameter.requires_grad:
                which = "parameter was replaced" if old == name else f"parameter has replaced {old}"
                raise RuntimeError(
                    f"{name}: the model's {which} after the optimizer was made, so its gradient would be ignored; "
                    "replace parameters (by sharding, resizing or a parametrization) before composing, or compose a "
                    "new optimizer"
                )

    def _left(self, groups: Sequence[Mapping[str, Any]], held: Mapping[str, Tensor], shape: torch.Size) -> str | None:
        """Return the name of a parameter of this shape that the model had and has no longer, or None without one.

        Names with which the optimizer was made are searched. If there are several such parameters, the first name is
        returned.

        groups: the param groups, which still have the parameter.
        held: the present parameters of the model, by name.
        shape: shape of the parameter.
        """
        inside = {id(own) for own in held.values()}
        left = {name: groups[at]["params"][place] for name, (at, place) in self._places.items() if name not in held}
        return next((name for name, own in left.items() if own.shape == shape and id(own) not in inside), None)
