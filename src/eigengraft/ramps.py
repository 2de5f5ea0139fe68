"""Numbers that change during a run: what a field of a component may be instead of a constant."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationError, model_serializer, model_validator

from .component import C, Component, plain
from .errors import stage_name

Shape = Literal["linear", "cosine", "half_life"]


class Ramp(BaseModel):
    """The way of a number from `from` to `to`, as x goes from 0 to 1 in `steps` steps, or in a `fraction` of the run.

    linear:     from + x (to - from)
    cosine:     from + (1 - cos(pi x)) / 2 (to - from)
    half_life:  exp(1 / ((1 - x) / ln from + x / ln to)), the half-life of a decay in (0, 1) goes linearly (AdEMAMix,
                Pagliardini et al. 2024, arXiv:2409.03137, appendix A.1)

    Step t of the run, 1 at the first, has x = t / steps; after the last of several ramps the number stays at its `to`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False, serialize_by_alias=True)
    start: float = Field(alias="from", description="the number at x = 0")
    end: float = Field(alias="to", description="the number at x = 1 and after")
    steps: int | None = Field(default=None, ge=1, description="steps that the way takes")
    fraction: float | None = Field(default=None, gt=0, le=1, description="part of the run's steps that it takes")
    shape: Shape = Field(default="linear", description="how the number goes from one to the other")

    @model_validator(mode="after")
    def _one_length(self) -> Self:
        if (self.steps is None) is (self.fraction is None):
            raise ValueError("either `steps` or `fraction` is required")
        if self.shape == "half_life" and not (0 < self.start < 1 and 0 < self.end < 1):
            raise ValueError("numbers between 0 and 1 have a half_life")
        return self

    def length(self, total_steps: int | None) -> float:
        """Steps that the way takes; total_steps: of the run."""
        if self.steps is not None:
            return float(self.steps)
        assert self.fraction is not None and total_steps is not None
        return self.fraction * total_steps

    def at(self, x: float) -> float:
        """The number at x in [0, 1]."""
        if x in (0, 1):
            return self.end if x else self.start
        if self.shape == "half_life":
            return math.exp(1 / ((1 - x) / math.log(self.start) + x / math.log(self.end)))
        x = (1 - math.cos(math.pi * x)) / 2 if self.shape == "cosine" else x
        return self.start + x * (self.end - self.start)


class Scheduled(float):
    """The present value of a number that changes. Its power with a count of steps, which would be wrong, is refused."""

    def __pow__(self, other: Any, modulo: Any = None) -> Any:
        raise ValueError(
            "a constant is required for b^t, got a number that is scheduled: keep the product of its values in a slot, "
            "as `momentum` does, or declare the field among the class's `constants`"
        )


def read_ramps(value: Any) -> tuple[Ramp, ...] | None:
    """The ramps that a declaration stands for: one, or several after each other; None: it is something else."""
    parts: Sequence[Any] = value if isinstance(value, (list, tuple)) else (value,)
    if not parts or not all(isinstance(part, Ramp) or (isinstance(part, Mapping) and "from" in part) for part in parts):
        return None
    try:
        return tuple(part if isinstance(part, Ramp) else Ramp.model_validate(part) for part in parts)
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        where, message = ".".join(map(str, fault["loc"])), fault["msg"].removeprefix("Value error, ")
        raise ValueError(f"a schedule has from, to, and steps or fraction: {where and where + ': '}{message}") from None


def written(ramps: Sequence[Ramp]) -> Any:
    """The ramps as plain data: a mapping, or a list of them."""
    data = [ramp.model_dump(mode="json", exclude_none=True) for ramp in ramps]
    return data[0] if len(data) == 1 else data


def present(ramps: Sequence[Ramp], step: int, total_steps: int | None) -> Scheduled:
    """The number at a step of the run, 1 at the first."""
    begun = 0.0
    for ramp in ramps:
        length = ramp.length(total_steps)
        if step < begun + length:
            return Scheduled(ramp.at((step - begun) / length))
        begun += length
    return Scheduled(ramps[-1].end)


