"""Families and stages by purpose, each group with a line on when one is needed, and recipes by goal.

`eigengraft list` prints them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple


class Purpose(NamedTuple):
    """One group of a list.

    title: purpose of the members.
    when: situation in which a member is needed.
    members: names of the members, in the order in which they are printed.
    """

    title: str
    when: str
    members: tuple[str, ...]


FAMILIES = (
    Purpose(
        "Whole optimizers",
        "to train, or to begin a recipe of your own with `base`",
        ("goals", "recipes"),
    ),
    Purpose(
        "The update",
        "to change the direction, or which matrices and statistics it is computed from",
        ("stage", "statistic", "view"),
    ),
    Purpose(
        "Roots, bases and polar factors",
        "to make a refresh cheaper, more exact or rarer",
        ("root_solver", "basis_solver", "polar_solver", "eigenvalue_bound", "cadence"),
    ),
    Purpose("Memory", "to store statistics, roots, bases and moments in fewer bits", ("quantizer",)),
    Purpose(
        "The write",
        "to change decay, the norm of parameters, or the iterate that is evaluated",
        ("weight_decay", "constraint", "averaging"),
    ),
    Purpose(
        "Experiments",
        "to add data, a schedule, a search or a log of your own",
        ("task", "equation", "schedule", "parallel", "tuning", "callback"),
    ),
    Purpose("Benches", "to measure parts alone, on matrices of given spectra or on your own", ("bench", "spectrum")),
)
"""Families by purpose. The first group has no families, but two other lists: recipes by goal, and all recipes."""

STAGES = (
    Purpose(
        "Momenta",
        "first in most chains: averages the noise of batches away",
        ("momentum", "heavy_ball", "momentum_mixture", "gradient_difference"),
    ),
    Purpose(
        "Second moments",
        "where entries differ in scale: embeddings, vectors, sparse gradients",
        ("rms", "adafactor", "atan2", "lagged_rms", "diagonal_newton"),
    ),
    Purpose(
        "Kronecker factors",
        "for matrices whose rows or columns are correlated, if memory for a factor of each axis is there",
        ("shampoo", "eigenbasis", "eigenfactors", "adaptive_shampoo", "psgd", "jorge", "sirf"),
    ),
    Purpose(
        "Polar factors and rotations",
        "for matrices of hidden layers, with the memory of a momentum alone",
        ("spectral", "dion", "dion2", "sinkhorn", "adaptive_rotation"),
    ),
    Purpose(
        "Signs and scales",
        "to give updates the same size in every layer, at every width or step",
        ("sign", "gradient_sign", "normalize", "standardize", "center", "scale", "relative_step", "prodigy", "trust"),
    ),
    Purpose(
        "Clips and masks",
        "where single gradients are far too large or disagree",
        ("clip_norm", "clip_running_norm", "clip_rms", "cautious"),
    ),
    Purpose("Decay in a chain", "where later stages should see the decay as part of the direction", ("aligned_decay",)),
    Purpose(
        "Combinators",
        "to combine chains: one's direction with another's size, a subspace and the rest, several at once",
        ("graft", "sum", "chain", "transform", "split", "projected", "partner_basis", "noise_metric", "identity"),
    ),
)
"""Kinds of stages by purpose."""


class Goal(NamedTuple):
    """Recipes for one goal.

    title: the goal.
    recipes: (name, measured numbers) of the recipes that are named, the best first.
    rule: rule by which they were chosen among the recipes that were run on the laptop track.
    """

    title: str
    recipes: tuple[tuple[str, str], ...]
    rule: str


GOALS = (
    Goal(
        "few steps and little time",
        (("bimaxwell_muon", "0.86, 0.88"), ("muown", "0.86, 0.89"), ("soap_int8", "0.88, 0.86")),
        "both profiles are large: the lower one of steps and time is compared",
    ),
    Goal(
        "fewest steps",
        (("sinksoap", "0.95"), ("reference/distributed_shampoo", "0.94"), ("okls", "0.93")),
        "largest profile of steps",
    ),
    Goal(
        "least time",
        (("muown", "0.89"), ("bimaxwell_muon", "0.88"), ("turbo_muon", "0.88")),
        "largest profile of time, counted for GPT-2 small with 65,536 tokens a step on one H100 SXM",
    ),
    Goal(
        "few steps and little memory",
        (("muon_8bit", "0.84, 1.00 bytes"), ("polar_express", "0.85, 4.00 bytes"), ("turbo_muon", "0.85, 4.00 bytes")),
        "fewest bytes of state per parameter with a profile of steps of 0.8 or more",
    ),
    Goal(
        "least memory",
        (("swan", "0.61, 0.00 bytes"), ("adafactor", "0.57, 0.01 bytes"), ("apollo_mini", "0.40, 0.01 bytes")),
        "fewest bytes of state per parameter with AdamW's profile of steps or more",
    ),
    Goal(
        "no tuning",
        (("polar_express", "0.85, factor 2"), ("shampoo_kl", "0.84, factor 2"), ("eshampoo", "0.72, factor 2")),
        "least factor between the best learning rates of the tasks, all targets reached; then the profile of steps",
    ),
    Goal(
        "fine-tuning",
        (("adamw", ""), ("lora_rite", "LoRA"), ("lora_muon", "LoRA")),
        "not measured: the method that the model was trained with, or one for pairs of factors",
    ),
    Goal(
        "to compare with",
        (("adamw", "0.40, 0.48, 8.00 bytes"),),
        "profile of steps, profile of time, bytes of state per parameter",
    ),
)
"""Recipes by goal. A test compares them with the entries of the laptop track in papers/."""

REST = Purpose("Others", "defined outside of the groups above", ())
"""Group of the members that no purpose names, such as members that imported files define."""


def by_purpose(purposes: Iterable[Purpose], names: Iterable[str]) -> Iterator[tuple[Purpose, list[str]]]:
    """Yield the purposes that have members among `names`, each with these members. Names without purpose come last."""
    left = dict.fromkeys(names)
    for purpose in purposes:
        found = [name for name in purpose.members if name in left]
        if found:
            yield purpose, found
        for name in found:
            del left[name]
    if left:
        yield REST, list(left)
