"""`Recipe`, the declaration of an optimizer as one frozen model, and the slots that it declares with their storage.

YAML and Python have the same fields.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, lru_cache
from importlib import import_module
from itertools import chain, product
from typing import Annotated, Any, ClassVar, Literal, Self, get_args

import torch
from pydantic import BeforeValidator, ConfigDict, Field, WithJsonSchema, model_validator

from eigengraft.blocking import Batches, Blocking, Modules, View, ViewChoice, Whole
from eigengraft.blocking.blocks import ONE_TENSOR
from eigengraft.component import Component, PathName, plain
from eigengraft.distributed.distribution import Distribution
from eigengraft.errors import did_you_mean
from eigengraft.preconditioners import RMS, Momentum, Stages, chain_slots, walk
from eigengraft.preconditioners.cadence import Cadence
from eigengraft.quantization.base import (
    NEVER_CODED,
    Location,
    Quantizer,
    choose,
    require_coded_role,
    require_stage_roles,
)
from eigengraft.quantization.offload import available
from eigengraft.reference import FAMILY_MARK
from eigengraft.schedules import schedules
from eigengraft.signals import asking, require_signals
from eigengraft.slots import FORMAT, Role, Slot, StateKey, dotted

from ..width_scaling import WidthScalingField
from ..write import Averaging, Constraints, LineSearch, SharpnessAware
from ..write.failure import Failure
from ..write.write import Decoupled, WeightDecay
from .expect import ExpectationText, Reached, expected_rules, reached
from .routing import Match, ParamInfo
from .schema import ELSEWHERE, with_base

SCHEMA_VERSION = 2
"""Version of the field names in the JSON text of a recipe. A recipe with another version is refused."""
_STORAGE = {"type": "object", "additionalProperties": {FAMILY_MARK: "quantizer"}}
_SHAPES = ((1,), (2,), (2, 2), (2, 3), (3, 2), (64, 64), (2, 2, 2), (2, 3, 4), (2, 2, 2, 2))
"""Sample shapes of blocks. If a chain has a slot for a block of any shape, it has this slot for a block of one of these
shapes too."""


class UpdateRule(Component):
    """The declaration of an update: stages, stages after weight decay, constraints, views and blocking of matrices."""

    elsewhere: ClassVar[Mapping[str, str]] = ELSEWHERE
    update: Stages = Field(description="the stages that turn a gradient into a direction, at least one")
    after_decay: Stages = Field(
        default=(),
        description="stages after weight decay was added to the direction; they receive the gradient as it is, and the "
        "sum as direction",
    )
    constraints: Constraints = Field(
        default=(),
        validate_default=False,
        description="rules that change updates before the write or parameters after it, in order",
    )
    view: View = Field(
        default=Batches(),
        description="rule by which entries of a parameter form matrices; default: the last two axes are matrices, "
        "except of convolutions",
    )
    blocking: Blocking = Field(
        default=Blocking(), description="rule by which axes of matrices are merged, and long axes are split into blocks"
    )
    compile: bool = Field(default=False, description="compile the steps of stacks into programs, by torch's Inductor")

    def stages(self, path: str = "") -> Iterator[tuple[str, Any]]:
        """Yield (dotted path, stage) of every stage, including stages inside other stages."""
        for here, stage in self._all_stages:
            yield dotted(path, here), stage

    def listeners(self, path: str) -> Iterator[tuple[str, Any]]:
        """Yield (dotted path, stage or constraint) of every part of the rule that may request signals."""
        yield from self.stages(path)
        yield from ((own.path_in(path), own) for own in self.constraints)

    def cadences(self, path: str = "") -> dict[str, Cadence]:
        """Return the cadence of each stage that has refreshes, by dotted path of the stage."""
        found = ((here, stage.cadence()) for here, stage in self.stages(path))
        return {here: cadence for here, cadence in found if cadence is not None}

    def storable_roles(self) -> Iterator[str]:
        """Yield the roles of slots for which a quantizer can be chosen. A role may be yielded several times."""
        for slot in self._possible_slots:
            if not slot.sensitive and slot.role not in NEVER_CODED:
                yield slot.role

    def squares(self) -> bool:
        """Return True if a step of this update may square gradients, so that large ones overflow.

        The result is False only if the update has no constraints, all stages are entry-wise, and they store nothing but
        first moments and counts.
        """
        kept = {slot.role for slot in self._possible_slots}
        return bool(self.constraints) or not self.entrywise() or not kept <= {"first_moment", "count"}

    def adds_decay(self) -> bool:
        """Return True if weight decay is added to the direction, and not applied to the parameter separately.

        This is so if the rule has stages in `after_decay`, which receive the sum, or if a stage computes a step size,
        which multiplies the sum.
        """
        return bool(self.after_decay) or any(slot.step_size for slot in self._possible_slots)

    def lagging(self) -> bool:
        """Return True if a stage only initializes its statistics with the first gradient. Parameters then do not change
        in the first step.
        """
        return any(stage.cached_traits().lagged for _, stage in self.stages())

    def spans(self) -> bool:
        """Return True if a stage needs sums over all blocks of a parameter."""
        return any(stage.cached_traits().sums for _, stage in self.stages())

    def entrywise(self) -> bool:
        """Return True if no stage mixes entries. Which entries form a matrix (`view`) then has no effect."""
        return all(stage.cached_traits().entrywise for _, stage in self.stages())

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Return pydantic's copy, which is not validated, without the cached properties of the original."""
        copied = super().model_copy(update=update, deep=deep)
        for name, value in vars(UpdateRule).items():
            if isinstance(value, cached_property):
                copied.__dict__.pop(name, None)
        return copied

    @cached_property
    def _all_stages(self) -> tuple[tuple[str, Any], ...]:
        """Every stage with its dotted path in this rule."""
        return (*walk(self.update, "update"), *walk(self.after_decay, "after_decay"))

    @cached_property
    def _possible_slots(self) -> tuple[Slot, ...]:
        """The slots that the stages have for blocks of the sample shapes `_SHAPES`. Most slots occur several times."""
        found = list[Slot]()
        for stages, block in product((self.update, self.after_decay), _SHAPES):
            with suppress(ValueError):  # a stage may refuse a shape; composing raises if a parameter has that shape
                found += [slot for _, _, slot in chain_slots(stages, block)]
        return tuple(found)

    @cached_property
    def _slots(self) -> dict[tuple[str, tuple[int, ...]], dict[StateKey, Slot]]:
        """Cache of the results of `slot_keys`, by (path of the rule, shape of the block)."""
        return {}

    @model_validator(mode="after")
    def _stages_can_run(self) -> Self:
        if not self.update:
            raise ValueError("update: must have at least one stage; for plain gradient steps, use 'identity'")
        if self.entrywise() and not isinstance(self.view, (Batches, Whole)):
            raise ValueError(
                f"view: {self.view!r} has no effect, because no stage of the update mixes entries; remove it"
            )
        require_signals(self.stages(), [(own.path_in(""), own) for own in self.constraints])
        return self


