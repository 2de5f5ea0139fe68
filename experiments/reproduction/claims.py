"""Claims of a paper as data: which cells of a study are compared, and in which interval their difference must be."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

from eigengraft.component import Component, validated
from eigengraft.errors import RecipeError
from eigengraft.optimizers.recipe.loading import read_yaml

from ..studies.axes import Labels, Where, require_known
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
    """Cells of a study to measure, and their partners with which they are compared.

    The partner of a cell has the labels of the cell, except those that `than` replaces.
    """

    of: Where = Field(min_length=1, description="axis -> label or list of labels; axes not named: all labels")
    than: Labels = Field(min_length=1, description="axis -> label of the cells that these are compared with")

    def require_axes(self, study: Study, where: str) -> None:
        """Raise ValueError if `of` or `than` names an axis or a label that the study does not have."""
        wanted = [("of", axis, label) for axis, some in self.of.items() for label in some]
        for side, axis, label in [*wanted, *(("than", *one) for one in self.than.items())]:
            require_known(f"{where}.{side}", axis, study.axes)
            require_known(f"{where}.{side}.{axis}", label, study.axes[axis])


class PaperClaim(CellPair):
    """One claim: the measured difference or ratio of cells, seed by seed, is between `least` and `most`.

    If `of` selects several cells, the value of a seed is the mean over these cells. If `beside` is given, the
    difference of this second pair of cells is subtracted, or the ratio is divided by that of the second pair. For
    `steps_to_loss`, the value is the step at which a run first reaches the final loss of its partner, divided by the
    steps of the partner. For `fitted_steps`, the value is the ratio of steps to an equal loss (`fitted_steps_ratio`).
    """

    says: str = Field(min_length=1, description="claim of the paper in one sentence")
    source: str = Field(min_length=1, description="section, table or figure")
    published: str = Field("", description="number that the paper gives, with its unit; empty: it gives none")
    study: str = Field("study", description="study file of the folder, without .yaml")
    metric: ClaimMetric = Field("val_loss", description="metric of the comparison")
    compare: Literal["difference", "ratio"] = Field(
        "difference", description="comparison of the metric in `of` with that in `than`"
    )
    beside: CellPair | None = Field(
        None, description="second pair of cells, whose difference is subtracted or ratio divided by"
    )
    least: float | None = Field(
        None, description="lower end of the required interval, in the unit of the metric; none: no lower end"
    )
    most: float | None = Field(None, description="upper end of the required interval; none: no upper end")
    expected: Verdict = Field("holds", description="the verdict that the folder's page reports")

    @model_validator(mode="after")
    def _interval(self) -> Self:
        low, high = self.required
        if (self.least is None and self.most is None) or low >= high:
            raise ValueError(
                f"least, most: one or both ends of an interval are required, with least < most, got {self.least} to "
                f"{self.most}"
            )
        if self.compare == "ratio" and high <= 0:
            raise ValueError(f"most: must be positive for a ratio, got {self.most}")
        if self.metric in ("steps_to_loss", "fitted_steps") and self.compare == "difference":
            raise ValueError(
                f"compare: 'difference' cannot be combined with metric '{self.metric}', a ratio of steps; use 'ratio'"
            )
        return self

    @property
    def required(self) -> tuple[float, float]:
        """Interval in which the true value must be for the claim to hold."""
        return -math.inf if self.least is None else self.least, math.inf if self.most is None else self.most


class PaperClaims(Component):
    """The claims of a folder of papers/."""

    paper: str = Field(min_length=1, description="authors, year, title and number of the paper")
    claims: dict[str, PaperClaim] = Field(min_length=1, description="claims by name")
    measured: dict[str, str] = Field(
        default={}, description="study -> file of the folder with its runs, used if results/STUDY.json does not exist"
    )

    @property
    def studies(self) -> list[str]:
        """Names of the studies that claims refer to, each once."""
        return list(dict.fromkeys(claim.study for claim in self.claims.values()))


def load_claims(folder: Path) -> PaperClaims:
    """Return the claims of a folder. Raises RecipeError with the file and the fault."""
    path = folder / CLAIMS
    if not path.is_file():
        raise RecipeError(f"reproduce: the folder '{folder}' has no {CLAIMS}; give a folder such as papers/soap_2024")
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
