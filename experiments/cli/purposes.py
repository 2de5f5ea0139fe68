"""The groups in which `eigengraft list` prints families, stages and recipes.

Members are grouped by purpose. Each group says when one of its members is needed, and `USES` says when to use each
member of the families of parts. Recipes are also listed by goals of a user, such as "least memory".
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple


class Purpose(NamedTuple):
    """One group in a printed list of recipes or components, which are grouped by what they are for.

    title: purpose of the members.
    when: situation in which a member is needed.
    members: names of the members, in the order in which they are printed. A group of stages also has the use of each
        member, as in `USES`.
    """

    title: str
    when: str
    members: tuple[str, ...] | Mapping[str, str]


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
        {
            "momentum": "the usual first stage",
            "heavy_ball": "to match torch.optim.SGD, whose momentum is a sum",
            "momentum_mixture": "where old gradients help: slow means beside a fast one",
            "gradient_difference": "before a momentum, to reduce its variance, as in MARS",
        },
    ),
    Purpose(
        "Second moments",
        "where entries differ in scale: embeddings, vectors, sparse gradients",
        {
            "rms": "the usual second moment, as in Adam",
            "adafactor": "where a full second moment does not fit into memory",
            "atan2": "in place of rms, to have no eps to tune",
            "lagged_rms": "before a momentum, to converge with any decay, as in ADOPT",
            "diagonal_newton": "with curvature from the training loop, as in Sophia",
        },
    ),
    Purpose(
        "Kronecker factors",
        "for matrices whose rows or columns are correlated, if memory for a factor of each axis is there",
        {
            "shampoo": "to whiten matrices by inverse roots of their factors",
            "eigenbasis": "to run Adam or another chain in the factors' eigenbasis, as SOAP",
            "eigenfactors": "as shampoo, for 4-bit storage: the state is eigenvectors and eigenvalues",
            "adaptive_shampoo": "as shampoo, to decompose only factors that changed enough",
            "psgd": "to whiten by learned factors, without decompositions",
            "jorge": "as shampoo, where decompositions are slow: products alone",
            "sirf": "to learn the inverse of a curvature, not its root",
        },
    ),
    Purpose(
        "Polar factors and rotations",
        "for matrices of hidden layers, with the memory of a momentum alone",
        {
            "spectral": "after a momentum, as in Muon",
            "dion": "in place of momentum and spectral, with fewer products: low rank",
            "dion2": "in place of momentum and spectral, with fewer products: some rows",
            "sinkhorn": "to equalize rows and columns without state and without products",
            "adaptive_rotation": "around sign or sinkhorn, to rotate coordinates first, as in ARO",
        },
    ),
    Purpose(
        "Signs and scales",
        "to give updates the same size in every layer, at every width or step",
        {
            "sign": "for entries of one size, as in Signum and Lion",
            "gradient_sign": "after Adam's stages, as in Grams",
            "normalize": "for blocks of one norm",
            "standardize": "for rows of mean 0 and one size, as in SWAN",
            "center": "first, to remove the mean of each row of a gradient",
            "scale": "last, so that one learning rate fits matrices of all shapes",
            "relative_step": "last, for steps relative to parameters, as in torch.optim.Adafactor",
            "prodigy": "around a whole chain, to estimate the learning rate",
            "trust": "to follow a second chain only as far as it agrees",
        },
    ),
    Purpose(
        "Clips and masks",
        "where single gradients are far too large or disagree",
        {
            "clip_norm": "first, to limit gradients by a known norm",
            "clip_running_norm": "to limit directions where no usual norm is known",
            "clip_rms": "after a second moment, to limit updates, as in Adafactor",
            "cautious": "last, to drop entries whose sign differs from the gradient's",
        },
    ),
    Purpose(
        "Decay in a chain",
        "where later stages should see the decay as part of the direction",
        {"aligned_decay": "alone on one path of a sum, or after a slow momentum"},
    ),
    Purpose(
        "Combinators",
        "to combine chains: one's direction with another's size, a subspace and the rest, several at once",
        {
            "graft": "to give one chain's direction the norm of another's",
            "sum": "to add directions of several chains",
            "chain": "to give several stages one name",
            "transform": "to compute moments and statistics from a changed gradient, as in MARS",
            "split": "for leading directions one chain, another for the rest, as in COSMOS",
            "projected": "to keep moments in a subspace, as in GaLore, Fira and APOLLO",
            "partner_basis": "for factors of LoRA, so that their scaling has no effect",
            "noise_metric": "around spectral, with micro-batches whose noise differs between rows or columns",
            "row_gains": "to update the norm and the direction of rows by different chains",
            "identity": "as the magnitude of a graft, to keep a direction's norm",
        },
    ),
)
"""Kinds of stages by purpose, with the use of each kind."""

USES: Mapping[str, Mapping[str, str]] = {
    "stage": {k: use for one in STAGES if isinstance(one.members, Mapping) for k, use in one.members.items()},
    "statistic": {
        "gram": "the default, as in Shampoo and SOAP",
        "bregman": "to fit factors of rows and columns jointly, as in KL-Shampoo",
        "input_gram": "for Newton-Muon and K-FAC, from the inputs of layers",
    },
    "root_solver": {
        "eigh": "the default of shampoo, for every exponent",
        "coupled_minimax": "on a GPU; `by_device` replaces eigh by it",
        "coupled_newton": "to match runs of Distributed Shampoo, in PyTorch or JAX",
        "higher_order": "to match Distributed Shampoo's iterations of higher order",
        "newton_db": "for the exponents 1/2 and 1/4, to match runs of DASH",
        "chebyshev": "for matrices of small condition number, at a cost chosen by `degree`",
        "cans": "for the exponents 1/2 and 1/4, as in OKLS",
        "cholesky": "for the inverse itself, as in Newton-Muon and K-FAC",
    },
    "basis_solver": {
        "power_qr": "the default of eigenbasis: one step from the last basis",
        "cholesky_qr": "on a GPU; `by_device` replaces power_qr by it",
        "eigh": "for exact eigenvectors at every refresh",
        "adaptive_qr": "to work only until a basis is accurate enough",
        "qr_iteration": "to match eigenvalue-corrected Distributed Shampoo",
        "subspace": "for leading eigenvectors alone",
    },
    "polar_solver": {
        "newton_schulz": "the default, products alone",
        "gram_newton_schulz": "for matrices far from square, whose products it makes cheaper",
        "svd": "for exact polar factors",
        "triangular": "to match MUD",
    },
    "cadence": {
        "every": "the default: at fixed intervals, spread over blocks",
        "probability": "to match the random refreshes of PSGD",
    },
    "quantizer": {
        "float32": "to compare with other formats, or for a slot without rounding",
        "bf16": "for half the bytes; slow means need stochastic rounding",
        "split_float": "for three quarters of the bytes, almost without error",
        "int16": "for statistics at half the bytes",
        "int8": "for first moments and bases at a quarter of the bytes",
        "uint8": "for second moments at a quarter of the bytes",
        "codebook8": "for moments at a quarter of the bytes, as in 8-bit Adam",
        "fp8": "for a quarter of the bytes, in floats of 8 bits",
        "int4": "for both moments at an eighth of the bytes",
        "int3": "to compare with int4, whose bytes it has",
        "symmetric": "for statistics and roots: one triangle in place of two",
        "exact_diagonal": "around a format of statistics and roots, for an exact diagonal",
        "cholesky": "for statistics in 4 bits that stay positive semi-definite",
        "eigen": "for statistics in 4 bits with exact eigenvalues",
        "orthogonal": "around a format of bases, to keep them orthogonal",
        "offload": "to keep state in memory of the host or on disk",
    },
    "constraint": {
        "hyperball": "to keep the norm of parameters constant, in place of decay",
        "radius_pin": "so that steps rotate parameters and do not make them longer",
        "radial_brake": "to slow the growth of norms, without fixing them",
        "row_floor": "to move every row by a least share of its norm",
        "late_decay": "for a decay after other constraints, such as radius_pin",
        "polar": "for parameters with orthonormal rows or columns, as in SPEL",
        "qk_clip": "to limit logits of attention, as in MuonClip",
        "rounding": "for parameters in bfloat16, so that small updates are not lost",
    },
    "averaging": {
        "ema": "the usual choice: training does not change",
        "lawa": "as ema, with equal weights for a few copies",
        "schedule_free": "to train without a schedule and without a known end",
        "primal_averaging": "as schedule_free, with means of constant decay",
        "ema_nesterov": "to look ahead along the mean of steps",
        "anchored": "to look ahead of a mean of parameters late in a run",
    },
}
"""For each kind of these families, a clause about when to use it, of at most 12 words."""


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
