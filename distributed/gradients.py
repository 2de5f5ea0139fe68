"""Gradients of several ranks: they are sent to the owners of their blocks during backward, and a rank that steps again
before backward has written new gradients is detected.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from weakref import ref

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from eigengraft.errors import warn_user
from eigengraft.numerics import is_dtensor, local

from .checks import Field, as_integers
from .comm_plan import CommPlan, pack_shards, reading, send_shards
from .rank_group import Work

BEGUN, CHANGED = "rounds begun in backward", "rounds begun with other gradients"
"""Names of the two fields (named numbers, summed over ranks) that `BackwardGather.report` returns. From the sums, ranks
decide which messages of backward a step may use."""


def count_writes(gradient: Tensor) -> tuple[Tensor, int]:
    """Return this rank's tensor of a gradient, and the number of writes to it.

    Torch counts writes to a DTensor and to its local tensor separately; this function returns their sum. Writes to a
    gradient that was made in inference mode are not counted.
    """
    own = local(gradient)
    return own, sum(x._version for x in (own, gradient) if not x.is_inference())


class UsedGradients:
    """Detects that a rank steps again before backward has written new gradients.

    parameters: the parameters that are shared with other ranks, as a list that the caller may change.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self.parameters = parameters
        self._used, self._now = list[tuple[ref[Tensor], int]](), list[tuple[ref[Tensor], int]]()
        self._times = 0

    def count(self) -> int:
        """Return how many steps have used the present gradients since the last write to any of them.

        Returns 0 if there are no gradients.
        """
        found = (count_writes(parameter.grad) for parameter in self.parameters if parameter.grad is not None)
        self._now = [(ref(gradient), writes) for gradient, writes in found]
        pairs = zip(self._used, self._now, strict=False)
        same = len(self._used) == len(self._now) and all(x() is y() and was == now for (x, was), (y, now) in pairs)
        self._times = self._times if same else 0
        return self._times

    def record_step(self) -> None:
        """Record that a step uses the gradients, so that the next call of `count` can detect that they are used again.

        The gradients are those of the last call of `count`.
        """
        self._times, self._used = self._times + 1, self._now


