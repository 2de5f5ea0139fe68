"""Warnings about combinations that are valid but rarely intended, each with a remedy and an id that silences it.

`compose` runs every registered check once. To add a check, decorate a function with `@recipe_check("some-id")`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

import torch
from torch import Tensor

from eigengraft.blocking.blocks import matrix_shape
from eigengraft.errors import name_some, warn_user
from eigengraft.numerics import active_fake_mode
from eigengraft.preconditioners.base import Inner, Stage, Stages, chain_slots, walk_blocks
from eigengraft.quantization import Quantizer
from eigengraft.quantization.base import choose, choose_codec, entry_for
from eigengraft.quantization.offload import in_memory
from eigengraft.schedules import schedules
from eigengraft.slots import Slot, StateKey, dotted

from ..optimizer import Optimizer
from ..param_groups import unclear_heads
from ..recipe.recipe import Recipe, Route, slot_keys
from ..recipe.routing import Match
from ..state.shown_state import own_state
from ..write.constraints import Constraint, ConstraintContext

_MOST = 256
"""Bytes of state per entry above which the state of a parameter is reported as large.

Adam has 8 bytes per entry, SOAP on square matrices has 24."""
_SMALL = 1e-4
"""Second moment, relative to the largest one of its block, that a storage should not round to 0.

