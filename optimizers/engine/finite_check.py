"""Looking at gradients before anything uses them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from eigengraft.numerics import compute_dtype

from ..recipe.recipe import Failure

if TYPE_CHECKING:
    from ..sharding.rank_sync import RankSync


class Screen:
    """Finds gradients with inf or nan, or too large to be squared in the dtype of the state, and keeps count of them.

    On the host the answer is known at once. On a device it stays there as a mask, and the count is read one step later,
    when it has long arrived, so that nobody waits.
    """

    def __init__(self, failure: Failure, names: Sequence[str]) -> None:
        self.failure, self.names = failure, list(names)
        self.skipped: Counter[str] = Counter()
        self._pending: tuple[list[int], Tensor, torch.cuda.Event | None] | None = None

    def look(
        self, gradients: Sequence[Tensor | None], present: NDArray[np.bool_]
    ) -> tuple[NDArray[np.bool_], Tensor | None]:
        """(active `[P]` on the host, mask `[P]` on the device or None). Changes nothing but the count.

        Raises TypeError for sparse gradients, FloatingPointError if the recipe asks for it, both naming the parameter.
        """
        where = np.flatnonzero(present).tolist()
        found = [gradient for index in where if (gradient := gradients[index]) is not None]
        self._require_dense(gradients)
        if self.failure.nonfinite == "ignore":
            return present, None
        return self._judge(where, _usable(found), present)

    def look_together(
        self, gradients: Sequence[Tensor | None], present: NDArray[np.bool_], rank_sync: RankSync, lr: float | Tensor
    ) -> tuple[NDArray[np.bool_], Tensor | None]:
        """As `look`, for the parts of gradients on all ranks that placement the parameters: all of them get one answer.

        Also raises what `RankSync` finds. Every rank must call it, whatever it has. With lr 0 and no gradient but
        zeros nothing is active: somebody only wants to see the state.
        """
        self._require_dense(gradients)
        squares, absent = rank_sync.look(gradients)
        host = self._on_host(squares)
        if host:
            counts = absent.tolist()
            rank_sync.require_presence(counts)
            present = np.array([count == 0 for count in counts]) & present
        if isinstance(lr, float) and lr == 0 and not bool(squares.any()):
            return np.zeros_like(present), None
        usable = rank_sync.finite(squares) if self.failure.nonfinite != "ignore" else torch.ones_like(squares) > 0
        where = np.flatnonzero(present).tolist()
        usable = usable & (absent == 0)
        return self._judge(where, usable[torch.tensor(where, dtype=torch.int64, device=usable.device)], present)

    def _judge(
        self, where: list[int], usable: Tensor, present: NDArray[np.bool_]
    ) -> tuple[NDArray[np.bool_], Tensor | None]:
        if not self._on_host(usable):
            return present, self._defer(where, usable, len(present))
        bad = [index for index, good in zip(where, usable.tolist(), strict=True) if not good]
        self.skipped.update(self.names[index] for index in bad)
        self.complain(bad, "nothing was changed")
        active = present.copy()
        active[bad] = False
        return active, None

    def _require_dense(self, gradients: Sequence[Tensor | None]) -> None:
        for name, gradient in zip(self.names, gradients, strict=True):
            if gradient is not None and gradient.layout is not torch.strided:
                raise TypeError(f"{name}: a dense gradient is required, got layout {gradient.layout}")

    def settle(self) -> list[int]:
        """Parameters whose gradient, one step ago, turned out to be unusable; they are counted."""
        if self._pending is None:
            return []
        where, usable, event = self._pending
        self._pending = None
        if event is not None:
            event.synchronize()
        bad = [index for index, good in zip(where, usable.tolist(), strict=True) if not good]
        self.skipped.update(self.names[index] for index in bad)
        return bad

    def complain(self, bad: Sequence[int], outcome: str) -> None:
        """Raises for unusable gradients if the recipe says so."""
        if bad and self.failure.nonfinite == "raise":
            names = ", ".join(self.names[index] for index in bad[:5])
            raise FloatingPointError(
                f"gradient of {names}: finite values are required (their squares too), got others; {outcome}"
            )

    def _on_host(self, like: Tensor) -> bool:
        return self.failure.detect == "host" or (self.failure.detect == "auto" and like.device.type == "cpu")

    def _defer(self, where: list[int], usable: Tensor, total: int) -> Tensor:
        event = None
        arrived = usable.to("cpu", non_blocking=True)
        if usable.device.type == "cuda":
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
        self._pending = (where, arrived, event)
        mask = torch.ones(total, dtype=torch.bool, device=usable.device)
        mask[torch.tensor(where, device=usable.device)] = usable
        return mask


def _usable(gradients: list[Tensor]) -> Tensor:
    """Which gradients have a finite sum of squares in the dtype they are computed in, `[n]`, in a few kernels."""
    dtypes = [compute_dtype(gradient.dtype) for gradient in gradients]
    usable: list[Tensor] = [torch.empty(0)] * len(gradients)
    for dtype in dict.fromkeys(dtypes):
        places = [place for place, own in enumerate(dtypes) if own == dtype]
        norms = torch.stack(torch._foreach_norm([gradients[place] for place in places], 2, dtype=dtype))
        for place, good in zip(places, norms.square().isfinite().unbind(0), strict=True):
            usable[place] = good
    return torch.stack(usable)
