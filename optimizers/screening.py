"""Looking at gradients before anything uses them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .recipe import Failure


class Screen:
    """Finds gradients that are not finite, and keeps count of them.

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
        """(active `[P]` on the host, mask `[P]` on the device or None).

        Raises TypeError for sparse gradients, FloatingPointError if the recipe asks for it, both naming the parameter.
        """
        where = np.flatnonzero(present).tolist()
        found = [gradient for index in where if (gradient := gradients[index]) is not None]
        for index, gradient in zip(where, found, strict=True):
            if gradient.layout is not torch.strided:
                raise TypeError(f"{self.names[index]}: a dense gradient is required, got layout {gradient.layout}")
        if self.failure.nonfinite == "ignore":
            return present, None
        if not self._on_host(found[0]):
            return present, self._defer(where, _finite(torch._foreach_norm(found, float("inf"))), len(present))
        # a norm may overflow where every entry is finite: only then does it pay to look at all of them
        suspects = [k for k, fine in enumerate(_finite(torch._foreach_norm(found)).tolist()) if not fine]
        bad = [where[k] for k in suspects if not bool(found[k].isfinite().all())]
        self._count(bad)
        active = present.copy()
        active[bad] = False
        return active, None

    def settle(self) -> list[int]:
        """Parameters whose gradient, one step ago, turned out not to be finite."""
        if self._pending is None:
            return []
        where, finite, event = self._pending
        self._pending = None
        if event is not None:
            event.synchronize()
        bad = [index for index, good in zip(where, finite.tolist(), strict=True) if not good]
        self._count(bad)
        return bad

    def _on_host(self, like: Tensor) -> bool:
        return self.failure.detect == "host" or (self.failure.detect == "auto" and like.device.type == "cpu")

    def _defer(self, where: list[int], finite: Tensor, total: int) -> Tensor:
        event = None
        arrived = finite.to("cpu", non_blocking=True)
        if finite.device.type == "cuda":
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
        self._pending = (where, arrived, event)
        mask = torch.ones(total, dtype=torch.bool, device=finite.device)
        mask[torch.tensor(where, device=finite.device)] = finite
        return mask

    def _count(self, bad: list[int]) -> None:
        self.skipped.update(self.names[index] for index in bad)
        if bad and self.failure.nonfinite == "raise":
            names = ", ".join(self.names[index] for index in bad[:5])
            raise FloatingPointError(
                f"gradient of {names}: finite values are required, got inf or nan; nothing was changed"
            )


def _finite(norms: Sequence[Tensor]) -> Tensor:
    """Which of some 0-d tensors are finite, `[n]`."""
    # one kernel for norms of one dtype, however many they are
    alike = all(norm.dtype == norms[0].dtype for norm in norms)
    return torch.stack(list(norms) if alike else [norm.double() for norm in norms]).isfinite()
