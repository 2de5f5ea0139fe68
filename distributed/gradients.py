"""Gradients as their parameters lie, and on their way to owners during backward.

A gradient is what its placements say, never its local values alone.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from weakref import ref

import torch
from torch import Tensor

from .comm_plan import CommPlan
from .layouts import are_dtensors_known, is_dtensor, local
from .rank_group import DistributedError, RankGroup
from .transfers import flattened, read, send_shards
from .work import Work


def local_gradients(
    names: Sequence[str], parameters: Sequence[Tensor], rank_group: RankGroup | None
) -> list[Tensor | None]:
    """What this rank holds of the gradient of each parameter, laid out as the parameter is; None: it has no gradient.

    A DTensor with other placements, as a partial sum, is redistributed by all ranks of its mesh; `parameter.grad` stays
    as it is. Raises ValueError for a gradient that cannot be laid out so, DistributedError where ranks fail to do it.
    """
    if not are_dtensors_known():
        return [parameter.grad for parameter in parameters]
    pairs = list(zip(names, parameters, strict=True))
    moved = [name for name, parameter in pairs if _lies_elsewhere(name, parameter)]
    if moved and rank_group is not None:
        none = [name for name, parameter in pairs if parameter.grad is None]
        told = f"; none of {', '.join(none[:3])}" if none else ""
        rank_group.meet(f"redistribution of gradients ({moved[0]} and {len(moved) - 1} more{told})")
    return [_local_gradient(name, parameter) for name, parameter in pairs]


def _lies_elsewhere(name: str, parameter: Tensor) -> bool:
    """Whether a gradient has other placements than its parameter; ValueError if it cannot get the same."""
    gradient = parameter.grad
    if gradient is None or not (is_dtensor(gradient) or is_dtensor(parameter)):
        return False
    if not is_dtensor(gradient) or not is_dtensor(parameter):
        kinds = ["a DTensor" if is_dtensor(x) else "a plain tensor" for x in (parameter, gradient)]
        raise ValueError(f"{name}: the gradient of {kinds[0]} must be one too, got {kinds[1]}")
    if gradient.device_mesh != parameter.device_mesh:
        raise ValueError(
            f"{name}: a gradient on the parameter's mesh {parameter.device_mesh} is required, got one on "
            f"{gradient.device_mesh}"
        )
    return gradient.placements != parameter.placements


def _local_gradient(name: str, parameter: Tensor) -> Tensor | None:
    gradient = parameter.grad
    if not is_dtensor(gradient) or not is_dtensor(parameter):
        return gradient
    if gradient.placements == parameter.placements:
        return gradient.to_local()
    try:
        return gradient.redistribute(placements=parameter.placements).to_local()
    except Exception as error:
        raise DistributedError(
            f"{name}: the gradient could not be redistributed from {gradient.placements} to the parameter's placements "
            f"{parameter.placements}; ranks must do it together. Here: {type(error).__name__}: {error}"
        ) from error


def count_writes(gradient: Tensor) -> tuple[Tensor, int]:
    """(what this rank holds, number of writes) of a gradient; torch counts writes of a DTensor and of its local tensor
    apart, and none where gradients are made in inference mode."""
    own = local(gradient)
    return own, sum(x._version for x in (own, gradient) if not x.is_inference())


class BackwardGather:
    """Sends gradients to the owners of blocks while backward runs, those of a round as soon as it has all of them.

    All ranks begin rounds in the order in which they are computed: the last parameters first, because backward comes
    to them first. A gradient is complete when backward has written it as often as before the last step. What was
    written after it was sent, by clipping or one more micro-batch, is found when all ranks tell each other at the step,
    and sent again.

    comm_plan: the rounds of messages.
    parameters: those of the plan, by position, a list that may change.
    """

    def __init__(self, comm_plan: CommPlan, parameters: Sequence[Tensor]) -> None:
        self.comm_plan, self.parameters = comm_plan, parameters
        self._rank_group = comm_plan.rank_group.twin()
        self._positions = [sorted({one.block.position for one in flattened(own.sent)}) for own in comm_plan.rounds]
        self._writes, self._expected = [0] * len(parameters), [1] * len(parameters)
        self._works: dict[int, Work[Tensor]] = {}
        self._sent: dict[int, dict[int, tuple[Tensor | None, int]]] = {}
        self._late = 0
        self._watched: set[int] = set()
        self._watch()

    def _watch(self) -> None:
        """Has backward tell of every parameter that can have a gradient by now."""
        for position, parameter in enumerate(self.parameters):
            if parameter.requires_grad and position not in self._watched:
                hook = _hook(ref(self), position)
                parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
                self._watched.add(position)

    def note(self, position: int) -> None:
        """Hears that backward has written a gradient, and begins the rounds that are complete by now."""
        self._writes[position] += 1
        while self._next < len(self.comm_plan.rounds) and all(map(self._is_complete, self._positions[self._next])):
            self._begin()
        for work in self._works.values():
            if work.done():
                work.wait()  # frees what was sent

    @property
    def _next(self) -> int:
        """Number of the round that is begun next."""
        return len(self._works)

    def _is_complete(self, position: int) -> bool:
        if not self.parameters[position].requires_grad or not self._expected[position]:
            return True
        return self._writes[position] >= self._expected[position] and self._held(position) is not None

    def _held(self, position: int) -> Tensor | None:
        """What this rank holds of a gradient, if that is laid out as its parameter."""
        parameter, gradient = self.parameters[position], self.parameters[position].grad
        if is_dtensor(gradient) and is_dtensor(parameter):
            alike = (gradient.device_mesh, gradient.placements) == (parameter.device_mesh, parameter.placements)
            return local(gradient) if alike else None
        return None if is_dtensor(gradient) or is_dtensor(parameter) else gradient

    @torch.no_grad()
    def _begin(self) -> None:
        index = self._next
        self._sent[index] = {position: self._identify(position) for position in self._positions[index]}
        held = lambda position: read(self._held(position))  # noqa: E731
        self._works[index] = send_shards(self.comm_plan, index, "early gradients", held, self._rank_group)

    def tell(self) -> list[float]:
        """`[2 n]` for n rounds: whether each is begun here, and whether with gradients that were written since."""
        rounds = range(len(self.comm_plan.rounds))
        return [float(i in self._works) for i in rounds] + [float(self._is_stale(i)) for i in rounds]

    def _is_stale(self, index: int) -> bool:
        """Whether a gradient of a round was written or replaced after it was sent, or could not be sent."""
        for position, (then, before) in self._sent.get(index, {}).items():
            now, written = self._identify(position)
            if now is not then or written != before or (now is not None and self._held(position) is None):
                return True
        return False

    def _identify(self, position: int) -> tuple[Tensor | None, int]:
        """What changes if a gradient is written or replaced."""
        gradient = self.parameters[position].grad
        return (None, 0) if gradient is None else count_writes(gradient)

    @torch.no_grad()
    def settle(self, told: Sequence[float]) -> dict[int, Work[Tensor]]:
        """Messages under way that bring the gradients of this step to owners, by round; the others are ended.

        told: what `tell` gives, summed over all ranks, which all call this.
        """
        rounds, ranks = len(self.comm_plan.rounds), self.comm_plan.rank_group.size
        while self._next < rounds and told[self._next]:  # other ranks wait for it
            self._begin()
        good = {i: work for i, work in self._works.items() if told[i] == ranks and not told[rounds + i]}
        for index, work in self._works.items():
            if index not in good:
                work.wait()
            elif work.result.is_cuda:  # it was made on the stream of backward
                work.result.record_stream(torch.cuda.current_stream(work.result.device))
        self._late = self._late + 1 if len(good) < len(self._works) else 0
        if self._late == 2 and self.comm_plan.rank_group.rank == 0:
            warnings.warn(LATE, stacklevel=2)
        self._expected, self._writes = self._writes, [0] * len(self.parameters)
        self._works, self._sent = {}, {}
        self._watch()
        return good


LATE = (
    "distribution.overlap_backward: gradients were written in two steps after backward had sent them, and were sent "
    "again; what scales or clips gradients between backward and step() belongs into the recipe, or leave it off"
)


def _hook(gather: ref[BackwardGather], position: int) -> Callable[[Tensor], None]:
    """What torch calls after a gradient is written; nothing once the gather is gone."""

    def written(_: Tensor) -> None:
        found = gather()
        if found is not None:
            found.note(position)

    return written