def extremes(ramps: Sequence[Ramp]) -> list[float]:
    """Numbers between which all values lie."""
    values = [value for ramp in ramps for value in (ramp.start, ramp.end)]
    return [min(values), max(values)]


class Schedulable(Component):
    """A component whose fields of type float may be schedules: mappings {from, to, steps}, or lists of them.

    A field holds its first value, checked against its range at both ends; `at` gives components with present values.
    """

    constants: ClassVar[frozenset[str]] = frozenset()
    """Fields of type float that nothing may change during a run."""
    _ramps: dict[str, tuple[Ramp, ...]] = PrivateAttr(default_factory=dict)

    def scheduled(self, field: str) -> bool:
        """Whether a field changes during the run."""
        private = self.__pydantic_private__  # what `_ramps` looks up the long way, and every step asks
        return private is not None and field in private["_ramps"]

    @model_validator(mode="wrap")
    @classmethod
    def _read_schedules(cls, value: Any, handler: Any) -> Any:
        if not isinstance(value, Mapping) or cls.is_family():
            return handler(value)
        value = plain(value)
        ramps = {name: found for name, given in value.items() if (found := cls._schedule(name, given)) is not None}
        if not ramps:
            return handler(value)
        first = {name: found[0].start for name, found in ramps.items()}
        for name, found in ramps.items():
            for extreme in extremes(found):
                handler({**value, **first, name: extreme})
        made = handler({**value, **first})
        made._ramps = ramps
        return made

    @classmethod
    def _schedule(cls, name: str, given: Any) -> tuple[Ramp, ...] | None:
        """The schedule that is given for a field; None: it is something else, or the field takes none."""
        field = cls.model_fields.get(name)
        if field is None or field.annotation not in (float, float | None):
            return None
        try:
            ramps = read_ramps(given)
        except ValueError as error:
            raise ValueError(f"{name}: {error}, got {given}") from None
        if ramps is None and isinstance(given, Mapping):
            raise ValueError(f"{name}: a number, or a schedule with from, to and steps, is required, got {given}")
        if ramps and name in cls.constants:
            raise ValueError(f"{name}: a constant is required, which nothing changes during a run, got {given}")
        return ramps

    @model_serializer(mode="wrap")
    def _write_schedules(self, handler: Any) -> Any:
        data = handler(self)
        return {**data, **{name: written(ramps) for name, ramps in self._ramps.items()}} if self._ramps else data

    def replace(self, **changes: Any) -> Self:
        """A copy with fields changed, validated as at construction."""
        return super().replace(**{**self._ramps, **changes})


def at(component: C, step: int, total_steps: int | None) -> C:
    """A component whose scheduled numbers, and those of the components inside it, are those of a step of the run.

    step: 1 at the first. total_steps: of the run. The component itself if nothing in it is scheduled.
    """
    fields = {name: getattr(component, name) for name in type(component).model_fields}
    found = {name: _inside(value, step, total_steps) for name, value in fields.items()}
    if isinstance(component, Schedulable):
        found |= {name: present(ramps, step, total_steps) for name, ramps in component._ramps.items()}
    changes = {name: value for name, value in found.items() if value is not fields[name]}
    return component.model_copy(update=changes) if changes else component


def _inside(value: Any, step: int, total_steps: int | None) -> Any:
    if isinstance(value, Component):
        return at(value, step, total_steps)
    if isinstance(value, tuple):
        found = tuple(_inside(one, step, total_steps) for one in value)
        return found if any(new is not old for new, old in zip(found, value, strict=True)) else value
    return value


def schedules(component: Component, path: str = "") -> Iterator[tuple[str, tuple[Ramp, ...]]]:
    """(dotted path, ramps) of every scheduled number of a component and of those inside it."""
    if isinstance(component, Schedulable):
        yield from ((f"{path}{name}", ramps) for name, ramps in component._ramps.items())
    for name, value in component:
        if isinstance(value, Component):
            yield from schedules(value, f"{path}{name}.")
        for one in value if isinstance(value, tuple) else ():
            if isinstance(one, Component):
                yield from schedules(one, f"{path}{name}.{stage_name(one)}.")
