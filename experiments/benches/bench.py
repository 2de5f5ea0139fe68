"""One runner for all benches: candidates are measured on problems, and each measurement is a row of one table.

A subclass of `Bench` declares one bench: its candidates, problems, measurement, columns, table, figure and
recommendations. Candidates are components. The declaration of a component is its fields as plain data, such as
{"kind": "eigh", "eps": 1e-8}.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self, TypeVar, final

import torch
from pydantic import BaseModel, BeforeValidator, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from eigengraft.component import Component, validated
from eigengraft.errors import RecipeError
from eigengraft.optimizers.recipe.loading import read_yaml

from ..files import write_text
from ..training.outcome import finite_or_none
from ..training.parallel import DeviceName, local_device
from .view import Panel, Recommendation, Row, Table, recommend

Declaration = Mapping[str, Any]


def defaults(family: type[Component], preferred: Collection[Declaration]) -> tuple[Declaration, ...]:
    """Return the default candidates of a bench as declarations: mappings with the `kind` of a component and its fields.

    First come the declarations in `preferred`. Then come all other kinds of the family whose fields all have defaults,
    each without fields.
    """
    kinds = {declared["kind"] for declared in preferred}
    others = [kind for kind in sorted(family.members) if kind not in kinds and _needs_no_field(family.members[kind])]
    return (*preferred, *({"kind": kind} for kind in others))


def kind_alone(kind: str) -> Declaration:
    """Return the declaration of a component by its kind alone, `{"kind": kind}`, with the defaults of all fields."""
    return {"kind": kind}


def default_members(
    family: type[Component],
    preferred: Collection[Declaration],
    usual: Callable[[str], Declaration] = kind_alone,
    keep: Callable[[Any], bool] = bool,
) -> Callable[[], tuple[Any, ...]]:
    """Return a function without arguments that makes the default candidates of a bench, as a tuple of components.

    family: family of components to which the candidates belong.
    preferred: declarations of the first candidates. All other kinds of the family that need no fields follow.
    usual: function from a kind to a declaration. Every candidate of this kind has the fields of the declaration, unless
        `preferred` sets them.
    keep: function that receives a candidate, and returns False if the candidate is to be left out.
    """

    def make() -> tuple[Any, ...]:
        declared = ({**usual(item["kind"]), **item} for item in defaults(family, preferred))
        return tuple(member for item in declared if keep(member := validated(family, item)))

    return make


def kinds_as(usual: Callable[[str], Declaration]) -> BeforeValidator:
    """Return a pydantic validator of a list of components. It replaces an item that is only a kind by `usual(kind)`.

    usual: function from a kind, such as "eigh", to the declaration of the component that a bench measures.
    """
    return BeforeValidator(
        lambda value: tuple(usual(item) if isinstance(item, str) else item for item in listed(value))
    )


def _needs_no_field(member: type[BaseModel]) -> bool:
    return not any(field.is_required() for field in member.model_fields.values())


def listed(value: Any) -> Any:
    """Return a list or tuple as a tuple, and a single value as a tuple of one. Raise an error for an empty list."""
    if isinstance(value, (list, tuple)) and not value:
        raise PydanticCustomError("empty", "an empty list is given; give at least one item")
    return tuple(value) if isinstance(value, (list, tuple)) else (value,)


def label(component: Component, usual: Callable[[str], Declaration] = kind_alone, always: Collection[str] = ()) -> str:
    """Return the label of a component: `kind field=value ...` with the fields that differ from those of `usual(kind)`.

    Nested components are labeled in the same way.

    usual: function from a kind to the declaration with which components of this kind are compared.
    always: names of fields that are shown even if they do not differ.
    """
    kind = str(getattr(component, "kind"))  # noqa: B009  every member has a kind, the family has none
    try:
        like = type(component).model_validate(dict(usual(kind)))
    except ValidationError:  # `usual(kind)` lacks a required field: compare with the defaults of the fields instead
        like = None
    fields = type(component).model_fields
    own = {name: getattr(component, name) for name in fields if name != "kind"}
    same = {n: fields[n].get_default(call_default_factory=True) if like is None else getattr(like, n) for n in own}
    different = [f"{fields[n].alias or n}={_short(own[n], usual)}" for n in own if n in always or own[n] != same[n]]
    return " ".join([kind, *different])


def _short(value: Any, usual: Callable[[str], Declaration]) -> str:
    if isinstance(value, Component):
        text = label(value, usual)
        return f"({text})" if " " in text else text
    if isinstance(value, (list, tuple)):
        if any(isinstance(item, Component) for item in value):
            return " > ".join(_short(item, usual) for item in value)
        return f"[{len(value)}]" if len(value) > 2 else "[" + ", ".join(_short(item, usual) for item in value) + "]"
    return f"{value:g}" if isinstance(value, float) else str(value)


def parse_shapes(value: Any) -> Any:
    """Return the shapes that a list declares, as a tuple of pairs (m, n).

    An item of the list is `[m, n]`, the text `mxn`, or a number n for the shape (n, n). A single item is accepted in
    place of a list.
    """
    single = isinstance(value, (list, tuple)) and len(value) == 2 and all(isinstance(item, int) for item in value)
    return tuple(_parse_shape(item) for item in ([value] if single else listed(value)))


def _parse_shape(item: Any) -> Any:
    if isinstance(item, int) and not isinstance(item, bool):
        return (item, item)
    if isinstance(item, str):
        numbers = item.split("x")
        if len(numbers) != 2 or not all(number.isdigit() for number in numbers):
            raise PydanticCustomError("shape", "this is not a shape; write 16x64 or [16, 64]")
        return tuple(map(int, numbers))
    return tuple(item) if isinstance(item, list) else item


_Item = TypeVar("_Item")
Listed = Annotated[tuple[_Item, ...], BeforeValidator(listed)]
"""A tuple of one or more items. A single item stands for a tuple of one."""
PositiveInt = Annotated[int, Field(ge=1)]
PositiveInts = Listed[PositiveInt]
MatrixShapes = Annotated[tuple[tuple[PositiveInt, PositiveInt], ...], BeforeValidator(parse_shapes)]
MatrixDtypes = Listed[Literal["float32", "float64"]]


class Column(NamedTuple):
    """The meaning and the unit of one measured number of a row."""

    meaning: str
    unit: str = ""


@dataclass(frozen=True)
class Problem:
    """A problem on which every candidate is measured.

    fields: names and values that each row of this problem contains.
    make: function that computes the object on which candidates are measured, such as a stack of matrices. It returns
        None if the problem cannot be made, and is then left out.
    """

    fields: Mapping[str, Any]
    make: Callable[[], Any]


class Bench(Component, ABC, family="bench"):
    """A bench: the measurement of every candidate on every problem.

    Except for times, the rows of the results depend only on the fields of the bench. If a candidate raises an error on
    a problem, its row has the error in the column `problem`.
    """

    device: DeviceName = Field("cpu", description="cpu, cuda or cuda:N")
    threads: int = Field(1, ge=1, description="CPU threads of torch")
    seed: int = Field(0, ge=0, lt=2**63, description="seed of all random numbers")
    seconds: float = Field(0.03, gt=0, description="least time for timing one candidate on one problem, in seconds")
    candidate_field: ClassVar[str]
    """Name of the bench's field that holds the candidates."""
    columns: ClassVar[Mapping[str, Column]]
    """Meaning and unit of each measured number of a row, by name of the number."""
    quick_fields: ClassVar[Mapping[str, Any]]
    """Values that fields of the bench have in the quick run, which takes seconds."""

    @abstractmethod
    def problems(self) -> Sequence[Problem]:
        """Return the problems (test inputs, such as matrices of one spectrum and size) in the order of measurement."""

    def label(self, candidate: Any) -> str:
        """Return the name of a candidate in tables and figures."""
        return label(candidate)

    def measure(self, candidate: Any, given: Any) -> Iterable[Row]:
        """Measure one candidate on one problem, and yield the measured columns of each row.

        If a field of the problem has the name of a measured column, the row has the measured value. If the candidate
        cannot be measured on this problem, yield the reason as the column `problem`. Every bench overrides this method,
        unless it overrides `cells_of`.

        given: the object that `Problem.make` returned.
        """
        raise NotImplementedError

    @abstractmethod
    def table(self) -> Table:
        """Return the description of the table that is printed: its title, headings and functions that compute cells."""

    @abstractmethod
    def panels(self) -> tuple[Panel, Panel]:
        """Return the descriptions of the two halves of the figure: their axes, and functions that compute lines."""

    @abstractmethod
    def recommendations(self) -> Sequence[Recommendation]:
        """Return the rules by which candidates are recommended for this device."""

    def reference(self, given: Any) -> Iterable[Row]:
        """Return rows of the results that belong to a problem and to no candidate, such as the best possible value.

        given: the object that `Problem.make` returned.
        """
        return ()

    def notes(self, rows: Sequence[Row]) -> list[str]:
        """Return lines that are printed below the recommendations."""
        return []

    @model_validator(mode="after")
    def _distinct(self) -> Self:
        """Raise ValueError if two candidates have the same name, because figures and tables could not distinguish
        them.
        """
        names = [self.label(candidate) for candidate in self.contenders()]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            remedy = "remove one, or give one a field that differs"
            raise ValueError(f"{self.candidate_field}: '{twice[0]}' is a candidate more than once; {remedy}")
        return self

    @final
    def contenders(self) -> tuple[Any, ...]:
        """Return the candidates: the value of the field of this bench that `candidate_field` names."""
        found: tuple[Any, ...] = getattr(self, self.candidate_field)
        return found

    @final
    def run(self) -> list[Row]:
        """Measure every candidate on every problem, and return the rows of the results."""
        return [row for cell in self.cell_by_cell() for row in cell]

    @final
    def cells(self) -> int:
        """Return the number of lists that `cell_by_cell` yields, for a display of progress."""
        own = type(self).cells_of is not Bench.cells_of
        return len(self.problems()) * (1 if own else len(self.contenders()))

    @final
    def cell_by_cell(self) -> Iterator[list[Row]]:
        """Yield the rows of each cell. A cell is one candidate on one problem, or all candidates on one problem if the
        bench measures them together (see `cells_of`).

        The cells are measured with `threads` threads of torch. The default is one, because threads delay each other on
        small matrices.
        """
        threads = torch.get_num_threads()
        torch.set_num_threads(self.threads)
        try:
            for problem in self.problems():
                yield from self.cells_of(problem)
        finally:
            torch.set_num_threads(threads)

    def cells_of(self, problem: Problem) -> Iterator[list[Row]]:
        """Measure each candidate on one problem, and yield the rows of each candidate as a list.

        The first list begins with the rows of the problem that belong to no candidate (`reference`). A bench that
        overrides this method to measure all candidates together yields one list with all rows.
        """
        given = problem.make()
        first = [] if given is None else [self.row(None, problem.fields, **row) for row in self.reference(given)]
        for candidate in self.contenders():
            yield first + ([] if given is None else self._attempt(candidate, problem.fields, given))
            first = []

    def _attempt(self, candidate: Any, fields: Mapping[str, Any], given: Any) -> list[Row]:
        """Measure one candidate on one problem, and return the rows of the results. If the candidate raises an error,
        return one row with the error in the column `problem`.

        fields: names and values that each row of this problem contains.
        given: the object that `Problem.make` returned.
        """
        try:
            return [self.row(candidate, fields, **row) for row in self.measure(candidate, given)]
        except Exception as error:  # a candidate may be any code of a user's
            return [self.row(candidate, fields, problem=first_line(error))]

    @final
    def row(self, candidate: Any, fields: Mapping[str, Any], /, **measured: Any) -> Row:
        """Return a row of the results, a mapping from columns to values.

        The columns are the name of the candidate, its declaration (its fields as plain data), the device, the fields of
        the problem, and the columns in `measured`. The column `problem` is the reason why nothing was measured, or ""
        if the candidate was measured.
        """
        declared: Any = None
        if candidate is not None:
            several = isinstance(candidate, tuple)
            declared = [one.declaration() for one in candidate] if several else candidate.declaration()
            measured = {"candidate": self.label(candidate), **measured}
        return {
            "candidate": "", "declaration": declared, "device": self.device, **fields, "problem": "", **measured
        }  # fmt: skip

    @final
    def advice(self, rows: Sequence[Row]) -> list[str]:
        """Return the lines below the tables: a recommendation for each problem on this device, then notes."""
        return [*recommend(self.recommendations(), rows), *self.notes(rows)]

    @final
    def milliseconds(self, work: Callable[[], Any]) -> float:
        """Return the median milliseconds of a call of the function `work`.

        The first call is not timed. The calls after it are repeated for at least `seconds`, a field of the bench.
        """
        from torch.utils.benchmark import Timer  # imports torch's builder of C++ extensions, which takes seconds

        work()
        timer = Timer("work()", globals={"work": work}, num_threads=self.threads)
        return 1e3 * timer.blocked_autorange(min_run_time=self.seconds).median

    @final
    def target_device(self) -> torch.device:
        """Return the device to measure on. Raise RecipeError if this machine does not have it."""
        return local_device(self.device, 0)


