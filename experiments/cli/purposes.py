"""The groups in which `eigengraft list` prints families, stages and recipes.

Members are grouped by purpose. Each group says when one of its members is needed. Recipes are also listed by goals of a
user, such as "least memory".
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple


class Purpose(NamedTuple):
    """One group in a printed list of recipes or components, which are grouped by what they are for.

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
        ("stage", "statistic", "view", "signals"),
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
        (
            *("graft", "sum", "chain", "transform", "split", "projected", "partner_basis", "noise_metric"),
            *("row_gains", "identity"),
        ),
    ),
)
"""Kinds of stages by purpose."""


RECIPE_GROUPS = (
    Purpose(
        "Adam and its variants",
        "to compare with, to fine-tune, and for embeddings, heads and vectors",
        (
            *("adamw", "adam", "adamw_8bit", "adamw_4bit", "adam_mini", "ademamix", "mars", "adopt", "laprop"),
            *("adam_atan2", "grams", "adam_h", "sophia"),
        ),
    ),
    Purpose("Momentum and signs", "with one moment for each weight, or less", ("sgd", "signum", "lion")),
    Purpose(
        "Averaged iterates, learned rates",
        "where the length or the rate of a run is not known",
        ("schedule_free_adamw", "gpa_adamw", "soap_schedule_free", "prodigy"),
    ),
    Purpose(
        "Factored moments and subspaces",
        "where the state of Adam does not fit into memory",
        ("adafactor", "galore", "fira", "apollo", "apollo_mini"),
    ),
    Purpose(
        "SOAP: moments in an eigenbasis",
        "fewest steps, with the memory of two factors for each matrix",
        (
            *("soap_fitted", "soap", "soap_int8", "soap_4bit", "soap_factorized", "adafactor_in_basis", "eshampoo"),
            *("soap_kl", "soap_h", "soap_kl_h", "splus", "cosmos", "aro", "soap_muon", "sinksoap"),
        ),
    ),
    Purpose(
        "Shampoo: roots of factors",
        "as SOAP; in 4 or 8 bits where memory is short",
        (
            *("shampoo", "shampoo_kl", "okls", "foam", "one_sided_shampoo", "caspr", "shampoo_int8", "shampoo_4bit"),
            *("shampoo_4bit_naive", "shampoo_4bit_eigen_only", "shampoo_cq", "shampoo_cq_ef"),
        ),
    ),
    Purpose(
        "Learned factors", "as Shampoo, without decompositions of matrices", ("psgd_kron", "jorge", "sirf", "singd")
    ),
    Purpose(
        "Muon: polar factors",
        "little time and memory, for matrices of hidden layers",
        (
            *("muon", "muon_8bit", "polar_express", "turbo_muon", "mud", "normuon", "adamuon", "muoneq", "muown"),
            *("muon_squared", "muon_h", "bimaxwell_muon", "kmaxwell_muon", "kmaxwell_muon_h", "isomuon", "newton_muon"),
            *("muonclip", "polargrad", "spel", "dion", "dion2", "scion", "modular_norm", "rmnp", "swan"),
        ),
    ),
    Purpose("LoRA", "for pairs of factors", ("lora_rite", "lora_muon")),
    Purpose("Stacks of speedruns", "to reproduce records of modded-nanogpt", ("anvil", "track3", "track3_kfac")),
    Purpose(
        "Other code, step by step",
        "to compare with the optimizers of other packages",
        (
            *("reference/muon", "reference/soap", "reference/distributed_shampoo", "reference/spectral_descent"),
            *("reference/eigenvalue_corrected_shampoo", "reference/distributed_shampoo_jax", "dalle_mini_quantized"),
            "dalle_mini_quantized_but_diagonal",
        ),
    ),
)
"""Shipped recipes by method."""


class RecipeNumbers(NamedTuple):
    """Bytes of state, step times and benchmark scores of a shipped recipe. `steps`, `time`, `rates`, `convolutional`
    and `text` are None if the recipe was not run on the laptop track, a set of small tasks with target losses.

    state: bytes of state per parameter of GPT-2 small in float32, embeddings and vectors included.
    counted: counted milliseconds of the optimizer in a step of GPT-2 small on one H100, a lower bound.
    measured: mean milliseconds of the optimizer in a step of GPT-2 small, measured on `timed_card()`; None: not
        measured.
    steps: profile of steps, a score from 0 to 1 for the steps to the targets (see `profile_score`). It is 1 if the
        recipe needs the fewest steps of all recipes on every task.
    time: profile of time, the same score for the number of steps times the counted time of a step.
    rates: ratio of the largest to the smallest of the learning rates that were best on a task; None also if the target
        of a task was not reached.
    convolutional: steps to the target of the task digits, a convolutional network; None also if it was not reached.
    text: steps to the targets of the tasks python and documentation, small GPTs on text, added; None also if one was
        not reached.
    accumulate: number of micro-batches into which batches were split in the runs on the track; None: they were not
        split.
    """

    state: float
    counted: float
    measured: float | None = None
    steps: float | None = None
    time: float | None = None
    rates: float | None = None
    convolutional: float | None = None
    text: float | None = None
    accumulate: int | None = None


