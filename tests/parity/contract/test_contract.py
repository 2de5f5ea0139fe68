"""The promises of torch's optimizers, asked of torch's own and of ten recipes; every difference is in a table."""

import warnings
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch

from eigengraft import Optimizer, load_recipe

from ...recipes import without_routes
from ...refusals import lacking
from .differences import DIFFERENCES
from .promises import PROMISES, Subject

QUICK = ("adamw", "soap_fitted")
OTHERS = ("sgd", "lion", "adafactor", "muon", "shampoo", "soap_4bit", "psgd_kron", "schedule_free_adamw")
DECLARED = {name: load_recipe(name).model_dump(mode="json", exclude_unset=True) for name in (*QUICK, *OTHERS)}


def named(params: Any) -> bool:
    """Whether matrices among parameters have names, which routes of shipped recipes ask for."""
    entries = [entry for group in params for entry in (group["params"] if isinstance(group, dict) else [group])]
    return all(isinstance(entry, tuple) for entry in entries)


def recipe_subject(name: str) -> Subject:
    def make(params: Any, shipped: bool | None = None, **options: Any) -> Optimizer:
        params = params if isinstance(params, torch.Tensor) else list(params)
        as_shipped = (isinstance(params, torch.Tensor) or named(params)) if shipped is None else shipped
        return Optimizer(params, name if as_shipped else without_routes(DECLARED[name]), **options)

    return Subject(name, make)


def torch_subject(cls: Callable[..., Any]) -> Subject:
    def make(params: Any, shipped: bool | None = None, **options: Any) -> torch.optim.Optimizer:
        return cls(params, **options)  # type: ignore[no-any-return]

    return Subject(cls.__name__, make)


def broken(promise: str, subject: Subject) -> str:
    """What a subject says instead of keeping a promise; "" if it keeps it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        try:
            PROMISES[promise](subject)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return ""


def found(promise: str, names: Iterable[str]) -> dict[str, str]:
    return {name: said for name in names if (said := broken(promise, recipe_subject(name)))}


@pytest.mark.parametrize(
    "names", [pytest.param(QUICK, id="quick"), pytest.param(OTHERS, id="others", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("promise", PROMISES)
def test_promises_are_kept_but_for_the_listed_differences(promise: str, names: tuple[str, ...]) -> None:
    got, listed = found(promise, names), DIFFERENCES.get(promise)
    expected = {name for name in names if listed and (listed.recipes is None or name in listed.recipes)}
    assert {name: said for name, said in got.items() if name not in expected} == {}
    assert expected - set(got) == set(), "the table of differences lists promises that are kept"
    for said in got.values() if listed else ():
        assert lacking(said, *listed.says) == [], said


@pytest.mark.parametrize("cls", [torch.optim.Adam, torch.optim.AdamW])
def test_torch_keeps_every_promise(cls: Callable[..., Any]) -> None:
    assert {promise: said for promise in PROMISES if (said := broken(promise, torch_subject(cls)))} == {}


def test_differences_are_of_promises() -> None:
    assert set(DIFFERENCES) <= set(PROMISES)
    assert all(row.says and row.why for row in DIFFERENCES.values())