class Route(UpdateRule):
    """An update rule for the parameters that match a condition, in place of the recipe's own rule."""

    if_missing: ClassVar[Mapping[str, str]] = {
        "update": "a route does not inherit the `update` of its recipe; repeat that `update` in the route. In YAML, "
        "write `update: &main [...]` in the recipe and `update: *main` in the route (`eigengraft show RECIPE` prints "
        "the `update` of a shipped recipe)",
    }
    name: PathName = Field(examples=["gates"], description="name of the route in paths")
    match: Match = Field(default=Match(), description="conditions on a parameter; default: every parameter")
    lr_multiplier: float = Field(default=1.0, ge=0, description="factor on the learning rate of the param group")
    weight_decay: WeightDecay | None = Field(
        default=None, description="weight decay of these parameters; default: that of the recipe"
    )
    optional: bool = Field(default=False, description="true: it is no error if no parameter matches")


def adam_route() -> Route:
    """Return the Adam route, for embeddings, output heads, norms, biases and tensors with fewer than two axes."""
    return Route(
        name="adam",
        match=Match(role=("embedding", "head", "norm", "bias", "scalar", "vector")),
        update=(Momentum(beta=0.9), RMS(beta=0.95)),
        optional=True,
    )


def _routes(value: Any) -> Any:
    value = (value,) if isinstance(value, str) else value
    if not isinstance(value, (list, tuple)):
        raise ValueError("routes must be a list, whose items are mappings or the word 'default'")
    for route in value:
        if isinstance(route, str) and route != "default":
            raise ValueError(f"a route is a mapping or the word 'default', and '{route}' is neither")
    return tuple(adam_route() if route == "default" else route for route in value)


