"""Schedules: values of a field that change over a run. A field of type float of a component may hold one.

A schedule is one segment, or several in a row. The learning rate and the weight decay cannot have such a schedule,
because they are in the optimizer's `param_groups`, where torch's schedulers change them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationError, model_serializer, model_validator

from .component import PLAIN_TYPES, C, Component, components_in, plain
from .slots import dotted

Shape = Literal["linear", "cosine", "half_life"]


class Segment(BaseModel):
    """A number that changes from `from` to `to`, as x goes from 0 to 1 in `steps` steps, or in a `fraction` of the run.

    linear:     from + x (to - from)
    cosine:     from + (1 - cos(pi x)) / 2 (to - from)
    half_life:  exp(1 / ((1 - x) / ln from + x / ln to)), with which the half-life of a decay in (0, 1) is linear in x
                (AdEMAMix, Pagliardini et al. 2024, arXiv:2409.03137, appendix A.1)

    Step t = 1, 2, ... of the run has x = t / steps. After the last segment of a schedule the number keeps its last
    value, `to`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False, serialize_by_alias=True)
    start: float = Field(alias="from", description="the number at x = 0")
    end: float = Field(alias="to", description="the number at x = 1 and after")
    steps: int | None = Field(
        default=None, ge=1, description="length of the segment in steps; none: `fraction` gives it"
    )
    fraction: float | None = Field(
        default=None, gt=0, le=1, description="length of the segment as a fraction of the run; none: `steps` gives it"
    )
    shape: Shape = Field(default="linear", description="shape of the change from `from` to `to`")

    @model_validator(mode="after")
    def _one_length(self) -> Self:
        if (self.steps is None) is (self.fraction is None):
            raise ValueError("exactly one of `steps` and `fraction` is required")
        if self.shape == "half_life" and not (0 < self.start < 1 and 0 < self.end < 1):
            raise ValueError(
                f"`from` and `to` must be between 0 and 1 for the shape half_life, got {self.start:g} and {self.end:g}"
            )
        return self

    def length(self, total_steps: int | None) -> float:
        """Return the length of the segment in steps.

        total_steps: length of the run in steps. It may be None for a segment that has `steps`.
        """
        if self.steps is not None:
            return float(self.steps)
        assert self.fraction is not None and total_steps is not None
        return self.fraction * total_steps

    def at(self, x: float) -> float:
        """Return the value of this segment.

        x: fraction of the segment that has passed, in [0, 1].
        """
        if x in (0, 1):
            return self.end if x else self.start
        if self.shape == "half_life":
            return math.exp(1 / ((1 - x) / math.log(self.start) + x / math.log(self.end)))
        x = (1 - math.cos(math.pi * x)) / 2 if self.shape == "cosine" else x
        return self.start + x * (self.end - self.start)


Schedule = tuple[Segment, ...]
"""The segments of a schedule, one after the other; at least one."""
NO_POWER = (
    "b^t is the product of t equal factors, but b is scheduled and changes from step to step: keep the product of its "
    "values in a slot, as `momentum` does, or declare the field among the class's `constants`"
)
"""Message of the error that is raised when code computes a power of a scheduled value (`Scheduled`)."""


class Scheduled(float):
    """The value of a scheduled field at one step, as a float.

    Taking a power of it raises an error. b^t stands for a product of t equal factors, but a scheduled b differs from
    step to step.
    """

    def __pow__(self, other: Any, modulo: Any = None) -> Any:
        raise ValueError(NO_POWER)


def read_schedule(value: Any) -> Schedule | None:
    """Return the schedule that a declaration stands for, or None if the declaration is not a schedule.

    value: a segment, a mapping with the key `from`, or a non-empty list of segments and such mappings.

    Raises ValueError if a mapping with the key `from` is no valid segment.
    """
    parts: Sequence[Any] = value if isinstance(value, (list, tuple)) else (value,)
    if not parts or not all(isinstance(x, Segment) or (isinstance(x, Mapping) and "from" in x) for x in parts):
        return None
    try:
        return tuple(map(Segment.model_validate, parts))
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        where, message = ".".join(map(str, fault["loc"])), fault["msg"].removeprefix("Value error, ")
        message = "unknown field" if fault["type"] == "extra_forbidden" else message
        raise ValueError(
            f"{where and where + ': '}{message}; a schedule needs from, to, and steps or fraction"
        ) from None


def schedule_data(schedule: Schedule) -> Any:
    """Return the schedule as plain data: a mapping for one segment, a list of mappings for several."""
    data = [segment.model_dump(mode="json", exclude_none=True) for segment in schedule]
    return data[0] if len(data) == 1 else data


def value_at(schedule: Schedule, step: int, total_steps: int | None) -> Scheduled:
    """Return the value of a schedule at a step.

    step: number of the step; the first step of the run is 1.
    total_steps: length of the run in steps. It may be None if no segment has a `fraction`.
    """
    begun = 0.0
    for segment in schedule:
        length = segment.length(total_steps)
        if step < begun + length:
            return Scheduled(segment.at((step - begun) / length))
        begun += length
    return Scheduled(schedule[-1].end)


