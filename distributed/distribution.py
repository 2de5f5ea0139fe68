"""How an optimizer is divided over ranks: what a recipe says of it."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from eigengraft.component import Component


class Distribution(Component):
    """Every block has one owner, which holds its state and computes its update; the result is that of one process.

    auto: DTensors are exchanged on their own device mesh, plain parameters are taken to be replicated over all ranks of
    the default process group, if there is one with more than one rank. replicated, sharded: the same, but parameters of
    the other kind are refused. local: every rank is on its own, whatever the others do.
    """

    mode: Literal["auto", "replicated", "sharded", "local"] = Field(
        default="auto", description="who takes part: found from the parameters, one kind of them, or nobody"
    )
    dtype: Literal["exact", "bf16"] = Field(
        default="exact",
        description="what travels: gradients and updates as they are computed, or rounded to bfloat16",
    )
    bucket: int = Field(
        default=1 << 25,
        ge=1,
        description="bytes of updates that a rank puts into one message, which travels while the next is computed",
    )
    timeout: float | None = Field(
        default=None, gt=0, description="seconds to wait for other ranks on a CPU; default: the process group's"
    )
    work: dict[str, float] = Field(
        default={},
        description="measured milliseconds of a step of one block, by shape as '1024x256'; default: counted",
    )

    def measured(self, block: tuple[int, ...], counted: float) -> float:
        """The work of a step of one block: what was measured of its shape, else what was counted.

        Where some shapes are measured, counted operations become milliseconds at 10^8 a millisecond.
        """
        if not self.work:
            return counted
        return self.work.get("x".join(map(str, block)), counted / 1e8)