Gradients that are 100 times smaller than the largest one of a block are common."""

_OVERSHOOT = 1.3
"""Factor by which a direction may exceed the norm that its stage declares. A polar factor from iterations has singular
values of up to 1.2 in place of 1."""
_WHITENING = frozenset(("second_moment", "root"))
"""Roles of slots by which stages divide directions, directly or by multiplication with an inverse root."""


@dataclass(frozen=True)
class Composition:
    """A composed optimizer, as every check receives it.

    optimizer: the composed optimizer, with its recipe and described parameters.
    steps: number of steps of the run; None if it is unknown.
    names_only: True if only names and shapes of the parameters are known, but not their model.
    """

    optimizer: Optimizer
    steps: int | None
    names_only: bool = False

    def slots(self) -> dict[StateKey, dict[Slot, None]]:
        """Return the distinct slots of all blocks of the model, on all ranks, by stage path and name of the slot.

        The keys are state keys without the index of the block. The values are dicts in place of ordered sets: blocks of
        different shapes can have different slots under one key.
        """
        found = dict[StateKey, dict[Slot, None]]()
        for rule, path, block in self._blocks:
            for key, slot in slot_keys(rule, path, block).items():
                found.setdefault(key, {})[slot] = None
        return found

    def chains(self) -> dict[str, tuple[Stages, list[tuple[int, ...]]]]:
        """Return (stages, shapes of the blocks that the stages receive) by path, for all chains, also inside stages."""
        found = dict[str, tuple[Stages, list[tuple[int, ...]]]]()
        for rule, path, block in self._blocks:
            for name, stages in (("update", rule.update), ("after_decay", rule.after_decay)):
                own = dict[tuple[str, tuple[int, ...]], list[Stage]]()
                for at, stage, seen in walk_blocks(stages, block, dotted(path, name)):
                    own.setdefault((at.rpartition(".")[0], seen), []).append(stage)
                for (at, seen), members in own.items():
                    found.setdefault(at, (tuple(members), []))[1].append(seen)
        return found

    @cached_property
    def _blocks(self) -> list[tuple[Recipe | Route, str, tuple[int, ...]]]:
        """Triples (update rule, path of the rule, shape of a block), one for each rule and each shape of its blocks.

        The blocks are those of all ranks.
        """
        recipe, found = self.optimizer.recipe, dict[tuple[str, tuple[int, ...]], Recipe | Route]()
        rules = recipe.rules()
        for info in self.optimizer.param_sets.infos:
            path, matrices = recipe.route(info)[0], recipe.view_of(info).matrices
            for grid in rules[path].blocking.grids(info.shape, matrices):
                if grid.keys:
                    found[path, grid.shape] = rules[path]
        return [(rule, path, block) for (path, block), rule in found.items()]


RecipeCheck = Callable[[Composition], Iterable[str]]
"""Function that yields a text for each fault of a composition. The text names the setting, the fault and a remedy."""
_CHECKS: dict[str, RecipeCheck] = {}


def recipe_check(name: str) -> Callable[[RecipeCheck], RecipeCheck]:
    """Register a check under an id of lower-case words with hyphens. A second check with the same id replaces it."""

    def register(check: RecipeCheck) -> RecipeCheck:
        _CHECKS[name] = check
        return check

    return register


def known_checks() -> tuple[str, ...]:
    """Return the ids of all checks."""
    return tuple(sorted(_CHECKS))


def warn_of_faults(optimizer: Optimizer, steps: int | None, silence: Iterable[str], *, names_only: bool) -> None:
    """Warn of every fault that the checks find, except checks whose id is in `silence`.

    steps: number of steps of the run. None: it is unknown.
    names_only: True if only names and shapes of the parameters are known, but not their model.

    Raises:
        ValueError: `silence` contains an unknown id.
    """
    silent = [silence] if isinstance(silence, str) else list(silence)
    if unknown := sorted(set(silent) - _CHECKS.keys()):
        raise ValueError(f"silence: there is no check '{unknown[0]}', the ids are {', '.join(known_checks())}")
    composed = Composition(optimizer, steps, names_only)
    for name, check in _CHECKS.items():
        for message in check(composed) if name not in silent else ():
            warn_user(f"{message} [{name}]")


@recipe_check("head-unclear")
def _unclear_head(composed: Composition) -> Iterator[str]:
    """Warn if the recipe's own update receives the model's last layer, although this layer may be the output head."""
    optimizer = composed.optimizer
    yield from unclear_heads(optimizer.recipe, optimizer.param_sets.rows(), composed.names_only)


@recipe_check("lr-zero")
def _zero_rate(composed: Composition) -> Iterator[str]:
    """Warn if the learning rate of every group is 0. Tensors are not read, because this may wait for a device."""
    rates = [group["lr"] for group in composed.optimizer.param_groups]
    if rates and all(not isinstance(rate, Tensor) and rate == 0 for rate in rates):
        own = composed.optimizer.recipe.lr
        yield f"lr: it is 0, so that no step changes a parameter; set it{f' (the recipe has {own:g})' if own else ''}"


@recipe_check("route-takes-all")
def _route_for_all(composed: Composition) -> Iterator[str]:
    """Warn if a route matches every parameter, so that the recipe's own update receives none."""
    recipe = composed.optimizer.recipe
    if route := next((route for route in recipe.routes if route.match == Match()), None):
        yield (
            f"routes.{route.name}: it has no `match` and so takes every parameter that no route before it takes; the "
            "recipe's own `update` receives none. Set its `match`, or write its update as that of the recipe"
        )


@recipe_check("parameters-left")
def _left_parameters(composed: Composition) -> Iterator[str]:
    """Warn if trainable parameters of the model are in none of the groups that were given to `grouped`."""
    model = composed.optimizer.known_model
    ours = {id(own) for group in composed.optimizer.param_groups for own in group["params"]}
    named = () if model is None else model.named_parameters()
    if left := [name for name, own in named if own.requires_grad and id(own) not in ours]:
        yield (
            f"{name_some(left, 3)}: trainable and in no group of this optimizer, which never updates "
            f"{'it' if len(left) == 1 else 'them'}; add a group, or silence this warning if another optimizer does"
        )


@recipe_check("logits-missing")
def _no_logits(composed: Composition) -> Iterator[str]:
    """Warn if a constraint requires the signal `max_logit`, and the model has no `MaxLogits` that records it."""
    if composed.optimizer.known_model is None:
        return
    for signal, where, _ in composed.optimizer.unprovided_signals():
        if signal == "max_logit":
            yield (
                f"{where}: no layer of the model records attention logits ('max_logit'), without which a step raises "
                "an error; put an eigengraft.MaxLogits into each attention layer and call it in the layer's forward, "
                "or provide them by optimizer.provide('max_logit', ...). For a model without attention, choose a "
                "recipe without this constraint"
            )


