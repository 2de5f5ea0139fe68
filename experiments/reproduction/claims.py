"""What a paper claims, as data: which cells of a study are compared, and what their difference is required to be."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from eigengraft.component import Component, validated
from eigengraft.errors import RecipeError
from eigengraft.optimizers.recipe.loading import read_yaml

from ..studies.axes import Label, Where, as_label, read_where, require_known
from ..studies.study import Study, load_study

Verdict = Literal["holds", "fails", "undecided"]

ClaimMetric = Literal[
    "val_loss",
    "val_accuracy",
    "train_loss",
    "steps_to_loss",
    "fitted_steps",
    "state_bytes_per_parameter",
    "optimizer_ms",
]

CLAIMS = "claims.yaml"


class CellPair(Component):
    """Cells, and for each of them the cell it is compared with, which has other labels on the axes named.

    of: the cells that are measured.
    than: the labels that the cells compared with have instead.
    """

    of: Where = Field(min_length=1, description="axis -> label or list of labels; axes not named: all labels")
    than: dict[str, str] = Field(min_length=1, description="axis -> label of the cells compared with")

    @field_validator("of", mode="before", json_schema_input_type=dict[str, Label | list[Label]])
    @classmethod
    def _lists(cls, of: Any) -> Any:
        return read_where(of)

    @field_validator("than", mode="before", json_schema_input_type=dict[str, Label])
    @classmethod
    def _labels(cls, than: Any) -> Any:
        return {axis: as_label(v) for axis, v in than.items()} if isinstance(than, Mapping) else than

    def require_axes(self, study: Study, where: str) -> None:
        """Raise ValueError where an axis or a label is named that the study does not have."""
        wanted = [("of", axis, label) for axis, some in self.of.items() for label in some]
        for side, axis, label in [*wanted, *(("than", *one) for one in self.than.items())]:
            require_known(f"{where}.{side}", axis, study.axes)
            require_known(f"{where}.{side}.{axis}", label, study.axes[axis])


class PaperClaim(CellPair):
    """One claim: the measured difference or ratio of cells, seed by seed, lies from `least` to `most`.

    Where `of` means several cells, a seed's value is the mean over them. `beside` is another pair, whose difference is
    subtracted, or by whose ratio is divided. `steps_to_loss` is the step at which a run first reaches the loss that its
    partner ends with, as a ratio to the partner's steps. `fitted_steps` is the ratio of steps to an equal loss from
    cells that differ in their steps, by fits over these lengths: see `fitted_steps_ratio`.
    """

    says: str = Field(min_length=1, description="what the paper says, in one sentence")
    source: str = Field(min_length=1, description="section, table or figure")
    published: str = Field("", description="the number that the paper gives, with its unit, where there is one")
    study: str = Field("study", description="study file of the folder, without .yaml")
    metric: ClaimMetric = Field("val_loss", description="what is compared")
    compare: Literal["difference", "ratio"] = Field("difference", description="of the metric in `of` to that in `than`")
    beside: CellPair | None = Field(None, description="cells whose difference or ratio is taken off")
    least: float | None = Field(None, description="lower end of what is required, in the metric's unit; none: no end")
    most: float | None = Field(None, description="upper end of what is required; none: no end")
    expected: Verdict = Field("holds", description="the verdict that the folder's page reports")

    @model_validator(mode="after")
    def _interval(self) -> Self:
        low, high = self.required
        if (self.least is None and self.most is None) or low >= high:
            raise ValueError(f"least, most: an interval with an end is required, got {self.least} to {self.most}")
        if self.compare == "ratio" and high <= 0:
            raise ValueError(f"most: a positive end is required of a ratio, got {self.most}")
        if self.metric in ("steps_to_loss", "fitted_steps") and self.compare == "difference":
            raise ValueError(f"compare: 'ratio' is required with metric '{self.metric}', got 'difference'")
        return self

    @property
    def required(self) -> tuple[float, float]:
        """The interval in which the true value is required to lie."""
        return -math.inf if self.least is None else self.least, math.inf if self.most is None else self.most


class PaperClaims(Component):
    """The claims of a folder of papers/, by name, and where runs of older studies lie."""

    paper: str = Field(min_length=1, description="authors, year, title and number of the paper")
    claims: dict[str, PaperClaim] = Field(min_length=1, description="claims by name")
    measured: dict[str, str] = Field(
        default={}, description="study -> file of the folder with its runs, read where results/STUDY.json is not there"
    )

    @property
    def studies(self) -> list[str]:
        """The studies that claims are about, each once."""
        return list(dict.fromkeys(claim.study for claim in self.claims.values()))


def load_claims(folder: Path) -> PaperClaims:
    """The claims of a folder. Raises RecipeError naming the file and what is wrong."""
    path = folder / CLAIMS
    if not path.is_file():
        raise RecipeError(f"reproduce: a folder with {CLAIMS} is required, got '{folder}'")
    try:
        claims = validated(PaperClaims, read_yaml(path))
    except RecipeError as error:
        raise RecipeError(f"{path} does not describe claims:\n{error}") from error
    studies = {name: load_study(folder / f"{name}.yaml") for name in claims.studies}
    for name, claim in claims.claims.items():
        for where, pair in ((f"claims.{name}", claim), (f"claims.{name}.beside", claim.beside)):
            if pair is not None:
                pair.require_axes(studies[claim.study], f"{path}: {where}")
    return claims
