"""Trajectories of distributed optimizers along given gradients: `run` on each rank, for many cases in one launch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, Literal
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn

import eigengraft
from eigengraft import Optimizer, Request, Slot, Stage, State, StepContext, Traits, load_recipe
from eigengraft.distributed.gradients import BackwardGather
from eigengraft.numerics import block_norm, local
from eigengraft.optimizers import grouped

from .hosts import prepare
from .models import divided, lay_out, model, wholes

STEPS = 6
"""Steps of a trajectory. With a refresh every two steps each block has refreshes that later steps depend on."""
EVALUATED, EMPTY, SPOILT, THAWED = (1, 3), 4, 2, 3
"""Steps after which evaluation parameters are read, steps without gradients, with one that is not finite, and of
thawing."""
RATES = ((0.02, 0.0), (0.01, 0.2), (0.01, 0.1))
"""Learning rate and weight decay of param groups, which have every third parameter."""


class Listening(Stage):
    """d min(1, 1 / ||all gradients||) loss / (1 + total of ||d||) + 0.1 W h,  h the provided Hessian diagonal"""

    kind: Literal["listening_for_test"] = "listening_for_test"

    def traits(self, block: tuple[int, ...]) -> Traits:
        names = ("gradient_norm", "loss", "parameter", "hessian_diagonal")
        return Traits(signals=tuple(map(Request, names)))

    def slots(self, block: tuple[int, ...]) -> Mapping[str, Slot]:
        return {"length": Slot((), role="count", total=True)}

    def apply(self, state: State, gradient: Tensor, direction: Tensor, context: StepContext) -> Tensor:
        state["length"] = block_norm(direction)
        norm, loss = torch.as_tensor(context.signal("gradient_norm")), context.signal("loss")
        factor = loss / norm.clamp_min(1) / (1 + context.total(state, "length"))
        pull = torch.as_tensor(context.signal("parameter")) * context.signal("hessian_diagonal")
        return direction * factor.to(direction.dtype) + 0.1 * pull


def run(job: dict[str, Any]) -> dict[str, Any]:
    """job: {name: case}; case: see `follow`."""
    found = {}
    for name, case in job.items():
        early = Early() if case.pop("early", False) else None
        with nullcontext() if early is None else patch.object(BackwardGather, "finish", early.finish):
            found[name] = follow(**case, early=early)
    return found


def follow(
    recipe: Any,
    place: str,
    overrides: Sequence[str] = (),
    gaps: bool = False,
    groups: bool = False,
    early: Early | None = None,
    **of_model: Any,
) -> Any:
    """All steps of one case; what is common to all ranks, and what is this rank's own.

    place: where `lay_out` puts the parameters; late: a host shards them after the optimizer was made; grouped: two
        ranks together compute all updates, as every other two do.
    gaps: whether some parameters miss a step that others take.
    groups: whether there are three param groups, of which one has another learning rate from the middle on.
    early: has gradients written by backward, in one step of each of KINDS, and counts what is sent by then; None: they
        are assigned.
    of_model: what `build` takes; always: whether evaluation parameters are read after every step; provided: whether the
        recipe has signals that a training loop provides.
    """
    provided = of_model.pop("provided", False)
    steps = STEPS if early is None else len(KINDS)
    looks = range(steps) if of_model.pop("always", False) else EVALUATED
    if place == "grouped":
        place, overrides = "plain", [*overrides, "distribution.group_size=2"]
    module = build(**of_model)
    start = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    module = lay_out(module, "plain" if place == "late" else place)
    # a model's frozen parameters are left out, those of a list may be thawed
    parameters = module.named_parameters() if gaps else in_groups(module) if groups else module
    optimizer = eigengraft.compose(load_recipe(recipe, list(overrides)), parameters)
    if place == "late":
        prepare(module, optimizer)
    evaluated = []
    for step in range(steps):
        if gaps and step == THAWED:
            module.frozen.requires_grad_(True)  # type: ignore[union-attr]
        if groups and step == steps // 2:
            optimizer.param_groups[1]["lr"] = RATES[0][0]
        give(module, step, gaps)
        if early is not None:
            early.backward(module, step)
        if provided:
            provide(module, optimizer, step)
        if step == steps - 1:
            optimizer.watch_next_step()
        optimizer.step()
        if step in looks:
            optimizer.eval()
            evaluated.append(values(module))
            optimizer.train()
    optimizer.eval()
    final = values(module)
    optimizer.train()
    return {
        "start": start,
        "parameters": values(module),
        "evaluated": evaluated,
        "final": final,
        "bytes": optimizer.state_bytes(),
        "inspected": {row.key: row.value for row in optimizer.inspect()},
        # routes are for entry-wise updates, which every rank computes some rows of
        "blocks": sum(len(unit.stack.param_ids) for unit in optimizer.stack_states() if not unit.path),
        "skipped": dict(optimizer.skipped),
        "early": {} if early is None else early.counts,
        "steps": {n: int(optimizer.state[p]["step"]) for n, p in module.named_parameters() if p in optimizer.state},
    }


def in_groups(module: nn.Module) -> Any:
    """The param groups of a model."""
    held = list(module.parameters())
    return grouped(
        module, [{"params": held[at::3], "lr": lr, "weight_decay": decay} for at, (lr, decay) in enumerate(RATES)]
    )


def build(dtype: str = "float32", sizes: Sequence[int] = (10, 16), only: str = "") -> nn.Module:
    """The model; only: a prefix of the parameters that are trained."""
    module = model(*sizes, getattr(torch, dtype))
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(parameter.requires_grad and name.startswith(only))
    return module


def give(module: nn.Module, step: int, gaps: bool) -> None:
    """The same gradients on every rank, each rank holding its part: none at all at one step; with gaps, none for some
    parameters at every fourth, and one with a NaN."""
    generator = torch.Generator().manual_seed(step)
    for name, parameter in module.named_parameters():
        gradient = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        missing = step == EMPTY or (gaps and step % 4 == 1 and name.startswith("up"))
        if gaps and step == SPOILT and name == "down.weight":
            gradient[3, 4] = float("nan")
        parameter.grad = divided(gradient, parameter) if parameter.requires_grad and not missing else None


def provide(module: nn.Module, optimizer: Optimizer, step: int) -> None:
    """Ranks hold their parts of the diagonals, and have losses of which the mean is that of one process."""
    generator = torch.Generator().manual_seed(1000 + step)
    diagonals = {
        parameter: divided(torch.rand(parameter.shape, generator=generator).to(parameter.dtype), parameter)
        for parameter in module.parameters()
    }
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    optimizer.provide("loss", (1 + step) * 2 * (rank + 1) / (size + 1))
    optimizer.provide("hessian_diagonal", {p: value for p, value in diagonals.items() if id(p) in held})


def values(module: nn.Module) -> dict[str, Tensor]:
    """Whole parameters by name."""
    named = dict(module.named_parameters())
    return dict(zip(named, wholes(named.values()), strict=True))


class Early:
    """Gradients that backward writes, so that they may travel before the step.

    counts: by kind of step, (rounds begun on this rank before the step, rounds of these that were not sent again).
    """

    def __init__(self) -> None:
        self.counts: dict[str, tuple[int, int]] = {}
        self.kind, finish = "", BackwardGather.finish

        def counted(gather: BackwardGather, reports: Sequence[float]) -> Any:
            begun, good = len(gather._works), finish(gather, reports)
            before = self.counts.get(self.kind, (0, 0))
            self.counts[self.kind] = before[0] + begun, before[1] + len(good)
            return good

        self.finish = counted

    def backward(self, module: nn.Module, step: int) -> None:
        """The gradients that are there, by backward; at every other step something happens to them on one rank."""
        rank, self.kind = dist.get_rank() if dist.is_initialized() else 0, KINDS[step % len(KINDS)]
        given = [(p, p.grad) for p in module.parameters() if p.grad is not None]
        if self.kind == "assigned" and rank == 1:
            return
        for parameter, _ in given:
            parameter.grad = None
        rewrite = REWRITES.get(self.kind) if rank == 0 else None
        for part in (0.5, 0.5) if self.kind == "accumulated" else (1.0 if rewrite is None else 0.5,):
            pairs = ((local(parameter), part * local(gradient)) for parameter, gradient in given)
            sum((torch.sum(x * g) for x, g in pairs), torch.zeros((), requires_grad=True)).backward()
        if rewrite is not None:
            rewrite([parameter for parameter, _ in given])
        if self.kind == "same":
            torch._foreach_mul_([parameter.grad for parameter, _ in given], 1)  # type: ignore[arg-type]


def double_data(parameters: Sequence[Tensor]) -> None:
    """Doubles gradients through `.data`."""
    for parameter in parameters:
        parameter.grad.data.mul_(2)  # type: ignore[union-attr]


def replace(parameters: Sequence[Tensor]) -> None:
    """Puts doubled gradients in place of others."""
    for parameter in parameters:
        parameter.grad = 2 * parameter.grad  # type: ignore[operator]


REWRITES: dict[str, Callable[[Sequence[Tensor]], object]] = {
    "foreach": lambda parameters: parameters and torch._foreach_mul_([p.grad for p in parameters], 2),  # type: ignore[arg-type,misc]
    "data": double_data,
    "replaced": replace,
}
"""Ways to double gradients after backward, exactly; torch counts neither of the first two as a write to a DTensor."""
KINDS = ("plain", "data", "foreach", "same", "plain", "replaced", "assigned", "accumulated")
"""Of the gradients at a step: nothing happens to them; one rank doubles halves; all ranks write the same bits again;
one rank has them without backward, which the other ranks cannot know; they come in two halves, exactly."""
