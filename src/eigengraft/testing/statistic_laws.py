"""The laws of statistics: shapes of contributions, semidefinite factors, and blocks that are independent."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import partial

import numpy as np
import torch
from torch import Tensor

from eigengraft.preconditioners import Statistic
from eigengraft.preconditioners.statistics import Contribution, Power, has_data, mean_eigenvalue
from eigengraft.signals import known_signals
from eigengraft.slots import State
from eigengraft.step_context import StepContext

from .accelerator import accelerator
from .causes import WATCHED_BLOCKS, stack_cause, write_cause
from .device_laws import WARM_UP_STEPS, require_no_waits, without_accelerator
from .laws import Case, Law, LawError, broken, in_parentheses, require, require_close, the_declaration_survives
from .samples import difficult, gradients, signals_of
from .stage_case import Degree, on

STATISTIC_BLOCKS = ((6, 3), (5,), (3, 2, 4))
"""Shapes of the blocks to try: matrices, vectors and tensors."""
_STEPS = 5
"""Number of gradients from which each law accumulates a statistic."""
_LEAST = 1e-3
"""Eigenvalues of a factor are raised to at least this multiple of their mean in `FactorBench.powers`, so that powers
stay finite."""


@dataclass(frozen=True)
class StatisticCase(Case[Statistic]):
    """A statistic and the properties that it declares.

    blocks: shapes of the blocks to try.
    degree: d if scaling all gradients by c scales the factors by c^d, a number or a function of the number of axes of
        the block; None: the law does not apply.
    """

    blocks: tuple[tuple[int, ...], ...] = STATISTIC_BLOCKS
    degree: Degree | None = None

    @property
    def tried(self) -> tuple[tuple[int, ...], ...]:
        """The shapes in `blocks`, reshaped to matrices if the statistic observes the inputs of layers."""
        whole = self.component.of_inputs
        return tuple((*b[:-2], b[-2] * b[-1]) if whole and len(b) > 2 else b for b in self.blocks)

    def given(self, block: tuple[int, ...], blocks: int = 3, dtype: torch.dtype = torch.float64) -> Tensor:
        """Return standard normal gradients `[T, blocks, *block]` of T = `_STEPS` steps."""
        return gradients(block, blocks, dtype)[:_STEPS]


class FactorBench:
    """A statistic with the factors of N blocks of one shape, without a stage around it.

    step: number of gradients that were observed.
    """

    def __init__(
        self,
        statistic: Statistic,
        block: tuple[int, ...],
        blocks: int = 3,
        dtype: torch.dtype = torch.float64,
        first: int = 0,
    ) -> None:
        """Allocate the factors.

        block: shape of a block.
        blocks: number N of blocks.
        first: number of the first block. A block's random numbers, and its inputs beside the gradient (signals), follow
            from its number.
        """
        self.statistic, self.block, self.dtype = statistic, block, dtype
        self.axes = statistic.axes.of(block)
        slots, device = statistic.slots(block, self.axes), torch.get_default_device()
        self.tensors = {f"s/{name}": slot.allocate(blocks, dtype, device) for name, slot in slots.items()}
        self.seeds, self.step = np.arange(first, first + blocks) * 7919 - 11, 0

    @property
    def state(self) -> State:
        return State(self.tensors, self.block, "s")

    def context(self) -> StepContext:
        """Return the context of the present step, with the inputs beside the gradient that the statistic requires."""
        n = len(self.seeds)
        signals = [known_signals()[name] for name in sorted(self.statistic.requires)]
        found = signals_of(signals, self.block, self.seeds, self.dtype)
        device, ids = torch.get_default_device(), np.arange(n)
        return StepContext(np.full(n, self.step), np.zeros(n), ids, device, self.seeds, found)

    def powers(self, context: StepContext, axis: int, exponent: Fraction) -> Power:
        """Return a power of the factor of an axis, by an eigendecomposition.

        Some statistics need powers of the other axes' factors to compute a contribution.

        context: context of the present step.
        axis: axis of the block.
        exponent: exponent of the power.
        """
        a = self.statistic.estimate(self.state, axis, context, behind=1)
        unit, known = mean_eigenvalue(a), has_data(a)
        values, q = torch.linalg.eigh((a if a.ndim == 3 else torch.diag_embed(a)) / unit[:, None, None])
        values = values.clamp_min(_LEAST)
        half = values.pow(float(exponent) / 2).unsqueeze(-1) * q.mT
        if a.ndim == 2:
            half = (q @ half).diagonal(dim1=1, dim2=2)
        return Power(half, half, unit, values.pow(float(exponent) + 1).sum(-1), known)

    def contributions(self, gradient: Tensor) -> list[Contribution]:
        """Return the contributions of a gradient `[N, *block]` to the factors, without adding them."""
        self.step += 1
        context = self.context()
        return self.statistic.contributions(self.state, gradient, self.axes, partial(self.powers, context), context)

    def observe(self, gradients: Tensor) -> FactorBench:
        """Observe gradients `[T, N, *block]` one after another, and return this bench."""
        for gradient in gradients:
            self.step += 1
            context = self.context()
            self.statistic.observe(self.state, gradient, context, self.axes, partial(self.powers, context))
        return self

    def estimates(self) -> dict[int, Tensor]:
        """Return the estimate of the statistic, which root and basis solvers receive, for each axis that has a factor.

        An estimate is `[N, d, d]`, or `[N, d]` for a diagonal factor.
        """
        context = self.context()
        return {axis: self.statistic.estimate(self.state, axis, context) for axis in self.axes}


def contributions_have_their_shape_and_dtype(case: StatisticCase) -> None:
    """`contribution` returns a `Contribution`: matrices y and z `[N, d, rest]` with the product y z^T, or a matrix y
    `[N, d, d]`.

    Its tensors have the dtype and device of the gradient.
    """
    for block in case.tried:
        for dtype in (torch.float32, torch.float64):
            bench = FactorBench(case.component, block, dtype=dtype)
            given = case.given(block, dtype=dtype)[0]
            found: object = bench.contributions(given)
            with on(block):
                fine = isinstance(found, list) and len(found) == len(bench.axes)
                got = f"a list of {len(found)}" if isinstance(found, list) else type(found).__name__
                require(fine, "contributions()", f"a list with one for each of the axes {bench.axes}", got)
                assert isinstance(found, list)
                for axis, one in zip(bench.axes, found, strict=True):
                    _require_shape(one, axis, block[axis], given)


def _require_shape(found: object, axis: int, d: int, given: Tensor) -> None:
    n, where = len(given), f"contribution for axis {axis}"
    if not isinstance(found, Contribution):
        raise broken(f"the {where}", "a Contribution", type(found).__name__, in_parentheses("return Contribution(y)"))
    y, z, scale = found
    wanted = f"[N, {d}, {d}]" if z is None else f"[N, {d}, rest]"
    fine = y.ndim == 3 and y.shape[:2] == (n, d) and (y.shape[2] == d if z is None else y.shape == z.shape)
    got = f"{list(y.shape)}" + ("" if z is None else f" and {list(z.shape)}")
    hint = in_parentheses("a product Y Z^T of unfoldings is Contribution(y, z)") if z is None else ""
    require(fine, f"{'y' if z is None else 'y and z'} of the {where}", f"shape {wanted} with N = {n}", got, hint)
    for name, x in (("y", y), ("z", z), ("scale", scale)):
        if isinstance(x, Tensor):
            want, got = f"{given.dtype} on {given.device}", f"{x.dtype} on {x.device}"
            require(want == got, f"{name} of the {where}", f"the dtype and device of the gradient, {want}", got)
    fine = isinstance(scale, (int, float)) or tuple(scale.shape) == (n,)
    got = f"shape {list(scale.shape)}" if isinstance(scale, Tensor) else ""
    require(fine, f"scale of the {where}", f"a number, or a tensor of shape [N] with N = {n}", got)


def the_gradient_is_not_written_to(case: StatisticCase) -> None:
    """The observed tensor holds the same bits after the observation as before it."""
    for block in case.tried:
        given = case.given(block)
        before, bench = given.clone(), FactorBench(case.component, block)
        bench.observe(given)
        if not torch.equal(given, before):
            cause = write_cause(case.component, {"the gradient": given}, partial(bench.observe, given))
            raise broken("the gradient after contribution()", "no change", "other numbers", cause)


def factors_of_a_stack_are_those_of_its_blocks(case: StatisticCase) -> None:
    """The factors of a block in a stack are the factors of the block alone."""
    for block in case.tried:
        given = case.given(block)
        together = FactorBench(case.component, block).observe(given).estimates()

        def cause(block: tuple[int, ...] = block) -> str:
            many = case.given(block, WATCHED_BLOCKS)
            bench = FactorBench(case.component, block, WATCHED_BLOCKS)
            return stack_cause(case.component, lambda: bench.observe(many))

        for row in range(given.shape[1]):
            alone = FactorBench(case.component, block, 1, first=row).observe(given[:, row : row + 1]).estimates()
            for axis, factor in alone.items():
                with on(block):
                    what = f"the factor of axis {axis}, for block {row} alone and in a stack of 3"
                    require_close(factor, together[axis][row : row + 1], 1e-10, what, cause)


def factors_are_symmetric_and_semidefinite(case: StatisticCase) -> None:
    """Every factor is a symmetric matrix without negative eigenvalues. The tolerance is 1e-5, for float32."""
    for block in case.tried:
        bench = FactorBench(case.component, block, dtype=torch.float32)
        for axis, a in bench.observe(case.given(block, dtype=torch.float32)).estimates().items():
            matrix = a if a.ndim == 3 else torch.diag_embed(a)
            with on(block):
                require_close(matrix, matrix.mT, 1e-5, f"the factor of axis {axis} and its transpose")
                least, largest = float(torch.linalg.eigvalsh(matrix).min()), float(a.abs().max())
                fine = least >= -1e-5 * largest
                cause = in_parentheses("a contribution must be positive semi-definite, as Y Y^T is")
                require(fine, f"eigenvalues of the factor of axis {axis}", "none below 0", f"{least:.2g}", cause)


def permuting_entries_along_an_axis_permutes_its_factor(case: StatisticCase) -> None:
    """If the entries of all gradients are permuted along an axis, the rows and columns of the factor of this axis are
    permuted in the same way, and this factor does not change otherwise. The tolerance is 1e-6, because factors may be
    computed from powers of nearly singular factors.
    """
    for block in case.tried:
        given = case.given(block)
        plain = FactorBench(case.component, block).observe(given).estimates()
        for axis, factor in plain.items():
            order = torch.arange(block[axis]).roll(1)
            found = FactorBench(case.component, block).observe(given.index_select(axis + 2, order)).estimates()[axis]
            wanted = factor[:, order] if factor.ndim == 2 else factor[:, order][:, :, order]
            what = f"the factor of axis {axis} for gradients that are permuted along it, and the permuted factor"
            with on(block):
                require_close(found, wanted, 1e-6, what, lambda: in_parentheses(_UNFOLDED))


_UNFOLDED = "is the unfolding `x.movedim(axis + 1, 1).flatten(2)`? `reshape` alone mixes entries"


def factors_keep_dtype_and_device(case: StatisticCase) -> None:
    """Factors keep dtype, device and shape, in float32 and float64."""
    for block in case.tried:
        for dtype in (torch.float32, torch.float64):
            bench = FactorBench(case.component, block, dtype=dtype)
            before = {key: (tensor.dtype, tensor.shape) for key, tensor in bench.tensors.items()}
            bench.observe(case.given(block, dtype=dtype))
            after = {key: (tensor.dtype, tensor.shape) for key, tensor in bench.tensors.items()}
            with on(block, str(dtype)):
                require(after == before, "(dtype, shape) of the factors", f"{before}", after)


def factors_stay_finite(case: StatisticCase) -> None:
    """Factors are finite for zero, huge, tiny and rank-deficient gradients, in float32."""
    for block in case.tried:
        for name, given in difficult(block):
            found = FactorBench(case.component, block, dtype=torch.float32).observe(given[:_STEPS]).estimates()
            for axis, factor in found.items():
                with on(block, f"gradients: {name}"):
                    finite = factor.isfinite().all()
                    require(finite, f"the factor of axis {axis}", "finite numbers", "nan or inf")


def observations_stay_on_the_device(case: StatisticCase) -> None:
    """The host neither waits for the device nor copies numbers to it while a gradient is observed.

    The law does not apply to statistics that read powers of the factors of other axes, because the law itself would
    compute these powers.
    """
    block = case.tried[0]
    with on(block, "on a simulated accelerator"), accelerator("cuda") as run, run.device:
        bench = FactorBench(case.component, block, dtype=torch.float32)
        for gradient in case.given(block, dtype=torch.float32).to(run.device):
            bench.step += 1
            context = bench.context()
            _ = context.step, context.seed
            with accelerator("cuda") as counts:
                case.component.observe(bench.state, gradient, context, bench.axes, partial(bench.powers, context))
            if bench.step > WARM_UP_STEPS:
                remedy = (
                    "`context.step`, `context.seed` and `context.tensor(...)` are on the device; in place of `if`, use "
                    "torch.where"
                )
                require_no_waits(counts, f"step {bench.step}", remedy)


def factors_are_all_the_memory(case: StatisticCase) -> None:
    """The same gradients give the same factors again: a statistic has no memory beside its factors."""
    for block in case.tried:
        one, two = (FactorBench(case.component, block).observe(case.given(block)).estimates() for _ in range(2))
        if all(torch.equal(one[axis], two[axis]) for axis in one):
            continue
        if all(torch.allclose(one[axis], two[axis], 1e-10, 0.0) for axis in one):
            try:
                factors_of_a_stack_are_those_of_its_blocks(case)
            except LawError:  # a sum over the stack rounds differently in each call; the law of stacks reports it
                return
        with on(block):
            cause = in_parentheses("does the statistic remember anything outside its factors?")
            raise broken("factors of the same gradients, computed again", "the same bits", "other bits", cause)


def scaling_all_gradients_scales_the_factors(case: StatisticCase) -> None:
    """Gradients times c give factors times c^k, with k the declared degree of the case. Tolerance 1e-5, for float32."""
    for block in case.tried:
        degree = case.degree(len(block)) if callable(case.degree) else case.degree
        assert degree is not None
        given = case.given(block, dtype=torch.float32)
        plain = FactorBench(case.component, block, dtype=torch.float32).observe(given).estimates()
        scaled = FactorBench(case.component, block, dtype=torch.float32).observe(given * 2.0**8).estimates()
        for axis, factor in plain.items():
            what = (
                f"the factor of axis {axis} for gradients 256 G, and 256^({degree:g}) times the factor for gradients G"
            )
            with on(block):
                require_close(scaled[axis], factor * 2.0 ** (8 * degree), 1e-5, what)


def _on_device(case: StatisticCase) -> str | None:
    reads = "its powers of other factors are computed by the law" if case.component.needs_power is not None else None
    return reads or without_accelerator(case)


STATISTIC_LAWS: tuple[Law[StatisticCase], ...] = (
    Law(the_declaration_survives),
    Law(contributions_have_their_shape_and_dtype, decisive=True),
    Law(the_gradient_is_not_written_to, decisive=True),
    Law(factors_are_all_the_memory, decisive=True),
    Law(factors_of_a_stack_are_those_of_its_blocks),
    Law(factors_are_symmetric_and_semidefinite),
    Law(
        permuting_entries_along_an_axis_permutes_its_factor,
        lambda case: "it reads inputs beside the gradient" if case.component.requires else None,
    ),
    Law(factors_keep_dtype_and_device),
    Law(factors_stay_finite),
    Law(observations_stay_on_the_device, _on_device),
    Law(scaling_all_gradients_scales_the_factors, lambda case: "no degree is given" if case.degree is None else None),
)