def read_bench(name: str) -> dict[str, Any]:
    """Return the declaration of a bench.

    name: name of a shipped bench, else path of a .yaml or .yml file, else a kind, which then has no other fields.

    Raises RecipeError if the file cannot be read, or contains no mapping with a `kind`.
    """
    shipped = Path(__file__).parent / f"{name}.yaml"
    file = shipped if shipped.is_file() else Path(name)
    if file.suffix not in (".yaml", ".yml"):
        return {"kind": name}
    data = read_yaml(file)
    if not isinstance(data, Mapping) or "kind" not in data:
        raise RecipeError(
            f"{file}: must contain a mapping with the 'kind' of a bench, one of {', '.join(Bench.members)}"
        )
    return dict(data)


def load_bench(kind: str, fields: Mapping[str, Any], quick: bool = False, more: Sequence[Any] = ()) -> Bench:
    """Return a bench.

    kind: name of the bench in its family.
    fields: values of fields of the bench.
    quick: if True, the fields that are not given have the values of the quick run.
    more: further candidates, in addition to those of the bench.
    """
    known = Bench.members.get(kind)
    defaults: Mapping[str, Any] = {}
    if quick and known is not None and issubclass(known, Bench):
        defaults = known.quick_fields
    if fields.get("checkpoint") is not None or fields.get("record") is not None:
        made = getattr(known, "made_fields", ())
        defaults = {name: value for name, value in defaults.items() if name not in made}
    found = validated(Bench, {"kind": kind, **defaults, **fields}, "bench")  # type: ignore[type-abstract]
    if more:
        both = [*found.contenders(), *more]
        found = validated(Bench, {**dict(found), found.candidate_field: both}, "bench")  # type: ignore[type-abstract]
    return found


def write_rows(rows: Iterable[Row], path: Path) -> None:
    """Write one JSON object per line. NaN and infinity, which JSON does not have, become null.

    rows: the rows, as mappings of columns to values.
    path: the file, which is replaced if it exists.
    """
    plain = ({k: finite_or_none(v) if isinstance(v, float) else v for k, v in row.items()} for row in rows)
    write_text(path, "".join(f"{json.dumps(row)}\n" for row in plain))


def first_line(error: Exception) -> str:
    """Return the type and the message of an error in one short line. For an ImportError, return "not installed:" and
    the name of the module instead.
    """
    text = f"{type(error).__name__}: {error}" if not isinstance(error, ImportError) else f"not installed: {error.name}"
    return text.splitlines()[0][:80]
