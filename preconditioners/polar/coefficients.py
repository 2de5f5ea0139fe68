"""Coefficients of Newton-Schulz steps, as numbers or by the name of a published set."""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, Field

from ..roots.cans import OKLS_SCHEDULE

Triple = tuple[float, float, float]
CoefficientName = Literal["jordan", "you", "polar_express", "polar_express_5", "cans", "deepseek", "quintic", "cubic"]

_JORDAN = (3.4445, -4.7750, 2.0315)


def _shrunk(triple: Triple, margin: float) -> Triple:
    """Return the triple (a, b, c) whose polynomial at X equals that of `triple` at X / margin.

    Rounding may raise singular values of X above 1, but the polynomial was fitted on [0, 1]. The singular values of X /
    margin stay in this interval.
    """
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
        _shrunk((8.28721201814563, -23.595886519098837, 17.300387312530933), 1.01**2),
        _shrunk((4.107059111542203, -2.9478499167379106, 0.5448431082926601), 1.01),
        _shrunk((3.9486908534822946, -2.908902115962949, 0.5518191394370137), 1.01),
        _shrunk((3.3184196573706015, -2.488488024314874, 0.51004894012372), 1.01),
        _shrunk((2.300652019954817, -1.6689039845747493, 0.4188073119525673), 1.01),
        _shrunk((1.891301407787398, -1.2679958271945868, 0.37680408948524835), 1.01),
        _shrunk((1.8750014808534479, -1.2500016453999487, 0.3750001645474248), 1.01),
        (1.875, -1.25, 0.375),
    ),
    "polar_express_5": (
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
"""Published coefficients by name, one triple (a, b, c) for each step.

If there are more steps than triples, the last triple repeats. If there are fewer steps than triples, an error is
raised, except where the list below says otherwise. A step with a margin of 1.01 computes its polynomial at X / 1.01, so
that the singular values that it receives are at most 1, also after rounding errors.

jordan: steepest slope at zero (Jordan et al. 2024, Muon). Five steps map singular values in [0.01, 1] to [0.68, 1.13].
you: one triple for each step (You Jiacheng 2025, in modded-nanogpt). Five steps map singular values in [0.01, 1] to
    [0.98, 1.03].
polar_express: minimax for singular values in [0.001, 1] after any number of steps, so that fewer than the eight triples
    may be used (Amsel et al. 2025, arXiv:2505.16932, Algorithm 1). X is divided by 1.01 first, and the margin of all
    triples except the last is 1.01. Five steps map singular values in [0.001, 1] to [0.84, 1.12], six steps to [0.99,
    1.01], and eight steps to 1.
polar_express_5: minimax for exactly five steps, fitted with margins of 1.02 (modded-nanogpt and microsoft/dion, 2025).
    Five steps map singular values in [0.001, 1] to [0.85, 1.14]. Repeating the last triple would not converge to 1, so
    it is not allowed.
cans: Chebyshev-optimal cubic steps; the margin of the first is 1.01 (Grishina et al. 2025, arXiv:2506.10935; Tilde
    2026, OKLS).
deepseek: eight steps of `jordan`, then two steps that bring singular values to 1 (DeepSeek-AI 2026, V4).
quintic, cubic: converge to 1 from any singular value in (0, 1], slowly for small ones. cubic is the classical
    Newton-Schulz iteration.
"""


def _schedule(value: Any) -> Any:
    """Return coefficients in their validated form.

    A known name is returned unchanged, and a single triple becomes a tuple of one triple. Lists, as YAML has them,
    become tuples.
    """
    if isinstance(value, str) and value in NAMED_COEFFICIENTS:
        return value
    rows = value if isinstance(value, (list, tuple)) else ()
    flat = len(rows) == 3 and not isinstance(rows[0], (list, tuple))
    rows = (rows,) if flat else rows
    if not rows or not all(isinstance(row, (list, tuple)) and len(row) == 3 for row in rows):
        names = ", ".join(get_args(CoefficientName))
        raise ValueError(
            f"a triple (a, b, c), a list of triples, or one of the names {names} is required, got {value!r}"
        )
    return tuple(map(tuple, rows))


Coefficients = Annotated[
    CoefficientName | Annotated[tuple[Triple, ...], Field(min_length=1)],
    BeforeValidator(_schedule, json_schema_input_type=CoefficientName | Triple | tuple[Triple, ...]),
]
"""Coefficients (a, b, c) of each step, or the name of a published set."""


def triples(coefficients: CoefficientName | tuple[Triple, ...], steps: int) -> tuple[Triple, ...]:
    """Return the triple (a, b, c) of each step. If there are more steps than triples, the last triple repeats."""
    known = NAMED_COEFFICIENTS[coefficients] if isinstance(coefficients, str) else coefficients
    return known[:steps] + known[-1:] * (steps - len(known))


def require_used(coefficients: CoefficientName | tuple[Triple, ...], steps: int) -> None:
    """Raise ValueError if a list of coefficients has more triples than `steps`, or if coefficients given by name
    require another number of steps.
    """
    if not isinstance(coefficients, str):
        if len(coefficients) > steps:
            raise ValueError(
                f"coefficients: there must be at most one triple for each step, got {len(coefficients)} triples with "
                f"`steps: {steps}`; raise `steps`, or remove triples"
            )
        return
    count = len(NAMED_COEFFICIENTS[coefficients])
    if coefficients in _ONE_NUMBER_OF_STEPS and steps != count:
        raise ValueError(
            f"steps: '{coefficients}' needs {count} steps, got {steps}; 'polar_express' has coefficients for any number"
        )
    if coefficients not in _ANY_NUMBER_OF_STEPS and steps < count:
        raise ValueError(f"steps: '{coefficients}' needs at least {count} steps, got {steps}; raise `steps`")


_ANY_NUMBER_OF_STEPS = frozenset({"polar_express"})
"""Names of coefficients that may be used with fewer steps than triples: the first k are the best for k steps."""
_ONE_NUMBER_OF_STEPS = frozenset({"polar_express_5"})
"""Names of coefficients that require exactly as many steps as they have triples."""