NUMBERS_FILE = Path(__file__).with_name("recipes.json")
"""File with the numbers of all shipped recipes, such as times of steps, and with the name of the GPU on which times
were measured. `python docs/hooks/measured.py` writes it."""


@cache
def recipe_numbers() -> dict[str, RecipeNumbers]:
    """Return the bytes of state, step times and benchmark scores of each shipped recipe (`RecipeNumbers`), by name."""
    return {name: RecipeNumbers(*own) for name, own in _numbers_file()["recipes"].items()}


def timed_card() -> str:
    """Return the name of the card on which times of steps were measured."""
    return str(_numbers_file()["card"])


@cache
def _numbers_file() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(NUMBERS_FILE.read_text(encoding="utf-8"))
    return found


class Goal(NamedTuple):
    """Recipes for one goal.

    title: the goal.
    recipes: pairs (name of a recipe, text with its numbers for this goal), the best first. The text may be "".
    rule: rule by which these recipes were chosen among the recipes that were run on the laptop track.
    """

    title: str
    recipes: tuple[tuple[str, str], ...]
    rule: str


_NEAR_BEST = 0.8
"""Least profile of steps (a score from 0 to 1, the higher the faster) with which a recipe counts as fast. AdamW has
0.40, and the best recipe 0.94."""
_SHOWN = 3
"""Number of recipes that are named for a goal."""


@cache
def goals() -> tuple[Goal, ...]:
    """Return recipes for each goal of a user, such as "least memory", by their measured results on five small tasks.

    These tasks are the laptop track (papers/laptop_track/).

    Recipes whose batches were split into micro-batches on the track are not considered. They work only in training
    loops that make several backward passes in each step.
    """
    measured = {name: own for name, own in recipe_numbers().items() if own.steps is not None}
    run: dict[str, Any] = {name: own for name, own in measured.items() if own.accumulate is None}
    usual = run["adamw"].steps

    def first(title: str, key: Callable[[Any], float], text: str, rule: str, least: float = 0.0) -> Goal:
        found = sorted((key(own), -own.steps, name) for name, own in run.items() if own.steps >= least)
        shown = [(name, text.format(**run[name]._asdict())) for value, _, name in found[:_SHOWN] if value < math.inf]
        return Goal(title, tuple(shown), rule)

    return (
        first(
            "few steps and little time",
            lambda own: -min(own.steps, own.time),
            "steps {steps:.2f}, time {time:.2f}",
            "both profiles are large: recipes are compared by the lower of the two",
        ),
        first("fewest steps", lambda own: -own.steps, "steps {steps:.2f}", "largest profile of steps"),
        first(
            "least time",
            lambda own: -own.time,
            "time {time:.2f}",
            "largest profile of time. The time of a step is computed, not measured: a lower bound for GPT-2 small with "
            "65,536 tokens a step on one H100 SXM",
        ),
        first(
            "few steps and little memory",
            lambda own: own.state,
            "steps {steps:.2f}, {state:.2f} bytes",
            f"fewest bytes of state per parameter with a profile of steps of {_NEAR_BEST:g} or more",
            _NEAR_BEST,
        ),
        first(
            "least memory",
            lambda own: own.state,
            "steps {steps:.2f}, {state:.2f} bytes",
            "fewest bytes of state per parameter with AdamW's profile of steps or more",
            usual,
        ),
        first(
            "little tuning",
            lambda own: own.rates or math.inf,
            "steps {steps:.2f}, factor {rates:.3g}",
            "least factor between the lowest and the highest of the best learning rates of the five tasks, among "
            "recipes that reach all targets; then the profile of steps",
        ),
        first(
            "language models (transformers)",
            lambda own: own.text or math.inf,
            "{text:.0f} steps",
            "fewest steps to the targets of two small tasks, a GPT on Python's sources and one on English, added",
        ),
        first(
            "convolutional networks",
            lambda own: own.convolutional or math.inf,
            "{convolutional:.0f} steps",
            "fewest steps to the target of one small task, handwritten digits, with a profile of steps of "
            f"{_NEAR_BEST:g} or more",
            _NEAR_BEST,
        ),
        Goal(
            "fine-tuning",
            (("adamw", ""), ("adamw_8bit", "a quarter of its state"), ("lora_rite", "LoRA"), ("lora_muon", "LoRA")),
            "not measured: the method that the model was trained with; for LoRA, a method that updates both factors of "
            "an adapter together",
        ),
        Goal(
            "to compare with",
            (("adamw", "steps {steps:.2f}, time {time:.2f}, {state:.2f} bytes".format(**run["adamw"]._asdict())),),
            "profile of steps, profile of time, bytes of state per parameter",
        ),
    )


REST = Purpose("Others", "defined outside of the groups above", ())
"""Group of the members that no purpose names, such as members that imported files define."""


def by_purpose(purposes: Iterable[Purpose], names: Iterable[str]) -> Iterator[tuple[Purpose, list[str]]]:
    """Yield the purposes that have members among `names`, each with these members. Names that are members of no purpose
    come last, with the purpose `REST`.
    """
    left = dict.fromkeys(names)
    for purpose in purposes:
        found = [name for name in purpose.members if name in left]
        if found:
            yield purpose, found
        for name in found:
            del left[name]
    if left:
        yield REST, list(left)