_RouteInput = Literal["default"] | tuple[Route | Literal["default"], ...]


class Recipe(UpdateRule):
    """The whole declaration of an optimizer: its routes, its settings, and the update of parameters that no route
    matches.
    """

    model_config = ConfigDict(json_schema_extra=with_base)
    loader_fields: ClassVar[tuple[str, ...]] = ("base", "set")
    elsewhere: ClassVar[Mapping[str, str]] = ELSEWHERE | dict.fromkeys(
        loader_fields, "only a mapping or a file may have it, as in load_recipe({'base': 'soap', 'set': {...}})"
    )
    name: str | None = Field(default=None, description="name of the recipe in reports")
    about: str | None = Field(default=None, description="paper and equations that the recipe follows")
    lr: float = Field(
        default=1e-3,
        ge=0,
        description="learning rate, unless `compose` or a param group gives one; it multiplies the update",
    )
    width_scaling: WidthScalingField = Field(
        default=None,
        validate_default=False,
        description="factors on updates by role and shape, with which one learning rate fits models of other widths; "
        "none: no factors",
    )
    weight_decay: WeightDecay = Field(default=Decoupled(), description="rule and rate of the decay of parameters")
    routes: Annotated[tuple[Route, ...], BeforeValidator(_routes, json_schema_input_type=_RouteInput)] = Field(
        default=(), description="rules in order, the first match wins; `default` stands for the Adam route"
    )
    averaging: Averaging | None = Field(
        default=None,
        description="rule that keeps further iterates beside the parameters, and chooses the evaluated one; none: no "
        "averaging",
    )
    total_steps: int | None = Field(
        default=None,
        ge=1,
        description="number of steps of the whole run; required by schedules with `fraction` and by stages that "
        "depend on the fraction of the run; training of a task sets it; none: unknown",
    )
    published_steps: int | None = Field(
        default=None,
        ge=1,
        description="number of steps of the published run, which takes the place of `total_steps` if the length of the "
        "run is unknown; none: the recipe has no such run",
    )
    storage: Annotated[dict[str, Quantizer], WithJsonSchema(_STORAGE)] = Field(
        default={}, description="how slots are stored: by role (statistic, root), stage path or stage path/slot"
    )
    expect: dict[str, ExpectationText] = Field(
        default={},
        description="bounds on the parameters that reach a stage (path, name or kind) or a route, such as '>= 90% of "
        "parameters'",
    )
    sam: SharpnessAware | None = Field(
        default=None,
        description="gradients at a point near the parameters instead of at them; steps need a closure; none: off",
    )
    line_search: LineSearch | None = Field(
        default=None, description="shorten each step until the loss falls enough; steps need a closure; none: off"
    )
    graph: bool = Field(
        default=False,
        description="capture steps in CUDA graphs and replay them; the first replay of a graph is checked against a "
        "step without the graph",
    )
    failure: Failure = Field(
        default=Failure(), description="treatment of gradients that are not finite, of roots that fail, and of spikes"
    )
    distribution: Distribution = Field(
        default=Distribution(),
        validate_default=False,
        description="division of the work over ranks, which does not change results",
    )

    @model_validator(mode="after")
    def _routes_differ(self) -> Self:
        names = [route.name for route in self.routes]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"routes need distinct names, got '{twice[0]}' twice")
        return self

    @model_validator(mode="after")
    def _storage_has_slots(self) -> Self:
        rules, stages = self.rules().values(), [p for at, rule in self.rules().items() for p, _ in rule.stages(at)]
        for key, quantizer in self.storage.items():
            stage = StateKey.parse(key).stage or key
            if key in get_args(Role):
                require_coded_role(key, quantizer, (role for rule in rules for role in rule.storable_roles()))
            elif stage not in stages:
                hint = did_you_mean(stage, [*get_args(Role), *stages])
                raise ValueError(
                    f"storage: '{key}' is neither a role nor the path of a stage or slot (path/slot){hint}"
                )
        return self

    @model_validator(mode="after")
    def _options_fit(self) -> Self:
        for key in self.expect:
            expected_rules(key, self.rules())
        if self.line_search is not None:
            constrained = any(update.constraints for update in self.rules().values())
            self.line_search.require_line(
                {"sam": self.sam is not None, "averaging": self.averaging is not None, "constraints": constrained}
            )
        moved = next((key for key, quantizer in self.storage.items() if quantizer.location is not None), None)
        if self.graph and moved is not None:
            raise ValueError(
                f"graph cannot be combined with storage.{moved}, because a graph needs state at fixed addresses and "
                "these slots get new addresses in each step; remove one of the two"
            )
        for path, cadence in chain.from_iterable(rule.cadences(at).items() for at, rule in self.rules().items()):
            if self.graph and cadence.postponed:
                raise ValueError(
                    f"graph: true cannot be combined with the `delay: {cadence.postponed}` of {path}, because another "
                    "thread must not use the device while a graph is captured; remove one of the two"
                )
        if (spike := self.failure.spike) is not None:
            conflicts = {
                "line_search": (self.line_search is not None, "which chooses the step by its losses"),
                "graph": (self.graph and spike.then == "scale", "which reads the learning rate from the host"),
                "distribution.overlap_backward": (
                    self.distribution.overlap_backward and spike.then == "clip",
                    "which sends gradients before their norm is known",
                ),
            }
            for name, (holds, why) in conflicts.items():
                if holds:
                    raise ValueError(
                        f"failure.spike (then: {spike.then}) cannot be combined with {name}, {why}; remove one"
                    )
        return self

    def route(self, info: ParamInfo) -> tuple[str, str]:
        """Return (path of the update rule, reason) for a parameter.

        The path is "routes.<name>" for the first route that matches, and "" for the recipe's own rule.
        """
        for route in self.routes:
            if (reason := route.match.reason(info)) is not None:
                return f"routes.{route.name}", reason
        return "", f"{info.why}, no route matches"

    def view_of(self, info: ParamInfo) -> ViewChoice:
        """Return the axes of a parameter that its update rule treats as matrices.

        Raises:
            ValueError: the view does not fit the shape, or a stage needs matrices and the view cannot tell which axes
                form them.
        """
        rule = self.rules()[self.route(info)[0]]
        needs = next((path for path, stage in rule.stages() if stage.cached_traits().matrices), None)
        choice = ViewChoice(ONE_TENSOR) if rule.entrywise() else rule.view.of(info.shape, info.facts)
        return choice.required_by(needs, info.shape)

    def width_factors(self, info: ParamInfo) -> tuple[float, ...]:
        """Return the factors by which `width_scaling` multiplies the directions of each matrix of a parameter.

        With these factors one learning rate is suitable for all widths of a model. Return () without `width_scaling`.

        Raises:
            ValueError: a factor would have no effect, or the factor of a matrix is not known.
        """
        if self.width_scaling is None or 0 in info.shape:
            return ()
        path = self.route(info)[0]
        rule = self.rules()[path]
        if rule.after_decay:
            raise ValueError(
                f"{dotted(path, 'after_decay')}: cannot be combined with width_scaling, because its stages may change "
                "the size of an update after width_scaling has set it; remove one of the two"
            )
        for constraint in rule.constraints:
            if constraint.sets_length():
                raise ValueError(
                    f"{constraint.path_in(path)}: cannot be combined with width_scaling, because the constraint sets "
                    "the length of every update; remove one of the two"
                )
        matrices = self.view_of(info).matrices
        # The factors depend on the fan-in of matrices. For an entry-wise update `view_of` returns the undivided tensor,
        # so the matrices are computed here. The matrices of a convolution follow from its module.
        if rule.entrywise():
            convolution = info.facts.convolution is not None and isinstance(rule.view, Batches)
            matrices = (Modules(heads=False) if convolution else rule.view).of(info.shape, info.facts).matrices
        shapes = list(matrices.each(info.shape)) if info.shape else [()]
        update = dotted(path, "update")
        found = {m: self.width_scaling.factor(rule.update, info.role, m, update) for m in dict.fromkeys(shapes)}
        return tuple(found[shape] for shape in shapes)

    def reached(self, infos: Iterable[ParamInfo]) -> list[Reached]:
        """Return how much of a model reaches each stage or route for which `expect` has a bound.

        infos: descriptions of all parameters of the model.
        """
        return reached(self.expect, self.rules(), [(info, *self.route(info)) for info in infos] if self.expect else [])

    def needs_total_steps(self) -> str | None:
        """Return the path of the first field or stage that depends on the length of the run, `total_steps`.

        Examples are a schedule by `fraction` and a stage with the signal "step_fraction". Return None if no part of the
        recipe depends on the length of the run.
        """
        fractions = (path for path, schedule in schedules(self) if any(segment.fraction for segment in schedule))
        found = asking(pair for where, rule in self.rules().items() for pair in rule.stages(where))
        return next(fractions, found.get("step_fraction"))

    def lacks_total_steps(self) -> str | None:
        """Return the result of `needs_total_steps` if the recipe has no `total_steps`. Return None if it has one."""
        return self.needs_total_steps() if self.total_steps is None else None

    def for_run(self, steps: int) -> Recipe:
        """Return the recipe for a run of `steps` steps: with `total_steps` if it depends on the length of the run.

        Raises ValueError if `steps` is no positive integer.
        """
        given: object = plain(steps)
        if type(given) is not int or given < 1:
            raise ValueError(f"steps: a positive integer is required, the number of steps of the run, got {given!r}")
        return self.replace(total_steps=given) if self.lacks_total_steps() else self

    def for_unknown_run(self) -> Recipe:
        """Return the recipe for a run of unknown length: `published_steps` is its `total_steps` if it needs one."""
        if self.published_steps is None or self.lacks_total_steps() is None:
            return self
        return self.replace(total_steps=self.published_steps)

    def rules(self) -> dict[str, Recipe | Route]:
        """Return the update rules by path: that of the recipe itself under "", and those of its `routes` under
        "routes.<name>"."""
        return {"": self, **{f"routes.{route.name}": route for route in self.routes}}

    def decays_in_gradient(self) -> bool:
        """Return True if the weight decay of the recipe or of a route is added to the gradient."""
        rules = [self.weight_decay, *(route.weight_decay for route in self.routes)]
        return any(rule is not None and rule.in_gradient for rule in rules)

    def follows_peak(self) -> str | None:
        """Return the path of a component that depends on the peak of the learning rate, or None."""
        decays = {
            "weight_decay": self.weight_decay,
            **{f"routes.{r.name}.weight_decay": r.weight_decay for r in self.routes},
        }
        relative = [path for path, rule in decays.items() if rule is not None and rule.relative]
        relative += ["averaging"] if self.averaging is not None and self.averaging.follows_peak() else []
        return next(iter(relative), None)

    def to_json(self) -> str:
        """Return the resolved recipe as JSON text with the schema version. `load_recipe` reads it."""
        return json.dumps({"schema": SCHEMA_VERSION, **self.model_dump(mode="json")})

    def to_yaml(self, base: str | None = None) -> str:
        """Return the recipe as YAML text with only the fields that differ from another recipe, or from the defaults.

        `load_recipe` of a file with this text gives an equal recipe.

        Args:
            base: name of the shipped recipe in the text's `base`. None means the shipped recipe with this recipe's
                `name`; if there is no such recipe, the text has no `base`.

        Raises:
            RecipeError: there is no shipped recipe of that name, or ruamel.yaml is not installed.
        """
        loading = import_module(f"{__package__}.loading")  # imported here, because that module imports this one
        return str(loading.write_yaml(loading.short_form(self, base)))