@recipe_check("state-large")
def _large_state(composed: Composition) -> Iterator[str]:
    """Warn if a parameter's state is much larger than the parameter.

    An example is a matrix 8 x 50,000 with a statistic for its long axis, which is a matrix 50,000 x 50,000.
    """
    optimizer = composed.optimizer
    sets, costly = optimizer.param_sets, list[tuple[float, str, tuple[int, ...]]]()
    rows = (row for group in sets.groups for row in zip(group.names, group.parameters, strict=True))
    for name, parameter in rows:
        size = sum(stored.nbytes for stored in own_state(optimizer.state.get(parameter)).values())
        if size > max(2**20, _MOST * parameter.numel()):
            costly.append((size / parameter.numel(), name, tuple(parameter.shape)))
    if costly:
        each, name, shape = max(costly)
        more = f", and {len(costly) - 1} others like it" if len(costly) > 1 else ""
        yield (
            f"{name}: its state takes {each:.0f} bytes for each entry of its shape {list(shape)}{more}; set "
            "`axes: {max_skew: 4}` in the statistic, so that such long axes have no factor, or send the parameter to "
            "another update by a route"
        )


@recipe_check("vectors-normalized")
def _normalized_vectors(composed: Composition) -> Iterator[str]:
    """Warn if the recipe's own update receives vectors, such as biases, and would give them a fixed norm.

    This is so if the update has a stage for matrices whose result does not depend on the norm of its input, such as
    `spectral`. Such a stage has no other effect on a vector than to normalize it. The remedy is a route for vectors.
    """
    recipe, vectors = composed.optimizer.recipe, list[str]()
    stage = next(
        (stage for stage in recipe.update if (own := stage.cached_traits((2, 2))).matrices and own.scale_free), None
    )
    sets = composed.optimizer.param_sets
    for group in sets.groups:
        for info, name in zip(group.infos, group.names, strict=True):
            if len(info.shape) < 2 and not recipe.route(info)[0]:
                vectors.append(name)
    if stage is not None and vectors:
        yield (
            f"update.{stage.label}: it is a stage for matrices and gives vectors the same norm in every step, here "
            f"{name_some(vectors, 3)}; set `routes: default`, which sends vectors to Adam"
        )


@recipe_check("storage-unused")
def _unused_storage(composed: Composition) -> Iterator[str]:
    """Warn if an entry of a recipe's `storage` fits none of the state tensors (slots) that it names, because of their
    sizes or shapes.

    There is no warning if the model has no slot of that name, as for a route without parameters.
    """
    storage, unused = composed.optimizer.recipe.storage, dict[str, str]()
    slots = composed.slots() if storage else {}
    for text, quantizer in storage.items():
        named = [(key, slot) for key, own in slots.items() for slot in own if entry_for(storage, key, slot) == text]
        if named and not any(choose(storage, key, slot) is quantizer for key, slot in named):
            key, slot = max(named, key=lambda pair: math.prod(pair[1].shape))
            unused[text] = f"The reason for the largest of these slots, {key}, is: {quantizer.unsupported(slot)}"
    if unused:
        names = ", ".join(f"'{text}'" for text in unused)
        entry, has, its = ("entry", "has", "its format") if len(unused) == 1 else ("entries", "have", "their formats")
        yield (
            f"storage: the {entry} {names} {has} no effect, because {its} can store none of the slots (state tensors) "
            f"that the {entry} would apply to. {next(iter(unused.values()))}. Lower `min_elements`, choose another "
            f"format, or remove the {entry}"
        )