class BackwardGather:
    """Sends gradients to the owners of their blocks during backward.

    A round is a set of gradients that one collective sends. It is sent as soon as all of its gradients are complete.
    All ranks begin the rounds in the order of the plan. The plan begins with the last parameters, because backward
    computes their gradients first. A gradient is complete when backward has written it as many times as it did for the
    previous step.

    Between backward and step(), gradients may be written by clipping, a scaler, one more micro-batch or a hook. Torch
    does not count writes through `.data`, or writes of `torch._foreach_*` to DTensors. Therefore every message is kept
    until the step, where it is packed again from the present gradients and compared bit by bit. If any rank detects a
    difference, all ranks send the round again.

    comm_plan: the rounds of messages.
    parameters: the parameters of the plan, by position, as a list that the caller may change.
    """

    def __init__(self, comm_plan: CommPlan, parameters: Sequence[Tensor]) -> None:
        self.comm_plan, self.parameters = comm_plan, parameters
        self._rank_group = comm_plan.rank_group.duplicate()
        self._positions = [sorted({one.position for one in own.sent.transfers}) for own in comm_plan.rounds]
        self._writes, self._expected = [0] * len(parameters), [1] * len(parameters)
        self._messages: list[Tensor] = []
        self._works: list[Work[Tensor]] = []
        # The next message needs the gradients at `_positions[self._next]`; the first `_complete` of them are complete.
        self._complete = 0
        self._late = 0
        self._watched: dict[int, RemovableHandle] = {}
        self._watch()

    def _watch(self) -> None:
        """Register a hook on every parameter that requires a gradient and has no hook yet; backward calls the hooks."""
        for position, parameter in enumerate(self.parameters):
            if parameter.requires_grad and position not in self._watched:
                hook = _hook(ref(self), position)
                handle = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
                self._watched[position] = handle

    def close(self) -> None:
        """Remove the hooks, finish the communication that backward has begun, and give the process group back, so that
        a later `RankGroup.duplicate` can use it.

        All ranks call this method when they make other parameter sets. This object is not used afterwards.
        """
        for handle in self._watched.values():
            handle.remove()
        begun = self.comm_plan.rank_group.all_gather_object(self._next, "end of early gradients")
        while self._next < max(begun):
            self._begin()
        for work in self._works:
            work.wait()
        self._rank_group.give_back()

    def note(self, position: int) -> None:
        """Record that backward has written a gradient. Send each message (`Round`) whose gradients are now complete.

        position: position of the gradient's parameter.
        """
        self._writes[position] += 1
        while self._next < len(self.comm_plan.rounds):
            positions = self._positions[self._next]
            while self._complete < len(positions) and self._is_complete(positions[self._complete]):
                self._complete += 1
            if self._complete < len(positions):
                return
            self._begin()

    @property
    def _next(self) -> int:
        """Index of the next message (`Round`) to send."""
        return len(self._works)

    def _is_complete(self, position: int) -> bool:
        if not self.parameters[position].requires_grad or not self._expected[position]:
            return True
        return self._writes[position] >= self._expected[position] and self._held(position) is not None

    def _held(self, position: int) -> Tensor | None:
        """Return this rank's local tensor of a gradient.

        The result is None if there is no gradient, or if its layout (plain tensor, or mesh and placements) is not that
        of the parameter.

        position: position of the gradient's parameter.
        """
        parameter, gradient = self.parameters[position], self.parameters[position].grad
        if is_dtensor(gradient) and is_dtensor(parameter):
            alike = (gradient.device_mesh, gradient.placements) == (parameter.device_mesh, parameter.placements)
            return local(gradient) if alike else None
        return None if is_dtensor(gradient) or is_dtensor(parameter) else gradient

    def _hold(self, index: int) -> dict[int, Tensor | None]:
        """Return this rank's local tensor of each gradient of a round, by position of the parameter. None: there is no
        gradient, or its layout is not that of the parameter.

        index: index of the round.
        """
        return {position: self._held(position) for position in self._positions[index]}

    @torch.no_grad()
    def _begin(self) -> None:
        index, self._complete = self._next, 0
        message = pack_shards(self.comm_plan, index, reading(self._hold(index)))
        self._works.append(send_shards(self.comm_plan, index, "early gradients", message, self._rank_group))
        self._messages.append(message)

    @torch.no_grad()
    def report(self, device: torch.device) -> dict[str, Field]:
        """Return two fields `[n]` by name, which have a 1 (true) or a 0 (false) for each of the n rounds of a step.

        BEGUN: this rank has begun to send the message of the round.
        CHANGED: the message that this rank has sent differs from the present gradients.

        device: device of the field CHANGED.
        """
        begun, rounds = self._next, len(self.comm_plan.rounds)
        changed = torch.zeros(rounds, dtype=torch.float64, device=device)
        for index, message in enumerate(self._messages):
            held = self._hold(index)
            elsewhere = any(x is None and self.parameters[i].grad is not None for i, x in held.items())
            changed[index] = True if elsewhere else differ(message, pack_shards(self.comm_plan, index, reading(held)))
        return {BEGUN: [1.0] * begun + [0.0] * (rounds - begun), CHANGED: changed}

    @torch.no_grad()
    def finish(self, sums: Mapping[str, Tensor]) -> dict[int, Work[Tensor]]:
        """Finish the communication that backward has begun. Return the messages that the step may use, by round.

        These are the messages that all ranks have begun to send and whose gradients have not changed since. All ranks
        call this function.

        sums: the fields that `report` returns, summed over all ranks.
        """
        begun, changed = torch.stack([sums[BEGUN], sums[CHANGED]]).tolist()
        # another rank has begun to send this message, and waits for this rank
        while self._next < len(begun) and begun[self._next]:
            self._begin()
        ranks = self.comm_plan.rank_group.size
        good = {i: work for i, work in enumerate(self._works) if begun[i] == ranks and not changed[i]}
        for index, work in enumerate(self._works):
            if index not in good:
                work.wait()
            elif work.result.is_cuda:  # the result was made on the stream of backward, and is read on this stream
                work.result.record_stream(torch.cuda.current_stream(work.result.device))
        self._late = self._late + 1 if len(good) < len(self._works) else 0
        if self._late == 2 and self.comm_plan.rank_group.rank == 0:
            warn_user(LATE)
        self._expected, self._writes = self._writes, [0] * len(self.parameters)
        self._works, self._messages, self._complete = [], [], 0
        self._watch()
        return good


def differ(message: Tensor, now: Tensor) -> Tensor | bool:
    """Return True if two messages of equal length and dtype differ in any bit.

    On a device the result is a 0-d bool tensor, so that the host does not wait.

    message: the message that was sent during backward.
    now: the message packed from the present gradients.
    """
    one, other = as_integers(message), as_integers(now)
    if one.device.type == "cpu":
        return not torch.equal(one, other)
    # the message was made on the stream of backward: its memory must not be used again before this stream has read it
    if message.is_cuda:
        message.record_stream(torch.cuda.current_stream(message.device))
    return (one != other).any()


LATE = (
    "distribution.overlap_backward: in two steps gradients were changed after backward had sent them, and were sent "
    "again, so that no time is saved; clip gradients by the recipe, not between backward and step(), or turn "
    "overlap_backward off"
)
"""Text of the warning about gradients that were changed after they had been sent."""


def _hook(gather: ref[BackwardGather], position: int) -> Callable[[Tensor], None]:
    """Return the hook that torch calls after a gradient is written. The hook calls `BackwardGather.note`.

    The hook does nothing after the `BackwardGather` has been deleted.

    gather: weak reference to the `BackwardGather`.
    position: position of the gradient's parameter.
    """

    def written(_: Tensor) -> None:
        found = gather()
        if found is not None:
            found.note(position)

    return written
