"""Where optimizers of eigengraft differ from torch's, and why: all there is, read by the test beside it."""

from __future__ import annotations

from typing import NamedTuple


class Difference(NamedTuple):
    """A promise that is not kept.

    says: what is said instead, a regular expression.
    why: why it is not kept.
    recipes: for which recipes; None: all.
    """

    says: str
    why: str
    recipes: frozenset[str] | None = None


DIFFERENCES: dict[str, Difference] = {
    "a parameter twice in a group is said": Difference(
        r"params: each parameter once is required, got parameter 0 again as parameter 1",
        "torch warns that it will be an error, and updates the parameter twice until then",
    ),
    "parameters without names are taken as they are": Difference(
        r"params: names are required, because routes\.adam .* set `routes`",
        "without a name a matrix may be an embedding or a head, which these recipes would send to the wrong update",
        frozenset({"muon", "shampoo", "soap_fitted", "soap_4bit", "psgd_kron"}),
    ),
    "complex parameters are trained": Difference(
        r"hidden\.bias: the parameter is complex, and update\.adafactor ",
        "a stage that takes means over rows and columns would mix real and imaginary parts",
        frozenset({"adafactor"}),
    ),
    "steps can be differentiated": Difference(
        r"Optimizer: differentiable=False is required, got True; no gradient passes through a step",
        "parameters and state are written in place, so that a step needs no memory for a graph",
    ),
    "maximize climbs": Difference(
        r"Optimizer: maximize=False is required, got True; minimize the negative of the loss",
        "line searches, sharpness-aware steps and curvature would have to know too; a sign of the loss tells them all",
    ),
    "groups listed twice are saved twice": Difference(
        r"param_groups: 1 groups are required, got 2; call optimizer\.add_param_group",
        "what is appended to the list of groups is refused before it is trained twice, or not at all",
    ),
    "names to no names resumes": Difference(
        r"AssertionError",
        "the state is loaded, but random numbers follow from names, so that the steps are other ones",
        frozenset({"psgd_kron"}),
    ),
    "no names to names resumes": Difference(
        r"AssertionError",
        "the state is loaded, but random numbers follow from names, so that the steps are other ones",
        frozenset({"psgd_kron"}),
    ),
    "other names are loaded in order": Difference(
        r"state_dict: group 0: parameters are missing: 'wrapped\.hidden\.weight', .*unexpected: 'hidden\.weight'",
        "state by order would go to another parameter where layers have changed places; both lists are in the error",
    ),
    "state is cast to the dtype of parameters": Difference(
        r"state_dict: it does not fit, nothing was loaded:\nhidden\.weight: .*torch\.float64 .* got torch\.float32",
        "a resumed run is the same bit for bit, or refused; state has a dtype of its own, whatever that of parameters",
    ),
}
