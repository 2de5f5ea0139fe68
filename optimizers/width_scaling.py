"""Factors for the updates of matrices, from role and shape, so that one learning rate suits models of all widths."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from eigengraft.component import Component
from eigengraft.preconditioners import Stage
from eigengraft.preconditioners.base import chain_bounds

MATRIX_ROLES = ("hidden", "head")
"""Roles of matrices whose outputs are sums over all inputs. An output of any other parameter depends on a single
input."""


class WidthScaling(Component):
    """U <- U f(m, n),  f(m, n) = sqrt(m / n) / s(m, n),  for the update U of a matrix with m outputs and n inputs.

    s(m, n) is the largest spectral norm that a direction of the chain can have. The scaled update then has the spectral
    norm sqrt(m / n), so that outputs of size 1 change by lr in every layer, of any width. This is the spectral
    condition (Yang, Simon & Bernstein 2023, arXiv:2310.17813, Condition 1). If entries of directions have the size 1
    (Adam, SOAP, signs), s = sqrt(m n) and f = 1 / n. After `spectral` (Muon), s = 1 and f = sqrt(m / n). Stages that
    multiply directions by a number (`scale`) have no effect on f U, because s contains the number too. m and n are
    lengths of the full matrix, before it is split into blocks or shards. Each output of an embedding, vector or
    bias depends on a single input: n = 1. Decoupled weight decay is not scaled. With `base_width` b, the factor is
    f(m, n) / f(b, b) for matrices and 1 for all other parameters. Learning rates are then relative to a model of width
    b, in which hidden matrices b x b keep the recipe's learning rate. For Adam this is muP (Yang et al. 2021,
    arXiv:2203.03466, Table 3).
    """

    base_width: int | None = Field(
        default=None,
        ge=1,
        description="width b of the model for which the recipe's learning rate was found; none: the factor is f(m, "
        "n), and lr refers to no width",
    )

    def factor(self, chain: Sequence[Stage], role: str, matrix: tuple[int, ...], path: str = "update") -> float:
        """Return the number by which the update of one matrix of a parameter is multiplied.

        chain: stages of the update.
        role: role of the parameter.
        matrix: shape [m, ...] of the matrix.
        path: path of the chain, for errors.

        Raises:
            ValueError: the spectral norm of the chain's directions is unknown.
        """
        m, n = (matrix[0] if matrix else 1), math.prod(matrix[1:])
        if role == "embedding":
            m, n = n, 1
        elif role not in MATRIX_ROLES:
            m, n = m * n, 1
        if self.base_width is None:
            return _spectral(chain, m, n, path)
        b = self.base_width
        return _spectral(chain, m, n, path) / _spectral(chain, b, b, path) if role in MATRIX_ROLES else 1.0


def _spectral(chain: Sequence[Stage], m: int, n: int, path: str) -> float:
    size, _ = chain_bounds(tuple(chain), (m, n))
    if size is None:
        names = ", ".join(stage.label for stage in chain)
        raise ValueError(
            "width_scaling: needs stages whose directions have a spectral norm that follows from their shape, "
            f"which is not true of all stages of `{path}` ({names}); remove width_scaling, or use the stages of "
            "Adam, SOAP or Muon"
        )
    return math.sqrt(m / n) / size


def _named(value: Any) -> Any:
    return {} if value == "spectral" else value


WidthScalingField = Annotated[
    WidthScaling | None,
    BeforeValidator(_named, json_schema_input_type=WidthScaling | Literal["spectral"] | None),
]
"""The field `width_scaling` of a recipe: the word `spectral`, or a mapping with `base_width`; None for no scaling."""
