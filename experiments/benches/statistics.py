"""A bench that compares the Kronecker product of a statistic's two factors with the second moment of the gradients.

- G `[K, m, n]`: K gradients of one weight matrix.
- vec: stacks the rows of a matrix.
- C `[m n, m n]`: second moment E[vec G vec G^T], the mean over the K gradients.
- L `[m, m]`, R `[n, n]`: the factors of a statistic, its estimates for the two axes of the weight matrix.
- S = L x R `[m n, m n]`: their Kronecker product, with (L x R) vec X = vec(L X R^T). It is the estimate of C.

All these tensors are in float64.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from fractions import Fraction
from functools import partial
from statistics import fmean
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from eigengraft.preconditioners import Eigh, Every, Shampoo, Stage, Statistic, chain_slots, run_chain
from eigengraft.slots import State, StateKey
from eigengraft.step_context import StepContext

from .bench import Column, Declaration, PositiveInts, Problem, default_members, kinds_as, label
from .matrices import GRADIENT_LAYERS, OwnMatrices, layer_gradients, matrix_power, run_gradients
from .view import BenchRows, Panel, Recommendation, Row, Table, cell, finite, milli, only, per, reduction


class StageRunner:
    """A stage with its state for N blocks of one shape, without an optimizer and without parameters."""

    def __init__(self, stage: Stage, block: tuple[int, ...], blocks: int, like: Tensor) -> None:
        tensors = {
            StateKey.join(path, name): slot.allocate(blocks, like.dtype, like.device)
            for path, name, slot in chain_slots((stage,), block)
        }
        self.stage, self.blocks, self.state, self.steps = stage, blocks, State(tensors, block), 0

    def step(self, gradient: Tensor) -> None:
        """Run the stage on one gradient `[N, *block]`."""
        self.steps += 1
        run_chain((self.stage,), self.state, gradient, gradient, self.context(gradient.device))

    def repeat(self, gradient: Tensor, steps: int) -> None:
        """Run the stage on the same gradient for a number of steps."""
        for _ in range(steps):
            self.step(gradient)

    def context(self, device: torch.device) -> StepContext:
        """Return the context that the stage receives: the number of steps and the seed of each block, and lr = 1."""
        rows = np.arange(self.blocks)
        steps = np.full(self.blocks, self.steps)
        return StepContext(steps, np.zeros(self.blocks), rows, device, seeds=rows, signals={"lr": 1.0})


_FLOOR = 1e-12
"""Eigenvalues of a factor below this many times the largest are raised to this bound before powers are computed."""


def second_moment(g: Tensor) -> Tensor:
    """Return C = E[vec G vec G^T], the mean over gradients G `[K, m, n]`."""
    flat = g.flatten(1)
    return flat.T @ flat / len(g)


def cosine(a: Tensor, b: Tensor) -> float:
    """Return <A, B> / (||A|| ||B||)."""
    return float((a * b).sum() / (a.norm() * b.norm()))


def cosine_product(c: Tensor, left: Tensor, right: Tensor) -> float:
    """Return the cosine of a matrix C and the Kronecker product of L and R, as vectors."""
    return cosine(c, torch.kron(left, right))


def best_cosine(c: Tensor, m: int, n: int) -> float:
    """Return the largest cosine of C `[m n, m n]` with a Kronecker product L x R, over all L and R.

    It is the spectral norm of a rearranged C, divided by ||C||_F (Van Loan). Each row of the rearranged C, which is
    `[m^2, n^2]`, has the entries of one n x n block of C.
    """
    rearranged = c.reshape(m, n, m, n).transpose(1, 2).reshape(m * m, n * n)
    return float(torch.linalg.matrix_norm(rearranged, ord=2) / c.norm())


def gains(held_out: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """Return log10 of the gain sqrt(h_i / s_i) of each eigenvector u_i of S = L x R, as a matrix `[m, n]`.

    h_i = u_i^T C u_i is the second moment of the held-out gradients along u_i, and s_i = u_i^T S u_i is its estimate.
    A gain is 1, and its logarithm 0, if S^(-1/2) scales the held-out gradients along u_i to unit size.

    held_out: gradients `[K, m, n]` that the statistic has not seen. C is their second moment.
    left, right: L and R.
    """
    (a, u), (b, v) = torch.linalg.eigh(left), torch.linalg.eigh(right)
    h = ((u.T @ held_out @ v) ** 2).mean(0)
    s = a.clamp_min(_FLOOR * a[-1])[:, None] * b.clamp_min(_FLOOR * b[-1])
    found: Tensor = 0.5 * (h / s).log10()
    return found


def gain_error(held_out: Tensor, left: Tensor, right: Tensor) -> float:
    """Return the gain error (Liu et al. 2026): the median of |log10 gain| over the m n eigenvectors of the statistic.

    The gain of an eigenvector is 1 if the statistic estimates the size of new gradients along it exactly. See `gains`,
    which has the same arguments.
    """
    return float(gains(held_out, left, right).abs().median())


def gain_spread(held_out: Tensor, left: Tensor, right: Tensor) -> float:
    """Return the median absolute deviation of log10 gain from its median. See `gains` for the arguments.

    A factor that all gains share has no effect, because another learning rate would compensate for it.
    """
    found = gains(held_out, left, right)
    return float((found - found.median()).abs().median())


LONG = 0.995
"""Decay of statistics that are declared by their kind alone, for a mean over about 200 gradients."""
_PREFERRED: tuple[Declaration, ...] = ({"kind": "gram"}, *({"kind": "bregman", "q": q} for q in ("2", "1", "1/2", "0")))


def slow(kind: str) -> Declaration:
    """Return the declaration of the statistic called `kind`. If the statistic has a field `beta`, it is set to LONG."""
    member = Statistic.members.get(kind)
    return {"kind": kind, **({"beta": LONG} if member is not None and "beta" in member.model_fields else {})}


BEST, DIAGONAL = "best Kronecker product", "diagonal (Adam)"
"""Names of two approximations of the second moment C that are shown for comparison. No statistic computes them."""


class StatisticBench(OwnMatrices):
    """Compare the second moment of gradients with the estimate of it that a statistic has computed from them.

    The estimate is compared after each number of gradients in `samples`. The gradients are those of the layers of a
    byte-level language model after a short training. If `record` names a run, they are the leading `width` x `width`
    entries of the gradients of its layers.

    S = L x R is the Kronecker product of the statistic's estimates for the two axes of a layer. S is compared with C,
    the second moment over all gradients that statistics see, by their cosine. The gain error compares S with held-out
    gradients, which no statistic sees. It is the median of |log10 gain| over the eigenvectors u of S. Here gain^2 is
    the second moment of the held-out gradients along u, divided by u^T S u. If a statistic computes its two factors
    independently of each other, S is scaled to the trace of C.

    The statistic runs inside `shampoo` with exponent 1/2, because statistics whose factors depend on each other read
    the roots. The roots are refreshed every `every` gradients, the first time at gradient `start`.
    """

    kind: Literal["statistics"] = "statistics"
    statistics: Annotated[tuple[Statistic, ...], kinds_as(slow)] = Field(
        default_factory=default_members(Statistic, _PREFERRED, slow, lambda statistic: not statistic.of_inputs),
        description="statistics to measure, each a kind or a declaration",
    )
    width: int = Field(16, ge=4, le=48, multiple_of=2, description="width of the layers; C has width^4 entries")
    samples: PositiveInts = Field(
        (40, 160, 640), description="numbers of gradients after which statistics are measured"
    )
    held_out: int = Field(
        640, ge=1, description="number of further gradients, which no statistic sees, for the gain error"
    )
    dtype: Literal["float32", "float64"] = Field("float32", description="dtype of gradients and statistics")
    steps: int = Field(100, ge=0, description="training steps before the gradients are taken")
    every: int = Field(5, ge=1, description="gradients between refreshes")
    start: int = Field(20, ge=1, description="gradients before the first refresh: roots of fewer may be singular")
    candidate_field: ClassVar[str] = "statistics"
    columns: ClassVar[Mapping[str, Column]] = {
        "samples": Column("gradients that the statistic has seen"),
        "cosine": Column("cosine of S and C"),
        "cosine_root": Column("cosine of L^(1/2) x R^(1/2) and C"),
        "gain_error": Column("median of |log10 gain| on held-out gradients", "decades"),
        "gain_spread": Column("median of |log10 gain - median| on held-out gradients", "decades"),
        "milliseconds": Column("time of one gradient and layer, refreshes included", "ms"),
    }
    quick_fields: ClassVar[dict[str, Any]] = {"width": 8, "samples": [20, 80], "held_out": 80, "seconds": 0.005}

    def problems(self) -> Sequence[Problem]:
        return [Problem({}, self._gradients)]

    def _gradients(self) -> LayerGradients:
        count = max(self.samples) + self.held_out
        names: tuple[str, ...] = GRADIENT_LAYERS
        silent: tuple[str, ...] = ()
        if self.record is None:
            gradients = layer_gradients(self.width, count, self.seed, self.steps)
        else:
            found = run_gradients(self.record, self.width, count, self.steps)
            names = tuple(name for name, g in found.items() if g.any())
            gradients = torch.stack([found[name] for name in names], dim=1)
            silent = tuple(name for name in found if name not in names)
        seen, unseen = gradients[: max(self.samples)], gradients[max(self.samples) :]
        moments = torch.stack([second_moment(g) for g in seen.unbind(1)])
        return LayerGradients(names, seen, unseen, moments, silent)

    def label(self, candidate: Statistic) -> str:
        return label(candidate, slow, always=("q",))

    def measure(self, candidate: Statistic, given: LayerGradients) -> Iterator[Row]:
        if candidate.of_inputs:
            yield {"problem": "it is a statistic of inputs, which are not recorded"}
            return
        solver = Eigh(eps=1e-6, relative=True, deficiency="add")
        cadence = Every(steps=self.every, start=self.start, stagger="none")
        stage = Shampoo(statistic=candidate, exponent=Fraction(1, 2), solver=solver, refresh=cadence)
        seen, layers = given.seen.to(self.target_device(), getattr(torch, self.dtype)), len(given.names)
        runner = StageRunner(stage, (self.width, self.width), layers, seen)
        for k, gradient in enumerate(seen, start=1):
            runner.step(gradient)
            if k in self.samples:
                factors = self._factors(runner, stage, candidate, given.moments)
                time = self.milliseconds(partial(deepcopy(runner).repeat, gradient, self.every))
                for layer, name in enumerate(given.names):
                    left, right, c = factors[0][layer], factors[1][layer], given.moments[layer]
                    roots = matrix_power(left, 0.5, _FLOOR), matrix_power(right, 0.5, _FLOOR)
                    yield {
                        "layer": name,
                        "samples": k,
                        "cosine": cosine_product(c, left, right),
                        "cosine_root": cosine_product(c, *roots),
                        "gain_error": gain_error(given.unseen[:, layer], left, right),
                        "gain_spread": gain_spread(given.unseen[:, layer], left, right),
                        "milliseconds": time / self.every / layers,
                    }

    def _factors(
        self, runner: StageRunner, stage: Shampoo, statistic: Statistic, moments: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the factors L and R of the statistic of all layers, `[layers, d, d]` each.

        An axis without a factor has the identity. If the statistic computes its factors independently of each other, R
        is scaled so that L x R has the trace of C.

        moments: second moments C of the gradients of all layers, `[layers, d^2, d^2]`.
        """
        state = runner.state.scope(stage.label)
        context = runner.context(self.target_device())
        found = []
        for axis in range(2):
            if axis in stage.factor_axes(state.block):
                estimate = statistic.estimate(state, axis, context).double().cpu()
                found.append(estimate if estimate.ndim == 3 else torch.diag_embed(estimate))
            else:
                found.append(torch.eye(self.width, dtype=torch.float64).expand(len(moments), -1, -1))
        if not getattr(statistic, "coupled", False):
            left, right, total = (x.diagonal(dim1=-2, dim2=-1).sum(-1) for x in (*found, moments))
            found[1] = found[1] * (total / (left * right))[:, None, None]
        return found[0], found[1]

    def reference(self, given: LayerGradients) -> Iterator[Row]:
        """Yield two rows for each layer: the cosine of the second moment C with the best approximation of C by a
        Kronecker product, and the cosine of C with its diagonal. A layer whose gradients are 0 has one row, which says
        so.
        """
        for name, c in zip(given.names, given.moments, strict=True):
            values = best_cosine(c, self.width, self.width), cosine(c, c.diagonal().diag())
            for candidate, value in zip((BEST, DIAGONAL), values, strict=True):
                yield {"candidate": candidate, "layer": name, "samples": max(self.samples), "cosine": value}
        for name in given.silent:
            reason = f"gradients of {name} are 0 in their leading {self.width} x {self.width} entries"
            yield {"candidate": BEST, "layer": name, "samples": max(self.samples), "problem": reason}

    def table(self) -> Table:
        three, last = finite("{:.3f}"), only(self._last)
        return Table(
            f"statistics after {max(self.samples)} gradients: the mean over layers",
            {"statistic": "candidate"},
            {
                "cosine": cell("cosine", "mean", three, last),
                "of its root": cell("cosine_root", "mean", three, last),
                "gain error": cell("gain_error", "mean", three, last),
                "gain spread": cell("gain_spread", "mean", three, last),
                "ms": cell("milliseconds", "mean", milli, last),
            },
        )

    def _last(self, row: Row) -> bool:
        return bool(row["samples"] == max(self.samples))

    def panels(self) -> tuple[Panel, Panel]:
        errors, angles = (
            per(lambda row: row["samples"], reduction("samples"), y)
            for y in (reduction("gain_error", "mean"), _distance)
        )
        return (
            Panel("gradients seen", "held-out gain error, decades", {"{}": errors}, lambda row: "gain_error" in row),
            Panel("gradients seen", "1 - cosine with C", {"{}": angles}),
        )

    def recommendations(self) -> Sequence[Recommendation]:
        def last(row: Row) -> bool:
            return self._last(row) and "gain_error" in row

        return [
            *self.recommended(
                lambda row: "whitening of gradients not seen", keep=last, costs="error",
                cost=lambda rows: fmean(10 ** row["gain_error"] for row in rows),
                cost_text="off by {:.2f} times in the median direction".format,
                error=reduction("gain_error", "mean"), error_name="gain error in decades",
            ),
            *self.recommended(
                lambda row: "nearest to the second moment in angle", cost=_distance,
                cost_text=lambda cost: f"cosine {1 - cost:.3f}", costs="distance from 1", keep=last,
            ),
        ]  # fmt: skip


class LayerGradients(NamedTuple):
    """Gradients of some layers, in float64.

    names: names of the layers.
    seen: gradients `[K, layers, d, d]` that the statistics observe.
    unseen: held-out gradients `[K', layers, d, d]`.
    moments: second moments C of `seen`, `[layers, d^2, d^2]`.
    silent: names of layers that are left out, because their gradients are 0.
    """

    names: Sequence[str]
    seen: Tensor
    unseen: Tensor
    moments: Tensor
    silent: Sequence[str]


def _distance(rows: BenchRows) -> float:
    """Return the mean over rows of 1 - `cosine`, a column of the results."""
    return 1 - reduction("cosine", "mean")(rows)