@recipe_check("offload-unused")
def _unused_offload(composed: Composition) -> Iterator[str]:
    """Warn if offloading saves no memory: parameters are on a CPU, or the file system of the disk is in memory."""
    recipe, sets = composed.optimizer.recipe, composed.optimizer.param_sets
    for text, quantizer in recipe.storage.items():
        where = quantizer.location
        if where is not None and where.to == "cpu" and all(p.device.type == "cpu" for p in chain(*sets.parameters)):
            yield (
                f"storage.{text}: offload to cpu has no effect, because the parameters are on a CPU; use "
                "`to: disk`, or move the model to its device"
            )
        elif where is not None and where.to == "disk" and in_memory(where):
            yield (
                f"storage.{text}: offload to disk saves no memory, because the file system of {where.path} is in "
                "memory; set `directory` or TMPDIR to a directory on a disk"
            )


@recipe_check("storage-rounds-to-zero")
def _rounded_second_moments(composed: Composition) -> Iterator[str]:
    """Warn if the storage of second moments, whose roots divide updates, rounds small values to 0."""
    storage = {} if active_fake_mode() is not None else composed.optimizer.recipe.storage  # fake codes have no values
    found: dict[Quantizer, list[str]] = {}
    for key, own in (composed.slots() if storage else {}).items():
        for slot in own:
            quantizer = choose_codec(storage, key, slot) if slot.role == "second_moment" else None
            if quantizer is not None and str(key) not in found.get(quantizer, []):
                found.setdefault(quantizer, []).append(str(key))
    for quantizer, names in found.items():
        if _rounds_to_zero(quantizer):
            kind = getattr(quantizer, "kind", type(quantizer).__name__)
            yield (
                f"storage of {name_some(names, 3)}: {kind} rounds second moments {_SMALL:g} times the largest of their "
                "block to 0, and updates are divided by their roots; choose `{kind: codebook8, codebook: "
                "dynamic_unsigned}` or `{kind: uint8, compand: sqrt}`"
            )


@recipe_check("schedule-beyond-run")
def _long_schedules(composed: Composition) -> Iterator[str]:
    """Warn if a schedule is longer than the run, so that its last value is never reached.

    The length of the run is `steps` of `compose`, or else `total_steps` of the recipe.
    """
    recipe, steps = composed.optimizer.recipe, composed.steps or composed.optimizer.recipe.total_steps
    for path, schedule in schedules(recipe) if steps is not None else ():
        length = sum(segment.length(steps) for segment in schedule)
        if steps is not None and round(length) > steps:  # a sum of fractions has a rounding error
            yield (
                f"{path}: its schedule takes {length:g} steps and the run has {steps}, so that {schedule[-1].end:g} is "
                "never reached; give its length as a `fraction` of the run"
            )


@recipe_check("run-length")
def _other_length(composed: Composition) -> Iterator[str]:
    """Warn if the recipe depends on the length of the run, and its `total_steps` is that of another run.

    This is so if `steps` of `compose` differs from `total_steps`, or if `total_steps` is that of the published run,
    because the length of the run is unknown.
    """
    recipe, steps = composed.optimizer.recipe, composed.steps
    path = None if recipe.total_steps is None else recipe.needs_total_steps()
    if path is None:
        return
    if steps is None and recipe.total_steps == recipe.published_steps:
        yield (
            f"{path}: depends on the length of the run, which is not known; the recipe assumes the "
            f"{recipe.published_steps} steps of its published run. Give the number of steps as `steps` of "
            "eigengraft.compose, or as `total_steps` of the recipe"
        )
    elif steps is not None and recipe.total_steps != steps:
        yield (
            f"{path}: depends on `total_steps` of the recipe, {recipe.total_steps}, and the run has {steps} steps; set "
            "`total_steps: null` if the recipe should follow the run"
        )


