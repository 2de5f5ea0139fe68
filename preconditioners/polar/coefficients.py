"""Coefficients of Newton-Schulz steps, as numbers or by name."""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, Field

from ..roots.inverse.cans import OKLS_SCHEDULE

Triple = tuple[float, float, float]
CoefficientName = Literal["jordan", "you", "polar_express", "cans", "deepseek", "quintic", "cubic"]

_JORDAN = (3.4445, -4.7750, 2.0315)


def _shrunk(triple: Triple, margin: float) -> Triple:
    """The step on X / margin, for polynomials that are fitted to singular values of at most 1 and wrong just above."""
    a, b, c = triple
    return (a / margin, b / margin**3, c / margin**5)


NAMED_COEFFICIENTS: dict[str, tuple[Triple, ...]] = {
    "jordan": (_JORDAN,),
    "you": (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
    "polar_express": (
        _shrunk((8.156554524902461, -22.48329292557795, 15.878769915207462), 1.02),
        (4.042929935166739, -2.808917465908714, 0.5000178451051316),
        (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
        (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
        (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
    ),
    "cans": (_shrunk((*OKLS_SCHEDULE[0], 0.0), 1.01), *((a, b, 0.0) for a, b in OKLS_SCHEDULE[1:])),
    "deepseek": (*[_JORDAN] * 8, (2.0, -1.5, 0.5), (2.0, -1.5, 0.5)),
    "quintic": ((2.0, -1.5, 0.5),),
    "cubic": ((1.5, -0.5, 0.0),),
}
"""Published coefficients by name; the least number of steps is that of the triples, the last one repeats.

jordan: steepest slope at zero (Jordan et al. 2024, Muon). Singular values in [0.01, 1] end in [0.68, 1.13].
you: one triple a step (You Jiacheng 2025, in modded-nanogpt); [0.98, 1.03].
polar_express: minimax for five steps, X / 1.02 in the first (Amsel et al. 2025, arXiv:2505.16932); [0.001, 1] ends in
    [0.86, 1.14].
cans: Chebyshev-optimal cubic steps, X / 1.01 in the first (Grishina et al. 2025, arXiv:2506.10935; Tilde 2026, OKLS).
deepseek: eight steps of `jordan`, two that end them at 1 (DeepSeek-AI 2026, V4).
quintic, cubic: converge to 1 from anywhere in (0, 1], slowly at first; cubic is Newton-Schulz itself.
"""


def _schedule(value: Any) -> Any:
    """A name as it is, if there is one; a single triple as a schedule of one."""
    if isinstance(value, str) and value not in NAMED_COEFFICIENTS:
        raise ValueError(f"triples (a, b, c), or one of the names {', '.join(get_args(CoefficientName))} are required")
    flat = isinstance(value, (list, tuple)) and len(value) == 3 and not isinstance(value[0], (list, tuple))
    value = (value,) if flat else value
    if isinstance(value, (list, tuple)):
        return tuple(tuple(row) if isinstance(row, list) else row for row in value)
    return value


Coefficients = Annotated[
    CoefficientName | Annotated[tuple[Triple, ...], Field(min_length=1)],
    BeforeValidator(_schedule, json_schema_input_type=CoefficientName | Triple | tuple[Triple, ...]),
]
"""Coefficients (a, b, c) of each step, or their name."""


def triples(coefficients: CoefficientName | tuple[Triple, ...], steps: int) -> tuple[Triple, ...]:
    """The triple of each step; the last one repeats."""
    known = NAMED_COEFFICIENTS[coefficients] if isinstance(coefficients, str) else coefficients
    return known[:steps] + known[-1:] * (steps - len(known))


def require_used(coefficients: CoefficientName | tuple[Triple, ...], steps: int) -> None:
    """Raises where a schedule holds more triples than there are steps, so that some would never be used."""
    if isinstance(coefficients, str):
        if len(NAMED_COEFFICIENTS[coefficients]) > steps:
            least = len(NAMED_COEFFICIENTS[coefficients])
            raise ValueError(f"steps: at least {least} are required by the coefficients '{coefficients}', got {steps}")
    elif len(coefficients) > steps:
        raise ValueError(f"coefficients: at most {steps} triples (steps) are required, got {len(coefficients)}")
