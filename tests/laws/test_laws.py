"""Every member of every family has a row in `laws/table.py`, and every stage keeps the laws of `eigengraft.testing`."""

from collections.abc import Mapping
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from eigengraft import Optimizer, RecipeError, Stage
from eigengraft.component import Component, families, validated
from eigengraft.testing.laws import Law, check
from eigengraft.testing.stage_case import StageCase
from eigengraft.testing.stage_laws import STAGE_LAWS, a_declared_moment_is_adams

from ..refusals import refused
from .rows import Row
from .table import TABLE


class Halve(Stage):
    """d / 2, written outside the package: defining it is all it takes."""

    kind: Literal["halve_for_test"] = "halve_for_test"

    def apply(self, state: Any, gradient: Tensor, direction: Tensor, context: Any) -> Tensor:
        return direction / 2


STAGES = (*TABLE["stage"], Row({"kind": "halve_for_test"}, "third party", degree=1, rotates=True))


def unlisted(table: Mapping[str, tuple[Row, ...]], package: str = "eigengraft.") -> list[str]:
    """Members, of all families below the experiments, that no row of the table is about."""
    library = {n: f for n, f in families().items() if not f.__module__.startswith("eigengraft.experiments")}
    return [
        f"{name}.{kind}"
        for name, family in library.items()
        for kind, member in family.members.items()
        if member.__module__.startswith(package) and kind not in {row.kind for row in table.get(name, ())}
    ]


def test_every_member_of_every_family_has_a_row() -> None:
    assert unlisted(TABLE) == []


def test_a_member_without_a_row_is_noticed() -> None:
    assert unlisted(TABLE, package="") != unlisted(TABLE)
    assert "stage.halve_for_test" in unlisted(TABLE, package="")
    assert "cadence.every" in unlisted({**TABLE, "cadence": ()})


@pytest.mark.parametrize("family", TABLE)
def test_every_kind_lists_error_inputs(family: str) -> None:
    assert TABLE[family]
    kinds = {row.kind for row in TABLE[family]}
    assert kinds == {row.kind for row in TABLE[family] if row.faults}


FAULTS = [(family, fault) for family, rows in TABLE.items() for row in rows for fault in row.faults]


@pytest.mark.parametrize(("family", "fault"), FAULTS, ids=[f"{family} {fault.fields}" for family, fault in FAULTS])
def test_wrong_declarations_are_refused_by_name(family: str, fault: Any) -> None:
    with refused(RecipeError, *fault.says):
        validated(families()[family], dict(fault.fields))


@pytest.mark.parametrize(("family", "row"), [(f, r) for f, rows in TABLE.items() for r in rows], ids=str)
def test_a_component_survives_its_own_declaration(family: str, row: Row) -> None:
    made: Component = validated(families()[family], dict(row.make))
    assert validated(families()[family], made.model_dump(mode="json")) == made
    assert made.replace() == made
    with refused(RecipeError, "kind"):
        made.kind = "other"  # type: ignore[attr-defined]


LONG = {
    *("adaptive_rotation", "adaptive_shampoo", "eigenbasis", "eigenfactors", "graft", "jorge", "noise_metric"),
    *("projected", "psgd", "row_gains", "shampoo", "sirf", "split", "trust"),
}
"""Kinds whose laws take a quarter of a second or more."""
FIRST = [row for kind, row in {row.kind: row for row in reversed(STAGES)}.items() if kind not in LONG]
"""The first row of each other kind: the laws of these are quick, those of other modes slow."""

CASES = [(row, row.stage()) for row in STAGES]
"""Each row with its case, which keeps the trajectory that laws compare with."""


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=str(row), marks=() if row in FIRST else pytest.mark.slow) for row, case in CASES],
)
def test_a_stage_keeps_the_laws(case: StageCase) -> None:
    check(case, STAGE_LAWS)


@pytest.mark.parametrize("law", STAGE_LAWS, ids=str)
def test_every_law_of_stages_is_asked_of_many(law: Law[Any]) -> None:
    asked = sum(law.skip(case) is None for _, case in CASES)
    assert asked > (3 if law.check is a_declared_moment_is_adams else 20)


def test_a_third_party_stage_works_from_a_recipe() -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    parameter.grad = torch.full((3,), 4.0)
    Optimizer([parameter], {"update": [{"kind": "halve_for_test"}], "routes": []}, lr=0.5).step()
    assert parameter.tolist() == [0.0, 0.0, 0.0]