@recipe_check("whitening-after-graft")
def _whitening_after_graft(composed: Composition) -> Iterator[str]:
    """Warn if a stage after a grafting changes the norm that the grafting has set.

    There is no warning for a combination that 4-bit Shampoo uses: the grafting computes norms without state, such as
    the norm of the gradient, and the later stage divides by its own statistics, as Adam does. The grafting then
    preconditions the gradient of that Adam, and does not set the norm of the update.
    """
    for path, (stages, (block, *_)) in composed.chains().items():
        graft: Stage | None = None
        for stage in stages:
            grafts = bool(_magnitudes(stage, block))
            ignores = stage.cached_traits(block).scale_free
            if graft is not None and not grafts and (ignores or (_adapts(graft, block) and _whitens(stage, block))):
                yield (
                    f"{path}.{stage.label}: it changes the norms that {path}.{graft.label} has set, because it divides "
                    f"directions by a scale of its own; move '{stage.label}' before '{graft.label}', or into the "
                    f"`direction` of '{graft.label}'"
                )
            graft = stage if grafts else graft


@recipe_check("clip-unused")
def _unused_clip(composed: Composition) -> Iterator[str]:
    """Warn about a clip whose effect a later stage undoes, and about a clip whose bound no direction can exceed."""
    for path, (stages, blocks) in composed.chains().items():
        for place, stage in enumerate(stages):
            if stage.cached_traits(blocks[0]).clip is None:
                continue
            if (after := _ignores_scale(stages[place + 1 :], blocks[0])) is not None:
                yield (
                    f"{path}.{stage.label}: it has no effect, because the result of '{after.label}' after it does not "
                    f"depend on the norm of a direction; remove '{stage.label}' or move it behind '{after.label}'"
                )
            elif all(_out_of_reach(stages[: place + 1], block) for block in blocks):
                reach, bound = _largest(stages[:place], blocks[0]), stage.cached_traits(blocks[0]).clip
                yield (
                    f"{path}.{stage.label}: it never clips, because directions before it have norms of at most "
                    f"{reach:.3g} and its bound is {bound:.3g}, for blocks of {list(blocks[0])}; lower the bound or "
                    f"remove '{stage.label}'"
                )


@recipe_check("decay-twice")
def _decay_twice(composed: Composition) -> Iterator[str]:
    """Warn if parameters decay by the weight decay of their group or route, and by a constraint too."""
    optimizer = composed.optimizer
    recipe, found = optimizer.recipe, dict[str, tuple[str, str]]()
    if active_fake_mode() is not None:  # fake parameters have no values that could decay
        return
    for group, made in zip(optimizer.param_groups, optimizer.param_sets.groups, strict=True):
        for info in made.infos:
            path = recipe.route(info)[0]
            rule = recipe.rules()[path]
            own = rule.weight_decay if isinstance(rule, Route) else None
            rate = group["weight_decay"] if own is None else own.rate
            for constraint in rule.constraints if isinstance(rate, Tensor) or rate > 0 else ():
                if _decays(constraint):
                    where = constraint.path_in(path)
                    rates = f"{path}.weight_decay" if own is not None else "weight_decay"
                    found.setdefault(where, (f"{rates} {float(rate):g}", str(info.name)))
    for where, (rates, name) in found.items():
        yield (
            f"{where}: {name} decays twice in a step, here and by {rates}; set that rate to 0 or remove the constraint"
        )


@recipe_check("pairs-unmatched")
def _unmatched_pairs(composed: Composition) -> Iterator[str]:
    """Warn if the recipe has routes for pairs of factors, as of LoRA, but the model has no such pair."""
    recipe = composed.optimizer.recipe
    paths = {f"routes.{route.name}" for route in recipe.routes if route.match.pair}
    reached = {recipe.route(info)[0] for info in composed.optimizer.param_sets.infos}
    if paths and not composed.names_only and paths.isdisjoint(reached):
        yield (
            f"{name_some(sorted(paths), 3)}: no trained parameter is a factor of a product, such as lora_A and lora_B, "
            "so this route has no parameters; add adapters to the model before compose, with `requires_grad` True, or "
            "choose another recipe"
        )


