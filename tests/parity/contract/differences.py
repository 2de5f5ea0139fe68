"""Where optimizers of eigengraft differ from torch's, and why: all there is, read by the test beside it."""

from __future__ import annotations

from typing import NamedTuple


class Difference(NamedTuple):
    """A promise that is not kept.

    says: path, values and remedy in the error that is raised instead.
    why: why it is not kept.
    recipes: for which recipes; None: all.
    """

    says: tuple[object, ...]
    why: str
    recipes: frozenset[str] | None = None


DIFFERENCES: dict[str, Difference] = {
    "a parameter twice in a group is said": Difference(
        ("params", "parameter 0", "parameter 1"),
        "torch warns that it will be an error, and updates the parameter twice until then",
    ),
    "parameters without names are taken as they are": Difference(
        ("params", "routes.adam", "routes"),
        "without a name a matrix may be an embedding or a head, which these recipes would send to the wrong update",
        frozenset({"muon", "shampoo", "soap_fitted", "soap_4bit", "psgd_kron"}),
    ),
    "complex parameters are trained": Difference(
        ("hidden.bias", "update.adafactor"),
        "a stage that takes means over rows and columns would mix real and imaginary parts",
        frozenset({"adafactor"}),
    ),
    "steps can be differentiated": Difference(
        ("Optimizer", "differentiable", True),
        "parameters and state are written in place, so that a step needs no memory for a graph",
    ),
    "maximize climbs": Difference(
        ("Optimizer", "maximize", True),
        "line searches, sharpness-aware steps and curvature would have to know too; a sign of the loss tells them all",
    ),
    "groups listed twice are saved twice": Difference(
        ("param_groups", 1, 2, "optimizer.add_param_group"),
        "what is appended to the list of groups is refused before it is trained twice, or not at all",
    ),
    "names to no names resumes": Difference(
        ("AssertionError",),
        "the state is loaded, but random numbers follow from names, so that the steps are other ones",
        frozenset({"psgd_kron"}),
    ),
    "no names to names resumes": Difference(
        ("AssertionError",),
        "the state is loaded, but random numbers follow from names, so that the steps are other ones",
        frozenset({"psgd_kron"}),
    ),
    "other names are loaded in order": Difference(
        ("state_dict", "group 0", "'wrapped.hidden.weight'", "'hidden.weight'"),
        "state by order would go to another parameter where layers have changed places; both lists are in the error",
    ),
    "state is cast to the dtype of parameters": Difference(
        ("state_dict", "hidden.weight", "torch.float64", "torch.float32"),
        "a resumed run is the same bit for bit, or refused; state has a dtype of its own, whatever that of parameters",
    ),
}