def extremes(schedule: Schedule) -> list[float]:
    """Return the smallest and the largest value of a schedule, as a list of two."""
    values = [value for segment in schedule for value in (segment.start, segment.end)]
    return [min(values), max(values)]


class Schedulable(Component):
    """A component whose fields of type float may be schedules: mappings {from, to, steps}, or lists of them.

    The attribute of such a field is the first value of its schedule. The smallest and the largest value of the schedule
    are checked against the range of the field. `component_at` returns a component with the values of a given step.
    """

    constants: ClassVar[frozenset[str]] = frozenset()
    """Names of the fields of type float that may not be scheduled."""
    _schedules: dict[str, Schedule] = PrivateAttr(default_factory=dict)

    def scheduled(self, field: str) -> bool:
        """Return True if the field has a schedule."""
        private = self.__pydantic_private__  # `self._schedules` does the same by a slower look-up, in every step
        return private is not None and field in private["_schedules"]

    @model_validator(mode="wrap")
    @classmethod
    def _read_schedules(cls, value: Any, handler: Any) -> Any:
        if not isinstance(value, Mapping) or cls.is_family():
            return handler(value)
        value = plain(value)
        found = {
            name: read
            for name, given in value.items()
            if type(given) not in PLAIN_TYPES and (read := cls._schedule(name, given)) is not None
        }
        if not found:
            return handler(value)
        first = {name: schedule[0].start for name, schedule in found.items()}
        for name, schedule in found.items():
            for extreme in extremes(schedule):
                handler({**value, **first, name: extreme})
        made = handler({**value, **first})
        made._schedules = found
        return made

    @classmethod
    def _schedule(cls, name: str, given: Any) -> Schedule | None:
        """Return the schedule that is given for a field, or None if `given` is not a schedule or the field is not of
        type float.

        Raises ValueError for an invalid schedule, and for a schedule of a field that the class lists in `constants`.
        """
        field = cls.model_fields.get(name)
        if field is None or field.annotation not in (float, float | None):
            return None
        try:
            schedule = read_schedule(given)
        except ValueError as error:
            raise ValueError(f"{name}: {error}" + ("" if ", got " in str(error) else f", got {given}")) from None
        if schedule is None and isinstance(given, Mapping):
            raise ValueError(f"{name}: a number, or a schedule with from, to and steps, is required, got {given}")
        if schedule and name in cls.constants:
            raise ValueError(f"{name}: cannot be scheduled, a constant number is required, got {given}")
        return schedule

    @model_serializer(mode="wrap")
    def _write_schedules(self, handler: Any) -> Any:
        data = handler(self)
        return data | {name: schedule_data(schedule) for name, schedule in self._schedules.items()}

    def replace(self, **changes: Any) -> Self:
        """Return a copy with fields changed, validated as at construction; other fields keep their schedules."""
        return super().replace(**{**self._schedules, **changes})


def component_at(component: C, step: int, total_steps: int | None) -> C:
    """Return the component with the values of its schedules at a step, also in the components inside it.

    A component without schedules is returned as it is.

    step: number of the step; the first step of the run is 1.
    total_steps: length of the run in steps. It may be None if no segment has a `fraction`.
    """
    return with_numbers(component, lambda schedule: value_at(schedule, step, total_steps))


def with_numbers(component: C, number: Callable[[Schedule], Any]) -> C:
    """Return a component with number(schedule) in place of every schedule, also in the components inside it.

    A component without schedules is returned as it is.

    number: function of a schedule, which returns the value that replaces the schedule. It is called once for each
        schedule, in an order that is the same for equal components.
    """
    fields = {name: getattr(component, name) for name in type(component).model_fields}
    found = {name: _inside(value, number) for name, value in fields.items()}
    if isinstance(component, Schedulable):
        found |= {name: number(schedule) for name, schedule in component._schedules.items()}
    changes = {name: value for name, value in found.items() if value is not fields[name]}
    return component.model_copy(update=changes) if changes else component


def _inside(value: Any, number: Callable[[Schedule], Any]) -> Any:
    if isinstance(value, Component):
        return with_numbers(value, number)
    if isinstance(value, tuple):
        found = tuple(_inside(one, number) for one in value)
        return found if any(new is not old for new, old in zip(found, value, strict=True)) else value
    return value


def schedules(component: Component) -> Iterator[tuple[str, Schedule]]:
    """Yield the dotted path and the schedule of every scheduled field of a component and of the components inside it.

    Paths have the form of overrides, as in `components_in`.
    """
    for at, own in components_in(component):
        fields = type(own).model_fields
        if isinstance(own, Schedulable):
            yield from ((dotted(at, fields[name].alias or name), one) for name, one in own._schedules.items())