def _magnitudes(stage: Stage, block: tuple[int, ...]) -> list[Inner]:
    """Return the chains inside a stage that set the size of the stage's directions, such as `magnitude` of `graft`.

    An error in the second moments of such a chain changes the size of every update (`Inner.sensitive`).

    block: shape of the block that the stage receives.
    """
    return [inner for inner in stage.inner(block).values() if inner.sensitive]


def _adapts(graft: Stage, block: tuple[int, ...]) -> bool:
    """Return True if the chain that sets the norms of a grafting has state, as Adam has."""
    return any(stage.keeps_state(inner.block) for inner in _magnitudes(graft, block) for stage in inner.chain)


def _whitens(stage: Stage, block: tuple[int, ...]) -> bool:
    """Return True if a stage, or a stage inside it, stores a statistic and divides directions by it."""
    return any(slot.role in _WHITENING and slot.shape for _, _, slot in chain_slots((stage,), block))


def _ignores_scale(stages: Stages, block: tuple[int, ...]) -> Stage | None:
    """Return the stage that makes the result of a chain independent of the norm of its input; None without one.

    Clips at the beginning of the chain are passed over. The stage after them is returned if its result does not depend
    on the norm of its input. The result is None if this stage, or a clip before it, has state.

    block: shape of the block that the chain receives.
    """
    for stage in stages:
        own = stage.cached_traits(block)
        if stage.keeps_state(block):
            return None
        if own.scale_free:
            return stage
        if own.clip is None:
            return None
    return None


def _largest(stages: Stages, block: tuple[int, ...]) -> float:
    """Return an upper bound of the Frobenius norm of the directions that a chain returns; infinity without a bound."""
    norm = math.inf
    for stage in stages:
        own = stage.cached_traits(block)
        if own.clip is not None:
            norm = min(norm, own.clip) if _of_blocks(stage, block) else norm
        elif own.spectral_norm is not None and not stage.keeps_state(block):
            norm = own.spectral_norm
        else:
            norm *= math.inf if own.spectral_gain is None else own.spectral_gain
    return norm * math.sqrt(min(matrix_shape(block))) if norm else math.inf


def _out_of_reach(stages: Stages, block: tuple[int, ...]) -> bool:
    """Return True if the last stage of a chain is a clip whose bound no direction of the stages before it can reach.

    block: shape of the block that the chain receives.
    """
    clip = stages[-1].cached_traits(block).clip
    return clip is not None and _of_blocks(stages[-1], block) and clip > _OVERSHOOT * _largest(stages[:-1], block)


def _of_blocks(clip: Stage, block: tuple[int, ...]) -> bool:
    """Return True if a clip limits the norm of each block separately, and its bound is constant."""
    own = clip.cached_traits(block)
    return not own.sums and not own.signals and not any(True for _ in schedules(clip))


def _decays(constraint: Constraint) -> bool:
    """Return True if a constraint is a decay: it shrinks parameters, and more so at a larger learning rate.

    The function tries the constraint on a matrix of ones. A constraint with state or with required signals is not
    tried, and the result is False.
    """
    if constraint.requires_some or constraint.slots((2, 2)):
        return False
    ones = [torch.ones(2, 2, dtype=torch.float32, device="cpu")]
    kept, less = (constraint.retract({}, ones, ones, ones, ConstraintContext(lr=lr))[0] for lr in (0.0, 0.5))
    return bool((kept > less).all())


def _rounds_to_zero(quantizer: Quantizer) -> bool:
    """Return True if a quantizer rounds second moments of size `_SMALL` to 0 beside second moments of size 1.

    The function tries a matrix of 64 x 64 second moments. Return False if the quantizer cannot store such a matrix.
    """
    slot = Slot((64, 64))
    x = torch.full((1, *slot.shape), _SMALL, dtype=torch.float32, device="cpu")
    x[..., 0] = 1.0
    if quantizer.unsupported(slot) is not None:
        return False
    return bool((quantizer.decode(quantizer.encode(x), slot, x.dtype) == 0).any())