def slot_keys(rule: Recipe | Route, path: str, block: tuple[int, ...]) -> dict[StateKey, Slot]:
    """Return {state key: slot} for the slots of a block. The keys do not have the number of the block.

    rule: the update rule of the block.
    path: path of that rule in the recipe; "" for the recipe itself.
    block: shape of the block.
    """
    if (path, block) not in rule._slots:
        found = {}
        for stages, chain in ((rule.update, "update"), (rule.after_decay, "after_decay")):
            for stage, name, slot in chain_slots(stages, block, dotted(path, chain)):
                found[StateKey(None, stage, name)] = slot
        rule._slots[path, block] = found
    return rule._slots[path, block].copy()


Form = tuple[tuple[int, ...], torch.dtype]
"""Shape and dtype of a state tensor of one block."""


@dataclass(frozen=True)
class StoredSlot:
    """A slot of a block, and how it is stored.

    slot: the declaration of the slot.
    dtype: dtype in which stages read the slot.
    codec: quantizer that encodes the slot. None: the slot is stored as it is.
    location: memory in which the recipe stores the slot between steps. None: the memory of the block's device.
    """

    slot: Slot
    dtype: torch.dtype
    codec: Quantizer | None
    location: Location | None

    def place(self, device: torch.device) -> Location | None:
        """Return the memory in which the slot is stored between steps. None: the memory of the block's device.

        device: device of the block. If its own memory is the location, such as "cpu" for a CPU, the result is None.
        """
        return None if self.location is None else available(self.location, device)

    def forms(self) -> dict[str, Form]:
        """Return shape and dtype of each tensor that stores the slot for one block.

        The keys are names of tensors, as in `StateKey.part`: those of the quantizer, and FORMAT for the hash of the
        storage format. A slot without a quantizer has one tensor, with the key "".
        """
        if self.codec is None:
            return {"": (self.slot.shape, self.dtype)}
        return {**_codes(self.codec, self.slot.shape, self.dtype), FORMAT: ((), torch.int64)}

    def nbytes(self) -> int:
        """Return the bytes of all tensors that store the slot for one block.

        The size of a large quantized slot is extrapolated from a slot with fewer rows.
        """
        shape, numel = self.slot.shape, math.prod(self.slot.shape)
        if self.codec is None:
            return numel * self.dtype.itemsize
        shrunk = (max(1, (1 << 22) * shape[0] // max(numel, 1)), *shape[1:]) if numel > 1 << 22 else shape
        nbytes = sum(math.prod(own) * dtype.itemsize for own, dtype in _codes(self.codec, shrunk, self.dtype).values())
        return nbytes * numel // max(math.prod(shrunk), 1) + torch.int64.itemsize


@lru_cache(maxsize=4096)
def _codes(codec: Quantizer, shape: tuple[int, ...], dtype: torch.dtype) -> Mapping[str, Form]:
    """Return shape and dtype, for one block, of each tensor in which a quantizer stores a slot, by name of the tensor.

    codec: the quantizer.
    shape, dtype: shape and dtype of the slot before quantization.
    """
    codes = codec.encode(torch.zeros((1, *shape), dtype=dtype, device="cpu"))
    return {name: (tuple(code.shape[1:]), code.dtype) for name, code in codes.items()}


def stored_slots(recipe: Recipe, path: str, block: tuple[int, ...], dtype: torch.dtype) -> dict[StateKey, StoredSlot]:
    """Return {state key: storage of the slot} for the slots of a block. The keys do not have the number of the block.

    path: path of the block's update rule in the recipe.
    block: shape of the block.
    dtype: dtype in which the block's update is computed.
    """
    found = {}
    for key, slot in slot_keys(recipe.rules()[path], path, block).items():
        quantizer = choose(recipe.storage, key, slot) if recipe.storage else None
        codec, location = (None, None) if quantizer is None else (quantizer.codec, quantizer.location)
        found[key] = StoredSlot(slot, slot.dtype or dtype, codec, location)
    return found


def block_bytes(recipe: Recipe, path: str, block: tuple[int, ...], dtype: torch.dtype) -> Counter[str]:
    """Return the bytes of a block's state by its location between steps: "" for the device of the block.

    path: path of the block's update rule in the recipe.
    block: shape of the block.
    dtype: dtype in which the block's update is computed.
    """
    found = Counter[str]()
    for stored in stored_slots(recipe, path, block, dtype).values():
        found["" if stored.location is None else stored.location.to] += stored.nbytes()
    return found


def require_slots(recipe: Recipe, blocks: Iterable[tuple[str, tuple[int, ...]]]) -> None:
    """Raise ValueError if a key of `storage` names a slot that its stage does not have for any block.

    Also raise ValueError if a key names a stage, and the quantizer under this key can store no slot of the stage.

    blocks: (path of the update rule, shape) of all blocks.
    """
    if not recipe.storage:
        return
    found = [slot_keys(recipe.rules()[path], path, block) for path, block in blocks]
    slots = {key: slot for own in found for key, slot in own.items()}
    for text, quantizer in recipe.storage.items():
        require_stage_roles(text, quantizer, [slot for own, slot in slots.items() if own.stage == text])
        key = StateKey.parse(text)
        near = sorted(str(slot) for slot in slots if slot.stage == key.stage)
        if near and key not in slots:
            raise ValueError(f"storage: '{text}' is not a slot; the slots of this stage are {', '.join(near)}")
