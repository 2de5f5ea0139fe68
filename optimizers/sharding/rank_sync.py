"""What the parameters of a parameter set need of other ranks, beside the exchange of blocks: agreement, and norms."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from eigengraft.distributed.comm_plan import CommPlan
from eigengraft.distributed.rank_group import DistributedError
from eigengraft.numerics import compute_dtype

from ..recipe.recipe import Failure
from .assignment import Assignment


class RankSync:
    """Parameters by position, P of them. failed: those whose roots have failed here too often, told to all next."""

    def __init__(
        self,
        assignment: Assignment,
        comm_plan: CommPlan,
        parameters: Sequence[Tensor],
        names: Sequence[str],
        failure: Failure,
    ) -> None:
        self.failure = failure
        self.assignment, self.comm_plan, self.rank_group, self.names = (
            assignment,
            comm_plan,
            assignment.rank_group,
            names,
        )
        placements = [assignment.placements[id(parameter)] for parameter in parameters]
        self.copies = torch.tensor([float(placement.layout.copies) for placement in placements], dtype=torch.float64)
        self.dtypes = [compute_dtype(parameter.dtype) for parameter in parameters]
        self.layouts = [placement.layout for placement in placements]
        self.failed: set[int] = set()
        self._mesh: DeviceMesh | None = None
        self._told: tuple[Tensor, torch.cuda.Event | None] | None = None

    def mesh(self, device: torch.device) -> DeviceMesh:
        """The ranks in one row."""
        if self._mesh is None:
            self._mesh = DeviceMesh.from_group(self.rank_group.group, device.type)
        return self._mesh

    def look(self, parts: Sequence[Tensor | None]) -> tuple[Tensor, Tensor]:
        """(sum of squares of each whole gradient, how many ranks have none), both `[P]` float64 on the device.

        Raises ArithmeticError on every rank if on one of them roots had failed too often a step ago; on a device that
        is read one step later still, so that nobody waits.
        """
        self._complain()
        total = len(parts)
        device = next((part.device for part in parts if part is not None), self._device)
        absent = [float(part is None) for part in parts]
        failed = [float(position in self.failed) for position in range(total)]
        self.failed.clear()
        self.copies = self.copies.to(device)
        squares = self._squares(parts, device) / self.copies
        found = torch.cat([squares, torch.tensor([*absent, *failed], dtype=torch.float64).to(device)])
        self.rank_group.all_reduce(found, f"agreement on gradients ({self.names[0]} and {total - 1} more)")
        event = None
        told = found[2 * total :].to("cpu", non_blocking=True)
        if device.type == "cuda":
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
        self._told = (told, event)
        if device.type == "cpu":
            self._complain()
        return found[:total], found[total : 2 * total]

    def _complain(self) -> None:
        """Raises for roots that some rank has reported."""
        if self._told is None:
            return
        told, event = self._told
        self._told = None
        if event is not None:
            event.synchronize()
        bad = torch.nonzero(told).flatten().tolist()
        if bad:
            raise failed_roots("update", self.failure.roots, [self.names[position] for position in bad])

    def require_presence(self, absent: Sequence[float]) -> None:
        """Raises DistributedError if a parameter has a gradient on some ranks only; absent `[P]`: ranks without."""
        some = [self.names[p] for p, count in enumerate(absent) if 0 < count < self.rank_group.size]
        if some:
            raise DistributedError(
                f"gradients: all ranks or none must have one of a parameter, got some ranks for {', '.join(some[:5])}"
                f"{f' and {len(some) - 5} more' if len(some) > 5 else ''}; nothing was changed"
            )

    def finite(self, squares: Tensor) -> Tensor:
        """Which gradients have a finite sum of squares in the dtype they are computed in, `[P]`."""
        if len(set(self.dtypes)) == 1:
            return squares.to(self.dtypes[0]).isfinite()
        return torch.stack(
            [one.to(dtype).isfinite() for one, dtype in zip(squares.unbind(0), self.dtypes, strict=True)]
        )

    def rms(self, parts: Sequence[Tensor]) -> Tensor:
        """The root mean square of each whole parameter, `[P]`."""
        squares = self._squares(parts, parts[0].device) / self.copies.to(parts[0].device)
        self.rank_group.all_reduce(squares, "norms of parameters")
        sizes = torch.tensor([float(math.prod(layout.shape)) for layout in self.layouts], dtype=torch.float64)
        return (squares / sizes.to(squares)).sqrt()

    def _squares(self, parts: Sequence[Tensor | None], device: torch.device) -> Tensor:
        squares = torch.zeros(len(parts), dtype=torch.float64, device=device)
        here = [(position, part) for position, part in enumerate(parts) if part is not None and part.numel()]
        for dtype in dict.fromkeys(self.dtypes[position] for position, _ in here):
            own = [(position, part) for position, part in here if self.dtypes[position] == dtype]
            norms = torch.stack(torch._foreach_norm([part for _, part in own], 2, dtype=dtype)).square()
            squares[torch.tensor([position for position, _ in own], device=device)] = norms.double()
        return squares

    @property
    def _device(self) -> torch.device:
        return next((block_group.device for block_group in self.comm_plan.block_groups), torch.device("cpu"))


def failed_roots(path: str, tolerated: int, names: Sequence[str]) -> ArithmeticError:
    """The error of roots that failed too often."""
    return ArithmeticError(
        f"{path}: at most {tolerated} failed roots in a row are tolerated (failure.roots), got more for "
        f"{', '.join(names[:5])}; a larger ridge or a lower lr may help"
    )
